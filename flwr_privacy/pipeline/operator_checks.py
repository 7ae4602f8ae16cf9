"""Checks a release against what the node's operator allows, before any data are read."""

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from flwr_privacy.errors import DeclinedError

from .node_store import NodeRules, NodeStore

__all__ = [
    "ALLOW_UNPROTECTED",
    "ALLOW_VARIABLE",
    "PINS_VARIABLE",
    "check_policy",
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
