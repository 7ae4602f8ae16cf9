"""Asks clients for private evaluations of the model, and makes metrics of what they answer."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from flwr_privacy.accounting import Charge
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.evaluation.estimate import estimated, half_width
from flwr_privacy.evaluation.options import PrivateEvaluation
from flwr_privacy.evaluation.sums import EvaluationSum
from flwr_privacy.evaluation.terms import EvaluationTerms
from flwr_privacy.privacy.averaging import WeightedMean
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.secure_sum import NotOpenedError
from flwr_privacy.strategies.loop.base import SchemeStrategy
from flwr_privacy.strategies.requests.instruction import Instruction, to_each
from flwr_privacy.strategies.requests.messenger import Assigned
from flwr_privacy.strategies.requests.request_log import RequestLog
from flwr_privacy.strategies.state.ending import in_words
from flwr_privacy.wire import fields as records
from flwr_privacy.wire.message import EVALUATE

__all__ = ["EvaluationRequest", "PrivateEvaluations", "check_evaluation"]

logger = logging.getLogger("flwr.privacy")

_POOR = 0.25  # half of the width of an interval that says next to nothing


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """What the clients are asked in one evaluation.

    Parameters
    ----------
    terms : EvaluationTerms
        The terms of all clients.
    own : Mapping of str to EvaluationTerms
        Those of clients that have their own: another budget, and noise.
    without : collection of str
        Clients that are not asked. Under a secure sum it is those in the training's sum who are.
    among : collection of str, optional
        The clients of which `fraction_evaluate` is a part; by default all. Nobody else is asked.
    charged : callable, optional
        As of `Instruction`, where it is a secret who is asked and all clients are charged; by
        default those that were asked.
    random : SecureRandom, optional
        The source of a trusted server's noise, where it adds the noise.
    """

    terms: EvaluationTerms
    own: Mapping[str, EvaluationTerms] = field(default_factory=dict)
    without: Collection[str] = ()
    among: Collection[str] | None = None
    charged: Callable[[RequestLog], set[str]] | None = None
    random: SecureRandom | None = None

    def sigmas(self, clients: Collection[str]) -> list[float]:
        """Return the standard deviations of the noises in a sum of some clients' answers."""
        if self.random is not None:
            return [self.terms.sigma()]
        return [self.own.get(client, self.terms).own_sigma() for client in clients]

    def instruction(self) -> Instruction:
        """Return the instruction of the exchange."""
        return Instruction(
            fields=records.write(self.terms),
            own=to_each({client: records.write(terms) for client, terms in self.own.items()}),
            accumulator=partial(self.terms.accumulator, {}),
            cost=self._cost,
            charged=self.charged or (lambda asked: set(asked.released())),
            hidden=self.charged is not None,
            released=self._released,
        )

    def _cost(self, client: str) -> Charge:
        return self.own.get(client, self.terms).charge()

    def _released(self, mean: WeightedMean | None) -> WeightedMean | None:
        if self.random is None:
            return mean
        total = self.terms.accumulator({}) if mean is None else mean
        if isinstance(total, EvaluationSum):
            total.add_noise(self.terms.sigma(), self.random)
            total.weight = total.weight or 1.0  # also noise alone is a release
        return total


