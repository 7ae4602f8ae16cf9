"""Compares what the noise of the papers' rivals claims with the epsilon that it gives."""

import math

from flwr_privacy.acfl.scfl import features_epsilon, sigma2_for_eps_projected
from flwr_privacy.errors import InvalidParameterError, check_integer
from flwr_privacy.mspdq.baselines import Noising, nbafl_uplink_sigma

__all__ = ["RIVALS", "check_unit", "nbafl", "scfl"]

RIVALS = {
    "mspdq-ldp": ("rounds", "clipping_norm", "records", "size"),
    "acfl-scfl": ("clipping_norm", "size"),
}
"""What `nbafl` and `scfl` are about, and the options beside the budget that they use."""


def nbafl(
    *, epsilon: float, delta: float, rounds: int, clipping_norm: float, records: int, size: int
) -> str:
    """Return the noise of NbAFL and its epsilon, as lines of text.

    Parameters
    ----------
    epsilon, delta : float
        What the authors claim for all uploads together.
    rounds : int
        Uploads of a client.
    clipping_norm : float
        L2 norm to which a model is clipped.
    records : int
        Number of records of the client with the fewest.
    size : int
        Weights of a model.

    Examples
    --------
    >>> print(nbafl(
    ...     epsilon=10, delta=0.01, rounds=25, clipping_norm=1.0, records=600, size=650))
    noise: standard deviation 0.025896 in every upload
    epsilon 10           claimed at delta 0.01 for a record, all 25 uploads together
    epsilon 1.2868       if a record moves a model by 0.0033333 (2 C / records): not enforced
    epsilon 75458        by what clipping gives: a record moves a model by up to 2 (2 C)
    """
    check_integer("size", size, minimum=1)
    sigma = nbafl_uplink_sigma(
        clipping_norm=clipping_norm,
        epsilon=epsilon,
        delta=delta,
        exposures=rounds,
        smallest_data=records,
    )
    noising = Noising(clip="model", clipping_norm=clipping_norm, law="gaussian", scale=sigma)
    taken, clipped = noising.epsilons(smallest_data=records, uploads=rounds, size=size, delta=delta)
    return "\n".join(
        (
            f"noise: standard deviation {sigma:.5g} in every upload",
            _line(
                epsilon, f"claimed at delta {delta:g} for a record, all {rounds} uploads together"
            ),
            _line(
                taken,
                f"if a record moves a model by {2 * clipping_norm / records:.5g} (2 C / records): "
                "not enforced",
            ),
            _line(
                clipped,
                f"by what clipping gives: a record moves a model by up to {2 * clipping_norm:.5g} "
                "(2 C)",
            ),
        )
    )


def scfl(*, epsilon: float, delta: float, features: int, norm: float) -> str:
    """Return the noise of SCFL's projection and its epsilon, as lines of text.

    Parameters
    ----------
    epsilon : float
        Level in nats of one feature, each in [-norm, norm].
    delta : float
        At which the differential privacy is stated.
    features : int
        Features, and as many coded rows.
    norm : float
        Largest L2 norm of a record's features.

    Examples
    --------
    >>> print(scfl(epsilon=1.0, delta=1e-5, features=10, norm=1.0))
    noise: standard deviation 1.2511 of a projected feature, none of a label
    nats 1               claimed of one feature, to whoever knows all others
    epsilon 64.379       at delta 1e-05 for all features of a record whose label is known
    epsilon inf          for a record: a label that nobody else has is told with certainty
    """
    check_integer("size", features, minimum=1)
    s = sigma2_for_eps_projected(epsilon, features, B_X=norm)
    known = features_epsilon(features, s, distance=2 * norm, delta=delta)
    return "\n".join(
        (
            f"noise: standard deviation {math.sqrt(s):.5g} of a projected feature, none of a label",
            _line(epsilon, "claimed of one feature, to whoever knows all others", name="nats"),
            _line(known, f"at delta {delta:g} for all features of a record whose label is known"),
            _line(math.inf, "for a record: a label that nobody else has is told with certainty"),
        )
    )


def _line(value: float, text: str, name: str = "epsilon") -> str:
    return f"{f'{name} {value:.5g}':20} {text}"


def check_unit(unit: str | None) -> None:
    """Refuse another unit than records, of which the rivals' claims are.

    Raises
    ------
    InvalidParameterError
        If it is another one.
    """
    if unit != "record":
        raise InvalidParameterError("unit", unit, "record: that is what is claimed of this noise")
