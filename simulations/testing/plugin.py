"""The pytest plugin: fixtures with the prefix `flwr_privacy_`.

Every pytest run of an environment loads this module, so it imports nothing large: what a test asks
for is imported when it asks.
"""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from flwr_privacy.simulations.reliability.matrix import Cell
    from flwr_privacy.simulations.research.app_audit.report import AuditReport
    from flwr_privacy.simulations.research.audits.verdicts import Audit

    from .own_audits import CrowdAudit

__all__ = [
    "flwr_privacy_audit",
    "flwr_privacy_crowd",
    "flwr_privacy_faults",
    "flwr_privacy_leaks",
]

# So that a failed assertion of a conformance class shows its values.
pytest.register_assert_rewrite(
    "flwr_privacy.simulations.testing.apps",
    "flwr_privacy.simulations.testing.client_conformance",
    "flwr_privacy.simulations.testing.conformance",
)


@pytest.fixture
def flwr_privacy_audit() -> "Callable[..., Audit]":
    """Return `audit_of`: trains canaries, and fails the test if they refute a claim."""
    from .own_audits import audit_of

    return audit_of


@pytest.fixture
def flwr_privacy_crowd() -> "Callable[..., CrowdAudit]":
    """Return `crowd_of`: bounds epsilon from one training, and fails if that is too large."""
    from .own_audits import crowd_of

    return crowd_of


@pytest.fixture
def flwr_privacy_faults() -> "Callable[..., list[Cell]]":
    """Return `faults_of`: trains with each fault in each phase, and fails the test on a defect."""
    from .own_faults import faults_of

    return faults_of


@pytest.fixture
def flwr_privacy_leaks() -> "Callable[..., AuditReport]":
    """Return `assert_leaks_less_than`: audits a Flower app, and fails if it leaks too much."""
    from .leaks import assert_leaks_less_than

    return assert_leaks_less_than
