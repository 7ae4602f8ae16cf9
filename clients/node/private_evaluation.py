"""The client half of a private evaluation, for every scheme that has one."""

from typing import ClassVar

from flwr_privacy.errors import ProtocolError
from flwr_privacy.pipeline.mechanism import Answer, Release
from flwr_privacy.privacy.averaging import WeightedMean
from flwr_privacy.wire import fields as records
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.message import EVALUATE, Fields

from .base import Evaluate, SchemeClient

__all__ = ["EvaluatingClient", "is_private"]

_NAMED = "accuracy"  # the entry that no other request has


def is_private(fields: Fields) -> bool:
    """Tell whether a request asks for a private evaluation."""
    return _NAMED in fields


class EvaluatingClient(SchemeClient):
    """Base of the client halves that answer private evaluations.

    What is released, and what it protects: `flwr_privacy.evaluation.EvaluationTerms`.
    """

    sums_evaluations: ClassVar[bool] = True

    def release_of_evaluation(self, arrays: Arrays, fields: Fields, evaluate: Evaluate) -> Release:
        """Return the release of what the client says of a model.

        Raises
        ------
        ProtocolError, InvalidParameterError
            If the request is none of a private evaluation, or unfit.
        """
        from flwr_privacy.evaluation.terms import EvaluationTerms  # late: most nodes are not asked

        if not is_private(fields):
            raise ProtocolError(
                f"a client under the scheme '{self.scheme}' releases nothing of an evaluation but "
                "noised counts: give the strategy evaluation=PrivateEvaluation(...)"
            )
        terms = records.read(EvaluationTerms, fields)
        return Release(mechanism=terms, work=lambda _, __: evaluate())

    def answer_evaluation(self, arrays: Arrays, fields: Fields, evaluate: Evaluate) -> Answer:
        """Return the answer to an evaluation, with its codes."""
        if not is_private(fields):
            return super().answer_evaluation(arrays, fields, evaluate)
        release = self.release_of_evaluation(arrays, fields, evaluate)
        return self._released(EVALUATE, arrays, fields, release)

    def accumulator(self, phase: str, arrays: Arrays, fields: Fields) -> WeightedMean:
        """Return an empty sum of answers; of evaluations, where they are private."""
        if not is_private(fields):
            return super().accumulator(phase, arrays, fields)
        from flwr_privacy.evaluation.terms import EvaluationTerms  # late: most nodes are not asked

        return records.read(EvaluationTerms, fields).accumulator({})
