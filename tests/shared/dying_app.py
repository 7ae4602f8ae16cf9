"""Apps whose process is killed: in the middle of a cohort, once or always; between two steps."""

import os
import signal
from pathlib import Path

from apps import message_app
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable

from flwr_privacy.clients import MSPDQClient, UDPClient, as_mod
from flwr_privacy.mspdq import MIX
from flwr_privacy.wire.message import RECORD, Header

# environment: a folder; "once" or "always" in it name a client, "mix" is there for one death
VICTIM = "VICTIM"


def killed(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    folder, client = Path(os.environ[VICTIM]), str(context.node_config["partition-id"])
    once, always = folder / "once", folder / "always"
    for marker in (once, always):
        if _names(marker, client):
            if marker == once:
                marker.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
    return call_next(message, context)


def _names(marker: Path, client: str) -> bool:
    try:
        return marker.read_text() == client
    except FileNotFoundError:  # another worker has taken it away, perhaps this very moment
        return False


app: ClientApp = message_app([as_mod(UDPClient), killed])


def killed_while_mixing(
    message: Message, context: Context, call_next: ClientAppCallable
) -> Message:
    header, _ = Header.read(message.content[RECORD])
    marker = Path(os.environ[VICTIM], "mix")
    if header.phase == MIX and marker.exists():
        marker.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return as_mod(MSPDQClient)(message, context, call_next)


mixing: ClientApp = message_app([killed_while_mixing])
