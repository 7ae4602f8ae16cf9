"""Checks the cost of a release against the budget and the ledger, and makes its ledger entry."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from flwr_privacy.accounting import Charge
from flwr_privacy.errors import DeclinedError, InvalidParameterError, ProtocolError
from flwr_privacy.privacy.ledger import Entry

from .mechanism import ReleasePlan
from .node_store import NodeStore
from .participation_limits import participation
from .request import Request

if TYPE_CHECKING:
    from flwr_privacy.privacy.ledger import LedgerView

__all__ = ["UNPROVEN", "PlannedRelease"]

logger = logging.getLogger("flwr.privacy")

UNPROVEN = "-unproven"
"""Ends the scheme of a ledger entry whose cost is claimed, or is not all."""

_ROUNDING = 1e-9  # relative; what float64 may move a sum of charges


@dataclass(frozen=True)
class PlannedRelease:
    """A release that a server requested and that has not happened yet.

    Parameters
    ----------
    store : NodeStore
        What the node keeps for the client.
    request : Request
        What the server asks for.
    plan : ReleasePlan
        What it costs, and the budget of the experiment.

    Raises
    ------
    ValueError
        If the plan has no charge.
    """

    store: NodeStore
    request: Request
    plan: ReleasePlan

    def __post_init__(self) -> None:
        if self.plan.charge is None:
            raise ValueError("there is nothing to charge")

    @property
    def charge(self) -> Charge:
        """What the release costs."""
        return cast(Charge, self.plan.charge)

    def numbered(self, ledger: "LedgerView") -> "PlannedRelease":
        """Return the release with the charge of the client's next participation.

        Parameters
        ----------
        ledger : LedgerView
            The ledger so far, under its lock.

        Raises
        ------
        DeclinedError
            If the limit of its plan does not allow another one: see
            `flwr_privacy.pipeline.participation_limits.participation`.
        """
        plan = self.plan
        if plan.limit is None or plan.charges is None:
            return self
        number = participation(self.store, ledger, self.request, plan.limit)
        return replace(self, plan=replace(plan, charge=plan.charges(number)))

    def entry(self) -> Entry:
        """Return the ledger entry of the release."""
        request, plan = self.request, self.plan
        return Entry(
            question=request.question,
            scheme=request.scheme if plan.proven else request.scheme + UNPROVEN,
            unit=plan.unit,
            charge=self.charge,
            # Where a parent adds the noise, the charge is for several requests.
            digest="" if plan.noise_follows else request.digest,
        )

    def check_affordable(self, ledger: "LedgerView") -> None:
        """Decline the release if the experiment's budget or the node's policy does not allow it.

        Parameters
        ----------
        ledger : LedgerView
            The ledger so far.

        Raises
        ------
        DeclinedError
            If it would pass the one or the other.
        ProtocolError
            If the experiment has protected another unit before, or for other neighbours.
        """
        plan, experiment_id = self.plan, self.request.question.experiment_id
        mine = ledger.totals(experiment_id)
        if mine.units - {plan.unit}:
            raise ProtocolError(f"unit '{plan.unit}': this experiment had another one before")
        relation = self.charge.neighbours
        if any(one.neighbours != relation for one in mine.charges):
            raise ProtocolError(f"neighbours '{relation}': this experiment had others before")
        # A cap is one accountant's; with another on the way it would not be proven. The oldest
        # charge decides: after a sampled one it is that of samples, which knows the others too.
        if mine.charges and mine.charges[0].sampling == 1 and self.charge.sampling < 1:
            raise ProtocolError(
                f"sampling {self.charge.sampling:g}: this experiment began with none"
            )
        own = mine.charges
        cap = plan.epsilon * (1 + _ROUNDING)
        after = _passing(own, self.charge, epsilon=cap, delta=plan.delta)
        if after is not None:
            before = _total(own, plan.delta)
            raise DeclinedError(
                f"the budget is spent: epsilon {before:.6g} of {plan.epsilon:.6g} after "
                f"{mine.count} releases, and {after:.6g} with another one, at delta {plan.delta:g}"
            )
        policy = self.store.policy
        if policy.max_epsilon is None:
            return
        everything = ledger.totals()
        if not plan.proven or any(scheme.endswith(UNPROVEN) for scheme in everything.schemes):
            raise DeclinedError(
                "the node's policy has max_epsilon, and its ledger has releases whose cost is not "
                "proven, or would have one"
            )
        after = self._passing_all(everything.charges)
        if after is not None:
            logger.warning(
                "client %s declines: the node's policy has max_epsilon = %.6g at delta %g for the "
                "neighbours '%s': with this release epsilon would be %.6g",
                *(self.store.client_id, policy.max_epsilon, policy.delta, policy.relation, after),
            )
            # What the ledger holds of other experiments is nothing that this server should learn.
            raise DeclinedError(
                f"the node's policy has max_epsilon = {policy.max_epsilon:g} for all that it ever "
                "releases: this release would pass it"
            )

    def _passing_all(self, charges: Sequence[Charge]) -> float | None:
        """Return the epsilon of everything and this release if it exceeds ``max_epsilon``."""
        policy = self.store.policy
        try:
            *before, charge = policy.counted([*charges, self.charge])
        except InvalidParameterError:  # nothing bounds what was charged for other neighbours
            return math.inf
        return _passing(before, charge, epsilon=policy.max_epsilon or 0.0, delta=policy.delta)


def _passing(
    charges: Sequence[Charge], charge: Charge, *, epsilon: float, delta: float
) -> float | None:
    """Return the epsilon of the given charges and another one if it exceeds a cap, else None."""
    # Imported late: a node that charges nothing has no accountant.
    from flwr_privacy.accounting import fitting, new_accountant

    # The accountant's own check, a filter: a server may choose a charge after it saw the earlier
    # releases, and a total alone proves nothing then.
    accountant = new_accountant(fitting([*charges, charge]), charges)
    if epsilon > 0 and not accountant.would_exceed(charge, epsilon=epsilon, delta=delta):
        return None
    return _total([*charges, charge], delta)


def _total(charges: Sequence[Charge], delta: float) -> float:
    """Return the epsilon of some charges, by the accountant that caps them."""
    from flwr_privacy.accounting import fitting, spent  # late, as above

    return spent(charges, delta=delta, accountant=fitting(charges))
