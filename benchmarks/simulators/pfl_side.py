"""pfl-research: federated averaging on its simulated backend; `torchrun` starts two of these.

It runs in an environment of its own, where this library is not installed.
"""

import os
from typing import Any

import torch
from pfl.aggregate.base import get_num_devices_weight_name
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm import FederatedAveraging, NNAlgorithmParams
from pfl.callback.base import TrainingProcessCallback
from pfl.common_types import Population
from pfl.data import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.internal.ops import get_ops
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.privacy import CentrallyAppliedPrivacyMechanism, GaussianMechanism
from simulated import work
from torch import Tensor, nn
from torch.nn import functional


class Perceptron(nn.Module):
    """A model as pfl-research wants it: with its loss and its metrics."""

    def __init__(self, size: str) -> None:
        super().__init__()
        self.layers = work.model_of(size)

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self(images), labels)

    @torch.no_grad()
    def metrics(self, images: Tensor, labels: Tensor) -> dict[str, Any]:
        return {"loss": Weighted(float(self.loss(images, labels)) * len(labels), len(labels))}


class RoundClock(TrainingProcessCallback):
    """Notes the end of each round."""

    def __init__(self, clock: work.Clock, cohort: int) -> None:
        self._clock, self._cohort = clock, cohort

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        devices = aggregate_metrics[get_num_devices_weight_name(Population.TRAIN)]
        if devices != self._cohort:
            raise RuntimeError(f"{devices} clients were trained")
        self._clock.round_ends(model.pytorch_model.layers.state_dict)
        return False, Metrics()


def main() -> None:
    """Train, and write down the seconds."""
    parser = work.parser()
    parser.add_argument("--sigma", type=float, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(1)

    task, data = work.TASKS[asked.size], work.Data(asked.data)
    own = (map(torch.from_numpy, data.of(client)) for client in range(task.clients))
    users = dict(enumerate(map(tuple, own)))
    dataset = FederatedDataset.from_slices(users, get_user_sampler("minimize_reuse", list(users)))
    postprocessors: list[Any] = [WeightByUser()]
    if asked.sigma:
        mechanism = GaussianMechanism(work.CLIPPING_NORM, asked.sigma)
        postprocessors.append(CentrallyAppliedPrivacyMechanism(mechanism))
    module = Perceptron(asked.size)
    model = PyTorchModel(
        model=module,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(module.parameters(), 1.0),
    )
    clock = work.Clock(asked.size, started=asked.started)
    FederatedAveraging().run(
        backend=SimulatedBackend(dataset, dataset, postprocessors),
        model=model,
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=asked.rounds,
            evaluation_frequency=asked.rounds,  # it evaluates in the first round, come what may
            train_cohort_size=task.cohort,
            val_cohort_size=0,
        ),
        model_train_params=NNTrainHyperParams(
            local_learning_rate=task.learning_rate,
            local_num_epochs=1,
            local_batch_size=task.batch,
        ),
        callbacks=[RoundClock(clock, task.cohort)],
        send_metrics_to_platform=False,  # which would print them
    )
    if get_ops().distributed.global_rank == 0:
        clock.write(asked.out, "pfl", data)
    # The end of the interpreter aborts now and then: threads of torch.distributed still run.
    torch.distributed.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
