import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.pipeline.mechanism import Facts
from flwr_privacy.udp import UDPTerms
from flwr_privacy.udp.sensitivity import BOUNDS, check_sampling, check_steps, sensitivity

RECORD = {"clipping_norm": 1.8, "learning_rate": 0.02, "records": 800}


def clip(gradient, norm):
    length = np.linalg.norm(gradient)
    return gradient if length <= norm else gradient * (norm / length)


def descend(w, gradient_of, data, *, clipping_norm, learning_rate, epochs, batch_size):
    """Mini-batches in the given order; the sum is divided by the batch size, always."""
    w = np.array(w, np.float64)
    size = batch_size or len(data)
    for _ in range(epochs):
        for start in range(0, len(data), size):
            batch = data[start : start + size]
            total = sum(clip(gradient_of(record, w), clipping_norm) for record in batch)
            w = w - learning_rate / size * total
    return w


def softmax_gradient(record, w):
    """Softmax regression on three classes; a record is (features, label)."""
    features, label = record
    logits = w.reshape(3, -1) @ features
    p = np.exp(logits - logits.max())
    p /= p.sum()
    p[label] -= 1
    return np.outer(p, features).ravel()


def net_gradient(record, w):
    """A network of one hidden unit, ``v sin(u x)``, against a target: not convex."""
    features, label = record
    u, v = w[:-1], w[-1]
    error = v * math.sin(u @ features) - label
    return np.append(error * v * math.cos(u @ features) * features, error * math.sin(u @ features))


def logistic_gradient(record, w):
    """Logistic regression: one output, a loss that is convex and ||x||**2 / 4-smooth."""
    features, label = record
    sign = 1 if label % 2 else -1
    return -sign * features / (1 + math.exp(min(500, sign * float(w @ features))))


def absolute_gradient(record, w):
    """Steps away from 0 at full speed: as bad as a loss that is not convex can be."""
    push, _ = record
    return np.array([-push if w[0] == 0 else -np.sign(w[0])]) * 9.0


def linear_gradient(record, w):
    return np.array([9.0 * record[0]])


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({}, 1 / 800),
        ({"bound": "unproven"}, 1 / 800),
        ({"bound": "convex"}, 1 / 800),
        ({"sampling_rate": 0.1}, 1 / 80),
        ({"epochs": 5}, 1 / 800 + 4),
        ({"epochs": 5, "bound": "convex"}, 5 / 800),
        ({"epochs": 5, "bound": "unproven"}, 1 / 800),
        ({"batch_size": 128}, 1 / 128 + 7 - 1),
        ({"epochs": 3, "batch_size": 128}, 1 / 128 + 3 * 7 - 1),
        ({"epochs": 3, "batch_size": 128, "bound": "convex"}, 3 / 128),
        ({"epochs": 3, "batch_size": 128, "bound": "unproven"}, 1 / 800),
        ({"epochs": 3, "batch_size": 800}, 1 / 800 + 2),
    ],
)
def test_the_formulas_of_the_specification(options, share):
    assert sensitivity("record", **RECORD, **options) == pytest.approx(2 * 0.02 * 1.8 * share)


def test_F2_sensitivity_of_the_experiments():
    found = sensitivity("record", clipping_norm=1.0, learning_rate=1.0, records=800)
    assert found == pytest.approx(0.0025)
    assert sensitivity("record", **RECORD) == pytest.approx(9e-5)


def test_at_user_level_nothing_but_the_clip_counts():
    assert sensitivity("user", clipping_norm=3.0) == 6.0
    assert sensitivity("user", clipping_norm=3.0, records=7, learning_rate=0.1) == 6.0


def test_one_mini_batch_epoch_needs_far_more_than_the_paper_has():
    claimed = sensitivity("record", **RECORD, batch_size=128, bound="unproven")
    convex = sensitivity("record", **RECORD, batch_size=128, bound="convex")
    general = sensitivity("record", **RECORD, batch_size=128)
    assert convex / claimed == pytest.approx(6.25)
    assert general / claimed > 4000


