"""Clients of a cohort that train together make what each makes alone, up to rounding."""

import contextvars
import logging
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from flwr_privacy.clients.certificates.per_record_steps import PerRecordPlan, asked
from flwr_privacy.clients.certificates.poisson_steps import PoissonPlan, asked_steps
from flwr_privacy.clients.node import side_by_side as module
from flwr_privacy.clients.node.side_by_side import side_by_side
from flwr_privacy.clients.torch import (
    get_arrays,
    initialise,
    mlp,
    set_arrays,
    train,
    train_per_record,
    train_poisson,
)
from flwr_privacy.privacy.randomness import SecureRandom

SIZES = (8, 6, 3)


def model():
    return initialise(lambda: mlp(SIZES), 5)


def records(client, count=11):
    draws = np.random.default_rng(client)
    labels = draws.integers(SIZES[-1], size=count)
    return draws.normal(size=(count, SIZES[0])).astype(np.float32), labels


def plain(client, net=None, **settings):
    net = net or model()
    count = settings.pop("count", 11)
    loss = train(net, *records(client, count), **{"batch_size": 4, "seed": client} | settings)
    return client, get_arrays(net), loss


def both(work, clients=range(5), **how):
    """Return what clients make alone, and side by side, by client."""
    alone = {made[0]: made for made in map(work, clients)}
    calls = [lambda client=client: work(client) for client in clients]
    together = {made[0]: made for made in side_by_side(calls, **how)}
    assert alone.keys() == together.keys()
    return alone, together


def assert_same(alone, together):
    for client, (_, arrays, loss) in alone.items():
        _, others, other_loss = together[client]
        assert loss == pytest.approx(other_loss, rel=1e-5)
        for name, array in arrays.items():
            np.testing.assert_allclose(others[name], array, rtol=2e-5, atol=2e-6)


@pytest.fixture
def stacked(monkeypatch):
    """Count the clients whose descents were done together."""
    from flwr_privacy.clients.torch.gradient_descent.descent import Descent
    from flwr_privacy.clients.torch.gradients_task import GradientsTask

    counts = []
    for kind in (Descent, GradientsTask):
        genuine = kind.together

        def counted(job, jobs, genuine=genuine):
            done = genuine(job, jobs)
            counts.append(len(jobs))
            return done

        monkeypatch.setattr(kind, "together", counted)
    monkeypatch.setattr("flwr_privacy.clients.node.side_by_side._trials", _fresh_trials())
    return counts


def _fresh_trials():
    return type(module._trials)(module._Trial)


def test_models_of_a_cohort_are_trained_as_each_alone(stacked):
    assert_same(*both(lambda c: plain(c, epochs=3)))
    assert stacked == [5]


def test_clients_with_other_numbers_of_records_are_trained_together(stacked):
    assert_same(*both(lambda c: plain(c, count=3 + 4 * c, epochs=2)))
    assert stacked == [5]


def test_poisson_batches_that_may_be_empty_are_trained_together(stacked):
    def work(client):
        net = model()
        plan = PoissonPlan(sampling_rate=0.1, steps=6)
        with asked_steps(plan, SecureRandom.insecure(client, "batches")) as request:
            train_poisson(net, *records(client), learning_rate=0.1)
        assert request.certificate.records == 11
        return client, get_arrays(net), 0.0

    assert_same(*both(work))
    assert stacked == [5]


@pytest.mark.parametrize(
    "plan",
    [
        PerRecordPlan(clipping_norm=0.5, learning_rate=0.3),
        PerRecordPlan(clipping_norm=0.5, learning_rate=0.3, epochs=2, batch_size=4),
    ],
    ids=["one step", "batches"],
)
def test_gradients_clipped_per_record_are_those_of_each_alone(stacked, plan):
    def work(client):
        net = model()
        with asked(plan) as request:
            train_per_record(net, *records(client, 9 + client))
        request.certificate.check(get_arrays(model()).values(), get_arrays(net).values())
        return client, get_arrays(net), request.certificate.sensitivity()

    assert_same(*both(work))
    assert max(stacked) == 5


