"""Makes the change that puts a scheme into an app, as new texts of its files."""

import difflib
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flwr_privacy.errors import DeclinedError
from flwr_privacy.simulations.inspector.app_folder import AppFolder
from flwr_privacy.simulations.inspector.client_half import client_half
from flwr_privacy.simulations.inspector.server_half import server_half
from flwr_privacy.simulations.inspector.unfit import UnfitError, check_fits
from flwr_privacy.simulations.inspector.wraps import Wrap
from flwr_privacy.wire.files import write_text

from .client_change import client_changed
from .edits import EditError
from .loading_change import loading_changed
from .server_change import server_changed
from .training_change import training_changed
from .wrapper_change import unwrapped

__all__ = ["Change", "change_of"]


@dataclass(frozen=True)
class Change:
    """What a scheme changes in an app.

    Parameters
    ----------
    app : AppFolder
        The app.
    texts : mapping of Path to str
        The new text of each file that changes.
    """

    app: AppFolder
    texts: Mapping[Path, str]

    @property
    def empty(self) -> bool:
        """Whether the app has the scheme already."""
        return not self.texts

    def diff(self) -> str:
        """Return the change as a unified diff, with paths from the app's folder on."""
        parts: list[str] = []
        for path, text in self.texts.items():
            name = path.relative_to(self.app.path).as_posix()
            old = path.read_bytes().decode()
            parts += difflib.unified_diff(
                old.splitlines(keepends=True),
                text.splitlines(keepends=True),
                f"a/{name}",
                f"b/{name}",
            )
        return "".join(line if line.endswith("\n") else f"{line}\n" for line in parts)

    def apply(self) -> None:
        """Write the files.

        Raises
        ------
        DeclinedError
            If a file cannot be written.
        """
        before = {path: path.read_bytes().decode() for path in self.texts}
        written: list[Path] = []
        for path, text in self.texts.items():
            try:
                write_text(path, text, mode=stat.S_IMODE(path.stat().st_mode))
            except OSError as error:
                for other in written:  # both halves change, or none
                    write_text(other, before[other], mode=stat.S_IMODE(other.stat().st_mode))
                raise DeclinedError(f"{path} cannot be written: {error.strerror}") from error
            written.append(path)


def change_of(app: AppFolder, wrap: Wrap) -> Change:
    """Return the change that puts a scheme into an app.

    Raises
    ------
    UnfitError
        If the scheme does not fit the app, or the change cannot be made safely.
    """
    try:
        plain = unwrapped(app, wrap)
        new, wrap = plain.app, plain.wrap
        check_fits(new, wrap)
        new = client_changed(new, client_half(new), wrap)
        new = training_changed(new, client_half(new), wrap)
        new = loading_changed(new, client_half(new), wrap)
        new = server_changed(new, server_half(new), wrap)
        for source in new.sources.values():
            _ = source.tree
    except (SyntaxError, EditError) as error:
        raise UnfitError(
            f"the change cannot be made safely in a file that is written like this: {error}",
            [
                f"clients: from flwr_privacy.clients import {wrap.client_app} as ClientApp",
                f"server: {wrap.strategy}({', '.join(['...', *wrap.arguments])})",
            ],
        ) from error
    texts = {
        source.path: source.text
        for module, source in new.sources.items()
        if source.text != app.sources[module].text
    }
    return Change(app, texts)
