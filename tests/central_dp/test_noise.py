"""Central DP's two halves: conformance, the noise of the sum, budgets, samples, refusals."""

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from apps import MODEL, make, message_app, model_of, record, run_strategy, same, step
from conformance import Killed, WrapsConformance
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, Strategy

from flwr_privacy.accounting import spent
from flwr_privacy.central_dp.mean import CentralMean, add_noise
from flwr_privacy.central_dp.mechanism import CentralDPTerms
from flwr_privacy.clients import CentralDPClient, as_mod, numpy_client_app
from flwr_privacy.errors import CheckpointError, InvalidParameterError, ProtocolError
from flwr_privacy.privacy.adaptive_clipping import COUNT_GRID, COUNT_NAME, count_code
from flwr_privacy.privacy.averaging import ReplyRefusedError
from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.privacy.failures import FAILED_NAME
from flwr_privacy.privacy.grid import Grid
from flwr_privacy.privacy.ledger import Entry, Ledger
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.privacy.updates import Update, clip, released_names
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.simulations.engines.inline import Fault
from flwr_privacy.stragglers import StragglerModel
from flwr_privacy.strategies import CentralDP, LoopOptions, central_dp
from flwr_privacy.strategies.requests.messenger import only

SEED = 7
POISSON = {"noise": "server", "sampling": "poisson"}
APP = message_app([as_mod(CentralDPClient)])


class TestShares(WrapsConformance):
    strategy = CentralDP
    client = CentralDPClient
    options: ClassVar[dict[str, Any]] = {"rounds": 3, "experiment_id": "e", "quantile": 0.5}
    engine: ClassVar[dict[str, Any]] = {"insecure_seed": SEED}
    exact_cohorts = True
    codes = True
    registered = False  # tests/secure_sum/test_app.py runs the app, in cohorts on Ray
    no_noise: ClassVar[dict[str, Any]] = {"noise": "server"}

    def test_it_works_under_a_users_own_start(self) -> None:
        class Own(CentralDP):
            start = Strategy.start

        with pytest.raises(ProtocolError, match="secure_sum: works only where this strategy's own"):
            run_strategy(Own(rounds=3), self.app(), arrays=record())


class TestTrustedServer(WrapsConformance):
    strategy = CentralDP
    client = CentralDPClient
    options: ClassVar[dict[str, Any]] = {
        "rounds": 3,
        "experiment_id": "e",
        "noise": "server",
        "insecure_seed": SEED,
    }
    exact_cohorts = True
    codes = True
    registered = False  # the same scheme as above
    no_noise: ClassVar[dict[str, Any]] = {"secure_sum": SecureSum()}  # a sum has no noise either


def run(strategy: CentralDP, **options: Any) -> Any:
    return run_strategy(strategy, APP, **{"nodes": 5, **options})


def charges(state: Path, name: str) -> list[Entry]:
    return list(Ledger(state / f"{name}.ledger", data_set=name).entries())


# -- The sum and its noise -----------------------------------------------------------------------


def clipped(client: int, terms: CentralDPTerms) -> dict[str, Any]:
    """Return a client's codes before its share, as the client computes them."""
    names = released_names(MODEL)
    trained = {name: step(MODEL[name], client) for name in names}
    update = Update.between(MODEL, trained, names)
    within = clip(update.vector, terms.clipping_norm) == 1
    codes: dict[str, Any] = update.arrays(Grid(terms.grid).encode(update.vector))
    codes[COUNT_NAME] = np.array([count_code(within=within)])
    codes[FAILED_NAME] = np.array([0])
    return codes


class Looking(CentralDP):
    """Keeps the sums of the first round as they were opened."""

    opened: dict[str, Any]
    first: CentralDPTerms

    def instruct(self, server_round: int) -> Any:
        strategy, told = self, super().instruct(server_round)

        class Seen(CentralMean):
            def settle(self, number: float) -> float | None:
                strategy.opened = {name: np.array(array) for name, array in self._sums.items()}
                strategy.first = strategy.terms
                return super().settle(number)

        return replace(told, accumulator=lambda: Seen(self._template, self.terms))


class Still(NumPyClient):
    """Learns nothing: what is in a sum of its updates is noise."""

    def fit(self, parameters: Any, config: Any) -> Any:
        return parameters, 1, {}


