"""What the checks of the plugin refuse, and what they make of schemes of somebody's own."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flwr_privacy.clients import (
    ACFLClient,
    CentralDPClient,
    FedAvgClient,
    FedVSClient,
    SecureSumClient,
    UDPClient,
    as_mod,
)
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.reliability.federations import FEDERATIONS, SmallFederation
from flwr_privacy.simulations.research.audits.observed import Claim, Released, Session
from flwr_privacy.simulations.research.audits.verdicts import CANNOT_TELL, NOT_REFUTED, REFUTED
from flwr_privacy.simulations.testing import audit_of, crowd_of, faults_of, own_faults
from flwr_privacy.simulations.testing.apps import message_app
from flwr_privacy.strategies import ACFL, UDP, CentralDP, FedAvg, FedVS


def gaussian(noise: float = 1.0, **changes: Any) -> Callable[[], Session]:
    """Return a training of a Gaussian mechanism with sensitivity 1, which is no scheme of ours."""

    def train() -> Session:
        draws = np.random.default_rng()
        directions = np.eye(400)[:12]
        releases = [
            Released(
                place=("0", server_round),
                kind="far",
                values=direction + 0.1 * noise * draws.normal(size=400),
                expected=direction,
                sigma=0.1,
                blocks=(400,),
                canary=direction,
                reach=1.0,
            )
            for server_round, direction in enumerate(directions)
        ]
        claim = Claim(epsilon=800.0, delta=1e-5, budget=800.0, charged=12)
        session = Session(releases=releases, claim=claim, answered={"train": 12})
        return replace(session, **changes)

    return train


def test_a_scheme_of_ones_own_is_a_function() -> None:
    assert audit_of(gaussian()).verdict == NOT_REFUTED
    with pytest.raises(AssertionError, match=r"train: refuted: .*noise as a whole \(0\.[78]"):
        audit_of(gaussian(0.8))
    assert audit_of(gaussian(0.8), accept=(REFUTED,)).refuted.startswith("noise")


def test_noise_that_comes_again_needs_two_sessions() -> None:
    one = gaussian()()
    assert audit_of(lambda: one, sessions=1).verdict == NOT_REFUTED
    with pytest.raises(AssertionError, match="noise that comes again in another training"):
        audit_of(lambda: one)


def test_hearing_nothing_is_no_pass() -> None:
    silent = gaussian(releases=[], answered={})
    with pytest.raises(AssertionError, match="cannot tell: too little was heard"):
        audit_of(silent)
    assert audit_of(silent, accept=(CANNOT_TELL,)).verdict == CANNOT_TELL


def test_one_client_that_charges_too_little_is_refuted() -> None:
    with pytest.raises(AssertionError, match=r"not charged \(client 1: 3 answers, 2 charges"):
        audit_of(gaussian(uncharged=("client 1: 3 answers, 2 charges",)))


def test_samples_alone_go_on_without_a_bound() -> None:
    audit = audit_of(CentralDP, CentralDPClient, kind="samples of clients", sessions=1, rounds=3)
    assert audit.verdict == CANNOT_TELL


def test_options_reach_the_training() -> None:
    audit = audit_of(UDP, UDPClient, epsilon=500.0, rounds=8, sessions=1)
    assert 490 < audit.claimed <= 500
    assert audit.releases == 24


@pytest.mark.parametrize(
    ("given", "named", "text"),
    [
        (
            (FedAvg, FedAvgClient),
            {},
            "strategy: .*one of UDP, CentralDP, ACFL, M2FDP",
        ),
        ((UDP,), {}, "client: .*the client half"),
        ((UDP, UDPClient), {"kind": "zone"}, "kind: .*zone.*users"),
        ((UDP, UDPClient), {"sessions": 0}, "sessions: .*0"),
        ((UDP, UDPClient), {"accept": ("fine",)}, "accept: .*fine"),
        ((gaussian(), UDPClient), {}, "client: .*nothing beside a function"),
        ((gaussian(),), {"epsilon": 3.0}, "epsilon: .*nothing beside a function"),
        ((3,), {}, "subject: .*a strategy's class, or a function"),
    ],
)
def test_an_audit_says_what_it_does_not_take(given: Any, named: Any, text: str) -> None:
    with pytest.raises(InvalidParameterError, match=_named(text)):
        audit_of(*given, **named)


@pytest.mark.parametrize(
    ("given", "named", "text"),
    [
        ((ACFL, ACFLClient), {}, "strategy: .*UDP, CentralDP, M2FDP"),
        ((UDP, UDPClient), {"kind": "records"}, "kind: .*records"),
        ((UDP, UDPClient), {"epsilon": 0.0}, "epsilon: .*0"),
        ((UDP, UDPClient), {"clients": 3}, "clients: .*3"),
    ],
)
def test_a_crowd_says_what_it_does_not_take(given: Any, named: Any, text: str) -> None:
    with pytest.raises(InvalidParameterError, match=_named(text)):
        crowd_of(*given, **named)


@pytest.mark.parametrize(
    ("given", "named", "text"),
    [
        ((UDP, UDPClient), {"faults": ["flood"]}, "faults: .*flood"),
        ((UDP,), {}, "client: .*the client half"),
        ((UDP, FedAvgClient), {}, "subject: .*with its client half"),
        ((FEDERATIONS["udp"], UDPClient), {}, "client: .*nothing beside a federation"),
        ((FEDERATIONS["udp"],), {"options": {"epsilon": 3.0}}, "options: .*nothing beside"),
    ],
)
def test_faults_say_what_they_do_not_take(given: Any, named: Any, text: str) -> None:
    with pytest.raises(InvalidParameterError, match=_named(text)):
        faults_of(*given, **named)


def _named(text: str) -> str:
    name, _, rest = text.partition(": ")
    return f"(?s){name}.*{rest}"


def small(federation: SmallFederation) -> SmallFederation:
    """Return a federation in which faults are tried in the training alone."""
    return replace(federation, spots=tuple(s for s in federation.spots if s.phase == "train"))


def test_a_federation_of_ones_own_is_tried_as_it_is() -> None:
    cells = faults_of(small(FEDERATIONS["fedavg"]), faults=["drop", "duplicate"])
    assert [one.verdict for one in cells] == ["left out", "exact"]


def test_a_client_half_has_the_faults_of_its_protocol() -> None:
    """`SecureSumClient` extends that of `FedAvg`, and its federation has a secure sum."""
    cells = faults_of(FedAvg, SecureSumClient, faults=["lost request"])
    assert {one.phase for one in cells} == {"hello", "keys", "train", "shares"}


def test_some_schemes_can_do_without_some_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = small(FEDERATIONS["fedvs"])
    monkeypatch.setattr(own_faults, "FEDERATIONS", {"fedvs": federation})
    assert faults_of(FedVS, FedVSClient, faults=["drop"])
    with pytest.raises(AssertionError, match="a reply is lost"):
        faults_of(federation, faults=["drop"])
    assert faults_of(federation, faults=["drop"], each_counts=False)


def test_a_training_that_moves_nothing_is_of_no_use() -> None:
    def still(client: Any) -> Any:
        return message_app([as_mod(client)], lambda array, client: array)

    with pytest.raises(AssertionError, match="the training does not move the model"):
        faults_of(FedAvg, FedAvgClient, app=still)
