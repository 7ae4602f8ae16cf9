"""Noise that the clients of a secure sum share: what of it is in a sum, and when none is opened."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from apps import make, message_app, model_of, record, run_strategy, same
from asked_terms import udp_terms
from conformance import Killed, dying
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from pinned import pinned_nodes

from flwr_privacy.accounting import Charge, spent
from flwr_privacy.clients import Trained, UDPClient, as_mod
from flwr_privacy.clients.torch import get_arrays, initialise, linear, set_arrays, train_per_record
from flwr_privacy.errors import DeclinedError, InvalidParameterError, ProtocolError
from flwr_privacy.privacy.grid import CODE_LIMIT
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.secure_sum import SecureSum, masked
from flwr_privacy.simulations.engines.inline import Fault
from flwr_privacy.strategies import UDP, LoopOptions, UserLevel
from flwr_privacy.udp import UDPTerms
from flwr_privacy.udp.shared import RECORDS_NAME
from flwr_privacy.wire.fields import write

BIG = {"w": np.zeros((160, 100), np.float32)}
SIZE = 16_000
FEATURES, CLASSES, RECORDS = 6, 3, (20, 40, 60, 80)


def frozen_app() -> ClientApp:
    """Clients that learn nothing: what comes of a round is the noise."""
    app = ClientApp(mods=[as_mod(UDPClient)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays = message.content.array_records["arrays"]
        metrics = MetricRecord({"num-examples": 3})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


def noise_of(result: Any, before: dict[str, Any] | None = None) -> np.ndarray:
    (name,) = result.arrays
    start = BIG if before is None else before
    return (result.arrays[name].numpy() - start[name]).astype(float).reshape(-1)


def check_variance(noise: np.ndarray, sigma: float) -> None:
    """Mean, variance and independence of the entries, to five standard errors."""
    assert abs(noise.mean()) < 5 * sigma / math.sqrt(noise.size)
    assert abs((noise**2).mean() / sigma**2 - 1) < 5 * math.sqrt(2 / noise.size)
    assert abs((noise[1:] * noise[:-1]).mean()) / sigma**2 < 5 / math.sqrt(noise.size)


@pytest.mark.parametrize(
    ("secure_sum", "parties", "lost"),
    [
        (SecureSum(colluders=1), 2, ()),
        (SecureSum(colluders=1), 2, (1, 4)),
        (SecureSum(colluders=2), 1, ()),
        (SecureSum(threshold=5), 4, ()),  # by default a fifth of them may collude
        (SecureSum(threshold=4), 3, (2,)),
    ],
)
def test_a_sum_has_the_noise_of_its_shares_and_at_least_what_is_charged(
    secure_sum: SecureSum, parties: int, lost: tuple[int, ...]
) -> None:
    strategy = UDP(
        privacy=UserLevel(shared_noise=True, clipping_norm=0.5),
        secure_sum=secure_sum,
        loop=LoopOptions(seed=1),
    )
    result = run_strategy(
        strategy,
        frozen_app(),
        nodes=5,
        arrays=record(BIG),
        num_rounds=1,
        faults=[Fault(kind="drop", client=str(i)) for i in lost],
        timeout=1.5 if lost else 5,
        insecure_seed=8,
    )
    assert strategy.terms is not None
    assert strategy.terms.parties == parties
    z, left = strategy.terms.noise_multiplier, 5 - len(lost)
    assert result.history[1]["scheme"]["sum_opened"] == left
    share = z * 2 * 0.5 / math.sqrt(parties)
    noise = noise_of(result)
    check_variance(noise, share * math.sqrt(left) / left)
    # Without the shares of those who may collude the sum still has what the charge says.
    colluders = secure_sum.colluders_of(5)
    assert (left - colluders) * share**2 >= (z * 2 * 0.5) ** 2 * (1 - 1e-12)
    assert set(result.history[1]["train"]) == {"insecure-noise"}
    assert strategy.releases[0].charge.noise_multiplier == z
    assert result.guarantee.spent == pytest.approx(8.0, rel=1e-6)


def test_a_round_that_too_few_are_left_for_is_skipped() -> None:
    rounds: list[dict[str, Any]] = []

    def leaving(grid: Any) -> None:
        nodes = list(grid.get_node_ids())
        grid.get_node_ids = lambda: nodes if len(rounds) < 2 else nodes[:4]

    result = run_strategy(
        UDP(
            privacy=UserLevel(shared_noise=True, clipping_norm=0.5),
            secure_sum=SecureSum(threshold=5),
            loop=LoopOptions(seed=1, on_round=rounds.append),
        ),
        frozen_app(),
        nodes=5,
        arrays=record(BIG),
        before=leaving,
        timeout=2,
        insecure_seed=8,
    )
    assert [line.get("skipped") for line in result.history] == [None, False, False, True]
    assert "5 of 5 clients" in result.guarantee.secure_sum


def test_the_noise_of_a_sum_is_that_many_times_less_than_with_noise_of_each() -> None:
    variances = {}
    for shared in (False, True):
        secure_sum = SecureSum(threshold=4, colluders=0)
        strategy = UDP(
            privacy=UserLevel(shared_noise=shared), secure_sum=secure_sum, loop=LoopOptions(seed=1)
        )
        result = run_strategy(
            strategy, frozen_app(), arrays=record(BIG), num_rounds=1, insecure_seed=1
        )
        variances[shared] = float((noise_of(result) ** 2).mean())
        charges = {charge for own in strategy.card().charges().values() for charge in own}
        assert len(charges) == 1
        assert spent(charges, delta=1e-5) == pytest.approx(8.0, rel=1e-6)
    ratio = variances[False] / variances[True]
    assert abs(ratio / 4 - 1) < 5 * 2 / math.sqrt(SIZE)


def test_below_the_threshold_nothing_is_opened_and_the_model_stays(tmp_path: Path) -> None:
    strategy = UDP(
        privacy=UserLevel(shared_noise=True), secure_sum=SecureSum(), loop=LoopOptions(seed=1)
    )
    faults = [Fault(kind="drop", client=str(i), server_round=1) for i in (0, 1, 2)]
    models: list[ArrayRecord] = []
    result = run_strategy(
        strategy,
        message_app([as_mod(UDPClient)]),
        nodes=5,
        num_rounds=2,
        faults=faults,
        timeout=1.5,
        state=tmp_path,
        evaluate_fn=lambda _, arrays: models.append(arrays),
    )
    assert [line.get("skipped") for line in result.history] == [None, True, False]
    assert same(models[0], models[1])
    assert [r.clients for r in strategy.releases] == [("0", "1", "2", "3", "4")] * 2
    for i in range(5):  # one charge for each round, opened or not
        charges = [e.charge for e in Ledger(tmp_path / f"{i}.ledger", data_set=str(i)).entries()]
        assert charges == strategy.card().charges()[str(i)]
        assert len(charges) == 2


def test_cohorts_equal_one_node_per_client() -> None:
    results = []
    for nodes in (4, 2):
        strategy = make(
            UDP,
            shared_noise=True,
            secure_sum=SecureSum(),
            seed=3,
            experiment_id="e",
            **({"clients": 4} if nodes == 2 else {}),
        )
        app = message_app([as_mod(UDPClient)])
        results.append(run_strategy(strategy, app, nodes=nodes, insecure_seed=5))
    assert same(results[0].arrays, results[1].arrays)
    assert results[0].guarantee == results[1].guarantee
    for line, twin in zip(results[0].history[1:], results[1].history[1:], strict=True):
        assert line["scheme"] == twin["scheme"]
        assert line["bytes_up"] == twin["bytes_up"]


def test_the_promise_says_whom_it_is_against_and_for_how_many_it_holds() -> None:
    secure_sum = SecureSum(threshold=4, colluders=1)
    strategy = UDP(
        privacy=UserLevel(shared_noise=True), secure_sum=secure_sum, loop=LoopOptions(seed=1)
    )
    result = run_strategy(strategy, message_app([as_mod(UDPClient)]), nodes=5, num_rounds=2)
    text = result.guarantee.text()
    assert "clients that collude with it" in result.guarantee.adversary
    assert "4 of the 5 of a round, of whom at most 1 collude" in text
    assert [len(r.clients) for r in strategy.releases] == [5, 5]
    z = strategy.releases[0].charge.noise_multiplier
    assert [line["scheme"]["noise_multiplier"] for line in result.history[1:]] == [z, z]
    assert strategy.card(final=True).verify()


# -- Record level --------------------------------------------------------------------------------


def net() -> torch.nn.Module:
    return initialise(lambda: linear(FEATURES, CLASSES), 0)


def initial() -> ArrayRecord:
    return ArrayRecord({name: Array(array) for name, array in get_arrays(net()).items()})


def data(client: int) -> tuple[np.ndarray, np.ndarray]:
    draws = np.random.default_rng(client)
    size = RECORDS[client]
    return draws.normal(size=(size, FEATURES)).astype(np.float32), draws.integers(0, CLASSES, size)


def record_app() -> ClientApp:
    app = ClientApp(mods=[as_mod(UDPClient)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = net()
        arrays = message.content.array_records["arrays"]
        set_arrays(model, {name: array.numpy() for name, array in arrays.items()})
        train_per_record(model, *data(int(context.node_config["partition-id"])))
        trained = ArrayRecord({name: Array(array) for name, array in get_arrays(model).items()})
        metrics = MetricRecord({"num-examples": 999_999, "loss": 0.5})
        return Message(RecordDict({"arrays": trained, "metrics": metrics}), reply_to=message)

    return app


RECORD_LEVEL: dict[str, Any] = {
    "unit": "record",
    "learning_rate": 0.5,
    "clipping_norm": 0.3,
    "shared_noise": True,
    "seed": 1,
}


def mean_of_steps() -> dict[str, np.ndarray]:
    """The step on all records of all clients, by a loop over them."""
    model = net()
    total = [np.zeros(tuple(p.shape)) for p in model.parameters()]
    for client in range(4):
        for x, y in zip(*data(client), strict=True):
            model.zero_grad()
            loss = torch.nn.functional.cross_entropy(
                model(torch.tensor(x)[None]), torch.tensor([int(y)])
            )
            loss.backward()
            gradients = [p.grad.double().numpy() for p in model.parameters()]  # type: ignore[union-attr]
            norm = math.sqrt(sum(float((g**2).sum()) for g in gradients))
            for part, gradient in zip(total, gradients, strict=True):
                part += gradient * min(1, 0.3 / norm)
    names = [name for name, _ in model.named_parameters()]
    return {n: -0.5 * part / sum(RECORDS) for n, part in zip(names, total, strict=True)}


@pytest.mark.usefixtures("no_pld")
@pytest.mark.parametrize("cohort", [False, True])
def test_at_record_level_every_record_weighs_the_same(cohort: bool) -> None:
    secure_sum = SecureSum(colluders=0)
    options = {"clients": 4} if cohort else {}
    strategy = make(UDP, **RECORD_LEVEL, secure_sum=secure_sum, epsilon=1000.0, **options)
    result = run_strategy(
        strategy, record_app(), nodes=2 if cohort else 4, arrays=initial(), num_rounds=1
    )
    assert strategy.terms is not None
    # Whole noise 2 eta C z on the sum of all records' steps, 4 of its 3 shares.
    sigma = strategy.terms.noise_multiplier * 2 * 0.5 * 0.3 * (1 + 1 / 64)
    sigma *= math.sqrt(4 / 3) / sum(RECORDS)
    start = model_of(initial())
    for name, expected in mean_of_steps().items():
        moved = result.arrays[name].numpy().astype(float) - start[name]
        np.testing.assert_allclose(moved, expected, atol=6 * sigma + 1e-6)
        assert np.abs(expected).max() > 8 * sigma  # there is something to see
    assert strategy.card(final=True).verify()


@pytest.mark.usefixtures("no_pld")
@pytest.mark.parametrize("lie", ["weight", "records"])
def test_a_client_that_lies_about_its_weight_spoils_its_round_and_no_training(
    lie: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The sum of the weights, or of the records, is what no honest clients have."""
    honest, lied = masked.residues, list[str]()

    def residues(arrays: Any, weight: int, bounds: Any) -> Any:
        if lied:
            return honest(arrays, weight, bounds)
        lied.append(lie)
        if lie == "records":
            return honest({**arrays, RECORDS_NAME: np.array([-sum(RECORDS)])}, weight, bounds)
        vector = honest(arrays, weight, bounds)
        vector[-1] = 0
        return vector

    monkeypatch.setattr("flwr_privacy.clients.node.secure_sum.residues", residues)
    strategy = make(
        UDP, **RECORD_LEVEL, secure_sum=SecureSum(colluders=0), epsilon=1000.0, rounds=2
    )
    result = run_strategy(strategy, record_app(), nodes=4, arrays=initial(), num_rounds=2)
    assert [line["skipped"] for line in result.history[1:]] == [True, False]
    assert "somebody sent a wrong one" in caplog.text


