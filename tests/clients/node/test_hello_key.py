"""Which key a node signs its hello with, and where it keeps one that nobody gave it."""

import stat
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from apps import message_app
from flwr.app import ConfigRecord, Context, Message, RecordDict

from flwr_privacy.clients import FedAvgClient, as_mod
from flwr_privacy.clients.node.context_store import IDENTITY_VARIABLE, STATE_VARIABLE, identity_of
from flwr_privacy.errors import InvalidParameterError, LedgerError
from flwr_privacy.simulations.engines.inline import InlineGrid
from flwr_privacy.simulations.engines.inline.flower_internals import acting_as_server
from flwr_privacy.wire.hello import NONCE, NONCE_BYTES, proven_key
from flwr_privacy.wire.message import RECORD, Header
from flwr_privacy.wire.pins import Identity

Config = dict[str, Any]


@pytest.fixture(autouse=True)
def deployed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look like a deployed node with an environment that names nothing."""
    for variable in (STATE_VARIABLE, IDENTITY_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.delitem(sys.modules, "ray", raising=False)


def context(config: Config) -> Context:
    own = {"client-id": "ward-7", **config}
    return Context(run_id=1, node_id=1, node_config=own, state=RecordDict(), run_config={})


def hello(config: Config, **fields: Any) -> tuple[Message, int]:
    """Ask a node who it is; return its reply and its id."""
    grid = InlineGrid(message_app([as_mod(FedAvgClient)]), [{"client-id": "ward-7", **config}])
    header = Header(scheme="fedavg", experiment_id="e", phase="hello", server_round=0)
    content = RecordDict({RECORD: ConfigRecord(header.write(fields))})
    with acting_as_server(grid.run_id):
        (node,) = grid.get_node_ids()
        (reply,) = grid.send_and_receive([Message(content, node, "train")], timeout=5)
    return reply, node


def test_a_node_makes_a_key_and_keeps_it(tmp_path: Path) -> None:
    config = {"privacy-state": str(tmp_path), "privacy-simulated": False}
    nonces = [bytes([number]) * NONCE_BYTES for number in range(2)]
    keys = set()
    for nonce in nonces:
        reply, node = hello(config, **{NONCE: nonce})
        header, fields = Header.read(reply.content.config_records[RECORD])
        keys.add(proven_key(header, fields, nonce=nonce, node=node))
    path = tmp_path / "ward-7.identity"
    assert keys == {Identity.read(path).public}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {file.name for file in tmp_path.iterdir()} == {path.name, f"{path.name}.lock"}


def test_processes_that_make_a_key_at_once_have_one(tmp_path: Path) -> None:
    here = context({"privacy-state": str(tmp_path)})
    with ThreadPoolExecutor(8) as pool:
        identities = list(pool.map(identity_of, [here] * 8))
    assert len({identity.public for identity in identities if identity is not None}) == 1


def test_what_a_killed_process_left_of_a_key_is_no_key(tmp_path: Path) -> None:
    (tmp_path / "ward-7.identity.new").write_text("-----BEGIN")
    identity = identity_of(context({"privacy-state": str(tmp_path)}))
    assert identity is not None
    assert identity.public == Identity.read(tmp_path / "ward-7.identity").public


def test_clients_of_one_folder_have_their_own_keys(tmp_path: Path) -> None:
    state = {"privacy-state": str(tmp_path)}
    one, other = (identity_of(context({**state, "client-id": name})) for name in "ab")
    assert one is not None
    assert other is not None
    assert one.public != other.public


def test_the_key_that_the_operator_gives_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = Identity.generate()
    given.write(tmp_path / "ward-7.pem")
    for config in (
        {"privacy-state": str(tmp_path)},
        {"privacy-state": str(tmp_path), "privacy-simulated": True},
        {},
    ):
        found = identity_of(context({**config, "privacy-identity": str(tmp_path / "ward-7.pem")}))
        assert found is not None
        assert found.public == given.public
    monkeypatch.setenv(IDENTITY_VARIABLE, str(tmp_path / "ward-7.pem"))
    found = identity_of(context({}))
    assert found is not None
    assert found.public == given.public
    assert not (tmp_path / "ward-7.identity").exists()


WITHOUT: dict[str, Callable[[Path], Config]] = {
    "no folder": lambda folder: {},
    "simulated": lambda folder: {"privacy-state": str(folder), "privacy-simulated": True},
}


@pytest.mark.parametrize("config", WITHOUT.values(), ids=WITHOUT)
def test_who_has_no_key(tmp_path: Path, config: Callable[[Path], Config]) -> None:
    assert identity_of(context(config(tmp_path))) is None
    assert not list(tmp_path.iterdir())


def test_a_node_that_runs_any_client_has_no_key(tmp_path: Path) -> None:
    config = {"partition-id": 1, "cohorts": True, "privacy-state": str(tmp_path)}
    here = Context(run_id=1, node_id=1, node_config=config, state=RecordDict(), run_config={})
    assert identity_of(here) is None


def test_a_simulated_client_says_hello_without_a_nonce() -> None:
    reply, _ = hello({})
    assert dict(reply.content.config_records[RECORD])["client-id"] == "ward-7"


def test_a_node_with_a_key_refuses_a_hello_without_a_nonce(tmp_path: Path) -> None:
    reply, _ = hello({"privacy-state": str(tmp_path), "privacy-simulated": False})
    assert "hello: the entry 'nonce' is not 32 bytes" in reply.error.reason


def test_a_key_that_cannot_be_used_is_no_hello_without_one(tmp_path: Path) -> None:
    path = tmp_path / "ward-7.identity"
    path.write_text("no key")
    path.chmod(0o600)
    config = {"privacy-state": str(tmp_path), "privacy-simulated": False}
    with pytest.raises(LedgerError, match="the node's key cannot be used"):
        identity_of(context(config))
    reply, _ = hello(config, **{NONCE: bytes(NONCE_BYTES)})
    assert "the node's own privacy files cannot be used" in reply.error.reason
    with pytest.raises(LedgerError, match="there is no folder"):
        identity_of(context({"privacy-state": str(tmp_path / "nowhere")}))


def test_a_key_needs_a_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match=r"client-id = '\.\./x'"):
        identity_of(context({"client-id": "../x", "privacy-state": str(tmp_path)}))
