"""The fault matrix: trains inline with each fault in each phase, and judges the outcome."""

import hashlib
import logging
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.clients import SchemeClient, Train
from flwr_privacy.clients.node.base import Evaluate
from flwr_privacy.errors import FlwrPrivacyError
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.simulations.engines.inline.flower_internals import acting_as_server
from flwr_privacy.strategies.state.experiment import CHECKPOINT
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.identity import client_id_from
from flwr_privacy.wire.message import EVALUATE, HELLO, Fields

from .federations import ROUNDS, SEED, SmallFederation, Spot
from .grid import FAULTS, FaultyGrid, Killed, Strike

__all__ = ["DEFECT", "VERDICTS", "Cell", "Outcome", "carry_out", "judge", "matrix", "rehearse"]

VERDICTS = {
    "exact": "the model and what is told of it are those of a training without the fault, bit for "
    "bit",
    "left out": "a round, an evaluation or the training went on without the client, and the "
    "history or the log says so; where the answer is lost or damaged, the model is bit for bit "
    "that of a training in which the question is lost (but for a damaged hello: the keys in it can "
    "be checked by the client's neighbours alone, who refuse them for as long as they are used)",
    "skipped": "a round was given up, the model stayed as it was, and the history says so",
    "refused": "the training ended with an error of the library that says why",
    "-": "the fault cannot happen here: the reply has nothing of the kind, or nothing is written "
    "to a ledger",
    "DEFECT": "none of these, or a ledger has less than what was released",
}

EXACT, LEFT_OUT, SKIPPED, REFUSED, NOTHING, DEFECT = VERDICTS

_SILENCING = frozenset(
    {"drop", "crash", "stranger", "corrupt", "nan", "infinity", "reshape", "disk full"}
)
"""Faults after which the server has nothing of the answer: as if it had asked nothing."""

_DEADLINE = 1.0  # seconds, where an answer does not come
_WAITED_FOR = ("late", "stale")  # the others are answered, or told of as lost
_COUNTS = ("asked", "answered", "accumulated", "evaluated")
_SCHEME_COUNTS = ("dealers", "answers", "sum_opened", "sum_dealers", "sum_cohort")

Release = tuple[str, str, int, int]
"""Client, phase, round, request."""


