"""Experiment files say every option whose default may change: a later default moves no verdict.

`PINNED` names the options. One of them is left out only where the curve has no use for it, as
what only another kind of noise or schedule has, or where it is turned off, which TOML cannot say.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from flwr_privacy.simulations.app.server_app import build_strategy
from flwr_privacy.simulations.research.experiments.description import Curve, ExperimentDescription
from flwr_privacy.simulations.research.experiments.files import experiment, names
from flwr_privacy.simulations.research.experiments.runs import function_points
from flwr_privacy.simulations.research.m2fdp import experiment as tiers
from flwr_privacy.simulations.research.mspdq import inversion
from flwr_privacy.simulations.settings.schemes import SCHEMES
from flwr_privacy.strategies import SchemeStrategy

BUDGET = ("epsilon", "delta", "clipping_norm")
DRAWS = ("replacement",)
MIXING = (
    *(*DRAWS, "paper", "kappa", "gamma", "coupling", "mixing_rounds", "m", "mass", "split"),
    *("eps_s", "scale"),
)
PINNED: dict[str, tuple[str, ...]] = {
    "fedavg": (),
    "udp": (
        *("unit", "noise", *BUDGET, "learning_rate", "sampling_rate", "local_epochs"),
        *("sensitivity_bound", "shared_noise", "max_records", "client_sampling", "participants"),
        *("beta", "zeta", "patience", "end", "calibrated", "share", "loss_cap"),
    ),
    "central-dp": (
        *("noise", *BUDGET, "sampling", "correlated", "bands", "optimised", "buffers", "groups"),
        "quantile",
    ),
    "msp": MIXING,
    "mspdq": (*MIXING, "bits", "mixing_start", "interval", "pi", "c", "bound"),
    "mspdq-fedavg": DRAWS,
    "mspdq-ldp": (*DRAWS, *BUDGET, "smallest_data", "exposures", "law", "clip", "downlink"),
    "mspdq-jopeq": (*DRAWS, "epsilon", "bits"),
    "mspdq-plain": (*DRAWS, "bits"),
    "m2fdp": (
        *("unit", *BUDGET, "sampling_rate", "clean_events", "edge_noise"),
        *("release_steps", "fanouts", "steps", "events", "step_rule"),
        *("min_children", "total_steps", "max_steps", "weights", "normalise", "nu"),
        "active_tiers",
    ),
    "acfl": (
        *("noise", *BUDGET, "mi_epsilon", "sigma1_sq", "sigma2_sq", "split", "alpha"),
        *("predictable", "encoding", "symmetric_noise", "symmetrize", "schedule"),
        *("batch_fraction", "ridge", "setup_share"),
    ),
}
"""By scheme, the options with a meaning for privacy or training."""

USED: dict[str, tuple[str, set[Any]]] = {
    "scale": ("split", {"laplace", "gaussian"}),
    "eps_s": ("split", {"uniform", "uniform_m"}),
    "mass": ("m", {2, 3, 4}),
    "pi": ("interval", {"fixed"}),
    "c": ("interval", {"linf"}),
    "bound": ("interval", {"bound"}),
    "max_records": ("shared_noise", {True}),
}
"""Options that count only with some values of another one, which is named as well."""

SETTLED = {
    *("unit", "noise", "alpha", "gamma", "coupling", "mixing_rounds", "mixing_start", "interval"),
}
"""Options that always count, though no field has their value where they are left out."""

_LOSSES = ("data", "alpha", "straggler_rate", "encoding")
_COLUMNS = (
    *("data", "method", "learning_rate", "batch_size", "embedding", "order", "T", "data_bits"),
    *("weight_bits", "w_max", "log_base", "batch"),
)
SIMULATED: dict[str, tuple[str, ...]] = {
    "acfl-loss": _LOSSES,
    "acfl-excess": _LOSSES,
    "fedvs": _COLUMNS,
    "fedvs-binary": _COLUMNS,
    "fedvs-networks": (
        *("data", "clients", "network", "layers", "server", "embedding", "rounds", "batch_size"),
        "learning_rate",
    ),
    "central-dp": (
        *("task", "clients", "per_round", "trainings", "noise", "epsilon", "delta"),
        *("clipping_norm", "epochs", "batch_size", "learning_rate"),
    ),
    "mspdq-inversion": ("task", "clients", "images", "scheme", "view"),
    "udp-learned-digits": (
        *("task", "clients", "records", "rounds", "learning_rate", "noise", "epsilon", "delta"),
    ),
    "m2fdp-control": ("normalise", "nu", "active_tiers", "sampling_rate"),
}
"""By function, keys of its points."""

TIERS = (
    *("unit", "epsilon", "delta", "alpha", "clean_events", "edge_noise", "release_steps"),
    *("step_rule", "weights", "normalise", "nu", "active_tiers"),
)
"""Options of M2FDP's simulations, beside those of a local step."""

