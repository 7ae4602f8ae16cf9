"""FedVS's two halves together: the sums are exact, whoever is late, and rows are where they belong.

The reference computes with integers alone, on everybody's data at once: no shares, no field, no
messages. It draws the same initial weights and the same roundings.
"""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vertical
from acfl_app import connect
from apps import make, model_of, same
from vertical import CLASSES, EMBEDDING, ROWS, TEST_ROWS, Wire, digits, late

from flwr_privacy.clients import VerticalData
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.fedvs.costs import cost_model
from flwr_privacy.fedvs.delays import HalfSlow
from flwr_privacy.fedvs.network import initial_weights, project
from flwr_privacy.fedvs.quantisation import round_stochastic
from flwr_privacy.fedvs.rows import batch_of, order
from flwr_privacy.fedvs.terms import CODE, ENROL
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.simulations.engines.inline import Fault
from flwr_privacy.strategies import FedVS
from flwr_privacy.strategies.vertical import fedvs as server
from flwr_privacy.wire.identity import derive_seed

Array = np.ndarray
SEED, INSECURE = 3, 5
RATE, CLIENT_RATE = 0.5, 4.0


class Reference:
    """The training without a network, in integers and float64."""

    def __init__(
        self, clients: int, *, K: int, D: int = 2, lx: int = 8, lw: int = 8, mean: bool = True
    ) -> None:
        train, _, labels, _ = digits(clients)
        self.N, self.K, self.lx, self.lw = clients, K, lx, lw
        self.mean = mean
        places = order(ROWS, derive_seed("e", "vertical rows", "train"))
        self.labels = labels[places]
        self.X = []
        for columns in train:
            powers = np.concatenate([columns**i for i in range(1, D + 1)], axis=1)[places]
            self.X.append(np.floor(powers * 2**lx + 0.5).astype(np.int64))
        first = [self.stream("initial weights", i, server.CODE, 0) for i in range(clients)]
        self.W = [
            project(initial_weights(X.shape[1], EMBEDDING, random), 2.0)
            for X, random in zip(self.X, first, strict=True)
        ]
        self.server_model = vertical.LinearServerModel()
        self.arrays = self.server_model.initial()
        self.sums: list[Array] = []

    def stream(self, purpose: str, client: int, phase: str, server_round: int) -> SecureRandom:
        return SecureRandom.insecure(INSECURE, purpose, str(client), "e", phase, server_round, 0)

    def step(self, server_round: int, batch_size: int = 8, without: int | None = None) -> None:
        """Make one step, of all clients or without one; see FedVS, Algorithm 1."""
        there = [i for i in range(self.N) if i != without]
        divisor = len(there) if self.mean else 1
        length = math.ceil(ROWS / self.K)
        coded = batch_of(
            length,
            math.ceil(batch_size / self.K),
            derive_seed(SEED, "vertical batches"),
            server_round,
        )
        rows = [k * length + b for k in range(self.K) for b in coded if k * length + b < ROWS]
        total = np.zeros((len(rows), EMBEDDING), np.int64)
        for i in there:
            rounded = round_stochastic(
                self.W[i] * 2.0**self.lw, self.stream("rounding", i, server.DEAL, server_round)
            )
            total += self.X[i][rows] @ rounded
        self.sums.append(total)
        H = (total * 2.0 ** -(self.lx + self.lw) / divisor).astype(np.float32)
        self.arrays, gradient, _ = self.server_model.step(self.arrays, H, self.labels[rows], RATE)
        for i in there:
            real = self.X[i][rows] * 2.0**-self.lx
            moved = real.T @ gradient.astype(np.float64) / divisor
            self.W[i] = np.clip(self.W[i] - CLIENT_RATE * moved, -2.0, 2.0)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[Array]:
    """Keep all sums that a server decodes, as signed integers."""
    found: list[Array] = []
    original = server.decode_rows

    def decode_rows(code: Any, answers: Any) -> Array:
        sums = original(code, answers)
        found.append(code.field.signed(sums))
        return sums

    monkeypatch.setattr(server, "decode_rows", decode_rows)
    return found


