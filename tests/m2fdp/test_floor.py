"""A device's floor of noise holds where its trusted aggregator adds the noise."""

from pathlib import Path
from typing import Any

import pytest
from apps import message_app, run_strategy
from zones import zone_nodes

from flwr_privacy.clients import M2FDPClient, as_mod
from flwr_privacy.m2fdp import TierTree
from flwr_privacy.strategies import M2FDP, DeviceNoise, LoopOptions

TREE = TierTree.of_fanouts((2, 2), p=0.5)
DEEP = TierTree.of_fanouts((2, 2, 2), p=0.5)  # t1-0 over t2-0 and t2-1 is trusted


def line(tree: TierTree, folder: Path, policies: dict[str, Any]) -> Any:
    strategy = M2FDP(tree=tree, privacy=DeviceNoise(), relay=True, loop=LoopOptions(seed=1))
    nodes = zone_nodes(tree, folder, policies=policies)
    result = run_strategy(strategy, message_app([as_mod(M2FDPClient)]), nodes=nodes, num_rounds=1)
    return result.history[1]["scheme"]


@pytest.mark.parametrize(("name", "tree"), [("two tiers", TREE), ("three tiers", DEEP)])
@pytest.mark.parametrize("share", [0.9, 1.1])
def test_A24_a_zone_keeps_to_the_largest_floor_of_its_members(
    name: str, tree: TierTree, share: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The zone's noise is that of a device over its number of devices."""
    for folder in ("free", "bound"):
        (tmp_path / folder).mkdir()
    sigma = line(tree, tmp_path / "free", {})["noise_sigma_t1"]
    bound = line(tree, tmp_path / "bound", {"1": {"min_sigma": share * sigma}})
    assert ("noise_sigma_t1" in bound) == (share < 1)
    assert ("a member of the zone has min_sigma = " in caplog.text) == (share > 1)
