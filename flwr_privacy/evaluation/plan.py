"""Plans the request of a private evaluation: its terms, with a grid that its noise needs."""

import math
from dataclasses import replace
from typing import Any, TypeVar

from flwr_privacy.privacy.grid import CODE_LIMIT

from .options import PrivateEvaluation
from .terms import COUNTS_GRID, EvaluationTerms

__all__ = ["asked_for", "on_coarsest_grid", "planned_terms"]

Terms = TypeVar("Terms", bound=EvaluationTerms)

_FINEST = {"record": COUNTS_GRID, "user": -12}
"""Exponent of the coarsest grid: half a record, or far below what one client changes."""

_FINEST_OF_LOSSES = -10
"""The same where losses of single records are added up."""

_SHARE_STEPS = 4  # at least so many steps of the grid are a party's noise


def planned_terms(
    option: PrivateEvaluation,
    *,
    unit: str,
    neighbours: str,
    noise_multiplier: float,
    epsilon: float,
    delta: float,
    gap: float,
    parties: int = 0,
    by_server: bool = False,
) -> EvaluationTerms:
    """Return the terms of an evaluation, on the coarsest grid that its noise allows.

    Parameters
    ----------
    option : PrivateEvaluation
        What the user chose.
    unit, neighbours, noise_multiplier, epsilon, delta, gap, parties, by_server
        As of `EvaluationTerms`.

    Raises
    ------
    InvalidParameterError
        If there is none.
    """
    terms = EvaluationTerms(
        unit=unit,
        neighbours=neighbours,
        **asked_for(option),
        noise_multiplier=noise_multiplier,
        epsilon=epsilon,
        delta=delta,
        gap=gap,
        grid=COUNTS_GRID,
        parties=parties,
        by_server=by_server,
    )
    return on_coarsest_grid(terms)


def asked_for(option: PrivateEvaluation) -> dict[str, Any]:
    """Return the fields of terms that say which statistics are asked for."""
    return {
        "accuracy": option.accuracy,
        "loss_cap": float(option.loss_cap or 0.0),
        "labels": option.label_histogram or 0,
    }


def on_coarsest_grid(terms: Terms) -> Terms:
    """Return terms with the coarsest grid that their noise allows.

    Raises
    ------
    InvalidParameterError
        If there is none: what a client would refuse is refused now.
    """
    losses = terms.unit == "record" and terms.loss_cap
    finest = _FINEST_OF_LOSSES if losses else _FINEST[terms.unit]
    step = min(
        2.0**finest,
        terms.own_sigma() / _SHARE_STEPS,
        terms.sigma() / math.sqrt(_gap_of_one_step(terms.size) / terms.gap),
    )
    # As coarse as the codes of the noise need, which stays far below the noise.
    room = terms.grid + math.frexp(terms.code_limit() / CODE_LIMIT)[1]
    planned = replace(terms, grid=max(math.frexp(step)[1] - 1, room))
    planned.check_noise()
    return planned


def _gap_of_one_step(size: int) -> float:
    """Return what `discretisation_gap` of noise of s steps is below, times ``s^2``.

    While s is large beside the number of entries to the power of 1/4.
    """
    return 10.0 + 3.5 * math.sqrt(size)
