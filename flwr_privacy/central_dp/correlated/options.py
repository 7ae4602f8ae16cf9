"""Options of correlated noise: which factor, as the user writes it."""

from dataclasses import dataclass
from typing import ClassVar

from flwr_privacy.errors import check_flag, check_integer
from flwr_privacy.keywords import checked_keywords

from .factors import BufferedToeplitzFactor, ToeplitzFactor, TreeFactor
from .optimisation import optimal_banded, optimal_buffered, square_root
from .sensitivity import most_participations

__all__ = ["BLT", "BandedMF", "CorrelatedNoise", "TreeNoise"]

LARGEST_BUFFERS = 5
LARGEST_BANDS = 2**13  # the sum of more coefficients might be above that of any factor


@checked_keywords
@dataclass(frozen=True, kw_only=True)
class BandedMF:
    """Banded matrix factorisation: a round's noise depends on that of the last few rounds.

    The best choice where a participant's rounds are known to lie apart. The server keeps the noise
    of ``bands - 1`` rounds.

    Parameters
    ----------
    bands : int, optional
        Number of coefficients, from 1 to 8192; by default the separation of two participations of
        the same participant. More than the number of rounds count as that.
    optimised : bool, default True
        Whether the coefficients are those of least error at equal privacy, or, without a search,
        those of the square root of the matrix of prefix sums, which are a few percent worse.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Examples
    --------
    >>> BandedMF(optimised=False).factor(rounds=9, separation=3, participations=3)
    ToeplitzFactor(coefficients=(65536, 32768, 24576))
    """

    name: ClassVar[str] = "banded-mf"

    bands: int | None = None
    optimised: bool = True

    def __post_init__(self) -> None:
        if self.bands is not None:
            check_integer("bands", self.bands, minimum=1, maximum=LARGEST_BANDS)
        check_flag("optimised", self.optimised)

    def factor(self, *, rounds: int, separation: int, participations: int) -> ToeplitzFactor:
        """Return the factor for a training.

        Parameters
        ----------
        rounds, separation, participations : int
            As in `flwr_privacy.central_dp.correlated.sensitivity.joint_sensitivity`.

        Raises
        ------
        InvalidParameterError
            If a value is out of range.
        """
        most = _most(rounds, separation, participations)
        bands = min(separation if self.bands is None else self.bands, rounds, LARGEST_BANDS)
        if not self.optimised:
            return square_root(bands)
        return optimal_banded(rounds, bands, separation, most)


@checked_keywords
@dataclass(frozen=True, kw_only=True)
class BLT:
    """Buffered linear Toeplitz: nearly as good as banded, with a few buffers instead of many.

    The best choice for large models, or where nobody knows how far apart a participant's rounds
    are.

    Parameters
    ----------
    buffers : int, default 3
        Largest number of buffers, each as large as the model, from 1 to 5. There are fewer where
        one more would make the error less than 0.1 % smaller.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Examples
    --------
    >>> len(BLT(buffers=3).factor(rounds=400, separation=400, participations=1).decays)
    3
    """

    name: ClassVar[str] = "blt"

    buffers: int = 3

    def __post_init__(self) -> None:
        check_integer("buffers", self.buffers, minimum=1, maximum=LARGEST_BUFFERS)

    def factor(
        self, *, rounds: int, separation: int, participations: int
    ) -> BufferedToeplitzFactor:
        """Return the factor for a training; see `BandedMF.factor`."""
        most = _most(rounds, separation, participations)
        return optimal_buffered(rounds, self.buffers, separation, most)


@checked_keywords
@dataclass(frozen=True, kw_only=True)
class TreeNoise:
    """The binary tree: the sum of t rounds has the noise of at most ``log2(t) + 1`` nodes.

    For comparison: the others have less error.

    Examples
    --------
    >>> TreeNoise().factor(rounds=8, separation=2, participations=4)
    TreeFactor(rounds=8)
    """

    name: ClassVar[str] = "tree"

    def factor(self, *, rounds: int, separation: int, participations: int) -> TreeFactor:
        """Return the factor for a training; see `BandedMF.factor`."""
        _most(rounds, separation, participations)
        return TreeFactor(rounds=rounds)


CorrelatedNoise = BandedMF | BLT | TreeNoise


def _most(rounds: int, separation: int, participations: int) -> int:
    """Return the number of participations that fit, or refuse the values."""
    check_integer("participations", participations, minimum=1)
    return min(participations, most_participations(rounds=rounds, separation=separation))
