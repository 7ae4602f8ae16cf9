"""Private federated learning with Flower: the schemes, their options, and simulations of them.

What is here is imported when it is asked for. The packages of this one are the mathematics: NumPy
in, NumPy out, no Flower and no torch.
"""

from typing import TYPE_CHECKING

from flwr_privacy.lazy import lazy

if TYPE_CHECKING:
    from flwr_privacy.secure_sum import SecureSum
    from flwr_privacy.simulations.research.app_audit.audit import audit
    from flwr_privacy.simulations.research.app_audit.report import AuditReport
    from flwr_privacy.simulations.runner.sweep.results import Results
    from flwr_privacy.simulations.runner.sweep.simulate import simulate
    from flwr_privacy.strategies import (
        ACFL,
        BLT,
        DPSGD,
        M2FDP,
        MSP,
        MSPDQ,
        UDP,
        AdaptiveClipping,
        BandedMF,
        CentralDP,
        DistributedNoise,
        DrawnFedAvg,
        FedAvg,
        FedVS,
        JoPEQFedAvg,
        LinearNoise,
        LoopOptions,
        NbAFL,
        PlateauNoise,
        PrivateEvaluation,
        QuantizedFedAvg,
        RecordLevel,
        ServerNoise,
        SplitVFL,
        TreeNoise,
        UserLevel,
    )
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "ACFL",
    "BLT",
    "DPSGD",
    "M2FDP",
    "MSP",
    "MSPDQ",
    "UDP",
    "AdaptiveClipping",
    "AuditReport",
    "BandedMF",
    "CentralDP",
    "DistributedNoise",
    "DrawnFedAvg",
    "FedAvg",
    "FedVS",
    "JoPEQFedAvg",
    "LinearNoise",
    "LoopOptions",
    "NbAFL",
    "PlateauNoise",
    "PrivateEvaluation",
    "QuantizedFedAvg",
    "RecordLevel",
    "Results",
    "SecureSum",
    "ServerNoise",
    "SplitVFL",
    "TreeNoise",
    "UserLevel",
    "audit",
    "simulate",
]

# Here and not in pyproject.toml: looking up metadata fails where no file can be opened.
__version__ = "0.1.0"
