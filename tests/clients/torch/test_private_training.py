"""private_training: the user's own loop, and what of it is refused, in a rehearsal or later."""

import copy
import threading
from collections.abc import Callable
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from private_loops import CLIENT, Watched, context, loop, terms
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from flwr_privacy.clients.certificates.private_steps import _request, current_private_steps
from flwr_privacy.clients.certificates.request import opened
from flwr_privacy.clients.node.generated import undrawn
from flwr_privacy.clients.node.rehearsal import rehearsed
from flwr_privacy.clients.torch import initialise, mlp, private_training
from flwr_privacy.errors import DataError, FlwrPrivacyError, InvalidParameterError, ProtocolError
from flwr_privacy.pipeline.mechanism import NoFactsError

SIZE = 12


def data(size: int = SIZE) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(5)
    return torch.randn(size, 4, generator=draws), torch.randint(3, (size,), generator=draws)


def net() -> nn.Module:
    return initialise(lambda: mlp([4, 6, 3]), 0)


def rehearse(work: Callable[[], Any], **changes: Any) -> tuple[int, Watched]:
    """Rehearse a training as the client does, and return the number of records it has."""
    request = Watched(terms(**{"steps": 6, "sampling_rate": 0.25, **changes}))
    with undrawn(), opened(_request, request):
        return rehearsed("train", work, lambda: request.certificate), request


def train(
    model: nn.Module,
    *,
    given: Any = None,
    optimizer: Any = None,
    criterion: Any = None,
    passes: int = 100,
    step: Callable[..., None] | None = None,
    **options: Any,
) -> None:
    """Train as an app does; `step` is what it does with a batch."""
    criterion = criterion or nn.CrossEntropyLoss()
    given = given if given is not None else DataLoader(TensorDataset(*data()), batch_size=4)
    inner = optimizer or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model, private, loader = private_training(model, inner, given, context(), **options)
    for _ in range(passes):
        for x, y in loader:
            if step is not None:
                step(model, private, x, y)
                continue
            private.zero_grad()
            criterion(model(x), y).backward()
            private.step()
        if current_private_steps().taken >= 6:  # type: ignore[union-attr]
            break


# -- What works ------------------------------------------------------------------------------------

OPTIMISERS = [
    torch.optim.SGD,
    lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, nesterov=True, weight_decay=0.01),
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
]


@pytest.mark.parametrize("optimizer", OPTIMISERS)
def test_the_optimiser_gets_the_clipped_mean_and_goes_on_as_ever(optimizer: Any) -> None:
    """Without noise: the loop equals one by hand that clips the gradient of each record."""
    features, labels = data()
    batches = [[0, 3, 5], [1], [2, 3, 4, 6, 7, 11]]
    asked = terms(steps=3, sampling_rate=0.25, clipping_norm=0.4)
    model = net()
    loop(Watched(asked, batches), model, features, labels, optimizer=optimizer)
    by_hand = net()
    inner = optimizer(by_hand.parameters(), lr=0.1)
    for batch in batches:
        total = [torch.zeros_like(p) for p in by_hand.parameters()]
        for record in batch:
            loss = functional.cross_entropy(by_hand(features[[record]]), labels[[record]])
            gradient = torch.autograd.grad(loss, list(by_hand.parameters()))
            norm = torch.cat([g.flatten() for g in gradient]).norm()
            for whole, g in zip(total, gradient, strict=True):
                whole += g * min(1.0, 0.4 / float(norm))
        for parameter, whole in zip(by_hand.parameters(), total, strict=True):
            parameter.grad = whole / (0.25 * SIZE)
        inner.step()
    for ours, theirs in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_losses_that_are_sums_and_dictionaries_as_batches() -> None:
    class Named(Dataset[Any]):
        def __len__(self) -> int:
            return SIZE

        def __getitem__(self, place: int) -> dict[str, Tensor]:
            features, labels = data()
            return {"image": features[place], "label": labels[place]}

    criterion = nn.CrossEntropyLoss(reduction="sum")

    def work() -> None:
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        loader: Any = DataLoader(Named(), batch_size=4)
        model, private, loader = private_training(
            model, inner, loader, context(), loss_reduction="sum"
        )
        while not current_private_steps()._certificates:  # type: ignore[union-attr]
            for batch in loader:
                private.zero_grad()
                criterion(model(batch["image"]), batch["label"]).backward()
                private.step()

    assert rehearse(work)[0] == SIZE


