"""What the server keeps is on the disk before a round counts as over."""

import os
import stat
from pathlib import Path

import pytest
from apps import make, message_app, record

from flwr_privacy.clients import UDPClient, as_mod
from flwr_privacy.simulations.engines.inline import InlineGrid
from flwr_privacy.simulations.engines.inline.flower_internals import acting_as_server
from flwr_privacy.strategies import UDP
from flwr_privacy.strategies.state import checkpoint


def test_a_checkpoint_waits_for_the_disk_with_its_file_and_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[bool] = []

    def note(descriptor: int) -> None:
        flushed.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))

    monkeypatch.setattr(os, "fsync", note)
    checkpoint.save(tmp_path / "checkpoint.bin", {"round": 1})
    assert flushed == [False, True]  # the folder last: the file has its name there then


class DeployedGrid(InlineGrid):
    """Nodes of which nobody says that they are simulated."""

    local = False


@pytest.mark.parametrize("grid_class", [InlineGrid, DeployedGrid])
def test_only_a_simulation_does_not_wait_for_the_disk(
    grid_class: type[InlineGrid], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []

    def note(descriptor: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.strip("."))

    monkeypatch.setattr(os, "fsync", note)
    grid = grid_class(message_app([as_mod(UDPClient)]), 3)
    strategy = make(UDP, seed=1, epsilon=50.0, rounds=2, run_dir=tmp_path)
    with acting_as_server(grid.run_id):
        strategy.start(grid, record(), num_rounds=2)
    grid.close()
    written = {"privacy-card.json", "privacy-card.html", "checkpoint.bin", "asked.json"}
    assert {path.name for path in tmp_path.iterdir()} >= written - {"asked.json"}
    named = {name for name in written for entry in flushed if entry.startswith(name)}
    assert named == (set() if grid_class is InlineGrid else written)
