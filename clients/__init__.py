"""The client half of each scheme, and the adapters that put it into a Flower app."""

from typing import TYPE_CHECKING

from flwr_privacy.lazy import lazy

if TYPE_CHECKING:
    from flwr_privacy.fedvs.data import VerticalData

    from .acfl import ACFLClient, DataLimits, acfl_client_app
    from .adapters import as_mod, numpy_client_app, own_client_app
    from .base import SchemeClient, Train, Trained
    from .central_dp import CentralDPClient
    from .fedavg import FedAvgClient
    from .fedvs import FedVSClient, fedvs_client_app
    from .generated import RecordLayout, own_data
    from .m2fdp import M2FDPClient
    from .mspdq import MSPClient, MSPDQClient
    from .mspdq_baselines import (
        DrawnFedAvgClient,
        JoPEQFedAvgClient,
        NbAFLClient,
        QuantizedFedAvgClient,
    )
    from .secure_sum import SecureSumClient
    from .split_vfl import SplitVFLClient, split_vfl_client_app
    from .udp import UDPClient
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "ACFLClient",
    "CentralDPClient",
    "DataLimits",
    "DrawnFedAvgClient",
    "FedAvgClient",
    "FedVSClient",
    "JoPEQFedAvgClient",
    "M2FDPClient",
    "MSPClient",
    "MSPDQClient",
    "NbAFLClient",
    "QuantizedFedAvgClient",
    "RecordLayout",
    "SchemeClient",
    "SecureSumClient",
    "SplitVFLClient",
    "Train",
    "Trained",
    "UDPClient",
    "VerticalData",
    "acfl_client_app",
    "as_mod",
    "fedvs_client_app",
    "numpy_client_app",
    "own_client_app",
    "own_data",
    "split_vfl_client_app",
]
