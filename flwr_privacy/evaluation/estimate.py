"""Makes metrics of the noised sums of an evaluation, each with an interval."""

import math
from collections.abc import Iterable

from .sums import EvaluationSum
from .terms import EvaluationTerms

__all__ = ["estimated", "half_width", "interval"]

_Z = 1.959963984540054
"""Half of the width of a two-sided interval of 95 %, in standard deviations."""


def estimated(
    total: EvaluationSum, terms: EvaluationTerms, sigmas: Iterable[float], *, most: float
) -> dict[str, float]:
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
        Most clients that can be in the sum; infinite if that is a secret.

    Returns
    -------
    dict of str to float
        The accuracy under its name, and its 95 % interval as ``..._low`` and ``..._high``: it
        covers the noise, not the choice of the records that were evaluated. The same of ``loss``.
        At user level the accuracy is the mean over clients, and ``evaluated`` the noised number
        of clients that evaluated; at record level it is over all records, and ``evaluated`` is the
        number of records. Empty if nobody evaluated.
    """
    sigma, sums = math.hypot(*sigmas), total.statistics().tolist()
    if terms.unit == "record":
        evaluated, spread, values = float(total.records), 0.0, sums
    else:
        evaluated, spread, values = sums[0] / terms.presence, sigma / terms.presence, sums[1:]
    if not evaluated and not spread:
        return {}
    metrics: dict[str, float] = {}
    for name, value, scale in zip(
        (terms.accuracy, "loss"), values, (1.0, terms.loss_cap), strict=False
    ):
        # The noise can move the number of those who evaluated beyond what is possible.
        ratio = value / min(max(evaluated, 1.0), max(most, 1.0)) if spread else value / evaluated
        point = min(max(ratio, -0.5), 0.5)
        low, high = interval(value, evaluated, sigma, spread)
        metrics[name] = scale * (point + 0.5)
        metrics[f"{name}_low"] = scale * (min(low, point) + 0.5)
        metrics[f"{name}_high"] = scale * (max(high, point) + 0.5)
    metrics["evaluated"] = evaluated
    return metrics


def interval(value: float, count: float, sigma: float, spread: float) -> tuple[float, float]:
    """Return the 95 % interval of a ratio of two sums with Gaussian noise (Fieller).

    Parameters
    ----------
    value, count : float
        The noised sums; the ratio ``value / count`` without their noise is in [-1/2, 1/2].
    sigma, spread : float
        Standard deviations of their noises.

    Examples
    --------
    >>> low, high = interval(20.0, 100.0, 1.0, 0.0)
    >>> round(low, 4), round(high, 4)
    (0.1804, 0.2196)
    """
    # The ratios r at which value - r count is within 1.96 of its standard deviations.
    square = count**2 - (_Z * spread) ** 2
    if count <= 0 or square <= 0:
        return -0.5, 0.5  # the noise hides how many there are
    middle = value * count / square
    rest = middle**2 - (value**2 - (_Z * sigma) ** 2) / square
    half = math.sqrt(max(0.0, rest))
    return min(max(middle - half, -0.5), 0.5), max(min(middle + half, 0.5), -0.5)


def half_width(terms: EvaluationTerms, clients: int) -> float | None:
    """Return half of the width of the interval to expect if all clients evaluate, up to 1/2.

    None at record level, where it follows from the number of records.
    """
    if terms.unit == "record":
        return None
    noises = clients if not (terms.parties or terms.by_server) else 1
    return min(0.5, _Z * terms.sigma() * math.sqrt(noises) / clients)
