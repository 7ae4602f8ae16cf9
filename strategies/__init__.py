"""The server half of each scheme: Flower strategies on one shared loop."""

from flwr_privacy.acfl import (
    DataBounds,
    Exact,
    NoisedRecords,
    NoisedSetup,
    SetupVariances,
    Weighting,
)
from flwr_privacy.m2fdp import (
    AdaptiveControl,
    DeviceNoise,
    LemmaDrift,
    NoNoise,
    PaperNoise,
    RecordNoise,
    SmoothDrift,
    WorstDrift,
)
from flwr_privacy.udp import (
    ClientLosses,
    Discounting,
    LinearNoise,
    PlateauNoise,
    RecordLevel,
    UserLevel,
)

from .accounting import FlowerAccountant
from .acfl import ACFL
from .base import SchemeStrategy
from .central_dp import CentralDP
from .experiment import SchemeResult
from .fedavg import FedAvg
from .fedvs import FedVS
from .instruction import Instruction
from .loop_options import LoopOptions
from .m2fdp import M2FDP
from .msp import MSP
from .mspdq import MSPDQ
from .mspdq_baselines import DrawnFedAvg, JoPEQFedAvg, NbAFL, QuantizedFedAvg
from .split_vfl import SplitVFL
from .udp import UDP

__all__ = [
    "ACFL",
    "M2FDP",
    "MSP",
    "MSPDQ",
    "UDP",
    "AdaptiveControl",
    "CentralDP",
    "ClientLosses",
    "DataBounds",
    "DeviceNoise",
    "Discounting",
    "DrawnFedAvg",
    "Exact",
    "FedAvg",
    "FedVS",
    "FlowerAccountant",
    "Instruction",
    "JoPEQFedAvg",
    "LemmaDrift",
    "LinearNoise",
    "LoopOptions",
    "NbAFL",
    "NoNoise",
    "NoisedRecords",
    "NoisedSetup",
    "PaperNoise",
    "PlateauNoise",
    "QuantizedFedAvg",
    "RecordLevel",
    "RecordNoise",
    "SchemeResult",
    "SchemeStrategy",
    "SetupVariances",
    "SmoothDrift",
    "SplitVFL",
    "UserLevel",
    "Weighting",
    "WorstDrift",
]
