"""Exposure: how far up a model ranks a secret code among all codes.

Source: Carlini, Liu, Erlingsson, Kos and Song, "The Secret Sharer: Evaluating and Testing
Unintended Memorization in Neural Networks", USENIX Security 2019, definition 3. The rank here is
exact, over all codes, not extrapolated.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import nn

from flwr_privacy.clients.torch.computing import one_thread

from .texts import CODE_WORDS, CODES, code_sentence

__all__ = ["CEILING", "CHANCE", "Exposed", "code_scores", "exposed", "exposure"]

CEILING = math.log2(CODES)
"""Exposure in bits of a code that is ranked first."""

CHANCE = CEILING - math.fsum(math.log2(rank) for rank in range(1, CODES + 1)) / CODES
"""Mean exposure of a code that the model knows nothing of: 1.44 bits."""

_FIRST = 7  # place of a code in its sentence
_RESAMPLES = 10_000


def code_scores(model: nn.Module, name: int, noun: int) -> NDArray[np.float64]:
    """Return the log-probability that a model gives to each code, after the words before it.

    Parameters
    ----------
    model : nn.Module
        From tokens to logits of the next ones.
    name, noun : int
        Whose code.

    Returns
    -------
    (16, 16, 16) float64
        By the three words of the code.
    """
    pairs = [(a, b) for a in range(CODE_WORDS) for b in range(CODE_WORDS)]
    sentences = np.stack([code_sentence(name, noun, (a, b, 0)) for a, b in pairs])
    words = np.array([code_sentence(name, noun, (c, 0, 0))[_FIRST] for c in range(CODE_WORDS)])
    with one_thread(), torch.no_grad():
        logits = model.eval()(torch.from_numpy(sentences[:, : _FIRST + 2]))
        likely = logits[:, _FIRST - 1 :].double().log_softmax(dim=-1)[..., words].numpy()
    first, second, third = np.moveaxis(likely.reshape(CODE_WORDS, CODE_WORDS, 3, CODE_WORDS), 2, 0)
    scores: NDArray[np.float64] = first[0, 0][:, None, None] + second[:, 0][:, :, None] + third
    return scores


def exposure(scores: NDArray[np.float64], code: tuple[int, int, int]) -> float:
    """Return the exposure of a code: the logarithm of the number of codes over its rank.

    Parameters
    ----------
    scores : (16, 16, 16) float64
        What `code_scores` returned.
    code : tuple of int
        The secret. Codes with the same score rank before it.

    Examples
    --------
    >>> scores = np.zeros((16, 16, 16))
    >>> scores[1, 2, 3] = 1.0
    >>> exposure(scores, (1, 2, 3)), exposure(scores, (0, 0, 0))
    (12.0, 0.0)
    """
    return CEILING - math.log2(np.count_nonzero(scores >= scores[code]))


@dataclass(frozen=True, kw_only=True)
class Exposed:
    """The exposures of some codes.

    Parameters
    ----------
    codes : int
        How many.
    mean : float
        Their mean in bits.
    low, high : float
        Its interval of 95 %, from resampling the codes.
    first : int
        How many are ranked first: extracted.
    """

    codes: int
    mean: float
    low: float
    high: float
    first: int


def exposed(exposures: Sequence[float], seed: int = 0) -> Exposed:
    """Summarise exposures.

    Parameters
    ----------
    exposures : sequence of float
        At least two, in bits.
    seed : int, default 0
        Of the resampling.

    Examples
    --------
    >>> found = exposed([12.0, 12.0, 2.0, 0.5])
    >>> found.mean, found.first, found.low < 6.6 < found.high
    (6.625, 2, True)
    """
    values = np.asarray(exposures)
    interval = stats.bootstrap(
        (values,), np.mean, n_resamples=_RESAMPLES, method="percentile", rng=seed
    ).confidence_interval
    return Exposed(
        codes=len(values),
        mean=float(values.mean()),
        low=float(interval.low),
        high=float(interval.high),
        first=int(np.count_nonzero(values == CEILING)),
    )
