"""The record ``flwr-privacy.cohort`` of a message to or from a node that runs several clients."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr_privacy.errors import ProtocolError

from . import fields
from .message import COHORT, Fields

__all__ = ["EACH", "ROWS", "SUM", "Cohort", "CohortAnswer"]

SUM, EACH = "sum", "each"
"""How a node answers for its clients: one accumulator, or every reply."""

ROWS = "@*"
"""The end of the name of a record that has a row for each client in `CohortAnswer.answered`."""

_MOST_BYTES = 2**50  # of one answer


@dataclass(frozen=True, kw_only=True)
class Cohort:
    """The request to a node that runs several clients.

    Parameters
    ----------
    clients : list of str
        Identities to run: numbers from 0, as the partitions.
    late : list of str
        Those whose answer is computed but comes too late to be used.
    size : int
        Number of clients of the federation.
    reply : {"sum", "each"}
        Whether to answer with one accumulator or with every reply.
    weighted_by : str
        Name of the metric that is a reply's weight.
    groups : list of str, optional
        The group of each client, in a scheme that sums by groups: a record ``name@@group`` goes to
        the clients of that group.
    """

    clients: list[str]
    late: list[str]
    size: int
    reply: str
    weighted_by: str
    groups: list[str] = field(default_factory=list)

    @property
    def group_of(self) -> dict[str, str]:
        """The group of each client; empty if there are no groups."""
        return dict(zip(self.clients, self.groups, strict=False))

    def write(self) -> Fields:
        """Return the record."""
        return fields.write(self)

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> "Cohort":
        """Read the record.

        Raises
        ------
        ProtocolError
            If an entry is missing or ill-typed, or the clients are not distinct numbers below
            `size` in their one decimal form: a second name for a client would be a second client.
        """
        cohort = fields.read(cls, record)
        clients, size, groups = cohort.clients, cohort.size, cohort.groups
        distinct = len(set(clients)) == len(clients) > 0
        if not distinct or not all(_is_number_below(client, size) for client in clients):
            raise ProtocolError(
                f"{COHORT}: the clients are not distinct numbers from 0 to {size - 1}"
            )
        if cohort.reply not in (SUM, EACH) or not set(cohort.late) <= set(clients):
            raise ProtocolError(f"{COHORT}: unknown 'reply', or somebody late who is not asked")
        if groups and len(groups) != len(clients):
            raise ProtocolError(f"{COHORT}: {len(groups)} groups for {len(clients)} clients")
        return cohort


@dataclass(frozen=True, kw_only=True)
class CohortAnswer:
    """The outcome of each client of a cohort.

    Parameters
    ----------
    answered, late : list of str
        Clients whose reply is in the answer, and those who were too late.
    refused_clients, refused_reasons, refused_details : list of str
        Client, reason and detail of each reply that is not used.
    bytes_up : int
        Payload of the clients' replies.
    keepers : list of str
        Clients whose own code keeps something on the node between messages.
    ledger_counts, ledger_heads : list of int and of bytes, optional
        Of the clients in `answered`, then those in `late` and in `refused_clients`: number of
        charges of the experiment, and the head of their chain (empty of a client that shows none).
        All of them or none.
    """

    answered: list[str]
    late: list[str]
    refused_clients: list[str]
    refused_reasons: list[str]
    refused_details: list[str]
    bytes_up: int
    keepers: list[str]
    ledger_counts: list[int] = field(default_factory=list)
    ledger_heads: list[bytes] = field(default_factory=list)

    @property
    def refused(self) -> Iterator[tuple[str, str, str]]:
        """Client, reason and detail of each reply that is not used."""
        return zip(self.refused_clients, self.refused_reasons, self.refused_details, strict=True)

    @property
    def heads(self) -> Iterator[tuple[str, int, bytes]]:
        """Client, number of charges and head of each client that shows them."""
        if self.ledger_counts:
            clients = (*self.answered, *self.late, *self.refused_clients)
            heads = zip(clients, self.ledger_counts, self.ledger_heads, strict=True)
            yield from (head for head in heads if head[2])

    def write(self) -> Fields:
        """Return the record."""
        return fields.write(self)

    @classmethod
    def read(cls, record: Mapping[str, Any], *, asked: Iterable[str]) -> "CohortAnswer":
        """Read the record.

        Raises
        ------
        ProtocolError
            If an entry is missing or ill-typed, or the answer does not account for every client
            that was asked, once.
        """
        answer = fields.read(cls, record)
        refused = (answer.refused_clients, answer.refused_reasons, answer.refused_details)
        if len(set(map(len, refused))) != 1 or not 0 <= answer.bytes_up < _MOST_BYTES:
            raise ProtocolError(f"{COHORT}: entries that do not fit each other")
        asked = set(asked)
        told = [*answer.answered, *answer.late, *answer.refused_clients]
        known = len(told) == len(asked) and set(told) == asked and asked.issuperset(answer.keepers)
        if not known:
            raise ProtocolError(f"{COHORT}: the answer is not about the clients that were asked")
        shown = {len(answer.ledger_counts), len(answer.ledger_heads)}
        if shown not in ({0}, {len(asked)}):
            raise ProtocolError(f"{COHORT}: heads of other ledgers than those of the clients")
        return answer


def _is_number_below(text: str, size: int) -> bool:
    return re.fullmatch(r"0|[1-9][0-9]{0,8}", text) is not None and int(text) < size
