"""Trains for many rounds with random faults, then checks memory, files and ledgers."""

import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flwr_privacy.errors import FlwrPrivacyError, check_choice, check_integer
from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.privacy.card.folder import CARD
from flwr_privacy.privacy.ledger import Entry
from flwr_privacy.strategies import SchemeStrategy
from flwr_privacy.strategies.state.experiment import CHECKPOINT

from .endurance_checks import Account, Gauge, Held, Mark, Place, account, growth, held, traced
from .endurance_faults import DEADLINE, RATE, FaultPlan, Journal, RestlessGrid
from .federations import FEDERATIONS, SEED, SmallFederation
from .grid import FAULTS, Killed
from .training import asked_in, ledger_entries, start, warnings_to

__all__ = ["LEAST_ROUNDS", "Endured", "endure", "kinds_of"]

LEAST_ROUNDS = 20  # below it there is no growth to measure
_LARGEST_GROWTH = 256  # bytes of a round, beside history and charges
_SLACK = (
    2**15
)  # bytes that may be new in a part of the rounds: Python keeps freed objects for reuse

_TIMEOUT = 60.0  # seconds that nodes may take to say who they are
_WARM_UP = 3  # rounds before anything is measured: what is loaded once is there then
_RESTARTS = ("restarted", "moved", "node lost")

_COSTLY: dict[str, tuple[str, ...]] = {
    "udp": ("train",),
    "udp-losses": ("train", "evaluate"),
    "central-dp": ("train",),
    "acfl": ("setup", "train"),
    "acfl-sum": ("setup", "train"),
    "m2fdp": ("train", "aggregate"),
}
"""Phases whose answers cost their client something; the other schemes guarantee no epsilon."""

_KEYS = ("fedavg-sum", "central-dp", "mspdq", "acfl-sum", "fedvs")
_FATAL = dict.fromkeys((*_KEYS, *_COSTLY), ("node lost",))
"""Faults after which a client is out for good: the others know it by the key that it has lost, or
the server knows the charges that its ledger has lost."""


def kinds_of(scheme: str) -> tuple[str, ...]:
    """Return the faults that a training of a scheme survives repeatedly."""
    check_choice("scheme", scheme, FEDERATIONS)
    without = (*_FATAL.get(scheme, ()), *(() if scheme in _COSTLY else ("disk full",)))
    return tuple(kind for kind in FAULTS if kind not in without)


# -- A long training -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Endured:
    """The result of a long training.

    Parameters
    ----------
    title : str
        What the page calls the scheme.
    rounds, seed : int
        Its rounds, and the root of its faults.
    faults : Counter
        How often each fault happened.
    skipped : int
        Rounds that were given up.
    fewer : int
        Other rounds that fewer clients were averaged in than in the fullest.
    marks : tuple of Mark
        What there was after each part of the rounds.
    before, after : Held
        What the process held.
    accounts : tuple of Account
        Each client's ledger beside what it released.
    wrong : tuple of str
        Everything that must not be; empty if all is well.
    """

    title: str
    rounds: int
    seed: int
    faults: Counter[str]
    skipped: int
    fewer: int
    marks: tuple[Mark, ...]
    before: Held
    after: Held
    accounts: tuple[Account, ...]
    wrong: tuple[str, ...]

    @property
    def growth(self) -> float:
        """Bytes by which a round grows what is neither history nor charges."""
        return growth(self.marks)

    @property
    def more_files(self) -> int:
        """By how many the files grow from the first part of the rounds to the end."""
        return self.marks[-1].files - self.marks[0].files if self.marks else 0

    @property
    def restarts(self) -> int:
        """How often a node was restarted."""
        return sum(self.faults[kind] for kind in _RESTARTS)


