"""MSP and MSPDQ on real messages: what travels, how often, and what model comes out."""

import math
from collections import Counter
from typing import Any, ClassVar

import numpy as np
import pytest
from apps import make, message_app, model_of, record, run_strategy, same, step
from flwr.app import Message
from flwr.serverapp.strategy import FedAdam

from flwr_privacy.clients import FedAvgClient, MSPClient, MSPDQClient, as_mod
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.mspdq import k_rounds
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.simulations.engines.inline import Fault
from flwr_privacy.stragglers import StragglerModel
from flwr_privacy.strategies import MSP, MSPDQ, FedAvg, LoopOptions
from flwr_privacy.wire.identity import client_id_from, derive_seed
from flwr_privacy.wire.message import RECORD

MODEL = {
    "w": np.arange(6, dtype=np.float32).reshape(2, 3) / 7 + 0.1,
    "b": np.linspace(-1, 1, 4, dtype=np.float64),
    "scale": np.array(0.5),
}
SIZE = 11
EXACT = {name: array.astype(np.float64) for name, array in MODEL.items()}
CLIENTS = {MSP: MSPClient, MSPDQ: MSPDQClient, FedAvg: FedAvgClient}


class Wire:
    """Sees all messages; swallows what clients say after some mixing steps of round 1."""

    def __init__(self, lost: Any = ()) -> None:
        self.lost = set(lost)  # (client, step)
        self.asked: list[tuple[dict[str, Any], Message]] = []
        self.said: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def __call__(self, grid: Any) -> None:
        push, pull = grid.push_messages, grid.pull_messages

        def push_messages(messages: list[Message]) -> Any:
            self.asked += [(dict(message.content[RECORD]), message) for message in messages]
            return push(messages)

        def pull_messages(ids: list[str]) -> Any:
            return [reply for reply in pull(ids) if not self._takes(reply)]

        grid.push_messages, grid.pull_messages = push_messages, pull_messages

    def _takes(self, reply: Message) -> bool:
        if reply.has_error():
            return False
        head = dict(reply.content[RECORD])
        if head["phase"] not in ("train", "sync", "mix"):
            return False
        self.said.append((head, model_of(reply.content["arrays"])))
        place = (head["client-id"], head["request"])
        return head["phase"] == "mix" and head["round"] == 1 and place in self.lost

    def first(self) -> dict[str, np.ndarray]:
        """Return the first visible sub-states."""
        trained = [entry for entry in self.said if entry[0]["phase"] == "train"]
        return {head["client-id"]: vector(arrays) for head, arrays in trained}

    def exchanges(self, server_round: int) -> list[tuple[str, frozenset[int]]]:
        """Return the exchanges of a round in their order, with the nodes that were asked."""
        nodes: dict[tuple[str, int], set[int]] = {}
        for head, message in self.asked:
            if head["round"] == server_round and head["phase"] in ("train", "sync", "mix"):
                place = nodes.setdefault((head["phase"], head["request"]), set())
                assert message.metadata.dst_node_id not in place  # asked once
                place.add(message.metadata.dst_node_id)
        return [(phase, frozenset(asked)) for (phase, _), asked in nodes.items()]


def vector(arrays: Any) -> np.ndarray:
    values = [np.asarray(getattr(a, "numpy", lambda a=a: a)()) for a in arrays.values()]
    return np.concatenate([value.astype(np.float64).reshape(-1) for value in values])


def trained(client: int | str, model: Any = EXACT) -> np.ndarray:
    return vector({name: step(array, int(client)) for name, array in model.items()})


def run(strategy: Any, *, arrays: Any = EXACT, client: Any = None, **options: Any) -> Any:
    client = client or next(c for s, c in CLIENTS.items() if type(strategy) is s)
    options = {"num_rounds": 1, "insecure_seed": 7, **options}
    return run_strategy(strategy, message_app([as_mod(client)]), arrays=record(arrays), **options)


def played(
    strategy: Any,
    visible: dict[str, np.ndarray],
    lost: set[tuple[str, int]] = frozenset(),  # type: ignore[assignment]
    draws: dict[str, int] | None = None,
) -> list[np.ndarray]:
    """Return W[0], ..., W[K] by equations (3) and (4), over those that are left."""
    terms = strategy.terms
    v = dict(visible)
    h = {client: 2 * trained(client) - v[client] for client in v}
    draws = draws or dict.fromkeys(v, 1)

    def mean() -> np.ndarray:
        return sum(draws[c] * v[c] for c in v) / sum(draws[c] for c in v)

    averages = [mean()]
    for k in range(terms.rounds):
        for c in list(v):
            flow = terms.gamma * (h[c] - v[c])
            v[c], h[c] = v[c] + terms.kappa * (averages[-1] - v[c]) + flow, h[c] - flow
            if (c, k) in lost:
                del v[c], h[c]
        averages.append(mean())
    return averages


# -- F11: both ends have the same values ---------------------------------------------------------


