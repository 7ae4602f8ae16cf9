"""Looks for the secret codes of clients in a fine-tuned model, and in what its server sees."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.table import Table

from flwr_privacy.errors import InvalidParameterError, check_choice
from flwr_privacy.simulations.reports.style import COLOURS, INK, drawing
from flwr_privacy.simulations.research.attacks.one_run_fdp import FDPAudit, fdp_audit
from flwr_privacy.simulations.research.attacks.pictures import save
from flwr_privacy.simulations.research.attacks.setup import AttackOptions, Report

from .exposure import CEILING, CHANCE, Exposed, code_scores, exposed, exposure
from .fine_tuning import DELTA, METHODS, Federation, Method, fine_tune
from .planted import GROUPS, Group, Planted, plant, texts_with
from .pretraining import loss_on
from .texts import Language

__all__ = ["Finding", "attack", "judged", "report"]

_CODES = 16  # in each group
_CLIENTS, _SENTENCES = 100, 24
_PUBLIC, _ROUNDS = 60_000, 4
_EPSILON = 8.0
_CONFIDENCE = 0.99
_MODEL, _SERVER = "the model", "the server"

_LEGEND = f"""\
exposure in bits, mean over the codes of a group with its interval of 95 %: how far up a code is
  among all {2**CEILING:.0f} codes; {CEILING:.0f} is the first place (the code is extracted), and
  {CHANCE:.1f} is chance. "nowhere": codes that are in no text
the model: for everybody who gets the model after the training; the server: for one who sees what
  each client sends in the last round, where that is not a sum
loss: mean per token on new sentences of the clients, in nats
promised: the groups whose codes the guarantee is about. User level: what one client alone has,
  however often. Record level: what is in one sentence. Nothing is promised of the others
proves: epsilon that guesses of coins prove (of two codes, which one is in the text?), with a
  confidence of {_CONFIDENCE:.0%} each, for whatever is mu-GDP (Mahloujifar et al. 2025); at most:
  with all guesses right. An attack that proves nothing is no proof of privacy"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Finding:
    """What one fine-tuning tells of the codes.

    Parameters
    ----------
    method : Method
        How it was fine-tuned.
    one_factor : bool
        Whether by FFA-LoRA.
    loss : float
        Of the model on new sentences of the clients.
    epsilon : float, optional
        By the card; None where nothing is guaranteed.
    exposures : dict of str to dict of Group to Exposed
        For the model, and for the server if it sees more, by group.
    audit : FDPAudit, optional
        What guesses of the coins of promised codes prove, by all that the adversary of the
        guarantee sees; None where nothing is guaranteed.
    ceiling : float, optional
        What they would prove with all guesses right.
    """

    method: Method
    one_factor: bool
    loss: float
    epsilon: float | None
    exposures: dict[str, dict[Group, Exposed]]
    audit: FDPAudit | None
    ceiling: float | None

    @property
    def name(self) -> str:
        """The method and its adapters."""
        return f"{self.method.name}, FFA" if self.one_factor else self.method.name

    @property
    def refuted(self) -> bool:
        """Whether more was proven than the card says."""
        return self.audit is not None and self.audit.epsilon > (self.epsilon or 0.0)


