"""Functions for figures that show no training of the app, e.g. bounds and simulations.

Some are formulas. Others are simulations: trainings without messages, whose data, noise and
stragglers depend on a seed, and which are compared over seeds as trainings are.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr_privacy.acfl.options import (
    DataBounds,
    Exact,
    NoisedSetup,
    SetupVariances,
    Weighting,
)
from flwr_privacy.acfl.privacy import sigma2_for_eps
from flwr_privacy.acfl.terms import SCFL
from flwr_privacy.errors import InvalidParameterError, check_choice
from flwr_privacy.simulations.research.acfl.numpy_simulation import (
    ACFLTrainingCurve,
    SimulatedACFL,
    of_seed,
)
from flwr_privacy.simulations.research.acfl.synthetic_data import (
    ACFLSyntheticData,
    heterogeneous_data,
    paper_data,
)
from flwr_privacy.simulations.research.acfl.theory import (
    convergence_bound,
    optimal_second_moment_bound,
    second_moment_bound,
)
from flwr_privacy.simulations.research.central_dp import numpy_simulation as central
from flwr_privacy.simulations.research.fedvs import client_networks
from flwr_privacy.simulations.research.fedvs import experiment as vertical
from flwr_privacy.simulations.research.m2fdp import experiment as tiers
from flwr_privacy.simulations.research.mspdq import inversion
from flwr_privacy.simulations.research.points import Point, Values
from flwr_privacy.simulations.research.udp import learned_digits
from flwr_privacy.simulations.research.udp.moments import ln_moment, ln_moment_paper

__all__ = ["FUNCTIONS", "Function"]

_FORMS = {"exact": ln_moment, "bound": ln_moment_paper}


def moment(point: Point) -> float:
    """Return the moment of a release in Wei et al., Fig. 2, for an order.

    Parameters
    ----------
    point : Mapping
        ``lambda_``, the order, a whole number; ``form``: ``exact`` (14) or ``bound`` (15); ``q``,
        the share of the clients in a round; ``records`` of a client; ``step``, the learning rate
        times the clipping norm; ``sigma``.

    Examples
    --------
    >>> settings = {"form": "bound", "q": 0.9, "records": 800, "step": 1.0, "sigma": 0.01}
    >>> moment({"lambda_": 100, **settings})
    284.0625
    """
    form = _FORMS[check_choice("form", point["form"], _FORMS)]
    ratio = 2 * point["step"] / point["records"] / point["sigma"]
    return form(point["q"], ratio, int(point["lambda_"]))


def acfl_bound(point: Point) -> float:
    """Return the bound of the distance from the optimum in ACFL, Fig. 1: (33), with (17) and (34).

    Parameters
    ----------
    point : Mapping
        ``epsilon`` of an upload, in nats; ``alpha``: a number, or ``adaptive`` for (37) and (38);
        ``N``, ``d``, ``o``, ``p``, ``beta``, ``C``, ``rounds`` and ``convexity``.

    Examples
    --------
    >>> figure = {"N": 5, "d": 100, "o": 10, "p": 0.1, "beta": 10, "C": 1, "rounds": 1000}
    >>> round(acfl_bound({"epsilon": 100, "alpha": 0.5, "convexity": 1.0, **figure}), 6)
    13.485101
    """
    d, o = point["d"], point["o"]
    s = sigma2_for_eps(point["epsilon"], d, o)
    world = (point["p"], point["N"], point["beta"] ** 2, point["C"] ** 2, s, s, d, o)
    if point["alpha"] == "adaptive":
        u = optimal_second_moment_bound(*world)
    else:
        u = second_moment_bound(point["alpha"], *world)
    return convergence_bound(u, point["convexity"], point["rounds"])


@dataclass(frozen=True)
class _Stage:
    """Data of a simulation from a seed, a bound of its labels, and its step size."""

    data: Callable[[int], ACFLSyntheticData]
    label_bound: float
    steps: Callable[[ACFLSyntheticData], Mapping[str, Any]]


_STAGES = {
    "paper": _Stage(paper_data, 1.0, lambda _: {"learning_rate": 1e-4, "schedule": "inverse"}),
    # 1 / (lambda (t + 3))
    "heterogeneous": _Stage(
        heterogeneous_data,
        2.0,
        lambda data: {
            "learning_rate": 1 / (3 * data.convexity),
            "schedule": "shifted",
            "shift": 3.0,
        },
    ),
}
_Setting = frozenset[tuple[str, Any]]
_OF_WEIGHTING = ("alpha", "predictable", "gradient_bound")
_OF_STRATEGY = ("encoding", "model_bound")
_OF_POINT = {
    *("data", "round", "noise", "epsilon", "straggler_rate", "assumed_rate", "silent"),
    *_OF_WEIGHTING,
    *_OF_STRATEGY,
}


def acfl_losses(points: Sequence[Point], seed: int) -> list[float]:
    """Return the training losses f(W) of simulations of ACFL and its rivals, for one seed.

    The rivals of section 5 are: NA ``alpha=0.5``; uncoded and rescaled ``alpha=0``; coded only
    ``alpha=1``; stragglers ignored ``alpha=0, assumed_rate=0``; everybody answers ``alpha=0,
    straggler_rate=0``; SCFL ``alpha=0.5, encoding="scfl"``.

    Parameters
    ----------
    points : Sequence of Mapping
        ``data``: ``paper`` or ``heterogeneous``; ``round``, after which the loss is taken;
        ``noise``, the variance of all noise, or ``epsilon``, the nats of an upload that it is
        calibrated to; without both there is none. ``straggler_rate``, with which a device misses a
        round (0.2); ``assumed_rate``, what the server takes for it (the same); ``silent``, how many
        devices never answer (0). The rest are those of `flwr_privacy.strategies.ACFL`: ``alpha``,
        ``predictable``, ``gradient_bound``, ``model_bound`` and ``encoding``.
    seed : int
        Root of data, stragglers and noise; all points share them.

    Raises
    ------
    InvalidParameterError
        If a key is unknown or a value is not allowed.
    """
    return _simulated(points, seed, lambda curve, t: curve.losses[t])


def acfl_excess(points: Sequence[Point], seed: int) -> list[float]:
    """Return what `acfl_losses` returns less the least loss, f(W) - f(W*)."""
    return _simulated(points, seed, lambda curve, t: curve.excess[t])


def _simulated(
    points: Sequence[Point], seed: int, of: Callable[[ACFLTrainingCurve, int], float]
) -> list[float]:
    """Train each setting once, up to the last round that is read, and read the points off."""
    rounds: dict[_Setting, int] = {}
    for point in points:
        for key in point:
            check_choice("setting", key, _OF_POINT)
        check_choice("data", point["data"], _STAGES)
        setting = _setting(point)
        rounds[setting] = max(rounds.get(setting, 1), int(point["round"]))
    data_sets = {name: _STAGES[name].data(seed) for name in {point["data"] for point in points}}
    curves = {}
    for setting, last in rounds.items():
        point = dict(setting)
        data = data_sets[point["data"]]
        curves[setting] = _training(point, data, seed).simulate(data, rounds=last)
    return [float(of(curves[_setting(point)], int(point["round"]))) for point in points]


def _setting(point: Point) -> _Setting:
    """Return what of a point is about the training, not about where its curve is read."""
    return frozenset((key, value) for key, value in point.items() if key != "round")


def _training(point: Point, data: ACFLSyntheticData, seed: int) -> SimulatedACFL:
    """Return the strategy of a point, with its stragglers."""
    stage, rate = _STAGES[point["data"]], point.get("straggler_rate", 0.2)
    s, projected = point.get("noise"), point.get("encoding") == SCFL
    privacy: NoisedSetup | SetupVariances | Exact = Exact()
    if "epsilon" in point:
        if s is not None:
            raise InvalidParameterError("noise", s, "no noise beside epsilon, which it follows")
        privacy = NoisedSetup(mi_epsilon=point["epsilon"])
    elif s:
        privacy = SetupVariances(sigma1_sq=s, sigma2_sq=None if projected else s)
    return SimulatedACFL(
        privacy=privacy,
        weighting=Weighting(
            straggler_rate=point.get("assumed_rate", rate),
            **{key: point[key] for key in _OF_WEIGHTING if key in point},
        ),
        data=DataBounds(label_bound=stage.label_bound, max_records=data.features.shape[1]),
        **stage.steps(data),
        **{key: point[key] for key in _OF_STRATEGY if key in point},
        **of_seed(seed, rate=rate, silent=point.get("silent", 0)),
    )


@dataclass(frozen=True, kw_only=True)
class Function:
    """A function that an experiment draws.

    Parameters
    ----------
    measures : Mapping of str to str
        What it has for a point, by the names that claims use, with the names in the figure. Of
        ``value``, ``accuracy``, ``steps``, ``secure`` and ``insecure`` more is better, of the
        others less.
    of : callable
        From points, a seed and the folder with data sets to their values; all points at once, since
        some share a simulation.
    seeded : bool, default False
        Whether a seed makes a difference. The others are computed once.
    check : callable, optional
        Refuses a point whose settings are not allowed, before data is read.
    note : callable, optional
        From a point to what is to stand beside its values, as a privacy level that is not that of
        its settings.
    failed : str, default "diverged"
        What it means that a value is not finite.
    """

    measures: Mapping[str, str]
    of: Callable[[Sequence[Point], int, Path | None], Sequence[Values]]
    seeded: bool = False
    check: Callable[[Point], object] | None = None
    note: Callable[[Point], str] | None = None
    failed: str = "diverged"


def _formula(label: str, of: Callable[[Point], float]) -> Function:
    return Function(
        measures={"value": label},
        of=lambda points, seed, data_root: [{"value": of(point)} for point in points],
    )


def _losses(label: str, of: Callable[[Sequence[Point], int], Sequence[float]]) -> Function:
    return Function(
        measures={"loss": label},
        of=lambda points, seed, data_root: [{"loss": value} for value in of(points, seed)],
        seeded=True,
    )


def _kept(
    of: Callable[[Sequence[Point], int, Path | None], Sequence[Values]], *names: str
) -> Callable[[Sequence[Point], int, Path | None], Sequence[Values]]:
    """Return a function that has some of the measures of another."""
    return lambda points, seed, data_root: [
        {name: values[name] for name in names} for values in of(points, seed, data_root)
    ]


FUNCTIONS = {
    "udp-moment": _formula("ln D10", moment),
    "udp-learned-digits": Function(
        measures={"value": "likeness of the model's pictures to the digits"},
        of=learned_digits.likenesses,
        seeded=True,
        check=learned_digits.check,
    ),
    "acfl-bound": _formula("bound of the squared distance from W*", acfl_bound),
    "acfl-loss": _losses("training loss f(W)", acfl_losses),
    "acfl-excess": _losses("excess training loss f(W) - f(W*)", acfl_excess),
    "mspdq-inversion": Function(
        measures={"value": "mean squared error of the image that is found"},
        of=inversion.errors,
        seeded=True,
        check=inversion.check,
    ),
    "central-dp": Function(
        measures={"accuracy": "accuracy on test records", "loss": "loss on test records"},
        of=central.accuracies,
        seeded=True,
        check=central.check,
    ),
    "m2fdp": Function(
        measures={
            "accuracy": "accuracy on test records",
            "jitter": "change of the accuracy per round",
        },
        of=tiers.accuracies,
        seeded=True,
        check=tiers.check,
        note=tiers.privacy,
    ),
    "m2fdp-cost": Function(
        measures={"energy": "energy until then, J", "delay": "delay until then, s"},
        of=tiers.costs,
        seeded=True,
        check=tiers.check,
        note=tiers.privacy,
        failed="not reached",
    ),
    "m2fdp-control": Function(
        measures={
            "steps": "local steps K, mean",
            "secure": "devices of a secure node",
            "insecure": "devices of an insecure node",
        },
        of=lambda points, seed, data_root: [tiers.choices(point) for point in points],
    ),
    "fedvs": Function(
        measures={"accuracy": "accuracy on test rows"},
        of=_kept(vertical.curves, "accuracy"),
        seeded=True,
        check=vertical.check,
    ),
    "fedvs-binary": Function(
        measures={
            "accuracy": "accuracy on test rows",
            "value": "area under the ROC curve",
        },
        of=_kept(vertical.curves, "accuracy", "value"),
        seeded=True,
        check=vertical.check,
    ),
    "fedvs-networks": Function(
        measures={"accuracy": "accuracy on test records"},
        of=client_networks.accuracies,
        seeded=True,
        check=client_networks.check,
    ),
    "fedvs-epoch": Function(
        measures={"delay": "virtual seconds of an epoch, expected"},
        of=lambda points, seed, data_root: [{"delay": vertical.epochs(p)} for p in points],
    ),
    "fedvs-bytes": _formula("bytes of a client", vertical.costs),
    "fedvs-products": _formula("multiplications of a client", vertical.costs),
}
