"""What the change does to the text of an app: imports, classes, mods, arguments, line ends."""

import ast
from pathlib import Path
from typing import Any

import pytest

from flwr_privacy.errors import DeclinedError
from flwr_privacy.simulations.inspector.changes import change as module
from flwr_privacy.simulations.inspector.changes import edits, server_change
from flwr_privacy.simulations.inspector.changes.edits import Edit
from flwr_privacy.simulations.inspector.findings import losses
from flwr_privacy.simulations.inspector.unfit import UnfitError
from flwr_privacy.simulations.inspector.wraps import Options, wrap_of
from flwr_privacy.wire.files import write_text
from tests.simulations.inspector.conftest import CLIENT, SERVER, Small, changed, new


def test_the_shortest_app_changes_in_four_lines(small: Small) -> None:
    change = changed(small())
    lines = [line for line in change.diff().splitlines() if line[:1] in "+-"]
    assert [line for line in lines if not line.startswith(("+++", "---"))] == [
        "-from flwr.clientapp import ClientApp",
        "+from flwr_privacy.clients import UDPClientApp as ClientApp",
        "-from flwr.serverapp.strategy import FedAvg",
        "+from flwr_privacy.strategies import UDP, UserLevel",
        "-    strategy = FedAvg()",
        "+    strategy = UDP(privacy=UserLevel(epsilon=8.0, delta=1e-5))",
    ]


@pytest.mark.parametrize(
    ("imported", "made", "expected"),
    [
        ("from flwr.client import ClientApp", "ClientApp", "UDPClientApp as ClientApp"),
        ("from flwr.clientapp import ClientApp as App", "App", "UDPClientApp as App"),
        ("import flwr.clientapp", "flwr.clientapp.ClientApp", "UDPClientApp"),
        ("import flwr as fl", "fl.client.ClientApp", "UDPClientApp"),
        ("from flwr import clientapp as c", "c.ClientApp", "UDPClientApp"),
    ],
)
def test_a_client_app_is_found_under_every_name(
    imported: str, made: str, expected: str, small: Small
) -> None:
    client = CLIENT.replace("from flwr.clientapp import ClientApp", imported)
    text = new(changed(small(client=client.replace("ClientApp()", f"{made}(mods=[])"))), "client")
    ast.parse(text)
    assert f"from flwr_privacy.clients import {expected}\n" in text
    assert f"app = {expected.rpartition(' ')[2]}(mods=[])" in text


@pytest.mark.parametrize(
    ("imported", "made"),
    [
        ("from flwr.serverapp.strategy import FedAvg as Base", "Base"),
        ("from flwr.serverapp import strategy as s", "s.FedAvg"),
        ("import flwr as fl", "fl.serverapp.strategy.FedAvg"),
        ("from .other import Averaging", "Averaging"),
    ],
)
def test_a_strategy_is_found_under_every_name(imported: str, made: str, small: Small) -> None:
    server = SERVER.replace("from flwr.serverapp.strategy import FedAvg", imported)
    other = "from flwr.serverapp.strategy import FedAvg\n\n\nclass Averaging(FedAvg):\n    ...\n"
    change = changed(small(server=server.replace("FedAvg()", f"{made}()"), other=other))
    text = new(change, "server")
    ast.parse(text)
    assert "privacy=UserLevel(epsilon=8.0, delta=1e-5))" in text
    if made == "Averaging":
        assert "class Averaging(UDP):" in new(change, "other")
        assert "UserLevel" not in new(change, "other")
    else:
        assert "    strategy = UDP(privacy=" in text


def test_an_app_object_from_another_module_is_followed(small: Small) -> None:
    change = changed(small(client="from small.deep import app\n", deep=CLIENT))
    assert "UDPClientApp as ClientApp" in new(change, "deep")
    assert new(change, "client") == ""


@pytest.mark.parametrize("in_a_variable", [True, False])
def test_mods_that_clip_or_add_noise_go_and_the_others_stay(
    in_a_variable: bool, small: Small
) -> None:
    mods = "[\n    own,  # first\n    fixedclipping_mod,  # clips\n    LocalDpMod(1, 2, 3, 4),\n]"
    listed = f"mods = {mods}\napp = ClientApp(mods=mods)" if in_a_variable else ""
    client = CLIENT.replace(
        "\napp = ClientApp()",
        "from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod\nfrom small.own import own\n"
        + (listed or f"app = ClientApp(mods={mods})"),
    )
    app = small(client=client, own="def own(message, context, call_next):\n    ...\n")
    text = new(changed(app), "client")
    ast.parse(text)
    assert "[\n    own,  # first\n]" in text
    assert "clipping" not in text
    assert "LocalDpMod" not in text
    assert "from small.own import own" in text
    found = losses(app, wrap_of("udp", Options(clients=4)))
    assert any("fixedclipping_mod goes" in line for line in found)
    assert any("the mods own stay" in line for line in found)


def test_a_mod_of_the_app_with_a_name_of_flowers_stays(small: Small) -> None:
    client = CLIENT.replace("ClientApp()", "ClientApp(mods=[fixedclipping_mod])")
    client += "\n\ndef fixedclipping_mod(message, context, call_next):\n    ...\n"
    assert "mods=[fixedclipping_mod]" in new(changed(small(client=client)), "client")


def test_an_optimiser_of_flowers_becomes_the_inner_strategy(small: Small) -> None:
    server = SERVER.replace("FedAvg()", "FedAdam(fraction_train=0.5, eta=0.1)")
    text = new(changed(small(server=server.replace("import FedAvg", "import FedAdam"))), "server")
    ast.parse(text)
    assert "inner=FedAdam(eta=0.1)" in text
    assert "        fraction_train=0.5,\n" in text
    assert "from flwr.serverapp.strategy import FedAdam\n" in text


