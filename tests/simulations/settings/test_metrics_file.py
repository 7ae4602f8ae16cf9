import json
import math
import threading
import time

import pytest
from metrics_lines import line

from flwr_privacy.errors import DataError
from flwr_privacy.simulations.settings.metrics_file import follow, score


class TestFollow:
    def test_yields_lines_as_they_come(self, run):
        done = threading.Event()
        text = "".join(json.dumps(line(number)) + "\n" for number in range(1, 6))

        def write():
            with run.metrics_path.open("a") as file:
                for start in range(0, len(text), 97):  # in pieces that are no lines
                    file.write(text[start : start + 97])
                    file.flush()
                    time.sleep(0.01)
            done.set()

        writer = threading.Thread(target=write)
        writer.start()
        seen = [one["round"] for one in follow(run.metrics_path, done.is_set)]
        writer.join()
        assert seen == [1, 2, 3, 4, 5]

    def test_yields_what_is_there_before_the_run_is_over(self, run):
        run.append(line(1))
        lines = follow(run.metrics_path, lambda: False)
        assert next(lines)["round"] == 1
        run.append(line(2))
        assert next(lines)["round"] == 2

    def test_bears_no_file_and_a_cut_end(self, tmp_path, run):
        assert list(follow(tmp_path / "nothing", lambda: True)) == []
        run.append(line(1))
        with run.metrics_path.open("a") as file:
            file.write('{"round": 2')
        assert [one["round"] for one in follow(run.metrics_path, lambda: True)] == [1]

    def test_starts_again_when_a_resumed_run_replaces_the_file(self, run):
        for number in (1, 2, 3):
            run.append(line(number))
        lines = follow(run.metrics_path, lambda: False)
        assert [next(lines)["round"] for _ in range(3)] == [1, 2, 3]
        beside = run.path / "metrics.new"
        beside.write_text(json.dumps(line(1)) + "\n")
        beside.replace(run.metrics_path)
        run.append(line(2, note="again"))
        assert [next(lines).get("note") for _ in range(2)] == [None, "again"]

    def test_names_damage(self, run):
        run.metrics_path.write_text("no\n")
        with pytest.raises(DataError, match="line 1"):
            list(follow(run.metrics_path, lambda: True))


def test_score_bears_what_is_missing():
    assert score({"round": 1}, "accuracy") is None
    assert score({"round": 1, "server": None, "evaluate": {}}, "accuracy") is None
    assert math.isnan(score({"round": 1, "server": {"loss": None}}, "loss"))
    assert score({"round": 1, "server": {"accuracy": 1}}, "accuracy") == 1.0
