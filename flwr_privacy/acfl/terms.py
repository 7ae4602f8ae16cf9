"""The terms of ACFL: the fields that the server sends to a client."""

import math
from dataclasses import dataclass

from flwr_privacy.accounting import ADD_REMOVE, Charge
from flwr_privacy.accounting.gaussian import check_delta
from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer, check_number
from flwr_privacy.privacy.distributed_noise import SMALLEST_SHARE, summed_gap
from flwr_privacy.privacy.forecast import Forecast
from flwr_privacy.privacy.grid import CODE_LIMIT, CodeGrid
from flwr_privacy.privacy.noise import discretisation_gap

__all__ = [
    "ENCODINGS",
    "MOMENTS",
    "NOISES",
    "NO_NOISE",
    "PAPER",
    "RAW",
    "RECORD",
    "SCFL",
    "DataTerms",
    "GradientTerms",
    "SetupTerms",
]

RECORD, PAPER, NO_NOISE = "record", "paper", "none"
NOISES = (RECORD, PAPER, NO_NOISE)
"""What is noised: gradients and setup, so that records are protected; the setup; nothing."""

MOMENTS, SCFL = "moments", "scfl"
ENCODINGS = (MOMENTS, SCFL)

RAW = "raw"
"""Identity of the feature map of a client whose data are features already."""

NORM_SHARE = 0.1
"""Weight of the norm of a gradient beside the gradient, where both are noised together."""

_NOISE_REACH = 8.0  # standard deviations of noise that codes must hold; beyond, they saturate
_SHARE_REACH = 12.0  # of a share or a projection, which may not saturate
_SMALLEST = math.ulp(0.0)
_MOST = 2**20  # entries of a side of a matrix
_MOST_RECORDS = 2**40
_UNIT_ROUNDOFF = 2.0**-53
_ROUNDING_SHARE = 1e-3  # of the clipping norm; what the sensitivity has room for, see below
_LEAST_STEPS = 4.0  # of the grid in a standard deviation, below which the gap is not known


