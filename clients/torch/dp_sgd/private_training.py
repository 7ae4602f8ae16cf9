"""Makes a training loop of the user's own private: DP-SGD in the manner of Opacus."""

import math
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from flwr.app import Context
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from flwr_privacy.clients.certificates.private_steps import (
    PrivateStepsRequest,
    current_private_steps,
)
from flwr_privacy.clients.node.rehearsal import RehearsedError, going_on
from flwr_privacy.clients.torch.given_records import check_given, check_repeats
from flwr_privacy.clients.torch.released import check_model
from flwr_privacy.errors import (
    DataError,
    FlwrPrivacyError,
    InvalidParameterError,
    ProtocolError,
    check_choice,
)
from flwr_privacy.wire.identity import client_id_from
from flwr_privacy.wire.message import TRAIN

from .batches import POOL, PoissonSampler, generated_batch, poisson_loader
from .private_loop import REHEARSED, PrivateLoop
from .private_optimizer import PrivateOptimizer

__all__ = ["PrivateLoader", "private_training"]

_HOOKS = "_flwr_privacy_hooks"
"""Attribute of a model; the hooks of a training that failed are taken away by the next one."""


class PrivateLoader:
    """Poisson batches for a private training loop: one pass after the other, until all steps.

    Its length is that of a full pass, ``ceil(1 / sampling_rate)`` batches.

    Attributes
    ----------
    passes : int
        Passes that it takes, the last of which may be shorter.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        loop: PrivateLoop,
        request: Any,
        rehearsal_records: Dataset[Any] | None,
    ) -> None:
        self.dataset, self._rehearsal_records = loader.dataset, rehearsal_records
        self._given, self._loop = loader, loop
        size = len(loader.dataset)  # type: ignore[arg-type]
        self._sampler = PoissonSampler(lambda: request.draw(size), size)
        self._batches = poisson_loader(loader, self._sampler)
        terms = request.plan.terms
        self._length: int = math.ceil(1 / terms.sampling_rate)
        self.passes: int = -(-terms.steps // self._length)

    def __len__(self) -> int:
        """Return the number of batches of a full pass."""
        return self._length

    def __iter__(self) -> Iterator[Any]:
        loop = self._loop
        with loop.telling():
            loop.check_stepped()
        if loop.rehearsing:
            yield from self._generated()
        else:
            self._sampler.batches = min(len(self), loop.steps - loop.taken)
            self._sampler.counted.clear()
            for batch in self._batches if self._sampler.batches else ():
                loop.check_stepped()
                with loop.handed_out(self._sampler.counted.popleft()):
                    yield batch
        with loop.telling():
            loop.check_stepped()

    def _generated(self) -> Iterator[Any]:
        loop = self._loop
        # Two at least: see `PrivateLoop`.
        for _ in range(min(max(2, len(self)), loop.steps - loop.taken)):
            with loop.telling():
                loop.check_stepped()
                batch = self._made_up(rows := REHEARSED[loop.taken % len(REHEARSED)])
            with loop.handed_out(np.ones(len(rows), np.bool_)):
                yield batch

    def _made_up(self, rows: list[int]) -> Any:
        try:
            return generated_batch(self._given, rows, self._rehearsal_records)
        except InvalidParameterError as error:
            if self._rehearsal_records is not None:
                raise
            raise ProtocolError(str(error)) from error  # the form of a real record: it is charged


def private_training(
    model: nn.Module,
    optimizer: Optimizer,
    loader: DataLoader[Any],
    context: Context,
    *,
    loss_reduction: Literal["mean", "sum"] = "mean",
    rehearsal_records: Dataset[Any] | None = None,
) -> tuple[nn.Module, PrivateOptimizer, PrivateLoader]:
    """Make a training loop private: DP-SGD with the user's own loop, loss and optimiser.

    Call it first of all in ``train`` or ``fit``, once, on the model with the arrays that came in,
    and train with what it returns. Every batch gets a forward pass, ``loss.backward()`` and
    ``optimizer.step()``. The loader ends when all steps are taken that the server asks for
    (`flwr_privacy.strategies.DPSGD`); the loop must go on until then, over as many passes as it
    takes. Return the model's arrays as they are after the last step.

    Before the first charge of an experiment the loop is rehearsed: it gets small batches of
    generated records, and what does not fit in settings, model and loss is an error then, before it
    costs anything. What the loop itself does wrong costs the charge of the round on a deployed
    node, because it may depend on what it looked at.

    Parameters
    ----------
    model : Module
        The model, on its device. It stays the same object.
    optimizer : Optimizer
        Any that takes no closure, with all parameters that require a gradient, and without a state
        from another training.
    loader : DataLoader
        Has the client's records, each once. Its batch size and order have no effect, which the log
        says once; one that leaves out or repeats records is refused. ``num_workers`` and
        ``pin_memory`` are kept, and ``collate_fn`` gets each record alone: all must have one shape.
    context : Context
        Flower's context of the client whose training this is.
    loss_reduction : {"mean", "sum"}, default "mean"
        Whether the loss of a batch is the mean or the sum of the losses of its records.
    rehearsal_records : Dataset, optional
        At least 8 different records of the app's own making, the same for all clients, in the form
        that the loader's have. By default the rehearsal has numbers in [0, 1), and integers that
        are 0 or 1. If the loop fails on those, because it needs labels that sum to 1 or tokens
        of a kind, nothing is known of it, and it is refused: then give some. None may be a
        client's own.

    Returns
    -------
    model : Module
        The model that was given.
    optimizer : PrivateOptimizer
        For the loop, and for schedulers of learning rates.
    loader : PrivateLoader
        Poisson batches, of ``sampling_rate`` times the number of records on average, each filled up
        to a power of two with rows that count for nothing.

    Raises
    ------
    InvalidParameterError
        If the extra ``dp-sgd`` is not installed; the model has batch normalisation, running
        statistics or nothing to train, or Opacus does not take it; the optimiser lacks parameters,
        has frozen ones or a state; the loader chooses records; or the context is another client's.
        In a rehearsal also where gradients of single records are missing, say nothing, or depend on
        the rest of their batch; and at a mean with class weights or over several targets of each
        record.
    DataError
        If there are no records.
    ProtocolError
        If no scheme asks for private steps, or this is the second call in a round. Also what the
        returned objects raise: for a step without a batch or without gradients, a batch without a
        step, one step too many, weights that change between steps, targets that are ignored under
        a mean, steps of another optimiser, and for everything after a step that failed.

    Guarantee
    ---------
    See `flwr_privacy.udp.PrivateStepsTerms`; what is checked of the loop is in
    `flwr_privacy.clients.certificates.private_steps.PrivateSteps`.

    Examples
    --------
    A training of a Message-API app::

        model, optimizer, loader = private_training(model, optimizer, loader, context)
        for epoch in range(loader.passes):
            for features, labels in loader:
                optimizer.zero_grad()
                criterion(model(features), labels).backward()
                optimizer.step()
    """
    request = current_private_steps()
    if request is None:
        raise ProtocolError(
            "no scheme asks for private steps here: the strategy has to be UDP(privacy=DPSGD(...)),"
            " the client UDPClient, and private_training is called in the thread that it runs in"
        )
    dataset: Any = getattr(loader, "dataset", None)
    size = len(dataset) if hasattr(dataset, "__len__") else 0  # what has none is refused
    rehearsal = going_on(TRAIN, size)
    try:
        _check_made_up(rehearsal_records)
        loop = _begun(request, model, optimizer, loader, context, loss_reduction, rehearsal)
    except FlwrPrivacyError as error:
        if rehearsal is None:
            raise
        rehearsal.error = error
        raise RehearsedError("the rehearsal has found what is wrong") from error
    private = PrivateLoader(loader, loop, request, rehearsal_records)
    return model, PrivateOptimizer(optimizer, loop), private


def _begun(
    request: PrivateStepsRequest,
    model: nn.Module,
    optimizer: Optimizer,
    loader: Any,
    context: Context,
    loss_reduction: str,
    rehearsal: Any,
) -> PrivateLoop:
    """Check what is known before the first batch, and begin the training.

    Raises
    ------
    InvalidParameterError, DataError
        Of settings, model and the number of records: in a rehearsal it is told for nothing.
    ProtocolError
        Of what may follow from records: it is charged.
    """
    check_choice("loss_reduction", loss_reduction, ("mean", "sum"))
    asked = client_id_from(context.node_config)
    if asked != request.plan.client:
        raise InvalidParameterError("context", f"that of {asked}", f"that of {request.plan.client}")
    if not isinstance(loader, DataLoader):
        raise InvalidParameterError("loader", type(loader).__name__, "a DataLoader")
    check_given(loader)
    try:
        check_repeats(loader.dataset)
    except InvalidParameterError as error:  # places may follow the records: this is charged
        raise ProtocolError(str(error)) from error
    if not len(loader.dataset):  # type: ignore[arg-type]
        raise DataError("there are no records to train on")
    check_model(model)
    _check_optimizer(optimizer, model)
    request.begin()
    if (former := model.__dict__.pop(_HOOKS, None)) is not None:
        former.cleanup()
    hooks = model.__dict__[_HOOKS] = _hooks_of(model, loss_reduction)
    records = len(loader.dataset)  # type: ignore[arg-type]
    if request.plan.records is not None:
        records = request.plan.records
    return PrivateLoop(request, model, optimizer, hooks, records=records, rehearsal=rehearsal)


def _check_made_up(records: Any) -> None:
    if records is not None and not (hasattr(records, "__len__") and len(records) >= POOL):
        allowed = f"a Dataset of at least {POOL} records"
        raise InvalidParameterError("rehearsal_records", type(records).__name__, allowed)


def _hooks_of(model: nn.Module, loss_reduction: str) -> Any:
    try:
        from .record_hooks import RecordHooks  # late: Opacus is an extra
    except ImportError as error:
        raise InvalidParameterError(
            "private_training", str(error), "pip install 'flwr-privacy[dp-sgd]', which has Opacus"
        ) from error
    return RecordHooks(model, loss_reduction=loss_reduction)


def _check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Refuse an optimiser that has not all that is trained, or something else."""
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        allowed = "an optimizer of torch that takes no closure"
        raise InvalidParameterError("optimizer", type(optimizer).__name__, allowed)
    if isinstance(optimizer, PrivateOptimizer):
        raise InvalidParameterError("optimizer", "one of private_training", "the app's own")
    has = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named = dict(model.named_parameters())
    trained = {name for name, p in named.items() if p.requires_grad}
    unseen = sorted(name for name in trained if id(named[name]) not in has)
    if unseen:
        allowed = "an optimizer of all parameters that require a gradient"
        raise InvalidParameterError("optimizer", f"one that never saw {unseen}", allowed)
    frozen = sorted(n for n, p in named.items() if id(p) in has and not p.requires_grad)
    if frozen:
        allowed = "one of parameters that require a gradient: requires_grad_() sets it"
        raise InvalidParameterError("optimizer", f"one of {frozen}, which are frozen", allowed)
    if len(has) > len({id(p) for p in named.values()} & has):
        raise InvalidParameterError("optimizer", "one of other models' parameters", "this model's")
    if any(optimizer.state.values()):
        raise InvalidParameterError(
            "optimizer",
            "one with a state",
            "a new one: its moments may be of gradients without noise",
        )
