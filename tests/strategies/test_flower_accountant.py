"""Our accountants behind Flower's protocol, around Flower's own strategy and next to its own."""

import json
import math
from typing import Any

import numpy as np
import pytest
from apps import model_of, record, run_strategy
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import (
    GaussianPrivacyEvent,
    NeighboringRelation,
    PrivacyAccountant,
    PrivacyConfig,
    RdpAccountant,
    SamplingMethod,
)
from flwr.serverapp.exception import PrivacyBudgetExhausted
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from flwr_privacy.accounting import Charge, spent
from flwr_privacy.accounting.gaussian import mu_of
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.strategies.flower_accountant import FlowerAccountant

NODES = 4


def config(method: str = "no-amplification", **options: Any) -> PrivacyConfig:
    replaced = method == "without-replacement"
    return PrivacyConfig(
        **{
            "target_delta": 1e-5,
            "population_size": 100,
            "neighboring_relation": NeighboringRelation(
                "replace-one" if replaced else "add-or-remove-one"
            ),
            "sampling_method": SamplingMethod(method),
            **options,
        }
    )


def event(noise_multiplier: float = 2.0, sample_size: int = 5) -> GaussianPrivacyEvent:
    return GaussianPrivacyEvent(noise_multiplier, sample_size, population_size=100)


ACCOUNTANTS = {
    "Flower's rdp": RdpAccountant,
    "default": FlowerAccountant,
    "rdp": lambda config: FlowerAccountant(config, accountant="rdp"),
    "pld": lambda config: FlowerAccountant(config, accountant="pld"),
}


@pytest.fixture(params=["no-amplification", "poisson"])
def method(request: Any) -> str:
    return request.param


@pytest.fixture(params=ACCOUNTANTS)
def make(request: Any) -> Any:
    return ACCOUNTANTS[request.param]


# -- what the protocol asks of both ----------------------------------------------------------------


def test_nothing_is_spent_at_first(make: Any, method: str) -> None:
    accountant: PrivacyAccountant = make(config(method))
    assert accountant.config == config(method)
    assert accountant.num_releases == 0
    assert accountant.get_epsilon(1e-5) == 0
    assert accountant.get_delta(1.0) == 0


def test_releases_add_up_and_epsilon_and_delta_belong_together(make: Any, method: str) -> None:
    accountant, at_once = make(config(method)), make(config(method))
    before = 0.0
    for number in range(1, 4):
        accountant.compose(event())
        assert accountant.num_releases == number
        assert accountant.get_epsilon(1e-5) > before
        before = accountant.get_epsilon(1e-5)
    at_once.compose(event(), 3)
    assert at_once.get_epsilon(1e-5) == pytest.approx(before, rel=1e-9)
    assert accountant.get_delta(before) == pytest.approx(1e-5, rel=1e-5)
    spent_so_far = accountant.get_privacy_spent()
    assert (spent_so_far.epsilon, spent_so_far.delta) == (before, 1e-5)
    assert spent_so_far.num_releases == 3
    assert accountant.get_privacy_spent(1e-3).epsilon == accountant.get_epsilon(1e-3) < before


def test_would_exceed_says_what_compose_would_do_and_does_nothing(make: Any, method: str) -> None:
    accountant, after = make(config(method, max_epsilon=3.0)), make(config(method))
    accountant.compose(event(3.0))
    after.compose(event(3.0), 3)
    before, budget = accountant.get_epsilon(1e-5), after.get_epsilon(1e-5)
    assert accountant.would_exceed(event(3.0), max_epsilon=budget * 0.999, count=2)
    assert not accountant.would_exceed(event(3.0), max_epsilon=budget * 1.001, count=2)
    assert accountant.would_exceed(event(3.0), max_epsilon=budget * 1.001, count=3)
    assert accountant.would_exceed(event(0.5, sample_size=50))  # by the configured budget
    assert not accountant.would_exceed(event(100.0))
    assert accountant.get_epsilon(1e-5) == before
    assert accountant.num_releases == 1


def test_a_state_survives_a_file(make: Any, method: str) -> None:
    accountant, other = make(config(method)), make(config(method))
    accountant.compose(event(), 2)
    accountant.compose(event(3.0))
    accountant.compose(event())
    other.compose(event(0.5), 100)
    other.load_state_dict(json.loads(json.dumps(accountant.state_dict())))
    assert other.num_releases == 4
    assert other.get_epsilon(1e-5) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-12)


def test_foreign_states_are_refused_and_change_nothing(make: Any, method: str) -> None:
    accountant = make(config(method))
    accountant.compose(event())
    before = accountant.get_epsilon(1e-5)
    state = accountant.state_dict()
    others = [
        {},
        make(config(method, target_delta=1e-6)).state_dict(),
        make(config(method, max_epsilon=1.0)).state_dict(),
        {key: value for key, value in state.items() if key != "config"},
        {**state, **{key: 99 for key in state if "version" in key}},
        {**state, **{key: "other" for key in ("backend", "accountant") if key in state}},
        {**state, **{key: 5 for key in ("charges", "compositions") if key in state}},
        {**state, **{key: [{}] for key in ("charges", "compositions") if key in state}},
    ]
    for other in others:
        with pytest.raises(ValueError, match=r".+"):
            accountant.load_state_dict(other)
    assert accountant.get_epsilon(1e-5) == before
    assert accountant.num_releases == 1


