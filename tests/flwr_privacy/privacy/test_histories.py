"""Histories of charges that are kept up, beside those that are counted from all releases."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from flwr_privacy.accounting import Charge
from flwr_privacy.privacy.card import CardRelease
from flwr_privacy.privacy.card.histories import Histories

CHARGES = [Charge(neighbours="replace_one", noise_multiplier=z) for z in (1.0, 2.0, 4.0)]


def random_releases(seed: int, *, kinds: int, rounds: int = 12) -> list[CardRelease]:
    """Return releases of changing clients and charges."""
    rng = np.random.default_rng(seed)
    return [
        CardRelease(
            phase="train",
            server_round=server_round,
            request=0,
            charge=CHARGES[rng.integers(kinds)],
            clients=tuple(str(c) for c in sorted(rng.choice(9, rng.integers(1, 6), replace=False))),
            unanswered=None,
        )
        for server_round in range(1, rounds + 1)
    ]


def counted(releases: list[CardRelease]) -> dict[str, Counter[Charge]]:
    """Return how often each client was charged for what."""
    counts: dict[str, Counter[Charge]] = {}
    for release in releases:
        for client in release.clients:
            counts.setdefault(client, Counter())[release.charge] += 1
    return counts


def following(releases: list[CardRelease]) -> Histories:
    histories = Histories()
    histories.follow(releases)
    return histories


@pytest.mark.parametrize("kinds", [1, 3])
def test_histories_that_are_kept_up_are_those_of_all_releases(kinds: int) -> None:
    for seed in range(30):
        releases, histories = random_releases(seed, kinds=kinds), Histories()
        for round_ in range(1, len(releases) + 1):
            histories.follow(releases[:round_])
            counts = counted(releases[:round_])
            assert histories.clients == len(counts)
            assert histories.lengths() == Counter(c.total() for c in counts.values())
            longest = histories.longest()
            assert all(found in counts.values() for found in longest)
            # What is left out is included in something that is not.
            assert all(any(own <= found for found in longest) for own in counts.values())


def test_of_clients_with_the_same_kind_of_charge_the_one_with_most_is_left() -> None:
    histories = following(random_releases(1, kinds=1))
    most = max(counts.total() for counts in counted(random_releases(1, kinds=1)).values())
    assert histories.longest() == [{CHARGES[0]: most}]


def test_neither_of_two_histories_includes_the_other() -> None:
    one, other, _ = CHARGES
    charged = [("ab", one), ("ab", other), ("a", one), ("b", other), ("c", one)]
    releases = [
        CardRelease(
            phase="train",
            server_round=place,
            request=0,
            charge=charge,
            clients=tuple(clients),
            unanswered=(),
        )
        for place, (clients, charge) in enumerate(charged, 1)
    ]
    found = {frozenset(counts.items()) for counts in following(releases).longest()}
    assert found == {
        frozenset({(one, 2), (other, 1)}),
        frozenset({(one, 1), (other, 2)}),
        frozenset({(one, 1)}),
    }


def test_a_release_that_has_changed_is_counted_anew() -> None:
    releases = random_releases(2, kinds=3)
    histories = following(releases)
    answered = [replace(release, unanswered=()) for release in releases]
    renamed = [replace(release, clients=("a", *release.clients)) for release in releases]
    dearer = [replace(release, charge=CHARGES[0]) for release in releases]
    for changed in (answered, renamed, dearer, releases[:5], [*releases[:5], *renamed[:3]]):
        histories.follow(changed)
        alone = following(changed)
        assert histories.clients == alone.clients
        assert histories.lengths() == alone.lengths()
        assert histories.longest() == alone.longest()
