"""A run folder with its card, and what the nodes of the run hand over: all made by hand."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flwr_privacy.accounting import Charge
from flwr_privacy.privacy.card import CardHead, CardRelease, Described, PrivacyCard
from flwr_privacy.privacy.guarantee import Guarantee
from flwr_privacy.privacy.ledger import Entry, Ledger, Question
from flwr_privacy.privacy.ledger.chain import head_of
from flwr_privacy.privacy.ledger.signed_head import SignedHead, heads_to_json
from flwr_privacy.wire.pins import Identity

EXPERIMENT = "0123456789abcdef"
CLIENTS = ("ward-a", "ward-b", "ward-c")
IDENTITIES = {client: Identity.generate() for client in CLIENTS}
CHARGE = Charge(noise_multiplier=4.0, neighbours="replace_one")
PROMISE = Guarantee(
    scheme="udp",
    protects="all data of a client",
    adversary="the server",
    neighbours="anything differs",
    epsilon=8.0,
    delta=1e-5,
    not_protected=("who takes part",),
    assumptions=("each client keeps its own ledger",),
    evidence=("tests",),
    secure_sum="sums over 3 clients",
)


def release(
    server_round: int, clients: tuple[str, ...] = CLIENTS, unanswered: tuple[str, ...] | None = ()
) -> CardRelease:
    return CardRelease(
        phase="train",
        server_round=server_round,
        request=0,
        charge=CHARGE,
        clients=clients,
        unanswered=unanswered,
    )


def stated(card: PrivacyCard) -> PrivacyCard:
    """Return a card with the epsilon of its charges, as a run writes it."""
    card.state(["gdp"])
    card.guarantee = replace(card.guarantee, spent=card.stated["gdp"], accountant="gdp")
    return card


@dataclass
class MadeRun:
    """A deployed training of three clients, some of whose answers were lost.

    Parameters
    ----------
    folder : Path
        Where everything is written.
    rounds : int, default 4
        Rounds, of which the second has lost the answer of the last client. Its node had charged it
        where `charged_lost` says so.
    """

    folder: Path
    rounds: int = 4
    charged_lost: bool = True
    engine: str = "deployed"
    releases: list[CardRelease] = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.releases = [
            release(number, unanswered=CLIENTS[2:] if number == 2 else ())
            for number in range(1, self.rounds + 1)
        ]
        self.write(self.card())
        self.write_lines(self.card())
        summary = {"engine": self.engine, "experiment_id": EXPERIMENT, "test_seed": None}
        self.path("summary.json").write_text(json.dumps(summary))

    def path(self, name: str) -> Path:
        return self.folder / name

    @property
    def card_path(self) -> Path:
        return self.path("privacy-card.json")

    def held(self, client: str, upto: int | None = None) -> list[CardRelease]:
        """Return what a node has charged of the first rounds."""
        lost = () if self.charged_lost else self.releases[1:2]
        return [
            one
            for one in self.releases[:upto]
            if not (client == CLIENTS[2] and one in lost) and client in one.clients
        ]

    def head(self, client: str, upto: int | None = None, **changes: Any) -> SignedHead:
        held = self.held(client, upto)
        charges = [(one.phase, one.server_round, one.request, one.charge) for one in held]
        head = head_of(EXPERIMENT, charges)
        identity = changes.pop("identity", IDENTITIES[client])
        return SignedHead.sign(identity, experiment=EXPERIMENT, client=client, head=head)

    def card(self, upto: int | None = None) -> PrivacyCard:
        """Return the card of the first rounds."""
        return stated(
            PrivacyCard(
                experiment_id=EXPERIMENT,
                guarantee=PROMISE,
                releases=self.releases[:upto],
                described=Described(
                    name="ward",
                    arrays=1,
                    values=4,
                    began="2025-01-01T00:00:00+00:00",
                    versions={"python": "3.11"},
                    settings={"privacy": "UserLevel()"},
                ),
                forecast="forecast: it can learn",
                heads=[CardHead(signed=self.head(client, upto)) for client in CLIENTS],
            )
        )

    def write(self, card: PrivacyCard) -> None:
        self.card_path.write_text(card.to_json())

    def write_lines(self, card: PrivacyCard) -> None:
        lines = []
        for number in range(self.rounds + 1):
            part = replace_releases(card, number)
            lines.append(
                {
                    "round": number,
                    "rounds": self.rounds,
                    "charged": part.answers().charged,
                    "scheme": {"epsilon": part.epsilon("gdp")},
                    "train": {},
                }
            )
        text = "".join(json.dumps(line) + "\n" for line in lines)
        self.path("metrics.jsonl").write_text(text)

    def pins(self) -> Path:
        keys = "".join(f'"{name}" = "{one.public}"\n' for name, one in IDENTITIES.items())
        path = self.path("pins.toml")
        path.write_text(f"[clients]\n{keys}")
        return path

    def heads(self, *heads: SignedHead) -> Path:
        path = self.path("heads.json")
        path.write_text(heads_to_json(heads or [self.head(client) for client in CLIENTS]))
        return path

    def ledger(self, client: str, *, place: str = "ledgers", **changes: Any) -> Path:
        """Write the ledger of a node outside of the run folder, or anywhere."""
        path = self.folder.parent / place / f"{client}.ledger"
        path.parent.mkdir(parents=True, exist_ok=True)
        with Ledger(path, data_set=client, durable=False).locked() as ledger:
            for one in self.held(client):
                question = Question(
                    experiment_id=EXPERIMENT,
                    phase=one.phase,
                    server_round=one.server_round,
                    request=one.request,
                )
                entry = {"scheme": "udp", "unit": "user", "charge": one.charge, **changes}
                ledger.charge(Entry(question=question, **entry))
        return path


def replace_releases(card: PrivacyCard, upto: int) -> PrivacyCard:
    return replace(card, releases=[one for one in card.releases if one.server_round <= upto])
