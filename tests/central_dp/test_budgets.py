"""Central DP's two halves together: budgets, and charges that no crash loses."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from apps import make, same
from central_training import SEED, kill_after, run
from conformance import Killed

from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.privacy.ledger import Entry, Ledger
from flwr_privacy.simulations.engines.inline import Fault
from flwr_privacy.stragglers import StragglerModel
from flwr_privacy.strategies import AdaptiveClipping, CentralDP, LoopOptions


def charges(state: Path, name: str) -> list[Entry]:
    return list(Ledger(state / f"{name}.ledger", data_set=name).entries())


# -- Budgets and books ---------------------------------------------------------------------------


def test_the_card_recomputes_epsilon_and_counts_whoever_was_lost_or_late(tmp_path: Path) -> None:
    state, run_dir = tmp_path / "state", tmp_path / "run"
    state.mkdir()
    run_dir.mkdir()
    faults = [
        Fault(kind="drop", client="1", server_round=1),
        Fault(kind="drop", client="2", server_round=2, phase="shares"),
    ]
    strategy = CentralDP(
        loop=LoopOptions(seed=1, run_dir=run_dir, deadline=0.5),
        clipping=AdaptiveClipping(quantile=0.5),
    )
    run(strategy, state=state, faults=faults)
    card = PrivacyCard.from_json((run_dir / "privacy-card.json").read_text())
    numbers = card.verify()
    assert numbers["gdp"][1] == pytest.approx(8.0, rel=1e-6)
    assert numbers["gdp"][1] == pytest.approx(numbers["pld"][1], rel=1e-3)
    booked = Counter(client for release in card.releases for client in release.clients)
    for client in map(str, range(5)):
        assert len(charges(state, client)) == booked[client]
    assert booked["1"] == 3  # its first answer was lost, and cost it as much as the others
    assert booked["2"] == 2  # it could not deal for the third round, and was not asked
    line = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])["scheme"]
    assert line["epsilon_left"] == pytest.approx(0.0, abs=1e-5)


STRAGGLERS = {"stragglers": StragglerModel(slow_fraction=0.15), "deadline": 5.0}


@pytest.mark.parametrize("noise", ["distributed", "server"])
def test_nobody_is_asked_beyond_its_budget_and_the_training_ends(noise: str) -> None:
    """Four of five clients are asked in a round, each at most three times."""
    strategy = make(CentralDP, noise=noise, fraction_train=0.8, rounds=3, seed=2, **STRAGGLERS)
    result = run(strategy, num_rounds=20)
    assert strategy.plan is not None
    assert strategy.plan.releases == 3
    booked = Counter(client for release in strategy.releases for client in release.clients)
    assert max(booked.values()) == 3
    needed = 2 if noise == "distributed" else 1
    assert sum(count < 3 for count in booked.values()) < needed
    assert len(result.history) < 20
    # A round for which too few are left to share secrets asks nobody.
    assert all(line.get("refused", {}) == {} for line in result.history[1:])
    assert sum(line.get("late", 0) for line in result.history[1:]) > 0
    assert strategy.card(final=True).verify()["gdp"][1] == pytest.approx(8.0, rel=1e-6)
    assert strategy.stop().endswith(f"are left of {needed} needed")


@pytest.mark.parametrize(
    "options",
    [
        {"noise": "server"},
        {"noise": "server", "sampling": "poisson"},
        {},
        {"sampling": "poisson"},
    ],
)
def test_the_books_survive_a_resume_with_drop_outs_and_stragglers(
    options: dict[str, Any], tmp_path: Path
) -> None:
    faults = [Fault(kind="drop", client="3", server_round=1)]
    everything: dict[str, Any] = {
        "seed": 4,
        "experiment_id": "e",
        "rounds": 3,
        "fraction_train": 0.8,
        "quantile": 0.5,
        **STRAGGLERS,
        **({"insecure_seed": 3} if options.get("noise") == "server" else {}),
        **options,
    }
    timing: dict[str, Any] = {"num_rounds": 12, "faults": faults, "insecure_seed": SEED}
    timing["timeout"] = 0.5
    whole, broken = make(CentralDP, **everything), tmp_path / "broken"
    broken.mkdir()
    unbroken = run(whole, state=None, **timing)
    state = tmp_path / "state"
    state.mkdir()
    with pytest.raises(Killed):
        run(
            make(CentralDP, **everything, run_dir=broken, on_round=kill_after(2)),
            state=state,
            **timing,
        )
    resumed = make(CentralDP, **everything, run_dir=broken, resume=True)
    result = run(resumed, state=state, **timing)
    assert len(result.history) == len(unbroken.history) < 12
    assert same(result.arrays, unbroken.arrays)
    assert [r.clients for r in resumed.releases] == [r.clients for r in whole.releases]
    assert resumed.clipping_norm == whole.clipping_norm
    card = PrivacyCard.from_json((broken / "privacy-card.json").read_text())
    assert max(t for _, t in card.verify().values()) > 0
    if "noise" not in options:
        booked = Counter(client for release in resumed.releases for client in release.clients)
        for client, count in booked.items():
            assert len(charges(state, client)) == count


class Dying(CentralDP):
    """Its process ends in round 2, after some answers."""

    heard = 5

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        def some() -> Any:
            for count, reply in enumerate(replies):
                if server_round == 2 and count == self.heard:
                    raise Killed
                yield reply
            if server_round == 2:
                raise Killed

        return super().aggregate_train(server_round, some())


def test_a_question_is_answered_once_also_after_a_crash(tmp_path: Path) -> None:
    """Whoever answered in the round that broke off declines; its charge is on the card once."""
    state, run_dir = tmp_path / "state", tmp_path / "run"
    state.mkdir()
    run_dir.mkdir()
    options: dict[str, Any] = {"seed": 1, "run_dir": run_dir, "rounds": 3, "experiment_id": "e"}
    with pytest.raises(Killed):
        run(make(Dying, **options), state=state)
    before = {client: len(charges(state, client)) for client in map(str, range(5))}
    assert set(before.values()) == {2}
    strategy = make(CentralDP, **options, resume=True)
    result = run(strategy, state=state)
    assert [line.get("skipped") for line in result.history] == [None, False, True, False]
    assert result.history[2]["refused"] == {"declined": 5}
    booked = Counter(client for release in strategy.releases for client in release.clients)
    for client in before:
        assert len(charges(state, client)) == booked[client] == 3
    assert result.guarantee.spent == pytest.approx(8.0, rel=1e-6)


def test_where_the_server_adds_noise_a_round_that_broke_off_is_done_again(tmp_path: Path) -> None:
    options: dict[str, Any] = {"seed": 1, "run_dir": tmp_path, "rounds": 3, "experiment_id": "e"}
    options |= {"noise": "server", "insecure_seed": 1}
    with pytest.raises(Killed):
        run(make(Dying, **options))
    strategy = make(CentralDP, **options, resume=True)
    result = run(strategy)
    assert [line.get("skipped") for line in result.history] == [None, False, False, False]
    assert [release.clients for release in strategy.releases] == [("0", "1", "2", "3", "4")] * 3


# -- The promise ---------------------------------------------------------------------------------


def test_a_second_start_is_another_training() -> None:
    # At a quantile of 0.5 two noised counts that are cut to 0 and 1 would undo each other.
    strategy = CentralDP(loop=LoopOptions(seed=1), clipping=AdaptiveClipping(quantile=0.3))
    run(strategy, num_rounds=2)
    moved = strategy.clipping_norm
    run(strategy, num_rounds=1)
    assert moved != 1.0
    assert strategy.terms.clipping_norm == 1.0
    assert len(strategy.releases) == 1