def test_bad_calls_are_refused(make: Any, method: str) -> None:
    accountant = make(config(method))
    foreign = GaussianPrivacyEvent(1.0, 5, population_size=99)
    for call in (
        lambda: accountant.compose(foreign),
        lambda: accountant.would_exceed(foreign, max_epsilon=1.0),
        lambda: accountant.compose(event(), 0),
        lambda: accountant.would_exceed(event()),  # there is no budget
        lambda: accountant.would_exceed(event(), max_epsilon=0.0),
        lambda: accountant.get_epsilon(1.0),
        lambda: accountant.get_delta(-1.0),
        lambda: accountant.get_privacy_spent(0.0),
    ):
        with pytest.raises(ValueError, match=r".+"):
            call()
    assert accountant.num_releases == 0


# -- ours against Flower's -------------------------------------------------------------------------


@pytest.mark.parametrize("noise_multiplier", [0.5, 1.0, 5.0])
@pytest.mark.parametrize("count", [1, 30])
def test_ours_are_never_above_flowers(noise_multiplier: float, count: int, method: str) -> None:
    flowers = RdpAccountant(config(method))
    flowers.compose(event(noise_multiplier), count)
    for name in ("default", "rdp", "pld"):
        ours = ACCOUNTANTS[name](config(method))
        ours.compose(event(noise_multiplier), count)
        for delta in (1e-3, 1e-5, 1e-8):
            assert ours.get_epsilon(delta) <= flowers.get_epsilon(delta) * (1 + 1e-9)


def test_the_default_is_the_tightest_with_a_proven_cap(method: str) -> None:
    accountant = FlowerAccountant(config(method))
    accountant.compose(event(1.0), 80)
    name, sampling = ("gdp", 1.0) if method == "no-amplification" else ("rdp", 0.05)
    charge = Charge(neighbours="add_remove", noise_multiplier=1.0, sampling=sampling, count=80)
    assert accountant.get_privacy_spent().accounting_method == name
    assert accountant.get_epsilon(1e-5) == spent([charge], delta=1e-5, accountant=name)


def test_flowers_example_is_tighter() -> None:
    for accountant, full, sampled in (
        (RdpAccountant, 81.1, 3.72),
        (lambda c: FlowerAccountant(c, accountant="pld"), 77.3, 3.20),
    ):
        for method, figure in (("no-amplification", full), ("poisson", sampled)):
            ours = accountant(config(method))
            ours.compose(event(1.0), 80)
            assert ours.get_epsilon(1e-5) == pytest.approx(figure, rel=2e-3)


@pytest.mark.parametrize(
    ("method", "accountant", "text"),
    [
        ("without-replacement", None, "flwr.serverapp.RdpAccountant knows the others"),
        ("poisson", "gdp", "accountant = 'gdp': expected one of 'pld', 'rdp'"),
        ("no-amplification", "moments", "accountant = 'moments'"),
    ],
)
def test_what_it_cannot_do_is_refused(method: str, accountant: Any, text: str) -> None:
    with pytest.raises(InvalidParameterError) as error:
        FlowerAccountant(config(method), accountant=accountant)
    assert text in str(error.value)


# -- around Flower's own strategy ------------------------------------------------------------------


class CountingFedAvg(FlowerFedAvg):
    """Flower's, with the models that it sends out written down."""

    def __init__(self) -> None:
        super().__init__(min_available_nodes=NODES, min_train_nodes=NODES, fraction_evaluate=0.0)
        self.sent: list[ArrayRecord] = []

    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        self.sent.append(arrays)
        return super().configure_train(server_round, arrays, config, grid)


def equal_clients() -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        # Flower's clipping divides by the norm of the update, so there must be one.
        trained = {name: array + 1 for name, array in model_of(message.content["arrays"]).items()}
        metrics = MetricRecord({"num-examples": 1})
        content = RecordDict({"arrays": record(trained), "metrics": metrics})
        return Message(content, reply_to=message)

    return app


@pytest.mark.parametrize("noise_multiplier", [2.5, 4.0])
def test_flowers_strategy_stops_where_the_closed_form_says(noise_multiplier: float) -> None:
    accountant = FlowerAccountant(config(population_size=NODES, max_epsilon=8.0))
    inner = CountingFedAvg()
    strategy = DifferentialPrivacyServerSideFixedClipping(
        inner,
        noise_multiplier=noise_multiplier,
        clipping_norm=1.0,
        num_sampled_clients=NODES,
        accountant=accountant,
    )
    affordable = math.floor((mu_of(8.0, 1e-5) * noise_multiplier) ** 2)
    assert affordable >= 2
    with pytest.raises(PrivacyBudgetExhausted):
        run_strategy(
            strategy,
            equal_clients(),
            nodes=NODES,
            arrays=record({"w": np.zeros(3, np.float32)}),
            num_rounds=affordable + 5,
        )
    assert accountant.num_releases == affordable
    # The round that would have been too much was configured and never sent.
    assert len(inner.sent) == affordable + 1
    assert accountant.get_epsilon(1e-5) <= 8.0
    # Flower's own accountant stops earlier.
    flowers = RdpAccountant(config(population_size=NODES, max_epsilon=8.0))
    release = GaussianPrivacyEvent(noise_multiplier, NODES, NODES)
    assert flowers.would_exceed(release, count=affordable)
