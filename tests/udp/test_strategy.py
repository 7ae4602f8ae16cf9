"""UDP's two halves together: equal weights, what is on the card, and what is refused."""

import json
import logging
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from apps import MODEL, make, message_app, record, run_strategy
from conformance import dying
from flwr.app import ArrayRecord, Context, Message, MetricRecord
from flwr.serverapp.strategy import FedAdam

from flwr_privacy.clients import UDPClient, as_mod
from flwr_privacy.errors import CheckpointError, InvalidParameterError
from flwr_privacy.privacy.card import Answers, PrivacyCard
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.privacy.updates import released_names
from flwr_privacy.simulations.engines.inline import Fault
from flwr_privacy.strategies import UDP, LoopOptions, UserLevel
from flwr_privacy.wire.message import TRAIN


@pytest.mark.usefixtures("no_pld")
def test_F22_equal_weights_at_user_level_and_a_mean_of_all(tmp_path: Path) -> None:
    """With an epsilon without meaning the result is the mean of the clipped updates (F14)."""
    strategy = UDP(
        privacy=UserLevel(epsilon=1e6, clipping_norm=0.5), rounds=1, loop=LoopOptions(seed=1)
    )
    result = run_strategy(strategy, message_app([as_mod(UDPClient)]), num_rounds=1)
    expected = {name: np.array(array, float) for name, array in MODEL.items()}
    names = released_names(MODEL)
    for client in range(4):
        moved = {n: (MODEL[n] * (1 + client / 10) + client / 3).astype(np.float32) for n in names}
        update = {n: moved[n].astype(float) - MODEL[n] for n in names}
        norm = math.sqrt(sum((u**2).sum() for u in update.values()))
        for name in names:
            expected[name] += update[name] * min(1, 0.5 / max(norm, 1e-9)) / 4
    sigma = result.history[1]["train"]["sigma"]
    for name in names:
        np.testing.assert_allclose(
            result.arrays[name].numpy(), expected[name], atol=6 * sigma / 2 + 1e-5
        )
    assert result.arrays["batches"].numpy() == MODEL["batches"]


def test_integers_and_statistics_are_kept_back_and_named(tmp_path: Path) -> None:
    model = {
        "w": np.zeros(4, np.float32),
        "bn.running_mean": np.ones(4, np.float32),
        "bn.num_batches_tracked": np.array(3),
        "0": np.ones(2),
    }
    strategy = UDP(
        rounds=1, keep_back=["0"], privacy=UserLevel(epsilon=100.0), loop=LoopOptions(seed=1)
    )
    app = message_app([as_mod(UDPClient)])
    result = run_strategy(strategy, app, num_rounds=1, arrays=record(model))
    assert result.history[1]["accumulated"] == 4
    for name in ("bn.running_mean", "bn.num_batches_tracked", "0"):
        np.testing.assert_array_equal(result.arrays[name].numpy(), model[name])
    assert (result.arrays["w"].numpy() != 0).all()
    text = result.guarantee.text()
    assert "0, bn.num_batches_tracked, bn.running_mean" in text


def test_a_seed_of_the_node_voids_the_guarantee(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        strategy = UDP(privacy=UserLevel(), rounds=1, loop=LoopOptions(seed=1))
        app = message_app([as_mod(UDPClient)])
        result = run_strategy(strategy, app, num_rounds=1, insecure_seed=5)
    assert "draws its noise from a seed" in caplog.text
    assert result.guarantee.void
    assert result.guarantee.text().startswith("VOID: clients drew their noise from an insecure")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"epsilon": 0.0}, "epsilon = 0.0"),
        ({"epsilon": -1}, "epsilon = -1"),
        ({"epsilon": math.nan}, "epsilon = nan"),
        ({"delta": 0.0}, "delta = 0.0"),
        ({"delta": 1.0}, "delta = 1.0"),
        ({"clipping_norm": 0.0}, "clipping_norm = 0.0"),
        ({"clipping_norm": -1.0}, "clipping_norm = -1.0"),
        ({"unit": "client"}, "unit = 'client'"),
        ({"unit": "record"}, "RecordLevel needs 'learning_rate'"),
        ({"learning_rate": 0.1}, "learning_rate': only with unit=record"),
        ({"unit": "record", "learning_rate": 0.0}, "learning_rate = 0.0"),
        ({"noise": "no"}, "noise = 'no'"),
        ({"rounds": 0}, "rounds = 0"),
        ({"grid_bits": 31}, "grid_bits = 31"),
        ({"sampling_rate": 0.5}, "sampling_rate': only with unit=record"),
    ],
)
def test_parameters_that_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        make(UDP, **options)