def test_at_record_level_the_noise_of_a_sum_is_for_one_record() -> None:
    """A small epsilon: next to the noise the steps are nothing."""
    strategy = make(UDP, **RECORD_LEVEL, secure_sum=SecureSum(colluders=1), epsilon=0.05, rounds=40)
    noises: list[np.ndarray] = []
    models: list[dict[str, Any]] = []

    def keep(server_round: int, arrays: ArrayRecord) -> None:
        models.append(model_of(arrays))

    run_strategy(
        strategy, record_app(), arrays=initial(), num_rounds=30, evaluate_fn=keep, insecure_seed=6
    )
    assert strategy.terms is not None
    assert strategy.terms.parties == 2  # three of four, one of whom colludes
    for before, after in itertools.pairwise(models):
        noises += [(after[n].astype(float) - before[n]).reshape(-1) for n in before]
    noise = np.concatenate(noises)
    share = strategy.terms.noise_multiplier * strategy.terms.shared_sensitivity() / math.sqrt(2)
    assert share * math.sqrt(3 - 1) >= strategy.terms.noise_multiplier * 2 * 0.5 * 0.3
    sigma = 2 * share / sum(RECORDS)
    step = (0.5 * 0.3) ** 2 / 21 / sigma**2  # at most, of a coordinate, beside its noise
    assert step < 0.01
    assert abs((noise**2).mean() / sigma**2 - 1) < 5 * math.sqrt(2 / noise.size) + step


