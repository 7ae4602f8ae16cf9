"""Constructor options of ACFL: which answers get noise, the weights of a round, data bounds."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal

from flwr_privacy.accounting.gaussian import check_delta
from flwr_privacy.errors import (
    InvalidParameterError,
    check_choice,
    check_flag,
    check_integer,
    check_number,
)
from flwr_privacy.keywords import checked_keywords

from .features import FeatureMap
from .terms import NO_NOISE, PAPER, RAW, RECORD
from .weights import AlphaPolicy

__all__ = [
    "DataBounds",
    "Exact",
    "Noise",
    "NoisedRecords",
    "NoisedSetup",
    "SetupVariances",
    "Weighting",
]

SPLITS = ("equal", "optimal")

_SMALLEST = math.ulp(0.0)
_LEAST, _MOST = 1e-100, 1e100  # of bounds: their squares are numbers


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Base of the noise options."""

    noise: ClassVar[str]
    """Its name on the wire."""

    @property
    def budget(self) -> tuple[float, float]:
        """Epsilon and delta; what the wire has where there is no budget."""
        return 8.0, 1e-5

    def lasting(self) -> dict[str, Any]:
        """Return what may not change within an experiment."""
        return {"noise": self.noise, **asdict(self)}


@checked_keywords
@dataclass(frozen=True, kw_only=True)
class NoisedRecords(Noise):
    """Noise in the setup and in all gradients, for a budget per record.

    Parameters
    ----------
    epsilon, delta : float, default 8.0 and 1e-5
        Budget of a record over the whole training.
    setup_share : float, default 0.5
        Share of the budget (of mu squared, see `flwr_privacy.acfl.plan.ACFLPlan`) for the setup.
    clipping_norm : float, default 0.7
        L2 bound of the gradient of a record. On features of norm 1 it is about 1 at first, and half
        of it later.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    noise: ClassVar[str] = RECORD

    epsilon: float = 8.0
    delta: float = 1e-5
    setup_share: float = 0.5
    clipping_norm: float = 0.7

    def __post_init__(self) -> None:
        check_number("epsilon", self.epsilon, minimum=_SMALLEST)
        check_delta(self.delta)
        check_number("setup_share", self.setup_share, minimum=1e-6, maximum=1 - 1e-6)
        check_number("clipping_norm", self.clipping_norm, minimum=_LEAST, maximum=_MOST)

    @property
    def budget(self) -> tuple[float, float]:
        """Epsilon and delta."""
        return self.epsilon, self.delta


@checked_keywords
@dataclass(frozen=True, kw_only=True)
class NoisedSetup(Noise):
    """Noise in the setup alone, as printed, for a level of mutual information (ACFL, (17)).

    The gradients are exact, and give the data away.

    Parameters
    ----------
    mi_epsilon : float, default 1.0
        Level in nats of the mutual information that the setup upload of a client may give away of
        an entry; the variances follow.
    bound : {"paper", "tight"}, default "paper"
        Which bound of it: (17), or a smaller one that is proven too.
    split : {"equal", "optimal"}, default "equal"
        Whether both variances are equal, or best for a model whose norm is the strategy's
        `model_bound`.
    delta : float, default 1e-5
        At which the guarantee says what the upload costs a record.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    noise: ClassVar[str] = PAPER

    mi_epsilon: float = 1.0
    bound: Literal["paper", "tight"] = "paper"
    split: Literal["equal", "optimal"] = "equal"
    delta: float = 1e-5

    def __post_init__(self) -> None:
        check_number("mi_epsilon", self.mi_epsilon, minimum=_SMALLEST)
        check_choice("bound", self.bound, ("paper", "tight"))
        check_choice("split", self.split, SPLITS)
        check_delta(self.delta)
        if self.split == "optimal" and self.bound != "paper":
            raise InvalidParameterError("split", self.split, "'equal' with the tight bound")

    @property
    def budget(self) -> tuple[float, float]:
        """What the wire has for epsilon, and delta."""
        return 8.0, self.delta


