"""Nodes that join, leave, are silent or late: they never stop the others."""

import time
from typing import Any

import pytest
from apps import StepClient, make, message_app, run_strategy, same
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hostile_nodes import entries, tampered

from flwr_privacy.clients import FedAvgClient, as_mod, numpy_client_app
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.engines.inline import Fault
from flwr_privacy.strategies import FedAvg, LoopOptions
from flwr_privacy.strategies.requests.federation import Federation
from flwr_privacy.strategies.requests.sampling import Sampler
from flwr_privacy.wire.message import RECORD, Header


@pytest.mark.parametrize("identity", ["../..", "1", "a b", ""])
def test_a_node_that_joins_with_a_bad_hello_is_kept_out(identity: str) -> None:
    joins: list[int] = []

    def late(grid: Any) -> None:
        nodes = list(grid.get_node_ids())

        def get_node_ids() -> list[int]:
            return nodes if joins else nodes[:3]

        grid.get_node_ids = get_node_ids

    strategy = FedAvg(
        fraction_evaluate=0, loop=LoopOptions(on_round=joins.append), min_available_nodes=3
    )
    app = tampered(entries(RECORD, client_id=identity or None), partition=3, phase="hello")
    result = run_strategy(strategy, app, before=late, num_rounds=4)
    assert [line["accumulated"] for line in result.history[1:]] == [3, 3, 3, 3]


def test_a_node_that_joins_takes_part_and_one_that_leaves_does_not_end_the_run() -> None:
    lines: list[dict[str, Any]] = []
    present = {1: slice(0, 2), 2: slice(0, 4), 3: slice(3, 4), 4: slice(0, 0), 5: slice(0, 3)}

    def churn(grid: Any) -> None:
        nodes = list(grid.get_node_ids())
        grid.get_node_ids = lambda: nodes[present[max(1, len(lines))]]

    strategy = FedAvg(fraction_evaluate=0, loop=LoopOptions(on_round=lines.append))
    result = run_strategy(strategy, before=churn, num_rounds=5)
    assert [line["accumulated"] for line in result.history[1:]] == [2, 4, 1, 0, 3]
    assert result.history[4]["skipped"]


def test_a_restarted_node_may_come_back_under_its_identity() -> None:
    lines: list[dict[str, Any]] = []
    config = [{"client-id": name, "partition-id": i} for i, name in enumerate("abca")]

    def restart(grid: Any) -> None:
        nodes = list(grid.get_node_ids())
        views = [nodes[:3], nodes[:3], nodes, nodes[1:], nodes[1:], nodes[1:]]
        grid.get_node_ids = lambda: views[min(len(lines), 5)]

    strategy = FedAvg(
        fraction_evaluate=0, loop=LoopOptions(on_round=lines.append), min_available_nodes=3
    )
    result = run_strategy(strategy, nodes=config, before=restart, num_rounds=6)
    assert [line["accumulated"] for line in result.history[1:]][-1] == 3


@pytest.mark.usefixtures("real_time")
def test_a_silent_node_does_not_stop_the_rounds() -> None:
    began = time.monotonic()
    silent = Fault(kind="drop", client="3", phase="hello")
    options = {"timeout": 1.0, "num_rounds": 3}
    result = run_strategy(FedAvg(fraction_evaluate=0), faults=[silent], **options)
    assert [line["accumulated"] for line in result.history[1:]] == [3, 3, 3]
    assert time.monotonic() - began < 6.5  # the first hello, asked twice, and at most two tries


@pytest.mark.usefixtures("real_time")
def test_a_client_that_owes_an_answer_is_not_asked_again() -> None:
    slow = Fault(kind="delay", client="3", server_round=1, seconds=0.7)

    def pause(line: dict[str, Any]) -> None:
        time.sleep(1.0 if line["round"] == 2 else 0.0)

    strategy = FedAvg(loop=LoopOptions(quorum=3, on_round=pause), fraction_evaluate=0)
    history = run_strategy(strategy, faults=[slow]).history
    assert [line["asked"] for line in history[1:]] == [4, 3, 4]
    assert [line["late"] for line in history[1:]] == [0, 0, 1]


def test_a_number_beyond_64_bits_is_that_clients_alone() -> None:
    class Client(StepClient):
        def fit(self, parameters: list[Any], config: dict[str, Any]) -> Any:
            return parameters, 1, {"big": 2**70 if self.client == 1 else 1}

    def client_fn(context: Context) -> Any:
        return FedAvgClient(Client(int(context.node_config["partition-id"])), context)

    for nodes, options in ((4, {}), (2, {"clients": 4})):
        strategy = make(FedAvg, fraction_evaluate=0, **options)
        result = run_strategy(strategy, numpy_client_app(client_fn), nodes=nodes)
        assert [line["accumulated"] for line in result.history[1:]] == [3, 3, 3]


