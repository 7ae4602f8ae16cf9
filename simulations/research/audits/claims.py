"""What the ledgers of a training claim, and how often its clients answered."""

import math
from collections import Counter
from collections.abc import Sequence

from flwr_privacy.accounting import Charge, fitting, spent

from .observed import Claim
from .training import Heard, Reply

__all__ = [
    "DELTA",
    "charge_of",
    "charged",
    "claim_of",
    "most_answered",
    "phases",
    "uncharged",
]

DELTA = 1e-5
"""Delta of all audits."""


def claim_of(
    charges: Sequence[Charge], *, budget: float, turn: float, delta: float = DELTA
) -> Claim:
    """Return what the charges of one client claim; without charges nothing.

    Parameters
    ----------
    charges : sequence of Charge
        Of the client that was charged most.
    budget, delta : float
        What the training was asked not to exceed.
    turn : float
        How many reaches of a canary neighbours are apart.
    """
    epsilon = math.inf
    if charges:
        epsilon = spent(charges, delta=delta, accountant=fitting(charges))
    return Claim(epsilon=epsilon, delta=delta, budget=budget, charged=len(charges), turn=turn)


def charge_of(heard: Heard, reply: Reply) -> Charge:
    """Return the charge for an answer: that of its place in the ledger of its client."""
    own = [one for one in heard.replies if one.client == reply.client]
    place = next(i for i, one in enumerate(own) if one is reply)
    charges = heard.charges[reply.client]
    return charges[min(place, len(charges) - 1)]  # of an answer that was not charged, the last


def charged(heard: Heard) -> list[Reply]:
    """Return the answers of clients that have a ledger: what others paid for, nobody can say."""
    return [reply for reply in heard.replies if heard.charges.get(reply.client)]


def uncharged(heard: Heard) -> tuple[str, ...]:
    """Return the clients that gave more answers than their ledgers have charges."""
    answers = Counter(reply.client for reply in heard.replies)
    return tuple(
        f"client {client}: {count} answers, {len(heard.charges.get(client, []))} charges"
        for client, count in sorted(answers.items())
        if count > len(heard.charges.get(client, []))
    )


def most_answered(heard: Heard) -> dict[str, int]:
    """Return how many answers the client gave that gave most, by their phase."""
    answers = Counter(reply.client for reply in heard.replies)
    if not answers:
        return {}
    client, _ = answers.most_common(1)[0]
    return phases([reply for reply in heard.replies if reply.client == client])


def phases(replies: Sequence[Reply]) -> dict[str, int]:
    """Return how many answers there are of each phase."""
    return dict(Counter(reply.phase for reply in replies))
