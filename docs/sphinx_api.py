"""What the API reference adds to Sphinx's autodoc.

A name that several packages export is documented once, in the first of `PUBLIC` that has it; the
pages of the others link to it. A public name without an entry is a warning, and `make docs` makes
warnings errors. Names in the text of any page, such as `flwr_privacy.strategies.UDP`, become links.
"""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import resolve_name
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.pycode import ModuleAnalyzer
from sphinx.util import logging

PUBLIC = (
    "flwr_privacy.strategies",
    "flwr_privacy.clients",
    "flwr_privacy.clients.torch",
    "flwr_privacy.secure_sum",
    "flwr_privacy.evaluation",
    "flwr_privacy.udp",
    "flwr_privacy.m2fdp",
    "flwr_privacy.mspdq",
    "flwr_privacy.acfl",
    "flwr_privacy.accounting",
    "flwr_privacy.privacy.card",
    "flwr_privacy.privacy.ledger",
    "flwr_privacy.simulations.engines.inline",
    "flwr_privacy.simulations.testing",
    "flwr_privacy.errors",
    "flwr_privacy",
)
"""Packages whose `__all__` is public, in the order in which they claim a name."""

_log = logging.getLogger(__name__)


@cache
def homes() -> dict[tuple[str, str], str]:
    """Return the package in which each public name of each package is documented."""
    first: dict[int, str] = {}
    found = {}
    for package in PUBLIC:
        module = importlib.import_module(package)
        for name in module.__all__:
            found[package, name] = first.setdefault(id(getattr(module, name)), package)
    return found


def skip(app: Sphinx, what: str, name: str, obj: Any, skipped: bool, options: Any) -> bool | None:
    """Leave out a name of a package that has its entry in another."""
    module = app.env.current_document.autodoc_module
    home = homes().get((module, name), module)
    return True if what == "module" and home != module else None


def complete(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Add to the text of a package its constants, and links to what is documented in another."""
    names = [(other, home) for (package, other), home in homes().items() if package == name]
    if what != "module":
        return
    for text, here in (("On this page", True), ("Importable from here, too", False)):
        places = [(other, home) for other, home in names if (home == name) == here]
        links = [f":py:obj:`~{home}.{other}`" for other, home in places]
        if links:
            lines += ["", f"{text}: {', '.join(links)}."]
    for other, home in names:
        if home == name and is_constant(value := getattr(obj, other)):
            shown = [f"   :value: {value!r}"] if isinstance(value, str | int | float) else []
            text = [f"   {line}" for line in constant_text(name, other)]
            lines += ["", f".. py:data:: {other}", *shown, "", *text, ""]


def shorten(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str, returns: str
) -> tuple[str, str] | None:
    """Show a default that is an object of ours as a call without arguments."""
    if not signature:
        return None
    short = re.sub(r"=(\w+)\((?:[^()]|\([^()]*\))*\)", r"=\1()", signature)
    return short.replace("=<factory>", "=..."), returns


def is_constant(value: Any) -> bool:
    """Tell what autodoc leaves out: values, and types that are written out."""
    return not isinstance(value, type) and not inspect.isroutine(value)


def constant_text(package: str, name: str) -> list[str]:
    """Return what the source says below a constant that a package imports."""
    module = ModuleAnalyzer.for_module(package)
    for node in ast.walk(ast.parse(module.code)):
        if isinstance(node, ast.ImportFrom) and name in {alias.name for alias in node.names}:
            parent = (
                package if module.srcname.endswith("__init__.py") else package.rpartition(".")[0]
            )
            return constant_text(resolve_name("." * node.level + str(node.module), parent), name)
    text = module.find_attr_docs().get(("", name), [])
    if not text:
        _log.warning("no text below %s in %s", name, package, type="api", subtype="missing")
    return text


def missing(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of each public name that has no entry."""
    entries = env.domains.python_domain.objects
    for full in sorted({f"{home}.{name}" for (_, name), home in homes().items()}):
        if full not in entries:
            _log.warning("no entry for %s", full, type="api", subtype="missing")


def link_names(app: Sphinx, document: nodes.document) -> None:
    """Make links of the names of this library in running text."""
    for literal in list(_names_in(document)):
        target = literal.astext()
        link = pending_xref(
            "", refdomain="py", reftype="obj", reftarget=target, refwarn=False, refexplicit=False
        )
        link["refdoc"] = app.env.current_document.docname
        literal.replace_self(link)
        link += literal


def _names_in(document: nodes.document) -> Iterator[nodes.literal]:
    for literal in document.findall(nodes.literal):
        plain = not isinstance(literal.parent, nodes.reference | pending_xref | nodes.title)
        if plain and re.fullmatch(r"flwr_privacy(\.\w+)+", literal.astext()):
            yield literal


def link_root(app: Sphinx, docname: str, content: list[str]) -> None:
    """Lead links to pages of the repository's root to the pages that include them."""
    root = r"\]\((?:\.\./)+(SECURITY|CONTRIBUTING|CHANGELOG)\.md"
    content[0] = re.sub(root, lambda found: f"](/about/{found[1].lower()}.md", content[0])


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the above to Sphinx."""
    app.connect("autodoc-skip-member", skip)
    app.connect("autodoc-process-docstring", complete)
    app.connect("autodoc-process-signature", shorten)
    app.connect("env-check-consistency", missing)
    app.connect("source-read", link_root)
    app.connect("doctree-read", link_names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
