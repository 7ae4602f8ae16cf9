"""The shared loop: who is asked, when it goes on, what it refuses, how it resumes."""

import time
from typing import Any

import pytest
from apps import MODEL, make, message_app, model_of, record, run_strategy, same
from flwr.app import Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flwr_privacy.clients import FedAvgClient, as_mod
from flwr_privacy.errors import CheckpointError, InvalidParameterError, ProtocolError
from flwr_privacy.simulations.engines.inline import Fault
from flwr_privacy.stragglers import StragglerModel
from flwr_privacy.strategies import FedAvg, LoopOptions


def identified(*names: str) -> list[dict[str, Any]]:
    return [{"client-id": name, "partition-id": i} for i, name in enumerate(names)]


def test_rounds_must_be_positive() -> None:
    with pytest.raises(InvalidParameterError, match="num_rounds = 0: expected an integer of at"):
        run_strategy(FedAvg(), num_rounds=0)


def test_more_clients_per_round_than_there_are() -> None:
    text = "clients per round = 9: expected an integer from 0 to 4"
    with pytest.raises(InvalidParameterError, match=text):
        run_strategy(FedAvg(min_train_nodes=9))


def test_two_nodes_with_one_identity_are_refused_before_training() -> None:
    strategy, nodes = FedAvg(min_available_nodes=3), identified("ward-1", "ward-2", "ward-1")
    with pytest.raises(ProtocolError, match="two nodes say that they are client 'ward-1'"):
        run_strategy(strategy, nodes=nodes)


def test_a_malformed_identity_is_refused() -> None:
    with pytest.raises(ProtocolError, match="none of 2 nodes said who it is"):
        run_strategy(FedAvg(), nodes=identified("a/b", "c d"))


def test_nodes_without_the_client_half_are_told_what_to_do() -> None:
    with pytest.raises(ProtocolError, match="wrap their app in the client half of 'fedavg'"):
        run_strategy(FedAvg(), message_app([]))


def test_too_few_nodes() -> None:
    text = "4 of min_available_nodes = 9 nodes connected within 0.3 s"
    with pytest.raises(ProtocolError, match=text):
        run_strategy(FedAvg(min_available_nodes=9), timeout=0.3)


def test_nodes_that_come_late_are_waited_for_before_counting() -> None:
    """Flower's FedAvg counts first and would train its first round on two of eight."""
    calls = []

    def slowly(grid: Any) -> None:
        nodes = list(grid.get_node_ids())

        def get_node_ids() -> list[int]:
            calls.append(1)
            return nodes[: 2 * len(calls)]

        grid.get_node_ids = get_node_ids

    result = run_strategy(FedAvg(), nodes=8, before=slowly)
    assert result.history[1]["asked"] == 8


def test_sampling_goes_by_identity_and_seed() -> None:
    asked: dict[int, list[set[str]]] = {}
    for seed in (1, 1, 2):
        seen: list[set[str]] = []
        app = message_app([])
        run_strategy(
            FedAvg(fraction_train=0.5, fraction_evaluate=0.0, loop=LoopOptions(seed=seed)),
            _recording(app, seen),
            nodes=identified(*"abcdefgh"),
        )
        asked.setdefault(seed, []).append(frozenset().union(*seen))  # type: ignore[arg-type]
        assert [len(s) for s in _by_round(seen)] == [4, 4, 4]
    assert asked[1][0] == asked[1][1]
    assert asked[1][0] != asked[2][0]


def _recording(app: ClientApp, seen: list[Any]) -> ClientApp:
    def mod(message: Message, context: Any, call_next: Any) -> Message:
        fields = message.content.config_records["flwr-privacy"]
        if fields["phase"] == "train":
            seen.append({(fields["round"], context.node_config["client-id"])})
        return as_mod(FedAvgClient)(message, context, call_next)

    return message_app([mod])


def _by_round(seen: list[Any]) -> list[set[Any]]:
    entries = set().union(*seen)
    return [{who for number, who in entries if number == r} for r in (1, 2, 3)]


@pytest.mark.usefixtures("real_time")
def test_a_quorum_ends_the_wait() -> None:
    slow = Fault(kind="delay", client="3", seconds=30)
    began = time.monotonic()
    result = run_strategy(
        FedAvg(loop=LoopOptions(quorum=3), fraction_evaluate=0.0),
        faults=[slow],
        timeout=20,
        num_rounds=1,
    )
    assert time.monotonic() - began < 5
    assert result.history[1]["accumulated"] == 3


@pytest.mark.usefixtures("real_time")
def test_a_deadline_ends_the_wait() -> None:
    slow = Fault(kind="delay", client="3", seconds=30)
    began = time.monotonic()
    result = run_strategy(
        FedAvg(loop=LoopOptions(deadline=0.3), fraction_evaluate=0.0), faults=[slow]
    )
    assert 0.9 < time.monotonic() - began < 5
    assert [line["accumulated"] for line in result.history[1:]] == [3, 3, 3]


@pytest.mark.usefixtures("real_time")
@pytest.mark.parametrize(("nodes", "clients"), [(10, None), (2, 10), (1, 10)])
def test_stragglers_compute_and_are_counted_but_not_folded(nodes: int, clients: int | None) -> None:
    model = StragglerModel(seconds=2.0, slow_fraction=0.5, slowdown=10)
    options: dict[str, Any] = {
        "stragglers": model,
        "deadline": 6.0,
        "seed": 5,
        "fraction_evaluate": 0.0,
    }
    strategy = make(FedAvg, **options, clients=clients, min_available_nodes=nodes)
    began = time.monotonic()
    result = run_strategy(strategy, nodes=nodes)
    assert time.monotonic() - began < 5  # real seconds; the virtual ones are below
    for line in result.history[1:]:
        names = [str(i) for i in range(10)]
        late, end = model.race(
            names, seed=5, server_round=line["round"], phase="train", deadline=6.0
        )
        assert 0 < len(late) < 10
        assert (line["late"], line["accumulated"], line["answered"]) == (
            len(late),
            10 - len(late),
            10,
        )
        assert end == 6.0
    assert result.history[-1]["virtual_seconds"] == 18.0


