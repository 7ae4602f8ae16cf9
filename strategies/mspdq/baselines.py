"""Baselines of MSP and MSPDQ on the same loop, with the same draws.

Each takes one exchange per round. The average is over draws, as in `flwr_privacy.strategies.MSP`,
so that curves compare like with like.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.coding.quantize import Codes
from flwr_privacy.errors import check_choice, check_integer, check_number
from flwr_privacy.keywords import checked_keywords
from flwr_privacy.mspdq.baselines import JoPEQ, Noising, nbafl_downlink_sigma, nbafl_uplink_sigma
from flwr_privacy.mspdq.codec import decode_start
from flwr_privacy.mspdq.hub import unpacked
from flwr_privacy.mspdq.splitting import noised
from flwr_privacy.mspdq.theory import laplace_scale
from flwr_privacy.privacy.averaging import ReplyRefusedError, WeightedMean
from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.privacy.guarantee import Guarantee
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.privacy.updates import kept_back, released_names
from flwr_privacy.strategies.loop.draws import DrawnStrategy
from flwr_privacy.strategies.requests.instruction import Instruction
from flwr_privacy.strategies.requests.request_log import ClientReply
from flwr_privacy.wire.arrays import Arrays, is_finite
from flwr_privacy.wire.fields import write
from flwr_privacy.wire.identity import derive_seed, stream
from flwr_privacy.wire.layout import Layout

from .replies import numbers_of, packed_codes

__all__ = ["DrawnFedAvg", "JoPEQFedAvg", "NbAFL", "QuantizedFedAvg"]

_UPDATE = "update"

Vectors = NDArray[np.float64]


@checked_keywords
@dataclass(eq=False, repr=False, kw_only=True)
class DrawnFedAvg(DrawnStrategy):
    """Federated averaging over draws, with models sent uncoded.

    The clients' app is wrapped in `flwr_privacy.clients.DrawnFedAvgClient`.

    Parameters
    ----------
    fraction_train, ..., loop, inner, secure_sum
        FedAvg's and those of `flwr_privacy.strategies.loop.draws.DrawnStrategy`: `replacement` and
        `shares` among them.
    keep_back : sequence of str, optional
        Arrays that are not sent, beside those of integers and what torch calls running statistics
        of normalisation layers, which never are: the model keeps the server's values of them.
        Where it is left out and arrays that came as a list look like statistics, the first round is
        refused: see `flwr_privacy.clients.torch.statistics_of`; [] says that there are none.

    Guarantee
    ---------
    None: the server sees the trained model of every client.

    Examples
    --------
    >>> from flwr_privacy.strategies import DrawnFedAvg
    >>> strategy = DrawnFedAvg(fraction_train=0.2, replacement=True)
    """

    keep_back: Sequence[str] | None = None

    scheme: ClassVar[str] = "mspdq-fedavg"
    keeps_statistics: ClassVar[bool] = True
    _seen: ClassVar[str] = "the model of a client: the server sees it as it is"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._keep_back_given, self._keep_back = self.keep_back, list(self.keep_back or ())

    def instruct(self, server_round: int) -> Instruction:
        """Return the instruction: arrays that stay at the client, and models weighed by draws."""
        self._current = server_round
        names = released_names(self._template, self._keep_back)
        self._layout = Layout.of(self._template, names)
        return Instruction(
            fields={"keep-back": self._keep_back},
            accumulator=lambda: WeightedMean({n: self._template[n] for n in self._layout.parts}),
            take=lambda mean, reply: mean.accumulate(
                reply.client_id, reply.arrays(), weight=self._weight(reply)
            ),
        )

    def guarantee(self) -> Guarantee:
        """Return a guarantee of nothing, and why."""
        kept = kept_back(self._template, self._keep_back)
        return Guarantee(
            scheme=self.scheme,
            protects="nothing",
            adversary="nobody",
            not_protected=(
                self._seen,
                *([f"(not sent at all: {', '.join(kept)})"] if kept else []),
            ),
            evidence=("tests of the baselines of MSPDQ: their codes, their noise",),
        )

    def _weight(self, reply: ClientReply) -> float:
        # Under a user's own start nobody's name is known before, and nobody is drawn twice.
        return self.weights(self._current).get(reply.client_id, 1)


@checked_keywords
@dataclass(eq=False, repr=False, kw_only=True)
class NbAFL(DrawnFedAvg):
    """FedAvg with noise before aggregation ("FedAvg+LDP" in the MSP paper; Wei et al. 2020).

    The clients' app is wrapped in `flwr_privacy.clients.NbAFLClient`, which clips the trained model
    and adds noise whose scale the server names.

    Parameters
    ----------
    fraction_train, ..., replacement, shares, keep_back
        Those of `DrawnFedAvg`.
    clipping_norm : float
        L2 norm C to which a model is clipped; the authors take the median norm of the models.
    smallest_data : int
        Number of records of the client with the fewest.
    epsilon : float, default 10.0
        What the authors claim for all `exposures` together.
    delta : float, default 0.01
        The same; without effect on Laplace noise.
    exposures : int, default 1
        Uploads of a client over the training.
    law : {"gaussian", "laplace"}, default "gaussian"
        The noise: of standard deviation `flwr_privacy.mspdq.baselines.nbafl_uplink_sigma`, or of
        scale Df / epsilon, with Df = ``exposures 2 C / smallest_data`` in place of a bound in L1
        norm, which the clipping does not give.
    clip : {"model", "update"}, default "model"
        What is clipped: the model, as printed, or its distance from the global model.
    downlink : bool, default False
        Whether the server adds noise to the average where
        `flwr_privacy.mspdq.baselines.nbafl_downlink_sigma` asks for it, with the rounds of `start`
        and the clients that are there; often it asks for none.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Guarantee
    ---------
    None that is checked: `epsilon` and `delta` are not what a client gets. The formula takes
    2 C / smallest_data for the effect of one record on a trained model, which no clipping of whole
    models enforces; its constant is proven for epsilon below 1 only; nobody charges a ledger.

    Examples
    --------
    >>> from flwr_privacy.strategies import NbAFL
    >>> strategy = NbAFL(clipping_norm=5.0, smallest_data=600, exposures=25)
    >>> round(strategy.noising.scale, 6)
    0.12948
    """

    clipping_norm: float
    smallest_data: int
    epsilon: float = 10.0
    delta: float = 0.01
    exposures: int = 1
    law: Literal["gaussian", "laplace"] = "gaussian"
    clip: Literal["model", "update"] = "model"
    downlink: bool = False

    scheme: ClassVar[str] = "mspdq-ldp"
    _seen: ClassVar[str] = (
        "the model of a client beyond its noise: the (epsilon, delta) of the formula takes an "
        "effect of one record that clipping does not enforce, and a constant that is proven for "
        "epsilon below 1 only, and no ledger is charged"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._budget: dict[str, Any] = {
            "clipping_norm": self.clipping_norm,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "exposures": self.exposures,
            "smallest_data": self.smallest_data,
        }
        check_choice("law", self.law, ("gaussian", "laplace"))
        sigma = nbafl_uplink_sigma(**self._budget)
        distance = self.exposures * 2 * self.clipping_norm / self.smallest_data
        self.noising = Noising(
            clip=self.clip,
            clipping_norm=float(self.clipping_norm),
            law=self.law,
            scale=sigma if self.law == "gaussian" else laplace_scale(distance, self.epsilon),
        )
        self._only_with_start["downlink"] = self.downlink or None

    def instruct(self, server_round: int) -> Instruction:
        """Return the instruction: clipping and noise of the clients, and the server's own noise."""
        told = super().instruct(server_round)
        return replace(
            told, fields={**told.fields, **write(self.noising)}, finish=self._noised_average
        )

    def _noised_average(self, mean: WeightedMean) -> Arrays:
        """Return the mean model, with the server's noise if it adds any."""
        averaged, sigma = mean.finish(), self._downlink_sigma()
        if sigma == 0:
            return averaged
        average = self._layout.vector(averaged)
        return self._layout.arrays(noised(average, "gaussian", sigma, SecureRandom()))

    def round_metrics(self, card: PrivacyCard) -> dict[str, float]:
        """Return the scales of the noise."""
        return {
            **super().round_metrics(card),
            "scale": self.noising.scale,
            "downlink_sigma": self._downlink_sigma(),
        }

    def guarantee(self) -> Guarantee:
        """Return a guarantee of nothing, with what the authors claim and what the noise gives."""
        stated, uploads = super().guarantee(), self.planned_rounds or self.exposures
        if not self._template:  # before the first round
            return stated
        size = Layout.of(self._template, released_names(self._template, self._keep_back)).size
        taken, clipped = self.noising.epsilons(
            smallest_data=self.smallest_data, uploads=uploads, size=size, delta=self.delta
        )
        text = (
            f"what the formula claims of a record, epsilon {self.epsilon:g} at delta "
            f"{self.delta:g} with exposures = {self.exposures}: {uploads} uploads of a client cost "
            f"{taken:.4g} if a record moves a model by 2 C / smallest_data, which is not enforced, "
            f"and {clipped:.4g} by what clipping gives, 2 C"
        )
        return replace(stated, not_protected=(text, *stated.not_protected))

    def _downlink_sigma(self) -> float:
        if not self.downlink or self.planned_rounds is None:
            return 0.0
        clients = len(self.federation.clients())
        return nbafl_downlink_sigma(**self._budget, rounds=self.planned_rounds, clients=clients)


