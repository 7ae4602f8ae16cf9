import math

import numpy as np
import pytest
from scipy import stats

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.mspdq import NoiseSplit, SubStates, UniformSplit, noised
from flwr_privacy.privacy.randomness import SecureRandom

SIZE = 200_000


def model(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=SIZE)


@pytest.mark.parametrize("eps_s", [0.0, 0.3, 0.7])
def test_F9_factors_of_the_uniform_split(eps_s):
    w = model()
    assert w.min() < 0
    factors = UniformSplit(eps_s=eps_s).visible(w, SecureRandom.insecure(9)) / w
    assert eps_s - 1e-12 <= factors.min() < factors.max() <= 2 - eps_s + 1e-12
    std = (1 - eps_s) / math.sqrt(3)
    assert eps_s != 0.3 or round(std, 4) == 0.4041
    assert abs(factors.mean() - 1) < 4 * std / math.sqrt(SIZE)
    assert factors.std() == pytest.approx(std, rel=0.01)
    # A right sampler fails with one seed in 10,000.
    assert stats.kstest(factors, stats.uniform(eps_s, 2 - 2 * eps_s).cdf).pvalue > 1e-4


def test_the_split_is_that_of_the_papers_experiments_by_default():
    assert UniformSplit() == UniformSplit(eps_s=0.3, m=1)


@pytest.mark.parametrize(("m", "mean"), [(2, 1.5), (5, 3.0)])
def test_F9_the_printed_range_is_biased(m, mean):
    w = model()
    factors = UniformSplit(eps_s=0.3, m=m).visible(w, SecureRandom.insecure(9)) / w
    assert factors.max() <= 1 + m - 0.3 + 1e-12
    assert abs(factors.mean() - mean) < 4 * factors.std() / math.sqrt(SIZE)


@pytest.mark.parametrize("weight", [1, 2, 5])
@pytest.mark.parametrize("split", [UniformSplit(), NoiseSplit(law="laplace", scale=2.0)])
def test_F9_the_sum_rule(weight, split):
    w = model()
    states = SubStates.split(w, split.visible(w, SecureRandom.insecure(1)), weight=weight)
    together = states.visible + states.hidden
    scale = np.abs(states.visible) + (1 + weight) * np.abs(w)
    assert (np.abs(together - (1 + weight) * w) <= scale * 2.0**-52).all()


@pytest.mark.parametrize(
    ("law", "cdf"),
    [("laplace", stats.laplace(scale=0.05).cdf), ("gaussian", stats.norm(scale=0.05).cdf)],
)
def test_noise_has_its_law_and_lies_on_a_grid(law, cdf):
    w = model()
    visible = NoiseSplit(law=law, scale=0.05).visible(w, SecureRandom.insecure(3))
    assert stats.kstest(visible - w, cdf).pvalue > 1e-4
    steps = visible / 2.0 ** (math.floor(math.log2(0.05)) - 30)
    np.testing.assert_array_equal(steps, np.rint(steps))


def test_noise_must_not_be_too_small_for_the_values():
    for value in (1e9, math.nan, math.inf):
        with pytest.raises(
            InvalidParameterError, match=r"scale = 1e-10: expected noise of at least"
        ):
            noised(np.array([value]), "laplace", 1e-10, SecureRandom())
    assert noised(np.zeros(0), "laplace", 1.0, SecureRandom()).size == 0


def test_splits_of_two_streams_differ():
    w = model()[:100]
    for split in (UniformSplit(), NoiseSplit(law="gaussian", scale=0.1)):
        first, other = (split.visible(w, SecureRandom()) for _ in range(2))
        assert (first != other).all()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: UniformSplit(eps_s=1.0),
            r"eps_s = 1\.0: expected a number from 0 up to but not 1",
        ),
        (lambda: UniformSplit(eps_s=-0.1), r"eps_s = -0\.1"),
        (lambda: UniformSplit(m=0), "m = 0: expected an integer of at least 1"),
        (lambda: NoiseSplit(law="uniform", scale=1.0), "split = 'uniform'"),
        (lambda: NoiseSplit(law="laplace", scale=0.0), r"scale = 0\.0"),
        (lambda: NoiseSplit(law="laplace", scale=math.inf), "scale = inf"),
    ],
)
def test_what_no_split_can_be(make, text):
    with pytest.raises(InvalidParameterError, match=text):
        make()
