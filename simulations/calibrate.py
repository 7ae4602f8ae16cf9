"""What a budget means in noise, and what a noise means in epsilon, formula by formula."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from flwr_privacy.accounting import Charge, spent, supports
from flwr_privacy.udp import (
    Schedule,
    participations,
    sigma_gdp,
    sigma_paper,
    sigma_zcdp,
)

__all__ = ["Calibration", "calibrate", "legend", "table"]

_ACCOUNTANTS = ("gdp", "rdp", "pld")


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The noise that one formula asks for, and what it truly gives.

    Parameters
    ----------
    formula : str
        Which formula.
    noise_multiplier, sigma : float
        Noise over the sensitivity, and in units of the weights.
    usual : dict
        Epsilon, by accountant, of a client that takes part as often as 99 % do at most.
    every_round : float
        Epsilon of a client that takes part in every round, by the tightest accountant.
    hidden : float
        Epsilon against somebody who does not learn who takes part, where each client is drawn by
        itself (Poisson), by PLD. The server is no such adversary.
    """

    formula: str
    noise_multiplier: float
    sigma: float
    usual: dict[str, float]
    every_round: float
    hidden: float


def calibrate(
    *,
    epsilon: float,
    delta: float,
    rounds: int,
    q: float = 1.0,
    sampling_rate: float = 1.0,
    sensitivity: float = 1.0,
) -> Iterator[Calibration]:
    """Yield the formulas side by side: the paper's, its repair, the default.

    Parameters
    ----------
    epsilon, delta : float
        Budget over the whole training.
    rounds : int
        Rounds.
    q : float, default 1.0
        Fraction of the clients that is asked in a round.
    sampling_rate : float, default 1.0
        Rate of the secret sample of a client's records; the paper's formulas know none.
    sensitivity : float, default 1.0
        L2 sensitivity of a release, in units of the weights.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.
    """
    options = {"epsilon": epsilon, "delta": delta}
    schedule = Schedule(
        noise="gdp_fixed", rounds=rounds, q=q, sampling_rate=sampling_rate, **options
    )
    multipliers = {"gdp_fixed (default)": schedule.noise_multiplier}
    if sampling_rate == 1:
        multipliers = {
            "paper, equation (10)": sigma_paper(rounds=rounds, q=q, **options),
            "zCDP of the same moments": sigma_zcdp(rounds=rounds, q=q, **options),
            **multipliers,
            "GDP, every round": sigma_gdp(releases=rounds, **options),
        }
    most = participations(rounds, q)
    for formula, z in multipliers.items():
        release = Charge(noise_multiplier=z, sampling=sampling_rate)
        accountants = [name for name in _ACCOUNTANTS if supports(release, name)]
        hidden = Charge(noise_multiplier=z, sampling=sampling_rate * q, count=rounds)
        yield Calibration(
            formula=formula,
            noise_multiplier=z,
            sigma=z * sensitivity,
            usual={
                name: spent([release] * most, delta=delta, accountant=name) for name in accountants
            },
            every_round=spent([release] * rounds, delta=delta, accountant=accountants[0]),
            hidden=spent([hidden], delta=delta, accountant="pld"),
        )


def table(rows: Iterator[Calibration]) -> str:
    """Return calibrations as lines of text, with a head that says what the columns are."""
    head = ("formula", "sigma/sens.", "sigma", *_ACCOUNTANTS, "every round", "hidden")
    lines: list[tuple[str, ...]] = [head]
    for row in rows:
        epsilons = [row.usual.get(name, math.nan) for name in _ACCOUNTANTS]
        numbers = (row.noise_multiplier, row.sigma, *epsilons, row.every_round, row.hidden)
        lines.append((row.formula, *("-" if math.isnan(n) else f"{n:.5g}" for n in numbers)))
    widths = [max(len(line[place]) for line in lines) for place in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def legend(rounds: int, q: float) -> str:
    """Return what the columns of `table` are."""
    return (
        "gdp, rdp, pld: epsilon, by accountant, of a client that takes part in "
        f"{participations(rounds, q)} rounds, the most for 99 % of the clients\n"
        "every round: epsilon of a client that takes part in all rounds\n"
        "hidden: epsilon against somebody who does not learn who takes part, unlike the server"
    )
