"""Flower's Ray engine: runs a Flower App through the real `flwr run`.

A `RaySession` brings a SuperLink and a Ray cluster of its own and runs apps on them, one after
another. The runs share the cluster, because starting one takes longer than most of what follows.
Nothing outlives the session.
"""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from types import TracebackType
from typing import Self

import tomli_w

from flwr_privacy.errors import EngineError, InvalidParameterError, check_integer, check_number

from .logs import exceptions_in, plain
from .superlink import SuperLink

__all__ = ["RayResources", "RaySession"]

RunValue = str | int | float | bool

POLL_INTERVAL = 0.3
# Seconds between the end of an app's process and the end of its log, and the other way round
# (Flower ends a simulation by force after 5 s).
END_TIMEOUT = 30.0
SHOWN_EXCEPTIONS = 4
SHOWN_LINES = 10


@dataclass(frozen=True, kw_only=True)
class RayResources:
    """The resources of Ray, and those reserved for each client.

    Parameters
    ----------
    cpus_per_client : int, default 1
        CPUs per client; with `total_cpus` it gives the number of clients that compute at once.
    gpus_per_client : float, default 0.0
        Share of a GPU per client; above 1 a whole number.
    total_cpus, total_gpus : int, optional
        Resources of the Ray cluster; by default what the machine has.
    ray_address : str, optional
        ``host:port`` of a running Ray cluster to join, with the resources that it has. This host
        must be one of its nodes.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed, or a client needs more than there is.
    """

    cpus_per_client: int = 1
    gpus_per_client: float = 0.0
    total_cpus: int | None = None
    total_gpus: int | None = None
    ray_address: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.cpus_per_client, float):
            raise InvalidParameterError(
                "cpus_per_client",
                self.cpus_per_client,
                "a whole number of at least 1 (CPU shares are whole numbers, GPU shares may be "
                "fractions)",
            )
        check_integer("cpus_per_client", self.cpus_per_client, minimum=1)
        gpus = check_number("gpus_per_client", self.gpus_per_client, minimum=0)
        if gpus > 1 and not gpus.is_integer():
            raise InvalidParameterError(
                "gpus_per_client", self.gpus_per_client, "a fraction up to 1 or a whole number"
            )
        if self.total_cpus is not None:
            check_integer("total_cpus", self.total_cpus, minimum=self.cpus_per_client)
        if self.total_gpus is not None:
            check_integer("total_gpus", self.total_gpus, minimum=0)
            check_number("gpus_per_client", self.gpus_per_client, maximum=self.total_gpus)
        if self.ray_address is not None:
            self._check_address(self.ray_address)

    def _check_address(self, address: str) -> None:
        if not re.fullmatch(r"[^\s:/]+:\d+", address):
            raise InvalidParameterError("ray_address", address, "host:port of a Ray cluster")
        for name in ("total_cpus", "total_gpus"):
            if (value := getattr(self, name)) is not None:
                raise InvalidParameterError(
                    name, value, "no value with ray_address: a running cluster has its resources"
                )

    def federation_config(self, *, nodes: int) -> str:
        """Return the value of ``flwr run --federation-config`` for a number of nodes."""
        return (
            f"num-supernodes={nodes} client-resources-num-cpus={self.cpus_per_client} "
            f"client-resources-num-gpus={float(self.gpus_per_client)}"
        )


