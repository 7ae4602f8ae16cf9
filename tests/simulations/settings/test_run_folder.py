import json
import os
import subprocess
import sys

import pytest
from metrics_lines import line

from flwr_privacy.errors import AllRefusedError, DataError, EngineError, InvalidParameterError
from flwr_privacy.simulations.settings import run_folder as runs
from flwr_privacy.simulations.settings.run_folder import RunFolder, kept
from flwr_privacy.simulations.settings.run_settings import Settings
from flwr_privacy.strategies.state.history import History

FIRST = {"round": 0, "rounds": 5, "server": {"accuracy": 0.1}, "seconds": 0.1}


class TestCreate:
    def test_holds_what_it_was_told(self, tmp_path):
        settings = Settings(task="mnist-mlp", strategy={"bits": [4, 8]})
        path = tmp_path / "deep" / "run"
        made = RunFolder.create(path, settings, engine="ray", nodes=7, experiment_id="e1")
        opened = RunFolder.open(str(path))
        assert opened == made
        assert opened.settings == settings
        assert opened.rounds() == []
        summary = opened.summary
        assert summary["status"] == "created"
        assert (summary["engine"], summary["nodes"], summary["experiment_id"]) == ("ray", 7, "e1")
        assert summary["finished"] is summary["error"] is None
        assert {"flwr-privacy", "flwr", "python", "numpy"} <= set(summary["versions"])
        assert summary["started"].endswith("+00:00")

    def test_gives_each_run_an_experiment_of_its_own(self, create):
        first, second = create("a"), create("b")
        assert first.summary["experiment_id"] != second.summary["experiment_id"]

    def test_refuses_a_folder_that_holds_a_run(self, run):
        run.append(line(1))
        with pytest.raises(InvalidParameterError, match="holds no run yet") as caught:
            RunFolder.create(run.path, Settings(rounds=9), engine="inline", nodes=4)
        assert str(run.path) in str(caught.value)
        assert run.settings == Settings()
        assert len(run.rounds()) == 1

    def test_takes_a_folder_that_holds_something_else(self, tmp_path):
        (tmp_path / "notes.txt").write_text("hello")
        RunFolder.create(tmp_path, Settings(), engine="inline", nodes=1)
        assert (tmp_path / "notes.txt").read_text() == "hello"

    @pytest.mark.parametrize("below", [".", "run"])
    def test_names_a_place_that_cannot_be_written(self, tmp_path, below):
        file = tmp_path / "file"
        file.write_text("")
        with pytest.raises(InvalidParameterError, match=r"run folder = .*file"):
            RunFolder.create(file / below, Settings(), engine="inline", nodes=1)

    @pytest.mark.parametrize(("engine", "nodes"), [("cloud", 1), ("ray", 0)])
    def test_checks_values_before_it_writes(self, tmp_path, engine, nodes):
        with pytest.raises(InvalidParameterError, match=r"engine|nodes"):
            RunFolder.create(tmp_path / "run", Settings(), engine=engine, nodes=nodes)
        assert not (tmp_path / "run").exists()


class TestOpen:
    def test_names_what_is_missing(self, run):
        run.summary_path.unlink()
        with pytest.raises(InvalidParameterError, match=r"has no summary\.json\)"):
            RunFolder.open(run.path)
        run.settings_path.unlink()
        with pytest.raises(InvalidParameterError, match=r"no settings\.toml and no summary"):
            RunFolder.open(run.path)
        with pytest.raises(InvalidParameterError, match="a folder that exists"):
            RunFolder.open(run.path / "nowhere")

    @pytest.mark.parametrize("text", ["{", "[]", '{"status": "fine"}', "\xff"])
    def test_names_a_damaged_summary(self, run, text):
        run.summary_path.write_bytes(text.encode("latin-1"))
        with pytest.raises(DataError, match=r"summary\.json"):
            _ = run.summary


class TestSummary:
    def test_finish(self, run):
        run.update(versions={"flwr": "1"})
        run.finish("failed", error="no room")
        summary = run.summary
        assert (summary["status"], summary["error"]) == ("failed", "no room")
        assert summary["finished"] >= summary["started"]
        assert summary["versions"] == {"flwr": "1"}
        with pytest.raises(InvalidParameterError, match="status"):
            run.finish("running")

    def test_is_replaced_as_a_whole(self, run, monkeypatch):
        before = run.summary

        def fails(source, target):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(runs.os, "replace", fails)
        with pytest.raises(InvalidParameterError, match="No space left"):
            run.finish("completed")
        assert run.summary == before
        names = {path.name for path in run.path.iterdir()}
        assert names == {"settings.toml", "summary.json", "metrics.jsonl"}


class TestStatus:
    def test_of_a_run_by_hand_is_written_by_its_server(self, run):
        with run.served():
            assert run.summary["status"] == "running"
        assert run.summary["status"] == "completed"

    def test_names_what_ended_the_server(self, run):
        with pytest.raises(MemoryError), run.served():
            raise MemoryError("no room")
        assert run.summary["status"] == "failed"
        assert run.summary["error"] == "MemoryError: no room"
        with run.served():  # a resume
            assert run.summary["error"] is run.summary["finished"] is None

    def test_is_interrupted_where_the_server_was_killed(self, run):
        code = (
            "import sys, time\n"
            "from flwr_privacy.simulations.settings.run_folder import RunFolder\n"
            "with RunFolder.open(sys.argv[1]).served():\n"
            "    print('served', flush=True)\n"
            "    time.sleep(600)\n"
        )
        server = subprocess.Popen(
            [sys.executable, "-c", code, str(run.path)], stdout=subprocess.PIPE, text=True
        )
        try:
            assert server.stdout.readline() == "served\n"
            assert run.summary["status"] == "running"
        finally:
            server.kill()
            server.wait()
        assert run.summary["status"] == "interrupted"
        assert json.loads(run.summary_path.read_text())["status"] == "running"

    def test_stays_with_the_one_server_that_trains(self, run, monkeypatch):
        monkeypatch.setattr(runs, "LOCK_TIMEOUT", 0.1)
        with run.served():
            with pytest.raises(InvalidParameterError, match="nobody is carrying out"), run.served():
                pass
            assert run.summary["status"] == "running"

    def test_of_a_reader_without_rights_is_as_written(self, run, monkeypatch):
        with run.served():
            pass
        run.update(status="running")

        def denied(path, *, timeout):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(runs, "exclusive_lock", denied)
        assert run.summary["status"] == "running"


