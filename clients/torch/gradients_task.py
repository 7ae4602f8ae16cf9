"""Computes the gradients of a client's records together with those of other simulated clients."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from flwr_privacy.clients.node.batched_task import BatchedTask

from .computing import one_thread
from .record_gradients import Gradients, RecordGradients
from .stacked import ModelState, name_of, none_in_force

__all__ = ["GradientsTask"]

_ROUNDING = 1e-3  # share of the gradients by which those of several clients at once may differ


class GradientsTask(BatchedTask[Gradients]):
    """A batched task: the gradients of some records of a client.

    Parameters
    ----------
    model : nn.Module
        The client's model, which others may use while this one waits; `gradients` may be of a copy.
    gradients : RecordGradients
        Computes them.
    parameters : Mapping of str to Tensor
        Values of the trainable parameters; nobody else has them.
    take : callable
        Returns new copies of the records: features and labels, (B, ...).
    """

    def __init__(
        self,
        model: nn.Module,
        gradients: RecordGradients,
        parameters: Mapping[str, Tensor],
        take: Callable[[], tuple[Tensor, Tensor]],
    ) -> None:
        self._model, self._gradients = model, gradients
        self._parameters = parameters
        self._take = take
        self._records: tuple[Tensor, ...] = ()
        self._model_left: ModelState | None = None
        self._state: dict[str, Tensor] = {}

    def may_wait(self) -> bool:
        """Tell whether no mode of torch is active that would affect other clients too."""
        return none_in_force()

    def leave(self) -> None:
        """Copy the model's state, and the records."""
        self._model_left = ModelState(self._model)
        self._records = self._take()
        self.records = len(self._records[1])
        device = str(self._records[0].device)
        self.kind = ("gradients", name_of(self._gradients.loss), device, self._model_left.kind)
        state = self._gradients.state(self._parameters)
        self._state = {name: tensor.clone() for name, tensor in state.items()}
        # Copies of the state here and in the stack, sums in float64; others may have twice as many
        # records, to whose number these are filled up.
        records = sum(tensor.nbytes for tensor in self._records)
        self.nbytes = 6 * self._model_left.nbytes + 2 * (
            records + self.records * self._gradients.bytes_per_record
        )

    def alone(self) -> Gradients:
        """Compute the gradients; NaN for records for which the model or the loss raises."""
        self._come_back()
        with one_thread():
            return self._gradients.of_all(self._parameters, self._take)

    def fits(self, other: BatchedTask[Any]) -> bool:
        """Tell whether models, losses and the shapes of records are the same."""
        return (
            isinstance(other, GradientsTask)
            and self._model_left is not None
            and other._model_left is not None
            and self._model_left.computes_like(other._model_left)
            and self._gradients.same_parts(other._gradients)
            and other.records <= 2 * self.records <= 4 * other.records
            and self._looks() == other._looks()
        )

    def together(self, tasks: Sequence["GradientsTask"]) -> list[Gradients]:
        """Compute the gradients of all clients together."""
        features, labels = zip(*(task._records for task in tasks), strict=True)
        with one_thread():
            return self._gradients.of_clients([task._state for task in tasks], features, labels)

    def alike(self, done: Gradients) -> bool:
        """Compute the gradients alone; tell whether they are the same."""
        own = self.alone()
        pairs = [(tensor, done.whole[name]) for name, tensor in own.whole.items()]
        for name, outer in own.outer.items():
            pairs += zip(outer, done.outer[name], strict=True)
        known = [(_finite(a), _finite(b)) for a, b in pairs]
        return all(float((a - b).norm()) <= _ROUNDING * float(a.norm()) for a, b in known)

    def finish(self, done: Gradients) -> Gradients:
        """Return the gradients, and restore the model."""
        self._come_back()
        return done

    def _come_back(self) -> None:
        if self._model_left is not None:
            self._model_left.put_back()

    def _looks(self) -> list[Any]:
        return [(t.shape[1:], t.dtype, t.device) for t in self._records]


def _finite(rows: Tensor) -> Tensor:
    """Return tensors in float64, with 0 where they are not finite."""
    return rows.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
