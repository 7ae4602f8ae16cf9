"""Computes the L2 sensitivity of a release: how far one client's data can move it.

At record level two worlds are compared that differ in one record and agree in everything else: the
weights at the start, which are public, the number of records and the order of the batches. Up to
the first step in which that record takes part the weights are the same; this step can bring them
``2 * learning_rate * clipping_norm / batch`` apart, one clipped gradient against another; a record
that is missing, or has no finite gradient, has the gradient 0. What happens afterwards depends on
the function that is trained, which is what `BOUNDS` is about.
"""

import math

from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer, check_number
from flwr_privacy.privacy.updates import SMALLEST_NORM

__all__ = [
    "BOUNDS",
    "RECORD_UNIT",
    "USER_UNIT",
    "check_sampling",
    "check_steps",
    "sensitivity",
]

RECORD_UNIT, USER_UNIT = "record", "user"
"""What is protected: one record of a client's data, or all of its data."""

BOUNDS = ("general", "convex", "unproven")
"""How the sensitivity of several steps is bounded.

``general`` holds for every model: in a later step each of the two worlds goes at most
``learning_rate * clipping_norm`` its own way.

``convex`` holds where a step cannot drive two sets of weights apart, so that every pass adds what
the first one did. That is so for a loss that is a convex function of one number, which is a linear
function of the weights (a generalised linear model with one output), without a regulariser, with a
learning rate of at most ``2 / L`` for losses that are L-smooth in the weights: there a clipped
gradient is still the gradient of a convex function. It is not so for several outputs, such as
softmax regression: clipping then turns the gradient field.

``unproven`` counts one full-batch step, whatever is done, as the paper's formula does. With more
than one step it bounds nothing.
"""

_SMALLEST = math.ulp(0.0)


def sensitivity(
    unit: str,
    *,
    clipping_norm: float,
    learning_rate: float = 1.0,
    records: int | None = None,
    sampling_rate: float = 1.0,
    epochs: int = 1,
    batch_size: int | None = None,
    bound: str = "general",
) -> float:
    """Return the L2 sensitivity of one release.

    Parameters
    ----------
    unit : {"record", "user"}
        At record level gradient descent with gradients clipped per record, where neighbouring data
        differ in one record. At user level an update clipped as a whole, where neighbouring data
        differ in everything: ``2 * clipping_norm``, whatever the training was.
    clipping_norm : float
        Bound C of a record's gradient, or of the update.
    learning_rate : float, default 1.0
        Step size; at record level only, like everything below.
    records : int
        Number of records n, at least 1. It has no default at record level.
    sampling_rate : float, default 1.0
        Rate at which records are drawn; the sum of a step is then divided by
        ``sampling_rate * records``. Below 1 there is a single step.
    epochs : int, default 1
        Passes E over the records.
    batch_size : int, optional
        Records B of a step, 1 to n, by which its sum is divided, also in the last step of a pass
        that has fewer; the order is the same in every pass and for all data. By default all.
    bound : {"general", "convex", "unproven"}
        See `BOUNDS`. With ``s = ceil(n / B)`` steps in a pass, the sensitivity is
        ``2 learning_rate C`` times ``1 / B + E s - 1``, ``E / B`` or ``1 / n``.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Examples
    --------
    One step on all records (Wei et al., section III.A), five of them, and a pass in eight batches:

    >>> one = {"clipping_norm": 1.0, "learning_rate": 1.0, "records": 800}
    >>> sensitivity("record", **one)
    0.0025
    >>> sensitivity("record", **one, epochs=5)
    8.0025
    >>> sensitivity("record", **one, epochs=5, bound="convex")
    0.0125
    >>> sensitivity("record", **one, batch_size=100)
    14.02
    """
    check_number("clipping_norm", clipping_norm, minimum=SMALLEST_NORM)
    check_steps(
        unit, sampling_rate=sampling_rate, epochs=epochs, batch_size=batch_size, bound=bound
    )
    if unit == USER_UNIT:
        return 2 * clipping_norm
    check_number("learning_rate", learning_rate, minimum=_SMALLEST)
    records = check_integer("records", records, minimum=1)
    if batch_size is not None and batch_size > records:
        raise InvalidParameterError(
            "batch_size", batch_size, f"at most the number of records, {records}"
        )
    apart = 2 * learning_rate * clipping_norm
    full = sampling_rate * records
    batch = full if batch_size is None else batch_size
    if bound == "convex":
        return apart * epochs / batch
    if bound == "unproven":
        return apart / full
    steps = epochs * (1 if batch_size is None else -(-records // batch_size))
    return apart / batch + apart * (steps - 1)


def check_sampling(unit: str, sampling_rate: float) -> None:
    """Check the rate at which records are drawn.

    Raises
    ------
    InvalidParameterError
        If it is not allowed.
    """
    check_number("sampling_rate", sampling_rate, minimum=_SMALLEST, maximum=1)
    if unit == USER_UNIT and sampling_rate != 1:
        raise InvalidParameterError(
            "sampling_rate", sampling_rate, "1 at user level: records are not sampled"
        )


def check_steps(
    unit: str,
    *,
    sampling_rate: float = 1.0,
    epochs: int = 1,
    batch_size: int | None = None,
    bound: str = "general",
) -> None:
    """Check what does not depend on the number of records; the parameters are `sensitivity`'s.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed, alone or beside the others.
    """
    check_sampling(check_choice("unit", unit, (RECORD_UNIT, USER_UNIT)), sampling_rate)
    check_integer("epochs", epochs, minimum=1)
    if batch_size is not None:
        check_integer("batch_size", batch_size, minimum=1)
    check_choice("bound", bound, BOUNDS)
    given = {"epochs": (epochs, 1), "batch_size": (batch_size, None)}
    for name, (value, only) in given.items():
        if value == only:
            continue
        if unit == USER_UNIT:
            allowed = f"{only} at user level: the user's training has its own"
            raise InvalidParameterError(name, value, allowed)
        if sampling_rate != 1:
            allowed = f"{only} with sampling_rate = {sampling_rate}: a sample serves a single step"
            raise InvalidParameterError(name, value, allowed)
    if unit == USER_UNIT and bound != "general":
        raise InvalidParameterError(
            "bound", bound, "'general' at user level: the update is clipped as a whole"
        )
