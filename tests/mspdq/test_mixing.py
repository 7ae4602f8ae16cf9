import numpy as np
import pytest
from mixing_rounds import Transcript, learning_round, terms_of

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.mspdq import Codec, Mixing, SubStates, UniformSplit
from flwr_privacy.mspdq.theory import lambda2_P
from flwr_privacy.privacy.randomness import SecureRandom

W, FIRST = np.array([[1.0], [3.0]]), np.array([[0.5], [4.0]])


def problem(clients: int = 20, size: int = 500) -> tuple[np.ndarray, np.ndarray]:
    """Return models and uniform splits of them."""
    models = np.random.default_rng(1).normal(size=(clients, size))
    random = SecureRandom.insecure(1)
    return models, np.stack([UniformSplit().visible(model, random) for model in models])


def mixed(models, visible, mixing) -> Transcript:
    random = SecureRandom.insecure(2)
    return learning_round(terms_of(mixing), models, random, visible=visible)


def distance(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.linalg.norm(one - other))


def test_F1_and_F2_a_step_is_the_papers_matrix():
    clients, kappa, a = 20, 0.5, 0.1
    basis = np.eye(2 * clients)  # columns: every sub-state of every client
    states = SubStates(visible=basis[:clients].copy(), hidden=basis[clients:].copy())
    heard = states.visible.copy()
    states.step(heard.mean(axis=0), heard, kappa=kappa, gain=a, weight=1)
    matrix = np.concatenate([states.visible, states.hidden])
    np.testing.assert_allclose(matrix.sum(axis=0), 1, rtol=1e-12)
    np.testing.assert_allclose(matrix.sum(axis=1), 1, rtol=1e-12)
    values = np.sort(np.linalg.eigvalsh(matrix))
    assert values[-1] == pytest.approx(1, rel=1e-12)
    np.testing.assert_allclose(values[-20:-1], lambda2_P(kappa, a), rtol=1e-12)
    assert np.isclose(values, 1 - 2 * a, rtol=1e-12).sum() == 1


def test_F3_conservation_whatever_the_couplings_are():
    models, visible = problem()
    draws = np.random.default_rng(3)
    weights = draws.integers(1, 6, size=(20, 1))
    states = SubStates.split(models, visible, weight=weights)
    before = (states.visible + states.hidden).sum(axis=0)
    for _ in range(20):
        heard, gains = states.visible.copy(), draws.uniform(0.01, 0.3, size=(20, 1))
        states.step(heard.mean(axis=0), heard, kappa=0.5, gain=gains, weight=weights)
    after = (states.visible + states.hidden).sum(axis=0)
    np.testing.assert_allclose(after, before, atol=1e-11)
    assert np.abs(states.visible - visible).max() > 0.1


@pytest.mark.parametrize("levels", [2, 16, 256])
@pytest.mark.parametrize("width", [1e-3, 1.0])
def test_F3_conservation_whatever_is_rounded_or_saturates(levels, width):
    models, visible = problem(size=100)
    draws, random = np.random.default_rng(3), SecureRandom.insecure(3)
    weights = draws.integers(1, 4, size=(20, 1))
    states = SubStates.split(models, visible, weight=weights)
    codecs = [Codec(row, levels) for row in visible]
    before = (states.visible + states.hidden).sum(axis=0)
    saturated = 0
    for k in range(10):
        heard = np.stack([codec.value for codec in codecs])
        gains = draws.uniform(0.01, 0.3, size=(20, 1))
        states.step(heard.mean(axis=0), heard, kappa=0.5, gain=gains, weight=weights)
        for codec, row in zip(codecs, states.visible, strict=True):
            saturated += codec.encode(row, width / (k + 1), random)[1]
    assert (saturated > 0) or width == 1.0
    after = (states.visible + states.hidden).sum(axis=0)
    np.testing.assert_allclose(after, before, atol=1e-11)


