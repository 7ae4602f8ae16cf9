"""Functions that an experiment draws where a figure shows no training."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flwr_privacy.errors import check_choice
from flwr_privacy.udp.moments import ln_moment, ln_moment_paper

__all__ = ["FUNCTIONS", "Function"]

_FORMS = {"exact": ln_moment, "bound": ln_moment_paper}


def moment(lambda_: float, settings: Mapping[str, Any]) -> float:
    """Return the moment of a release in Wei et al., Fig. 2, for an order.

    Parameters
    ----------
    lambda_ : float
        The order, a whole number.
    settings : Mapping
        ``form``: ``exact`` (14) or ``bound`` (15); ``q``, the share of the clients in a round;
        ``records`` of a client; ``step``, the learning rate times the clipping norm; ``sigma``.

    Examples
    --------
    >>> settings = {"form": "bound", "q": 0.9, "records": 800, "step": 1.0, "sigma": 0.01}
    >>> moment(100, settings)
    284.0625
    """
    form = _FORMS[check_choice("form", settings["form"], _FORMS)]
    ratio = 2 * settings["step"] / settings["records"] / settings["sigma"]
    return form(settings["q"], ratio, int(lambda_))


@dataclass(frozen=True)
class Function:
    """What is drawn: its name, and from the value of the sweep and a curve's settings to it."""

    label: str
    of: Callable[[float, Mapping[str, Any]], float]


FUNCTIONS = {"udp-moment": Function("ln D10", moment)}
