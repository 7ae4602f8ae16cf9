"""Every scheme that nodes' ledgers are charged for: the heads they show follow from the card."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import acfl_app
import numpy as np
import pytest
import torch
from apps import StepClient, make, message_app, record, run_strategy
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from zones import zone_nodes

from flwr_privacy.clients import CentralDPClient, M2FDPClient, UDPClient, as_mod, numpy_client_app
from flwr_privacy.clients.torch import get_arrays, initialise, linear, set_arrays, train_per_record
from flwr_privacy.m2fdp import TierTree
from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.privacy.ledger.chain import Step, begun, explained
from flwr_privacy.privacy.ledger.signed_head import SignedHead
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.simulations.engines.inline import Fault
from flwr_privacy.simulations.verification.evidence import Evidence, NodeEvidence
from flwr_privacy.simulations.verification.verify import Wanted, verify
from flwr_privacy.stragglers import StragglerModel
from flwr_privacy.strategies import (
    ACFL,
    M2FDP,
    UDP,
    CentralDP,
    LoopOptions,
    PrivateEvaluation,
)

pytestmark = pytest.mark.usefixtures("no_settling")

Run = Callable[[Any, Path], Any]


@pytest.fixture
def no_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flwr_privacy.strategies.requests.federation._SETTLE", 0.0)


@dataclass(frozen=True)
class Training:
    """A small training of one scheme."""

    strategy: Callable[[], Any]
    app: Callable[[], ClientApp]
    clients: Iterable[str]
    options: dict[str, Any] = field(default_factory=dict)
    counts: set[int] | None = None  # charges of a client, where they are known

    def run(self, folder: Path) -> Any:
        strategy = self.strategy()
        options = {"nodes": 4, "state": folder, "num_rounds": 2, **self.options}
        if "zones" in options:
            options["nodes"] = zone_nodes(options.pop("zones"), folder)
        run_strategy(strategy, self.app(), **options)
        return strategy


def records_app() -> ClientApp:
    """Linear models that are trained per record."""
    app = ClientApp(mods=[as_mod(UDPClient)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        net = model()
        arrays = message.content.array_records["arrays"]
        set_arrays(net, {name: array.numpy() for name, array in arrays.items()})
        draws = np.random.default_rng(int(context.node_config["partition-id"]))
        features = draws.normal(size=(20, 6)).astype(np.float32)
        train_per_record(net, features, draws.integers(0, 3, 20))
        trained = ArrayRecord({name: Array(array) for name, array in get_arrays(net).items()})
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": trained, "metrics": metrics}), reply_to=message)

    return app


def model() -> torch.nn.Module:
    return initialise(lambda: linear(6, 3), 0)


def initial() -> ArrayRecord:
    return ArrayRecord({name: Array(array) for name, array in get_arrays(model()).items()})


def numpy_app() -> ClientApp:
    def client_fn(context: Context) -> UDPClient:
        return UDPClient(StepClient(int(context.node_config["partition-id"])), context)

    return numpy_client_app(client_fn)


def app_of(half: Any) -> Callable[[], ClientApp]:
    return lambda: message_app([as_mod(half)])


def udp(**options: Any) -> Callable[[], UDP]:
    return lambda: make(UDP, seed=1, **options)


def central(**options: Any) -> Callable[[], CentralDP]:
    return lambda: make(CentralDP, seed=1, **options)


def tiers(tree: TierTree, **options: Any) -> Callable[[], M2FDP]:
    usual = {"clipping_norm": 0.5, "epsilon": 200.0, "experiment_id": "e", "seed": 1}
    return lambda: make(M2FDP, tree=tree, **{**usual, **options})


def acfl(**options: Any) -> Callable[[], ACFL]:
    return lambda: make(ACFL, epsilon=20.0, max_records=20, clipping_norm=2.0, seed=1, **options)


FOUR = ("0", "1", "2", "3")
SIX = tuple("012345")
HALF = TierTree.of_fanouts((2, 2), p=0.5)
TREE = {"steps": 4, "events": 2}
LOSSES = {"schedule": "discounting", "validation": "clients", "patience": 99}
SECRET = {"noise": "pld_secret", "participants": "secret", "client_sampling": "poisson"}
LATE = StragglerModel(slow_fraction=0.5, kind="constant")
MATRIX = record({"W": np.zeros((acfl_app.FEATURES, acfl_app.LABELS))})
TRAININGS = {
    "udp": Training(udp(), app_of(UDPClient), FOUR, counts={2}),
    "udp, two of four": Training(udp(fraction_train=0.5), app_of(UDPClient), FOUR),
    "udp, a cohort": Training(udp(clients=6), app_of(UDPClient), SIX, {"nodes": 2}, {2}),
    "udp, late in a cohort": Training(
        udp(clients=6, stragglers=LATE, deadline=2.0), app_of(UDPClient), SIX, {"nodes": 2}, {2}
    ),
    "udp, records": Training(
        udp(unit="record", learning_rate=0.5, clipping_norm=0.3),
        records_app,
        FOUR,
        {"arrays": initial()},
        {2},
    ),
    "udp, shares": Training(
        udp(shared_noise=True, secure_sum=SecureSum()), app_of(UDPClient), FOUR, {}, {2}
    ),
    "udp, losses": Training(udp(**LOSSES), lambda: numpy_app(), FOUR, {}, {4}),
    "udp, evaluation": Training(
        udp(evaluation=PrivateEvaluation()), app_of(UDPClient), FOUR, {}, {4}
    ),
    "central-dp": Training(central(secure_sum=SecureSum()), app_of(CentralDPClient), FOUR, {}, {2}),
    "central-dp, evaluation": Training(
        central(secure_sum=SecureSum(), evaluation=PrivateEvaluation()),
        app_of(CentralDPClient),
        FOUR,
        {},
        {4},
    ),
    "acfl": Training(acfl(), lambda: acfl_app.APP, FOUR, {"arrays": MATRIX}, {3}),
    "acfl, a secure sum": Training(
        acfl(secure_sum=SecureSum()), lambda: acfl_app.APP, FOUR, {"arrays": MATRIX}, {3}
    ),
    "m2fdp": Training(tiers(HALF, **TREE), app_of(M2FDPClient), FOUR),
    "m2fdp, a cohort": Training(
        tiers(HALF, **TREE, clients=4), app_of(M2FDPClient), FOUR, {"nodes": 2}
    ),
    "m2fdp, a relay": Training(
        tiers(HALF, **TREE, relay=True), app_of(M2FDPClient), FOUR, {"zones": HALF}
    ),
}


def follows(card: PrivacyCard, client: str, ledger: Ledger) -> int:
    """Check a client's head on a card against the card alone and its ledger; return its count."""
    (shown,) = [shown for shown in card.heads if shown.signed.client == client]
    assert shown.unlike == ""
    steps = [
        Step(
            phase=release.phase,
            server_round=release.server_round,
            request=release.request,
            charge=release.charge,
            sure=client not in release.unanswered,
        )
        for release in card.releases
        if client in release.clients
    ]
    assert explained(begun(card.experiment_id), steps, shown.signed.head) is not None
    assert shown.signed.head == ledger.head(card.experiment_id)
    return shown.signed.head.count


