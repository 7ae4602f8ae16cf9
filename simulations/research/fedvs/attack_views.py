"""What each party of FedVS finds in its view; one function for each attack.

The parties are a coalition of clients with their shares; the server with the clients' answers, with
a client, and with the sums of many rounds; a client with the gradients; whoever knows the first
weights. What is found is compared with what was there, which the attacker does not have.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_privacy.coding.field import PrimeField
from flwr_privacy.coding.lagrange import LagrangeCode
from flwr_privacy.fedvs.network import expand
from flwr_privacy.fedvs.sharing import decode_rows
from flwr_privacy.privacy.randomness import SecureRandom

from .coalition import (
    OpenedShares,
    data_coefficients,
    open_shares,
    small_secrets,
    weight_coefficients,
)
from .gram_from_sums import gram_correlation, neighbours_found, recover_gram
from .known_weights import features_from_moves, features_from_sum, missing_embedding
from .label_gradients import pairs_told_apart, similarities, spread_labels
from .share_enumeration import enumerate_views, rounds_distance, total_variation
from .split_learning import BITS, ORDER, PIXEL_STEP, RATE, Owners, RoundShares, Seen, answer

__all__ = [
    "Coalition",
    "Distance",
    "Labels",
    "Rows",
    "Similar",
    "coalitions",
    "distances",
    "from_known_weights",
    "from_moves",
    "label_findings",
    "left_out",
    "similar_rows",
    "true_gram",
]

_SEGMENT_SECRETS = 2**BITS  # the largest pixel as an integer
_SAMPLES = 200  # of trainings in a tiny field

Matrix = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Coalition:
    """What a coalition of share holders opens.

    Parameters
    ----------
    holders : int
        How many they are.
    relations : int
        Linear relations between the K segments of the data that they have.
    segments : int
        Segments that these determine, whatever the data are.
    weights : bool
        Whether they open the weights of the others.
    found : float
        Share of the pixels that is found, by pixels being small multiples of a step.
    images : ndarray, shape (m, 64)
        What they have of the rows: pixels that they found, or else a share, which is noise.
    """

    holders: int
    relations: int
    segments: int
    weights: bool
    found: float
    images: Matrix


def coalitions(owners: Owners, dealt: RoundShares) -> list[Coalition]:
    """Return what the last clients open of all data, for one of them up to K + T."""
    code = dealt.code
    return [
        _coalition(owners, dealt, range(code.N - count, code.N))
        for count in range(1, code.K + code.T + 1)
    ]


def _coalition(owners: Owners, dealt: RoundShares, who: Sequence[int]) -> Coalition:
    code, holders = dealt.code, list(who)
    images = np.zeros((dealt.segments[0].shape[1] * code.K, owners.pixels.shape[1]))
    relations, segments, found, weights = 0, code.K, 0.0, True
    for n, columns in enumerate(owners.columns):
        model = open_shares(
            dealt.weights[n][holders],
            weight_coefficients(code, holders),
            secrets=1,
            field=code.field,
        )
        weights &= 0 in model.secrets and np.array_equal(model.secrets[0], dealt.models[n])
        opened = open_shares(
            dealt.data[n][holders][:, :, : len(columns)],  # the first powers, which say all
            data_coefficients(code, holders),
            secrets=code.K,
            field=code.field,
        )
        relations = len(opened.relations)
        true = dealt.segments[n][:, :, : len(columns)]
        right = [np.array_equal(value, true[k]) for k, value in opened.secrets.items()]
        segments = min(segments, sum(right))
        block, share = _pixels(opened, dealt.data[n][holders[0], :, : len(columns)])
        images[:, columns] = block.reshape(-1, len(columns)) / 2**BITS
        found += float((block == true).mean()) * share * len(columns) / owners.pixels.shape[1]
    return Coalition(
        holders=len(holders),
        relations=relations,
        segments=segments,
        weights=weights,
        found=found,
        images=images,
    )


def _pixels(opened: OpenedShares, share: NDArray[np.int64]) -> tuple[Matrix, bool]:
    """Return the pixels that fit best, or else a share as if it were pixels."""
    if len(opened.relations):
        step = round(PIXEL_STEP * 2**BITS)
        block, *_ = small_secrets(opened, lowest=0, highest=_SEGMENT_SECRETS, step=step)
        return block.astype(np.float64), True
    noise = share / opened.field.p * _SEGMENT_SECRETS
    return np.broadcast_to(noise, (opened.relations.shape[1], *share.shape)), False


@dataclass(frozen=True, kw_only=True)
class Distance:
    """The total variation distance of the views of two secrets in a tiny field.

    Parameters
    ----------
    view : str
        Who sees what.
    distance : float
        Total variation distance of the views.
    protected : bool
        Whether the guarantee covers the view.
    """

    view: str
    distance: float
    protected: bool


def distances(seed: int) -> list[Distance]:
    """Return how well secrets are told apart in views of parties in fields of 3 and 5 elements."""
    code = LagrangeCode(N=3, K=1, T=1, field=PrimeField(5))
    first: tuple[ArrayLike, ArrayLike] = ([[1], [2], [3]], [1, 1, 1])
    second: tuple[ArrayLike, ArrayLike] = ([[1], [1], [0]], [1, 0, 2])  # with the same honest sum

    def apart(**seen: Sequence[int]) -> float:
        views = [enumerate_views(code, *one, **seen) for one in (first, second)]
        return total_variation(*views)

    found = [
        ("T clients: their shares", apart(coalition=[0], answers=[]), True),
        ("T + 1 clients: their shares", apart(coalition=[0, 1], answers=[]), False),
        ("server: a single answer", apart(answers=[1]), True),
        ("server: all answers of a round, a zero-mask", apart(dealers=[1]), True),
        ("... no zero-mask, independent rows", apart(), False),
        ("server and T clients, no zero-mask", apart(coalition=[0]), False),
        ("... zero-masks of T + 1, T of them in it", apart(coalition=[0], dealers=[0, 1]), True),
        ("... zero-mask of the colluder alone", apart(coalition=[0], dealers=[0]), False),
    ]
    for p, width in ((5, 3), (3, 4)):
        pair = _pair(p, width, rounds=8, seed=seed)
        for masked in (False, True):
            after = rounds_distance(
                p, *pair, samples=_SAMPLES if not masked else 20, seed=seed, zero_mask=masked
            )
            with_it = "zero-mask" if masked else "no zero-mask"
            text = f"server: 8 rounds, E = {width}, p = {p}, {with_it}"
            found.append((text, float(after[-1]), masked))
    pads: tuple[ArrayLike, ArrayLike] = ([[0, 0, 0]], [[0, 0, 0]])
    other: tuple[ArrayLike, ArrayLike] = ([[0, 0, 0]], [[1, 0, 0]])
    for masked in (False, True):
        after = rounds_distance(5, pads, other, samples=_SAMPLES, seed=seed, zero_mask=masked)
        with_it = "zero-mask" if masked else "no zero-mask"
        text = f"server: a pad of zeros, one round, {with_it}"
        found.append((text, float(after[-1]), masked))
    return [Distance(view=view, distance=d, protected=known) for view, d, known in found]


def _pair(
    p: int, width: int, *, rounds: int, seed: int
) -> tuple[tuple[ArrayLike, ArrayLike], tuple[ArrayLike, ArrayLike]]:
    """Return two secrets of two rows with the same sums in each round."""
    draws = np.random.default_rng(seed)
    head = np.eye(2, width, dtype=np.int64)
    mixing = np.eye(width, dtype=np.int64)
    mixing[:2, 2:] = draws.integers(1, p, (2, width - 2))
    rows = head @ mixing % p  # of rank 2 as well
    models = draws.integers(0, p, (rounds, width))
    others = draws.integers(0, p, (rounds, width))
    others[:, :2] = (models[:, :2] - others[:, 2:] @ rows[:, 2:].T) % p
    return (head, models), (rows, others)


@dataclass(frozen=True, kw_only=True, eq=False)
class Similar:
    """The Gram matrix of the rows, as the server recovers it.

    Parameters
    ----------
    weight_bits : int
        Scale of the clients' rounding, which is all the noise there is.
    rounds : int
        After how many.
    correlation : float
        With the true matrix, off the diagonals.
    neighbours : float
        Share of the rows of which the nearest other one is known.
    gram : ndarray, shape (m, m)
        The matrix.
    """

    weight_bits: int
    rounds: int
    correlation: float
    neighbours: float
    gram: Matrix


def true_gram(owners: Owners) -> Matrix:
    """Return the Gram matrix of the rows, over all clients' expanded columns."""
    rows = np.concatenate(owners.expanded, axis=1)
    gram: Matrix = rows @ rows.T
    return gram


