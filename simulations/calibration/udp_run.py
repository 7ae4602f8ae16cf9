"""The plan of a run of UDP; without torch, so that whoever only calibrates needs no extra."""

from flwr_privacy.evaluation import PrivateEvaluation
from flwr_privacy.strategies import UDP
from flwr_privacy.strategies.udp.option_checks import check_evaluated
from flwr_privacy.udp import DPSGD, RecordLevel, UserLevel
from flwr_privacy.udp.plan import UDPPlan

__all__ = ["run_plan"]


def run_plan(
    privacy: UserLevel | RecordLevel | DPSGD,
    evaluation: PrivateEvaluation | None = None,
    *,
    rounds: int,
    q: float,
    evaluation_q: float = 1.0,
) -> UDPPlan:
    """Return the plan of a run of UDP without a secure sum.

    Parameters
    ----------
    privacy : UserLevel, RecordLevel or DPSGD
        What is protected, with its budget.
    evaluation : PrivateEvaluation, optional
        What clients say of the model; by default nothing.
    rounds : int
        Rounds.
    q, evaluation_q : float
        Fractions of the clients that are asked in a round, and in an evaluation.

    Raises
    ------
    InvalidParameterError
        If the evaluation does not go with what is protected.
    """
    check_evaluated(privacy, None, evaluation)
    asked = 0.0 if evaluation is None else evaluation_q
    return UDPPlan(
        privacy,
        None,
        (),
        evaluation,
        rounds=rounds,
        q=q,
        evaluation_q=asked,
        cohorts=UDP.client_sampling,
    )
