"""Private evaluation: what clients say of a model on their own data, noised and charged."""

from typing import TYPE_CHECKING

from flwr_privacy.lazy import lazy

if TYPE_CHECKING:
    from .options import PrivateEvaluation
    from .terms import EvaluationTerms
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = ["EvaluationTerms", "PrivateEvaluation"]
