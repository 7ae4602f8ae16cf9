"""Puts together what fine-tunings with several seeds tell, and compares LoRA with FFA-LoRA."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.simulations.reports.comparison.spread import mean_and_error
from flwr_privacy.simulations.research.attacks.one_run_fdp import FDPAudit, fdp_audit
from flwr_privacy.simulations.research.experiments.verdicts import verdict_of

from .attack import Measured
from .exposure import Exposed, exposed
from .fine_tuning import DELTA, Method
from .planted import GROUPS, Group

__all__ = ["CONFIDENCE", "Compared", "Finding", "compared", "pooled"]

CONFIDENCE = 0.99
"""Of each bound that guesses prove."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Finding:
    """What the fine-tunings by one method tell of the codes, over all seeds.

    Parameters
    ----------
    method : Method
        How the model was fine-tuned.
    one_factor : bool
        Whether by FFA-LoRA.
    losses : list of float
        Of the model on new sentences of the clients, by seed.
    epsilon : float, optional
        The largest of the cards; None where nothing is guaranteed.
    exposures : dict of str to dict of Group to Exposed
        For the model, and for the server if it sees more, by group: of the codes of all seeds.
    audit : FDPAudit, optional
        What guesses of the coins of promised codes prove, by all that the adversary of the
        guarantee sees; None where nothing is guaranteed.
    ceiling : float, optional
        What they would prove with all guesses right.
    """

    method: Method
    one_factor: bool
    losses: list[float]
    epsilon: float | None
    exposures: dict[str, dict[Group, Exposed]]
    audit: FDPAudit | None
    ceiling: float | None

    @property
    def name(self) -> str:
        """The method and its adapters."""
        return f"{self.method.name}, FFA" if self.one_factor else self.method.name

    @property
    def loss(self) -> tuple[float, float]:
        """The mean loss and its standard error, which is NaN with one seed."""
        return mean_and_error(self.losses)

    @property
    def refuted(self) -> bool:
        """Whether more was proven than the card says."""
        return self.audit is not None and self.audit.epsilon > (self.epsilon or 0.0)


def pooled(method: Method, *, one_factor: bool, measured: Sequence[Measured]) -> Finding:
    """Put the fine-tunings by one method together.

    Parameters
    ----------
    method : Method
        How.
    one_factor : bool
        Whether by FFA-LoRA.
    measured : sequence of Measured
        At least one, each with a seed of its own.

    Notes
    -----
    Coins of all seeds are guessed together. Trainings on other clients' text with noise of their
    own are one mechanism, which for a change of one code is as private as the training it is in.
    """
    margins = np.concatenate([one.margins for one in measured])
    coins = np.concatenate([np.asarray(one.coins, bool) for one in measured])
    spent = [one.epsilon for one in measured if one.epsilon is not None]
    return Finding(
        method=method,
        one_factor=one_factor,
        losses=[one.loss for one in measured],
        epsilon=max(spent, default=None),
        exposures={
            adversary: {
                group: exposed(
                    [bits for one in measured for bits in one.exposures[adversary][str(group)]]
                )
                for group in GROUPS
            }
            for adversary in measured[0].exposures
        },
        audit=_audit(margins, coins) if method.unit else None,
        ceiling=_audit(coins, coins).epsilon if method.unit else None,
    )


@dataclass(frozen=True, kw_only=True)
class Compared:
    """FFA-LoRA against LoRA, seed by seed.

    Parameters
    ----------
    name : str
        The method.
    mean, error : float
        By how much the loss with FFA-LoRA is lower, and its standard error (NaN with one seed).
    verdict : str
        Of the claim that it is lower, by the rule of experiments: a paired test of 5 seeds or more.
    """

    name: str
    mean: float
    error: float
    verdict: str


def compared(found: Sequence[Finding]) -> list[Compared]:
    """Compare the losses with FFA-LoRA and with LoRA, for each method that has both."""
    both = {(one.method.name, one.one_factor): one for one in found}
    comparisons = []
    for (name, one_factor), ffa in both.items():
        if one_factor:
            differences = np.subtract(both[name, False].losses, ffa.losses)
            mean, error, verdict = verdict_of(differences)
            comparisons.append(Compared(name=name, mean=mean, error=error, verdict=verdict))
    return comparisons


def _audit(scores: NDArray[np.float64], coins: NDArray[np.bool_]) -> FDPAudit:
    return fdp_audit(scores, coins, guesses=len(coins) // 2, delta=DELTA, confidence=CONFIDENCE)
