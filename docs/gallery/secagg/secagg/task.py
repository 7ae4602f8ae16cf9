"""A convolutional network on the handwritten digits of scikit-learn, divided among the clients."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EVALUATED = 5  # one record of so many is for evaluation


class Net(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10)
        )

    def forward(self, x):
        return self.classifier(self.features(x))


def load_data(partition, partitions, batch_size):
    """Return a client's records as loaders for training and evaluation."""
    digits = load_digits()
    images = torch.tensor(digits.images[partition::partitions] / 16.0, dtype=torch.float32)
    labels = torch.tensor(digits.target[partition::partitions])
    held = torch.arange(len(labels)) % EVALUATED == 0
    train = TensorDataset(images[~held, None], labels[~held])
    test = TensorDataset(images[held, None], labels[held])
    return DataLoader(train, batch_size, shuffle=True), DataLoader(test, 64)


def train(net, loader, epochs, lr):
    """Train, and return the mean loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    total = 0.0
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / (epochs * len(loader))


@torch.no_grad()
def test(net, loader):
    """Return loss and accuracy."""
    net.eval()
    loss, right, count = 0.0, 0, 0
    for images, labels in loader:
        outputs = net(images)
        loss += nn.functional.cross_entropy(outputs, labels, reduction="sum").item()
        right += (outputs.argmax(1) == labels).sum().item()
        count += len(labels)
    return loss / count, right / count


def get_weights(net):
    return [value.numpy() for value in net.state_dict().values()]


def set_weights(net, weights):
    names = net.state_dict()
    net.load_state_dict({n: torch.tensor(w) for n, w in zip(names, weights, strict=True)})
