"""Checks a release against the node's policy and budget, and makes its ledger entry."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from flwr_privacy.accounting import Charge, fitting, new_accountant, spent
from flwr_privacy.errors import DeclinedError, ProtocolError
from flwr_privacy.privacy.ledger import Entry, Question
from flwr_privacy.wire.message import Fields

from .node_store import NodeRules, NodeStore

__all__ = [
    "ALLOW_UNPROTECTED",
    "ALLOW_VARIABLE",
    "PINS_VARIABLE",
    "UNPROVEN",
    "PlannedRelease",
    "check_code_limit",
    "check_policy",
    "check_shares",
    "check_simulated",
    "check_summed",
    "check_unaccounted",
    "check_unanswered",
    "check_unprotected",
    "check_unsummed",
    "question_of",
    "warn_once",
]

logger = logging.getLogger("flwr.privacy")

ALLOW_UNPROTECTED = "privacy-allow-unprotected"
ALLOW_VARIABLE = "FLWR_PRIVACY_ALLOW_UNPROTECTED"
"""Key of a node's configuration, and variable of its environment: schemes, with commas between."""

PINS_VARIABLE = "FLWR_PRIVACY_PINS"
"""Variable of a node's environment: the file with the other clients' long-term keys."""

UNPROVEN = "-unproven"
"""Ends the scheme of a ledger entry whose cost is claimed, or is not all."""

_ROUNDING = 1e-9  # relative; what float64 may move a sum of charges


def question_of(phase: str, fields: Fields) -> Question:
    """Return the ledger's key of the request that `SchemeClient.handle` got."""
    return Question(
        experiment_id=fields["experiment-id"],
        phase=phase,
        server_round=fields["round"],
        request=fields["request"],
    )


def check_code_limit(fields: Fields, largest: int) -> None:
    """Refuse a secure sum that cannot hold the largest possible code, whatever the codes are.

    Which noised codes it takes would say something of them.

    Raises
    ------
    ProtocolError
        If it does not; outside of a secure sum nothing is checked.
    """
    if fields.get("summed") and fields["code-limit"] < largest:
        raise ProtocolError(
            f"the secure sum takes codes up to {fields['code-limit']}, the noise needs {largest}"
        )


def check_policy(
    store: NodeStore,
    *,
    scheme: str,
    unit: str,
    noise_multiplier: float,
    sigma: float | None = None,
) -> None:
    """Decline a release that the node's policy does not allow; the node's log says why.

    Raises
    ------
    DeclinedError
        If the policy does not allow it; see `flwr_privacy.privacy.policy.Policy.check`.
    """
    try:
        store.policy.check(scheme=scheme, unit=unit, noise_multiplier=noise_multiplier, sigma=sigma)
    except DeclinedError as error:
        logger.warning("client %s declines: %s", store.client_id, error)
        raise


def check_unaccounted(
    rules: NodeRules,
    *,
    scheme: str,
    guarantees_dp: bool,
    sigma: float | None = 0.0,
    noised: bool = False,
) -> None:
    """Decline a release that no ledger is charged for, if the node's operator does not allow it.

    Parameters
    ----------
    rules : NodeRules
        What the operator of the node says.
    scheme : str
        Which scheme asks.
    guarantees_dp : bool
        Whether the client half promises differential privacy.
    sigma : float, optional
        Standard deviation (or Laplace scale) of its noise; by default it has none. None where it is
        not known yet: then the policy's ``min_sigma`` is not checked.
    noised : bool, default False
        Whether there is noise all the same, whose cost is charged but not proven.

    Raises
    ------
    DeclinedError
        If the policy does not name the scheme, or has a largest epsilon, units of protection, or
        more noise; or if `check_unprotected` declines an answer without noise.
    """
    policy = rules.policy
    try:
        policy.check(scheme=scheme, unit="user", noise_multiplier=0.0, sigma=sigma)
        if policy.max_epsilon is not None or policy.units is not None:
            raise DeclinedError(
                f"'{scheme}' has no budget: the node's policy has max_epsilon or units, so it "
                "answers only where a unit is protected"
            )
    except DeclinedError as error:
        _log_declined(rules, error)
        raise
    if not noised:
        check_unprotected(rules, scheme=scheme, guarantees_dp=guarantees_dp)


