"""Rehearses a user's function before the first charge to learn its number of records.

A scheme opens a scope with `counted` around the user's function. In it a trainer tells the number
of its records, tries itself on generated ones, and ends the function.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.clients.certificates.request import opened
from flwr_privacy.errors import FlwrPrivacyError, ProtocolError, check_choice
from flwr_privacy.pipeline.mechanism import NoFactsError
from flwr_privacy.wire.message import EVALUATE, TRAIN

__all__ = [
    "Generated",
    "Rehearsal",
    "RehearsedError",
    "counted",
    "generated",
    "going_on",
    "loading",
    "model_loaded",
    "rehearse",
    "rehearsed",
    "rehearsing",
    "trial_scope",
    "trying",
]

logger = logging.getLogger("flwr.privacy")


class RehearsedError(BaseException):
    """Ends the user's function when a rehearsal has its result; it is not an error.

    It is no `Exception`, so that a user's function with ``except Exception`` ends too and does not
    go on to train on the records in another way. `counted` stops it.
    """


Layout = tuple[tuple[int, ...], np.dtype[Any]]
"""Shape and type of the features, or of the label, of one record."""

Generated = Callable[[int], tuple[NDArray[Any], NDArray[Any]]]
"""From a number of records to features and labels that look like the user's."""


class Rehearsal:
    """The result of a `counted` scope; nothing in it depends on a record's values.

    Parameters
    ----------
    kind : {"train", "evaluate"}
        Whether trainers or evaluators are rehearsed; the others work as always.

    Attributes
    ----------
    records : int or None
        Number of records that the trainer was given first; None if it was not called.
    layout : tuple of pairs of shape and dtype
        What features and label of one record look like.
    error : Exception or None
        What the generated records raised, or a check of the settings and the model.
    whole : bool
        Whether the user's function goes on to its end: the loop is its own (`going_on`).
    raised : Exception or None
        What such a function raised by itself: it may have looked at its data.
    """

    def __init__(self, kind: str) -> None:
        self.kind = check_choice("kind", kind, (TRAIN, EVALUATE))
        self.records: int | None = None
        self.layout: tuple[Layout, Layout] | tuple[()] = ()
        self.error: Exception | None = None
        self.whole = False
        self.raised: Exception | None = None

    @property
    def called(self) -> bool:
        """Whether the user's function called a trainer (an evaluator)."""
        return self.records is not None

    def check(self) -> None:
        """Raise an error of the settings or the model, so that it is reported before a charge.

        What the user's own code raises on generated records may be their fault: the log has it.

        Raises
        ------
        FlwrPrivacyError
            If something is.
        """
        if isinstance(self.error, FlwrPrivacyError):
            raise self.error
        if self.error is not None:
            logger.warning("on generated records the client's code fails", exc_info=self.error)

    def check_loop(self) -> None:
        """Raise what a loop of the user's own did; it may have looked at its data.

        A loop that fails was not rehearsed, and nothing else checks that it mixes no records.

        Raises
        ------
        Exception
            What it raised, or the rule of the trainer that it broke.
        """
        if isinstance(self.error, ProtocolError):
            raise self.error
        if self.raised is not None and self.error is None:
            logger.error("on generated records the client's loop fails", exc_info=self.raised)
            raise ProtocolError(
                "the training loop fails on generated records, so that nothing is known of it: "
                "the node's log says how. Where such records do not fit, give some that do "
                "(rehearsal_records)"
            ) from self.raised

    def unfit(self, error: Exception) -> None:
        """Take note of a model that does not fit the request, before a trainer was called."""
        if not self.called:
            self.records, self.error = 0, error

    def of(
        self, features: NDArray[Any], labels: NDArray[Any], work: Callable[[Generated], None]
    ) -> None:
        """Count the records and run `work` on generated ones; only the first call counts.

        The features are standard normal, or zeros where they are no floating-point numbers; the
        labels are zeros.
        """
        if self.called:
            return
        self.records = len(labels)
        self.layout = _layout(features), _layout(labels)
        draws = np.random.default_rng(0)
        try:
            work(lambda count: generated(draws, count, *self.layout))
        # The model and the loss are the user's: whatever they raise, a rehearsal is to tell it.
        except Exception as error:  # noqa: BLE001
            self.error = error


