"""A checkpoint that is older than its folder is refused; given up rounds stay on the card."""

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from apps import make, message_app, record, run_strategy

from flwr_privacy.accounting import Charge
from flwr_privacy.clients import UDPClient, as_mod
from flwr_privacy.errors import CheckpointError, InvalidParameterError
from flwr_privacy.privacy.card import CardRelease, PrivacyCard
from flwr_privacy.privacy.guarantee import Guarantee
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.strategies import UDP, LoopOptions
from flwr_privacy.strategies.state.experiment import Experiment

NAMES = "abcd"
NODES = [{"client-id": name, "partition-id": i} for i, name in enumerate(NAMES)]
ROUNDS = 4


class Run:
    """A training under UDP in a folder of its own, whose checkpoints are backed up."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.backups = folder / "run", folder / "backups"
        self.state = folder / "state"
        for path in (self.folder, self.backups, self.state):
            path.mkdir()
        self.strategy: Any = None

    def train(self, rounds: int = ROUNDS, **options: Any) -> Any:
        self.strategy = make(
            UDP,
            **{"seed": 1, "experiment_id": "e", "noise": "gdp", "rounds": 20, **options},
            fraction_evaluate=0.0,
            run_dir=self.folder,
            on_round=self._back_up,
        )
        app = message_app([as_mod(UDPClient)])
        return run_strategy(self.strategy, app, nodes=NODES, num_rounds=rounds, state=self.state)

    def _back_up(self, line: dict[str, Any]) -> None:
        shutil.copytree(self.folder, self.backups / str(line["round"]))

    def restore(self, name: str, server_round: int) -> None:
        shutil.copy(self.backups / str(server_round) / name, self.folder / name)

    def charges(self) -> dict[str, list[Any]]:
        """Return what the nodes' ledgers hold."""
        ledgers = {n: Ledger(self.state / f"{n}.ledger", data_set=n) for n in NAMES}
        return {n: [entry.charge for entry in ledger.entries()] for n, ledger in ledgers.items()}

    def card(self) -> PrivacyCard:
        return PrivacyCard.from_json((self.folder / "privacy-card.json").read_bytes())

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").open()]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a run of four rounds that has the checkpoint of round 2."""
    made = Run(tmp_path)
    made.train()
    made.restore("checkpoint.bin", 2)
    return made


def test_an_older_checkpoint_is_refused_and_nothing_is_asked_or_lost(run: Run) -> None:
    before = {path: path.read_bytes() for path in run.folder.iterdir()}
    with pytest.raises(CheckpointError, match="shows rounds 3 to 4, which it lacks"):
        run.train(resume=True)
    assert {path: path.read_bytes() for path in run.folder.iterdir()} == before
    assert [len(own) for own in run.charges().values()] == [ROUNDS] * 4


@pytest.mark.parametrize("shown_by", ["metrics.jsonl", "privacy-card.json"])
def test_either_file_of_the_folder_shows_it(run: Run, shown_by: str) -> None:
    for name in {"metrics.jsonl", "privacy-card.json"} - {shown_by}:
        run.restore(name, 2)
    with pytest.raises(CheckpointError, match="shows rounds 3 to 4"):
        run.train(resume=True)


def test_rounds_that_are_given_up_stay_on_the_card(run: Run) -> None:
    """The training goes on after them, with charges of its own for questions of its own."""
    result = run.train(rounds=6, resume=True, accept_lost_rounds=True)
    assert run.card().charges() == run.charges()
    assert [len(own) for own in run.charges().values()] == [6] * 4
    run.card().verify()
    assert result.history == run.lines()
    assert [(line["round"], line.get("lost", False)) for line in run.lines()] == [
        *((number, False) for number in range(3)),
        *((number, True) for number in (3, 4)),
        *((number, False) for number in (5, 6)),
    ]
    assert run.lines()[5]["refused"] == {}


def test_where_no_round_is_left_the_card_stays_as_it_was(run: Run) -> None:
    run.train(resume=True, accept_lost_rounds=True)
    assert run.card().charges() == run.charges()


def test_after_rounds_that_were_given_up_it_resumes_as_ever(run: Run) -> None:
    run.train(rounds=6, resume=True, accept_lost_rounds=True)
    run.train(rounds=7, resume=True)
    assert run.card().charges() == run.charges()
    assert [len(own) for own in run.charges().values()] == [7] * 4


def test_what_was_asked_in_a_round_that_broke_off_is_charged_too(run: Run) -> None:
    """Once: the note of round 4 is of a kill between card and checkpoint. Nor is the number of
    round 5 used again: the nodes were asked about another model."""
    charge = run.card().releases[-1].charge.to_dict()
    note = {"experiment_id": "e", "asked": {q: {"a": charge} for q in ("train 4 0", "train 5 0")}}
    (run.folder / "asked.json").write_text(json.dumps(note))
    run.train(rounds=6, resume=True, accept_lost_rounds=True)
    run.card().verify()
    assert len(run.card().charges()["a"]) == ROUNDS + 2  # 1 to 4, 5 that broke off, and 6
    assert [line["round"] for line in run.lines()] == [0, 1, 2, 3, 4, 6]


