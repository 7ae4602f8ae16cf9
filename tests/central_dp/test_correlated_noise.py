"""Correlated noise of a trusted server, through both halves of central DP."""

import math
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from apps import make, model_of, record, run_strategy
from central_training import APP, BIG, kill_after, run, still
from conformance import Killed
from flwr.app import ConfigRecord

from flwr_privacy.accounting import as_replaced, new_accountant, spent
from flwr_privacy.accounting.gaussian import epsilon_of
from flwr_privacy.central_dp.correlated.factors import FRACTION_BITS, Factor, TreeFactor
from flwr_privacy.central_dp.correlated.options import BLT, BandedMF, CorrelatedNoise, TreeNoise
from flwr_privacy.central_dp.correlated.sensitivity import joint_sensitivities
from flwr_privacy.central_dp.guarantee import guarantee_of
from flwr_privacy.central_dp.plan import CentralDPNoisePlan
from flwr_privacy.errors import CheckpointError, InvalidParameterError, ProtocolError
from flwr_privacy.strategies import AdaptiveClipping, CentralDP, DistributedNoise, ServerNoise
from flwr_privacy.strategies.loop.base import LoopOptions
from flwr_privacy.strategies.state.experiment import CHECKPOINT

ROUNDS = 12
OPTIONS: dict[str, CorrelatedNoise] = {
    "banded": BandedMF(),
    "blt": BLT(buffers=2),
    "tree": TreeNoise(),
}


def strategy_of(
    correlated: CorrelatedNoise | None, *, seed: int | None = 3, **options: Any
) -> CentralDP:
    """Ten clients, two of them a round: a client rests four rounds between two."""
    privacy = ServerNoise(
        sampling=options.pop("sampling", "balanced"),
        correlated=correlated,
        clipping_norm=0.5,
        insecure_seed=seed,
        groups=options.pop("groups", None),
    )
    options = {"min_available_nodes": 1, "clients": 10, "seed": 1, **options}
    return make(CentralDP, privacy=privacy, fraction_train=0.2, **options)


def plan_of(correlated: CorrelatedNoise | None, **options: Any) -> CentralDPNoisePlan:
    values = {"epsilon": 8.0, "delta": 1e-5, "rounds": ROUNDS, "q": 0.2, "sampling": "balanced"}
    return CentralDPNoisePlan(**{**values, "noise": "server", "correlated": correlated, **options})


# -- What it costs -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIONS)
def test_charges_add_up_to_the_joint_sensitivity_after_each_participation(name: str) -> None:
    plan = plan_of(OPTIONS[name])
    assert (plan.releases, plan.separation) == (3, 5)
    joint = joint_sensitivities(plan.joint.factor, rounds=ROUNDS, separation=5, participations=3)
    charges = [plan.charge(number) for number in (1, 2, 3)]
    for made in (1, 2, 3):
        mu = joint[made - 1] / plan.noise_multiplier
        gap = 3 * plan.gap
        expected = epsilon_of(mu, 1e-5 * math.exp(-gap)) + gap
        found = new_accountant("gdp", charges[:made]).epsilon(1e-5)
        assert found == pytest.approx(expected, rel=2e-3 if name == "blt" else 1e-7)
        assert found >= expected * (1 - 1e-12)
    assert 7.999 < spent(charges, delta=1e-5) <= 8.0
    with pytest.raises(InvalidParameterError, match="participation = 4"):
        plan.charge(4)


def test_correlated_noise_is_less_than_independent_and_turns_less_than_random_sets() -> None:
    q = {"rounds": 100, "q": 0.1}
    fixed = plan_of(None, sampling="fixed", **q).effective_multiplier
    balanced = plan_of(None, **q).effective_multiplier
    banded = plan_of(BandedMF(), **q).effective_multiplier
    assert (round(fixed, 3), round(balanced, 3)) == (2.549, 1.9)
    assert balanced / banded > 2.3
    assert plan_of(BLT(), **q).effective_multiplier < 1.1 * banded
    assert banded < plan_of(TreeNoise(), **q).effective_multiplier < balanced


