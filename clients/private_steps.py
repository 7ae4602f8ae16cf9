"""UDP on the client where noise is in the steps of the user's own loop (DP-SGD)."""

from dataclasses import replace

from flwr_privacy.clients.certificates.private_steps import (
    PrivateStepsPlan,
    PrivateStepsRequest,
    asked_private_steps,
)
from flwr_privacy.clients.node.base import Train, Trained
from flwr_privacy.clients.node.generated import generated_like, undrawn
from flwr_privacy.clients.node.rehearsal import rehearsed
from flwr_privacy.pipeline.mechanism import Facts, Release
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.udp.private_steps import PrivatelyTrained, PrivateStepsTerms
from flwr_privacy.wire import fields as records
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.message import TRAIN, Fields

__all__ = ["release_of_steps", "terms_of"]


def terms_of(fields: Fields) -> PrivateStepsTerms:
    """Read the terms of private steps."""
    return records.read(PrivateStepsTerms, fields)


def release_of_steps(client: str, arrays: Arrays, fields: Fields, train: Train) -> Release:
    """Return the release of a training of private steps.

    Parameters
    ----------
    client : str
        Whose training it is.
    arrays, fields, train
        As of `flwr_privacy.clients.SchemeClient.release`.
    """
    terms = terms_of(fields)
    plan = PrivateStepsPlan(terms=terms, client=client)
    return Release(
        mechanism=terms,
        work=lambda random, facts: _private_steps(plan, arrays, train, facts, random),
        facts=lambda: _counted_private_steps(plan, arrays, train),
    )


def _private_steps(
    plan: PrivateStepsPlan, start: Arrays, train: Train, facts: Facts, random: SecureRandom
) -> PrivatelyTrained:
    """Have the user's loop take the private steps that were asked for, and nothing else."""
    with asked_private_steps(replace(plan, records=facts.records), random) as request:
        return _last_step(request, start, train(start))


def _counted_private_steps(plan: PrivateStepsPlan, start: Arrays, train: Train) -> Facts:
    """Rehearse the loop, to its end, on generated records and arrays that say nothing of data."""
    made, trained = generated_like(start), Trained({}, {})

    def work() -> None:
        nonlocal trained
        trained = train(made)

    with undrawn(), asked_private_steps(plan) as request:
        return Facts(records=rehearsed(TRAIN, work, lambda: _last_step(request, made, trained)))


def _last_step(request: PrivateStepsRequest, start: Arrays, trained: Trained) -> PrivatelyTrained:
    """Return the outcome of the user's loop, if it is the model of the last private step."""
    arrays = dict(trained.arrays)
    done = request.certificate
    done.check(start.values(), arrays.values())
    return PrivatelyTrained(arrays, done.records)
