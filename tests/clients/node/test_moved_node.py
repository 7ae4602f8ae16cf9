"""A node of a simulation on several hosts answers only where its clients' files are."""

from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp

from flwr_privacy.clients.fedavg import FedAvgClientApp
from flwr_privacy.clients.node.context_store import STATE_VARIABLE, check_same_folder
from flwr_privacy.clients.udp import UDPClientApp
from flwr_privacy.errors import LedgerError, ProtocolError
from flwr_privacy.simulations.engines.inline import run_inline
from flwr_privacy.strategies import UDP, FedAvg, LoopOptions, UserLevel

CLIENTS = 4


@pytest.fixture(autouse=True)
def on_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flwr_privacy.clients.node.context_store.is_simulated", lambda: True)


def context() -> Context:
    return Context(run_id=5, node_id=1, node_config={}, state=RecordDict(), run_config={})


def test_a_node_that_finds_another_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    node, other = context(), context()
    monkeypatch.setenv(STATE_VARIABLE, str(here))
    check_same_folder(node)
    check_same_folder(node)
    monkeypatch.setenv(STATE_VARIABLE, str(there))
    check_same_folder(other)
    with pytest.raises(ProtocolError, match=rf"{there} on .* need the same shared folder, which"):
        check_same_folder(node)
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(LedgerError, match="there is no folder"):
        check_same_folder(node)
    monkeypatch.setenv(STATE_VARIABLE, str(here))
    check_same_folder(node)


@pytest.mark.parametrize("cohorts", [True, False])
@pytest.mark.parametrize("scheme", ["udp", "fedavg"])
def test_clients_whose_files_are_elsewhere_answer_nothing(
    scheme: str, cohorts: bool, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    client_app = UDPClientApp() if scheme == "udp" else FedAvgClientApp()

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        records = {
            "arrays": message.content["arrays"],
            "metrics": MetricRecord({"num-examples": 1}),
        }
        return Message(RecordDict(records), reply_to=message)

    def end_of_round(server_round: int, arrays: ArrayRecord) -> None:
        if server_round == 1:  # as if all nodes ran on another host from now on
            state.rename(tmp_path / "elsewhere")
            state.mkdir()

    loop = LoopOptions(clients=CLIENTS if cohorts else None, write_card=False)
    privacy = {"privacy": UserLevel(epsilon=8.0)} if scheme == "udp" else {}
    strategy = (UDP if scheme == "udp" else FedAvg)(
        loop=loop, fraction_evaluate=0.0, min_available_nodes=2, **privacy
    )
    results = []
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        model = ArrayRecord([np.zeros(3, np.float32)])
        results.append(strategy.start(grid, model, num_rounds=2, evaluate_fn=end_of_round))

    run_inline(server_app, client_app, nodes=2 if cohorts else CLIENTS, state=state)
    refused = [line["refused"] for line in results[0].history[1:]]
    # FedAvg's clients keep nothing, and may run anywhere.
    assert refused == [{}, {"error": CLIENTS} if scheme == "udp" else {}]
