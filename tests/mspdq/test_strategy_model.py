"""MSP and MSPDQ on real messages: the model that comes out."""

import math
from typing import Any

import numpy as np
import pytest
from apps import make, message_app, record, run_strategy
from flwr.serverapp.strategy import FedAdam
from mixing_training import EXACT, MODEL, SIZE, Wire, run, trained, vector

from flwr_privacy.clients import MSPDQClient, as_mod
from flwr_privacy.simulations.engines.inline import Fault
from flwr_privacy.strategies import MSP, MSPDQ, LoopOptions

# -- The model that comes out --------------------------------------------------------------------


GAINS = {
    "const": [0.2, 0.2, 0.2],
    "harmonic": [0.2, 0.1, 0.2 / 3],
    "sqrt": [0.2, 0.2 / math.sqrt(2), 0.2 / math.sqrt(3)],
}


@pytest.mark.parametrize("kappa", [0.3, 0.5])
@pytest.mark.parametrize(("m", "mass"), [(1, "paper"), (2, "paper"), (2, "normalized")])
@pytest.mark.parametrize("coupling", GAINS)
def test_F7_of_the_first_means_error_the_residual_is_left(
    coupling: str, m: int, mass: str, kappa: float
) -> None:
    wire = Wire()
    strategy = MSP(kappa=kappa, gamma=0.2, coupling=coupling, mixing_rounds=3, m=m, mass=mass)
    result = run(strategy, before=wire)
    weight = m if mass == "paper" else 1
    left = math.prod(1 - (1 + weight) * a for a in GAINS[coupling])
    mean = np.mean([trained(client) for client in range(4)], axis=0)
    error = np.mean(list(wire.first().values()), axis=0) - mean
    assert np.abs(error).max() > 0.05
    np.testing.assert_allclose(vector(result.arrays) - mean, left * error, atol=1e-12)
    assert result.history[1]["scheme"]["residual"] == pytest.approx(left, rel=1e-12)
    assert result.history[1]["scheme"]["mixing_rounds"] == 3


def test_random_couplings_reach_the_mean_too_and_have_no_residual() -> None:
    result = run(MSP(coupling="random", mixing_rounds=150, kappa=0.5))
    mean = np.mean([trained(client) for client in range(4)], axis=0)
    np.testing.assert_allclose(vector(result.arrays), mean, atol=1e-6)
    assert "residual" not in result.history[1]["scheme"]


@pytest.mark.parametrize("arrays", [MODEL, EXACT])
def test_many_steps_give_the_unweighted_mean_of_the_models(arrays: Any) -> None:
    """The clients' own weights, 1 to 4, count for nothing."""
    result = run(MSP(mixing_rounds=40), arrays=arrays)
    mean = np.mean([trained(client, arrays) for client in range(4)], axis=0)
    np.testing.assert_allclose(vector(result.arrays), mean, atol=2e-6)
    for name, array in arrays.items():
        got = result.arrays[name].numpy()
        assert (got.dtype, got.shape) == (array.dtype, array.shape)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mixing_start": "reference", "interval": "linf"},
        {"mixing_start": "global", "interval": "fixed", "pi": 10.0},
        {"mixing_start": "global", "interval": "bound", "bound": 2.0},
    ],
)
def test_codes_of_16_bits_give_the_mean_to_the_last_step_of_the_knobs(options: Any) -> None:
    result = run(make(MSPDQ, bits=16, mixing_rounds=30, **options))
    mean = np.mean([trained(client) for client in range(4)], axis=0)
    scheme = result.history[1]["scheme"]
    largest = scheme["width"] / (scheme["levels"] - 1)
    np.testing.assert_allclose(vector(result.arrays), mean, atol=largest + 1e-5)
    assert largest < 0.01
    assert scheme["saturated"] == 0


def test_from_the_global_start_the_round_is_a_step_of_fedavg() -> None:
    """F14: of the way to the mean 1 - rho is gone."""
    result = run(MSPDQ(bits=16, mixing_start="global", gamma=0.1, mixing_rounds=4))
    mean = np.mean([trained(client) for client in range(4)], axis=0)
    expected = vector(EXACT) + (1 - 0.8**4) * (mean - vector(EXACT))
    np.testing.assert_allclose(vector(result.arrays), expected, atol=1e-4)


def test_what_saturates_is_counted() -> None:
    result = run(MSPDQ(mixing_start="global", interval="bound", bound=0.01, mixing_rounds=2))
    # Clients 1 to 3 move every entry by more than 0.2, client 0 moves none.
    assert result.history[1]["scheme"]["saturated"] == 3 * SIZE * 2


