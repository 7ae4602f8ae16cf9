"""What a sampled frame is: its module, and whether it is of the user's own code."""

import sys
import sysconfig

__all__ = ["described", "is_own"]

_LIBRARIES = tuple(
    path
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
    if (path := sysconfig.get_path(name))
)
_modules: dict[str, str] = {}  # by file
_modules_of = 0  # how many were imported then


def described(sampled: str) -> tuple[str, str]:
    """Return a sampled frame and its module; without its line unless it is the user's own code."""
    identifier, *attributes = sampled.split("\x01")
    function, file, _ = identifier.split("\x00")
    if file == "<thread>":
        return f"{function}\x00{file}\x000", ""  # its number differs in each process
    module = _module_of(file)
    # Class and line; pyinstrument would not show functions that hide from tracebacks.
    marks = ("c", "l") if is_own(file, module) else ("c",)
    attributes = [a for a in attributes if a.startswith(marks)]
    return "\x01".join([identifier, *attributes]), module


def is_own(file: str, module: str) -> bool:
    """Tell whether a file is code of the user's: neither ours nor installed, nor built in."""
    ours = module.partition(".")[0] == "flwr_privacy"
    return not (ours or file.startswith("<") or file.startswith(_LIBRARIES))


def _module_of(file: str) -> str:
    global _modules_of
    if file.startswith("<frozen "):
        return file[len("<frozen ") : -1]
    if file not in _modules and _modules_of != len(sys.modules):
        _modules_of = len(sys.modules)
        for name, module in list(sys.modules.items()):
            place = getattr(module, "__file__", None)
            if isinstance(place, str) and not name.startswith("__m"):
                _modules.setdefault(place, name)
    return _modules.get(file, "")
