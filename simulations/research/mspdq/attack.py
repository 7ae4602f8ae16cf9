"""The attack on MSP and MSPDQ: the clients' models from their messages, and images from models.

A real learning round of each kind runs inline, and the attack gets what the server gets. Each
client trains one step on all of its few records, by default one, as in the attack on the paper's
figure 6.
"""

from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from flwr_privacy.errors import check_choice
from flwr_privacy.simulations.reports.style import INK, drawing
from flwr_privacy.simulations.research.attacks.inversion import Recovery
from flwr_privacy.simulations.research.attacks.pictures import Row, above, draw, save
from flwr_privacy.simulations.research.attacks.setup import AttackOptions, AttackSetup, Report
from flwr_privacy.simulations.research.attacks.torch_gradients import sigmoid_lenet
from flwr_privacy.simulations.settings.run_settings import TrainingSettings
from flwr_privacy.simulations.tasks import tasks

from .images import Images, reconstruct, reconstruct_sum
from .models import BITS, EPSILON, SECRET_ROUNDS, Views, views_of

__all__ = ["TASKS", "report", "setup_of"]

_ONE_STEP = TrainingSettings(learning_rate=0.1)  # the paper's in round 1

TASKS = {
    task.name: task
    for task in (
        tasks.Task(
            name="digits-lenet",
            dataset="digits",
            model=partial(sigmoid_lenet, (1, 8, 8), 10, (2, 1, 1)),
            description="8x8 handwritten digits, iDLG's LeNet with smaller strides",
            training=_ONE_STEP,
        ),
        tasks.Task(
            name="mnist-lenet",
            dataset="mnist",
            model=partial(sigmoid_lenet, (1, 28, 28), 10),
            description="28x28 handwritten digits, iDLG's LeNet",
            training=_ONE_STEP,
        ),
    )
}
"""Tasks on square images, with the model of iDLG."""

_CLIENTS = 6
_NEAR = 0.1  # of the update: an error below which a model counts as given away


def report(options: AttackOptions) -> Report:
    """Attack rounds of MSP and MSPDQ, with and without a secure sum, and draw what was found.

    By default 6 clients have 1 record each. Splits, rounding and masks are secret: the seed does
    not give them.

    Raises
    ------
    InvalidParameterError, DataError
        As `AttackSetup.of`; also if a picture cannot be written.
    """
    task, clients, records = options.chosen(task=next(iter(TASKS)), clients=_CLIENTS, records=1)
    setup = setup_of(
        task, clients=clients, records=records, seed=options.seed, data_root=options.data_root
    )
    views = views_of(setup)
    images = [reconstruct(setup, e.name, e.models) for e in views.estimates if e.pictured]
    images += [
        reconstruct_sum(setup, f"MSPDQ 8, secure: mean of {size}", mean, clients=size)
        for size, mean in views.sums.items()
    ]
    return Report(
        tables=[_models_table(setup, views), _images_table(setup, images)],
        legend=_LEGEND,
        pictures=[
            draw(
                _rows(setup, images),
                options.out / f"mspdq-{task}.png",
                title="below each image: mean squared error, of pixels from 0 to 1",
                recovered=Recovery.meaning,
                step=records,
            ),
            _draw_curves(views, options.out / f"mspdq-{task}-steps.png"),
        ],
        verdict=_verdict(views, images),
    )


def setup_of(
    task: str, *, clients: int, records: int, seed: int, data_root: str | Path | None
) -> AttackSetup:
    """Return the clients of a task of `TASKS`; see `AttackSetup.of`."""
    return AttackSetup.of(
        TASKS[check_choice("task", task, TASKS)],
        clients=clients,
        records=records,
        seed=seed,
        data_root=data_root,
        candidates=clients * records,
    )


def _models_table(setup: AttackSetup, views: Views) -> Table:
    """Return the errors of the clients' models, and of the round's result."""
    clients, records = setup.labels.shape
    lines = Table(title=f"{setup.task.name}, {clients} clients, records of each: {records}")
    lines.add_column("what runs")
    lines.add_column("what it takes")
    for name in ("update", "model", "cosine", "result"):
        lines.add_column(name, justify="right")
    shown = ""
    for estimate in views.estimates:
        first, shown = estimate.view != shown, estimate.view
        result = first and shown in views.results
        lines.add_row(
            shown if first else "",
            estimate.attack,
            f"{views.error(estimate.models):.2g}",
            f"{views.error(estimate.models, of_update=False):.2g}",
            f"{views.likeness(estimate.models):.3f}",
            f"{views.damage(shown):.2g}" if result else "",
        )
    return lines


