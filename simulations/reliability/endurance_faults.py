"""Random faults over many rounds, and a witness that records what the clients answer."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import Message
from flwr.clientapp import ClientApp

from flwr_privacy.errors import check_choice, check_integer, check_number
from flwr_privacy.wire.identity import client_id_from, stream

from .grid import FAULTS, FaultyGrid, Strike, header_of
from .witness import AnswerKey, Witness

__all__ = ["DEADLINE", "RATE", "FaultPlan", "Journal", "RestlessGrid"]

RATE = 1 / 3  # of the rounds that have a fault
DEADLINE = 5.0  # seconds, where an answer does not come: a busy machine must not miss it


@dataclass(kw_only=True)
class FaultPlan:
    """Which fault happens in which round; it survives a killed server.

    A fault hits any of the requests that the round before had.

    Parameters
    ----------
    kinds : tuple of str
        Faults to choose from, all alike likely.
    seed : int
        Root of the choices.
    rate : float, default 1/3
        Share of the rounds that have a fault, from 0 to 1.
    happened : Counter
        How often each fault happened.
    """

    kinds: tuple[str, ...]
    seed: int
    rate: float = RATE
    happened: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for kind in self.kinds:
            check_choice("kinds", kind, FAULTS)
        check_integer("seed", self.seed, minimum=0)
        check_number("rate", self.rate, minimum=0, maximum=1)
        self._round = 0
        self._before: Counter[str] = Counter()  # requests of the round before by phase
        self._seen: Counter[str] = Counter()
        self._place: tuple[str, int] | None = None  # phase and number of the request
        self._kind = ""

    def strike(self, phase: str, server_round: int, client: str) -> Strike | None:
        """Return the fault that happens to a request, if it is the one."""
        if server_round == 0:  # a hello; of nodes that come back there is one at any time
            return None
        if server_round != self._round:
            self._turn(server_round)
        place = phase, self._seen[phase]
        self._seen[phase] += 1
        if place != self._place:
            return None
        self._place = None
        return Strike(
            fault=self._kind,
            phase=phase,
            server_round=server_round,
            client=client,
            seconds=DEADLINE if self._kind == "late" else Strike.seconds,
        )

    def _turn(self, server_round: int) -> None:
        self._before, self._seen = self._seen, Counter()
        self._round, self._place = server_round, None
        draws = stream(self.seed, "fault", server_round)
        if not self._before or draws.random() >= self.rate:
            return
        phases = sorted(self._before)
        self._kind = self.kinds[int(draws.integers(len(self.kinds)))]
        phase = phases[int(draws.integers(len(phases)))]
        self._place = phase, int(draws.integers(self._before[phase]))


class RestlessGrid(FaultyGrid):
    """The inline engine with the faults of a plan.

    Parameters
    ----------
    client_app, nodes, **options
        As those of `FaultyGrid`.
    plan : FaultPlan
        The faults.
    between : callable
        Called between two rounds, when nobody waits for anything.
    """

    def __init__(
        self,
        client_app: ClientApp,
        nodes: Sequence[Mapping[str, Any]],
        *,
        plan: FaultPlan,
        between: Callable[[], None],
        **options: Any,
    ) -> None:
        super().__init__(client_app, nodes, **options)
        self._plan, self._between = plan, between

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes, which the server looks up before a round."""
        self._between()
        return super().get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Take requests, one of which may be hit."""
        ids: list[str] = []
        for message in messages:
            context = self._contexts.get(message.metadata.dst_node_id)
            if context is not None:
                phase, server_round, _ = header_of(message)
                client = client_id_from(context.node_config)
                if (strike := self._plan.strike(phase, server_round, client)) is not None:
                    self._count()
                    self.aim(strike)
            ids.extend(super().push_messages([message]))
            self.asked.clear()  # nobody reads it here, and it grows
        return ids

    def close(self) -> None:
        """Count the last fault and end."""
        self._count()
        super().close()

    def _count(self) -> None:
        if self.struck and not self.empty:
            self._plan.happened[self.struck[0].fault] += 1


@dataclass(kw_only=True)
class Journal(Witness):
    """A witness that keeps what it saw in a file: in memory it would look like a leak.

    Parameters
    ----------
    path : Path
        The file.
    """

    path: Path

    def keep(self, key: AnswerKey, answer: bytes) -> None:
        """Record a reply."""
        self._write([*key, answer.hex()])

    def forget(self, client: str) -> None:
        """Record that the ledger of a client is gone."""
        self._write([client])

    def read(self) -> None:
        """Load the records of the file."""
        for line in self.path.read_text(encoding="ascii").splitlines():
            match json.loads(line):
                case [client, phase, server_round, request, answer]:
                    key = (client, phase, server_round, request)
                    super().keep(key, bytes.fromhex(answer))
                case [client]:
                    super().forget(client)

    def _write(self, values: list[Any]) -> None:
        with self.path.open("a", encoding="ascii") as file:
            file.write(json.dumps(values) + "\n")