def test_an_aggregation_of_ones_own_sees_no_sum_without_the_servers_noise() -> None:
    seen = []

    class Own(CentralDP):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            mean, metrics = self.collect("train", replies)
            seen.append(mean.sums)
            return self.renewed(server_round, mean.finish(), metrics, mean.weight), metrics

    app = numpy_client_app(lambda context: CentralDPClient(Still(), context))
    strategy = Own(noise="server", loop=LoopOptions(seed=1))
    run_strategy(strategy, app, nodes=5, num_rounds=1)
    assert seen
    assert any(np.any(sums) for sums in seen[0].values())


@pytest.mark.parametrize("lost", [(), (0,), (4,), (0, 1), (1, 3)])
def test_the_opened_sum_is_the_survivors_codes_and_shares_bit_for_bit(
    lost: tuple[int, ...],
) -> None:
    strategy = Looking(
        quantile=0.5, loop=LoopOptions(seed=1, experiment_id="e", deadline=1.0), clipping_norm=2.5
    )
    faults = [Fault(kind="drop", client=str(i)) for i in lost]
    result = run(strategy, faults=faults, num_rounds=1, insecure_seed=SEED)
    survivors = [i for i in range(5) if i not in lost]
    terms = strategy.first
    total: dict[str, Any] = {}
    for client in survivors:
        codes = clipped(client, terms)
        own = SecureRandom.insecure(SEED, "noise", str(client), "e", "train", 1, 0)
        add_noise(codes, terms, own)
        for name, array in codes.items():
            total[name] = total.get(name, 0) + array
    names = ["0", COUNT_NAME, FAILED_NAME, "layer.weight"]
    assert sorted(strategy.opened) == sorted(total) == names
    for name, sums in strategy.opened.items():
        np.testing.assert_array_equal(sums, total[name])
    size = Grid(terms.grid).step
    for name in released_names(MODEL):
        expected = MODEL[name] + size * (total[name] / len(survivors))
        np.testing.assert_array_equal(result.arrays[name].numpy(), expected.astype(np.float32))
    assert result.arrays["batches"].numpy() == MODEL["batches"]
    line = result.history[1]["scheme"]
    halves = float(COUNT_GRID.step * total[COUNT_NAME][0])
    assert line["fraction_below"] == pytest.approx(0.5 + halves / len(survivors) / 2)
    assert strategy.clipping_norm == pytest.approx(
        2.5 * math.exp(-0.2 * (min(1, max(0, line["fraction_below"])) - 0.5))
    )


BIG = {"w": np.zeros((100, 50), np.float32), "b": np.zeros((), np.float32)}


def replied(message: Message, arrays: ArrayRecord) -> Message:
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})})
    return Message(content, reply_to=message)


