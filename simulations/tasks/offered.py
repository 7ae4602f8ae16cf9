"""Tasks that exist as objects only: this process, and those that it starts, find them by name.

Nothing of a task is kept in run folders: reading a model of somebody else's would run their code.
"""

import os
import pickle
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flwr_privacy.errors import InvalidParameterError

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp

    from .task_list import Task

__all__ = ["TASK_VARIABLE", "offered", "offered_app", "offered_task"]

TASK_VARIABLE = "FLWR_PRIVACY_OWN_TASK"
"""The folder with the task of a process that was started for it. Never from a server's message:
what is in it is executed."""

_ARRAYS = {"data": ("features", "labels"), "test": ("test-features", "test-labels")}
_REST, _APP = "rest.pickle", "app.pickle"

_offered: dict[str, "Task"] = {}


@contextmanager
def offered(task: "Task", *, elsewhere: bool) -> Iterator[None]:
    """Have a task found by its name while the context is open.

    Parameters
    ----------
    task : Task
        One with ``data``.
    elsewhere : bool
        Whether processes that are started meanwhile find it, too. They read its arrays from files,
        which they share, and the model as cloudpickle writes it: with the code of classes and
        functions of a script or a notebook.

    Raises
    ------
    InvalidParameterError
        If the model or the loss cannot be sent to another process.
    """
    with ExitStack() as stack:
        _offered[task.name] = task
        stack.callback(_offered.pop, task.name)
        if elsewhere:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="flwr-privacy-task-"))
            _write(task, Path(folder))
            stack.enter_context(_found_in(folder))
        yield


def offered_task(name: str) -> "Task | None":
    """Return the task of that name that is offered to this process, if there is one."""
    if name in _offered:
        return _offered[name]
    folder = os.environ.get(TASK_VARIABLE)
    if not folder:
        return None
    task = _read(Path(folder))
    return task if task.name == name else None


@contextmanager
def offered_app(app: "ClientApp | str", *, elsewhere: bool) -> Iterator["ClientApp | str"]:
    """Return what worker processes find a ClientApp by: its reference ``module:attribute``.

    Raises
    ------
    InvalidParameterError
        If the app cannot be sent to another process.
    """
    if not elsewhere or isinstance(app, str):
        yield app
        return
    with tempfile.TemporaryDirectory(prefix="flwr-privacy-app-") as folder, _found_in(folder):
        Path(folder, _APP).write_bytes(_pickled("app", app))
        yield f"{__name__}:client_app"


def __getattr__(name: str) -> Any:
    """Return ``client_app``, the ClientApp that is offered to this process."""
    if name != "client_app" or not (folder := os.environ.get(TASK_VARIABLE)):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return pickle.loads(Path(folder, _APP).read_bytes())


@contextmanager
def _found_in(folder: str) -> Iterator[None]:
    """Tell the processes that are started meanwhile where to look."""
    # What the user's own modules have is pickled as a reference to them.
    modules = [os.path.abspath(sys.path[0]), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {TASK_VARIABLE: folder, "PYTHONPATH": os.pathsep.join(modules)}
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _pickled(parameter: str, value: Any) -> bytes:
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(value))
    # What an object of the user's raises when it is pickled is its own matter.
    except Exception as error:
        allowed = f"what can be sent to worker processes ({error}); workers=1 needs none"
        raise InvalidParameterError(parameter, type(value).__name__, allowed) from error


def _write(task: "Task", folder: Path) -> None:
    for name, files in _ARRAYS.items():
        if (arrays := getattr(task, name)) is not None:
            for file, array in zip(files, arrays, strict=True):
                np.save(folder / f"{file}.npy", np.asarray(array), allow_pickle=False)
    rest = {f.name: getattr(task, f.name) for f in fields(task) if f.name not in _ARRAYS}
    (folder / _REST).write_bytes(_pickled("model", rest))


@lru_cache(maxsize=1)
def _read(folder: Path) -> "Task":
    from .task_list import Task

    arrays: dict[str, Any] = {
        name: tuple(np.load(folder / f"{file}.npy", mmap_mode="r") for file in files)
        for name, files in _ARRAYS.items()
        if (folder / f"{files[0]}.npy").exists()
    }
    return Task(**arrays, **pickle.loads((folder / _REST).read_bytes()))
