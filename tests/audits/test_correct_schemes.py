"""Schemes that are correct pass their audits, as often as is promised."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from flwr_privacy.accounting.gaussian import epsilon_of
from flwr_privacy.central_dp.correlated.options import BLT
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.attacks.setup import AttackOptions
from flwr_privacy.simulations.research.audits.acfl import acfl_records
from flwr_privacy.simulations.research.audits.attack import report
from flwr_privacy.simulations.research.audits.canaries import KINDS, canary
from flwr_privacy.simulations.research.audits.central import (
    central_sampled,
    central_server,
    central_shares,
)
from flwr_privacy.simulations.research.audits.central_correlated import central_correlated
from flwr_privacy.simulations.research.audits.crowd import CROWDS, crowd
from flwr_privacy.simulations.research.audits.evidence import evidence
from flwr_privacy.simulations.research.audits.m2fdp import m2fdp_devices, m2fdp_zone
from flwr_privacy.simulations.research.audits.observed import Claim, Coins, Released, Session
from flwr_privacy.simulations.research.audits.udp import udp_users
from flwr_privacy.simulations.research.audits.udp_records import udp_records, udp_sampled
from flwr_privacy.simulations.research.audits.verdicts import (
    CANNOT_TELL,
    NOT_REFUTED,
    REFUTED,
    audited,
    holm,
    reported,
)

SUBJECTS: dict[str, Callable[..., Session]] = {
    "udp, users": udp_users,
    "udp, records": udp_records,
    "udp, samples": udp_sampled,
    "central-dp, server": central_server,
    "central-dp, shares": central_shares,
    "central-dp, samples": central_sampled,
    "central-dp, correlated": central_correlated,
    "central-dp, BLT": partial(central_correlated, correlated=BLT()),
    "acfl": acfl_records,
    "m2fdp, devices": m2fdp_devices,
    "m2fdp, zone": m2fdp_zone,
}
SUMS = (
    *("central-dp, server", "central-dp, shares", "central-dp, correlated", "central-dp, BLT"),
    "m2fdp, zone",
)
PLANNED = [canary(kind, 0.5, "planned", number) for number in range(2) for kind in KINDS]
ENTRIES = PLANNED[0].expected.size
PAID = epsilon_of(2 * 0.5 / 0.05 * 7**0.5, 1e-5)  # norm over noise, of replaced data, seven times


def correct(draws: np.random.Generator, *, noise: float = 1.0) -> Session:
    """Return a session of a Gaussian mechanism, without its training."""
    releases = [
        Released(
            place=(number % 3, number // 3),
            kind=own.kind,
            values=own.expected + noise * 0.05 * draws.normal(size=ENTRIES),
            expected=own.expected,
            sigma=0.05,
            blocks=(960, 40, 1),
            canary=own.direction,
            reach=own.reach,
        )
        for number, own in enumerate(PLANNED)
    ]
    claim = Claim(epsilon=PAID, delta=1e-5, budget=PAID, charged=7, turn=2.0)
    thrown = draws.random((5, 40)) < 0.3
    return Session(
        releases=releases,
        claim=claim,
        answered={"train": 7},
        coins=Coins(rate=0.3, thrown=thrown),
    )


def test_at_most_ten_reports_of_a_hundred_accuse_a_correct_mechanism() -> None:
    draws = np.random.default_rng(5)
    reports = [reported({"one": [correct(draws), correct(draws)]})[0] for _ in range(100)]
    accused = [one for one in reports if one.verdict == REFUTED]
    assert len(accused) <= 10, [one.against for one in accused]
    assert all(one.verdict == NOT_REFUTED for one in reports if one not in accused)
    assert all(one.bound < one.claimed for one in reports if one not in accused)


def test_p_values_of_a_correct_mechanism_are_small_as_rarely_as_they_say() -> None:
    draws = np.random.default_rng(6)
    found = [one for _ in range(100) for one in evidence([correct(draws)])]
    small: dict[str, int] = {}
    for one in found:
        small[one.name] = small.get(one.name, 0) + (one.p <= 0.05)
    # With a chance of 5 % each, 14 or more of 100 are as rare as 1 in 2000.
    assert max(small.values()) < 14, small


def test_a_mechanism_with_a_little_less_noise_is_refuted() -> None:
    draws = np.random.default_rng(7)
    audit = audited("less", [correct(draws, noise=0.97), correct(draws, noise=0.97)])
    assert audit.verdict == REFUTED
    assert audit.against[0].name.startswith("noise")


def test_the_real_schemes_pass_in_one_report() -> None:
    # Of a sum there is one canary in a round: two trainings for a bound.
    times = {name: 2 if name in SUMS else 1 for name in SUBJECTS}
    heard = {
        name: [one(insecure_seed=seed) for seed in range(times[name])]
        for name, one in SUBJECTS.items()
    }
    audits = {one.name: one for one in reported(heard)}
    assert {name: one.verdict for name, one in audits.items() if one.against} == {}
    for name, one in audits.items():
        if one.sampled:
            assert (one.verdict, one.bound) == (CANNOT_TELL, 0.0)
        else:
            assert one.verdict == NOT_REFUTED
            assert 0.4 * one.claimed < one.bound < one.claimed, name


def test_noise_of_a_seed_comes_again() -> None:
    audit = audited("seeded", [udp_users(insecure_seed=3, rounds=2) for _ in range(2)])
    assert audit.against[0].name == "noise that comes again in another training"


def test_holm_goes_on_only_after_a_refutation() -> None:
    assert holm([0.04, 0.03, 0.9]) == [False, False, False]
    assert holm([0.001, 0.02, 0.9]) == [True, True, False]
    assert holm([]) == []


def test_nothing_promised_and_nothing_heard_are_told_apart_from_a_pass() -> None:
    session = correct(np.random.default_rng(8))
    open_ = replace(session, claim=replace(session.claim, epsilon=np.inf, charged=0), answered={})
    silent = replace(session, releases=[], coins=None, answered={})
    assert audited("open", [open_]).said == "cannot tell: it promises nothing"
    assert audited("silent", [silent]).said == "cannot tell: too little was heard for a bound"


@pytest.mark.parametrize("name", sorted(CROWDS))
def test_a_crowd_proves_most_of_what_is_claimed(name: str) -> None:
    session = crowd(name, epsilon=200.0, clients=10, rounds=2)
    audit = audited(name, [session])
    assert audit.bound > 50
    assert session.guessed is not None
    assert ((session.guessed.scores > 0) == session.guessed.coins).all()


def test_the_report_refuses_options_without_effect(tmp_path: object) -> None:
    with pytest.raises(InvalidParameterError, match="records"):
        report(AttackOptions(records=3, out=tmp_path))  # type: ignore[arg-type]
    with pytest.raises(InvalidParameterError, match="fedavg"):
        report(AttackOptions(task="fedavg", out=tmp_path))  # type: ignore[arg-type]
