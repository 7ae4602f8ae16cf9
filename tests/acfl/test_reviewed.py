"""Regressions of whole trainings: nodes that come and go, rates of each, budgets, odd rounds."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from acfl_app import (
    FEATURES,
    LABELS,
    NOISED_RECORDS,
    NOISY,
    Array,
    Nodes,
    OwnStart,
    data_of,
    keep_models,
    kill_after,
    late,
    model_after,
    moments_of,
    name_of,
    of_phase,
    run,
    set_noise,
)
from apps import make, same
from conformance import Killed
from flwr.app import Message
from flwr.serverapp.strategy import FedAdam
from grid_tap import tapped

from flwr_privacy.acfl.features import FourierFeatures
from flwr_privacy.clients import acfl_client_app
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.simulations.engines.inline import Fault
from flwr_privacy.strategies import ACFL, DataBounds, Exact, LoopOptions, Weighting
from flwr_privacy.wire.message import RECORD

OF_NOISE = {"record": NOISED_RECORDS, "none": {"noise": "none", "max_records": 20}}
NO_SETUP = {"alpha": 0.0, "learning_rate": 0.02}
RESCALED = {"noise": "none", **NO_SETUP}
ZEROS = np.zeros((FEATURES, LABELS))


def gradients(W: Array, clients: Any) -> list[Array]:
    return [X.T @ (X @ W - Y) for X, Y in map(data_of, clients)]


def entries(state: Path, client: str) -> list[Any]:
    return list(Ledger(state / f"{client}.ledger", data_set=client).entries())


def fields_of(message: Message) -> Any:
    return message.content[RECORD]


def lose(*clients: int, **where: Any) -> list[Fault]:
    """Replies that are refused at once."""
    return [Fault(kind="nan", client=str(client), **where) for client in clients]


# -- Nodes that come and go ----------------------------------------------------------------------


def check_books(strategy: ACFL, state: Path, releases: dict[str, int]) -> None:
    """Check that the card has what the clients' ledgers have, so many releases of each."""
    charges = strategy.card().charges()
    assert {client: len(own) for client, own in charges.items()} == releases
    for client, own in charges.items():
        assert [entry.charge for entry in entries(state, client)] == own


