"""Mode R: aggregators that are nodes of their own, and a server that only passes messages on."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from apps import message_app, run_strategy, same
from flwr.app import Message
from zones import zone_nodes

from flwr_privacy.clients import M2FDPClient, as_mod
from flwr_privacy.m2fdp import TierTree
from flwr_privacy.strategies import M2FDP

SEED = 11
HALF = TierTree.of_fanouts((2, 2), p=0.5)
DEEP = TierTree.of_fanouts((2, 2, 2), p=(0.5, 0.5))
SCHEDULES = {
    "no local events": {"steps": 4},
    "local events": {"steps": 4, "events": 2},
    "clean events": {"steps": 4, "events": 2, "clean_events": True},
}


@pytest.fixture(autouse=True)
def _no_pause_before_nodes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flwr_privacy.strategies.federation._SETTLE", 0.0)


def app() -> Any:
    return message_app([as_mod(M2FDPClient)])


def simulated(tree: TierTree, **options: Any) -> Any:
    strategy = M2FDP(tree=tree, experiment_id="e", seed=1, insecure_seed=SEED, **options)
    return run_strategy(strategy, app(), nodes=len(tree.devices), insecure_seed=SEED)


def relayed(
    tree: TierTree, folder: Path, start: dict[str, Any] | None = None, **options: Any
) -> Any:
    changes = {k: options.pop(k) for k in ("policies", "unpinned") if k in options}
    strategy = M2FDP(tree=tree, experiment_id="e", seed=1, relay=True, **options)
    nodes = zone_nodes(tree, folder, **changes)
    return run_strategy(strategy, app(), nodes=nodes, insecure_seed=SEED, **(start or {}))


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize(("name", "tree"), [("two tiers", HALF), ("three tiers", DEEP)])
def test_the_relayed_model_is_that_of_the_simulation(
    name: str, tree: TierTree, schedule: str, tmp_path: Path
) -> None:
    options = dict(SCHEDULES[schedule], clipping_norm=0.5, epsilon=200.0)
    if name == "three tiers" and "events" in options:
        options |= {"steps": 6, "events": {1: [4], 2: [2]}}
    one, other = simulated(tree, **options), relayed(tree, tmp_path, **options)
    assert same(one.arrays, other.arrays)
    assert [line["folded"] for line in other.history[1:]] == [
        line["folded"] for line in one.history[1:]
    ]
