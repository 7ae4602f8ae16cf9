"""ResNet-18 and a vision transformer of torchvision train as Flower apps, on files of CIFAR-10.

The budgets are so large that hardly anything is noised: what a scheme trains is compared with the
same training by hand.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from apps import model_of, run_strategy
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from image_files import cifar10
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, Subset

from flwr_privacy.clients import CentralDPClientApp, FedAvgClientApp, UDPClientApp
from flwr_privacy.clients.torch import (
    evaluate_per_record,
    initialise,
    load_trainable,
    private_training,
    statistics_of,
    train_per_record,
    trainable_names,
    trainable_state,
)
from flwr_privacy.strategies import (
    DPSGD,
    UDP,
    CentralDP,
    FedAvg,
    LoopOptions,
    RecordLevel,
    ServerNoise,
    UserLevel,
)

pytestmark = pytest.mark.vision

CLIENTS, RECORDS, RATE, CLIPPED = 2, 4, 0.1, 0.2
Net = nn.Module
Train = Callable[[Net, DataLoader[Any], Context], None]


def resnet() -> Net:
    from torchvision.models import resnet18

    return resnet18(num_classes=10, norm_layer=lambda channels: nn.GroupNorm(8, channels))


def vit() -> Net:
    from torchvision.models import VisionTransformer

    size = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32, "num_classes": 10}
    net = VisionTransformer(image_size=32, patch_size=8, **size)
    # Of zeros, as torchvision has it, the layers before get no gradient in the first step.
    nn.init.normal_(net.heads.head.weight)
    return net


def batch_norm() -> Net:
    from torchvision.models import resnet18

    return resnet18(num_classes=10)


NETS = {"resnet": resnet, "vit": vit}
LAST_BLOCK = "encoder.layers.encoder_layer_1"


@pytest.fixture(scope="module")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Dataset[Any]:
    return cifar10(tmp_path_factory.mktemp("cifar"))


def own(cifar: Dataset[Any], client: int) -> DataLoader[Any]:
    places = range(client * RECORDS, (client + 1) * RECORDS)
    return DataLoader(Subset(cifar, places), batch_size=RECORDS, shuffle=True)


def all_at_once(net: Net, loader: DataLoader[Any], context: Context) -> None:
    """The loop of an app."""
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    net.train()
    for images, labels in loader:
        optimizer.zero_grad()
        functional.cross_entropy(net(images), labels).backward()
        optimizer.step()


def each_clipped(net: Net, loader: DataLoader[Any], context: Context) -> None:
    """The same with the gradient of each record clipped, one after the other."""
    trained = [p for p in net.parameters() if p.requires_grad]
    total = [torch.zeros_like(p) for p in trained]
    for image, label in loader.dataset:
        loss = functional.cross_entropy(net(image[None]), torch.tensor([label]))
        gradients = torch.autograd.grad(loss, trained)
        norm = float(torch.cat([g.flatten() for g in gradients]).norm())
        for whole, gradient in zip(total, gradients, strict=True):
            whole += gradient * min(1.0, CLIPPED / norm)
    with torch.no_grad():
        for parameter, whole in zip(trained, total, strict=True):
            parameter -= RATE * whole / RECORDS


def per_record(net: Net, loader: DataLoader[Any], context: Context) -> None:
    train_per_record(net, loader)


def dp_sgd(net: Net, loader: Any, context: Context) -> None:
    trained = [p for p in net.parameters() if p.requires_grad]
    net, optimizer, loader = private_training(
        net, torch.optim.SGD(trained, lr=RATE), loader, context
    )
    for _ in range(loader.passes):
        for images, labels in loader:
            optimizer.zero_grad()
            functional.cross_entropy(net(images), labels).backward()
            optimizer.step()


SCHEMES: dict[str, tuple[Any, Any, Train, Train]] = {
    "fedavg": (FedAvg, FedAvgClientApp, all_at_once, all_at_once),
    "central-dp": (CentralDP, CentralDPClientApp, all_at_once, all_at_once),
    "udp": (UDP, UDPClientApp, all_at_once, all_at_once),
    "record": (UDP, UDPClientApp, per_record, each_clipped),
    "dp-sgd": (UDP, UDPClientApp, dp_sgd, each_clipped),
}
"""Strategy, client app, the training in it, and that by hand."""
PRIVACY = {
    "central-dp": ServerNoise(epsilon=1e6, clipping_norm=20.0),
    "udp": UserLevel(epsilon=1e6, clipping_norm=20.0),
    "record": RecordLevel(epsilon=1e10, clipping_norm=CLIPPED, learning_rate=RATE),
    "dp-sgd": DPSGD(epsilon=1e10, clipping_norm=CLIPPED, sampling_rate=1.0, steps=1),
}


def federated(name: str, net: Net, cifar: Dataset[Any], **options: Any) -> Any:
    """Train an app under a scheme, and return the result of its strategy."""
    kind, app, train, _ = SCHEMES[name]
    client_app = app()

    @client_app.train()
    def trained(message: Message, context: Context) -> Message:
        if "trainable" in options:
            load_trainable(net, message.content["arrays"])
        else:
            net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        loader = own(cifar, int(context.node_config["partition-id"]))
        train(net, loader, context)
        arrays = ArrayRecord(trainable_state(net) if "trainable" in options else net.state_dict())
        metrics = MetricRecord({"num-examples": RECORDS})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    privacy = {"privacy": PRIVACY[name]} if name in PRIVACY else {}
    rounds = options.pop("num_rounds", 1)
    strategy = kind(**privacy, **options, loop=LoopOptions(seed=1))
    arrays = ArrayRecord(net.state_dict())
    return run_strategy(strategy, client_app, nodes=CLIENTS, arrays=arrays, num_rounds=rounds)


def by_hand(name: str, net: Net, cifar: Dataset[Any]) -> dict[str, Tensor]:
    """Return the mean of the models that the clients have after the training by hand."""
    start = values(net)
    models = []
    for client in range(CLIENTS):
        net.load_state_dict(start)
        SCHEMES[name][3](net, own(cifar, client), None)
        models.append(values(net))
    net.load_state_dict(start)
    return {key: sum(model[key] for model in models) / CLIENTS for key in start}


def values(net: Net) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}


def update(model: Mapping[str, Any], start: dict[str, Tensor]) -> NDArray[np.float64]:
    assert list(model) == list(start)
    parts = [(np.asarray(model[n], np.float64) - start[n].numpy()).ravel() for n in start]
    return np.concatenate(parts)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", NETS)
def test_a_round_is_the_training_by_hand(kind: str, scheme: str, cifar: Dataset[Any]) -> None:
    net = initialise(NETS[kind], 0)
    start = values(net)
    wanted = update(by_hand(scheme, net, cifar), start)
    found = update(model_of(federated(scheme, net, cifar).arrays), start)
    length = np.linalg.norm(wanted)
    if scheme in ("central-dp", "udp"):  # the noise of all weights together is large
        assert found @ wanted / length**2 == pytest.approx(1, abs=0.08)
    else:
        assert np.linalg.norm(found - wanted) < 0.05 * length


@pytest.mark.parametrize("scheme", ["record", "dp-sgd"])
def test_the_last_block_of_a_transformer_is_fine_tuned(scheme: str, cifar: Dataset[Any]) -> None:
    """Attention is one layer of several there: no layer above it has weights that are trained."""
    net = initialise(vit, 0)
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name.startswith(("heads", "encoder.ln", LAST_BLOCK)))
    start = values(net)
    wanted = update(by_hand(scheme, net, cifar), start)
    result = federated(scheme, net, cifar, trainable=trainable_names(net))
    found = update({**start, **model_of(result.arrays)}, start)
    assert np.linalg.norm(found - wanted) < 0.05 * np.linalg.norm(wanted)


@pytest.mark.parametrize("scheme", ["central-dp", "udp"])
def test_the_statistics_of_batch_norm_stay_with_the_server(
    scheme: str, cifar: Dataset[Any]
) -> None:
    net = initialise(batch_norm, 0)
    start = values(net)
    result = federated(scheme, net, cifar, num_rounds=2)
    assert [line["accumulated"] for line in result.history[1:]] == [CLIENTS, CLIENTS]
    statistics = statistics_of(net)
    assert len(statistics) == 3 * 20
    for name, array in model_of(result.arrays).items():
        same = np.array_equal(array, start[name].numpy())
        assert same == (name in statistics), name


@pytest.mark.parametrize("scheme", ["record", "dp-sgd"])
def test_batch_norm_is_refused_before_a_charge_where_records_are_protected(
    scheme: str, cifar: Dataset[Any], caplog: pytest.LogCaptureFixture
) -> None:
    result = federated(scheme, initialise(batch_norm, 0), cifar)
    assert [line["charged"] for line in result.history] == [0, 0]
    (refused, *_) = (line.message for line in caplog.records if "refused" in line.message)
    assert "the layers ['bn1', 'layer1.0.bn1', 'layer1.0.bn2'] and 17 more" in refused
    assert "GroupNorm may take their place" in refused


@pytest.mark.parametrize("kind", NETS)
def test_a_private_evaluation_is_the_mean_of_the_capped_losses(
    kind: str, cifar: Dataset[Any]
) -> None:
    """In eval mode torch computes attention by another kernel."""
    net = initialise(NETS[kind], 0).eval()
    loader = own(cifar, 0)
    with torch.no_grad():
        losses = [
            float(functional.cross_entropy(net(image[None]), torch.tensor([label])))
            for image, label in loader.dataset
        ]
    cap = (min(losses) + max(losses)) / 2
    expected = np.mean(np.minimum(losses, cap))
    assert evaluate_per_record(net, loader, loss_cap=cap).mean == pytest.approx(expected, rel=1e-4)
