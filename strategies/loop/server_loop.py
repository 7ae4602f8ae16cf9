"""Runs the rounds of one training, for every scheme: train, checkpoint, evaluate, checkpoint.

A round that has something to show writes two checkpoints. The first, with its charges, comes before
anybody sees the round's model: a run that is killed while the model is shown goes on with that
model. Without it the round would be trained again, with other noise, and what was shown would be a
release that no charge is for. The second ends the round.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid

from flwr_privacy.errors import AllRefusedError, NothingTrainedError, TooFewTrainedError, refusals
from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.privacy.card.folder import CARD_PAGE
from flwr_privacy.privacy.trained_count import TrainedCount
from flwr_privacy.strategies.options.round_logger import numbers_of
from flwr_privacy.strategies.requests.pulling import is_local
from flwr_privacy.strategies.state.ending import ending, next_commands, trained_rounds
from flwr_privacy.strategies.state.experiment import SchemeResult, to_record
from flwr_privacy.strategies.state.history import log, plain
from flwr_privacy.wire.message import EVALUATE, TRAIN

from .charge_log import named_costs

if TYPE_CHECKING:
    from .base import SchemeStrategy

__all__ = ["EvaluateFn", "ServerLoop"]

logger = logging.getLogger("flwr.privacy")

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
"""Evaluates the model of a round on the server."""

Line = dict[str, Any]


class ServerLoop:
    """The rounds of one run of a strategy.

    Parameters
    ----------
    strategy : SchemeStrategy
        What trains a round, and what it keeps.
    grid : Grid
        Flower's grid.
    rounds : int
        The last round.
    train_config, evaluate_config : ConfigRecord
        The user's configuration of training and evaluation.
    evaluate_fn : callable, optional
        Evaluates a model on the server.
    """

    def __init__(
        self,
        strategy: "SchemeStrategy",
        grid: Grid,
        *,
        rounds: int,
        train_config: ConfigRecord | None,
        evaluate_config: ConfigRecord | None,
        evaluate_fn: EvaluateFn | None,
    ) -> None:
        self._strategy = strategy
        self._experiment = strategy.experiment
        if is_local(grid):
            self._experiment.flush_nothing()
        self._charge_log = strategy.charge_log
        self._grid = grid
        self._rounds = rounds
        self._train_config = ConfigRecord() if train_config is None else train_config
        self._evaluate_config = ConfigRecord() if evaluate_config is None else evaluate_config
        self._evaluate_fn = evaluate_fn
        self._first_round = 0  # 0: the model is evaluated before it is trained
        self._said = Counter[str]()  # why clients refused, in rounds without a usable answer
        self._unfinished: Line = {}  # of a round that an earlier run trained and did not end
        self._began = time.monotonic()

    def begin(self, initial_arrays: ArrayRecord) -> ArrayRecord:
        """Return the model to start from: the initial model or a checkpoint's."""
        state = self._experiment.begin(initial_arrays)
        strategy, broken_off = self._strategy, named_costs(self._experiment.asked.left)
        if state is None:
            strategy.heads.take_up(broken_off)
            return initial_arrays
        strategy.messenger.load_state(state["messenger"])
        keys = strategy.federation.keys
        keys.load_state(state["client_keys"], forget=strategy.loop.forget_keys)
        card = PrivacyCard.from_json(state["card"])
        self._charge_log.load(card)
        strategy.heads.load_state(
            state["ledgers"],
            card,
            broken_off=broken_off,
            accept=strategy.loop.accept_ledgers,
            lost=bool(self._experiment.lost_rounds),
        )
        strategy.transport.load_state(state["secure_sum"])
        strategy.trained = TrainedCount.from_state(state["trained"])
        if strategy.frozen is not None:
            # Checkpoints of before there were frozen weights do not have it.
            strategy.frozen.check_state(state.get("frozen", ""))
        strategy.load_state_dict(state["scheme_state"])
        strategy.model_step.load_state_dict(state["inner"])
        self._first_round = int(state["round"]) + 1
        self._unfinished = dict(state["line"])
        last = self._unfinished or self._experiment.history.lines[-1]
        # The history counts the seconds of all runs.
        self._began -= float(last["seconds"])
        return to_record(state["arrays"])

    def run(self, arrays: ArrayRecord) -> SchemeResult:
        """Run the remaining rounds; return the result of the whole training.

        Raises
        ------
        NothingTrainedError
            If no round gave a model; `AllRefusedError` if every answer was refused.
        TooFewTrainedError
            If it is certain that too few of the clients' trainings work.
        """
        strategy = self._strategy
        card: PrivacyCard | None = None
        stopped = ""
        # An earlier run trained this round; to train it again would be a second release.
        if self._unfinished:
            card = self._end_round({**self._unfinished, "rounds": self._rounds}, arrays)
        for server_round in range(self._first_round, self._rounds + 1):
            line: Line = {"round": server_round, "rounds": self._rounds}
            if server_round > 0:
                if stopped := strategy.stop():
                    logger.warning("the training ends before round %d: %s", server_round, stopped)
                    break
                # No error yet: it is raised below, with the result so far.
                if strategy.trained.too_few:
                    break
                arrays = self._train(line, arrays)
            card = self._end_round(line, arrays)
        # An interrupted run may have sent requests that no round has sent again.
        charged = len(self._charge_log.releases)
        self._charge_log.charge_broken_off()
        if card is None or len(self._charge_log.releases) > charged:
            card = strategy.card(final=True)
            self._experiment.keep_card(card)
        result = self._experiment.result(strategy.whole(arrays), card.guarantee)
        rounds = [line for line in result.history if line["round"] > 0]
        self._tell_end(result, card, stopped)
        if strategy.fraction_train > 0 and rounds and not trained_rounds(rounds):
            raise self._nothing_trained(rounds, result)
        if strategy.trained.too_few:
            strategy.trained.told = True  # whoever goes on has read it
            last = result.history[-1]["round"]
            self._experiment.end_run(last, arrays, card=card, **self._state())
            raise TooFewTrainedError(strategy.trained.text(), rounds, result)
        return result

    def _nothing_trained(self, rounds: list[Line], result: SchemeResult) -> NothingTrainedError:
        """Return the error of a training in which no round gave a model."""
        asked = sum(line.get("asked", 0) for line in rounds)
        if asked and refusals(rounds).total() >= asked:
            return AllRefusedError(rounds, result, self._said)
        return NothingTrainedError(rounds, result)

    def _tell_end(self, result: SchemeResult, card: PrivacyCard, stopped: str) -> None:
        """Log how the run ended; as a warning where a round that was asked for gave no model."""
        folder = self._experiment.card_dir
        told = ending(
            result.history,
            planned=self._rounds,
            stopped=stopped,
            guarantee=card.guarantee,
            card=None if folder is None else folder / CARD_PAGE,
            commands=() if folder is None else next_commands(folder),
        )
        whole = trained_rounds(result.history) == self._rounds
        logger.log(logging.INFO if whole or stopped else logging.WARNING, "%s", told[0])
        for fact in told[1:]:
            logger.info("%s", fact)

    def _train(self, line: Line, arrays: ArrayRecord) -> ArrayRecord:
        """Return the model after a round's training."""
        strategy, server_round = self._strategy, line["round"]
        self._charge_log.earlier = None
        # Nodes may join between rounds.
        strategy.newcomers = strategy.messenger.meet(self._grid)
        if strategy.newcomers:
            logger.info("joined: %s", strategy.newcomers)
        trained, metrics = strategy.train_round(
            self._grid, server_round, arrays, self._train_config
        )
        arrays = arrays if trained is None else trained
        line["skipped"] = trained is None
        if trained is None:
            self._said.update(strategy.messenger.reasons(TRAIN, server_round))
        line["train"] = plain(dict(metrics or {}))
        # Before anybody sees the model, its charges are on disk: see the module's docstring.
        if self._experiment.run_dir and (self._evaluate_fn or strategy.fraction_evaluate):
            self._charge_log.charge_broken_off()
            card = strategy.card()
            known = {**line, "scheme": self._numbers(line, card), "seconds": self._seconds()}
            self._experiment.end_training(known, arrays, card=card, **self._state())
        return arrays

    def _end_round(self, line: Line, arrays: ArrayRecord) -> PrivacyCard:
        """Evaluate a model, complete its round's line, and write checkpoint and privacy card."""
        strategy, server_round = self._strategy, line["round"]
        if server_round > 0:
            line["evaluate"] = self._evaluate(server_round, arrays)
        shown = strategy.whole(arrays)
        server = self._evaluate_fn(server_round, shown) if self._evaluate_fn else None
        line["server"] = plain(dict(server or {}))
        self._charge_log.charge_broken_off()
        # Only the last card states epsilon by every accountant: some take seconds.
        card = strategy.card(final=server_round >= self._rounds or bool(strategy.stop()))
        line["scheme"] = self._numbers(line, card)
        if server_round == 1 and card.forecast:
            line["forecast"] = card.forecast
        line |= strategy.messenger.counts()
        # What a resume compares with: an older card has fewer.
        line["charged"] = card.answers().charged
        if losses := strategy.heads.taken_losses():
            line["accepted_ledgers"] = losses
        line["seconds"] = self._seconds()
        log(line, of_the_app=strategy.metrics_phases, spent=card.guarantee.budget())
        self._experiment.end_round(line, arrays, card=card, **self._state())
        if strategy.loop.logger is not None:
            strategy.loop.logger.log(server_round, numbers_of(line))
        return card

    def _evaluate(self, server_round: int, arrays: ArrayRecord) -> dict[str, Any]:
        """Return the clients' metrics of a model."""
        strategy = self._strategy
        if strategy.fraction_evaluate == 0:
            return {}
        self._charge_log.earlier = None  # who answers may say that its noise is from a seed
        messages = strategy.configure_evaluate(
            server_round, arrays, self._evaluate_config, self._grid
        )
        replies = strategy.messenger.exchange(self._grid, messages, phase=EVALUATE)
        return plain(dict(strategy.aggregate_evaluate(server_round, replies) or {}))

    def _numbers(self, line: Line, card: PrivacyCard) -> dict[str, Any]:
        """Return the scheme's numbers; those of a training by an earlier run are in the line."""
        sums = self._strategy.transport.metrics()
        trained = self._strategy.trained.numbers(line["round"])
        # A resumed run has not opened the sums of this round: the line knows their numbers.
        own = {**trained, **self._strategy.round_metrics(card)}
        return {**plain(sums), **line.get("scheme", {}), **plain(own)}

    def _state(self) -> dict[str, Any]:
        """Return the state that a resume needs besides the model, the history and the charges."""
        strategy = self._strategy
        return {
            "messenger": strategy.messenger.state(),
            "client_keys": strategy.federation.keys.state(),
            "ledgers": strategy.heads.state(),
            "scheme_state": strategy.state_dict(),
            "inner": strategy.model_step.state_dict(),
            "secure_sum": strategy.transport.state(),
            "trained": strategy.trained.state(),
            "frozen": "" if strategy.frozen is None else strategy.frozen.digest.hex(),
        }

    def _seconds(self) -> float:
        """Return the seconds of the training so far, those of earlier runs included."""
        return time.monotonic() - self._began
