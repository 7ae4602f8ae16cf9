"""Records what the server receives in a round of MSP, MSPDQ or JoPEQ, and fits models to it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.clients import JoPEQFedAvgClient, MSPClient, MSPDQClient
from flwr_privacy.coding.packing import unpack
from flwr_privacy.coding.quantize import Codes
from flwr_privacy.mspdq import CODES, MIX, SYNC, Codec, MSPTerms, decode_start
from flwr_privacy.privacy.updates import released_names
from flwr_privacy.secure_sum.masked import MASKED, values_of
from flwr_privacy.simulations.research.attacks.setup import AttackSetup, HeardExchange, listen
from flwr_privacy.strategies import MSP, MSPDQ, JoPEQFedAvg
from flwr_privacy.wire.identity import stream
from flwr_privacy.wire.layout import Layout
from flwr_privacy.wire.message import TRAIN

from .consensus import recover_w_tracked

__all__ = ["Overheard", "layout_of", "overhear", "overhear_jopeq", "overhear_masked"]

Vectors = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Overheard:
    """What the server receives in a learning round with n clients and K mixing steps.

    Parameters
    ----------
    terms : MSPTerms
        The parameters, which everybody knows.
    messages : ndarray of float64, shape (n, K + 1, d)
        Every client's messages: visible sub-states or decoded values.
    averages : ndarray of float64, shape (K + 1, d)
        The averages as they were sent; the last is the new model.
    steps : ndarray of float64, shape (n, K)
        Distance of the knobs of messages 1 to K; 0 where nothing was rounded.
    """

    terms: MSPTerms
    messages: Vectors
    averages: Vectors
    steps: Vectors

    def tracked(self, index: int, rounds: int) -> Vectors:
        """Return the model of a client that fits the messages of the first steps best."""
        messages, steps = self.messages[index, : rounds + 1], self.steps[index, :rounds]
        return self._fit(messages, rounds, steps)

    def mean(self) -> Vectors:
        """Return the mean model that fits the averages best."""
        rounds = self.terms.rounds
        return self._fit(self.averages, rounds, np.zeros(rounds))

    def _fit(self, messages: Vectors, rounds: int, steps: Vectors) -> Vectors:
        mixing = self.terms.mixing
        return recover_w_tracked(
            messages,
            self.averages[: rounds + 1],
            kappa=mixing.kappa,
            gains=[mixing.largest_gain(k) for k in range(rounds)],
            m=mixing.weight,
            steps=[float(step) for step in steps],
        )


def layout_of(setup: AttackSetup) -> Layout:
    """Return the order of the setup's weights in a vector; its arrays have float64."""
    wide = {name: array.astype(np.float64) for name, array in setup.start.items()}
    return Layout.of(wide, released_names(wide))


def overhear(setup: AttackSetup, strategy: MSP) -> Overheard:
    """Run a round of all clients without a secure sum, from a start other than ``global``."""
    client = MSPDQClient if isinstance(strategy, MSPDQ) else MSPClient
    exchanges, model = listen(setup, strategy, client, clients=len(setup.labels))
    terms, layout = strategy.terms, layout_of(setup)
    heard = [_heard(own, terms, layout) for own in exchanges]
    averages = [layout.vector(e.sent) for e in exchanges[0] if e.phase == MIX]
    return Overheard(
        terms=terms,
        messages=np.array([messages for messages, _ in heard]),
        averages=np.array([*averages, layout.vector(model)]),
        steps=np.array([steps for _, steps in heard]),
    )


def overhear_masked(setup: AttackSetup, strategy: MSPDQ, *, clients: int) -> Overheard:
    """Run a round of the first clients under a secure sum with one mixing step.

    The server has no client's codes. It reads each masked vector as if it were one.
    """
    exchanges, model = listen(setup, strategy, MSPDQClient, clients=clients)
    terms, layout = strategy.terms, layout_of(setup)
    start = layout.vector(setup.start)
    bits = strategy.bounds_of([str(i) for i in range(clients)], 1).modulus_bits
    messages, steps = [], []
    for own in exchanges:
        sent = next(e for e in own if e.phase == TRAIN)
        values = values_of(unpack(sent.arrays[MASKED], bits, layout.size + 1), bits)[:-1]
        codes = ((values + terms.levels // 2) % terms.levels).astype(np.uint16)
        codec, width = Codec(start, terms.levels), float(sent.asked["width"])
        codec.decode(codes, width)
        messages.append([start, codec.value])
        steps.append([width / (terms.levels - 1)])
    return Overheard(
        terms=terms,
        messages=np.array(messages),
        averages=np.array([start, layout.vector(model)]),
        steps=np.array(steps),
    )


def overhear_jopeq(setup: AttackSetup, strategy: JoPEQFedAvg) -> list[Vectors]:
    """Run a round of all clients, and return their models as the server decodes them."""
    exchanges, _ = listen(setup, strategy, JoPEQFedAvgClient, clients=len(setup.labels))
    layout = layout_of(setup)
    start, models = layout.vector(setup.start), []
    for index, own in enumerate(exchanges):
        upload = next(e for e in own if e.phase == TRAIN)
        codes = unpack(upload.arrays[CODES], strategy.bits, layout.size)
        scales = list(zip(upload.told["means"], upload.told["stds"], strict=True))
        dither = stream(upload.asked["dither"], str(index))
        models.append(start + strategy.codec.decode_arrays(codes, scales, layout, dither))
    return models


def _heard(
    own: Sequence[HeardExchange], terms: MSPTerms, layout: Layout
) -> tuple[list[Vectors], list[float]]:
    """Return a client's messages, and the distances of the knobs of all but the first."""
    train = next(e for e in own if e.phase == TRAIN)
    mixed = [e for e in own if e.phase == MIX]
    if terms.levels == 0:
        return [layout.vector(e.arrays) for e in (train, *mixed)], [0.0] * len(mixed)
    if terms.start == "independent":
        low, high = train.told["ends"]
        first = decode_start(_codes(train, terms, layout), (low, high), terms.levels)
    else:
        first = next(layout.vector(e.sent) for e in own if e.phase == SYNC)
    codec = Codec(first, terms.levels)
    messages, steps = [first], []
    for e in mixed:
        width = 2 * e.told["half-width"] if terms.interval == "self" else e.asked["width"]
        codec.decode(_codes(e, terms, layout), width)
        messages.append(codec.value)
        steps.append(width / (terms.levels - 1))
    return messages, steps


def _codes(exchange: HeardExchange, terms: MSPTerms, layout: Layout) -> Codes:
    return unpack(exchange.arrays[CODES], (terms.levels - 1).bit_length(), layout.size)