class PrivateEvaluations:
    """The private evaluations of one training.

    Parameters
    ----------
    strategy : SchemeStrategy
        Whose training it is.
    option : PrivateEvaluation
        What the user chose.
    """

    def __init__(self, strategy: SchemeStrategy, option: PrivateEvaluation) -> None:
        self._strategy = strategy
        self._option = option
        self._request: EvaluationRequest | None = None
        self._told = False
        self._trained_here = 0  # the last round that this run trained
        self.trained = False  # whether there is a new model to evaluate

    def due(self, server_round: int, *, rounds: int) -> bool:
        """Return whether the model of a round is evaluated."""
        return self._option.takes_place(server_round, rounds=rounds)

    def used_up(self, planned: int) -> set[str]:
        """Return the clients that were charged for as many evaluations as are planned."""
        evaluations = (r for r in self._strategy.releases if r.phase == EVALUATE)
        counts = Counter(client for release in evaluations for client in release.clients)
        used_up = {client for client, count in counts.items() if count >= planned}
        return self._strategy.charge_log.with_addresses(used_up)

    def summed_next(self, instruction: Instruction, server_round: int, *, due: bool) -> Instruction:
        """Return a training's instruction; under a secure sum its clients deal for a second one."""
        self._trained_here = server_round
        if not due or self._strategy.secure_sum is None:
            return instruction
        return replace(instruction, again=True)

    def configure(
        self,
        grid: Grid,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        request: EvaluationRequest,
    ) -> list[Message]:
        """Return the messages that ask clients to evaluate; none if nobody can be asked."""
        strategy, self._request = self._strategy, None
        if not self.trained:
            return []
        by_others = strategy.secure_sum is not None or request.random is not None
        if by_others and self._trained_here != server_round:
            # The secrets of its sums are gone, and a server's second noise is a second release.
            logger.warning("the model of round %d is not evaluated after a restart", server_round)
            return []
        assigned = self._assigned(grid, server_round, request)
        clients = [client for names in assigned.values() for client in names]
        if not clients and request.random is None:
            return []
        self._request = request
        self._tell(len(clients))
        config = ConfigRecord({**config, "server-round": server_round})
        if request.terms.labels:
            config["label-histogram"] = request.terms.labels
        content = RecordDict({strategy.arrayrecord_key: arrays, strategy.configrecord_key: config})
        instruction = request.instruction()
        return strategy.put(server_round, EVALUATE, content, assigned, instruction)

    def aggregate(self, server_round: int, replies: Any) -> MetricRecord | None:
        """Return the metrics with their intervals; None if there are none."""
        request, self._request = self._request, None
        if request is None:
            return None
        total, _ = self._strategy.collect(EVALUATE, replies)
        if not isinstance(total, EvaluationSum):
            return None
        # Where everybody is charged it is a secret who answered; of records it is how many.
        secret = request.charged is not None or request.terms.unit == "record"
        most = math.inf if secret else float(len(total.clients))
        found = estimated(total, request.terms, request.sigmas(total.clients), most=most)
        if found:
            logger.info("private evaluation: %s", in_words(found))
        return MetricRecord({**found}) or None

    def _assigned(self, grid: Grid, server_round: int, request: EvaluationRequest) -> Assigned:
        strategy = self._strategy
        if strategy.secure_sum is None:
            fraction, without = strategy.fraction_evaluate, set(request.without)
            if request.among is not None:
                clients = strategy.federation.clients()
                others = set(clients).difference(request.among)
                fraction *= 1 - len(others) / max(1, len(clients))
                without |= others
            return strategy.messenger.sample(
                grid,
                server_round,
                EVALUATE,
                fraction=fraction,
                minimum=strategy.min_evaluate_nodes,
                without=without,
            )
        try:
            strategy.transport.go_on()
        except NotOpenedError as error:
            logger.warning("the model of round %d is not evaluated: %s", server_round, error)
            return {}
        return strategy.transport.clients(grid, server_round)

    def _tell(self, clients: int) -> None:
        """Log, once, how wide the intervals will be."""
        request = self._request
        if self._told or request is None:
            return
        self._told = True
        half = half_width(request.terms, max(1, clients))
        if half is None:
            return
        text = (
            f"private evaluation: noise moves the accuracy by up to {half:.2g} (95 %) with "
            f"{clients} clients"
        )
        if half <= _POOR:
            logger.info("%s", text)
            return
        logger.warning(
            "%s: it will tell next to nothing. More clients, fewer evaluations (every), a larger "
            "share, noise in shares or record level would make it less",
            text,
        )


def check_evaluation(strategy: SchemeStrategy, evaluation: PrivateEvaluation | None) -> None:
    """Refuse arguments of a strategy that do not go with private evaluation.

    Raises
    ------
    InvalidParameterError
        If an evaluation was chosen that nobody is asked for, or whose metrics a function of the
        user would be given, which clients do not send.
    """
    if evaluation is None:
        return
    if strategy.fraction_evaluate == 0:
        raise InvalidParameterError("fraction_evaluate", 0, "above 0 with a private evaluation")
    if strategy.evaluate_metrics_aggr_fn is not None:
        raise InvalidParameterError(
            "evaluate_metrics_aggr_fn",
            strategy.evaluate_metrics_aggr_fn,
            "None with a private evaluation: clients send nothing but noised counts",
        )
