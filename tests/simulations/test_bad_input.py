"""What a user may do wrong on the command line: one line that says what to do, and exit code 2."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Command

from flwr_privacy.simulations.settings.run_folder import RunFolder
from flwr_privacy.simulations.settings.run_settings import Settings
from flwr_privacy.strategies.state import checkpoint

CUT = checkpoint._MAGIC + bytes(50)
INLINE = ("run", "--engine", "inline", "--clients", "4")
UDP = ("--scheme", "udp", "--set", "unit=record")
TREE = ("--scheme", "m2fdp", "--set", "unit=device")
BAD: list[tuple[tuple[str, ...], str]] = [
    # Names
    (("--scheme", "rnu"), "scheme = 'rnu': expected one of 'acfl', "),
    (("--scheme", "upd"), "(nearest: 'udp', "),
    (("--task", "digits-mpl"), "task = 'digits-mpl': expected one of "),
    (("--partition", "labls"), "partition.kind = 'labls': expected one of "),
    ((*UDP, "--set", "epsilom=3"), "--set = 'epsilom': expected a known key, nearest: 'epsilon'"),
    ((*UDP, "--set", "strategy.epsilom=3"), "UDP has no 'epsilom': the nearest is 'epsilon'"),
    ((*UDP, "--set", "noise=gdpfixed"), "noise = 'gdpfixed': expected one of "),
    (
        ("--set", "training.lerning_rate=1"),
        "--set = 'training.lerning_rate': expected a known key, nearest: 'training.learning_rate'",
    ),
    (("--set", "secure_sum.treshold=3"), "nearest: 'secure_sum.threshold'"),
    (("--set", "fraction_train=0.5"), "--set = 'fraction_train': expected a known key, here 'per_"),
    # Types
    (("--set", "rounds=abc"), "rounds = 'abc': expected an integer of at least 1"),
    (("--set", "rounds=2.5"), "rounds = 2.5: expected an integer of at least 1"),
    (("--set", "training=5"), "training = 5: expected a table of settings"),
    (("--set", "strategy=3"), "strategy = 3: expected a table of parameters"),
    (("--set", "secure_sum=3"), "secure_sum = 3: expected true, false or a table of settings"),
    (("--set", "partition.sizes=abc"), "partition.sizes = 'abc': expected integers, as 400,800"),
    (("--set", "clients"), "--set = 'clients': expected key=value"),
    (("--set", "=3"), "--set = '=3': expected key=value"),
    ((*UDP, "--set", "epsilon="), "epsilon = '': expected a finite number"),
    # Twice
    (
        ("--set", "rounds=1", "--set", "rounds=2"),
        "--set = 'rounds=2': expected one value of rounds, not two",
    ),
    (
        ("--rounds", "1", "--set", "rounds=2"),
        "--set = 'rounds=2': expected one value: --rounds has one",
    ),
    (
        ("--partition", "iid", "--set", "partition.kind=shards"),
        "--set = 'partition.kind=shards': expected one value: --partition has one",
    ),
    (
        (*UDP, "--set", "strategy.unit=user"),
        "--set = 'strategy.unit=user': expected one value of strategy.unit, not two",
    ),
    ((*UDP, "--set", "epsilon=abc"), "epsilon = 'abc': expected a finite number"),
    ((*UDP, "--set", "epsilon=true"), "epsilon = True: expected a finite number"),
    ((*UDP, "--set", "keep_back=3"), "keep_back = 3: expected"),
    ((*TREE, "--set", "fanouts=a,b"), "fanouts = 'a': expected an integer of at least 1"),
    # Ranges
    (("--clients", "0"), "clients = 0: expected an integer of at least 1"),
    (("--rounds", "0"), "rounds = 0: expected an integer of at least 1"),
    (("--per-round", "5"), "per_round = 5: expected an integer from 1 to 4"),
    (("--set", "quorum=5"), "quorum = 5: expected an integer from 1 to 4"),
    (("--set", "train_records=100000"), "train_records = 100000: expected"),
    ((*UDP, "--set", "epsilon=0"), "epsilon = 0: expected a number above 0"),
    ((*UDP, "--set", "delta=2"), "delta = 2: expected a number strictly between 0 and 1"),
    (
        ("--scheme", "mspdq-ldp", "--set", "epsilon=0"),
        "epsilon = 0: expected a finite number",
    ),
    (("--scheme", "central-dp", "--set", "epsilon=0"), "epsilon = 0: expected"),
    ((*TREE, "--set", "fanouts=2,2", "--set", "epsilon=0"), "epsilon = 0: expected"),
    (("--scheme", "acfl", "--task", "digits-rff", "--set", "epsilon=0"), "epsilon = 0: expected"),
    (("--workers", "5"), "workers = 5: expected at most 4, the number of clients"),
    (("--port", "99999"), "--port = 99999: expected an integer from 1 to 65535"),
    (
        ("--engine", "ray", "--gpus-per-client", "64"),
        "gpus_per_client = 64.0: expected at most the 0 GPUs of this machine",
    ),
    (
        ("--engine", "ray", "--cpus-per-client", "100000"),
        "cpus_per_client = 100000: expected at most the ",
    ),
    # What does not go together
    (("--port", "9000"), "--port = 9000: expected nothing with the engine 'inline'"),
    (("--gpus-per-client", "0.5"), "--gpus-per-client = 0.5: expected nothing with the engine"),
    (("--ray-address", "h:1"), "--ray-address = 'h:1': expected nothing with the engine 'inline'"),
    (
        ("--scheme", "acfl"),
        "task = 'digits-mlp': expected a linear regression of features: ",
    ),
    (("--scheme", "fedvs"), "task = 'digits-mlp': expected a task for 'fedvs', whose clients have"),
    ((*TREE,), "fanouts = None: expected the tree of aggregators"),
    (
        (*TREE, "--set", "fanouts=5,3", "--clients", "20"),
        "fanouts = '5,3': expected a tree with a leaf for each of the 20 clients, such as "
        "fanouts=5,4; this one has 15 leaves, for clients=15",
    ),
    # Files
    (("--out", "file/run"), "run folder = 'file/run': expected a folder that can be written"),
    (("--resume", "nowhere"), "run folder = 'nowhere': expected a folder that exists"),
    (("--resume", "file"), "run folder = 'file': expected a folder that exists"),
    ((*TREE, "--set", "tree=nowhere.toml"), "tree = 'nowhere.toml': expected a file that can be"),
]


def refused(done: object, folder: Path, kept: set[str], *, code: int = 2) -> str:
    """Return the only line of a refusal; nothing was printed or left before it."""
    assert done.returncode == code, done.stderr
    assert not done.stdout
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.count("nearest") <= 1
    assert {path.name for path in folder.iterdir()} == kept
    return str(done.stderr)


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_a_run_is_refused_in_one_line(
    command: Command, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    (tmp_path / "file").write_text("")
    start = ("run",) if "--resume" in arguments else INLINE
    assert message in refused(command(*start, *arguments), tmp_path, {"file"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rn",), "command = 'rn': expected one of "),
        (("calibrate", "--epsilon", "0", "--unit", "record"), "epsilon = 0.0: expected a number"),
        (("calibrate", "--epsilon", "8", "--unit", "clients"), "unit = 'clients': expected one of"),
        (
            ("calibrate", "--epsilon", "8", "--unit", "record", "--set", "epsilom=3"),
            "epsilom = 3: expected nothing for udp, which takes evaluation=private and every, "
            "share, loss_cap, label_histogram, fraction_evaluate (nearest: --epsilon)",
        ),
        (("report", "nowhere"), "run folder = 'nowhere': expected a folder that exists"),
        (("verify", "nowhere"), "nowhere"),
        (("experiment", "udp/figur4"), "experiment = 'udp/figur4': expected one of"),
        (("experiment", "fedvs/lossless", "--jobs", "0"), "--jobs = 0: expected an integer of"),
        (("experiment", "fedvs/lossless", "--out", "/dev/null"), "a folder that can be written"),
        (("replication", "--out", "/dev/null/pages"), "a folder that can be written"),
        (("reliability", "--out", "/dev/null/page.md"), "a file that can be written"),
        (("reliability", "--out", "/dev"), "a file that can be written (Is a directory)"),
        (("check", "nowhere", "--scheme", "udp"), "app = 'nowhere': expected the folder of a"),
        (("check", ".", "--scheme", "rnu"), "scheme = 'rnu': expected one of 'acfl', "),
        (("check", ".", "--scheme", "udp", "--unit", "recrod"), "(nearest: 'record')"),
        (("check", ".", "--scheme", "udp", "--epsilon", "0"), "epsilon = 0.0: expected a finite"),
        (("check", ".", "--scheme", "udp", "--clients", "0"), "clients = 0: expected an integer"),
        (("deploy", "--nodes", "1", "--no-policy"), "--nodes = 1: expected an integer of at least"),
        (
            ("deploy", "--resume", "nowhere"),
            "run folder = 'nowhere': expected a folder that exists",
        ),
    ],
)
def test_other_commands_are_refused_in_one_line(
    command: Command, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    assert message in refused(command(*arguments), tmp_path, set())


@pytest.mark.parametrize("root", [(), ("--data-root", "nowhere")])
def test_missing_data_are_told_with_the_remedy(
    command: Command, tmp_path: Path, root: tuple[str, ...]
) -> None:
    done = command(*INLINE, "--task", "mnist-mlp", *root)
    assert "--data-root" in refused(done, tmp_path, set(), code=3)


def damage(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda run: (run / name).write_bytes(content)


def changed(name: str, **changes: object) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        entries = {**json.loads((run / name).read_text()), **changes}
        (run / name).write_text(json.dumps(entries))

    return change


def remove(name: str) -> Callable[[Path], None]:
    return lambda run: (run / name).unlink()


@pytest.fixture
def interrupted(tmp_path: Path) -> Path:
    """Make the folder of a run that was interrupted in its second round."""
    run = RunFolder.create(tmp_path / "r", Settings(clients=4), engine="inline", nodes=4)
    run.append({"round": 0})
    run.append({"round": 1})
    run.finish("interrupted")
    return run.path


@pytest.mark.parametrize(
    ("spoil", "code", "message"),
    [
        (changed("summary.json", status="completed"), 2, "--resume = 'r': expected a run that is"),
        (changed("summary.json", engine="deployed"), 2, "flwr-privacy deploy --resume"),
        (
            remove("settings.toml"),
            2,
            "run folder = 'r': expected the folder of a run (it has no",
        ),
        (remove("summary.json"), 2, "it has no summary.json"),
        (damage("settings.toml", b"rounds = ["), 3, "settings.toml: the settings are damaged: "),
        (damage("settings.toml", b"\xff\xfe"), 3, "settings.toml: the settings are damaged: "),
        (damage("settings.toml", b"rnds = 3"), 3, "nearest: 'rounds'"),
        (damage("settings.toml", b"rounds = 0"), 3, "rounds = 0: expected an integer"),
        (damage("summary.json", b"{"), 3, "summary.json: no JSON"),
        (damage("summary.json", b"[]"), 3, "summary.json: no summary with a status"),
        (
            changed("summary.json", nodes="four"),
            3,
            "the summary is damaged: its nodes is",
        ),
        (
            changed("summary.json", engine=None),
            3,
            "the summary is damaged: its engine is",
        ),
        (damage("metrics.jsonl", b"{\n{}\n"), 3, "metrics.jsonl"),
        (damage("checkpoint.bin", b"nothing"), 5, "checkpoint.bin does not begin with"),
        (damage("checkpoint.bin", CUT), 5, "checkpoint.bin is damaged: its checksum does not fit"),
    ],
)
def test_a_damaged_run_folder_is_told_before_anything_begins(
    command: Command,
    tmp_path: Path,
    interrupted: Path,
    spoil: Callable[[Path], None],
    code: int,
    message: str,
) -> None:
    spoil(interrupted)
    before = {path.name for path in interrupted.iterdir()}
    assert message in refused(command("run", "--resume", "r"), tmp_path, {"r"}, code=code)
    assert {path.name for path in interrupted.iterdir()} <= before | {"lock", "server.lock"}


def test_pictures_do_not_need_the_backend_of_a_notebook(command: Command, tmp_path: Path) -> None:
    assert command(*INLINE, "--rounds", "1", "--out", "r").returncode == 0
    done = subprocess.run(
        [str(Path(sys.executable).parent / "flwr-privacy"), "report", "r", "--out", "both"],
        cwd=tmp_path,
        env={**os.environ, "MPLBACKEND": "module://matplotlib_of.nobody"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "both" / "report.html").exists()


def test_lists_need_no_brackets(command: Command, tmp_path: Path) -> None:
    lists = ("--set", "fanouts=2,2", "--set", "p=0.5", "--set", "partition.sizes=20,30")
    done = command(*INLINE, *TREE, *lists, "--set", "keep_back=1.bias,3.bias", "--out", "r")
    assert done.returncode == 0, done.stderr
    settings = RunFolder.open(tmp_path / "r").settings
    assert settings.partition.sizes == (20, 30)
    assert settings.strategy["fanouts"] == [2, 2]
    assert settings.strategy["keep_back"] == ["1.bias", "3.bias"]
