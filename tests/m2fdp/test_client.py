"""A device of M2FDP, asked directly: what it sends, what it charges, and what it refuses."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from flwr.app import Context, RecordDict

from flwr_privacy.accounting import Charge
from flwr_privacy.clients import M2FDPClient
from flwr_privacy.clients.node.base import Trained
from flwr_privacy.clients.node.rehearsal import rehearse
from flwr_privacy.errors import (
    ChargedFailureError,
    DataError,
    DeclinedError,
    FlwrPrivacyError,
    InvalidParameterError,
    LedgerError,
    ProtocolError,
)
from flwr_privacy.m2fdp import (
    SCHEME,
    Duty,
    M2FDPTerms,
    Reach,
    SealedUpdate,
    TierSums,
    Upload,
    averaged,
)
from flwr_privacy.m2fdp.messages import packed, unpacked
from flwr_privacy.m2fdp.zone import GAP
from flwr_privacy.pipeline.mechanism import Facts
from flwr_privacy.pipeline.sealed import SEALED
from flwr_privacy.privacy.grid import CODE_LIMIT, CodeGrid
from flwr_privacy.privacy.ledger import Entry, Ledger
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.wire.documents import loads
from flwr_privacy.wire.fields import write
from flwr_privacy.wire.message import METRICS
from flwr_privacy.wire.pins import Identity

Fields = dict[str, Any]

GRID = CodeGrid(-24)
START = {"w": np.linspace(-1, 1, 6).reshape(2, 3), "b": np.zeros(2), "n": np.array(3)}
TERMS: Fields = {
    "unit": "user",
    "noise_multiplier": 0.5,
    "epsilon": 1e3,
    "delta": 1e-5,
    "grid": GRID.exponent,
    "period": 0,
    "law": "worst",
    "growth": 1.0,
    "depth": 2,
    "clipping_norm": 0.5,
    "steps": 2,
    "parent": "ward",
    "noised": True,
    "sealed": False,
    "event": 0,
    "tier": 0,
}
OPEN = {"noised": False}
NONE = {"noised": False, "noise_multiplier": 0.0}
DUTY: Fields = {
    **{k: TERMS[k] for k in ("unit", "noise_multiplier", "epsilon", "delta", "grid", "period")},
    **{k: TERMS[k] for k in ("law", "growth", "depth", "event", "tier")},
    "own_tier": 1,
    "way": "noised",
    "parent": "cloud",
    "children": ["a", "b"],
    "senders": ["a", "b"],
    "sealed": [b"1", b"2"],
}


def terms(**changes: Any) -> M2FDPTerms:
    return M2FDPTerms(**{**TERMS, **changes})


def duty(**changes: Any) -> Duty:
    return Duty(**{**DUTY, **changes})


class Node:
    """One node, asked without a server, with what it keeps."""

    def __init__(
        self, folder: Path, policy: Fields | None = None, name: str = "a", **config: Any
    ) -> None:
        self.folder, self.name = folder, name
        self.trainings = 0
        (folder / "policy.toml").write_text(tomli_w.dumps(policy or {}))
        self.config: Fields = {
            "client-id": name,
            "privacy-state": str(folder),
            "privacy-policy": str(folder / "policy.toml"),
            **config,
        }

    def train(self, start: Any) -> Trained:
        """Move every float by the same, far beyond any clipping norm."""
        self.trainings += 1
        moved = {k: v + 7 if v.dtype.kind == "f" else v for k, v in start.items()}
        return Trained(moved, {"num-examples": 5, "loss": 0.25})

    def ask(
        self,
        asked: M2FDPTerms | None = None,
        *,
        train: Any = None,
        phase: str = "train",
        **changes: Any,
    ) -> tuple[Fields, Fields]:
        place = {"experiment-id": "e", "round": 1, "request": 0, "summed": 0, "code-limit": 0}
        fields = {**place, **write(asked or terms())}
        fields |= {key.replace("_", "-"): value for key, value in changes.items()}
        context = Context(1, 1, self.config, RecordDict(), {})
        client = M2FDPClient(None, context)
        arrays, own = client.handle(phase, START, fields, train or self.train)
        return dict(arrays), own

    def entries(self) -> list[Entry]:
        return list(Ledger(self.folder / f"{self.name}.ledger", data_set=self.name).entries())


def simulated(folder: Path, policy: Fields | None = None) -> Node:
    return Node(folder, policy, **{"privacy-simulated": True})


def vector(arrays: Fields) -> Any:
    return GRID.step * np.concatenate([arrays["w"].reshape(-1), arrays["b"]])


# -- What it sends -------------------------------------------------------------------------------


def test_a_device_sends_codes_of_its_clipped_update_and_nothing_of_its_data(tmp_path: Path) -> None:
    arrays, own = simulated(tmp_path).ask(terms(**OPEN))
    assert {name: (a.shape, a.dtype) for name, a in arrays.items()} == {
        "w": ((2, 3), np.int32),
        "b": ((2,), np.int32),
    }
    expected = np.full(8, 0.5 / np.sqrt(8))
    np.testing.assert_allclose(vector(arrays), expected, atol=GRID.step)
    assert np.linalg.norm(vector(arrays)) <= 0.5
    assert own == {METRICS: {"num-examples": 1}}  # as for everybody; and no loss


def test_its_noise_is_that_of_the_charge(tmp_path: Path) -> None:
    """50 answers of 8 entries: the deviation is z 2 C within 5 standard errors (a sixth)."""
    node = Node(tmp_path)
    answers = [vector(node.ask(terms(epsilon=1e5), round=r)[0]) for r in range(1, 51)]
    noise = np.array(answers) - 0.5 / np.sqrt(8)
    assert noise.std() == pytest.approx(0.5 * 2 * 0.5, rel=5 / np.sqrt(2 * noise.size))
    charge = Charge(noise_multiplier=0.5, gap=GAP)
    assert {entry.charge for entry in node.entries()} == {charge}
    assert {(entry.scheme, entry.unit) for entry in node.entries()} == {(SCHEME, "user")}


def test_without_noise_nothing_is_charged(tmp_path: Path) -> None:
    node = simulated(tmp_path)
    arrays, _ = node.ask(terms(**NONE, clipping_norm=0.0, grid=-20))
    assert (arrays["w"] == 7 * 2**20).all()
    assert node.entries() == []


@pytest.mark.parametrize("keep_back", [["b"], []])
def test_arrays_that_are_kept_back_are_not_sent(keep_back: list[str], tmp_path: Path) -> None:
    arrays, _ = Node(tmp_path).ask(terms(keep_back=keep_back))
    assert sorted(arrays) == (["w"] if keep_back else ["b", "w"])


def test_a_node_that_plays_many_adds_their_codes_up_by_groups() -> None:
    client = M2FDPClient(None, Context(1, 1, {"partition-id": 0}, RecordDict(), {}))
    mean = client.accumulator("train", START, {"groups": {"0": "left"}, "keep-back": ["b"]})
    assert isinstance(mean, TierSums)
    assert sorted(mean.template) == ["w"]
    with pytest.raises(ProtocolError, match="'keep-back' is no list of names"):
        client.accumulator("train", START, {"groups": {}, "keep-back": "b"})


# -- Once ----------------------------------------------------------------------------------------


def test_the_same_question_gets_the_same_bytes_and_costs_once(tmp_path: Path) -> None:
    node = Node(tmp_path)
    one, other = node.ask()[0], node.ask()[0]
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name])
    assert (len(node.entries()), node.trainings) == (1, 1)


def test_the_same_question_with_other_terms_is_another_charge(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.ask()
    changes = ({"clipping_norm": 0.25}, {"keep_back": ["b"]})
    for change in changes:
        node.ask(terms(epsilon=100.0, **change))
    assert len(node.entries()) == 1 + len(changes)


def test_a_lost_answer_is_given_and_paid_for_again(tmp_path: Path) -> None:
    node = Node(tmp_path)
    first = node.ask()[0]
    for kept in tmp_path.glob("a.replies/*.reply"):
        kept.unlink()
    assert (vector(node.ask()[0]) != vector(first)).any()
    assert len(node.entries()) == 2


def test_an_answer_in_the_open_is_paid_for_once_per_period(tmp_path: Path) -> None:
    """Clean events: two exchanges of one period, then one of the next."""
    node = simulated(tmp_path)
    for event, period in ((0, 0), (1, 0), (2, 2)):
        node.ask(terms(**OPEN, event=event, period=period), request=event)
    assert node.trainings == 3
    assert [entry.question.request for entry in node.entries()] == [0, 2]
    with pytest.raises(DeclinedError, match="the same period was asked about with other noise"):
        node.ask(terms(**OPEN, event=3, period=2, noise_multiplier=0.25), request=3)
    assert len(node.entries()) == 2


def test_an_answer_in_the_open_and_a_noised_one_are_two_releases(tmp_path: Path) -> None:
    node = simulated(tmp_path)
    node.ask(terms(**OPEN))
    node.ask(terms())
    assert len(node.entries()) == 2


@pytest.mark.parametrize("asked", [{}, OPEN], ids=["noised", "in the open"])
def test_a_budget_that_is_spent_ends_it_before_the_training(asked: Fields, tmp_path: Path) -> None:
    node = simulated(tmp_path)
    node.ask(terms(**asked, epsilon=12.0), round=1)
    done = node.trainings
    with pytest.raises(DeclinedError, match=r"the budget is spent: epsilon .* of 12 after 1 rel"):
        node.ask(terms(**asked, epsilon=12.0), round=2)
    assert (len(node.entries()), node.trainings) == (1, done)


def test_an_experiment_protects_one_unit(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.ask()
    other = {"unit": "record", "sampling": 0.36, "sampling_rate": 0.2}
    with pytest.raises(ProtocolError, match="unit 'record': this experiment had another one"):
        node.ask(terms(**other), round=2)


@pytest.mark.parametrize("asked", [{}, OPEN], ids=["noised", "in the open"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_update_that_is_not_finite_cannot_be_told_from_none(
    asked: Fields, value: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sent = []
    for name, w in (("one", np.full((2, 3), value)), ("other", START["w"])):
        (tmp_path / name).mkdir()
        node = Node(tmp_path / name, **{"privacy-simulated": True, "insecure-seed": 3})

        def train(start: Any, w: Any = w) -> Trained:
            return Trained({**START, "w": w}, {"num-examples": 1})

        sent.append(vector(node.ask(terms(**asked), train=train)[0]))
        assert len(node.entries()) == 1
    np.testing.assert_array_equal(*sent)
    assert "the update of 'w' has NaN or infinity" in caplog.text  # in the log of the node


@pytest.mark.parametrize("asked", [{}, OPEN], ids=["noised", "in the open"])
def test_a_training_that_fails_is_paid_for_and_told_of_simulated_clients(
    asked: Fields, tmp_path: Path
) -> None:
    node = simulated(tmp_path)

    def train(start: Any) -> Trained:
        raise RuntimeError("no data")

    with pytest.raises(ChargedFailureError, match="there is no answer: RuntimeError"):
        node.ask(terms(**asked), train=train)
    assert len(node.entries()) == 1


@pytest.mark.parametrize("unit", ["user", "record"])
def test_a_training_that_fails_tells_a_server_nothing_that_is_not_paid_for(
    unit: str, tmp_path: Path
) -> None:
    node = Node(tmp_path)

    def train(start: Any) -> Trained:
        # In a rehearsal it gets no further than a trainer would.
        rehearse("train", np.zeros((3, 2)), np.zeros(3), work=lambda generated: None)
        raise RuntimeError("no data")

    if unit == "user":
        node.ask(train=train)
    else:  # nobody knows which records were in the steps of a training that failed
        asked = terms(unit="record", sampling_rate=0.1, steps=2, sampling=0.19)
        with pytest.raises(ChargedFailureError, match="until its operator acts"):
            node.ask(asked, train=train)
        with pytest.raises(DeclinedError, match="nothing more of this experiment"):
            node.ask(asked, round=2)
    assert len(node.entries()) == 1


def test_settings_that_do_not_fit_are_told_before_anything_is_paid(tmp_path: Path) -> None:
    node, misfit = Node(tmp_path), InvalidParameterError("steps", 3, "2, as the scheme asks")

    def train(start: Any) -> Trained:
        def work(generated: Any) -> None:
            raise misfit

        rehearse("train", np.zeros((3, 2)), np.zeros(3), work=work)
        raise misfit  # as the trainer would on the records

    with pytest.raises(InvalidParameterError, match="2, as the scheme asks"):
        node.ask(terms(unit="record", sampling_rate=0.1, steps=2, sampling=0.19), train=train)
    assert node.entries() == []


# -- What the operator allows ---------------------------------------------------------------------

POLICIES: dict[str, tuple[Fields, Fields, str]] = {
    "noise": (
        {"min_noise_multiplier": 0.6},
        {},
        "asks for noise multiplier 0.5: the node's policy has min_noise_multiplier = 0.6",
    ),
    "sigma": ({"min_sigma": 0.51}, {}, "asks for sigma 0.5: the node's policy has min_sigma"),
    "scheme": ({"schemes": ["udp"]}, {}, "scheme 'm2fdp' asks for a release: the node's policy"),
    "unit": ({"units": ["record"]}, {}, "protects the unit 'user': the node's policy has units"),
    "epsilon": ({"max_epsilon": 1.0}, {}, "the node's policy has max_epsilon = 1 for all"),
    "sum": ({"min_summed": 3}, {}, "outside of a secure sum was asked for: .* min_summed = 3"),
    "noise in the open": (
        {"min_noise_multiplier": 0.6},
        OPEN,
        "asks for noise multiplier 0.5: the node's policy has min_noise_multiplier = 0.6",
    ),
    "epsilon in the open": ({"max_epsilon": 1.0}, OPEN, "the node's policy has max_epsilon = 1"),
    "no noise, an epsilon": ({"max_epsilon": 1e6}, NONE, "'m2fdp' has no budget"),
    "no noise, units": ({"units": ["user"]}, NONE, "'m2fdp' has no budget"),
    "no noise, a noise": ({"min_noise_multiplier": 0.1}, NONE, "asks for noise multiplier 0"),
    "no noise, a sigma": ({"min_sigma": 0.1}, NONE, "asks for sigma 0"),
    "lemma": (
        {"max_epsilon": 1e6},
        {**OPEN, "law": "lemma"},
        "'m2fdp' has no budget: the node's policy has max_epsilon or units",
    ),
}


@pytest.mark.parametrize("what", POLICIES)
def test_A24_what_the_operator_does_not_allow_is_declined_unseen(what: str, tmp_path: Path) -> None:
    policy, changes, text = POLICIES[what]
    node = simulated(tmp_path, policy)
    with pytest.raises(DeclinedError, match=text):
        node.ask(terms(**changes))
    assert node.entries() == []
    assert node.trainings == 0


def test_what_the_operator_allows_is_answered(tmp_path: Path) -> None:
    policy = {
        "min_noise_multiplier": 0.5,
        "min_sigma": 0.5,
        "schemes": ["m2fdp"],
        "units": ["user"],
        "max_epsilon": 16.0,
    }
    assert Node(tmp_path, policy).ask()[0]


def test_a_device_that_noises_itself_needs_no_law_of_drift(tmp_path: Path) -> None:
    """Nobody else's model is in what it releases, so its cost is proven."""
    node = Node(tmp_path, {"max_epsilon": 1e6})
    node.ask(terms(law="lemma"))
    assert [entry.scheme for entry in node.entries()] == ["m2fdp"]


