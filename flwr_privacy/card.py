"""The privacy card of a run: its promise and every charge, so that epsilon can be recomputed."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from .accounting import Charge, spent, supports
from .errors import DataError, InvalidParameterError
from .guarantee import Guarantee

__all__ = ["PrivacyCard", "Release"]

_VERSION = 1
_ACCOUNTANTS = ("gdp", "rdp", "pld")
_TOLERANCE = 1e-6  # relative; what rounding and another version of a library may move


@dataclass(frozen=True, kw_only=True)
class Release:
    """What one question made some clients release.

    Parameters
    ----------
    phase : str
        Phase of the question.
    server_round, request : int
        Round, and number of the question in it.
    charge : Charge
        What it cost each of them.
    clients : tuple of str
        All that were asked and did not say that they released nothing: a reply that was lost or
        came too late has cost its client as much as any other.
    """

    phase: str
    server_round: int
    request: int
    charge: Charge
    clients: tuple[str, ...]


@dataclass(kw_only=True)
class PrivacyCard:
    """The promise of a run, every charge, and what they come to.

    Parameters
    ----------
    experiment_id : str
        Identity of the experiment.
    guarantee : Guarantee
        The promise.
    releases : list of Release
        Every release so far.
    stated : dict
        Epsilon of the client that spent most, by accountant, as the run stated it.
    """

    experiment_id: str
    guarantee: Guarantee
    releases: list[Release] = field(default_factory=list)
    stated: dict[str, float] = field(default_factory=dict)

    def charges(self) -> dict[str, list[Charge]]:
        """Return the charges of each client."""
        charges: dict[str, list[Charge]] = {}
        for release in self.releases:
            for client in release.clients:
                charges.setdefault(client, []).append(release.charge)
        return charges

    def epsilon(self, accountant: str) -> float | None:
        """Return the epsilon of the client that spent most; None if the accountant cannot tell.

        Parameters
        ----------
        accountant : {"gdp", "rdp", "pld"}
            How to compute it, at the guarantee's delta.
        """
        # Clients with the same charges spent the same: there are few different histories.
        histories = {tuple(sorted(Counter(c).items(), key=repr)) for c in self.charges().values()}
        delta = self.guarantee.delta
        totals = []
        for history in histories:
            charges = [_repeated(charge, count) for charge, count in history]
            if delta is None or not all(supports(charge, accountant) for charge in charges):
                return None
            totals.append(spent(charges, delta=delta, accountant=accountant))
        return max(totals, default=0.0)

    def state(self, accountants: Sequence[str] = _ACCOUNTANTS) -> None:
        """Compute and keep what the charges come to."""
        totals = {name: self.epsilon(name) for name in accountants}
        self.stated = {name: total for name, total in totals.items() if total is not None}

    def verify(self) -> dict[str, tuple[float, float]]:
        """Recompute what the card states.

        Returns
        -------
        dict
            Stated and recomputed epsilon by accountant.

        Raises
        ------
        DataError
            If a number does not agree, or the guarantee is exceeded.
        """
        numbers: dict[str, tuple[float, float]] = {}
        for name, stated in self.stated.items():
            computed = self.epsilon(name)
            if computed is None or abs(computed - stated) > _TOLERANCE * max(1.0, computed):
                raise DataError(
                    f"the card states epsilon {stated} ({name}), its charges give {computed}"
                )
            numbers[name] = (stated, computed)
        bound = self.guarantee.epsilon
        if bound is not None and self.releases:
            if not numbers:
                raise DataError("the card has releases and states no epsilon")
            least = min(computed for _, computed in numbers.values())
            if least > bound * (1 + _TOLERANCE):
                raise DataError(f"the charges give epsilon {least}, the guarantee says {bound}")
        return numbers

    def to_json(self) -> str:
        """Return the card as JSON."""
        releases = [
            {
                "phase": release.phase,
                "round": release.server_round,
                "request": release.request,
                "charge": release.charge.to_dict(),
                "clients": list(release.clients),
            }
            for release in self.releases
        ]
        document = {
            "version": _VERSION,
            "experiment_id": self.experiment_id,
            "guarantee": self.guarantee.to_dict(),
            "epsilon": self.stated,
            "releases": releases,
        }
        return json.dumps(document, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> "PrivacyCard":
        """Read a card.

        Raises
        ------
        DataError
            If the text is no card of this version.
        """
        try:
            document = json.loads(text)
            if document["version"] != _VERSION:
                raise DataError(f"a privacy card of version {document['version']!r}")
            releases = [
                Release(
                    phase=str(entry["phase"]),
                    server_round=int(entry["round"]),
                    request=int(entry["request"]),
                    charge=Charge.from_dict(entry["charge"]),
                    clients=tuple(map(str, entry["clients"])),
                )
                for entry in document["releases"]
            ]
            return cls(
                experiment_id=str(document["experiment_id"]),
                guarantee=Guarantee.from_dict(document["guarantee"]),
                releases=releases,
                stated={str(k): float(v) for k, v in document["epsilon"].items()},
            )
        except (ValueError, KeyError, TypeError, AttributeError, InvalidParameterError) as error:
            raise DataError(f"no privacy card ({type(error).__name__}: {error})") from error

    def to_html(self) -> str:
        """Return the card as a page that refers to nothing outside of it."""
        charges = self.charges()
        counts = Counter(len(own) for own in charges.values())
        promise = self.guarantee.to_dict()
        rows = [
            *((key.replace("_", " "), _words(value)) for key, value in promise.items()),
            *((f"epsilon ({name})", f"{total:.6g}") for name, total in self.stated.items()),
            ("clients charged", str(len(charges))),
            ("releases", ", ".join(f"{n} x {c}" for c, n in sorted(counts.items())) or "none"),
            ("experiment", self.experiment_id),
        ]
        table = "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>\n" for k, v in rows)
        return _PAGE.format(
            scheme=escape(self.guarantee.scheme),
            text=escape(self.guarantee.text()),
            table=table,
            json=escape(self.to_json()),
        )


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Privacy card: {scheme}</title>
<meta name="viewport" content="width=device-width">
<style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 48rem }}
body {{ margin: 2rem auto; padding: 0 1rem }}
th {{ text-align: left; vertical-align: top; padding-right: 1.5rem; white-space: nowrap }}
td, th {{ padding-bottom: .4rem }}
pre {{ overflow: auto; max-height: 24rem; font-size: 12px }}
</style></head>
<body><h1>Privacy card: {scheme}</h1>
<p>{text}</p>
<table>
{table}</table>
<details><summary>Every charge (this is the card as JSON)</summary><pre>{json}</pre></details>
</body></html>
"""


def _repeated(charge: Charge, times: int) -> Charge:
    values: Mapping[str, Any] = {**charge.to_dict(), "count": charge.count * times}
    return Charge.from_dict(values)


def _words(value: Any) -> str:
    return "; ".join(map(str, value)) if isinstance(value, list) else str(value)
