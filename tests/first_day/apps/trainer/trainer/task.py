"""A module and a trainer, as Lightning has them."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


class LitNet(nn.Module):
    """A model that knows its loss and its step."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def training_step(self, batch):
        """Return the loss of a batch."""
        values, classes = batch
        return cross_entropy(self.layer(values), classes)

    def configure_optimizers(self):
        """Return the parameters and the step."""
        return list(self.parameters()), 0.1


class Trainer:
    """Trains a module for some epochs."""

    def __init__(self, max_epochs):
        self.max_epochs = max_epochs
        self.callback_metrics = {}

    def fit(self, module, loader):
        """Train."""
        parameters, step = module.configure_optimizers()
        for _ in range(self.max_epochs):
            for batch in loader:
                module.zero_grad()
                loss = module.training_step(batch)
                loss.backward()
                with torch.no_grad():
                    for parameter in parameters:
                        parameter -= step * parameter.grad
        self.callback_metrics["train_loss"] = loss.item()


def loader_of(partition_id):
    """Return the records of a node."""
    generator = torch.Generator().manual_seed(partition_id)
    values = torch.randn(40, 4, generator=generator)
    return DataLoader(TensorDataset(values, (values[:, 0] > 0).long()), 10)