def generated(
    draws: np.random.Generator,
    count: int,
    features: Layout,
    labels: Layout,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return records of a layout: normal features (zeros if they are no floats), zero labels."""
    (shape, dtype), (label_shape, label_dtype) = features, labels
    made = np.zeros((count, *shape), dtype)
    if np.issubdtype(dtype, np.floating):
        made = np.asarray(draws.standard_normal(made.shape)).astype(dtype)
    return made, np.zeros((count, *label_shape), label_dtype)


def _layout(part: NDArray[Any]) -> Layout:
    return part.shape[1:], part.dtype


trial_scope: ContextVar[Any] = ContextVar("flwr_privacy_trial", default=None)
"""What tries a training that asks for its data (`flwr_privacy.clients.node.generated`)."""

_rehearsal: ContextVar[Rehearsal | None] = ContextVar("flwr_privacy_rehearsal", default=None)


@contextmanager
def counted(kind: str = TRAIN) -> Iterator[Rehearsal]:
    """Open a scope in which the user's function only reports the number of its records.

    A trainer that the user calls in it looks at no value of its features and labels. It tries
    itself on generated records of the same layout and then ends the user's function. What the
    function raises after that is of no interest, and stops here. Open it inside of `asked`
    (`asked_loss`), so that the settings of the scheme are rehearsed too.

    Parameters
    ----------
    kind : {"train", "evaluate"}, default "train"
        Whether trainers or evaluators are rehearsed.

    Examples
    --------
    >>> def users_function():
    ...     rehearse(TRAIN, np.zeros((10, 3)), np.zeros(10), work=lambda generated: None)
    ...     raise RuntimeError("never reached")
    >>> with counted() as rehearsal:
    ...     users_function()
    >>> rehearsal.records, rehearsal.error
    (10, None)
    """
    rehearsal = Rehearsal(kind)
    try:
        with opened(_rehearsal, rehearsal):
            yield rehearsal
    except RehearsedError:
        pass
    # A user's function may catch what ends it, and raise something of its own.
    except Exception as error:
        if not rehearsal.called:
            raise
        rehearsal.raised = error if rehearsal.whole else None


class Loading:
    """The result of a `loading` scope.

    Attributes
    ----------
    done : bool
        Whether the user's function has come to where it loads the server's arrays.
    error : Exception or None
        Why they do not fit its model.
    """

    def __init__(self) -> None:
        self.done = False
        self.error: Exception | None = None


_loading: ContextVar[Loading | None] = ContextVar("flwr_privacy_loading", default=None)


@contextmanager
def loading() -> Iterator[Loading]:
    """Open a scope in which the user's function ends as soon as its model is loaded and checked.

    So the base model of a node and its adapters are checked before the first charge, also where the
    app does not say what its records look like. What the function raises after that is of no
    interest, and stops here.
    """
    found = Loading()
    try:
        with opened(_loading, found):
            yield found
    except RehearsedError:
        pass
    # A user's function may catch what ends it, and raise something of its own.
    except Exception:
        if not found.done:
            raise


def model_loaded(error: Exception | None = None) -> None:
    """Take note that the user's function has loaded its model, or of why that does not fit.

    Whatever loads the server's arrays calls it. In a scope of `loading` it ends the user's
    function. So does an error in one of `counted`, which is then reported before a charge.
    Elsewhere it does nothing.

    Raises
    ------
    RehearsedError
        In such a scope.
    """
    found, rehearsal = _loading.get(), _rehearsal.get()
    if found is not None:
        found.done, found.error = True, found.error or error
        raise RehearsedError("the rehearsal has what it needs")
    if rehearsal is not None and error is not None:
        rehearsal.unfit(error)
        raise RehearsedError("the model does not fit")


def trying() -> bool:
    """Tell whether a training is being tried before a charge, on records that it requests, if any.

    It gets no state of the app then.
    """
    return trial_scope.get() is not None or _loading.get() is not None


def rehearsing() -> bool:
    """Tell whether a scope of `counted` or `trial` is open, in which nothing has been charged."""
    return trying() or _rehearsal.get() is not None


def rehearsed(kind: str, work: Callable[[], Any], certificate: Callable[[], Any]) -> int:
    """Rehearse a user's function, and return the number of its records.

    Parameters
    ----------
    kind : {"train", "evaluate"}
        What it does.
    work : callable
        The user's function.
    certificate : callable
        Raises an error that says what is missing where no trainer was called, or a loop of the
        user's own has ended.

    Raises
    ------
    InvalidParameterError
        If settings or model do not fit: that follows from generated records.
    NoFactsError
        If the function ends before it calls a trainer, or a loop of its own fails, breaks the
        trainer's rules or is not what `certificate` asks for. It may have looked at its data.
    """
    try:
        with counted(kind) as rehearsal:
            work()
        if rehearsal.whole:
            rehearsal.check_loop()
        if not rehearsal.called or (rehearsal.whole and rehearsal.error is None):
            certificate()
    # Whatever a user's function raises.
    except Exception as error:
        raise NoFactsError(str(error)) from error
    rehearsal.check()
    return rehearsal.records or 0


def rehearse(
    kind: str,
    features: NDArray[Any],
    labels: NDArray[Any],
    work: Callable[[Generated], None],
) -> None:
    """In a scope of `counted`, run `work` on generated records and end the user's function.

    A trainer calls this first. Outside of such a scope, or in one of another kind, it does nothing.

    Parameters
    ----------
    kind : {"train", "evaluate"}
        What the caller does.
    features, labels : ndarray
        The user's records.
    work : callable
        What is to be tried; it gets a function that generates records.

    Raises
    ------
    RehearsedError
        In such a scope, always.
    """
    rehearsal = _rehearsal.get()
    if rehearsal is None or rehearsal.kind != kind:
        return
    rehearsal.of(features, labels, work)
    raise RehearsedError("the rehearsal has what it needs")


def going_on(kind: str, records: int) -> Rehearsal | None:
    """Note the number of records in a scope of `counted`, and let the user's function go on.

    It is for a trainer whose loop is the user's: it gives the loop generated records until the
    loop is over, and puts what is wrong into the rehearsal's ``error``.

    Parameters
    ----------
    kind : {"train", "evaluate"}
        What the caller does.
    records : int
        The number of records.

    Returns
    -------
    Rehearsal or None
        That of the scope; None outside of one, or in one of another kind.

    Raises
    ------
    RehearsedError
        If a trainer was called in the scope before.
    """
    rehearsal = _rehearsal.get()
    if rehearsal is None or rehearsal.kind != kind:
        return None
    if rehearsal.called:
        raise RehearsedError("the rehearsal has what it needs")
    rehearsal.records, rehearsal.whole = records, True
    return rehearsal
