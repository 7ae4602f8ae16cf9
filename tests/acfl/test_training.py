"""A whole training under ACFL: its setup, what is on the wire, what the books say."""

import itertools
import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from acfl_app import (
    APP,
    FEATURES,
    LABELS,
    NOISED_RECORDS,
    NOISY,
    Nodes,
    OwnStart,
    data_of,
    descend,
    kill_after,
    late,
    model_after,
    moments_of,
    name_of,
    of_phase,
    run,
)
from apps import make, record, run_strategy, same
from conformance import Killed
from flwr.app import Context, Message
from grid_tap import tapped

from flwr_privacy.acfl.features import FourierFeatures
from flwr_privacy.clients import acfl_client_app
from flwr_privacy.errors import CheckpointError, DataError, InvalidParameterError, ProtocolError
from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.simulations.engines.inline import Fault
from flwr_privacy.stragglers import StragglerModel
from flwr_privacy.strategies import ACFL, Exact, Weighting
from flwr_privacy.wire.payload import payload_bytes

SHAPE = (FEATURES, LABELS)


# -- The setup -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["nan", "reshape", "corrupt"])
def test_who_was_not_set_up_takes_no_part(kind: str, caplog: Any) -> None:
    asked: list[Message] = []
    faults = [Fault(kind=kind, client="1", phase="setup")]
    strategy = make(ACFL, noise="none", alpha=0.5, straggler_rate=0.0, learning_rate=0.02)
    with caplog.at_level(logging.WARNING, "flwr.privacy"):
        result = run(strategy, faults=faults, before=tapped(asked.append))
    assert "no setup came from ['1']: they take no part in the training" in caplog.text
    A, B = moments_of("023")
    assert strategy.coded is not None
    np.testing.assert_allclose(strategy.coded.features, A, rtol=1e-12)
    np.testing.assert_allclose(strategy.coded.labels, B, rtol=1e-12)
    assert len(of_phase(asked, "setup")) == 4
    for line in result.history[1:]:
        assert (line["asked"], line["accumulated"], line["scheme"]["members"]) == (3, 3, 3)
    others = [data_of(i) for i in (0, 2, 3)]
    ideal = descend(np.zeros(SHAPE), others, [range(3)] * 3, p=0.0, step=lambda t: 0.02, alpha=0.0)
    np.testing.assert_allclose(model_after(result), ideal[3], rtol=1e-12)


def test_without_any_setup_there_is_no_training() -> None:
    with pytest.raises(ProtocolError, match=r"there are no coded data: .* has NaN or infinity"):
        run(ACFL(privacy=Exact()), faults=[Fault(kind="nan", phase="setup")])


def test_a_setup_waits_for_everybody_whatever_the_deadline() -> None:
    """On the virtual clock all are too late for the deadline, and on the real one one is."""
    slow = StragglerModel(kind="constant", seconds=2.0)
    options = {"noise": "none", "straggler_rate": 0.5, "seed": 1}
    result = run(make(ACFL, **options, stragglers=slow, deadline=1.0))
    assert [line["accumulated"] for line in result.history[1:]] == [0, 0, 0]
    assert [line["late"] for line in result.history[1:]] == [4, 4, 4]
    assert result.history[1]["scheme"]["members"] == 4
    assert [line["virtual_seconds"] for line in result.history] == [2.0, 3.0, 4.0, 5.0]
    fault = Fault(kind="delay", client="2", phase="setup", seconds=1.5)
    result = run(make(ACFL, **options, deadline=1.0), faults=[fault], num_rounds=1)
    assert result.history[1]["scheme"]["members"] == 4


def test_a_client_that_comes_later_is_set_up_then() -> None:
    strategy = make(ACFL, noise="none", straggler_rate=0.2, deadline=5.0)
    nodes = Nodes(comes={2: 4})
    result = run(strategy, num_rounds=4, before=nodes.before, evaluate_fn=nodes.after)
    assert strategy.coded is not None
    np.testing.assert_allclose(strategy.coded.features, moments_of(range(5))[0], rtol=1e-12)
    assert [line["asked"] for line in result.history[1:]] == [4, 4, 5, 5]
    assert [line["scheme"]["members"] for line in result.history[1:]] == [4, 4, 5, 5]