def test_F4_three_steps_of_two_clients():
    states = SubStates.split(W, FIRST, weight=1)
    np.testing.assert_array_equal(states.hidden[:, 0], [1.5, 2.0])
    expected = [
        ([1.475, 2.925], [1.4, 2.2], 2.2),
        ([1.83, 2.49], [1.4075, 2.2725], 2.16),
        ([1.95275, 2.30325], None, 2.128),
    ]
    for k, (visible, hidden, average) in enumerate(expected):
        heard = states.visible.copy()
        states.step(heard.mean(axis=0), heard, kappa=0.5, gain=0.1, weight=1)
        np.testing.assert_allclose(states.visible[:, 0], visible, rtol=1e-12)
        if hidden is not None:
            np.testing.assert_allclose(states.hidden[:, 0], hidden, rtol=1e-12)
        assert states.visible.mean() == pytest.approx(average, rel=1e-12)
        assert states.visible.mean() - 2 == pytest.approx(0.25 * 0.8 ** (k + 1), rel=1e-12)
        assert (states.visible + states.hidden).sum() == pytest.approx(8, rel=1e-12)


def test_F5_two_hidden_substates():
    mixing = Mixing(gamma=0.1, m=2, rounds=6)
    assert SubStates.split(W, FIRST, weight=2).hidden[:, 0].tolist() == [2.5, 5.0]
    seen = mixed(W, FIRST, mixing)
    np.testing.assert_allclose(seen.heard[1, :, 0], [1.525, 2.825], rtol=1e-12)
    np.testing.assert_allclose(seen.heard[2, :, 0], [1.78, 2.465], rtol=1e-12)
    np.testing.assert_allclose(seen.averages[:, 0], 2 + 0.25 * 0.7 ** np.arange(7), rtol=1e-12)
    assert (seen.visible + seen.hidden).sum() == pytest.approx(12, rel=1e-12)


def test_F5_the_sum_of_the_hidden_substates_is_all_that_counts():
    visible, hidden, a = FIRST.copy(), np.array([[1.5, 1.0], [2.0, 3.0]]), 0.1
    seen = mixed(W, FIRST, Mixing(gamma=a, m=2, rounds=5))
    for k in range(5):
        gaps = hidden - visible
        visible = visible + 0.5 * (visible.mean() - visible) + a * gaps.sum(axis=1, keepdims=True)
        hidden = hidden - a * gaps
        np.testing.assert_allclose(seen.heard[k + 1], visible, rtol=1e-12)


@pytest.mark.parametrize(("mass", "limit"), [("paper", 7 / 3), ("normalized", 2.0)])
def test_F6_the_limit_for_unequal_numbers_of_hidden_substates(mass, limit):
    clients = [Mixing(gamma=0.1, m=m, mass=mass) for m in (1, 3)]
    weights = np.array([[mixing.weight] for mixing in clients])
    states = SubStates.split(W, FIRST, weight=weights)
    for _ in range(400):
        heard = states.visible.copy()
        states.step(heard.mean(axis=0), heard, kappa=0.5, gain=0.1, weight=weights)
    np.testing.assert_allclose(states.visible[:, 0], limit, rtol=1e-9)
    np.testing.assert_allclose(states.hidden[:, 0], limit * weights[:, 0], rtol=1e-9)


def test_clients_that_draw_their_m_reach_the_mean_on_average():
    """Section 7.4: a round's limit has the weights 1 + m_i; over the draws it has no bias."""
    models = np.random.default_rng(7).normal(size=(4, 3))
    mixing, ends, limits = Mixing(gamma=0.2, m=3, m_mode="iid", rounds=80), [], []
    for seed in range(200):
        random, same = (SecureRandom.insecure(seed, "iid") for _ in range(2))
        seen = learning_round(terms_of(mixing), models, random, visible=models)
        ends.append(seen.averages[-1])
        limits.append(
            np.average(models, axis=0, weights=[1 + mixing.own_weight(same) for _ in models])
        )
    np.testing.assert_allclose(ends, limits, atol=1e-4)
    errors = np.array(ends) - models.mean(axis=0)
    assert np.abs(errors).max() > 0.1  # of a single round
    standard = errors.std(axis=0) / np.sqrt(len(ends))
    assert (np.abs(errors.mean(axis=0)) < 4 * standard).all()


