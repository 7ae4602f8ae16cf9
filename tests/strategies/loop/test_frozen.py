"""A part of the model is trained: the rest never travels, and is the same everywhere."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapted import (
    FEATURES,
    PATTERNS,
    TRAINED,
    Adapted,
    adapted_app,
    descend,
    list_app,
    network,
    record_steps,
    records_of,
    run_adapted,
    usual_steps,
)
from apps import make, model_of
from conformance import Killed
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp.strategy import FedAdam
from torch import Tensor, nn

from flwr_privacy.clients import (
    CentralDPClient,
    FedAvgClient,
    MSPClient,
    MSPDQClient,
    RecordLayout,
    SecureSumClient,
    UDPClient,
    own_data,
)
from flwr_privacy.clients.torch import initialise, load_trainable, train, trainable_names
from flwr_privacy.errors import CheckpointError, InvalidParameterError, ProtocolError
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.strategies import (
    MSP,
    MSPDQ,
    UDP,
    CentralDP,
    Discounting,
    FedAvg,
    LoopOptions,
    PrivateEvaluation,
)

BUDGET = {"epsilon": 200.0, "clipping_norm": 0.5}
SCHEMES: dict[str, tuple[Callable[..., Any], Any]] = {
    "fedavg": (FedAvg, FedAvgClient),
    "fedavg, summed": (lambda **o: FedAvg(secure_sum=SecureSum(), **o), SecureSumClient),
    "udp": (lambda **o: make(UDP, **BUDGET, **o), UDPClient),
    "udp, shared": (
        lambda **o: make(UDP, shared_noise=True, secure_sum=SecureSum(), **BUDGET, **o),
        UDPClient,
    ),
    "central-dp": (lambda **o: make(CentralDP, **BUDGET, **o), CentralDPClient),
    "central-dp, trusted": (
        lambda **o: make(CentralDP, noise="server", **BUDGET, **o),
        CentralDPClient,
    ),
    "msp": (MSP, MSPClient),
    "mspdq": (
        lambda **o: MSPDQ(secure_sum=SecureSum(), bound=4.0, bits=16, **o),
        MSPDQClient,
    ),
    "mspdq, open": (lambda **o: MSPDQ(bits=8, **o), MSPDQClient),
}
PRIVATE = ["udp", "udp, shared", "central-dp", "central-dp, trusted"]
CHARGED = ["udp", "udp, shared", "central-dp"]  # by the nodes
REFUSING = ["fedavg", "fedavg, summed", *CHARGED, "mspdq"]


class DeclaredUDP(UDPClient):
    """Says what its records look like, so that its training is rehearsed as a whole."""

    records = RecordLayout(features=(FEATURES,))


def declared_data(client: int) -> tuple[Tensor, Tensor]:
    features, labels = own_data(lambda: [part.numpy() for part in records_of(client)])
    return torch.from_numpy(features), torch.from_numpy(labels)


def charges(state: Path) -> int:
    """Return how many charges the ledgers of all clients have."""
    files = [path for path in state.glob("*.ledger") if path.is_file()]
    return sum(len(Ledger(path, data_set=path.stem).entries()) for path in files)


# -- What travels -------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_only_the_trained_part_moves_and_the_server_shows_the_whole(scheme: str) -> None:
    strategy, half = SCHEMES[scheme]
    seen: list[list[str]] = []

    def evaluate(server_round: int, arrays: ArrayRecord) -> None:
        seen.append(list(arrays))
        network().load_state_dict(arrays.to_torch_state_dict())

    result = run_adapted(strategy(trainable=PATTERNS), adapted_app(half), evaluate_fn=evaluate)
    start = {name: tensor.numpy() for name, tensor in network().state_dict().items()}
    moved = model_of(result.arrays)
    assert list(moved) == list(start)
    assert seen == [list(start)] * 3
    assert [name for name in start if (start[name] != moved[name]).any()] == TRAINED
    assert not any(line.get("refused") for line in result.history)


def wide(frozen: bool = True) -> nn.Module:
    model = network(hidden=300)
    return model if frozen else model.requires_grad_(True)


def bytes_up(scheme: str, trainable: Any, reply: Callable[[nn.Module], Any]) -> int:
    strategy, half = SCHEMES[scheme]
    whole: dict[str, Any] = {"load": lambda m, a: m.load_state_dict(a.to_torch_state_dict())}
    app = adapted_app(
        half,
        model_of=lambda _: wide(frozen=trainable is not None),
        reply=reply,
        **({} if trainable else whole),
    )
    made = strategy(trainable=trainable)
    result = run_adapted(made, app, model=wide(), num_rounds=1)
    return int(result.history[1]["wire_bytes_up"])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bytes_up_are_the_share_of_the_adapters_and_one_percent(scheme: str) -> None:
    """Also where the app replies with its whole model, as apps do."""
    sizes = {name: tensor.numel() for name, tensor in wide().state_dict().items()}
    share = sum(sizes[name] for name in TRAINED) / sum(sizes.values())
    full = bytes_up(scheme, None, nn.Module.state_dict)
    assert share < 0.02
    assert bytes_up(scheme, PATTERNS, nn.Module.state_dict) <= (share + 0.01) * full


@pytest.mark.parametrize("scheme", ["fedavg", "udp"])
def test_numpy_clients_get_and_return_the_part_as_a_list(scheme: str) -> None:
    strategy, half = SCHEMES[scheme]
    one = run_adapted(strategy(trainable=PATTERNS), list_app(half))
    assert not any(line.get("refused") for line in one.history)
    if scheme == "fedavg":
        other = run_adapted(strategy(trainable=PATTERNS), adapted_app(half))
        for name, array in model_of(one.arrays).items():
            np.testing.assert_array_equal(array, model_of(other.arrays)[name])


def test_names_from_requires_grad_are_as_good_as_patterns() -> None:
    assert trainable_names(network()) == TRAINED
    for trainable in (trainable_names(network()), PATTERNS):
        result = run_adapted(FedAvg(trainable=trainable), adapted_app(FedAvgClient))
        assert result.history[-1]["accumulated"] == 4


def test_the_card_counts_what_travels_and_names_it() -> None:
    strategy = make(UDP, **BUDGET, trainable=PATTERNS)
    run_adapted(strategy, adapted_app(UDPClient))
    described = strategy.card().described
    assert described.arrays == 4
    assert "*.lora_*" in described.settings["trainable"]
    text = strategy.card().guarantee.text()
    assert f"not sent: 4 arrays with the digest {strategy.frozen.digest.hex()}" in text


@pytest.mark.parametrize("scheme", ["fedavg", "udp"])
def test_simulated_clients_share_nodes_and_batches(scheme: str) -> None:
    strategy, half = SCHEMES[scheme]

    def steps(model: nn.Module, features: Tensor, labels: Tensor) -> None:
        train(model, features.numpy(), labels.numpy(), seed=1)

    apps = [adapted_app(half, steps=steps) for _ in range(2)]
    results = [
        run_adapted(make_with_clients(strategy, clients), app, nodes=nodes)
        for app, (clients, nodes) in zip(apps, ((None, 4), (4, 1)), strict=True)
    ]
    assert [line["accumulated"] for line in results[1].history[1:]] == [4, 4]
    if scheme == "fedavg":
        for name, array in model_of(results[0].arrays).items():
            np.testing.assert_allclose(array, model_of(results[1].arrays)[name], atol=1e-5)


def make_with_clients(strategy: Callable[..., Any], clients: int | None) -> Any:
    loop = LoopOptions(clients=clients, seed=1)
    return strategy(trainable=PATTERNS, min_available_nodes=1, loop=loop)


def test_a_server_optimiser_gets_the_part() -> None:
    strategy = FedAvg(trainable=PATTERNS, inner=FedAdam(eta=0.1))
    result = run_adapted(strategy, adapted_app(FedAvgClient))
    start, moved = network().state_dict(), model_of(result.arrays)
    assert [n for n in moved if (moved[n] != start[n].numpy()).any()] == TRAINED


def test_a_validation_on_the_server_sees_the_whole_model() -> None:
    seen: list[list[str]] = []

    def validation(server_round: int, arrays: ArrayRecord) -> float:
        seen.append(list(arrays))
        return 1.0

    schedule = Discounting(validation=validation)
    strategy = make(UDP, **BUDGET, trainable=PATTERNS, schedule=schedule)
    run_adapted(strategy, adapted_app(UDPClient))
    assert seen
    assert all(names == list(network().state_dict()) for names in seen)


@pytest.mark.parametrize("half", [FedAvgClient, UDPClient])
def test_clients_evaluate_the_part_in_the_same_base_model(half: Any) -> None:
    strategy: Any = FedAvg(trainable=PATTERNS)
    if half is UDPClient:
        strategy = make(UDP, **BUDGET, trainable=PATTERNS, evaluation=PrivateEvaluation())
    result = run_adapted(strategy, adapted_app(half))
    assert result.history[-1]["evaluate"]


# -- Another model ------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", REFUSING)
def test_a_node_with_another_base_model_is_refused_before_it_costs_anything(
    scheme: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strategy, half = SCHEMES[scheme]
    app = adapted_app(half, model_of=lambda client: network(8 if client == 0 else 7))
    run_adapted(strategy(trainable=PATTERNS), app, state=tmp_path, num_rounds=1)
    assert "those of the server's model, number by number" in caplog.text
    assert charges(tmp_path) == (3 if scheme in CHARGED else 0)


@pytest.mark.parametrize("scheme", ["fedavg, summed", *CHARGED, "mspdq"])
@pytest.mark.parametrize("change", ["another base model", "other patterns", "nothing said"])
def test_what_the_first_question_said_of_the_model_holds(
    scheme: str, change: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that changes its mind in mid-training gets no answer, and no charge."""
    strategy, half = SCHEMES[scheme]
    made = strategy(trainable=PATTERNS)
    before: list[int] = []
    usual = made.train_round

    def train_round(grid: Any, server_round: int, arrays: ArrayRecord, config: Any) -> Any:
        if server_round == 2:
            before.append(charges(tmp_path))
            if change == "other patterns":  # the head alone
                arrays = ArrayRecord({name: arrays[name] for name in TRAINED[2:]})
            digest = replace(made.frozen, digest=bytes(32))
            made.frozen = None if change == "nothing said" else digest
        return usual(grid, server_round, arrays, config)

    def obedient(model: nn.Module, arrays: ArrayRecord) -> None:
        model.load_state_dict(arrays.to_torch_state_dict(), strict=False)

    made.train_round = train_round
    count = [0]

    def load(model: nn.Module, arrays: ArrayRecord) -> None:
        count[0] += 1
        (load_trainable if count[0] <= 8 else obedient)(model, arrays)

    run_adapted(made, adapted_app(half, load=load), state=tmp_path)
    assert "than the first one of this experiment" in caplog.text
    assert charges(tmp_path) == before[0] == (4 if scheme in CHARGED else 0)


