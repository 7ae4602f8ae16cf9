"""What tests of a scheme need: conformance classes, pytest fixtures for faults and audits."""

from typing import TYPE_CHECKING

from flwr_privacy.lazy import lazy

if TYPE_CHECKING:
    from .client_conformance import OwnClientConformance, WrapsConformance
    from .conformance import SchemeConformance
    from .leaks import assert_leaks_less_than
    from .own_audits import CrowdAudit, audit_of, crowd_of
    from .own_faults import faults_of
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "CrowdAudit",
    "OwnClientConformance",
    "SchemeConformance",
    "WrapsConformance",
    "assert_leaks_less_than",
    "audit_of",
    "crowd_of",
    "faults_of",
]
