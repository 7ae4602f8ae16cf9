"""Looks for the secret codes of clients in a fine-tuned model, and in what its server sees."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .exposure import code_scores, exposure
from .fine_tuning import Federation, Method, fine_tune
from .planted import GROUPS, Group, Planted
from .pretraining import loss_on

__all__ = ["MODEL", "SERVER", "Measured", "attack", "judged"]

MODEL, SERVER = "the model", "the server"
"""Who looks: everybody who gets the model; one who also sees what each client sends."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one fine-tuning tells of the codes.

    Parameters
    ----------
    loss : float
        Of the model on new sentences of the clients.
    epsilon : float, optional
        By the card; None where nothing is guaranteed.
    exposures : dict of str to dict of str to list of float
        For the model, and for the server if it sees more, by group, in bits.
    margins : list of float
        For each code that the guarantee is about, how much likelier the second one of its two is
        than the first, to whoever sees most; empty where nothing is guaranteed.
    coins : list of bool
        For each of these, whether the second one is in the text.
    """

    loss: float
    epsilon: float | None
    exposures: dict[str, dict[str, list[float]]]
    margins: list[float]
    coins: list[bool]


def attack(
    method: Method,
    federation: Federation,
    planted: Sequence[Planted],
    unseen: Sequence[NDArray[np.int64]],
    *,
    epsilon: float,
    one_factor: bool = False,
) -> Measured:
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
    adversaries = {MODEL: [tuned.model] * len(planted)}
    if tuned.seen:
        adversaries[SERVER] = [
            tuned.seen[str(code.clients[0])] if code.clients else tuned.model for code in planted
        ]
    exposures, margins = {}, np.empty(0)
    for adversary, models in adversaries.items():
        scores = [
            code_scores(model, code.name, code.noun)
            for model, code in zip(models, planted, strict=True)
        ]
        exposures[adversary] = {
            str(group): [
                exposure(own, code.secret)
                for own, code in zip(scores, planted, strict=True)
                if code.group == group
            ]
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
    coins = np.array([code.coin for code in planted])
    return Measured(
        loss=loss_on(tuned.model, unseen),
        epsilon=tuned.epsilon,
        exposures=exposures,
        margins=margins[promised].tolist(),
        coins=coins[promised].tolist(),
    )


def judged(method: Method) -> tuple[Group, ...]:
    """Return the groups whose codes a method's guarantee is about."""
    if method.unit == "user":
        return tuple(group for group in GROUPS if group.clients == 1)
    if method.unit == "record":
        return tuple(g for g in GROUPS if g.clients == 1 and g.repetitions == 1)
    return ()