def still() -> ClientApp:
    """A training that changes nothing: the sum is the noise."""
    app = ClientApp(mods=[as_mod(CentralDPClient)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return replied(message, message.content["arrays"])

    return app


def noise_of(strategy: CentralDP, **options: Any) -> tuple[np.ndarray, CentralDPTerms]:
    result = run_strategy(
        strategy, still(), arrays=record(BIG), nodes=5, num_rounds=1, insecure_seed=SEED, **options
    )
    assert strategy.terms is not None
    assert strategy.terms.noise_multiplier == strategy.schedule.noise_multiplier
    mean = np.concatenate([array.numpy().reshape(-1) for array in result.arrays.values()])
    return mean.astype(float), strategy.terms


def check_normal(noise: np.ndarray, sigma: float) -> None:
    """Check mean and variance within five standard errors, and that neighbours are independent."""
    assert abs(noise.mean()) < 5 * sigma / math.sqrt(noise.size)
    assert abs((noise**2).mean() / sigma**2 - 1) < 5 * math.sqrt(2 / noise.size)
    assert abs((noise[1:] * noise[:-1]).mean()) / sigma**2 < 5 / math.sqrt(noise.size)


@pytest.mark.parametrize("quantile", [None, 0.5])
@pytest.mark.parametrize(("lost", "colluders"), [(0, 1), (0, 2), (2, 1)])
def test_the_noise_of_an_opened_sum_is_what_is_charged_or_more(
    lost: int, colluders: int, quantile: float | None
) -> None:
    """Five clients, three of them in the smallest sum that is opened."""
    faults = [Fault(kind="drop", client=str(i)) for i in range(lost)]
    strategy = CentralDP(
        loop=LoopOptions(seed=1, deadline=1.0),
        secure_sum=SecureSum(colluders=colluders),
        quantile=quantile,
        clipping_norm=0.7,
    )
    mean, terms = noise_of(strategy, faults=faults)
    survivors = 5 - lost
    assert terms.parties == 3 - colluders
    share = 0.1 if quantile else 0.0
    # What is charged, worked out anew: z over sqrt(1 - share) times the diameter 2 C of updates.
    promised = strategy.schedule.noise_multiplier / math.sqrt(1 - share) * 2 * 0.7
    check_normal(mean * survivors, promised * math.sqrt(survivors / terms.parties))
    assert spent([terms.charge()], delta=1e-5) == pytest.approx(8.0, rel=1e-6)
    if lost == 2 and colluders == 1:  # the smallest sum: what is charged, and the colluder's share
        check_normal(mean * survivors, promised * math.sqrt(1 + 1 / terms.parties))


@pytest.mark.parametrize("secure_sum", [None, SecureSum()])
def test_a_trusted_server_adds_the_noise_of_the_charge_once(secure_sum: SecureSum | None) -> None:
    strategy = CentralDP(
        noise="server", insecure_seed=1, loop=LoopOptions(seed=1), secure_sum=secure_sum
    )
    mean, terms = noise_of(strategy)
    assert terms.parties == 1
    check_normal(mean * 5, strategy.schedule.noise_multiplier * 2)


def test_the_servers_noise_differs_from_round_to_round_and_run_to_run() -> None:
    def noise(**options: Any) -> tuple[Any, Any]:
        models = []
        run_strategy(
            make(CentralDP, noise="server", seed=1, **options),
            still(),
            arrays=record(BIG),
            num_rounds=2,
            evaluate_fn=lambda _, arrays: models.append(arrays["w"].numpy().astype(float)),
        )
        return models[1] - models[0], models[2] - models[1]

    draws = [*noise(), *noise(), *noise(insecure_seed=1)]
    for one, other in itertools.combinations(draws, 2):
        correlation = (one * other).mean() / math.sqrt((one**2).mean() * (other**2).mean())
        assert abs(correlation) < 5 / math.sqrt(one.size)


@pytest.mark.usefixtures("no_pld")
def test_a_poisson_sum_is_divided_by_the_expected_number_and_has_half_the_sensitivity() -> None:
    strategy = CentralDP(
        noise="server",
        sampling="poisson",
        fraction_train=0.6,
        insecure_seed=1,
        loop=LoopOptions(seed=1),
    )
    mean, terms = noise_of(strategy)
    assert terms.sampling_rate == 0.6
    check_normal(mean * 3, strategy.schedule.noise_multiplier * 1.0)


@pytest.mark.usefixtures("no_pld")
def test_without_noise_to_speak_of_it_is_the_mean_of_the_clipped_updates() -> None:
    options: dict[str, Any] = {"epsilon": 1e6, "clipping_norm": 2.5, "seed": 1}
    expected = {name: np.zeros_like(MODEL[name], float) for name in released_names(MODEL)}
    for client in range(5):
        moved = {n: step(MODEL[n], client).astype(float) - MODEL[n] for n in expected}
        norm = math.sqrt(sum((u**2).sum() for u in moved.values()))
        for name in expected:
            expected[name] += moved[name] * min(1, 2.5 / max(norm, 1e-9)) / 5
    for strategy in (
        make(CentralDP, **options),
        make(CentralDP, noise="server", **options),
        make(CentralDP, noise="server", secure_sum=SecureSum(), **options),
    ):
        result = run(strategy, num_rounds=1)
        for name, update in expected.items():
            moved = result.arrays[name].numpy() - MODEL[name]
            np.testing.assert_allclose(moved, update, atol=0.01)


# -- Budgets and books ---------------------------------------------------------------------------


def test_the_card_recomputes_epsilon_and_counts_whoever_was_lost_or_late(tmp_path: Path) -> None:
    state, run_dir = tmp_path / "state", tmp_path / "run"
    state.mkdir()
    run_dir.mkdir()
    faults = [
        Fault(kind="drop", client="1", server_round=1),
        Fault(kind="drop", client="2", server_round=2, phase="shares"),
    ]
    strategy = CentralDP(loop=LoopOptions(seed=1, run_dir=run_dir, deadline=0.5), quantile=0.5)
    run(strategy, state=state, faults=faults)
    card = PrivacyCard.from_json((run_dir / "privacy-card.json").read_text())
    numbers = card.verify()
    assert numbers["gdp"][1] == pytest.approx(8.0, rel=1e-6)
    assert numbers["gdp"][1] == pytest.approx(numbers["pld"][1], rel=1e-3)
    booked = Counter(client for release in card.releases for client in release.clients)
    for client in map(str, range(5)):
        assert len(charges(state, client)) == booked[client]
    assert booked["1"] == 3  # its first answer was lost, and cost it as much as the others
    assert booked["2"] == 2  # it could not deal for the third round, and was not asked
    line = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])["scheme"]
    assert line["epsilon_left"] == pytest.approx(0.0, abs=1e-5)


