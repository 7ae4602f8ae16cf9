"""Plans a training's requests: parameters checked once, and the terms that follow."""

import math
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.accounting import ADD_REMOVE, spent
from flwr_privacy.accounting.gaussian import mu_of
from flwr_privacy.errors import InvalidParameterError, check_choice, check_flag, check_number
from flwr_privacy.evaluation import PrivateEvaluation
from flwr_privacy.evaluation.caps import ACCURACIES
from flwr_privacy.evaluation.plan import asked_for, on_coarsest_grid
from flwr_privacy.evaluation.terms import COUNTS_GRID
from flwr_privacy.privacy.grid import CodeGrid

from .evaluation import LinearEvaluation
from .options import DataBounds, Noise, NoisedRecords, NoisedSetup, SetupVariances, Weighting
from .privacy import noise_split, sigma2_for_eps
from .scfl import sigma2_for_eps_projected
from .sums import entry_bound
from .terms import ENCODINGS, MOMENTS, PAPER, RECORD, SCFL, GradientTerms, SetupTerms

__all__ = ["ACFLOptions", "ACFLPlan"]

_SMALLEST = math.ulp(0.0)
_GRID_SHARE = 1e-3  # of epsilon that is set aside for the grid
_LARGEST_GAP = 0.01  # and at most so much of it
_PAPER_GAP = 1e-3
_ROUNDING = 1e-9  # relative; what float64 may move a sum of charges


@dataclass(frozen=True, kw_only=True)
class ACFLOptions:
    """The checked options of `flwr_privacy.strategies.ACFL`.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed, or two do not go together.
    """

    privacy: Noise
    weighting: Weighting
    data: DataBounds
    model_bound: float | None = None
    encoding: str = MOMENTS
    symmetric_noise: bool = False
    batch_fraction: float = 1.0
    evaluation: PrivateEvaluation | None = None

    def __post_init__(self) -> None:
        kinds = {"privacy": Noise, "weighting": Weighting, "data": DataBounds}
        for name, kind in kinds.items():
            if not isinstance(getattr(self, name), kind):
                raise InvalidParameterError(name, getattr(self, name), f"a {kind.__name__}(...)")
        check_choice("encoding", self.encoding, ENCODINGS)
        check_number("batch_fraction", self.batch_fraction, minimum=1e-9, maximum=1)
        check_flag("symmetric_noise", self.symmetric_noise)
        if self.model_bound is not None:
            check_number("model_bound", self.model_bound, minimum=_SMALLEST)
        elif self.weighting.alpha == "bounds":
            allowed = "a bound, which alpha = 'bounds' needs"
            raise InvalidParameterError("model_bound", None, allowed)
        if isinstance(self.privacy, SetupVariances):
            self._check_variances(self.privacy)
        if isinstance(self.privacy, NoisedSetup) and self.privacy.split == "optimal":
            self._check_split()
        if self.encoding == SCFL:
            self._check_projection()
        if self.evaluation is not None:
            self._check_evaluation(self.evaluation)

    def _check_variances(self, privacy: SetupVariances) -> None:
        if self.encoding == MOMENTS and privacy.sigma2_sq is None:
            raise InvalidParameterError("sigma2_sq", None, "both variances")
        if self.encoding == SCFL and privacy.sigma2_sq is not None:
            raise InvalidParameterError(
                "sigma2_sq",
                privacy.sigma2_sq,
                "none with encoding = 'scfl': its labels have no noise",
            )

    def _check_split(self) -> None:
        if self.encoding == SCFL or self.symmetric_noise:
            allowed = "'equal' with encoding = 'scfl' or symmetric noise"
            raise InvalidParameterError("split", "optimal", allowed)
        if self.model_bound is None:
            raise InvalidParameterError("model_bound", None, "a bound: what is optimal needs one")

    def _check_projection(self) -> None:
        if self.noise == RECORD or self.symmetric_noise:
            raise InvalidParameterError(
                "encoding", SCFL, "'moments' where noise = 'record' or noise is symmetric"
            )
        alpha = self.weighting.alpha_for(self.noise)
        if isinstance(alpha, str):
            raise InvalidParameterError(
                "alpha",
                alpha,
                "a number with encoding = 'scfl': the others need moments",
            )

    def _check_evaluation(self, evaluation: PrivateEvaluation) -> None:
        if self.noise != RECORD:
            raise InvalidParameterError(
                "evaluation",
                type(evaluation).__name__,
                f"None with {type(self.privacy).__name__}: only NoisedRecords has a budget that "
                "evaluations could have a share of",
            )
        if not self.data.one_hot:
            allowed = "true with a private evaluation, which counts the records of the right label"
            raise InvalidParameterError("one_hot", False, allowed)
        check_choice("accuracy", evaluation.accuracy, ACCURACIES)

    @property
    def noise(self) -> str:
        """What has noise, as the wire says it."""
        return self.privacy.noise

    @property
    def bound(self) -> str:
        """Which bound of the mutual information the guarantee has."""
        return self.privacy.bound if isinstance(self.privacy, NoisedSetup) else "paper"

    def lasting(self) -> dict[str, Any]:
        """Return what may not change within an experiment."""
        optimal = isinstance(self.privacy, NoisedSetup) and self.privacy.split == "optimal"
        return {
            **self.privacy.lasting(),
            **self.data.lasting(),
            **({"model_bound": self.model_bound} if optimal else {}),
            "encoding": self.encoding,
            "symmetric_noise": self.symmetric_noise,
            "batch_fraction": self.batch_fraction,
            "needs_setup": self.weighting.needs_setup,
            "coded_only": self.weighting.coded_only,
            "evaluation": None if self.evaluation is None else asdict(self.evaluation),
        }


