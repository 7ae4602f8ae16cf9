"""ACFL on the client: encode once, then send the gradient of a squared loss.

The client has data instead of an app: a feature matrix and a label matrix. What it sends of them is
checked against the node's policy and charged as everywhere; see `flwr_privacy.clients.release`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np
from flwr.app import Context
from flwr.clientapp import ClientApp
from numpy.typing import ArrayLike, NDArray

from flwr_privacy import fields as records
from flwr_privacy.accounting import Charge
from flwr_privacy.acfl.encoding import Moments, check_data, clipped_gradient, upper
from flwr_privacy.acfl.features import FeatureMap
from flwr_privacy.acfl.limits import DataLimits
from flwr_privacy.acfl.sums import (
    FEATURES,
    GRADIENT,
    LABELS,
    SIZE,
    coded_sum,
    gradient_sum,
    size_of,
)
from flwr_privacy.acfl.terms import (
    MOMENTS,
    NO_NOISE,
    RAW,
    RECORD,
    SCFL,
    DataTerms,
    GradientTerms,
    SetupTerms,
)
from flwr_privacy.arrays import Arrays
from flwr_privacy.averaging import WeightedMean
from flwr_privacy.errors import (
    DataError,
    DeclinedError,
    InvalidParameterError,
    ProtocolError,
    check_choice,
)
from flwr_privacy.grid import CODE_LIMIT, Grid, saturated
from flwr_privacy.ledger import Question
from flwr_privacy.noise import discrete_gaussian
from flwr_privacy.randomness import SecureRandom
from flwr_privacy.udp import RECORD_UNIT
from flwr_privacy.wire import METRICS, TRAIN, Fields

from .adapters import own_client_app
from .base import SchemeClient, Train
from .custody import Custody, refuse_node_keys
from .kept import Answer, keep, kept_answer, mark_insecure, once
from .play import discreet
from .prepared import Prepared, PreparedData
from .release import (
    PlannedRelease,
    check_code_limit,
    check_shares,
    check_unaccounted,
    check_unanswered,
    question_of,
)

__all__ = ["ACFLClient", "Data", "DataLimits", "acfl_client_app"]

SETUP = "setup"
EXCESS = ("refuse", "clip")

Data = tuple[ArrayLike, ArrayLike]
"""A feature matrix, or raw data for a feature map, and a label matrix; as many rows."""

_prepared: Prepared[PreparedData] = Prepared()

_PROJECTION_STEPS = 2**16  # of the grid in a standard normal deviate of a projection


class ACFLClient(SchemeClient):
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
    As `flwr_privacy.strategies.ACFL`. With ``noise="record"`` each answer has exact noise
    (`flwr_privacy.noise.discrete_gaussian`), from a cryptographic generator, on a grid; it is
    charged before it leaves, within the budget that the server names and the node's policy. The
    setup is encoded once for an experiment: asked again, the same bytes leave, or nothing (a random
    projection, which is charged to nobody, is drawn anew if its file is lost). With
    noise in shares, or exact gradients that only a secure sum protects, the client answers only
    within one. A node whose policy has ``max_epsilon`` or ``units`` declines what is exact.
    Not covered: a refusal tells that data lie beyond a bound, and a server may name what bounds it
    likes, again and again: give the client `limits` of its own.
    """

    scheme: ClassVar[str] = "acfl"
    phases: ClassVar[frozenset[str]] = frozenset({SETUP, TRAIN})
    sums: ClassVar[str] = "may"

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

    def handle(
        self, phase: str, arrays: Arrays, fields: Fields, train: Train
    ) -> tuple[Arrays, Fields]:
        """Answer a setup with the local coded data set, a training question with a gradient.

        Raises
        ------
        DeclinedError
            If the policy or the budget does not allow it, the secure sum is too small, or the setup
            was answered before with other terms.
        LedgerError
            If the node's files cannot be used.
        InvalidParameterError, DataError, ProtocolError
            If the question is malformed, the data do not fit it, or there was no setup before.
        """
        if self.context is None:
            raise TypeError("ACFLClient needs the context: ACFLClient(data, context)")
        refuse_node_keys("message", fields)
        custody, question = Custody.of(self.context), question_of(phase, fields)
        if phase == SETUP:
            return self._set_up(custody, question, fields)
        return self._descend(custody, question, arrays, fields)

    def accumulator(self, phase: str, arrays: Arrays, fields: Fields) -> WeightedMean:
        """Return an empty sum of what is asked for."""
        if phase == SETUP:
            return coded_sum(records.read(SetupTerms, fields))
        if phase == TRAIN:
            return gradient_sum(records.read(GradientTerms, fields))
        return super().accumulator(phase, arrays, fields)

    # -- The two answers ---------------------------------------------------------------------

    def _set_up(self, custody: Custody, question: Question, fields: Fields) -> Answer:
        terms = records.read(SetupTerms, fields)
        certain = _check_sum(custody, terms, fields)
        terms.check_grid()
        # One setup for an experiment, whatever the server counts.
        asking = Question(experiment_id=question.experiment_id, phase=SETUP, server_round=0)
        asked, charge = records.write(terms), terms.charge()
        sigma = min(terms.sigma_features, terms.sigma_labels) * certain
        if terms.noise != RECORD:
            check_unaccounted(custody, scheme=self.scheme, sigma=sigma)

        def prepare() -> Callable[[SecureRandom], Answer]:
            data = self._checked(custody, asking, terms)
            return partial(_encoded, terms, data)

        if charge is not None and not terms.parties:
            release = self._release(custody, asking, terms, charge)
            release.check_policy(charge.noise_multiplier, sigma)
            return once(release, asked, prepare, setups=custody.setups)
        if charge is None and terms.encoding == MOMENTS and not terms.parties:
            return prepare()(custody.random(asking, "noise"))  # exact: the same whenever asked
        if (found := _kept_setup(custody, asking, terms)) is not None:
            return found
        if charge is None:
            out, own = prepare()(custody.random(asking, "noise"))
            mark_insecure(custody, own)
        else:
            release = self._release(custody, asking, terms, charge)
            release.check_policy(charge.noise_multiplier * certain, sigma)
            out, own = _shared(release, prepare)
        kept = {} if terms.parties else out
        keep(custody.setups, asking, asked, (kept, own))
        return out, own

    def _descend(
        self, custody: Custody, question: Question, arrays: Arrays, fields: Fields
    ) -> Answer:
        terms = records.read(GradientTerms, fields)
        certain = _check_sum(custody, terms, fields)
        terms.check_grid()
        model = _model(terms, arrays)
        charge = terms.charge()
        if charge is None:
            check_unaccounted(custody, scheme=self.scheme)
            data = self._batch(custody, question, terms)
            return _coded(terms, data.gradient(model), None)
        release = self._release(custody, question, terms, charge)
        release.check_policy(terms.noise_multiplier * certain, terms.sigma * certain)

        def prepare() -> Callable[[SecureRandom], Answer]:
            data = self._batch(custody, question, terms)
            clipped, _ = clipped_gradient(data.features, data.labels, model, terms.clipping_norm)
            return partial(_coded, terms, clipped)

        if terms.parties:
            return _shared(release, prepare)
        return once(release, records.write(terms), prepare)

    # -- Data --------------------------------------------------------------------------------

    def _checked(self, custody: Custody, question: Question, terms: DataTerms) -> PreparedData:
        identity = RAW if self._map is None else self._map.identity
        if identity != terms.feature_map:
            raise InvalidParameterError(
                "features", terms.feature_map, f"the feature map of this client, {identity!r}"
            )
        self._limits.check(terms)
        key = (str(custody.setups.folder), question.experiment_id, *terms.of_the_data())
        return _prepared.get(key, discreet(partial(self._prepare, terms), "data function"))

    def _prepare(self, terms: DataTerms) -> PreparedData:
        raw, labels = self._data() if callable(self._data) else self._data
        features = raw if self._map is None else self._map(np.asarray(raw))
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
        if (X.shape[1], Y.shape[1]) != (terms.features, terms.labels):
            raise InvalidParameterError(
                "features, labels",
                (terms.features, terms.labels),
                f"the columns of this client's data, {X.shape[1]} and {Y.shape[1]}",
            )
        if len(X) > terms.max_records:
            raise InvalidParameterError(
                "max_records", terms.max_records, "at least the records of every client"
            )
        return PreparedData(X, Y)

    def _batch(self, custody: Custody, question: Question, terms: GradientTerms) -> PreparedData:
        data = self._checked(custody, question, terms)
        if terms.batch_fraction == 1:
            return data
        # In secret: of coins that a server knows, a record more would shift all that follow.
        coins = custody.random(question, "sample").uint64(len(data.features))
        drawn = coins < np.uint64(int(terms.batch_fraction * 2.0**64))
        return PreparedData(data.features[drawn], data.labels[drawn])

    def _release(
        self, custody: Custody, question: Question, terms: DataTerms, charge: Charge
    ) -> PlannedRelease:
        return PlannedRelease(
            custody=custody,
            question=question,
            scheme=self.scheme,
            proven=terms.noise == RECORD,
            unit=RECORD_UNIT,
            charge=charge,
            epsilon=terms.epsilon,
            delta=terms.delta,
        )


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


