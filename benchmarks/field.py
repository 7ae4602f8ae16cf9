"""Matrix products modulo a prime: our field against a plain float product, FLINT and galois.

Seconds are of the CPU, with one thread of BLAS. galois falls back to Python integers for a prime of
31 bits: it multiplies some rows or columns only, once, and its time is multiplied up.
"""

import time
from collections.abc import Callable, Iterator

import galois
import numpy as np
from threadpoolctl import threadpool_limits

from flwr_privacy.coding.field import MERSENNE_31, PrimeField
from flwr_privacy.coding.lagrange import LagrangeCode
from flwr_privacy.privacy.randomness import SecureRandom

from .report import Comparison

__all__ = ["field"]

ROWS, INNER, COLUMNS = 1000, 1000, 256
HOLDERS, SEGMENTS, ELEMENTS = 28, 6, 280_000
NARROW = 4194301
REPETITIONS = 15
GALOIS_PART = 50

Product = Callable[[], np.ndarray]


def field() -> Iterator[Comparison]:
    """Compare a product of matrices, and the sharing of segments, with rivals' and each other."""
    random = SecureRandom()
    with threadpool_limits(1):
        yield from _product(random)
        yield from _encode(random)


def _product(random: SecureRandom) -> Iterator[Comparison]:
    wide, A, B = _operands(MERSENNE_31, (ROWS, INNER), (INNER, COLUMNS), random)
    narrow, _, _ = _operands(NARROW, (ROWS, INNER), (INNER, COLUMNS), random)
    generator = np.random.default_rng(0)
    left, right = generator.random((ROWS, INNER)), generator.random((INNER, COLUMNS))
    what = f"{ROWS}x{INNER} @ {INNER}x{COLUMNS} mod 2^31-1"
    ours, plain, fewer = _in_turns(wide, lambda: left @ right, narrow)
    yield Comparison(
        what=what, rival="NumPy's float64 product", ours=ours, theirs=plain, at_most=4.2
    )
    flint = _flint(A, B)
    if flint is not None:
        ours, theirs = _in_turns(wide, flint)
        yield Comparison(
            what=what, rival="python-flint's nmod_mat", ours=ours, theirs=theirs, at_least=2.5
        )
    yield Comparison(
        what=what,
        rival=f"galois, {ROWS // GALOIS_PART} rows measured and scaled",
        ours=ours,
        theirs=[GALOIS_PART * _galois(A[::GALOIS_PART], B, wide()[::GALOIS_PART])],
        at_least=300.0,
    )
    what = f"the same mod {NARROW}"
    yield Comparison(what=what, rival="ours mod 2^31-1", ours=fewer, theirs=ours)


def _encode(random: SecureRandom) -> Iterator[Comparison]:
    sides = []
    for p in (MERSENNE_31, NARROW):
        code = LagrangeCode(N=HOLDERS, K=SEGMENTS, T=1, field=PrimeField(p))
        _, matrix, values = _operands(p, code.matrix, (SEGMENTS + 1, ELEMENTS), random)
        sides.append((code, matrix, values))

    def shared(code: LagrangeCode, values: np.ndarray) -> Product:
        return lambda: code.encode(values[:SEGMENTS], values[SEGMENTS:])

    (wide, matrix, values), (narrow, _, fewer) = sides
    ours, theirs = _in_turns(shared(wide, values), shared(narrow, fewer))
    what = f"encode {HOLDERS}x{SEGMENTS + 1} @ {SEGMENTS + 1}x{ELEMENTS} mod 2^31-1"
    part = slice(None, None, GALOIS_PART)
    shares = wide.encode(values[:SEGMENTS], values[SEGMENTS:])
    yield Comparison(
        what=what,
        rival=f"galois, {ELEMENTS // GALOIS_PART} columns measured and scaled",
        ours=ours,
        theirs=[GALOIS_PART * _galois(matrix, values[:, part], shares[:, part])],
        at_least=20.0,
    )
    what = f"the same mod {NARROW}"
    yield Comparison(what=what, rival="ours mod 2^31-1", ours=theirs, theirs=ours)


def _operands(
    p: int,
    A: np.ndarray | tuple[int, int],
    B: tuple[int, int],
    random: SecureRandom,
) -> tuple[Product, np.ndarray, np.ndarray]:
    """Return our product of two random matrices, the first of which is made ready, and both."""
    chosen = PrimeField(p)
    left = chosen.uniform(A, random) if isinstance(A, tuple) else A
    right = chosen.uniform(B, random)
    ready = chosen.prepare(left)
    return lambda: chosen.matmul(ready, right), left, right


def _flint(A: np.ndarray, B: np.ndarray) -> Product | None:
    """Return FLINT's product, if it is installed, after it has proved equal to ours."""
    try:
        from flint import nmod_mat
    except ImportError:
        return None
    left, right = (nmod_mat(*M.shape, M.reshape(-1).tolist(), MERSENNE_31) for M in (A, B))
    entries = [int(entry) for entry in (left * right).entries()]
    _check_same("FLINT", PrimeField().matmul(A, B), np.reshape(entries, (len(A), B.shape[1])))
    return lambda: left * right


def _galois(A: np.ndarray, B: np.ndarray, expected: np.ndarray) -> float:
    """Return the seconds that galois takes for a product, which must be the expected one."""
    element = galois.GF(MERSENNE_31)
    left, right = element(A), element(B)
    began = time.process_time()
    product = left @ right
    seconds = time.process_time() - began
    _check_same("galois", expected, np.array(product).astype(np.int64))
    return seconds


def _check_same(name: str, ours: np.ndarray, theirs: np.ndarray) -> None:
    if not np.array_equal(ours, theirs):
        raise RuntimeError(f"{name} has another product")


def _in_turns(*sides: Callable[[], object]) -> list[list[float]]:
    seconds: list[list[float]] = [[] for _ in sides]
    for side in sides:  # pages, caches
        side()
    for _ in range(REPETITIONS):
        for side, measured in zip(sides, seconds, strict=True):
            began = time.process_time()
            side()
            measured.append(time.process_time() - began)
    return seconds
