"""ACFL under a secure sum, on real messages."""

import logging
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
    data_of,
    descend,
    keep_models,
    late,
    model_after,
    moments_of,
    name_of,
    run,
    set_noise,
    wish_of,
)
from apps import make, same
from flwr.app import Context, Message, RecordDict
from grid_tap import tapped
from pinned import pinned_nodes

from flwr_privacy.acfl.plan import ACFLPlan
from flwr_privacy.clients import acfl_client_app
from flwr_privacy.errors import InvalidParameterError, ProtocolError
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.simulations.engines.inline import Fault
from flwr_privacy.stragglers import StragglerModel
from flwr_privacy.strategies import ACFL, Weighting
from flwr_privacy.wire.message import RECORD

SHAPE = (FEATURES, LABELS)
DEVICES = [data_of(i) for i in range(5)]
SLOW = late({1: "0", 2: "13", 4: "2"})


def five(strategy: ACFL, **options: Any) -> Any:
    return run(strategy, **{"nodes": 5, **options})


def lose(*clients: int, **where: Any) -> list[Fault]:
    """Replies that are refused at once."""
    return [Fault(kind="nan", client=str(client), **where) for client in clients]


# -- It trains as without ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"noise": "none", "straggler_rate": 0.3},
        {"noise": "none", "alpha": 0.5, "straggler_rate": 0.3},
        {"noise": "none", "alpha": 0.0, "learning_rate": 0.02},
        {**NOISY, "alpha": 0.5, "symmetric_noise": True, "straggler_rate": 0.3},
        {**NOISED_RECORDS, "alpha": 0.5, "straggler_rate": 0.3},
    ],
    ids=["ideal", "not adaptive", "rescaled", "as printed", "record"],
)
def test_but_for_the_noise_it_is_the_same_training(
    options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the grids, whose steps here are below 1e-6: all noise that clients draw is 0."""
    set_noise(monkeypatch, {}, (1.0, 1.0))
    options = {"max_records": 20, "stragglers": SLOW, "learning_rate": 0.02, **options}
    models: list[Array] = []
    seen = five(make(ACFL, **options), num_rounds=4, evaluate_fn=keep_models(models))
    summed = five(make(ACFL, **options, secure_sum=SecureSum()), num_rounds=4)
    assert np.abs(models[4] - models[0]).max() > 0.05
    np.testing.assert_allclose(model_after(summed), model_after(seen), atol=1e-5)
    for line, twin in zip(seen.history[1:], summed.history[1:], strict=True):
        for key in ("alpha", "received_weight", "C2", "straggler_rate"):
            assert line["scheme"][key] == pytest.approx(twin["scheme"][key], abs=1e-5)
        assert line["accumulated"] == twin["accumulated"]


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_as_printed_it_is_the_papers_algorithm_with_the_noise_of_the_sum(rate: float) -> None:
    """N shares of half of the energy each."""
    strategy = make(
        ACFL,
        **NOISY,
        straggler_rate=rate,
        learning_rate=0.02,
        stragglers=SLOW,
        secure_sum=SecureSum(),
    )
    result = five(strategy, num_rounds=4)
    assert strategy.coded is not None
    A, B = moments_of(range(5))
    answered = [(1, 2, 3, 4), (0, 2, 4), range(5), (0, 1, 3, 4)]
    expected = descend(
        np.zeros(SHAPE),
        DEVICES,
        answered,
        p=rate,
        s1=0.4 / 2,
        s2=0.1 / 2,
        noise=(strategy.coded.features - A, strategy.coded.labels - B),
        step=lambda t: 0.02,
    )
    np.testing.assert_allclose(model_after(result), expected[4], atol=1e-5)


# -- The noise in the sum ------------------------------------------------------------------------

WIDE = 50


@pytest.mark.parametrize("colluders", [1, 2])
@pytest.mark.parametrize("mode", ["record", "paper"])
def test_the_noise_of_the_sum_is_what_is_promised_or_more(mode: str, colluders: int) -> None:
    """Three of five open a sum, of whom some collude: the others' shares make the whole noise."""
    options = {"record": NOISED_RECORDS, "paper": NOISY}[mode]

    def data_fn(context: Context) -> tuple[Array, Array]:
        draws = np.random.default_rng(int(name_of(context)))
        return draws.uniform(-1, 1, (20, WIDE)), draws.uniform(-1, 1, (20, LABELS))

    strategy = make(ACFL, **options, alpha=1.0, secure_sum=SecureSum(colluders=colluders))
    result = five(
        strategy,
        app=acfl_client_app(data_fn),
        start=np.zeros((WIDE, LABELS)),
        num_rounds=1,
        insecure_seed=4,
    )
    assert strategy.coded is not None
    contexts = (Context(1, 1, {"partition-id": i}, RecordDict(), {}) for i in range(5))
    exact = sum(X.T @ X for X, _ in map(data_fn, contexts))
    off = strategy.coded.features - exact
    plan = ACFLPlan(
        options=wish_of(**options, alpha=1.0), features=WIDE, labels=LABELS, rounds=1
    ).setup_terms(parties=0)
    honest = 3 - colluders
    expected = plan.sigma_features**2 * 5 / honest
    assert abs((off**2).mean() / expected - 1) < 5 * math.sqrt(2 / off.size)
    if mode == "record":
        assert result.guarantee.spent == pytest.approx(20.0, rel=1e-3)
        text = result.guarantee.text()
        assert f"3 of 5, of whom at most {colluders} collude with the server" in text


def test_the_paper_promises_what_the_sum_leaks_and_nothing_more() -> None:
    text = five(make(ACFL, **NOISY, secure_sum=SecureSum()), num_rounds=1).guarantee.text()
    assert "protects nothing that lasts" in text
    assert "exact sums of gradients give them exactly" in text
    assert "sums over at least 3 of 5 clients and no single vector" in text


# -- What is on the wire -------------------------------------------------------------------------


@pytest.mark.parametrize("options", [NOISY, NOISED_RECORDS], ids=["paper", "record"])
def test_nothing_leaves_a_client_but_masked_vectors(options: Any, tmp_path: Path) -> None:
    said: list[Message] = []
    strategy = make(ACFL, **options, straggler_rate=0.2, secure_sum=SecureSum())
    result = five(strategy, num_rounds=2, before=tapped(said=said.append), state=tmp_path)
    head = {"scheme", "version", "experiment-id", "phase", "round", "request", "client-id"}
    vectors = [m for m in said if m.content[RECORD]["phase"] in ("setup", "train")]
    assert len(vectors) == 15
    for message in vectors:
        assert set(message.content) == {"arrays", "metrics", RECORD}
        assert set(message.content[RECORD]) == head | {"ledger-count", "ledger-head"}
        assert dict(message.content["metrics"]) == {}
        (masked,) = message.content["arrays"].values()
        bits = result.history[1]["scheme"]["sum_modulus_bits"]
        sizes = 2 if options is NOISY else 1  # of an exact gradient: a square, in two codes
        entries = 9 + 6 if message.content[RECORD]["phase"] == "setup" else 6 + sizes
        assert masked.numpy().dtype == np.uint8
        assert masked.numpy().size == math.ceil((entries + 1) * bits / 8)
    others = {m.content[RECORD]["phase"] for m in said} - {"setup", "train"}
    assert others == {"hello", "keys", "shares"}
    for line in result.history[1:]:
        assert (line["train"], line["evaluate"]) == ({}, {})
    for client in "01234":
        entries = Ledger(tmp_path / f"{client}.ledger", data_set=client).entries()
        own = strategy.card().charges().get(client, [])
        assert [e.charge for e in entries if e.scheme == "acfl"] == own


# -- Clients that are lost -----------------------------------------------------------------------


def test_a_sum_is_of_those_who_are_left() -> None:
    options = {"noise": "none", "alpha": 0.5, "straggler_rate": 0.2, "learning_rate": 0.02}
    strategy = make(ACFL, **options, max_records=20, secure_sum=SecureSum())
    faults = [*lose(1, phase="setup"), *lose(0, 4, server_round=1)]
    result = five(strategy, faults=faults, num_rounds=2)
    # Those who deal for round 1 are drawn before the setup is opened, and without client 1.
    assert strategy.members == ["0", "2", "3", "4"]
    assert strategy.coded is not None
    np.testing.assert_allclose(strategy.coded.features, moments_of("0234")[0], atol=1e-5)
    assert [line["asked"] for line in result.history[1:]] == [4, 4]


def test_too_few_gradients_leave_the_coded_data(caplog: Any) -> None:
    """Round 1: nothing to weigh by. Round 3: the weights of the last answers."""
    options = {**NOISY, "straggler_rate": 0.4, "learning_rate": 0.02}
    strategy = make(ACFL, **options, secure_sum=SecureSum())
    models: list[Array] = []
    faults = [*lose(0, 1, 2, server_round=1), *lose(1, 2, 3, server_round=3)]
    with caplog.at_level(logging.WARNING, "flwr.privacy"):
        result = five(strategy, faults=faults, num_rounds=4, evaluate_fn=keep_models(models))
    assert caplog.text.count("2 of at least 3 clients sent a vector that can be used") == 2
    assert [line["scheme"]["sum_opened"] for line in result.history[1:]] == [0, 5, 0, 5]
    assert [line["skipped"] for line in result.history[1:]] == [True, False, False, False]
    assert strategy.coded is not None
    second, third = (result.history[i]["scheme"] for i in (2, 3))
    assert third["beta2"] == second["beta2"]
    D = 3 * (0.4 / 2) * (models[2] ** 2).sum() + 6 * 0.1 / 2
    a = 0.4 * third["beta2"] / (0.4 * third["beta2"] + 0.6 * D)
    assert third["alpha"] == pytest.approx(a)
    coded = strategy.coded.features @ models[2] - strategy.coded.labels
    np.testing.assert_allclose(models[3], models[2] - 0.02 * a * coded, rtol=1e-9)


@pytest.mark.parametrize("phase", ["setup", "shares"])
def test_a_setup_of_too_few_ends_the_run(phase: str) -> None:
    faults = lose(0, 1, 2, phase=phase)
    if phase == "shares":
        faults = [Fault(kind="crash", client=str(i), phase=phase) for i in range(3)]
    with pytest.raises(ProtocolError, match="the setup"):
        five(make(ACFL, **NOISY, secure_sum=SecureSum()), faults=faults, timeout=1)


def test_the_setup_waits_for_all_and_the_rounds_do_not() -> None:
    slow = StragglerModel(kind="constant", seconds=2.0)
    options = {"noise": "none", "straggler_rate": 0.5, "max_records": 20, "seed": 1}
    strategy = make(ACFL, **options, stragglers=slow, deadline=1.0, secure_sum=SecureSum())
    result = five(strategy, num_rounds=2)
    assert strategy.members == list("01234")
    assert result.history[1]["late"] == 5
    assert [line["skipped"] for line in result.history[1:]] == [True, True]


def test_a_node_that_answers_in_large_sums_only(tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text("min_summed = 4\n")
    nodes = pinned_nodes(tmp_path, list("01234"))
    nodes[3]["privacy-policy"] = str(policy)
    for secure_sum, members in (
        (None, "0124"),
        (SecureSum(threshold=3), "0124"),
        (SecureSum(threshold=4), "01234"),
    ):
        strategy = make(ACFL, **NOISED_RECORDS, secure_sum=secure_sum)
        run(strategy, nodes=nodes, num_rounds=1)
        assert "".join(strategy.members) == members


# -- A secure sum and the rest -------------------------------------------------------------------


def test_a_client_that_comes_later_has_no_place_in_a_sum(caplog: Any) -> None:
    grids: list[Any] = []

    def evaluate(server_round: int, _: Any) -> None:
        if server_round == 1:
            contexts = grids[0]._contexts
            other = next(iter(contexts.values()))
            config = {**other.node_config, "partition-id": 5}
            contexts[12345] = Context(other.run_id, 12345, config, RecordDict(), {})

    strategy = make(ACFL, **NOISY, straggler_rate=0.2, secure_sum=SecureSum())
    with caplog.at_level(logging.WARNING, "flwr.privacy"):
        result = five(strategy, before=grids.append, evaluate_fn=evaluate, num_rounds=4)
    assert "clients ['5'] came after the setup and take no part" in caplog.text
    assert [line["asked"] for line in result.history[1:]] == [5, 5, 5, 5]
    assert [line["scheme"]["sum_opened"] for line in result.history[1:]] == [5, 5, 5, 5]


def test_cohorts_equal_one_node_per_client() -> None:
    options = {**NOISED_RECORDS, "experiment_id": "e", "seed": 3, "secure_sum": SecureSum()}
    plain = five(make(ACFL, **options), insecure_seed=5)
    cohort = run(make(ACFL, **options, clients=5), nodes=2, insecure_seed=5)
    assert same(plain.arrays, cohort.arrays)


def test_each_own_rate_would_need_to_see_each_gradient() -> None:
    with pytest.raises(InvalidParameterError, match="one rate of all under a secure sum"):
        ACFL(weighting=Weighting(straggler_rate={"0": 0.2}), secure_sum=SecureSum())