def _check_sum(custody: Custody, terms: DataTerms, fields: Fields) -> float:
    """Decline what is for a secure sum outside of one, and the other way round.

    Returns
    -------
    float
        What `check_shares` says of the noise, 1 without noise in shares.
    """
    if terms.parties == 0 and fields["summed"]:
        raise ProtocolError("the entry 'parties' is 0: no share of noise for a secure sum")
    if terms.parties == 0:
        return 1.0
    check_code_limit(fields, CODE_LIMIT)
    return check_shares(custody, terms.parties, fields, noised=terms.noise != NO_NOISE)


def _kept_setup(custody: Custody, asking: Question, terms: SetupTerms) -> Answer | None:
    """Return the answer to the setup that was given before, if there is one.

    Raises
    ------
    DeclinedError
        If it went into a secure sum, or was for other terms: another one would say more.
    """
    found = kept_answer(custody.setups, asking, records.write(terms))
    if found is not None and terms.parties:
        raise DeclinedError(
            "the setup of this experiment was answered before, in a secure sum of its own"
        )
    return found


def _shared(
    release: PlannedRelease, prepare: Callable[[], Callable[[SecureRandom], Answer]]
) -> Answer:
    """Answer with codes that have a share of the noise, for one sum that is opened once."""
    custody, question = release.custody, release.question
    entries = custody.ledger.entries()
    check_unanswered(question, entries)
    release.check_affordable(entries)
    noised = prepare()
    with custody.ledger.locked() as book:
        check_unanswered(question, book.entries)
        release.check_affordable(book.entries)
        book.charge(release.entry())
    out, own = noised(custody.random(question, "noise"))
    mark_insecure(custody, own)
    return out, own


