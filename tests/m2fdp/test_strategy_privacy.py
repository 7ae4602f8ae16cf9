"""M2FDP's two halves together: what every device spends, is charged, and is promised."""

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from apps import make, model_of, record, run_strategy
from tier_training import (
    DEEP,
    DEEP_EVENTS,
    HALF,
    MIXED,
    Model,
    Spy,
    Train,
    app_of,
    change_all,
    charges_of,
    check_ledgers,
    entries_of,
    nodes_of,
    run,
    spent_of,
    stay,
)

from flwr_privacy.accounting import spent
from flwr_privacy.accounting.gaussian import mu_of
from flwr_privacy.clients.torch import get_arrays, set_arrays, train_poisson
from flwr_privacy.m2fdp import EventSchedule, TierTree
from flwr_privacy.m2fdp.paper_noise import sigma
from flwr_privacy.m2fdp.terms import any_batch
from flwr_privacy.simulations.research.m2fdp.paper_epsilons import true_epsilon
from flwr_privacy.stragglers import StragglerModel
from flwr_privacy.strategies import M2FDP
from flwr_privacy.wire.message import RECORD

pytestmark = pytest.mark.usefixtures("no_settling", "one_accountant")


# -- Equal privacy --------------------------------------------------------------------------------

EQUAL: dict[str, dict[str, Any]] = {
    "one release": {"steps": 3},
    "four and one": {"steps": 4, "events": 1},
    "unequal segments": {"steps": 7, "events": {1: [1, 3]}},
    "clean events": {"steps": 7, "events": {1: [1, 3]}, "clean_events": "worst"},
    "steps that fall": {"steps": 4, "events": 2, "step_rule": "inv_sqrt"},
    "star": {"tree": TierTree.of_fanouts((3,)), "steps": 2},
    "three tiers": {"tree": DEEP, **DEEP_EVENTS},
    "three tiers, clean": {"tree": DEEP, "clean_events": "worst", **DEEP_EVENTS},
    "much": {"steps": 4, "events": 2, "epsilon": 300.0},
    "little": {"steps": 4, "events": 2, "epsilon": 0.05},
    "smooth": {
        "steps": 4,
        "events": 2,
        "clean_events": "smooth",
        "smoothness": 0.1,
    },
    "control": {
        "steps": 6,
        "events": 1,
        "num_rounds": 8,
        "control": "adaptive",
        "total_steps": 11,
        "max_steps": 6,
        "initial_steps": 6,
    },
}


@pytest.mark.parametrize("case", EQUAL)
def test_every_device_spends_the_budget_wherever_its_noise_enters(
    case: str, tmp_path: Path
) -> None:
    options = {"tree": HALF, "num_rounds": 3, "epsilon": 2.0, **EQUAL[case]}
    tree = options.pop("tree")
    result, strategy = run(tree, stay, engine={"state": tmp_path}, **options)
    totals = spent_of(strategy)
    assert set(totals) == set(tree.devices)
    for total in totals.values():
        assert total == pytest.approx(options["epsilon"], rel=1e-6)
        assert total <= options["epsilon"] * (1 + 1e-9)
    check_ledgers(strategy, tmp_path)
    strategy.card().verify()
    for line in result.history[1:]:
        assert (line["accumulated"], line["refused"]) == (line["asked"], {})
    assert result.guarantee.epsilon == options["epsilon"]


def test_devices_decline_a_round_too_many() -> None:
    """A training that goes on beyond what it was planned for gets nothing more of anybody."""
    asked: list[int] = []

    def train(name: str, model: Model, config: dict[str, Any]) -> Model:
        asked.append(config["server-round"])
        return model

    class Greedy(M2FDP):
        def setup(self, grid: Any) -> None:
            super().setup(grid)
            schedule = self._tier_schedule
            schedule.total_steps = 4  # noise for two rounds, and a queue for three
            schedule._first = replace(schedule._first, participations={})

    strategy = make(Greedy, tree=HALF, steps=2, experiment_id="e")
    result = run_strategy(
        strategy, app_of(train), nodes=nodes_of(HALF), arrays=record({"w": np.zeros(2)})
    )
    assert [line["accumulated"] for line in result.history[1:]] == [4, 4, 0]
    assert result.history[3]["refused"] == {"declined": 4}
    assert result.history[3]["skipped"]
    assert sorted(set(asked)) == [1, 2]
    assert set(map(len, charges_of(strategy).values())) == {2}


