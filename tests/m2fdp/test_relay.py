"""Mode R: aggregators that are nodes of their own, and a server that only passes messages on."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from apps import make, message_app, record, run_strategy, same
from conformance import Killed
from flwr.app import Array, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from grid_tap import tapped
from zones import zone_nodes

from flwr_privacy.accounting import spent
from flwr_privacy.clients import M2FDPClient, as_mod
from flwr_privacy.clients.certificates.poisson_steps import (
    PoissonSteps,
    certify_steps,
    current_steps,
    poisson_batches,
)
from flwr_privacy.clients.certificates.request import digests
from flwr_privacy.errors import ProtocolError
from flwr_privacy.m2fdp import TierTree
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.simulations.engines.inline import Fault
from flwr_privacy.stragglers import StragglerModel
from flwr_privacy.strategies import M2FDP
from flwr_privacy.strategies.m2fdp.relay import Relay
from flwr_privacy.wire.identity import client_id_from
from flwr_privacy.wire.message import RECORD

SEED = 11
HALF = TierTree.of_fanouts((2, 2), p=0.5)
DEEP = TierTree.of_fanouts((2, 2, 2), p=(0.5, 0.5))
SCHEDULES = {
    "no local events": {"steps": 4},
    "local events": {"steps": 4, "events": 2},
    "clean events": {"steps": 4, "events": 2, "clean_events": "worst"},
}


def app() -> Any:
    return message_app([as_mod(M2FDPClient)])


def simulated(tree: TierTree, **options: Any) -> Any:
    strategy = make(M2FDP, tree=tree, experiment_id="e", seed=1, insecure_seed=SEED, **options)
    return run_strategy(strategy, app(), nodes=len(tree.devices), insecure_seed=SEED)


def relayed(
    tree: TierTree, folder: Path, start: dict[str, Any] | None = None, **options: Any
) -> Any:
    changes = {k: options.pop(k) for k in ("policies", "unpinned") if k in options}
    strategy = make(M2FDP, tree=tree, experiment_id="e", seed=1, relay=True, **options)
    nodes = zone_nodes(tree, folder, **changes)
    return run_strategy(strategy, app(), nodes=nodes, insecure_seed=SEED, **(start or {}))


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize(("name", "tree"), [("two tiers", HALF), ("three tiers", DEEP)])
def test_the_relayed_model_is_that_of_the_simulation(
    name: str, tree: TierTree, schedule: str, tmp_path: Path
) -> None:
    options = dict(SCHEDULES[schedule], clipping_norm=0.5, epsilon=200.0)
    if name == "three tiers" and "events" in options:
        options |= {"steps": 6, "events": {1: [4], 2: [2]}}
    one, other = simulated(tree, **options), relayed(tree, tmp_path, **options)
    assert same(one.arrays, other.arrays)
    assert [line["accumulated"] for line in other.history[1:]] == [
        line["accumulated"] for line in one.history[1:]
    ]


# -- One small training, told by names ------------------------------------------------------------

# t1-0 with 0, 1, 2 is trusted; t1-1 is not
WARDS = TierTree.of_fanouts((2, 3), p=0.5, devices=list("012345"))
CLEAN = {"steps": 4, "events": 2, "clean_events": "worst"}
PLAIN = {"clipping_norm": 0.5, "epsilon": 200.0}


pytestmark = pytest.mark.usefixtures("no_settling", "one_accountant")


class Seen:
    """What the devices computed, and everything that crossed the server."""

    def __init__(self) -> None:
        self.trained: dict[str, list[tuple[Any, Any]]] = {}  # start and end, by device
        self.crossed: list[bytes] = []

    def app(self, failing: Callable[[str, int], bool] = lambda name, segment: False) -> ClientApp:
        app = ClientApp(mods=[as_mod(M2FDPClient)])

        @app.train()
        def train(message: Message, context: Context) -> Message:
            name = client_id_from(context.node_config)
            if failing(name, int(message.content["config"]["segment"])):
                raise RuntimeError("no more")
            w = message.content["arrays"]["w"].numpy()
            moved = w + 0.01 * np.random.default_rng(int(name)).normal(size=w.shape)
            self.trained.setdefault(name, []).append((w.copy(), moved))
            content = {"arrays": record({"w": moved}), "metrics": MetricRecord({"num-examples": 1})}
            return Message(RecordDict(content), reply_to=message)

        return app

    def __call__(self, grid: Any) -> None:
        tapped(self._keep, self._keep)(grid)

    def _keep(self, message: Message) -> None:
        if message.has_content():
            self.crossed += _pieces(message)

    def found(self, secret: Any) -> bool:
        """Tell whether some of a vector crossed, in any of the types that it may have."""
        kinds = (np.int32, np.int64) if secret.dtype.kind == "i" else (np.float64, np.float32)
        middle = secret.size // 2
        patterns = [secret[middle : middle + 4].astype(kind).tobytes() for kind in kinds]
        return any(pattern in piece for piece in self.crossed for pattern in patterns)


def _pieces(message: Message) -> list[bytes]:
    pieces = []
    for content in message.content.values():
        for value in content.values():
            values = value if isinstance(value, list) else [value]
            pieces += [v.data if isinstance(v, Array) else v for v in values]
    return [piece for piece in pieces if isinstance(piece, bytes)]


def secrets(seen: Seen, devices: str) -> list[Any]:
    """Return the models and codes of devices, by every grid that the server named."""
    return [
        vector
        for device in devices
        for start, end in seen.trained[device]
        for vector in (end, end - start, *codes_of(end - start))
    ]


def codes_of(update: Any) -> list[Any]:
    return [np.trunc(update * 2.0**-k).astype(np.int64) for k in range(-36, -20)]


@pytest.mark.parametrize("schedule", ["no local events", "clean events"])
@pytest.mark.parametrize("relay", [True, False], ids=["relay", "simulation"])
def test_the_server_sees_nothing_of_trusted_devices_but_what_is_noised(
    schedule: str, relay: bool, tmp_path: Path
) -> None:
    """Nor their models after a clean event. In a simulation it does: the search would find it."""
    seen, options = Seen(), {**PLAIN, **SCHEDULES[schedule], "experiment_id": "e"}
    nodes: Any = zone_nodes(WARDS, tmp_path) if relay else 6
    run_strategy(
        make(M2FDP, tree=WARDS, relay=relay, **options),
        seen.app(),
        nodes=nodes,
        arrays=record({"w": np.linspace(-1, 1, 64)}),
        before=seen,
        num_rounds=1,
    )
    assert len(seen.trained["0"]) == (2 if "clean_events" in options else 1)
    found = [secret for secret in secrets(seen, "012") if seen.found(secret)]
    assert bool(found) == (not relay)
    if schedule == "clean events":  # the average of the zone, handed down
        started = seen.trained["0"][1][0]
        assert seen.found(started) == (not relay)
    # What a device of an insecure aggregator computed crosses in neither, its public start in both.
    assert not any(seen.found(secret) for secret in secrets(seen, "345"))
    assert seen.found(seen.trained["3"][0][0])


# -- Other calibrations ---------------------------------------------------------------------------


def test_the_papers_noise_is_that_of_the_simulation(tmp_path: Path) -> None:
    options = {"steps": 4, "events": 2, "unit": "paper", "alpha": 0.1, "sampling_rate": 0.05}
    one, other = simulated(WARDS, **options), relayed(WARDS, tmp_path, **options)
    assert same(one.arrays, other.arrays)
    assert one.history[3]["scheme"] == pytest.approx(other.history[3]["scheme"])
    assert other.guarantee.epsilon == one.guarantee.epsilon > 8.0


def test_records_are_protected_in_a_zone_too(tmp_path: Path) -> None:
    """A training on Poisson batches, as its certificate has it."""
    app = ClientApp(mods=[as_mod(M2FDPClient)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        w = message.content["arrays"]["w"].numpy()
        plan = current_steps()
        assert plan is not None
        moved = w + 0.01 * sum(batch.sum() for batch in poisson_batches(plan, 20))
        before, after = digests([w]), digests([moved])
        certify_steps(PoissonSteps(plan=plan, records=20, before=before, after=after))
        content = {"arrays": record({"w": moved}), "metrics": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(content), reply_to=message)

    state = tmp_path / "state"
    state.mkdir()
    options = {"unit": "record", "sampling_rate": 0.2, "steps": 4, "epsilon": 8.0}
    strategy = make(M2FDP, tree=HALF, relay=True, experiment_id="e", delta=1e-3, **options)
    start = {"arrays": record({"w": np.zeros(5)}), "num_rounds": 1, "state": state}
    result = run_strategy(strategy, app, nodes=zone_nodes(HALF, tmp_path), **start)
    assert (result.history[1]["accumulated"], result.history[1]["refused"]) == (4, {})
    assert result.arrays["w"].numpy().any()
    for name in ("0", "1", "2", "3", "t1-0"):
        (entry,) = Ledger(state / f"{name}.ledger", data_set=name).entries()
        assert (entry.unit, entry.charge.sampling) == ("record", 1 - 0.8**4)
        assert 7.9 < spent([entry.charge], delta=1e-3, accountant="rdp") <= 8.0


# -- Who is missing -------------------------------------------------------------------------------


LOUD = {"privacy-simulated": True}
"""Training that fails is told; on a deployed node it would count as one that changed nothing."""


def failing(*names: str, segment: int | None = None) -> Callable[[str, int], bool]:
    return lambda name, at: name in names and segment in (None, at)


@pytest.mark.parametrize(
    ("tree", "missing", "segment"),
    [
        (WARDS, "2", None),
        (WARDS, "2", 0),
        (WARDS, "2", 1),
        (WARDS, "12", 0),
        (WARDS, "12", 1),
        (WARDS, "02", 2),
        (WARDS, "012", 0),
        (WARDS, "345", None),
        (WARDS, "012345", None),
        (DEEP, "1", 0),
        (DEEP, "13", 1),
        (DEEP, "0", None),
    ],
)
def test_devices_that_drop_out_leave_the_model_of_the_simulation(
    tree: TierTree, missing: str, segment: int | None, tmp_path: Path
) -> None:
    """Fewer than min_children: the zone hands nothing on, down or up."""
    options = {**PLAIN, **CLEAN, "steps": 6, "experiment_id": "e", "seed": 1}
    if tree is DEEP:
        options |= {"events": {2: [2, 4]}}
    gone = failing(*missing, segment=segment)
    start = {"arrays": record({"w": np.zeros(5)}), "num_rounds": 2, "insecure_seed": SEED}
    relay = make(M2FDP, tree=tree, relay=True, **options)
    other = make(M2FDP, tree=tree, insecure_seed=SEED, **options)
    nodes = zone_nodes(tree, tmp_path, **LOUD)
    result = run_strategy(relay, Seen().app(gone), nodes=nodes, **start)
    expected = run_strategy(other, Seen().app(gone), nodes=len(tree.devices), **start)
    assert same(result.arrays, expected.arrays)
    for line, twin in zip(result.history[1:], expected.history[1:], strict=True):
        for key in ("skipped", "accumulated", "asked", "refused"):
            assert line[key] == twin[key], key
        assert line["scheme"] == pytest.approx(twin["scheme"])
    assert _by_device(relay) == _by_device(other)


def _by_device(strategy: M2FDP) -> dict[str, list[Any]]:
    return strategy.card().charges()


@pytest.mark.parametrize("phase", ["aggregate", "deliver"])
@pytest.mark.parametrize("server_round", [1, 2])
def test_an_aggregator_that_does_not_answer_is_done_without(
    phase: str, server_round: int, tmp_path: Path
) -> None:
    tree = TierTree.of_fanouts((2, 2, 2), p=0.5)
    who = "t1-0" if phase == "aggregate" else "t2-0"
    fault = Fault(kind="drop", client=who, server_round=server_round, phase=phase)
    options = {**PLAIN, "experiment_id": "e", "steps": 4, "clean_events": "worst"}
    strategy = make(M2FDP, tree=tree, relay=True, deadline=1.0, events={1: [2]}, **options)
    result = run_strategy(
        strategy,
        Seen().app(),
        nodes=zone_nodes(tree, tmp_path),
        arrays=record({"w": np.zeros(5)}),
        num_rounds=2,
        faults=[fault],
    )
    assert [line["skipped"] for line in result.history[1:]] == [False, False]
    assert np.isfinite(result.arrays["w"].numpy()).all()
    # The devices' data has left them for the zone: they have paid, whatever became of it.
    assert {len(charges) for charges in _by_device(strategy).values()} == {2, 4}


# -- What must be there ---------------------------------------------------------------------------


def test_an_aggregator_that_is_not_there_is_said(tmp_path: Path) -> None:
    nodes = [node for node in zone_nodes(WARDS, tmp_path) if node["client-id"] != "t1-0"]
    strategy = make(M2FDP, tree=WARDS, relay=True, min_available_nodes=6)
    text = "the secure aggregator 't1-0' is no node that is there: .*m2fdp-role='aggregator'"
    with pytest.raises(ProtocolError, match=text):
        run_strategy(strategy, Seen().app(), nodes=nodes)


def test_a_device_is_no_aggregator(tmp_path: Path) -> None:
    nodes = zone_nodes(WARDS, tmp_path)
    nodes[-1]["m2fdp-role"] = "device"
    text = "the secure aggregator 't1-0' is no node that is there"
    with pytest.raises(ProtocolError, match=text):
        run_strategy(make(M2FDP, tree=WARDS, relay=True), Seen().app(), nodes=nodes)


@pytest.mark.parametrize("name", ["0", "t1-0"])
def test_a_node_of_a_zone_needs_an_identity(name: str, tmp_path: Path) -> None:
    nodes = zone_nodes(WARDS, tmp_path)
    del next(node for node in nodes if node["client-id"] == name)["privacy-identity"]
    text = f"'{name}' has sent no key and signature: it has no privacy-identity"
    with pytest.raises(ProtocolError, match=text):
        run_strategy(make(M2FDP, tree=WARDS, relay=True), Seen().app(), nodes=nodes)


@pytest.mark.parametrize("entry", [{"key": 3}, {"signature": "x"}, {"key": b"k"}])
def test_a_hello_with_other_types_names_its_node(entry: dict[str, Any]) -> None:
    told: dict[str, Any] = {name: {"key": b"k", "signature": b"s"} for name in "012345"}
    told["t1-0"] = {"role": "aggregator", "key": b"k", "signature": b"s"}
    told["0"] = entry
    with pytest.raises(ProtocolError, match="'0' has sent no key and signature"):
        Relay(Mock(), WARDS, told, Mock(), least=1)


def test_a_later_hello_with_other_types_changes_no_keys() -> None:
    told: dict[str, Any] = {name: {"key": b"k", "signature": b"s"} for name in "012345"}
    told["t1-0"] = {"role": "aggregator", "key": b"k", "signature": b"s"}
    relay = Relay(Mock(), WARDS, told, Mock(), least=1)
    told |= {"0": {"key": 3}, "1": {}, "t1-0": {"key": [], "signature": b"s"}}
    assert relay._keys_of(["0", "1"]) == {"keys": [b"k", b"k"], "signatures": [b"s", b"s"]}
    assert relay.keys_for("t1-0") == {"parent-key": b"k", "parent-signature": b"s"}


def test_devices_of_insecure_aggregators_need_none(tmp_path: Path) -> None:
    nodes = zone_nodes(WARDS, tmp_path)
    for node in nodes:
        if node["client-id"] in "345":
            del node["privacy-identity"], node["privacy-pins"]
    start = {"arrays": record({"w": np.zeros(5)}), "num_rounds": 1}
    result = run_strategy(make(M2FDP, tree=WARDS, relay=True), Seen().app(), nodes=nodes, **start)
    assert (result.history[1]["accumulated"], result.history[1]["refused"]) == (6, {})


PINS: dict[str, tuple[str, str, dict[str, int], str]] = {
    "a device that pins nobody": ("0", "privacy-pins", {"error": 1}, "'t1-0' may be anybody"),
    "an aggregator that pins nobody": ("t1-0", "privacy-pins", {}, "'0' may be anybody"),
}


@pytest.mark.parametrize("what", PINS)
def test_who_pins_nobody_believes_nobody(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name, key, refused, text = PINS[what]
    nodes = zone_nodes(WARDS, tmp_path)
    del next(node for node in nodes if node["client-id"] == name)[key]
    start = {"arrays": record({"w": np.zeros(5)}), "num_rounds": 1}
    result = run_strategy(make(M2FDP, tree=WARDS, relay=True), Seen().app(), nodes=nodes, **start)
    assert text in caplog.text
    assert "this node pins no keys (privacy-pins in its configuration)" in caplog.text
    assert result.history[1]["refused"] == refused
    assert ("noise_sigma_t1" in result.history[1]["scheme"]) == (name == "0")


@pytest.mark.parametrize("who", ["t1-0", "0"])
def test_who_is_pinned_by_nobody_is_left_out(
    who: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = zone_nodes(WARDS, tmp_path, unpinned=[who])
    start = {"arrays": record({"w": np.zeros(5)}), "num_rounds": 1}
    result = run_strategy(make(M2FDP, tree=WARDS, relay=True), Seen().app(), nodes=nodes, **start)
    assert f"client '{who}' is not pinned" in caplog.text
    assert "noise_sigma_t1" not in result.history[1]["scheme"]
    assert result.history[1]["refused"] == ({"error": 3} if who == "t1-0" else {})


def test_a_device_that_trusts_no_parent_declines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policies = {"0": {"trusted_parents": []}}
    nodes = zone_nodes(WARDS, tmp_path, policies=policies)
    strategy = make(M2FDP, tree=WARDS, relay=True)
    start = {"arrays": record({"w": np.zeros(5)}), "num_rounds": 1}
    result = run_strategy(strategy, Seen().app(), nodes=nodes, **start)
    assert "the parent 't1-0' is not trusted: this node's policy has trusted_parents = []" in (
        caplog.text
    )
    assert result.history[1]["refused"] == {"declined": 1}
    assert "0" not in _by_device(strategy)
    # The zone goes on without it, with the noise of two.
    two = result.history[1]["scheme"]["noise_sigma_t1"]
    assert two == pytest.approx(result.history[1]["scheme"]["noise_sigma_t2"] / 2, rel=1e-5)


def test_an_aggregators_own_least_number_of_children_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = zone_nodes(WARDS, tmp_path, policies={"t1-0": {"min_children": 3}}, **LOUD)
    start = {"arrays": record({"w": np.zeros(5)}), "num_rounds": 1}
    app = Seen().app(failing("2"))
    result = run_strategy(make(M2FDP, tree=WARDS, relay=True), app, nodes=nodes, **start)
    assert "2 of 3 children answered: this node averages at least 3" in caplog.text
    assert "noise_sigma_t1" not in result.history[1]["scheme"]


# -- Books and files ------------------------------------------------------------------------------


def test_every_noised_release_is_in_the_ledgers_of_its_devices_and_its_aggregator(
    tmp_path: Path,
) -> None:
    tree = TierTree.of_fanouts((2, 2, 2), p=(0.5, 0.5))
    state = tmp_path / "state"
    state.mkdir()
    options = {"steps": 6, "events": {1: [4], 2: [2]}, "clean_events": "worst", **PLAIN}
    strategy = make(M2FDP, tree=tree, relay=True, experiment_id="e", **options)
    start = {"arrays": record({"w": np.zeros(5)}), "num_rounds": 2, "state": state}
    result = run_strategy(strategy, Seen().app(), nodes=zone_nodes(tree, tmp_path), **start)
    releases = {"t1-0": 1, "t2-0": 0, "t2-1": 0, "t2-2": 2}
    releases |= dict.fromkeys("0123", 1) | dict.fromkeys("45", 2) | dict.fromkeys("67", 3)
    charges = _by_device(strategy)
    assert set(charges) == set("01234567")
    for name, count in releases.items():
        entries = Ledger(state / f"{name}.ledger", data_set=name).entries()
        assert len(entries) == 2 * count, name
        if name in charges:
            assert [entry.charge for entry in entries] == charges[name]
            total = spent(charges[name], delta=1e-5, accountant="gdp")
            assert total == pytest.approx(200.0, rel=1e-6)
    assert "who relays the messages" in result.guarantee.adversary
    assert any("adds the noise of its zone" in text for text in result.guarantee.assumptions)
    assert not any("the server is trusted" in text for text in result.guarantee.assumptions)


def test_late_devices_pay_and_are_done_without(tmp_path: Path) -> None:
    class Late(StragglerModel):
        def race(self, clients: Any, *, phase: str, **_: Any) -> Any:
            return ({"0"} & set(clients) if phase == "train" else set()), 1.0

    strategy = make(M2FDP, tree=WARDS, relay=True, experiment_id="e", stragglers=Late())
    start = {"arrays": record({"w": np.zeros(5)}), "num_rounds": 1}
    result = run_strategy(strategy, Seen().app(), nodes=zone_nodes(WARDS, tmp_path), **start)
    assert (result.history[1]["late"], result.history[1]["accumulated"]) == (1, 5)
    assert len(_by_device(strategy)["0"]) == 1
    sigmas = result.history[1]["scheme"]
    assert sigmas["noise_sigma_t1"] == pytest.approx(sigmas["noise_sigma_t2"] / 2, rel=1e-5)


def test_those_who_are_drawn_are_the_siblings_of_a_round(tmp_path: Path) -> None:
    tree = TierTree.of_fanouts((1, 5), p=1.0)
    seen = Seen()
    strategy = make(
        M2FDP,
        tree=tree,
        relay=True,
        experiment_id="e",
        fraction_train=0.6,
        min_train_nodes=0,
        **CLEAN,
    )
    start = {"arrays": record({"w": np.zeros(5)}), "num_rounds": 3}
    result = run_strategy(strategy, seen.app(), nodes=zone_nodes(tree, tmp_path), **start)
    assert [line["asked"] for line in result.history[1:]] == [3, 3, 3]
    assert [line["refused"] for line in result.history[1:]] == [{}, {}, {}]
    assert len(seen.trained) > 3
    assert sum(map(len, _by_device(strategy).values())) == 9


def test_messages_survive_flowers_serialisation(tmp_path: Path) -> None:
    options: Any = {**PLAIN, **CLEAN}
    results = []
    for serialise in (False, True):
        folder = tmp_path / str(serialise)
        folder.mkdir()
        results.append(relayed(HALF, folder, {"serialise": serialise, "num_rounds": 2}, **options))
    assert same(results[0].arrays, results[1].arrays)


def test_the_tree_of_the_run_has_the_noise_that_the_aggregators_say(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    result = relayed(WARDS, tmp_path, {"num_rounds": 1}, run_dir=run_dir, **PLAIN)
    nodes = {n["name"]: n for n in json.loads((run_dir / "tree.json").read_text())["nodes"]}
    scheme = result.history[1]["scheme"]
    assert nodes["t1-0"]["sigma"] == scheme["noise_sigma_t1"] > 0
    assert nodes["3"]["sigma"] == scheme["noise_sigma_t2"] > 0
    assert (nodes["0"]["noise"], nodes["0"]["sigma"]) == (False, None)
    assert [n["name"] for n in nodes.values() if n["noise"]] == ["t1-0", "3", "4", "5"]


# -- Going on after the server was killed ---------------------------------------------------------


def _kill_after(server_round: int) -> Callable[[dict[str, Any]], None]:
    def on_round(line: dict[str, Any]) -> None:
        if line["round"] == server_round:
            raise Killed

    return on_round


def _kill_in(phase: str, server_round: int) -> Callable[[Any], None]:
    """Return a hook that ends the server once it has an answer of a phase."""

    def before(grid: Any) -> None:
        pull = grid.pull_messages

        def pull_messages(ids: Any) -> Any:
            for reply in pull(ids):
                fields = reply.content.get(RECORD, {}) if reply.has_content() else {}
                if (fields.get("phase"), fields.get("round")) == (phase, server_round):
                    raise Killed
                yield reply

        grid.pull_messages = pull_messages

    return before


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_a_relayed_run_goes_on_to_the_same_model(schedule: str, after: int, tmp_path: Path) -> None:
    options = {**PLAIN, **SCHEDULES[schedule], "experiment_id": "e", "seed": 1}
    folders = [tmp_path / name for name in ("nodes", "run", "state")]
    for folder in folders:
        folder.mkdir()
    nodes = zone_nodes(HALF, folders[0])
    start = {"nodes": nodes, "insecure_seed": SEED, "arrays": record({"w": np.zeros(5)})}
    unbroken = run_strategy(make(M2FDP, tree=HALF, relay=True, **options), Seen().app(), **start)
    options |= {"tree": HALF, "relay": True, "run_dir": folders[1]}
    start |= {"state": folders[2]}
    with pytest.raises(Killed):
        run_strategy(make(M2FDP, on_round=_kill_after(after), **options), Seen().app(), **start)
    strategy = make(M2FDP, resume=True, **options)
    resumed = run_strategy(strategy, Seen().app(), **start)
    assert same(unbroken.arrays, resumed.arrays)
    _check_books(strategy, folders[2])


@pytest.mark.parametrize("phase", ["train", "aggregate"])
def test_a_round_that_was_cut_off_is_finished_and_paid_for_once(phase: str, tmp_path: Path) -> None:
    """Its trusted node may have handed its average out: then it gives the same again."""
    folders = [tmp_path / name for name in ("nodes", "run", "state")]
    for folder in folders:
        folder.mkdir()
    nodes = zone_nodes(WARDS, folders[0])
    start = {"nodes": nodes, "arrays": record({"w": np.zeros(5)}), "state": folders[2]}
    start |= {"num_rounds": 2, "insecure_seed": SEED}
    options = {**PLAIN, **CLEAN, "experiment_id": "e", "seed": 1, "tree": WARDS, "relay": True}
    options |= {"run_dir": folders[1]}
    with pytest.raises(Killed):
        run_strategy(make(M2FDP, **options), Seen().app(), before=_kill_in(phase, 2), **start)
    strategy = make(M2FDP, resume=True, **options)
    resumed = run_strategy(strategy, Seen().app(), **start)
    assert [line["skipped"] for line in resumed.history[1:]] == [False, False]
    assert resumed.history[2]["scheme"]["noise_sigma_t1"] > 0
    _check_books(strategy, folders[2])
    entries = Ledger(folders[2] / "t1-0.ledger", data_set="t1-0").entries()
    assert len(entries) == 2


def _check_books(strategy: M2FDP, state: Path) -> None:
    """Check that each device has paid its budget, and every release once."""
    for name, charges in _by_device(strategy).items():
        entries = Ledger(state / f"{name}.ledger", data_set=name).entries()
        assert [entry.charge for entry in entries] == charges
        assert len({entry.question for entry in entries}) == len(entries)
        assert spent(charges, delta=1e-5, accountant="gdp") <= PLAIN["epsilon"] * (1 + 1e-9)
