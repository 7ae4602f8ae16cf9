"""Reads and writes run folders: the settings of a run, its summary, and one line for every round.

The app writes them while it runs, the display follows them, and the report reads them afterwards.
"""

import json
import os
import platform
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from flwr_privacy.errors import (
    CheckpointError,
    DataError,
    EngineError,
    FlwrPrivacyError,
    InvalidParameterError,
    check_choice,
    check_integer,
)
from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.privacy.card.folder import SUMMARY, TEST_SEED
from flwr_privacy.strategies.state import checkpoint
from flwr_privacy.wire.files import PRIVATE, exclusive_lock, write_text
from flwr_privacy.wire.identity import new_experiment_id

from .effect import flat_settings
from .metrics_file import MetricsFile, rounds_in
from .run_settings import Settings

__all__ = ["RunFolder", "kept"]

ENGINES = ("ray", "inline", "deployed")
ENDINGS = ("completed", "failed", "interrupted")
STATUSES = ("created", "running", *ENDINGS)
LOCK, SERVER_LOCK = "lock", "server.lock"
LOCK_TIMEOUT = 10.0
PACKAGES = ("flwr-privacy", "flwr", "numpy", "torch")


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run; make one with `create` or `open`.

    Parameters
    ----------
    path : Path
        The folder. It holds ``settings.toml``, ``summary.json`` and ``metrics.jsonl``, and what
        the app leaves beside them.
    """

    path: Path

    @classmethod
    def create(
        cls,
        path: str | Path,
        settings: Settings,
        *,
        engine: str,
        nodes: int,
        experiment_id: str | None = None,
        test_seed: int | None = None,
        task_digest: str = "",
    ) -> "RunFolder":
        """Make the folder of a run, which may start later.

        Parameters
        ----------
        path : str or Path
            The folder; it may exist if it holds no run.
        settings : Settings
            What the run trains.
        engine : {"ray", "inline", "deployed"}
            Where it runs.
        nodes : int
            Number of nodes, at least 1.
        experiment_id : str, optional
            The experiment that the run belongs to; by default a new one, or with a test seed the
            one of that seed: what clients draw depends on its name.
        test_seed : int, optional
            Seed of what the clients draw in secret, for tests.
        task_digest : str, default ""
            Of a task of the user's, see `flwr_privacy.simulations.tasks.lookup.task_digest`: all
            processes of the run, and of a resumed one, check that they train the same.

        Raises
        ------
        InvalidParameterError
            If the folder already holds a run or cannot be written, or a value is not allowed.
        """
        from .effect import without_effect  # late: it brings the schemes

        summary = {
            "status": "created",
            "engine": check_choice("engine", engine, ENGINES),
            "experiment_id": experiment_id or _experiment_id(test_seed),
            "started": _now(),
            "finished": None,
            "versions": _versions(),
            "nodes": check_integer("nodes", nodes, minimum=1),
            "error": None,
            "exit_code": None,
            "test_seed": test_seed,
        }
        run = cls(Path(path))
        kept = (run.settings_path, run.summary_path, run.metrics_path)
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            if any(file.exists() for file in kept):
                raise FileExistsError
            with run.settings_path.open("x", encoding="utf-8") as file:
                # What has no effect is not recorded as if it had.
                file.write(settings.to_toml(without=without_effect(settings)))
            run.metrics_path.touch(mode=PRIVATE)
        except FileExistsError as error:
            allowed = "a folder that holds no run yet (this one does, or is a file)"
            raise InvalidParameterError("run folder", str(run.path), allowed) from error
        except OSError as error:
            raise _not_writable("run folder", run.path, error) from error
        if task_digest:
            # Not in the summary, which reports have: a digest confirms a guess of all the data.
            write_text(run.task_digest_path, task_digest, mode=PRIVATE)
        run._write_summary(summary)
        return run

    @classmethod
    def open(cls, path: str | Path) -> "RunFolder":
        """Open the folder of a run that has started.

        Raises
        ------
        InvalidParameterError
            If it is no run folder; the message names what is missing.
        """
        run = cls(Path(path))
        if not run.path.is_dir():
            raise InvalidParameterError("run folder", str(path), "a folder that exists")
        missing = [f.name for f in (run.settings_path, run.summary_path) if not f.is_file()]
        if missing:
            allowed = f"the folder of a run (it has no {' and no '.join(missing)})"
            raise InvalidParameterError("run folder", str(path), allowed)
        return run

    @property
    def settings_path(self) -> Path:
        """The settings of the run: `Settings` as TOML."""
        return self.path / "settings.toml"

    @property
    def summary_path(self) -> Path:
        """The summary of the run: status, times, versions, error."""
        return self.path / SUMMARY

    @property
    def task_digest_path(self) -> Path:
        """The digest of a task of the user's; readable by its owner alone."""
        return self.path / "task-digest.txt"

    @property
    def task_digest(self) -> str:
        """Digest of the task with which the run began; nothing for a built-in one."""
        path = self.task_digest_path
        return path.read_text(encoding="utf-8") if path.exists() else ""

    @property
    def metrics_path(self) -> Path:
        """One JSON object per round, appended while the run goes on."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoint_path(self) -> Path:
        """The checkpoint from which a resumed run starts."""
        return self.path / "checkpoint.bin"

    @property
    def model_path(self) -> Path:
        """The trained model."""
        return self.path / "model.npz"

    @property
    def card_path(self) -> Path:
        """The guarantee of the run and every charge, rewritten in every round."""
        return self.path / "privacy-card.json"

    @property
    def card(self) -> PrivacyCard | None:
        """The privacy card; None before the first round has ended.

        Raises
        ------
        DataError
            If the file is damaged.
        """
        if not self.card_path.exists():
            return None
        try:
            return PrivacyCard.from_json(self.card_path.read_bytes())
        except DataError as error:
            raise DataError(f"{self.card_path}: {error}") from error

    @property
    def log_path(self) -> Path:
        """The log of the engine."""
        return self.path / "log.txt"

    @property
    def settings(self) -> Settings:
        """The settings of the run.

        Raises
        ------
        DataError
            If the file holds something else than settings.
        """
        try:
            return Settings.from_toml(self.settings_path.read_text(encoding="utf-8"))
        except (InvalidParameterError, UnicodeDecodeError) as error:
            raise DataError(f"{self.settings_path}: the settings are damaged: {error}") from error

    @property
    def told(self) -> dict[str, Any]:
        """The settings with dotted keys, without those that are unset and where the data lies."""
        return flat_settings(self.settings)

    @property
    def summary(self) -> dict[str, Any]:
        """The summary of the run so far.

        A run whose processes were killed says ``running`` in its file, and nobody holds a lock of
        its folder: its status is ``interrupted``. Where locks cannot be read it stays ``running``.

        Raises
        ------
        DataError
            If the file is damaged.
        """
        summary = self._read_summary()
        if summary["status"] == "running" and not any(map(self._is_held, (LOCK, SERVER_LOCK))):
            summary["status"] = "interrupted"
        return summary

    def app_config(self, *, resume: bool, accept_lost_rounds: bool) -> dict[str, str | bool]:
        """Return the configuration with which the app carries the run out."""
        # One that was interrupted before its first checkpoint begins again.
        goes_on = resume and self.checkpoint_path.exists()
        return {
            "settings": self.settings_path.read_text(encoding="utf-8"),
            "run-dir": str(self.path.resolve()),
            "task-digest": self.task_digest,
            "resume": goes_on,
            "accept-lost-rounds": goes_on and accept_lost_rounds,
        }

    def _read_summary(self) -> dict[str, Any]:
        try:
            summary = json.loads(self.summary_path.read_bytes())
        except ValueError as error:
            raise DataError(f"{self.summary_path}: no JSON ({error})") from error
        if not isinstance(summary, dict) or summary.get("status") not in STATUSES:
            raise DataError(f"{self.summary_path}: no summary with a status of {STATUSES}")
        nodes = summary.get("nodes")
        for name, fits in (
            ("engine", summary.get("engine") in ENGINES),
            ("nodes", isinstance(nodes, int) and nodes > 0),
            ("experiment_id", isinstance(summary.get("experiment_id"), str)),
        ):
            if not fits:
                text = f"its {name} is {summary.get(name)!r}"
                raise DataError(f"{self.summary_path}: the summary is damaged: {text}")
        return summary

    def check_resumable(self) -> None:
        """Look at what a resume needs, before an engine is started.

        Raises
        ------
        InvalidParameterError
            If the run is complete.
        DataError
            If settings, summary or history are damaged.
        CheckpointError
            If the checkpoint is damaged, or of another run.
        """
        summary, rounds = self.summary, self.rounds()
        if summary["status"] == "completed":
            done = max((line["round"] for line in rounds), default=0)
            allowed = (
                f"a run that is not complete: this one has done its rounds, {done} of "
                f"{self.settings.rounds}. For more of them start a run with --rounds"
            )
            raise InvalidParameterError("--resume", str(self.path), allowed)
        if self.checkpoint_path.exists():
            state = checkpoint.load(self.checkpoint_path)
            mine, theirs = summary["experiment_id"], state.get("experiment_id")
            if theirs != mine:
                text = f"is of another experiment: {theirs!r}, not {mine!r}"
                raise CheckpointError(f"the checkpoint {self.checkpoint_path} {text}")

    def rounds(self) -> list[dict[str, Any]]:
        """Return the lines of the rounds so far, in order, each with the bytes up to it.

        ``total_bytes_down``, ``total_bytes_up`` and ``total_bytes`` are added to what was written.
        A last line that was cut when the run was killed is dropped. Where a resumed run did rounds
        again, their new lines count.

        Raises
        ------
        DataError
            If another line is damaged; the message names file and line.
        """
        if not self.metrics_path.exists():
            return []
        lines = rounds_in(self.metrics_path)
        totals = Counter[str]()
        for line in lines:
            for key in ("bytes_down", "bytes_up"):
                totals[key] += line.get(key, 0)
                line[f"total_{key}"] = totals[key]
            line["total_bytes"] = totals.total()
        return lines

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the run for this process; the lock ends with the process, even if it is killed.

        Raises
        ------
        InvalidParameterError
            If another process or thread carries it out, or the folder cannot be written.
        """
        # Whoever reads the status holds it for an instant.
        with self._locked(LOCK, timeout=1.0):
            yield

    @contextmanager
    def served(self) -> Iterator[None]:
        """Record that the ServerApp trains the run, and how that ends, whoever has started it.

        Raises
        ------
        InvalidParameterError
            If another ServerApp trains it, or the folder cannot be written.
        DataError
            If the summary is damaged.
        """
        # One that was killed a moment ago may still be ending.
        with self._locked(SERVER_LOCK, timeout=LOCK_TIMEOUT):
            self.begin()
            with kept(self):
                yield

    @contextmanager
    def _locked(self, name: str, *, timeout: float) -> Iterator[None]:
        with ExitStack() as stack:
            try:
                stack.enter_context(exclusive_lock(self.path / name, timeout=timeout))
            except TimeoutError as error:
                allowed = "a run that nobody is carrying out"
                raise InvalidParameterError("run folder", str(self.path), allowed) from error
            except OSError as error:
                raise _not_writable("run folder", self.path, error) from error
            yield

    def _is_held(self, name: str) -> bool:
        path = self.path / name
        if not path.exists():
            return False
        try:
            with exclusive_lock(path, timeout=0):
                return False
        except OSError:  # somebody holds it, or this user may not try
            return True

    def append(self, line: Mapping[str, Any]) -> None:
        """Append the line of one round; others can read it when this returns.

        Raises
        ------
        OSError
            If the file cannot be written.
        """
        with self.metrics_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dict(line)) + "\n")

    def update(self, **changes: Any) -> None:
        """Replace some values of the summary; a reader sees all of the changes or none.

        Raises
        ------
        InvalidParameterError
            If the folder cannot be written.
        DataError
            If the summary is damaged.
        """
        self._write_summary({**self._read_summary(), **changes})

    def begin(self) -> None:
        """Record that the run begins; its folder may have been made long before.

        Raises
        ------
        InvalidParameterError
            If the folder cannot be written.
        """
        self.update(status="running", started=_now(), error=None, exit_code=None, finished=None)

    def finish(self, status: str, error: str | None = None, exit_code: int | None = None) -> None:
        """Record how the run ended.

        Parameters
        ----------
        status : {"completed", "failed", "interrupted"}
            How.
        error : str, optional
            What went wrong.
        exit_code : int, optional
            The exit code of that error; the command that waits for the app ends with it.

        Raises
        ------
        InvalidParameterError
            If the status is none of these or the folder cannot be written.
        DataError
            If the summary is damaged.
        """
        check_choice("status", status, ENDINGS)
        self.update(status=status, error=error, exit_code=exit_code, finished=_now())

    def reopen(self) -> None:
        """Mark a run as running again; new lines follow the last whole one.

        Raises
        ------
        InvalidParameterError
            If the folder cannot be written.
        DataError
            If the summary or a line that is not the last one is damaged.
        """
        self.metrics_path.touch(mode=PRIVATE)
        tail = MetricsFile(self.metrics_path)
        for _ in tail.lines():
            pass
        if tail.last() is None:
            os.truncate(self.metrics_path, tail.position)
        else:
            with self.metrics_path.open("a", encoding="utf-8") as file:
                file.write("\n")
        self.update(status="running", error=None, exit_code=None, finished=None)

    def _write_summary(self, summary: Mapping[str, Any]) -> None:
        try:
            write_text(self.summary_path, json.dumps(summary, indent=2) + "\n")
        except OSError as error:
            raise _not_writable("run folder", self.path, error) from error