def test_arguments_go_where_the_library_takes_them(small: Small) -> None:
    own = "class Own(FedAvg):\n    def __init__(self, n):\n        super().__init__()\n\n\n"
    server = SERVER.replace("\napp =", f"\n{own}app =").replace("FedAvg()\n", "Own(3)\n")
    text = new(changed(small(server=server)), "server")
    assert "super().__init__(privacy=UserLevel(epsilon=8.0, delta=1e-5))" in text
    assert "strategy = Own(3)\n" in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("a=1", "a=1, secure_sum=SecureSum()"),
        ("a=1,", "a=1, secure_sum=SecureSum()"),
        ("", "secure_sum=SecureSum()"),
        (
            "\n        a=1,  # one\n    ",
            "\n        a=1,  # one\n        secure_sum=SecureSum(),\n    ",
        ),
        ("\n        a=1\n    ", "\n        a=1,\n        secure_sum=SecureSum(),\n    "),
        ("a=1,\n             b=2", "a=1,\n             b=2, secure_sum=SecureSum()"),
    ],
)
def test_an_argument_is_added_as_the_others_are_written(
    arguments: str, expected: str, small: Small
) -> None:
    server = SERVER.replace("FedAvg()", f"FedAvg({arguments})")
    text = new(changed(small(server=server), "fedavg", secure_sum=True), "server")
    ast.parse(text)
    assert f"FedAvg({expected})" in text


def test_line_ends_and_letters_stay(small: Small) -> None:
    server = SERVER.replace("FedAvg()", 'FedAvg(weighted_by_key="größe")').replace("\n", "\r\n")
    text = new(changed(small(server=server), "fedavg"), "server")
    assert 'FedAvg(weighted_by_key="größe")\r\n' in text
    assert text.count("\n") == text.count("\r\n") + text.count("strategies import FedAvg\n")


def test_a_name_that_is_used_elsewhere_stays_imported(small: Small) -> None:
    server = SERVER.replace("strategy = FedAvg()", "strategy: FedAvg = FedAvg()")
    text = new(changed(small(server=server)), "server")
    assert "from flwr.serverapp.strategy import FedAvg\n" in text
    assert "strategy: FedAvg = UDP(" in text


def test_a_tree_has_as_many_leaves_as_there_are_clients() -> None:
    for clients, fanouts in ((4, "(2, 2)"), (7, "(1, 7)"), (20, "(4, 5)"), (1, "(1, 1)")):
        (tree, _) = wrap_of("m2fdp", Options(clients=clients)).arguments
        assert tree == f"tree=TierTree.of_fanouts({fanouts}, p=0.5)"


def test_a_server_fn_becomes_a_main_under_every_name(small: Small) -> None:
    legacy = """
import flwr as fl


def server_fn(ctx):
    strategy = fl.server.strategy.FedAdam(
        min_fit_clients=3,
        initial_parameters=made(),
        evaluate_metrics_aggregation_fn=mean,
        eta=0.5,
    )
    return fl.server.ServerAppComponents(
        strategy=strategy, config=fl.server.ServerConfig(num_rounds=4, round_timeout=9.0)
    )


app = fl.server.ServerApp(server_fn=server_fn)
"""
    text = new(changed(small(server=legacy), "fedavg"), "server")
    ast.parse(text)
    for part in (
        "@app.main()\ndef main(grid: Grid, ctx) -> None:\n",
        "        min_train_nodes=3,\n",
        "evaluate_metrics_aggr_fn=aggregated(mean),\n",
        "inner=FedAdam(eta=0.5),\n",
        "ArrayRecord(parameters_to_ndarrays(made())),\n",
        "num_rounds=4,\n",
        "timeout=9.0,\n",
        "from flwr.serverapp.strategy import FedAdam\n",
        "from flwr_privacy.strategies import FedAvg\n",
    ):
        assert part in text, part
    assert "fl.server" not in text


def test_messages_beside_the_training_are_named(small: Small) -> None:
    client = CLIENT + '\n\n@app.query("stats")\ndef stats(message, context):\n    ...\n'
    server = SERVER.replace(
        "    strategy.start", "    grid.send_and_receive([])\n    strategy.start"
    )
    found = losses(small(client=client, server=server), wrap_of("udp", Options()))
    assert any(line.startswith("messages query.stats are not part of udp") for line in found)
    assert any(line.endswith("server.py:11: grid.send_and_receive([])") for line in found)


@pytest.mark.parametrize(
    ("where", "name", "broken"),
    [
        (server_change, "add_arguments", [Edit(0, 0, "def (")]),
        (server_change, "add_arguments", [Edit(0, 9, ""), Edit(5, 9, "")]),
        (edits, "_import", "from"),  # the last edit of the last file
    ],
)
def test_what_would_not_be_python_is_not_written(
    where: Any, name: str, broken: Any, small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(where, name)

    def made(first: Any, *rest: Any) -> Any:
        return real(first, *rest) if str(first) == "flwr_privacy.clients" else broken

    app = small()
    monkeypatch.setattr(where, name, made)
    with pytest.raises(UnfitError, match="cannot be made safely") as refused:
        changed(app)
    assert "UDPClientApp as ClientApp" in refused.value.by_hand[0]


def test_both_halves_change_or_none(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    change = changed(small())
    before = {path: path.read_bytes() for path in change.texts}

    def full(path: Path, text: str, *, mode: int) -> None:
        if path.name == "server.py":
            raise OSError(28, "No space left on device")
        write_text(path, text, mode=mode)

    monkeypatch.setattr(module, "write_text", full)
    with pytest.raises(DeclinedError, match=r"server\.py cannot be written: No space left"):
        change.apply()
    assert {path: path.read_bytes() for path in change.texts} == before
