"""Where a node keeps ledger, replies and policy, and who may say so."""

import logging
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from pinned import pinned_nodes

from flwr_privacy.accounting import Charge
from flwr_privacy.clients.node.context_store import (
    DATA_SET_VARIABLE,
    POLICY_VARIABLE,
    SIMULATED,
    STATE_VARIABLE,
    WITNESS_VARIABLE,
    ContextStore,
    refuse_node_keys,
)
from flwr_privacy.clients.node.secure_sum import _own_key
from flwr_privacy.errors import DeclinedError, InvalidParameterError, LedgerError
from flwr_privacy.pipeline.experiment_keys import own_pair
from flwr_privacy.privacy.ledger import Entry, Question
from flwr_privacy.privacy.policy import Policy

QUESTION = Question(experiment_id="e", phase="train", server_round=1)


@pytest.fixture(autouse=True)
def deployed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look like a deployed node with an environment that names nothing."""
    for variable in (STATE_VARIABLE, POLICY_VARIABLE, DATA_SET_VARIABLE, WITNESS_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.delitem(sys.modules, "ray", raising=False)


def store(
    config: dict[str, Any], *, run_config: dict[str, Any] | None = None, run_id: int = 5
) -> ContextStore:
    return ContextStore.of(
        Context(
            run_id=run_id,
            node_id=1,
            node_config={"client-id": "ward-7", **config},
            state=RecordDict(),
            run_config=run_config or {},
        )
    )


def enter(kept: ContextStore, server_round: int = 1) -> None:
    question = Question(experiment_id="e", phase="train", server_round=server_round)
    with kept.ledger.locked() as locked:
        charge = Charge(neighbours="replace_one", noise_multiplier=1.25)
        locked.charge(Entry(question=question, scheme="udp", unit="user", charge=charge))
    kept.replies.keep(question, b"noised")


# -- Who -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("others", [["ward-1", "ward-2"], ["ward-1", "ward-2", "ward-7"]])
def test_a_node_counts_itself_among_those_that_it_pins(tmp_path: Path, others: list[str]) -> None:
    config = pinned_nodes(tmp_path, others)[0]
    pins = {"privacy-state": str(tmp_path), "privacy-pins": config["privacy-pins"]}
    assert store(pins).pinned == 3
    assert store({"privacy-state": str(tmp_path)}).pinned is None


# -- Where ---------------------------------------------------------------------------------------


def test_ledger_and_replies_lie_in_the_folder_that_the_node_names(tmp_path: Path) -> None:
    kept = store({"privacy-state": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []  # to look is not to write
    enter(kept)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"ward-7.ledger", "ward-7.replies"}
    again = store({"privacy-state": str(tmp_path)}, run_id=6)  # another run, the same node
    assert len(again.ledger.entries()) == 1
    assert again.replies.find(QUESTION) == b"noised"


def test_the_operator_names_a_folder_for_the_witness_of_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / name for name in ("state", "configured", "environment")]
    for folder in folders:
        folder.mkdir()
    state, configured, environment = folders
    config = {"privacy-state": str(state)}
    monkeypatch.setenv(WITNESS_VARIABLE, str(environment))
    enter(store({**config, "privacy-witness": str(configured)}))
    assert [path.name for path in configured.iterdir()] == ["ward-7.witness"]
    assert list(environment.iterdir()) == []
    with pytest.raises(LedgerError, match=r"1 charges, and its witness .* is not there"):
        enter(store(config), server_round=2)
    store(config).ledger.begin_witness()
    enter(store(config), server_round=2)
    with pytest.raises(LedgerError, match=r"the witness has no folder: .*tpyo"):
        store({**config, "privacy-witness": str(tmp_path / "tpyo")})
    monkeypatch.setenv(WITNESS_VARIABLE, "")  # as good as not there
    assert store(config).ledger.witness is None


def test_the_operators_environment_names_the_data_set_of_an_app(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"privacy-state": str(tmp_path)}
    for name, ledger in (
        (None, "ward-7"),
        ("images", "images"),
        ("texts", "texts"),
        ("", "ward-7"),
    ):
        if name is not None:
            monkeypatch.setenv(DATA_SET_VARIABLE, name)
        enter(store(config), server_round=1)
        assert (tmp_path / f"{ledger}.ledger").exists()
        assert store(config).ledger.data_set == ledger
    assert [len(store(config).ledger.entries()) for _ in "a"] == [2]
    monkeypatch.setenv(DATA_SET_VARIABLE, "images")
    assert store({**config, "privacy-data-set": "images"}).ledger.data_set == "images"
    with pytest.raises(LedgerError, match=r"two names: privacy-data-set = 'x' .* = 'images'"):
        store({**config, "privacy-data-set": "x"})
    for client in ("3", "4"):  # one environment for all of them
        simulated = {**config, SIMULATED: True, "client-id": client}
        assert store(simulated).ledger.data_set == f"images@{client}"
        assert store({**simulated, "privacy-data-set": "images"}).ledger.data_set == "images"
    monkeypatch.setenv(DATA_SET_VARIABLE, "../images")
    with pytest.raises(InvalidParameterError, match=r"privacy-data-set = '../images'"):
        store(config)


def test_simulated_clients_keep_their_replies_together(tmp_path: Path) -> None:
    clients = [
        store({"privacy-state": str(tmp_path), SIMULATED: True, "client-id": name})
        for name in ("a", "b")
    ]
    for kept in clients:
        enter(kept)
    assert {path.name for path in tmp_path.iterdir()} == {"a.ledger", "b.ledger", "replies"}
    assert len(list((tmp_path / "replies").iterdir())) == 1
    for kept in clients:
        assert kept.replies.find(QUESTION) == b"noised"


def test_the_environment_counts_where_the_configuration_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {name: tmp_path / name for name in ("configuration", "environment")}
    for folder in folders.values():
        folder.mkdir()
    monkeypatch.setenv(STATE_VARIABLE, str(folders["environment"]))
    assert store({}).ledger.path.parent == folders["environment"]
    named = store({"privacy-state": str(folders["configuration"])})
    assert named.ledger.path.parent == folders["configuration"]
    assert named.replies.folder.parent == folders["configuration"]


def test_a_deployed_node_without_a_folder_is_told_what_to_do() -> None:
    text = r"name an existing folder as privacy-state in .*or as FLWR_PRIVACY_STATE in"
    with pytest.raises(LedgerError, match=text):
        store({})


@pytest.mark.parametrize("source", ["configuration", "environment"])
def test_a_folder_that_is_missing_or_a_file_is_refused_and_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    (tmp_path / "file").write_text("")
    for name in ("typo", "file", "file/below"):
        path = tmp_path / name
        config = {"privacy-state": str(path)} if source == "configuration" else {}
        monkeypatch.setenv(STATE_VARIABLE, str(path))
        with pytest.raises(LedgerError, match=f"there is no folder {path}"):
            store(config)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("source", ["configuration", "environment"])
def test_an_empty_name_names_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(STATE_VARIABLE, "")
    with pytest.raises(LedgerError):
        store({"privacy-state": ""} if source == "configuration" else {})


@pytest.mark.parametrize("config", [{}, {"privacy-simulated": False}])
def test_a_deployed_node_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> None:
    kept = store({"privacy-state": str(tmp_path), **config})
    assert kept.durable
    assert flushed(kept, monkeypatch) == (4, 2)  # a file and its folder, each


def test_a_simulated_client_does_not_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = store({"privacy-state": str(tmp_path), "privacy-simulated": True})
    assert not kept.durable
    assert flushed(kept, monkeypatch) == (0, 0)
    again = store({"privacy-state": str(tmp_path)})
    assert len(again.ledger.entries()) == 1
    assert again.setups.find(QUESTION) == b"set up"


def test_a_client_on_flowers_engine_does_not_wait_for_the_disk(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert flushed(store({}), monkeypatch) == (0, 0)


def flushed(kept: ContextStore, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Charge and keep an answer and a setup; return how often the disk was waited for in each."""
    calls: list[int] = []
    monkeypatch.setattr(os, "fsync", calls.append)
    enter(kept)
    charged = len(calls)
    kept.setups.keep(QUESTION, b"set up")
    return charged, len(calls) - charged


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Look like a worker of Ray, which plays simulated clients; return the temporary folder."""
    worker = SimpleNamespace(get_actor_id=lambda: "an actor")
    ray = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: worker)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_simulated_clients_share_a_folder_of_their_run(engine: Path) -> None:
    one, other = store({}), store({"client-id": "8"})
    assert one.ledger.path.parent == other.ledger.path.parent
    assert one.ledger.path.parent.parent == engine
    assert one.ledger.path != other.ledger.path
    mode = stat.S_IMODE(os.stat(one.ledger.path.parent).st_mode)
    assert mode == 0o700
    assert store({}, run_id=6).ledger.path.parent != one.ledger.path.parent


@pytest.mark.parametrize(("initialised", "actor"), [(False, "an actor"), (True, None)])
def test_a_process_that_only_uses_ray_plays_no_simulated_clients(
    engine: Path, monkeypatch: pytest.MonkeyPatch, initialised: bool, actor: str | None
) -> None:
    driver = SimpleNamespace(get_actor_id=lambda: actor)
    ray = SimpleNamespace(is_initialized=lambda: initialised, get_runtime_context=lambda: driver)
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(LedgerError, match="ledger has no folder"):
        store({})
    assert list(engine.iterdir()) == []


def test_in_a_simulation_too_a_named_folder_is_the_one(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    assert store({"privacy-state": str(own)}).ledger.path.parent == own
    monkeypatch.setenv(STATE_VARIABLE, str(own))
    assert store({}).ledger.path.parent == own
    assert [path.name for path in engine.iterdir()] == ["own"]
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "typo"))
    with pytest.raises(LedgerError, match="there is no folder"):
        store({})


LOOK = """
from flwr.app import Context, RecordDict
from flwr_privacy.clients.node.context_store import ContextStore
from flwr_privacy.errors import LedgerError

