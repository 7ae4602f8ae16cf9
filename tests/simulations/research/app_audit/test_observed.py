"""What left the nodes, from transcripts."""

import numpy as np
import pytest

from flwr_privacy.simulations.research.app_audit.findings import Finding
from flwr_privacy.simulations.research.app_audit.observed import observed
from flwr_privacy.simulations.research.app_audit.transcript import Training

from .conftest import Written

RNG = np.random.default_rng(3)
START = RNG.normal(size=400).astype(np.float32)


def found(written: Written, name: str, **about: object) -> Finding | None:
    return next((f for f in observed(written.done(**about)) if f.name == name), None)


def records(values: list[float]) -> Training:
    inputs = np.array([values])
    return Training(inputs=inputs, labels=np.zeros(1), histogram={0: 1}, records=1, steps=1)


def test_plain_updates_are_a_leak_and_noised_ones_are_not(written: Written) -> None:
    for node in range(3):
        update = RNG.normal(size=400).astype(np.float32)
        written.exchange(start=START, inner=START + update, left=START + update, node=node)
    plain = found(written, "uploads")
    assert plain is not None
    assert plain.verdict == "leak"
    assert plain.numbers["kinds"] == {"plain": 3}


def test_one_plain_update_among_noised_ones_is_a_leak(written: Written) -> None:
    for node in range(3):
        update = RNG.normal(size=400).astype(np.float32)
        noise = 0 if node == 1 else RNG.normal(size=400)
        left = (START + update + noise).astype(np.float32)
        written.exchange(start=START, inner=START + update, left=left, node=node)
    mixed = found(written, "uploads")
    assert mixed is not None
    assert mixed.verdict == "leak"
    assert mixed.said.startswith("The server reads single clients: 1 of 3")


def test_metrics_that_depend_on_data_are_told_and_constants_are_not(written: Written) -> None:
    for node in range(3):
        metrics = {"loss": 0.5 + node, "num-examples": 40, "version": 2}
        written.exchange(metrics=metrics, node=node)
    metrics_found = found(written, "metrics in the clear")
    assert metrics_found is not None
    assert metrics_found.numbers == {"counts": ["num-examples"], "others": ["loss"]}


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("ValueError: bad record [0.1234, 5.5]", "leak"),
        ("ValueError: bad learning rate 0.4321", "note"),
        ("KeyError: 'arrays'", "note"),
    ],
)
def test_the_text_of_an_error_is_compared_with_the_records(
    text: str, verdict: str, written: Written
) -> None:
    written.exchange(error=text, training=records([0.12341, 7.0]))
    errors = found(written, "error texts")
    assert errors is not None
    assert errors.verdict == verdict


def test_arrays_that_repeat_are_told(written: Written) -> None:
    fixed = RNG.normal(size=400).astype(np.float32)
    for number in (1, 2):
        written.exchange(start=START, left=fixed, round=number)
    repeats = found(written, "arrays that repeat")
    assert repeats is not None
    assert repeats.numbers["in several rounds"] == 1


@pytest.mark.parametrize(("own", "verdict"), [(1.0, "leak"), (0.0, "note")])
def test_updates_are_linked_where_clients_differ(
    own: float, verdict: str, written: Written
) -> None:
    directions = RNG.normal(size=(8, 400))
    for number in (1, 2, 3):
        for node in range(8):
            update = own * directions[node] + RNG.normal(size=400)
            left = (START + update).astype(np.float32)
            written.exchange(start=START, left=left, round=number, node=node)
    links = found(written, "links between rounds")
    assert links is not None
    assert links.verdict == verdict
    assert links.numbers["chance"] == pytest.approx(1 / 8)


def test_a_run_that_sent_nothing_says_why(written: Written) -> None:
    nothing = found(
        written, "nothing was sent", ended="crashed", error="OSError: no", network=["a.org"]
    )
    assert nothing is not None
    assert "OSError: no; it asked the network for a.org" in nothing.said
