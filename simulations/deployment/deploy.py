"""Runs the app on this machine with a SuperLink and one SuperNode for each client.

What a node owns (its keys, its policy, its ledgers) lies in a folder of its own below the run's
``deployment`` folder, as it would lie on a machine of its own.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flwr_privacy.clients.node.context_store import ALLOW_UNPROTECTED
from flwr_privacy.errors import InvalidParameterError, check_integer, check_number, refusals
from flwr_privacy.privacy.policy import Policy
from flwr_privacy.simulations.engines.flower_processes import HOST, check_port
from flwr_privacy.simulations.runner.jobs import APP, check_task, shown
from flwr_privacy.simulations.runner.progress import format_seconds
from flwr_privacy.simulations.settings.own_code import is_reference
from flwr_privacy.simulations.settings.run_folder import RunFolder, kept
from flwr_privacy.simulations.settings.run_settings import Settings
from flwr_privacy.simulations.tasks.lookup import ALLOWED_VARIABLE

from .nodes import DeployedNode, prepare, tree_of
from .processes import Deployment, DeploymentError

__all__ = ["DeployOptions", "LostNode", "deploy", "reopened", "what_happened"]

FOLDER = "deployment"
SHOWN_ROUNDS = 10

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class DeployOptions:
    """Options of a deployment.

    Parameters
    ----------
    nodes : int
        Number of clients, at least 2, each with a SuperNode of its own.
    policy : Path, optional
        What every node allows (`flwr_privacy.privacy.policy.Policy`); by default all.
    test_seed : int, optional
        Seed of the nodes' noise, for tests: nothing is protected.
    port : int, optional
        Loopback port of the SuperLink; by default a free one.
    timeout : float, optional
        Seconds that the run may take; by default any number.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed, the port is taken or the policy cannot be read.
    """

    nodes: int
    policy: Path | None = None
    test_seed: int | None = None
    port: int | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        check_integer("--nodes", self.nodes, minimum=2)
        if self.test_seed is not None:
            check_integer("--test-seed", self.test_seed, minimum=0)
        if self.port is not None:
            check_port("--port", self.port)
        if self.timeout is not None:
            check_number("--timeout", self.timeout, minimum=1)
        if self.policy is not None:
            Policy.read(self.policy)

    def settings_of(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return a run's settings with as many clients as there are nodes.

        Aggregators that are nodes of their own make the exception: there the tree has the number.

        Raises
        ------
        InvalidParameterError
            If the settings have a number of clients.
        """
        if "clients" in values:
            raise InvalidParameterError("--set", "clients", "nothing: --nodes says how many")
        relayed = values.get("relay", values.get("strategy.relay", False))
        return {**values, "clients": None if relayed is True else self.nodes}


@dataclass(frozen=True, kw_only=True)
class LostNode:
    """A SuperNode that ended before the run.

    Parameters
    ----------
    node : int
        Its number.
    client_id : str
        Its client.
    server_round : int
        The round that was going on.
    seconds : float
        Seconds since the nodes were started.
    ending : str
        How it ended.
    returned : bool, default False
        Whether the run was gone on with afterwards, with all nodes.
    """

    node: int
    client_id: str
    server_round: int
    seconds: float
    ending: str
    returned: bool = False

    def __str__(self) -> str:
        return (
            f"node {self.node} (client {self.client_id}) in round {self.server_round}, "
            f"{format_seconds(self.seconds)} after the start: {self.ending}"
            + ("; back when the run was gone on with" if self.returned else "")
        )


def reopened(path: Path) -> tuple[RunFolder, int, int | None]:
    """Return a deployed run that is not complete, its number of clients and its test seed.

    Raises
    ------
    InvalidParameterError
        If the folder has no such run.
    DataError, CheckpointError
        If one of its files is damaged.
    """
    run = RunFolder.open(path)
    summary = run.summary
    if summary["engine"] != "deployed":
        allowed = "a run that was deployed; for a simulation: flwr-privacy run --resume"
        raise InvalidParameterError("--resume", str(path), allowed)
    run.check_resumable()
    nodes = run.settings.clients
    if nodes is None:
        tree = tree_of(run.settings)
        nodes = int(summary["nodes"]) if tree is None else len(tree.devices)
    return run, nodes, summary.get("test_seed")


