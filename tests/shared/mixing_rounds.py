"""A learning round of MSP or MSPDQ by the classes of both ends, without messages."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.coding.packing import pack
from flwr_privacy.mspdq import (
    Hub,
    Intervals,
    Member,
    Mixing,
    MSPTerms,
    decode_start,
    encode_start,
)
from flwr_privacy.privacy.averaging import WeightedMean
from flwr_privacy.privacy.randomness import SecureRandom

Vectors = NDArray[np.float64]
Random = Callable[[str, int], SecureRandom]


@dataclass(frozen=True, kw_only=True, eq=False)
class Transcript:
    """What the server has of a learning round of M clients and K steps, and where it ends.

    `heard` (K + 1, M, d) are the clients' messages, decoded; `averages` (K + 1, d) W[0] to W[K];
    `widths` (K, M) those of the intervals, zeros where nothing is rounded; `saturated` the values
    outside of theirs; `visible` and `hidden` (M, d) the last sub-states, which are secret.
    """

    heard: Vectors
    averages: Vectors
    widths: Vectors
    saturated: int
    visible: Vectors
    hidden: Vectors


def terms_of(mixing: Mixing, **more: Any) -> MSPTerms:
    return MSPTerms(**asdict(mixing), **more)


def learning_round(
    terms: MSPTerms,
    models: Vectors,
    random: SecureRandom | Random,
    *,
    visible: Vectors | None = None,
    start: Vectors | None = None,
    intervals: Intervals | None = None,
    referred: int = 0,
) -> Transcript:
    """Mix the models (M, d) of clients that are drawn once each.

    `random` is for all of it, or by client and message. `visible` (M, d) are the clients' splits,
    by default drawn by their law; `start` (d,) is the global model, for a start from there;
    `intervals` has the constants of the rule; `referred` is whose split a reference start is.
    """
    source = cache(random if callable(random) else lambda client, k: random)
    names = [str(row) for row in range(len(models))]
    intervals = terms.intervals if intervals is None else intervals
    draws = dict.fromkeys(names, 1)
    weights = [terms.mixing.own_weight(source(name, 0)) for name in names]
    splits = visible
    if visible is None and terms.start != "global":
        splits = np.array(
            [
                terms.law.visible(model, source(name, 0))
                if terms.start != "reference" or row == referred
                else model
                for row, (name, model) in enumerate(zip(names, models, strict=True))
            ]
        )
    if terms.start == "reference":
        codes, ends = encode_start(splits[referred], terms.levels, source(names[referred], 0))
        start = decode_start(codes, ends, terms.levels)
    hub = Hub(terms, intervals, draws, models[0] if start is None else start)
    members = []
    for row, (name, model) in enumerate(zip(names, models, strict=True)):
        first = start if terms.levels else splits[row]
        if terms.levels and terms.start == "independent":
            codes, ends = encode_start(splits[row], terms.levels, source(name, 0))
            hub.begin(name, pack(codes, terms.bits), *ends)
            first = decode_start(codes, ends, terms.levels)
        members.append(Member.begin(terms, model, first, weight=weights[row]))
    heard, averages = [[member.heard for member in members]], []
    widths, saturated = np.zeros((terms.rounds, len(models))), 0
    for k in range(terms.rounds + 1):
        averages.append(hub.average(names) if terms.levels else _mean(names, heard[-1]))
        if k == terms.rounds:
            break
        if terms.levels:
            for name, member in zip(names, members, strict=True):
                hub.tell(name, member.scalar())
            hub.plan(names)
        for row, (name, member) in enumerate(zip(names, members, strict=True)):
            own = source(name, k + 1)
            member.step(averages[-1], own)
            if terms.levels == 0:
                member.heard = member.states.visible.copy()
                continue
            said = member.say(hub.width, own)
            half = said.width / 2 if hub.width is None else None
            hub.hear(name, pack(said.codes, terms.bits), half)
            widths[k, row] = said.width
            saturated += said.saturated
        heard.append([member.heard for member in members])
    return Transcript(
        heard=np.array(heard),
        averages=np.array(averages),
        widths=widths,
        saturated=saturated,
        visible=np.array([member.states.visible for member in members]),
        hidden=np.array([member.states.hidden for member in members]),
    )


def _mean(names: list[str], heard: list[Vectors]) -> Vectors:
    mean = WeightedMean({"w": heard[0]})
    for name, message in zip(names, heard, strict=True):
        mean.accumulate(name, {"w": message}, weight=1)
    return np.asarray(mean.finish()["w"])
