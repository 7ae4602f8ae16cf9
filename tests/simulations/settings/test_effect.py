"""What is set and has no effect is refused: the table of effects agrees with what runs do."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Command

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.app import client_app
from flwr_privacy.simulations.app.server_app import app
from flwr_privacy.simulations.engines.inline import run_inline
from flwr_privacy.simulations.runner.complete_settings import settings_of
from flwr_privacy.simulations.settings.effect import changed, check_effect, without_effect
from flwr_privacy.simulations.settings.run_folder import RunFolder
from flwr_privacy.simulations.settings.run_settings import (
    PartitionSettings,
    Settings,
    TrainingSettings,
)
from flwr_privacy.simulations.settings.schemes import SCHEMES
from flwr_privacy.simulations.tasks.partition import partition

TRAINED = [f"training.{entry.name}" for entry in fields(TrainingSettings)]
TREE = {"fanouts": "2,2"}
OWN: dict[str, dict[str, Any]] = {
    "udp, user": {"unit": "user"},
    "udp, record": {"unit": "record"},
    "udp, dp-sgd": {"unit": "dp-sgd", "sampling_rate": 0.2, "steps": 5},
    "m2fdp, device": {"unit": "device", "p": 0.5, **TREE},
    "m2fdp, record": {"unit": "record", "sampling_rate": 0.5, "p": 0.5, **TREE},
    "m2fdp, none": {"unit": "none", "p": 0.5, **TREE},
    "m2fdp-hfl": TREE,
    "m2fdp-hfl-dp": TREE,
    "acfl, own step": {"learning_rate": 1e-3},
    "fedvs, own steps": {"learning_rate": 0.1, "batch_size": 16},
}
"""Parameters of the schemes that need some, or train differently with some."""

CASES = [*(name for name in SCHEMES if name not in ("udp", "m2fdp")), *(set(OWN) - set(SCHEMES))]


def values_of(case: str) -> dict[str, Any]:
    """Return the settings of a short run."""
    name = case.partition(",")[0]
    chosen = SCHEMES[name]
    task = "digits-rff" if chosen.own_client else "digits-linear"
    if chosen.vertical:
        task = "digits-rows"
    return {"scheme": name, "task": task, "clients": 4, "rounds": 2, **OWN.get(case, {})}


@dataclass(frozen=True, kw_only=True)
class Watched(TrainingSettings):
    """Settings that note which of them are read."""

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_"):
            READ.add(f"training.{name}")
        return super().__getattribute__(name)


READ: set[str] = set()


def watched(settings: Settings) -> Settings:
    """Return settings that note what is read of the training, but not what is read to make them."""
    before = set(READ)
    settings = replace(settings, training=Watched(**asdict(settings.training)))
    READ.clear()
    READ.update(before)
    return settings


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Note which settings of the training both halves of the app read."""
    whole = Settings.from_toml
    client_app._parsed.cache_clear()
    monkeypatch.setattr(Settings, "from_toml", lambda text: watched(whole(text)))
    READ.clear()
    yield READ
    client_app._parsed.cache_clear()


@pytest.mark.parametrize("case", sorted(CASES))
def test_a_run_reads_what_has_an_effect_and_nothing_else(
    case: str, reads: set[str], tmp_path: Path
) -> None:
    settings = settings_of(values_of(case))
    idle = without_effect(settings)
    run = RunFolder.create(tmp_path / "r", settings, engine="inline", nodes=4, test_seed=0)
    (run.path / "clients").mkdir()
    run_inline(
        app,
        "flwr_privacy.simulations.app.client_app:app",
        nodes=4,
        run_config=run.app_config(resume=False, accept_lost_rounds=False),
        state=run.path / "clients",
        insecure_seed=0,
    )
    assert {key for key in TRAINED if key in reads} == {key for key in TRAINED if key not in idle}


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "shards", "labels", "label-sets"])
def test_a_split_follows_what_has_an_effect_and_nothing_else(kind: str) -> None:
    labels = np.arange(400) % 8
    usual = PartitionSettings(kind=kind)
    idle = without_effect(Settings(partition=usual))

    def split(**changes: Any) -> list[list[int]]:
        chosen = replace(usual, **changes)
        parts = partition(labels, clients=4, settings=chosen, seed=0)
        return [part.tolist() for part in parts]

    for name, value in {"alpha": 0.1, "shards": 4, "labels": 3}.items():
        differs = split(**{name: value}) != split()
        assert differs == (f"partition.{name}" not in idle), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--scheme", "udp", "--set", "unit=record", "--set", "training.learning_rate=0.05"),
            "training.learning_rate = 0.05: expected nothing under 'udp' with unit=record, which "
            "makes the clients' steps itself: set learning_rate (without 'training.')",
        ),
        (
            ("--scheme", "udp", "--set", "unit=record", "--set", "training={epochs=1}"),
            "training.epochs = 1: expected nothing under 'udp' with unit=record",
        ),
        (
            ("--scheme", "m2fdp-hfl", "--set", "fanouts=2,2", "--set", "training.epochs=2"),
            "training.epochs = 2: expected nothing under 'm2fdp-hfl': set steps",
        ),
        (
            ("--set", "partition.alpha=0.5"),
            "partition.alpha = 0.5: expected nothing with partition.kind 'iid', which does not use "
            "it: it is for partition.kind=dirichlet",
        ),
        (
            ("--partition", "labels", "--set", "partition.shards=3"),
            "partition.shards = 3: expected nothing with partition.kind 'labels'",
        ),
        (("--set", "validation_records=50"), "validation_records = 50: expected nothing under"),
        (
            ("--set", "stragglers.slowdown=3"),
            "stragglers.slowdown = 3: expected nothing without stragglers.slow_fraction above 0",
        ),
        (
            ("--scheme", "msp", "--set", "fraction_evaluate=0.5"),
            "fraction_evaluate = 0.5: expected 0: the clients of 'msp' evaluate nothing",
        ),
        (
            ("--scheme", "fedvs", "--task", "digits-rows", "--partition", "iid"),
            "partition.kind = 'iid': expected nothing with 'digits-rows'",
        ),
        (
            ("--scheme", "acfl", "--task", "digits-rff", "--set", "training.batch_size=8"),
            "training.batch_size = 8: expected nothing under 'acfl': set batch_fraction",
        ),
    ],
)
def test_what_is_set_without_an_effect_is_refused(
    command: Command, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = command("run", "--engine", "inline", "--clients", "4", *arguments)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not done.stdout
    assert not list(tmp_path.iterdir())


def test_flwr_run_refuses_it_too(tmp_path: Path) -> None:
    text = 'scheme = "udp"\n[strategy]\nunit = "record"\n[training]\nepochs = 1\n'
    config = {"settings": text, "run-dir": "", "resume": False}
    with pytest.raises(InvalidParameterError, match=r"training\.epochs = 1: expected nothing"):
        run_inline(app, client_app.app, nodes=1, run_config=config)


def test_a_run_folder_does_not_keep_what_has_no_effect(tmp_path: Path) -> None:
    settings = Settings(scheme="udp", strategy={"unit": "record"})
    run = RunFolder.create(tmp_path / "r", settings, engine="inline", nodes=4)
    text = run.settings_path.read_text()
    assert not any(word in text for word in ("epochs", "batch_size", "alpha", "shards"))
    assert run.settings == settings
    check_effect(run.settings, changed(run.settings, Settings(seed=1)))
