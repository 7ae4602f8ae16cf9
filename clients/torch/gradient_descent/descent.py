"""Stochastic gradient descent on a client's model, alone or in a batch with other clients'.

The models of several clients are stacked, one more axis in front of each parameter, and each step
is one call of `torch.func.vmap` for all whose batches have equally many records. It computes what
each client would compute by itself, up to rounding.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from flwr_privacy.clients.node.batched_task import BatchedTask
from flwr_privacy.errors import check_number
from flwr_privacy.wire.identity import derive_seed

from ..computing import Loss, allotted_device, one_thread, raise_resource_error
from ..stacked import ModelState, filled, name_of, none_in_force, same_loss, stack_of
from ..trainable import note_step
from .written_out import WrittenOut

__all__ = ["Descent"]

_ROUNDING = 1e-2
"""Share of the way that the weights go by which rounding may take them elsewhere.

Two orders of sums differ by about 1e-7 in a step, and steps can make more of it; what this is to
find, such as a loss of which one part has no effect, differs by more.
"""

Done = tuple[dict[str, Tensor], float, int]
"""The parameters and buffers of a client by name, its mean loss, and the steps left out."""


class Descent(BatchedTask[float]):
    """A step on each batch, in place; the result is the mean loss per record.

    The parameters are those of `flwr_privacy.clients.torch.train`; the batches are places of
    records, and an empty one moves nothing. Where it is `total`, a step that raises, or whose loss
    or weights are not finite, moves nothing either.
    """

    def __init__(
        self,
        model: nn.Module,
        features: NDArray[Any],
        labels: NDArray[Any],
        batches: Iterable[Tensor],
        *,
        learning_rate: float,
        perturbation: float,
        seed: int,
        loss: Loss,
        device: str | None,
        total: bool = False,
    ) -> None:
        check_number("learning_rate", learning_rate, minimum=0)
        check_number("perturbation", perturbation, minimum=0)
        self._device = device or allotted_device()
        self._model = model.to(self._device).train()
        note_step(p for p in model.parameters() if p.requires_grad)
        self._features, self._labels = features, labels
        self._batches = batches
        self._learning_rate, self._perturbation = learning_rate, perturbation
        self._seed = seed
        self._loss = loss
        self._total = total
        self.left_out = 0
        """How many steps were left out, if this one was done alone or has finished."""
        self._state: ModelState | None = None
        self._tensors: tuple[Tensor, Tensor] | None = None

    def alone(self) -> float:
        """Run the steps for this client alone."""
        if self._state is not None:
            self._state.put_back()
        inputs, targets = self._tensors or self._copied()
        # By hand, because the first torch.optim.SGD of a process takes over a second to import.
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        for parameter in parameters:
            parameter.grad = None  # of other work on the model
        last_layer = _last_layer(self._model) if self._perturbation else {}
        noise = torch.Generator().manual_seed(derive_seed(self._seed, "perturbation"))
        written = None
        if not self._perturbation:
            written = WrittenOut.of(self._model, self._loss, inputs, targets)
        total, seen = torch.zeros((), device=self._device), 0
        self.left_out = 0

        def backward(batch: Tensor) -> Tensor:
            if written is not None:
                return written.backward(inputs[batch], targets[batch])
            value = self._loss(self._model(inputs[batch]), targets[batch])
            objective = value
            if self._perturbation:
                moved = {
                    name: p + self._perturbation * torch.randn(p.shape, generator=noise).to(p)
                    for name, p in last_layer.items()
                }
                outputs = functional_call(self._model, moved, (inputs[batch],))
                objective = value + self._loss(outputs, targets[batch])
            objective.backward()  # type: ignore[no-untyped-call]
            return value.detach()

        def step(batch: Tensor) -> Tensor | None:
            if written is not None and not self._total:
                return written.step(inputs[batch], targets[batch], self._learning_rate)
            value = self._tried(backward, batch) if self._total else backward(batch)
            with torch.no_grad():
                for parameter in parameters:
                    if value is not None and parameter.grad is not None:
                        parameter.add_(parameter.grad, alpha=-self._learning_rate)
                    parameter.grad = None
            return value

        with one_thread():
            for places in self._batches:
                if len(places) == 0:
                    continue
                value = step(places.to(self._device))
                if value is None:
                    self.left_out += 1
                    continue
                total.add_(value, alpha=len(places))
                seen += len(places)
        return float(total) / seen if seen else 0.0

    def _tried(self, backward: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor | None:
        """Return the loss of a batch; None if it raises or the step is not finite."""
        try:
            value = backward(batch)
        # The model and the loss are the user's, and any error may be that of a record.
        except Exception as error:  # noqa: BLE001
            raise_resource_error(error)
            return None
        with torch.no_grad():
            ends = [
                torch.add(p, p.grad, alpha=-self._learning_rate)
                for p in self._model.parameters()
                if p.requires_grad and p.grad is not None
            ]
        return value if all(map(_all_finite, (value, *ends))) else None

    def may_wait(self) -> bool:
        """Tell whether no mode of torch is active that would affect other clients too."""
        return none_in_force()

    def leave(self) -> None:
        """Copy the model's state, and the records."""
        self._state = ModelState(self._model)
        self._tensors = self._copied()
        self._batches = list(self._batches)
        weights = sum(t.nbytes for t in self._state.trainable.values())
        # Its own copies, those in the stack, and gradients.
        self.nbytes = 2 * (self._state.nbytes + sum(t.nbytes for t in self._tensors)) + 2 * weights
        self.records = sum(map(len, self._batches))
        self.kind = ("descent", name_of(self._loss), self._device, self._state.kind)

    def fits(self, other: BatchedTask[Any]) -> bool:
        """Tell whether models, losses and step sizes are the same, and nothing is perturbed."""
        return (
            isinstance(other, Descent)
            and self._left()[0].computes_like(other._left()[0])
            and same_loss(self._loss, other._loss)
            and self._learning_rate == other._learning_rate
            and self._total == other._total
            and self._device == other._device
            and self._looks() == other._looks()
            and not self._perturbation
            and not other._perturbation
        )

    def together(self, tasks: Sequence["Descent"]) -> list[Done]:
        """Run the steps of all clients together."""
        states, tensors = zip(*(task._left() for task in tasks), strict=True)
        weights = stack_of([state.trainable for state in states])
        fixed = stack_of([state.fixed for state in states])
        inputs, targets = (torch.cat(parts) for parts in zip(*tensors, strict=True))
        firsts = torch.tensor([0] + [len(targets) for _, targets in tensors]).cumsum(0)
        batches = [list(task._batches) for task in tasks]
        totals, seen = torch.zeros(len(tasks), device=self._device), torch.zeros(len(tasks))
        left_out = torch.zeros(len(tasks), dtype=torch.int64)

        def mean_loss(
            own: dict[str, Tensor], others: dict[str, Tensor], batch: Tensor, classes: Tensor
        ) -> Tensor:
            return self._loss(functional_call(self._model, {**others, **own}, (batch,)), classes)

        step = vmap(grad_and_value(mean_loss), randomness="error")
        self._model.train()
        with one_thread(), torch.no_grad():
            for number in range(max(map(len, batches))):
                for clients in _of_equal_length(batches, number):
                    places = torch.stack([batches[c][number] + firsts[c] for c in clients])
                    rows = _rows(clients, len(tasks))
                    own = {name: w[rows] for name, w in weights.items()}
                    others = {name: t[rows] for name, t in fixed.items()}
                    where = places.to(self._device)
                    gradients, values = step(own, others, inputs[where], targets[where])
                    fine = torch.ones(len(clients), dtype=torch.bool)
                    if self._total:
                        fine = self._finite(own, gradients, values)
                        left_out[rows] += (~fine).cpu()
                        gradients = {name: filled(g, ~fine, 0) for name, g in gradients.items()}
                        values, fine = filled(values, ~fine, 0), fine.cpu()
                    for name, gradient in gradients.items():
                        own[name].add_(gradient, alpha=-self._learning_rate)
                    if not isinstance(rows, slice):  # they are copies then
                        for whole, part in ((weights, own), (fixed, others)):
                            for name, tensor in part.items():
                                whole[name][rows] = tensor
                    totals[rows] += values * places.shape[1]
                    seen[rows] += places.shape[1] * fine
        means = [t / max(n, 1) for t, n in zip(totals.tolist(), seen.tolist(), strict=True)]
        trained = weights | fixed  # with statistics of batch normalisation among them
        return [
            ({name: tensor[place] for name, tensor in trained.items()}, mean, int(left_out[place]))
            for place, mean in enumerate(means)
        ]

    def _finite(
        self, weights: dict[str, Tensor], gradients: dict[str, Tensor], values: Tensor
    ) -> Tensor:
        """Tell for each client whether its loss, and its weights after a step, are finite."""
        fine = values.isfinite()
        for name, gradient in gradients.items():
            ends = weights[name].add(gradient, alpha=-self._learning_rate)
            fine &= ends.reshape(len(fine), -1).isfinite().all(dim=1)
        return fine

    def alike(self, done: Done) -> bool:
        """Train alone; tell whether weights, buffers and loss are the same."""
        trained, mean, _ = done
        state, _ = self._left()
        own = self.alone()
        now, start = state.now(), {**state.trainable, **state.fixed}
        apart = sum(float((now[name] - t).double().square().sum()) for name, t in trained.items())
        moved = sum(float((now[name] - t).double().square().sum()) for name, t in start.items())
        return apart <= _ROUNDING**2 * moved and abs(mean - own) <= _ROUNDING * (1 + abs(own))

    def finish(self, done: Done) -> float:
        """Put the trained parameters into the client's model."""
        trained, mean, self.left_out = done
        state, _ = self._left()
        state.put_back(trained)
        return mean

    def _left(self) -> tuple[ModelState, tuple[Tensor, Tensor]]:
        if self._state is None or self._tensors is None:
            raise RuntimeError("nothing was left")
        return self._state, self._tensors

    def _looks(self) -> list[Any]:
        return [(tensor.shape[1:], tensor.dtype) for tensor in self._left()[1]]

    def _copied(self) -> tuple[Tensor, Tensor]:
        inputs = torch.tensor(self._features, device=self._device)
        return inputs, torch.tensor(self._labels, device=self._device)


def _of_equal_length(batches: Sequence[Sequence[Tensor]], number: int) -> list[list[int]]:
    """Return who has a batch of this number that is not empty, in groups of equal lengths."""
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for client, own in enumerate(batches):
        if number < len(own) and len(own[number]):
            groups[len(own[number])].append(client)
    return list(groups.values())


def _all_finite(tensor: Tensor) -> bool:
    # Many times faster than `isfinite` of each number; NaN is both the least and the largest.
    return not tensor.numel() or all(bool(end.isfinite()) for end in torch.aminmax(tensor))


def _rows(clients: list[int], count: int) -> slice | list[int]:
    """Return the rows of some clients, as a slice (a view) where they are all."""
    return slice(None) if len(clients) == count else clients


def _last_layer(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters to train of the last module that has some of its own."""
    layers = [
        {name: p for name, p in module.named_parameters(prefix, recurse=False) if p.requires_grad}
        for prefix, module in model.named_modules()
    ]
    return next((layer for layer in reversed(layers) if layer), {})
