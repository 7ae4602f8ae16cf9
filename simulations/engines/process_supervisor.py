"""Background processes that end when this process ends, even if it is killed.

`ProcessSupervisor` starts commands as children of a small process of its own, the keeper: this very
file run as a script. The keeper waits at its standard input, which closes when
`ProcessSupervisor.stop` is called, and also when we are killed; then it ends every process that its
commands have left, and removes their folders. On Linux it adopts orphans, so that it finds even
those whose parents were killed.
"""

import contextlib
import ctypes
import json
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Process", "ProcessSupervisor", "descendants", "ray_command"]

SIMULATION = "flwr-simulation"
GRACE = 3.0  # Seconds that a simulation has to report to its SuperLink and to let go of Ray.
PR_SET_CHILD_SUBREAPER = 36
SIGNALLED = 128  # added to the number of a signal, as shells do


@dataclass(frozen=True)
class Process:
    """A running process (no zombie)."""

    pid: int
    parent: int
    command: str

    @property
    def is_simulation(self) -> bool:
        """Whether it runs an app on Flower's simulation engine."""
        return SIMULATION in self.command


class ProcessSupervisor:
    """Runs commands until `stop` is called or this process ends.

    Parameters
    ----------
    commands : sequence of sequence of str
        When one of them ends, all are stopped.
    environment : mapping
        Environment variables of the commands.
    log : Path
        File to which their output is appended.
    remove : sequence of Path
        Folders to remove at the end.
    umask : int, default -1
        Rights that files of the commands do not have, as ``os.umask`` takes them; -1: as this
        process's.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        *,
        environment: Mapping[str, str],
        log: Path,
        remove: Sequence[Path] = (),
        umask: int = -1,
    ) -> None:
        options = {"commands": commands, "remove": [str(folder) for folder in remove]}
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                _own_command("keep", options),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
                umask=umask,
            )

    @property
    def alive(self) -> bool:
        """Whether all commands still run."""
        return self._process.poll() is None

    @property
    def ending(self) -> str:
        """How the command ended that ended by itself; "" while all run."""
        status = self._process.poll()
        if status is None:
            return ""
        number = status - SIGNALLED if status > SIGNALLED else -status
        return f"killed by signal {number}" if number > 0 else f"exit status {status}"

    def processes(self) -> list[Process]:
        """Return all processes that the commands have started and that still run."""
        return descendants(self._process.pid)

    def stop(self) -> None:
        """End all processes and remove the folders; return when that is done."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


def ray_command(*, port: int, cpus: int | None, gpus: int | None, ready: Path) -> list[str]:
    """Return the command that holds a Ray cluster of one host.

    Parameters
    ----------
    port : int
        Port at which the cluster is joined.
    cpus, gpus : int, optional
        Its resources; by default what the machine has.
    ready : Path
        File that is made when the cluster can be joined.
    """
    return _own_command("ray", {"port": port, "cpus": cpus, "gpus": gpus, "ready": str(ready)})


def descendants(pid: int) -> list[Process]:
    """Return the running children of a process, their children, and so on."""
    children: dict[int, list[Process]] = {}
    for process in _running():
        children.setdefault(process.parent, []).append(process)
    found = list(children.get(pid, ()))
    for process in found:
        found += children.get(process.pid, ())
    return found


def _own_command(role: str, options: Mapping[str, Any]) -> list[str]:
    return [sys.executable, "-P", __file__, role, json.dumps(options)]


def _running() -> Iterator[Process]:
    if Path("/proc/self/stat").exists():
        yield from _running_by_proc()
    else:
        yield from _running_by_ps()


def _running_by_proc() -> Iterator[Process]:
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (
                (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # It has just ended, or is nobody of ours.
        if state not in "ZX":
            yield Process(int(folder.name), int(parent), command)


def _running_by_ps() -> Iterator[Process]:
    command = ["ps", "-A", "-ww", "-o", "pid=,ppid=,stat=,command="]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as ps:
        listing = ps.communicate()[0]
    for line in listing.splitlines():
        pid, parent, state, *words = line.split(maxsplit=3)
        if not state.startswith("Z") and int(pid) != ps.pid:
            yield Process(int(pid), int(parent), "".join(words))


# What follows runs in the keeper (and in the process that holds Ray), with the standard library
# alone: it has to start at once.


def _keep(commands: Sequence[Sequence[str]], *, remove: Sequence[str]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    kept = [subprocess.Popen(command, stdin=subprocess.DEVNULL) for command in commands]
    pids = {process.pid for process in kept}
    endings: list[int] = []
    while not endings:
        readable, _, _ = select.select([sys.stdin], [], [], 0.2)
        if readable:
            break
        endings = [status for pid, status in _ended().items() if pid in pids]
    _end_descendants()
    for folder in remove:
        shutil.rmtree(folder, ignore_errors=True)
    if endings:
        sys.exit(endings[0] if endings[0] >= 0 else SIGNALLED - endings[0])


def _ended() -> dict[int, int]:
    # Collects children that have ended, so that they do not stay as zombies, with their statuses.
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended[child[0]] = os.waitstatus_to_exitcode(child[1])
    return ended


def _end_descendants() -> None:
    deadline = time.monotonic() + GRACE
    _signal((p for p in descendants(os.getpid()) if p.is_simulation), signal.SIGTERM)
    while time.monotonic() < deadline and any(p.is_simulation for p in descendants(os.getpid())):
        _ended()
        time.sleep(0.05)
    while processes := descendants(os.getpid()):
        _signal(processes, signal.SIGKILL)
        time.sleep(0.02)
        _ended()


def _signal(processes: Iterable[Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _hold_ray(*, port: int, cpus: int | None, gpus: int | None, ready: str) -> None:
    os.environ["RAY_GCS_SERVER_PORT"] = str(port)
    import ray

    ray.init(
        address="local",
        num_cpus=cpus,
        num_gpus=gpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
    )
    Path(ready).touch()
    signal.pause()


def _main() -> None:
    role, text = sys.argv[1:]
    options = json.loads(text)
    if role == "keep":
        _keep(options["commands"], remove=options["remove"])
    else:
        _hold_ray(**options)


if __name__ == "__main__":
    _main()
