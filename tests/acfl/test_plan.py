"""What a training asks: noise for a budget, sensitivities, grids with room, promises, refusals."""

import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from acfl_app import Array, Node, gradient_terms, set_noise, setup_terms, wish_of
from apps import make
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flwr_privacy.acfl import scfl
from flwr_privacy.acfl.descent import effective_rate
from flwr_privacy.acfl.guarantee import guarantee_of, setup_privacy
from flwr_privacy.acfl.sums import GRADIENT, SIZE, round_sums
from flwr_privacy.acfl.terms import GradientTerms, SetupTerms
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.privacy.grid import CodeGrid
from flwr_privacy.privacy.noise import discrete_gaussian
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.strategies import ACFL

SEED = 11

# -- The budget ----------------------------------------------------------------------------------


def epsilon_of(multipliers: Sequence[tuple[float, int]], delta: float) -> float:
    """Return the epsilon of Gaussian mechanisms, each so many times, by Google's accountant."""
    total = None
    for multiplier, times in multipliers:
        one = privacy_loss_distribution.from_gaussian_mechanism(
            multiplier, value_discretization_interval=1e-3
        ).self_compose(times)
        total = one if total is None else total.compose(one)
    assert total is not None
    return float(total.get_epsilon_for_delta(delta))


@pytest.mark.parametrize(
    ("options", "rounds"),
    [
        ({"epsilon": 8.0}, 20),
        ({"epsilon": 1.0, "delta": 1e-6, "setup_share": 0.2}, 50),
        ({"epsilon": 3.0, "setup_share": 0.9, "feature_norm": 0.7, "one_hot": True}, 3),
        ({"epsilon": 2.0, "alpha": 0.0}, 10),
        ({"epsilon": 2.0, "alpha": 1.0}, 10),
    ],
)
def test_a_plan_costs_its_budget_by_another_accountant(options: Any, rounds: int) -> None:
    """What is charged is the noise over the sensitivity, worked out here from the data's bounds."""
    releases, gap = [], 0.0
    if options.get("alpha") != 0:
        setup = setup_terms(**options, rounds=rounds)
        R, S = setup.feature_norm, setup.label_norm
        mu = math.hypot(R * R / setup.sigma_features, R * S / setup.sigma_labels)
        releases.append((1 / mu, 1))
        gap += setup.gap
    if options.get("alpha") != 1:
        gradient = gradient_terms(**options, rounds=rounds)
        z = gradient.sigma / (gradient.clipping_norm * math.hypot(1, 0.1))
        releases.append((z, rounds))
        gap += rounds * gradient.gap
    found = epsilon_of(releases, options.get("delta", 1e-5)) + gap
    assert found == pytest.approx(options["epsilon"], rel=5e-3)
    assert found <= options["epsilon"] * (1 + 1e-4)  # of that accountant's own rounding up


@pytest.mark.parametrize("share", [0.01, 0.5, 0.8])
def test_the_setup_has_its_share_of_the_budget_half_for_either_moment(share: float) -> None:
    setup, gradient = (make(setup_share=share, rounds=7) for make in (setup_terms, gradient_terms))
    features, labels = setup.sensitivities()
    parts = [(features / setup.sigma_features) ** 2, (labels / setup.sigma_labels) ** 2]
    assert parts[0] == pytest.approx(parts[1])
    rounds = 7 / gradient.noise_multiplier**2
    assert sum(parts) / (sum(parts) + rounds) == pytest.approx(share)
    charge = setup.charge()
    assert charge is not None
    assert charge.noise_multiplier == pytest.approx(1 / math.sqrt(sum(parts)))


