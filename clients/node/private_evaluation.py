"""A client's answer to a private evaluation, for every scheme that has one."""

from collections.abc import Callable
from typing import Any

from flwr_privacy.pipeline.mechanism import Release
from flwr_privacy.privacy.averaging import WeightedMean
from flwr_privacy.wire import fields as records
from flwr_privacy.wire.message import Fields

__all__ = ["evaluation_sum", "is_private", "private_evaluation"]

_NAMED = "accuracy"  # the entry that no other request has


def is_private(fields: Fields) -> bool:
    """Tell whether a request asks for a private evaluation."""
    return _NAMED in fields


def private_evaluation(fields: Fields, evaluate: Callable[[], Any]) -> Release:
    """Return the release of a private evaluation.

    Raises
    ------
    ProtocolError, InvalidParameterError
        If the request is unfit.
    """
    from flwr_privacy.evaluation.terms import EvaluationTerms  # late: most nodes are not asked

    terms = records.read(EvaluationTerms, fields)
    return Release(mechanism=terms, work=lambda _, __: evaluate())


def evaluation_sum(fields: Fields) -> WeightedMean:
    """Return an empty sum of answers to a private evaluation."""
    from flwr_privacy.evaluation.terms import EvaluationTerms  # late: most nodes are not asked

    return records.read(EvaluationTerms, fields).accumulator({})
