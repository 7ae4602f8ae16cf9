"""Faults in the trainings of anybody's strategy and client, as a check of a test.

It fails with an `AssertionError` that says what is wrong.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flwr.clientapp import ClientApp
from numpy.typing import NDArray

from flwr_privacy.clients import SchemeClient
from flwr_privacy.errors import InvalidParameterError, check_choice
from flwr_privacy.simulations.reliability.federations import (
    CLIENTS,
    FEDERATIONS,
    SmallFederation,
    Spot,
)
from flwr_privacy.simulations.reliability.grid import FAULTS
from flwr_privacy.simulations.reliability.matrix import DEFECT, Cell, clean_training, matrix
from flwr_privacy.simulations.reliability.training import Outcome, strike_at, train
from flwr_privacy.strategies import SchemeStrategy
from flwr_privacy.wire.message import TRAIN

from .apps import twins
from .virtual_time import no_flushing, virtual_time

__all__ = ["REPLIES", "faults_of"]

REPLIES = (
    "lost request",
    "drop",
    "late",
    "duplicate",
    "stale",
    "corrupt",
    "nan",
    "infinity",
    "reshape",
    "server killed",
)
"""The faults that are tried by default: replies that are missing, late, double or damaged."""


def faults_of(
    subject: type[SchemeStrategy] | SmallFederation,
    client: type[SchemeClient] | None = None,
    *,
    faults: Sequence[str] = REPLIES,
    options: Mapping[str, Any] | None = None,
    app: Callable[[type[SchemeClient]], ClientApp] | None = None,
    start: Callable[[], dict[str, NDArray[Any]]] | None = None,
    each_counts: bool = True,
) -> list[Cell]:
    """Train with each fault in each phase, and return what came of each.

    Parameters
    ----------
    subject : type or SmallFederation
        A strategy, as a subclass of one of this package, with its client half. For any other scheme
        a `flwr_privacy.simulations.reliability.federations.SmallFederation`, alone.
    client : type, optional
        The client half of a strategy.
    faults : sequence of str, optional
        Keys of `flwr_privacy.simulations.reliability.grid.FAULTS`; `REPLIES` by default.
    options : Mapping, optional
        Parameters of the strategy; those of its options by their own names.
    app : callable, optional
        Returns the app of a client half: a small one by default. It must train the same each time.
    start : callable, optional
        Returns the model to start from, by the names of its arrays.
    each_counts : bool, default True
        Whether each answer changes the model. Of subclasses it need not where that is so for their
        scheme (FedVS goes on with some of the answers).

    Raises
    ------
    AssertionError
        If there is a defect: a reply that is lost, counted twice or used although it is damaged, an
        answer without its charge, a model that nobody can explain.
    InvalidParameterError
        If a parameter is not allowed.
    """
    __tracebackhide__ = True
    for fault in faults:
        check_choice("faults", fault, FAULTS)
    federation, model = _federation(subject, client)
    if isinstance(subject, SmallFederation):
        for name, value in (("app", app), ("start", start), ("options", options)):
            if value is not None:
                raise InvalidParameterError(name, value, "nothing beside a federation")
    federation = replace(
        federation,
        options={**federation.options, **(options or {})},
        app=app or federation.app,
        start=start or federation.start,
    )
    with virtual_time(), no_flushing():
        try:
            clean = clean_training(federation)
            found = [*(_lost(federation, clean) if each_counts else ())]
            if found and model is not None:  # some schemes can do without some answers
                usual = set(_lost(model, clean_training(model)))
                found = [one for one in found if one not in usual]
            found += _uncharged(model, clean)
            cells = matrix(federation, faults=faults) if not found else []
        except RuntimeError as error:  # of a training without a fault, that is of no use
            raise AssertionError(str(error)) from error
    found += [f"{one.fault} in {one.phase}: {one.why}" for one in cells if one.verdict == DEFECT]
    if found:
        raise AssertionError("\n".join([f"{federation.title}: {len(found)} defects", *found]))
    return cells


def _federation(
    subject: Any, client: type[SchemeClient] | None
) -> tuple[SmallFederation, SmallFederation | None]:
    """Return the federation of a subject, and that of the scheme of this package it is made of."""
    if isinstance(subject, SmallFederation):
        if client is not None:
            raise InvalidParameterError("client", client, "nothing beside a federation")
        return subject, None
    if not (isinstance(client, type) and issubclass(client, SchemeClient)):
        raise InvalidParameterError("client", client, "the client half, a subclass of SchemeClient")
    alike = [
        own
        for own in FEDERATIONS.values()
        if isinstance(subject, type)
        and issubclass(subject, own.strategy)
        and issubclass(client, own.client)
    ]
    if not alike:
        allowed = "a strategy of this package or its subclass, with its client half"
        raise InvalidParameterError("subject", subject, allowed)
    model = max(alike, key=lambda own: len(own.client.__mro__))  # one client half extends another
    title = f"{subject.__name__} with {client.__name__}"
    return replace(model, title=title, strategy=subject, client=client), model


def _lost(federation: SmallFederation, clean: Outcome) -> Iterator[str]:
    """Say which answers change nothing: each that is missing must end at a model of its own."""
    spot = next((one for one in federation.spots if one.phase == TRAIN), None)
    if spot is None:
        return
    models = {"a fault": clean.model}
    for client in _answering(clean, spot):
        outcome = train(federation, strike_at(replace(spot, client=client), "lost request"))
        models[f"client {client}"] = outcome.model
    if (same := twins(models)) is not None:
        yield (
            f"a reply is lost: without {same[0]} and without {same[1]} in round "
            f"{spot.server_round} the model is the same"
        )
    for line in clean.history[1:]:
        if line["accumulated"] != line["asked"]:
            yield (
                f"round {line['round']}: {line['asked']} clients were asked, and "
                f"{line['accumulated']} answers were used"
            )


def _answering(clean: Outcome, spot: Spot) -> list[str]:
    asked = {c for c, phase, r, _ in clean.asked if (phase, r) == (spot.phase, spot.server_round)}
    return sorted(asked)[:CLIENTS]


def _uncharged(model: SmallFederation | None, clean: Outcome) -> Iterator[str]:
    """Say which answers have no charge, of those that the scheme of this package charges."""
    if model is None or not clean.carded:
        return
    phases = {place[1] for place in train(model).charges}
    for client, phase, server_round in sorted({key[:3] for key in clean.requests & clean.carded}):
        if phase in phases and not clean.charges[client, phase, server_round]:
            yield (
                f"round {server_round}: client {client} answered phase {phase} without a charge "
                "in its ledger"
            )
