"""The rows: rounds inline and on Ray beside pfl-research and plain Flower, and of the schemes."""

import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

from ..report import Comparison
from .sides import Report, Sides, check_alike, ray_sides

__all__ = ["simulators"]

SETTINGS = [(size, private) for size in ("S", "L", "tiny", "ResNet") for private in (False, True)]
"""The tasks, each with central DP and without."""

RAY_SETTINGS = SETTINGS[:4]
ROUNDS = {"S": 22, "L": 7, "tiny": 5, "ResNet": 4}
RAY_ROUNDS = {"S": 10, "L": 6}
TURNS = 2
OVER_PFL = {"S": 1.3, "L": 1.1}
OVER_LOOP = {("S", False): 1.6, ("L", False): 1.25}
OVER_FLOWER = {"S": 6.0, "L": 3.0}
SCHEMES = {
    "udp": ("UDP", 1.5),
    "mspdq": ("MSPDQ, four steps", 3.0),
    "m2fdp": ("M2FDP", 1.5),
}
SCHEME_ROUNDS, SCHEME_TURNS = 6, 2

PFL = "pfl-research, 2 processes"


def simulators() -> Iterator[Comparison]:
    """Compare simulators on the same work: 1000 clients x 60 images, 50 of them a round.

    The rows "tiny" have 1000 clients a round with a batch each, the rows "ResNet" 4 with ResNet-18.
    """
    with tempfile.TemporaryDirectory(prefix="flwr-privacy-") as name:
        folder = Path(name)
        sides = Sides(folder)
        pfl: dict[tuple[str, bool], list[float]] = {}
        for size, private in SETTINGS:
            pfl[size, private] = yield from _inline(sides, size, private=private)
        yield from _schemes(sides)
        with ray_sides(folder) as ray:
            for size, private in RAY_SETTINGS:
                flower = ray.flower(size, rounds=RAY_ROUNDS[size], private=private)
                ours = ray.ours(size, rounds=RAY_ROUNDS[size], private=private)
                check_alike([flower, ours], learnt=not private)
                what = f"on Ray, a round of {_named(size, private)}"
                yield Comparison(
                    what=what,
                    rival="plain Flower, `flwr run`, 1000 SuperNodes",
                    ours=ours.seconds,
                    theirs=flower.seconds,
                    at_least=OVER_FLOWER[size],
                )
                yield Comparison(what=what, rival=PFL, ours=ours.seconds, theirs=pfl[size, private])


def _inline(sides: Sides, size: str, *, private: bool) -> Generator[Comparison, None, list[float]]:
    """Compare inline rounds with pfl-research's; return those."""
    part = "central-dp" if private else "fedavg"
    loop: list[Report] = []
    pfl: list[Report] = []
    ours: list[Report] = []
    for _ in range(TURNS):
        loop.append(sides.loop(size, rounds=ROUNDS[size], private=private))
        pfl.append(sides.pfl(size, rounds=ROUNDS[size], private=private))
        ours += sides.inline(part, size, rounds=ROUNDS[size])
    # Of four clients of one step each it depends on who they are how far the model goes, and where.
    few = size == "ResNet"
    check_alike([*loop, *pfl, *ours], learnt=not private and not few, apart=0.4 if few else 0.1)
    what = f"inline, a round of {_named(size, private)}"
    rounds = _seconds(ours)
    yield Comparison(
        what=what,
        rival=PFL,
        ours=rounds,
        theirs=_seconds(pfl),
        at_least=OVER_PFL.get(size),
    )
    yield Comparison(
        what=f"{what}, CPU",
        rival=PFL,
        ours=[report.cpu for report in ours],
        theirs=[report.cpu for report in pfl],
    )
    yield Comparison(
        what=what,
        rival="a loop in plain PyTorch, 2 processes",
        ours=rounds,
        theirs=_seconds(loop),
        at_most=OVER_LOOP.get((size, private)),
    )
    if not private:
        yield Comparison(
            what=f"inline, from the start to round 1 of {size}",
            rival=PFL,
            ours=[report.first for report in ours],
            theirs=[report.first for report in pfl],
            at_most=1.0,
        )
    return _seconds(pfl)


def _schemes(sides: Sides) -> Iterator[Comparison]:
    """Compare the schemes with our FedAvg, in turns within one run."""
    plan = " ".join(["fedavg", *SCHEMES] * SCHEME_TURNS)
    reports = sides.inline(plan, "S", rounds=SCHEME_ROUNDS)
    plain = _seconds([report for report in reports if report.part == "fedavg"])
    for part, (name, at_most) in SCHEMES.items():
        yield Comparison(
            what=f"inline, a round of S: {name}",
            rival="our FedAvg, same run",
            ours=_seconds([report for report in reports if report.part == part]),
            theirs=plain,
            at_most=at_most,
        )


def _seconds(reports: list[Report]) -> list[float]:
    return [second for report in reports for second in report.seconds]


def _named(size: str, private: bool) -> str:
    return f"{size}, central DP" if private else size
