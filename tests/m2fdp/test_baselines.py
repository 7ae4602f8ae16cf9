"""M2FDP's baselines by their names on the command line."""

from typing import Any

import pytest

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.m2fdp import DeviceNoise, NoNoise, PaperNoise
from flwr_privacy.simulations.app.server_app import build_strategy
from flwr_privacy.simulations.settings.run_settings import Settings
from flwr_privacy.simulations.settings.schemes import scheme
from flwr_privacy.strategies import M2FDP

PAPER = {"unit": "paper", "alpha": 1.0, "sampling_rate": 0.05}


def built(name: str, **chosen: Any) -> M2FDP:
    own = scheme(name).usual(chosen, None)
    strategy = build_strategy(Settings(scheme=name, clients=50, strategy=own), None)
    assert isinstance(strategy, M2FDP)
    return strategy


@pytest.mark.parametrize(
    ("name", "chosen", "noise", "depth"),
    [
        ("m2fdp-hfl", {"fanouts": "10,5"}, NoNoise, 2),
        ("m2fdp-hfl-dp", {"fanouts": "10,5"}, DeviceNoise, 2),
        ("m2fdp-hfl-dp", {"fanouts": "10,5", "edge_noise": True, **PAPER}, PaperNoise, 2),
        ("m2fdp-pedpfl", {}, DeviceNoise, 1),
        ("m2fdp-pedpfl", {"perturb_reg": True, **PAPER}, PaperNoise, 1),
        ("m2fdp", {"fanouts": 50, "unit": "device"}, DeviceNoise, 1),
    ],
)
def test_a_baseline_has_its_name(name: str, chosen: dict[str, Any], noise: Any, depth: int) -> None:
    strategy = built(name, **chosen)
    assert isinstance(strategy.privacy, noise)
    assert strategy.tree.depth == depth
    assert len(strategy.tree.devices) == 50
    edges = [node for tier in strategy.tree.tiers[1:-1] for node in tier]
    assert not any(map(strategy.tree.secure, edges))
    assert strategy.schedule.steps == 20
    assert strategy.schedule.at(1) == ((5, 10, 15) if depth > 1 else ())


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("m2fdp-hfl", {"fanouts": "10,5", "unit": "device"}),
        ("m2fdp-hfl-dp", {"fanouts": "10,5", "p": 0.5}),
        ("m2fdp-pedpfl", {"fanouts": "10,5"}),
    ],
)
def test_what_makes_a_baseline_is_not_chosen(name: str, chosen: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameterError, match="the scheme's own parameters only"):
        built(name, **chosen)
