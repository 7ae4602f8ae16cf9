import json
import math
import re
from html.parser import HTMLParser

import pytest

from flwr_privacy.accounting import Charge
from flwr_privacy.errors import DataError, FlwrPrivacyError, InvalidParameterError
from flwr_privacy.privacy.card import CardRelease, PrivacyCard
from flwr_privacy.privacy.guarantee import Guarantee
from flwr_privacy.simulations.reports import figures, report
from flwr_privacy.simulations.reports import sections as report_sections
from flwr_privacy.simulations.reports.page import Html
from flwr_privacy.simulations.reports.report import write_report
from flwr_privacy.simulations.settings.run_folder import RunFolder
from flwr_privacy.simulations.settings.run_settings import Settings

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Reads a page, and is strict about nesting."""

    def __init__(self, path):
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.open, self.tags, self.ids, self.references, self.texts = [], [], [], [], []
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for key, value in attrs:
            if key == "id":
                self.ids.append(value)
            if key in ("src", "href", "xlink:href", "data", "action"):
                self.references.append(value)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())

    @property
    def figures(self):
        return self.tags.count("figure")


@pytest.fixture
def make(tmp_path):
    def make(
        name, *, rounds=6, status="completed", error=None, judge="server", late=0, more=(), **values
    ):
        settings = Settings(rounds=6, clients=10).with_values(values)
        run = RunFolder.create(tmp_path / name, settings, engine="inline", nodes=10)
        if rounds is not None and judge == "server":
            first = {"round": 0, "rounds": 6, "server": {"accuracy": 0.1, "loss": 2.3}}
            run.append({**first, "seconds": 0.1, "virtual_seconds": 0.0, **(more or [{}])[0]})
        for number in range(1, (rounds or 0) + 1):
            line = {
                "round": number,
                "rounds": 6,
                "skipped": False,
                "asked": 10,
                "answered": 10,
                "accumulated": 10 - late,
                "late": late,
                "refused": {"<non-finite>": 1} if late else {},
                "exchanges": 1,
                "bytes_down": 2_000_000,
                "bytes_up": 500_000,
                "virtual_seconds": 1.5 * number,
                "seconds": 0.2 * number,
                "train": {"loss": 1.0},
                judge: {"accuracy": 1 - 0.5**number, "loss": 2 * 0.6**number},
                "scheme": {},
            }
            run.append({**line, **(more[number] if number < len(more) else {})})
        if status != "running":
            run.finish(status, error)
        return run

    return make


def promise(run, *, spent=None, **more):
    """Leave the privacy card of a run in its folder."""
    values = {"scheme": run.settings.scheme, "protects": "nothing", "adversary": "nobody"}
    if spent is not None:
        values = {
            "scheme": run.settings.scheme,
            "protects": "one record of a client",
            "adversary": "the server",
            "neighbours": "one record differs",
            "epsilon": 8.0,
            "delta": 1e-5,
            "spent": spent,
            "accountant": "gdp",
            "not_protected": ("the time of day",),
            "assumptions": ("clocks are right",),
            "evidence": ("tests/clock",),
        }
    card = PrivacyCard(experiment_id="e", guarantee=Guarantee(**{**values, **more}))
    if spent is not None:
        release = CardRelease(
            phase="train",
            server_round=1,
            request=0,
            charge=Charge(noise_multiplier=2.0),
            clients=("0", "1"),
            unanswered=("1",),
        )
        card.releases.append(release)
    run.card_path.write_text(card.to_json())
    return run


def spend(*epsilons):
    """Return lines of rounds, the first of them round 0, with these epsilons."""
    return [{"scheme": {"epsilon": x}, "train": {"sigma": 0.5}} for x in epsilons]


def descriptions(page):
    return re.findall(r'aria-label="([^"]*)"', page.source)


def written(runs, out, **more):
    path = write_report(runs, out, **more)
    assert path == out / "report.html"
    page = Page(path)
    assert "http://" not in page.source
    assert "https://" not in page.source
    assert all(reference.startswith("#") for reference in page.references)
    assert {reference[1:] for reference in page.references} <= set(page.ids)
    assert set(re.findall(r"url\(#([^)]*)\)", page.source)) <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert "@import" not in page.source
    assert page.tags[0] == "html"
    assert page.source.startswith("<!DOCTYPE html>")
    table = json.loads((out / "report.json").read_text(), parse_constant=pytest.fail)
    return page, table


def test_page_of_two_runs(make, tmp_path):
    runs = [make("a"), make("b", scheme="udp", rounds=4, status="interrupted")]
    page, table = written(runs, tmp_path / "new" / "out", title="Noise & budget")
    assert "<title>Noise &amp; budget</title>" in page.source
    assert "2 runs of fedavg and udp on digits-mlp: 1 completed and 1 interrupted." in page.text
    assert "The best final accuracy is 0.9844 (fedavg), after 6 of 6 rounds" in page.text
    assert page.figures == 6
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
    promise(run, protects=evil, void=evil, not_protected=(evil,))
    other = make("b", late=1, scheme="<i>udp</i>")
    page, table = written([run, other], tmp_path / "out", title=evil, about=evil)
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
    assert page.figures == 8
    assert "mspdq 60 60 42 18 6" in page.text


def test_tasks_have_figures_of_their_own(make, tmp_path):
    runs = [make("a"), make("b", task="mnist-mlp"), make("c", task="mnist-mlp", rounds=None)]
    page, _ = written(runs, tmp_path / "out")
    assert page.figures == 12
    assert "Task digits-mlp" in page.text
    assert "Task mnist-mlp" in page.text
    assert "best final accuracy on mnist-mlp" in page.text


def test_run_without_rounds(make, tmp_path):
    run = make("a", rounds=None, status="running")
    page, table = written([run], tmp_path / "out")
    assert page.figures == 0
    assert "The model was not evaluated yet." in page.text
    assert "One run of fedavg on digits-mlp: running." in page.text
    assert table["runs"][0]["results"]["accuracy"] is None


def test_round_zero_alone(make, tmp_path):
    page, _ = written([make("a", rounds=0, status="running")], tmp_path / "out")
    assert page.figures == 2  # over rounds; no bytes and no time yet


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
        loose = promise(self.udp(make), spent=6.5)
        tight = promise(self.udp(make, "b", budget=2.0, rounds=2), spent=2.0, epsilon=2.0)
        plain = promise(make("plain", rounds=4))
        page, _ = written([plain, loose, tight], tmp_path / "out")
        (drawn,) = [text for text in descriptions(page) if "Epsilon" in text]
        assert drawn == (
            "Accuracy over Epsilon spent: udp, epsilon 8.0, udp, epsilon 2.0, "
            "best without privacy: 0.9375. unit: one record of a client; delta 1e-05. "
            "adversary: the server"
        )
        assert "The dotted line is the final accuracy of fedavg." in page.text

    def test_the_table_has_promise_spending_and_accuracy(self, make, tmp_path):
        loose = promise(self.udp(make), spent=6.5)
        page, _ = written([loose, promise(make("plain"))], tmp_path / "out")
        row = "udp, epsilon 8.0 one record of a client the server yes 8 1e-05 6.5 2 1 0.5 0.9844"
        assert row in page.text
        dash = "\N{EN DASH}"
        assert f"fedavg nothing nobody {' '.join([dash] * 7)} 0.9844" in page.text

    def test_the_promise_is_there_in_full_and_can_be_checked(self, make, tmp_path):
        loose = promise(self.udp(make), spent=6.5)
        tight = promise(self.udp(make, "b", budget=2.0), spent=2.0, epsilon=2.0)
        page, table = written([loose, tight, promise(make("plain"))], tmp_path / "out")
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
            promise(self.udp(make), spent=6.5),
            promise(self.udp(make, "user"), spent=6.5, protects="all data of a client"),
            promise(self.udp(make, "weaker"), spent=6.5, adversary="the other clients"),
            promise(self.udp(make, "mnist", task="mnist-mlp"), spent=6.5),
        ]
        page, _ = written(runs, tmp_path / "out")
        drawn = [text for text in descriptions(page) if "Epsilon" in text]
        assert len(drawn) == len(set(drawn)) == 4
        assert not any("best without privacy" in text for text in drawn)

    def test_the_best_run_without_privacy_is_a_whole_one_on_the_same_task(self, make, tmp_path):
        runs = [
            promise(self.udp(make), spent=6.5),
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
        run = promise(self.udp(make), spent=6.5, void="the noise came from a seed")
        page, _ = written([run, promise(make("plain"))], tmp_path / "out")
        name = "udp, epsilon 8.0"
        assert f"VOID The guarantee of {name} does not hold: the noise came from a" in page.text
        assert f"{name} VOID completed" in page.text
        assert f"{name} VOID one record of a client the server VOID 8 1e-05" in page.text
        assert "VOID: the noise came from a seed. Without that: udp protects" in page.text
        (drawn,) = [text for text in descriptions(page) if "Epsilon" in text]
        assert drawn.endswith(f". VOID: no protection by {name}")
        whole, _ = written([promise(self.udp(make, "b"), spent=6.5)], tmp_path / "whole")
        assert "VOID" not in whole.text

    def test_a_run_that_goes_on_shows_what_it_spent_so_far(self, make, tmp_path):
        run = promise(self.udp(make, rounds=2, status="running"), spent=2.0)
        page, _ = written([run], tmp_path / "out")
        assert "Spent so far: epsilon 2 (gdp)." in page.text
        run.card_path.unlink()  # before the first round has ended
        page, _ = written([run], tmp_path / "out")
        assert "Privacy" not in page.texts

    @pytest.mark.parametrize("lines", [[], spend(0.0), spend(*[None] * 7), spend(0.0, None)])
    def test_without_an_epsilon_above_zero_there_is_no_figure(self, make, tmp_path, lines):
        run = promise(self.udp(make, more=lines), spent=0.0)
        page, _ = written([run], tmp_path / "out")
        assert page.figures == 0
        assert "Privacy" in page.texts

    def test_a_round_whose_epsilon_is_not_finite_is_left_out(self, make, tmp_path):
        run = promise(self.udp(make, more=spend(0.0, 1.0, None, 3.0)), spent=3.0)
        page, _ = written([run], tmp_path / "out")
        assert page.figures == 1

    def test_a_damaged_card_is_named(self, make, tmp_path):
        run = promise(self.udp(make), spent=6.5)
        run.card_path.write_text(run.card_path.read_text()[:-9])
        with pytest.raises(DataError, match=r"private.privacy-card\.json: no privacy card"):
            write_report([run], tmp_path / "out")


class TestTiers:
    NODES = (
        ("cloud", None, 0, False, False, None, None),
        ("t1-0", "cloud", 1, True, True, 0.5, 8.0),
        ("t1-1", "cloud", 1, False, False, None, None),
        ("0", "t1-0", 2, True, False, None, None),
        ("1", "t1-0", 2, True, False, None, None),
        ("2", "t1-1", 2, True, True, 1.0, 8.0),
        ("3", "t1-1", 2, True, True, 1.0, 7.5),
    )

    @pytest.fixture(autouse=True)
    def few_sections(self, monkeypatch):
        monkeypatch.setattr(report, "SECTIONS", (report.table_of_runs, report.tiers))

    def tiered(self, make, name="tiered", *, tree=True, **more):
        keys = ("name", "parent", "tier", "secure", "noise", "sigma", "epsilon")
        run = make(name, **{"scheme": "m2fdp", "more": self.lines(), **more})
        if tree:
            nodes = [dict(zip(keys, node, strict=True)) for node in self.NODES]
            (run.path / "tree.json").write_text(json.dumps({"nodes": nodes}))
        return run

    def lines(self, *, steps=20, share=1.0, noise=0.19):
        scheme = {"steps": steps, "energy_j": 1.5, "delay_s": 5.4, "noise_var": noise}
        scheme |= {"participation_secure": share, "participation_insecure": share}
        if noise:
            scheme |= {"noise_sigma_t1": 0.5, "noise_sigma_t2": 1.0}
        return [{"scheme": {}}, *[{"scheme": scheme}] * 6]

    def test_the_tree_and_its_noise_are_shown(self, make, tmp_path):
        page, table = written([self.tiered(make)], tmp_path / "out")
        tree, *charts = descriptions(page)
        assert tree == (
            "Tree of the tiers. tier 1: 2 aggregators, 1 of them trusted; 1 add noise. "
            "tier 2: 4 devices; 2 add noise."
        )
        assert charts == ["Variance over Round: m2fdp", "Variance over Round: tier 1, tier 2"]
        # One edge of two with 0.5, and two devices of 1 with a weight of a quarter each.
        assert "1 2 1 1 0.5 8 0.0625 33.3%" in page.text
        dash = "\N{EN DASH}"
        assert f"2 (devices) 4 {dash} 2 1 7.5{dash}8 0.125 66.7%" in page.text
        assert [node["name"] for node in table["runs"][0]["tree"]][:3] == ["cloud", "t1-0", "t1-1"]

    def test_devices_that_were_not_asked_are_not_counted(self, make, tmp_path):
        run = self.tiered(make, more=self.lines(share=0.5))
        page, _ = written([run], tmp_path / "out")
        assert " 7.5\N{EN DASH}8 0.25 80.0%" in page.text

    def test_each_run_has_a_tree_and_one_figure_compares_their_noise(self, make, tmp_path):
        runs = [self.tiered(make), self.tiered(make, "b", seed=1), make("plain")]
        page, table = written(runs, tmp_path / "out")
        drawn = descriptions(page)
        assert sum(text.startswith("Tree") for text in drawn) == 2
        assert "Variance over Round: m2fdp, m2fdp, seed 1" in drawn
        assert drawn.count("Variance over Round: tier 1, tier 2") == 2
        assert page.text.count("Sigma is the standard deviation") == 1
        assert table["runs"][2]["tree"] is None

    def test_what_was_chosen_is_drawn_where_control_is_on(self, make, tmp_path):
        without = self.tiered(make)
        page, _ = written([without], tmp_path / "without")
        assert "Control" not in page.text
        options = {"strategy.control.total_steps": 40, "more": self.lines(steps=6, share=0.4)}
        page, _ = written([without, self.tiered(make, "on", **options)], tmp_path / "out")
        for caption in (
            "Local steps of a round",
            "Devices asked under trusted aggregators",
            "Devices asked under other aggregators",
            "Energy of a round",
            "Delay of a round",
        ):
            assert caption in page.text
        both = "m2fdp, m2fdp, total_steps 40"
        drawn = descriptions(page)
        for axis in ("Local steps", "Energy (J)", "Delay (s)"):
            assert f"{axis} over Round: {both}" in drawn
        assert drawn.count(f"Asked / devices over Round: {both}") == 2

    def test_without_noise_there_is_only_the_tree(self, make, tmp_path):
        run = self.tiered(make, more=self.lines(noise=0.0))
        page, _ = written([run], tmp_path / "out")
        assert page.figures == 1
        assert "Noise variance of a value" not in page.text

    def test_a_run_without_its_tree_still_shows_its_noise(self, make, tmp_path):
        page, _ = written([self.tiered(make, tree=False)], tmp_path / "out")
        assert page.figures == 2
        assert "Trust, and where noise enters" not in page.text

    def test_other_schemes_have_no_such_section(self, make, tmp_path):
        page, _ = written([make("plain")], tmp_path / "out")
        assert "Tiers" not in page.texts

    def test_a_damaged_tree_is_named(self, make, tmp_path):
        run = self.tiered(make)
        (run.path / "tree.json").write_text("{")
        with pytest.raises(DataError, match=r"tiered.tree\.json: no tree"):
            write_report([run], tmp_path / "out")


class TestColumns:
    """FedVS and its baselines: what a round waits for and costs."""

    def lines(self, *, phases=True, **extra):
        noted = {"dealers": 10, "answers": 5, "seconds_share": 2.0, "seconds_upload": 0.5}
        lines = [{"bytes_down": 30_000_000, "bytes_up": 10_000_000}]
        for number in range(1, 7):
            scheme = {"epoch": number / 2, **(noted if phases else {}), **extra}
            line = {"scheme": scheme, "accumulated": 5 if phases else 10}
            if number % 3:
                line |= {"server": {}}
            else:
                line |= {"bytes_up": 7_000_000, "virtual_seconds": 2.5 * number}
            lines.append(line)
        return lines

    def test_phases_of_a_round_stand_beside_the_wait_for_all(self, make, tmp_path):
        delays = {"strategy.delays": True}
        runs = [
            make("a", scheme="fedvs", more=self.lines(), **delays),
            make("b", scheme="split-wait", more=self.lines(phases=False), **delays),
            make("plain"),
        ]
        page, _ = written(runs, tmp_path / "out")
        assert "Rounds of split learning" in page.texts
        # Ten clients, five of them slow: 7.438 s for all of them, by exact integration.
        assert "fedvs 5 of 10 3.00 2.00 0.500 2.50 7.44 40.0 2.50 9.00" in page.text
        dash = "\N{EN DASH}"
        assert f"split-wait 10 of 10 3.00 {dash} {dash} 2.50 7.44 40.0" in page.text
        drawn = [text for text in descriptions(page) if "time so far" in text]
        assert drawn == [
            "Virtual time so far (s) over Round: fedvs",
            "Virtual time so far (s) over Round: fedvs, split-wait",
        ]
        assert "AUC" not in page.texts
        assert "Range used" not in page.texts

    def test_two_classes_have_an_area_and_the_field_a_range(self, make, tmp_path):
        lines = self.lines(guard=0.25)
        for line in lines[3::3]:
            line["server"] = {"accuracy": 0.8, "auc": 0.75, "f1": 0.5}
        page, _ = written([make("a", scheme="fedvs", more=lines)], tmp_path / "out")
        assert "0.7500 0.5000 25.0%" in page.text
        assert "AUC over Round: fedvs" in descriptions(page)
        assert "Share of the range over Round: fedvs" in descriptions(page)
        assert "Wait for all (s)" not in page.texts  # no delays are simulated

    def test_delays_of_the_users_own_are_waited_for(self, make, tmp_path):
        options = {"scale": 2.0, "stragglers": 0, "upload_seconds": 1.0}
        run = make("a", scheme="fedvs", more=self.lines(), strategy={"delays": options}, clients=2)
        page, _ = written([run], tmp_path / "out")
        # The larger one of two exponential times of mean 0.1: 0.15.
        assert " 1.30 " in page.text

    def test_other_schemes_have_no_such_section(self, make, tmp_path):
        page, _ = written([make("plain")], tmp_path / "out")
        assert "Rounds of split learning" not in page.texts


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
    extra = (*report.SECTIONS, lambda runs: Html(f"<p>Attacked {len(runs)} runs</p>"))
    monkeypatch.setattr(report, "SECTIONS", extra)
    page, _ = written([make("a", rounds=1)], tmp_path / "out")
    assert "Attacked 1 runs" in page.text


# -- Virtual time --------------------------------------------------------------------------------


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
