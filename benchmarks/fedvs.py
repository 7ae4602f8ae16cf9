"""A round of FedVS by its mathematics alone, against plain split learning of the same sizes.

Fashion-MNIST with 28 clients of one row of pixels each. Seconds are of the CPU of all clients and
the server together, with one thread of BLAS. The server model is the same on both sides and left
out.
"""

import time
from collections.abc import Callable, Iterator

import numpy as np
from threadpoolctl import threadpool_limits

from flwr_privacy.coding.field import MERSENNE_31, PrimeField
from flwr_privacy.coding.lagrange import LagrangeCode
from flwr_privacy.fedvs.network import gradient_of
from flwr_privacy.fedvs.quantisation import dequantise, quantise_stochastic
from flwr_privacy.fedvs.rows import Segments
from flwr_privacy.fedvs.sharing import decode_rows, evaluate, weight_shares, zero_masks
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.simulations.research.fedvs.paper.conventions import conventions
from flwr_privacy.wire.channel import Channel, KeyPair

from .report import Comparison

__all__ = ["fedvs"]

CLIENTS, PIXELS, WIDTH, SEGMENTS, BATCH = 28, 28, 64, 6, 256
ROWS = 6000
TRAINING_ROWS = 60_000
NARROW, NARROW_BITS = 4194301, 5
REPETITIONS = 15

Round = Callable[[], object]


def fedvs() -> Iterator[Comparison]:
    """Compare a round of FedVS with one of plain split learning, and its sealing with the round."""
    wide, narrow = _Party(MERSENNE_31, bits=8), _Party(NARROW, bits=NARROW_BITS)
    with threadpool_limits(1):
        ours, fewer, plain, sealed, parts = _in_turns(
            wide.round, narrow.round, _plain(), wide.relay, wide.parts
        )
    what = f"a round: {CLIENTS} clients, K = {SEGMENTS}, h = {WIDTH}, mod 2^31-1"
    rival = "plain split learning in float32"
    yield Comparison(what=what, rival=rival, ours=ours, theirs=plain, at_most=36.0)
    yield Comparison(what=f"the same mod {NARROW}", rival=rival, ours=fewer, theirs=plain)
    yield Comparison(
        what="the shares of weights and zero masks alone", rival=rival, ours=parts, theirs=plain
    )
    yield Comparison(
        what="sealing and opening what a round passes on",
        rival="the round mod 2^31-1",
        ours=sealed,
        theirs=ours,
        at_most=0.1,
    )
    for reading in conventions(CLIENTS, SEGMENTS, 1, BATCH):
        usual = (reading.log_base, reading.batch) == ("e", "coded")
        rounds = -(-TRAINING_ROWS // BATCH)
        yield Comparison(
            what=f"expected virtual epoch, log_{reading.log_base}, {reading.batch} rows",
            rival="waiting for all",
            ours=[rounds * (reading.share + reading.upload)],
            theirs=[rounds * reading.wait],
            at_least=3.0 if usual else None,
        )


class _Party:
    """All clients and the server, with coded data."""

    def __init__(self, prime: int, *, bits: int) -> None:
        self._bits = bits
        self._field = PrimeField(prime)
        self._code = LagrangeCode(N=CLIENTS, K=SEGMENTS, T=1, field=self._field)
        self._segments = Segments(rows=ROWS, K=SEGMENTS)
        draws = np.random.default_rng(0)
        self._batch = np.arange(-(-BATCH // SEGMENTS))
        shape = (self._segments.length, CLIENTS * PIXELS)
        self._held = [draws.integers(0, prime, shape).astype(np.uint32) for _ in range(CLIENTS)]
        self._weights = [draws.normal(0, 0.2, (PIXELS, WIDTH)) for _ in range(CLIENTS)]
        self._own = [draws.random((SEGMENTS * len(self._batch), PIXELS)) for _ in range(CLIENTS)]
        self._gradient = draws.normal(0, 1e-3, (SEGMENTS * len(self._batch), WIDTH))
        self._random = SecureRandom()
        one, other = KeyPair(), KeyPair()
        self._here = Channel(one, other.public, me="a", peer="b", context=("benchmark",))
        self._there = Channel(other, one.public, me="b", peer="a", context=("benchmark",))

    def parts(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Deal shares of all weights, and zero masks of as many clients as it takes and one."""
        dealt = [
            weight_shares(
                self._code,
                quantise_stochastic(weights, self._bits, self._field, self._random),
                self._random,
            )
            for weights in self._weights
        ]
        masks = [zero_masks(self._code, len(self._batch), WIDTH, self._random) for _ in range(3)]
        return dealt, masks

    def round(self) -> list[np.ndarray]:
        """Deal, evaluate, decode, and move all weights."""
        dealt, masks = self.parts()
        answers = {
            n: evaluate(
                self._field,
                held[self._batch],
                np.concatenate([shares[n] for shares in dealt]),
                [mask[n] for mask in masks],
            )
            for n, held in enumerate(self._held)
        }
        sums = decode_rows(self._code, answers)
        dequantise(sums, scale_bits=2 * self._bits, field=self._field, divisor=CLIENTS)
        return [
            weights - 0.05 * gradient_of(own, self._gradient, CLIENTS)
            for weights, own in zip(self._weights, self._own, strict=True)
        ]

    def relay(self) -> None:
        """Seal and open the shares that all clients deal each other in a round."""
        plain = self._field.to_bytes(np.zeros(PIXELS * WIDTH, np.int64))
        masked = plain + self._field.to_bytes(np.zeros(len(self._batch) * WIDTH, np.int64))
        bound = bytes(32)  # what a share is bound to, as a hash
        for dealer in range(CLIENTS):
            share = masked if dealer < 3 else plain
            for _ in range(CLIENTS - 1):
                self._there.open(self._here.seal(share, bound), bound)


def _plain() -> Round:
    draws = np.random.default_rng(1)
    data = [draws.random((BATCH, PIXELS), dtype=np.float32) for _ in range(CLIENTS)]
    weights = [draws.random((PIXELS, WIDTH), dtype=np.float32) for _ in range(CLIENTS)]
    gradient = draws.random((BATCH, WIDTH), dtype=np.float32)

    def step() -> list[np.ndarray]:
        total = np.zeros((BATCH, WIDTH), np.float32)
        for own, weight in zip(data, weights, strict=True):
            total += own @ weight
        total /= CLIENTS
        return [
            weight - np.float32(0.05 / CLIENTS) * (own.T @ gradient)
            for own, weight in zip(data, weights, strict=True)
        ]

    return step


def _in_turns(*rounds: Round) -> list[list[float]]:
    """Return the CPU seconds of each, taken in turns."""
    seconds: list[list[float]] = [[] for _ in rounds]
    for repetition in range(REPETITIONS + 1):
        for own, work in zip(seconds, rounds, strict=True):
            began = time.process_time()
            work()
            if repetition:  # the first one warms the caches
                own.append(time.process_time() - began)
    return seconds
