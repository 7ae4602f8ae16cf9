"""The attack on UDP at record level: an audit of its noise by canaries, and membership inference.

Everything goes through the real strategy and the real client, inline: see `canaries` and
`membership` beside this file.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from flwr_privacy.clients import UDPClient
from flwr_privacy.errors import check_choice, check_integer
from flwr_privacy.simulations.reports.style import COLOURS, INK, drawing
from flwr_privacy.simulations.research.attacks.membership import roc
from flwr_privacy.simulations.research.attacks.pictures import draw_scores, save
from flwr_privacy.simulations.research.attacks.setup import AttackOptions, Report

from .attack_membership import ALARMS, RECORDS, SHADOWS, TASKS, Inferred, infer
from .canaries import CEILING, CONFIDENCE, GUESSES, ROUNDS, Audited, WeakNoiseUDPClient, audit
from .training import DELTA

__all__ = ["report"]

_EPSILONS = (1.0, 4.0, 16.0)
_PICTURED = 4.0  # epsilon of the audits in the picture
_CLIENTS = 2
_MEMBERSHIP_EPSILON = 4.0

_LEGEND = f"""\
ledger: epsilon of the client by its own charges; the mechanism guarantees no more than that
one run, f-DP, Gaussian*: epsilon that the guesses prove, with a confidence of {CONFIDENCE:.0%}.
  Above the ledger, the mechanism is flagged: a correct one is with a chance of at most 1 % by each
  bound
one run: holds for every mechanism (Steinke et al. 2023); {GUESSES} guesses, a number fixed
  beforehand; with all of them right and delta 0 it would prove {CEILING:.1f}. It is meant for
  epsilon up to 4
f-DP: the same guesses, for every mechanism that claims to be Gaussian (Mahloujifar et al. 2025)
Gaussian*: assumes that each canary has a channel of its own, independent of the others, and of
  Gaussian shape. That is so for Gaussian noise on canaries at right angles, whatever its size
canary: one of two opposite records of the largest gradient, by a coin: a replaced record at its
  worst. Without noise only the number of canaries bounds what is proven
membership: each place in the data is one of two records, by a coin; the attack has the final model.
  LiRA is the likelihood ratio, with {SHADOWS} shadow models; offline, it has those without the
  record only
AUC: chance that a member scores above another record. gain: true minus false positives. alarms:
  members found, with the interval, where so many others are taken for members
halves: epsilon by the best threshold of one half of the records, on the other; it takes records for
  independent. one run: by guesses between the two records of half of the places