class Watched(MSPDQClient):
    """Notes what it keeps as heard after every message."""

    heard: ClassVar[dict[tuple[str, int], np.ndarray]] = {}

    def handle(self, *question: Any) -> Any:
        reply = super().handle(*question)
        state = self.context.state
        if "heard" in state.get("flwr-privacy.sub-states", {}):
            kept = state["flwr-privacy.sub-states"]["heard"].numpy()
            self._note(int(state["flwr-privacy.mixing"]["sent"]), kept)
        return reply

    def _said(self, round_: Any, member: Any, *rest: Any) -> Any:
        reply = super()._said(round_, member, *rest)
        self._note(member.sent, member.heard)
        return reply

    def _note(self, k: int, heard: np.ndarray) -> None:
        self.heard[str(self.context.node_config["partition-id"]), k] = np.array(heard)


class Recording(MSPDQ):
    """Notes what it has of every client after every message."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.decoded: dict[tuple[str, int], np.ndarray] = {}

    def _average(self, mean: Any) -> Any:
        average = super()._average(mean)
        k = self._messages - 1 + self._sent()
        for client in self._members:
            self.decoded[client, k] = np.array(self._hub._value(client))
        return average


def modes() -> list[tuple[str, str]]:
    starts, rules = ("independent", "reference", "global"), ("self", "linf", "paper", "bound")
    return [(s, r) for s in starts for r in rules if r != "bound" or s == "global"]


@pytest.mark.parametrize(("start", "interval"), modes())
@pytest.mark.parametrize("bits", [1, 4, 8, 16])
def test_F11_the_server_has_what_the_client_keeps_bit_for_bit(
    bits: int, start: str, interval: str
) -> None:
    Watched.heard.clear()
    strategy = Recording(
        bits=bits, mixing_start=start, interval=interval, mixing_rounds=3, min_available_nodes=3
    )
    run(strategy, arrays=MODEL, client=Watched, nodes=3)
    leaps = start != "independent" and interval in ("self", "bound")
    expected = {(str(c), k) for c in range(3) for k in range(int(leaps), 4)}
    assert set(strategy.decoded) == set(Watched.heard) == expected
    for place, value in strategy.decoded.items():
        np.testing.assert_array_equal(value, Watched.heard[place])
    last = [strategy.decoded[str(c), 3] for c in range(3)]
    assert any((value != last[0]).any() for value in last[1:])


# -- What travels --------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", range(1, 17))
def test_F11_a_message_has_no_more_bytes_than_its_codes(bits: int) -> None:
    wire = Wire()
    run(MSPDQ(bits=bits, mixing_rounds=1), nodes=2, before=wire)
    assert len(wire.said) == 4
    for _, arrays in wire.said:
        assert set(arrays) == {"codes"}
        assert arrays["codes"].dtype == np.uint8
        assert arrays["codes"].shape == (math.ceil(bits * SIZE / 8),)


@pytest.mark.parametrize(
    ("strategy", "most", "least"),
    [
        (lambda: FedAvg(), 32, 32),
        (lambda: MSP(mixing_rounds=4), 160, 160),
        (lambda: MSPDQ(mixing_rounds=10, bits=8), 88, 88),
        (lambda: MSPDQ(mixing_rounds=20, bits=6), 126, 126),
        (lambda: MSPDQ(mixing_rounds=30, bits=8), 248, 248),
        (lambda: MSPDQ(mixing_rounds=10, bits=8, mixing_start="global"), 80, 80),
        (lambda: MSPDQ(mixing_rounds=10, bits=8, mixing_start="global", interval="linf"), 80, 80),
        (lambda: MSPDQ(mixing_rounds=10, bits=8, mixing_start="reference"), 88, 80),
        (lambda: MSPDQ(mixing_rounds=10, bits=8, paper=True, replacement=False), 88, 80),
    ],
)
def test_F19_bits_of_a_coordinate_in_a_learning_round(strategy: Any, most: int, least: int) -> None:
    """From a common start only the client that gives it uploads a first message."""
    wire = Wire()
    model = {"w": np.linspace(0.1, 1, 16, dtype=np.float32)}
    run(strategy(), arrays=model, nodes=2, before=wire)
    bits: Counter[str] = Counter()
    for head, arrays in wire.said:
        bits[head["client-id"]] += sum(8 * array.nbytes for array in arrays.values())
    assert sorted(bits.values()) == [16 * least, 16 * most]


FUSED = [(s, r) for s in ("reference", "global") for r in ("self", "fixed")]
FUSED.append(("global", "bound"))
ASKED = [(s, r) for s in ("reference", "global") for r in ("paper", "linf")]


@pytest.mark.parametrize(
    ("strategy", "phases"),
    [
        (MSP(mixing_rounds=0), ["train"]),
        (MSP(mixing_rounds=3), ["train", "mix", "mix", "mix"]),
        *(
            (MSPDQ(mixing_rounds=3, interval=rule), ["train", "mix", "mix", "mix"])
            for rule in ("self", "linf", "paper", "fixed")
        ),
        *(
            (
                MSPDQ(mixing_rounds=3, mixing_start=start, interval=rule),
                ["train", *["sync"] * (start == "reference"), "mix", "mix"],
            )
            for start, rule in FUSED
        ),
        *(
            (
                MSPDQ(mixing_rounds=3, mixing_start=start, interval=rule),
                ["train", *["sync"] * (start == "reference"), "mix", "mix", "mix"],
            )
            for start, rule in ASKED
        ),
        (MSPDQ(mixing_rounds=1, mixing_start="global"), ["train"]),
    ],
)
def test_the_exchanges_of_a_learning_round_are_with_the_same_clients(
    strategy: Any, phases: list[str]
) -> None:
    wire = Wire()
    strategy.fraction_train = 0.5
    result = run(strategy, nodes=5, before=wire, num_rounds=2)
    for server_round in (1, 2):
        exchanges = wire.exchanges(server_round)
        assert [phase for phase, _ in exchanges] == phases
        assert len({nodes for _, nodes in exchanges}) == 1
        assert len(exchanges[0][1]) == 2
    assert [line["exchanges"] for line in result.history] == [1, len(phases), len(phases)]


@pytest.mark.parametrize("strategy", [MSP, MSPDQ])
def test_a_client_that_is_drawn_twice_is_asked_once(strategy: Any) -> None:
    wire = Wire()
    drawn = make(strategy, replacement=True, min_train_nodes=9, mixing_rounds=2, seed=1)
    line = run(drawn, nodes=4, before=wire).history[1]  # `exchanges` fails on a second question
    assert [len(nodes) for _, nodes in wire.exchanges(1)] == [len(drawn.draws(1))] * 3
    assert sum(drawn.draws(1).values()) == line["scheme"]["draws"] == 9
    assert line["scheme"]["distinct"] == len(drawn.draws(1)) <= 4


def test_nothing_is_asked_of_the_clients_beyond_the_mixing() -> None:
    wire = Wire()
    result = run(MSPDQ(mixing_rounds=1, fraction_evaluate=1.0), before=wire)
    assert {head["phase"] for head, _ in wire.asked} == {"hello", "train", "mix"}
    assert result.history[1]["train"] == result.history[1]["evaluate"] == {}


# -- The model that comes out --------------------------------------------------------------------

GAINS = {
    "const": [0.2, 0.2, 0.2],
    "harmonic": [0.2, 0.1, 0.2 / 3],
    "sqrt": [0.2, 0.2 / math.sqrt(2), 0.2 / math.sqrt(3)],
}


@pytest.mark.parametrize("kappa", [0.3, 0.5])
@pytest.mark.parametrize(("m", "mass"), [(1, "paper"), (2, "paper"), (2, "normalized")])
@pytest.mark.parametrize("coupling", GAINS)
def test_F7_of_the_first_means_error_the_residual_is_left(
    coupling: str, m: int, mass: str, kappa: float
) -> None:
    wire = Wire()
    strategy = MSP(kappa=kappa, gamma=0.2, coupling=coupling, mixing_rounds=3, m=m, mass=mass)
    result = run(strategy, before=wire)
    weight = m if mass == "paper" else 1
    left = math.prod(1 - (1 + weight) * a for a in GAINS[coupling])
    mean = np.mean([trained(client) for client in range(4)], axis=0)
    error = np.mean(list(wire.first().values()), axis=0) - mean
    assert np.abs(error).max() > 0.05
    np.testing.assert_allclose(vector(result.arrays) - mean, left * error, atol=1e-12)
    assert result.history[1]["scheme"]["residual"] == pytest.approx(left, rel=1e-12)
    assert result.history[1]["scheme"]["mixing_rounds"] == 3


def test_random_couplings_reach_the_mean_too_and_have_no_residual() -> None:
    result = run(MSP(coupling="random", mixing_rounds=150, kappa=0.5))
    mean = np.mean([trained(client) for client in range(4)], axis=0)
    np.testing.assert_allclose(vector(result.arrays), mean, atol=1e-6)
    assert "residual" not in result.history[1]["scheme"]


@pytest.mark.parametrize("arrays", [MODEL, EXACT])
def test_many_steps_give_the_unweighted_mean_of_the_models(arrays: Any) -> None:
    """The clients' own weights, 1 to 4, count for nothing."""
    result = run(MSP(mixing_rounds=40), arrays=arrays)
    mean = np.mean([trained(client, arrays) for client in range(4)], axis=0)
    np.testing.assert_allclose(vector(result.arrays), mean, atol=2e-6)
    for name, array in arrays.items():
        got = result.arrays[name].numpy()
        assert (got.dtype, got.shape) == (array.dtype, array.shape)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mixing_start": "reference", "interval": "linf"},
        {"mixing_start": "global", "interval": "fixed", "pi": 10.0},
        {"mixing_start": "global", "interval": "bound", "bound": 2.0},
    ],
)
def test_codes_of_16_bits_give_the_mean_to_the_last_step_of_the_knobs(options: Any) -> None:
    result = run(make(MSPDQ, bits=16, mixing_rounds=30, **options))
    mean = np.mean([trained(client) for client in range(4)], axis=0)
    scheme = result.history[1]["scheme"]
    largest = scheme["width"] / (scheme["levels"] - 1)
    np.testing.assert_allclose(vector(result.arrays), mean, atol=largest + 1e-5)
    assert largest < 0.01
    assert scheme["saturated"] == 0


