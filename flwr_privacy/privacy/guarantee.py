"""A scheme's privacy guarantee: what is protected, against which adversary, and what is not."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from flwr_privacy.errors import InvalidParameterError, check_number

__all__ = ["APPS", "Guarantee"]

_ROUNDING = 1e-6  # of epsilon; what is left of a budget that was spent as planned

APPS = (
    "each node runs this app and no other. A node without flwr-privacy executor runs any app that "
    'the server sends: for its data, read "the server\'s messages" for "the server". Only its '
    "operator can tell (flwr-privacy node check)"
)
"""What every guarantee against somebody assumes of the nodes."""


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """The privacy guarantee of a training, as data and as text.

    Parameters
    ----------
    scheme : str
        Name of the scheme.
    protects : str
        What is protected: a record, all data of a client, nothing.
    adversary : str
        Against whom.
    neighbours : str, default ""
        Which data sets are to look alike.
    epsilon, delta : float, optional
        Bound for every client over the whole training.
    spent : float, optional
        Epsilon of the client that has spent most so far, at `delta`.
    accountant : str, default ""
        How `spent` was computed.
    not_protected, assumptions, evidence : tuple of str
        What is not covered; what the guarantee rests on; what was done to check it, in words.
    secure_sum : str, default ""
        What of the clients' answers the server sees only as a sum; empty without a secure sum.
    void : str, default ""
        Why the guarantee does not hold in this run; empty where it does.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed, or there is an epsilon without its delta.

    Examples
    --------
    >>> nothing = Guarantee(scheme="fedavg", protects="nothing", adversary="nobody")
    >>> print(nothing.text())
    fedavg protects nothing.
    """

    scheme: str
    protects: str
    adversary: str
    neighbours: str = ""
    epsilon: float | None = None
    delta: float | None = None
    spent: float | None = None
    accountant: str = ""
    not_protected: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    secure_sum: str = ""
    void: str = ""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.type == "str" or entry.type is str:
                _check(entry.name, value, isinstance(value, str), "text")
            elif entry.name not in ("epsilon", "delta", "spent"):
                texts = isinstance(value, tuple) and all(isinstance(text, str) for text in value)
                _check(entry.name, value, texts, "a tuple of texts")
        for name in ("epsilon", "spent"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            _check(
                name, value, value is None or (number and value >= 0), "a number from 0, or none"
            )
        if self.delta is not None and not 0 < check_number("delta", self.delta) < 1:
            raise InvalidParameterError("delta", self.delta, "a number between 0 and 1")
        if self.delta is None and not self.epsilon is self.spent is None:
            raise InvalidParameterError("delta", None, "the delta that epsilon is for")

    def sentence(self) -> str:
        """Return what is promised, without what limits it, as a sentence without its full stop."""
        first = f"{self.scheme} protects {self.protects}"
        if self.epsilon is not None:
            return (
                f"{first} against {self.adversary}: ({self.epsilon:.4g}, {self.delta:g})-"
                f"differential privacy over the whole training, for data sets where "
                f"{self.neighbours}"
            )
        return first if self.adversary == "nobody" else f"{first}, against {self.adversary}"

    def budget(self) -> str:
        """Return the epsilon spent so far and what is left of it; empty where none is counted.

        Examples
        --------
        >>> spent = Guarantee(
        ...     scheme="udp",
        ...     protects="a record",
        ...     adversary="the server",
        ...     epsilon=8.0,
        ...     delta=1e-5,
        ...     spent=2.5,
        ... )
        >>> spent.budget()
        'epsilon 2.5 of 8 spent, 5.5 left'
        """
        if self.spent is None:
            return ""
        if self.epsilon is None or self.epsilon == math.inf:
            return f"epsilon {self.spent:.4g} spent"
        left = self.epsilon - self.spent
        left = 0.0 if left < _ROUNDING * self.epsilon else left
        return f"epsilon {self.spent:.4g} of {self.epsilon:.4g} spent, {left:.4g} left"

    def text(self) -> str:
        """Return the guarantee in words."""
        sentences = []
        if self.void:
            sentences.append(f"VOID: {self.void}")
        sentences.append(self.sentence())
        if self.secure_sum:
            sentences.append(f"Secure sum: {self.secure_sum}")
        if self.spent is not None:
            sentences.append(f"Spent so far: epsilon {self.spent:.4g} ({self.accountant})")
        for title, entries in (
            ("Not protected", self.not_protected),
            ("Assumed", self.assumptions),
            ("Checked by", self.evidence),
        ):
            if entries:
                sentences.append(f"{title}: {'; '.join(entries)}")
        return ". ".join(sentences) + "."

    def assuming_apps(self) -> "Guarantee":
        """Return the guarantee with `APPS` among its assumptions, if it is one."""
        if self.adversary == "nobody":
            return self
        return replace(self, assumptions=(*self.assumptions, APPS))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are set, as plain values."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in values.items()
            if value not in (None, "", ())
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Guarantee":
        """Read a guarantee from the result of `to_dict`.

        Raises
        ------
        TypeError
            If a value is missing or unknown.
        InvalidParameterError
            If a value is not allowed.
        """
        plain: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
        }
        return cls(**plain)


def _check(name: str, value: Any, fits: bool, allowed: str) -> None:
    if not fits:
        raise InvalidParameterError(name, value, allowed)
