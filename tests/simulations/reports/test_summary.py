"""The top of the page of runs: one sentence, one chart and at most five rows."""

import re

import pytest
from apps import message_app, run_strategy
from report_page import descriptions, leave_card, written

from flwr_privacy.clients import UDPClient, as_mod
from flwr_privacy.privacy.card.folder import newest_card
from flwr_privacy.simulations.reports import report
from flwr_privacy.simulations.settings.card_run import opened
from flwr_privacy.strategies import UDP, LoopOptions, UserLevel

LINES = [{"scheme": {"epsilon": x}} for x in (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.5)]
ALL = report.SECTIONS


@pytest.fixture(autouse=True)
def the_top_alone(monkeypatch):
    monkeypatch.setattr(report, "SECTIONS", (report.summary, report.privacy))  # the rest is slow


def udp(make, name, **more):
    return make(name, **{"scheme": "udp", "strategy.epsilon": 8.0, "more": LINES, **more})


def headings(page):
    table = page.source[page.source.index("<table>") :]
    return re.findall(r'<th scope="col"[^>]*>([^<]*)</th>', table[: table.index("</table>")])


def test_a_sentence_says_what_privacy_costs(make, tmp_path):
    runs = [leave_card(udp(make, "a", rounds=3), spent=6.5), leave_card(make("plain"))]
    page, _ = written(runs, tmp_path / "out")
    assert (
        "With epsilon 6.5 (one record differs) udp, epsilon 8.0 reaches accuracy 0.8750 on "
        "digits-mlp, without privacy 0.9844."
    ) in page.text
    chart = descriptions(page)[0]
    assert chart.startswith("Accuracy over Epsilon spent: udp, epsilon 8.0, best without privacy")


def test_a_void_guarantee_is_no_outcome(make, tmp_path):
    run = leave_card(udp(make, "a", rounds=3), spent=6.5, void="a seed")
    page, _ = written([run, leave_card(make("plain"))], tmp_path / "out")
    assert "With epsilon" not in page.text
    assert "The best of 2 runs is fedavg with accuracy 0.9844" in page.text


def test_epsilons_of_different_neighbours_have_columns_tables_and_charts_of_their_own(
    make, tmp_path
):
    runs = [
        leave_card(udp(make, "a"), spent=6.5),
        leave_card(udp(make, "b", scheme="acfl"), spent=6.5, neighbours="one record is added"),
        leave_card(make("plain")),
    ]
    page, _ = written(runs, tmp_path / "out")
    words = ["one record differs (replace_one)", "one record is added (replace_one)"]
    one, other = (f"Epsilon, where {text}" for text in words)
    assert headings(page) == ["Run", "Task", "Accuracy", one, other, "Protects", "MB"]
    dash = "\N{EN DASH}"
    assert f"0.9844 6.5 {dash} one record of a client" in page.text
    assert f"0.9844 {dash} 6.5 one record of a client" in page.text
    # Under Privacy, too.
    assert all(f"<h3>Data sets where {title}</h3>" in page.source for title in words)
    assert page.source.count("<table>") == 4  # and one without differential privacy
    drawn = [text for text in descriptions(page) if "Epsilon" in text]
    assert all(sum(f"neighbours: {title}" in text for title in words) == 1 for text in drawn)


def test_charges_for_other_neighbours_part_epsilons_whatever_the_guarantee_says(make, tmp_path):
    runs = [
        leave_card(udp(make, "a"), spent=6.5),
        leave_card(udp(make, "b", scheme="acfl"), spent=6.5, relation="zero_out"),
        leave_card(make("plain")),
    ]
    page, _ = written(runs, tmp_path / "out")
    columns = [
        f"Epsilon, where one record differs ({name})" for name in ("replace_one", "zero_out")
    ]
    assert headings(page) == ["Run", "Task", "Accuracy", *columns, "Protects", "MB"]
    assert len([text for text in descriptions(page) if "Epsilon" in text]) == 3


def test_at_most_five_runs_the_best_of_each_scheme(make, tmp_path):
    runs = [
        leave_card(udp(make, "u1", rounds=2), spent=6.5),
        leave_card(udp(make, "u2", rounds=4, seed=1), spent=6.5),
        *(leave_card(make(f"p{seed}", rounds=2, seed=seed)) for seed in range(4)),
        leave_card(make("m", scheme="mspdq", rounds=1)),
    ]
    page, _ = written(runs, tmp_path / "out")
    top = page.source[: page.source.index("</section>")]
    assert top.count("<tr>") == 1 + 5
    assert "2 more runs are below." in page.text
    assert "mspdq" in top
    assert "0.9375" in top[top.index("<table>") :]  # the better one of UDP


def test_a_run_of_ones_own_app_is_called_by_its_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_PRIVACY_RUNS", str(tmp_path / "cards"))
    options = LoopOptions(seed=1, name="ward")
    strategy = UDP(privacy=UserLevel(epsilon=4.0), loop=options)
    run_strategy(strategy, message_app([as_mod(UDPClient)]), num_rounds=2)
    run = opened(newest_card().parent)
    page, table = written([run], tmp_path / "out")
    (entry,) = table["runs"]
    assert entry["label"] == "udp"
    assert entry["summary"]["status"] == "completed"
    assert entry["settings"]["privacy"] == "UserLevel(epsilon=4.0)"
    assert entry["guarantee"]["spent"] == pytest.approx(4.0, rel=1e-6)
    assert run.path.name not in page.source  # a time


def test_details_are_folded(make, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "SECTIONS", ALL)
    page, _ = written([leave_card(make("a", rounds=2))], tmp_path / "out")
    after = page.source[page.source.index("</section>") :]
    assert "<section" not in after
    assert after.count("<summary><h2>") == after.count("<h2>") > 3
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page.source
    assert page.source.count("<table>") == page.source.count('<div class="scroll"><table>')
