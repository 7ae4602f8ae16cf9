"""Budgets of each client, and noise that follows from what a client has left."""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from apps import make, message_app, model_of, record, run_strategy, same, step
from conformance import Killed, dying
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Strategy

from flwr_privacy.accounting import Charge, spent
from flwr_privacy.clients import UDPClient, as_mod
from flwr_privacy.errors import CheckpointError, InvalidParameterError, ProtocolError
from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.simulations.engines.inline import Fault
from flwr_privacy.strategies import UDP, ClientLosses, Discounting, LoopOptions, UserLevel
from flwr_privacy.udp import UDPNoisePlan

NAMES = ("a", "b", "c", "d")
EPSILON = {"a": 1.0, "b": 4.0, "c": 8.0, "d": 2.0, "elsewhere": 50.0}
SEED = 1  # one with which d is drawn in the second round, and not in the first
DELTAS = {"a": 1e-6, "b": 1e-5, "c": 1e-4, "d": 1e-5}


def nodes(names: Any = NAMES) -> list[dict[str, Any]]:
    return [{"client-id": name, "partition-id": i} for i, name in enumerate(names)]


def app() -> ClientApp:
    return message_app([as_mod(UDPClient)])


def charges(state: Path, name: str) -> list[Charge]:
    ledger = Ledger(state / f"{name}.ledger", data_set=name)
    return [entry.charge for entry in ledger.entries()]


def z_of(epsilon: float, delta: float, rounds: int) -> float:
    plan = UDPNoisePlan(noise="gdp_fixed", epsilon=epsilon, delta=delta, rounds=rounds, q=1.0)
    return plan.noise_multiplier


class Watching(UDP):
    """Notes the noise that each client says it has."""

    sigmas: ClassVar[dict[str, list[float]]]

    def take(self, mean: Any, reply: Any) -> None:
        self.sigmas.setdefault(reply.client_id, []).append(reply.metrics()["sigma"])
        super().take(mean, reply)


def test_each_client_has_the_noise_of_its_own_budget_and_stays_within_it(tmp_path: Path) -> None:
    class Own(Watching):
        sigmas: ClassVar[dict[str, list[float]]] = {}

    strategy = Own(
        privacy=UserLevel(epsilon=EPSILON, delta=DELTAS, clipping_norm=0.5),
        loop=LoopOptions(seed=1),
    )
    result = run_strategy(strategy, app(), nodes=nodes(), state=tmp_path)
    assert [line["accumulated"] for line in result.history[1:]] == [4, 4, 4]
    for name in NAMES:
        own = charges(tmp_path, name)
        z = z_of(EPSILON[name], DELTAS[name], 3)
        assert [charge.noise_multiplier for charge in own] == [z] * 3
        assert Own.sigmas[name] == pytest.approx([z * 2 * 0.5] * 3)
        assert spent(own, delta=DELTAS[name]) == pytest.approx(EPSILON[name], rel=1e-6)
        assert spent(own, delta=DELTAS[name]) <= EPSILON[name] * (1 + 1e-9)
        assert strategy.card().charges()[name] == own
    assert len(strategy.releases) == 12  # four costs in each round
    assert strategy.card(final=True).verify()


def test_the_promise_of_different_budgets_covers_all_of_them() -> None:
    strategy = UDP(privacy=UserLevel(epsilon=EPSILON, delta=1e-5), loop=LoopOptions(seed=1))
    result = run_strategy(strategy, app(), nodes=nodes())
    promise = result.guarantee
    assert promise.epsilon >= max(EPSILON[name] for name in NAMES)
    assert promise.delta == 1e-5
    assert promise.spent == pytest.approx(8.0, rel=1e-6)  # that of c
    mixed = UDP(privacy=UserLevel(epsilon=8.0, delta=DELTAS), loop=LoopOptions(seed=1))
    result = run_strategy(mixed, app(), nodes=nodes())
    assert result.guarantee.delta == 1e-4
    assert result.guarantee.spent <= result.guarantee.epsilon * (1 + 1e-9)
    assert mixed.card(final=True).verify()


@pytest.mark.usefixtures("no_pld")
def test_the_mean_is_that_of_all_clients_and_weighs_them_alike() -> None:
    """With epsilons without meaning, whichever noise is whose."""
    epsilon = {"a": 1e3, "b": 3e3, "c": 1e3, "d": 3e3}

    class Own(Watching):
        sigmas: ClassVar[dict[str, list[float]]] = {}

    strategy = Own(privacy=UserLevel(epsilon=epsilon, clipping_norm=10.0), loop=LoopOptions(seed=1))
    result = run_strategy(strategy, app(), nodes=nodes(), num_rounds=1)
    start = model_of(record())
    noise = np.sqrt(sum(s[0] ** 2 for s in Own.sigmas.values())) / 4
    for name in ("layer.weight", "0"):
        mean = np.mean([step(start[name], i).astype(float) for i in range(4)], axis=0)
        np.testing.assert_allclose(result.arrays[name].numpy(), mean, atol=6 * noise)
    assert noise < 0.5


