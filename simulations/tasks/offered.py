"""Tasks that exist as objects only: this process, and those that it starts, find them by name.

Nothing of a task is kept in run folders: reading a model of somebody else's would run their code.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .task_list import Task

__all__ = ["TASK_VARIABLE", "offered", "offered_task"]

TASK_VARIABLE = "FLWR_PRIVACY_OWN_TASK"
"""The folder with the task of a process that was started for it. Never from a server's message:
what is in it is executed."""

_ARRAYS = {"data": ("features", "labels"), "test": ("test-features", "test-labels")}
_REST = "rest.pickle"

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
            before = os.environ.get(TASK_VARIABLE)
            os.environ[TASK_VARIABLE] = folder
            stack.callback(_put_back, before)
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


def _put_back(before: str | None) -> None:
    if before is None:
        del os.environ[TASK_VARIABLE]
    else:
        os.environ[TASK_VARIABLE] = before


def _write(task: "Task", folder: Path) -> None:
    import cloudpickle  # type: ignore[import-untyped]

    from flwr_privacy.errors import InvalidParameterError

    for name, files in _ARRAYS.items():
        if (arrays := getattr(task, name)) is not None:
            for file, array in zip(files, arrays, strict=True):
                np.save(folder / f"{file}.npy", np.asarray(array), allow_pickle=False)
    rest = {f.name: getattr(task, f.name) for f in fields(task) if f.name not in _ARRAYS}
    try:
        (folder / _REST).write_bytes(cloudpickle.dumps(rest))
    # What an object of the user's raises when it is pickled is its own matter.
    except Exception as error:
        allowed = f"what can be sent to worker processes ({error}); workers=1 needs none"
        raise InvalidParameterError("model or loss", type(task.model).__name__, allowed) from error


@lru_cache(maxsize=1)
def _read(folder: Path) -> "Task":
    import pickle

    from .task_list import Task

    arrays = {
        name: tuple(np.load(folder / f"{file}.npy", mmap_mode="r") for file in files)
        for name, files in _ARRAYS.items()
        if (folder / f"{files[0]}.npy").exists()
    }
    return Task(**arrays, **pickle.loads((folder / _REST).read_bytes()))
