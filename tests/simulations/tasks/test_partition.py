import math
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_privacy.errors import DataError, InvalidParameterError
from flwr_privacy.simulations.settings.run_settings import PartitionSettings
from flwr_privacy.simulations.tasks.data import load
from flwr_privacy.simulations.tasks.partition import balanced_sets, describe, partition

DIGITS = load("digits").labels
KINDS = ("iid", "dirichlet", "shards", "labels", "label-sets")


def split(of=DIGITS, /, *, clients=10, seed=0, **kind):
    return partition(of, clients=clients, settings=PartitionSettings(**kind), seed=seed)


def assert_disjoint(parts, labels):
    joined = np.concatenate(parts)
    assert len(np.unique(joined)) == len(joined)
    assert joined.min() >= 0
    assert joined.max() < len(labels)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clients", [1, 3, 10, 40])
def test_partitions_are_disjoint_and_cover(kind, clients):
    parts = split(kind=kind, clients=clients, labels=2, alpha=1.0)
    assert len(parts) == clients
    assert_disjoint(parts, DIGITS)
    left_out = len(DIGITS) - sum(map(len, parts))
    if kind in ("iid", "dirichlet"):
        assert left_out == 0
    elif kind == "shards":
        assert left_out == len(DIGITS) % (2 * clients)
    elif kind == "label-sets":
        assert {len(part) for part in parts} == {len(parts[0])}
    elif clients >= 10:
        assert left_out == 0
    else:
        held = np.unique(DIGITS[np.concatenate(parts)])
        assert left_out == np.isin(DIGITS, held, invert=True).sum()
    assert describe(DIGITS, parts).left_out == left_out


@settings(max_examples=15, deadline=None)
@given(
    labels=st.lists(st.integers(0, 4), min_size=12, max_size=60),
    clients=st.integers(1, 6),
    kind=st.sampled_from(("iid", "shards")),
    seed=st.integers(0, 2**40),
)
def test_any_labels(labels, clients, kind, seed):
    labels = np.array(labels)
    parts = split(labels, clients=clients, kind=kind, seed=seed)
    assert_disjoint(parts, labels)
    expected = len(labels) if kind == "iid" else len(labels) // (2 * clients) * 2 * clients
    assert sum(map(len, parts)) == expected


def test_same_seed_same_parts_in_another_process():
    code = (
        "import numpy as np\n"
        "from flwr_privacy.simulations.tasks.partition import partition\n"
        "from flwr_privacy.simulations.settings.run_settings import PartitionSettings\n"
        f"for kind in {KINDS!r}:\n"
        "    parts = partition(np.arange(300) % 7, clients=5, "
        "settings=PartitionSettings(kind=kind), seed=3)\n"
        "    print([part.tolist() for part in parts])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    here = [split(np.arange(300) % 7, clients=5, kind=kind, seed=3) for kind in KINDS]
    assert out.stdout.splitlines() == [str([part.tolist() for part in parts]) for parts in here]
    assert out.stderr == ""


@pytest.mark.parametrize("kind", KINDS)
def test_another_seed_other_parts(kind):
    one, other = split(kind=kind, seed=1), split(kind=kind, seed=2)
    assert any(not np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_answers_from_memory_cannot_be_spoiled():
    parts = split()
    with pytest.raises(ValueError, match="read-only"):
        parts[0][0] = 5
    parts.clear()
    assert len(split()) == 10


def test_iid_does_not_follow_the_order_of_the_records():
    labels = np.repeat(np.arange(10), 100)
    counts = describe(labels, split(labels, clients=10)).counts
    assert (counts > 0).all()


def test_large_alpha_is_almost_iid():
    counts = describe(DIGITS, split(kind="dirichlet", alpha=1e5)).counts
    expected = np.bincount(DIGITS) / 10
    assert np.abs(counts - expected).max() <= 2


def test_small_alpha_is_skewed():
    skewed = describe(DIGITS, split(kind="dirichlet", alpha=0.3)).counts
    even = describe(DIGITS, split(kind="dirichlet", alpha=10.0)).counts
    assert skewed.std() > 2 * even.std()


def test_dirichlet_shares_follow_alpha():
    # A client's share of a class has the law Beta(alpha, (clients - 1) alpha), whose variance is
    # (1/c)(1 - 1/c) / (c alpha + 1); 400 shares, so a relative standard error below 0.2.
    labels = np.arange(40_000) % 40
    counts = describe(labels, split(labels, clients=10, kind="dirichlet", alpha=0.5)).counts
    assert (counts / 1000).var() == pytest.approx(0.09 / 6, rel=0.6)


def test_shards_are_equal_and_hold_few_classes():
    description = describe(DIGITS, split(kind="shards", shards=2))
    assert set(description.sizes.tolist()) == {142}
    assert description.classes.max() <= 4


def test_records_left_out_are_of_several_classes():
    labels = np.repeat(np.arange(10), 30)
    parts = split(labels, clients=100, kind="shards", shards=2)
    counts = describe(labels, parts).counts.sum(axis=0)
    assert describe(labels, parts).left_out == 100
    assert (counts < 30).sum() >= 8


def test_labels_per_client():
    description = describe(DIGITS, split(kind="labels", labels=3))
    assert description.classes.tolist() == [3] * 10


def test_one_class_is_legal_and_reported():
    description = describe(DIGITS, split(kind="labels", labels=1))
    assert description.one_class == list(range(10))
    assert "only one class: clients 0, 1, 2, 3, 4 and 5 more" in str(description)
    assert "only one class" not in str(describe(DIGITS, split()))


def test_left_out_records_are_reported():
    text = str(describe(DIGITS, split(kind="labels", labels=1, clients=9)))
    assert f"records left out: {np.bincount(DIGITS)[9]}" in text


def test_more_clients_than_records():
    with pytest.raises(DataError, match="client 1437 would have no data; ask for fewer clients"):
        split(clients=1438)


def test_dirichlet_without_data_for_a_client():
    with pytest.raises(DataError, match=r"no data for client.*raise partition\.alpha, ask for"):
        split(kind="dirichlet", alpha=0.01, clients=100)


def test_too_many_shards():
    with pytest.raises(InvalidParameterError, match=r"partition\.shards = 20: expected at most 14"):
        split(kind="shards", shards=20, clients=100)


def test_too_many_labels():
    with pytest.raises(InvalidParameterError, match=r"partition\.labels = 11: expected at most 10"):
        split(kind="labels", labels=11)


def test_class_with_too_few_records():
    labels = np.array([0] * 50 + [1] * 50 + [2])
    with pytest.raises(DataError, match=r"too few records .the smallest has 1.*fewer labels"):
        split(labels, kind="labels", labels=2, clients=20)


def test_no_clients():
    with pytest.raises(InvalidParameterError, match="clients = 0"):
        split(clients=0)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", KINDS)
def test_output_is_clean(kind, capfd):
    split(np.arange(501) % 10, clients=7, kind=kind, seed=11)
    assert capfd.readouterr() == ("", "")


# -- Sizes and sets of labels -------------------------------------------------------------------


def assert_f27_non_iid(labels):
    parts = split(labels, clients=50, kind="label-sets", labels=4, sizes=[800])
    counts = describe(labels, parts).counts
    assert_disjoint(parts, labels)
    assert len({tuple(row) for row in counts > 0}) == 50
    assert ((counts > 0).sum(axis=0) == 20).all()
    assert set(counts.ravel().tolist()) == {0, 200}
    assert (counts.sum(axis=1) == 800).all()


def assert_f27_unbalanced(labels):
    parts = split(labels, clients=50, sizes=[400, 600, 800, 1000, 1200])
    assert_disjoint(parts, labels)
    sizes = [len(part) for part in parts]
    assert [sizes.count(size) for size in (400, 600, 800, 1000, 1200)] == [10] * 5
    assert sizes[:5] == [400, 600, 800, 1000, 1200]
    assert sum(sizes) == 40_000


def test_F27_partitions_of_generated_labels():
    labels = np.repeat(np.arange(10), 4000)  # of each label exactly as many as are needed
    assert_f27_non_iid(labels)
    assert_f27_unbalanced(labels)
    with pytest.raises(InvalidParameterError, match=r"sizes = \[800\].*1 records more of a class"):
        split(labels[1:], clients=50, kind="label-sets", labels=4, sizes=[800])


@pytest.mark.skipif("FLWR_PRIVACY_DATA" not in os.environ, reason="FLWR_PRIVACY_DATA is not set")
def test_F27_partitions_of_mnist():
    labels = load("mnist", data_root=os.environ["FLWR_PRIVACY_DATA"]).labels
    assert_f27_non_iid(labels)
    assert_f27_unbalanced(labels)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), labels=st.integers(1, 8), seed=st.integers(0, 999))
