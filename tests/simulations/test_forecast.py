"""Trainings come out as was forecast before their first round."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.simulations.cli.commands import app

TREE = {"fanouts": "2,5", "p": 0.5, "unit": "device"}


@pytest.mark.parametrize(
    ("options", "verdict", "least", "most"),
    [
        ({"unit": "user", "epsilon": 500}, "the model can learn", 0.6, 1.0),
        ({"unit": "user", "epsilon": 8}, "expect chance accuracy", 0.0, 0.3),
        ({"unit": "record", "epsilon": 10}, "can learn where a client", 0.6, 1.0),
        ({"scheme": "central-dp"}, "expect chance accuracy", 0.0, 0.35),
        ({"scheme": "fedavg"}, "", 0.6, 1.0),
        ({"scheme": "m2fdp", **TREE, "epsilon": 500}, "the model can learn", 0.6, 1.0),
        ({"scheme": "m2fdp", **TREE, "epsilon": 8}, "expect chance accuracy", 0.0, 0.35),
        ({"scheme": "acfl", "epsilon": 10}, "can learn where a client", 0.6, 1.0),
    ],
    ids=[
        *("little noise", "drowned", "per record", "in shares", "none"),
        *("tree, little noise", "tree, drowned", "coded gradients"),
    ],
)
def test_a_training_comes_out_as_forecast(
    options: dict[str, Any], verdict: str, least: float, most: float, tmp_path: Path
) -> None:
    """On digits, by the command that docs/privacy.md names."""
    settings = {"scheme": "udp", **options}
    task = "digits-rff" if settings["scheme"] == "acfl" else "digits-linear"
    words = ["--scheme", settings.pop("scheme"), "--task", task, "--clients", "10"]
    words += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    fixed = ["--engine", "inline", "--rounds", "5", "--seed", "5", "--test-seed", "7"]
    out = tmp_path / "run"
    result = CliRunner().invoke(app, ["run", *words, *fixed, "--out", str(out)])
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    said = [line["forecast"] for line in lines if "forecast" in line]
    assert said == [lines[1]["forecast"]] if verdict else said == []
    assert least <= lines[-1]["server"]["accuracy"] <= most
    assert PrivacyCard.from_json((out / "privacy-card.json").read_text()).forecast == "".join(said)
    assert verdict in "".join(said)
    assert all(text in result.output for text in said)
