"""BatchNorm in apps whose arrays are a list: refused before anybody is asked, or left alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from apps import make, message_app, run_strategy
from conformance import Killed
from flwr.app import ArrayRecord, Context
from flwr.client import NumPyClient
from torch import nn

from flwr_privacy.clients import (
    CentralDPClient,
    FedAvgClient,
    M2FDPClient,
    MSPClient,
    MSPDQClient,
    UDPClient,
    as_mod,
    numpy_client_app,
)
from flwr_privacy.clients.mspdq.baselines import QuantizedFedAvgClient
from flwr_privacy.clients.torch import statistics_of
from flwr_privacy.errors import CheckpointError, InvalidParameterError
from flwr_privacy.privacy.running_statistics import SETTLED
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.simulations.engines.inline import Fault
from flwr_privacy.strategies import M2FDP, MSP, MSPDQ, UDP, CentralDP, FedAvg
from flwr_privacy.strategies.mspdq.baselines import QuantizedFedAvg

STATISTICS = ["4", "5", "6"]  # mean, variance and counter of the network below
BUDGET = {"epsilon": 50.0, "clipping_norm": 0.5}
SCHEMES: dict[str, tuple[Callable[..., Any], Any]] = {
    "udp": (lambda **o: make(UDP, **BUDGET, **o), UDPClient),
    "central-dp": (lambda **o: make(CentralDP, **BUDGET, **o), CentralDPClient),
    "central-dp, trusted": (
        lambda **o: make(CentralDP, noise="server", **BUDGET, **o),
        CentralDPClient,
    ),
    "m2fdp": (lambda **o: make(M2FDP, fanouts=(2, 2), **BUDGET, p=0.5, **o), M2FDPClient),
    "msp": (MSP, MSPClient),
    "mspdq": (
        lambda **o: make(MSPDQ, secure_sum=SecureSum(), bound=4.0, bits=16, **o),
        MSPDQClient,
    ),
    "mspdq-plain": (QuantizedFedAvg, QuantizedFedAvgClient),
}


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2))


def arrays_of(model: nn.Module) -> list[np.ndarray]:
    return [tensor.numpy().copy() for tensor in model.state_dict().values()]


class TorchClient(NumPyClient):
    """What torch's own quickstart does: the whole ``state_dict`` goes there and back as a list."""

    def __init__(self, number: int, trained: list[int]) -> None:
        self.number, self.trained = number, trained

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict]:
        self.trained.append(self.number)
        model = network()
        names = model.state_dict()
        model.load_state_dict(
            {n: torch.from_numpy(np.array(p)) for n, p in zip(names, parameters, strict=True)}
        )
        # A spread by which the trained variance is far from the server's.
        features = torch.randn(16, 4, generator=torch.Generator().manual_seed(self.number)) * 9
        labels = (features[:, 0] > 0).long()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        model.train()
        for _ in range(3):
            loss = nn.functional.cross_entropy(model(features), labels)
            assert torch.isfinite(loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return arrays_of(model), 16, {}


def app(client: Any, trained: list[int]) -> Any:
    def client_fn(context: Context) -> NumPyClient:
        return client(TorchClient(int(context.node_config["partition-id"]), trained), context)

    return numpy_client_app(client_fn)


def run(scheme: str, trained: list[int], **options: Any) -> Any:
    strategy, client = SCHEMES[scheme]
    engine = {name: options.pop(name) for name in ("state", "faults") if name in options}
    return run_strategy(
        strategy(**options),
        app(client, trained),
        arrays=ArrayRecord(arrays_of(network())),
        num_rounds=2,
        **engine,
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_statistics_that_nobody_named_end_the_run_before_it_begins(
    scheme: str, tmp_path: Path
) -> None:
    trained: list[int] = []
    with pytest.raises(InvalidParameterError) as refusal:
        run(scheme, trained, state=tmp_path)
    text = str(refusal.value)
    assert text.startswith("keep_back = None: expected ")
    assert "arrays ['4', '5'] look like those of normalisation layers" in text
    assert "keep_back=statistics_of(model, positions=True)" in text
    assert "write keep_back=[]" in text
    assert trained == []
    assert not list(tmp_path.glob("*.ledger"))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_statistics_that_are_named_stay_as_the_server_has_them(scheme: str, tmp_path: Path) -> None:
    trained: list[int] = []
    keep_back = statistics_of(network(), positions=True)
    result = run(scheme, trained, keep_back=keep_back, state=tmp_path)
    assert keep_back == STATISTICS
    assert len(result.history) == 3
    assert trained  # MSPDQ draws its clients, and not always all of them
    start = arrays_of(network())
    for place, array in enumerate(result.arrays.to_numpy_ndarrays()):
        if str(place) in STATISTICS:
            np.testing.assert_array_equal(array, start[place])
        elif place != 1:  # a bias in front of a normalisation has no gradient
            assert (array != start[place]).any(), place
    assert f"at all: {', '.join(STATISTICS)}" in result.guarantee.text()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_app_may_say_that_all_are_weights(scheme: str) -> None:
    """The word reaches the clients, though an empty list does not travel."""
    result = run(scheme, [], keep_back=[])
    start = arrays_of(network())
    moved = result.arrays.to_numpy_ndarrays()
    for place in (4, 5):
        assert (moved[place] != start[place]).any()


def test_a_list_that_leaves_some_out_is_taken_at_its_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    result = run("udp", [], keep_back=["4", "6"])
    assert (result.arrays.to_numpy_ndarrays()[4] == 0).all()
    assert caplog.text.count("keep_back leaves out ['5'], which look like running") == 1


def test_without_a_promise_statistics_are_averaged_as_they_were() -> None:
    result = run_strategy(
        FedAvg(),
        app(FedAvgClient, []),
        arrays=ArrayRecord(arrays_of(network())),
        num_rounds=1,
    )
    assert (result.arrays.to_numpy_ndarrays()[5] > 1).all()


@pytest.mark.parametrize("scheme", ["udp", "central-dp"])
def test_a_resumed_run_keeps_them_too(scheme: str, tmp_path: Path) -> None:
    """Where they are kept back they look new in every round."""

    def stop(line: dict[str, Any]) -> None:
        if line["round"] == 1:
            raise Killed

    for name in ("run", "state"):
        (tmp_path / name).mkdir()
    options = {"run_dir": tmp_path / "run", "rounds": 2, "state": tmp_path / "state"}
    with pytest.raises(Killed):
        run(scheme, [], keep_back=STATISTICS, on_round=stop, **options)
    with pytest.raises(CheckpointError, match=r"keep_back = \['4', '5', '6'\], not \[\]"):
        run(scheme, [], resume=True, **options)
    result = run(scheme, [], keep_back=STATISTICS, resume=True, **options)
    assert [line["round"] for line in result.history] == [0, 1, 2]
    assert not result.history[-1].get("skipped")
    assert (result.arrays.to_numpy_ndarrays()[5] == 1).all()


def test_a_client_that_comes_late_is_told(tmp_path: Path) -> None:
    away = [Fault(kind="drop", client="3", server_round=1)]
    trained: list[int] = []
    result = run("udp", trained, keep_back=STATISTICS, faults=away, state=tmp_path)
    assert [line["accumulated"] for line in result.history[1:]] == [3, 4]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_client_refuses_where_the_server_says_nothing(
    scheme: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A server of another make, or one that leaves the field out."""
    from flwr_privacy.strategies.loop.base import SchemeStrategy

    monkeypatch.setattr(SchemeStrategy, "_settled_statistics", lambda self: {})
    trained: list[int] = []
    result = run(scheme, trained, state=tmp_path)
    assert trained == []
    assert not list(tmp_path.glob("*.ledger"))
    assert all(line.get("skipped") for line in result.history[1:])
    assert caplog.text.count("arrays ['4', '5'] look like those of normalisation layers") >= 4


def test_what_the_server_settled_travels_with_every_training() -> None:
    seen: list[Any] = []

    class Looking(UDPClient):
        def handle(self, phase: str, arrays: Any, fields: Any, train: Any) -> Any:
            seen.append(fields.get(SETTLED))
            return super().handle(phase, arrays, fields, train)

    run_strategy(make(UDP, **BUDGET), message_app([as_mod(Looking)]), num_rounds=2)
    assert seen == [True] * 8
