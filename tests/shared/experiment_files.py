"""Small experiments, and runs of which a verdict is known."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flwr_privacy.simulations.research.experiments.claims import Claim
from flwr_privacy.simulations.research.experiments.curves import TrainedRun
from flwr_privacy.simulations.research.experiments.verdicts import check_claim
from flwr_privacy.simulations.runner.jobs import Engine

INLINE = Engine(name="inline")
STEPS = """
title = "Two step sizes"
paper = "A Paper"
figure = "Figure 1"
metrics = ["loss", "accuracy"]

[base]
task = "digits-mlp"
clients = 3
rounds = 3
train_records = 300
test_records = 100

[full]
rounds = 5
training.epochs = 2

[[target]]
accuracy = 0.6

[[curve]]
label = "Large step"
training.learning_rate = 0.3

[[curve]]
label = "Small step"
training.learning_rate = 1e-3
full.training.epochs = 4

[[claim]]
id = "S1"
text = "the larger step is better"
better = ["Large step", "Small step"]
"""


def trained(label: str, accuracies: Sequence[float], **more: Any) -> list[TrainedRun]:
    """Return runs of two rounds with these last accuracies; NaN for one that diverged."""
    runs = []
    for seed, last in enumerate(accuracies):
        broken = math.isnan(last)
        values = {
            "accuracy": [0.1, 0.5, last],
            "loss": [2.3, 1.0, 1.0 - last],
            "rounds": [0.0, 1.0, 2.0],
            "bits": [0.0, 8.0, 16.0],
            "uploads": [0.0, 10.0, 20.0],
        }
        values = {name: row[: 2 if broken else 3] for name, row in values.items()}
        model = more.get("models", {}).get(seed, Path())
        runs.append(TrainedRun(curve=label, seed=seed, values=values, diverged=broken, model=model))
    return runs


def verdict(runs: Sequence[TrainedRun], **table: Any) -> str:
    return check_claim(Claim.of({"id": "X", "text": "x", **table}), runs).verdict


A, B = [0.80, 0.81, 0.79, 0.80, 0.80], [0.70, 0.72, 0.70, 0.705, 0.70]
YES, NO, OPEN = "reproduced", "not reproduced", "undecided"
SWEEP = """
title = "Step sizes"
paper = "A Paper"
figure = "Figure 2"
metrics = ["loss", "rounds"]

[base]
task = "digits-linear"
clients = 3
train_records = 90
test_records = 60
training.batch_size = 16

[sweep]
key = "training.learning_rate"
label = "step"
scale = "log"
values = [0.001, 0.1, 1]
full = [0.001, 0.1]

[[curve]]
label = "Two rounds"
rounds = 2

[[curve]]
label = "Best"
search = { key = "rounds", values = [1, 2], full = [1, 2, 4] }

[[claim]]
id = "S1"
text = "a larger step is better"
ordered = ["Two rounds @ 0.1", "Two rounds @ 0.001"]
metric = "loss"
"""