STRAGGLERS = {"stragglers": StragglerModel(slow_fraction=0.15), "deadline": 5.0}


@pytest.mark.parametrize("noise", ["distributed", "server"])
def test_nobody_is_asked_beyond_its_budget_and_the_training_ends(noise: str) -> None:
    """Four of five clients are asked in a round, each at most three times."""
    strategy = make(CentralDP, noise=noise, fraction_train=0.8, rounds=3, seed=2, **STRAGGLERS)
    result = run(strategy, num_rounds=20)
    assert strategy.schedule is not None
    assert strategy.schedule.releases == 3
    booked = Counter(client for release in strategy.releases for client in release.clients)
    assert max(booked.values()) == 3
    needed = 2 if noise == "distributed" else 1
    assert sum(count < 3 for count in booked.values()) < needed
    assert len(result.history) < 20
    assert all(line["refused"] == {} for line in result.history[1:])
    assert sum(line["late"] for line in result.history[1:]) > 0
    assert strategy.card(final=True).verify()["gdp"][1] == pytest.approx(8.0, rel=1e-6)
    assert strategy.stop().endswith(f"are left of {needed} needed")


def kill_after(server_round: int) -> Callable[[dict[str, Any]], None]:
    def on_round(line: dict[str, Any]) -> None:
        if line["round"] == server_round:
            raise Killed

    return on_round


@pytest.mark.parametrize(
    "options",
    [
        {"noise": "server"},
        {"noise": "server", "sampling": "poisson"},
        {},
        {"sampling": "poisson"},
    ],
)
def test_the_books_survive_a_resume_with_drop_outs_and_stragglers(
    options: dict[str, Any], tmp_path: Path
) -> None:
    faults = [Fault(kind="drop", client="3", server_round=1)]
    everything: dict[str, Any] = {
        "seed": 4,
        "experiment_id": "e",
        "rounds": 3,
        "fraction_train": 0.8,
        "quantile": 0.5,
        **STRAGGLERS,
        **({"insecure_seed": 3} if options.get("noise") == "server" else {}),
        **options,
    }
    timing: dict[str, Any] = {"num_rounds": 12, "faults": faults, "insecure_seed": SEED}
    timing["timeout"] = 0.5
    whole, broken = make(CentralDP, **everything), tmp_path / "broken"
    broken.mkdir()
    unbroken = run(whole, state=None, **timing)
    state = tmp_path / "state"
    state.mkdir()
    with pytest.raises(Killed):
        run(
            make(CentralDP, **everything, run_dir=broken, on_round=kill_after(2)),
            state=state,
            **timing,
        )
    resumed = make(CentralDP, **everything, run_dir=broken, resume=True)
    result = run(resumed, state=state, **timing)
    assert len(result.history) == len(unbroken.history) < 12
    assert same(result.arrays, unbroken.arrays)
    assert [r.clients for r in resumed.releases] == [r.clients for r in whole.releases]
    assert resumed.clipping_norm == whole.clipping_norm
    card = PrivacyCard.from_json((broken / "privacy-card.json").read_text())
    assert max(t for _, t in card.verify().values()) > 0
    if "noise" not in options:
        booked = Counter(client for release in resumed.releases for client in release.clients)
        for client, count in booked.items():
            assert len(charges(state, client)) == count