def test_from_the_global_start_the_round_is_a_step_of_fedavg() -> None:
    """F14: of the way to the mean 1 - rho is gone."""
    result = run(MSPDQ(bits=16, mixing_start="global", gamma=0.1, mixing_rounds=4))
    mean = np.mean([trained(client) for client in range(4)], axis=0)
    expected = vector(EXACT) + (1 - 0.8**4) * (mean - vector(EXACT))
    np.testing.assert_allclose(vector(result.arrays), expected, atol=1e-4)


def test_what_saturates_is_counted() -> None:
    result = run(MSPDQ(mixing_start="global", interval="bound", bound=0.01, mixing_rounds=2))
    # Clients 1 to 3 move every entry by more than 0.2, client 0 moves none.
    assert result.history[1]["scheme"]["saturated"] == 3 * SIZE * 2


@pytest.mark.parametrize(("strategy", "near"), [(MSP, 1e-12), (MSPDQ, 1e-3)])
def test_drawn_twice_weighs_twice(strategy: Any, near: float) -> None:
    options = {"bits": 16} if strategy is MSPDQ else {}
    drawn = make(
        strategy, replacement=True, min_train_nodes=7, mixing_rounds=1, gamma=0.5, seed=2, **options
    )
    result = run(drawn)
    counts = drawn.draws(1)
    assert len(set(counts.values())) > 1
    mean = sum(n * trained(client) for client, n in counts.items()) / 7
    np.testing.assert_allclose(vector(result.arrays), mean, atol=near)