def test_where_everybody_takes_part_in_every_round_there_is_nothing_to_gain() -> None:
    plan = plan_of(BandedMF(), q=1.0)
    assert plan.separation == 1
    independent = plan_of(None, q=1.0).noise_multiplier
    assert plan.effective_multiplier == pytest.approx(independent, rel=1e-6)


def test_groups_that_take_turns_are_amplified_and_charged_alike() -> None:
    plan = plan_of(BandedMF(), sampling="cyclic_poisson", rounds=20, q=0.05)
    assert (plan.separation, plan.releases, plan.sampling_rate) == (4, 5, 0.2)
    assert plan.relation == "add_remove"
    charges = [plan.charge(number) for number in range(1, 6)]
    assert len({charge.noise_multiplier for charge in charges}) == 1
    column = plan.joint.factor.column(20)  # type: ignore[union-attr]
    one = plan.noise_multiplier / np.linalg.norm(column)
    assert charges[0].noise_multiplier == pytest.approx(one, rel=1e-9)
    assert spent(charges, delta=1e-5, accountant="rdp") <= 8.0
    with pytest.raises(InvalidParameterError, match="BandedMF with at most 2 bands"):
        plan_of(BandedMF(bands=3), sampling="cyclic_poisson", groups=2).terms(1.0)
    for other in (BLT(), TreeNoise()):
        with pytest.raises(InvalidParameterError, match="no amplification is proven"):
            plan_of(other, sampling="cyclic_poisson", q=0.1)


# -- The noise -----------------------------------------------------------------------------------


def noise_of(strategy: CentralDP, rounds: int, nodes: int = 1) -> np.ndarray:
    """Return the noise of each round's sum in grid steps, where no update is anything."""
    models = [np.zeros(5001)]

    def watched(server_round: int, arrays: Any) -> None:
        model = model_of(arrays)
        models.append(np.concatenate([np.ravel(model[n]) for n in sorted(model)]).astype(float))

    run_strategy(
        strategy, still(), arrays=record(BIG), nodes=nodes, num_rounds=rounds, evaluate_fn=watched
    )
    terms = strategy.terms
    assert terms is not None
    # The model is float32: its differences are near whole steps of the mean of two clients.
    return np.diff(models[1:], axis=0) * 2 / 2.0**terms.grid


def whitened(factor: Factor, noise: np.ndarray) -> np.ndarray:
    """Return z of noise: for a tree that of its nodes."""
    if isinstance(factor, TreeFactor):
        return factor.matrix()[: len(noise)] @ noise
    column = factor.column(len(noise))
    return np.array([column[: t + 1][::-1] @ noise[: t + 1] for t in range(len(noise))])


@pytest.mark.parametrize("name", OPTIONS)
def test_the_noise_of_all_rounds_is_that_of_the_factor(name: str) -> None:
    """Whitened by C it is independent and of the charged size: in every round, with no repeat."""
    strategy = strategy_of(OPTIONS[name])
    noise = noise_of(strategy, ROUNDS)
    plan, terms = strategy.plan, strategy.terms
    assert plan is not None
    assert terms is not None
    z = whitened(plan.joint.factor, noise)
    # Neighbours move the sum by 2C.
    sigma = plan.noise_multiplier * 2 * 0.5 / 2.0**terms.grid
    for t in range(ROUNDS):
        assert abs((z[t] ** 2).mean() / sigma**2 - 1) < 5 * math.sqrt(2 / z[t].size)
    correlation = z @ z.T / z.shape[1] / sigma**2 - np.eye(ROUNDS)
    np.fill_diagonal(correlation, 0)
    assert np.abs(correlation).max() < 5 / math.sqrt(z.shape[1])
    # It is not independent as it is: that is the point.
    assert max(abs((one * two).mean()) for one, two in pairwise(noise)) / sigma**2 > 0.1


