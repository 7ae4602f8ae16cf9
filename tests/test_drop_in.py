"""The blocks of docs/drop-in.md, applied to stock apps, are the whole change."""

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from drop_in import changed
from flwr.serverapp import ServerApp

from flwr_privacy.errors import ProtocolError
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.simulations.engines.inline import run_inline

HERE = Path(__file__).parent
EXPECTED = [  # partitions 0..3 with weights 10..40 move by their number in two rounds
    np.full((2, 2), 4.0, np.float32),
    np.full(3, 5.0, np.float32),
]


def module(name: str, *changes: str) -> ModuleType:
    source = (HERE / "stock" / f"{name}.py").read_text()
    for change in changes:
        source = changed(source, change)
    loaded = ModuleType(f"stock_{name}")
    exec(compile(source, f"{name} with {changes}", "exec"), loaded.__dict__)
    return loaded


def trained(server: ModuleType, client: ModuleType, **options: Any) -> list[np.ndarray]:
    assert isinstance(server.app, ServerApp)
    run_inline(server.app, client.app, nodes=4, **options)
    return server.results[-1]


@pytest.mark.parametrize("client", ["message_client", "numpy_client"])
@pytest.mark.parametrize(
    ("server", "changes"), [("server", ["server"]), ("server_fn", ["server-fn", "server"])]
)
def test_the_documented_change_is_enough(server: str, changes: list[str], client: str) -> None:
    for block in ("client", client.replace("_", "-")):
        arrays = trained(module(server, *changes), module(client, block))
        for array, expected in zip(arrays, EXPECTED, strict=True):
            np.testing.assert_allclose(array, expected, rtol=1e-6)


@pytest.mark.parametrize("client", ["message_client", "numpy_client"])
def test_the_documented_change_to_udp_is_enough(client: str, tmp_path: Path) -> None:
    server = module("server", "server-udp")
    changed_client = module(client, "client-udp")
    for array, expected in zip(
        trained(server, changed_client, state=tmp_path), EXPECTED, strict=True
    ):
        assert array.shape == expected.shape
        assert array.dtype == expected.dtype
        assert (array != expected).all()
    for index in range(4):
        entries = Ledger(tmp_path / f"{index}.ledger", data_set=str(index)).entries()
        assert [entry.question.server_round for entry in entries] == [1, 2]


@pytest.mark.parametrize("client", ["message_client", "numpy_client"])
def test_the_documented_change_to_a_secure_sum_is_enough(client: str) -> None:
    server = module("server", "server-secure-sum")
    changed_client = module(client, "client-secure-sum")
    for array, expected in zip(trained(server, changed_client), EXPECTED, strict=True):
        assert array.dtype == expected.dtype
        np.testing.assert_allclose(array, expected, atol=2 * 4.0 / 2**19)


@pytest.mark.parametrize("client", ["message_client", "numpy_client"])
def test_the_documented_change_to_mspdq_is_enough(client: str) -> None:
    server = module("server", "server-mspdq")
    changed_client = module(client, "client-mspdq")
    start = [np.zeros((2, 2), np.float32), np.ones(3, np.float32)]
    for array, begun in zip(trained(server, changed_client), start, strict=True):
        assert array.dtype == begun.dtype
        # Everybody weighs the same: two rounds of 1.5, each value off by at most a step of knobs.
        np.testing.assert_allclose(array, begun + 3.0, atol=2 * 8.0 / 254)


@pytest.mark.parametrize("client", ["message_client", "numpy_client"])
def test_the_documented_change_to_m2fdp_is_enough(client: str, tmp_path: Path) -> None:
    server = module("server", "server-m2fdp")
    changed_client = module(client, "client-m2fdp")
    for array, expected in zip(
        trained(server, changed_client, state=tmp_path), EXPECTED, strict=True
    ):
        assert (array.shape, array.dtype) == (expected.shape, expected.dtype)
        assert (array != expected).all()
    for index in range(4):  # those of the trusted aggregator pay as much as the others
        entries = Ledger(tmp_path / f"{index}.ledger", data_set=str(index)).entries()
        assert [entry.question.server_round for entry in entries] == [1, 2]


def test_the_stock_apps_work_unchanged_where_flower_lets_them() -> None:
    arrays = trained(module("server"), module("message_client"))
    for array, expected in zip(arrays, EXPECTED, strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-6)


@pytest.mark.parametrize("block", ["client", "message-client"])
def test_the_changed_client_still_serves_the_stock_server(block: str) -> None:
    arrays = trained(module("server"), module("message_client", block))
    for array, expected in zip(arrays, EXPECTED, strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-6)


def test_the_change_from_secagg_plus_gives_the_same_models() -> None:
    flowers = trained(module("secagg_server"), module("secagg_client"))
    server = module("secagg_server", "server-secagg")
    arrays = trained(server, module("secagg_client", "client-secagg"))
    for array, theirs, expected in zip(arrays, flowers, EXPECTED, strict=True):
        assert array.dtype == expected.dtype
        np.testing.assert_allclose(array, theirs, atol=1e-3)  # theirs is rounded to 16 / 2**22
        np.testing.assert_allclose(array, expected, atol=2 * 4.0 / 2**19)


