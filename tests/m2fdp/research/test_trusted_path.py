"""Audits of trusted paths by crafted members, against closed forms and the paths' own ledgers."""

import itertools
import math

import numpy as np
import pytest

from flwr_privacy.accounting.gaussian import mu_of
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.m2fdp.schedule import EventSchedule
from flwr_privacy.m2fdp.sensitivity import Drift
from flwr_privacy.m2fdp.tree.tree import TierTree
from flwr_privacy.m2fdp.zone_average import noised
from flwr_privacy.privacy.grid import CodeGrid
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.simulations.research.attacks.audit import largest_mu
from flwr_privacy.simulations.research.m2fdp import trusted_path
from flwr_privacy.simulations.research.m2fdp.trusted_path import (
    PathAudit,
    ZonePath,
    audit_path,
    crafted_release,
)

DELTA = 1e-5
TREE = TierTree.of_fanouts("2,5", p=0.5)
SCHEDULE = EventSchedule(steps=20, events={1: 5})  # the paper's
CLEAN = ZonePath.of("secure, clean events", TREE, SCHEDULE, "0")
THROUGH = ZonePath.of("secure, trains through", TREE, SCHEDULE, "0", clean_events=False)
INSECURE = ZonePath.of("insecure", TREE, SCHEDULE, "5")
PATHS = [CLEAN, THROUGH, INSECURE]
LAWS = [(path, "worst") for path in PATHS]
LAWS += [(THROUGH, "lemma"), (INSECURE, "lemma")]  # exact without clean events


def names(values: list[tuple[ZonePath, str]]) -> list[str]:
    return [f"{path.name}-{law}" for path, law in values]


def audited(
    path: ZonePath,
    law: str,
    epsilon: float,
    *,
    seed: int = 0,
    confidence: float = 0.9999,
    **more: int,
) -> PathAudit:
    return audit_path(
        path,
        drift=Drift(law=law),
        epsilon=epsilon,
        delta=DELTA,
        confidence=confidence,
        seed=seed,
        random=SecureRandom.insecure(seed, "audit"),
        **more,
    )


def test_8_4_the_crafted_sibling_attains_four_times_lemma_1() -> None:
    """A22 from outside: s = 5, K = 20, clean events every 5 steps, eta = 0.01, G = 1."""
    ends = [release(CLEAN, coin, clipping_norm=0.01, bits=24)[0] for coin in (True, False)]
    apart = np.linalg.norm(ends[0] - ends[1])
    lemma = 2 * 0.01 * 20 * 1 / 5
    assert apart == pytest.approx(0.32, rel=1e-5)
    assert apart == pytest.approx(4 * lemma, rel=1e-5)


def test_8_4_eight_children_and_forty_steps_attain_7_1() -> None:
    tree = TierTree.of_fanouts("1,8", p=1.0)
    path = ZonePath.of("8", tree, EventSchedule(steps=40, events={1: 5}), "3")
    ends = [release(path, coin, clipping_norm=1.0, bits=20)[0] for coin in (True, False)]
    assert np.linalg.norm(ends[0] - ends[1]) / (2 * 40 / 8) == pytest.approx(7.125, rel=1e-5)


def release(
    path: ZonePath, coin: bool, *, clipping_norm: float, bits: int, law: str = "worst"
) -> tuple[np.ndarray, float]:
    """What the zone releases in the units of the weights, and its stated reach."""
    grid = CodeGrid.below(clipping_norm, bits=bits)
    (period,) = path.periods[-1:]
    upload = crafted_release(
        path,
        period,
        coin=coin,
        direction=[3.0, 0.0, -4.0],
        drift=Drift(law=law),
        clipping_norm=clipping_norm,
        grid=grid,
    )
    return upload.codes * grid.step, upload.reach.total