@pytest.mark.parametrize("noise", ["none", "record"])
def test_who_was_away_is_in_the_coded_data_once(
    noise: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_noise(monkeypatch, {}, (1.0, 1.0))
    nodes = Nodes(goes={1: 1}, comes={2: 1})
    strategy = make(ACFL, **OF_NOISE[noise])
    result = run(
        strategy, num_rounds=4, before=nodes.before, evaluate_fn=nodes.after, state=tmp_path
    )
    assert [line["asked"] for line in result.history[1:]] == [4, 3, 4, 4]
    assert len(of_phase(nodes.asked, "setup")) == 4
    assert strategy.members == list("0123")
    assert strategy.coded is not None
    for found, exact in zip(strategy.coded, moments_of(range(4)), strict=True):
        np.testing.assert_allclose(found, exact, atol=1e-5)
    releases = {"0": 5, "1": 4, "2": 5, "3": 5}
    check_books(strategy, tmp_path, releases if noise == "record" else {})
    if noise == "record":
        assert result.guarantee.spent <= 20.0 * (1 + 1e-9)


@pytest.mark.parametrize("options", [{"noise": "none"}, NOISY], ids=["none", "paper"])
def test_a_resumed_training_goes_on_where_the_nodes_have_lost_their_files(
    options: Any, tmp_path: Path
) -> None:
    for name in ("run", "before", "after"):
        (tmp_path / name).mkdir()
    options = {**options, "experiment_id": "e", "seed": 1, "straggler_rate": 0.3}
    options["stragglers"] = late({1: "0", 3: "12"})
    engine = {"num_rounds": 4, "insecure_seed": 3}
    unbroken = run(make(ACFL, **options), **engine)
    options["run_dir"] = tmp_path / "run"
    with pytest.raises(Killed):
        run(make(ACFL, **options, on_round=kill_after(2)), **engine, state=tmp_path / "before")
    resumed = run(make(ACFL, **options, resume=True), **engine, state=tmp_path / "after")
    assert [line["accumulated"] for line in resumed.history[1:]] == [3, 4, 2, 4]
    assert [line["refused"] for line in resumed.history[1:]] == [{}] * 4
    assert same(unbroken.arrays, resumed.arrays)


@pytest.mark.parametrize("noise", ["none", "record"])
def test_who_came_while_the_server_was_away_is_set_up_when_it_goes_on(
    noise: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_noise(monkeypatch, {}, (1.0, 1.0))
    for name in ("run", "state"):
        (tmp_path / name).mkdir()
    options = {**OF_NOISE[noise], "run_dir": tmp_path / "run"}
    with pytest.raises(Killed):
        run(make(ACFL, **options, on_round=kill_after(1)), state=tmp_path / "state")
    strategy, nodes = make(ACFL, **options, resume=True), Nodes()
    result = run(strategy, nodes=6, state=tmp_path / "state", before=nodes.before)
    assert strategy.members == list("012345")
    assert len(of_phase(nodes.asked, "setup")) == 2
    assert [line["asked"] for line in result.history[1:]] == [4, 6, 6]
    assert strategy.coded is not None
    for found, exact in zip(strategy.coded, moments_of(range(6)), strict=True):
        np.testing.assert_allclose(found, exact, atol=1e-5)
    releases = {**dict.fromkeys("0123", 4), "4": 3, "5": 3}
    check_books(strategy, tmp_path / "state", releases if noise == "record" else {})


def test_a_client_that_comes_and_does_not_answer_is_waited_for_until_the_deadline_only() -> None:
    """An answer may take as long as its question lives; at the start that is the timeout."""
    nodes = Nodes(comes={1: 4})
    silent = [Fault(kind="drop", client="4", phase="setup")]
    strategy = ACFL(privacy=Exact(), loop=LoopOptions(deadline=0.3))
    options = {"before": nodes.before, "evaluate_fn": nodes.after, "faults": silent}
    result = run(strategy, **options, timeout=7)
    lives = {m.metadata.dst_node_id: m.metadata.ttl for m in of_phase(nodes.asked, "setup")}
    assert lives.pop(1004) == pytest.approx(0.3)
    assert list(lives.values()) == pytest.approx([7.0] * 4)
    assert [line["asked"] for line in result.history[1:]] == [4, 4, 4]
    assert strategy.members == list("0123")


def test_who_comes_later_changes_the_step_and_the_share_and_not_what_was_seen() -> None:
    nodes = Nodes(comes={1: 4})
    options = {"before": nodes.before, "evaluate_fn": nodes.after, "num_rounds": 2}
    strategy = make(ACFL, noise="none", alpha=0.5, straggler_rate=0.0, fraction_train=0.5)
    lines = [line["scheme"] for line in run(strategy, **options).history[1:]]
    assert [line["straggler_rate"] for line in lines] == pytest.approx([1 - 2 / 4, 1 - 2 / 5])
    largest = [np.linalg.eigvalsh(moments_of(range(count))[0])[-1] for count in (4, 5)]
    assert [line["step"] for line in lines] == pytest.approx([1 / value for value in largest])
    strategy = make(ACFL, noise="none", alpha=0.5, stragglers=late({1: "0"}))
    lines = [line["scheme"] for line in run(strategy, **options).history[1:]]
    assert [line["straggler_rate"] for line in lines] == pytest.approx([1 / 4, 1 / 8])


def test_the_noise_of_who_comes_later_is_in_what_the_server_expects() -> None:
    """SCFL's gradient is less N s W, and N counts those that were set up in a round."""
    nodes, models, s = Nodes(comes={1: 4}), [], 0.3
    options = {"noise": "variances", "sigma1_sq": s, "encoding": "scfl", "max_records": 20}
    strategy = make(ACFL, **options, alpha=0.5, straggler_rate=0.0, learning_rate=0.01)
    keep = keep_models(models)

    def after(server_round: int, arrays: Any) -> None:
        keep(server_round, arrays)
        nodes.after(server_round, arrays)

    start = np.full((FEATURES, LABELS), 0.5)
    result = run(strategy, start=start, num_rounds=2, before=nodes.before, evaluate_fn=after)
    assert [line["scheme"]["members"] for line in result.history[1:]] == [4, 5]
    assert strategy.members == list("01234")
    W, (X, Y) = models[1], strategy.coded
    coded = X.T @ (X @ W - Y) / FEATURES - 5 * s * W
    total = 0.5 * coded + 0.5 * sum(gradients(W, range(5)))
    np.testing.assert_allclose(models[2], W - 0.01 * total, rtol=1e-9)


# -- Rates of each, and who is asked -------------------------------------------------------------


def one_step(strategy: ACFL, **options: Any) -> tuple[Array, list[str], Any]:
    """Return the first step, who was asked, and what the round's line says."""
    nodes = Nodes()
    result = run(strategy, num_rounds=1, before=nodes.before, **options)
    asked = {m.metadata.dst_node_id for m in of_phase(nodes.asked, "train")}
    names = sorted(name_of(nodes.grid._contexts[node]) for node in asked)
    return model_after(result), names, result.history[1]


def test_who_is_not_drawn_counts_as_missing_where_each_has_its_own_rate() -> None:
    rates = {"0": 0.2, "1": 0.5, "2": 0.0, "3": 0.4}
    model, came, _ = one_step(
        make(ACFL, **RESCALED, straggler_rate=rates, fraction_train=0.5, seed=1)
    )
    assert len(came) == 2
    total = sum(
        G / (0.5 * (1 - rates[client]))
        for client, G in zip(came, gradients(ZEROS, came), strict=True)
    )
    np.testing.assert_allclose(model, -0.02 * total, rtol=1e-12)


@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_equal_rates_by_name_are_one_rate(alpha: float, rate: float) -> None:
    options = {**RESCALED, "alpha": alpha, "fraction_train": 0.5, "seed": 3}
    one = run(make(ACFL, **options, straggler_rate=rate))
    each = run(make(ACFL, **options, straggler_rate=dict.fromkeys("0123", rate)))
    np.testing.assert_allclose(model_after(one), model_after(each), rtol=1e-12)


def test_the_share_that_is_asked_is_one_of_those_who_were_set_up() -> None:
    """Two of three members, of four clients: each counts for one and a half."""
    strategy = make(
        ACFL, **{**RESCALED, "alpha": 0.5}, fraction_train=0.5, straggler_rate=0.0, seed=1
    )
    model, came, line = one_step(strategy, faults=lose(3, phase="setup"))
    assert (line["asked"], line["scheme"]["members"], len(came)) == (2, 3, 2)
    assert line["scheme"]["straggler_rate"] == pytest.approx(1 / 3)
    total = 0.5 * sum(gradients(ZEROS, "012")) + 0.5 * 1.5 * sum(gradients(ZEROS, came))
    np.testing.assert_allclose(model, -0.02 * total, rtol=1e-12)


@pytest.mark.parametrize("options", [{"noise": "none"}, RESCALED], ids=["coded", "rescaled"])
def test_a_client_without_a_rate_that_comes_later_is_left_out(options: Any) -> None:
    nodes = Nodes(comes={1: 4})
    strategy = make(ACFL, **options, straggler_rate=dict.fromkeys("0123", 0.1))
    result = run(strategy, before=nodes.before, evaluate_fn=nodes.after)
    assert [line["asked"] for line in result.history[1:]] == [4, 4, 4]
    to_it = [m for m in nodes.asked if m.metadata.dst_node_id == 1004]
    assert {fields_of(message)["phase"] for message in to_it} == {"hello"}


@pytest.mark.parametrize(
    "options", [{}, {"alpha": 0.0, "learning_rate": 0.02}], ids=["setup", "no setup"]
)
def test_a_client_without_a_rate_is_told_before_anything_is_charged(
    options: Any, tmp_path: Path
) -> None:
    rates = {"0": 0.1, "2": 0.1}
    with pytest.raises(InvalidParameterError, match=r"a rate for every client, \['1', '3'\]"):
        run_for_nothing(make(ACFL, **NOISED_RECORDS, **options, straggler_rate=rates), tmp_path)


def run_for_nothing(strategy: ACFL, state: Path, **options: Any) -> None:
    """Train, and check that whatever ends it does so before anything is asked or charged."""
    nodes = Nodes()
    try:
        run(strategy, state=state, before=nodes.before, **options)
    finally:
        assert {fields_of(message)["phase"] for message in nodes.asked} == {"hello"}
        assert not list(state.glob("*.ledger"))


def test_under_a_users_own_start_answers_without_a_rate_are_refused() -> None:
    """Who there is shows only by the answers."""
    strategy = make(OwnStart, **RESCALED, straggler_rate={"0": 0.2, "2": 0.5})
    model = model_after(run(strategy, num_rounds=1))
    first, third = gradients(ZEROS, "02")
    np.testing.assert_allclose(model, -0.02 * (first / 0.8 + third / 0.5), rtol=1e-9)


def test_under_a_users_own_start_an_unknown_rate_is_that_of_those_who_were_asked() -> None:
    model = model_after(run(make(OwnStart, **RESCALED), faults=lose(1, 2), num_rounds=1))
    np.testing.assert_allclose(model, -0.02 * 2 * sum(gradients(ZEROS, "03")), rtol=1e-9)
    plain = model_after(run(make(ACFL, **RESCALED), faults=lose(1, 2), num_rounds=1))
    np.testing.assert_allclose(model, plain, rtol=1e-9)


@pytest.mark.parametrize("rates", [0.1, dict.fromkeys("0123", 0.1)], ids=["one", "each"])
@pytest.mark.parametrize("seed", [None, 1])
def test_noise_from_a_seed_makes_the_promise_void_without_a_setup_too(
    rates: Any, seed: int | None
) -> None:
    options = {**NOISED_RECORDS, **NO_SETUP, "straggler_rate": rates}
    guarantee = run(make(ACFL, **options), insecure_seed=seed, num_rounds=1).guarantee
    assert ("insecure seed" in guarantee.void) == (seed is not None)


# -- The estimate of beta^2 ----------------------------------------------------------------------


def test_beta2_with_a_rate_of_each_and_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """All noise that is drawn is 0, so what its expectation takes off can be seen.

    Of each norm ``c_i = sqrt(p_i) / (1 - p_i)`` parts are added up, with noise of the variance
    ``sum c_i^2 sigma^2`` / 0.1^2; the mean is over all clients.
    """
    set_noise(monkeypatch, {}, (1.0, 1.0))
    rates, asked = {"0": 0.1, "1": 0.3, "2": 0.2, "3": 0.05}, []
    options = {"epsilon": 400.0, "max_records": 20, "clipping_norm": 2.5, "straggler_rate": rates}
    strategy = make(ACFL, **options)
    result = run(strategy, num_rounds=1, before=tapped(asked.append))
    sent = fields_of(of_phase(asked, "train")[0])
    sigma = sent["noise-multiplier"] * 2.5 * 1.001 * math.hypot(1, 0.1)
    parts = [math.sqrt(p) / (1 - p) for p in rates.values()]
    norms = [np.linalg.norm(G) for G in gradients(ZEROS, "0123")]
    square = sum(c * norm for c, norm in zip(parts, norms, strict=True)) ** 2
    noise = sum(c**2 for c in parts) * sigma**2 / 0.1**2
    assert 0.05 * square < noise < square
    assert result.history[1]["scheme"]["beta2"] == pytest.approx((square - noise) / 16, rel=1e-3)


def test_beta2_of_exact_gradients_in_a_secure_sum_is_exact_near_a_minimum() -> None:
    """A square of 1e-6 beside the largest that there could be, 1e3: one code has no room for it."""
    truth = np.random.default_rng(0).uniform(-0.3, 0.3, (FEATURES, LABELS))
    data = {str(i): (data_of(i)[0], data_of(i)[0] @ truth) for i in range(5)}
    app = acfl_client_app(lambda context: data[name_of(context)])
    models: list[Array] = []
    strategy = ACFL(
        privacy=Exact(),
        weighting=Weighting(alpha=0.5, straggler_rate=0.1),
        learning_rate=0.02,
        data=DataBounds(max_records=20),
        secure_sum=SecureSum(),
        loop=LoopOptions(stragglers=late({2: "1"})),
    )
    start = truth + 1e-5 * np.ones_like(truth)
    result = run(strategy, app, start=start, nodes=5, num_rounds=3, evaluate_fn=keep_models(models))
    for t, line in enumerate(result.history[1:]):
        squares = [
            ((X.T @ (X @ models[t] - Y)) ** 2).sum()
            for client, (X, Y) in data.items()
            if (t, client) != (1, "1")
        ]
        assert np.mean(squares) < 1e-6
        assert line["scheme"]["beta2"] == pytest.approx(np.mean(squares), rel=1e-6)


# -- What is refused before the setup ------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    "options", [{}, {"alpha": 0.0, "learning_rate": 0.02}], ids=["setup", "no setup"]
)
def test_a_start_that_is_not_finite_costs_nothing(
    options: Any, value: float, tmp_path: Path
) -> None:
    start = ZEROS.copy()
    start[1, 1] = value
    with pytest.raises(InvalidParameterError, match="initial_arrays = 'NaN or infinity'"):
        run_for_nothing(make(ACFL, **NOISED_RECORDS, **options), tmp_path, start=start)


@pytest.mark.parametrize(
    ("secure_sum", "fraction", "text"),
    [
        (SecureSum(threshold=4), 0.5, "secure_sum.threshold = 4: expected at most the 3 clients"),
        (SecureSum(), 0.2, "cohort = 1: expected at least 2 clients"),
    ],
    ids=["threshold", "cohort"],
)
def test_a_secure_sum_that_no_round_can_fill_costs_nothing(
    secure_sum: SecureSum, fraction: float, text: str, tmp_path: Path
) -> None:
    options = {"fraction_train": fraction, "min_train_nodes": 1, "secure_sum": secure_sum}
    with pytest.raises(InvalidParameterError, match=text):
        run_for_nothing(make(ACFL, **NOISED_RECORDS, **options), tmp_path, nodes=6)
    # Coded data alone need no sum of a round.
    strategy = make(ACFL, **NOISED_RECORDS, **options, alpha=1.0)
    run(strategy, nodes=6, num_rounds=1)
    assert strategy.members == list("012345")


# -- Rounds without an answer --------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"alpha": 1.0}, {"alpha": 0.5, "straggler_rate": 0.2}, {"straggler_rate": 0.2}],
    ids=["coded only", "not adaptive", "adaptive"],
)
def test_a_server_optimiser_makes_the_steps_by_the_coded_data_alone(options: Any) -> None:
    """Adam as Flower has it, on steps of which the history tells the weights; round 2 is empty."""
    models: list[Array] = []
    strategy = make(
        ACFL,
        noise="none",
        **options,
        learning_rate=0.02,
        inner=FedAdam(eta=0.1, beta_1=0.9, beta_2=0.99, tau=1e-3),
    )
    faults = [Fault(kind="nan", server_round=2)]
    result = run(strategy, faults=faults, evaluate_fn=keep_models(models))
    A, B = moments_of(range(4))
    W, m, v = ZEROS, 0.0 * ZEROS, 0.0 * ZEROS
    for t, line in enumerate(result.history[1:], start=1):
        scheme, full = line["scheme"], A @ W - B
        came = t != 2 and options.get("alpha") != 1.0
        delta = -0.02 * (scheme["alpha"] + came * scheme["received_weight"]) * full
        m, v = 0.9 * m + 0.1 * delta, 0.99 * v + 0.01 * delta**2
        rate = 0.1 * math.sqrt(1 - 0.99 ** (t + 1)) / (1 - 0.9 ** (t + 1))
        W = W + rate * m / (np.sqrt(v) + 1e-3)
        np.testing.assert_allclose(models[t], W, rtol=1e-9)
        assert not line["skipped"]


