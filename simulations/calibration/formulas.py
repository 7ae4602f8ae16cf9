"""Compares, formula by formula, the noise for a budget and the epsilon that it truly gives."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from flwr_privacy.accounting import REPLACE_ONE, Charge, noise_multiplier, spent
from flwr_privacy.errors import check_number
from flwr_privacy.simulations.research.udp.moments import eps_server
from flwr_privacy.simulations.research.udp.noise_theory import sigma_zcdp
from flwr_privacy.udp import participations, sigma_paper
from flwr_privacy.udp.pace import Discounted, LinearDecay, Pace
from flwr_privacy.udp.schedule import SECRET_NEIGHBOURS

__all__ = ["Calibration", "calibrate", "legend", "table"]

DEFAULT = "gdp_fixed (default)"
HEAD = (
    *("formula", "sigma/sens.", "sigma", "claimed"),
    *("server", "99 %", "99 % rdp", "all rounds", "hidden"),
)

_ROUNDING = 1e-6  # by which a claim may be passed before it is marked


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The noise that one formula asks for, and the epsilon that it truly gives.

    Each epsilon is in closed form where it is exact, and by PLD where there is a secret sample.

    Parameters
    ----------
    formula : str
        Which formula.
    noise_multiplier, sigma : float
        Noise over the sensitivity, and in units of the weights.
    claimed : float
        Epsilon that the formula claims.
    server : float
        Epsilon against the server, which sees who takes part, averaged over how often a client is
        drawn; not a number where records are sampled in secret besides.
    often, often_rdp : float
        Epsilon of a client that takes part as often as 99 % do at most, and the same by Rényi DP,
        as a ledger counts that has secret samples.
    every_round : float
        Epsilon of a client that takes part in every round.
    hidden : float
        Epsilon against somebody who does not learn who takes part, where each client is drawn by
        itself (Poisson). The server is no such adversary.
    """

    formula: str
    noise_multiplier: float
    sigma: float
    claimed: float
    server: float
    often: float
    often_rdp: float
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
    """Yield the formulas side by side: the paper's, its repairs, the default.

    Parameters
    ----------
    epsilon, delta : float
        Budget over the whole training.
    rounds : int
        Rounds.
    q : float, default 1.0
        Fraction of the clients that is asked in a round.
    sampling_rate : float, default 1.0
        Rate of the secret sample of a client's records; below 1 the default is the only formula
        that knows of it.
    sensitivity : float, default 1.0
        L2 sensitivity of a release, in units of the weights.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.
    """
    check_number("sampling_rate", sampling_rate, minimum=math.ulp(0.0), maximum=1)
    most = participations(rounds, q)
    for formula, z in _multipliers(epsilon, delta, rounds, q, sampling_rate):

        def cost(count: int, accountant: str = "", share: float = 1.0, z: float = z) -> float:
            charge = Charge(
                noise_multiplier=z,
                neighbours=REPLACE_ONE if share == 1 else SECRET_NEIGHBOURS,
                sampling=sampling_rate * share,
                count=count,
            )
            exact = "gdp" if charge.sampling == 1 else "pld"
            return spent([charge], delta=delta, accountant=accountant or exact)

        seen = math.nan
        if sampling_rate == 1:
            seen = eps_server(noise_multiplier=z, rounds=rounds, q=q, delta=delta)
        yield Calibration(
            formula=formula,
            noise_multiplier=z,
            sigma=z * sensitivity,
            claimed=epsilon,
            server=seen,
            often=cost(most),
            often_rdp=cost(most, "rdp"),
            every_round=cost(rounds),
            hidden=cost(rounds, share=q),
        )
        if formula == "paper":
            yield from _paced(z, epsilon, delta, rounds, q, sensitivity)


def _paced(
    z: float, epsilon: float, delta: float, rounds: int, q: float, sensitivity: float
) -> Iterator[Calibration]:
    """Yield the paper's noise where it changes from round to round.

    Of discounting it is the training in which no loss ever falls, whose rounds are the fewest and
    the dearest. A client that takes part often does so in the dearest rounds.
    """
    paces = {"paper, CRD": Discounted(rounds), "paper, Lei": LinearDecay(rounds)}
    for formula, pace in paces.items():
        factors = list(_factors(pace))
        charges = [
            Charge(noise_multiplier=z * factor, neighbours=REPLACE_ONE)
            for factor in sorted(factors)
        ]
        often = charges[: participations(len(charges), q)]
        every_round = spent(charges, delta=delta)
        yield Calibration(
            formula=formula,
            noise_multiplier=z * factors[0],
            sigma=z * factors[0] * sensitivity,
            claimed=epsilon,
            server=every_round if q == 1 else math.nan,
            often=spent(often, delta=delta),
            often_rdp=spent(often, delta=delta, accountant="rdp"),
            every_round=every_round,
            hidden=every_round if q == 1 else math.nan,
        )


