"""What the server keeps is on the disk before a round counts as over."""

import os
import stat
from pathlib import Path

import pytest

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
