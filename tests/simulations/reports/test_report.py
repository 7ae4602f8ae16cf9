"""The page of runs: what every task's and scheme's page has, and damaged files."""

import math
import re

import pytest
from markupsafe import Markup
from report_page import Page, descriptions, leave_card, written

from flwr_privacy.errors import DataError, FlwrPrivacyError, InvalidParameterError
from flwr_privacy.simulations.reports import figures, report
from flwr_privacy.simulations.reports import sections as report_sections
from flwr_privacy.simulations.reports.report import write_report
from flwr_privacy.simulations.settings.run_settings import Settings


def test_page_of_two_runs(make, tmp_path):
    runs = [make("a"), make("b", scheme="udp", rounds=4, status="interrupted")]
    page, table = written(runs, tmp_path / "new" / "out", title="Noise & budget")
    assert "<title>Noise &amp; budget</title>" in page.source
    sentence = (
        "The best of 2 runs is fedavg with accuracy 0.9844 on digits-mlp, after 6 of 6 rounds."
    )
    assert sentence in page.text
    assert page.figures == 7
    assert "udp: interrupted after 4 of 6 rounds No error was noted." in page.text
    assert "Answers" not in page.texts  # no reply was late or refused
    assert [run["results"]["rounds"] for run in table["runs"]] == [6, 4]


def test_json_holds_all_there_is(make, tmp_path):
    run = make("a", **{"strategy.bits": [4, 8]})
    _, table = written([run], tmp_path / "out")
    (entry,) = table["runs"]
    assert entry["guarantee"] is None
    assert entry["rounds"] == run.rounds()
    assert entry["summary"] == run.summary
    unset = {key: value for key, value in entry["settings"].items() if value is not None}
    assert Settings().with_values(unset) == run.settings
    assert entry["results"] == {
        "rounds": 6,
        "planned": 6,
        "accuracy": 1 - 0.5**6,
        "best_accuracy": 1 - 0.5**6,
        "loss": 2 * 0.6**6,
        "evaluated_by": "server",
        "bytes_up": 3_000_000,
        "bytes_down": 12_000_000,
        "virtual_seconds": 9.0,
        "seconds": pytest.approx(1.2),
        "asked": 60,
        "answered": 60,
        "accumulated": 60,
        "late": 0,
        "refused": 0,
        "skipped": 0,
    }


def test_same_runs_same_bytes(make, tmp_path):
    run = make("a")
    written([run], tmp_path / "x")
    written([run], tmp_path / "y")
    for name in ("report.html", "report.json"):
        assert (tmp_path / "x" / name).read_bytes() == (tmp_path / "y" / name).read_bytes()


def test_text_from_outside_is_escaped(make, tmp_path):
    evil = "<script>alert('x')</script>"
    run = make("a<b>", status="failed", error=evil, **{"strategy.note": evil})
    leave_card(run, protects=evil, void=evil, not_protected=(evil,))
    other = make("b", late=1, **{"strategy.kind": "<i>udp</i>"})
    page, table = written(
        [run, other], tmp_path / "out", title=evil, about={evil: evil, "other": evil}
    )
    assert not {"script", "i", "b"} & set(page.tags)
    assert page.text.count("<script>alert('x')</script>") >= 8
    assert "Refused: <non-finite>" in page.text
    assert table["runs"][0]["summary"]["error"] == evil


def test_how_many_trained_is_shown_with_its_standard_deviation(make, tmp_path):
    counted = {"scheme": {"trained": 7.5, "trained_sigma": 2.0}}
    runs = [make("one", more=[{}, *[counted] * 4]), make("other", seed=2)]
    write_report(runs, tmp_path / "out")
    page = Page(tmp_path / "out" / "report.html")
    assert "Trained" in page.texts
    assert "30 ± 4" in page.texts


def test_late_and_refused_replies_are_shown(make, tmp_path):
    page, _ = written([make("a"), make("b", scheme="mspdq", late=3)], tmp_path / "out")
    assert page.figures == 9
    assert "mspdq 60 60 42 18 6" in page.text


def test_tasks_have_figures_of_their_own(make, tmp_path):
    runs = [make("a"), make("b", task="mnist-mlp"), make("c", task="mnist-mlp", rounds=None)]
    page, _ = written(runs, tmp_path / "out")
    assert page.figures == 13
    assert "Task digits-mlp" in page.text
    assert "Task mnist-mlp" in page.text


def test_run_without_rounds(make, tmp_path):
    run = make("a", rounds=None, status="created")
    page, table = written([run], tmp_path / "out")
    assert page.figures == 0
    assert "The model was not evaluated yet." in page.text
    assert "No run has measured an accuracy yet." in page.text
    assert table["runs"][0]["results"]["accuracy"] is None


def test_round_zero_alone(make, tmp_path):
    page, _ = written([make("a", rounds=0, status="created")], tmp_path / "out")
    assert page.figures == 3  # over rounds; no bytes and no time yet


def test_clients_judge_where_the_server_does_not(make, tmp_path):
    runs = [make("a"), make("b", scheme="m2fdp", judge="evaluate")]
    page, table = written(runs, tmp_path / "out")
    assert "In m2fdp the clients evaluated it on their own data." in page.text
    assert [run["results"]["evaluated_by"] for run in table["runs"]] == ["server", "clients"]