class Dying(CentralDP):
    """Its process ends in round 2, after some answers."""

    heard = 5

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        def some() -> Any:
            for count, reply in enumerate(replies):
                if server_round == 2 and count == self.heard:
                    raise Killed
                yield reply
            if server_round == 2:
                raise Killed

        return super().aggregate_train(server_round, some())


def test_a_question_is_answered_once_also_after_a_crash(tmp_path: Path) -> None:
    """Whoever answered in the round that broke off declines; its charge is on the card once."""
    state, run_dir = tmp_path / "state", tmp_path / "run"
    state.mkdir()
    run_dir.mkdir()
    options: dict[str, Any] = {"seed": 1, "run_dir": run_dir, "rounds": 3, "experiment_id": "e"}
    with pytest.raises(Killed):
        run(make(Dying, **options), state=state)
    before = {client: len(charges(state, client)) for client in map(str, range(5))}
    assert set(before.values()) == {2}
    strategy = make(CentralDP, **options, resume=True)
    result = run(strategy, state=state)
    assert [line.get("skipped") for line in result.history] == [None, False, True, False]
    assert result.history[2]["refused"] == {"declined": 5}
    booked = Counter(client for release in strategy.releases for client in release.clients)
    for client in before:
        assert len(charges(state, client)) == booked[client] == 3
    assert result.guarantee.spent == pytest.approx(8.0, rel=1e-6)


def test_where_the_server_adds_noise_a_round_that_broke_off_is_done_again(tmp_path: Path) -> None:
    options: dict[str, Any] = {"seed": 1, "run_dir": tmp_path, "rounds": 3, "experiment_id": "e"}
    options |= {"noise": "server", "insecure_seed": 1}
    with pytest.raises(Killed):
        run(make(Dying, **options))
    strategy = make(CentralDP, **options, resume=True)
    result = run(strategy)
    assert [line.get("skipped") for line in result.history] == [None, False, False, False]
    assert [release.clients for release in strategy.releases] == [("0", "1", "2", "3", "4")] * 3


# -- Samples -------------------------------------------------------------------------------------


def test_secret_poisson_samples_charge_everybody_and_have_the_expected_size() -> None:
    strategy = CentralDP(
        noise="server",
        sampling="poisson",
        fraction_train=0.25,
        loop=LoopOptions(clients=40, seed=1),
        min_available_nodes=1,
        insecure_seed=5,
        epsilon=1.0,
    )
    result = run(strategy, nodes=1, num_rounds=30)
    sizes = [line["asked"] for line in result.history[1:]]
    # Binomial(40, 1/4): five standard errors of the mean, and of the variance about as many.
    assert abs(np.mean(sizes) - 10) < 5 * math.sqrt(7.5 / 30)
    assert 0.3 < np.var(sizes) / 7.5 < 3
    everybody = tuple(sorted(map(str, range(40))))
    assert {release.clients for release in strategy.releases} == {everybody}
    assert {release.charge.sampling for release in strategy.releases} == {0.25}
    numbers = strategy.card(final=True).verify()
    assert numbers["rdp"][1] == pytest.approx(1.0, rel=1e-3)
    assert numbers["pld"][1] < numbers["rdp"][1]


@pytest.mark.usefixtures("no_pld")
def test_secret_samples_are_not_what_a_client_could_work_out() -> None:
    def drawn(**options: Any) -> list[set[str]]:
        rounds: list[set[str]] = []

        class Watched(CentralDP):
            def configure_train(self, server_round: int, *arguments: Any) -> Any:
                messages = super().configure_train(server_round, *arguments)
                rounds.append(set(self.messenger.request_log("train").released()))
                return messages

        strategy = make(
            Watched,
            sampling="poisson",
            fraction_train=0.5,
            clients=16,
            seed=1,
            experiment_id="e",
            min_available_nodes=1,
            **options,
        )
        run(strategy, nodes=1, num_rounds=2)
        return rounds

    server = {"noise": "server"}
    assert drawn(**server) != drawn(**server)  # all that clients know is the same
    assert drawn(**server, insecure_seed=1) == drawn(**server, insecure_seed=1)
    assert drawn() == drawn()  # under a secure sum clients know each other anyway


