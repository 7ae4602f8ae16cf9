"""The attacks of `flwr-privacy attack`, by scheme: what a server finds in what it receives."""

from collections.abc import Callable

from flwr_privacy.simulations.research.acfl.attack import report as report_acfl
from flwr_privacy.simulations.research.attacks.over_seeds import over_seeds
from flwr_privacy.simulations.research.attacks.setup import AttackOptions, Report
from flwr_privacy.simulations.research.audits.attack import report as report_audits
from flwr_privacy.simulations.research.fedvs.attack import report as report_fedvs
from flwr_privacy.simulations.research.language.report import report as report_canaries
from flwr_privacy.simulations.research.m2fdp.attack import report as report_m2fdp
from flwr_privacy.simulations.research.mspdq.attack import report as report_mspdq
from flwr_privacy.simulations.research.secure_sum.attack import report as report_secure_sum
from flwr_privacy.simulations.research.udp.attack import report as report_udp

__all__ = ["ATTACKS", "ONE_SEED", "carry_out"]

ONE_SEED = ("audit",)
"""What takes one seed: the error of an audit's verdicts is controlled over a single report."""

ATTACKS: dict[str, Callable[[AttackOptions], Report]] = {
    "secure-sum": report_secure_sum,
    "mspdq": report_mspdq,
    "udp": report_udp,
    "acfl": report_acfl,
    "m2fdp": report_m2fdp,
    "fedvs": report_fedvs,
    "audit": report_audits,
    "canaries": report_canaries,
}
"""Attacks by the name of what they attack."""


def carry_out(scheme: str, options: AttackOptions, *, seeds: int) -> Report:
    """Attack with several seeds.

    Parameters
    ----------
    scheme : str
        One of `ATTACKS`.
    options : AttackOptions
        With the first seed.
    seeds : int
        How many from there on. Of canaries the codes of all seeds are pooled; of other attacks
        numbers become ranges.
    """
    if scheme == "canaries":
        return report_canaries(options, seeds=seeds)
    return over_seeds(ATTACKS[scheme], options, seeds=seeds)
