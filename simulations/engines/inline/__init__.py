"""An engine that runs the same ServerApp and ClientApp in one process, without Ray."""

from .faults import Fault
from .grid import InlineGrid
from .run import run_inline

__all__ = ["Fault", "InlineGrid", "run_inline"]
