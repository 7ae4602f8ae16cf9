r"""Bounds what one participant changes over all rounds: the sensitivity of :math:`C x`.

A participant contributes a vector of norm at most 1 to some of the rounds: to at most
``participations`` of them, and any two of them are at least ``separation`` rounds apart (1 allows
consecutive rounds). Noise of standard deviation ``z`` times the joint sensitivity on each
coordinate of :math:`C x` costs as much as one Gaussian release with noise multiplier z.

Sources: Kalinin and Lampert, "Banded Square Root Matrix Factorization for Differentially Private
Model Training", NeurIPS 2024, arXiv 2405.13763 (Theorem 2); Choquette-Choo et al., arXiv 2306.08153
(bounds of the rows, then the best pattern of the bounds).
"""

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import check_integer

from .factors import Factor, TreeFactor

__all__ = ["joint_sensitivities", "joint_sensitivity", "most_participations"]

_MARGIN = 1 + 1e-12  # for the rounding of the sums, of which the relative error is below 1e-13
_ONE_BY_ONE = 64  # numbers of participations for which a tree has a dynamic programme each


def joint_sensitivity(
    factor: Factor, *, rounds: int, separation: int, participations: int
) -> float:
    """Return the largest L2 norm of ``C u`` over all patterns u of a participant.

    Parameters
    ----------
    factor : ToeplitzFactor, BufferedToeplitzFactor or TreeFactor
    rounds : int
        Number of rounds, >= 1; of a tree at most its own.
    separation : int
        Least distance of two participations, >= 1.
    participations : int
        Largest number of participations, >= 1. More than fit into the rounds count as those.

    Returns
    -------
    float
        See `joint_sensitivities`.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.

    Examples
    --------
    >>> from flwr_privacy.central_dp.correlated.factors import ToeplitzFactor
    >>> half = ToeplitzFactor(coefficients=(2**16, 2**15))
    >>> round(joint_sensitivity(half, rounds=9, separation=2, participations=4) ** 2, 9)
    5.0
    """
    check_integer("participations", participations, minimum=1)
    most = min(participations, most_participations(rounds=rounds, separation=separation))
    every = joint_sensitivities(factor, rounds=rounds, separation=separation, participations=most)
    return float(every[-1])


def joint_sensitivities(
    factor: Factor, *, rounds: int, separation: int, participations: int
) -> NDArray[np.float64]:
    r"""Return the joint sensitivity for at most 1, 2, ..., ``participations`` participations.

    Parameters
    ----------
    factor, rounds, separation, participations
        As in `joint_sensitivity`.

    Returns
    -------
    ndarray of float64, shape (participations,)
        They do not decrease. Those of a Toeplitz factor are exact, up to a factor of 1 + 1e-12 that
        covers rounding. Those of a tree are upper bounds; the first is exact.

    Raises
    ------
    InvalidParameterError
        If a value is out of range.

    Notes
    -----
    Let X = C^T C. A participant with vectors :math:`u_i` of norm at most 1 in the rounds
    :math:`p_0 < p_1 < \dots` changes C x by a matrix with squared norm
    :math:`\sum_{i,j} X_{p_i p_j} \langle u_i, u_j \rangle`. No entry of X is negative, so this is
    at most :math:`\sum_{i,j} X_{p_i p_j}`, reached where all vectors are the same, and another
    participation never makes it less.

    *Toeplitz.* The rounds 0, b, 2b, ... (b the separation) are the worst. For i <= j,
    :math:`X_{p_i p_j} = \sum_{s=0}^{n - 1 - p_j} c_s c_{s + p_j - p_i}`. As c is not negative and
    does not increase, this does not increase in :math:`p_j` for a given difference, nor in the
    difference for a given :math:`p_j`. And :math:`p_j \ge j b`,
    :math:`p_j - p_i \ge (j - i) b`. Each entry is therefore at most the one of the rounds
    0, b, 2b, ..., for any number of rounds and participations.

    *Tree.* With :math:`N_v` participations below node v, the squared norm is
    :math:`\sum_v N_v^2`. A node over 2^h rounds has at most
    :math:`m_h = \min(k, \lceil 2^h / b \rceil)`, hence :math:`N_v^2 \le m_h N_v`, and the sum is at
    most :math:`\sum_i W_{p_i}` where :math:`W_r` adds up :math:`m_h` over the nodes above round r.
    These are bounds of the sums of the rows of X over a pattern, and a dynamic programme finds the
    best pattern. From k = 65 on the nodes where :math:`m_h = k` and the others have a pattern each:
    a looser bound, but one programme serves for many k. Up to 16 rounds, the bounds are at most 7 %
    above the truth.

    Examples
    --------
    >>> from flwr_privacy.central_dp.correlated.factors import TreeFactor
    >>> tree = TreeFactor(rounds=8)
    >>> (joint_sensitivities(tree, rounds=8, separation=4, participations=2) ** 2).round(9).tolist()
    [4.0, 9.0]
    """
    check_integer("participations", participations, minimum=1)
    possible = most_participations(rounds=rounds, separation=separation)
    most = min(participations, possible)
    if isinstance(factor, TreeFactor):
        check_integer("rounds", rounds, maximum=factor.rounds)
        squares = _of_a_tree(rounds, separation, most)
    else:
        squares = _of_a_column(factor.column(rounds), separation, most)
    norms = np.sqrt(squares) * _MARGIN
    return np.pad(norms, (0, participations - most), mode="edge")


