"""The row of the privacy card: what it costs a round after many rounds."""

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from flwr_privacy.accounting import Charge
from flwr_privacy.privacy.card import CardRelease, PrivacyCard
from flwr_privacy.privacy.card.histories import Histories
from flwr_privacy.privacy.guarantee import Guarantee

from .report import Comparison

__all__ = ["card"]

ROUNDS, COHORT, CLIENTS, REPEATS = 1000, 1000, 100_000, 7
BUDGET = 0.1  # seconds of a round


def card() -> Iterator[Comparison]:
    """Compare what a card costs the last of many rounds with a budget, and with all of them."""
    rng = np.random.default_rng(0)
    releases = [_release(server_round, rng) for server_round in range(1, ROUNDS + 1)]
    histories = Histories()
    _card(releases, histories)  # what is written of earlier rounds is made once
    ours = []
    for _ in range(REPEATS):
        releases.append(_release(len(releases) + 1, rng))
        began = time.perf_counter()
        _card(releases, histories)
        ours.append(time.perf_counter() - began)
    began = time.perf_counter()
    _card([replace(release) for release in releases], Histories())
    what = f"the card of a round after {ROUNDS} rounds of {COHORT} clients"
    anew = [time.perf_counter() - began]
    yield Comparison(what=what, rival="100 ms, the budget", ours=ours, theirs=[BUDGET], at_most=1.0)
    yield Comparison(what=what, rival="a card of all releases anew", ours=ours, theirs=anew)


def _release(server_round: int, rng: np.random.Generator) -> CardRelease:
    clients = rng.choice(CLIENTS, COHORT, replace=False)
    return CardRelease(
        phase="train",
        server_round=server_round,
        request=0,
        charge=Charge(neighbours="replace_one", noise_multiplier=20.0),
        clients=tuple(sorted(map(str, clients))),
        unanswered=(),
    )


def _card(releases: list[CardRelease], histories: Histories) -> None:
    """Count, write and draw a card, as a server does after a round."""
    promise = Guarantee(
        scheme="udp",
        protects="all data of a client",
        adversary="the server",
        neighbours="anything differs",
        epsilon=8.0,
        delta=1e-5,
    )
    made = PrivacyCard(experiment_id="e", guarantee=promise, releases=releases, histories=histories)
    made.state(["gdp"])
    made.to_json()
    made.to_html()
