r"""Draws a committee member's own stream of correlated noise, of which only sums are opened.

In round t member j adds w^(j)_t to a secure sum: a sample of the discrete Gaussian of parameter
sigma on the integers around

    -u^(j)_t,   u^(j)_t = sum_{i >= 1} c_i w^(j)_{t-i},

which is a multiple of ``2**-FRACTION_BITS``. The server opens Y_t = x_t + sum over members of
w^(j)_t, with a sum x_t of integer codes. `flwr_privacy.central_dp.correlated.stream` cannot be
used for this: it draws on the lattice and rounds, and the sum of rounded streams is no function of
C x + sum z.

Write `DG(sigma, c)` for the law P(k) proportional to exp(-(k - c)^2 / 2 sigma^2) on the integers,
and `lambda_n = log_ratio_bound(sigma, n)` (`flwr_privacy.privacy.distributed_noise`). What follows
is about one coordinate; given the past, coordinates are independent, and d of them count d times.

*Theorem 1.* Let A be n members that are in all sums. Given Y_1, ..., Y_{t-1}, and the streams of
all others, Y_t has, up to a factor of exp(lambda_n), the law

    DG(sigma sqrt(n), (C x)_t - sum_{i >= 1} c_i Y_{t-i}).

x_t may depend on Y_1, ..., Y_{t-1}.

*Proof.* What others add is known: take it for a part of x. Let v_j = w^(j)_t + u^(j)_t. Given the
pasts of all members, v_j is discrete Gaussian around 0 on the integers plus u^(j)_t, and

    sum_j v_j = (Y_t - x_t) + sum_{i >= 1} c_i (Y_{t-i} - x_{t-i})
              = Y_t + sum_{i >= 1} c_i Y_{t-i} - (C x)_t.

By `log_ratio_bound`, which holds for any shifts, sum_j v_j has the law of a single discrete
Gaussian of parameter sigma sqrt(n) around 0 on the same set, up to exp(lambda_n). That is the law
above for Y_t. It is the same for all pasts with these Y_1, ..., Y_{t-1}, so it holds given these
alone. QED.

So a round is a Gaussian mechanism on (C x)_t, given what was seen before: `discretisation_gap` is
about such laws, and n >= h members with sigma = `share_sigma(total, h)` have at least the noise
`total`. Over the rounds they cost together what they cost a trusted server, by the argument in
`stream`, with `summed_gap` in each round.

*Theorem 2: losses may follow from the sums.* Let the server choose, after any round and by what it
has seen, one of the members that are left, and see its stream so far; that member counts as known
from then on. Let it do so at most n - 1 times. Then all that it sees has, up to a factor of
exp(lambda_n) for each round, the law of what adaptive discrete Gaussian mechanisms show:

- in round t, with n_t members left, DG(sigma sqrt(n_t), (C x)_t + what is known);
- when one of n' members that are left is shown, for each round t so far,
  DG(sigma sqrt((n' - 1) / n'), -(C x)_t / n' + what is known).

With 1 / (n' (n' - 1)) = 1 / (n' - 1) - 1 / n', the squared shifts of round t, each over its
variance, add up to |(C x)_t|^2 / (b sigma^2), with b members that are not shown in the end. So a
block costs what it would have cost with these b members from the beginning, up to the gaps below.

*Proof.* Fix the data and all that is seen: the sums y, the choices, the streams that are shown. The
choices follow from what was seen before, so the probability of it all is that of streams which
agree with it. Look at round t. A stream w that was shown before t is known there: let it be 0 from
t on, and R_t^(0) be (C (y - x))_t less the (C w)_t of all these. Let U_t^(k) = (C w)_t for the k-th
stream that is shown after round t, or later, and R_t^(k) = R_t^(0) - U_t^(1) - ... - U_t^(k). Sum
over the streams that are never shown, from the last round to the first. By theorem 1, round t
gives, up to exp(lambda_b), the product of the laws of all U_t^(k) and of the last R_t: each a
discrete Gaussian around 0 on shifted integers, of parameter sigma, and of sigma sqrt(b). Now take
these streams in turns, the last one first. With n' members left when it was shown, U = U_t^(k) and
R = R_t^(k-1),

    U^2 + (R - U)^2 / (n' - 1) = R^2 / n' + (U - R / n')^2 n' / (n' - 1).

So two laws, of U with sigma and of R - U with sigma sqrt(n' - 1), become two others: of R with
sigma sqrt(n'), and of U around R / n' with sigma sqrt((n' - 1) / n'), in which R holds -(C x)_t and
otherwise what is known. Only the sums Z of exp(-r^2 / 2 s^2), by which such laws are divided, do
not quite agree. By Poisson's formula Z is s sqrt(2 pi) for any shift, up to a factor between
1 - e and 1 + e, e = 2 sum_{j >= 1} exp(-2 pi^2 s^2 j^2). The four parameters s cancel, and none is
below sigma / sqrt(2), three not below sigma. For q = exp(-pi^2 sigma^2) <= 1/10 the four factors
are together within exp(4 q); and lambda_(n'-1) + 4 q <= lambda_(n'), by the formula of
`log_ratio_bound`. In the end the law of R_t^(0) is that of y_t. QED.

*Gaps.* Each sum has its `summed_gap`, and each stream that is shown has `shown_gap` in each of its
rounds. The d lambda_n of theorem 2 are in `summed_gap`, once for each round. If it does not follow
from the sums who is lost, theorem 1 for the others is enough.

*BLT.* Each member would truncate states of its own, M of them in each sum. What truncation may move
(`flwr_privacy.central_dp.correlated.stream.margin`) grows with M, and no margin is proven for that.
So a `BufferedToeplitzFactor` is refused. The tree's noise is of integers and needs no such stream;
it leaves twice the noise of ten bands (docs/noise-in-shares.md), and is refused, too.
"""