def test_more_records_than_there_is_room_for_are_left_out_and_the_log_says_so(caplog: Any) -> None:
    strategy = make(UDP, **RECORD_LEVEL, secure_sum=SecureSum(colluders=0), max_records=60)
    result = run_strategy(strategy, record_app(), arrays=initial(), num_rounds=1, timeout=2)
    assert "20 of 80 records are left out: max_records = 60" in caplog.text
    assert result.history[1]["refused"] == {}
    assert result.history[1]["scheme"]["sum_opened"] == 4
    assert strategy.releases[0].clients == ("0", "1", "2", "3")


# -- One client, asked directly ------------------------------------------------------------------

TERMS = udp_terms(noise_multiplier=2.0, epsilon=10.0, grid=-20, parties=3)


class Node:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (own,) = pinned_nodes(folder, ["w"])
        self.config: dict[str, Any] = {**own, "privacy-state": str(folder)}
        self.trained = 0

    def ask(self, terms: UDPTerms = TERMS, **changes: Any) -> Any:
        def train(start: Any) -> Trained:
            self.trained += 1
            return Trained(start, {})

        question = {"experiment-id": "e", "round": 1, "request": 0}
        summed = {"summed": 3, "honest": 3, "certain": 3, "code-limit": CODE_LIMIT}
        fields = {**write(terms), **question, **summed, **changes}
        client = UDPClient(None, Context(1, 1, self.config, RecordDict(), {}))
        return client.handle("train", BIG, fields, train)

    def charges(self) -> list[Charge]:
        return [e.charge for e in Ledger(self.folder / "w.ledger", data_set="w").entries()]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.mark.parametrize(
    ("believed", "text"),
    [
        ({"summed": 0}, "outside of a secure sum"),
        ({"honest": 1}, "counts on 1"),
        ({"honest": 2}, "counts on 2"),
    ],
)
def test_a_share_is_not_given_to_fewer_than_it_is_meant_for(
    node: Node, believed: dict[str, int], text: str
) -> None:
    with pytest.raises(DeclinedError, match=text):
        node.ask(**believed)
    assert (node.trained, node.charges()) == (0, [])


