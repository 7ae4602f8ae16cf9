"""The schemes that wrap an app: what each puts into its two halves, and what it takes away."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer, check_number
from flwr_privacy.strategies import M2FDP, MSP, MSPDQ, SchemeStrategy

__all__ = [
    "BRING_THEIR_CLIENT",
    "FEWEST_CLIENTS",
    "WRAPS",
    "Options",
    "Wrap",
    "check_scheme",
    "wrap_of",
]

STRATEGIES = "flwr_privacy.strategies"
TORCH = "flwr_privacy.clients.torch"
FEWEST_CLIENTS = 2
"""How many clients Flower's strategies wait for, where nothing else is said."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a user chooses beside the scheme.

    Parameters
    ----------
    secure_sum : bool, default False
        Whether the server learns only sums.
    epsilon : float, default 8.0
        Budget of a client over the whole training.
    delta : float, default 1e-5
        Its delta.
    clients : int, optional
        Number of clients, for a tree and for the forecast.
    unit : str, optional
        What is protected: "user" (by default), "record" or "dp-sgd" (a record, by noise in every
        step) with udp, "device" or "record" with m2fdp. The other schemes leave no choice.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.
    """

    secure_sum: bool = False
    epsilon: float = 8.0
    delta: float = 1e-5
    clients: int | None = None
    unit: str | None = None

    def __post_init__(self) -> None:
        check_number("epsilon", self.epsilon, minimum=1e-9)
        check_number("delta", self.delta, minimum=1e-300, maximum=0.5)
        if self.clients is not None:
            check_integer("clients", self.clients, minimum=1)

    @property
    def budget(self) -> str:
        """The budget as keywords."""
        delta = repr(self.delta).replace("e-0", "e-")
        return f"epsilon={self.epsilon!r}, delta={delta}"


@dataclass(frozen=True, kw_only=True)
class Wrap:
    """A scheme as it goes around an app.

    Parameters
    ----------
    scheme : str
        Its name on the command line.
    strategy, client_app : str
        The class that takes the strategy's place, and the one that takes the ClientApp's.
    arguments : tuple of str
        What the strategy gets beside its own keywords.
    imports : mapping of str to tuple of str
        Names that these need, by module.
    takes_rounds : bool
        Whether it needs to know the rounds where the app's own `start` runs them.
    no_own_start : str
        Why the app's own `start` cannot run its rounds; "" if it can.
    not_called : frozenset of str
        Methods of Flower's strategies that its rounds do not call.
    sends_metrics : bool
        Whether the clients' metrics reach the server.
    keeps_statistics : bool
        Whether running statistics stay with the server.
    spends : bool
        Whether clients spend a privacy budget.
    trainer : str
        The function of `flwr_privacy.clients.torch` that the training has to call; "" if none.
    takes_part : bool
        Whether it can train a part of the model.
    trainable : tuple of str
        Patterns of the part that is trained; empty: the whole model.
    """

    scheme: str
    strategy: str
    client_app: str
    arguments: tuple[str, ...] = ()
    imports: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    takes_rounds: bool = False
    no_own_start: str = ""
    not_called: frozenset[str] = frozenset()
    sends_metrics: bool = False
    keeps_statistics: bool = True
    spends: bool = False
    trainer: str = ""
    takes_part: bool = True
    trainable: tuple[str, ...] = ()

    @property
    def summed(self) -> bool:
        """Whether the server learns only sums."""
        return any("SecureSum(" in a or "DistributedNoise(" in a for a in self.arguments)

    @property
    def level(self) -> str:
        """The class of the strategy's argument `privacy`; "" if there is none."""
        given = next((a for a in self.arguments if a.startswith("privacy=")), "")
        return given.removeprefix("privacy=").partition("(")[0]

    def keeping_back(self, names: Sequence[str]) -> "Wrap":
        """Return the scheme with arrays that look like running statistics kept back."""
        if not names or not self.keeps_statistics:
            return self
        written = ", ".join(f'"{name}"' for name in names)
        return replace(self, arguments=(*self.arguments, f"keep_back=[{written}]"))

    def training(self, patterns: tuple[str, ...]) -> "Wrap":
        """Return the scheme with a part of the model trained."""
        written = ", ".join(f'"{pattern}"' for pattern in patterns)
        arguments = (*self.arguments, f"trainable=[{written}]")
        return replace(self, arguments=arguments, trainable=patterns)

    def build(self, **keywords: Any) -> SchemeStrategy:
        """Return the strategy that the app would make, with keywords of FedAvg's."""
        names: dict[str, Any] = {}
        for module, imported in {**self.imports, STRATEGIES: (self.strategy,)}.items():
            names |= {name: getattr(import_module(module), name) for name in imported}
        for name in self.imports.get(STRATEGIES, ()):
            names[name] = getattr(import_module(STRATEGIES), name)
        made = eval(f"dict({', '.join(self.arguments)})", names)  # what the app's file will say
        strategy: SchemeStrategy = names[self.strategy](**made, **keywords)
        return strategy


