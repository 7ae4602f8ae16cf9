"""One deployed node under any scheme: a server's messages go in, and all that leaves comes out.

A `Node` answers the question of a `Case` through the faces that an app has
(`flwr_privacy.clients.node.adapters`), with whatever code of the user's it is given.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tomli_w
from apps import record
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from users_code import fit
from zones import zone_nodes

from flwr_privacy import m2fdp
from flwr_privacy.clients import (
    ACFLClient,
    FedVSClient,
    M2FDPClient,
    SchemeClient,
    SplitVFLClient,
    as_mod,
    numpy_client_app,
    own_client_app,
)
from flwr_privacy.clients.node import secure_sum
from flwr_privacy.clients.node.context_store import policy_of
from flwr_privacy.privacy.grid import CODE_LIMIT
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.privacy.ledger.shown import SIGNATURE
from flwr_privacy.secure_sum.messages import JOIN
from flwr_privacy.simulations.engines.inline.flower_internals import acting_as_server
from flwr_privacy.wire.message import RECORD, Header
from flwr_privacy.wire.pins import Identity

Fields = dict[str, Any]
Said = tuple[Any, ...]
"""What left a node: ``("answer", arrays, fields, metrics)`` or ``("refused", code, reason)``."""
MODEL = {"w": np.zeros((1, 4), np.float32)}
SUMMED = 3  # clients of a secure sum


@dataclass(frozen=True, kw_only=True)
class Case:
    """A question of a scheme, and what its answer is.

    Parameters
    ----------
    half : type
        The client half.
    user : callable
        The user's code as it should be: a training, an evaluation, or what returns data.
    fields : Mapping or callable
        The scheme's own values of the question; a function gets the node.
    phase : str
        Phase of the question.
    model : Mapping
        Arrays of the question.
    summed : int
        How many clients are in the secure sum; 0 outside of one.
    failing : {"zero", "ends", "refused"}
        What a failure of the user's code comes to: an answer as if nothing had been learned; the
        end of the experiment; a refusal, which nobody is charged for.
    charged : bool
        Whether an answer is charged.
    once : bool
        Whether a question has one attempt.
    kept : bool
        Whether a charged answer is kept, so that the same question gets the same bytes.
    reach : float
        How far, in L2, the user's code can move the arrays of a charged answer.
    grid : int
        Exponent of the grid of a charged answer.
    unprotected : bool
        Whether the scheme promises noise, and the question asks for none.
    other : Mapping
        Changes that make another question of it.
    single : bool
        Whether the other question gets no answer once this one has one.
    client : str
        Whom the question is for.
    before : callable, optional
        Puts the questions that come before this one to a node.
    remembers : bool
        Whether the node remembers its answer beyond the message: the same question gets the same
        bytes, or none.
    simulated : bool
        Whether only a simulated client answers.
    fanouts : tuple of int
        The tree of trusted aggregators, where the scheme has one.
    """

    half: type[SchemeClient]
    user: Callable[..., Any] = fit
    fields: Mapping[str, Any] | Callable[["Node"], Fields] = field(default_factory=dict)
    phase: str = "train"
    model: Mapping[str, Any] | Callable[["Node"], Fields] = field(default_factory=lambda: MODEL)
    summed: int = 0
    failing: str = "refused"
    charged: bool = False
    once: bool = False
    kept: bool = True
    reach: float = 0.0
    grid: int = 0
    unprotected: bool = False
    other: Mapping[str, Any] = field(default_factory=lambda: {"header": {"request": 1}})
    single: bool = False
    client: str = "0"
    before: Callable[["Node"], None] | None = None
    remembers: bool = False
    simulated: bool = False
    fanouts: tuple[int, ...] = (1, 2)


class Inner(NumPyClient):
    """A user's client."""

    def __init__(self, user: Callable[[list[Any]], Any]) -> None:
        self._user = user

    def fit(self, parameters: list[Any], config: Any) -> Any:
        return self._user(parameters)

    def evaluate(self, parameters: list[Any], config: Any) -> Any:
        return self._user(parameters)


