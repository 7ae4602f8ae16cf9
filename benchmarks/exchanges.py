"""The row that needs a deployment: what a round costs where a message takes seconds."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.simulations.deployment.nodes import members_of, prepare
from flwr_privacy.simulations.deployment.processes import Deployment
from flwr_privacy.simulations.runner.jobs import APP
from flwr_privacy.simulations.settings.run_folder import RunFolder
from flwr_privacy.simulations.settings.run_settings import Settings

from .report import Comparison

__all__ = ["exchanges"]

NODES, ROUNDS = 3, 3
RIVALS = Path(__file__).parent / "app"
TREE = {"unit": "device", "fanouts": [1, 3], "p": 1.0, "clipping_norm": 0.05, "relay": True}


def _settings(scheme: str, task: str = "digits-linear", **more: Any) -> Settings:
    return Settings(scheme=scheme, task=task, clients=NODES, rounds=ROUNDS, **more)


TREES = Settings(scheme="m2fdp", task="digits-linear", rounds=ROUNDS, strategy=TREE)
SCHEMES = {
    "FedAvg": _settings("fedavg"),
    "FedAvg, evaluated by the clients": _settings("fedavg", fraction_evaluate=1.0),
    "FedAvg under a secure sum": _settings("fedavg", secure_sum=SecureSum()),
    "UDP": _settings("udp", strategy={"unit": "user"}),
    "MSPDQ, ten mixing steps": _settings("mspdq"),
    "MSPDQ under a secure sum, one step": _settings(
        "mspdq", secure_sum=SecureSum(), strategy={"mixing_rounds": 1}
    ),
    "ACFL": _settings("acfl", "digits-rff"),
    "FedVS": _settings("fedvs", "digits-rows"),
}


def exchanges() -> Iterator[Comparison]:
    """Compare an exchange of each scheme with one of Flower's FedAvg, on one deployment."""
    with tempfile.TemporaryDirectory(prefix="flwr-privacy-") as name:
        folder = Path(name)
        members = members_of(TREES, NODES)
        nodes = prepare(members, folder, policy=None, test_seed=None)
        with Deployment(nodes=nodes, folder=folder) as deployment:
            tree = _rounds(deployment, folder / "tree", TREES, len(nodes))
            for aggregator in range(NODES, len(members)):
                deployment.stop(aggregator)
            theirs = _flower(deployment, folder / "seconds.jsonl")
            yield _compared("M2FDP, an aggregator that is a node", tree, theirs)
            for what, settings in SCHEMES.items():
                lines = _rounds(deployment, folder / what, settings, NODES)
                yield _compared(what, lines, theirs)


def _compared(what: str, lines: list[dict[str, Any]], theirs: list[float]) -> Comparison:
    # The round in the middle: the first one makes keys, the last one nothing for a round to come.
    count = int(lines[-2]["exchanges"])
    seconds = lines[-2]["seconds"] - lines[-3]["seconds"]
    before = int(lines[0]["exchanges"])
    return Comparison(
        what=f"{what}: {before} + {count} a round, one",
        rival="Flower's FedAvg, one a round",
        ours=[seconds / count],
        theirs=theirs,
    )


def _rounds(
    deployment: Deployment, folder: Path, settings: Settings, nodes: int
) -> list[dict[str, Any]]:
    run = RunFolder.create(folder, settings, engine="deployed", nodes=nodes)
    config = {"settings": settings.to_toml(), "run-dir": str(folder.resolve())}
    deployment.run(APP, run_config=config, timeout=None)
    return run.rounds()


def _flower(deployment: Deployment, out: Path) -> list[float]:
    config = {"plan": "flower", "rounds": ROUNDS, "out": str(out)}
    deployment.run(RIVALS, run_config=config, timeout=None)
    seconds: list[float] = json.loads(out.read_text(encoding="utf-8"))["seconds"]
    return seconds[1:]
