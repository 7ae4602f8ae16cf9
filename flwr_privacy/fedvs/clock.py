"""Counts the virtual seconds that clients compute and send, beside their delays.

What a client sends of an embedding has 4 bytes for each value. All multiply equally fast, and every
client has a link of its own; the paper's (section 6.2) has 300 Mbps.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from flwr_privacy.errors import check_number

from .costs import cost_model
from .data import TRAIN_PART
from .delays import HalfSlow
from .sharing import maskers
from .terms import CodeTerms

__all__ = ["Seconds", "coded_seconds", "plain_seconds", "transfer_seconds"]

_VALUE = 4  # bytes of an embedding's value


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Virtual seconds of a training, without the delays.

    Parameters
    ----------
    share : mapping of str to float
        Of each client: from the request for shares of its weights until its own are there, and all
        clients have those of all others.
    upload : mapping of str to float
        Of each client: from the request for an answer until it is there, the gradient has come
        back, and the clients have made their step.
    setup : float, default 0.0
        Until all have their shares of the data, once.
    """

    share: Mapping[str, float]
    upload: Mapping[str, float]
    setup: float = 0.0


def plain_seconds(widths: Mapping[str, int], *, batch: int, h: int, delays: HalfSlow) -> Seconds:
    """Return the seconds of plain split learning, in which clients send embeddings.

    Parameters
    ----------
    widths : mapping of str to int
        Columns e_n of each client's expanded data.
    batch : int
        Rows of a batch.
    h : int
        Width of the embeddings.
    delays : HalfSlow
        How fast clients send and compute.
    """
    embedding = transfer_seconds(_VALUE * batch * h, delays.bandwidth_mbps)
    fixed = embedding + _step_seconds(max(widths.values()), batch, h, delays)
    upload = {client: fixed + batch * e * h / delays.speed for client, e in widths.items()}
    return Seconds(share=dict.fromkeys(widths, 0.0), upload=upload)


def coded_seconds(terms: CodeTerms, *, b: int, delays: HalfSlow) -> Seconds:
    """Return the seconds of FedVS; its first clients are the ones that deal zero masks.

    Parameters
    ----------
    terms : CodeTerms
        What server and clients agreed on.
    b : int
        Coded rows of a batch.
    delays : HalfSlow
        How fast clients send and compute.
    """

    def sends(size: float) -> float:
        return transfer_seconds(size, delays.bandwidth_mbps)

    N, K, h = len(terms.members), terms.partitions, terms.embedding
    costs = cost_model(
        N=N,
        K=K,
        T=terms.privacy,
        rows=terms.segments(TRAIN_PART).rows,
        widths=terms.widths,
        h=h,
        b=b,
        bits=terms.field.bits,
        zero_mask=terms.zero_mask,
    )
    dealers = maskers(N, terms.privacy) if terms.zero_mask else 0
    received = sum(costs.weights_bytes) - min(costs.weights_bytes) + dealers * costs.mask_bytes
    relay = sends(received)
    share = {}
    for place, client in enumerate(terms.members):
        mask = place < dealers
        macs = costs.weights_macs[place] + mask * costs.mask_macs
        sent = (N - 1) * (costs.weights_bytes[place] + mask * costs.mask_bytes)
        share[client] = macs / delays.speed + sends(sent) + relay
    upload = costs.answer_macs / delays.speed + sends(costs.answer_bytes)
    upload += _step_seconds(max(terms.widths), K * b, h, delays)
    dealt = max(costs.data_bytes) * (N - 1), sum(costs.data_bytes) - min(costs.data_bytes)
    return Seconds(
        share=share,
        upload=dict.fromkeys(terms.members, upload),
        setup=max(costs.encode_macs) / delays.speed + sum(map(sends, dealt)),
    )


def _step_seconds(width: int, batch: int, h: int, delays: HalfSlow) -> float:
    """Return the seconds until a client has the gradient and has made its step."""
    back = transfer_seconds(_VALUE * batch * h, delays.bandwidth_mbps)
    return back + batch * width * h / delays.speed


def transfer_seconds(size: float, bandwidth_mbps: float = 300.0) -> float:
    """Return the seconds that `size` bytes take over a link; the paper's has 300 Mbps.

    Examples
    --------
    >>> transfer_seconds(37_500_000)
    1.0
    """
    check_number("size", size, minimum=0)
    check_number("bandwidth_mbps", bandwidth_mbps, minimum=1e-9)
    return 8 * size / (1e6 * bandwidth_mbps)