@checked_keywords
@dataclass(eq=False, repr=False, kw_only=True)
class _Coded(DrawnFedAvg):
    """Base of the baselines whose clients send their updates as packed codes."""

    bits: int = 8

    def instruct(self, server_round: int) -> Instruction:
        """Return the instruction: arrays that stay at the client, and the width of a code."""
        told = super().instruct(server_round)
        self._before = self._layout.vector(self._template)
        return Instruction(
            fields={**told.fields, "bits": self.bits},
            accumulator=lambda: WeightedMean(
                {_UPDATE: np.broadcast_to(np.zeros(()), self._layout.size)}
            ),
            take=self._take_codes,
            finish=self._moved,
        )

    def _moved(self, mean: WeightedMean) -> Arrays:
        """Return the old model and the mean update."""
        update = mean.finish()[_UPDATE].astype(np.float64, copy=False)
        return self._layout.arrays(self._before + update)

    def _take_codes(self, mean: WeightedMean, reply: ClientReply) -> None:
        """Decode a client's update and add it, weighed by its draws.

        Raises
        ------
        ReplyRefusedError
            If it is malformed, or takes the model beyond what its arrays hold.
        """
        packed = packed_codes(reply.arrays())
        try:
            codes = unpacked(packed, self.bits, self._layout.size)
            update = self.decoded(codes, reply)
        except ValueError as error:
            raise ReplyRefusedError("malformed", f"client {reply.client_id}: {error}") from error
        if not all(map(is_finite, self._layout.arrays(self._before + update).values())):
            raise ReplyRefusedError("range", f"client {reply.client_id}: an update too large")
        mean.accumulate(reply.client_id, {_UPDATE: update}, weight=self._weight(reply))

    def decoded(self, codes: Codes, reply: ClientReply) -> Vectors:
        """Return the update that a client sent.

        Raises
        ------
        ReplyRefusedError, ValueError
            If what it says beside its codes is malformed.
        """
        raise NotImplementedError

    def round_metrics(self, card: PrivacyCard) -> dict[str, float]:
        """Return the bits of a code."""
        return {**super().round_metrics(card), "bits": self.bits}


