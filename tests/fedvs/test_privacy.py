"""What holders and the server can see: ranks, the condition on batches, single use."""

from itertools import combinations

import numpy as np
import pytest

from flwr_privacy.coding.field import PrimeField
from flwr_privacy.coding.lagrange import LagrangeCode
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.fedvs.privacy import check_slack, slack
from flwr_privacy.fedvs.rows import Segments
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.simulations.research.fedvs.paper.conditions import server_view_is_tight
from flwr_privacy.simulations.research.fedvs.paper.sharing import pad_rows, pad_rows_paper
from tests.shared.ranks import rank_mod_p

P = 2**31 - 1


def test_any_T_holders_have_an_invertible_block_and_more_have_no_larger_rank() -> None:
    code = LagrangeCode(N=9, K=2, T=3, field=PrimeField(101))
    for size, rank in [(1, 1), (3, 3), (4, 3), (9, 3)]:
        for coalition in combinations(range(9), size):
            assert rank_mod_p(code.matrix[list(coalition), 2:], 101) == rank


@pytest.mark.parametrize(
    ("b", "K", "E", "tight"),
    [
        (8, 2, 1508, True),  # Parkinson
        (16, 2, 46, False),  # Credit card
        (32, 1, 1298, True),  # HandWritten
        (8, 1, 7532, True),  # Caltech-7
        (43, 6, 1568, True),  # EMNIST
        (43, 6, 784, True),  # FashionMNIST
        (256, 6, 784, False),
        (256, 6, 1568, False),
    ],
)
def test_F16_the_batches_of_the_six_data_sets(b: int, K: int, E: int, tight: bool) -> None:
    assert server_view_is_tight(b, K, 1, E) is tight
    most = E // (K + 1)
    assert server_view_is_tight(most, K, 1, E)
    assert not server_view_is_tight(most + 1, K, 1, E)


def test_the_slack_is_zero_at_the_largest_batch_that_is_tight() -> None:
    assert slack(15, 2, 1, 45) == 0
    assert server_view_is_tight(15, 2, 1, 45)
    assert slack(16, 2, 1, 45) == -3


def test_rows_that_repeat_or_depend_on_one_another_lower_the_rank() -> None:
    rows = np.random.default_rng(0).integers(-255, 256, (5, 40))
    assert rank_mod_p(rows, P) == 5
    assert rank_mod_p(np.concatenate([rows, rows[:1]]), P) == 5
    assert rank_mod_p(np.concatenate([rows, rows[:1] + rows[1:2]]), P) == 5
    assert rank_mod_p(np.concatenate([rows, 0 * rows[:1]]), P) == 5


def test_powers_of_binary_features_add_nothing_to_the_rank() -> None:
    bits = np.random.default_rng(0).integers(0, 2, (200, 30))
    assert rank_mod_p(np.concatenate([bits, bits**2], axis=1), P) == 30


def test_zero_pads_lower_the_rank_and_random_ones_do_not() -> None:
    segments = Segments(rows=7, K=2)
    rows = np.random.default_rng(0).integers(0, P, (7, 20))
    assert rank_mod_p(pad_rows_paper(rows, segments), P) == 7
    random = SecureRandom.insecure(0, "rank")
    assert rank_mod_p(pad_rows(rows, segments, PrimeField(), random), P) == 8


def test_F16_batches_without_enough_slack_are_refused() -> None:
    check_slack(b=43, K=6, T=1, E=784, p=P)
    with pytest.raises(InvalidParameterError, match="at most E - 3 = 43"):
        check_slack(b=16, K=2, T=1, E=46, p=P)
    with pytest.raises(InvalidParameterError, match="without zero masks"):
        check_slack(b=256, K=6, T=1, E=784, p=P)


@pytest.mark.parametrize(("p", "needed"), [(P, 3), (4194301, 3), (65521, 5), (101, 10), (5, 28)])
def test_the_slack_makes_up_for_a_small_field(p: int, needed: int) -> None:
    assert p**needed >= 2**64 > p ** (needed - 1)
    check_slack(b=5, K=1, T=1, E=10 + needed, p=p)
    with pytest.raises(InvalidParameterError, match=r"\(K \+ T\) b = 10"):
        check_slack(b=5, K=1, T=1, E=9 + needed, p=p)
