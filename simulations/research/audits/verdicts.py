"""Puts an audit's evidence together: a verdict and a bound, with an error that is controlled.

The tests of all sessions and all schemes of one report are one family. By Holm's method the chance
that any of them accuses a correct scheme is at most 5 %, whatever depends on what.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from flwr_privacy.accounting.gaussian import epsilon_of, mu_of

from .evidence import Evidence, evidence
from .observed import Released, Session

__all__ = [
    "CANNOT_TELL",
    "LEVEL",
    "NOT_REFUTED",
    "REFUTED",
    "Audit",
    "audited",
    "holm",
    "reported",
]

REFUTED, NOT_REFUTED, CANNOT_TELL = "refuted", "not refuted", "cannot tell"

LEVEL = 0.05
"""Chance that a report accuses anything that is correct, at most."""

_LEAST, _LEAST_NOISE = 8, 200  # releases with canaries, and entries, below which there is no bound
_NO_NOISE = 1e6  # mu from which on it says nothing but that there is no noise

Vector = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The audit of one scheme.

    Parameters
    ----------
    name : str
        What was audited.
    claimed : float
        Epsilon by its ledgers; infinite where it promises nothing.
    delta : float
        Of that epsilon.
    bound : float
        Epsilon that the canaries prove for noise that is Gaussian, at the level of the report: a
        claim below it is refuted.
    against : tuple of Evidence
        What refutes it, strongest first.
    tests : int
        Number of its tests.
    releases : int
        Releases that were heard.
    sampled : bool, default False
        Whether it is about secret samples, of which there is no bound on epsilon by itself.
    """

    name: str
    claimed: float
    delta: float
    bound: float
    against: tuple[Evidence, ...]
    tests: int
    releases: int
    sampled: bool = False

    @property
    def verdict(self) -> str:
        """One of `REFUTED`, `NOT_REFUTED` and `CANNOT_TELL`."""
        if self.against:
            return REFUTED
        if math.isinf(self.claimed) or self.bound == 0.0:
            return CANNOT_TELL
        return NOT_REFUTED

    @property
    def refuted(self) -> str:
        """What refutes it, strongest first, in words; empty where nothing does."""
        # Of two sessions some tests are the same; the stronger one says it.
        found = {one.name: one.found for one in reversed(self.against)}
        names = dict.fromkeys(one.name for one in self.against)
        return "; ".join(f"{name} ({found[name]})" for name in names)

    @property
    def said(self) -> str:
        """The verdict in words."""
        if self.verdict == REFUTED:
            first = self.against[0]
            return f"refuted: {first.name} ({first.found})"
        if self.verdict == NOT_REFUTED:
            return f"not refuted (this audit could have refuted epsilon below {self.bound:.3g})"
        if math.isinf(self.claimed):
            return "cannot tell: it promises nothing"
        if self.sampled:
            return "cannot tell epsilon from samples alone; they are as they were paid for"
        return "cannot tell: too little was heard for a bound"


def audited(name: str, sessions: Sequence[Session], *, level: float = LEVEL) -> Audit:
    """Audit one scheme, as a report of its own."""
    return reported({name: sessions}, level=level)[0]


def reported(heard: Mapping[str, Sequence[Session]], *, level: float = LEVEL) -> list[Audit]:
    """Audit several schemes in one report, whose error is controlled as a whole.

    Parameters
    ----------
    heard : Mapping of str to sequence of Session
        What was heard of each.
    level : float, default 0.05
        Chance that it accuses anything that is correct, at most.
    """
    family = [
        (name, one)
        for name, sessions in heard.items()
        for one in [*evidence(sessions), *_of_epsilon(sessions)]
    ]
    against: dict[str, list[Evidence]] = {name: [] for name in heard}
    for (name, one), refuted in zip(family, holm([e.p for _, e in family], level), strict=True):
        if refuted:
            against[name].append(one)
    return [
        Audit(
            name=name,
            claimed=max(s.claim.epsilon for s in sessions),
            delta=sessions[0].claim.delta,
            bound=_bound(sessions, level / len(family)),
            against=tuple(sorted(against[name], key=lambda one: one.p)),
            tests=sum(1 for other, _ in family if other == name),
            releases=sum(len(s.releases) for s in sessions),
            sampled=any(s.coins is not None for s in sessions),
        )
        for name, sessions in heard.items()
    ]


