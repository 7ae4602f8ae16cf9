"""Correlated noise of a server, and of a committee's member: seconds and values kept."""

import time
from collections.abc import Iterator

from flwr_privacy.central_dp.correlated.factors import ToeplitzFactor
from flwr_privacy.central_dp.correlated.member_stream import MemberStream
from flwr_privacy.central_dp.correlated.options import BLT, BandedMF, CorrelatedNoise
from flwr_privacy.central_dp.correlated.stream import NoiseStream, new_stream
from flwr_privacy.privacy.noise import discrete_gaussian
from flwr_privacy.privacy.randomness import SecureRandom

from .report import Comparison

__all__ = ["correlated_noise"]

VALUES, SIGMA = 1_000_000, 1e5
ROUNDS, SEPARATION, PARTICIPATIONS = 1000, 20, 50
REPETITIONS = 9
CASES: tuple[tuple[str, CorrelatedNoise, float], ...] = (
    ("20 bands", BandedMF(), 4.0),
    ("BLT, up to 3 buffers", BLT(), 3.0),
)


def correlated_noise() -> Iterator[Comparison]:
    """Compare a round of correlated noise with a round of independent noise, both exact."""
    for name, option, at_most in CASES:
        factor = option.factor(rounds=ROUNDS, separation=SEPARATION, participations=PARTICIPATIONS)
        yield _round(name, new_stream(factor, VALUES), at_most)
        if isinstance(factor, ToeplitzFactor):
            yield _round(f"{name} of a member", MemberStream(factor, VALUES), at_most)


def _round(name: str, stream: NoiseStream, at_most: float) -> Comparison:
    random = SecureRandom()
    for server_round in range(1, SEPARATION + 1):  # until all that is kept is there
        stream.draw(server_round, SIGMA, random)
    ours, theirs = [], []
    for _ in range(REPETITIONS):
        ours.append(_drawn(stream, random))
        began = time.perf_counter()
        discrete_gaussian(VALUES, SIGMA, random)
        theirs.append(time.perf_counter() - began)
    return Comparison(
        what=f"noise of a round, {VALUES:.0e} values, {name}, {len(stream.state()['vectors'])} "
        "vectors kept",
        rival="independent noise of this library, as exact",
        ours=ours,
        theirs=theirs,
        at_most=at_most,
    )


def _drawn(stream: NoiseStream, random: SecureRandom) -> float:
    began = time.perf_counter()
    stream.draw(stream.drawn + 1, SIGMA, random)
    return time.perf_counter() - began