@pytest.mark.parametrize("strategy", [MSP, MSPDQ])
def test_what_is_not_sent_keeps_the_servers_values(strategy: Any) -> None:
    model = {
        "batches": np.array(3),
        **MODEL,
        "bn.running_mean": np.ones(4, np.float32),
        "mine": np.full(3, 2.0),
    }
    wire = Wire()
    mixing = strategy(mixing_rounds=1, gamma=0.5, keep_back=["mine"])
    result = run(mixing, arrays=model, before=wire, num_rounds=2)
    assert list(result.arrays) == list(model)
    for name in ("batches", "bn.running_mean", "mine"):
        np.testing.assert_array_equal(result.arrays[name].numpy(), model[name])
    for name in MODEL:
        assert (result.arrays[name].numpy() != model[name]).all()
    sent = {name for _, arrays in wire.said for name in arrays}
    assert sent == ({"codes"} if strategy is MSPDQ else set(MODEL))
    assert "batches, bn.running_mean, mine" in result.guarantee.text()


class Seen(FedAdam):
    """Notes what it is given and what it makes of it."""

    def __init__(self) -> None:
        super().__init__(eta=0.1)
        self.seen: list[Any] = []

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        replies = list(replies)
        result = super().aggregate_train(server_round, replies)
        (reply,) = replies
        (metrics,) = (r for r in reply.content.metric_records.values())
        (arrays,) = (r for r in reply.content.array_records.values())
        self.seen.append((vector(arrays), dict(metrics), vector(result[0])))
        return result


@pytest.mark.parametrize("strategy", [MSP, MSPDQ])
def test_an_inner_strategy_gets_the_average(strategy: Any) -> None:
    inner = Seen()
    options = {"bits": 16} if strategy is MSPDQ else {}
    mixing = make(
        strategy,
        inner=inner,
        mixing_rounds=1,
        gamma=0.5,
        replacement=True,
        min_train_nodes=6,
        seed=2,
        **options,
    )
    result = run(mixing)
    mean = sum(n * trained(client) for client, n in mixing.draws(1).items()) / 6
    ((average, metrics, made),) = inner.seen
    np.testing.assert_allclose(average, mean, atol=1e-3)
    assert metrics["num-examples"] == 6
    np.testing.assert_array_equal(vector(result.arrays), made)
    assert np.abs(made - mean).max() > 0.01


# -- Clients that are lost -----------------------------------------------------------------------


def scheme_of(result: Any, server_round: int = 1) -> tuple[int, int, int]:
    scheme = result.history[server_round]["scheme"]
    return scheme["lost"], scheme["given_up"], scheme["mixing_rounds"]


@pytest.mark.parametrize("kind", ["drop", "crash", "corrupt", "delay"])
@pytest.mark.parametrize("strategy", [MSP, MSPDQ])
def test_a_client_that_is_lost_between_two_exchanges_ends_the_round(
    strategy: Any, kind: str
) -> None:
    fault = Fault(kind=kind, client="2", phase="mix", server_round=1, seconds=0.5)
    mixing = make(strategy, mixing_rounds=2, gamma=0.5, deadline=0.2)
    models: list[Any] = []
    result = run(
        mixing, faults=[fault], num_rounds=2, evaluate_fn=lambda _, arrays: models.append(arrays)
    )
    assert same(models[1], record(EXACT))
    assert result.history[1]["skipped"]
    assert scheme_of(result) == (1, 1, 0)
    assert not result.history[2]["skipped"]
    assert result.history[2]["accumulated"] == 4
    assert scheme_of(result, 2) == (0, 0, 2)
    mean = np.mean([trained(client) for client in range(4)], axis=0)
    np.testing.assert_allclose(vector(models[2]), mean, atol=0.05)


def test_going_on_without_a_client_is_the_mixing_of_those_that_are_left() -> None:
    lost = {("1", 0), ("3", 2)}
    wire = Wire(lost)
    strategy = MSP(mixing_rounds=4, on_dropout="continue", loop=LoopOptions(deadline=0.2))
    result = run(strategy, nodes=5, before=wire)
    expected = played(strategy, wire.first(), lost)
    np.testing.assert_allclose(vector(result.arrays), expected[-1], atol=1e-12)
    unharmed = played(strategy, wire.first())
    assert np.abs(expected[-1] - unharmed[-1]).max() > 0.01
    assert scheme_of(result) == (2, 0, 4)
    assert [len(nodes) for _, nodes in wire.exchanges(1)] == [5, 5, 4, 4, 3]