@checked_keywords
@dataclass(frozen=True, kw_only=True)
class SetupVariances(Noise):
    """Noise in the setup alone, as printed, of given variances.

    Parameters
    ----------
    sigma1_sq, sigma2_sq : float
        Variances of the noise of the entries of X^T X and X^T Y; the second is left out where rows
        are projected (``encoding="scfl"``): its labels have no noise.
    delta : float, default 1e-5
        At which the guarantee says what the upload costs a record.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    noise: ClassVar[str] = PAPER

    sigma1_sq: float
    sigma2_sq: float | None = None
    delta: float = 1e-5

    def __post_init__(self) -> None:
        check_number("sigma1_sq", self.sigma1_sq, minimum=0)
        if self.sigma2_sq is not None:
            check_number("sigma2_sq", self.sigma2_sq, minimum=0)
        check_delta(self.delta)

    @property
    def budget(self) -> tuple[float, float]:
        """What the wire has for epsilon, and delta."""
        return 8.0, self.delta


@checked_keywords
@dataclass(frozen=True, kw_only=True)
class Exact(Noise):
    """No noise anywhere: nothing is protected, but what a secure sum hides."""

    noise: ClassVar[str] = NO_NOISE


@checked_keywords
@dataclass(frozen=True, kw_only=True)
class Weighting:
    """How a round weighs the coded gradient against the gradients that came.

    Parameters
    ----------
    alpha : {"estimated", "bounds", "horizon"} or float, optional
        Weight of the coded gradient: `flwr_privacy.acfl.weights.AlphaPolicy`. A number is a fixed
        weight: 0.5 is the paper's NA, 0 rescales what came and needs no setup, 1 uses the coded
        data alone and asks for no gradient. By default "horizon" with `NoisedRecords`, else the
        paper's "estimated": it takes the noise of the coded data for new in every round, as that of
        noised gradients is; but it stays the same, and in a long training it adds up.
    straggler_rate : float or dict, optional
        Probability that a client does not answer in time, of all or of each by its name; by default
        estimated. With ``alpha=0`` and a rate of 0 stragglers are ignored.
    predictable : bool, default False
        Whether a round is weighed by what was seen before it.
    gradient_bound : float, optional
        beta, for ``alpha="bounds"``, which takes the strategy's `model_bound` too.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    alpha: Literal["estimated", "bounds", "horizon"] | float | None = None
    straggler_rate: float | Mapping[str, float] | None = None
    predictable: bool = False
    gradient_bound: float | None = None

    def __post_init__(self) -> None:
        check_flag("predictable", self.predictable)
        AlphaPolicy(  # or says what is not allowed
            "estimated" if self.alpha is None else self.alpha,
            straggler_rate=self.straggler_rate,
            gradient_bound=self.gradient_bound,
            model_bound=1.0,
        )
        if self.gradient_bound is not None and self.alpha != "bounds":
            raise InvalidParameterError(
                "gradient_bound", self.gradient_bound, "None, unless alpha = 'bounds'"
            )

    def alpha_for(self, noise: str) -> str | float:
        """Return the weight that was chosen, or the one that suits what is noised."""
        if self.alpha is None:
            return "horizon" if noise == RECORD else "estimated"
        return self.alpha

    @property
    def own_rates(self) -> Mapping[str, float] | None:
        """The rate of each client by its name, where each has its own."""
        return self.straggler_rate if isinstance(self.straggler_rate, Mapping) else None

    @property
    def needs_setup(self) -> bool:
        """Whether there is a coded data set: it has a weight."""
        return self.alpha != 0

    @property
    def coded_only(self) -> bool:
        """Whether nothing but the coded data set has a weight."""
        return self.alpha == 1


@checked_keywords
@dataclass(frozen=True, kw_only=True)
class DataBounds:
    """What the clients' data are, and the bounds that they keep to (Assumption 1).

    Parameters
    ----------
    feature_bound, label_bound : float, default 1.0
        Bounds of an entry; that of the features by default what a feature map has.
    feature_norm, label_norm : float, optional
        Bounds of the L2 norm of a row; by default what a feature map has, one-hot labels have, or
        the bounds of the entries allow. The noise of `NoisedRecords` follows from them.
    features : FeatureMap or str, optional
        What makes features of the clients' raw data, or its identity; every client must have the
        same. By default their data are features.
    one_hot : bool, default False
        Whether labels must be one-hot, for classification.
    max_records : int, default 16384
        Most records of a client: codes have room for so many.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    feature_bound: float | None = None
    label_bound: float = 1.0
    feature_norm: float | None = None
    label_norm: float | None = None
    features: FeatureMap | str | None = None
    one_hot: bool = False
    max_records: int = 2**14

    def __post_init__(self) -> None:
        check_integer("max_records", self.max_records, minimum=1)
        check_flag("one_hot", self.one_hot)
        bounds = {
            "feature_bound": self._of_map("bound", self.feature_bound),
            "label_bound": self.label_bound,
            "feature_norm": self._of_map("norm", self.feature_norm),
            "label_norm": self.label_norm,
        }
        for name, bound in bounds.items():
            if bound is not None:
                check_number(name, bound, minimum=_LEAST, maximum=_MOST)
        if not isinstance(self.feature_map, str) or not self.feature_map:
            raise InvalidParameterError("features", self.features, "a feature map, or its identity")

    @property
    def feature_map(self) -> str:
        """Identity of the feature map."""
        if self.features is None:
            return RAW
        map_ = self.features
        return map_ if isinstance(map_, str) else getattr(map_, "identity", "")

    def feature_entry(self) -> float:
        """Return the bound of an entry of the features."""
        return float(self._of_map("bound", self.feature_bound) or 1.0)

    def feature_row(self, width: int) -> float:
        """Return the bound of the norm of a row of the features."""
        norm = self._of_map("norm", self.feature_norm)
        return math.sqrt(width) * self.feature_entry() if norm is None else float(norm)

    def label_row(self, width: int) -> float:
        """Return the bound of the norm of a row of the labels."""
        if self.label_norm is not None:
            return float(self.label_norm)
        return 1.0 if self.one_hot else math.sqrt(width) * self.label_bound

    def lasting(self) -> dict[str, Any]:
        """Return what may not change within an experiment."""
        own = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {
            **own,
            "features": self.feature_map,
            "feature_bound": self.feature_entry(),
            "feature_norm": self._of_map("norm", self.feature_norm),
        }

    def _of_map(self, name: str, given: float | None) -> Any:
        """Return a bound that was given, else the one that a feature map has, if any."""
        return getattr(self.features, name, None) if given is None else given
