"""Finds primes: the moduli of fields."""

from flwr_privacy.errors import check_integer

__all__ = ["is_prime", "largest_prime_below"]

_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)
_WITNESSED = 3_317_044_064_679_887_385_961_981  # below, no composite passes all witnesses


def is_prime(n: int) -> bool:
    """Return whether an integer is a prime, for certain.

    Parameters
    ----------
    n : int
        At most about 3.3e24, up to where these witnesses are known to suffice.

    Raises
    ------
    InvalidParameterError
        If `n` is no integer or larger.

    Notes
    -----
    The test of Miller and Rabin with the first 13 primes (Sorenson and Webster, "Strong
    pseudoprimes to twelve prime bases", Mathematics of Computation 86, 2017).

    Examples
    --------
    >>> is_prime(2**31 - 1), is_prime(2**29 - 1)
    (True, False)
    """
    check_integer("n", n, maximum=_WITNESSED - 1)
    if n < 2:
        return False
    if any(n % prime == 0 for prime in _WITNESSES):
        return n in _WITNESSES
    odd, halvings = n - 1, 0
    while odd % 2 == 0:
        odd, halvings = odd // 2, halvings + 1
    return all(_passes(n, witness, odd, halvings) for witness in _WITNESSES)


def _passes(n: int, witness: int, odd: int, halvings: int) -> bool:
    power = pow(witness, odd, n)
    if power in (1, n - 1):
        return True
    for _ in range(halvings - 1):
        power = power * power % n
        if power == n - 1:
            return True
    return False


def largest_prime_below(n: int) -> int:
    """Return the largest prime below an integer of at least 3.

    Raises
    ------
    InvalidParameterError
        If there is none, or `n` is larger than `is_prime` takes.

    Examples
    --------
    >>> largest_prime_below(2**22)
    4194301
    """
    check_integer("n", n, minimum=3)
    return next(prime for prime in range(n - 1, 1, -1) if is_prime(prime))
