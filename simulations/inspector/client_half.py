"""Finds the client half of an app: its kind, its functions, its mods and its message types."""

import ast
from dataclasses import dataclass

from flwr_privacy.errors import InvalidParameterError

from .app_folder import AppFolder
from .source import Source, keyword_of

__all__ = [
    "MESSAGE",
    "NUMPY",
    "REPLACED_MODS",
    "ClientFunction",
    "ClientHalf",
    "Mod",
    "client_half",
]

MESSAGE, NUMPY = "Message API", "NumPyClient"

CLIENT_APPS = {"flwr.clientapp.ClientApp", "flwr.client.ClientApp"}
OURS = "flwr_privacy.clients."

REPLACED_MODS = {
    "fixedclipping_mod": "the scheme clips by itself",
    "adaptiveclipping_mod": "the scheme clips by itself",
    "secaggplus_mod": "secure_sum=SecureSum() of the strategy takes its place",
    "secagg_mod": "secure_sum=SecureSum() of the strategy takes its place",
    "LocalDpMod": "its noise is counted by no ledger and comes before the scheme's clipping",
}
"""Mods of Flower that go, and why."""


@dataclass(frozen=True)
class Mod:
    """A mod of the app.

    Parameters
    ----------
    node : expr
        What stands in the list.
    dotted : str
        Its dotted name, that of the function where it is a call; "" if it has none.
    """

    node: ast.expr
    dotted: str

    @property
    def name(self) -> str:
        """The last part of its dotted name."""
        return self.dotted.rpartition(".")[2]

    @property
    def sums(self) -> bool:
        """Whether it is one of Flower's for secure aggregation."""
        return self.replaced and self.name.startswith("secagg")

    @property
    def replaced(self) -> bool:
        """Whether it is one of Flower's that a scheme takes the place of."""
        return self.name in REPLACED_MODS and self.dotted.startswith("flwr.")


@dataclass(frozen=True)
class ClientFunction:
    """A function that answers messages.

    Parameters
    ----------
    message_type : str
        "train", "evaluate", "query", or one of the app's own such as "query.embeddings".
    source : Source
        The file.
    node : FunctionDef
        The function.
    mods : tuple of Mod
        The mods of this function alone.
    """

    message_type: str
    source: Source
    node: ast.FunctionDef
    mods: tuple[Mod, ...] = ()

    @property
    def own_type(self) -> bool:
        """Whether the message type is not one of those that a strategy sends."""
        return self.message_type not in ("train", "evaluate")


@dataclass(frozen=True)
class ClientHalf:
    """The client half of an app.

    Parameters
    ----------
    source : Source
        The file that makes the ClientApp.
    call : Call
        The call that makes it.
    made_by : str
        Dotted name of what is called.
    client_fn : (Source, FunctionDef), optional
        The function that returns the client, where there is one.
    functions : tuple of ClientFunction
        The functions that answer messages.
    mods : tuple of Mod, optional
        The mods, outermost first; None if the list is not written out.
    """

    source: Source
    call: ast.Call
    made_by: str
    client_fn: tuple[Source, ast.FunctionDef] | None
    functions: tuple[ClientFunction, ...]
    mods: tuple[Mod, ...] | None

    @property
    def kind(self) -> str:
        """Which of Flower's two APIs it uses."""
        return NUMPY if self.given_client_fn is not None else MESSAGE

    @property
    def given_client_fn(self) -> ast.expr | None:
        """The first argument, which is a function that returns a client."""
        return self.call.args[0] if self.call.args else keyword_of(self.call, "client_fn")

    @property
    def mods_argument(self) -> ast.expr | None:
        """The list of mods as it is written."""
        return self.call.args[1] if len(self.call.args) > 1 else keyword_of(self.call, "mods")

    @property
    def mods_list(self) -> ast.List | ast.Tuple | None:
        """The list of mods, also one in a variable of the file; None if it is not written out."""
        given = self.mods_argument
        if isinstance(given, ast.Name):
            defined = self.source.definitions.get(given.id)
            given = defined if isinstance(defined, ast.expr) else None
        return given if isinstance(given, ast.List | ast.Tuple) else None

    @property
    def scheme_client(self) -> str:
        """The client half of this library that the app already has; "" if none."""
        return self.made_by.removeprefix(OURS) if self.made_by.startswith(OURS) else ""


def client_half(app: AppFolder) -> ClientHalf:
    """Find the client half.

    Raises
    ------
    InvalidParameterError
        If the app's ClientApp is not made by a call that can be found.
    """
    source, made = app.half(app.client)
    made_by = source.dotted(made.func) if isinstance(made, ast.Call) else ""
    if not isinstance(made, ast.Call) or not (
        made_by in CLIENT_APPS or made_by.startswith(OURS) or _is_client_app(made_by)
    ):
        allowed = f"an app that makes '{app.client}' by calling ClientApp(...)"
        raise InvalidParameterError("app", str(app.path), allowed)
    half = ClientHalf(source, made, made_by, None, (), None)
    given = half.given_client_fn
    found = app.find(source.dotted(given)) if given is not None else None
    return ClientHalf(
        source,
        made,
        made_by,
        (found[0], found[1]) if found and isinstance(found[1], ast.FunctionDef) else None,
        tuple(_functions(app, source, app.client.partition(":")[2])),
        _mods(app, half),
    )


def _is_client_app(dotted: str) -> bool:
    """Tell whether a name under `flwr` is its ClientApp, as in `import flwr as fl`."""
    return dotted.startswith("flwr.") and dotted.endswith(".ClientApp")


def _functions(app: AppFolder, source: Source, attribute: str) -> list[ClientFunction]:
    found = []
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        for decorator in node.decorator_list:
            call = decorator.func if isinstance(decorator, ast.Call) else decorator
            if not isinstance(call, ast.Attribute) or not isinstance(call.value, ast.Name):
                continue
            owner = source.definitions.get(call.value.id)
            if owner is not app.half(app.client)[1]:
                continue
            arguments = decorator.args if isinstance(decorator, ast.Call) else []
            action = [str(a.value) for a in arguments[:1] if isinstance(a, ast.Constant)]
            if call.attr in ("train", "evaluate", "query"):
                kind = ".".join([call.attr, *action])
                given = keyword_of(decorator, "mods") if isinstance(decorator, ast.Call) else None
                items = given.elts if isinstance(given, ast.List | ast.Tuple) else []
                mods = tuple(Mod(item, _name_of(app, source, item)) for item in items)
                found.append(ClientFunction(kind, source, node, mods))
    return found


def _mods(app: AppFolder, half: ClientHalf) -> tuple[Mod, ...] | None:
    given = half.mods_argument
    if given is None or (isinstance(given, ast.Constant) and given.value is None):
        return ()
    items = half.mods_list
    if items is None:
        return None
    return tuple(Mod(item, _name_of(app, half.source, item)) for item in items.elts)


def _name_of(app: AppFolder, source: Source, item: ast.expr) -> str:
    """Return the dotted name of a mod; of one in a variable, of what made it."""
    if isinstance(item, ast.Call):
        return source.dotted(item.func)
    dotted = source.dotted(item)
    found = app.find(dotted)
    if found and isinstance(found[1], ast.Call):
        return found[0].dotted(found[1].func)
    return dotted
