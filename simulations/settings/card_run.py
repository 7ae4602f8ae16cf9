"""Reads a run of an app of the user's own from what its strategy left: a card and its rounds."""

from typing import Any

from flwr_privacy.errors import DataError
from flwr_privacy.privacy.card import PrivacyCard

from .run_folder import RunFolder
from .run_settings import Settings

__all__ = ["CardRun", "opened"]


class CardRun(RunFolder):
    """The folder that a strategy makes where it has no run folder: it has no settings file."""

    @property
    def settings(self) -> Settings:
        """What the card says: the scheme, the app in place of a task, and the rounds asked for."""
        lines = self.rounds()
        guarantee, described = self._card.guarantee, self._card.described
        rounds = int(lines[0]["rounds"]) if lines else 1
        return Settings(scheme=guarantee.scheme, task=described.name or "an app", rounds=rounds)

    @property
    def told(self) -> dict[str, Any]:
        """The strategy's options that are not its defaults."""
        return dict(self._card.described.settings)

    @property
    def summary(self) -> dict[str, Any]:
        """What is known of the run without a summary file."""
        lines, described = self.rounds(), self._card.described
        over = bool(lines) and lines[-1]["round"] >= lines[-1]["rounds"]
        return {
            "status": "completed" if over else "running",
            "engine": None,
            "experiment_id": self._card.experiment_id,
            "started": described.began or None,
            "finished": None,
            "versions": described.versions,
            "nodes": len(self._card.charges()) or None,
            "error": None,
        }

    @property
    def _card(self) -> PrivacyCard:
        card = self.card
        if card is None:
            raise DataError(f"{self.card_path}: there is no card")
        return card


def opened(path: Any) -> RunFolder:
    """Open the folder of a run, or the folder of the card that a run left.

    Raises
    ------
    InvalidParameterError
        If it is neither.
    """
    run = CardRun(path)
    if run.card_path.is_file() and not run.settings_path.exists():
        return run
    return RunFolder.open(path)
