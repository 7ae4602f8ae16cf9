"""The command line: what it prints, what it leaves, and what survives a kill."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import Command
from markupsafe import escape

from flwr_privacy.simulations.cli import results
from flwr_privacy.simulations.cli.demo_runs import demo_runs
from flwr_privacy.simulations.engines.placement import Machine
from flwr_privacy.simulations.settings.run_folder import RunFolder
from flwr_privacy.simulations.settings.run_settings import Settings

COMMAND = Path(sys.executable).parent / "flwr-privacy"


def model(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / "model.npz") as archive:
        return dict(archive)


def same_model(one: Path, other: Path, *, exact: bool = True) -> bool:
    first, second = model(one), model(other)
    assert list(first) == list(second)
    for name, array in first.items():
        if exact:
            np.testing.assert_array_equal(array, second[name])
        else:  # Ray's replies come in any order, and with it the last bit of a sum
            np.testing.assert_allclose(array, second[name], rtol=1e-4, atol=1e-5)
    return True


def kill_after_rounds(arguments: Sequence[str], folder: Path, rounds: int, cwd: Path) -> None:
    """Start a run and kill its process, with no chance to clean up, after some rounds."""
    process = subprocess.Popen(
        [str(COMMAND), *arguments], cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    metrics = folder / "metrics.jsonl"
    end = time.monotonic() + 120
    while not metrics.exists() or metrics.read_text().count("\n") <= rounds:
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()


INLINE = ("run", "--engine", "inline", "--clients", "4")


def test_a_run_leaves_its_folder_and_two_can_be_compared(command: Command, tmp_path: Path) -> None:
    for partition in ("iid", "labels"):
        done = command(*INLINE, "--rounds", "2", "--partition", partition, "--out", partition)
        assert done.returncode == 0, done.stderr
        assert f"{partition}: round 2/2, accuracy 0." in done.stdout
        assert done.stdout.endswith(f"run: {partition}\n")
        expected = {"settings.toml", "summary.json", "metrics.jsonl", "checkpoint.bin"}
        assert {p.name for p in (tmp_path / partition).iterdir()} == {
            *expected,
            "model.npz",
            "log.txt",
            "lock",
            "server.lock",
            "privacy-card.json",
            "privacy-card.html",
        }
    done = command("report", "iid", "labels", "--out", "both")
    assert done.stdout == "report: both/report.html\n"
    assert len(json.loads((tmp_path / "both" / "report.json").read_text())["runs"]) == 2


@pytest.mark.parametrize("workers", [(), pytest.param(("--workers", "2"), marks=pytest.mark.long)])
def test_killed_in_the_middle_it_resumes_to_the_same_model(
    command: Command, tmp_path: Path, workers: tuple[str, ...]
) -> None:
    arguments = (*INLINE, "--rounds", "20")
    assert command(*arguments, "--out", "whole").returncode == 0
    arguments = (*arguments, *workers, "--out", "broken")
    kill_after_rounds(arguments, tmp_path / "broken", 5, tmp_path)
    assert not (tmp_path / "broken" / "model.npz").exists()
    resumed = command("run", "--resume", "broken")
    assert resumed.returncode == 0, resumed.stderr
    assert same_model(tmp_path / "whole", tmp_path / "broken")
    rounds = [json.loads(line)["round"] for line in (tmp_path / "broken/metrics.jsonl").open()]
    assert rounds == list(range(21))
    assert resumed.stdout.count("round 3/20") <= 1
    again = command("run", "--resume", "broken")
    assert again.returncode == 2
    assert "--resume = 'broken': expected a run that is not complete" in again.stderr
    assert not again.stdout


@pytest.mark.ray
def test_killed_on_ray_it_resumes_to_the_same_model(command: Command, tmp_path: Path) -> None:
    arguments = ("run", "--clients", "4", "--rounds", "30")
    assert command(*arguments, "--engine", "inline", "--out", "whole").returncode == 0
    kill_after_rounds([*arguments, "--out", "broken"], tmp_path / "broken", 3, tmp_path)
    assert not (tmp_path / "broken" / "model.npz").exists()
    resumed = command("run", "--resume", "broken")
    assert resumed.returncode == 0, resumed.stderr
    assert same_model(tmp_path / "whole", tmp_path / "broken", exact=False)


def test_ctrl_c_is_noted_and_can_be_resumed(command: Command, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [str(COMMAND), *INLINE, "--rounds", "5000", "--out", "r"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        # Where the tests run in the background, the signal is ignored, and so it would be here.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    metrics = tmp_path / "r" / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "to go on: flwr-privacy run --resume r" in errors
    assert "Traceback" not in errors
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["status"] == "interrupted"


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--rounds", "0"), 2, "rounds = 0: expected an integer of at least 1"),
        (("--per-round", "9"), 2, "per_round = 9: expected an integer from 1 to 4"),
        (("--scheme", "fedavgg"), 2, "scheme = 'fedavgg': expected one of 'acfl', 'central-dp'"),
        (("--task", "digit-mlp"), 2, "nearest: 'digits-mlp'"),
        (("--partition", "dirichlt"), 2, "nearest: 'dirichlet'"),
        (("--engine", "rayy"), 2, "engine = 'rayy': expected one of 'inline', 'ray'"),
        (("--set", "lerning=1"), 2, "--set = 'lerning': expected a known key"),
        (("--set", "ronds=1"), 2, "nearest: 'rounds'"),
        (("--set", "clipping_norm=1"), 2, "--set = 'clipping_norm': expected a known key"),
        (("--scheme", "udp"), 2, "unit = None: expected unit=user (all data of a client is"),
        (
            ("--scheme", "udp", "--set", "unit=user", "--set", "learning_rate=1"),
            2,
            "UDP has no 'learning_rate': only with unit=record",
        ),
        (("--scheme", "udp", "--set", "clippin_norm=1"), 2, "--set = 'clippin_norm': expected a"),
        (
            ("--scheme", "udp", "--set", "unit=user", "--set", "clipping_norm=0"),
            2,
            "clipping_norm = 0: expected",
        ),
        (("--scheme", "udp", "--set", "experiment_id=x"), 2, "--set = 'experiment_id': expected a"),
        (("--set", "strategy.bitz=1"), 2, "bitz"),
        (("--set", "strategy.seed=1"), 2, "strategy = ['seed']: expected the scheme's own"),
        (("--cpus-per-client", "0.5"), 2, "CPU shares are whole numbers"),
        (("--workers", "0"), 2, "workers = 0: expected an integer of at least 1"),
        (("--workers", "9"), 2, "workers = 9: expected at most 4, the number of clients"),
        (("--set", "secure_sum.threshold=5"), 2, "threshold = 5: expected at most the 4 clients"),
        (("--set", "secure_sum.colluders=3"), 2, "expected more than colluders = 3"),
        (("--task", "mnist-mlp"), 3, "--data-root DIR"),
        (("--task", "mnist-mlp", "--data-root", "nowhere"), 3, "nowhere"),
        (("--clients", "2000"), 3, "client"),
        (("--resume", "nowhere"), 2, "run folder = 'nowhere': expected a folder that exists"),
        (("--accept-lost-rounds",), 2, "--accept-lost-rounds = True: expected --resume FOLDER"),
        (("--test-seed", "-1"), 2, "--test-seed = -1: expected an integer of at least 0"),
        (
            ("--engine", "ray", "--ray-address", "127.0.0.1:1", "--test-seed", "1"),
            2,
            "--test-seed = 1: expected none with ray_address",
        ),
    ],
)
def test_what_a_user_did_wrong_is_one_line_and_an_exit_code(
    command: Command, tmp_path: Path, arguments: tuple[str, ...], code: int, text: str
) -> None:
    start = ("run",) if "--resume" in arguments else INLINE
    done = command(*start, *arguments)
    assert done.returncode == code, done.stderr
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_the_schemes_own_parameters_are_set_by_their_names(
    command: Command, tmp_path: Path
) -> None:
    own = ("--set", "clipping_norm=0.25", "--set", "strategy.epsilon=3", "--set", "rounds=1")
    done = command(
        *INLINE,
        "--set",
        "scheme=udp",
        "--set",
        "unit=record",
        *own,
        "--set",
        "keep_back=[]",
        "--out",
        "r",
    )
    assert done.returncode == 0, done.stderr
    settings = RunFolder.open(tmp_path / "r").settings
    usual = {"unit": "record", "learning_rate": 4.0}
    assert settings.strategy == {**usual, "clipping_norm": 0.25, "epsilon": 3, "keep_back": []}
    assert settings.rounds == 1  # UDP has such a parameter too, but it is one of every run


def test_parameters_that_a_scheme_inherits_are_its_own(command: Command, tmp_path: Path) -> None:
    done = command(
        *INLINE, "--scheme", "mspdq", "--rounds", "1", "--set", "kappa=0.4", "--out", "r"
    )
    assert done.returncode == 0, done.stderr
    assert RunFolder.open(tmp_path / "r").settings.strategy["kappa"] == 0.4


def test_clients_with_one_class_are_named_and_train(command: Command) -> None:
    one = ("--partition", "labels", "--set", "partition.labels=1")
    done = command(*INLINE, "--rounds", "1", *one, "--out", "r")
    assert done.returncode == 0, done.stderr
    assert "only one class: clients 0, 1, 2, 3" in done.stdout
    assert "round 1/1" in done.stdout


def test_a_run_in_which_everybody_refuses_is_no_success(command: Command) -> None:
    done = command(*INLINE, "--rounds", "2", "--set", "training.learning_rate=1e38", "--out", "r")
    assert done.returncode == 12, done.stderr
    assert "error: no round trained a model: every answer was refused (8 of 8" in done.stderr


def test_a_run_says_how_it_ended(command: Command) -> None:
    done = command(*INLINE, "--rounds", "1", "--out", "r")
    *_, trained, measured, promise, card, verify, report, run = done.stdout.splitlines()
    assert trained == "trained: 1 of 1 rounds"
    assert measured.startswith("measured by the server after round 1: accuracy 0.")
    assert promise == "promise: fedavg protects nothing"
    assert card == "card: r/privacy-card.html"
    assert (verify, report) == ("next: flwr-privacy verify r", "next: flwr-privacy report r")
    assert run == "run: r"


def test_download_says_what_is_missing(command: Command, tmp_path: Path) -> None:
    done = command(*INLINE, "--task", "adult-linear", "--data-root", "d", "--download")
    assert done.returncode == 3
    assert "adult.data" in done.stderr


def test_folders_that_cannot_be_used(command: Command, tmp_path: Path) -> None:
    assert command(*INLINE, "--rounds", "1", "--out", "r").returncode == 0
    again = command(*INLINE, "--rounds", "1", "--out", "r")
    assert again.returncode == 2
    assert "a folder that holds no run yet" in again.stderr
    (tmp_path / "file").write_text("")
    for arguments in (
        (*INLINE, "--rounds", "1", "--out", "file/run"),
        ("report", "r", "--out", "file/report"),
    ):
        done = command(*arguments)
        assert done.returncode == 2
        assert "file" in done.stderr
        assert "Traceback" not in done.stderr


def test_with_a_test_seed_the_noise_is_the_same_again_and_the_user_is_warned(
    command: Command, tmp_path: Path
) -> None:
    for name, seed in (("one", "7"), ("two", "7"), ("other", "8")):
        done = command(
            *INLINE,
            "--scheme",
            "udp",
            "--set",
            "unit=record",
            "--rounds",
            "1",
            "--test-seed",
            seed,
            "--out",
            name,
        )
        assert done.returncode == 0, done.stderr
        assert "WARNING: --test-seed" in done.stderr
    assert same_model(tmp_path / "one", tmp_path / "two")
    one, other = model(tmp_path / "one"), model(tmp_path / "other")
    assert all((one[name] != other[name]).any() for name in one)
    assert "test-seed-7" in (tmp_path / "one" / "summary.json").read_text()


def test_a_deployed_run_is_not_resumed_in_a_simulation(command: Command, tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "r", Settings(clients=2), engine="deployed", nodes=2)
    run.finish("interrupted")
    done = command("run", "--resume", "r")
    assert done.returncode == 2
    assert "flwr-privacy deploy --resume" in done.stderr


def test_a_run_is_resumed_alone(command: Command, tmp_path: Path) -> None:
    done = command("run", "--resume", "r", "--rounds", "3")
    assert done.returncode == 2
    assert "no other setting beside it" in done.stderr


def test_a_damaged_checkpoint(command: Command, tmp_path: Path) -> None:
    assert command(*INLINE, "--rounds", "1", "--out", "r").returncode == 0
    path = tmp_path / "r" / "checkpoint.bin"
    path.write_bytes(path.read_bytes()[:-7])
    RunFolder.open(tmp_path / "r").finish("interrupted")
    done = command("run", "--resume", "r")
    assert done.returncode == 5
    assert "is damaged: its checksum does not fit" in done.stderr
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "is damaged" in summary["error"]


def test_a_port_that_is_taken(command: Command, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = command("run", "--rounds", "1", "--port", port, "--out", "r")
    assert done.returncode == 2
    assert f"port = {port}: expected a port of 127.0.0.1 that is not taken" in done.stderr
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["status"] == "failed"


def test_the_demo_shows_what_privacy_costs(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = {
        name: replace(one, settings=replace(one.settings, rounds=2))
        for name, one in demo_runs().items()
    }
    monkeypatch.setattr(results, "demo_runs", lambda: short)
    (tmp_path / "demo").mkdir()
    done = command("demo", "--engine", "inline", "--out", "demo")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("report: demo-2/report.html\n")
    report = json.loads((tmp_path / "demo-2" / "report.json").read_text())
    assert report["title"] == "Federated learning with and without privacy"
    runs = {run["name"]: run for run in report["runs"]}
    assert list(runs) == list(short)
    assert {run["summary"]["status"] for run in runs.values()} == {"completed"}
    schemes = {run["guarantee"]["scheme"] for run in runs.values()}
    assert schemes == {"fedavg", "udp", "m2fdp", "acfl", "mspdq", "fedvs"}
    for name, one in short.items():
        assert f"{name}: {one.about}\n" in done.stdout
        assert "\n" not in one.about
    for name, epsilon in (("udp-epsilon-8", 8.0), ("udp-epsilon-2-shared-noise", 2.0)):
        guarantee = runs[name]["guarantee"]
        assert guarantee["protects"] == "one record of a client"
        assert guarantee["epsilon"] == epsilon
        assert guarantee["spent"] == pytest.approx(epsilon, rel=1e-6)
        assert "void" not in guarantee
        verified = command("verify", f"demo-2/{name}")
        assert verified.returncode == 0
        assert "simulated: 2 releases of 10 clients: consistent" in verified.stdout
    page = (tmp_path / "demo-2" / "report.html").read_text()
    assert all(str(escape(one.about)) in page for one in short.values())
    assert "best without privacy" in page


def test_help_says_what_there_is(command: Command, tmp_path: Path) -> None:
    overview = command("--help")
    assert all(name in overview.stdout for name in ("run", "report", "demo", "doctor"))
    details = command("run", "--help")
    assert "--data-root" in details.stdout
    assert "Exit codes" in details.stdout
    version = command("--version").stdout
    assert version.startswith("0.")


def test_workers_that_have_no_core_of_their_own_are_told_of(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = Machine(cores=1, memory=1 << 30)
    monkeypatch.setattr(Machine, "here", lambda **_: few)
    done = command(*INLINE, "--rounds", "1", "--workers", "2")
    assert done.returncode == 0
    assert (
        "WARNING: 2 workers on 1 cores take turns, and need more memory than --workers 1"
        in done.stderr
    )


def test_a_gpu_that_is_not_there_is_missed_before_ray_starts(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Machine, "here", lambda **_: Machine(cores=2, memory=1 << 30))
    monkeypatch.setattr("flwr_privacy.simulations.runner.jobs.RaySession", None)
    done = command("run", "--clients", "4", "--gpus-per-client", "0.5", "--out", "run")
    assert done.returncode == 2
    text = "gpus_per_client = 0.5: expected at most the 0 GPUs of this machine"
    assert text in done.stderr
    assert not Path("run").exists()


def test_doctor_suggests_workers_for_a_task(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Machine, "here", lambda **_: Machine(cores=64, memory=3 << 30))
    done = command("doctor", "--task", "digits-linear", "--clients", "40")
    assert "workers for digits-linear: --workers 4 (500 MB each of 3072 MB memory)" in done.stdout


def test_doctor_checks_a_superlink_or_what_a_simulation_needs(command: Command) -> None:
    done = command("doctor", "--certificate", "superlink.pem", "--task", "digits-linear")
    assert done.returncode == 2
    assert "--task = 'digits-linear': expected nothing beside --database" in done.stderr


def test_doctor_names_what_it_finds(command: Command, tmp_path: Path) -> None:
    done = command("doctor", "--data-root", str(tmp_path))
    assert "flwr" in done.stdout
    assert "mnist" in done.stdout.lower()