def test_a_question_is_answered_once(node: Node) -> None:
    node.config["insecure-seed"] = 4
    arrays, fields = node.ask()
    assert fields["metrics"] == {"num-examples": 1, "insecure-noise": 1.0}
    share = 2.0 * 2 * 1.0 / math.sqrt(3)
    check_variance(arrays["w"].reshape(-1).astype(float) * 2.0**-20, share)
    with pytest.raises(DeclinedError, match="the question of round 1 was answered before"):
        node.ask()
    assert (node.trained, len(node.charges())) == (1, 1)
    node.ask(round=2, summed=50, honest=40, certain=40)  # more are as good
    assert node.charges() == [Charge(neighbours="replace_one", noise_multiplier=2.0, gap=1e-3)] * 2


def test_a_secure_sum_that_takes_no_large_codes_is_refused_before_there_are_any(node: Node) -> None:
    with pytest.raises(ProtocolError, match="the noise needs"):
        node.ask(**{"code-limit": 2**20})
    assert (node.trained, node.charges()) == (0, [])


def test_the_nodes_policy_and_the_budget_bind_shares_as_well(node: Node) -> None:
    path = node.folder / "policy.toml"
    node.config["privacy-policy"] = str(path)
    for policy, text in (
        ("min_noise_multiplier = 3.0", "noise multiplier 2"),
        ("max_epsilon = 0.5", "max_epsilon = 0.5"),
        ("min_sigma = 4.5", "sigma 4: "),
    ):
        path.write_text(policy)
        with pytest.raises(DeclinedError, match=text):
            node.ask()
    assert node.charges() == []
    path.write_text("")
    cost = Charge(neighbours="replace_one", noise_multiplier=2.0, gap=1e-3)
    while spent([*node.charges(), cost], delta=1e-5) <= 10.0:
        node.ask(round=len(node.charges()) + 1)
    answered = len(node.charges())
    with pytest.raises(DeclinedError, match=f"the budget is spent: .* after {answered} releases"):
        node.ask(round=99)
    assert len(node.charges()) == answered > 0
    assert node.trained == answered


