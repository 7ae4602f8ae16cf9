"""Checks the conditions under which coalitions and the server see no more than they should.

The server decodes more than it needs: all of a polynomial of degree ``2 (K + T - 1)``, of which
only the values at K nodes are meant for it. Without masks that vanish at these nodes the rest says
nothing if the batch's rows of all K segments and T masks, one below the other, are linearly
independent modulo p, and shares of weights serve one batch only. The matrix has ``(K + T) b`` rows
and E columns, of all owners together. FedVS, Theorem 5.3, is on a single answer and has no such
condition.

Source: "FedVS: Straggler-Resilient and Privacy-Preserving Vertical Federated Learning for Split
Models" (ICML 2023), section 5.1. The conditions are not in the paper.
"""

import math

from flwr_privacy.errors import InvalidParameterError, check_integer

__all__ = [
    "SLACK_BITS",
    "check_slack",
    "slack",
]

SLACK_BITS = 64
"""What `check_slack` wants: random masks fail the condition with a probability below 2**-64."""


def slack(b: int, K: int, T: int, E: int) -> int:
    """Return ``E - (K + T) b``, the margin of the condition on the server's view in columns.

    Parameters
    ----------
    b : int
        Coded rows of a batch, at least 1.
    K, T : int
        Parameters of the code, at least 1.
    E : int
        Columns of all owners' expanded data together, at least 1.

    Examples
    --------
    >>> slack(43, 6, 1, 784)
    483
    """
    check_integer("b", b, minimum=1)
    check_integer("K", K, minimum=1)
    check_integer("T", T, minimum=1)
    check_integer("E", E, minimum=1)
    return E - (K + T) * b


def check_slack(*, b: int, K: int, T: int, E: int, p: int) -> None:
    """Refuse batches whose answers, without zero masks, give the server more than the sums.

    Parameters
    ----------
    b, K, T, E
        As of `slack`.
    p : int
        The prime, at least 3.

    Raises
    ------
    InvalidParameterError
        If ``slack * log2(p)`` is below 64.

    Notes
    -----
    Masks fail the condition with a probability of about ``p ** -(slack + 1)`` where the data rows
    meet it; no party can check that they do. With a small slack the leak is small in one round; as
    the masks of the data stay the same, it adds up over rounds.
    """
    check_integer("p", p, minimum=3)
    if slack(b, K, T, E) * math.log2(p) < SLACK_BITS:
        needed = math.ceil(SLACK_BITS / math.log2(p))
        allowed = f"(K + T) b of at most E - {needed} = {E - needed} without zero masks"
        raise InvalidParameterError("(K + T) b", (K + T) * b, allowed)
