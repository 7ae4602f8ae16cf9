"""What `flwr-privacy state` shows and deletes of state folders that real trainings left."""

import errno
import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from pinned import pinned_nodes
from typer.testing import CliRunner, Result

from flwr_privacy.accounting import Charge
from flwr_privacy.errors import FlwrPrivacyError, InvalidParameterError, LedgerError
from flwr_privacy.pipeline.experiment_keys import own_pair
from flwr_privacy.pipeline.reply_cache import ReplyCache
from flwr_privacy.pipeline.shared_reply_cache import SharedReplyCache
from flwr_privacy.privacy.ledger import Entry, Ledger, Question
from flwr_privacy.simulations.app.server_app import app as server_app
from flwr_privacy.simulations.cli import app
from flwr_privacy.simulations.engines.inline import run_inline
from flwr_privacy.simulations.operations import prune as pruning
from flwr_privacy.simulations.operations.state_files import KINDS, OTHER, StateFile, state_files
from flwr_privacy.simulations.runner.complete_settings import settings_of
from flwr_privacy.simulations.runner.jobs import CLIENT_APP
from flwr_privacy.simulations.settings.run_folder import RunFolder
from flwr_privacy.wire.files import exclusive_lock

SCHEMES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "udp": (
        {"scheme": "udp", "unit": "record", "task": "digits-linear"},
        {"ledger", "notes", "replies", "locks"},
    ),
    "secure sum": (
        {"scheme": "fedavg", "secure_sum": True, "task": "digits-linear"},
        {"secure sums", "locks"},
    ),
    "acfl": (
        {"scheme": "acfl", "task": "digits-rff"},
        {"ledger", "notes", "replies", "setups", "locks"},
    ),
    "fedvs": (
        {"scheme": "fedvs", "task": "digits-rows"},
        {"steps", "keys", "locks"},
    ),
}


def run(command: str, folder: Path, *options: str | Path) -> Result:
    command_line = ["state", command, "--state", str(folder), *map(str, options)]
    return CliRunner().invoke(app, command_line, catch_exceptions=False)