def test_batches_are_poisson_and_the_loader_ends_with_the_steps() -> None:
    features, labels = data(200)
    watched = loop(Watched(terms(steps=90, sampling_rate=0.05)), net(), features, labels)
    assert len(watched.drawn) == watched.taken == 90  # five passes, the last of ten batches
    sizes = np.array([len(drawn) for drawn in watched.drawn])
    assert abs(sizes.mean() - 10) < 5 * np.sqrt(9.5 / 90)
    assert sizes.std() > 1.5
    counts = np.bincount([place for drawn in watched.drawn for place in drawn], minlength=200)
    assert counts.max() < 20


def test_a_scheduler_of_steps_works_and_momentum_is_of_noised_sums() -> None:
    features, labels = data()
    rates = []

    def schedule(model: nn.Module, optimizer: Any) -> None:
        if not rates:
            rates.append(StepLR(optimizer, 1, gamma=0.5))
        rates.append(optimizer.param_groups[0]["lr"])
        rates[0].step()

    loop(Watched(terms(steps=3)), net(), features, labels, after_step=schedule)
    assert rates[1:] == [0.1, 0.05, 0.025]


def test_empty_batches_and_missing_records_give_noise_alone() -> None:
    features, labels = data()
    watched = loop(
        Watched(terms(steps=3), [[], [20, 21], [2, 30]], records=40), net(), features, labels
    )
    assert not watched.totals[0].any()
    assert not watched.totals[1].any()
    alone = loop(Watched(terms(), [[2]], records=40), net(), features, labels)
    assert watched.totals[2].any()
    assert alone.certificate.records == 40
    one = alone.totals[0]
    np.testing.assert_allclose(watched.totals[2][-3:], one[-3:], atol=0.2)


def test_frozen_weights_stay_and_have_no_noise() -> None:
    model = net()
    first, *_ = model.parameters()
    first.requires_grad_(False)
    kept = first.clone()
    features, labels = data()
    watched = loop(Watched(terms(steps=2, noise_multiplier=1.0)), model, features, labels)
    assert torch.equal(first, kept)
    assert len(watched.totals[0]) == sum(p.numel() for p in model.parameters()) - first.numel()


def test_a_model_has_no_hooks_afterwards_and_can_be_copied() -> None:
    model = net()
    features, labels = data()
    for _ in range(2):  # the same model again, as in the next round
        loop(Watched(terms()), model, features, labels)
    assert not hasattr(next(model.parameters()), "grad_sample")
    functional.cross_entropy(copy.deepcopy(model)(features), labels).backward()


def test_a_rehearsal_takes_all_steps_and_leaves_generators_as_they_were() -> None:
    before = torch.random.get_rng_state()
    records, request = rehearse(lambda: train(net()))
    assert records == SIZE
    assert request.totals == []
    assert request.drawn == []
    assert torch.equal(before, torch.random.get_rng_state())


# -- What a rehearsal refuses ----------------------------------------------------------------------


class Shared(nn.Module):
    """Uses the weight of a layer without calling it: Opacus does not see that."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.layer.weight)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


class Mixing(nn.Module):
    """Mixes the records of a batch."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.mix = nn.Linear(4, 3), mix

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(self.mix(x))
        return out


def Centred() -> nn.Module:
    return Mixing(lambda x: x - x.mean(dim=0))


