"""The privacy card of a run: its guarantee and all charges, from which epsilon is recomputed.

It also says which charges were never answered, as far as the server knows it.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from flwr_privacy.accounting import ACCOUNTANTS, Charge, spent, supports
from flwr_privacy.accounting.neighbours import relation_of
from flwr_privacy.errors import DataError, check_choice, check_number
from flwr_privacy.privacy.guarantee import Guarantee

from .attacker import AttackerBound, attacker_of
from .described import Described
from .heads import CardHead
from .histories import Histories
from .page import card_page

__all__ = ["Answers", "CardRelease", "PrivacyCard"]

_VERSION = 5
_INFINITY = "infinite"
_TIGHTEST = ("gdp", "pld", "rdp")  # first: a curve that bounds an attacker most closely
_TOLERANCE = 1e-6  # relative; what rounding and another version of a library may move


@dataclass(frozen=True, kw_only=True)
class CardRelease:
    """One release of one or more clients, in answer to one question.

    Parameters
    ----------
    phase : str
        Phase of the question.
    server_round, request : int
        Round, and number of the question in it.
    charge : Charge
        What it cost each of them.
    clients : tuple of str
        All that were asked and did not say that they released nothing: a reply that was lost or
        came too late has cost its client as much as any other.
    unanswered : tuple of str or None
        Those of them who were charged for this question and from whom no reply to it came, by the
        deadline or later. None where who was asked is a secret, and everybody is charged.
    """

    phase: str
    server_round: int
    request: int
    charge: Charge
    clients: tuple[str, ...]
    unanswered: tuple[str, ...] | None

    @cached_property
    def text(self) -> str:
        """The release as a line of JSON; made once, as a card is written after every round."""
        document = {
            "phase": self.phase,
            "round": self.server_round,
            "request": self.request,
            "charge": self.charge.to_dict(),
            "clients": list(self.clients),
            "unanswered": None if self.unanswered is None else list(self.unanswered),
        }
        return json.dumps(document, allow_nan=False)


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Counts how the charges of a run ended. A client that was charged ten times counts ten times.

    Parameters
    ----------
    charged : int
        All charges.
    unanswered : int
        Charges to whose question no reply came: it was lost, or its client crashed or failed.
    untold : int
        Charges of which the card does not say it, because who was asked is a secret.
    """

    charged: int
    unanswered: int
    untold: int

    def __str__(self) -> str:
        if self.untold == self.charged > 0:
            return f"{self.charged} charged; who was asked, and who answered, is a secret"
        answered = self.charged - self.unanswered - self.untold
        text = f"{self.charged} charged, {answered} answered, {self.unanswered} never answered"
        return text + (f", {self.untold} secret" if self.untold else "")


