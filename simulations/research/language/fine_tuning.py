"""Fine-tunes adapters of the language model on the clients' text, through the real schemes."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from torch import nn

from flwr_privacy.clients import (
    CentralDPClient,
    FedAvgClient,
    MSPDQClient,
    SchemeClient,
    SecureSumClient,
    UDPClient,
    as_mod,
)
from flwr_privacy.clients.torch import (
    freeze_lora_factor,
    initialise,
    load_trainable,
    set_arrays,
    trainable_state,
)
from flwr_privacy.privacy.grid import CodeGrid
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.simulations.research.audits.training import Reply, listen
from flwr_privacy.strategies import (
    DPSGD,
    MSPDQ,
    UDP,
    CentralDP,
    DistributedNoise,
    FedAvg,
    LoopOptions,
    RecordLevel,
    SchemeStrategy,
    ServerNoise,
    UserLevel,
)
from flwr_privacy.udp.private_steps import UPDATE_GRID
from flwr_privacy.wire.identity import derive_seed

from .pretraining import Size, base_arrays
from .texts import Tokens
from .training import Training, by_records, descend, descend_privately
from .transformer import CausalTransformer

__all__ = ["DELTA", "METHODS", "Federation", "Method", "Tuned", "fine_tune"]

Arrays = dict[str, NDArray[Any]]

DELTA = 1e-5
_ADAPTED = ["query", "value", "wider", "narrower"]
_RANK = 4
_NORM = 1.0
_RATE, _STEPS = 0.5, 4  # of private steps: about as many records as two passes have


@dataclass(frozen=True, kw_only=True)
class Federation:
    """What all methods have in common.

    Parameters
    ----------
    texts : sequence of (n, LENGTH) int64
        The sentences of each client.
    seed : int
        Root of the first adapters and the order of batches.
    public : int
        Sentences of public text that the base model was trained on.
    rounds : int
        Rounds of fine-tuning; all clients take part in each.
    epochs : int, default 2
        Passes over a client's sentences in a round.
    base_seed : int, default 0
        Root of the language and the base model.
    size : Size, default ()
        What differs from the model's usual size.
    """

    texts: Sequence[Tokens]
    seed: int
    public: int
    rounds: int
    epochs: int = 2
    base_seed: int = 0
    size: Size = ()

    def base(self) -> nn.Module:
        """Return the model before it was fine-tuned."""
        model = initialise(partial(CausalTransformer, **dict(self.size)), self.base_seed)
        set_arrays(model, base_arrays(self.base_seed, sentences=self.public, size=self.size))
        return model

    def network(self, *, one_factor: bool = False) -> nn.Module:
        """Return the model with new adapters of rank 4, by LoRA or FFA-LoRA."""
        from peft import LoraConfig, inject_adapter_in_model

        config = LoraConfig(r=_RANK, lora_alpha=2 * _RANK, target_modules=_ADAPTED)
        model: nn.Module = initialise(
            lambda: inject_adapter_in_model(config, self.base()), self.seed
        )
        if one_factor:
            freeze_lora_factor(model)
        return model


@dataclass(frozen=True, kw_only=True, eq=False)
class Tuned:
    """The results of a fine-tuning.

    Parameters
    ----------
    model : Module
        The model that everybody gets.
    seen : dict of str to Module
        For each client the model that the server sees of it in the last round; empty if it sees
        sums alone.
    epsilon : float, optional
        Of the client that spent most, by the card; None where nothing is guaranteed.
    """

    model: nn.Module
    seen: Mapping[str, nn.Module]
    epsilon: float | None


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to fine-tune.

    Parameters
    ----------
    name : str
        What it is called in tables.
    strategy : callable
        Makes the strategy from what all have in common, the budget and the model.
    half : type
        The client half.
    read : callable, optional
        Reads what a client released from its reply and its first value; None: the server sees sums.
    unit : {"user", "record"}, optional
        What the guarantee protects.
    train : callable, default `descend`
        Trains a client's model.
    """

    name: str
    strategy: Callable[[dict[str, Any], float], SchemeStrategy]
    half: type[SchemeClient]
    read: Callable[[Reply], Arrays] | None = None
    unit: str | None = None
    train: Training = descend


def _plain(reply: Reply) -> Arrays:
    return reply.arrays


def _coded(reply: Reply) -> Arrays:
    """Read an update in codes, from where the round began."""
    step = CodeGrid(reply.fields["grid"]).step
    return {name: start + step * reply.arrays[name] for name, start in reply.start.items()}


def _stepped(reply: Reply) -> Arrays:
    """Read the update of a training of private steps, whose codes have a grid of their own."""
    return {n: start + UPDATE_GRID.step * reply.arrays[n] for n, start in reply.start.items()}


