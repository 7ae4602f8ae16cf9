"""Says what an upload is, by comparing it with what the app's own function returned.

Only the audit can compare: a server has the upload alone.
"""

import io
import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, RecordDict
from numpy.typing import NDArray

from .transcript import Exchange, arrays_of

__all__ = ["Upload", "described", "model_change", "payloads"]

Vector = NDArray[np.float64]

PLAIN, CLIPPED, CODED, NOISED, MASKED, PACKED = (
    "plain", "clipped", "coded", "noised", "unlike the update", "packed"
)  # fmt: skip

_NUMPY = b"\x93NUMPY"
_EXACT = 1e-5  # of the length of an update, what rounding leaves
_SIGNIFICANT = 6.0  # standard errors of a correlation
_LEAST = 16  # entries of an upload, below which nothing is said
_UNIFORM = 2.0  # largest residual in standard deviations: rounding stays below, noise does not
_RANDOM = 0.97  # share of its size that random data have at least when they are compressed


@dataclass(frozen=True, kw_only=True)
class Upload:
    """What one upload is.

    Parameters
    ----------
    kind : str
        "plain"; "clipped" (the update, shortened); "coded" (the update, in other numbers, to
        rounding); "noised"; "unlike the update" (a mask, or noise that drowns it); "packed" (bytes
        that the audit does not read).
    entries : int
        Number of entries of the update.
    scale : float
        What is left of the update's length, where it is plain, clipped or noised.
    sigma : float
        Standard deviation of the noise in an entry, in the update's units; 0 where there is none or
        the unit is not known.
    norm : float
        Length of the update before all mods.
    random : bool
        Whether the bytes look random to a compressor.
    """

    kind: str
    entries: int
    scale: float = 1.0
    sigma: float = 0.0
    norm: float = 0.0
    random: bool = False

    @property
    def said(self) -> str:
        """What it is, in words."""
        if self.kind == NOISED:
            ratio = self.scale * self.norm / (self.sigma * math.sqrt(self.entries))
            return f"noised: sigma about {self.sigma:.3g} an entry, signal to noise {ratio:.2g}"
        if self.kind == CLIPPED:
            return f"shortened to {self.scale:.3g} of its length"
        if self.kind == MASKED and self.sigma:
            return f"unlike the update: noise of sigma about {self.sigma:.3g} an entry, or a mask"
        if self.kind == MASKED:
            return "unlike the update: a mask, or noise that drowns it"
        if self.kind == PACKED:
            return f"packed bytes that look {'random' if self.random else 'regular'}"
        return "as it is" if self.kind == PLAIN else "in other numbers, to rounding"


def model_change(start: RecordDict | None, end: RecordDict | None) -> Vector | None:
    """Return the arrays of an answer minus those of its question; None where they do not fit."""
    before, after = list(arrays_of(start).values()), list(arrays_of(end).values())
    fits = [a.shape for a in before] == [a.shape for a in after]
    if not after or not fits:
        return None
    return _flat(after) - _flat(before)


def payloads(content: RecordDict) -> Iterator[NDArray[Any]]:
    """Return what an answer has of arrays: those of array records, and NumPy's files in bytes."""
    yield from arrays_of(content).values()
    for record in content.values():
        if isinstance(record, ConfigRecord):
            for value in record.values():
                for part in value if isinstance(value, list) else [value]:
                    if isinstance(part, bytes) and part.startswith(_NUMPY):
                        yield np.load(io.BytesIO(part), allow_pickle=False)


def described(exchange: Exchange) -> Upload | None:
    """Return what the upload of an answer is; None where it has none, or nothing is known of it."""
    update = model_change(exchange.inner_request, exchange.inner_reply)
    if exchange.reply is None:
        return None
    if update is None or update.size < _LEAST:
        return _unchanged(exchange)
    norm = float(np.linalg.norm(update))
    own = _flat(arrays_of(exchange.inner_reply).values())
    arrays = [a for a in payloads(exchange.reply) if np.issubdtype(a.dtype, np.number)]
    change = model_change(exchange.request, exchange.reply)
    whole = all(np.issubdtype(a.dtype, np.integer) for a in arrays)  # codes, whatever their shapes
    if change is not None and change.size == update.size and not whole:
        return _compared(change, update, norm, off=_rounding(own), same_unit=True)
    sizes = [a.size for a in arrays]
    for entries in (sum(sizes), sum(sizes[1:])):  # some put a weight before the arrays
        if entries == update.size:
            codes = _flat(arrays[-len(sizes) :] if entries == sum(sizes) else arrays[1:])
            off = _rounding(own)
            both = [_compared(codes, x, norm, off=off, same_unit=False) for x in (update, own)]
            return min(both, key=lambda one: (one.kind == MASKED, one.sigma))
    packed = b"".join(a.tobytes() for a in arrays)
    if len(packed) < update.size // 8:
        return None
    small = len(zlib.compress(packed, 1)) / max(1, len(packed))
    return Upload(kind=PACKED, entries=update.size, norm=norm, random=small >= _RANDOM)


def _unchanged(exchange: Exchange) -> Upload | None:
    """Return what it is where it has few numbers, or is no model: plain if no mod changed it."""
    made, left = arrays_of(exchange.inner_reply), arrays_of(exchange.reply)
    same = [a.tobytes() for a in made.values()] == [a.tobytes() for a in left.values()]
    return Upload(kind=PLAIN, entries=_flat(left.values()).size) if made and same else None


def _compared(seen: Vector, update: Vector, norm: float, *, off: float, same_unit: bool) -> Upload:
    """Regress what was seen on the update; `off` is the length that rounding has in its units."""
    entries = update.size
    if not norm:
        kind = PLAIN if same_unit and not np.any(seen) else NOISED if same_unit else MASKED
        return Upload(kind=kind, entries=entries, sigma=float(seen.std()))
    x = update if same_unit else update - update.mean()
    y = seen if same_unit else seen - seen.mean()
    slope = float(x @ y) / float(x @ x) if np.any(x) else 0.0
    left = y - slope * x
    spread = float(left.std())
    heard = abs(slope) * float(np.linalg.norm(x))
    if heard < _SIGNIFICANT * spread or not heard:
        sigma = spread if same_unit else 0.0
        return Upload(kind=MASKED, entries=entries, sigma=sigma, norm=norm)
    unit, scale = (1.0, abs(slope)) if same_unit else (abs(slope), 1.0)
    sigma = spread / unit
    if float(np.linalg.norm(left)) / unit <= max(_EXACT * scale * norm, off):
        kind = (PLAIN if slope > 1 - 1e-4 else CLIPPED) if same_unit else CODED
        return Upload(kind=kind, entries=entries, scale=scale, norm=norm)
    if float(np.abs(left).max()) < _UNIFORM * spread:
        return Upload(kind=CODED, entries=entries, scale=scale, norm=norm)
    return Upload(kind=NOISED, entries=entries, scale=scale, sigma=sigma, norm=norm)


def _rounding(model: Vector) -> float:
    """Return the length of what float32 rounds off a model of this size."""
    largest = max(1.0, float(np.abs(model).max(initial=0.0)))
    return float(np.finfo(np.float32).eps) * largest * math.sqrt(model.size)


def _flat(arrays: Iterable[NDArray[Any]]) -> Vector:
    return np.concatenate([np.zeros(0), *(np.asarray(a, np.float64).reshape(-1) for a in arrays)])
