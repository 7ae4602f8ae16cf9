"""What papers and rivals claim of their noise, beside what it costs: the command, and cards."""

import math
from pathlib import Path
from typing import Any

import pytest
from commands import Command
from dp_accounting.pld import privacy_loss_distribution as pld

from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.simulations.calibration import rival_noise
from flwr_privacy.simulations.calibration.formulas import Calibration, calibrate
from flwr_privacy.simulations.runner.complete_settings import settings_of
from flwr_privacy.simulations.runner.jobs import Engine, carry_out
from flwr_privacy.simulations.settings.run_folder import RunFolder
from flwr_privacy.udp import discount_T

EPSILON, DELTA, ROUNDS = 8.0, 1e-3, 20


def composed(multipliers: list[float]) -> float:
    """Return the epsilon of Gaussian releases by privacy loss distributions."""
    total = None
    for z in multipliers:
        one = pld.from_gaussian_mechanism(z, value_discretization_interval=1e-3)
        total = one if total is None else total.compose(one)
    assert total is not None
    return float(total.get_epsilon_for_delta(DELTA))


def discounted(rounds: int, beta: float) -> list[float]:
    """Return the noise of each round by (25), over the first one's, if no loss ever falls."""
    factors, planned, done, square = [], rounds, 0, 1.0
    while done < planned:
        factors.append(math.sqrt(square))
        after = discount_T(planned, done, beta)
        done += 1
        if after > done:
            square *= (after - done) / (planned - done)
        planned = after
    return factors


def rows(q: float = 1.0) -> dict[str, Calibration]:
    found = calibrate(epsilon=EPSILON, delta=DELTA, rounds=ROUNDS, q=q)
    return {row.formula: row for row in found}


def test_the_paces_of_the_papers_noise_cost_what_their_releases_do() -> None:
    found = rows()
    first = found["paper"].noise_multiplier
    fewer = discounted(ROUNDS, 0.9)
    assert len(fewer) < ROUNDS
    crd = composed([first * factor for factor in fewer])
    assert found["paper, CRD"].every_round == pytest.approx(crd, rel=1e-3)
    spent, decay = 0.0, []
    for t in range(ROUNDS):  # until the budget is used up
        factor = 1 - 0.5 * t / ROUNDS
        spent += factor**-2
        if spent > ROUNDS:
            break
        decay.append(factor)
    lei = composed([first * factor for factor in decay])
    assert found["paper, Lei"].every_round == pytest.approx(lei, rel=1e-3)
    for formula in ("paper, CRD", "paper, Lei"):
        assert found[formula].every_round <= found["paper"].every_round * (1 + 1e-9)


def test_where_clients_are_drawn_a_pace_costs_some_of_them_more() -> None:
    found = rows(q=0.3)
    for formula in ("paper, CRD", "paper, Lei"):
        assert found["paper"].often < found[formula].often <= found[formula].every_round
        assert math.isnan(found[formula].server)


def test_the_command_has_the_rivals_too(command: Command) -> None:
    budget = ("--unit", "record", "--epsilon", "10", "--delta", "0.01", "--rounds", "1")
    done = command("calibrate", "mspdq-ldp", *budget, "--records", "600")
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines()[1:]] == [
        *("10", "11.918", "1.8685e+06")
    ]
    done = command("calibrate", "acfl-scfl", "--unit", "record", "--epsilon", "1", "--size", "10")
    assert [line.split()[:2] for line in done.stdout.splitlines()[1:]] == [
        ["nats", "1"],
        ["epsilon", "64.379"],
        ["epsilon", "inf"],
    ]
    refused = command("calibrate", "mspdq-ldp", "--unit", "user", "--epsilon", "1")
    assert refused.returncode == 2
    assert "unit = 'user': expected record" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        (("mspdq-ldp", "--unit", "record", "--fraction", "0.1"), "fraction = 0.1"),
        (("acfl-scfl", "--unit", "record", "--rounds", "60"), "rounds = 60"),
        (("udp", "--unit", "record", "--size", "10"), "size = 10"),
        (("udp", "--unit", "user", "--records", "10"), "records = 10"),
    ],
)
def test_what_has_no_effect_is_refused(
    command: Command, arguments: tuple[str, ...], refused: str
) -> None:
    done = command("calibrate", *arguments, "--epsilon", "1")
    assert done.returncode == 2
    assert f"{refused}: expected nothing: it has no effect for {arguments[0]}" in done.stderr


