"""Defines a release: its mechanism, and the plan it makes before any data are read.

A mechanism is a frozen dataclass. It is what travels, and both ends build the same object of it, so
they cannot disagree on bounds, grids or accumulators. `flwr_privacy.pipeline.answer` is the only
one that lets it release something.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flwr_privacy.accounting import Charge
from flwr_privacy.errors import FlwrPrivacyError
from flwr_privacy.privacy.averaging import WeightedMean
from flwr_privacy.privacy.ledger import Question
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.message import Fields

if TYPE_CHECKING:
    from .participation_limits import ParticipationLimit
    from .step_store import StepStore

__all__ = [
    "EXPERIMENT",
    "ROUND",
    "Answer",
    "Facts",
    "Mechanism",
    "NoFactsError",
    "ProtocolStep",
    "Release",
    "ReleasePlan",
    "Unprotected",
    "Work",
]

ROUND, EXPERIMENT = "round", "experiment"
"""How long a reply is kept."""

Answer = tuple[Arrays, Fields]
"""The arrays and the scheme's own fields of a reply."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Public facts about a node's data, such as the number of records, known before they are read.

    Parameters
    ----------
    records : int, optional
        Number of records. The trainer leaves out what is beyond it; what is missing counts as zero.
    columns : tuple of int
        Columns of the features and of the labels, where a scheme is about matrices.
    """

    records: int | None = None
    columns: tuple[int, ...] = ()


Work = Callable[[SecureRandom, Facts], Any]
"""The user's code, which reads data: from the source of its samples to what it came to."""


class NoFactsError(FlwrPrivacyError):
    """The user's code ended before it gave its facts, which may depend on its data."""


@dataclass(frozen=True, kw_only=True)
class ReleasePlan:
    """A mechanism's decisions about one release, made before any data are read.

    Parameters
    ----------
    unit : {"record", "user"}
        What the release protects.
    charge : Charge, optional
        What it costs; None if it has no noise and promises nothing.
    epsilon, delta : float
        Budget of the experiment.
    noise_multiplier : float
        Standard deviation of the noise over the sensitivity.
    sigma : float, optional
        The same in the units of the weights, at least; None while a fact is missing for it.
    proven : bool, default True
        Whether the charge is all that the release costs.
    parties : int, default 0
        Honest clients whose noise the sum is to have; 0 if the release has all of its noise.
    needs_pins : bool, default True
        Whether a deployed node must know the others of the sum by their keys: without noise it
        does not matter who they are.
    largest_code : int, default 0
        Largest code that a secure sum has to take; 0 if it need not take any.
    noise_follows : bool, default False
        Whether the answer has no noise yet: a party that the node trusts adds it, once for all
        answers of the release's name, which share one charge and are not kept. Such an answer
        leaves the node sealed for that party, or where the operator allows answers without noise.
    limit : ParticipationLimit, optional
        How often a client may take part, and how far apart, where a trusted server or a committee
        adds noise that is correlated over the rounds; by default that does not matter.
    members : tuple of str
        The members of the committee whose noise is in the sum in place of the clients'; `parties`
        of them are honest. By default there is none.
    charges : callable, optional
        From the number of a participation, the first being 1, to its charge, where participations
        do not cost the same; `charge` is that of the first.
    """

    unit: str
    charge: Charge | None
    epsilon: float
    delta: float
    noise_multiplier: float
    sigma: float | None = None
    proven: bool = True
    parties: int = 0
    needs_pins: bool = True
    largest_code: int = 0
    noise_follows: bool = False
    limit: "ParticipationLimit | None" = None
    members: tuple[str, ...] = ()
    charges: Callable[[int], Charge] | None = None

    @property
    def once(self) -> bool:
        """Whether one attempt is allowed: two answers with a share of noise each hide nothing."""
        return self.parties > 0


