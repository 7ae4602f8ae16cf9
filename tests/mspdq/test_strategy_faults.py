"""MSP and MSPDQ on real messages: clients that are lost in a round, and clients that lie."""

from typing import Any, ClassVar

import numpy as np
import pytest
from apps import make, record, same
from mixing_training import EXACT, Wire, reference, run, trained, vector

from flwr_privacy.clients import MSPDQClient
from flwr_privacy.simulations.engines.inline import Fault
from flwr_privacy.stragglers import StragglerModel
from flwr_privacy.strategies import MSP, MSPDQ, LoopOptions
from flwr_privacy.wire.identity import client_id_from


def played(
    strategy: Any,
    visible: dict[str, np.ndarray],
    lost: set[tuple[str, int]] = frozenset(),  # type: ignore[assignment]
    draws: dict[str, int] | None = None,
) -> list[np.ndarray]:
    """Return W[0], ..., W[K] by equations (3) and (4), over those that are left."""
    terms = strategy.terms
    v = dict(visible)
    h = {client: 2 * trained(client) - v[client] for client in v}
    draws = draws or dict.fromkeys(v, 1)

    def mean() -> np.ndarray:
        return sum(draws[c] * v[c] for c in v) / sum(draws[c] for c in v)

    averages = [mean()]
    for k in range(terms.rounds):
        for c in list(v):
            flow = terms.gamma * (h[c] - v[c])
            v[c], h[c] = v[c] + terms.kappa * (averages[-1] - v[c]) + flow, h[c] - flow
            if (c, k) in lost:
                del v[c], h[c]
        averages.append(mean())
    return averages


# -- Clients that are lost -----------------------------------------------------------------------


def scheme_of(result: Any, server_round: int = 1) -> tuple[int, int, int]:
    scheme = result.history[server_round]["scheme"]
    return scheme["lost"], scheme["given_up"], scheme["mixing_rounds"]


@pytest.mark.parametrize("kind", ["drop", "crash", "corrupt", "delay"])
@pytest.mark.parametrize("strategy", [MSP, MSPDQ])
def test_a_client_that_is_lost_between_two_exchanges_ends_the_round(
    strategy: Any, kind: str
) -> None:
    fault = Fault(kind=kind, client="2", phase="mix", server_round=1, seconds=0.5)
    mixing = make(strategy, mixing_rounds=2, gamma=0.5, deadline=0.2)
    models: list[Any] = []
    result = run(
        mixing, faults=[fault], num_rounds=2, evaluate_fn=lambda _, arrays: models.append(arrays)
    )
    assert same(models[1], record(EXACT))
    assert result.history[1]["skipped"]
    assert scheme_of(result) == (1, 1, 0)
    assert not result.history[2]["skipped"]
    assert result.history[2]["accumulated"] == 4
    assert scheme_of(result, 2) == (0, 0, 2)
    mean = np.mean([trained(client) for client in range(4)], axis=0)
    np.testing.assert_allclose(vector(models[2]), mean, atol=0.05)


def test_going_on_without_a_client_is_the_mixing_of_those_that_are_left() -> None:
    lost = {("1", 0), ("3", 2)}
    wire = Wire(lost)
    strategy = MSP(mixing_rounds=4, on_dropout="continue", loop=LoopOptions(deadline=0.2))
    result = run(strategy, nodes=5, before=wire)
    expected = played(strategy, wire.first(), lost)
    np.testing.assert_allclose(vector(result.arrays), expected[-1], atol=1e-12)
    unharmed = played(strategy, wire.first())
    assert np.abs(expected[-1] - unharmed[-1]).max() > 0.01
    assert scheme_of(result) == (2, 0, 4)
    assert [len(nodes) for _, nodes in wire.exchanges(1)] == [5, 5, 4, 4, 3]


@pytest.mark.parametrize("interval", ["self", "linf"])
def test_going_on_with_codes_and_draws(interval: str) -> None:
    lost = {("0", 0), ("3", 1)}
    wire = Wire(lost)
    strategy = MSPDQ(
        bits=16,
        mixing_start="global",
        interval=interval,
        mixing_rounds=4,
        on_dropout="continue",
        loop=LoopOptions(deadline=0.2, seed=1),
        replacement=True,
        min_train_nodes=20,
    )
    result = run(strategy, before=wire)
    draws = strategy.draws(1)
    assert len(draws) == 4
    assert len(set(draws.values())) > 1
    # Where a client takes the first step by itself, question 0 is about the second.
    first_asked = 1 if interval == "self" else 0
    expected = played(
        strategy,
        dict.fromkeys(draws, vector(EXACT)),
        {(client, step + first_asked) for client, step in lost},
        draws,
    )
    np.testing.assert_allclose(vector(result.arrays), expected[-1], atol=2e-3)
    assert scheme_of(result) == (2, 0, 4)