def test_names_to_keep_back_are_the_models(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match=r"keep_back = \['nonesuch'\]"):
        run_strategy(
            UDP(privacy=UserLevel(), keep_back=["nonesuch"]), message_app([as_mod(UDPClient)])
        )


def test_a_start_of_ones_own_has_to_say_how_many_rounds_there_are() -> None:
    from flwr.serverapp.strategy import Strategy

    class Own(UDP):
        start = Strategy.start

    with pytest.raises(InvalidParameterError, match="rounds = None"):
        run_strategy(Own(privacy=UserLevel()), message_app([as_mod(UDPClient)]))


def test_the_card_has_every_charge_also_of_replies_that_were_lost_or_late(tmp_path: Path) -> None:
    faults = [
        Fault(kind="drop", client="1", server_round=1),
        Fault(kind="corrupt", client="2", server_round=2),
    ]
    strategy = UDP(privacy=UserLevel(), loop=LoopOptions(seed=1, run_dir=tmp_path, deadline=0.5))
    result = run_strategy(strategy, message_app([as_mod(UDPClient)]), faults=faults)
    assert [line["accumulated"] for line in result.history[1:]] == [3, 3, 4]
    card = PrivacyCard.from_json((tmp_path / "privacy-card.json").read_text())
    assert [release.clients for release in card.releases] == [("0", "1", "2", "3")] * 3
    # A corrupt reply is one; only nothing of it is used.
    assert [release.unanswered for release in card.releases] == [("1",), (), ()]
    numbers = card.verify()
    assert set(numbers) == {"gdp", "rdp", "pld"}
    assert card.guarantee.spent == numbers["gdp"][1] == pytest.approx(8.0, rel=1e-6)
    assert numbers["gdp"][1] == pytest.approx(numbers["pld"][1], rel=1e-3)
    assert "differential privacy" in (tmp_path / "privacy-card.html").read_text()
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["scheme"]["epsilon"] == pytest.approx(8.0, rel=1e-6)
    assert line["scheme"]["epsilon_left"] == pytest.approx(0.0, abs=1e-5)


def test_a_client_that_fails_before_it_releases_is_not_charged(tmp_path: Path) -> None:
    app = message_app([as_mod(UDPClient)])
    policy = tmp_path / "policy.toml"
    policy.write_text('schemes = ["fedavg"]')
    nodes = [{"client-id": name, "partition-id": i} for i, name in enumerate("abcd")]
    nodes[1]["privacy-policy"] = str(policy)
    strategy = UDP(privacy=UserLevel(), loop=LoopOptions(seed=1))
    result = run_strategy(strategy, app, nodes=nodes)
    assert result.history[1]["refused"] == {"declined": 1}
    assert all(release.clients == ("a", "c", "d") for release in strategy.releases)
    assert strategy.card().answers() == Answers(charged=9, unanswered=0, untold=0)


@pytest.mark.parametrize("cohorts", [False, True])
def test_what_fails_after_its_charge_counts_alike_on_the_card_and_in_the_ledger(
    tmp_path: Path, cohorts: bool
) -> None:
    """The training of client 1 raises in round 2: a simulated client says so, and is charged."""

    def failing(message: Message, context: Context, call_next: Any) -> Message:
        asked = message.content["config"]["server-round"], context.node_config["partition-id"]
        if message.metadata.message_type == "train" and asked == (2, 1):
            raise RuntimeError
        return call_next(message, context)

    loop = LoopOptions(seed=1, clients=4 if cohorts else None)
    strategy = UDP(privacy=UserLevel(), loop=loop, min_available_nodes=2)
    app = message_app([as_mod(UDPClient), failing])
    run_strategy(strategy, app, nodes=2 if cohorts else 4, state=tmp_path)
    assert [release.unanswered for release in strategy.releases] == [(), ("1",), ()]
    assert str(strategy.card().answers()) == "12 charged, 11 answered, 1 never answered"
    for client in "0123":
        missing = Ledger(tmp_path / f"{client}.ledger", data_set=client).unanswered()
        expected = [2] if client == "1" else []
        assert [entry.question.server_round for entry in missing] == expected


