"""Keeps what each fine-tuning told in a file, so that a broken-off attack goes on where it was."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flwr_privacy.wire.files import write_text

from .attack import Measured

__all__ = ["kept"]


def kept(path: Path, settings: Mapping[str, Any], measure: Callable[[], Measured]) -> Measured:
    """Return what a file says of a fine-tuning, or measure it and write the file.

    Parameters
    ----------
    path : Path
        The file. Its folder is made.
    settings : Mapping of str to object
        What the fine-tuning depends on, for JSON. A file with other settings is written anew.
    measure : callable
        Fine-tunes.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["settings"] == settings:
            return Measured(**found["measured"])
    measured = measure()
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"settings": settings, "measured": asdict(measured)}
    write_text(path, json.dumps(content, indent=1) + "\n")
    return measured