@pytest.mark.parametrize("strategy", [MSP, MSPDQ])
@pytest.mark.parametrize("k", [0, 1, 2])
def test_finishing_early_is_as_if_it_had_been_planned(k: int, strategy: Any) -> None:
    options = {"experiment_id": "e", "seed": 1, "kappa": 0.4}
    wire = Wire({("2", k)})
    mixing = make(strategy, mixing_rounds=4, on_dropout="finish", deadline=0.2, **options)
    result = run(mixing, before=wire)
    assert scheme_of(result) == (1, 0, k)
    assert not result.history[1]["skipped"]
    assert same(result.arrays, run(make(strategy, mixing_rounds=k, **options)).arrays)
    longer = run(make(strategy, mixing_rounds=4, **options))
    assert np.abs(vector(result.arrays) - vector(longer.arrays)).max() > 1e-3


def test_without_any_answer_the_round_is_given_up_also_where_it_would_go_on() -> None:
    fault = Fault(kind="drop", phase="mix", server_round=1)
    strategy = MSP(mixing_rounds=2, on_dropout="continue", loop=LoopOptions(deadline=0.2))
    result = run(strategy, faults=[fault])
    assert result.history[1]["skipped"]
    assert scheme_of(result) == (4, 1, 0)
    assert same(result.arrays, record(EXACT))


@pytest.mark.parametrize("interval", ["self", "paper"])
def test_without_the_reference_client_the_round_is_skipped(interval: str, caplog: Any) -> None:
    fault = Fault(kind="drop", client=reference(5), server_round=1)
    strategy = MSPDQ(
        mixing_start="reference",
        interval=interval,
        mixing_rounds=2,
        loop=LoopOptions(seed=5, deadline=0.2),
    )
    wire = Wire()
    with caplog.at_level("WARNING", "flwr.privacy"):
        result = run(strategy, faults=[fault], num_rounds=2, before=wire)
    assert "round 1: the reference client did not answer" in caplog.text
    assert [line.get("skipped") for line in result.history] == [None, True, False]
    assert scheme_of(result) == (0, 1, 0)
    assert [phase for phase, _ in wire.exchanges(1)] == ["train"]


def test_the_reference_client_alone_sends_its_split_and_all_start_from_it() -> None:
    wire = Wire()
    strategy = MSPDQ(
        mixing_start="reference",
        interval="linf",
        mixing_rounds=1,
        loop=LoopOptions(seed=5, experiment_id="e"),
    )
    run(strategy, before=wire)
    sent = {head["client-id"] for head, a in wire.said if head["phase"] == "train" and a}
    assert sent == {reference(5)}
    starts = [m.content["arrays"] for head, m in wire.asked if head["phase"] in ("sync", "mix")]
    assert len(starts) == 8
    for start in starts[1:]:
        np.testing.assert_array_equal(vector(start), vector(starts[0]))
    ratio = vector(starts[0]) / trained(reference(5))
    assert (ratio > 0.29).all()
    assert (ratio < 1.71).all()
    assert np.ptp(ratio) > 0.2


def test_nobody_but_the_reference_client_sets_the_start() -> None:
    class Eager(MSPDQClient):
        def handle(self, phase: str, arrays: Any, fields: Any, train: Any) -> Any:
            if client_id_from(self.context.node_config) == "3":
                fields = {**fields, "refers": True}
            return super().handle(phase, arrays, fields, train)

    wire = Wire()
    assert reference(5) != "3"
    strategy = MSPDQ(
        mixing_start="reference",
        mixing_rounds=2,
        loop=LoopOptions(seed=5, experiment_id="e"),
        on_dropout="continue",
    )
    result = run(strategy, client=Eager, before=wire)
    assert result.history[1]["refused"] == {"names": 1}
    assert result.history[1]["scheme"]["lost"] == 0
    start = next(m.content["arrays"] for head, m in wire.asked if head["phase"] == "sync")
    np.testing.assert_allclose(vector(start) / trained(reference(5)), 1.0, atol=0.8)


