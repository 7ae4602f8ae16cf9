"""The schemes that an app can run, by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr_privacy.clients import (
    ACFLClient,
    CentralDPClient,
    DrawnFedAvgClient,
    FedAvgClient,
    FedVSClient,
    JoPEQFedAvgClient,
    M2FDPClient,
    MSPClient,
    MSPDQClient,
    NbAFLClient,
    QuantizedFedAvgClient,
    SchemeClient,
    SecureSumClient,
    SplitVFLClient,
    UDPClient,
)
from flwr_privacy.errors import check_choice
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.strategies import (
    ACFL,
    M2FDP,
    MSP,
    MSPDQ,
    UDP,
    CentralDP,
    DrawnFedAvg,
    FedAvg,
    FedVS,
    JoPEQFedAvg,
    NbAFL,
    QuantizedFedAvg,
    SchemeStrategy,
    SplitVFL,
)

from .run_settings import Settings

__all__ = ["SCHEMES", "Scheme", "client_of", "scheme"]


@dataclass(frozen=True)
class Scheme:
    """The server half and the client half of a scheme.

    Parameters
    ----------
    strategy : type
        The server half.
    client : type
        The client half.
    description : str
        One line for `--help`.
    summed : type, optional
        The client half under a secure sum, if it is another.
    validated : bool, default False
        Whether the strategy has schedules that follow a validation loss: by default that of a
        function on the server.
    vertical : bool, default False
        Whether the clients have columns of the same rows, and the server the labels and a central
        model: the client half gets a `flwr_privacy.clients.VerticalData`, the strategy the labels.
    fixed : callable
        Parameters of the strategy that tell the scheme from others with the same halves, from the
        settings; nobody chooses them.
    own_client : bool, default False
        Whether the client half computes on the task's data itself, in place of the app's training:
        a linear regression, from a function that returns the records and their label rows, and with
        the map that makes features of them.
    usual : callable
        Parameters for a simulation, from those that were chosen and the records of the client that
        has the fewest, None where that is not known: what is not chosen and has no default.
    """

    strategy: type[SchemeStrategy]
    client: type[SchemeClient]
    description: str
    usual: Callable[[Mapping[str, Any], int | None], dict[str, Any]] = field(
        default=lambda chosen, fewest: dict(chosen)
    )
    summed: type[SchemeClient] | None = None
    validated: bool = False
    own_client: bool = False
    vertical: bool = False
    fixed: Callable[[Settings], dict[str, Any]] = field(default=lambda settings: {})


def _udp(chosen: Mapping[str, Any], fewest: int | None) -> dict[str, Any]:
    # A large step costs no privacy: noise and step grow together.
    return {"learning_rate": 4.0, **chosen} if chosen.get("unit") == "record" else dict(chosen)


def _nbafl(chosen: Mapping[str, Any], fewest: int | None) -> dict[str, Any]:
    # About the norm of the small tasks' models after some rounds.
    usual = {"clipping_norm": 10.0, **chosen}
    return usual if fewest is None else {"smallest_data": fewest, **usual}


def _m2fdp(chosen: Mapping[str, Any], fewest: int | None) -> dict[str, Any]:
    # The paper's schedule; a local step of the tasks' training moves a model by about 0.05.
    usual: dict[str, Any] = {"steps": 20, "clipping_norm": 0.05, **chosen}
    if "control" not in usual and "events" not in usual and usual["steps"] > 5:
        fanouts = str(usual.get("fanouts", "")).strip("[]() ")
        usual |= {"events": 5} if "," in fanouts or "tree" in usual else {}
    return usual


def _m2fdp_baseline(chosen: Mapping[str, Any], fewest: int | None) -> dict[str, Any]:
    return {"unit": "device", **_m2fdp(chosen, fewest)}


def _star(settings: Settings) -> dict[str, Any]:
    return {"fanouts": settings.clients, "p": None}


def _split(method: str, difference: str) -> Scheme:
    """Return a baseline of FedVS."""
    return Scheme(
        SplitVFL,
        SplitVFLClient,
        f"baseline of fedvs: {difference}",
        vertical=True,
        fixed=lambda settings: {"method": method},
    )


def _masked(settings: Settings) -> dict[str, Any]:
    # A sum of everybody or none: those of others would differ by single clients' embeddings.
    usual = SecureSum(threshold=settings.clients, value_range=16.0, largest_weight=1)
    return {"method": "wait", "secure_sum": settings.secure_sum or usual}


SCHEMES = {
    "fedavg": Scheme(
        FedAvg,
        FedAvgClient,
        "federated averaging: the baseline, protects nothing but by a secure sum",
        summed=SecureSumClient,
    ),
    "udp": Scheme(
        UDP,
        UDPClient,
        "noise on the client from a budget over the whole training",
        _udp,
        validated=True,
    ),
    "msp": Scheme(
        MSP, MSPClient, "models split and mixed in several exchanges; hides nothing from the server"
    ),
    "mspdq": Scheme(
        MSPDQ,
        MSPDQClient,
        "the same with codes of a few bits; under a secure sum the server sees their sums only",
    ),
    "mspdq-fedavg": Scheme(
        DrawnFedAvg, DrawnFedAvgClient, "baseline of msp and mspdq: FedAvg over the same draws"
    ),
    "mspdq-ldp": Scheme(
        NbAFL, NbAFLClient, "the same, with noise on clipped models that proves nothing", _nbafl
    ),
    "mspdq-jopeq": Scheme(
        JoPEQFedAvg, JoPEQFedAvgClient, "the same, on codes with noise and dither (JoPEQ)"
    ),
    "mspdq-plain": Scheme(
        QuantizedFedAvg, QuantizedFedAvgClient, "the same, on codes of a few bits, sent once"
    ),
    "central-dp": Scheme(
        CentralDP,
        CentralDPClient,
        "noise on the sum, in shares of the clients or by a trusted server",
    ),
    "m2fdp": Scheme(
        M2FDP,
        M2FDPClient,
        "a tree of aggregators, noise where the trust of its devices ends",
        _m2fdp,
    ),
    "m2fdp-hfl": Scheme(
        M2FDP,
        M2FDPClient,
        "baseline of m2fdp: averages over the same tree without noise (HFL)",
        _m2fdp,
        fixed=lambda settings: {"unit": "none", "p": 0.0},
    ),
    "m2fdp-hfl-dp": Scheme(
        M2FDP,
        M2FDPClient,
        "the same, with noise on every device: nobody is trusted (HFL-DP)",
        _m2fdp_baseline,
        fixed=lambda settings: {"p": 0.0},
    ),
    "m2fdp-pedpfl": Scheme(
        M2FDP,
        M2FDPClient,
        "noise on every device, without aggregators (PEDPFL)",
        _m2fdp_baseline,
        fixed=_star,
    ),
    "acfl": Scheme(
        ACFL,
        ACFLClient,
        "linear regression with coded data in place of the gradients of stragglers",
        own_client=True,
    ),
    "fedvs": Scheme(
        FedVS,
        FedVSClient,
        "split learning of columns on coded shares: no wait for stragglers, no embedding seen",
        vertical=True,
    ),
    "split-wait": _split("wait", "a server that sees and waits for all embeddings"),
    "split-ignore": _split("ignore", "the same without the stragglers' columns"),
    "split-vafl": _split("vafl", "no wait, old embeddings of those who are slow (VAFL)"),
    "split-wait-dp": _split("wait-dp", "all embeddings, with noise that proves nothing"),
    "split-masked": Scheme(
        SplitVFL,
        SplitVFLClient,
        "baseline of fedvs: a secure sum of all embeddings",
        vertical=True,
        fixed=_masked,
    ),
}


def scheme(name: str) -> Scheme:
    """Return a scheme by its name.

    Raises
    ------
    InvalidParameterError
        If there is none; the message has the nearest names.
    """
    return SCHEMES[check_choice("scheme", name, SCHEMES)]


def client_of(settings: Settings) -> type[SchemeClient]:
    """Return the client half that some settings need."""
    chosen = scheme(settings.scheme)
    return chosen.client if settings.secure_sum is None else chosen.summed or chosen.client
