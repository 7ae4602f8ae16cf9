"""A server that gives out keys of its own, and nodes that pin those of the others."""

from pathlib import Path
from typing import Any

import pytest
from apps import message_app, record, run_strategy, same
from flwr.app import ConfigRecord
from grid_tap import tapped
from pinned import pinned_nodes

from flwr_privacy.clients import SecureSumClient, as_mod
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.secure_sum.messages import DEAL, SIGNED
from flwr_privacy.strategies import FedAvg, LoopOptions
from flwr_privacy.wire.channel import KeyPair
from flwr_privacy.wire.pins import Identity

CLIENTS = ["ward-0", "ward-1", "ward-2"]


def swapping(victim: str, *, from_round: int) -> Any:
    """Return a change of the grid: everybody is told another key of one client."""
    own = KeyPair().public

    def swap(content: dict[str, Any]) -> None:
        record = content.get(DEAL)
        if record is None or record["server-round"] < from_round or victim not in record["roster"]:
            return
        keys = list(record["keys"])
        keys[record["roster"].index(victim)] = own
        content[DEAL] = ConfigRecord({**record, "keys": keys})

    return tapped(lambda message: swap(message.content))


def trained(
    folder: Path, *, pinned: bool, before: Any = None, rounds: int = 1, checked: bool = False
) -> Any:
    nodes = pinned_nodes(folder, CLIENTS, pinned=pinned)
    pins = folder / "pins.toml" if checked else None
    loop = LoopOptions(seed=3, deadline=1.0, pins=pins)
    strategy = FedAvg(loop=loop, secure_sum=SecureSum())
    return run_strategy(
        strategy,
        message_app([as_mod(SecureSumClient)]),
        arrays=record(),
        nodes=nodes,
        num_rounds=rounds,
        before=before,
    )


def test_pinned_keys_do_not_change_the_sum(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    pinned, free = (trained(tmp_path / "a", pinned=True), trained(tmp_path / "b", pinned=False))
    assert same(pinned.arrays, free.arrays)
    assert pinned.history[1]["scheme"]["sum_opened"] == 3


def test_a_key_that_its_owner_did_not_sign_is_refused(tmp_path: Path, caplog: Any) -> None:
    with caplog.at_level("WARNING", "flwr.privacy"):
        swap = swapping("ward-1", from_round=0)
        result = trained(tmp_path, pinned=True, before=swap)
    assert result.history[1]["skipped"]
    assert "'ward-1'" in caplog.text
    assert "signature" in caplog.text


def test_a_key_that_changes_within_a_run_is_refused_without_pins(
    tmp_path: Path, caplog: Any
) -> None:
    with caplog.at_level("WARNING", "flwr.privacy"):
        swap = swapping("ward-1", from_round=2)
        result = trained(tmp_path, pinned=False, before=swap, rounds=2)
    # The others name it, and the next sum is without it.
    assert [line["scheme"]["sum_opened"] for line in result.history[1:]] == [3, 2]
    assert "the key of client ward-1 is another than before" in caplog.text


@pytest.mark.parametrize("missing", ["privacy-identity", "privacy-pins"])
def test_a_file_that_is_missing_is_the_nodes_own_trouble(
    missing: str, tmp_path: Path, caplog: Any
) -> None:
    configs = pinned_nodes(tmp_path, CLIENTS)
    configs[0][missing] = str(tmp_path / "nowhere")
    strategy = FedAvg(loop=LoopOptions(seed=3, deadline=1.0), secure_sum=SecureSum(threshold=2))
    with caplog.at_level("ERROR", "flwr.privacy"):
        result = run_strategy(
            strategy,
            message_app([as_mod(SecureSumClient)]),
            arrays=record(),
            nodes=configs,
            num_rounds=1,
        )
    assert result.history[1]["scheme"]["sum_opened"] == 2
    assert "nowhere" in caplog.text


def test_a_signature_of_another_length_is_refused_before_it_is_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    sign = Identity.sign

    def long(self: Identity, *parts: Any) -> bytes:
        return sign(self, *parts) * (100 if {"ward-1", f"{SIGNED} key"} <= {*parts} else 1)

    monkeypatch.setattr(Identity, "sign", long)
    with caplog.at_level("WARNING", "flwr.privacy"):
        result = trained(tmp_path, pinned=False)
    assert result.history[1]["scheme"]["sum_opened"] == 2
    assert "no public key, or a signature of another length" in caplog.text


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("wrong", ["key", "signature"])
def test_a_wrong_signature_costs_its_own_client_where_the_server_has_the_pins(
    wrong: str, checked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    sign, other = Identity.sign, Identity.generate()

    def forged(self: Identity, *parts: Any) -> bytes:
        if not {"ward-1", f"{SIGNED} key"} <= {*parts}:
            return sign(self, *parts)
        signed = (*parts[:-1], KeyPair().public) if wrong == "key" else parts
        return sign(self if wrong == "key" else other, *signed)

    monkeypatch.setattr(Identity, "sign", forged)
    with caplog.at_level("WARNING", "flwr.privacy"):
        result = trained(tmp_path, pinned=True, checked=checked, rounds=2)
    assert "the signature of client 'ward-1' does not fit its pinned key" in caplog.text
    # Without pins at the server all others refuse to deal in the first round, and name it.
    opened = [line["scheme"]["sum_opened"] for line in result.history[1:]]
    assert opened == ([2, 2] if checked else [0, 2])
    left_out = "client ward-1 (node" in caplog.text and "is left out of this run" in caplog.text
    assert left_out != checked


def test_the_nodes_still_check_what_the_server_has_checked(tmp_path: Path, caplog: Any) -> None:
    with caplog.at_level("WARNING", "flwr.privacy"):
        swap = swapping("ward-1", from_round=0)
        result = trained(tmp_path, pinned=True, before=swap, checked=True)
    assert result.history[1]["skipped"]
    assert "signature" in caplog.text