# -- What the server tells its clients and its user ----------------------------------------------


def test_a_feature_maps_own_bounds_are_the_defaults() -> None:
    embed = FourierFeatures(raw=FEATURES, features=8, width=1.0, seed=0)
    app = acfl_client_app(lambda context: data_of(name_of(context)), features=embed)

    def asked_of(**options: Any) -> Any:
        asked: list[Message] = []
        run(
            make(ACFL, noise="none", alpha=0.5, features=embed, **options),
            app,
            start=np.zeros((8, LABELS)),
            num_rounds=1,
            before=tapped(asked.append),
        )
        return fields_of(of_phase(asked, "setup")[0])

    sent = asked_of()
    assert sent["feature-bound"] == pytest.approx(math.sqrt(2 / 8))
    assert sent["feature-norm"] == pytest.approx(math.sqrt(2))
    assert asked_of(feature_norm=3.0)["feature-bound"] == pytest.approx(0.5)
    sent = asked_of(feature_bound=0.75, feature_norm=1.5)
    assert (sent["feature-bound"], sent["feature-norm"]) == (0.75, 1.5)


@pytest.mark.parametrize("secure_sum", [None, SecureSum()], ids=["alone", "summed"])
@pytest.mark.parametrize("options", [NOISY, {"noise": "none"}], ids=["paper", "none"])
def test_coded_data_alone_leave_no_gradients_to_speak_of(options: Any, secure_sum: Any) -> None:
    for alpha in (1.0, 0.5):
        strategy = make(ACFL, **options, alpha=alpha, learning_rate=0.01, secure_sum=secure_sum)
        guarantee = run(strategy, num_rounds=1).guarantee
        told = " ".join((guarantee.protects, *guarantee.not_protected))
        assert ("gradient" in told) == (alpha != 1.0)