def test_a_late_setup_is_on_the_card_and_costs_no_more_than_the_others(tmp_path: Path) -> None:
    strategy = make(ACFL, **NOISED_RECORDS)
    nodes = Nodes(comes={2: 4})
    run(strategy, num_rounds=4, before=nodes.before, evaluate_fn=nodes.after, state=tmp_path)
    charges = strategy.card().charges()
    assert {client: len(own) for client, own in charges.items()} == {
        **dict.fromkeys("0123", 5),
        "4": 3,
    }
    for client, own in charges.items():
        assert [e.charge for e in entries(tmp_path, client)] == own


@pytest.mark.parametrize("options", [NOISY, NOISED_RECORDS], ids=["paper", "record"])
@pytest.mark.parametrize("after", [0, 2])
def test_a_resumed_training_goes_on_with_its_setup(
    options: Any, after: int, tmp_path: Path
) -> None:
    for name in ("run", "state"):
        (tmp_path / name).mkdir()
    slow = late({1: "0", 2: "12", 3: "0123", 4: "3"})
    options = {
        **options,
        "experiment_id": "e",
        "seed": 1,
        "straggler_rate": 0.3,
        "stragglers": slow,
    }
    engine = {"num_rounds": 4, "insecure_seed": 3}
    whole = make(ACFL, **options)
    unbroken = run(whole, **engine)
    options["run_dir"] = tmp_path / "run"
    engine["state"] = tmp_path / "state"
    with pytest.raises(Killed):
        run(make(ACFL, **options, on_round=kill_after(after)), **engine)
    asked: list[Message] = []
    strategy = make(ACFL, **options, resume=True)
    resumed = run(strategy, **engine, before=tapped(asked.append))
    assert same(unbroken.arrays, resumed.arrays)
    assert not of_phase(asked, "setup")
    assert [line["scheme"] for line in resumed.history] == [
        pytest.approx(line["scheme"]) for line in unbroken.history
    ]
    assert strategy.releases == whole.releases
    changed = dict(options)
    changed["sigma1_sq" if "sigma1_sq" in options else "epsilon"] = 21.0
    with pytest.raises(CheckpointError, match="what was set up and charged cannot be changed"):
        run(make(ACFL, **changed, resume=True), **engine)


@pytest.mark.parametrize("options", [{"noise": "none"}, NOISED_RECORDS], ids=["exact", "record"])
def test_under_a_users_own_start_it_trains_without_coded_data(options: Any) -> None:
    options = {**options, "alpha": 0.0, "learning_rate": 0.02, "experiment_id": "e", "rounds": 3}
    plain, own = (
        run(make(ACFL, **options), insecure_seed=1),
        run(make(OwnStart, **options), insecure_seed=1),
    )
    assert same(plain.arrays, own.arrays, exact=False)
    assert np.abs(model_after(own)).max() > 0.01


