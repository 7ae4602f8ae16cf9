"""Labels of trust from the shares that the paper's experiments give."""

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

from flwr_privacy.errors import InvalidParameterError, check_integer, check_number
from flwr_privacy.wire.identity import stream

from .shape import CLOUD

__all__ = ["check_ratios", "label"]


def check_ratios(p: float | Sequence[float], *, tiers: int) -> list[float]:
    """Return one share for every tier of aggregators, of which there are `tiers`."""
    if isinstance(p, Sequence) and not isinstance(p, str):
        if len(p) != tiers:
            allowed = f"{tiers} numbers, one for every tier of aggregators"
            raise InvalidParameterError("p", list(p), allowed)
        return [check_number("p", share, minimum=0, maximum=1) for share in p]
    share = check_number("p", p, minimum=0, maximum=1)
    if share and not tiers:
        raise InvalidParameterError(
            "p", p, "0 or None: a tree of depth 1 has no aggregators to trust"
        )
    return [share] * tiers


def label(
    children: Mapping[str, tuple[str, ...]], shares: Sequence[float], *, seed: int | None = None
) -> Iterator[str]:
    """Name the secure aggregators, from the cloud down.

    Parameters
    ----------
    children : Mapping of str to tuple of str
        Children of the cloud and of every aggregator.
    shares : sequence of float
        Share of the children of an insecure node that are secure, by tier of aggregators; rounded
        half up to whole nodes. All aggregators below a secure node are secure.
    seed : int, optional
        Draws which ones are secure; by default the first children of a node.
    """
    draws = None if seed is None else stream(check_integer("seed", seed), "m2fdp", "labels")
    insecure: list[str] = [CLOUD]
    secure: list[str] = []
    for share in shares:
        secure = [child for node in secure for child in children[node]]
        above, insecure = insecure, []
        for node in above:
            below = children[node]
            # The decimals as they are written: 0.29 of 50 is 14.5, and not a little less.
            count = math.floor(Fraction(str(share)) * len(below) + Fraction(1, 2))
            chosen = set(range(count))
            if draws is not None:
                chosen = set(draws.permutation(len(below))[:count].tolist())
            for i, child in enumerate(below):
                (secure if i in chosen else insecure).append(child)
        yield from secure
