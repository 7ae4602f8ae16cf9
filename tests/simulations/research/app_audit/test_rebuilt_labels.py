"""Labels and numbers of records, on transcripts that the test writes."""

from pathlib import Path

import numpy as np
import pytest

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.app_audit.rebuilt.from_app import (
    label_histograms,
    number_of_records,
)
from flwr_privacy.simulations.research.app_audit.rebuilt.from_few import labels_of_few
from flwr_privacy.simulations.research.app_audit.rebuilt.labels import label_counts, label_shares

from .trainings import Data, case, data, network, noise, run

MODEL = network(12, 32, 6)
FEW = [data(n, 12, classes=6, seed=50 + i) for i, n in enumerate((1, 2, 4, 8) * 3)]
MANY = [data(60, 12, classes=6, seed=30 + i) for i in range(6)]


def skewed(client: int) -> Data:
    draws = np.random.default_rng(client)
    inputs = draws.uniform(0, 1, size=(50, 12)).astype(np.float32)
    return inputs, draws.choice(6, size=50, p=draws.dirichlet(np.ones(6)))


def test_the_labels_of_few_records_follow_from_the_last_bias(tmp_path: Path) -> None:
    as_is = run(tmp_path / "as", MODEL, MANY)
    found = labels_of_few(case(as_is, run(tmp_path / "few", MODEL, FEW), MODEL, tmp_path))
    assert found.verdict == "leak"
    assert found.numbers["right"] > 0.8 * found.numbers["records"]
    assert found.table is not None
    assert found.table.rows[0] == [1, 3, 3, 3]  # of single records all


def test_labels_that_noise_hides_are_not_found(tmp_path: Path) -> None:
    as_is = run(tmp_path / "as", MODEL, MANY)
    few = run(tmp_path / "few", MODEL, FEW, leave=noise(1.0))
    found = labels_of_few(case(as_is, few, MODEL, tmp_path))
    assert found.verdict == "note"
    assert "no more than by guessing" in found.said


def test_one_frequent_label_is_no_finding(tmp_path: Path) -> None:
    same = [(inputs, np.full(len(inputs), 4)) for inputs, _ in FEW]
    as_is = run(tmp_path / "as", MODEL, [(x, np.full(len(x), 4)) for x, _ in MANY])
    found = labels_of_few(case(as_is, run(tmp_path / "few", MODEL, same), MODEL, tmp_path))
    assert found.numbers["by guessing"] == found.numbers["records"]
    assert found.verdict == "note"


def test_clients_with_more_of_a_label_are_found(tmp_path: Path) -> None:
    clients = [skewed(client) for client in range(6)]
    found = label_histograms(case(run(tmp_path / "as", MODEL, clients), None, MODEL, tmp_path))
    assert found.verdict == "leak"
    assert found.numbers["correlation"] > 0.9
    assert found.numbers["right"] > 0.8 * found.numbers["cases"]


def test_uploads_of_noise_or_of_others_say_nothing_of_labels(tmp_path: Path) -> None:
    clients = [skewed(client) for client in range(6)]
    noised = run(tmp_path / "noised", MODEL, clients, leave=noise(1.0))
    strange = [skewed(client) for client in range(20, 26)]
    other = run(tmp_path / "other", MODEL, clients, truths=strange)
    for transcript in (noised, other):
        found = label_histograms(case(transcript, None, MODEL, tmp_path))
        assert found.verdict == "note"
        assert "no more than chance" in found.said


def test_the_number_of_records_is_in_the_clear(tmp_path: Path) -> None:
    found = number_of_records(case(run(tmp_path / "as", MODEL, MANY), None, MODEL, tmp_path))
    assert found.verdict == "leak"
    assert found.table is not None
    assert found.table.rows == [["num-examples", 6, 6, 60.0, 60.0]]


def test_one_number_that_is_no_ones_is_no_leak(tmp_path: Path) -> None:
    other = [data(50 + i, 12, classes=6, seed=30 + i) for i in range(6)]
    transcript = run(tmp_path / "as", MODEL, MANY, truths=other)
    found = number_of_records(case(transcript, None, MODEL, tmp_path))
    assert found.verdict == "note"


def test_shares_and_counts_are_whole() -> None:
    draws = np.random.default_rng(0)
    for _ in range(100):
        moves = draws.normal(size=7)
        shares = label_shares(moves)
        assert shares.min() >= -1e-12
        assert shares.sum() == pytest.approx(1)
        assert shares.argmax() == moves.argmax()
        counts = label_counts(moves, 8)
        assert counts.sum() == 8
        assert (counts >= 0).all()
        np.testing.assert_array_equal(label_counts(1e-4 * moves, 8), counts)  # in any unit
    np.testing.assert_array_equal(label_shares(np.zeros(4)), np.full(4, 0.25))
    with pytest.raises(InvalidParameterError, match="moves"):
        label_shares([1.0])
    with pytest.raises(InvalidParameterError, match="records"):
        label_counts([1.0, 0.0], 0)