def test_sets_of_labels_differ_and_use_labels_evenly(data, labels, seed):
    size = data.draw(st.integers(1, labels))
    count = data.draw(st.integers(0, math.comb(labels, size)))
    sets = balanced_sets(count, labels, size, np.random.default_rng(seed))
    assert sets.shape == (count, size)
    assert len({tuple(own) for own in sets}) == count
    assert all(len(set(own)) == size for own in sets.tolist())
    assert np.ptp(np.bincount(sets.ravel(), minlength=labels)) <= 1


def test_label_sets_without_sizes_use_what_there_is():
    counts = describe(DIGITS, split(kind="label-sets", labels=4, clients=10)).counts
    assert set(counts.ravel().tolist()) == {0, np.bincount(DIGITS).min() // 4}


def test_sizes_are_drawn_at_random_and_the_rest_is_left_out():
    labels = np.repeat(np.arange(10), 100)
    parts = split(labels, clients=4, sizes=[100, 50])
    assert [len(part) for part in parts] == [100, 50, 100, 50]
    assert describe(labels, parts).left_out == 700
    assert (describe(labels, parts).counts.sum(axis=0) > 0).all()


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"sizes": [300], "clients": 5}, r"sizes = \[300\].*1500 of 1437 records"),
        ({"sizes": [0]}, r"partition\.sizes = 0"),
        ({"sizes": 2.5}, r"partition\.sizes = 2\.5: expected integers, as 400,800"),
        ({"sizes": [5], "kind": "shards"}, r"expected nothing with shards.*iid and label-sets"),
        ({"sizes": [5], "kind": "label-sets"}, r"multiples of partition\.labels = 2"),
        ({"kind": "label-sets", "labels": 11}, r"partition\.labels = 11: expected at most 10"),
        ({"kind": "label-sets", "labels": 1, "clients": 11}, r"clients = 11: expected at most 10"),
    ],
)
def test_sizes_and_sets_that_do_not_fit(more, text):
    with pytest.raises(InvalidParameterError, match=text):
        split(**more)


def test_label_sets_with_a_class_that_is_too_small():
    labels = np.array([0] * 50 + [1] * 50 + [2])
    with pytest.raises(DataError, match=r"fewer records .1. than clients .*fewer labels"):
        split(labels, kind="label-sets", labels=2, clients=3)
