"""Reads from a node's configuration or environment how it runs clients."""

import os
from collections.abc import Mapping
from typing import Any

from flwr_privacy.wire.identity import CLIENT_ID_KEY

__all__ = ["COHORTS_VARIABLE", "may_run_any"]

COHORTS_VARIABLE = "FLWR_PRIVACY_COHORTS"
"""Environment variable that, set to 1 on a node, lets servers have it run several clients."""

_COHORTS_KEY = "cohorts"  # the same in a node's configuration


def may_run_any(node_config: Mapping[str, Any]) -> bool:
    """Tell whether the node lets a server choose the clients that it runs.

    Only the node's own configuration or environment can say so, and a node with a ``client-id``
    of its own never does: a server that names a node's identity could give it a second one.
    """
    if CLIENT_ID_KEY in node_config:
        return False
    return bool(node_config.get(_COHORTS_KEY)) or os.environ.get(COHORTS_VARIABLE) == "1"
