"""Measures in a process of its own, whose memory and imports are nobody else's."""

import json
import os
import subprocess
import sys

__all__ = ["measured"]


def measured(module: str, *arguments: str, **environment: str) -> dict[str, float]:
    """Run a module that prints its numbers as JSON in its last line; return them."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(
        command, env={**os.environ, **environment}, check=True, capture_output=True, text=True
    )
    numbers: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return numbers
