"""The networks of the paper's Table 1: their sizes, that they learn, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.experiments.files import experiment
from flwr_privacy.simulations.research.fedvs import client_networks as networks
from flwr_privacy.simulations.research.fedvs.synthetic_data import FedVSSyntheticData

POINT: dict[str, Any] = {
    **{"data": "fashion-rows", "clients": 4, "network": "PN", "layers": 1, "server": "perceptron"},
    **{"embedding": 16, "rounds": 200, "batch_size": 64, "learning_rate": 0.2},
}


@pytest.fixture(autouse=True)
def stripes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the data be images of which one of two halves is bright, dealt out by rows."""
    draws = np.random.default_rng(0)
    labels = np.arange(256) % 2
    images = draws.random((256, 28, 28), dtype=np.float32) / 2
    images[labels == 0, :, :14] += 0.5
    images[labels == 1, :, 14:] += 0.5
    blocks = np.split(images.reshape(256, -1), 4, axis=1)
    data = FedVSSyntheticData(blocks=blocks, labels=labels, test_blocks=blocks, test_labels=labels)
    monkeypatch.setattr(networks, "columns_of", lambda *_: data)


@pytest.mark.parametrize("network", networks.NETWORKS)
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_every_network_of_the_table_learns(network: str, layers: int) -> None:
    point = {**POINT, "network": network, "layers": layers}
    first, again = networks.accuracies([point, point], 3, None)
    assert first["accuracy"] > 0.95
    assert first == again


def test_without_rounds_of_use_a_model_has_learned_nothing() -> None:
    (found,) = networks.accuracies([{**POINT, "learning_rate": 0.0}], 3, None)
    assert found["accuracy"] < 0.75


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("network", networks.NETWORKS)
def test_networks_map_seven_rows_of_an_image_to_an_embedding(network: str, layers: int) -> None:
    module = networks.NETWORKS[network](196, layers, 16)
    assert module(torch.rand(5, 196)).shape == (5, 16)


def test_the_papers_server_model_has_ten_convolutions_and_three_layers() -> None:
    module = networks.SERVERS["vgg13"](1024, 10)
    kinds = [type(part).__name__ for part in module.modules()]
    assert (kinds.count("Conv2d"), kinds.count("Linear")) == (10, 3)
    assert module(torch.rand(2, 1024)).shape == (2, 10)
    assert experiment("fedvs/table1-networks").full["server"] == "vgg13"


@pytest.mark.parametrize(
    "wrong",
    [
        {"network": "RNN"},
        {"server": "resnet"},
        {"network": "CNN", "layers": 4},
        {"clients": 3},
        {"data": "digits-rows"},
        {"method": "fedvs"},
    ],
)
def test_what_cannot_be_trained_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameterError):
        networks.check({**POINT, **wrong})