def holm(chances: Sequence[float], level: float = LEVEL) -> list[bool]:
    """Tell which hypotheses are refuted, so that a true one is with a chance of at most `level`.

    Holm, "A simple sequentially rejective multiple test procedure", 1979.

    Examples
    --------
    >>> holm([0.03, 0.01, 0.04])
    [False, True, False]
    """
    refuted = [False] * len(chances)
    for done, place in enumerate(np.argsort(chances, kind="stable")):
        if chances[place] > level / (len(chances) - done):
            break
        refuted[place] = True
    return refuted


def _of_epsilon(sessions: Sequence[Session]) -> list[Evidence]:
    """Test the claimed epsilon by what the canaries make of all releases together."""
    claim = max((s.claim for s in sessions), key=lambda one: one.epsilon)
    found = _distance(sessions)
    if found is None or math.isinf(claim.epsilon):
        return []
    mu, error = found
    excess = (mu - mu_of(claim.epsilon, claim.delta)) / error
    return [
        Evidence(
            name="epsilon is larger than claimed",
            p=float(norm.sf(excess)),
            found=f"about {_epsilon(mu, claim.delta):.3g}, claimed {claim.epsilon:.3g}",
        )
    ]


def _bound(sessions: Sequence[Session], level: float) -> float:
    """Return the epsilon that the canaries prove at a level; 0 where there are too few."""
    found = _distance(sessions)
    if found is None:
        return 0.0
    mu, error = found
    return _epsilon(mu - float(norm.isf(level)) * error, sessions[0].claim.delta)


def _epsilon(mu: float, delta: float) -> float:
    """Return epsilon of a Gaussian channel; 0 of none, infinity of one without noise."""
    if mu <= 0:
        return 0.0
    return epsilon_of(mu, delta) if mu < _NO_NOISE else math.inf


def _distance(sessions: Sequence[Session]) -> tuple[float, float] | None:
    """Return how far apart neighbours are in all releases, as mu, and its standard error.

    The kinds of releases are weighed as the charges say, which never makes too much of them: mu is
    the length of a vector with an entry for each release, and this is its part along a direction.
    """
    kinds = _far([r for s in sessions for r in s.releases])
    if sum(len(r.best) for those in kinds.values() for r in those) < _LEAST:
        return None
    noise = np.concatenate([_beside(r) for those in kinds.values() for r in those])
    # The directions of the canaries are taken out.
    freedom = noise.size - sum(len(r.best) for those in kinds.values() for r in those)
    if freedom < _LEAST_NOISE:
        return None
    spread = max(float(np.sqrt(noise @ noise / freedom)), 1 / _NO_NOISE)
    answered = {p: max(s.answered.get(p, 0) for s in sessions) for p in kinds}
    turn = sessions[0].claim.turn
    weights = {p: float(np.mean([r.worth for r in those])) for p, those in kinds.items()}
    length = math.sqrt(sum(answered[p] * w**2 for p, w in weights.items()))
    if length == 0:
        return None
    mu = error = 0.0
    for phase, those in kinds.items():
        part = turn * answered[phase] * weights[phase] / length
        pulls = np.concatenate([r.worth + r.excess for r in those])
        mu += part * float(pulls.mean()) / spread
        error += part**2 / pulls.size
    # The spread itself is known to one part in the root of twice its freedom.
    return mu, math.sqrt(error + mu**2 / (2 * freedom))


def _far(releases: Sequence[Released]) -> dict[str, list[Released]]:
    """Return, of each kind of release, those whose canary is worth the most."""
    kinds: dict[str, list[Released]] = {}
    most: dict[str, float] = {}
    for release in releases:
        most[release.phase] = max(most.get(release.phase, 0.0), release.worth)
    for release in releases:
        worth = release.worth
        if worth > 0 and worth >= 0.99 * most[release.phase] and np.isfinite(release.values).all():
            kinds.setdefault(release.phase, []).append(release)
    return kinds


def _beside(release: Released) -> Vector:
    """Return the noise of a release at right angles to its canary."""
    noise: Vector = release.noise - release.excess @ release.best
    return noise
