"""Central DP's two halves together: the sum, and how much noise is in it."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from apps import MODEL, make, record, run_strategy, step
from central_training import BIG, SEED, check_normal, run, still
from flwr.client import NumPyClient
from flwr.serverapp.strategy import FedAdam

from flwr_privacy.accounting import spent
from flwr_privacy.central_dp.mean import CentralMean, add_noise
from flwr_privacy.central_dp.terms import CentralDPTerms
from flwr_privacy.clients import CentralDPClient, numpy_client_app
from flwr_privacy.privacy.adaptive_clipping import COUNT_GRID, COUNT_NAME, count_code
from flwr_privacy.privacy.failures import FAILED_NAME
from flwr_privacy.privacy.grid import CodeGrid
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.privacy.updates import Update, clip, released_names
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.simulations.engines.inline import Fault
from flwr_privacy.strategies import (
    AdaptiveClipping,
    CentralDP,
    DistributedNoise,
    LoopOptions,
    ServerNoise,
)

# -- The sum and its noise -----------------------------------------------------------------------


def clipped(client: int, terms: CentralDPTerms) -> dict[str, Any]:
    """Return a client's codes before its share, as the client computes them."""
    names = released_names(MODEL)
    trained = {name: step(MODEL[name], client) for name in names}
    update = Update.between(MODEL, trained, names)
    within = clip(update.vector, terms.clipping_norm) == 1
    codes: dict[str, Any] = update.arrays(CodeGrid(terms.grid).encode(update.vector))
    codes[COUNT_NAME] = np.array([count_code(within=within)])
    codes[FAILED_NAME] = np.array([0])
    return codes


class Looking(CentralDP):
    """Keeps the sums of the first round as they were opened."""

    opened: dict[str, Any]
    first: CentralDPTerms

    def instruct(self, server_round: int) -> Any:
        strategy, told = self, super().instruct(server_round)

        class Seen(CentralMean):
            def settle(self, number: float) -> float | None:
                strategy.opened = {name: np.array(array) for name, array in self._sums.items()}
                strategy.first = strategy.terms
                return super().settle(number)

        return replace(told, accumulator=lambda: Seen(self._template, self.terms))


class Still(NumPyClient):
    """Learns nothing: what is in a sum of its updates is noise."""

    def fit(self, parameters: Any, config: Any) -> Any:
        return parameters, 1, {}


def test_an_aggregation_of_ones_own_sees_no_sum_without_the_servers_noise() -> None:
    seen = []

    class Own(CentralDP):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            mean, metrics = self.collect("train", replies)
            seen.append(mean.sums)
            return self.renewed(server_round, mean.finish(), metrics, mean.weight), metrics

    app = numpy_client_app(lambda context: CentralDPClient(Still(), context))
    strategy = Own(privacy=ServerNoise(), loop=LoopOptions(seed=1))
    run_strategy(strategy, app, nodes=5, num_rounds=1)
    assert seen
    assert any(np.any(sums) for sums in seen[0].values())


@pytest.mark.parametrize("lost", [(), (0,), (4,), (0, 1), (1, 3)])
def test_the_opened_sum_is_the_survivors_codes_and_shares_bit_for_bit(
    lost: tuple[int, ...],
) -> None:
    strategy = Looking(
        privacy=DistributedNoise(clipping_norm=2.5),
        clipping=AdaptiveClipping(quantile=0.5),
        loop=LoopOptions(seed=1, experiment_id="e", deadline=1.0),
    )
    faults = [Fault(kind="drop", client=str(i)) for i in lost]
    result = run(strategy, faults=faults, num_rounds=1, insecure_seed=SEED)
    survivors = [i for i in range(5) if i not in lost]
    terms = strategy.first
    total: dict[str, Any] = {}
    for client in survivors:
        codes = clipped(client, terms)
        own = SecureRandom.insecure(SEED, "noise", str(client), "e", "train", 1, 0)
        add_noise(codes, terms, own)
        for name, array in codes.items():
            total[name] = total.get(name, 0) + array
    names = ["0", COUNT_NAME, FAILED_NAME, "layer.weight"]
    assert sorted(strategy.opened) == sorted(total) == names
    for name, sums in strategy.opened.items():
        np.testing.assert_array_equal(sums, total[name])
    size = CodeGrid(terms.grid).step
    for name in released_names(MODEL):
        expected = MODEL[name] + size * (total[name] / len(survivors))
        np.testing.assert_array_equal(result.arrays[name].numpy(), expected.astype(np.float32))
    assert result.arrays["batches"].numpy() == MODEL["batches"]
    line = result.history[1]["scheme"]
    halves = float(COUNT_GRID.step * total[COUNT_NAME][0])
    assert line["fraction_below"] == pytest.approx(0.5 + halves / len(survivors) / 2)
    assert strategy.clipping_norm == pytest.approx(
        2.5 * math.exp(-0.2 * (min(1, max(0, line["fraction_below"])) - 0.5))
    )


