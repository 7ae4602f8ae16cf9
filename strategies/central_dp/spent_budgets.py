"""Counts which clients of a training under central DP have used up their budget."""

from collections import Counter
from collections.abc import Collection, Iterable

from flwr_privacy.central_dp.plan import CentralDPNoisePlan
from flwr_privacy.privacy.card import CardRelease
from flwr_privacy.wire.message import TRAIN

__all__ = ["participations_of", "spent_clients", "why_too_few"]


def spent_clients(plan: CentralDPNoisePlan, releases: Iterable[CardRelease]) -> set[str]:
    """Return the clients that were charged for as many trainings as their budget allows.

    Parameters
    ----------
    plan : CentralDPNoisePlan
        The budget.
    releases : iterable of CardRelease
        Every charge so far.
    """
    counts = participations_of(releases)
    return {client for client, count in counts.items() if not plan.affordable(count)}


def participations_of(releases: Iterable[CardRelease]) -> Counter[str]:
    """Return how many trainings each client was charged for; 0 for any other."""
    trainings = (release for release in releases if release.phase == TRAIN)
    return Counter(client for release in trainings for client in release.clients)


def why_too_few(
    plan: CentralDPNoisePlan,
    releases: Iterable[CardRelease],
    clients: Collection[str],
    spent: Collection[str],
    *,
    needed: int,
) -> str:
    """Return why a training ends: too few clients have budget left; "" if enough have.

    Parameters
    ----------
    plan, releases
        As in `spent_clients`.
    clients : collection of str
        The connected clients.
    spent : collection of str
        Those whose budget is used up.
    needed : int
        Least number of clients in a round.
    """
    # Whoever was ever asked may come back.
    asked = {client for release in releases for client in release.clients}
    left = len(asked.union(clients).difference(spent))
    if not spent or left >= needed:
        return ""
    text = f"the {plan.releases} releases that the budget is for"
    return f"{len(spent)} clients have made {text}, and {left} are left of {needed} needed"
