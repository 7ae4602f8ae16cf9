"""Puts a scheme's client half into an app: another import of ClientApp, and mods that go."""

import ast

from flwr_privacy.simulations.inspector.app_folder import AppFolder
from flwr_privacy.simulations.inspector.client_half import OURS, ClientHalf, Mod
from flwr_privacy.simulations.inspector.unfit import UnfitError
from flwr_privacy.simulations.inspector.wraps import Wrap

from .edits import Edit, changed, drop_items, with_imports

__all__ = ["client_changed", "replaced_mods"]

CLIENTS = "flwr_privacy.clients"


def client_changed(app: AppFolder, half: ClientHalf, wrap: Wrap) -> AppFolder:
    """Return the app with the client half of a scheme.

    Raises
    ------
    UnfitError
        If the app has that of another scheme.
    """
    if half.scheme_client == wrap.client_app:
        return app
    if half.scheme_client or _adapted(half):
        raise UnfitError(
            "the app's clients have a scheme of this library already: "
            f"{half.source.line(half.call)}",
            [f"make it a plain ClientApp again, or `{wrap.client_app}` from {CLIENTS}"],
        )
    source = half.source
    edits: list[Edit] = []
    dropped: set[str] = set()
    if gone := replaced_mods(half):
        items = half.mods_list
        assert items is not None
        edits += drop_items(source, items.elts, [mod.node for mod in gone])
        for mod in gone:
            dropped |= {n.id for n in ast.walk(mod.node) if isinstance(n, ast.Name)}
    written = half.call.func
    if isinstance(written, ast.Name):
        local = written.id
        name = f"{wrap.client_app} as {local}"
    else:
        name = wrap.client_app
        edits.append(Edit.of(source, written, name))
    source = with_imports(changed(source, edits), add={CLIENTS: [name]}, drop=dropped)
    return app.with_source(source)


def replaced_mods(half: ClientHalf) -> list[Mod]:
    """Return the mods that the scheme takes the place of."""
    return [mod for mod in half.mods or () if mod.replaced]


def _adapted(half: ClientHalf) -> bool:
    """Tell whether the app has a scheme as a mod."""
    return any(mod.dotted == f"{OURS}as_mod" for mod in half.mods or ())
