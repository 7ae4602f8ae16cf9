"""Finds the rounds that a run folder shows and its checkpoint lacks, and gives them up if asked.

A checkpoint may be older than its folder: it was restored from a backup, or the disk lost the last
one. Its card lacks the charges of the later rounds, and a run that goes on from it asks for these
rounds again, about another model. So it is refused, unless the user gives the rounds up: then their
charges stay on the card, and their numbers are not used again.
"""

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from flwr_privacy.errors import CheckpointError, DataError
from flwr_privacy.privacy.card import CardRelease, PrivacyCard
from flwr_privacy.privacy.card.asked_file import charge_in, text_of

from .run_files import content_of

__all__ = ["after_lost_rounds", "card_in", "lacking", "last_round_shown", "question_names"]


def card_in(path: Path, experiment_id: str) -> PrivacyCard | None:
    """Return the privacy card of an experiment in a file; None if the file has none of it.

    Raises
    ------
    CheckpointError
        If the card is damaged or cannot be read.
    """
    content = content_of(path)
    if content is None:
        return None
    try:
        card = PrivacyCard.from_json(content)
    except DataError as error:
        raise CheckpointError(
            f"{path} is damaged ({error}); with the newest checkpoint a run goes on without it"
        ) from error
    return card if card.experiment_id == experiment_id else None


def question_names(card: PrivacyCard) -> set[str]:
    """Return the names of the charges on a card."""
    return {_name(release) for release in card.releases}


def lacking(
    card: PrivacyCard, settled: Collection[str], *, done: int = -1
) -> Callable[[str, str], bool]:
    """Return a function that tells by the names of a charge and its client what a run lacks.

    Parameters
    ----------
    card : PrivacyCard
        The charges that the run has.
    settled : collection of str
        Names of charges that it has, or that were declined.
    done : int, default -1
        The last round whose charges it has, all of them.
    """
    # Of a setup, which clients that come later have under the same name.
    first = {
        (_name(release), client)
        for release in card.releases
        if release.server_round == 0
        for client in release.clients
    }

    def lacks(name: str, client: str) -> bool:
        if round_of(name) == 0:
            return (name, client) not in first
        return round_of(name) > done and name not in settled

    return lacks


def last_round_shown(
    lines: Sequence[dict[str, Any]], card: PrivacyCard | None, settled: Collection[str]
) -> int:
    """Return the last round that a folder shows to be over; -1 if it shows none.

    Parameters
    ----------
    lines : sequence of dict
        The history in the folder.
    card : PrivacyCard, optional
        The card in the folder. It is written before the checkpoint: a run that is killed in between
        leaves a card with one round more.
    settled : collection of str
        The questions that show nothing: the checkpoint has their charges, or they were put since
        the newest one and are not over.
    """
    rounds = [int(line["round"]) for line in lines]
    if card is not None:
        rounds += [round_of(question) for question in question_names(card) - set(settled)]
    return max(rounds, default=-1)


def after_lost_rounds(
    state: dict[str, Any],
    lines: Sequence[dict[str, Any]],
    card: PrivacyCard | None,
    *,
    done: int,
    last: int,
) -> dict[str, Any]:
    """Return a checkpoint that goes on after the rounds that it lacks, with all their charges.

    Parameters
    ----------
    state : dict
        The checkpoint.
    lines, card
        As of `last_round_shown`.
    done : int
        The last round that is over in the checkpoint.
    last : int
        The last round that is given up.

    Raises
    ------
    CheckpointError
        If the folder does not have the charges of these rounds.
    """
    card = card or PrivacyCard.from_json(state["card"])
    known = max(PrivacyCard.from_json(state["card"]).answers().charged, *map(_charged, lines), 0)
    if card.answers().charged < known:
        raise CheckpointError(
            f"privacy-card.json is older than metrics.jsonl, too: it has {card.answers().charged} "
            f"charges of {known}, and nothing else on the server has the others. Put the newest "
            "card back, or begin a new experiment in an empty folder"
        )
    lost = [{**line, "lost": True} for line in lines if line["round"] > done]
    text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lost)
    history = "".join(
        entry
        for entry in state["history"].splitlines(keepends=True)
        if json.loads(entry)["round"] <= done
    )
    return {
        **state,
        "round": last,
        "line": {},
        "history": history + text,
        "card": card.to_json(),
    }


def _name(release: CardRelease) -> str:
    return text_of(release.phase, release.server_round, release.request)


def round_of(question: str) -> int:
    """Return the round of a question from its name."""
    return charge_in(question)[1]


def _charged(line: dict[str, Any]) -> int:
    return int(line.get("charged", 0))