def test_in_a_sample_a_record_moves_a_release_from_none_by_half_the_sensitivity():
    """Roundings to the grid and of the weights count for each of the two halves."""
    start, facts = {"w": np.full(4, 3.0, np.float32)}, Facts(records=10)

    def sigma(rate, grid):
        terms = UDPTerms(
            unit="record",
            noise_multiplier=1.0,
            epsilon=8.0,
            delta=1e-5,
            gap=1.0,
            clipping_norm=1.0,
            sampling_rate=rate,
            grid=grid,
        )
        return terms.plan(start, facts).sigma

    unit = 2.0**-24 * np.linalg.norm(start["w"])  # to which a weight is rounded
    for rate, roundings in ((1.0, 2), (0.5, 4)):
        exact = sensitivity("record", **ONE, sampling_rate=rate)
        step = 2.0**-10 * math.sqrt(4)
        assert sigma(rate, -10) == pytest.approx(exact + roundings * (step / 2 + unit), rel=1e-12)


ONE = {"clipping_norm": 1.0, "learning_rate": 1.0, "records": 10}


@st.composite
def neighbours(draw):
    """Two data sets that differ in one record, and the settings of a training."""
    n = draw(st.integers(1, 5))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    data = [(rng.normal(size=2), int(rng.integers(3))) for _ in range(n)]
    scale = 10.0 ** draw(st.integers(-2, 3))
    other = list(data)
    other[draw(st.integers(0, n - 1))] = (rng.normal(size=2) * scale, int(rng.integers(3)))
    options = {
        "clipping_norm": draw(st.sampled_from([0.01, 0.3, 1.0, 10.0])),
        "epochs": draw(st.integers(1, 3)),
        "batch_size": draw(st.none() | st.integers(1, n)),
    }
    return rng, data, other, options


@settings(max_examples=150, deadline=None, derandomize=True)
@given(neighbours(), st.sampled_from([0.01, 0.5, 10.0]))
def test_F19_general_bound_holds_for_models_that_are_not_convex(drawn, learning_rate):
    rng, data, other, options = drawn
    bound = sensitivity("record", **options, learning_rate=learning_rate, records=len(data))
    for gradient, size in ((softmax_gradient, 6), (net_gradient, 3)):
        w = rng.normal(size=size)
        ends = [
            descend(w, gradient, d, **options, learning_rate=learning_rate) for d in (data, other)
        ]
        assert np.linalg.norm(ends[0] - ends[1]) <= bound * (1 + 1e-9)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(neighbours())
def test_F19_convex_bound_holds_for_one_output(drawn):
    rng, data, other, options = drawn
    smooth = max(float(x @ x) for x, _ in data + other) / 4
    settings_ = {**options, "learning_rate": 2 / smooth}  # as large as is allowed
    bound = sensitivity("record", **settings_, records=len(data), bound="convex")
    w = rng.normal(size=2)
    ends = [descend(w, logistic_gradient, d, **settings_) for d in (data, other)]
    assert np.linalg.norm(ends[0] - ends[1]) <= bound * (1 + 1e-9)


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("batch_size", [None, 2, 6])
def test_F19_general_bound_is_attained(epochs, batch_size):
    options = {"clipping_norm": 0.7, "learning_rate": 0.3, "epochs": epochs}
    options["batch_size"] = batch_size
    rest = [(0.0, 0)] * 5
    ends = [descend([0], absolute_gradient, [(push, 0), *rest], **options) for push in (1.0, -1.0)]
    exact = sensitivity("record", **options, records=6)
    assert abs(ends[0] - ends[1])[0] == pytest.approx(exact)


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("batch_size", [None, 2, 4])
@pytest.mark.parametrize("place", [0, 5])
def test_F19_convex_bound_is_attained(epochs, batch_size, place):
    options = {"clipping_norm": 0.7, "learning_rate": 0.3, "epochs": epochs}
    options["batch_size"] = batch_size
    rest = [(0.1, 0)] * 5
    ends = []
    for push in (1.0, -1.0):
        data = [*rest[:place], (push, 0), *rest[place:]]  # with batches of 4, the last one has 2
        ends.append(descend([0], linear_gradient, data, **options))
    exact = sensitivity("record", **options, records=6, bound="convex")
    assert abs(ends[0] - ends[1])[0] == pytest.approx(exact)


