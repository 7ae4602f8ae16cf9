"""Outages: a whole exchange is lost once, or all of it but one client's part."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from .federations import SmallFederation
from .grid import Strike
from .matrix import DEFECT, REFUSED, Cell, clean_training, verdict_of
from .training import Outcome, train

__all__ = ["LOST", "Exchange", "exchanges", "outages"]

LOST = {
    "all requests": "no client gets its request",
    "all replies": "all clients answer, and no answer arrives",
    "all requests but one": "only the client that is asked first gets its request",
}
"""What is lost of an exchange."""

Exchange = tuple[str, int, int]
"""Phase, round and number of the request."""


def exchanges(clean: Outcome) -> dict[Exchange, list[Strike]]:
    """Return the exchanges of a training: the strikes that lose all their requests."""
    found: dict[Exchange, list[Strike]] = defaultdict(list)
    seen: Counter[tuple[str, str, int]] = Counter()
    for client, phase, server_round, request in clean.asked:
        seen[client, phase, server_round] += 1
        found[phase, server_round, request].append(
            Strike(
                fault="lost request",
                phase=phase,
                server_round=server_round,
                client=client,
                nth=seen[client, phase, server_round],
            )
        )
    return dict(found)


def outages(federation: SmallFederation, *, lost: Sequence[str] = tuple(LOST)) -> list[Cell]:
    """Return a cell for each exchange of a federation and each way to lose it.

    Where all replies are lost, a training that goes on must end at the model of the training in
    which all requests are lost. An error must name the phase, or the clients or answers that are
    missing.

    Parameters
    ----------
    federation : SmallFederation
        The scheme.
    lost : sequence of str
        Keys of `LOST`.

    Raises
    ------
    RuntimeError
        As `clean_training`.
    """
    clean = clean_training(federation)
    cells = []
    for exchange, strikes in exchanges(clean).items():
        silent = train(federation, *strikes)
        for mode in lost:
            hit, same = strikes, None
            if mode == "all replies":
                hit, same = [replace(one, fault="drop") for one in strikes], [silent]
            elif mode == "all requests but one":
                hit = strikes[1:]
            if hit:  # some exchanges are with one client
                outcome = silent if hit is strikes else train(federation, *hit)
                cells.append(_cell(clean, outcome, same, exchange, mode=mode, hits=len(hit)))
    return cells


def _cell(
    clean: Outcome,
    outcome: Outcome,
    silent: Sequence[Outcome] | None,
    exchange: Exchange,
    *,
    mode: str,
    hits: int,
) -> Cell:
    phase, server_round, request = exchange
    verdict, why = verdict_of(clean, outcome, silent=silent)
    if verdict != DEFECT and len(outcome.struck) < hits:
        verdict, why = DEFECT, f"only {len(outcome.struck)} of {hits} messages were lost"
    if verdict == REFUSED and not _says_what(why, phase):
        verdict, why = DEFECT, f"the error names neither the phase nor what is missing: {why}"
    return Cell(
        fault=mode,
        phase=f"{phase} (round {server_round}, request {request})",
        verdict=verdict,
        why=why,
    )


def _says_what(error: str, phase: str) -> bool:
    """Tell whether an error names the phase, or the clients or answers that are missing."""
    return any(word in error for word in (phase, "client", "answer"))
