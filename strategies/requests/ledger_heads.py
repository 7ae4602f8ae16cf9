"""Follows the nodes' ledgers: the last head that each client showed, and what may come after it.

The server computes every client's chain of charges from its own questions. A head that does not
follow from the last one is of another ledger: one that was set back, cut, edited or copied. What a
head proves, and what nobody can detect, docs/privacy.md says.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from flwr_privacy.accounting import Charge
from flwr_privacy.errors import InvalidParameterError, ProtocolError, check_choice
from flwr_privacy.privacy.averaging import ReplyRefusedError
from flwr_privacy.privacy.card import CardHead, PrivacyCard
from flwr_privacy.privacy.ledger.chain import Head, Step, UndecidedError, begun, explained
from flwr_privacy.privacy.ledger.shown import is_shown, signed_in
from flwr_privacy.strategies.state.experiment import Experiment

if TYPE_CHECKING:  # it loads cryptography
    from flwr_privacy.privacy.ledger.signed_head import SignedHead

__all__ = ["LEDGER", "ChargeName", "LedgerHeads"]

logger = logging.getLogger("flwr.privacy")

LEDGER = "ledger"
"""Under what a reply or a hello is counted whose ledger is not the one that was seen before."""

_MOST_KEPT = 100  # questions to a client that declines all of them
_TOO_MANY = "so many of its replies were lost that its charges are known by their number alone"
_UNKNOWN = "it has charges of this experiment that this server does not know of"
_TWICE = "it charged a question again, or one that it said it had not answered"
_ORDER = "it was charged in another order than the card has"
_NONE = "it answered without showing its ledger"
_WHAT_TO_DO = " (docs/deployment.md, A node that comes back with another ledger)"
_MOST_TOLD = 10  # clients that the log names, where nobody is refused


class ChargeName(NamedTuple):
    """The name under which a client's ledger has a charge."""

    phase: str
    server_round: int
    request: int


class _Asked(NamedTuple):
    """A question to one client, which its ledger may have charged."""

    step: Step
    on_card: bool  # or will be; not what was asked twice, and what the client declined

    @property
    def name(self) -> ChargeName:
        return ChargeName(self.step.phase, self.step.server_round, self.step.request)


@dataclass(eq=False)
class _Chain:
    """What is known of one client's ledger."""

    head: Head
    seen: bool = False  # whether the client has shown a head
    charged: bool = False  # whether it was ever asked for what its ledger is charged
    asked: list[_Asked] = field(default_factory=list)  # since that head
    unplaced: list[ChargeName] = field(default_factory=list)  # of charges that the card will have
    signed: "SignedHead | None" = None
    unlike: str = ""  # why the card's charges do not lead to the head
    last_on_card: CardHead | None = None

    def follow(self, taken: tuple[int, ...], head: Head) -> None:
        """Go on from a head to which some of the questions lead."""
        self.head, self.seen = head, True
        if not all(self.asked[place].on_card for place in taken):
            self.unlike = self.unlike or _TWICE
        if taken:
            del self.asked[: taken[-1] + 1]

    def on_card(self) -> CardHead | None:
        """Return the last head that was shown, as the card has it; None if it has none."""
        if self.signed is None or not self.signed.head.count or not self.charged:
            return None
        last = self.last_on_card
        if last is None or last.signed is not self.signed or last.unlike != self.unlike:
            self.last_on_card = CardHead(signed=self.signed, unlike=self.unlike)
        return self.last_on_card

    def adopt(self, head: Head, why: str) -> None:
        """Go on from a head to which the questions do not lead."""
        self.head, self.seen, self.unlike = head, True, why
        self.asked.clear()


