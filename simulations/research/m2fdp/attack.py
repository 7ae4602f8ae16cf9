"""The attacks on M2FDP: members inside a trusted zone, the server between its nodes, the parent.

What members find in each other's averages is in `zone` beside this file; what a server finds that
passes sealed messages on is in `relay`, and what it gets when it forges some in `forgery`. The
parent outside reads coins in what trusted paths release: by the mathematics alone, with many coins
(`flwr_privacy.simulations.research.m2fdp.trusted_path`), and through the real strategy and client,
with fewer (`zone_audit`).
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from flwr_privacy.simulations.reports.style import COLOURS, drawing
from flwr_privacy.simulations.research.attacks.inversion import Recovery
from flwr_privacy.simulations.research.attacks.pictures import Row, above, draw, draw_scores, save
from flwr_privacy.simulations.research.attacks.setup import AttackOptions, AttackSetup, Report
from flwr_privacy.simulations.research.secure_sum.attack import TASKS, setup_of

from .forgery import HONEST, Forged, forge
from .relay import Tapped, tap
from .trusted_path import PathAudit
from .zone import DELTA, EPSILON, Sight, sights
from .zone_audit import CONFIDENCE, FEW, PERIOD, ROUND, STEPS, WARD, EdgeAudit, audits, edge_audits

__all__ = ["report"]

_CLIENTS = 5
_PICTURED = 4.0  # epsilon of the audits in the picture


def report(options: AttackOptions) -> Report:
    """Look from inside a zone, from between its nodes and from outside, and draw what was found.

    By default the largest zone has 5 members with 1 record each, who train what the clients of
    `flwr_privacy.simulations.research.secure_sum.attack` train.

    Raises
    ------
    InvalidParameterError, DataError
        If a value is out of range or a data set is missing; also if a picture cannot be written.
    """
    task, clients, records = options.chosen(task=TASKS[0], clients=_CLIENTS, records=1)
    seed = options.seed
    setup = setup_of(task, clients=clients, records=records, seed=seed, data_root=options.data_root)
    seen = sights(setup)
    tapped = tap(seed=seed)
    forged = forge(seed=seed)
    audited = audits(seed=seed)
    through = edge_audits(seed=seed)
    return Report(
        tables=[
            _zone_table(setup, seen),
            _tap_table(tapped),
            _forgery_table(forged),
            _audit_table(audited),
            _edge_table(through),
        ],
        legend=_LEGEND,
        pictures=[
            _draw_zone(setup, seen, options.out / f"m2fdp-{task}.png"),
            _draw_audits(audited, options.out / "m2fdp-audit.png"),
        ],
        verdict="\n".join(
            (
                *_zone_verdict(seen),
                *_server_verdict(tapped, forged),
                *_audit_verdict(audited),
                *_edge_verdict(through),
            )
        ),
    )


def _zone_table(setup: AttackSetup, seen: Sequence[Sight]) -> Table:
    _, records = setup.labels.shape
    lines = Table(title=f"inside a zone: {setup.task.name}, records of each member: {records}")
    lines.add_column("who looks at the average")
    for name in ("error of an update", "recovered", "similarity", "by guessing"):
        lines.add_column(name, justify="right")
    for sight in seen:
        recovery = sight.recovery
        lines.add_row(
            sight.name,
            f"{np.median(sight.errors):.2g}",
            f"{recovery.recovered.sum()} of {recovery.recovered.size}",
            f"{recovery.similarities.mean():.3f}",
            f"{recovery.guessed.mean():.3f}",
        )
    return lines


def _tap_table(tapped: Sequence[Tapped]) -> Table:
    lines = Table(title="between the nodes: what crosses the server of what trusting devices made")
    lines.add_column("aggregators")
    for name in ("bytes", "found", "their answers", "entropy", "p-value"):
        lines.add_column(name, justify="right")
    for one in tapped:
        lines.add_row(
            one.name,
            f"{one.crossed}",
            f"{one.found} of {one.places}",
            f"{one.answered} bytes",
            f"{one.entropy:.4f}",
            f"{one.p_value:.2g}",
        )
    return lines


def _forgery_table(forged: Sequence[Forged]) -> Table:
    lines = Table(title="between the nodes: what the server asks, and what it gets")
    lines.add_column("the server asks for")
    lines.add_column("verdict")
    lines.add_column("the node says")
    for one in forged:
        if one.name == HONEST:
            lines.add_section()
        lines.add_row(one.name, _verdict_of_forgery(one), one.outcome)
    return lines


def _edge_table(through: Sequence[EdgeAudit]) -> Table:
    lines = Table(
        title=f"outside, through the real strategy and client: {through[0].gaussian.canaries} "
        f"edges of {FEW}, {STEPS} steps, events after each"
    )
    lines.add_column("path")
    lines.add_column("noise for")
    for name in ("releases", "ledger", "Gaussian", "guesses"):
        lines.add_column(name, justify="right")
    lines.add_column("verdict")
    for found in through:
        lines.add_row(
            found.name,
            found.law,
            f"{found.releases}",
            f"<= {found.ledger:.2f}",
            f">= {found.gaussian.epsilon:.2f}",
            f"{found.gaussian.correct} right",
            _verdict_of(found),
        )
    return lines


def _audit_table(audited: Sequence[PathAudit]) -> Table:
    lines = Table(
        title=f"outside: epsilon at delta {DELTA:g}, from {audited[0].coins.size} trainings of a "
        f"round of {ROUND} steps, events every {PERIOD}, edges of {WARD}"
    )
    lines.add_column("path")
    lines.add_column("noise for")
    for name in ("releases", "sensitivity", "attained", "ledger", "one run", "Gaussian"):
        lines.add_column(name, justify="right")
    lines.add_column("verdict")
    first = audited[0].path.name
    for found in audited:
        if (found.path.name, found.law) == (first, audited[0].law):
            lines.add_section()
        lines.add_row(
            found.path.name,
            found.law,
            f"{found.releases}",
            f"{max(found.stated):.4g}",
            f"{max(found.attained):.4g}",
            f"<= {found.ledger:.2f}",
            f">= {found.one_run.epsilon:.2f}",
            f">= {found.gaussian.epsilon:.2f}",
            _verdict_of(found),
        )
    return lines


_LEGEND = f"""\
inside: one or several members take what they sent off the average of all, which they are sent at a
  clean event. error: of taking what is left for the update of one of the others, relative to it;
  median. no clean event: they are sent the next global model instead, noised for epsilon
  {EPSILON:g} at delta {DELTA:g}
