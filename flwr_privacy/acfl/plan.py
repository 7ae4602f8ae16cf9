"""What a training asks of its clients: parameters checked once, and the terms that follow."""

import math
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.accounting import spent
from flwr_privacy.accounting.gaussian import check_delta, mu_of
from flwr_privacy.errors import (
    InvalidParameterError,
    check_choice,
    check_flag,
    check_integer,
    check_number,
)
from flwr_privacy.grid import Grid

from .privacy import noise_split, sigma2_for_eps
from .scfl import sigma2_for_eps_projected
from .sums import entry_bound
from .terms import (
    ENCODINGS,
    MOMENTS,
    NO_NOISE,
    NOISES,
    PAPER,
    RAW,
    RECORD,
    SCFL,
    GradientTerms,
    SetupTerms,
)

__all__ = ["SPLITS", "Plan", "Wish"]

SPLITS = ("equal", "optimal")

_SMALLEST = math.ulp(0.0)
_GRID_SHARE = 1e-3  # of epsilon that is set aside for the grid
_LARGEST_GAP = 0.01  # and at most so much of it
_PAPER_GAP = 1e-3
_ROUNDING = 1e-9  # relative; what float64 may move a sum of charges


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What a user asks for; the parameters are those of `flwr_privacy.strategies.ACFL`.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed, or two do not go together.
    """

    noise: str = RECORD
    epsilon: float = 8.0
    delta: float = 1e-5
    setup_share: float = 0.5
    mi_epsilon: float | None = None
    bound: str = "paper"
    split: str = "equal"
    sigma1_sq: float | None = None
    sigma2_sq: float | None = None
    alpha: str | float = "estimated"
    model_bound: float | None = None
    encoding: str = MOMENTS
    symmetric_noise: bool = False
    feature_bound: float = 1.0
    label_bound: float = 1.0
    feature_norm: float | None = None
    label_norm: float | None = None
    feature_map: str = RAW
    one_hot: bool = False
    clipping_norm: float = 1.0
    batch_fraction: float = 1.0
    max_records: int = 2**14

    def __post_init__(self) -> None:
        check_choice("noise", self.noise, NOISES)
        check_number("epsilon", self.epsilon, minimum=_SMALLEST)
        check_delta(self.delta)
        check_number("setup_share", self.setup_share, minimum=1e-6, maximum=1 - 1e-6)
        check_choice("bound", self.bound, ("paper", "tight"))
        check_choice("split", self.split, SPLITS)
        check_choice("encoding", self.encoding, ENCODINGS)
        check_integer("max_records", self.max_records, minimum=1)
        check_number("batch_fraction", self.batch_fraction, minimum=1e-9, maximum=1)
        check_number("clipping_norm", self.clipping_norm, minimum=1e-100, maximum=1e100)
        for name in ("feature_bound", "label_bound", "feature_norm", "label_norm"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), minimum=1e-100, maximum=1e100)
        for name in ("mi_epsilon", "sigma1_sq", "sigma2_sq", "model_bound"):
            if getattr(self, name) is not None:
                least = 0 if name.startswith("sigma") else _SMALLEST
                check_number(name, getattr(self, name), minimum=least)
        for name in ("symmetric_noise", "one_hot"):
            check_flag(name, getattr(self, name))
        if not isinstance(self.feature_map, str) or not self.feature_map:
            raise InvalidParameterError("features", self.feature_map, "a feature map, or its name")
        self._check_noise()
        if self.encoding == SCFL:
            self._check_projection()

    def _check_noise(self) -> None:
        variances = [self.sigma1_sq, self.sigma2_sq]
        given = {"mi_epsilon": self.mi_epsilon, "sigma1_sq": self.sigma1_sq}
        given["sigma2_sq"] = self.sigma2_sq
        for name, value in given.items():
            if value is not None and self.noise != PAPER:
                allowed = "nothing but with noise = 'paper'"
                if self.noise == RECORD:
                    allowed += ": the noise follows from epsilon"
                raise InvalidParameterError(name, value, allowed)
        if self.mi_epsilon is not None and variances != [None, None]:
            raise InvalidParameterError(
                "mi_epsilon", self.mi_epsilon, "nothing where the variances are given"
            )
        if self.encoding == MOMENTS and variances.count(None) == 1:
            raise InvalidParameterError("sigma2_sq", self.sigma2_sq, "both variances, or none")
        if self.split == "optimal":
            self._check_split()
        if self.encoding == SCFL and self.sigma2_sq is not None:
            raise InvalidParameterError(
                "sigma2_sq", self.sigma2_sq, "none with encoding = 'scfl': its labels have no noise"
            )

    def _check_split(self) -> None:
        if self.noise != PAPER or self.encoding == SCFL or self.sigma1_sq is not None:
            allowed = "'equal' unless noise = 'paper' and the variances follow from mi_epsilon"
            raise InvalidParameterError("split", self.split, allowed)
        if self.model_bound is None:
            raise InvalidParameterError("model_bound", None, "a bound: what is optimal needs one")
        if self.bound != "paper" or self.symmetric_noise:
            allowed = "'equal' with the tight bound or symmetric noise"
            raise InvalidParameterError("split", self.split, allowed)

    def _check_projection(self) -> None:
        if self.noise == RECORD or self.symmetric_noise:
            raise InvalidParameterError(
                "encoding", SCFL, "'moments' where noise = 'record' or noise is symmetric"
            )
        if isinstance(self.alpha, str):
            raise InvalidParameterError(
                "alpha", self.alpha, "a number with encoding = 'scfl': the others need moments"
            )

    @property
    def needs_setup(self) -> bool:
        """Whether there is a coded data set: it has a weight."""
        return self.alpha != 0

    @property
    def coded_only(self) -> bool:
        """Whether nothing but the coded data set has a weight."""
        return self.alpha == 1

    def lasting(self) -> dict[str, Any]:
        """Return what may not change within an experiment."""
        others = ("alpha", "model_bound") if self.split == "equal" else ("alpha",)
        values = {name: value for name, value in asdict(self).items() if name not in others}
        return {**values, "needs_setup": self.needs_setup, "coded_only": self.coded_only}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The terms of a training, once the shape of the model is known.

    Parameters
    ----------
    wish : Wish
        What was asked for.
    features, labels : int
        Rows d and columns o of the model.
    rounds : int
        Rounds over which a budget is spread.

    Notes
    -----
    With ``noise="record"`` the budget is that of Gaussian differential privacy: mu^2 is the sum of
    the squares of all releases. The setup has `setup_share` of it, half for either moment, and the
    gradients of the rounds have equal parts of the rest.

    Examples
    --------
    >>> plan = Plan(wish=Wish(epsilon=8.0, max_records=1000), features=10, labels=2, rounds=20)
    >>> setup = plan.setup_terms(parties=0).charge()
    >>> rounds = plan.gradient_terms(np.zeros((10, 2)), parties=0).charge()
    >>> from flwr_privacy.accounting import spent
    >>> round(spent([setup, *[rounds] * 20], delta=1e-5), 2)
    8.0
    """

    wish: Wish
    features: int
    labels: int
    rounds: int

    def setup_terms(self, *, parties: int) -> SetupTerms:
        """Return what the setup asks.

        Raises
        ------
        InvalidParameterError
            If the noise is too little for a grid that has codes for all records.
        """
        wish = self.wish
        moments = wish.encoding == MOMENTS
        sigmas = (0.0, 0.0) if wish.noise == RECORD else self._paper_sigmas()
        terms = SetupTerms(
            **self._data(parties),
            encoding=wish.encoding,
            symmetric=wish.symmetric_noise,
            # A first guess, which has to be more than 0.
            sigma_features=sigmas[0] if wish.noise != RECORD else 1.0,
            sigma_labels=sigmas[1] if wish.noise != RECORD else 1.0,
            grid=0,
        )
        if wish.noise == RECORD:
            each = math.sqrt(2) / self._mu_setup  # two moments share what the setup has
            terms = replace(terms, grid=-500)
            for _ in range(2):  # the grid follows from the noise, and the noise has room for it
                features, labels = terms.sensitivities()
                terms = replace(terms, sigma_features=each * features, sigma_labels=each * labels)
                terms = replace(terms, grid=Grid.holding(1.01 * terms.reach()).exponent)
        elif terms.coded:
            terms = replace(terms, grid=Grid.holding(1.01 * terms.reach()).exponent)
        charge = terms.charge()
        if wish.noise == PAPER and moments and charge is not None:
            # What one setup costs; another one in the same experiment would pass it.
            terms = replace(terms, epsilon=spent([charge], delta=wish.delta))
        terms.check_grid()
        return terms

    def gradient_terms(self, model: NDArray[np.float64], *, parties: int) -> GradientTerms:
        """Return what a round asks.

        Raises
        ------
        InvalidParameterError
            If the noise is too little for a grid that has codes for all records.
        """
        wish = self.wish
        noised = wish.noise == RECORD
        terms = GradientTerms(
            **self._data(parties),
            noise_multiplier=1 / self._mu_gradient if noised else 0.0,
            clipping_norm=float(wish.clipping_norm),
            batch_fraction=float(wish.batch_fraction),
            gradient_bound=1.0 if parties and not noised else 0.0,
            grid=-500,
        )
        if terms.gradient_bound:
            bound = entry_bound(terms, model)
            terms = replace(terms, gradient_bound=bound * (1 + _ROUNDING))
        if terms.coded:
            terms = replace(terms, grid=Grid.holding(1.01 * terms.reach()).exponent)
        terms.check_grid()
        return terms

    def _data(self, parties: int) -> dict[str, Any]:
        wish = self.wish
        feature_norm, label_norm = wish.feature_norm, wish.label_norm
        if feature_norm is None:
            feature_norm = math.sqrt(self.features) * wish.feature_bound
        if label_norm is None:
            label_norm = 1.0 if wish.one_hot else math.sqrt(self.labels) * wish.label_bound
        return {
            "noise": wish.noise,
            "features": self.features,
            "labels": self.labels,
            "feature_map": wish.feature_map,
            "feature_bound": float(wish.feature_bound),
            "label_bound": float(wish.label_bound),
            "feature_norm": float(feature_norm),
            "label_norm": float(label_norm),
            "one_hot": wish.one_hot,
            "max_records": wish.max_records,
            "epsilon": float(wish.epsilon),
            "delta": float(wish.delta),
            "gap": self._set_aside / self._releases if wish.noise == RECORD else _PAPER_GAP,
            "parties": parties,
        }

    def _paper_sigmas(self) -> tuple[float, float]:
        """Return the standard deviations of the noise of the setup, as printed."""
        wish, d, o = self.wish, self.features, self.labels
        if wish.noise == NO_NOISE:
            return 0.0, 0.0
        if wish.sigma1_sq is not None:
            return math.sqrt(wish.sigma1_sq), math.sqrt(wish.sigma2_sq or 0.0)
        level = 1.0 if wish.mi_epsilon is None else wish.mi_epsilon
        if wish.encoding == SCFL:
            return math.sqrt(sigma2_for_eps_projected(level, d)), 0.0
        bounds: dict[str, Any] = {"B_X": wish.feature_bound, "B_Y": wish.label_bound}
        if wish.split == "optimal" and wish.model_bound is not None:
            first, second = noise_split(level, d, o, wish.model_bound**2, **bounds)
            # The split is for an entry of the features; labels must not tell more of theirs.
            most = (wish.feature_bound * wish.label_bound) ** 2 / math.expm1(2 * level / d)
            return math.sqrt(first), math.sqrt(max(second, most))
        sigma = math.sqrt(
            sigma2_for_eps(level, d, o, bound=wish.bound, symmetric=wish.symmetric_noise, **bounds)
        )
        return sigma, sigma

    @property
    def _releases(self) -> int:
        return int(self.wish.needs_setup) + (0 if self.wish.coded_only else self.rounds)

    @property
    def _set_aside(self) -> float:
        return min(_GRID_SHARE * self.wish.epsilon, _LARGEST_GAP)

    @cached_property
    def _mu(self) -> float:
        epsilon = self.wish.epsilon - self._set_aside
        return mu_of(epsilon, self.wish.delta * math.exp(-self._set_aside)) * (1 - _ROUNDING)

    @property
    def _share(self) -> float:
        """Share of the setup in the budget."""
        if not self.wish.needs_setup:
            return 0.0
        return 1.0 if self.wish.coded_only else self.wish.setup_share

    @property
    def _mu_setup(self) -> float:
        return self._mu * math.sqrt(self._share)

    @property
    def _mu_gradient(self) -> float:
        return self._mu * math.sqrt((1 - self._share) / self.rounds)
