"""What docs/deployment.md says of new long-term keys: an experiment goes on with them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pinned import pinned_nodes

from flwr_privacy.simulations.app import server_app
from flwr_privacy.simulations.cli.run_options import settings_of
from flwr_privacy.simulations.engines.inline import run_inline
from flwr_privacy.simulations.runner.jobs import CLIENT_APP
from flwr_privacy.simulations.settings.run_folder import RunFolder
from flwr_privacy.strategies.state.experiment import Experiment

CLIENTS = [f"ward-{i}" for i in range(4)]


def start(run: RunFolder, nodes: list[dict[str, Any]], state: Path, *, resume: bool) -> None:
    config = {
        "settings": run.settings_path.read_text(encoding="utf-8"),
        "run-dir": str(run.path),
        "resume": resume,
    }
    run_inline(server_app.app, CLIENT_APP, nodes=nodes, run_config=config, state=state)


@pytest.mark.parametrize(
    ("values", "rotated", "goes_on"),
    [
        ({"scheme": "fedavg", "secure_sum": True, "task": "digits-linear"}, True, True),
        ({"scheme": "fedavg", "secure_sum": True, "task": "digits-linear"}, False, False),
        ({"scheme": "fedvs", "task": "digits-rows"}, True, True),
    ],
)
def test_a_new_identity_takes_part_once_all_nodes_pin_it_and_the_run_is_resumed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    values: dict[str, Any],
    rotated: bool,
    goes_on: bool,
) -> None:
    """The server asks for signatures again after a resume; a pin that is old refuses them."""
    settings = replace(settings_of({"clients": 4, "rounds": 3, **values}), clients=None)
    run = RunFolder.create(tmp_path / "run", settings, engine="inline", nodes=4)
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    nodes = pinned_nodes(tmp_path, CLIENTS)
    end = Experiment.end_training

    def stop(self: Experiment, line: dict[str, Any], *given: Any, **more: Any) -> None:
        if line["round"] == 2:
            raise RuntimeError("the server is stopped")
        end(self, line, *given, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Experiment, "end_training", stop)
        with pytest.raises(RuntimeError, match="the server is stopped"):
            start(run, nodes, state, resume=False)
    pins = (tmp_path / "pins.toml").read_text()
    (tmp_path / "ward-0.pem").unlink()
    pinned_nodes(tmp_path, CLIENTS)  # a new key of ward-0, and pins with it
    assert (tmp_path / "pins.toml").read_text() != pins
    if not rotated:
        (tmp_path / "pins.toml").write_text(pins)
    start(run, nodes, state, resume=True)
    last = run.rounds()[-1]
    assert last["round"] == 3
    assert last["skipped"] != goes_on
    assert not goes_on or last["accumulated"] >= 3  # FedVS needs no more
