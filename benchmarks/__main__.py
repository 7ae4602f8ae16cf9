"""``python -m benchmarks [row ...]``: measure the rows and print each against its rival."""

import argparse
import logging
from collections.abc import Callable, Iterator
from itertools import chain

from .accounting import accounting
from .aggregate import aggregate
from .app_audits import app_audits
from .calibration import calibration
from .card import card
from .coded_gradient import coded_gradient
from .controller import controller
from .correlated_noise import correlated_noise
from .exchanges import exchanges
from .fedvs import fedvs
from .field import field
from .large_models import large_models
from .ledger import ledger
from .ledger_heads import ledger_heads
from .lora_bytes import lora_bytes
from .mixing import mixing
from .noise import noise
from .numpy_simulation import numpy_simulation
from .per_record import per_record
from .private import private
from .private_steps import private_steps
from .profiles import profile
from .quantize import quantize
from .report import Comparison, print_comparisons
from .rounds import cohorts, echo, fedavg, m2fdp, secure_fedavg, udp
from .secure_sum import secure_sum
from .simulators.banded import banded_mf
from .simulators.rows import simulators
from .single_exchange import imports, single_exchange
from .stragglers import stragglers
from .tiers import tiers
from .training import training

ROWS: dict[str, Callable[[], Iterator[Comparison]]] = {
    "aggregate": aggregate,
    "private": private,
    "noise": noise,
    "correlated-noise": correlated_noise,
    "quantize": quantize,
    "mixing": mixing,
    "lora-bytes": lora_bytes,
    "numpy-simulation": numpy_simulation,
    "coded-gradient": coded_gradient,
    "stragglers": stragglers,
    "tiers": tiers,
    "controller": controller,
    "field": field,
    "fedvs": fedvs,
    "accounting": accounting,
    "ledger": ledger,
    "card": card,
    "per_record": per_record,
    "private-steps": private_steps,
    "calibration": calibration,
    "ledger-heads": ledger_heads,
    "secure-sum": secure_sum,
    "echo": echo,
    "fedavg": fedavg,
    "udp": udp,
    "m2fdp": m2fdp,
    "secure-fedavg": secure_fedavg,
    "cohorts": cohorts,
    "exchanges": exchanges,
    "single-exchange": single_exchange,
    "imports": imports,
    "simulators": simulators,
    "large-models": large_models,
    "banded-mf": banded_mf,
    "app-audits": app_audits,
    "training": training,
    "profile": profile,
}


def main() -> None:
    """Measure; a missed target is reported and is no error."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("row", nargs="*", help=f"{', '.join(ROWS)}; all by default")
    chosen = parser.parse_args().row or list(ROWS)
    if unknown := [row for row in chosen if row not in ROWS]:
        parser.error(f"unknown row {', '.join(unknown)}: choose from {', '.join(ROWS)}")
    logging.getLogger("flwr").setLevel(logging.ERROR)
    print_comparisons(chain.from_iterable(ROWS[row]() for row in chosen))


if __name__ == "__main__":
    main()
