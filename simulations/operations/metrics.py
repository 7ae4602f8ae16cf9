"""Writes numbers of a node for Prometheus' textfile collector; none of them is a secret.

What a monitor may know is what the server knows anyway: that a charge was made for a question that
the server asked. A charge whose sample is a secret of users (Poisson sampling of whole clients) is
left out, also from epsilon: whether there was one must not be seen. Sizes of files and free space
grow with such answers, so they are left out as well; `node check` on the node has them.
"""

import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from flwr_privacy.accounting import fitting, spent
from flwr_privacy.errors import InvalidParameterError, LedgerError
from flwr_privacy.privacy.ledger import Entry, Ledger
from flwr_privacy.privacy.policy import Policy

from .checks import FAIL, OK, WARN, expiry
from .node_checks import NodeFiles, check_files

__all__ = ["metrics_of"]

PREFIX = "flwr_privacy_"
LEVELS = {OK: 0, WARN: 1, FAIL: 2}


@dataclass
class _Metric:
    help: str
    samples: list[tuple[Mapping[str, str], float]] = field(default_factory=list)


def metrics_of(files: NodeFiles, node: str | None = None) -> str:
    """Return a node's metrics in Prometheus' text format.

    Parameters
    ----------
    files : NodeFiles
        What the node has. Without a state folder there are no numbers of ledgers.
    node : str, optional
        A name in every number, for several nodes on one machine.
    """
    found: dict[str, _Metric] = {}

    def add(name: str, text: str, value: float, **labels: str) -> None:
        named = labels if node is None else {"node": node, **labels}
        found.setdefault(PREFIX + name, _Metric(text)).samples.append((named, value))

    add(
        "info",
        "Versions on this node.",
        1,
        flwr=version("flwr"),
        flwr_privacy=version("flwr-privacy"),
    )
    add("written_seconds", "When this file was written.", datetime.now(UTC).timestamp())
    worst: dict[str, int] = defaultdict(int)
    for check in check_files(files):
        worst[check.name] = max(worst[check.name], LEVELS[check.status])
    for name, level in worst.items():
        add("check", "Checks of the node's files: 0 ok, 1 warn, 2 fail.", level, check=name)
    if files.certificate is not None:
        try:
            end = expiry(files.certificate)[1].timestamp()
        except (OSError, ValueError):  # the check above fails
            end = 0.0
        add("certificate_end_seconds", "When the certificate ends.", end)
    policy = _policy(files.policy)
    if policy is not None and policy.max_epsilon is not None:
        add("policy_max_epsilon", "Largest epsilon that the policy allows.", policy.max_epsilon)
    if files.state is not None and os.path.isdir(files.state):
        damaged = 0
        for path in sorted(files.state.glob("*.ledger")):
            try:
                for name, text, value, labels in _of_ledger(path, policy):
                    add(name, text, value, data_set=path.stem, **labels)
            except LedgerError:  # `ledger check` says why
                damaged += 1
        # Without names: that a data set has a ledger says that there was a charge.
        add("ledgers_unreadable", "Ledgers that cannot be read.", damaged)
    return "".join(_text(name, metric) for name, metric in found.items())


def _policy(path: Path | None) -> Policy | None:
    try:
        return None if path is None else Policy.read(path)
    except InvalidParameterError:
        return None  # `node check` says why


def _of_ledger(
    path: Path, policy: Policy | None
) -> Iterator[tuple[str, str, float, dict[str, str]]]:
    ledger = Ledger(path, data_set=path.stem).view()
    entries, answered = ledger.entries(), ledger.answered()
    public = [(number, entry) for number, entry in enumerate(entries) if not _is_secret(entry)]
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for number, entry in public:
        groups[entry.scheme, entry.unit].append(number)
    for (scheme, unit), numbers in groups.items():
        labels = {"scheme": scheme, "unit": unit}
        yield "charges", "Charges of a ledger.", len(numbers), labels
        missing = sum(number not in answered for number in numbers)
        yield "charges_unanswered", "Charges that were never answered.", missing, labels
    if public:
        last = max(datetime.fromisoformat(entry.time) for _, entry in public)
        yield "last_charge_seconds", "When the last charge was made.", last.timestamp(), {}
        limits = policy or Policy()
        try:
            own = limits.counted(entry.charge for _, entry in public)
            epsilon = spent(own, delta=limits.delta, accountant=fitting(own))
        except InvalidParameterError:  # no accountant knows such charges
            epsilon = math.inf
        text = "Epsilon of all charges together, at the policy's delta and for its neighbours."
        yield "epsilon", text, epsilon, {}


def _is_secret(entry: Entry) -> bool:
    """Tell whether a guarantee relies on nobody knowing that this client took part."""
    return entry.unit == "user" and entry.charge.sampling < 1


def _text(name: str, metric: _Metric) -> str:
    lines = [f"# HELP {name} {metric.help}", f"# TYPE {name} gauge"]
    for labels, value in metric.samples:
        own = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        shown = "+Inf" if math.isinf(value) else repr(float(value))
        lines.append(f"{name}{{{own}}} {shown}" if own else f"{name} {shown}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