def _encoded(terms: SetupTerms, data: PreparedData, random: SecureRandom) -> Answer:
    """Return the local coded data set (ACFL, (2) and (3))."""
    own: Fields = {METRICS: {"num-examples": 1}}
    if terms.encoding == SCFL:
        coded = _projected(terms, data, random)
    else:
        features, labels = data.take_moments()
        coded = Moments(upper(features) if terms.symmetric else features, labels)
    if not terms.coded:
        return {FEATURES: coded.features, LABELS: coded.labels}, own
    sigmas = (terms.sigma_features, terms.sigma_labels)
    out = {
        name: _noised(terms, values, sigma, random)
        for name, values, sigma in zip((FEATURES, LABELS), coded, sigmas, strict=True)
    }
    return out, own


def _projected(terms: SetupTerms, data: PreparedData, random: SecureRandom) -> Moments:
    """Return random combinations of the records, as many as there are features (SCFL)."""
    rows, count = terms.features, len(data.features)
    steps = discrete_gaussian(rows * count, _PROJECTION_STEPS, random)
    mixing = steps.reshape(rows, count) / _PROJECTION_STEPS
    return Moments(mixing @ data.features, mixing @ data.labels)


def _coded(
    terms: GradientTerms, gradient: NDArray[np.float64], random: SecureRandom | None
) -> Answer:
    """Return a gradient and its size, noised where there is somebody to draw the noise."""
    own: Fields = {METRICS: {"num-examples": 1}}
    size = size_of(gradient, terms)
    if not terms.coded:
        return {GRADIENT: gradient, SIZE: size}, own
    if random is None:
        values = np.append(gradient.reshape(-1), size)
        if not np.isfinite(values).all() or np.abs(values).max() > terms.gradient_bound:
            raise DataError("a gradient is beyond what the secure sum takes")
    sigma = terms.sigma
    return {
        GRADIENT: _noised(terms, gradient, sigma, random),
        SIZE: _noised(terms, size, sigma, random),
    }, own


def _noised(
    terms: SetupTerms | GradientTerms,
    values: NDArray[np.float64],
    sigma: float,
    random: SecureRandom | None,
) -> NDArray[Any]:
    """Return the codes of some values with the client's part of the noise."""
    grid = Grid(terms.grid)
    codes = grid.encode(values.reshape(-1))
    if random is not None and sigma > 0:
        codes += discrete_gaussian(codes.size, terms.share_of(sigma) / grid.step, random)
    # A share may not saturate, which its sum would show: the secure sum refuses it instead.
    whole: NDArray[Any] = codes if terms.parties else saturated(codes)
    return whole.reshape(values.shape)


def _model(terms: GradientTerms, arrays: Arrays) -> NDArray[np.float64]:
    if len(arrays) != 1:
        raise ProtocolError(f"{len(arrays)} arrays were sent, and the model is one")
    (array,) = arrays.values()
    shape = (terms.features, terms.labels)
    if np.shape(array) != shape:
        raise InvalidParameterError("model", np.shape(array), f"shape {shape}")
    model = np.asarray(array, dtype=np.float64)
    if not np.isfinite(model).all():
        raise ProtocolError("the model that was sent has NaN or infinity")
    terms.check_model(float(np.linalg.norm(model)))
    return model
