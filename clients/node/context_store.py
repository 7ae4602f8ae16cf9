"""Locates the persistent state of a node's clients: ledger, reply cache, policy, keys.

All of it is the operator's: it is named in the node's configuration or environment, and nothing in
a message or in the run's configuration can change it.

=============================  ================================  ==================================
node configuration             environment                       meaning
=============================  ================================  ==================================
``privacy-state``              FLWR_PRIVACY_STATE                existing folder for ledgers and
                                                                 reply cache
``privacy-policy``             FLWR_PRIVACY_POLICY               TOML file with what the node
                                                                 allows; by default what each
                                                                 scheme promises
``privacy-allow-unprotected``  FLWR_PRIVACY_ALLOW_UNPROTECTED    schemes, with commas between them,
                                                                 that promise differential privacy
                                                                 and may answer without noise
``privacy-data-set``           FLWR_PRIVACY_DATA_SET             name of the data set; by default
                                                                 the client's. Simulated clients
                                                                 add their own to it
``privacy-identity``           FLWR_PRIVACY_IDENTITY             PEM file with the client's
                                                                 long-term key (Ed25519); by default
                                                                 one is made in ``privacy-state``,
                                                                 for the hello alone
``privacy-pins``               FLWR_PRIVACY_PINS                 TOML file with the other clients'
                                                                 long-term keys
``privacy-witness``            FLWR_PRIVACY_WITNESS              existing folder on another volume
                                                                 for the witness of the ledger; by
                                                                 default there is none
``insecure-seed``                                                seed of the noise, for tests:
                                                                 nothing is protected
``privacy-simulated``                                            whether the client is made up, for
                                                                 tests: answers without noise are
                                                                 allowed
=============================  ================================  ==================================
"""

import hashlib
import logging
import os
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from flwr.app import ConfigRecord, Context

from flwr_privacy.errors import (
    InvalidParameterError,
    LedgerError,
    ProtocolError,
    check_integer,
)
from flwr_privacy.pipeline.node_store import NodeRules, NodeStore
from flwr_privacy.pipeline.operator_checks import (
    ALLOW_UNPROTECTED,
    ALLOW_VARIABLE,
    PINS_VARIABLE,
)
from flwr_privacy.pipeline.reply_cache import EXPERIMENTS, ReplyCache
from flwr_privacy.pipeline.shared_reply_cache import SharedReplyCache
from flwr_privacy.privacy.policy import Policy
from flwr_privacy.wire.files import exclusive_lock, node_file
from flwr_privacy.wire.identity import (
    CLIENT_ID_KEY,
    PARTITION_ID_KEY,
    check_client_id,
    client_id_from,
)
from flwr_privacy.wire.message import RECORD, Fields
from flwr_privacy.wire.pins import Identity, Pins

from .node_settings import may_run_any

if TYPE_CHECKING:
    from flwr_privacy.privacy.ledger import Ledger

__all__ = [
    "ALLOW_UNPROTECTED",
    "ALLOW_VARIABLE",
    "DATA_SET_VARIABLE",
    "POLICY_VARIABLE",
    "SIMULATED",
    "STATE_VARIABLE",
    "WITNESS_VARIABLE",
    "ContextStore",
    "check_same_folder",
    "has_policy_file",
    "identity_of",
    "is_simulated",
    "is_simulated_client",
    "policy_of",
    "refuse_node_keys",
    "rules_of",
    "shown_head",
    "storage",
]

logger = logging.getLogger("flwr.privacy")

STATE_VARIABLE, POLICY_VARIABLE = "FLWR_PRIVACY_STATE", "FLWR_PRIVACY_POLICY"

IDENTITY_VARIABLE = "FLWR_PRIVACY_IDENTITY"

WITNESS_VARIABLE = "FLWR_PRIVACY_WITNESS"

DATA_SET_VARIABLE = "FLWR_PRIVACY_DATA_SET"
"""`flwr-privacy executor` sets it to what the operator's list says of the app that it runs."""

_STATE, _POLICY, _SEED = "privacy-state", "privacy-policy", "insecure-seed"
_DATA_SET, _IDENTITY, _PINS = "privacy-data-set", "privacy-identity", "privacy-pins"
_WITNESS = "privacy-witness"
SIMULATED = "privacy-simulated"
_OF_THE_NODE = (
    *(_STATE, _POLICY, ALLOW_UNPROTECTED, _DATA_SET, _SEED, _IDENTITY, _PINS, SIMULATED),
    *(_WITNESS, "m2fdp-role"),
)
_REFUSED = {name for key in _OF_THE_NODE for name in (key, key.replace("-", "_"))}
_VARIABLES = {
    _POLICY: POLICY_VARIABLE,
    ALLOW_UNPROTECTED: ALLOW_VARIABLE,
    _IDENTITY: IDENTITY_VARIABLE,
    _PINS: PINS_VARIABLE,
    _WITNESS: WITNESS_VARIABLE,
}

_NO_LIMITS = Policy()

_LOCK_TIMEOUT = 10.0  # seconds

_Content = TypeVar("_Content")


