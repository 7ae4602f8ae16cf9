"""Canary records in the data of a training as it is: there or not by a coin, or one of two.

A canary has entries of records of its client, each drawn from the records by itself: its range and
its types are right, and it is like none of them. It is added to the Dataset of the first DataLoader
of a training that shuffles (of the first one, where none does), or to what a function of the app's
returns; once in a training, as a record that is there twice has twice the epsilon. The app draws
its batches from it as it does from any record, so a sampling that its privacy rests on goes on. A
coin holds through a run.

Neighbours are two sets of which one has a record more; or in which one record is another.
"""

import functools
import importlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Context, Message
from numpy.typing import NDArray
from torch.utils.data import DataLoader, RandomSampler

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.engines.inline.flower_internals import ClientFunction
from flwr_privacy.wire.identity import stream

from ..instruments import Inside
from ..transcript import Training
from .record_parts import (
    Arrays,
    Longer,
    Row,
    first_group,
    has_more,
    has_places,
    made_of,
    parts_of,
    replaced,
)

__all__ = ["ClientCanaries", "Read", "RecordCanaries"]

_READ = 256  # records of a client whose entries canaries get
_SHARE = 4  # records for which there is one canary, at least
_SAMPLERS = ("sampler", "batch_sampler")
_BEFORE_SAMPLER = 2  # arguments of a DataLoader, beside its data set


@dataclass(frozen=True, kw_only=True, eq=False)
class ClientCanaries:
    """The canaries of a client.

    Parameters
    ----------
    coins : (k,) bool
        Heads, or tails.
    heads, tails : list
        The record for heads, and that for tails; no tails where there is none then.
    known : list of list of ndarray
        Parts of other records of the client.
    """

    coins: NDArray[np.bool_]
    heads: list[Any]
    tails: list[Any]
    known: list[list[Row]]

    @property
    def there(self) -> list[Any]:
        """The canaries that are in the client's data."""
        if self.tails:
            pairs = zip(self.coins, self.heads, self.tails, strict=True)
            return [head if coin else tail for coin, head, tail in pairs]
        return [head for coin, head in zip(self.coins, self.heads, strict=True) if coin]


@dataclass(kw_only=True)
class Read:
    """What torch was seen to read of the canaries.

    Parameters
    ----------
    inputs, labels : Counter of int
        How many canaries were an input by this part of them; how many records had this label.
    form : ndarray, shape (0, ...), optional
        Without entries, of the shape and type of inputs; None where no training was seen.
    hidden : bool
        Whether torch trained with functions that hide what they are given.
    """

    inputs: Counter[int] = field(default_factory=Counter)
    labels: Counter[int] = field(default_factory=Counter)
    form: NDArray[Any] | None = None
    hidden: bool = False