Only record level is audited. At user level a canary would be all data of a client, of which there
  are too few in a run for this"""


def report(options: AttackOptions) -> Report:
    """Audit trainings with and without noise, infer membership, and draw what was found.

    By default 2 clients train; in the membership attack they have 50 records each.

    Raises
    ------
    InvalidParameterError, DataError
        If a value is out of range or a data set is missing; also if the picture cannot be written.
    """
    task, clients, records = options.chosen(task=TASKS[0], clients=_CLIENTS, records=RECORDS)
    seed = check_integer("seed", options.seed, minimum=0)
    check_choice("task", task, TASKS)
    halves: tuple[type[UDPClient], ...] = (UDPClient, WeakNoiseUDPClient)
    audits = [
        audit(epsilon, client=half, seed=seed, clients=clients)
        for epsilon in _EPSILONS
        for half in halves
    ]
    audits.append(audit(None, seed=seed, clients=clients))
    inferred = [
        infer(
            epsilon,
            task=task,
            seed=seed,
            clients=clients,
            records=records,
            data_root=options.data_root,
        )
        for epsilon in (None, _MEMBERSHIP_EPSILON)
    ]
    return Report(
        tables=[_audit_table(audits), _membership_table(task, inferred)],
        legend=_LEGEND,
        pictures=[_draw(audits, inferred, options.out / f"udp-{task}.png")],
        verdict=_verdict(audits, inferred),
    )


def _audit_table(audits: Sequence[Audited]) -> Table:
    one = audits[0]
    lines = Table(
        title=f"audit: epsilon at delta {DELTA:g}, by {one.one_run.canaries} canaries "
        f"in {ROUNDS} rounds"
    )
    lines.add_column("mechanism")
    for name in ("ledger", "one run", "f-DP", "Gaussian*", "guesses"):
        lines.add_column(name, justify="right")
    lines.add_column("verdict")
    for found in audits:
        lines.add_row(
            found.mechanism,
            "none" if math.isinf(found.ledger) else f"<= {found.ledger:.2f}",
            f">= {found.one_run.epsilon:.2f}",
            f">= {found.fdp.epsilon:.2f}",
            f">= {found.gaussian.epsilon:.2f}",
            f"{found.one_run.correct} right",
            found.verdict,
        )
    return lines


def _membership_table(task: str, inferred: Sequence[Inferred]) -> Table:
    lines = Table(
        title=f"membership: {task}, {len(inferred[0].members) // 2} members and as many others"
    )
    lines.add_column("attack")
    for name in ("AUC", "gain", *(f"{limit:.0%} alarms" for limit in ALARMS)):
        lines.add_column(name, justify="right")
    for name in ("halves", "one run"):
        lines.add_column(name, justify="right")
    for run in inferred:
        lines.add_section()
        lines.add_row(f"({run.mechanism})")
        for name, found in run.found.items():
            lines.add_row(
                name,
                f"{found.auc:.3f}",
                f"{found.advantage:.2f}",
                *(f"{r.tpr:.0%} ({100 * r.low:.0f}-{100 * r.high:.0f})" for r in found.rates),
                f">= {found.epsilon:.2f}",
                f">= {run.one_run[name].epsilon:.2f}",
            )
    return lines


@drawing()
def _draw(audits: Sequence[Audited], inferred: Sequence[Inferred], path: Path) -> Path:
    figure = Figure(figsize=(15, 4))
    panels = figure.subplots(1, 3)
    pictured = [a for a in audits if a.mechanism.startswith(f"epsilon {_PICTURED:g}")]
    reach = max(float(np.abs(one.scores).max()) for one in pictured)
    for axes, one in zip(panels[:2], pictured, strict=True):
        _draw_scores(axes, one, reach)
    _draw_roc(panels[2], inferred)
    return save(figure, path)


def _draw_scores(axes: Axes, one: Audited, reach: float) -> None:
    draw_scores(axes, one.scores, one.coins, names=("-1", "+1"), legend="coin", reach=reach)
    axes.set_title(
        f"{one.mechanism}\nledger at most {one.ledger:.2f}, one run at least "
        f"{one.one_run.epsilon:.2f}, Gaussian at least {one.gaussian.epsilon:.2f}"
    )
    axes.set_xlabel("what the server reads of a canary")
    axes.set_ylabel("canaries")


def _draw_roc(axes: Axes, inferred: Sequence[Inferred]) -> None:
    least = 1 / (len(inferred[0].members) // 2)
    for run, style in zip(inferred, ("-", "--"), strict=True):
        for (name, scores), colour in zip(run.scores.items(), COLOURS, strict=False):
            alarms, found = roc(scores, run.members)
            axes.loglog(
                np.maximum(alarms, least / 2),
                np.maximum(found, least / 2),
                linestyle=style,
                color=colour,
                drawstyle="steps-post",
                label=f"{run.mechanism}: {name}",
            )
    axes.plot([least / 2, 1], [least / 2, 1], color=INK, linestyle=":", label="guessing")
    axes.set_xlim(least / 2, 1)
    axes.set_ylim(least / 2, 1.1)
    axes.set_title("membership")
    axes.set_xlabel("false alarms")
    axes.set_ylabel("members found")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def _verdict(audits: Sequence[Audited], inferred: Sequence[Inferred]) -> str:
    """Return in plain words what the audits and the attack found."""
    guaranteed = [one for one in audits if not math.isinf(one.ledger)]
    lines = [
        f"{one.mechanism}: the ledger says at most {one.ledger:.2f}, the audits prove at least "
        f"{one.one_run.epsilon:.2f}, and {one.gaussian.epsilon:.2f} if the channels are Gaussian: "
        f"{one.verdict}"
        for one in guaranteed
    ]
    for run in inferred:
        name, best = max(run.found.items(), key=lambda item: item[1].auc)
        lines.append(
            f"membership, {run.mechanism}: the best attack ({name}) puts a member above another "
            f"record {best.auc:.0%} of the time; guessing does 50%. The model is right on "
            f"{run.accuracy:.0%} of the test records"
        )
    return "\n".join(lines)