def test_cohorts_with_budgets_of_their_own_equal_one_node_per_client() -> None:
    epsilon = {str(i): 2.0 + i for i in range(4)}
    options = {"epsilon": epsilon, "seed": 1, "experiment_id": "e"}
    plain, cohort = make(UDP, **options), make(UDP, **options, clients=4, min_available_nodes=1)
    one = run_strategy(plain, app(), insecure_seed=5)
    other = run_strategy(cohort, app(), nodes=2, insecure_seed=5)
    assert same(one.arrays, other.arrays)
    assert plain.releases == cohort.releases


@pytest.mark.parametrize("name", ["epsilon", "delta"])
def test_a_client_without_a_budget_is_named(name: str) -> None:
    values = {"epsilon": dict.fromkeys("abd", 1.0), "delta": dict.fromkeys("abd", 1e-5)}
    with pytest.raises(InvalidParameterError, match=rf"{name} = \['c'\]: expected a budget for"):
        run_strategy(make(UDP, **{name: values[name]}), app(), nodes=nodes())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"epsilon": {"a": 1.0, "b": 0.0}}, "epsilon = 0.0"),
        ({"epsilon": {"a": -1.0}}, "epsilon = -1.0"),
        ({"epsilon": {"a": float("nan")}}, "epsilon = nan"),
        ({"epsilon": {"a": "8"}}, "epsilon = '8'"),
        ({"delta": {"a": 1e-5, "b": 1.0}}, "delta = 1.0"),
        ({"delta": {"a": 0.0}}, "delta = 0.0"),
        ({"epsilon": {}}, "epsilon = {}"),
        ({"epsilon": {"a": 1.0}, "delta": {"b": 1e-5}}, "delta"),
        ({"epsilon": {"a": 1.0}, "secure_sum": SecureSum()}, "one budget for all with a secure"),
        ({"noise": "gdp", "secure_sum": SecureSum()}, "'gdp_fixed' or 'paper'"),
        ({"noise": "zcdp", "secure_sum": SecureSum()}, "'gdp_fixed' or 'paper'"),
    ],
)
def test_budgets_that_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParameterError) as error:
        make(UDP, **options)
    assert text in str(error.value)


@pytest.mark.parametrize("options", [{"epsilon": EPSILON}, {"noise": "gdp"}, {"delta": DELTAS}])
def test_a_users_own_start_has_no_noise_of_each_client(options: dict[str, Any]) -> None:
    class Own(UDP):
        start = Strategy.start

    with pytest.raises(ProtocolError, match="noise or budget of each client: works only where"):
        run_strategy(make(Own, **options, rounds=3), app(), nodes=nodes())


def test_who_joins_later_without_a_budget_is_not_asked(tmp_path: Path) -> None:
    """The fourth node comes after the first round; losses are not asked of it either."""
    late: list[Any] = []

    def hide(grid: Any) -> None:
        ids = grid.get_node_ids

        def get_node_ids() -> Any:
            found = sorted(ids())
            return found if late else [n for n in found if n != hidden[0]]

        hidden = [grid_node(grid, "d")]
        grid.get_node_ids = get_node_ids

    strategy = UDP(
        privacy=UserLevel(epsilon={"a": 1.0, "b": 1.0, "c": 1.0}),
        loop=LoopOptions(
            seed=1, on_round=lambda line: late.append(line["round"]) if line["round"] == 1 else None
        ),
        schedule=Discounting(validation=ClientLosses(), patience=9),
    )
    result = run_strategy(strategy, app(), nodes=nodes(), before=hide, state=tmp_path)
    assert [line["asked"] for line in result.history[1:]] == [3, 3, 3]
    assert "d" in strategy.federation.clients()
    assert charges(tmp_path, "d") == []
    assert len(charges(tmp_path, "a")) == 6  # a training and a loss in each round


def grid_node(grid: Any, client: str) -> int:
    """Return the node of a client."""
    from flwr.app import ConfigRecord, RecordDict

    from flwr_privacy.wire.message import RECORD, Header

    header = Header(scheme="udp", experiment_id="who", phase="hello", server_round=0)
    for node in grid.get_node_ids():
        content = RecordDict({RECORD: ConfigRecord(header.write())})
        (reply,) = grid.send_and_receive([Message(content, node, "train")], timeout=5)
        if reply.content[RECORD]["client-id"] == client:
            return int(node)
    raise LookupError(client)


