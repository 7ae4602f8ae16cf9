"""The two kinds of Flower app, and the schemes that bring their own client.

=====================  ==================================================================
NumPyClient app        ``app = numpy_client_app(client_fn)`` with ``client_fn`` returning
                       ``Scheme(MyClient(...), context)``
Message-API app        ``app = ClientApp(mods=[as_mod(Scheme)])``, functions unchanged
brings its own client  ``app = own_client_app(Scheme, data_fn)``
=====================  ==================================================================
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp

from flwr_privacy.arrays import Arrays
from flwr_privacy.errors import ProtocolError
from flwr_privacy.wire import RECORD

from .base import SchemeClient, Train, Trained, bare_train_refusal
from .node import ERROR_CODE, App, answer, first_array_record
from .records import RecordArrays, to_record

__all__ = ["as_mod", "numpy_client_app", "own_client_app"]

CallNext = Callable[[Message, Context], Message]


def as_mod(scheme_client: type[SchemeClient]) -> "SchemeMod":
    """Return a Flower mod that puts a scheme around the functions of a Message-API app.

    Parameters
    ----------
    scheme_client : type
        The scheme's client half.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> from flwr_privacy.clients import FedAvgClient, as_mod
    >>> app = ClientApp(mods=[as_mod(FedAvgClient)])
    """
    return SchemeMod(scheme_client)


class SchemeMod:
    """A Flower mod; an instance can be pickled, as Ray requires."""

    def __init__(self, scheme_client: type[SchemeClient]) -> None:
        self.scheme_client = scheme_client

    def __call__(self, message: Message, context: Context, call_next: CallNext) -> Message:
        """Answer a message of this library; let every other one through untouched."""
        if not message.has_content() or RECORD not in message.content:
            if message.metadata.message_type == MessageType.TRAIN:
                return _bare(self.scheme_client, message, lambda: call_next(message, context))
            return call_next(message, context)
        app = App(
            client=lambda own_context: self.scheme_client(None, own_context),
            train=lambda _, own_message, own_context: _train_by_message(
                own_message, own_context, call_next
            ),
            pass_on=lambda _, own_message, own_context: _checked(
                call_next(_with_content(own_message, _users(own_message)), own_context)
            ),
        )
        return answer(app, message, context)


def numpy_client_app(
    client_fn: Callable[[Context], NumPyClient | Client],
) -> ClientApp:
    """Return a ClientApp for a NumPyClient app: write it in place of ``ClientApp(client_fn)``.

    Parameters
    ----------
    client_fn : callable
        Takes the context and returns a `SchemeClient` around the user's client (``.to_client()``
        may have been called on it).

    Notes
    -----
    A Message-API strategy cannot talk to a plain ``ClientApp(client_fn)``; this app speaks both
    the Message API's dialect and the NumPyClient's.
    """

    def scheme_client(context: Context) -> SchemeClient:
        client = client_fn(context)
        client = getattr(client, "numpy_client", client)  # what `.to_client()` wraps
        if not isinstance(client, SchemeClient):
            raise ProtocolError(
                f"client_fn returned a {type(client).__name__}: return a scheme's client around it"
            )
        return client

    numpy_app = App(
        client=scheme_client,
        train=lambda client, message, _: client.local_training(
            _config(message), list(first_array_record(message.content))
        ),
        pass_on=lambda client, message, _: _evaluate_by_numpy(client, message),
    )

    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if RECORD in message.content:
            return answer(numpy_app, message, context)
        client = scheme_client(context)
        return _bare(type(client), message, lambda: _fit_by_numpy(numpy_app, client, message))

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        if RECORD in message.content:
            return answer(numpy_app, message, context)
        return _evaluate_by_numpy(scheme_client(context), message)

    return app


def own_client_app(
    scheme_client: Callable[[Any, Context], SchemeClient], data_fn: Callable[[Context], Any]
) -> ClientApp:
    """Return the ClientApp of a scheme that brings its own client and trains on raw data.

    Parameters
    ----------
    scheme_client : callable
        The scheme's client half: takes the data and the context.
    data_fn : callable
        Takes the context and returns the client's data.
    """

    def no_training(client: SchemeClient, message: Message, context: Context) -> Train:
        def train(arrays: Arrays) -> Trained:
            raise ProtocolError(f"the scheme '{client.scheme}' has no user training")

        return train

    def no_evaluation(client: SchemeClient, message: Message, context: Context) -> Message:
        raise ProtocolError(f"the scheme '{client.scheme}' has no evaluation on the clients")

    own_app = App(
        client=lambda context: scheme_client(data_fn(context), context),
        train=no_training,
        pass_on=no_evaluation,
    )
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if RECORD not in message.content:
            return Message(
                Error(ERROR_CODE, f"the message has no record '{RECORD}'"), reply_to=message
            )
        return answer(own_app, message, context)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return answer(own_app, message, context)

    return app


def _bare(
    scheme_client: type[SchemeClient], message: Message, train: Callable[[], Message]
) -> Message:
    if scheme_client.bare_train:
        return train()
    reason = bare_train_refusal(scheme_client.scheme)
    return Message(Error(ERROR_CODE, reason), reply_to=message)


def _train_by_message(message: Message, context: Context, call_next: CallNext) -> Train:
    def train(arrays: Arrays) -> Trained:
        content = _users(message)
        names = (key for key, record in content.items() if isinstance(record, ArrayRecord))
        name = next(names, "arrays")
        content[name] = to_record(arrays)
        question = _with_content(message, content)
        reply = _checked(call_next(question, context)).content
        array_records = [r for r in reply.values() if isinstance(r, ArrayRecord)]
        metric_records = [r for r in reply.values() if isinstance(r, MetricRecord)]
        if len(array_records) != 1 or len(metric_records) != 1:
            raise ProtocolError(
                "the app's train function must reply with one ArrayRecord and one MetricRecord: "
                f"it has {len(array_records)} and {len(metric_records)}"
            )
        return Trained(RecordArrays(array_records[0]), dict(metric_records[0]))

    return train


def _users(message: Message) -> RecordDict:
    """Return the part of a question that the user's code knows."""
    return RecordDict({name: value for name, value in message.content.items() if name != RECORD})


def _with_content(message: Message, content: RecordDict) -> Message:
    copied = Message.__new__(Message)
    copied.__dict__.update(message.__dict__)
    copied.content = content
    return copied


def _checked(reply: Message) -> Message:
    if reply.has_error():
        raise ProtocolError(f"the app answered with an error: {reply.error.reason}")
    return reply


def _config(message: Message) -> dict[str, Any]:
    records = (r for r in _users(message).values() if isinstance(r, ConfigRecord))
    return dict(next(records, ConfigRecord()))


def _fit_by_numpy(app: App, client: SchemeClient, message: Message) -> Message:
    arrays = RecordArrays(first_array_record(message.content))
    trained = client.local_training(_config(message), list(arrays))(arrays)
    content = RecordDict(
        {"arrays": to_record(trained.arrays), "metrics": MetricRecord(dict(trained.metrics))}
    )
    return Message(content, reply_to=message)


def _evaluate_by_numpy(client: SchemeClient, message: Message) -> Message:
    arrays = RecordArrays(first_array_record(message.content))
    parameters = [np.array(array) for array in arrays.values()]
    loss, examples, metrics = client.evaluate(parameters, _config(message))
    numbers = {key: value for key, value in metrics.items() if isinstance(value, int | float)}
    record = MetricRecord({**numbers, "loss": float(loss), "num-examples": int(examples)})
    return Message(RecordDict({"metrics": record}), reply_to=message)
