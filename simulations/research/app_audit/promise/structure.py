"""Checks of a promise that need no statistics: parameters, noise that is not there, lonely sums."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from scipy.stats import f as f_law

from flwr_privacy.simulations.research.audits.evidence import Evidence

from ..findings import NOTE, REFUTED, Finding, Table
from ..uploads import CLIPPED, CODED, NOISED, PLAIN, Vector
from .canary_runs import CanaryRun, repeated_noise
from .claims import Claim, Mechanism
from .training_rounds import TrainingRound

__all__ = ["composed", "lonely_sums", "noise_evidence", "parameters", "without_noise"]

SERVER = "the server, which reads all that leaves the nodes and follows the protocol"
MODEL = "anybody who gets the models that are sent out, a client for instance"

CERTAIN = "0: no chance is in it"

_MOST_EPSILON = 100.0  # a claim above it promises nothing that noise could show
_EXACT = 1e-4  # of a step, what float32 leaves where there is no noise
_LIKENESS = 0.999
_LESS = 0.8  # of the noise on canaries: what real updates get is less
_ALIKE = 0.5  # correlation of two noises from which on they are called the same
_NO_NOISE = 1e-4  # of a canary's pull


def parameters(mechanisms: Sequence[Mechanism], rounds: int) -> Iterator[Finding]:
    """Say what the parameters of Flower's mechanisms give."""
    for one in mechanisms:
        once, total = one.epsilon(1), one.epsilon(rounds)
        silent = math.isnan(one.stated)
        stated = "" if silent else f"It states epsilon {one.stated:.4g} of a round. "
        short = not silent and once > _and_rounding(one.stated)
        yield Finding(
            part="promise",
            name=f"parameters of {one.name}",
            verdict=REFUTED if short else NOTE,
            said=f"{stated}By its noise one round has epsilon {_number(once)} and the {rounds} "
            f"that were run {_number(total)}, at delta {one.delta:g} and for neighbours in which a "
            f"client's update is {_RELATION[one.neighbours]}. These numbers are ours, by the exact "
            "curve of Gaussian noise. More rounds have more.",
            adversary=SERVER if one.view == "server" else MODEL,
            chance=CERTAIN,
            numbers={
                "stated": None if silent else one.stated,
                "round": _finite(once),
                "total": _finite(total),
                "rounds": rounds,
                "delta": one.delta,
            },
        )


def composed(claim: Claim, mechanisms: Sequence[Mechanism], rounds: int) -> Iterator[Finding]:
    """Refute a claim over the training that is below what a mechanism's parameters give."""
    for one in mechanisms:
        relation = claim.neighbours in (None, one.neighbours)
        if claim.unit != "user" or one.view != claim.view or not relation:
            continue
        total = one.epsilon(rounds, claim.delta)
        claimed = claim.over(rounds)
        if total <= _and_rounding(claimed.epsilon):
            continue
        yield Finding(
            part="promise",
            name=f"the claim and {one.name}",
            verdict=REFUTED,
            said=f"Claimed is {claim} ({claim.source}). The parameters of {one.name} give epsilon "
            f"{_number(total)} over the {rounds} rounds that were run, and "
            f"{_number(one.epsilon(1, claim.delta))} in one: an epsilon per round is not that of "
            "the training.",
            adversary=SERVER if claim.view == "server" else MODEL,
            chance=CERTAIN,
            numbers={"claimed": claim.epsilon, "total": _finite(total), "rounds": rounds},
        )


def without_noise(claim: Claim, rounds: Sequence[TrainingRound]) -> Iterator[Finding]:
    """Refute a claim where what it is about left without any noise."""
    if claim.unit != "user" or claim.epsilon > _MOST_EPSILON:
        return
    if claim.view == "server":
        kinds = [u.kind for one in rounds for u in one.uploads.values() if u.norm > 0]
        bare = sum(kind in (PLAIN, CLIPPED) for kind in kinds)
        what = f"{bare} of {len(kinds)} uploads are the update that the app's own function returned"
    else:
        steps = [found for one in rounds if (found := _unexplained(one)) is not None]
        bare = sum(found <= _EXACT for found in steps)
        what = f"{bare} of {len(steps)} steps of the model are sums of the clients' updates"
    if bare:
        yield Finding(
            part="promise",
            name="updates without noise",
            verdict=REFUTED,
            said=f"Claimed is {claim} ({claim.source}), and {what}, to rounding and up to a "
            "factor: there is no noise on them. No epsilon holds with a delta below 1.",
            adversary=SERVER if claim.view == "server" else MODEL,
            chance=CERTAIN,
            numbers={"without noise": bare},
        )


