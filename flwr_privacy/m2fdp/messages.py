"""Encodes the sealed messages within a trusted zone, and the data that both ends must agree on."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from flwr_privacy.errors import ProtocolError, check_number
from flwr_privacy.wire.channel import Part
from flwr_privacy.wire.documents import dumps, loads
from flwr_privacy.wire.message import Fields

from .sensitivity import Reach
from .terms import DOWN, SCHEME, UP, Delivery, Duty, M2FDPTerms
from .zone_average import Upload

__all__ = ["going_down", "going_up", "packed", "unpacked"]

_LARGEST_CODE = 2**40  # sums of a million of them, doubled, are int64


def going_up(
    fields: Fields,
    terms: M2FDPTerms | Duty,
    *,
    sender: str,
    tier: int,
    receiver: str,
    children: Sequence[str],
) -> tuple[Part, ...]:
    """Return the associated data of an answer to a parent: event, both ends, all siblings asked.

    Parameters
    ----------
    fields : dict
        The values of the request, with the experiment and the round.
    terms : M2FDPTerms or Duty
        What one of the two ends was asked.
    sender, tier : str, int
        Who sends it, from which tier.
    receiver : str
        Who is to get it.
    children : sequence of str
        All children of the receiver that were asked.
    """
    event = [terms.event, terms.tier, terms.period]
    ends: list[Part] = [sender, tier, receiver]
    return (SCHEME, fields["experiment-id"], fields["round"], event, UP, ends, list(children))


def going_down(
    fields: Fields,
    event: Any,
    *,
    sender: str,
    receiver: str,
    tier: int,
    children: Sequence[str],
) -> tuple[Part, ...]:
    """Return the associated data of a model for a child; `tier` is the child's.

    Raises
    ------
    ProtocolError
        If the event has no number.
    """
    if type(event) is not int:
        raise ProtocolError("the request does not say which event a sealed model is of")
    ends: list[Part] = [sender, receiver, tier]
    return (SCHEME, fields["experiment-id"], fields["round"], event, DOWN, ends, list(children))


def packed(upload: Upload, terms: M2FDPTerms | Duty | Delivery) -> bytes:
    """Return an upload as bytes, with what sender and receiver must agree on."""
    reach = upload.reach
    return dumps(
        {
            "codes": upload.codes.astype(np.int64 if upload.wide else np.int32),
            "anchor": reach.anchor,
            "shared": reach.shared,
            "nearer": [list(step) for step in reach.nearer],
            "own": reach.own,
            "floor": upload.floor,
            "agreed": _agreed(terms),
        }
    )


def unpacked(content: bytes, terms: M2FDPTerms | Duty | Delivery, *, sender: str) -> Upload:
    """Decode the upload of a member of the zone, which may be an adversary.

    Parameters
    ----------
    content : bytes
        What `packed` encoded.
    terms : M2FDPTerms, Duty or Delivery
        What the receiver was asked.
    sender : str
        The member, for errors.

    Raises
    ------
    ProtocolError
        If the content is no upload, or the sender was asked for another noise, grid or unit.
    """
    try:
        state = loads(content)
        agreed, codes = state["agreed"], np.asarray(state["codes"])
        reach = Reach(
            anchor=state["anchor"],
            shared=state["shared"],
            nearer=tuple((tier, length) for tier, length in state["nearer"]),
            own=state["own"],
        )
        floor = check_number("floor", state["floor"], minimum=0)
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"'{sender}' sealed something else than an upload: {error}") from error
    if codes.ndim != 1 or codes.dtype not in (np.int32, np.int64):
        raise ProtocolError(
            f"'{sender}' sealed codes of {codes.dtype} and shape {codes.shape}: expected a vector "
            "of int32 or int64"
        )
    if codes.size and not -_LARGEST_CODE <= codes.min() <= codes.max() <= _LARGEST_CODE:
        raise ProtocolError(f"'{sender}' sealed a code beyond 2**40: sums would overflow")
    if agreed != _agreed(terms):
        raise ProtocolError(f"'{sender}' was asked for another noise, grid or unit")
    wide = codes.dtype != np.int32
    return Upload(codes.astype(np.int64), reach, floor, wide)


def _agreed(terms: M2FDPTerms | Duty | Delivery) -> list[Any]:
    return [
        terms.unit,
        terms.noise_multiplier,
        terms.sampling,
        terms.grid,
        terms.period,
        terms.law,
        terms.growth,
        terms.depth,
        sorted(terms.keep_back),
    ]
