"""Trainings that end early: discounting and Lei's decays, with the real strategy and clients."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from apps import StepClient, make, message_app, record, run_strategy, same
from conformance import Killed
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedAdam, Strategy

from flwr_privacy.accounting import new_accountant
from flwr_privacy.clients import UDPClient, as_mod, numpy_client_app
from flwr_privacy.errors import CheckpointError, InvalidParameterError
from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.simulations.engines.inline import Fault
from flwr_privacy.simulations.research.udp.noise_theory import sigma_crd
from flwr_privacy.strategies import (
    UDP,
    ClientLosses,
    Discounting,
    LinearNoise,
    LoopOptions,
    PlateauNoise,
    UserLevel,
)
from flwr_privacy.udp import discount_T

BETTER, SAME = 1.0, 0.0  # how much the loss falls in a round


class Script:
    """A validation function that says what a test wants it to; it notes what it is asked."""

    def __init__(self, falls: Callable[[int], float] = lambda _: SAME) -> None:
        self.falls = falls
        self.asked: list[tuple[int, ArrayRecord]] = []

    def __call__(self, server_round: int, arrays: ArrayRecord) -> float:
        self.asked.append((server_round, arrays))
        return 100.0 - sum(self.falls(t) for t in range(server_round))


def app() -> Any:
    return message_app([as_mod(UDPClient)])


def only_after(*rounds: int) -> Callable[[int], float]:
    """Trigger after these rounds, counted from 0, and no others."""
    return lambda t: SAME if t in rounds else BETTER


def run(strategy: Any, rounds: int, **options: Any) -> Any:
    return run_strategy(strategy, app(), num_rounds=rounds, **options)


def crd(**options: Any) -> UDP:
    defaults: dict[str, Any] = {"schedule": "discounting", "validation": Script(), "seed": 1}
    given = {key: value for key, value in {**defaults, **options}.items() if value is not None}
    return make(UDP, **given)


def noises(result: Any) -> list[float]:
    return [line["scheme"]["noise_multiplier"] for line in result.history[1:]]


def noise_by_25(history: list[int], rounds: int, first: float) -> list[float]:
    """The noise of equation (25), computed with the ledger that the paper has."""
    epsilon, delta = 1.0, 1e-5
    unit = sigma_crd(T=rounds, t=0, spent=0.0, q=1.0, epsilon=epsilon, delta=delta)
    spent, out = 0.0, []
    for t, T in enumerate(history[:-1]):
        sigma = sigma_crd(T=T, t=t, spent=spent, q=1.0, epsilon=epsilon, delta=delta)
        spent += sigma**-2
        out.append(first * sigma / unit)
    return out


@pytest.mark.parametrize("noise", ["gdp_fixed", "gdp", "paper"])
def test_F7_a_discount_after_every_round_ends_the_training_early(
    noise: str, tmp_path: Path
) -> None:
    """T0 = 40 and beta = 0.5: 40, 20, 10 + ... by floor(beta (T - t)) + t."""
    script = Script()
    strategy = crd(validation=script, beta=0.5, noise=noise, run_dir=tmp_path)
    result = run(strategy, 40)
    expected, t = [40], 0
    while t < expected[-1]:
        expected.append(discount_T(expected[-1], t, 0.5))
        t += 1
    assert strategy.T_history == expected
    assert [line["round"] for line in result.history] == list(range(t + 1))
    assert all(line["rounds"] == 40 for line in result.history)
    assert [line["scheme"].get("T") for line in result.history] == [None, *expected[1:]]
    assert [line["scheme"].get("V") for line in result.history] == [None, *[100.0] * t]
    assert [server_round for server_round, _ in script.asked] == list(range(t + 1))
    assert noises(result) == pytest.approx(
        noise_by_25(expected, 40, noises(result)[0]), rel=1e-5 if noise == "gdp" else 1e-9
    )
    card = PrivacyCard.from_json((tmp_path / "privacy-card.json").read_text())
    assert set(card.verify()) == {"gdp", "rdp", "pld"}  # stated at an early end as well
    assert len(card.releases) == t
    assert all(release.clients == ("0", "1", "2", "3") for release in card.releases)
    assert card.guarantee.spent <= card.guarantee.epsilon * (1 + 1e-9)
    assert result.guarantee.spent == card.guarantee.spent
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert lines == result.history
    assert "discounting left" in strategy.stop()


def test_F6_discounts_after_some_rounds_spend_the_budget_exactly() -> None:
    script = Script(only_after(1, 3))
    strategy = crd(validation=script, beta=0.7, rounds=12)
    result = run(strategy, 12)
    T1 = discount_T(12, 1, 0.7)
    T2 = discount_T(T1, 3, 0.7)
    assert strategy.T_history == [12, 12, T1, T1, *[T2] * (T2 - 3)]
    assert len(result.history) == T2 + 1
    z = noises(result)
    assert z == pytest.approx(noise_by_25(strategy.T_history, 12, z[0]), rel=1e-9)
    assert z[2] / z[1] == pytest.approx(math.sqrt((T1 - 2) / (12 - 2)), rel=1e-9)
    assert result.guarantee.spent == pytest.approx(8.0, rel=1e-3)
    assert [line["accumulated"] for line in result.history[1:]] == [4] * T2
    line = result.history[-1]["scheme"]
    assert line["epsilon"] + line["epsilon_left"] == pytest.approx(8.0)


def test_F8_without_a_trigger_it_is_the_training_without_discounting_bit_for_bit() -> None:
    same_run: dict[str, Any] = {"seed": 1, "experiment_id": "e"}
    plain = run(make(UDP, **same_run), 4, insecure_seed=3)
    strategy = crd(**same_run, validation=Script(only_after()))
    discounting = run(strategy, 4, insecure_seed=3)
    assert same(plain.arrays, discounting.arrays)
    assert strategy.T_history == [4] * 5
    assert noises(plain) == noises(discounting)
    assert "T" not in plain.history[1]["scheme"]


def test_the_validation_sees_the_first_model_and_each_new_one() -> None:
    script, models = Script(only_after(0)), []
    strategy = crd(validation=script, beta=0.6)
    result = run(strategy, 5, evaluate_fn=lambda _, arrays: models.append(arrays))
    assert [server_round for server_round, _ in script.asked] == list(range(len(models)))
    for (_, seen), model in zip(script.asked, models, strict=True):
        assert same(seen, model)
    assert same(script.asked[0][1], record())
    assert same(script.asked[-1][1], result.arrays)
    assert strategy.T_history == [5, 3, 3, 3]  # the first round was compared with the first model


def test_a_loss_that_is_no_number_is_no_improvement(tmp_path: Path) -> None:
    losses = {0: 3.0, 1: 2.0, 2: math.nan, 3: 1.0}
    strategy = crd(
        validation=lambda r, _: np.float32(losses.get(r, 0.5)), beta=0.7, run_dir=tmp_path
    )
    result = run(strategy, 10)
    # Round index 1 has a NaN; index 2 is compared with the loss before it.
    after = discount_T(10, 1, 0.7)
    assert strategy.T_history[:4] == [10, 10, after, after]
    assert result.history[2]["scheme"]["V"] is None
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert lines == result.history


@pytest.mark.parametrize("loss", [None, "0.3", {"loss": 0.3}, True, np.ones(1), 1j])
def test_a_validation_that_returns_something_else_is_said_so(loss: Any) -> None:
    with pytest.raises(
        InvalidParameterError, match=r"validation = .*a function that returns a number"
    ):
        run(crd(validation=lambda *_: loss), 2)


@pytest.mark.parametrize("loss", [1, np.float64(1.0), np.int64(1)])
def test_any_kind_of_number_is_a_loss(loss: Any) -> None:
    assert len(run(crd(validation=lambda *_: loss), 2).history) == 2


def test_patience_and_zeta_reach_the_rule() -> None:
    strategy = crd(validation=Script(lambda _: 0.05), zeta=0.1, patience=3, beta=0.5)
    run(strategy, 9)
    after = discount_T(9, 2, 0.5)
    assert strategy.T_history[:4] == [9, 9, 9, after]
    strategy = crd(validation=Script(lambda _: 0.05), zeta=0.04, patience=3, beta=0.5)
    run(strategy, 4)
    assert strategy.T_history == [4] * 5


@pytest.mark.parametrize("options", [{}, {"validation": "clients"}])
def test_a_round_without_an_answer_discounts_nothing_and_is_done(options: dict[str, Any]) -> None:
    validated = {} if options else {"validation": Script()}
    strategy = make(
        UDP, schedule="discounting", beta=0.7, seed=1, deadline=1.0, **validated, **options
    )
    faults = [Fault(kind="drop", server_round=r) for r in (1, 2)]
    result = run(strategy, 6, faults=faults)
    assert [line.get("skipped") for line in result.history[:4]] == [None, True, True, False]
    assert strategy.T_history[:3] == [6, 6, 6]
    assert strategy.T_history == [line["scheme"].get("T", 6) for line in result.history]
    assert "V" not in result.history[1]["scheme"]
    charged = [(release.phase, release.server_round) for release in strategy.releases]
    assert ("train", 1) in charged  # an answer that was lost has cost its client


class Caps:
    """What the clients' own filter would say of the card's charges."""

    @staticmethod
    def check(strategy: UDP, epsilon: float, delta: float) -> None:
        for charges in strategy.card().charges().values():
            accountant = new_accountant("gdp")
            for charge in charges:
                assert not accountant.would_exceed(
                    charge, epsilon=epsilon * (1 + 1e-9), delta=delta
                )
                accountant.compose(charge)


@pytest.mark.parametrize("draw", range(4))
def test_the_cap_holds_whatever_the_losses_are(draw: int) -> None:
    draws = random.Random(draw)
    noise = draws.choice(["gdp_fixed", "gdp", "gdp_worst", "zcdp"])
    strategy = crd(
        validation=lambda *_: draws.choice([draws.random(), math.inf, -math.inf, math.nan, 0.5]),
        beta=draws.choice([0.5, 0.7, 0.9]),
        patience=draws.choice([1, 2]),
        noise=noise,
        epsilon=draws.choice([0.5, 4.0]),
        fraction_train=draws.choice([0.5, 1.0]),
    )
    result = run(strategy, 12)
    epsilon = strategy.guarantee().epsilon
    assert result.guarantee.spent <= epsilon * (1 + 1e-9)
    Caps.check(strategy, epsilon, 1e-5)
    assert strategy.T_history == sorted(strategy.T_history, reverse=True)
    assert len(result.history) == strategy.T_history[-1] + 1 or len(result.history) == len(
        strategy.T_history
    )
    accumulated = sum(line["accumulated"] for line in result.history[1:])
    declined = sum(line["refused"].get("declined", 0) for line in result.history[1:])
    assert accumulated == sum(len(release.clients) for release in strategy.releases)
    assert accumulated + declined == sum(line["asked"] for line in result.history[1:])
    if strategy.fraction_train == 1.0:
        assert declined == 0


def resumable(folder: Path | None, **options: Any) -> UDP:
    own: dict[str, Any] = {"seed": 1, "experiment_id": "e", "run_dir": folder, "beta": 0.8}
    return crd(**{**own, "validation": Script(only_after(1, 3, 4)), **options})


@pytest.mark.parametrize(
    ("after", "options"), [(0, {}), (2, {"noise": "gdp"}), (4, {}), (4, {"patience": 2})]
)
def test_a_resumed_training_is_the_unbroken_one_bit_for_bit(
    after: int, options: dict[str, Any], tmp_path: Path
) -> None:
    whole = resumable(None, **options)
    unbroken = run(whole, 10, insecure_seed=4)

    def kill(line: dict[str, Any]) -> None:
        if line["round"] == after:
            raise Killed

    for name in ("run", "state"):
        (tmp_path / name).mkdir()
    kept = {"insecure_seed": 4, "state": tmp_path / "state"}
    with pytest.raises(Killed):
        run(resumable(tmp_path / "run", **options, on_round=kill), 10, **kept)
    strategy = resumable(tmp_path / "run", **options, resume=True)
    resumed = run(strategy, 10, **kept)
    assert same(unbroken.arrays, resumed.arrays)
    assert strategy.T_history == whole.T_history
    assert noises(resumed) == noises(unbroken)
    assert strategy.releases == whole.releases
    assert resumed.guarantee == unbroken.guarantee
    assert len(resumed.history) == len(unbroken.history) < 11
    # It is over: a further resume asks nobody, and says the same.
    again = resumable(tmp_path / "run", **options, resume=True)
    assert same(run(again, 10, **kept).arrays, resumed.arrays)
    assert again.T_history == whole.T_history


def test_a_server_that_dies_in_a_validation_validates_the_same_model_again(tmp_path: Path) -> None:
    """`validation_fn` sees a model before its checkpoint; the clients send it once."""
    for name in ("run", "state"):
        (tmp_path / name).mkdir()
    seen: list[ArrayRecord] = []

    def loss_of(server_round: int, arrays: ArrayRecord) -> float:
        if server_round == 2:
            seen.append(arrays)
            if len(seen) <= 3:
                raise Killed
        return 1.0

    for attempt in range(4):
        strategy = resumable(tmp_path / "run", validation=loss_of, resume=attempt > 0)
        try:
            run(strategy, 3, state=tmp_path / "state")
        except Killed:
            assert attempt < 3
    assert len(seen) == 4
    assert all(same(model, seen[0]) for model in seen)
    assert [r.server_round for r in strategy.releases] == [1, 2, 3][: len(strategy.releases)]
    for client, charges in strategy.card().charges().items():
        entries = Ledger(tmp_path / "state" / f"{client}.ledger", data_set=client).entries()
        assert [entry.charge for entry in entries] == charges


def test_a_checkpoint_of_another_rule_is_refused(tmp_path: Path) -> None:
    def kill(line: dict[str, Any]) -> None:
        if line["round"] == 2:
            raise Killed

    with pytest.raises(Killed):
        run(resumable(tmp_path, on_round=kill), 10)
    for options, rounds, text in (
        ({"beta": 0.7}, 10, r"calibrated for beta = 0\.8, not 0\.7"),
        ({"zeta": 0.5}, 10, "calibrated for zeta"),
        ({"patience": 2}, 10, "calibrated for patience"),
        ({"schedule": None, "validation": None, "beta": None}, 10, "calibrated for schedule"),
        ({"schedule": "plateau", "beta": None}, 10, "calibrated for schedule"),
        ({"noise": "gdp"}, 10, "calibrated for noise"),
        ({"validation": "clients"}, 10, "calibrated for validation = None, not {'share'"),
        ({}, 11, "calibrated for rounds = 10, not 11"),
    ):
        with pytest.raises(CheckpointError, match=text):
            run(resumable(tmp_path, resume=True, **options), rounds)


@pytest.mark.parametrize("source", ["server", "clients"])
def test_under_a_users_own_start_it_stops_asking_when_the_rounds_are_done(source: str) -> None:
    class Own(UDP):
        start = Strategy.start

    validated: dict[str, Any] = {"validation": Script() if source == "server" else "clients"}
    options: dict[str, Any] = {
        "seed": 1,
        "schedule": "discounting",
        "beta": 0.4,
        "zeta": 1e9,
        **validated,
    }
    own = make(Own, **options, rounds=9)
    models: list[ArrayRecord] = []
    numpy_app = numpy_client_app(
        lambda context: UDPClient(StepClient(int(context.node_config["partition-id"])), context)
    )
    watched = {"evaluate_fn": lambda _, arrays: models.append(arrays)}
    run_strategy(own, numpy_app, num_rounds=9, **watched)
    assert own.stop()
    done = len(own.T_history) - 1
    assert done - own.T_history[-1] in (0, 1)
    trained = [release.server_round for release in own.releases if release.phase == "train"]
    assert trained == list(range(1, done + 1))
    assert done < 9
    if source == "server":
        twin = crd(**{**options, "validation": Script()})
        run(twin, 9)
        assert own.T_history == twin.T_history
        assert [r.charge for r in own.releases] == [r.charge for r in twin.releases]
    for before, after in zip(models[done:-1], models[done + 1 :], strict=True):
        assert same(before, after)
    assert own.card(final=True).verify()


@pytest.mark.parametrize(
    ("calibrated", "end", "planned"), [(False, 0.0, 10), (False, 0.5, 13), (True, 0.5, 20)]
)
def test_F24_leis_linear_decay(calibrated: bool, end: float, planned: int) -> None:
    """Rounds until the squares of 1 / (1 - (1 - end) t / 20) add up to 20."""
    strategy = UDP(
        privacy=UserLevel(epsilon=4.0),
        schedule=LinearNoise(end=end, calibrated=calibrated),
        loop=LoopOptions(seed=1),
    )
    result = run(strategy, 20)
    z = noises(result)
    assert len(z) == planned
    uniform = UDP(privacy=UserLevel(epsilon=4.0), loop=LoopOptions(seed=1), rounds=20)
    run(uniform, 1)
    assert uniform.terms is not None
    first = uniform.terms.noise_multiplier
    shape = [1 - (1 - end) * t / 20 for t in range(planned)]
    if calibrated:
        first *= math.sqrt(sum(s**-2 for s in shape) / 20)
    assert z == pytest.approx([first * s for s in shape], rel=1e-9)
    assert result.guarantee.spent <= 4.0 * (1 + 1e-9)
    Caps.check(strategy, 4.0, 1e-5)
    if calibrated:
        assert result.guarantee.spent == pytest.approx(4.0, rel=1e-6)
    assert [line["scheme"]["T"] for line in result.history[1:]] == [planned] * planned
    assert [line["accumulated"] for line in result.history[1:]] == [4] * planned


def test_lei_to_the_end_at_full_noise_is_a_training_without_decay() -> None:
    same_run: dict[str, Any] = {"seed": 1, "experiment_id": "e"}
    plain = run(make(UDP, **same_run), 3, insecure_seed=3)
    for calibrated in (False, True):
        schedule = LinearNoise(end=1.0, calibrated=calibrated)
        decaying = run(make(UDP, **same_run, schedule=schedule), 3, insecure_seed=3)
        assert same(plain.arrays, decaying.arrays)


@pytest.mark.parametrize("source", ["server", "clients"])
def test_leis_plateau_lowers_the_noise_where_the_loss_does_not_fall(source: str) -> None:
    if source == "server":
        strategy = UDP(
            privacy=UserLevel(),
            schedule=PlateauNoise(validation=Script(only_after(1, 2, 5))),
            loop=LoopOptions(seed=1),
        )
        result = run(strategy, 10)
        z = noises(result)
        steps = [1, 1, 0.8, 0.64, 0.64, 0.64, 0.512]
        assert z == pytest.approx([z[0] * s for s in steps[: len(z)]], rel=1e-9)
        # 10 units: 1 + 1 + 1.5625 + 3 * 2.44 = 10.9 is too much, 8.45 is not.
        assert len(z) == 5
    else:
        strategy = UDP(
            privacy=UserLevel(),
            schedule=PlateauNoise(validation=ClientLosses()),
            loop=LoopOptions(seed=1),
        )
        run(strategy, 4)
    assert strategy.card(final=True).verify()
    Caps.check(strategy, 8.0, 1e-5)


def test_it_goes_with_a_servers_optimiser() -> None:
    script = Script(only_after(1))
    strategy = crd(validation=script, beta=0.5, inner=FedAdam(eta=0.1))
    result = run(strategy, 6)
    assert strategy.T_history == [6, 6, 3, 3]
    assert same(script.asked[-1][1], result.arrays)  # what the optimiser made is validated


@pytest.mark.parametrize("shared", [False, True])
def test_it_goes_with_a_secure_sum_and_with_cohorts(shared: bool) -> None:
    results, strategies = [], []
    for nodes in (4, 2):
        strategy = crd(
            validation=Script(only_after(0, 2)),
            beta=0.7,
            experiment_id="e",
            secure_sum=SecureSum(),
            shared_noise=shared,
            **({"clients": 4} if nodes == 2 else {}),
        )
        results.append(run(strategy, 7, nodes=nodes, insecure_seed=2))
        strategies.append(strategy)
    one, two = results
    assert same(one.arrays, two.arrays)
    assert strategies[0].T_history == strategies[1].T_history == [7, 4, 4, 3]
    assert [line["scheme"]["sum_opened"] for line in one.history] == [0, 4, 4, 4]
    assert noises(one) == pytest.approx(
        noise_by_25(strategies[0].T_history, 7, noises(one)[0]), rel=1e-9
    )
    assert one.guarantee.spent == two.guarantee.spent <= 8.0 * (1 + 1e-9)


def test_a_round_without_a_secure_sum_is_done_as_well() -> None:
    """Nobody deals in round 1: it is skipped like any other, and discounts nothing."""
    strategy = crd(validation=Script(only_after()), secure_sum=SecureSum(), deadline=1.0, beta=0.5)
    faults = [Fault(kind="drop", phase="keys", server_round=1)]
    result = run(strategy, 3, faults=faults)
    assert [line.get("skipped") for line in result.history] == [None, True, False, False]
    assert strategy.T_history == [3] * 4


JUDGED = {"schedule": "discounting", "validation": "clients"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"schedule": "discounting"}, "validation = None: expected 'clients', or a function"),
        ({"schedule": Discounting}, "expected Discounting(...) or LinearNoise(...)"),
        ({"schedule": "plateau"}, "validation = None"),
        ({"schedule": "plateau", "validation": 3}, "validation = 3: expected a function"),
        ({"schedule": "linear", "validation": Script()}, "only with schedule=discounting"),
        ({"schedule": "linear", "noise": "gdp"}, "noise = 'gdp': expected 'gdp_fixed' or 'paper'"),
        ({"schedule": "nothing"}, "schedule = 'nothing'"),
        ({"schedule": "linear", "end": -0.1}, "= -0.1"),
        ({**JUDGED, "beta": 1.0}, "beta = 1.0"),
        ({**JUDGED, "zeta": -1.0}, "zeta = -1.0"),
        ({**JUDGED, "patience": 0}, "patience = 0"),
        ({"beta": 0.5}, "UDP has no 'beta': only with schedule=discounting"),
        ({**JUDGED, "validation": "both"}, "validation = 'both'"),
        ({**JUDGED, "loss_cap": 0.0}, "loss_cap = 0.0"),
        ({**JUDGED, "loss_cap": math.nan}, "loss_cap = nan"),
        ({**JUDGED, "share": 1.0}, "share = 1.0"),
        (
            {"schedule": "discounting", "validation": "clients", "secure_sum": SecureSum()},
            "validation = 'clients': expected a function on the server with a secure sum",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParameterError) as error:
        make(UDP, **options)
    assert text in str(error.value)
