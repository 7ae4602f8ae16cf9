"""The baselines of MSP and MSPDQ on the client: train, encode, one answer per round."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.clients.node.base import SchemeClient, Train
from flwr_privacy.coding.packing import pack
from flwr_privacy.errors import ProtocolError, check_integer
from flwr_privacy.mspdq.baselines import JoPEQ, Noising
from flwr_privacy.mspdq.codec import encode_start
from flwr_privacy.mspdq.terms import CODES
from flwr_privacy.pipeline.mechanism import Answer, Unprotected
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.privacy.updates import released_names
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.fields import read
from flwr_privacy.wire.identity import client_id_from, stream
from flwr_privacy.wire.layout import Layout
from flwr_privacy.wire.message import Fields

__all__ = ["DrawnFedAvgClient", "JoPEQFedAvgClient", "NbAFLClient", "QuantizedFedAvgClient"]

Vectors = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class _Released:
    keep_back: list[str]


class _Local(NamedTuple):
    """A local training, as vectors of what is released of the models."""

    layout: Layout
    start: Vectors
    model: Vectors
    random: SecureRandom


class _BaselineClient(SchemeClient):
    """What the baselines share: no metrics leave the node, and no ledger is charged."""

    keeps_statistics: ClassVar[bool] = True

    def release(self, phase: str, arrays: Arrays, fields: Fields, train: Train) -> Unprotected:
        """Return the release of a trained model."""
        encode, sigma = self._encoding(fields)

        def work(random: Callable[[str], SecureRandom]) -> Answer:
            start = dict(arrays)
            layout = Layout.of(start, released_names(start, read(_Released, fields).keep_back))
            before, model = layout.vector(start), layout.vector(train(start).arrays)
            return encode(_Local(layout, before, model, random("baseline")))

        return Unprotected(work, sigma)

    def _encoding(self, fields: Fields) -> tuple[Callable[[_Local], Answer], float]:
        """Return what makes an answer of a training, and how much noise it adds."""
        raise NotImplementedError


class DrawnFedAvgClient(_BaselineClient):
    """Client half of `flwr_privacy.strategies.DrawnFedAvg`, around any training.

    Guarantee
    ---------
    None: the server sees the trained model.
    """

    scheme: ClassVar[str] = "mspdq-fedavg"

    def _encoding(self, fields: Fields) -> tuple[Callable[[_Local], Answer], float]:
        """Send the trained model."""
        return lambda local: (local.layout.arrays(local.model), {}), 0.0


class NbAFLClient(_BaselineClient):
    """Client half of `flwr_privacy.strategies.NbAFL`, around any training.

    Guarantee
    ---------
    None that is checked, see `flwr_privacy.strategies.NbAFL`. The client charges no ledger, so a
    node whose policy limits epsilon, or asks for a noise multiplier, declines.
    """

    scheme: ClassVar[str] = "mspdq-ldp"

    def _encoding(self, fields: Fields) -> tuple[Callable[[_Local], Answer], float]:
        """Send the clipped model with noise."""
        noising = read(Noising, fields)

        def encode(local: _Local) -> Answer:
            released = noising.release(local.model, local.start, local.random)
            return local.layout.arrays(released), {}

        return encode, noising.scale


class QuantizedFedAvgClient(_BaselineClient):
    """Client half of `flwr_privacy.strategies.QuantizedFedAvg`, around any training.

    Guarantee
    ---------
    None: the server has the update up to the rounding.
    """

    scheme: ClassVar[str] = "mspdq-plain"

    def _encoding(self, fields: Fields) -> tuple[Callable[[_Local], Answer], float]:
        """Send the update's codes."""
        bits = check_integer("bits", fields.get("bits"), minimum=1, maximum=16)

        def encode(local: _Local) -> Answer:
            codes, ends = encode_start(local.model - local.start, 2**bits, local.random)
            return {CODES: pack(codes, bits)}, {"ends": list(ends)}

        return encode, 0.0


class JoPEQFedAvgClient(_BaselineClient):
    """Client half of `flwr_privacy.strategies.JoPEQFedAvg`, around any training.

    Guarantee
    ---------
    None that is checked, see `flwr_privacy.mspdq.baselines.JoPEQ`.
    """

    scheme: ClassVar[str] = "mspdq-jopeq"

    def _encoding(self, fields: Fields) -> tuple[Callable[[_Local], Answer], float]:
        """Send the update's codes."""
        codec, seed = read(JoPEQ, fields), fields.get("dither")
        if type(seed) is not int:
            raise ProtocolError(f"the entry 'dither' is {seed!r}, no seed")
        dither = stream(seed, client_id_from(self._context().node_config))

        def encode(local: _Local) -> Answer:
            update = local.model - local.start
            codes, scales = codec.encode_arrays(update, local.layout, local.random, dither)
            means, stds = zip(*scales, strict=True)
            return {CODES: pack(codes, codec.bits)}, {"means": list(means), "stds": list(stds)}

        return encode, 0.0
