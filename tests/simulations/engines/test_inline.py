"""The inline engine against Flower's own behaviour where it matters."""

from typing import Any

import pytest
from apps import make, message_app, record, run_strategy
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from flwr_privacy.clients import FedAvgClient, as_mod
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.engines.inline import Fault, InlineGrid, run_inline
from flwr_privacy.simulations.engines.inline.flower_internals import acting_as_server
from flwr_privacy.strategies import FedAvg


def echo_app() -> ClientApp:
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return Message(message.content, reply_to=message)

    return app


def test_a_reply_exists_only_when_it_is_pulled() -> None:
    calls = []
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        calls.append(context.node_id)
        return Message(message.content, reply_to=message)

    grid = InlineGrid(app, 3)
    with acting_as_server(grid.run_id):
        messages = [Message(RecordDict(), node, "query") for node in grid.get_node_ids()]
        ids = list(grid.push_messages(messages))
        assert calls == []
        (reply,) = grid.pull_messages(ids)
        assert calls == [reply.metadata.src_node_id]
        assert reply.metadata.reply_to_message_id == ids[0]
        assert list(grid.pull_messages([ids[0]])) == []


def test_what_a_client_writes_into_its_question_stays_there() -> None:
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        metrics = message.content.metric_records["m"]
        metrics["n"] = int(metrics["n"]) + 1
        return Message(message.content, reply_to=message)

    grid = InlineGrid(app, 3)
    shared = RecordDict({"m": MetricRecord({"n": 0})})
    with acting_as_server(grid.run_id):
        messages = [Message(shared, node, "query") for node in grid.get_node_ids()]
        replies = list(grid.send_and_receive(messages))
    assert [reply.content["m"]["n"] for reply in replies] == [1, 1, 1]
    assert shared["m"]["n"] == 0


def test_an_app_that_fails_becomes_an_error_reply_and_keeps_no_state() -> None:
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        visits = len(context.state)
        context.state[f"visit{visits}"] = MetricRecord({"n": 1})
        if visits == 1:
            raise RuntimeError("second visit")
        return Message(RecordDict({"m": MetricRecord({"n": visits})}), reply_to=message)

    grid = InlineGrid(app, 1)
    (node,) = grid.get_node_ids()
    outcomes = []
    with acting_as_server(grid.run_id):
        for _ in range(3):
            (reply,) = grid.send_and_receive([Message(RecordDict(), node, "query")])
            outcomes.append(reply.error.reason if reply.has_error() else reply.content["m"]["n"])
    assert outcomes == [0, "RuntimeError: second visit", "RuntimeError: second visit"]


def test_workers_need_a_name_to_import() -> None:
    with pytest.raises(InvalidParameterError, match="a reference 'module:attribute'"):
        InlineGrid(echo_app(), 2, workers=2)


def test_a_server_app_that_fails_fails_the_run() -> None:
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Any, context: Any) -> None:
        raise KeyError("no such thing")

    with pytest.raises(KeyError, match="no such thing"):
        run_inline(server_app, echo_app(), nodes=1)


def test_an_unknown_fault_is_named() -> None:
    with pytest.raises(InvalidParameterError, match="nearest: 'duplicate'"):
        Fault(kind="duplicat")


def test_faults_hit_whom_they_name() -> None:
    faults = [Fault(kind="drop", client="1", server_round=2), Fault(kind="nan", client="2")]
    app = message_app([as_mod(FedAvgClient)])
    options = {"deadline": 0.3, "fraction_evaluate": 0.0}
    history = run_strategy(make(FedAvg, **options), app, faults=faults, arrays=record()).history
    assert [line["accumulated"] for line in history[1:]] == [3, 2, 3]