RECORD, DP_SGD = "record", "dp-sgd"
PRIVATE_LOOP = "private_training"
"""The trainer that leaves the app its loop."""

STEP = 4.0
"""The step size that is written for the record level; the noise grows with it."""

SECURE_SUM = "secure_sum=SecureSum()"
SUMS = {"flwr_privacy.secure_sum": ("SecureSum",)}
NO_SUM_UNDER_OWN_START = "a secure sum works only where this library's start runs the rounds"
SEVERAL_EXCHANGES = "a round takes several exchanges, which only this library's start makes"

BRING_THEIR_CLIENT = {
    "acfl": (
        "acfl brings its own client: it computes gradients of a linear regression on the clients' "
        "records, so the app's training and its model are not used. A node runs "
        "acfl_client_app(data_fn), and the server ACFL(...): see docs/schemes/acfl.md"
    ),
    "fedvs": (
        "fedvs brings its own client: the clients hold columns of the same records and code them, "
        "so the app's training and its message types are not used. A node runs "
        "fedvs_client_app(data_fn), and the server FedVS(...): see docs/schemes/fedvs.md"
    ),
}
"""Schemes that no app of its own can be wrapped in, and what that means."""


def _fedavg(options: Options) -> Wrap:
    if not options.secure_sum:
        return Wrap(
            scheme="fedavg",
            strategy="FedAvg",
            client_app="FedAvgClientApp",
            sends_metrics=True,
            keeps_statistics=False,
        )
    return Wrap(
        scheme="fedavg",
        strategy="FedAvg",
        client_app="SecureSumClientApp",
        arguments=(SECURE_SUM,),
        imports=SUMS,
        no_own_start=NO_SUM_UNDER_OWN_START,
        keeps_statistics=False,
    )


def _udp(options: Options) -> Wrap:
    level, more, trainer = {
        RECORD: ("RecordLevel", f", learning_rate={STEP}", "train_per_record"),
        DP_SGD: ("DPSGD", ", sampling_rate=0.1, steps=20", PRIVATE_LOOP),
    }.get(options.unit or "", ("UserLevel", "", ""))
    if options.secure_sum and trainer != PRIVATE_LOOP:  # its noise goes into single steps
        more += ", shared_noise=True"
    return Wrap(
        scheme="udp",
        strategy="UDP",
        client_app="UDPClientApp",
        arguments=(
            f"privacy={level}({options.budget}{more})",
            *((SECURE_SUM,) if options.secure_sum else ()),
        ),
        imports={STRATEGIES: (level,), **(SUMS if options.secure_sum else {})},
        takes_rounds=True,
        no_own_start=NO_SUM_UNDER_OWN_START if options.secure_sum else "",
        spends=True,
        trainer=trainer,
    )


