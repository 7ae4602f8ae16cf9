"""Central differential privacy on the client: clip, charge, add a share of the noise, send.

A share alone hides nothing, so with noise in shares the client answers only within a secure sum of
enough clients, and a question only once: with the same share in two sums, or in none, the one or
the difference of the two would have hardly any noise. There are no kept replies.
"""

import logging
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.adaptive_clipping import COUNT_NAME, count_code
from flwr_privacy.arrays import Arrays
from flwr_privacy.averaging import WeightedMean
from flwr_privacy.central_dp import DISTRIBUTED, Terms
from flwr_privacy.central_mean import CentralMean, add_noise
from flwr_privacy.errors import DeclinedError
from flwr_privacy.grid import Grid
from flwr_privacy.udp import USER_UNIT
from flwr_privacy.updates import Update
from flwr_privacy.wire import METRICS, TRAIN, Fields

from .base import SchemeClient, Train
from .custody import Custody, refuse_node_keys
from .release import (
    PlannedRelease,
    check_code_limit,
    check_policy,
    check_shares,
    check_unanswered,
    question_of,
)

__all__ = ["CentralDPClient"]

logger = logging.getLogger("flwr.privacy")

_Code = TypeVar("_Code", np.int32, np.int64)

_METRICS = {"num-examples": 1}  # everybody weighs the same: the number of records is a secret


class CentralDPClient(SchemeClient):
    """Client half of `flwr_privacy.strategies.CentralDP`, around any training.

    Guarantee
    ---------
    As `flwr_privacy.strategies.CentralDP`. With noise in shares the client answers only within a
    secure sum of at least as many clients as the noise was planned for, charges its own ledger
    before its share leaves, and declines what would pass the budget of the experiment or the node's
    policy. With noise by the server its answers have none: a node whose policy limits epsilon or
    noise declines them, and its ledger does not know them, as they are the trusted server's books.
    Not covered: a server that says of the clients of a sum what is not so (how many collude with
    it, how often it draws them, how large a cohort in a sparse graph is); the node's policy is what
    binds it, as far as a node can see: ``min_noise_multiplier``, ``max_epsilon``, ``min_summed``.
    """

    scheme: ClassVar[str] = "central-dp"
    sums: ClassVar[str] = "may"

    def handle(
        self, phase: str, arrays: Arrays, fields: Fields, train: Train
    ) -> tuple[Arrays, Fields]:
        """Answer a training question with a clipped update as codes, with a share of the noise.

        Raises
        ------
        DeclinedError
            If the policy or the budget does not allow it, the secure sum is too small for noise in
            shares, or the question was answered before.
        LedgerError
            If the node's ledger cannot be used.
        DataError
            If the update is not finite.
        InvalidParameterError, ProtocolError
            If the question is malformed, or the training does not fit it.
        """
        if self.context is None:
            raise TypeError("CentralDPClient needs the context: CentralDPClient(client, context)")
        refuse_node_keys("message", fields)
        custody = Custody.of(self.context)
        terms, start = Terms.read(fields), dict(arrays)
        if terms.noise != DISTRIBUTED:
            _check_trusted(custody, self.scheme)
            return _clipped(terms, start, train, np.int32), {METRICS: dict(_METRICS)}
        certain = check_shares(custody, terms.parties, fields)
        question = question_of(phase, fields)
        release = PlannedRelease(
            custody=custody,
            question=question,
            scheme=self.scheme,
            unit=USER_UNIT,
            charge=terms.charge(),
            epsilon=terms.epsilon,
            delta=terms.delta,
        )
        entries = custody.ledger.entries()
        check_unanswered(question, entries)
        release.check_policy(terms.noise_multiplier * certain, terms.sigma() * certain)
        release.check_affordable(entries)
        terms.check_grid(sum(np.size(start[name]) for name in terms.names(start)))
        check_code_limit(fields, terms.code_limit())
        codes = _clipped(terms, start, train, np.int64)
        with custody.ledger.locked() as book:
            check_unanswered(question, book.entries)
            release.check_affordable(book.entries)
            book.charge(release.entry())
        add_noise(codes, terms, custody.random(question, "noise"))
        metrics: dict[str, Any] = dict(_METRICS)
        if custody.insecure_seed is not None:
            metrics["insecure-noise"] = 1.0
        return codes, {METRICS: metrics}

    def accumulator(self, phase: str, arrays: Arrays, fields: Fields) -> WeightedMean:
        """Return an empty sum of codes for a training."""
        if phase != TRAIN:
            return super().accumulator(phase, arrays, fields)
        return CentralMean(arrays, Terms.read(fields))


def _check_trusted(custody: Custody, scheme: str) -> None:
    """Decline to answer without noise if the node's operator limits what it releases."""
    check_policy(custody, scheme=scheme, unit=USER_UNIT, noise_multiplier=0.0, sigma=0.0)
    if custody.policy.max_epsilon is not None:
        text = (
            "noise = 'server' asks for an answer without noise: the node's policy has "
            f"max_epsilon = {custody.policy.max_epsilon:g}"
        )
        logger.warning("client %s declines: %s", custody.client_id, text)
        raise DeclinedError(text)


def _clipped(
    terms: Terms, start: Arrays, train: Train, dtype: type[_Code]
) -> dict[str, NDArray[_Code]]:
    """Train; return the clipped update as codes, and the code of whether it was within the norm."""
    update = Update.between(
        start, train(start).arrays, terms.names(start), clipping_norm=terms.clipping_norm
    )
    out = np.empty(update.vector.size, dtype)
    codes: dict[str, Any] = update.arrays(Grid(terms.grid).encode(update.vector, out))
    if terms.count_share:
        codes[COUNT_NAME] = np.array([count_code(within=update.factor == 1)], dtype)
    return codes