class LedgerHeads:
    """The heads of the clients' ledgers, for one experiment.

    Parameters
    ----------
    experiment : Experiment
        Whose charges the chains are.
    key_of : callable
        Returns the public key that belongs to a client; "" if none is known.

    Attributes
    ----------
    losses : dict
        Clients whose ledger was accepted although charges are missing in it, and what is missing;
        since the last `taken_losses`.

    Notes
    -----
    A head is held against a client only where its key is known: then it is refused. Without a key,
    as in a simulation, whoever runs the client may write what it likes; the card says that the
    head does not follow, and the run goes on.
    """

    def __init__(self, experiment: Experiment, key_of: Callable[[str], str]) -> None:
        self._experiment = experiment
        self._key_of = key_of
        self._chains: dict[str, _Chain] = {}
        self._followed = True
        self._again: set[tuple[str, ChargeName]] = set()  # asked by a run that broke off
        self._accepted: frozenset[str] = frozenset()
        self._server_lost = False
        self._told = 0
        self.losses: dict[str, str] = {}

    def leave_out(self) -> None:
        """Follow no ledgers: they do not have the charges of this training as the card has them."""
        self._followed = False

    # -- What is asked -----------------------------------------------------------------------

    def asked(self, costs: Mapping[str, tuple[ChargeName, Charge]]) -> None:
        """Note what is asked and what it costs each client; call it before it is sent."""
        steps: dict[tuple[ChargeName, Charge], Step] = {}  # one for all clients
        for client, (name, charge) in costs.items() if self._followed else ():
            if (name, charge) not in steps:
                steps[name, charge] = _step(name, charge)
            chain, again = self._chain(client), (client, name) in self._again
            chain.charged = True
            chain.asked.append(_Asked(steps[name, charge], on_card=not again))
            if not again:
                chain.unplaced.append(name)

    def charged(self, name: ChargeName, clients: Collection[str]) -> None:
        """Note that the card has the charges of a question."""
        for client in clients if self._followed else ():
            chain = self._chain(client)
            if name in chain.unplaced:
                if chain.unplaced[0] != name:
                    chain.unlike = chain.unlike or _ORDER
                chain.unplaced.remove(name)

    def not_charged(self, name: ChargeName, clients: Collection[str]) -> None:
        """Note that clients say that they did not answer a question, so that the card lacks it."""
        for client in clients if self._followed else ():
            chain = self._chain(client)
            if name in chain.unplaced:
                chain.unplaced.remove(name)
                # Its files may have failed after the charge.
                chain.asked = [
                    one._replace(on_card=one.on_card and one.name != name) for one in chain.asked
                ][-_MOST_KEPT:]

    # -- What is shown -----------------------------------------------------------------------

    def greet(self, client: str, fields: Mapping[str, Any]) -> None:
        """Compare the head in a client's hello with what was seen before.

        Raises
        ------
        ReplyRefusedError
            If the client's key is known, and the head is missing, is not signed with it or does not
            follow from the last one.
        """
        if not self._followed:
            return
        chain = self._chains.get(client)
        key = self._key_of(client)
        if is_shown(fields):
            self._take(client, self._chain(client), fields, key=key, greeting=True)
        elif key and chain is not None and chain.head.count:
            had = f"it had {_charges(chain.head.count)} of this experiment"
            why = f"its ledger is not shown: {had}"
            self._object(client, chain, begun(self._experiment.id), why, key=key, greeting=True)

    def take(
        self,
        client: str,
        fields: Mapping[str, Any],
        *,
        asked: ChargeName,
        address: str = "",
        late: bool = False,
        simulated: bool = False,
    ) -> None:
        """Compare the head in a client's reply with what it was asked.

        Parameters
        ----------
        client : str
            Whose reply it is.
        fields : Mapping
            The entries that show the head.
        asked : ChargeName
            The name of the charge that the reply is for, if it is for one.
        address : str, default ""
            Under what the client was asked, where it had not said who it is.
        late : bool, default False
            Whether it came after its exchange, so that newer heads may have come before it.
        simulated : bool, default False
            Whether a node answers for several clients, whose keys it would have all.

        Raises
        ------
        ReplyRefusedError
            As `greet`.
        """
        if not self._followed:
            return
        if address in self._chains:
            self._move(address, client)
        chain = self._chain(client)
        if is_shown(fields):
            key = "" if simulated else self._key_of(client)
            self._take(client, chain, fields, key=key, asked=asked, late=late)
        elif any(one.name == asked for one in chain.asked):
            if self._key_of(client):
                raise _refused(client, "it answers without showing the head of its ledger")
            chain.unlike = chain.unlike or _NONE

    def _take(
        self,
        client: str,
        chain: _Chain,
        fields: Mapping[str, Any],
        *,
        key: str,
        asked: ChargeName | None = None,
        greeting: bool = False,
        late: bool = False,
    ) -> None:
        try:
            signed = signed_in(fields, experiment=self._experiment.id, client=client, key=key)
        except (InvalidParameterError, ProtocolError) as error:
            raise _refused(client, str(error)) from error
        head = signed.head
        if late and head.count <= chain.head.count:
            return
        # It was charged, unless that may have been before: of a ledger that is not known from its
        # beginning, the question may be one of those that are not known.
        sure = asked if not chain.unlike else None
        steps = [
            replace(one.step, sure=True) if one.on_card and one.name == sure else one.step
            for one in chain.asked
        ]
        try:
            taken = explained(chain.head, steps, head)
        except UndecidedError:
            self._adopt(client, chain, head, _TOO_MANY)
        else:
            if taken is not None:
                chain.follow(taken, head)
            elif head.count > chain.head.count and not chain.charged and chain.seen:
                # An aggregator's: the card charges its devices.
                chain.adopt(head, "the card has none of its charges")
            elif head.count > chain.head.count and (self._server_lost or not chain.seen):
                # It is ahead of a server that has begun anew, or gone back to an old checkpoint.
                self._adopt(client, chain, head, _UNKNOWN)
            else:
                why = _other_branch(chain.head.count, head.count)
                self._object(client, chain, head, why, key=key, greeting=greeting)
        chain.signed = signed

    def _object(
        self,
        client: str,
        chain: _Chain,
        head: Head,
        why: str,
        *,
        key: str,
        greeting: bool,
    ) -> None:
        """Refuse a client whose ledger is another one, unless the operator or nobody minds."""
        if greeting and client in self._accepted:
            self.losses[client] = f"{why}; the operator of the server accepted it"
            self._adopt(client, chain, head, self.losses[client])
        elif key:
            raise _refused(client, why + (_WHAT_TO_DO if greeting else ""))
        else:
            self._adopt(client, chain, head, why)

    def _adopt(self, client: str, chain: _Chain, head: Head, why: str) -> None:
        if chain.unlike != why and self._told <= _MOST_TOLD:
            self._told += 1
            more = "" if self._told <= _MOST_TOLD else " (and more clients, which are not named)"
            logger.warning("client %s: %s%s", client, why, more)
        chain.adopt(head, why)

    # -- What is kept ------------------------------------------------------------------------

    def shown(self) -> list[CardHead]:
        """Return the last head of each client, as the card has it."""
        chains = (self._chains[client] for client in sorted(self._chains))
        return [head for chain in chains if (head := chain.on_card()) is not None]

    def taken_losses(self) -> dict[str, str]:
        """Return what was accepted since the last call."""
        losses, self.losses = self.losses, {}
        return losses

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps beside the card, by client.

        That is the questions after the heads, and the heads that the card does not have.
        """
        return {
            "asked": {
                client: [[*one.name, one.step.charge.to_dict(), one.on_card] for one in chain.asked]
                for client, chain in self._chains.items()
                if chain.asked
            },
            "others": {
                client: [chain.head.count, chain.head.value]
                for client, chain in self._chains.items()
                if chain.head.count and not chain.charged
            },
        }

    def load_state(
        self,
        state: Mapping[str, Any],
        card: PrivacyCard,
        *,
        broken_off: Iterable[Mapping[str, tuple[ChargeName, Charge]]],
        accept: Iterable[str],
        lost: bool,
    ) -> None:
        """Restore what `state` returned, and the heads of the card.

        Parameters
        ----------
        state : Mapping
            What the checkpoint has.
        card : PrivacyCard
            The card so far.
        broken_off : iterable of Mapping
            As of `take_up`.
        accept : iterable of str
            Clients whose ledger is accepted at their hello, whatever it shows.
        lost : bool
            Whether rounds were given up: the card is newer than `state` then, and nodes may have
            charges that this server does not know of.

        Raises
        ------
        InvalidParameterError
            If no head of a client to accept is known.
        """
        for shown in card.heads:
            signed = shown.signed
            chain = _Chain(signed.head, seen=True, signed=signed, unlike=shown.unlike)
            self._chains[signed.client] = chain
        for client in {client for release in card.releases for client in release.clients}:
            self._chain(client).charged = True
        if lost:
            for client, steps in _since(card).items():
                own = [_Asked(replace(step, sure=False), on_card=True) for step in steps]
                self._chain(client).asked += own
        for client, (count, value) in state["others"].items():
            self._chains[client] = _Chain(Head(count=count, value=value), seen=True)
        for client, rows in () if lost else state["asked"].items():
            for *name, charge, on_card in rows:
                step = _step(ChargeName(*name), Charge.from_dict(charge))
                self._chain(client).asked.append(_Asked(step, on_card))
        self.take_up(broken_off)
        self._server_lost = lost
        for client in accept:
            check_choice("accept_ledgers", client, sorted(self._chains))
        self._accepted = frozenset(accept)

    def take_up(self, broken_off: Iterable[Mapping[str, tuple[ChargeName, Charge]]]) -> None:
        """Note what each client was asked by a run that broke off, with the costs."""
        for costs in broken_off:
            self.asked(costs)
            self._again |= {(client, name) for client, (name, _) in costs.items()}

    def _chain(self, client: str) -> _Chain:
        if client not in self._chains:
            self._chains[client] = _Chain(begun(self._experiment.id))
        return self._chains[client]

    def _move(self, address: str, client: str) -> None:
        """Give a client the questions that it was asked under its node's address."""
        before, chain = self._chains.pop(address), self._chain(client)
        chain.charged |= before.charged
        chain.asked += before.asked
        chain.unplaced += before.unplaced