@pytest.mark.parametrize("interval", ["self", "linf"])
def test_going_on_with_codes_and_draws(interval: str) -> None:
    lost = {("0", 0), ("3", 1)}
    wire = Wire(lost)
    strategy = MSPDQ(
        bits=16,
        mixing_start="global",
        interval=interval,
        mixing_rounds=4,
        on_dropout="continue",
        loop=LoopOptions(deadline=0.2, seed=1),
        replacement=True,
        min_train_nodes=20,
    )
    result = run(strategy, before=wire)
    draws = strategy.draws(1)
    assert len(draws) == 4
    assert len(set(draws.values())) > 1
    # Where a client takes the first step by itself, question 0 is about the second.
    first_asked = 1 if interval == "self" else 0
    expected = played(
        strategy,
        dict.fromkeys(draws, vector(EXACT)),
        {(client, step + first_asked) for client, step in lost},
        draws,
    )
    np.testing.assert_allclose(vector(result.arrays), expected[-1], atol=2e-3)
    assert scheme_of(result) == (2, 0, 4)


@pytest.mark.parametrize("strategy", [MSP, MSPDQ])
@pytest.mark.parametrize("k", [0, 1, 2])
def test_finishing_early_is_as_if_it_had_been_planned(k: int, strategy: Any) -> None:
    options = {"experiment_id": "e", "seed": 1, "kappa": 0.4}
    wire = Wire({("2", k)})
    mixing = make(strategy, mixing_rounds=4, on_dropout="finish", deadline=0.2, **options)
    result = run(mixing, before=wire)
    assert scheme_of(result) == (1, 0, k)
    assert not result.history[1]["skipped"]
    assert same(result.arrays, run(make(strategy, mixing_rounds=k, **options)).arrays)
    longer = run(make(strategy, mixing_rounds=4, **options))
    assert np.abs(vector(result.arrays) - vector(longer.arrays)).max() > 1e-3


def test_without_any_answer_the_round_is_given_up_also_where_it_would_go_on() -> None:
    fault = Fault(kind="drop", phase="mix", server_round=1)
    strategy = MSP(mixing_rounds=2, on_dropout="continue", loop=LoopOptions(deadline=0.2))
    result = run(strategy, faults=[fault])
    assert result.history[1]["skipped"]
    assert scheme_of(result) == (4, 1, 0)
    assert same(result.arrays, record(EXACT))


def reference(seed: int, clients: int = 4) -> str:
    names = map(str, range(clients))
    return min(names, key=lambda client: derive_seed(seed, "reference", 1, client))


@pytest.mark.parametrize("interval", ["self", "paper"])
def test_without_the_reference_client_the_round_is_skipped(interval: str, caplog: Any) -> None:
    fault = Fault(kind="drop", client=reference(5), server_round=1)
    strategy = MSPDQ(
        mixing_start="reference",
        interval=interval,
        mixing_rounds=2,
        loop=LoopOptions(seed=5, deadline=0.2),
    )
    wire = Wire()
    with caplog.at_level("WARNING", "flwr.privacy"):
        result = run(strategy, faults=[fault], num_rounds=2, before=wire)
    assert "round 1: the reference client did not answer" in caplog.text
    assert [line.get("skipped") for line in result.history] == [None, True, False]
    assert scheme_of(result) == (0, 1, 0)
    assert [phase for phase, _ in wire.exchanges(1)] == ["train"]


def test_the_reference_client_alone_sends_its_split_and_all_start_from_it() -> None:
    wire = Wire()
    strategy = MSPDQ(
        mixing_start="reference",
        interval="linf",
        mixing_rounds=1,
        loop=LoopOptions(seed=5, experiment_id="e"),
    )
    run(strategy, before=wire)
    sent = {head["client-id"] for head, a in wire.said if head["phase"] == "train" and a}
    assert sent == {reference(5)}
    starts = [m.content["arrays"] for head, m in wire.asked if head["phase"] in ("sync", "mix")]
    assert len(starts) == 8
    for start in starts[1:]:
        np.testing.assert_array_equal(vector(start), vector(starts[0]))
    ratio = vector(starts[0]) / trained(reference(5))
    assert (ratio > 0.29).all()
    assert (ratio < 1.71).all()
    assert np.ptp(ratio) > 0.2


def test_nobody_but_the_reference_client_sets_the_start() -> None:
    class Eager(MSPDQClient):
        def handle(self, phase: str, arrays: Any, fields: Any, train: Any) -> Any:
            if client_id_from(self.context.node_config) == "3":
                fields = {**fields, "refers": True}
            return super().handle(phase, arrays, fields, train)

    wire = Wire()
    assert reference(5) != "3"
    strategy = MSPDQ(
        mixing_start="reference",
        mixing_rounds=2,
        loop=LoopOptions(seed=5, experiment_id="e"),
        on_dropout="continue",
    )
    result = run(strategy, client=Eager, before=wire)
    assert result.history[1]["refused"] == {"names": 1}
    assert result.history[1]["scheme"]["lost"] == 0
    start = next(m.content["arrays"] for head, m in wire.asked if head["phase"] == "sync")
    np.testing.assert_allclose(vector(start) / trained(reference(5)), 1.0, atol=0.8)


