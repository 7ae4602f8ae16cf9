"""Seals FedVS's shares for their holders, and binds each to its purpose."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.clients.node.data_cache import DataCache
from flwr_privacy.errors import ProtocolError
from flwr_privacy.fedvs.terms import SEAL_BYTES, CodeTerms
from flwr_privacy.pipeline.step_store import StepStore
from flwr_privacy.wire.channel import Channel, KeyPair, Part, canonical

__all__ = ["SCHEME", "SealedShares", "key_name"]

SCHEME = "fedvs"


def key_name(experiment_id: str, generation: str) -> str:
    """Return the name of a coding's key pair: a later breach does not open older codings."""
    return f"{experiment_id} {generation}"


@dataclass(frozen=True, eq=False, repr=False)
class _Peers:
    """Sealed channels to the other members of a coding, made when they are needed."""

    me: str
    pair: KeyPair
    experiment_id: str
    terms: CodeTerms
    made: dict[str, Channel]

    @property
    def size(self) -> int:
        return 1000 * len(self.terms.members)

    def to(self, peer: str) -> Channel:
        if peer not in self.made:
            context: tuple[Part, ...] = (SCHEME, 1, self.experiment_id, self.terms.digest)
            key = self.terms.keys[self.terms.place(peer)]
            self.made[peer] = Channel(self.pair, key, me=self.me, peer=peer, context=context)
        return self.made[peer]


_peers: DataCache[_Peers] = DataCache(room=2**27)


class SealedShares:
    """Seals and opens the shares of one message.

    Parameters
    ----------
    store : StepStore
        What the node lends to the client's step, which answers the message.
    terms : CodeTerms
        The coding that they are of.
    """

    def __init__(self, store: StepStore, terms: CodeTerms) -> None:
        self._terms = terms
        self._me = store.client_id
        self._experiment = store.experiment_id
        self._round = store.server_round

        def peers() -> _Peers:
            pair = store.pair(key_name(store.experiment_id, terms.generation))
            return _Peers(store.client_id, pair, store.experiment_id, terms, {})

        self._peers = _peers.get((str(store.folder), terms.digest), peers)

    def seal(self, shares: NDArray[np.int64], phase: str, purpose: list[Part]) -> NDArray[np.uint8]:
        """Seal a share for every other member; a row for each, in their order."""
        me, terms, peers = self._me, self._terms, self._peers
        bound = self._bound(phase, purpose)
        rows = []
        for place, peer in enumerate(terms.members):
            if peer != me:
                plain = terms.field.to_bytes(shares[place].reshape(-1))
                rows.append(np.frombuffer(peers.to(peer).seal(plain, bound), np.uint8))
        return np.stack(rows)

    def _bound(self, phase: str, purpose: list[Part]) -> bytes:
        """Return what a share is bound to; sender, receiver and terms are in the channel's key.

        As one hash: it is the same for all shares of a message, and encoding it again for each
        would take longer than sealing.
        """
        parts = canonical(self._experiment, self._round, phase, purpose)
        return hashlib.sha256(parts).digest()

    def open(
        self,
        senders: list[str],
        sealed: NDArray[Any],
        sizes: list[int],
        phase: str,
        purpose: list[Part],
    ) -> Iterator[tuple[str, NDArray[np.int64]]]:
        """Open the concatenated shares of the other senders.

        Raises
        ------
        ProtocolError
            If one is damaged, for somebody else or of another set; it names sender and round.
        """
        me, terms, peers, start = self._me, self._terms, self._peers, 0
        lengths = {
            s: terms.bytes_of(sizes[terms.place(s)]) + SEAL_BYTES for s in senders if s != me
        }
        if sealed.dtype != np.uint8 or sealed.shape != (sum(lengths.values()),):
            raise ProtocolError(
                f"sealed shares of shape {sealed.shape}: expected {sum(lengths.values())} bytes"
            )
        bound = self._bound(phase, purpose)
        for sender, length in lengths.items():
            try:
                plain = peers.to(sender).open(sealed[start : start + length].tobytes(), bound)
                yield sender, terms.field.from_bytes(plain, sizes[terms.place(sender)])
            except ProtocolError as error:
                raise ProtocolError(
                    f"round {self._round}, phase '{phase}': the share of client "
                    f"{sender} cannot be used: {error}"
                ) from error
            start += length
