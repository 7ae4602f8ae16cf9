"""Errors that a user can cause, each with its exit code on the command line.

A message names the parameter, its value and what is allowed. Anything else that is raised is a
defect of the library.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any

__all__ = [
    "AllRefusedError",
    "ChargedFailureError",
    "CheckpointError",
    "DataError",
    "DeclinedError",
    "EngineError",
    "FieldRangeError",
    "FlwrPrivacyError",
    "InvalidParameterError",
    "KeywordError",
    "LedgerError",
    "NotEnoughSharesError",
    "NothingTrainedError",
    "ProtocolError",
    "RefusedPeersError",
    "TooFewTrainedError",
    "check_choice",
    "check_flag",
    "check_integer",
    "check_number",
    "refusals",
]


_LONGEST_VALUE = 500  # characters of a value in a message
_SHOWN_REASONS = 2  # of those that clients gave


class FlwrPrivacyError(Exception):
    """Base of every error that a user of the library can cause."""

    exit_code: int = 1
    of_users_code: bool = False
    """Whether a client's own training, evaluation or data function raised it."""


class InvalidParameterError(FlwrPrivacyError, ValueError):
    """A parameter has a value that is not allowed.

    Parameters
    ----------
    parameter : str
        Name of the parameter as the user wrote it.
    value : Any
        Its value.
    allowed : str
        What is allowed, as a phrase that follows "expected".
    """

    exit_code = 2

    def __init__(self, parameter: str, value: Any, allowed: str) -> None:
        self.parameter = parameter
        self.value = value
        self.allowed = allowed
        super().__init__(f"{parameter} = {_shown(value)}: expected {allowed}")


class KeywordError(InvalidParameterError, TypeError):
    """A keyword is not one of a class, or one that it needs is missing.

    Parameters
    ----------
    owner : str
        The class.
    keyword : str
        The keyword.
    advice : str
        What to write.
    missing : bool, default False
        Whether the keyword is missing.
    """

    def __init__(self, owner: str, keyword: str, advice: str, *, missing: bool = False) -> None:
        self.parameter, self.value, self.allowed = keyword, None, advice
        problem = "needs" if missing else "has no"
        Exception.__init__(self, f"{owner} {problem} {keyword!r}: {advice}")


class DataError(FlwrPrivacyError):
    """A data set is missing, damaged or unfit for the task."""

    exit_code = 3


class EngineError(FlwrPrivacyError):
    """An engine could not be started, or the app failed while it ran."""

    exit_code = 4


class CheckpointError(FlwrPrivacyError):
    """A checkpoint is damaged or belongs to another experiment."""

    exit_code = 5


class ProtocolError(FlwrPrivacyError):
    """The two ends of the wire do not agree (scheme, version, phase, round, identity)."""

    exit_code = 6


class NotEnoughSharesError(ProtocolError):
    """Too few answers to decode a coded value: nothing is interpolated from fewer.

    Parameters
    ----------
    needed, got : int
        Number of answers that decoding takes, and that there are.
    missing : sequence of str, optional
        Who has not answered.
    """

    def __init__(self, needed: int, got: int, missing: Sequence[str] = ()) -> None:
        self.needed, self.got, self.missing = needed, got, tuple(missing)
        text = f"{got} of at least {needed} answers are there"
        super().__init__(text + (f"; missing: {', '.join(missing)}" if missing else ""))


class RefusedPeersError(ProtocolError):
    """A client of a secure sum refuses others: their keys, or shares that it cannot open.

    Parameters
    ----------
    reasons : dict
        Why, by client.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        self.peers = tuple(reasons)
        more = f"; and {len(reasons) - 1} more clients" if len(reasons) > 1 else ""
        super().__init__(next(iter(reasons.values())) + more)


class FieldRangeError(DataError):
    """A value is too large for its field: a sum with it could wrap around and be wrong."""


class LedgerError(FlwrPrivacyError):
    """A node's ledger, reply cache or policy cannot be used, or has no folder."""

    exit_code = 7


class DeclinedError(FlwrPrivacyError):
    """A client will not answer: its policy does not allow it, or its budget is spent."""

    exit_code = 8


class ChargedFailureError(FlwrPrivacyError):
    """A client was charged for an answer and cannot give it."""

    exit_code = 9


class NothingTrainedError(FlwrPrivacyError):
    """No round of a training gave a model; the text counts why.

    Parameters
    ----------
    history : list of dict
        The lines of the rounds.
    result : object, optional
        What the training came to all the same: the model as it was, history and guarantee.
    """

    exit_code = 10

    def __init__(self, history: Sequence[Mapping[str, Any]], result: Any = None) -> None:
        super().__init__(history, result)
        self.history, self.result = history, result

    def __str__(self) -> str:
        refused = refusals(self.history)
        asked, used, late = (
            sum(line.get(name, 0) for line in self.history)
            for name in ("asked", "accumulated", "late")
        )
        fates = {f"refused ({reason})": count for reason, count in refused.most_common()}
        fates |= {"late": late, "lost": asked - used - late - refused.total()}
        fates["used, but not enough for a model"] = used
        told = ", ".join(f"{count} {fate}" for fate, count in fates.items() if count > 0)
        why = f"Of {asked} answers: {told}" if told else "No client was asked to train"
        return f"no round trained a model. {why}. The logs of the server and of the nodes say more"


