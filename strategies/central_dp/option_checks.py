"""Refuses options of central DP that do not go together."""

from typing import Any

from flwr_privacy.central_dp.sensitivity import SERVER
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.privacy.cohorts import drawn_alone
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.secure_sum.settings import COMPLETE_UP_TO

__all__ = ["check_committee", "check_committee_sum", "check_sum"]


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


def check_committee(secure_sum: SecureSum | None, **beside: Any) -> None:
    """Refuse what does not go with a noise committee.

    Parameters
    ----------
    secure_sum : SecureSum, optional
        The secure sum, which needs a threshold: see `check_committee_sum`.
    **beside
        Options that have to be None, by their names.

    Raises
    ------
    InvalidParameterError
        If there is something.
    """
    for name, value in beside.items():
        if value is not None:
            raise InvalidParameterError(
                name, value, "None with a committee: all members have to be in every sum"
            )
    if secure_sum is None or secure_sum.threshold is None:
        raise InvalidParameterError(
            "secure_sum.threshold",
            None,
            "two thirds of the clients and members of a round, with a committee",
        )


def check_committee_sum(secure_sum: SecureSum, nodes: int) -> None:
    """Refuse a secure sum whose server could open it without a member of the committee.

    Parameters
    ----------
    secure_sum : SecureSum
        Its parameters.
    nodes : int
        Clients and members of a round.

    Raises
    ------
    InvalidParameterError
        If not everybody shares masks with everybody, or a server that lies about who is missing may
        open a client's answer alone.
    """
    threshold, colluders = secure_sum.threshold_of(nodes), secure_sum.colluders_of(nodes)
    if nodes > COMPLETE_UP_TO and (secure_sum.neighbours or 0) < nodes - 1:
        allowed = f"{nodes - 1 + nodes % 2} with a committee: a client has to see all members"
        raise InvalidParameterError("secure_sum.neighbours", secure_sum.neighbours, allowed)
    if 3 * threshold < 2 * nodes or colluders >= 2 * threshold - nodes:
        allowed = (
            f"at least {max(-(-2 * nodes // 3), (nodes + colluders) // 2 + 1)} of the {nodes} "
            "clients and members of a round, with a committee: a server that lies about who is "
            "missing could open the answer of a single client"
        )
        raise InvalidParameterError("secure_sum.threshold", threshold, allowed)
