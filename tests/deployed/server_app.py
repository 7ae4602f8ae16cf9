"""The server half: trains the initial numbers and writes what happened as JSON."""

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from columns import initial, parameters
from flwr.app import ArrayRecord, Context, Message
from flwr.serverapp import Grid, ServerApp
from plan import PlannedFaults
from unreliable import Unreliable

from flwr_privacy.m2fdp import EventSchedule, TierTree
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.strategies import (
    M2FDP,
    MSPDQ,
    UDP,
    CentralDP,
    DeviceNoise,
    DistributedNoise,
    FedAvg,
    FedVS,
    LoopOptions,
    SchemeStrategy,
    UserLevel,
    WorstDrift,
)

TIERS: dict[str, Any] = {
    "tree": TierTree.of_fanouts((2, 2), p=0.5),
    "privacy": DeviceNoise(epsilon=200.0, clipping_norm=4.0, clean_events=WorstDrift()),
    "schedule": EventSchedule(steps=2, events={1: 1}),
}

STRATEGIES: dict[str, Callable[..., SchemeStrategy]] = {
    "fedavg": FedAvg,
    "secure-sum": partial(FedAvg, secure_sum=SecureSum(threshold=2, value_range=64.0)),
    "mspdq": partial(
        MSPDQ,
        secure_sum=SecureSum(threshold=2),
        mixing_rounds=2,
        gamma=0.3,
        bits=16,
        bound=16.0,
    ),
    "udp": partial(UDP, privacy=UserLevel(epsilon=8.0, delta=1e-5)),
    "central-dp": partial(CentralDP, privacy=DistributedNoise(epsilon=8.0, delta=1e-5)),
    "m2fdp": partial(M2FDP, **TIERS, relay=True),
    "fedvs": lambda **given: FedVS(**given, **parameters()),
}

NAMES = {"m2fdp": "tiers", "fedvs": "columns"}

TIMEOUT = 240.0  # seconds

app = ServerApp()


def everything_in(message: Message) -> bytes:
    """Return all bytes of arrays and fields that the server can read in a message."""
    arrays = [a.data for record in message.content.array_records.values() for a in record.values()]
    fields = [
        part
        for record in message.content.config_records.values()
        for value in record.values()
        for part in (value if isinstance(value, list) else [value])
        if isinstance(part, bytes)
    ]
    return b"".join([*arrays, *fields])


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    nodes = int(config["nodes"])
    plan = PlannedFaults(config)
    more: dict[str, Any] = {"quorum": config["quorum"]} if config["quorum"] else {}
    observed: dict[str, Any] = {"timeout": TIMEOUT}
    if plan.strikes:
        resume = bool(config["resume"])
        unreliable = Unreliable(grid, plan, nodes=nodes, run=1 + resume)

        def end_round(line: dict[str, Any]) -> None:
            unreliable.end_round(line)
            # However busy the machine is, only what never comes is waited for in vain.
            silent = unreliable.is_silent(line["round"] + 1)
            strategy.messenger.timeout = float(config["deadline"]) if silent else TIMEOUT

        more |= {"run_dir": config["run-dir"], "resume": resume, "on_round": end_round}
        more |= {"experiment_id": "faults", "seed": 1}
        observed["evaluate_fn"] = unreliable.keep
    elif config["scheme"] in NAMES:
        more |= {"experiment_id": NAMES[str(config["scheme"])], "seed": 1}
    if config["pins"]:
        more |= {"pins": config["pins"]}
    strategy = STRATEGIES[str(config["scheme"])](
        loop=LoopOptions(**more),
        min_train_nodes=0 if config["scheme"] == "m2fdp" else nodes,  # not all of its nodes train
        min_available_nodes=nodes,
        fraction_evaluate=0.0,
        min_evaluate_nodes=0,
    )
    numbers = [np.array([[0.0, 1.0], [2.0, 3.0]], np.float32), np.full(3, 0.5, np.float32)]
    seen: list[bytes] = []
    if config["scheme"] in ("m2fdp", "fedvs"):
        pull = grid.pull_messages

        def overheard(ids: Iterable[str]) -> list[Message]:
            replies = list(pull(ids))
            seen.extend(everything_in(reply) for reply in replies if reply.has_content())
            return replies

        grid.pull_messages = overheard  # type: ignore[method-assign]
    arrays = initial() if config["scheme"] == "fedvs" else ArrayRecord(numbers)
    rounds = int(config["rounds"])
    result = strategy.start(grid, arrays, num_rounds=rounds, **observed)
    if seen:
        Path(f"{config['out']}.seen").write_bytes(b"".join(seen))
    out = {
        "history": result.history,
        "arrays": [array.tolist() for array in result.arrays.to_numpy_ndarrays()],
        "card": strategy.card(final=True).to_json(),
    }
    Path(str(config["out"])).write_text(json.dumps(out))
