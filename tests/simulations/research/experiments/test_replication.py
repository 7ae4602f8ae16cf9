"""The pages of verdicts: what they say of results, and that the repository's are those it has."""

import json
import re
import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from experiment_files import INLINE
from PIL import Image

from flwr_privacy.errors import DataError
from flwr_privacy.simulations.reports.style import COLOURS
from flwr_privacy.simulations.research.experiments import files
from flwr_privacy.simulations.research.experiments.replication import pages, replication
from flwr_privacy.simulations.research.experiments.results import ExperimentResults
from flwr_privacy.simulations.research.experiments.runs import train
from flwr_privacy.simulations.research.experiments.summary import (
    COMPUTED,
    FORMAT,
    PAIRED,
    read_summary,
    summary,
    summary_text,
)
from tests.shared.imports import ROOT

DOCS = ROOT / "docs"
RESULTS = DOCS / "replication" / "results"
KEPT = sorted(RESULTS.glob("*/*.json"))


def claim(p: float | None, **more: Any) -> dict[str, Any]:
    """Return a claim whose first curve is ahead, with this p value."""
    pair = {"pair": "a over b", "mean": 0.5, "error": 0.1, "verdict": None, "differences": None}
    return {
        **{"id": "C", "text": "a is better", "measure": "loss, last", "kind": "better"},
        **{"relative": False, "paper": "", "verdict": "undecided", "p": p, "better": True},
        **{"number": 1, "counts": None, "comparisons": [pair]},
        **more,
    }