@dataclass(frozen=True, kw_only=True)
class ACFLPlan:
    """The terms of a training, once the shape of the model is known.

    Parameters
    ----------
    options : ACFLOptions
        What was asked for.
    features, labels : int
        Rows d and columns o of the model.
    rounds : int
        Rounds over which a budget is spread.

    Notes
    -----
    With ``noise="record"`` the budget is that of Gaussian differential privacy: mu^2 is the sum of
    the squares of all releases. The evaluations have their `share` of it. Of what is left the setup
    has `setup_share`, half for either moment, and the gradients of the rounds have equal parts of
    the rest.

    Examples
    --------
    >>> from flwr_privacy.acfl.options import DataBounds, NoisedRecords, Weighting
    >>> data = DataBounds(max_records=1000)
    >>> options = ACFLOptions(privacy=NoisedRecords(epsilon=8.0), weighting=Weighting(), data=data)
    >>> plan = ACFLPlan(options=options, features=10, labels=2, rounds=20)
    >>> setup = plan.setup_terms(parties=0).charge()
    >>> rounds = plan.gradient_terms(np.zeros((10, 2)), parties=0).charge()
    >>> from flwr_privacy.accounting import spent
    >>> round(spent([setup, *[rounds] * 20], delta=1e-5), 2)
    8.0
    """

    options: ACFLOptions
    features: int
    labels: int
    rounds: int

    def setup_terms(self, *, parties: int) -> SetupTerms:
        """Return the terms of the setup.

        Raises
        ------
        InvalidParameterError
            If the noise is too little for a grid that has codes for all records.
        """
        options = self.options
        moments = options.encoding == MOMENTS
        sigmas = (0.0, 0.0) if options.noise == RECORD else self._paper_sigmas()
        terms = SetupTerms(
            **self._data(parties),
            encoding=options.encoding,
            symmetric=options.symmetric_noise,
            # A first guess, which has to be more than 0.
            sigma_features=sigmas[0] if options.noise != RECORD else 1.0,
            sigma_labels=sigmas[1] if options.noise != RECORD else 1.0,
            grid=0,
        )
        if options.noise == RECORD:
            each = math.sqrt(2) / self._mu_setup  # two moments share what the setup has
            terms = replace(terms, grid=-500)
            for _ in range(2):  # the grid follows from the noise, and the noise has room for it
                features, labels = terms.sensitivities()
                terms = replace(terms, sigma_features=each * features, sigma_labels=each * labels)
                terms = replace(terms, grid=CodeGrid.holding(1.01 * terms.reach()).exponent)
        elif terms.coded:
            terms = replace(terms, grid=CodeGrid.holding(1.01 * terms.reach()).exponent)
        charge = terms.charge()
        if options.noise == PAPER and moments and charge is not None:
            # What one setup costs; another one in the same experiment would pass it.
            terms = replace(terms, epsilon=spent([charge], delta=terms.delta))
        terms.check_grid()
        return terms

    def gradient_terms(self, model: NDArray[np.float64], *, parties: int) -> GradientTerms:
        """Return the terms of a round.

        Raises
        ------
        InvalidParameterError
            If the noise is too little for a grid that has codes for all records.
        """
        options, privacy = self.options, self.options.privacy
        noised = isinstance(privacy, NoisedRecords)
        clipping_norm = privacy.clipping_norm if isinstance(privacy, NoisedRecords) else 1.0
        terms = GradientTerms(
            **self._data(parties),
            noise_multiplier=1 / self._mu_gradient if noised else 0.0,
            clipping_norm=float(clipping_norm),
            batch_fraction=float(options.batch_fraction),
            gradient_bound=1.0 if parties and not noised else 0.0,
            grid=-500,
        )
        if terms.gradient_bound:
            bound = entry_bound(terms, model)
            terms = replace(terms, gradient_bound=bound * (1 + _ROUNDING))
        if terms.coded:
            terms = replace(terms, grid=CodeGrid.holding(1.01 * terms.reach()).exponent)
        terms.check_grid()
        return terms

    @property
    def evaluations(self) -> int:
        """Evaluations that a client's budget is planned for: it may be asked in all."""
        evaluation = self.options.evaluation
        return 0 if evaluation is None else evaluation.count(self.rounds)

    def evaluation_terms(self, *, parties: int) -> LinearEvaluation:
        """Return the terms of an evaluation.

        Raises
        ------
        InvalidParameterError
            If the histogram is of other labels than the model's.
        ValueError
            If none is planned.
        """
        evaluation = self.options.evaluation
        if evaluation is None:
            raise ValueError("no evaluation is planned")
        if evaluation.label_histogram not in (None, self.labels):
            allowed = f"{self.labels}, the labels of the model"
            raise InvalidParameterError("label_histogram", evaluation.label_histogram, allowed)
        epsilon, delta = self.options.privacy.budget
        terms = LinearEvaluation(
            unit="record",
            neighbours=ADD_REMOVE,
            **asked_for(evaluation),
            noise_multiplier=math.sqrt(self.evaluations / evaluation.share) / self._mu,
            epsilon=float(epsilon),
            delta=float(delta),
            gap=self._set_aside / self._releases,
            grid=COUNTS_GRID,
            parties=parties,
            feature_map=self.options.data.feature_map,
        )
        return on_coarsest_grid(terms)

    def _data(self, parties: int) -> dict[str, Any]:
        options, data = self.options, self.options.data
        epsilon, delta = options.privacy.budget
        return {
            "noise": options.noise,
            "features": self.features,
            "labels": self.labels,
            "feature_map": data.feature_map,
            "feature_bound": data.feature_entry(),
            "label_bound": float(data.label_bound),
            "feature_norm": data.feature_row(self.features),
            "label_norm": data.label_row(self.labels),
            "one_hot": data.one_hot,
            "max_records": data.max_records,
            "epsilon": float(epsilon),
            "delta": float(delta),
            "gap": self._set_aside / self._releases if options.noise == RECORD else _PAPER_GAP,
            "parties": parties,
        }

    def _paper_sigmas(self) -> tuple[float, float]:
        """Return the standard deviations of the noise of the setup, as printed."""
        options, d, o, privacy = self.options, self.features, self.labels, self.options.privacy
        if isinstance(privacy, SetupVariances):
            return math.sqrt(privacy.sigma1_sq), math.sqrt(privacy.sigma2_sq or 0.0)
        if not isinstance(privacy, NoisedSetup):
            return 0.0, 0.0
        level = privacy.mi_epsilon
        B_X, B_Y = options.data.feature_entry(), options.data.label_bound
        if options.encoding == SCFL:
            return math.sqrt(sigma2_for_eps_projected(level, d, B_X=B_X)), 0.0
        if privacy.split == "optimal" and options.model_bound is not None:
            first, second = noise_split(level, d, o, options.model_bound**2, B_X=B_X, B_Y=B_Y)
            # The split is for an entry of the features; labels must not tell more of theirs.
            most = (B_X * B_Y) ** 2 / math.expm1(2 * level / d)
            return math.sqrt(first), math.sqrt(max(second, most))
        symmetric = options.symmetric_noise
        sigma = math.sqrt(
            sigma2_for_eps(level, d, o, bound=privacy.bound, symmetric=symmetric, B_X=B_X, B_Y=B_Y)
        )
        return sigma, sigma

    @property
    def _releases(self) -> int:
        weighting = self.options.weighting
        trainings = 0 if weighting.coded_only else self.rounds
        return int(weighting.needs_setup) + trainings + self.evaluations

    @property
    def _set_aside(self) -> float:
        return min(_GRID_SHARE * self.options.privacy.budget[0], _LARGEST_GAP)

    @cached_property
    def _mu(self) -> float:
        epsilon, delta = self.options.privacy.budget
        aside = self._set_aside
        return mu_of(epsilon - aside, delta * math.exp(-aside)) * (1 - _ROUNDING)

    @property
    def _training(self) -> float:
        """Share of the budget that is not for evaluations."""
        evaluation = self.options.evaluation
        return 1.0 if evaluation is None else 1.0 - evaluation.share

    @property
    def _share(self) -> float:
        """Share of the setup in what is not for evaluations."""
        if not self.options.weighting.needs_setup:
            return 0.0
        if self.options.weighting.coded_only or not isinstance(self.options.privacy, NoisedRecords):
            return 1.0
        return self.options.privacy.setup_share

    @property
    def _mu_setup(self) -> float:
        return self._mu * math.sqrt(self._training * self._share)

    @property
    def _mu_gradient(self) -> float:
        return self._mu * math.sqrt(self._training * (1 - self._share) / self.rounds)
