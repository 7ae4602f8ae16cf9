"""The last part of an audit: the smallest changes that would take leaks away, and what they cost.

Each is the change that `flwr-privacy check` shows; nothing of the app changes here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from flwr_privacy.simulations.inspector.inspection import inspect_app
from flwr_privacy.simulations.inspector.unfit_error import UnfitError
from flwr_privacy.simulations.inspector.wraps import Options

from .findings import LEAK, NOTE, REFUTED, Finding, Table
from .target import Target

__all__ = ["advice"]

_SOLVED_BY_SUMS = ("uploads", "links between rounds", "metrics in the clear")


@dataclass(frozen=True)
class _Step:
    """A change to advise.

    Parameters
    ----------
    name, scheme : str
        Its name, and the scheme of `flwr-privacy check`.
    options : Options
        Beside the scheme.
    gain : str
        What the server would learn then.
    forecast : bool
        Whether the app's server is run to its first round, for a forecast.
    """

    name: str
    scheme: str
    options: Options
    gain: str
    forecast: bool

    @property
    def command(self) -> str:
        """The options of `flwr-privacy check` that show the change."""
        own = self.options
        parts = [f"--scheme {self.scheme}"]
        parts += ["--secure-sum"] if own.secure_sum else []
        parts += [f"--unit {own.unit}"] if own.unit else []
        return " ".join(parts)


_STEPS = (
    _Step(
        "a secure sum",
        "fedavg",
        Options(secure_sum=True),
        "The server would open sums of updates only, and no metrics of single clients. A sum is no "
        "promise: what all clients of a round have in common, and in small cohorts more, stays "
        "readable.",
        forecast=False,
    ),
    _Step(
        "shared noise",
        "central-dp",
        Options(secure_sum=True),
        "The server would open noised sums only: a promise of epsilon = 8 for all data of a "
        "client, against the server too.",
        forecast=True,
    ),
    _Step(
        "noise for single records",
        "udp",
        Options(unit="record"),
        "A promise of epsilon = 8 for each record, by noise on the client: for few clients with "
        "many records. What all records of a client have in common stays readable.",
        forecast=True,
    ),
)


def advice(target: Target, findings: Sequence[Finding]) -> list[Finding]:
    """Return the changes to consider, the smallest first.

    Parameters
    ----------
    target : Target
        The app.
    findings : sequence of Finding
        What the audit found; without a leak nothing is advised.
    """
    wrong = [f.name for f in findings if f.verdict in (LEAK, REFUTED)]
    if not wrong:
        return []
    steps = _STEPS if not set(_SOLVED_BY_SUMS).isdisjoint(wrong) else _STEPS[1:]
    return [_of(step, target) for step in steps]


def _of(step: _Step, target: Target) -> Finding:
    command = f"flwr-privacy check {target.app.path.name} {step.command} --apply"
    table = None
    try:
        found = inspect_app(target.app, step.scheme, step.options, run=step.forecast)
    except UnfitError as unfit:
        said, text = f"{step.gain} Not by itself: {unfit}.", "\n".join(unfit.by_hand)
    else:
        if found.change.empty:
            said, text = f"The app has it already. {step.gain}", ""
        else:
            forecast = f" {_capital(found.forecast)}." if found.forecast else ""
            said = f"{step.gain}{forecast} `{command}` makes the change below."
            text = found.change.diff()
            table = Table(("what it takes from the app",), [[line] for line in found.losses])
    return Finding(
        part="advice",
        name=step.name,
        verdict=NOTE,
        said=said,
        adversary="the server; who else sees what then is in docs/threat-model.md",
        chance="not measured",
        numbers={"command": command},
        table=table,
        text=text,
    )


def _capital(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"