@pytest.mark.parametrize("lost", ["2", "0"])
@pytest.mark.parametrize("start", ["independent", "reference", "global"])
def test_who_is_missing_in_the_first_exchange_takes_no_part(start: str, lost: str) -> None:
    seed = next(s for s in range(99) if reference(s) == "1")
    fault = Fault(kind="drop", client=lost)
    strategy = MSPDQ(
        bits=16,
        mixing_start=start,
        mixing_rounds=2,
        gamma=0.49,
        loop=LoopOptions(seed=seed, deadline=0.2),
    )
    wire = Wire()
    result = run(strategy, faults=[fault], before=wire)
    assert result.history[1]["accumulated"] == 3
    assert scheme_of(result) == (0, 0, 2)
    assert {len(nodes) for _, nodes in wire.exchanges(1)[1:]} == {3}
    left = [trained(client) for client in range(4) if str(client) != lost]
    np.testing.assert_allclose(vector(result.arrays), np.mean(left, axis=0), atol=1e-3)


def test_going_on_under_simulated_stragglers() -> None:
    model = StragglerModel(spread=1.0)
    wire = Wire()
    strategy = MSP(
        mixing_rounds=4,
        on_dropout="continue",
        loop=LoopOptions(stragglers=model, deadline=3.0, seed=4),
    )
    result = run(strategy, nodes=8, before=wire)

    def race(clients: Any, phase: str, request: int) -> tuple[set[str], float]:
        when = {"seed": 4, "server_round": 1, "phase": phase, "request": request}
        return model.race(clients, **when, deadline=3.0)

    late, seconds = race(map(str, range(8)), "train", 0)
    here = {client: v for client, v in wire.first().items() if client not in late}
    lost, left = set(), set(here)
    for k in range(4):
        gone, end = race(left, "mix", k)
        lost |= {(client, k) for client in gone}
        left -= gone
        seconds += end
    assert len(late) > 0
    assert len({k for _, k in lost}) > 1
    assert len(left) > 1
    np.testing.assert_allclose(vector(result.arrays), played(strategy, here, lost)[-1], atol=1e-12)
    assert scheme_of(result) == (len(lost), 0, 4)
    assert result.history[1]["late"] == len(late)
    assert result.history[1]["virtual_seconds"] == pytest.approx(seconds)


# -- Parameters ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kappa": 0.0}, "kappa = 0.0: expected a number between 0 and 1, neither of them"),
        ({"kappa": 1.0}, "kappa = 1.0: expected a number between 0 and 1"),
        ({"kappa": 1.02}, "kappa = 1.02: expected a number between 0 and 1"),
        ({"kappa": math.nan}, "kappa = nan: expected a finite number"),
        ({"gamma": 0.0}, "gamma = 0.0: expected a number above 0"),
        ({"gamma": -0.1}, "gamma = -0.1: expected a number above 0"),
        (
            {"gamma": 0.34, "paper": True},
            r"gamma = 0.34: expected less than max_coupling\(kappa=0.5\) = 0.333333",
        ),
        (
            {"gamma": 0.1, "kappa": 0.89, "paper": True},
            r"gamma = 0.1: expected less than max_coupling\(kappa=0.89\) = 0.099099",
        ),
        (
            {"gamma": 0.9},
            r"gamma = 0.9: expected less than largest_stable\(kappa=0.5, m=1\) = 0.857143",
        ),
        (
            {"gamma": 0.3, "m": 5},
            r"gamma = 0.3: expected less than largest_stable\(kappa=0.5, m=5\) = 0.260870",
        ),
        ({"gamma": 0.9, "coupling": "random"}, "gamma = 0.9: expected less than largest_stable"),
        ({"mixing_rounds": -1}, "mixing_rounds = -1: expected an integer of at least 0"),
        ({"mixing_rounds": 2.0}, "mixing_rounds = 2.0: expected an integer of at least 0"),
        ({"mixing_rounds": lambda t: -t}, "mixing_rounds = -1: expected an integer of at least 0"),
        ({"m": 0}, "m = 0: expected an integer of at least 1"),
        ({"eps_s": -0.1}, "eps_s = -0.1: expected a number from 0 up to but not 1"),
        ({"eps_s": 1.0}, "eps_s = 1.0: expected a number from 0 up to but not 1"),
        ({"split": "laplace", "scale": 0.0}, "scale = 0.0: expected a finite number from 1e-100"),
        ({"coupling": "linear"}, "coupling = 'linear': expected one of 'const', 'harmonic', 'rand"),
        ({"split": "normal"}, "split = 'normal': expected one of 'gaussian', 'laplace', 'uniform'"),
        ({"mass": "equal"}, "mass = 'equal': expected one of 'normalized', 'paper'"),
        ({"on_dropout": "skip"}, "on_dropout = 'skip': expected one of 'continue', 'finish', 'res"),
        (
            {"tolerance": 0.1, "mixing_rounds": 4},
            "tolerance = 0.1: expected nothing beside mixing_rounds: it decides on them",
        ),
        ({"tolerance": 0.0}, "tolerance = 0.0: expected a finite number of at least"),
        (
            {"tolerance": 1e-3, "gamma": 0.1, "coupling": "harmonic"},
            "tolerance = 0.001: expected more: 1000000 mixing steps leave",
        ),
        ({"tolerance": 0.1, "coupling": "random"}, "coupling = 'random': expected one that is kn"),
        ({"shares": {"0": 1.0}}, "shares = .'0': 1.0.: expected nothing, where clients are drawn"),
        (
            {"shares": {"0": 0.0}, "replacement": True},
            "shares = .'0': 0.0.: expected numbers above 0",
        ),
        ({"shares": {"0": -1.0}, "replacement": True}, "shares = .*: expected numbers above 0"),
        (
            {"shares": {"0": math.nan}, "replacement": True},
            r"shares\['0'\] = nan: expected a finite number",
        ),
        ({"secure_sum": SecureSum()}, "secure_sum = .*None: the answers of 'msp' are no codes"),
    ],
)
def test_bad_parameters_of_msp_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        make(MSP, **options)


