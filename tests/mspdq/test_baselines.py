import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy import stats

from flwr_privacy.coding.packing import pack, packed_bytes
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.mspdq.baselines import JoPEQ, Noising, nbafl_downlink_sigma, nbafl_uplink_sigma
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.simulations.research.mspdq.theory import sample_draws
from flwr_privacy.wire.layout import Layout

NBAFL = {"clipping_norm": 2.0, "epsilon": 10.0, "delta": 0.01, "exposures": 5, "smallest_data": 600}


def test_F25_sampling_with_replacement_is_unbiased():
    shares = np.random.default_rng(0).dirichlet(np.ones(30))
    values = np.random.default_rng(1).normal(size=30)
    generator = np.random.default_rng(25)
    means = [sample_draws(shares, 20, generator) @ values / 20 for _ in range(100_000)]
    standard_error = np.std(means) / math.sqrt(len(means))
    assert abs(np.mean(means) - shares @ values) < 3 * standard_error
    variance = shares @ (values - shares @ values) ** 2
    assert np.var(means) == pytest.approx(variance / 20, rel=0.02)


def test_F25_duplicates_occur():
    generator = np.random.default_rng(25)
    distinct = []
    for _ in range(20_000):
        counts = sample_draws(np.full(100, 0.01), 20, generator)
        assert counts.sum() == 20
        distinct.append(np.count_nonzero(counts))
    assert np.mean(distinct) == pytest.approx(100 * (1 - 0.99**20), abs=0.03)
    assert round(np.mean(distinct), 1) == 18.2


def test_the_noise_of_nbafl():
    c = math.sqrt(2 * math.log(125))
    assert nbafl_uplink_sigma(**NBAFL) == pytest.approx(c * 5 * 4 / 6000, rel=1e-12)
    # Few rounds need no noise on the way down: T <= L sqrt(N).
    assert nbafl_downlink_sigma(**NBAFL, rounds=50, clients=100) == 0
    down = nbafl_downlink_sigma(**NBAFL, rounds=51, clients=100)
    expected = 2 * c * 2.0 * math.sqrt(51**2 - 25 * 100) / (600 * 100 * 10)
    assert down == pytest.approx(expected, rel=1e-12)
    assert down > 0


@pytest.mark.parametrize("uploads", [1, 5])
def test_the_epsilon_of_nbafl_is_that_of_its_releases(uploads):
    sigma = nbafl_uplink_sigma(**NBAFL)
    noising = Noising(clip="model", clipping_norm=2.0, law="gaussian", scale=sigma)
    taken, clipped = noising.epsilons(smallest_data=600, uploads=uploads, size=650, delta=0.01)
    one = pld.from_gaussian_mechanism(
        sigma / (4.0 / 600), value_discretization_interval=1e-4, use_connect_dots=False
    )
    composed = one.self_compose(uploads)
    assert taken == pytest.approx(composed.get_epsilon_for_delta(0.01), rel=1e-3)
    # Of an epsilon in the thousands the tails are all: mu (mu / 2 + the quantile of delta).
    mu = math.sqrt(uploads) * 4.0 / sigma
    assert clipped == pytest.approx(mu * (mu / 2 + stats.norm.isf(0.01)), rel=1e-4)
    assert clipped > 7e4


def test_nbafl_misses_its_claim_even_for_the_effect_that_it_takes():
    noising = Noising(
        clip="model",
        clipping_norm=2.0,
        law="gaussian",
        scale=nbafl_uplink_sigma(**{**NBAFL, "exposures": 1}),
    )
    taken, _ = noising.epsilons(smallest_data=600, uploads=1, size=650, delta=0.01)
    assert taken > 11.9 > NBAFL["epsilon"]


@pytest.mark.parametrize("uploads", [1, 4])
def test_the_epsilon_of_laplace_noise_counts_all_weights_of_a_model(uploads):
    noising = Noising(clip="update", clipping_norm=2.0, law="laplace", scale=8.0)
    _, clipped = noising.epsilons(smallest_data=600, uploads=uploads, size=9, delta=0.01)
    one = pld.from_laplace_mechanism(8.0 / (4.0 * 3), value_discretization_interval=1e-4)
    assert clipped == pytest.approx(one.self_compose(uploads).get_epsilon_for_delta(1e-9), rel=1e-3)


