"""Profiles of runs: their times add up, say what was slow, and have no values of variables."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from apps import message_app, record
from commands import Command
from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from flwr_privacy.clients import FedAvgClient, as_mod
from flwr_privacy.clients.profiling import PROFILE_VARIABLE
from flwr_privacy.clients.profiling import recorder as profiling
from flwr_privacy.clients.profiling.samples import Samples
from flwr_privacy.errors import AllRefusedError, EngineError, InvalidParameterError, ProtocolError
from flwr_privacy.simulations.engines.inline import run_inline
from flwr_privacy.simulations.engines.profiling.report import Side, read_profile, write_profile
from flwr_privacy.strategies import FedAvg

FILES = [
    "profile.json",
    *(
        f"{side}.{ending}"
        for side in ("server", "workers")
        for ending in ("html", "speedscope.json")
    ),
]


def busy(side: Side) -> float:
    return side.seconds - side.phases["wait"] - side.phases["start"]


def adds_up(side: Side) -> bool:
    return sum(side.phases.values()) == pytest.approx(side.seconds, abs=0.01)


def hidden(array: Any, client: int) -> Any:
    """A training of the user's own that is slow, and has something to hide."""
    __tracebackhide__ = "hidden-" + "value"
    password = "secret-" + str(client * 0 + 4711)
    end = time.perf_counter() + 0.03
    while time.perf_counter() < end:
        str(password)
    return (array + client).astype(array.dtype)


SLOW = ("while time.perf_counter() < end:", "str(password)")


def trained(folder: Path | None, app: ClientApp | None = None, *, rounds: int = 2) -> float:
    """Train, and return the seconds that it took."""
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        FedAvg(fraction_evaluate=0.0).start(grid, record(), num_rounds=rounds)

    app = message_app([as_mod(FedAvgClient)], hidden) if app is None else app
    began = time.perf_counter()
    run_inline(server_app, app, nodes=3, profile=folder)
    return time.perf_counter() - began


@pytest.mark.parametrize(
    "options",
    [
        ("--scheme", "fedavg"),
        ("--scheme", "udp", "--set", "unit=user", "--workers", "2"),
        ("--scheme", "central-dp", "--workers", "2"),
    ],
)
def test_the_phases_of_a_run_add_up_and_nearly_all_have_a_name(
    command: Command, tmp_path: Path, options: tuple[str, ...]
) -> None:
    began = time.perf_counter()
    done = command(
        *("run", "--engine", "inline", "--clients", "8", "--rounds", "3"),
        *("--out", "r", "--profile", *options),
    )
    took = time.perf_counter() - began
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "r" / "profile"
    assert sorted(FILES) == sorted(p.name for p in folder.iterdir() if p.is_file())
    assert [line for line in done.stdout.splitlines() if line.startswith("profile: ")] == [
        f"profile: r/profile/{name}" for name in FILES
    ]
    profile = read_profile(folder)
    server, workers = profile.server, profile.workers
    for side in (server, workers):
        assert adds_up(side)
        assert side.phases["other"] < 0.1 * busy(side), side.phases
        assert side.phases["profiler"] < 0.5 * side.seconds
    assert profile.text() in done.stdout
    assert workers.clients >= 8 * 3  # with a secure sum there are more requests
    assert workers.phases["training"] > 0
    private = {"udp": ["noise", "ledger"], "central-dp": ["noise", "ledger", "masks"]}
    assert all(workers.phases[phase] > 0 for phase in private.get(options[1], []))
    if "--workers" in options:
        assert (server.processes, workers.processes) == (1, 2)
        assert server.phases["clients"] == 0 < server.phases["wait"]
        assert workers.seconds < 2 * took
    else:
        assert (server.processes, workers.processes) == (1, 0)
        assert workers.seconds > 0
        assert server.phases["clients"] == pytest.approx(workers.seconds)
    for path in (folder / "samples").glob("*.json"):  # none of the time is without a stack
        samples = Samples.read(path)
        known = samples.before + sum(samples.stacks.values())
        assert known == pytest.approx(samples.seconds, abs=0.1)
    # The life of this process before the command is its start.
    samples = Samples.read(folder / "samples" / "server-0.json")
    assert 0 < samples.seconds - samples.before < took
    assert PROFILE_VARIABLE not in os.environ


