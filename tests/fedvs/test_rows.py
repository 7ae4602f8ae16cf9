"""Segments, pads, the common order and the batches."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from flwr_privacy.coding.field import PrimeField
from flwr_privacy.coding.lagrange import LagrangeCode
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.fedvs.quantisation import dequantise, quantise
from flwr_privacy.fedvs.rows import Segments, batch_of, order
from flwr_privacy.fedvs.sharing import data_shares, decode_rows, evaluate, weight_shares
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.simulations.research.fedvs.paper.sharing import pad_rows


def test_F24_an_odd_number_of_rows_in_two_segments_has_one_pad() -> None:
    segments = Segments(rows=529, K=2)
    assert (segments.length, segments.pads) == (265, 1)
    counted = segments.counted(np.arange(265))
    assert counted.sum() == 529
    assert np.flatnonzero(~counted).tolist() == [529]


def test_F24_places_are_taken_segment_after_segment() -> None:
    coded = np.array([5, 0, 264])
    places = Segments(rows=529, K=2).real_rows(coded)
    assert places.tolist() == [5, 0, 264, 270, 265, 529]


def test_F24_labels_that_are_a_function_of_a_feature_meet_their_rows() -> None:
    rows, K, h = 53, 3, 2
    field, random = PrimeField(), SecureRandom.insecure(0, "labels")
    code = LagrangeCode(N=7, K=K, T=1, field=field)
    feature = np.arange(rows) / 64
    labels = (np.arange(rows) * 7) % 11  # a function of the feature
    places = order(rows, 3)
    segments = Segments(rows=rows, K=K)
    elements = quantise(feature[places][:, None], 6, field)
    padded = pad_rows(elements, segments, field, random)
    shares = data_shares(code, padded[segments.real_rows(np.arange(segments.length))], random)
    weights = weight_shares(code, np.ones((1, h), np.int64), random)
    coded = batch_of(segments.length, 8, 1, 3)
    answers = {n: evaluate(field, shares[n][coded], weights[n]) for n in (6, 0, 3, 1, 5, 2, 4)}
    decoded = dequantise(decode_rows(code, answers), scale_bits=6, field=field)

    def follows(rows_in_order: np.ndarray) -> bool:  # type: ignore[type-arg]
        counted = rows_in_order < rows
        own = labels[places[rows_in_order[counted]]]
        seen = np.rint(decoded[counted, 0] * 64).astype(int)
        return bool((own == (seen * 7) % 11).all())

    right = segments.real_rows(coded)
    assert follows(right)
    # The same rows in another order: the segments swapped, or row after row.
    assert not follows(np.roll(right, len(coded)))
    assert not follows(right.reshape(K, -1).T.reshape(-1))


@given(st.integers(1, 200), st.integers(1, 12))
def test_all_coded_rows_together_are_all_places_once(rows: int, K: int) -> None:
    segments = Segments(rows=rows, K=K)
    everything = np.arange(segments.length)
    assert sorted(segments.real_rows(everything).tolist()) == list(range(K * segments.length))
    assert segments.counted(everything).sum() == rows
    assert segments.pads == K * segments.length - rows
    assert 0 <= segments.pads < K


@pytest.mark.parametrize(
    "coded", [np.array([3]), np.array([-1]), np.array([0.0]), np.eye(2, dtype=int)]
)
def test_coded_rows_that_cannot_be_are_refused(coded: np.ndarray) -> None:  # type: ignore[type-arg]
    with pytest.raises(InvalidParameterError, match="coded"):
        Segments(rows=6, K=2).real_rows(coded)


def test_no_coded_rows_are_no_rows() -> None:
    assert Segments(rows=6, K=2).real_rows(np.array([], np.int64)).tolist() == []


# Order and batches


def test_the_common_order_is_a_permutation_that_only_the_seed_decides() -> None:
    places = order(1000, 5)
    assert sorted(places.tolist()) == list(range(1000))
    np.testing.assert_array_equal(places, order(1000, 5))
    assert (places != order(1000, 6)).mean() > 0.9
    assert (places != np.arange(1000)).mean() > 0.9


def test_the_common_order_stays_the_same_in_all_versions() -> None:
    # Clients of different versions must agree: a changed order would pair wrong rows in silence.
    assert order(8, 0).tolist() == [0, 1, 3, 6, 5, 4, 7, 2]
    assert batch_of(8, 3, 0, 1).tolist() == [0, 2, 6]


def batches(length: int, size: int, seed: int, epoch: int) -> list[NDArray[np.int64]]:
    """Return the batches of an epoch, from 1."""
    count = -(-length // size)
    return [batch_of(length, size, seed, (epoch - 1) * count + i) for i in range(1, count + 1)]


@given(st.integers(1, 100), st.integers(1, 30), st.integers(1, 4))
def test_an_epoch_has_every_coded_row_once(length: int, size: int, epoch: int) -> None:
    parts = batches(length, size, 1, epoch)
    assert sorted(np.concatenate(parts).tolist()) == list(range(length))
    assert [len(part) for part in parts[:-1]] == [size] * (len(parts) - 1)
    assert 1 <= len(parts[-1]) <= size


def test_every_epoch_has_batches_of_its_own() -> None:
    first, second = (batches(100, 10, 0, epoch)[0].tolist() for epoch in (1, 2))
    assert first != second
    assert first != batches(100, 10, 1, 1)[0].tolist()


def test_a_batch_can_be_written_to_without_changing_later_ones() -> None:
    before = batch_of(50, 7, 2, 4)
    kept = before.copy()
    before[:] = 0
    np.testing.assert_array_equal(batch_of(50, 7, 2, 4), kept)
