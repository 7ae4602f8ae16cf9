import numpy as np
import pytest
import torch
from torch import nn

from flwr_privacy.acfl.encoding import check_data
from flwr_privacy.clients.torch import FrozenExtractor, get_arrays, initialise
from flwr_privacy.errors import DataError, InvalidParameterError


def convolution():
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 4, kernel_size=3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(144, 12),
    )


def trained():
    """Return a network whose batch normalisation has seen something."""
    module = initialise(convolution, 3)
    module.train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module(torch.randn(64, 64) * 2 + 1)
    return module


RAW = np.random.default_rng(0).normal(size=(20, 64)).astype(np.float32) * 3


def by_hand(module, raw):
    """Return the module's output from numpy alone."""
    state = get_arrays(module)
    images = raw.astype(np.float64).reshape(-1, 8, 8)
    windows = np.lib.stride_tricks.sliding_window_view(images, (3, 3), axis=(1, 2))
    maps = np.einsum("nijkl,ckl->ncij", windows, state["1.weight"][:, 0].astype(np.float64))
    maps += state["1.bias"][:, None, None]
    mean, var = (state[f"2.running_{name}"][:, None, None] for name in ("mean", "var"))
    maps = (maps - mean) / np.sqrt(var + 1e-5) * state["2.weight"][:, None, None]
    maps = np.maximum(maps + state["2.bias"][:, None, None], 0)
    return maps.reshape(len(raw), -1) @ state["6.weight"].T.astype(np.float64) + state["6.bias"]


@pytest.mark.parametrize(
    ("bound", "bounded"),
    [(None, np.tanh), (0.25, lambda x: np.clip(x, -0.25, 0.25)), (50, lambda x: x)],
    ids=["tanh", "clip", "wide"],
)
def test_features_are_the_modules_output_in_bounds(bound, bounded):
    module = trained()
    extractor = FrozenExtractor(module, identity="conv", bound=bound)
    features = extractor(RAW)
    assert features.shape == (20, 12)
    assert features.dtype == np.float64
    np.testing.assert_allclose(features, bounded(by_hand(module, RAW)), atol=1e-5)
    assert np.abs(features).max() <= extractor.bound == (1.0 if bound is None else bound)


def test_a_record_has_the_features_that_it_has_alone():
    extractor = FrozenExtractor(trained(), identity="conv")
    whole = extractor(RAW)
    for index in (0, 7, 19):
        np.testing.assert_allclose(extractor(RAW[index : index + 1])[0], whole[index], atol=1e-6)
    many = extractor(np.tile(RAW, (60, 1)))  # more than one block
    np.testing.assert_allclose(many.reshape(60, 20, 12), np.tile(whole, (60, 1, 1)), atol=1e-6)


@pytest.mark.parametrize("bound", [None, 0.1], ids=["tanh", "clip"])
def test_long_rows_are_shortened_and_no_others(bound):
    whole = FrozenExtractor(trained(), identity="conv", bound=bound)(RAW)
    lengths = np.linalg.norm(whole, axis=1)
    norm = float(np.median(lengths))
    found = FrozenExtractor(trained(), identity="conv", bound=bound, norm=norm)(RAW)
    longer = lengths > norm
    assert 0 < longer.sum() < 20
    np.testing.assert_array_equal(found[~longer], whole[~longer])
    expected = whole[longer] / lengths[longer, None] * norm
    np.testing.assert_allclose(found[longer], expected, rtol=1e-12)


@pytest.mark.parametrize("bound", [None, 0.1], ids=["tanh", "clip"])
def test_the_features_pass_the_check_of_the_client(bound):
    extractor = FrozenExtractor(trained(), identity="conv", bound=bound, norm=0.2)
    features = extractor(RAW)
    checked, _ = check_data(
        features,
        np.ones((20, 1)),
        feature_bound=extractor.bound,
        feature_norm=extractor.norm,
        label_bound=1.0,
    )
    np.testing.assert_allclose(checked, features, rtol=1e-12)


def test_it_stays_as_it_was_made():
    module = trained()
    extractor = FrozenExtractor(module, identity="conv")
    before = extractor(RAW)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1.0)
    np.testing.assert_array_equal(extractor(RAW), before)
    assert module.training
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_identity_tells_weights_statistics_bounds_and_name():
    module = trained()
    other = trained()
    same = FrozenExtractor(other, identity="conv")
    assert FrozenExtractor(module, identity="conv").identity == same.identity
    found = {same.identity}
    other[2].running_mean[1] += 1e-3
    found.add(FrozenExtractor(other, identity="conv").identity)
    with torch.no_grad():
        module[6].bias[0] += 1e-3
    found.add(FrozenExtractor(module, identity="conv").identity)
    found.add(FrozenExtractor(trained(), identity="conv", bound=1.0).identity)
    found.add(FrozenExtractor(trained(), identity="conv", norm=1.0).identity)
    found.add(FrozenExtractor(trained(), identity="other").identity)
    assert len(found) == 6


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"identity": ""}, "identity = ''"),
        ({"identity": 3}, "identity = 3"),
        ({"identity": "x", "bound": 0.0}, "bound = 0.0"),
        ({"identity": "x", "bound": float("nan")}, "bound = nan"),
        ({"identity": "x", "norm": -1.0}, "norm = -1.0"),
    ],
    ids=["empty", "number", "zero", "nan", "norm"],
)
def test_refused_parameters(arguments, text):
    with pytest.raises(InvalidParameterError, match=text):
        FrozenExtractor(nn.Linear(2, 2), **arguments)


def test_refused_data():
    extractor = FrozenExtractor(initialise(lambda: nn.Linear(2, 2), 0), identity="x")
    with pytest.raises(DataError, match="no records"):
        extractor(np.zeros((0, 2)))
    with pytest.raises(DataError, match="not finite"):
        extractor(np.array([[1.0, 2.0], [np.nan, 0.0]]))
    pooled = FrozenExtractor(nn.Flatten(0), identity="x")
    with pytest.raises(InvalidParameterError, match="one row for each record"):
        pooled(RAW)
