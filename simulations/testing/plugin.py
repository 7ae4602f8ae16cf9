"""The pytest plugin: the fixture `flwr_privacy`.

Every pytest run of an environment loads this module, so it imports nothing large: what a test asks
for is imported when it asks.
"""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .scheme_checks import SchemeChecks

# So that a failed assertion of a conformance class shows its values.
pytest.register_assert_rewrite(
    "flwr_privacy.simulations.testing.apps",
    "flwr_privacy.simulations.testing.client_conformance",
    "flwr_privacy.simulations.testing.conformance",
)


@pytest.fixture
def flwr_privacy() -> "SchemeChecks":
    """Return the checks of a scheme: `faults`, `audit` and `audit_sessions`."""
    from .scheme_checks import SchemeChecks

    return SchemeChecks()
