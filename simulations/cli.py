"""The command line: `flwr-privacy run`, `deploy`, `compare`, `demo`, `calibrate` and others."""

import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from flwr_privacy import __version__
from flwr_privacy.errors import EngineError, FlwrPrivacyError, InvalidParameterError, check_choice
from flwr_privacy.simulations.engines.placement import Machine, crowded
from flwr_privacy.simulations.engines.ray_engine import RayResources
from flwr_privacy.simulations.reports.tree_nodes import read_tree
from flwr_privacy.simulations.runner.jobs import (
    DEFAULT_CLIENTS,
    SEED_WARNING,
    Engine,
    carry_out,
    next_folder,
)
from flwr_privacy.simulations.runner.progress import planned_rounds
from flwr_privacy.simulations.settings.run_folder import RunFolder
from flwr_privacy.simulations.settings.run_settings import (
    Settings,
    parse_assignments,
    with_scheme_parameters,
)

from .demo import ABOUT, TITLE, demo_settings

__all__ = ["main"]

app = typer.Typer(
    help="Federated learning schemes for Flower: train, compare and check them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

SETTING = "Setting"
ENGINE = "Engine"

EXIT_CODES = """Exit codes: 0 done, 2 wrong parameter, 3 data missing or damaged, 4 the engine or
the app failed, 5 checkpoint unfit, 6 the two ends disagree, 7 ledger unfit, 8 declined,
130 interrupted."""


def main() -> None:
    """Run the command line; a mistake of the user prints one line and sets the exit code."""
    try:
        app(prog_name="flwr-privacy")
    except FlwrPrivacyError as error:
        typer.echo(f"error: {error}", err=True)
        for note in getattr(error, "__notes__", ()):
            typer.echo(note, err=True)
        sys.exit(error.exit_code)


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Federated learning schemes for Flower: train, compare and check them."""
    if show:
        typer.echo(__version__)
        raise typer.Exit


@app.command(epilog=EXIT_CODES)
def run(
    scheme: Annotated[
        str | None,
        typer.Option(
            help="Scheme: fedavg (default), udp, msp, mspdq, central-dp, acfl, m2fdp, fedvs or a "
            "baseline."
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="Task: digits-mlp (default), digits-linear, mnist-mlp, mnist-cnn, fashion-cnn, "
            "cifar10-cnn, adult-linear, digits-svm, fashion-svm; for acfl digits-rff, mnist-rff or "
            "fashion-rff; for fedvs digits-rows, fashion-rows, mfeat-views, credit, parkinsons or "
            "breast-cancer."
        ),
    ] = None,
    clients: Annotated[
        int | None,
        typer.Option(
            help="Clients of the federation; by default 20, for fedvs as many as suit the task."
        ),
    ] = None,
    per_round: Annotated[
        int | None, typer.Option(help="Clients asked in each round; by default all.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Learning rounds; by default 10.")] = None,
    partition: Annotated[
        str | None,
        typer.Option(help="Split of the data: iid (default), dirichlet, shards or labels."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Root of all seeds; by default 0.")] = None,
    data_root: Annotated[
        Path | None, typer.Option(help="Folder with the data sets that have to be downloaded.")
    ] = None,
    download: Annotated[
        bool, typer.Option("--download", help="Download the missing data sets into the data root.")
    ] = False,
    engine: Annotated[
        str | None,
        typer.Option(help="ray (Flower's simulation engine, default) or inline (this process)."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Nodes that run the clients between them; by default one per client."),
    ] = None,
    stack: Annotated[
        str | None,
        typer.Option(
            help="Whether a worker trains its clients together: no (default), yes or auto (where "
            "it is measured to be faster). Equal up to rounding."
        ),
    ] = None,
    cpus_per_client: Annotated[
        float, typer.Option(help="CPUs that Ray reserves per node: a whole number.")
    ] = 1,
    gpus_per_client: Annotated[
        float, typer.Option(help="GPU share that Ray reserves per node; fractions are fine.")
    ] = 0.0,
    ray_address: Annotated[
        str | None, typer.Option(help="host:port of a running Ray cluster.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port of the SuperLink for Ray; by default a free one.")
    ] = None,
    test_seed: Annotated[
        int | None,
        typer.Option(help="Seed of the clients' noise, for tests: NOTHING IS PROTECTED."),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any other setting, as often as needed: training.learning_rate=0.05, "
            "partition.alpha=0.1, stragglers.slow_fraction=0.2; and the scheme's own: unit=record "
            "or strategy.unit=record.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; by default a new one in runs/.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Resume the run in this folder from its checkpoint.")
    ] = None,
) -> None:
    """Train a scheme on a task and keep everything in a run folder."""
    chosen: dict[str, Any] = {
        "scheme": scheme,
        "task": task,
        "clients": clients,
        "per_round": per_round,
        "rounds": rounds,
        "partition.kind": partition,
        "seed": seed,
        "data_root": None if data_root is None else str(data_root.resolve()),
    }
    values = {key: value for key, value in chosen.items() if value is not None}
    values |= parse_assignments(assignments or [])
    resources = RayResources(
        cpus_per_client=_whole(cpus_per_client),
        gpus_per_client=gpus_per_client,
        ray_address=ray_address,
    )
    where = Engine(
        name=engine or "ray",
        workers=workers,
        resources=resources,
        port=port,
        test_seed=test_seed,
        stack=stack,
    )
    if resume is not None:
        if values or any(x is not None for x in (out, workers, test_seed)):
            raise InvalidParameterError(
                "--resume", str(resume), "no other setting beside it: a run keeps its own"
            )
        folder = RunFolder.open(resume)
        if folder.summary["status"] == "completed":
            typer.echo(f"run: {folder.path} is complete")
            return
        if folder.summary["engine"] == "deployed":
            allowed = "a simulation; for a run that was deployed: flwr-privacy deploy --resume"
            raise InvalidParameterError("--resume", str(resume), allowed)
        where = replace(where, **_engine_of(folder, engine))
        where.nodes(folder.settings)
    else:
        settings = _settings(values, download=download)
        path = next_folder(Path("runs"), settings) if out is None else out
        folder = RunFolder.create(
            path,
            settings,
            engine=where.name,
            nodes=where.nodes(settings),
            test_seed=test_seed,
        )
    if where.test_seed is not None:
        typer.echo(SEED_WARNING, err=True)
    if where.workers and (warning := crowded(where.workers, Machine.here(gpus=False))):
        typer.echo(warning, err=True)
    try:
        with folder.alone():
            if resume is not None:
                folder.reopen()
            carry_out([folder], where, resume=resume is not None)
    except KeyboardInterrupt:
        typer.echo(f"interrupted; to go on: flwr-privacy run --resume {folder.path}", err=True)
        raise
    if plans := planned_rounds(folder.rounds()):
        typer.echo(f"rounds planned: {plans}")
    if (tree := read_tree(folder.path / "tree.json")) is not None:
        from flwr_privacy.simulations.reports.tree_picture import write_picture

        write_picture(tree, folder.path / "tree.png")
        typer.echo(f"tree: {folder.path / 'tree.png'}")
    typer.echo(f"run: {folder.path}")


@app.command(epilog=EXIT_CODES)
def deploy(
    nodes: Annotated[
        int | None, typer.Option(help="Clients, at least 2, each with a SuperNode of its own.")
    ] = None,
    scheme: Annotated[
        str | None, typer.Option(help="Scheme, as for `run`; fedavg by default.")
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="Task, as for `run`; digits-mlp by default.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Learning rounds; by default 10.")] = None,
    seed: Annotated[int | None, typer.Option(help="Root of all seeds; by default 0.")] = None,
    data_root: Annotated[
        Path | None, typer.Option(help="Folder with the data sets that have to be downloaded.")
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any other setting, as for `run`."),
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option(help="TOML file with the policy of every node; by default none."),
    ] = None,
    test_seed: Annotated[
        int | None,
        typer.Option(help="Seed of the nodes' noise, for tests: NOTHING IS PROTECTED."),
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port of the SuperLink; by default a free one.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds after which the run is stopped; by default never.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; by default a new one in runs/.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Resume the deployed run in this folder.")
    ] = None,
) -> None:
    """Train on a SuperLink and SuperNodes of this machine, with TLS and keys of their own."""
    from flwr_privacy.simulations.deployment import deploy as deployed
    from flwr_privacy.simulations.deployment.nodes import check_policy, members_of

    chosen: dict[str, Any] = {
        "scheme": scheme,
        "task": task,
        "rounds": rounds,
        "seed": seed,
        "data_root": None if data_root is None else str(data_root.resolve()),
    }
    values = {key: value for key, value in chosen.items() if value is not None}
    values |= parse_assignments(assignments or [])
    if resume is not None:
        if values or any(x is not None for x in (nodes, policy, test_seed, out)):
            allowed = "no other setting beside it but port and timeout: a run keeps its own"
            raise InvalidParameterError("--resume", str(resume), allowed)
        folder, nodes, test_seed = deployed.reopened(resume)
    if nodes is None:
        raise InvalidParameterError("--nodes", None, "the number of clients")
    options = deployed.DeployOptions(
        nodes=nodes, policy=policy, test_seed=test_seed, port=port, timeout=timeout
    )
    if resume is None:
        settings = _settings(options.settings_of(values), download=False)
        members = members_of(settings, nodes)
        if policy is not None:
            check_policy(policy, members)
        path = next_folder(Path("runs"), settings) if out is None else out
        folder = RunFolder.create(
            path, settings, engine="deployed", nodes=len(members), test_seed=test_seed
        )
    else:
        members = members_of(folder.settings, nodes)
    if test_seed is not None:
        typer.echo(SEED_WARNING, err=True)
    on = f"to go on: flwr-privacy deploy --resume {folder.path}"
    with folder.alone():
        if resume is not None:
            folder.reopen()
        try:
            deployed.deploy(folder, members, options, say=typer.echo, resume=resume is not None)
        except KeyboardInterrupt:
            typer.echo(f"interrupted; all that was started is stopped\n{on}", err=True)
            raise
        except EngineError as error:
            if InvalidParameterError.__name__ not in str(error):  # a setting, which a run keeps
                error.add_note(on)
            raise
    for line in deployed.what_happened(folder):
        typer.echo(line)
    typer.echo(f"run: {folder.path}")


@app.command(epilog=EXIT_CODES)
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders of the runs.")],
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("runs/report"),
) -> None:
    """Draw runs side by side in one HTML report, with the numbers as JSON beside it."""
    from flwr_privacy.simulations.reports.report import write_report

    typer.echo(f"report: {write_report([RunFolder.open(run) for run in runs], out)}")


@app.command(epilog=EXIT_CODES)
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the runs and the report.")] = Path(
        "runs/demo"
    ),
    engine: Annotated[str, typer.Option(help="ray or inline.")] = "ray",
) -> None:
    """Train on real data, with and without privacy, and report what privacy costs."""
    from flwr_privacy.simulations.reports.report import write_report

    where = Engine(name=engine)
    parent = out
    number = 2
    while parent.exists():
        parent, number = out.with_name(f"{out.name}-{number}"), number + 1
    folders = [
        RunFolder.create(parent / name, settings, engine=engine, nodes=where.nodes(settings))
        for name, settings in demo_settings().items()
    ]
    with ExitStack() as stack:
        for folder in folders:
            stack.enter_context(folder.alone())
        carry_out(folders, where)
    typer.echo(f"report: {write_report(folders, parent, title=TITLE, about=ABOUT)}")


@app.command(epilog=EXIT_CODES)
def calibrate(
    epsilon: Annotated[float, typer.Option(help="Budget of a client over all rounds.")],
    unit: Annotated[str, typer.Option(help="What is protected: record or user.")],
    scheme: Annotated[str, typer.Argument(help="Scheme: udp (default).")] = "udp",
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
) -> None:
    """Show the noise for a budget under each formula, and what that noise truly gives."""
    check_choice("scheme", scheme, ("udp",))
    from flwr_privacy.udp import sensitivity

    from .calibrate import calibrate as formulas
    from .calibrate import legend, table

    bound = sensitivity(
        unit,
        clipping_norm=clipping_norm,
        learning_rate=learning_rate,
        records=records,
        sampling_rate=sampling_rate,
    )
    rows = formulas(
        epsilon=epsilon,
        delta=delta,
        rounds=rounds,
        q=fraction,
        sampling_rate=sampling_rate,
        sensitivity=bound,
    )
    typer.echo(
        f"budget: epsilon {epsilon:g} at delta {delta:g} over {rounds} rounds; unit: {unit}; "
        f"sensitivity of a release: {bound:.4g}"
    )
    typer.echo(table(rows))
    typer.echo(legend(rounds, fraction, sampling_rate=sampling_rate))


@app.command(epilog=EXIT_CODES)
def attack(
    scheme: Annotated[
        str, typer.Argument(help="What to attack: secure-sum, mspdq, udp, acfl, m2fdp, fedvs.")
    ],
    task: Annotated[
        str | None,
        typer.Option(
            help="Task of secure-sum and m2fdp: digits-linear (default), digits-mlp, mnist-mlp; of "
            "mspdq: digits-lenet (default), mnist-lenet; of udp: digits-mlp (default), "
            "digits-linear; of acfl: digits-pixels, digits-rff (default: both); of fedvs: digits."
        ),
    ] = None,
    clients: Annotated[
        int | None,
        typer.Option(
            help="Clients; by default 20, of mspdq 6, of udp 2, of acfl, m2fdp 5, of fedvs 16."
        ),
    ] = None,
    records: Annotated[
        int | None,
        typer.Option(
            help="Records of each client; by default 1, of udp 50, of acfl 20; of fedvs 32 rows "
            "that all share."
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Root of all random draws except those of the schemes.")
    ] = 0,
    data_root: Annotated[
        Path | None, typer.Option(help="Folder with the data sets that have to be downloaded.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("runs/attack"),
) -> None:
    """Attack a scheme: show which records a server recovers from a round or a training."""
    from rich.console import Console

    from flwr_privacy.simulations.research.attack import ATTACKS
    from flwr_privacy.simulations.research.attacks.setup import AttackOptions

    options = AttackOptions(
        task=task, clients=clients, records=records, seed=seed, data_root=data_root, out=out
    )
    report = ATTACKS[check_choice("scheme", scheme, ATTACKS)](options)
    console = Console()
    for table in report.tables:
        console.print(table)
    typer.echo(report.legend)
    for picture in report.pictures:
        typer.echo(f"picture: {picture}")
    typer.echo(report.verdict)


@app.command(epilog=EXIT_CODES)
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
    data_root: Annotated[
        Path | None, typer.Option(help="Folder with the data sets that have to be downloaded.")
    ] = None,
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

    from flwr_privacy.simulations.research.experiments.results import Results, save
    from flwr_privacy.simulations.research.experiments.runs import train
    from flwr_privacy.simulations.research.experiments.tables import tables

    chosen = experiments.experiment(name)
    folder = out or Path("runs/experiments", f"{name}-full" if full else name)
    runs = train(
        chosen,
        folder,
        seeds=experiments.read_seeds(seeds),
        engine=Engine(name=engine),
        jobs=jobs or (2 if engine == "inline" else 1),
        full=full,
        data_root=data_root,
    )
    results = Results(experiment=chosen, full=full, runs=runs)
    picture, numbers = save(results, folder)
    for table in tables(results):
        Console().print(table)
    typer.echo(f"picture: {picture}\nnumbers: {numbers}")


@app.command(epilog=EXIT_CODES)
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

    text = page(runs, out.read_text(encoding="utf-8") if out.is_file() else "")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, text)
    typer.echo(f"page: {out}")


@app.command(epilog=EXIT_CODES)
def verify(
    run: Annotated[Path, typer.Argument(help="Folder of a run, or a privacy card.")],
) -> None:
    """Recompute the epsilon of a run from its privacy card alone."""
    from flwr_privacy.privacy.card import PrivacyCard

    path = RunFolder(run).card_path if run.is_dir() else run
    if not path.is_file():
        raise InvalidParameterError("run", str(run), "the folder of a run with a privacy-card.json")
    card = PrivacyCard.from_json(path.read_bytes())
    numbers = card.verify()
    typer.echo(card.guarantee.text())
    for accountant, (stated, computed) in numbers.items():
        typer.echo(f"epsilon ({accountant}): stated {stated:.6g}, recomputed {computed:.6g}")
    clients = len(card.charges())
    typer.echo(f"answers: {card.answers()}")
    typer.echo(f"verified: {len(card.releases)} releases of {clients} clients")


@app.command(epilog=EXIT_CODES)
def ledger(
    path: Annotated[
        Path, typer.Argument(help="A node's <data set>.ledger, or the folder of its state.")
    ],
) -> None:
    """Print what a node's ledgers were charged for, and which charges were never answered."""
    from .ledgers import what_was_charged

    for line in what_was_charged(path):
        typer.echo(line)


@app.command(epilog=EXIT_CODES)
def key(
    path: Annotated[Path, typer.Argument(help="File for the private key; it must be new.")],
    client: Annotated[
        str | None, typer.Option(help="Identity of the client; by default the file's name.")
    ] = None,
) -> None:
    """Create a long-term key for a node; print the line with which the other nodes pin it."""
    from flwr_privacy.wire.identity import check_client_id
    from flwr_privacy.wire.pins import Identity

    name = check_client_id(client or path.stem)
    identity = Identity.generate()
    identity.write(path)
    typer.echo(f'"{name}" = "{identity.public}"')


@app.command(epilog=EXIT_CODES)
def doctor(
    data_root: Annotated[Path | None, typer.Option(help="Folder with data sets.")] = None,
    task: Annotated[
        str | None, typer.Option(help="Task for which to suggest a number of workers.")
    ] = None,
    clients: Annotated[int | None, typer.Option(help="Clients in a round of that task.")] = None,
) -> None:
    """Check this machine: versions, Ray, GPUs, ports in use, data, room for workers."""
    from .doctor import diagnose

    settings = None
    if task is not None or clients is not None:
        chosen = {"task": task, "clients": clients}
        settings = Settings().with_values({k: v for k, v in chosen.items() if v is not None})
    checks = diagnose(data_root, settings)
    for check in checks:
        typer.echo(f"{check.status:8} {check.name}: {check.detail}")
    if any(check.status == "error" for check in checks):
        raise typer.Exit(1)


@app.command(epilog=EXIT_CODES)
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
    seed: Annotated[int, typer.Option(help="Root of the random faults.")] = 1,
) -> None:
    """Inject every fault in every phase of the schemes, or random faults over many rounds.

    An existing page keeps its entries for schemes that are not asked for.
    """
    from flwr_privacy.simulations.reliability import page as pages
    from flwr_privacy.simulations.reliability.federations import FEDERATIONS
    from flwr_privacy.simulations.reliability.matrix import DEFECT, matrix
    from flwr_privacy.wire.files import write_text

    chosen = [check_choice("scheme", name, FEDERATIONS) for name in scheme or FEDERATIONS]
    if rounds is not None:
        wrong = pages.write_long_runs(chosen, rounds=rounds, seed=seed, out=out, say=typer.echo)
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
        write_text(out, pages.page(matrices, order=order, earlier=earlier))
    typer.echo(f"page: {out}")
    cells = [(title, cell) for title, found in matrices.items() for cell in found]
    defects = [(title, cell) for title, cell in cells if cell.verdict == DEFECT]
    for title, cell in defects:
        typer.echo(f"defect: {title}, {cell.fault}, phase {cell.phase}: {cell.why}", err=True)
    if defects:
        raise typer.Exit(1)


