"""Who is in the training, and what that costs: nodes that come, go, and come again."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from acfl_app import (
    FEATURES,
    LABELS,
    Nodes,
    OwnStart,
    data_of,
    kill_after,
    model_after,
    name_of,
    of_phase,
    run,
)
from apps import make
from conformance import Killed

from flwr_privacy.clients import DataLimits, acfl_client_app
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.simulations.engines.inline import Fault
from flwr_privacy.strategies import ACFL, Exact, LoopOptions, Weighting

LOST = [Fault(kind="drop", client="1", phase="setup", server_round=0)]


def charges_of(client: str, state: Path) -> list[Any]:
    ledger = Ledger(state / f"{client}.ledger", data_set=client)
    return [entry.charge for entry in ledger.entries()]


def test_a_setup_whose_reply_was_lost_is_charged_once_when_the_node_comes_again(
    tmp_path: Path,
) -> None:
    nodes = Nodes(goes={1: 1}, comes={2: 1})
    strategy = make(ACFL, epsilon=20.0, max_records=20)
    result = run(
        strategy,
        num_rounds=4,
        before=nodes.before,
        evaluate_fn=nodes.after,
        state=tmp_path,
        faults=LOST,
        timeout=1,
    )
    assert charges_of("1", tmp_path) == strategy.card().charges()["1"]
    assert result.guarantee.spent <= 20 * (1 + 1e-9)


def test_a_setup_whose_reply_was_lost_is_charged_once_after_a_resume(tmp_path: Path) -> None:
    for name in ("run", "state"):
        (tmp_path / name).mkdir()
    options = {"epsilon": 20.0, "max_records": 20, "run_dir": tmp_path / "run"}
    with pytest.raises(Killed):
        run(
            make(ACFL, **options, on_round=kill_after(1)),
            state=tmp_path / "state",
            faults=LOST,
            timeout=1,
        )
    strategy = make(ACFL, **options, resume=True)
    result = run(strategy, state=tmp_path / "state")
    assert charges_of("1", tmp_path / "state") == strategy.card().charges()["1"]
    assert result.guarantee.spent <= 20 * (1 + 1e-9)


def test_a_member_that_is_away_in_the_first_round_is_a_straggler_of_that_round() -> None:
    nodes = Nodes(goes={0: 1}, comes={1: 1})
    strategy = make(ACFL, noise="none", alpha=0.5, learning_rate=0.01, straggler_rate=0.0)
    result = run(strategy, num_rounds=3, before=nodes.before, evaluate_fn=nodes.after)
    assert [line["asked"] for line in result.history[1:]] == [3, 4, 4]
    assert [line["scheme"]["straggler_rate"] for line in result.history[2:]] == [0.0, 0.0]


@pytest.mark.parametrize("rate", [0.0, dict.fromkeys("0123", 0.0)], ids=["one", "each"])
def test_a_share_of_the_clients_counts_under_a_users_own_start(rate: Any) -> None:
    nodes = Nodes()
    strategy = OwnStart(
        privacy=Exact(),
        weighting=Weighting(alpha=0.0, straggler_rate=rate),
        learning_rate=0.02,
        fraction_train=0.5,
        loop=LoopOptions(seed=1),
    )
    own = model_after(run(strategy, num_rounds=1, before=nodes.before))
    asked = of_phase(nodes.asked, "train")
    came = sorted({name_of(nodes.grid._contexts[m.metadata.dst_node_id]) for m in asked})
    assert len(came) == 2
    start = np.zeros((FEATURES, LABELS))
    total = sum(X.T @ (X @ start - Y) for X, Y in map(data_of, came))
    np.testing.assert_allclose(own, -0.02 * 2 * total, rtol=1e-9)


def test_who_is_left_out_for_want_of_a_rate_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    nodes = Nodes(comes={1: 4})
    strategy = make(ACFL, noise="none", straggler_rate=dict.fromkeys("0123", 0.1))
    with caplog.at_level(logging.WARNING, "flwr.privacy"):
        run(strategy, before=nodes.before, evaluate_fn=nodes.after)
    assert "clients ['4'] have no straggler_rate and take no part" in caplog.text


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        ({"feature_norm": "1"}, "feature_norm = '1'"),
        ({"max_records": -1}, "max_records = -1"),
        ({"label_bound": float("nan")}, "label_bound = nan"),
    ],
    ids=["text", "negative", "NaN"],
)
def test_limits_are_checked_at_once(limits: Any, text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        DataLimits(**limits)


@pytest.mark.parametrize("features", ["fourier", 5])
def test_a_feature_map_that_is_none_is_refused_by_the_app(features: Any) -> None:
    with pytest.raises(InvalidParameterError, match="a feature map, or None"):
        acfl_client_app(lambda context: data_of(0), features=features)
