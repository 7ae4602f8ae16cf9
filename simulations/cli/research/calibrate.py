"""The commands `calibrate` and `best-rounds`: how much noise, and how long to train."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any

import typer
from click.core import ParameterSource

from flwr_privacy.errors import InvalidParameterError, check_choice, check_number
from flwr_privacy.simulations.cli.run_options import Assignments
from flwr_privacy.simulations.runner.complete_settings import DEFAULT_CLIENTS, settings_of
from flwr_privacy.simulations.settings.run_settings import parse_assignments

if TYPE_CHECKING:
    from flwr_privacy.evaluation import PrivateEvaluation

__all__ = ["best_rounds", "calibrate"]


def calibrate(
    context: typer.Context,
    epsilon: Annotated[float, typer.Option(help="Budget of a client over all rounds.")],
    unit: Annotated[
        str | None,
        typer.Option(
            help="What is protected: record, user or dp-sgd (a record, by noise in every step); "
            "for m2fdp record or device."
        ),
    ] = None,
    scheme: Annotated[
        str,
        typer.Argument(
            help="Scheme: udp (default), central-dp, acfl, m2fdp, m2fdp-hfl-dp, m2fdp-pedpfl; or a "
            "paper's rival: mspdq-ldp (NbAFL), acfl-scfl (SCFL, whose epsilon is in nats)."
        ),
    ] = "udp",
    delta: Annotated[float, typer.Option(help="Delta of the budget.")] = 1e-5,
    rounds: Annotated[int, typer.Option(help="Learning rounds.")] = 60,
    fraction: Annotated[
        float, typer.Option(help="Fraction of the clients that are asked in a round.")
    ] = 1.0,
    clipping_norm: Annotated[
        float, typer.Option(help="Bound of a record's gradient, or of the update.")
    ] = 1.0,
    learning_rate: Annotated[float, typer.Option(help="Step size, at record level.")] = 1.0,
    records: Annotated[int, typer.Option(help="Records of a client, at record level.")] = 800,
    sampling_rate: Annotated[
        float, typer.Option(help="Share of the records in a round, drawn in secret.")
    ] = 1.0,
    size: Annotated[
        int, typer.Option(help="Weights of a model (mspdq-ldp); features (acfl-scfl).")
    ] = 200,
    clients: Annotated[
        int, typer.Option(help="Clients of the federation (not for udp and rivals).")
    ] = DEFAULT_CLIENTS,
    assignments: Assignments = None,
) -> None:
    """Show the noise for a budget under each formula, and what that noise truly gives."""
    from flwr_privacy.simulations.calibration import rival_noise

    check_choice("scheme", scheme, ("udp", *_PLANNED, *rival_noise.RIVALS))
    private_steps = scheme == "udp" and unit == "dp-sgd"
    if scheme in _PLANNED or private_steps:
        sampled = {"sampling_rate": sampling_rate, "clipping_norm": clipping_norm}
        needed = sampled if private_steps else _PLANNED[scheme]
        case = f"{scheme}, unit {unit}" if private_steps else scheme
        used = ("rounds", "fraction", "clients", "assignments", *(sampled if private_steps else ()))
        _check_used(context, case, used)
        chosen = {
            **needed,
            **{"scheme": scheme, "clients": clients, "rounds": rounds, "unit": unit},
            **{"epsilon": epsilon, "delta": delta},
            **{"per_round": _asked(fraction, clients), **parse_assignments(assignments or [])},
        }
        given = {key: value for key, value in chosen.items() if value is not None}
        return typer.echo(_noise_of_a_run(given))
    if scheme != "udp":
        rival_noise.check_unit(unit)
        _check_used(context, scheme, rival_noise.RIVALS[scheme])
    if scheme == "mspdq-ldp":
        text = rival_noise.nbafl(
            epsilon=epsilon,
            delta=delta,
            rounds=rounds,
            clipping_norm=clipping_norm,
            records=records,
            size=size,
        )
        return typer.echo(text)
    if scheme == "acfl-scfl":
        text = rival_noise.scfl(epsilon=epsilon, delta=delta, features=size, norm=clipping_norm)
        return typer.echo(text)
    from flwr_privacy.simulations.calibration.formulas import calibrate as formulas
    from flwr_privacy.simulations.calibration.formulas import legend, table
    from flwr_privacy.simulations.calibration.run_noise import run_plan
    from flwr_privacy.udp import RecordLevel, UserLevel, sensitivity

    unit = check_choice("unit", unit, _USED)
    _check_used(context, f"udp, unit {unit}", (*_USED[unit], "assignments"))
    evaluation, evaluating = _evaluation_of(unit, parse_assignments(assignments or []))
    bound = sensitivity(
        unit,
        clipping_norm=clipping_norm,
        learning_rate=learning_rate,
        records=records,
        sampling_rate=sampling_rate,
    )
    budget: dict[str, Any] = {"epsilon": epsilon, "delta": delta, "clipping_norm": clipping_norm}
    own: dict[str, Any] = {"learning_rate": learning_rate, "sampling_rate": sampling_rate}
    plan = run_plan(
        RecordLevel(**budget, **own) if unit == "record" else UserLevel(**budget),
        evaluation,
        rounds=rounds,
        q=fraction,
        evaluation_q=evaluating,
    )
    rows = table(
        formulas(
            epsilon=epsilon,
            delta=delta,
            rounds=rounds,
            q=fraction,
            sampling_rate=sampling_rate,
            sensitivity=bound,
        )
    )
    typer.echo(
        f"budget: epsilon {epsilon:g} at delta {delta:g} over {rounds} rounds; unit: {unit}; "
        f"sensitivity of a release: {bound:.4g}"
    )
    typer.echo(rows)
    typer.echo(legend(rounds, fraction, sampling_rate=sampling_rate))
    noise = plan.terms([], {}, honest=1)[0].noise_multiplier
    aside = "is for noise on a grid"
    typer.echo(
        f"A run with noise=gdp_fixed: noise multiplier {noise:.6g}. Its clients take turns, and so "
        f"in {plan.schedule('').releases} rounds at most; the table is for cohorts drawn at random."
    )
    if evaluation is not None:
        asked = plan.evaluation_terms()
        typer.echo(
            f"An evaluation: noise multiplier {asked.noise_multiplier:.6g}, of each count "
            f"{asked.sigma():.5g}; {plan.evaluations} at most."
        )
        aside = f"is for noise on a grid, and a share of {evaluation.share:g} for evaluations"
    typer.echo(f"A part of epsilon {aside}.")


def _evaluation_of(unit: str, given: Mapping[str, Any]) -> tuple["PrivateEvaluation | None", float]:
    """Return the private evaluation that the settings of a run of UDP name, and who is asked.

    Raises
    ------
    InvalidParameterError
        If another setting is given, or a value is not allowed.
    """
    from flwr_privacy.evaluation import PrivateEvaluation
    from flwr_privacy.simulations.settings.flat_options import keywords_of
    from flwr_privacy.strategies import UDP

    own_keys = (f.name for f in fields(PrivateEvaluation) if f.name != "accuracy")
    known = ("evaluation", *own_keys, "fraction_evaluate")
    for key, value in given.items():
        if key not in known or "evaluation" not in given:
            allowed = f"nothing for udp, which takes evaluation=private and {', '.join(known[1:])}"
            options = {name: f"--{name.replace('_', '-')}" for name in (*_ALWAYS, *_USED[unit])}
            if key not in known:
                close = get_close_matches(key, [*known, *options], n=1)
                allowed += "".join(f" (nearest: {options.get(name, name)})" for name in close)
            raise InvalidParameterError(key, value, allowed)
    own = {key: value for key, value in given.items() if key != "fraction_evaluate"}
    asked = given.get("fraction_evaluate", 1.0)
    check_number("fraction_evaluate", asked, minimum=math.ulp(0.0), maximum=1)
    level = {"learning_rate": 1.0} if unit == "record" else {}
    evaluation = keywords_of(UDP, {"unit": unit, **level, **own}).get("evaluation")
    return evaluation, float(asked)


def _asked(fraction: float, clients: int) -> int | None:
    """Return how many clients a fraction is; None for all of them."""
    check_number("fraction", fraction, minimum=math.ulp(0.0), maximum=1)
    return None if fraction == 1 else max(1, round(fraction * clients))


def _noise_of_a_run(values: dict[str, Any]) -> str:
    from flwr_privacy.simulations.calibration.run_noise import report

    if values["scheme"] in ("central-dp", "acfl") and "unit" in values:
        protected = {"central-dp": "user", "acfl": "record"}[values["scheme"]]
        check_choice("unit", values.pop("unit"), (protected,))
    return report(settings_of(values, say=lambda line: None))


_PLANNED: dict[str, dict[str, Any]] = {
    "central-dp": {},
    "m2fdp": {},
    "m2fdp-hfl-dp": {},
    "m2fdp-pedpfl": {},
    "acfl": {"task": "digits-rff"},
}
"""The schemes whose noise is that of a run with the same settings, and what they need besides."""

_ALWAYS = ("scheme", "unit", "epsilon", "delta")
_AT_USER_LEVEL = ("rounds", "fraction", "clipping_norm")
_USED = {
    "record": (*_AT_USER_LEVEL, "learning_rate", "records", "sampling_rate"),
    "user": _AT_USER_LEVEL,
}


def _check_used(context: typer.Context, case: str, used: Iterable[str]) -> None:
    for name, value in context.params.items():
        given = context.get_parameter_source(name) is not ParameterSource.DEFAULT
        if given and name not in (*_ALWAYS, *used):
            raise InvalidParameterError(name, value, f"nothing: it has no effect for {case}")


def best_rounds(
    epsilon: Annotated[float, typer.Option(help="Budget of a client over all rounds.")],
    unit: Annotated[str, typer.Option(help="What is protected: record or user.")],
    loss: Annotated[
        float, typer.Option(help="Loss of the first model above the least one, Theta.")
    ],
    convexity: Annotated[
        float, typer.Option(help="mu of the Polyak-Lojasiewicz condition, at most the smoothness.")
    ],
    parameters: Annotated[int, typer.Option(help="Number of weights of the model, d.")],
    scheme: Annotated[str, typer.Argument(help="Scheme: udp (default).")] = "udp",
    smoothness: Annotated[float, typer.Option(help="Smoothness of the loss, Lc.")] = 1.0,
    delta: Annotated[float, typer.Option(help="Delta of the budget.")] = 1e-5,
    clients: Annotated[int, typer.Option(help="Number of clients, U.")] = 50,
    per_round: Annotated[
        int | None, typer.Option(help="Clients of a round, K; by default all.")
    ] = None,
    difference: Annotated[
        float, typer.Option(help="Mean square by which the clients' gradients differ.")
    ] = 0.0,
    clipping_norm: Annotated[
        float, typer.Option(help="Bound of a record's gradient, or of the update.")
    ] = 1.0,
    learning_rate: Annotated[
        float, typer.Option(help="Step size, at most one over the smoothness.")
    ] = 1.0,
    records: Annotated[int, typer.Option(help="Records of a client, at record level.")] = 800,
) -> None:
    """Search for the number of rounds after which UDP's loss is least, by the paper's bounds."""
    check_choice("scheme", scheme, ("udp",))
    from flwr_privacy.simulations.research.udp.best_rounds import best_rounds as search
    from flwr_privacy.simulations.research.udp.theory import PLProblem
    from flwr_privacy.udp import sensitivity

    bound = sensitivity(
        unit,
        clipping_norm=clipping_norm,
        learning_rate=learning_rate,
        records=records,
        sampling_rate=1.0,
    )
    problem = PLProblem(
        Theta=loss,
        mu=convexity,
        Lc=smoothness,
        eta=learning_rate,
        U=clients,
        K=clients if per_round is None else per_round,
        epsilon=epsilon,
        delta=delta,
        Dl=bound,
        epsd=difference,
        d=parameters,
    )
    for line in search(problem, epsilon=epsilon, delta=delta):
        typer.echo(line)