@pytest.mark.parametrize(
    ("fanouts", "events", "contaminated"),
    [
        ((1, 2, 3), {2: [4], 1: [8]}, (4 / 6 + 4 / 2 + 4)),
        ((1, 2, 3), {1: [4], 2: [8]}, (4 / 6 + 4 + 4)),
        ((1, 2, 3), {2: [2, 6, 10]}, (2 / 6 + 4 / 2 + 4 / 2 + 2 / 2)),
        ((1, 3), {}, 12 / 3),
    ],
)
def test_in_deeper_zones_it_attains_the_weight_of_who_was_reached(
    fanouts: tuple[int, ...], events: dict[int, list[int]], contaminated: float
) -> None:
    """2 times the steps, each by the weight of the leaves whose start had moved (8.4)."""
    tree = TierTree.of_fanouts(fanouts, p=1.0)
    path = ZonePath.of("deep", tree, EventSchedule(steps=12, events=events), "0")
    (heads, stated), (tails, _) = (release(path, c, clipping_norm=1.0, bits=20) for c in (1, 0))
    assert np.linalg.norm(heads - tails) == pytest.approx(2 * contaminated, rel=1e-5)
    # What is stated covers it, and rounding to a grid that is fine adds next to nothing.
    assert np.linalg.norm(heads - tails) <= stated <= 2 * contaminated * (1 + 1e-4)


def test_no_way_of_the_siblings_moves_more() -> None:
    """Every choice of full steps, back or forth or none, as a function of the received model."""
    tree = TierTree.of_fanouts("1,3", p=1.0)
    path = ZonePath.of("3", tree, EventSchedule(steps=3, events={1: 1}), "0")
    ends = [release(path, c, clipping_norm=1.0, bits=20)[0] for c in (True, False)]
    reached = np.linalg.norm(ends[0] - ends[1])
    moves = list(itertools.product([-1, 0, 1], repeat=2))  # of two siblings, in one segment
    best = 0.0
    for first in moves:  # the start is common knowledge: both worlds have the same
        for worlds in itertools.product(itertools.product(moves, repeat=2), repeat=2):
            found = [
                (own + sum(first)) / 3 + sum((own + sum(move)) / 3 for move in later)
                for own, later in zip((1, -1), worlds, strict=True)
            ]
            best = max(best, abs(found[0] - found[1]))
    assert best == pytest.approx(2 / 3 + 2 + 2)
    assert reached == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize("epsilon", [1.0, 4.0])
@pytest.mark.parametrize(("path", "law"), LAWS, ids=names(LAWS))
def test_every_path_keeps_to_its_own_ledger(path: ZonePath, law: str, epsilon: float) -> None:
    """The seed is fixed. By another one a correct path is flagged with 2e-4 at most."""
    found = audited(path, law, epsilon)
    mu = mu_of(epsilon, DELTA)
    assert found.ledger == pytest.approx(epsilon, rel=1e-6)
    assert not found.flagged
    assert found.one_run.epsilon <= found.gaussian.epsilon <= found.ledger
    assert found.gaussian.mu <= mu
    # The bound is not far below: the crafted sibling attains the sensitivity. Of 20,000 guesses
    # the confidence takes 0.013 at most, a bad draw with 6 standard errors 0.022; Phi(x) has a
    # slope of 0.3 and more here.
    assert found.gaussian.mu > mu - 2 * (0.013 + 0.022) / 0.3
    assert 0.999 < max(found.attained) / max(found.stated) <= 1


def test_the_scores_are_those_of_the_ledgers_gaussian() -> None:
    """Log-likelihood ratios of mu-GDP: means of mu^2 / 2 up and down, a variance of mu^2."""
    for path in PATHS:
        found = audited(path, "worst", 2.0, rounds=3)
        mu, signs = mu_of(2.0, DELTA), np.where(found.coins, 1, -1)
        noise = found.scores - signs * mu**2 / 2
        size = math.sqrt(noise.size)
        assert found.releases == 3 * len(path.periods)
        assert abs(noise.mean()) < 6 * mu / size
        assert abs(noise.std() / mu - 1) < 6 / math.sqrt(2) / size + 1e-3