@pytest.mark.usefixtures("no_pld")
def test_noise_is_released_also_if_nobody_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_in_round_2(assigned: Any, *, server_round: int, **_: Any) -> Any:
        return assigned if server_round == 2 else {}

    monkeypatch.setattr(central_dp, "each_by_itself", only_in_round_2)
    strategy = CentralDP(
        noise="server",
        sampling="poisson",
        fraction_train=0.4,
        insecure_seed=1,
        loop=LoopOptions(seed=1),
        quantile=0.5,
    )
    result = run_strategy(strategy, still(), arrays=record(BIG), nodes=5, num_rounds=1)
    line = result.history[1]
    assert (line["asked"], line["skipped"]) == (0, False)
    noise = result.arrays["w"].numpy().astype(float).reshape(-1)
    check_normal(noise * 2, strategy.schedule.update_noise_multiplier)
    assert strategy.releases[0].clients == ("0", "1", "2", "3", "4")
    assert "fraction_below" in line["scheme"]
    assert strategy.stop() == "the 1 releases that the budget is for are made"


def test_nothing_is_released_beyond_the_planned_releases_whoever_runs_the_rounds() -> None:
    class Own(CentralDP):
        start = Strategy.start

    for sampling in ("poisson", "fixed"):
        models: list[Any] = []
        strategy = Own(
            noise="server", sampling=sampling, rounds=2, insecure_seed=1, loop=LoopOptions(seed=1)
        )
        run(strategy, num_rounds=4, evaluate_fn=lambda _, a: models.append(model_of(a)))  # noqa: B023
        assert len(strategy.releases) == 2
        assert any((models[1][n] != models[2][n]).any() for n in MODEL)
        for name in MODEL:
            np.testing.assert_array_equal(models[2][name], models[4][name])
        assert strategy.card().guarantee.spent == pytest.approx(8.0, rel=1e-5)


