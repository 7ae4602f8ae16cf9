"""MSPDQ under a secure sum, on real messages."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from apps import make, message_app, model_of, record, run_strategy, same, step
from flwr.app import ConfigRecord, Message
from grid_tap import tapped, without_a_deal

from flwr_privacy.clients import MSPDQClient, as_mod
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.secure_sum.messages import DEAL, OPEN
from flwr_privacy.simulations.engines.inline import Fault
from flwr_privacy.strategies import MSPDQ, LoopOptions
from flwr_privacy.strategies.requests.instruction import to_each
from flwr_privacy.wire.message import RECORD

MODEL = {
    "w": np.arange(6, dtype=np.float32).reshape(2, 3) / 7 + 0.1,
    "b": np.linspace(-1, 1, 4, dtype=np.float64),
    "scale": np.array(0.5),
    "batches": np.array(3),
}
SENT = {name: array for name, array in MODEL.items() if name != "batches"}
SIZE = 11
BOUND = 3.0  # of five clients' updates
SLOW = {"gamma": 0.3, "mixing_rounds": 3}
SEED = 6  # with which the first drawing of two rounds is one that a secure sum takes


class Wire:
    """Sees all messages; swallows what clients say in some later exchanges of round 1."""

    def __init__(self, lost: Any = ()) -> None:
        self.lost = set(lost)  # (client, request of phase mix)
        self.asked: list[Message] = []
        self.said: list[Message] = []

    def __call__(self, grid: Any) -> None:
        push, pull = grid.push_messages, grid.pull_messages

        def push_messages(messages: list[Message]) -> Any:
            self.asked += messages
            return push(messages)

        def pull_messages(ids: list[str]) -> Any:
            replies = [reply for reply in pull(ids) if not self._takes(reply)]
            self.said += replies
            return replies

        grid.push_messages, grid.pull_messages = push_messages, pull_messages

    def _takes(self, reply: Message) -> bool:
        head = reply.content[RECORD]
        place = (head["client-id"], head["request"])
        return head["phase"] == "mix" and head["round"] == 1 and place in self.lost

    def vectors(self) -> list[Message]:
        """Return the answers of the scheme itself."""
        return [m for m in self.said if m.content[RECORD]["phase"] in ("train", "sync", "mix")]

    def openings(self, server_round: int) -> int:
        """Return how many sums of a round clients were asked to open."""
        return len(
            {
                m.content[OPEN]["session"]
                for m in self.asked
                if OPEN in m.content and m.content[RECORD]["round"] == server_round
            }
        )


def vector(arrays: Any) -> np.ndarray:
    values = model_of(arrays) if hasattr(arrays["w"], "numpy") else arrays
    return np.concatenate([np.asarray(values[n], np.float64).reshape(-1) for n in SENT])


def trained(client: int | str) -> np.ndarray:
    return vector({name: step(array, int(client)) for name, array in SENT.items()})


def mean_of(clients: Any) -> np.ndarray:
    return np.mean([trained(client) for client in clients], axis=0)


def build(secure_sum: SecureSum | None = None, **options: Any) -> MSPDQ:
    secure_sum = secure_sum or SecureSum()
    return make(MSPDQ, **{"secure_sum": secure_sum, "seed": 3, **bound_of(options), **options})


def bound_of(options: dict[str, Any]) -> dict[str, float]:
    """Return the bound of an update, where the rule of the intervals has one."""
    return {} if options.get("interval") == "fixed" else {"bound": BOUND}


def run(strategy: MSPDQ, **options: Any) -> Any:
    options = {"nodes": 5, "num_rounds": 1, **options}
    return run_strategy(
        strategy, message_app([as_mod(MSPDQClient)]), arrays=record(MODEL), **options
    )


# -- What is on the wire -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bits", "nodes", "modulus"),
    [(2, 4, 4), (2, 7, 4), (4, 5, 7), (8, 2, 9), (8, 3, 10), (8, 8, 11), (12, 5, 15), (16, 9, 20)],
)
def test_a_code_takes_its_bits_and_those_of_the_clients(
    bits: int, nodes: int, modulus: int
) -> None:
    """b + ceil(log2 M), or one less: seven codes of two bits add up to -7 to 7."""
    wire = Wire()
    result = run(build(bits=bits, mixing_rounds=2, gamma=0.3), nodes=nodes, before=wire)
    fewer = (bits, nodes) == (2, 7)
    assert modulus == bits + math.ceil(math.log2(nodes)) - fewer
    assert len(wire.vectors()) == 2 * nodes
    for message in wire.vectors():
        arrays = model_of(message.content["arrays"])
        assert set(arrays) == {"masked"}
        assert arrays["masked"].dtype == np.uint8
        assert arrays["masked"].shape == (math.ceil((SIZE + 1) * modulus / 8),)  # and a weight
    assert result.history[1]["scheme"]["sum_modulus_bits"] == modulus
    assert result.history[1]["scheme"]["levels"] == 2**bits - 1


@pytest.mark.parametrize(("draws", "modulus"), [(5, 8 + 3), (8, 8 + 3), (9, 8 + 4), (14, 8 + 4)])
def test_with_replacement_it_is_the_draws_that_count(draws: int, modulus: int) -> None:
    wire = Wire()
    threshold = SecureSum(threshold=3 if draws == 5 else 5)
    strategy = build(threshold, replacement=True, min_train_nodes=draws, seed=1, **SLOW)
    result = run(strategy, before=wire)
    counts = strategy.draws(1)
    assert sum(counts.values()) == draws
    assert max(counts.values()) > 1
    assert len(wire.vectors()) == 3 * len(counts)
    for message in wire.vectors():
        masked = message.content["arrays"]["masked"].numpy()
        assert masked.shape == (math.ceil((SIZE + 1) * modulus / 8),)
    assert result.history[1]["scheme"]["sum_modulus_bits"] == modulus


def test_nothing_leaves_a_client_but_masked_codes() -> None:
    wire = Wire()
    result = run(build(**SLOW), before=wire, num_rounds=2)
    head = {"scheme", "version", "experiment-id", "phase", "round", "request", "client-id"}
    assert len(wire.vectors()) == 2 * 3 * 5
    for message in wire.vectors():
        assert set(message.content) == {"arrays", "metrics", RECORD}
        assert set(message.content["arrays"]) == {"masked"}
        assert dict(message.content["metrics"]) == {}
        assert set(message.content[RECORD]) == head
    others = {m.content[RECORD]["phase"] for m in wire.said} - {"train", "mix"}
    assert others == {"hello", "keys", "shares"}
    for line in result.history[1:]:
        assert line["train"] == line["evaluate"] == {}
        assert "saturated" not in line["scheme"]


def test_what_all_hear_of_a_round_is_the_averages_and_the_widths() -> None:
    wire = Wire()
    run(build(replacement=True, min_train_nodes=9, **SLOW), before=wire)
    questions = [m.content[RECORD] for m in wire.asked if m.content[RECORD]["phase"] == "mix"]
    assert {"step", "width", "sums", "drawn", "draws"} >= {
        key for question in questions for key in question
    } - {"scheme", "version", "experiment-id", "phase", "round", "request"}


def test_every_sum_takes_two_exchanges_and_the_first_two_more() -> None:
    result = run(build(**SLOW), num_rounds=3)
    assert [line["exchanges"] for line in result.history] == [1, 2 + 3 * 2, 3 * 2, 3 * 2]
    result = run(build(), num_rounds=3)
    assert [line["exchanges"] for line in result.history] == [1, 2 + 2, 2, 2]


# -- The model that comes out --------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        SLOW,
        {**SLOW, "bits": 3},
        {**SLOW, "replacement": True, "min_train_nodes": 9, "seed": SEED, "threshold": 5},
        {**SLOW, "interval": "fixed", "pi": 6.0, "coupling": "harmonic"},
        {**SLOW, "m": 2, "mass": "normalized", "kappa": 0.3},
        {**SLOW, "bound": 0.1},  # most codes are at an end
    ],
)
def test_the_model_is_the_one_without_a_secure_sum(options: dict[str, Any]) -> None:
    alike = {"experiment_id": "e", "gamma": 0.5, "mixing_rounds": 1, **options}
    secure_sum = SecureSum(threshold=alike.pop("threshold", None))
    bits = options.get("bits", 8)
    clear = make(
        MSPDQ,
        **{"mixing_start": "global", "interval": "bound", "seed": 3, **bound_of(options), **alike},
        levels=2**bits - 1,
    )
    seen = run(clear, insecure_seed=5, num_rounds=2)
    summed = run(build(secure_sum, **alike), insecure_seed=5, num_rounds=2)
    assert same(seen.arrays, summed.arrays, exact=False)
    # Other random bits do not give the same model.
    other = run(build(secure_sum, **alike), insecure_seed=6, num_rounds=2)
    assert np.abs(vector(other.arrays) - vector(summed.arrays)).max() > 5e-6
    shared = ("width", "draws", "distinct", "mixing_rounds", "residual", "lost", "given_up")
    for line, twin in zip(seen.history[1:], summed.history[1:], strict=True):
        assert {k: line["scheme"][k] for k in shared} == pytest.approx(
            {k: twin["scheme"][k] for k in shared}
        )


def test_nodes_that_play_several_clients_give_the_same_sums() -> None:
    alike = {"experiment_id": "e", "replacement": True, "min_train_nodes": 9, **SLOW}
    threshold = SecureSum(threshold=5)
    plain = run(build(threshold, **alike), insecure_seed=5, num_rounds=2)
    cohorts = run(build(threshold, clients=5, **alike), nodes=2, insecure_seed=5, num_rounds=2)
    assert not plain.history[1]["skipped"]
    assert same(plain.arrays, cohorts.arrays)


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_one_step_with_a_coupling_of_a_half_gives_the_mean_of_the_models(bits: int) -> None:
    """The defaults: an average of five roundings, each by less than a step of the knobs."""
    result = run(build(bits=bits))
    knob = 2 * BOUND / (2**bits - 2)
    error = np.abs(vector(result.arrays) - mean_of(range(5))).max()
    assert error < knob + 1e-6
    # Five uniform positions: the standard deviation is at most knob / (2 sqrt(5)).
    assert error > knob / 1000
    scheme = result.history[1]["scheme"]
    assert scheme["width"] == pytest.approx(2 * BOUND)
    assert (scheme["residual"], scheme["mixing_rounds"]) == (0.0, 1)
    np.testing.assert_array_equal(result.arrays["batches"].numpy(), 3)


def test_several_steps_go_all_the_way() -> None:
    result = run(build(bits=16, gamma=0.3, mixing_rounds=9))
    left = 0.4**9 * (mean_of(range(5)) - vector(SENT))
    np.testing.assert_allclose(vector(result.arrays), mean_of(range(5)) - left, atol=1e-4)


# -- Clients that are lost -----------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, SLOW])
@pytest.mark.parametrize("phase", ["keys", "train"])
@pytest.mark.parametrize("lost", [("2",), ("0", "4")])
def test_who_is_lost_in_the_first_exchange_is_in_no_sum(
    lost: tuple[str, ...], phase: str, options: dict[str, Any]
) -> None:
    faults = [Fault(kind="drop", client=client, phase=phase) for client in lost]
    result = run(build(bits=16, deadline=0.25, **options), faults=faults)
    left = [client for client in range(5) if str(client) not in lost]
    rest = (0.4**3 if options else 0) * (vector(SENT) - mean_of(left))
    np.testing.assert_allclose(vector(result.arrays), mean_of(left) + rest, atol=2e-3)
    scheme = result.history[1]["scheme"]
    assert scheme["sum_opened"] == len(left)
    assert (scheme["lost"], scheme["given_up"]) == (0, 0)


def test_who_is_drawn_often_and_lost_takes_its_draws_along() -> None:
    options = {"bits": 16, "replacement": True, "min_train_nodes": 9, "deadline": 0.25}
    strategy = build(SecureSum(threshold=4), **options)
    result = run(strategy, faults=[Fault(kind="drop", client="2")])
    counts = {client: n for client, n in strategy.draws(1).items() if client != "2"}
    assert sum(counts.values()) < 9
    mean = sum(n * trained(client) for client, n in counts.items()) / sum(counts.values())
    np.testing.assert_allclose(vector(result.arrays), mean, atol=1e-3)


@pytest.mark.parametrize("taken", [1, 2])
def test_a_client_that_is_lost_at_a_later_step_ends_the_round_with_the_average_before(
    taken: int, caplog: Any
) -> None:
    """A sum over the others would, beside the one before, give the client away."""
    alike = {"experiment_id": "e", "gamma": 0.3}
    wire = Wire({("2", taken - 1)})
    models: list[Any] = []
    with caplog.at_level("WARNING", "flwr.privacy"):
        result = run(
            build(mixing_rounds=3, deadline=0.25, **alike),
            before=wire,
            insecure_seed=5,
            num_rounds=2,
            evaluate_fn=lambda _, arrays: models.append(arrays),
        )
    assert (
        f"the sum of step {taken} of round 1 is not opened: 4 of at least 5 clients sent a vector"
        in caplog.text
    )
    assert wire.openings(1) == taken
    shorter = run(build(mixing_rounds=taken, **alike), insecure_seed=5)
    assert same(models[1], shorter.arrays)
    first, second = (line["scheme"] for line in result.history[1:])
    assert (first["lost"], first["given_up"], first["mixing_rounds"]) == (1, 0, taken)
    assert not result.history[1]["skipped"]
    assert (second["lost"], second["given_up"], second["mixing_rounds"]) == (0, 0, 3)
    assert second["sum_opened"] == 5
    assert wire.openings(2) == 3


@pytest.mark.parametrize("kind", ["crash", "corrupt", "nan", "reshape"])
def test_a_vector_that_cannot_be_used_is_as_good_as_none(kind: str) -> None:
    alike = {"experiment_id": "e", "gamma": 0.3}
    fault = Fault(kind=kind, client="2", phase="mix", server_round=1)
    wire = Wire()
    result = run(
        build(mixing_rounds=3, deadline=0.25, **alike),
        faults=[fault],
        insecure_seed=5,
        before=wire,
    )
    assert wire.openings(1) == 1
    assert same(result.arrays, run(build(mixing_rounds=1, **alike), insecure_seed=5).arrays)


def test_who_does_not_deal_for_a_later_step_ends_the_round_too(caplog: Any) -> None:
    alike = {"experiment_id": "e", "gamma": 0.3}

    models: list[Any] = []
    with caplog.at_level("WARNING", "flwr.privacy"):
        result = run(
            build(mixing_rounds=3, **alike),
            insecure_seed=5,
            before=without_a_deal(step=1),
            num_rounds=2,
            evaluate_fn=lambda _, arrays: models.append(arrays),
        )
    text = "the sum of step 1 of round 1 is not opened: 4 of at least 5 clients dealt"
    assert text in caplog.text
    first, second = (line["scheme"] for line in result.history[1:])
    assert (first["mixing_rounds"], second["mixing_rounds"]) == (1, 3)
    assert same(models[1], run(build(mixing_rounds=1, **alike), insecure_seed=5).arrays)


def test_who_accuses_at_a_later_step_is_named(caplog: Any) -> None:
    def accuse(message: Message) -> None:
        deal = message.content.get(DEAL)
        if message.metadata.src_node_id == accuser[0] and deal is not None and "step" not in deal:
            accused.append(len(accused))
            if len(accused) == 2:  # its deal for the first step of the first round was the first
                message.content[DEAL] = ConfigRecord({"refused": "a key", "peers": ["1", "2"]})

    accuser, accused = [0], list[int]()

    def first(message: Message) -> None:
        if message.content.get(DEAL) is not None and not accuser[0]:
            accuser[0] = message.metadata.dst_node_id

    with caplog.at_level("WARNING", "flwr.privacy"):
        run(build(mixing_rounds=3), before=tapped(first, said=accuse), num_rounds=1)
    assert len(accused) >= 2
    assert "the sum of step 1 of round 1 is not opened" in caplog.text
    assert "contradict each other" in caplog.text


def test_too_few_dealers_skip_the_round_and_the_next_one_is_summed(caplog: Any) -> None:
    faults = [Fault(kind="drop", client=str(i), phase="shares", server_round=1) for i in range(3)]
    with caplog.at_level("WARNING", "flwr.privacy"):
        result = run(build(deadline=0.25), faults=faults, num_rounds=2)
    assert "2 of at least 3 clients dealt their secrets, 1 are missing" in caplog.text
    assert [line.get("skipped") for line in result.history] == [None, True, False]
    assert result.history[2]["scheme"]["sum_opened"] == 5
    assert np.abs(vector(result.arrays) - mean_of(range(5))).max() < 0.05


def test_too_few_vectors_skip_the_round(caplog: Any) -> None:
    faults = [Fault(kind="drop", client=str(i)) for i in range(3)]
    with caplog.at_level("WARNING", "flwr.privacy"):
        result = run(build(deadline=0.25, **SLOW), faults=faults)
    assert "2 of at least 3 clients sent a vector that can be used" in caplog.text
    assert result.history[1]["skipped"]
    assert same(result.arrays, record(MODEL))


# -- What it promises ----------------------------------------------------------------------------


def test_the_guarantee_is_that_of_the_sum() -> None:
    result = run(build())
    text = result.guarantee.text()
    assert result.guarantee.protects == "the model of a client, up to the averages of the round"
    assert "honest-but-curious server" in result.guarantee.adversary
    assert "sums over at least 3 of 5 clients and no single vector" in text
    assert "batches" in text
    clear = run(MSPDQ(mixing_rounds=1))
    assert clear.guarantee.protects == "nothing"
    assert "secure" not in clear.guarantee.text()


def test_nobody_outweighs_the_others_in_a_sum() -> None:
    with pytest.raises(InvalidParameterError, match=r"shares = .*nothing under a secure sum"):
        build(replacement=True, shares=dict.fromkeys("01234", 1.0))
    drawn = []

    class Noting(MSPDQ):
        def bounds_of(self, clients: list[str], server_round: int) -> Any:
            drawn.append(self.draws(server_round))
            return super().bounds_of(clients, server_round)

    options = {"secure_sum": SecureSum(), "replacement": True, "min_train_nodes": 3, "seed": 3}
    run(make(Noting, **options, bound=BOUND), num_rounds=12, nodes=3)
    assert len(drawn) >= 12
    assert {tuple(sorted(draws.values())) for draws in drawn} == {(1, 1, 1)}


@pytest.mark.parametrize("width", [0.0, 4.0])
def test_a_server_that_asks_one_client_for_something_else_has_no_sum(
    width: float, caplog: Any
) -> None:
    """With widths of 0 for all others, their codes would be zeros, and the sum that of client 3."""
    sums = []

    class Lying(MSPDQ):
        def instruct(self, server_round: int) -> Any:
            own = to_each({client: {"width": width} for client in "0124"})
            return replace(super().instruct(server_round), own=own)

        def _average(self, mean: Any) -> Any:
            sums.append(mean)
            return super()._average(mean)

    strategy = Lying(secure_sum=SecureSum(threshold=4), bound=BOUND, loop=LoopOptions(seed=3))
    result = run(strategy, insecure_seed=1)
    assert result.history[1]["skipped"]
    assert result.history[1]["asked"] == 5
    assert "somebody sent a wrong one" in caplog.text
    assert not sums
    same(result.arrays, record(MODEL))


class Heavy(MSPDQClient):
    """Client 2 lies about its weight in the first message."""

    def handle(self, phase: str, arrays: Any, fields: Any, train: Any) -> Any:
        out, own = super().handle(phase, arrays, fields, train)
        if phase == "train" and self.context.node_config["partition-id"] == 2:
            own = {"metrics": {"num-examples": 0}}
        return out, own


def test_a_client_that_lies_about_its_weight_ends_the_round_and_not_the_training(
    caplog: Any,
) -> None:
    app = message_app([as_mod(Heavy)])
    result = run_strategy(build(**SLOW), app, nodes=5, num_rounds=2, arrays=record(MODEL))
    assert [line.get("skipped") for line in result.history] == [None, True, True]
    assert "the weights in the sum are not how often clients were drawn" in caplog.text
