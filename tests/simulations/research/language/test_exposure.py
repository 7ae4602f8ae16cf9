"""Exposure is the exact rank of a code among all codes."""

import math
from itertools import product

import numpy as np
import torch

from flwr_privacy.clients.torch import initialise
from flwr_privacy.simulations.research.language.exposure import (
    CEILING,
    CHANCE,
    code_scores,
    exposed,
    exposure,
)
from flwr_privacy.simulations.research.language.texts import code_sentence
from flwr_privacy.simulations.research.language.transformer import CausalTransformer


def test_scores_are_the_log_probabilities_of_whole_codes() -> None:
    model = initialise(lambda: CausalTransformer(width=16, layers=2), 4).eval()
    scores = code_scores(model, 9, 31)
    for code in [(0, 0, 0), (3, 15, 7), (15, 2, 2), (8, 8, 1)]:
        sentence = torch.from_numpy(code_sentence(9, 31, code))[None]
        with torch.no_grad():
            likely = model(sentence[:, :-1]).double().log_softmax(dim=-1)[0]
        alone = sum(float(likely[place - 1, sentence[0, place]]) for place in (7, 8, 9))
        assert math.isclose(scores[code], alone, rel_tol=1e-5)


def test_exposures_of_all_codes_are_the_ranks() -> None:
    scores = np.random.default_rng(0).normal(size=(16, 16, 16))
    ranks = sorted(2 ** (CEILING - exposure(scores, c)) for c in product(range(16), repeat=3))
    assert np.allclose(ranks, range(1, 4097))
    mean = np.mean([exposure(scores, c) for c in product(range(16), repeat=3)])
    assert math.isclose(mean, CHANCE)


def test_a_model_that_tells_nothing_is_no_better_than_the_last_rank() -> None:
    assert exposure(np.zeros((16, 16, 16)), (1, 2, 3)) == 0.0


def test_the_interval_is_that_of_the_mean() -> None:
    draws = np.random.default_rng(1).exponential(1.44, size=400)
    found = exposed(draws.tolist())
    half = 1.96 * draws.std(ddof=1) / 20
    assert math.isclose(found.high - found.low, 2 * half, rel_tol=0.1)
    assert found.low < found.mean < found.high
    assert found.first == 0