def test_the_convex_bound_is_trained_together_in_float64(stacked):
    plan = PerRecordPlan(clipping_norm=0.5, learning_rate=0.1, epochs=2, bound="convex")

    def loss(outputs, labels):
        return functional.binary_cross_entropy_with_logits(outputs[:, 0], labels.to(outputs))

    def work(client):
        net = initialise(lambda: nn.Linear(8, 1), 0)
        features, labels = records(client)
        with asked(plan) as request:
            train_per_record(net, features, labels % 2, loss=loss, smoothness=20.0)
        return client, get_arrays(net), request.certificate.sensitivity()

    assert_same(*both(work))
    assert set(stacked) == {5}


def test_a_model_that_clients_share_is_each_clients_own_when_it_goes_on(stacked):
    shared = model()
    start = get_arrays(shared)

    def work(client):
        set_arrays(shared, {name: array + client for name, array in start.items()})
        return plain(client, shared)

    alone, together = both(work)
    assert_same(alone, together)
    assert stacked == [5]


def test_what_a_client_draws_after_its_training_is_what_it_draws_alone():
    def work(client):
        torch.manual_seed(client)
        np.random.seed(client)  # noqa: NPY002
        client, arrays, loss = plain(client)
        drawn = {"torch": torch.rand(1).numpy(), "numpy": np.random.random(1)}  # noqa: NPY002
        return client, arrays | drawn, loss

    alone, together = both(work)
    for client, (_, arrays, _) in alone.items():
        for name in ("torch", "numpy"):
            assert together[client][1][name] == arrays[name]


def test_a_clients_arrays_are_handed_over_before_the_next_one_goes_on():
    shared = model()
    start = get_arrays(shared)

    def work(client):
        set_arrays(shared, start)
        train(shared, *records(client), seed=client)
        return client, {n: t.numpy() for n, t in shared.state_dict().items()}, 0.0  # views

    taken = {}
    for client, arrays, _ in side_by_side([lambda c=c: work(c) for c in range(4)]):
        taken[client] = {name: array.copy() for name, array in arrays.items()}
    for client, arrays in taken.items():
        for name, array in plain(client, batch_size=32)[1].items():
            np.testing.assert_allclose(arrays[name], array, rtol=2e-5, atol=2e-6)


class Dropout(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 6), nn.Dropout(0.5), nn.Linear(6, 3))


class Branching(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else super().forward(-x)


def batch_norm():
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


def test_statistics_of_batch_normalisation_are_each_clients_own(stacked):
    assert_same(*both(lambda c: plain(c, initialise(batch_norm, 5), count=8 + 4 * c, epochs=2)))
    assert stacked == [5]


@pytest.mark.parametrize("factory", [Dropout, lambda: Branching(8, 3)], ids=["drop", "branch"])
def test_a_model_that_cannot_be_stacked_is_trained_one_by_one_and_it_is_said(
    stacked, factory, caplog
):
    def work(client):
        torch.manual_seed(client)
        net = initialise(factory, 5)
        return plain(client, net)

    with caplog.at_level(logging.WARNING, logger="flwr.privacy"):
        alone, together = both(work)
        both(work)
    for client, (_, arrays, loss) in alone.items():
        assert together[client][2] == loss
        for name, array in arrays.items():
            assert np.array_equal(together[client][1][name], array)
    assert not stacked
    said = [r.message for r in caplog.records if "one by one" in r.message]
    assert len(said) == 1, said  # once, not in each round


@pytest.mark.parametrize("how", ["loss", "perturbation"])
def test_trainings_that_do_not_fit_are_done_one_by_one_and_it_is_said(stacked, how, caplog):
    def work(client):
        if how == "perturbation":
            return plain(client, perturbation=0.1)
        return plain(client, loss=lambda o, y: functional.cross_entropy(o, y))

    module._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="flwr.privacy"):
        alone, together = both(work)
        both(work)
    for client, (_, arrays, _) in alone.items():
        assert all(np.array_equal(together[client][1][name], a) for name, a in arrays.items())
    assert not stacked
    assert len([r for r in caplog.records if "a perturbation is drawn" in r.message]) == 1


def test_other_models_losses_and_step_sizes_are_not_done_together(stacked):
    def work(client):
        if client == 1:
            return plain(client, initialise(lambda: mlp((8, 4, 3)), 5))
        if client == 2:
            return plain(client, learning_rate=0.2)
        if client == 3:
            return plain(client, loss=lambda o, y: functional.cross_entropy(o, y))
        return plain(client)

    assert_same(*both(work, range(6)))
    assert stacked == [3]  # clients 0, 4 and 5


