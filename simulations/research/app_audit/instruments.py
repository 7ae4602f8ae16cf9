"""Looks into an app from inside its process: what its own functions return, what torch trains on.

Nothing of this is part of what a server sees. It is what the findings are compared with.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Context, Message
from numpy.typing import NDArray

from flwr_privacy.simulations.engines.inline.flower_internals import (
    ClientFunction,
    inside_of_mods,
    records_to_bytes,
)

from .transcript import Training

__all__ = ["Inside", "Replace", "watch"]

KEPT = 64
"""Records of a training that are kept."""

_LOSSES = (
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
)

Replace = Callable[[Message, Context, ClientFunction], Message]
"""Answers in place of the app's own function, which is its last argument."""


@dataclass
class _Batches:
    """The batches that a model was called with before a loss."""

    inputs: list[NDArray[Any]] = field(default_factory=list)
    labels: list[NDArray[Any]] = field(default_factory=list)
    digests: set[bytes] = field(default_factory=set)
    histogram: Counter[int] = field(default_factory=Counter)
    steps: int = 0

    @property
    def seen(self) -> Training | None:
        """What was seen; None for nothing."""
        if not self.steps:
            return None
        return Training(
            inputs=np.concatenate(self.inputs)[:KEPT] if self.inputs else np.zeros(0),
            labels=np.concatenate(self.labels)[:KEPT] if self.labels else np.zeros(0),
            histogram=dict(sorted(self.histogram.items())),
            records=len(self.digests),
            steps=self.steps,
        )

    def take(self, inputs: NDArray[Any], labels: NDArray[Any]) -> None:
        """Take a batch; labels are empty where they do not fit."""
        self.steps += 1
        same = not self.inputs or inputs.shape[1:] == self.inputs[0].shape[1:]
        new = []
        for place, row in enumerate(inputs):
            digest = _digest(row)
            if digest not in self.digests:
                self.digests.add(digest)
                new.append(place)
        if same and sum(map(len, self.inputs)) < KEPT:
            self.inputs.append(inputs[new])
            if len(labels) == len(inputs):
                self.labels.append(labels[new])
        if labels.ndim == 1 and np.issubdtype(labels.dtype, np.integer):
            self.histogram.update(labels.tolist())


@dataclass
class Inside:
    """What was seen inside of one answer.

    Parameters
    ----------
    requests, replies : list of bytes
        What the app's own functions were given and what they returned, in Flower's serialisation:
        mods may change the records.
    model : object, optional
        The torch module that was trained; the largest where there are several.
    hidden : bool
        Whether a module trained within torch's function transforms, which hide its batches.
    """

    requests: list[bytes] = field(default_factory=list)
    replies: list[bytes] = field(default_factory=list)
    model: Any = None
    hidden: bool = False
    _trained: _Batches = field(default_factory=_Batches)
    _evaluated: _Batches = field(default_factory=_Batches)
    _running: bool = False

    def clear(self) -> None:
        """Forget everything: another answer begins."""
        self.__dict__.update(vars(Inside()))

    @property
    def training(self) -> Training | None:
        """What torch trained on; None where it did not train."""
        return self._trained.seen

    @property
    def evaluated(self) -> Training | None:
        """What a model was called with before a loss, but not trained on; None for nothing."""
        return self._evaluated.seen

    def has(self, row: NDArray[Any]) -> bool:
        """Tell whether torch trained on a record, whatever its shape."""
        return _digest(row) in self._trained.digests

    def trains(self, model: Any) -> None:
        """Take a model that is called to be trained."""
        if self.model is None or _size(model) > _size(self.model):
            self.model = model

    def step(self, inputs: NDArray[Any], labels: NDArray[Any], trains: bool) -> None:
        """Take a batch that a model was trained on or not; labels are empty if they do not fit."""
        (self._trained if trains else self._evaluated).take(inputs, labels)