@contextmanager
def kept(*runs: RunFolder, ends: bool = True) -> Iterator[None]:
    """Record how the runs ended if they fail or, by default, end here.

    Parameters
    ----------
    *runs : RunFolder
        The runs.
    ends : bool, default True
        Whether they are complete if nothing is raised.
    """

    def finish(status: str, error: str | None = None, exit_code: int | None = None) -> None:
        for run in runs:
            run.finish(status, error, exit_code)

    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        # `flwr stop` ends a ServerApp with exit code 0.
        if isinstance(error, SystemExit) and error.code:
            finish("failed", f"SystemExit: {error.code}")
        else:
            finish("interrupted")
        raise
    except FlwrPrivacyError as error:
        if isinstance(error, EngineError) and len(runs) == 1:
            # The app failed in another process, which has noted with what.
            error.exit_code = runs[0].summary.get("exit_code") or error.exit_code
        finish("failed", str(error), error.exit_code)
        raise
    except BaseException as error:
        finish("failed", f"{type(error).__name__}: {error}")
        raise
    if ends:
        finish("completed")


def _not_writable(parameter: str, path: Path, error: OSError) -> InvalidParameterError:
    allowed = f"a folder that can be written ({error.strerror})"
    return InvalidParameterError(parameter, str(path), allowed)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:  # an extra that is not installed
            continue
    return versions


def _experiment_id(test_seed: int | None) -> str:
    return new_experiment_id() if test_seed is None else f"{TEST_SEED}{test_seed}"
