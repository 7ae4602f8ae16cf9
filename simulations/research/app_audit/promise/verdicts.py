"""What an app's promise is worth: its parameters, its noise, and the coins of canaries.

All tests of a report are one family: by Holm's method the chance that any of them refutes a
promise that is kept is at most 5 %. Checks without statistics make no such error.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flwr_privacy.accounting import REPLACE_ONE
from flwr_privacy.simulations.research.audits.evidence import Evidence
from flwr_privacy.simulations.research.audits.verdicts import LEVEL, holm

from ..findings import CANNOT_TELL, NOT_REFUTED, NOTE, REFUTED, Finding, Table
from ..target import Target
from ..transcript import Transcript
from .canary_tests import CoinTest, coin_tests
from .claims import STATED, Claim, claims_of, mechanisms_of
from .played import Played, with_clients, with_records
from .structure import (
    MODEL,
    SERVER,
    composed,
    lonely_sums,
    noise_evidence,
    parameters,
    without_noise,
)
from .training_rounds import TrainingRound, rounds_of, rounds_run, uneven_weights

__all__ = ["promise"]

_UNEVEN = 1.01  # largest weight over the mean, above which it is said
_MOST = 100.0  # epsilon from which on an estimate says only that there is next to no noise
_CHANCE = "half of the guesses"
_UNSEEN = (
    " Canaries replace the app's own function: noise that it makes of other than normal or "
    "Laplace draws was not seen."
)


def promise(
    target: Target,
    as_is: Transcript,
    *,
    claim: Claim | None,
    seconds: float,
    seed: int,
    folder: Path,
    canaries: str | None = None,
    model: str | None = None,
) -> list[Finding]:
    """Return what is to be said of an app's promise.

    Parameters
    ----------
    target : Target
        The app.
    as_is : Transcript
        Of a run of the app as it is.
    claim : Claim, optional
        What somebody says that the app keeps. By default its own claims.
    seconds : float
        Time for the runs with canaries. Runs that are whole by then count.
    seed : int
        Of coins and directions, and of what the app draws.
    folder : Path
        Gets the transcripts of the runs.
    canaries, model : str, optional
        "module:function" of the app's function that returns a client's records, which by default
        DataLoaders have; and of a function that returns its torch module.
    """
    rounds, weight = rounds_run(as_is), uneven_weights(as_is)
    mechanisms = mechanisms_of(as_is, weight=weight)
    known = list(rounds_of(as_is))

    def claimed() -> list[Claim]:
        """Return the claims over the rounds that were run."""
        own = [claim] if claim else claims_of(as_is, rounds=rounds, weight=weight)
        return [_like_the_mechanism(one, [m.neighbours for m in mechanisms]) for one in own]

    claims = claimed()
    findings = [*parameters(mechanisms, rounds), *lonely_sums(known)]
    if weight > _UNEVEN and any(one.view == "model" for one in mechanisms):
        findings.append(_uneven(weight))
    if not claims:
        return [*findings, _no_claim()]
    if canaries is not None and all(one.unit == "user" for one in claims):
        findings.append(_no_record_claim())
    units: dict[str, set[str | None]] = {}
    for one in claims:
        units.setdefault(one.unit, set()).add(one.neighbours)
    each = seconds / len(units)
    # A claim is about the rounds that were run, and no more of them.
    whole = as_is.about["ended"] == "whole"
    until = None if whole else max(one.round for one in as_is.exchanges)
    played: dict[str, Played] = {}
    if "user" in units:
        opposite = units["user"] == {REPLACE_ONE}
        played["user"] = with_clients(target, folder / "clients", each, seed, until, opposite)
    if "record" in units:
        pairs = units["record"] == {REPLACE_ONE}
        played["record"] = with_records(
            target,
            folder / "records",
            delta=max(one.over(rounds).delta for one in claims if one.unit == "record"),
            pairs=pairs,
            function=canaries,
            model=model,
            as_is=as_is,
            rounds=until,
            seconds=each,
            seed=seed,
        )
    rounds = max(rounds, *(one.rounds for one in played.values()))  # some may have been asked more
    claims = claimed()
    heard = [_heard(one, rounds, known, played[one.unit]) for one in claims]
    family = [p for tests, others in heard for p in [*(t.p for t in tests), *(o.p for o in others)]]
    refuted = iter(holm(family, LEVEL))
    for number, (one, (tests, others)) in enumerate(zip(claims, heard, strict=True), 1):
        mine = played[one.unit]
        certain = list(composed(one, mechanisms, rounds))
        if mine.runs and not _rests_on_the_function(one, mine):
            certain += without_noise(one, known)
        everything: list[CoinTest | Evidence] = [*tests, *others]
        said = _Heard(
            played=mine,
            tests=tests,
            against=[test for test in everything if next(refuted)],
            certain=certain,
            level=LEVEL / max(1, len(family)),
        )
        name = "the promise" if len(claims) == 1 else f"promise {number}"
        findings += [*certain, _verdict(name, one, said)]
    return findings


def _heard(
    claim: Claim, rounds: int, known: Sequence[TrainingRound], played: Played
) -> tuple[list[CoinTest], list[Evidence]]:
    """Return the tests of a claim, whatever they say."""
    if not played.scores or _rests_on_the_function(claim, played) or _other_pairs(claim, played):
        return [], []
    # The server sees the models too.
    views = [one for one in played.scores if one.view == "model" or claim.view == "server"]
    whole = claim.over(rounds)
    tests = [test for one in views for test in coin_tests(whole, one)]
    return tests, list(noise_evidence(claim, known, played.runs)) if played.runs else []


@dataclass(frozen=True, kw_only=True)
class _Heard:
    """What was heard of one claim: all tests, those that refute it, and what does for certain."""

    played: Played
    tests: Sequence[CoinTest]
    against: Sequence[CoinTest | Evidence]
    certain: Sequence[Finding]
    level: float


def _verdict(name: str, claim: Claim, heard: _Heard) -> Finding:
    tests, certain, played = heard.tests, heard.certain, heard.played
    who = SERVER if claim.view == "server" else MODEL
    start = f"Claimed is {claim} ({claim.source})"
    if certain:
        start += f". Refuted without statistics: {' and '.join(one.name for one in certain)}"
    if not tests:
        return Finding(
            part="promise",
            name=name,
            verdict=REFUTED if certain else CANNOT_TELL,
            said=f"{start}. {played.why or _why_not(claim, played)}",
            adversary=who,
            chance=_CHANCE,
        )
    coins = tests[0].scores.coins.size
    bounds = [test.bound(heard.level) for test in tests]
    bound = max(bounds)
    best = tests[bounds.index(bound)]
    users = claim.unit == "user"
    estimate = best.scores.estimate(claim.delta, opposite=played.opposite) if users else math.nan
    said = (
        f"{best.correct} of {best.guesses} guesses of coins are right, from "
        f"{'what left the nodes' if best.scores.view == 'server' else 'the models'} alone"
    )
    if heard.against:
        first = min(heard.against, key=lambda one: one.p)
        why = said if isinstance(first, CoinTest) else f"{first.name}: {first.found}"
        verdict, said = REFUTED, f"{start}. Refuted (chance below {_p(first.p)}): {why}"
    elif bound > 0:
        verdict = REFUTED if certain else NOT_REFUTED
        opening = "" if certain else "Not refuted: "
        said = f"{start}. {opening}{said}. They could have refuted epsilon below {bound:.3g}"
    else:
        verdict = REFUTED if certain else CANNOT_TELL
        said = f"{start}. {said}: too little for any bound"
    said += f". {coins} coins in {played.count} runs of all rounds, {played.canaries}."
    if users:
        said += f" The one-shot estimate of epsilon is {_estimated(estimate)}: an estimate, and no "
        said += "bound."
    if verdict == REFUTED and users and claim.source == STATED:
        said += _UNSEEN
    return Finding(
        part="promise",
        name=name,
        verdict=verdict,
        said=said,
        adversary=who,
        chance=_CHANCE,
        numbers={
            "claimed": claim.epsilon,
            "delta": claim.delta,
            "refutable below": _rounded(bound),
            "estimate": _rounded(estimate),
            "coins": coins,
            "runs": played.count,
            "p": min(one.p for one in (*tests, *heard.against)),
        },
        table=Table(
            ("seen", "guesses", "right", "chance"),
            [(t.scores.view, t.guesses, t.correct, float(f"{t.p:.3g}")) for t in tests],
        ),
    )


def _why_not(claim: Claim, played: Played) -> str:
    if _other_pairs(claim, played):
        return "Claims of other neighbours were tested: give this one alone, by --claims."
    if _rests_on_the_function(claim, played):
        return (
            "The app's own function adds noise to its arrays, and canaries replace this function: "
            "what it protects was not tested. Noise in a mod can be."
        )
    if any(claim.view == "server" or one.view == "model" for one in played.scores):
        return "Its delta is too large for the number of coins: nothing could be refuted."
    if claim.unit == "record":
        return "The models that were sent out say nothing: there was one, or they fit no module."
    return (
        "No answer with the arrays of a model was heard, or it has fewer entries than there are "
        "clients: there were no canaries."
    )


def _other_pairs(claim: Claim, played: Played) -> bool:
    """Tell whether canary records are not what a claim's neighbours are."""
    return claim.unit == "record" and (claim.neighbours == REPLACE_ONE) != played.opposite


