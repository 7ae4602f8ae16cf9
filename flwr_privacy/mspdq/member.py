"""A client's side of a learning round: its state and the messages that it sends."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.coding.quantize import Codes
from flwr_privacy.privacy.randomness import SecureRandom

from .codec import Codec
from .intervals import own_width
from .mixing import SubStates
from .terms import MSPTerms

__all__ = ["Member", "Said"]

Vectors = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Said:
    """A message of MSPDQ.

    Parameters
    ----------
    codes : ndarray of unsigned integers, shape (d,)
        Numbers of the knobs.
    width : float
        Width of the intervals.
    saturated : int
        Values that lay outside of theirs.
    """

    codes: Codes
    width: float
    saturated: int


@dataclass(kw_only=True, eq=False, repr=False)
class Member:
    """One client in one learning round; all of it is secret but `heard`.

    Parameters
    ----------
    terms : MSPTerms
        The parameters.
    states : SubStates
        The sub-states.
    heard : ndarray of float64, shape (d,)
        What the server has of the visible one: the last message as it was sent, or its decoded
        value.
    weight : int
        Weight of the hidden sub-states together, `Mixing.own_weight`.
    sent : int
        Number k of that message.

    Examples
    --------
    >>> terms = MSPTerms(levels=255, start="global", gamma=0.5, rounds=1)
    >>> member = Member.begin(terms, model=np.array([1.0, 3.0]), heard=np.array([1.0, 1.0]))
    >>> member.step(np.array([1.0, 1.0]), SecureRandom())
    >>> said = member.say(None, SecureRandom())
    >>> said.codes, said.width, member.heard
    (array([127, 254], dtype=uint8), 4.0, array([1., 3.]))
    """

    terms: MSPTerms
    states: SubStates
    heard: Vectors
    weight: int
    sent: int = 0

    @classmethod
    def begin(
        cls,
        terms: MSPTerms,
        model: Vectors,
        heard: Vectors,
        visible: Vectors | None = None,
        *,
        weight: int | None = None,
    ) -> "Member":
        """Split a trained model.

        Parameters
        ----------
        terms : MSPTerms
            The parameters.
        model : ndarray of float64, shape (d,)
            The trained model.
        heard : ndarray of float64, shape (d,)
            What the server has at message 0.
        visible : ndarray of float64, shape (d,), optional
            The visible sub-state; by default `heard`, as it must be where messages are rounded to
            knobs.
        weight : int, optional
            The client's own weight; by default the common one.
        """
        visible = heard if visible is None else visible
        weight = terms.mixing.weight if weight is None else weight
        states = SubStates.split(model, visible, weight=weight)
        return cls(terms=terms, states=states, heard=np.array(heard), weight=weight)

    def scalar(self) -> float:
        """Return the client's report of its gap that the width rule asks for; 0 if none."""
        return self.terms.intervals.scalar(self.states.gap(weight=self.weight))

    def step(self, average: Vectors, random: SecureRandom) -> None:
        """Take the mixing step that follows the last message, equations (3) and (21)."""
        mixing = self.terms.mixing
        self.states.step(
            average,
            self.heard,
            kappa=mixing.kappa,
            gain=mixing.gain(self.sent, random),
            weight=self.weight,
        )
        self.sent += 1

    def say(self, width: float | None, random: SecureRandom) -> Said:
        """Return the next message of MSPDQ, and advance to its value.

        Parameters
        ----------
        width : float, optional
            The width that the server decided on; None: the client's own.
        random : SecureRandom
            For the rounding.

        Raises
        ------
        InvalidParameterError
            If the width is not allowed, or a value is not finite.
        """
        visible = self.states.visible
        width = own_width(visible, self.heard) if width is None else width
        codec = Codec(self.heard, self.terms.levels)
        codes, saturated = codec.encode(visible, width, random)
        self.heard = codec.value
        return Said(codes=codes, width=width, saturated=saturated)
