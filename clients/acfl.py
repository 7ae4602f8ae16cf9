"""ACFL on the client: encode once, then send the gradient of a squared loss.

The client has data instead of an app: a feature matrix and a label matrix. What it sends of them is
checked against the node's policy and charged as everywhere; see `flwr_privacy.pipeline.answer`.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from flwr.app import Context
from flwr.clientapp import ClientApp
from numpy.typing import ArrayLike

from flwr_privacy.accounting import ADD_REMOVE
from flwr_privacy.acfl.encoding import check_data, tables
from flwr_privacy.acfl.features import FeatureMap
from flwr_privacy.acfl.limits import DataLimits
from flwr_privacy.acfl.release import CodedGradient, LocalCodedData
from flwr_privacy.acfl.terms import MOMENTS, RAW, DataTerms, GradientTerms, SetupTerms
from flwr_privacy.clients.acfl_data import PreparedData
from flwr_privacy.clients.node.adapters import own_client_app
from flwr_privacy.clients.node.base import Evaluate, Train
from flwr_privacy.clients.node.data_cache import DataCache
from flwr_privacy.clients.node.dispatch import discreet
from flwr_privacy.clients.node.private_evaluation import EvaluatingClient
from flwr_privacy.errors import FlwrPrivacyError, InvalidParameterError, ProtocolError, check_choice
from flwr_privacy.pipeline.mechanism import EXPERIMENT, ROUND, Facts, NoFactsError, Release
from flwr_privacy.privacy.averaging import WeightedMean
from flwr_privacy.privacy.ledger import Question
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.wire import fields as records
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.message import TRAIN, Fields

if TYPE_CHECKING:
    from flwr_privacy.evaluation.terms import EvaluationTerms

__all__ = ["ACFLClient", "Data", "DataLimits", "acfl_client_app"]

SETUP = "setup"
EXCESS = ("refuse", "clip")

Data = tuple[ArrayLike, ArrayLike]
"""A feature matrix, or raw data for a feature map, and a label matrix; as many rows."""

_prepared: DataCache[PreparedData] = DataCache()


class ACFLClient(EvaluatingClient):
    """Client half of `flwr_privacy.strategies.ACFL`.

    Parameters
    ----------
    data : tuple or callable
        Features (m, d) and labels (m, o), or a function without arguments that returns them; it is
        called only when they are needed.
    context : Context
        Flower's context of this client.
    features : FeatureMap, optional
        Makes the features of raw data, e.g. `flwr_privacy.acfl.features.FourierFeatures`. The
        server names one, and it must be this one.
    excess : {"refuse", "clip"}, default "refuse"
        What becomes of values beyond the bounds that the server names.
    limits : DataLimits, optional
        What the client says of its data by itself; a server that names tighter bounds is refused
        before the data are looked at.

    Raises
    ------
    InvalidParameterError
        If `excess` is something else, or `features` is no feature map.

    Guarantee
    ---------
    As `flwr_privacy.strategies.ACFL`. With `NoisedRecords` each answer has exact noise
    (`flwr_privacy.privacy.noise.discrete_gaussian`), from a cryptographic generator, on a grid; it
    is charged before it leaves, within the budget that the server names and the node's policy. The
    setup is encoded once for an experiment: asked again, the same bytes leave, or nothing (a random
    projection, which is charged to nobody, is drawn anew if its file is lost). With noise in
    shares, or exact gradients that only a secure sum protects, the client answers only within one.
    What is exact, a client gives only if its node's operator lists the scheme in
    ``allow_unprotected`` or it is simulated, and never if the policy has ``max_epsilon`` or
    ``units``. An evaluation is of the data that it trains on, without their bounds
    (`flwr_privacy.acfl.evaluation.LinearEvaluation`). Not covered: the number of records; that data
    lie beyond a bound that the server names, which ends the experiment for the node and is charged:
    give the client `limits` of its own, or ``excess="clip"``.
    """

    scheme: ClassVar[str] = "acfl"
    guarantees_dp: ClassVar[bool] = True
    phases: ClassVar[frozenset[str]] = frozenset({SETUP, TRAIN})
    sums: ClassVar[str] = "may"
    record_neighbours: ClassVar[str] = ADD_REMOVE

    def __init__(
        self,
        data: Data | Callable[[], Data],
        context: Context | None = None,
        *,
        features: FeatureMap | None = None,
        excess: str = "refuse",
        limits: DataLimits | None = None,
    ) -> None:
        super().__init__(None, context)
        self._data = data
        self._map = _checked_map(features)
        self._excess = check_choice("excess", excess, EXCESS)
        self._limits = DataLimits() if limits is None else limits
        self._loaded: tuple[Any, Any] | None = None

    def release(self, phase: str, arrays: Arrays, fields: Fields, train: Train) -> Release:
        """Return the release of the local coded data set, or of a gradient."""
        experiment: str = fields["experiment-id"]
        if phase == SETUP:
            setup = records.read(SetupTerms, fields)
            self._check_terms(setup, fields)
            exact = setup.charge() is None and setup.encoding == MOMENTS and not setup.parties
            return Release(
                mechanism=LocalCodedData(setup),
                work=lambda _, __: self._checked(experiment, setup),
                facts=self._facts,
                # One setup for an experiment, whatever the server counts. Exact moments are the
                # same whenever they are asked for, and need not be kept.
                name=Question(experiment_id=experiment, phase=SETUP, server_round=0),
                keeps=ROUND if exact else EXPERIMENT,
            )
        terms = records.read_terms(GradientTerms, fields)
        self._check_terms(terms, fields)
        return Release(
            mechanism=CodedGradient(terms),
            work=lambda random, _: self._batch(experiment, terms, random),
            facts=self._facts,
        )

    def release_of_evaluation(self, arrays: Arrays, fields: Fields, evaluate: Evaluate) -> Release:
        """Return the release of what the client says of a model on its own data."""
        return Release(
            mechanism=self.asked_evaluation(fields),
            work=lambda _, __: tables(*self._given()),
            facts=self._facts,
        )

    def evaluation_terms(self, fields: Fields) -> "EvaluationTerms":
        """Return the terms of an evaluation of the linear model.

        Raises
        ------
        InvalidParameterError
            If the server's features are made by another map.
        """
        from flwr_privacy.acfl.evaluation import LinearEvaluation  # late: most are not asked

        terms = records.read(LinearEvaluation, fields)
        self._check_map(terms.feature_map)
        return terms

    def accumulator(self, phase: str, arrays: Arrays, fields: Fields) -> WeightedMean:
        """Return an empty sum of what is asked for."""
        if phase == SETUP:
            return LocalCodedData(records.read(SetupTerms, fields)).accumulator(arrays)
        if phase == TRAIN:
            return CodedGradient(records.read_terms(GradientTerms, fields)).accumulator(arrays)
        return super().accumulator(phase, arrays, fields)

    # -- Data --------------------------------------------------------------------------------

    def _check_terms(self, terms: DataTerms, fields: Fields) -> None:
        """Refuse terms that this client does not allow, whatever its data are."""
        if not terms.parties and fields["summed"]:
            raise ProtocolError("the entry 'parties' is 0: no share of noise for a secure sum")
        self._check_map(terms.feature_map)
        self._limits.check(terms)

    def _check_map(self, named: str) -> None:
        identity = RAW if self._map is None else self._map.identity
        if identity != named:
            allowed = f"the feature map of this client, {identity!r}"
            raise InvalidParameterError("features", named, allowed)

    def _facts(self) -> Facts:
        """Return the size of the data; data of no such size are refused, whatever is asked.

        Raises
        ------
        NoFactsError
            If the data function or the feature map fails.
        """
        try:
            given = self._given()
        except FlwrPrivacyError as error:
            raise NoFactsError(str(error)) from error
        features, labels = tables(*given)
        return Facts(records=len(features), columns=(features.shape[1], labels.shape[1]))

    def _given(self) -> tuple[Any, Any]:
        """Return features and labels, loaded once a message."""
        if self._loaded is None:
            self._loaded = discreet(self._load, "data function")()
        return self._loaded

    def _load(self) -> tuple[Any, Any]:
        raw, labels = self._data() if callable(self._data) else self._data
        # Here: what fails as it is read may have values of the data in its text.
        features, labels = np.asarray(raw), np.asarray(labels)
        return (features if self._map is None else self._map(features)), labels

    def _checked(self, experiment_id: str, terms: DataTerms) -> PreparedData:
        key = (self.place(), experiment_id, *terms.of_the_data())
        return _prepared.get(key, partial(self._prepare, terms))

    def _prepare(self, terms: DataTerms) -> PreparedData:
        features, labels = self._given()
        X, Y = check_data(
            features,
            labels,
            feature_bound=terms.feature_bound,
            label_bound=terms.label_bound,
            feature_norm=terms.feature_norm,
            label_norm=terms.label_norm,
            excess=self._excess,
            one_hot=terms.one_hot,
        )
        terms.check_sizes(len(X), X.shape[1], Y.shape[1])
        return PreparedData(X, Y)

    def _batch(
        self, experiment_id: str, terms: GradientTerms, random: SecureRandom
    ) -> PreparedData:
        data = self._checked(experiment_id, terms)
        if terms.batch_fraction == 1:
            return data
        # In secret: of coins that a server knows, a record more would shift all that follow.
        coins = random.uint64(len(data.features))
        drawn = coins < np.uint64(int(terms.batch_fraction * 2.0**64))
        return PreparedData(data.features[drawn], data.labels[drawn])


def acfl_client_app(
    data_fn: Callable[[Context], Data],
    *,
    features: FeatureMap | None = None,
    excess: str = "refuse",
    limits: DataLimits | None = None,
) -> ClientApp:
    """Return the ClientApp of a client that trains on raw data under ACFL.

    Parameters
    ----------
    data_fn : callable
        Takes the context and returns features and labels; called only when they are needed.
    features, excess, limits
        As of `ACFLClient`.

    Raises
    ------
    InvalidParameterError
        If `excess` is something else, or `features` is no feature map.

    Examples
    --------
    >>> import numpy as np
    >>> app = acfl_client_app(lambda context: (np.eye(3), np.ones((3, 1))))
    """
    check_choice("excess", excess, EXCESS)
    _checked_map(features)
    return own_client_app(
        partial(ACFLClient, features=features, excess=excess, limits=limits),
        lambda context: partial(data_fn, context),
    )


def _checked_map(features: FeatureMap | None) -> FeatureMap | None:
    """Return a feature map if it is one."""
    identity = getattr(features, "identity", None)
    if features is not None and not (callable(features) and isinstance(identity, str)):
        raise InvalidParameterError("features", features, "a feature map, or None")
    return features
