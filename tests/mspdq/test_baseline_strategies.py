"""The baselines of MSP and MSPDQ: conformance, what is on the wire, and what becomes of it."""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
from apps import MODEL, make, model_of, record, same, step
from conformance import WrapsConformance
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Strategy
from mixing_baselines import NBAFL, SCHEMES, SEED, listening, run
from scipy import stats

from flwr_privacy.clients import (
    DrawnFedAvgClient,
    JoPEQFedAvgClient,
    MSPClient,
    NbAFLClient,
    QuantizedFedAvgClient,
    SchemeClient,
    as_mod,
)
from flwr_privacy.coding.packing import packed_bytes
from flwr_privacy.errors import ProtocolError
from flwr_privacy.mspdq import decode_start, encode_start
from flwr_privacy.mspdq.baselines import JoPEQ, nbafl_downlink_sigma, nbafl_uplink_sigma
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.strategies import (
    MSP,
    DrawnFedAvg,
    JoPEQFedAvg,
    LoopOptions,
    NbAFL,
    QuantizedFedAvg,
)
from flwr_privacy.wire.arrays import decode_npy
from flwr_privacy.wire.identity import derive_seed, stream
from flwr_privacy.wire.message import RECORD, Header


class TestDrawnFedAvg(WrapsConformance):
    strategy = DrawnFedAvg
    client = DrawnFedAvgClient
    registered = False


class TestQuantizedFedAvg(WrapsConformance):
    strategy = QuantizedFedAvg
    client = QuantizedFedAvgClient
    options: ClassVar[dict[str, Any]] = {"experiment_id": "e", "bits": 5}
    engine: ClassVar[dict[str, Any]] = {"insecure_seed": SEED}
    codes = True
    on_ray = False  # as the baselines are no more than other codes on the same messages
    app_options: ClassVar[dict[str, Any]] = {"bits": 16}
    noise = 1e-3


# -- Apps and runs ----------------------------------------------------------------------------