def test_who_does_not_take_part_pays_nothing(tmp_path: Path) -> None:
    tree = TierTree.of_fanouts((2, 4), p=0.5)
    options = {"fraction_train": 0.5, "min_train_nodes": 0, "steps": 4, "events": 2}
    result, strategy = run(tree, stay, num_rounds=3, engine={"state": tmp_path}, **options)
    for line in result.history[1:]:
        assert line["scheme"]["participation_secure"] == 0.5
        assert line["scheme"]["participation_insecure"] == 0.5
    check_ledgers(strategy, tmp_path)
    rounds = {name: len(entries_of(tmp_path, name)) for name in tree.devices}
    assert sum(rounds[name] for name in "0123") == 2 * 3
    assert sum(rounds[name] for name in "4567") == 2 * 3 * 2
    whole = math.sqrt(2) / mu_of(8.0, 1e-5)
    for name in "0123":  # in turns nobody takes part in more than two of the three rounds
        for entry in entries_of(tmp_path, name):
            assert entry.charge.noise_multiplier == pytest.approx(whole, rel=1e-6)
    assert max(spent_of(strategy).values()) <= 8.0


class Late(StragglerModel):
    """Who is late in a round, whatever is asked."""

    def race(self, clients: Any, *, server_round: int, phase: str, **_: Any) -> Any:
        late = {1: {"0"}, 2: {"2"}}.get(server_round, set()) if phase == "train" else set()
        return late.intersection(clients), 1.0


def test_late_devices_pay(tmp_path: Path) -> None:
    options = {"steps": 2, "stragglers": Late(), "min_children": 1}
    result, strategy = run(HALF, stay, num_rounds=2, engine={"state": tmp_path}, **options)
    assert [line["late"] for line in result.history[1:]] == [1, 1]
    assert [line["accumulated"] for line in result.history[1:]] == [3, 3]
    assert set(map(len, charges_of(strategy).values())) == {2}
    check_ledgers(strategy, tmp_path)
    assert list(spent_of(strategy).values()) == pytest.approx([8.0] * 4, rel=1e-6)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_device_that_drops_out_between_clean_events_pays_once(
    failing: int, tmp_path: Path
) -> None:
    """Device 0 fails in one of three segments: what it gave before is in the zone's release."""

    def train(name: str, model: Model, config: dict[str, Any]) -> Model:
        if name == "0" and config["segment"] == failing:
            raise RuntimeError("no more")
        return model

    tree = TierTree.of_fanouts((2, 3), p=0.5)
    options = {"steps": 6, "events": 2, "clean_events": "worst"}
    result, strategy = run(tree, train, engine={"state": tmp_path}, **options)
    assert not result.history[1]["skipped"]
    counts = {name: len(charges) for name, charges in charges_of(strategy).items()}
    assert counts == {"0": 1, "1": 1, "2": 1, "3": 3, "4": 3, "5": 3}
    check_ledgers(strategy, tmp_path)


def test_a_device_whose_training_fails_pays_on_both_sides(tmp_path: Path) -> None:
    def train(name: str, model: Model, config: dict[str, Any]) -> Model:
        if name == "0":
            raise RuntimeError("no more")
        return model

    tree = TierTree.of_fanouts((2, 3), p=0.5)
    options = {"steps": 6, "events": 2, "clean_events": "worst"}
    _, strategy = run(tree, train, engine={"state": tmp_path}, **options)
    assert charges_of(strategy)["0"] == [e.charge for e in entries_of(tmp_path, "0")] != []
    check_ledgers(strategy, tmp_path)


