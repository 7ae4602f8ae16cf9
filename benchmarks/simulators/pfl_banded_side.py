"""pfl-research: a training with its banded matrix factorisation, in an environment of its own."""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm import FederatedAveraging, NNAlgorithmParams
from pfl.callback.base import TrainingProcessCallback
from pfl.data import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.privacy import CentrallyAppliedPrivacyMechanism
from pfl.privacy.ftrl_mechanism import BandedMatrixFactorizationMechanism
from pfl.privacy.privacy_accountant import PLDPrivacyAccountant
from torch import Tensor, nn
from torch.nn import functional


class Classifier(nn.Module):
    """A model as pfl-research wants it: with its loss and its metrics."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, features: Tensor) -> Tensor:
        return self.layers(features)

    def loss(self, features: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self(features), labels)

    @torch.no_grad()
    def metrics(self, features: Tensor, labels: Tensor) -> dict[str, Any]:
        return {"loss": Weighted(float(self.loss(features, labels)) * len(labels), len(labels))}


class RoundClock(TrainingProcessCallback):
    """Notes the end of each round."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.ends.append(time.perf_counter())
        return False, Metrics()


def main() -> None:
    """Train, and write down what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--asked", required=True)
    told = parser.parse_args()
    asked = json.loads(told.asked)
    torch.set_num_threads(1)
    # pfl reads how cohorts are drawn from NumPy's global generator.
    np.random.seed(asked["seed"])  # noqa: NPY002
    torch.manual_seed(asked["seed"])
    data = np.load(told.data)
    users = {
        client: [
            torch.from_numpy(data[name][data["holders"] == client])
            for name in ("features", "labels")
        ]
        for client in range(asked["clients"])
    }
    dataset = FederatedDataset.from_slices(users, get_user_sampler("minimize_reuse", list(users)))
    weights = [torch.from_numpy(data[name]) for name in sorted(data) if name.startswith("model")]
    layers: list[nn.Module] = []
    for weight, bias in zip(weights[::2], weights[1::2], strict=True):
        linear = nn.Linear(weight.shape[1], weight.shape[0])
        linear.load_state_dict({"weight": weight, "bias": bias})
        layers += [linear, nn.ReLU()]
    module = Classifier(nn.Sequential(*layers[:-1]))
    model = PyTorchModel(
        model=module,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(module.parameters(), 1.0),
    )
    os.chdir(Path(told.out).parent)  # where the mechanism writes its factor
    mechanism = BandedMatrixFactorizationMechanism(
        asked["clipping_norm"],
        asked["rounds"],
        asked["separation"],
        lambda times: PLDPrivacyAccountant(
            times, 1.0, "gaussian", epsilon=asked["epsilon"], delta=asked["delta"]
        ),
    )
    clock = RoundClock()
    FederatedAveraging().run(
        backend=SimulatedBackend(
            dataset, dataset, [WeightByUser(), CentrallyAppliedPrivacyMechanism(mechanism)]
        ),
        model=model,
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=asked["rounds"],
            evaluation_frequency=asked["rounds"],
            train_cohort_size=asked["cohort"],
            val_cohort_size=0,
        ),
        model_train_params=NNTrainHyperParams(
            local_learning_rate=asked["learning_rate"],
            local_num_epochs=asked["epochs"],
            local_batch_size=asked["batch_size"],
        ),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    with torch.no_grad():
        guessed = module(torch.from_numpy(data["test_features"])).argmax(1).numpy()
    report = {
        "accuracy": float((guessed == data["test_labels"]).mean()),
        "seconds": np.diff(clock.ends).tolist(),
        "multiplier": mechanism._relative_noise_stddev,
        "factor": mechanism.query_matrix.tolist(),
    }
    Path(told.out).write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main()
