"""Run folders to read and write."""

import pytest

from flwr_privacy.simulations.settings.run_folder import RunFolder
from flwr_privacy.simulations.settings.run_settings import Settings


@pytest.fixture
def create(tmp_path):
    def create(name="run", settings=None):
        return RunFolder.create(tmp_path / name, settings or Settings(), engine="inline", nodes=4)

    return create


@pytest.fixture
def run(create):
    return create()
