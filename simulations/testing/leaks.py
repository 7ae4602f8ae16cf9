"""Limits on what an audit of an app may find, as a check of a test."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.app_audit.audit import audit
from flwr_privacy.simulations.research.app_audit.report import AuditReport

__all__ = ["assert_leaks_less_than"]


def assert_leaks_less_than(
    app: str | Path | AuditReport,
    limits: Mapping[str, float] | None = None,
    *,
    allowed: Collection[str] = (),
    **settings: Any,
) -> AuditReport:
    """Audit an app, and fail if it leaks more than it may.

    Parameters
    ----------
    app : path or AuditReport
        The app's folder, or an audit of it.
    limits : mapping of str to float, optional
        The largest number that may be measured: by ``"finding: number"``, as the audit's JSON names
        them. A number that was not measured fails the test, as it says nothing.
    allowed : collection of str, default ()
        Names of findings that may be leaks, or promises that are refuted. All others fail the test.
    **settings
        Of `flwr_privacy.audit`.

    Returns
    -------
    AuditReport
        The audit.

    Raises
    ------
    AssertionError
        If there is another leak, or a number is larger.
    InvalidParameterError
        If a limit is not of the form above, or settings stand beside a finished audit.
    """
    __tracebackhide__ = True
    if isinstance(app, AuditReport):
        if settings:
            raise InvalidParameterError("settings", sorted(settings), "none: the audit is finished")
        report = app
    else:
        report = audit(app, **settings)
    limits = limits or {}
    over = [line for name, most in limits.items() if (line := _over(report, name, most))]
    limited = {name.partition(":")[0] for name in limits}
    over += [
        f"{one.name}: {one.said}"
        for one in report.leaks
        if one.name not in allowed and one.name not in limited
    ]
    if over:
        raise AssertionError("\n".join([f"{report.name} leaks more than it may:", *over]))
    return report


def _over(report: AuditReport, name: str, most: float) -> str:
    """Return what is wrong with a measured number; empty if it is within its limit."""
    finding, colon, number = name.partition(":")
    if not colon:
        raise InvalidParameterError("limits", name, "'finding: number', as the JSON names them")
    found = report.finding(finding)
    measured = None if found is None else found.numbers.get(number.strip())
    if not isinstance(measured, int | float):
        return f"{name} was not measured"
    return f"{name} is {measured:.4g}, at most {most:g} may be" if measured > most else ""
