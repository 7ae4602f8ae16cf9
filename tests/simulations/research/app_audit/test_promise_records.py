"""Promises about single records: canary records in the data, lies that are refuted, kept ones."""

import pickle
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from torch.utils.data import ConcatDataset, DataLoader, RandomSampler, Subset, TensorDataset

from flwr_privacy.simulations.engines.inline.flower_internals import acting_as_server
from flwr_privacy.simulations.research.app_audit.findings import (
    CANNOT_TELL,
    NOT_REFUTED,
    REFUTED,
    Finding,
)
from flwr_privacy.simulations.research.app_audit.instruments import Inside
from flwr_privacy.simulations.research.app_audit.processes import run_probe
from flwr_privacy.simulations.research.app_audit.promise import record_runs
from flwr_privacy.simulations.research.app_audit.promise.claims import read_claim
from flwr_privacy.simulations.research.app_audit.promise.gradient_shares import shares
from flwr_privacy.simulations.research.app_audit.promise.record_canaries import RecordCanaries
from flwr_privacy.simulations.research.app_audit.promise.record_parts import (
    Longer,
    first_group,
    made_of,
    parts_of,
    replaced,
)
from flwr_privacy.simulations.research.app_audit.promise.verdicts import promise
from flwr_privacy.simulations.research.app_audit.target import Target
from flwr_privacy.simulations.research.app_audit.transcript import Transcript
from tests.simulations.research.app_audit.record_apps import written

_LIE = "epsilon=1,delta=1e-5,unit=record"
_KEPT = 2.08
"""Epsilon of noise 2 in 8 steps of a quarter of the records, rounded up: see its test."""


@pytest.fixture
def audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Finding]:
    """Return what is said of the promise of an app, after one run of it with 300 coins."""
    monkeypatch.setattr(record_runs, "COINS", 300)

    def audited(
        app: Path, claim: str, *, records: str | None = None, rounds: int | None = None
    ) -> Finding:
        target = Target.of(app)
        as_is = run_probe(target, tmp_path / "as-it-is", seconds=120, seed=0, rounds=rounds)
        found = promise(
            target,
            as_is,
            claim=read_claim(claim),
            seconds=120,
            seed=0,
            folder=tmp_path / "canaries",
            canaries=records,
        )
        (verdict,) = (one for one in found if one.name == "the promise")
        return verdict

    return audited


def test_training_without_noise_is_refuted(tmp_path: Path, audited: Any) -> None:
    found = audited(written(tmp_path, "plain"), _LIE)

    assert found.verdict == REFUTED
    assert found.numbers["coins"] == 300
    assert found.numbers["refutable below"] > 2
    assert "knows all other records" in found.said


def test_records_that_change_on_their_way_are_not_told(tmp_path: Path, audited: Any) -> None:
    found = audited(written(tmp_path, "changed", changed=" * 2"), _LIE)

    assert found.verdict == CANNOT_TELL
    assert "in another form" in found.said


@pytest.mark.long
def test_what_opacus_promises_is_not_refuted(tmp_path: Path, audited: Any) -> None:
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = [(2.0, 0.25, 8)]
    assert _KEPT - 0.01 < accountant.get_epsilon(1e-5) < _KEPT

    found = audited(
        written(tmp_path, "noised", noise=2.0), f"epsilon={_KEPT},delta=1e-5,unit=record"
    )

    assert found.verdict == NOT_REFUTED


@pytest.mark.long
def test_less_noise_than_is_promised_is_refuted(tmp_path: Path, audited: Any) -> None:
    found = audited(written(tmp_path, "less", noise=0.1), _LIE)

    assert found.verdict == REFUTED


@pytest.mark.long
@pytest.mark.parametrize("neighbours", ["zero_out", "replace_one"])
def test_records_of_a_function_are_refuted(neighbours: str, tmp_path: Path, audited: Any) -> None:
    app = written(tmp_path, "arrays", arrays=True)

    found = audited(app, f"{_LIE},neighbours={neighbours}", records="arrays_task:load_arrays")

    assert found.verdict == REFUTED
    assert found.numbers["coins"] == 300


@pytest.mark.long
def test_models_alone_refute_where_few_clients_train(tmp_path: Path, audited: Any) -> None:
    app = written(tmp_path, "models", rounds=8)
    (app / "pyproject.toml").open("a").write(
        "[tool.flwr.federations]\ndefault = 'few'\n[tool.flwr.federations.few]\n"
        "options.num-supernodes = 2\n"
    )

    found = audited(app, f"{_LIE},view=model")

    assert found.verdict == REFUTED


def test_no_function_of_that_name(tmp_path: Path, audited: Any) -> None:
    found = audited(written(tmp_path, "none", rounds=1), _LIE, records="none_task:nothing")

    assert found.verdict == CANNOT_TELL
    assert "none_task:nothing" in found.said


