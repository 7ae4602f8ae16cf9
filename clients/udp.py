"""UDP on the client: clip, charge, add noise, send.

The order is the guarantee. What a release would cost is checked against the node's policy and the
budget before anything is computed; the charge is on the disk before the noised bytes leave; the
bytes are kept, so that the same question gets the same answer.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from flwr_privacy import fields as records
from flwr_privacy.accounting import Charge
from flwr_privacy.arrays import Arrays
from flwr_privacy.averaging import Metrics, WeightedMean
from flwr_privacy.distributed_noise import SMALLEST_SHARE, share_sigma, summed_gap
from flwr_privacy.errors import InvalidParameterError, ProtocolError
from flwr_privacy.grid import CODE_LIMIT, Grid, GridMean, saturated
from flwr_privacy.ledger import Question
from flwr_privacy.noise import discrete_gaussian, discretisation_gap
from flwr_privacy.randomness import SecureRandom
from flwr_privacy.udp import (
    RECORD_UNIT,
    RECORDS_NAME,
    USER_UNIT,
    LossTerms,
    SharedMean,
    Terms,
    sensitivity,
)
from flwr_privacy.updates import Update, released_names
from flwr_privacy.wire import EVALUATE, METRICS, TRAIN, Fields

from .base import Evaluate, SchemeClient, Train
from .custody import Custody, refuse_node_keys
from .kept import Answer, mark_insecure, once
from .per_record import PerRecordPlan, asked, asked_loss
from .release import (
    PlannedRelease,
    check_code_limit,
    check_shares,
    check_unaccounted,
    check_unanswered,
    question_of,
)

__all__ = ["UDPClient"]

_NUM_EXAMPLES = "num-examples"
_NOISE_REACH = 8  # standard deviations of noise that codes must hold; beyond, they saturate
_SHARE_REACH = 12  # of a share: what is beyond would show by itself
_LOSS_STEPS = 1024  # at least so many steps of a loss's grid are its sensitivity
_LOSSES = ("loss", "eval_loss")


class UDPClient(SchemeClient):
    """Client half of `flwr_privacy.strategies.UDP` (Wei et al., algorithms 1 and 2).

    At user level it goes around any training. At record level the training must call
    `flwr_privacy.clients.torch.train_per_record`, once, and return what it made; where clients
    report losses, the evaluation must call `flwr_privacy.clients.torch.evaluate_per_record`.

    Guarantee
    ---------
    As `flwr_privacy.strategies.UDP`. Noise is exact (`flwr_privacy.noise.discrete_gaussian`), from
    a cryptographic generator, on a grid, after the clipping; all charges of an experiment together
    stay within the budget that the server names, and the whole ledger within the node's
    policy. With noise in shares the client answers only within a secure sum of at least as many
    clients as the shares are meant for, and a question only once.
    Against a server that does not follow the protocol: it names budgets and noise as it likes, none
    too, so the node's policy (``max_epsilon``, ``min_noise_multiplier``) is what binds it. A node
    with such a policy declines what has no noise and what has no proven cost
    (``sensitivity_unproven``). With noise in shares a server that makes clients up gets by with
    less noise than is charged: pinned keys bind it (``privacy-pins``). It may send a model with
    which training fails for some data and not for others, and learn from that, as from whether a
    client declines.
    """

    scheme: ClassVar[str] = "udp"
    sums: ClassVar[str] = "may"

    def handle(
        self, phase: str, arrays: Arrays, fields: Fields, train: Train
    ) -> tuple[Arrays, Fields]:
        """Answer a training question with a clipped, noised update as codes on the grid.

        Raises
        ------
        DeclinedError
            If the policy or the budget does not allow it; with noise in shares also if the secure
            sum is too small, or the question was answered before.
        LedgerError
            If the node's ledger cannot be used.
        DataError
            If the update is not finite.
        InvalidParameterError, ProtocolError
            If the question is malformed, or the training does not fit it.
        """
        custody, question = self._custody(fields), question_of(phase, fields)
        terms, start = records.read(Terms, fields), dict(arrays)
        check_code_limit(fields, CODE_LIMIT)
        charge = terms.charge()
        if charge is None:
            check_unaccounted(custody, scheme=self.scheme)
            update, weight, _ = _released_update(terms, start, train, SecureRandom())
            codes = Grid(terms.grid).encode(update.vector, np.empty(update.vector.size, np.int32))
            metrics: dict[str, Any] = {_NUM_EXAMPLES: weight, "sigma": 0.0}
            return update.arrays(codes), {METRICS: metrics}
        release = self._release(custody, question, terms, charge)
        if not terms.proven:
            check_unaccounted(custody, scheme=self.scheme)
            release = replace(release, proven=False)
        if terms.parties:
            certain = check_shares(custody, terms.parties, fields)
            release.check_policy(terms.noise_multiplier * certain)
            return _shared(release, terms, start, train, certain)
        release.check_policy(terms.noise_multiplier)

        def prepare() -> Callable[[SecureRandom], Answer]:
            sampler = custody.random(question, "sample")
            update, weight, bound = _released_update(terms, start, train, sampler)
            sigma = terms.noise_multiplier * (bound + _apart(terms, update.vector.size))
            release.check_policy(terms.noise_multiplier, sigma)
            _check_grid(terms, sigma, update.vector.size, weight)
            grid = Grid(terms.grid)
            codes = grid.encode(update.vector, update.vector.view(np.int64))

            def noised(random: SecureRandom) -> Answer:
                np.add(codes, discrete_gaussian(codes.size, sigma / grid.step, random), out=codes)
                metrics = {_NUM_EXAMPLES: weight, "sigma": sigma}
                return update.arrays(saturated(codes)), {METRICS: metrics}

            return noised

        return once(release, records.write(terms), prepare)

    def judge(self, arrays: Arrays, fields: Fields, evaluate: Evaluate) -> Metrics:
        """Answer with the clipped, noised loss of a model.

        Raises
        ------
        DeclinedError, LedgerError, InvalidParameterError, ProtocolError
            As `handle`.
        """
        custody, question = self._custody(fields), question_of(EVALUATE, fields)
        custody.policy.check_sum(None)
        terms, start = records.read(LossTerms, fields), dict(arrays)
        charge = terms.charge()
        if charge is None:
            check_unaccounted(custody, scheme=self.scheme)
            loss, weight, _ = _judged(terms, start, evaluate)
            return {_NUM_EXAMPLES: weight, "loss": loss}
        release = self._release(custody, question, terms, charge)
        release.check_policy(terms.noise_multiplier)

        def prepare() -> Callable[[SecureRandom], Answer]:
            loss, weight, bound = _judged(terms, start, evaluate)
            grid = Grid.below(bound / _LOSS_STEPS, bits=0)
            sigma = terms.noise_multiplier * (bound + grid.step)  # a loss is truncated to the grid
            gap = discretisation_gap(1, sigma / grid.step)
            if gap > terms.gap:
                raise InvalidParameterError("gap", terms.gap, f"at least {gap:.3g}, for a loss")

            def noised(random: SecureRandom) -> Answer:
                code = int(loss / grid.step) + int(
                    discrete_gaussian(1, sigma / grid.step, random)[0]
                )
                return {}, {METRICS: {_NUM_EXAMPLES: weight, "loss": code * grid.step}}

            return noised

        answer: dict[str, Any] = once(release, records.write(terms), prepare)[1][METRICS]
        return answer

    def accumulator(self, phase: str, arrays: Arrays, fields: Fields) -> WeightedMean:
        """Return an empty sum of codes for a training."""
        if phase != TRAIN:
            return super().accumulator(phase, arrays, fields)
        terms = records.read(Terms, fields)
        names = released_names(arrays, terms.keep_back)
        if terms.parties:
            return SharedMean(arrays, terms, names)
        return GridMean(arrays, Grid(terms.grid), names)

    def _custody(self, fields: Fields) -> Custody:
        if self.context is None:
            raise TypeError("UDPClient needs the context: UDPClient(client, context)")
        refuse_node_keys("message", fields)
        return Custody.of(self.context)

    def _release(
        self, custody: Custody, question: Question, terms: Terms | LossTerms, charge: Charge
    ) -> PlannedRelease:
        return PlannedRelease(
            custody=custody,
            question=question,
            scheme=self.scheme,
            unit=terms.unit,
            charge=charge,
            epsilon=terms.epsilon,
            delta=terms.delta,
        )


def _shared(
    release: PlannedRelease, terms: Terms, start: Arrays, train: Train, certain: float
) -> Answer:
    """Answer with codes that have a share of the noise, for one sum that is opened once.

    There is no kept reply: with the same share in two sums, or in none, the one or the difference
    of the two would have hardly any noise.
    """
    custody, question = release.custody, release.question
    entries = custody.ledger.entries()
    check_unanswered(question, entries)
    release.check_affordable(entries)
    update, weight, bound = _released_update(terms, start, train, SecureRandom())
    grid = Grid(terms.grid)
    total = terms.noise_multiplier * terms.shared_sensitivity()
    share = share_sigma(total, terms.parties)
    release.check_policy(terms.noise_multiplier * certain, total / weight * certain)
    out: dict[str, Any] = {}
    if terms.unit == RECORD_UNIT:
        _check_room(terms, weight, weight * bound + _apart(terms, update.vector.size))
        np.multiply(update.vector, weight, out=update.vector)
        out[RECORDS_NAME] = np.array([weight], np.int64)
    _check_share(terms, share, update.vector.size, weight)
    codes = grid.encode(update.vector)
    with custody.ledger.locked() as book:
        check_unanswered(question, book.entries)
        release.check_affordable(book.entries)
        book.charge(release.entry())
    codes += discrete_gaussian(codes.size, share / grid.step, custody.random(question, "noise"))
    own: Fields = {METRICS: {_NUM_EXAMPLES: 1}}
    mark_insecure(custody, own)
    return {**update.arrays(codes), **out}, own


def _released_update(
    terms: Terms, start: Arrays, train: Train, sampler: SecureRandom
) -> tuple[Update, int, float]:
    """Train; return the clipped update, the weight of the reply, and the update's sensitivity."""
    names = released_names(start, terms.keep_back)
    if terms.unit == USER_UNIT:
        update = Update.between(
            start, train(start).arrays, names, clipping_norm=terms.clipping_norm
        )
        # The number of records is not public at this level: everybody weighs the same.
        return update, 1, sensitivity(USER_UNIT, clipping_norm=terms.clipping_norm)
    plan = PerRecordPlan(
        clipping_norm=terms.clipping_norm,
        learning_rate=terms.learning_rate,
        sampling_rate=terms.sampling_rate,
        epochs=terms.epochs,
        batch_size=terms.batch_size or None,
        bound=terms.bound,
    )
    with asked(plan, sampler) as request:
        trained = dict(train(start).arrays)
    request.step.check(start.values(), trained.values())
    update = Update.between(start, trained, names)
    return update, request.step.records, request.step.sensitivity()


