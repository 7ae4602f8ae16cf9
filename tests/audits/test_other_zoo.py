"""Planted bugs of CentralDP, ACFL and M2FDP, and those that Flower has, are refuted."""

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
from planted import (
    Bug,
    EverySecond,
    always_the_same,
    check_refuted,
    clip_each_array,
    clip_not,
    clip_too_weakly,
    clip_without_numbers,
    clips,
    half_sensitivity,
    noise,
    only_arrays,
    partly,
    scaled,
    uncharged,
)

from flwr_privacy.acfl import release as acfl_release
from flwr_privacy.central_dp import mean as central_mean
from flwr_privacy.central_dp import terms as central_terms
from flwr_privacy.central_dp.correlated import stream
from flwr_privacy.central_dp.plan import CentralDPNoisePlan
from flwr_privacy.clients import acfl as acfl_client
from flwr_privacy.m2fdp import zone_average
from flwr_privacy.privacy.noise import discrete_gaussian
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.simulations.research.audits import (
    acfl,
    central,
    central_correlated,
    flower,
    m2fdp,
)
from flwr_privacy.strategies import participants
from flwr_privacy.strategies.central_dp.strategy import CentralDP
from flwr_privacy.strategies.m2fdp.simulated_aggregators import SimulatedAggregators


def public_server_seed(patch: pytest.MonkeyPatch) -> None:
    """Take the server's noise from the number of the round."""
    patch.setattr(
        CentralDP, "_random", lambda self, of, purpose="noise": SecureRandom.insecure(of, purpose)
    )


def too_many_shares(patch: pytest.MonkeyPatch) -> None:
    """Divide the noise by the number of clients, not by its root."""
    patch.setattr(central_terms, "share_sigma", lambda total, parties: total / parties)


def drawn(draw: Any) -> Any:
    """Have clients sampled in another way."""
    return lambda patch: patch.setattr(participants, "each_by_itself", draw)


def twice_as_many(assigned: Any, *, q: float, secret: bytes, server_round: int, **_: Any) -> Any:
    return _each(assigned, q=2 * q, secret=secret, server_round=server_round)


def always_those(assigned: Any, *, q: float, secret: bytes, server_round: int, **_: Any) -> Any:
    return _each(assigned, q=q, secret=b"", server_round=0)


def by_a_public_seed(assigned: Any, *, q: float, secret: bytes, server_round: int, **_: Any) -> Any:
    # Of two trainings whose nodes have other numbers: in the order of the clients.
    members = {node: [f"{place}"] for place, node in enumerate(assigned)}
    those = _each(members, q=q, secret=b"0", server_round=server_round)
    return {node: assigned[node] for node in those}


def so_many(assigned: Any, *, q: float, secret: bytes, server_round: int, **_: Any) -> Any:
    order = np.random.default_rng().permutation(len(assigned))
    nodes = [list(assigned)[place] for place in order[: round(q * len(assigned))]]
    return {node: assigned[node] for node in nodes}


_each = participants.each_by_itself


def without_a_factor(patch: pytest.MonkeyPatch) -> None:
    """Forget the noise of earlier rounds: each round gets z."""
    patch.setattr(stream.ToeplitzStream, "_next", _independent)


def _independent(self: Any, sigma: float, random: SecureRandom) -> np.ndarray:
    return stream._rounded(stream.discrete_gaussian(self.size, sigma * stream._ONE, random))


def factor_twice(patch: pytest.MonkeyPatch) -> None:
    """Divide by the factor, and by the factor again."""
    once = stream.ToeplitzStream._next

    def twice(self: Any, sigma: float, random: SecureRandom) -> np.ndarray:
        if not hasattr(self, "again"):
            self.again = copy.copy(self)
            self.again._last = []
        first = once(self, sigma, random)
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(stream, "discrete_gaussian", lambda *_: first * stream._ONE)
            return once(self.again, sigma, random)

    patch.setattr(stream.ToeplitzStream, "_next", twice)