def report(options: AttackOptions) -> Report:
    """Fine-tune adapters by all methods, and look for the codes.

    By default 100 clients have 24 sentences each beside those with codes.

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
    methods = list(METHODS) if task == every else [task]
    planted = plant(options.seed, codes=_CODES, clients=clients)
    language = Language(0)
    federation = Federation(
        texts=texts_with(planted, language, clients=clients, sentences=sentences),
        seed=0,
        public=_PUBLIC,
        rounds=_ROUNDS,
    )
    unseen = [
        language.text(language.speaker(client), sentences, "test", client)
        for client in range(clients)
    ]
    found = [
        attack(METHODS[name], federation, planted, unseen, epsilon=_EPSILON, one_factor=half)
        for name in methods
        for half in ((False, True) if METHODS[name].unit else (False,))
    ]
    before = loss_on(federation.base(), unseen)
    return Report(
        tables=[_exposures(found, clients), _promises(found)],
        legend=f"{_LEGEND}\nbefore the fine-tuning the loss is {before:.3f}",
        pictures=[_draw(found, options.out / "canaries.png")],
        verdict=_verdict(found),
    )


def attack(
    method: Method,
    federation: Federation,
    planted: Sequence[Planted],
    unseen: Sequence[NDArray[np.int64]],
    *,
    epsilon: float,
    one_factor: bool = False,
) -> Finding:
    """Fine-tune by one method, and look for the codes.

    Parameters
    ----------
    method : Method
        How.
    federation : Federation
        The clients' text, with the codes.
    planted : sequence of Planted
        The codes.
    unseen : sequence of (n, LENGTH) int64
        New sentences of the clients.
    epsilon : float
        Budget of a method that has one.
    one_factor : bool, default False
        Whether FFA-LoRA is used.
    """
    tuned = fine_tune(method, federation, epsilon=epsilon, one_factor=one_factor)
    adversaries = {_MODEL: [tuned.model] * len(planted)}
    if tuned.seen:
        adversaries[_SERVER] = [
            tuned.seen[str(code.clients[0])] if code.clients else tuned.model for code in planted
        ]
    exposures, margins = {}, np.empty(0)
    for adversary, models in adversaries.items():
        scores = [
            code_scores(model, code.name, code.noun)
            for model, code in zip(models, planted, strict=True)
        ]
        exposures[adversary] = {
            group: exposed(
                [
                    exposure(own, code.secret)
                    for own, code in zip(scores, planted, strict=True)
                    if code.group == group
                ]
            )
            for group in GROUPS
        }
        # The last adversary sees most.
        margins = np.array(
            [
                own[code.codes[1]] - own[code.codes[0]]
                for own, code in zip(scores, planted, strict=True)
            ]
        )
    promised = np.array([code.group in judged(method) for code in planted])
    coins = np.array([code.coin for code in planted])[promised]
    return Finding(
        method=method,
        one_factor=one_factor,
        loss=loss_on(tuned.model, unseen),
        epsilon=tuned.epsilon,
        exposures=exposures,
        audit=_audit(margins[promised], coins) if method.unit else None,
        ceiling=_audit(coins, coins).epsilon if method.unit else None,
    )


def judged(method: Method) -> tuple[Group, ...]:
    """Return the groups whose codes a method's guarantee is about."""
    if method.unit == "user":
        return tuple(group for group in GROUPS if group.clients == 1)
    if method.unit == "record":
        return tuple(g for g in GROUPS if g.clients == 1 and g.repetitions == 1)
    return ()


def _audit(scores: NDArray[np.float64], coins: NDArray[np.bool_]) -> FDPAudit:
    return fdp_audit(scores, coins, guesses=len(coins) // 2, delta=DELTA, confidence=_CONFIDENCE)


def _exposures(found: Sequence[Finding], clients: int) -> Table:
    lines = Table(title=f"exposure of codes in the text of {clients} clients, in bits")
    lines.add_column("method")
    lines.add_column("who looks")
    for group in GROUPS:
        lines.add_column(str(group), justify="right")
    lines.add_column("extracted", justify="right")
    for finding in found:
        for adversary, groups in finding.exposures.items():
            lines.add_row(
                finding.name if adversary == _MODEL else "",
                adversary,
                *(f"{g.mean:.1f} ({g.low:.1f}-{g.high:.1f})" for g in groups.values()),
                f"{sum(g.first for g in groups.values())} of "
                f"{sum(g.codes for group, g in groups.items() if group.clients)}",
            )
    return lines


def _promises(found: Sequence[Finding]) -> Table:
    lines = Table(title=f"what is promised, at delta {DELTA:g}, and what the codes prove")
    for name in ("method", "promised of"):
        lines.add_column(name)
    for name in ("loss", "card", "proves", "at most"):
        lines.add_column(name, justify="right")
    for one in found:
        promised = one.audit is not None
        lines.add_row(
            one.name,
            {"user": "users", "record": "records"}.get(one.method.unit or "", "nothing"),
            f"{one.loss:.3f}",
            f"<= {one.epsilon:.2f}" if promised else "none",
            f">= {one.audit.epsilon:.2f}" if one.audit else "",
            f"{one.ceiling:.2f}" if promised else "",
        )
    return lines


@drawing()
def _draw(found: Sequence[Finding], path: Path) -> Path:
    figure = Figure(figsize=(13, 4.5))
    panels = figure.subplots(1, 2, sharey=True)
    for axes, adversary in zip(panels, (_MODEL, _SERVER), strict=True):
        _draw_panel(axes, [one for one in found if adversary in one.exposures], adversary)
    panels[0].set_ylabel("exposure in bits")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")
    return save(figure, path)


def _draw_panel(axes: Axes, found: Sequence[Finding], adversary: str) -> None:
    for place, finding in enumerate(found):
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


def _verdict(found: Sequence[Finding]) -> str:
    lines = []
    for one in found:
        if one.audit is None:
            most = max(g.mean for groups in one.exposures.values() for g in groups.values())
            lines.append(f"{one.name}: nothing is promised; a group has up to {most:.1f} bits")
            continue
        said = "REFUTED" if one.refuted else "not refuted"
        lines.append(
            f"{one.name}: the card says at most {one.epsilon:.2f}, the codes prove at least "
            f"{one.audit.epsilon:.2f} of at most {one.ceiling:.2f}: {said}"
        )
    return "\n".join(lines)
