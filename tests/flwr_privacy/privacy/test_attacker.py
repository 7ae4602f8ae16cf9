"""What the privacy card says of an attacker who tells two neighbouring data sets apart."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import norm

from flwr_privacy.accounting import Charge, new_accountant, spent
from flwr_privacy.errors import DataError, InvalidParameterError
from flwr_privacy.privacy.card import CardRelease, PrivacyCard
from flwr_privacy.privacy.card.attacker import (
    DELTAS,
    FALSE_POSITIVES,
    AttackerBound,
    attacker_of,
)
from flwr_privacy.privacy.guarantee import Guarantee


def charge(z: float, count: int = 1, **options: object) -> Charge:
    return Charge(noise_multiplier=z, neighbours="replace_one", count=count, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("mu", [0.05, 0.7, 1.0, 3.0, 9.0])
def test_without_a_sample_it_is_the_best_test_of_two_normal_laws(mu: float) -> None:
    bound = attacker_of([charge(10 / mu, 100)], "gdp")
    assert bound.advantage == pytest.approx(2 * norm.cdf(mu / 2) - 1, rel=1e-9)
    for false, true in zip(FALSE_POSITIVES, bound.true_positives, strict=True):
        best = norm.cdf(norm.ppf(false) + mu)
        assert best - 1e-9 <= true <= best + 1e-6
    for delta, epsilon in zip(DELTAS, bound.epsilons, strict=True):
        assert epsilon == spent([charge(10 / mu, 100)], delta=delta)


@pytest.mark.parametrize(("q", "z"), [(0.3, 0.6), (0.9, 0.4)])
def test_with_a_sample_it_is_the_likelihood_ratio_test_of_two_mixtures(q: float, z: float) -> None:
    """The ratio grows with x, so the best test says yes beyond a threshold."""
    bound = attacker_of([charge(z, sampling=q)], "pld")
    sigma, x = 2 * z, np.linspace(-8, 8, 400_001)
    true, false = ((1 - q) * norm.sf(x, 0, sigma) + q * norm.sf(x, s, sigma) for s in (1, -1))
    assert bound.advantage == pytest.approx(float(np.max(true - false)), abs=1e-5)
    for rate, found in zip(FALSE_POSITIVES, bound.true_positives, strict=True):
        best = float(np.interp(-rate, -false, true))
        assert best - 1e-9 <= found <= best + 1e-4


def test_gaps_count_and_a_bound_of_nothing_is_all_there_is() -> None:
    plain, gapped = (attacker_of([charge(2.0, gap=gap)], "gdp") for gap in (0.0, 0.05))
    # Nothing is proven at epsilon 0, and at the gap it is next to nothing more.
    most = (math.expm1(0.05) + 2 * math.exp(0.05) * plain.advantage) / (math.exp(0.05) + 1)
    assert plain.advantage < gapped.advantage <= most * (1 + 1e-9)
    for one, other in zip(plain.true_positives, gapped.true_positives, strict=True):
        assert one * 1.01 < other < one * 1.2
    # A large gap leaves little of the curve, and the search begins there.
    far = attacker_of([charge(50.0, gap=0.6)], "gdp")
    most = (math.expm1(0.6) + 2 * math.exp(0.6) * math.erf(0.01 / math.sqrt(2))) / (
        math.exp(0.6) + 1
    )
    assert 0.25 < far.advantage <= most * (1 + 1e-6)
    nothing = attacker_of([], "gdp")
    assert (nothing.advantage, nothing.epsilons) == (0.0, (0.0, 0.0, 0.0))
    assert nothing.true_positives == pytest.approx(FALSE_POSITIVES)
    everything = attacker_of([charge(1e-9)], "gdp")
    assert (everything.advantage, set(everything.true_positives)) == (1.0, {1.0})


def card(*charges: Charge) -> PrivacyCard:
    guarantee = Guarantee(
        scheme="udp",
        protects="all data of a client",
        adversary="the server",
        neighbours="anything differs",
        epsilon=8.0,
        delta=1e-5,
    )
    releases = [
        CardRelease(
            phase="train",
            server_round=number,
            request=0,
            charge=one,
            clients=("a", "b") if number == 1 else ("b",),
            unanswered=(),
        )
        for number, one in enumerate(charges, start=1)
    ]
    return PrivacyCard(experiment_id="e", guarantee=guarantee, releases=releases)


def test_a_card_states_it_for_the_client_that_spent_most_by_the_tightest_curve() -> None:
    made = card(charge(2.0), charge(1.0))
    made.state()
    assert made.attacker == attacker_of([charge(2.0), charge(1.0)], "gdp")
    sampled = card(charge(2.0, sampling=0.5))
    sampled.state(["rdp"])
    assert sampled.attacker is not None
    assert sampled.attacker.accountant == "rdp"
    sampled.state()
    assert sampled.attacker.accountant == "pld"
    read = PrivacyCard.from_json(made.to_json())
    assert read.attacker == made.attacker
    bound = made.attacker
    assert bound is not None
    page = made.to_html()
    assert f"at most {bound.advantage:.4g} (gdp)" in page
    assert f"{bound.true_positives[0]:.4g} at 0.01 false positives; " in page
    assert f"{bound.epsilons[2]:.6g} at delta 1e-08" in page


def test_without_an_epsilon_there_is_no_bound_and_a_bad_one_is_no_card() -> None:
    made = card()
    assert PrivacyCard.from_json(made.to_json()).attacker is None
    assert "Attacker" not in made.to_html()
    made = card(charge(1e-9))  # an infinite epsilon has a place of its own in a file
    made.state(["pld"])
    assert PrivacyCard.from_json(made.to_json()).attacker == made.attacker
    document = json.loads(made.to_json())
    for change in ({"advantage": 1.5}, {"accountant": "x"}, {"true_positives": {"0.01": 0.5}}):
        bad = {**document, "attacker": {**document["attacker"], **change}}
        with pytest.raises(DataError, match="no privacy card"):
            PrivacyCard.from_json(json.dumps(bad))


def test_a_card_with_charges_for_different_neighbours_is_none() -> None:
    """Of two clients, too: the larger of their costs would mean nothing."""
    other = Charge(noise_multiplier=2.0, neighbours="zero_out")
    mixed = card(charge(2.0), other)
    with pytest.raises(InvalidParameterError, match="neighbours = 'zero_out': expected 'replace"):
        mixed.state()
    with pytest.raises(DataError, match="neighbours = 'zero_out'"):
        PrivacyCard.from_json(mixed.to_json())
    apart = card(charge(2.0))
    apart.releases.append(replace(apart.releases[0], server_round=2, charge=other, clients=("c",)))
    with pytest.raises(InvalidParameterError, match="neighbours = 'zero_out': expected 'replace"):
        apart.state()


def test_no_point_of_the_curve_gives_a_smaller_bound() -> None:
    """Beside a sweep of the whole curve: the search loses nothing that matters."""
    curve = new_accountant("rdp", [charge(1.3, 5)])
    epsilons = np.linspace(0, -math.log(0.001), 4001)
    least = min(math.exp(e) * 0.001 + curve.delta(float(e)) for e in epsilons)
    found = attacker_of([charge(1.3, 5)], "rdp")
    assert isinstance(found, AttackerBound)
    assert found.true_positives[1] <= least * (1 + 1e-6)
