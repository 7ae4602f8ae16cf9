"""Trainings that fail in secret: how many is counted with noise, and too few end the run."""

import json
import logging
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from apps import record, run_strategy, same, step
from conformance import Killed
from flwr.app import Array, ArrayRecord, Context, MetricRecord
from flwr.client import NumPyClient
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAdam, Strategy
from pinned import pinned_nodes

from flwr_privacy.clients import CentralDPClient, SchemeClient, UDPClient, numpy_client_app
from flwr_privacy.errors import NothingTrainedError, TooFewTrainedError
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.simulations.engines.inline import run_inline
from flwr_privacy.strategies import (
    UDP,
    AdaptiveClipping,
    CentralDP,
    DistributedNoise,
    LoopOptions,
    RecordLevel,
    SchemeStrategy,
    ServerNoise,
    UserLevel,
)
from flwr_privacy.udp.plan import UDPPlan

pytestmark = pytest.mark.usefixtures("no_pld")

MODEL = {"w": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)}
CLIENTS = 6
SUM = SecureSum(threshold=CLIENTS)

Halves = tuple[Callable[..., SchemeStrategy], type[SchemeClient]]


def udp(**options: Any) -> UDP:
    privacy = UserLevel(epsilon=options.pop("epsilon", 60.0), clipping_norm=0.3)
    return UDP(privacy=privacy, **options)


def shared(**options: Any) -> UDP:
    privacy = UserLevel(epsilon=options.pop("epsilon", 60.0), clipping_norm=0.3, shared_noise=True)
    return UDP(privacy=privacy, secure_sum=SUM, **options)


def central(**options: Any) -> CentralDP:
    epsilon = options.pop("epsilon", 60.0)
    privacy = DistributedNoise(epsilon=epsilon, clipping_norm=0.3)
    return CentralDP(privacy=privacy, secure_sum=SUM, **options)


def adaptive(**options: Any) -> CentralDP:
    return central(clipping=AdaptiveClipping(quantile=0.5), **options)


MODES: dict[str, Halves] = {
    "udp": (udp, UDPClient),
    "udp, shares": (shared, UDPClient),
    "central-dp": (central, CentralDPClient),
    "central-dp, adaptive": (adaptive, CentralDPClient),
}


class Client(NumPyClient):
    """Trains, or fails in one of the ways in which a user's code does."""

    def __init__(self, client: int, failing: str) -> None:
        self.client, self.failing = client, failing

    def fit(self, parameters: list[Any], config: Any) -> Any:
        trained = [step(array, self.client) for array in parameters]
        if self.failing == "raises":
            raise ValueError("a bug")
        if self.failing == "NaN":
            trained[0][0] = np.nan
        if self.failing == "shapes":
            trained = [array.reshape(-1) for array in trained]
        return trained, 1, {}


def train(
    strategy: SchemeStrategy,
    half: type[SchemeClient],
    folder: Path,
    failing: dict[int, str],
    rounds: int,
    **options: Any,
) -> Any:
    """Train with deployed nodes, some of which fail; return the result, or the error."""
    (folder / "keys").mkdir(parents=True, exist_ok=True)
    server_app, results = ServerApp(), []

    def client_fn(context: Context) -> NumPyClient:
        client = int(context.node_config["partition-id"])
        return half(Client(client, failing.get(client, "")), context)

    @server_app.main()
    def main(grid: Any, context: Context) -> None:
        try:
            start = ArrayRecord({name: Array(array) for name, array in MODEL.items()})
            results.append(strategy.start(grid, start, num_rounds=rounds, timeout=20, **options))
        except (TooFewTrainedError, NothingTrainedError, Killed) as error:
            results.append(error)

    nodes = pinned_nodes(folder / "keys", [str(client) for client in range(CLIENTS)])
    (folder / "state").mkdir(exist_ok=True)
    run_inline(
        server_app,
        numpy_client_app(client_fn),
        nodes=nodes,
        state=folder / "state",
        insecure_seed=11,
    )
    return results[0]


