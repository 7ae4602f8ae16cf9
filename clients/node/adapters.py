"""Adapts both kinds of Flower app, and runs schemes that bring their own client.

=====================  ==================================================================
NumPyClient app        ``app = numpy_client_app(client_fn)`` with ``client_fn`` returning
                       ``Scheme(MyClient(...), context)``
Message-API app        ``app = ClientApp(mods=[as_mod(Scheme)])``, functions unchanged
brings its own client  ``app = own_client_app(Scheme, data_fn)``
=====================  ==================================================================

`flwr_privacy.clients.node.client_app` has the first two as one class per scheme.
"""

import logging
from collections.abc import Callable
from typing import Any

from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp

from flwr_privacy.errors import DeclinedError, ProtocolError
from flwr_privacy.pipeline.operator_checks import warn_once
from flwr_privacy.secure_sum.messages import JOIN
from flwr_privacy.wire.arrays import Arrays
from flwr_privacy.wire.message import ERROR_CODE, RECORD

from .base import SchemeClient, Train, Trained
from .context_store import has_policy_file, policy_of
from .dispatch import App, built, discreet, is_of_the_app
from .mod_order import check_beside, inner_mods, outer_mods
from .node import answer, or_refusal
from .records import RecordArrays, first_array_record, to_record, with_content

__all__ = ["OwnClient", "SchemeMod", "as_mod", "numpy_client_app", "own_client_app"]

logger = logging.getLogger("flwr.privacy")

ClientFunction = Callable[[Message, Context], Message]


def as_mod(scheme_client: type[SchemeClient]) -> "SchemeMod":
    """Return a Flower mod that wraps the functions of a Message-API app in a scheme.

    Parameters
    ----------
    scheme_client : type
        The scheme's client half.

    Notes
    -----
    Give it before the app's own mods, ``mods=[as_mod(Scheme), mine]``. Under a scheme that protects
    something a message that came through another mod first is refused.

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

    def __call__(self, message: Message, context: Context, call_next: ClientFunction) -> Message:
        """Answer a message of this library; pass on any other one only if the scheme allows it."""
        if not message.has_content() or RECORD not in message.content:
            client = self.scheme_client(None, context)
            return or_refusal(lambda: _outside(client, message, context, call_next), message)
        app = App(
            client=lambda own_context: self.scheme_client(None, own_context),
            train=lambda _, own_message, own_context: _train_by_message(
                own_message, own_context, call_next
            ),
            evaluate=lambda _, own_message, own_context: _evaluate_by_message(
                own_message, own_context, call_next
            ),
        )

        def reply() -> Message:
            self._check_order(call_next)
            return answer(app, message, context)

        return or_refusal(reply, message)

    def _check_order(self, call_next: ClientFunction) -> None:
        """Refuse mods that cannot stand where they do: at the hello, before anything is charged.

        Raises
        ------
        ProtocolError
            If others stand before a scheme that protects something.
        InvalidParameterError
            If one behind it works with strategies of Flower alone.
        """
        check_beside(inner_mods(call_next))
        before = [] if self.scheme_client.bare else outer_mods()
        if before:
            half, others = self.scheme_client.__name__, ", ".join(before)
            text = (
                f"{half} is not the first of the app's mods: {others} would see and could change "
                f"what it releases. Put it first: mods=[as_mod({half}), {others}]"
            )
            logger.warning("refused: %s", text)
            raise ProtocolError(text)


def numpy_client_app(
    client_fn: Callable[[Context], NumPyClient | Client],
) -> ClientApp:
    """Return a ClientApp for a NumPyClient app; use it in place of ``ClientApp(client_fn)``.

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

    numpy_app = App(client=scheme_client, train=_train_by_numpy, evaluate=_evaluate_by_numpy)

    def serve(bare_work: Callable[[SchemeClient, Message, Context], RecordDict]) -> ClientFunction:
        def function(message: Message, context: Context) -> Message:
            if RECORD in message.content:
                return answer(numpy_app, message, context)

            def outside() -> Message:
                client = built(numpy_app, context)

                def bare(message: Message, context: Context) -> Message:
                    return Message(bare_work(client, message, context), reply_to=message)

                return _outside(client, message, context, bare)

            return or_refusal(outside, message)

        return function

    def bare_training(client: SchemeClient, message: Message, context: Context) -> RecordDict:
        arrays = RecordArrays(first_array_record(message.content))
        trained = _train_by_numpy(client, message, context)(arrays)
        metrics = MetricRecord(dict(trained.metrics))
        return RecordDict({"arrays": to_record(trained.arrays), "metrics": metrics})

    def bare_evaluation(client: SchemeClient, message: Message, context: Context) -> RecordDict:
        return RecordDict({"metrics": MetricRecord(_evaluate_by_numpy(client, message, context))})

    app = ClientApp()
    app.train()(serve(bare_training))
    app.evaluate()(serve(bare_evaluation))
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
    app = ClientApp()
    work = OwnClient(scheme_client, data_fn)
    app.train()(work)
    app.evaluate()(work)
    return app