def test_own_code_is_found_by_its_lines_and_no_value_is_kept(tmp_path: Path) -> None:
    took = trained(tmp_path)
    profile = read_profile(tmp_path)
    assert profile.server.seconds == pytest.approx(took, rel=0.2)
    assert adds_up(profile.server)
    (file, line, function), seconds = profile.hot_lines[0]
    assert (file, function) == (__file__, "hidden")
    assert Path(__file__).read_text().splitlines()[line - 1].strip() in SLOW
    assert profile.workers.phases["own code"] > 0.5 * 2 * 3 * 3 * 0.03 > 0.1
    assert sum(s for (_, _, name), s in profile.lines.items() if name == "hidden") >= seconds
    assert f"test_profile.py:{line} hidden" in profile.text()
    for path in tmp_path.rglob("*"):
        text = path.read_text() if path.is_file() else ""
        assert "secret-4711" not in text
        assert "hidden-value" not in text
        assert path.is_dir() or path.stat().st_mode & 0o077 == 0


def test_a_profile_replaces_an_older_one_and_the_environment_adds_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        trained(tmp_path, rounds=1)
        assert read_profile(tmp_path).server.processes == 1
    assert read_profile(tmp_path).workers.clients == 3
    monkeypatch.setenv(PROFILE_VARIABLE, str(tmp_path))
    trained(None, rounds=1)
    profile = read_profile(tmp_path)
    assert profile.server.processes == 2
    assert profile.workers.clients == 6
    assert adds_up(profile.server)


def test_flame_graphs_have_all_of_the_time(tmp_path: Path) -> None:
    trained(tmp_path)
    profile, _ = write_profile(tmp_path)
    drawn = json.loads((tmp_path / "workers.speedscope.json").read_text())
    assert drawn["profiles"][0]["endValue"] == pytest.approx(profile.workers.seconds, rel=0.05)
    assert any(frame["name"] == "hidden" for frame in drawn["shared"]["frames"])


@pytest.mark.parametrize(
    ("code", "loaded"),
    [
        ("from flwr_privacy.clients import UDPClient, as_mod\nas_mod(UDPClient)", "set()"),
        (
            "from flwr_privacy.simulations.testing.apps import run_strategy\n"
            "from flwr_privacy.strategies import FedAvg\n"
            "run_strategy(FedAvg(fraction_evaluate=0.0), nodes=2, num_rounds=1)",
            "{'flwr_privacy.clients.profiling.recorder'}",
        ),
    ],
)
def test_without_a_profile_no_profiler_is_imported(code: str, loaded: str) -> None:
    profilers = {"pyinstrument", "flwr_privacy.clients.profiling.recorder"}
    shows = f"print({profilers} & sys.modules.keys())"
    command = [sys.executable, "-c", f"import sys\n{code}\n{shows}"]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    assert done.stdout.splitlines()[-1] == loaded


def ran(folder: Path, code: str) -> int:
    """Run a process with the folder in its environment; return how it ended."""
    begins = (
        "import os, signal, sys, time\n"
        "from flwr_privacy.clients.profiling import recorder as profiling\n"
        "profiling.begin_worker()\n"
        "def work(seconds):\n"
        "    end = time.perf_counter() + seconds\n"
        "    while time.perf_counter() < end: sum(range(100))\n"
        "profiling._recorder.samples.clients += 1\n"
    )
    env = {**os.environ, PROFILE_VARIABLE: str(folder)}
    return subprocess.run([sys.executable, "-c", begins + code], env=env, check=False).returncode


def test_a_killed_process_leaves_its_samples_and_the_next_one_adds_to_them(tmp_path: Path) -> None:
    killed = "work(1.2)\nprofiling._recorder.write_if_due(0)\nos.kill(os.getpid(), signal.SIGKILL)"
    assert ran(tmp_path, killed) == -signal.SIGKILL
    first = Samples.read(tmp_path / "samples" / "worker-0.json")
    assert first.processes == first.clients == 1
    assert sum(first.stacks.values()) > 0.9
    assert ran(tmp_path, "work(0.1)") == 0
    (path,) = (tmp_path / "samples").glob("*.json")
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"processes"')  # a line that a crash has cut
    both = Samples.read(path)
    assert both.processes == both.clients == 2
    assert sum(both.stacks.values()) > sum(first.stacks.values()) + 0.09
    known = [one.before + sum(one.stacks.values()) for one in (first, both)]
    assert both.seconds - first.seconds == pytest.approx(known[1] - known[0], abs=0.3)