@checked_keywords
@dataclass(eq=False, repr=False, kw_only=True)
class QuantizedFedAvg(_Coded):
    """FedAvg with the update rounded to codes of a few bits, a baseline for the bits sent.

    The clients' app is wrapped in `flwr_privacy.clients.QuantizedFedAvgClient`, which rounds the
    whole update at random, without bias, onto ``2**bits`` knobs between its least and its largest
    entry (`flwr_privacy.mspdq.encode_start`).

    Parameters
    ----------
    fraction_train, ..., replacement, shares, keep_back
        Those of `DrawnFedAvg`.
    bits : int, default 8
        Bits of a code, from 1 to 16. A client sends ``ceil(bits * d / 8)`` bytes for d weights, and
        two numbers.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Guarantee
    ---------
    None: the server has every update up to the rounding, and random rounding protects nobody
    (`flwr_privacy.simulations.research.mspdq.theory.quantizer_delta`).

    Examples
    --------
    >>> from flwr_privacy.strategies import QuantizedFedAvg
    >>> strategy = QuantizedFedAvg(bits=4)
    """

    scheme: ClassVar[str] = "mspdq-plain"
    _seen: ClassVar[str] = "the update of a client: the server has it up to the rounding"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("bits", self.bits, minimum=1, maximum=16)

    def decoded(self, codes: Codes, reply: ClientReply) -> Vectors:
        """Return the update that a client sent."""
        low, high = numbers_of(reply.fields, "ends", 2)
        return decode_start(codes, (low, high), 2**self.bits)