def counted(strategy: FedVS, sums: Array, server_round: int) -> Array:
    """Return the rows of a decoded batch that are no pads."""
    segments = strategy.segments("train")
    coded = batch_of(
        segments.length,
        strategy.batch_rows(),
        derive_seed(SEED, "vertical batches"),
        server_round,
    )
    return sums[segments.counted(coded)]


SETTINGS = {
    "K=1": (4, {"K": 1, "T": 1}, {}),
    "K=2, a pad": (6, {"K": 2, "T": 1}, {}),
    "T=2": (6, {"K": 1, "T": 2}, {}),
    "K=3, sums": (8, {"K": 3, "T": 1, "aggregation": "sum"}, {"mean": False}),
    "a small field": (
        4,
        {"K": 1, "prime": 4194301, "data_bits": 5, "weight_bits": 6, "order": 1, "spare": 1},
        {"lx": 5, "lw": 6, "D": 1},
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_F17_the_decoded_sums_are_those_of_the_integers_bit_for_bit(
    name: str, decoded: list[Array], tmp_path: Path
) -> None:
    clients, changes, differently = SETTINGS[name]
    strategy = make(
        FedVS, **vertical.options(clients, experiment_id="e", evaluation="none", **changes)
    )
    rounds = 8  # more than an epoch
    result = vertical.train(clients, strategy=strategy, num_rounds=rounds, state=tmp_path)
    reference = Reference(clients, K=changes["K"], **differently)
    for server_round in range(1, rounds + 1):
        reference.step(server_round)
        sums = counted(strategy, decoded[server_round - 1], server_round)
        np.testing.assert_array_equal(sums, reference.sums[-1])
    for key, array in model_of(result.arrays).items():
        np.testing.assert_array_equal(array, reference.arrays[key])
    for client, own in vertical.weights(tmp_path).items():
        np.testing.assert_allclose(own, reference.W[int(client)], rtol=1e-12, atol=1e-14)


LATE = [
    {},
    {1: "0", 2: "1", 3: "2", 4: "3"},
    {1: "3", 2: "3", 3: "3", 4: "3"},
    {2: "0", 4: "1"},
]


def test_F17_which_clients_straggle_changes_no_bit(tmp_path: Path) -> None:
    """Neither of the server model nor of anybody's weights."""
    found = []
    for number, when in enumerate(LATE):
        folder = tmp_path / str(number)
        folder.mkdir()
        result = vertical.train(
            num_rounds=4, experiment_id="e", stragglers=late(when), state=folder
        )
        if when:
            lost = [line["late"] for line in result.history[1:]]
            assert lost == [len(when.get(t, "")) for t in range(1, 5)]
        found.append((result, vertical.weights(folder)))
    for result, weights in found[1:]:
        assert same(found[0][0].arrays, result.arrays)
        assert sorted(weights) == ["0", "1", "2", "3"]
        for client, own in weights.items():
            np.testing.assert_array_equal(own, found[0][1][client])


def test_F7_any_clients_that_suffice_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """All 21 choices of R = 5 of 7 answers, in any order."""
    original, rounds = server.decode_rows, []

    def decode_rows(code: Any, answers: Any) -> Array:
        places = list(answers)
        found = [
            original(code, {place: answers[place] for place in chosen})
            for chosen in (*itertools.combinations(places, 5), places[::-1])
        ]
        rounds.append(found)
        return found[0]

    monkeypatch.setattr(server, "decode_rows", decode_rows)
    vertical.train(7, K=2, spare=2, num_rounds=3, evaluation="none")
    assert [len(found) for found in rounds] == [22, 22, 22]
    for found in rounds:
        for sums in found[1:]:
            np.testing.assert_array_equal(sums, found[0])


def test_F6_one_answer_too_few_skips_the_round_and_names_the_missing(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The state stays, so the rounds after it are trained as if it had not been."""
    result = vertical.train(
        num_rounds=3, experiment_id="e", state=tmp_path, stragglers=late({2: "13"})
    )
    assert [line["skipped"] for line in result.history[1:]] == [False, True, False]
    assert "round 2: 2 of at least 3 answers are there; missing: 1, 3" in caplog.text
    reference = Reference(4, K=1)
    reference.step(1)
    reference.step(3)
    for key, array in model_of(result.arrays).items():
        np.testing.assert_array_equal(array, reference.arrays[key])
    for client, own in vertical.weights(tmp_path).items():
        np.testing.assert_allclose(own, reference.W[int(client)], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("mean", [True, False])
def test_a_sum_without_a_client_is_divided_by_those_who_are_in_it(
    mean: bool, tmp_path: Path
) -> None:
    """On the server, and by the clients that move by its gradient; the missing one does not."""
    fault = Fault(kind="drop", client="2", phase=server.DEAL, server_round=2)
    result = vertical.train(
        num_rounds=3,
        experiment_id="e",
        evaluation="none",
        aggregation="mean" if mean else "sum",
        least_dealers=3,
        deadline=1.0,
        faults=[fault],
        state=tmp_path,
    )
    assert [line["scheme"]["dealers"] for line in result.history[1:]] == [4, 3, 4]
    reference = Reference(4, K=1, mean=mean)
    for server_round, without in ((1, None), (2, 2), (3, None)):
        reference.step(server_round, without=without)
    for key, array in model_of(result.arrays).items():
        np.testing.assert_array_equal(array, reference.arrays[key])
    for client, own in vertical.weights(tmp_path).items():
        np.testing.assert_allclose(own, reference.W[int(client)], rtol=1e-12, atol=1e-14)


def test_F6_no_more_clients_than_stragglers_train_nothing() -> None:
    when = dict.fromkeys(range(1, 4), "012")
    result = vertical.train(num_rounds=3, stragglers=late(when), evaluation="none")
    assert all(line["skipped"] for line in result.history[1:])
    start = vertical.arrays()
    assert same(start, result.arrays)


def test_F20_more_answers_take_longer_and_never_another_model() -> None:
    """The paper's delays alone: the time grows with K and with T, and depends on K + T only."""
    names, rounds = tuple(str(i) for i in range(8)), 4
    found = {}
    for K, T in ((1, 1), (2, 1), (3, 1), (1, 2), (1, 3)):
        # The delays of what comes before the answers depend on the coded rows of a batch.
        delays = HalfSlow(clients=names, batch_size=8, K=K, batch="real")
        result = vertical.train(
            8,
            K=K,
            T=T,
            num_rounds=rounds,
            experiment_id="e",
            evaluation="none",
            stragglers=delays,
        )
        uploads = sum(line["scheme"]["seconds_upload"] for line in result.history[1:])
        found[K, T] = uploads, result
        assert all(line["late"] == 8 - 2 * (K + T - 1) - 1 for line in result.history[1:])
        assert result.history[rounds]["virtual_seconds"] > uploads
    assert found[1, 1][0] < found[2, 1][0] < found[3, 1][0]
    assert found[2, 1][0] == pytest.approx(found[1, 2][0])
    assert found[3, 1][0] == pytest.approx(found[1, 3][0])
    for T in (2, 3):  # batches depend on K, and on nothing else here
        assert same(found[1, 1][1].arrays, found[1, T][1].arrays)


RATES = {"scale": 0.0, "bandwidth_mbps": 1.0, "speed": 1e6}


def clock(**changes: Any) -> list[float]:
    """Return the virtual seconds after the setup and each round, with no delay but the clients'."""
    result = vertical.train(num_rounds=3, evaluation="none", **changes)
    return [line["virtual_seconds"] for line in result.history]


def test_the_clock_counts_products_and_bytes() -> None:
    found = clock(delays=RATES)
    # Six of 24 pixels each, and their squares. Three of the four clients deal zero masks.
    costs = cost_model(N=4, K=1, T=1, rows=ROWS, widths=[12] * 4, h=EMBEDDING, b=8)
    weights = costs.weights_bytes[0]
    share = (3 * (weights + costs.mask_bytes) + 3 * (weights + costs.mask_bytes)) * 8e-6
    share += (costs.weights_macs[0] + costs.mask_macs) * 1e-6
    upload = costs.answer_bytes * 8e-6 + costs.answer_macs * 1e-6
    back = 4 * 8 * EMBEDDING * 8e-6 + 8 * 12 * EMBEDDING * 1e-6
    setup = costs.encode_macs[0] * 1e-6 + 2 * 3 * costs.data_bytes[0] * 8e-6
    rounds = [share + upload + back] * 3
    assert np.diff(found).tolist() == pytest.approx(rounds)
    assert found[0] == pytest.approx(setup)


@pytest.mark.parametrize("own", [{"share_seconds": 0.25}, {"upload_seconds": 0.25}])
def test_the_users_own_seconds_are_all_that_is_counted(own: dict[str, float]) -> None:
    assert clock(delays={**RATES, **own}) == [0.0, 0.25, 0.5, 0.75]


def test_the_number_of_stragglers_is_checked_when_the_clients_are_known() -> None:
    late = {"stragglers": 3, "share_seconds": 0.0}
    assert len(clock(delays=late)) == 4
    with pytest.raises(InvalidParameterError, match="stragglers = 5"):
        clock(delays={**late, "stragglers": 5})


def test_delays_may_have_more_clients_than_there_are() -> None:
    """Whoever is no member has a delay, and no part in the training."""
    names = [str(i) for i in range(6)]
    assert clock(delays={**RATES, "clients": names}) == clock(delays=RATES)


@pytest.mark.parametrize(
    ("delays", "refused"),
    [
        ({"clients": ("0", "1", "2")}, r"delays.clients = .*: expected all clients, \['3'\] among"),
        ({"stragglers": 5}, "stragglers = 5"),
    ],
)
def test_delays_that_do_not_fit_the_clients_are_refused_before_data_are_shared(
    delays: dict[str, Any], refused: str
) -> None:
    wire = Wire()
    with pytest.raises(InvalidParameterError, match=refused):
        vertical.train(num_rounds=1, evaluation="none", before=wire, delays=delays)
    assert wire.of(wire.asked, ENROL)
    assert not wire.of(wire.asked, CODE)


# -- Rows --------------------------------------------------------------------------------------


class Told:
    """A server model that only remembers which labels it was shown for which embeddings."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Array, Array]] = []

    def initial(self) -> dict[str, Array]:
        return vertical.LinearServerModel().initial()

    def step(self, arrays: Any, embedding: Array, labels: Array, learning_rate: float) -> Any:
        self.pairs.append((embedding.copy(), labels.copy()))
        return dict(arrays), np.zeros_like(embedding), 0.0

    def scores(self, arrays: Any, embedding: Array) -> Array:
        return embedding

    def metrics(self, arrays: Any, embedding: Array, labels: Array) -> dict[str, float]:
        self.pairs.append((embedding.copy(), labels.copy()))
        return {"accuracy": 0.0}


def numbered(count: int) -> tuple[Array, Array]:
    """Return a feature that grows from row to row, and a label that is a function of it."""
    feature = np.arange(1, count + 1) / count
    return feature[:, None], np.floor(feature * 1000)


@pytest.mark.parametrize(("clients", "K"), [(4, 1), (6, 2), (8, 3)])
def test_F24_every_embedding_meets_the_label_of_its_row(
    clients: int, K: int, tmp_path: Path
) -> None:
    """Client 0 has the row's number, from which its label follows; the others have zeros.

    The embedding is the feature times one weight: a row in another's place would be seen.
    529 rows of which no two are alike: with K = 2 there is one pad.
    """
    (train, labels), (test, test_labels) = numbered(529), numbered(24)

    def given(index: int, parts: Any) -> dict[str, Any]:
        own = 1.0 if index == 0 else 0.0
        return {"train": own * train, "test": own * test}

    server_model = Told()
    vertical.train(
        clients,
        K=K,
        num_rounds=math.ceil(math.ceil(529 / K) / math.ceil(100 / K)),
        labels=labels,
        test_labels=test_labels,
        server_model=server_model,
        embedding=1,
        order=1,
        batch_size=100,
        aggregation="sum",
        data_bits=11,
        weight_bits=14,
        app_options={"given": given},
        experiment_id="e",
        state=tmp_path,
    )
    weight = float(vertical.weights(tmp_path)["0"][0, 0])
    assert abs(weight) > 0.3
    seen = np.concatenate([labels for _, labels in server_model.pairs[:-1]])
    np.testing.assert_array_equal(np.sort(seen), np.sort(labels))  # an epoch has each row once
    for embedding, told in server_model.pairs:
        feature = embedding[:, 0] / weight
        # Rows are 1000 / 529 apart; the label is rounded down.
        assert np.abs(feature * 1000 - told - 0.5).max() < 0.94


def test_F24_predictions_come_in_the_order_of_the_clients_rows() -> None:
    (train, labels), (test, _) = numbered(ROWS), numbered(17)

    def given(index: int, parts: Any) -> dict[str, Any]:
        own = 1.0 if index == 0 else 0.0
        return {"train": own * train, "test": own * test, "more": {"later": own * test[::-1]}}

    strategy = make(
        FedVS,
        **vertical.options(
            6,
            K=2,
            labels=labels,
            test_labels=None,
            server_model=Told(),
            embedding=1,
            order=1,
            aggregation="sum",
            data_bits=12,
            weight_bits=12,
        ),
    )
    scores: dict[str, Array] = {}

    def evaluate(server_round: int, arrays: Any) -> None:
        if server_round == 2:
            for part in ("test", "later"):
                scores[part] = strategy.predict(wire.grid, arrays, part)[:, 0]

    wire = Wire()
    vertical.train(
        6,
        strategy=strategy,
        before=wire,
        evaluate_fn=evaluate,
        num_rounds=2,
        app_options={"given": given},
    )
    ratio = scores["test"] / test[:, 0]
    assert scores["test"].shape == (17,)
    np.testing.assert_allclose(ratio, np.full(17, ratio[-1]), rtol=0.02)
    np.testing.assert_allclose(scores["later"], scores["test"][::-1], atol=0.01)


# -- Evaluation --------------------------------------------------------------------------------


def test_the_oracle_sees_what_the_secure_evaluation_sees_up_to_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bound of one embedding's rounding: sum of e_n (x_max 2^-12 + w_max 2^-12 + 2^-24) / N."""
    seen: dict[str, Array] = {}
    for mode in ("secure", "oracle"):
        server_model = vertical.LinearServerModel()

        def metrics(
            arrays: Any, embedding: Array, labels: Array, mode: str = mode
        ) -> dict[str, float]:
            seen[mode] = embedding
            return {"accuracy": 1.0}

        monkeypatch.setattr(server_model, "metrics", metrics)
        vertical.train(
            num_rounds=2,
            experiment_id="e",
            evaluation=mode,
            server_model=server_model,
            data_bits=11,
            weight_bits=12,
            w_max=2.0,
            nodes=[{"partition-id": i, "privacy-simulated": True} for i in range(4)],
        )
    assert seen["secure"].shape == seen["oracle"].shape == (TEST_ROWS, EMBEDDING)
    widths = sum(2 * columns.shape[1] for columns in digits(4)[0])
    bound = widths * (2.0**-12 + 2 * 2.0**-12 + 2.0**-24) / 4
    assert 0 < np.abs(seen["secure"] - seen["oracle"]).max() < bound


def test_plain_embeddings_do_not_leave_a_node_that_is_not_simulated() -> None:
    nodes = [{"partition-id": i, "privacy-simulated": False} for i in range(4)]
    result = vertical.train(num_rounds=2, evaluation="oracle", nodes=nodes)
    assert result.history[2]["server"] == {}
    assert not result.history[2]["skipped"]


def test_an_evaluation_lacks_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """Sums over fewer clients would be another model's."""
    fault = Fault(kind="drop", client="2", phase=server.DEAL_EVALUATION)
    result = vertical.train(num_rounds=2, faults=[fault], deadline=1.0)
    assert result.history[2]["server"] == {}
    text = "round 2 is not evaluated: 3 of at least 4 answers are there; missing: 2"
    assert text in caplog.text


def test_it_evaluates_when_it_was_told_to() -> None:
    result = vertical.train(num_rounds=5, evaluate_every=2)
    evaluated = [bool(line["server"]) for line in result.history]
    assert evaluated == [False, False, True, False, True, True]
    assert set(result.history[2]["server"]) == {"loss", "accuracy"}
    nothing = vertical.train(num_rounds=2, evaluation="none")
    assert not any(line["server"] for line in nothing.history)


def test_it_learns() -> None:
    """Three classes, of which chance has a third; the reference without shares does the same."""
    result = vertical.train(num_rounds=40, evaluate_every=40)
    assert result.history[40]["server"]["accuracy"] > 0.7
    assert CLASSES == 3


# -- Coding anew -------------------------------------------------------------------------------


def test_coding_anew_changes_no_bit_of_the_training(tmp_path: Path) -> None:
    """Nor does how much is coded at a time."""
    models = []
    for number, changes in enumerate(({}, {"refresh_every": 2}, {"relay_limit": 4000})):
        folder = tmp_path / str(number)
        folder.mkdir()
        wire = Wire()
        result = vertical.train(
            6, K=2, num_rounds=3, experiment_id="e", before=wire, state=folder, **changes
        )
        models.append(result.arrays)
        questions = {m.content["flwr-privacy"]["first"] for _, m in wire.of(wire.asked, "code")}
        generations = {
            m.content["flwr-privacy"]["generation"] for _, m in wire.of(wire.asked, "code")
        }
        assert len(generations) == (2 if "refresh_every" in changes else 1)
        assert (len(questions) > 1) == ("relay_limit" in changes)
        assert len(list(folder.glob("*.fedvs/*/*.coded"))) == 2 * 6  # the old ones are gone
        assert len(list(folder.rglob("*.key"))) == 6
    assert same(models[0], models[1])
    assert same(models[0], models[2])


def test_after_a_refresh_new_rows_can_be_predicted() -> None:
    """Rows that clients have got since the setup are coded with the others."""
    here = {"more": False}
    _, test, _, _ = digits(4)

    def given(index: int, parts: Any) -> dict[str, Any]:
        return {**parts, "more": {"later": test[index][:5]} if here["more"] else {}}

    strategy, wire, found = make(FedVS, **vertical.options(4)), Wire(), {}

    def evaluate(server_round: int, arrays: Any) -> None:
        if server_round == 2:
            here["more"] = True
            strategy.refresh(wire.grid)
            found["later"] = strategy.predict(wire.grid, arrays, "later")
            found["test"] = strategy.predict(wire.grid, arrays)

    vertical.train(
        strategy=strategy,
        before=wire,
        evaluate_fn=evaluate,
        num_rounds=2,
        app_options={"given": given},
    )
    assert found["later"].shape == (5, CLASSES)
    np.testing.assert_allclose(found["later"], found["test"][:5], atol=0.1)


def test_clients_that_come_later_take_no_part(caplog: pytest.LogCaptureFixture) -> None:
    wire = Wire()

    def evaluate(server_round: int, _: Any) -> None:
        if server_round == 1:
            connect(wire.grid, 7)

    train, test, _, _ = digits(8)

    def data(index: int, parts: Any) -> dict[str, Any]:
        return parts if index < 4 else {"train": train[index], "test": test[index]}

    result = vertical.train(
        num_rounds=3,
        experiment_id="e",
        before=wire,
        evaluate_fn=evaluate,
        app_options={"given": data},
    )
    alone = vertical.train(num_rounds=3, experiment_id="e")
    assert "clients ['7'] came after the setup and take no part" in caplog.text
    assert same(alone.arrays, result.arrays)
    assert [line["asked"] for line in result.history[1:]] == [4, 4, 4]


def test_vertical_data_of_the_tests_are_what_the_reference_has() -> None:
    """The columns lie within the bounds, or nothing here would be tested."""
    train, test, labels, _ = digits(4)
    assert all(np.abs(columns).max() <= 1 for columns in (*train, *test))
    assert VerticalData(train=train[0]).columns == train[0].shape[1]
    assert len(set(labels)) == CLASSES