@pytest.mark.parametrize(("grid", "text"), [(0, "finer grid"), (-35, "coarser grid|below")])
def test_a_grid_that_does_not_fit_the_shares_is_refused(node: Node, grid: int, text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        node.ask(UDPTerms(**{**TERMS.__dict__, "grid": grid}))
    assert node.charges() == []


def test_a_round_that_broke_off_is_declined_and_not_charged_twice(tmp_path: Path) -> None:
    for name in ("state", "run"):
        (tmp_path / name).mkdir()
    options: dict[str, Any] = {
        "shared_noise": True,
        "secure_sum": SecureSum(),
        "seed": 1,
        "experiment_id": "e",
        "run_dir": tmp_path / "run",
    }

    app = message_app([as_mod(UDPClient)])
    run: dict[str, Any] = {"state": tmp_path / "state", "timeout": 2}
    with pytest.raises(Killed):
        run_strategy(make(dying(UDP, server_round=2), **options), app, **run)
    strategy = make(UDP, **options, resume=True)
    result = run_strategy(strategy, app, **run)
    assert [line.get("skipped") for line in result.history] == [None, False, True, False]
    for i in range(4):
        path = tmp_path / "state" / f"{i}.ledger"
        entries = Ledger(path, data_set=str(i)).entries()
        assert [entry.question.server_round for entry in entries] == [1, 2, 3]
        assert [entry.charge for entry in entries] == strategy.card().charges()[str(i)]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"secure_sum": None}, "shared_noise = True: expected noise, and a secure sum"),
        ({"noise": "none"}, "shared_noise = True: expected false where there is no noise"),
        ({"noise": "gdp"}, "noise = 'gdp': expected 'gdp_fixed' or 'paper'"),
        ({"noise": "gdp_worst"}, "noise = 'gdp_worst'"),
        ({"noise": "zcdp"}, "noise = 'zcdp'"),
        ({"epsilon": {"a": 1.0}}, "one budget for all with a secure sum"),
        ({"delta": {"a": 1e-5}}, "one budget for all with a secure sum"),
        ({**RECORD_LEVEL, "local_epochs": 2}, "local_epochs = 2: expected 1 where noise is shared"),
        ({**RECORD_LEVEL, "batch_size": 8}, "batch_size = 8: expected None where noise is shared"),
        ({**RECORD_LEVEL, "sampling_rate": 0.5}, "sampling_rate = 0.5: expected 1 where noise"),
        (
            {**RECORD_LEVEL, "sensitivity_bound": "convex"},
            "sensitivity_bound = 'convex': expected 'general'",
        ),
        ({**RECORD_LEVEL, "max_records": 0}, "max_records = 0"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParameterError) as error:
        make(UDP, **{"shared_noise": True, "secure_sum": SecureSum(), **options})
    assert text in str(error.value)
