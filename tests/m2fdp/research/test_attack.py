"""What is found inside M2FDP's zones, between their nodes and outside, and what is printed of it.

The noise is from a cryptographic generator where no seed is given: what is asserted then fails with
the chance that stands beside it.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from flwr_privacy.accounting.gaussian import mu_of
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.attack import ATTACKS
from flwr_privacy.simulations.research.attacks.setup import AttackOptions, AttackSetup
from flwr_privacy.simulations.research.m2fdp import attack as m2fdp
from flwr_privacy.simulations.research.m2fdp.forgery import FORGERIES, HONEST, Forged, forge
from flwr_privacy.simulations.research.m2fdp.relay import Tapped, tap
from flwr_privacy.simulations.research.m2fdp.zone import Sight, sights
from flwr_privacy.simulations.research.m2fdp.zone_audit import audit_edges, audits, edge_audits
from flwr_privacy.simulations.research.secure_sum.attack import setup_of

MEMBERS = 5


@pytest.fixture(scope="module")
def setup() -> AttackSetup:
    return setup_of("digits-linear", clients=MEMBERS, records=1, seed=0, data_root=None)


@pytest.fixture(scope="module")
def seen(setup: AttackSetup) -> dict[str, Sight]:
    return {sight.name: sight for sight in sights(setup)}


def test_of_two_members_one_has_the_record_of_the_other(
    setup: AttackSetup, seen: dict[str, Sight]
) -> None:
    sight = seen["1 of 2"]
    assert sight.errors.max() < 1e-5  # what float32 leaves of an update of a norm of about 0.2
    assert sight.recovery.recovered.all()
    np.testing.assert_allclose(sight.found, setup.records(1, 2), atol=0.05)


def test_members_that_work_together_have_it_in_any_zone(seen: dict[str, Sight]) -> None:
    sight = seen["4 of 5"]
    assert sight.errors.shape == (1,)
    assert sight.errors[0] < 1e-3
    assert sight.recovery.recovered.all()


def test_of_more_members_one_has_the_average_and_still_reads_records(
    seen: dict[str, Sight],
) -> None:
    three, five = seen["1 of 3"], seen["1 of 5"]
    assert (three.errors.shape, five.errors.shape) == ((2,), (4,))
    # Of updates at right angles and of one length it would be sqrt(1 - 1 / n).
    assert 0.5 < np.median(three.errors) < np.median(five.errors) < 1
    assert three.recovery.recovered.all()  # few records, many units: an average hides little


def test_without_clean_events_there_is_noise_only(seen: dict[str, Sight]) -> None:
    sight = seen["1 of 2, no clean event"]
    assert sight.errors.min() > 5
    assert not sight.recovery.recovered.any()


def test_a_zone_of_two_is_the_smallest_and_the_largest() -> None:
    setup = setup_of("digits-mlp", clients=2, records=2, seed=1, data_root=None)
    found = sights(setup)
    assert [sight.name for sight in found] == ["1 of 2", "1 of 2, no clean event"]
    assert [len(sight.recovery.similarities) for sight in found] == [2, 2]
    assert found[0].recovery.recovered.all()


@pytest.fixture(scope="module")
def tapped() -> list[Tapped]:
    return tap(seed=2)


def test_nothing_that_devices_made_crosses_the_server_unsealed(tapped: list[Tapped]) -> None:
    relayed, _ = tapped
    assert relayed.found == 0
    assert relayed.places > 500
    # Sealed bytes are as even as random ones; missed with 1e-6.
    assert relayed.p_value > 1e-6
    assert relayed.entropy > 7.99


def test_where_the_server_plays_the_aggregators_the_same_search_finds_all_codes(
    tapped: list[Tapped],
) -> None:
    _, simulated = tapped
    assert simulated.found == simulated.places / 3  # of updates, codes and models the codes
    assert simulated.p_value < 1e-6


@pytest.fixture(scope="module")
def forged() -> dict[str, Forged]:
    return {one.name: one for one in forge(seed=4)}


@pytest.mark.parametrize("name", FORGERIES)
def test_A24_a_server_that_forges_gets_nothing(forged: dict[str, Forged], name: str) -> None:
    assert forged[name].refused, forged[name].outcome


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a child that it invented", "client '9' is not pinned"),
        ("its own key for a child", "the signature of client '2' does not fit its pinned key"),
        ("an answer of an earlier round", "damaged, or sealed for another purpose: a message from"),
        ("one child alone", "1 of 3 children answered: this node averages at least 2"),
        ("less noise than the devices were told", "was asked for another noise"),
        ("itself as the parent", "the parent 'server' is not trusted"),
        ("an answer in the open", "an answer without noise was asked for"),
        ("the same event again, of fewer children", "the same answer"),
    ],
)
def test_a_refusal_says_why(forged: dict[str, Forged], name: str, text: str) -> None:
    assert text in forged[name].outcome


def test_after_all_that_what_should_be_asked_is_answered(forged: dict[str, Forged]) -> None:
    assert list(forged) == [*FORGERIES, HONEST]
    assert forged[HONEST].outcome.startswith("answered, with noise of standard deviation ")


def test_if_sealed_messages_were_bound_to_nothing_it_would_be_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The evaluator can fail: here every message is associated with the same data."""
    monkeypatch.setattr("flwr_privacy.wire.channel.canonical", lambda *_: b"")
    found = {one.name: one for one in forge(seed=4)}
    for name in (
        "an answer of an earlier round",
        "answers sealed for another event",
        "answers with fewer children asked",
    ):
        assert (found[name].refused, found[name].outcome) == (False, "answered")
    assert found["an answer with a bit turned"].refused


