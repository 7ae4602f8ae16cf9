"""The privacy card in the run folder has what the ledgers have, wherever the server was killed."""

from pathlib import Path
from typing import Any

import pytest
from apps import message_app, run_strategy
from conformance import Killed

from flwr_privacy.card import PrivacyCard
from flwr_privacy.clients import UDPClient, as_mod
from flwr_privacy.ledger import Ledger
from flwr_privacy.strategies import UDP, checkpoint
from flwr_privacy.strategies.experiment import CARD, Experiment

ROUNDS = 2
save, keep_card, end_round = checkpoint.save, Experiment.keep_card, Experiment.end_round


def before_the_card(self: Experiment, *given: Any) -> None:
    raise Killed


def after_the_card(self: Experiment, *given: Any) -> None:
    keep_card(self, *given)
    raise Killed


def after_the_checkpoint(*given: Any) -> None:
    save(*given)
    raise Killed


def after_the_round(self: Experiment, *given: Any, **named: Any) -> None:
    end_round(self, *given, **named)
    raise Killed


MOMENTS = {
    "before the card": (Experiment, "keep_card", before_the_card),
    "before the checkpoint": (Experiment, "keep_card", after_the_card),
    "before the note is removed": (checkpoint, "save", after_the_checkpoint),
    "after the round": (Experiment, "end_round", after_the_round),
}


def charges(folder: Path) -> dict[str, list[Any]]:
    paths = [folder / "state" / f"{client}.ledger" for client in range(4)]
    return {
        path.stem: [entry.charge for entry in Ledger(path, data_set=path.stem).entries()]
        for path in paths
    }


def train(folder: Path, *, stops: bool = False, **options: Any) -> Any:
    class Stopping(UDP):
        def stop(self) -> str:
            return "enough" if stops else super().stop()

    strategy = Stopping(seed=1, experiment_id="e", run_dir=folder / "run", **options)
    return run_strategy(
        strategy, message_app([as_mod(UDPClient)]), num_rounds=ROUNDS, state=folder / "state"
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("state", "run"):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("killed_in", [1, ROUNDS])
@pytest.mark.parametrize("moment", list(MOMENTS))
def test_a_killed_server_that_goes_on_ends_with_the_card_of_all_that_left(
    folder: Path, moment: str, killed_in: int, stops: bool
) -> None:
    """Also where the run that goes on trains nothing: it was the last round, or it stops."""
    owner, name, dying = MOMENTS[moment]
    with pytest.MonkeyPatch.context() as patch:

        def arm(line: dict[str, Any]) -> None:
            if line["round"] == killed_in - 1:
                patch.setattr(owner, name, dying)

        with pytest.raises(Killed):
            train(folder, on_round=arm)
    result = train(folder, resume=True, stops=stops)
    card = PrivacyCard.from_json((folder / "run" / CARD).read_bytes())
    assert card.charges() == charges(folder)
    assert len(card.charges()["0"]) == (killed_in if stops else ROUNDS)
    assert card.verify()
    assert result.guarantee.spent == card.guarantee.spent
