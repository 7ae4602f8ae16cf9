"""A training of which nothing came ends with an error that says why."""

import pickle
from pathlib import Path
from typing import Any

import pytest
from apps import StepClient, message_app, record
from flwr.app import Context
from flwr.serverapp import ServerApp

from flwr_privacy.clients import FedAvgClient, as_mod, numpy_client_app
from flwr_privacy.errors import AllRefusedError, NothingTrainedError
from flwr_privacy.simulations.engines.inline import Fault, run_inline
from flwr_privacy.strategies import FedAvg, LoopOptions


class Broken(StepClient):
    def fit(self, parameters: Any, config: Any) -> Any:
        raise ValueError("no")


def started(strategy: FedAvg, app: Any, **options: Any) -> Any:
    server_app, results = ServerApp(), []

    @server_app.main()
    def main(grid: Any, context: Context) -> None:
        results.append(strategy.start(grid, record(), num_rounds=2, timeout=5))

    run_inline(server_app, app, nodes=3, **options)
    return results[0]


def test_it_counts_what_became_of_the_answers(tmp_path: Path) -> None:
    app = numpy_client_app(lambda context: FedAvgClient(Broken(0), context))
    strategy = FedAvg(fraction_evaluate=0.0, loop=LoopOptions(run_dir=tmp_path))
    text = r"every answer was refused \(6 of 6: 6 error\)\. Most often: \"error: the client's own"
    with pytest.raises(AllRefusedError, match=text) as error:
        started(strategy, app)
    assert [line["skipped"] for line in error.value.result.history[1:]] == [True, True]
    assert (tmp_path / "checkpoint.bin").exists()
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)
    assert error.value.exit_code == 12


def test_an_answer_that_is_lost_is_no_refusal(tmp_path: Path) -> None:
    app = numpy_client_app(lambda context: FedAvgClient(Broken(0), context))
    strategy = FedAvg(fraction_evaluate=0.0, loop=LoopOptions(deadline=0.3))
    with pytest.raises(NothingTrainedError, match=r"refused \(error\)(.|\n)*lost") as error:
        started(strategy, app, faults=[Fault(kind="drop", client="0")])
    assert not isinstance(error.value, AllRefusedError)


def test_answers_that_are_lost_are_counted() -> None:
    lost = [Fault(kind="drop", client=client) for client in "012"]
    strategy = FedAvg(fraction_evaluate=0.0, loop=LoopOptions(deadline=0.3))
    with pytest.raises(NothingTrainedError, match=r"Of 6 answers: 6 lost\."):
        started(strategy, message_app([as_mod(FedAvgClient)]), faults=lost)


def test_one_round_that_trained_is_enough() -> None:
    lost = [Fault(kind="drop", client=client, server_round=1) for client in "012"]
    strategy = FedAvg(fraction_evaluate=0.0, loop=LoopOptions(deadline=0.3))
    result = started(strategy, message_app([as_mod(FedAvgClient)]), faults=lost)
    assert [line["skipped"] for line in result.history[1:]] == [True, False]


def test_who_asks_nobody_has_a_result() -> None:
    strategy = FedAvg(fraction_train=0.0, fraction_evaluate=0.0, min_train_nodes=0)
    assert started(strategy, message_app([as_mod(FedAvgClient)])).history[2]["skipped"]