context = Context(
    run_id=3, node_id=1, node_config={"client-id": "a"}, state=RecordDict(), run_config={}
)
try:
    print(ContextStore.of(context).ledger.path)
except LedgerError:
    print("no place")
"""


IMPORTS = """
import flwr.clientapp, flwr.serverapp, flwr.client, flwr.server
from flwr.simulation import run_simulation
import ray, flwr.simulation.ray_transport.ray_actor
"""


def test_what_an_app_imports_does_not_make_a_deployed_node_a_simulated_one(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != STATE_VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", f"{IMPORTS}{LOOK}"],
        env={**environment, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "no place\n"
    assert not list(tmp_path.glob("flwr-privacy-*"))


# -- Whose ---------------------------------------------------------------------------------------


def test_the_ledger_is_of_the_data_set_and_the_replies_are_of_the_client(tmp_path: Path) -> None:
    shared = {"privacy-state": str(tmp_path), "privacy-data-set": "hospital"}
    one, other = store({**shared}), store({**shared, "client-id": "ward-8"})
    assert one.ledger.path == other.ledger.path == tmp_path / "hospital.ledger"
    enter(one)
    assert len(other.ledger.entries()) == 1
    assert other.replies.find(QUESTION) is None
    # By default the data are the client's own.
    assert store({"privacy-state": str(tmp_path)}).ledger.data_set == "ward-7"


def test_a_client_is_known_by_its_partition_where_it_has_no_other_name(tmp_path: Path) -> None:
    config = {"privacy-state": str(tmp_path), "partition-id": 3}
    context = Context(run_id=1, node_id=1, node_config=config, state=RecordDict(), run_config={})
    assert ContextStore.of(context).client_id == "3"
    assert ContextStore.of(context).ledger.path.name == "3.ledger"


@pytest.mark.parametrize("name", ["../up", "a/b", "", "..", "with space", "x" * 65])
def test_a_data_set_whose_name_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    with pytest.raises(InvalidParameterError, match="1 to 64 letters, digits"):
        store({"privacy-state": str(folder), "privacy-data-set": name})
    assert [path.name for path in tmp_path.rglob("*")] == ["state"]


def test_a_malformed_name_of_a_data_set_is_named_as_such(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match="privacy-data-set = 'my data'"):
        store({"privacy-state": str(tmp_path), "privacy-data-set": "my data"})


# -- What the operator allows ----------------------------------------------------------------------


def test_without_a_policy_all_is_allowed(tmp_path: Path) -> None:
    assert store({"privacy-state": str(tmp_path)}).policy == Policy()


def test_the_policy_is_read_from_the_configuration_else_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, bound in (("one", 1.0), ("two", 2.0)):
        (tmp_path / f"{name}.toml").write_text(f"max_epsilon = {bound}\n")
    monkeypatch.setenv(POLICY_VARIABLE, str(tmp_path / "two.toml"))
    config = {"privacy-state": str(tmp_path)}
    assert store(config).policy == Policy(max_epsilon=2.0)
    config["privacy-policy"] = str(tmp_path / "one.toml")
    assert store(config).policy == Policy(max_epsilon=1.0)


@pytest.mark.parametrize("source", ["configuration", "environment"])
@pytest.mark.parametrize("content", [None, "max_epsilon = ", "max_epsilom = 1.0", "units = 3"])
def test_a_policy_that_cannot_be_read_is_not_taken_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, content: str | None
) -> None:
    path = tmp_path / "policy.toml"
    if content is not None:
        path.write_text(content)
    config = {"privacy-state": str(tmp_path)}
    if source == "configuration":
        config["privacy-policy"] = str(path)
    else:
        monkeypatch.setenv(POLICY_VARIABLE, str(path))
    with pytest.raises(LedgerError, match=str(path)):
        store(config)


def test_an_empty_name_of_a_policy_is_not_taken_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(POLICY_VARIABLE, "")
    with pytest.raises(LedgerError, match="policy"):
        store({"privacy-state": str(tmp_path)})


# -- What a server may not say ---------------------------------------------------------------------

KEYS = ["privacy-state", "privacy-policy", "privacy-data-set", "insecure-seed", "privacy-witness"]


@pytest.mark.parametrize("key", [*KEYS, *(key.replace("-", "_") for key in KEYS)])
def test_a_run_may_not_set_what_is_the_nodes(tmp_path: Path, key: str) -> None:
    config = {"privacy-state": str(tmp_path)}
    with pytest.raises(InvalidParameterError, match=f"run-config = .'{key}'.: expected no keys"):
        store(config, run_config={"rounds": 3, key: "0"})
    with pytest.raises(InvalidParameterError, match=f"message = .'{key}'."):
        refuse_node_keys("message", {"epsilon": 1.0, key: 3})


def test_other_settings_of_a_run_change_nothing(tmp_path: Path) -> None:
    settings = {"client-id": "other", "state": "/elsewhere", "seed": 3, "policy": "none"}
    kept = store({"privacy-state": str(tmp_path)}, run_config=settings)
    assert kept.client_id == "ward-7"
    assert kept.ledger.path.parent == tmp_path
    assert kept.insecure_seed is None
    refuse_node_keys("message", settings)


# -- Randomness ----------------------------------------------------------------------------------


def test_without_a_seed_no_two_streams_are_alike(tmp_path: Path) -> None:
    kept = store({"privacy-state": str(tmp_path)})
    streams = [kept.random(QUESTION, "noise") for _ in range(20)]
    assert all(stream.secure for stream in streams)
    assert len({stream.bits(128) for stream in streams}) == 20


def test_a_seed_gives_each_question_and_purpose_of_a_client_a_stream_of_its_own(
    tmp_path: Path,
) -> None:
    def draw(purpose: str = "noise", seed: int = 7, client: str = "a", **changes: Any) -> bytes:
        entries = {"experiment_id": "e", "phase": "train", "server_round": 1, "request": 0}
        config = {"privacy-state": str(tmp_path), "insecure-seed": seed, "client-id": client}
        stream = store(config).random(Question(**{**entries, **changes}), purpose)
        assert not stream.secure
        return stream.uint64(4).tobytes()

    assert draw() == draw()
    others: list[dict[str, Any]] = [
        {},
        {"purpose": "sample"},
        {"seed": 8},
        {"client": "b"},
        {"experiment_id": "f"},
        {"phase": "other"},
        {"server_round": 2},
        {"request": 1},
        {"server_round": 0, "request": 1},
        {"client": "ae", "experiment_id": "e"},
    ]
    assert len({draw(**changes) for changes in others}) == len(others)


def test_a_seed_does_not_depend_on_the_run_or_the_folder(tmp_path: Path) -> None:
    draws = []
    for run_id in (1, 2):
        folder = tmp_path / str(run_id)
        folder.mkdir()
        kept = store({"privacy-state": str(folder), "insecure-seed": 3}, run_id=run_id)
        draws.append(kept.random(QUESTION, "noise").uint64(3))
    np.testing.assert_array_equal(*draws)


def test_a_seed_is_warned_of_whenever_it_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config: dict[str, Any] = {"privacy-state": str(tmp_path)}
    with caplog.at_level(logging.WARNING):
        store(config).random(QUESTION, "noise")
        assert caplog.text == ""
        for count in (1, 2):
            store({**config, "insecure-seed": 0}).random(QUESTION, "noise")
            assert caplog.text.count("client ward-7 draws its noise from a seed") == count


@pytest.mark.parametrize("seed", [-1, 1.0, "7", True, ""])
def test_a_seed_is_a_whole_number(tmp_path: Path, seed: Any) -> None:
    with pytest.raises(InvalidParameterError, match="insecure-seed = "):
        store({"privacy-state": str(tmp_path), "insecure-seed": seed})


# -- What is shown -------------------------------------------------------------------------------


def test_nothing_of_ledger_and_replies_is_in_a_repr(tmp_path: Path) -> None:
    kept = store({"privacy-state": str(tmp_path)})
    enter(kept, server_round=918273)
    stream = kept.random(QUESTION, "noise")
    drawn = stream.bits(64)
    for text in (repr(kept), str(kept), repr(stream), f"{kept.ledger} {kept.replies}"):
        assert "1.25" not in text
        assert "918273" not in text
        assert "noised" not in text
        assert str(drawn) not in text


@pytest.mark.parametrize("value", ["false", "no", "0", "true", 1])
def test_a_node_is_simulated_only_if_its_configuration_says_true(
    tmp_path: Path, value: str | int
) -> None:
    with pytest.raises(InvalidParameterError, match="privacy-simulated"):
        store({"privacy-state": str(tmp_path), "privacy-simulated": value})


@pytest.mark.parametrize("way", ["secure sum", "key"])
def test_keys_of_ever_more_experiments_fill_no_more_than_the_disk_that_is_allowed(
    tmp_path: Path, way: str
) -> None:
    (tmp_path / "policy.toml").write_text("max_disk = 2000")
    config = {"client-id": "a", "privacy-policy": str(tmp_path / "policy.toml")}
    kept = store({"privacy-state": str(tmp_path), **config})

    def introduced(experiment: str) -> None:
        if way == "key":
            own_pair(kept, "m2fdp", experiment)
        else:
            _own_key(kept, experiment)

    introduced("first")
    while kept.disk() < 2000:
        introduced(f"e{kept.disk()}")
    files = len(list(tmp_path.rglob("*")))
    with pytest.raises(DeclinedError, match="max_disk = 2000"):
        introduced("another")
    introduced("first")  # it has its file
    assert len(list(tmp_path.rglob("*"))) == files