def test_too_many_coins_for_a_delta(tmp_path: Path, audited: Any) -> None:
    found = audited(
        written(tmp_path, "loose", rounds=2), "epsilon=1,delta=0.05,unit=record,per=round"
    )

    assert found.verdict == CANNOT_TELL
    assert "With a delta of 0.1 over the training" in found.said


def test_a_claim_is_about_the_rounds_that_were_run(tmp_path: Path, audited: Any) -> None:
    found = audited(written(tmp_path, "longer", rounds=9), f"{_LIE},per=round", rounds=1)

    played = Transcript(tmp_path / "canaries" / "records" / "0")
    assert found.numbers["coins"] == 300
    assert {one.round for one in played.exchanges} == {1}


class _Client:
    """A client of an app that trains by a function of a test's, with canaries."""

    def __init__(self, canaries: RecordCanaries, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(DataLoader, "__init__", DataLoader.__init__)  # put back afterwards
        self.inside = Inside()
        self.canaries = canaries
        canaries.install(self.inside)

    def asked(self, train: Callable[[], Any], *, kind: str = "train", client: int = 0) -> Any:
        got: list[Any] = []

        def function(message: Message, context: Context) -> Message:
            got.append(train())
            return message

        with acting_as_server(run_id=1):
            message = Message(RecordDict(), dst_node_id=2, message_type=kind)
        context = Context(0, 0, {"partition-id": client}, RecordDict(), {})
        self.canaries.answer(message, context, function)
        return got[0]


def _data(size: int = 40) -> TensorDataset:
    draws = torch.Generator().manual_seed(0)
    features = torch.randn(size, 3, generator=draws)
    return TensorDataset(features, torch.arange(size) % 4)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> _Client:
    return _Client(RecordCanaries(seed=3, most=8, clients=9), monkeypatch)


def test_the_loader_that_shuffles_gets_them_and_no_other(client: _Client) -> None:
    def train() -> list[DataLoader[Any]]:
        return [
            DataLoader(_data(), batch_size=4),
            DataLoader(_data(), batch_size=4, shuffle=True),
            DataLoader(_data(), batch_size=4, shuffle=True),
        ]

    lengths = [len(one.dataset) for one in client.asked(train)]
    own = client.canaries.clients[0]

    assert 0 < own.coins.sum() < own.coins.size == 8
    assert lengths == [40, 40 + own.coins.sum(), 40]


def test_they_are_the_same_in_all_rounds_and_there_only_to_train(client: _Client) -> None:
    def train() -> list[Any]:
        return list(DataLoader(_data(), batch_size=None, shuffle=True))

    first, second = client.asked(train), client.asked(train)
    evaluated = client.asked(train, kind="evaluate")
    there = client.canaries.clients[0].there

    def added(records: list[Any]) -> int:
        return sum(any(torch.equal(x, c[0]) for c in there) for x, _ in records)

    assert added(first) == added(second) == len(there)
    assert added(evaluated) == 0


def test_a_loader_of_what_has_them_gets_no_more(client: _Client) -> None:
    def train() -> int:
        loader = DataLoader(_data(), batch_size=4, shuffle=True)
        return len(DataLoader(loader.dataset, batch_size=4, shuffle=True).dataset)

    assert client.asked(train) == 40 + client.canaries.clients[0].coins.sum()


def test_a_part_of_what_has_them_gets_no_more(client: _Client) -> None:
    loader = client.asked(lambda: DataLoader(_data(), batch_size=4, shuffle=True))

    def train() -> list[int]:
        part = Subset(loader.dataset, range(20))
        both = ConcatDataset([part, _data(4)])
        return [len(DataLoader(one, shuffle=True).dataset) for one in (part, both)]

    assert client.asked(train) == [20, 24]


@pytest.mark.parametrize("sampler", [RandomSampler, lambda data: torch.arange(5), lambda data: []])
def test_a_sampler_of_the_apps_own_would_not_draw_them(client: _Client, sampler: Any) -> None:
    def train() -> int:
        data = _data()
        return len(DataLoader(data, sampler=sampler(data)).dataset)

    assert client.asked(train) == client.asked(train) == 40
    assert not client.canaries.clients


def test_clients_beyond_the_last_one_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    client = _Client(RecordCanaries(seed=3, most=8, clients=1), monkeypatch)

    def train() -> int:
        return len(DataLoader(_data(), shuffle=True).dataset)

    assert client.asked(train) > 40
    assert client.asked(train, client=1) == 40


def test_a_function_that_is_called_twice_returns_them_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("an_apps_task")
    module.__dict__["load"] = lambda: (np.zeros((40, 2)), np.zeros(40, int))
    monkeypatch.setitem(sys.modules, "an_apps_task", module)
    canaries = RecordCanaries(seed=3, most=8, clients=9, function="an_apps_task:load")
    client = _Client(canaries, monkeypatch)

    lengths = client.asked(lambda: [len(module.load()[0]), len(module.load()[1])])

    assert lengths == [40 + canaries.clients[0].coins.sum(), 40]
    assert client.asked(lambda: len(module.load()[1])) == lengths[0]
    assert client.asked(lambda: len(module.load()[1]), kind="evaluate") == 40


def test_inputs_and_labels_are_found_in_other_types(client: _Client) -> None:
    whole = [(np.full((2, 2), n, np.uint8), {"y": 0.1 * n, "id": n}) for n in range(40)]

    def train() -> None:
        records = list(DataLoader(whole, batch_size=None, shuffle=True))
        inputs = np.array([one[0] for one in records], np.float32).reshape(-1, 4)
        labels = np.array([[one[1]["y"]] for one in records], np.float32)
        client.inside.step(inputs, labels, trains=True)

    client.asked(train)
    read = client.canaries.read

    assert read.inputs.most_common(1)[0][0] == 0
    assert read.labels[1] >= 40 > read.labels[2]
    assert read.form is not None
    assert (read.form.shape, read.form.dtype) == ((0, 4), np.float32)


def test_a_longer_data_set_is_one_like_before() -> None:
    data = _Columns()
    longer = pickle.loads(pickle.dumps(Longer(data, [7, 8])))

    assert [longer[place] for place in range(len(longer))] == [0, 1, 2, 7, 8]
    assert longer[-1] == 8
    assert longer["label"] == "a column"
    assert longer.classes == 3
    assert not hasattr(longer, "__getitems__")


class _Columns:
    """A data set with columns, and batches of places."""

    classes = 3

    def __len__(self) -> int:
        return 3

    def __getitem__(self, place: Any) -> Any:
        return "a column" if place == "label" else place

    def __getitems__(self, places: Any) -> Any:
        raise AssertionError(places)


def test_records_of_several_lengths_are_taken_whole() -> None:
    records = [{"tokens": list(range(n)), "label": 1} for n in (2, 3, 5)]
    made = made_of(records, np.random.default_rng(0))
    assert made["tokens"] in [one["tokens"] for one in records]


def test_loaders_in_order_get_them_where_none_shuffles(client: _Client) -> None:
    def train() -> int:
        return len(DataLoader(_data(), batch_size=4).dataset)

    assert client.asked(train) == 40
    assert client.asked(train, client=1) == 40 + client.canaries.clients[1].coins.sum()


def test_pairs_do_not_change_the_number_of_records(monkeypatch: pytest.MonkeyPatch) -> None:
    client = _Client(RecordCanaries(seed=3, most=8, clients=9, pairs=True), monkeypatch)

    def train() -> list[Any]:
        return list(DataLoader(_data(), batch_size=None, shuffle=True))

    records = client.asked(train)
    own = client.canaries.clients[0]

    assert len(records) == 48
    for coin, head, tail in zip(own.coins, own.heads, own.tails, strict=True):
        there, other = (head, tail) if coin else (tail, head)
        assert sum(torch.equal(x, there[0]) for x, _ in records) == 1
        assert sum(torch.equal(x, other[0]) for x, _ in records) == 0


def test_a_canary_has_the_form_of_a_record() -> None:
    record = namedtuple("record", "image label extra")
    records = [
        record(torch.full((2, 2), i, dtype=torch.uint8), i % 3, {"weight": float(i), "name": "a"})
        for i in range(9)
    ]

    made = made_of(records, np.random.default_rng(0))

    assert isinstance(made, record)
    assert made.image.dtype == torch.uint8
    assert made.image.shape == (2, 2)
    assert len(made.image.unique()) > 1  # of several records
    assert made.label in (0, 1, 2)
    assert isinstance(made.extra["weight"], float)
    assert made.extra["name"] == "a"
    assert [part.shape for part in parts_of(made)] == [(2, 2), (), ()]


@pytest.mark.parametrize("nested", [False, True])
def test_more_records_in_what_a_function_returns(nested: bool) -> None:
    train = (np.zeros((4, 2), np.float32), np.arange(4))
    found: Any = (train, (np.zeros((3, 2)), np.zeros(3))) if nested else train

    group = first_group(found)
    longer = replaced(found, group.within, group.longer([(np.ones(2), 7)]))

    features, labels = longer[0] if nested else longer
    assert features.shape == (5, 2)
    assert features.dtype == np.float32
    assert labels.tolist() == [0, 1, 2, 3, 7]
    assert len(train[0]) == 4
    if nested:
        assert len(longer[1][0]) == 3


def test_shares_tell_records_whose_gradients_are_alike() -> None:
    draws = np.random.default_rng(0)
    gradients = draws.normal(size=400) * 3 + draws.normal(size=(60, 400))
    there = draws.permutation(60) < 30
    lengths = np.linalg.norm(gradients, axis=1)
    change = (gradients / lengths[:, None])[there].sum(axis=0) + 0.02 * draws.normal(size=400)

    found = shares(gradients, change)
    cosines = gradients @ change / lengths

    assert np.mean((found > np.median(found)) == there) > 0.95
    assert np.mean((cosines > np.median(cosines)) == there) < 0.85