@pytest.mark.parametrize(
    ("options", "variances"),
    [
        ({"mi_epsilon": 0.1}, (144.500575, 144.500575)),
        ({"mi_epsilon": 10.0}, (1.007021, 1.007021)),
        ({}, (14.005747, 14.005747)),  # 1 nat
        ({"bound": "tight"}, (4.656893, 4.656893)),
        ({"split": "optimal", "model_bound": 0.2}, (117.820, 4.9518)),
        ({"noise": "variances", "sigma1_sq": 3.0, "sigma2_sq": 0.25}, (3.0, 0.25)),
    ],
)
def test_F2_F3_F20_the_papers_noise(options: Any, variances: Any) -> None:
    terms = setup_terms(features=10, labels=10, **{"noise": "paper", **options})
    found = terms.sigma_features**2, terms.sigma_labels**2
    assert found == pytest.approx(variances, rel=1e-5)


@pytest.mark.parametrize(("bound", "epsilon"), [("paper", 22.59), ("tight", 48.65)])
def test_one_nat_of_an_entry_is_much_more_for_a_record(bound: str, epsilon: float) -> None:
    """The addendum: ten features and labels in [-1, 1], a record added or removed."""
    terms = setup_terms(noise="paper", features=10, labels=10, mi_epsilon=1.0, bound=bound)
    told = setup_privacy(terms, bound=bound)
    assert told["mi_epsilon"] == pytest.approx(1.0, rel=1e-4)
    assert told["mi_epsilon"] >= 1.0
    assert told["record_epsilon"] == pytest.approx(epsilon, abs=0.01)
    wanted = {"noise": "paper", "epsilon": 8.0, "delta": 1e-5, "setup": terms, "bound": bound}
    usual = {"exact_rounds": 2, "summed": False, "quorum": None, "coded_only": False}
    text = guarantee_of(**wanted, **usual, insecure=False).text()
    assert f"({told['record_epsilon']:.4g}, 1e-05)-differential privacy" in text
    assert "a weak guarantee" in text


# -- By how much a record moves an answer --------------------------------------------------------


