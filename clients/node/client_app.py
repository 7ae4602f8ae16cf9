"""Flower's ClientApp with a scheme around it: the client half by an import alone.

``from flwr_privacy.clients import UDPClientApp as ClientApp`` is the whole change to either kind of
app. The scheme stands before all mods of the app: they get the messages for the app's functions and
nothing of the scheme's protocol, and what leaves the node is what the scheme released.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import Client
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod

from flwr_privacy.errors import InvalidParameterError, ProtocolError
from flwr_privacy.wire.message import HELLO, RECORD

from .adapters import SchemeMod, as_mod
from .base import SchemeClient, names_of, numbers_of
from .dispatch import discreet
from .mod_order import check_beside
from .node import or_refusal
from .records import decoded, first_array_record, to_record, with_content

__all__ = ["SchemeClientApp"]


class SchemeClientApp(ClientApp):
    """Base of the ClientApps that put a scheme around an app's functions or its NumPyClient.

    Parameters
    ----------
    client_fn : callable, optional
        As that of `flwr.clientapp.ClientApp`: takes the context and returns the app's own client.
    mods : list, optional
        The app's own mods. The scheme stands before them, wherever they are registered. Mods of an
        app with a `client_fn` get messages as Flower's older strategies send them
        (``fitins.parameters``).

    Attributes
    ----------
    scheme_client : type
        The scheme's client half.

    Raises
    ------
    InvalidParameterError
        If a mod is the client half of a scheme, or one of Flower's that works only with a strategy
        or workflow of Flower's.

    Examples
    --------
    >>> from flwr_privacy.clients import FedAvgClientApp as ClientApp
    >>> app = ClientApp()
    >>> @app.train()
    ... def train(message, context):
    ...     return message
    """

    scheme_client: ClassVar[type[SchemeClient]]

    def __init__(
        self,
        client_fn: Callable[[Context], Client] | None = None,
        mods: list[Mod] | None = None,
    ) -> None:
        own = list(mods or [])
        _check(own, type(self))
        if client_fn is None:
            super().__init__(mods=[as_mod(self.scheme_client), *own])
            return
        client_fn = _own_clients(client_fn, type(self))
        scheme = _ClientFnMod(self.scheme_client, client_fn)
        super().__init__(client_fn, [scheme, _as_client_fn, *own])

    def train(
        self, action: str = "default", *, mods: list[Mod] | None = None
    ) -> Callable[[ClientAppCallable], ClientAppCallable]:
        """Register a train function, as `flwr.clientapp.ClientApp.train` does."""
        _check(mods or [], type(self))
        return super().train(action, mods=mods)

    def evaluate(
        self, action: str = "default", *, mods: list[Mod] | None = None
    ) -> Callable[[ClientAppCallable], ClientAppCallable]:
        """Register an evaluate function, as `flwr.clientapp.ClientApp.evaluate` does."""
        _check(mods or [], type(self))
        return super().evaluate(action, mods=mods)


def _check(mods: list[Mod], app: type[SchemeClientApp]) -> None:
    if ours := [mod for mod in mods if isinstance(mod, SchemeMod)]:
        half = ours[0].scheme_client.__name__
        raise InvalidParameterError(
            "mods", f"as_mod({half})", f"the app's own mods: {app.__name__} brings the scheme's"
        )
    check_beside(mods)


def _own_clients(
    client_fn: Callable[[Context], Client], app: type[SchemeClientApp]
) -> Callable[[Context], Client]:
    """Return a `client_fn` with the same signature that refuses clients of schemes."""

    @wraps(client_fn)  # Flower looks at the signature
    def made(context: Context) -> Client:
        client = client_fn(context)
        given = getattr(client, "numpy_client", client)  # what `.to_client()` wraps
        if isinstance(given, SchemeClient):
            raise ProtocolError(
                f"client_fn returned a {type(given).__name__}: {app.__name__} puts the scheme "
                "around it; return the app's own client, MyClient(...).to_client()"
            )
        return client

    return made


class _ClientFnMod(SchemeMod):
    """The scheme before a `client_fn`, whose client is built at the hello to see that it can be."""

    def __init__(
        self, scheme_client: type[SchemeClient], client_fn: Callable[[Context], Client]
    ) -> None:
        super().__init__(scheme_client)
        self._client_fn = client_fn

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Answer as `SchemeMod` does; refuse a hello where there is no client of the app's own."""

        def introduced() -> Message:
            discreet(self._client_fn, "client_fn")(context)
            return super(_ClientFnMod, self).__call__(message, context, call_next)

        record = message.content.get(RECORD) if message.has_content() else None
        if isinstance(record, ConfigRecord) and record.get("phase") == HELLO:
            return or_refusal(introduced, message)
        return super().__call__(message, context, call_next)


_DIALECTS = {"train": ("fitins", "fitres"), "evaluate": ("evaluateins", "evaluateres")}
"""Prefixes of the records that Flower's older strategies exchange with a `client_fn`'s client."""


def _as_client_fn(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Mod that asks a `client_fn`'s client, and the mods around it, as they are written for.

    Flower's own handling of a `client_fn` knows the older records alone. The answer is one of the
    Message API: an ArrayRecord after a training, and one MetricRecord.
    """
    dialect = _DIALECTS.get(message.metadata.message_type)
    if dialect is None or f"{dialect[0]}.parameters" in message.content:
        return call_next(message, context)  # of a server with an older strategy
    asked, answered = dialect
    arrays = first_array_record(message.content)
    configs = (r for r in message.content.values() if isinstance(r, ConfigRecord))
    config = ConfigRecord(dict(next(configs, ConfigRecord())))
    request = RecordDict({f"{asked}.parameters": arrays, f"{asked}.config": config})
    reply = call_next(with_content(message, request), context)
    if reply.has_error():
        return reply
    content: dict[str, Any] = dict(reply.content)
    if status := content[f"{answered}.status"]["code"]:
        text = content[f"{answered}.status"]["message"]
        raise RuntimeError(f"the app's client answered with status {status}: {text}")
    metrics = numbers_of(content[f"{answered}.metrics"])
    metrics["num-examples"] = int(content[f"{answered}.num_examples"]["num_examples"])
    if answered == "evaluateres":
        metrics["loss"] = float(content[f"{answered}.loss"]["loss"])
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)
    trained = first_array_record(decoded(RecordDict({"arrays": content["fitres.parameters"]})))
    values = [array.numpy() for name, array in trained.items() if name != "_empty"]
    named = dict(zip(names_of(list(arrays), len(values)), values, strict=True))
    return Message(
        RecordDict({"arrays": to_record(named), "metrics": MetricRecord(metrics)}),
        reply_to=message,
    )