def _central_dp(options: Options) -> Wrap:
    noise = "DistributedNoise" if options.secure_sum else "ServerNoise"
    return Wrap(
        scheme="central-dp",
        strategy="CentralDP",
        client_app="CentralDPClientApp",
        arguments=(f"privacy={noise}({options.budget})",),
        imports={STRATEGIES: (noise,)},
        takes_rounds=True,
        no_own_start=NO_SUM_UNDER_OWN_START if options.secure_sum else "",
        spends=True,
    )


def _mspdq(options: Options) -> Wrap:
    summed = options.secure_sum
    return Wrap(
        scheme="mspdq",
        strategy="MSPDQ",
        client_app="MSPDQClientApp",
        arguments=(SECURE_SUM, "bits=8", "bound=4.0") if summed else ("bits=8",),
        imports=SUMS if summed else {},
        no_own_start=SEVERAL_EXCHANGES,
        not_called=MSPDQ.not_called,
    )


def _msp(options: Options) -> Wrap:
    return Wrap(
        scheme="msp",
        strategy="MSP",
        client_app="MSPClientApp",
        no_own_start=SEVERAL_EXCHANGES,
        not_called=MSP.not_called,
    )


def _m2fdp(options: Options) -> Wrap:
    fanouts = _fanouts(options.clients or FEWEST_CLIENTS)
    record = options.unit == RECORD
    noise, rate = ("RecordNoise", ", sampling_rate=0.05") if record else ("DeviceNoise", "")
    return Wrap(
        scheme="m2fdp",
        strategy="M2FDP",
        client_app="M2FDPClientApp",
        arguments=(
            f"tree=TierTree.of_fanouts({fanouts}, p=0.5)",
            f"privacy={noise}({options.budget}, clipping_norm=1.0{rate})",
        ),
        imports={STRATEGIES: (noise,), "flwr_privacy.m2fdp": ("TierTree",)},
        no_own_start="what a client is asked depends on its place in the tree",
        takes_part=False,
        not_called=M2FDP.not_called,
        spends=True,
        trainer="train_poisson" if record else "",
    )


WRAPS = {
    "fedavg": _fedavg,
    "udp": _udp,
    "central-dp": _central_dp,
    "mspdq": _mspdq,
    "msp": _msp,
    "m2fdp": _m2fdp,
}
UNITS = {"udp": ("user", RECORD, DP_SGD), "m2fdp": ("device", RECORD)}
"""Units that there is a choice of."""

_SUMMABLE = {"fedavg", "udp", "central-dp", "mspdq"}


def check_scheme(scheme: str, options: Options) -> None:
    """Refuse a scheme that there is not, and options that it does not have.

    Raises
    ------
    InvalidParameterError
        If there is no such scheme, or it has no secure sum or no such unit.
    """
    check_choice("scheme", scheme, [*WRAPS, *BRING_THEIR_CLIENT])
    if options.secure_sum and scheme not in _SUMMABLE:
        allowed = f"no --secure-sum with '{scheme}': it goes with {', '.join(sorted(_SUMMABLE))}"
        raise InvalidParameterError("secure_sum", True, allowed)
    if options.unit is not None:
        if scheme not in UNITS:
            allowed = f"no --unit with '{scheme}': it goes with {', '.join(UNITS)}"
            raise InvalidParameterError("unit", options.unit, allowed)
        check_choice("unit", options.unit, UNITS[scheme])


def wrap_of(scheme: str, options: Options) -> Wrap:
    """Return how a scheme goes around an app.

    Raises
    ------
    InvalidParameterError
        As `check_scheme`, and for a scheme that brings its own client.

    Examples
    --------
    >>> wrap_of("udp", Options(epsilon=2.0)).arguments
    ('privacy=UserLevel(epsilon=2.0, delta=1e-5)',)
    """
    check_scheme(scheme, options)
    check_choice("scheme", scheme, WRAPS)
    return WRAPS[scheme](options)


def _fanouts(clients: int) -> tuple[int, int]:
    """Return a tree of two tiers with so many leaves, as square as it can be."""
    tops = [n for n in range(1, int(clients**0.5) + 1) if clients % n == 0]
    return tops[-1], clients // tops[-1]
