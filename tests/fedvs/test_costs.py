"""Bytes and products of a run, against the six data sets' known sizes and counted products."""

import numpy as np
import pytest

from flwr_privacy.coding.field import PrimeField
from flwr_privacy.coding.lagrange import LagrangeCode
from flwr_privacy.coding.primes import largest_prime_below
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.fedvs.costs import Costs, cost_model
from flwr_privacy.fedvs.sharing import data_shares, evaluate, weight_shares, zero_masks
from flwr_privacy.privacy.randomness import SecureRandom

SEAL = 28  # bytes


def split(features: int, clients: int) -> list[int]:
    return [len(part) for part in np.array_split(np.arange(features), clients)]


VIEWS = [240, 76, 216, 47, 64, 6]
CALTECH = [48, 40, 254, 1984, 512, 928]
SETS = {  # training rows, widths, K, b
    "Parkinson": (529, [2 * d for d in split(754, 10)], 2, 8),
    "Credit card": (24_000, [2 * d for d in split(23, 11)], 2, 16),
    "HandWritten": (1200, [2 * d for d in VIEWS], 1, 32),
    "Caltech-7": (1179, [2 * d for d in CALTECH], 1, 8),
    "EMNIST": (112_800, [2 * d for d in split(784, 28)], 6, 43),
    "FashionMNIST": (60_000, split(784, 28), 6, 43),
}
# Mean bytes of data shares for one holder, all of them over the relay, and kept by a client; of
# weight shares for one holder, and all of a round; of an answer and a gradient; upload ratio; and
# the products of a client over those of plain split learning.
EXPECTED = {
    "Parkinson": (0.160e6, 14.4e6, 1.6e6, 38.6e3, 3.47e6, 2.0e3, 4.1e3, 85, 5.0),
    "Credit card": (0.201e6, 22.1e6, 2.2e6, 1.1e3, 0.12e6, 4.1e3, 8.2e3, 1.8, 5.5),
    "HandWritten": (1.04e6, 31.2e6, 6.2e6, 55.4e3, 1.66e6, 8.2e3, 8.2e3, 35, 6),
    "Caltech-7": (5.92e6, 178e6, 35.5e6, 321e3, 9.64e6, 2.0e3, 2.0e3, 786, 6),
    "EMNIST": (4.21e6, 3184e6, 118e6, 14.3e3, 10.8e6, 11.0e3, 65.5e3, 6.1, 4.7),
    "FashionMNIST": (1.12e6, 847e6, 31.4e6, 7.2e3, 5.42e6, 11.0e3, 65.5e3, 3.1, 4.7),
}


def costs_of(name: str) -> Costs:
    rows, widths, K, b = SETS[name]
    N = len(widths)
    return cost_model(N=N, K=K, T=1, rows=rows, widths=widths, h=64, b=b, zero_mask=False)


@pytest.mark.parametrize("name", SETS)
def test_F21_the_sizes_of_the_six_data_sets(name: str) -> None:
    costs, expected = costs_of(name), EXPECTED[name]
    N = len(costs.data_bytes)
    pairs = N * (N - 1)
    found = (
        sum(costs.data_bytes) / N - SEAL,
        costs.data_relay_bytes - pairs * SEAL,
        costs.stored_bytes,
        sum(costs.weights_bytes) / N - SEAL,
        costs.weights_relay_bytes - pairs * SEAL,
        costs.answer_bytes,
        costs.gradient_bytes,
        sum(costs.upload_elements) / N / costs.plain_elements,
        costs.answer_macs * N / sum(costs.plain_macs),
    )
    for value, published in zip(found, expected, strict=True):
        assert value == pytest.approx(published, rel=0.05)


def test_F21_fashion_mnist_byte_for_byte() -> None:
    costs = costs_of("FashionMNIST")
    assert costs.data_bytes == (1_120_000 + SEAL,) * 28
    assert costs.weights_bytes == (7168 + SEAL,) * 28
    assert costs.data_relay_bytes == 28 * 27 * (1_120_000 + SEAL)
    assert costs.weights_relay_bytes == 28 * 27 * (7168 + SEAL)
    assert costs.answer_bytes == 43 * 64 * 4
    assert costs.gradient_bytes == 258 * 64 * 4
    assert costs.key_bytes == 32


