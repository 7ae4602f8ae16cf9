"""M2FDP's two halves together where a controller chooses steps and devices."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from apps import same
from conformance import Killed
from flwr.app import ArrayRecord, MetricRecord
from tier_training import HALF, Model, check_ledgers, descend, run, spent_of, stay

from flwr_privacy.errors import CheckpointError
from flwr_privacy.m2fdp import (
    AdaptiveController,
    Decision,
    NoNoise,
    ResourceModel,
    TierCohorts,
    TierTree,
)
from flwr_privacy.strategies import AdaptiveControl, DeviceNoise

pytestmark = pytest.mark.usefixtures("no_settling", "one_accountant")


def test_control_uses_all_steps_and_then_ends(caplog: pytest.LogCaptureFixture) -> None:
    told: list[int] = []

    def train(name: str, model: Model, config: dict[str, Any]) -> Model:
        if name == "0":
            told.append(config["local-steps"])
        return model

    control = AdaptiveControl(total_steps=11, max_steps=4, initial_steps=4)
    with caplog.at_level(logging.WARNING, "flwr.privacy"):
        result, strategy = run(HALF, train, num_rounds=20, steps=4, control=control)
    steps = [int(line["scheme"]["steps"]) for line in result.history[1:]]
    assert sum(steps) == sum(told) == 11
    assert steps == told
    assert max(steps) <= 4
    assert "the 11 local steps are used up" in caplog.text
    assert list(spent_of(strategy).values()) == pytest.approx([8.0] * 4, rel=1e-6)


def test_control_may_ask_fewer_devices() -> None:
    tree = TierTree.of_fanouts((2, 4), p=0.5)
    control = AdaptiveControl(total_steps=6, max_steps=3, weights=(1e6, 0.0, 1e-6))
    result, _ = run(tree, stay, num_rounds=6, control=control)
    schemes = [line["scheme"] for line in result.history[1:]]
    assert {line["participation_secure"] for line in schemes} == {0.5}  # min_children is 2
    assert min(line["participation_insecure"] for line in schemes) < 1
    for line in result.history[1:]:
        shares = line["scheme"]["participation_secure"], line["scheme"]["participation_insecure"]
        assert line["asked"] == 4 * sum(shares)


DECISION = Decision(steps=2, secure=3, insecure=1, energy=0.0, delay=0.0, nu=0.0)


def test_devices_below_a_secure_node_of_tier_1_are_those_of_the_secure_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(AdaptiveController, "decide", lambda own, left: DECISION)
    tree = TierTree.of_fanouts((2, 4), p=0.5)
    control = AdaptiveControl(total_steps=2, max_steps=2)
    result, _ = run(tree, stay, control=control)
    numbers = result.history[1]["scheme"]
    assert (numbers["participation_secure"], numbers["participation_insecure"]) == (0.75, 0.25)
    assert result.history[1]["answered"] == 4


def test_the_choice_goes_by_tier_1_whatever_is_below() -> None:
    """A secure node below an insecure one of tier 1 has the insecure choice."""
    tree = TierTree.of_fanouts((2, 2, 4), p=(0.5, 0.5))
    cohorts = TierCohorts(tree=tree, sampling="balanced", share=1.0, least=1)
    sizes = cohorts.sizes(1, DECISION, seed=0)
    secure = {leaf: tree.secure(leaf) for leaf in sizes}
    assert secure == {"t2-0": True, "t2-1": True, "t2-2": True, "t2-3": False}
    assert sizes == {
        **{"t2-0": 3, "t2-1": 3},
        **{"t2-2": 1, "t2-3": 1},
    }


def test_a_controlled_run_resumes_with_the_steps_that_are_left(tmp_path: Path) -> None:
    def kill(line: dict[str, Any]) -> None:
        if line["round"] == 2:
            raise Killed

    control = AdaptiveControl(total_steps=9, max_steps=4, initial_steps=3)
    folders = [tmp_path / name for name in ("run", "nodes", "other")]
    for folder in folders:
        folder.mkdir()
    options: Any = {"num_rounds": 9, "control": control, "insecure_seed": 5}
    engine = {"insecure_seed": 5, "state": folders[2]}
    unbroken, _ = run(HALF, descend, engine=engine, **options)
    options |= {"engine": {"insecure_seed": 5, "state": folders[1]}, "run_dir": folders[0]}
    with pytest.raises(Killed):
        run(HALF, descend, on_round=kill, **options)
    resumed, strategy = run(HALF, descend, resume=True, **options)
    assert same(unbroken.arrays, resumed.arrays)
    steps = [[line["scheme"]["steps"] for line in r.history[1:]] for r in (unbroken, resumed)]
    assert steps[0] == steps[1]
    assert sum(steps[0]) == 9
    check_ledgers(strategy, folders[1])


CONTROL: dict[str, Any] = {"total_steps": 8, "max_steps": 4, "initial_steps": 4}
CHANGES: dict[str, dict[str, Any]] = {
    "control": {"control": AdaptiveControl(**{**CONTROL, "max_steps": 5})},
    "num_rounds": {"num_rounds": 8},
    "schedule": {"steps": 4},
    "privacy": {"epsilon": 9.0},
    "resources": {"resources": ResourceModel(step_energy=1.0)},
    "step_rule": {"step_rule": "inv_sqrt"},
}


def interrupted(folder: Path, **options: Any) -> dict[str, Any]:
    """Train the first of nine rounds; return the options with which the training goes on."""

    def kill(line: dict[str, Any]) -> None:
        if line["round"] == 1:
            raise Killed

    for name in ("run", "nodes"):
        (folder / name).mkdir()
    options |= {"run_dir": folder / "run", "engine": {"state": folder / "nodes"}}
    with pytest.raises(Killed):
        run(HALF, stay, on_round=kill, **options)
    return {**options, "resume": True}


@pytest.mark.parametrize(
    ("key", "change"),
    [
        *CHANGES.items(),
        ("control", {"control": AdaptiveControl(**CONTROL, weights=(9.0, 1.0, 1.0))}),
        ("control", {"control": None}),
    ],
)
def test_a_resume_is_refused_if_the_noise_so_far_was_for_something_else(
    key: str, change: dict[str, Any], tmp_path: Path
) -> None:
    options = interrupted(tmp_path, num_rounds=9, control=AdaptiveControl(**CONTROL))
    refused = f"the checkpoint was calibrated for {key} = .*: the noise of the rounds that are done"
    with pytest.raises(CheckpointError, match=refused):
        run(HALF, stay, **{**options, **change})
    run(HALF, stay, **options)


def test_a_resume_without_the_noise_so_far_is_refused(tmp_path: Path) -> None:
    options = interrupted(tmp_path, num_rounds=2)
    refused = "calibrated for privacy = .*DeviceNoise.*, not .*NoNoise.*: the noise of the rounds"
    with pytest.raises(CheckpointError, match=refused):
        run(HALF, stay, **{**options, "privacy": NoNoise()})


@pytest.mark.parametrize(
    ("tree", "refused"),
    [
        (TierTree.of_fanouts((2, 2), p=1.0), r"trusted = \['t1-0'\], not \['t1-0', 't1-1'\]: the"),
        (
            TierTree(
                parents={"t1-0": "cloud", "t1-1": "cloud", "0": "t1-0", "1": "t1-0", "2": "t1-0"}
                | {"3": "t1-1"},
                devices=("0", "1", "2", "3"),
                trusted=frozenset({"t1-0"}),
            ),
            r"tree = .*\['t1-0', 2\].*, not .*\['t1-0', 3\]",
        ),
    ],
)
def test_a_resume_is_refused_if_the_noise_so_far_was_for_another_tree(
    tree: TierTree, refused: str, tmp_path: Path
) -> None:
    options = interrupted(tmp_path, num_rounds=2)
    with pytest.raises(CheckpointError, match=f"calibrated for {refused}"):
        run(tree, stay, **options)
    run(HALF, stay, **options)


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ({"privacy": DeviceNoise(epsilon=8.0)}, {"privacy": DeviceNoise(epsilon=8)}),
        ({"steps": 4, "events": {1: [2]}}, {"steps": 4, "events": {1: (2,)}}),
        ({}, {"resources": ResourceModel()}),
        ({}, {"resources": ResourceModel(step_energy=1.0)}),
        (
            {"control": AdaptiveControl(**CONTROL)},
            {
                "control": AdaptiveControl(**CONTROL, weights=[1, 1, 1]),
                "resources": ResourceModel(),
            },
        ),
    ],
)
def test_a_resume_with_equal_values_goes_on(
    then: dict[str, Any], now: dict[str, Any], tmp_path: Path
) -> None:
    options = interrupted(tmp_path, num_rounds=2, **then)
    result, _ = run(HALF, stay, **{**options, **now})
    assert [line["round"] for line in result.history] == [0, 1, 2]


def test_without_noise_a_training_may_become_longer(tmp_path: Path) -> None:
    options = interrupted(tmp_path, num_rounds=2, privacy=NoNoise())
    result, _ = run(HALF, stay, **{**options, "num_rounds": 3})
    assert [line["round"] for line in result.history] == [0, 1, 2, 3]


@pytest.mark.parametrize("evaluated", [False, True])
def test_steps_of_rounds_that_were_given_up_are_done(evaluated: bool, tmp_path: Path) -> None:
    """Of round 1 there are two checkpoints: before its model is evaluated, and after."""
    folder, old = tmp_path / "run", tmp_path / "old"
    folder.mkdir()

    def back_up(server_round: int) -> None:
        if server_round == 1:
            shutil.copy(folder / "checkpoint.bin", old)

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        if not evaluated:
            back_up(server_round)
        return MetricRecord()

    def ended(line: dict[str, Any]) -> None:
        if evaluated:
            back_up(line["round"])
        if line["round"] == 4:
            raise Killed

    control = AdaptiveControl(total_steps=8, max_steps=2, initial_steps=2)
    options: dict[str, Any] = {
        "num_rounds": 20,
        "control": control,
        "run_dir": folder,
        "engine": {"state": tmp_path / "state", "evaluate_fn": evaluate},
    }
    (tmp_path / "state").mkdir()
    with pytest.raises(Killed):
        run(HALF, descend, on_round=ended, **options)
    shutil.copy(old, folder / "checkpoint.bin")
    resumed, strategy = run(HALF, descend, resume=True, accept_lost_rounds=True, **options)
    lines = resumed.history[1:]
    lost = [line["round"] for line in lines if "lost" in line]
    assert lost == ([2, 3, 4] if evaluated else [1, 2, 3, 4])
    assert sum(line["scheme"]["steps"] for line in lines) == 8
    assert all(line["refused"] == {} for line in lines)
    check_ledgers(strategy, tmp_path / "state")


LONG = {"num_rounds": 12, "steps": 20, "events": 5, "fanouts": "2,2", "clipping_norm": 0.1}
SHORTER_AND_SHORTER = AdaptiveControl(total_steps=104, max_steps=20, weights=(1.0, 1.0, 0.0))


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_the_papers_noise_costs_under_control_what_is_stated(p: float, tmp_path: Path) -> None:
    """K changes, and with it what a round costs; the paper begins with 5 steps."""
    noise = {"unit": "paper", "alpha": 1.0, "sampling_rate": 0.05, "epsilon": 1.0}
    options = {"p": p, "control": SHORTER_AND_SHORTER, **noise, **LONG}
    result, strategy = run(None, descend, engine={"state": tmp_path}, **options)
    lines = result.history[1:]
    assert [line["scheme"]["steps"] for line in lines] == [5, *[20] * 4, 19]
    assert all(line["refused"] == {} and line["answered"] == 4 for line in lines)
    stated = strategy.card().guarantee.epsilon
    assert stated is not None
    assert list(spent_of(strategy).values()) == pytest.approx([stated] * 4, rel=1e-5)
    assert max(spent_of(strategy).values()) <= stated
    check_ledgers(strategy, tmp_path)


def test_no_device_is_lost_where_rounds_have_different_numbers_of_releases() -> None:
    """A round of 20 steps has four releases, and one of 4 steps has one."""
    options = {"p": 0.0, "control": SHORTER_AND_SHORTER, "epsilon": 4.0, **LONG}
    result, strategy = run(None, descend, **options)
    lines = result.history[1:]
    assert [line["scheme"]["steps"] for line in lines] == [20] * 5 + [4]
    assert all(line["answered"] == 4 for line in lines)
    assert list(spent_of(strategy).values()) == pytest.approx([4.0] * 4, rel=1e-5)


def test_with_the_papers_noise_the_controller_is_the_papers() -> None:
    """Nothing is divided there, so that the printed noise term outweighs joules and seconds."""
    control = AdaptiveControl(total_steps=8, max_steps=20)
    options: dict[str, Any] = {"num_rounds": 9, "control": control, "epsilon": 1.0}
    printed = {"unit": "paper", "alpha": 1.0, "sampling_rate": 0.05, "clipping_norm": 0.1}
    paper, ours = (run(HALF, stay, **options, **more)[0] for more in (printed, {}))
    steps = [[int(line["scheme"]["steps"]) for line in r.history[1:]] for r in (paper, ours)]
    assert steps[0] == [5, 1, 1, 1]
    assert steps[1][0] > 1
    assert control.parameters(printed=True) == {
        "total_steps": 8,
        "max_steps": 20,
        "weights": (1.0, 1.0, 1.0),
        "normalise": False,
        "nu": "printed",
        "active_tiers": "all",
        "initial_steps": 5,
    }
    own = AdaptiveControl(total_steps=8, max_steps=3, normalise=True, nu="dedup")
    found = own.parameters(printed=True)
    assert (found["normalise"], found["nu"], found["initial_steps"]) == (True, "dedup", 3)
