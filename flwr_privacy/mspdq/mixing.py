"""Mixes models by steps of average consensus in which only the visible sub-states are sent.

Equations (3) to (6) for MSP, (21) and (22) for MSPDQ, with its first line corrected: the coupling
works on the exact visible sub-state, the consensus on what the server heard of it.

    v[k+1] = v[k] + kappa (W[k] - heard[k]) + a[k] (H[k] - m v[k])
    H[k+1] = H[k]                           - a[k] (H[k] - m v[k])

H is the sum of the m hidden sub-states. With one coupling for all of them, the visible sub-state
depends on nothing else, so H is all that is kept.

With ``mass="normalized"`` each hidden sub-state weighs 1/m, and H is their mean: the equations are
those of m = 1, whatever m is. With the paper's masses, clients of unequal m reach
``sum (1 + m_i) w_i / sum (1 + m_i)`` and not the mean.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer, check_number
from flwr_privacy.privacy.randomness import SecureRandom

from .theory import check_kappa, largest_stable, max_coupling, residual, rounds_needed

__all__ = ["COUPLINGS", "MASSES", "M_MODES", "Mixing", "SubStates"]

COUPLINGS = ("const", "harmonic", "sqrt", "random")
"""How the coupling goes on: gamma, gamma / (k + 1), gamma / sqrt(k + 1), uniform on (0, gamma]."""

MASSES = ("paper", "normalized")
"""What the hidden sub-states weigh: 1 each, or 1/m each."""

M_MODES = ("common", "iid")
"""Whose number of hidden sub-states m is: of all, or each client draws its own, up to m."""

Vectors = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """Parameters of the mixing after a learning round.

    Parameters
    ----------
    kappa : float, default 0.5
        Consensus gain, between 0 and 1.
    gamma : float, default 0.3
        Coupling of the visible with each hidden sub-state, above 0.
    coupling : {"const", "harmonic", "sqrt", "random"}, default "const"
        How the coupling goes on, see `COUPLINGS`. ``random`` is drawn by each client in each step.
    rounds : int, default 10
        Mixing steps K, at least 0.
    m : int, default 1
        Hidden sub-states, at least 1; the same for all clients if the average is to be theirs.
    mass : {"paper", "normalized"}, default "paper"
        What they weigh.
    m_mode : {"common", "iid"}, default "common"
        With ``iid`` every client draws its own number from 1 to m in each learning round, uniformly
        and in secret. Then single averages are not that of the models, but their mean over the
        draws is; and the number hides no model (see *Guarantee*).
    paper : bool, default False
        Keep to the range that Theorem 2 asks for, gamma below `max_coupling(kappa)`. There the
        number of hidden sub-states may go beyond what is stable, as in figure 7. Otherwise a gamma
        is refused that would not converge.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Notes
    -----
    ``(1 + m) gamma = 1`` with a constant coupling (gamma = 1/2 for m = 1) gives the average after
    one step: fast, and without any masking, because the second message is the model.

    **Guarantee.** Splitting and mixing protect a model from nobody who sees a client's messages,
    which the server does: it can solve for the model from the first two
    (`flwr_privacy.simulations.research.mspdq.consensus`), by the same equations by which it is
    mixed. Where the coupling is random the conservation law still gives it away as the average
    converges. What protects is a secure sum, under which no message can be told from random bits
    (`flwr_privacy.secure_sum`); the server then learns the averages W[k], and what they tell.

    Examples
    --------
    >>> mixing = Mixing(gamma=0.1, coupling="harmonic", rounds=10)
    >>> round(mixing.residual, 4), Mixing(gamma=0.1).rounds_needed(0.01)
    (0.5377, 21)
    """

    kappa: float = 0.5
    gamma: float = 0.3
    coupling: str = "const"
    rounds: int = 10
    m: int = 1
    mass: str = "paper"
    m_mode: str = "common"
    paper: bool = False

    def __post_init__(self) -> None:
        check_kappa(self.kappa)
        check_choice("coupling", self.coupling, COUPLINGS)
        check_integer("rounds", self.rounds, minimum=0)
        check_integer("m", self.m, minimum=1)
        check_choice("mass", self.mass, MASSES)
        check_choice("m_mode", self.m_mode, M_MODES)
        if self.m_mode == "iid" and self.weight == 1:
            allowed = "'common' where hidden sub-states weigh 1 in any case"
            raise InvalidParameterError("m_mode", self.m_mode, allowed)
        if not check_number("gamma", self.gamma) > 0:
            raise InvalidParameterError("gamma", self.gamma, "a number above 0")
        if self.paper:
            cap, name = max_coupling(self.kappa), f"max_coupling(kappa={self.kappa})"
        elif self.coupling in ("const", "random"):
            cap = largest_stable(self.kappa, self.weight)
            name = f"largest_stable(kappa={self.kappa}, m={self.weight})"
        else:  # it falls to zero, so in the end it is stable
            return
        if self.gamma >= cap:
            raise InvalidParameterError("gamma", self.gamma, f"less than {name} = {cap:.6f}")

    @property
    def weight(self) -> int:
        """Weight of all hidden sub-states of a client together; the visible one weighs 1.

        The largest, where each client draws its own.
        """
        return self.m if self.mass == "paper" else 1

    @property
    def known(self) -> bool:
        """Whether all clients have the same couplings and the same weight, known beforehand."""
        return self.coupling != "random" and self.m_mode == "common"

    def own_weight(self, random: SecureRandom) -> int:
        """Return a client's `weight` for a learning round; drawn only where each has its own."""
        if self.m_mode == "common":
            return self.weight
        return 1 + (int(random.uint64(1)[0]) * self.weight >> 64)

    @property
    def residual(self) -> float:
        """Share of the first mean's error that is left after all steps.

        Raises
        ------
        InvalidParameterError
            If the coupling is random or each client draws its m: unequal clients have no such
            share.
        """
        self._check_known()
        return residual(map(self.largest_gain, range(self.rounds)), self.weight)

    def rounds_needed(self, tolerance: float) -> int:
        """Return the mixing steps after which the absolute residual is at most `tolerance`.

        Raises
        ------
        InvalidParameterError
            If there are too many, or couplings or m are not known.
        """
        self._check_known()
        return rounds_needed(tolerance, self.largest_gain, self.weight)

    def largest_gain(self, k: int) -> float:
        """Return the largest coupling that a client may have in step k, the paper's a_max[k]."""
        if self.coupling == "harmonic":
            return self.gamma / (k + 1)
        if self.coupling == "sqrt":
            return float(self.gamma / np.sqrt(k + 1))
        return self.gamma

    def gain(self, k: int, random: SecureRandom) -> float:
        """Return a client's coupling in step k; drawn only where the coupling is random."""
        if self.coupling != "random":
            return self.largest_gain(k)
        return self.gamma * (1 - int(random.uint64(1)[0] >> np.uint64(11)) * 2.0**-53)

    def _check_known(self) -> None:
        if self.coupling == "random":
            raise InvalidParameterError("coupling", self.coupling, "one that is known beforehand")
        if not self.known:
            raise InvalidParameterError("m_mode", self.m_mode, "'common', known beforehand")