@pytest.mark.parametrize("children", [4, 1])
def test_through_the_real_halves_paths_keep_to_their_ledgers(children: int) -> None:
    """The seeds are fixed. By others a correct path is flagged with 1 % at most."""
    clean = children > 1
    found = audit_edges(
        children=children, epsilon=8.0, clean_events=clean, edges=30, seed=5, insecure_seed=5
    )
    assert found.releases == (1 if clean else 4)
    assert found.ledger == pytest.approx(8.0, rel=1e-6)
    assert not found.flagged
    # The cloud sees the coins: of 30 guesses 25 are right on average.
    assert found.gaussian.correct >= 18


def test_through_the_real_halves_the_lemma_is_flagged() -> None:
    found = audit_edges(
        children=4,
        epsilon=8.0,
        law="lemma",
        clean_events=True,
        edges=30,
        seed=5,
        insecure_seed=5,
    )
    assert found.ledger == pytest.approx(8.0, rel=1e-6)
    assert found.flagged
    assert found.gaussian.correct >= 29


def test_only_the_lemma_with_clean_events_is_flagged() -> None:
    """A right path is flagged with 1 % by each bound at most; the wrong one passes with 1e-9."""
    found = audits(seed=3, epsilons=(2.0,), runs=4000)
    assert [one.law for one in found] == ["worst", "worst", "worst", "lemma"]
    assert [one.releases for one in found] == [1, 1, 4, 1]
    np.testing.assert_allclose([one.ledger for one in found], 2.0, rtol=1e-6)
    for one in found[:3]:
        # Above mu with a chance of 1 %, above 1.2 mu with less than 1e-6.
        assert one.gaussian.mu < 1.2 * mu_of(2.0, 1e-5)
    assert found[3].flagged
    assert found[3].gaussian.mu > 3 * mu_of(2.0, 1e-5)


def test_one_run_of_the_command_shows_all_and_no_warnings_of_what_it_attacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(m2fdp, "audits", partial(audits, epsilons=(4.0,), runs=2000))
    monkeypatch.setattr(m2fdp, "edge_audits", partial(edge_audits, edges=20))
    report = ATTACKS["m2fdp"](AttackOptions(clients=3, seed=1, out=tmp_path))
    assert "WARNING" not in caplog.text
    zone, server, forgeries, paths, edges = report.tables
    rows = [table.row_count for table in report.tables]
    assert rows == [4, 2, len(FORGERIES) + 1, 4, 4]
    assert "inside a zone: digits-linear" in str(zone.title)
    assert "what crosses the server" in str(server.title)
    assert "what the server asks" in str(forgeries.title)
    assert "events every 5, edges of 5" in str(paths.title)
    assert "20 edges of 4" in str(edges.title)
    for picture in report.pictures:
        pixels = imread(picture)
        assert min(pixels.shape[:2]) > 300
        assert pixels[..., :3].std() > 0.1
    first, *lines = report.verdict.splitlines()
    assert first.startswith("inside a zone of two, a member has the other's update to ")
    assert f"of {len(FORGERIES)} forgeries {len(FORGERIES)} were refused" in lines
    (lemma,) = (
        line for line in lines if line.startswith("secure edge, clean events, noise for 'l")
    )
    assert lemma.endswith("FLAGGED")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"task": "fashion-cnn"}, "task = 'fashion-cnn': expected one of 'digits-linear'"),
        ({"clients": 1}, "clients = 1: expected an integer from 2 to 1437"),
        ({"records": 0}, "records = 0: expected an integer from 1 to"),
        ({"seed": -1}, "seed = -1: expected an integer of at least 0"),
    ],
)
def test_what_is_not_allowed_is_named(values: dict[str, Any], text: str, tmp_path: Path) -> None:
    options = replace(AttackOptions(clients=2, records=1, out=tmp_path), **values)
    with pytest.raises(InvalidParameterError, match=text):
        ATTACKS["m2fdp"](options)
