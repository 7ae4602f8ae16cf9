"""An in-process engine that drives the very same ServerApp and ClientApp objects without Ray."""

from .faults import Fault
from .grid import InlineGrid
from .run import run_inline

__all__ = ["Fault", "InlineGrid", "run_inline"]
