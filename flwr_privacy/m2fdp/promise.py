"""What M2FDP promises, by how its noise is calibrated and where its aggregators are."""

from collections.abc import Collection

from flwr_privacy.guarantee import Guarantee

__all__ = ["promise"]

_NEIGHBOURS = {
    "user": "all data of one device are replaced by any others",
    "record": "one record of a device is there or not",
}
_PROTECTS = {"user": "all data of a device", "record": "one record of a device"}


def promise(
    *,
    calibration: str,
    unit: str,
    epsilon: float,
    delta: float,
    nominal: float,
    secure: int,
    relay: bool,
    law: str,
    clean_events: bool,
    kept_back: Collection[str],
    insecure: bool,
) -> Guarantee:
    """Return the promise of a training.

    Parameters
    ----------
    calibration : {"device", "record", "paper", "none"}
        How the noise follows from the budget.
    unit : {"user", "record"}
        What is protected.
    epsilon, delta : float
        What the devices pay at most.
    nominal : float
        The epsilon that was asked for.
    secure : int
        Number of secure aggregators.
    relay : bool
        Whether they are nodes of their own.
    law : {"worst", "smooth", "lemma"}
        What is assumed of the drift of models.
    clean_events : bool
        Whether there are averages without noise inside trusted zones.
    kept_back : collection of str
        Arrays of the model that are not sent.
    insecure : bool
        Whether noise came from a seed.

    Examples
    --------
    >>> promise(
    ...     calibration="device", unit="user", epsilon=8.0, delta=1e-5, nominal=8.0, secure=0,
    ...     relay=False, law="worst", clean_events=False, kept_back=[], insecure=False,
    ... ).neighbours
    'all data of one device are replaced by any others'
    """
    if calibration == "none":
        return Guarantee(
            scheme="m2fdp",
            protects="nothing",
            adversary="nobody",
            not_protected=("the update of a device: there is no noise",),
            evidence=("tests/m2fdp",),
        )
    not_protected = [
        "who takes part (no amplification by it is counted), and whether and when a device fails "
        "or declines",
        "what the user's own code sends elsewhere, and timing",
    ]
    assumptions = []
    if secure:
        not_protected.insert(
            0,
            "members of one trusted zone from each other and from its aggregators: they see "
            "averages without noise; of two children each knows the other's answer"
            if clean_events
            else "devices of a trusted zone from its aggregators, which see their answers",
        )
        assumptions += _of_zones(relay)
    if kept_back:
        not_protected.append(f"(not sent at all: {', '.join(sorted(kept_back))})")
    if clean_events and law != "worst" and secure:
        assumptions.append(
            "losses are convex and smooth, and stay so under clipping: nobody checks it"
            if law == "lemma"
            else "losses are as smooth as declared: nobody checks it"
        )
    if calibration == "paper":
        not_protected.insert(
            0,
            f"the (epsilon = {nominal:g}) that the paper's noise is named after: what it costs, "
            f"all data of a device replaced, is epsilon {epsilon:.4g}",
        )
    return Guarantee(
        scheme="m2fdp",
        protects=_PROTECTS[unit],
        adversary=(
            "everybody beyond the boundary of the device's trusted zone: the cloud, insecure "
            "aggregators, other zones" + (", and who relays the messages" if relay else "")
        ),
        neighbours=_NEIGHBOURS[unit],
        epsilon=epsilon,
        delta=delta,
        not_protected=tuple(not_protected),
        assumptions=tuple(assumptions),
        evidence=(
            "tests/m2fdp",
            "flwr-privacy attack m2fdp",
            "tests/flwr_privacy/accounting",
        ),
        void="noise came from an insecure seed, for tests" if insecure else "",
    )


def _of_zones(relay: bool) -> list[str]:
    if relay:
        return [
            "a trusted aggregator follows the protocol: it adds the noise of its zone and keeps "
            "what it sees to itself",
            "the keys that a device or an aggregator pins are the others'",
        ]
    return [
        "the server is trusted: it plays the secure aggregators, sees the updates of their devices "
        "without noise, and adds the noise (a simulation; `relay` makes them nodes of their own)",
    ]