class AllRefusedError(NothingTrainedError):
    """Every client refused in every round, or the server refused every reply.

    Parameters
    ----------
    history : list of dict
        The lines of the rounds.
    result : object, optional
        What the training came to all the same: the model as it was, history and guarantee.
    said : dict, optional
        How often clients gave which reason, as far as it is known.

    Examples
    --------
    >>> lines = [{"round": 1, "asked": 3, "refused": {"declined": 3}}]
    >>> print(AllRefusedError(lines, said={"the budget is spent": 3}))
    no round trained a model: every answer was refused (3 of 3: 3 declined). Most often: "the \
budget is spent". The nodes' logs say more
    """

    exit_code = 12

    def __init__(
        self,
        history: Sequence[Mapping[str, Any]],
        result: Any = None,
        said: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(history, result)
        self.said = dict(said or {})
        self.args = (history, result, self.said)

    def __str__(self) -> str:
        refused = refusals(self.history)
        counts = ", ".join(f"{count} {reason}" for reason, count in refused.most_common())
        asked = sum(line.get("asked", 0) for line in self.history)
        most = [f'"{text}"' for text, _ in Counter(self.said).most_common(_SHOWN_REASONS)]
        reasons = f". Most often: {'; '.join(most)}" if most else ""
        return (
            f"no round trained a model: every answer was refused ({refused.total()} of {asked}: "
            f"{counts}){reasons}. The nodes' logs say more"
        )


class TooFewTrainedError(FlwrPrivacyError):
    """It is certain that too few of the clients' trainings work, although all of them answer.

    Parameters
    ----------
    counted : str
        How many trained, of how many answers.
    history : list of dict
        The lines of the rounds.
    result : object, optional
        What the training came to so far: model, history and guarantee.
    """

    exit_code = 11

    def __init__(
        self, counted: str, history: Sequence[Mapping[str, Any]], result: Any = None
    ) -> None:
        super().__init__(counted, history, result)
        self.counted, self.history, self.result = counted, history, result

    def __str__(self) -> str:
        asked = sum(line.get("asked", 0) for line in self.history)
        told = f" ({asked} were asked for)" if asked else ""
        return f"too few clients train: {self.counted}{told}. The logs of the nodes say what failed"


def refusals(history: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Count the refused answers of some rounds by reason."""
    refused = Counter[str]()
    for line in history:
        refused.update(line.get("refused") or {})
    return refused


def check_integer(
    parameter: str, value: Any, *, minimum: int | None = None, maximum: int | None = None
) -> int:
    """Return `value` as an int if it is an integer, of Python or NumPy, in ``[minimum, maximum]``.

    Raises
    ------
    InvalidParameterError
        If it is no integer (a bool is none) or out of range.

    Examples
    --------
    >>> check_integer("rounds", 3, minimum=1)
    3
    """
    allowed = "an integer" + _range(minimum, maximum)
    if not isinstance(value, int | Integral) or isinstance(value, bool):
        raise InvalidParameterError(parameter, value, allowed)
    _check_range(parameter, value, minimum, maximum, allowed)
    return int(value)


def check_number(
    parameter: str, value: Any, *, minimum: float | None = None, maximum: float | None = None
) -> float:
    """Return `value` as a float if it is a finite number, of Python or NumPy, within a range.

    Raises
    ------
    InvalidParameterError
        If it is no finite number (a bool is none) or outside of ``[minimum, maximum]``.

    Examples
    --------
    >>> check_number("alpha", 1, minimum=0)
    1.0
    """
    allowed = "a finite number" + _range(minimum, maximum)
    if not isinstance(value, float | Real) or isinstance(value, bool) or not _is_finite(value):
        raise InvalidParameterError(parameter, value, allowed)
    _check_range(parameter, value, minimum, maximum, allowed)
    return float(value)


def check_flag(parameter: str, value: Any) -> bool:
    """Return `value` if it is true or false.

    Raises
    ------
    InvalidParameterError
        If it is anything else.

    Examples
    --------
    >>> check_flag("crd", True)
    True
    """
    if not isinstance(value, bool):
        raise InvalidParameterError(parameter, value, "true or false")
    return value


def check_choice(parameter: str, value: Any, choices: Iterable[str]) -> str:
    """Return `value` if it is one of `choices`.

    Raises
    ------
    InvalidParameterError
        If it is none of them; the message puts the nearest names first.

    Examples
    --------
    >>> check_choice("task", "digits-mlp", ["digits-mlp", "mnist-mlp"])
    'digits-mlp'
    >>> check_choice("task", "digit-mpl", ["digits-mlp", "mnist-mlp"])
    Traceback (most recent call last):
    ...
    flwr_privacy.errors.InvalidParameterError: task = 'digit-mpl': expected one of \
'digits-mlp', 'mnist-mlp' (nearest: 'digits-mlp', 'mnist-mlp')
    """
    names = sorted(choices)
    if isinstance(value, str) and value in names:
        return value
    nearest = get_close_matches(str(value), names, n=3, cutoff=0.5)
    nearest = nearest or get_close_matches(str(value), names, n=1, cutoff=0.3)
    allowed = "one of " + ", ".join(map(repr, names))
    if nearest:
        allowed += " (nearest: " + ", ".join(map(repr, nearest)) + ")"
    raise InvalidParameterError(parameter, value, allowed)


def _shown(value: Any) -> str:
    """Return a value for a message, cut where it is long: it may come from an adversary."""
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python prints
        return "a number too long to print"
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def _is_finite(value: float | Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def _range(minimum: float | None, maximum: float | None) -> str:
    if minimum == math.ulp(0.0):  # the least float
        return " above 0" if maximum is None else f" from above 0 to {maximum}"
    if minimum is not None and maximum is not None:
        return f" from {minimum} to {maximum}"
    if minimum is not None:
        return f" of at least {minimum}"
    if maximum is not None:
        return f" of at most {maximum}"
    return ""


def _check_range(
    parameter: str, value: Any, minimum: float | None, maximum: float | None, allowed: str
) -> None:
    if (minimum is not None and value < minimum) or (maximum is not None and value > maximum):
        raise InvalidParameterError(parameter, value, allowed)