class Node:
    """A deployed node in a folder of its own; another process or a restart is another `Node`.

    Parameters
    ----------
    folder : Path
        Where all of it lies; made if it is not there.
    case : Case
        The scheme that it works under.
    user : callable, optional
        The user's code; by default as it should be.
    policy : dict
        What its operator allows; by default also answers without noise, where the case is one.
    seed : int, optional
        Of its noise.
    by_message : bool
        Whether the user's code is a function of a Message-API app, which gets and returns messages.
    """

    def __init__(
        self,
        folder: Path,
        case: Case,
        user: Callable[..., Any] | None = None,
        *,
        policy: Fields | None = None,
        seed: int | None = None,
        by_message: bool = False,
    ) -> None:
        self.case, self.folder = case, folder
        self.tree = m2fdp.TierTree.of_fanouts(case.fanouts, p=1.0)
        if not folder.exists():
            folder.mkdir()
            self._equip()
        allowed: Fields = {"allow_unprotected": [case.half.scheme]} if case.unprotected else {}
        parent = self.tree.parent(case.client)
        trusted = [] if parent == m2fdp.CLOUD else [parent]
        policy = {"trusted_parents": trusted, **(allowed if policy is None else policy)}
        (folder / "policy.toml").write_text(tomli_w.dumps(policy))
        self.config = self.config_of(case.client)
        if seed is not None:
            self.config["insecure-seed"] = seed
        if case.simulated:
            self.config["privacy-simulated"] = True
        self.context = Context(1, 1, self.config, RecordDict(), {})
        self.ran = 0
        self._user = user or case.user
        if case.before is not None:
            case.before(self)
        if case.half in (ACFLClient, FedVSClient, SplitVFLClient):
            self.app = own_client_app(case.half, lambda context: self._given)
        elif by_message:
            self.app = ClientApp(mods=[as_mod(case.half)])
            self.app.train()(lambda message, context: self._given(message))
        else:
            half, inner = case.half, Inner(self._given)
            self.app = numpy_client_app(lambda context: half(inner, context))

    def _given(self, *parameters: Any) -> Any:
        self.ran += 1
        return self._user(*parameters)

    def _equip(self) -> None:
        """Write keys and pins: of a small tree where the case is one, else of three clients."""
        if self.case.half is M2FDPClient:
            zone_nodes(self.tree, self.folder)
            return
        if self.case.summed:
            pins = {name: Identity.generate().public for name in "123"}
            (self.folder / "0.pins").write_text(tomli_w.dumps({"clients": pins}))

    def config_of(self, name: str) -> Fields:
        """Return the configuration of a client's node."""
        config: Fields = {
            "client-id": name,
            "privacy-state": str(self.folder),
            "privacy-policy": str(self.folder / "policy.toml"),
            "m2fdp-role": "device" if name in self.tree.devices else "aggregator",
        }
        for key, suffix in (("privacy-pins", "pins"), ("privacy-identity", "pem")):
            if (self.folder / f"{name}.{suffix}").exists():
                config[key] = str(self.folder / f"{name}.{suffix}")
        return config

    def keys_of(self, name: str, *entries: str) -> Fields:
        """Return the key of another node of the tree, and its signature, under some names."""
        context = Context(1, 1, self.config_of(name), RecordDict(), {})
        told = M2FDPClient(None, context).introduce("e")
        return dict(zip(entries, (told["key"], told["signature"]), strict=True))

    def ask(self, *, model: Any = None, header: Fields | None = None, **changes: Any) -> Said:
        """Put the case's question, with some changes, to the node; return what leaves it."""
        case = self.case
        own = case.fields(self) if callable(case.fields) else dict(case.fields)
        own |= {key.replace("_", "-"): value for key, value in changes.items()}
        named: Fields = {"experiment_id": "e", "server_round": 1, **(header or {})}
        named = {"scheme": case.half.scheme, "phase": case.phase, **named}
        content = RecordDict(
            {
                "arrays": record(self._model() if model is None else dict(model)),
                "config": ConfigRecord(),
                RECORD: ConfigRecord(Header(**named).write(own)),
            }
        )
        if case.summed:
            content[JOIN] = ConfigRecord()
        with acting_as_server(1):
            kind = "evaluate" if case.phase == "evaluate" else "train"
            message = Message(content, 1, kind)
            try:
                reply = self.app(message, self.context)
            # Flower's runner tells it so.
            except Exception as error:  # noqa: BLE001
                return "refused", 2, f"{type(error)}:<'{error}'>"
        if reply.has_error():
            return "refused", reply.error.code, reply.error.reason
        arrays, fields, metrics = {}, {}, {}
        for name, entry in reply.content.items():
            if isinstance(entry, ArrayRecord):
                arrays = {key: array.numpy() for key, array in entry.items()}
            elif name == RECORD:
                fields = dict(entry)
            else:
                metrics = dict(entry)
        return "answer", arrays, fields, metrics

    def _model(self) -> Fields:
        model = self.case.model
        return model(self) if callable(model) else dict(model)

    def charges(self) -> int:
        """Return how many releases the node's ledger has."""
        return len(self._ledger().entries())

    def unanswered(self) -> int:
        """Return how many of them never got an answer."""
        return len(self._ledger().unanswered())

    def _ledger(self) -> Ledger:
        client = self.case.client
        return Ledger(self.folder / f"{client}.ledger", data_set=client)

    def kept(self) -> list[bytes]:
        """Return the replies that the node has kept."""
        return [path.read_bytes() for path in self.folder.glob(f"{self.case.client}.*/*.reply")]


def plain(said: Said) -> Any:
    """Return what left a node as one value that can be compared, but for what its key signed."""
    if said[0] == "refused":
        return said
    _, arrays, fields, metrics = said
    return (
        {name: (a.dtype.str, a.shape, a.tobytes()) for name, a in arrays.items()},
        {name: value for name, value in fields.items() if name != SIGNATURE},
        metrics,
    )


def join_any_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let questions be in a secure sum of `SUMMED` honest clients, without masks."""
    place = SimpleNamespace(
        believed=SimpleNamespace(clients=SUMMED, honest=SUMMED, certain=SUMMED),
        needed=[],
        withstood=0,
        bounds=SimpleNamespace(code_limit=CODE_LIMIT),
        masked=lambda arrays, metrics: (arrays, {}),
    )

    def join(context: Any, header: Any, content: RecordDict) -> Any:
        policy_of(context).check_sum(SUMMED)
        return place

    monkeypatch.setattr(secure_sum, "join", join)
