"""Estimates how many clients train, from noised counts of all rounds, and detects too few.

Every number here is made of released sums (`flwr_privacy.privacy.failures`), so it costs no
privacy.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flwr_privacy.errors import check_integer, check_number

__all__ = ["FALSE_ALARM", "TrainedCount", "margin", "noticed"]

FALSE_ALARM = 1e-6
"""Largest probability that a training in which enough clients train is ended for too few."""


def margin(rounds: int) -> float:
    """Return by how many standard deviations the count must fall short after some rounds.

    Notes
    -----
    The noise of all rounds together is sub-Gaussian, as each discrete Gaussian is (also where its
    parameter follows from earlier rounds): it passes m standard deviations with a probability of at
    most exp(-m^2 / 2), here ``FALSE_ALARM / (r (r + 1))`` after round r. These add up to
    `FALSE_ALARM` over any number of rounds.

    Examples
    --------
    >>> round(margin(1), 2), round(margin(100), 2)
    (5.39, 6.79)
    """
    check_integer("rounds", rounds, minimum=1)
    return math.sqrt(2 * math.log(rounds * (rounds + 1) / FALSE_ALARM))


def least(answers: int, quorum: int | None) -> float:
    """Return how many of some answers must come from a training that worked.

    Parameters
    ----------
    answers : int
        Answers in a sum.
    quorum : int, optional
        Answers after which a round goes on, where there is such a number; by default half of them.

    Examples
    --------
    >>> least(20, None), least(20, 15), least(12, 15)
    (10.0, 15.0, 12.0)
    """
    return answers / 2 if quorum is None else float(min(answers, quorum))


def noticed_after(least: float, sigma: float) -> int:
    """Estimate the number of rounds after which it is certain that nobody trains.

    Parameters
    ----------
    least : float
        How many have to train in a round.
    sigma : float
        Standard deviation of the count of a round.

    Examples
    --------
    >>> noticed_after(50, 5.0), noticed_after(50, 50.0)
    (1, 43)
    """
    check_number("least", least, minimum=math.ulp(0.0))
    check_number("sigma", sigma, minimum=0)
    rounds, needed = 0, 1
    while rounds < needed:  # from below: the margin grows slowly
        rounds = needed
        needed = math.ceil((margin(rounds) * sigma / least) ** 2)
    return rounds


def noticed(
    answers: int, sigma: float, quorum: int | None, planned: int | None
) -> tuple[str, bool]:
    """Return a text on how soon the count detects failures, and whether it does so in time.

    Parameters
    ----------
    answers : int
        Answers of a round.
    sigma : float
        Standard deviation of the count of a round.
    quorum : int, optional
        See `least`.
    planned : int, optional
        Rounds of the training.

    Examples
    --------
    >>> noticed(10, 20.0, None, 100)[0]
    '10 clients: how many of them trained is counted with a standard deviation of 20 a round; that \
all trainings fail would be noticed after about 876 rounds, and there are 100'
    """
    rounds = noticed_after(least(answers, quorum), sigma)
    in_time = planned is None or rounds <= planned
    text = (
        f"{answers} clients: how many of them trained is counted with a standard deviation of "
        f"{sigma:.3g} a round; that all trainings fail would be noticed after about {rounds} "
        f"{'round' if rounds == 1 else 'rounds'}"
    )
    return text + ("" if in_time else f", and there are {planned}"), in_time


@dataclass
class TrainedCount:
    """Estimates how many clients trained over the rounds so far, from released values only.

    Parameters
    ----------
    tests : int
        Rounds after which it was looked at whether too few train.
    rounds : int
        Rounds that are in the numbers below: fewer than `tests` where a run was ended for too few,
        its clients were mended, and it goes on.
    answers : int
        Answers in their sums.
    trained : float
        How many of them came of a training that worked, without bias.
    missing : float
        By how much these are fewer than they have to be.
    variance : float
        Of both.
    last_round, last_trained, last_variance
        The same of the last round that was counted.
    told : bool
        Whether the run was ended with an error because too few trained.

    Examples
    --------
    >>> count = TrainedCount()
    >>> count.add(1, answers=100, failed=97.5, sigma=5.0, quorum=None)
    >>> count.numbers(1), count.too_few
    ({'trained': 2.5, 'trained_sigma': 5.0}, True)
    """

    tests: int = 0
    rounds: int = 0
    answers: int = 0
    trained: float = 0.0
    missing: float = 0.0
    variance: float = 0.0
    last_round: int = 0
    last_trained: float = 0.0
    last_variance: float = 0.0
    told: bool = False

    def add(
        self, server_round: int, *, answers: int, failed: float, sigma: float, quorum: int | None
    ) -> None:
        """Add the count of one round.

        Parameters
        ----------
        server_round : int
            The round.
        answers : int
            Answers in the sum.
        failed : float
            How many of them came of a training that failed, noise included.
        sigma : float
            Standard deviation of that noise.
        quorum : int, optional
            See `least`.
        """
        trained = answers - failed
        self.tests += 1
        self.rounds += 1
        self.answers += answers
        self.trained += trained
        self.missing += least(answers, quorum) - trained
        self.variance += sigma**2
        self.last_round, self.last_trained, self.last_variance = server_round, trained, sigma**2

    @property
    def too_few(self) -> bool:
        """Whether it is certain that too few clients trained."""
        return self.rounds > 0 and self.missing > margin(self.tests) * math.sqrt(self.variance)

    def numbers(self, server_round: int) -> dict[str, float]:
        """Return the estimate for a round and its standard deviation, if clients were counted."""
        if server_round != self.last_round:
            return {}
        return {"trained": self.last_trained, "trained_sigma": math.sqrt(self.last_variance)}

    def text(self) -> str:
        """Return the estimate as a phrase for a log line or an error."""
        needed = self.trained + self.missing
        return (
            f"of {self.answers} answers in {self.rounds} rounds about {self.trained:.0f} came of a "
            f"training that worked (standard deviation {math.sqrt(self.variance):.0f}), and at "
            f"least {needed:.0f} have to"
        )

    def state(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "TrainedCount":
        """Restore what `state` returned.

        A run that was ended for too few and goes on begins to count anew: its clients were
        repaired. One that was killed before it said so ends when it goes on.
        """
        count = cls(**state)
        return cls(tests=count.tests) if count.told else count
