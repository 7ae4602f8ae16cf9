"""The training loop of a simulation's client under DP-SGD: as an app has it."""

from typing import Any

import torch
from flwr.app import Context
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_privacy.clients.certificates.private_steps import current_private_steps
from flwr_privacy.clients.torch import private_training
from flwr_privacy.clients.torch.computing import Loss, allotted_device

__all__ = ["descend_privately"]


def descend_privately(
    model: nn.Module,
    features: NDArray[Any],
    labels: NDArray[Any],
    context: Context,
    *,
    loss: Loss,
    learning_rate: float,
) -> bool:
    """Do private gradient descent in place, if the scheme around the training asks for it.

    Parameters
    ----------
    model : Module
        Takes a batch of features.
    features, labels : ndarray
        The client's records.
    context : Context
        Flower's context of the client.
    loss : callable
        From the model's output for a batch and its labels to their mean loss.
    learning_rate : float
        Step size.

    Returns
    -------
    bool
        Whether it was asked for.
    """
    if current_private_steps() is None:
        return False
    device = allotted_device()
    model.to(device).train()
    records = TensorDataset(torch.from_numpy(features), torch.from_numpy(labels))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer: Any = torch.optim.SGD(trained, lr=learning_rate)
    loader: Any = DataLoader(records)
    model, optimizer, loader = private_training(model, optimizer, loader, context)
    for _ in range(loader.passes):
        for x, y in loader:
            optimizer.zero_grad()
            torch.autograd.backward(loss(model(x.to(device)), y.to(device)))
            optimizer.step()
    return True
