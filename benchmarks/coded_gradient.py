"""The row of ACFL's client: the gradient of a round from moments that are kept."""

import time
from collections.abc import Iterator

import numpy as np

from flwr_privacy.acfl.encoding import gradient
from flwr_privacy.clients.prepared import PreparedData

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
    ours, theirs = [], []
    for repetition in range(REPETITIONS):
        model = draws.normal(size=(FEATURES, LABELS))
        sides = [(ours, data.gradient), (theirs, lambda W: gradient(data.features, data.labels, W))]
        found = {}
        for seconds, compute in sides[:: 1 if repetition % 2 else -1]:
            began = time.perf_counter()
            found[id(seconds)] = compute(model)
            seconds.append(time.perf_counter() - began)
        difference = np.linalg.norm(found[id(ours)] - found[id(theirs)])
        if difference > 1e-10 * np.linalg.norm(found[id(theirs)]):
            raise RuntimeError("the two gradients differ")
    what = f"gradient of {RECORDS} x {FEATURES}, {LABELS} labels"
    yield Comparison(
        what=what, rival="X^T (X W - Y) in each round", ours=ours, theirs=theirs, at_least=5.0
    )
    yield Comparison(what=f"{what}: X^T X, X^T Y", rival="the same", ours=[once], theirs=theirs)
