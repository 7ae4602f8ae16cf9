"""Checks a release against what the node's operator allows, before any data are read."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from flwr_privacy.errors import DeclinedError

from .node_store import NodeRules, NodeStore

__all__ = [
    "ALLOW_UNPROTECTED",
    "ALLOW_VARIABLE",
    "PINS_VARIABLE",
    "check_is_member",
    "check_members",
    "check_policy",
    "check_scheme",
    "check_shares",
    "check_simulated",
    "check_summed",
    "check_unaccounted",
    "check_unprotected",
    "logged",
    "warn_once",
]

logger = logging.getLogger("flwr.privacy")

ALLOW_UNPROTECTED = "privacy-allow-unprotected"
ALLOW_VARIABLE = "FLWR_PRIVACY_ALLOW_UNPROTECTED"
"""Key of a node's configuration, and variable of its environment: schemes, with commas between."""

PINS_VARIABLE = "FLWR_PRIVACY_PINS"
"""Variable of a node's environment: the file with the other clients' long-term keys."""


@contextmanager
def logged(rules: NodeRules) -> Iterator[None]:
    """Write what is declined within the scope to the node's log."""
    try:
        yield
    except DeclinedError as error:
        logger.warning("client %s declines: %s", rules.client_id, error)
        raise


def check_policy(
    store: NodeStore,
    *,
    scheme: str,
    unit: str,
    noise_multiplier: float,
    neighbours: str,
    sigma: float | None = None,
) -> None:
    """Decline a release that the node's policy does not allow; the node's log says why.

    Without a policy's word on neighbours simulated clients answer for all of them.

    Raises
    ------
    DeclinedError
        If the policy does not allow it; see `flwr_privacy.privacy.policy.Policy.check`.
    """
    with logged(store):
        anything = store.simulated and store.policy.neighbours is None
        store.policy.check(
            scheme=scheme,
            unit=unit,
            noise_multiplier=noise_multiplier,
            neighbours=None if anything else neighbours,
            sigma=sigma,
        )


def check_unaccounted(
    rules: NodeRules,
    *,
    scheme: str,
    guarantees_dp: bool,
    sigma: float | None = 0.0,
    noised: bool = False,
) -> None:
    """Decline a release that no ledger is charged for, if the node's operator does not allow it.

    Parameters
    ----------
    rules : NodeRules
        What the operator of the node says.
    scheme : str
        Which scheme asks.
    guarantees_dp : bool
        Whether the client half promises differential privacy.
    sigma : float, optional
        Standard deviation (or Laplace scale) of its noise; by default it has none. None where it is
        not known yet: then the policy's ``min_sigma`` is not checked.
    noised : bool, default False
        Whether there is noise all the same, whose cost is charged but not proven.

    Raises
    ------
    DeclinedError
        If the policy does not name the scheme, or has a largest epsilon, units of protection,
        neighbours, or more noise; or if `check_unprotected` declines an answer without noise.
    """
    policy = rules.policy
    with logged(rules):
        policy.check(scheme=scheme, unit="user", noise_multiplier=0.0, sigma=sigma)
        limits = (policy.max_epsilon, policy.units, policy.neighbours)
        if any(limit is not None for limit in limits):
            raise DeclinedError(
                f"'{scheme}' has no budget: the node's policy has max_epsilon or units or "
                "neighbours, so it answers only where a unit is protected"
            )
    if not noised:
        check_unprotected(rules, scheme=scheme, guarantees_dp=guarantees_dp)


def check_unprotected(rules: NodeRules, *, scheme: str, guarantees_dp: bool) -> None:
    """Decline an answer without noise under a scheme that guarantees differential privacy.

    Simulated clients give it, and nodes whose operator lists the scheme in ``allow_unprotected``. A
    scheme that promises nothing answers as its class says, with a line in the node's log if no
    policy allows it.

    Raises
    ------
    DeclinedError
        If the scheme promises differential privacy, and neither holds.
    """
    if rules.simulated:
        return
    if not guarantees_dp:
        if not rules.has_policy_file:
            warn_once(
                f"answers leave this node without differential privacy: the scheme '{scheme}' "
                "promises none, and the node has no policy"
            )
        return
    if scheme in (rules.policy.allow_unprotected or ()):
        return
    with logged(rules):
        raise DeclinedError(
            f"an answer without noise was asked for, and the scheme '{scheme}' promises "
            "differential privacy: this node gives it only if its operator lists the scheme in "
            f"allow_unprotected (policy, node configuration {ALLOW_UNPROTECTED}, or "
            f"{ALLOW_VARIABLE})"
        )


def check_summed(rules: NodeRules, clients: int = 0) -> None:
    """Decline to answer if fewer clients than the policy's ``min_summed`` are in the sum.

    Parameters
    ----------
    rules : NodeRules
        What the operator of the node says.
    clients : int, default 0
        How many are, at least; 0 outside of a sum.

    Raises
    ------
    DeclinedError
        If the policy has ``min_summed``, and it is larger.
    """
    with logged(rules):
        rules.policy.check_sum(clients or None)


def check_scheme(rules: NodeRules, scheme: str) -> None:
    """Decline an answer that has nothing of the node's data if the policy lists other schemes.

    Raises
    ------
    DeclinedError
        If it does.
    """
    with logged(rules):
        rules.policy.check_scheme(scheme)


def check_simulated(rules: NodeRules, phase: str) -> None:
    """Decline an answer that only simulated clients may give.

    Raises
    ------
    DeclinedError
        If the client is no simulated one.
    """
    with logged(rules):
        if not rules.simulated:
            raise DeclinedError(f"the phase '{phase}' is answered in simulations only")