# -- Cohorts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("correlated", [None, BandedMF()], ids=["independent", "banded"])
def test_balanced_cohorts_ask_everybody_equally_often_and_far_apart(
    correlated: CorrelatedNoise | None,
) -> None:
    strategy = strategy_of(correlated)
    result = run(strategy, nodes=1, num_rounds=10)
    assert [line["asked"] for line in result.history[1:]] == [2] * 10
    rounds: dict[str, list[int]] = {}
    for release in strategy.releases:
        for client in release.clients:
            rounds.setdefault(client, []).append(release.server_round)
    assert sorted(rounds) == sorted(map(str, range(10)))
    assert {second - first for first, second in rounds.values()} == {5}
    card = strategy.card(final=True)
    assert card.verify()["gdp"][1] == pytest.approx(8.0, rel=1e-3)
    assert card.verify()["gdp"][1] <= 8.0


@pytest.mark.parametrize("correlated", [None, BandedMF()], ids=["independent", "banded"])
def test_a_client_rests_even_if_nobody_else_is_there(correlated: CorrelatedNoise | None) -> None:
    """Where the noise is independent it need not: only how often it takes part counts then."""

    def most_leave(line: dict[str, Any]) -> None:
        if line["round"] == 5:
            strategy.messenger.sampler._population = lambda: ["0", "1", "2"]  # type: ignore[method-assign]

    strategy = strategy_of(correlated, on_round=most_leave)
    result = run(strategy, nodes=1, num_rounds=ROUNDS)
    asked = [line["asked"] for line in result.history[1:]]
    rounds = {c: [r.server_round for r in strategy.releases if c in r.clients] for c in "012"}
    apart = [second - first for mine in rounds.values() for first, second in pairwise(mine)]
    assert max(map(len, rounds.values())) <= 3
    if correlated is None:
        assert min(apart) < 5
        assert asked[5] == 2
    else:
        assert min(apart) >= 5
        assert min(asked[5:]) < 2


def test_cyclic_groups_are_charged_in_their_rounds_only() -> None:
    strategy = strategy_of(BandedMF(), sampling="cyclic_poisson", clients=30, groups=3)
    run(strategy, nodes=1, num_rounds=9)
    charged: dict[str, set[int]] = {}
    for release in strategy.releases:
        assert release.unanswered is None  # who was asked is a secret
        for client in release.clients:
            charged.setdefault(client, set()).add(release.server_round)
    assert len(charged) == 30
    groups = Counter(tuple(sorted(rounds)) for rounds in charged.values())
    assert set(groups) == {(1, 4, 7), (2, 5, 8), (3, 6, 9)}
    (rate,) = {release.charge.sampling for release in strategy.releases}
    assert rate == pytest.approx(0.6)


# -- Crashes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("death", [1, 4, 6])
def test_a_resumed_training_draws_what_the_unbroken_one_draws(
    name: str, death: int, tmp_path: Path
) -> None:
    whole = run(strategy_of(OPTIONS[name]), nodes=1, num_rounds=7)
    broken = strategy_of(OPTIONS[name], run_dir=tmp_path, on_round=kill_after(death))
    with pytest.raises(Killed):
        run(broken, nodes=1, num_rounds=7)
    resumed = strategy_of(OPTIONS[name], run_dir=tmp_path, resume=True)
    result = run(resumed, nodes=1, num_rounds=7)
    for one, other in zip(*map(_arrays, (whole, result)), strict=True):
        assert (one == other).all()
    assert len(resumed.releases) == 7
    other = strategy_of(TreeNoise() if name != "tree" else BLT(), run_dir=tmp_path, resume=True)
    with pytest.raises(CheckpointError, match="calibrated for correlated"):
        run(other, nodes=1, num_rounds=7)


def _arrays(result: Any) -> list[np.ndarray]:
    return [np.asarray(array) for array in model_of(result.arrays).values()]


def test_a_second_sum_of_one_round_is_refused() -> None:
    """A server's own loop that aggregates a round twice would show the difference of two sums."""
    strategy = strategy_of(BandedMF())
    run(strategy, nodes=1, num_rounds=3)
    assert strategy.state_dict()["correlated"]["drawn"] == 3
    instruction = strategy._instructions["train"]
    mean = instruction.accumulator()
    mean.accumulate("a", {n: np.zeros(s, d) for n, (s, d) in mean.template.items()}, weight=1)
    with pytest.raises(ProtocolError, match="round 3 was drawn before"):
        instruction.released(mean)


