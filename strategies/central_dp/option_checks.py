"""Refuses options of central DP that do not go together."""

from flwr_privacy.central_dp.sensitivity import DISTRIBUTED, POISSON, SERVER
from flwr_privacy.errors import InvalidParameterError, check_integer, check_number
from flwr_privacy.privacy.adaptive_clipping import LARGEST_SHARE, next_clipping_norm
from flwr_privacy.secure_sum import SecureSum

__all__ = ["check_clipping", "check_seed", "check_sum"]


def check_clipping(
    quantile: float | None, clipping_learning_rate: float, count_share: float
) -> None:
    """Refuse options of adaptive clipping, if there is any, that are out of range.

    Raises
    ------
    InvalidParameterError
        If one is.
    """
    if quantile is None:
        return
    next_clipping_norm(1.0, 0.5, quantile=quantile, learning_rate=clipping_learning_rate)
    check_number("count_share", count_share, minimum=1e-6, maximum=LARGEST_SHARE)


def check_seed(insecure_seed: int | None, *, noise: str) -> None:
    """Refuse a seed of the server's noise that is none, or where the clients draw the noise.

    Raises
    ------
    InvalidParameterError
        If it is such a seed.
    """
    if insecure_seed is None:
        return
    if noise == DISTRIBUTED:
        allowed = "None: the clients draw the noise"
        raise InvalidParameterError("insecure_seed", insecure_seed, allowed)
    check_integer("insecure_seed", insecure_seed, minimum=0)


def check_sum(secure_sum: SecureSum | None, *, noise: str, sampling: str) -> None:
    """Refuse a secure sum that does not go with how cohorts are drawn.

    Raises
    ------
    InvalidParameterError
        If it does not.
    """
    if secure_sum is None or sampling != POISSON:
        return
    if noise == SERVER:
        raise InvalidParameterError(
            "secure_sum",
            secure_sum,
            "None with noise = 'server' and sampling = 'poisson': the clients of a secure sum "
            "know who takes part",
        )
    if isinstance(secure_sum, SecureSum) and secure_sum.threshold is not None:
        raise InvalidParameterError(
            "secure_sum.threshold",
            secure_sum.threshold,
            "none with sampling = 'poisson': the size of a cohort varies",
        )