# -- In the open ----------------------------------------------------------------------------------

BARE = "an answer without noise was asked for, and the scheme 'm2fdp' promises"


@pytest.mark.parametrize(
    "changes", [OPEN, NONE, {**NONE, "noised": True}, {**NONE, "sealed": True}]
)
@pytest.mark.parametrize("policy", [{}, {"trusted_parents": ["ward"]}])
def test_A24_a_node_that_simulates_nobody_sends_nothing_bare(
    changes: Fields, policy: Fields, tmp_path: Path
) -> None:
    node = Node(tmp_path, policy)
    with pytest.raises(DeclinedError, match=BARE):
        node.ask(terms(**{**changes, "siblings": ["a", "b"]}))
    assert (node.entries(), node.trainings) == ([], 0)


@pytest.mark.parametrize("asked", [OPEN, NONE])
@pytest.mark.parametrize(
    "config", [{"privacy-simulated": True}, {"privacy-allow-unprotected": "udp, m2fdp"}]
)
def test_the_node_says_who_gets_answers_without_noise(
    config: Fields, asked: Fields, tmp_path: Path
) -> None:
    assert Node(tmp_path, **config).ask(terms(**asked))[0]


def test_a_node_that_plays_any_client_gives_its_own_no_leave(tmp_path: Path) -> None:
    node = Node(tmp_path, cohorts=True)
    del node.config["client-id"]
    node.config["partition-id"] = 0
    with pytest.raises(DeclinedError, match=BARE):
        node.ask(terms(**OPEN))


