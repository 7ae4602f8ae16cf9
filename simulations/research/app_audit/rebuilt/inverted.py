"""The finding of gradient inversion: records beside what was rebuilt of them, and pictures."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.attacks.gradient_matching import MatchingLoss
from flwr_privacy.simulations.research.attacks.pictures import Row, draw
from flwr_privacy.simulations.research.attacks.torch_gradients import matching_loss

from ..findings import LEAK, NOTE, Finding, Table
from .case import Case, Clock, Trained
from .evidence import Upload
from .from_few import last_layer
from .gradient_inversion import Found, cosine_loss, descend, learning_rate_of, search
from .labels import class_moves, label_counts
from .likeness import paired, psnr, ssim
from .networks import filled
from .reports import SERVER, left_out

__all__ = ["LEVEL", "MARGIN", "inverted"]

LEVEL = 20.0
"""PSNR in dB from which on a record is recovered: an error of a tenth of the records' span."""

MARGIN = 3.0
"""How much better than the best guess it must be, in dB: half of the squared error."""

_GUESSES = 10  # records of others, beside their mean
_ENOUGH = 1e-9  # squared distance at which a search ends
_SMALLEST_IMAGE = 8  # pixels a side, for SSIM and pictures
_SHARES = {1: 0.5, 2: 0.4, 4: 0.5, 8: 1.0}  # of the time that is left
_COLUMNS = 8
_CHANNELS = 1, 3


@dataclass(frozen=True, kw_only=True, eq=False)
class _Attack:
    """What one search made of one upload."""

    one: Trained
    way: str
    found: Found
    truth_loss: float
    labels_right: bool
    places: NDArray[np.intp]
    measures: NDArray[np.float64]
    guessed: NDArray[np.float64]
    guesses: NDArray[np.float64]

    @property
    def recovered(self) -> NDArray[np.bool_]:
        return (self.measures >= LEVEL) & (self.measures >= self.guessed + MARGIN)


def inverted(case: Case, clock: Clock) -> Finding:
    """Rebuild the inputs of clients with few records by gradient inversion."""
    name = "gradient inversion"
    targets = list(_targets(case))
    if not targets:
        return left_out(name, "no upload of few records with continuous inputs fits the model")
    if case.span <= 0:
        return left_out(name, "all values of the records are equal")
    attacks: list[_Attack] = []
    why = ""
    for one in targets:
        share = _SHARES.get(one.training.records, 0.5)
        try:
            attacks += _attacked(case, one, clock.part(share))
        except InvalidParameterError as error:
            why = str(error)
    if not attacks:
        return left_out(name, why or "there was no time for it")
    images = _images(targets[0].training.inputs)
    total = len({(id(a.one), i) for a in attacks for i in range(len(a.measures))})
    best = {(id(a.one), place) for a in attacks for place in np.flatnonzero(a.recovered).tolist()}
    leaks = bool(best)
    said = (
        f"{len(best)} of {total} records are rebuilt from the update of a client with few of them, "
        f"to a PSNR of {LEVEL:g} dB or more and {MARGIN:g} dB better than any guess."
    )
    if not leaks:
        said += " The searches found nothing that counts; longer or better ones may."
    return Finding(
        part="rebuilt",
        name=name,
        verdict=LEAK if leaks else NOTE,
        said=said,
        adversary=SERVER,
        chance=f"the best of {_GUESSES} records of other clients and their mean: a PSNR of "
        f"{float(np.median(np.concatenate([a.guessed for a in attacks]))):.1f} dB (median)",
        numbers={
            "records": total,
            "recovered": len(best),
            "level in dB": LEVEL,
            "above the best guess in dB": MARGIN,
        },
        table=Table(
            (
                *("records", "loss", "PSNR", "SSIM", "PSNR by guessing", "SSIM by guessing"),
                *("recovered", "labels right", "loss reached", "loss of the truth"),
                *("whole", "steps", "upload"),
            ),
            [_line(case, attack, images) for attack in attacks],
        ),
        pictures=_picture(case, attacks) if images else {},
    )


def _targets(case: Case) -> Iterator[Trained]:
    """Return the first upload for each number of records, the smallest number first."""
    first: dict[int, Trained] = {}
    for one in [] if case.few is None else case.trained(case.few):
        training = one.training
        whole = 0 < training.records == len(training.inputs) == len(training.labels)
        classes = training.labels.ndim == 1 and np.issubdtype(training.labels.dtype, np.integer)
        if whole and classes and np.issubdtype(training.inputs.dtype, np.floating):
            first.setdefault(training.records, one)
    for records in sorted(first):
        yield first[records]


