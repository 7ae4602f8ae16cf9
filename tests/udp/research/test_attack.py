"""The audit and membership inference through the real halves of UDP.

The noise is from a cryptographic generator, so that every run is another one: what is asserted
fails with the chance that stands beside it.
"""

import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from torch.nn import functional

from flwr_privacy.accounting.gaussian import mu_of
from flwr_privacy.clients import UDPClient
from flwr_privacy.clients.torch import get_arrays, initialise
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.attack import ATTACKS
from flwr_privacy.simulations.research.attacks.setup import AttackOptions
from flwr_privacy.simulations.research.udp import attack as udp
from flwr_privacy.simulations.research.udp.attack_membership import Inferred, infer
from flwr_privacy.simulations.research.udp.canaries import (
    BROKEN,
    Audited,
    WeakNoiseUDPClient,
    audit,
)
from flwr_privacy.simulations.research.udp.training import (
    budget,
    everybody,
    imitate,
    level,
    train_inline,
)
from flwr_privacy.simulations.tasks import tasks
from flwr_privacy.strategies import UDP
from flwr_privacy.udp import RECORD_UNIT, UDPNoisePlan, sensitivity

ROUNDS = 3  # the scores have the same law for any number of rounds


@pytest.fixture(scope="module")
def right() -> Audited:
    return audit(4.0, rounds=ROUNDS)


@pytest.fixture(scope="module")
def broken() -> Audited:
    return audit(4.0, client=WeakNoiseUDPClient, rounds=ROUNDS)


@pytest.fixture(scope="module")
def bare() -> Inferred:
    return infer(None, rounds=60, shadows=10)


@pytest.fixture(scope="module")
def noised() -> Inferred:
    return infer(4.0, rounds=20, shadows=6)


@pytest.mark.parametrize("kind", ["right", "broken"])
def test_the_server_reads_the_coins_in_the_noise_that_was_added(
    kind: str, request: pytest.FixtureRequest
) -> None:
    found: Audited = request.getfixturevalue(kind)
    schedule = UDPNoisePlan(noise="gdp_fixed", epsilon=4.0, delta=1e-5, rounds=ROUNDS, q=1.0)
    # The sensitivity is that of a canary turned: 2 in the unit of the scores.
    sigma = 2 * schedule.noise_multiplier / math.sqrt(ROUNDS)
    sigma /= BROKEN if kind == "broken" else 1
    noise = found.scores - np.where(found.coins, 1, -1)
    size = noise.size
    assert abs(noise.mean()) < 6 * sigma / math.sqrt(size)
    # What is set aside for rounding and for the grid is less than 2 %; 6 standard errors.
    assert -6 / math.sqrt(2 * size) < noise.std() / sigma - 1 < 0.02 + 6 / math.sqrt(2 * size)


def test_correct_noise_passes_the_audit(right: Audited) -> None:
    assert right.ledger == pytest.approx(4.0, rel=1e-3)
    # Over 25 runs the mean was 1.4, with a standard deviation of 0.07.
    assert 0.7 < right.one_run.epsilon < 2.2
    # Above mu, or below 0.8 mu, with a chance of 1 %; 1.06 mu or 0.7 mu with less than 1e-5.
    assert 0.7 * mu_of(4.0, 1e-5) < right.gaussian.mu < 1.06 * mu_of(4.0, 1e-5)


def test_noise_three_times_too_small_is_flagged(broken: Audited) -> None:
    """Missed with less than 1e-9 by both audits together, by the one-run audit with about 1e-4."""
    assert broken.ledger == pytest.approx(4.0, rel=1e-3)  # the ledger does not know
    assert broken.flagged
    assert broken.verdict.startswith("FLAGGED")
    assert broken.one_run.correct >= 985
    assert broken.gaussian.epsilon > 10


@pytest.mark.parametrize("seed", range(1, 4))
def test_it_takes_no_luck(seed: int) -> None:
    run = partial(audit, 2.0, rounds=2, seed=seed)
    # The chance of the one-run audit to flag the one or to miss the other is below 1e-4.
    found = run()
    assert found.one_run.epsilon < found.ledger
    assert run(client=WeakNoiseUDPClient).flagged


def test_beyond_the_ceiling_only_the_gaussian_audit_flags() -> None:
    found = audit(16.0, client=WeakNoiseUDPClient, rounds=2)
    assert found.one_run.epsilon < 5.4 < found.ledger < found.gaussian.epsilon
    assert found.verdict == "FLAGGED*"


