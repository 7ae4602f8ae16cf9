"""The terms of MSP and MSPDQ: the parameters of a learning round on the wire."""

from dataclasses import dataclass, field
from functools import cached_property

from flwr_privacy.coding.quantize import MOST_LEVELS
from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer

from .intervals import RULES, Intervals
from .mixing import Mixing
from .splitting import NoiseSplit, Split, UniformSplit

__all__ = ["CODES", "MIX", "SPLITS", "STARTS", "SYNC", "MSPTerms"]

MIX, SYNC = "mix", "sync"
"""Phases: a mixing step; taking up the common start that one client's split gave."""

CODES = "codes"
"""Name of the array of codes in a reply."""

SPLITS = ("uniform", "uniform_m", "laplace", "gaussian")
"""Laws of the visible sub-state; see `flwr_privacy.mspdq.splitting`."""

STARTS = ("independent", "reference", "global")
"""From which vector MSPDQ starts: each client's own split, that of one client, the global model."""


@dataclass(frozen=True, kw_only=True)
class MSPTerms:
    """Parameters of a learning round.

    Parameters
    ----------
    kappa, gamma, coupling, rounds, m, mass, m_mode, paper
        As in `flwr_privacy.mspdq.mixing.Mixing`.
    split : {"uniform", "uniform_m", "laplace", "gaussian"}, default "uniform"
        How the visible sub-state is drawn. ``uniform_m`` is the law that Algorithm 1 prints, whose
        mean is not the model for m above 1.
    eps_s : float, default 0.3
        Splitting factor of the uniform laws, in [0, 1).
    scale : float, default 1.0
        Scale of the Laplace law, or standard deviation of the Gaussian one.
    start : {"independent", "reference", "global"}, default "independent"
        Where mixing starts. There is no split with ``global``, and with ``reference`` only one
        client's.
    levels : int, default 0
        Knobs of an interval; 0 sends values as they are (MSP).
    interval : {"paper", "fixed", "linf", "bound", "self"}, default "self"
        Rule of the widths, see `flwr_privacy.mspdq.intervals`.
    keep_back : list of str
        Arrays that are not sent, beside those of integers and running statistics.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed, or the interval's rule does not fit the start.
    """

    kappa: float = 0.5
    gamma: float = 0.3
    coupling: str = "const"
    rounds: int = 10
    m: int = 1
    mass: str = "paper"
    m_mode: str = "common"
    paper: bool = False
    split: str = "uniform"
    eps_s: float = 0.3
    scale: float = 1.0
    start: str = "independent"
    levels: int = 0
    interval: str = "self"
    keep_back: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check_choice("split", self.split, SPLITS)
        check_choice("start", self.start, STARTS)
        check_choice("interval", self.interval, RULES)
        check_integer("levels", self.levels, minimum=0, maximum=MOST_LEVELS)
        _ = self.mixing, self.law
        if self.start != "independent" and self.rounds == 0:
            raise InvalidParameterError("mixing_rounds", 0, f"at least 1 from a {self.start} start")
        if self.levels == 0 and self.start != "independent":
            raise InvalidParameterError("start", self.start, "'independent' without quantization")
        if self.levels == 1:
            raise InvalidParameterError("levels", self.levels, "0, or at least 2")
        if self.interval == "bound" and self.start != "global" and self.levels:
            raise InvalidParameterError(
                "interval", self.interval, "another one: it needs the global start"
            )
        if self.interval == "bound" and self.coupling == "random":
            raise InvalidParameterError("coupling", self.coupling, "one that is known beforehand")
        if self.m_mode == "iid" and (self.interval == "bound" or self.split == "uniform_m"):
            allowed = "'common' with interval = 'bound' or split = 'uniform_m', which follow from m"
            raise InvalidParameterError("m_mode", self.m_mode, allowed)

    @cached_property
    def mixing(self) -> Mixing:
        """The mixing."""
        return Mixing(
            kappa=self.kappa,
            gamma=self.gamma,
            coupling=self.coupling,
            rounds=self.rounds,
            m=self.m,
            mass=self.mass,
            m_mode=self.m_mode,
            paper=self.paper,
        )

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return (self.levels - 1).bit_length()

    @property
    def law(self) -> Split:
        """The law of the visible sub-state."""
        if self.split in ("uniform", "uniform_m"):
            return UniformSplit(eps_s=self.eps_s, m=self.m if self.split == "uniform_m" else 1)
        return NoiseSplit(law=self.split, scale=self.scale)

    @property
    def leaps(self) -> bool:
        """Whether a client can take the first step by itself, and so send message 1 at once.

        All know the first average where the start is common, and the width where no client needs to
        say anything for it, or each says its own.
        """
        common = self.levels > 0 and self.start != "independent" and self.rounds > 0
        return common and self.interval in ("fixed", "bound", "self")

    @property
    def intervals(self) -> Intervals:
        """The rule of the widths without its constants, which a client does not need."""
        return Intervals(rule=self.interval)
