"""Records the cost of every request, charges it, and makes the privacy card.

What a question costs is noted before it leaves, and charged when its exchange is over. What a run
asked that broke off in between is charged by the run that goes on: nobody knows which of its
answers were sent.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from flwr_privacy.accounting import Charge, fitting
from flwr_privacy.privacy.card import CardRelease, Described, PrivacyCard
from flwr_privacy.privacy.guarantee import Guarantee
from flwr_privacy.strategies.requests.instruction import Instruction
from flwr_privacy.strategies.requests.request_log import RequestLog
from flwr_privacy.strategies.state.experiment import Experiment

__all__ = ["ChargeLog"]


class ChargeLog:
    """The charges of one training.

    Parameters
    ----------
    experiment : Experiment
        Keeps what was asked for the case that the run breaks off.

    Attributes
    ----------
    releases : list of CardRelease
        Every charge so far.
    names : dict
        Who the nodes turned out to be that were asked before they had said it, by address.
    earlier : Guarantee, optional
        The guarantee of the run that this one resumes, until this one asks something.
    forecast : str
        Whether the model can learn through the noise; empty before the first round.
    described : Described
        What is trained, with which settings and versions.
    """

    def __init__(self, experiment: Experiment) -> None:
        self.releases: list[CardRelease] = []
        self.names: dict[str, str] = {}
        self.earlier: Guarantee | None = None
        self.forecast = ""
        self.described = Described()
        self._experiment = experiment

    def note(self, request_log: RequestLog, instruction: Instruction) -> None:
        """Record on disk what a request will cost; call it before the request is sent."""
        if costs := instruction.costs(instruction.charged(request_log)):
            noted = {client: charge for charge, names in costs.items() for client in names}
            self._experiment.asked.note(self._experiment.id, _name(request_log), noted)

    def charge(self, request_log: RequestLog, instruction: Instruction) -> None:
        """Charge a request; call it when its exchange is over."""
        if instruction.cost is None:
            return
        clients = self._experiment.asked.before(_name(request_log)) | instruction.charged(
            request_log
        )
        # Under a user's own start a client is known once it has answered; what was lost before is
        # its own all the same.
        self.names |= {f"node-{node}": client for node, client in request_log.named.items()}
        self.releases = [
            replace(
                r,
                clients=tuple(sorted(self._named(r.clients))),
                unanswered=r.unanswered and tuple(sorted(self._named(r.unanswered))),
            )
            if not self.names.keys().isdisjoint(r.clients)
            else r
            for r in self.releases
        ]
        known = self._named(clients)
        silent = None if instruction.hidden else known - request_log.answered
        self._release(_name(request_log), instruction.costs(known), silent)

    def note_late(self, came: Iterable[tuple[RequestLog, list[str]]]) -> None:
        """Mark charges as answered whose answers arrived too late to be used."""
        late: dict[str, set[str]] = {}
        for request_log, clients in came:
            late.setdefault(_name(request_log), set()).update(self._named(clients))
        for place, release in enumerate(self.releases):
            name = f"{release.phase} {release.server_round} {release.request}"
            if release.unanswered and name in late:
                left = tuple(c for c in release.unanswered if c not in late[name])
                self.releases[place] = replace(release, unanswered=left)

    def charge_broken_off(self) -> None:
        """Charge the requests of an interrupted run that this run does not send again."""
        for question, noted in self._experiment.asked.broken_off().items():
            costs: dict[Charge, set[str]] = {}
            for client, charge in noted.items():
                costs.setdefault(charge, set()).add(client)
            self._release(question, costs, set(noted))

    def card(
        self, guarantee: Callable[[], Guarantee], *, accountant: str | None, final: bool
    ) -> PrivacyCard:
        """Return the privacy card: the guarantee, every charge so far, and their epsilon.

        Parameters
        ----------
        guarantee : callable
            Returns what this run promises.
        accountant : str, optional
            Who adds up; by default the tightest that knows the charges.
        final : bool
            Whether to state epsilon by every accountant; some take seconds.
        """
        card = PrivacyCard(
            experiment_id=self._experiment.id,
            guarantee=self.earlier or guarantee(),
            releases=self.releases,
            described=self.described,
            forecast=self.forecast,
        )
        if card.guarantee.delta is None:
            return card
        accountant = accountant or fitting(r.charge for r in self.releases)
        if final:
            card.state()
        else:
            card.state([accountant])
        card.guarantee = replace(
            card.guarantee, spent=card.stated[accountant], accountant=accountant
        )
        return card

    def load(self, card: PrivacyCard) -> None:
        """Load the charges and the guarantee of the run that this one resumes."""
        self.releases, self.earlier = card.releases, card.guarantee
        self.forecast = card.forecast
        self.described = card.described

    def with_addresses(self, clients: Collection[str]) -> set[str]:
        """Return clients, and the addresses of their nodes.

        A node that has said who it is goes by its address all the same under a user's own start.
        """
        return {*clients, *(node for node, client in self.names.items() if client in clients)}

    def _named(self, clients: Iterable[str]) -> set[str]:
        return {self.names.get(client, client) for client in clients}

    def _release(
        self, question: str, costs: Mapping[Charge, set[str]], silent: set[str] | None
    ) -> None:
        """Append the charges of a request; `silent` did not answer it, None if that is a secret."""
        phase, server_round, request = question.rsplit(" ", 2)
        for charge, names in sorted(costs.items(), key=lambda cost: min(cost[1])):
            release = CardRelease(
                phase=phase,
                server_round=int(server_round),
                request=int(request),
                charge=charge,
                clients=tuple(sorted(names)),
                unanswered=None if silent is None else tuple(sorted(names & silent)),
            )
            self.releases.append(release)


def _name(request_log: RequestLog) -> str:
    header = request_log.header
    return f"{header.phase} {header.server_round} {header.request}"