class Mechanism(ABC):
    """One kind of release.

    Notes
    -----
    What a mechanism must promise:

    - `plan` reads no data. Everything that can be refused is refused there, and what it refuses
      depends on the request and on facts that are no secret.
    - `measure` is bounded: whatever arrays come, what it returns is within the sensitivity and the
      code range of the plan, or it raises. `failed` does not raise.
    - `noise` adds the noise of the plan to what was measured, and does not fail.
    """

    @abstractmethod
    def plan(self, start: Arrays, facts: Facts) -> ReleasePlan:
        """Decide or refuse everything about a release before any data are read.

        Parameters
        ----------
        start : Mapping of str to ndarray
            The arrays of the request.
        facts : Facts
            What the node says of its data.

        Raises
        ------
        InvalidParameterError, ProtocolError
            If the request is unfit: the noise does not fit the grid, or the arrays are no model.
        """

    @abstractmethod
    def measure(self, start: Arrays, outcome: Any) -> Any:
        """Return the values that get the noise, bounded as the plan says.

        Parameters
        ----------
        start : Mapping of str to ndarray
            The arrays of the request.
        outcome
            What the user's code came to.

        Raises
        ------
        DataError
            If a value is not finite.
        ProtocolError
            If the outcome is none of the right kind.
        """

    @abstractmethod
    def noise(self, measured: Any, plan: ReleasePlan, random: SecureRandom) -> Answer:
        """Return the answer: the measured values with the noise of the plan."""

    @abstractmethod
    def accumulator(self, start: Arrays) -> WeightedMean:
        """Return an empty accumulator for the answers of several clients."""

    def failed(self, start: Arrays) -> Any | None:
        """Return the values that stand for a failed run of the user's code; None if there are none.

        Where all data of a client are protected this is the update of a training that changed
        nothing, one of those that the charge covers. Where a single record is protected, it would
        move the answer by more than the charge covers.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class Release:
    """A release as a client half declares it; `flwr_privacy.pipeline.answer.answer` carries it out.

    Parameters
    ----------
    mechanism : Mechanism
        What was asked for.
    work : callable
        The user's code.
    facts : callable, optional
        Returns what the node says of its data, for a mechanism whose plan needs it. What it raises
        does not depend on values of the data, but for `NoFactsError`.
    name : Question, optional
        Under which name it is charged; by default that of the request.
    keeps : {"round", "experiment"}
        Whether the reply is kept for its round, and other requests of the round are other
        releases; or whether there is one for the whole experiment.
    asked : Mapping, optional
        What of the scheme's own values makes the request what it is, where a resumed round brings
        others of them (sealed anew, say) and asks for the same; by default all.
    single : bool, default False
        Whether a reply that was lost is not given again, and no other request of that name is
        answered; so it is where a reply is kept for the experiment.
    rehearsal : callable, optional
        Tries the user's code without data, before the first charge of an experiment. It raises what
        that code raised, unless the code may have reached data.
    """

    mechanism: Mechanism
    work: Work
    facts: Callable[[], Facts] | None = None
    name: Question | None = None
    keeps: str = ROUND
    asked: Mapping[str, Any] | None = None
    single: bool = False
    rehearsal: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        if self.keeps == EXPERIMENT:
            object.__setattr__(self, "single", True)


@dataclass(frozen=True)
class Unprotected:
    """A release that guarantees nothing: it is not charged, and the node opens no file for it.

    Parameters
    ----------
    work : callable
        Trains and returns the answer. It gets a function from a purpose, such as "noise", to a
        source of random numbers.
    sigma : float, default 0.0
        Standard deviation of the noise that is in it all the same, in the units of the weights.
    """

    work: Callable[[Callable[[str], SecureRandom]], Answer]
    sigma: float = 0.0


@dataclass(frozen=True)
class ProtocolStep:
    """An answer in a protocol of several messages, without a differential privacy guarantee.

    It follows from the request and from what the client remembers of the experiment, which
    `flwr_privacy.pipeline.answer` lends it.

    Parameters
    ----------
    work : callable
        Takes the step and returns the answer. It gets what the node lends to it.
    summed : callable, optional
        Returns, from what the client remembers, over how many clients at least the answer is summed
        before anybody sees it: 0 if it is seen as it is, None if it tells nothing of values of the
        data. By default that of the secure sum that the request is in.
    simulated_only : bool, default False
        Whether only clients that are made up answer: there is nothing in it that hides their data.
    of_data : bool, default True
        Whether it has to do with data of the node. Noise that a node adds for others has not, and
        limits on what the node says of its data do not hold for it.
    """

    work: "Callable[[StepStore], Answer]"
    summed: Callable[[Mapping[str, Any]], int | None] | None = None
    simulated_only: bool = False
    of_data: bool = True