def _records(common: dict[str, Any], epsilon: float) -> UDP:
    level = RecordLevel(epsilon=epsilon, delta=DELTA, clipping_norm=_NORM, learning_rate=4.0)
    return UDP(privacy=level, **common)


def _private_steps(common: dict[str, Any], epsilon: float) -> UDP:
    level = DPSGD(
        epsilon=epsilon, delta=DELTA, clipping_norm=_NORM, sampling_rate=_RATE, steps=_STEPS
    )
    return UDP(privacy=level, **common)


METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method(
            name="fedavg",
            strategy=lambda common, _: FedAvg(**_without_rounds(common)),
            half=FedAvgClient,
            read=_plain,
        ),
        Method(
            name="secure sum",
            strategy=lambda common, _: FedAvg(secure_sum=SecureSum(), **_without_rounds(common)),
            half=SecureSumClient,
        ),
        Method(
            name="mspdq",
            strategy=lambda common, _: MSPDQ(
                secure_sum=SecureSum(), bound=1.0, **_without_rounds(common)
            ),
            half=MSPDQClient,
        ),
        Method(
            name="udp, users",
            strategy=lambda common, epsilon: UDP(
                privacy=UserLevel(epsilon=epsilon, delta=DELTA, clipping_norm=_NORM), **common
            ),
            half=UDPClient,
            read=_coded,
            unit="user",
        ),
        Method(
            name="udp, records",
            strategy=_records,
            half=UDPClient,
            read=_coded,
            unit="record",
            train=by_records,
        ),
        Method(
            name="udp, dp-sgd",
            strategy=_private_steps,
            half=UDPClient,
            read=_stepped,
            unit="record",
            train=descend_privately,
        ),
        Method(
            name="central, shares",
            strategy=lambda common, epsilon: CentralDP(
                privacy=DistributedNoise(epsilon=epsilon, delta=DELTA, clipping_norm=_NORM),
                **common,
            ),
            half=CentralDPClient,
            unit="user",
        ),
        Method(
            name="central, server",
            strategy=lambda common, epsilon: CentralDP(
                privacy=ServerNoise(epsilon=epsilon, delta=DELTA, clipping_norm=_NORM), **common
            ),
            half=CentralDPClient,
            unit="user",
        ),
    )
}
"""The ways to fine-tune, by name."""


def fine_tune(
    method: Method, federation: Federation, *, epsilon: float, one_factor: bool = False
) -> Tuned:
    """Fine-tune the clients' adapters.

    Parameters
    ----------
    method : Method
        How.
    federation : Federation
        Whose text, from which model.
    epsilon : float
        Budget of the methods that have one, at `DELTA`.
    one_factor : bool, default False
        Whether only one factor of each adapter is trained (FFA-LoRA).
    """
    template = federation.network(one_factor=one_factor)
    clients = len(federation.texts)
    trained = {name: tensor.numpy() for name, tensor in trainable_state(template).items()}
    common: dict[str, Any] = {
        "trainable": list(trained),
        "min_train_nodes": clients,
        "min_available_nodes": clients,
        "rounds": federation.rounds,
        "loop": LoopOptions(experiment_id="canaries", seed=federation.seed, write_card=False),
    }
    strategy = method.strategy(common, epsilon)
    heard = listen(
        strategy,
        _app(method, federation, template),
        clients=clients,
        rounds=federation.rounds,
        start={name: tensor.numpy() for name, tensor in template.state_dict().items()},
        simulated=True,
    )

    def model_with(arrays: Mapping[str, NDArray[Any]]) -> nn.Module:
        model = copy.deepcopy(template)
        load_trainable(model, {name: np.asarray(arrays[name], np.float32) for name in trained})
        return model

    last = [reply for reply in heard.replies if reply.round == federation.rounds]
    if len({reply.client for reply in last}) != clients:
        raise RuntimeError(f"{method.name}: not all clients have answered in the last round")
    return Tuned(
        model=model_with(heard.model),
        seen={r.client: model_with(method.read(r)) for r in last} if method.read else {},
        epsilon=strategy.card(final=True).guarantee.spent if method.unit else None,
    )


def _app(method: Method, federation: Federation, template: nn.Module) -> ClientApp:
    app = ClientApp(mods=[as_mod(method.half)])
    model = copy.deepcopy(template)  # for all: each client loads all that any of them has changed

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        text = federation.texts[client]
        load_trainable(model, message.content.array_records["arrays"])
        config = message.content.config_records["config"]
        seed = derive_seed(federation.seed, "fine-tune", client, int(str(config["server-round"])))
        method.train(model, text, context, epochs=federation.epochs, seed=seed)
        metrics = MetricRecord({"num-examples": len(text)})
        arrays = ArrayRecord(trainable_state(model))
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


def _without_rounds(common: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in common.items() if name != "rounds"}