@pytest.mark.parametrize("noise", ["gdp", "gdp_worst", "zcdp"])
def test_the_card_charges_what_the_clients_charge_where_noise_follows_from_the_rest(
    noise: str, tmp_path: Path
) -> None:
    for name in ("state", "run"):
        (tmp_path / name).mkdir()
    strategy = UDP(
        privacy=UserLevel(noise=noise, epsilon=4.0),
        fraction_train=0.5,
        loop=LoopOptions(seed=2, run_dir=tmp_path / "run"),
    )
    result = run_strategy(strategy, app(), nodes=nodes(), num_rounds=7, state=tmp_path / "state")
    card = PrivacyCard.from_json((tmp_path / "run" / "privacy-card.json").read_text())
    card.verify()
    plan = UDPNoisePlan(noise=noise, epsilon=4.0, delta=1e-5, rounds=7, q=0.5)
    took_part: dict[str, list[int]] = {name: [] for name in NAMES}
    for release in card.releases:
        for client in release.clients:
            took_part[client].append(release.server_round - 1)
    for name in NAMES:
        own = charges(tmp_path / "state", name)
        assert own == card.charges().get(name, [])
        assert spent(own, delta=1e-5) <= 4.0 * (1 + 1e-9)
        square = 0.0
        for t, charge in zip(took_part[name], own, strict=True):
            expected = plan.multiplier(7 - t, square)
            assert expected is not None  # or it should have declined
            assert charge.noise_multiplier == pytest.approx(expected, rel=1e-12)
            square += charge.noise_multiplier**-2
    counts = [len(rounds) for rounds in took_part.values()]
    declined = sum(line["refused"].get("declined", 0) for line in result.history[1:])
    assert sum(counts) + declined == 14
    assert declined == 0 or noise != "gdp_worst"
    late = [r[0] for r in took_part.values() if r]
    assert max(late) > 0  # somebody came later, with all of its budget


def test_who_has_spent_all_declines_and_is_not_averaged(tmp_path: Path) -> None:
    """With gdp a client that is drawn more often than expected has nothing left."""
    strategy = UDP(
        privacy=UserLevel(noise="gdp", epsilon=4.0),
        fraction_train=0.5,
        min_train_nodes=1,
        loop=LoopOptions(seed=5),
    )
    result = run_strategy(strategy, app(), nodes=nodes("ab"), num_rounds=8, state=tmp_path)
    declined = [line["refused"].get("declined", 0) for line in result.history[1:]]
    accumulated = [line["accumulated"] for line in result.history[1:]]
    assert [d + f for d, f in zip(declined, accumulated, strict=True)] == [1] * 8
    assert [line["skipped"] for line in result.history[1:]] == [f == 0 for f in accumulated]
    for name in "ab":
        own = charges(tmp_path, name)
        assert own == strategy.card().charges()[name]
        assert spent(own, delta=1e-5) <= 4.0 * (1 + 1e-9)


def test_a_lost_answer_counts_as_spent_when_noise_follows_from_the_rest(tmp_path: Path) -> None:
    strategy = UDP(privacy=UserLevel(noise="gdp", epsilon=4.0), loop=LoopOptions(seed=1))
    fault = Fault(kind="drop", client="b", server_round=1)
    run_strategy(strategy, app(), nodes=nodes(), faults=[fault], timeout=1.5, state=tmp_path)
    for name in NAMES:
        assert charges(tmp_path, name) == strategy.card().charges()[name]
    assert spent(charges(tmp_path, "b"), delta=1e-5) == pytest.approx(4.0, rel=1e-6)


@pytest.mark.parametrize("options", [{"noise": "gdp", "fraction_train": 0.5}, {"epsilon": EPSILON}])
def test_a_resumed_training_goes_on_with_what_each_client_has_left(
    options: dict[str, Any], tmp_path: Path
) -> None:
    own = {**options, "seed": 2, "experiment_id": "e"}
    whole = make(UDP, **own)
    unbroken = run_strategy(whole, app(), nodes=nodes(), num_rounds=5, insecure_seed=1)

    def kill(line: dict[str, Any]) -> None:
        if line["round"] == 2:
            raise Killed

    for name in ("state", "run"):
        (tmp_path / name).mkdir()
    run: dict[str, Any] = {
        "nodes": nodes(),
        "num_rounds": 5,
        "insecure_seed": 1,
        "state": tmp_path / "state",
    }
    with pytest.raises(Killed):
        run_strategy(make(UDP, **own, run_dir=tmp_path / "run", on_round=kill), app(), **run)
    if "epsilon" in options:
        other = {**own, "epsilon": {**EPSILON, "b": 5.0}}
        with pytest.raises(CheckpointError, match="calibrated for epsilon"):
            run_strategy(make(UDP, **other, run_dir=tmp_path / "run", resume=True), app(), **run)
    strategy = make(UDP, **own, run_dir=tmp_path / "run", resume=True)
    resumed = run_strategy(strategy, app(), **run)
    assert same(unbroken.arrays, resumed.arrays)
    assert strategy.releases == whole.releases
    for name in NAMES:
        assert charges(tmp_path / "state", name) == strategy.card().charges().get(name, [])


