"""All attacks of an audit: on what they cannot use, again, and in a process on a small app."""

import json
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn

from flwr_privacy.simulations.research.app_audit.findings import Finding
from flwr_privacy.simulations.research.app_audit.processes import run_module, run_probe
from flwr_privacy.simulations.research.app_audit.rebuilt.__main__ import rebuilt
from flwr_privacy.simulations.research.app_audit.rebuilt.evidence import laid_out, upload_of
from flwr_privacy.simulations.research.app_audit.rebuilt.networks import (
    filled,
    linear_inputs,
    record_losses,
    shapes_of,
)
from flwr_privacy.simulations.research.app_audit.target import Target
from flwr_privacy.simulations.research.app_audit.transcript import Transcript

from .apps import small_app
from .trainings import data, network, run

MODEL = network(12, 32, 4)
MANY = [data(30, 12, classes=4, seed=30 + i) for i in range(4)]
FEW = [data(n, 12, classes=4, seed=50 + n) for n in (1, 2, 4)]
NAMES = [
    "number of records",
    "label histograms",
    "members by loss",
    "members by the direction of an upload",
    "rows of linear layers",
    "labels of few records",
    "gradient inversion",
]


def attacked(as_is: Transcript, few: Transcript | None, out: Path) -> dict[str, Finding]:
    folder = None if few is None else few.folder
    found = list(rebuilt(as_is=as_is.folder, few=folder, seconds=4, seed=1, out=out))
    assert sorted(f.name for f in found) == sorted(NAMES)
    return {f.name: f for f in found}


def left_out(found: dict[str, Finding]) -> set[str]:
    return {name for name, one in found.items() if one.verdict == "left out"}


def test_all_attacks_run_on_a_plain_app(tmp_path: Path) -> None:
    as_is = run(tmp_path / "as", MODEL, MANY, evaluated=[data(30, 12, classes=4, seed=9)])
    found = attacked(as_is, run(tmp_path / "few", MODEL, FEW), tmp_path)
    assert not left_out(found)
    assert found["rows of linear layers"].verdict == "leak"
    for one in found.values():
        assert Finding.from_json(json.loads(json.dumps(one.as_json()))) is not None
    assert left_out(attacked(as_is, None, tmp_path)) == set(NAMES[4:])


def test_a_model_of_other_shapes_is_left_out_with_the_reason(tmp_path: Path) -> None:
    as_is = run(tmp_path / "as", MODEL, MANY)
    as_is.folder.joinpath("model.pkl").write_bytes(cloudpickle.dumps(network(12, 31, 4)))
    found = attacked(as_is, run(tmp_path / "few", MODEL, FEW), tmp_path)
    assert left_out(found) == set(NAMES[1:])
    assert "do not fit" in found["gradient inversion"].said


@pytest.mark.parametrize("content", [b"no pickle", cloudpickle.dumps(3), None])
def test_a_model_that_is_none_is_left_out_with_the_reason(
    content: bytes | None, tmp_path: Path
) -> None:
    as_is = run(tmp_path / "as", MODEL, MANY)
    path = as_is.folder / "model.pkl"
    path.unlink() if content is None else path.write_bytes(content)
    found = attacked(as_is, None, tmp_path)
    assert left_out(found) == set(NAMES[1:])
    assert "model" in found["gradient inversion"].said
    named = list(
        rebuilt(
            as_is=as_is.folder,
            few=None,
            seconds=4,
            seed=1,
            out=tmp_path,
            model="tests.simulations.research.app_audit.test_rebuilt:same_model",
        )
    )
    assert {f.name: f.verdict for f in named}["label histograms"] == "leak"


def same_model() -> nn.Module:
    return network(12, 32, 4)


def test_masked_uploads_are_attacked_and_give_nothing(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)

    def masks(start: list[np.ndarray], end: list[np.ndarray], node: int) -> list[np.ndarray]:
        return [draws.integers(0, 2**32, a.shape) for a in end]

    as_is = run(tmp_path / "as", MODEL, MANY, leave=masks)
    found = attacked(as_is, run(tmp_path / "few", MODEL, FEW, leave=masks), tmp_path)
    for name in ("label histograms", *NAMES[4:]):
        assert found[name].verdict == "note", name
    packed = run(tmp_path / "p", MODEL, FEW, leave=lambda *_: [draws.integers(0, 256, 900)])
    found = attacked(as_is, packed, tmp_path)
    assert "no upload can be laid out" in found["rows of linear layers"].said


def test_codes_of_a_model_are_decoded_by_the_model_that_was_sent(tmp_path: Path) -> None:
    def codes(start: list[np.ndarray], end: list[np.ndarray], node: int) -> list[np.ndarray]:
        return [np.round(1e7 * a.astype(np.float64)).astype(np.int64) + 5 for a in end]

    shapes = shapes_of(MODEL)
    plain = [upload_of(e, shapes) for e in run(tmp_path / "a", MODEL, FEW).exchanges]
    flat = [
        upload_of(e, shapes)
        for e in run(
            tmp_path / "b",
            MODEL,
            FEW,
            leave=lambda *a: [np.concatenate([c.reshape(-1) for c in codes(*a)])],
        ).exchanges
    ]
    for one, other in zip(plain, flat, strict=True):
        assert one is not None
        assert other is not None
        for name in shapes:
            np.testing.assert_allclose(other.change[name], one.change[name], rtol=0.05, atol=1e-3)


