"""The default of how the noise of rounds goes together: correlated where that pays."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from apps import make, model_of, run_strategy
from central_training import APP, kill_after, run
from conformance import Killed
from flwr.app import ConfigRecord
from flwr.serverapp.strategy import FedAdam

from flwr_privacy.central_dp import choice
from flwr_privacy.central_dp.choice import LEAST_GAIN, MOST_KEPT, choose
from flwr_privacy.central_dp.correlated.options import BLT, BandedMF, CorrelatedNoise, TreeNoise
from flwr_privacy.central_dp.plan import CentralDPNoisePlan
from flwr_privacy.errors import CheckpointError, InvalidParameterError
from flwr_privacy.simulations.settings.flat_options import strategy_of
from flwr_privacy.strategies import AdaptiveClipping, CentralDP, DistributedNoise, ServerNoise

ROUNDS = 12


def model(weights: int) -> dict[str, np.ndarray]:
    """Return a model of many weights that takes no memory."""
    return {"w": np.broadcast_to(np.float32(0), (weights,))}


def strategy(*, privacy: dict[str, Any] | None = None, **options: Any) -> CentralDP:
    """Ten clients, two of them a round: a client rests four rounds between two."""
    made = ServerNoise(clipping_norm=0.5, insecure_seed=3, **(privacy or {}))
    options = {"min_available_nodes": 1, "clients": 10, "seed": 1, **options}
    return make(CentralDP, privacy=made, fraction_train=0.2, **options)


# -- What is chosen ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "weights", "chosen", "why"),
    [
        ({}, 650, BandedMF(), "multiplier 0.787908"),
        ({"epsilon": 0.5, "neighbours": "zero_out"}, 650, BandedMF(), "multiplier"),
        ({"sampling": "cyclic_poisson"}, 650, BandedMF(), "multiplier 0.851473"),
        # Nine models of earlier rounds are kept, or one: 72 bytes a weight, or 8.
        ({}, MOST_KEPT // 72, BandedMF(), "multiplier"),
        ({}, MOST_KEPT // 72 + 1, BLT(), "multiplier"),
        ({}, MOST_KEPT // 8, BLT(), "multiplier"),
        ({}, MOST_KEPT // 8 + 1, None, "the state of correlated noise would take 500 MB"),
        ({"q": 0.001, "rounds": 1000}, 62_500, BandedMF(), "multiplier"),
        ({"q": 0.001, "rounds": 1000}, 100_000, BLT(), "multiplier"),
        ({"q": 1.0}, 650, None, "would not be 5% less"),
        ({"q": 0.5, "rounds": 2}, 650, None, "would not be 5% less"),
        ({"q": 0.5, "rounds": 3}, 650, BandedMF(), "multiplier"),
        ({"sampling": "fixed"}, 650, None, "clients that rest between two rounds"),
        ({"sampling": "poisson"}, 650, None, "clients that rest between two rounds"),
        ({"count_share": 0.1}, 650, None, "a clipping norm that does not change"),
        ({"noise": "distributed"}, 650, None, "a server that adds it"),
        ({"inner": True}, 650, None, "an inner strategy"),
        ({"grid_bits": 26}, 650, None, "cannot be drawn on this grid"),
        # What truncated states cost in so many rounds of so many weights is above the margin.
        ({"q": 0.1, "rounds": 1000, "grid_bits": 12}, 7_000_000, None, "cannot be drawn"),
    ],
)
def test_correlated_noise_is_chosen_where_it_is_possible_and_less(
    options: dict[str, Any], weights: int, chosen: CorrelatedNoise | None, why: str
) -> None:
    told = {name: options[name] for name in ("grid_bits", "inner") if name in options}
    values = {"epsilon": 8.0, "delta": 1e-5, "rounds": 100, "q": 0.1, "sampling": "balanced"}
    values |= {"noise": "server", **{k: v for k, v in options.items() if k not in told}}
    plan = CentralDPNoisePlan(**values)
    found = choose(plan, model(weights), clipping_norm=0.3, **told)
    assert found.plan.correlated == chosen
    assert why in found.text
    # What is promised is the same.
    for name in ("epsilon", "delta", "relation", "sampling", "releases", "noise", "q", "rounds"):
        assert getattr(found.plan, name) == getattr(plan, name)
    less = found.plan.effective_multiplier / plan.effective_multiplier
    assert less <= 1 - LEAST_GAIN if chosen else less == 1


def test_values_that_are_none_are_refused() -> None:
    allowed = r"BandedMF\(...\) or BLT\(...\) or TreeNoise\(...\) or 'auto' or None"
    with pytest.raises(InvalidParameterError, match=f"correlated = 'banded': expected {allowed}"):
        ServerNoise(correlated="banded")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("word", "value"), [("auto", "auto"), ("none", None), ("banded-mf", BandedMF())]
)
def test_the_command_line_has_a_word_for_each(word: str, value: object) -> None:
    made = strategy_of(CentralDP, {"noise": "server", "correlated": word})
    assert isinstance(made.privacy, ServerNoise)
    assert made.privacy.correlated == value
    assert isinstance(default := strategy_of(CentralDP, {"noise": "server"}).privacy, ServerNoise)
    assert default.correlated == "auto"


# -- Where it is seen ----------------------------------------------------------------------------


def test_the_choice_is_in_the_log_the_forecast_the_card_and_the_guarantee(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = strategy()
    with caplog.at_level(logging.INFO, "flwr.privacy"):
        run(made, nodes=1, num_rounds=ROUNDS)
    plan = made.plan
    assert plan is not None
    assert plan.correlated == BandedMF()
    assert plan.text() in caplog.messages
    card = made.card()
    assert "the correlated noise (BandedMF) in 11 weights" in card.forecast
    assert "rounds is correlated (BandedMF)" in " ".join(card.guarantee.assumptions)
    assert card.verify()["gdp"][1] == pytest.approx(8.0, rel=1e-3)


@pytest.mark.parametrize(
    ("privacy", "options", "why"),
    [
        ({}, {"clipping": AdaptiveClipping(quantile=0.5)}, "a clipping norm that does not change"),
        ({"sampling": "fixed"}, {}, "clients that rest"),
        ({}, {"inner": FedAdam()}, "an inner strategy"),
        ({"correlated": None}, {}, "the noise of the rounds is independent"),
    ],
)
def test_what_cannot_have_correlated_noise_trains_as_before(
    privacy: dict[str, Any],
    options: dict[str, Any],
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = strategy(privacy=privacy, **options)
    with caplog.at_level(logging.INFO, "flwr.privacy"):
        run(made, nodes=1, num_rounds=2)
    assert made.plan is not None
    assert made.plan.correlated is None
    assert any(why in line for line in caplog.messages)
    assert made.state_dict()["correlated"] is None


def test_noise_in_shares_says_nothing_of_it(caplog: pytest.LogCaptureFixture) -> None:
    made = CentralDP(privacy=DistributedNoise(), min_available_nodes=5)
    with caplog.at_level(logging.INFO, "flwr.privacy"):
        run(made, num_rounds=1)
    assert not any("noise of the rounds" in line for line in caplog.messages)


# -- Crashes and other rounds --------------------------------------------------------------------


def _arrays(result: Any) -> list[np.ndarray]:
    return [np.asarray(array) for array in model_of(result.arrays).values()]


@pytest.mark.parametrize("begun", [None, BandedMF(), BLT()])
def test_a_resumed_training_keeps_what_it_began_with(
    begun: CorrelatedNoise | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that began when the default was another, or would be chosen otherwise now."""
    whole = run(strategy(privacy={"correlated": begun}), nodes=1, num_rounds=7)
    broken = strategy(privacy={"correlated": begun}, run_dir=tmp_path, on_round=kill_after(4))
    with pytest.raises(Killed):
        run(broken, nodes=1, num_rounds=7)
    monkeypatch.setattr(choice, "LEAST_GAIN", 0.05 if begun is None else 0.99)
    resumed = strategy(run_dir=tmp_path, resume=True)
    result = run(resumed, nodes=1, num_rounds=7)
    assert resumed.plan is not None
    assert resumed.plan.correlated == begun
    for one, other in zip(*map(_arrays, (whole, result)), strict=True):
        assert (one == other).all()


