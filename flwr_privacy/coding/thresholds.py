"""How many answers decode a Lagrange code, and how many segments that allows.

Symbols: N holders, K segments, T masks, S stragglers; the degree is the total degree of what is
computed on the shares.
"""

from flwr_privacy.errors import InvalidParameterError, check_integer

__all__ = [
    "check_holders",
    "max_partitions",
    "max_stragglers",
    "recovery_threshold",
    "usual_partitions",
]


def recovery_threshold(K: int, T: int, degree: int = 2) -> int:
    """Return the number of answers that decode: ``degree (K + T - 1) + 1`` (FedVS, Theorem 5.1).

    Parameters
    ----------
    K, T : int
        Segments and masks, at least 1.
    degree : int, default 2
        Total degree of what is computed on the shares, at least 1; a product of two has 2.

    Raises
    ------
    InvalidParameterError
        If one of them is less than 1.

    Examples
    --------
    >>> recovery_threshold(6, 1)
    13
    """
    _check_counts(K=K, T=T, degree=degree)
    return degree * (K + T - 1) + 1


def max_stragglers(N: int, K: int, T: int, degree: int = 2) -> int:
    """Return how many of N holders may fail to answer.

    Raises
    ------
    InvalidParameterError
        If a parameter is less than 1, or N holders are too few.

    Examples
    --------
    >>> max_stragglers(28, 6, 1)
    15
    """
    check_holders(N, K, T, degree)
    return N - recovery_threshold(K, T, degree)


def max_partitions(N: int, S: int, T: int) -> int:
    """Return the largest K for products of two, where S of N holders may fail to answer.

    Raises
    ------
    InvalidParameterError
        If there is none, or a parameter is out of range.

    Examples
    --------
    >>> max_partitions(28, 14, 1)
    6
    """
    _check_counts(N=N, T=T)
    check_integer("S", S, minimum=0, maximum=N - 1)
    K = _fitting(N, S, T)
    if K < 1:
        raise InvalidParameterError(
            "N", N, f"at least S + 2 T + 1 = {S + 2 * T + 1} for S = {S} stragglers and T = {T}"
        )
    return K


def usual_partitions(N: int, T: int) -> int:
    """Return the most segments with which half of the clients may straggle; at least 1.

    Parameters
    ----------
    N, T : int
        Clients, and how many of them may collude; at least 1.

    Examples
    --------
    >>> [usual_partitions(N, 1) for N in (28, 10, 6, 3)]
    [6, 2, 1, 1]
    """
    check_integer("N", N, minimum=1)
    check_integer("T", T, minimum=1)
    return max(1, _fitting(N, N // 2, T))


def check_holders(N: int, K: int, T: int, degree: int) -> None:
    """Refuse fewer holders than the answers that decode, and counts below 1."""
    _check_counts(N=N, K=K, T=T, degree=degree)
    needed = recovery_threshold(K, T, degree)
    if needed > N:
        raise InvalidParameterError(
            "N", N, f"at least R = {degree} (K + T - 1) + 1 = {needed} for K = {K}, T = {T}"
        )


def _fitting(N: int, S: int, T: int) -> int:
    """Return the largest K whose products decode from N - S answers; below 1 if there is none."""
    return (N - S - 1) // 2 + 1 - T


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        check_integer(name, count, minimum=1)