@pytest.mark.parametrize(("strategy", "near"), [(MSP, 1e-12), (MSPDQ, 1e-3)])
def test_drawn_twice_weighs_twice(strategy: Any, near: float) -> None:
    options = {"bits": 16} if strategy is MSPDQ else {}
    drawn = make(
        strategy, replacement=True, min_train_nodes=7, mixing_rounds=1, gamma=0.5, seed=2, **options
    )
    result = run(drawn)
    counts = drawn.draws(1)
    assert len(set(counts.values())) > 1
    mean = sum(n * trained(client) for client, n in counts.items()) / 7
    np.testing.assert_allclose(vector(result.arrays), mean, atol=near)


@pytest.mark.parametrize(
    ("strategy", "options", "near"),
    [
        (MSP, {}, 1e-12),
        (MSPDQ, {"bits": 16}, 1e-3),
        (MSPDQ, {"bits": 16, "mixing_start": "reference", "interval": "linf"}, 1e-2),
        (MSPDQ, {"bits": 16, "mixing_start": "global", "interval": "fixed", "pi": 10.0}, 1e-2),
    ],
)
def test_shares_without_replacement_are_the_weights_of_the_mean(
    strategy: Any, options: Any, near: float
) -> None:
    shares = {"0": 10e20, "1": 1e20, "2": 5e20, "3": 0.5e20}
    result = run(make(strategy, shares=shares, mixing_rounds=30, **options))
    models = [trained(int(client)) for client in shares]
    mean = np.average(models, axis=0, weights=list(shares.values()))
    np.testing.assert_allclose(vector(result.arrays), mean, atol=near)
    assert np.abs(np.mean(models, axis=0) - mean).max() > 10 * near


@pytest.mark.parametrize("strategy", [MSP, MSPDQ])
def test_what_is_not_sent_keeps_the_servers_values(strategy: Any) -> None:
    model = {
        "batches": np.array(3),
        **MODEL,
        "bn.running_mean": np.ones(4, np.float32),
        "mine": np.full(3, 2.0),
    }
    wire = Wire()
    mixing = strategy(mixing_rounds=1, gamma=0.5, keep_back=["mine"])
    result = run(mixing, arrays=model, before=wire, num_rounds=2)
    assert list(result.arrays) == list(model)
    for name in ("batches", "bn.running_mean", "mine"):
        np.testing.assert_array_equal(result.arrays[name].numpy(), model[name])
    for name in MODEL:
        assert (result.arrays[name].numpy() != model[name]).all()
    sent = {name for _, arrays in wire.said for name in arrays}
    assert sent == ({"codes"} if strategy is MSPDQ else set(MODEL))
    assert "batches, bn.running_mean, mine" in result.guarantee.text()


class Seen(FedAdam):
    """Notes what it is given and what it makes of it."""

    def __init__(self) -> None:
        super().__init__(eta=0.1)
        self.seen: list[Any] = []

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        replies = list(replies)
        result = super().aggregate_train(server_round, replies)
        (reply,) = replies
        (metrics,) = (r for r in reply.content.metric_records.values())
        (arrays,) = (r for r in reply.content.array_records.values())
        self.seen.append((vector(arrays), dict(metrics), vector(result[0])))
        return result


@pytest.mark.parametrize("strategy", [MSP, MSPDQ])
def test_an_inner_strategy_gets_the_average(strategy: Any) -> None:
    inner = Seen()
    options = {"bits": 16} if strategy is MSPDQ else {}
    mixing = make(
        strategy,
        inner=inner,
        mixing_rounds=1,
        gamma=0.5,
        replacement=True,
        min_train_nodes=6,
        seed=2,
        **options,
    )
    result = run(mixing)
    mean = sum(n * trained(client) for client, n in mixing.draws(1).items()) / 6
    ((average, metrics, made),) = inner.seen
    np.testing.assert_allclose(average, mean, atol=1e-3)
    assert metrics["num-examples"] == 6
    np.testing.assert_array_equal(vector(result.arrays), made)
    assert np.abs(made - mean).max() > 0.01


# -- Parameters ----------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-35, 1e-30, 1e25])
def test_small_and_large_models_are_mixed_too(scale: float) -> None:
    arrays = {"w": np.linspace(1, 2, 6) * scale}
    app = message_app([as_mod(MSPDQClient)])
    result = run_strategy(MSPDQ(mixing_rounds=1), app, arrays=record(arrays), num_rounds=1)
    assert result.history[1]["refused"] == {}
    assert not result.history[1]["skipped"]


def test_what_is_left_of_the_split_is_said_for_the_steps_that_were_taken() -> None:
    fault = Fault(kind="drop", client="2", phase="mix")
    result = run(
        MSP(mixing_rounds=6, on_dropout="finish", loop=LoopOptions(deadline=0.3)), faults=[fault]
    )
    scheme = result.history[1]["scheme"]
    assert (scheme["mixing_rounds"], scheme["residual"]) == (0, 1.0)


def test_so_few_knobs_that_errors_add_up_are_warned_of(caplog: Any) -> None:
    MSPDQ(bits=3)
    assert not caplog.text
    MSPDQ(bits=2)
    assert "levels = 4: the rounding errors of so few knobs add up" in caplog.text