def _attacked(case: Case, one: Trained, clock: Clock) -> Iterator[_Attack]:
    """Search for the inputs behind one upload, in all ways that there are."""
    layer, _ = last_layer(case, one)
    moves = None if layer is None else class_moves(one.upload, layer)
    if layer is None or moves is None:
        raise InvalidParameterError("model", "no last linear layer", "one that tells the labels")
    records = one.training.records
    labels = np.repeat(np.arange(len(moves)), label_counts(moves, records)).astype(np.int64)
    net = filled(case.model, one.upload.start)
    shape = one.training.inputs.shape
    rate = _rate(one.upload, layer, labels)
    losses: dict[str, MatchingLoss] = {"cosine": cosine_loss(net, one.upload.change, labels)}
    names = {name for name, _ in net.named_parameters()}
    if rate is not None and names <= set(one.upload.change):
        gradient = {name: -one.upload.change[name] / rate for name in names}
        ordered = {name: gradient[name] for name, _ in net.named_parameters()}
        losses["squared"] = matching_loss(net, ordered, labels)
    for way, loss in losses.items():
        draws = case.draws(way, records)
        part = clock.part(0.7 if way == "cosine" and len(losses) > 1 else 1.0)
        if way == "cosine":
            found = descend(loss, shape, draws, seconds=part.left)
        else:
            found = search(loss, shape, draws, seconds=part.left, enough=_ENOUGH)
        yield _judged(case, one, way, found, loss, labels)


def _judged(
    case: Case, one: Trained, way: str, found: Found, loss: MatchingLoss, labels: NDArray[np.int64]
) -> _Attack:
    """Compare what was found with the truth; from here on the attack is over."""
    truth = one.training.inputs.astype(np.float64)
    others = case.others(one.training.inputs).astype(np.float64)
    guesses = np.concatenate([others[:_GUESSES], others.mean(axis=0, keepdims=True)])
    measure = partial(psnr, span=case.span)
    places, measures = paired(truth, found.records, measure)
    table = np.array([[measure(record, guess) for guess in guesses] for record in truth])
    order = np.argsort(one.training.labels, kind="stable")
    return _Attack(
        one=one,
        way=way,
        found=found,
        truth_loss=loss(truth[order])[0],
        labels_right=bool(np.array_equal(np.sort(one.training.labels), labels)),
        places=places,
        measures=measures,
        guessed=table.max(axis=1),
        guesses=guesses[table.argmax(axis=1)],
    )


def _rate(upload: Upload, layer: str, labels: NDArray[np.int64]) -> float | None:
    """Return the learning rate, which shows in the update of a single record."""
    weight, bias = f"{layer}.weight", f"{layer}.bias"
    if len(labels) != 1 or bias not in upload.change or weight not in upload.change:
        return None
    start, change = upload.start, upload.change
    return learning_rate_of(
        start[weight], start[bias], change[weight], change[bias], int(labels[0])
    )


def _line(case: Case, attack: _Attack, images: bool) -> list[Any]:
    """Return a row of the table."""
    truth = attack.one.training.inputs.astype(np.float64)
    alike: list[float | None] = [None, None]
    if images:
        for place, offered in enumerate((attack.found.records[attack.places], attack.guesses)):
            alike[place] = _mean(
                [ssim(a, b, span=case.span) for a, b in zip(truth, offered, strict=True)]
            )
    return [
        len(truth),
        attack.way,
        _mean(attack.measures),
        alike[0],
        _mean(attack.guessed),
        alike[1],
        int(attack.recovered.sum()),
        "yes" if attack.labels_right else "no",
        float(f"{attack.found.loss:.3g}"),
        float(f"{attack.truth_loss:.3g}"),
        "yes" if attack.found.whole else "no: its time was over",
        attack.one.training.steps,
        attack.one.kind,
    ]


def _picture(case: Case, attacks: Sequence[_Attack]) -> dict[str, str]:
    """Draw the records above, what was rebuilt of them below, and the best guesses last."""
    parts = []
    for attack in attacks:
        for place, record in enumerate(attack.one.training.inputs):
            found = attack.found.records[attack.places[place]]
            notes = f"{attack.measures[place]:.1f} dB", f"{attack.guessed[place]:.1f} dB"
            frame = bool(attack.recovered[place])
            what = f"{attack.one.training.records}: {attack.way}"
            parts.append((record, found, attack.guesses[place], what, *notes, frame))
    parts = parts[:_COLUMNS]
    records, found, guesses, whats, notes, guess_notes, framed = zip(*parts, strict=True)
    low = float(np.min(records))
    span = low, low + case.span
    path = draw(
        [
            Row(name="record", images=np.array(records), notes=whats, span=span),
            Row(name="rebuilt", images=np.array(found), notes=notes, span=span, recovered=framed),
            Row(name="best guess", images=np.array(guesses), notes=guess_notes, span=span),
        ],
        case.out / "inversion.png",
        title="What gradient inversion rebuilds",
        recovered=f"a PSNR of {LEVEL:g} dB or more, {MARGIN:g} dB above the best guess",
    )
    return {
        path.name: "Records above, with the number that the client trained on and the loss that "
        "was searched; what was rebuilt of them in the middle; the best guess below."
    }


def _images(inputs: NDArray[Any]) -> bool:
    """Tell whether records are images: two axes of pixels, and channels before them."""
    shape = inputs.shape[1:]
    pixels = len(shape) == 2 or (len(shape) == 3 and shape[0] in _CHANNELS)
    return pixels and min(shape[-2:]) >= _SMALLEST_IMAGE


def _mean(values: Any) -> float:
    return float(f"{float(np.mean(values)):.3g}")
