"""Identities of clients and experiments, and the seeds derived from them.

Flower's node ids are drawn anew in every run, so nothing that must last can hang on them. A
`client_id` names a client for ever, an `experiment_id` names a training that may be resumed in
several Flower runs.
"""

import hashlib
import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_privacy.errors import InvalidParameterError

__all__ = [
    "check_client_id",
    "client_id_from",
    "derive_seed",
    "fingerprints",
    "new_experiment_id",
    "places",
    "stream",
]

CLIENT_ID_KEY = "client-id"
PARTITION_ID_KEY = "partition-id"

_CLIENT_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_RESERVED = {".", ".."}


def check_client_id(client_id: str, *, parameter: str = CLIENT_ID_KEY) -> str:
    """Return `client_id` if it is valid as the name of a client and of a folder.

    Raises
    ------
    InvalidParameterError
        Unless it is 1 to 64 letters, digits, dots, dashes or underscores.
    """
    if not _CLIENT_ID.fullmatch(client_id) or client_id in _RESERVED:
        raise InvalidParameterError(
            parameter, client_id, "1 to 64 letters, digits, '.', '-' or '_'"
        )
    return client_id


def client_id_from(node_config: Mapping[str, Any]) -> str:
    """Read the identity of a client from the configuration of its node.

    Parameters
    ----------
    node_config : Mapping
        Flower's node configuration. ``client-id`` counts; without it, ``partition-id``.

    Raises
    ------
    InvalidParameterError
        If neither key is there or the identity is malformed.

    Examples
    --------
    >>> client_id_from({"partition-id": 3, "num-partitions": 10})
    '3'
    >>> client_id_from({"partition-id": 3, "client-id": "ward-7"})
    'ward-7'
    """
    for key in (CLIENT_ID_KEY, PARTITION_ID_KEY):
        if key in node_config:
            return check_client_id(str(node_config[key]))
    raise InvalidParameterError(
        "node-config",
        sorted(node_config),  # the keys only: an error goes to the server, a configuration never
        f"the key '{CLIENT_ID_KEY}' or '{PARTITION_ID_KEY}' "
        "(flower-supernode --node-config 'client-id=\"...\"')",
    )


def new_experiment_id() -> str:
    """Return a fresh random identity for an experiment (128 bits, hexadecimal)."""
    return secrets.token_hex(16)


def derive_seed(root: int | str, *purpose: str | int) -> int:
    """Derive a 63-bit seed for one purpose from the root of an experiment.

    Parameters
    ----------
    root : int or str
        The experiment's seed, or its identity where no seed was given.
    *purpose : str or int
        What the seed is for, most general first, e.g. ``("train", client_id, round)``.

    Notes
    -----
    The parts are length-prefixed before they are hashed (SHA-256), so different purposes never
    collide by concatenation. For sampling, data and training only: nothing that protects anyone
    may be drawn from such a seed.

    Examples
    --------
    >>> derive_seed(0, "train", "7", 1) == derive_seed(0, "train", "7", 1)
    True
    >>> derive_seed(0, "train", "7", 1) == derive_seed(0, "train", "71")
    False
    """
    digest = hashlib.sha256()
    for part in (root, *purpose):
        encoded = f"{type(part).__name__}:{part}".encode()
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return int.from_bytes(digest.digest()[:8], "big") >> 1


def stream(root: int | str, *purpose: str | int) -> np.random.Generator:
    """Return the (not cryptographic) random generator of one purpose; see `derive_seed`."""
    return np.random.default_rng(derive_seed(root, *purpose))


def fingerprints(identities: Iterable[str | int]) -> NDArray[np.uint64]:
    """Return a 64-bit hash of each identity (BLAKE2b), for `places`.

    Parameters
    ----------
    identities : iterable of str or int
        Whose.
    """
    digests = (hashlib.blake2b(str(who).encode(), digest_size=8).digest() for who in identities)
    return np.frombuffer(b"".join(digests), np.uint64)


def places(seed: int, prints: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a sort key of each identity, which puts them into a random order.

    A place depends on the seed and the one identity, so that the order of the others stays as it
    is when somebody is missing. All of them are computed at once, because populations are large.

    Parameters
    ----------
    seed : int
        Seed of the order, 0 to 2**63 - 1.
    prints : (n,) uint64
        The identities, as `fingerprints` returns them.

    Returns
    -------
    (n,) uint64
        The places.

    Notes
    -----
    The finaliser of SplitMix64 (Steele, Lea, Flood 2014), twice, on the fingerprint and the seed.
    For sampling only, as `derive_seed`.

    Examples
    --------
    >>> some, all_of_them = fingerprints("ac"), fingerprints("abc")
    >>> bool((places(7, some) == places(7, all_of_them)[[0, 2]]).all())
    True
    """
    mixed = prints ^ np.uint64(seed)
    for _ in range(2):
        mixed = mixed + np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        mixed ^= mixed >> np.uint64(31)
    return mixed