@checked_keywords
@dataclass(eq=False, repr=False, kw_only=True)
class JoPEQFedAvg(_Coded):
    """FedAvg with JoPEQ's scalar codec: Laplace noise and subtractive dither in few bits.

    The clients' app is wrapped in `flwr_privacy.clients.JoPEQFedAvgClient`, which encodes each
    array of the update by itself; the server names the seed of the dither.

    Parameters
    ----------
    fraction_train, ..., replacement, shares, keep_back
        Those of `DrawnFedAvg`.
    epsilon : float, default 10.0
        Target of the noise, see `flwr_privacy.mspdq.baselines.JoPEQ`.
    bits : int, default 8
        Bits of a code, from 1 to 16. A client sends ``ceil(bits * d / 8)`` bytes for d weights, and
        two numbers for each array.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed, or there are too few bits for this epsilon.

    Guarantee
    ---------
    None that is checked: no epsilon-differential privacy follows from `epsilon`. See
    `flwr_privacy.mspdq.baselines.JoPEQ`.

    Examples
    --------
    >>> from flwr_privacy.strategies import JoPEQFedAvg
    >>> strategy = JoPEQFedAvg(epsilon=4.0, bits=8)
    """

    epsilon: float = 10.0

    scheme: ClassVar[str] = "mspdq-jopeq"
    _seen: ClassVar[str] = (
        "the update of a client beyond its noise, for which no epsilon is proven: it has the "
        "variance of Laplace noise and not its law, the scaled update is not bounded, and the mean "
        "and the standard deviation of every array travel as they are"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.codec = JoPEQ(epsilon=check_number("epsilon", self.epsilon), bits=self.bits)

    def instruct(self, server_round: int) -> Instruction:
        """Return the instruction: the codec, and the seed of the dither."""
        self._seed = derive_seed(self.experiment.seed, "dither", server_round)
        told = super().instruct(server_round)
        return replace(told, fields={**told.fields, **write(self.codec), "dither": self._seed})

    def decoded(self, codes: Codes, reply: ClientReply) -> Vectors:
        """Return the update that a client sent."""
        arrays = len(self._layout.parts)
        means, stds = (numbers_of(reply.fields, name, arrays) for name in ("means", "stds"))
        dither = stream(self._seed, reply.client_id)
        scales = list(zip(means, stds, strict=True))
        return self.codec.decode_arrays(codes, scales, self._layout, dither)
