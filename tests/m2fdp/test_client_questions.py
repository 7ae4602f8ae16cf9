"""A device of M2FDP, asked directly: malformed questions, and files it cannot use."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tier_device import NONE, OPEN, START, TERMS, Fields, Node, simulated, terms

from flwr_privacy.clients import M2FDPClient
from flwr_privacy.clients.node.base import Trained
from flwr_privacy.errors import DataError, InvalidParameterError, LedgerError, ProtocolError
from flwr_privacy.m2fdp import Duty
from flwr_privacy.privacy.grid import CODE_LIMIT, CodeGrid
from flwr_privacy.wire.message import METRICS

DUTY: Fields = {
    **{k: TERMS[k] for k in ("unit", "noise_multiplier", "epsilon", "delta", "grid", "period")},
    **{k: TERMS[k] for k in ("law", "growth", "depth", "event", "tier")},
    "own_tier": 1,
    "way": "noised",
    "parent": "cloud",
    "children": ["a", "b"],
    "senders": ["a", "b"],
    "sealed": [b"1", b"2"],
    "round_model": bytes(32),
}


def duty(**changes: Any) -> Duty:
    return Duty(**{**DUTY, **changes})


BAD: dict[str, tuple[Fields, str]] = {
    "unit": ({"unit": "site"}, "^unit = 'site': expected one of"),
    "negative noise": ({"noise_multiplier": -1.0}, "^noise_multiplier = -1.0"),
    "nan": ({"noise_multiplier": float("nan")}, "^noise_multiplier = nan"),
    "epsilon": ({"epsilon": -1.0}, "^epsilon = -1.0"),
    "delta 0": ({"delta": 0.0}, "^delta = 0.0: expected a number between 0 and 1"),
    "delta 1": ({"delta": 1.0}, "^delta = 1.0: expected a number between 0 and 1"),
    "grid": ({"grid": 501}, "^grid = 501"),
    "a grid too fine": ({"grid": -40}, "^grid = -40: expected a coarser grid: 0.5 has no code"),
    "law": ({"law": "kind"}, "^law = 'kind': expected one of"),
    "growth": ({"growth": 0.5}, "^growth = 0.5"),
    "no clipping": ({"clipping_norm": 0.0}, "^clipping_norm = 0: expected a number above 0 where"),
    "clipping": ({"clipping_norm": -1.0}, "^clipping_norm = -1.0"),
    "steps": ({"steps": 0}, "^steps = 0"),
    "parent": ({"parent": ""}, "^parent = "),
    "event": ({"event": 0, "period": 1}, "^event = 0"),
    "tier": ({"tier": 2}, "^tier = 2"),
    "depth": ({"depth": 0}, "^depth = 0"),
    "sampling of a device": ({"sampling": 0.5}, "^sampling = 0.5: expected 1, as sampling_rate"),
    "sampling 0": ({"unit": "record", "sampling": 0.0}, "^sampling = 0.0: expected above 0"),
    "sampling too small": (
        {"unit": "record", "sampling": 0.2, "sampling_rate": 0.2},
        "^sampling = 0.2: expected at least the probability that a record",
    ),
    "rate": ({"unit": "record", "sampling_rate": 1.5}, "^sampling_rate = 1.5: expected above 0"),
    "a period of batches": (
        {"unit": "record", "event": 1, "sampling": 0.5, "sampling_rate": 0.2},
        "^period = 0: expected 1, the exchange itself",
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
    "down before the end": (
        {"way": "down"},
        "^way = 'down': expected 'down' exactly where tier = own_tier",
    ),
    "up at the end": (
        {"way": "up", "tier": 1},
        "^way = 'up': expected 'down' exactly where tier = own_tier",
    ),
    "tier": ({"tier": 2}, "^tier = 2"),
    "own tier": ({"own_tier": 0}, "^own_tier = 0"),
    "own tier of a device": ({"own_tier": 2}, "^own_tier = 2"),
    "min_children": ({"min_children": 0}, "^min_children = 0"),
    "a sender twice": (
        {"senders": ["a", "a"]},
        "^senders = .*: expected a different name for each answer",
    ),
    "too many": ({"sealed": [b"1"]}, "^senders = .*: expected a different name for each answer"),
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
