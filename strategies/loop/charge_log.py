"""Records the cost of every request, charges it, and makes the privacy card.

What a question costs is noted before it leaves, and charged when its exchange is over. What a run
asked that broke off in between is charged by the run that goes on: nobody knows which of its
answers were sent.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from flwr_privacy.accounting import Charge, fitting
from flwr_privacy.privacy.card import CardRelease, Described, PrivacyCard
from flwr_privacy.privacy.card.asked_file import charge_in, text_of
from flwr_privacy.privacy.card.histories import Histories
from flwr_privacy.privacy.guarantee import Guarantee
from flwr_privacy.strategies.requests.instruction import Instruction
from flwr_privacy.strategies.requests.ledger_heads import ChargeName, LedgerHeads
from flwr_privacy.strategies.requests.request_log import RequestLog
from flwr_privacy.strategies.state.experiment import Experiment

__all__ = ["ChargeLog", "named_costs"]


class ChargeLog:
    """The charges of one training.

    Parameters
    ----------
    experiment : Experiment
        Keeps what was asked for the case that the run breaks off.
    heads : LedgerHeads
        What the clients' own ledgers show.

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

    def __init__(self, experiment: Experiment, heads: LedgerHeads) -> None:
        self.releases: list[CardRelease] = []
        self._histories = Histories()
        self.names: dict[str, str] = {}
        self.earlier: Guarantee | None = None
        self.forecast = ""
        self.described = Described()
        self._experiment = experiment
        self._heads = heads

    def note(self, request_log: RequestLog, instruction: Instruction) -> None:
        """Record on disk what a request will cost; call it before the request is sent."""
        request_log.names = instruction.charged_as
        if costs := instruction.costs(request_log, instruction.charged(request_log)):
            noted: dict[str, dict[str, Charge]] = {}
            for client, (name, charge) in costs.items():
                noted.setdefault(text_of(*name), {})[client] = charge
            self._experiment.asked.note(self._experiment.id, noted)
            self._heads.asked(costs)

    def charge(self, request_log: RequestLog, instruction: Instruction) -> None:
        """Charge a request; call it when its exchange is over."""
        if instruction.cost is None:
            return
        clients = instruction.charged(request_log)
        for name in {request_log.own_name, *map(request_log.charged_as, clients)}:
            clients = clients | self._experiment.asked.before(text_of(*name))
        # Under a user's own start a client is known once it has answered; what was lost before is
        # its own all the same.
        self.names |= {f"node-{node}": client for node, client in request_log.named.items()}
        # Of all names: what broke off may be charged under an address that is known by then.
        known_now = self.names.keys()
        if known_now and any(not known_now.isdisjoint(r.clients) for r in self.releases):
            self.releases = [self._renamed(r) for r in self.releases]
        known = self._named(clients)
        silent = None if instruction.hidden else known - request_log.answered
        self._release(instruction.costs(request_log, known), silent)
        for client in self._named(request_log.silent) - known:
            self._heads.not_charged(request_log.charged_as(client), [client])

    def note_late(self, came: Iterable[tuple[RequestLog, list[str]]]) -> None:
        """Mark charges as answered whose answers arrived too late to be used."""
        late: dict[ChargeName, set[str]] = {}
        for request_log, clients in came:
            for client in self._named(clients):
                late.setdefault(request_log.charged_as(client), set()).add(client)
        for place, release in enumerate(self.releases):
            name = ChargeName(release.phase, release.server_round, release.request)
            if release.unanswered and name in late:
                left = tuple(c for c in release.unanswered if c not in late[name])
                self.releases[place] = replace(release, unanswered=left)

    def charge_broken_off(self) -> None:
        """Charge the requests of an interrupted run that this run does not send again."""
        for costs in named_costs(self._experiment.asked.broken_off()):
            self._release(costs, set(costs))

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
            releases=list(self.releases),
            described=self.described,
            forecast=self.forecast,
            heads=self._heads.shown(),
            histories=self._histories,
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
        self.releases, self.earlier = list(card.releases), card.guarantee
        self.forecast = card.forecast
        self.described = card.described

    def with_addresses(self, clients: Collection[str]) -> set[str]:
        """Return clients, and the addresses of their nodes.

        A node that has said who it is goes by its address all the same under a user's own start.
        """
        return {*clients, *(node for node, client in self.names.items() if client in clients)}

    def _renamed(self, release: CardRelease) -> CardRelease:
        clients = tuple(sorted(self._named(release.clients)))
        silent = release.unanswered and tuple(sorted(self._named(release.unanswered)))
        return replace(release, clients=clients, unanswered=silent)

    def _named(self, clients: Iterable[str]) -> set[str]:
        return {self.names.get(client, client) for client in clients}

    def _release(
        self, costs: Mapping[str, tuple[ChargeName, Charge]], silent: set[str] | None
    ) -> None:
        """Append charges; `silent` clients did not answer, None if that is a secret."""
        alike: dict[tuple[ChargeName, Charge], set[str]] = {}
        for client, cost in costs.items():
            alike.setdefault(cost, set()).add(client)
        for (name, charge), clients in sorted(alike.items(), key=lambda cost: min(cost[1])):
            release = CardRelease(
                phase=name.phase,
                server_round=name.server_round,
                request=name.request,
                charge=charge,
                clients=tuple(sorted(clients)),
                unanswered=None if silent is None else tuple(sorted(clients & silent)),
            )
            self.releases.append(release)
            self._heads.charged(name, clients)


def named_costs(
    asked: Mapping[str, Mapping[str, Charge]],
) -> list[dict[str, tuple[ChargeName, Charge]]]:
    """Return noted costs as `Instruction.costs` does, for each name of a charge."""
    found = []
    for text, noted in asked.items():
        name = ChargeName(*charge_in(text))
        found.append({client: (name, charge) for client, charge in noted.items()})
    return found