@dataclass(kw_only=True)
class Witness:
    """Records what the clients answer, before masks are added.

    Parameters
    ----------
    within : tuple of str
        Phases whose sealed answers are no releases.
    """

    within: tuple[str, ...] = ()
    answers: dict[Release, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    questions: set[Release] = field(default_factory=set)

    def watch(self, client: type[SchemeClient]) -> type[SchemeClient]:
        """Return a client half that reports its replies to the witness."""
        witness = self

        def handle(
            self: SchemeClient, phase: str, arrays: Arrays, fields: Fields, train: Train
        ) -> tuple[Arrays, Fields]:
            answer = client.handle(self, phase, arrays, fields, train)
            witness.note(self, phase, fields, answer)
            return answer

        def handle_evaluation(
            self: SchemeClient, arrays: Arrays, fields: Fields, evaluate: Evaluate
        ) -> Mapping[str, Any]:
            metrics = client.handle_evaluation(self, arrays, fields, evaluate)
            witness.note(self, EVALUATE, fields, ({}, dict(metrics)))
            return metrics

        return type(
            client.__name__, (client,), {"handle": handle, "handle_evaluation": handle_evaluation}
        )

    def note(
        self, client: SchemeClient, phase: str, fields: Fields, answer: tuple[Arrays, Fields]
    ) -> None:
        """Record a reply, unless it is sealed: sealed bytes differ every time."""
        if client.context is None:
            raise RuntimeError("a client without a context")
        name = client_id_from(client.context.node_config)
        question = (name, phase, fields["round"], fields["request"])
        if phase in self.within and not answer[0]:
            return
        open_fields = {key: value for key, value in answer[1].items() if not _is_sealed(value)}
        digest = hashlib.sha256(repr(open_fields).encode())
        for key, array in answer[0].items():
            digest.update(key.encode() + np.asarray(array).tobytes())
        self.keep(question, digest.digest())

    def keep(self, question: Release, answer: bytes) -> None:
        """Record the digest of a reply."""
        self.answers[question].add(answer)
        self.questions.add(question)

    def forget(self, client: str) -> None:
        """Drop the records of a client whose ledger is lost."""
        for question in [question for question in self.answers if question[0] == client]:
            del self.answers[question]


@dataclass(kw_only=True)
class Outcome:
    """The outcome of a training.

    Parameters
    ----------
    model : dict of str to ndarray
        The model; empty if it ended with an error.
    history : list of dict
        Its rounds.
    error : str
        The text of the error.
    broken : bool
        Whether the error is none of the library's.
    warnings : list of str
        What was logged.
    answers : Counter
        Different answers by question, those that came before a ledger was lost excepted.
    charges : Counter
        Entries of the ledgers by client, phase and round.
    questions : set
        What was answered: client, phase, round and request.
    carded : set
        The same of the server's privacy card.
    struck, empty : bool
        As those of `FaultyGrid`.
    asked : list
        Phase and round of each question.
    """

    model: dict[str, NDArray[Any]] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    broken: bool = False
    warnings: list[str] = field(default_factory=list)
    answers: Counter[Release] = field(default_factory=Counter)
    charges: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    questions: set[Release] = field(default_factory=set)
    carded: set[Release] = field(default_factory=set)
    struck: bool = False
    empty: bool = False
    asked: list[tuple[str, int]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell of the matrix.

    Parameters
    ----------
    fault, phase : str
        What happened, and where.
    verdict : str
        A key of `VERDICTS`.
    why : str, default ""
        What is wrong, or what the error says.
    """

    fault: str
    phase: str
    verdict: str
    why: str = ""


def rehearse(federation: SmallFederation, *, spot: Spot | None = None, fault: str = "") -> Outcome:
    """Train a federation, with a fault in a phase or without; go on if the server dies."""
    outcome, witness = Outcome(), Witness(within=federation.within)
    strike = None
    if spot is not None:
        strike = Strike(
            fault=fault,
            phase=spot.phase,
            server_round=spot.server_round,
            client=spot.client,
            nth=spot.nth,
            seconds=_DEADLINE if fault == "late" else Strike.seconds,
        )
    with tempfile.TemporaryDirectory(prefix="flwr-privacy-") as folder, _logged(outcome.warnings):
        kept, state, run_dir = (Path(folder, name) for name in ("nodes", "state", "run"))
        for path in (kept, state, run_dir):
            path.mkdir()
        nodes = federation.nodes(kept)

        def train(strike: Strike | None) -> None:
            resume = (run_dir / CHECKPOINT).exists()
            more = {"deadline": _DEADLINE} if fault in _WAITED_FOR else {}
            strategy = federation.build(run_dir=run_dir, resume=resume, **more)
            grid = FaultyGrid(
                federation.app(witness.watch(federation.client)),
                nodes,
                state=state,
                insecure_seed=SEED,
                strike=strike,
                forgotten=witness.forget,
            )
            try:
                with acting_as_server(grid.run_id):
                    result = strategy.start(
                        grid,
                        federation.arrays(),
                        num_rounds=ROUNDS,
                        timeout=_DEADLINE if fault in _WAITED_FOR else 60.0,
                    )
                outcome.model = {name: array.numpy() for name, array in result.arrays.items()}
                outcome.history = result.history
            finally:
                grid.close()
                outcome.struck |= grid.struck
                outcome.empty |= grid.empty
                outcome.asked += grid.asked
                outcome.carded |= {
                    _named(
                        federation, (client, release.phase, release.server_round, release.request)
                    )
                    for release in strategy.releases
                    for client in release.clients
                }

        try:
            try:
                train(strike)
            except Killed:
                outcome.carded = set()  # of the run that goes on
                train(None)
        except FlwrPrivacyError as error:
            outcome.error = f"{type(error).__name__}: {error}"
        # Whatever else is raised is a defect, which the matrix must show and not end with.
        except Exception as error:  # noqa: BLE001
            outcome.error, outcome.broken = f"{type(error).__name__}: {error}", True
        for question, them in witness.answers.items():
            outcome.answers[_named(federation, question)] += len(them)
        outcome.questions = {_named(federation, question) for question in witness.questions}
        outcome.charges = _charges(state, federation.charged)
    return outcome


def _named(federation: SmallFederation, question: Release) -> Release:
    """Return a question by the name under which it is charged."""
    client, phase, *_ = question
    return (client, phase, 0, 0) if phase in federation.once else question


def judge(
    clean: Outcome, outcome: Outcome, *, spot: Spot, fault: str, silent: Outcome | None = None
) -> tuple[str, str]:
    """Return the verdict on a training with a fault, and why.

    Parameters
    ----------
    clean : Outcome
        The training without it.
    outcome : Outcome
        The training with it.
    spot : Spot
        Where it happened.
    fault : str
        A key of `FAULTS`.
    silent : Outcome, optional
        The training in which the question is lost there. With it, one that left the client out must
        end at the same model, where nothing of the answer came.
    """
    if missing := _undercounted(clean, outcome):
        return DEFECT, missing
    if outcome.broken:
        return DEFECT, outcome.error
    if outcome.error:
        return REFUSED, outcome.error
    if not outcome.struck:
        return DEFECT, "the fault did not happen"
    charged = any(place[:2] == (spot.client, spot.phase) for place in clean.charges)
    if outcome.empty or (fault == "disk full" and not charged):
        return NOTHING, ""
    if not all(np.isfinite(array).all() for array in outcome.model.values()):
        return DEFECT, "the model is not finite"
    if _same(clean, outcome):
        return EXACT, ""
    lines = list(zip(clean.history, outcome.history, strict=False))
    if any(mine.get("skipped") and not was.get("skipped") for was, mine in lines):
        return SKIPPED, ""
    if any(_fewer(was, mine) for was, mine in lines) or set(outcome.warnings) - set(clean.warnings):
        silenced = fault in _SILENCING and (fault, spot.phase) != ("corrupt", HELLO)
        if silent is not None and silenced and not _same_model(silent, outcome):
            return DEFECT, "the model is not that of a training in which the question is lost"
        return LEFT_OUT, ""
    return DEFECT, "the model or what is told of it is another one, and nothing says why"


def carry_out(
    federation: SmallFederation,
    clean: Outcome,
    spot: Spot,
    fault: str,
    *,
    silent: Outcome | None = None,
) -> Cell:
    """Carry out one cell; the parameters are those of `judge`."""
    outcome = rehearse(federation, spot=spot, fault=fault)
    verdict, why = judge(clean, outcome, spot=spot, fault=fault, silent=silent)
    return Cell(fault=fault, phase=spot.name or spot.phase, verdict=verdict, why=why)


def matrix(
    federation: SmallFederation,
    *,
    faults: Sequence[str] = tuple(FAULTS),
    told: Callable[[Cell], None] = lambda cell: None,
) -> list[Cell]:
    """Carry out all cells of a federation, or those of some faults.

    Parameters
    ----------
    federation : SmallFederation
        The scheme.
    faults : sequence of str
        Keys of `FAULTS`.
    told : callable, optional
        Gets each cell when it is done.

    Raises
    ------
    RuntimeError
        If the training without a fault fails, asks nothing in one of the phases, or ends at the
        model that it begins with: who is left out would not be missed.
    """
    clean = rehearse(federation)
    if clean.error:
        raise RuntimeError(f"{federation.title}: without a fault it ends with {clean.error}")
    untrained = {name: array.numpy() for name, array in federation.arrays().items()}
    if _same_model(clean, Outcome(model=untrained)):
        raise RuntimeError(f"{federation.title}: the training does not move the model")
    cells = []
    for spot in federation.spots:
        if (spot.phase, spot.server_round) not in clean.asked:
            raise RuntimeError(f"{federation.title}: no question of phase {spot.phase}")
        silent = rehearse(federation, spot=spot, fault="lost question")
        for fault in faults:
            cells.append(carry_out(federation, clean, spot, fault, silent=silent))
            told(cells[-1])
    return cells


def _undercounted(clean: Outcome, outcome: Outcome) -> str:
    """Return whose ledger, or which answer of the card, does not have what was released.

    Where several answers of a round cost one charge without a fault (sealed ones, which leave
    their zone as one average), one charge covers one answer to each of them.
    """
    charged = {place[:2] for place in clean.charges}
    shared = {place[:2] for place, charge in clean.charges.items() if _given(clean, place) > charge}
    for place in sorted({question[:3] for question in outcome.answers}):
        if place[:2] not in charged:
            continue
        client, phase, server_round = place
        given = _given(outcome, place, each=place[:2] not in shared)
        if given > outcome.charges[place]:
            return (
                f"round {server_round}: client {client} gave {given} answers of phase {phase}, "
                f"its ledger has {outcome.charges[place]}"
            )
    carded = {question[:2] for question in clean.carded}
    carded -= {question[:2] for question in clean.questions - clean.carded}
    told = {question for question in outcome.questions if question[:2] in carded}
    if not outcome.error and (missing := told - outcome.carded):
        return f"the privacy card lacks {sorted(missing)}"
    return ""


def _is_sealed(value: Any) -> bool:
    return isinstance(value, bytes) or (isinstance(value, list) and bytes in map(type, value))


def _given(outcome: Outcome, place: tuple[str, str, int], *, each: bool = True) -> int:
    """Return how many answers of a round were given: to all questions, or the most to one."""
    counts = [count for question, count in outcome.answers.items() if question[:3] == place]
    return sum(counts) if each else max(counts, default=0)


def _same(clean: Outcome, outcome: Outcome) -> bool:
    told = ("round", "skipped", "train", "evaluate", "server")
    return (
        _same_model(clean, outcome)
        and len(clean.history) == len(outcome.history)
        and all(
            {key: was.get(key) for key in told} == {key: mine.get(key) for key in told}
            for was, mine in zip(clean.history, outcome.history, strict=True)
        )
    )


def _same_model(one: Outcome, other: Outcome) -> bool:
    return one.model.keys() == other.model.keys() and all(
        array.dtype == one.model[name].dtype and np.array_equal(array, one.model[name])
        for name, array in other.model.items()
    )


def _fewer(was: Mapping[str, Any], mine: Mapping[str, Any]) -> bool:
    """Tell whether a line of the history says that somebody was left out."""
    if any(mine.get(key, 0) < was.get(key, 0) for key in _COUNTS):
        return True
    if mine.get("refused") or mine.get("late", 0) > was.get("late", 0):
        return True
    numbers, before = mine.get("scheme", {}), was.get("scheme", {})
    return any(numbers.get(key, 0) < before.get(key, 0) for key in _SCHEME_COUNTS)


def _charges(state: Path, names: Mapping[str, str]) -> Counter[tuple[str, str, int]]:
    charges: Counter[tuple[str, str, int]] = Counter()
    for path in state.glob("*.ledger"):
        for entry in Ledger(path, data_set=path.stem).entries():
            question = entry.question
            phase = names.get(question.phase.partition(" ")[0], question.phase)
            charges[path.stem, phase, question.server_round] += 1
    return charges


@contextmanager
def _logged(lines: list[str]) -> Iterator[None]:
    """Keep the warnings of the library in a list, and off the screen."""

    class Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("flwr.privacy"), Keeping(logging.WARNING)
    propagated, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagated
