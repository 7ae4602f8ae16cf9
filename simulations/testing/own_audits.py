"""Audits of anybody's strategy and client, as checks of a test.

They fail with an `AssertionError` that says what is wrong.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from flwr_privacy.clients import SchemeClient
from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer, check_number
from flwr_privacy.simulations.research.attacks.one_run_fdp import FDPAudit, fdp_audit
from flwr_privacy.simulations.research.audits.claims import DELTA
from flwr_privacy.simulations.research.audits.crowd import crowd
from flwr_privacy.simulations.research.audits.observed import Session
from flwr_privacy.simulations.research.audits.verdicts import (
    CANNOT_TELL,
    NOT_REFUTED,
    REFUTED,
    Audit,
    audited,
)
from flwr_privacy.strategies import ACFL, M2FDP, UDP, CentralDP, SchemeStrategy

from .virtual_time import no_flushing, virtual_time

__all__ = ["KINDS", "LEVEL", "CrowdAudit", "audit_of", "crowd_of"]

LEVEL = 1e-6
"""Chance that an audit fails the test of a correct scheme, at most."""

KINDS: dict[type[SchemeStrategy], dict[str, str]] = {
    UDP: {
        "users": "udp.udp_users",
        "records": "udp_records.udp_records",
        "samples of records": "udp_records.udp_sampled",
    },
    CentralDP: {
        "server": "central.central_server",
        "shares": "central.central_shares",
        "samples of clients": "central.central_sampled",
    },
    ACFL: {"records": "acfl.acfl_records"},
    M2FDP: {"devices": "m2fdp.m2fdp_devices", "zone": "m2fdp.m2fdp_zone"},
}
"""What is audited of subclasses of each strategy; the first is the default. Records need torch."""

_CROWDS = {UDP: ("users",), CentralDP: ("server", "shares"), M2FDP: ("devices", "zone")}
_OPEN, _SUMMED = (150, 1), (30, 5)  # clients, and trainings
_AUDITS = "flwr_privacy.simulations.research.audits"


@dataclass(frozen=True, kw_only=True)
class CrowdAudit:
    """What a crowd of canaries proves from one training.

    Parameters
    ----------
    audit : Audit
        Verdict and bound, for noise that is Gaussian.
    one_run : FDPAudit
        The bound from guesses of coins, for any noise.
    """

    audit: Audit
    one_run: FDPAudit

    @property
    def refuted(self) -> str:
        """What refutes the claim, in words; empty where nothing does."""
        found = [self.audit.refuted] if self.audit.refuted else []
        if self.one_run.epsilon > self.audit.claimed:
            found.append(
                f"one run proves epsilon {self.one_run.epsilon:.3g}, "
                f"claimed {self.audit.claimed:.3g}"
            )
        return "; ".join(found)


def audit_of(
    subject: type[SchemeStrategy] | Callable[[], Session],
    client: type[SchemeClient] | None = None,
    *,
    kind: str | None = None,
    sessions: int = 2,
    accept: Collection[str] = (NOT_REFUTED,),
    **options: Any,
) -> Audit:
    """Train canaries, test what is released against what is charged, and return the audit.

    Parameters
    ----------
    subject : type or callable
        A strategy, as a subclass of `UDP`, `CentralDP`, `ACFL` or `M2FDP`, with its client half.
        For any other scheme a function that trains once, without arguments, and returns a
        `flwr_privacy.simulations.research.audits.observed.Session`.
    client : type, optional
        The client half of a strategy.
    kind : str, optional
        Which releases: a key of `KINDS` for the strategy, the first by default.
    sessions : int, default 2
        Trainings, at least 1. From two on, noise that comes again from one to the next is found.
    accept : collection of str, default ("not refuted",)
        Verdicts with which the test goes on. Audits of samples alone can only be "cannot tell", and
        always go on with it.
    **options
        Of the training: ``epsilon``, ``clients``, ``rounds``; ``rate`` of samples.

    Raises
    ------
    AssertionError
        If the verdict is another one: the text says what is wrong.
    InvalidParameterError
        If a parameter is not allowed.
    """
    __tracebackhide__ = True
    check_integer("sessions", sessions, minimum=1)
    name, train = _subject(subject, client, kind, options)
    for verdict in accept:
        check_choice("accept", verdict, (REFUTED, NOT_REFUTED, CANNOT_TELL))
    with virtual_time(), no_flushing():
        found = audited(name, [train() for _ in range(sessions)], level=LEVEL)
    samples = found.sampled and found.verdict == CANNOT_TELL
    if found.verdict not in accept and not samples:
        raise AssertionError(f"{name}: {_why(found)}")
    return found


def crowd_of(
    strategy: type[SchemeStrategy],
    client: type[SchemeClient],
    *,
    kind: str | None = None,
    epsilon: float = 10.0,
    clients: int | None = None,
    rounds: int = 2,
    trainings: int | None = None,
    seed: int = 0,
) -> CrowdAudit:
    """Train clients that have a canary each, and return what they prove.

    Parameters
    ----------
    strategy, client : type
        The halves: subclasses of `UDP`, `CentralDP` or `M2FDP` and of its client.
    kind : str, optional
        Which releases: ``"users"``; ``"server"``, ``"shares"``; ``"devices"``, ``"zone"``. The
        first by default.
    epsilon : float, default 10.0
        Budget, at delta 1e-5.
    clients, rounds, trainings : int, optional
        How many there are, from 4 clients on; by default 150 clients in one training, and 30 in
        five where a secure sum is opened, as each deals shares to all others. More of them bring
        the bounds nearer to the ledger.
    seed : int, default 0
        Root of directions and coins; the noise is secret.

    Raises
    ------
    AssertionError
        If the claim is refuted, or too little was heard for a bound.
    InvalidParameterError
        If a parameter is not allowed.
    """
    __tracebackhide__ = True
    check_number("epsilon", epsilon, minimum=1e-3)
    base = _base(strategy, client, _CROWDS)
    kind = check_choice("kind", kind or _CROWDS[base][0], _CROWDS[base])
    many, times = _SUMMED if kind == "shares" else _OPEN
    times = check_integer("trainings", times if trainings is None else trainings, minimum=1)
    check_integer("seed", seed, minimum=0)
    name = f"{strategy.__name__}, {kind}, a crowd"
    with virtual_time(), no_flushing():
        sessions = [
            crowd(
                f"{base.scheme}, {kind}",
                epsilon=epsilon,
                clients=many if clients is None else clients,
                rounds=rounds,
                seed=seed + number,
                strategy=strategy,
                half=client,
            )
            for number in range(times)
        ]
    audit = audited(name, sessions, level=LEVEL)
    if audit.verdict == CANNOT_TELL:
        raise AssertionError(f"{name}: {audit.said}; more clients, or a larger epsilon, show more")
    guessed = [session.guessed for session in sessions if session.guessed is not None]
    coins = np.concatenate([one.coins for one in guessed])
    scores = np.concatenate([one.scores for one in guessed])
    one_run = fdp_audit(scores, coins, guesses=coins.size, delta=DELTA, confidence=1 - LEVEL)
    found = CrowdAudit(audit=audit, one_run=one_run)
    if found.refuted:
        raise AssertionError(f"{name}: refuted: {found.refuted}")
    return found


def _subject(
    subject: Any, client: type[SchemeClient] | None, kind: str | None, options: dict[str, Any]
) -> tuple[str, Callable[[], Session]]:
    """Return the name of what is audited, and a function that trains it once."""
    if not (isinstance(subject, type) and issubclass(subject, SchemeStrategy)):
        for name, value in (("client", client), ("kind", kind), *options.items()):
            if value is not None:
                raise InvalidParameterError(name, value, "nothing beside a function that trains")
        if not callable(subject):
            raise InvalidParameterError("subject", subject, "a strategy's class, or a function")
        return str(getattr(subject, "__name__", subject)), subject
    base = _base(subject, client, KINDS)
    kind = check_choice("kind", kind or next(iter(KINDS[base])), KINDS[base])
    module, _, function = KINDS[base][kind].partition(".")
    train = getattr(import_module(f"{_AUDITS}.{module}"), function)
    return (
        f"{subject.__name__}, {kind}",
        lambda: train(strategy=subject, half=client, **options),
    )


def _base(strategy: Any, client: Any, bases: Collection[type[Any]]) -> type[SchemeStrategy]:
    """Return the strategy of this package that another one is made of."""
    base = next((b for b in bases if isinstance(strategy, type) and issubclass(strategy, b)), None)
    if base is None:
        names = ", ".join(one.__name__ for one in bases)
        raise InvalidParameterError("strategy", strategy, f"a subclass of one of {names}")
    if not (isinstance(client, type) and issubclass(client, SchemeClient)):
        raise InvalidParameterError("client", client, "the client half, a subclass of SchemeClient")
    return base


def _why(audit: Audit) -> str:
    """Return the verdict with everything that speaks against the claim."""
    if audit.verdict != REFUTED:
        return audit.said
    return f"refuted: {audit.refuted}"
