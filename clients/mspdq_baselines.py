"""The baselines of MSP and MSPDQ on the client: train, encode, one answer per round."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.arrays import Arrays
from flwr_privacy.errors import ProtocolError, check_integer
from flwr_privacy.fields import read
from flwr_privacy.identity import stream
from flwr_privacy.layout import Layout
from flwr_privacy.mspdq.baselines import JoPEQ, Noising
from flwr_privacy.mspdq.codec import encode_start
from flwr_privacy.mspdq.terms import CODES
from flwr_privacy.packing import pack
from flwr_privacy.randomness import SecureRandom
from flwr_privacy.release import question_of
from flwr_privacy.updates import released_names
from flwr_privacy.wire import Fields

from .base import SchemeClient, Train
from .custody import Custody

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
    client_id: str


class _BaselineClient(SchemeClient):
    """What the baselines share: no metrics leave the node, and no ledger is charged."""

    keeps_statistics: ClassVar[bool] = True

    def _trained(
        self, phase: str, arrays: Arrays, fields: Fields, train: Train, *, sigma: float = 0.0
    ) -> _Local:
        """Check the node's policy and train.

        Raises
        ------
        DeclinedError
            If the policy asks for more than a baseline gives.
        DataError
            If the trained model is not finite.
        ProtocolError, InvalidParameterError
            If the question is malformed.
        """
        if self.context is None:
            raise TypeError(f"{type(self).__name__} needs the context: give it as second argument")
        custody = Custody.of(self.context)
        custody.policy.check_sum(None)
        self.check_unaccounted(sigma=sigma)
        start = dict(arrays)
        layout = Layout.of(start, released_names(start, read(_Released, fields).keep_back))
        return _Local(
            layout=layout,
            start=layout.vector(start),
            model=layout.vector(train(start).arrays),
            random=custody.random(question_of(phase, fields), "baseline"),
            client_id=custody.client_id,
        )


class DrawnFedAvgClient(_BaselineClient):
    """Client half of `flwr_privacy.strategies.DrawnFedAvg`, around any training.

    Guarantee
    ---------
    None: the server sees the trained model.
    """

    scheme: ClassVar[str] = "mspdq-fedavg"

    def handle(
        self, phase: str, arrays: Arrays, fields: Fields, train: Train
    ) -> tuple[Arrays, Fields]:
        """Answer with the trained model; raises what `NbAFLClient.handle` does."""
        local = self._trained(phase, arrays, fields, train)
        return local.layout.arrays(local.model), {}


class NbAFLClient(_BaselineClient):
    """Client half of `flwr_privacy.strategies.NbAFL`, around any training.

    Guarantee
    ---------
    None that is checked, see `flwr_privacy.strategies.NbAFL`. The client charges no ledger, so a
    node whose policy limits epsilon, or asks for a noise multiplier, declines.
    """

    scheme: ClassVar[str] = "mspdq-ldp"

    def handle(
        self, phase: str, arrays: Arrays, fields: Fields, train: Train
    ) -> tuple[Arrays, Fields]:
        """Answer with the clipped model with noise.

        Raises
        ------
        DeclinedError
            If the node's policy does not allow it.
        DataError
            If the trained model is not finite.
        ProtocolError, InvalidParameterError
            If the question is malformed, or its noise too little for so large weights.
        """
        noising = read(Noising, fields)
        local = self._trained(phase, arrays, fields, train, sigma=noising.scale)
        released = noising.release(local.model, local.start, local.random)
        return local.layout.arrays(released), {}


class QuantizedFedAvgClient(_BaselineClient):
    """Client half of `flwr_privacy.strategies.QuantizedFedAvg`, around any training.

    Guarantee
    ---------
    None: the server has the update up to the rounding.
    """

    scheme: ClassVar[str] = "mspdq-plain"

    def handle(
        self, phase: str, arrays: Arrays, fields: Fields, train: Train
    ) -> tuple[Arrays, Fields]:
        """Answer with the update's codes; raises what `NbAFLClient.handle` does."""
        bits = check_integer("bits", fields.get("bits"), minimum=1, maximum=16)
        local = self._trained(phase, arrays, fields, train)
        codes, ends = encode_start(local.model - local.start, 2**bits, local.random)
        return {CODES: pack(codes, bits)}, {"ends": list(ends)}


class JoPEQFedAvgClient(_BaselineClient):
    """Client half of `flwr_privacy.strategies.JoPEQFedAvg`, around any training.

    Guarantee
    ---------
    None that is checked, see `flwr_privacy.mspdq.baselines.JoPEQ`.
    """

    scheme: ClassVar[str] = "mspdq-jopeq"

    def handle(
        self, phase: str, arrays: Arrays, fields: Fields, train: Train
    ) -> tuple[Arrays, Fields]:
        """Answer with the update's codes; raises what `NbAFLClient.handle` does."""
        codec, seed = read(JoPEQ, fields), fields.get("dither")
        if type(seed) is not int:
            raise ProtocolError(f"the entry 'dither' is {seed!r}, no seed")
        local = self._trained(phase, arrays, fields, train)
        dither = stream(seed, local.client_id)
        update = local.model - local.start
        codes, scales = codec.encode_arrays(update, local.layout, local.random, dither)
        own: dict[str, Any] = {
            "means": [mean for mean, _ in scales],
            "stds": [std for _, std in scales],
        }
        return {CODES: pack(codes, codec.bits)}, own
