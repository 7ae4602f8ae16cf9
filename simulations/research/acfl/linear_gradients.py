"""Recovers a device's moments from its gradients, which are linear in the model.

The gradient of a device in adaptive coded federated learning is ``G = A W - B`` with the moments
``A = X^T X`` and ``B = X^T Y`` of its records, the same in every round. The server chooses W and
hears G, so it has linear equations in A and B:

- `recover_moments` solves them for one device. As many rounds as it takes for the differences of
  the models to span all d directions determine A and B to rounding; fewer do if the device has
  fewer than d records. What noise was on the device's upload before the training does not matter.
- `estimate_moments` is for gradients with noise: the best linear use of all rounds and the upload.
- `recover_from_sums` solves for all devices at once from sums over those that answered, as a secure
  sum opens them. Who answered changes from round to round, and that takes the sums apart.

What A and B say of single records is the subject of
`flwr_privacy.simulations.research.acfl.gram_matrix`.

Source of the scheme: "Adaptive Coded Federated Learning: Privacy Preservation and Straggler
Mitigation" (arXiv, 2024). None of the attacks is in the paper.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flwr_privacy.errors import InvalidParameterError, check_number
from flwr_privacy.wire.arrays import is_finite

__all__ = [
    "Recovered",
    "RecoveredDevices",
    "estimate_moments",
    "recover_from_sums",
    "recover_moments",
]

Matrix = NDArray[np.float64]

_TOLERANCE = 1e-9
_DETERMINED = 1e-6  # squared length that a coordinate may lack in what the equations span


@dataclass(frozen=True, kw_only=True, eq=False)
class Recovered:
    """The moments of a device, recovered from its gradients.

    Parameters
    ----------
    features : ndarray of float64, shape (d, d)
        A, symmetric.
    labels : ndarray of float64, shape (d, o)
        B.
    residual : float
        Length of what A and B do not explain of the gradients, relative to the gradients.
    rank : int
        Number of directions that the differences of the models span. With d of them, A and B are
        the only ones that explain exact gradients.
    seen : int
        Rank of A on these directions. Less than `rank` says that a direction brought nothing new:
        then A is most likely no larger, and found though `rank` is less than d.
    """

    features: Matrix
    labels: Matrix
    residual: float
    rank: int
    seen: int

    @property
    def determined(self) -> bool:
        """Whether the models determine A and B whatever the device has."""
        return self.rank == len(self.features)

    @property
    def saturated(self) -> bool:
        """Whether A and B are determined, or directions came that brought nothing new."""
        return self.determined or self.seen < self.rank


def recover_moments(
    models: ArrayLike, gradients: ArrayLike, *, tolerance: float = _TOLERANCE
) -> Recovered:
    """Return the moments of a device from exact gradients.

    Parameters
    ----------
    models : array_like, shape (T, d, o)
        The models W of the rounds in which the device answered.
    gradients : array_like, shape (T, d, o)
        Its answers, ``A W - B``.
    tolerance : float, default 1e-9
        A direction counts if the models differ along it by more than this share of their own size;
        rounding would speak there otherwise. For gradients in float32 take 1e-4.

    Returns
    -------
    Recovered
        With ``rank == d``, which takes ``ceil(d / o) + 1`` rounds or more, the A and B that fit
        best, to rounding the device's. With fewer directions the least positive semidefinite A that
        explains them: it is the device's if the device has no more independent records than there
        are directions, so after ``ceil(m / o) + 1`` rounds for m records; see `Recovered.seen`. B
        is then what fits that A.

    Raises
    ------
    InvalidParameterError
        If the shapes do not fit or a value is not finite.

    Notes
    -----
    The mean round is taken off first, so that models which hardly move any more do no harm. In the
    basis U of a singular value decomposition of the differences ``U S V^T``, with K those of the
    gradients, the symmetric A that fits best has the entries
    ``(K_ij s_j + K_ji s_i) / (s_i^2 + s_j^2)``: a weak direction borrows from the strong ones. That
    A is symmetric does not make fewer rounds enough, as nothing would be known of the corner of A
    in the directions that are missing; that it has no negative eigenvalue and a low rank does.

    Examples
    --------
    >>> A, B = np.array([[2.0, 1.0], [1.0, 3.0]]), np.array([[1.0], [0.0]])
    >>> models = np.array([[[0.0], [0.0]], [[1.0], [0.0]], [[1.0], [1.0]]])
    >>> found = recover_moments(models, A @ models - B)
    >>> found.features.round(9), found.labels.round(9).ravel(), found.rank
    (array([[2., 1.],
           [1., 3.]]), array([ 1., -0.]), 2)
    """
    sent, heard = _rounds(models, gradients)
    limit = check_number("tolerance", tolerance, minimum=0, maximum=1)
    middle, pull = sent.mean(axis=0), heard.mean(axis=0)
    moved, turned = _side_by_side(sent - middle), _side_by_side(heard - pull)
    across, within = np.linalg.qr(moved.T)
    left, scales, right = np.linalg.svd(within.T)
    size = float(np.sqrt(np.mean(np.sum(sent**2, axis=(1, 2)))))
    rank = int(np.count_nonzero(scales > limit * size))
    scales = scales[:rank]
    hit = (
        left.T @ turned @ across @ right[:rank].T
    )  # K, and below it what is outside of the directions
    inside, beside = hit[:rank] * scales, hit[rank:] / scales
    squares = scales**2
    core = (inside + inside.T) / (squares + squares[:, None])
    weights, axes = np.linalg.eigh(core)
    found = weights > limit * weights.max(initial=0.0)
    reach = beside @ axes[:, found]
    corner = (reach / weights[found]) @ reach.T
    features = left @ np.block([[core, beside.T], [beside, corner]]) @ left.T
    features = (features + features.T) / 2
    return _recovered(features, features @ middle - pull, sent, heard, rank, int(found.sum()))


def estimate_moments(
    models: ArrayLike,
    gradients: ArrayLike,
    *,
    gradient_variance: float,
    upload: tuple[ArrayLike, ArrayLike],
    upload_variances: tuple[float, float],
) -> Recovered:
    """Return the best linear estimate of the moments from noised gradients and a noised upload.

    Each row of A and B has a weighted least-squares problem of its own, the same for all rows; then
    A is made symmetric.

    Parameters
    ----------
    models, gradients : array_like, shape (T, d, o)
        As for `recover_moments`; T may be 0.
    gradient_variance : float
        Variance of the noise in an entry of a gradient, above 0.
    upload : tuple of array_like, shapes (d, d) and (d, o)
        What the device sent before the training, A and B with noise.
    upload_variances : tuple of float
        Variance of the noise in their entries, above 0.

    Returns
    -------
    Recovered
        The estimate; `rank` is that of the differences of the models, and `seen` that of A.

    Raises
    ------
    InvalidParameterError
        If the shapes do not fit, or a value is not finite or not positive.

    Examples
    --------
    >>> nothing = np.zeros((0, 2, 1))
    >>> found = estimate_moments(nothing, nothing, gradient_variance=1.0,
    ...     upload=([[2.0, 0.0], [1.0, 3.0]], [[1.0], [0.0]]), upload_variances=(1.0, 1.0))
    >>> found.features.round(9)
    array([[2. , 0.5],
           [0.5, 3. ]])
    """
    sent, heard = _rounds(models, gradients, least=0)
    _, d, o = sent.shape
    noise = _positive("gradient_variance", gradient_variance)
    shapes = ((d, d), (d, o))
    coded = [_finite("upload", part, shape) for part, shape in zip(upload, shapes, strict=True)]
    s1, s2 = (_positive("upload_variances", value) for value in upload_variances)
    belief = np.concatenate([np.full(d, 1 / s1), np.full(o, 1 / s2)])
    design = np.concatenate([_side_by_side(sent), np.tile(-np.eye(o), len(sent))])
    information = design @ design.T / noise + np.diag(belief)
    evidence = _side_by_side(heard) @ design.T / noise + np.concatenate(coded, axis=1) * belief
    moments = np.linalg.solve(information, evidence.T).T
    features = (moments[:, :d] + moments[:, :d].T) / 2
    differences = _side_by_side(sent - sent.mean(axis=0)) if len(sent) else np.zeros((d, 0))
    rank = int(np.linalg.matrix_rank(differences)) if differences.size else 0
    seen = int(np.linalg.matrix_rank(features, hermitian=True))
    return _recovered(features, moments[:, d:], sent, heard, rank, seen)


@dataclass(frozen=True, kw_only=True, eq=False)
class RecoveredDevices:
    """The moments of single devices, recovered from sums of gradients.

    Parameters
    ----------
    features : ndarray of float64, shape (N, d, d)
        A of each device, symmetric.
    labels : ndarray of float64, shape (N, d, o)
        B of each device.
    determined : ndarray of bool, shape (N,)
        Devices of which no other A and B explain the sums. Those of the others are the least that
        do; only sums over devices that always answer together mean anything then.
    error : ndarray of float64, shape (N,)
        Standard deviation of an entry of A before it is made symmetric, if the entries of the sums
        have independent errors of standard deviation 1: how much rounding of the sums hides.
    rank, unknowns : int
        Rank of the equations of a row, and how many unknowns it has, ``N (d + o)``.
    residual : float
        Length of what is not explained of the sums, relative to the sums.
    """

    features: Matrix
    labels: Matrix
    determined: NDArray[np.bool_]
    error: Matrix
    rank: int
    unknowns: int
    residual: float


def recover_from_sums(
    models: ArrayLike, sums: ArrayLike, answered: ArrayLike, *, tolerance: float = _TOLERANCE
) -> RecoveredDevices:
    """Return the moments of single devices from sums of exact gradients over changing devices.

    A secure sum hides each gradient and opens ``sum_i I_i (A_i W - B_i)`` over those that answered.
    Row r of A_i and B_i, of all devices, is ``N (d + o)`` unknowns, and a round gives o equations
    for it. So ``N (d + o) / o`` rounds or a few more determine all devices, if every device is
    missing now and then. If nobody ever is, any number of rounds gives the total and no more.

    Parameters
    ----------
    models : array_like, shape (T, d, o)
        The models of the rounds.
    sums : array_like, shape (T, d, o)
        The sums of the gradients.
    answered : array_like of bool, shape (T, N)
        Which devices are in each sum.
    tolerance : float, default 1e-9
        A combination of unknowns counts if the equations see it by more than this share of the one
        that they see best.

    Raises
    ------
    InvalidParameterError
        If the shapes do not fit or a value is not finite.

    Notes
    -----
    The rows are solved one by one, which is one decomposition of a matrix with ``T o`` rows and
    ``N (d + o)`` columns. That A_i is symmetric couples the rows; it would about halve the rounds
    where o is small beside d, at d times the size, and is used only to average the result. That
    devices have fewer than d records would lower the number further, and is not used.

    Examples
    --------
    >>> A, B = np.array([[[2.0]], [[5.0]]]), np.array([[[1.0]], [[0.0]]])
    >>> models = np.array([0.0, 1.0, 2.0, 3.0]).reshape(4, 1, 1)
    >>> answered = np.array([[1, 1], [1, 1], [1, 0], [0, 1]], bool)
    >>> sums = np.einsum("ti,tido->tdo", answered, A @ models[:, None] - B)
    >>> found = recover_from_sums(models, sums, answered)
    >>> found.features.ravel().round(9), found.labels.ravel().round(9), found.determined
    (array([2., 5.]), array([1., 0.]), array([ True,  True]))
    """
    sent, heard = _rounds(models, sums)
    present = np.asarray(answered)
    rounds, d, o = sent.shape
    if present.dtype != np.bool_ or present.ndim != 2 or len(present) != rounds:
        raise InvalidParameterError(
            "answered", f"{present.dtype} {present.shape}", f"truth values, {rounds} rows"
        )
    limit = check_number("tolerance", tolerance, minimum=0, maximum=1)
    devices, width = present.shape[1], d + o
    unit = float(np.sqrt(np.mean(sent**2) * o)) or 1.0  # both kinds of unknowns seen alike
    known = np.concatenate([sent / unit, np.broadcast_to(-np.eye(o), (rounds, o, o))], axis=1)
    design = np.einsum("ti,tko->toik", present, known).reshape(rounds * o, devices * width)
    values = heard.transpose(0, 2, 1).reshape(rounds * o, d)
    left, scales, right = np.linalg.svd(design, full_matrices=False)
    rank = int(np.count_nonzero(scales > limit * scales.max(initial=0.0)))
    left, scales, right = left[:, :rank], scales[:rank], right[:rank]
    solved = right.T @ ((left.T @ values) / scales[:, None])
    moments = solved.reshape(devices, width, d).transpose(0, 2, 1)
    spanned = np.sum(right**2, axis=0).reshape(devices, width)
    spread = np.sum((right / scales[:, None]) ** 2, axis=0).reshape(devices, width)
    features = moments[:, :, :d] / unit
    return RecoveredDevices(
        features=(features + features.transpose(0, 2, 1)) / 2,
        labels=moments[:, :, d:],
        determined=(spanned > 1 - _DETERMINED).all(axis=1),
        error=np.sqrt(spread[:, :d].mean(axis=1)) / unit,
        rank=rank,
        unknowns=devices * width,
        residual=_share(values - design @ solved, values),
    )


def _recovered(
    features: Matrix, labels: Matrix, sent: Matrix, heard: Matrix, rank: int, seen: int
) -> Recovered:
    return Recovered(
        features=features,
        labels=labels,
        residual=_share(heard - (features @ sent - labels), heard),
        rank=rank,
        seen=seen,
    )


def _side_by_side(rounds: Matrix) -> Matrix:
    """Return the matrices of all rounds beside each other, (d, T o)."""
    joined: Matrix = rounds.transpose(1, 0, 2).reshape(rounds.shape[1], -1)
    return joined


def _share(missed: Matrix, whole: Matrix) -> float:
    length = float(np.linalg.norm(whole))
    return float(np.linalg.norm(missed)) / length if length else 0.0


def _rounds(models: ArrayLike, gradients: ArrayLike, *, least: int = 1) -> tuple[Matrix, Matrix]:
    sent = np.asarray(models, np.float64)
    if sent.ndim != 3 or len(sent) < least or 0 in sent.shape[1:]:
        raise InvalidParameterError("models", sent.shape, "the shape (T, d, o)")
    return _finite("models", sent, sent.shape), _finite("gradients", gradients, sent.shape)


def _finite(name: str, values: ArrayLike, shape: tuple[int, ...]) -> Matrix:
    array = np.asarray(values, np.float64)
    if array.shape != shape:
        raise InvalidParameterError(name, array.shape, f"the shape {shape}")
    if not is_finite(array):
        raise InvalidParameterError(name, "an array with NaN or infinity", "finite values")
    return array


def _positive(name: str, value: float) -> float:
    if not check_number(name, value) > 0:
        raise InvalidParameterError(name, value, "a number above 0")
    return float(value)