@pytest.mark.parametrize(("epsilon", "bits"), [(1.0, 6), (4.0, 8), (10.0, 8)])
def test_jopeq_has_the_variance_of_laplace_noise(epsilon, bits):
    codec = JoPEQ(epsilon=epsilon, bits=bits)
    update = np.random.default_rng(1).normal(size=100_000)
    codes, scale = codec.encode(update, SecureRandom.insecure(1), np.random.default_rng(2))
    assert codes.max() < 2**bits
    assert pack(codes, bits).size == packed_bytes(update.size, bits)
    error = codec.decode(codes, scale, np.random.default_rng(2)) - update
    error /= 3 * update.std()
    # Laplace noise of scale b, with both its tails cut off at the end of the range.
    b, end = 2 / epsilon, 1.5 * math.sqrt(1 + 8 / epsilon**2)
    z = (update - update.mean()) / (3 * update.std())
    cut = np.clip(z + np.random.default_rng(3).laplace(scale=b, size=z.size), -end, end) - z
    assert error.var() == pytest.approx(cut.var(), rel=0.03)
    assert codec.noise_scale == pytest.approx(
        math.sqrt((8 / epsilon**2 - codec.step**2 / 12) / 2), rel=1e-12
    )


def test_jopeq_without_noise_to_speak_of_is_a_dithered_quantizer():
    codec = JoPEQ(epsilon=1000.0, bits=9)
    update = np.random.default_rng(1).uniform(-1, 1, size=50_000)
    codes, scale = codec.encode(update, SecureRandom.insecure(1), np.random.default_rng(2))
    decoded = codec.decode(codes, scale, np.random.default_rng(2))
    noise = stats.laplace(scale=codec.noise_scale).ppf(1 - 1e-9)
    assert np.abs(decoded - update).max() <= 3 * update.std() * (codec.step / 2 + noise)
    wrong = codec.decode(codes, scale, np.random.default_rng(3))
    assert np.abs(wrong - update).mean() > 1.2 * np.abs(decoded - update).mean()


def test_jopeq_of_a_constant_update():
    codec = JoPEQ(epsilon=4.0, bits=8)
    codes, scale = codec.encode(np.full(9, 2.5), SecureRandom(), np.random.default_rng(0))
    np.testing.assert_array_equal(codec.decode(codes, scale, np.random.default_rng(0)), 2.5)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: JoPEQ(epsilon=100.0, bits=2), r"bits = 2: expected more for epsilon = 100\.0"),
        (lambda: JoPEQ(epsilon=0.0, bits=8), r"epsilon = 0\.0"),
        (lambda: JoPEQ(epsilon=1.0, bits=17), "bits = 17: expected an integer from 1 to 16"),
        (lambda: nbafl_uplink_sigma(**{**NBAFL, "delta": 1.0}), r"delta = 1\.0"),
        (lambda: nbafl_uplink_sigma(**{**NBAFL, "epsilon": 0.0}), r"epsilon = 0\.0"),
        (lambda: nbafl_uplink_sigma(**{**NBAFL, "smallest_data": 0}), "smallest_data = 0"),
        (
            lambda: sample_draws(np.array([0.5, 0.6]), 3, np.random.default_rng(0)),
            r"shares = 1\.1: expected probabilities",
        ),
        (lambda: sample_draws(np.ones(1), 0, np.random.default_rng(0)), "draws = 0"),
    ],
)
def test_what_is_refused(make, text):
    with pytest.raises(InvalidParameterError, match=text):
        make()


def test_jopeq_takes_each_array_by_itself_and_empty_ones_too():
    model = {"a": np.zeros((2, 3)), "none": np.zeros((0, 4)), "b": np.zeros(5)}
    layout, codec = Layout.of(model, model), JoPEQ(epsilon=1000.0, bits=9)
    update = np.concatenate([np.linspace(-1, 1, 6), np.linspace(99, 101, 5)])
    codes, scales = codec.encode_arrays(
        update, layout, SecureRandom.insecure(1), np.random.default_rng(2)
    )
    parts = update[:6], update[6:]
    assert scales == [
        (parts[0].mean(), parts[0].std()),
        (0.0, 0.0),
        (parts[1].mean(), parts[1].std()),
    ]
    decoded = codec.decode_arrays(codes, scales, layout, np.random.default_rng(2))
    # Were the two arrays scaled together, the errors would be fifty times as large.
    np.testing.assert_allclose(decoded, update, atol=0.1)
    assert (decoded != update).all()


@pytest.mark.parametrize("clip", ["model", "update"])
def test_nbafl_clips_to_a_ball_around_zero_or_the_global_model(clip):
    noising = Noising(clip=clip, clipping_norm=2.0, law="gaussian", scale=1e-8)
    start, random = np.full(4, 3.0), SecureRandom.insecure(1)
    centre = start if clip == "update" else np.zeros(4)
    direction = np.array([0.6, -0.8, 0.0, 0.0])
    for away, kept in ((1.0, 1.0), (10.0, 2.0)):
        released = noising.release(centre + away * direction, start, random)
        np.testing.assert_allclose(released, centre + kept * direction, atol=1e-7)