def test_a_round_with_too_few_drawn_for_a_sum_is_skipped(
    caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_in_round_2(assigned: Any, *, server_round: int, **_: Any) -> Any:
        return only(assigned, {"0"}) if server_round == 2 else assigned

    monkeypatch.setattr(central_dp, "each_by_itself", one_in_round_2)
    strategy = CentralDP(sampling="poisson", loop=LoopOptions(seed=1))
    with caplog.at_level("WARNING", "flwr.privacy"):
        result = run(strategy)
    assert [line["skipped"] for line in result.history[1:]] == [False, True, False]
    assert "a cohort of 1 clients was drawn: cohort = 1: expected at least 2" in caplog.text


# -- Adaptive clipping ---------------------------------------------------------------------------


@pytest.mark.usefixtures("no_pld")
@pytest.mark.parametrize("noise", ["distributed", "server"])
def test_the_clipping_norm_finds_the_median_norm_of_the_updates(noise: str) -> None:
    """Client i moves by i + 1 in norm, i from 0 to 10; the norm starts far below the median."""
    app = ClientApp(mods=[as_mod(CentralDPClient)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        moved = model_of(message.content["arrays"])
        far = 1.0 + int(context.node_config["partition-id"])
        out = record({"w": moved["w"] + np.full(4, far / 2, np.float32)})
        return replied(message, out)

    strategy = make(
        CentralDP,
        noise=noise,
        quantile=0.5,
        clipping_learning_rate=0.5,
        clients=11,
        epsilon=1e3,
        seed=1,
        clipping_norm=1.5,
        min_available_nodes=1,
        **({"insecure_seed": 1} if noise == "server" else {}),
    )
    result = run_strategy(
        strategy,
        app,
        nodes=1,
        arrays=record({"w": np.zeros(4, np.float32)}),
        num_rounds=12,
        insecure_seed=1,
    )
    norms = [line["scheme"]["clipping_norm"] for line in result.history[1:]]
    assert norms[0] == 1.5
    assert 4.5 < np.median(norms[7:]) < 8.0
    assert {release.charge for release in strategy.releases} == {strategy.terms.charge()}


# -- Refusals ------------------------------------------------------------------------------------


def test_the_client_declines_outside_of_a_secure_sum_whoever_asks(caplog: Any) -> None:
    class Bare(CentralDP):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.secure_sum = None

    with caplog.at_level("WARNING", "flwr.privacy"):
        result = run(Bare(loop=LoopOptions(seed=1)), num_rounds=1)
    assert result.history[1]["refused"] == {"declined": 5}
    assert "was asked for outside of a secure sum" in caplog.text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"epsilon": 0.0}, r"epsilon = 0\.0"),
        ({"delta": 1.0}, r"delta = 1\.0"),
        ({"clipping_norm": 0.0}, r"clipping_norm = 0\.0"),
        ({"clipping_norm": math.nan}, "clipping_norm = nan"),
        ({"noise": "client"}, "noise = 'client'"),
        ({"sampling": "shuffled"}, "sampling = 'shuffled'"),
        ({"rounds": 0}, "rounds = 0"),
        ({"quantile": 1.5}, r"quantile = 1\.5"),
        ({"quantile": 0.5, "clipping_learning_rate": 0.0}, r"learning_rate = 0\.0"),
        ({"quantile": 0.5, "count_share": 0.0}, r"count_share = 0\.0"),
        ({"quantile": 0.5, "count_share": 1.0}, r"count_share = 1\.0"),
        ({"grid_bits": 31}, "grid_bits = 31"),
        ({"insecure_seed": 1}, "insecure_seed = 1: expected None: the clients draw the noise"),
        ({"noise": "server", "insecure_seed": -1}, "insecure_seed = -1"),
        ({**POISSON, "secure_sum": SecureSum()}, "secure_sum = .*: the clients of a secure sum"),
        (
            {"sampling": "poisson", "secure_sum": SecureSum(threshold=3)},
            "secure_sum.threshold = 3: expected none with sampling = 'poisson'",
        ),
        ({"secure_sum": True}, "secure_sum = True"),
        ({"train_metrics_aggr_fn": lambda *_: None}, "train_metrics_aggr_fn"),
    ],
)
def test_parameters_that_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        make(CentralDP, **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"grid_bits": 3}, "finer grid"),
        ({"grid_bits": 30}, "coarser grid"),
        ({"grid_bits": 8, "noise": "server", "epsilon": 1e7}, "sigma = "),
        ({"keep_back": ["nonesuch"]}, r"keep_back = \['nonesuch'\]"),
        ({"secure_sum": SecureSum(threshold=6)}, "secure_sum.threshold = 6"),
        ({"secure_sum": SecureSum(modulus_bits=20)}, "secure_sum.modulus_bits = 20"),
        ({"sampling": "poisson", "secure_sum": SecureSum(modulus_bits=20)}, "modulus_bits = 20"),
    ],
)
def test_parameters_that_do_not_fit_the_federation_end_the_run(
    options: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        run(make(CentralDP, **options), num_rounds=1)


def test_a_start_of_ones_own_has_to_say_how_many_rounds_there_are() -> None:
    class Own(CentralDP):
        start = Strategy.start

    with pytest.raises(InvalidParameterError, match="rounds = None"):
        run(Own(noise="server"))


def test_a_resume_with_other_terms_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run(CentralDP(loop=LoopOptions(seed=1, run_dir=tmp_path, on_round=kill_after(1))))
    for options, rounds, text in (
        ({"epsilon": 9.0}, 3, r"calibrated for epsilon = 8\.0, not 9\.0"),
        ({"noise": "server"}, 3, "calibrated for noise = 'distributed', not 'server'"),
        ({"clipping_norm": 2.0}, 3, r"calibrated for clipping_norm = 1\.0, not 2\.0"),
        ({"quantile": 0.5}, 3, r"calibrated for count_share = 0\.0, not 0\.1"),
        ({}, 30, "calibrated for rounds = 3, not 30"),
    ):
        strategy = make(CentralDP, seed=1, run_dir=tmp_path, resume=True, **options)
        with pytest.raises(CheckpointError, match=text):
            run(strategy, num_rounds=rounds)


def test_the_secret_of_the_samples_is_in_the_checkpoint_and_nowhere_else(
    tmp_path: Path, caplog: Any
) -> None:
    with caplog.at_level("DEBUG"):
        strategy = make(CentralDP, **POISSON, seed=1, run_dir=tmp_path)
        run(strategy)
    secret = strategy.state_dict()["secret"]
    assert len(secret) == 32
    assert strategy.state_dict()["secret"] != make(CentralDP, **POISSON).state_dict()["secret"]
    assert CentralDP().state_dict()["secret"] == b""
    assert secret.hex() not in caplog.text
    for path in tmp_path.iterdir():
        if path.name != "checkpoint.bin":
            assert secret.hex() not in path.read_text()
    assert (tmp_path / "checkpoint.bin").stat().st_mode & 0o077 == 0


# -- The promise ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said", "unsaid"),
    [
        (
            {},
            [
                "an honest-but-curious server and clients that collude with it",
                "the data of one client are replaced by any other",
                "of 5 clients at most 1 collude",
                "a sum over less than 3 is not opened",
                "at least 2 honest shares are in it",
                "Not protected: who takes part",
                "(not uploaded at all: batches)",
            ],
            ["trusted"],
        ),
        ({"sampling": "poisson"}, ["replaced by any other", "who takes part"], ["trusted"]),
        (
            {"noise": "server"},
            ["whoever sees the models, and no message", "the server is trusted: it sees every cl"],
            ["collude"],
        ),
        (
            {"noise": "server", "secure_sum": SecureSum()},
            ["the server is trusted: it sees the sum before its noise", "Secure sum: "],
            [],
        ),
        (
            POISSON,
            [
                "and neither a message nor who takes part",
                "one client is there or not",
                "it draws each client by itself and tells nobody who is drawn",
            ],
            ["Not protected: who takes part"],
        ),
    ],
)
def test_the_promise_says_against_whom_and_on_what_it_rests(
    options: dict[str, Any], said: list[str], unsaid: list[str]
) -> None:
    strategy = make(CentralDP, seed=1, **options)
    assert "(8, 1e-05)-differential privacy" in strategy.guarantee().text()
    promise = run(strategy).guarantee
    text = promise.text()
    for words in said:
        assert words in text
    for words in unsaid:
        assert words not in text
    assert (promise.epsilon, promise.delta, promise.void) == (8.0, 1e-5, "")
    assert promise.spent == pytest.approx(8.0, rel=1e-5)


