"""Regressions of one client: servers that lie, batches, its own limits, work that is done once."""

import math
from dataclasses import fields as fields_of
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from acfl_app import (
    FEATURES,
    LABELS,
    NOISED_RECORDS,
    NOISY,
    RECORDS,
    Array,
    Node,
    data_of,
    gradient_terms,
    model_after,
    name_of,
    run,
    set_noise,
    setup_terms,
)
from apps import make
from flwr.serverapp.strategy import FedAdam

from flwr_privacy.acfl.guarantee import setup_privacy
from flwr_privacy.acfl.terms import GradientTerms, SetupTerms
from flwr_privacy.clients import DataLimits, acfl_client_app
from flwr_privacy.clients.acfl_data import PreparedData
from flwr_privacy.clients.node.context_store import ContextStore
from flwr_privacy.errors import InvalidParameterError, ProtocolError
from flwr_privacy.privacy.grid import CodeGrid
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.strategies import ACFL, DataBounds

X, Y = data_of(0)
W = np.linspace(-0.5, 0.5, FEATURES * LABELS).reshape(FEATURES, LABELS)


# -- A grid that has no codes for all values -----------------------------------------------------

CODED: dict[str, SetupTerms | GradientTerms] = {
    "setup of records": setup_terms(epsilon=20.0),
    "setup as printed": setup_terms(**NOISY),
    "setup in a sum": setup_terms(epsilon=20.0, parties=3),
    "exact setup in a sum": setup_terms(noise="none", parties=3),
    "projections": setup_terms(noise="variances", encoding="scfl", alpha=0.5, sigma1_sq=0.3),
    "gradient": gradient_terms(epsilon=20.0, alpha=0.0),
    "gradient in a sum": gradient_terms(epsilon=20.0, alpha=0.0, parties=3),
    "exact gradient in a sum": gradient_terms(noise="none", alpha=0.0, parties=3),
}


@pytest.mark.parametrize("finer", [2, 12, 60])
@pytest.mark.parametrize("what", CODED)
def test_a_grid_without_codes_for_all_values_is_refused_whatever_the_data(
    what: str, finer: int, tmp_path: Path
) -> None:
    """Or an error would tell whether a value is beyond the codes, and cost nothing."""
    terms = CODED[what]
    lie = replace(terms, grid=terms.grid - finer)
    for scale in (1.0, 1e-3):
        folder = tmp_path / str(scale)
        folder.mkdir()
        node = Node(folder, (X * scale, Y * scale))
        ask = node.set_up if isinstance(terms, SetupTerms) else node.descend
        with pytest.raises(InvalidParameterError, match=r"^grid = .*: expected a coarser grid"):
            ask(lie, summed=terms.parties)
        assert (node.loaded, node.entries()) == (0, [])
        ask(terms, summed=terms.parties)
        assert node.loaded == 1


# -- Batches -------------------------------------------------------------------------------------


class Coins:
    """Coins of some records, instead of those that are drawn."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def uint64(self, size: int) -> Any:
        assert size == len(self._values)
        return self._values


@pytest.mark.parametrize("removed", [0, 5, RECORDS - 1])
@pytest.mark.parametrize("seed", range(4))
def test_a_record_moves_the_answer_of_a_batch_by_no_more_than_the_sensitivity(
    seed: int, removed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each record keeps its own coins: that they are secret and alike makes that all there is."""
    set_noise(monkeypatch, {}, (1.0, 1.0))
    coins = np.random.default_rng(seed).integers(0, 2**64, RECORDS, dtype=np.uint64)
    others = np.arange(RECORDS) != removed
    terms = gradient_terms(epsilon=20.0, alpha=0.0, clipping_norm=0.1, batch_fraction=0.5)
    answers, drawn = [], coins < 2**63
    for kept in (np.full(RECORDS, True), others):
        mine = Coins(coins[kept])
        monkeypatch.setattr(
            ContextStore,
            "random",
            lambda self, _, purpose, mine=mine: mine if purpose == "sample" else self.client_id,
        )
        folder = tmp_path / str(len(answers))
        folder.mkdir()
        arrays, _ = Node(folder, (X[kept], Y[kept])).descend(terms, W)
        answers.append(CodeGrid(terms.grid).step * np.append(arrays["gradient"], arrays["size"]))
    apart = np.linalg.norm(answers[0] - answers[1])
    assert apart <= terms.sensitivity()
    assert (apart > 0.05) == drawn[removed]


# -- What a client knows of its data without looking ---------------------------------------------

LIMITS = {
    "feature_bound": 1.0,
    "label_bound": 1.0,
    "feature_norm": math.sqrt(3),
    "label_norm": math.sqrt(2),
    "max_records": 20,
}


@pytest.mark.parametrize("what", ["setup", "train"])
@pytest.mark.parametrize("name", LIMITS)
def test_bounds_that_are_tighter_than_a_clients_own_are_refused_unseen(
    name: str, what: str, tmp_path: Path
) -> None:
    assert {entry.name for entry in fields_of(DataLimits)} == set(LIMITS)
    terms = (setup_terms if what == "setup" else gradient_terms)(epsilon=20.0, alpha=0.5)
    asked = getattr(terms, name)
    assert asked == pytest.approx(LIMITS[name])

    def node(limit: float) -> Node:
        folder = tmp_path / str(limit)
        folder.mkdir()
        return Node(folder, limits=DataLimits(**{name: limit}))

    def ask(node: Node) -> Any:
        return node.set_up(terms) if isinstance(terms, SetupTerms) else node.descend(terms, W)

    strict = node(asked + 1)
    for _ in range(2):
        with pytest.raises(InvalidParameterError, match=f"^{name} = .* the node's limit"):
            ask(strict)
    assert (strict.loaded, strict.entries()) == (0, [])
    for limit in (asked, asked / 2 if name != "max_records" else 12):
        ask(same := node(limit))
        assert same.loaded == 1