@pytest.mark.parametrize("scheme", rival_noise.RIVALS)
def test_a_model_has_weights(command: Command, scheme: str) -> None:
    done = command("calibrate", scheme, "--unit", "record", "--epsilon", "1", "--size", "0")
    assert done.returncode == 2
    assert "size = 0: expected" in done.stderr


def card(folder: Path, **values: Any) -> PrivacyCard:
    """Train, and return the card that the run leaves."""
    settings = settings_of({"clients": 3, "rounds": 3, "train_records": 120, **values})
    run = RunFolder.create(folder / "run", settings, engine="inline", nodes=3)
    carry_out([run], Engine(name="inline"))
    found = PrivacyCard.from_json(run.card_path.read_text())
    found.verify()
    return found


UDP = {
    "scheme": "udp",
    "task": "digits-linear",
    "unit": "user",
    "noise": "paper",
    "strategy.epsilon": EPSILON,
    "strategy.delta": DELTA,
}


@pytest.mark.parametrize(
    "pace",
    [
        {},
        {"schedule": "linear"},
        {"schedule": "linear", "calibrated": True},
        {"schedule": "discounting", "zeta": 1e3, "validation_records": 30},
    ],
    ids=lambda pace: str(pace.get("schedule", "uniform")),
)
def test_a_card_has_the_papers_claim_and_what_its_noise_costs(
    pace: dict[str, Any], tmp_path: Path
) -> None:
    found = card(tmp_path, **UDP, **pace)
    guarantee = found.guarantee
    assert guarantee.epsilon is not None
    assert guarantee.spent is not None
    assert guarantee.not_protected[0] == (
        "the (epsilon = 8) that the paper claims for its noise: all rounds together cost a client "
        f"up to epsilon {guarantee.epsilon:.4g}, whether or not rounds are discounted or noise "
        "decays"
    )
    (own,) = {tuple(charges) for charges in found.charges().values()}
    spent = composed([charge.noise_multiplier for charge in own for _ in range(charge.count)])
    assert spent == pytest.approx(guarantee.spent, rel=2e-3)
    assert spent <= guarantee.epsilon * (1 + 1e-3)
    assert guarantee.epsilon > EPSILON


def test_the_card_of_nbafl_has_its_claim_and_what_it_costs(tmp_path: Path) -> None:
    found = card(
        tmp_path,
        scheme="mspdq-ldp",
        task="digits-linear",
        exposures=3,
        **{"strategy.clipping_norm": 2.0, "strategy.smallest_data": 40},
    )
    sigma = math.sqrt(2 * math.log(125)) * 3 * 4 / 40 / 10
    taken = pld.from_gaussian_mechanism(
        sigma / (0.1 * math.sqrt(3)), value_discretization_interval=1e-4
    ).get_epsilon_for_delta(0.01)
    text = found.guarantee.not_protected[0]
    assert "epsilon 10 at delta 0.01 with exposures = 3" in text
    assert float(text.split(" cost ")[1].split()[0]) == pytest.approx(taken, rel=1e-3)
    assert float(text.split(", and ")[1].split()[0]) > 1000
    assert found.guarantee.epsilon is None


def test_the_card_of_a_projection_has_its_level_and_what_it_costs(tmp_path: Path) -> None:
    found = card(
        tmp_path,
        scheme="acfl",
        task="digits-rff",
        **{"strategy.noise": "paper", "encoding": "scfl", "alpha": 0.5, "mi_epsilon": 2.0},
    )
    (text,) = (each for each in found.guarantee.not_protected if "projection" in each)
    assert "is 2 nats of a feature" in text
    assert "no epsilon holds for a record" in text