def test_masks_of_T_plus_two_clients_go_with_their_shares() -> None:
    sizes = {"N": 9, "K": 2, "T": 2, "rows": 40, "widths": [3] * 9, "h": 5, "b": 4}
    bare, masked = (cost_model(**sizes, zero_mask=flag) for flag in (False, True))  # type: ignore[arg-type]
    assert (bare.mask_bytes, bare.mask_macs) == (0, 0)
    assert masked.mask_bytes == 4 * 5 * 4
    assert masked.weights_relay_bytes - bare.weights_relay_bytes == 8 * 4 * masked.mask_bytes
    assert masked.upload_elements == bare.upload_elements


def test_chunks_cost_a_seal_each() -> None:
    sizes = {"N": 3, "K": 1, "T": 1, "rows": 10, "widths": [2] * 3, "h": 5, "b": 4}
    whole = cost_model(**sizes)  # type: ignore[arg-type]
    chunked = cost_model(**sizes, chunk_rows=4)  # type: ignore[arg-type]
    assert chunked.data_bytes[0] == whole.data_bytes[0] + 2 * SEAL


@pytest.mark.parametrize("p", [2**31 - 1, largest_prime_below(2**22), 97])
def test_bytes_are_those_of_the_packed_shares(p: int) -> None:
    N, K, T, rows, h, b = 9, 2, 2, 14, 3, 5
    field, random = PrimeField(p), SecureRandom.insecure(0, "costs")
    code = LagrangeCode(N=N, K=K, T=T, field=field)
    widths = [1 + n % 3 for n in range(N)]
    costs = cost_model(N=N, K=K, T=T, rows=rows, widths=widths, h=h, b=b, bits=field.bits)
    for n, width in enumerate(widths):
        share = data_shares(code, np.zeros((rows, width), np.int64), random)[0]
        assert costs.data_bytes[n] == len(field.to_bytes(share)) + SEAL
        weights = weight_shares(code, np.zeros((width, h), np.int64), random)[0]
        assert costs.weights_bytes[n] == len(field.to_bytes(weights)) + SEAL
    mask = zero_masks(code, b, h, random)[0]
    assert costs.mask_bytes == len(field.to_bytes(mask))
    E = sum(widths)
    answer = evaluate(field, np.zeros((b, E), np.int64), np.zeros((E, h), np.int64), [mask])
    assert costs.answer_bytes == len(field.to_bytes(answer))


def test_products_are_those_of_the_matrices() -> None:
    N, K, T, rows, h, b = 9, 2, 2, 15, 3, 5
    widths = list(range(1, 10))
    costs = cost_model(N=N, K=K, T=T, rows=rows, widths=widths, h=h, b=b)
    E, length, threshold = 45, 8, 7
    # (rows x inner) @ (inner x columns) each.
    assert costs.encode_macs == tuple(N * (K + T) * (length * e) for e in widths)
    assert costs.weights_macs == tuple(N * T * (e * h) for e in widths)
    assert costs.mask_macs == N * (K + 2 * T - 1) * (b * h)
    assert costs.answer_macs == b * E * h
    assert costs.decode_macs == K * threshold * (b * h)
    assert costs.update_macs == costs.plain_macs == tuple(e * (K * b) * h for e in widths)
    assert costs.answer_macs * N == pytest.approx(sum(costs.plain_macs) * N / K)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"N": 2, "widths": [2, 2]}, "N"),
        ({"widths": [2, 2]}, "widths"),
        ({"widths": [2, 2, 0]}, "widths"),
        ({"b": 11}, "b"),
        ({"h": 0}, "h"),
        ({"bits": 33}, "bits"),
        ({"chunk_rows": 0}, "chunk_rows"),
        ({"zero_mask": 1}, "zero_mask"),
    ],
)
def test_sizes_that_cannot_be_are_refused(change: dict[str, object], name: str) -> None:
    sizes = {"N": 3, "K": 1, "T": 1, "rows": 10, "widths": [2] * 3, "h": 5, "b": 4}
    with pytest.raises(InvalidParameterError, match=rf"^{name} ="):
        cost_model(**(sizes | change))  # type: ignore[arg-type]
