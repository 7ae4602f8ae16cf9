"""The secure sum: CPU of a client and of the server, and bytes, for a million parameters.

The rival is SecAgg+, as Flower's mod and workflow put it together from the functions that are
called here. Both sides begin with integers and end with the sum of integers. CPU is that of all
threads of this process, where all clients run, one after the other.
"""

import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import ndarray_to_bytes
from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import (
    decrypt,
    encrypt,
    generate_shared_key,
)
from flwr.common.secure_aggregation.ndarrays_arithmetic import (
    factor_combine,
    get_parameters_shape,
    parameters_addition,
    parameters_mod,
    parameters_subtraction,
)
from flwr.common.secure_aggregation.secaggplus_utils import (
    pseudo_rand_gen,
    share_keys_plaintext_concat,
    share_keys_plaintext_separate,
)
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.primitives.asymmetric import (
    bytes_to_private_key,
    bytes_to_public_key,
    generate_key_pairs,
    private_key_to_bytes,
    public_key_to_bytes,
)
from numpy.typing import NDArray

from flwr_privacy.clients import SecureSumClient, as_mod
from flwr_privacy.coding.packing import pack
from flwr_privacy.secure_sum import MaskedSum, Participant, SecureSum, Session
from flwr_privacy.secure_sum.graph import rosters
from flwr_privacy.secure_sum.masked import MASKED, residues
from flwr_privacy.simulations.engines.inline import run_inline
from flwr_privacy.strategies import FedAvg

from .report import Comparison

__all__ = ["secure_sum"]

CLIENTS, THRESHOLD, DROPPED = 100, 51, 10
PARAMETERS = 1_000_000
BITS = 16
SETTINGS = SecureSum(threshold=THRESHOLD, bits=BITS, largest_weight=1)

MANY, FEW = 1000, 3  # clients of a cohort with a sparse graph; those of them that are measured

OPENINGS = 5
THEIR_CLIENTS = 3
THEIR_OPENINGS = 2
THEIR_SEEDS, THEIR_KEYS, THEIR_MASKS = 5, 2, 20  # measured of an opening, then scaled
THEIR_MODULUS = 2**32  # its default

EXPERIMENT = "benchmark"
SECAGG = "Flower's SecAgg+"

_Result = TypeVar("_Result")


def secure_sum() -> Iterator[Comparison]:
    """Compare our secure sum with SecAgg+; its cost in a large cohort with that in a small one."""
    what = f"secure sum {CLIENTS} x {PARAMETERS:.0e}"
    cohort = _Cohort(CLIENTS, SETTINGS)
    opened = _one_sum(cohort)
    clients = [cohort.seconds[client] for client in cohort.names[:-DROPPED]]
    their_clients, item_bytes = _their_clients()
    yield Comparison(
        what=f"{what}, a client's CPU",
        rival=f"{SECAGG}, its functions",
        ours=clients,
        theirs=their_clients,
        at_least=5.0,
    )
    yield Comparison(
        what=f"{what}, opening, {DROPPED} gone",
        rival=f"{SECAGG}: {THEIR_SEEDS} seeds, {THEIR_KEYS} keys, {THEIR_MASKS} masks, scaled",
        ours=opened,
        theirs=[_their_opening() for _ in range(THEIR_OPENINGS)],
        at_least=5.0,
    )
    yield Comparison(
        what=f"{what}, up per value",
        rival=f"{SECAGG}: masked vectors alone, int64",
        ours=[_bytes_up()],
        theirs=[item_bytes],
        unit="B",
        at_most=math.ceil((BITS + math.log2(CLIENTS)) / 8) / item_bytes,
    )
    few, neighbours = _sparse()
    yield Comparison(
        what=f"of {MANY}, {neighbours} neighbours, a client's CPU",
        rival=f"ours in the complete graph of {CLIENTS}",
        ours=few,
        theirs=clients,
    )


