"""The steps of one private training: what a batch was, what came of it, and what was not ours."""

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flwr_privacy.clients.certificates.frozen_weights import current_frozen
from flwr_privacy.clients.certificates.private_steps import (
    PrivateSteps,
    PrivateStepsRequest,
    current_private_steps,
)
from flwr_privacy.clients.certificates.request import digests
from flwr_privacy.clients.node.rehearsal import Rehearsal, RehearsedError
from flwr_privacy.clients.torch.record_gradients import Gradients
from flwr_privacy.clients.torch.released import as_array, released_tensors
from flwr_privacy.errors import FlwrPrivacyError, InvalidParameterError, ProtocolError

from .optimizer_state import check_schedulers, same, same_state, state_copies
from .watched_functions import WatchedFunctions

if TYPE_CHECKING:
    from .record_hooks import RecordHooks

__all__ = ["PrivateLoop"]

_ALIKE = 1e-3  # relative; of one record's gradient in two batches
_NOTHING = 1e-3  # relative to the largest gradient by a parameter

REHEARSED = ([0, 1, 2, 3], [4, 2, 0, 5, 6, 1, 7, 3])
"""Generated records of the batches of a rehearsal, in turn.

Those of the first are in the second too, each at another place, beside others, before and after
others, and in a larger batch: whatever mixes records changes the gradient of one of them.
"""


