"""UDP on the client: clip, charge, add noise, send.

The order is the guarantee. What a release would cost is checked against the node's policy and the
budget before anything is computed; the charge is on the disk before the noised bytes leave; the
bytes are kept, so that the same question gets the same answer.
"""

import math
from collections.abc import Sequence
from typing import ClassVar

from flwr_privacy.arrays import Arrays
from flwr_privacy.averaging import WeightedMean
from flwr_privacy.documents import dumps, loads
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.grid import CODE_LIMIT, Grid, GridMean, saturated
from flwr_privacy.ledger import Entry, Question
from flwr_privacy.noise import discrete_gaussian, discretisation_gap
from flwr_privacy.randomness import SecureRandom
from flwr_privacy.udp import USER_UNIT, Terms, sensitivity
from flwr_privacy.updates import Update, clip, released_names
from flwr_privacy.wire import METRICS, TRAIN, Fields

from .base import SchemeClient, Train
from .custody import Custody, refuse_node_keys
from .per_record import PerRecordPlan, asked
from .release import PlannedRelease, check_code_limit, question_of

__all__ = ["UDPClient"]

_NUM_EXAMPLES = "num-examples"
_NOISE_REACH = 8  # standard deviations of noise that codes must hold; beyond, they saturate


class UDPClient(SchemeClient):
    """Client half of `flwr_privacy.strategies.UDP` (Wei et al., algorithm 1).

    At user level it goes around any training. At record level the training must call
    `flwr_privacy.clients.torch.train_per_record`, once, and return what it made.

    Guarantee
    ---------
    As `flwr_privacy.strategies.UDP`. Noise is exact (`flwr_privacy.noise.discrete_gaussian`), from
    a cryptographic generator, on a grid, after the clipping; all charges of an experiment together
    stay within the budget that the server names, and the whole ledger within the node's
    policy.
    Against a server that does not follow the protocol: it names budgets and noise as it likes, so
    the node's policy (``max_epsilon``, ``min_noise_multiplier``) is what binds it; and it may send
    a model with which training fails for some data and not for others, and learn from that, as from
    whether a client declines.
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
            If the policy or the budget does not allow it.
        LedgerError
            If the node's ledger cannot be used.
        DataError
            If the update is not finite.
        InvalidParameterError, ProtocolError
            If the question is malformed, or the training does not fit it.
        """
        if self.context is None:
            raise TypeError("UDPClient needs the context: UDPClient(client, context)")
        refuse_node_keys("message", fields)
        custody = Custody.of(self.context)
        question = question_of(phase, fields)
        entries = custody.ledger.entries()
        if (kept := _kept(custody, question, entries)) is not None:
            return kept
        terms = Terms.read(fields)
        check_code_limit(fields, CODE_LIMIT)
        release = PlannedRelease(
            custody=custody,
            question=question,
            scheme=self.scheme,
            unit=terms.unit,
            charge=terms.charge(),
            epsilon=terms.epsilon,
            delta=terms.delta,
        )
        release.check_policy(terms.noise_multiplier)
        release.check_affordable(entries)
        sampler = custody.random(question, "sample")
        update, weight, bound = _released_update(terms, arrays, train, sampler)
        sigma = terms.noise_multiplier * bound
        release.check_policy(terms.noise_multiplier, sigma)
        _check_grid(terms, sigma, update.vector.size)
        grid = Grid(terms.grid)
        codes = grid.encode(update.vector)
        update.vector.resize(0, refcheck=False)  # frees it: it is as large as two models
        with custody.ledger.locked() as book:
            # Another message with the same question may have been answered meanwhile.
            if (kept := _kept(custody, question, book.entries)) is not None:
                return kept
            release.check_affordable(book.entries)
            book.charge(release.entry())
            random = custody.random(question, "noise")
            codes += discrete_gaussian(codes.size, sigma / grid.step, random)
            metrics = {_NUM_EXAMPLES: weight, "sigma": sigma}
            if custody.insecure_seed is not None:
                metrics["insecure-noise"] = 1.0
            out, own = update.arrays(saturated(codes)), {METRICS: metrics}
            del codes
            custody.replies.keep(question, dumps({"arrays": out, "fields": own}))
        return out, own

    def accumulator(self, phase: str, arrays: Arrays, fields: Fields) -> WeightedMean:
        """Return an empty sum of codes for a training."""
        if phase != TRAIN:
            return super().accumulator(phase, arrays, fields)
        terms = Terms.read(fields)
        return GridMean(arrays, Grid(terms.grid), released_names(arrays, terms.keep_back))


def _kept(
    custody: Custody, question: Question, entries: Sequence[Entry]
) -> tuple[Arrays, Fields] | None:
    """Return the kept reply to a question; one that was never charged must not leave."""
    if all(entry.question != question for entry in entries):
        return None
    kept = custody.replies.find(question)
    if kept is None:
        return None
    state = loads(kept)
    return state["arrays"], state["fields"]


def _released_update(
    terms: Terms, start: Arrays, train: Train, sampler: SecureRandom
) -> tuple[Update, int, float]:
    """Train; return the clipped update, the weight of the reply, and the update's sensitivity.

    The sensitivity counts what truncation to the grid may add.
    """
    start = dict(start)
    names = released_names(start, terms.keep_back)
    if terms.unit == USER_UNIT:
        update = Update.between(start, train(start).arrays, names)
        clip(update.vector, terms.clipping_norm)
        # Truncation shortens a vector, so two of them stay within twice the norm. The number of
        # records is not public at this level: everybody weighs the same.
        return update, 1, sensitivity(USER_UNIT, clipping_norm=terms.clipping_norm)
    plan = PerRecordPlan(
        clipping_norm=terms.clipping_norm,
        learning_rate=terms.learning_rate,
        sampling_rate=terms.sampling_rate,
    )
    with asked(plan, sampler) as request:
        trained = dict(train(start).arrays)
    request.step.check(start.values(), trained.values())
    update = Update.between(start, trained, names)
    apart = Grid(terms.grid).step * math.sqrt(update.vector.size)
    return update, request.step.records, request.step.sensitivity() + apart


def _check_grid(terms: Terms, sigma: float, dimension: int) -> None:
    """Refuse a grid on which the noise does not do what the charge says, or does not fit."""
    step = Grid(terms.grid).step
    gap = discretisation_gap(dimension, sigma / step)
    if gap > terms.gap:
        raise InvalidParameterError(
            "grid",
            terms.grid,
            f"a finer grid (more grid_bits): epsilon {gap:.3g} of a release would be lost to it",
        )
    bound = terms.clipping_norm * terms.learning_rate / terms.sampling_rate  # both 1 for a user
    if (bound + _NOISE_REACH * sigma) / step > CODE_LIMIT:
        raise InvalidParameterError(
            "grid",
            terms.grid,
            f"a coarser grid (less grid_bits): noise of {sigma / step:.3g} steps leaves 32 bits",
        )
