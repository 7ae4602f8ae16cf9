"""Runs whose pages are read."""

import pytest

from flwr_privacy.simulations.settings.run_folder import RunFolder
from flwr_privacy.simulations.settings.run_settings import Settings


@pytest.fixture
def make(tmp_path):
    def make(
        name, *, rounds=6, status="completed", error=None, judge="server", late=0, more=(), **values
    ):
        settings = Settings(rounds=6, clients=10).with_values(values)
        run = RunFolder.create(tmp_path / name, settings, engine="inline", nodes=10)
        if rounds is not None and judge == "server":
            first = {"round": 0, "rounds": 6, "server": {"accuracy": 0.1, "loss": 2.3}}
            run.append({**first, "seconds": 0.1, "virtual_seconds": 0.0, **(more or [{}])[0]})
        for number in range(1, (rounds or 0) + 1):
            line = {
                "round": number,
                "rounds": 6,
                "skipped": False,
                "asked": 10,
                "answered": 10,
                "accumulated": 10 - late,
                "late": late,
                "refused": {"<non-finite>": 1} if late else {},
                "exchanges": 1,
                "bytes_down": 2_000_000,
                "bytes_up": 500_000,
                "virtual_seconds": 1.5 * number,
                "seconds": 0.2 * number,
                "train": {"loss": 1.0},
                judge: {"accuracy": 1 - 0.5**number, "loss": 2 * 0.6**number},
                "scheme": {},
            }
            run.append({**line, **(more[number] if number < len(more) else {})})
        if status != "created":
            run.finish(status, error)
        return run

    return make
