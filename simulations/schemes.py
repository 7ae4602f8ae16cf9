"""The schemes that an app can run, by name."""

from dataclasses import dataclass

from flwr_privacy.clients import FedAvgClient, SchemeClient
from flwr_privacy.errors import check_choice
from flwr_privacy.strategies import FedAvg, SchemeStrategy

__all__ = ["SCHEMES", "Scheme", "scheme"]


@dataclass(frozen=True)
class Scheme:
    """A scheme's two halves.

    Parameters
    ----------
    strategy : type
        The server half.
    client : type
        The client half.
    description : str
        One line for `--help`.
    """

    strategy: type[SchemeStrategy]
    client: type[SchemeClient]
    description: str


SCHEMES = {
    "fedavg": Scheme(FedAvg, FedAvgClient, "federated averaging: the baseline, protects nothing"),
}


def scheme(name: str) -> Scheme:
    """Return a scheme by its name.

    Raises
    ------
    InvalidParameterError
        If there is none; the message has the nearest names.
    """
    return SCHEMES[check_choice("scheme", name, SCHEMES)]