class RecordCanaries:
    """The canary records of a run.

    Parameters
    ----------
    seed : int
        Of canaries and coins.
    most : int
        Canaries of a client, at most.
    clients : int
        Clients, from the first on, that have some.
    pairs : bool, default False
        Whether tails is another record, and not none.
    function : str, optional
        "module:function" of the function that returns a client's records: arrays of one length, in
        a tuple or a dict, or a Dataset; the first such group where it returns several. By default
        DataLoaders have them.
    """

    def __init__(
        self,
        *,
        seed: int,
        most: int,
        clients: int,
        pairs: bool = False,
        function: str | None = None,
    ) -> None:
        self.function = function
        self._seed, self._pairs = seed, pairs
        self._most, self._clients = most, clients
        self.clients: dict[int, ClientCanaries] = {}
        """The canaries of each client that has some."""
        self.read = Read()
        self._inside = Inside()
        self._client: int | None = None
        self._chosen: Any = None  # what has them in this training
        self._any_order = False

    def install(self, inside: Inside) -> None:
        """Begin, before the app is imported.

        Raises
        ------
        InvalidParameterError
            If there is no such function.
        """
        self._inside = inside
        if self.function is None:
            self._watch_loaders()
            return
        name, _, attribute = self.function.partition(":")
        module = importlib.import_module(name)
        plain = getattr(module, attribute, None)
        if not callable(plain):
            raise InvalidParameterError("canaries", self.function, "module:function of the app")

        @functools.wraps(plain)
        def more(*args: Any, **kwargs: Any) -> Any:
            return self._more(plain(*args, **kwargs))

        setattr(module, attribute, more)

    def answer(self, message: Message, context: Context, function: ClientFunction) -> Message:
        """Answer by the app's own function, with canaries in what it trains on."""
        client = int(context.node_config["partition-id"])
        trains = message.metadata.message_type.partition(".")[0] == "train"
        if not trains or client >= self._clients:
            return function(message, context)
        self._client, self._chosen = client, None
        try:
            reply = function(message, context)
        finally:
            self._client = None
        self._any_order |= not self.clients
        self.read.hidden |= self._inside.hidden
        if client in self.clients and self._inside.training is not None:
            self._note(self.clients[client], self._inside.training)
        return reply

    def _watch_loaders(self) -> None:
        build: Callable[..., None] = DataLoader.__init__

        def built(loader: Any, dataset: Any, *args: Any, **kwargs: Any) -> None:
            if self._may_have_them(dataset):
                trial = object.__new__(DataLoader)
                build(trial, dataset, *args, **kwargs)
                longer = self._in_its_place(trial, args, kwargs)
                dataset = dataset if longer is None else longer
            build(loader, dataset, *args, **kwargs)

        DataLoader.__init__ = built  # type: ignore[assignment,method-assign]

    def _may_have_them(self, dataset: Any) -> bool:
        """Tell whether a DataLoader's data set may get canaries: one of each training does."""
        if self._client is None or not has_places(dataset):
            return False
        return (self._chosen is None or self._chosen is dataset) and not has_more(dataset)

    def _in_its_place(self, loader: Any, given: Any, named: Any) -> Longer | None:
        """Return the data set for a DataLoader like this one; None where it gets no canaries."""
        # The app's own sampler would not draw them.
        own = len(given) > _BEFORE_SAMPLER or any(named.get(name) is not None for name in _SAMPLERS)
        if own or not (self._any_order or isinstance(loader.sampler, RandomSampler)):
            return None
        self._chosen = loader.dataset
        return Longer(loader.dataset, self._canaries_of(loader.dataset))

    def _more(self, found: Any) -> Any:
        """Return what the function of the app's returned, with canaries."""
        if self._client is None or self._chosen is not None:
            return found
        group = first_group(found)
        if group is None:
            raise InvalidParameterError(
                "canaries",
                self.function,
                "a function that returns arrays or tensors of one length in a tuple or a dict, or "
                f"a Dataset, and not {type(found).__name__}",
            )
        self._chosen = group
        canaries = self._canaries_of(group)
        if isinstance(group, Arrays):
            return replaced(found, group.within, group.longer(canaries))
        return replaced(found, group, Longer(group, canaries))

    def _canaries_of(self, records: Any) -> list[Any]:
        """Return what is added to the records of the client that trains now."""
        client = self._client
        assert client is not None
        if client not in self.clients:
            self.clients[client] = self._made(
                records, stream(self._seed, "record canaries", client)
            )
        return self.clients[client].there

    def _made(self, records: Any, draws: np.random.Generator) -> ClientCanaries:
        places = draws.permutation(len(records))[:_READ]
        read = [records[int(place)] for place in places]
        number = min(self._most, len(records) // _SHARE)
        made = [made_of(read, draws) for _ in range(number * (2 if self._pairs else 1))]
        return ClientCanaries(
            coins=draws.random(number) < 0.5,
            heads=made[:number],
            tails=made[number:],
            known=[parts_of(one) for one in read],
        )

    def _note(self, own: ClientCanaries, training: Training) -> None:
        """Vote for the parts of records that were inputs and labels."""
        self.read.form = training.inputs[:0]
        for parts in map(parts_of, own.there):
            has = (any(map(self._inside.has, _as_inputs(part))) for part in parts)
            self.read.inputs.update(n for n, seen in enumerate(has) if seen)
        if not self.read.inputs or len(training.labels) != len(training.inputs):
            return
        (place, _), *_ = self.read.inputs.most_common(1)
        labels = {x.tobytes(): y for x, y in zip(training.inputs, training.labels, strict=True)}
        for parts in [*own.known, *map(parts_of, own.there)]:
            forms = (labels.get(form.tobytes()) for form in _as_inputs(parts[place]))
            label = next((one for one in forms if one is not None), None)
            if label is not None:
                same = (n for n, p in enumerate(parts) if n != place and _same(p, label))
                self.read.labels.update(same)


def _as_inputs(part: Row) -> list[Row]:
    """Return how an array may come to a model: as it is, or as numbers with a point."""
    return [part, part.astype(np.float32)]


def _same(part: Row, label: Any) -> bool:
    seen = np.ravel(label)
    return np.array_equal(np.ravel(part).astype(seen.dtype), seen)
