"""Nodes and servers that do not keep to the protocol: one of them never harms the others."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from apps import StepClient, make, message_app, record, run_strategy, same
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import message_size_mod
from flwr.serverapp.strategy import FedAvgM, Krum

from flwr_privacy.clients import FedAvgClient, as_mod, numpy_client_app
from flwr_privacy.errors import InvalidParameterError, ProtocolError
from flwr_privacy.privacy.averaging import ReplyRefusedError, WeightedMean
from flwr_privacy.simulations.engines.inline import Fault, InlineGrid
from flwr_privacy.simulations.engines.inline.flower_internals import acting_as_server
from flwr_privacy.strategies import FedAvg, LoopOptions
from flwr_privacy.strategies.requests.federation import Federation
from flwr_privacy.wire.message import COHORT, RECORD, Cohort, Header

Change = Callable[[RecordDict], None]


class StrictClient(FedAvgClient):
    bare: ClassVar[bool] = False


def tampered(change: Change, *, partition: int = 0, phase: str = "train") -> ClientApp:
    """The shared app, where one node changes its replies of a phase."""

    def mod(message: Message, context: Context, call_next: Any) -> Message:
        reply = as_mod(FedAvgClient)(message, context, call_next)
        asked = message.content.config_records.get(RECORD, {}).get("phase")
        if context.node_config["partition-id"] == partition and asked == phase:
            assert not reply.has_error(), reply.error.reason
            change(reply.content)
        return reply

    return message_app([mod])


def entries(record_name: str, **changes: Any) -> Change:
    def change(content: RecordDict) -> None:
        altered = dict(content[record_name])
        for key, value in changes.items():
            name = key.replace("_", "-")
            altered.pop(name, None)
            if value is not None:
                altered[name] = value
        content[record_name] = ConfigRecord(altered)

    return change


def weights(values: Any) -> Change:
    def change(content: RecordDict) -> None:
        content["arrays"] = record({**dict.fromkeys(content["arrays"], values)})

    return change


def metric(**metrics: Any) -> Change:
    def change(content: RecordDict) -> None:
        content["metrics"] = MetricRecord({"num-examples": 1, **_dashed(metrics)})

    return change


def _dashed(metrics: dict[str, Any]) -> dict[str, Any]:
    return {key.replace("_", "-"): value for key, value in metrics.items()}


def npy(header: str) -> Change:
    data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()

    def change(content: RecordDict) -> None:
        content["arrays"]["0"] = Array("float32", (5,), "numpy.ndarray", data)

    return change


def remove(name: str) -> Change:
    def change(content: RecordDict) -> None:
        del content[name]

    return change


SINGLE = {
    "no record": (remove(RECORD), "malformed"),
    "no arrays": (remove("arrays"), "malformed"),
    "no metrics": (remove("metrics"), "malformed"),
    "record of another kind": (
        lambda content: content.update({RECORD: MetricRecord({"round": 1})}),
        "malformed",
    ),
    "round as text": (entries(RECORD, round="1"), "malformed"),
    "a huge scheme": (entries(RECORD, scheme="x" * 5_000_000), "malformed"),
    "terminal codes": (entries(RECORD, scheme="\x1b[2J\r"), "malformed"),
    "another experiment": (entries(RECORD, experiment_id="f"), "another round"),
    "another request": (entries(RECORD, request=7), "another round"),
    "another client": (entries(RECORD, client_id="3"), "unknown client"),
    "no client": (entries(RECORD, client_id=None), "unknown client"),
    "a cohort's answer": (
        lambda content: content.update({COHORT: ConfigRecord({"bytes-up": 0, "late": ["1"]})}),
        None,
    ),
    "a field named clients": (entries(RECORD, clients=["1", "2"]), None),
    "weight nan": (metric(num_examples=math.nan), "weight"),
    "weight infinite": (metric(num_examples=math.inf), "weight"),
    "weight negative": (metric(num_examples=-1), "weight"),
    "weight huge": (metric(num_examples=1e308), "weight"),
    "weight tiny": (metric(num_examples=5e-324), "weight"),
    "weight a list": (metric(num_examples=[1, 2]), "weight"),
    "weight beyond 64 bits": (metric(num_examples=2**70), "malformed"),
    "metric of another length": (metric(loss=[1.0, 2.0]), None),
    "metric not finite": (metric(loss=math.nan), None),
    "arrays of another shape": (weights(np.full(5, 1e300)), "shape"),
    "header with other entries": (npy("{1: 2, 'a': 3}"), "malformed"),
    "header that is no literal": (npy("(((("), "malformed"),
    "header with a giant shape": (
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (10**30,)}"),
        "malformed",
    ),
}


@pytest.mark.parametrize("name", SINGLE)
def test_a_bad_reply_is_refused_and_the_others_are_averaged(name: str) -> None:
    change, reason = SINGLE[name]
    result = run_strategy(FedAvg(fraction_evaluate=0), tampered(change))
    for line in result.history[1:]:
        assert line["refused"] == ({} if reason is None else {reason: 1})
        assert line["accumulated"] == (4 if reason is None else 3)
    assert all(np.isfinite(array.numpy()).all() for array in result.arrays.values())


COHORTS = {
    "no account of the clients": remove(COHORT),
    "no bytes": entries(COHORT, bytes_up=None),
    "negative bytes": entries(COHORT, bytes_up=-1),
    "somebody else's clients": entries(COHORT, answered=["0", "1"]),
    "clients late who sit elsewhere": entries(COHORT, late=["1", "3"]),
    "a client twice": entries(COHORT, answered=["0", "0", "2"]),
    "no clients": lambda content: (
        entries(COHORT, answered=None)(content),
        entries(RECORD, clients=None, weight=1e9)(content),
    ),
    "a sum over other clients": entries(RECORD, clients=["0", "1"]),
    "weight as text": entries(RECORD, weight="x"),
    "weight negative": entries(RECORD, weight=-10.0),
    "weight beyond all bounds": entries(RECORD, weight=1e300),
    "weight of nothing": entries(RECORD, weight=0.0),
    "values beyond the model's": lambda content: content.update(
        {"arrays": record({n: np.full(a.shape, 1e200) for n, a in content["arrays"].items()})}
    ),
    "no metric weights": entries(RECORD, metric_weights=None),
    "metric sums cut": entries(RECORD, metric_sums=None),
    "lengths that do not fit": entries(RECORD, metric_lengths=[10**9]),
    "not finite": lambda content: content.update(
        {"arrays": record({n: a.numpy() * np.nan for n, a in content["arrays"].items()})}
    ),
}


@pytest.mark.parametrize("name", COHORTS)
def test_a_bad_sum_is_refused_and_the_other_nodes_count(name: str) -> None:
    strategy = FedAvg(loop=LoopOptions(clients=4, seed=1), fraction_evaluate=0)
    result = run_strategy(strategy, tampered(COHORTS[name]), nodes=2)
    honest = run_strategy(
        FedAvg(loop=LoopOptions(clients=4, seed=1), fraction_evaluate=0),
        faulty_clients({0, 2}),
        nodes=2,
    )
    assert same(result.arrays, honest.arrays)
    for line in result.history[1:]:
        assert sum(line["refused"].values()) == 2  # the clients of the node
        assert line["accumulated"] == 2


def faulty_clients(faulty: set[int]) -> ClientApp:
    def mod(message: Message, context: Context, call_next: Any) -> Message:
        if int(context.node_config["partition-id"]) in faulty:
            raise RuntimeError("absent")
        return call_next(message, context)

    return message_app([as_mod(FedAvgClient), mod])


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
    assert time.monotonic() - began < 4.5  # the first hello, and at most two more tries


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
        federation._nodes = {name: i for i, name in enumerate(names) if name in present}
        assigned = federation.sample(7, ("train", 1), fraction=0.0, minimum=3)
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


# -- What a server may not get ---------------------------------------------------------------


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
    assert "this node plays its own client only" in reply.error.reason


def test_the_environment_of_a_node_may_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_PRIVACY_COHORTS", "1")
    reply = ask(message_app([as_mod(FedAvgClient)]), cohort_question(["1"]), "train")
    assert reply.content[COHORT]["answered"] == ["1"]


def test_a_hello_is_no_question_to_a_cohort() -> None:
    app = message_app([as_mod(FedAvgClient)])
    reply = ask(app, cohort_question(["1"], phase="hello"), "train", cohorts=True)
    assert "a hello is no question to a cohort" in reply.error.reason


def test_a_nodes_configuration_stays_there() -> None:
    grid = InlineGrid(message_app([as_mod(FedAvgClient)]), [{"password": "hunter2"}])
    with acting_as_server(grid.run_id):
        (node,) = grid.get_node_ids()
        (reply,) = grid.send_and_receive([Message(question(phase="hello"), node, "train")])
    assert "'client-id' or 'partition-id'" in reply.error.reason
    assert "hunter2" not in reply.error.reason


def test_an_evaluation_under_a_scheme_releases_what_the_scheme_lets_out() -> None:
    class Silent(FedAvgClient):
        def judge(self, arrays: Any, fields: Any, evaluate: Any) -> dict[str, Any]:
            evaluate()
            return {"num-examples": 1}

    for app in (
        message_app([as_mod(Silent)]),
        numpy_client_app(lambda context: Silent(StepClient(0), context)),
    ):
        result = run_strategy(FedAvg(), app)
        assert [line["evaluate"] for line in result.history[1:]] == [{}, {}, {}]


# -- What clients do to themselves -----------------------------------------------------------


def test_an_app_that_writes_into_its_question_is_alone_with_it() -> None:
    app = ClientApp(mods=[as_mod(FedAvgClient)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        config = message.content["config"]
        config["lr"] = float(config["lr"]) / 2
        arrays = message.content["arrays"]
        arrays["w"] = Array(arrays["w"].numpy() + np.float32(1))
        metrics = MetricRecord({"num-examples": 1, "lr": config["lr"]})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    start = record({"w": np.zeros(2, np.float32)})
    for options, nodes in (({}, 4), ({"clients": 4}, 2)):
        result = run_strategy(
            make(FedAvg, fraction_evaluate=0, **options),
            app,
            nodes=nodes,
            arrays=start,
            train_config=ConfigRecord({"lr": 1.0}),
        )
        assert [line["train"]["lr"] for line in result.history[1:]] == [0.5, 0.5, 0.5]
        np.testing.assert_array_equal(result.arrays["w"].numpy(), [3.0, 3.0])


@pytest.mark.parametrize("options", [{}, {"clients": 4, "min_available_nodes": 2}])
def test_numpy_numbers_are_metrics(options: dict[str, Any]) -> None:
    class Client(StepClient):
        def fit(self, parameters: list[Any], config: dict[str, Any]) -> Any:
            return parameters, 1, {"a": np.float64(1), "b": np.float32(2), "c": np.int64(3)}

        def evaluate(self, parameters: list[Any], config: dict[str, Any]) -> Any:
            return 1.0, 1, {"acc": np.mean([0.25, 0.75])}

    app = numpy_client_app(lambda context: FedAvgClient(Client(0), context))
    result = run_strategy(make(FedAvg, **options), app, nodes=2 if options else 4)
    assert result.history[1]["train"] == {"a": 1.0, "b": 2.0, "c": 3.0}
    assert result.history[1]["evaluate"] == {"acc": 0.5, "loss": 1.0}


def test_one_client_of_a_cohort_does_not_take_the_others_down() -> None:
    def client_fn(context: Context) -> Any:
        partition = int(context.node_config["partition-id"])
        if partition == 1:
            raise FileNotFoundError("no data here")
        return FedAvgClient(StepClient(partition), context)

    strategy = FedAvg(loop=LoopOptions(clients=4), min_available_nodes=1)
    result = run_strategy(strategy, numpy_client_app(client_fn), nodes=1)
    assert [line["accumulated"] for line in result.history[1:]] == [3, 3, 3]


def test_flowers_mods_may_stand_before_ours() -> None:
    for nodes, options in ((4, {}), (2, {"clients": 4})):
        app = message_app([message_size_mod, as_mod(FedAvgClient)])
        result = run_strategy(make(FedAvg, **options), app, nodes=nodes)
        assert [line["accumulated"] for line in result.history[1:]] == [4, 4, 4]


# -- The strategy's own side -----------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "options"), [(4, {}), (2, {"clients": 4})])
def test_what_is_addressed_to_one_client_goes_to_that_client_alone(
    nodes: int, options: dict[str, Any]
) -> None:
    seen: dict[str, Any] = {}

    def spy(message: Message, context: Context, call_next: Any) -> Message:
        text = str(message)
        seen.setdefault(context.node_id, "")
        seen[context.node_id] += text
        return as_mod(Listener)(message, context, call_next)

    class Listener(FedAvgClient):
        def handle(self, phase: str, arrays: Any, fields: Any, train: Any) -> Any:
            client = self.context.node_config["partition-id"]
            assert fields["secret"] == f"for-{client}"
            assert list(arrays) == [*record(), "share"]
            assert arrays["share"] == int(client)
            return train({name: arrays[name] for name in record()}).arrays, {
                "metrics": {"num-examples": 1}
            }

    class Teller(FedAvg):
        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            super().configure_train(server_round, arrays, config, grid)
            talk = self.messenger
            assigned = talk.sample(grid, server_round, "train", fraction=1.0, minimum=1)
            own = {
                client: RecordDict(
                    {
                        "arrays": record({"share": np.array(int(client))}),
                        RECORD: ConfigRecord({"secret": f"for-{client}"}),
                    }
                )
                for clients in assigned.values()
                for client in clients
            }
            content = RecordDict({"arrays": arrays, "config": config})
            return talk.ask(server_round, "train", content, assigned, own=own)

    strategy = make(Teller, fraction_evaluate=0, **options)
    result = run_strategy(strategy, message_app([spy]), nodes=nodes)
    assert [line["accumulated"] for line in result.history[1:]] == [4, 4, 4]
    for text in seen.values():
        assert sum(f"for-{client}" in text for client in range(4)) == 4 // nodes


def test_options_that_need_our_start_are_refused_under_another() -> None:
    from flwr.serverapp.strategy import Strategy

    class Own(FedAvg):
        start = Strategy.start

    with pytest.raises(ProtocolError, match="clients, quorum: works only where this strategy's"):
        run_strategy(Own(loop=LoopOptions(clients=40, quorum=1)))


def test_a_configure_train_of_ones_own_is_told_what_to_do() -> None:
    class Own(FedAvg):
        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            content = RecordDict({"arrays": arrays, "config": config})
            return self._construct_messages(content, list(grid.get_node_ids()), "train")

    with pytest.raises(ProtocolError, match=r"must return the messages of super\(\).configure_tra"):
        run_strategy(Own())


def test_overriding_as_with_fedavg() -> None:
    rates: list[float] = []

    class Decay(FedAvg):
        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            config["lr"] = 0.1 / server_round
            rates.append(config["lr"])
            return super().configure_train(server_round, arrays, config, grid)

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            return super().aggregate_train(server_round, list(replies))

    result = run_strategy(Decay(loop=LoopOptions(seed=1)))
    assert rates == [0.1, 0.05, 0.1 / 3]
    assert same(result.arrays, run_strategy(FedAvg(loop=LoopOptions(seed=1))).arrays)


def test_more_nodes_than_simulated_clients() -> None:
    result = run_strategy(FedAvg(loop=LoopOptions(clients=4)), nodes=6)
    assert [line["asked"] for line in result.history[1:]] == [4, 4, 4]


def test_an_evaluation_with_a_nan_in_a_list_does_not_lose_the_result() -> None:
    result = run_strategy(
        FedAvg(), evaluate_fn=lambda r, _: MetricRecord({"each": [math.nan, 1.0], "all": 1.0})
    )
    assert result.evaluate_metrics_serverapp[3] == {"all": 1.0}
    assert result.history[3]["server"]["each"] == [None, 1.0]


def test_momentum_resumes(tmp_path: Any) -> None:
    def strategy(**options: Any) -> FedAvg:
        inner = FedAvgM(server_learning_rate=0.5, server_momentum=0.9)
        return make(FedAvg, seed=1, inner=inner, **options)

    start = record({"w": np.ones((2, 2), np.float32), "b": np.array(1.0, np.float32)})
    unbroken = run_strategy(strategy(), arrays=start, num_rounds=4)
    run_strategy(strategy(run_dir=tmp_path), arrays=start, num_rounds=2)
    resumed = run_strategy(strategy(run_dir=tmp_path, resume=True), arrays=start, num_rounds=4)
    assert same(unbroken.arrays, resumed.arrays)


def test_an_inner_strategy_must_work_on_the_aggregate() -> None:
    with pytest.raises(InvalidParameterError, match="inner = 'Krum': expected a strategy that"):
        FedAvg(inner=Krum())


def test_values_that_the_models_dtype_cannot_hold() -> None:
    mean = WeightedMean({"f": np.zeros(1, np.float32), "i": np.zeros(1, np.int8)})
    good = {"f": np.ones(1), "i": np.ones(1, np.int64)}
    mean.accumulate("a", good, weight=1)
    with pytest.raises(ReplyRefusedError, match="not finite"):
        mean.accumulate("b", {**good, "f": np.full(1, 1e300)}, weight=1)
    with pytest.raises(ReplyRefusedError, match="range"):
        mean.accumulate("b", {**good, "i": np.full(1, 1000)}, weight=1)
    wide = WeightedMean({"w": np.zeros(1)})
    with pytest.raises(ReplyRefusedError, match="range"):
        wide.accumulate("a", {"w": np.full(1, 1e300)}, weight=1)
    assert isinstance(record(), ArrayRecord)
