"""Trains a client's language model: as its user would, by single records, or in private steps."""

from typing import Any, Protocol

import torch
from flwr.app import Context
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from flwr_privacy.clients.torch import private_training, train_per_record
from flwr_privacy.clients.torch.computing import one_thread

from .texts import PADDING, Tokens
from .transformer import token_loss

__all__ = ["Training", "by_records", "descend", "descend_privately"]

_BATCH = 16
_LEARNING_RATE = 3e-3


class Training(Protocol):
    """Trains a model in place."""

    def __call__(
        self, model: nn.Module, text: Tokens, context: Context, *, epochs: int, seed: int
    ) -> None:
        """Train.

        Parameters
        ----------
        model : Module
            With adapters, and the server's arrays.
        text : (n, LENGTH) int64
            The client's sentences.
        context : Context
            Flower's context of the client.
        epochs : int
            Passes over the sentences, where the scheme does not say how many steps there are.
        seed : int
            Root of the order of batches, where the scheme does not draw them.
        """


def descend(model: nn.Module, text: Tokens, context: Context, *, epochs: int, seed: int) -> None:
    """Train as a user would: some passes with Adam, in batches. See `Training`."""
    generator = torch.Generator().manual_seed(seed)
    sentences = torch.from_numpy(text)
    optimiser = _adam(model)
    model.train()
    with one_thread():
        for _ in range(epochs):
            for batch in torch.split(torch.randperm(len(text), generator=generator), _BATCH):
                optimiser.zero_grad()
                loss = token_loss(model(sentences[batch, :-1]), sentences[batch, 1:])
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()


def by_records(model: nn.Module, text: Tokens, context: Context, *, epochs: int, seed: int) -> None:
    """Take the step of the scheme, in which each sentence's gradient is clipped. See `Training`."""
    train_per_record(model, text[:, :-1], text[:, 1:], loss=token_loss)


def descend_privately(
    model: nn.Module, text: Tokens, context: Context, *, epochs: int, seed: int
) -> None:
    """Train with Adam in the private steps of the scheme (DP-SGD). See `Training`."""
    sentences = torch.from_numpy(text)
    loader: Any = DataLoader(TensorDataset(sentences[:, :-1], sentences[:, 1:]), _BATCH)
    optimiser: Any = _adam(model)
    model.train()
    model, optimiser, loader = private_training(model, optimiser, loader, context)
    with one_thread():
        for _ in range(loader.passes):
            for words, targets in loader:
                optimiser.zero_grad()
                torch.autograd.backward(_losses(model(words), targets).mean())
                optimiser.step()


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each sentence: the mean over its tokens that are no padding."""
    each = functional.cross_entropy(
        logits.transpose(-1, -2), targets, ignore_index=PADDING, reduction="none"
    )
    return each.sum(dim=-1) / (targets != PADDING).sum(dim=-1)


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=_LEARNING_RATE)
