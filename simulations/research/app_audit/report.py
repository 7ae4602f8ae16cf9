"""The report of an audit: its findings, as a page, as JSON, and as JUnit's XML."""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from markupsafe import Markup

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.reports.page import rendered
from flwr_privacy.simulations.reports.pieces import number_text
from flwr_privacy.wire.files import write_text

from .findings import LEAK, LEFT_OUT, PARTS, REFUTED, Finding

__all__ = ["AuditReport"]

_HUMBLE = (
    "What was found proves a leak to the adversary that stands beside it. What was not found "
    "proves nothing: better attacks exist, and no audit shows that an app is private."
)


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """What an audit found.

    Parameters
    ----------
    name : str
        The app's name.
    folder : Path
        Where the audit is.
    settings : mapping
        Of the audit; what looks like a secret in the app's configuration is masked.
    seconds : float
        How long it took, what was kept from before not counted.
    findings : tuple of Finding
        In the order of the parts.
    """

    name: str
    folder: Path
    settings: Mapping[str, Any]
    seconds: float
    findings: tuple[Finding, ...]

    @property
    def leaks(self) -> tuple[Finding, ...]:
        """The findings that prove a leak, and promises that are refuted."""
        return tuple(f for f in self.findings if f.verdict in (LEAK, REFUTED))

    def finding(self, name: str) -> Finding | None:
        """Return the finding of a name; None if there is none."""
        return next((f for f in self.findings if f.name == name), None)

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON can hold it."""
        return {
            "name": self.name,
            "settings": dict(self.settings),
            "seconds": self.seconds,
            "findings": [f.as_json() for f in self.findings],
        }

    @property
    def page(self) -> Path:
        """The HTML page."""
        return self.folder / "audit.html"

    def write(self) -> None:
        """Write the page and the JSON into the folder.

        Raises
        ------
        InvalidParameterError
            If they cannot be written.
        """
        try:
            write_text(self.folder / "audit.json", json.dumps(self.as_json(), indent=1) + "\n")
            write_text(self.page, self._html)
        except OSError as error:
            allowed = f"a folder that can be written ({error.strerror})"
            raise InvalidParameterError("out", str(self.folder), allowed) from error

    def write_junit(self, path: str | Path) -> None:
        """Write the findings as JUnit's XML: leaks and refuted promises are failures.

        Raises
        ------
        InvalidParameterError
            If the file cannot be written.
        """
        failed = self.leaks
        suite = ElementTree.Element(
            "testsuite",
            name=f"flwr-privacy audit {self.name}",
            tests=str(len(self.findings)),
            failures=str(len(failed)),
            skipped=str(sum(f.verdict == LEFT_OUT for f in self.findings)),
            time=str(self.seconds),
        )
        for one in self.findings:
            case = ElementTree.SubElement(suite, "testcase", classname=one.part, name=one.name)
            if one in failed:
                ElementTree.SubElement(case, "failure", message=one.said).text = one.adversary
            elif one.verdict == LEFT_OUT:
                ElementTree.SubElement(case, "skipped", message=one.said)
        text = ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)
        try:
            write_text(Path(path), text + "\n")
        except OSError as error:
            allowed = f"a file that can be written ({error.strerror})"
            raise InvalidParameterError("junit", str(path), allowed) from error

    @cached_property
    def _html(self) -> str:
        parts = {
            heading: [f for f in self.findings if f.part == part] for part, heading in PARTS.items()
        }
        title = f"What the server learns from {self.name}"
        section = rendered(
            "audit.html",
            report=self,
            parts={heading: found for heading, found in parts.items() if found},
            humble=_HUMBLE,
            picture=self._picture,
            shown=_shown,
        )
        return str(rendered("report.html", title=title, sections=[section], about={}))

    def _picture(self, name: str) -> Markup:
        """Return a picture of the folder as what an image's `src` takes."""
        found = next(self.folder.rglob(name))
        data = base64.b64encode(found.read_bytes()).decode()
        return Markup(f"data:image/png;base64,{data}")


def _shown(cell: Any) -> Any:
    """Return a cell of a table as a page shows it."""
    if isinstance(cell, float):
        return int(cell) if cell.is_integer() else number_text(cell)
    return cell
