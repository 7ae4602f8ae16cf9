"""Tells the operator of a node, once per training, how far the update of a client is clipped."""

import logging
from typing import Any

from .node_store import NodeStore
from .request import Request

__all__ = ["log_clipped"]

logger = logging.getLogger("flwr.privacy")

_MUCH = 0.1  # shorter than this part of its length, most of an update is lost
_TOLD = set[str]()  # experiments, by this process


def log_clipped(store: NodeStore, request: Request, measured: Any) -> None:
    """Log by how much an update was clipped, if it is the first of its experiment that was.

    This stays in the log of the node: it depends on the data, and the server is not told. Of many
    simulated clients one is enough.

    Parameters
    ----------
    store, request
        As of `flwr_privacy.pipeline.answer.answer`.
    measured : Any
        What came of the training.
    """
    experiment = request.question.experiment_id
    from flwr_privacy.privacy.updates import Update  # late: without privacy there is none

    update = getattr(measured, "update", measured)  # some measure counts beside it
    if not isinstance(update, Update) or update.factor == 1 or experiment in _TOLD:
        return
    _TOLD.add(experiment)
    # A node may run each message in a new process.
    if not store.simulated and store.ledger.head(experiment).count > 1:
        return
    much = update.factor < _MUCH
    logger.log(
        logging.WARNING if much else logging.INFO,
        "client %s: its update was clipped to %.2g of its length. Fewer local steps or a smaller "
        "learning rate keep more of it; a larger clipping norm does with as much more noise",
        *(store.client_id, update.factor),
    )
