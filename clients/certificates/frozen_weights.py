"""What a question with frozen weights asks of a training, and whether the training kept to it.

The server sends the arrays that are trained and a digest of all others. The node has the others
itself. The user's training loads what came with
`flwr_privacy.clients.torch.load_trainable`, which leaves here what it found.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar

import numpy as np

from flwr_privacy.errors import InvalidParameterError, ProtocolError
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.frozen import frozen_digest

from .request import opened

__all__ = ["FrozenRequest", "LoadedModel", "asked_frozen", "current_frozen"]

_MOST_NAMES = 5  # in an error


class LoadedModel:
    """A model that the user's training has loaded the server's arrays into.

    Parameters
    ----------
    frozen : callable
        Returns the digests of the arrays that do not travel, by name, as they are now.
    parameters : Mapping of str to int
        Identities of the parameters that are trained, by name.
    with_gradient : callable
        Returns the names of the parameters that have a gradient now.
    """

    def __init__(
        self,
        frozen: Callable[[], dict[str, bytes]],
        parameters: Mapping[str, int],
        with_gradient: Callable[[], Collection[str]],
    ) -> None:
        self.frozen = frozen
        self.at_first = frozen()
        self.parameters = dict(parameters)
        self.with_gradient = with_gradient

    def changed(self) -> list[str]:
        """Return the names of the frozen arrays that are not what they were at first."""
        now = self.frozen()
        names = {*now, *self.at_first}
        return sorted(name for name in names if now.get(name) != self.at_first.get(name))


class FrozenRequest:
    """The events of a scope in which the user's training must start from known weights.

    Parameters
    ----------
    digest : bytes
        What the server says of the frozen weights.
    names : iterable of str
        The arrays that came with the question: those that are trained.
    rehearsed : bool, default False
        Whether the records are generated. Then the training must train something.
    """

    def __init__(self, digest: bytes, names: Iterable[str], *, rehearsed: bool = False) -> None:
        self.digest = digest
        self.names = tuple(names)
        self._rehearsed = rehearsed
        self._loaded: LoadedModel | None = None
        self._stepped: set[int] = set()

    def load(self, model: LoadedModel) -> None:
        """Take note of a model; the last one counts.

        Raises
        ------
        InvalidParameterError
            If its frozen weights are not those of the server.
        """
        if frozen_digest(model.at_first) != self.digest:
            raise InvalidParameterError(
                "the frozen weights",
                f"{len(model.at_first)} arrays with other values, types or names",
                "those of the server's model, number by number: load the same base model on the "
                "server and on every node, and draw new weights (of adapters or of a head) that "
                "stay frozen from the same seed",
            )
        self._loaded = model

    def step(self, parameters: Iterable[int]) -> None:
        """Take note of the parameters, by identity, that an optimiser has in a step."""
        self._stepped.update(parameters)

    def check_loaded(self) -> LoadedModel:
        """Return the model.

        Raises
        ------
        ProtocolError
            If the user's code loaded none.
        """
        if self._loaded is None:
            raise ProtocolError(
                "the server's arrays are a part of the model, and nothing says which base model "
                "they were put into: load them with "
                "flwr_privacy.clients.torch.load_trainable(model, arrays)"
            )
        return self._loaded

    def check_unchanged(self) -> LoadedModel:
        """Return the model.

        Raises
        ------
        ProtocolError
            If the user's code loaded none, or changed its frozen weights.
        """
        model = self.check_loaded()
        if changed := model.changed():
            raise ProtocolError(
                f"the training changed frozen weights: {_some(changed)}. Keep normalisation "
                "layers that are frozen in eval mode, and merge no adapters into the base model"
            )
        return model

    def trained(self, start: Arrays, arrays: Arrays) -> Arrays:
        """Return what may leave the node of what the user's training returned.

        Parameters
        ----------
        start : Mapping of str to ndarray
            The arrays that came.
        arrays : Mapping of str to ndarray
            What the training returned; it may be the whole model.

        Raises
        ------
        ProtocolError
            If it loaded no model, changed frozen weights, returned less than what came, or did not
            train one of the arrays.
        """
        model = self.check_unchanged()
        if missing := [name for name in start if name not in arrays]:
            raise ProtocolError(
                f"the training returned no {_some(missing)}: return all arrays that came, under "
                "their names"
            )
        self._check_trained(model, start, arrays)
        return {name: arrays[name] for name in start}

    def _check_trained(self, model: LoadedModel, start: Arrays, arrays: Arrays) -> None:
        """Refuse a training that left out some parameters, e.g. because its optimiser has them not.

        In its first step one factor of a new adapter has a gradient of zero: an array that an
        optimiser has in a step need not change.
        """
        same = {
            name
            for name in model.parameters
            if name in start and np.array_equal(start[name], arrays[name], equal_nan=True)
        }
        if not self._stepped and len(same) == len(model.parameters) and not self._rehearsed:
            return  # a client without records has nothing to train on
        seen = {name for name, number in model.parameters.items() if number in self._stepped}
        if not self._stepped:  # no optimiser of torch
            seen = set(model.with_gradient())
        if idle := sorted(same - seen):
            raise ProtocolError(
                f"the training did not train {_some(idle)}: no optimiser had them, and they are "
                "as they came. Make the optimiser after the adapters and after requires_grad is "
                "set, from the parameters of the model that load_trainable got"
            )


_request: ContextVar[FrozenRequest | None] = ContextVar("flwr_privacy_frozen", default=None)


def asked_frozen(request: FrozenRequest) -> AbstractContextManager[FrozenRequest]:
    """Open a scope in which the user's code must load the server's arrays into the right model."""
    return opened(_request, request)


def current_frozen() -> FrozenRequest | None:
    """Return the request of the innermost scope; None outside of one."""
    return _request.get()


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"{names[:_MOST_NAMES]}{more}"