def _step(name: ChargeName, charge: Charge) -> Step:
    phase, server_round, request = name
    return Step(phase=phase, server_round=server_round, request=request, charge=charge)


def _since(card: PrivacyCard) -> dict[str, list[Step]]:
    """Return the charges of a card that come after the heads of its clients."""
    steps: dict[str, list[Step]] = {}
    for release in card.releases:
        name = ChargeName(release.phase, release.server_round, release.request)
        sure, silent = (
            replace(_step(name, release.charge), sure=answered) for answered in (True, False)
        )
        for client in release.clients:
            is_silent = client in (release.unanswered or ())
            steps.setdefault(client, []).append(silent if is_silent else sure)
    for shown in card.heads:
        mine = steps.get(shown.signed.client, [])
        steps[shown.signed.client] = mine[_reached(card.experiment_id, mine, shown) :]
    return steps


def _reached(experiment_id: str, steps: Sequence[Step], shown: CardHead) -> int:
    """Return how many questions a head is after; all of them where nobody can tell."""
    if shown.unlike:
        return len(steps)
    head = shown.signed.head
    try:
        for length in range(head.count, len(steps) + 1):
            if explained(begun(experiment_id), steps[:length], head) is not None:
                return length
    except UndecidedError:
        pass
    return len(steps)


def _charges(count: int) -> str:
    return f"{count} charge" + ("" if count == 1 else "s")


def _other_branch(had: int, shows: int) -> str:
    if shows < had:
        return (
            f"its ledger was set back: it had {_charges(had)} of this experiment, it shows {shows}"
        )
    return (
        f"its ledger is another one: it had {_charges(had)} of this experiment, and the {shows} "
        "that it shows do not follow from them and what this server asked"
    )


def _refused(client: str, why: str) -> ReplyRefusedError:
    return ReplyRefusedError(LEDGER, f"client '{client}': {why}")
