"""A secure sum in one process: the participants, and what they and a session tell each other."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from flwr_privacy.coding.packing import pack
from flwr_privacy.secure_sum import Bounds, MaskedSum, Participant, Session
from flwr_privacy.secure_sum.masked import MASKED, residues

EXPERIMENT = "experiment"
ENTRIES = 4  # of a vector; the weight makes one more
BOUNDS = Bounds(cohort=5, code_limit=100, largest_weight=8, modulus_bits=13)


def new_parties(count: int) -> dict[str, Participant]:
    names = [f"c{i:02}" for i in range(count)]
    return {name: Participant(name, EXPERIMENT) for name in names}


def new_session(
    parties: Mapping[str, Participant],
    *,
    name: str = "first",
    server_round: int = 1,
    step: int = 0,
    threshold: int = 3,
    rosters: Mapping[str, list[str]] | None = None,
    bounds: Bounds = BOUNDS,
) -> Session:
    return Session(
        name=name,
        experiment_id=EXPERIMENT,
        server_round=server_round,
        step=step,
        rosters=rosters or dict.fromkeys(parties, sorted(parties)),
        keys={client: (party.public_key(), b"") for client, party in parties.items()},
        threshold=threshold,
        bounds=bounds,
    )


def deal(session: Session, parties: Mapping[str, Participant], who: Iterable[str]) -> None:
    for client in who:
        session.take_dealt(client, parties[client].deal(session.invitation(client)))


def join(session: Session, parties: Mapping[str, Participant], who: Iterable[str]) -> None:
    for client in who:
        parties[client].join(session.joined(client))


def vector_of(client: str, bounds: Bounds = BOUNDS) -> tuple[np.ndarray, int]:
    """Return the codes of a client, with both ends of their range among them, and its weight."""
    number = int(client[1:])
    draws = np.random.default_rng(number)
    codes = draws.integers(-bounds.code_limit, bounds.code_limit, ENTRIES, endpoint=True)
    codes[:2] = bounds.code_limit, -bounds.code_limit
    return codes, bounds.largest_weight - number % 2


def masked(
    session: Session, parties: Mapping[str, Participant], who: Iterable[str]
) -> dict[str, np.ndarray]:
    vectors = {}
    for client in who:
        codes, weight = vector_of(client, session.bounds)
        vector = residues({"w": codes}, weight, session.bounds)
        vectors[client] = parties[client].mask(session.name, vector, session.bounds.modulus_bits)
    return vectors


def summed(vectors: Mapping[str, np.ndarray], bounds: Bounds = BOUNDS) -> MaskedSum:
    total = MaskedSum(ENTRIES + 1, bounds.modulus_bits)
    for client, vector in vectors.items():
        total.accumulate(client, {MASKED: pack(vector, bounds.modulus_bits)}, weight=1)
    return total


def reveal(
    session: Session,
    parties: Mapping[str, Participant],
    survivors: Sequence[str],
    who: Iterable[str],
) -> None:
    for client in who:
        around = session.survivors_around(client, survivors)
        session.take_revealed(client, survivors, *parties[client].reveal(session.name, around))


def plain_sum(clients: Iterable[str], bounds: Bounds = BOUNDS) -> list[int]:
    """Return what a sum over some clients must be, in Python's integers."""
    total = [0] * (ENTRIES + 1)
    for client in clients:
        codes, weight = vector_of(client, bounds)
        vector = [int(code) * weight for code in codes] + [weight]
        total = [one + other for one, other in zip(total, vector, strict=True)]
    return total
