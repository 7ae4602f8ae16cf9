"""The files of experiments: what they say, and what is refused by its name."""

from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from experiment_files import STEPS

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.app.server_app import build_strategy
from flwr_privacy.simulations.research.experiments import files
from flwr_privacy.simulations.research.experiments import runs as experiment_runs
from flwr_privacy.simulations.research.experiments.description import ExperimentDescription
from flwr_privacy.simulations.research.experiments.functions import FUNCTIONS
from flwr_privacy.simulations.tasks.tasks import check_data

FEW_ROUNDS = 5


@pytest.mark.parametrize("name", files.names())
@pytest.mark.parametrize("full", [False, True])
def test_a_file_has_settings_that_can_be_trained(name: str, full: bool) -> None:
    chosen = files.experiment(name)
    assert chosen.claims
    if chosen.function and full and not chosen.smaller:
        return  # what is at the usual size
    if chosen.function:
        assert_that_the_ends_can_be_drawn(chosen, full=full)
        return
    for plan in chosen.planned(full=full):
        settings = chosen.settings(
            plan.curve, seed=0, full=full, x=plan.x, candidate=plan.candidate
        )
        build_strategy(settings, None)
    if chosen.settings(chosen.curves[0], seed=0).task.startswith("cifar10"):
        assert "CIFAR-10 (JPEG)" in chosen.title


def assert_that_the_ends_can_be_drawn(chosen: ExperimentDescription, *, full: bool) -> None:
    """Check each curve at its first and its last place: the settings between have the same keys."""
    function = FUNCTIONS[chosen.function]
    places = [
        point
        for _, curve in groupby(
            experiment_runs.function_points(chosen, full=full), lambda place: place[0]
        )
        for point in ends([point for *_, point in curve])
    ]
    if function.check is not None:
        for point in places:
            function.check(point)  # the simulations themselves take minutes, and most take data
        return
    few = [{**p, "round": min(p["round"], FEW_ROUNDS)} if "round" in p else p for p in places]
    assert all(function.of(few, 0, None))


def ends(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return points if len(points) < 3 else [points[0], points[-1]]


def test_the_figures_of_the_mspdq_paper_are_there() -> None:
    figures = {name.removeprefix("mspdq/") for name in files.names()}
    assert figures >= {
        f"figure{n}" for n in ("2", "3ab", "3cd", "4", "5", "6ab", "6cd", "7ab", "7cd", "7ef")
    }
    claimed = {claim.id for name in files.names() for claim in files.experiment(name).claims}
    assert claimed >= {"F23-a", "F23-b", "F23-c", "F23-d", "F24-a", "F24-b", "F24-c", "F24-d"}


@pytest.mark.parametrize(("name", "sizes"), [("figure12", {800}), ("figure13", {400, 1200})])
def test_F27_the_papers_size_of_unlike_clients(name: str, sizes: set[int]) -> None:
    chosen = files.experiment(f"udp/{name}")
    settings = chosen.settings(chosen.curves[0], seed=0, full=True)
    assert (settings.clients, settings.per_round) == (50, None)
    assert {*settings.partition.sizes} >= sizes
    total = sum(settings.partition.sizes) * 50 // len(settings.partition.sizes)
    assert total == 40_000
    assert check_data(chosen.settings(chosen.curves[0], seed=0)) is not None


def test_the_papers_size_goes_over_what_the_curves_share(
    steps: ExperimentDescription,
) -> None:
    large, small = steps.curves
    scaled = steps.settings(small, seed=4, data_root=Path("/data"))
    assert (scaled.rounds, scaled.training.epochs, scaled.training.learning_rate) == (3, 1, 1e-3)
    assert (scaled.seed, scaled.data_root) == (4, "/data")
    full = [steps.settings(curve, seed=0, full=True) for curve in (large, small)]
    assert [settings.rounds for settings in full] == [5, 5]
    assert [settings.training.epochs for settings in full] == [2, 4]


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("rounds = 3", "rounds = ", "TOML"),
        ("title", "name_of_it", "known keys"),
        ("metrics", "metriks", "known keys"),
        ('"loss"', '"los"', r"metrics = 'los'.*nearest: 'loss'"),
        ('"Small step"\ntraining', '"large STEP"\ntraining', "curve.label = .*that differ"),
        ('"Large step", "Small', '"Large step", "Smal', r"claim S1 = 'Smal step'.*'Small step'"),
        ("better =", "bettter =", r"claim S1 = \[\]: expected one of better, worse"),
        ('better = ["Large step", "Small step"]', 'better = ["Large step"]', "expected 2 curves"),
        ("better =", "within = 0.1\nbetter =", "claim S1: within = 0.1"),
        ("better =", "close =", "claim S1: within = 0.0: expected a number above 0"),
        (
            "better =",
            "target = { loss = 1 }\nbetter =",
            "claim S1: target = .* a target for rounds",
        ),
        ("better =", "at_x = [1]\nbetter =", "claim S1: at_x = "),
        ("better =", 'metric = "value"\nbetter =', "claim S1: metric = 'value'"),
        ("better =", 'metric = "energy"\nbetter =', "claim S1: metric = 'energy'.* M2FDP only"),
        ("better =", 'metric = "best_x"\nbetter =', "claim S1: metric = 'best_x'"),
        ('better = ["Large step", "Small step"]', 'dips = ["Large step"]', "claim S1: dips = "),
        ("better =", 'metric = "distance"\nbetter =', "claim S1: reference = ''"),
        ("better =", 'at = "end"\nbetter =', "claim S1: at = 'end'"),
        ("better =", 'hat = "end"\nbetter =', "claim S1 = 'hat'.*nearest: 'at'"),
        ('text = "the larger step is better"', "", r"claim S1 = \['text'\]"),
        ("accuracy = 0.6", "accuracies = 0.6", "target = 'accuracies'"),
        ("accuracy = 0.6", "accuracy = 0.6\nloss = 1", "expected one of accuracy = , loss = "),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, old: str, new: str, text: str) -> None:
    assert STEPS.count(old) >= 1
    path = tmp_path / "bad.toml"
    path.write_text(STEPS.replace(old, new))
    with pytest.raises(InvalidParameterError, match=text):
        files.read(path, "papers/bad")


