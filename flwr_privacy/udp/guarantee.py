"""States the guarantee of UDP, as text and data."""

from collections.abc import Collection

from flwr_privacy.privacy.guarantee import Guarantee

from .options import DPSGD
from .plan import UDPPlan
from .schedule import NONE, PAPER, PLD_SECRET
from .sensitivity import RECORD_UNIT

__all__ = ["guarantee_of"]

_SEES = {
    "upload": "an honest-but-curious server that sees every upload",
    "sum": "an honest-but-curious server, and clients that collude with it",
    "secret": "somebody who sees the models and does not learn who takes part; not the server",
}


def guarantee_of(
    plan: UDPPlan,
    *,
    quorum: tuple[int, int, int] | None,
    kept_back: Collection[str],
    insecure: bool,
) -> Guarantee:
    """Return the guarantee of a training.

    Parameters
    ----------
    plan : UDPPlan
        Its budget and noise.
    quorum : tuple of int, optional
        Where noise is shared and its clients are known: how many there are, how few of them may be
        in the sum, and how many may collude.
    kept_back : collection of str
        Arrays of which nothing is released.
    insecure : bool
        Whether noise came from a seed.
    """
    schedule, privacy = plan.weakest(), plan.privacy
    record, bound = privacy.unit == RECORD_UNIT, privacy.sensitivity_bound
    evidence: tuple[str, ...] = (
        "tests of UDP: its clipping bounds, its noise, what clients charge",
        "tests of the accountants against closed formulas and against each other",
    )
    if plan.evaluation is not None:
        evidence += (
            "tests of private evaluation: its sensitivity, its noise, what clients charge",
        )
    if schedule.noise == NONE:
        return Guarantee(
            scheme="udp",
            protects="nothing: there is no noise",
            adversary="nobody",
            not_protected=("the update of each client, which the server sees",),
        )
    secret = schedule.noise == PLD_SECRET
    not_protected = [
        "whether and when a client takes part, declines or fails",
        "what the user's own code sends elsewhere, and timing",
        "anything from a server that does not follow the protocol, beyond the node's policy",
    ]
    not_protected += ["the number of a client's records"] if record else []
    if plan.losses is not None and not plan.validation_share:
        not_protected.append(
            "unprotected_test_loss: the losses that clients report after every round, without noise"
        )
    if schedule.noise == PAPER:
        not_protected.insert(
            0,
            f"the (epsilon = {schedule.epsilon:g}) that the paper claims for its noise: all rounds "
            f"together cost a client up to epsilon {schedule.cap:.4g}, whether or not rounds are "
            "discounted or noise decays",
        )
    if secret:
        not_protected.append(
            f"more than epsilon {schedule.cap:.4g} against the server, which knows who takes part"
        )
    if kept_back:
        not_protected.append(f"(not uploaded at all: {', '.join(kept_back)})")
    assumptions = [
        "each client keeps its own ledger and its noise secret",
        "nothing else leaves the client's training",
    ]
    if schedule.sampling_rate < 1:
        assumptions.append(
            "each record of a client is in the batch of a round by itself, at the sampling rate, "
            "and nobody learns which are"
        )
    if secret:
        assumptions.append(
            "the server draws each client by itself and tells nobody who takes part; twice what a "
            "client adds is charged, as if the noise were there without the client too: a client's "
            "noise comes with its update, and for that no bound is proven"
        )
    if isinstance(privacy, DPSGD):
        assumptions += [
            "the app trains with what private_training returned: it checks the gradients, the "
            "batches and the weights of each step, but not what a loop does beside it, such as "
            "settings of the optimiser that follow raw losses; and a kernel that rounds one "
            "record's gradient otherwise in a larger batch is not counted",
            "the gradient of a record has nothing of other records: generated records are tried, "
            "which cannot show a clamp of the loss of a batch, statistics that the app took from "
            "its data, or records that are mixed by chance or later on",
        ]
        evidence += ("tests of private steps: what one record moves, noise, charge, refusals",)
    if bound == "convex" and not privacy.one_step:
        assumptions.append(
            "whoever trains is right that the loss of a record is a convex function of one linear "
            "output of the model, and how smooth: then steps do not move two models apart"
        )
    if plan.evaluation is not None and record:
        assumptions.append(
            "the accuracy that the app's evaluation returns is the share of its records that are "
            "right, each by itself"
        )
    if privacy.shared_noise:
        assumptions.append(_shared_text(quorum))
    void = "clients drew their noise from an insecure seed, for tests" if insecure else ""
    if bound == "unproven" and not privacy.one_step:
        void = (
            "sensitivity_unproven: the noise is for one step with all records, the training does "
            "more"
        )
    return Guarantee(
        scheme="udp",
        protects="one record of a client" if record else "all data of a client",
        adversary=_SEES["secret" if secret else "sum" if privacy.shared_noise else "upload"],
        neighbours=_neighbours(record=record, secret=secret),
        epsilon=schedule.epsilon if secret else schedule.cap,
        delta=schedule.delta,
        not_protected=tuple(not_protected),
        assumptions=tuple(assumptions),
        evidence=evidence,
        void=void,
    )


def _neighbours(*, record: bool, secret: bool) -> str:
    if secret:
        return f"one {'record of a client' if record else 'client'} is there or not"
    if record:
        return "one record of one client is replaced by another"
    return "the data of one client are replaced by any other"


def _shared_text(quorum: tuple[int, int, int] | None) -> str:
    text = "the noise is shared: a sum opens only with as many clients as its shares are meant for"
    if quorum is None:
        return text
    cohort, least, colluders = quorum
    return (
        f"{text}, {least} of the {cohort} of a round, of whom at most {colluders} collude with the "
        "server"
    )
