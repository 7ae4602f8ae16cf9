"""Makes metrics of the noised sums of an evaluation, each with an interval."""

import math
from collections.abc import Iterable

from .sums import EvaluationSum
from .terms import LABEL_WEIGHT, EvaluationTerms

__all__ = ["estimated", "half_width", "interval"]

_Z = 1.959963984540054
"""Half of the width of a two-sided interval of 95 %, in standard deviations."""

_ENDS = ("", "_low", "_high")
"""Endings of the names of a value and the ends of its interval."""


def estimated(
    total: EvaluationSum, terms: EvaluationTerms, sigmas: Iterable[float], *, most: float
) -> dict[str, float | list[float]]:
    """Return the metrics of an evaluation.

    Parameters
    ----------
    total : EvaluationSum
        The sum of the answers, noise included.
    terms : EvaluationTerms
        What was asked.
    sigmas : iterable of float
        Standard deviations of the noises in the sum, of each entry.
    most : float
        Most clients, or records, that can be in the sum; infinite if that is a secret.

    Returns
    -------
    dict of str to float, or list of float
        The accuracy under its name, and its 95 % interval as ``..._low`` and ``..._high``: it
        covers the noise, not the choice of the records that were evaluated. The same of ``loss``.
        At user level the accuracy is the mean over clients, and ``evaluated`` the noised number
        of clients that evaluated; at record level it is over all records, and ``evaluated`` is the
        number of records, with noise where that is protected. ``label_histogram`` has for each
        label the mean share over clients, or the number of records, and lists of the same length
        their intervals. Empty if nobody evaluated.
    """
    sigma, sums = math.hypot(*sigmas), total.statistics().tolist()
    if terms.counted:
        evaluated, spread, values = sums[0] / terms.presence, sigma / terms.presence, sums[1:]
    else:
        evaluated, spread, values = float(total.records), 0.0, sums
    if not evaluated and not spread:
        return {}

    def estimate(value: float, noise: float, least: float, greatest: float) -> list[float]:
        # The noise can move the number of those who evaluated beyond what is possible.
        ratio = value / min(max(evaluated, 1.0), max(most, 1.0)) if spread else value / evaluated
        point = min(max(ratio, least), greatest)
        low, high = interval(value, evaluated, noise, spread, least=least, greatest=greatest)
        return [point, min(low, point), max(high, point)]

    found: dict[str, list[float]] = {}
    for name, scale in ((terms.accuracy, 1.0), ("loss", terms.loss_cap))[: terms.released]:
        shares = estimate(values.pop(0), sigma, -0.5, 0.5)
        found[name] = [scale * (share + 0.5) for share in shares]
    metrics: dict[str, float | list[float]] = {
        f"{name}{end}": number
        for name, numbers in found.items()
        for end, number in zip(_ENDS, numbers, strict=True)
    }
    noise, labels = sigma / LABEL_WEIGHT, [value / LABEL_WEIGHT for value in values]
    if terms.unit == "record":
        bars = [[max(0.0, n + shift * _Z * noise) for shift in (0, -1, 1)] for n in labels]
    else:
        bars = [estimate(share, noise, 0.0, 1.0) for share in labels]
    for end, heights in zip(_ENDS, zip(*bars, strict=True), strict=False):
        metrics[f"label_histogram{end}"] = list(heights)
    return {**metrics, "evaluated": evaluated}


def interval(
    value: float,
    count: float,
    sigma: float,
    spread: float,
    *,
    least: float = -0.5,
    greatest: float = 0.5,
) -> tuple[float, float]:
    """Return the 95 % interval of a ratio of two sums with Gaussian noise (Fieller).

    Parameters
    ----------
    value, count : float
        The noised sums.
    sigma, spread : float
        Standard deviations of their noises.
    least, greatest : float, defaults -0.5 and 0.5
        Between which the ratio ``value / count`` without their noise is.

    Examples
    --------
    >>> low, high = interval(20.0, 100.0, 1.0, 0.0)
    >>> round(low, 4), round(high, 4)
    (0.1804, 0.2196)
    """
    # The ratios r at which value - r count is within 1.96 of its standard deviations.
    square = count**2 - (_Z * spread) ** 2
    if count <= 0 or square <= 0:
        return least, greatest  # the noise hides how many there are
    middle = value * count / square
    rest = middle**2 - (value**2 - (_Z * sigma) ** 2) / square
    half = math.sqrt(max(0.0, rest))
    low, high = middle - half, middle + half
    return min(max(low, least), greatest), max(min(high, greatest), least)


def half_width(terms: EvaluationTerms, clients: int) -> float | None:
    """Return half of the width of the interval to expect if all clients evaluate, up to 1/2.

    None at record level, where it follows from the number of records.
    """
    if terms.unit == "record":
        return None
    noises = clients if not (terms.parties or terms.by_server) else 1
    return min(0.5, _Z * terms.sigma() * math.sqrt(noises) / clients)