def _settings(values: dict[str, Any], *, download: bool) -> Settings:
    """Return the settings of a run; refuse at once what the app would refuse later."""
    # Imported late: torch takes seconds, which `--help` need not wait for.
    from flwr_privacy.simulations.app.server_app import build_strategy
    from flwr_privacy.simulations.settings import schemes
    from flwr_privacy.simulations.tasks.data import load
    from flwr_privacy.simulations.tasks.tasks import check_data, task_of
    from flwr_privacy.simulations.tasks.vertical_tasks import VerticalTask

    strategy = schemes.scheme(values.get("scheme", Settings.scheme)).strategy
    values = with_scheme_parameters(values, _own_parameters(strategy))
    settings = Settings(clients=DEFAULT_CLIENTS).with_values(values)
    chosen = task_of(settings)
    if isinstance(chosen, VerticalTask):
        usual = {"clients": chosen.clients, "rounds": chosen.rounds}
        settings = settings.with_values({k: v for k, v in usual.items() if k not in values})
    own = schemes.scheme(settings.scheme).usual(settings.strategy)
    settings = replace(settings, training=chosen.training, strategy=own).with_values(values)
    if download:  # first: some strategies are made from the data
        load(chosen.dataset, data_root=settings.data_root, download=True)
    build_strategy(settings, None)
    if settings.secure_sum is not None and settings.clients is not None:
        settings.secure_sum.colluders_of(settings.clients)  # no cohort has more
    if (found := check_data(settings)) is not None:
        typer.echo(f"data: {found}")
    return settings


def _own_parameters(strategy: Any) -> set[str]:
    """Return the parameters that a scheme has beyond those of every strategy."""
    from flwr_privacy.simulations.settings.flat_options import flat_keys
    from flwr_privacy.strategies import SchemeStrategy

    return set(flat_keys(strategy)).difference(flat_keys(SchemeStrategy))


def _engine_of(folder: RunFolder, engine: str | None) -> dict[str, Any]:
    """Return where a run was carried out, for its resume."""
    nodes = int(folder.summary["nodes"])
    clients = folder.settings.clients
    cohorts = clients is not None and nodes < clients
    return {
        "name": engine or folder.summary["engine"],
        "workers": nodes if cohorts else None,
        "test_seed": folder.summary.get("test_seed"),
    }


def _whole(value: float) -> Any:
    # Ray's CPU shares are whole numbers; a fraction goes on as it is, to be refused with its name.
    return int(value) if value.is_integer() else value