def test_virtual_quorum() -> None:
    strategy = FedAvg(
        loop=LoopOptions(stragglers=StragglerModel(), quorum=4, seed=5), fraction_evaluate=0.0
    )
    line = run_strategy(strategy, nodes=10).history[1]
    assert (line["accumulated"], line["late"]) == (4, 6)


def test_every_client_of_a_cohort_has_its_own_state_and_failures() -> None:
    def counting(message: Message, context: Any, call_next: Any) -> Message:
        return as_mod(FedAvgClient)(message, context, call_next)

    app = ClientApp(mods=[counting])

    @app.train()
    def train(message: Message, context: Any) -> Message:
        client = int(context.node_config["partition-id"])
        assert context.node_config["num-partitions"] == 5
        if client == 3:
            raise RuntimeError("out of disk")
        visits = int(context.state.metric_records.get("visits", {"n": 0})["n"]) + 1
        context.state["visits"] = MetricRecord({"n": visits})
        metrics = MetricRecord({"num-examples": 1, "visits": visits})
        content = RecordDict({"arrays": message.content["arrays"], "metrics": metrics})
        return Message(content, reply_to=message)

    strategy = FedAvg(loop=LoopOptions(clients=5), fraction_evaluate=0.0)
    result = run_strategy(strategy, app, nodes=2)
    assert [line["train"]["visits"] for line in result.history[1:]] == [1, 2, 3]
    assert [line["refused"] for line in result.history[1:]] == [{"error": 1}] * 3
    assert result.history[3]["accumulated"] == 4


def test_a_node_with_an_identity_plays_nobody_else() -> None:
    text = "clients = 8 for 2 nodes, and none lets a server choose whom it runs"
    with pytest.raises(ProtocolError, match=text):
        run_strategy(FedAvg(loop=LoopOptions(clients=8)), nodes=identified("a", "b"))


def test_metrics_that_are_not_finite_become_null() -> None:
    result = run_strategy(FedAvg(), evaluate_fn=lambda r, _: MetricRecord({"loss": float("nan")}))
    assert result.history[1]["server"] == {"loss": None}


def test_checkpoint_that_is_damaged(tmp_path: Any) -> None:
    run_strategy(FedAvg(loop=LoopOptions(run_dir=tmp_path)))
    path = tmp_path / "checkpoint.bin"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged: its checksum does not fit"):
        run_strategy(FedAvg(loop=LoopOptions(run_dir=tmp_path, resume=True)))
    path.write_bytes(content[:10])
    with pytest.raises(CheckpointError, match="does not begin with 'flwr-privacy checkpoint 11'"):
        run_strategy(FedAvg(loop=LoopOptions(run_dir=tmp_path, resume=True)))
    path.unlink()
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        run_strategy(FedAvg(loop=LoopOptions(run_dir=tmp_path, resume=True)))


@pytest.mark.parametrize("name", ["checkpoint.bin", "metrics.jsonl", "asked.json"])
@pytest.mark.parametrize("resume", [False, True])
def test_a_file_of_the_run_that_is_a_folder(tmp_path: Any, name: str, resume: bool) -> None:
    (tmp_path / name).mkdir()
    loop = LoopOptions(run_dir=tmp_path, resume=resume)
    with pytest.raises(InvalidParameterError, match=f"a folder in which {name} is a file"):
        run_strategy(FedAvg(loop=loop))


def test_a_checkpoint_that_cannot_be_read(tmp_path: Any) -> None:
    (tmp_path / "checkpoint.bin").symlink_to("checkpoint.bin")
    with pytest.raises(CheckpointError, match="cannot be read: Too many levels of symbolic links"):
        run_strategy(FedAvg(loop=LoopOptions(run_dir=tmp_path, resume=True)))


@pytest.mark.parametrize(
    ("changes", "arrays", "text"),
    [
        ({"experiment_id": "other"}, MODEL, "its experiment_id is 'mine', not 'other'"),
        ({"seed": 8}, MODEL, "its seed is 7, not 8"),
        ({}, {"w": MODEL["0"]}, "its shapes is"),
    ],
)
def test_checkpoint_of_another_experiment(
    tmp_path: Any, changes: dict[str, Any], arrays: Any, text: str
) -> None:
    options = {"experiment_id": "mine", "seed": 7, "run_dir": tmp_path}
    run_strategy(make(FedAvg, **options))
    with pytest.raises(CheckpointError, match=f"of another experiment: {text}"):
        run_strategy(make(FedAvg, **{**options, **changes}, resume=True), arrays=record(arrays))


def test_a_resume_without_an_identity_takes_the_checkpoints(tmp_path: Any) -> None:
    first = FedAvg(loop=LoopOptions(run_dir=tmp_path))
    run_strategy(first, num_rounds=1)
    second = FedAvg(loop=LoopOptions(run_dir=tmp_path, resume=True))
    run_strategy(second, num_rounds=2)
    assert second.experiment.id == first.experiment.id


def test_worker_processes_give_the_same_model() -> None:
    plain = run_strategy(FedAvg(loop=LoopOptions(seed=1)), nodes=4)
    spread = run_strategy(
        FedAvg(loop=LoopOptions(seed=1)), "worker_app:app", nodes=4, workers=2, timeout=60
    )
    assert same(plain.arrays, spread.arrays)
    assert model_of(plain.arrays).keys() == MODEL.keys()