IN_INVERSION = {"jopeq": "mspdq-jopeq"}
"""Names of schemes in points of that function that are not those of the command line."""

STEPS = ("learning_rate", "clip", "rate", "labels")
TRAINING = ("epochs", "batch_size", "learning_rate", "decay")
PRIVATE = ("learning_rate", "decay")  # DP-SGD draws the records of its steps
OF_PARTITION = {"dirichlet": "alpha", "shards": "shards", "labels": "labels"}


def flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the keys of nested tables, dotted."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def values_of(options: Any) -> dict[str, Any]:
    """Return the options of a strategy and of the objects that it has, by name."""
    found: dict[str, Any] = {}
    for field in fields(options):
        value = getattr(options, field.name)
        if is_dataclass(value) and not isinstance(value, type):
            found |= values_of(value)
        elif value is not None:
            found[field.name] = value
    return found


def left_out(
    strategy: SchemeStrategy, given: Mapping[str, Any], named: tuple[str, ...]
) -> set[str]:
    """Return which of the named options nobody has given, though the strategy has a value."""
    has = {*values_of(strategy), *SETTLED}
    has -= {name for name, (other, values) in USED.items() if given.get(other) not in values}
    has -= {"mixing_rounds"} if "tolerance" in given else set()
    has -= set() if given.get("p") else {"min_children"}  # of secure nodes, if there are any
    return {name for name in named if name in has and name not in given}


def of_training(chosen: ExperimentDescription, curve: Curve, *, full: bool) -> set[str]:
    """Return what a curve of trainings leaves to defaults."""
    tables = (chosen.base, curve.settings, *((chosen.full, curve.full) if full else ()))
    given = {key for table in tables for key in flat(table)}
    given |= {each.key for each in (chosen.sweep, curve.search) if each is not None}
    settings = chosen.settings(curve, seed=0, full=full)
    own = settings.strategy | {
        each.key.removeprefix("strategy."): None
        for each in (chosen.sweep, curve.search)
        if each is not None
    }
    strategy = build_strategy(settings, None)
    missing = {f"strategy.{n}" for n in left_out(strategy, own, PINNED[settings.scheme])}
    needed = {"scheme", "task", "clients", "rounds", "partition.kind"}
    if settings.partition.kind in OF_PARTITION:
        needed.add(f"partition.{OF_PARTITION[settings.partition.kind]}")
    unit = settings.strategy.get("unit")
    if unit != "record":  # then the scheme has a training of its own
        own_client = SCHEMES[settings.scheme].own_client
        used = ("learning_rate",) if own_client else PRIVATE if unit == "dp-sgd" else TRAINING
        needed |= {f"training.{name}" for name in used}
    return missing | (needed - given)


def of_function(chosen: ExperimentDescription, *, full: bool) -> set[str]:
    """Return what the points of a function leave to defaults."""
    missing = set()
    for _, _, point in function_points(chosen, full=full):
        needed = {*SIMULATED.get(chosen.function, ())}
        if chosen.function in ("m2fdp", "m2fdp-cost"):
            has = values_of(tiers._training(point, seed=0))
            needed = {*STEPS, *(name for name in TIERS if name in has)}
            if "control" in point:  # which draws devices; without, all of them take part
                needed.add("client_sampling")
        if chosen.function == "mspdq-inversion":
            options = PINNED[IN_INVERSION.get(point["scheme"], point["scheme"])]
            missing |= left_out(inversion._strategy(point), point, options)
        missing |= needed - {*flat(point), *flat(point.get("control", {}))}
    return missing


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", names())
def test_experiments_leave_no_named_option_to_a_default(name: str, full: bool) -> None:
    chosen = experiment(name)
    if chosen.function:
        assert not of_function(chosen, full=full)
    for curve in () if chosen.function else chosen.curves:
        assert not of_training(chosen, curve, full=full), curve.label