def test_under_a_users_own_start_there_is_no_setup() -> None:
    with pytest.raises(ProtocolError, match=r"there was no setup: .* or with alpha = 0"):
        run(OwnStart(privacy=Exact()))
    with pytest.raises(InvalidParameterError, match="the rounds to spread the budget over"):
        run(OwnStart(weighting=Weighting(alpha=0.0), learning_rate=0.02))


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"W": np.zeros(SHAPE), "b": np.zeros(2)}, "one matrix of shape"),
        ({"W": np.zeros(FEATURES)}, "one matrix of shape"),
        ({"W": np.zeros(SHAPE, int)}, "initial_arrays = 'int64': expected a matrix of floats"),
    ],
    ids=["two arrays", "a vector", "integers"],
)
def test_the_model_is_one_matrix_of_floats(arrays: Any, text: str) -> None:
    for options in ({}, {"alpha": 0.0, "learning_rate": 0.02}):
        with pytest.raises(InvalidParameterError, match=text):
            run_strategy(make(ACFL, noise="none", **options), APP, arrays=record(arrays))


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("options", [{"alpha": 1.0}, {"alpha": 0.0}], ids=["coded", "gradients"])
def test_a_model_that_diverges_ends_the_training_with_a_reason(options: Any) -> None:
    for rate, last in ((1e200, 1), (1e40, 2), (5.0, 90)):
        with pytest.raises(DataError, match=r"the model diverges in round .*: the step .* is too"):
            run(make(ACFL, noise="none", **options, learning_rate=rate), num_rounds=last)


# -- What is on the wire -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "setup", "train", "largest"),
    [
        ({**NOISY, "straggler_rate": 0.2}, np.int32, np.float64, 1e9),
        ({"noise": "none", "straggler_rate": 0.2}, np.float64, np.float64, 1e9),
        (NOISED_RECORDS, np.int32, np.int32, 2**31),
    ],
    ids=["paper", "none", "record"],
)
def test_gradients_travel_and_no_models(options: Any, setup: Any, train: Any, largest: Any) -> None:
    asked: list[Message] = []
    said: list[Message] = []
    result = run(make(ACFL, **options), num_rounds=2, before=tapped(asked.append, said.append))
    for question in of_phase(asked, "setup"):
        assert "arrays" not in question.content
    for question in of_phase(asked, "train"):
        (down,) = (a.numpy() for a in question.content["arrays"].values())
        assert (down.dtype, down.shape) == (np.float64, SHAPE)
    shapes = {"features": (FEATURES, FEATURES), "labels": SHAPE}
    for reply in of_phase(said, "setup"):
        arrays = {name: array.numpy() for name, array in reply.content["arrays"].items()}
        assert {name: a.shape for name, a in arrays.items()} == shapes
        assert {a.dtype for a in arrays.values()} == {np.dtype(setup)}
    for reply in of_phase(said, "train"):
        arrays = {name: array.numpy() for name, array in reply.content["arrays"].items()}
        assert {name: a.shape for name, a in arrays.items()} == {"gradient": SHAPE, "size": (1,)}
        assert {a.dtype for a in arrays.values()} == {np.dtype(train)}
        assert set(reply.content["metrics"]) == {"num-examples"}
    assert (len(of_phase(said, "setup")), len(of_phase(said, "train"))) == (4, 8)
    history = result.history
    assert sum(line["bytes_up"] for line in history) == sum(payload_bytes(m.content) for m in said)
    assert sum(line["bytes_down"] for line in history) == sum(
        payload_bytes(m.content) for m in asked
    )


def test_a_value_more_costs_what_its_kind_takes() -> None:
    """With 60 labels instead of 50 the gradient of 3 features has 30 values more."""

    def bytes_up(labels: int, **options: Any) -> tuple[float, float]:
        app = acfl_client_app(lambda c: (data_of(name_of(c))[0], np.zeros((12, labels))))
        strategy = make(ACFL, **options, experiment_id="e", learning_rate=1e-3)
        start = np.zeros((FEATURES, labels))
        history = run(strategy, app, start=start, num_rounds=1).history
        return history[0]["bytes_up"], history[1]["bytes_up"]

    for options, sizes in ((NOISY, (4, 8)), ({"noise": "none"}, (8, 8)), (NOISED_RECORDS, (4, 4))):
        more, less = bytes_up(60, **options), bytes_up(50, **options)
        assert [a - b for a, b in zip(more, less, strict=True)] == [4 * 30 * size for size in sizes]


def test_coded_data_alone_ask_for_no_gradient() -> None:
    result = run(make(ACFL, **NOISY, alpha=1.0))
    for line in result.history[1:]:
        assert (line["bytes_up"], line["bytes_down"], line["exchanges"]) == (0, 0, 0)
        assert not line["skipped"]