class Scaled(nn.Linear):
    def __init__(self, scale):
        super().__init__(8, 3)
        self.scale = scale

    def forward(self, x):
        return super().forward(x) * self.scale


def test_models_that_differ_in_an_attribute_are_not_done_together(stacked):
    def work(client):
        return plain(client, initialise(lambda: Scaled(1.0 + client % 2), 5))

    assert_same(*both(work, range(4)))
    assert stacked == [2, 2]


def test_models_that_differ_in_a_tensor_that_is_no_buffer_are_not_done_together(stacked):
    def work(client):
        return plain(client, initialise(lambda: Scaled(torch.tensor(1.0 + client)), 5))

    assert_same(*both(work, range(3)))
    assert not stacked


def test_the_bad_records_of_one_client_do_not_hurt_the_others(stacked):
    def work(client):
        features, labels = records(client)
        if client == 2:
            labels = labels + 7
        net = model()
        try:
            loss = train(net, features, labels, batch_size=4, seed=client)
        except (IndexError, RuntimeError):
            return client, {}, 0.0
        return client, get_arrays(net), loss

    alone, together = both(work)
    assert together[2][1] == {}
    assert_same(alone, together)


def test_an_error_of_a_call_ends_the_others():
    ended = []

    def call(client):
        try:
            made = plain(client)
        finally:
            ended.append(client)
        if client == 1:
            raise KeyboardInterrupt
        return made

    with pytest.raises(KeyboardInterrupt):
        list(side_by_side([lambda c=c: call(c) for c in range(4)]))
    assert sorted(ended) == [0, 1, 2, 3]


def test_who_comes_to_no_training_is_handed_over_at_once():
    order = []
    calls = [lambda: plain(0), lambda: (1, {}, 0.0), lambda: plain(2)]
    for made in side_by_side(calls):
        order.append(made[0])
    assert order == [1, 0, 2]


def test_measured_the_faster_way_is_taken(stacked, monkeypatch):
    from flwr_privacy.clients.torch.gradient_descent.descent import Descent

    slow = Descent.together
    clock = iter(range(10**6))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))  # each measurement is 1 second

    def rounds(count):
        for _ in range(count):
            both(plain, measure=True)

    rounds(8)
    # Three times together, then three clients alone; together is a fifth of a second per client.
    assert stacked == [5, 5, 5] + [5] * 4

    def slower(job, jobs):
        for _ in range(10):
            next(clock)
        return slow(job, jobs)

    stacked.clear()
    monkeypatch.setattr(Descent, "together", slower)
    monkeypatch.setattr("flwr_privacy.clients.node.side_by_side._trials", _fresh_trials())
    rounds(8)
    assert stacked == [5, 5, 5]


def test_without_seeds_clients_draw_what_no_other_draws(stacked):
    def work(client):
        before = np.random.random(1)  # noqa: NPY002
        client, _, loss = plain(client)
        after = [np.random.random(1), torch.rand(1).numpy()]  # noqa: NPY002
        return client, {"drawn": np.array([before[0], after[0][0], after[1][0]])}, loss

    _, first = both(work)
    _, second = both(work)
    drawn = [made[1]["drawn"] for made in (*first.values(), *second.values())]
    assert len({float(number) for numbers in drawn for number in numbers}) == 3 * len(drawn)
    assert stacked == [5, 5]


def test_dropout_differs_from_client_to_client_without_seeds():
    def work(client):
        net = initialise(Dropout, 5)
        train(net, *records(0), seed=0)
        return client, get_arrays(net), 0.0

    _, together = both(work)
    found = {made[1]["2.weight"].tobytes() for made in together.values()}
    assert len(found) == len(together)


class Counting(nn.Linear):
    """Keeps a mean of what it saw in a buffer that it replaces."""

    def __init__(self):
        super().__init__(8, 3)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(dim=0)
        return super().forward(x)


class Thinned(nn.Linear):
    """Drops out as a whole, by Python's generator."""

    def forward(self, x):
        return super().forward(x) * (1.0 if random.random() < 0.5 else 0.5)


SHARED = initialise(lambda: mlp(SIZES), 5)


def regularised(outputs, labels):
    """Return a loss with a part that is not a function of the outputs."""
    penalty = sum(p.square().sum() for p in SHARED.parameters())
    return functional.cross_entropy(outputs, labels) + 0.5 * penalty