class RaySession:
    """A SuperLink with Flower's Ray engine, for as long as the context is open.

    Parameters
    ----------
    resources : RayResources, optional
        What Ray has, and what a client gets.
    port : int, optional
        Loopback port of the SuperLink; by default a free one.
    log_path : Path, optional
        File to which the output of the SuperLink and of the runs is appended as it comes. By
        default it is gone with the session.
    test_seed : int, optional
        Seed of what the clients of this package's app draw in secret, for tests: nothing is
        protected.

    Raises
    ------
    InvalidParameterError
        If the port is taken.
    EngineError
        If Flower or Ray is not installed or does not start.
    """

    def __init__(
        self,
        *,
        resources: RayResources | None = None,
        port: int | None = None,
        log_path: Path | None = None,
        test_seed: int | None = None,
    ) -> None:
        if port is not None:
            check_integer("port", port, minimum=1, maximum=65535)
        self._resources = resources or RayResources()
        self._port = port
        self._log_path = log_path
        self._test_seed = test_seed
        self._superlink: SuperLink | None = None

    def __enter__(self) -> Self:
        self._started()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop()

    def run(
        self,
        app_dir: Path,
        *,
        nodes: int,
        run_config: Mapping[str, RunValue],
        on_poll: Callable[[], None] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Run a Flower App and wait for its end.

        When the app does not come to its own end (Ctrl-C, timeout, an error in `on_poll`, a killed
        process), all processes of the session are stopped; the next run starts them again.

        Parameters
        ----------
        app_dir : Path
            Folder with the app's ``pyproject.toml``.
        nodes : int
            Number of simulated nodes.
        run_config : mapping
            Values for keys that the app's ``[tool.flwr.app.config]`` declares. Text arrives as it
            is, line breaks and quotes included.
        on_poll : callable, optional
            Called about three times a second while the app runs, and once after its end.
        timeout : float, optional
            Seconds that the run may take.

        Raises
        ------
        InvalidParameterError
            If a value is not allowed.
        EngineError
            If Flower refuses the run, the app fails, its process is killed or the time is over.
        """
        check_integer("nodes", nodes, minimum=1)
        if timeout is not None:
            check_number("timeout", timeout, minimum=0)
        if not (app_dir / "pyproject.toml").is_file():
            raise InvalidParameterError(
                "app_dir", str(app_dir), "a folder with the pyproject.toml of a Flower App"
            )
        for key, value in run_config.items():
            if not isinstance(value, RunValue):
                raise InvalidParameterError(f"run_config.{key}", value, "text, a number or a bool")
        superlink = self._started()
        config = superlink.folder / "run-config.toml"
        config.write_text(tomli_w.dumps(dict(run_config)), encoding="utf-8")
        run = _Run(superlink, log_is_kept=self._log_path is not None)
        ended = False
        try:
            run.follow(
                app_dir,
                run_config=config,
                federation_config=self._resources.federation_config(nodes=nodes),
                on_poll=on_poll or _nothing,
                timeout=timeout,
            )
            ended = True
        finally:
            if not ended:
                self._stop()
        run.check()

    def _started(self) -> SuperLink:
        if self._superlink is None:
            self._superlink = SuperLink(
                ray_address=self._resources.ray_address,
                cpus=self._resources.total_cpus,
                gpus=self._resources.total_gpus,
                port=self._port,
                log_path=self._log_path,
                test_seed=self._test_seed,
            )
        return self._superlink

    def _stop(self) -> None:
        if self._superlink is not None:
            self._superlink.stop()
            self._superlink = None


class _Run:
    """One run of an app, from its submission to its verdict."""

    def __init__(self, superlink: SuperLink, *, log_is_kept: bool) -> None:
        self._superlink = superlink
        self._log_is_kept = log_is_kept
        self._log_start = superlink.log.stat().st_size

    def follow(
        self,
        app_dir: Path,
        *,
        run_config: Path,
        federation_config: str,
        on_poll: Callable[[], None],
        timeout: float | None,
    ) -> None:
        """Submit the run; return when its log and its process have ended."""
        with self._superlink.submit(
            app_dir, run_config=run_config, federation_config=federation_config
        ) as stream:
            try:
                seconds = float("inf") if timeout is None else timeout
                self._wait(stream, on_poll, time.monotonic() + seconds)
            finally:
                stream.kill()
        on_poll()

    def _wait(self, stream: Popen[bytes], on_poll: Callable[[], None], deadline: float) -> None:
        # Looking at the processes is cheap (`flwr ls` takes 1.4 s of CPU time), and tells at once
        # of a killed one (Flower waits for its heartbeat for a minute).
        started = False
        one_ended: float | None = None
        while True:
            simulating = self._superlink.simulation() is not None
            streaming = stream.poll() is None
            started = started or simulating
            if not streaming and not simulating:
                return
            now = time.monotonic()
            if not self._superlink.alive:
                raise self._error("Flower's SuperLink or Ray ended")
            if now > deadline:
                raise self._error("the app took longer than its timeout")
            if not streaming or (started and not simulating):
                one_ended = one_ended or now
                if now > one_ended + END_TIMEOUT:
                    raise self._error(
                        "the app's process hangs after its end"
                        if simulating
                        else "the app's process was killed (out of memory?)"
                    )
            on_poll()
            time.sleep(POLL_INTERVAL)

    def check(self) -> None:
        """Raise unless the app has completed."""
        result = self._superlink.result()
        if result is None:
            lines = [line for line in plain(self._log()).splitlines() if "INFO" not in line]
            raise EngineError("\n  ".join(["flwr run refused the app", *lines[-SHOWN_LINES:]]))
        status, details = result
        if status != "finished:completed":
            raise self._error(f"the app ended as {status!r} ({details})")

    def _log(self) -> str:
        with self._superlink.log.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")

    def _error(self, what: str) -> EngineError:
        log = self._log()
        causes = exceptions_in(log)[-SHOWN_EXCEPTIONS:] or plain(log).splitlines()[-SHOWN_LINES:]
        where = [f"log: {self._superlink.log}"] if self._log_is_kept else []
        return EngineError("\n  ".join([what, *causes, *where]))


def _nothing() -> None:
    pass
