"""The sum of clipped updates under central differential privacy, and the mean made of it."""

import numpy as np
from numpy.typing import NDArray

from .adaptive_clipping import COUNT_GRID, COUNT_NAME, fraction_below
from .arrays import Arrays
from .central_dp import SERVER, Terms
from .errors import InvalidParameterError
from .grid import EvenMean, Grid
from .noise import discrete_gaussian
from .randomness import SecureRandom

__all__ = ["CentralMean", "add_noise"]


def add_noise(codes: dict[str, NDArray[np.int64]], terms: Terms, random: SecureRandom) -> None:
    """Add the noise of one who adds any, in place: a client's share, or the trusted server's whole.

    Parameters
    ----------
    codes : dict of str to int64 array
        Codes or sums of them, by name, the count among them if there is one.
    terms : Terms
        Say how much.
    random : SecureRandom
        Where it comes from: the arrays take theirs in the order of their names.
    """
    update, count = terms.share_sigmas()
    for name in sorted(codes):
        sigma = update / Grid(terms.grid).step
        if name == COUNT_NAME and count is not None:
            sigma = count / COUNT_GRID.step
        noise = discrete_gaussian(codes[name].size, sigma, random)
        codes[name] += noise.reshape(codes[name].shape)


class CentralMean(EvenMean):
    """Mean of clipped updates as codes; with the count of those within the norm, if there is one.

    Parameters
    ----------
    start : Mapping of str to ndarray
        The model that the updates start from.
    terms : Terms
        What was asked.

    Notes
    -----
    **Guarantee.** The sum is private once it has its noise: in shares, inside the codes, or by
    `add_noise`; what `settle` and `finish` make of it then costs nothing. See
    `flwr_privacy.central_dp.Schedule`.

    Examples
    --------
    >>> terms = Terms(
    ...     noise="server", sampling="fixed", noise_multiplier=8.0, count_share=0.5,
    ...     epsilon=8.0, delta=1e-5, gap=1e-3, clipping_norm=1.0, grid=-10,
    ... )
    >>> mean = CentralMean({"w": np.zeros(2)}, terms)
    >>> codes = {"w": np.array([600, 0]), COUNT_NAME: np.array([2**16])}
    >>> mean.fold("a", codes, weight=1)
    >>> mean.fold("b", codes, weight=1)
    >>> mean.add_noise(SecureRandom.insecure(0))
    >>> round(mean.settle(2), 1), mean.finish()["w"].round(1)
    (-5.4, array([ 2.9, -3.4]))
    """

    def __init__(self, start: Arrays, terms: Terms) -> None:
        super().__init__(start, Grid(terms.grid), terms.names(start))
        self._terms = terms
        if terms.count_share:
            self.template[COUNT_NAME] = ((1,), np.dtype(np.int32))

    def add_noise(self, random: SecureRandom) -> None:
        """Add the noise of a trusted server to the sums, of however few replies; once.

        Parameters
        ----------
        random : SecureRandom
            Where it comes from.

        Raises
        ------
        InvalidParameterError
            If the clients add the noise.
        """
        if self._terms.noise != SERVER:
            raise InvalidParameterError("noise", self._terms.noise, SERVER)
        for name, (shape, _) in self.template.items():
            self._sums.setdefault(name, np.zeros(shape, self.sum_dtype))
        add_noise(self._sums, self._terms, random)

    def settle(self, number: float) -> float | None:
        """Make it the mean over a number of contributions; take the count out.

        Parameters
        ----------
        number : float
            What sums are divided by: the number of contributions, or the expected one where the
            actual one is secret. It becomes the `weight`.

        Returns
        -------
        float or None
            The noised fraction of updates within the norm; None where it was not counted.

        Raises
        ------
        InvalidParameterError
            If `number` is not above 0.
        """
        self.weight = number
        if COUNT_NAME not in self.template:
            return None
        halves = COUNT_GRID.step * float(self._sums.pop(COUNT_NAME)[0])
        return fraction_below(halves, number)
