"""What parties of FedVS find on the digits, and what the command prints and draws."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from flwr_privacy.coding.field import PrimeField
from flwr_privacy.coding.lagrange import LagrangeCode
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.fedvs.sharing import decode_rows
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.simulations.research.attack import ATTACKS
from flwr_privacy.simulations.research.attacks.setup import AttackOptions
from flwr_privacy.simulations.research.fedvs import attack as fedvs
from flwr_privacy.simulations.research.fedvs.attack_views import (
    Distance,
    coalitions,
    distances,
    from_known_weights,
    from_moves,
    label_findings,
    left_out,
    similar_rows,
)
from flwr_privacy.simulations.research.fedvs.split_learning import (
    BITS,
    Owners,
    RoundShares,
    Seen,
    answer,
    deal,
)

CLIENTS, ROWS, WIDTH = 16, 32, 32


def random(*purpose: str | int) -> SecureRandom:
    return SecureRandom.insecure(0, "test attack fedvs", *purpose)


@pytest.fixture(scope="module")
def owners() -> Owners:
    return Owners.of(clients=CLIENTS, rows=ROWS, seed=0)


@pytest.fixture(scope="module")
def dealt(owners: Owners) -> RoundShares:
    code = LagrangeCode(N=CLIENTS, K=6, T=1, field=PrimeField())
    return deal(owners, code, owners.first_weights(WIDTH, random("weights")), random("shares"))


@pytest.fixture(scope="module")
def counted() -> list[Distance]:
    return distances(0)


@pytest.fixture(scope="module")
def trained(owners: Owners) -> dict[int, Seen]:
    weights = owners.first_weights(WIDTH, random("weights"))
    return {
        bits: owners.train(401, weights=weights, weight_bits=bits, random=random("rounding", bits))
        for bits in (8, 12)
    }


def test_columns_are_dealt_out_and_rows_are_of_nobody_else(owners: Owners) -> None:
    np.testing.assert_array_equal(np.concatenate(owners.columns), np.arange(64))
    assert {len(own) for own in owners.columns} == {4}
    assert not {x.tobytes() for x in owners.pixels} & {x.tobytes() for x in owners.known}
    for own, block in zip(owners.columns, owners.expanded, strict=True):
        X = owners.pixels[:, own]
        # Multiples of 1/16 and of 1/256 are on the grid of the data.
        np.testing.assert_array_equal(block, np.concatenate([X, X**2], axis=1))


def test_sums_in_the_open_are_those_that_shares_decode_to(
    owners: Owners, dealt: RoundShares
) -> None:
    code, field = dealt.code, dealt.code.field
    decoded = decode_rows(code, {n: answer(dealt, n) for n in range(3, 16)})
    blocks = [block.reshape(30, -1) for block in dealt.segments]
    true = sum(field.signed(x) @ field.signed(w) for x, w in zip(blocks, dealt.models, strict=True))
    np.testing.assert_array_equal(field.signed(decoded), true)
    weights = [field.signed(w) / 2**BITS for w in dealt.models]  # on the grid: nothing to round
    seen = owners.train(1, weights=weights, random=random("unused"))
    np.testing.assert_array_equal(seen.embeddings[0, :30] * CLIENTS * 2.0 ** (2 * BITS), true)


def test_F14_what_coalitions_open_of_the_digits(owners: Owners, dealt: RoundShares) -> None:
    found = coalitions(owners, dealt)
    assert [one.holders for one in found] == list(range(1, 8))
    assert [one.weights for one in found] == [False] + 6 * [True]
    assert [one.relations for one in found] == list(range(7))
    assert [one.segments for one in found] == [0] * 6 + [6]
    assert found[0].found == 0
    np.testing.assert_array_equal(found[-1].images, owners.pixels[:30])
    # Three of sixteen, where seven are needed for data that are uniform.
    assert found[1].found < 0.5
    np.testing.assert_array_equal(found[2].images, owners.pixels[:30])


def test_a_share_is_noise(owners: Owners, dealt: RoundShares) -> None:
    alone = coalitions(owners, dealt)[0].images[:5]  # one for each coded row
    # Uniform on [0, 1]: the mean of 320 within 5 standard errors.
    assert abs(alone.mean() - 0.5) < 5 / math.sqrt(12 * alone.size)
    correlation = np.corrcoef(alone.ravel(), owners.pixels[:5].ravel())[0, 1]
    assert abs(correlation) < 5 / math.sqrt(alone.size)


def test_F15_what_is_promised_does_not_open_in_tiny_fields(counted: list[Distance]) -> None:
    found = {one.view: one for one in counted}
    assert all((one.distance == 0) for one in found.values() if one.protected)
    assert sum(one.protected for one in found.values()) == 7
    assert found["T + 1 clients: their shares"].distance == 1
    assert found["server and T clients, no zero-mask"].distance == pytest.approx(0.8, abs=1e-12)
    assert found["... zero-mask of the colluder alone"].distance == pytest.approx(0.8, abs=1e-12)
    assert found["server: 8 rounds, E = 3, p = 5, no zero-mask"].distance > 0.6


def test_sums_give_the_server_the_similarity_of_all_rows(
    owners: Owners, trained: dict[int, Seen]
) -> None:
    early, late = similar_rows(owners, trained[8], weight_bits=8, rounds=(10, 400))
    assert early.correlation < 0.7
    assert late.correlation > 0.93
    _, finer = similar_rows(owners, trained[12], weight_bits=12, rounds=(10, 400))
    assert finer.correlation > 0.999
    assert finer.neighbours > 0.85


def test_gradients_give_every_client_the_labels(owners: Owners, trained: dict[int, Seen]) -> None:
    for one in label_findings(owners, trained[8], (1, 100)):
        assert one.pairs > 0.95
        assert one.named > 0.8 > 0.5 > one.guessed


def test_known_first_weights_open_the_rows_and_secret_ones_do_not(owners: Owners) -> None:
    half, double, guess, secret = from_known_weights(owners, (32, 96), random("first"))
    assert double.exact == 1
    assert half.error < 0.5 * guess.error
    assert secret.error > guess.error
    assert (half.name, secret.name) == (
        "known weights, h = 32",
        "secret weights, h = 96",
    )


def test_weights_that_are_opened_give_the_rows_away(
    owners: Owners, trained: dict[int, Seen]
) -> None:
    coarse, fine = (
        from_moves(owners, trained[bits], weight_bits=bits, rounds=400) for bits in (8, 12)
    )
    spread = np.sqrt(np.mean(owners.pixels**2))
    assert coarse.error < 0.75 * spread
    assert fine.error < 0.25 * spread


def test_a_sum_without_a_client_gives_its_embedding_away(dealt: RoundShares) -> None:
    assert left_out(dealt, 0)
    assert left_out(dealt, 11)


def test_the_command_prints_and_draws_it(
    counted: list[Distance], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fedvs, "distances", lambda seed: counted)
    monkeypatch.setattr(fedvs, "_ROUNDS", (5, 20))
    monkeypatch.setattr(fedvs, "_WEIGHT_BITS", (8, 16))
    monkeypatch.setattr(fedvs, "_WIDTHS", (16, 96))
    found = ATTACKS["fedvs"](AttackOptions(clients=6, records=20, seed=1, out=tmp_path))
    shares, views, sums, labels, weights = found.tables
    assert str(shares.title).endswith("N = 6, K = 2, T = 1")
    assert shares.row_count == 3
    assert (views.row_count, sums.row_count, labels.row_count) == (14, 4, 3)
    assert weights.row_count == 2 + 2 + 2
    assert [path.name for path in found.pictures] == [
        "fedvs-shares.png",
        "fedvs-similar.png",
        "fedvs-known-weights.png",
    ]
    for path in found.pictures:
        picture = imread(path)
        assert min(picture.shape[:2]) > 300
        assert picture.std() > 0.01
    protected, hidden, holds, more, *_ = found.verdict.splitlines()
    assert protected == "protected: shares of T = 1: does not open"
    assert "7 kinds of views counted: largest total variation 0;" in hidden
    assert holds.startswith("the guarantee holds")
    assert more.startswith("T + 1 = 2 clients: all weights; ")


def test_what_opens_against_the_promise_is_called_that() -> None:
    assert fedvs._word(opens=True, protected=True) == "AGAINST THE GUARANTEE"
    assert fedvs._word(opens=False, protected=True) == "does not open"
    assert fedvs._word(opens=True, protected=False) == "opens"
    assert fedvs._word(opens=False, protected=False) == "nothing found"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"task": "mnist"}, "task = 'mnist'"),
        ({"clients": 2}, "clients = 2"),
        ({"clients": 65}, "clients = 65"),
        ({"records": 11}, "records = 11"),
        ({"seed": -1}, "seed = -1"),
    ],
    ids=["task", "few", "many", "records", "seed"],
)
def test_what_is_not_allowed_is_named(change: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        ATTACKS["fedvs"](replace(AttackOptions(out=tmp_path), **change))
