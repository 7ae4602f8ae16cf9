"""The page of runs: epsilon, guarantees, and those that are void."""

import pytest
from report_page import descriptions, leave_card, written

from flwr_privacy.errors import DataError
from flwr_privacy.simulations.reports import report
from flwr_privacy.simulations.reports.report import write_report


def spend(*epsilons):
    """Return lines of rounds, the first of them round 0, with these epsilons."""
    return [{"scheme": {"epsilon": x}, "train": {"sigma": 0.5}} for x in epsilons]


class TestPrivacy:
    LINES = spend(0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.5)

    @pytest.fixture(autouse=True)
    def few_sections(self, monkeypatch):
        kept = (report.void_guarantees, report.table_of_runs, report.privacy)  # the rest is slow
        monkeypatch.setattr(report, "SECTIONS", kept)

    def udp(self, make, name="private", *, budget=8.0, **more):
        settings = {"scheme": "udp", "strategy.epsilon": budget, "more": self.LINES}
        return make(name, **{**settings, **more})

    def test_accuracy_over_epsilon_says_what_epsilon_means(self, make, tmp_path):
        loose = leave_card(self.udp(make), spent=6.5)
        tight = leave_card(self.udp(make, "b", budget=2.0, rounds=2), spent=2.0, epsilon=2.0)
        plain = leave_card(make("plain", rounds=4))
        page, _ = written([plain, loose, tight], tmp_path / "out")
        (drawn,) = [text for text in descriptions(page) if "Epsilon" in text]
        assert drawn == (
            "Accuracy over Epsilon spent: udp, epsilon 8.0, udp, epsilon 2.0, "
            "best without privacy: 0.9375. unit: one record of a client; delta 1e-05. "
            "neighbours: one record differs (replace_one). adversary: the server"
        )
        assert "The dotted line is the final accuracy of fedavg." in page.text

    def test_the_table_has_guarantee_spending_and_accuracy(self, make, tmp_path):
        loose = leave_card(self.udp(make), spent=6.5)
        page, _ = written([loose, leave_card(make("plain"))], tmp_path / "out")
        row = "udp, epsilon 8.0 one record of a client the server yes 8 1e-05 6.5 2 1 0.5 0.9844"
        assert row in page.text
        dash = "\N{EN DASH}"
        assert f"fedavg nothing nobody {' '.join([dash] * 7)} 0.9844" in page.text

    def test_the_guarantee_is_there_in_full_and_can_be_checked(self, make, tmp_path):
        loose = leave_card(self.udp(make), spent=6.5)
        tight = leave_card(self.udp(make, "b", budget=2.0), spent=2.0, epsilon=2.0)
        page, table = written([loose, tight, leave_card(make("plain"))], tmp_path / "out")
        for epsilon, spent in (("8", "6.5"), ("2", "2")):
            assert (
                "udp protects one record of a client against the server: "
                f"({epsilon}, 1e-05)-differential privacy over the whole training, for data sets "
                f"where one record differs. Spent so far: epsilon {spent} (gdp)."
            ) in page.text
        limits = "Not protected the time of day Assumed clocks are right Checked by tests/clock"
        assert page.text.count(limits) == 1  # the same for both budgets
        assert "fedavg protects nothing." in page.text
        assert "flwr-privacy verify RUN" in page.text
        assert table["runs"][0]["guarantee"]["spent"] == 6.5

    def test_units_and_tasks_are_never_in_one_figure(self, make, tmp_path):
        runs = [
            leave_card(self.udp(make), spent=6.5),
            leave_card(self.udp(make, "user"), spent=6.5, protects="all data of a client"),
            leave_card(self.udp(make, "weaker"), spent=6.5, adversary="the other clients"),
            leave_card(self.udp(make, "mnist", task="mnist-mlp"), spent=6.5),
        ]
        page, _ = written(runs, tmp_path / "out")
        drawn = [text for text in descriptions(page) if "Epsilon" in text]
        assert len(drawn) == len(set(drawn)) == 4
        assert not any("best without privacy" in text for text in drawn)

    def test_the_best_run_without_privacy_is_a_whole_one_on_the_same_task(self, make, tmp_path):
        runs = [
            leave_card(self.udp(make), spent=6.5),
            make("broken", rounds=1, status="interrupted"),
            make("other", rounds=3, task="mnist-mlp"),
            make("good", rounds=2, seed=1),
            make("better", rounds=3, seed=2),
        ]
        page, _ = written(runs, tmp_path / "out")
        (drawn,) = [text for text in descriptions(page) if "Epsilon" in text]
        assert "best without privacy: 0.8750." in drawn
        assert "final accuracy of digits-mlp: fedavg, seed 2." in page.text
        page, _ = written(runs[:3], tmp_path / "none")
        assert "best without privacy" not in page.source

    def test_a_void_guarantee_is_called_void_wherever_the_run_is_named(self, make, tmp_path):
        run = leave_card(self.udp(make), spent=6.5, void="the noise came from a seed")
        page, _ = written([run, leave_card(make("plain"))], tmp_path / "out")
        name = "udp, epsilon 8.0"
        assert f"VOID The guarantee of {name} does not hold: the noise came from a" in page.text
        assert f"{name} VOID completed" in page.text
        assert "Protects Against Guarantee valid Epsilon guaranteed" in page.text
        assert f"{name} VOID one record of a client the server VOID 8 1e-05" in page.text
        assert "VOID: the noise came from a seed. Without that: udp protects" in page.text
        (drawn,) = [text for text in descriptions(page) if "Epsilon" in text]
        assert drawn.endswith(f". VOID: no protection by {name}")
        whole, _ = written([leave_card(self.udp(make, "b"), spent=6.5)], tmp_path / "whole")
        assert "VOID" not in whole.text

    def test_a_run_that_goes_on_shows_what_it_spent_so_far(self, make, tmp_path):
        run = leave_card(self.udp(make, rounds=2, status="created"), spent=2.0)
        page, _ = written([run], tmp_path / "out")
        assert "Spent so far: epsilon 2 (gdp)." in page.text
        run.card_path.unlink()  # before the first round has ended
        page, _ = written([run], tmp_path / "out")
        assert "Privacy" not in page.texts

    @pytest.mark.parametrize("lines", [[], spend(0.0), spend(*[None] * 7), spend(0.0, None)])
    def test_without_an_epsilon_above_zero_there_is_no_figure(self, make, tmp_path, lines):
        run = leave_card(self.udp(make, more=lines), spent=0.0)
        page, _ = written([run], tmp_path / "out")
        assert page.figures == 0
        assert "Privacy" in page.texts

    def test_a_round_whose_epsilon_is_not_finite_is_left_out(self, make, tmp_path):
        run = leave_card(self.udp(make, more=spend(0.0, 1.0, None, 3.0)), spent=3.0)
        page, _ = written([run], tmp_path / "out")
        assert page.figures == 1

    def test_a_damaged_card_is_named(self, make, tmp_path):
        run = leave_card(self.udp(make), spent=6.5)
        run.card_path.write_text(run.card_path.read_text()[:-9])
        with pytest.raises(DataError, match=r"private.privacy-card\.json: no privacy card"):
            write_report([run], tmp_path / "out")
