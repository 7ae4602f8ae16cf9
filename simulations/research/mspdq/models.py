"""Estimates the clients' models from the server's view, for each kind of round."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.clients import FedAvgClient
from flwr_privacy.mspdq import laplace_scale
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.simulations.research.attacks.setup import AttackSetup, listen
from flwr_privacy.strategies import MSP, MSPDQ, FedAvg, JoPEQFedAvg
from flwr_privacy.wire.message import TRAIN

from .consensus import recover_w_conserved, recover_w_known_c, recover_w_split_law, relative_error
from .mixing import Overheard, layout_of, overhear, overhear_jopeq, overhear_masked

__all__ = ["BITS", "EPSILON", "SECRET_ROUNDS", "Estimate", "Views", "views_of"]

Vectors = NDArray[np.float64]

BITS = (8, 6, 4)
"""Bits of MSPDQ without a secure sum."""

SECRET_ROUNDS = 30
"""Mixing steps where the couplings are secret: the law of conservation takes that many."""

EPSILON = 1.0
"""Of the Laplace split, for updates whose L1 norm is that of the largest one, and of JoPEQ."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Estimate:
    """An estimate of the clients' models.

    Parameters
    ----------
    view : str
        What it sees.
    attack : str
        What it makes of that.
    models : ndarray, shape (clients, d)
        A model for each client.
    pictured : bool, default False
        Whether images are searched for in it.
    """

    view: str
    attack: str
    models: Vectors
    pictured: bool = False

    @property
    def name(self) -> str:
        """View and attack."""
        return f"{self.view}: {self.attack}"


@dataclass(kw_only=True, eq=False)
class Views:
    """What the server receives in a round of each kind, with its estimates.

    Parameters
    ----------
    start : ndarray, shape (d,)
        The model that it sent.
    truth : ndarray, shape (clients, d)
        The clients' models.
    estimates : list of Estimate
        The server's estimates of them.
    sums : dict of int to ndarray, shape (d,)
        By number of clients, the mean of their models as it was opened.
    results : dict of str to ndarray, shape (d,)
        By view, the new model.
    curves : dict of str to (K,) ndarray
        By attack, the mean error of the update after more and more mixing steps.
    """

    start: Vectors
    truth: Vectors
    estimates: list[Estimate]
    sums: dict[int, Vectors]
    results: dict[str, Vectors]
    curves: dict[str, Vectors]

    def add(
        self, view: str, attack: str, models: Sequence[Vectors] | Vectors, *, pictured: bool = False
    ) -> None:
        """Add an estimate."""
        self.estimates.append(
            Estimate(view=view, attack=attack, models=np.array(models), pictured=pictured)
        )

    def error(self, models: Sequence[Vectors] | Vectors, *, of_update: bool = True) -> float:
        """Return the mean error of models for all clients, relative to updates or to models."""
        known = self.start if of_update else 0.0
        pairs = zip(models, self.truth, strict=True)
        return float(np.mean([relative_error(found, true, known) for found, true in pairs]))

    def damage(self, view: str) -> float:
        """Return the error of a view's new model, relative to the mean update."""
        return relative_error(self.results[view], self.truth.mean(axis=0), self.start)

    def likeness(self, models: Vectors) -> float:
        """Return the mean cosine of the updates of models and of the true ones."""
        found, true = models - self.start, self.truth - self.start
        lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(true, axis=1)
        return float(np.mean((found * true).sum(axis=1) / lengths))


def views_of(setup: AttackSetup) -> Views:
    """Run a round of each kind, and return what the server makes of it."""
    layout = layout_of(setup)
    start, clients = layout.vector(setup.start), len(setup.labels)
    truth = np.array([layout.vector(setup.train(i, setup.start)) for i in range(clients)])
    views = Views(start=start, truth=truth, estimates=[], sums={}, results={}, curves={})
    _plain(setup, views)
    _split(setup, views)
    _quantized(setup, views)
    _summed(setup, views)
    return views


def _plain(setup: AttackSetup, views: Views) -> None:
    """Add FedAvg."""
    clients, layout = len(setup.labels), layout_of(setup)
    strategy = FedAvg(fraction_evaluate=0.0, **_all(clients))
    exchanges, model = listen(setup, strategy, FedAvgClient, clients=clients)
    uploads = [next(layout.vector(e.arrays) for e in own if e.phase == TRAIN) for own in exchanges]
    views.add("FedAvg", "upload", uploads, pictured=True)
    views.results["FedAvg"] = layout.vector(model)


