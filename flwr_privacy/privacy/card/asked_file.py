"""Reads and writes ``asked.json``: the requests that a card does not have yet, and their costs."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from flwr_privacy.accounting import Charge
from flwr_privacy.errors import DataError

__all__ = ["Asked", "AskedFile", "charge_in", "text_of"]

Asked = dict[str, dict[str, Charge]]
"""What a question costs each client that it was put to, by `text_of` the charge's name."""


def text_of(phase: str, server_round: int, request: int) -> str:
    """Return the name of a charge as the file has it."""
    return f"{phase} {server_round} {request}"


def charge_in(text: str) -> tuple[str, int, int]:
    """Return phase, round and request of a charge from its name in the file.

    Examples
    --------
    >>> charge_in(text_of("sealed for 0", 3, 1))
    ('sealed for 0', 3, 1)
    """
    phase, server_round, request = text.rsplit(" ", 2)
    return phase, int(server_round), int(request)


@dataclass(frozen=True, kw_only=True)
class AskedFile:
    """The content of the file.

    Parameters
    ----------
    experiment_id : str
        Whose requests they are.
    asked : mapping
        What each question costs each client.
    """

    experiment_id: str
    asked: Mapping[str, Mapping[str, Charge]] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the content as text."""
        asked = {
            name: {client: charge.to_dict() for client, charge in sorted(costs.items())}
            for name, costs in self.asked.items()
        }
        return json.dumps({"experiment_id": self.experiment_id, "asked": asked})

    @classmethod
    def from_json(cls, content: str | bytes) -> "AskedFile":
        """Read the content.

        Raises
        ------
        DataError
            If it is damaged.
        """
        try:
            document = json.loads(content)
            asked = {
                question: {client: Charge.from_dict(charge) for client, charge in costs.items()}
                for question, costs in document["asked"].items()
            }
            return cls(experiment_id=document["experiment_id"], asked=asked)
        except (ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
            raise DataError(f"is damaged ({error})") from error