@pytest.mark.parametrize("kind", ["clipping", "adaptive-clipping"])
def test_the_change_from_clipping_mods_clips_and_is_charged(kind: str, tmp_path: Path) -> None:
    name = kind.replace("-", "_")
    assert trained(module(f"{name}_server"), module(f"{name}_client"))
    server = module(f"{name}_server", f"server-{kind}")
    arrays = trained(server, module(f"{name}_client", f"client-{kind}"), state=tmp_path)
    for array, expected in zip(arrays, EXPECTED, strict=True):
        assert (array.shape, array.dtype) == (expected.shape, expected.dtype)
        assert (array != expected).all()
    for index in range(4):
        entries = Ledger(tmp_path / f"{index}.ledger", data_set=str(index)).entries()
        assert [entry.question.server_round for entry in entries] == [1, 2]
        assert {entry.scheme for entry in entries} == {"central-dp"}


def test_the_change_from_server_fn_keeps_configurations_metrics_and_checkpoints() -> None:
    rates: list[list[float]] = []
    for changes in ([], ["server-fn-more", "server"]):
        client = module("numpy_client", *(["client"] if changes else []))
        fit, asked = client.MyClient.fit, []

        def noting(self: Any, parameters: Any, config: Any, fit: Any = fit, to: Any = asked) -> Any:
            to.append(config["lr"])
            return fit(self, parameters, config)

        client.MyClient.fit = noting
        server = module("saving_server_fn", *changes)
        for array, expected in zip(trained(server, client), EXPECTED, strict=True):
            np.testing.assert_allclose(array, expected, rtol=1e-6)
        assert sorted(server.saved) == [1, 2]
        np.testing.assert_array_equal(server.saved[2][1], server.results[-1][1])
        assert server.seen["examples"] == [[10, 20, 30, 40], [5, 5]] * 2
        assert {server.seen[number]["eval_acc"] for number in (1, 2)} == {0.5}
        rates.append(asked)
    assert rates[0] == rates[1] == [0.1] * 4 + [0.05] * 4


@pytest.mark.parametrize("client", ["message_client", "numpy_client"])
def test_an_inner_strategy_steps_as_it_does_by_itself(client: str) -> None:
    stock = (HERE / "stock" / "server.py").read_text()
    alone = ModuleType("alone")
    exec(stock.replace("FedAvg", "FedAdam").replace("_nodes=4", "_nodes=4, eta=0.1"), vars(alone))
    arrays = trained(module("server", "server-inner"), module(client, "client"))
    flowers = trained(alone, module("message_client"))
    for array, theirs, averaged in zip(arrays, flowers, EXPECTED, strict=True):
        np.testing.assert_allclose(array, theirs, rtol=1e-6)
        assert (array != averaged).all()


def own_start(options: str, *changes: str) -> ModuleType:
    """Return the server with its own start, its strategy made with other options, and changed."""
    source = (HERE / "stock" / "own_start_server.py").read_text()
    for change in changes:
        source = changed(source, change)
    loaded = ModuleType("own_start")
    head = "from flwr_privacy.secure_sum import SecureSum\nfrom flwr_privacy.strategies import *\n"
    exec(head + source.replace("_nodes=4", f"_nodes=4, {options}"), loaded.__dict__)
    return loaded


@pytest.mark.parametrize("changes", [[], ["server"], ["own-start", "server"]])
def test_a_start_of_ones_own_works_and_its_parts_work_in_the_loop(changes: list[str]) -> None:
    server, client = own_start("", *changes), module("message_client", "client")
    for array, expected in zip(trained(server, client), EXPECTED, strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-6)
    assert server.best == {"score": 4.0, "round": 2}  # of nine rounds


def test_what_a_start_of_ones_own_loses_is_refused_and_its_parts_lose_nothing(
    tmp_path: Path,
) -> None:
    options = (
        "secure_sum=SecureSum(), loop=LoopOptions(run_dir=FOLDER, deadline=9.0, on_round=ROUND)"
    )
    seen: list[int] = []

    def server(*changes: str) -> ModuleType:
        loaded = own_start(options, *changes)
        vars(loaded).update(FOLDER=tmp_path, ROUND=lambda line: seen.append(line["round"]))
        return loaded

    client = module("message_client", "client-secure-sum")
    text = "deadline, on_round, run_dir, secure_sum: works only where .* go into configure_train"
    with pytest.raises(ProtocolError, match=text):
        trained(server("server"), client)
    assert not list(tmp_path.iterdir())
    arrays = trained(server("own-start", "server"), client)
    for array, expected in zip(arrays, EXPECTED, strict=True):
        np.testing.assert_allclose(array, expected, atol=2 * 4.0 / 2**19)
    assert seen == [0, 1, 2]
    assert {"checkpoint.bin", "metrics.jsonl"} <= {path.name for path in tmp_path.iterdir()}
