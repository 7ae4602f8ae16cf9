"""Reads the schemes that a user gives: names, strategies, or tables of settings."""

from collections.abc import Mapping
from typing import Any

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.runner.complete_settings import own_parameters
from flwr_privacy.simulations.settings.flat_values import flat_values
from flwr_privacy.simulations.settings.run_settings import flat_table, with_scheme_parameters
from flwr_privacy.simulations.settings.schemes import SCHEMES, scheme
from flwr_privacy.strategies import SchemeStrategy

__all__ = ["scheme_choices"]


def scheme_choices(schemes: Any) -> dict[str, dict[str, Any]]:
    """Return the settings of each scheme with dotted keys, ``scheme`` among them, by its label.

    Raises
    ------
    InvalidParameterError
        If a scheme is unknown, two have one label, or a strategy has options that no run folder can
        keep.
    """
    if isinstance(schemes, Mapping) and "scheme" not in schemes:
        given = {check_label(label): chosen for label, chosen in schemes.items()}
    else:
        listed = schemes if isinstance(schemes, list | tuple) else [schemes]
        given = {}
        for chosen in listed:
            if (label := _name_of(chosen, "schemes")) in given:
                allowed = "one scheme of that name; for two give {label: ..., label: ...}"
                raise InvalidParameterError("schemes", label, allowed)
            given[label] = chosen
    if not given:
        raise InvalidParameterError("schemes", schemes, "at least one scheme")
    return {label: _settings(chosen, f"schemes[{label!r}]") for label, chosen in given.items()}


def check_label(label: Any) -> str:
    """Return a label if it can be the name of a folder."""
    if not isinstance(label, str) or not label or set(label) & set("/\\") or label.startswith("."):
        raise InvalidParameterError("schemes", label, "labels that can be names of folders")
    return label


def _name_of(chosen: Any, parameter: str) -> str:
    """Return the name of a scheme."""
    if isinstance(chosen, SchemeStrategy):
        for name, entry in SCHEMES.items():
            if entry.strategy is type(chosen):
                return name
        allowed = "a strategy of this package; one of your own goes into an app (app=)"
        raise InvalidParameterError(parameter, type(chosen).__name__, allowed)
    if isinstance(chosen, Mapping):
        chosen = chosen.get("scheme")
    if isinstance(chosen, type) and issubclass(chosen, SchemeStrategy):
        allowed = f"a strategy, {chosen.__name__}(...), and not its class"
        raise InvalidParameterError(parameter, chosen.__name__, allowed)
    if not isinstance(chosen, str):
        allowed = "a name, a strategy, or a table of settings with a 'scheme'"
        raise InvalidParameterError(parameter, chosen, allowed)
    scheme(chosen)
    return chosen


def _settings(chosen: Any, parameter: str) -> dict[str, Any]:
    name = _name_of(chosen, parameter)
    if isinstance(chosen, SchemeStrategy):
        return {"scheme": name, **_of_strategy(name, chosen, parameter)}
    own = own_parameters(scheme(name).strategy)
    table = flat_table(chosen) if isinstance(chosen, Mapping) else {}
    return {**with_scheme_parameters(table, own), "scheme": name}


def _of_strategy(name: str, strategy: SchemeStrategy, parameter: str) -> dict[str, Any]:
    try:
        values, every = flat_values(strategy), flat_values(strategy, defaults=True)
    except InvalidParameterError as error:
        raise InvalidParameterError(
            f"{parameter}: {error.parameter}", error.value, error.allowed
        ) from error
    # A simulation has other defaults for some: what the strategy has counts.
    usual = scheme(name).usual(values, None)
    values |= {key: every[key] for key in usual if key not in values and key in every}
    settings = {f"strategy.{key}": value for key, value in values.items()}
    if strategy.secure_sum is not None:
        own = flat_table({"secure_sum": vars(strategy.secure_sum)})
        settings |= own or {"secure_sum": True}
    return settings
