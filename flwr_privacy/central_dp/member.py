"""Draws what a member of a noise committee adds to the secure sum of a round.

A member keeps one stream of noise, from the round in which its block began. The vector of a round
goes into one sum: the state is written before the vector leaves the node, and a round that the
state has is refused, whatever became of its vector. After a crash, a lost or an older file, or a
round that was left out, the member has no place in the block any more and waits for the next one.

What the members of a sum must be alike in (block, factor, noise, size, members) is what they were
told, and masks cancel only among those who were told the same. Each member takes part in a round of
a block only if it was there in all rounds of it. So the streams of all members of a sum are equally
old: `flwr_privacy.central_dp.correlated.member_stream` needs nothing else.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from flwr_privacy.central_dp.correlated.member_stream import MemberStream
from flwr_privacy.central_dp.correlated.stream import vectors_kept
from flwr_privacy.errors import DeclinedError
from flwr_privacy.privacy.failures import FAILED_NAME
from flwr_privacy.privacy.grid import CodeGrid
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.digests import values_digest

from .terms import CentralDPTerms

__all__ = ["member_noise"]


def member_noise(
    state: dict[str, Any],
    terms: CentralDPTerms,
    start: Arrays,
    *,
    server_round: int,
    random: SecureRandom,
    check_room: Callable[[int], None] = lambda size: None,
) -> dict[str, Any]:
    """Return a member's noise of a round, as codes of the arrays that clients send.

    Parameters
    ----------
    state : dict
        What the member remembers of the experiment, changed here; empty at first. It must be on the
        disk before the noise leaves the node, and is as secret as the noise.
    terms : CentralDPTerms
        What was asked.
    start : Mapping of str to ndarray
        The model: only its shapes count.
    server_round : int
        The round.
    random : SecureRandom
        Where the noise comes from.
    check_room : callable, optional
        Raises if there is no room on the disk for some bytes more, which the server chooses.

    Raises
    ------
    DeclinedError
        If the member has sent noise of this round or of a later one, or if it has no stream that
        goes on in this round: the block began without it, a round was left out, or other terms were
        asked for.
    InvalidParameterError
        If the noise does not fit the grid.
    """
    names = terms.names(start)
    sizes = {name: np.size(start[name]) for name in sorted(names)}
    size = sum(sizes.values()) + 1  # the count of trainings that failed
    terms.check_grid(size - 1)
    if server_round > terms.rounds:
        raise DeclinedError(
            f"round {server_round}: the correlated noise is for {terms.rounds} rounds"
        )
    if server_round <= (sent := state.get("sent", 0)):
        raise DeclinedError(
            f"this member has sent its noise of round {sent}: another sum over the same round, or "
            "an earlier one, would show it"
        )
    stream, told = MemberStream(terms.toeplitz, size), _told(terms, sizes)
    if terms.block == server_round:
        check_room(8 * size * vectors_kept(terms.toeplitz))
    elif state.get("block") != terms.block or sent != server_round - 1:
        raise DeclinedError(
            f"this member has no stream of the block that began in round {terms.block}, up to "
            f"round {server_round - 1}: begin a new block"
        )
    elif state["told"] != told:
        raise DeclinedError("the block began with other members, noise or arrays")
    else:
        stream.load(state["stream"])
    noise = stream.draw(server_round, terms.share_sigmas()[0] / CodeGrid(terms.grid).step, random)
    state.clear()
    state |= {"block": terms.block, "sent": server_round, "told": told, "stream": stream.state()}
    codes, begin = {FAILED_NAME: noise[-1:]}, 0
    for name, length in sizes.items():
        codes[name] = noise[begin : begin + length].reshape(np.shape(start[name]))
        begin += length
    return codes


def _told(terms: CentralDPTerms, sizes: dict[str, int]) -> bytes:
    """Hash what stays the same in a block."""
    noise = [terms.noise_multiplier, terms.clipping_norm, terms.grid, terms.parties]
    arrays = [[name, size] for name, size in sizes.items()]
    return values_digest(terms.factor, terms.rounds, terms.neighbours, noise, terms.members, arrays)
