"""Private evaluation under central DP: noise in shares, and by a trusted server."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from apps import make, message_app, run_strategy
from conformance import Killed
from flwr.serverapp.strategy import Strategy

from flwr_privacy.accounting import Charge, spent
from flwr_privacy.accounting.accountants import new_accountant
from flwr_privacy.central_dp.plan import CentralDPNoisePlan
from flwr_privacy.clients import CentralDPClient, as_mod
from flwr_privacy.errors import CheckpointError, InvalidParameterError
from flwr_privacy.evaluation.sums import STATISTICS_NAME, EvaluationSum
from flwr_privacy.privacy.grid import CodeGrid
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.simulations.engines.inline import Fault
from flwr_privacy.strategies import CentralDP

APP = message_app([as_mod(CentralDPClient)])
MODES = [("distributed", "fixed"), ("server", "fixed"), ("server", "poisson")]

pytestmark = pytest.mark.usefixtures("no_pld")


def run(strategy: Any, **options: Any) -> Any:
    return run_strategy(strategy, APP, **{"nodes": 6, "num_rounds": 4, **options})


@pytest.mark.parametrize(("noise", "sampling"), MODES)
@pytest.mark.parametrize("evaluations", [1, 6])
def test_trainings_and_planned_evaluations_fit_the_budget_together(
    noise: str, sampling: str, evaluations: int
) -> None:
    plan = CentralDPNoisePlan(
        noise=noise,
        sampling=sampling,
        epsilon=4.0,
        delta=1e-5,
        rounds=6,
        q=0.25,
        evaluation_share=0.05,
        evaluations=evaluations,
    )
    evaluation = Charge(
        neighbours=plan.relation, noise_multiplier=plan.evaluation_multiplier, gap=plan.gap
    )
    charges = [plan.charge()] * plan.releases + [evaluation] * evaluations
    accountant = "gdp" if plan.sampling_rate == 1 else "rdp"
    assert 3.9 < spent(charges, delta=1e-5, accountant=accountant) <= 4.0
    # Also in the order of a training, one by one under the cap of the accountant.
    mixed = [plan.charge()]
    left = charges[1:]
    while left:
        added = left.pop(-1 if len(left) % 2 else 0)
        kept = new_accountant(accountant, mixed)
        assert not kept.would_exceed(added, epsilon=4.0, delta=1e-5)
        mixed.append(added)


@pytest.mark.parametrize(("noise", "sampling"), MODES)
def test_the_card_has_every_training_and_evaluation(
    noise: str, sampling: str, tmp_path: Path
) -> None:
    strategy = make(
        CentralDP,
        noise=noise,
        sampling=sampling,
        epsilon=9.0,
        fraction_train=0.5 if sampling == "poisson" else 1.0,
        evaluation="private",
        every=2,
    )
    result = run(strategy, state=tmp_path)
    expected = [("train", 1), ("train", 2), ("evaluate", 2)]
    expected += [("train", 3), ("train", 4), ("evaluate", 4)]
    assert [(r.phase, r.server_round) for r in strategy.releases] == expected
    assert all(len(release.clients) == 6 for release in strategy.releases)
    assert 8.9 < result.guarantee.spent <= 9.0
    assert strategy.card().verify()
    assert sorted(result.evaluate_metrics_clientapp) == [2, 4]
    if noise == "distributed":
        for i in range(6):
            entries = Ledger(tmp_path / f"{i}.ledger", data_set=str(i)).entries()
            phases = [(e.question.phase, e.question.server_round) for e in entries]
            assert phases == expected
            assert [e.charge for e in entries] == strategy.card().charges()[str(i)]


@pytest.mark.parametrize("noise", ["distributed", "server"])
def test_the_metrics_are_near_the_clients_own_where_the_budget_is_large(noise: str) -> None:
    strategy = make(CentralDP, noise=noise, epsilon=1e6, evaluation="private", every=4)
    metrics = run(strategy).evaluate_metrics_clientapp[4]
    assert metrics["accuracy"] == pytest.approx(0.25, abs=0.02)
    assert metrics["evaluated"] == pytest.approx(6, abs=0.1)
    assert metrics["accuracy_low"] < metrics["accuracy"] < metrics["accuracy_high"]


class Noted(CentralDP):
    """Notes the noised sums of evaluations."""

    def collect(self, phase: str, messages: Any) -> Any:
        mean, metrics = super().collect(phase, messages)
        if isinstance(mean, EvaluationSum):
            self.__dict__.setdefault("sums", []).append(mean.statistics())
        return mean, metrics


def test_a_trusted_server_adds_the_noise_that_is_charged() -> None:
    strategy = make(Noted, noise="server", epsilon=1.0, evaluation="private", share=0.5)
    run(strategy, nodes=2, num_rounds=150)
    (sigma,) = {r.charge.noise_multiplier for r in strategy.releases if r.phase == "evaluate"}
    sums = np.array(strategy.__dict__["sums"])
    assert sums.shape == (150, 2)
    assert sums.std() == pytest.approx(sigma, rel=0.15)


def test_noise_alone_is_released_where_nobody_answers() -> None:
    """Where it is a secret who is there, an evaluation without noise would tell."""
    total = EvaluationSum(2, CodeGrid(-10), counts=False)
    total.add_noise(5.0, SecureRandom.insecure(0))
    assert np.abs(total.statistics()).max() > 0.5
    strategy = make(
        Noted, noise="server", sampling="poisson", fraction_train=0.5, epsilon=9.0,
        evaluation="private",
    )  # fmt: skip
    faults = [Fault(kind="drop", server_round=1, phase="evaluate")]
    run(strategy, num_rounds=1, nodes=3, faults=faults, timeout=1)
    assert len(strategy.__dict__["sums"]) == 1
    assert [len(r.clients) for r in strategy.releases] == [3, 3]


def test_a_client_without_budget_for_trainings_was_not_asked_for_evaluations_instead() -> None:
    """Evaluations are no trainings, and do not end the training before its rounds are done."""
    strategy = make(CentralDP, epsilon=9.0, evaluation="private", share=0.3)
    result = run(strategy, num_rounds=5)
    assert [line["skipped"] for line in result.history[1:]] == [False] * 5
    assert result.guarantee.spent <= 9.0


class Dying(CentralDP):
    """Ends when the answers to the evaluation of round 2 are there, and again."""

    def aggregate_evaluate(self, server_round: int, replies: Any) -> Any:
        found = super().aggregate_evaluate(server_round, replies)
        if server_round == 2:
            raise Killed
        return found


@pytest.mark.parametrize("noise", ["distributed", "server"])
def test_a_server_that_dies_in_an_evaluation_does_not_noise_it_twice(
    noise: str, tmp_path: Path
) -> None:
    for name in ("state", "run"):
        (tmp_path / name).mkdir()
    options: dict[str, Any] = {"noise": noise, "epsilon": 9.0, "evaluation": "private"}
    options |= {"experiment_id": "e", "run_dir": tmp_path / "run"}
    with pytest.raises(Killed):
        run(make(Dying, **options), state=tmp_path / "state")
    other = make(CentralDP, **options, every=2, resume=True)
    with pytest.raises(CheckpointError, match="evaluation"):
        run(other, state=tmp_path / "state")
    strategy = make(CentralDP, **options, resume=True)
    result = run(strategy, state=tmp_path / "state")
    assert sorted(result.evaluate_metrics_clientapp) == [1, 3, 4]
    # It was charged: the answers have left the nodes.
    phases = [(r.phase, r.server_round) for r in strategy.releases]
    assert sorted(phases) == [(p, r) for p in ("evaluate", "train") for r in (1, 2, 3, 4)]
    assert result.guarantee.spent <= 9.0


def test_deployed_nodes_give_a_trusted_server_nothing_that_they_do_not_allow(
    tmp_path: Path,
) -> None:
    nodes: list[dict[str, Any]] = [
        {
            "client-id": str(i),
            "partition-id": i,
            "privacy-simulated": False,
            "privacy-state": str(tmp_path),
        }
        for i in range(3)
    ]
    strategy = make(Noted, noise="server", epsilon=9.0, evaluation="private")
    result = run(strategy, nodes=nodes, num_rounds=1)
    assert result.evaluate_metrics_clientapp == {}
    assert "sums" not in strategy.__dict__


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"fraction_evaluate": 0.0}, "fraction_evaluate = 0"),
        ({"evaluate_metrics_aggr_fn": lambda *_: None}, "evaluate_metrics_aggr_fn"),
        ({"evaluation": {"share": 0}}, "share = 0"),
    ],
)
def test_what_does_not_go_with_an_evaluation_is_refused(changes: Any, text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        make(CentralDP, **{"evaluation": "private", **changes})


def test_without_an_evaluation_nobody_is_asked() -> None:
    strategy = make(CentralDP, epsilon=9.0, fraction_evaluate=1.0)
    result = run(strategy, num_rounds=2)
    assert result.evaluate_metrics_clientapp == {}
    assert {release.phase for release in strategy.releases} == {"train"}


def test_answers_have_codes_and_nothing_else() -> None:
    seen: list[tuple[set[str], dict[str, Any]]] = []

    class Watching(CentralDP):
        def take(self, mean: Any, reply: Any) -> None:
            seen.append((set(reply.arrays()), dict(reply.metrics())))
            super().take(mean, reply)

    run(make(Watching, noise="server", epsilon=9.0, evaluation="private"), num_rounds=1)
    assert seen[6:] == [({STATISTICS_NAME}, {"num-examples": 1})] * 6


class OwnStart(CentralDP):
    """A strategy with a `start` of the user's own."""

    def start(self, *arguments: Any, **keywords: Any) -> Any:
        return Strategy.start(self, *arguments, **keywords)


def test_under_an_own_start_nobody_evaluates_more_often_than_planned() -> None:
    options = {"fraction_train": 0.5, "evaluation": {"share": 0.5}, "rounds": 4}
    strategy = make(OwnStart, noise="server", sampling="fixed", epsilon=2.0, **options)
    run(strategy, num_rounds=14)
    counts = Counter(
        (release.phase, client) for release in strategy.releases for client in release.clients
    )
    assert strategy.plan is not None
    assert max(counts.values()) == strategy.plan.evaluations == 4
    assert 1.9 < strategy.card().guarantee.spent <= 2.0


def test_the_largest_share_leaves_room_for_sampled_rounds() -> None:
    plan = CentralDPNoisePlan(
        noise="server",
        sampling="poisson",
        epsilon=0.5,
        delta=1e-5,
        rounds=200,
        q=0.05,
        evaluation_share=0.99,
        evaluations=200,
    )
    evaluation = Charge(
        neighbours=plan.relation, noise_multiplier=plan.evaluation_multiplier, count=200
    )
    rounds = replace(plan.charge(), count=200)
    assert spent([rounds, evaluation], delta=1e-5, accountant="rdp") <= 0.5
