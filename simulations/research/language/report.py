"""The attack of `flwr-privacy attack canaries`: tables, a picture, a sentence for each method."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer
from flwr_privacy.simulations.reports.style import COLOURS, INK, drawing
from flwr_privacy.simulations.research.attacks.pictures import save
from flwr_privacy.simulations.research.attacks.setup import AttackOptions, Report

from .attack import MODEL, SERVER, Measured, attack
from .exposure import CEILING, CHANCE
from .findings import CONFIDENCE, Compared, Finding, compared, pooled
from .fine_tuning import DELTA, METHODS, Federation
from .kept import kept
from .planted import GROUPS, Planted, plant, texts_with
from .pretraining import loss_on
from .texts import Language, Tokens

__all__ = ["report"]

_CODES = 16  # in each group
_CLIENTS, _SENTENCES = 100, 24
_PUBLIC, _ROUNDS, _EPOCHS = 60_000, 4, 2
_EPSILON = 8.0

_LEGEND = f"""\
exposure in bits, mean over the codes of a group with its interval of 95 %: how far up a code is
  among all {2**CEILING:.0f} codes; {CEILING:.0f} is the first place (the code is extracted), and
  {CHANCE:.1f} is chance. "nowhere": codes that are in no text
the model: for everybody who gets the model after the training; the server: for one who sees what
  each client sends in the last round, where that is not a sum
loss: mean per token on new sentences of the clients, in nats, with its standard error over seeds
promised: the groups whose codes the guarantee is about. User level: what one client alone has,
  however often. Record level: what is in one sentence. Nothing is promised of the others
proves: epsilon that guesses of coins prove (of two codes, which one is in the text?), with a
  confidence of {CONFIDENCE:.0%} each, for whatever is mu-GDP (Mahloujifar et al. 2025); at most:
  with all guesses right. An attack that proves nothing is no proof of privacy"""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Draw:
    """The clients of one seed, their codes, and new sentences of theirs."""

    seed: int
    planted: Sequence[Planted]
    federation: Federation
    unseen: Sequence[Tokens]


def report(options: AttackOptions, *, seeds: int = 1) -> Report:
    """Fine-tune adapters by all methods, and look for the codes.

    By default 100 clients have 24 sentences each beside those with codes. Clients, text, codes,
    adapters, batches and noise are others with each seed. The base model is the same.

    Parameters
    ----------
    options : AttackOptions
        With the first seed. What each fine-tuning tells is kept in the folder ``canaries`` of
        `options.out`, and read from there the next time.
    seeds : int, default 1
        How many seeds from there on.

    Raises
    ------
    InvalidParameterError
        If a value is out of range, or peft is not installed; also if the picture cannot be written.
    """
    if find_spec("peft") is None:
        allowed = (
            "another attack without the adapters of peft: pip install 'flwr-privacy[adapters]'"
        )
        raise InvalidParameterError("scheme", "canaries", allowed)
    every = "all"
    task, clients, sentences = options.chosen(task=every, clients=_CLIENTS, records=_SENTENCES)
    check_choice("task", task, (every, *METHODS))
    check_integer("seed", options.seed, minimum=0)
    drawn = [
        _draw_clients(options.seed + more, clients=clients, sentences=sentences)
        for more in range(check_integer("seeds", seeds, minimum=1))
    ]
    tunings = list(_tunings(list(METHODS) if task == every else [task]))
    measured: dict[tuple[str, bool], list[Measured]] = {tuning: [] for tuning in tunings}
    for one in drawn:
        for tuning in tunings:
            measured[tuning].append(_measured(*tuning, one, options.out))
    found = [
        pooled(METHODS[name], one_factor=half, measured=told)
        for (name, half), told in measured.items()
    ]
    before = np.mean([loss_on(one.federation.base(), one.unseen) for one in drawn])
    comparisons = compared(found)
    tables = [_exposures(found, clients, seeds), _promises(found)]
    return Report(
        tables=[*tables, _comparisons(comparisons)] if comparisons else tables,
        legend=f"{_LEGEND}\nbefore the fine-tuning the loss is {before:.3f}",
        pictures=[_draw(found, options.out / "canaries.png")],
        verdict="\n".join([*map(_said_of, found), *map(_said_of_both, comparisons)]),
    )


def _tunings(names: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Return each method, and if it adds noise the same with FFA-LoRA."""
    for name in names:
        yield name, False
        if METHODS[name].unit:
            yield name, True


def _draw_clients(seed: int, *, clients: int, sentences: int) -> _Draw:
    planted = plant(seed, codes=_CODES, clients=clients)
    language, first = Language(0), seed * clients
    federation = Federation(
        texts=texts_with(planted, language, clients=clients, sentences=sentences, first=first),
        seed=seed,
        public=_PUBLIC,
        rounds=_ROUNDS,
        epochs=_EPOCHS,
    )
    unseen = [
        language.text(language.speaker(speaker), sentences, "test", speaker)
        for speaker in range(first, first + clients)
    ]
    return _Draw(seed=seed, planted=planted, federation=federation, unseen=unseen)


