"""The forecast of what noise leaves of a training, held to noise that is drawn."""

import json
import math
from typing import Any

import numpy as np
import pytest

from flwr_privacy.acfl.terms import GradientTerms
from flwr_privacy.errors import DataError, InvalidParameterError
from flwr_privacy.m2fdp import DeviceNoise, EventSchedule, M2FDPRoundPlan, TierTree
from flwr_privacy.m2fdp.forecast import forecast_of as forecast_of_tree
from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.privacy.forecast import LIMITS, Forecast
from flwr_privacy.privacy.guarantee import Guarantee
from flwr_privacy.strategies.udp.training_request import forecast_of
from flwr_privacy.udp import UDPTerms

TERMS = {"epsilon": 8.0, "delta": 1e-5, "gap": 1e-3, "grid": -20, "clipping_norm": 0.3}


def of(**values: Any) -> Forecast:
    given = {"ratio": 0.1, "weights": 100, "clients": 10, "rounds": 4, "own_noise": True}
    return Forecast(**{**given, **values})


@pytest.mark.parametrize(("name", "value"), [("ratio", -1.0), ("clients", 0), ("rounds", 0)])
def test_values_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(InvalidParameterError, match=f"{name} = "):
        of(**{name: value})


def test_the_ratio_is_that_of_drawn_noise_to_updates_in_one_direction() -> None:
    """The norm of the noise of all rounds, over the sum of updates that all point the same way."""
    clients, rounds, weights = 5, 16, 4000
    terms = UDPTerms(unit="user", noise_multiplier=0.7, **TERMS)
    forecast = of(ratio=terms.noise_ratio(clients), weights=weights, clients=clients, rounds=rounds)
    draws = np.random.default_rng(3)
    sigma = 0.7 * terms.sensitivity(1)
    noise = draws.normal(0, sigma, (rounds, clients, weights)).mean(axis=1).sum(axis=0)
    moved = rounds * terms.clipping_norm
    assert float(np.linalg.norm(noise)) / moved == pytest.approx(forecast.total, rel=0.03)


