"""A device of M2FDP, asked directly: answers that only its parent can open."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from flwr.app import Context, RecordDict
from tier_device import GRID, OPEN, START, Fields, Node, simulated, terms, vector

from flwr_privacy.accounting import Charge
from flwr_privacy.clients import M2FDPClient
from flwr_privacy.errors import DeclinedError, FlwrPrivacyError, ProtocolError
from flwr_privacy.m2fdp import M2FDPTerms, SealedUpdate, Upload, averaged
from flwr_privacy.m2fdp.messages import packed, unpacked
from flwr_privacy.m2fdp.sensitivity import Reach
from flwr_privacy.m2fdp.zone_average import GAP
from flwr_privacy.pipeline.mechanism import Facts
from flwr_privacy.pipeline.sealed import SEALED
from flwr_privacy.privacy.grid import CODE_LIMIT, CodeGrid
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.wire.documents import loads
from flwr_privacy.wire.message import METRICS
from flwr_privacy.wire.pins import Identity


def zone(folder: Path, policy: Fields | None = None) -> tuple[Node, Node]:
    """Return a device and the aggregator "ward" that it trusts and whose key it pins."""
    identities = {name: Identity.generate() for name in ("a", "ward")}
    nodes = []
    for name, other in (("a", "ward"), ("ward", "a")):
        own = folder / name
        own.mkdir()
        identities[name].write(own / "identity.pem")
        pins = {"clients": {other: identities[other].public}}
        (own / "pins.toml").write_text(tomli_w.dumps(pins))
        config = {
            "privacy-identity": str(own / "identity.pem"),
            "privacy-pins": str(own / "pins.toml"),
            "m2fdp-role": "device" if name == "a" else "aggregator",
        }
        trusted = {"trusted_parents": ["ward"]} if name == "a" else {}
        node = Node(own, {**trusted, **(policy or {})}, name, **config)
        nodes.append(node)
    return nodes[0], nodes[1]


def keys_of(node: Node, prefix: str = "parent") -> Fields:
    told = M2FDPClient(None, Context(1, 1, node.config, RecordDict(), {})).introduce("e")
    return {f"{prefix}_key": told["key"], f"{prefix}_signature": told["signature"]}


def sealing(**changes: Any) -> M2FDPTerms:
    return terms(**{"noised": False, "sealed": True, "siblings": ["a", "b"], **changes})


def test_a_sealed_answer_has_nothing_in_the_open(tmp_path: Path) -> None:
    device, ward = zone(tmp_path)
    arrays, own = device.ask(sealing(), **keys_of(ward))
    assert arrays == {}
    assert set(own) == {METRICS, "sealed"}
    assert own[METRICS] == {"num-examples": 1}
    entries = device.entries()
    assert [(e.charge, e.scheme) for e in entries] == [
        (Charge(neighbours="replace_one", noise_multiplier=0.5, gap=GAP), "m2fdp")
    ]


def test_a_sealed_answer_has_the_same_codes_as_one_in_the_open(tmp_path: Path) -> None:
    from flwr_privacy.clients.node.context_store import ContextStore
    from flwr_privacy.m2fdp.messages import going_up, unpacked
    from flwr_privacy.pipeline.experiment_keys import channel_to

    device, ward = zone(tmp_path)
    _, own = device.ask(sealing(), **keys_of(ward))
    store = ContextStore.of(Context(1, 1, ward.config, RecordDict(), {}))
    told = keys_of(device, "own")
    channel = channel_to(store, "m2fdp", "e", "a", told["own_key"], told["own_signature"])
    place = {"experiment-id": "e", "round": 1}
    parts = going_up(place, sealing(), sender="a", tier=2, receiver="ward", children=["a", "b"])
    upload = unpacked(channel.open(own["sealed"], *parts), sealing(), sender="a")
    (tmp_path / "open").mkdir()
    arrays, _ = simulated(tmp_path / "open").ask(terms(**OPEN))
    np.testing.assert_allclose(GRID.step * upload.codes, vector(arrays))
    assert upload.reach.total == 2 * 0.5
    assert "codes" in loads(channel.open(own["sealed"], *parts))


def test_a_sealed_answer_is_paid_for_once_per_period(tmp_path: Path) -> None:
    device, ward = zone(tmp_path)
    for event, period in ((0, 0), (1, 0), (1, 0), (2, 2)):
        device.ask(sealing(event=event, period=period), **keys_of(ward))
    assert len(device.entries()) == 2
    with pytest.raises(DeclinedError, match="the same period was asked about with other noise"):
        device.ask(sealing(noise_multiplier=0.25), **keys_of(ward))


UNTRUSTED: dict[str, tuple[Fields, type[FlwrPrivacyError], str]] = {
    "another parent": ({"parent": "room"}, DeclinedError, "the parent 'room' is not trusted"),
    "the cloud": ({"parent": "cloud"}, DeclinedError, "the parent 'cloud' is not trusted"),
    "no key": ({"parent_key": "k"}, ProtocolError, "no public key of 'ward'"),
    "another key": ({"parent_key": bytes(32)}, ProtocolError, "signature of client 'ward' does"),
    "no signature": ({"parent_signature": b""}, ProtocolError, "signature of client 'ward' does"),
    "not asked": ({"siblings": ["b", "c"]}, ProtocolError, "does not name this device among"),
    "forged start": (
        {"start_sealed": b"0" * 64, "start_event": 0},
        ProtocolError,
        "damaged, or sealed for another purpose: a message from 'ward' to 'a'",
    ),
    "start of no event": ({"start_sealed": b"0" * 64}, ProtocolError, "which event a sealed model"),
}


@pytest.mark.parametrize("what", UNTRUSTED)
def test_A24_a_device_seals_for_nobody_else(what: str, tmp_path: Path) -> None:
    changes, error, text = UNTRUSTED[what]
    device, ward = zone(tmp_path)
    with pytest.raises(error, match=text):
        device.ask(sealing(), **{**keys_of(ward), **changes})
    assert (device.entries(), device.trainings) == ([], 0)


@pytest.mark.parametrize("policy", [{"trusted_parents": []}, {"trusted_parents": ["room"]}])
def test_A24_whom_a_device_trusts_is_its_own_list(policy: Fields, tmp_path: Path) -> None:
    device, ward = zone(tmp_path, policy)
    listed = list(policy["trusted_parents"])
    text = rf"the parent 'ward' is not trusted: this node's policy has trusted_parents = \{listed}"
    with pytest.raises(DeclinedError, match=text.replace("]", r"\]")):
        device.ask(sealing(), **keys_of(ward))


def test_a_device_without_pins_or_identity_seals_nothing(tmp_path: Path) -> None:
    device, ward = zone(tmp_path)
    told = keys_of(ward)
    del device.config["privacy-pins"]
    with pytest.raises(ProtocolError, match="'ward' may be anybody: this node pins no keys"):
        device.ask(sealing(), **told)
    del device.config["privacy-identity"]
    client = M2FDPClient(None, Context(1, 1, device.config, RecordDict(), {}))
    assert client.introduce("e") == {"role": "device"}


def test_a_sealed_answer_is_subject_to_the_devices_policy(tmp_path: Path) -> None:
    device, ward = zone(tmp_path, {"min_noise_multiplier": 0.6})
    with pytest.raises(DeclinedError, match=r"min_noise_multiplier = 0\.6"):
        device.ask(sealing(), **keys_of(ward))
    device.config["privacy-policy"] = str(tmp_path / "other.toml")
    (tmp_path / "other.toml").write_text('trusted_parents = ["ward"]\nmax_epsilon = 1e6\n')
    with pytest.raises(DeclinedError, match="'m2fdp' has no budget"):
        device.ask(sealing(law="lemma"), **keys_of(ward))
    assert device.entries() == []


def test_A24_a_floor_of_sigma_is_not_passed_over_where_the_parent_adds_the_noise(
    tmp_path: Path,
) -> None:
    """The zone's noise is at most that of a device alone, z 2 C = 0.5: below the floor for sure."""
    device, ward = zone(tmp_path, {"min_sigma": 0.6})
    with pytest.raises(DeclinedError, match="min_sigma"):
        device.ask(sealing(), **keys_of(ward))


