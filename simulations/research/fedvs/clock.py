"""Virtual seconds for computing and sending in a simulation, without the drawn delays.

What a client sends has 32 bits for each value of an embedding. All methods multiply equally fast,
and every client has a link of its own.
"""

from typing import NamedTuple

from flwr_privacy.fedvs.sharing import maskers

from .paper.conventions import transfer_seconds
from .paper.costs import cost_model
from .synthetic_data import FedVSSettings, FedVSSyntheticData

__all__ = ["Clock", "clock_of"]

_VALUE = 4  # bytes of an embedding's value


class Clock(NamedTuple):
    """Virtual seconds of the parts of a step."""

    share: list[float]
    """Of each client, for shares of its weights."""
    upload: list[float]
    """Of each client, from the question to the arrival of its answer."""
    back: float
    """Until the last client has the gradient and has made its step."""
    relay: float = 0.0
    """From the last share's arrival until every client has those of all others."""
    offline: float = 0.0
    """Until all have their shares of the data, once."""


def clock_of(data: FedVSSyntheticData, setting: FedVSSettings, batch: int) -> Clock:
    """Return the seconds of a system.

    Parameters
    ----------
    data : FedVSSyntheticData
        Its clients' columns.
    setting : FedVSSettings
        The system.
    batch : int
        Real rows of a step, for FedVS a multiple of K.
    """
    N, h, widths = data.clients, setting.embedding, setting.widths(data)

    def sent(size: int) -> float:
        return transfer_seconds(size, setting.bandwidth_mbps)

    step = batch * max(widths) * h / setting.speed
    back = sent(_VALUE * batch * h) + step
    if setting.method != "fedvs":
        upload = [batch * e * h / setting.speed + sent(_VALUE * batch * h) for e in widths]
        return Clock([0.0] * N, upload, back)
    K = setting.segments(N)
    costs = cost_model(
        N=N,
        K=K,
        T=setting.T,
        rows=data.rows,
        widths=widths,
        h=h,
        b=batch // K,
        bits=setting.field.bits,
    )
    dealers = maskers(N, setting.T)
    masks = [1] * dealers + [0] * (N - dealers)
    share = [
        (macs + mask * costs.mask_macs) / setting.speed
        + sent((N - 1) * (size + mask * costs.mask_bytes))
        for mask, macs, size in zip(masks, costs.weights_macs, costs.weights_bytes, strict=True)
    ]
    received = sum(costs.weights_bytes) - min(costs.weights_bytes)
    dealt = max(costs.data_bytes) * (N - 1), sum(costs.data_bytes) - min(costs.data_bytes)
    return Clock(
        share=share,
        upload=[costs.answer_macs / setting.speed + sent(costs.answer_bytes)] * N,
        back=back,
        relay=sent(received + dealers * costs.mask_bytes),
        offline=max(costs.encode_macs) / setting.speed + sum(map(sent, dealt)),
    )