SUMMED = {"secure_sum": SecureSum()}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"bits": 0}, "bits = 0: expected an integer from 1 to 16"),
        ({"bits": 17}, "bits = 17: expected an integer from 1 to 16"),
        ({"bits": 4.0}, "bits = 4.0: expected an integer from 1 to 16"),
        ({"bits": 4, "levels": 17}, "levels = 17: expected an integer from 9 to 16"),
        ({"bits": 4, "levels": 8}, "levels = 8: expected an integer from 9 to 16"),
        (
            {"mixing_start": "global", "mixing_rounds": 0},
            "mixing_rounds = 0: expected at least 1 from a global start",
        ),
        (
            {"mixing_start": "reference", "mixing_rounds": 0},
            "mixing_rounds = 0: expected at least 1 from a reference start",
        ),
        (
            {"mixing_start": "zero"},
            "mixing_start = 'zero': expected one of 'global', 'independent', 'reference'",
        ),
        ({"interval": "l1"}, "interval = 'l1': expected one of 'bound', 'fixed', 'linf', 'paper'"),
        ({"interval": "bound"}, "interval = 'bound': expected another one: it needs the glo"),
        (
            {"interval": "bound", "mixing_start": "global", "coupling": "random"},
            "coupling = 'random': expected one that is known beforehand",
        ),
        *(
            ({name: value}, f"{name} = {value}: expected a finite number from")
            for name in ("pi", "c", "bound")
            for value in (0.0, -1.0, math.nan, math.inf)
        ),
        (
            {"paper": True, "gamma": 0.34},
            r"gamma = 0.34: expected less than max_coupling\(kappa=0.5\) = 0.333333",
        ),
        ({**SUMMED, "bits": 1}, "bits = 1: expected an integer from 2 to 16"),
        ({**SUMMED, "bits": 4, "levels": 16}, "levels = 16: expected an integer from 9 to 15"),
        ({**SUMMED, "mixing_start": "independent"}, "mixing_start|interval"),
        (
            {**SUMMED, "mixing_start": "reference"},
            "mixing_start = 'reference': expected 'global' under a secure sum",
        ),
        (
            {**SUMMED, "mixing_start": "independent", "interval": "fixed"},
            "mixing_start = 'independent': expected 'global' under a secure sum",
        ),
        *(
            (
                {**SUMMED, "interval": rule},
                f"interval = '{rule}': expected 'bound' or 'fixed' under a secure sum",
            )
            for rule in ("self", "linf", "paper")
        ),
        *(
            (
                {**SUMMED, "on_dropout": what},
                f"on_dropout = '{what}': expected 'finish' under a secure sum",
            )
            for what in ("restart", "continue")
        ),
        (
            {**SUMMED, "coupling": "random"},
            "coupling = 'random': expected one that is known beforehand",
        ),
        ({**SUMMED, "mixing_rounds": 0}, "mixing_rounds = 0: expected at least 1 from a global"),
        ({**SUMMED, "gamma": 0.9}, "gamma = 0.9: expected less than largest_stable"),
    ],
)
def test_bad_parameters_of_mspdq_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        make(MSPDQ, **options)


def test_what_is_at_the_edge_is_allowed() -> None:
    MSP(kappa=0.5, gamma=0.3333, paper=True, eps_s=0.0, mixing_rounds=0)
    MSP(gamma=0.857, kappa=0.5)
    MSP(gamma=1.5, coupling="harmonic")  # it falls to zero
    MSP(gamma=0.1, m=30, paper=True)  # figure 7
    MSPDQ(bits=1)
    MSPDQ(bits=16, levels=2**15 + 1, mixing_rounds=0)
    make(MSPDQ, **SUMMED, bits=2, interval="fixed", coupling="random")


def test_a_client_without_a_share_is_named() -> None:
    strategy = MSP(replacement=True, shares={"0": 1.0, "1": 2.0, "3": 1.0})
    with pytest.raises(InvalidParameterError, match=r"shares = \['2'\]: expected a share for each"):
        run(strategy)


