"""What a node keeps for its clients: ledger, kept replies, policy, and where they lie.

All of it is the operator's: it is named in the node's configuration or environment, and nothing in
a message or in the run's configuration can change it.

====================  =======================  ===================================================
node configuration    environment              meaning
====================  =======================  ===================================================
``privacy-state``     FLWR_PRIVACY_STATE       existing folder for ledgers and kept replies
``privacy-policy``    FLWR_PRIVACY_POLICY      TOML file with what the node allows; by default all
``privacy-data-set``                           name of the data set; by default the client's
``privacy-identity``  FLWR_PRIVACY_IDENTITY    PEM file with the client's long-term key (Ed25519)
``privacy-pins``      FLWR_PRIVACY_PINS        TOML file with the other clients' long-term keys
``insecure-seed``                              seed of the noise, for tests: nothing is protected
``privacy-simulated``                          whether the client is made up, for tests: a server
                                               may play the aggregators that it trusts
====================  =======================  ===================================================
"""

import hashlib
import logging
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from flwr.app import Context

from flwr_privacy.common_replies import CommonReplies, Replies
from flwr_privacy.errors import InvalidParameterError, LedgerError, check_integer
from flwr_privacy.identity import check_client_id, client_id_from
from flwr_privacy.ledger import Ledger, Question
from flwr_privacy.pins import Identity, Pins
from flwr_privacy.policy import Policy
from flwr_privacy.randomness import SecureRandom
from flwr_privacy.replies import KeptReplies

__all__ = [
    "POLICY_VARIABLE",
    "SIMULATED",
    "STATE_VARIABLE",
    "Custody",
    "is_simulated",
    "policy_of",
    "refuse_node_keys",
    "storage",
]

logger = logging.getLogger("flwr.privacy")

STATE_VARIABLE, POLICY_VARIABLE = "FLWR_PRIVACY_STATE", "FLWR_PRIVACY_POLICY"

IDENTITY_VARIABLE, PINS_VARIABLE = "FLWR_PRIVACY_IDENTITY", "FLWR_PRIVACY_PINS"

_STATE, _POLICY, _SEED = "privacy-state", "privacy-policy", "insecure-seed"
_DATA_SET, _IDENTITY, _PINS = "privacy-data-set", "privacy-identity", "privacy-pins"
SIMULATED = "privacy-simulated"
_OF_THE_NODE = (_STATE, _POLICY, _DATA_SET, _SEED, _IDENTITY, _PINS, SIMULATED, "m2fdp-role")
_REFUSED = {name for key in _OF_THE_NODE for name in (key, key.replace("-", "_"))}
_PATHS = {_POLICY: POLICY_VARIABLE, _IDENTITY: IDENTITY_VARIABLE, _PINS: PINS_VARIABLE}

_Content = TypeVar("_Content")