def test_without_noise_every_coin_is_read() -> None:
    found = audit(None, rounds=1)
    np.testing.assert_allclose(found.scores, np.where(found.coins, 1, -1), atol=0.05)
    assert found.one_run.correct == found.one_run.guesses
    assert math.isinf(found.ledger)
    assert not found.flagged
    assert found.verdict == "no guarantee"


def test_members_are_found_without_noise(bare: Inferred) -> None:
    """This run has no noise, and is the same every time."""
    ratio = bare.found["LiRA"]
    assert ratio.auc > 0.7
    assert ratio.auc > bare.found["loss"].auc > 0.55
    assert ratio.rates[1].low > 0.1  # more members than others
    assert bare.one_run["LiRA"].epsilon > 0.3
    assert bare.accuracy > 0.7
    assert math.isinf(bare.ledger)
    assert bare.members.sum() == len(bare.members) / 2


def test_with_noise_not_more_than_the_ledger_allows(noised: Inferred) -> None:
    assert noised.ledger == pytest.approx(4.0, rel=1e-3)
    for name, found in noised.found.items():
        # 6 standard errors of an AUC of chance, of 100 members and 100 others.
        assert abs(found.auc - 0.5) < 6 * math.sqrt(201 / (12 * 100**2))
        assert found.epsilon < noised.ledger
        assert noised.one_run[name].epsilon < 1.5


def test_one_run_of_the_command_shows_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(udp, "audit", partial(audit, rounds=1, canaries=600, guesses=150))
    monkeypatch.setattr(udp, "infer", partial(infer, rounds=2, shadows=4))
    options = AttackOptions(task="digits-linear", clients=3, records=12, seed=1, out=tmp_path)
    report = ATTACKS["udp"](options)
    audits, members = report.tables
    assert audits.row_count == 7
    assert "36 members and as many others" in str(members.title)
    (picture,) = report.pictures
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "epsilon 4: the ledger says at most 4.00, the audits prove at least" in report.verdict
    assert "At user level" in report.legend


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: audit(4.0, clients=1), "clients = 1"),
        (lambda: audit(4.0, canaries=10), "guesses = 1000"),
        (lambda: infer(4.0, task="mnist-mlp"), "task = 'mnist-mlp'"),
        (lambda: infer(4.0, records=1000), "records = 1000"),
        (lambda: infer(4.0, shadows=3), "shadows = 3"),
    ],
)
def test_what_is_not_allowed_is_named(call, text: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidParameterError, match=text):
        call()


def test_a_shadow_is_trained_as_the_real_strategy_and_clients_train() -> None:
    """Without noise the models are equal; with it the shadow has the noise that is planned."""
    draws, rounds, step = np.random.default_rng(0), 5, 2.0
    data = [
        (draws.random((20, 64), dtype=np.float32), draws.integers(0, 10, size=20)) for _ in range(3)
    ]
    start = partial(initialise, tasks.task("digits-linear").model, 0)
    models = {}
    for epsilon in (None, 4.0):
        strategy = UDP(privacy=level(epsilon, step), **everybody(3), rounds=rounds)
        models[epsilon] = train_inline(
            strategy, UDPClient, start, data, functional.cross_entropy, rounds
        )
    shadow = partial(imitate, start, data, rounds, learning_rate=step, draws=draws)
    plain = shadow(sigma=0.0)
    moved = 0.0
    for name, array in get_arrays(start()).items():
        np.testing.assert_allclose(plain[name], models[None][name], rtol=0, atol=1e-6)
        moved = max(moved, float(np.abs(plain[name] - array).max()))
    assert moved > 0.05
    (charge,) = {release.charge.noise_multiplier for release in strategy.releases}
    plan = UDPNoisePlan(**budget(4.0), rounds=rounds, q=1.0)
    assert charge == pytest.approx(plan.noise_multiplier, rel=1e-6)
    sigma = charge * sensitivity(RECORD_UNIT, clipping_norm=1.0, learning_rate=step, records=20)
    # What a round of noise in either adds up to: 650 weights, five rounds, a mean of three.
    noised = shadow(sigma=sigma)
    for found in (noised, models[4.0]):
        size = sum(float(((found[name] - plain[name]) ** 2).sum()) for name in plain)
        assert size == pytest.approx(650 * rounds * sigma**2 / 3, rel=0.5)