@pytest.mark.parametrize(
    "key",
    ["privacy-simulated", "privacy_simulated", "m2fdp-role", "privacy-policy", "insecure-seed"],
)
def test_a_message_cannot_say_what_is_the_nodes(key: str, tmp_path: Path) -> None:
    node = Node(tmp_path)
    context = Context(1, 1, node.config, RecordDict(), {key: "true"})
    place = {"experiment-id": "e", "round": 1, "request": 0}
    fields = {**write(terms(**OPEN)), **place, key: True}
    with pytest.raises(InvalidParameterError, match=r"^message = .*: expected no keys of the node"):
        M2FDPClient(None, Context(1, 1, node.config, RecordDict(), {})).handle(
            "train", START, fields, node.train
        )
    del fields[key]
    with pytest.raises(InvalidParameterError, match=r"^run-config = .*: expected no keys of the"):
        M2FDPClient(None, context).handle("train", START, fields, node.train)


# -- Sealed ---------------------------------------------------------------------------------------


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
        (Charge(noise_multiplier=0.5, gap=GAP), "m2fdp")
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
    upload = unpacked(channel.open(own["sealed"], *parts), sealing())
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


# -- Questions that are malformed -----------------------------------------------------------------

BAD: dict[str, tuple[Fields, str]] = {
    "unit": ({"unit": "site"}, "^unit = 'site': expected one of"),
    "negative noise": ({"noise_multiplier": -1.0}, "^noise_multiplier = -1.0"),
    "nan": ({"noise_multiplier": float("nan")}, "^noise_multiplier = nan"),
    "epsilon": ({"epsilon": -1.0}, "^epsilon = -1.0"),
    "delta 0": ({"delta": 0.0}, "^delta = 0.0: expected a number between 0 and 1"),
    "delta 1": ({"delta": 1.0}, "^delta = 1.0: expected a number between 0 and 1"),
    "grid": ({"grid": 501}, "^grid = 501"),
    "a grid too fine": ({"grid": -40}, "^grid = -40: expected one with codes up to 0.5"),
    "law": ({"law": "kind"}, "^law = 'kind': expected one of"),
    "growth": ({"growth": 0.5}, "^growth = 0.5"),
    "no clipping": ({"clipping_norm": 0.0}, "^clipping_norm = 0: expected a number above 0 where"),
    "clipping": ({"clipping_norm": -1.0}, "^clipping_norm = -1.0"),
    "steps": ({"steps": 0}, "^steps = 0"),
    "parent": ({"parent": ""}, "^parent = "),
    "event": ({"event": 0, "period": 1}, "^event = 0"),
    "tier": ({"tier": 2}, "^tier = 2"),
    "depth": ({"depth": 0}, "^depth = 0"),
    "sampling of a device": ({"sampling": 0.5}, "^sampling = 0.5: expected 1 where devices are"),
    "sampling 0": ({"unit": "record", "sampling": 0.0}, "^sampling = 0.0: expected above 0"),
    "sampling too small": (
        {"unit": "record", "sampling": 0.2, "sampling_rate": 0.2},
        "^sampling = 0.2: expected that of all its steps",
    ),
    "rate": ({"unit": "record", "sampling_rate": 1.5}, "^sampling_rate = 1.5: expected above 0"),
    "a period of batches": (
        {"unit": "record", "event": 1, "sampling": 0.5, "sampling_rate": 0.2},
        "^period = 0: expected the exchange itself, where batches are counted",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_malformed_terms_are_refused(what: str, tmp_path: Path) -> None:
    changes, message = BAD[what]
    with pytest.raises(InvalidParameterError, match=message):
        terms(**changes)
    if "" not in changes.values():  # what is empty is left out on the wire
        node = simulated(tmp_path)
        with pytest.raises(InvalidParameterError, match=message):
            node.ask(terms(), **changes)
        assert (node.entries(), node.trainings) == ([], 0)


BAD_DUTIES: dict[str, tuple[Fields, str]] = {
    "way": ({"way": "sideways"}, "^way = 'sideways': expected one of"),
    "down before the end": ({"way": "down"}, "^way = 'down': expected 'down' where the event ends"),
    "up at the end": (
        {"way": "up", "tier": 1},
        "^way = 'up': expected 'down' where the event ends",
    ),
    "tier": ({"tier": 2}, "^tier = 2"),
    "own tier": ({"own_tier": 0}, "^own_tier = 0"),
    "own tier of a device": ({"own_tier": 2}, "^own_tier = 2"),
    "min_children": ({"min_children": 0}, "^min_children = 0"),
    "a sender twice": ({"senders": ["a", "a"]}, "^senders = .*: expected one name for each answer"),
    "too many": ({"sealed": [b"1"]}, "^senders = .*: expected one name for each answer"),
    "a stranger": ({"senders": ["a", "c"]}, r"^senders = .*: expected some of \['a', 'b'\]"),
    "children twice": ({"children": ["a", "b", "b"]}, "^senders = .*: expected some of"),
    "event": ({"event": 0, "period": 1}, "^event = 0"),
}


@pytest.mark.parametrize("what", BAD_DUTIES)
def test_malformed_duties_are_refused(what: str) -> None:
    changes, message = BAD_DUTIES[what]
    duty()
    with pytest.raises(InvalidParameterError, match=message):
        duty(**changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"noise_multiplier": "0.5"}, "'noise-multiplier' of M2FDPTerms is no <class 'float'>"),
        ({"grid": -24.0}, "'grid' of M2FDPTerms is no <class 'int'>"),
        ({"noised": 1}, "'noised' of M2FDPTerms is no <class 'bool'>"),
        ({"siblings": [1]}, "'siblings' of M2FDPTerms is no list"),
        ({"steps": None}, "'steps' of M2FDPTerms is no <class 'int'>"),
    ],
)
def test_fields_of_another_type_are_refused(changes: Fields, text: str, tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match=text):
        simulated(tmp_path).ask(terms(**OPEN), **changes)