class _Cohort:
    """A cohort of our clients and their server.

    Attributes
    ----------
    names : list of str
        The clients, sorted.
    seconds : Counter
        CPU of each client.
    """

    def __init__(self, clients: int, settings: SecureSum) -> None:
        self.names = sorted(str(index) for index in range(clients))
        self.seconds: Counter[str] = Counter()
        self._parties = {name: Participant(name, EXPERIMENT) for name in self.names}
        self._keys = {name: (party.public_key(), b"") for name, party in self._parties.items()}
        self._settings = settings
        self.bounds = settings.bounds(clients)
        self.session = self.new_session()

    def new_session(self) -> Session:
        """Return the server's side at the beginning."""
        return Session(
            name="session",
            experiment_id=EXPERIMENT,
            server_round=1,
            rosters=rosters(self.names, self._settings, seed=0, server_round=1),
            keys=self._keys,
            threshold=self._settings.threshold_of(len(self.names)),
            bounds=self.bounds,
        )

    def deal(self, clients: Iterable[str]) -> dict[str, Any]:
        """Have some clients deal; return what they dealt."""
        dealt = {}
        for client in clients:
            invitation = self.session.invitation(client)
            dealt[client] = self._timed(client, self._parties[client].deal, invitation)
            self.session.take_dealt(client, dealt[client])
        return dealt

    def send(self, client: str, codes: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Return a client's masked vector."""
        party, joined = self._parties[client], self.session.joined(client)

        def masked() -> NDArray[np.uint8]:
            party.join(joined)
            vector = residues({"weights": codes}, 1, self.bounds)
            bits = self.bounds.modulus_bits
            return pack(party.mask(joined.session, vector, bits), bits)

        return self._timed(client, masked)

    def reveal(self, client: str, survivors: Collection[str]) -> tuple[list[bytes], list[bytes]]:
        """Return the shares that a client reveals."""
        around = self.session.survivors_around(client, survivors)
        return self._timed(client, self._parties[client].reveal, self.session.name, around)

    def _timed(self, client: str, work: Callable[..., _Result], *arguments: Any) -> _Result:
        result, seconds = _cpu(work, *arguments)
        self.seconds[client] += seconds
        return result


def _one_sum(cohort: _Cohort) -> list[float]:
    """Sum the clients' vectors; return the CPU of each of some openings of the same sum."""
    draws = np.random.default_rng(0)
    survivors = cohort.names[:-DROPPED]
    dealt = cohort.deal(cohort.names)
    total = MaskedSum(PARAMETERS + 1, cohort.bounds.modulus_bits)
    expected = np.zeros(PARAMETERS + 1, np.int64)
    limit = cohort.bounds.code_limit
    for client in survivors:
        codes = draws.integers(-limit, limit + 1, PARAMETERS, dtype=np.int32)
        expected += np.append(codes, np.int32(1))
        total.accumulate(client, {MASKED: cohort.send(client, codes)}, weight=1)
    revealed = {client: cohort.reveal(client, survivors) for client in survivors}

    def opened(session: Session) -> NDArray[np.int64]:
        for client, answer in dealt.items():
            session.take_dealt(client, answer)
        for client, (keys, seeds) in revealed.items():
            session.take_revealed(client, survivors, keys, seeds)
        return session.open(total.total, survivors)

    seconds = []
    for _ in range(OPENINGS):
        values, taken = _cpu(opened, cohort.new_session())
        np.testing.assert_array_equal(values, expected)
        seconds.append(taken)
    return seconds


def _sparse() -> tuple[list[float], int]:
    """Return the CPU of some clients of a large cohort, and how many neighbours each one has."""
    cohort = _Cohort(MANY, SecureSum(bits=BITS, largest_weight=1))
    measured = cohort.names[:FEW]
    around = {peer for client in measured for peer in cohort.session.rosters[client]}
    cohort.deal(sorted(around))
    for client in measured:
        cohort.send(client, np.zeros(PARAMETERS, np.int32))
    for client in measured:
        cohort.reveal(client, around)
    seconds = [cohort.seconds[client] for client in measured]
    return seconds, len(cohort.session.rosters[measured[0]]) - 1


def _their_clients() -> tuple[list[float], float]:
    """Return the CPU of each of some clients of SecAgg+, and the bytes of a masked value."""
    codes = np.random.default_rng(0).integers(0, 2**BITS, PARAMETERS, dtype=np.int32)
    measured = [_cpu(_their_client, codes, _their_peers()) for _ in range(THEIR_CLIENTS)]
    vector = measured[0][0][-1]
    return [seconds for _, seconds in measured], vector.nbytes / vector.size


def _their_peers() -> dict[int, tuple[bytes, bytes]]:
    """Return two public keys of each of the other clients."""
    pairs = [(generate_key_pairs(), generate_key_pairs()) for _ in range(CLIENTS - 1)]
    return {
        node: (public_key_to_bytes(masks[1]), public_key_to_bytes(shares[1]))
        for node, (masks, shares) in enumerate(pairs, 1)
    }


def _their_client(
    codes: NDArray[np.int32], peers: dict[int, tuple[bytes, bytes]]
) -> list[NDArray[Any]]:
    """Do what the mod of client 0 does in the four stages of a round, without quantisation."""
    (sk1, _), (sk2, _) = generate_key_pairs(), generate_key_pairs()
    mask_key, share_key = private_key_to_bytes(sk1), private_key_to_bytes(sk2)
    seed = os.urandom(32)
    seed_shares = create_shares(seed, THRESHOLD, CLIENTS)
    key_shares = create_shares(mask_key, THRESHOLD, CLIENTS)
    channels, sealed = {}, {}
    for node, (_, public) in peers.items():
        channels[node] = generate_shared_key(
            bytes_to_private_key(share_key), bytes_to_public_key(public)
        )
        plain = share_keys_plaintext_concat(0, node, seed_shares[node], key_shares[node])
        sealed[node] = encrypt(channels[node], plain)
    # What the others sealed for this client has the same keys and lengths as what it sealed.
    for node, key in channels.items():
        share_keys_plaintext_separate(decrypt(key, sealed[node]))
    vector = factor_combine(1, [codes])
    shapes = get_parameters_shape(vector)
    vector = parameters_addition(vector, pseudo_rand_gen(seed, THEIR_MODULUS, shapes))
    for public, _ in peers.values():
        shared = generate_shared_key(bytes_to_private_key(mask_key), bytes_to_public_key(public))
        # Its number is below all others.
        mask = pseudo_rand_gen(shared, THEIR_MODULUS, shapes)
        vector = parameters_subtraction(vector, mask)
    vector = parameters_mod(vector, THEIR_MODULUS)
    for array in vector:
        ndarray_to_bytes(array)
    return vector


def _their_opening() -> float:
    """Return the CPU in which the workflow opens a sum, from that of a part of its work.

    It combines all shares that it was sent, and not only as many as it needs.
    """
    answering = CLIENTS - DROPPED
    vector = factor_combine(1, [np.zeros(PARAMETERS, np.int64)])
    shapes = get_parameters_shape(vector)
    peer = public_key_to_bytes(generate_key_pairs()[1])
    seeds = [os.urandom(32) for _ in range(THEIR_SEEDS)]
    keys = [private_key_to_bytes(generate_key_pairs()[0]) for _ in range(THEIR_KEYS)]
    seed_shares, key_shares = (
        [create_shares(secret, THRESHOLD, CLIENTS)[:answering] for secret in secrets]
        for secrets in (seeds, keys)
    )

    def combine(shares: list[bytes], secret: bytes) -> None:
        if combine_shares(shares) != secret:
            raise RuntimeError("the shares open another secret")

    def own_mask(seed: bytes) -> None:
        parameters_subtraction(vector, pseudo_rand_gen(seed, THEIR_MODULUS, shapes))

    def pair_mask(key: bytes) -> None:
        own_mask(generate_shared_key(bytes_to_private_key(key), bytes_to_public_key(peer)))

    def mean(work: Callable[..., None], *columns: Iterable[Any]) -> float:
        return statistics.mean(_cpu(work, *row)[1] for row in zip(*columns, strict=True))

    return (
        answering * (mean(combine, seed_shares, seeds) + mean(own_mask, seeds))
        + DROPPED * mean(combine, key_shares, keys)
        + DROPPED * answering * mean(pair_mask, [keys[0]] * THEIR_MASKS)
        + _cpu(parameters_mod, vector, THEIR_MODULUS)[1]
    )


def _bytes_up() -> float:
    """Return the payload of all of a client's messages in a first round, per parameter.

    Its public key, what it deals, its masked vector and what it reveals, as whole messages.
    """
    strategy = FedAvg(secure_sum=SETTINGS, min_available_nodes=CLIENTS)
    start = ArrayRecord({"weights": Array(np.zeros(PARAMETERS, np.float32))})
    lines: list[dict[str, Any]] = []
    server_app, client_app = ServerApp(), ClientApp(mods=[as_mod(SecureSumClient)])

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        lines.extend(strategy.start(grid, start, num_rounds=1).history)

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        content = {
            "arrays": message.content["arrays"],
            "metrics": MetricRecord({"num-examples": 1}),
        }
        return Message(RecordDict(content), reply_to=message)

    run_inline(server_app, client_app, nodes=CLIENTS)
    if lines[-1]["scheme"]["sum_opened"] != CLIENTS:
        raise RuntimeError("not all clients are in the sum")
    return float(lines[-1]["bytes_up"]) / CLIENTS / PARAMETERS


def _cpu(work: Callable[..., _Result], *arguments: Any) -> tuple[_Result, float]:
    """Return the result of some work, and the CPU that it took."""
    began = time.process_time()
    result = work(*arguments)
    return result, time.process_time() - began
