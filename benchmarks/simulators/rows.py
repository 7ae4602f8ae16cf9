"""Compares rounds inline and on Ray with pfl-research and plain Flower, and schemes with FedAvg.

``python -m benchmarks.simulators.rows ResNet`` measures one part of the row `simulators`.
"""

import argparse
import tempfile
from collections.abc import Collection, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..report import Comparison, print_comparisons
from .sides import Report, Sides, check_alike, ray_sides

__all__ = ["simulators"]

SIZES = ("S", "L", "tiny", "ResNet")
RAY_SIZES = ("S", "L")
RAY, SCHEMES = "ray", "schemes"
PARTS = (*SIZES, SCHEMES, RAY)
"""The inline rounds of a size beside pfl-research, those of the schemes, and those on Ray."""

ROUNDS = {"S": 22, "L": 7, "tiny": 5, "ResNet": 4}
RAY_ROUNDS = {"S": 10, "L": 6}
TURNS = 2
OVER_PFL = {"S": 1.3, "L": 1.1}
OVER_LOOP = {("S", False): 1.6, ("L", False): 1.25}
OVER_FLOWER = {"S": 6.0, "L": 3.0}
SECURE_SUM, SHARES = "secure-sum", "shares"


@dataclass(frozen=True, kw_only=True)
class SchemePlan:
    """Which schemes are compared with FedAvg on a task, in turns of so many rounds each.

    Parameters
    ----------
    targets : dict
        The parts of `app/simulated/server_app.py`, each with the most that its round may take in
        units of FedAvg's; None without a target.
    rounds, turns : int
        Rounds of a turn, and turns of each scheme.
    """

    targets: dict[str, float | None]
    rounds: int
    turns: int = 2


SCHEME_PLANS = {
    "S": SchemePlan(
        targets={"udp": 1.5, "mspdq": 3.0, "m2fdp": 1.5, SECURE_SUM: None, SHARES: None}, rounds=6
    ),
    # All of the 10,000 clients send a key first: a round takes over twenty times FedAvg's.
    "tiny": SchemePlan(targets={SECURE_SUM: None}, rounds=3, turns=1),
    "ResNet": SchemePlan(targets={SECURE_SUM: None, SHARES: None}, rounds=4, turns=1),
}
NAMES = {
    "udp": "UDP",
    "mspdq": "MSPDQ, four steps",
    "m2fdp": "M2FDP",
    SECURE_SUM: "secure sum",
    SHARES: "DP in shares",
}

PFL = "pfl-research, 2 processes"


def main() -> None:
    """Measure some parts of the row; a missed target is reported and is no error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="*", help=f"{', '.join(PARTS)}; all by default")
    parts = parser.parse_args().part or PARTS
    if unknown := sorted(set(parts) - set(PARTS)):
        parser.error(f"unknown part {', '.join(unknown)}: choose from {', '.join(PARTS)}")
    print_comparisons(simulators(parts))


def simulators(parts: Collection[str] = PARTS) -> Iterator[Comparison]:
    """Compare simulators on the same work: 1000 clients x 60 images, 50 of them a round.

    The rows "tiny" have 1000 clients a round with a batch each, the rows "ResNet" 4 with ResNet-18.
    """
    with tempfile.TemporaryDirectory(prefix="flwr-privacy-") as name:
        folder = Path(name)
        sides = Sides(folder)
        pfl: dict[tuple[str, bool], list[float]] = {}
        for size in SIZES:
            if size in parts:
                for private in (False, True):
                    pfl[size, private] = yield from _inline(sides, size, private=private)
        if SCHEMES in parts:
            for size, plan in SCHEME_PLANS.items():
                yield from _schemes(sides, size, plan)
        if RAY in parts:
            yield from _on_ray(folder, pfl)


def _on_ray(folder: Path, pfl: dict[tuple[str, bool], list[float]]) -> Iterator[Comparison]:
    """Compare rounds on Ray with plain Flower's, and with pfl-research's where it was measured."""
    with ray_sides(folder) as ray:
        for size in RAY_SIZES:
            for private in (False, True):
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
                if theirs := pfl.get((size, private)):
                    yield Comparison(what=what, rival=PFL, ours=ours.seconds, theirs=theirs)


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
    _check_alike([*loop, *pfl, *ours], size, private=private)
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


def _schemes(sides: Sides, size: str, plan: SchemePlan) -> Iterator[Comparison]:
    """Compare schemes with our FedAvg, in turns within one run."""
    turns = " ".join(["fedavg", *plan.targets] * plan.turns)
    reports: dict[str, list[Report]] = {}
    for report in sides.inline(turns, size, rounds=plan.rounds):
        reports.setdefault(report.part, []).append(report)
    # A secure sum opens the same average. Schemes with noise move the weights by it as well.
    _check_alike([*reports["fedavg"], *reports[SECURE_SUM]], size, private=False)
    for part, at_most in plan.targets.items():
        yield Comparison(
            what=f"inline, a round of {size}: {NAMES[part]}",
            rival="our FedAvg, same run",
            ours=_seconds(reports[part]),
            theirs=_seconds(reports["fedavg"]),
            at_most=at_most,
        )


def _check_alike(reports: list[Report], size: str, *, private: bool) -> None:
    # Of four clients of one step each it depends on who they are how far the model goes, and where.
    few = size == "ResNet"
    check_alike(reports, learnt=not private and not few, apart=0.4 if few else 0.1)


def _seconds(reports: list[Report]) -> list[float]:
    return [second for report in reports for second in report.seconds]


def _named(size: str, private: bool) -> str:
    return f"{size}, central DP" if private else size


if __name__ == "__main__":
    main()
