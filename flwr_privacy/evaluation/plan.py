"""Plans the request of a private evaluation: its terms, with a grid that its noise needs."""

import math
from typing import Any

from flwr_privacy.privacy.grid import CODE_LIMIT

from .options import PrivateEvaluation
from .terms import COUNTS_GRID, EvaluationTerms

__all__ = ["planned_terms"]

_FINEST = {"record": COUNTS_GRID, "user": -12}
"""Exponent of the coarsest grid: half a record, or far below what one client changes."""

_FINEST_OF_LOSSES = -10
"""The same where losses of single records are added up."""

_SHARE_STEPS = 4  # at least so many steps of the grid are a party's noise


def planned_terms(
    option: PrivateEvaluation,
    *,
    unit: str,
    noise_multiplier: float,
    epsilon: float,
    delta: float,
    gap: float,
    parties: int = 0,
    by_server: bool = False,
    secret_records: bool = False,
    kind: type[EvaluationTerms] = EvaluationTerms,
    **own: Any,
) -> EvaluationTerms:
    """Return the terms of an evaluation, on the coarsest grid that its noise allows.

    Raises
    ------
    InvalidParameterError
        If there is none.

    Parameters
    ----------
    option : PrivateEvaluation
        What the user chose.
    unit, noise_multiplier, epsilon, delta, gap, parties, by_server, secret_records
        As of `EvaluationTerms`.
    kind : type, default EvaluationTerms
        The terms of the scheme.
    **own
        What these have besides.
    """

    def on(exponent: int) -> EvaluationTerms:
        return kind(
            unit=unit,
            accuracy=option.accuracy,
            loss_cap=float(option.loss_cap or 0.0),
            noise_multiplier=noise_multiplier,
            epsilon=epsilon,
            delta=delta,
            gap=gap,
            grid=exponent,
            parties=parties,
            by_server=by_server,
            secret_records=secret_records,
            labels=option.label_histogram or 0,
            **own,
        )

    finest = _FINEST_OF_LOSSES if unit == "record" and option.loss_cap else _FINEST[unit]
    terms = on(finest)
    step = min(
        2.0**finest,
        terms.own_sigma() / _SHARE_STEPS,
        terms.sigma() / math.sqrt(_gap_of_one_step(terms.size) / gap),
    )
    # As coarse as the codes of the noise need, which stays far below the noise.
    room = finest + math.frexp(terms.code_limit() / CODE_LIMIT)[1]
    planned = on(max(math.frexp(step)[1] - 1, room))
    planned.check_noise()  # what a client would refuse is refused now
    return planned


def _gap_of_one_step(size: int) -> float:
    """Return what `discretisation_gap` of noise of s steps is below, times ``s^2``.

    While s is large beside the number of entries to the power of 1/4.
    """
    return 10.0 + 3.5 * math.sqrt(size)