def test_each_number_of_hidden_substates_is_drawn_alike():
    mixing, random = Mixing(gamma=0.2, m=3, m_mode="iid"), SecureRandom.insecure(6)
    drawn = np.array([mixing.own_weight(random) for _ in range(3000)])
    counts = np.bincount(drawn, minlength=4)
    assert counts[0] == 0
    assert len(counts) == 4
    assert np.abs(counts[1:] - 1000).max() < 4 * np.sqrt(3000 * 2 / 9)
    assert not mixing.known
    for call in (lambda: mixing.residual, lambda: mixing.rounds_needed(0.1)):
        with pytest.raises(InvalidParameterError, match="m_mode = 'iid'"):
            call()


@pytest.mark.parametrize("kappa", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"rounds": 4}, 0.4096),
        ({"rounds": 10}, 0.1073741824),
        ({"rounds": 10, "coupling": "harmonic"}, 0.537678389),
        ({"rounds": 20, "coupling": "harmonic"}, 0.469923),
        ({"rounds": 10, "m": 3}, 0.0060466),
        ({"rounds": 10, "m": 3, "mass": "normalized"}, 0.1073741824),
        ({"rounds": 0}, 1.0),
    ],
)
def test_F7_the_residual_of_the_mean_whatever_kappa_is(kappa, options, expected):
    models, visible = problem()
    mixing = Mixing(kappa=kappa, gamma=0.1, **options)
    assert abs(mixing.residual) == pytest.approx(expected, rel=1e-5)
    seen = mixed(models, visible, mixing)
    mean = models.mean(axis=0)
    measured = distance(seen.averages[-1], mean) / distance(visible.mean(axis=0), mean)
    assert measured == pytest.approx(abs(mixing.residual), abs=1e-12)


@pytest.mark.parametrize("rounds", [0, 1, 4, 11])
def test_F8_without_a_split_msp_is_fedavg(rounds):
    models, _ = problem()
    seen = mixed(models, models, Mixing(gamma=0.1, rounds=rounds))
    np.testing.assert_allclose(seen.averages[-1], models.mean(axis=0), atol=1e-12)


def test_F8_a_coupling_of_one_half_averages_in_one_step():
    models, visible = problem()
    mixing = Mixing(gamma=0.5, rounds=1)
    seen = mixed(models, visible, mixing)
    assert mixing.residual == 0
    assert mixing.rounds_needed(1e-15) == 1
    np.testing.assert_allclose(seen.averages[-1], models.mean(axis=0), atol=1e-12)
    # Fast, no masking: the second message is the model.
    told = seen.heard[1] - 0.5 * (seen.averages[0] - seen.heard[0])
    np.testing.assert_allclose(told, models, atol=1e-12)


def test_F14_the_global_start_is_a_server_step_of_one_minus_the_residual():
    models, _ = problem()
    before = np.random.default_rng(5).normal(size=models.shape[1])
    mixing = Mixing(gamma=0.3, coupling="harmonic", rounds=10)
    seen = mixed(models, np.tile(before, (20, 1)), mixing)
    expected = before + (1 - mixing.residual) * (models.mean(axis=0) - before)
    np.testing.assert_allclose(seen.averages[-1], expected, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({"gamma": 0.1, "m": 17}, 0.8**10),
        ({"gamma": 0.1, "m": 19}, 1.0),
        ({"gamma": 0.1, "m": 20}, 1.1**10),
        ({"gamma": 0.3, "m": 4}, 0.5**10),
        ({"gamma": 0.3, "m": 6}, 1.1**10),
        ({"gamma": 0.1, "m": 18, "coupling": "harmonic"}, None),
    ],
)
def test_F22_so_many_hidden_substates_a_constant_coupling_bears(options, factor):
    mixing = Mixing(paper=True, rounds=10, **options)
    models, visible = problem()
    seen = mixed(models, visible, mixing)
    mean = models.mean(axis=0)
    grown = distance(seen.averages[-1], mean) / distance(seen.averages[0], mean)
    if factor is None:
        assert grown < 0.01
    else:
        assert grown == pytest.approx(factor, rel=1e-6)
    if options["m"] > 4 and factor is not None:  # not only the mean is at stake
        with pytest.raises(InvalidParameterError, match="less than largest_stable"):
            Mixing(rounds=10, **options)