ROUNDS = 8
ALL = dict.fromkeys(range(CLIENTS))
HALF = {0: "raises", 1: "NaN", 2: "shapes"}


@pytest.mark.parametrize("mode", MODES)
def test_the_history_counts_how_many_trained_as_noisily_as_it_says(
    mode: str, tmp_path: Path
) -> None:
    """Mean and variance over the rounds, to five standard errors."""
    make, half = MODES[mode]
    rounds = 40
    strategy = make(loop=LoopOptions(seed=1), rounds=rounds)
    result = train(strategy, half, tmp_path, HALF, rounds)
    lines = [line["scheme"] for line in result.history[1:]]
    charge = strategy.releases[0].charge
    z = charge.noise_multiplier / (math.sqrt(0.9) if "adaptive" in mode else 1)
    parties = 1 if mode == "udp" else SUM.parties_of(CLIENTS)
    sigma = 2 * z * math.sqrt(CLIENTS / parties)
    assert [line["trained_sigma"] for line in lines] == pytest.approx([sigma] * rounds)
    noise = np.array([line["trained"] for line in lines]) - 3
    assert abs(noise.mean()) < 5 * sigma / math.sqrt(rounds)
    assert abs((noise**2).mean() / sigma**2 - 1) < 5 * math.sqrt(2 / rounds)
    assert len(set(noise)) == rounds
    pooled = strategy.trained
    assert (pooled.rounds, pooled.answers) == (rounds, rounds * CLIENTS)
    assert pooled.trained == pytest.approx(noise.sum() + 3 * rounds)
    assert pooled.variance == pytest.approx(rounds * sigma**2)
    assert not any(line["refused"] for line in result.history[1:])
    json.dumps(lines)


def test_where_clients_have_noise_of_their_own_that_of_each_counts(tmp_path: Path) -> None:
    budgets = {str(client): 20.0 * (client + 1) for client in range(CLIENTS)}
    strategy = udp(epsilon=budgets, loop=LoopOptions(seed=1), rounds=3)
    result = train(strategy, UDPClient, tmp_path, HALF, 3)
    for line in result.history[1:]:
        noise = [
            2 * release.charge.noise_multiplier
            for release in strategy.releases
            if release.server_round == line["round"]
            for _ in release.clients
        ]
        assert len(set(noise)) == len(noise) == CLIENTS
        assert line["scheme"]["trained_sigma"] == pytest.approx(math.hypot(*noise))


@pytest.mark.parametrize("mode", MODES)
def test_cohorts_are_counted_as_one_node_per_client_is(mode: str) -> None:
    def client_fn(context: Context) -> NumPyClient:
        client = int(context.node_config["partition-id"])
        return half(Client(client, "NaN" if client < 2 else ""), context)

    make, half = MODES[mode]
    counts = []
    for nodes, clients in ((CLIENTS, None), (2, CLIENTS)):
        loop = LoopOptions(seed=1, experiment_id="e", clients=clients)
        strategy = make(loop=loop, rounds=3)
        app = numpy_client_app(client_fn)
        run_strategy(strategy, app, nodes=nodes, arrays=record(MODEL), insecure_seed=5)
        counts.append(strategy.trained)
    assert counts[0] == counts[1]
    assert counts[0].answers == 3 * CLIENTS


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["raises", "NaN"])
def test_a_run_of_which_all_trainings_fail_ends_and_says_so(
    mode: str, kind: str, tmp_path: Path
) -> None:
    make, half = MODES[mode]
    runs = tmp_path / "run"
    runs.mkdir()
    strategy = make(loop=LoopOptions(seed=1, run_dir=runs), epsilon=5000.0, rounds=ROUNDS)
    error = train(strategy, half, tmp_path, dict.fromkeys(ALL, kind), ROUNDS)
    assert isinstance(error, TooFewTrainedError)
    ended = len(error.history)
    assert ended < ROUNDS
    assert strategy.trained.rounds == ended
    answers = CLIENTS * ended
    assert str(error).startswith(f"too few clients train: of {answers} answers in {ended} rounds")
    assert f"at least {answers // 2} have to ({answers} were asked for)" in str(error)
    assert len(error.result.history) == ended + 1
    assert error.result.guarantee.spent > 0
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert json.loads((runs / "privacy-card.json").read_text())["releases"]

    # It goes on once its clients are mended.
    again = make(loop=LoopOptions(seed=1, run_dir=runs, resume=True), epsilon=5000.0, rounds=ROUNDS)
    result = train(again, half, tmp_path, {}, ROUNDS)
    assert [line["round"] for line in result.history] == list(range(ROUNDS + 1))
    assert again.trained.tests == ROUNDS
    assert again.trained.rounds == ROUNDS - ended


