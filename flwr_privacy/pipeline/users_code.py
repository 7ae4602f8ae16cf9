"""Runs the user's code after its charge; what comes of a failure does not depend on the data.

Where a failure may count as a training that changed nothing, it does. Elsewhere the server is sent
one fixed text, once, and the node answers nothing more of the experiment until its operator acts.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from flwr_privacy.errors import (
    ChargedFailureError,
    DataError,
    DeclinedError,
    FlwrPrivacyError,
    ProtocolError,
)
from flwr_privacy.wire.frozen import FROZEN

from .node_store import NodeStore

__all__ = [
    "check_frozen",
    "check_going_on",
    "refused_alike",
    "run",
    "stop_answering",
    "stopped",
]

logger = logging.getLogger("flwr.privacy")

_STOPPED = "stopped"  # name of the note that ends an experiment for the node


def check_going_on(store: NodeStore, experiment_id: str) -> None:
    """Decline a request of an experiment that the node has stopped answering.

    Raises
    ------
    DeclinedError
        If it has.
    """
    if store.noted(experiment_id, _STOPPED) is not None:
        raise DeclinedError(
            "this node answers nothing more of this experiment until its operator acts"
        )


def check_frozen(store: NodeStore, experiment_id: str, fields: Mapping[str, Any]) -> None:
    """Keep what the first question of an experiment says of frozen weights, and hold others to it.

    The digest covers the names of all arrays that do not travel, so a server can change neither the
    base model nor which part of it is trained.

    Parameters
    ----------
    store : NodeStore
        What the node keeps for the client.
    experiment_id : str
        The experiment.
    fields : Mapping
        The scheme's own values of the question.

    Raises
    ------
    ProtocolError
        If another question said something else, or has said something where this one says nothing.
    LedgerError
        If the note cannot be read or written.
    """
    digest = fields.get(FROZEN, b"")
    if not isinstance(digest, bytes) or len(digest) not in (0, 32):
        raise ProtocolError(f"the field '{FROZEN}' is no SHA-256")
    told = digest.hex()
    noted = store.noted(experiment_id, FROZEN)
    if noted is None and told:
        # Of two questions at once, one is the first.
        store.change_note(experiment_id, FROZEN, lambda other: other or told)
        noted = store.noted(experiment_id, FROZEN)
    if (noted or "") != told:
        raise ProtocolError(
            "the question is about other frozen weights, or about another part of the model, than "
            "the first one of this experiment"
        )


def stop_answering(store: NodeStore, experiment_id: str) -> None:
    """Note that the node answers nothing more of an experiment, until its operator acts.

    Raises
    ------
    LedgerError
        If the note cannot be written.
    """
    store.note(experiment_id, _STOPPED, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))


def run(
    store: NodeStore,
    experiment_id: str,
    work: Callable[[], Any],
    failed: Callable[[], Any | None],
) -> Any:
    """Run the user's code after its charge and return its result.

    Parameters
    ----------
    store : NodeStore
        What the node keeps for the client.
    experiment_id : str
        Which experiment ends for the node if it fails and may not count as zero.
    work : callable
        The user's code, and what bounds its result.
    failed : callable
        Returns what counts where it fails, or None if nothing may.

    Raises
    ------
    ChargedFailureError
        If it fails where a failure may not count as zero, or where nobody's data are at stake.
    """
    try:
        return work()
    # Whatever the user's code raises may depend on its data, and so would an answer that says so.
    except Exception as error:
        instead = failed()
        if store.simulated and (instead is None or not isinstance(error, DataError)):
            reason = str(error) if isinstance(error, FlwrPrivacyError) else type(error).__name__
            raise ChargedFailureError(f"charged, and there is no answer: {reason}") from error
        if instead is None:
            raise stopped(store, experiment_id, error) from None
        logger.warning(
            "client %s: what it was asked failed and counts as zero: %s",
            *(store.client_id, error),
        )
        return instead


def stopped(store: NodeStore, experiment_id: str, error: Exception) -> ChargedFailureError:
    """Stop answering an experiment, and log why; return the error that the server is sent."""
    stop_answering(store, experiment_id)
    logger.error(
        "client %s answers nothing more of experiment %s: a training failed after it was charged "
        "(%s). What a server could learn from further failures is not covered. Mend it, then "
        "remove %s",
        *(store.client_id, experiment_id, error, store.note_path(experiment_id, _STOPPED)),
    )
    return ChargedFailureError(
        "charged, and there is no answer: this node answers nothing more of this experiment until "
        "its operator acts"
    )


def refused_alike(client_id: str, error: Exception) -> DataError:
    """Log why the user's code failed; return the one fixed error that the server is sent.

    Nobody is charged for a failure where an answer costs nothing, so nothing of it is told.
    """
    logger.error("client %s does not answer: %s", client_id, error, exc_info=error)
    return DataError(
        "the client's own code failed, or what it returned is not sent; the log of the node says "
        "how"
    )
