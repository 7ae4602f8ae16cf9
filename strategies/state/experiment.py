"""The parts of an experiment that survive a run: identity, seed, history and checkpoint."""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.serverapp.strategy import Result

from flwr_privacy.errors import CheckpointError, InvalidParameterError
from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.privacy.card.folder import ASKED, CARD, CARD_PAGE, METRICS, new_card_folder
from flwr_privacy.privacy.guarantee import Guarantee
from flwr_privacy.strategies.options.loop_options import LoopOptions
from flwr_privacy.wire.files import write_text
from flwr_privacy.wire.identity import new_experiment_id

from . import checkpoint
from .asked import AskedNotes
from .history import History
from .lost_rounds import (
    after_lost_rounds,
    card_in,
    lacking,
    last_round_shown,
    question_names,
    round_of,
)

__all__ = ["Experiment", "SchemeResult"]

logger = logging.getLogger("flwr.privacy")

CHECKPOINT = "checkpoint.bin"


@dataclass(repr=False)  # Flower's own does not print the model
class SchemeResult(Result):
    """Flower's result with the history of the rounds (one dict per round, as in the JSON lines).

    Parameters
    ----------
    history : list of dict
        The rounds.
    guarantee : Guarantee
        What the scheme promises, and what was spent of it.
    """

    history: list[dict[str, Any]] = field(default_factory=list)
    guarantee: Guarantee | None = None


