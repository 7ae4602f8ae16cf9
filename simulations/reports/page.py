"""Renders a report's page and its sections from the Jinja templates beside this module.

What is `Markup` goes into the page as it is; any other text is escaped on its way.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from .figures import swatch

__all__ = ["rendered"]


def rendered(template: str, **values: object) -> Markup:
    """Return a template with its values filled in."""
    return Markup(_TEMPLATES.get_template(template).render(values))


def _cell(value: object) -> object:
    """Return what a page shows for a value: a dash for None, JSON for what Python writes its way.

    Examples
    --------
    >>> _cell(None), _cell([1, True]), _cell("a < b")
    (Markup('&ndash;'), '[1, true]', 'a < b')
    """
    if value is None:
        return Markup("&ndash;")
    if isinstance(value, bool | Mapping | list | tuple):
        return json.dumps(value, ensure_ascii=False)
    return value


_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    finalize=_cell,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.globals["swatch"] = swatch
