"""Adds the trusted server's correlated noise to the sums of a model's arrays, round by round."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.central_dp.correlated.factors import Factor
from flwr_privacy.central_dp.correlated.stream import (
    check_sigma,
    check_size,
    new_stream,
    vectors_kept,
)
from flwr_privacy.errors import ProtocolError
from flwr_privacy.privacy.grid import CodeGrid
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.wire.arrays import Arrays

from .terms import CentralDPTerms

__all__ = ["ModelNoise"]


class ModelNoise:
    """The noise of all rounds of a training, for the arrays of one model.

    Parameters
    ----------
    factor : Factor
        How the noise of rounds goes together.
    model : Mapping of str to ndarray
        The arrays whose updates are summed.
    """

    def __init__(self, factor: Factor, model: Arrays) -> None:
        self._sizes = {name: np.size(model[name]) for name in sorted(model)}
        self._factor = factor
        self._stream = new_stream(factor, sum(self._sizes.values()))

    @property
    def kept_bytes(self) -> int:
        """Bytes that are kept from round to round, and in each checkpoint, at most."""
        return 8 * vectors_kept(self._factor) * sum(self._sizes.values())

    def check(self, terms: CentralDPTerms) -> None:
        """Refuse a grid that is too coarse for the truncated states of a `BLT`, or too fine.

        Raises
        ------
        InvalidParameterError
            If it is.
        """
        largest = terms.clipping_norm / CodeGrid(terms.grid).step
        size = sum(self._sizes.values())
        check_sigma(self._factor, terms.sigma() / CodeGrid(terms.grid).step)
        check_size(self._factor, size=size, rounds=terms.rounds, largest=largest)

    def add_to(
        self,
        server_round: int,
        sums: dict[str, NDArray[np.int64]],
        terms: CentralDPTerms,
        random: SecureRandom,
    ) -> None:
        """Add the noise of a round in place.

        Raises
        ------
        ProtocolError
            If it was added to another sum of the same round, or the round is not one of those whose
            cost was planned.
        """
        if server_round > terms.rounds:
            raise ProtocolError(
                f"round {server_round}: the correlated noise is for {terms.rounds} rounds"
            )
        sigma = terms.sigma() / CodeGrid(terms.grid).step
        noise = self._stream.draw(server_round, sigma, random)
        begin = 0
        for name, size in self._sizes.items():
            sums[name] += noise[begin : begin + size].reshape(sums[name].shape)
            begin += size

    def state(self) -> dict[str, Any]:
        """Return what later rounds depend on. It is as secret as the noise."""
        return self._stream.state()

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._stream.load(state)