def vector_app(client: type[SchemeClient], trained: Callable[[int], Any]) -> ClientApp:
    """Return an app whose training returns a given vector for each client."""
    app = ClientApp(mods=[as_mod(client)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        partition = int(context.node_config["partition-id"])
        arrays = ArrayRecord({"w": Array(np.asarray(trained(partition), np.float32))})
        metrics = MetricRecord({"num-examples": partition + 1})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


def one_vector(strategy: Any, client: type[SchemeClient], trained: Any, **options: Any) -> Any:
    """Train one round from zero; return the new vector."""
    values = np.zeros(np.size(trained(0)), np.float32)
    result = run(
        strategy, client, app=vector_app(client, trained), arrays=record({"w": values}), **options
    )
    return model_of(result.arrays)["w"].astype(np.float64)


def trained_by(client: int) -> dict[str, Any]:
    return {name: step(array, client) for name, array in MODEL.items()}


def update_of(client: int) -> list[Any]:
    """Return the update of each array that travels."""
    trained = trained_by(client)
    return [
        (trained[name].astype(np.float64) - MODEL[name].astype(np.float64)).reshape(-1)
        for name in ("layer.weight", "0")
    ]


@pytest.mark.parametrize("scheme", ["mspdq-ldp", "mspdq-jopeq"])
def test_the_others_train_alike_in_cohorts_and_under_a_users_own_start(scheme: str) -> None:
    # They share all else with the two that pass the conformance classes.
    strategy, client, options = SCHEMES[scheme]
    options = {**options, "seed": 3, "experiment_id": "e"}
    plain = run(make(strategy, **options), client, num_rounds=3)
    cohorts = run(
        make(strategy, **options, clients=4), client, num_rounds=3, nodes=2, serialise=True
    )
    assert same(plain.arrays, cohorts.arrays, exact=False)

    class Own(strategy):  # type: ignore[misc, valid-type]
        start = Strategy.start

    own = run(make(Own, **options), client, num_rounds=3)
    assert same(plain.arrays, own.arrays, exact=False)
    assert not same_as_start(plain)


def same_as_start(result: Any) -> bool:
    return bool((model_of(result.arrays)["0"] == MODEL["0"]).all())


# -- The wire ---------------------------------------------------------------------------------


def noise_of(client: int) -> SecureRandom:
    return SecureRandom.insecure(SEED, "baseline", str(client), "e", "train", 1, 0)


@pytest.mark.parametrize("bits", [1, 4, 9])
def test_the_server_decodes_what_the_client_of_plain_encoded_bit_for_bit(bits: int) -> None:
    seen: dict[str, Any] = {}

    class Recording(QuantizedFedAvg):
        def decoded(self, codes: Any, reply: Any) -> Any:
            seen[reply.client_id] = super().decoded(codes, reply)
            return seen[reply.client_id]

    result = run(Recording(bits=bits, loop=LoopOptions(experiment_id="e")), QuantizedFedAvgClient)
    levels = 2**bits
    for client in range(4):
        codes, ends = encode_start(np.concatenate(update_of(client)), levels, noise_of(client))
        np.testing.assert_array_equal(seen[str(client)], decode_start(codes, ends, levels))
    expected = MODEL["0"] + np.mean([seen[str(client)][6:] for client in range(4)], axis=0)
    np.testing.assert_allclose(model_of(result.arrays)["0"], expected, rtol=1e-6, atol=1e-7)
    assert model_of(result.arrays)["batches"] == MODEL["batches"]


def test_the_server_decodes_what_the_client_of_jopeq_encoded_bit_for_bit() -> None:
    seen: dict[str, Any] = {}

    class Recording(JoPEQFedAvg):
        def decoded(self, codes: Any, reply: Any) -> Any:
            seen[reply.client_id] = super().decoded(codes, reply)
            return seen[reply.client_id]

    run(
        Recording(epsilon=4.0, bits=7, loop=LoopOptions(seed=3, experiment_id="e")),
        JoPEQFedAvgClient,
    )
    codec = JoPEQ(epsilon=4.0, bits=7)
    for client in range(4):
        seed, noise = derive_seed(3, "dither", 1), noise_of(client)
        theirs, mine = stream(seed, str(client)), stream(seed, str(client))
        parts = []
        for part in update_of(client):  # each array by itself, on one stream of dither
            codes, scale = codec.encode(part, noise, theirs)
            parts.append(codec.decode(codes, scale, mine))
        np.testing.assert_array_equal(seen[str(client)], np.concatenate(parts))
    assert not np.array_equal(seen["0"], seen["1"])


@pytest.mark.parametrize(
    ("scheme", "bits"),
    [
        *(("mspdq-plain", bits) for bits in (1, 4, 11, 16)),
        *(("mspdq-jopeq", bits) for bits in (4, 11, 16)),
    ],
)
def test_a_code_takes_its_bits_and_nothing_else_travels_but_the_scalars(
    scheme: str, bits: int
) -> None:
    strategy, client, options = SCHEMES[scheme]
    size, heard = 1001, []

    def trained(partition: int) -> Any:
        return np.random.default_rng(partition).normal(size=size)

    one_vector(
        strategy(bits=bits, **options), client, trained, before=listening(heard.append), nodes=3
    )
    assert len(heard) == 3
    for reply in heard:
        (arrays,) = reply.content.array_records.values()
        (metrics,) = reply.content.metric_records.values()
        packed = decode_npy(arrays["codes"].data)
        assert list(arrays) == ["codes"]
        assert packed.dtype == np.uint8
        assert packed.nbytes == math.ceil(bits * size / 8) == packed_bytes(size, bits)
        assert not dict(metrics)
        _, own = Header.read(reply.content[RECORD])
        scalars = {"ends": 2} if scheme == "mspdq-plain" else {"means": 1, "stds": 1}
        assert {name: len(values) for name, values in own.items()} == scalars


@pytest.mark.parametrize("scheme", ["mspdq-fedavg", "mspdq-ldp"])
def test_models_travel_as_float32_and_nothing_else_does(scheme: str) -> None:
    strategy, client, options = SCHEMES[scheme]
    heard: list[Message] = []
    run(strategy(**options), client, before=listening(heard.append))
    for reply in heard:
        (arrays,) = reply.content.array_records.values()
        (metrics,) = reply.content.metric_records.values()
        assert {name: (a.dtype, a.shape) for name, a in arrays.items()} == {
            "layer.weight": ("float32", (2, 3)),
            "0": ("float32", (5,)),
        }
        assert not dict(metrics)
        assert not Header.read(reply.content[RECORD])[1]


def test_what_is_kept_back_keeps_the_servers_values() -> None:
    result = run(QuantizedFedAvg(keep_back=["0"], bits=16), QuantizedFedAvgClient)
    np.testing.assert_array_equal(model_of(result.arrays)["0"], MODEL["0"])
    moved = np.abs(model_of(result.arrays)["layer.weight"] - MODEL["layer.weight"])
    assert (moved > 0.1).all()
    assert "(not sent at all: 0, batches)" in result.guarantee.text()


# -- The averages -----------------------------------------------------------------------------


@pytest.mark.parametrize("cohort", [{}, {"nodes": 2, "clients": 4}])
@pytest.mark.parametrize(
    ("scheme", "options", "near"),
    [
        ("mspdq-fedavg", {}, 1e-6),
        # Nothing is clipped, and there is hardly any noise.
        ("mspdq-ldp", {"clipping_norm": 1e3, "smallest_data": 10**5, "epsilon": 1e5}, 1e-5),
        ("mspdq-jopeq", {"epsilon": 1e4, "bits": 16}, 1e-3),
        ("mspdq-plain", {"bits": 16}, 1e-4),
    ],
)
def test_a_client_that_is_drawn_twice_weighs_twice(
    scheme: str, options: dict[str, Any], near: float, cohort: dict[str, Any]
) -> None:
    strategy_type, client, _ = SCHEMES[scheme]
    nodes = cohort.get("nodes", 4)
    strategy = make(
        strategy_type,
        seed=5,
        replacement=True,
        min_available_nodes=nodes,
        clients=cohort.get("clients"),
        **options,
    )
    result = run(strategy, client, nodes=nodes)
    draws = strategy.draws(1)
    assert sum(draws.values()) == 4
    assert max(draws.values()) > 1
    line = result.history[1]
    assert (line["asked"], line["accumulated"]) == (len(draws), len(draws))
    assert (line["scheme"]["draws"], line["scheme"]["distinct"]) == (4, len(draws))
    models = {int(c): trained_by(int(c)) for c in draws}
    for name in ("layer.weight", "0"):
        expected = sum(count * models[int(c)][name] for c, count in draws.items()) / 4
        np.testing.assert_allclose(model_of(result.arrays)[name], expected, atol=near)
        alike = sum(model[name] for model in models.values()) / len(models)
        assert np.abs(expected - alike).max() > 10 * near


def test_without_replacement_all_weigh_the_same_whatever_they_say() -> None:
    result = run(DrawnFedAvg(), DrawnFedAvgClient)
    expected = np.mean([trained_by(client)["0"] for client in range(4)], axis=0)
    np.testing.assert_allclose(model_of(result.arrays)["0"], expected, rtol=1e-6)


def test_replacement_needs_this_strategys_own_start() -> None:
    class Own(DrawnFedAvg):
        start = Strategy.start

    with pytest.raises(ProtocolError, match="replacement: works only where this strategy's own"):
        run(Own(replacement=True), DrawnFedAvgClient)


SIZE, CLIENTS = 20_000, 4


def test_jopeqs_mean_is_unbiased_and_has_the_variance_of_laplace_noise() -> None:
    epsilon = 20.0  # so large that nothing reaches the end of the range
    sizes = np.array([0.5, 1.0, 2.0, 4.0])

    def trained(client: int) -> Any:
        signs = np.random.default_rng(client).permutation(np.tile([-1.0, 1.0], SIZE // 2))
        return sizes[client] * signs  # has mean 0 and deviation sizes[client]

    mean = one_vector(
        JoPEQFedAvg(epsilon=epsilon, bits=8, loop=LoopOptions(seed=1)), JoPEQFedAvgClient, trained
    )
    error = mean - np.mean([trained(client) for client in range(CLIENTS)], axis=0)
    # An update's error is 3 std times Laplace noise of scale 2 / epsilon, to the second moment.
    variance = np.sum(9 * sizes**2 * 2 * (2 / epsilon) ** 2) / CLIENTS**2
    assert abs(error.mean()) < 4 * math.sqrt(variance / SIZE)
    # Excess kurtosis of the mean: at most that of the Laplace law, 3.
    assert abs(error.var() / variance - 1) < 4 * math.sqrt((2 + 3) / SIZE)


def test_the_mean_of_plain_codes_is_unbiased() -> None:
    def trained(client: int) -> Any:
        return np.random.default_rng(client).uniform(-1, 1, size=SIZE)

    mean = one_vector(QuantizedFedAvg(bits=2), QuantizedFedAvgClient, trained)
    error = mean - np.mean([trained(client) for client in range(CLIENTS)], axis=0)
    # Uniform values on steps of 2/3: a variance of step^2 p (1 - p), in the mean step^2 / 6.
    variance = (2 / 3) ** 2 / 6 / CLIENTS
    assert abs(error.mean()) < 4 * math.sqrt(variance / SIZE)
    assert error.var() == pytest.approx(variance, rel=4 * math.sqrt(2 / SIZE) + 1e-3)


# -- NbAFL ------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", ["gaussian", "laplace"])
def test_the_noise_of_nbafl_has_the_law_and_the_scale_of_the_formula(law: str) -> None:
    budget = {**NBAFL, "epsilon": 4.0, "delta": 1e-3, "exposures": 3}
    strategy = make(
        NbAFL, **budget, law=law, min_train_nodes=1, min_available_nodes=1, experiment_id="e"
    )
    inside = np.full(SIZE, 4.9 / math.sqrt(SIZE))  # of norm 4.9: it is not clipped
    noise = one_vector(strategy, NbAFLClient, lambda _: inside, nodes=1) - inside
    if law == "gaussian":
        expected = stats.norm(scale=nbafl_uplink_sigma(**budget))
    else:
        expected = stats.laplace(scale=3 * 2 * 5.0 / 600 / 4.0)
    assert stats.kstest(noise, expected.cdf).pvalue > 1e-3
    assert strategy.round_metrics(strategy.card())["scale"] == pytest.approx(
        expected.std() / (math.sqrt(2) if law == "laplace" else 1), rel=1e-12
    )


@pytest.mark.parametrize("clip", ["model", "update"])
def test_what_is_clipped_is_the_model_or_its_update(clip: str) -> None:
    strategy = NbAFL(clipping_norm=1.0, smallest_data=10**3, epsilon=1e5, clip=clip)
    result = run(strategy, NbAFLClient)
    start = np.concatenate([MODEL["layer.weight"].ravel(), MODEL["0"]])
    clipped = []
    for client in range(4):
        trained = trained_by(client)
        vector = np.concatenate([trained["layer.weight"].ravel(), trained["0"]])
        centre = start if clip == "update" else np.zeros(11)
        away = vector - centre
        clipped.append(centre + away / max(1.0, np.linalg.norm(away)))
    got = model_of(result.arrays)
    np.testing.assert_allclose(
        np.concatenate([got["layer.weight"].ravel(), got["0"]]),
        np.mean(clipped, axis=0),
        atol=1e-5,
    )


def test_the_server_of_nbafl_adds_noise_where_the_formula_asks_for_it() -> None:
    budget = {**NBAFL, "epsilon": 4.0, "delta": 1e-3, "exposures": 1}
    up = nbafl_uplink_sigma(**budget)
    down = nbafl_downlink_sigma(**budget, rounds=3, clients=4)
    assert down > up / 2

    def last(rounds: int, **options: Any) -> Any:
        strategy = make(NbAFL, **budget, experiment_id="e", **options)
        zeros = np.zeros(SIZE)
        model = one_vector(strategy, NbAFLClient, lambda _: zeros, num_rounds=rounds)
        return model, strategy.round_metrics(strategy.card())["downlink_sigma"]

    noise, sigma = last(3, downlink=True)
    assert sigma == down
    # The server's noise has no seed: six standard errors of a variance.
    expected = up**2 / CLIENTS + down**2
    assert noise.var() == pytest.approx(expected, rel=6 * math.sqrt(2 / SIZE))
    quiet, sigma = last(3)
    assert sigma == 0
    assert quiet.var() == pytest.approx(up**2 / CLIENTS, rel=6 * math.sqrt(2 / SIZE))
    # Two rounds of four clients are no more than exposures * sqrt(4).
    few, sigma = last(2, downlink=True)
    assert sigma == 0
    np.testing.assert_array_equal(few, last(2)[0])


def test_noise_on_the_way_down_needs_this_strategys_own_start() -> None:
    class Own(NbAFL):
        start = Strategy.start

    with pytest.raises(ProtocolError, match="downlink: works only where this strategy's own"):
        run(make(Own, **NBAFL, downlink=True), NbAFLClient)


# -- MSP as a baseline of itself --------------------------------------------------------------


def msp(trained: Any, **options: Any) -> Any:
    strategy = make(MSP, **options, min_train_nodes=1, min_available_nodes=1, experiment_id="e")
    return one_vector(strategy, MSPClient, lambda _: trained, nodes=1)


def test_msp_without_mixing_is_the_average_of_the_splits() -> None:
    trained = np.random.default_rng(0).normal(size=SIZE).astype(np.float32)
    factors = msp(trained, mixing_rounds=0, eps_s=0.3) / trained
    assert stats.kstest(factors, stats.uniform(0.3, 1.4).cdf).pvalue > 1e-3


def test_msp_with_laplace_noise_loses_it_in_mixing() -> None:
    trained = np.random.default_rng(0).normal(size=SIZE).astype(np.float32)
    laplace = {"split": "laplace", "scale": 0.5}
    first = msp(trained, mixing_rounds=0, **laplace) - trained
    assert stats.kstest(first, stats.laplace(scale=0.5).cdf).pvalue > 1e-3
    last = msp(trained, mixing_rounds=10, gamma=0.3, **laplace) - trained
    np.testing.assert_allclose(last, 0.4**10 * first, atol=2e-6)
