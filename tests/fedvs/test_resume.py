"""Servers that are killed, clients that restart without what they had: nothing goes unsaid."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vertical
from acfl_app import connect, disconnect, kill_after
from apps import same
from conformance import Killed
from vertical import Wire

from flwr_privacy.errors import CheckpointError
from flwr_privacy.simulations.engines.inline import Fault
from flwr_privacy.strategies.vertical.fedvs import CODE, DEAL, DEAL_EVALUATION
from flwr_privacy.wire.message import RECORD, TRAIN

ROUNDS = 4
RUN = {"num_rounds": ROUNDS, "experiment_id": "e", "evaluate_every": 2}


class Folders:
    """Where a server and its nodes keep what they have."""

    def __init__(self, base: Path, name: str) -> None:
        self.nodes, self.server = base / f"{name}-nodes", base / f"{name}-server"
        for folder in (self.nodes, self.server):
            folder.mkdir()

    def train(self, **changes: Any) -> Any:
        return vertical.train(**{**RUN, "state": self.nodes, "run_dir": self.server, **changes})

    def weights(self) -> dict[str, Any]:
        return vertical.weights(self.nodes)


def same_weights(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert sorted(one) == sorted(other) == ["0", "1", "2", "3"]
    for client, weights in one.items():
        np.testing.assert_array_equal(weights, other[client])


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Any]]:
    folders = Folders(tmp_path_factory.mktemp("unbroken"), "one")
    result = folders.train()
    return result, folders.weights()


# -- The server is killed ------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_killed_after_a_round_it_goes_on_with_the_gradient_that_the_clients_lack(
    after: int, unbroken: Any, tmp_path: Path
) -> None:
    folders = Folders(tmp_path, "run")
    with pytest.raises(Killed):
        folders.train(on_round=kill_after(after))
    result = folders.train(resume=True)
    assert same(unbroken[0].arrays, result.arrays)
    same_weights(unbroken[1], folders.weights())
    assert result.history[ROUNDS]["server"] == unbroken[0].history[ROUNDS]["server"]


def killing(phase: str, server_round: int, *, answered: int) -> Callable[[Any], None]:
    """Return a grid's change that kills the server in a phase, when some replies have come."""
    came = []

    def change(reply: Any) -> Any:
        if wire.of([reply], phase, server_round):
            came.append(reply)
            if len(came) > answered:
                raise Killed
        return reply

    wire = Wire(change)
    return wire


@pytest.mark.parametrize("answered", [0, 2])
@pytest.mark.parametrize("phase", [DEAL, TRAIN])
def test_killed_in_the_middle_of_a_round_it_asks_anew(
    phase: str, answered: int, unbroken: Any, tmp_path: Path
) -> None:
    """Clients that have moved their weights already do not move them twice."""
    folders = Folders(tmp_path, "run")
    with pytest.raises(Killed):
        folders.train(before=killing(phase, 3, answered=answered))
    result = folders.train(resume=True)
    assert [line["skipped"] for line in result.history[1:]] == [False] * ROUNDS
    assert same(unbroken[0].arrays, result.arrays)
    same_weights(unbroken[1], folders.weights())


@pytest.mark.parametrize("answered", [0, 3, 6])
def test_killed_in_the_setup_it_codes_anew(answered: int, unbroken: Any, tmp_path: Path) -> None:
    folders = Folders(tmp_path, "run")
    with pytest.raises(Killed):
        folders.train(before=killing(CODE, 0, answered=answered))
    result = folders.train()
    assert same(unbroken[0].arrays, result.arrays)
    same_weights(unbroken[1], folders.weights())
    assert len(list(folders.nodes.glob("*.fedvs/*/*.coded"))) == 8  # none of the first coding