def _apart(terms: Terms, dimension: int) -> float:
    """Return what truncation to the grid may add to the sensitivity."""
    # It shortens a vector: two updates that were clipped as a whole stay within twice the norm.
    return 0.0 if terms.unit == USER_UNIT else Grid(terms.grid).step * math.sqrt(dimension)


def _judged(terms: LossTerms, start: Arrays, evaluate: Evaluate) -> tuple[float, int, float]:
    """Evaluate; return the clipped loss, its weight, and its sensitivity."""
    if terms.unit == RECORD_UNIT:
        with asked_loss(terms.cap) as request:
            evaluate()
        request.loss.check(start.values())
        return request.loss.mean, request.loss.records, request.loss.sensitivity()
    metrics = evaluate()
    loss = next((metrics[name] for name in _LOSSES if name in metrics), None)
    if isinstance(loss, bool) or not isinstance(loss, int | float):
        raise ProtocolError(f"the evaluation returned no loss: a number as one of {_LOSSES}")
    # What is no number counts as the cap, as it does at record level: a refusal would say more.
    clipped = terms.cap if loss != loss else min(max(0, loss), terms.cap)
    # The number of records is a secret here: everybody weighs the same.
    return float(clipped), 1, terms.cap


def _check_room(terms: Terms, weight: int, bound: float) -> None:
    """Refuse more records than the noise of a sum was planned for."""
    if weight > terms.max_records:
        raise InvalidParameterError(
            "max_records", terms.max_records, f"at least the {weight} records of a client"
        )
    if bound > terms.shared_sensitivity():
        raise InvalidParameterError(
            "grid",
            terms.grid,
            "a finer grid (more grid_bits), or fewer records of a client: rounding moves the sum "
            "by more than the noise was planned for",
        )


