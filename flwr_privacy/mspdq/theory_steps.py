"""The paper's number of mixing steps as an option of the strategies."""

from dataclasses import dataclass

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.keywords import checked_keywords

from .mixing import Mixing
from .theory import k_rounds, lambda2_P, shift_theta

__all__ = ["TheorySteps"]


@checked_keywords
@dataclass(frozen=True, kw_only=True)
class TheorySteps:
    """The number of mixing steps of Theorems 2 and 3, which grows with the learning round.

    ``ceil(log_lambda eta_t)``, for MSPDQ at least ``ceil(1 / eta_t)``, with the theory's learning
    rate ``eta_t = 2 / (mu (theta + t))`` and ``theta = max(8 L / mu, E) - 1``. lambda is the second
    eigenvalue of the mixing with the first coupling: with a falling one it is too few (fact F7).

    Parameters
    ----------
    convexity : float, default 0.01
        mu, strong convexity of the clients' losses; the paper's example.
    smoothness : float, default 1.0
        L, smoothness of the clients' losses.
    local_steps : int, default 1
        E, steps of a local training.

    Raises
    ------
    InvalidParameterError
        If a value is not positive.

    Examples
    --------
    >>> steps = TheorySteps(convexity=1.0, smoothness=4.0, local_steps=10)
    >>> [steps.rounds(t, Mixing(), quantized=False) for t in (1, 33, 65)]
    [16, 20, 23]
    """

    convexity: float = 0.01
    smoothness: float = 1.0
    local_steps: int = 1

    def __post_init__(self) -> None:
        shift_theta(mu=self.convexity, L=self.smoothness, E=self.local_steps)

    def rounds(self, t: int, mixing: Mixing, *, quantized: bool) -> int:
        """Return the mixing steps after learning round t, from 1 on.

        Raises
        ------
        InvalidParameterError
            If lambda is not known: the coupling is random, or hidden sub-states weigh more than 1.
        """
        if not mixing.known or mixing.weight != 1:
            raise InvalidParameterError(
                "mixing_rounds",
                "theory",
                "a number of steps with random couplings, or hidden sub-states of a weight above 1",
            )
        return k_rounds(
            mu=self.convexity,
            L=self.smoothness,
            E=self.local_steps,
            t=t,
            lam=lambda2_P(mixing.kappa, mixing.largest_gain(0)),
            quantized=quantized,
        )
