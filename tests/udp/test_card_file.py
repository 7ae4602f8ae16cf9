"""The privacy card in the run folder has what the ledgers have, wherever the server was killed."""

from pathlib import Path
from typing import Any

import pytest
from apps import make, message_app, run_strategy
from conformance import Killed

from flwr_privacy.clients import UDPClient, as_mod
from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.privacy.card.folder import CARD
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.strategies import UDP
from flwr_privacy.strategies.state import checkpoint
from flwr_privacy.strategies.state.experiment import Experiment

ROUNDS = 2
save, keep_card = checkpoint.save, Experiment.keep_card
end_training, end_round = Experiment.end_training, Experiment.end_round


def before_the_card(self: Experiment, *given: Any) -> None:
    raise Killed


def after_the_card(self: Experiment, *given: Any) -> None:
    keep_card(self, *given)
    raise Killed


def after_the_checkpoint(*given: Any, **named: Any) -> None:
    save(*given, **named)
    raise Killed


def after_the_training(self: Experiment, *given: Any, **named: Any) -> None:
    end_training(self, *given, **named)
    raise Killed


def after_the_round(self: Experiment, *given: Any, **named: Any) -> None:
    end_round(self, *given, **named)
    raise Killed


MOMENTS = {
    "before the card": (Experiment, "keep_card", before_the_card),
    "before the checkpoint": (Experiment, "keep_card", after_the_card),
    "before the note is removed": (checkpoint, "save", after_the_checkpoint),
}
AFTER = {
    "training": (Experiment, "end_training", after_the_training),
    "round": (Experiment, "end_round", after_the_round),
}


def charges(folder: Path) -> dict[str, list[Any]]:
    paths = [folder / "state" / f"{client}.ledger" for client in range(4)]
    return {
        path.stem: [entry.charge for entry in Ledger(path, data_set=path.stem).entries()]
        for path in paths
    }


def train(folder: Path, *, stops: bool = False, show: Any = None, **options: Any) -> Any:
    class Stopping(UDP):
        def stop(self) -> str:
            return "enough" if stops else super().stop()

    strategy = make(Stopping, seed=1, experiment_id="e", run_dir=folder / "run", **options)
    app = message_app([as_mod(UDPClient)])
    state = folder / "state"
    return run_strategy(strategy, app, num_rounds=ROUNDS, state=state, evaluate_fn=show)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("state", "run"):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("killed_in", [1, ROUNDS])
@pytest.mark.parametrize("moment", [*MOMENTS, "after"])
@pytest.mark.parametrize(
    ("end", "shown"), [("round", False), ("training", True), ("round", True)], ids=str
)
def test_a_killed_server_that_goes_on_ends_with_the_card_of_all_that_left(
    folder: Path, end: str, shown: bool, moment: str, killed_in: int, stops: bool
) -> None:
    """Also where the run that goes on trains nothing: it was the last round, or it stops.

    A model that is shown has a checkpoint before, at the end of its training.
    """
    owner, name, dying = MOMENTS.get(moment, AFTER[end])
    seen: list[int] = []

    def show(server_round: int, arrays: Any) -> None:
        charged = PrivacyCard.from_json((folder / "run" / CARD).read_bytes()) if seen else None
        assert charged is None or len(charged.charges()["0"]) == server_round
        seen.append(server_round)

    with pytest.MonkeyPatch.context() as patch:

        def after_its_training(server_round: int, arrays: Any) -> None:
            show(server_round, arrays)
            if end == "round" and server_round == killed_in:
                patch.setattr(owner, name, dying)

        def after_the_one_before(line: dict[str, Any]) -> None:
            if not (shown and end == "round") and line["round"] == killed_in - 1:
                patch.setattr(owner, name, dying)

        with pytest.raises(Killed):
            train(folder, show=after_its_training if shown else None, on_round=after_the_one_before)
    result = train(folder, resume=True, stops=stops, show=show if shown else None)
    card = PrivacyCard.from_json((folder / "run" / CARD).read_bytes())
    assert card.charges() == charges(folder)
    assert len(card.charges()["0"]) == (killed_in if stops else ROUNDS)
    assert card.verify()
    # Who answered is lost with the books of a round that has no checkpoint and is not asked again.
    lost = moment in ("before the card", "before the checkpoint") and (end, shown) != (
        "round",
        True,
    )
    assert card.answers().unanswered == (4 if lost and stops else 0)
    assert card.answers().charged == 4 * len(card.charges()["0"])
    assert result.guarantee.spent == card.guarantee.spent
    if shown and not stops:
        lost = end == "round" and moment in ("before the card", "before the checkpoint")
        assert seen == sorted([*range(ROUNDS + 1), *([killed_in] if lost else [])])