class Experiment:
    """One training, which may be resumed in several runs.

    Parameters
    ----------
    scheme : str
        Name of its scheme.
    loop : LoopOptions
        Its seed, identity, folder, and what hears of its rounds.

    Attributes
    ----------
    asked : AskedNotes
        What was asked since the last checkpoint.
    card_dir : Path or None
        Folder of the card and of the history: that of the run, or one of its own.
    lost_rounds : int
        Number of rounds that were given up and are not in the checkpoint: clients paid for them.
    """

    def __init__(self, scheme: str, loop: LoopOptions) -> None:
        self._scheme = scheme
        self._seed = loop.seed
        self._id = loop.experiment_id
        self.run_dir = None if loop.run_dir is None else Path(loop.run_dir)
        self._resume = loop.resume
        self._accept_lost_rounds = loop.accept_lost_rounds
        self.asked = AskedNotes(self.run_dir)
        self._durable = True
        self.card_dir = self.run_dir
        self._may_have_card = loop.write_card
        self._on_round = loop.on_round
        self.history = self._history()
        self.lost_rounds = 0

    @property
    def id(self) -> str:
        """Identity of the experiment, made when it is first needed."""
        if self._id is None:
            self._id = new_experiment_id()
        return self._id

    @property
    def seed(self) -> int | str:
        """Root of all seeds."""
        return self.id if self._seed is None else self._seed

    def _history(self) -> History:
        metrics = None if self.card_dir is None else self.card_dir / METRICS
        return History(metrics, self._on_round)

    def flush_nothing(self) -> None:
        """Do not wait for the disk: in a simulation a power cut takes the clients' ledgers, too."""
        self._durable = self.asked.durable = False

    def leave_no_card(self) -> None:
        """Leave no card, as with ``write_card=False``: for trainings that measure something."""
        self._may_have_card = False

    def make_card_folder(self) -> None:
        """Make a folder for the card of a run without a run folder; call it before a round.

        Raises
        ------
        InvalidParameterError
            If it cannot be made.
        """
        if self.card_dir is None and self._may_have_card:
            self.leave_no_card()  # of one training there is one card
            self.card_dir = new_card_folder(self._scheme)
            self.history = self._history()

    def begin(self, initial_arrays: ArrayRecord) -> dict[str, Any] | None:
        """Return the state to resume from; None if the experiment begins.

        Raises
        ------
        CheckpointError
            If the checkpoint is missing, damaged, of another experiment, or older than what the
            folder shows, or a file of the folder cannot be read.
        InvalidParameterError
            If the experiment begins and the folder has a checkpoint already, or one of its files
            is a folder, or the folder may not be searched.
        """
        self._check_files()
        if not self._resume or self.run_dir is None:
            self._begin_anew()
            return None
        path = self.run_dir / CHECKPOINT
        state = checkpoint.load(path)
        self._check_same(path, state, initial_arrays)
        self._id = state["experiment_id"]
        done, settled = state["round"] - bool(state["line"]), state["settled"]
        lacks = lacking(PrivacyCard.from_json(state["card"]), settled, done=done)
        self.asked.take_up(state["experiment_id"], lacks)
        state = self._compared(state, self.run_dir, done)
        self.history.restart(state["history"])
        return state

    def _check_files(self) -> None:
        """Raise InvalidParameterError if a file that the run writes is a folder or out of reach."""
        if self.run_dir is None:
            return
        for name in (CHECKPOINT, CARD, CARD_PAGE, METRICS, ASKED):
            allowed = f"a folder in which {name} is a file, if it is there"
            try:
                is_folder = (self.run_dir / name).is_dir()
            except OSError as error:
                allowed = f"a folder in which this user may use {name} ({error.strerror})"
                raise InvalidParameterError("run_dir", str(self.run_dir), allowed) from error
            if is_folder:
                raise InvalidParameterError("run_dir", str(self.run_dir), allowed)

    def _begin_anew(self) -> None:
        """Begin the experiment; of one that has begun only what no checkpoint was written of."""
        if self.run_dir is not None and (self.run_dir / CHECKPOINT).exists():
            raise InvalidParameterError(
                "run_dir",
                str(self.run_dir),
                f"a folder without a {CHECKPOINT}, or resume=True to go on from it",
            )
        # A run of it may have come to no checkpoint.
        if self.run_dir is not None and self._id is not None:
            self.asked.take_up(self._id, lambda name, client: True)
            card = card_in(self.run_dir / CARD, self._id)
            last = last_round_shown(self.history.written(), card, self.asked.questions)
            if last >= 0:
                raise CheckpointError(
                    f"there is no {CHECKPOINT} in {self.run_dir}, and its {METRICS} or {CARD} "
                    f"shows that round {last} is over: a run that began again would ask for "
                    "these rounds again, and its card would lack their charges. Put the checkpoint "
                    "back, or begin a new experiment in an empty folder"
                )
        self.history.restart()

    def _compared(self, state: dict[str, Any], run_dir: Path, done: int) -> dict[str, Any]:
        """Return the state to go on from, after a comparison with what the folder shows.

        Raises
        ------
        CheckpointError
            If the folder shows rounds that the checkpoint lacks, and they are not given up.
        """
        lines, card = self.history.written(), card_in(run_dir / CARD, self.id)
        settled = question_names(PrivacyCard.from_json(state["card"])) | set(self.asked.questions)
        last = last_round_shown(lines, card, settled)
        if last <= done:
            return state
        lost = f"round {last}" if last == done + 1 else f"rounds {done + 1} to {last}"
        if not self._accept_lost_rounds:
            raise CheckpointError(
                f"the checkpoint {run_dir / CHECKPOINT} is older than its folder: {CARD} or "
                f"metrics.jsonl shows {lost}, which it lacks. Put the newest checkpoint back. "
                "Without it, accept_lost_rounds=True (--accept-lost-rounds) gives up what was "
                "trained later: the charges stay on the card, and the training goes on after it"
            )
        charged = set() if card is None else question_names(card)
        lacks = lacking(card or PrivacyCard.from_json(state["card"]), charged)
        self.asked.take_up(self.id, lacks)
        last = max([last, *map(round_of, self.asked.questions)])
        # A checkpoint before an evaluation has its round's training already.
        self.lost_rounds = last - state["round"]
        logger.warning("%s lost: the training goes on with round %d", lost, last + 1)
        return after_lost_rounds(state, lines, card, done=done, last=last)

    def end_training(
        self, line: dict[str, Any], arrays: ArrayRecord, *, card: PrivacyCard, **state: Any
    ) -> None:
        """Write checkpoint and privacy card of a round whose model nobody has seen yet.

        A run that goes on from here shows the same model. A model that was lost after it was shown
        would be trained again, with other noise: one more release, which no charge is for.

        Parameters
        ----------
        line : dict
            The line of the round as far as it is known; a resume completes it.
        arrays, card, **state
            As for `end_round`.
        """
        self._save(arrays, card, state, round=line["round"], line=line)

    def end_round(
        self, line: dict[str, Any], arrays: ArrayRecord, *, card: PrivacyCard, **state: Any
    ) -> None:
        """Write checkpoint and privacy card after a round, then its line."""
        history = self.history.text_with(line) if self.run_dir is not None else ""
        self._save(arrays, card, state, round=line["round"], line={}, history=history)
        self.history.add(line)

    def end_run(
        self, server_round: int, arrays: ArrayRecord, *, card: PrivacyCard, **state: Any
    ) -> None:
        """Write checkpoint and privacy card where the state changed after the last round.

        Parameters
        ----------
        server_round : int
            The last round.
        arrays, card, **state
            As for `end_round`.
        """
        self._save(arrays, card, state, round=server_round, line={})

    def _save(
        self, arrays: ArrayRecord, card: PrivacyCard, state: dict[str, Any], **document: Any
    ) -> None:
        if self.run_dir is None:
            self.keep_card(card)
        else:
            document = {
                "experiment_id": self.id,
                "scheme": self._scheme,
                "seed": self._seed,
                "arrays": {name: array.numpy() for name, array in arrays.items()},
                "history": self.history.text_with(),
                "card": card.to_json(),
                "settled": self.asked.questions,
                **document,
                **state,
            }
            # In this order: a kill in between leaves a card that says too much, never too little.
            self.keep_card(card)
            checkpoint.save(self.run_dir / CHECKPOINT, document, durable=self._durable)
        self.asked.clear()

    def keep_card(self, card: PrivacyCard) -> None:
        """Write the privacy card, for programs and for people."""
        if self.card_dir is not None:
            for name, text in ((CARD, card.to_json()), (CARD_PAGE, card.to_html())):
                write_text(self.card_dir / name, text, durable=self._durable)

    def result(self, arrays: ArrayRecord, guarantee: Guarantee) -> SchemeResult:
        """Return the result in Flower's form, with all rounds since the first run."""
        result = SchemeResult(arrays=arrays, history=list(self.history.lines), guarantee=guarantee)
        for line in result.history:
            for key, metrics in (
                ("train", result.train_metrics_clientapp),
                ("evaluate", result.evaluate_metrics_clientapp),
                ("server", result.evaluate_metrics_serverapp),
            ):
                if line.get(key):
                    numbers = {name: v for name, v in line[key].items() if _is_whole(v)}
                    metrics[line["round"]] = MetricRecord(numbers)
        return result

    def _check_same(self, path: Path, state: dict[str, Any], initial_arrays: ArrayRecord) -> None:
        mine = {
            "experiment_id": self._id or state["experiment_id"],
            "scheme": self._scheme,
            "seed": self._seed,
            "shapes": {name: tuple(array.shape) for name, array in initial_arrays.items()},
        }
        theirs = {key: state.get(key) for key in mine}
        theirs["shapes"] = {name: array.shape for name, array in state["arrays"].items()}
        for key, value in mine.items():
            if theirs[key] != value:
                raise CheckpointError(
                    f"the checkpoint {path} is of another experiment: its {key} is "
                    f"{theirs[key]!r}, not {value!r}"
                )


def _is_whole(value: Any) -> bool:
    # What was not finite is null in the history and cannot be in a MetricRecord.
    return value is not None and not (isinstance(value, list) and None in value)


def to_record(arrays: dict[str, Any]) -> ArrayRecord:
    """Return named arrays as Flower's record."""
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})