@lru_cache(maxsize=256)
def warn_once(text: str) -> None:
    """Log a warning once per process."""
    logger.warning(text)


def check_shares(
    store: NodeStore, parties: int, fields: Mapping[str, Any], *, noised: bool = True
) -> float:
    """Decline to add only a share of the noise where too few other clients are in the sum.

    Parameters
    ----------
    store : NodeStore
        What the node keeps for the client.
    parties : int
        Honest clients for whose sum the shares are meant.
    fields : Mapping
        What `SchemeClient.handle` got: what the client believes of the secure sum.
    noised : bool, default True
        Whether there is a share of noise; if not, the node needs no pins.

    Returns
    -------
    float
        Standard deviation of the noise that is in a sum whatever the server says, over that of the
        whole noise: at most 1, and less only in a sparse graph.

    Raises
    ------
    DeclinedError
        If there is no secure sum, its server may have made up the others, or the client counts on
        fewer honest ones.
    """
    asked = f"noise in shares for a sum of at least {parties} honest clients was asked for"
    with logged(store):
        if not fields["summed"]:
            raise DeclinedError(f"{asked} outside of a secure sum: a share alone hides nothing")
        if noised and not store.simulated and store.pins is None:
            raise DeclinedError(
                f"{asked}, and this node pins no keys: a server may have made up all other "
                "clients. Name a file with their public keys as privacy-pins in the node's "
                f"configuration or as {PINS_VARIABLE} in its environment"
            )
        if fields["honest"] < parties:
            raise DeclinedError(
                f"{asked} in a secure sum in which this node counts on {fields['honest']}: of the "
                "clients that it pins, its policy's max_cohort and its own roster bear out, a "
                "fifth may collude with the server"
            )
    return math.sqrt(min(1.0, fields["certain"] / parties))


def check_members(
    store: NodeStore, members: Sequence[str], parties: int, fields: Mapping[str, Any]
) -> None:
    """Decline an answer without noise where the committee that adds it is not good enough.

    A client whose noise is added by others believes nothing of them but this: the operator named
    the nodes and pinned their keys, they are in the client's secure sum, and whoever shares masks
    with the client opens no sum without them.

    Parameters
    ----------
    store : NodeStore
        What the node keeps for the client.
    members : sequence of str
        The committee, as the server names it.
    parties : int
        Honest members for whom the noise is scaled.
    fields : Mapping
        What `SchemeClient.handle` got: what the client knows of the secure sum.

    Raises
    ------
    DeclinedError
        If the operator did not name or pin the members, too few of them count as honest, the sum
        could be opened without one, or this node is a member itself.
    """
    with logged(store):
        trusted = _check_committee(store, members, fields)
        if store.client_id in trusted:
            raise DeclinedError(
                "this node is a member of the noise committee: it does not train in a cohort"
            )
        if parties > (honest := _honest(len(members), len(trusted))):
            raise DeclinedError(
                f"noise for {parties} honest members of {len(members)} was asked for: of the "
                f"{len(trusted)} nodes in noise_members a fifth may collude with the server, one "
                f"at least, so this node counts on {honest}"
            )


def check_is_member(store: NodeStore, members: Sequence[str], fields: Mapping[str, Any]) -> None:
    """Decline to add noise where the operator did not make this node a member, or named others.

    Parameters
    ----------
    store, members, fields
        As of `check_members`.

    Raises
    ------
    DeclinedError
        If it is so, or the sum could be opened without a member.
    """
    with logged(store):
        trusted = _check_committee(store, members, fields)
        if store.client_id not in trusted or store.client_id not in members:
            raise DeclinedError(
                "noise for a committee was asked for: this node's policy does not list it in "
                "noise_members"
            )


def _check_committee(
    store: NodeStore, members: Sequence[str], fields: Mapping[str, Any]
) -> Sequence[str]:
    """Return the nodes from which members may be chosen, or decline."""
    asked = f"a noise committee of {len(members)} was asked for"
    if not fields["summed"]:
        raise DeclinedError(f"{asked} outside of a secure sum: nobody's noise is in the answer")
    trusted = store.policy.noise_members
    if trusted is None:
        if not store.simulated:
            raise DeclinedError(
                f"{asked}: this node's policy names no noise_members, so a server may have made "
                "them up"
            )
        trusted = members
    if unknown := sorted(set(members).difference(trusted)):
        raise DeclinedError(f"{asked}: noise_members of this node's policy does not have {unknown}")
    if not store.simulated:
        others = [member for member in members if member != store.client_id]
        if store.pins is None or any(member not in store.pins for member in others):
            raise DeclinedError(
                f"{asked}, and this node does not pin the keys of all members: name a file with "
                f"them as privacy-pins in the node's configuration or as {PINS_VARIABLE} in its "
                "environment"
            )
    if sorted(fields["needed"]) != sorted(members):
        raise DeclinedError(f"{asked} in a secure sum that opens without some of them")
    colluding = len(members) - _honest(len(members), len(trusted))
    if fields["withstood"] < colluding:
        raise DeclinedError(
            f"{asked} in a secure sum in which a server that lies about who is missing may open "
            f"single answers with the help of {colluding} members: it needs a threshold of two "
            "thirds in a complete graph"
        )
    return trusted


def _honest(members: int, trusted: int) -> int:
    # Late: noise in shares is of no use to a node whose scheme has none.
    from flwr_privacy.privacy.distributed_noise import honest_members

    return honest_members(members, trusted=trusted)
