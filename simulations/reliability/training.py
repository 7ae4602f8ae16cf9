"""Trains a small federation, with faults or without, and returns what came of it."""

import logging
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from flwr_privacy.errors import FlwrPrivacyError
from flwr_privacy.privacy.ledger import Entry, Ledger
from flwr_privacy.simulations.engines.inline.flower_internals import acting_as_server
from flwr_privacy.strategies import SchemeStrategy
from flwr_privacy.strategies.state.experiment import CHECKPOINT, SchemeResult

from .federations import ROUNDS, SEED, SmallFederation, Spot
from .grid import FaultyGrid, Killed, Strike
from .witness import AnswerKey, Witness

__all__ = [
    "Outcome",
    "asked_in",
    "ledger_entries",
    "start",
    "strike_at",
    "train",
    "warnings_to",
    "with_fault",
]

_DEADLINE = 1.0  # seconds, where an answer does not come
_WAITED_FOR = ("late", "stale")  # the others are answered, or told of as lost


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
        Different answers by request, those that came before a ledger was lost excepted.
    charges : Counter
        Entries of the ledgers by client, phase and round.
    requests : set
        What was answered: client, phase, round and request.
    carded : set
        The same of the server's privacy card.
    struck, empty : list of Strike
        The faults that happened, and those of them that had nothing to damage.
    asked : list
        Client, phase, round and number of each request, in order.
    """

    model: dict[str, NDArray[Any]] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    broken: bool = False
    warnings: list[str] = field(default_factory=list)
    answers: Counter[AnswerKey] = field(default_factory=Counter)
    charges: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    requests: set[AnswerKey] = field(default_factory=set)
    carded: set[AnswerKey] = field(default_factory=set)
    struck: list[Strike] = field(default_factory=list)
    empty: list[Strike] = field(default_factory=list)
    asked: list[AnswerKey] = field(default_factory=list)


def strike_at(spot: Spot, fault: str) -> Strike:
    """Return a fault that happens in a phase."""
    strike = Strike(
        fault=fault,
        phase=spot.phase,
        server_round=spot.server_round,
        client=spot.client,
        nth=spot.nth,
    )
    return with_fault(strike, fault)


def with_fault(strike: Strike, fault: str) -> Strike:
    """Return a strike with another fault; one that is late misses the deadline."""
    return replace(strike, fault=fault, seconds=_DEADLINE if fault == "late" else Strike.seconds)


def train(federation: SmallFederation, *strikes: Strike) -> Outcome:
    """Train a federation, with faults or without; resume if the server is killed."""
    outcome, witness = Outcome(), Witness(within=federation.within)
    with (
        tempfile.TemporaryDirectory(prefix="flwr-privacy-") as folder,
        warnings_to(outcome.warnings.append),
    ):
        waits = any(strike.fault in _WAITED_FOR for strike in strikes)
        training = _Training(federation, Path(folder), witness, waits=waits)
        to_come: Sequence[Strike] | None = strikes
        try:
            while to_come is not None:
                to_come = training.run(to_come, outcome)
        except FlwrPrivacyError as error:
            outcome.error = f"{type(error).__name__}: {error}"
        # Whatever else is raised is a defect, which the matrix must show and not end with.
        except Exception as error:  # noqa: BLE001
            outcome.error, outcome.broken = f"{type(error).__name__}: {error}", True
        entries = ledger_entries(federation, training.state)
        outcome.charges = Counter((client, phase, r) for client, phase, r, _ in entries)
    for key, answers in witness.answers.items():
        outcome.answers[_charged_as(federation, key)] += len(answers)
    outcome.requests = {_charged_as(federation, key) for key in witness.requests}
    return outcome


class _Training:
    """A training in a folder of its own, with a deadline where an answer is waited for."""

    def __init__(
        self, federation: SmallFederation, folder: Path, witness: Witness, *, waits: bool
    ) -> None:
        kept, self.state, self._run_dir = (folder / name for name in ("nodes", "state", "run"))
        for path in (kept, self.state, self._run_dir):
            path.mkdir()
        self._federation, self._witness, self._waits = federation, witness, waits
        self._nodes = federation.nodes(kept)

    def run(self, strikes: Sequence[Strike], outcome: Outcome) -> Sequence[Strike] | None:
        """Train, from the checkpoint if there is one, and add to the outcome what came of it.

        Returns
        -------
        sequence of Strike or None
            If the server is killed, the faults that are still to come; None at the end.
        """
        federation, witness = self._federation, self._witness
        strategy = federation.build(
            run_dir=self._run_dir,
            resume=(self._run_dir / CHECKPOINT).exists(),
            **({"deadline": _DEADLINE} if self._waits else {}),
        )
        grid = FaultyGrid(
            federation.app(witness.watch(federation.client)),
            self._nodes,
            state=self.state,
            insecure_seed=SEED,
            strikes=strikes,
            forgotten=witness.forget,
        )
        try:
            timeout = _DEADLINE if self._waits else 60.0
            result = start(federation, strategy, grid, rounds=ROUNDS, timeout=timeout)
            outcome.model = {name: array.numpy() for name, array in result.arrays.items()}
            outcome.history = result.history
        except Killed:
            return grid.to_come
        finally:
            outcome.struck += grid.struck
            outcome.empty += grid.empty
            outcome.asked += grid.asked
            # A resumed run has a card of its own.
            outcome.carded = {
                _charged_as(
                    federation,
                    (client, asked_in(federation, one.phase), one.server_round, one.request),
                )
                for one in strategy.releases
                for client in one.clients
            }
        return None


def start(
    federation: SmallFederation,
    strategy: SchemeStrategy,
    grid: FaultyGrid,
    *,
    rounds: int,
    timeout: float,
) -> SchemeResult:
    """Train over a grid and close it."""
    try:
        with acting_as_server(grid.run_id):
            return strategy.start(grid, federation.arrays(), num_rounds=rounds, timeout=timeout)
    finally:
        grid.close()


def ledger_entries(
    federation: SmallFederation, state: Path
) -> Iterator[tuple[str, str, int, Entry]]:
    """Yield all entries of the clients' ledgers: client, phase on the wire, round, entry."""
    for path in state.glob("*.ledger"):
        for entry in Ledger(path, data_set=path.stem).entries():
            phase = asked_in(federation, entry.question.phase)
            server_round = 0 if phase in federation.once else entry.question.server_round
            yield path.stem, phase, server_round, entry


def asked_in(federation: SmallFederation, phase: str) -> str:
    """Return the phase on the wire of a charge, by its phase in a ledger or on a card."""
    return federation.charged.get(phase.partition(" ")[0], phase)


def _charged_as(federation: SmallFederation, key: AnswerKey) -> AnswerKey:
    """Return the key under which an answer is charged."""
    client, phase, *_ = key
    return (client, phase, 0, 0) if phase in federation.once else key


@contextmanager
def warnings_to(keep: Callable[[str], object]) -> Iterator[None]:
    """Send the warnings of the library to a function, and none to the screen."""

    class Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            keep(record.getMessage())

    logger, handler = logging.getLogger("flwr.privacy"), Keeping(logging.WARNING)
    propagated, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagated
