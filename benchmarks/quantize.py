"""Codes of a few bits: time to quantize and pack ten million values, and to sum packed codes."""

import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
from flwr.common.secure_aggregation.quantization import dequantize
from flwr.common.secure_aggregation.quantization import quantize as flower_quantize

from flwr_privacy.coding.packing import pack
from flwr_privacy.coding.quantize import CodeSum, Knobs
from flwr_privacy.mspdq import DecodedSum
from flwr_privacy.privacy.randomness import SecureRandom

from .report import Comparison

__all__ = ["quantize"]

VALUES = 10_000_000
RANGE = 4.0
BITS = (1, 3, 4, 8)
COHORT = 20
REPETITIONS = 7

QUANTIZE = "Flower's secure-aggregation quantize (int32, not packed, not secret)"
COPY = "np.copyto of the floats"
DEQUANTIZE = "Flower's dequantize of one int32 reply (no sum)"


def quantize() -> Iterator[Comparison]:
    """Compare quantizing, packing and summing with Flower's quantize and dequantize."""
    values = np.random.default_rng(0).normal(size=VALUES).clip(-RANGE, RANGE).astype(np.float32)
    for bits in BITS:
        yield from _up(values, bits)
    for bits in BITS:
        yield _down(values, bits)


def _up(values: np.ndarray, bits: int) -> Iterator[Comparison]:
    random, knobs = SecureRandom(), Knobs(width=2 * RANGE, levels=2**bits)
    copy = np.empty_like(values)

    def ours() -> None:
        pack(knobs.encode(values, 0.0, random)[0], bits)

    def flower() -> None:
        flower_quantize([values], RANGE, 2**bits - 1)

    def memcpy() -> None:
        np.copyto(copy, values)

    seconds = _in_turns(ours, flower, memcpy)
    share = statistics.median(seconds[2]) / statistics.median(seconds[0])
    what = f"quantize + pack {VALUES:.0e} float32, {bits} bit{'s' * (bits > 1)}"
    yield Comparison(what=what, rival=QUANTIZE, ours=seconds[0], theirs=seconds[1], at_least=10.0)
    yield Comparison(
        what=what, rival=f"{COPY}: {share:.0%} of its speed", ours=seconds[0], theirs=seconds[2]
    )


def _down(values: np.ndarray, bits: int) -> Comparison:
    knobs = Knobs(width=2 * RANGE, levels=2**bits)
    packed = pack(knobs.encode(values, 0.0, SecureRandom())[0], bits)
    codes = flower_quantize([values], RANGE, 2**bits - 1)

    def ours() -> None:
        total = CodeSum(size=VALUES, levels=knobs.levels, weights=COHORT)
        for _ in range(COHORT):
            total.add(packed)
        server.add(total.total, knobs, draws=COHORT)

    def theirs() -> None:
        dequantize(codes, RANGE, 2**bits - 1)

    server = DecodedSum(np.zeros(VALUES), COHORT)
    seconds = _in_turns(ours, theirs)
    return Comparison(
        what=f"unpack, dequantize, sum {VALUES:.0e}, {bits} bit{'s' * (bits > 1)}",
        rival=DEQUANTIZE,
        ours=[whole / COHORT for whole in seconds[0]],
        theirs=seconds[1],
        at_least=3.0,
    )


def _in_turns(*sides: Callable[[], None]) -> list[list[float]]:
    seconds: list[list[float]] = [[] for _ in sides]
    for side in sides:  # pages, caches
        side()
    for _ in range(REPETITIONS):
        for side, measured in zip(sides, seconds, strict=True):
            began = time.perf_counter()
            side()
            measured.append(time.perf_counter() - began)
    return seconds
