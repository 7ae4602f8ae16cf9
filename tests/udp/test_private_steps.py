"""DP-SGD: what a step moves by, its noise, and what all steps cost."""

import itertools
import math
from dataclasses import replace

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from private_loops import Watched, loop, terms
from torch import Tensor, nn

from flwr_privacy.accounting import spent
from flwr_privacy.clients.torch import initialise
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.pipeline.mechanism import Facts
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.strategies import DPSGD
from flwr_privacy.udp import UDPPlan

NORM = 0.7


class Text(nn.Module):
    """Embeddings, a linear layer on every position, and one on their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.each = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.last = nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(torch.tanh(self.each(self.embed(tokens)))).mean(dim=1))
        return out


class Twice(nn.Module):
    """A layer that is used twice: its gradients are no outer products."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.layer(torch.tanh(self.layer(x)))))
        return out


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


CASES = {
    "mlp": (mlp, (4,)),
    "cnn": (cnn, (1, 4, 4)),
    "text": (Text, None),
    "twice": (Twice, (4,)),
}


def records(case: str, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Records, of which the first has a huge gradient."""
    draws = torch.Generator().manual_seed(seed)
    shape = CASES[case][1]
    if shape is None:
        features = torch.randint(5, (count, 6), generator=draws)
    else:
        features = torch.randn(count, *shape, generator=draws)
        features[0] *= 1e4
    return features, torch.randint(3, (count,), generator=draws)


def total(case: str, features: Tensor, labels: Tensor, batch: list[int], norm: float = NORM):
    model = initialise(CASES[case][0], 0)
    asked = terms(clipping_norm=norm)
    return loop(Watched(asked, [batch]), model, features, labels).totals[0]


@pytest.mark.parametrize("case", CASES)
def test_the_sum_is_that_of_opacus(case: str) -> None:
    features, labels = records(case, 9)
    ours = total(case, features, labels, list(range(9)))
    model = GradSampleModule(initialise(CASES[case][0], 0))
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        noise_multiplier=0.0,
        max_grad_norm=NORM,
        expected_batch_size=9,
    )
    nn.CrossEntropyLoss()(model(features), labels).backward()
    optimizer.clip_and_accumulate()
    theirs = torch.cat([p.summed_grad.flatten() for p in model.parameters()]).numpy()
    # Opacus clips to norms that are a little too small: it divides by norm + 1e-6.
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_a_record_moves_the_codes_by_at_most_the_shift_in_every_batch(case: str) -> None:
    """All batches of five records, with and without each of them, the huge one among them."""
    features, labels = records(case, 5)
    asked = terms(clipping_norm=NORM, grid=-10)  # so coarse that truncation counts
    step, largest = 2.0**asked.grid, 0.0
    codes = {
        batch: np.trunc(total(case, features, labels, list(batch)) / step)
        for size in range(6)
        for batch in itertools.combinations(range(5), size)
    }
    dimension = len(codes[()])
    assert not codes[()].any()
    for batch, own in codes.items():
        for record in batch:
            without = codes[tuple(other for other in batch if other != record)]
            largest = max(largest, float(np.linalg.norm((own - without) * step)))
    assert largest <= asked.shift(dimension)
    assert largest > 0.9 * NORM  # the bound is attained, or the test would say nothing


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("norm", [1e-6, 1.0, 1e6])
def test_a_step_of_one_record_is_as_long_as_the_clipping_norm_at_most(
    case: str, norm: float
) -> None:
    features, labels = records(case, 1)
    moved = float(np.linalg.norm(total(case, features, labels, [0], norm)))
    assert 0 < moved <= norm * (1 + 1e-3)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e38])
def test_a_record_without_a_finite_gradient_counts_as_zero_and_leaves_the_others(
    value: float,
) -> None:
    features, labels = records("mlp", 5)
    alone = total("mlp", features, labels, [1, 2, 3])
    features[4] = value
    with_it = total("mlp", features, labels, [1, 2, 3, 4])
    assert np.isfinite(with_it).all()
    assert np.linalg.norm(with_it - alone) <= NORM * (1 + 1e-3)
    if not math.isfinite(value):
        np.testing.assert_allclose(with_it, alone, rtol=1e-4, atol=1e-6)


def test_the_float_sum_of_many_records_stays_within_the_rounding() -> None:
    """4096 gradients of one length: the float64 sum is exact enough for `shift`."""
    draws = torch.Generator().manual_seed(1)
    features = torch.randn(4096, 4, generator=draws) * 100
    labels = torch.randint(3, (4096,), generator=draws)
    model = initialise(mlp, 0)
    every = list(range(4096))
    asked = terms(clipping_norm=NORM)
    whole = loop(Watched(asked, [every]), model, features, labels).totals[0]
    less = loop(Watched(asked, [every[1:]]), initialise(mlp, 0), features, labels).totals[0]
    assert np.linalg.norm(whole - less) <= asked.shift(len(whole))


def test_the_noise_has_the_charged_deviation_on_the_grid() -> None:
    asked = terms(noise_multiplier=0.8, clipping_norm=NORM)
    dimension = 40_000
    noise = asked.noised(np.zeros(dimension), SecureRandom.insecure(3))
    codes = noise / 2.0**asked.grid
    np.testing.assert_array_equal(codes, np.round(codes))
    expected = 0.8 * 2 * asked.shift(dimension)
    assert abs(noise.std() / expected - 1) < 5 / math.sqrt(2 * dimension)
    assert asked.sigma(dimension) == expected


def test_every_step_has_noise_of_its_own_in_all_weights() -> None:
    features, labels = records("mlp", 8)
    asked = terms(noise_multiplier=1.0, steps=2)
    grads = []

    def keep(model: nn.Module, _: object) -> None:
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]).numpy() * 8)

    watched = loop(Watched(asked, [[], []]), initialise(mlp, 0), features, labels, after_step=keep)
    assert not any(sums.any() for sums in watched.totals)  # no records: the noise alone
    sigma = asked.sigma(grads[0].size)
    assert all(0.6 < noise.std() / sigma < 1.4 for noise in grads)
    assert abs(np.corrcoef(grads)[0, 1]) < 0.5
    assert len(np.unique(grads[0])) == grads[0].size  # no array shares its noise with another


def test_all_steps_are_one_charge_that_dp_accounting_agrees_with() -> None:
    asked = terms(noise_multiplier=1.1, sampling_rate=0.05, steps=200, gap=0.0)
    charge = asked.charge()
    assert charge is not None
    assert (charge.count, charge.sampling, charge.neighbours) == (200, 0.05, "replace_one")
    ours = spent([charge], delta=1e-5, accountant="rdp")
    added = replace(charge, neighbours="add_remove")
    event = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(1.1)), 200
    )
    theirs = RdpAccountant().compose(event).get_epsilon(1e-5)
    assert spent([added], delta=1e-5, accountant="rdp") == pytest.approx(theirs, rel=2e-2)
    # The noise is 1.1 times the distance of two records, 2.2 times that of one and none.
    event = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(2.2)), 200
    )
    least = PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_ONE).compose(event)
    assert 1 <= ours / least.get_epsilon(1e-5) < 1.1
    one = replace(charge, count=1)
    assert spent([one] * 200, delta=1e-5, accountant="rdp") == pytest.approx(ours, rel=1e-12)


@pytest.mark.parametrize(("rate", "steps", "rounds"), [(0.02, 100, 3), (1.0, 10, 2), (0.2, 1, 1)])
def test_the_noise_of_a_plan_spends_the_budget_and_no_more(
    rate: float, steps: int, rounds: int
) -> None:
    privacy = DPSGD(epsilon=3.0, delta=1e-5, sampling_rate=rate, steps=steps)
    plan = UDPPlan(privacy, rounds=rounds, q=1.0)
    asked, _ = plan.terms([], {}, honest=0)
    charge = asked.charge()
    assert charge is not None
    kind = "gdp" if rate == 1 else "rdp"
    total = spent([charge] * rounds, delta=1e-5, accountant=kind)
    assert 2.97 < total <= 3.0 * (1 + 1e-9)


def test_a_grid_that_costs_more_than_is_charged_is_refused() -> None:
    start = {"w": np.zeros(1000, np.float32)}
    with pytest.raises(InvalidParameterError, match="grid"):
        terms(noise_multiplier=1.0, grid=-2, gap=1e-9).plan(start, Facts(records=10))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"steps": 0}, "steps"),
        ({"sampling_rate": 1.5}, "sampling_rate"),
        ({"noise": "gdp"}, "noise"),
        ({"shared_noise": True}, "single linear step"),
        ({"clipping_norm": 1e-9}, "clipping_norm"),
        ({"sampling_rate": 0.0}, "sampling_rate"),
    ],
)
def test_options_that_are_not_allowed(change: dict, text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        DPSGD(**{"sampling_rate": 0.1, "steps": 5, **change})