def watch(*, records: Callable[[], int | None], replace: Replace | None = None) -> Inside:
    """Begin to watch, before the app is imported; return what is seen.

    Parameters
    ----------
    records : callable
        Number of records that the client which trains now shall have; None for all of them.
    replace : callable, optional
        Answers in place of the app's own functions.
    """
    inside = Inside()

    def around(function: ClientFunction) -> ClientFunction:
        def watched(message: Message, context: Context) -> Message:
            inside.requests.append(records_to_bytes(message.content))
            with _running(inside):
                reply = (
                    function(message, context)
                    if replace is None
                    else replace(message, context, function)
                )
            if not reply.has_error():
                inside.replies.append(records_to_bytes(reply.content))
            return reply

        return watched

    inside_of_mods(around)
    _watch_torch(inside)
    _cut_data(inside, records)
    return inside


@contextmanager
def _running(inside: Inside) -> Iterator[None]:
    inside._running = True
    try:
        yield
    finally:
        inside._running = False


def _watch_torch(inside: Inside) -> None:
    """Note what outermost modules are called with, with gradients or not, and the labels."""
    import torch
    from torch.nn.modules import module as modules
    from torch.nn.modules.loss import _Loss

    depth = 0
    last: tuple[NDArray[Any], bool] | None = None

    def before(called: Any, args: Any) -> None:
        nonlocal depth, last
        depth += 1
        if depth != 1 or isinstance(called, _Loss):
            return
        trains = called.training and torch.is_grad_enabled()
        if not any(p.requires_grad or not trains for p in called.parameters()):
            return
        if trains:
            inside.trains(called)
        inside.hidden |= trains and any(map(_transformed, args))
        inputs = _plain(args[0]) if args else None
        if inputs is not None:
            last = inputs, trains

    def after(called: Any, args: Any, output: Any) -> None:
        nonlocal depth
        depth -= 1

    modules.register_module_forward_pre_hook(before)
    modules.register_module_forward_hook(after, always_call=True)
    functional: Any = torch.nn.functional

    def counting(loss: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal last
            if last is not None:
                given = args[1] if len(args) > 1 else kwargs.get("target")
                target = _plain(given)
                labels = np.zeros(0) if target is None else target
                inputs, trains = last
                fits = len(labels) == len(inputs)
                inside.step(inputs, labels if fits else np.zeros(0), trains)
                last = None
            return loss(*args, **kwargs)

        return counted

    for name in _LOSSES:
        setattr(functional, name, counting(getattr(functional, name)))


def _cut_data(inside: Inside, records: Callable[[], int | None]) -> None:
    """Have a client's DataLoader give the same few records in each epoch, where that is asked."""
    from torch.utils.data import DataLoader

    plain = DataLoader.__iter__
    first: dict[int, Any] = {}

    def cut(self: Any) -> Any:
        most = records() if inside._running else None
        if most is None:
            return plain(self)
        if id(self) not in first:
            first[id(self)] = (self, _first(next(iter(plain(self))), most))  # kept: ids come again
        return iter([first[id(self)][1]])

    DataLoader.__iter__ = cut  # type: ignore[method-assign]


def _first(batch: Any, most: int) -> Any:
    """Return the first records of a batch."""
    if isinstance(batch, dict):
        return {name: _first(part, most) for name, part in batch.items()}
    if isinstance(batch, list | tuple) and not (batch and isinstance(batch[0], str | int | float)):
        return type(batch)(_first(part, most) for part in batch)
    return batch[:most]


def _plain(value: Any) -> NDArray[Any] | None:
    """Return a tensor with records as an array; None for anything else, also inside of vmap."""
    import torch

    if not isinstance(value, torch.Tensor) or value.ndim == 0 or _transformed(value):
        return None
    found: NDArray[Any] = (
        value.detach().cpu().float().numpy()
        if value.is_floating_point()
        else (value.detach().cpu().numpy())
    )
    return found.copy()


def _transformed(value: Any) -> bool:
    """Tell whether it is a tensor inside of vmap or another function transform."""
    import torch

    return isinstance(value, torch.Tensor) and bool(
        torch._C._functorch.is_functorch_wrapped_tensor(value)
    )


def _digest(row: NDArray[Any]) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(row).tobytes()).digest()


def _size(model: Any) -> int:
    return sum(p.numel() for p in model.parameters())
