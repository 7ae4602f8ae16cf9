"""The first part of an audit: what left each node, and what a passive server makes of it."""

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from scipy.stats import binom

from flwr_privacy.wire.message import RECORD

from .findings import LEAK, LEFT_OUT, NOTE, Finding, Table
from .transcript import Exchange, Transcript, arrays_of
from .uploads import CLIPPED, CODED, MASKED, NOISED, PACKED, PLAIN, Upload, described, model_change

__all__ = ["observed"]

SERVER = "the server: it does what the app says, and keeps each answer with the node that sent it"

_NO_CHANCE = "none: it is in the message"
_COUNTS = re.compile(r"num.?examples|num.?samples|n.?samples|dataset.?size|count", re.I)
_NUMBER = re.compile(r"-?\d+\.\d{3,}(?:[eE][-+]?\d+)?")
_IDENTIFIER = 2.0**32  # whole numbers from here on, as the ids of nodes, are no metrics
_LEVEL = 0.05
_READABLE = (PLAIN, CLIPPED, CODED)
_PLURAL = {PLAIN: "as they are"}


def observed(transcript: Transcript) -> list[Finding]:
    """Return what left the nodes of an app, from a transcript of its training."""
    exchanges = transcript.exchanges
    if not exchanges:
        return [_nothing(transcript)]
    uploads = {e.number: u for e in exchanges if (u := described(e)) is not None}
    return [
        _messages(exchanges, uploads),
        *_uploads(uploads),
        *_metrics(exchanges),
        *_errors(exchanges),
        *_repeats(exchanges),
        *_links(transcript),
    ]


def _nothing(transcript: Transcript) -> Finding:
    about = transcript.about
    why = about["error"] or f"the run ended: {about['ended']}"
    if about["network"]:
        why += f"; it asked the network for {', '.join(sorted(set(about['network'])))}"
    return Finding(
        part="left",
        name="nothing was sent",
        verdict=LEFT_OUT,
        said=f"No node was asked anything, so nothing is known of the app. {why}.",
        adversary=SERVER,
        chance="not measured",
    )


def _messages(exchanges: Sequence[Exchange], uploads: dict[int, Upload]) -> Finding:
    """Return the table of what was sent, a row for each kind of answer."""
    kinds: dict[tuple[str, str], list[Exchange]] = defaultdict(list)
    for one in exchanges:
        kinds[one.kind, _form(one)].append(one)
    rows = [
        [
            kind,
            len(those),
            form,
            round(sum(e.sizes[1] for e in those) / len(those)),
            _most_said(uploads[e.number] for e in those if e.number in uploads),
        ]
        for (kind, form), those in kinds.items()
    ]
    sent = sum(e.sizes[1] for e in exchanges)
    nodes, rounds = len({e.node for e in exchanges}), max(e.round for e in exchanges)
    return Finding(
        part="left",
        name="messages",
        verdict=NOTE,
        said=f"{len(exchanges)} answers of {nodes} nodes in {rounds} rounds, {sent:,} bytes. "
        "Flower gives each answer the id of its node: the server knows who sent what.",
        adversary=SERVER,
        chance=_NO_CHANCE,
        numbers={"answers": len(exchanges), "nodes": nodes, "rounds": rounds, "bytes": sent},
        table=Table(("message", "answers", "records", "bytes each", "what it is"), rows),
    )


def _uploads(uploads: dict[int, Upload]) -> Iterator[Finding]:
    """Say what the updates are, the most readable kind first."""
    if not uploads:
        return
    counts = Counter(u.kind for u in uploads.values())
    kind = next(k for k in (*_READABLE, NOISED, PACKED, MASKED) if k in counts)
    those = [u for u in uploads.values() if u.kind == kind]
    share = f"{len(those)} of {len(uploads)} uploads"
    sigma = float(np.median([u.sigma for u in those]))
    norm = float(np.median([u.norm for u in those]))
    if kind in _READABLE:
        said = f"The server reads single clients: {share} left {_PLURAL.get(kind, those[0].said)}."
    elif kind == NOISED:
        said = (
            f"{share} carry noise: {those[0].said}. Whether it is enough is the question of the "
            "promise."
        )
    else:
        said = (
            f"No upload could be read: {share} are {those[0].said}. What the server opens of them "
            "together is another question."
        )
    yield Finding(
        part="left",
        name="uploads",
        verdict=LEAK if kind in _READABLE else NOTE,
        said=said,
        adversary=SERVER,
        chance="an update that is independent of what was seen has correlation 0 with it; "
        "6 standard errors count",
        numbers={"kinds": dict(counts), "sigma": sigma, "norm": norm, "uploads": len(uploads)},
    )


def _metrics(exchanges: Iterable[Exchange]) -> Iterator[Finding]:
    """Say which numbers about a client's data leave in the clear."""
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    for one in exchanges:
        for name, value in _numbers(one.reply):
            values[one.kind, name].append(value)
    told = {k: v for k, v in values.items() if len(set(v)) > 1 or _COUNTS.search(k[1])}
    if not told:
        return
    counts = sorted({name for _, name in told if _COUNTS.search(name)})
    others = sorted({name for _, name in told} - set(counts))
    parts = []
    if counts:
        parts.append(f"the number of records of each client ({', '.join(counts)})")
    if others:
        parts.append(f"numbers that a client computed on its records ({', '.join(others)})")
    yield Finding(
        part="left",
        name="metrics in the clear",
        verdict=LEAK,
        said=f"Beside the arrays the server reads {' and '.join(parts)}, as they are.",
        adversary=SERVER,
        chance=_NO_CHANCE,
        numbers={"counts": counts, "others": others},
        table=Table(
            ("message", "metric", "answers", "least", "most"),
            [[kind, name, len(v), min(v), max(v)] for (kind, name), v in told.items()],
        ),
    )