def test_a_forked_process_does_not_write_into_the_file_of_its_parent(tmp_path: Path) -> None:
    forks = (
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    assert profiling._recorder is None\n"
        "    work(0.3)\n"
        "    sys.exit(0)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
    )
    assert ran(tmp_path, forks) == 0
    (path,) = (tmp_path / "samples").glob("*.json")
    samples = Samples.read(path)
    assert samples.processes == 1
    names = {name for frame, _ in samples.frames for name in frame.split("\x00")[:1]}
    assert "work" not in names


def test_a_long_file_becomes_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "_GROWS", 3000)
    monkeypatch.setattr(profiling, "_SOON", 0.0)
    began = time.perf_counter()
    with profiling.sampling(tmp_path, "worker"):
        while time.perf_counter() < began + 0.5:
            sum(range(100))
    (path,) = (tmp_path / "samples").glob("*.json")
    assert path.read_bytes().count(b"\n") < 30  # of more than a hundred writes
    samples = Samples.read(path)
    assert samples.processes == 1
    assert sum(samples.stacks.values()) == pytest.approx(0.5, abs=0.1)
    assert len(samples.frames) == len({*samples.frames})
    assert max(map(max, samples.stacks)) < len(samples.frames)


def test_a_full_disk_ends_no_training_and_the_next_write_has_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **named: Any) -> int:
        raise OSError(28, "No space left on device")

    with profiling.sampling(tmp_path, "worker"):
        recorder = profiling._recorder
        assert recorder is not None
        with monkeypatch.context() as patched:
            patched.setattr(profiling, "open_private", full)
            time.sleep(0.2)
            sum(range(1000))
            recorder._write()
    (path,) = (tmp_path / "samples").glob("*.json")
    samples = Samples.read(path)
    assert sum(samples.stacks.values()) > 0.19
    assert max(map(max, samples.stacks)) < len(samples.frames)


def test_two_processes_at_once_have_a_file_each(tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    with profiling.sampling(tmp_path, "worker"):
        assert ran(tmp_path, "work(0.1)") == 0
    assert sorted(p.name for p in folder.glob("*.json")) == ["worker-0.json", "worker-1.json"]


def test_a_profile_that_cannot_be_made_is_refused_before_the_run(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    begun: list[int] = []
    own = lambda array, client: begun.append(client) or array  # noqa: E731
    app = message_app([as_mod(FedAvgClient)], own)
    with pytest.raises(InvalidParameterError, match=r"profile = .*a folder that can be written"):
        trained(tmp_path / "file", app)
    done = command("run", "--ray-address", "127.0.0.1:1", "--profile")
    assert "--profile = True: expected none with --ray-address" in done.stderr
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EngineError, match="pyinstrument is not installed"):
        trained(tmp_path / "new", app)
    done = command("run", "--engine", "inline", "--profile")
    assert done.returncode == EngineError.exit_code
    told = "error: pyinstrument is not installed: pip install 'flwr-privacy[profile]'\n"
    assert done.stderr == told
    assert not begun
    assert not (tmp_path / "runs").exists()


def test_a_node_that_cannot_make_a_profile_refuses_and_does_not_name_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        monkeypatch.setenv(PROFILE_VARIABLE, str(tmp_path / "file"))
        with pytest.MonkeyPatch.context() as only_nodes:
            strategy = FedAvg(fraction_evaluate=0.0)
            only_nodes.delenv(PROFILE_VARIABLE)
            start: Callable[..., Any] = type(strategy).start
            undecorated = start.__wrapped__  # type: ignore[attr-defined]
            only_nodes.setenv(PROFILE_VARIABLE, str(tmp_path / "file"))
            undecorated(strategy, grid, record(), num_rounds=1)

    with pytest.raises((AllRefusedError, ProtocolError)) as raised:
        run_inline(server_app, message_app([as_mod(FedAvgClient)]), nodes=2)
    assert PROFILE_VARIABLE in str(raised.value)
    assert str(tmp_path) not in str(raised.value)


@pytest.mark.ray
def test_a_profile_of_a_run_on_ray(command: Command, tmp_path: Path) -> None:
    arguments = ("run", "--clients", "4", "--rounds", "8", "--workers", "2", "--out", "r")
    done = command(*arguments, "--profile")
    assert done.returncode == 0, done.stderr
    profile = read_profile(tmp_path / "r" / "profile")
    assert profile.server.processes == 1
    assert profile.workers.processes == 2
    assert 4 <= profile.workers.clients <= 4 * 8  # Ray kills processes without a word
    # A training takes less than the time between two samples.
    for side in (profile.server, profile.workers):
        assert sum(s for phase, s in side.phases.items() if phase not in ("start", "wait")) > 0
    assert all(map(adds_up, (profile.server, profile.workers)))