@pytest.mark.parametrize("how", ["buffer", "draw", "loss"])
def test_what_does_not_come_to_the_same_together_is_done_one_by_one(stacked, how, caplog):
    start = get_arrays(model())

    def work(client):
        random.seed(client)
        if how == "loss":
            set_arrays(SHARED, start)
            return plain(client, SHARED, loss=regularised)
        factory = Counting if how == "buffer" else (lambda: Thinned(8, 3))
        return plain(client, initialise(factory, 5))

    module._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="flwr.privacy"):
        alone, together = both(work)
    for client, (_, arrays, _) in alone.items():
        assert all(np.array_equal(together[client][1][name], a) for name, a in arrays.items())
    assert "one by one" in caplog.text


@pytest.mark.parametrize("how", ["attribute", "frozen", "assigned"])
def test_a_shared_model_is_all_of_each_clients_own(stacked, how):
    shared = initialise(lambda: Scaled(1.0), 5)
    start = {name: torch.tensor(array) for name, array in get_arrays(shared).items()}

    def work(client):
        shared.requires_grad_(True)
        if how == "assigned":
            shared.load_state_dict({n: t.clone() for n, t in start.items()}, assign=True)
            shared.requires_grad_(True)
        else:
            shared.load_state_dict(start)
        if how == "attribute":
            shared.scale = 1.0 + client
        if how == "frozen":
            shared.bias.requires_grad_(client % 2 == 0)
        return plain(client, shared)

    assert_same(*both(work))


class Tensed:
    """A loss that cannot be compared by value."""

    def __init__(self):
        self.weights = torch.ones(3)

    def __eq__(self, other):
        return self.weights == other.weights

    __hash__ = None

    def __call__(self, outputs, labels):
        return functional.cross_entropy(outputs, labels, weight=self.weights)


def test_losses_are_compared_by_what_they_are(stacked):
    one = Tensed()
    assert_same(*both(lambda c: plain(c, loss=one if c < 3 else Tensed())))
    assert stacked == [3]


def test_a_training_in_another_thread_is_done_there(stacked):
    def work(client):
        context = contextvars.copy_context()
        with ThreadPoolExecutor(1) as executor:
            return executor.submit(context.run, plain, client).result()

    assert_same(*both(work))
    assert not stacked


def test_under_a_mode_of_torch_nobody_else_goes_on(stacked):
    def work(client):
        with torch.autocast("cpu"):
            return plain(client)

    assert_same(*both(work))
    assert not torch.is_autocast_enabled("cpu")
    assert not stacked


def test_unequal_clients_are_measured_as_one_kind(stacked):
    def rounds(count):
        for start in range(count):
            both(lambda c, s=start: plain(c, count=20 + (7 * c + 3 * s) % 40))

    rounds(3)
    assert len(module._trials) == 1


def test_bad_records_of_one_client_do_not_end_it_for_all(stacked):
    def work(client, bad):
        features, labels = records(client)
        net = model()
        try:
            train(net, features, labels + 7 * (client == bad), batch_size=4, seed=client)
        except (IndexError, RuntimeError):
            return client, {}, 0.0
        return client, get_arrays(net), 0.0

    both(lambda c: work(c, 2))
    assert not stacked
    assert_same(*both(lambda c: work(c, -1)))
    assert stacked == [5]


def test_tied_weights_are_not_taken_for_untied_ones(stacked):
    def work(client):
        net = initialise(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), 5)
        if client % 2:
            net[1].weight = net[0].weight
        return plain(client, net)

    assert_same(*both(work, range(4)))
    assert stacked == [2, 2]


@pytest.mark.parametrize("limit", ["_MOST_STANDING", "_MOST_BYTES"])
def test_only_so_many_clients_stand_at_a_time(stacked, limit, monkeypatch):
    monkeypatch.setattr(module, limit, 2 if limit == "_MOST_STANDING" else 1)
    assert_same(*both(plain, range(6)))
    assert stacked == ([2, 2, 2] if limit == "_MOST_STANDING" else [])


def test_a_client_with_many_records_does_not_fill_up_those_with_few(stacked):
    plan = PerRecordPlan(clipping_norm=0.5, learning_rate=0.3)

    def work(client):
        net = model()
        with asked(plan):
            train_per_record(net, *records(client, 200 if client == 2 else 4))
        return client, get_arrays(net), 0.0

    assert_same(*both(work))
    assert stacked == [4]