def test_a_resumed_run_has_the_same_base_model(tmp_path: Path) -> None:
    def stop(line: dict[str, Any]) -> None:
        if line["round"] == 1:
            raise Killed

    for name in ("run", "state"):
        (tmp_path / name).mkdir()

    def run(model: nn.Module, **options: Any) -> Any:
        strategy = make(UDP, **BUDGET, trainable=PATTERNS, run_dir=tmp_path / "run", **options)
        app = adapted_app(UDPClient)
        return run_adapted(strategy, app, model=model, state=tmp_path / "state")

    with pytest.raises(Killed):
        run(network(), on_round=stop)
    with pytest.raises(CheckpointError, match="of another base model"):
        run(network(8), resume=True)
    assert run(network(), resume=True).history[-1]["accumulated"] == 4


# -- Apps that train something else -------------------------------------------------------------


def trains_no_adapters(model: nn.Module, features: Tensor, labels: Tensor) -> None:
    """Train with an optimiser that was made before the adapters."""
    descend(model, features, labels, model[3].parameters())


def moves_the_base(model: nn.Module, features: Tensor, labels: Tensor) -> None:
    usual_steps(model, features, labels)
    with torch.no_grad():
        model[2].weight += 1e-3


def frozen_adapters(_: int) -> nn.Module:
    model = network()
    model[0].lora_A.requires_grad_(False)
    return model


