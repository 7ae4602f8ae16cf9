"""Verifies a privacy card: makes all checks, and concludes what they come to."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr_privacy.accounting.charges import RELATIONS
from flwr_privacy.errors import check_choice, check_number
from flwr_privacy.privacy.card import PrivacyCard

from .evidence import Evidence
from .findings import FAILED, OUTCOMES, PASSED, Finding, Outcome, failed, passed, unknown
from .node_checks import Confirmed, check_heads, check_ledgers
from .server_checks import (
    Numbers,
    check_asked,
    check_attacker,
    check_charges,
    check_experiment,
    check_released,
    check_rounds,
    check_valid,
)

__all__ = ["MEANINGFUL", "Verification", "Wanted", "verify"]

MEANINGFUL = 20.0
"""Epsilon above which a guarantee is accepted only by somebody who states a larger one."""

_SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What whoever verifies accepts.

    Parameters
    ----------
    max_epsilon : float, default MEANINGFUL
        The largest epsilon, promised or spent.
    neighbours : {"add_remove", "replace_one", "zero_out"}, optional
        The relation that epsilon has to be for; by default any.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    max_epsilon: float = MEANINGFUL
    neighbours: str | None = None

    def __post_init__(self) -> None:
        check_number("--max-epsilon", self.max_epsilon, minimum=0)
        if self.neighbours is not None:
            check_choice("--neighbours", self.neighbours, RELATIONS)


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What was found out about a card.

    Parameters
    ----------
    card : PrivacyCard
        The card.
    findings : tuple of Finding
        One for each check.
    outcome : Outcome
        What they come to.
    numbers : dict
        Stated and recomputed epsilon by accountant; empty if they do not agree.
    """

    card: PrivacyCard
    findings: tuple[Finding, ...]
    outcome: Outcome
    numbers: Numbers = field(default_factory=dict)

    def sentence(self) -> str:
        """Return the outcome as a sentence, with what it is about."""
        of = f"{len(self.card.releases)} releases of {len(self.card.charges())} clients"
        reason = next((f". Reason: {f.detail}" for f in self.findings if self._is_reason(f)), "")
        return f"{self.outcome.name}: {of}: {self.outcome.meaning}{reason}"

    def _attacker(self) -> dict[str, Any] | None:
        if self.card.attacker is None:
            return None
        values = self.card.attacker.to_dict()
        epsilons = {delta: _plain(epsilon) for delta, epsilon in values["epsilon"].items()}
        return {**values, "epsilon": epsilons}

    def _is_reason(self, finding: Finding) -> bool:
        return finding.result == FAILED and finding.outcome == self.outcome.name

    def to_dict(self) -> dict[str, Any]:
        """Return all as plain values, for JSON; infinity is the text ``infinite``."""
        guarantee = self.card.guarantee
        return {
            "schema": _SCHEMA,
            "outcome": self.outcome.name,
            "exit_code": self.outcome.exit_code,
            "sentence": self.sentence(),
            "experiment_id": self.card.experiment_id,
            "scheme": guarantee.scheme,
            "guarantee": guarantee.text(),
            "delta": guarantee.delta,
            "epsilon": {
                "promised": _plain(guarantee.epsilon),
                "recomputed": {name: _plain(own) for name, (_, own) in self.numbers.items()},
            },
            "attacker": self._attacker(),
            "releases": len(self.card.releases),
            "clients": len(self.card.charges()),
            "charged": self.card.answers().charged,
            "findings": [
                {"check": f.check, "result": f.result, "detail": f.detail} for f in self.findings
            ],
        }


def verify(evidence: Evidence, wanted: Wanted | None = None) -> Verification:
    """Make all checks that the evidence allows.

    Parameters
    ----------
    evidence : Evidence
        The card, and what it is compared with.
    wanted : Wanted, optional
        What is accepted.
    """
    card, run, nodes = evidence.card, evidence.run, evidence.nodes
    charges, numbers = check_charges(card)
    findings = [charges, check_attacker(card), check_valid(card, run), check_released(card)]
    findings += _check_wanted(card, numbers, wanted or Wanted())
    if run is None:
        findings.append(unknown("rounds", "a card alone: no metrics.jsonl beside it is looked at"))
    else:
        findings += [check_experiment(card, run), check_rounds(card, run), check_asked(card, run)]
        if run.ledgers:
            findings.append(check_ledgers("folder's ledgers", card, run.ledgers)[0])
    confirmed = Confirmed()
    findings += check_heads(card, nodes.pins, nodes.heads, confirmed)
    if nodes.ledgers:
        finding, alike = check_ledgers("nodes' ledgers", card, nodes.ledgers)
        findings.append(finding)
        confirmed.whole |= alike
    return Verification(
        card=card,
        findings=tuple(findings),
        outcome=_outcome(evidence, findings, confirmed),
        numbers=numbers,
    )


def _check_wanted(card: PrivacyCard, numbers: Numbers, wanted: Wanted) -> list[Finding]:
    """Compare epsilon and its neighbours with what is accepted."""
    findings = []
    promised = card.guarantee.epsilon
    spent = min((own for _, own in numbers.values()), default=0.0)
    largest = max(spent, promised or 0.0)
    if largest > wanted.max_epsilon:
        text = (
            f"epsilon {largest:.6g} is above the largest that is accepted, {wanted.max_epsilon:g}"
        )
        if wanted.max_epsilon == MEANINGFUL:
            text += " (above it no promise is meaningful; --max-epsilon accepts a larger one)"
        findings.append(failed("epsilon", text, "policy"))
    elif numbers:
        findings.append(passed("epsilon", f"{largest:.6g}, at most {wanted.max_epsilon:g}"))
    if wanted.neighbours is not None:
        relation = card.relation()
        if relation not in (None, wanted.neighbours):
            text = f"epsilon is for {relation} and not for {wanted.neighbours}"
            findings.append(failed("neighbours", text, "policy"))
        else:
            findings.append(passed("neighbours", wanted.neighbours))
    return findings


def _outcome(evidence: Evidence, findings: Sequence[Finding], confirmed: Confirmed) -> Outcome:
    wrong = {finding.outcome for finding in findings if finding.result == FAILED}
    for name, outcome in OUTCOMES.items():
        if name in wrong:
            return outcome
    charged = evidence.card.charges().keys()
    if charged <= confirmed.whole:
        return OUTCOMES["verified"]
    # Whoever has pins, heads or ledgers expects nodes: that the server says there are none is not
    # enough then.
    if evidence.run is not None and evidence.run.simulated and not evidence.nodes:
        return OUTCOMES["simulated"]
    if charged <= confirmed.whole | confirmed.signed:
        return OUTCOMES["signed"]
    if charged <= confirmed.whole | confirmed.signed | confirmed.declared:
        return OUTCOMES["self-declared"]
    compared = any(f.check == "rounds" and f.result == PASSED for f in findings)
    return OUTCOMES["consistent" if compared else "arithmetic"]


def _plain(value: float | None) -> float | str | None:
    return "infinite" if value == math.inf else value
