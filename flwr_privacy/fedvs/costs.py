"""Counts exactly what a run of FedVS sends, stores and computes.

The counts are of payloads: elements of the field, packed, and 28 bytes for each sealed message.
What Flower adds to a message is not in them. A multiply-accumulate is a product of two elements
and an addition; the coding is by dense matrices, not by the fast evaluation that the paper's
orders of growth are for, which is slower at up to a hundred clients.

Source: "FedVS: Straggler-Resilient and Privacy-Preserving Vertical Federated Learning for Split
Models" (ICML 2023), section 5.3.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from flwr_privacy.coding.packing import packed_bytes
from flwr_privacy.coding.thresholds import recovery_threshold
from flwr_privacy.errors import InvalidParameterError, check_flag, check_integer
from flwr_privacy.fedvs.rows import Segments
from flwr_privacy.fedvs.sharing import maskers
from flwr_privacy.fedvs.terms import SEAL_BYTES
from flwr_privacy.wire.channel import KEY_BYTES

__all__ = ["Costs", "cost_model"]

_FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Bytes and multiply-accumulates of each phase; those of owners are in the clients' order.

    Attributes
    ----------
    data_bytes : tuple of int
        Of each owner: its data shares for one holder. Sent once.
    data_relay_bytes : int
        All data shares that clients send to others.
    stored_bytes : int
        All data shares that a holder keeps, its own among them.
    weights_bytes : tuple of int
        Of each owner: what it sends a holder in a round, without masks.
    mask_bytes : int
        What an owner that deals a mask sends a holder besides, in the same message.
    weights_relay_bytes : int
        All that clients send to others in a round, masks included.
    answer_bytes : int
        A holder's answer.
    gradient_bytes : int
        The gradient that the server sends to every client, float32.
    key_bytes : int
        A client's public key. Sent once.
    upload_elements : tuple of int
        Of each owner: numbers that it sends in a round; shares, no mask, and the answer.
    plain_elements : int
        Numbers that a client of plain split learning sends: its embeddings.
    encode_macs, weights_macs, update_macs : tuple of int
        Of each owner: for data shares (once), for weight shares, and for the gradient of its
        weights.
    mask_macs : int
        Of an owner that deals a mask.
    answer_macs : int
        Of a holder's answer.
    decode_macs : int
        Of the server.
    plain_macs : tuple of int
        Of each owner: for its embeddings in plain split learning.
    """

    data_bytes: tuple[int, ...]
    data_relay_bytes: int
    stored_bytes: int
    weights_bytes: tuple[int, ...]
    mask_bytes: int
    weights_relay_bytes: int
    answer_bytes: int
    gradient_bytes: int
    key_bytes: int
    upload_elements: tuple[int, ...]
    plain_elements: int
    encode_macs: tuple[int, ...]
    weights_macs: tuple[int, ...]
    update_macs: tuple[int, ...]
    mask_macs: int
    answer_macs: int
    decode_macs: int
    plain_macs: tuple[int, ...]


def cost_model(
    *,
    N: int,
    K: int,
    T: int,
    rows: int,
    widths: Sequence[int],
    h: int,
    b: int,
    bits: int = 32,
    zero_mask: bool = True,
    chunk_rows: int | None = None,
) -> Costs:
    """Return what a run costs, phase by phase.

    Parameters
    ----------
    N, K, T : int
        Parameters of the code.
    rows : int
        Number of rows M, at least 1.
    widths : sequence of int
        Columns e_n of each owner's expanded data: N of them, at least 1 each.
    h : int
        Width of the embedding, at least 1.
    b : int
        Coded rows of a batch, 1 to ``ceil(M / K)``.
    bits : int, default 32
        Bits of an element in a message, `PrimeField.bits`, 2 to 32.
    zero_mask : bool, default True
        Whether some owners, `maskers` of them, deal masks in every round.
    chunk_rows : int, optional
        Coded rows of data in one sealed message, at least 1. Default: all.

    Returns
    -------
    Costs
        Bytes and multiply-accumulates.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.

    Examples
    --------
    >>> costs = cost_model(N=28, K=6, T=1, rows=60000, widths=[28] * 28, h=64, b=43)
    >>> costs.data_bytes[0] - 28, costs.weights_bytes[0] - 28
    (1120000, 7168)
    """
    threshold = _check(N, K, T, widths, h, b)
    length = Segments(rows=rows, K=K).length
    check_integer("b", b, maximum=length)
    check_integer("bits", bits, minimum=2, maximum=32)
    check_flag("zero_mask", zero_mask)
    chunk = length if chunk_rows is None else check_integer("chunk_rows", chunk_rows, minimum=1)

    def sealed(elements: int) -> int:
        return packed_bytes(elements, bits) + SEAL_BYTES

    chunks = [min(chunk, length - first) for first in range(0, length, chunk)]
    data = tuple(sum(sealed(count * width) for count in chunks) for width in widths)
    weights = tuple(sealed(width * h) for width in widths)
    dealers = maskers(N, T) if zero_mask else 0
    mask = packed_bytes(b * h, bits) if zero_mask else 0
    return Costs(
        data_bytes=data,
        data_relay_bytes=(N - 1) * sum(data),
        stored_bytes=packed_bytes(length * sum(widths), bits),
        weights_bytes=weights,
        mask_bytes=mask,
        weights_relay_bytes=(N - 1) * (sum(weights) + dealers * mask),
        answer_bytes=packed_bytes(b * h, bits),
        gradient_bytes=K * b * h * _FLOAT_BYTES,
        key_bytes=KEY_BYTES,
        upload_elements=tuple((N - 1) * width * h + b * h for width in widths),
        plain_elements=K * b * h,
        encode_macs=tuple(N * (K + T) * length * width for width in widths),
        weights_macs=tuple(N * T * width * h for width in widths),
        update_macs=tuple(K * b * width * h for width in widths),
        mask_macs=N * (K + 2 * T - 1) * b * h if zero_mask else 0,
        answer_macs=b * sum(widths) * h,
        decode_macs=K * threshold * b * h,
        plain_macs=tuple(K * b * width * h for width in widths),
    )


def _check(N: int, K: int, T: int, widths: Sequence[int], h: int, b: int) -> int:
    """Check the sizes and return the recovery threshold."""
    check_integer("K", K, minimum=1)
    check_integer("T", T, minimum=1)
    threshold = recovery_threshold(K, T)
    check_integer("N", N, minimum=threshold)
    check_integer("h", h, minimum=1)
    check_integer("b", b, minimum=1)
    if len(widths) != N:
        raise InvalidParameterError("widths", f"{len(widths)} widths", f"one for each of {N}")
    for width in widths:
        check_integer("widths", width, minimum=1)
    return threshold
