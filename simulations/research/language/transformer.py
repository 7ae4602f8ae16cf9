"""A causal transformer of a few million weights, of layers that each scheme can train.

Its attention is written with linear layers and products of matrices alone, so that gradients of
single records can be taken, and adapters put on each layer by its name.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from .texts import LENGTH, PADDING, VOCABULARY

__all__ = ["CausalTransformer", "token_loss"]


class CausalTransformer(nn.Module):
    """A language model: from the tokens so far to the logits of the next one.

    Parameters
    ----------
    width : int, default 144
        Of its vectors; a multiple of `heads`.
    layers, heads : int, default 4 each
        Layers, and attention heads of each.

    Notes
    -----
    Input (batch, length) int64, output (batch, length, VOCABULARY). By default it has 1.1 million
    weights. There is no dropout, which would draw random numbers, and no statistics of the data.

    Examples
    --------
    >>> model = CausalTransformer(width=16, layers=1)
    >>> model(torch.ones((2, 5), dtype=torch.int64)).shape
    torch.Size([2, 5, 458])
    """

    def __init__(self, *, width: int = 144, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(_Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each next token."""
        places = torch.arange(tokens.shape[-1], device=tokens.device).expand_as(tokens)
        vectors = self.tokens(tokens) + self.places(places)
        for layer in self.layers:
            vectors = layer(vectors)
        logits: Tensor = self.head(self.norm(vectors))
        return logits


class _Layer(nn.Module):
    """Attention to earlier places, and a perceptron on each, both beside what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_perceptron = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.wider, self.narrower = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, vectors: Tensor) -> Tensor:
        vectors = vectors + self.out(self._attended(self.norm_attention(vectors)))
        inner = functional.gelu(self.wider(self.norm_perceptron(vectors)))
        out: Tensor = vectors + self.narrower(inner)
        return out

    def _attended(self, vectors: Tensor) -> Tensor:
        query, key, value = (
            layer(vectors).unflatten(-1, (self.heads, -1)).transpose(-2, -3)
            for layer in (self.query, self.key, self.value)
        )
        length = vectors.shape[-2]
        later = torch.ones(length, length, dtype=torch.bool, device=vectors.device).triu(1)
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        weights = scores.masked_fill(later, -math.inf).softmax(dim=-1)
        attended: Tensor = (weights @ value).transpose(-2, -3).flatten(-2)
        return attended


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of the targets that are no padding.

    Parameters
    ----------
    logits : (..., length, VOCABULARY) Tensor
        The model's output.
    targets : (..., length) int64 Tensor
        The tokens that came next.
    """
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=PADDING)
