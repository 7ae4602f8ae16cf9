"""Secure sums on the server: who deals, who sends, what is opened.

A sum takes two exchanges. In the first the clients send masked vectors; in the second they reveal
what takes the masks off the sum, and those of the next sum deal its secrets. The first round takes
two more, for keys and shares.

The next sum is that of the next round, or a later step of the same round, over the same clients.
"""

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from flwr_privacy.averaging import ReplyRefusedError, WeightedMean
from flwr_privacy.channel import check_usable
from flwr_privacy.errors import InvalidParameterError, ProtocolError
from flwr_privacy.fields import read, write
from flwr_privacy.secure_sum import Bounds, MaskedSum, NotOpenedError, SecureSum, Session
from flwr_privacy.secure_sum.graph import rosters
from flwr_privacy.secure_sum.messages import (
    DEAL,
    JOIN,
    KEYS,
    OPEN,
    OWN,
    SHARES,
    Opening,
    Revealed,
)
from flwr_privacy.secure_sum.participant import Dealt, words
from flwr_privacy.wire import question_digest

from .conversation import Assigned, Conversation, only
from .round import ClientReply, PartialSum

__all__ = ["SecureRounds", "opened_mean"]

logger = logging.getLogger("flwr.privacy")

_MOST_TRIES = 3  # to get a client's key
_KEY_BYTES = 32
_LENGTHS = {_KEY_BYTES, 0, 64}  # of a key, and of a signature if there is one

Draw = Callable[[int], Assigned]
"""Draws the clients of a round."""

BoundsOf = Callable[[list[str], int], Bounds]
"""Gives the bounds of vectors in a round: of the clients drawn; at a later step, of those left."""


