"""Central differential privacy, against dp-accounting, closed forms and enumeration."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from flwr_privacy.accounting import Charge, spent
from flwr_privacy.accounting.curves import ORDERS
from flwr_privacy.central_dp.guarantee import guarantee_of
from flwr_privacy.central_dp.plan import CentralDPNoisePlan
from flwr_privacy.central_dp.sensitivity import relation, sensitivity
from flwr_privacy.central_dp.terms import SHARE_REACH, CentralDPTerms
from flwr_privacy.errors import InvalidParameterError, ProtocolError
from flwr_privacy.privacy.adaptive_clipping import (
    COUNT_GRID,
    COUNT_NAME,
    count_code,
    fraction_below,
    next_clipping_norm,
    split,
)
from flwr_privacy.privacy.distributed_noise import summed_gap
from flwr_privacy.privacy.grid import CodeGrid
from flwr_privacy.privacy.noise import discrete_gaussian, discretisation_gap
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.privacy.updates import clip
from flwr_privacy.udp import participations
from flwr_privacy.udp.schedule import GRID_SHARE
from flwr_privacy.wire import fields as records

MODES = list(itertools.product(("distributed", "server"), ("fixed", "poisson")))
PLAIN = [mode for mode in MODES if mode != ("server", "poisson")]
SECRET = {"noise": "server", "sampling": "poisson"}
BUDGET: dict[str, Any] = {"epsilon": 4.0, "delta": 1e-5, "rounds": 60, "q": 0.2}
# What is left of it beside the gap for the grid, which costs both.
LEFT, LEFT_DELTA = 4.0 * (1 - GRID_SHARE), 1e-5 * math.exp(-4.0 * GRID_SHARE)


def epsilon_by(accountant: PLDAccountant | RdpAccountant, event: DpEvent, delta: float) -> float:
    accountant.compose(event)
    return float(accountant.get_epsilon(delta))


@pytest.mark.parametrize(("noise", "sampling"), PLAIN)
@pytest.mark.parametrize("q", [1.0, 0.2])
def test_without_amplification_the_budget_is_spent_and_not_more(
    noise: str, sampling: str, q: float
) -> None:
    schedule = CentralDPNoisePlan(noise=noise, sampling=sampling, **{**BUDGET, "q": q})
    assert schedule.releases == participations(60, q)
    assert schedule.charge().sampling == 1
    single = GaussianDpEvent(schedule.noise_multiplier)
    theirs = SelfComposedDpEvent(single, schedule.releases)
    assert epsilon_by(PLDAccountant(), theirs, LEFT_DELTA) == pytest.approx(LEFT, rel=1e-3)
    whole = spent([schedule.charge()] * schedule.releases, delta=1e-5)
    more = spent([schedule.charge()] * (schedule.releases + 1), delta=1e-5)
    assert LEFT < whole <= 4.0 < more


@pytest.mark.parametrize("q", [0.05, 0.2])
def test_secret_poisson_samples_amplify_and_every_round_is_charged(q: float) -> None:
    schedule = CentralDPNoisePlan(**SECRET, **{**BUDGET, "q": q})
    assert schedule.releases == 60
    assert schedule.charge().sampling == q
    single = PoissonSampledDpEvent(q, GaussianDpEvent(schedule.noise_multiplier))
    theirs = SelfComposedDpEvent(single, 60)
    assert epsilon_by(RdpAccountant(ORDERS), theirs, LEFT_DELTA) == pytest.approx(LEFT, rel=2e-6)
    assert epsilon_by(PLDAccountant(), theirs, LEFT_DELTA) < LEFT
    whole = spent([schedule.charge()] * 60, delta=1e-5, accountant="rdp")
    assert LEFT < whole <= 4.0
    assert spent([schedule.charge()] * 61, delta=1e-5, accountant="rdp") > 4.0


def test_secret_poisson_samples_of_everybody_are_plain_rounds_with_half_the_sensitivity() -> None:
    schedule = CentralDPNoisePlan(**SECRET, **{**BUDGET, "q": 1.0})
    plain = CentralDPNoisePlan(noise="server", sampling="fixed", **{**BUDGET, "q": 1.0})
    assert schedule.noise_multiplier == plain.noise_multiplier
    assert (schedule.relation, plain.relation) == ("add_remove", "replace_one")
    assert 2 * sensitivity(3.0, neighbours="add_remove") == sensitivity(
        3.0, neighbours="replace_one"
    )


@pytest.mark.parametrize(("epsilon", "rounds", "q"), [(2.0, 100, 0.1), (8.0, 500, 0.01)])
def test_pld_would_do_with_5_to_8_percent_less_noise(epsilon: float, rounds: int, q: float) -> None:
    schedule = CentralDPNoisePlan(**SECRET, epsilon=epsilon, delta=1e-6, rounds=rounds, q=q)
    low, high = (
        Charge(
            neighbours="add_remove",
            noise_multiplier=share * schedule.noise_multiplier,
            sampling=q,
            count=rounds,
        )
        for share in (0.92, 0.95)
    )
    assert spent([low], delta=1e-6, accountant="pld") > epsilon
    assert spent([high], delta=1e-6, accountant="pld") < epsilon


@pytest.mark.parametrize(("noise", "sampling"), MODES)
def test_a_client_is_charged_as_often_as_its_budget_is_meant_for(noise: str, sampling: str) -> None:
    schedule = CentralDPNoisePlan(noise=noise, sampling=sampling, **BUDGET)
    assert [n for n in range(100) if schedule.affordable(n)] == list(range(schedule.releases))
    assert schedule.gap * schedule.releases == pytest.approx(GRID_SHARE * 4.0)


def test_at_most_a_tenth_of_epsilon_is_set_aside_for_the_grid() -> None:
    schedule = CentralDPNoisePlan(noise="server", sampling="fixed", **{**BUDGET, "epsilon": 1000.0})
    assert schedule.gap * schedule.releases == pytest.approx(0.1)


@pytest.mark.parametrize("share", [0.01, 0.3])
def test_the_joint_release_costs_what_dp_accounting_says_of_the_two(share: float) -> None:
    schedule = CentralDPNoisePlan(
        noise="distributed", sampling="fixed", **BUDGET, count_share=share
    )
    update, count = schedule.update_noise_multiplier, schedule.count_noise_multiplier
    assert count is not None
    pair = ComposedDpEvent([GaussianDpEvent(update), GaussianDpEvent(count)])
    theirs = epsilon_by(PLDAccountant(), SelfComposedDpEvent(pair, schedule.releases), LEFT_DELTA)
    assert theirs == pytest.approx(LEFT, rel=1e-3)

    secret = CentralDPNoisePlan(**SECRET, **BUDGET, count_share=share)
    update, count = secret.update_noise_multiplier, secret.count_noise_multiplier
    assert count is not None
    pair = ComposedDpEvent([GaussianDpEvent(update), GaussianDpEvent(count)])
    rounds = SelfComposedDpEvent(PoissonSampledDpEvent(0.2, pair), 60)
    theirs = epsilon_by(RdpAccountant(ORDERS), rounds, LEFT_DELTA)
    assert theirs == pytest.approx(LEFT, rel=2e-6)


def test_fixed_clipping_has_no_count() -> None:
    schedule = CentralDPNoisePlan(noise="server", sampling="fixed", **BUDGET)
    assert schedule.count_noise_multiplier is None
    assert schedule.update_noise_multiplier == schedule.noise_multiplier


NORM, FINE, REACH = 1.25, CodeGrid(-3), 5


def contributions() -> list[tuple[np.ndarray, float]]:
    """Return what clients send for all integer updates of a small square: update and half unit."""
    sent = []
    for raw in itertools.product(range(-REACH, REACH + 1), repeat=2):
        vector = np.array(raw, float)
        within = clip(vector, NORM) == 1
        code = count_code(within=within)
        sent.append((FINE.step * FINE.encode(vector), COUNT_GRID.step * code))
    return sent


@pytest.mark.parametrize("neighbours", [None, "zero_out"])
@pytest.mark.parametrize(("noise", "sampling"), MODES)
def test_the_sensitivities_are_the_largest_changes_of_a_sum(
    noise: str, sampling: str, neighbours: str | None
) -> None:
    sent = contributions()
    assert {half for _, half in sent} == {-1.0, 1.0}
    found = relation(neighbours, noise=noise, sampling=sampling)
    others_update, others_half = np.array([0.375, -1.0]), 1.0
    sums = [(others_update + update, others_half + half) for update, half in sent]
    secret = (noise, sampling) == ("server", "poisson")
    if secret or neighbours == "zero_out":  # one client more or less, or with nothing to add
        pairs = [(one, (others_update, others_half)) for one in sums]
    else:  # the data of one client are replaced
        pairs = list(itertools.product(sums, repeat=2))
    updates = max(float(np.linalg.norm(one[0] - other[0])) for one, other in pairs)
    halves = max(abs(one[1] - other[1]) for one, other in pairs)
    allowed = sensitivity(NORM, neighbours=found)
    # Truncation takes up to a step off each of two opposite updates.
    assert allowed - 2.01 * FINE.step <= updates <= allowed
    assert halves == sensitivity(1.0, neighbours=found)
    # And both at once: what the joint release counts on.
    z_u, z_c = split(2.0, 0.3)
    assert z_c is not None
    joint = max(
        math.hypot(
            float(np.linalg.norm(one[0] - other[0])) / (z_u * allowed),
            (one[1] - other[1]) / (z_c * halves),
        )
        for one, other in pairs
    )
    assert 0.8 / 2.0 < joint <= 1 / 2.0


@pytest.mark.parametrize("quantile", [0.3, 0.5, 0.8])
@pytest.mark.parametrize(("noise", "sampling"), MODES)
def test_the_clipping_norm_finds_the_quantile_of_the_norms_through_noise(
    noise: str, sampling: str, quantile: float
) -> None:
    clients, parties, rounds = 200, 150, 250
    terms = CentralDPTerms(
        noise=noise,
        sampling=sampling,
        neighbours=relation(None, noise=noise, sampling=sampling),
        noise_multiplier=1.0,
        count_share=0.01,
        epsilon=4.0,
        delta=1e-5,
        gap=1e-3,
        clipping_norm=1.0,
        grid=-20,
        parties=parties if noise == "distributed" else 1,
    )
    sigma = terms.share_sigmas()[1]
    assert sigma is not None
    noises = clients if noise == "distributed" else 1
    secure = SecureRandom.insecure(0, "count", noise, sampling)
    shares = discrete_gaussian(rounds * noises, sigma / COUNT_GRID.step, secure)
    norms = np.random.default_rng(1).lognormal(mean=2.0, sigma=1.0, size=(rounds, clients))
    norm, visited = 1.0, []
    for own, added in zip(norms, shares.reshape(rounds, noises), strict=True):
        codes = sum(count_code(within=bool(within)) for within in own <= norm) + added.sum()
        below = fraction_below(COUNT_GRID.step * float(codes), clients)
        norm = next_clipping_norm(norm, below, quantile=quantile)
        visited.append(norm)
    # From 1 to e^2 and more, at most 0.2 * 0.8 of a logarithm at a time: 100 rounds are enough.
    late = np.array(visited[100:])
    fractions = (norms < np.median(late)).mean()
    # Cohort and noise (0.05 or 0.1 a round) move the fraction by 0.02 on average over 150 rounds.
    assert fractions == pytest.approx(quantile, abs=0.03)
    assert np.std(np.log(late)) < 0.2


TERMS = CentralDPTerms(
    noise="distributed",
    sampling="fixed",
    neighbours="replace_one",
    noise_multiplier=2.0,
    count_share=0.36,
    epsilon=4.0,
    delta=1e-5,
    gap=1e-4,
    clipping_norm=0.5,
    grid=-20,
    parties=16,
    keep_back=["a", "b"],
)


def changed(**values: Any) -> CentralDPTerms:
    return CentralDPTerms(
        **{**{n: getattr(TERMS, n) for n in CentralDPTerms.__dataclass_fields__}, **values}
    )


def test_shares_together_are_the_noise_of_the_charge() -> None:
    update, count = TERMS.share_sigmas()
    assert count is not None
    # Worked by hand: z_u = 2 / 0.8, z_c = 2 / 0.6; sensitivities 1 and 2; 4 = sqrt(16).
    assert update == pytest.approx(2.5 * 1.0 / 4)
    assert count == pytest.approx(2 / 0.6 * 2 / 4)
    assert TERMS.charge() == Charge(neighbours="replace_one", noise_multiplier=2.0, gap=1e-4)


def test_a_trusted_server_adds_the_whole_noise() -> None:
    secret = {"sampling": "poisson", "sampling_rate": 0.1, "neighbours": "add_remove"}
    terms = changed(noise="server", parties=1, **secret)
    update, count = terms.share_sigmas()
    assert update == pytest.approx(2.5 * 0.5)
    assert count == pytest.approx(2 / 0.6)
    assert terms.charge() == Charge(
        neighbours="add_remove", noise_multiplier=2.0, gap=1e-4, sampling=0.1
    )
    assert changed(noise="server", parties=1, count_share=0.0).share_sigmas() == (2.0, None)


def test_the_gap_of_a_round_is_that_of_the_update_and_the_count() -> None:
    update, count = TERMS.share_sigmas()
    assert count is not None
    own = summed_gap(1000, update * 2**20, 16)
    assert TERMS.grid_gap(1000) == pytest.approx(own + summed_gap(1, count * 2**16, 16))
    assert TERMS.grid_gap(1000) > own
    alone = changed(noise="server", parties=1, count_share=0.0)
    assert alone.grid_gap(1000) == discretisation_gap(1000, 2.0 * 2**20)


def test_shares_of_few_steps_are_refused() -> None:
    with pytest.raises(InvalidParameterError, match=r"sigma = 2\.5: expected .* from 3\.0"):
        changed(grid=-2).grid_gap(10)
    with pytest.raises(InvalidParameterError, match=r"sigma = .*: expected .* from 3\.0"):
        changed(parties=2**40, grid=-60).grid_gap(10)


@pytest.mark.parametrize("terms", [TERMS, changed(keep_back=[]), changed(count_share=0.0)])
def test_terms_survive_the_wire(terms: CentralDPTerms) -> None:
    assert records.read(CentralDPTerms, records.write(terms)) == terms
    assert all("_" not in key for key in records.write(terms))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"noise": "client"}, InvalidParameterError, "noise = 'client'"),
        ({"noise": ["server"]}, ProtocolError, "'noise'"),
        ({"sampling": "shuffled"}, InvalidParameterError, "sampling = 'shuffled'"),
        ({"sampling-rate": 0.5}, InvalidParameterError, r"sampling_rate = 0\.5: expected 1"),
        ({"sampling": "poisson", "sampling-rate": 0.5}, InvalidParameterError, "only a secret"),
        ({"sampling-rate": 0.0}, InvalidParameterError, r"sampling_rate = 0\.0: .* above 0"),
        ({"sampling-rate": 1.5}, InvalidParameterError, r"sampling_rate = 1\.5"),
        ({"noise-multiplier": 0.0}, InvalidParameterError, r"noise_multiplier = 0\.0"),
        ({"noise-multiplier": math.nan}, InvalidParameterError, "noise_multiplier = nan"),
        ({"noise-multiplier": math.inf}, InvalidParameterError, "noise_multiplier = inf"),
        ({"count-share": -0.1}, InvalidParameterError, r"count_share = -0\.1"),
        ({"count-share": 1.0}, InvalidParameterError, r"count_share = 1\.0"),
        ({"epsilon": 0.0}, InvalidParameterError, r"epsilon = 0\.0: expected a number above 0"),
        ({"epsilon": "8"}, ProtocolError, "'epsilon'"),
        ({"epsilon": None}, ProtocolError, "'epsilon'"),
        ({"delta": 1.0}, InvalidParameterError, r"delta = 1\.0"),
        ({"gap": -1.0}, InvalidParameterError, r"gap = -1\.0"),
        ({"clipping-norm": 0.0}, InvalidParameterError, r"clipping_norm = 0\.0"),
        ({"clipping-norm": 1e101}, InvalidParameterError, r"clipping_norm = 1e\+101"),
        ({"grid": 0.5}, ProtocolError, "'grid'"),
        ({"grid": 501}, InvalidParameterError, "grid = 501"),
        ({"parties": 0}, InvalidParameterError, "parties = 0"),
        ({"parties": 2.0}, ProtocolError, "'parties'"),
        ({"noise": "server"}, InvalidParameterError, "parties = 16: expected 1: the server adds"),
        ({"keep-back": "w"}, ProtocolError, "'keep-back'"),
        ({"keep-back": [1]}, ProtocolError, "'keep-back'"),
    ],
)
def test_terms_that_are_refused(change: dict[str, object], error: type, text: str) -> None:
    fields = {k: v for k, v in {**records.write(TERMS), **change}.items() if v is not None}
    with pytest.raises(error, match=text):
        records.read(CentralDPTerms, fields)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"noise": "gdp"}, "noise = 'gdp'"),
        ({"sampling": "all"}, "sampling = 'all'"),
        ({"epsilon": -1.0}, r"epsilon = -1\.0: expected a number above 0"),
        ({"delta": 0.0}, r"delta = 0\.0: expected a number strictly between 0 and 1"),
        ({"rounds": 0}, "rounds = 0"),
        ({"q": 0.0}, r"q = 0\.0: expected a number above 0 and of at most 1"),
        ({"q": 1.1}, r"q = 1\.1"),
        ({"count_share": 0.999}, r"count_share = 0\.999: expected a finite number from 0 to 0\.99"),
    ],
)
def test_a_schedule_of_no_budget_is_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        CentralDPNoisePlan(**{"noise": "server", "sampling": "fixed", **BUDGET, **change})


@pytest.mark.parametrize(("noise", "sampling"), MODES)
def test_zero_out_is_by_name_half_the_distance_of_replaced_data(noise: str, sampling: str) -> None:
    mode = {"noise": noise, "sampling": sampling, **BUDGET}
    usual, named = CentralDPNoisePlan(**mode), CentralDPNoisePlan(**mode, neighbours="zero_out")
    assert named.noise_multiplier == usual.noise_multiplier
    assert named.charge() == replace(usual.charge(), neighbours="zero_out")
    secret = (noise, sampling) == ("server", "poisson")
    assert usual.terms(1.0).sigma() == named.terms(1.0).sigma() * (1 if secret else 2)
    assert usual.relation == ("add_remove" if secret else "replace_one")
    told = {"summed": True, "quorum": None, "kept_back": [], "insecure": False}
    guarantee, plain = guarantee_of(named, **told), guarantee_of(usual, **told)
    assert guarantee.neighbours == "the contribution of one client to the sums is zero"
    assert guarantee.neighbours != plain.neighbours
    # What the same noise is worth for replaced data: half its multiplier.
    charge = replace(
        named.charge(),
        noise_multiplier=named.noise_multiplier / 2,
        neighbours="replace_one",
        count=named.releases,
    )
    epsilon = spent([charge], delta=1e-5, accountant="rdp" if secret else "gdp")
    text = f"half the noise multiplier is worth: epsilon {epsilon:.4g} for all rounds"
    assert any(text in line for line in guarantee.not_protected)
    assert not any("half the noise" in line for line in plain.not_protected)
    assert epsilon > (1.2 if secret else 2) * 4.0


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: sensitivity(0.0, neighbours="add_remove"), r"clipping_norm = 0\.0"),
        (lambda: relation(None, sampling="x", noise="server"), "sampling = 'x'"),
        (lambda: relation("replace_one", **SECRET), "expected one of"),
        (lambda: relation("add_remove", sampling="fixed", noise="server"), "expected one of"),
        (lambda: changed(neighbours="add_remove"), "neighbours = 'add_remove': expected one of"),
    ],
)
def test_values_that_are_not_allowed_are_named(call: Any, text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        call()


def test_codes_have_room_for_twelve_standard_deviations_of_a_share() -> None:
    terms = changed(count_share=0.0)
    update, _ = terms.share_sigmas()
    assert terms.code_limit() == math.ceil((0.5 + SHARE_REACH * update) * 2**20)
    # With little noise on the update and much on the count, the count is what needs the room.
    counted = changed(grid=-6)
    _, count = counted.share_sigmas()
    assert count is not None
    assert counted.code_limit() == math.ceil((1 + SHARE_REACH * count) * 2**16)


def test_where_the_server_adds_the_noise_codes_have_none() -> None:
    terms = changed(noise="server", parties=1)
    assert terms.code_limit() == 2**19
    assert changed(noise="server", parties=1, grid=-3).code_limit() == 2**16


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"gap": 1e-12}, r"grid = -20: expected a finer grid .more grid_bits.: epsilon .* be lost"),
        ({"grid": -35}, r"grid = -35: expected a coarser grid .less grid_bits.: codes up to \d+"),
    ],
)
def test_a_grid_that_does_not_fit_is_refused(change: dict[str, Any], text: str) -> None:
    TERMS.check_grid(1000)
    with pytest.raises(InvalidParameterError, match=text):
        changed(**change).check_grid(1000)


def test_an_array_with_the_name_of_the_count_is_refused() -> None:
    terms = changed(keep_back=[])
    assert terms.names({"w": np.zeros(2), "n": np.array(3)}) == ["w"]
    with pytest.raises(InvalidParameterError, match=r"'flwr-privacy\.count': expected other names"):
        terms.names({"w": np.zeros(2), COUNT_NAME: np.zeros(1)})


def test_the_noise_of_the_sum_is_that_of_all_shares_together() -> None:
    update, _ = TERMS.share_sigmas()
    assert TERMS.sigma() == pytest.approx(update * 4) == pytest.approx(2.5 * 1.0)