@pytest.mark.parametrize("name", [*OPTIONS, "cyclic"])
def test_no_round_is_trained_beyond_those_whose_cost_is_planned(name: str) -> None:
    """Absent clients leave budget over; what a further round would move is in no sensitivity."""
    options: dict[str, Any] = {"rounds": 3}
    if name == "cyclic":
        options |= {"sampling": "cyclic_poisson", "groups": 2, "clients": 6}
    strategy = strategy_of(OPTIONS.get(name, BandedMF()), **options)
    result = run(strategy, nodes=1, num_rounds=12)
    assert max(release.server_round for release in strategy.releases) <= 3
    assert strategy.state_dict()["correlated"]["drawn"] == 3
    assert sum(not line["skipped"] for line in result.history[1:]) == 3
    if name != "cyclic":
        assert len(result.history) == 4
        assert strategy.stop().startswith(
            "the 3 rounds that the budget is for are over: their noise"
        )


def test_a_training_is_noted_with_what_it_will_be_charged() -> None:
    """Planted bug: counted once for each list of releases, it is that of the training before."""
    strategy = CentralDP(
        privacy=ServerNoise(sampling="balanced", correlated=TreeNoise(), insecure_seed=1),
        fraction_train=0.5,
        rounds=6,
        min_train_nodes=2,
        min_available_nodes=4,
    )
    run_strategy(strategy, APP, nodes=4, num_rounds=3)
    booked = Counter(client for release in strategy.releases for client in release.clients)
    assert set(booked.values()) == {1, 2}
    plan = strategy.plan
    assert plan is not None
    for client, count in booked.items():
        assert strategy.budget.cost(client, strategy.releases) == plan.charge(count + 1)
    assert len({plan.charge(number) for number in (1, 2, 3)}) == 3


@pytest.mark.parametrize("correlated", [None, BandedMF(), TreeNoise()])
def test_it_works_under_a_users_own_start(correlated: CorrelatedNoise | None) -> None:
    class Own(CentralDP):
        def start(self, grid: Any, initial_arrays: Any, num_rounds: int = 3, **_: Any) -> Any:
            arrays = initial_arrays
            for server_round in range(1, num_rounds + 1):
                messages = self.configure_train(server_round, arrays, ConfigRecord(), grid)
                replies = grid.send_and_receive(messages)
                arrays = self.aggregate_train(server_round, replies)[0] or arrays
            return arrays

    strategy = Own(
        privacy=ServerNoise(sampling="balanced", correlated=correlated, insecure_seed=1),
        fraction_train=0.5,
        rounds=6,
        min_train_nodes=2,
        min_available_nodes=4,
    )
    run_strategy(strategy, APP, nodes=4, num_rounds=6)
    booked = Counter(client for release in strategy.releases for client in release.clients)
    assert sorted(booked.values()) == [3, 3, 3, 3]
    plan = strategy.plan
    assert plan is not None
    for client in booked:
        mine = [release.charge for release in strategy.releases if client in release.clients]
        assert mine == [plan.charge(number) for number in (1, 2, 3)]


def test_lost_rounds_end_a_training_with_correlated_noise(tmp_path: Path) -> None:
    """Their noise was shown; a second branch of the same state has no stated cost."""
    with pytest.raises(Killed):
        run(
            strategy_of(BandedMF(), run_dir=tmp_path, on_round=kill_after(2)),
            nodes=1,
            num_rounds=6,
        )
    older = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(Killed):
        run(
            strategy_of(BandedMF(), run_dir=tmp_path, resume=True, on_round=kill_after(4)),
            nodes=1,
            num_rounds=6,
        )
    (tmp_path / CHECKPOINT).write_bytes(older[CHECKPOINT])
    again = strategy_of(BandedMF(), run_dir=tmp_path, resume=True, accept_lost_rounds=True)
    with pytest.raises(CheckpointError, match="its state is lost"):
        run(again, nodes=1, num_rounds=6)


