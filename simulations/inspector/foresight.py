"""Makes the forecast of a training before there is one: a stand-in of the app says hello only.

The strategy is the one that the change puts into the app. It runs inline with clients that never
train, and is stopped when it has made the forecast for its first round.
"""

import logging
from typing import NoReturn

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

import flwr_privacy.clients
from flwr_privacy.errors import FlwrPrivacyError
from flwr_privacy.simulations.engines.inline import run_inline
from flwr_privacy.simulations.engines.quiet import quiet
from flwr_privacy.strategies import LoopOptions
from flwr_privacy.strategies.requests.instruction import Instruction

from .arrays import Arrays
from .wraps import Wrap

__all__ = ["forecast_of"]


class ForeseenError(BaseException):
    """The forecast is made; nothing of the library's catches it."""


def forecast_of(wrap: Wrap, found: Arrays, *, clients: int) -> str:
    """Return the forecast of an app's training with a scheme, or why there is none.

    Parameters
    ----------
    wrap : Wrap
        The scheme.
    found : Arrays
        What the app starts from.
    clients : int
        The number of clients.
    """
    if not wrap.spends:
        return ""
    made: list[str] = []
    try:
        strategy = wrap.build(
            fraction_train=found.fraction_train,
            min_train_nodes=min(found.min_train_nodes, clients),
            min_available_nodes=1,
            loop=LoopOptions(clients=clients, write_card=False),
        )
    except FlwrPrivacyError as error:
        return f"forecast: there is none: {error}"
    foresee = strategy._foresee

    def stop(instruction: Instruction) -> NoReturn:
        foresee(instruction)
        made.append(strategy.charge_log.forecast)
        raise ForeseenError

    strategy._foresee = stop  # type: ignore[method-assign]
    server = ServerApp()
    client: ClientApp = getattr(flwr_privacy.clients, wrap.client_app)()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        arrays = {a.name: Array(np.ones(a.shape, a.dtype)) for a in found.arrays}
        strategy.start(grid, ArrayRecord(arrays), num_rounds=max(1, found.rounds))

    @client.train()
    def train(message: Message, context: Context) -> Message:
        raise AssertionError("nobody is asked to train")

    try:
        with quiet(logging.ERROR):  # the forecast is what is returned
            run_inline(server, client, nodes=1)
    except ForeseenError:
        return made[0]
    except FlwrPrivacyError as error:
        return f"forecast: there is none: {error}"
    return "forecast: there is none"
