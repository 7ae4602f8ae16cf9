"""The row of ACFL's client: the gradient of a round from moments that are kept."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from flwr_privacy.acfl.encoding import gradient
from flwr_privacy.clients.acfl_data import PreparedData

from .report import Comparison

__all__ = ["coded_gradient"]

RECORDS, FEATURES, LABELS = 10_000, 500, 10
REPETITIONS = 50


def coded_gradient() -> Iterator[Comparison]:
    """Compare a client's gradient with the two products that it stands for."""
    draws = np.random.default_rng(0)
    data = PreparedData(
        draws.uniform(-1, 1, (RECORDS, FEATURES)), draws.uniform(-1, 1, (RECORDS, LABELS))
    )
    began = time.perf_counter()
    data.moments  # noqa: B018 (it is computed once)
    once = time.perf_counter() - began
    sides: dict[str, tuple[Callable[[Any], Any], list[float]]] = {
        "kept moments": (data.gradient, []),
        "two products": (partial(gradient, data.features, data.labels), []),
    }
    for repetition in range(REPETITIONS):
        model = draws.normal(size=(FEATURES, LABELS))
        found = {}
        for name in list(sides)[:: 1 if repetition % 2 else -1]:
            compute, seconds = sides[name]
            began = time.perf_counter()
            found[name] = compute(model)
            seconds.append(time.perf_counter() - began)
        ours, theirs = found["kept moments"], found["two products"]
        if np.linalg.norm(ours - theirs) > 1e-10 * np.linalg.norm(theirs):
            raise RuntimeError("the two gradients differ")
    what = f"gradient, {RECORDS} x {FEATURES}, {LABELS} labels"
    (_, ours), (_, theirs) = sides.values()
    yield Comparison(
        what=what, rival="X^T (X W - Y) in each round", ours=ours, theirs=theirs, at_least=5.0
    )
    yield Comparison(
        what=f"{what}: moments", rival="X^T (X W - Y) once", ours=[once], theirs=theirs
    )