@dataclass(kw_only=True)
class PrivacyCard:
    """The guarantee of a run, every charge, and the epsilon they add up to.

    Parameters
    ----------
    experiment_id : str
        Identity of the experiment.
    guarantee : Guarantee
        The guarantee.
    releases : list of CardRelease
        Every release so far.
    stated : dict
        Epsilon of the client that spent most, by accountant, as the run stated it.
    attacker : AttackerBound, optional
        What that means for an attacker; None without an epsilon.
    described : Described, optional
        What was trained, with which settings and versions.
    forecast : str, default ""
        Whether the model could be expected to learn through the noise (`Forecast`).
    heads : list of CardHead
        The last head that each client showed, at most one of a client. None of a client whose
        ledger has none to show, and none at all where it is secret who was asked.
    stated_answers : Answers, optional
        What became of the charges, as the file said it that the card was read from.
    histories : Histories, optional
        What has followed an earlier card of the same run, so that only what is new is counted.
    """

    experiment_id: str
    guarantee: Guarantee
    releases: list[CardRelease] = field(default_factory=list)
    stated: dict[str, float] = field(default_factory=dict)
    attacker: AttackerBound | None = None
    described: Described = field(default_factory=Described)
    forecast: str = ""
    heads: list[CardHead] = field(default_factory=list)
    stated_answers: Answers | None = field(default=None, compare=False)
    histories: Histories = field(default_factory=Histories, compare=False, repr=False)

    def answers(self) -> Answers:
        """Count all charges, the unanswered ones, and those whose answer is a secret."""
        known = [r.unanswered for r in self.releases if r.unanswered is not None]
        return Answers(
            charged=sum(len(r.clients) for r in self.releases),
            unanswered=sum(map(len, known)),
            untold=sum(len(r.clients) for r in self.releases if r.unanswered is None),
        )

    def charges(self) -> dict[str, list[Charge]]:
        """Return the charges of each client."""
        charges: dict[str, list[Charge]] = {}
        for release in self.releases:
            for client in release.clients:
                charges.setdefault(client, []).append(release.charge)
        return charges

    def relation(self) -> str | None:
        """Return the neighbours that all charges are for (`RELATIONS`); None without charges.

        Raises
        ------
        InvalidParameterError
            If they are for different ones: the largest of their costs would mean nothing.
        """
        return relation_of(release.charge for release in self.releases)

    def epsilon(self, accountant: str) -> float | None:
        """Return the epsilon of the client that spent most; None if the accountant has no bound.

        Parameters
        ----------
        accountant : {"gdp", "rdp", "pld"}
            How to compute it, at the guarantee's delta.
        """
        most = self._most(accountant)
        return None if most is None else most[0]

    def _most(self, accountant: str) -> tuple[float, list[Charge]] | None:
        """Return the epsilon and the charges of the client that spent most; None as `epsilon`."""
        delta, most = self.guarantee.delta, (0.0, list[Charge]())
        self.relation()  # or refuses
        for counts in self.followed().longest():
            charges = [_repeated(charge, count) for charge, count in counts.items()]
            if delta is None or not all(supports(charge, accountant) for charge in charges):
                return None
            total = spent(charges, delta=delta, accountant=accountant)
            most = max(most, (total, charges), key=lambda found: found[0])
        return most

    def followed(self) -> Histories:
        """Return the histories of charges of all clients."""
        self.histories.follow(self.releases)
        return self.histories

    def state(self, accountants: Iterable[str] = tuple(ACCOUNTANTS)) -> None:
        """Compute and store the epsilon of the charges, and what it means for an attacker."""
        found = {name: self._most(name) for name in accountants}
        most = {name: spender for name, spender in found.items() if spender is not None}
        self.stated = {name: total for name, (total, _) in most.items()}
        tightest = next((name for name in _TIGHTEST if name in most), None)
        self.attacker = None if tightest is None else attacker_of(most[tightest][1], tightest)

    def verify(self) -> dict[str, tuple[float, float]]:
        """Recompute the epsilon that the card states, and compare.

        Returns
        -------
        dict
            Stated and recomputed epsilon by accountant.

        Raises
        ------
        DataError
            If a number does not agree, the guarantee is exceeded, a client is charged twice for a
            question, or one is without an answer that was not charged. Who answered cannot be
            recomputed.
        """
        numbers: dict[str, tuple[float, float]] = {}
        for name, stated in self.stated.items():
            computed = self.epsilon(name)
            if computed is None or not _agree(computed, stated):
                raise DataError(
                    f"the card states epsilon {stated} ({name}), its charges give {computed}"
                )
            numbers[name] = (stated, computed)
        guarantee = self.guarantee
        if guarantee.spent is not None and not _agree(
            guarantee.spent, numbers.get(guarantee.accountant, (math.nan, math.nan))[1]
        ):
            raise DataError(
                f"the guarantee says that epsilon {guarantee.spent} ({guarantee.accountant}) was "
                f"spent, the charges give {numbers}"
            )
        if guarantee.epsilon is not None and self.releases:
            if not numbers:
                raise DataError("the card has releases and states no epsilon")
            least = min(computed for _, computed in numbers.values())
            if least > guarantee.epsilon * (1 + _TOLERANCE):
                raise DataError(
                    f"the charges give epsilon {least}, the guarantee says {guarantee.epsilon}"
                )
        self._verify_answers()
        return numbers

    def _verify_answers(self) -> None:
        counts = self.answers()
        if self.stated_answers not in (None, counts):
            raise DataError(f"the card states {self.stated_answers}, its releases have {counts}")
        questions: dict[tuple[str, int, int], set[str]] = {}
        for release in self.releases:
            question = release.phase, release.server_round, release.request
            before, clients = questions.setdefault(question, set()), set(release.clients)
            where = f"phase {release.phase!r} of round {release.server_round}"
            if len(clients) < len(release.clients) or before & clients:
                raise DataError(f"in {where} a client is charged twice for a question")
            before |= clients
            silent = release.unanswered or ()
            if len(set(silent)) < len(silent) or not clients.issuperset(silent):
                raise DataError(f"in {where} a client is without an answer that was not charged")

    def to_html(self) -> str:
        """Return the card as a self-contained HTML page."""
        return card_page(self)

    def to_json(self) -> str:
        """Return the card as JSON."""
        document = {
            "version": _VERSION,
            "experiment_id": self.experiment_id,
            "described": asdict(self.described),
            "forecast": self.forecast,
            "guarantee": _written(self.guarantee.to_dict()),
            "epsilon": {name: _written(total) for name, total in self.stated.items()},
            "attacker": None if self.attacker is None else _written(self.attacker.to_dict()),
            "answers": asdict(self.answers()),
        }
        begun = json.dumps(document, allow_nan=False).removesuffix("}")
        heads, releases = (
            ",\n".join(line.text for line in own) for own in (self.heads, self.releases)
        )
        return f'{begun}, "heads": [\n{heads}\n], "releases": [\n{releases}\n]}}\n'

    @classmethod
    def from_json(cls, text: str | bytes) -> "PrivacyCard":
        """Read a card.

        Raises
        ------
        DataError
            If the text is no card of this version.
        """
        try:
            document = json.loads(text)
            if document["version"] != _VERSION:
                raise DataError(f"a privacy card of version {document['version']!r}")
            experiment_id = _of(str, document["experiment_id"])
            card = cls(
                experiment_id=experiment_id,
                described=Described.read(document["described"]),
                forecast=_of(str, document["forecast"]),
                guarantee=Guarantee.from_dict(_read(document["guarantee"])),
                releases=[_release(entry) for entry in document["releases"]],
                stated={
                    check_choice("epsilon", name, ACCOUNTANTS): _epsilon(_read(value))
                    for name, value in document["epsilon"].items()
                },
                attacker=_attacker(document["attacker"]),
                stated_answers=Answers(
                    **{name: _of(int, count) for name, count in document["answers"].items()}
                ),
                heads=_heads(document["heads"], experiment_id),
            )
            card.relation()  # or refuses
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(f"no privacy card ({type(error).__name__}: {error})") from error
        return card