@pytest.mark.parametrize("phase", ["first", "later"])
def test_a_reply_that_is_lost_is_paid_for_on_both_sides(phase: str, tmp_path: Path) -> None:
    seen: list[str] = []

    def lose(grid: Any) -> None:
        pull = grid.pull_messages

        def pull_messages(ids: Any) -> Any:
            for reply in pull(ids):
                name = reply.content[RECORD]["client-id"] if reply.has_content() else ""
                mine = name == "0" and reply.content[RECORD]["phase"] == "train"
                if mine:
                    seen.append(name)
                if not (mine and len(seen) == (1 if phase == "first" else 2)):
                    yield reply

        grid.pull_messages = pull_messages

    tree = TierTree.of_fanouts((2, 3), p=0.5)
    options = {"steps": 6, "events": 2, "clean_events": "worst", "deadline": 1.0}
    _, strategy = run(tree, stay, engine={"state": tmp_path, "before": lose}, **options)
    assert len(charges_of(strategy)["0"]) == 1
    check_ledgers(strategy, tmp_path)


# -- Calibrations ---------------------------------------------------------------------------------


def linear(name: str, model: Model, config: dict[str, Any]) -> Model:
    """Train a linear model on Poisson batches, as many steps as the scheme asks."""
    net = torch.nn.Linear(2, 2)
    set_arrays(net, model)
    draws = np.random.default_rng(int(name))
    features = draws.normal(size=(40, 2)).astype(np.float32)
    train_poisson(net, features, draws.integers(0, 2, 40), learning_rate=0.1)
    return dict(get_arrays(net))


LINEAR = dict(get_arrays(torch.nn.Linear(2, 2)))
RECORD_OPTIONS: dict[str, Any] = {
    "unit": "record",
    "sampling_rate": 0.1,
    "steps": 4,
    "events": 2,
    "epsilon": 8.0,
    "delta": 1e-3,
    "num_rounds": 2,
}


def test_records_are_protected_by_poisson_batches(tmp_path: Path) -> None:
    result, strategy = run(
        MIXED, linear, start=LINEAR, engine={"state": tmp_path}, **RECORD_OPTIONS
    )
    assert [line["refused"] for line in result.history[1:]] == [{}, {}]
    for name, steps, releases in (("1", 4, 1), ("5", 2, 2)):
        entries = entries_of(tmp_path, name)
        assert len(entries) == 2 * releases
        assert {entry.unit for entry in entries} == {"record"}
        assert {entry.charge.sampling for entry in entries} == {any_batch(0.1, steps)}
        charges = [entry.charge for entry in entries]
        total = spent(charges, delta=1e-3, accountant="rdp")
        assert 8.0 * (1 - 1e-3) < total <= 8.0
    check_ledgers(strategy, tmp_path)
    assert result.guarantee.protects == "one record of a device"
    assert result.guarantee.accountant == "rdp"
    assert (w_of_linear := model_of(result.arrays)["weight"]).shape == (2, 2)
    assert (w_of_linear != LINEAR["weight"]).all()


