"""Names the files beside a privacy card, makes the folder of a run without one, finds cards."""

import os
from datetime import UTC, datetime
from pathlib import Path

from flwr_privacy.errors import InvalidParameterError

__all__ = [
    "ASKED",
    "CARD",
    "CARD_PAGE",
    "METRICS",
    "NONE",
    "RUNS_VARIABLE",
    "SUMMARY",
    "TEST_SEED",
    "new_card_folder",
    "newest_card",
]

RUNS_VARIABLE = "FLWR_PRIVACY_RUNS"
"""Environment variable with the folder of the cards' folders; empty or `NONE` for no cards."""

NONE = "none"

CARD, CARD_PAGE = "privacy-card.json", "privacy-card.html"
METRICS, ASKED, SUMMARY = "metrics.jsonl", "asked.json", "summary.json"

TEST_SEED = "test-seed-"
"""Begins the name of an experiment of the command line whose noise is from a seed."""

_DEFAULT = "flwr-privacy-runs"
_OWN = 0o700  # under Poisson sampling it is a secret who took part
_IGNORED = "# Made by flwr-privacy.\n*\n"


def runs_folder() -> Path | None:
    """Return the folder in which runs leave their cards by default; None if they leave none."""
    name = os.environ.get(RUNS_VARIABLE, _DEFAULT).strip()
    return None if name in ("", NONE) else Path(name).expanduser().absolute()


def newest_card(*others: Path) -> Path:
    """Return the card that was written last of those that runs left by default.

    Parameters
    ----------
    *others : Path
        Further folders whose folders are runs.

    Raises
    ------
    InvalidParameterError
        If there is none.
    """
    parent = runs_folder()
    places = [*([] if parent is None else [parent]), *others]
    cards = [card for place in places for card in place.glob(f"*/{CARD}")]
    if not cards:
        where = f"{RUNS_VARIABLE} = '{NONE}'" if parent is None else str(parent)
        allowed = f"the folder of a run or a card: there is no card in the default place, {where}"
        raise InvalidParameterError("run", None, allowed)
    return max(cards, key=lambda card: (card.stat().st_mtime_ns, card.parent.name))


def new_card_folder(scheme: str) -> Path | None:
    """Make the folder of a run, ``<time>-<scheme>``; return None where cards are turned off.

    Raises
    ------
    InvalidParameterError
        If the folder cannot be made.
    """
    parent = runs_folder()
    if parent is None:
        return None
    began = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{scheme}"
    try:
        if not parent.is_dir():
            parent.mkdir(mode=_OWN, parents=True, exist_ok=True)
            (parent / ".gitignore").write_text(_IGNORED, encoding="utf-8")
        number = 1
        while True:
            path = parent / (began if number == 1 else f"{began}-{number}")
            try:
                path.mkdir(mode=_OWN)
            except FileExistsError:  # another run of this second, maybe of another process
                number += 1
                continue
            return path
    except OSError as error:
        allowed = (
            f"a folder that can be written, for the privacy card ({error.strerror}). Set "
            f"{RUNS_VARIABLE} to another folder, or to '{NONE}' for no card; or give the strategy "
            "a run_dir"
        )
        raise InvalidParameterError(RUNS_VARIABLE, str(parent), allowed) from error