def _images_table(setup: AttackSetup, images: list[Images]) -> Table:
    """Return how many images were found, and how near."""
    lines = Table(title=f"{setup.task.name}: images, by gradient matching (iDLG)")
    lines.add_column("what it takes")
    for name in ("found", "MSE", "cosine", "labels", "searched"):
        lines.add_column(name, justify="right")
    for one in images:
        recovery, count = one.recovery, len(one.errors)
        lines.add_row(
            one.view,
            f"{recovery.recovered.sum()} of {count}",
            f"{one.errors.mean():.2g}",
            f"{recovery.similarities.mean():.3f}",
            "given" if one.labels is None else f"{one.labels} of {count}",
            f"{one.converged.sum()} of {count}",
        )
    guessed = images[0].recovery.guessed.mean()
    lines.add_row("a guess", "", "", f"{guessed:.3f}", "", "")
    return lines


_LEGEND = f"""\
what the server takes for a client's model: a message as it is; what 2 messages say, with the
  coupling ("gain") or, if that or m is secret, the law of the split; the conservation law over
  {SECRET_ROUNDS} steps; the model that fits all messages best; a masked vector; the mean
update, model: its error, relative to the client's update or to its model; mean over the clients.
  Of the model that was sent to all the first is 1. cosine: of the updates. result: error of the
  new model, relative to the mean update
secure: under a secure sum. paper: start, couplings and intervals of Algorithm 1. MSP+Lap, JoPEQ:
  for epsilon {EPSILON:g}
MSE: mean squared error of pixels from 0 to 1. cosine: of an image and what was returned, the mean
  test image taken off both; the guess is the best of some test images and means of classes. found:
  a cosine of {Recovery.level} or more, and more than by guessing
searched: the true image matches what was seen no better than the image that was returned. If it
  is not found, the view is to blame then and not the search; a better attack may find more in it,
  and an eye in the picture"""


def _rows(setup: AttackSetup, images: list[Images]) -> list[Row]:
    """Return the images of all clients, and what each view says of them."""
    clients = len(setup.labels)
    rows = [Row(name="image", images=setup.records(0, clients), span=setup.span)]
    return rows + [
        Row(
            name=one.view,
            images=one.found,
            notes=[f"{error:.1g}" for error in one.errors],
            span=setup.span,
            recovered=one.recovery.recovered,
        )
        for one in images
        if len(one.errors) == len(rows[0].images)
    ]


@drawing()
def _draw_curves(views: Views, path: Path) -> Path:
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for name, errors in views.curves.items():
        axes.semilogy(np.arange(1, len(errors) + 1), errors, marker=".", label=name)
    last = views.estimates[-1]
    for estimate, style in ((views.estimates[-2], ":"), (last, "--")):
        axes.axhline(views.error(estimate.models), color=INK, linestyle=style, label=estimate.name)
    axes.set_xlabel("mixing steps that the server has heard")
    axes.set_ylabel("error of a client's update")
    above(axes, 2)
    return save(figure, path)


def _verdict(views: Views, images: list[Images]) -> str:
    """Return in plain words what each kind of round gives away."""
    estimates = {estimate.name: estimate for estimate in views.estimates}
    pictures = {one.view: one for one in images}

    def error(name: str) -> str:
        return share(views.error(estimates[name].models))

    def share(error: float) -> str:
        return f"{100 * error:.2g} % of" if error < 1 else f"{error:.2g} times"

    def found(name: str) -> str:
        recovered = pictures[name].recovery.recovered
        return f"{recovered.sum()} of {recovered.size}"

    def gives(name: str) -> str:
        """Say what a view comes to: a model to a tenth of the update, or an image, or nothing."""
        models = views.error(estimates[name].models) < _NEAR
        recovered = bool(pictures[name].recovery.recovered.any())
        what = " and ".join(["models"] * models + ["images"] * recovered)
        return f"gives {what} away" if what else "gives nothing that this attack finds"

    two, law = "MSP: 2 messages", "MSP, secret gain: 2 messages, law"
    high, low = (f"MSPDQ {bits}: all messages" for bits in (BITS[0], BITS[-1]))
    paper, masked = "MSPDQ 8, paper: all messages", "MSPDQ 8, secure: masked"
    sums = [f"{found(f'MSPDQ 8, secure: mean of {n}')} from the mean of {n}" for n in views.sums]
    return "\n".join(
        (
            f"splitting alone {gives(two)}: two messages leave an error of "
            f"{error(two)} the update, {error(law)} it if the coupling is secret; images: "
            f"{found(two)}",
            f"rounding leaves an error of {error(high)} the update with {BITS[0]} bits, "
            f"{error(low)} it with {BITS[-1]}; images: {found(high)}, {found(low)}",
            f"in the paper's setting {error(paper)} the update; images: {found(paper)}. There the "
            f"new model itself is off by {share(views.damage('MSPDQ 8, paper'))} the mean update",
            f"under the secure sum one masked vector {gives(masked)}: its error is "
            f"{error(masked)} the update; images: {found(masked)}",
            "the mean that is opened is not hidden: for one client's update its error is "
            f"{share(views.error(views.estimates[-1].models))} it; images: "
            f"{', '.join(sums)} clients",
        )
    )