@pytest.mark.parametrize("clean", [False, True])
def test_how_long_a_sealed_message_is_says_nothing_of_the_data(clean: bool) -> None:
    """Nor whether codes leave 32 bits after a clean event, on a grid that a server chose for it."""
    asked = terms(
        **{**OPEN, "sealed": True}, grid=CodeGrid.holding(0.5).exponent, clipping_norm=0.5
    )
    zone = None
    if clean:
        codes = np.zeros(8, np.int64)
        codes[0] = CODE_LIMIT
        zone = Upload(codes, Reach(anchor=1, shared=0.5), wide=True)
    mechanism = SealedUpdate(asked, {}, zone)
    plan, lengths = mechanism.plan(START, Facts()), set[tuple[int, int]]()
    for towards in (-1.0, 0.0, 1.0):
        model = {name: array.copy() for name, array in mechanism.model(START).items()}
        model["w"].reshape(-1)[0] += towards
        _, own = mechanism.noise(mechanism.measure(START, model), plan, SecureRandom())
        upload = unpacked(own[SEALED], asked, sender="a")
        assert int(upload.codes[0] > CODE_LIMIT) == (clean and towards > 0)
        mean = averaged([upload], asked.drift, tier=1, grid=CodeGrid(asked.grid))
        lengths.add((len(own[SEALED]), len(packed(mean, asked))))
    assert len(lengths) == 1
