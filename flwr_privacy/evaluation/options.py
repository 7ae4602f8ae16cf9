"""Constructor option of the private schemes: that clients evaluate the model, and at what cost."""

from dataclasses import dataclass

from flwr_privacy.errors import InvalidParameterError, check_integer, check_number
from flwr_privacy.keywords import checked_keywords

from .caps import LARGEST_CAP, MOST_LABELS, SMALLEST_CAP

__all__ = ["PrivateEvaluation"]


@checked_keywords
@dataclass(frozen=True, kw_only=True)
class PrivateEvaluation:
    """Has clients evaluate the model on their own data, with noise, from the budget of the run.

    Use it where the server has no labelled data. What the server learns of an evaluation is charged
    like a training, and the noise of the training leaves room for it.

    Parameters
    ----------
    every : int, default 1
        Rounds from one evaluation to the next, at least 1; the last planned round has one too.
        Fewer evaluations have less noise each.
    share : float, default 0.05
        Share of the budget for all planned evaluations together, from 1e-6 to 0.99.
    loss_cap : float, optional
        Largest mean loss of a client that counts; what is above counts as this. By default no loss
        is released: it costs a factor of ``sqrt(2)`` in noise. At user level, and under ACFL, where
        it caps the loss of a record.
    accuracy : str, default "accuracy"
        Name of the metric of the app's evaluation that is released, a number from 0 to 1. At record
        level one of `flwr_privacy.evaluation.caps.ACCURACIES`, such as "acc" or "eval_accuracy".
    label_histogram : int, optional
        Number of labels K whose histogram is released too, from 2 to 1024: how many evaluated
        records have each label, at user level the mean share over clients. The app's evaluation
        returns the counts as ``label-0`` to ``label-(K-1)``. By default there is none: it costs a
        factor of up to ``sqrt(1.5)`` in noise, however many labels there are.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Examples
    --------
    >>> evaluation = PrivateEvaluation(every=4)
    >>> [r for r in range(1, 11) if evaluation.takes_place(r, rounds=10)], evaluation.count(10)
    ([4, 8, 10], 3)
    """

    every: int = 1
    share: float = 0.05
    loss_cap: float | None = None
    accuracy: str = "accuracy"
    label_histogram: int | None = None

    def __post_init__(self) -> None:
        check_integer("every", self.every, minimum=1)
        check_number("share", self.share, minimum=1e-6, maximum=0.99)
        if self.loss_cap is not None:
            check_number("loss_cap", self.loss_cap, minimum=SMALLEST_CAP, maximum=LARGEST_CAP)
        if not isinstance(self.accuracy, str) or not self.accuracy:
            raise InvalidParameterError("accuracy", self.accuracy, "the name of a metric")
        if self.label_histogram is not None:
            check_integer("label_histogram", self.label_histogram, minimum=2, maximum=MOST_LABELS)

    def takes_place(self, server_round: int, *, rounds: int) -> bool:
        """Return whether the model of a round is evaluated."""
        return server_round % self.every == 0 or server_round == rounds

    def count(self, rounds: int) -> int:
        """Return the number of evaluations in a training of so many rounds."""
        return -(-rounds // self.every)