def codes(terms: SetupTerms | GradientTerms, data: Any, model: Any = None) -> Array:
    """Return a client's answer before its noise, as one vector."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        set_noise(patch, {}, (1.0, 1.0))
        node = Node(Path(folder), data, excess="clip")
        if isinstance(terms, SetupTerms):
            arrays, _ = node.set_up(terms)
        else:
            arrays, _ = node.descend(terms, model)
    values = np.concatenate([arrays[name].reshape(-1) for name in sorted(arrays)])
    return CodeGrid(terms.grid).step * values.astype(float)


def moments_apart(terms: SetupTerms, data: Any, more: Any) -> tuple[float, float]:
    apart = codes(terms, more) - codes(terms, data)
    size = terms.entries - terms.features * terms.labels  # the labels' come after the features'
    return float(np.linalg.norm(apart[:size])), float(np.linalg.norm(apart[size:]))


SCALES = st.sampled_from([1e-3, 0.5, 1.0, 30.0, 1e8])


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**32),
    records=st.integers(1, 5),
    scale=SCALES,
    extreme=SCALES,
    symmetric=st.booleans(),
    norms=st.sampled_from([{}, {"feature_norm": 0.6, "label_norm": 0.3}, {"feature_bound": 0.2}]),
)
def test_a_record_moves_the_moments_by_no_more_than_the_sensitivity(
    seed: int, records: int, scale: float, extreme: float, symmetric: bool, norms: Any
) -> None:
    draws = np.random.default_rng(seed)
    X, Y = (draws.normal(size=(records + 1, n)) * scale for n in (3, 2))
    X[-1] *= extreme
    Y[-1] *= extreme
    terms = setup_terms(symmetric_noise=symmetric, epsilon=5.0, **norms)
    found = moments_apart(terms, (X[:-1], Y[:-1]), (X, Y))
    assert all(a <= b for a, b in zip(found, terms.sensitivities(), strict=True))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**32),
    records=st.integers(1, 5),
    scale=SCALES,
    extreme=SCALES,
    size=st.sampled_from([0.0, 0.3, 1e3, math.inf]),
    clipping=st.sampled_from([1e-3, 0.4, 7.0]),
)
def test_a_record_moves_a_gradient_by_no_more_than_the_sensitivity(
    seed: int, records: int, scale: float, extreme: float, size: float, clipping: float
) -> None:
    draws = np.random.default_rng(seed)
    X, Y = (draws.normal(size=(records + 1, n)) * scale for n in (3, 2))
    X[-1] *= extreme
    terms = gradient_terms(alpha=0.0, clipping_norm=clipping, epsilon=5.0)
    model = draws.normal(size=(3, 2))
    model *= min(size, 0.99 * largest_model(terms) / np.linalg.norm(model))
    apart = codes(terms, (X, Y), model) - codes(terms, (X[:-1], Y[:-1]), model)
    assert np.linalg.norm(apart) <= terms.sensitivity()


def largest_model(terms: GradientTerms) -> float:
    """Return the norm from which on rounding may move a sum by a thousandth of the clipping norm.

    That is d times the unit roundoff of ``m R_X (R_X |W| + R_Y)``.
    """
    slope = terms.features * 2.0**-53 * terms.max_records * terms.feature_norm
    return (1e-3 * terms.clipping_norm / slope - terms.label_norm) / terms.feature_norm


@pytest.mark.filterwarnings("ignore:overflow")
def test_a_model_so_large_that_rounding_would_show_is_refused(tmp_path: Path) -> None:
    node = Node(tmp_path)
    terms = gradient_terms(alpha=0.0, epsilon=5.0)
    direction = np.ones((3, 2)) / math.sqrt(6)
    for size in (1.01 * largest_model(terms), 1e200):
        with pytest.raises(InvalidParameterError, match="rounding could exceed"):
            node.descend(terms, direction * size)
    assert (node.loaded, node.entries()) == (0, [])
    node.descend(terms, direction * 0.99 * largest_model(terms))
    node.descend(gradient_terms(noise="none", alpha=0.0), direction * 1e100)  # exact: no matter


def test_the_sensitivities_are_reached() -> None:
    corner = np.ones((1, 3)), np.ones((1, 2))
    both = np.ones((2, 3)), np.ones((2, 2))
    terms = setup_terms(epsilon=5.0)
    found = moments_apart(terms, corner, both)
    assert found == pytest.approx((3.0, math.sqrt(6)))
    assert found == pytest.approx(terms.sensitivities(), rel=1e-6)
    gradient = gradient_terms(alpha=0.0, clipping_norm=0.5)
    apart = codes(gradient, both) - codes(gradient, corner)
    assert np.linalg.norm(apart) == pytest.approx(0.5 * math.hypot(1, 0.1))
    # A thousandth is for rounding.
    assert 1.001 * np.linalg.norm(apart) == pytest.approx(gradient.sensitivity(), rel=1e-6)


# -- The noise -----------------------------------------------------------------------------------

WIDE = {"features": 60, "labels": 50, "max_records": 20}


def insecure(phase: str, server_round: int) -> SecureRandom:
    return SecureRandom.insecure(SEED, "noise", "a", "e", phase, server_round, 0)


@pytest.mark.parametrize("parties", [0, 4])
@pytest.mark.parametrize(
    "options",
    [{"epsilon": 3.0}, {"noise": "variances", "sigma1_sq": 0.7, "sigma2_sq": 0.2}],
    ids=["record", "paper"],
)
def test_the_noise_of_a_setup_is_exact_and_of_the_stated_size(
    options: Any, parties: int, tmp_path: Path
) -> None:
    """It is discrete, on codes that were truncated before; in a sum it is a share of the whole."""
    draws = np.random.default_rng(0)
    X, Y = draws.uniform(-1, 1, (20, 60)), draws.uniform(-1, 1, (20, 50))
    terms = setup_terms(**options, **WIDE, parties=parties)
    node = Node(tmp_path, (X, Y))
    node.config["insecure-seed"] = SEED
    arrays, fields = node.set_up(terms, summed=parties)
    assert fields["metrics"] == {"num-examples": 1, "insecure-noise": 1.0}
    step, random = 2.0**terms.grid, insecure("setup", 0)
    for name, exact, sigma in (
        ("features", X.T @ X, terms.sigma_features),
        ("labels", X.T @ Y, terms.sigma_labels),
    ):
        share = sigma / math.sqrt(parties or 1)
        assert share / step > 4
        noise = discrete_gaussian(exact.size, share / step, random).reshape(exact.shape)
        np.testing.assert_array_equal(arrays[name], np.trunc(exact / step).astype(int) + noise)
        off = arrays[name] * step - exact
        size = off.size
        assert abs((off**2).mean() / share**2 - 1) < 5 * math.sqrt(2 / size)
        assert abs(off.mean()) < 5 * share / math.sqrt(size)
    if not parties:
        assert arrays["features"].dtype == np.int32


@pytest.mark.parametrize("parties", [0, 4])
def test_the_noise_of_a_gradient_is_exact_and_of_the_stated_size(
    parties: int, tmp_path: Path
) -> None:
    X, Y = np.eye(20, 60), np.zeros((20, 50))
    terms = gradient_terms(
        model=np.zeros((60, 50)), alpha=0.0, epsilon=3.0, clipping_norm=0.3, parties=parties
    )
    node = Node(tmp_path, (X, Y))
    node.config["insecure-seed"] = SEED
    share = terms.noise_multiplier * 0.3 * math.hypot(1, 0.1) / math.sqrt(parties or 1)
    step, random, squares = 2.0**terms.grid, insecure("train", 1), []
    arrays, _ = node.descend(terms, summed=parties)
    for name, size in (("gradient", 3000), ("size", 1)):
        noise = discrete_gaussian(size, terms.share_of(terms.sigma) / step, random)
        np.testing.assert_array_equal(arrays[name].reshape(-1), noise)
        squares.append((noise * step) ** 2)
    assert abs(squares[0].mean() / share**2 - 1) < 5 * math.sqrt(2 / 3000)


def test_without_a_seed_the_noise_is_new_every_time(tmp_path: Path) -> None:
    answers = []
    for experiment in ("e", "f"):
        node = Node(tmp_path, (np.ones((1, 3)), np.ones((1, 2))))
        arrays, fields = node.set_up(setup_terms(epsilon=3.0), **{"experiment-id": experiment})
        answers.append(arrays["features"])
        assert fields["metrics"] == {"num-examples": 1}
    assert (answers[0] != answers[1]).all()


@pytest.mark.parametrize("parties", [0, 3])
@pytest.mark.parametrize("noise", ["record", "paper", "none"])
def test_codes_have_room_for_the_largest_data(noise: str, parties: int) -> None:
    """As many records as there may be, all at their bounds and all alike."""
    wish = {"noise": noise, "max_records": 50, "feature_bound": 0.5, "label_bound": 2.0}
    X, Y = np.full((50, 3), 0.5), np.full((50, 2), -2.0)
    model = np.full((3, 2), 4.0)
    setup = setup_terms(**wish, parties=parties)
    gradient = gradient_terms(**wish, model=model, parties=parties)
    for terms in (setup, gradient):
        if not terms.coded:
            continue
        with tempfile.TemporaryDirectory() as folder:
            node = Node(Path(folder), (X, Y))
            if isinstance(terms, SetupTerms):
                arrays, _ = node.set_up(terms, summed=parties)
            else:
                arrays, _ = node.descend(terms, model, summed=parties)
        assert max(np.abs(array).max() for array in arrays.values()) < 2**31 - 1


# -- What the server makes of it -----------------------------------------------------------------


def test_the_size_of_noised_gradients_is_that_of_their_mean_norm() -> None:
    """Equal gradients: the sum of squares, in the mean over the noise, within 5 standard errors."""
    terms = gradient_terms(alpha=0.0, epsilon=30.0, batch_fraction=0.5)
    draws, found = np.random.default_rng(0), []
    for _ in range(5000):
        noise = draws.normal(size=6).sum() * terms.sigma
        sums = {GRADIENT: np.full((3, 2), 6.0), SIZE: np.array([6 * 0.1 * 10.0 + noise])}
        told = round_sums(sums, 6, terms)
        np.testing.assert_array_equal(told.gradient, np.full((3, 2), 12.0))
        found.append(told.squares)
    error = np.std(found) / math.sqrt(len(found))
    assert abs(np.mean(found) - 6 * 10.0**2 / 0.5**2) < 5 * error
    assert error < 0.02 * np.mean(found)  # the noise alone makes a tenth of it


@pytest.mark.parametrize(
    ("rate", "q", "expected"),
    [(0.2, 1.0, 0.2), (0.2, 0.5, 0.6), (None, 0.5, None), ({"a": 0.0}, 0.25, {"a": 0.75})],
)
def test_who_is_not_asked_is_missing_too(rate: Any, q: float, expected: Any) -> None:
    assert effective_rate(rate, q) == expected


# -- What does not go together -------------------------------------------------------------------

BOUNDED = {"alpha": "bounds", "gradient_bound": 1.0, "model_bound": 1.0}
OPTIMAL = {"noise": "paper", "split": "optimal", "model_bound": 1.0}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"straggler_rate": 1.0},
            "straggler_rate = 1.0: expected a number of at least 0 and",
        ),
        ({"straggler_rate": -0.1}, "straggler_rate = -0.1"),
        ({"straggler_rate": {"0": 0.1, "1": 1.0}}, "straggler_rate = 1.0"),
        ({"straggler_rate": math.nan}, "straggler_rate = nan"),
        ({"straggler_rate": "0.2"}, "straggler_rate = '0.2'"),
        ({"noise": "variances", "sigma1_sq": -1.0, "sigma2_sq": 1.0}, "sigma1_sq = -1.0"),
        ({"noise": "variances", "sigma1_sq": 1.0, "sigma2_sq": math.inf}, "sigma2_sq = inf"),
        ({"noise": "variances", "sigma1_sq": 1.0}, "sigma2_sq = None: expected both variances"),
        ({"noise": "variances", "sigma1_sq": 1.0, "sigma2_sq": 1.0, "mi_epsilon": 1.0}, "only"),
        ({"noise": "paper", "mi_epsilon": 0.0}, "mi_epsilon = 0.0"),
        ({"mi_epsilon": 1.0}, "ACFL has no 'mi_epsilon': only with noise=paper"),
        ({"noise": "none", "sigma1_sq": 1.0, "sigma2_sq": 1.0}, "only with noise=variances"),
        ({"noise": "some"}, "noise = 'some'"),
        ({"noise": "paper", "bound": "loose"}, "bound = 'loose'"),
        ({"noise": "paper", "epsilon": 8.0}, "ACFL has no 'epsilon': only with noise=record"),
        ({"gradient_bound": 1.0}, "gradient_bound = 1.0: expected None, unless alpha"),
        ({"split": "optimal"}, "ACFL has no 'split': only with noise=paper"),
        ({"noise": "paper", "split": "optimal"}, "model_bound = None: expected a bound"),
        ({**OPTIMAL, "sigma1_sq": 1.0}, "ACFL has no 'sigma1_sq': only with noise=variances"),
        ({**OPTIMAL, "bound": "tight"}, "'equal' with the tight bound"),
        ({**OPTIMAL, "symmetric_noise": True}, "'equal' with encoding = 'scfl' or symmetric"),
        ({**OPTIMAL, "encoding": "scfl", "alpha": 0.5}, "split = 'optimal': expected 'equal'"),
        ({"encoding": "scfl"}, "encoding = 'scfl': expected 'moments' where noise = 'record'"),
        ({"encoding": "scfl", "noise": "paper"}, "alpha = 'estimated': expected a number"),
        ({"alpha": "best"}, "alpha = 'best'"),
        ({"alpha": 1.5}, "alpha = 1.5"),
        ({"alpha": -0.1}, "alpha = -0.1"),
        ({"alpha": "bounds"}, "gradient_bound = None: expected a bound"),
        ({**BOUNDED, "model_bound": None}, "model_bound = None: expected a bound"),
        ({"project": True}, "model_bound = None: expected a bound, with project = True"),
        ({"alpha": 0.0}, "learning_rate = None: expected a step size"),
        ({"learning_rate": 0.0}, "rate = 0.0"),
        ({"schedule": "sometimes"}, "schedule = 'sometimes'"),
        ({"shift": 5.0}, "shift = 5.0: expected None without schedule='shifted'"),
        ({"schedule": "inverse", "shift": 200.0}, "shift = 200.0: expected None"),
        ({"schedule": "shifted", "shift": 0.0}, "shift = 0.0: expected a number above 0"),
        ({"ridge": -1.0}, "ridge = -1.0"),
        ({"epsilon": 0.0}, "epsilon = 0.0"),
        ({"delta": 1.0}, "delta = 1.0"),
        ({"setup_share": 1.0}, "setup_share = 1.0"),
        ({"clipping_norm": math.nan}, "clipping_norm = nan"),
        ({"batch_fraction": 0.0}, "batch_fraction = 0.0"),
        ({"feature_bound": 0.0}, "feature_bound = 0.0"),
        ({"label_norm": "1"}, "label_norm = '1'"),
        ({"max_records": 0}, "max_records = 0"),
        ({"rounds": 0}, "rounds = 0"),
        (
            {"secure_sum": SecureSum(), "straggler_rate": {"0": 0.1}},
            "straggler_rate = {'0': 0.1}: expected one rate of all under a secure sum",
        ),
    ],
)
def test_parameters_that_are_not_allowed_are_refused_at_once(options: Any, text: str) -> None:
    with pytest.raises(InvalidParameterError) as error:
        make(ACFL, **options)
    assert text in str(error.value)


@pytest.mark.parametrize("bound", [0.1, 1.0, 4.0])
def test_projected_features_are_noised_for_their_bound(bound: float) -> None:
    options = {"noise": "paper", "encoding": "scfl", "alpha": 0.5, "mi_epsilon": 0.7}
    terms = setup_terms(**options, feature_bound=bound)
    level = scfl.eps_projected(terms.features, terms.sigma_features**2, B_X=bound)
    assert level == pytest.approx(0.7)


def test_a_projection_states_what_is_claimed_of_it_and_what_it_costs() -> None:
    terms = setup_terms(noise="paper", encoding="scfl", alpha=0.5, mi_epsilon=0.7)
    stated = guarantee_of(
        noise="paper",
        epsilon=8.0,
        delta=terms.delta,
        setup=terms,
        bound="paper",
        exact_rounds=3,
        summed=False,
        quorum=None,
        coded_only=False,
        insecure=False,
    )
    text, known = stated.not_protected[-1], {"distance": 2 * terms.feature_norm}
    cost = scfl.features_epsilon(
        terms.features, terms.sigma_features**2, delta=terms.delta, **known
    )
    assert "no epsilon holds for a record" in text
    assert "The level of its noise is 0.7 nats" in text
    assert f"({cost:.4g}, {terms.delta:g})-differential privacy" in text
    assert cost > 0.7


def test_noise_that_is_too_little_for_so_many_records_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match=r"max_records = .* fewer, or more noise"):
        setup_terms(noise="variances", sigma1_sq=1e-9, sigma2_sq=1e-9, max_records=2**20)


@pytest.mark.parametrize(
    "change",
    [
        {"sigma_labels": 0.0},
        {"encoding": "scfl"},
        {"noise": "none", "sigma_features": 0.0},
        {"features": 0},
        {"parties": -1},
        {"grid": 501},
    ],
)
def test_a_setup_that_makes_no_sense_is_none(change: Any) -> None:
    with pytest.raises(InvalidParameterError):
        replace(setup_terms(), **change)


def test_a_wish_says_what_may_not_change_within_an_experiment() -> None:
    one, other = wish_of(alpha="horizon"), wish_of(alpha=0.5, model_bound=2.0)
    assert one.lasting() == other.lasting()
    for alpha in (0.0, 1.0):
        assert wish_of(alpha=alpha).lasting() != one.lasting()
    assert wish_of(**OPTIMAL).lasting() != wish_of(**{**OPTIMAL, "model_bound": 2.0}).lasting()