def check_unprotected(rules: NodeRules, *, scheme: str, guarantees_dp: bool) -> None:
    """Decline an answer without noise under a scheme that guarantees differential privacy.

    Simulated clients give it, and nodes whose operator lists the scheme in ``allow_unprotected``. A
    scheme that promises nothing answers as its class says, with a line in the node's log if no
    policy allows it.

    Raises
    ------
    DeclinedError
        If the scheme promises differential privacy, and neither holds.
    """
    if rules.simulated:
        return
    if not guarantees_dp:
        if not rules.has_policy_file:
            warn_once(
                f"answers leave this node without differential privacy: the scheme '{scheme}' "
                "promises none, and the node has no policy"
            )
        return
    if scheme in (rules.policy.allow_unprotected or ()):
        return
    error = DeclinedError(
        f"an answer without noise was asked for, and the scheme '{scheme}' promises differential "
        "privacy: this node gives it only if its operator lists the scheme in allow_unprotected "
        f"(policy, node configuration {ALLOW_UNPROTECTED}, or {ALLOW_VARIABLE})"
    )
    _log_declined(rules, error)
    raise error


def check_unsummed(rules: NodeRules) -> None:
    """Decline to answer outside of a secure sum if the node's policy asks for one.

    Raises
    ------
    DeclinedError
        If the policy has ``min_summed``.
    """
    check_summed(rules, 0)


def check_summed(rules: NodeRules, clients: int) -> None:
    """Decline to answer if fewer clients than the policy's ``min_summed`` are in the sum.

    Parameters
    ----------
    rules : NodeRules
        What the operator of the node says.
    clients : int
        How many are, at least; 0 outside of a sum.

    Raises
    ------
    DeclinedError
        If the policy has ``min_summed``, and it is larger.
    """
    try:
        rules.policy.check_sum(clients or None)
    except DeclinedError as error:
        _log_declined(rules, error)
        raise


def check_simulated(rules: NodeRules, phase: str) -> None:
    """Decline an answer that only simulated clients may give.

    Raises
    ------
    DeclinedError
        If the client is no simulated one.
    """
    if rules.simulated:
        return
    error = DeclinedError(f"the phase '{phase}' is answered in simulations only")
    _log_declined(rules, error)
    raise error


@lru_cache(maxsize=256)
def warn_once(text: str) -> None:
    """Log a warning once per process."""
    logger.warning(text)


def _log_declined(rules: NodeRules, error: DeclinedError) -> None:
    logger.warning("client %s declines: %s", rules.client_id, error)


def check_shares(store: NodeStore, parties: int, fields: Fields, *, noised: bool = True) -> float:
    """Decline to add only a share of the noise where too few other clients are in the sum.

    Parameters
    ----------
    store : NodeStore
        What the node keeps for the client.
    parties : int
        Honest clients for whose sum the shares are meant.
    fields : Fields
        What `SchemeClient.handle` got: what the client believes of the secure sum.
    noised : bool, default True
        Whether there is a share of noise; if not, the node needs no pins.

    Returns
    -------
    float
        Standard deviation of the noise that is in a sum whatever the server says, over that of the
        whole noise: at most 1, and less only in a sparse graph.

    Raises
    ------
    DeclinedError
        If there is no secure sum, its server may have made up the others, or the client counts on
        fewer honest ones.
    """
    try:
        _check_shares(store, parties, fields, noised)
    except DeclinedError as error:
        logger.warning("client %s declines: %s", store.client_id, error)
        raise
    return math.sqrt(min(1.0, fields["certain"] / parties))


def _check_shares(store: NodeStore, parties: int, fields: Fields, noised: bool) -> None:
    asked = f"noise in shares for a sum of at least {parties} honest clients was asked for"
    if not fields["summed"]:
        raise DeclinedError(f"{asked} outside of a secure sum: a share alone hides nothing")
    if noised and not store.simulated and store.pins is None:
        raise DeclinedError(
            f"{asked}, and this node pins no keys: a server may have made up all other clients. "
            "Name a file with their public keys as privacy-pins in the node's configuration or as "
            f"{PINS_VARIABLE} in its environment"
        )
    if fields["honest"] < parties:
        raise DeclinedError(
            f"{asked} in a secure sum in which this node counts on {fields['honest']}: of the "
            "clients that it pins, its policy's max_cohort and its own roster bear out, a fifth "
            "may collude with the server"
        )