def trained_base(_: int) -> nn.Module:
    model = network()
    model[2].weight.requires_grad_(True)
    return model


def loads_by_itself(model: nn.Module, arrays: ArrayRecord) -> None:
    model.load_state_dict(arrays.to_torch_state_dict(), strict=False)


BUGS: dict[str, tuple[dict[str, Any], str]] = {
    "no gradients": (
        {"model_of": frozen_adapters},
        "requires_grad of ['0.lora_A.default.weight'] = False",
    ),
    "too many gradients": ({"model_of": trained_base}, "requires_grad of ['2.weight'] = True"),
    "another rank": (
        {"model_of": lambda _: initialise(lambda: deeper(), 7)},
        "the rank of an adapter",
    ),
    "adapters without optimiser": (
        {"steps": trains_no_adapters},
        "did not train ['0.lora_A.default.weight', '0.lora_B.default.weight']",
    ),
    "base moved": ({"steps": moves_the_base}, "changed frozen weights: ['2.weight']"),
    "not loaded": ({"load": loads_by_itself}, "nothing says which base model"),
    "part lost": (
        {"reply": lambda model: {"3.bias": model[3].bias.detach()}},
        "the training returned no ['0.lora_A.default.weight'",
    ),
}


def deeper() -> nn.Module:
    made = network()
    made[0] = Adapted(made[0].base_layer, rank=3)
    return made