@pytest.mark.usefixtures("no_pld")
@pytest.mark.parametrize("name", TRAININGS)
def test_the_heads_of_the_nodes_follow_from_the_card_alone(name: str, tmp_path: Path) -> None:
    training = TRAININGS[name]
    card = PrivacyCard.from_json(training.run(tmp_path).card(final=True).to_json())
    asked = {client for release in card.releases for client in release.clients}
    assert {shown.signed.client for shown in card.heads} == asked
    counts = set()
    for client in asked:
        counts.add(follows(card, client, Ledger(tmp_path / f"{client}.ledger", data_set=client)))
    assert asked <= set(training.clients)
    assert counts
    assert training.counts in (None, counts)
    # An aggregator has a ledger, too, and the card charges its devices.
    ledgers = [str(path) for path in sorted(tmp_path.glob("*.ledger"))]
    heads = [
        SignedHead.sign(
            None,
            experiment=card.experiment_id,
            client=Path(path).stem,
            head=Ledger(path, data_set=Path(path).stem).head(card.experiment_id),
        )
        for path in ledgers
    ]
    nodes = NodeEvidence(ledgers=NodeEvidence.read(ledgers=ledgers).ledgers, heads=tuple(heads))
    found = verify(Evidence(card=card, nodes=nodes), Wanted(max_epsilon=200.0 * (1 + 1e-9)))
    assert (found.outcome.name, len(ledgers) > len(asked)) == ("verified", name.endswith("relay"))
    assert all(one.result == "passed" for one in found.findings if "nodes'" in one.check)
    keyed = "zones" in training.options
    assert {bool(shown.signed.signature) for shown in card.heads} == {keyed}


