"""Answers the messages of this library on a node, for either kind of app.

A request reaches one client, or names several that the node is to run (a cohort); then the node
answers with their replies or with one accumulator.
"""

import logging
import os
from collections.abc import Callable

from flwr.app import Context, Error, Message

from flwr_privacy.clients.profiling import PROFILE_VARIABLE
from flwr_privacy.errors import (
    ChargedFailureError,
    DeclinedError,
    FlwrPrivacyError,
    LedgerError,
    RefusedPeersError,
)
from flwr_privacy.wire.identity import client_id_from
from flwr_privacy.wire.message import (
    COHORT,
    DECLINED_CODE,
    ERROR_CODE,
    FAILED_CODE,
    RECORD,
    REFUSED_PEERS_CODE,
    Header,
)

from .dispatch import App, built, config_record, run_client, untold

__all__ = ["answer", "or_refusal"]

logger = logging.getLogger("flwr.privacy")


def answer(app: App, message: Message, context: Context) -> Message:
    """Answer a message that carries the record ``flwr-privacy``.

    What a server or a configuration did wrong becomes an error reply with its reason; one for the
    user's own code says that it failed, and the log of the node says how.
    """

    def reply() -> Message:
        header, _ = Header.read(config_record(message.content, RECORD))
        if COHORT in message.content:
            from .cohort import run_cohort  # late: most nodes run one client

            content = run_cohort(app, header, message, context)
        else:
            client_id = client_id_from(context.node_config)
            content = run_client(app, built(app, context), client_id, message, context)
        return Message(content, reply_to=message)

    if os.environ.get(PROFILE_VARIABLE):
        from flwr_privacy.clients.profiling.recorder import (
            of_worker,  # late: most runs have no profile
        )

        return or_refusal(of_worker(reply, message), message)
    return or_refusal(reply, message)


def or_refusal(reply: Callable[[], Message], message: Message) -> Message:
    """Return a reply to a message, or an error reply that says why there is none."""
    try:
        return reply()
    except DeclinedError as error:
        return Message(Error(DECLINED_CODE, str(error)), reply_to=message)
    except ChargedFailureError as error:
        return Message(Error(FAILED_CODE, str(error)), reply_to=message)
    except RefusedPeersError as error:
        logger.warning("refused in a secure sum: %s", error)
        return Message(Error(REFUSED_PEERS_CODE, " ".join(error.peers)), reply_to=message)
    except LedgerError as error:
        return Message(Error(ERROR_CODE, untold(error)), reply_to=message)
    except FlwrPrivacyError as error:
        return Message(Error(ERROR_CODE, str(error)), reply_to=message)
