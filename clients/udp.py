"""UDP on the client: releases of the user's training and evaluation.

What is released, in which order, and what it costs is the pipeline's
(`flwr_privacy.pipeline.answer`).
"""

import logging
from typing import ClassVar

from flwr_privacy.clients.certificates.per_record_loss import asked_loss
from flwr_privacy.clients.certificates.per_record_steps import PerRecordPlan, asked
from flwr_privacy.clients.node.base import Evaluate, Train
from flwr_privacy.clients.node.client_app import SchemeClientApp
from flwr_privacy.clients.node.private_evaluation import EvaluatingClient, is_private
from flwr_privacy.clients.node.rehearsal import rehearsed
from flwr_privacy.pipeline.mechanism import Facts, Release
from flwr_privacy.privacy.averaging import WeightedMean
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.udp import RECORD_UNIT, LossTerms, MeanLoss, Steps, UDPTerms
from flwr_privacy.wire import fields as records
from flwr_privacy.wire.arrays import Arrays, zeros_like
from flwr_privacy.wire.message import EVALUATE, TRAIN, Fields

__all__ = ["UDPClient", "UDPClientApp"]

logger = logging.getLogger("flwr.privacy")

TRAINING = "training"
"""Entry of the terms of a training that is not one of `UDPTerms`."""


class UDPClient(EvaluatingClient):
    """Client half of `flwr_privacy.strategies.UDP` (Wei et al., algorithms 1 and 2).

    At user level it goes around any training. At record level the training must call
    `flwr_privacy.clients.torch.train_per_record`, once, and return what it made; or, where it is
    asked for private steps, loop over what `flwr_privacy.clients.torch.private_training` returns.
    Where clients report losses, the evaluation must call
    `flwr_privacy.clients.torch.evaluate_per_record`.

    Guarantee
    ---------
    As `flwr_privacy.strategies.UDP`. Noise is exact
    (`flwr_privacy.privacy.noise.discrete_gaussian`), from a cryptographic generator, on a grid,
    after the clipping; all charges of an experiment together stay within the budget that the server
    names, and the whole ledger within the node's policy. With noise in shares the client answers
    only within a secure sum of at least as many clients as the shares are meant for, and a request
    only once. Against messages that do not follow the protocol: a server names budgets and noise as
    it likes, none too, so the node's policy (``max_epsilon``, ``min_noise_multiplier``) is what
    binds it. A node with such a policy declines what has no noise and what has no proven cost
    (``sensitivity_unproven``). With noise in shares it counts on no more honest clients than its
    pins, its roster and its policy bear out. A training that fails tells the server nothing that is
    not charged: see `flwr_privacy.pipeline.answer`.
    """

    scheme: ClassVar[str] = "udp"
    guarantees_dp: ClassVar[bool] = True
    sums: ClassVar[str] = "may"
    keeps_statistics: ClassVar[bool] = True

    def release(self, phase: str, arrays: Arrays, fields: Fields, train: Train) -> Release:
        """Return the release of a training."""
        if TRAINING in fields:
            from .private_steps import release_of_steps  # late: most nodes are not asked for them

            return release_of_steps(self._store().client_id, arrays, fields, train)
        terms = records.read_terms(UDPTerms, fields)
        if terms.unit != RECORD_UNIT:
            return Release(
                mechanism=terms,
                work=lambda _, __: train(arrays).arrays,
                rehearsal=self.rehearsal(arrays, fields, train),
            )
        return Release(
            mechanism=terms,
            work=lambda random, facts: _steps(terms, arrays, train, facts, random),
            facts=lambda: _counted_steps(terms, arrays, train),
        )

    def release_of_evaluation(self, arrays: Arrays, fields: Fields, evaluate: Evaluate) -> Release:
        """Return the release of what the client says of a model: counts, or a loss."""
        if is_private(fields):
            return super().release_of_evaluation(arrays, fields, evaluate)
        terms = records.read_terms(LossTerms, fields)
        if terms.unit != RECORD_UNIT:
            return Release(mechanism=terms, work=lambda _, __: evaluate())
        return Release(
            mechanism=terms,
            work=lambda _, facts: _mean_loss(terms, arrays, evaluate, facts),
            facts=lambda: _counted_losses(terms, evaluate),
        )

    def accumulator(self, phase: str, arrays: Arrays, fields: Fields) -> WeightedMean:
        """Return an empty sum of codes."""
        if phase != TRAIN:
            return super().accumulator(phase, arrays, fields)
        if TRAINING in fields:
            from .private_steps import terms_of  # late, as above

            return terms_of(fields).accumulator(arrays)
        return records.read_terms(UDPTerms, fields).accumulator(arrays)


class UDPClientApp(SchemeClientApp):
    """Flower's ClientApp with `UDPClient` around it; see `SchemeClientApp`."""

    scheme_client = UDPClient


def _steps(
    terms: UDPTerms, start: Arrays, train: Train, facts: Facts, random: SecureRandom
) -> Steps:
    """Have the user's training do the steps that were asked for, and nothing else."""
    with asked(_plan(terms, facts), random) as request:
        trained = dict(train(start).arrays)
    done = request.certificate
    done.check(start.values(), trained.values())
    return Steps(trained, done.records, done.sensitivity())


def _counted_steps(terms: UDPTerms, start: Arrays, train: Train) -> Facts:
    """Rehearse the training on generated arrays, which say nothing of data or request."""
    with asked(_plan(terms, Facts()), SecureRandom()) as request:
        found = rehearsed(TRAIN, lambda: train(zeros_like(start)), lambda: request.certificate)
    counted_on = terms.counted(found)
    if counted_on < found:
        logger.warning(
            "%d of %d records are left out: max_records = %d",
            *(found - counted_on, found, terms.max_records),
        )
    return Facts(records=counted_on)


def _mean_loss(terms: LossTerms, start: Arrays, evaluate: Evaluate, facts: Facts) -> MeanLoss:
    """Have the user's evaluation measure the loss that was asked for."""
    with asked_loss(terms.cap, records=facts.records) as request:
        evaluate()
    done = request.certificate
    done.check(start.values())
    return MeanLoss(done.mean, done.records, done.sensitivity())


def _counted_losses(terms: LossTerms, evaluate: Evaluate) -> Facts:
    """Rehearse the evaluation; see `_counted_steps`."""
    with asked_loss(terms.cap) as request:
        return Facts(records=rehearsed(EVALUATE, evaluate, lambda: request.certificate))


def _plan(terms: UDPTerms, facts: Facts) -> PerRecordPlan:
    return PerRecordPlan(
        clipping_norm=terms.clipping_norm,
        learning_rate=terms.learning_rate,
        sampling_rate=terms.sampling_rate,
        epochs=terms.epochs,
        batch_size=terms.batch_size or None,
        bound=terms.bound,
        records=None if facts.records is None else terms.counted(facts.records),
    )
