"""Computes the validation loss that a schedule of UDP follows: on the server, or by the clients."""

from functools import partial

import numpy as np
from flwr.app import ArrayRecord

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.privacy.averaging import WeightedMean
from flwr_privacy.strategies.requests.instruction import Instruction, to_each
from flwr_privacy.udp import ClientLosses, NoiseSchedule, UDPPlan
from flwr_privacy.wire import fields as records

__all__ = ["client_losses", "server_loss"]


def server_loss(
    schedule: NoiseSchedule | None, server_round: int, arrays: ArrayRecord | None
) -> float | None:
    """Return the loss of a model by the schedule's function on the server.

    Parameters
    ----------
    schedule : NoiseSchedule, optional
        The schedule; None follows no losses.
    server_round : int
        The round.
    arrays : ArrayRecord, optional
        The model that it led to; None if it led to none.

    Returns
    -------
    float or None
        The loss; None if there is no such function, or no model.

    Raises
    ------
    InvalidParameterError
        If the function returns no number.
    """
    loss_of = None if schedule is None else schedule.validation
    if arrays is None or loss_of is None or isinstance(loss_of, ClientLosses):
        return None
    loss = loss_of(server_round, arrays)
    if isinstance(loss, bool) or not isinstance(loss, int | float | np.number):
        allowed = "a function that returns a number"
        raise InvalidParameterError("validation", type(loss).__name__, allowed)
    return float(loss)


def client_losses(plan: UDPPlan) -> Instruction:
    """Return the instruction of the request for the clients' losses."""
    return Instruction(
        fields=records.write(plan.loss_terms()),
        own=to_each({c: records.write(plan.loss_terms(c)) for c in plan.privacy.named()}),
        accumulator=partial(WeightedMean, {}),
        cost=lambda client: plan.loss_terms(client).charge(),
    )