def test_the_paper_has_defaults_of_its_own() -> None:
    def told(strategy: Any) -> tuple[Any, ...]:
        t = strategy.terms
        return t.gamma, t.coupling, t.rounds, t.start, t.interval, t.levels

    assert told(MSP()) == (0.3, "const", 10, "independent", "self", 0)
    assert told(MSP(paper=True)) == (0.1, "const", 4, "independent", "self", 0)
    assert told(MSPDQ()) == (0.3, "const", 10, "independent", "self", 256)
    assert told(MSPDQ(paper=True)) == (0.1, "harmonic", 10, "reference", "paper", 256)
    assert told(make(MSPDQ, **SUMMED)) == (0.5, "const", 1, "global", "bound", 255)
    for strategy, paper in ((MSP, True), (MSPDQ, True), (MSP, False)):
        line = run(strategy(paper=paper, min_train_nodes=9 if paper else 2), arrays=MODEL).history
        assert line[1]["scheme"]["draws"] == (9 if paper else 4)


def test_a_tolerance_decides_on_the_steps() -> None:
    assert MSP(gamma=0.1, tolerance=0.1).terms.rounds == 11
    strategy = MSPDQ(gamma=0.3, coupling="harmonic", tolerance=0.1)
    assert strategy.terms.rounds == 13
    assert len(run(strategy).history) == 2


def test_the_theorys_number_of_steps_grows_with_the_round() -> None:
    """mu = 1, L = 4, E = 10: theta is 31, so 1 / eta is 16, 32 and 48 here."""

    def steps(server_round: int) -> int:
        t = 32 * (server_round - 1) + 1
        return k_rounds(mu=1, L=4, E=10, t=t, lam=0.6, quantized=False)

    strategy = MSP(mixing_rounds=steps)
    result = run(strategy, arrays=MODEL, num_rounds=3)
    # ln(16), ln(32) and ln(48) over -ln(0.6) are 5.4, 6.8 and 7.6.
    assert [line["exchanges"] for line in result.history] == [1, 7, 8, 9]
    assert [line["scheme"]["mixing_rounds"] for line in result.history[1:]] == [6, 7, 8]


class Hostile(MSPDQClient):
    """Client 2 says something else than it should, in one phase."""

    lie: ClassVar[tuple[str, dict[str, Any]]]

    def handle(self, phase: str, arrays: Any, fields: Any, train: Any) -> Any:
        out, own = super().handle(phase, arrays, fields, train)
        when, lies = self.lie
        if phase == when and client_id_from(self.context.node_config) == "2":
            own = {**own, **{key: value for key, value in lies.items() if key in own}}
        return out, own


@pytest.mark.parametrize(
    ("phase", "lie", "options"),
    [
        ("train", {"scalar": 1e200}, {"interval": "paper"}),
        ("train", {"scalar": 1e30}, {"interval": "linf"}),
        ("mix", {"scalar": 1e200}, {"interval": "paper"}),
        ("train", {"ends": [1e308, 1e308]}, {}),
        ("train", {"ends": [-1e39, -1e39]}, {"mixing_rounds": 0}),
        ("mix", {"half-width": 2.0**99}, {}),
        ("mix", {"half-width": 1e308}, {}),
    ],
)
def test_a_client_that_lies_is_refused_and_the_others_go_on(
    phase: str, lie: dict[str, Any], options: dict[str, Any]
) -> None:
    client = type("Lying", (Hostile,), {"lie": (phase, lie)})
    dtype = np.float16 if lie == {"half-width": 2.0**99} else np.float32
    arrays = {name: array.astype(dtype) for name, array in EXACT.items()}
    strategy = make(MSPDQ, **{"mixing_rounds": 2, "on_dropout": "continue", "seed": 1, **options})
    result = run(strategy, client=client, arrays=arrays, num_rounds=2)
    for line in result.history[1:]:
        assert not line["skipped"]
        assert line["scheme"]["lost"] == (phase == "mix")
        assert sum(line["refused"].values()) == (phase == "train")
    assert np.isfinite(vector(result.arrays)).all()


def test_a_reference_client_that_lies_costs_a_round_and_not_the_training() -> None:
    client = type("Lying", (Hostile,), {"lie": ("train", {"ends": [1e308, 1e308]})})
    result = run(
        MSPDQ(mixing_start="reference", loop=LoopOptions(seed=5)), client=client, num_rounds=12
    )
    skipped = [line["skipped"] for line in result.history[1:]]
    assert 0 < sum(skipped) < 12


@pytest.mark.parametrize("scale", [1e-35, 1e-30, 1e25])
def test_small_and_large_models_are_mixed_too(scale: float) -> None:
    arrays = {"w": np.linspace(1, 2, 6) * scale}
    app = message_app([as_mod(MSPDQClient)])
    result = run_strategy(MSPDQ(mixing_rounds=1), app, arrays=record(arrays), num_rounds=1)
    assert result.history[1]["refused"] == {}
    assert not result.history[1]["skipped"]


def test_what_is_left_of_the_split_is_said_for_the_steps_that_were_taken() -> None:
    fault = Fault(kind="drop", client="2", phase="mix")
    result = run(
        MSP(mixing_rounds=6, on_dropout="finish", loop=LoopOptions(deadline=0.3)), faults=[fault]
    )
    scheme = result.history[1]["scheme"]
    assert (scheme["mixing_rounds"], scheme["residual"]) == (0, 1.0)


def test_so_few_knobs_that_errors_add_up_are_warned_of(caplog: Any) -> None:
    MSPDQ(bits=3)
    assert not caplog.text
    MSPDQ(bits=2)
    assert "levels = 4: the rounding errors of so few knobs add up" in caplog.text