def test_a_run_that_is_killed_before_it_says_so_ends_when_it_goes_on(tmp_path: Path) -> None:
    """Whoever goes on has not read that clients have to be repaired: no more is spent."""
    runs = tmp_path / "run"
    runs.mkdir()

    def die(line: dict[str, Any]) -> None:
        if first.trained.too_few:
            raise Killed

    failing = dict.fromkeys(ALL, "raises")
    options: dict[str, Any] = {"epsilon": 5000.0, "rounds": ROUNDS}
    first = udp(loop=LoopOptions(seed=1, run_dir=runs, on_round=die), **options)
    assert isinstance(train(first, UDPClient, tmp_path, failing, ROUNDS), Killed)
    spent = [release.server_round for release in first.releases]
    again = udp(loop=LoopOptions(seed=1, run_dir=runs, resume=True), **options)
    error = train(again, UDPClient, tmp_path, failing, ROUNDS)
    assert isinstance(error, TooFewTrainedError)
    assert [release.server_round for release in again.releases] == spent
    once_more = udp(loop=LoopOptions(seed=1, run_dir=runs, resume=True), **options)
    result = train(once_more, UDPClient, tmp_path, {}, ROUNDS)
    assert [line["round"] for line in result.history] == list(range(ROUNDS + 1))


def test_the_quorum_is_how_many_have_to_train(tmp_path: Path) -> None:
    """The inline engine answers in the order of the clients: the first ones are healthy."""
    for quorum, ends in ((None, True), (5, True), (3, True), (2, False)):
        strategy = udp(loop=LoopOptions(seed=1, quorum=quorum), epsilon=5000.0, rounds=12)
        failing = {2: "raises", 3: "NaN", 4: "shapes", 5: "raises"}
        result = train(strategy, UDPClient, tmp_path / str(quorum), failing, 12)
        assert isinstance(result, TooFewTrainedError) == ends


def test_a_healthy_run_does_not_end(tmp_path: Path) -> None:
    strategy = udp(loop=LoopOptions(seed=1), epsilon=5000.0, rounds=12)
    result = train(strategy, UDPClient, tmp_path, {}, 12)
    assert len(result.history) == 13


@pytest.mark.parametrize("place", ["on_round", "evaluate_fn"])
def test_a_round_is_pooled_once_where_a_run_is_killed_in_it(place: str, tmp_path: Path) -> None:
    """In the evaluation, which comes after the checkpoint of the training, and after the round."""
    runs = tmp_path / "run"
    runs.mkdir()

    def die(*about: Any) -> Any:
        line = about[0]
        if (line if isinstance(line, int) else line["round"]) == 2:
            raise Killed
        return MetricRecord({"loss": 1.0}) if place == "evaluate_fn" else None

    options: dict[str, Any] = {"evaluate_fn": die} if place == "evaluate_fn" else {}
    told = {"on_round": die} if place == "on_round" else {}
    first = udp(loop=LoopOptions(seed=1, run_dir=runs, **told), rounds=4)
    assert isinstance(train(first, UDPClient, tmp_path, HALF, 4, **options), Killed)
    again = udp(loop=LoopOptions(seed=1, run_dir=runs, resume=True), rounds=4)
    result = train(again, UDPClient, tmp_path, HALF, 4)
    whole = udp(loop=LoopOptions(seed=1, experiment_id=again.experiment.id), rounds=4)
    unbroken = train(whole, UDPClient, tmp_path / "whole", HALF, 4)
    assert again.trained == whole.trained
    assert same(result.arrays, unbroken.arrays)
    lines, expected = ([line["scheme"] for line in of.history] for of in (result, unbroken))
    assert [line.get("trained") for line in lines] == [line.get("trained") for line in expected]


