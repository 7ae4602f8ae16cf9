"""Central DP's two halves together: secret samples, and a clipping norm that adapts."""

import math
from typing import Any

import numpy as np
import pytest
from apps import MODEL, make, model_of, record, run_strategy
from central_training import BIG, check_normal, replied, run, still
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Strategy

from flwr_privacy.clients import CentralDPClient, as_mod
from flwr_privacy.strategies import (
    AdaptiveClipping,
    CentralDP,
    DistributedNoise,
    LoopOptions,
    ServerNoise,
    participants,
)
from flwr_privacy.strategies.requests.messenger import only

# -- Samples -------------------------------------------------------------------------------------


def test_secret_poisson_samples_charge_everybody_and_have_the_expected_size() -> None:
    strategy = CentralDP(
        privacy=ServerNoise(epsilon=1.0, sampling="poisson", insecure_seed=5),
        fraction_train=0.25,
        loop=LoopOptions(clients=40, seed=1),
        min_available_nodes=1,
    )
    result = run(strategy, nodes=1, num_rounds=30)
    sizes = [line["asked"] for line in result.history[1:]]
    # Binomial(40, 1/4): five standard errors of the mean, and of the variance about as many.
    assert abs(np.mean(sizes) - 10) < 5 * math.sqrt(7.5 / 30)
    assert 0.3 < np.var(sizes) / 7.5 < 3
    everybody = tuple(sorted(map(str, range(40))))
    assert {release.clients for release in strategy.releases} == {everybody}
    assert {release.charge.sampling for release in strategy.releases} == {0.25}
    numbers = strategy.card(final=True).verify()
    assert numbers["rdp"][1] == pytest.approx(1.0, rel=1e-3)
    assert numbers["pld"][1] < numbers["rdp"][1]


@pytest.mark.usefixtures("no_pld")
def test_secret_samples_are_not_what_a_client_could_work_out() -> None:
    def drawn(**options: Any) -> list[set[str]]:
        rounds: list[set[str]] = []

        class Watched(CentralDP):
            def configure_train(self, server_round: int, *arguments: Any) -> Any:
                messages = super().configure_train(server_round, *arguments)
                rounds.append(set(self.messenger.request_log("train").released()))
                return messages

        strategy = make(
            Watched,
            sampling="poisson",
            fraction_train=0.5,
            clients=16,
            seed=1,
            experiment_id="e",
            min_available_nodes=1,
            **options,
        )
        run(strategy, nodes=1, num_rounds=2)
        return rounds

    server = {"noise": "server"}
    assert drawn(**server) != drawn(**server)  # all that clients know is the same
    assert drawn(**server, insecure_seed=1) == drawn(**server, insecure_seed=1)
    assert drawn() == drawn()  # under a secure sum clients know each other anyway


@pytest.mark.usefixtures("no_pld")
def test_noise_is_released_also_if_nobody_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_in_round_2(assigned: Any, *, server_round: int, **_: Any) -> Any:
        return assigned if server_round == 2 else {}

    monkeypatch.setattr(participants, "each_by_itself", only_in_round_2)
    strategy = CentralDP(
        privacy=ServerNoise(sampling="poisson", insecure_seed=1),
        clipping=AdaptiveClipping(quantile=0.5),
        fraction_train=0.4,
        loop=LoopOptions(seed=1),
    )
    result = run_strategy(strategy, still(), arrays=record(BIG), nodes=5, num_rounds=1)
    line = result.history[1]
    assert (line["asked"], line["skipped"]) == (0, False)
    noise = result.arrays["w"].numpy().astype(float).reshape(-1)
    check_normal(noise * 2, strategy.plan.update_noise_multiplier)
    assert strategy.releases[0].clients == ("0", "1", "2", "3", "4")
    assert "fraction_below" in line["scheme"]
    assert strategy.stop() == "the 1 rounds that the budget is for are over"


def test_nothing_is_released_beyond_the_planned_releases_whoever_runs_the_rounds() -> None:
    class Own(CentralDP):
        start = Strategy.start

    for sampling in ("poisson", "fixed"):
        models: list[Any] = []
        strategy = Own(
            privacy=ServerNoise(sampling=sampling, insecure_seed=1),
            rounds=2,
            loop=LoopOptions(seed=1),
        )
        run(strategy, num_rounds=4, evaluate_fn=lambda _, a: models.append(model_of(a)))  # noqa: B023
        assert len(strategy.releases) == 2
        assert any((models[1][n] != models[2][n]).any() for n in MODEL)
        for name in MODEL:
            np.testing.assert_array_equal(models[2][name], models[4][name])
        assert strategy.card().guarantee.spent == pytest.approx(8.0, rel=1e-5)


def test_a_round_with_too_few_drawn_for_a_sum_is_skipped(
    caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_in_round_2(assigned: Any, *, server_round: int, **_: Any) -> Any:
        return only(assigned, {"0"}) if server_round == 2 else assigned

    monkeypatch.setattr(participants, "each_by_itself", one_in_round_2)
    strategy = CentralDP(privacy=DistributedNoise(sampling="poisson"), loop=LoopOptions(seed=1))
    with caplog.at_level("WARNING", "flwr.privacy"):
        result = run(strategy)
    assert [line["skipped"] for line in result.history[1:]] == [False, True, False]
    assert "a cohort of 1 clients was drawn: cohort = 1: expected at least 2" in caplog.text


# -- Adaptive clipping ---------------------------------------------------------------------------


@pytest.mark.usefixtures("no_pld")
@pytest.mark.parametrize("noise", ["distributed", "server"])
def test_the_clipping_norm_finds_the_median_norm_of_the_updates(noise: str) -> None:
    """Client i moves by i + 1 in norm, i from 0 to 10; the norm starts far below the median."""
    app = ClientApp(mods=[as_mod(CentralDPClient)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        moved = model_of(message.content["arrays"])
        far = 1.0 + int(context.node_config["partition-id"])
        out = record({"w": moved["w"] + np.full(4, far / 2, np.float32)})
        return replied(message, out)

    strategy = make(
        CentralDP,
        noise=noise,
        quantile=0.5,
        clipping_learning_rate=0.5,
        clients=11,
        epsilon=1e3,
        seed=1,
        clipping_norm=1.5,
        min_available_nodes=1,
        **({"insecure_seed": 1} if noise == "server" else {}),
    )
    result = run_strategy(
        strategy,
        app,
        nodes=1,
        arrays=record({"w": np.zeros(4, np.float32)}),
        num_rounds=12,
        insecure_seed=1,
    )
    norms = [line["scheme"]["clipping_norm"] for line in result.history[1:]]
    assert norms[0] == 1.5
    assert 4.5 < np.median(norms[7:]) < 8.0
    assert {release.charge for release in strategy.releases} == {strategy.terms.charge()}