def test_who_left_after_a_round_that_broke_off_is_on_the_card_with_its_own_cost(
    tmp_path: Path,
) -> None:
    """It came late, so its noise was less than that of who is asked again."""
    for name in ("state", "run"):
        (tmp_path / name).mkdir()
    options: dict[str, Any] = {
        **{"noise": "gdp", "fraction_train": 0.5, "seed": SEED, "experiment_id": "e"},
        "run_dir": tmp_path / "run",
    }

    run: dict[str, Any] = {"num_rounds": 4, "state": tmp_path / "state"}
    with pytest.raises(Killed):
        run_strategy(make(dying(UDP, server_round=2), **options), app(), nodes=nodes(), **run)
    own = charges(tmp_path / "state", "d")
    assert len(own) == 1  # in the second round, for the first time
    strategy = make(UDP, **options, resume=True)
    run_strategy(strategy, app(), nodes=nodes()[:3], **run)
    assert strategy.card().charges()["d"] == own
    for name in "abc":
        assert charges(tmp_path / "state", name) == strategy.card().charges()[name]


def test_a_node_with_a_smaller_cap_of_its_own_declines_and_is_counted(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text("max_epsilon = 3.0\ndelta = 1e-5\n")
    configured = nodes()
    configured[1]["privacy-policy"] = str(tmp_path / "policy.toml")
    strategy = UDP(privacy=UserLevel(epsilon=8.0), loop=LoopOptions(seed=1))
    result = run_strategy(strategy, app(), nodes=configured, num_rounds=6, state=tmp_path)
    own = charges(tmp_path, "b")
    assert 0 < len(own) < 6
    assert spent(own, delta=1e-5) <= 3.0
    assert spent([*own, own[0]], delta=1e-5) > 3.0
    lines = result.history[1:]
    assert [line["accumulated"] for line in lines] == [4] * len(own) + [3] * (6 - len(own))
    refused = [line["refused"] for line in lines]
    assert refused == [{}] * len(own) + [{"declined": 1}] * (6 - len(own))
    assert strategy.card().charges()["b"] == own
    assert result.guarantee.spent == pytest.approx(8.0, rel=1e-6)


def test_the_policy_counts_earlier_trainings_on_the_same_data(tmp_path: Path) -> None:
    """Two clients of one node are about the same data set; the second finds less left."""
    (tmp_path / "policy.toml").write_text("max_epsilon = 9.0\ndelta = 1e-5\n")
    configured = nodes()
    configured[1]["privacy-policy"] = str(tmp_path / "policy.toml")
    configured[1]["privacy-data-set"] = "icu"
    for run, accumulated in ((1, [4, 4]), (2, [3, 3])):
        strategy = UDP(privacy=UserLevel(epsilon=8.0), loop=LoopOptions(seed=run))
        options = {"nodes": configured, "num_rounds": 2, "state": tmp_path}
        result = run_strategy(strategy, app(), **options)
        assert [line["accumulated"] for line in result.history[1:]] == accumulated
    everything = charges(tmp_path, "icu")
    assert len(everything) == 2
    assert spent(everything, delta=1e-5) == pytest.approx(8.0, rel=1e-6)
    assert len(charges(tmp_path, "a")) == 4
    # Under the same data set by another name of the client it finds the same ledger.
    configured[1]["client-id"] = "b2"
    result = run_strategy(
        UDP(privacy=UserLevel(epsilon=8.0), loop=LoopOptions(seed=3)), app(), **options
    )
    assert [line["accumulated"] for line in result.history[1:]] == [3, 3]


def test_what_is_asked_of_a_client_is_in_its_own_message_alone() -> None:
    """Nobody is told the budgets of others."""
    seen: list[tuple[str, float, float]] = []

    class Telling(UDPClient):
        def __init__(self, inner: Any, context: Context | None = None) -> None:
            super().__init__(inner, context)

        def handle(self, phase: str, arrays: Any, fields: Any, train: Any) -> Any:
            assert self.context is not None
            name = str(self.context.node_config["client-id"])
            seen.append((name, fields["epsilon"], fields["noise-multiplier"]))
            assert not any("budget" in key for key in fields)
            return super().handle(phase, arrays, fields, train)

    strategy = UDP(privacy=UserLevel(epsilon=EPSILON, delta=DELTAS), loop=LoopOptions(seed=1))
    run_strategy(strategy, message_app([as_mod(Telling)]), nodes=nodes(), num_rounds=1)
    assert sorted(seen) == [
        (name, EPSILON[name], z_of(EPSILON[name], DELTAS[name], 1)) for name in NAMES
    ]
