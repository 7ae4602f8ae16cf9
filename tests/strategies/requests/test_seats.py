"""Which node plays which simulated client: evenly, and none is parted from what it keeps."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from apps import run_strategy
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flwr_privacy.clients import FedAvgClient, as_mod
from flwr_privacy.strategies import FedAvg, LoopOptions
from flwr_privacy.strategies.requests.federation import Federation
from flwr_privacy.strategies.requests.sampling import Sampler
from flwr_privacy.wire.identity import client_id_from, derive_seed, fingerprints, places


def sampler(clients: int, *storages: str) -> Sampler:
    made = Federation(virtual_clients=clients)
    made.met = made.cohorts = True
    made.nodes = {f"w{index}": 10 + index for index in range(len(storages))}
    made.introductions = {
        f"w{index}": {"plays": "any", "storage": storage} for index, storage in enumerate(storages)
    }
    return Sampler(made)


def sample(of: Sampler, server_round: int, size: int, **options: Any) -> dict[int, list[str]]:
    return of.sample(1, ("train", server_round), fraction=0.0, minimum=size, **options)


def free(of: Sampler, assigned: dict[int, list[str]]) -> None:
    for clients in assigned.values():
        of.release(clients)


def test_every_round_is_shared_out_evenly() -> None:
    some = sampler(1000, "a", "a", "a")
    for server_round in range(20):
        assigned = sample(some, server_round, 50)
        assert sorted(map(len, assigned.values())) == [16, 17, 17]
        free(some, assigned)


def test_a_client_stays_where_it_was_unless_others_would_wait_for_its_node() -> None:
    some = sampler(40, "a", "a")
    first = {c: node for node, cs in sample(some, 1, 40).items() for c in cs}
    some.release(first)
    second = {c: node for node, cs in sample(some, 2, 40).items() for c in cs}
    assert first == second


def test_who_left_something_on_a_node_is_played_there() -> None:
    some = sampler(30, "a", "a")
    seats: dict[str, int] = {}
    for server_round in range(20):
        for node, clients in sample(some, server_round, 9).items():
            for client in clients:
                assert seats.setdefault(client, node) == node
            some.release(c for c in clients if int(c) % 2)  # the odd ones leave nothing
            for client in clients:
                if int(client) % 2:
                    del seats[client]
    assert len(seats) == 15


def test_nodes_that_share_no_folder_exchange_no_clients() -> None:
    some = sampler(30, "a", "b")
    seats: dict[str, int] = {}
    for server_round in range(20):
        assigned = sample(some, server_round, 9)
        free(some, assigned)
        for node, clients in assigned.items():
            for client in clients:
                assert seats.setdefault(client, node) == node


def test_who_may_still_be_played_is_not_asked_and_the_others_go_elsewhere() -> None:
    some = sampler(10, "a", "a")
    first = sample(some, 1, 10)
    second = sample(some, 2, 10, busy={10})
    assert second == {11: first[11]}  # of node 10 nobody knows what it is at


def test_when_all_nodes_owe_an_answer_nobody_is_asked() -> None:
    assert sample(sampler(10, "a", "a"), 1, 5, busy={10, 11}) == {}


def test_the_clients_of_a_node_that_left_go_to_the_others() -> None:
    some = sampler(10, "a", "b")
    sample(some, 1, 10)
    del some._federation.nodes["w0"]
    assert list(sample(some, 2, 10)) == [11]


def counting_app() -> ClientApp:
    """An app whose clients count their trainings, those with even names in their state."""
    app = ClientApp(mods=[as_mod(FedAvgClient)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(client_id_from(context.node_config))
        metrics = {"num-examples": 1}
        if client % 2 == 0:
            before = context.state.metric_records.get("count", {"n": 0})
            count = MetricRecord({"n": int(before["n"]) + 1})
            context.state["count"] = count
            metrics[f"n{client}"] = int(count["n"])
        content = RecordDict(
            {"arrays": message.content["arrays"], "metrics": MetricRecord(metrics)}
        )
        return Message(content, reply_to=message)

    return app


@pytest.mark.parametrize("nodes", [1, 3])
def test_an_apps_own_state_follows_its_client(nodes: int) -> None:
    asked: Counter[str] = Counter()
    counted: dict[str, float] = {}

    class Watching(FedAvg):
        def configure_train(self, *given: Any) -> Any:
            messages = list(super().configure_train(*given))
            for message in messages:
                asked.update(message.content["flwr-privacy.cohort"]["clients"])
            return messages

    def note(line: dict[str, Any]) -> None:
        counted.update({k: v for k, v in line.get("train", {}).items() if k.startswith("n")})

    strategy = Watching(
        loop=LoopOptions(clients=12, seed=4, on_round=note),
        fraction_train=0.5,
        fraction_evaluate=0,
        min_available_nodes=nodes,
    )
    run_strategy(strategy, counting_app(), nodes=nodes, num_rounds=8)
    assert len(set(asked.values())) > 1
    expected = {f"n{client}": n for client, n in asked.items() if int(client) % 2 == 0}
    assert counted == expected


@pytest.mark.parametrize("size", [0, 1, 7, 39, 40])
@pytest.mark.parametrize("turned", [None, 0, 12, 37, 40])
def test_the_first_ones_of_a_random_order_are_drawn(
    size: int, turned: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    some, seed = sampler(40, "a"), derive_seed(1, "sample", "train", 3)
    keys = places(seed, fingerprints(map(str, range(40)))) // np.uint64(2**61)  # many are equal
    monkeypatch.setattr("flwr_privacy.strategies.requests.sampling.places", lambda *_: keys)
    order = sorted(range(40), key=lambda index: keys[index])
    without = {str(index) for index in order[:3]}
    turns = None if turned is None else {str(i): (1 + i % 3, i) for i in order[:turned]}
    if turns is not None:
        order.sort(key=lambda index: turns.get(str(index), (0, 0)))
    expected = [str(index) for index in order if str(index) not in without][:size]
    drawn = sample(some, 3, size, without=without, turns=turns)
    assert sorted(c for cs in drawn.values() for c in cs) == sorted(expected)