def test_the_rounds_can_be_read_by_their_owner_alone(tmp_path):
    before = os.umask(0)
    try:
        run = RunFolder.create(tmp_path / "run", Settings(), engine="inline", nodes=4)
        created = run.metrics_path.stat().st_mode
        history = History(run.metrics_path)
        history.restart("")
        restarted = run.metrics_path.stat().st_mode
        run.metrics_path.unlink()
        history.add(line(1))
        added = run.metrics_path.stat().st_mode
        run.metrics_path.unlink()
        run.reopen()
        reopened = run.metrics_path.stat().st_mode
    finally:
        os.umask(before)
    assert {oct(mode & 0o777) for mode in (created, restarted, added, reopened)} == {"0o600"}


class TestRounds:
    def test_add_up_bytes(self, run):
        for one in (FIRST, line(1), line(2, bytes_up=7)):
            run.append(one)
        rounds = run.rounds()
        assert [one["round"] for one in rounds] == [0, 1, 2]
        assert [one["total_bytes_down"] for one in rounds] == [0, 400, 800]
        assert [one["total_bytes_up"] for one in rounds] == [0, 100, 107]
        assert [one["total_bytes"] for one in rounds] == [0, 500, 907]

    def test_bear_keys_of_later_versions(self, run):
        run.append(line(1, colour="green", server=None))
        assert run.rounds()[0]["colour"] == "green"

    def test_drop_a_last_line_cut_anywhere(self, run):
        run.append(line(1))
        whole = run.metrics_path.read_bytes()
        second = json.dumps(line(2, note="ü"), ensure_ascii=False).encode()
        for cut in range(len(second)):
            run.metrics_path.write_bytes(whole + second[:cut])
            assert [one["round"] for one in run.rounds()] == [1], cut
        run.metrics_path.write_bytes(whole + second)  # all but the end of the line
        assert [one["round"] for one in run.rounds()] == [1, 2]

    @pytest.mark.parametrize(
        "damaged",
        [
            *("{", "", "[1]", '{"rounds": 3}', '{"round": "2"}'),
            *('{"round": 2, "late": "no"}', '{"round": 2, "server": 3}'),
            '{"round": 2, "server": {"loss": "low"}}',
        ],
    )
    def test_name_file_and_line_of_damage(self, run, damaged):
        good = json.dumps(line(1))
        run.metrics_path.write_text(f"{good}\n{damaged}\n{good}\n")
        with pytest.raises(DataError, match=r"metrics\.jsonl, line 2: "):
            run.rounds()

    def test_take_the_new_lines_of_a_resumed_run(self, run):
        for number in (1, 2, 3):
            run.append(line(number, note="old"))
        for number in (2, 3, 4):
            run.append(line(number, note="new"))
        assert [(one["round"], one["note"]) for one in run.rounds()] == [
            *((1, "old"), (2, "new"), (3, "new"), (4, "new"))
        ]
        assert run.rounds()[-1]["total_bytes_down"] == 1600

    @pytest.mark.parametrize("tail", ["", '{"round": 2, "la', json.dumps(line(2))])
    def test_go_on_after_reopen(self, run, tail):
        run.append(line(1))
        run.finish("interrupted", error="killed")
        with run.metrics_path.open("a") as file:
            file.write(tail)
        with run.alone():
            run.reopen()
            assert run.summary["status"] == "running"
        run.append(line(3))
        assert [one["round"] for one in run.rounds()] == ([1, 2, 3] if tail[-1:] == "}" else [1, 3])
        assert run.summary["error"] is run.summary["finished"] is None


def test_an_engine_ends_with_the_exit_code_of_the_app(tmp_path):
    """The app fails in a process of its own; what waits for it knows only that it failed."""
    run = RunFolder.create(tmp_path / "run", Settings(), engine="ray", nodes=2)
    refused = {"round": 1, "asked": 2, "refused": {"declined": 2}}
    with pytest.raises(AllRefusedError), kept(run):
        raise AllRefusedError([refused])
    with pytest.raises(EngineError) as failed, kept(run):
        raise EngineError("the app failed")
    assert failed.value.exit_code == 12
    run.begin()
    with pytest.raises(EngineError) as failed, kept(run):
        raise EngineError("Ray ended")
    assert failed.value.exit_code == EngineError.exit_code == 4


@pytest.mark.parametrize(
    ("ending", "status", "error"),
    [
        (SystemExit(0), "interrupted", None),  # what `flwr stop` comes to
        (KeyboardInterrupt(), "interrupted", None),
        (SystemExit(3), "failed", "SystemExit: 3"),
    ],
)
def test_a_run_that_was_stopped_did_not_fail(tmp_path, ending, status, error):
    run = RunFolder.create(tmp_path / "run", Settings(), engine="deployed", nodes=2)
    with pytest.raises(type(ending)), kept(run):
        raise ending
    assert (run.summary["status"], run.summary["error"]) == (status, error)
