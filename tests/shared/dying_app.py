"""An app under UDP whose process is killed in the middle of a cohort, once or always."""

import os
import signal
from pathlib import Path

from apps import message_app
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable

from flwr_privacy.clients import UDPClient, as_mod

VICTIM = "VICTIM"  # environment: a folder; "once" or "always" in it name a client


def killed(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    folder, client = Path(os.environ[VICTIM]), str(context.node_config["partition-id"])
    once, always = folder / "once", folder / "always"
    for marker in (once, always):
        if marker.exists() and marker.read_text() == client:
            if marker == once:
                marker.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
    return call_next(message, context)


app: ClientApp = message_app([as_mod(UDPClient), killed])
