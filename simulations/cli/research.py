"""The commands of research: `calibrate`, `attack`, `experiment`, `replication`, `reliability`."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from click.core import ParameterSource

from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer, check_number
from flwr_privacy.simulations.runner.jobs import DEFAULT_CLIENTS, Engine
from flwr_privacy.simulations.settings.run_settings import parse_assignments

from .operator_options import check_can_write
from .run_options import Assignments, DataRoot, settings_of

if TYPE_CHECKING:
    from flwr_privacy.evaluation import PrivateEvaluation

__all__ = ["attack", "best_rounds", "calibrate", "experiment", "reliability", "replication"]


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
    from flwr_privacy.simulations.calibration.udp_run import run_plan
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


def attack(
    scheme: Annotated[
        str,
        typer.Argument(
            help="What to attack: secure-sum, mspdq, udp, acfl, m2fdp, fedvs; or audit; or "
            "canaries in a language model."
        ),
    ],
    task: Annotated[
        str | None,
        typer.Option(
            help="Task of secure-sum and m2fdp: digits-linear (default), digits-mlp, mnist-mlp; of "
            "mspdq: digits-lenet (default), mnist-lenet; of udp: digits-mlp (default), "
            "digits-linear; of acfl: digits-pixels, digits-rff (default: both); of fedvs: digits; "
            "of audit: one scheme; of canaries: one method."
        ),
    ] = None,
    clients: Annotated[
        int | None,
        typer.Option(
            help="Clients; by default 20, of mspdq 6, of udp 2, of acfl, m2fdp 5, of fedvs 16, of "
            "an audit's crowd 150, with canaries 100."
        ),
    ] = None,
    records: Annotated[
        int | None,
        typer.Option(
            help="Records of each client; by default 1, of udp 50, of acfl 20; of fedvs 32 rows "
            "that all share; with canaries 24 sentences."
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Root of all random draws except those of the schemes.")
    ] = 0,
    seeds: Annotated[
        int, typer.Option(help="How many seeds from there on; of several, numbers are ranges.")
    ] = 1,
    data_root: DataRoot = None,
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("runs/attack"),
) -> None:
    """Attack a scheme: show which records a server recovers, or audit the noise of all schemes."""
    from rich.console import Console

    from flwr_privacy.simulations.research.attack import ATTACKS, ONE_SEED
    from flwr_privacy.simulations.research.attacks.over_seeds import over_seeds
    from flwr_privacy.simulations.research.attacks.setup import AttackOptions

    attack = ATTACKS[check_choice("scheme", scheme, ATTACKS)]
    if check_integer("seeds", seeds, minimum=1) != 1 and scheme in ONE_SEED:
        allowed = f"1 for {scheme}: the error of its verdicts is controlled over one report"
        raise InvalidParameterError("seeds", seeds, allowed)
    options = AttackOptions(
        task=task,
        clients=clients,
        records=records,
        seed=seed,
        data_root=data_root,
        out=out,
    )
    report = over_seeds(attack, options, seeds=seeds)
    console = Console()
    for table in report.tables:
        console.print(table)
    typer.echo(report.legend)
    for picture in report.pictures:
        typer.echo(f"picture: {picture}")
    typer.echo(report.verdict)


def experiment(
    name: Annotated[str | None, typer.Argument(help="<scheme>/<figure>; see --list.")] = None,
    show: Annotated[bool, typer.Option("--list", help="List the experiments.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="The paper's size; by default scaled down.")
    ] = False,
    engine: Annotated[str, typer.Option(help="inline (this process, default) or ray.")] = "inline",
    jobs: Annotated[
        int | None, typer.Option(help="Runs at a time; by default 2 inline, 1 on Ray.")
    ] = None,
    data_root: DataRoot = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for runs and results; by default one in runs/experiments/."),
    ] = None,
    seeds: Annotated[
        str, typer.Option(help="Seeds; a verdict takes three. Finished runs are kept.")
    ] = "0,1,2",
) -> None:
    """Train the curves of a paper's figure, draw them, and check the paper's claims."""
    from flwr_privacy.simulations.research.experiments import description as experiments

    if name is None or show:
        for known in experiments.names():
            typer.echo(f"{known:24} {experiments.experiment(known).title}")
        return
    from rich.console import Console

    from flwr_privacy.simulations.research.experiments.results import ExperimentResults, save
    from flwr_privacy.simulations.research.experiments.runs import train
    from flwr_privacy.simulations.research.experiments.tables import tables

    chosen = experiments.experiment(name)
    folder = out or Path("runs/experiments", f"{name}-full" if full else name)
    numbers, where = experiments.read_seeds(seeds), Engine(name=engine)
    check_can_write(folder, folder=True)
    runs = train(
        chosen,
        folder,
        seeds=numbers,
        engine=where,
        jobs=(2 if engine == "inline" else 1) if jobs is None else jobs,
        full=full,
        data_root=data_root,
    )
    results = ExperimentResults(experiment=chosen, full=full, runs=runs)
    picture, written = save(results, folder)
    for table in tables(results):
        Console().print(table)
    typer.echo(f"picture: {picture}\nnumbers: {written}")


def replication(
    runs: Annotated[Path, typer.Option(help="Folder with the results of experiments.")] = Path(
        "runs/experiments"
    ),
    out: Annotated[Path, typer.Option(help="The page.")] = Path("docs/replication.md"),
) -> None:
    """Write the verdicts of all experiments that were run to one page.

    An existing page keeps its entries for experiments that have no results in the folder.
    """
    from flwr_privacy.simulations.research.experiments.replication import replication as page
    from flwr_privacy.wire.files import write_text

    check_can_write(out)
    text = page(runs, out.read_text(encoding="utf-8") if out.is_file() else "")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, text)
    typer.echo(f"page: {out}")


def reliability(
    scheme: Annotated[
        list[str] | None,
        typer.Option(help="Scheme, as often as needed; by default all schemes of the matrix."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The page.")] = Path("docs/reliability.md"),
    rounds: Annotated[
        int | None,
        typer.Option(
            help="Rounds, at least 20, of a training with random faults, in place of the tables."
        ),
    ] = None,
    outage: Annotated[
        bool,
        typer.Option(
            "--outage", help="Lose each exchange with all clients, in place of the tables."
        ),
    ] = False,
    pairs: Annotated[
        int | None,
        typer.Option(help="Trainings with two random faults, such as 60, in place of the tables."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Root of the random faults.")] = 1,
) -> None:
    """Inject every fault in every phase of the schemes, whole outages, or random faults.

    An existing page keeps its entries for schemes that are not asked for.
    """
    from flwr_privacy.simulations.reliability import page as pages
    from flwr_privacy.simulations.reliability.federations import FEDERATIONS
    from flwr_privacy.simulations.reliability.matrix import DEFECT, matrix
    from flwr_privacy.wire.files import write_text

    chosen = [check_choice("scheme", name, FEDERATIONS) for name in scheme or FEDERATIONS]
    asked = {"--rounds": rounds is not None, "--outage": outage, "--pairs": pairs is not None}
    given = [name for name, there in asked.items() if there]
    if len(given) > 1:
        raise InvalidParameterError("options", given, f"one of {', '.join(asked)}")
    check_can_write(out)
    section = ""
    found_of: Callable[[str], pages.Found] | None = None
    if rounds is not None:
        section, found_of = pages.LONG, partial(pages.long_run_of, rounds=rounds, seed=seed)
    elif outage:
        section, found_of = pages.OUTAGES, pages.outages_of
    elif pairs is not None:
        section, found_of = pages.PAIRS, partial(pages.pairs_of, count=pairs, seed=seed)
    if found_of is not None:
        wrong = pages.write_rows(section, chosen, found_of, out=out, say=typer.echo)
        typer.echo(f"page: {out}")
        for line in wrong:
            typer.echo(f"defect: {line}", err=True)
        if wrong:
            raise typer.Exit(1)
        return
    order = [federation.title for federation in FEDERATIONS.values()]
    matrices = {}
    for name in chosen:
        title = FEDERATIONS[name].title
        matrices[title] = matrix(FEDERATIONS[name])
        typer.echo(f"{title}\n{pages.table(matrices[title])}\n")
        # After each: the whole takes minutes, and somebody may have enough.
        earlier = out.read_text(encoding="utf-8") if out.exists() else ""
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, pages.page(matrices, order=order, earlier=earlier))
    typer.echo(f"page: {out}")
    cells = [(title, cell) for title, found in matrices.items() for cell in found]
    defects = [(title, cell) for title, cell in cells if cell.verdict == DEFECT]
    for title, cell in defects:
        typer.echo(f"defect: {title}, {cell.fault}, phase {cell.phase}: {cell.why}", err=True)
    if defects:
        raise typer.Exit(1)
