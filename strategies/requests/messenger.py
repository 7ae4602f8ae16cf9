"""Sends requests to clients, yields their replies, and keeps a log of each request.

A strategy asks (`Messenger.ask`), sends what it was given (`exchange`) and reads what may be
used (`RequestLog.replies` of the question's `request_log`).
"""

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from flwr_privacy.errors import ProtocolError
from flwr_privacy.secure_sum.messages import JOIN
from flwr_privacy.stragglers import Stragglers
from flwr_privacy.strategies.state.experiment import Experiment
from flwr_privacy.wire.message import EVALUATE, HELLO, RECORD, Fields, Header

from .addressing import messages_of
from .exchange import persistent_exchange
from .federation import Federation
from .pulling import let_go, pull
from .request_log import RequestLog
from .sampling import Sampler
from .tally import Tally

__all__ = ["Assigned", "Messenger", "only"]

logger = logging.getLogger("flwr.privacy")

_FOREVER = 3600.0  # Flower's default timeout, where a user's own start gives none

_LOOK = 0.05  # seconds between two looks at who still owes an answer

Assigned = Mapping[int, list[str]]
"""The clients that take part, by the node that runs them."""


class Messenger:
    """Sends the requests of one strategy to the clients of one federation.

    Parameters
    ----------
    scheme : str
        Name of the scheme.
    experiment : Experiment
        Gives identity and seed.
    federation : Federation
        Who there is.
    stragglers : Stragglers, optional
        Simulated answer times.
    deadline : float, optional
        Seconds after which missing replies are given up: virtual ones where stragglers are
        simulated. By default `timeout`.
    weighted_by : str
        Name of the metric that is a reply's weight.
    max_reply_bytes : int
        Most bytes of a reply where the request does not tell how large it will be.
    untimed : collection of str, optional
        Phases that take no virtual time; by default the evaluation.

    Attributes
    ----------
    sampler : Sampler
        Draws the clients.
    timeout : float
        Real seconds that any exchange may take.
    recorded : bool
        Whether `counts` will be called, so that what is exchanged is kept for it.
    virtual_seconds : float
        The virtual clock.
    stragglers : Stragglers, optional
        Simulated answer times; a scheme that has to know the clients sets it after the hello.
    """

    def __init__(
        self,
        *,
        scheme: str,
        experiment: Experiment,
        federation: Federation,
        stragglers: Stragglers | None,
        deadline: float | None,
        weighted_by: str,
        max_reply_bytes: int,
        untimed: Collection[str] = (EVALUATE,),
    ) -> None:
        self.federation = federation
        self.sampler = Sampler(federation)
        self.timeout = _FOREVER
        self.recorded = False
        self.virtual_seconds = 0.0
        self._scheme = scheme
        self._experiment = experiment
        self.stragglers = stragglers
        self._deadline = deadline
        self._weighted_by = weighted_by
        self._max_reply_bytes = max_reply_bytes
        self._untimed = frozenset(untimed)
        self._logs: dict[str, RequestLog] = {}
        self._tally = Tally()
        self._open: dict[str, tuple[RequestLog, int, float]] = {}  # unanswered: book, node, expiry
        self._came_late: list[tuple[RequestLog, list[str]]] = []
        self._requests: Counter[tuple[int, str]] = Counter()
        self._patient = False

    @contextmanager
    def patiently(self) -> Iterator[None]:
        """Wait for every client, on the real and the virtual clock, until `timeout`."""
        before, self._patient = self._patient, True
        try:
            yield
        finally:
            self._patient = before

    def meet(self, grid: Grid) -> list[str]:
        """Ask new nodes for their clients, and return these; see `Federation.meet`."""
        header = Header(
            scheme=self._scheme, experiment_id=self._experiment.id, phase=HELLO, server_round=0
        )
        logs, joined = self.federation.meet(grid, header, self.timeout)
        self._tally.add(*logs)
        return joined

    def sample(
        self,
        grid: Grid,
        server_round: int,
        phase: str,
        *,
        fraction: float,
        minimum: int,
        without: Collection[str] = (),
        turns: Mapping[str, tuple[int, int]] | None = None,
    ) -> Assigned:
        """Draw the clients of a round, the same for the same seed; none for a fraction of 0.

        Nodes that still owe an answer to an earlier question are left out, so that no two messages
        are outstanding for one client; so are the clients in `without`. With `turns`, the rounds in
        which clients were last asked, those that have waited longest come first, in an order that
        is the same in every round.

        Raises
        ------
        InvalidParameterError
            If more are to be drawn than there are.
        """
        if fraction == 0:
            return {}
        self.wait(grid)
        if not self.recorded:
            self._release()
        return self.sampler.sample(
            self._experiment.seed,
            (phase, server_round) if turns is None else (phase,),
            fraction=fraction,
            minimum=minimum,
            busy=self._busy(grid),
            without=without,
            turns=turns,
        )

    def wait(self, grid: Grid) -> None:
        """Wait for nodes under a user's own start, where the first replies will be the hello."""
        if not self.federation.met:
            self.federation.wait(grid, self.timeout)

    def draw(
        self,
        grid: Grid,
        server_round: int,
        phase: str,
        *,
        fraction: float,
        minimum: int,
        shares: Mapping[str, float] | None = None,
        attempt: int = 0,
    ) -> tuple[Assigned, dict[str, int]]:
        """Draw the clients of a round with replacement; return also how often each was drawn.

        Nodes that owe an answer are left out, as in `sample`. Another attempt is another draw.
        """
        if not self.recorded:
            self._release()
        return self.sampler.draw(
            self._experiment.seed,
            (phase, server_round, attempt),
            fraction=fraction,
            minimum=minimum,
            shares=shares,
            busy=self._busy(grid),
        )

    def came_late(self) -> list[tuple[RequestLog, list[str]]]:
        """Return the clients whose replies arrived too late since the last call, by request."""
        came, self._came_late = self._came_late, []
        return came

    def settle(self, grid: Grid) -> None:
        """Wait until no client has an open request, or the deadline is over."""
        end = time.monotonic() + self._real_deadline()
        while self._busy(grid) and time.monotonic() < end:
            time.sleep(_LOOK)

    def free(self, grid: Grid, assigned: Assigned) -> dict[int, list[str]]:
        """Return those of the assigned nodes that have no open earlier request."""
        busy = self._busy(grid)
        return {node: clients for node, clients in assigned.items() if node not in busy}

    def ask(
        self,
        server_round: int,
        phase: str,
        content: RecordDict,
        assigned: Assigned,
        *,
        fields: Fields | None = None,
        own: Mapping[str, RecordDict] | None = None,
        groups: Mapping[str, str] | None = None,
        of_group: Mapping[str, RecordDict] | None = None,
        summed: bool = False,
        large: bool = False,
        quorum: int | None = None,
    ) -> list[Message]:
        """Return the messages of one request to some clients, and open its log.

        Parameters
        ----------
        server_round : int
            Round.
        phase : str
            Phase of the scheme, or ``evaluate``.
        content : RecordDict
            Records of the question that all clients share.
        assigned : dict
            Who is asked, as `sample` returned it.
        fields : dict, optional
            The scheme's own values.
        own : dict, optional
            For some clients, records that go to that client alone; their entries are put over
            those that all share. Values of the scheme go under ``flwr-privacy``.
        groups : dict, optional
            The group of each client, in a scheme that sums by groups.
        of_group : dict, optional
            For some groups, records that go to their clients alone, put over those that all share
            and under those of a client. A node that runs several of them gets them once.
        summed : bool, default False
            Whether a node that runs several clients answers with one accumulator.
        large : bool, default False
            Whether an answer may be much larger than its request.
        quorum : int, optional
            Number of used replies after which the exchange ends.
        """
        request_log = self.opened(server_round, phase, assigned, summed=summed, quorum=quorum)
        header = request_log.header
        shared = RecordDict({**content, RECORD: ConfigRecord(header.write(fields))})
        messages = messages_of(
            request_log,
            shared,
            own=own or {},
            groups=groups or {},
            of_group=of_group or {},
            clients=self.federation.virtual_clients or 0,
            weighted_by=self._weighted_by,
        )
        if large:
            request_log.largest = self._max_reply_bytes
        return messages

    def opened(
        self,
        server_round: int,
        phase: str,
        assigned: Assigned,
        *,
        summed: bool = False,
        quorum: int | None = None,
    ) -> RequestLog:
        """Return the log of a new request; its parameters are those of `ask`."""
        header = self._header(phase, server_round)
        late, virtual_seconds = self._late(header, assigned, quorum)
        request_log = self._logs[phase] = RequestLog(
            header,
            assigned,
            cohorts=self.federation.cohorts,
            summed=summed,
            quorum=quorum,
            late=late,
            virtual_seconds=virtual_seconds,
            seconds=self._real_deadline(),
            heads=self.federation.heads,
        )
        if self.recorded:
            self._tally.add(request_log)
        return request_log

    def exchange(self, grid: Grid, messages: Iterable[Message], *, phase: str) -> Iterator[Message]:
        """Send the messages of a phase; yield replies until quorum or deadline.

        What is set up once is asked again of nodes that are silent, with the same message: a node
        gives the same answer to it, or says that it had its one attempt.
        """
        request_log = self.request_log(phase)
        messages = list(messages)
        if messages and JOIN in messages[0].content:
            request_log.question = messages[0].content
        quorum = None if self.stragglers else request_log.quorum
        left_open: dict[str, int] = {}
        expires = time.monotonic() + request_log.seconds
        try:
            yield from persistent_exchange(
                grid,
                messages,
                again=self._patient,
                logs=lambda node: request_log,
                largest=request_log.largest,
                deadline=request_log.seconds,
                enough=lambda: quorum is not None and request_log.accumulated >= quorum,
                left_open=left_open,
            )
        finally:  # also when whoever reads has had enough
            self.federation.count_garbage(request_log.newest_garbage())
            self._open |= {
                message: (request_log, node, expires) for message, node in left_open.items()
            }

    def request_log(self, phase: str) -> RequestLog:
        """Return the log of the last request of a phase.

        Raises
        ------
        ProtocolError
            If there was none.
        """
        if phase not in self._logs:
            raise ProtocolError(
                f"there is no question of phase '{phase}': a configure_{phase} of your own must "
                f"return the messages of super().configure_{phase}"
            )
        return self._logs[phase]

    def reasons(self, phase: str, server_round: int) -> list[str]:
        """Return why the first refused replies to the last request of a round's phase were."""
        log = self._logs.get(phase)
        if log is None or log.header.server_round != server_round:
            return []
        # Without "node 17:", so that equal reasons count together.
        return [detail.partition(": ")[2] or detail for detail in log.details]

    def counts(self) -> dict[str, Any]:
        """Return the counts since the last call: all bytes, outcomes of the last training."""
        counts, seconds = self._tally.close()
        self.virtual_seconds += seconds
        self._release()
        return {**counts, "virtual_seconds": self.virtual_seconds}

    def state(self) -> dict[str, Any]:
        """Return the clock, and the counts and requests of the round so far, for a checkpoint."""
        return {
            "virtual_seconds": self.virtual_seconds,
            **self._tally.state(),
            # What is set up in round 0 is asked again by each run, as it was.
            "requests": [[*key, number] for key, number in self._requests.items() if key[0]],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned; call it before the first request."""
        self.virtual_seconds = state["virtual_seconds"]
        self._tally.load_state(state)
        self._requests = Counter({(r, phase): n for r, phase, n in state["requests"]})

    def _release(self) -> None:
        """Free the clients that have no state on their node to run on other nodes.

        Between rounds: the next one may be prepared in one exchange with the end of this one.
        """
        for request_log in self._logs.values():
            self.sampler.release(request_log.free)
            request_log.free = set()

    def _busy(self, grid: Grid) -> set[int]:
        """Return the nodes with an open request; replies that arrived are counted as late."""
        for message_id, (request_log, node, _) in list(self._open.items()):
            for reply in pull(grid, message_id, node, request_log.largest)[:1]:
                del self._open[message_id]
                if self._tally.add_late(request_log, reply):
                    self._came_late.append((request_log, request_log.addressed(node)))
                self.federation.count_garbage(request_log.newest_garbage())
        now = time.monotonic()
        given_up = [key for key, (_, _, expires) in self._open.items() if expires <= now]
        let_go(grid, given_up, for_good=True)
        for key in given_up:
            del self._open[key]
        return {node for _, node, _ in self._open.values()}

    def _late(
        self, header: Header, assigned: Assigned, quorum: int | None
    ) -> tuple[set[str], float]:
        """Return the late clients and the duration of the exchange on the virtual clock."""
        clients = [client for clients in assigned.values() for client in clients]
        if self.stragglers is None or not clients or header.phase in self._untimed:
            return set(), 0.0  # an evaluation is for the report: it takes no virtual time
        return self.stragglers.race(
            clients,
            seed=self._experiment.seed,
            server_round=header.server_round,
            phase=header.phase,
            request=header.request,
            quorum=quorum,
            deadline=None if self._patient else self._deadline,
        )

    def _header(self, phase: str, server_round: int) -> Header:
        for key in [key for key in self._requests if key[0] not in (0, server_round)]:
            del self._requests[key]
        request = self._requests[server_round, phase]
        self._requests[server_round, phase] += 1
        return Header(
            scheme=self._scheme,
            experiment_id=self._experiment.id,
            phase=phase,
            server_round=server_round,
            request=request,
        )

    def _real_deadline(self) -> float:
        if self._deadline is None or self._patient or self.stragglers is not None:
            return self.timeout
        return self._deadline


def only(assigned: Assigned, wanted: Collection[str]) -> dict[int, list[str]]:
    """Keep only the wanted clients of an assignment."""
    kept = {node: [c for c in clients if c in wanted] for node, clients in assigned.items()}
    return {node: clients for node, clients in kept.items() if clients}