def test_the_limits_of_an_app_are_those_of_its_clients(tmp_path: Path) -> None:
    calls: list[str] = []

    def data_fn(context: Any) -> Any:
        calls.append(name_of(context))
        return data_of(name_of(context))

    app = acfl_client_app(data_fn, limits=DataLimits(feature_norm=1.0, max_records=15))
    with pytest.raises(ProtocolError, match="max_records = 14: expected at least 15"):
        run(make(ACFL, epsilon=20.0, max_records=14), app, state=tmp_path)
    assert not calls
    assert not list(tmp_path.glob("*.ledger"))
    run(make(ACFL, epsilon=20.0, max_records=15), app, state=tmp_path)
    assert sorted(calls) == list("0123")


@pytest.mark.parametrize("excess", ["cut", "", None])
def test_an_app_says_at_once_that_its_excess_is_none(excess: Any) -> None:
    with pytest.raises(InvalidParameterError, match=f"excess = {excess!r}: expected one of"):
        acfl_client_app(lambda context: (X, Y), excess=excess)


# -- What a user may say -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["predictable", "project", "symmetrize", "symmetric_noise", "one_hot"]
)
@pytest.mark.parametrize("value", ["no", 1, None])
def test_a_flag_is_true_or_false(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameterError, match=f"{name} = {value!r}: expected true or false"):
        make(ACFL, **{name: value}, model_bound=1.0)


@pytest.mark.parametrize("features", [123, object(), b"raw", ""])
def test_features_are_a_map_or_its_identity(features: Any) -> None:
    with pytest.raises(InvalidParameterError, match=r"^features = .*: expected a feature map, or"):
        ACFL(data=DataBounds(features=features))


def test_a_projected_model_and_a_server_optimiser_do_not_go_together() -> None:
    with pytest.raises(InvalidParameterError, match="project = True: expected false with an inner"):
        ACFL(project=True, model_bound=1.0, inner=FedAdam())


@pytest.mark.parametrize("bounds", [(1.0, 1.0), (0.5, 2.0), (3.0, 0.1)])
@pytest.mark.parametrize("model_bound", [0.02, 0.2, 1.0, 30.0])
@pytest.mark.parametrize("labels", [1, 10])
def test_the_optimal_split_keeps_features_and_labels_at_the_level(
    labels: int, model_bound: float, bounds: tuple[float, float]
) -> None:
    """By the printed (17), and the same channel for an entry of the labels."""
    B, C = bounds
    wish = {"noise": "paper", "split": "optimal", "mi_epsilon": 1.0, "model_bound": model_bound}
    wish |= {"feature_bound": B, "label_bound": C, "features": 10, "labels": labels}
    terms = setup_terms(**wish)
    s1, s2 = terms.sigma_features**2, terms.sigma_labels**2
    feature = 9.5 * math.log1p(B**4 / s1) + labels / 2 * math.log1p((B * C) ** 2 / s2)
    label = 10 / 2 * math.log1p((B * C) ** 2 / s2)
    assert max(feature, label) <= 1.0 + 1e-9
    assert feature == pytest.approx(1.0) or label == pytest.approx(1.0)
    assert setup_privacy(terms)["mi_epsilon"] == pytest.approx(max(feature, label), rel=1e-3)


# -- Work that is done once ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        NOISED_RECORDS,
        {"noise": "none"},
        NOISY,
        {**NOISY, "secure_sum": SecureSum()},
        {**NOISED_RECORDS, "batch_fraction": 0.5},
    ],
    ids=["record", "none", "paper", "summed", "batches"],
)
def test_data_are_asked_for_once_in_an_experiment(options: Any, tmp_path: Path) -> None:
    calls: list[str] = []

    def data_fn(context: Any) -> Any:
        calls.append(name_of(context))
        return data_of(name_of(context))

    app = acfl_client_app(data_fn)
    for experiments in (1, 2):
        assert np.abs(model_after(run(make(ACFL, **options), app, state=tmp_path))).max() > 0
        assert sorted(calls) == sorted("0123" * experiments)


@pytest.mark.parametrize(("records", "kept"), [(5, False), (6, True), (40, True)])
def test_moments_are_remembered_where_they_are_no_larger_than_the_data(
    records: int, kept: bool
) -> None:
    draws = np.random.default_rng(records)
    features, labels = draws.normal(size=(records, 6)), draws.normal(size=(records, 2))
    model: Array = draws.normal(size=(6, 2))
    data = PreparedData(features, labels)
    for _ in range(2):
        found = data.take_moments()
        np.testing.assert_allclose(found.features, features.T @ features, rtol=1e-12)
        np.testing.assert_allclose(found.labels, features.T @ labels, rtol=1e-12)
        expected = features.T @ (features @ model - labels)
        np.testing.assert_allclose(data.gradient(model), expected, rtol=1e-9)
    assert ("moments" in vars(data)) == kept
    assert (data.take_moments() is found) == kept
    assert data.size == 8 * (records * 8 + (6 * 8 if kept else 0))