def test_without_coded_data_there_is_no_setup() -> None:
    asked: list[Message] = []
    options = {"noise": "none", "alpha": 0.0, "learning_rate": 0.02}
    run(make(ACFL, **options), before=tapped(asked.append))
    assert not of_phase(asked, "setup")
    assert len(of_phase(asked, "train")) == 12


@pytest.mark.parametrize(
    ("kind", "reason"), [("reshape", "shape"), ("stale", "another round"), ("nan", "not finite")]
)
def test_a_gradient_that_cannot_be_one_is_as_good_as_none(kind: str, reason: str) -> None:
    options = {**NOISY, "straggler_rate": 0.2, "experiment_id": "e"}
    if kind == "stale":  # what was asked for does not come
        options["deadline"] = 1.0
    fault = Fault(kind=kind, client="2", server_round=2)
    lied = run(make(ACFL, **options), faults=[fault], insecure_seed=1)
    assert lied.history[2]["refused"] == {reason: 1}
    missed = run(make(ACFL, **options, stragglers=late({2: "2"})), insecure_seed=1)
    assert same(lied.arrays, missed.arrays)


@pytest.mark.parametrize(
    "made",
    [
        lambda: (_ for _ in ()).throw(RuntimeError("the secret 4711")),
        lambda: ([[4711.0]], [[1.0]]),
        lambda: (np.full((4, 3), 0.4711), np.full((4, 2), np.nan)),
        lambda: "the secret 4711",
    ],
    ids=["it raises", "beyond the bound", "not finite", "no data"],
)
def test_no_error_tells_the_server_of_the_data(made: Any) -> None:
    said: list[Message] = []
    app = acfl_client_app(lambda context: made())
    with pytest.raises(ProtocolError, match="the setup failed, there are no coded data") as error:
        run(make(ACFL, **NOISY), app, before=tapped(said=said.append))
    reasons = [reply.error.reason for reply in said if reply.has_error()]
    assert len(reasons) == 4
    assert reasons[0] in str(error.value)  # whoever runs the server sees why
    for text in (*reasons, str(error.value)):  # the digits may be in a node's random id
        assert text
        assert not re.search(r"(?<!\d)4711(?!\d)", text)


def test_everybody_needs_the_feature_map_that_the_server_names(caplog: Any) -> None:
    """Client 2 has another seed."""

    def features(seed: int) -> FourierFeatures:
        return FourierFeatures(raw=4, features=FEATURES, width=1.0, seed=seed)

    raw = np.random.default_rng(0).normal(size=(5, 12, 2, 2))
    apps = {
        seed: acfl_client_app(
            lambda c: (raw[int(name_of(c))], data_of(name_of(c))[1]), features=features(seed)
        )
        for seed in (0, 1)
    }

    class Mixed:
        def __call__(self, message: Message, context: Context) -> Message:
            return apps[int(name_of(context) == "2")](message, context)

    strategy = make(ACFL, noise="none", features=features(0), feature_norm=2**0.5, alpha=0.5)
    with caplog.at_level(logging.WARNING, "flwr.privacy"):
        run(strategy, Mixed(), num_rounds=1)
    assert strategy.members == ["0", "1", "3"]
    assert (
        "features = 'fourier raw=4 features=3 width=1 seed=0': expected the feature map"
        in caplog.text
    )
    embedded = [features(0)(raw[i]) for i in (0, 1, 3)]
    assert strategy.coded is not None
    np.testing.assert_allclose(strategy.coded.features, sum(X.T @ X for X in embedded), rtol=1e-12)


# -- What the books say --------------------------------------------------------------------------


def entries(state: Path, client: str) -> list[Any]:
    return list(Ledger(state / f"{client}.ledger", data_set=client).entries())