def _release(entry: Any) -> CardRelease:
    return CardRelease(
        phase=_of(str, entry["phase"]),
        server_round=_of(int, entry["round"]),
        request=_of(int, entry["request"]),
        charge=Charge.from_dict(entry["charge"]),
        clients=_names(entry["clients"]),
        unanswered=None if entry["unanswered"] is None else _names(entry["unanswered"]),
    )


def _heads(entries: Any, experiment_id: str) -> list[CardHead]:
    heads = [CardHead.from_dict(entry, experiment=experiment_id) for entry in _of(list, entries)]
    if len({head.signed.client for head in heads}) < len(heads):
        raise ValueError("a client has two heads")
    return heads


def _attacker(value: Any) -> AttackerBound | None:
    return None if value is None else AttackerBound.from_dict(_read(value))


def _names(values: Any) -> tuple[str, ...]:
    return tuple(_of(str, client) for client in _of(list, values))


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{repr(value)[:64]} is no {kind.__name__}")
    return value


def _epsilon(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ValueError(f"{repr(value)[:64]} is no epsilon")
    return value if value == math.inf else check_number("epsilon", value)


def _written(value: Any) -> Any:
    """Return plain values with infinity, which JSON lacks, as a string."""
    if isinstance(value, dict):
        return {key: _written(item) for key, item in value.items()}
    return _INFINITY if value == math.inf else value


def _read(value: Any) -> Any:
    """Undo `_written`."""
    if isinstance(value, dict):
        return {key: _read(item) for key, item in value.items()}
    return math.inf if value == _INFINITY else value


def _agree(one: float, other: float) -> bool:
    if math.isinf(one) or math.isinf(other):
        return one == other
    return abs(one - other) <= _TOLERANCE * max(1.0, abs(other))  # not so where one is NaN


def _repeated(charge: Charge, times: int) -> Charge:
    values: Mapping[str, Any] = {**charge.to_dict(), "count": charge.count * times}
    return Charge.from_dict(values)
