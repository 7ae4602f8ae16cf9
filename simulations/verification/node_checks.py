"""Checks a card against the nodes: the heads that they signed, and their ledgers.

A head commits to every charge of the experiment in a client's ledger, in order. So a card that
lacks one of them, or has another one in its place, does not lead to the head. What the server asked
and the node never answered may or may not be in the ledger.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from flwr_privacy.accounting import Charge
from flwr_privacy.errors import InvalidParameterError, ProtocolError
from flwr_privacy.m2fdp.terms import SEALED_FOR
from flwr_privacy.pipeline.planned_release import UNPROVEN
from flwr_privacy.privacy.card import CardRelease, PrivacyCard
from flwr_privacy.privacy.ledger import Entry
from flwr_privacy.privacy.ledger.chain import Step, UndecidedError, begun, explained
from flwr_privacy.privacy.ledger.signed_head import SignedHead
from flwr_privacy.wire.pins import Pins

from .evidence import Entries
from .findings import Finding, failed, passed, some, unknown

__all__ = ["Confirmed", "check_heads", "check_ledgers"]

Named = tuple[str, int, int, Charge]
"""A charge with the phase, the round and the number of its request."""


@dataclass(kw_only=True)
class Confirmed:
    """The clients whose charges are confirmed, by how far.

    Parameters
    ----------
    whole : set of str
        By the node itself: its ledger, or a head that did not come through the server and is signed
        with the pinned key.
    signed : set of str
        By a head that the server passed on, signed with the pinned key.
    declared : set of str
        By a head that is signed with a key which only the card or the file itself names.
    """

    whole: set[str] = field(default_factory=set)
    signed: set[str] = field(default_factory=set)
    declared: set[str] = field(default_factory=set)


def check_heads(
    card: PrivacyCard, pins: Pins | None, heads: Sequence[SignedHead], confirmed: Confirmed
) -> list[Finding]:
    """Check the card's heads, and those that came from the nodes.

    Parameters
    ----------
    card : PrivacyCard
        The card.
    pins : Pins, optional
        The clients' public keys.
    heads : sequence of SignedHead
        Heads from the nodes. Those of other experiments are left out.
    confirmed : Confirmed
        Where the clients are noted whose heads fit.
    """
    steps = _steps(card)
    findings = []
    shown = [(head.signed, head.unlike) for head in card.heads]
    own = [head for head in heads if head.experiment == card.experiment_id]
    fresh = [(head, "") for head in own if head.client not in _aggregators(card)]
    if card.heads:
        found = _Heads(steps, pins)
        found.check(shown)
        confirmed.signed |= found.pinned & found.complete
        confirmed.declared |= found.declared & found.complete
        findings.append(found.finding("card's heads"))
    else:
        findings.append(unknown("card's heads", "the card has none"))
    if fresh:
        found = _Heads(steps, pins)
        found.check(fresh)
        confirmed.whole |= found.pinned & found.complete
        confirmed.declared |= found.declared & found.complete
        findings.append(found.finding("nodes' heads"))
    elif heads and not own:
        findings.append(unknown("nodes' heads", "none of them is of this experiment"))
    return findings


def check_ledgers(check: str, card: PrivacyCard, ledgers: Entries) -> tuple[Finding, set[str]]:
    """Compare the card with ledgers; return the clients whose charges agree beside the finding.

    Every charge that a ledger has of the experiment must be on the card, and every charge of the
    card that was answered must be in the ledger.
    """
    ledgers = {c: own for c, own in ledgers.items() if c not in _aggregators(card)}
    stated = {client: Counter[Named]() for client in ledgers}
    sure = {client: Counter[Named]() for client in ledgers}
    for release in card.releases:
        for client in set(release.clients).intersection(ledgers):
            stated[client][_named(release)] += 1
            sure[client][_named(release)] += _is_answered(release, client)
    alike: set[str] = set()
    for client, entries in sorted(ledgers.items()):
        own = [entry for entry in entries if entry.question.experiment_id == card.experiment_id]
        held = Counter(map(_of_entry, own))
        others = sum(entry.scheme.removesuffix(UNPROVEN) != card.guarantee.scheme for entry in own)
        records = sum(entry.unit == "record" for entry in own)
        for count, text in (
            ((held - stated[client]).total(), "charges that the card lacks"),
            (others, "charges of another scheme than the card"),
            (
                0 if "record" in card.guarantee.protects else records,
                "charges that protect a record alone, and the card promises more",
            ),
        ):
            if count:
                hint = "" if stated[client] else " (CLIENT=FILE if it is another client's)"
                text = f"the ledger of {some([client])} has {count} {text}{hint}"
                return failed(check, text), set()
        if missing := (sure[client] - held).total():
            text = f"the ledger of {some([client])} lacks {missing} charges that were answered"
            return failed(check, text), set()
        if stated[client]:
            alike.add(client)
    if not alike:
        return unknown(check, "no ledger is of a client on the card"), alike
    return passed(check, f"those of {some(alike)} have the charges of the card"), alike


class _Heads:
    """Checks heads one after another, and keeps what was found of them."""

    def __init__(self, steps: dict[str, list[Step]], pins: Pins | None) -> None:
        self._steps = steps
        self._pins = pins
        self._wrong: list[str] = []
        self._open: list[str] = []
        self.pinned: set[str] = set()
        self.declared: set[str] = set()
        self.complete: set[str] = set()
        self._unsigned: set[str] = set()

    def check(self, heads: Iterable[tuple[SignedHead, str]]) -> None:
        """Check heads, each with the server's reason why it is not that of the card's charges."""
        for head, unlike in heads:
            self._check_signature(head)
            self._check_charges(head, unlike)

    def finding(self, check: str) -> Finding:
        """Return what was found."""
        if self._wrong:
            return failed(check, self._wrong[0])
        if self._open:
            return unknown(check, self._open[0])
        keys = [
            f"{kind}: {some(clients)}"
            for kind, clients in (
                ("signed with pinned keys", self.pinned),
                ("signed with keys that nobody pinned", self.declared),
                ("not signed", self._unsigned),
            )
            if clients
        ]
        return passed(check, f"the card's charges lead to them ({'; '.join(keys)})")

    def _check_signature(self, head: SignedHead) -> None:
        client = head.client
        if not head.signature:
            if self._pins is not None and client in self._pins:
                self._wrong.append(f"the head of {some([client])} is not signed, its key is pinned")
            self._unsigned.add(client)
            return
        try:
            head.verify()
        except (ProtocolError, InvalidParameterError):
            self._wrong.append(f"the signature of the head of {some([client])} does not fit")
            return
        if self._pins is None or client not in self._pins:
            self.declared.add(client)
        elif self._pins.clients[client] == head.key:
            self.pinned.add(client)
        else:
            self._wrong.append(f"the head of {some([client])} is signed with another key than its")

    def _check_charges(self, head: SignedHead, unlike: str) -> None:
        client = head.client
        steps = self._steps.get(client, [])
        if head.head.count > len(steps):
            self._wrong.append(
                f"the ledger of {some([client])} has {head.head.count} charges of this experiment, "
                f"the card has {len(steps)}"
            )
            return
        if unlike:
            self._open.append(f"the server says of the head of {some([client])}: {unlike[:200]}")
            return
        try:
            covered = _covered(head, steps)
        except UndecidedError as error:
            self._open.append(f"the head of {some([client])} cannot be recomputed: {error}")
            return
        if covered is None:
            self._wrong.append(
                f"the card's charges of {some([client])} do not lead to the head of its ledger"
            )
        elif covered < len(steps):
            self._open.append(
                f"the head of {some([client])} is of an earlier time: it covers {covered} of its "
                f"{len(steps)} charges on the card"
            )
        else:
            self.complete.add(client)


def _covered(head: SignedHead, steps: Sequence[Step]) -> int | None:
    """Return how many of the card's charges a head covers; None if they do not lead to it."""
    start = begun(head.experiment)
    for length in range(len(steps), head.head.count, -1):
        if explained(start, steps[:length], head.head) is not None:
            return length
    # None is left out: there is one choice, and no search.
    reached = start
    for step in steps[: head.head.count]:
        reached = step.after(reached)
    return head.head.count if reached == head.head else None


def _aggregators(card: PrivacyCard) -> set[str]:
    """Return the aggregators of a tree that are charged for what their devices sealed for them.

    The card charges the devices. It cannot make up an aggregator to leave out a device: the phase
    that names it is in the head of each of its devices.
    """
    return {
        release.phase.removeprefix(SEALED_FOR)
        for release in card.releases
        if release.phase.startswith(SEALED_FOR)
    } - card.charges().keys()


def _steps(card: PrivacyCard) -> dict[str, list[Step]]:
    steps: dict[str, list[Step]] = {}
    for release in card.releases:
        phase, server_round, request, charge = _named(release)
        for client in release.clients:
            step = Step(
                phase=phase,
                server_round=server_round,
                request=request,
                charge=charge,
                sure=_is_answered(release, client),
            )
            steps.setdefault(client, []).append(step)
    return steps


def _named(release: CardRelease) -> Named:
    return release.phase, release.server_round, release.request, release.charge


def _of_entry(entry: Entry) -> Named:
    question = entry.question
    return question.phase, question.server_round, question.request, entry.charge


def _is_answered(release: CardRelease, client: str) -> bool:
    return release.unanswered is not None and client not in release.unanswered