@dataclass(kw_only=True, eq=False, repr=False)
class SubStates:
    """The sub-states of a client's model during mixing; they are secret.

    Arrays may have a leading axis of clients, to run many at once; gains and weights then are
    numbers, or columns with one for each client.

    Parameters
    ----------
    visible : ndarray of float64, shape (d,)
        The visible sub-state v.
    hidden : ndarray of float64, shape (d,)
        The sum H of the hidden ones (their mean, where the masses are normalized).

    Examples
    --------
    >>> states = SubStates.split(np.array([1.0]), visible=np.array([0.5]), weight=1)
    >>> states.step(np.array([2.25]), states.visible.copy(), kappa=0.5, gain=0.1, weight=1)
    >>> states.visible, states.hidden
    (array([1.475]), array([1.4]))
    """

    visible: Vectors
    hidden: Vectors

    @classmethod
    def split(cls, model: Vectors, visible: Vectors, *, weight: int | Vectors) -> "SubStates":
        """Return a model's sub-states for a visible one: together they are ``(1 + weight) model``.

        Parameters
        ----------
        model : ndarray of float64, shape (d,)
            The trained model.
        visible : ndarray of float64, shape (d,)
            The first visible sub-state: drawn by a `flwr_privacy.mspdq.splitting.Split`, rounded
            to the knobs of the start, or the common start. It is copied.
        weight : int
            `Mixing.own_weight`.
        """
        visible = np.array(visible, np.float64)
        return cls(visible=visible, hidden=(1 + weight) * model - visible)

    def gap(self, *, weight: int | Vectors) -> Vectors:
        """Return ``H - weight * v``, the sum of the gaps of hidden and visible sub-states."""
        gap: Vectors = weight * self.visible
        return np.subtract(self.hidden, gap, out=gap)

    def step(
        self,
        average: Vectors,
        heard: Vectors,
        *,
        kappa: float,
        gain: float | Vectors,
        weight: int | Vectors,
    ) -> None:
        """Carry out one mixing step, equations (3) and (21); no array is changed.

        The mean over all clients keeps its course only if `average` is exactly that of what the
        server `heard` of each.

        Parameters
        ----------
        average : ndarray of float64, shape (d,)
            The server's average W[k].
        heard : ndarray of float64, shape (d,)
            What the server has of this client's visible sub-state: the decoded value in MSPDQ, in
            MSP the visible sub-state as it was sent, in the precision in which it was.
        kappa : float
            `Mixing.kappa`.
        gain : float
            `Mixing.gain` of this step.
        weight : int
            `Mixing.own_weight`.
        """
        flow = self.gap(weight=weight)
        flow *= gain
        pull = average - heard
        pull *= kappa
        # Into the intermediate arrays: those of before may be of a state that somebody keeps.
        pull += self.visible
        pull += flow
        self.visible, self.hidden = pull, np.subtract(self.hidden, flow, out=flow)
