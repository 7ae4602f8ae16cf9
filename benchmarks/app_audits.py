"""Seconds of an audit of apps of the size of Flower's quickstart."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from flwr_privacy import audit

from .report import Comparison

__all__ = ["app_audits"]

_APPS = Path(__file__).parent / "audited"
_BUDGET = 600.0


def app_audits() -> Iterator[Comparison]:
    """Audit each app once, with the settings that an audit has by default."""
    for app in sorted(path for path in _APPS.iterdir() if path.is_dir()):
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            audit(app, out=folder)
            seconds = time.perf_counter() - start
        yield Comparison(
            what=f"audit of {app.name}",
            rival=f"a budget of {_BUDGET:.0f} s",
            ours=[seconds],
            theirs=[_BUDGET],
            at_most=1.0,
        )
