"""Asks the judge of UDP's model on the server: the validation loss that a schedule follows."""

import numpy as np
from flwr.app import ArrayRecord

from flwr_privacy.errors import CheckpointError, InvalidParameterError, ProtocolError
from flwr_privacy.udp import ClientLosses, NoiseSchedule

__all__ = ["Judge"]

_SERVER, _CLIENTS = "server", "clients"


class Judge:
    """Who says how good the model is, as the schedule has it.

    Parameters
    ----------
    schedule : NoiseSchedule, optional
        The schedule; None follows no losses.

    Attributes
    ----------
    by : {"", "server", "clients"}
        Who it is; "" where nobody is asked.
    """

    def __init__(self, schedule: NoiseSchedule | None) -> None:
        judge = None if schedule is None else schedule.judge
        self._loss_of = None if isinstance(judge, ClientLosses) else judge
        self.by = "" if judge is None else _SERVER if self._loss_of else _CLIENTS

    @property
    def is_server(self) -> bool:
        """Whether a function on the server is asked."""
        return self.by == _SERVER

    @property
    def are_clients(self) -> bool:
        """Whether the clients are."""
        return self.by == _CLIENTS

    def loss(self, server_round: int, arrays: ArrayRecord | None) -> float:
        """Return the loss of a model by the function on the server.

        Raises
        ------
        ProtocolError
            If there is none.
        InvalidParameterError
            If it returns no number.
        """
        if self._loss_of is None or arrays is None:
            raise ProtocolError("there is no judge on the server")
        loss = self._loss_of(server_round, arrays)
        if isinstance(loss, bool) or not isinstance(loss, int | float | np.number):
            raise InvalidParameterError("judge", type(loss).__name__, "a function to a number")
        return float(loss)

    def check_same(self, by: str) -> None:
        """Refuse the checkpoint of a training whose models another one judged.

        Raises
        ------
        CheckpointError
            If it is.
        """
        if by != self.by:
            raise CheckpointError(f"the checkpoint's models were judged by {by!r}, not {self.by!r}")