def test_what_is_learned_is_bit_for_bit_what_it_was_without_the_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = train(
        udp(loop=LoopOptions(seed=1, experiment_id="e"), rounds=3), UDPClient, tmp_path / "a", {}, 3
    )
    terms = UDPPlan.plain_terms

    def plain(self: UDPPlan, parties: int, **options: Any) -> Any:
        asked = terms(self, parties, **options)
        return type(asked)(**{**asked.__dict__, "count_failed": False})

    monkeypatch.setattr(UDPPlan, "plain_terms", plain)
    without = train(
        udp(loop=LoopOptions(seed=1, experiment_id="e"), rounds=3), UDPClient, tmp_path / "b", {}, 3
    )
    assert same(counted.arrays, without.arrays)
    assert "trained" in counted.history[1]["scheme"]
    assert "trained" not in without.history[1]["scheme"]
    assert counted.guarantee == without.guarantee


@pytest.mark.parametrize(
    "strategy",
    [
        UDP(privacy=UserLevel(noise="paper"), rounds=3),
        UDP(privacy=UserLevel(noise="none"), rounds=3),
        UDP(privacy=RecordLevel(learning_rate=0.1), rounds=3),
        CentralDP(privacy=ServerNoise(), rounds=3),
        CentralDP(privacy=ServerNoise(sampling="poisson"), rounds=3),
    ],
    ids=["paper", "no noise", "records", "trusted server", "secret samples"],
)
def test_what_is_as_printed_or_refuses_by_itself_has_no_further_coordinate(strategy: Any) -> None:
    strategy._template = MODEL
    strategy.messenger.sampler.sample_size = lambda **_: (6, 6)
    told = strategy.instruct(1)
    assert told.failed_sigma is None
    assert set(told.accumulator().template) == {"w"}


def test_it_is_said_once_at_the_start_how_soon_a_failure_would_be_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for epsilon, level in ((5000.0, logging.INFO), (8.0, logging.WARNING)):
        caplog.clear()
        with caplog.at_level(logging.INFO, "flwr.privacy"):
            strategy = udp(loop=LoopOptions(seed=1), epsilon=epsilon, rounds=12)
            train(strategy, UDPClient, tmp_path / str(epsilon), {}, 12)
        said = [entry for entry in caplog.records if "would be noticed after" in entry.message]
        assert [entry.levelno for entry in said] == [level]
        assert said[0].message.startswith("6 clients: how many of them trained is counted with a")
        assert ("and there are 12" in said[0].message) == (level == logging.WARNING)


def test_under_a_users_own_start_the_next_round_is_not_asked(tmp_path: Path) -> None:
    class Own(UDP):
        start = Strategy.start

    strategy = Own(privacy=UserLevel(epsilon=5000.0, clipping_norm=0.3), rounds=12)
    error = train(strategy, UDPClient, tmp_path, dict.fromkeys(ALL, "raises"), 12)
    assert isinstance(error, TooFewTrainedError)
    assert len(strategy.releases) == strategy.trained.rounds < 12
    assert "were asked for" not in str(error)


@pytest.mark.parametrize("mode", MODES)
def test_the_model_has_no_entry_of_the_count(mode: str, tmp_path: Path) -> None:
    make, half = MODES[mode]
    strategy = make(loop=LoopOptions(seed=1), rounds=2, inner=FedAdam(eta=0.1))
    assert list(train(strategy, half, tmp_path, HALF, 2).arrays) == list(MODEL)
