"""What a test of a scheme needs: conformance classes, and a pytest fixture for faults and audits."""

from typing import TYPE_CHECKING

from flwr_privacy.lazy import lazy

if TYPE_CHECKING:
    from .audits import uploads_of
    from .client_conformance import OwnClientConformance, WrapsConformance
    from .conformance import SchemeConformance
    from .scheme_checks import SchemeChecks
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "OwnClientConformance",
    "SchemeChecks",
    "SchemeConformance",
    "WrapsConformance",
    "uploads_of",
]
