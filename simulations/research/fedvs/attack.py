"""The attack on FedVS: what clients with shares, the server with sums, and both together find.

Columns of digits are dealt out to clients, shares are dealt and decoded as in a training, and the
split model is trained. What the guarantee of FedVS protects must not open. What it names as not
protected does open. Each line says which of the two it is about.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from flwr_privacy.coding.field import PrimeField
from flwr_privacy.coding.lagrange import LagrangeCode
from flwr_privacy.errors import check_choice
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.simulations.reports.style import drawing
from flwr_privacy.simulations.research.attacks.pictures import Row, draw, save
from flwr_privacy.simulations.research.attacks.setup import AttackOptions, Report

from .attack_views import (
    Coalition,
    Distance,
    Labels,
    Rows,
    Similar,
    coalitions,
    distances,
    from_known_weights,
    from_moves,
    label_findings,
    left_out,
    similar_rows,
    true_gram,
)
from .split_learning import BITS, Owners, deal

__all__ = ["TASKS", "report"]

TASKS = ("digits",)
"""What is split: the columns of the digits."""

_CLIENTS = 16
_RECORDS = 32
_MOST_SEGMENTS = 6
_T = 1
_EMBEDDING = 32
_WIDTHS = (16, 32, 64, 96)  # of embeddings, with first weights that are known
_WEIGHT_BITS = (4, BITS, 12, 16)
_ROUNDS = (10, 100, 400)
_FOUND = 0.99  # of the pixels; what is beyond is open
_PICTURED = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class _Found:
    """All findings."""

    owners: Owners
    code: LagrangeCode
    coalitions: list[Coalition]
    distances: list[Distance]
    similar: list[Similar]
    labels: list[Labels]
    known: list[Rows]
    moved: list[Rows]
    left_out: bool


def report(options: AttackOptions) -> Report:
    """Attack shares, views in tiny fields, sums, gradients and first weights.

    By default 16 clients (of 3 to 64) share 32 digits (12 or more). K is 6, or as large as so many
    clients allow; T is 1.

    Raises
    ------
    InvalidParameterError
        If a value is out of range, or a picture cannot be written.
    """
    task, clients, records = options.chosen(task=TASKS[0], clients=_CLIENTS, records=_RECORDS)
    check_choice("task", task, TASKS)
    owners = Owners.of(clients=clients, rows=records, seed=options.seed)
    found = _attack(owners)
    lines = list(_guarantees(found))
    return Report(
        tables=[
            _coalition_table(found),
            _distance_table(found.distances),
            _similar_table(found),
            _label_table(found),
            _rows_table(found),
        ],
        legend=_LEGEND,
        pictures=[
            _draw_shares(found, options.out / "fedvs-shares.png"),
            _draw_similar(found, options.out / "fedvs-similar.png"),
            _draw_known(found, options.out / "fedvs-known-weights.png"),
        ],
        verdict="\n".join(lines),
    )


def _attack(owners: Owners) -> _Found:
    random, N = SecureRandom(), len(owners.columns)
    code = LagrangeCode(N=N, K=min(_MOST_SEGMENTS, (N + 1) // 2 - _T), T=_T, field=PrimeField())
    weights = owners.first_weights(_EMBEDDING, random)
    dealt = deal(owners, code, weights, random)
    similar, moved, labels = [], [], []
    for bits in _WEIGHT_BITS:
        seen = owners.train(max(_ROUNDS) + 1, weights=weights, weight_bits=bits, random=random)
        similar += similar_rows(owners, seen, weight_bits=bits, rounds=_ROUNDS)
        if bits >= BITS:
            moved.append(from_moves(owners, seen, weight_bits=bits, rounds=max(_ROUNDS)))
        if bits == BITS:
            labels = label_findings(owners, seen, (1, *_ROUNDS))
    return _Found(
        owners=owners,
        code=code,
        coalitions=coalitions(owners, dealt),
        distances=distances(owners.seed),
        similar=similar,
        labels=labels,
        known=from_known_weights(owners, _WIDTHS, random),
        moved=moved,
        left_out=left_out(dealt, 0),
    )


def _coalition_table(found: _Found) -> Table:
    code = found.code
    lines = Table(
        title=f"shares of coalitions of clients: N = {code.N}, K = {code.K}, T = {code.T}"
    )
    lines.add_column("clients")
    for name in ("weights", "relations", "segments", "pixels found", "verdict"):
        lines.add_column(name, justify="right")
    for one in found.coalitions:
        lines.add_row(
            f"{one.holders}{_of(one.holders, code)}",
            "all" if one.weights else "none",
            f"{one.relations} of {code.K}",
            f"{one.segments} of {code.K}",
            f"{one.found:.0%}",
            _word(opens=_opens(one), protected=one.holders <= code.T),
        )
    return lines


def _of(holders: int, code: LagrangeCode) -> str:
    names = {code.T: " = T", code.T + 1: " = T + 1", code.K + code.T: " = K + T"}
    return names.get(holders, "")


def _opens(one: Coalition) -> bool:
    return one.weights or one.segments > 0 or one.found > 0


def _word(*, opens: bool, protected: bool) -> str:
    if protected:
        return "AGAINST THE GUARANTEE" if opens else "does not open"
    return "opens" if opens else "nothing found"


def _distance_table(found: Sequence[Distance]) -> Table:
    lines = Table(title="all views of tiny fields: two secrets with the same sums")
    lines.add_column("who sees what")
    lines.add_column("total variation", justify="right")
    lines.add_column("verdict", justify="right")
    for one in found:
        lines.add_row(
            one.view,
            f"{one.distance:.2f}" if one.distance else "0",
            _word(opens=one.distance > 0, protected=one.protected),
        )
    return lines


def _similar_table(found: _Found) -> Table:
    rows, clients = len(found.owners.pixels), len(found.owners.columns)
    lines = Table(title=f"the sums of many rounds: {rows} digits, {clients} clients")
    lines.add_column("weight bits")
    for name in ("rounds", "correlation", "neighbours", "verdict"):
        lines.add_column(name, justify="right")
    for one in found.similar:
        lines.add_row(
            f"{one.weight_bits}" if one.rounds == _ROUNDS[0] else "",
            f"{one.rounds}",
            f"{one.correlation:.4f}",
            f"{one.neighbours:.0%}",
            _word(opens=one.correlation > 0.5, protected=False),
        )
    return lines


def _label_table(found: _Found) -> Table:
    lines = Table(title="gradients that every client is sent: labels")
    lines.add_column("round")
    for name in ("pairs", "named", "by guessing", "verdict"):
        lines.add_column(name, justify="right")
    for one in found.labels:
        lines.add_row(
            f"{one.round}",
            f"{one.pairs:.3f}",
            f"{one.named:.0%}",
            f"{one.guessed:.0%}",
            _word(opens=one.pairs > 0.8, protected=False),
        )
    return lines


def _rows_table(found: _Found) -> Table:
    lines = Table(title="weights that are known: the digits")
    lines.add_column("what is known")
    for name in ("error of a pixel", "exact pixels", "verdict"):
        lines.add_column(name, justify="right")
    *_, guess, _ = found.known
    for one in (*found.known, *found.moved):
        secret = one.name.startswith("secret")
        lines.add_row(
            one.name,
            f"{one.error:.3f}",
            f"{one.exact:.0%}",
            "" if one is guess else _word(opens=one.error < guess.error, protected=secret),
        )
    return lines


_LEGEND = f"""\
shares: the last clients put the shares that they hold together. weights: of all others, of the
  round, exactly. relations: combinations of the K segments of the data in which the masks cancel;
  segments: those that these determine, whatever the data. pixels found: by lattice reduction, as
  pixels are one of 17 small numbers, in a field of 31 bits
views: total variation between two secrets, 0 is perfect secrecy, 1 none. In the first part over all
  masks, p = 5; in the last over all masks of the data, with rounds drawn. T + 1 clients deal a
  zero-mask, which is not in the paper
sums: the server fits the Gram matrix of the rows to the sums and its own gradients. correlation:
  off the diagonal; neighbours: rows of which the nearest other one is right; noise is the rounding
  of the weights alone, at 2^-bits
labels: pairs: chance that two rows of one label have more similar gradients than two of different
  ones; named: labels that are right, given one row of each; after training at {BITS} bits
known weights: the first ones, as from a public seed; the server solves for the digits in the first
  round. secret ones: it takes others for them. T + 1 clients: they open the weights of
  {max(_ROUNDS)} rounds, and solve for the digits by the gradients. guess: without any of it"""


def _draw_shares(found: _Found, path: Path) -> Path:
    pixels = found.owners.pixels[: len(found.coalitions[0].images)]
    rows = [Row(name="digits", images=pixels, span=(0.0, 1.0))]
    rows += [
        Row(
            name=f"{one.holders}{_of(one.holders, found.code)}",
            images=one.images,
            recovered=(one.images == pixels).all(axis=1),
            span=(0.0, 1.0),
        )
        for one in found.coalitions
    ]
    title = "digits, and what so many clients have of them in their shares"
    return draw(rows, path, title=title, recovered="every pixel exactly")


def _draw_known(found: _Found, path: Path) -> Path:
    rows = [Row(name="digits", images=found.owners.pixels, span=(0.0, 1.0))]
    rows += [
        Row(name=one.name, images=one.images, span=(0.0, 1.0), recovered=one.right)
        for one in (*found.known, *found.moved)
    ]
    title = "digits, and what is found in sums and in weights"
    return draw(rows, path, title=title, recovered="every pixel right once it is rounded")


@drawing()
def _draw_similar(found: _Found, path: Path) -> Path:
    order = np.argsort(found.owners.labels, kind="stable")
    last = [one for one in found.similar if one.rounds == max(_ROUNDS)]
    figure = Figure(figsize=(3 * (len(last) + 1), 3.4))
    figure.suptitle(
        "similarity of the digits, in the order of their labels; above what was found its "
        "correlation with the true one: 1 is all"
    )
    names = ["true", *(f"{one.weight_bits} bits: {one.correlation:.3f}" for one in last)]
    grams = [true_gram(found.owners), *(one.gram for one in last)]
    panels = figure.subplots(1, len(grams))
    high = float(grams[0].max())
    for axes, name, gram in zip(panels, names, grams, strict=True):
        axes.imshow(gram[np.ix_(order, order)], cmap="viridis", vmin=0, vmax=high)
        axes.set_title(name)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
    return save(figure, path)


def _guarantees(found: _Found) -> Iterator[str]:
    """Return for each part of the guarantee what was found, in plain words."""
    code = found.code
    few = next(one for one in found.coalitions if one.holders == code.T)
    more = next(one for one in found.coalitions if one.holders == code.T + 1)
    breach = found.coalitions[-1]
    enough = next(one for one in found.coalitions if one.found > _FOUND)
    hidden = [one for one in found.distances if one.protected]
    unhidden = [one for one in found.distances if not one.protected]
    best = max((one for one in found.similar if one.weight_bits == BITS), key=lambda s: s.rounds)
    first = found.labels[0]
    *known, _, secret = found.known
    broken = any(map(_opens, [few])) or any(one.distance > 0 for one in hidden)
    yield f"protected: shares of T = {code.T}: {_word(opens=_opens(few), protected=True)}"
    yield (
        f"protected: answers with zero-masks, {len(hidden)} kinds of views counted: largest total "
        f"variation {max(one.distance for one in hidden):g}; without, or for more than T, up to "
        f"{max(one.distance for one in unhidden):.2f}"
    )
    yield f"the guarantee {'is BROKEN' if broken else 'holds'}. What it does not cover:"
    yield (
        f"T + 1 = {more.holders} clients: {'all' if more.weights else 'no'} weights; "
        f"{enough.holders} clients: {enough.found:.0%} of the pixels, as they are small numbers; "
        f"K + T = {breach.holders}: {breach.segments} of {code.K} segments, whatever the data. So "
        "for a relay that sees shares in the clear, and for the files of so many nodes"
    )
    yield (
        f"the server by the sums of {best.rounds} rounds: similarities of all rows, correlation "
        f"{best.correlation:.3f}, {best.neighbours:.0%} of the nearest neighbours"
    )
    yield (
        f"any client by the first gradient: labels, {first.pairs:.3f} of the pairs told apart, "
        f"{first.named:.0%} named with one known row of each"
    )
    yield (
        f"known first weights, h = {_WIDTHS[-1]}: {known[-1].exact:.0%} of the pixels exactly in "
        f"the first round; secret ones: error {secret.error:.2f}, does not open"
    )
    yield (
        "two sums of the same shares, one without a client: its embedding "
        f"{_open(found.left_out)}. Clients must hold one set of dealers for a set of shares"
    )


def _open(opened: bool) -> str:
    return "opens" if opened else "does not open"