def check_unanswered(question: Question, entries: Sequence[Entry]) -> None:
    """Decline to answer a request again if its sum may have been opened.

    Raises
    ------
    DeclinedError
        If the ledger has it.
    """
    if any(entry.question == question for entry in entries):
        raise DeclinedError(
            f"the question of round {question.server_round} was answered before, in a secure sum "
            "of its own: a second sum over the same round could give the answer away"
        )


@dataclass(frozen=True, kw_only=True)
class PlannedRelease:
    """A release that a server requested and that has not happened yet.

    Parameters
    ----------
    store : NodeStore
        What the node keeps for the client.
    question : Question
        Whose answer it is.
    scheme, unit : str
        Which scheme asks, and what it protects.
    charge : Charge
        What it costs.
    epsilon, delta : float
        Budget of the experiment.
    proven : bool, default True
        Whether the charge is all that it costs; if not, the ledger says so.
    digest : str, default ""
        Hash of the whole question.
    """

    store: NodeStore
    question: Question
    scheme: str
    unit: str
    charge: Charge
    epsilon: float
    delta: float
    proven: bool = True
    digest: str = ""

    def entry(self) -> Entry:
        """Return the ledger entry of the release."""
        name = self.scheme if self.proven else self.scheme + UNPROVEN
        return Entry(
            question=self.question,
            scheme=name,
            unit=self.unit,
            charge=self.charge,
            digest=self.digest,
        )

    def check_policy(self, noise_multiplier: float, sigma: float | None = None) -> None:
        """Decline the release if the node's policy does not allow its noise; see `check_policy`."""
        check_policy(
            self.store,
            scheme=self.scheme,
            unit=self.unit,
            noise_multiplier=noise_multiplier,
            sigma=sigma,
        )

    def check_affordable(self, entries: Sequence[Entry]) -> None:
        """Decline the release if the experiment's budget or the node's policy does not allow it.

        Parameters
        ----------
        entries : sequence of Entry
            The ledger so far.

        Raises
        ------
        DeclinedError
            If it would pass the one or the other.
        ProtocolError
            If the experiment has protected another unit before.
        """
        mine = [e for e in entries if e.question.experiment_id == self.question.experiment_id]
        if any(entry.unit != self.unit for entry in mine):
            raise ProtocolError(f"unit '{self.unit}': this experiment had another one before")
        # A cap is one accountant's; with another on the way it would not be proven.
        if any((entry.charge.sampling < 1) != (self.charge.sampling < 1) for entry in mine):
            raise ProtocolError(
                f"sampling {self.charge.sampling:g}: this experiment had "
                f"{'none' if self.charge.sampling < 1 else 'some'} before"
            )
        own = [entry.charge for entry in mine]
        cap = self.epsilon * (1 + _ROUNDING)
        if (after := self._passing(own, epsilon=cap, delta=self.delta)) is not None:
            before = spent(own, delta=self.delta, accountant=fitting(own))
            raise DeclinedError(
                f"the budget is spent: epsilon {before:.6g} of {self.epsilon:.6g} after "
                f"{len(own)} releases, and {after:.6g} with another one, at delta {self.delta:g}"
            )
        policy = self.store.policy
        if policy.max_epsilon is None:
            return
        if not self.proven or any(entry.scheme.endswith(UNPROVEN) for entry in entries):
            raise DeclinedError(
                "the node's policy has max_epsilon, and its ledger has releases whose cost is not "
                "proven, or would have one"
            )
        everything = [entry.charge for entry in entries]
        after = self._passing(everything, epsilon=policy.max_epsilon, delta=policy.delta)
        if after is not None:
            logger.warning(
                "client %s declines: the node's policy has max_epsilon = %.6g at delta %g: with "
                "this release epsilon would be %.6g",
                *(self.store.client_id, policy.max_epsilon, policy.delta, after),
            )
            # What the ledger holds of other experiments is nothing that this server should learn.
            raise DeclinedError(
                f"the node's policy has max_epsilon = {policy.max_epsilon:g} for all that it ever "
                "releases: this release would pass it"
            )

    def _passing(self, charges: Sequence[Charge], *, epsilon: float, delta: float) -> float | None:
        """Return the epsilon of the given charges and this one if it exceeds a cap, else None."""
        # The accountant's own check: a server may choose a charge after it saw the earlier
        # releases, and a total alone proves nothing then.
        name = fitting([*charges, self.charge])
        if epsilon > 0 and not new_accountant(name, charges).would_exceed(
            self.charge, epsilon=epsilon, delta=delta
        ):
            return None
        return spent([*charges, self.charge], delta=delta, accountant=name)
