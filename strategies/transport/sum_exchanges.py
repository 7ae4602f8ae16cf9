"""Asks clients of a secure sum for keys, for shares of secrets, and to reveal shares."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from flwr.app import ConfigRecord, RecordDict
from flwr.serverapp import Grid

from flwr_privacy.errors import ProtocolError
from flwr_privacy.privacy.averaging import ReplyRefusedError
from flwr_privacy.secure_sum import Session
from flwr_privacy.secure_sum.messages import (
    DEAL,
    KEYS,
    OPEN,
    SHARES,
    SIGNED,
    Dealt,
    Opening,
    Revealed,
)
from flwr_privacy.strategies.requests.messenger import Assigned, Messenger, only
from flwr_privacy.strategies.requests.request_log import ClientReply, PartialSum
from flwr_privacy.strategies.state.experiment import Experiment
from flwr_privacy.wire.channel import check_usable
from flwr_privacy.wire.fields import read, write
from flwr_privacy.wire.pins import Pins

__all__ = ["Dealing", "Revealing", "SumExchanges", "names_in"]

_MOST_TRIES = 3  # to get a client's key
_KEY_BYTES = 32
_LENGTHS = {_KEY_BYTES, 0, 64}  # of a key, and of a signature if there is one


class Dealing(NamedTuple):
    """A session whose clients are to deal secrets, with their nodes."""

    session: Session
    assigned: Assigned


class Revealing(NamedTuple):
    """A session whose clients reveal the shares that remove the masks from the survivors' sum."""

    session: Session
    assigned: Assigned
    survivors: list[str]


class SumExchanges:
    """Asks the clients of a secure sum for keys and shares.

    Parameters
    ----------
    messenger : Messenger
        How the clients are talked to.
    experiment : Experiment
        Gives the identity that keys are signed for.
    pins : Pins, optional
        The clients' long-term keys, where the server has them.

    Attributes
    ----------
    keys : dict
        Public key of each client, and the signature on it or nothing.
    """

    def __init__(
        self, messenger: Messenger, experiment: Experiment, *, pins: Pins | None = None
    ) -> None:
        self._experiment = experiment
        self._pins = pins
        self.keys: dict[str, tuple[bytes, bytes]] = {}
        self._messenger = messenger
        self._tries: Counter[str] = Counter()

    def learn_keys(self, grid: Grid, server_round: int) -> None:
        """Ask connected clients without a known key for their keys."""
        everybody = self._messenger.sample(grid, server_round, KEYS, fraction=1.0, minimum=0)
        unknown = {
            client
            for client in names_in(everybody)
            if client not in self.keys and self._tries[client] < _MOST_TRIES
        }
        if not unknown:
            return
        # Counted when asked, so that clients that never answer do not delay every round.
        self._tries.update(unknown)
        messages = self._messenger.ask(server_round, KEYS, RecordDict(), only(everybody, unknown))
        replies = self._messenger.exchange(grid, messages, phase=KEYS)
        request_log = self._messenger.request_log(KEYS)
        for reply in request_log.replies(replies):
            try:
                self._take_key(reply)
            except (ReplyRefusedError, ProtocolError) as error:
                request_log.withdraw(reply, _refusal(error))

    def share(
        self,
        grid: Grid,
        server_round: int,
        *,
        revealing: Revealing | None,
        dealing: Dealing | None,
    ) -> None:
        """Ask clients to reveal shares of one session and to deal those of another."""
        own: dict[str, RecordDict] = {}
        asked: dict[int, list[str]] = {}
        if revealing is not None:
            session = revealing.session
            _add(asked, revealing.assigned)
            for client in names_in(revealing.assigned):
                around = session.survivors_around(client, revealing.survivors)
                question = Opening(session=session.name, survivors=around)
                own[client] = RecordDict({OPEN: ConfigRecord(write(question))})
        if dealing is not None:
            _add(asked, dealing.assigned)
            for client in names_in(dealing.assigned):
                record = ConfigRecord(write(dealing.session.invitation(client)))
                # A client in both sessions gets both requests in one message.
                own[client] = RecordDict({**own.get(client, {}), DEAL: record})
        messages = self._messenger.ask(server_round, SHARES, RecordDict(), asked, own=own)
        request_log = self._messenger.request_log(SHARES)
        for reply in request_log.replies(self._messenger.exchange(grid, messages, phase=SHARES)):
            try:
                _take_shares(reply, revealing, dealing, own)
            except (ReplyRefusedError, ProtocolError) as error:
                request_log.withdraw(reply, _refusal(error))

    def leave_out(self, reasons: Mapping[str, str]) -> None:
        """Leave clients out of the run, each for a reason."""
        for client, why in reasons.items():
            self._messenger.federation.leave_out(client, why)

    def _take_key(self, reply: ClientReply | PartialSum) -> None:
        record = _record(reply, DEAL)
        key, signature = record.get("key"), record.get("signature", b"")
        lengths = {len(octets) if type(octets) is bytes else -1 for octets in (key, signature)}
        if type(key) is not bytes or len(key) != _KEY_BYTES or not lengths <= _LENGTHS:
            raise ReplyRefusedError("malformed", "no public key, or a signature of another length")
        check_usable(key)
        client = reply.clients[0]
        if self._pins is not None:
            if not signature:  # with the key that a node made itself it signs its hello alone
                text = f"client {client} did not sign its key: it has no privacy-identity"
                raise ReplyRefusedError("identity", text)
            # One key that does not check out, and all clients with pins refuse the whole cohort.
            signed = f"{SIGNED} key", self._experiment.id, client, key
            self._pins.verify(client, signature, *signed)
        self.keys[client] = key, signature


def _take_shares(
    reply: ClientReply | PartialSum,
    revealing: Revealing | None,
    dealing: Dealing | None,
    own: Mapping[str, RecordDict],
) -> None:
    client, damaged = reply.clients[0], list[str]()
    if revealing is not None and OPEN in own[client]:
        revealed = read(Revealed, _record(reply, OPEN))
        damaged = revealing.session.take_revealed(
            client, revealing.survivors, revealed.keys, revealed.seeds
        )
    if dealing is not None and DEAL in own[client]:
        record = _record(reply, DEAL)
        # What it revealed above counts all the same.
        if "refused" in record:
            raise ReplyRefusedError("error", f"client {client}: {record['refused']}")
        dealing.session.take_dealt(client, read(Dealt, record))
    if damaged:  # the other shares count all the same; the dealers may have announced other ones
        detail = f"client {client}: damaged shares of clients {damaged}"
        raise ReplyRefusedError("malformed", detail, by_others=True)


def names_in(assigned: Assigned) -> list[str]:
    """Return the clients, node by node."""
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
