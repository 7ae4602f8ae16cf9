"""Simulates stragglers: draws the virtual seconds that a client takes for an answer.

The times cost no real time. They are a function of (seed, round, client, phase) alone, so they are
the same on every engine and after a resume.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from flwr_privacy.wire.identity import stream

from .errors import check_choice, check_number

__all__ = ["StragglerModel", "Stragglers", "outcome"]

KINDS = ("constant", "exponential", "lognormal")


class Stragglers:
    """Base of the laws of delays, which decide the late clients of an exchange."""

    def finish_time(
        self, *, seed: int | str, server_round: int, client_id: str, phase: str, request: int = 0
    ) -> float:
        """Return the virtual seconds from the question to the answer of one client."""
        raise NotImplementedError

    def race(
        self,
        clients: Collection[str],
        *,
        seed: int | str,
        server_round: int,
        phase: str,
        request: int = 0,
        quorum: int | None = None,
        deadline: float | None = None,
    ) -> tuple[set[str], float]:
        """Return which clients are late, and when the exchange ends.

        Parameters
        ----------
        clients : collection of str
            The clients asked, at least one.
        seed, server_round, phase, request
            As in `finish_time`.
        quorum : int, optional
            The exchange ends with the answer of the `quorum`-th fastest client.
        deadline : float, optional
            It ends after so many virtual seconds at the latest.

        Returns
        -------
        late : set of str
            Clients whose answer comes after the end.
        end : float
            Virtual seconds from the question.

        Examples
        --------
        >>> model = StragglerModel(kind="constant", seconds=3.0)
        >>> sorted(model.race(["a", "b"], seed=0, server_round=1, phase="train", deadline=2.0)[0])
        ['a', 'b']
        """
        times = {
            client: self.finish_time(
                seed=seed,
                server_round=server_round,
                client_id=client,
                phase=phase,
                request=request,
            )
            for client in clients
        }
        return outcome(times, quorum=quorum, deadline=deadline)


@dataclass(frozen=True, kw_only=True)
class StragglerModel(Stragglers):
    """Virtual time of an answer: ``seconds * variation * slowdown``.

    Parameters
    ----------
    kind : {"constant", "exponential", "lognormal"}, default "exponential"
        Law of the variation: 1; ``1 + spread * E`` with E standard exponential (the shifted
        exponential law of the coded-computing literature); ``exp(spread * Z)`` with Z standard
        normal (heavy-tailed).
    seconds : float, default 1.0
        Scale in virtual seconds, > 0.
    spread : float, default 0.5
        Parameter of the law, >= 0.
    slow_fraction : float, default 0.0
        Probability in [0, 1] that a client is a straggler.
    slowdown : float, default 10.0
        Factor >= 1 by which a straggler takes longer.
    persistent : bool, default False
        Whether a client is a straggler for the whole experiment or is drawn anew in every round.

    Raises
    ------
    InvalidParameterError
        If a parameter is out of range.

    Examples
    --------
    >>> model = StragglerModel(kind="constant", seconds=2.0, slow_fraction=1.0, slowdown=3.0)
    >>> model.finish_time(seed=0, server_round=1, client_id="4", phase="train")
    6.0
    """

    kind: str = "exponential"
    seconds: float = 1.0
    spread: float = 0.5
    slow_fraction: float = 0.0
    slowdown: float = 10.0
    persistent: bool = False

    def __post_init__(self) -> None:
        check_choice("stragglers.kind", self.kind, KINDS)
        check_number("stragglers.seconds", self.seconds, minimum=1e-9)
        check_number("stragglers.spread", self.spread, minimum=0)
        check_number("stragglers.slow_fraction", self.slow_fraction, minimum=0, maximum=1)
        check_number("stragglers.slowdown", self.slowdown, minimum=1)

    def finish_time(
        self, *, seed: int | str, server_round: int, client_id: str, phase: str, request: int = 0
    ) -> float:
        """Return the virtual seconds from the question to the answer of one client.

        Parameters
        ----------
        seed : int or str
            Root seed of the experiment (see `flwr_privacy.wire.identity.derive_seed`).
        server_round : int
            Round, from 1.
        client_id : str
            The client.
        phase : str
            Phase within the round.
        request : int, default 0
            Number of the question within the round.
        """
        when = 0 if self.persistent else server_round
        slow = stream(seed, "straggler", client_id, when).random() < self.slow_fraction
        draws = stream(seed, "finish-time", client_id, server_round, phase, request)
        variation = 1.0
        if self.kind == "exponential":
            variation += self.spread * float(draws.standard_exponential())
        elif self.kind == "lognormal":
            variation = float(draws.lognormal(0.0, self.spread))
        return self.seconds * variation * (self.slowdown if slow else 1.0)


def outcome(
    times: Mapping[str, float], *, quorum: int | None, deadline: float | None
) -> tuple[set[str], float]:
    """Return which clients are late, and when an exchange ends, by the times of their answers.

    Parameters
    ----------
    times : mapping of str to float
        Seconds from the question to the answer of each client, at least one.
    quorum, deadline
        As in `StragglerModel.race`.

    Examples
    --------
    >>> outcome({"a": 1.0, "b": 3.0, "c": 2.0}, quorum=2, deadline=None)
    ({'b'}, 2.0)
    """
    end = min(max(times.values()), math.inf if deadline is None else deadline)
    if quorum is not None:
        end = min(end, sorted(times.values())[:quorum][-1])
    return {client for client, seconds in times.items() if seconds > end}, end
