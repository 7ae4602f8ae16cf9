"""A split model on the digits for the attack: FedVS as its parties see it, without a network.

The clients' columns, their rounding and the server's model are those of FedVS. The sums are
computed in the open, as decoded sums are equal to them bit for bit; `deal` and `answer` do a round
on shares.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.clients.torch import TorchServerModel, mlp
from flwr_privacy.coding.field import PrimeField
from flwr_privacy.coding.lagrange import LagrangeCode
from flwr_privacy.errors import check_integer
from flwr_privacy.fedvs.network import embed, expand, gradient_of, initial_weights
from flwr_privacy.fedvs.quantisation import dequantise, quantise, quantise_stochastic
from flwr_privacy.fedvs.sharing import data_shares, evaluate, weight_shares, zero_masks
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.simulations.tasks.data import load
from flwr_privacy.wire.identity import stream

__all__ = ["BITS", "ORDER", "PIXEL_STEP", "RATE", "Owners", "RoundShares", "Seen", "answer", "deal"]

BITS = 8  # of the scales, unless something else is said
ORDER = 2  # of the polynomial networks
RATE = 0.05  # of the server and of the clients
PIXEL_STEP = 1 / 16  # of the digits

_CLASSES = 10
_FEWEST = 12  # rows: more than there are classes, and than segments
_HIDDEN = (64, 32)

Matrix = NDArray[np.float64]
Elements = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Owners:
    """Clients that hold columns of the same digits.

    Parameters
    ----------
    seed : int
        Root of the draws, secret ones excepted.
    pixels : ndarray, shape (m, 64)
        Digits, pixels from 0 to 1.
    labels : ndarray of int64, shape (m,)
        Which digits they are: the server's.
    columns : sequence of ndarray
        Whose pixels are whose.
    known : ndarray, shape (n, 64)
        Digits that anybody has.
    """

    seed: int
    pixels: Matrix
    labels: NDArray[np.int64]
    columns: Sequence[NDArray[np.int64]]
    known: Matrix

    @classmethod
    def of(cls, *, clients: int, rows: int, seed: int) -> "Owners":
        """Draw some digits of the training data and deal their pixels out, row after row.

        Raises
        ------
        InvalidParameterError
            If a value is out of range.
        """
        check_integer("seed", seed, minimum=0)
        check_integer("clients", clients, minimum=3, maximum=64)
        data = load("digits")
        check_integer("records", rows, minimum=_FEWEST, maximum=len(data.labels))
        drawn = stream(seed, "attack").permutation(len(data.labels))[:rows]
        return cls(
            seed=seed,
            pixels=data.features[drawn].astype(np.float64),
            labels=data.labels[drawn],
            columns=np.array_split(np.arange(data.features.shape[1]), clients),
            known=data.test_features.astype(np.float64),
        )

    @property
    def expanded(self) -> list[Matrix]:
        """The powers of each client's pixels, rounded as they are shared."""
        field = PrimeField()
        return [
            _real(quantise(expand(self.pixels[:, own], ORDER), BITS, field), BITS, field)
            for own in self.columns
        ]

    def first_weights(self, h: int, random: SecureRandom) -> list[Matrix]:
        """Return first weights for all clients."""
        return [initial_weights(ORDER * len(own), h, random) for own in self.columns]

    def train(
        self,
        rounds: int,
        *,
        weights: Sequence[Matrix],
        weight_bits: int = BITS,
        rate: float = RATE,
        random: SecureRandom,
    ) -> "Seen":
        """Train on all rows in every round, and return what there is to see.

        Parameters
        ----------
        rounds : int
            Rounds.
        weights : sequence of ndarray, shapes (e_n, h)
            First weights of the clients.
        weight_bits : int, default 8
            Scale of their rounding.
        rate : float
            Learning rate of all.
        random : SecureRandom
            Of the rounding.
        """
        field, N, h = PrimeField(), len(self.columns), weights[0].shape[1]
        server_model = TorchServerModel(partial(mlp, (h, *_HIDDEN, _CLASSES)), seed=self.seed)
        arrays, own, blocks = server_model.initial(), [w.copy() for w in weights], self.expanded
        embeddings, gradients, opened = [], [], []
        for _ in range(rounds):
            rounded = [
                _real(quantise_stochastic(w, weight_bits, field, random), weight_bits, field)
                for w in own
            ]
            parts = [embed(x, w) for x, w in zip(blocks, rounded, strict=True)]
            mean: Matrix = np.sum(parts, axis=0) / N
            arrays, gradient, _ = server_model.step(
                arrays, mean.astype(np.float32), self.labels, rate
            )
            embeddings.append(mean)
            gradients.append(gradient.astype(np.float64))
            opened.append(rounded)
            own = [w - rate * gradient_of(x, gradient, N) for w, x in zip(own, blocks, strict=True)]
        return Seen(
            embeddings=np.array(embeddings),
            gradients=np.array(gradients),
            weights=[np.array(one) for one in zip(*opened, strict=True)],
        )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Seen:
    """What the parties of a training see.

    Parameters
    ----------
    embeddings : ndarray, shape (rounds, m, h)
        Mean embeddings that the server decodes.
    gradients : ndarray, shape (rounds, m, h)
        What it sends to all clients.
    weights : list of ndarray, shapes (rounds, e_n, h)
        What T + 1 clients open of the others.
    """

    embeddings: Matrix
    gradients: Matrix
    weights: list[Matrix]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class RoundShares:
    """Shares of a round, of all clients.

    Parameters
    ----------
    code : LagrangeCode
        The code.
    data : list of ndarray of int64, shapes (N, m / K, e_n)
        Shares of each owner's data, by holder.
    weights : list of ndarray of int64, shapes (N, e_n, h)
        Shares of its weights.
    zeros : list of ndarray of int64, shapes (N, m / K, h)
        Shares of the zero-masks of T + 1 clients.
    segments : list of ndarray of int64, shapes (K, m / K, e_n)
        What the shares of data are of.
    models : list of ndarray of int64, shapes (e_n, h)
        What the shares of weights are of.
    """

    code: LagrangeCode
    data: list[Elements]
    weights: list[Elements]
    zeros: list[Elements]
    segments: list[Elements]
    models: list[Elements]


def deal(
    owners: Owners, code: LagrangeCode, weights: Sequence[Matrix], random: SecureRandom
) -> RoundShares:
    """Deal shares of the data and weights of all clients; rows beyond a multiple of K are left."""
    field, h = code.field, weights[0].shape[1]
    length = len(owners.pixels) // code.K
    elements = [quantise(x[: length * code.K], BITS, field) for x in owners.expanded]
    models = [quantise_stochastic(w, BITS, field, random) for w in weights]
    return RoundShares(
        code=code,
        data=[data_shares(code, block, random) for block in elements],
        weights=[weight_shares(code, model, random) for model in models],
        zeros=[zero_masks(code, length, h, random) for _ in range(code.T + 1)],
        segments=[block.reshape(code.K, length, -1) for block in elements],
        models=models,
    )


def answer(dealt: RoundShares, holder: int, without: Sequence[int] = ()) -> Elements:
    """Return what a holder answers the server with, with the weights of some owners left out."""
    there = [n for n in range(dealt.code.N) if n not in without]
    return evaluate(
        dealt.code.field,
        np.concatenate([dealt.data[n][holder] for n in there], axis=1),
        np.concatenate([dealt.weights[n][holder] for n in there]),
        [zero[holder] for zero in dealt.zeros],
    )


def _real(elements: Elements, bits: int, field: PrimeField) -> Matrix:
    return dequantise(elements, scale_bits=bits, field=field, divisor=1)
