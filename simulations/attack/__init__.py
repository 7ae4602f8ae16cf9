"""`flwr-privacy attack`: what a server finds in its view of a training, by scheme."""

from pathlib import Path
from typing import Protocol

from .acfl import report as report_acfl
from .fedvs import report as report_fedvs
from .m2fdp import report as report_m2fdp
from .mspdq import report as report_mspdq
from .scene import Report
from .secure_sum import report as report_secure_sum
from .udp import report as report_udp

__all__ = ["ATTACKS", "Attack"]


class Attack(Protocol):
    """Runs a round, attacks what the server has of it, and draws what was found."""

    def __call__(
        self,
        *,
        task: str | None,
        clients: int | None,
        records: int | None,
        seed: int,
        data_root: Path | None,
        out: Path,
    ) -> Report:
        """Attack; None stands for the attack's own default."""


ATTACKS: dict[str, Attack] = {
    "secure-sum": report_secure_sum,
    "mspdq": report_mspdq,
    "udp": report_udp,
    "acfl": report_acfl,
    "m2fdp": report_m2fdp,
    "fedvs": report_fedvs,
}
"""Attacks by the name of what they attack."""