def noise_of(strategy: CentralDP, **options: Any) -> tuple[np.ndarray, CentralDPTerms]:
    result = run_strategy(
        strategy, still(), arrays=record(BIG), nodes=5, num_rounds=1, insecure_seed=SEED, **options
    )
    assert strategy.terms is not None
    assert strategy.terms.noise_multiplier == strategy.plan.noise_multiplier
    mean = np.concatenate([array.numpy().reshape(-1) for array in result.arrays.values()])
    return mean.astype(float), strategy.terms


@pytest.mark.parametrize("quantile", [None, 0.5])
@pytest.mark.parametrize(("lost", "colluders"), [(0, 1), (0, 2), (2, 1)])
def test_the_noise_of_an_opened_sum_is_what_is_charged_or_more(
    lost: int, colluders: int, quantile: float | None
) -> None:
    """Five clients, three of them in the smallest sum that is opened."""
    faults = [Fault(kind="drop", client=str(i)) for i in range(lost)]
    strategy = CentralDP(
        loop=LoopOptions(seed=1, deadline=1.0),
        secure_sum=SecureSum(colluders=colluders),
        privacy=DistributedNoise(clipping_norm=0.7),
        clipping=AdaptiveClipping(quantile=quantile) if quantile else None,
    )
    mean, terms = noise_of(strategy, faults=faults)
    survivors = 5 - lost
    assert terms.parties == 3 - colluders
    share = 0.1 if quantile else 0.0
    # What is charged, worked out anew: z over sqrt(1 - share) times the diameter 2 C of updates.
    promised = strategy.plan.noise_multiplier / math.sqrt(1 - share) * 2 * 0.7
    check_normal(mean * survivors, promised * math.sqrt(survivors / terms.parties))
    assert spent([terms.charge()], delta=1e-5) == pytest.approx(8.0, rel=1e-6)
    if lost == 2 and colluders == 1:  # the smallest sum: what is charged, and the colluder's share
        check_normal(mean * survivors, promised * math.sqrt(1 + 1 / terms.parties))


@pytest.mark.parametrize("secure_sum", [None, SecureSum()])
def test_a_trusted_server_adds_the_noise_of_the_charge_once(secure_sum: SecureSum | None) -> None:
    strategy = CentralDP(
        privacy=ServerNoise(insecure_seed=1), loop=LoopOptions(seed=1), secure_sum=secure_sum
    )
    mean, terms = noise_of(strategy)
    assert terms.parties == 1
    check_normal(mean * 5, strategy.plan.noise_multiplier * 2)


def test_the_servers_noise_differs_from_round_to_round_and_run_to_run() -> None:
    def noise(**options: Any) -> tuple[Any, Any]:
        models = []
        run_strategy(
            make(CentralDP, noise="server", seed=1, **options),
            still(),
            arrays=record(BIG),
            num_rounds=2,
            evaluate_fn=lambda _, arrays: models.append(arrays["w"].numpy().astype(float)),
        )
        return models[1] - models[0], models[2] - models[1]

    draws = [*noise(), *noise(), *noise(insecure_seed=1)]
    for one, other in itertools.combinations(draws, 2):
        correlation = (one * other).mean() / math.sqrt((one**2).mean() * (other**2).mean())
        assert abs(correlation) < 5 / math.sqrt(one.size)


@pytest.mark.usefixtures("no_pld")
def test_a_poisson_sum_is_divided_by_the_expected_number_and_has_half_the_sensitivity() -> None:
    strategy = CentralDP(
        privacy=ServerNoise(sampling="poisson", insecure_seed=1),
        fraction_train=0.6,
        loop=LoopOptions(seed=1),
    )
    mean, terms = noise_of(strategy)
    assert terms.sampling_rate == 0.6
    check_normal(mean * 3, strategy.plan.noise_multiplier * 1.0)


@pytest.mark.usefixtures("no_pld")
def test_without_noise_to_speak_of_it_is_the_mean_of_the_clipped_updates() -> None:
    options: dict[str, Any] = {"epsilon": 1e6, "clipping_norm": 2.5, "seed": 1}
    expected = {name: np.zeros_like(MODEL[name], float) for name in released_names(MODEL)}
    for client in range(5):
        moved = {n: step(MODEL[n], client).astype(float) - MODEL[n] for n in expected}
        norm = math.sqrt(sum((u**2).sum() for u in moved.values()))
        for name in expected:
            expected[name] += moved[name] * min(1, 2.5 / max(norm, 1e-9)) / 5
    for strategy in (
        make(CentralDP, **options),
        make(CentralDP, noise="server", **options),
        make(CentralDP, noise="server", secure_sum=SecureSum(), **options),
    ):
        result = run(strategy, num_rounds=1)
        for name, update in expected.items():
            moved = result.arrays[name].numpy() - MODEL[name]
            np.testing.assert_allclose(moved, update, atol=0.01)


# -- The promise ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_pld")
def test_server_optimisers_see_the_noised_mean() -> None:
    result = run(
        CentralDP(loop=LoopOptions(seed=1), inner=FedAdam(), privacy=DistributedNoise(epsilon=1e3)),
        num_rounds=2,
    )
    assert all(np.isfinite(a.numpy()).all() for a in result.arrays.values())
