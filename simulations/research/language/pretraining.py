"""Trains the base model on public text, in a minute or two."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flwr_privacy.clients.torch import get_arrays, initialise
from flwr_privacy.clients.torch.computing import one_thread

from .texts import Language, Tokens
from .transformer import CausalTransformer, token_loss

__all__ = ["Size", "base_arrays", "loss_on"]

Size = tuple[tuple[str, int], ...]
"""Arguments of `CausalTransformer`, as pairs."""

_BATCH, _LEARNING_RATE = 64, 1e-3


@lru_cache(maxsize=2)
def base_arrays(seed: int, *, sentences: int, size: Size = ()) -> dict[str, NDArray[Any]]:
    """Return the weights of a model that was trained on public text once through.

    Parameters
    ----------
    seed : int
        Root of the language, of the first weights, and of the order.
    sentences : int
        Sentences of public text.
    size : Size, default ()
        What differs from the model's usual size.
    """
    language = Language(seed)
    text = language.text(language.public(), sentences, "public")
    model = initialise(lambda: CausalTransformer(**dict(size)), seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=_LEARNING_RATE)
    model.train()
    with one_thread():
        for batch in torch.split(torch.from_numpy(text), _BATCH):  # sentences are in a random order
            optimiser.zero_grad()
            _loss(model, batch).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return get_arrays(model)


def loss_on(model: torch.nn.Module, texts: Sequence[Tokens]) -> float:
    """Return the mean loss per token over the text of all clients, each counting the same."""
    model.eval()
    with one_thread(), torch.no_grad():
        return float(np.mean([float(_loss(model, torch.from_numpy(text))) for text in texts]))


def _loss(model: torch.nn.Module, sentences: Tensor) -> Tensor:
    return token_loss(model(sentences[:, :-1]), sentences[:, 1:])
