"""The client half of each scheme, and the adapters that put it into a Flower app."""

from typing import TYPE_CHECKING

from flwr_privacy.lazy import lazy

if TYPE_CHECKING:
    from flwr_privacy.clients.m2fdp.client import M2FDPClient, M2FDPClientApp
    from flwr_privacy.clients.mspdq.baselines import (
        DrawnFedAvgClient,
        JoPEQFedAvgClient,
        NbAFLClient,
        QuantizedFedAvgClient,
    )
    from flwr_privacy.clients.mspdq.client import (
        MSPClient,
        MSPClientApp,
        MSPDQClient,
        MSPDQClientApp,
    )
    from flwr_privacy.clients.node.adapters import as_mod, numpy_client_app, own_client_app
    from flwr_privacy.clients.node.base import SchemeClient, Train, Trained
    from flwr_privacy.clients.node.client_app import SchemeClientApp
    from flwr_privacy.clients.node.generated import RecordLayout, own_data
    from flwr_privacy.clients.secure_sum import SecureSumClient, SecureSumClientApp
    from flwr_privacy.clients.vertical.fedvs import FedVSClient, fedvs_client_app
    from flwr_privacy.clients.vertical.split_vfl import SplitVFLClient, split_vfl_client_app
    from flwr_privacy.fedvs.data import VerticalData

    from .acfl import ACFLClient, DataLimits, acfl_client_app
    from .central_dp import CentralDPClient, CentralDPClientApp
    from .fedavg import FedAvgClient, FedAvgClientApp
    from .udp import UDPClient, UDPClientApp
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "ACFLClient",
    "CentralDPClient",
    "CentralDPClientApp",
    "DataLimits",
    "DrawnFedAvgClient",
    "FedAvgClient",
    "FedAvgClientApp",
    "FedVSClient",
    "JoPEQFedAvgClient",
    "M2FDPClient",
    "M2FDPClientApp",
    "MSPClient",
    "MSPClientApp",
    "MSPDQClient",
    "MSPDQClientApp",
    "NbAFLClient",
    "QuantizedFedAvgClient",
    "RecordLayout",
    "SchemeClient",
    "SchemeClientApp",
    "SecureSumClient",
    "SecureSumClientApp",
    "SplitVFLClient",
    "Train",
    "Trained",
    "UDPClient",
    "UDPClientApp",
    "VerticalData",
    "acfl_client_app",
    "as_mod",
    "fedvs_client_app",
    "numpy_client_app",
    "own_client_app",
    "own_data",
    "split_vfl_client_app",
]
