"""The server half of each scheme: Flower strategies on one shared loop."""

from flwr_privacy.acfl import (
    DataBounds,
    Exact,
    NoisedRecords,
    NoisedSetup,
    SetupVariances,
    Weighting,
)
from flwr_privacy.central_dp.correlated.options import BLT, BandedMF, TreeNoise
from flwr_privacy.central_dp.options import (
    AdaptiveClipping,
    DistributedNoise,
    NoiseCommittee,
    ServerNoise,
)
from flwr_privacy.evaluation import PrivateEvaluation
from flwr_privacy.fedvs.options import (
    VAFL,
    ColumnFeatures,
    IgnoreStragglers,
    LagrangeCoding,
    Quantisation,
    WaitForAll,
    WaitNoised,
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
from flwr_privacy.mspdq import TheorySteps
from flwr_privacy.strategies.acfl.strategy import ACFL
from flwr_privacy.strategies.loop.base import SchemeStrategy
from flwr_privacy.strategies.m2fdp.strategy import M2FDP
from flwr_privacy.strategies.mspdq.baselines import DrawnFedAvg, JoPEQFedAvg, NbAFL, QuantizedFedAvg
from flwr_privacy.strategies.mspdq.msp import MSP
from flwr_privacy.strategies.mspdq.strategy import MSPDQ
from flwr_privacy.strategies.options.loop_options import LoopOptions
from flwr_privacy.strategies.options.round_logger import RoundLogger
from flwr_privacy.strategies.requests.instruction import Instruction
from flwr_privacy.strategies.state.experiment import SchemeResult
from flwr_privacy.strategies.vertical.fedvs import FedVS
from flwr_privacy.strategies.vertical.split_vfl import SplitVFL
from flwr_privacy.udp import (
    DPSGD,
    ClientLosses,
    Discounting,
    LinearNoise,
    PlateauNoise,
    RecordLevel,
    UserLevel,
)

from .central_dp.strategy import CentralDP
from .fedavg import FedAvg
from .flower_accountant import FlowerAccountant
from .udp.strategy import UDP

__all__ = [
    "ACFL",
    "BLT",
    "DPSGD",
    "M2FDP",
    "MSP",
    "MSPDQ",
    "UDP",
    "VAFL",
    "AdaptiveClipping",
    "AdaptiveControl",
    "BandedMF",
    "CentralDP",
    "ClientLosses",
    "ColumnFeatures",
    "DataBounds",
    "DeviceNoise",
    "Discounting",
    "DistributedNoise",
    "DrawnFedAvg",
    "Exact",
    "FedAvg",
    "FedVS",
    "FlowerAccountant",
    "IgnoreStragglers",
    "Instruction",
    "JoPEQFedAvg",
    "LagrangeCoding",
    "LemmaDrift",
    "LinearNoise",
    "LoopOptions",
    "NbAFL",
    "NoNoise",
    "NoiseCommittee",
    "NoisedRecords",
    "NoisedSetup",
    "PaperNoise",
    "PlateauNoise",
    "PrivateEvaluation",
    "Quantisation",
    "QuantizedFedAvg",
    "RecordLevel",
    "RecordNoise",
    "RoundLogger",
    "SchemeResult",
    "SchemeStrategy",
    "ServerNoise",
    "SetupVariances",
    "SmoothDrift",
    "SplitVFL",
    "TheorySteps",
    "TreeNoise",
    "UserLevel",
    "WaitForAll",
    "WaitNoised",
    "Weighting",
    "WorstDrift",
]
