"""A client's private evaluation: its fields on the wire, its plan, its bounds and noise."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.accounting import ADD_REMOVE, RELATIONS, REPLACE_ONE, Charge
from flwr_privacy.accounting.gaussian import check_delta
from flwr_privacy.errors import (
    InvalidParameterError,
    ProtocolError,
    check_choice,
    check_flag,
    check_integer,
    check_number,
)
from flwr_privacy.pipeline.mechanism import Answer, Facts, Mechanism, ReleasePlan
from flwr_privacy.privacy.distributed_noise import SMALLEST_SHARE, share_sigma, summed_gap
from flwr_privacy.privacy.grid import CODE_LIMIT, CodeGrid, check_codes, check_gap, saturated
from flwr_privacy.privacy.noise import discrete_gaussian, discretisation_gap
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.message import METRICS

from .caps import ACCURACIES, LABEL_PREFIX, LARGEST_CAP, MOST_LABELS
from .sums import RECORDS_NAME, STATISTICS_NAME, EvaluationSum

__all__ = ["COUNTS_GRID", "LABEL_WEIGHT", "EvaluationTerms", "Measured"]

COUNTS_GRID = -1
"""Exponent of the coarsest grid at record level: it has the halves of counts, without rounding."""

LABEL_WEIGHT = 0.5
"""The entry of a record's own label in its vector; of a client, times its share of records."""

_RECORD_WEIGHT = 0.5  # of the number of records, where it is a secret

_RECORD, _USER = "record", "user"

_NUM_EXAMPLES = "num-examples"
_LOSSES = ("loss", "eval_loss")

_REACH = 12  # standard deviations of one answer's noise that its code must hold


class Measured(NamedTuple):
    """A client's statistics, and the number of its records where that is public."""

    statistics: NDArray[np.float64]
    records: int | None