def state_lost_once(patch: pytest.MonkeyPatch) -> None:
    """Begin anew in the middle, as after a crash without a checkpoint."""
    real = stream.ToeplitzStream._next

    def forgetful(self: Any, sigma: float, random: SecureRandom) -> np.ndarray:
        if self.drawn == 5:
            self._last = []
        return real(self, sigma, random)

    patch.setattr(stream.ToeplitzStream, "_next", forgetful)


def drawn_from_one_round(patch: pytest.MonkeyPatch) -> None:
    """Draw the same z in every round."""
    patch.setattr(
        CentralDP, "_random", lambda self, of, purpose="noise": SecureRandom.insecure(7, purpose)
    )


def participations_alike(patch: pytest.MonkeyPatch) -> None:
    """Charge each round as if it was the only one: noise over the largest column is too little."""
    patch.setattr(
        CentralDPNoisePlan,
        "noise_multiplier",
        property(lambda self: self._least_noise(releases=1)),
    )


def bounds_not_kept(patch: pytest.MonkeyPatch) -> None:
    """Let rows be twice as long as their bound."""
    real = acfl_client.check_data
    limits = ("feature_bound", "feature_norm", "label_bound", "label_norm")

    def checked(X: Any, Y: Any, **named: Any) -> Any:
        return real(X, Y, **{**named, **{name: 2 * named[name] for name in limits}})

    patch.setattr(acfl_client, "check_data", checked)


def gradients_clipped_too_weakly(patch: pytest.MonkeyPatch) -> None:
    real = acfl_release.clipped_gradient
    patch.setattr(acfl_release, "clipped_gradient", lambda X, Y, W, norm: real(X, Y, W, 3 * norm))


def without_label_moments(size: int, sigma: float, random: SecureRandom) -> np.ndarray:
    return discrete_gaussian(size, sigma, random) * (size != 96)


def of_a_larger_zone(patch: pytest.MonkeyPatch) -> None:
    """Add the noise of a zone of twice as many devices."""
    real = SimulatedAggregators.noised

    def noised(self: Any, node: str, upload: Any, asked: Any) -> Any:
        drawn = partial(_less, zone_average.discrete_gaussian)
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(zone_average, "discrete_gaussian", drawn)
            return real(self, node, upload, asked)

    patch.setattr(SimulatedAggregators, "noised", noised)


def _less(real: Any, size: int, sigma: float, random: SecureRandom) -> np.ndarray:
    drawn: np.ndarray = real(size, sigma / 2, random)
    return drawn


def one_child_missing(patch: pytest.MonkeyPatch) -> None:
    """Divide the sum of a zone by one child too few."""
    real = SimulatedAggregators.noised

    def noised(self: Any, node: str, upload: Any, asked: Any) -> Any:
        upload.codes[:] = upload.codes * 4 // 3
        return real(self, node, upload, asked)

    patch.setattr(SimulatedAggregators, "noised", noised)


def as_it_is(patch: pytest.MonkeyPatch) -> None:
    """Plant nothing: the bug is there."""