class SecureRounds:
    """The secure sums of one training.

    Parameters
    ----------
    settings : SecureSum
        The user's parameters.
    conversation : Conversation
        How the clients are talked to.
    experiment_id : str
        Identity of the experiment.
    seed : int or str
        Root seed of the experiment, for the graphs.
    bounds_of : callable
        Bounds of the vectors.
    """

    def __init__(
        self,
        settings: SecureSum,
        conversation: Conversation,
        *,
        experiment_id: str,
        seed: int | str,
        bounds_of: BoundsOf,
    ) -> None:
        self._settings = settings
        self._conversation = conversation
        self._experiment_id = experiment_id
        self._seed = seed
        self._bounds_of = bounds_of
        self._keys: dict[str, tuple[bytes, bytes]] = {}
        self._tries: Counter[str] = Counter()
        self._now: tuple[Session, Assigned] | None = None
        self._next: tuple[Session, Assigned] | None = None
        self._promised: dict[str, int] | None = None  # of the weakest of the sums so far
        self._summed = 0

    def prepare(self, grid: Grid, server_round: int, draw: Draw) -> None:
        """See to it that the clients of a round have dealt its secrets.

        Raises
        ------
        NotOpenedError
            If too few did.
        InvalidParameterError
            If threshold, colluders, modulus or neighbours do not fit the cohort.
        """
        self._summed = 0
        self._learn_keys(grid, server_round)
        self._now, self._next = self._next, None
        if self._now is not None and self._now[0].server_round == server_round:
            try:
                self._now[0].check_dealers()
                return
            except NotOpenedError as error:
                logger.warning("%s; asked again", error)
        self._now = self._new_session(server_round, draw)
        session, assigned = self._now
        self._exchange(grid, server_round, opening=None, dealing=(session, assigned))
        session.check_dealers()

    def quorum(self, quorum: int | None) -> int | None:
        """Return after how many vectors a round may go on, so that its sum can be opened.

        At a later step these are all.

        Raises
        ------
        InvalidParameterError
            If the user's is below the threshold in the first round; where it gets below as clients
            join, it is raised.
        """
        least = self._current()[0].least
        if quorum is None or quorum >= least:
            return quorum
        if self._promised is None:
            raise InvalidParameterError(
                "quorum", quorum, f"at least the threshold of the secure sum, {least}"
            )
        return least

    @property
    def cohort(self) -> int:
        """Return of how many clients the sum may be; at the first step not all may have dealt."""
        return self._current()[0].bounds.cohort

    @property
    def assigned(self) -> Assigned:
        """Who is asked for a vector: those who dealt."""
        session, assigned = self._current()
        return only(assigned, set(session.dealers))

    def question(self) -> tuple[RecordDict, dict[str, RecordDict]]:
        """Return what the question for vectors says to all, and to each client alone."""
        session, _ = self._current()
        if session.step == 0:  # a later sum is over all that are in the first one
            self._note(session)
        # All that a client's digest of its question covers: the server hashes what all are told.
        common = {"session": session.name, "threshold": session.threshold, **write(session.bounds)}
        own = {}
        complete = _is_complete(session)
        for client in session.dealers:
            joined = write(session.joined(client))
            if complete:
                common.update({key: joined.pop(key) for key in ("dealers", "mask-keys")})
            own[client] = RecordDict({JOIN: ConfigRecord(joined)})
        return RecordDict({JOIN: ConfigRecord(common)}), own

    def accumulator(self, size: int) -> MaskedSum:
        """Return an empty sum of masked vectors of some size."""
        return MaskedSum(size, self._current()[0].bounds.modulus_bits)

    def open(
        self,
        grid: Grid,
        masked: MaskedSum,
        draw: Draw | None,
        *,
        asked: RecordDict,
        again: bool = False,
    ) -> tuple[NDArray[np.int64], list[str], Bounds]:
        """Open a sum; have the clients of the next one deal in the same exchange.

        Parameters
        ----------
        grid : Grid
            Flower's grid.
        masked : MaskedSum
            Sum of the masked vectors.
        draw : callable, optional
            Draws the clients of the next round; None after the last one.
        asked : RecordDict
            What the clients were asked.
        again : bool, default False
            Whether the next sum is a later step of this round, over the clients in this sum; `draw`
            is for the last step then. `go_on` makes it the current one.

        Returns
        -------
        sums : (d,) int64
            The sum of the vectors.
        survivors : list of str
            Whose vectors are in it.
        bounds : Bounds
            What they should have kept to.

        Raises
        ------
        NotOpenedError
            If it cannot be opened: too few clients are left; or if the parameters do not fit those
            of the next step. Nothing is opened then.
        """
        session, assigned = self._current()
        survivors = sorted(masked.clients)
        session.check_survivors(survivors)
        answering = {client for client in survivors if session.can_answer(client, survivors)}
        digest = question_digest(asked, without=OWN)
        self._next = None
        if again:
            self._next = self._next_step(session, assigned, survivors, digest)
        elif draw is not None:
            try:
                self._next = self._new_session(session.server_round + 1, draw)
            except NotOpenedError as error:  # the next round will try again
                logger.warning("%s", error)
        self._exchange(
            grid,
            session.server_round,
            opening=(session, only(assigned, answering), survivors),
            dealing=self._next,
        )
        values = session.open(masked.total, survivors, digest)
        self._summed = len(survivors)
        return values, survivors, session.bounds

    def go_on(self) -> None:
        """Make the step that was dealt for when the last sum was opened the current one.

        Raises
        ------
        NotOpenedError
            If anybody who is in the last sum has not dealt. The round is over then: a sum over
            fewer clients would give a vector away.
        """
        following, self._next = self._next, None
        if following is None or following[0].step == 0:
            raise ProtocolError("the last sum was not opened with again=True")
        following[0].check_dealers()
        self._now = following

    def metrics(self) -> dict[str, float]:
        """Return the numbers of a round, for the history."""
        if self._now is None:
            return {"sum_opened": 0}
        session, _ = self._now
        return {
            "sum_cohort": len(session.rosters),
            "sum_dealers": len(session.dealers),
            "sum_threshold": session.threshold,
            "sum_opened": self._summed,
            "sum_modulus_bits": session.bounds.modulus_bits,
        }

    def promise(self) -> str:
        """Return in words what the server does not see."""
        if self._promised is None:
            return "nothing was summed yet"
        least = self._promised
        lying = f"opens sums over {least['lying']} honest clients at least"
        if least["lying"] < 2:
            lying = "is not covered (a larger threshold helps)"
        return (
            f"an honest-but-curious server sees sums over at least {least['threshold']} of "
            f"{least['cohort']} clients and no single vector, if no more than "
            f"{least['colluders']} clients collude with it; a server that lies about who takes "
            f"part {lying}, and one that lies about keys can only be found out by nodes that pin "
            "them"
        )

    def state(self) -> dict[str, int]:
        """Return what was promised so far, for a checkpoint."""
        return dict(self._promised or {})

    def load_state(self, state: dict[str, int]) -> None:
        """Take up what `state` returned."""
        self._promised = dict(state) or None

    def _note(self, session: Session) -> None:
        """Keep the least that any sum promises: cohorts shrink and grow."""
        cohort = session.bounds.cohort
        lying = self._settings.honest_in_sums(cohort, lying=True)
        promised = {
            "threshold": session.threshold,
            "cohort": cohort,
            "colluders": self._settings.colluders_of(cohort),
            "lying": lying if _is_complete(session) else 1,
        }
        earlier = self._promised or promised
        self._promised = {key: min(value, earlier[key]) for key, value in promised.items()}

    def _current(self) -> tuple[Session, Assigned]:
        if self._now is None:
            raise ProtocolError(
                "secure_sum: works only where this strategy's own start runs the rounds"
            )
        return self._now

    def _learn_keys(self, grid: Grid, server_round: int) -> None:
        everybody = self._conversation.sample(grid, server_round, KEYS, fraction=1.0, minimum=0)
        unknown = {
            client
            for clients in everybody.values()
            for client in clients
            if client not in self._keys and self._tries[client] < _MOST_TRIES
        }
        if not unknown:
            return
        self._tries.update(unknown)
        messages = self._conversation.ask(
            server_round, KEYS, RecordDict(), only(everybody, unknown)
        )
        replies = self._conversation.exchange(grid, messages, phase=KEYS)
        book = self._conversation.book(KEYS)
        for reply in book.replies(replies):
            try:
                self._take_key(reply)
            except (ReplyRefusedError, ProtocolError) as error:
                book.withdraw(reply, _refusal(error))

    def _take_key(self, reply: ClientReply | PartialSum) -> None:
        record = _record(reply, DEAL)
        key, signature = record.get("key"), record.get("signature", b"")
        lengths = {len(octets) if type(octets) is bytes else -1 for octets in (key, signature)}
        if type(key) is not bytes or len(key) != _KEY_BYTES or not lengths <= _LENGTHS:
            raise ReplyRefusedError("malformed", "no public key, or a signature of another length")
        check_usable(key)
        self._keys[reply.clients[0]] = key, signature

    def _new_session(self, server_round: int, draw: Draw) -> tuple[Session, Assigned]:
        drawn = draw(server_round)
        assigned = only(drawn, set(self._keys))
        asked, cohort = _clients(drawn), _clients(assigned)
        try:
            bounds = self._bounds_of(asked, server_round)
            threshold = self._settings.threshold_of(len(asked))
        except InvalidParameterError as error:
            if self._promised is None:
                raise
            # Clients have left since the parameters were found to fit.
            raise NotOpenedError(f"there is no sum of round {server_round}: {error}") from error
        if self._promised is None:  # what does not fit all that were drawn ends the run
            rosters(asked, self._settings, seed=self._seed, server_round=server_round)
        if len(cohort) < threshold:
            raise NotOpenedError(
                f"there is no sum of round {server_round}: {len(cohort)} of at least {threshold} "
                f"clients have a key, {threshold - len(cohort)} are missing"
            )
        try:
            graph = rosters(
                cohort,
                self._settings,
                seed=self._seed,
                server_round=server_round,
                drawn=len(asked),
            )
        except InvalidParameterError as error:
            raise NotOpenedError(f"there is no sum of round {server_round}: {error}") from error
        session = Session(
            name=secrets.token_hex(16),
            experiment_id=self._experiment_id,
            server_round=server_round,
            rosters=graph,
            keys=self._keys,
            threshold=threshold,
            bounds=bounds,
        )
        return session, assigned

    def _next_step(
        self, session: Session, assigned: Assigned, survivors: list[str], asked: bytes
    ) -> tuple[Session, Assigned]:
        try:
            bounds = self._bounds_of(survivors, session.server_round)
        except InvalidParameterError as error:
            following = words(session.server_round, session.step + 1)
            raise NotOpenedError(f"there is no sum of {following}: {error}") from error
        next_session = session.go_on(secrets.token_hex(16), survivors, bounds, asked)
        return next_session, only(assigned, set(survivors))

    def _exchange(
        self,
        grid: Grid,
        server_round: int,
        *,
        opening: tuple[Session, Assigned, list[str]] | None,
        dealing: tuple[Session, Assigned] | None,
    ) -> None:
        """Have clients reveal shares of one session, and clients deal those of another."""
        own: dict[str, RecordDict] = {}
        asked: dict[int, list[str]] = {}
        if opening is not None:
            session, assigned, survivors = opening
            _add(asked, assigned)
            for client in _clients(assigned):
                around = session.survivors_around(client, survivors)
                question = Opening(session=session.name, survivors=around)
                own[client] = RecordDict({OPEN: ConfigRecord(write(question))})
        if dealing is not None:
            session, assigned = dealing
            _add(asked, assigned)
            for client in _clients(assigned):
                record = ConfigRecord(write(session.invitation(client)))
                own[client] = RecordDict({**own.get(client, {}), DEAL: record})
        messages = self._conversation.ask(server_round, SHARES, RecordDict(), asked, own=own)
        book = self._conversation.book(SHARES)
        for reply in book.replies(self._conversation.exchange(grid, messages, phase=SHARES)):
            try:
                self._take_shares(reply, opening, dealing, own)
            except (ReplyRefusedError, ProtocolError) as error:
                book.withdraw(reply, _refusal(error))

    def _take_shares(
        self,
        reply: ClientReply | PartialSum,
        opening: tuple[Session, Assigned, list[str]] | None,
        dealing: tuple[Session, Assigned] | None,
        own: Mapping[str, RecordDict],
    ) -> None:
        client = reply.clients[0]
        if opening is not None and OPEN in own[client]:
            session, _, survivors = opening
            revealed = read(Revealed, _record(reply, OPEN))
            session.take_revealed(client, survivors, revealed.keys, revealed.seeds)
        if dealing is not None and DEAL in own[client]:
            record = _record(reply, DEAL)
            if "refused" in record:
                raise ReplyRefusedError("error", f"client {client}: {record['refused']}")
            dealing[0].take_dealt(client, read(Dealt, record))