@pytest.mark.usefixtures("real_time")
def test_an_answer_that_comes_too_late_to_be_used_is_one(tmp_path: Path) -> None:
    late = Fault(kind="delay", client="1", server_round=1, seconds=0.8)
    strategy = UDP(
        privacy=UserLevel(),
        loop=LoopOptions(seed=1, quorum=3, run_dir=tmp_path),
        min_available_nodes=2,
        fraction_train=1.0,
    )
    shown: list[Any] = []

    def wait(server_round: int, arrays: Any) -> None:
        shown.append(list(strategy.releases))
        if server_round == 1:
            time.sleep(1.2)

    run_strategy(strategy, message_app([as_mod(UDPClient)]), faults=[late], evaluate_fn=wait)
    assert shown[1][0].clients == ("0", "1", "2", "3")
    assert shown[1][0].unanswered == ("1",)
    assert strategy.releases[0].clients == ("0", "1", "2", "3")
    assert strategy.releases[0].unanswered == ()
    assert PrivacyCard.from_json((tmp_path / "privacy-card.json").read_text()).verify()


def test_a_resume_with_other_terms_is_refused(tmp_path: Path) -> None:
    app = message_app([as_mod(UDPClient)])

    def interrupted(line: dict[str, Any]) -> None:
        if line["round"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_strategy(
            UDP(
                privacy=UserLevel(),
                loop=LoopOptions(seed=1, run_dir=tmp_path, on_round=interrupted),
            ),
            app,
        )
    for options, rounds, text in (
        ({"epsilon": 9.0}, 3, "calibrated for epsilon = 8.0, not 9.0"),
        ({"clipping_norm": 2.0}, 3, "calibrated for clipping_norm = 1.0, not 2.0"),
        ({"unit": "record", "learning_rate": 1.0}, 3, "calibrated for unit = 'user'"),
        ({}, 30, "calibrated for rounds = 3, not 30"),
    ):
        strategy = make(UDP, seed=1, run_dir=tmp_path, resume=True, **options)
        with pytest.raises(CheckpointError, match=text):
            run_strategy(strategy, app, num_rounds=rounds)


def test_a_round_that_is_resumed_half_way_costs_its_clients_nothing_more(tmp_path: Path) -> None:
    """The server dies after two of four answers; the resumed round gets those bytes again."""
    state, run_dir = tmp_path / "state", tmp_path / "run"
    state.mkdir()
    run_dir.mkdir()
    options: dict[str, Any] = {"seed": 1, "run_dir": run_dir, "rounds": 3, "experiment_id": "e"}

    class Dying(UDP):
        dies = True

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            def some() -> Any:
                for count, reply in enumerate(replies):
                    if count == 2 and server_round == 2 and self.dies:
                        raise KeyboardInterrupt
                    yield reply

            return super().aggregate_train(server_round, some())

    app = message_app([as_mod(UDPClient)])
    with pytest.raises(KeyboardInterrupt):
        run_strategy(make(Dying, **options), app, state=state)
    counts = [len(Ledger(state / f"{i}.ledger", data_set=str(i)).entries()) for i in range(4)]
    assert sorted(counts) == [1, 2, 2, 2] or sorted(counts) == [1, 1, 2, 2]
    result = run_strategy(make(UDP, **options, resume=True), app, state=state)
    for i in range(4):
        entries = Ledger(state / f"{i}.ledger", data_set=str(i)).entries()
        assert [entry.question.server_round for entry in entries] == [1, 2, 3]
    assert result.guarantee.spent == pytest.approx(8.0, rel=1e-6)


@pytest.mark.usefixtures("no_pld")
def test_server_optimisers_and_many_rounds(tmp_path: Path) -> None:
    strategy = UDP(loop=LoopOptions(seed=1), inner=FedAdam(), privacy=UserLevel(epsilon=1e3))
    result = run_strategy(strategy, message_app([as_mod(UDPClient)]), num_rounds=2)
    assert not same_models(result.arrays, record())
    assert all(np.isfinite(a.numpy()).all() for a in result.arrays.values())


def same_models(one: ArrayRecord, other: ArrayRecord) -> bool:
    return all((one[name].numpy() == other[name].numpy()).all() for name in one)


def test_a_second_start_is_another_training_with_a_schedule_of_its_own() -> None:
    strategy = UDP(privacy=UserLevel(), loop=LoopOptions(seed=1))
    app = message_app([as_mod(UDPClient)])
    run_strategy(strategy, app, num_rounds=2)
    assert strategy.terms is not None
    first = strategy.terms.noise_multiplier
    result = run_strategy(strategy, app, num_rounds=8)
    assert strategy.terms.noise_multiplier == pytest.approx(2 * first, rel=1e-6)
    assert len(strategy.releases) == 8
    assert result.guarantee.spent == pytest.approx(8.0, rel=1e-6)


class OpenUDP(UDP):
    metrics_phases = frozenset({TRAIN})


def test_a_seed_voids_the_guarantee_whatever_becomes_of_the_metrics() -> None:
    strategy = OpenUDP(
        privacy=UserLevel(),
        loop=LoopOptions(seed=1),
        rounds=1,
        train_metrics_aggr_fn=lambda contents, key: MetricRecord(),
    )
    app = message_app([as_mod(UDPClient)])
    assert run_strategy(strategy, app, num_rounds=1, insecure_seed=5).guarantee.void


def test_the_weight_is_the_clients_own_whatever_key_the_server_names() -> None:
    strategy = UDP(privacy=UserLevel(), weighted_by_key="samples", loop=LoopOptions(seed=1))
    result = run_strategy(strategy, message_app([as_mod(UDPClient)]), num_rounds=1)
    assert result.history[1]["accumulated"] == 4


def test_a_round_that_broke_off_is_on_the_card_whoever_is_asked_again(tmp_path: Path) -> None:
    """The server dies in round 2; client d has left when it resumes, and was charged as well."""
    state = tmp_path / "state"
    run_dir = tmp_path / "run"
    state.mkdir()
    run_dir.mkdir()
    options: dict[str, Any] = {"seed": 1, "run_dir": run_dir, "experiment_id": "e"}

    app = message_app([as_mod(UDPClient)])
    nodes = [{"client-id": name, "partition-id": i} for i, name in enumerate("abcd")]
    with pytest.raises(KeyboardInterrupt):
        run_strategy(
            make(dying(UDP, server_round=2, by=KeyboardInterrupt), **options),
            app,
            nodes=nodes,
            state=state,
        )
    strategy = make(UDP, **options, resume=True)
    run_strategy(strategy, app, nodes=nodes[:3], state=state)
    booked = dict.fromkeys("abcd", 0)
    for release in strategy.releases:
        for client in release.clients:
            booked[client] += 1
    for name, count in booked.items():
        entries = Ledger(state / f"{name}.ledger", data_set=name).entries()
        assert len(entries) == count == (2 if name == "d" else 3)
    # The books of the run that died are lost: d has answered it, and nobody knows.
    assert [release.unanswered for release in strategy.releases] == [(), ("d",), ()]
    assert strategy.card(final=True).verify()
    assert str(strategy.card().answers()) == "11 charged, 10 answered, 1 never answered"


def test_under_ones_own_start_a_lost_reply_is_its_clients_once_that_is_known() -> None:
    from flwr.serverapp.strategy import Strategy

    class Own(UDP):
        start = Strategy.start

    strategy = Own(privacy=UserLevel(), rounds=3, loop=LoopOptions(seed=1))
    fault = Fault(kind="drop", client="1", server_round=1)
    run_strategy(strategy, message_app([as_mod(UDPClient)]), faults=[fault], timeout=0.5)
    assert [release.clients for release in strategy.releases] == [("0", "1", "2", "3")] * 3
    assert [release.unanswered for release in strategy.releases] == [("1",), (), ()]
    assert strategy.card().guarantee.spent == pytest.approx(8.0, rel=1e-6)