@dataclass(frozen=True, kw_only=True)
class DataTerms:
    """The shape and bounds that a client's data must have, the same for all clients.

    Parameters
    ----------
    noise : {"record", "paper", "none"}
        What is noised.
    features, labels : int
        Columns d of the feature matrix and o of the label matrix.
    feature_map : str
        Identity of what makes features of a client's raw data; ``raw``: nothing does.
    feature_bound, label_bound : float
        Bounds of an entry, B_X and B_Y.
    feature_norm, label_norm : float
        Bounds of the L2 norm of a row.
    one_hot : bool
        Whether every row of the label matrix must have a single 1, and zeros.
    max_records : int
        Most records of a client.
    epsilon, delta : float
        Budget of a client in this experiment, with ``noise="record"``.
    gap : float
        Epsilon set aside per release for the grid.
    parties : int
        Honest clients of a sum who share its noise; 0 outside of a secure sum.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    noise: str
    features: int
    labels: int
    feature_map: str
    feature_bound: float
    label_bound: float
    feature_norm: float
    label_norm: float
    one_hot: bool
    max_records: int
    epsilon: float
    delta: float
    gap: float
    parties: int

    def __post_init__(self) -> None:
        check_choice("noise", self.noise, NOISES)
        check_integer("features", self.features, minimum=1, maximum=_MOST)
        check_integer("labels", self.labels, minimum=1, maximum=_MOST)
        for name in ("feature_bound", "label_bound", "feature_norm", "label_norm"):
            check_number(name, getattr(self, name), minimum=1e-100, maximum=1e100)
        check_integer("max_records", self.max_records, minimum=1, maximum=_MOST_RECORDS)
        check_number("epsilon", self.epsilon, minimum=_SMALLEST)
        check_delta(self.delta)
        check_number("gap", self.gap, minimum=0)
        check_integer("parties", self.parties, minimum=0)

    def of_the_data(self) -> tuple[float | int | str, ...]:
        """Return what of the terms is about the data alone."""
        return (
            *(self.features, self.labels, self.feature_map),
            *(self.feature_bound, self.label_bound, self.feature_norm, self.label_norm),
            *(self.one_hot, self.max_records),
        )

    def check_sizes(self, records: int, features: int, labels: int) -> None:
        """Refuse terms that are about data of another size.

        Raises
        ------
        InvalidParameterError
            If they are.
        """
        if (features, labels) != (self.features, self.labels):
            raise InvalidParameterError(
                "features, labels",
                (self.features, self.labels),
                f"the columns of this client's data, {features} and {labels}",
            )
        if records > self.max_records:
            raise InvalidParameterError(
                "max_records", self.max_records, "at least the records of every client"
            )

    def share_of(self, sigma: float) -> float:
        """Return the standard deviation that one client adds, for one of the noise as a whole."""
        return sigma / math.sqrt(self.parties) if self.parties else sigma


@dataclass(frozen=True, kw_only=True)
class SetupTerms(DataTerms):
    """The terms of a client's setup.

    Parameters
    ----------
    encoding : {"moments", "scfl"}
        Noised moments (2), (3), or the random projection of the SCFL baseline.
    symmetric : bool
        Whether the noise of the feature moments is symmetric, so that one triangle travels.
    sigma_features, sigma_labels : float
        Standard deviations of the noise, the roots of sigma_1^2 and sigma_2^2; in a secure sum
        those of the sum's noise.
    grid : int
        Exponent of the grid's step, where there is noise or a secure sum.

    Examples
    --------
    >>> terms = SetupTerms(
    ...     noise="paper", features=10, labels=10, feature_map="raw", feature_bound=1.0,
    ...     label_bound=1.0, feature_norm=10**0.5, label_norm=10**0.5, one_hot=False,
    ...     max_records=100, epsilon=8.0, delta=1e-5, gap=1e-3, parties=0, encoding="moments",
    ...     symmetric=False, sigma_features=14.005747**0.5, sigma_labels=14.005747**0.5, grid=-22,
    ... )
    >>> round(1 / terms.charge().noise_multiplier, 3)  # the parameter of Gaussian privacy
    3.779
    """

    encoding: str
    symmetric: bool
    sigma_features: float
    sigma_labels: float
    grid: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("encoding", self.encoding, ENCODINGS)
        check_number("sigma_features", self.sigma_features, minimum=0)
        check_number("sigma_labels", self.sigma_labels, minimum=0)
        noised = [sigma > 0 for sigma in (self.sigma_features, self.sigma_labels)]
        if self.encoding == MOMENTS and len(set(noised)) > 1:
            raise InvalidParameterError(
                "sigma_labels", self.sigma_labels, "noise on both moments, or on none"
            )
        if self.noise == RECORD and not all(noised):
            raise InvalidParameterError("sigma_features", self.sigma_features, "more than 0")
        if self.encoding == SCFL and (self.noise == RECORD or self.symmetric):
            raise InvalidParameterError(
                "encoding", SCFL, "moments, where records are protected or noise is symmetric"
            )
        CodeGrid(self.grid)

    @property
    def coded(self) -> bool:
        """Whether the answer is codes on a grid; else it is float64."""
        return bool(self.parties or self.sigma_features or self.encoding == SCFL)

    def sensitivities(self) -> tuple[float, float]:
        """Return by how much a record can move the moments of the features and of the labels.

        That is ``R_X^2`` and ``R_X R_Y`` in L2, and what truncation to the grid adds.
        """
        step = CodeGrid(self.grid).step if self.coded else 0.0
        cross = math.sqrt(self.features * self.labels)
        return (
            self.feature_norm**2 + step * self.features,
            self.feature_norm * self.label_norm + step * cross,
        )

    @property
    def entries(self) -> int:
        """Number of values in the answer."""
        square = self.features * (self.features + 1) // 2 if self.symmetric else self.features**2
        return square + self.features * self.labels

    def check_grid(self) -> None:
        """Refuse a grid that has no codes for all values, or too few in the noise.

        Raises
        ------
        InvalidParameterError
            If it is too fine, so that a value beyond the codes would be told by an error; or so
            coarse that the noise does not do what the charge says.
        """
        _check_reach(self)
        if self.charge() is not None:
            _check_gap(self, self.entries, min(self.sigma_features, self.sigma_labels))

    def charge(self) -> Charge | None:
        """Return the charge of the answer for a record added or removed, if it has one.

        None without noise, and for a projection, whose cost to a record has no bound.
        """
        if self.encoding == SCFL or self.sigma_features == 0:
            return None
        features, labels = self.sensitivities()
        mu = math.hypot(features / self.sigma_features, labels / self.sigma_labels)
        return Charge(noise_multiplier=1 / mu, neighbours=ADD_REMOVE, gap=self.gap)

    def reach(self) -> float:
        """Return up to which value the grid must have codes."""
        bound = max(self.feature_bound, self.label_bound)
        largest = max(self.sigma_features, self.sigma_labels)
        if self.encoding == SCFL:
            spread = math.hypot(bound * math.sqrt(self.max_records), self.share_of(largest))
            return _SHARE_REACH * spread
        entry = self.max_records * self.feature_bound * bound
        return entry + _reach(self, self.share_of(largest))


@dataclass(frozen=True, kw_only=True)
class GradientTerms(DataTerms):
    """The terms of a client's gradient.

    Parameters
    ----------
    noise_multiplier : float
        Standard deviation of the noise over the sensitivity; 0 for none.
    clipping_norm : float
        Bound of the L2 norm of a record's gradient, with ``noise="record"``.
    batch_fraction : float
        Rate of the Poisson sample of the records; 1 takes all. Nothing is charged less for it.
    gradient_bound : float
        Bound of an entry of an exact gradient in a secure sum; 0 where none is needed.
    grid : int
        Exponent of the grid's step, where there is noise or a secure sum.
    """

    noise_multiplier: float
    clipping_norm: float
    batch_fraction: float
    gradient_bound: float
    grid: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("noise_multiplier", self.noise_multiplier, minimum=0)
        check_number("clipping_norm", self.clipping_norm, minimum=1e-100, maximum=1e100)
        check_number("batch_fraction", self.batch_fraction, minimum=1e-9, maximum=1)
        check_number("gradient_bound", self.gradient_bound, minimum=0)
        if (self.noise == RECORD) != (self.noise_multiplier > 0):
            raise InvalidParameterError(
                "noise_multiplier",
                self.noise_multiplier,
                "noise on the gradients with noise = 'record', and only there",
            )
        if self.noise != RECORD and (self.parties > 0) != (self.gradient_bound > 0):
            raise InvalidParameterError(
                "gradient_bound", self.gradient_bound, "a bound in a secure sum, and only there"
            )
        CodeGrid(self.grid)

    @property
    def sizes(self) -> int:
        """Number of values that tell the norm: an exact square takes two codes."""
        return 2 if self.parties and self.noise != RECORD else 1

    @property
    def entries(self) -> int:
        """Number of values in the answer: the gradient, and what tells its norm."""
        return self.features * self.labels + self.sizes

    @property
    def coded(self) -> bool:
        """Whether the answer is codes on a grid; else it is float64."""
        return bool(self.parties or self.noise == RECORD)

    def check_model(self, model_norm: float) -> None:
        """Refuse a model so large that rounding would move a clipped gradient.

        Raises
        ------
        InvalidParameterError
            If it is.
        """
        residual = self.feature_norm * model_norm + self.label_norm
        largest = self.max_records * self.feature_norm * residual
        rounding = self.features * _UNIT_ROUNDOFF * largest
        if self.noise == RECORD and not rounding <= _ROUNDING_SHARE * self.clipping_norm:
            raise InvalidParameterError(
                "model",
                f"a matrix of norm {model_norm:.3g}",
                "a smaller one: rounding could exceed the sensitivity",
            )

    def sensitivity(self) -> float:
        """Return by how much a record can move the answer, in L2.

        A record moves the gradient by no more than the clipping norm, and so its norm too; a
        thousandth more is for rounding.
        """
        step = CodeGrid(self.grid).step
        moved = self.clipping_norm * (1 + _ROUNDING_SHARE) * math.hypot(1, NORM_SHARE)
        return moved + step * math.sqrt(self.entries)

    @property
    def sigma(self) -> float:
        """Standard deviation of the noise; in a secure sum that of the sum's noise."""
        return self.noise_multiplier * self.sensitivity() if self.noise == RECORD else 0.0

    def forecast(self, rounds: int, clients: int) -> Forecast:
        """Return what the noise of so many rounds' gradients leaves of a training.

        In a round the sum of the gradients has at most the norm ``clipping_norm`` for each record.
        """
        noise = self.sigma * (1.0 if self.parties else math.sqrt(clients))
        return Forecast(
            ratio=noise / (clients * self.clipping_norm),
            weights=self.features * self.labels,
            clients=clients,
            rounds=rounds,
            own_noise=not self.parties,
            per_record=True,
        )

    def check_grid(self) -> None:
        """Refuse a grid that has no codes for all values, or too few in the noise.

        Raises
        ------
        InvalidParameterError
            If it is too fine, so that a value beyond the codes would be told by an error; or so
            coarse that the noise does not do what the charge says.
        """
        _check_reach(self)
        if self.noise == RECORD:
            _check_gap(self, self.entries, self.sigma)

    def charge(self) -> Charge | None:
        """Return the charge of the answer for a record added or removed; None without noise."""
        if self.noise != RECORD:
            return None
        return Charge(noise_multiplier=self.noise_multiplier, neighbours=ADD_REMOVE, gap=self.gap)

    def reach(self) -> float:
        """Return up to which value the grid must have codes."""
        if self.noise != RECORD:
            return self.gradient_bound
        return self.max_records * self.clipping_norm + _reach(self, self.share_of(self.sigma))


def _reach(terms: DataTerms, sigma: float) -> float:
    return (_SHARE_REACH if terms.parties else _NOISE_REACH) * sigma


def _check_reach(terms: SetupTerms | GradientTerms) -> None:
    reach = terms.reach() / CodeGrid(terms.grid).step if terms.coded else 0.0
    if not reach <= CODE_LIMIT:
        raise InvalidParameterError(
            "grid", terms.grid, f"a coarser grid: values up to {reach:.3g} steps leave 32 bits"
        )


def _check_gap(terms: SetupTerms | GradientTerms, entries: int, sigma: float) -> None:
    steps = terms.share_of(sigma) / CodeGrid(terms.grid).step
    if steps >= (SMALLEST_SHARE if terms.parties else _LEAST_STEPS):
        gap = (
            summed_gap(entries, steps, terms.parties)
            if terms.parties
            else discretisation_gap(entries, steps)
        )
        if gap <= terms.gap:
            return
    raise InvalidParameterError(
        "max_records",
        terms.max_records,
        f"fewer, or more noise: its standard deviation is {steps:.3g} steps of the grid, which "
        f"must have codes for the sums over all records",
    )
