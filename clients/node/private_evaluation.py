"""The client half of a private evaluation, for every scheme that has one."""

from typing import TYPE_CHECKING, ClassVar

from flwr_privacy.accounting import REPLACE_ONE
from flwr_privacy.errors import ProtocolError, check_choice
from flwr_privacy.pipeline.mechanism import Answer, Release
from flwr_privacy.privacy.averaging import WeightedMean
from flwr_privacy.wire import fields as records
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.message import EVALUATE, Fields

from .base import Evaluate, SchemeClient

if TYPE_CHECKING:
    from flwr_privacy.evaluation.terms import EvaluationTerms

__all__ = ["EvaluatingClient", "is_private"]

_NAMED = "accuracy"  # the entry that no other request has


def is_private(fields: Fields) -> bool:
    """Tell whether a request asks for a private evaluation."""
    return _NAMED in fields


class EvaluatingClient(SchemeClient):
    """Base of the client halves that answer private evaluations.

    What is released, and what it protects: `flwr_privacy.evaluation.EvaluationTerms`.

    Attributes
    ----------
    record_neighbours : str
        The neighbours of the scheme where it protects a record. A server that asks for the counts
        of other neighbours is refused.
    """

    sums_evaluations: ClassVar[bool] = True
    record_neighbours: ClassVar[str] = REPLACE_ONE

    def release_of_evaluation(self, arrays: Arrays, fields: Fields, evaluate: Evaluate) -> Release:
        """Return the release of what the client says of a model.

        Raises
        ------
        ProtocolError, InvalidParameterError
            If the request is none of a private evaluation, or unfit.
        """
        return Release(mechanism=self.asked_evaluation(fields), work=lambda _, __: evaluate())

    def evaluation_terms(self, fields: Fields) -> "EvaluationTerms":
        """Return the terms of a private evaluation; by default those of the app's metrics."""
        from flwr_privacy.evaluation.terms import EvaluationTerms  # late: most nodes are not asked

        return records.read_terms(EvaluationTerms, fields)

    def asked_evaluation(self, fields: Fields) -> "EvaluationTerms":
        """Return the terms of a request, if it is of a private evaluation that suits the scheme.

        Raises
        ------
        ProtocolError, InvalidParameterError
            As `release_of_evaluation`.
        """
        if not is_private(fields):
            raise ProtocolError(
                f"a client under the scheme '{self.scheme}' releases nothing of an evaluation but "
                "noised counts: give the strategy evaluation=PrivateEvaluation(...)"
            )
        terms = self.evaluation_terms(fields)
        if terms.unit == "record":
            check_choice("neighbours", terms.neighbours, (self.record_neighbours,))
        return terms

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
        return self.evaluation_terms(fields).accumulator({})
