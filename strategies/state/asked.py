"""Writes the cost of every request to disk before it is sent, in case the run is interrupted.

Nobody knows then which of the answers were sent, so each of them is charged: by the run that goes
on, when it asks the same question again, or when it ends without.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from flwr_privacy.accounting import Charge
from flwr_privacy.errors import CheckpointError, DataError
from flwr_privacy.privacy.card.asked_file import Asked, AskedFile
from flwr_privacy.privacy.card.folder import ASKED
from flwr_privacy.wire.files import write_text

from .run_files import content_of

__all__ = ["AskedNotes"]


class AskedNotes:
    """The requests since the last checkpoint, with their costs.

    Parameters
    ----------
    folder : path, optional
        Folder for the note; by default it is in memory alone.

    Attributes
    ----------
    durable : bool
        Whether a note outlives a power cut.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / ASKED
        self.durable = True
        self._asked: Asked = {}
        self._before: Asked = {}  # by a run that broke off

    def take_up(self, experiment_id: str, wanted: Callable[[str, str], bool]) -> None:
        """Read the notes of an earlier run of the experiment.

        Parameters
        ----------
        experiment_id : str
            Identity of the experiment.
        wanted : callable
            Tells by the names of a charge and its client whether the checkpoint lacks it: the note
            may be older than the checkpoint.

        Raises
        ------
        CheckpointError
            If the note is damaged or cannot be read.
        """
        noted = self._read(experiment_id)
        lacking = {
            name: {client: charge for client, charge in costs.items() if wanted(name, client)}
            for name, costs in noted.items()
        }
        self._before = {name: costs for name, costs in lacking.items() if costs}
        self._asked = {name: dict(costs) for name, costs in self._before.items()}

    def note(self, experiment_id: str, asked: Mapping[str, Mapping[str, Charge]]) -> None:
        """Record what a request will cost each client, by the names of the charges."""
        for name, costs in asked.items():
            self._asked.setdefault(name, {}).update(costs)
        if self._path is not None:
            noted = AskedFile(experiment_id=experiment_id, asked=self._asked)
            write_text(self._path, noted.to_json(), durable=self.durable)

    def before(self, name: str) -> set[str]:
        """Return the clients that an interrupted run asked for the same charge; once.

        Nobody knows which of them declined. A resumed round asks the same question, perhaps not the
        same clients.
        """
        return set(self._before.pop(name, {}))

    @property
    def left(self) -> Asked:
        """The requests of an interrupted run that this run has not sent again."""
        return self._before

    def broken_off(self) -> Asked:
        """Return the requests of an interrupted run that this run has not sent again; once."""
        left, self._before = self._before, {}
        return left

    @property
    def questions(self) -> list[str]:
        """The names of the charges since the last checkpoint; the next checkpoint has them."""
        return sorted(self._asked)

    def clear(self) -> None:
        """Clear the notes, because a checkpoint has the charges."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        self._asked, self._before = {}, {}

    def _read(self, experiment_id: str) -> Asked:
        content = None if self._path is None else content_of(self._path)
        if content is None:
            return {}
        try:
            noted = AskedFile.from_json(content)
        except DataError as error:
            raise CheckpointError(f"{self._path} {error}") from error
        if noted.experiment_id != experiment_id:
            return {}  # the folder was used before, and its run came to no checkpoint
        return {question: dict(costs) for question, costs in noted.asked.items()}