def _split(setup: AttackSetup, views: Views) -> None:
    """Add MSP: with couplings that are known and secret, and with Laplace noise."""
    everybody = _all(len(setup.labels))
    seen = _hear(setup, views, "MSP", MSP(**everybody), pictured=True)
    views.add("MSP", "2 messages", _two_messages(seen), pictured=True)

    name = "MSP, secret gain"
    strategy = MSP(coupling="random", mixing_rounds=SECRET_ROUNDS, **everybody)
    seen = _hear(setup, views, name, strategy)
    kappa, eps_s = seen.terms.kappa, seen.terms.eps_s
    law = [
        recover_w_split_law(own, seen.averages, kappa=kappa, eps_s=eps_s) for own in seen.messages
    ]
    views.add(name, "2 messages, law", law)
    views.add(name, f"conserved, {SECRET_ROUNDS}", _conserved(seen, SECRET_ROUNDS))
    views.curves[f"{name}: conserved"] = _curve(views, seen, _conserved)

    norms = np.abs(views.truth - views.start).sum(axis=1)
    scale = laplace_scale(2 * float(norms.max()), EPSILON)
    strategy = MSP(split="laplace", scale=scale, **everybody)
    seen = _hear(setup, views, "MSP+Lap", strategy, pictured=True)
    views.add("MSP+Lap", "2 messages", _two_messages(seen), pictured=True)


def _quantized(setup: AttackSetup, views: Views) -> None:
    """Add MSPDQ without a secure sum, and JoPEQ."""
    everybody = _all(len(setup.labels))
    for bits in BITS:
        name, pictured = f"MSPDQ {bits}", bits in (BITS[0], BITS[-1])
        seen = _hear(setup, views, name, MSPDQ(bits=bits, **everybody), pictured=pictured)
        views.add(name, "all messages", _tracked(seen, seen.terms.rounds), pictured=pictured)
        views.curves[f"{name}: all messages"] = _curve(views, seen, _tracked)

    name = "MSPDQ 8, paper"
    seen = _hear(setup, views, name, MSPDQ(paper=True, replacement=False, **everybody))
    views.add(name, "all messages", _tracked(seen, seen.terms.rounds), pictured=True)

    jopeq = JoPEQFedAvg(epsilon=EPSILON, **everybody)
    views.add("JoPEQ 8", "upload", overhear_jopeq(setup, jopeq), pictured=True)


def _summed(setup: AttackSetup, views: Views) -> None:
    """Add MSPDQ under a secure sum: over two clients, and over all."""
    name, clients = "MSPDQ 8, secure", len(setup.labels)
    largest = np.abs(views.truth - views.start).max()
    bound = 2.0 ** float(np.ceil(np.log2(largest)))
    for size in sorted({2, clients}):
        strategy = MSPDQ(secure_sum=SecureSum(), bound=bound, **_all(size))
        seen = overhear_masked(setup, strategy, clients=size)
        views.sums[size] = seen.mean()
    views.results[name] = seen.averages[-1]
    views.add(name, "masked", _tracked(seen, seen.terms.rounds), pictured=True)
    views.add(name, f"mean of {clients}", [views.sums[clients]] * clients)


def _all(clients: int) -> dict[str, Any]:
    return {"min_train_nodes": clients, "min_available_nodes": clients}


def _hear(
    setup: AttackSetup, views: Views, name: str, strategy: MSP, *, pictured: bool = False
) -> Overheard:
    """Run a round; its first messages, as they are, are an estimate."""
    seen = overhear(setup, strategy)
    views.results[name] = seen.averages[-1]
    views.add(name, "message 0", seen.messages[:, 0], pictured=pictured)
    return seen


def _two_messages(seen: Overheard) -> list[Vectors]:
    mixing = seen.terms.mixing
    c = (1 + mixing.weight) * mixing.largest_gain(0)
    return [recover_w_known_c(own, seen.averages, kappa=mixing.kappa, c=c) for own in seen.messages]


def _tracked(seen: Overheard, rounds: int) -> list[Vectors]:
    return [seen.tracked(i, rounds) for i in range(len(seen.messages))]


def _conserved(seen: Overheard, rounds: int) -> list[Vectors]:
    mixing, end = seen.terms.mixing, rounds + 1
    return [
        recover_w_conserved(own[:end], seen.averages[:end], kappa=mixing.kappa, m=mixing.weight)
        for own in seen.messages
    ]


def _curve(
    views: Views, seen: Overheard, attack: Callable[[Overheard, int], list[Vectors]]
) -> Vectors:
    """Return the errors of an attack on more and more messages."""
    return np.array([views.error(attack(seen, k + 1)) for k in range(seen.terms.rounds)])