@pytest.mark.parametrize("phase", ["aggregate", "deliver"])
def test_a_device_averages_nothing(phase: str, tmp_path: Path) -> None:
    text = f"phase '{phase}' is not for this node: its configuration has m2fdp-role = 'device'"
    with pytest.raises(ProtocolError, match=text):
        Node(tmp_path).ask(phase=phase)


def test_an_aggregator_trains_nothing(tmp_path: Path) -> None:
    node = Node(tmp_path, **{"m2fdp-role": "aggregator"})
    text = "phase 'train' is not for this node: its configuration has m2fdp-role = 'aggregator'"
    with pytest.raises(ProtocolError, match=text):
        node.ask()
    assert node.trainings == 0


def test_a_role_is_one_of_two(tmp_path: Path) -> None:
    node = Node(tmp_path, **{"m2fdp-role": "spy"})
    with pytest.raises(InvalidParameterError, match=r"^m2fdp-role = 'spy': expected one of"):
        node.ask()


def test_a_client_needs_its_context() -> None:
    with pytest.raises(TypeError, match="M2FDPClient needs the context"):
        M2FDPClient(None, None).introduce("e")


def test_files_that_cannot_be_used_are_said_to_the_node_alone(tmp_path: Path) -> None:
    node = Node(tmp_path)
    (tmp_path / "policy.toml").write_text("trusted_parent = 3\n")
    with pytest.raises(LedgerError, match=r"policy.*trusted_parent"):
        node.ask()