def similar_rows(
    owners: Owners, seen: Seen, *, weight_bits: int, rounds: Sequence[int]
) -> list[Similar]:
    """Return what the server knows of the rows' similarity after some rounds."""
    N, true = len(owners.columns), true_gram(owners)
    norm = float(np.sqrt(np.trace(true) / len(true)))
    noise = 2.0**-weight_bits * norm / (N * np.sqrt(6))
    findings = []
    for count in rounds:
        gram = recover_gram(
            seen.embeddings[: count + 1], seen.gradients[:count], rate=RATE / N**2, noise=noise
        )
        findings.append(
            Similar(
                weight_bits=weight_bits,
                rounds=count,
                correlation=gram_correlation(gram, true),
                neighbours=neighbours_found(gram, true),
                gram=gram,
            )
        )
    return findings


@dataclass(frozen=True, kw_only=True)
class Labels:
    """The labels, as a client finds them.

    Parameters
    ----------
    round : int
        By the gradient of which round, from 1.
    pairs : float
        Chance that a pair of one label is more alike than a pair of two; 0.5 is guessing.
    named : float
        Share of the other labels that is right once one row of each label is known.
    guessed : float
        Share of the other labels that are the commonest.
    """

    round: int
    pairs: float
    named: float
    guessed: float


def label_findings(owners: Owners, seen: Seen, rounds: Sequence[int]) -> list[Labels]:
    """Return what a client finds in the gradients of some rounds."""
    labels = owners.labels
    known = {int(np.flatnonzero(labels == own)[0]): int(own) for own in np.unique(labels)}
    others = ~np.isin(np.arange(len(labels)), list(known))
    commonest = np.bincount(labels[others]).max(initial=0) / max(1, others.sum())
    findings = []
    for one in rounds:
        cosines = similarities(seen.gradients[one - 1])
        named = spread_labels(cosines, known)
        findings.append(
            Labels(
                round=one,
                pairs=pairs_told_apart(cosines, labels),
                named=float((named == labels)[others].mean()),
                guessed=float(commonest),
            )
        )
    return findings


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Rows that were found.

    Parameters
    ----------
    name : str
        By whom, from what.
    error : float
        Root of the mean square error of a pixel.
    exact : float
        Share of the pixels that is right to the last bit.
    images : ndarray, shape (m, 64)
        What was found.
    right : ndarray of bool, shape (m,)
        Which rows have no other pixel than the true one, once they are rounded.
    """

    name: str
    error: float
    exact: float
    images: Matrix
    right: NDArray[np.bool_]

    @classmethod
    def of(cls, name: str, images: Matrix, pixels: Matrix) -> "Rows":
        """Compare rows that were found with the true ones."""
        exact = np.rint(images / PIXEL_STEP) * PIXEL_STEP == pixels
        return cls(
            name=name,
            error=float(np.sqrt(np.mean((images - pixels) ** 2))),
            exact=float(exact.mean()),
            images=images,
            right=exact.all(axis=1),
        )


def from_known_weights(owners: Owners, widths: Sequence[int], random: SecureRandom) -> list[Rows]:
    """Return the rows as the server finds them in the first round, by the width of the embedding.

    The last one is for secret first weights: the server has to take others for them. Before it is
    the mean of the digits that everybody has, which needs no server.
    """
    N, mean = len(owners.columns), owners.known.mean(axis=0)
    covariance = np.cov(owners.known.T) + 1e-3 * np.eye(len(mean))
    true = true_gram(owners)
    noise = 2.0**-BITS * float(np.sqrt(np.trace(true) / len(true) / 6))
    found = []
    for h in widths:
        weights = owners.first_weights(h, random)
        seen = owners.train(1, weights=weights, random=random)
        for secret in (False, True) if h == widths[-1] else (False,):
            taken = owners.first_weights(h, random) if secret else weights
            images = features_from_sum(
                seen.embeddings[0] * N,
                np.concatenate([w.reshape(ORDER, -1, h) for w in taken], axis=1),
                mean=mean,
                covariance=covariance,
                noise=noise,
                span=(0.0, 1.0),
            )
            name = f"{'secret' if secret else 'known'} weights, h = {h}"
            found.append(Rows.of(name, images, owners.pixels))
    guess = np.broadcast_to(mean, owners.pixels.shape)
    return [*found[:-1], Rows.of("guess: the mean digit", guess, owners.pixels), found[-1]]


def from_moves(owners: Owners, seen: Seen, *, weight_bits: int, rounds: int) -> Rows:
    """Return the rows as T + 1 clients find them in everybody's weights and the gradients."""
    images = np.zeros_like(owners.pixels)
    for columns, weights in zip(owners.columns, seen.weights, strict=True):
        rows = features_from_moves(
            weights[: rounds + 1],
            seen.gradients[:rounds],
            rate=RATE / len(owners.columns),
            noise=2.0**-weight_bits / np.sqrt(6),
            mean=expand(owners.known[:, columns], ORDER).mean(axis=0),
            spread=0.25,
        )
        images[:, columns] = rows[:, : len(columns)]
    return Rows.of(f"T + 1 clients, {weight_bits} bits", images, owners.pixels)


def left_out(dealt: RoundShares, owner: int) -> bool:
    """Return whether two sums, one without an owner, give the owner's embedding away exactly."""
    code = dealt.code
    sums = [
        decode_rows(code, {n: answer(dealt, n, without) for n in range(code.N)})
        for without in ((), (owner,))
    ]
    block = dealt.segments[owner]
    true = code.field.matmul(block.reshape(-1, block.shape[2]), dealt.models[owner])
    return np.array_equal(missing_embedding(*sums, field=code.field), code.field.signed(true))
