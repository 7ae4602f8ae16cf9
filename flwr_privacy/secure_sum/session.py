"""The server's side of a secure sum: one attempt to open one sum of a round."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.coding.shamir import recover
from flwr_privacy.errors import FlwrPrivacyError
from flwr_privacy.privacy.averaging import ReplyRefusedError
from flwr_privacy.wire.channel import KeyPair, check_usable

from .conflicts import Conflict
from .graph import local_threshold
from .masked import Residues, add_masks, values_of
from .messages import Dealt, Invitation, Joined
from .secrets import (
    DIGEST_BYTES,
    KEY,
    SECRET_BYTES,
    SEED,
    Derivation,
    asked_so_far,
    words,
)
from .settings import Bounds

__all__ = ["NotOpenedError", "Session"]

_SEALED_BYTES = 12 + 2 * SECRET_BYTES + 16  # nonce, two shares, tag


class NotOpenedError(FlwrPrivacyError):
    """A sum is not opened: too few clients are left, or a client violated the protocol."""


@dataclass(kw_only=True)
class Session:
    """One attempt to open a sum of a round, with all that the server knows of it.

    Parameters
    ----------
    name : str
        Name of the attempt; never used twice.
    experiment_id : str
        Identity of the experiment.
    server_round : int
        Round.
    step : int, default 0
        Number of the sum within its round. Of later ones nobody may be missing: see `go_on`.
    rosters : dict
        For each client of the cohort those with whom it shares masks, itself included, sorted.
    keys : dict
        Public key of each client, and its signature, empty where there is none.
    threshold : int
        Least number of clients in the first sum of the round, and of those who must reveal.
    bounds : Bounds
        What the vectors keep to.
    local_thresholds : dict, optional
        For each client how many of its roster open a secret; by default its share of `threshold`.
    before : bytes
        Hash of what the clients were asked in the steps before.
    liars : int, default 1
        Number of clients that may lie together about dealt shares, see `SecureSum.liars_of`.
    needed : collection of str
        Clients without whose vectors the sum is not opened; by default nobody.

    Attributes
    ----------
    conflicts : set
        Clients that contradict each other about a share, see `flwr_privacy.secure_sum.conflicts`.
    misfits : dict
        What shows that a dealer did not follow the protocol, whatever the others did.
    """

    name: str
    experiment_id: str
    server_round: int
    rosters: Mapping[str, list[str]]
    keys: Mapping[str, tuple[bytes, bytes]]
    threshold: int
    bounds: Bounds
    step: int = 0
    local_thresholds: Mapping[str, int] = field(default_factory=dict)
    before: bytes = b""
    liars: int = 1
    needed: Collection[str] = ()
    conflicts: set[Conflict] = field(default_factory=set)
    misfits: dict[str, str] = field(default_factory=dict)
    _dealt: dict[str, Dealt] = field(default_factory=dict)
    _shares: dict[tuple[str, str], dict[int, bytes]] = field(default_factory=dict)
    _revealed: set[str] = field(default_factory=set)

    def go_on(
        self, name: str, survivors: Collection[str], bounds: Bounds, asked: bytes = b""
    ) -> "Session":
        """Return the session of the round's next step: a sum over exactly this one's survivors.

        The thresholds stay: with lower ones a sparse graph would be less safe than
        `flwr_privacy.secure_sum.graph.insecurity` says.

        Parameters
        ----------
        name : str
            Name of the new attempt.
        survivors : collection of str
            Whose vectors are in this sum.
        bounds : Bounds
            What the next vectors keep to.
        asked : bytes
            Hash of what the clients were asked in this step.
        """
        there = sorted(survivors)
        return Session(
            name=name,
            experiment_id=self.experiment_id,
            server_round=self.server_round,
            step=self.step + 1,
            rosters={client: self.survivors_around(client, there) for client in there},
            keys=self.keys,
            threshold=self.threshold,
            bounds=bounds,
            local_thresholds={client: self._local(client) for client in there},
            before=asked_so_far(self.before, asked),
            liars=self.liars,
        )

    @property
    def dealers(self) -> list[str]:
        """Clients that dealt their secrets and may send a vector."""
        return sorted(self._dealt)

    @property
    def least(self) -> int:
        """Least number of clients in the sum; at a later step all clients."""
        return len(self.rosters) if self.step else self.threshold

    def invitation(self, client: str) -> Invitation:
        """Return the request to one client to deal its secrets."""
        roster = self.rosters[client]
        return Invitation(
            session=self.name,
            server_round=self.server_round,
            step=self.step,
            threshold=self._local(client),
            roster=roster,
            keys=[self.keys[member][0] for member in roster],
            signatures=[self.keys[member][1] for member in roster],
            needed=sorted(set(self.needed).intersection(roster)),
        )

    def take_dealt(self, client: str, dealt: Dealt) -> None:
        """Store the shares and keys that a client dealt.

        Raises
        ------
        ReplyRefusedError
            If it is malformed.
        ProtocolError
            If the key is one with which nobody can agree on another.
        """
        roster = self.rosters[client]
        sealed = [0 if member == client else _SEALED_BYTES for member in roster]
        if (
            len(dealt.mask_key) != SECRET_BYTES
            or len(dealt.commitment) != SECRET_BYTES
            or [len(digest) for digest in dealt.digests] != [2 * DIGEST_BYTES] * len(roster)
            or [len(share) for share in dealt.sealed] != sealed
        ):
            raise ReplyRefusedError("malformed", "shares of another number or length")
        check_usable(dealt.mask_key)
        self._dealt[client] = dealt

    def check_dealers(self) -> None:
        """Check that the sum can be opened; leave out dealers whose secrets could not be opened.

        In a sparse graph that is a client with too few dealers around it.

        Raises
        ------
        NotOpenedError
            If too few dealt, or somebody who is needed did not; at a later step, if not all did.
        """
        did = "dealt their secrets"
        self._check_enough(did, len(self._dealt), self.least)
        # Repeated: without one dealer, others may have too few around them.
        while lonely := [c for c in self._dealt if len(self._around(c)) < self._local(c)]:
            for client in lonely:
                del self._dealt[client]
        self._check_enough(f"{did} to enough others", len(self._dealt), self.least)
        self._check_needed(did, self._dealt)

    def joined(self, client: str) -> Joined:
        """Return the request to a dealer to join the sum."""
        dealers = self._around(client)
        return Joined(
            session=self.name,
            threshold=self.threshold,
            dealers=dealers,
            mask_keys=[self._dealt[dealer].mask_key for dealer in dealers],
            sealed=[
                self._dealt[dealer].sealed[self.rosters[dealer].index(client)] for dealer in dealers
            ],
        )

    def take_accusation(self, client: str, accused: Collection[str]) -> None:
        """Store that a client refuses the keys or shares of others, and so is not in the sum.

        Names of clients that are not in its roster have no effect.
        """
        others = set(accused).intersection(self.rosters.get(client, ())) - {client}
        self.conflicts.update(Conflict({client, dealer}) for dealer in others)

    def liars_around(self, client: str) -> int:
        """Return how many of those with whom a client shares masks may lie together.

        In a sparse graph fewer than can open its secrets, but for the probability that
        `flwr_privacy.secure_sum.graph.insecurity` bounds.
        """
        if len(self.rosters[client]) == len(self.rosters):
            return self.liars
        return max(1, min(self.liars, self._local(client) - 1))

    def survivors_around(self, client: str, survivors: Collection[str]) -> list[str]:
        """Return the survivors of a client's roster, which are all that the client is told of."""
        there = set(survivors)
        return [dealer for dealer in self._around(client) if dealer in there]

    def can_answer(self, client: str, survivors: Collection[str]) -> bool:
        """Tell whether enough of a client's roster survived for it to reveal its shares."""
        return len(self.survivors_around(client, survivors)) >= self._local(client)

    def take_revealed(
        self, client: str, survivors: Collection[str], keys: list[bytes], seeds: list[bytes]
    ) -> list[str]:
        """Check the shares that a survivor reveals, and store those that are what was dealt.

        A dealer that dealt other shares than it announced so loses its own secrets only, and these
        only if too few of its shares are left. The clients' privacy does not depend on what is
        stored: the survivor decides what it reveals before (at most one share of each dealer, see
        `Participant.reveal`), the server has received all of it, and every secret is recovered from
        as many shares as before.

        Returns
        -------
        list of str
            The dealers whose shares are not what they announced, and were left out. They, or the
            survivor, did not follow the protocol.

        Raises
        ------
        ReplyRefusedError
            If there is not one share for each dealer.
        """
        there = self.survivors_around(client, survivors)
        missing = [dealer for dealer in self._around(client) if dealer not in there]
        if (len(keys), len(seeds)) != (len(missing), len(there)):
            raise ReplyRefusedError("malformed", "another number of shares than was asked for")
        damaged = set()
        for kind, dealers, shares in ((KEY, missing, keys), (SEED, there, seeds)):
            for dealer, share in zip(dealers, shares, strict=True):
                holder = self.rosters[dealer].index(client)
                digest = self._derived.share_digest(dealer, holder, kind, share)
                start = 0 if kind == KEY else DIGEST_BYTES
                dealt = self._dealt[dealer].digests[holder]
                if digest == dealt[start : start + DIGEST_BYTES]:
                    self._shares.setdefault((dealer, kind), {})[holder] = share
                    self._revealed.add(client)
                else:
                    damaged.add(dealer)
                    if dealer != client:
                        self.conflicts.add(Conflict({client, dealer}))
        return sorted(damaged)

    def open(
        self, total: Residues, survivors: Collection[str], asked: bytes = b""
    ) -> NDArray[np.int64]:
        """Remove the masks from a sum.

        Parameters
        ----------
        total : (d,) ndarray of unsigned integers
            Sum of the masked vectors of the survivors.
        survivors : collection of str
            Whose vectors are in it.
        asked : bytes
            Hash of what they were asked, see `Participant.join`.

        Returns
        -------
        (d,) int64
            The sum of their vectors.

        Raises
        ------
        NotOpenedError
            If there are too few survivors or too few shares, or a dealt secret is not what was
            announced. Nothing is opened then.
        """
        self.check_survivors(survivors)
        self._check_enough("revealed their shares", len(self._revealed), self.threshold)
        so_far = asked_so_far(self.before, asked)
        masks = []
        for client in sorted(survivors):
            seed = self._recovered(client, SEED)
            if self._derived.commitment(client, seed) != self._dealt[client].commitment:
                raise self._misfit(client, "seed")
            masks.append((self._derived.self_seed(seed), -1))
        for client in sorted(set(self._dealt).difference(survivors)):
            # Its mask with each neighbour is in that neighbour's vector, with that one's sign.
            there = self.survivors_around(client, survivors)
            if not there:
                continue
            own = KeyPair.of(self._recovered(client, KEY))
            if own.public != self._dealt[client].mask_key:
                raise self._misfit(client, "key")
            for peer in there:
                mask_key = self._dealt[peer].mask_key
                pair = (client, peer)
                seed = self._derived.pair_seed(own, mask_key, pair, so_far)
                masks.append((seed, -1 if peer < client else 1))
        bits = self.bounds.modulus_bits
        return values_of(add_masks(total.copy(), bits, masks), bits)

    def check_survivors(self, survivors: Collection[str]) -> None:
        """Check that enough clients sent a vector to open the sum.

        Raises
        ------
        NotOpenedError
            If they are too few, or somebody who is needed is missing; at a later step, if anybody
            is.
        """
        did = "sent a vector that can be used"
        self._check_enough(did, len(survivors), self.least)
        self._check_needed(did, survivors)

    @property
    def _derived(self) -> Derivation:
        return Derivation(self.experiment_id, self.name)

    def _local(self, client: str) -> int:
        if client in self.local_thresholds:
            return self.local_thresholds[client]
        roster = len(self.rosters[client])
        if roster == len(self.rosters):
            return self.threshold
        return local_threshold(roster, self.threshold, len(self.rosters))

    def _around(self, client: str) -> list[str]:
        return [member for member in self.rosters[client] if member in self._dealt]

    def _misfit(self, dealer: str, what: str) -> NotOpenedError:
        self.misfits[dealer] = f"it dealt another {what} than it announced"
        return NotOpenedError(f"client {dealer} dealt another {what} than it announced")

    def _recovered(self, client: str, kind: str) -> bytes:
        shares, needed = self._shares.get((client, kind), {}), self._local(client)
        self._check_enough(f"have a share of client {client}", len(shares), needed)
        return recover(shares, threshold=needed)

    def _check_needed(self, did: str, there: Collection[str]) -> None:
        if missing := sorted(set(self.needed).difference(there)):
            raise NotOpenedError(
                f"the sum of {words(self.server_round, self.step)} is not opened: {missing} have "
                f"not {did}, and it needs them"
            )

    def _check_enough(self, did: str, count: int, needed: int) -> None:
        if count < needed:
            raise NotOpenedError(
                f"the sum of {words(self.server_round, self.step)} is not opened: {count} of at "
                f"least {needed} clients {did}, {needed - count} are missing"
            )