def test_an_update_that_no_code_holds_is_refused_without_clipping(tmp_path: Path) -> None:
    node = simulated(tmp_path)

    def train(start: Any) -> Trained:
        return Trained({**START, "w": START["w"] + 65.0}, {"num-examples": 1})

    with pytest.raises(DataError, match="the update has values beyond 64: clip it"):
        node.ask(terms(**NONE, clipping_norm=0.0, grid=-20), train=train)


def test_codes_have_room_for_noise_up_to_their_limit(tmp_path: Path) -> None:
    """The largest deviation that fits a grid; beyond the limit codes saturate and stay int32."""
    grid = CodeGrid.holding(0.5)
    arrays, _ = Node(tmp_path).ask(terms(grid=grid.exponent, noise_multiplier=5.0))
    codes = np.concatenate([a.reshape(-1) for a in arrays.values()])
    assert codes.dtype == np.int32
    assert (np.abs(codes.astype(np.int64)) == CODE_LIMIT).any()


def test_a_seeded_node_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "flwr.privacy"):
        for name, config, changes in (
            ("seeded", {"insecure-seed": 3}, {}),
            ("open", {"insecure-seed": 3, "privacy-simulated": True}, OPEN),
        ):
            folder = tmp_path / name
            folder.mkdir()
            _, own = Node(folder, **config).ask(terms(**changes))
            assert own[METRICS]["insecure-noise"] == 1.0
    assert "draws its noise from a seed: nothing is protected" in caplog.text


# -- What the carrier of sealed messages sees ----------------------------------------------------


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
        upload = unpacked(own[SEALED], asked)
        assert int(upload.codes[0] > CODE_LIMIT) == (clean and towards > 0)
        mean = averaged([upload], asked.drift, tier=1, grid=CodeGrid(asked.grid))
        lengths.add((len(own[SEALED]), len(packed(mean, asked))))
    assert len(lengths) == 1
