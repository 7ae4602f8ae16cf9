"""The client half of each scheme, and the adapters that put it into a Flower app."""

from typing import TYPE_CHECKING

from flwr_privacy.lazy import lazy

if TYPE_CHECKING:
    from flwr_privacy.clients.m2fdp.client import M2FDPClient
    from flwr_privacy.clients.mspdq.baselines import (
        DrawnFedAvgClient,
        JoPEQFedAvgClient,
        NbAFLClient,
        QuantizedFedAvgClient,
    )
    from flwr_privacy.clients.mspdq.client import MSPClient, MSPDQClient
    from flwr_privacy.clients.node.adapters import as_mod, numpy_client_app, own_client_app
    from flwr_privacy.clients.node.base import SchemeClient, Train, Trained
    from flwr_privacy.clients.node.generated import RecordLayout, own_data
    from flwr_privacy.clients.secure_sum import SecureSumClient
    from flwr_privacy.clients.vertical.fedvs import FedVSClient, fedvs_client_app
    from flwr_privacy.clients.vertical.split_vfl import SplitVFLClient, split_vfl_client_app
    from flwr_privacy.fedvs.data import VerticalData

    from .acfl import ACFLClient, DataLimits, acfl_client_app
    from .central_dp import CentralDPClient
    from .fedavg import FedAvgClient
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
