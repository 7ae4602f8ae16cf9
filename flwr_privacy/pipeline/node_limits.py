"""Limits the releases of a node and the disk space of a client, whatever the releases cost."""

import logging
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from flwr_privacy.errors import DeclinedError

from .node_store import NodeStore

if TYPE_CHECKING:
    from flwr_privacy.privacy.ledger import LedgerView

__all__ = ["check_disk", "check_limits"]

logger = logging.getLogger("flwr.privacy")

_DAY = timedelta(days=1)


def check_limits(store: NodeStore, ledger: "LedgerView") -> None:
    """Decline one more release than the node's operator allows, whatever it costs.

    Parameters
    ----------
    store : NodeStore
        What the node keeps for the client.
    ledger : LedgerView
        The ledger so far.

    Raises
    ------
    DeclinedError
        If it is.
    """
    policy = store.policy
    if policy.max_releases is not None and ledger.count >= policy.max_releases:
        raise _over(store, "max_releases", policy.max_releases)
    if policy.max_releases_per_day is not None:
        today = ledger.charged_since(datetime.now(UTC) - _DAY)
        if today >= policy.max_releases_per_day:
            raise _over(store, "max_releases_per_day", policy.max_releases_per_day)
    check_disk(store)


def check_disk(store: NodeStore, size: int = 0) -> None:
    """Decline a request that adds a file if the client's disk space would be used up.

    Parameters
    ----------
    store : NodeStore
        What the node keeps for the client.
    size : int, default 0
        Bytes of the file, where a server chooses how many.

    Raises
    ------
    DeclinedError
        If it is.
    """
    limit = store.policy.max_disk
    if limit is not None and store.disk() + size >= limit:
        raise _over(store, "max_disk", limit)


def _over(store: NodeStore, name: str, limit: int) -> DeclinedError:
    text = f"this release would pass the node's policy: {name} = {limit}"
    logger.warning("client %s declines: %s", store.client_id, text)
    return DeclinedError(text)