def results(name: str, claims: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {
        **{"format": FORMAT, "experiment": name, "title": "A title", "paper": "A Paper"},
        **{"figure": "Figure 1", "size": "scaled down", "full": False, "paper_size": False},
        **{"differences": ["rounds: 3, paper 5"], "seeds": [0, 1, 2, 3, 4], "rule": PAIRED},
        **{"command": f"flwr-privacy experiment {name}", "version": "0.1.0", "seconds": 1.5},
        **{"claims": claims, "tables": []},
        **more,
    }


def page(folder: Path, *tables: Mapping[str, Any]) -> str:
    """Return the page of a paper with these results."""
    for table in tables:
        place = folder / "a" / f"{table['experiment'].rpartition('/')[2]}.json"
        place.parent.mkdir(exist_ok=True)
        place.write_text(summary_text(table))
    return pages(folder)["replication/a.md"]


def verdicts(text: str) -> list[str]:
    return [row.split(" | ")[2] for row in text.splitlines() if row.startswith("| [")]


# -- The repository's pages ------------------------------------------------------------------------


def test_the_pages_are_made_from_the_results_alone(tmp_path: Path) -> None:
    for kept in (RESULTS, RESULTS.with_name("pictures")):
        shutil.copytree(kept, tmp_path / "replication" / kept.name)
    written, left = replication(tmp_path / "no-runs", tmp_path)
    assert left == []
    committed = [DOCS / "replication.md", *(DOCS / "replication").glob("*.md")]
    assert {path.relative_to(tmp_path) for path in written} == {
        path.relative_to(DOCS) for path in committed
    }
    for path in written:
        assert path.read_bytes() == (DOCS / path.relative_to(tmp_path)).read_bytes(), path.name


def test_every_experiment_has_a_verdict_or_is_listed_without_one() -> None:
    found = {read_summary(path)["experiment"] for path in KEPT}
    listed = {
        name
        for path in (DOCS / "replication").glob("*.md")
        for name in re.findall(r"`([a-z0-9-]+/[a-z0-9-]+)` describes", path.read_text())
    }
    assert found | listed == set(files.names())
    assert not found & listed


@pytest.mark.parametrize("path", KEPT, ids=[f"{path.parent.name}/{path.stem}" for path in KEPT])
def test_kept_results_are_of_the_claims_that_there_are(path: Path) -> None:
    table = read_summary(path)
    assert path.read_text(encoding="utf-8") == summary_text(table)
    assert path == RESULTS / f"{table['experiment']}{'-full' * table['full']}.json"
    described = files.experiment(table["experiment"])
    told = [(one["id"], one["text"], one["paper"]) for one in table["claims"]]
    assert told == [(one.id, one.text, one.paper) for one in described.claims]
    assert table["title"] == described.title
    if table["rule"] == PAIRED:
        assert len(table["seeds"]) >= 5
        for one in table["claims"]:
            for pair in one["comparisons"]:
                assert len(pair["differences"]) == len(table["seeds"])


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/paper.toml")), ids=lambda p: p.parent.name)
def test_estimates_are_of_experiments_that_ran_smaller_only(path: Path) -> None:
    for name in tomllib.loads(path.read_text(encoding="utf-8")).get("estimates", {}):
        assert path.with_name(f"{name}.json").exists(), name
        assert not path.with_name(f"{name}-full.json").exists(), name


@pytest.mark.parametrize("name", ["acfl/figure1", "fedvs/conventions", "udp/figure2"])
def test_a_computed_verdict_comes_out_again(name: str, tmp_path: Path) -> None:
    runs = train(files.experiment(name), tmp_path, seeds=[0], engine=INLINE)
    again = summary(ExperimentResults(experiment=files.experiment(name), full=False, runs=runs))
    kept = read_summary(RESULTS / f"{name}.json")
    assert (kept["rule"], kept["command"]) == (COMPUTED, again["command"])
    for one, other in zip(kept["claims"], again["claims"], strict=True):
        assert (one["id"], one["verdict"]) == (other["id"], other["verdict"])


# -- What a page says ------------------------------------------------------------------------------


def test_verdicts_are_corrected_for_all_claims_of_the_page(tmp_path: Path) -> None:
    alone = page(tmp_path, results("a/one", [claim(0.03)]))
    assert verdicts(alone) == ["reproduced, p = 0.03"]
    more = [claim(0.012), claim(0.0001, better=False)]
    text = page(tmp_path, results("a/two", more))
    # Holm: 3 x 0.0001, 2 x 0.012, and the larger one of that and 0.03.
    assert verdicts(text) == [
        "reproduced, p = 0.03",
        "reproduced, p = 0.024",
        "not reproduced, p < 0.001",
    ]
    text = page(tmp_path, results("a/three", [claim(0.9)]))
    assert verdicts(text)[:3] == [
        "undecided, p = 0.06",
        "undecided, p = 0.9",
        "reproduced, p = 0.036",
    ]


def test_what_was_computed_has_no_part_in_the_family(tmp_path: Path) -> None:
    exact = results("a/exact", [claim(None, verdict="not reproduced")], rule=COMPUTED, seeds=[])
    untimed = results("a/untimed", [claim(0.04)], seconds=None)
    text = page(tmp_path, untimed, exact, results("a/new", [claim(0.03)]))
    assert verdicts(text) == ["not reproduced", "undecided, p = 0.06", "undecided, p = 0.06"]
    assert "| computed | none |" in text
    assert "version 0.1.0, 1.5 s, [numbers]" in text.split("### new")[1].split("###")[0]
    assert "version 0.1.0, [numbers]" in text.split("### untimed")[1]


def test_a_row_has_the_comparison_that_says_least_and_the_papers_number(tmp_path: Path) -> None:
    pairs = [
        {"pair": pair, "mean": mean, "error": 0.01, "verdict": None, "differences": None}
        for pair, mean in (("a over b", 0.4), ("a over c", -0.02))
    ]
    table = results(
        "a/one",
        [
            claim(0.5, number=2, comparisons=pairs, relative=True, paper="25.1 %"),
            claim(0.5, number=2, comparisons=pairs, kind="close"),
            claim(0.5, text="(not the paper's) ours"),
        ],
    )
    text = page(tmp_path, table)
    assert "| smaller | 5 | -2 ± 1 % (least of 2) | 25.1 % |" in text
    assert "| smaller | 5 | +0.4 ± 0.01 (least of 2) |  |" in text
    assert "Smaller: rounds: 3, paper 5." in text
    front = pages(tmp_path)["replication.md"]
    assert "| [a](replication/a.md) | 0 | 0 | 2 | 0 / 0 / 1 | 0 of 1 | 0 |" in front
    page(tmp_path, {**table, "figure": "no figure: ours"})
    front = pages(tmp_path)["replication.md"]
    assert "| [a](replication/a.md) | 0 | 0 | 3 | 0 / 0 / 0 | no figures | 0 |" in front


def test_a_paper_lists_what_has_no_verdict(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    own = (
        'short = "Scheme A"\nmeaning = "Use it."\n[[missing]]\nfigure = "Figure 9"\nwhy = "none."\n'
    )
    (tmp_path / "a" / "paper.toml").write_text(own)
    ours = results("a/ahead", [], figure="no figure: ours")
    text = page(tmp_path, results("a/figure2", []), results("a/figure10", []), ours)
    assert text.startswith('# Replication: Scheme A\n\nUse it.\n\nSource: "A Paper". ')
    assert "## Figures without a verdict\n\n- Figure 9: none.\n" in text
    assert text.index("### figure2") < text.index("### figure10") < text.index("### ahead")
    assert "No figure: ours." in text
    note = '[[notes]]\nexperiments = ["figure2"]\ntext = "At the paper\'s size 9 hours."\n'
    (tmp_path / "a" / "paper.toml").write_text(note)
    noted = pages(tmp_path)["replication/a.md"].split("### ")
    assert ["9 hours" in part for part in noted] == [part.startswith("figure2\n") for part in noted]
    (tmp_path / "a" / "paper.toml").write_text("titel = 'x'\n")
    with pytest.raises(DataError, match=r"paper\.toml: unknown keys titel"):
        pages(tmp_path)
    for wrong in ("{hours = 1, time = 2}", "{times = 2}", '{hours = "2"}', "3"):
        (tmp_path / "a" / "paper.toml").write_text(f"[estimates]\nfigure2 = {wrong}\n")
        with pytest.raises(DataError, match=r"estimate of figure2 has .*, not "):
            pages(tmp_path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": 9}, r"its format is 9, and this version reads 1"),
        ({"seeds": "0,1"}, "no results of an experiment .*seeds"),
        ({"rule": "two standard errors"}, "no results of an experiment .*rule = 'two"),
        ({"claims": [{"id": "C"}]}, "no results of an experiment .*better"),
        ({"claims": [claim(0.1, verdict="maybe")]}, "no results of an experiment .*maybe"),
    ],
)
def test_damaged_results_are_named(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    (tmp_path / "runs").mkdir()
    path = tmp_path / "runs" / "replication.json"
    path.write_text(json.dumps({**results("a/one", []), **change}))
    with pytest.raises(DataError, match=rf"runs.replication\.json: {text}"):
        replication(tmp_path / "runs", tmp_path / "docs")
    path.write_text("{}")
    with pytest.raises(DataError, match=r"replication\.json: no results of an experiment"):
        replication(tmp_path / "runs", tmp_path / "docs")


def test_new_results_take_the_place_of_old_ones_with_fewer_seeds(tmp_path: Path) -> None:
    docs, runs = tmp_path / "docs", tmp_path / "runs"
    runs.mkdir()

    def write(seeds: list[int]) -> list[str]:
        table = results("a/one", [claim(0.5)], seeds=seeds)
        (runs / "replication.json").write_text(summary_text(table))
        return replication(runs, docs)[1]

    place = docs / "replication" / "results" / "a" / "one.json"
    assert write([*range(5)]) == []
    assert write([*range(10)]) == []
    (left,) = write([*range(5)])
    assert left.endswith("one.json has more seeds")
    assert read_summary(place)["seeds"] == [*range(10)]


def test_results_at_the_papers_size_take_the_place_of_smaller_ones(tmp_path: Path) -> None:
    docs, runs = tmp_path / "docs", tmp_path / "runs"
    place = docs / "replication" / "results" / "a"

    def write(*, full: bool, seeds: int) -> list[str]:
        folder = runs / f"one{'-full' * full}"
        folder.mkdir(parents=True, exist_ok=True)
        table = results("a/one", [claim(0.5)], seeds=[*range(seeds)], full=full)
        (folder / "replication.json").write_text(summary_text(table))
        return replication(runs, docs)[1]

    assert write(full=False, seeds=10) == []
    assert write(full=True, seeds=5) == []  # the smaller ones have more seeds
    assert {path.name for path in place.glob("*.json")} == {"one.json", "one-full.json"}
    assert write(full=True, seeds=10) == []
    assert {path.name for path in place.glob("*.json")} == {"one-full.json"}
    (left,) = write(full=False, seeds=10)
    assert left.endswith("one-full.json is at the paper's size, with no fewer seeds")
    assert {path.name for path in place.glob("*.json")} == {"one-full.json"}


def test_a_picture_comes_and_goes_with_its_results(tmp_path: Path) -> None:
    docs, runs = tmp_path / "docs", tmp_path / "runs"
    runs.mkdir()
    (runs / "replication.json").write_text(summary_text(results("a/one", [claim(0.5)])))
    drawn = Image.effect_noise((640, 400), 90).convert("RGB")
    for place, colour in enumerate(COLOURS):
        drawn.paste(colour, (100 * place, 0, 100 * place + 2, 400))  # as thin as a line
    drawn.save(runs / "figure.png")
    replication(runs, docs)
    picture, page = (docs / "replication" / name for name in ("pictures/a/one.png", "a.md"))
    assert "![A title](pictures/a/one.png)" in page.read_text()
    with Image.open(picture) as kept:
        assert kept.size == (640, 400)
        for place in range(len(COLOURS)):
            pixels = [one.getpixel((100 * place + 1, 200)) for one in (drawn, kept.convert("RGB"))]
            assert all(abs(a - b) <= 8 for a, b in zip(*pixels, strict=True))
    assert picture.stat().st_size < (runs / "figure.png").stat().st_size / 2
    (runs / "figure.png").unlink()
    replication(runs, docs)
    assert not picture.exists()
    assert "![A title]" not in page.read_text()


def test_what_is_smaller_is_left_out_once_it_has_run_at_the_papers_size(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "paper.toml").write_text(
        """
[estimates]
one = { hours = 0.5, times = 49 }
seven = { hours = 2 }

[[notes]]
experiments = ["one"]
smaller = true
text = "Smaller than the paper's."

[[notes]]
experiments = ["one"]
text = "Always there."
"""
    )
    one, seven = (results(f"a/{name}", [claim(0.5)]) for name in ("one", "seven"))
    text = page(tmp_path, one, seven)
    assert "Smaller than" in text
    assert "Always there" in text
    assert "about 0.5 hours of one core for five seeds, which train on 49 times" in text
    assert "machine_hours a/one" in text
    (tmp_path / "a" / "one-full.json").write_text(summary_text({**one, "full": True}))
    text = pages(tmp_path)["replication/a.md"]
    assert "Smaller than" not in text
    assert "Always there" in text
    assert "machine_hours a/one" not in text
    assert "about 2 hours" in text