@pytest.mark.parametrize("options", [{}, {"noise": "server", "insecure_seed": 1}])
def test_a_seed_voids_the_guarantee(options: dict[str, Any]) -> None:
    engine = {} if options else {"insecure_seed": 5}
    result = run(make(CentralDP, seed=1, **options), num_rounds=1, **engine)
    assert result.guarantee.text().startswith("VOID: ")
    assert "from an insecure seed" in result.guarantee.void


@pytest.mark.usefixtures("no_pld")
def test_server_optimisers_see_the_noised_mean() -> None:
    result = run(CentralDP(loop=LoopOptions(seed=1), inner=FedAdam(), epsilon=1e3), num_rounds=2)
    assert all(np.isfinite(a.numpy()).all() for a in result.arrays.values())


def test_a_second_start_is_another_training() -> None:
    # At a quantile of 0.5 two noised counts that are cut to 0 and 1 would undo each other.
    strategy = CentralDP(loop=LoopOptions(seed=1), quantile=0.3)
    run(strategy, num_rounds=2)
    moved = strategy.clipping_norm
    run(strategy, num_rounds=1)
    assert moved != 1.0
    assert strategy.terms.clipping_norm == 1.0
    assert len(strategy.releases) == 1


def test_a_reply_that_weighs_more_is_refused() -> None:
    terms = CentralDPTerms(
        noise="distributed",
        sampling="fixed",
        noise_multiplier=2.0,
        epsilon=10.0,
        delta=1e-5,
        gap=1e-3,
        clipping_norm=1.0,
        grid=-20,
    )
    mean = CentralMean(MODEL, terms)
    codes = {name: np.zeros(MODEL[name].shape, np.int32) for name in released_names(MODEL)}
    codes[FAILED_NAME] = np.zeros(1, np.int32)
    with pytest.raises(ReplyRefusedError, match="2: every client weighs 1"):
        mean.accumulate("a", codes, weight=2)
    mean.accumulate("a", codes, weight=1)
    with pytest.raises(InvalidParameterError, match="noise = 'distributed': expected server"):
        mean.add_noise(SecureRandom.insecure(0))
