"""A network with BatchNorm on the breast cancer table of scikit-learn, divided among clients."""

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EVALUATED = 5  # one record of so many is for evaluation


def network():
    """Return the model."""
    return nn.Sequential(nn.Linear(30, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))


def load_data(partition, partitions):
    """Return a client's records as loaders for training and evaluation."""
    table = load_breast_cancer()
    scaled = (table.data - table.data.mean(0)) / table.data.std(0)
    features = torch.tensor(scaled[partition::partitions], dtype=torch.float32)
    labels = torch.tensor(table.target[partition::partitions])
    held = torch.arange(len(labels)) % EVALUATED == 0
    train = TensorDataset(features[~held], labels[~held])
    test = TensorDataset(features[held], labels[held])
    return DataLoader(train, 16, shuffle=True, drop_last=True), DataLoader(test, 64)


def get_weights(net):
    return [value.numpy() for value in net.state_dict().values()]


def set_weights(net, weights):
    names = net.state_dict()
    net.load_state_dict({n: torch.tensor(w) for n, w in zip(names, weights, strict=True)})
