"""Canary records in the data of a training as it is: there or not by a coin, or one of two.

A canary has entries of records of its client, each drawn from the records by itself: its range and
its types are right, and it is like none of them. It is added to the Dataset of the first DataLoader
of a training that shuffles (of the first one, where none does), or to what a function of the app's
returns. The app draws its batches from it as it does from any record, so a sampling that its
privacy rests on goes on. A coin holds through a run.

Neighbours are two sets of which one has a record more; or in which one record is another.
"""

import importlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Context, Message
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.engines.inline.flower_internals import ClientFunction

from ..instruments import Inside
from ..transcript import Training
from .record_parts import Arrays, Row, first_group, made_of, parts_of, replaced, with_more

__all__ = ["ClientCanaries", "Read", "RecordCanaries"]

_READ = 256  # records of a client whose entries canaries get
_SHARE = 4  # records for which there is one canary, at least


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
    shape : tuple of int, optional
        Of an input; None where no training was seen.
    """

    inputs: Counter[int] = field(default_factory=Counter)
    labels: Counter[int] = field(default_factory=Counter)
    shape: tuple[int, ...] | None = None


class RecordCanaries:
    """The canary records of a run.

    Parameters
    ----------
    seed : int
        Of canaries and coins.
    most : int
        Canaries of a client, at most.
    pairs : bool, default False
        Whether tails is another record, and not none.
    function : str, optional
        "module:function" of the function that returns a client's records: arrays of one length, in
        a tuple or a dict, or a Dataset; the first such group where it returns several. By default
        DataLoaders have them.
    """

    def __init__(
        self, *, seed: int, most: int, pairs: bool = False, function: str | None = None
    ) -> None:
        self._seed, self._most, self._pairs, self._function = seed, most, pairs, function
        self.clients: dict[int, ClientCanaries] = {}
        """The canaries of each client that has some."""
        self.read = Read()
        self._inside: Inside | None = None
        self._client: int | None = None
        self._chosen: Any = None  # the data set of this training that has them
        self._longer: list[Any] = []  # kept: a data set that has them gets no more
        self._any_order = False

    def install(self, inside: Inside) -> None:
        """Begin, before the app is imported.

        Raises
        ------
        InvalidParameterError
            If there is no such function.
        """
        self._inside = inside
        if self._function is None:
            self._watch_loaders()
            return
        name, _, attribute = self._function.partition(":")
        module = importlib.import_module(name)
        plain = getattr(module, attribute, None)
        if not callable(plain):
            raise InvalidParameterError("canaries", self._function, "module:function of the app")
        setattr(module, attribute, lambda *args, **kwargs: self._more(plain(*args, **kwargs)))

    def answer(self, message: Message, context: Context, function: ClientFunction) -> Message:
        """Answer by the app's own function, with canaries in what it trains on."""
        if message.metadata.message_type.partition(".")[0] != "train":
            return function(message, context)
        client = self._client = int(context.node_config["partition-id"])
        self._chosen = None
        try:
            reply = function(message, context)
        finally:
            self._client = None
        self._any_order |= self._chosen is None
        training = None if self._inside is None else self._inside.training
        if client in self.clients and training is not None:
            self._note(self.clients[client], training)
        return reply

    def _watch_loaders(self) -> None:
        from torch.utils.data import DataLoader, RandomSampler

        build: Callable[..., None] = DataLoader.__init__

        def built(loader: Any, dataset: Any, *args: Any, **kwargs: Any) -> None:
            if self._may_have_them(dataset):
                trial = object.__new__(DataLoader)
                build(trial, dataset, *args, **kwargs)
                if self._any_order or isinstance(trial.sampler, RandomSampler):
                    dataset = self._with_canaries(dataset)
            build(loader, dataset, *args, **kwargs)

        DataLoader.__init__ = built  # type: ignore[method-assign]

    def _may_have_them(self, dataset: Any) -> bool:
        """Tell whether a DataLoader's data set may get canaries: one of each training does."""
        places = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if self._client is None or not places or any(dataset is one for one in self._longer):
            return False
        return self._chosen is None or self._chosen is dataset

    def _with_canaries(self, dataset: Any) -> Any:
        self._chosen = dataset
        longer = with_more(dataset, self._canaries_of(dataset))
        self._longer.append(longer)
        return longer

    def _more(self, found: Any) -> Any:
        """Return what the function of the app's returned, with canaries."""
        if self._client is None:
            return found
        group = first_group(found)
        if group is None:
            raise InvalidParameterError(
                "canaries",
                self._function,
                "a function that returns arrays of one length in a tuple or a dict, or a Dataset",
            )
        if isinstance(group, Arrays):
            self._chosen = found
            return replaced(found, group.within, group.longer(self._canaries_of(group)))
        return replaced(found, group, self._with_canaries(group))

    def _canaries_of(self, records: Any) -> list[Any]:
        """Return what is added to the records of the client that trains now."""
        client = self._client
        if client is None:
            return []
        if client not in self.clients:
            self.clients[client] = self._made(records, np.random.default_rng([self._seed, client]))
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
        self.read.shape = training.inputs.shape[1:]
        has = self._inside.has if self._inside else lambda _: False
        for parts in map(parts_of, own.there):
            seen = (n for n, part in enumerate(parts) if any(map(has, _as_inputs(part))))
            self.read.inputs.update(seen)
        if not self.read.inputs or len(training.labels) != len(training.inputs):
            return
        (place, _), *_ = self.read.inputs.most_common(1)
        labels = {x.tobytes(): y for x, y in zip(training.inputs, training.labels, strict=True)}
        for parts in own.known:
            forms = (labels.get(form.tobytes()) for form in _as_inputs(parts[place]))
            label = next((one for one in forms if one is not None), None)
            if label is not None:
                same = (n for n, p in enumerate(parts) if n != place and _same(p, label))
                self.read.labels.update(same)


def _as_inputs(part: Row) -> list[Row]:
    """Return how an array may come to a model: as it is, or as numbers with a point."""
    return [part, part.astype(np.float32)]


def _same(part: Row, label: Any) -> bool:
    return np.array_equal(np.ravel(part), np.ravel(label))
