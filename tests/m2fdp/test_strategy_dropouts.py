"""M2FDP's two halves together where devices drop out."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tier_training import (
    BOUND,
    HALF,
    SIZE,
    TRIPLES,
    Model,
    Spy,
    charges_of,
    check_ledgers,
    gone,
    run,
    w_of,
)

from flwr_privacy.accounting.gaussian import mu_of
from flwr_privacy.m2fdp import TierTree

pytestmark = pytest.mark.usefixtures("no_settling", "one_accountant")


def push_by_name(name: str, model: Model, config: dict[str, Any]) -> Model:
    return {"w": np.full_like(model["w"], float(name))}


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ("", (1 + 4 + 6.5) / 3),
        ("2", (0.5 + 4 + 6.5) / 3),
        ("12", (4 + 6.5) / 2),  # one answer is too few for a trusted node
        ("012", (4 + 6.5) / 2),
        ("6", (1 + 4 + 7) / 3),  # an insecure one hands on what it has
        ("67", (1 + 4) / 2),
        ("124567", None),
        ("0123467", None),
        ("01234567", None),
    ],
)
def test_weights_are_shared_by_those_who_answer(missing: str, expected: float | None) -> None:
    options = {"unit": "none", "clipping_norm": None, "size": 1}
    result, _ = run(TRIPLES, gone(*missing, then=push_by_name), **options)
    assert result.history[1]["skipped"] == (expected is None)
    assert w_of(result) == pytest.approx(expected or 0.0, abs=1e-6)


def test_min_children_is_the_fewest_that_a_trusted_node_averages() -> None:
    options = {"unit": "none", "clipping_norm": None, "size": 1}
    for least, expected in ((1, (0 + 4 + 6.5) / 3), (2, (4 + 6.5) / 2), (3, (4 + 6.5) / 2)):
        result, _ = run(TRIPLES, gone("1", "2", then=push_by_name), min_children=least, **options)
        assert w_of(result) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("missing", ["", "2", "12"])
def test_the_noise_of_a_trusted_node_grows_as_its_children_drop_out(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sensitivity is that of the devices that answered: 2 C K over their number."""
    spy = Spy(monkeypatch)
    run_options: dict[str, Any] = {"steps": 2, "clipping_norm": 0.5, "min_children": 1}
    result, strategy = run(TRIPLES, gone(*missing), **run_options)
    z = 1 / mu_of(8.0, 1e-5)
    trusted = [z * 2 / (3 - len(missing)), z * 2 / 3]
    assert sorted(spy.sigmas) == pytest.approx(sorted([*trusted, z * 2, z * 2]), rel=1e-6)
    scheme = result.history[1]["scheme"]
    assert scheme["noise_sigma_t1"] == pytest.approx(np.mean(trusted), rel=1e-6)
    assert scheme["noise_sigma_t2"] == pytest.approx(z * 2, rel=1e-6)
    for charges in charges_of(strategy).values():  # what it costs is as before
        assert [charge.noise_multiplier for charge in charges] == pytest.approx([z], rel=1e-6)


def test_the_noise_follows_the_share_of_the_answers_through_all_tiers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A zone of two tiers, 2 x 3 devices: of one edge a single device answers."""
    spy = Spy(monkeypatch)
    tree = TierTree.of_fanouts((1, 2, 3), p=1.0)
    run(tree, gone("0", "1"), clipping_norm=0.5, min_children=1)
    z = 1 / mu_of(8.0, 1e-5)
    assert spy.sigmas == pytest.approx([z * 1.0 / 2], rel=1e-6)  # its weight is 1/2


def test_the_variance_of_the_history_is_that_of_those_who_answered() -> None:
    options = {"min_children": 2, "size": SIZE, "steps": 4, "events": 2}
    result, _ = run(TRIPLES, gone("0", "1", "6"), **options)
    variance = result.history[1]["scheme"]["noise_var"]
    assert w_of(result).var() == pytest.approx(variance, rel=BOUND)


def test_a_round_without_answers_leaves_the_model_and_costs_what_was_asked(tmp_path: Path) -> None:
    everybody = gone(*"0123")
    result, strategy = run(HALF, everybody, num_rounds=2, engine={"state": tmp_path})
    assert [line["skipped"] for line in result.history[1:]] == [True, True]
    assert not w_of(result).any()
    assert sorted(charges_of(strategy)) == list("0123")
    check_ledgers(strategy, tmp_path)


def test_a_zone_whose_first_event_failed_goes_on_from_where_it_was() -> None:
    """Nobody of A answers in the first segment; its devices start from the public model again."""
    starts: dict[str, list[float]] = {}

    def train(name: str, model: Model, config: dict[str, Any]) -> Model:
        if name in "01" and config["segment"] == 0:
            raise RuntimeError("not yet")
        starts.setdefault(name, []).append(float(model["w"][0]))
        return {"w": model["w"] + 1.0}

    options = {"unit": "none", "clipping_norm": None, "clean_events": True}
    result, _ = run(HALF, train, size=1, steps=4, events=2, **options)
    assert starts == {"0": [0.0], "1": [0.0], "2": [0.0, 1.0], "3": [0.0, 1.0]}
    assert w_of(result) == pytest.approx((1 + 2) / 2, abs=1e-6)