@pytest.mark.parametrize("lost", ["2", "0"])
@pytest.mark.parametrize("start", ["independent", "reference", "global"])
def test_who_is_missing_in_the_first_exchange_takes_no_part(start: str, lost: str) -> None:
    seed = next(s for s in range(99) if reference(s) == "1")
    fault = Fault(kind="drop", client=lost)
    strategy = MSPDQ(
        bits=16,
        mixing_start=start,
        mixing_rounds=2,
        gamma=0.49,
        loop=LoopOptions(seed=seed, deadline=0.2),
    )
    wire = Wire()
    result = run(strategy, faults=[fault], before=wire)
    assert result.history[1]["accumulated"] == 3
    assert scheme_of(result) == (0, 0, 2)
    assert {len(nodes) for _, nodes in wire.exchanges(1)[1:]} == {3}
    left = [trained(client) for client in range(4) if str(client) != lost]
    np.testing.assert_allclose(vector(result.arrays), np.mean(left, axis=0), atol=1e-3)


def test_going_on_under_simulated_stragglers() -> None:
    model = StragglerModel(spread=1.0)
    wire = Wire()
    strategy = MSP(
        mixing_rounds=4,
        on_dropout="continue",
        loop=LoopOptions(stragglers=model, deadline=3.0, seed=4),
    )
    result = run(strategy, nodes=8, before=wire)

    def race(clients: Any, phase: str, request: int) -> tuple[set[str], float]:
        when = {"seed": 4, "server_round": 1, "phase": phase, "request": request}
        return model.race(clients, **when, deadline=3.0)

    late, seconds = race(map(str, range(8)), "train", 0)
    here = {client: v for client, v in wire.first().items() if client not in late}
    lost, left = set(), set(here)
    for k in range(4):
        gone, end = race(left, "mix", k)
        lost |= {(client, k) for client in gone}
        left -= gone
        seconds += end
    assert len(late) > 0
    assert len({k for _, k in lost}) > 1
    assert len(left) > 1
    np.testing.assert_allclose(vector(result.arrays), played(strategy, here, lost)[-1], atol=1e-12)
    assert scheme_of(result) == (len(lost), 0, 4)
    assert result.history[1]["late"] == len(late)
    assert result.history[1]["virtual_seconds"] == pytest.approx(seconds)


# -- Parameters ----------------------------------------------------------------------------------


class Hostile(MSPDQClient):
    """Client 2 says something else than it should, in one phase."""

    lie: ClassVar[tuple[str, dict[str, Any]]]

    def handle(self, phase: str, arrays: Any, fields: Any, train: Any) -> Any:
        out, own = super().handle(phase, arrays, fields, train)
        when, lies = self.lie
        if phase == when and client_id_from(self.context.node_config) == "2":
            own = {**own, **{key: value for key, value in lies.items() if key in own}}
        return out, own


@pytest.mark.parametrize(
    ("phase", "lie", "options"),
    [
        ("train", {"scalar": 1e200}, {"interval": "paper"}),
        ("train", {"scalar": 1e30}, {"interval": "linf"}),
        ("mix", {"scalar": 1e200}, {"interval": "paper"}),
        ("train", {"ends": [1e308, 1e308]}, {}),
        ("train", {"ends": [-1e39, -1e39]}, {"mixing_rounds": 0}),
        ("mix", {"half-width": 2.0**99}, {}),
        ("mix", {"half-width": 1e308}, {}),
    ],
)
def test_a_client_that_lies_is_refused_and_the_others_go_on(
    phase: str, lie: dict[str, Any], options: dict[str, Any]
) -> None:
    client = type("Lying", (Hostile,), {"lie": (phase, lie)})
    dtype = np.float16 if lie == {"half-width": 2.0**99} else np.float32
    arrays = {name: array.astype(dtype) for name, array in EXACT.items()}
    strategy = make(MSPDQ, **{"mixing_rounds": 2, "on_dropout": "continue", "seed": 1, **options})
    result = run(strategy, client=client, arrays=arrays, num_rounds=2)
    for line in result.history[1:]:
        assert not line["skipped"]
        assert line["scheme"]["lost"] == (phase == "mix")
        assert sum(line["refused"].values()) == (phase == "train")
    assert np.isfinite(vector(result.arrays)).all()


def test_a_reference_client_that_lies_costs_a_round_and_not_the_training() -> None:
    client = type("Lying", (Hostile,), {"lie": ("train", {"ends": [1e308, 1e308]})})
    result = run(
        MSPDQ(mixing_start="reference", loop=LoopOptions(seed=5)), client=client, num_rounds=12
    )
    skipped = [line["skipped"] for line in result.history[1:]]
    assert 0 < sum(skipped) < 12
