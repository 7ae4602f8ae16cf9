"""A model with BatchNorm, its training and its test, on made-up data."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy


class Net(nn.Module):
    """Two layers with a normalisation between them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))

    def forward(self, values):
        """Return the scores."""
        return self.layers(values)


def data_of(partition_id):
    """Return 40 records of a node: values and classes."""
    generator = torch.Generator().manual_seed(partition_id)
    values = torch.randn(40, 4, generator=generator)
    return values, (values[:, 0] > 0).long()


def get_weights(net):
    """Return the arrays of a model as a list."""
    return [value.numpy().copy() for value in net.state_dict().values()]


def set_weights(net, arrays):
    """Set the arrays of a model."""
    names = net.state_dict()
    values = (torch.as_tensor(array.copy()) for array in arrays)
    net.load_state_dict(dict(zip(names, values, strict=True)))


def train(net, values, classes, step):
    """Take five steps; return the last loss."""
    net.train()
    for _ in range(5):
        net.zero_grad()
        loss = cross_entropy(net(values), classes)
        loss.backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= step * parameter.grad
    return loss.item()


def test(net, values, classes):
    """Return loss and accuracy."""
    net.eval()
    with torch.no_grad():
        scores = net(values)
    accuracy = (scores.argmax(1) == classes).float().mean()
    return cross_entropy(scores, classes).item(), accuracy.item()
