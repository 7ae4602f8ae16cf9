"""The client's side of a secure sum, with the state that prevents opening both its secrets.

For a sum every client deals two secrets in shares: the private key of its pairwise masks and the
seed of a mask of its own. For every client one of them may be opened: the seed if its vector is
in the sum, the key if it is not. Who had both could take the masks off its vector.

A round has one sum, or several, its steps, in which the same clients send one vector after another.
The later vectors are functions of what the first ones came from, so a later sum over fewer clients
than the one before would, compared with it, give the vector of somebody away. Whoever is in the
first sum of a round is in all of them, or they are not opened; every client sees to that itself.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr_privacy.coding.shamir import deal
from flwr_privacy.errors import ProtocolError, RefusedPeersError
from flwr_privacy.wire.channel import Channel, KeyPair

from .masked import Residues, add_masks
from .messages import Dealt, Invitation, Joined
from .secrets import KEY, SECRET_BYTES, SEED, Derivation, asked_so_far, halves, words

__all__ = ["Participant"]


@dataclass
class Participant:
    """One client's side of the secure sums of one experiment.

    Parameters
    ----------
    client_id, experiment_id : str
        Who, and in which experiment.
    state : dict
        What it remembers, as plain values; empty at first. It is secret, and it must be durable:
        whoever can set it back can have both secrets opened.

    Notes
    -----
    **Guarantee.** *Protected*: the vector of a client, up to the sum over it and at least
    ``threshold - colluders - 1`` other honest clients. *Against*: an honest-but-curious server and
    fewer than `threshold` clients of the roster. A client never opens both secrets of another,
    sends one vector per session, opens one set of survivors per sum, and none of fewer than
    `threshold` or without somebody who is needed; the later sums of a round over the survivors of
    the first one and nobody fewer. Only those who were told of the same needed ones can open what a
    client deals, so nobody who follows the protocol opens the key of one of these. As a threshold
    is more than half of a roster, two halves of a roster cannot be made to open both secrets
    either, unless ``2 * threshold - roster`` of them collude. *Not covered*: a server that tells
    every client another story, beyond what `flwr_privacy.secure_sum.SecureSum.honest_in_sums` says;
    a server that runs most of the roster itself, where keys are not pinned; what sums say, one by
    one or compared with each other; wrong vectors, which anybody can send; denial of service, for
    which one client is enough.
    """

    client_id: str
    experiment_id: str
    state: dict[str, Any] = field(default_factory=dict)

    def public_key(self) -> bytes:
        """Return the public key under which shares for this client are sealed."""
        if "private" not in self.state:
            self.state.update(private=KeyPair().private, peers={}, opened=[-1, 0], sessions={})
        return self._own.public

    def deal(self, invitation: Invitation) -> Dealt:
        """Make the secrets of a session and deal them.

        Raises
        ------
        ProtocolError
            If the invitation is malformed, repeated or late, or has another key of this client; at
            a later step also if this client has not just opened the sum before, or if roster or
            threshold are not those of that sum's survivors.
        RefusedPeersError
            If it has another key of somebody than before.
        """
        self._check_invitation(invitation)
        earlier = self._step_before(invitation) if invitation.step else None
        me, roster = self.client_id, invitation.roster
        masks, seed = KeyPair(), KeyPair().private
        shares = deal(masks.private + seed, holders=len(roster), threshold=invitation.threshold)
        own = {
            "round": invitation.server_round,
            "step": invitation.step,
            "roster": roster,
            "first_roster": len(roster) if earlier is None else earlier["first_roster"],
            "threshold": invitation.threshold,
            "needed": invitation.needed,
            "private": masks.private,
            "seed": seed,
            "own": shares[roster.index(me)],
            "before": b"" if earlier is None else earlier["asked"],
        }
        derived = Derivation(self.experiment_id, invitation.session)
        associated = self._associated(invitation.session, own)
        channel = self._channel
        sealed = [
            b""
            if peer == me
            else channel(peer, key).seal(share, *associated, me, peer, masks.public)
            for peer, key, share in zip(roster, invitation.keys, shares, strict=True)
        ]
        # A sum has one living session: an older one can then never be opened by this client. That
        # of the sum before may yet be revealed; what is older is over.
        sessions = self.state["sessions"]
        older = {name: _key(s) for name, s in sessions.items() if _key(s) < _key(own)}
        for name in [n for n in sessions if n not in older or older[n] < max(older.values())]:
            del sessions[name]
        sessions[invitation.session] = own
        self.state["peers"].update(zip(roster, invitation.keys, strict=True))
        return Dealt(
            mask_key=masks.public,
            commitment=derived.commitment(me, seed),
            digests=[
                b"".join(
                    derived.share_digest(me, holder, kind, part)
                    for kind, part in zip((KEY, SEED), halves(share), strict=True)
                )
                for holder, share in enumerate(shares)
            ],
            sealed=sealed,
        )

    def seat(self, session: str, server_round: int, step: int) -> tuple[int, int]:
        """Check that the client may still send its vector for a step of a round in a session.

        Returns
        -------
        threshold, roster : int
            Least number of clients of its roster in the sum, and how many these are.

        Raises
        ------
        ProtocolError
            If the session is another one or of another sum, or has the client's vector already.
        """
        own = self._unsent(session)
        if _key(own) != (server_round, step):
            raise ProtocolError(
                f"session {session[:64]!r} is of {words(*_key(own))}, not of "
                f"{words(server_round, step)}"
            )
        return own["threshold"], len(own["roster"])

    def needed(self, session: str) -> list[str]:
        """Return those without whose vectors a session is not opened, as it was dealt for.

        Raises
        ------
        ProtocolError
            If the session is not known.
        """
        return list(self._session(session).get("needed", []))

    def join(self, joined: Joined, asked: bytes = b"") -> None:
        """Open the shares that the others dealt, after which the client may send its vector.

        Parameters
        ----------
        joined : Joined
            Who dealt, and what.
        asked : bytes
            Hash of what the client is asked. Masks cancel among those who were asked the same, in
            this step and in those before: a server that asks one client for something else, to
            find it in a sum, has no sum. A client is asked once in a session.

        Raises
        ------
        ProtocolError
            If the session is another one, or too few dealt (at a later step: not all), or one who
            is needed did not.
        RefusedPeersError
            If shares are damaged. Such a dealer is not skipped: the seal is what tells the client
            that the dealer's mask key is not the server's.
        """
        session = self._unsent(joined.session)
        me, dealers = self.client_id, joined.dealers
        roster, threshold = session["roster"], session["threshold"]
        if dealers != sorted(set(dealers) & set(roster)) or me not in dealers:
            raise ProtocolError("the dealers are not members of the roster, this client among them")
        if not len(dealers) == len(joined.mask_keys) == len(joined.sealed):
            raise ProtocolError("there is not one key and one share for each dealer")
        if len(dealers) < threshold:
            raise ProtocolError(
                f"{len(dealers)} clients dealt, {threshold - len(dealers)} fewer than the threshold"
            )
        self._check_nobody_left(session, dealers)
        _check_needed(session, dealers, "dealt")
        associated = self._associated(joined.session, session)
        channel = self._channel
        shares, unopened = {me: session["own"]}, dict[str, str]()
        for peer, key, sealed in zip(dealers, joined.mask_keys, joined.sealed, strict=True):
            if peer == me:
                # With another key the others would share their masks with somebody else.
                if key != KeyPair.of(session["private"]).public:
                    raise ProtocolError("the server has another mask key for this client")
                continue
            try:
                # The key that was dealt with: the server cannot exchange it in between.
                known = self.state["peers"][peer]
                share = channel(peer, known).open(sealed, *associated, peer, me, key)
            except ProtocolError as error:
                unopened[peer] = f"the share of client {peer} cannot be used: {error}"
                continue
            if len(share) != 2 * SECRET_BYTES:
                unopened[peer] = f"the share of client {peer} has {len(share)} bytes"
            shares[peer] = share
        if unopened:
            raise RefusedPeersError(unopened)
        session["asked"] = asked_so_far(session["before"], asked)
        session["dealers"] = dealers
        session["mask_keys"] = joined.mask_keys
        session["shares"] = [shares[dealer] for dealer in dealers]

    def mask(self, session: str, vector: Residues, bits: int) -> Residues:
        """Return the client's masked vector; once per session.

        Parameters
        ----------
        session : str
            A session that the client has joined.
        vector : (d,) ndarray of unsigned integers
            Residues modulo ``2**bits``; those of `residues` are changed in place.
        bits : int
            Bits of the modulus.

        Raises
        ------
        ProtocolError
            If the client has not joined it, or has sent its vector already.
        """
        own = self._session(session)
        if "mask_keys" not in own:
            raise ProtocolError(f"session {session[:64]!r} has no place for this client's vector")
        masks = KeyPair.of(own["private"])
        keys = dict(zip(own["dealers"], own.pop("mask_keys"), strict=True))
        derived = Derivation(self.experiment_id, session)
        seeds = [(derived.self_seed(own["seed"]), 1)]
        for peer, key in keys.items():
            if peer != self.client_id:
                # The requests are part of the seed: masks of clients that were asked different
                # things do not cancel.
                pair = (self.client_id, peer)
                seed = derived.pair_seed(masks, key, pair, own["asked"])
                # One of a pair adds the mask and the other subtracts it: it cancels in the sum.
                seeds.append((seed, 1 if self.client_id < peer else -1))
        # Once: two vectors under the same masks would give away their difference.
        own.update(masked=True, private=b"", seed=b"")
        return add_masks(vector, bits, seeds)

    def reveal(self, session: str, survivors: Sequence[str]) -> tuple[list[bytes], list[bytes]]:
        """Return the shares with which the server can remove the masks from a sum.

        Parameters
        ----------
        session : str
            A session to which the client has sent its vector.
        survivors : sequence of str
            Dealers of the client's roster whose vectors are in the sum, sorted.

        Returns
        -------
        keys, seeds : list of bytes
            Shares of the keys of the dealers that are missing, and of the seeds of the survivors,
            each in the order of the dealers.

        Raises
        ------
        ProtocolError
            If the client has not sent its vector, was asked for other survivors before, there are
            too few of them, or one who is needed is missing; at a later step, if anybody is.
        """
        own = self._session(session)
        names = list(survivors)
        if not own.get("masked"):
            raise ProtocolError(f"session {session[:64]!r} has no vector of this client")
        if names != sorted(set(names) & set(own["dealers"])) or self.client_id not in names:
            raise ProtocolError(
                "the survivors are not dealers of the session, this client among them"
            )
        if "survivors" in own and own["survivors"] != names:
            raise ProtocolError(
                f"session {session[:64]!r} was opened for other survivors: that would open both "
                "secrets of somebody"
            )
        if len(names) < own["threshold"]:
            raise ProtocolError(
                f"{len(names)} clients survived, {own['threshold'] - len(names)} fewer than the "
                "threshold: such a sum is not opened"
            )
        self._check_nobody_left(own, names)
        _check_needed(own, names, "survived")
        # From now on no invitation to this sum or an earlier one is accepted.
        self.state["opened"] = list(_key(own))
        if "survivors" not in own:
            own["survivors"] = names
            # What is not opened now never will be.
            own["shares"] = [
                halves(share)[dealer in names]
                for dealer, share in zip(own["dealers"], own["shares"], strict=True)
            ]
            own["own"] = b""
        answers = list(zip(own["dealers"], own["shares"], strict=True))
        sessions = self.state["sessions"]
        for name in [n for n, older in sessions.items() if _key(older) < _key(own)]:
            del sessions[name]
        return (
            [share for dealer, share in answers if dealer not in names],
            [share for dealer, share in answers if dealer in names],
        )

    def _check_invitation(self, invitation: Invitation) -> None:
        self.public_key()
        roster = invitation.roster
        if invitation.session in self.state["sessions"]:
            raise ProtocolError(f"session {invitation.session[:64]!r} is repeated")
        if invitation.step < 0:
            raise ProtocolError(f"step {invitation.step} of a round: the first one is step 0")
        asked, opened = (invitation.server_round, invitation.step), tuple(self.state["opened"])
        if asked <= opened:
            raise ProtocolError(
                f"{words(*asked)} does not follow {words(*opened)}, whose sum this client has "
                "opened: another sum over the same round could give vectors away"
            )
        if roster != sorted(set(roster)) or self.client_id not in roster:
            raise ProtocolError("the roster does not name its members once, this client among them")
        if not len(roster) == len(invitation.keys) == len(invitation.signatures):
            raise ProtocolError("there is not one key and one signature for each of the roster")
        if not len(roster) < 2 * invitation.threshold <= 2 * len(roster):
            raise ProtocolError(
                f"threshold {invitation.threshold} for {len(roster)} clients: it must be more than "
                "half of them"
            )
        needed = invitation.needed
        if needed != sorted(set(needed) & set(roster)):
            raise ProtocolError("those who are needed are no members of the roster, each once")
        known = {**self.state["peers"], self.client_id: self._own.public}
        changed = {
            peer: f"the key of client {peer} is another than before"
            for peer, key in zip(roster, invitation.keys, strict=True)
            if known.get(peer, key) != key
        }
        if self.client_id in changed:
            raise ProtocolError(changed[self.client_id])
        if changed:
            raise RefusedPeersError(changed)

    def _step_before(self, invitation: Invitation) -> Any:
        """Return the session of the previous step; check that the invitation continues it."""
        server_round, step = invitation.server_round, invitation.step
        sessions = self.state["sessions"].values()
        before = [s for s in sessions if _key(s) == (server_round, step - 1) and "survivors" in s]
        if not before:
            raise ProtocolError(
                f"{words(server_round, step)} is refused: this client has not just opened "
                f"the sum of {words(server_round, step - 1)}"
            )
        if invitation.roster != before[0]["survivors"]:
            raise ProtocolError(
                f"the roster of {words(server_round, step)} is not who survived the sum before: "
                "sums over different clients would give a vector away"
            )
        if invitation.threshold != before[0]["threshold"]:
            raise ProtocolError(
                f"threshold {invitation.threshold} for {words(server_round, step)}: it stays "
                f"{before[0]['threshold']} within a round"
            )
        return before[0]

    def _check_nobody_left(self, session: Mapping[str, Any], there: Sequence[str]) -> None:
        """Refuse a later sum of a round over fewer clients than the previous one."""
        roster = session["roster"]
        if session["step"] and len(there) < len(roster):
            raise ProtocolError(
                f"{len(roster) - len(there)} of {len(roster)} clients are missing in "
                f"{words(*_key(session))}: a sum over fewer clients than the step before would "
                "give a vector away"
            )

    def _session(self, session: str) -> Any:
        sessions = self.state.get("sessions", {})
        if session not in sessions:
            raise ProtocolError(f"session {session[:64]!r} is not known here, or is over")
        return sessions[session]

    def _unsent(self, session: str) -> Any:
        own = self._session(session)
        if "shares" in own:
            raise ProtocolError(f"session {session[:64]!r} has this client's vector already")
        return own

    @property
    def _own(self) -> KeyPair:
        return KeyPair.of(self.state["private"])

    @property
    def _channel(self) -> Callable[[str, bytes], Channel]:
        """Return a function that opens a channel to a peer; all channels share the own key pair."""
        own, me, context = self._own, self.client_id, ("secure-sum", self.experiment_id)
        return lambda peer, key: Channel(own, key, me=me, peer=peer, context=context)

    def _associated(self, name: str, session: Mapping[str, Any]) -> list[Any]:
        """Return the associated data that dealer and holder must agree on.

        Round and step are part of it, as a name may come again once its session is forgotten: old
        shares under it must not. The members of the roster are not: in a sparse graph no two
        clients have the same, but as many, at least in the first step.
        """
        agreed: list[Any] = [*_key(session), session["threshold"], session["first_roster"]]
        # Who was told of others would open the key of somebody without whom nothing is opened.
        if needed := session.get("needed"):
            agreed.append(needed)
        return ["shares", self.experiment_id, name, *agreed]


def _check_needed(session: Mapping[str, Any], there: Sequence[str], did: str) -> None:
    """Refuse a sum without somebody without whom it is not opened."""
    if missing := set(session.get("needed", [])).difference(there):
        raise ProtocolError(
            f"{len(missing)} of {len(session['needed'])} clients have not {did}, without whom the "
            "sum is not opened"
        )


def _key(session: Mapping[str, Any]) -> tuple[int, int]:
    """Return round and step of a session's sum, which order all sums."""
    return session["round"], session["step"]