class OwnClient:
    """Answers the messages of a scheme that brings its own client, under either kind of app.

    Parameters
    ----------
    scheme_client, data_fn
        As those of `own_client_app`.
    """

    def __init__(
        self,
        scheme_client: Callable[[Any, Context], SchemeClient],
        data_fn: Callable[[Context], Any],
    ) -> None:
        self._app = App(
            client=lambda context: scheme_client(data_fn(context), context),
            train=_no_training,
            evaluate=_no_evaluation,
        )

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message of this library; refuse every other one."""
        if not message.has_content() or RECORD not in message.content:
            text = f"the message has no record '{RECORD}'"
            logger.warning("a message '%s' is refused: %s", message.metadata.message_type, text)
            return Message(Error(ERROR_CODE, text), reply_to=message)
        return answer(self._app, message, context)


def _no_training(client: SchemeClient, message: Message, context: Context) -> Train:
    def train(arrays: Arrays) -> Trained:
        raise ProtocolError(f"the scheme '{client.scheme}' has no user training")

    return train


def _no_evaluation(client: SchemeClient, message: Message, context: Context) -> dict[str, Any]:
    raise ProtocolError(f"the scheme '{client.scheme}' has no evaluation on the clients")


def _outside(
    client: SchemeClient, message: Message, context: Context, work: ClientFunction
) -> Message:
    """Answer a message without our record if the scheme and the node's operator allow it.

    Raises
    ------
    DeclinedError
        If the node's policy does not allow it.
    ProtocolError
        If the scheme does not.
    LedgerError
        If the policy cannot be read.
    """
    kind = message.metadata.message_type
    if not is_of_the_app(kind):
        client.check_bare()
        return work(message, context)
    if not has_policy_file(context):
        warn_once(
            f"messages '{kind}' are not protected: what they bring and return is outside of the "
            f"scheme '{client.scheme}', and the node has no policy"
        )
        return work(message, context)
    if kind in (policy_of(context).allowed_messages or ()):
        return work(message, context)
    if message.has_content() and len(message.content) > 0:
        raise _declined(kind, "brings")
    reply = discreet(work, "function")(message, context)
    # An error has a text of the app's own, which may have data in it.
    if reply.has_error() or len(reply.content) > 0:
        raise _declined(kind, "returns")
    return Message(RecordDict(), reply_to=message)


def _declined(message_type: str, does: str) -> DeclinedError:
    error = DeclinedError(
        f"a message '{message_type}' {does} something outside of the scheme: the node's policy "
        "does not have the type in allowed_messages"
    )
    logger.warning("refused: %s", error)
    return error


def _train_by_numpy(client: SchemeClient, message: Message, context: Context) -> Train:
    return client.local_training(_config(message), list(first_array_record(message.content)))


def _evaluate_by_numpy(client: SchemeClient, message: Message, context: Context) -> dict[str, Any]:
    arrays = RecordArrays(first_array_record(message.content))
    return client.local_evaluation(arrays, _config(message))


def _train_by_message(message: Message, context: Context, call_next: ClientFunction) -> Train:
    def train(arrays: Arrays) -> Trained:
        content = _users(message)
        names = (key for key, record in content.items() if isinstance(record, ArrayRecord))
        name = next(names, "arrays")
        # What came in the message can only be read, and need not be encoded to be the same later.
        kept = not isinstance(arrays, RecordArrays) and not any(
            array.flags.writeable for array in arrays.values()
        )
        content[name] = to_record(arrays, local=kept)
        request = with_content(message, content)
        reply = _checked(call_next(request, context)).content
        array_records = [r for r in reply.values() if isinstance(r, ArrayRecord)]
        metric_records = [r for r in reply.values() if isinstance(r, MetricRecord)]
        if len(array_records) != 1 or len(metric_records) != 1:
            raise ProtocolError(
                "the app's train function must reply with one ArrayRecord and one MetricRecord: "
                f"it has {len(array_records)} and {len(metric_records)}"
            )
        return Trained(RecordArrays(array_records[0]), dict(metric_records[0]))

    return train


def _evaluate_by_message(
    message: Message, context: Context, call_next: ClientFunction
) -> dict[str, Any]:
    request = with_content(message, _users(message))
    reply = _checked(call_next(request, context)).content
    records = [record for record in reply.values() if isinstance(record, MetricRecord)]
    if len(records) != 1:
        raise ProtocolError(
            f"the app's evaluate function must reply with one MetricRecord: it has {len(records)}"
        )
    return dict(records[0])


def _users(message: Message) -> RecordDict:
    """Return the part of a request that is meant for the user's code."""
    ours = (RECORD, JOIN)
    return RecordDict({name: value for name, value in message.content.items() if name not in ours})


def _checked(reply: Message) -> Message:
    if reply.has_error():
        raise RuntimeError(f"the app answered with an error: {reply.error.reason}")
    return reply


def _config(message: Message) -> dict[str, Any]:
    records = (r for r in _users(message).values() if isinstance(r, ConfigRecord))
    return dict(next(records, ConfigRecord()))
