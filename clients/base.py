"""The client half that all schemes share: one class, one method per message.

`SchemeClient.handle` is where a scheme does its work. `fit` (for NumPyClient apps) and the mod (for
Message-API apps, see `flwr_privacy.clients.adapters`) are two thin faces of it.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
from flwr.app import Context
from flwr.client import NumPyClient

from flwr_privacy.arrays import Arrays
from flwr_privacy.averaging import Metrics, WeightedMean
from flwr_privacy.errors import ProtocolError
from flwr_privacy.wire import METRICS, RECORD, Fields

__all__ = ["SchemeClient", "Train", "Trained"]


class Trained(NamedTuple):
    """What the user's local training returned: the arrays and its metrics with the weight."""

    arrays: Arrays
    metrics: Metrics


Train = Callable[[Arrays], Trained]
"""The user's local training: from the arrays to start at to the arrays where it ended."""

_NUM_EXAMPLES = "num-examples"


class SchemeClient(NumPyClient):
    """Base of the client halves.

    Parameters
    ----------
    inner : NumPyClient, optional
        The user's client, where the scheme wraps a NumPyClient app.
    context : Context, optional
        Flower's context of this client.

    Attributes
    ----------
    scheme : str
        Name of the scheme on the wire.
    phases : frozenset of str
        Phases of the scheme's ``train`` messages, besides ``hello``.
    bare_train : bool
        Whether a train message that is not of this library reaches the user's training. A scheme
        that protects something says no: otherwise a server could leave out the record and get the
        bare update.
    """

    scheme: ClassVar[str]
    phases: ClassVar[frozenset[str]] = frozenset({"train"})
    bare_train: ClassVar[bool] = False

    def __init__(self, inner: NumPyClient | None = None, context: Context | None = None) -> None:
        self.inner = inner
        self.context = context

    def handle(
        self, phase: str, arrays: Arrays, fields: Fields, train: Train
    ) -> tuple[Arrays, Fields]:
        """Answer one message of the scheme.

        Parameters
        ----------
        phase : str
            One of `phases`.
        arrays : Mapping of str to ndarray
            The arrays of the message.
        fields : dict
            The scheme's own values in the message, and ``round``.
        train : callable
            The user's local training; called only if the phase asks for it.

        Returns
        -------
        arrays : Mapping of str to ndarray
            Arrays of the reply.
        fields : dict
            The scheme's own values of the reply. ``metrics`` holds what goes into the reply's
            MetricRecord (it leaves the node like everything else).
        """
        raise NotImplementedError

    @classmethod
    def accumulator(cls, template: Arrays) -> WeightedMean:
        """Return an empty accumulator for the replies of several clients on one node."""
        return WeightedMean(template)

    def local_training(self, config: Mapping[str, Any], names: list[str]) -> Train:
        """Return the inner NumPyClient's ``fit`` as a function on named arrays."""
        inner = self._inner()

        def train(arrays: Arrays) -> Trained:
            # Copies: a client may train in place, and the arrays may be views into a message.
            start = [np.array(array) for array in arrays.values()]
            parameters, examples, metrics = inner.fit(start, dict(config))
            numbers = {key: value for key, value in metrics.items() if _is_metric(value)}
            trained = dict(zip(_names(names, len(parameters)), parameters, strict=True))
            return Trained(trained, {**numbers, _NUM_EXAMPLES: examples})

        return train

    def fit(
        self, parameters: list[Any], config: dict[str, Any]
    ) -> tuple[list[Any], int, dict[str, Any]]:
        """Answer one message in a NumPyClient's dialect.

        Parameters
        ----------
        parameters : list of ndarray
            The arrays of the message.
        config : dict
            The message's configuration; the scheme's fields lie under ``flwr-privacy``.

        Returns
        -------
        tuple
            Arrays, number of examples, metrics; the scheme's fields lie in the metrics under
            ``flwr-privacy``.

        Raises
        ------
        ProtocolError
            If the fields are missing and the scheme does not allow bare training.
        """
        config = dict(config)
        fields = config.pop(RECORD, None)
        if fields is None:
            if not self.bare_train:
                raise ProtocolError(bare_train_refusal(self.scheme))
            return self._inner().fit(parameters, config)
        names = _names([], len(parameters))
        train = self.local_training(config, names)
        arrays, fields = self.handle(
            fields["phase"], dict(zip(names, parameters, strict=True)), fields, train
        )
        metrics = dict(fields.pop(METRICS, {}))
        examples = int(metrics.pop(_NUM_EXAMPLES, 0))
        return list(arrays.values()), examples, {**metrics, RECORD: fields}

    def evaluate(
        self, parameters: list[Any], config: dict[str, Any]
    ) -> tuple[float, int, dict[str, Any]]:
        """Evaluate through the inner client."""
        return self._inner().evaluate(parameters, config)

    def get_parameters(self, config: dict[str, Any]) -> list[Any]:
        """Return the inner client's parameters."""
        return self._inner().get_parameters(config)

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the inner client's properties."""
        return self._inner().get_properties(config)

    def _inner(self) -> NumPyClient:
        if self.inner is None:
            raise TypeError(f"{type(self).__name__} wraps no client: give it one as `inner`")
        return self.inner


def bare_train_refusal(scheme: str) -> str:
    """Return the text with which a node refuses to train outside its scheme."""
    return (
        f"this node trains under the scheme '{scheme}' only: the message has no record "
        f"'{RECORD}'; use the strategy of '{scheme}' on the server"
    )


def _is_metric(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _names(names: list[str], count: int) -> list[str]:
    # A NumPyClient loses the names; they are those of the message where the number agrees.
    return names if len(names) == count else [str(index) for index in range(count)]