def test_what_is_unproven_bounds_nothing():
    options = {"clipping_norm": 0.7, "learning_rate": 0.3, "epochs": 2, "batch_size": 2}
    rest = [(0.0, 0)] * 5
    ends = [descend([0], linear_gradient, [(push, 0), *rest], **options) for push in (1.0, -1.0)]
    claimed = sensitivity("record", **options, records=6, bound="unproven")
    assert abs(ends[0] - ends[1])[0] == pytest.approx(6 * claimed)


def test_a_clipped_step_of_softmax_regression_drives_weights_apart():
    # Both within what would be allowed with one output: the loss is 1/2-smooth, 4 is 2 / L.
    record = (np.ones(1), 0)
    w = np.array([1.2655, 1.4421, 0.018])
    far, near = (
        max(_growth(record, w, v, clipping_norm) for w, v in _pairs(w))
        for clipping_norm in (0.5, 9)
    )
    assert far > 1.01
    assert near <= 1 + 1e-9  # it is the clip that does it


def _pairs(w):
    return [
        (w, w + 1e-4 * np.array([math.cos(a), math.sin(a), b]))
        for a in np.linspace(0, 2 * math.pi, 40)
        for b in (-1.0, 0.0, 1.0)
    ]


def _growth(record, w, v, clipping_norm):
    ends = [u - 4 * clip(softmax_gradient(record, u), clipping_norm) for u in (w, v)]
    return np.linalg.norm(ends[0] - ends[1]) / np.linalg.norm(w - v)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"records": 0}, "records = 0: expected an integer of at least 1"),
        ({"records": None}, "records = None: expected an integer of at least 1"),
        ({"records": 800.0}, "records = 800.0"),
        ({"batch_size": 801}, "batch_size = 801: expected at most the number of records, 800"),
        ({"batch_size": 0}, "batch_size = 0"),
        ({"epochs": 0}, "epochs = 0"),
        ({"clipping_norm": 0.0}, "clipping_norm = 0.0"),
        ({"clipping_norm": math.nan}, "clipping_norm = nan"),
        ({"learning_rate": 0.0}, "learning_rate = 0.0"),
        ({"sampling_rate": 0.0}, "sampling_rate = 0.0"),
        ({"sampling_rate": 1.1}, "sampling_rate = 1.1"),
        ({"sampling_rate": 0.5, "epochs": 2}, "epochs = 2: expected 1 with sampling_rate = 0.5"),
        ({"sampling_rate": 0.5, "batch_size": 9}, "batch_size = 9: expected None with samp"),
        ({"bound": "sure"}, "bound = 'sure'"),
    ],
)
def test_bad_settings(options, text):
    with pytest.raises(InvalidParameterError, match=text):
        sensitivity("record", **{**RECORD, **options})


def test_bad_unit():
    with pytest.raises(InvalidParameterError, match="unit = 'client'"):
        sensitivity("client", **RECORD)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"epochs": 2}, "epochs = 2: expected 1 at user level"),
        ({"batch_size": 2}, "batch_size = 2: expected None at user level"),
        ({"bound": "convex"}, "bound = 'convex': expected 'general' at user level"),
        ({"sampling_rate": 0.5}, "sampling_rate = 0.5: expected 1 at user level"),
    ],
)
def test_user_level_takes_no_settings_of_the_steps(options, text):
    with pytest.raises(InvalidParameterError, match=text):
        check_steps("user", **options)


def test_good_settings_pass():
    for bound in BOUNDS:
        check_steps("record", epochs=3, batch_size=7, bound=bound)
    check_steps("user")
    check_sampling("record", 0.1)