def test_the_guarantee_says_what_replaced_data_cost() -> None:
    """Of neighbours whose contribution is zero; by the charges of all participations."""
    plan = plan_of(TreeNoise(), neighbours="zero_out")
    charges = [as_replaced(plan.charge(number)) for number in (1, 2, 3)]
    text = guarantee_of(plan, summed=False, quorum=None, kept_back=[], insecure=False).text()
    assert f"epsilon {spent(charges, delta=1e-5):.4g} for all rounds" in text
    assert "a client takes part in at most 3 of them, at least 5 apart" in text


# -- What does not go together -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sampling": "fixed"}, "sampling = 'fixed': expected 'balanced' or 'cyclic_poisson'"),
        ({"sampling": "poisson"}, "sampling = 'poisson': expected 'balanced' or 'cyclic_poisson'"),
        ({"sampling": "balanced", "groups": 3}, "groups = 3: expected None with sampling"),
        ({"sampling": "cyclic_poisson", "groups": 0}, "groups = 0"),
        ({"sampling": "cyclic_poisson", "correlated": BLT()}, "no amplification is proven"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], text: str) -> None:
    def begin() -> None:
        strategy = CentralDP(
            privacy=ServerNoise(**{"correlated": BandedMF(), **options}),
            fraction_train=0.1,
            loop=LoopOptions(clients=20),
            min_available_nodes=1,
        )
        run_strategy(strategy, APP, nodes=1, num_rounds=9)

    with pytest.raises(InvalidParameterError, match=text):
        begin()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sampling": "cyclic_poisson", "correlated": BLT()}, "no amplification is proven"),
        ({"sampling": "cyclic_poisson", "correlated": BandedMF(bands=5)}, "at most 4 bands"),
        ({"sampling": "fixed", "correlated": TreeNoise()}, "a client has to rest"),
    ],
)
def test_what_can_never_work_is_refused_by_the_constructor(
    options: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        ServerNoise(**options)
    with pytest.raises(InvalidParameterError, match="sampling = 'cyclic_poisson'"):
        DistributedNoise(sampling="cyclic_poisson")


def test_a_grid_that_is_too_fine_is_refused_before_anything_is_spent() -> None:
    privacy = ServerNoise(sampling="balanced", correlated=BandedMF(), grid_bits=26)
    strategy = make(
        CentralDP, privacy=privacy, fraction_train=0.2, clients=10, min_available_nodes=1
    )
    with pytest.raises(InvalidParameterError, match="can be drawn"):
        run(strategy, nodes=1, num_rounds=5)
    assert strategy.releases == []


def test_more_groups_than_cohorts_are_refused() -> None:
    strategy = strategy_of(None, sampling="cyclic_poisson", groups=6)
    with pytest.raises(InvalidParameterError, match="groups = 6: expected at most 5"):
        run(strategy, nodes=1, num_rounds=9)


def test_a_norm_that_changes_is_refused_before_anything_is_spent() -> None:
    with pytest.raises(InvalidParameterError, match="clipping norm would break the cancellation"):
        CentralDP(
            privacy=ServerNoise(sampling="balanced", correlated=BandedMF()),
            clipping=AdaptiveClipping(quantile=0.5),
        )
    with pytest.raises(InvalidParameterError, match="or a committee"):
        DistributedNoise(correlated=BandedMF())


def test_fractions_bits_leave_room_for_strong_noise() -> None:
    """With little epsilon the grid is coarser, so that the sampler still has its range."""
    plan = plan_of(BandedMF(), epsilon=0.05, rounds=100, q=0.01)
    terms = plan.terms(1.0)
    steps = terms.sigma() / 2.0**terms.grid * 2**FRACTION_BITS
    assert steps < 2.0**40
    assert terms.grid > plan_of(BandedMF()).terms(1.0).grid
    terms.check_grid(100_000)
