"""Completes the settings of a run from what a user chose, and refuses what would fail later."""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.settings.own_code import is_reference, search_current_folder
from flwr_privacy.simulations.settings.run_settings import (
    Settings,
    check_known,
    with_scheme_parameters,
)

__all__ = ["DEFAULT_CLIENTS", "own_parameters", "settings_of"]

DEFAULT_CLIENTS = 20


def settings_of(
    values: Mapping[str, Any], *, download: bool = False, say: Callable[[str], Any] = print
) -> Settings:
    """Return the settings of a run; refuse at once what the app would refuse later.

    Parameters
    ----------
    values : mapping
        What was chosen, by dotted key.
    download : bool, default False
        Whether to download missing data sets.
    say : callable, default print
        Is told in one line what the clients hold.

    Raises
    ------
    InvalidParameterError
        If a key is unknown, a value is not allowed or has no effect, or the scheme cannot train the
        task.
    DataError
        If data is missing, or a client would have none.
    """
    # Imported late: torch takes seconds, which `--help` need not wait for.
    from flwr_privacy.simulations.app.server_app import build_strategy
    from flwr_privacy.simulations.settings import schemes
    from flwr_privacy.simulations.settings.effect import check_effect, dotted
    from flwr_privacy.simulations.tasks.data import load
    from flwr_privacy.simulations.tasks.lookup import check_own_task
    from flwr_privacy.simulations.tasks.partition import Description
    from flwr_privacy.simulations.tasks.tasks import check_data, task_of
    from flwr_privacy.simulations.tasks.vertical_tasks import VerticalTask

    strategy = schemes.scheme(values.get("scheme", Settings.scheme)).strategy
    own = own_parameters(strategy)
    for key in values:
        if "." not in key:
            check_known(key, [*own, *(entry.name for entry in fields(Settings))])
    values = with_scheme_parameters(values, own)
    settings = Settings(clients=DEFAULT_CLIENTS).with_values(values)
    if is_reference(settings.task):
        search_current_folder()
    chosen = task_of(settings)
    if isinstance(chosen, VerticalTask):
        common = {"clients": chosen.clients, "rounds": chosen.rounds}
        settings = settings.with_values({k: v for k, v in common.items() if k not in values})
    settings = replace(settings, training=chosen.training).with_values(values)
    if download:  # first: some strategies are made from the data
        if chosen.dataset is None:
            allowed = f"nothing: the task '{settings.task}' brings its own data"
            raise InvalidParameterError("--download", True, allowed)
        load(chosen.dataset, data_root=settings.data_root, download=True)
    found = check_data(settings)
    check_own_task(chosen, settings.data_root)
    fewest = int(found.sizes.min()) if isinstance(found, Description) else None
    usual = schemes.scheme(settings.scheme).usual(settings.strategy, fewest)
    settings = replace(settings, strategy=usual)
    check_effect(settings, dotted(values))
    build_strategy(settings, None)
    if settings.secure_sum is not None and settings.clients is not None:
        settings.secure_sum.colluders_of(settings.clients)  # no cohort has more
    if found is not None:
        say(f"data: {found}")
    return settings


def own_parameters(strategy: Any) -> set[str]:
    """Return the parameters that a scheme has beyond those of every strategy."""
    from flwr_privacy.simulations.settings.flat_options import flat_keys
    from flwr_privacy.strategies import SchemeStrategy

    return set(flat_keys(strategy)).difference(flat_keys(SchemeStrategy))