def test_a_resumed_training_is_not_changed_by_name(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run(strategy(run_dir=tmp_path, on_round=kill_after(4)), nodes=1, num_rounds=7)
    other = strategy(privacy={"correlated": None}, run_dir=tmp_path, resume=True)
    with pytest.raises(CheckpointError, match=r"calibrated for correlated = 'BandedMF.*not 'None'"):
        run(other, nodes=1, num_rounds=7)


def test_what_is_no_candidate_is_not_taken_from_a_checkpoint(tmp_path: Path) -> None:
    tree = {"correlated": TreeNoise()}
    with pytest.raises(Killed):
        run(strategy(privacy=tree, run_dir=tmp_path, on_round=kill_after(2)), nodes=1, num_rounds=7)
    other = strategy(run_dir=tmp_path, resume=True)
    with pytest.raises(CheckpointError, match=r"calibrated for correlated = 'TreeNoise\(\)'"):
        run(other, nodes=1, num_rounds=7)


def test_rounds_beyond_the_plan_end_with_what_to_do_about_it() -> None:
    made = strategy(rounds=6)
    result = run(made, nodes=1, num_rounds=12)
    assert len(result.history) == 7
    assert "plan more with `rounds`; with correlated=None" in made.stop()


def test_a_start_of_ones_own_asks_nobody_beyond_the_plan() -> None:
    class Own(CentralDP):
        def start(self, grid: Any, initial_arrays: Any, num_rounds: int = 3, **_: Any) -> Any:
            arrays = initial_arrays
            for server_round in range(1, num_rounds + 1):
                messages = self.configure_train(server_round, arrays, ConfigRecord(), grid)
                replies = grid.send_and_receive(messages)
                arrays = self.aggregate_train(server_round, replies)[0] or arrays
            return arrays

    made = Own(
        privacy=ServerNoise(insecure_seed=1),
        fraction_train=0.5,
        rounds=6,
        min_train_nodes=2,
        min_available_nodes=4,
    )
    run_strategy(made, APP, nodes=4, num_rounds=8)
    assert made.plan is not None
    assert made.plan.correlated == BandedMF()
    assert max(release.server_round for release in made.releases) == 6