def test_arrays_fit_by_name_or_by_order() -> None:
    shapes = {"a.weight": (2, 3), "a.bias": (2,)}
    weight, bias = np.zeros((2, 3)), np.ones(2)
    assert laid_out({"x/a.bias": bias}, shapes) == {"a.bias": bias}
    found = laid_out({"x/0": weight, "x/1": bias}, shapes)
    assert found is not None
    assert list(found) == list(shapes)
    for wrong in ({}, {"x/0": bias, "x/1": weight}, {"x/a.bias": weight}, [weight]):
        assert laid_out(wrong, shapes) is None


def test_statistics_of_batches_stay_and_dropout_is_off() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2))
    net = filled(model, {"1.running_mean": np.full(3, 7.0)})
    inputs, _ = data(8, 4, seed=1)
    one, two = (linear_inputs(net, inputs)["3"] for _ in range(2))
    np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(net.state_dict()["1.running_mean"], 7.0)
    assert int(net.state_dict()["1.num_batches_tracked"]) == 0
    assert model.state_dict()["1.running_mean"].abs().max() == 0


def test_the_loss_of_a_record_is_that_of_its_task() -> None:
    inputs = np.ones((3, 2))
    for outputs, labels, expected in (
        ([[0.0, 0.0]], np.array([0, 1, 1]), np.log(2)),
        ([[0.0]], np.array([0.0, 1.0, 1.0]), np.log(2)),
        ([[0.5]], np.array([2.5, 2.5, 2.5]), 4.0),
    ):
        model = nn.Linear(2, len(outputs[0]))
        nn.init.zeros_(model.weight)
        model.bias.data = torch.tensor(outputs[0])
        losses = record_losses(filled(model, {}), inputs, labels).detach().numpy()
        np.testing.assert_allclose(losses, expected)


CLIENT = """\
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

app = ClientApp()


def net_of(message):
    net = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 3))
    record = next(iter(message.content.array_records.values()))
    net.load_state_dict(dict(zip(net.state_dict(), record.to_torch_state_dict().values())))
    return net


def loader_of(context, what):
    draws = torch.Generator().manual_seed(10 * context.node_config["partition-id"] + what)
    inputs = torch.rand(24, 10, generator=draws)
    labels = torch.randint(3, (24,), generator=draws)
    return DataLoader(TensorDataset(inputs, labels), 12)


@app.train()
def train(message, context):
    net = net_of(message)
    steps = torch.optim.SGD(net.parameters(), lr=0.1)
    for inputs, labels in loader_of(context, 1):
        steps.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        steps.step()
    content = RecordDict({{"arrays": ArrayRecord(net.state_dict())}})
    content["metrics"] = MetricRecord({{"num-examples": 24}})
    return Message(content=content, reply_to=message)


@app.evaluate()
def evaluate(message, context):
    net = net_of(message).eval()
    with torch.no_grad():
        for inputs, labels in loader_of(context, 2):
            loss = nn.functional.cross_entropy(net(inputs), labels)
    metrics = MetricRecord({{"num-examples": 24, "loss": float(loss)}})
    return Message(content=RecordDict({{"metrics": metrics}}), reply_to=message)
"""

SERVER = """\
import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


@app.main()
def main(grid, context):
    rng = np.random.default_rng(0)
    shapes = (24, 10), (24,), (3, 24), (3,)
    start = ArrayRecord([rng.normal(0, 0.3, s).astype(np.float32) for s in shapes])
    FedAvg(min_available_nodes={nodes}).start(grid, start, num_rounds=1)
"""


def test_an_app_is_attacked_in_a_process_of_its_own(tmp_path: Path) -> None:
    app = small_app(tmp_path, name="learner", nodes=3, server=SERVER, client=CLIENT)
    target = Target.of(app)
    as_is = run_probe(target, tmp_path / "as", seconds=120, seed=1)
    few = run_probe(target, tmp_path / "few", seconds=120, seed=1, records=(1, 2, 4))
    evaluated = [e.evaluated for e in as_is.exchanges if e.kind == "evaluate"]
    assert len(evaluated) == 3
    assert all(e is not None and e.inputs.shape == (24, 10) for e in evaluated)
    out = tmp_path / "out"
    asked = {"as_is": str(as_is.folder), "few": str(few.folder), "model": None}
    asked |= {"seconds": 4.0, "seed": 1, "out": str(out)}
    log = out / "log.txt"
    assert run_module("rebuilt", asked, target=target, seconds=120, log=log), log.read_text()
    text = (out / "findings.json").read_text(encoding="utf-8")
    found = {one["name"]: Finding.from_json(one) for one in json.loads(text)}
    assert sorted(found) == sorted(NAMES)
    assert found["members by loss"].numbers["non-members"] == 72
    assert found["rows of linear layers"].verdict == "leak"
    assert found["rows of linear layers"].numbers["exact"] >= 3
