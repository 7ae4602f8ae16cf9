"""What a node keeps for its clients: ledger, kept replies, policy, and where they lie.

All of it is the operator's: it is named in the node's configuration or environment, and nothing in
a message or in the run's configuration can change it.

====================  =======================  ===================================================
node configuration    environment              meaning
====================  =======================  ===================================================
``privacy-state``     FLWR_PRIVACY_STATE       existing folder for ledgers and kept replies
``privacy-policy``    FLWR_PRIVACY_POLICY      TOML file with what the node allows; by default all
``privacy-data-set``                           name of the data set; by default the client's
``insecure-seed``                              seed of the noise, for tests: nothing is protected
====================  =======================  ===================================================
"""

import logging
import os
import sys
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Context

from flwr_privacy.errors import InvalidParameterError, LedgerError, check_integer
from flwr_privacy.identity import check_client_id, client_id_from
from flwr_privacy.ledger import Ledger, Question
from flwr_privacy.policy import Policy
from flwr_privacy.randomness import SecureRandom
from flwr_privacy.replies import KeptReplies

__all__ = ["POLICY_VARIABLE", "STATE_VARIABLE", "Custody", "is_simulated", "refuse_node_keys"]

logger = logging.getLogger("flwr.privacy")

STATE_VARIABLE, POLICY_VARIABLE = "FLWR_PRIVACY_STATE", "FLWR_PRIVACY_POLICY"

_STATE, _POLICY, _SEED = "privacy-state", "privacy-policy", "insecure-seed"
_DATA_SET = "privacy-data-set"
_OF_THE_NODE = (_STATE, _POLICY, _DATA_SET, _SEED)


@dataclass(frozen=True)
class Custody:
    """What a node keeps for one client.

    Parameters
    ----------
    ledger : Ledger
        Everything that was released about the client's data.
    replies : KeptReplies
        The last noised replies.
    policy : Policy
        What the operator allows.
    client_id : str
        Whose they are.
    insecure_seed : int, optional
        Seed of the noise, for tests.
    """

    ledger: Ledger
    replies: KeptReplies
    policy: Policy
    client_id: str
    insecure_seed: int | None

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
        refuse_node_keys("run-config", context.run_config)
        config = context.node_config
        client_id = client_id_from(config)
        data_set = check_client_id(str(config.get(_DATA_SET, client_id)), parameter=_DATA_SET)
        folder = _folder(context)
        seed = config.get(_SEED)
        if seed is not None:
            check_integer(_SEED, seed, minimum=0)
            logger.warning("client %s draws its noise from a seed: nothing is protected", client_id)
        path = config.get(_POLICY, os.environ.get(POLICY_VARIABLE))
        return cls(
            ledger=Ledger(folder / f"{data_set}.ledger", data_set=data_set),
            replies=KeptReplies(folder / f"{client_id}.replies"),
            policy=Policy() if path is None else _policy(str(path)),
            client_id=client_id,
            insecure_seed=None if seed is None else int(str(seed)),
        )

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


def refuse_node_keys(source: str, values: Collection[str]) -> None:
    """Refuse names that only the node's own configuration may have.

    Raises
    ------
    InvalidParameterError
        If there are any.
    """
    names = {name for key in _OF_THE_NODE for name in (key, key.replace("-", "_"))}
    if taken := sorted(names.intersection(values)):
        raise InvalidParameterError(source, taken, "no keys of the node's own configuration")


def _policy(path: str) -> Policy:
    try:
        return Policy.read(path)
    except InvalidParameterError as error:
        raise LedgerError(f"the node's policy cannot be used: {error}") from error


def is_simulated() -> bool:
    """Tell whether this process is a worker of Ray, where Flower's simulation plays its clients."""
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return False
    return ray.get_runtime_context().get_actor_id() is not None


def _folder(context: Context) -> Path:
    named = context.node_config.get(_STATE, os.environ.get(STATE_VARIABLE))
    if named is None and is_simulated():
        # Simulated clients of an app that knows nothing of us: their state lasts as long as a run.
        folder = Path(tempfile.gettempdir(), f"flwr-privacy-simulated-{context.run_id}")
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
