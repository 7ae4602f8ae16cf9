"""The functions of FedVS's experiments, and what the files in `papers/fedvs` say of themselves."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from flwr_privacy.clients.torch import TorchServerModel, mlp
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.experiments.files import experiment, names
from flwr_privacy.simulations.research.experiments.functions import FUNCTIONS
from flwr_privacy.simulations.research.experiments.runs import function_points
from flwr_privacy.simulations.research.fedvs import experiment as vertical
from flwr_privacy.simulations.research.fedvs.in_process import FedVSTrainingCurve
from flwr_privacy.simulations.research.fedvs.numpy_simulation import simulate
from flwr_privacy.simulations.research.fedvs.synthetic_data import FedVSSettings, FedVSSyntheticData
from flwr_privacy.simulations.tasks import vertical_tasks
from flwr_privacy.simulations.tasks.data import load
from flwr_privacy.wire.identity import derive_seed

POINT = {"data": "digits-rows", "rounds": 6, "embedding": 8, "learning_rate": 0.2}
FIGURES = ("1a", "1b", "1c", "2-fashion", "2-handwritten", "2-credit", "2-parkinson", "3a", "3b")


def digits(clients: int) -> FedVSSyntheticData:
    images = load("digits")
    pixels = [
        np.array_split(part.reshape(len(part), -1).astype(np.float64), clients, axis=1)
        for part in (images.features, images.test_features)
    ]
    return FedVSSyntheticData(
        blocks=pixels[0],
        labels=images.labels,
        test_blocks=pixels[1],
        test_labels=images.test_labels,
    )


def server_model(inputs: int, seed: int) -> TorchServerModel:
    module = partial(mlp, (inputs, 64, 32, 10))
    return TorchServerModel(module, seed=derive_seed(seed, "initialise"))


# -- Simulations ---------------------------------------------------------------------------------


def test_points_are_read_off_a_simulation_of_the_tasks_columns() -> None:
    points = [{**POINT, "round": x, "method": "wait", "clients": 16} for x in (0, 3, 6)]
    found = vertical.curves(points, 5, None)
    own = FedVSSettings(method="wait", embedding=8, learning_rate=0.2)
    curve = simulate(
        digits(16), own, server_model(8, 5), watch=[0, 3, 6], by="rounds", rounds=6, seed=5
    )
    assert [values["loss"] for values in found] == pytest.approx(curve.loss.tolist(), rel=1e-4)
    assert [values["accuracy"] for values in found] == pytest.approx(curve.accuracy.tolist())


def test_concatenated_embeddings_have_a_central_model_of_their_width() -> None:
    point = {**POINT, "method": "wait", "aggregation": "concatenate", "round": 2}
    (found,) = vertical.curves([point], 0, None)
    own = FedVSSettings(method="wait", embedding=8, learning_rate=0.2, aggregation="concatenate")
    curve = simulate(digits(8), own, server_model(64, 0), watch=[2], by="rounds", rounds=6, seed=0)
    assert found["loss"] == pytest.approx(curve.loss[0], rel=1e-4)


def test_points_that_differ_in_when_they_are_read_share_a_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []

    def counted(*arguments: Any, **values: Any) -> FedVSTrainingCurve:
        calls.append(values["watch"])
        return simulate(*arguments, **values)

    monkeypatch.setattr(vertical, "simulate", counted)
    points = [
        {**POINT, "method": method, "seconds": x} for x in (9, 2, 5) for method in ("wait", "fedvs")
    ]
    vertical.curves(points, 0, None)
    assert calls == [[2.0, 5.0, 9.0]] * 2


def test_settings_that_are_not_given_are_the_tasks_own() -> None:
    task = vertical_tasks.vertical_task("fashion-rows")
    own = vertical.check({"data": "fashion-rows", "rounds": 1, "round": 1})
    assert (own.order, own.embedding) == (task.order, task.embedding) == (1, 64)
    assert own.batch_size == task.training.batch_size == 256
    assert own.learning_rate == task.training.learning_rate
    assert own.segments(28) == 6


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"colour": 1}, "setting = 'colour'"),
        ({"data": "digits-mlp"}, "task"),
        ({"rounds": 0}, "rounds"),
        ({"round": 1, "seconds": 1}, "one of seconds and round"),
        ({"method": "secret"}, "method"),
        ({"K": 9}, "clients = 8"),
        ({"clients": 0}, "clients"),
    ],
)
def test_a_bad_point_is_refused_by_name(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        vertical.check({**POINT, "round": 1, **changes})


def test_a_point_without_a_moment_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="one of seconds and round"):
        vertical.check(POINT)


def test_of_two_classes_there_is_the_area_under_the_curve() -> None:
    point = {
        "data": "breast-cancer", "clients": 10, "rounds": 60, "round": 60,
        "method": "wait", "learning_rate": 0.5,
    }  # fmt: skip
    (found,) = FUNCTIONS["fedvs-binary"].of([point], 0, None)
    assert set(found) == {"accuracy", "value"}
    assert 0.9 < found["value"] <= 1
    (plain,) = FUNCTIONS["fedvs"].of([point], 0, None)
    assert plain == {"accuracy": found["accuracy"]}


# -- Counts -------------------------------------------------------------------------------------


def test_an_epoch_is_its_rounds_times_their_seconds() -> None:
    # Parkinson: 529 rows in 34 batches; 7.438 s for all uploads, 0.198 for five of ten.
    wait, upload = (
        vertical.epochs({"table": 1, **values, "log_base": "2", "batch": "coded"})
        for values in ({"method": "wait"}, {"method": "fedvs", "part": "upload"})
    )
    assert wait == pytest.approx(34 * 7.438, abs=0.02)
    assert upload == pytest.approx(34 * 0.198, abs=0.02)
    share = vertical.epochs(
        {"table": 1, "method": "fedvs", "part": "share", "log_base": "2", "batch": "coded"}
    )
    assert share == pytest.approx(34 * 1.379 * 7.438, rel=1e-3)


def test_F21_bytes_of_the_papers_sizes() -> None:
    fashion = {of: vertical.costs({"table": 6, "of": of}) for of in vertical.COUNTS}
    assert fashion["data"] == 27 * (10_000 * 28 * 4 + 28)
    # T + 2 = 3 of 28 clients deal a mask for 43 coded rows.
    assert fashion["weights"] == pytest.approx(27 * (28 * 64 * 4 + 28 + 3 / 28 * 43 * 64 * 4))
    assert fashion["answer"] == 43 * 64 * 4
    assert fashion["stored"] == 10_000 * 784 * 4
    assert fashion["plain"] == fashion["gradient"] == 6 * 43 * 64 * 4


@pytest.mark.parametrize(
    ("table", "times"), [(1, 5.0), (2, 5.5), (3, 6.0), (4, 6.0), (5, 4.67), (6, 4.67)]
)
def test_an_answer_takes_N_over_K_times_the_products(table: int, times: float) -> None:
    answer, plain = (
        vertical.costs({"table": table, "of": of}) for of in ("answer-products", "plain-products")
    )
    assert answer / plain == pytest.approx(times, abs=0.005)


@pytest.mark.parametrize(
    ("of", "point", "text"),
    [
        (vertical.costs, {"table": 7, "of": "data"}, "table = 7"),
        (vertical.costs, {"table": 1, "of": "time"}, "of"),
        (vertical.costs, {"table": 1, "of": "data", "round": 1}, "setting = 'round'"),
        (vertical.epochs, {"table": 1, "method": "vafl"}, "method"),
        (vertical.epochs, {"table": 1, "method": "fedvs", "log_base": "7", "batch": "coded"}, "7"),
    ],
)
def test_a_bad_count_is_refused_by_name(of: Any, point: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        of(point)


# -- The files ----------------------------------------------------------------------------------


def files() -> list[str]:
    return [name for name in names() if name.startswith("fedvs/")]


def test_the_figures_of_the_fedvs_paper_are_there() -> None:
    names = {name.removeprefix("fedvs/") for name in files()}
    assert names >= {f"figure{figure}" for figure in FIGURES}
    assert names >= {"figure4", "table1", "conventions", "costs-bytes", "costs-products"}


@pytest.mark.parametrize("name", files())
def test_a_file_says_under_which_reading_of_the_delays_it_is_drawn(name: str) -> None:
    chosen = experiment(name)
    text = " ".join(chosen.about.split())
    for curve, _, point in function_points(chosen, full=False):
        if chosen.function not in ("fedvs", "fedvs-binary"):
            continue
        own = vertical.check(point)
        if "seconds" in point and own.method == "fedvs" and own.delay_scale > 0:
            assert "(coded rows, ln)" in chosen.title
            assert "coded rows and the natural logarithm" in text
            assert own.log_base == "e"
            assert own.batch == ("real" if "real rows, ln" in curve.label else "coded")


def test_no_data_is_read_when_points_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("data was read")

    monkeypatch.setattr(vertical_tasks, "load", refused)
    point = {**POINT, "round": 1}
    with pytest.raises(AssertionError, match="data was read"):
        vertical.curves([{**point, "test_records": 17}], 0, None)
    for name in files():
        chosen = experiment(name)
        check = FUNCTIONS[chosen.function].check
        for *_, point in function_points(chosen, full=True):
            if check is not None:
                check(point)