class PrivateLoop:
    """One private training, from its first batch to its last step.

    Parameters
    ----------
    request : PrivateStepsRequest
        What the scheme asks.
    model : Module
        The model.
    optimizer : Optimizer
        The user's.
    hooks : RecordHooks
        Where the gradients of the records are.
    records : int
        Number of records of the data set.
    rehearsal : Rehearsal, optional
        Where the batches are generated, and no noise is drawn.
    """

    def __init__(
        self,
        request: PrivateStepsRequest,
        model: nn.Module,
        optimizer: Optimizer,
        hooks: "RecordHooks",
        *,
        records: int,
        rehearsal: Rehearsal | None,
    ) -> None:
        self._request, self._model, self._inner, self.hooks = request, model, optimizer, hooks
        self._records, self._rehearsal = records, rehearsal
        self._trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._rest = [t for t in released_tensors(model) if not t.requires_grad]
        self._before = digests(map(as_array, released_tensors(model)))
        self._kept_rest = [tensor.clone() for tensor in self._rest]
        self._weights, self._state = self._copies(), state_copies(self._inner)
        self._counted: NDArray[np.bool_] | None = None  # of the batch that waits for its step
        self._first: dict[int, dict[str, Tensor]] = {}  # gradients in the first rehearsed batch
        self._broken = False
        self._first_rates, self._new_rates = self._learning_rates(), False
        self.steps = request.plan.terms.steps
        if rehearsal is not None:
            self.steps = max(2, self.steps)  # the gradients of two batches are compared
        self.taken = 0
        self._stepping = False
        ours = weakref.ref(self)
        self._alone = register_optimizer_step_pre_hook(
            lambda other, *_: None if (loop := ours()) is None else loop.check_other(other)
        )
        weakref.finalize(self, self._alone.remove)  # also where the training fails

    @property
    def rehearsing(self) -> bool:
        """Whether this is a rehearsal."""
        return self._rehearsal is not None

    @property
    def over(self) -> bool:
        """Whether all steps are taken."""
        return self.taken >= self.steps

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Note what is refused in a rehearsal, and end it: the user's loop may catch errors."""
        try:
            yield
        except FlwrPrivacyError as error:
            if self._rehearsal is None:
                raise
            self._rehearsal.error = self._rehearsal.error or error
            raise RehearsedError("the rehearsal has found what is wrong") from error

    def check_stepped(self) -> None:
        """Check that the batch before had its step.

        Raises
        ------
        ProtocolError
            If it had not: which batches a loop leaves out would tell something of them.
        """
        self._check_whole()
        if self._counted is not None:
            raise ProtocolError(
                "a batch had no optimizer.step(): every batch of the loader needs one, also the "
                "last one"
            )

    @contextmanager
    def handed_out(self, counted: NDArray[np.bool_]) -> Iterator[None]:
        """Watch what the loop does with a batch, and note which of its records count."""
        self._counted = counted
        if self.rehearsing and self.taken < len(REHEARSED):
            # The gradient of a record is compared in two batches, so nothing may be left to chance.
            torch.manual_seed(0)
        with WatchedFunctions(len(counted), refused=self._refused, rehearsing=self.rehearsing):
            yield

    def _refused(self, error: FlwrPrivacyError) -> None:
        """Raise an error, after which the loop cannot go on, whatever it catches."""
        self._broken = True
        with self.telling():
            raise error

    def step(self) -> None:
        """Take a private step: clip, add up, noise, and have the user's optimiser go on with it.

        Raises
        ------
        ProtocolError
            If there is no batch of ours to take it on, no step is left, or the weights or the state
            of the user's optimiser are others than the step before made.
        InvalidParameterError
            In a rehearsal, if gradients are not those of single records.
        """
        if self.over:
            raise ProtocolError(f"all {self.steps} private steps were taken: no more are charged")
        self._check_whole()
        if self._counted is None:
            raise ProtocolError(
                "optimizer.step() without a batch: the loop has to take its batches from the "
                "loader that private_training returned, with one step for each"
            )
        self._broken = True  # until the step is done: a loop may catch what it raises, and go on
        self._take(self._counted)
        self._broken, self._counted = False, None

    def _take(self, counted: NDArray[np.bool_]) -> None:
        self._check_same()
        self._new_rates |= self._learning_rates() != self._first_rates
        if self.rehearsing:
            self._rehearse(len(counted))
        else:
            self._set_gradients(counted)
        if not (self.rehearsing and self.taken == 0):  # two batches with the same weights
            self._stepping = True
            try:
                self._inner.step()
            finally:
                self._stepping = False
        self.hooks.clear()
        self.taken += 1
        self._weights, self._state = self._copies(), state_copies(self._inner)
        if self.over:
            self._end()

    def check_other(self, optimizer: Any) -> None:
        """Refuse every step of an optimiser that is not a private one, as long as the loop goes on.

        What is learned beside it, such as a head of the client's own on top of the model, or by
        gradients without noise, comes back in the gradients of single records.

        Raises
        ------
        ProtocolError
            If it is one, in the training of this loop: other threads have trainings of their own.
        """
        if current_private_steps() is not self._request or (
            self._stepping and optimizer is self._inner
        ):
            return
        self._refused(
            ProtocolError(
                f"a step of a {type(optimizer).__name__} that is not private: within the loop only "
                "the optimizer that private_training returned learns"
            )
        )

    def _check_whole(self) -> None:
        """Refuse to go on after a step that failed: what fails may depend on a record."""
        if self._broken:
            raise ProtocolError("a step has failed: the training ends with it")

    def _set_gradients(self, counted: NDArray[np.bool_]) -> None:
        """Put the noised mean of the clipped gradients into the place of the gradients."""
        terms = self._request.plan.terms
        gradients = self.hooks.gradients(len(counted))
        scales = gradients.scales(dict.fromkeys(self._trainable, 1), terms.clipping_norm)
        scales[torch.from_numpy(~counted).to(scales.device)] = 0
        # In one piece of memory, from which the noise is added to all weights at once.
        whole = torch.zeros(
            sum(p.numel() for p in self._trainable.values()),
            dtype=torch.float64,
            device=scales.device,
        )
        parts = dict(zip(self._trainable, self._parts(whole), strict=True))
        gradients.add_to(parts, scales)
        noised = self._request.noised(whole.cpu().numpy(), self._records)
        with torch.no_grad():
            on_device = torch.from_numpy(noised).to(scales.device)
            for parameter, part in zip(
                self._trainable.values(), self._parts(on_device), strict=True
            ):
                parameter.grad = part.to(parameter.dtype)

    def _parts(self, whole: Tensor) -> list[Tensor]:
        """Return views of a vector in the shapes of the parameters."""
        sizes = [p.numel() for p in self._trainable.values()]
        pieces = torch.split(whole, sizes)
        return [v.view(p.shape) for v, p in zip(pieces, self._trainable.values(), strict=True)]

    def _rehearse(self, records: int) -> None:
        """Check that the gradients are those of the records, in two batches of generated ones."""
        if self.taken >= len(REHEARSED):
            self.hooks.gradients(records)
            return
        if (frozen := current_frozen()) is not None:
            # At the end they are looked at anyway. A loop that changes them fails before, and the
            # error would be of gradients that differ.
            frozen.check_unchanged()
        gradients = self.hooks.gradients(records, missing=True)
        self.hooks.check_complete(gradients, records)
        own = [self._gradient_of(gradients, place, records) for place in range(records)]
        if not self._first:
            self._first = dict(zip(REHEARSED[0], own, strict=True))
            return
        here = dict(zip(REHEARSED[1], own, strict=True))
        sizes = {n: max(float(g[n].norm()) for g in self._first.values()) for n in self._trainable}
        self._check_sizes(sizes)
        # Some gradients are nothing but rounding, such as that by the bias of an attention's keys.
        least = _NOTHING * max(sizes.values())
        for name, size in sizes.items():
            apart = [float((here[r][name] - own[name]).norm()) for r, own in self._first.items()]
            # Not "any is above": what is no number is never above.
            if not all(distance <= _ALIKE * max(size, least) for distance in apart):
                raise InvalidParameterError(
                    "loss_reduction",
                    self.hooks.loss_reduction,
                    "what the loss of a batch is, 'mean' or 'sum' of those of its records: the "
                    "gradient of a record must be the same whatever else is in its batch, and "
                    f"that by '{name}' is not. A mean with class weights and a layer that mixes "
                    "records are no such loss and model",
                )

    def _gradient_of(self, gradients: Gradients, place: int, records: int) -> dict[str, Tensor]:
        own = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in self._trainable.items()}
        alone = torch.zeros(records, dtype=torch.float64)
        alone[place] = 1
        gradients.add_to(own, alone.to(next(iter(own.values())).device))
        return own

    def _check_sizes(self, sizes: dict[str, float]) -> None:
        """Refuse generated records whose gradients say nothing about the loop."""
        silent = [name for name, size in sizes.items() if not 0 < size < math.inf]
        if silent:
            raise InvalidParameterError(
                "rehearsal_records",
                f"records whose gradients by {silent} are zero or not finite",
                "records on which the loop learns something, so that it can be checked; and "
                "requires_grad_(False) for what has no part in the loss",
            )

    def _check_same(self) -> None:
        """Refuse weights and moments that something else than a private step has changed."""
        changed = [
            name
            for (name, p), kept in zip(self._trainable.items(), self._weights, strict=True)
            if not same(p.detach(), kept)
        ]
        if changed:
            raise ProtocolError(
                f"{changed} changed between two private steps: what chooses weights, such as the "
                "best of some validation, may look at data"
            )
        # Moments go into all weights that follow, without noise of their own.
        if not same_state(state_copies(self._inner), self._state):
            raise ProtocolError(
                "the optimizer has a state from elsewhere: it must be what the private step before "
                "left, and nothing before the first one"
            )
        if [n for n, p in self._model.named_parameters() if p.requires_grad] != [*self._trainable]:
            raise ProtocolError("other parameters require a gradient than before the training")

    def _end(self) -> None:
        """Check what a loop may have left behind, and leave the certificate."""
        if self.rehearsing or self._new_rates:  # it takes a moment
            check_schedulers(self._inner)
        if not all(same(t, kept) for t, kept in zip(self._rest, self._kept_rest, strict=True)):
            raise ProtocolError("the training has changed frozen weights or buffers of the model")
        self.hooks.cleanup()
        self._alone.remove()
        self._request.add(
            PrivateSteps(
                plan=self._request.plan,
                records=self._records,
                before=self._before,
                after=digests(map(as_array, released_tensors(self._model))),
            )
        )

    def _learning_rates(self) -> list[float]:
        return [float(group.get("lr", 0.0)) for group in self._inner.param_groups]

    def _copies(self) -> list[Tensor]:
        return [p.detach().clone() for p in self._trainable.values()]
