"""Checks a card by itself, and against what the server wrote beside it."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from flwr_privacy.errors import DataError
from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.privacy.card.asked_file import text_of
from flwr_privacy.privacy.card.attacker import AttackerBound
from flwr_privacy.privacy.card.folder import TEST_SEED
from flwr_privacy.wire.message import EVALUATE, INSECURE, TRAIN

from .evidence import RunFiles
from .findings import Finding, failed, passed, unknown

__all__ = [
    "check_asked",
    "check_attacker",
    "check_charges",
    "check_experiment",
    "check_released",
    "check_rounds",
    "check_valid",
]

_TOLERANCE = 1e-6  # relative; what rounding and another version of a library may move

Numbers = Mapping[str, tuple[float, float]]
"""Stated and recomputed epsilon by accountant."""


def check_charges(card: PrivacyCard) -> tuple[Finding, Numbers]:
    """Recompute epsilon from the charges; return it beside the finding."""
    try:
        numbers = card.verify()
    except DataError as error:
        return failed("charges", str(error)), {}
    return passed("charges", "they give the epsilon that the card states"), numbers


def check_attacker(card: PrivacyCard) -> Finding:
    """Recompute what epsilon means for an attacker."""
    stated = card.attacker
    if stated is None:
        return unknown("attacker", "the card does not say what its epsilon means for an attacker")
    again = replace(card)
    again.state([stated.accountant])
    own = again.attacker
    if own is None or not all(
        _close(one, other) for one, other in zip(_bounds(stated), _bounds(own), strict=True)
    ):
        return failed("attacker", "the charges give other bounds than the card states")
    return passed("attacker", f"an advantage of at most {own.advantage:.4g}, as the card states")


def check_released(card: PrivacyCard) -> Finding:
    """Look whether the card has anything that can be verified."""
    guarantee = card.guarantee
    if guarantee.adversary == "nobody":
        return failed("promise", f"{guarantee.scheme} protects nobody's data", "nothing")
    if not any(release.clients for release in card.releases):
        return failed("promise", "the card has no release: nothing was charged", "nothing")
    if not card.stated:
        return failed("promise", "the card states no epsilon", "nothing")
    return passed("promise", f"{guarantee.scheme} states an epsilon")


def check_valid(card: PrivacyCard, run: RunFiles | None) -> Finding:
    """Look whether something voids the guarantee, whether or not the card says so."""
    if card.guarantee.void:
        return failed("valid", card.guarantee.void, "void")
    seeded = card.experiment_id.startswith(TEST_SEED)
    if run is not None:
        seeded |= run.summary is not None and run.summary.get("test_seed") is not None
        seeded |= any(
            INSECURE in (line.get(phase) or {})
            for line in run.lines or ()
            for phase in (TRAIN, EVALUATE)
        )
    if seeded:
        return failed("valid", "noise was drawn from a seed, and the card does not say so", "void")
    return passed("valid", "nothing in this run voids the guarantee")


def check_experiment(card: PrivacyCard, run: RunFiles) -> Finding:
    """Compare the card's experiment with that of the run folder."""
    if run.summary is None:
        return unknown("experiment", "the folder has no summary.json")
    if run.summary.get("experiment_id") != card.experiment_id:
        return failed("experiment", "summary.json is of another experiment")
    return passed("experiment", "it is that of summary.json")


def check_rounds(card: PrivacyCard, run: RunFiles) -> Finding:
    """Compare charges and epsilon with the lines of the rounds."""
    if not run.lines:
        return unknown("rounds", "the folder has no metrics.jsonl with a round")
    charged = Counter[int]()
    for release in card.releases:
        charged[release.server_round] += len(release.clients)
    for line in run.lines:
        here = sum(count for number, count in charged.items() if number <= line["round"])
        if "charged" in line and here < line["charged"]:
            where = f"after round {line['round']}"
            return failed(
                "rounds",
                f"metrics.jsonl counts {line['charged']} charges {where}, the card has {here}",
            )
    last = run.lines[-1]
    total = card.answers().charged
    if max(charged, default=0) <= last["round"]:  # later rounds are not over
        if total != last.get("charged", total):
            text = f"metrics.jsonl counts {last['charged']} charges in all, the card has {total}"
            return failed("rounds", text)
        stated, spent = _epsilon_of(last.get("scheme") or {}), card.guarantee.spent
        if not (stated is None or spent is None or _close(stated, spent)):
            text = f"metrics.jsonl says that epsilon {stated:.6g} was spent, the card {spent:.6g}"
            return failed("rounds", text)
    return passed("rounds", f"metrics.jsonl counts the same {total} charges")


def check_asked(card: PrivacyCard, run: RunFiles) -> Finding:
    """Look whether requests were sent that the card does not have."""
    if run.asked is None:
        return passed("requests", "none was sent after the card was written")
    if run.asked.experiment_id != card.experiment_id:
        return unknown("requests", "asked.json is of another experiment")
    charged: dict[str, set[str]] = {}
    for release in card.releases:
        name = text_of(release.phase, release.server_round, release.request)
        charged.setdefault(name, set()).update(release.clients)
    lacking = sum(
        len(costs.keys() - charged.get(name, set())) for name, costs in run.asked.asked.items()
    )
    if lacking:
        return failed(
            "requests",
            f"asked.json has {lacking} requests that the card has no charge of: the run was "
            "interrupted. Its card is whole when the run has gone on",
        )
    return passed("requests", "the card has the charges of all that asked.json names")


def _epsilon_of(scheme: Mapping[str, object]) -> float | None:
    value = scheme.get("epsilon")
    return float(value) if isinstance(value, int | float) else None


def _bounds(bound: AttackerBound) -> tuple[float, ...]:
    return (bound.advantage, *bound.true_positives, *bound.epsilons)


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