def _factors(pace: Pace) -> Iterator[float]:
    """Yield the noise of each round over that of a training without a pace."""
    if isinstance(pace, Discounted):
        pace.begin(0.0)
    while not pace.over:
        yield pace.factor
        pace.after(0.0)


def _multipliers(
    epsilon: float, delta: float, rounds: int, q: float, sampling_rate: float
) -> Iterator[tuple[str, float]]:
    budget = {"epsilon": epsilon, "delta": delta}
    sound = partial(noise_multiplier, epsilon=epsilon, delta=delta, neighbours=REPLACE_ONE)
    most = participations(rounds, q)
    if sampling_rate < 1:
        yield DEFAULT, sound(releases=most, sampling=sampling_rate, accountant="rdp")
        return
    yield "paper", sigma_paper(rounds=rounds, q=q, **budget)
    yield "zcdp", sigma_zcdp(rounds=rounds, q=q, **budget)
    yield "gdp", sound(releases=1) * math.sqrt(max(1.0, q * rounds))
    yield DEFAULT, sound(releases=most)
    yield "gdp_worst", sound(releases=rounds)
    accountant = "gdp" if q == 1 else "pld"
    hidden = partial(sound, releases=rounds, sampling=q, accountant=accountant)
    yield "pld_secret", hidden(neighbours=SECRET_NEIGHBOURS)


def table(rows: Iterable[Calibration]) -> str:
    """Return calibrations as lines of text, with a head that says what the columns are."""
    lines: list[tuple[str, ...]] = [HEAD]
    for row in rows:
        numbers = [f"{value:.5g}" for value in (row.noise_multiplier, row.sigma, row.claimed)]
        server, often, every_round, hidden = (
            _marked(value, row.claimed)
            for value in (row.server, row.often, row.every_round, row.hidden)
        )
        bound = f"{row.often_rdp:.5g}"
        lines.append((row.formula, *numbers, server, often, bound, every_round, hidden))
    widths = [max(len(line[place]) for line in lines) for place in range(len(HEAD))]
    return "\n".join(
        "  ".join(
            # The last character of a marked epsilon is its mark, of others a space.
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _marked(value: float, claimed: float) -> str:
    if math.isnan(value):
        return "- "
    return f"{value:.5g}" + ("!" if value > claimed * (1 + _ROUNDING) else " ")


def legend(rounds: int, q: float, *, sampling_rate: float = 1.0) -> str:
    """Return what the lines and columns of `table` are."""
    most = participations(rounds, q)
    mean = f"{q * rounds:.4g}"
    lines = [
        "sigma/sens.: noise over the sensitivity of a release; sigma: in units of the weights.",
        "After them the epsilon that is claimed for it, and that which it truly gives (!: more):",
        "  server      against the server, which sees who takes part; averaged over how often",
        f"  99 %        for a client in {most} of {rounds} rounds, the most for 99 % of clients",
        "  99 % rdp    an upper bound of it by Rényi DP, which ledgers use with secret samples",
        "  all rounds  for a client that takes part in all rounds",
        "  hidden      against others, who do not learn who takes part (each drawn by itself), for",
        "              a client more or less; all other columns are for data that are replaced",
    ]
    if sampling_rate == 1:
        lines += [
            "What a claim is meant for:",
            f"  paper       {mean} rounds, what a client has on average, by equation (10)",
            "  paper, CRD  the same where rounds are discounted, (25), after every round",
            "  paper, Lei  the same where noise falls to half; sigma is that of the first round",
            "  zcdp        the same, by the moments of the paper's proof",
            "  gdp         the same, exact; the noise of later rounds follows from what is left",
            f"  gdp_fixed   {most} rounds, exact",
            f"  gdp_worst   {rounds} rounds, exact",
            "  pld_secret  the column 'hidden' only, exact",
            "Under gdp and gdp_fixed a client declines what would take it above its budget.",
        ]
    return "\n".join(lines)
