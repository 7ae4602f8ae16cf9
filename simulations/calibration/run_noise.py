"""Computes the noise of a run from its settings, as the strategy plans it, without a training."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from flwr_privacy.accounting import ACCOUNTANTS, Charge, spent, supports
from flwr_privacy.acfl.plan import ACFLPlan
from flwr_privacy.acfl.terms import RECORD
from flwr_privacy.central_dp.sensitivity import SERVER
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.m2fdp.tree.exchanges import boundary_tier
from flwr_privacy.simulations.app.server_app import build_strategy, initial_arrays
from flwr_privacy.simulations.settings.run_settings import Settings
from flwr_privacy.strategies import ACFL, M2FDP, UDP, CentralDP
from flwr_privacy.udp import DPSGD

from .udp_run import run_plan

__all__ = ["PlannedCharges", "planned_charges", "report"]


@dataclass(frozen=True, kw_only=True)
class PlannedCharges:
    """What the training costs some clients.

    Parameters
    ----------
    clients : str
        Which clients.
    releases : tuple of (str, Charge, int)
        The phase, the charge of one release, and how many of them a client pays at most.
    note : str, default ""
        What else is to be said of the noise.
    """

    clients: str
    releases: tuple[tuple[str, Charge, int], ...]
    note: str = ""

    def epsilons(self, delta: float) -> dict[str, float]:
        """Return the epsilon of all releases together, by the accountants that know them."""
        charges = [replace(c, count=c.count * times) for _, c, times in self.releases]
        knowing = [name for name in ACCOUNTANTS if all(supports(c, name) for c in charges)]
        return {name: spent(charges, delta=delta, accountant=name) for name in knowing}


def planned_charges(settings: Settings) -> list[PlannedCharges]:
    """Return what the training of some settings costs its clients.

    Raises
    ------
    InvalidParameterError
        If the scheme has no noise that is planned in advance.
    """
    strategy, clients = build_strategy(settings, None), settings.clients or 1
    rounds, q = settings.rounds, (settings.per_round or clients) / clients
    if isinstance(strategy, CentralDP):
        # As the strategy asks so many of its clients: rounded down, and one at least.
        evaluating = max(1, math.floor(clients * strategy.fraction_evaluate + 1e-9)) / clients
        arrays = {name: array.numpy() for name, array in initial_arrays(settings).items()}
        choice = strategy.budget.choice_of(arrays, rounds=rounds, q=q, evaluation_q=evaluating)
        central = choice.plan
        evaluation = None
        if central.evaluations:
            evaluation = Charge(
                noise_multiplier=central.evaluation_multiplier,
                neighbours=central.relation,
                gap=central.gap,
            )
        trainings = Counter(central.charge(1 + made) for made in range(central.releases))
        costs = [("train", charge, times) for charge, times in trainings.items()]
        note = choice.text if central.noise == SERVER else ""
        return list(_alike([*costs, ("evaluate", evaluation, central.evaluations)], note=note))
    if isinstance(strategy, UDP) and isinstance(strategy.privacy, DPSGD):
        private = run_plan(strategy.privacy, strategy.evaluation, rounds=rounds, q=q)
        terms, _ = private.terms([], {}, honest=0)
        evaluation = None
        if private.evaluations:
            evaluation = private.evaluation_terms().charge()
        steps = ("train", terms.charge(), private.weakest().releases)
        note = f"a training has {strategy.privacy.steps} steps, each with a sample and a noise"
        return list(_alike([steps, ("evaluate", evaluation, private.evaluations or 0)], note=note))
    if isinstance(strategy, ACFL) and strategy.privacy.noise == RECORD:
        model = next(iter(initial_arrays(settings).values())).numpy()
        coded = ACFLPlan(options=strategy.options, **_shape(model), rounds=rounds)
        honest = 0 if settings.secure_sum is None else settings.secure_sum.parties_of(clients)
        setup = coded.setup_terms(parties=honest).charge()
        train = coded.gradient_terms(model, parties=honest).charge()
        evaluation = None
        if coded.evaluations:
            evaluation = coded.evaluation_terms(parties=honest).charge()
        evaluations = ("evaluate", evaluation, coded.evaluations)
        return list(_alike([("setup", setup, 1), ("train", train, rounds), evaluations]))
    if isinstance(strategy, M2FDP) and strategy.control is None and strategy.privacy.noised:
        return list(_by_boundary(strategy, rounds))
    allowed = "noise that is planned in advance, and so no m2fdp with control"
    raise InvalidParameterError("scheme", settings.scheme, allowed)


def _shape(model: NDArray[Any]) -> dict[str, int]:
    return dict(zip(("features", "labels"), model.shape, strict=True))


def _alike(
    releases: Sequence[tuple[str, Charge | None, int]], note: str = ""
) -> Iterator[PlannedCharges]:
    """Yield what all clients pay alike; nothing without noise."""
    noised = tuple(
        (phase, charge, times) for phase, charge, times in releases if charge is not None
    )
    if noised:
        yield PlannedCharges(clients="each client", releases=noised, note=note)


def _by_boundary(strategy: M2FDP, rounds: int) -> Iterator[PlannedCharges]:
    """Yield what devices pay, those together whose noise enters at one tier at equal charges."""
    plan = strategy.first_plan(rounds)
    tree = plan.tree
    found: Counter[tuple[int, tuple[tuple[Charge, int], ...]]] = Counter()
    for leaf in tree.tiers[tree.depth - 1]:
        paid: dict[int, Charge] = {}  # by period: its exchanges share a charge
        for exchange in plan.exchanges:
            asked = exchange.leaves.get(leaf)
            charge = None if asked is None else plan.release_of(leaf, exchange).charge()
            if asked is not None and charge is not None:
                paid[asked.period] = charge
        counted = Counter(paid.values())
        found[boundary_tier(tree, leaf), tuple(counted.items())] += len(tree.children(leaf))
    evaluated: tuple[tuple[str, Charge, int], ...] = ()
    if plan.evaluation is not None:
        evaluated = (("evaluate", plan.evaluation_terms().charge(), plan.evaluations),)
    for (tier, charges), devices in found.items():
        where = "the device" if tier == tree.depth else f"tier {tier}"
        yield PlannedCharges(
            clients=f"{devices} devices, noise at {where}",
            releases=(
                *(
                    ("train", charge, count * plan.rounds_of_device(tier))
                    for charge, count in charges
                ),
                *evaluated,
            ),
        )


def report(settings: Settings) -> str:
    """Return the noise of a run and what it costs, as lines of text.

    Raises
    ------
    InvalidParameterError
        If the scheme has no noise that is planned in advance.
    """
    promised = build_strategy(settings, None).guarantee()
    delta, asked = promised.delta or 0.0, settings.per_round or settings.clients
    lines = [
        f"{settings.scheme}: {settings.rounds} rounds of {asked} of {settings.clients} clients",
        f"protects {promised.protects} against {promised.adversary}, for data sets where "
        f"{promised.neighbours}",
    ]
    for cost in planned_charges(settings):
        lines.append(f"{cost.clients}:")
        for phase, charge, times in cost.releases:
            sample = f", sampled at {charge.sampling:.6g}" if charge.sampling < 1 else ""
            lines.append(
                f"  {phase}: noise multiplier {charge.noise_multiplier:.6g} ({charge.neighbours})"
                f"{sample}, gap {charge.gap:.3g}; {times * charge.count} releases at most"
            )
        lines += [f"  {cost.note}"] if cost.note else []
        told = [f"{value:.6g} ({name})" for name, value in cost.epsilons(delta).items()]
        lines.append(f"  epsilon at delta {delta:g}: {', '.join(told)}")
    return "\n".join(lines)
