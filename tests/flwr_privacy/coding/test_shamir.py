from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_privacy.coding.shamir import MOST_HOLDERS, _evaluate, deal, recover
from flwr_privacy.errors import InvalidParameterError

SECRET = bytes(range(256))


@pytest.fixture(scope="module")
def field() -> Any:
    """Return the field as galois has it, which takes seconds to import."""
    import galois

    return galois.GF(2**8, irreducible_poly="x^8 + x^4 + x^3 + x + 1")


def test_every_three_of_five_shares_open():
    shares = deal(SECRET, holders=5, threshold=3)
    for some in combinations(range(5), 3):
        assert recover({holder: shares[holder] for holder in some}, threshold=3) == SECRET


def test_exactly_the_threshold_opens_and_one_share_less_reveals_nothing():
    # Threshold 2: one share is, for every secret, each byte for exactly one coefficient.
    secrets, first = (part.reshape(-1) for part in np.indices((256, 256), dtype=np.uint8))
    shares = _evaluate(np.stack([secrets, first]), MOST_HOLDERS)
    for share in shares:
        assert (np.sort(share.reshape(256, 256), axis=1) == np.arange(256)).all()
    for one, other in ((0, 1), (3, 200), (253, 254)):
        pair = {holder: shares[holder].tobytes() for holder in (one, other)}
        assert recover(pair, threshold=2) == secrets.tobytes()
        with pytest.raises(ValueError, match="shares missing: 1 of 2"):
            recover({one: pair[one]}, threshold=2)

    # Threshold 3: two shares are, for every secret, each pair of bytes for one coefficient pair.
    second = secrets
    for secret in (0, 1, 0xA7):
        shares = _evaluate(np.stack([np.full(1 << 16, secret, np.uint8), first, second]), 255)
        for one, other in ((0, 1), (2, 9), (0, 254), (100, 101)):
            pairs = shares[one].astype(int) << 8 | shares[other]
            assert (np.bincount(pairs, minlength=1 << 16) == 1).all()
        three = {holder: shares[holder].tobytes() for holder in (2, 9, 254)}
        assert recover(three, threshold=3) == bytes([secret]) * (1 << 16)


@pytest.mark.parametrize("threshold", [1, 2, 3, 7, 255])
def test_shares_are_values_of_the_polynomial_as_galois_evaluates_it(threshold, field):
    import galois

    coefficients = np.random.default_rng(threshold).integers(256, size=(threshold, 40))
    coefficients[:, 0] = 0
    shares = _evaluate(coefficients.astype(np.uint8), MOST_HOLDERS)
    points = field(np.arange(1, MOST_HOLDERS + 1))
    for column in range(40):
        polynomial = galois.Poly(field(coefficients[:, column]), order="asc")
        assert np.array_equal(shares[:, column], np.array(polynomial(points)))


@pytest.mark.parametrize("holders", [(0,), (4, 2), (0, 1, 2), (7, 254, 31, 100, 3)])
def test_recovery_is_interpolation_as_galois_does_it(holders, field):
    import galois

    shares = np.random.default_rng(len(holders)).integers(256, size=(len(holders), 30))
    given_shares = {
        holder: share.astype(np.uint8).tobytes()
        for holder, share in zip(holders, shares, strict=True)
    }
    points = field([holder + 1 for holder in holders])
    expected = [int(galois.lagrange_poly(points, field(column))(0)) for column in shares.T]
    assert list(recover(given_shares, threshold=len(holders))) == expected


@given(st.binary(max_size=100), st.integers(1, MOST_HOLDERS), st.data())
def test_any_threshold_many_shares_open(secret, holders, data):
    threshold = data.draw(st.integers(1, holders))
    shares = deal(secret, holders=holders, threshold=threshold)
    assert len(shares) == holders
    chosen = data.draw(st.permutations(range(holders)))[:threshold]
    assert recover({holder: shares[holder] for holder in chosen}, threshold=threshold) == secret


def test_several_secrets_of_the_same_holders_open_in_one_go():
    secrets = [bytes([i]) * 32 for i in range(100)]
    dealt = [deal(secret, holders=9, threshold=5) for secret in secrets]
    joined = {holder: b"".join(shares[holder] for shares in dealt) for holder in (8, 1, 6, 3, 4)}
    assert recover(joined, threshold=5) == b"".join(secrets)


def test_two_deals_of_one_secret_differ():
    one, other = (deal(bytes(32), holders=3, threshold=2) for _ in range(2))
    assert all(a != b for a, b in zip(one, other, strict=True))  # equal with probability 2**-256


def test_every_byte_and_degree_has_a_random_coefficient_of_its_own(field):
    # Secrets of zeros: the coefficients of the polynomials are those of the shares' interpolation.
    shares = deal(bytes(64), holders=4, threshold=4)
    values = field([list(share) for share in shares])
    vandermonde = field([[int(field(x) ** k) for k in range(4)] for x in range(1, 5)])
    coefficients = np.array(np.linalg.inv(vandermonde) @ values)
    assert not coefficients[0].any()
    for row in coefficients[1:]:
        assert len(set(row.tolist())) > 32  # 57 expected; at most 32 with probability below 3e-17
    assert len({row.tobytes() for row in coefficients}) == 4


def test_a_wrong_share_opens_another_secret():
    shares = dict(enumerate(deal(SECRET, holders=3, threshold=3)))
    shares[1] = bytes([shares[1][0] ^ 1]) + shares[1][1:]
    opened = recover(shares, threshold=3)
    assert opened[0] != SECRET[0]
    assert opened[1:] == SECRET[1:]


def test_shares_beyond_the_threshold_do_not_count():
    shares = dict(enumerate(deal(SECRET, holders=4, threshold=2)))
    assert recover({3: bytes(256), 1: shares[1], 0: shares[0]}, threshold=2) == SECRET


@pytest.mark.parametrize(
    ("holders", "threshold", "text"),
    [
        (0, 1, "holders = 0: expected an integer from 1 to 255"),
        (256, 1, "holders = 256: expected an integer from 1 to 255"),
        (3, 4, "threshold = 4: expected an integer from 1 to 3"),
        (3, 0, "threshold = 0: expected an integer from 1 to 3"),
        (3, 2.0, "threshold = 2.0: expected an integer from 1 to 3"),
    ],
)
def test_a_threshold_that_cannot_be_is_refused(holders, threshold, text):
    with pytest.raises(InvalidParameterError) as error:
        deal(b"secret", holders=holders, threshold=threshold)
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("shares", "threshold", "text"),
    [
        ({}, 3, "shares missing: 3 of 3"),
        ({0: b"a", 1: b"b"}, 3, "shares missing: 1 of 3"),
        ({0: b"a", 1: b"bc"}, 2, "shares of 1 to 2 bytes: expected one length"),
        ({0: b"a", 1: b"b", 2: b""}, 2, "shares of 0 to 1 bytes: expected one length"),
        ({-1: b"a", 1: b"b"}, 2, "a share of holder -1: expected 0 to 254"),
        ({0: b"a", 255: b"b"}, 2, "a share of holder 255: expected 0 to 254"),
        ({0: b"a"}, 0, "threshold = 0: expected an integer from 1 to 255"),
        ({0: b"a"}, 256, "threshold = 256: expected an integer from 1 to 255"),
    ],
)
def test_shares_that_do_not_fit_are_refused(shares, threshold, text):
    with pytest.raises(ValueError, match=f"^{text}$"):
        recover(shares, threshold=threshold)