def _rests_on_the_function(claim: Claim, played: Played) -> bool:
    return claim.source == STATED and any(run.own_noise for run in played.runs)


def _like_the_mechanism(claim: Claim, neighbours: Sequence[str]) -> Claim:
    if claim.neighbours is not None or not neighbours or claim.unit != "user":
        return claim
    return replace(claim, neighbours=neighbours[0])


def _uneven(weight: float) -> Finding:
    return Finding(
        part="promise",
        name="weights of clients",
        verdict=NOTE,
        said=f"The largest weight of a client is {weight:.3g} times the mean weight. The wrapper's "
        "noise is for equal weights. For this client it is too small by that factor, which the "
        "numbers here count; and a client may send any weight it likes.",
        adversary=MODEL,
        chance="0: no chance is in it",
        numbers={"largest over mean": weight},
    )


def _no_claim() -> Finding:
    return Finding(
        part="promise",
        name="the promise",
        verdict=NOTE,
        said="The app claims no differential privacy, so there is nothing to refute. What somebody "
        "says of it can be tested with --claims.",
        adversary=SERVER,
        chance=_CHANCE,
    )


def _no_record_claim() -> Finding:
    return Finding(
        part="promise",
        name="canary records",
        verdict=NOTE,
        said="No claim is about single records, so --canaries was not used.",
        adversary=SERVER,
        chance=_CHANCE,
    )


def _p(chance: float) -> str:
    return f"{max(chance, 1e-12):.1g}"


def _estimated(epsilon: float) -> str:
    if math.isnan(epsilon):
        return "not known"
    return f"{epsilon:.3g}" if epsilon < _MOST else f"above {_MOST:g}"


def _rounded(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
