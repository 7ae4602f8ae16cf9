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
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from flwr_privacy.coding.lagrange import LagrangeCode, rank_mod_p
from flwr_privacy.errors import InvalidParameterError, check_integer

__all__ = [
    "SLACK_BITS",
    "batch_rank",
    "check_rank",
    "privacy_matrix_rank",
    "server_view_is_tight",
    "server_view_warning",
    "slack",
]

SLACK_BITS = 64
"""What `check_rank` wants: random masks fail the condition with a probability below 2**-64."""


# Holders


def privacy_matrix_rank(code: LagrangeCode, coalition: Sequence[int]) -> int:
    """Return the rank, modulo p, of the columns of the masks in the rows of some holders.

    Parameters
    ----------
    code : LagrangeCode
        The code.
    coalition : sequence of int
        Positions of the holders, from 0.

    Returns
    -------
    int
        If it is the number of holders, their shares are uniform whatever is shared (FedVS, Theorem
        5.2). It is at most T.
    """
    return code.privacy_matrix_rank(coalition)


# The server


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


def server_view_is_tight(b: int, K: int, T: int, E: int) -> bool:
    """Return whether a batch is small enough for the server to see the sums and nothing more.

    It is a necessary condition for answers without masks that vanish. It is not sufficient: rows
    that repeat, are zero, or depend on one another otherwise break the condition, whatever E is.
    `batch_rank` decides on given rows.

    Parameters
    ----------
    b, K, T, E
        As of `slack`.

    Examples
    --------
    >>> server_view_is_tight(43, 6, 1, 784), server_view_is_tight(256, 6, 1, 784)
    (True, False)
    """
    return slack(b, K, T, E) >= 0


def server_view_warning(b: int, K: int, T: int, E: int) -> str:
    """Return the warning about a batch that is not tight; empty if it is.

    Parameters
    ----------
    b, K, T, E
        As of `slack`.

    Examples
    --------
    >>> server_view_warning(16, 2, 1, 46)
    'the answers to a batch of 16 coded rows give the server more than the sums: (K + T) b = 48 is \
above the 46 columns of all clients; use zero masks, or batches of at most 15 coded rows'
    """
    if server_view_is_tight(b, K, T, E):
        return ""
    most = E // (K + T)
    smaller = f", or batches of at most {most} coded rows" if most else ""
    return (
        f"the answers to a batch of {b} coded rows give the server more than the sums: "
        f"(K + T) b = {(K + T) * b} is above the {E} columns of all clients; use zero masks"
        + smaller
    )


def batch_rank(rows: NDArray[Any], p: int) -> int:
    """Return the rank of rows modulo p.

    Of the rows of a batch of all owners, side by side, the condition wants ``K b``: that is for
    tests, as no party has them. Of one owner's data it says how many of its columns count.

    Parameters
    ----------
    rows : (m, E) ndarray of integers
        Elements, or signed integers.
    p : int
        The prime.
    """
    return rank_mod_p(rows, p)


def check_rank(
    *, b: int, K: int, T: int, E: int, p: int, ranks: Sequence[int] | None = None
) -> list[str]:
    """Refuse batches whose answers without zero masks are not protected; return a warning.

    Parameters
    ----------
    b, K, T, E
        As of `slack`.
    p : int
        The prime, at least 3.
    ranks : sequence of int, optional
        Rank of each owner's data, by `batch_rank`. Default: not known.

    Returns
    -------
    list of str
        Warnings. What remains unknown is whether the rows of each batch are independent.

    Raises
    ------
    InvalidParameterError
        If ``slack * log2(p)`` is below 64, or the rows of a batch cannot be independent as there
        are more of them than the owners' ranks add up to.

    Notes
    -----
    Masks fail the condition with a probability of about ``p ** -(slack + 1)`` where the data rows
    meet it. With a small slack the leak is small in one round; as the masks of the data stay the
    same, it adds up over rounds.
    """
    check_integer("p", p, minimum=3)
    spare = slack(b, K, T, E)
    if spare * math.log2(p) < SLACK_BITS:
        needed = math.ceil(SLACK_BITS / math.log2(p))
        allowed = f"(K + T) b of at most E - {needed} = {E - needed} without zero masks"
        raise InvalidParameterError("(K + T) b", (K + T) * b, allowed)
    warnings = ["whether the rows of a batch are independent is not known to anyone"]
    if ranks is None:
        return warnings
    total = 0
    for rank in ranks:
        total += check_integer("ranks", rank, minimum=0)
    if K * b > total:
        allowed = f"at most {total}, the sum of the ranks of the clients' data, without zero masks"
        raise InvalidParameterError("K b", K * b, allowed)
    if total < E:
        warnings.append(f"the ranks of the clients' data add up to {total}, not to {E} columns")
    return warnings
