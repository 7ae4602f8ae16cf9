"""Members, on transcripts that the test writes."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flwr_privacy.simulations.research.app_audit.findings import Finding
from flwr_privacy.simulations.research.app_audit.rebuilt.case import Clock
from flwr_privacy.simulations.research.app_audit.rebuilt.members import (
    auc_interval,
    members,
    members_of_uploads,
    records_of,
)
from flwr_privacy.simulations.research.attacks.membership import evaluate

from .trainings import Data, case, data, network, noise, run

MODEL = network(30, 64, 5)
CLIENTS = [data(30, 30, seed=i) for i in range(4)]
OTHERS = [data(30, 30, seed=100 + i) for i in range(4)]
learned = partial(torch.optim.SGD, lr=0.3, momentum=0.5)


def found_in(folder: Path, *, evaluated: list[Data], **options: Any) -> list[Finding]:
    transcript = run(folder, MODEL, CLIENTS, evaluated=evaluated, **options)
    attacked = case(transcript, None, MODEL, folder)
    records = records_of(attacked)
    assert not isinstance(records, str), records
    return [members(attacked, records), members_of_uploads(attacked, records, Clock(60))]


def test_records_that_were_learned_by_heart_are_members(tmp_path: Path) -> None:
    by_loss, by_direction = found_in(
        tmp_path / "as", evaluated=OTHERS, optimiser=learned, steps=150, rounds=2
    )
    assert by_loss.verdict == "leak"
    assert by_loss.numbers["best AUC"] > 0.7
    assert by_loss.numbers["members"] == by_loss.numbers["non-members"] == 120
    assert 0.4 < by_loss.numbers["before the training"] < 0.6
    assert by_direction.verdict == "leak"


def test_the_direction_of_one_step_tells_its_records(tmp_path: Path) -> None:
    _, found = found_in(tmp_path / "as", evaluated=OTHERS)
    assert found.verdict == "leak"
    assert found.numbers["best AUC"] > 0.75


def test_noise_has_no_members(tmp_path: Path) -> None:
    for found in found_in(tmp_path / "as", evaluated=OTHERS, leave=noise(1.0)):
        assert found.verdict == "note"
        assert "No score is surely above chance" in found.said


def test_records_that_were_not_trained_on_are_no_members(tmp_path: Path) -> None:
    strangers = [data(30, 30, seed=200 + i) for i in range(4)]
    for found in found_in(
        tmp_path / "as", evaluated=OTHERS, truths=strangers, steps=20, optimiser=learned, rounds=2
    ):
        assert found.verdict == "note"


@pytest.mark.parametrize(
    ("evaluated", "why"),
    [
        ([], "take no loss"),
        (CLIENTS, "evaluate on records that they train on"),
        ([data(3, 30, seed=7)], "fewer than"),
        ([data(30, 29, seed=7)], "several shapes"),
    ],
)
def test_without_non_members_it_is_left_out(
    evaluated: list[Data], why: str, tmp_path: Path
) -> None:
    transcript = run(tmp_path / "as", MODEL, CLIENTS, evaluated=evaluated)
    found = records_of(case(transcript, None, MODEL, tmp_path))
    assert isinstance(found, str)
    assert why in found


def test_the_interval_of_the_auc_covers_it() -> None:
    draws = np.random.default_rng(0)
    truth = 0.7602  # of two normal laws at a distance of 1
    inside = np.arange(300) % 3 == 0
    draws.shuffle(inside)
    covered = 0
    for _ in range(200):
        scores = draws.normal(size=300) + inside
        low, area, high = auc_interval(evaluate(scores, inside, delta=0.0), inside)
        assert low < area < high
        covered += low < truth < high
    assert covered >= 196  # of 99.8 %, 5 standard errors below
    low, area, _ = auc_interval(evaluate(1.0 * inside, inside, delta=0.0), inside)
    assert low < area == 1