def deploy(
    run: RunFolder,
    members: Sequence[DeployedNode],
    options: DeployOptions,
    *,
    say: Say = print,
    resume: bool = False,
    accept_lost_rounds: bool = False,
    log: str | None = None,
) -> None:
    """Carry out a run on its own SuperLink and SuperNodes, and stop all of them afterwards.

    A SuperNode that ends on its way is reported, noted in the run's summary (``lost_nodes``) and
    taken out of the federation; the run goes on without it. One that ends before the first round of
    this start is over ends the run: the server may still wait for it.

    Parameters
    ----------
    run : RunFolder
        Folder of the run, made for as many nodes as there are members.
    members : sequence of DeployedNode
        Its nodes.
    options : DeployOptions
        How it is deployed.
    say : callable, optional
        Takes each line that tells what happens.
    resume : bool, default False
        Whether to go on from the run's checkpoint, with the nodes' folders as they are.
    accept_lost_rounds : bool, default False
        Whether to go on from one that is older than the run's folder: see `LoopOptions`.
    log : str, optional
        What the rounds are logged to: see `flwr_privacy.simulations.runner.loggers.logger_maker`.

    Raises
    ------
    DeploymentError
        If a process does not start, all nodes or one before the first round end, the SuperLink
        ends, the app fails, or the time is over.
    """
    folder = run.path.resolve() / FOLDER
    with shown(run, log=log), kept(run):
        check_task(run)
        run.begin()
        losses = _Losses(run, members, say)
        folder.mkdir(mode=0o700, exist_ok=True)
        nodes = prepare(members, folder, policy=options.policy, test_seed=options.test_seed)
        deployment = Deployment(
            nodes=nodes,
            folder=folder,
            node_environment={**_threads(len(members)), **_own_task(run.settings.task)},
            port=options.port,
        )
        with deployment:
            say(f"SuperLink: {HOST}:{deployment.port}, TLS with {deployment.ca_certificate}")
            for index, member in enumerate(members):
                name = "aggregator" if member.aggregator else "client"
                say(f"node {index}: {name} {member.client_id}, process {deployment.pid(index)}")
            if trusting := [i for i, node in enumerate(nodes) if ALLOW_UNPROTECTED in node]:
                say(
                    f"the server is trusted with answers without noise: {ALLOW_UNPROTECTED} = "
                    f'"{nodes[trusting[0]][ALLOW_UNPROTECTED]}" on nodes {_few(trusting)}'
                )
            deployment.run(
                APP,
                run_config={
                    **run.app_config(resume=resume, accept_lost_rounds=accept_lost_rounds),
                    "settings": _pinned(run.settings, folder / "node-0" / "pins.toml").to_toml(),
                },
                timeout=options.timeout,
                on_lost=losses.add,
            )


def _pinned(settings: Settings, pins: Path) -> Settings:
    """Return settings with which the server lets in nobody but these clients, if it has no pins."""
    return replace(settings, strategy={"pins": str(pins), **settings.strategy})


class _Losses:
    """Notes the nodes that end before the run, from the start of the nodes on."""

    def __init__(self, run: RunFolder, members: Sequence[DeployedNode], say: Say) -> None:
        self._run, self._members, self._say = run, members, say
        lost = run.summary.get("lost_nodes", [])
        self._lost: list[LostNode] = [LostNode(**{**node, "returned": True}) for node in lost]
        self._missing = 0
        self._rounds_before = _last_round(run)
        self._note()
        self._began = time.monotonic()

    def add(self, index: int, ending: str) -> None:
        """Note a node that has ended; refuse to go on without any node, or before a round."""
        last = _last_round(self._run)
        if last <= self._rounds_before:
            begun = "began" if last < 0 else "went on"
            log = self._run.path.resolve() / FOLDER / f"node-{index}.log"
            raise DeploymentError(
                f"node {index} ended before the training {begun} ({ending}); log: {log}"
            )
        one = LostNode(
            node=index,
            client_id=self._members[index].client_id,
            server_round=min(last + 1, self._run.settings.rounds),
            seconds=time.monotonic() - self._began,
            ending=ending,
        )
        self._lost.append(one)
        self._missing += 1
        self._note()
        if self._missing == len(self._members):
            raise DeploymentError(f"no node is left; the last one lost: {one}")
        self._say(f"lost {one}; the run goes on without it")

    def _note(self) -> None:
        self._run.update(lost_nodes=[asdict(node) for node in self._lost])


def _last_round(run: RunFolder) -> int:
    """Return the last round that is over; -1 before the first line."""
    lines = run.rounds()
    return int(lines[-1]["round"]) if lines else -1


def _threads(nodes: int) -> dict[str, str]:
    """Return how many threads a node computes with: all nodes share this machine."""
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // nodes))}


def _own_task(name: str) -> dict[str, str]:
    """Return what lets the nodes run a task of the user's, which the server names to them."""
    return {ALLOWED_VARIABLE: name} if is_reference(name) else {}


def what_happened(run: RunFolder) -> list[str]:
    """Return lines that report the nodes, rounds and answers of a run."""
    summary = run.summary
    lost = [LostNode(**node) for node in summary.get("lost_nodes", [])]
    nodes = int(summary["nodes"])
    told = [
        f"nodes: {nodes - sum(not node.returned for node in lost)} of {nodes} to the end",
        *(f"lost: {node}" for node in lost),
    ]
    rounds = [line for line in run.rounds() if line["round"] > 0]
    skipped = [line["round"] for line in rounds if line.get("skipped")]
    told.append(
        f"rounds: {len(rounds)}, " + (f"skipped: {_few(skipped)}" if skipped else "none skipped")
    )
    if taken := sum(line.get("exchanges", 0) for line in rounds):
        seconds = rounds[-1]["seconds"] - run.rounds()[0]["seconds"]
        told.append(f"exchanges: {taken} in these rounds, {seconds / taken:.1f} s each")
    asked, used = (sum(line.get(key, 0) for line in rounds) for key in ("asked", "accumulated"))
    answers = f"answers: {used} of {asked} used"
    if short := [
        line["round"] for line in rounds if line.get("accumulated", 0) < line.get("asked", 0)
    ]:
        answers += f"; fewer than asked in round {_few(short)}"
    told.append(answers)
    if counts := refusals(rounds):
        reasons = ", ".join(f"{count} {reason}" for reason, count in counts.items())
        told.append(f"refused: {reasons} (the nodes' logs in {run.path / FOLDER} say why)")
    return told


def _few(numbers: Sequence[int]) -> str:
    text = ", ".join(map(str, numbers[:SHOWN_ROUNDS]))
    return text if len(numbers) <= SHOWN_ROUNDS else f"{text}, ... ({len(numbers)} in all)"