@pytest.mark.parametrize("kappa", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("m", [1, 3])
def test_random_couplings_reach_the_average_too(kappa, m):
    models, visible = problem()
    mixing = Mixing(kappa=kappa, gamma=0.25, coupling="random", m=m, rounds=300)
    seen = mixed(models, visible, mixing)
    np.testing.assert_allclose(seen.averages[-1], models.mean(axis=0), atol=1e-6)
    random = SecureRandom.insecure(4)
    gains = np.array([mixing.gain(k, random) for k in range(2000)])
    assert 0 < gains.min() < gains.max() <= mixing.largest_gain(7) == 0.25
    assert abs(gains.mean() - 0.125) < 4 * 0.25 / np.sqrt(12 * 2000)
    for call in (lambda: mixing.residual, lambda: mixing.rounds_needed(0.1)):
        with pytest.raises(InvalidParameterError, match="coupling = 'random'"):
            call()


def test_couplings_that_are_known():
    random = SecureRandom.insecure(0)
    expected = {"const": [0.3, 0.3, 0.3], "harmonic": [0.3, 0.15, 0.1]}
    expected["sqrt"] = [0.3, 0.3 / np.sqrt(2), 0.3 / np.sqrt(3)]
    for coupling, values in expected.items():
        mixing = Mixing(coupling=coupling)
        np.testing.assert_allclose([mixing.gain(k, random) for k in range(3)], values, rtol=1e-15)
        assert mixing.gain(2, random) == mixing.largest_gain(2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kappa": 0.0}, r"kappa = 0\.0: expected a number between 0 and 1"),
        ({"kappa": 1.0}, r"kappa = 1\.0"),
        ({"kappa": float("nan")}, "kappa = nan"),
        ({"gamma": 0.0}, r"gamma = 0\.0: expected a number above 0"),
        ({"gamma": -0.1, "coupling": "harmonic"}, r"gamma = -0\.1"),
        (
            {"gamma": 0.34, "paper": True},
            r"gamma = 0\.34: expected less than max_coupling\(kappa=0\.5\) = 0\.333333",
        ),
        ({"gamma": 1 / 3, "paper": True}, r"less than max_coupling"),
        (
            {"gamma": 0.9},
            r"gamma = 0\.9: expected less than largest_stable\(kappa=0\.5, m=1\) = 0\.857143",
        ),
        ({"gamma": 0.5, "m": 3}, r"largest_stable\(kappa=0\.5, m=3\) = 0\.4"),
        ({"gamma": 0.9, "m": 9, "mass": "normalized"}, r"m=1\) = 0\.857143"),
        ({"gamma": 0.9, "coupling": "random"}, "largest_stable"),
        ({"kappa": 1.0, "coupling": "harmonic"}, r"kappa = 1\.0"),
        ({"rounds": -1}, "rounds = -1: expected an integer of at least 0"),
        ({"m": 0}, "m = 0: expected an integer of at least 1"),
        ({"coupling": "constant"}, "coupling = 'constant'.*nearest: 'const'"),
        ({"mass": "equal"}, "mass = 'equal'"),
        ({"m_mode": "secret"}, "m_mode = 'secret'"),
        ({"m_mode": "iid"}, "m_mode = 'iid': expected 'common' where hidden sub-states weigh 1"),
        ({"m_mode": "iid", "m": 3, "mass": "normalized"}, "m_mode = 'iid': expected 'common'"),
    ],
)
def test_what_no_mixing_can_be(options, text):
    with pytest.raises(InvalidParameterError, match=text):
        Mixing(**options)


def test_secrets_are_not_shown():
    assert "1.5" not in repr(SubStates.split(W, FIRST, weight=1))
