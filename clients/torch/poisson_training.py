"""Trains on Poisson batches, on which a scheme's amplification by sampling rests."""

import logging
import math
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from flwr_privacy.clients.certificates.poisson_steps import (
    PoissonPlan,
    PoissonSteps,
    certify_steps,
    current_steps,
    poisson_batches,
)
from flwr_privacy.clients.certificates.request import agreed as agreed_plan
from flwr_privacy.clients.node.rehearsal import Generated, rehearse
from flwr_privacy.wire.message import TRAIN

from .computing import Loss
from .given_records import Labels, Records, given_records
from .gradient_descent.descent import descend
from .model_state import unchanged
from .released import check_model, model_digests
from .training import check_records

__all__ = ["train_poisson"]

logger = logging.getLogger("flwr.privacy")


def train_poisson(
    model: nn.Module,
    features: Records,
    labels: Labels = None,
    *,
    learning_rate: float,
    sampling_rate: float | None = None,
    steps: int | None = None,
    perturbation: float = 0.0,
    seed: int = 0,
    loss: Loss = functional.cross_entropy,
    device: str | None = None,
) -> PoissonSteps:
    """Do gradient descent in place on batches that take each record independently.

    A step is along the gradient of the batch's mean loss. A batch has ``sampling_rate`` times the
    number of records on average, and may have none: then the step moves nothing. Neither does one
    for which the model or the loss raises, or after which the loss or the weights are not finite;
    the node's log says how many were left out.

    Inside a scheme's round the scheme gives the sampling rate and the number of steps, draws the
    batches and gets what was done: call this once in ``train`` or ``fit``, on the arrays that came
    in, and return the arrays as they are afterwards. The scheme clips the update by itself.

    Parameters
    ----------
    model : nn.Module
        Takes a batch of features; it is moved to `device`.
    features : (n, ...) ndarray or Tensor, Dataset, or DataLoader
        Records. Each record of the data set is there once, whatever the round: records that are
        dropped, or chosen by a loader, before they come here are not seen by the certificate.
    labels : (n, ...) ndarray or Tensor, optional
        Their labels; integers of shape (n,) for the default loss. Not beside a Dataset or a
        DataLoader, whose records are pairs. The batch size and order of a DataLoader have no
        effect, which the log says once; one that leaves out or repeats records is refused.
    learning_rate : float
        Step size, >= 0.
    sampling_rate : float, optional
        Probability, above 0 and at most 1, with which a record is in a step. Required outside of a
        scheme's round.
    steps : int, optional
        Number of steps, at least 1. Required outside of a scheme's round.
    perturbation : float, default 0.0
        As for `train`.
    seed : int, default 0
        Seed of the perturbation alone.
    loss : callable, default cross entropy of logits
        From the model's output for a batch and its labels to their mean loss.
    device : str, optional
        By default `allotted_device`.

    Returns
    -------
    PoissonSteps
        What was done. A scheme around the training has got it already. There is no loss: it would
        tell of the records.

    Raises
    ------
    DataError
        If there are no records, or not one label per record.
    InvalidParameterError
        If a setting is missing, out of range or not what the scheme asks, or the model is not fit:
        it has batch normalisation or running statistics, no parameters to train, or types that
        NumPy lacks.
    ProtocolError
        If this is the second call in a scheme's round; the model has changed then.

    Guarantee
    ---------
    `PoissonSteps` has what is certified and what is not. It holds for every model and loss that
    keep nothing of the records in Python attributes from one round to another.
    What raises because memory or a GPU is lacking goes on to the caller.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr_privacy.clients.torch import initialise, mlp
    >>> model = initialise(lambda: mlp([4, 3]), 0)
    >>> features = np.ones((8, 4), np.float32)
    >>> labels = np.zeros(8, np.int64)
    >>> train_poisson(
    ...     model, features, labels, learning_rate=0.1, sampling_rate=0.25, steps=5
    ... )
    PoissonSteps(plan=PoissonPlan(sampling_rate=0.25, steps=5), records=8)
    """
    x, y = given_records(features, labels, TRAIN)

    descend_on = partial(
        descend,
        model,
        learning_rate=learning_rate,
        perturbation=perturbation,
        seed=seed,
        loss=loss,
        device=device,
    )

    def agreed() -> PoissonPlan:
        plan = agreed_plan(current_steps(), PoissonPlan, sampling_rate=sampling_rate, steps=steps)
        check_records(x, y)
        check_model(model)
        return plan

    def rehearsal(generated: Generated) -> None:
        expected = math.ceil(agreed().sampling_rate * len(y))
        made = generated(expected)
        with unchanged(model), torch.random.fork_rng(devices=[]):
            descend_on(*made, [torch.arange(expected)])

    rehearse(TRAIN, x, y, rehearsal)
    plan = agreed()
    before = model_digests(model)
    descent = descend_on(x, y, _batches(plan, len(y)), total=True)
    if descent.left_out:
        logger.warning(
            "train_poisson: %d of %d steps were left out: the model or the loss raises, or the "
            "step is not finite",
            descent.left_out,
            plan.steps,
        )
    after = model_digests(model)
    done = PoissonSteps(plan=plan, records=len(y), before=before, after=after)
    certify_steps(done)
    return done


def _batches(plan: PoissonPlan, records: int) -> Iterator[Tensor]:
    for places in poisson_batches(plan, records):
        yield torch.from_numpy(places.astype(np.int64))
