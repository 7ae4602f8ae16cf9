"""Rows of linear layers, on transcripts that the test writes."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from flwr_privacy.simulations.research.app_audit.rebuilt.from_few import rows
from flwr_privacy.simulations.research.app_audit.rebuilt.linear_rows import EXACT, compared

from .trainings import case, data, network, noise, plain_sgd, run

SIZES = 1, 2, 4, 8
MODEL = network(20, 64, 5)
FEW = [data(n, 20, seed=10 + n) for n in SIZES]
MANY = [data(40, 20, seed=30 + i) for i in range(3)]


def alone(model: nn.Sequential, inputs: NDArray[np.float32]) -> NDArray[np.bool_]:
    """The records that some unit of the first layer is active for, and for no other."""
    active = (model[1](torch.tensor(inputs)) > 0).numpy()
    only = active.sum(axis=0) == 1
    return (active & only).any(axis=1)


def test_with_relu_the_records_that_have_a_unit_for_themselves_are_exact(tmp_path: Path) -> None:
    start = network(20, 64, 5)
    expected = {len(inputs): int(alone(start, inputs).sum()) for inputs, _ in FEW}
    assert expected[1] == 1
    assert expected[2] == 2
    few = run(tmp_path / "few", network(20, 64, 5), FEW)
    found = rows(case(run(tmp_path / "as", network(20, 64, 5), MANY), few, start, tmp_path))
    assert found.verdict == "leak"
    assert found.table is not None
    assert {row[0]: row[3] for row in found.table.rows} == expected
    assert found.table.rows[0][4] < 1e-4  # relative error of the only record: rounding
    assert "features" not in found.said


@pytest.mark.parametrize(
    ("optimiser", "steps", "exact"),
    [
        (partial(plain_sgd, lr=0.02), 5, True),
        (partial(plain_sgd, momentum=0.9, nesterov=True), 5, True),
        (partial(torch.optim.Adam, lr=0.01), 1, False),
    ],
)
def test_local_steps_and_momentum_do_not_hide_a_single_record_and_adam_does(
    optimiser: partial[torch.optim.Optimizer], steps: int, exact: bool, tmp_path: Path
) -> None:
    few = run(tmp_path / "few", MODEL, FEW[:1], optimiser=optimiser, steps=steps)
    found = rows(case(run(tmp_path / "as", MODEL, MANY), few, MODEL, tmp_path))
    assert found.numbers["exact"] == exact
    assert (found.verdict == "leak") == exact


def test_an_update_that_says_nothing_gives_nothing(tmp_path: Path) -> None:
    as_is = run(tmp_path / "as", MODEL, MANY)
    noised = run(tmp_path / "noised", MODEL, FEW, leave=noise(0.1))
    strangers = [data(n, 20, seed=90 + n) for n in SIZES]
    # The truth that the attack is compared with is not what the clients trained on.
    other = run(tmp_path / "other", MODEL, FEW, truths=strangers)
    for few in (noised, other):
        found = rows(case(as_is, few, MODEL, tmp_path))
        assert found.verdict == "note"
        assert found.numbers["exact"] == 0
        assert "no more than guessing" in found.said


def test_behind_a_convolution_the_rows_are_features(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 5)
    )
    few = run(tmp_path / "few", model, [data(1, 1, 6, 6), data(2, 1, 6, 6, seed=1)])
    as_is = run(tmp_path / "as", model, [data(20, 1, 6, 6, seed=2)])
    found = rows(case(as_is, few, model, tmp_path))
    assert found.verdict == "leak"
    assert found.numbers["exact"] == 3
    assert "features" in found.said


def test_records_of_others_that_are_equal_are_no_finding() -> None:
    truth = np.eye(6)[:3]
    assert compared(truth, truth, np.random.default_rng(0).normal(size=(9, 6))).exact.all()
    assert not compared(truth, truth, truth).exact.any()
    assert not compared(truth * (1 + 2 * EXACT), truth, np.ones((9, 6))).exact.any()
    assert not compared(np.zeros((0, 6)), truth, np.ones((9, 6))).exact.any()
