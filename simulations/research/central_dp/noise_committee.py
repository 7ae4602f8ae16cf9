"""Counts what correlated noise in shares costs and gains, and checks its secrecy exactly.

Each member of a committee adds a stream of correlated noise of its own to the secure sums of a
training (`docs/noise-in-shares.md`). The tables of that page come from
``python -m flwr_privacy.simulations.research.central_dp.noise_committee``.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction
from itertools import product
from typing import NamedTuple

import numpy as np

from flwr_privacy.central_dp.correlated.factors import ToeplitzFactor, inverse_column
from flwr_privacy.central_dp.correlated.options import BLT, BandedMF, CorrelatedNoise, TreeNoise
from flwr_privacy.central_dp.plan import CentralDPNoisePlan
from flwr_privacy.central_dp.terms import SHARE_REACH
from flwr_privacy.coding.packing import packed_bytes
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.privacy.distributed_noise import honest_members
from flwr_privacy.secure_sum.settings import SecureSum

__all__ = [
    "Committee",
    "Cost",
    "Opened",
    "committee_cost",
    "hockey_stick",
    "independent_cost",
    "reshared_cost",
    "restarted_multiplier",
    "rounds_until_lost",
    "shifted_sum_distance",
    "tables",
    "view_law",
]

WEIGHTS = 51_000
ENTRIES = WEIGHTS + 2  # the number of failed trainings, and the weight
MODEL = 4 * WEIGHTS  # bytes, down
PEER = 156  # bytes, up and down, for each client with which masks are shared: secure-sum.md
STEPS = 2**18  # of the grid up to the clipping norm, which is 1 here
ROUNDS = 100
_SENSITIVITY = 2  # of a sum to replaced data, in clipping norms
_LOSS = 0.01  # of a member, per round
_LARGEST = 2_000_000  # noise values that are gone through

View = tuple[tuple[int, ...], ...]


class Committee(NamedTuple):
    """A committee of which a fifth colludes, at least one, and all of which are in every sum."""

    members: int

    @property
    def colluders(self) -> int:
        """Members that tell the server their streams."""
        return self.members - self.honest

    @property
    def honest(self) -> int:
        """Number of honest members in a sum, h: the noise is divided by its root."""
        return honest_members(self.members)


class Cost(NamedTuple):
    """Bits of a value, and bytes of a round; 0 for members where there are none."""

    bits: int
    client_up: int
    client_down: int
    member_up: int
    member_down: int
    server: int


class Opened(NamedTuple):
    """A sum that the server opens: round of the streams, sum of the data, whose noise is in it."""

    round: int
    data: int
    members: Collection[int]


def _plan(correlated: CorrelatedNoise | None = None, *, members: int = 0) -> CentralDPNoisePlan:
    return CentralDPNoisePlan(
        noise="server" if correlated and not members else "distributed",
        sampling="balanced",
        epsilon=8.0,
        delta=1e-5,
        rounds=ROUNDS,
        q=0.1,
        correlated=correlated,
        members=members,
    )


def _banded() -> tuple[CentralDPNoisePlan, ToeplitzFactor]:
    return _plan(BandedMF()), BandedMF().factor(rounds=ROUNDS, separation=10, participations=10)


def independent_cost(clients: int) -> Cost:
    """Return the cost of independent noise in shares."""
    limit = _plan().terms(1.0, parties=SecureSum().parties_of(clients)).code_limit()
    bits = SecureSum().bounds(clients, code_limit=limit, largest_weight=1).modulus_bits
    shares = PEER * (clients - 1)
    up, down = packed_bytes(ENTRIES, bits) + shares, MODEL + shares
    return Cost(bits, up, down, 0, 0, clients * (up + down))


def committee_cost(clients: int, committee: Committee) -> Cost:
    """Return the cost of a committee beside the clients, all in one sum with complete masks.

    All vectors have one bound: the modulus holds, for every client and member, twelve standard
    deviations of what a member adds. Members get the model too.
    """
    plan = _plan(BandedMF(), members=committee.members)
    names = [str(member) for member in range(committee.members)]
    limit = plan.terms(1.0, members=names, block=1).code_limit()
    nodes = clients + committee.members
    bits = SecureSum().bounds(nodes, code_limit=limit, largest_weight=1).modulus_bits
    shares = PEER * (nodes - 1)
    up, down = packed_bytes(ENTRIES, bits) + shares, MODEL + shares
    return Cost(bits, up, down, up, down, nodes * (up + down))


def reshared_cost(clients: int) -> Cost:
    """Return the least cost of cohorts that hand shares of the last sums on.

    It counts what packed sharing cannot do without if a fifth of a cohort colludes and a fifth is
    lost: at most ``clients - colluders - lost`` values share a polynomial. A client deals its
    vector, deals its shares of the last ``bands - 1`` sums to the next cohort, packed again, and
    opens its share of C x + z. Keys, seals and proofs of correct dealing are left out.
    """
    plan, factor = _banded()
    share = plan.noise_multiplier * _SENSITIVITY / math.sqrt(SecureSum().parties_of(clients))
    largest = sum(factor.column(ROUNDS)) + SHARE_REACH * share  # of a client, on the lattice of C
    bits = 16 + math.ceil(math.log2(2 * STEPS * clients * largest))
    pack = clients - 2 * (clients // 5)
    dealt = clients / pack * (1 + (factor.bands - 1) / pack)
    up, down = (math.ceil(ENTRIES * bits / 8 * each) for each in (dealt + 1 / pack, dealt))
    return Cost(bits, up, MODEL + down, 0, 0, clients * (up + MODEL + down))


def restarted_multiplier(every: int) -> float:
    """Return the effective multiplier where new banded streams begin every so many rounds.

    As `CentralDPNoisePlan.effective_multiplier`: the noise of a finished block stays in all later
    sums.
    """
    plan, factor = _banded()
    variances = np.cumsum(np.cumsum(inverse_column(factor, ROUNDS)) ** 2)  # of prefix sums
    blocks, within = np.divmod(np.arange(ROUNDS), every)
    mean = float(np.mean(blocks * variances[every - 1] + variances[within]))
    return plan.noise_multiplier * math.sqrt(mean / ((ROUNDS + 1) / 2))


def rounds_until_lost(members: int) -> float:
    """Return the expected rounds until a member is lost, 1 % of them in each round.

    Examples
    --------
    >>> round(rounds_until_lost(5))
    20
    """
    return 1 / (_LOSS * members)


def view_law(
    opened: Sequence[Opened],
    *,
    coefficients: Sequence[int],
    modulus: int,
    law: Mapping[int, int],
    members: int,
    denominator: int = 1,
    known: Collection[int] = (),
) -> dict[View, Fraction]:
    """Return the exact law of what a server sees, by going through all values of the noise.

    Parameters
    ----------
    opened : sequence of Opened
        The sums. Noise that is in none of them was lost.
    coefficients, denominator
        Those of C over their denominator, which is the first of them. Above 1 each member rounds
        its own noise, as in `flwr_privacy.central_dp.correlated.stream`.
    modulus : int
        Of the sums.
    law : mapping of int to int
        How often each value of z comes up, in units of one over the denominator.
    members : int
        Number of members.
    known : collection of int
        Members whose z the server knows.

    Returns
    -------
    dict
        Chance of each view: the opened values, then the z of each known member.

    Examples
    --------
    >>> sums = [Opened(0, 1, (0,))]
    >>> seen = view_law(sums, coefficients=[1], modulus=5, law={0: 3, 1: 1}, members=1)
    >>> {view: str(chance) for view, chance in seen.items()}
    {((1,),): '3/4', ((2,),): '1/4'}
    """
    rounds = 1 + max(entry.round for entry in opened)
    if len(law) ** (members * rounds) > _LARGEST:
        raise InvalidParameterError("members", members, "fewer: the noise has too many values")

    def stream(z: tuple[int, ...]) -> list[int]:
        w: list[int] = []
        for value in z:
            rest = value - sum(c * v for c, v in zip(coefficients[1:], w[::-1], strict=False))
            w.append((2 * rest + denominator) // (2 * denominator))
        return w

    noises = product(law, repeat=rounds)
    single = [(math.prod(law[value] for value in z), z, stream(z)) for z in noises]
    counts: Counter[View] = Counter()
    for chosen in product(single, repeat=members):
        values = (e.data + sum(chosen[j][2][e.round] for j in e.members) for e in opened)
        view = (tuple(v % modulus for v in values), *(chosen[j][1] for j in sorted(known)))
        counts[view] += math.prod(weight for weight, _, _ in chosen)
    return {view: Fraction(count, counts.total()) for view, count in counts.items()}


def hockey_stick(
    first: Mapping[View, Fraction], second: Mapping[View, Fraction], factor: int
) -> Fraction:
    """Return the least delta for epsilon = ln(factor) between two laws, exactly."""

    def one_way(p: Mapping[View, Fraction], q: Mapping[View, Fraction]) -> Fraction:
        none = Fraction(0)
        return sum((max(none, p[view] - factor * q.get(view, none)) for view in p), none)

    return max(one_way(first, second), one_way(second, first))


def shifted_sum_distance(sigma: float, shifts: Sequence[float]) -> float:
    """Return how far a sum of discrete Gaussians on shifted integers is from a single one.

    It is the largest logarithm of the ratio of their probabilities, up to six standard deviations.
    """
    reach = math.ceil(12 * sigma * len(shifts))

    def gaussian(shift: float, scale: float) -> list[float]:
        chances = [math.exp(-(((k + shift) / scale) ** 2) / 2) for k in range(-reach, reach + 1)]
        return [chance / math.fsum(chances) for chance in chances]

    total, scale = gaussian(shifts[0], sigma), sigma * math.sqrt(len(shifts))
    for shift in shifts[1:]:
        total = np.convolve(total, gaussian(shift, sigma))[reach:-reach].tolist()
    both = zip(range(-reach, reach + 1), total, gaussian(sum(shifts), scale), strict=True)
    return max(abs(math.log(p / q)) for k, p, q in both if abs(k) <= 6 * scale)


def tables(write: Callable[[str], object] = print) -> None:
    """Write the tables of the page, line by line."""
    (banded, factor), independent = _banded(), _plan().effective_multiplier
    write("| noise | z | effective | to independent |\n|---|---|---|---|")
    multipliers = {"independent, in shares": (independent, independent)}
    options = (("banded, 3 bands", BandedMF(bands=3)), ("banded, 10 bands", BandedMF()))
    for name, option in (*options, ("BLT, 3 buffers", BLT()), ("tree", TreeNoise())):
        plan = _plan(option)
        multipliers[name] = plan.noise_multiplier, plan.effective_multiplier
    for every in (50, 20, 10, 5):
        name = f"banded, 10 bands, new streams every {every} rounds"
        multipliers[name] = banded.noise_multiplier, restarted_multiplier(every)
    for name, (z, effective) in multipliers.items():
        write(f"| {name} | {z:.2f} | {effective:.2f} | {effective / independent:.2f} |")
    write("\n| M | c | h | effective | a member is lost after |\n|---|---|---|---|---|")
    for committee in map(Committee, (5, 10, 20)):
        size, c, h = committee.members, committee.colluders, committee.honest
        noise = _plan(BandedMF(), members=size).effective_multiplier
        write(f"| {size} | {c} | {h} | {noise:.2f} | {rounds_until_lost(size):.0f} |")
    heads = "bits | client up | client down | member up | member down | server | to independent"
    write(f"\n| m | | {heads} |\n|---|---|---|---|---|---|---|---|---|")
    for clients in (20, 100):
        costs = {"independent": independent_cost(clients)}
        for size in (5, 10, 20):
            costs[f"committee, M = {size}"] = committee_cost(clients, Committee(size))
        costs["re-sharing, at least"] = reshared_cost(clients)
        for name, cost in costs.items():
            sizes = " | ".join(f"{each / 1000:,.0f}" if each else "-" for each in cost[1:])
            ratios = (f"{cost[i] / costs['independent'][i]:.2f}" for i in (1, 5))
            write(f"| {clients} | {name} | {cost.bits} | {sizes} | {', '.join(ratios)} |")
    write("")
    for clients in (20, 100):
        noise = independent * math.sqrt(clients / SecureSum().parties_of(clients))
        write(f"effective independent, all {clients} there: {noise:.2f}")
    variance = float(np.linalg.norm(inverse_column(factor, ROUNDS))) ** 2
    write(f"variance of w to that of z: {variance:.2f}")
    for kept in (factor.bands - 1, 3):
        write(f"state of a member with {kept} vectors: {kept * WEIGHTS * 8 / 1e6:.1f} MB")


if __name__ == "__main__":
    tables()