import math

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError, ProtocolError, check_integer, check_number
from flwr_privacy.privacy.distributed_noise import MOST_PARTIES, SMALLEST_SHARE
from flwr_privacy.privacy.noise import discrete_gaussian_around, discretisation_gap
from flwr_privacy.privacy.randomness import SecureRandom

from .factors import FRACTION_BITS, ToeplitzFactor
from .stream import ToeplitzStream, largest_sigma

__all__ = ["MemberStream", "shown_gap"]

_LARGEST_NOISE = 2**37  # the weighted sum of values below it stays below 2^60 lattice steps


class MemberStream(ToeplitzStream):
    """The noise of one member of a committee, one vector per round of a block.

    Parameters
    ----------
    factor : ToeplitzFactor
        How the noise of rounds goes together.
    size : int
        Number of coordinates, d.

    Attributes
    ----------
    drawn : int
        Last round for which noise was drawn; 0 before the first.

    Raises
    ------
    InvalidParameterError
        For another kind of factor: see the module's text.

    Notes
    -----
    **Guarantee.** *Protected*: integer vectors x_t that neighbours move as the joint sensitivity of
    C allows. *Against*: whoever sees the sums and the streams of all members but n, also if it
    chooses late, from the sums, which ones. *Covered*: all rounds of a block together, as with
    Gaussian noise of parameter ``sigma * sqrt(n)`` on C x, up to the gaps in the module's text.
    *Not covered*: a sum that leaves one of these n out, or has another round's noise of one; noise
    of a round that is in two different sums; what else is known of a state; streams of randomness
    that are not `secure`; the time that sampling takes.

    Examples
    --------
    >>> factor = ToeplitzFactor(coefficients=(1 << FRACTION_BITS, 1 << (FRACTION_BITS - 1)))
    >>> member = MemberStream(factor, 3)
    >>> noise = [member.draw(t, 100.0, SecureRandom.insecure(0, t)) for t in (21, 22)]
    >>> z = noise[1] + noise[0] / 2  # nearly normal with standard deviation 100
    >>> bool((abs(z) < 500).all())
    True
    """

    def __init__(self, factor: ToeplitzFactor, size: int) -> None:
        if not isinstance(factor, ToeplitzFactor):
            raise InvalidParameterError(
                "factor",
                type(factor).__name__,
                "a ToeplitzFactor: for states that every member truncates no margin is proven, and "
                "a tree saves little",
            )
        super().__init__(factor, check_integer("size", size, minimum=0))
        self._largest = largest_sigma(factor)

    def draw(self, server_round: int, sigma: float, random: SecureRandom) -> NDArray[np.int64]:
        """Return the noise of a round.

        Parameters
        ----------
        server_round : int
            The round: any for the first of a block, then one after the other.
        sigma : float
            Parameter of the member's noise in grid steps, the same in every round of a block: from
            3 to 2^24.
        random : SecureRandom
            Where the noise comes from.

        Returns
        -------
        ndarray of int64, shape (d,)

        Raises
        ------
        ProtocolError
            If the noise of the round was drawn before, or if a round was left out.
        InvalidParameterError
            If a parameter is out of range.
        """
        check_integer("server_round", server_round, minimum=1)
        check_number("sigma", sigma, minimum=SMALLEST_SHARE, maximum=self._largest)
        if self.drawn and server_round > self.drawn + 1:
            raise ProtocolError(
                f"round {self.drawn + 1} was left out: a member begins a new stream after it"
            )
        if not self.drawn:
            self.drawn = server_round - 1
        return super().draw(server_round, sigma, random)

    def _next(self, sigma: float, random: SecureRandom) -> NDArray[np.int64]:
        centres = self._less_past(np.zeros(self.size, np.int64))
        noise = discrete_gaussian_around(centres, FRACTION_BITS, sigma, random)
        if max(noise.max(initial=0), -noise.min(initial=0)) > _LARGEST_NOISE:
            raise OverflowError("the noise of a member leaves 37 bits")
        self._keep(noise)
        return noise


def shown_gap(dimension: int, sigma: float, members: int) -> float:
    """Return the epsilon by which a stream that is shown exceeds that of continuous noise.

    It is added to each round of the stream, beside
    `flwr_privacy.privacy.distributed_noise.summed_gap` of the sum: by theorem 2 in the module's
    text, for a member that the server may have lost, or corrupted, because of what the sums were.

    Parameters
    ----------
    dimension : int
        Number of coordinates, d.
    sigma : float
        Parameter of a member's noise in grid steps, at least ``4 * sqrt(n / (n - 1))``.
    members : int
        Number n of members in the sums before it is shown, the member included, >= 2.

    Raises
    ------
    InvalidParameterError
        If a parameter is out of range.

    Examples
    --------
    >>> f"{shown_gap(50_000, 2.0**18, 6):.1g}"
    '6e-09'
    """
    check_integer("members", members, minimum=2, maximum=MOST_PARTIES)
    return discretisation_gap(dimension, sigma * math.sqrt((members - 1) / members))
