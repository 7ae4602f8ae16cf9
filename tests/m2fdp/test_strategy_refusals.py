"""What the server half of M2FDP refuses: options, trees, and clients that do not fit the tree."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from apps import make, record, run_strategy
from tier_training import HALF, MIXED, app_of, charges_of, nodes_of, run, stay, to, w_of
from zones import tree_file

from flwr_privacy.errors import InvalidParameterError, ProtocolError
from flwr_privacy.m2fdp import TierTree
from flwr_privacy.simulations.engines.inline import Fault
from flwr_privacy.strategies import M2FDP

pytestmark = pytest.mark.usefixtures("no_settling", "one_accountant")
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no tree": ({"fanouts": None}, "^fanouts = None: expected the tree .* `fanouts` or `tree`"),
    "two trees": ({"tree": HALF}, r"^fanouts = \(2, 2\): expected the tree of aggregators"),
    "p of a tree": ({"fanouts": None, "tree": HALF, "p": 0.5}, "^p = 0.5: expected nothing beside"),
    "p above 1": ({"p": 1.5}, "^p = 1.5"),
    "p below 0": ({"p": -0.1}, "^p = -0.1"),
    "p of too many tiers": ({"p": (0.5, 0.5)}, "^p = "),
    "epsilon 0": ({"epsilon": 0.0}, "^epsilon = 0.0: expected a number above 0"),
    "epsilon below 0": ({"epsilon": -3.0}, "^epsilon = -3.0: expected a number above 0"),
    "delta": ({"delta": 1.0}, "^delta = 1.0"),
    "no alpha": (
        {"unit": "paper", "sampling_rate": 0.1},
        "^PaperNoise needs 'alpha': it is required",
    ),
    "alphas": (
        {"unit": "paper", "sampling_rate": 0.1, "alpha": [1.0, 1.0, 1.0]},
        "^alpha = .*: expected a number, or 2, one per tier",
    ),
    "no rate": ({"unit": "record"}, "^RecordNoise needs 'sampling_rate': it is required"),
    "no steps": ({"steps": 0}, "^steps = 0"),
    "period 0": ({"events": 0}, "^events = 0"),
    "lists that overlap": (
        {"fanouts": (2, 2, 2), "steps": 6, "events": {1: [2, 4], 2: [4]}},
        "^events of tier 2 = 4: expected no event of tier 1 after the same step",
    ),
    "a list with K": (
        {"steps": 4, "events": {1: [2, 4]}},
        "^events of tier 1 = 4: expected steps below 4, after which the global event is",
    ),
    "a tier too far down": (
        {"steps": 4, "events": {2: [2]}},
        "^tier of events = 2: expected a tier of aggregators, from 1 to 1",
    ),
    "no tier": ({"events": {"edge": 2}}, "^events = .*: expected numbers of tiers"),
    "events of a star": ({"fanouts": (4,), "steps": 4, "events": 2}, "^tier of events = 1: .*none"),
    "clipping": ({"clipping_norm": None}, "^clipping_norm = None"),
    "drift smooth": ({"clean_events": "smooth"}, "^SmoothDrift needs 'smoothness': it is required"),
    "a step rule": ({"step_rule": "fast"}, "^step_rule = 'fast': expected one of"),
    "control of records": (
        {
            **{"unit": "record", "sampling_rate": 0.5, "control": "adaptive"},
            **{"total_steps": 4, "max_steps": 2},
        },
        "^control = AdaptiveControl.*: expected None with RecordNoise",
    ),
    "no steps of a control": (
        {"control": "adaptive", "total_steps": 0, "max_steps": 2},
        "^total_steps = 0",
    ),
    "an unknown key": ({"tau": 4}, "^M2FDP has no 'tau'"),
    "a key of a control": ({"total_steps": 4}, "has no 'total_steps': only with control=adaptive"),
    "min_children": ({"min_children": 0}, "^min_children = 0"),
    "relay of made up clients": ({"relay": True, "clients": 4}, "^clients = 4: expected None with"),
    "relay without noise": (
        {"relay": True, "unit": "none"},
        "^relay = True: expected false without noise",
    ),
    "a flag": ({"edge_noise": "yes"}, "^edge_noise = 'yes': expected true or false"),
    "children of nobody": (
        {"min_children": 1},
        "^min_children = 1: expected 2 where no aggregator of the tree is trusted",
    ),
    "children in a star": ({"fanouts": (4,), "min_children": 3}, "^min_children = 3: expected 2 "),
    "seed": ({"insecure_seed": -1}, "^insecure_seed = -1"),
    "a seed without noise": (
        {"p": 0.5, "unit": "none", "insecure_seed": 5},
        "^insecure_seed = 5: expected None: the server adds no noise",
    ),
    "a seed where devices add the noise": ({"insecure_seed": 5}, "^insecure_seed = 5: expected N"),
    "a seed where nodes add the noise": (
        {"p": 0.5, "relay": True, "insecure_seed": 5},
        "^insecure_seed = 5: expected None",
    ),
}


@pytest.mark.parametrize("options", [{"p": 0.5}, {"p": 0.0, "edge_noise": True}])
def test_a_seed_is_taken_where_the_server_adds_noise(options: dict[str, Any]) -> None:
    assert make(M2FDP, fanouts=(2, 2), insecure_seed=5, **options).insecure_seed == 5


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_is_refused_before_there_are_clients(what: str) -> None:
    options, message = BAD[what]
    with pytest.raises(InvalidParameterError, match=message):
        make(M2FDP, **{"fanouts": (2, 2), **options})


TREES: dict[str, tuple[str, str]] = {
    "two parents": (
        '[nodes.a]\ndevices = ["0", "1"]\n[nodes.b]\ndevices = ["1", "2"]\n',
        r"tree\.toml.*'?b'?.*'1'",
    ),
    "cycle": (
        '[nodes.a]\nparent = "b"\n[nodes.b]\nparent = "a"\ndevices = ["0"]\n',
        r"tree\.toml.*(cycle|circle|itself)",
    ),
    "a leaf without devices": (
        '[nodes.a]\ndevices = ["0", "1"]\n[nodes.b]\n',
        r"tree\.toml.*'?b'?",
    ),
}


@pytest.mark.parametrize("what", TREES)
def test_a_file_that_is_no_tree_is_refused_by_its_name_and_the_nodes(
    what: str, tmp_path: Path
) -> None:
    text, message = TREES[what]
    (tmp_path / "tree.toml").write_text(text)
    with pytest.raises(InvalidParameterError, match=message):
        make(M2FDP, tree=tmp_path / "tree.toml")


def test_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "tree.toml").write_text(tree_file(MIXED))
    assert make(M2FDP, tree=tmp_path / "tree.toml").tree == MIXED


OTHERS = TierTree.of_edges([("cloud", "a"), ("cloud", "b")])


@pytest.mark.parametrize(
    ("options", "nodes", "message"),
    [
        (
            {"tree": OTHERS},
            4,
            r"^tree = \['a', 'b'\]: expected leaves that are there, such as \['0'",
        ),
    ],
    ids=["none of them"],
)
def test_what_does_not_fit_the_clients_is_refused_at_the_start(
    options: dict[str, Any], nodes: int, message: str
) -> None:
    whole = options if "tree" in options else {"fanouts": (2, 2), **options}
    with pytest.raises(InvalidParameterError, match=message):
        run_strategy(make(M2FDP, **whole), app_of(stay), nodes=nodes)


def test_a_tree_waits_for_as_many_clients_as_it_has_leaves() -> None:
    text = "3 of min_available_nodes = 4 nodes connected within 0.2 s"
    with pytest.raises(ProtocolError, match=text):
        run_strategy(make(M2FDP, fanouts=(2, 2)), app_of(stay), nodes=3, timeout=0.2)


@pytest.mark.parametrize(("nodes", "clients"), [(6, None), (1, 6), (1, 3)])
def test_a_client_without_a_leaf_is_refused_before_a_round(nodes: int, clients: int | None) -> None:
    message = (
        rf"fanouts = '2,2': .* {clients or nodes} clients, such as fanouts=[23].*; .* 4 leaves"
    )
    with pytest.raises(InvalidParameterError, match=message):
        run_strategy(make(M2FDP, fanouts=(2, 2), clients=clients), app_of(stay), nodes=nodes)


def test_a_named_tree_has_no_leaf_for_further_simulated_clients() -> None:
    with pytest.raises(InvalidParameterError, match="clients = 9: expected at most 4, the leaves"):
        make(M2FDP, tree=MIXED, unit="none", min_children=1, clients=9)


def test_a_tree_goes_on_without_the_devices_that_are_not_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    strategy = make(M2FDP, tree=MIXED, unit="none", min_children=1, min_available_nodes=3)
    nodes = [node for node in nodes_of(MIXED) if node["client-id"] != "3"]
    nodes.append({**nodes[0], "client-id": "stranger"})
    targets = {"1": 1.0, "5": 5.0, "7": 7.0, "stranger": 50.0}
    with caplog.at_level(logging.WARNING, "flwr.privacy"):
        result = run_strategy(
            strategy,
            app_of(to(targets)),
            nodes=nodes,
            arrays=record({"w": np.zeros(1)}),
            num_rounds=1,
        )
    assert "devices of the tree that are not there: ['3']" in caplog.text
    assert "clients that are no leaf of the tree are not asked: ['stranger']" in caplog.text
    assert result.history[1]["asked"] == 3
    assert w_of(result) == pytest.approx((1 + 6) / 2, abs=1e-6)


def test_names_with_numbers_are_in_the_order_of_their_numbers() -> None:
    strategy = make(M2FDP, fanouts=(6, 2), unit="none")
    run_strategy(strategy, app_of(stay), nodes=12, arrays=record({"w": np.zeros(1)}), num_rounds=1)
    assert strategy.tree.devices == tuple(map(str, range(12)))
    assert strategy.tree.children("t1-5") == ("10", "11")


def test_a_fault_of_one_device_is_no_fault_of_its_siblings() -> None:
    fault = Fault(kind="crash", client="5", server_round=1)
    options = {"unit": "none", "clipping_norm": None, "size": 1, "deadline": 1.0}
    train = to({"1": 1.0, "3": 3.0, "5": 5.0, "7": 7.0})
    result, _ = run(MIXED, train, engine={"faults": [fault]}, **options)
    assert w_of(result) == pytest.approx((2 + 7) / 2, abs=1e-6)


def test_a_device_that_owes_an_answer_is_not_asked_again_in_the_round() -> None:
    """Two messages to one node at once lose state on Ray: who is late sits the next event out."""
    tree = TierTree.of_fanouts((2, 2))
    late = Fault(kind="delay", client="0", server_round=1, seconds=5.0)
    options = {"steps": 4, "events": 2, "quorum": 3, "deadline": 60.0}
    result, strategy = run(tree, stay, engine={"faults": [late]}, **options)
    assert (result.history[1]["asked"], result.history[1]["accumulated"]) == (3, 3)
    paid = {name: len(charges) for name, charges in charges_of(strategy).items()}
    assert paid == {"0": 1, "1": 2, "2": 2, "3": 2}
