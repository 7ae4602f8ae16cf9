"""Runs an app once, inline and without a network, and writes a transcript: a process of its own.

`python -m flwr_privacy.simulations.research.app_audit.probe` reads what to run from its input.
"""

import importlib
import json
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from flwr.app import Message
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from flwr_privacy.privacy.card.folder import RUNS_VARIABLE
from flwr_privacy.simulations.engines.inline.flower_internals import records_to_bytes
from flwr_privacy.simulations.engines.inline.grid import InlineGrid
from flwr_privacy.simulations.engines.inline.run import run_on
from flwr_privacy.wire.message import RECORD

from .declared import watch_mechanisms
from .instruments import Inside, Replace, watch
from .offline import disconnect
from .transcript import CARDS, ENOUGH, Transcript, TranscriptWriter

__all__ = ["EnoughError", "RecordingGrid", "main", "probe"]

MOST_BYTES = 2 << 30
"""Size of a transcript at which the run is stopped."""

_PATIENCE = 10.0  # seconds that a server may ask for nodes and send nothing


class EnoughError(BaseException):
    """The audit has seen enough; no `except Exception` of the app's catches it."""


class RecordingGrid(InlineGrid):
    """A grid that writes a transcript.

    Parameters
    ----------
    client_app : ClientApp
        The app's client half.
    nodes : int
        Number of nodes.
    inside : Inside
        What is seen inside of the answers.
    writer : TranscriptWriter
        The transcript.
    rounds : int, optional
        Rounds after which the run ends.
    **options
        Of `InlineGrid`.
    """

    def __init__(
        self,
        client_app: ClientApp,
        nodes: int,
        *,
        inside: Inside,
        writer: TranscriptWriter,
        rounds: int | None,
        **options: Any,
    ) -> None:
        super().__init__(client_app, nodes, **options)
        self._inside, self._writer, self._most = inside, writer, rounds
        self._asked: dict[str, tuple[Message, int]] = {}
        self._trained: dict[int, int] = {}
        self._waits_since: float | None = None
        self._one_by_one = threading.Lock()  # Flower's older API asks from a thread per client
        self.partition: int | None = None
        """The node that answers now."""

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes; end a server that waits for more of them."""
        found = super().get_node_ids()
        now = time.monotonic()
        if self._waits_since is None:
            self._waits_since = now
        elif now - self._waits_since > _PATIENCE:
            raise EnoughError("the server waits for more nodes than there are: --clients")
        return found

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Take messages, unless they are of a round beyond the last one."""
        messages = list(messages)
        numbered = [(message, self._round(message)) for message in messages]
        if self._most is not None and any(number > self._most for _, number in numbered):
            raise EnoughError(ENOUGH)
        self._waits_since = None
        ids = list(super().push_messages(messages))
        self._asked |= dict(zip(ids, numbered, strict=True))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Run the first message that is ready; write it down with its reply."""
        with self._one_by_one:
            return self._pull(message_ids)

    def _pull(self, message_ids: Iterable[str]) -> list[Message]:
        replies: list[Message] = []
        for message_id in message_ids:
            if message_id not in self._asked:
                continue
            request, number = self._asked[message_id]
            node = self._contexts[request.metadata.dst_node_id].node_config["partition-id"]
            self.partition = int(node)
            self._inside.clear()
            start = time.monotonic()
            replies = list(super().pull_messages([message_id]))
            if replies:
                del self._asked[message_id]
                self._write(request, number, replies[0], time.monotonic() - start)
                break
        return replies

    def _round(self, message: Message) -> int:
        """Return the round of a message, or how often this node trained where it says none.

        The schemes of this package count their exchanges in Flower's group id.
        """
        own = message.content.config_records.get(RECORD)
        if own is not None and isinstance(own.get("round"), int):
            return int(cast(int, own["round"]))
        if message.metadata.group_id.isdecimal():
            return int(message.metadata.group_id)
        node = message.metadata.dst_node_id
        if message.metadata.message_type.partition(".")[0] == "train":
            self._trained[node] = self._trained.get(node, 0) + 1
        return max(1, self._trained.get(node, 0))

    def _write(self, request: Message, number: int, reply: Message, seconds: float) -> None:
        keep, inside = self._writer.keep, self._inside
        files, sizes = {}, [0, 0]
        files["request"], sizes[0] = keep(records_to_bytes(request.content))
        if not reply.has_error():
            files["reply"], sizes[1] = keep(records_to_bytes(reply.content))
        if inside.requests:
            files["inner_request"] = keep(inside.requests[-1])[0]
        if inside.replies:
            files["inner_reply"] = keep(inside.replies[-1])[0]
        if (training := inside.training) is not None:
            files["training"] = self._writer.keep_training(training)
        if (evaluated := inside.evaluated) is not None and request.metadata.message_type.startswith(
            "evaluate"
        ):
            files["evaluated"] = self._writer.keep_training(evaluated, name="evaluated")
        if inside.model is not None and not self._writer.model.exists():
            _pickle(inside.model, self._writer.model)
        self._writer.write(
            round=number,
            kind=request.metadata.message_type,
            node=self.partition,
            error=reply.error.reason if reply.has_error() else None,
            seconds=round(seconds, 6),
            sizes=sizes,
            files=files,
        )
        if self._writer.bytes > MOST_BYTES:
            raise EnoughError("the transcript is as large as it may be")


def probe(
    *,
    server: str,
    client: str,
    config: Mapping[str, Any],
    nodes: int,
    seed: int,
    out: Path,
    rounds: int | None = None,
    records: Sequence[int] = (),
    replace: Replace | None = None,
    runs: int | None = None,
    make_grid: Callable[..., "RecordingGrid"] = RecordingGrid,
    install: Callable[[Inside], None] = lambda inside: None,
) -> None:
    """Run an app in this process, and write a transcript.

    Parameters
    ----------
    server, client : str
        Its halves, as "module:attribute".
    config : mapping
        The run configuration.
    nodes : int
        Number of nodes.
    seed : int
        Of Python, NumPy and torch.
    out : Path
        Folder of the transcript.
    rounds : int, optional
        Rounds after which the run ends; by default the app ends it.
    records : sequence of int, optional
        How many records the clients have: client i has the i-th number of them, again and again.
    replace : callable, optional
        Answers in place of the app's own functions.
    runs : int, optional
        Number of runs, one after the other, whose transcripts are in ``out/0``, ``out/1``, ...;
        by default one, in `out` itself.
    make_grid : callable, default RecordingGrid
        Makes the grid of a run.
    install : callable, optional
        Is called before the app is imported.
    """
    network = disconnect()
    declared = watch_mechanisms()
    grid: RecordingGrid | None = None

    def cut() -> int | None:
        if not records or grid is None or grid.partition is None:
            return None
        return records[grid.partition % len(records)]

    inside = watch(records=cut, replace=replace)
    install(inside)
    _seed(seed)
    folders = [out] if runs is None else [out / str(run) for run in range(runs)]
    for run, folder in enumerate(folders):
        os.environ[RUNS_VARIABLE] = str(folder / CARDS)
        writer = TranscriptWriter(folder)
        about: dict[str, Any] = {"ended": "crashed", "error": "", "mods": [], "network": network}
        try:
            client_app: ClientApp = _load(client)
            server_app: ServerApp = _load(server)
            about["mods"] = [_described(mod) for mod in getattr(client_app, "_mods", ())]
            grid = make_grid(
                client_app,
                nodes,
                inside=inside,
                writer=writer,
                rounds=rounds,
                run_config=config,
                serialise=True,
                insecure_seed=seed + run,  # of the clients' noise, which is not to repeat
            )
            run_on(grid, server_app, config)
            about["ended"] = "whole"
        except EnoughError as enough:
            about["ended"] = str(enough)
        # Whatever the app raises is a finding, and so is its way out by sys.exit.
        except (Exception, SystemExit) as error:  # noqa: BLE001
            about["error"] = "".join(traceback.format_exception_only(error)).strip()
        writer.close({**about, "declared": declared()})


def main() -> None:
    """Read which app to run, and run it; with ``canaries``, with canary clients or records."""
    asked = json.load(sys.stdin)
    out, canaries = Path(asked.pop("out")), asked.pop("canaries", None)
    if canaries is None:
        probe(**asked, out=out)
    elif canaries.pop("records", False):
        _with_records(asked, out, **canaries)
    else:
        _with_clients(asked, out, **canaries)


def _with_clients(asked: dict[str, Any], out: Path, **canaries: Any) -> None:
    from .promise.canary_clients import Canaries, CanaryGrid

    mine = Canaries(clients=asked["nodes"], seed=asked["seed"], **canaries)
    probe(**asked, out=out, replace=mine.answer, make_grid=partial(CanaryGrid, canaries=mine))


def _with_records(
    asked: dict[str, Any],
    out: Path,
    *,
    model: str | None,
    pickled: str | None,
    seconds: float,
    **canaries: Any,
) -> None:
    from .promise.record_canaries import RecordCanaries
    from .promise.record_scores import score_records
    from .rebuilt.networks import load_model

    mine = RecordCanaries(seed=asked["seed"], **canaries)
    probe(**asked, out=out, replace=mine.answer, install=mine.install)
    module = partial(load_model, None if pickled is None else Path(pickled), model)
    score_records(mine, Transcript(out), module, seconds=seconds).write(out)


def _load(reference: str) -> Any:
    module, _, attribute = reference.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _seed(seed: int) -> None:
    import torch

    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (what an app draws from)
    torch.manual_seed(seed)


def _described(mod: Any) -> dict[str, Any]:
    """Return the name of a mod, and its numbers."""
    named = mod if hasattr(mod, "__name__") else type(mod)
    numbers = (
        {k: v for k, v in vars(mod).items() if isinstance(v, int | float)}
        if (hasattr(mod, "__dict__"))
        else {}
    )
    return {"name": f"{named.__module__}.{named.__name__}", "numbers": numbers}


def _pickle(model: Any, path: Path) -> None:
    import cloudpickle

    path.write_bytes(cloudpickle.dumps(model))


if __name__ == "__main__":
    main()