@dataclass(frozen=True, kw_only=True)
class EvaluationTerms(Mechanism):
    """The terms of a client's evaluation, and the mechanism that answers it.

    Parameters
    ----------
    unit : {"record", "user"}
        What is protected.
    neighbours : {"add_remove", "replace_one", "zero_out"}
        Which data sets are neighbours, as in the training; at record level ``replace_one``, or
        ``add_remove`` where the number of records is protected too.
    accuracy : str
        Name of the metric that the app's evaluation returns; at record level one of
        `flwr_privacy.evaluation.caps.ACCURACIES`.
    loss_cap : float, default 0.0
        Cap of the mean loss; 0 if the loss is not released. At user level only.
    noise_multiplier : float
        Standard deviation of the noise over the sensitivity, above 0.
    epsilon, delta : float
        Budget of a client in this experiment; it declines what would exceed it.
    gap : float
        Epsilon set aside per release for the grid.
    grid : int
        Exponent of the grid's step.
    parties : int, default 0
        Honest clients of a sum who share its noise; 0 if each adds the whole noise by itself.
    by_server : bool, default False
        Whether a trusted server adds the noise to the sum, and clients add none.
    labels : int, default 0
        Number of labels of a histogram; 0 if there is none.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Guarantee
    ---------
    Adversary: whoever sees the answer (with `parties`, the sum; with `by_server`, what the server
    publishes of it). Neighbours: at user level any two data sets of one client, or a client that is
    there or not, or one whose data are zeroed out, all at the same distance; at record level data
    of equal size that differ in one record or, with `neighbours` ``add_remove``, data of which one
    has one record more.

    User level. An answer is the vector (p, a - 1/2), or (p, a - 1/2, l - 1/2), where a is the
    accuracy clipped to [0, 1], l the mean loss clipped to [0, `loss_cap`] over the cap, and p is
    ``sqrt(3 k) / 2`` for k = 1 or 2 statistics. A client without data, or whose evaluation fails or
    returns no such number, answers zero in all of them. Two answers are at most ``sqrt(k)`` apart:
    two that evaluated differ by at most 1 in each of k entries; one that did not is at the origin,
    at ``sqrt(3 k / 4 + k / 4)``. So is a client that is not there. Truncation to the grid goes
    towards zero, so it leaves the set. With `labels` there are as many entries more, half of the
    share of each label in the client's records. They are at least 0 and add up to at most 1/2, so
    two of them are at most ``sqrt(1/2)`` apart and none is further than 1/2 from the origin; p is
    ``sqrt(3 k / 4 + 1/4)``, and all distances are at most ``sqrt(k + 1/2)``.

    Record level. An answer is the sum of a vector of each record: 1/2 if it is right and else -1/2,
    with `secret_records` 1/2 before it, and with `labels` 1/2 in the entry of its own label and 0
    in the others. Where one record is replaced this moves by at most 1, with labels by
    ``sqrt(1 + 1/2)``, and the number of records is public, as in the training. With
    `secret_records` one record more moves it by the norm of its vector: ``sqrt(1/2)``, with labels
    ``sqrt(3/4)``. The grid has the halves, so that nothing is rounded. The server names the metric,
    so only names of an accuracy are taken: one record moves a mean of losses by any amount. The
    counts of labels have names that it does not choose. This assumes of the app's evaluation, which
    is trusted code on the node, of each metric that has such a name: that
    ``accuracy * num-examples`` is the number of its records that are right (it is rounded to a
    whole number), that each record counts for one label, that one record decides over itself alone,
    and that the model was not changed. A
    mean of losses, of which only the mean is known, cannot be clipped record by record: there is no
    loss at this level. An evaluation that fails is charged and ends the experiment for the node
    until its operator acts, as a training does.

    Covered: with the noise ``noise_multiplier * sensitivity()`` on each entry the answer costs
    `charge`, by the accountant of the training. Not covered: how long an evaluation takes; whether
    a client answers; where it is the server that adds the noise, the answers that it sees.
    """

    unit: str
    neighbours: str
    accuracy: str
    loss_cap: float = 0.0
    noise_multiplier: float
    epsilon: float
    delta: float
    gap: float
    grid: int
    parties: int = 0
    by_server: bool = False
    labels: int = 0

    def __post_init__(self) -> None:
        check_choice("unit", self.unit, (_RECORD, _USER))
        relations = (ADD_REMOVE, REPLACE_ONE) if self.unit == _RECORD else RELATIONS
        check_choice("neighbours", self.neighbours, relations)
        check_number("loss_cap", self.loss_cap, minimum=0, maximum=LARGEST_CAP)
        if self.unit == _RECORD:
            check_choice("accuracy", self.accuracy, ACCURACIES)
        if self.unit == _RECORD and self.loss_cap and not self.losses_of_records:
            raise InvalidParameterError(
                "loss_cap", self.loss_cap, "none at record level: only the mean loss is known"
            )
        check_number("noise_multiplier", self.noise_multiplier, minimum=math.ulp(0.0))
        check_number("epsilon", self.epsilon, minimum=math.ulp(0.0))
        check_delta(self.delta)
        check_number("gap", self.gap, minimum=0)
        CodeGrid(self.grid)
        if self.unit == _RECORD and self.grid > COUNTS_GRID:
            # The code of a count would move by a whole step where the count moves by one.
            raise InvalidParameterError("grid", self.grid, f"at most {COUNTS_GRID}: counts")
        check_integer("labels", self.labels, minimum=0, maximum=MOST_LABELS)
        check_integer("parties", self.parties, minimum=0)
        check_flag("by_server", self.by_server)
        if self.parties and self.by_server:
            raise InvalidParameterError("parties", self.parties, "0: the server adds the noise")

    @property
    def secret_records(self) -> bool:
        """Whether the number of records is protected too."""
        return self.unit == _RECORD and self.neighbours == ADD_REMOVE

    @property
    def losses_of_records(self) -> bool:
        """Whether the loss of each record is clipped by itself."""
        return False

    @property
    def released(self) -> int:
        """Number of statistics of the model: 1, or 2 with the loss."""
        return 2 if self.loss_cap else 1

    @property
    def size(self) -> int:
        """Number of noised entries of an answer."""
        return self.counted + self.released + self.labels

    @property
    def counted(self) -> bool:
        """Whether the first entry says how many evaluated, clients or records."""
        return self.unit == _USER or self.secret_records

    @property
    def presence(self) -> float:
        """The first entry of a client, or of a record, that evaluated, where there is one."""
        if self.unit == _RECORD:
            return _RECORD_WEIGHT
        return math.sqrt(3 * self.released / 4 + self._own_label)

    def sensitivity(self) -> float:
        """Return the L2 sensitivity of an answer, and of a sum of answers."""
        if self.secret_records:
            return math.sqrt(_RECORD_WEIGHT**2 + self.released / 4 + self._own_label)
        return math.sqrt(self.released + 2 * self._own_label)

    @property
    def _own_label(self) -> float:
        """Square of the largest entry of a label; 0 where there are none."""
        return LABEL_WEIGHT**2 if self.labels else 0.0

    def charge(self) -> Charge:
        """Return the charge of one evaluation."""
        return Charge(
            noise_multiplier=self.noise_multiplier, neighbours=self.neighbours, gap=self.gap
        )

    def sigma(self) -> float:
        """Return the standard deviation of the noise that is charged for, on each entry."""
        return self.noise_multiplier * self.sensitivity()

    def own_sigma(self) -> float:
        """Return the standard deviation of one party's noise: of a share, or all of it."""
        return share_sigma(self.sigma(), self.parties) if self.parties else self.sigma()

    def code_limit(self) -> int:
        """Return the largest code of a client whose noise is not beyond 12 standard deviations."""
        largest = 1.0 if self.unit == _RECORD else self.presence
        noise = 0.0 if self.by_server else _REACH * self.own_sigma()
        return math.ceil((largest + noise) / CodeGrid(self.grid).step)

    # -- The mechanism -------------------------------------------------------------------------

    def check_noise(self) -> None:
        """Refuse a grid that does not fit the noise.

        Raises
        ------
        InvalidParameterError
            If it does not.
        """
        steps = self.own_sigma() / CodeGrid(self.grid).step
        if self.parties:
            if steps < SMALLEST_SHARE:
                allowed = f"a finer grid: a share is {steps:.3g} steps"
                raise InvalidParameterError("grid", self.grid, allowed)
            check_gap(self.grid, summed_gap(self.size, steps, self.parties), charged=self.gap)
        else:
            check_gap(self.grid, discretisation_gap(self.size, steps), charged=self.gap)
        check_codes(self.grid, self.code_limit())

    def plan(self, start: Arrays, facts: Facts) -> ReleasePlan:
        """Decide or refuse everything about the release; see `Mechanism.plan`."""
        self.check_noise()
        return ReleasePlan(
            unit=self.unit,
            charge=None if self.by_server else self.charge(),
            epsilon=self.epsilon,
            delta=self.delta,
            noise_multiplier=0.0 if self.by_server else self.noise_multiplier,
            sigma=0.0 if self.by_server else self.sigma(),
            parties=self.parties,
            largest_code=CODE_LIMIT if self.unit == _RECORD else self.code_limit(),
        )

    def measure(self, start: Arrays, outcome: Any) -> Measured:
        """Return the statistics of the app's metrics, clipped to their bounds.

        Raises
        ------
        ProtocolError
            If a metric is missing or no number, or a count is none.
        """
        right = _share(_number(outcome, self.accuracy))
        labels = [_number(outcome, f"{LABEL_PREFIX}{label}") for label in range(self.labels)]
        if self.unit == _RECORD:
            records = _count(_number(outcome, _NUM_EXAMPLES))
            counts = [_count(label) for label in labels]
            if self.labels and sum(counts) != records:
                raise ProtocolError("the counts of the labels do not add up to 'num-examples'")
            return self.counts(records, [round(right * records) - records / 2], counts)
        if _NUM_EXAMPLES in outcome and not _number(outcome, _NUM_EXAMPLES) > 0:
            return Measured(np.zeros(self.size), None)
        statistics = [self.presence, right - 0.5]
        if self.loss_cap:
            name = next((name for name in _LOSSES if name in outcome), _LOSSES[0])
            loss = _number(outcome, name)
            # What is no number counts as the cap, as the largest loss does.
            clipped = 1.0 if math.isnan(loss) else _share(loss / self.loss_cap)
            statistics.append(clipped - 0.5)
        return Measured(np.array([*statistics, *_shares(labels)]), None)

    def counts(self, records: int, sums: list[float], labels: Sequence[int]) -> Measured:
        """Return the statistics at record level.

        Parameters
        ----------
        records : int
            Number of records.
        sums : list of float
            For each statistic of the model the sum over the records, each within 1/2 of 0.
        labels : sequence of int
            How many records have each label, where that is asked.
        """
        counted = [_RECORD_WEIGHT * records] if self.secret_records else []
        entries = [*counted, *sums, *(LABEL_WEIGHT * count for count in labels)]
        return Measured(np.array(entries), None if self.secret_records else records)

    def failed(self, start: Arrays) -> Measured | None:
        """Return the zero vector, at user level."""
        return Measured(np.zeros(self.size), None) if self.unit == _USER else None

    def noise(self, measured: Measured, plan: ReleasePlan, random: SecureRandom) -> Answer:
        """Return the codes of the statistics with all of the noise, a share of it, or none."""
        grid = CodeGrid(self.grid)
        codes = np.trunc(measured.statistics / grid.step).astype(np.int64)
        if not self.by_server:
            codes += discrete_gaussian(codes.size, self.own_sigma() / grid.step, random)
        # A share that was cut off would hide less: beyond the codes it is refused further on.
        answer: dict[str, NDArray[Any]] = {
            STATISTICS_NAME: codes if self.parties else saturated(codes)
        }
        if measured.records is not None:
            answer[RECORDS_NAME] = np.array([measured.records], np.int64)
        # At user level the number of records is a secret: every client weighs the same.
        return answer, {METRICS: {_NUM_EXAMPLES: 1}}

    def accumulator(self, start: Arrays) -> EvaluationSum:
        """Return an empty sum of answers."""
        return EvaluationSum(self.size, CodeGrid(self.grid), counts=not self.counted)


def _number(metrics: Any, name: str) -> float:
    value = metrics.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ProtocolError(f"the evaluation returned no number as '{name}'")
    return float(value)


def _count(value: float) -> int:
    if not (0 <= value <= CODE_LIMIT and value == int(value)):
        raise ProtocolError(f"the evaluation has a count of {value} records")
    return int(value)


def _shares(counts: list[float]) -> list[float]:
    """Return the entries of a client's labels: what is no count is 0."""
    valid = [count if 0 < count < math.inf else 0.0 for count in counts]
    total = sum(valid)
    return [LABEL_WEIGHT * count / total if total else 0.0 for count in valid]


def _share(value: float) -> float:
    """Return a number clipped to [0, 1]; what is no number is 0."""
    return min(max(0.0, value), 1.0) if value == value else 0.0