@pytest.mark.parametrize("answer", [lambda ids: ids[1:], lambda ids: [None, *ids[1:]]])
def test_a_message_that_cannot_be_sent_is_a_missing_answer(answer: Any) -> None:
    def lossy(grid: Any) -> None:
        push = grid.push_messages

        def push_messages(messages: Any) -> Any:
            kept = messages[1:] if "train" in str(messages[0].content.get(RECORD)) else messages
            ids = list(push(kept))
            return ids if kept is messages else answer(["", *ids])

        grid.push_messages = push_messages

    result = run_strategy(FedAvg(fraction_evaluate=0), before=lossy)
    assert [line["accumulated"] for line in result.history[1:]] == [3, 3, 3]


@pytest.mark.usefixtures("real_time")
def test_a_deadline_holds_while_replies_trickle_in() -> None:
    app = ClientApp(mods=[as_mod(FedAvgClient)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        time.sleep(0.2)
        metrics = MetricRecord({"num-examples": 1})
        content = RecordDict({"arrays": message.content["arrays"], "metrics": metrics})
        return Message(content, reply_to=message)

    strategy = FedAvg(loop=LoopOptions(deadline=0.5), fraction_evaluate=0)
    (_, line) = run_strategy(strategy, app, nodes=10, num_rounds=1).history
    assert 1 <= line["accumulated"] <= 4


def test_whoever_reads_the_first_answers_only_leaves_the_others_busy() -> None:
    class First(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            def first() -> Any:
                yield next(replies)
                replies.close()

            return super().aggregate_train(server_round, first())

    slow = [Fault(kind="delay", client=c, server_round=1, seconds=30) for c in "12"]
    result = run_strategy(First(fraction_evaluate=0), nodes=4, faults=slow)
    assert [line["accumulated"] for line in result.history[1:]] == [1, 1, 1]
    assert result.history[2]["asked"] == 2


def test_an_absent_client_changes_one_place_of_the_sample() -> None:
    names = "abcdefgh"

    def sample(present: str) -> set[str]:
        federation = Federation()
        federation.met = True
        federation.nodes = {name: i for i, name in enumerate(names) if name in present}
        assigned = Sampler(federation).sample(7, ("train", 1), fraction=0.0, minimum=3)
        return {client for clients in assigned.values() for client in clients}

    everybody = sample(names)
    for absent in names:
        assert len(everybody - sample(names.replace(absent, ""))) == (absent in everybody)


def test_a_second_start_is_another_training() -> None:
    strategy = FedAvg(loop=LoopOptions(seed=1))
    results = []
    for _ in range(2):
        results.append(run_strategy(strategy))
    assert same(results[0].arrays, results[1].arrays)
    assert len(results[1].history) == 4


def test_a_missing_run_folder_is_named(tmp_path: Any) -> None:
    with pytest.raises(InvalidParameterError, match=r"run_dir = .*nowhere.*: expected a folder"):
        FedAvg(loop=LoopOptions(run_dir=tmp_path / "nowhere"))


def test_a_run_folder_is_not_overwritten(tmp_path: Any) -> None:
    run_strategy(FedAvg(loop=LoopOptions(run_dir=tmp_path)), num_rounds=1)
    with pytest.raises(
        InvalidParameterError, match=r"a folder without a checkpoint\.bin, or resume"
    ):
        run_strategy(FedAvg(loop=LoopOptions(run_dir=tmp_path)))


def test_a_result_prints_without_its_model() -> None:
    text = repr(run_strategy(FedAvg()))
    assert "ArrayRecord (0.000 MB)" in text
    assert "NUMPY" not in text


def test_requests_are_numbered_by_round_and_phase() -> None:
    numbers: list[tuple[str, int, int]] = []

    def spy(message: Message, context: Context, call_next: Any) -> Message:
        header, _ = Header.read(message.content.config_records[RECORD])
        numbers.append((header.phase, header.server_round, header.request))
        return as_mod(FedAvgClient)(message, context, call_next)

    class Twice(FedAvg):
        def train_round(self, grid: Any, server_round: int, arrays: Any, config: Any) -> Any:
            super().train_round(grid, server_round, arrays, config)
            return super().train_round(grid, server_round, arrays, config)

    alone = {"min_available_nodes": 1, "min_train_nodes": 1, "min_evaluate_nodes": 1}
    result = run_strategy(make(Twice, **alone), message_app([spy]), nodes=1, num_rounds=2)
    per_round = [("train", 0), ("train", 1), ("evaluate", 0)]
    assert numbers == [("hello", 0, 0)] + [(p, r, n) for r in (1, 2) for p, n in per_round]
    assert [line["exchanges"] for line in result.history] == [1, 3, 3]