@pytest.mark.usefixtures("no_pld")
def test_charged_failures_show_no_head_and_are_in_the_next(tmp_path: Path) -> None:
    training = Training(udp(**LOSSES), app_of(UDPClient), FOUR)  # its evaluations have no loss
    card = training.run(tmp_path).card(final=True)
    assert [r.unanswered for r in card.releases] == [(), FOUR, (), FOUR]
    for shown in card.heads:
        assert (shown.signed.head.count, shown.unlike) == (3, "")
        client = shown.signed.client
        assert (
            Ledger(tmp_path / f"{client}.ledger", data_set=client).head(card.experiment_id).count
            == 4
        )


@pytest.mark.usefixtures("no_pld")
@pytest.mark.parametrize("lost", [{1}, {2}, {1, 2}])
@pytest.mark.parametrize("kind", ["drop", "crash"])
def test_replies_that_were_lost_are_in_the_next_head(
    kind: str, lost: set[int], tmp_path: Path
) -> None:
    faults = [Fault(kind=kind, client="1", phase="train", server_round=n) for n in lost]
    training = Training(
        udp(rounds=4), app_of(UDPClient), FOUR, {"faults": faults, "timeout": 0.3, "num_rounds": 4}
    )
    card = training.run(tmp_path).card(final=True)
    for client in FOUR:
        ledger = Ledger(tmp_path / f"{client}.ledger", data_set=client)
        assert follows(card, client, ledger) == 4


@pytest.mark.parametrize(
    ("strategy", "half"),
    [
        (udp(**SECRET, epsilon=1.0), UDPClient),
        (central(noise="server"), CentralDPClient),
        (acfl_app.NOISY, None),
    ],
    ids=["secret samples", "a trusted server", "a noised setup"],
)
def test_where_ledgers_and_card_differ_by_design_no_head_is_on_the_card(
    strategy: Any, half: Any, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"state": tmp_path, "num_rounds": 2, "nodes": 4}
    if half is None:
        strategy = make(ACFL, **strategy)
        app, options["arrays"] = acfl_app.APP, MATRIX
    else:
        strategy, app = strategy(), message_app([as_mod(half)])
    result = run_strategy(strategy, app, **options)
    card = strategy.card()
    assert card.heads == []
    assert not any(line.get("refused") for line in result.history)
    assert strategy.heads.state() == {"asked": {}, "others": {}}


@pytest.mark.usefixtures("no_pld")
def test_under_a_start_of_the_users_own_heads_come_with_the_replies(tmp_path: Path) -> None:
    strategy = make(OwnStart, rounds=3)
    run_strategy(strategy, message_app([as_mod(UDPClient)]), state=tmp_path, num_rounds=3)
    card = strategy.card()
    assert card.releases[-1].clients == FOUR
    for client in FOUR:
        assert follows(card, client, Ledger(tmp_path / f"{client}.ledger", data_set=client)) == 3


class OwnStart(UDP):
    """UDP under a start that calls the abstract methods alone."""

    start = acfl_app.OwnStart.start


@pytest.mark.usefixtures("no_pld")
def test_a_client_that_leaves_in_the_middle_keeps_its_last_head(tmp_path: Path) -> None:
    strategy = make(UDP, loop=LoopOptions(seed=1), rounds=3)

    def leave(server_round: int, arrays: Any) -> None:
        if server_round == 1:
            acfl_app.disconnect(grids[0], 3)

    grids: list[Any] = []
    app = message_app([as_mod(UDPClient)])
    run_strategy(strategy, app, state=tmp_path, before=grids.append, evaluate_fn=leave)
    counts = {h.signed.client: h.signed.head.count for h in strategy.card().heads}
    assert counts == {"0": 3, "1": 3, "2": 3, "3": 1}