similarity: cosine of a record of another member and the candidate nearest to it, the mean test
  record taken off both. recovered: {Recovery.level} or more, and more than by guessing
between: the server only passes messages on. found: stretches of updates, codes and models of the
  devices of a hospital, looked for in every byte that crosses, in several encodings. Where the
  server simulates the aggregators itself, it has all codes. their answers: what the
  hospital's nodes sealed, or sent in the open; entropy: bits in a byte of it, 8 for random bytes,
  and the chance of frequencies that uneven in random bytes. refused: the node did not answer, or
  what it answered was charged for
outside: the parent of the boundary node reads the coin that decides the data of one device. The
  others are crafted: they wait until the model that they are sent has moved, and then follow it
  with all that the clipping allows. noise for: the law of drift by which the sensitivity is stated
sensitivity, attained: of a release, in lengths of a local step; how far the coin moves it
ledger: epsilon of the device by the charges. All paths have the same by construction: a release
  gets the share of the budget that its steps are of all. Audits are lower bounds, with a confidence
  of {CONFIDENCE:.0%}; that they differ between paths says nothing
one run: holds for every mechanism (Steinke et al. 2023). Gaussian: for Gaussian channels, which
  these are"""


def _verdict_of_forgery(one: Forged) -> str:
    if one.name == HONEST:
        return "answered"
    return "refused" if one.refused else "OPEN"


def _verdict_of(found: PathAudit | EdgeAudit) -> str:
    return "FLAGGED" if found.flagged else "passes"


def _draw_zone(setup: AttackSetup, seen: Sequence[Sight], path: Path) -> Path:
    """Draw the records of the other members, and what each look at the average says of them."""
    clients, records = setup.labels.shape
    rows = [Row(name="record", images=setup.records(1, clients), span=(0.0, 1.0))]
    missing = np.full_like(rows[0].images, np.nan)  # drawn white
    for sight in seen:
        images, notes = missing.copy(), [""] * len(missing)
        recovered = [False] * len(missing)
        first = (sight.first - 1) * records
        for place, image in enumerate(sight.found, start=first):
            images[place] = image
            notes[place] = f"{sight.recovery.similarities[place - first]:.2f}"
            recovered[place] = bool(sight.recovery.recovered[place - first])
        rows.append(Row(name=sight.name, images=images, notes=notes, recovered=recovered))
    title = "other members' records in the zone's average; similarity"
    return draw(rows, path, title=title, recovered=Recovery.meaning, step=records)


@drawing()
def _draw_audits(audited: Sequence[PathAudit], path: Path) -> Path:
    figure = Figure(figsize=(13, 4))
    panels = figure.subplots(1, 3)
    pictured = [one for one in audited if round(one.ledger, 3) == _PICTURED] or list(audited)
    for axes, one in zip(panels[:2], (pictured[0], pictured[-1]), strict=True):
        _draw_scores(axes, one)
    _draw_bounds(panels[2], pictured)
    return save(figure, path)


def _draw_scores(axes: Axes, one: PathAudit) -> None:
    reach = float(np.abs(one.scores).max())
    names, legend = ("tails", "heads"), "coin of the device"
    draw_scores(axes, one.scores, one.coins, names=names, legend=legend, reach=reach)
    axes.set_title(
        f"{one.path.name}, noise for '{one.law}'\nledger at most {one.ledger:.2f}, audit at least "
        f"{one.gaussian.epsilon:.2f}"
    )
    axes.set_xlabel("evidence for heads in what is released")
    axes.set_ylabel("trainings")


def _draw_bounds(axes: Axes, audited: Sequence[PathAudit]) -> None:
    labels = [f"{one.path.name},\n'{one.law}'" for one in audited]
    places = np.arange(len(audited))[::-1]
    colours = [COLOURS[1] if one.flagged else COLOURS[2] for one in audited]
    axes.barh(places, [one.gaussian.epsilon for one in audited], color=colours, height=0.6)
    axes.plot([one.ledger for one in audited], places, "k|", markersize=16, label="ledger")
    axes.set_yticks(places, labels)
    axes.set_xlabel("epsilon: audit at least, ledger at most")
    above(axes, 1)


def _zone_verdict(seen: Sequence[Sight]) -> list[str]:
    """Return in plain words what members learn of each other."""
    pair, noised, *others = seen
    lines = [
        f"inside a zone of two, a member has the other's update to {np.median(pair.errors):.2g} of "
        f"it: {pair.recovery.recovered.sum()} of {pair.recovery.recovered.size} records"
    ]
    lines += [
        f"{one.name} members: error {np.median(one.errors):.2g}, "
        f"{one.recovery.recovered.sum()} of {one.recovery.recovered.size} records"
        for one in others
    ]
    lines.append(
        "without clean events they are sent noised models alone: error "
        f"{np.median(noised.errors):.2g}, {noised.recovery.recovered.sum()} of "
        f"{noised.recovery.recovered.size} records"
    )
    return lines


def _server_verdict(tapped: Sequence[Tapped], forged: Sequence[Forged]) -> list[str]:
    """Return in plain words what the server between the nodes gets."""
    relayed, simulated = tapped
    tried = [one for one in forged if one.name != HONEST]
    still = [one.name for one in tried if not one.refused]
    lines = [
        f"a server that passes sealed messages on finds {relayed.found} of {relayed.places} "
        f"stretches of what the devices made; one that simulates the aggregators, "
        f"{simulated.found}",
        f"of {len(tried)} forgeries {len(tried) - len(still)} were refused",
    ]
    return lines + [f"OPEN: {name}" for name in still]


def _edge_verdict(through: Sequence[EdgeAudit]) -> list[str]:
    return [
        f"real halves, {one.name}, noise for '{one.law}': the ledger says at most "
        f"{one.ledger:.2f}, the audit proves at least {one.gaussian.epsilon:.2f}: "
        f"{_verdict_of(one)}"
        for one in through
    ]


def _audit_verdict(audited: Sequence[PathAudit]) -> list[str]:
    return [
        f"{one.path.name}, noise for '{one.law}': the ledger says at most {one.ledger:.2f}, the "
        f"audits prove at least {max(one.one_run.epsilon, one.gaussian.epsilon):.2f}: "
        f"{_verdict_of(one)}"
        for one in audited
    ]
