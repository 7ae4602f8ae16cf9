"""What a server may not get from a node by asking for it."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
from apps import StepClient, message_app, record, run_strategy
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from flwr_privacy.clients import FedAvgClient, as_mod, numpy_client_app
from flwr_privacy.simulations.engines.inline import InlineGrid
from flwr_privacy.simulations.engines.inline.flower_internals import acting_as_server
from flwr_privacy.strategies import FedAvg
from flwr_privacy.wire.cohort import Cohort
from flwr_privacy.wire.message import COHORT, RECORD, Header


class StrictClient(FedAvgClient):
    bare: ClassVar[bool] = False


def ask(app: ClientApp, content: RecordDict, message_type: str, **node_config: Any) -> Message:
    grid = InlineGrid(app, [{"partition-id": 0, "num-partitions": 1, **node_config}])
    with acting_as_server(grid.run_id):
        (node,) = grid.get_node_ids()
        (reply,) = grid.send_and_receive([Message(content, node, message_type)], timeout=5)
    return reply


def question(**header: Any) -> RecordDict:
    base = {"scheme": "fedavg", "experiment_id": "e", "phase": "train", "server_round": 1}
    entries_ = Header(**{**base, **header}).write()
    config = ConfigRecord({"server-round": 1})
    return RecordDict({"arrays": record(), "config": config, RECORD: ConfigRecord(entries_)})


def leaking_app(scheme: type[FedAvgClient]) -> ClientApp:
    app = message_app([as_mod(scheme)])

    @app.train("custom")
    def custom(message: Message, context: Context) -> Message:
        return Message(message.content, reply_to=message)

    return app


@pytest.mark.parametrize("message_type", ["train", "train.default", "evaluate", "evaluate.default"])
def test_a_protecting_node_gives_nothing_outside_its_scheme(
    message_type: str, caplog: pytest.LogCaptureFixture
) -> None:
    bare = RecordDict({"arrays": record(), "config": ConfigRecord()})
    numpy_app = numpy_client_app(lambda context: StrictClient(StepClient(0), context))
    assert (
        "works under the scheme" in ask(leaking_app(StrictClient), bare, message_type).error.reason
    )
    assert "works under the scheme" in ask(numpy_app, bare, message_type).error.reason
    assert caplog.text.count("refused: this node works under the scheme") == 2


@pytest.mark.parametrize("content", [{}, {"arrays": record(), "config": ConfigRecord()}])
def test_a_message_type_of_the_users_own_passes_without_a_policy(
    content: dict[str, Any], tmp_path: Path
) -> None:
    app = leaking_app(StrictClient)
    assert ask(app, RecordDict(content), "train.custom").content == RecordDict(content)
    (tmp_path / "policy.toml").write_text("")
    policy = {"privacy-policy": str(tmp_path / "policy.toml")}
    assert ask(app, RecordDict(content), "train.custom", **policy).has_error() == bool(content)


def test_a_phase_belongs_to_its_type_of_message() -> None:
    app = message_app([as_mod(FedAvgClient)])
    wrong = [
        ask(app, question(phase="evaluate"), "train"),
        ask(app, question(phase="train"), "evaluate"),
        ask(app, question(phase="hello"), "evaluate"),
    ]
    assert all("is not known: for this type of message" in r.error.reason for r in wrong)


def cohort_question(clients: list[str], size: int = 8, **header: Any) -> RecordDict:
    content = question(**header)
    cohort = Cohort(clients=clients, late=[], size=size, reply="sum", weighted_by="num-examples")
    content[COHORT] = ConfigRecord(cohort.write())
    return content


@pytest.mark.parametrize(
    "clients", [["01"], ["+1"], [" 1"], ["1\n"], ["٣"], ["-7"], ["8"], ["1", "1"], [], ["x"]]
)
def test_a_client_has_one_name(clients: list[str]) -> None:
    app = message_app([as_mod(FedAvgClient)])
    reply = ask(app, cohort_question(clients), "train", cohorts=True)
    assert "the clients are not distinct numbers from 0 to 7" in reply.error.reason


@pytest.mark.parametrize("config", [{}, {"client-id": "a", "cohorts": True}])
def test_a_node_plays_others_only_if_it_said_so_itself(config: dict[str, Any]) -> None:
    app = message_app([as_mod(FedAvgClient)])
    reply = ask(app, cohort_question(["1"]), "train", **config)
    assert "this node runs its own client only" in reply.error.reason


def test_the_environment_of_a_node_may_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_PRIVACY_COHORTS", "1")
    reply = ask(message_app([as_mod(FedAvgClient)]), cohort_question(["1"]), "train")
    assert reply.content[COHORT]["answered"] == ["1"]


def test_a_hello_is_no_question_to_a_cohort() -> None:
    app = message_app([as_mod(FedAvgClient)])
    reply = ask(app, cohort_question(["1"], phase="hello"), "train", cohorts=True)
    assert "a hello is no request to a cohort" in reply.error.reason


def test_a_nodes_configuration_stays_there() -> None:
    grid = InlineGrid(message_app([as_mod(FedAvgClient)]), [{"password": "hunter2"}])
    with acting_as_server(grid.run_id):
        (node,) = grid.get_node_ids()
        (reply,) = grid.send_and_receive([Message(question(phase="hello"), node, "train")])
    assert "'client-id' or 'partition-id'" in reply.error.reason
    assert "hunter2" not in reply.error.reason


def test_an_evaluation_under_a_scheme_releases_what_the_scheme_lets_out() -> None:
    class Silent(FedAvgClient):
        def handle_evaluation(self, arrays: Any, fields: Any, evaluate: Any) -> dict[str, Any]:
            evaluate()
            return {"num-examples": 1}

    for app in (
        message_app([as_mod(Silent)]),
        numpy_client_app(lambda context: Silent(StepClient(0), context)),
    ):
        result = run_strategy(FedAvg(), app)
        assert [line["evaluate"] for line in result.history[1:]] == [{}, {}, {}]