class ContextStore(NodeStore):
    """The node store of a context's client."""

    @classmethod
    def of(cls, context: Context) -> "ContextStore":
        """Open the node store of a context's client.

        Raises
        ------
        LedgerError
            If no folder is named for the state of a deployed node, there is no such folder, or the
            policy cannot be read.
        InvalidParameterError
            If a value is malformed, or a run's configuration tries to set what is the node's.
        """
        rules, config = rules_of(context), context.node_config
        client_id = client_id_from(config)
        folder, durable = _folder(context), _durable(simulated=rules.simulated)
        identity, pins = (_of_node(context, key) for key in (_IDENTITY, _PINS))
        own: dict[str, Any] = {**vars(rules), "client_id": client_id}
        return cls(
            **own,
            ledger=_ledger(context, folder, client_id, simulated=rules.simulated),
            replies=ReplyCache(
                folder / f"{client_id}.replies", durable=True, experiments=EXPERIMENTS
            )
            if durable
            else SharedReplyCache(folder / "replies", client_id),
            setups=ReplyCache(folder / f"{client_id}.setups", durable=durable),
            folder=folder,
            sessions=folder / f"{client_id}.secure-sum",
            identity=None if identity is None else _usable("identity", Identity.read, identity),
            pins=None if pins is None else _usable("pinned keys", Pins.read, pins),
        )


def _durable(*, simulated: bool) -> bool:
    # What guards against power cuts protects nobody in a simulation; without it a killed process
    # still loses nothing.
    return not simulated


def _ledger(context: Context, folder: Path, client_id: str, *, simulated: bool) -> "Ledger":
    from flwr_privacy.privacy.ledger import Ledger  # late: FedAvg and its like open none

    data_set = _data_set(context.node_config, client_id, simulated=simulated)
    witness = _of_node(context, _WITNESS)
    return Ledger(
        folder / f"{data_set}.ledger",
        data_set=data_set,
        durable=_durable(simulated=simulated),
        witness=Path(str(witness)) if witness else None,
    )


def shown_head(
    context: Context, experiment_id: str, *, empty: bool, store: ContextStore | None = None
) -> Fields:
    """Return the entries that show a server how its experiment stands in the client's ledger.

    They are signed with the key that signs the client's hello, if it has one. A client whose files
    are in no folder that somebody named shows nothing: the next run has other files.

    Parameters
    ----------
    context : Context
        The client's context.
    experiment_id : str
        The experiment; charges of others are not in what is shown.
    empty : bool
        Whether to show as well that there are no charges of it.
    store : ContextStore, optional
        The node store of the client, where it is open.

    Raises
    ------
    LedgerError
        If the ledger or the key cannot be used.
    InvalidParameterError
        If the experiment's name is malformed.
    """
    if not _named(context):
        return {}
    from flwr_privacy.privacy.ledger.shown import shown  # late: many schemes charge nothing
    from flwr_privacy.privacy.ledger.signed_head import SignedHead

    if store is None:
        client_id, simulated = client_id_from(context.node_config), is_simulated_client(context)
        ledger = _ledger(context, _folder(context), client_id, simulated=simulated)
    else:
        client_id, ledger = store.client_id, store.ledger
    head = ledger.head(experiment_id)
    if not head.count and not empty:
        return {}
    signed = SignedHead.sign(
        identity_of(context), experiment=experiment_id, client=client_id, head=head
    )
    return shown(signed)


def _data_set(config: Mapping[str, Any], client_id: str, *, simulated: bool) -> str:
    """Return the name of the data set whose ledger a client's releases are charged to.

    Raises
    ------
    LedgerError
        If configuration and environment name two: the operator has to say which one it is.
    InvalidParameterError
        If the name is malformed.
    """
    own, of_app = config.get(_DATA_SET), os.environ.get(DATA_SET_VARIABLE) or None
    if own is not None and of_app is not None and own != of_app:
        raise LedgerError(
            f"the data set has two names: {_DATA_SET} = {own!r} in the node's configuration and "
            f"{DATA_SET_VARIABLE} = {of_app!r} in its environment; name it in one place"
        )
    name = of_app if own is None else own
    if name is None:
        return client_id
    data_set = check_client_id(str(name), parameter=_DATA_SET)
    # One environment serves all simulated clients, and each of them has data of its own.
    return f"{data_set}@{client_id}" if simulated and own is None else data_set


def policy_of(context: Context) -> Policy:
    """Return the policy of a context's node.

    The schemes of ``allow_unprotected`` are those of the policy file and those that the node's
    configuration, or else its environment, names.

    Raises
    ------
    LedgerError
        If the policy cannot be read, or allows what it refuses elsewhere.
    InvalidParameterError
        If a run's configuration tries to set what is the node's.
    """
    refuse_node_keys("run-config", context.run_config)
    path, names = (_of_node(context, key) for key in (_POLICY, ALLOW_UNPROTECTED))
    policy = _NO_LIMITS if path is None else _usable("policy", Policy.read, path)
    listed = [name.strip() for name in str(names or "").split(",") if name.strip()]
    if not listed:
        return policy

    def also(_: str) -> Policy:
        return replace(policy, allow_unprotected=[*(policy.allow_unprotected or ()), *listed])

    return _usable("policy", also, names)