def lonely_sums(rounds: Sequence[TrainingRound]) -> Iterator[Finding]:
    """Refute secure sums that are one client's update."""
    rows = []
    for one in rounds:
        hidden = [
            node
            for node in one.updates
            if node not in one.uploads
            or one.uploads[node].kind not in (PLAIN, CLIPPED, CODED, NOISED)
        ]
        if one.step is None:
            continue
        for node in hidden:
            likeness = _likeness(one.updates[node], one.step)
            if likeness >= _LIKENESS:
                rows.append((one.number, node, len(one.updates), round(likeness, 6)))
    if rows:
        yield Finding(
            part="promise",
            name="a sum of one client",
            verdict=REFUTED,
            said=f"In {len({r[0] for r in rows})} of {len(rounds)} rounds the uploads hide the "
            "updates, and the opened sum is the update of one client: the next model minus this "
            f"one has correlation {min(r[3] for r in rows):.5f} with it. A secure sum of one "
            "hides nothing.",
            adversary=SERVER,
            chance="a step that is independent of an update has correlation 0 with it, to one "
            "over the root of their entries",
            numbers={"rounds": len({r[0] for r in rows})},
            table=Table(("round", "node", "clients in the sum", "correlation"), rows),
        )


def noise_evidence(
    claim: Claim, rounds: Sequence[TrainingRound], runs: Sequence[CanaryRun]
) -> Iterator[Evidence]:
    """Test whether noise is drawn anew each time, and is as large for real updates as canaries."""
    server = claim.view == "server"
    vectors = [run.noise if server else run.step_noise for run in runs]
    pulls = np.concatenate([np.abs(run.pulls if server else run.steps).ravel() for run in runs])
    noise = np.concatenate([v for v in vectors if v.size] or [np.zeros((0, 0))])
    if not noise.size or noise.std() <= _NO_NOISE * float(pulls.max(initial=0.0)):
        return
    # A server's momentum makes the steps of one run alike: those of different runs are compared.
    drawn = noise if server else np.array([v[0] for v in vectors if v.size])
    alike, p = repeated_noise(drawn)
    yield Evidence(
        name="noise is the same again",
        p=p if alike >= _ALIKE else 1.0,
        found=f"two draws of it have correlation {alike:.3f}",
    )
    first = [run.rounds == run.rounds.min(initial=0) for run in runs]
    if server:
        canaries = np.concatenate([run.noise[at] for run, at in zip(runs, first, strict=True)])
        uploads = [u for one in rounds[:1] for u in one.uploads.values() if u.kind == NOISED]
        real = [(u.sigma**2, u.entries) for u in uploads]
    else:
        canaries = drawn
        real = [found for one in rounds[:1] if (found := _noise_of_step(one)) is not None]
    if not real or canaries.size < 100:
        return
    variance = sum(v * n for v, n in real) / sum(n for _, n in real)
    ratio = variance / float(np.mean(canaries**2))
    yield Evidence(
        name="real updates get less noise than canaries",
        p=float(f_law.cdf(ratio / _LESS**2, sum(n for _, n in real), canaries.size)),
        found=f"{math.sqrt(ratio):.3g} times the standard deviation",
    )


def _and_rounding(epsilon: float) -> float:
    """Return an epsilon and what rounding adds to it."""
    return epsilon * (1 + 1e-3) + 1e-9


def _unexplained(one: TrainingRound) -> float | None:
    """Return which part of a step is no combination of the updates; None where none can be told."""
    fitted = _fitted(one)
    if fitted is None or one.step is None:
        return None
    return float(np.linalg.norm(one.step - fitted) / np.linalg.norm(one.step))


def _noise_of_step(one: TrainingRound) -> tuple[float, int] | None:
    """Return the variance of what is no combination of the updates, and of how many entries."""
    fitted = _fitted(one)
    if fitted is None or one.step is None:
        return None
    free = one.step.size - len(one.updates)
    left = one.step - fitted
    return float(left @ left) / free, free


def _fitted(one: TrainingRound) -> Vector | None:
    if one.step is None or not one.updates or one.step.size < 2 * len(one.updates) + 8:
        return None
    updates = np.stack(list(one.updates.values()), axis=1)
    if updates.shape[0] != one.step.size:
        return None
    found: Vector = updates @ np.linalg.lstsq(updates, one.step, rcond=None)[0]
    return found


def _likeness(update: Vector, step: Vector) -> float:
    lengths = float(np.linalg.norm(update) * np.linalg.norm(step))
    return float(update @ step) / lengths if lengths and update.size == step.size else 0.0


def _number(epsilon: float) -> str:
    return f"{epsilon:.4g}" if math.isfinite(epsilon) else "infinite"


def _finite(epsilon: float) -> float | str:
    return epsilon if math.isfinite(epsilon) else "infinite"


_RELATION = {"zero_out": "replaced by none", "replace_one": "replaced by any other"}
