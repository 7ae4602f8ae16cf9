"""The app of the conformance classes, and strategies of this library from flat keys."""

from typing import Any

from flwr_privacy.simulations.settings.flat_options import keywords_of
from flwr_privacy.simulations.testing.apps import (
    MODEL,
    StepClient,
    message_app,
    model_of,
    record,
    run_strategy,
    same,
    step,
)
from flwr_privacy.strategies import M2FDP, UDP

__all__ = [
    "MODEL",
    "StepClient",
    "make",
    "message_app",
    "model_of",
    "record",
    "run_strategy",
    "same",
    "step",
]


def make(kind: Any, *arguments: Any, **values: Any) -> Any:
    """Return a strategy from flat keys, for tests with tables of parameters.

    Where no unit is given, it is that of all data of a client.
    """
    if "privacy" not in values:
        for scheme, unit in ((UDP, "user"), (M2FDP, "device")):
            values = {"unit": unit, **values} if issubclass(kind, scheme) else values
    return kind(*arguments, **keywords_of(kind, values))