def opened_mean(
    mean: WeightedMean, values: NDArray[np.int64], survivors: list[str], bounds: Bounds
) -> WeightedMean:
    """Return an accumulator with the sum that was opened.

    Parameters
    ----------
    mean : WeightedMean
        The scheme's empty accumulator.
    values : (d,) int64
        Sum of the vectors: the arrays of the template in the order of their names, the weight.
    survivors : list of str
        Whose vectors are in it.
    bounds : Bounds
        What each of them should have kept to.

    Raises
    ------
    NotOpenedError
        If no vectors within the bounds have such a sum: somebody sent a wrong one.
    """
    weight = int(values[-1])
    largest = int(max(values[:-1].max(initial=0), -values[:-1].min(initial=0)))
    heaviest = min(bounds.weight_limit, len(survivors) * bounds.largest_weight)
    if not 0 <= weight <= heaviest or largest > weight * bounds.code_limit:
        raise NotOpenedError("the sum is of no vectors that are allowed: somebody sent a wrong one")
    arrays, place = {}, 0
    for name in sorted(mean.template):
        shape, _ = mean.template[name]
        size = int(np.prod(shape, dtype=np.int64))
        arrays[name] = values[place : place + size].reshape(shape)
        place += size
    return mean.from_state(arrays, {"weight": float(weight), "clients": survivors})


def _is_complete(session: Session) -> bool:
    return all(len(roster) == len(session.rosters) for roster in session.rosters.values())


def _clients(assigned: Assigned) -> list[str]:
    return [client for clients in assigned.values() for client in clients]


def _add(asked: dict[int, list[str]], assigned: Assigned) -> None:
    for node, clients in assigned.items():
        known = asked.setdefault(node, [])
        known += [client for client in clients if client not in known]


def _refusal(error: ReplyRefusedError | ProtocolError) -> ReplyRefusedError:
    if isinstance(error, ReplyRefusedError):
        return error
    return ReplyRefusedError("malformed", str(error))


def _record(reply: ClientReply | PartialSum, name: str) -> Mapping[str, Any]:
    record = reply.content.get(name) if isinstance(reply, ClientReply) else None
    if not isinstance(record, ConfigRecord):
        raise ReplyRefusedError("malformed", f"no record '{name}'")
    return record
