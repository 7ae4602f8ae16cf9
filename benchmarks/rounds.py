"""The rows that need Flower's Ray engine: an echo, rounds of FedAvg, of UDP, under a secure sum."""

from collections.abc import Iterator

from .engines import IMAGES, Engines, Seconds, engines
from .report import Comparison

__all__ = ["cohorts", "echo", "fedavg", "m2fdp", "secure_fedavg", "udp"]

ECHO_NODES, ECHO_EXCHANGES, ECHO_RUNS = 1000, 2, 2
FEDAVG_NODES, FEDAVG_ROUNDS, FEDAVG_PAIRS = 50, 3, 12
UDP_TURNS, UDP_ROUNDS = 6, 3
SECURE_NODES, SECURE_TURNS, SECURE_ROUNDS = 20, 6, 5
MNIST_IMAGES = 60_000 // SECURE_NODES  # what a client has where they share MNIST
COHORT_CLIENTS, COHORT_NODES, COHORT_ROUNDS, COHORT_RUNS = 200, 2, 4, 2


def echo() -> Iterator[Comparison]:
    """Compare the inline engine with Ray, per message."""
    ours: list[float] = []
    theirs: list[float] = []
    with engines() as engine:
        for _ in range(ECHO_RUNS):
            for seconds, run in ((ours, engine.inline), (theirs, engine.ray)):
                # The first exchange of a run starts the workers.
                [(_, exchanges)] = run("echo", nodes=ECHO_NODES, rounds=1 + ECHO_EXCHANGES)
                seconds += [exchange / ECHO_NODES for exchange in exchanges[1:]]
    yield Comparison(
        what=f"inline engine, {ECHO_NODES} x 4 kB echo, per message",
        rival="Flower on Ray, 2 workers, same apps",
        ours=ours,
        theirs=theirs,
        at_least=20.0,
    )


def fedavg() -> Iterator[Comparison]:
    """Compare our FedAvg with Flower's, in turns within one run; the first turns warm up."""
    turns = ["flower ours" if pair % 2 else "ours flower" for pair in range(1 + FEDAVG_PAIRS)]
    with engines() as engine:
        seconds = engine.ray(" ".join(turns), nodes=FEDAVG_NODES, rounds=FEDAVG_ROUNDS)
    yield Comparison(
        what=f"FedAvg on Ray, {FEDAVG_NODES} nodes, per round",
        rival="Flower's FedAvg, same client app",
        ours=_rounds(seconds[2:], "ours"),
        theirs=_rounds(seconds[2:], "flower"),
        at_most=1.05,
    )


def udp() -> Iterator[Comparison]:
    """Compare UDP with our FedAvg, in turns within one run; the first turns warm up."""
    parts = ["ours", "udp-user", "udp-record"]
    turns = [
        part for turn in range(1 + UDP_TURNS) for part in parts[turn % 3 :] + parts[: turn % 3]
    ]
    with engines() as engine:
        seconds = engine.ray(" ".join(turns), nodes=FEDAVG_NODES, rounds=UDP_ROUNDS)
    plain, user, record = (_rounds(seconds[len(parts) :], part) for part in parts)
    what = f"UDP on Ray, {FEDAVG_NODES} nodes, round at"
    rival = "our FedAvg, same client app"
    yield Comparison(what=f"{what} user level", rival=rival, ours=user, theirs=plain, at_most=1.15)
    yield Comparison(what=f"{what} record level", rival=rival, ours=record, theirs=plain)
    yield Comparison(
        what=f"{what} record level",
        rival="UDP at user level: an epoch of SGD in place of a step clipped per record",
        ours=record,
        theirs=user,
    )


def m2fdp() -> Iterator[Comparison]:
    """Compare M2FDP, one segment a round, with our FedAvg, in turns within one run."""
    turns = ["m2fdp ours" if turn % 2 else "ours m2fdp" for turn in range(1 + UDP_TURNS)]
    with engines() as engine:
        seconds = engine.ray(" ".join(turns), nodes=FEDAVG_NODES, rounds=UDP_ROUNDS)
    yield Comparison(
        what=f"M2FDP on Ray, {FEDAVG_NODES} nodes, one segment, per round",
        rival="our FedAvg, same client app",
        ours=_rounds(seconds[2:], "m2fdp"),
        theirs=_rounds(seconds[2:], "ours"),
        at_most=1.15,
    )


def secure_fedavg() -> Iterator[Comparison]:
    """Compare our FedAvg under a secure sum with itself without, in turns within one run.

    Of every turn the fastest round counts; the first turns warm up. The first round of a turn,
    which also learns keys and deals, and the last, which deals for no other, are left out.
    """
    turns = ["ours secure" if turn % 2 else "secure ours" for turn in range(1 + SECURE_TURNS)]
    with engines() as engine:
        for images, at_most in ((MNIST_IMAGES, 1.5), (IMAGES, None)):
            seconds = engine.ray(
                " ".join(turns), nodes=SECURE_NODES, rounds=SECURE_ROUNDS, images=images
            )
            fastest = [(part, [min(rounds[1:-1])]) for part, rounds in seconds[2:]]
            yield Comparison(
                what=f"secure sum on Ray, {SECURE_NODES} x {images} images, round",
                rival="our FedAvg without, same training",
                ours=_rounds(fastest, "secure"),
                theirs=_rounds(fastest, "ours"),
                at_most=at_most,
            )


def cohorts() -> Iterator[Comparison]:
    """Compare our FedAvg on few nodes, which play all clients, with Flower's node per client."""
    ours: list[float] = []
    theirs: list[float] = []
    with engines() as engine:
        for _ in range(COHORT_RUNS):
            theirs += _one_run(engine, "flower", nodes=COHORT_CLIENTS)
            ours += _one_run(engine, "ours", nodes=COHORT_NODES)
    yield Comparison(
        what=f"cohorts: {COHORT_CLIENTS} clients, {COHORT_NODES} nodes, per round",
        rival=f"Flower's FedAvg on {COHORT_CLIENTS} nodes, same client app",
        ours=ours,
        theirs=theirs,
        at_least=3.0,
    )


def _one_run(engine: Engines, part: str, *, nodes: int) -> list[float]:
    clients = 0 if nodes == COHORT_CLIENTS else COHORT_CLIENTS
    seconds = engine.ray(part, nodes=nodes, rounds=1 + COHORT_ROUNDS, clients=clients)
    return _rounds(seconds, part)[1:]  # the first round starts the workers


def _rounds(seconds: Seconds, side: str) -> list[float]:
    return [second for part, rounds in seconds if part == side for second in rounds]