@pytest.mark.parametrize("own_noise", [True, False])
def test_so_many_clients_as_it_names_are_enough_and_half_are_not(own_noise: bool) -> None:
    values = {"noise_multiplier": 1.3, "parties": 0 if own_noise else 10, **TERMS}
    terms = UDPTerms(unit="user", **values)

    def with_clients(clients: int) -> Forecast:
        ratio = terms.noise_ratio(clients)
        return of(ratio=ratio, clients=clients, own_noise=own_noise, weights=4000)

    forecast = with_clients(10)
    assert forecast.warns
    needed = int(forecast.text().split("at least ")[1].split()[0].replace(",", ""))
    assert not with_clients(needed).warns
    assert with_clients(needed // 2).warns


def test_the_verdict_follows_the_limits_and_at_record_level_names_the_records() -> None:
    low, high = LIMITS["update"]
    for total, verdict in ((low, "can learn"), (high * 0.99, "far less"), (high * 1.01, "chance")):
        assert verdict in of(ratio=total * math.sqrt(4 / 100)).text()
    text = of(per_record=True, ratio=3.0).text()  # 15 for one record of each client
    assert "where a client has at least 100 records; below 15 expect chance" in text
    assert not of(per_record=True, ratio=3.0).warns
    assert of(ratio=9.0, remedies=("RecordLevel",)).text().endswith("; RecordLevel may help")


@pytest.mark.parametrize(
    ("options", "falls"),
    [
        ({}, True),
        ({"epochs": 5}, False),
        ({"batch_size": 30}, False),
        ({"epochs": 5, "batch_size": 30, "bound": "convex"}, True),
    ],
)
def test_noise_that_does_not_fall_with_the_records_is_not_said_to(
    options: dict[str, Any], falls: bool
) -> None:
    """Ten times as many records: the ratio of what a client noises to the reach of its update."""
    terms = UDPTerms(unit="record", noise_multiplier=1.0, learning_rate=0.1, **TERMS, **options)
    few, many = (terms.sensitivity(n) / terms.reach(n) for n in (600, 6000))
    assert (many < 0.2 * few) == terms.falls_with_records == falls
    ratio = terms.noise_ratio(4) * 2
    assert ratio == pytest.approx(many * 6000 if falls else many, rel=0.05)
    forecast = forecast_of(terms, weights=650, clients=4, rounds=1)
    assert forecast.warns == (not falls)
    assert ("a single step" in forecast.text()) == (not falls)


def tree_plan(p: float, events: dict[int, int], **options: Any) -> M2FDPRoundPlan:
    """A round of a tree with two lowest aggregators of three devices each."""
    return M2FDPRoundPlan(
        tree=TierTree.of_fanouts((2, 3), p=p),
        schedule=EventSchedule(steps=4, events=events),
        privacy=DeviceNoise(epsilon=8.0, clipping_norm=0.05),
        server_round=1,
        total_steps=40,
        rounds=10,
        **options,
    )


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("events", [{}, {1: 2}])
def test_the_noise_of_a_tree_is_that_of_its_nodes(p: float, events: dict[int, int]) -> None:
    """By the weights of all nodes that add noise at an event, and what they add."""
    plan = tree_plan(p, events)
    variance = 0.0
    for exchange in plan.exchanges:
        for zone in exchange.leaves:
            release = plan.release_of(zone, exchange)
            if plan.tree.secure(zone):  # three devices share a sensitivity
                variance += (release.multiplier * 2 * plan.bound(release.steps) / 3 / 2) ** 2
            else:
                variance += 3 * (release.multiplier * 2 * plan.bound(release.steps) / 6) ** 2
    found = forecast_of_tree(plan, weights=50, devices=6)
    assert found.ratio == pytest.approx(math.sqrt(variance) / plan.bound(4))
    assert (found.rounds, found.own_noise) == (10, p < 1)
    assert ("more trusted aggregators" in found.remedies) == (p < 1)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_half_of_the_devices_have_more_noise_each(p: float) -> None:
    every, half = (forecast_of_tree(tree_plan(p, {}), weights=50, devices=n) for n in (6, 3))
    assert half.ratio / every.ratio == pytest.approx(2.0 if p else math.sqrt(2))


@pytest.mark.parametrize("parties", [0, 5])
def test_the_noise_of_coded_gradients_is_that_of_one_record_of_each(parties: int) -> None:
    terms = GradientTerms(
        noise="record",
        **{"features": 20, "labels": 3, "feature_map": "raw", "feature_bound": 1.0},
        **{"label_bound": 1.0, "feature_norm": 1.0, "label_norm": 1.0, "one_hot": True},
        **{"max_records": 100, "epsilon": 8.0, "delta": 1e-5, "gap": 1e-3, "parties": parties},
        **{"noise_multiplier": 2.0, "clipping_norm": 0.5, "batch_fraction": 1.0},
        **{"gradient_bound": 0.0, "grid": -20},
    )
    own = math.sqrt(6) if not parties else 1.0
    found = terms.forecast(7, 6)
    assert found.ratio == pytest.approx(own * terms.sigma / (6 * 0.5))
    assert (found.weights, found.rounds, found.per_record) == (60, 7, True)


def test_the_card_keeps_it() -> None:
    guarantee = Guarantee(scheme="udp", protects="data", adversary="all")
    card = PrivacyCard(experiment_id="e", guarantee=guarantee, forecast="forecast: it can learn")
    assert PrivacyCard.from_json(card.to_json()).forecast == "forecast: it can learn"
    assert "<th>Forecast</th><td>it can learn</td>" in card.to_html()
    wrong = {**json.loads(card.to_json()), "forecast": 7}
    with pytest.raises(DataError, match="no privacy card"):
        PrivacyCard.from_json(json.dumps(wrong))
