"""What shall go wrong in a run, and files by which its processes tell each other what has happened.

Nothing waits for a time: whoever has to wait waits for a file.
"""

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import RecordDict


class PlannedFaults:
    """Faults by round and client, and the folder for files.

    Parameters
    ----------
    run_config : mapping
        Has the faults as JSON (``[round, client, fault]``, ...) under ``plan`` and the folder under
        ``marks``.
    """

    def __init__(self, run_config: Mapping[str, Any]) -> None:
        strikes = json.loads(str(run_config["plan"]) or "[]")
        self.strikes = {(server_round, client): fault for server_round, client, fault in strikes}
        self.folder = Path(str(run_config["marks"]))

    def mark(self, name: str) -> None:
        """Say that something has happened."""
        (self.folder / name).touch()

    def marked(self, name: str) -> bool:
        """Tell whether it has."""
        return (self.folder / name).exists()

    def wait(self, name: str) -> None:
        """Wait until it has; whoever waits for the run ends what waits in vain."""
        while not self.marked(name):
            time.sleep(0.05)

    def request(self, verb: str, client: str, server_round: int) -> str:
        """Ask the test to do something with a process; return the mark that says that it is done.

        What was done in an earlier run is not asked for again.
        """
        name = f"{verb}.{client}.{server_round}"
        if not self.marked(f"{name}.done"):
            self.mark(name)
        return f"{name}.done"

    def note(self, kind: str, *parts: object) -> None:
        """Note something under a name made of its parts."""
        folder = self.folder / kind
        folder.mkdir(exist_ok=True)
        (folder / ".".join(map(str, parts))).touch()


def digest_of(content: RecordDict) -> str:
    """Return a digest of the arrays and metrics of an answer."""
    digest = hashlib.sha256()
    for name, record in sorted(content.array_records.items()):
        for key, array in record.items():
            digest.update(f"{name} {key}".encode() + array.data)
    for name, metrics in sorted(content.metric_records.items()):
        digest.update(repr((name, dict(metrics))).encode())
    return digest.hexdigest()[:16]
