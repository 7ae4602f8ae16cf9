"""Every scheme and baseline of the command line trains inline and on Ray, as a user would run it.

The registry says which there are, so that a new one cannot be left out: where it has settings that
somebody must choose, it fails here until they stand in `CHOSEN`.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flwr_privacy.accounting import Charge
from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.simulations.app.server_app import initial_arrays
from flwr_privacy.simulations.runner.complete_settings import settings_of
from flwr_privacy.simulations.runner.jobs import Engine, carry_out
from flwr_privacy.simulations.settings.run_folder import RunFolder
from flwr_privacy.simulations.settings.schemes import SCHEMES

CLIENTS, ROUNDS = 3, 2
BUDGET = {"strategy.epsilon": 50.0}
TREE = {"fanouts": [1, CLIENTS], "steps": 2, **BUDGET}
CHOSEN: dict[str, dict[str, Any]] = {
    "udp": {"unit": "user", **BUDGET},
    "central-dp": BUDGET,
    "m2fdp": {"unit": "device", "p": 1.0, **TREE},
    "m2fdp-hfl": {"fanouts": [1, CLIENTS], "steps": 2},
    "m2fdp-hfl-dp": TREE,
    "m2fdp-pedpfl": {"steps": 2, **BUDGET},
}
CHARGED = {"udp", "central-dp", "m2fdp", "m2fdp-hfl-dp", "m2fdp-pedpfl", "acfl"}
"""Those whose clients pay for what they release."""
COUNTED = {"split-vafl": 1}
"""Answers in a round where they are not all clients': VAFL goes on with the first."""


def trained(name: str, folder: Path, engine: str) -> RunFolder:
    """Train a scheme as the command line does, on the smallest task that it can train."""
    scheme = SCHEMES[name]
    task = "digits-rows" if scheme.vertical else "digits-rff" if scheme.own_client else None
    values = {
        "scheme": name,
        "task": task or "digits-linear",
        "clients": CLIENTS,
        "rounds": ROUNDS,
        "train_records": 120,
        "test_records": 60,
        **CHOSEN.get(name, {}),
    }
    settings = settings_of(values)
    run = RunFolder.create(folder / name, settings, engine=engine, nodes=CLIENTS)
    carry_out([run], Engine(name=engine))
    return run


def check_trained(name: str, run: RunFolder) -> None:
    """Check what a run left: its model, who took part, its card, and the clients' ledgers."""
    begun = {key: array.numpy() for key, array in initial_arrays(run.settings).items()}
    with np.load(run.model_path) as archive:
        model = dict(archive)
    assert model.keys() == begun.keys()
    assert all(np.isfinite(array).all() for array in model.values())
    assert any((model[key] != begun[key]).any() for key in model)
    lines = run.rounds()[1:]
    assert [line["round"] for line in lines] == [1, 2]
    for line in lines:
        assert line["accumulated"] == COUNTED.get(name, CLIENTS)
        assert (line["skipped"], line["refused"]) == (False, {})
    card = PrivacyCard.from_json(run.card_path.read_text())
    card.verify()
    stated = card.charges()
    assert len(stated) == (CLIENTS if name in CHARGED else 0)
    ledgers = {path.stem: path for path in (run.path / "clients").rglob("*.ledger")}
    paid: dict[str, list[Charge]] = {
        client: [entry.charge for entry in Ledger(path, data_set=client).entries()]
        for client, path in ledgers.items()
    }
    assert {client: own for client, own in paid.items() if own} == stated


@pytest.mark.parametrize("name", SCHEMES)
def test_inline(name: str, tmp_path: Path) -> None:
    check_trained(name, trained(name, tmp_path, "inline"))


@pytest.mark.ray
@pytest.mark.parametrize("name", SCHEMES)
def test_on_ray(name: str, tmp_path: Path, one_ray_session: None) -> None:
    check_trained(name, trained(name, tmp_path, "ray"))
