"""The audit of all private schemes: what their canaries prove beside what their ledgers say."""

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
from rich.table import Table

from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer
from flwr_privacy.simulations.research.attacks.one_run_fdp import fdp_audit
from flwr_privacy.simulations.research.attacks.setup import AttackOptions, Report

from .acfl import acfl_records
from .central import central_sampled, central_server, central_shares
from .central_correlated import central_correlated
from .claims import DELTA
from .crowd import CROWDS, crowd
from .m2fdp import m2fdp_devices, m2fdp_zone
from .observed import Session
from .one_shot import one_shot
from .udp import udp_users
from .udp_records import udp_records, udp_sampled
from .udp_steps import udp_steps, udp_steps_sampled
from .verdicts import LEVEL, Audit, reported

__all__ = ["SCHEMES", "report"]

_EPSILON = 10.0  # at which the literature states what audits reach
_CLIENTS, _SUMMED = 150, 25  # of a crowd; under a secure sum each deals shares to all others

SCHEMES: Mapping[str, Mapping[str, Callable[[], Session]]] = {
    "udp": {
        "users": udp_users,
        "records": udp_records,
        "records, small epsilon": partial(udp_records, epsilon=_EPSILON, clients=60, rounds=2),
        "samples of records": udp_sampled,
        "private steps": udp_steps,
        "private steps, small epsilon": partial(udp_steps, epsilon=_EPSILON, clients=60, rounds=2),
        "samples of private steps": udp_steps_sampled,
    },
    "central-dp": {
        "server": central_server,
        "correlated": central_correlated,
        "shares": central_shares,
        "samples of clients": central_sampled,
    },
    "acfl": {
        "records": acfl_records,
        "records, small epsilon": partial(acfl_records, epsilon=_EPSILON, clients=60, rounds=2),
    },
    "m2fdp": {"devices": m2fdp_devices, "zone": m2fdp_zone},
}
"""What is audited, by scheme: trainings with all kinds of canaries."""

_LEGEND = f"""\
ledger: epsilon at delta {DELTA:g} by the charges. With large ones the canaries stand out of little
  noise, so that wrong clipping shows; noise is tested at any epsilon alike
Gaussian: epsilon that the canaries prove, for noise that is Gaussian. The level of all tests and
  bounds together is {LEVEL:.0%}: so often a report accuses schemes that are all correct, at most
one run: epsilon that guesses of coins prove for anything that is mu-GDP, with a confidence of 95 %
  for each by itself (Mahloujifar et al. 2025)
one shot*: an estimate and no bound, for a client that is there or not, and an adversary who sees
  sums only (Andrew et al. 2024); of noise alone it is not 0 either
canaries: of all kinds, and in a crowd one for each client, at right angles to the others
refuted, not refuted, cannot tell: see docs/audits.md, which also lists what no audit sees"""


def report(options: AttackOptions) -> Report:
    """Audit all private schemes, or one of them as the task, through their real halves.

    Raises
    ------
    InvalidParameterError
        If a value is out of range, or an option is given that has no effect.
    """
    for name in ("records", "data_root"):
        if getattr(options, name) is not None:
            raise InvalidParameterError(name, getattr(options, name), "nothing: audits have theirs")
    chosen = (
        list(SCHEMES) if options.task is None else [check_choice("task", options.task, SCHEMES)]
    )
    clients = options.clients or _CLIENTS
    seed = check_integer("seed", options.seed, minimum=0)
    heard: dict[str, list[Session]] = {}
    crowds: dict[str, Session] = {}
    for scheme in chosen:
        for name, subject in SCHEMES[scheme].items():
            heard[f"{scheme}, {name}"] = [subject() for _ in range(2)]
        for name in CROWDS:
            if name.startswith(f"{scheme},"):
                many = min(clients, _SUMMED) if name.endswith("shares") else clients
                times = 4 if many < clients else 1
                heard[f"{name}, a crowd"] = [
                    crowd(name, epsilon=_EPSILON, clients=many, seed=seed + k) for k in range(times)
                ]
                crowds[f"{name}, a crowd"] = heard[f"{name}, a crowd"][0]
    audits = reported(heard)
    return Report(
        tables=[_table(audits, crowds)],
        legend=_LEGEND,
        pictures=[],
        verdict="\n".join(f"{one.name}: {one.said}" for one in audits),
    )


def _table(audits: list[Audit], crowds: Mapping[str, Session]) -> Table:
    tests = sum(one.tests for one in audits)
    lines = Table(title=f"audits: epsilon at delta {DELTA:g}; {tests} tests in all")
    lines.add_column("what")
    for name in ("releases", "ledger", "Gaussian", "one run", "one shot*"):
        lines.add_column(name, justify="right")
    lines.add_column("verdict")
    for one in audits:
        lines.add_row(
            one.name,
            str(one.releases),
            f"<= {one.claimed:.4g}",
            f">= {one.bound:.3g}" if one.bound else "-",
            *_guesses(crowds.get(one.name)),
            one.verdict,
        )
    return lines


def _guesses(session: Session | None) -> tuple[str, str]:
    if session is None or session.guessed is None:
        return "-", "-"
    own = session.guessed
    found = fdp_audit(own.scores, own.coins, guesses=own.coins.size, delta=DELTA)
    signed = np.where(own.coins, 1.0, -1.0)[:, None] * own.directions
    return f">= {found.epsilon:.2f}", f"~ {one_shot(own.total, signed, delta=DELTA).epsilon:.1f}"
