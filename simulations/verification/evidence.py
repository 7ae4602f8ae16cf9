"""Collects what a privacy card can be compared with: the run folder, and what nodes handed over."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr_privacy.errors import DataError, InvalidParameterError
from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.privacy.card.asked_file import AskedFile
from flwr_privacy.privacy.card.folder import ASKED, CARD, METRICS, SUMMARY
from flwr_privacy.privacy.ledger import Entry, Ledger
from flwr_privacy.privacy.ledger.signed_head import SignedHead, heads_from_json
from flwr_privacy.simulations.settings.metrics_file import rounds_in
from flwr_privacy.wire.pins import Pins

__all__ = ["Evidence", "NodeEvidence", "RunFiles", "gather"]

_SIMULATED = ("ray", "inline")  # engines

Entries = dict[str, tuple[Entry, ...]]


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """What a run folder has beside the card. The server wrote it all, but for the ledgers.

    Parameters
    ----------
    lines : sequence of dict, optional
        The rounds; None where the folder has no ``metrics.jsonl``.
    asked : AskedFile, optional
        Requests since the last checkpoint.
    summary : mapping, optional
        The summary that the command line writes.
    ledgers : dict
        Entries of the clients' ledgers, by client. A simulation has them in its folder.
    """

    lines: Sequence[Mapping[str, Any]] | None = None
    asked: AskedFile | None = None
    summary: Mapping[str, Any] | None = None
    ledgers: Entries = field(default_factory=dict)

    @property
    def simulated(self) -> bool:
        """Whether the folder says that all clients of the run were simulated."""
        return self.summary is not None and self.summary.get("engine") in _SIMULATED

    @classmethod
    def read(cls, folder: Path) -> "RunFiles":
        """Read a run folder.

        Raises
        ------
        DataError
            If one of the server's files is damaged.
        LedgerError
            If a ledger is.
        """
        metrics, asked, summary = (folder / name for name in (METRICS, ASKED, SUMMARY))
        return cls(
            lines=rounds_in(metrics) if metrics.is_file() else None,
            asked=_asked(asked) if asked.is_file() else None,
            summary=_summary(summary) if summary.is_file() else None,
            ledgers=dict(_ledger(path) for path in sorted(folder.rglob("*.ledger"))),
        )


@dataclass(frozen=True, kw_only=True)
class NodeEvidence:
    """What whoever verifies got from the nodes, past the server.

    Parameters
    ----------
    pins : Pins, optional
        The clients' public keys.
    heads : tuple of SignedHead
        Heads that the nodes signed.
    ledgers : dict
        Entries of the nodes' ledgers, by client.
    """

    pins: Pins | None = None
    heads: tuple[SignedHead, ...] = ()
    ledgers: Entries = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.pins is not None or bool(self.heads or self.ledgers)

    @classmethod
    def read(
        cls, *, pins: Path | None = None, heads: Iterable[Path] = (), ledgers: Iterable[str] = ()
    ) -> "NodeEvidence":
        """Read files.

        Parameters
        ----------
        pins : Path, optional
            TOML file of pinned keys.
        heads : iterable of Path
            Files of signed heads.
        ledgers : iterable of str
            Ledgers, each as ``FILE``, which is named for its client, or ``CLIENT=FILE``.

        Raises
        ------
        InvalidParameterError
            If a file cannot be read, or a client has two ledgers.
        LedgerError
            If a ledger is damaged.
        """
        found: Entries = {}
        for given in ledgers:
            client, _, path = given.rpartition("=")
            if not Path(path).is_file():
                raise InvalidParameterError("--ledger", given, "a file, or CLIENT=FILE")
            named, entries = _ledger(Path(path))
            if (client or named) in found:
                raise InvalidParameterError("--ledger", given, "one ledger for each client")
            found[client or named] = entries
        return cls(
            pins=None if pins is None else Pins.read(pins),
            heads=tuple(head for path in heads for head in _heads(path)),
            ledgers=found,
        )


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A card, and all that it is compared with.

    Parameters
    ----------
    card : PrivacyCard
        The card.
    run : RunFiles, optional
        Its run folder; None for a card alone.
    nodes : NodeEvidence
        What came from the nodes.
    """

    card: PrivacyCard
    run: RunFiles | None = None
    nodes: NodeEvidence = field(default_factory=NodeEvidence)


def gather(place: Path, nodes: NodeEvidence) -> Evidence:
    """Read a card, with its run folder if that is given.

    Parameters
    ----------
    place : Path
        A run folder, or the file of a card. What lies beside the file is not looked at.
    nodes : NodeEvidence
        What came from the nodes.

    Raises
    ------
    InvalidParameterError
        If there is no card.
    DataError
        If the card or a file of the folder is damaged.
    LedgerError
        If a ledger of the folder is.
    """
    path = place / CARD if place.is_dir() else place
    if not path.is_file():
        raise InvalidParameterError("run", str(place), f"the folder of a run with a {CARD}")
    try:
        card = PrivacyCard.from_json(_content(path))
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    return Evidence(card=card, run=RunFiles.read(place) if place.is_dir() else None, nodes=nodes)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _asked(path: Path) -> AskedFile:
    try:
        return AskedFile.from_json(_content(path))
    except DataError as error:
        raise DataError(f"{path} {error}") from error


def _summary(path: Path) -> Mapping[str, Any]:
    try:
        summary = json.loads(_content(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: no JSON ({error})") from error
    if not isinstance(summary, dict):
        raise DataError(f"{path}: no JSON object")
    return summary


def _heads(path: Path) -> tuple[SignedHead, ...]:
    try:
        return heads_from_json(path.read_bytes())
    except OSError as error:
        allowed = f"a file that can be read ({error.strerror})"
        raise InvalidParameterError("--head", str(path), allowed) from error
    except InvalidParameterError as error:
        parameter = f"--head {path}: {error.parameter}"
        raise InvalidParameterError(parameter, error.value, error.allowed) from None


def _ledger(path: Path) -> tuple[str, tuple[Entry, ...]]:
    """Return the client of a ledger by the file's name, and the entries.

    In a simulation the data set ``images`` of client 3 has the ledger ``images@3.ledger``.
    """
    return path.stem.rpartition("@")[2], Ledger(path, data_set=path.stem).entries()