def test_a_resumed_run_codes_nothing_again(tmp_path: Path) -> None:
    folders = Folders(tmp_path, "run")
    with pytest.raises(Killed):
        folders.train(on_round=kill_after(2))
    wire = Wire()
    folders.train(resume=True, before=wire)
    assert wire.of(wire.asked, CODE) == wire.of(wire.asked, "enrol") == []


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"T": 2}, "T"),
        ({"K": 2}, "K"),
        ({"prime": 2**31 - 19}, "prime"),
        ({"data_bits": 7}, "data_bits"),
        ({"weight_bits": 9}, "weight_bits"),
        ({"embedding": 5}, "embedding"),
        ({"w_max": 1.0}, "w_max"),
        ({"zero_mask": False}, "zero_mask"),
        ({"aggregation": "sum"}, "aggregation"),
        ({"order": 1}, "order"),
        ({"bias": True}, "bias"),
        ({"x_max": 2.0}, "x_max"),
    ],
)
def test_a_checkpoint_of_another_code_is_refused(
    changes: Any, name: str, broken: Folders, tmp_path: Path
) -> None:
    copy = Folders(tmp_path, "copy")
    shutil.copytree(broken.server, copy.server, dirs_exist_ok=True)
    with pytest.raises(CheckpointError, match=name):
        copy.train(resume=True, state=broken.nodes, **changes)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    folders = Folders(tmp_path_factory.mktemp("broken"), "run")
    with pytest.raises(Killed):
        folders.train(on_round=kill_after(1))
    return folders


def test_another_training_of_the_same_name_starts_anew(unbroken: Any, tmp_path: Path) -> None:
    """It must not go on from the weights of the first one, nor ignore gradients of its own."""
    folders, again = Folders(tmp_path, "run"), Folders(tmp_path, "again")
    folders.train()
    result = again.train(state=folders.nodes)
    assert same(unbroken[0].arrays, result.arrays)
    same_weights(unbroken[1], folders.weights())


def test_a_server_that_goes_far_back_is_not_obeyed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint of round 1, taken up when the clients have seen round 4."""
    folders, copy = Folders(tmp_path, "run"), Folders(tmp_path, "copy")

    def on_round(line: dict[str, Any]) -> None:
        if line["round"] == 2:  # what was written at the end of round 1
            shutil.copytree(folders.server, copy.server, dirs_exist_ok=True)

    folders.train(on_round=on_round)
    before = folders.weights()
    checkpoint = copy.server / "checkpoint.bin"
    assert checkpoint.exists()
    lines = (copy.server / "metrics.jsonl").read_text().splitlines()
    assert 1 < len(lines) < 5
    result = copy.train(resume=True, state=folders.nodes)
    assert all(line["skipped"] for line in result.history[len(lines) :])
    assert "a request of gradient" in caplog.text
    same_weights(before, folders.weights())


# -- A client restarts without what it had -------------------------------------------------------


def losing(folders: Folders, pattern: str, after: int = 2) -> Callable[[int, Any], None]:
    def evaluate(server_round: int, _: Any) -> None:
        if server_round == after:
            found = list(folders.nodes.glob(pattern))
            assert found
            for path in found:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    return evaluate


def test_a_client_without_its_shares_has_them_coded_again(
    unbroken: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its weights are there, so the training goes on; only roundings are drawn anew."""
    folders, wire = Folders(tmp_path, "run"), Wire()
    result = folders.train(evaluate_fn=losing(folders, "2.fedvs/*/*.coded"), before=wire)
    assert [line["skipped"] for line in result.history[1:]] == [False] * ROUNDS
    assert [line["scheme"]["dealers"] for line in result.history[1:]] == [4] * ROUNDS
    assert "client 2 has lost its shares of the data" in caplog.text
    generations = [m.content[RECORD]["generation"] for _, m in wire.of(wire.asked, CODE)]
    assert len(set(generations)) == 2
    for client, weights in folders.weights().items():
        np.testing.assert_allclose(weights, unbroken[1][client], atol=5e-3)
    for name, array in result.arrays.items():
        np.testing.assert_allclose(array.numpy(), unbroken[0].arrays[name].numpy(), atol=5e-3)


def test_a_file_that_is_too_short_counts_as_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folders = Folders(tmp_path, "run")

    def evaluate(server_round: int, _: Any) -> None:
        if server_round == 2:
            for path in folders.nodes.glob("2.fedvs/*/*.coded"):
                path.write_bytes(path.read_bytes()[:-4])

    result = folders.train(evaluate_fn=evaluate)
    assert "client 2 has lost its shares of the data" in caplog.text
    assert [line["scheme"]["dealers"] for line in result.history[1:]] == [4] * ROUNDS


