"""Builds the request for a round's training under UDP: noise and budgets, and what answers cost."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from flwr_privacy.accounting import Charge
from flwr_privacy.privacy.card import CardRelease
from flwr_privacy.privacy.forecast import Forecast
from flwr_privacy.privacy.updates import released_names
from flwr_privacy.strategies.participants import Participants
from flwr_privacy.strategies.requests.instruction import Instruction, to_each
from flwr_privacy.udp import UDPPlan
from flwr_privacy.udp.plan import TrainingTerms
from flwr_privacy.udp.schedule import SECRET_NEIGHBOURS
from flwr_privacy.udp.sensitivity import USER_UNIT
from flwr_privacy.wire import fields as records
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.message import TRAIN

__all__ = ["SpentBudgets", "training_request"]

_OWN = ("noise-multiplier", "epsilon", "delta", "gap")  # fields that can differ between clients


class SpentBudgets:
    """The budget that each client's trainings have spent; see `UDPNoisePlan.multiplier`."""

    def __init__(self) -> None:
        self._squares: Counter[str] = Counter()
        self._counted = 0  # releases that are in it

    def after(self, releases: Sequence[CardRelease]) -> Counter[str]:
        """Return what each client has spent after some releases; the list only grows."""
        for release in releases[self._counted :]:
            if release.phase == TRAIN:
                cost = release.charge.count / release.charge.noise_multiplier**2
                self._squares.update(dict.fromkeys(release.clients, cost))
        self._counted = len(releases)
        return self._squares


def training_request(
    plan: UDPPlan,
    template: Arrays,
    participants: Participants,
    *,
    clients: Collection[str],
    spent: Callable[[], Counter[str]],
    honest: int,
) -> tuple[TrainingTerms, Instruction]:
    """Return the terms of all clients, and the instruction with those of single ones.

    Parameters
    ----------
    plan : UDPPlan
        The plan of the training.
    template : Mapping of str to ndarray
        The model.
    participants : Participants
        Say who is charged.
    clients : collection of str
        The clients, where each has its own noise or budget.
    spent : callable
        Returns what each client has spent so far.
    honest : int
        How many honest clients are at least in a secure sum, where there is one.
    """
    terms, own_terms = plan.terms(clients, spent(), honest=honest)
    written = {client: records.write(term) for client, term in own_terms.items()}

    def cost(client: str) -> Charge | None:
        theirs = own_terms.get(client, terms)
        if plan.privacy.own_terms and client not in own_terms:
            # It was asked before the run broke off, and has left.
            theirs = plan.own_terms(terms, client, spent()[client])
        charge = theirs.charge()
        if charge is None or not participants.secret:
            return charge
        return replace(charge, neighbours=SECRET_NEIGHBOURS, sampling=plan.q)

    def failed_sigma(clients: Collection[str]) -> float:
        return math.hypot(*(own_terms.get(c, terms).failed_sigma() for c in clients))

    def forecast(asked: int) -> Forecast:
        weights = sum(np.size(template[n]) for n in released_names(template, terms.keep_back))
        return forecast_of(terms, weights=weights, clients=asked, rounds=plan.pace.planned)

    return terms, Instruction(
        fields=records.write(terms),
        own=to_each({c: {name: f[name] for name in _OWN} for c, f in written.items()}),
        accumulator=partial(terms.accumulator, template),
        cost=cost,
        charged=participants.charged,
        failed_sigma=failed_sigma if terms.count_failed else None,
        hidden=participants.secret,
        forecast=forecast if terms.noise_multiplier else None,
    )


def forecast_of(terms: TrainingTerms, *, weights: int, clients: int, rounds: int) -> Forecast:
    """Return what the noise of some terms leaves of a training."""
    remedies: tuple[str, ...] = ()
    if terms.unit == USER_UNIT:
        remedies = ("RecordLevel",)
    elif not terms.falls_with_records:
        remedies = ("a single step (local_epochs=1 and no batch_size)",)
    forecast = Forecast(
        ratio=terms.noise_ratio(clients),
        weights=weights,
        clients=clients,
        rounds=rounds,
        own_noise=not terms.parties,
        per_record=terms.falls_with_records,
        remedies=remedies,
    )
    if terms.unit == USER_UNIT and forecast.own_noise and forecast.learns <= math.sqrt(clients):
        return replace(forecast, remedies=(*forecast.remedies, "shared_noise=True"))
    return forecast
