"""A network as in Flower's quickstart, on generated pictures of the size of CIFAR-10's."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

RECORDS, EVALUATED = 5000, 1000  # of each client


class Net(nn.Module):
    """Two convolutions and three linear layers: 62,006 weights."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 6, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(400, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, 10),
        )

    def forward(self, x):
        return self.layers(x)


def _pictures(labels, generator):
    """Return a pattern of waves for each label, shifted and noised."""
    place = torch.arange(32.0) / 32
    shift = torch.rand(len(labels), 1, generator=generator)
    rows = torch.sin(6.3 * ((1 + labels[:, None] % 4) * place + shift))
    columns = torch.cos(6.3 * ((1 + labels[:, None] // 4) * place + shift))
    waves = 0.5 + 0.4 * rows[:, None, :, None] * columns[:, None, None, :]
    noise = 0.1 * torch.randn(len(labels), 3, 32, 32, generator=generator)
    return (waves + noise).clamp(0, 1)


def load_data(partition, partitions, batch_size):
    """Return a client's records as loaders for training and evaluation."""
    generator = torch.Generator().manual_seed(partition)
    labels = torch.randint(10, (RECORDS,), generator=generator)
    pictures = _pictures(labels, generator)
    train = TensorDataset(pictures[EVALUATED:], labels[EVALUATED:])
    test = TensorDataset(pictures[:EVALUATED], labels[:EVALUATED])
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
