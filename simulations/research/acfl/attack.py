"""The attack on ACFL: what an honest-but-curious server learns about each device.

Real trainings run inline, with stragglers, on devices with a few digits each. The server solves for
the moments of the devices, and what these say of the digits is read off.
"""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.table import Table

from flwr_privacy.errors import check_choice
from flwr_privacy.simulations.reports.style import drawing
from flwr_privacy.simulations.research.attacks.pictures import Row, above, draw, save
from flwr_privacy.simulations.research.attacks.setup import AttackOptions, Report

from .regression import DELTA, EPSILON, MI_EPSILON, RATE, TASKS, Devices
from .solving import NOISED, PLAIN, SUMMED, Attacked, SolvedView, attack

__all__ = ["report"]

_DEVICES = 5
_RECORDS = 20
_PICTURED = 8

Matrix = NDArray[np.float64]


def report(options: AttackOptions) -> Report:
    """Attack trainings with the paper's noise, under a secure sum, and with noise on everything.

    By default all tasks are attacked, on 5 devices with 20 records each; 3 devices is the least.

    Raises
    ------
    InvalidParameterError
        If a value is out of range, or a picture cannot be written.
    """
    _, clients, records = options.chosen(task=TASKS[0], clients=_DEVICES, records=_RECORDS)
    tasks = TASKS if options.task is None else (check_choice("task", options.task, TASKS),)
    attacked = [
        attack(Devices.of(task, devices=clients, records=records, seed=options.seed))
        for task in tasks
    ]
    pictures = []
    for one in attacked:
        pictures.append(_draw_errors(one, options.out / f"acfl-{one.devices.task}-errors.png"))
        if one.devices.map is None:
            pictures.append(_draw_images(one, options.out / f"acfl-{one.devices.task}.png"))
    return Report(
        tables=[_table(one) for one in attacked],
        legend=_LEGEND,
        pictures=pictures,
        verdict="\n".join(_verdict(one) for one in attacked),
    )


def _table(one: Attacked) -> Table:
    count, records, _ = one.devices.pixels.shape
    d, o = one.devices.start.shape
    images = one.devices.map is None
    lines = Table(
        title=f"{one.devices.task}: {count} devices, records of each: {records}, d = {d}, o = {o}"
    )
    lines.add_column("what the server has")
    for name in ("known", "A", "B", "AUC", *["images"] * images):
        lines.add_column(name, justify="right")
    for name, findings in one.findings.items():
        lines.add_section()
        lines.add_row(name)
        for found in findings:
            lines.add_row(
                f"  {found.name}",
                found.rank,
                *(f"{np.median(error):.1e}" for error in found.errors),
                f"{found.auc:.3f}",
                *[f"{found.exact} of {count * records}"] * images,
            )
    return lines


_LEGEND = f"""\
paper: setup noise for {MI_EPSILON:g} nat of MI-DP by the paper's bound; gradients are exact, also
  under the secure sum. record: noise on everything, epsilon {EPSILON:g} at delta {DELTA:g} for a
  record and the whole training. In each round {RATE:.0%} of the devices are too late
upload: the coded data set of the setup. answers: gradients of a device. sums: gradients of all that
  were in time. With noise on gradients: the best linear estimate from the upload and all of them
known: directions in which the models differ, of all; under a secure sum, unknowns that are
  determined, of all of a row of the matrices
A, B: error of X^T X and X^T Y of a device, relative to them; median of the devices
AUC: chance that a record of a device lies nearer to the span of its A than another digit of the
  same classes; the server is told how many records there are. 0.5 is guessing
images: found one by one and to the last bit, from A and from pixels being multiples of 1/16"""


@drawing()
def _draw_errors(one: Attacked, path: Path) -> Path:
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for name, (rounds, errors) in one.curves.items():
        axes.semilogy(rounds, errors, marker=".", label=name)
    axes.set_xscale("log")
    axes.set_xlabel("answers of the device; sums of gradients")
    axes.set_ylabel("error of X^T X (median of the devices)")
    figure.suptitle(f"{one.devices.task}: what the server has of a device; 1 is all of it missing")
    above(axes, len(one.curves))
    return save(figure, path)


def _draw_images(one: Attacked, path: Path) -> Path:
    """Draw digits of all devices, and what each view says of them."""
    count, records, _ = one.devices.pixels.shape
    columns = min(_PICTURED, count * records)
    places = [(k % count, k // count * (records // 2) % records) for k in range(columns)]
    own = np.array([one.devices.pixels[place] for place in places])
    rows = [Row(name="record", images=own, span=(0.0, 1.0))]
    for name, place, means in (
        (PLAIN, 0, True),
        (PLAIN, -1, False),
        (SUMMED, -1, True),
        (NOISED, -1, True),
    ):
        found = one.findings[name][place]
        images = _class_means(one, found, places) if means else _nearest(found, places, own)
        exact = (images == own).all(axis=1)
        rows.append(
            Row(
                name=f"{name}: {found.name}" + ", class mean" * means,
                images=images,
                notes=["exact" if right else "" for right in exact],
                recovered=exact,
            )
        )
    title = "digits of the devices, and what the server makes of them"
    return draw(rows, path, title=title, recovered="every pixel to the last bit")


def _class_means(one: Attacked, found: SolvedView, places: list[tuple[int, int]]) -> Matrix:
    """Return the means of the records' classes by X^T Y, given how many records each has."""
    classes = one.devices.classes
    return np.array(
        [
            found.moments.labels[device][:, classes[device, record]]
            / np.count_nonzero(classes[device] == classes[device, record])
            for device, record in places
        ]
    )


def _nearest(found: SolvedView, places: list[tuple[int, int]], own: Matrix) -> Matrix:
    """Return of what was found the record nearest to each; nothing where there is none."""
    images = np.zeros_like(own)
    for column, (device, _) in enumerate(places):
        records = found.records[device] if found.records is not None else own[:0]
        if len(records):
            images[column] = records[np.linalg.norm(records - own[column], axis=1).argmin()]
    return images


def _verdict(one: Attacked) -> str:
    """Return in plain words what each of the three trainings gives away."""
    count, records, _ = one.devices.pixels.shape
    images = one.devices.map is None
    plain, summed, noised = one.findings.values()

    def text(found: SolvedView) -> str:
        error = float(np.median(found.errors.features))
        parts = [f"error of A {error:.2g}", f"AUC {found.auc:.2f}"]
        return ", ".join(parts + [f"{found.exact} of {count * records} images"] * images)

    def until(findings: list[SolvedView]) -> str:
        last = findings[-1]
        first = next((found for found in findings if found.devices == count), None)
        if first is None:
            return f"{last.name} determine {last.rank} unknowns"
        return f"{first.name} give all devices away"

    return "\n".join(
        (
            f"{one.devices.task}: the setup claims {one.claimed['mi_epsilon']:.3g} nat of MI-DP of "
            f"an entry (for a record that is epsilon {one.claimed['record_epsilon']:.3g}).",
            f"  An upload by itself: {text(plain[0])}. But that protects one upload and not the "
            f"training:",
            f"  whatever the noise of the setup, {until(plain)} ({text(plain[-1])}).",
            f"  A secure sum of exact gradients delays it, as others are late every time: "
            f"{until(summed)} ({text(summed[-1])}).",
            f"  With noise on everything, epsilon {EPSILON:g} for the whole training, the same "
            f"server ends with: {text(noised[-1])}.",
        )
    )