def endure(
    scheme: str,
    *,
    rounds: int = 500,
    seed: int = 1,
    rate: float = RATE,
    kinds: Sequence[str] | None = None,
    federation: SmallFederation | None = None,
) -> Endured:
    """Train a scheme's small federation for many rounds with faults, and check the result.

    Parameters
    ----------
    scheme : str
        A key of `FEDERATIONS`.
    rounds : int, default 500
        Rounds, at least 20.
    seed : int, default 1
        Root of the faults.
    rate : float, default 1/3
        Share of the rounds that have one.
    kinds : sequence of str, optional
        Faults to choose from; by default all that the scheme can outlive.
    federation : SmallFederation, optional
        Another federation than that of the scheme.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """
    check_choice("scheme", scheme, FEDERATIONS)
    check_integer("rounds", rounds, minimum=LEAST_ROUNDS)
    plan = FaultPlan(kinds=tuple(kinds or kinds_of(scheme)), seed=seed, rate=rate)
    chosen = federation or FEDERATIONS[scheme]
    with tempfile.TemporaryDirectory(prefix="flwr-privacy-") as folder, warnings_to(str), traced():
        calm = FaultPlan(kinds=plan.kinds, seed=seed, rate=0)
        warm_up = _Training(scheme, chosen, Path(folder, "warm-up"), plan=calm, rounds=_WARM_UP)
        warm_up.carry_out()
        before = held()
        training = _Training(scheme, chosen, Path(folder, "training"), plan=plan, rounds=rounds)
        training.carry_out()
        after = held()
        accounts, wrong = training.audit()
    found = Endured(
        title=chosen.title,
        rounds=rounds,
        seed=seed,
        faults=plan.happened,
        skipped=sum(bool(line.get("skipped")) for line in training.history[1:]),
        fewer=training.fewer(),
        marks=training.gauge.marks(),
        before=before,
        after=after,
        accounts=tuple(accounts),
        wrong=(),
    )
    wrong += before.leaked(after)
    part = max(1, rounds // len(found.marks)) if found.marks else rounds
    if found.growth > _LARGEST_GROWTH + _SLACK / part:
        wrong.append(f"memory grows by {found.growth:.0f} bytes a round beside history and charges")
    if found.more_files > 0:
        wrong.append(f"files of nodes and server grow by {found.more_files}")
    return replace(found, wrong=tuple(wrong))


class _Training:
    """One training in a folder of its own; it goes on whenever the server is killed."""

    def __init__(
        self,
        scheme: str,
        federation: SmallFederation,
        folder: Path,
        *,
        plan: FaultPlan,
        rounds: int,
    ) -> None:
        names = ("nodes", "state", "run", "temporary")
        self._nodes, self._state, self._run, self._temporary = (folder / name for name in names)
        for path in (self._nodes, self._state, self._run, self._temporary):
            path.mkdir(parents=True)
        more: dict[str, Any] = {"rounds": rounds} if "rounds" in federation.options else {}
        if "schedule" in federation.options:
            more["patience"] = rounds  # discounting ends the training long before
        self._options = {**more, "run_dir": self._run, "deadline": DEADLINE}
        self._scheme, self._federation, self._plan, self._rounds = scheme, federation, plan, rounds
        self._witness = Journal(within=federation.within, path=folder / "witness.jsonl")
        self._app = federation.app(self._witness.watch(federation.client))
        self._strategy: SchemeStrategy | None = None
        self.gauge = Gauge(rounds=rounds - 1, folder=folder, history=self._lines)
        self._ended: int | None = None  # a round that was not measured yet
        self.history: list[dict[str, Any]] = []
        self._error = ""

    def carry_out(self) -> None:
        """Train to the end, or to an error."""
        nodes = self._federation.nodes(self._nodes)
        with _temporary_files_in(self._temporary):
            try:
                while not self._survives(nodes):
                    continue
            except FlwrPrivacyError as error:
                self._error = f"the training ended with {type(error).__name__}: {error}"
        self._strategy = None

    def _lines(self) -> tuple[object, ...]:
        """Return what has a line for each round."""
        if self._strategy is None:
            return ()
        return self._strategy.experiment.history, self._strategy.releases

    def _survives(self, nodes: list[dict[str, Any]]) -> bool:
        """Train until the end or until the server is killed; tell which."""
        strategy = self._federation.build(
            resume=(self._run / CHECKPOINT).exists(), on_round=self._end, **self._options
        )
        self._strategy = strategy
        grid = RestlessGrid(
            self._app,
            nodes,
            plan=self._plan,
            between=self._measure,
            state=self._state,
            insecure_seed=SEED,
            forgotten=self._witness.forget,
        )
        try:
            result = start(self._federation, strategy, grid, rounds=self._rounds, timeout=_TIMEOUT)
        except Killed:
            return False
        self.history = result.history
        return True

    def _end(self, line: dict[str, Any]) -> None:
        self._ended = line["round"]

    def _measure(self) -> None:
        """Measure a round that has ended; now, as its checkpoint is in memory while it is told."""
        if self._ended is not None:
            self.gauge.look(self._ended)
        self._ended = None

    def fewer(self) -> int:
        """Return in how many rounds fewer clients were averaged than in the fullest."""
        accumulated = [
            line.get("accumulated", 0) for line in self.history[1:] if not line.get("skipped")
        ]
        return sum(count < max(accumulated) for count in accumulated)

    def audit(self) -> tuple[list[Account], list[str]]:
        """Return the accounts of all clients, and what must not be."""
        if self._error:
            return [], [self._error]
        wrong = [f"left among temporary files: {p.name}" for p in self._temporary.iterdir()]
        for path in sorted(self._run.parent.rglob("*")):
            if path.suffix == ".new" or (path.parent == self._run and path.name.startswith(".")):
                wrong.append(f"left half written: {path.relative_to(self._run.parent)}")
        if len(self.history) != self._rounds + 1:
            wrong.append(f"the training ended after {len(self.history) - 1} rounds")
        self._witness.read()
        card = PrivacyCard.from_json((self._run / CARD).read_bytes())
        try:
            card.verify()
        except FlwrPrivacyError as error:
            wrong.append(f"the card: {error}")
        accounts = list(self._accounts(card))
        return accounts, wrong + [line for mine in accounts for line in mine.wrong]

    def _accounts(self, card: PrivacyCard) -> Iterator[Account]:
        asked = [replace(r, phase=asked_in(self._federation, r.phase)) for r in card.releases]
        card = replace(card, releases=asked)
        entries: dict[str, dict[Place, list[Entry]]] = defaultdict(lambda: defaultdict(list))
        for client, phase, server_round, entry in ledger_entries(self._federation, self._state):
            entries[client][phase, server_round].append(entry)
        released: dict[str, dict[Place, int]] = defaultdict(lambda: defaultdict(int))
        for (client, phase, server_round, _), answers in self._witness.answers.items():
            if phase in _COSTLY.get(self._scheme, ()):
                place = phase, 0 if phase in self._federation.once else server_round
                released[client][place] += len(answers)
        tree = self._federation.options.get("tree")
        for client in sorted({*entries, *released}):
            mine = released[client]
            device = tree is None or client in tree.devices
            sealed = tree is not None and device and tree.boundary(client) != client
            if tree is not None and sealed:  # what left is what its last trusted aggregator sent
                left = released[tree.boundary(client)]
                mine = {
                    ("train", r): left["aggregate", r] for _, r in mine if ("aggregate", r) in left
                }
            yield account(
                client,
                mine,
                entries[client],
                card,
                on_card=device,
                spare=sealed,
            )


@contextmanager
def _temporary_files_in(folder: Path) -> Iterator[None]:
    """Have temporary files and folders be made in a folder, where what is left of them shows."""
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before
