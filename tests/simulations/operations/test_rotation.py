"""What docs/deployment.md says of new long-term keys: an experiment goes on with them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pinned import pinned_nodes

from flwr_privacy.errors import ProtocolError
from flwr_privacy.simulations.app import server_app
from flwr_privacy.simulations.engines.inline import run_inline
from flwr_privacy.simulations.runner.complete_settings import settings_of
from flwr_privacy.simulations.runner.jobs import CLIENT_APP
from flwr_privacy.simulations.settings.run_folder import RunFolder
from flwr_privacy.strategies.state.experiment import Experiment

CLIENTS = [f"ward-{i}" for i in range(4)]


def start(
    run: RunFolder, nodes: list[dict[str, Any]], state: Path, *, resume: bool, **told: Any
) -> None:
    settings = replace(run.settings, strategy={**run.settings.strategy, **told})
    config = {
        "settings": settings.to_toml(),
        "run-dir": str(run.path),
        "resume": resume,
    }
    run_inline(server_app.app, CLIENT_APP, nodes=nodes, run_config=config, state=state)


SUM = {"scheme": "fedavg", "secure_sum": True, "task": "digits-linear"}


@pytest.mark.parametrize(
    ("values", "server_pins", "rotated"),
    [
        (SUM, True, True),
        (SUM, False, True),
        (SUM, False, False),
        ({"scheme": "fedvs", "task": "digits-rows"}, False, True),
    ],
)
def test_a_new_identity_takes_part_once_all_nodes_pin_it_and_the_run_is_resumed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    values: dict[str, Any],
    server_pins: bool,
    rotated: bool,
) -> None:
    """The server asks for signatures again after a resume; a pin that is old refuses them.

    A server with pins reads the new one. A server without is told whose first key is no more.
    """
    settings = replace(settings_of({"clients": 4, "rounds": 3, **values}), clients=None)
    run = RunFolder.create(tmp_path / "run", settings, engine="inline", nodes=4)
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    nodes = pinned_nodes(tmp_path, CLIENTS)
    told: dict[str, Any] = {"pins": str(tmp_path / "pins.toml")} if server_pins else {}
    end = Experiment.end_training

    def stop(self: Experiment, line: dict[str, Any], *given: Any, **more: Any) -> None:
        if line["round"] == 2:
            raise RuntimeError("the server is stopped")
        end(self, line, *given, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Experiment, "end_training", stop)
        with pytest.raises(RuntimeError, match="the server is stopped"):
            start(run, nodes, state, resume=False, **told)
    pins = (tmp_path / "pins.toml").read_text()
    (tmp_path / "ward-0.pem").unlink()
    pinned_nodes(tmp_path, CLIENTS)  # a new key of ward-0, and pins with it
    assert (tmp_path / "pins.toml").read_text() != pins
    if not rotated:
        (tmp_path / "pins.toml").write_text(pins)
    if not server_pins:
        with pytest.raises(ProtocolError, match="says that it is client 'ward-0': its first key"):
            start(run, nodes, state, resume=True)
        told = {"forget_keys": ["ward-0"]}
    start(run, nodes, state, resume=True, **told)
    last = run.rounds()[-1]
    assert last["round"] == 3
    assert not last["skipped"]
    assert last["accumulated"] >= 3  # FedVS needs no more
    assert ("ward-0 (node" in caplog.text) == (not rotated)  # it is left out then