@pytest.mark.parametrize(
    ("options", "releases"),
    [
        ({}, 4),
        ({"setup_share": 0.1}, 4),
        ({"alpha": 0.0, "learning_rate": 0.01}, 3),
        ({"alpha": 1.0}, 1),
    ],
    ids=["as usual", "less for the setup", "no setup", "no gradients"],
)
def test_a_whole_training_costs_the_budget_and_no_more(
    options: Any, releases: int, tmp_path: Path
) -> None:
    for name in ("run", "state"):
        (tmp_path / name).mkdir()
    strategy = make(ACFL, **NOISED_RECORDS, **options, run_dir=tmp_path / "run")
    result = run(strategy, state=tmp_path / "state")
    assert result.guarantee.epsilon == 20.0
    assert result.guarantee.spent <= 20.0 * (1 + 1e-9)
    assert result.guarantee.spent == pytest.approx(20.0, rel=1e-3)
    assert result.history[3]["scheme"]["epsilon_left"] == pytest.approx(0.0, abs=0.02)
    spent = [line["scheme"]["epsilon"] for line in result.history]
    assert all(a <= b for a, b in itertools.pairwise(spent))
    card = PrivacyCard.from_json((tmp_path / "run" / "privacy-card.json").read_text())
    assert card.verify()
    charges = card.charges()
    assert sorted(charges) == ["0", "1", "2", "3"]
    for client, own in charges.items():
        ledger = entries(tmp_path / "state", client)
        assert len(ledger) == releases
        assert [entry.charge for entry in ledger] == own
        assert {(entry.scheme, entry.unit) for entry in ledger} == {("acfl", "record")}


@pytest.mark.parametrize("noise", ["record", "none"])
def test_rounds_beyond_the_budget_are_not_asked_for(
    noise: str, tmp_path: Path, caplog: Any
) -> None:
    """Without a budget `rounds` says nothing."""
    options: dict[str, Any] = {**NOISED_RECORDS, "rounds": 2}
    if noise == "none":
        options = {"noise": noise, "max_records": 20, "rounds": 2}
    asked: list[Message] = []
    with caplog.at_level(logging.WARNING, "flwr.privacy"):
        result = run(
            make(ACFL, **options),
            num_rounds=4,
            state=tmp_path,
            before=tapped(asked.append),
        )
    rounds = 2 if noise == "record" else 4
    assert [line["round"] for line in result.history] == list(range(rounds + 1))
    assert len(of_phase(asked, "train")) == 4 * rounds
    if noise == "record":
        assert "before round 3: the 2 rounds that the budget is for are done" in caplog.text
        assert result.guarantee.spent == pytest.approx(20.0, rel=1e-3)
        assert result.guarantee.spent <= 20.0 * (1 + 1e-9)
        assert [len(entries(tmp_path, client)) for client in "0123"] == [3] * 4


def test_as_printed_a_ledger_has_the_setup_as_not_proven_to_be_all(tmp_path: Path) -> None:
    result = run(make(ACFL, **NOISY), state=tmp_path)
    for client in "0123":
        (entry,) = entries(tmp_path, client)
        assert (entry.scheme, entry.question.phase) == ("acfl-unproven", "setup")
    assert result.guarantee.epsilon is None
    text = result.guarantee.text()
    assert "nothing from a server that sees the gradients" in text
    assert "3 rounds that it answered give both exactly" in text
    said = result.history[1]["scheme"]
    assert f"{said['setup_record_epsilon']:.4g}, 1e-05)-differential privacy" in text


@pytest.mark.parametrize("seed", [None, 1])
def test_noise_from_a_seed_makes_the_promise_void(seed: int | None, tmp_path: Path) -> None:
    result = run(make(ACFL, **NOISED_RECORDS, run_dir=tmp_path), insecure_seed=seed, num_rounds=1)
    assert ("insecure seed" in result.guarantee.text()) == (seed is not None)
    document = json.loads((tmp_path / "privacy-card.json").read_text())
    assert ("insecure seed" in json.dumps(document)) == (seed is not None)