def _errors(exchanges: Sequence[Exchange]) -> Iterator[Finding]:
    """Show the texts of errors, and say whether they have a client's data in them."""
    failed = [e for e in exchanges if e.error is not None]
    if not failed:
        return
    leaking = [e for e in failed if _has_data(e)]
    texts = Counter(_shortened(e.error or "") for e in failed)
    said = f"{len(failed)} of {len(exchanges)} answers are errors, with their text."
    if leaking:
        said += f" {len(leaking)} of the texts contain values of the client's records."
    yield Finding(
        part="left",
        name="error texts",
        verdict=LEAK if leaking else NOTE,
        said=said,
        adversary=SERVER,
        chance="a number of four digits that is in the records by chance: below 1 in 1,000 each",
        numbers={"errors": len(failed), "with data": len(leaking)},
        table=Table(("error", "answers"), [[text, n] for text, n in texts.most_common(5)]),
    )


def _repeats(exchanges: Sequence[Exchange]) -> Iterator[Finding]:
    """Say what comes again: in another round, or from another node."""
    seen: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for one in exchanges:
        for name, array in arrays_of(one.reply).items():
            if array.size >= 2 and np.any(array):
                digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
                seen[f"{name} {digest}"].add((one.round, one.node))
    again = {name.rpartition(" ")[0]: p for name, p in seen.items() if len(p) > 1}
    if not again:
        return
    rounds = sum(1 for places in again.values() if len({r for r, _ in places}) > 1)
    yield Finding(
        part="left",
        name="arrays that repeat",
        verdict=NOTE,
        said=f"{len(again)} arrays left more than once, bit for bit ({rounds} of them in several "
        "rounds). What was trained or noised anew would differ.",
        adversary=SERVER,
        chance="arrays of two values or more that are drawn anew do not repeat",
        numbers={"arrays": sorted(again)[:20], "in several rounds": rounds},
    )


def _links(transcript: Transcript) -> Iterator[Finding]:
    """Link the updates of two rounds without node ids, by their directions."""
    rounds: dict[int, dict[int, np.ndarray]] = defaultdict(dict)
    for one in transcript.trainings():
        change = model_change(one.request, one.reply)
        if change is not None and np.any(change):
            rounds[one.round][one.node] = change / np.linalg.norm(change)
    right = tries = 0
    chance = []
    for number in sorted(rounds)[:-1]:
        before, after = rounds[number], rounds.get(number + 1, {})
        both = sorted(set(before) & set(after))
        if len(both) < 3:
            continue
        first, second = (np.array([part[n] for n in both]) for part in (before, after))
        near = (first - first.mean(0)) @ (second - second.mean(0)).T
        right += int((near.argmax(axis=1) == np.arange(len(both))).sum())
        tries += len(both)
        chance += [1 / len(both)] * len(both)
    if not tries:
        return
    level = float(np.mean(chance))
    p = float(binom.sf(right - 1, tries, level))
    yield Finding(
        part="left",
        name="links between rounds",
        verdict=LEAK if p < _LEVEL else NOTE,
        said=f"Without node ids, {right} of {tries} updates are linked to the same client's in the "
        f"round before, by their directions (p = {p:.2g}).",
        adversary="whoever sees the updates without the ids of their nodes, as behind a proxy",
        chance=f"{level:.0%} of the updates",
        numbers={"right": right, "tries": tries, "chance": level, "p": p},
    )


def _form(one: Exchange) -> str:
    """Return the records of an answer in a line."""
    if one.reply is None:
        return "an error"
    parts = []
    for name, record in one.reply.items():
        kind = (
            "arrays"
            if isinstance(record, ArrayRecord)
            else ("metrics" if isinstance(record, MetricRecord) else "settings")
        )
        parts.append(f"{name} ({len(record)} {kind})")
    return ", ".join(parts) or "nothing"


def _most_said(uploads: Iterable[Upload]) -> str | None:
    kinds = {u.kind: u.said for u in uploads}
    return "; ".join(kinds.values()) or None


def _numbers(content: RecordDict | None) -> Iterator[tuple[str, float]]:
    """Return the numbers of an answer beside its arrays; those of the schemes' wire are none."""
    for record_name, record in ({} if content is None else content).items():
        if isinstance(record, ArrayRecord) or record_name.partition(".")[0] == RECORD:
            continue
        for name, value in record.items():
            if isinstance(record, ConfigRecord) and name == "code":
                continue  # the status of Flower's older API
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, int | float) and abs(part) < _IDENTIFIER:  # nor NaN
                    yield name, float(part)


def _has_data(one: Exchange) -> bool:
    """Tell whether the text of an error has a value of the client's records."""
    if one.training is None or one.error is None:
        return False
    values = one.training.inputs.reshape(-1).astype(np.float64)
    return any(
        bool(np.any(np.isclose(values, float(number), rtol=1e-4, atol=0)))
        for number in _NUMBER.findall(one.error)
        if float(number) != 0
    )


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 200 else f"{line[:200]}..."
