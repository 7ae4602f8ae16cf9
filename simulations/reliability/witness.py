"""Records what the clients of a small federation answer."""

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flwr_privacy.clients import SchemeClient, Train
from flwr_privacy.clients.node.base import Evaluate
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.identity import client_id_from
from flwr_privacy.wire.message import EVALUATE, Fields

__all__ = ["AnswerKey", "Witness"]

AnswerKey = tuple[str, str, int, int]
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
    answers: dict[AnswerKey, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    requests: set[AnswerKey] = field(default_factory=set)

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
        client_id = client_id_from(client.context.node_config)
        key = (client_id, phase, fields["round"], fields["request"])
        if phase in self.within and not answer[0]:
            return
        open_fields = {name: value for name, value in answer[1].items() if not _is_sealed(value)}
        digest = hashlib.sha256(repr(open_fields).encode())
        for name, array in answer[0].items():
            digest.update(name.encode() + np.asarray(array).tobytes())
        self.keep(key, digest.digest())

    def keep(self, key: AnswerKey, answer: bytes) -> None:
        """Record the digest of a reply."""
        self.answers[key].add(answer)
        self.requests.add(key)

    def forget(self, client: str) -> None:
        """Drop the records of a client whose ledger is lost."""
        for key in [key for key in self.answers if key[0] == client]:
            del self.answers[key]


def _is_sealed(value: Any) -> bool:
    return isinstance(value, bytes) or (isinstance(value, list) and bytes in map(type, value))