@pytest.mark.parametrize("loss", [math.nan, math.inf, None])
def test_diverged_run(make, tmp_path, loss):
    run = make("a", rounds=2)
    run.append({"round": 3, "rounds": 6, "server": {"accuracy": 0.1, "loss": loss}})
    page, table = written([run], tmp_path / "out")
    assert ("inf" if loss == math.inf else "NaN") in page.text
    assert table["runs"][0]["results"]["loss"] is None


def test_more_runs_than_colours(make, tmp_path):
    runs = [make(f"run{seed}", rounds=1, seed=seed) for seed in range(12)]
    page, _ = written(runs, tmp_path / "out")
    assert "fedavg, seed 11" in page.text
    looks = {
        tuple(re.findall(r'style="([^"]*)"', item))
        for item in re.findall(r"<li>.*?</li>", page.source, flags=re.DOTALL)
    }
    assert len(looks) == 12


def test_the_rounds_planned_are_drawn_where_they_change(make, tmp_path):
    planned = [{"scheme": {}}, *({"scheme": {"T": t}} for t in (6, 6, 5, 5, 4, 4))]
    runs = [make("a", scheme="udp", more=planned), make("plain")]
    page, _ = written(runs, tmp_path / "out")
    (drawn,) = [text for text in descriptions(page) if "planned" in text]
    assert drawn == "Rounds planned over Round: udp"
    assert "Rounds planned over rounds" in page.text
    without, _ = written(runs[1:], tmp_path / "without")
    assert page.figures == without.figures + 1
    assert "planned" not in " ".join(descriptions(without))


def test_runs_of_several_tasks_are_told_apart_within_each(make, tmp_path):
    runs = [
        make("a", task="mnist-mlp", seed=3),
        make("b", rounds=2),
        make("c", rounds=2, seed=1),
    ]
    _, table = written(runs, tmp_path / "out")
    assert [run["label"] for run in table["runs"]] == [
        "mnist-mlp: fedavg",
        "digits-mlp: fedavg, seed 0",
        "digits-mlp: fedavg, seed 1",
    ]


def test_a_cut_line_is_left_out_and_a_damaged_one_is_named(make, tmp_path):
    run = make("a", rounds=2)
    with run.metrics_path.open("a") as file:
        file.write('{"round": 3, "server": {"acc')
    _, table = written([run], tmp_path / "out")
    assert table["runs"][0]["results"]["rounds"] == 2
    with run.metrics_path.open("a") as file:
        file.write("\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 4"):
        write_report([run], tmp_path / "out")


def test_folder_that_cannot_be_written(make, tmp_path):
    run = make("a", rounds=1)
    (tmp_path / "file").write_text("")
    with pytest.raises(FlwrPrivacyError, match=r"out = .*file/out.*can be written"):
        write_report([run], tmp_path / "file" / "out")
    (tmp_path / "taken" / "report.html").mkdir(parents=True)
    with pytest.raises(FlwrPrivacyError, match=r"out = .*taken"):
        write_report([run], tmp_path / "taken")


def test_no_runs(tmp_path):
    with pytest.raises(InvalidParameterError, match="at least one run folder"):
        write_report([], tmp_path)


def test_a_section_can_be_added(make, tmp_path, monkeypatch):
    extra = (*report.SECTIONS, lambda runs: Markup(f"<p>Attacked {len(runs)} runs</p>"))
    monkeypatch.setattr(report, "SECTIONS", extra)
    page, _ = written([make("a", rounds=1)], tmp_path / "out")
    assert "Attacked 1 runs" in page.text


def test_only_runs_with_stragglers_are_drawn_over_virtual_time(make, tmp_path):
    none = [{"virtual_seconds": 0.0}] * 7
    page, _ = written([make("slow"), make("fast", more=none, seed=1)], tmp_path / "out")
    drawn = [text for text in descriptions(page) if "Virtual" in text]
    assert drawn == [
        "Accuracy over Virtual time (s): fedavg, seed 0",
        "Loss over Virtual time (s): fedavg, seed 0",
    ]
    page, _ = written([make("alone", more=none)], tmp_path / "other")
    assert "Virtual" not in " ".join(descriptions(page))


@pytest.mark.parametrize(("factor", "logarithmic"), [(2.9, False), (3.0, True)])
def test_virtual_times_far_apart_share_a_logarithmic_axis(
    make, tmp_path, monkeypatch, factor, logarithmic
):
    scales = []

    def chart(series, *, log_xs=False, **options):
        scales.append((options["xlabel"], log_xs))
        return figures.chart(series, log_xs=log_xs, **options)

    monkeypatch.setattr(report_sections, "chart", chart)
    later = [{"virtual_seconds": 1.5 * factor * number} for number in range(7)]
    written([make("slow", more=later), make("fast", seed=1)], tmp_path / "out")
    assert {scale for label, scale in scales if label == "Virtual time (s)"} == {logarithmic}
    assert {scale for label, scale in scales if label != "Virtual time (s)"} == {False}