@pytest.mark.parametrize("pattern", ["2.fedvs", "2.fedvs/*/state", "2.*"])
def test_a_client_that_has_lost_everything_says_so(
    pattern: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It goes on with new weights, which are neither zero nor those that it had."""
    folders = Folders(tmp_path, "run")
    kept: dict[str, Any] = {}

    def evaluate(server_round: int, arrays: Any) -> None:
        if server_round == 2:
            kept.update(folders.weights())
        losing(folders, pattern)(server_round, arrays)

    result = folders.train(evaluate_fn=evaluate)
    assert [line["skipped"] for line in result.history[1:]] == [False] * ROUNDS
    assert "client 2 has lost its shares of the data" in caplog.text
    now = folders.weights()["2"]
    assert (now != 0).all()
    assert np.abs(now - kept["2"]).max() > 0.01
    assert any(
        "client 2" in record.getMessage() and "weights" in record.getMessage()
        for record in caplog.records
    )


def test_a_damaged_state_leaves_the_client_out(tmp_path: Path) -> None:
    """Its node's log says which file; nothing is made up in its place."""
    folders = Folders(tmp_path, "run")

    def evaluate(server_round: int, _: Any) -> None:
        if server_round == 2:
            (path,) = folders.nodes.glob("2.fedvs/*/state")
            path.write_bytes(path.read_bytes()[:-4])

    result = folders.train(evaluate_fn=evaluate, evaluation="none", least_dealers=3)
    assert [line["scheme"]["dealers"] for line in result.history[1:]] == [4, 4, 3, 3]


def test_a_client_that_loses_its_shares_between_weights_and_answer_is_missing(
    tmp_path: Path,
) -> None:
    """The others' answers suffice; in the next round everything is coded anew."""
    folders = Folders(tmp_path, "run")

    def ask(message: Any) -> None:
        if wire.of([message], TRAIN, 2) and not done:
            done.append(True)
            for path in folders.nodes.glob("2.fedvs/*/*.coded"):
                path.unlink()

    done: list[bool] = []
    wire = Wire(ask=ask)
    result = folders.train(before=wire, spare=1)
    assert [line["scheme"]["answers"] for line in result.history[1:]] == [4, 3, 4, 4]
    assert len({m.content[RECORD]["generation"] for _, m in wire.of(wire.asked, CODE)}) == 2


def test_a_coding_that_cannot_be_repeated_skips_the_round_and_names_who_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folders = Folders(tmp_path, "run")
    fault = Fault(kind="drop", client="1", phase=CODE, server_round=2)
    result = folders.train(
        evaluate_fn=losing(folders, "2.fedvs/*/*.coded", 1), faults=[fault], timeout=2
    )
    assert [line["skipped"] for line in result.history[1:]] == [False, True, False, False]
    assert "the data could not be coded: clients ['1'] did not answer" in caplog.text


# -- Clients that go and come back ---------------------------------------------------------------


def test_a_client_that_is_gone_for_a_round_comes_back_with_what_it_had(tmp_path: Path) -> None:
    folders, wire = Folders(tmp_path, "run"), Wire()

    def evaluate(server_round: int, _: Any) -> None:
        if server_round == 1:
            disconnect(wire.grid, 2)
        if server_round == 2:
            connect(wire.grid, 2)

    result = folders.train(before=wire, evaluate_fn=evaluate, deadline=1.0, least_dealers=3)
    assert [line["scheme"].get("dealers") for line in result.history[1:]] == [4, 3, 4, 4]
    codings = {m.content[RECORD]["generation"] for _, m in wire.of(wire.asked, CODE)}
    assert len(codings) == 1
    lines = [json.loads(line) for line in (folders.server / "metrics.jsonl").open()]
    assert [line["round"] for line in lines] == [0, 1, 2, 3, 4]


def test_a_client_that_misses_a_gradient_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was in the sum that the gradient is of; where fewer may deal, the others go on."""
    fault = Fault(kind="drop", client="2", phase=DEAL, server_round=2)
    options = {"evaluation": "none", "least_dealers": 3, "deadline": 1.0, "faults": [fault]}
    result = Folders(tmp_path, "run").train(**options)
    assert result.history[2]["scheme"]["dealers"] == 3
    said = [r.getMessage() for r in caplog.records if "gradient" in r.getMessage()]
    assert any("round 2" in text and "2" in text.partition("round 2")[2] for text in said)


def test_a_client_that_does_not_get_the_last_gradient_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its weights are a step behind the model that is returned."""
    fault = Fault(kind="drop", client="2", phase=DEAL_EVALUATION, server_round=ROUNDS)
    Folders(tmp_path, "run").train(evaluation="none", deadline=1.0, faults=[fault])
    said = [r.getMessage() for r in caplog.records if "gradient" in r.getMessage()]
    assert any("'2'" in text or " 2" in text for text in said)
