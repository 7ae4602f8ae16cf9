"""Sums gradients of clients with different straggler rates, each scaled by its own rate."""

import math
from collections.abc import Collection, Mapping

import numpy as np

from flwr_privacy.privacy.averaging import EvenWeights, ReplyRefusedError, WeightedMean

from .sums import GRADIENT, SIZE, RoundSums, round_sums, sums_of
from .terms import RECORD, GradientTerms

__all__ = ["OwnRates"]


class OwnRates:
    """How the gradients of a round add up.

    Parameters
    ----------
    rates : mapping of str to float
        Probability that the gradient of a client is missing.
    terms : GradientTerms
        What the clients are asked.
    """

    def __init__(self, rates: Mapping[str, float], terms: GradientTerms) -> None:
        self._rates, self._terms = rates, terms

    def accumulator(self) -> EvenWeights:
        """Return an empty sum of gradients, each scaled by its client's rate."""
        terms = self._terms
        return EvenWeights({GRADIENT: np.zeros((terms.features, terms.labels)), SIZE: np.zeros(1)})

    def add(self, mean: WeightedMean, client: str, alone: WeightedMean) -> None:
        """Add a gradient to a sum, scaled by its client's rate.

        Raises
        ------
        ReplyRefusedError
            If the client has no rate.
        """
        if client not in self._rates:
            raise ReplyRefusedError("unknown client", f"{client} has no straggler_rate")
        sums, p = sums_of(alone, self._terms), self._rates[client]
        scaled = {GRADIENT: sums[GRADIENT] / (1 - p), SIZE: sums[SIZE] * self._size_scale(client)}
        mean.accumulate(client, scaled, weight=1, metrics=alone.metrics())

    def round_sums(self, mean: WeightedMean, clients: Collection[str]) -> RoundSums:
        """Return what a sum says."""
        scales = [self._size_scale(client) ** 2 for client in clients]
        noise = sum(scales) * self._terms.share_of(self._terms.sigma) ** 2
        return round_sums(mean.sums, len(clients), self._terms, size_noise=noise)

    def _size_scale(self, client: str) -> float:
        """Return by what the size of a gradient is scaled.

        So that the squares come to ``sum_i I_i p_i / (1 - p_i)^2 |G_i|^2``; with noise the size is
        a norm.
        """
        p = self._rates[client]
        return math.sqrt(p) / (1 - p) if self._terms.noise == RECORD else p / (1 - p) ** 2
