"""Model, data, training and test."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

TEST_IMAGES = 297


class Net(nn.Module):
    """Two layers over images of 8 x 8 pixels."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(64, 32)
        self.output = nn.Linear(32, 10)

    def forward(self, images):
        """Return the scores of the ten digits."""
        return self.output(torch.relu(self.hidden(images)))


def load_images():
    """Return all images and their digits, in an order that is the same everywhere."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    return images[order], torch.tensor(digits.target)[order]


def load_data(partition_id, num_partitions, batch_size):
    """Return the training data of one partition and its data for validation."""
    images, labels = load_images()
    images, labels = images[TEST_IMAGES:], labels[TEST_IMAGES:]
    own = TensorDataset(images[partition_id::num_partitions], labels[partition_id::num_partitions])
    train, validation = torch.utils.data.random_split(
        own, [0.8, 0.2], generator=torch.Generator().manual_seed(0)
    )
    return DataLoader(train, batch_size, shuffle=True), DataLoader(validation, batch_size)


def load_test_data():
    """Return the images that no partition has."""
    images, labels = load_images()
    return DataLoader(TensorDataset(images[:TEST_IMAGES], labels[:TEST_IMAGES]), TEST_IMAGES)


def train(net, data, epochs, learning_rate):
    """Train the model and return the mean loss of the last epoch."""
    net.train()
    for _ in range(epochs):
        total = 0.0
        for images, labels in data:
            net.zero_grad()
            loss = cross_entropy(net(images), labels)
            loss.backward()
            with torch.no_grad():
                for parameter in net.parameters():  # torch.optim takes seconds to import
                    parameter -= learning_rate * parameter.grad
            total += loss.item() * len(labels)
    return total / len(data.dataset)


def test(net, data):
    """Return the mean loss and the accuracy."""
    net.eval()
    total, correct = 0.0, 0
    with torch.no_grad():
        for images, labels in data:
            scores = net(images)
            total += cross_entropy(scores, labels, reduction="sum").item()
            correct += int((scores.argmax(1) == labels).sum())
    return total / len(data.dataset), correct / len(data.dataset)