@pytest.mark.parametrize("path", PATHS, ids=[path.name for path in PATHS])
def test_a_fifth_less_noise_is_found(path: ZonePath, monkeypatch: pytest.MonkeyPatch) -> None:
    def weak(codes: np.ndarray, *, sigma: float, **rest: object) -> np.ndarray:
        return noised(codes, sigma=0.8 * sigma, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(trusted_path, "noised", weak)
    found = audited(path, "worst", 4.0)
    assert found.ledger == pytest.approx(4.0, rel=1e-6)
    assert found.flagged


@pytest.mark.parametrize("seed", range(3))
def test_lemma_1_with_clean_events_is_refuted(seed: int) -> None:
    """The noise is four times too small: mu is 4 times what the ledger has."""
    found = audited(CLEAN, "lemma", 1.0, seed=seed, confidence=0.99)
    assert found.ledger == pytest.approx(1.0, rel=1e-6)
    assert found.attained[0] / found.stated[0] == pytest.approx(4.0, rel=1e-4)
    assert found.flagged
    # Even by the bound that assumes nothing of the mechanism.
    assert found.one_run.epsilon > found.ledger
    assert found.gaussian.epsilon > 3 * found.ledger
    assert found.gaussian.mu <= 4 * mu_of(1.0, DELTA)


def test_the_ledgers_of_secure_and_insecure_paths_are_equal() -> None:
    """8.5: calibrated to one budget, whatever the numbers of releases and their sensitivities."""
    found = [audited(path, "worst", 3.0, rounds=2, runs=2000, guesses=500) for path in PATHS]
    assert [one.releases for one in found] == [2, 2, 8]
    np.testing.assert_allclose([max(one.stated) for one in found], [32, 8, 10], rtol=1e-5)
    np.testing.assert_allclose([one.ledger for one in found], 3.0, rtol=1e-6)


def test_unequal_periods_are_charged_by_their_steps() -> None:
    path = ZonePath.of("odd", TREE, EventSchedule(steps=20, events={1: [2, 11]}), "5")
    found = audited(path, "worst", 4.0)
    np.testing.assert_allclose(found.stated, [4, 18, 18], rtol=1e-6)
    assert found.ledger == pytest.approx(4.0, rel=1e-6)
    assert not found.flagged
    assert found.gaussian.mu > 0.8 * mu_of(4.0, DELTA)


def test_what_so_many_runs_can_prove() -> None:
    found = audited(CLEAN, "lemma", 8.0, runs=500, guesses=100)
    assert found.gaussian.mu <= largest_mu(500, confidence=0.9999) < 5


def test_a_path_reads_the_tree_and_the_schedule() -> None:
    assert (CLEAN.boundary, CLEAN.fanouts, len(CLEAN.periods)) == (1, (5,), 1)
    assert [segment.steps for segment in CLEAN.periods[0]] == [5, 5, 5, 5]
    assert [segment.steps for segment in THROUGH.periods[0]] == [20]
    assert (INSECURE.boundary, INSECURE.fanouts, len(INSECURE.periods)) == (2, (), 4)
    assert {path.steps for path in PATHS} == {20}


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: release_along([0.0, 0.0]), "direction = 0.0: expected a finite vector"),
        (lambda: audited(CLEAN, "worst", 1.0, rounds=0), "rounds = 0"),
        (lambda: audited(CLEAN, "worst", 1.0, runs=0), "runs = 0"),
        (lambda: audited(CLEAN, "worst", 1.0, dimension=0), "dimension = 0"),
        (lambda: audited(CLEAN, "best", 1.0), "law = 'best'"),
        (lambda: ZonePath(name="x", boundary=1, fanouts=(2,), periods=()), r"periods = \(\)"),
        (lambda: ZonePath(name="x", boundary=0, fanouts=(), periods=CLEAN.periods), "boundary = 0"),
        (lambda: uneven(), "tree = 'a': expected a zone with equal fan-outs"),
    ],
)
def test_what_is_not_allowed_is_named(call, text: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidParameterError, match=text):
        call()


def release_along(direction: list[float]) -> None:
    crafted_release(
        CLEAN, CLEAN.periods[0], coin=True, direction=direction, drift=Drift(), grid=CodeGrid(-10)
    )


def uneven() -> ZonePath:
    edges = [("cloud", "a"), ("a", "b"), ("a", "c"), ("b", "0"), ("c", "1"), ("c", "2")]
    tree = TierTree.of_edges(edges, trusted={"a", "b", "c"})
    return ZonePath.of("uneven", tree, EventSchedule(), "0")