def most_participations(*, rounds: int, separation: int) -> int:
    """Return how many participations fit into the rounds.

    Examples
    --------
    >>> most_participations(rounds=21, separation=10)
    3
    """
    check_integer("rounds", rounds, minimum=1)
    return -(-rounds // check_integer("separation", separation, minimum=1))


def _of_a_column(column: NDArray[np.float64], separation: int, most: int) -> NDArray[np.float64]:
    """Return the squared norm of the sum of the columns 0, b, 2b, ..., one more each time."""
    squares = np.empty(most)
    total = np.zeros_like(column)
    for k in range(most):
        start = k * separation
        total[start:] += column[: len(column) - start]
        squares[k] = np.sum(total * total)  # pairwise: its rounding error grows with log(rounds)
    return squares


def _of_a_tree(rounds: int, separation: int, most: int) -> NDArray[np.float64]:
    index = np.arange(rounds)
    heights = range(rounds.bit_length())
    # Which rounds have a node of that height above them: a left child that is complete in time.
    below = [((index >> h) % 2 == 0) & (((index >> h) + 1 << h) <= rounds) for h in heights]
    fitting = [most_participations(rounds=2**h, separation=separation) for h in heights]

    def weights(largest: list[int], of: slice) -> NDArray[np.int64]:
        pairs = zip(largest[of], below[of], strict=True)
        return np.asarray(sum((m * b for m, b in pairs), start=np.zeros(rounds, np.int64)))

    squares = np.empty(most)
    for k in range(1, min(most, _ONE_BY_ONE) + 1):
        bound = weights([min(k, m) for m in fitting], slice(None))
        squares[k - 1] = _best(bound, separation, k)[-1]
    done = min(most, _ONE_BY_ONE)
    for h in range(len(heights) + 1):  # nodes below h hold fewer than k, the others k
        upto = min(fitting[h], most) if h < len(heights) else most
        if upto <= done:
            continue
        lower = _best(weights(fitting, slice(h)), separation, upto)
        upper = _best(weights([1] * len(heights), slice(h, None)), separation, upto)
        squares[done:upto] = (lower + np.arange(1, upto + 1) * upper)[done:]
        done = upto
    # A bound for more participations is one for fewer.
    return np.asarray(np.minimum.accumulate(squares[::-1])[::-1])


def _best(weights: NDArray[np.int64], separation: int, most: int) -> NDArray[np.int64]:
    """Return the largest sum of the weights of at most 1, 2, ..., `most` rounds of a pattern."""
    rounds = len(weights)
    best = np.empty(most, dtype=np.int64)
    later = np.zeros(rounds + separation, dtype=np.int64)  # the largest sum from a round on
    for k in range(most):
        later[:rounds] = weights + later[separation:]
        later[:rounds] = np.maximum.accumulate(later[:rounds][::-1])[::-1]
        best[k] = later[0]
    return best