@dataclass(frozen=True)
class Custody:
    """What a node keeps for one client.

    Parameters
    ----------
    ledger : Ledger
        Everything that was released about the client's data.
    replies : KeptReplies or CommonReplies
        The last noised replies; those of simulated clients lie together.
    setups : KeptReplies
        Replies that are given once for a whole experiment.
    policy : Policy
        What the operator allows.
    client_id : str
        Whose they are.
    insecure_seed : int, optional
        Seed of the noise, for tests.
    sessions : Path
        Folder for what the client remembers of secure sums.
    durable : bool
        Whether what must not be lost outlives a power cut: on every node but those that simulate
        clients.
    identity : Identity, optional
        Its long-term key, with which it signs others.
    pins : Pins, optional
        Long-term keys of the others.
    """

    ledger: Ledger
    replies: Replies
    setups: KeptReplies
    policy: Policy
    client_id: str
    insecure_seed: int | None
    sessions: Path
    durable: bool
    identity: Identity | None
    pins: Pins | None

    @classmethod
    def of(cls, context: Context) -> "Custody":
        """Find what the node keeps for the client of a context.

        Raises
        ------
        LedgerError
            If no folder is named for the state of a deployed node, there is no such folder, or the
            policy cannot be read.
        InvalidParameterError
            If a value is malformed, or a run's configuration tries to set what is the node's.
        """
        policy = policy_of(context)
        config = context.node_config
        client_id = client_id_from(config)
        data_set = check_client_id(str(config.get(_DATA_SET, client_id)), parameter=_DATA_SET)
        folder = _folder(context)
        seed = config.get(_SEED)
        if seed is not None:
            check_integer(_SEED, seed, minimum=0)
            logger.warning("client %s draws its noise from a seed: nothing is protected", client_id)
        # What guards against power cuts protects nobody in a simulation; without it a killed
        # process still loses nothing.
        durable = not (is_simulated() or config.get(SIMULATED))
        identity, pins = (_path(context, key) for key in (_IDENTITY, _PINS))
        return cls(
            ledger=Ledger(folder / f"{data_set}.ledger", data_set=data_set, durable=durable),
            replies=KeptReplies(folder / f"{client_id}.replies")
            if durable
            else CommonReplies(folder / "replies", client_id),
            setups=KeptReplies(folder / f"{client_id}.setups", durable=durable),
            policy=policy,
            client_id=client_id,
            insecure_seed=None if seed is None else int(str(seed)),
            sessions=folder / f"{client_id}.secure-sum",
            durable=durable,
            identity=None if identity is None else _usable("identity", Identity.read, identity),
            pins=None if pins is None else _usable("pinned keys", Pins.read, pins),
        )

    @property
    def pinned(self) -> int | None:
        """How many clients the node knows by their keys, its own included; None without pins."""
        return None if self.pins is None else len({*self.pins.clients, self.client_id})

    def random(self, question: Question, purpose: str) -> SecureRandom:
        """Return a source of numbers for one answer and one purpose, such as its noise."""
        if self.insecure_seed is None:
            return SecureRandom()
        return SecureRandom.insecure(
            self.insecure_seed,
            purpose,
            self.client_id,
            question.experiment_id,
            question.phase,
            question.server_round,
            question.request,
        )


def policy_of(context: Context) -> Policy:
    """Return what the operator of a context's node allows.

    Raises
    ------
    LedgerError
        If the policy cannot be read.
    InvalidParameterError
        If a run's configuration tries to set what is the node's.
    """
    refuse_node_keys("run-config", context.run_config)
    path = _path(context, _POLICY)
    return Policy() if path is None else _usable("policy", Policy.read, path)


def refuse_node_keys(source: str, values: Collection[str]) -> None:
    """Refuse names that only the node's own configuration may have.

    Raises
    ------
    InvalidParameterError
        If there are any.
    """
    if taken := sorted(_REFUSED.intersection(values)):
        raise InvalidParameterError(source, taken, "no keys of the node's own configuration")


def _path(context: Context, key: str) -> Any:
    """Return a path that the node's configuration has, or else its environment."""
    return context.node_config.get(key, os.environ.get(_PATHS[key]))


def _usable(name: str, read: Callable[[str], _Content], path: Any) -> _Content:
    try:
        return read(str(path))
    except InvalidParameterError as error:
        raise LedgerError(f"the node's {name} cannot be used: {error}") from error


def is_simulated() -> bool:
    """Tell whether this process is a worker of Ray, where Flower's simulation plays its clients."""
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return False
    return ray.get_runtime_context().get_actor_id() is not None


def storage(context: Context) -> str:
    """Return a name of the place where a node keeps things: the same for nodes that share it."""
    folder = _named(context) or (_temporary(context) if is_simulated() else "")
    if not folder:
        return ""
    place = f"{socket.gethostname()}:{os.path.realpath(folder)}"
    return hashlib.sha256(place.encode()).hexdigest()[:16]


def _named(context: Context) -> Any:
    return context.node_config.get(_STATE, os.environ.get(STATE_VARIABLE))


def _temporary(context: Context) -> Path:
    # Simulated clients of an app that knows nothing of us: a folder of its own for each run.
    return Path(tempfile.gettempdir(), f"flwr-privacy-simulated-{context.run_id}")


def _folder(context: Context) -> Path:
    named = _named(context)
    if named is None and is_simulated():
        folder = _temporary(context)
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder
    if not named:
        raise LedgerError(
            "the privacy ledger has no place to lie: name an existing folder as "
            f"{_STATE} in the node's configuration or as {STATE_VARIABLE} in its environment"
        )
    folder = Path(str(named))
    if not folder.is_dir():
        raise LedgerError(f"the privacy ledger has no place to lie: there is no folder {folder}")
    return folder