class Trained:
    """A training of real nodes (no simulated ones), whose files lie in one state folder."""

    def __init__(self, folder: Path, values: dict[str, Any]) -> None:
        self.values = values
        self.run = self.folder_of(folder / "run")
        self.state = folder / "state"
        self.state.mkdir(mode=0o700)
        self.nodes = pinned_nodes(folder, [f"ward.{i}" for i in range(4)])
        self.experiment = self.run.summary["experiment_id"]
        self.start()

    def folder_of(self, path: Path, **more: str) -> RunFolder:
        settings = settings_of({"clients": 4, "rounds": 1, **self.values})
        settings = replace(settings, clients=None)  # each node is one, under its own name
        return RunFolder.create(path, settings, engine="inline", nodes=4, **more)

    def start(self) -> None:
        config = {
            "settings": self.run.settings_path.read_text(encoding="utf-8"),
            "run-dir": str(self.run.path),
            "resume": False,
        }
        nodes = self.nodes
        run_inline(server_app, CLIENT_APP, nodes=nodes, run_config=config, state=self.state)

    def kinds(self) -> set[str]:
        return {file.kind for file in state_files(self.state)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return trainings by scheme; each is carried out once, and its state is a copy."""
    made: dict[str, Trained] = {}

    def get(name: str, copy: Path) -> Trained:
        if name not in made:
            made[name] = Trained(tmp_path_factory.mktemp("trained"), SCHEMES[name][0])
        kept = made[name]
        own = object.__new__(Trained)
        own.__dict__ = {**kept.__dict__, "state": copy / "state"}
        shutil.copytree(kept.state, own.state)
        return own

    return get


@pytest.mark.parametrize("name", SCHEMES)
def test_every_file_of_a_training_has_its_client_and_its_kind(
    trained: Any, name: str, tmp_path: Path
) -> None:
    found = trained(name, tmp_path)
    files = state_files(found.state)
    assert found.kinds() == SCHEMES[name][1]
    assert {file.client for file in files} == {f"ward.{i}" for i in range(4)}
    shown = json.loads(run("show", found.state, "--json").stdout)
    assert sum(row["bytes"] for row in shown["files"]) == sum(file.size for file in files)
    text = run("show", found.state).stdout
    assert all(f"{kind}: {KINDS[kind][1]}" in text for kind in found.kinds())
    assert [row["experiment"] for row in shown["experiments"]] == [found.experiment]
    named = [file for file in files if file.name]
    assert [row["files"] for row in shown["experiments"]] == [len(named)]


@pytest.mark.parametrize("name", SCHEMES)
def test_nothing_of_an_experiment_is_deleted_unless_it_is_over(
    trained: Any, name: str, tmp_path: Path
) -> None:
    found = trained(name, tmp_path)
    before = state_files(found.state)
    assert run("prune", found.state, "--yes").stdout == "0 files, 0 bytes deleted\n"
    dry = run("prune", found.state, "--over", found.experiment).stdout
    assert "nothing was deleted (--yes deletes)" in dry
    assert state_files(found.state) == before
    with pytest.raises(InvalidParameterError, match="an experiment that has files here"):
        run("prune", found.state, "--over", "another")


@pytest.mark.parametrize("name", SCHEMES)
def test_an_experiment_that_is_over_leaves_ledgers_and_notes_and_gets_no_answer(
    trained: Any, name: str, tmp_path: Path
) -> None:
    found = trained(name, tmp_path)
    ledgers = {path: path.read_bytes() for path in found.state.glob("*.ledger")}
    notes = set(found.state.glob("*.notes/*"))
    run("prune", found.state, "--over", found.experiment, "--yes")
    assert found.kinds() <= {"ledger", "notes", "locks"}
    assert {path: path.read_bytes() for path in ledgers} == ledgers
    kept = set(found.state.glob("*.notes/*"))
    assert notes < kept
    assert {path.suffix for path in kept - notes} == {".stopped"}
    assert len(kept - notes) == 4
    # The server goes on with its experiment all the same: a node answers nothing of it.
    found.run = found.folder_of(tmp_path / "again", experiment_id=found.experiment)
    with pytest.raises(FlwrPrivacyError):
        found.start()
    assert {path: path.read_bytes() for path in ledgers} == ledgers


def kept(folder: Path, experiment: str = "e", server_round: int = 1) -> Path:
    """Cache a reply, and return its file."""
    question = Question(experiment_id=experiment, phase="train", server_round=server_round)
    ReplyCache(folder / "a.replies").keep(question, b"noised")
    return max((folder / "a.replies").glob("*.reply"), key=lambda path: path.stat().st_mtime_ns)


def test_what_a_killed_process_left_goes_after_a_day(tmp_path: Path) -> None:
    reply = kept(tmp_path)
    for path in (tmp_path / "a.ledger.new", reply.with_name(reply.name + ".new")):
        path.write_bytes(b"half")
    assert run("prune", tmp_path, "--yes").stdout == "0 files, 0 bytes deleted\n"
    for path in tmp_path.rglob("*.new"):
        os.utime(path, (time.time() - 90_000,) * 2)
    assert run("prune", tmp_path, "--yes").stdout.endswith("2 files, 8 bytes deleted\n")
    assert reply.exists()


def test_what_is_not_ours_stays_and_links_are_not_followed(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    reply = kept(state)
    outside = tmp_path / "records.csv"
    outside.write_text("data")
    (state / "a.replies" / reply.name.replace("-1-", "-2-")).symlink_to(outside)
    (state / "notes.txt").write_text("of the operator")
    others = [file.path.name for file in state_files(state) if file.kind == OTHER]
    assert len(others) == 2
    run("prune", state, "--over", "e", "--yes")
    assert not reply.exists()
    assert outside.read_text() == "data"
    assert (state / "notes.txt").exists()
    assert len(list((state / "a.replies").iterdir())) == 2  # the link and the lock


def test_the_key_of_a_zone_goes_with_its_experiment(tmp_path: Path) -> None:
    store = pruning._store(tmp_path, "a")
    own_pair(store, "m2fdp", "e")
    other = own_pair(store, "m2fdp", "f")
    run("prune", tmp_path, "--over", "e", "--yes")
    assert [file.kind for file in state_files(tmp_path)].count("keys") == 1
    assert own_pair(store, "m2fdp", "f").public == other.public


def test_the_key_with_which_a_client_says_hello_stays(tmp_path: Path) -> None:
    kept(tmp_path)
    for name in ("a.identity", "a.identity.lock", "a.identity.new"):
        (tmp_path / name).write_text("key")
    os.utime(tmp_path / "a.identity.new", (time.time() - 90_000,) * 2)
    found = {f.path.name: (f.client, f.kind) for f in state_files(tmp_path)}
    assert found["a.identity"] == ("a", "identity")
    assert found["a.identity.lock"] == ("a", "locks")
    run("prune", tmp_path, "--over", "e", "--yes")
    assert {f.name for f in tmp_path.glob("a.identity*")} == {"a.identity", "a.identity.lock"}


def test_a_reply_that_is_in_use_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "LOCK_TIMEOUT", 0.1)
    reply = kept(tmp_path)
    with (
        exclusive_lock(tmp_path / "a.replies" / "lock", timeout=0),
        pytest.raises(LedgerError, match="locked by another process"),
    ):
        run("prune", tmp_path, "--over", "e", "--yes")
    assert reply.exists()


def test_another_user_than_the_nodes_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = kept(tmp_path)
    monkeypatch.setattr(pruning.os, "geteuid", lambda: 4711)
    with pytest.raises(InvalidParameterError, match="user = 4711: expected the owner of"):
        run("prune", tmp_path, "--over", "e", "--yes")
    assert reply.exists()
    assert not list(tmp_path.glob("*.notes"))


def test_a_damaged_ledger_or_reply_does_not_hide_the_rest(tmp_path: Path) -> None:
    kept(tmp_path)
    kept(tmp_path, "f").write_bytes(b"damaged")
    (tmp_path / "a.ledger").write_bytes(b"damaged")
    shown = json.loads(run("show", tmp_path, "--json").stdout)
    assert {row["kind"] for row in shown["files"]} == {"ledger", "replies", "locks"}
    assert [row["experiment"] for row in shown["experiments"]] == ["e", "(without a known id)"]


@pytest.mark.parametrize(
    ("name", "files"), [("secure sum", "*.secure-sum/*"), ("fedvs", "*/*/state")]
)
def test_a_damaged_memory_names_no_experiment(
    trained: Any, name: str, files: str, tmp_path: Path
) -> None:
    found = trained(name, tmp_path)
    for path in found.state.glob(files):
        if path.suffix != ".lock":
            path.write_bytes(b"damaged\n" + path.read_bytes()[:40])
    shown = json.loads(run("show", found.state, "--json").stdout)
    assert [row["experiment"] for row in shown["experiments"]] == ["(without a known id)"]


def test_showing_many_clients_takes_one_look_at_each_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []
    seen = StateFile.__getattribute__

    def look(self: StateFile, name: str) -> Any:
        looks.append(name)
        return seen(self, name)

    counted = []
    for clients in (50, 100):
        for client in range(clients):
            (tmp_path / f"{client}.ledger.lock").touch()
        looks.clear()
        with monkeypatch.context() as patch:
            patch.setattr(StateFile, "__getattribute__", look)
            run("show", tmp_path, "--json")
        counted.append(len(looks))
    assert counted[1] < 2.1 * counted[0]


def test_replies_that_simulated_clients_share_are_of_all(tmp_path: Path) -> None:
    question = Question(experiment_id="e", phase="train", server_round=1)
    for client, data_set in (("a", "a"), ("b", "images@b")):  # a data set of the environment
        SharedReplyCache(tmp_path / "replies", client).keep(question, b"noised")
        with Ledger(tmp_path / f"{data_set}.ledger", data_set=data_set).locked() as book:
            charge = Charge(neighbours="replace_one", noise_multiplier=2.0)
            book.charge(Entry(question=question, scheme="udp", unit="user", charge=charge))
    assert "(all)" in run("show", tmp_path).stdout
    run("prune", tmp_path, "--over", "e", "--yes")
    assert {file.kind for file in state_files(tmp_path)} == {"ledger", "notes"}
    stopped = [path.parent.name for path in tmp_path.glob("*.notes/*.stopped")]
    assert sorted(stopped) == ["a.notes", "b.notes"]


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    for command in ("show", "prune"):
        with pytest.raises(InvalidParameterError, match="the folder of a node's state"):
            run(command, tmp_path / "nowhere")


def test_a_folder_that_may_not_be_searched_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: Path) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    (tmp_path / "ward-7.ledger").touch()
    for method in ("lstat", "is_dir"):  # it may be listed only; the folder above
        with monkeypatch.context() as patch:
            patch.setattr(Path, method, denied)
            for command in ("show", "prune"):
                with pytest.raises(InvalidParameterError, match=r"may search \(Permission denied"):
                    run(command, tmp_path)
