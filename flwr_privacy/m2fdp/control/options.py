"""The constructor option of M2FDP for the control of rounds."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from flwr_privacy.errors import check_choice, check_integer
from flwr_privacy.keywords import checked_keywords

__all__ = ["AdaptiveControl"]

_FIRST = 5  # the paper's local steps of the first round


@checked_keywords
@dataclass(frozen=True, kw_only=True)
class AdaptiveControl:
    """Chooses K and the participation before every round; the training ends when steps run out.

    See `flwr_privacy.m2fdp.AdaptiveController`, which gets tree, model, schedule and budget of the
    training.

    What is left out is as the paper has it with `PaperNoise`: not normalised, ``printed``, ``all``,
    and 5 (or `max_steps`, if that is less). Otherwise it is normalised, ``dedup``, ``scheduled``,
    and the first round is like the others.

    Parameters
    ----------
    total_steps : int
        Local steps of the whole training.
    max_steps : int
        Most local steps of a round.
    weights : (float, float, float), default (1, 1, 1)
        Of energy, delay and noise.
    normalise : bool, optional
        Whether each of the three is divided by its value in the largest round.
    nu : {"dedup", "printed"}, optional
        How the noise term counts.
    active_tiers : "scheduled", "all" or sequence of int, optional
        Which tiers it sums over.
    initial_steps : int, optional
        Steps of the first round, in which everybody takes part.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    total_steps: int
    max_steps: int
    weights: Sequence[float] = (1.0, 1.0, 1.0)
    normalise: bool | None = None
    nu: Literal["dedup", "printed"] | None = None
    active_tiers: Literal["scheduled", "all"] | Sequence[int] | None = None
    initial_steps: int | None = None

    def __post_init__(self) -> None:
        check_integer("total_steps", self.total_steps, minimum=1)
        check_integer("max_steps", self.max_steps, minimum=1)
        if self.nu is not None:
            check_choice("nu", self.nu, ("dedup", "printed"))
        if isinstance(self.active_tiers, str):
            check_choice("active_tiers", self.active_tiers, ("all", "scheduled"))

    def parameters(self, *, printed: bool) -> dict[str, Any]:
        """Return those of an `AdaptiveController`.

        Parameters
        ----------
        printed : bool
            Whether what is left out is as the paper has it.
        """
        usual: dict[str, Any] = {}
        if printed:
            first = min(_FIRST, self.max_steps)
            usual = {"normalise": False, "nu": "printed", "active_tiers": "all"}
            usual["initial_steps"] = first
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return usual | {name: value for name, value in given.items() if value is not None}