def flat(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    twice = torch.cat([x, x])
    functional.cross_entropy(model(twice)[: len(x)], y).backward()
    optimizer.step()


def accumulated(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    for part in (slice(0, 1), slice(1, None)):
        functional.cross_entropy(model(x[part]), y[part]).backward()
    optimizer.step()


def twice(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def skipping(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    functional.cross_entropy(model(x), y).backward()


def moved(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    next(model.parameters()).data.mul_(0.9)
    optimizer.zero_grad()


def with_closure(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    optimizer.step(lambda: functional.cross_entropy(model(x), y))


def plateau(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    if not hasattr(model, "kept"):
        model.kept = ReduceLROnPlateau(optimizer)  # type: ignore[assignment]
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    model.kept.step(loss.item())  # type: ignore[operator, union-attr]


def of_other_data(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    features, labels = data(3)
    functional.cross_entropy(model(features), labels).backward()
    optimizer.step()


def frozen_optimizer() -> None:
    model = net()
    first, *rest = model.parameters()
    first.requires_grad_(False)
    train(model, optimizer=torch.optim.SGD([first, *rest], lr=0.1))


def off() -> None:
    model = net()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    train(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def unseen() -> None:
    model = net()
    train(model, optimizer=torch.optim.SGD(list(model.parameters())[:2], lr=0.1))


def used() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    functional.cross_entropy(model(data()[0]), data()[1]).backward()
    optimizer.step()
    train(model, optimizer=optimizer)


def in_eval() -> None:
    model = net().eval()
    train(model)


def drawn_by_weight() -> None:
    sampler = WeightedRandomSampler(torch.ones(SIZE), SIZE)
    train(net(), given=DataLoader(TensorDataset(*data()), sampler=sampler))


def weighted() -> None:
    train(net(), criterion=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 1.0])))


def own_loader() -> None:
    """Takes the batches of the app's own loader."""
    model = net()
    own: Any = DataLoader(TensorDataset(*data()), batch_size=4)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, _ = private_training(model, inner, own, context())
    for x, y in own:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def guarded(where: str) -> Callable[..., None]:
    """A loop whose third batch has no gradients of its records."""
    batches = []

    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        batches.append(1)
        third = len(batches) == 3
        optimizer.zero_grad()
        if where == "eval" and third:
            model.eval()
        if where != "backward" or not third:
            functional.cross_entropy(model(x), y).backward()
        if where == "zero_grad" and third:
            optimizer.zero_grad(set_to_none=False)
        optimizer.step()

    return step


MIXERS: dict[str, Callable[[Tensor], Tensor]] = {
    "differences along the batch": lambda x: torch.cat([x[:1], x[1:] - x[:-1]]),
    "sums along the batch": lambda x: x.cumsum(dim=0),
    "pairs": lambda x: x + x.view(-1, 2, 4).mean(dim=1).repeat_interleave(2, dim=0),
    "halves": lambda x: x + torch.cat([*x.chunk(2)[::-1]]),
    "the record at the other end": lambda x: x + x.flip(0),
    "two places on": lambda x: x + x.roll(2, 0),
    "NaN for some": lambda x: (x - 0.5).sqrt() + x.mean(dim=0),
    "zeros": lambda x: x * 0 + x.mean(dim=0) * 0,
}


def mixing(mix: Callable[[Tensor], Tensor]) -> None:
    train(Mixing(mix))


def head_of_its_own() -> None:
    """A layer on top of the model that is trained without noise."""
    head = nn.Linear(3, 3)
    raw = torch.optim.Adam(head.parameters(), lr=1e-3)

    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        raw.zero_grad()
        functional.cross_entropy(head(model(x)), y).backward()
        optimizer.step()
        raw.step()

    train(net(), step=step)


def raw_steps() -> None:
    """The optimiser's own steps, which a rate of zero hides while it warms up."""
    model = net()
    inner = torch.optim.Adam(model.parameters(), lr=0.0)

    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        inner.step()
        optimizer.step()

    train(model, optimizer=inner, step=step)


def moments() -> None:
    """Loads moments past the optimiser that private_training returned."""
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        for parameter in model.parameters():
            inner.state[parameter] = {"momentum_buffer": torch.ones_like(parameter)}
        optimizer.step()

    train(model, optimizer=inner, step=step)


def later_moments() -> None:
    """Loads moments past the optimiser that private_training returned, after its first step."""
    model = net()
    inner = torch.optim.Adam(model.parameters(), lr=0.1)
    steps = iter(range(100))

    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        if next(steps) == 1:
            ones = {"step": torch.tensor(1.0)}
            ones |= {name: torch.ones(1) for name in ("exp_avg", "exp_avg_sq")}
            given = inner.state_dict()
            given["state"] = dict.fromkeys(range(len(given["param_groups"][0]["params"])), ones)
            inner.load_state_dict(given)
        optimizer.step()

    train(model, optimizer=inner, step=step)


def repeated() -> None:
    """Has the records of a class twice: which ones follows from their labels."""
    features, labels = data()
    whole = TensorDataset(features, labels)
    places = [*range(len(labels)), *torch.nonzero(labels == 0).flatten().tolist()]
    train(net(), given=DataLoader(torch.utils.data.Subset(whole, places), batch_size=4))


BESIDE = {
    "a head of the client's own": (head_of_its_own, "a step of a Adam that is not private"),
    "steps of the optimiser itself": (raw_steps, "a step of a Adam that is not private"),
    "moments from elsewhere": (moments, "a state from elsewhere"),
    "moments from elsewhere, later": (later_moments, "a state from elsewhere"),
    "a state from elsewhere": (
        lambda: train(net(), step=lambda model, optimizer, x, y: optimizer.load_state_dict({})),
        "load_state_dict",
    ),
    "records in it twice": (repeated, "repeats records"),
}

GUARDED = {
    f"a batch without gradients ({where})": (
        lambda where=where: train(net(), step=guarded(where)),
        "no gradients of the records in a step",
    )
    for where in ("backward", "eval", "zero_grad")
}

TRAPS: dict[str, tuple[Callable[[], Any], str]] = {
    **GUARDED,
    **BESIDE,
    **{
        f"a model that mixes records: {name}": (
            lambda mix=mix: mixing(mix),
            "rehearsal_records" if name in ("NaN for some", "zeros") else "whatever else",
        )
        for name, mix in MIXERS.items()
    },
    "a use of a weight that Opacus does not see": (lambda: train(Shared()), "without the grad"),
    "a parameter without a part in the loss": (lambda: train(Unused()), "without a gradient"),
    "a model that mixes records": (lambda: train(Centred()), "whatever else is in its batch"),
    "batch normalisation": (
        lambda: train(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))),
        "batch normalisation",
    ),
    "class weights in the mean": (weighted, "classes under a mean"),
    "a sum that is said to be a mean": (
        lambda: train(net(), criterion=nn.CrossEntropyLoss(reduction="sum")),
        "whatever else is in its batch",
    ),
    "a mean that is said to be a sum": (
        lambda: train(net(), loss_reduction="sum"),
        "whatever else is in its batch",
    ),
    "another reduction": (lambda: train(net(), loss_reduction="max"), "loss_reduction"),
    "more rows than records": (lambda: train(net(), step=flat), "gradients of 8 records"),
    "several backward passes": (lambda: train(net(), step=accumulated), "2 backward passes"),
    "several steps on a batch": (lambda: train(net(), step=twice), "without a batch"),
    "a batch without a step": (lambda: train(net(), step=skipping), "had no optimizer.step"),
    "weights that change in between": (lambda: train(net(), step=moved), "changed between two"),
    "a closure": (lambda: train(net(), step=with_closure), "closure"),
    "a schedule that follows losses": (lambda: train(net(), step=plateau), "ReduceLROnPlateau"),
    "other data than the batch": (lambda: train(net(), step=of_other_data), "gradients of 3"),
    "requires_grad off": (off, "a model to train"),
    "a frozen parameter in the optimiser": (frozen_optimizer, "which are frozen"),
    "a parameter that the optimiser never saw": (unseen, "never saw"),
    "an optimiser with moments": (used, "with a state"),
    "LBFGS": (lambda: train(net(), optimizer=torch.optim.LBFGS(net().parameters())), "closure"),
    "a model in eval mode": (in_eval, "without the gradients of its records"),
    "a loader that draws": (drawn_by_weight, "WeightedRandomSampler"),
    "no loader": (lambda: train(net(), given=[data()]), "a DataLoader"),
    "the app's own loader": (own_loader, "without a batch"),
}


OF_THE_LOOP = {
    "more rows than records",
    "several backward passes",
    "several steps on a batch",
    "a batch without a step",
    "weights that change in between",
    "other data than the batch",
    "the app's own loader",
    *GUARDED,
    *BESIDE,
}


@pytest.mark.parametrize("trap", TRAPS)
def test_a_trap_is_an_error_of_the_rehearsal(trap: str) -> None:
    work, text = TRAPS[trap]
    with pytest.raises(FlwrPrivacyError, match=text) as refused:
        rehearse(work)
    # What the loop did, rather than what model and settings are, may follow from its data.
    assert isinstance(refused.value, NoFactsError) == (trap in OF_THE_LOOP)


def test_a_loop_that_catches_errors_is_refused_all_the_same() -> None:
    def work() -> None:
        try:
            train(Shared())
        except Exception:  # noqa: BLE001 - as an app may
            train(net())

    with pytest.raises(InvalidParameterError, match="without the gradients"):
        rehearse(work)


def test_stopping_early_is_noticed_and_is_no_free_error() -> None:
    """What it tells depends on what the loop looked at, so it is charged."""
    with pytest.raises(NoFactsError, match="all the steps that were asked for"):
        rehearse(lambda: train(net(), passes=1))


def test_a_loop_that_fails_in_the_rehearsal_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing else finds a layer that mixes records; and it may have looked at its data."""

    def fails(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        raise KeyError("a value of the data")

    with pytest.raises(NoFactsError, match="fails on generated records") as refused:
        rehearse(lambda: train(net(), step=fails))
    assert "a value" not in str(refused.value)
    assert "a value of the data" in caplog.text


@pytest.mark.parametrize("mixes", [False, True])
def test_records_of_the_apps_own_making_let_a_loop_be_rehearsed(mixes: bool) -> None:
    def strict(output: Tensor, y: Tensor) -> Tensor:
        assert bool(((y.sum(dim=1) - 1).abs() < 1e-6).all()), "a distribution"
        return functional.cross_entropy(output, y)

    features, labels = data()
    given: Any = DataLoader(TensorDataset(features, functional.one_hot(labels, 3).float()))
    made_up = TensorDataset(torch.rand(8, 4), torch.eye(3)[[0, 1, 2, 0, 1, 2, 0, 1]])

    def work(**options: Any) -> None:
        train(Centred() if mixes else net(), given=given, criterion=strict, **options)

    with pytest.raises(NoFactsError, match="rehearsal_records"):
        rehearse(work)
    with pytest.raises(InvalidParameterError, match="at least 8 records"):
        rehearse(lambda: work(rehearsal_records=TensorDataset(features[:7], labels[:7])))
    if not mixes:
        assert rehearse(lambda: work(rehearsal_records=made_up))[0] == SIZE
        return
    with pytest.raises(InvalidParameterError, match="whatever else is in its batch"):
        rehearse(lambda: work(rehearsal_records=made_up))


# -- What is refused in the training itself --------------------------------------------------------


def test_a_step_beyond_those_that_are_charged_is_refused() -> None:
    features, labels = data()
    found = []

    def keep(model: nn.Module, optimizer: Any) -> None:
        found.append(optimizer)

    request = loop(Watched(terms(steps=2)), net(), features, labels, after_step=keep)
    with pytest.raises(ProtocolError, match="all 2 private steps were taken"):
        found[0].step()
    with pytest.raises(ProtocolError, match="only so many are charged"):
        request.noised(np.zeros(3), 12)


STATES: dict[str, Callable[[Any], None]] = {
    "in place": lambda inner: inner.state[inner.param_groups[0]["params"][0]]["exp_avg"].add_(1),
    "past the counter of versions": lambda inner: inner.state[inner.param_groups[0]["params"][1]][
        "exp_avg_sq"
    ].data.mul_(2),
    "a number": lambda inner: [own.update(step=own["step"] + 1) for own in inner.state.values()],
    "less": lambda inner: inner.state.clear(),
    "more": lambda inner: [own.update(mine=1) for own in inner.state.values()],
}


@pytest.mark.parametrize("change", STATES)
def test_moments_that_something_else_changes_end_a_training(change: str) -> None:
    features, labels = data()

    def after(model: nn.Module, optimizer: Any) -> None:
        STATES[change](optimizer.inner)

    request = Watched(terms(steps=3))
    with pytest.raises(ProtocolError, match="a state from elsewhere"):
        loop(request, net(), features, labels, optimizer=torch.optim.Adam, after_step=after)
    with pytest.raises(ProtocolError, match="all the steps that were asked for"):
        _ = request.certificate


def test_the_same_moments_again_are_harmless() -> None:
    features, labels = data()

    def after(model: nn.Module, optimizer: Any) -> None:
        optimizer.inner.load_state_dict(copy.deepcopy(optimizer.inner.state_dict()))

    request = Watched(terms(steps=3))
    loop(request, net(), features, labels, optimizer=torch.optim.Adam, after_step=after)
    assert request.certificate.records == SIZE


def test_a_second_training_in_a_round_is_refused() -> None:
    features, labels = data()
    request = loop(Watched(terms()), net(), features, labels)
    with pytest.raises(ProtocolError, match="cannot begin again"):
        loop(request, net(), features, labels)


def test_an_early_end_gives_no_certificate() -> None:
    features, labels = data()
    request = Watched(terms(steps=9, sampling_rate=0.5))
    loop(request, net(), features, labels, epochs=1)
    with pytest.raises(ProtocolError, match="stops early tells something of the data"):
        _ = request.certificate


def test_weights_that_were_chosen_are_no_result_of_the_last_step() -> None:
    features, labels = data()
    model, kept = net(), []
    request = loop(
        Watched(terms(steps=3)),
        model,
        features,
        labels,
        after_step=lambda model, _: kept.append(copy.deepcopy(model.state_dict())),
    )
    before = [p.detach().numpy() for p in net().parameters()]
    done = request.certificate
    done.check(before, [p.detach().numpy() for p in model.parameters()])
    model.load_state_dict(kept[1])
    with pytest.raises(ProtocolError, match=r"other arrays \(4 of 4\) than the last private step"):
        done.check(before, [p.detach().numpy() for p in model.parameters()])


def test_outside_of_a_scheme_and_for_another_client_it_is_refused() -> None:
    with pytest.raises(ProtocolError, match="no scheme asks for private steps"):
        train(net())
    request = Watched(terms())
    loader: Any = DataLoader(TensorDataset(*data()))
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with opened(_request, request), pytest.raises(InvalidParameterError, match="context"):
        private_training(model, inner, loader, context("3"))
    assert request.plan.client == CLIENT


def test_dropout_does_not_look_like_a_mixture_of_records() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3))
    assert rehearse(lambda: train(model))[0] == SIZE
    assert model[1].p == 0.5


@pytest.mark.parametrize("where", ["backward", "eval", "zero_grad"])
def test_a_batch_without_gradients_ends_the_training(where: str) -> None:
    """Else one record with a loss of NaN would take away the gradients of all others."""
    request = Watched(terms(steps=6, sampling_rate=0.25))
    with (
        opened(_request, request),
        pytest.raises(ProtocolError, match="no gradients of the records"),
    ):
        train(net(), step=guarded(where))
    assert len(request.totals) == 2


def test_a_step_that_failed_ends_the_training_whatever_the_loop_catches() -> None:
    batches = [[1, 2, 3], [*range(9)], [4, 5], [6]]
    request = Watched(terms(steps=3, sampling_rate=0.25), batches)

    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        try:
            if len(x) > 8:
                next(model.parameters()).grad_sample = torch.zeros(1)  # type: ignore[attr-defined]
            optimizer.step()
        except ProtocolError:
            optimizer.zero_grad()

    with opened(_request, request), pytest.raises(ProtocolError, match="a step has failed"):
        train(net(), step=step)
    assert request.taken == 1
    with pytest.raises(ProtocolError, match="all the steps that were asked for"):
        _ = request.certificate


LOSSES = {
    "class weights": (
        nn.CrossEntropyLoss(weight=torch.ones(3)),
        "classes under a mean",
    ),
    "several targets of a record": (
        lambda output, y: functional.cross_entropy(
            torch.stack([output, output], dim=2), torch.stack([y, y], dim=1)
        ),
        "several targets of each record",
    ),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_mean_that_divides_by_something_of_other_records_is_refused(loss: str) -> None:
    criterion, text = LOSSES[loss]
    with pytest.raises(InvalidParameterError, match=text):
        rehearse(lambda: train(net(), criterion=criterion))


def test_an_ignored_target_ends_the_training_whatever_the_loop_catches() -> None:
    features, labels = data()
    labels[3] = -100

    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        try:
            functional.cross_entropy(model(x), y).backward()
        except ProtocolError:
            functional.cross_entropy(model(x), y.clamp(min=0)).backward()
        optimizer.step()

    request = Watched(terms(steps=2, sampling_rate=0.25), [[1, 2], [2, 3]])
    given = DataLoader(TensorDataset(features, labels))
    with opened(_request, request), pytest.raises(ProtocolError, match="a step has failed"):
        train(net(), given=given, step=step)
    single = Watched(terms(steps=1, sampling_rate=0.25), [[2, 3]])
    loop(single, net(), features, labels, criterion=apart)


def apart(output: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(output, y, reduction="none").mean()


def test_functional_dropout_does_not_look_like_a_mixture_of_records() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(functional.dropout(self.first(x), 0.5, self.training))
            return out

    assert rehearse(lambda: train(Dropping()))[0] == SIZE


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(5, 4, padding_idx=0), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.table(x).mean(dim=1))
        return out


def test_the_padding_of_an_embedding_has_no_gradient_and_does_not_look_unseen() -> None:
    _, labels = data()
    lines = torch.randint(5, (SIZE, 6), generator=torch.Generator().manual_seed(1))
    assert rehearse(lambda: train(Tokens(), given=DataLoader(TensorDataset(lines, labels))))
    model = Tokens()
    request = loop(Watched(terms()), model, lines, labels)
    table = request.totals[0][:20].reshape(5, 4)
    assert not table[0].any()
    assert table[1:].any(axis=1).all()


# -- What is in a batch ----------------------------------------------------------------------------


def mixed_up(records: list[Any]) -> Any:
    x, y = default_collate(records)
    standard = (x - x.mean(dim=0)) / (x.std(dim=0, correction=0) + 1)
    return 0.7 * standard + 0.3 * x.roll(1, 0), y


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_fn_gets_each_record_alone(workers: int) -> None:
    """So a record has no part in what it makes of another."""
    features, labels = data()
    given: Any = DataLoader(
        TensorDataset(features, labels), collate_fn=mixed_up, num_workers=workers
    )
    totals = []
    for batch in ([1, 4, 5], [0, 1, 4, 5], [0]):
        request = Watched(terms(steps=1, clipping_norm=100.0), [batch])
        with opened(_request, request):
            train(net(), given=given, passes=1)
        totals.append(request.totals[0])
    np.testing.assert_allclose(totals[0] + totals[2], totals[1], atol=1e-5)


def test_records_of_several_lengths_are_told_to_be_padded_each() -> None:
    class Lines(Dataset[Any]):
        def __len__(self) -> int:
            return SIZE

        def __getitem__(self, place: int) -> tuple[Tensor, int]:
            return torch.ones(4 + (place == 7)), 0

    request = Watched(terms(steps=2, sampling_rate=0.5), [[1, 2], [2, 7]])
    with opened(_request, request), pytest.raises(DataError, match='padding="max_length"'):
        train(net(), given=DataLoader(Lines(), collate_fn=default_collate))
    assert request.taken == 1


def test_what_is_told_of_batches_without_rows_has_nothing_of_a_record() -> None:
    class Lines(Dataset[Any]):
        def __len__(self) -> int:
            return SIZE

        def __getitem__(self, place: int) -> Tensor:
            return torch.ones(37 + place)

    # The form of a real record: it is charged.
    with pytest.raises(NoFactsError, match="without one row") as refused:
        rehearse(lambda: train(net(), given=DataLoader(Lines(), collate_fn=torch.cat)))
    assert "37" not in str(refused.value)


class Amplifying(nn.Module):
    """Weights that a server may send: the gradient by the first is rounding, amplified."""

    def __init__(self, bias: list[float]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, 1), nn.Linear(1, len(bias))
        with torch.no_grad():
            for parameter in self.first.parameters():
                parameter.zero_()
            self.last.weight.fill_(1e12)
            self.last.bias.copy_(torch.tensor(bias))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x))
        return out


def test_one_record_more_leaves_the_gradients_of_the_others_to_the_last_digit() -> None:
    """A mean over a batch that is no power of two would be 1/n and times n, rounded twice."""
    draws = np.random.default_rng(0)
    features, labels = torch.ones(101, 1), torch.zeros(101, dtype=torch.long)
    farthest, sizes = 0.0, set[int]()

    def seen(output: Tensor, y: Tensor) -> Tensor:
        sizes.add(len(y))
        return functional.cross_entropy(output, y)

    for _ in range(40):
        bias = draws.uniform(-2, 2, 3).tolist()
        totals = []
        for batch in (range(1, 101), range(101)):
            request = loop(
                Watched(terms(), [list(batch)]), Amplifying(bias), features, labels, criterion=seen
            )
            totals.append(request.totals[0])
        farthest = max(farthest, float(np.linalg.norm(totals[1] - totals[0])))
    assert sizes == {128}
    assert farthest <= 1.001


# -- What is learned beside ------------------------------------------------------------------------


def test_optimisers_of_others_are_free_again_after_the_loop() -> None:
    features, labels = data()
    other = net()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)

    kept = []

    def beside(model: nn.Module, private: Any) -> None:
        kept.append(private)  # so that the loop is not forgotten
        thread = Thread(target=optimizer.step)  # another training at the same time
        thread.start()
        thread.join()

    failures: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", failures.append)
        request = loop(Watched(terms(steps=2)), net(), features, labels, after_step=beside)
        with opened(_request, request):
            optimizer.step()  # the loop is over
        assert not failures
        failing = Watched(terms(steps=2))
        with pytest.raises(ProtocolError, match="that is not private"):
            loop(failing, net(), features, labels, after_step=lambda *_: optimizer.step())
        with pytest.raises(ProtocolError, match="all the steps"):
            _ = failing.certificate
    optimizer.step()


def test_a_data_set_without_a_length_is_refused_before_a_charge() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(zip(*data(), strict=True))

    with pytest.raises(InvalidParameterError, match="a Dataset with a length"):
        rehearse(lambda: train(net(), given=DataLoader(Stream())))