@pytest.mark.parametrize(
    ("train", "text"),
    [
        (stay, "the training did no steps on Poisson batches"),
        (lambda n, m, c: change_all(n, linear(n, m, c), c), "the training returned other arrays"),
        (lambda n, m, c: linear(n, linear(n, m, c), c), "called a trainer for Poisson batches 2"),
    ],
    ids=["none", "changed", "twice"],
)
def test_a_training_without_poisson_batches_is_not_released(
    train: Train, text: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    options = {**RECORD_OPTIONS, "num_rounds": 1, "events": None}
    with caplog.at_level(logging.WARNING, "flwr.privacy"):
        result, strategy = run(MIXED, train, start=LINEAR, engine={"state": tmp_path}, **options)
    assert result.history[1]["skipped"]
    assert text in caplog.text
    check_ledgers(strategy, tmp_path)  # it was charged before anybody could see that


def test_the_paper_promises_what_its_noise_costs(caplog: pytest.LogCaptureFixture) -> None:
    """alpha 0.01, as the accuracies of the paper need it: nowhere near the epsilon it says."""
    options = {"unit": "paper", "alpha": 0.01, "sampling_rate": 0.05, "epsilon": 1.0}
    with caplog.at_level(logging.INFO, "flwr.privacy"):
        result, strategy = run(HALF, stay, steps=4, events=2, num_rounds=2, **options)
    promise = result.guarantee
    schedule = EventSchedule(steps=4, events={1: 2})
    z = sigma(1.0, q=0.05, n_comp=8, eps=1.0, delta=1e-5, alpha=0.01)
    true = {
        tier: true_epsilon(HALF, schedule, tier, multiplier=z, rounds=2, delta=1e-5)
        for tier in (1, 2)
    }
    assert promise.epsilon == pytest.approx(max(true.values()), rel=1e-4)
    assert promise.epsilon > 1e3
    text = "the (epsilon = 1) that the paper's noise is named after: what it costs, all data of a "
    assert text + f"device replaced, is epsilon {promise.epsilon:.4g}" in promise.text()
    assert f"is epsilon {promise.epsilon:.4g}" in caplog.text
    totals = spent_of(strategy)
    for name, tier in (("0", 1), ("2", 2)):
        assert totals[name] == pytest.approx(true[tier], rel=1e-4)
    strategy.card().verify()
    assert promise.delta == 1e-5


def test_without_noise_nothing_is_promised(tmp_path: Path) -> None:
    options = {"unit": "none", "clipping_norm": None}
    result, strategy = run(HALF, stay, engine={"state": tmp_path}, **options)
    assert (result.guarantee.protects, result.guarantee.epsilon) == ("nothing", None)
    assert charges_of(strategy) == {}
    assert not list(tmp_path.glob("*.ledger"))
    assert result.history[1]["scheme"]["noise_var"] == 0.0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"clean_events": "smooth", "smoothness": 0.1},
            "losses are as smooth as declared",
        ),
        ({"clean_events": "lemma"}, "losses are convex and smooth, and stay so under"),
    ],
)
def test_a_declared_drift_is_an_assumption_and_its_charges_are_not_proven(
    options: Any, text: str, tmp_path: Path
) -> None:
    events = {"steps": 4, "events": 2}
    result, _ = run(MIXED, stay, engine={"state": tmp_path}, **options, **events)
    assert any(text in assumption for assumption in result.guarantee.assumptions)
    assert {entry.scheme for entry in entries_of(tmp_path, "1")} == {"m2fdp-unproven"}
    assert {entry.scheme for entry in entries_of(tmp_path, "5")} == {"m2fdp"}


def test_smooth_losses_need_less_noise_than_the_worst(monkeypatch: pytest.MonkeyPatch) -> None:
    """(5 + 5) steps of growth 1.1, one clean event, 2 children: the reach by hand."""
    found = {}
    tree = TierTree.of_fanouts((1, 2), p=1.0)
    for drift, options in (
        ("worst", {}),
        ("smooth", {"smoothness": 0.1}),
        ("lemma", {}),
    ):
        spy = Spy(monkeypatch)
        run(tree, stay, steps=10, events=5, clean_events=drift, **options)
        (found[drift],) = spy.sigmas
        monkeypatch.undo()
        monkeypatch.setattr("flwr_privacy.strategies.requests.federation._SETTLE", 0.0)
    z = 1 / mu_of(8.0, 1e-5)
    assert found["worst"] == pytest.approx(z * (2 * 5 / 2 + 2 * 5), rel=1e-6)
    assert found["lemma"] == pytest.approx(z * (2 * 5 / 2 + 2 * 5 / 2), rel=1e-6)
    assert found["lemma"] < found["smooth"] < found["worst"]