def rules_of(context: Context) -> NodeRules:
    """Return the operator's rules for a context's client; they need no state folder.

    Raises
    ------
    LedgerError, InvalidParameterError
        As `policy_of`.
    """
    config = context.node_config
    seed = config.get(_SEED)
    return NodeRules(
        policy=policy_of(context),
        client_id=str(config.get(CLIENT_ID_KEY, config.get(PARTITION_ID_KEY))),
        simulated=is_simulated_client(context),
        has_policy_file=has_policy_file(context),
        insecure_seed=None if seed is None else check_integer(_SEED, seed, minimum=0),
    )


def identity_of(context: Context) -> Identity | None:
    """Return the key with which a context's client signs its hello; None for one without a key.

    That is the long-term key that the operator gives, or one that is made and kept in the client's
    state folder. A client that is simulated, or that the server chooses, or without a folder has no
    key that the operator did not give.

    Raises
    ------
    LedgerError
        If the key cannot be read, made or kept.
    InvalidParameterError
        If the client has no valid name.
    """
    path = _of_node(context, _IDENTITY)
    if path is not None:
        return _usable("identity", Identity.read, path)
    config = context.node_config
    if not _named(context) or may_run_any(config) or is_simulated_client(context):
        return None
    return _usable("key", _kept_identity, _folder(context) / f"{client_id_from(config)}.identity")


def _kept_identity(name: str) -> Identity:
    """Return the identity in a file, which is made the first time."""
    path, fresh = Path(name), Path(f"{name}.new")
    lock = Path(f"{name}.lock")
    with node_file(path, "the client's key"), exclusive_lock(lock, timeout=_LOCK_TIMEOUT):
        if not path.exists():
            fresh.unlink(missing_ok=True)  # of a process that was killed here
            Identity.generate().write(fresh)
            os.replace(fresh, path)
        return Identity.read(path)


def has_policy_file(context: Context) -> bool:
    """Tell whether the operator of a context's node has set a policy file."""
    return _of_node(context, _POLICY) is not None


def refuse_node_keys(source: str, values: Collection[str]) -> None:
    """Refuse settings that only the node's own configuration may have.

    Raises
    ------
    InvalidParameterError
        If there are any.
    """
    if taken := sorted(_REFUSED.intersection(values)):
        raise InvalidParameterError(source, taken, "no keys of the node's own configuration")


def _of_node(context: Context, key: str) -> Any:
    """Return a setting from the node's configuration, or else from its environment."""
    return context.node_config.get(key, os.environ.get(_VARIABLES[key]))


def _usable(name: str, read: Callable[[str], _Content], path: Any) -> _Content:
    try:
        return read(str(path))
    except InvalidParameterError as error:
        raise LedgerError(f"the node's {name} cannot be used: {error}") from error


def is_simulated() -> bool:
    """Tell whether this process is a Ray worker, which runs the clients of Flower's simulation."""
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return False
    return ray.get_runtime_context().get_actor_id() is not None


def is_simulated_client(context: Context) -> bool:
    """Tell whether a client is simulated: by Flower, by our engines, or in a cohort.

    Raises
    ------
    InvalidParameterError
        If the node's configuration has something else than true or false: "false" is text.
    """
    named = context.node_config.get(SIMULATED, False)
    if not isinstance(named, bool):
        raise InvalidParameterError(SIMULATED, named, "true or false, without quotes")
    return named or is_simulated()


def check_same_folder(context: Context) -> None:
    """Check that a simulated node finds the folder in which it was at its last request.

    On a Ray cluster a node's next request may reach another host. If each host has a folder of its
    own, the clients' ledgers begin anew there.

    Raises
    ------
    ProtocolError
        If it is another folder.
    LedgerError
        If there is none.
    """
    if not is_simulated():
        return
    key, folder = f"{RECORD}.folder", _folder(context)
    # The state comes with the node's requests, wherever it runs; the file stays where it is.
    if not isinstance(left := context.state.get(key), ConfigRecord):
        left = ConfigRecord({"file": f".node-{uuid.uuid4().hex}"})
        (folder / str(left["file"])).touch()
        context.state[key] = left
    elif not (folder / str(left["file"])).exists():
        raise ProtocolError(
            f"{folder} on {socket.gethostname()} is not the folder with the state of the clients: "
            f"all hosts of a Ray cluster need the same shared folder, which {STATE_VARIABLE} names "
            "before each `ray start`"
        )


def storage(context: Context) -> str:
    """Return a name of a node's storage; nodes that share the storage return the same name."""
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
            "the privacy ledger has no folder: name an existing folder as "
            f"{_STATE} in the node's configuration or as {STATE_VARIABLE} in its environment"
        )
    folder = Path(str(named))
    if not folder.is_dir():
        raise LedgerError(f"the privacy ledger has no folder: there is no folder {folder}")
    return folder
