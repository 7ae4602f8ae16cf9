"""Refuses options of central DP that do not go together."""

from flwr_privacy.central_dp.sensitivity import SERVER
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.privacy.cohorts import drawn_alone
from flwr_privacy.secure_sum import SecureSum

__all__ = ["check_sum"]


def check_sum(secure_sum: SecureSum | None, *, noise: str, sampling: str) -> None:
    """Refuse a secure sum that does not go with how cohorts are drawn.

    Raises
    ------
    InvalidParameterError
        If it does not.
    """
    if secure_sum is None or not drawn_alone(sampling):
        return
    if noise == SERVER:
        raise InvalidParameterError(
            "secure_sum",
            secure_sum,
            f"None with noise = 'server' and sampling = '{sampling}': the clients of a secure sum "
            "know who takes part",
        )
    if isinstance(secure_sum, SecureSum) and secure_sum.threshold is not None:
        raise InvalidParameterError(
            "secure_sum.threshold",
            secure_sum.threshold,
            f"none with sampling = '{sampling}': the size of a cohort varies",
        )