@pytest.mark.parametrize("half", [DeclaredUDP, SecureSumClient])
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_of_the_app_is_an_error_before_anything_is_charged(
    half: Any, bug: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes, text = BUGS[bug]
    scheme = "udp" if half is DeclaredUDP else "fedavg, summed"
    strategy = SCHEMES[scheme][0](trainable=PATTERNS)
    app = adapted_app(half, data=declared_data, **changes)
    result = run_adapted(strategy, app, state=tmp_path, num_rounds=1)
    assert text in caplog.text
    assert charges(tmp_path) == 0
    assert result.history[-1]["skipped"]


@pytest.mark.parametrize("bug", ["no gradients", "too many gradients", "another rank"])
def test_the_model_is_checked_before_a_charge_whatever_the_app_says_of_its_records(
    bug: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes, text = BUGS[bug]
    strategy = make(UDP, **BUDGET, trainable=PATTERNS)
    run_adapted(strategy, adapted_app(UDPClient, **changes), state=tmp_path, num_rounds=1)
    assert text in caplog.text
    assert charges(tmp_path) == 0


@pytest.mark.parametrize("bug", ["adapters without optimiser", "base moved", "part lost"])
def test_without_a_rehearsal_such_a_training_counts_as_failed(
    bug: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes, text = BUGS[bug]
    strategy = make(UDP, **BUDGET, trainable=PATTERNS)
    run_adapted(strategy, adapted_app(UDPClient, **changes), state=tmp_path, num_rounds=1)
    assert text in caplog.text
    assert charges(tmp_path) == 4


def test_a_client_without_records_changes_nothing_and_is_no_error() -> None:
    def steps(model: nn.Module, features: Tensor, labels: Tensor) -> None:
        """Train not at all."""

    result = run_adapted(FedAvg(trainable=PATTERNS), adapted_app(FedAvgClient, steps=steps))
    assert result.history[-1]["accumulated"] == 4


def test_steps_by_hand_are_steps_too() -> None:
    def steps(model: nn.Module, features: Tensor, labels: Tensor) -> None:
        nn.functional.cross_entropy(model(features), labels).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad

    result = run_adapted(FedAvg(trainable=PATTERNS), adapted_app(FedAvgClient, steps=steps))
    assert result.history[-1]["accumulated"] == 4


# -- Single records -----------------------------------------------------------------------------

RECORD = {"unit": "record", "epsilon": 50.0, "clipping_norm": 0.5, "learning_rate": 0.5}


class Idle(Adapted):
    """An adapter that is there and not active."""

    def forward(self, inputs: Tensor) -> Tensor:
        return self.base_layer(inputs)


def idle(_: int) -> nn.Module:
    def new() -> nn.Module:
        made = network()
        layer = Idle(made[0].base_layer)
        layer.load_state_dict(made[0].state_dict())
        made[0] = layer
        return made

    return new()


def test_adapters_are_trained_where_single_records_are_protected(tmp_path: Path) -> None:
    strategy = make(UDP, **RECORD, trainable=PATTERNS)
    app = adapted_app(UDPClient, steps=record_steps)
    result = run_adapted(strategy, app, state=tmp_path)
    assert [line["accumulated"] for line in result.history[1:]] == [4, 4]
    start, moved = network().state_dict(), model_of(result.arrays)
    assert [n for n in moved if (moved[n] != start[n].numpy()).any()] == TRAINED
    assert charges(tmp_path) == 8


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_of": idle}, "does not depend on ['0.lora_A.default.weight'"),
        ({"model_of": frozen_adapters}, "= False: expected True: the server has them trained"),
        ({"model_of": lambda _: network(8)}, "those of the server's model, number by number"),
        ({"load": loads_by_itself}, "nothing says which base model"),
    ],
)
def test_at_record_level_too_a_bug_of_the_app_costs_nothing(
    changes: dict[str, Any], text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = make(UDP, **RECORD, trainable=PATTERNS)
    app = adapted_app(UDPClient, steps=record_steps, **changes)
    run_adapted(strategy, app, state=tmp_path, num_rounds=1)
    assert text in caplog.text
    assert charges(tmp_path) == 0


# -- The option ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trainable", "text"),
    [
        ("requires_grad", r"trainable = 'requires_grad': expected .* is trainable_names\(model\)"),
        ((), r"trainable = \(\): expected names or patterns"),
        ((3,), r"trainable = \(3,\): expected names or patterns"),
    ],
)
def test_what_is_no_list_of_names_is_refused(trainable: Any, text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        FedAvg(trainable=trainable)


@pytest.mark.parametrize(
    ("trainable", "text"),
    [
        (("*.lora_*", "heads.*"), r"trainable = \['heads\.\*'\]: expected names of the model"),
        (("*",), r"trainable = \['\*'\]: expected a part of the model"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(trainable: Any, text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        run_adapted(FedAvg(trainable=trainable), adapted_app(FedAvgClient))


def test_a_start_of_ones_own_is_refused() -> None:
    class Own(FedAvg):
        def start(self, grid: Any, initial_arrays: ArrayRecord, **options: Any) -> Any:
            return self.configure_train(1, initial_arrays, ConfigRecord(), grid)

    with pytest.raises(ProtocolError, match="trainable: works only where this strategy's own"):
        run_adapted(Own(trainable=PATTERNS), adapted_app(FedAvgClient))
