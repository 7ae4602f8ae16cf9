"""Imports a function of the user's, named as ``module:function``."""

import importlib
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr_privacy.errors import DataError, InvalidParameterError

__all__ = ["call_own", "is_reference", "own_function", "search_current_folder"]


def search_current_folder() -> None:
    """Let modules be imported from the current folder, here and in processes started from here.

    It comes first, as it does for a script of that folder.
    """
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if folder not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, *paths]))


def is_reference(name: str) -> bool:
    """Return whether a name has the form ``module:function``."""
    return ":" in name


def own_function(parameter: str, reference: str) -> Callable[..., Any]:
    """Import a function.

    Parameters
    ----------
    parameter : str
        What it is for, which errors name.
    reference : str
        ``module:function``.

    Raises
    ------
    InvalidParameterError
        If the module or the function is not there.
    DataError
        If importing the module raises.
    """
    module_name, _, name = reference.partition(":")
    if not re.fullmatch(r"\w+(\.\w+)*", module_name) or not name.isidentifier():
        allowed = "module:function, such as mytask:income"
        raise InvalidParameterError(parameter, reference, allowed)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        parents = module_name.split(".")
        if error.name not in [".".join(parents[:n]) for n in range(1, len(parents) + 1)]:
            raise _raised(parameter, reference, "importing it", error) from error
        allowed = (
            f"a module that can be imported: there is no '{error.name}' in {Path.cwd()}, nor among "
            "the installed packages"
        )
        raise InvalidParameterError(parameter, reference, allowed) from error
    except Exception as error:  # whatever the user's module raises
        raise _raised(parameter, reference, "importing it", error) from error
    function = getattr(module, name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if _is_function_of(module_name, value)]
        allowed = f"a function of {module_name} ({getattr(module, '__file__', None)})"
        known = f"; it has {', '.join(own)}" if own else ""
        raise InvalidParameterError(parameter, reference, allowed + known)
    return function  # type: ignore[no-any-return]


def call_own(parameter: str, name: str, what: str, call: Callable[[], Any]) -> Any:
    """Return what the user's code returns.

    Parameters
    ----------
    parameter, name, what : str
        What it is for, its name, and which part of it is called; an error has them.
    call : callable
        Calls it.

    Raises
    ------
    DataError
        If it raises; the message has the place in the user's code.
    """
    try:
        return call()
    except Exception as error:  # whatever the user's code raises
        raise _raised(parameter, name, what, error) from error


def _is_function_of(module: str, value: Any) -> bool:
    return callable(value) and getattr(value, "__module__", "") == module


def _raised(parameter: str, name: str, what: str, error: Exception) -> DataError:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    frames = [f for f in frames if "importlib" not in f.filename]
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return DataError(f"{parameter} '{name}': {what} raised {type(error).__name__}: {error}{place}")
