"""States the guarantee of central differential privacy in each of its four modes."""

from collections.abc import Collection

from flwr_privacy.accounting import (
    ADD_REMOVE,
    REPLACE_ONE,
    ZERO_OUT,
    as_replaced,
    fitting,
    spent,
)
from flwr_privacy.privacy.distributed_noise import honest_members
from flwr_privacy.privacy.guarantee import Guarantee

from .plan import CentralDPNoisePlan
from .sensitivity import DISTRIBUTED, amplified

__all__ = ["Quorum", "guarantee_of"]

_NEIGHBOURS = {
    ADD_REMOVE: "one client is there or not",
    REPLACE_ONE: "the data of one client are replaced by any other",
    ZERO_OUT: "the contribution of one client to the sums is zero",
}

Quorum = tuple[int, int, int]
"""Clients of a cohort, least number of them in a sum that is opened, and colluders."""


def guarantee_of(
    plan: CentralDPNoisePlan,
    *,
    summed: bool,
    quorum: Quorum | None,
    kept_back: Collection[str],
    insecure: bool,
) -> Guarantee:
    """Return the guarantee of a training; see `flwr_privacy.central_dp.plan.CentralDPNoisePlan`.

    Parameters
    ----------
    plan : CentralDPNoisePlan
        The budget, who adds the noise, and how cohorts are drawn.
    summed : bool
        Whether there is a secure sum.
    quorum : tuple of int, optional
        The secure sum's numbers in the last round, where clients add the noise.
    kept_back : collection of str
        Arrays of the model that are not uploaded.
    insecure : bool
        Whether noise or samples came from a seed.

    Examples
    --------
    >>> plan = CentralDPNoisePlan(
    ...     noise="server", sampling="poisson", epsilon=8.0, delta=1e-5, rounds=10, q=0.1
    ... )
    >>> guarantee_of(plan, summed=False, quorum=None, kept_back=[], insecure=False).neighbours
    'one client is there or not'
    """
    secret = amplified(plan.noise, plan.sampling)
    not_protected = [] if secret else ["who takes part (no amplification by it is counted)"]
    not_protected += [
        "whether and when a client fails or declines",
        "what the user's own code sends elsewhere, and timing",
    ]
    if plan.relation == ZERO_OUT:
        not_protected.append(_beyond_zero(plan))
    if kept_back:
        not_protected.append(f"(not uploaded at all: {', '.join(kept_back)})")
    if plan.noise == DISTRIBUTED:
        adversary = "an honest-but-curious server and clients that collude with it"
        assumptions = ["each client keeps its own ledger, noise and secrets"]
        if plan.members:
            adversary = (
                "a server, also one that tells each node another story of who is missing, and "
                "clients and members of the noise committee that collude with it"
            )
            assumptions += _committee(plan.members)
        void = "clients drew their noise from an insecure seed, for tests"
    else:
        unseen = "neither a message nor who takes part" if secret else "no message"
        adversary = f"whoever sees the models, and {unseen}"
        seen = "the sum before its noise" if summed else "every client's update"
        assumptions = [
            f"the server is trusted: it sees {seen}, adds the noise and records the charges"
        ]
        void = "the server drew its noise and samples from an insecure seed, for tests"
    if secret:
        assumptions.append(
            "it draws each client by itself and tells nobody who is drawn, who answers, or how "
            "many; its history and its log have the numbers"
        )
    if plan.correlated is not None:
        assumptions.append(_rests(plan))
    if quorum is not None:
        cohort, threshold, colluders = quorum
        shares = f"at least {threshold - colluders} honest shares are in it"
        if plan.members:
            shares = f"fewer than {2 * threshold - cohort} nodes can open no single answer"
        assumptions.append(
            f"of {cohort} {'clients and members' if plan.members else 'clients'} at most "
            f"{colluders} collude with the server; a sum over less than {threshold} is not opened, "
            f"so that {shares}"
        )
    evidence = [
        "tests of central DP: its clipping bounds, its noise, what clients charge",
        "tests of noise in shares against the distribution that the sum must have",
        "tests of the accountants against closed formulas and against each other",
    ]
    if plan.correlated is not None:
        evidence.append(
            "tests of correlated noise: its cost against all patterns of participation, and that "
            "what is released follows from C x + z alone"
        )
    return Guarantee(
        scheme="central-dp",
        protects="all data of a client",
        adversary=adversary,
        neighbours=_NEIGHBOURS[plan.relation],
        epsilon=plan.epsilon,
        delta=plan.delta,
        not_protected=tuple(not_protected),
        assumptions=tuple(assumptions),
        evidence=tuple(evidence),
        void=void if insecure else "",
    )


def _committee(members: int) -> list[str]:
    """Return what the noise of a committee holds for."""
    honest = honest_members(members)
    return [
        f"of the {members} members of the noise committee at most {members - honest} tell the "
        "server their noise, also those whose state files are read or set back; the other "
        f"{honest} carry all of it, however many clients collude",
        "the operators of all nodes name the members and pin the keys of all nodes",
    ]


def _rests(plan: CentralDPNoisePlan) -> str:
    """Return what the cost of correlated noise holds for."""
    return (
        f"the noise of the {plan.rounds} rounds is correlated ({type(plan.correlated).__name__}): "
        f"a client takes part in at most {plan.releases} of them, at least {plan.separation} "
        "apart, which the server keeps to and each client checks"
    )


def _beyond_zero(plan: CentralDPNoisePlan) -> str:
    """Return what the rounds cost where data are replaced, and not only zeroed out."""
    charges = [as_replaced(plan.charge(1 + made)) for made in range(plan.releases)]
    epsilon = spent(charges, delta=plan.delta, accountant=fitting(charges))
    return (
        "a client whose data are replaced by any other, beyond what half the noise multiplier is "
        f"worth: epsilon {epsilon:.4g} for all rounds"
    )
