import math

import numpy as np
import pytest
from mixing_rounds import Transcript, learning_round, terms_of

from flwr_privacy.coding.quantize import SMALLEST_WIDTH, Knobs
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.mspdq import (
    Intervals,
    Mixing,
    SubStates,
    Widths,
    min_levels_linf,
    own_width,
    pi_paper,
    spread_gain,
    width_linf,
    widths_for_bound,
)
from flwr_privacy.privacy.randomness import SecureRandom

HARMONIC = Mixing(gamma=0.25, coupling="harmonic", rounds=12)


def mixed(
    models: np.ndarray,
    mixing: Mixing,
    intervals: Intervals,
    levels: int,
    random: SecureRandom,
    *,
    start: np.ndarray | None = None,
    visible: np.ndarray | None = None,
) -> Transcript:
    """Mix from a common start, or from each client's own split."""
    kind = "independent" if start is None else "global"
    terms = terms_of(mixing, levels=levels, start=kind, interval=intervals.rule)
    return learning_round(terms, models, random, start=start, visible=visible, intervals=intervals)


def relative(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


@pytest.mark.parametrize("coupling", ["harmonic", "sqrt", "const"])
@pytest.mark.parametrize("kappa", [0.1, 0.3, 0.5, 0.8, 0.9])
def test_F15_the_spread_gain_is_the_supremum(kappa, coupling):
    a = [Mixing(coupling=coupling, gamma=0.1).largest_gain(k) for k in range(2000)]
    total, largest = 0.0, 0.0
    for k in range(1, 2000):
        total = (1 - kappa) * total + a[k - 1]
        largest = max(largest, total / a[k])
    assert spread_gain(kappa, coupling) == pytest.approx(largest, rel=1e-9)


def test_F15_the_widths_and_levels_that_never_saturate():
    expected = [(0.1, 19.87), (0.3, 5.8213), (0.5, 10 / 3), (0.8, 2.1), (0.9, 2.0)]
    for kappa, S in expected:
        assert spread_gain(kappa) == pytest.approx(S, rel=1e-4)
    for kappa, factor, levels in ((0.5, 16, 33), (0.3, 14.281, 30), (0.8, 19.296, 40)):
        width = width_linf(kappa, s=3.0, a=0.1)
        assert width == pytest.approx(factor * 0.3, rel=1e-4)
        assert min_levels_linf(kappa) == levels
    assert min_levels_linf(0.5, 4.0) == 20


@pytest.mark.parametrize("coupling", ["harmonic", "sqrt", "const", "random"])
@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("kappa", [0.2, 0.5, 0.8])
def test_F15_nothing_saturates_from_a_common_start(kappa, m, coupling):
    mixing = Mixing(kappa=kappa, gamma=0.2, coupling=coupling, m=m, rounds=15)
    random, draws = SecureRandom.insecure(15), np.random.default_rng(15)
    levels = min_levels_linf(kappa, coupling=coupling)
    assert levels <= 2**7
    for scale in (1e-3, 1.0, 1e3):
        models = scale * draws.standard_t(3, size=(8, 300))
        start = scale * draws.normal(size=300)
        seen = mixed(models, mixing, Intervals(rule="linf"), levels, random, start=start)
        assert seen.saturated == 0
        # The proof's second half: a rounding error is at most c s a[k].
        steps = seen.widths[:, 0] / (levels - 1)
        gains = np.array([mixing.largest_gain(k) for k in range(16)])
        assert np.abs(seen.heard[-1] - seen.visible).max() <= steps[-1] * (1 + 1e-4)
        s = seen.widths[:, 0] / width_linf(kappa, s=1.0, a=1.0, coupling=coupling) / gains[:-1]
        assert (steps <= s * gains[1:] * (1 + 1e-9)).all()


@pytest.mark.parametrize("bits", [3, 4, 5])
def test_F15_in_practice_fewer_bits_are_enough(bits):
    models = np.random.default_rng(1).normal(size=(20, 2000))
    random = SecureRandom.insecure(16)
    linf = Intervals(rule="linf")
    seen = mixed(models, HARMONIC, linf, 2**bits, random, start=models[0] * 1.2)
    assert seen.saturated == 0
    if bits > 3:
        assert mixed(models, HARMONIC, linf, 2**bits, random).saturated == 0


def test_narrower_intervals_do_saturate():
    models = np.random.default_rng(1).normal(size=(20, 200))
    start, narrow = models[0] * 1.2, Intervals(rule="fixed", pi=0.1)
    seen = mixed(models, HARMONIC, narrow, 64, SecureRandom.insecure(1), start=start)
    assert seen.saturated > 1000
    # The clipped values are in the last error alone.
    mean = models.mean(axis=0)
    kept = mean + HARMONIC.residual * (start - mean)
    np.testing.assert_allclose(seen.visible.mean(axis=0), kept, atol=1e-12)


def test_F26_own_widths_with_a_constant_coupling():
    draws = np.random.default_rng(26)
    common = 0.05 * draws.normal(size=20_000)
    models = common + 0.01 * draws.normal(size=(20, 20_000))
    random = SecureRandom.insecure(26)
    for bits, error in ((4, 1e-3), (6, 2e-4), (8, 6e-5)):
        mixing = Mixing(gamma=0.3, rounds=10)
        seen = mixed(models, mixing, Intervals(rule="self"), 2**bits, random)
        assert seen.saturated == 0
        assert relative(seen.averages[-1], models.mean(axis=0)) < error
        assert seen.widths[-1].max() < 0.02 * seen.widths[0].min()


def test_the_papers_widths_run_away_with_few_bits_and_many_weights():
    models = 0.05 * np.random.default_rng(9).normal(size=(20, 20_000))
    mixing, random = Mixing(gamma=0.3, coupling="harmonic", rounds=10), SecureRandom.insecure(9)
    errors = {}
    for rule in ("paper", "linf"):
        seen = mixed(models, mixing, Intervals(rule=rule), 16, random, start=models[0])
        assert seen.saturated == 0
        errors[rule] = np.abs(seen.averages[-1] - seen.visible.mean(axis=0)).max()
    assert errors["linf"] < 0.05 < 10 < errors["paper"]


def test_the_papers_widths_follow_the_largest_norm_of_all_draws():
    widths = Widths(Intervals(rule="paper"), HARMONIC, 64)
    gaps = np.array([[3.0, 4.0], [0.0, 0.0], [6.0, 8.0]])
    scalars = [Intervals(rule="paper").scalar(gap) for gap in gaps]
    assert scalars == [5.0, 0.0, 10.0]
    largest = math.sqrt(2 * 25 + 3 * 100)
    assert widths.next(scalars, [2, 1, 3]) == pytest.approx(0.25 * pi_paper(0.5, largest))
    # Later gaps are smaller; the running maximum stays.
    assert widths.next([1.0, 1.0, 1.0], [2, 1, 3]) == pytest.approx(0.125 * pi_paper(0.5, largest))


def test_starts_that_are_apart_make_the_intervals_wider():
    apart = Widths(Intervals(rule="linf"), HARMONIC, 64, apart=2.0)
    common = Widths(Intervals(rule="linf"), HARMONIC, 64)
    for k in range(4):
        more = apart.next([1.0], [1]) - common.next([1.0], [1])
        assert more == pytest.approx(2 * 0.5 * 0.5**k * 2.0)
    models = np.array([[1.0, 0.0], [3.0, 0.0]])
    visible = np.array([[0.0, 0.0], [4.0, 0.0]])
    linf, random = Intervals(rule="linf"), SecureRandom.insecure(0)
    seen = mixed(models, HARMONIC, linf, 64, random, visible=visible)
    widths = Widths(Intervals(rule="linf"), HARMONIC, 64, apart=2.0)
    assert (seen.widths[0] == widths.next([2.0, 2.0], [1, 1])).all()


@pytest.mark.parametrize("levels", [3, 7, 15, 255])
@pytest.mark.parametrize(
    "mixing",
    [
        Mixing(),
        Mixing(gamma=0.5, rounds=1),
        Mixing(coupling="harmonic", rounds=15),
        Mixing(coupling="sqrt", kappa=0.9, rounds=8),
        Mixing(gamma=0.1, m=4),
        Mixing(gamma=0.4, m=3, mass="normalized"),
    ],
)
def test_no_value_leaves_the_widths_for_a_bound(mixing, levels):
    draws = np.random.default_rng(levels)
    start = draws.normal(size=400)
    bound = 0.37
    for extreme in (False, True):
        updates = draws.uniform(-bound, bound, size=(6, 400))
        models = start + (bound * np.sign(updates) if extreme else updates)
        intervals = Intervals(rule="bound", bound=bound * (1 + 1e-12))
        random = SecureRandom.insecure(levels)
        seen = mixed(models, mixing, intervals, levels, random, start=start)
        assert seen.saturated == 0
        assert (seen.widths[:, 0] == widths_for_bound(mixing, intervals.bound, levels)).all()


def test_the_first_width_for_a_bound_is_the_least_that_holds_all():
    """Two clients at both ends of the bound reach both ends of the interval."""
    models = np.array([[1.0], [1.0]])
    for bound, saturated in ((1.0, 0), (0.99, 2)):
        intervals = Intervals(rule="bound", bound=bound)
        random = SecureRandom.insecure(1)
        seen = mixed(models, Mixing(rounds=1), intervals, 255, random, start=np.zeros(1))
        assert seen.saturated == saturated


def test_the_widths_for_a_bound_shrink_from_4_bits_on():
    for bits in (4, 6, 8):
        widths = widths_for_bound(Mixing(), 1.0, 2**bits - 1)
        assert widths[-1] < 0.2 * widths[0]


def test_scalars_and_own_widths_are_rounded_up_and_never_to_nearest():
    for seed in range(200):
        values = np.random.default_rng(seed).normal(size=5)
        for rule, exact in (("paper", np.linalg.norm(values)), ("linf", np.abs(values).max())):
            scalar = Intervals(rule=rule).scalar(values)
            assert exact <= scalar < exact * (1 + 2.0**-23)
            assert float(np.float32(scalar)) == scalar
        half = own_width(values, np.zeros(5)) / 2
        assert np.abs(values).max() <= half == float(np.float32(half))
    assert Intervals(rule="fixed").scalar(values) == Intervals(rule="self").scalar(values) == 0


def test_own_widths_are_widths_however_little_there_is_to_round():
    zeros = np.zeros(3)
    assert own_width(zeros, zeros) == 0.0
    assert own_width(zeros + 1e-300, zeros) == SMALLEST_WIDTH
    Knobs(width=own_width(zeros + 1e-40, zeros), levels=4)


def test_gaps_are_those_of_the_hidden_substates():
    states = SubStates.split(np.array([1.0, 2.0]), np.array([3.0, 0.0]), weight=2)
    np.testing.assert_array_equal(states.gap(weight=2), [0.0 - 6.0, 6.0 - 0.0])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Intervals(rule="auto"), "interval = 'auto'"),
        (lambda: Intervals(rule="fixed", pi=0.0), r"pi = 0\.0"),
        (lambda: Intervals(rule="linf", c=0.0), r"c = 0\.0"),
        (lambda: Intervals(rule="linf", c=math.nan), "c = nan"),
        (lambda: Intervals(rule="bound", bound=0.0), r"bound = 0\.0"),
        (lambda: widths_for_bound(Mixing(coupling="random"), 1.0, 15), "coupling = 'random'"),
        (lambda: Widths(Intervals(rule="self"), HARMONIC, 64), "interval = 'self'"),
        (
            lambda: Widths(Intervals(rule="linf"), HARMONIC, 64).next([math.nan], [1]),
            "scalar = nan",
        ),
        (
            lambda: Widths(Intervals(rule="paper"), HARMONIC, 64).next([-1.0], [1]),
            r"scalar = -1\.0",
        ),
        (lambda: spread_gain(1.0), r"kappa = 1\.0"),
    ],
)
def test_what_is_refused(make, text):
    with pytest.raises(InvalidParameterError, match=text):
        make()
