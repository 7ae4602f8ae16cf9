"""States the guarantee of ACFL, as text and data."""

import math
from collections.abc import Mapping

from flwr_privacy.accounting import spent
from flwr_privacy.privacy.guarantee import Guarantee

from .privacy import mi_epsilon
from .scfl import eps_projected, features_epsilon
from .terms import MOMENTS, PAPER, RECORD, SetupTerms

__all__ = ["guarantee_of", "setup_privacy"]

_EVIDENCE = ("tests of ACFL: its bounds, its noise, what clients charge, what its messages tell",)


def setup_privacy(terms: SetupTerms, *, bound: str = "paper") -> dict[str, float]:
    """Return the privacy of one setup upload by itself; in a secure sum that of the sum.

    Parameters
    ----------
    terms : SetupTerms
        What was asked.
    bound : {"paper", "tight"}, default "paper"
        As in `flwr_privacy.acfl.privacy.mi_epsilon`.

    Returns
    -------
    dict
        ``mi_epsilon`` in nats, of one entry of the features or labels (ACFL, theorem 1), and
        ``record_epsilon``, at ``terms.delta``, of one record that is added or removed. Empty
        without noise or for a projection, of which neither has a bound here.
    """
    charge = terms.charge()
    if charge is None:
        return {}
    step = 2.0**terms.grid  # truncation may move a value up to one step beyond its bound
    return {
        "mi_epsilon": mi_epsilon(
            terms.features,
            terms.labels,
            terms.sigma_features**2,
            terms.sigma_labels**2,
            bound=bound,
            B_X=math.sqrt(terms.feature_bound**2 + step),
            B_Y=terms.label_bound + step / terms.feature_bound,
            symmetric=terms.symmetric,
        ),
        "record_epsilon": spent([charge], delta=terms.delta),
    }


def guarantee_of(
    *,
    noise: str,
    epsilon: float,
    delta: float,
    setup: SetupTerms | None,
    bound: str,
    exact_rounds: int,
    summed: bool,
    quorum: tuple[int, int, int] | None,
    coded_only: bool,
    insecure: bool,
) -> Guarantee:
    """Return the guarantee of a training.

    Parameters
    ----------
    noise : {"record", "paper", "none"}
        What is noised.
    epsilon, delta : float
        Budget of a record, with ``noise="record"``.
    setup : SetupTerms, optional
        What the setup asked, if there is one and it is known.
    bound : {"paper", "tight"}
        How the mutual information of the setup is bounded.
    exact_rounds : int
        Answered rounds after which exact gradients give a device's moments away.
    summed : bool
        Whether there is a secure sum.
    quorum : tuple of int, optional
        Where noise is shared and its clients are known: how many there are, how few of them may be
        in a sum, and how many may collude.
    coded_only : bool
        Whether no gradient is asked for.
    insecure : bool
        Whether noise came from a seed.
    """
    void = "clients drew their noise from an insecure seed, for tests" if insecure else ""
    if noise == RECORD:
        return _record_guarantee(epsilon, delta, summed=summed, quorum=quorum, void=void)
    not_protected = [] if coded_only else _leaks(exact_rounds, summed=summed)
    if setup is not None and noise == PAPER:
        privacy = setup_privacy(setup, bound=bound)
        not_protected.append(_setup_text(setup, privacy, bound, summed=summed))
    protects = "nothing from a server that sees the gradients"
    if summed:
        protects = (
            "nothing that lasts: a single gradient is hidden in its sum, and exact sums add up"
        )
    if coded_only:
        protects = "a single entry of a data set, by the noise of the setup, and nothing else"
        protects = protects if noise == PAPER else "nothing: there is no noise"
    return Guarantee(
        scheme="acfl",
        protects=protects,
        adversary="an honest-but-curious server" if summed or coded_only else "nobody",
        not_protected=tuple(not_protected),
        evidence=_EVIDENCE,
        void=void,
    )


def _leaks(exact_rounds: int, *, summed: bool) -> list[str]:
    if not summed:
        return [
            "the moments X^T X and X^T Y of every device, whatever the noise of the setup: at most "
            f"{exact_rounds} rounds that it answered give both exactly (flwr-privacy attack acfl)",
            "records, where a device has few: X^T X tells which lie in its span, and those with "
            "values on a grid, such as pixels, come out of it one by one",
        ]
    return [
        "the sums of X^T X and X^T Y over the devices: exact sums of gradients give them exactly",
        "single devices in a long training: where others are missing in every round, the sums of "
        "about (features + labels) / labels rounds for each device determine them all",
    ]


def _setup_text(
    setup: SetupTerms, privacy: Mapping[str, float], bound: str, *, summed: bool
) -> str:
    if setup.sigma_features == 0:
        return "the setup upload: it has no noise"
    if setup.encoding != MOMENTS:
        return _projection_text(setup)
    what = "the sum of the setup uploads" if summed else "the setup upload"
    return (
        f"more than one entry of a data set in {what}, taken by itself: that leaks at most "
        f"{privacy['mi_epsilon']:.4g} nats of an entry to whoever knows all others ({bound} bound "
        f"of MI-DP, a weak guarantee), which for one record is ({privacy['record_epsilon']:.4g}, "
        f"{setup.delta:g})-differential privacy"
    )


def _projection_text(setup: SetupTerms) -> str:
    rows, s = setup.features, setup.sigma_features**2
    known = features_epsilon(rows, s, distance=2 * setup.feature_norm, delta=setup.delta)
    return (
        "the setup upload, a random projection whose labels have no noise: a label that only one "
        "client has a record of is told with certainty, so no epsilon holds for a record. The "
        f"level of its noise is {eps_projected(rows, s, B_X=setup.feature_bound):.4g} nats of a "
        "feature; for all features of a record whose label is known that is "
        f"({known:.4g}, {setup.delta:g})-differential privacy"
    )


def _record_guarantee(
    epsilon: float,
    delta: float,
    *,
    summed: bool,
    quorum: tuple[int, int, int] | None,
    void: str,
) -> Guarantee:
    adversary = "an honest-but-curious server that sees every upload"
    assumptions = [
        "each client keeps its own ledger and its noise secret",
        "feature maps do not depend on the data",
    ]
    if summed:
        adversary = "an honest-but-curious server, and clients that collude with it"
        text = "noise is shared: a sum opens only with as many clients as its shares are meant for"
        if quorum is not None:
            cohort, least, colluders = quorum
            text += f", {least} of {cohort}, of whom at most {colluders} collude with the server"
        assumptions.append(text)
    return Guarantee(
        scheme="acfl",
        protects="one record of a client",
        adversary=adversary,
        neighbours="one record of one client is added or removed",
        epsilon=epsilon,
        delta=delta,
        not_protected=(
            "whether and when a client takes part, declines or fails, and timing",
            "that all values lie within the bounds: data beyond them are refused, or clipped",
            "anything from a server that does not follow the protocol, beyond the node's policy",
        ),
        assumptions=tuple(assumptions),
        evidence=_EVIDENCE,
        void=void,
    )
