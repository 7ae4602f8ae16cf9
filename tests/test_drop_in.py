"""The blocks of docs/drop-in.md, applied to stock apps, are the whole change."""

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from drop_in import changed
from flwr.serverapp import ServerApp

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