def _check_share(terms: Terms, share: float, dimension: int, weight: int) -> None:
    """Refuse a grid on which shares of noise do not do what the charge says, or do not fit."""
    step = Grid(terms.grid).step
    if share / step < SMALLEST_SHARE:
        raise InvalidParameterError(
            "grid",
            terms.grid,
            f"a finer grid (more grid_bits): a share is {share / step:.3g} steps",
        )
    _check_gap(terms, summed_gap(dimension, share / step, terms.parties))
    _check_reach(terms, terms.reach(weight) + _SHARE_REACH * share)


def _check_grid(terms: Terms, sigma: float, dimension: int, weight: int) -> None:
    """Refuse a grid on which the noise does not do what the charge says, or does not fit."""
    _check_gap(terms, discretisation_gap(dimension, sigma / Grid(terms.grid).step))
    _check_reach(terms, terms.reach(weight) + _NOISE_REACH * sigma)


def _check_gap(terms: Terms, gap: float) -> None:
    if gap > terms.gap:
        raise InvalidParameterError(
            "grid",
            terms.grid,
            f"a finer grid (more grid_bits): epsilon {gap:.3g} of a release would be lost to it",
        )


def _check_reach(terms: Terms, reach: float) -> None:
    step = Grid(terms.grid).step
    if reach / step > CODE_LIMIT:
        raise InvalidParameterError(
            "grid",
            terms.grid,
            f"a coarser grid (less grid_bits): values up to {reach / step:.3g} steps leave 32 bits",
        )
