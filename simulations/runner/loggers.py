"""Loggers of a run's rounds that the command line offers: TensorBoard, or one of the user's."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flwr_privacy.errors import EngineError, FlwrPrivacyError, InvalidParameterError
from flwr_privacy.simulations.settings.own_code import (
    call_own,
    is_reference,
    own_function,
    search_current_folder,
)
from flwr_privacy.strategies.options.round_logger import RoundLogger, numbers_of

__all__ = ["LoggedRounds", "TensorBoardLogger", "logger_maker"]

TENSORBOARD = "tensorboard"


class TensorBoardLogger:
    """Writes the rounds for TensorBoard (``tensorboard --logdir DIR``).

    Parameters
    ----------
    folder : path
        Folder of the run's events.

    Raises
    ------
    EngineError
        If TensorBoard is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        self._writer: Any = _writer_class()(str(folder))

    def log(self, server_round: int, metrics: Mapping[str, float]) -> None:
        """Write the numbers of a round, each as a scalar; others can read them now."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=server_round)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def logger_maker(option: str) -> Callable[[str], RoundLogger]:
    """Return what makes the logger that ``--log`` names, for the name of a run.

    Parameters
    ----------
    option : str
        ``tensorboard:DIR``: the events of a run lie in a folder of its name in DIR. Or
        ``module:function`` in the current folder: a function that takes the name of the run and
        returns a `RoundLogger`.

    Raises
    ------
    InvalidParameterError
        If the option is neither.
    EngineError
        If TensorBoard is not installed.
    DataError
        If the user's module raises.
    """
    kind, _, rest = option.partition(":")
    if kind == TENSORBOARD and rest:
        _writer_class()
        return lambda run: TensorBoardLogger(Path(rest, run))
    if kind == TENSORBOARD or not is_reference(option):
        allowed = "tensorboard:DIR, or module:function that returns a logger of your own"
        raise InvalidParameterError("--log", option, allowed)
    search_current_folder()
    function = own_function("--log", option)

    def make(run: str) -> RoundLogger:
        made = call_own("--log", option, f"{rest}()", lambda: function(run))
        if not isinstance(made, RoundLogger):
            allowed = f"a function that returns an object with log and close (not {_type(made)})"
            raise InvalidParameterError("--log", option, allowed)
        return made

    return make


def _writer_class() -> Any:
    try:
        return importlib.import_module("torch.utils.tensorboard").SummaryWriter
    except ImportError as error:
        needed = "pip install 'flwr-privacy[tensorboard]'"
        raise EngineError(f"TensorBoard is not installed: {needed} ({error})") from error


def _type(value: Any) -> str:
    return "None" if value is None else type(value).__name__


class LoggedRounds:
    """Gives a logger the rounds of a run that another thread or process trains.

    All methods but `check` are for one thread, in which the logger is made, too: some dashboards
    have a current run for each thread. A logger that raises gets no more rounds: the training goes
    on, and `check` tells it afterwards.

    Parameters
    ----------
    name : str or None
        What ``--log`` says; None to log nothing.
    run : str
        Name of the run.
    """

    def __init__(self, name: str | None, run: str) -> None:
        self._name = name
        self._run = run
        self._logger: RoundLogger | None = None
        self._failed: Exception | None = None
        self._last = -1

    def open(self) -> None:
        """Make the logger."""
        if self._name is not None:
            with self._noted():
                self._logger = logger_maker(self._name)(self._run)

    def log(self, line: Mapping[str, Any]) -> None:
        """Log a round's line of ``metrics.jsonl``, once."""
        if self._logger is None or self._failed is not None or line["round"] <= self._last:
            return
        with self._noted():
            self._logger.log(line["round"], numbers_of(line))
            self._last = line["round"]

    def close(self) -> None:
        """Close the logger."""
        if self._logger is not None:
            with self._noted():
                self._logger.close()

    def check(self) -> None:
        """Tell that the logger has raised.

        Raises
        ------
        EngineError
            If it has.
        FlwrPrivacyError
            If it could not be made.
        """
        if isinstance(self._failed, FlwrPrivacyError):
            raise self._failed
        if self._failed is not None:
            what = f"{type(self._failed).__name__}: {self._failed}"
            raise EngineError(
                f"--log {self._name} raised {what}; the last round that it has is {self._last}. "
                "The run is not concerned: its folder has all rounds"
            ) from self._failed

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 (whatever a logger of the user's raises)
            self._failed = self._failed or error