def _measured(name: str, one_factor: bool, drawn: _Draw, out: Path) -> Measured:
    federation = drawn.federation
    settings = {
        "method": name,
        "one_factor": one_factor,
        "seed": drawn.seed,
        "epsilon": _EPSILON,
        "clients": len(federation.texts),
        "sentences": len(drawn.unseen[0]),
        "codes": _CODES,
        "public": federation.public,
        "rounds": federation.rounds,
        "epochs": federation.epochs,
    }
    file = f"seed {drawn.seed}, {name}{', FFA' if one_factor else ''}.json"
    measure = partial(
        attack,
        METHODS[name],
        federation,
        drawn.planted,
        drawn.unseen,
        epsilon=_EPSILON,
        one_factor=one_factor,
    )
    return kept(out / "canaries" / file, settings, measure)


def _exposures(found: Sequence[Finding], clients: int, seeds: int) -> Table:
    many = f"; {seeds} seeds" if seeds > 1 else ""
    lines = Table(title=f"exposure of codes in the text of {clients} clients, in bits{many}")
    lines.add_column("method")
    lines.add_column("who looks")
    for group in GROUPS:
        lines.add_column(str(group), justify="right")
    lines.add_column("extracted", justify="right")
    for finding in found:
        for adversary, groups in finding.exposures.items():
            lines.add_row(
                finding.name if adversary == MODEL else "",
                adversary,
                *(f"{g.mean:.1f} ({g.low:.1f}-{g.high:.1f})" for g in groups.values()),
                f"{sum(g.first for group, g in groups.items() if group.clients)} of "
                f"{sum(g.codes for group, g in groups.items() if group.clients)}",
            )
    return lines


def _promises(found: Sequence[Finding]) -> Table:
    lines = Table(title=f"what is promised, at delta {DELTA:g}, and what the codes prove")
    for name in ("method", "promised of"):
        lines.add_column(name)
    for name in ("loss", "perplexity", "card", "proves", "at most"):
        lines.add_column(name, justify="right")
    for one in found:
        promised = one.audit is not None
        lines.add_row(
            one.name,
            {"user": "users", "record": "records"}.get(one.method.unit or "", "nothing"),
            f"{one.loss[0]:.3f}{_plus_minus(one.loss[1])}",
            f"{math.exp(one.loss[0]):.1f}",
            f"<= {one.epsilon:.2f}" if promised else "none",
            f">= {one.audit.epsilon:.2f}" if one.audit else "",
            f"{one.ceiling:.2f}" if promised else "",
        )
    return lines


def _comparisons(comparisons: Sequence[Compared]) -> Table:
    lines = Table(title=f"FFA-LoRA against LoRA at epsilon {_EPSILON:g}: is its loss lower?")
    lines.add_column("method")
    lines.add_column("lower by", justify="right")
    lines.add_column("verdict")
    for one in comparisons:
        lines.add_row(one.name, f"{one.mean:.4f}{_plus_minus(one.error, 4)}", one.verdict)
    return lines


def _plus_minus(error: float, places: int = 3) -> str:
    return "" if math.isnan(error) else f" +- {error:.{places}f}"


@drawing()
def _draw(found: Sequence[Finding], path: Path) -> Path:
    figure = Figure(figsize=(13, 4.5))
    panels = figure.subplots(1, 2, sharey=True)
    for axes, adversary in zip(panels, (MODEL, SERVER), strict=True):
        _draw_panel(axes, found, adversary)
    panels[0].set_ylabel("exposure in bits")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")
    return save(figure, path)


def _draw_panel(axes: Axes, found: Sequence[Finding], adversary: str) -> None:
    for place, finding in enumerate(found):  # a method has one colour in both panels
        if adversary not in finding.exposures:
            continue
        groups = finding.exposures[adversary]
        means = np.array([group.mean for group in groups.values()])
        ends = np.array([[group.low, group.high] for group in groups.values()]).T
        axes.errorbar(
            np.arange(len(groups)) + 0.6 * (place / max(len(found) - 1, 1) - 0.5),
            means,
            yerr=np.abs(ends - means),
            fmt="os^"[place // len(COLOURS) % 3],
            color=COLOURS[place % len(COLOURS)],
            label=finding.name,
        )
    axes.axhline(CEILING, color=INK, linestyle=":")
    axes.axhline(CHANCE, color=INK, linestyle="--")
    axes.set_xticks(range(len(GROUPS)), [str(group) for group in GROUPS])
    axes.set_title(f"what {adversary} tells (dotted: extracted, dashed: chance)")


def _said_of(one: Finding) -> str:
    if one.audit is None:
        most = max(g.mean for groups in one.exposures.values() for g in groups.values())
        return f"{one.name}: nothing is promised; a group has up to {most:.1f} bits"
    said = "REFUTED" if one.refuted else "not refuted"
    return (
        f"{one.name}: the card says at most {one.epsilon:.2f}, the codes prove at least "
        f"{one.audit.epsilon:.2f} of at most {one.ceiling:.2f}: {said}"
    )


def _said_of_both(one: Compared) -> str:
    how = "lower" if one.mean > 0 else "higher"
    return (
        f"{one.name}: the loss with FFA-LoRA is {how} by {abs(one.mean):.4f}"
        f"{_plus_minus(one.error, 4)}; the claim that it is lower: {one.verdict}"
    )