def test_a_card_that_is_as_old_as_the_checkpoint_is_not_enough(run: Run) -> None:
    run.restore("privacy-card.json", 3)
    with pytest.raises(CheckpointError, match="it has 12 charges of 16"):
        run.train(rounds=6, resume=True, accept_lost_rounds=True)
    (run.folder / "privacy-card.json").unlink()
    with pytest.raises(CheckpointError, match="it has 8 charges of 16"):
        run.train(rounds=6, resume=True, accept_lost_rounds=True)


@pytest.mark.parametrize("shown_by", ["metrics.jsonl", "privacy-card.json"])
def test_without_any_checkpoint_an_experiment_does_not_begin_again(run: Run, shown_by: str) -> None:
    (run.folder / "checkpoint.bin").unlink()
    for name in {"metrics.jsonl", "privacy-card.json"} - {shown_by}:
        (run.folder / name).unlink()
    before = {path: path.read_bytes() for path in run.folder.iterdir()}
    with pytest.raises(CheckpointError, match="shows that round 4 is over"):
        run.train()
    assert {path: path.read_bytes() for path in run.folder.iterdir()} == before
    assert [len(own) for own in run.charges().values()] == [ROUNDS] * 4


def test_killed_between_its_first_card_and_its_first_checkpoint_it_begins_again(
    tmp_path: Path,
) -> None:
    """What the card shows is still noted as asked."""
    run = Run(tmp_path)
    experiment = Experiment("udp", LoopOptions(experiment_id="e", run_dir=run.folder))
    experiment.begin(record())
    charge = Charge(neighbours="replace_one", noise_multiplier=1.0)
    experiment.asked.note("e", {"setup 0 0": {"a": charge}})
    release = CardRelease(
        phase="setup", server_round=0, request=0, charge=charge, clients=("a",), unanswered=()
    )
    promise = Guarantee(scheme="udp", protects="nothing", adversary="nobody")
    experiment.keep_card(PrivacyCard(experiment_id="e", guarantee=promise, releases=[release]))
    run.train()
    assert len(run.card().charges()["a"]) == ROUNDS + 1


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("name", ["asked.json", "metrics.jsonl", "privacy-card.json"])
def test_a_file_that_cannot_be_read_is_said(run: Run, name: str, resume: bool) -> None:
    """Not taken for one that is not there, either: a link to itself."""
    if not resume:
        (run.folder / "checkpoint.bin").unlink()
    path = run.folder / name
    path.unlink(missing_ok=True)
    path.symlink_to(name)
    with pytest.raises(CheckpointError, match=rf"{name} cannot be read: Too many levels"):
        run.train(resume=resume)


@pytest.mark.parametrize("name", ["asked.json", "metrics.jsonl", "privacy-card.json"])
def test_a_file_without_rights_is_said(
    run: Run, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.folder / "asked.json").write_text('{"experiment_id": "e", "asked": {}}')
    read = Path.read_bytes

    def refused(path: Path) -> bytes:
        if path.name == name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refused)
    with pytest.raises(CheckpointError, match=rf"{name} cannot be read: Permission denied"):
        run.train(resume=True)


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_folder_that_may_not_be_searched_is_said(
    run: Run, resume: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Path.is_dir

    def refused(path: Path) -> bool:
        if path.parent == run.folder:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return plain(path)

    monkeypatch.setattr(Path, "is_dir", refused)
    allowed = r"a folder in which this user may use checkpoint.bin \(Permission denied\)"
    with pytest.raises(InvalidParameterError, match=f"run_dir = .*: expected {allowed}"):
        run.train(resume=resume)


def test_damaged_files_are_said(run: Run) -> None:
    (run.folder / "privacy-card.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"privacy-card\.json is damaged"):
        run.train(resume=True)
    (run.folder / "privacy-card.json").unlink()
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write("[]\n")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl is damaged: its line 6"):
        run.train(resume=True)


def test_a_card_one_round_ahead_is_that_of_a_kill(tmp_path: Path) -> None:
    """It is written before the checkpoint; what was asked is still noted then."""
    run = Run(tmp_path)
    run.train(rounds=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flwr_privacy.strategies.state.experiment.checkpoint.save", _killed)
        with pytest.raises(KeyboardInterrupt):
            run.train(rounds=3, resume=True)
    assert len(run.card().releases) == 3
    run.train(rounds=3, resume=True)
    assert run.card().charges() == run.charges()


def _killed(*_: Any, **options: Any) -> None:
    raise KeyboardInterrupt


def test_it_is_an_option_of_a_resume() -> None:
    with pytest.raises(InvalidParameterError, match="accept_lost_rounds = True: expected resume"):
        LoopOptions(accept_lost_rounds=True)