FLOWER = flower.flower_server
CORRELATED = central_correlated.central_correlated
CASES: dict[str, Bug] = {
    # CentralDP with noise by a server
    "server: clipping twice too weak": Bug(
        central.central_server, clips(partial(clip_too_weakly, times=2.0))
    ),
    "server: no clipping": Bug(central.central_server, clips(clip_not)),
    "server: numbers not clipped": Bug(central.central_server, clips(clip_without_numbers)),
    "server: noise x 0.9": Bug(central.central_server, noise(central_mean, scaled(0.9))),
    "server: the wrong unit": Bug(central.central_server, half_sensitivity(central_terms)),
    "server: no noise every second time": Bug(
        central.central_server, noise(central_mean, EverySecond("missing"))
    ),
    "server: numbers without noise": Bug(central.central_server, noise(central_mean, only_arrays)),
    "server: a public seed": Bug(central.central_server, public_server_seed, "again", sessions=2),
    # in shares
    "shares: too small": Bug(central.central_shares, too_many_shares),
    "shares: missing": Bug(central.central_shares, noise(central_mean, EverySecond("missing"))),
    "shares: all alike": Bug(central.central_shares, noise(central_mean, always_the_same)),
    "shares: 5 % without noise": Bug(central.central_shares, noise(central_mean, partly)),
    # samples
    "clients: twice the rate": Bug(
        central.central_sampled, drawn(twice_as_many), "sampled", sessions=2
    ),
    "clients: always those": Bug(
        central.central_sampled, drawn(always_those), "depend", sessions=2
    ),
    "clients: by a public seed": Bug(
        central.central_sampled, drawn(by_a_public_seed), "depend", sessions=2
    ),
    "clients: so many": Bug(central.central_sampled, drawn(so_many), "fixed size", sessions=2),
    "correlated: no factor": Bug(CORRELATED, without_a_factor, "same noise"),
    "correlated: the factor twice": Bug(CORRELATED, factor_twice, "same noise"),
    "correlated: a state that is lost": Bug(CORRELATED, state_lost_once, "same noise"),
    "correlated: the same z": Bug(CORRELATED, drawn_from_one_round, "same noise"),
    "correlated: noise x 0.9": Bug(CORRELATED, noise(stream, scaled(0.9))),
    "correlated: one round's noise": Bug(CORRELATED, participations_alike, "exceed"),
    # ACFL
    "acfl: bounds not kept": Bug(acfl.acfl_records, bounds_not_kept),
    "acfl: gradients clipped too weakly": Bug(acfl.acfl_records, gradients_clipped_too_weakly),
    "acfl: labels without noise": Bug(
        acfl.acfl_records, noise(acfl_release, without_label_moments)
    ),
    "acfl: lengths without noise": Bug(acfl.acfl_records, noise(acfl_release, only_arrays)),
    "acfl: half of the noise": Bug(acfl.acfl_records, noise(acfl_release, scaled(0.5))),
    "acfl: the same noise everywhere": Bug(acfl.acfl_records, noise(acfl_release, always_the_same)),
    "acfl: a gradient not charged": Bug(acfl.acfl_records, uncharged, "not charged"),
    # M2FDP
    "devices: arrays clipped": Bug(m2fdp.m2fdp_devices, clips(clip_each_array)),
    "devices: half of the noise": Bug(m2fdp.m2fdp_devices, noise(zone_average, scaled(0.5))),
    "devices: noise reused": Bug(m2fdp.m2fdp_devices, noise(zone_average, EverySecond("reused"))),
    "devices: a release not charged": Bug(m2fdp.m2fdp_devices, uncharged, "not charged"),
    "zone: clipping twice too weak": Bug(
        m2fdp.m2fdp_zone, clips(partial(clip_too_weakly, times=2.0))
    ),
    "zone: noise of a larger one": Bug(m2fdp.m2fdp_zone, of_a_larger_zone),
    "zone: one child missing": Bug(m2fdp.m2fdp_zone, one_child_missing, sessions=2),
    "zone: no noise every second time": Bug(
        m2fdp.m2fdp_zone, noise(zone_average, EverySecond("missing"))
    ),
    # Flower
    "flower: NaN unclipped": Bug(partial(FLOWER, kinds=["NaN"]), as_it_is, "not finite"),
    "flower: numbers unclipped": Bug(partial(FLOWER, kinds=["a number"]), as_it_is, "canary"),
    "flower: noise on integers": Bug(partial(flower.flower_local, arrays="integers"), as_it_is),
    "flower: no composition": Bug(flower.flower_local, as_it_is, "epsilon"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_planted_bug_is_refuted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_refuted(CASES[name], monkeypatch)