def test_a_function_has_no_rounds_in_which_a_level_is_reached(tmp_path: Path) -> None:
    found = files.RESEARCH / "m2fdp" / "figures" / "figure6.toml"
    path = tmp_path / "bad.toml"
    target = 'metric = "energy"\ntarget = { accuracy = 0.5 }'
    path.write_text(found.read_text().replace('metric = "energy"', target, 1))
    with pytest.raises(InvalidParameterError, match=r"claim Fig6-e5: target = .*trainings only"):
        files.read(path, "papers/bad")


def test_a_file_that_extends_another_has_its_curves_with_changes(tmp_path: Path) -> None:
    (tmp_path / "steps.toml").write_text(STEPS)
    path = tmp_path / "longer.toml"
    path.write_text(LONGER)
    longer, steps = (files.read(path.with_stem(name), name) for name in ("longer", "steps"))
    assert [curve.label for curve in longer.curves] == [curve.label for curve in steps.curves]
    assert [claim.id for claim in longer.claims] == ["L1"]
    assert not longer.smaller
    large, small = (longer.settings(curve, seed=0) for curve in longer.curves)
    before, after = (steps.settings(curve, seed=0) for curve in steps.curves)
    assert (large.rounds, small.rounds) == (9, 9)
    assert large.training == before.training
    assert small.training == replace(after.training, batch_size=7)
    assert small.training.learning_rate == 1e-3
    assert (large.task, large.clients) == (before.task, before.clients)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ('"steps"', '"stepz"', "extends = 'stepz'.*nearest: 'steps'"),
        ('"Small step"\n', '"Small stop"\n', "curve.label = 'Small stop'.*nearest: 'Small step'"),
        ('"steps"', '"other"', "extends = 'other'"),
    ],
)
def test_what_cannot_be_extended_is_refused(tmp_path: Path, old: str, new: str, text: str) -> None:
    (tmp_path / "steps.toml").write_text(STEPS)
    (tmp_path / "other.toml").write_text('extends = "longer"')
    path = tmp_path / "longer.toml"
    assert old in LONGER
    path.write_text(LONGER.replace(old, new))
    with pytest.raises(InvalidParameterError, match=text):
        files.read(path, "longer")


LONGER = """
extends = "steps"
title = "Longer"
[base]
rounds = 9
[[curve]]
label = "Small step"
training.batch_size = 7
[[claim]]
id = "L1"
text = "the larger step is better"
better = ["Large step", "Small step"]
"""
