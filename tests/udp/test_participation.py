"""Who takes part: each client drawn by itself, and in secret."""

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from apps import make, message_app, run_strategy, same
from conformance import Killed, dying
from flwr.clientapp import ClientApp

from flwr_privacy.accounting import Charge, spent
from flwr_privacy.clients import UDPClient, as_mod
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.privacy.card import Answers, PrivacyCard
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.strategies import UDP, LoopOptions, UserLevel
from flwr_privacy.strategies.loop.draws import each_by_itself

SECRET: dict[str, Any] = {
    "noise": "pld_secret",
    "participants": "secret",
    "client_sampling": "poisson",
    "epsilon": 1.0,  # a small one: the grid of its privacy losses is small too
}


def app() -> ClientApp:
    return message_app([as_mod(UDPClient)])


def asked(strategy: UDP, state: Path, clients: int) -> dict[int, set[str]]:
    """Return who released something in each round, by the ledgers."""
    rounds: dict[int, set[str]] = {}
    for i in range(clients):
        for entry in Ledger(state / f"{i}.ledger", data_set=str(i)).entries():
            rounds.setdefault(entry.question.server_round, set()).add(str(i))
    return rounds


def test_each_client_is_drawn_by_itself_with_its_probability() -> None:
    clients, rounds, q = 200, 300, 0.3
    names = [str(i) for i in range(clients)]
    drawn = np.zeros((rounds, clients))
    for t in range(rounds):
        taken = each_by_itself({7: names}, q=q, secret=b"secret", server_round=t)
        drawn[t, [int(name) for name in taken.get(7, [])]] = 1
    variance = q * (1 - q)
    assert abs(drawn.mean() - q) < 5 * math.sqrt(variance / drawn.size)
    for axis, count in ((0, rounds), (1, clients)):
        sums = drawn.sum(axis=axis)
        assert np.abs(sums - q * count).max() < 5 * math.sqrt(count * variance)
        # The number per round (and per client) is binomial: it is not fixed.
        assert abs(sums.var() / (count * variance) - 1) < 5 * math.sqrt(2 / sums.size)
    centred = drawn - q
    for one, other in ((centred[1:], centred[:-1]), (centred[:, 1:], centred[:, :-1])):
        assert abs((one * other).mean()) < 5 * variance / math.sqrt(one.size)


def test_a_draw_follows_from_secret_round_and_name_alone() -> None:
    names = [str(i) for i in range(100)]

    def draw(nodes: int, **changes: Any) -> set[str]:
        assigned = {n: names[n::nodes] for n in range(nodes)}
        options = {"q": 0.5, "secret": b"a", "server_round": 3, **changes}
        drawn = each_by_itself(assigned, **options)
        assert all(drawn.values())  # no node without a client
        return {name for some in drawn.values() for name in some}

    one = draw(1)
    assert one == draw(7) == draw(100)
    assert one != draw(1, secret=b"b")
    assert one != draw(1, server_round=4)
    assert draw(1, q=0.2) < one < draw(1, q=0.8)
    assert draw(3, q=1.0) == set(names)


def test_a_poisson_sample_does_not_depend_on_the_number_of_nodes(tmp_path: Path) -> None:
    results = []
    for nodes in (1, 3):
        strategy = UDP(
            privacy=UserLevel(),
            client_sampling="poisson",
            fraction_train=0.4,
            loop=LoopOptions(clients=12, seed=4, experiment_id="e"),
            min_available_nodes=1,
            min_train_nodes=1,
        )
        results.append(run_strategy(strategy, app(), nodes=nodes, num_rounds=8, insecure_seed=1))
    one, other = results
    assert same(one.arrays, other.arrays)
    counts = [line["asked"] for line in one.history[1:]]
    assert counts == [line["asked"] for line in other.history[1:]]
    assert len(set(counts)) > 1  # not a fixed number
    q = 4 / 12  # floor(0.4 * 12) of 12
    assert abs(sum(counts) - 96 * q) < 5 * math.sqrt(96 * q * (1 - q))
    assert one.guarantee.spent <= 8.0 * (1 + 1e-9)


def test_a_round_in_which_nobody_is_drawn_is_skipped_and_costs_nothing(tmp_path: Path) -> None:
    strategy = UDP(
        privacy=UserLevel(),
        client_sampling="poisson",
        fraction_train=0.25,
        min_train_nodes=1,
        loop=LoopOptions(seed=1),
    )
    result = run_strategy(strategy, app(), num_rounds=12, state=tmp_path)
    empty = [line["round"] for line in result.history[1:] if line["asked"] == 0]
    assert empty
    assert all(result.history[r]["skipped"] for r in empty)
    ledgers = asked(strategy, tmp_path, 4)
    assert {r.server_round: set(r.clients) for r in strategy.releases} == ledgers
    assert not set(empty) & set(ledgers)
    assert strategy.card(final=True).verify()
    assert result.guarantee.spent <= 8.0 * (1 + 1e-9)


def test_where_participants_are_secret_the_card_charges_everybody_a_sample(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("state", "run"):
        (tmp_path / name).mkdir()
    sample = {"clients": 12, "fraction_train": 0.25, "min_train_nodes": 1}
    strategy = make(UDP, **SECRET, **sample, seed=1, run_dir=tmp_path / "run")
    with caplog.at_level(logging.INFO, "flwr.privacy"):
        result = run_strategy(strategy, app(), nodes=2, num_rounds=4, state=tmp_path / "state")
    text = (tmp_path / "run" / "privacy-card.json").read_text()
    card = PrivacyCard.from_json(text)
    everybody = tuple(sorted(str(i) for i in range(12)))
    assert [release.clients for release in card.releases] == [everybody] * 4
    assert {release.charge.sampling for release in card.releases} == {0.25}
    assert {release.unanswered for release in card.releases} == {None}
    assert card.answers() == Answers(charged=48, unanswered=0, untold=48)
    promise = card.guarantee
    assert promise.epsilon == 1.0
    assert promise.accountant == "pld"
    assert "not the server" in promise.adversary
    own = [
        [entry.charge for entry in Ledger(path, data_set=path.stem).entries()]
        for path in sorted((tmp_path / "state").glob("*.ledger"))
    ]
    assert any(len(charges) < 4 for charges in own)
    server = [text for text in promise.not_protected if "against the server" in text]
    assert len(server) == 1
    stated = float(server[0].split("epsilon ")[1].split()[0])
    assert stated > 1.0
    for charges in own:  # against the server, which sees it, a client counts in full
        assert all(charge.sampling == 1 for charge in charges)
        assert spent(charges, delta=1e-5) <= stated * 1.001
    for word in (text, caplog.text, repr(strategy), repr(result)):
        assert strategy.state_dict()["participants"]["seed"].hex() not in word
    card.verify()
    assert 0.99 < promise.spent <= 1 + 1e-6


def test_secret_draws_do_not_follow_from_the_seed_and_open_ones_do(tmp_path: Path) -> None:
    def draws(name: str, **options: Any) -> dict[int, set[str]]:
        (tmp_path / name).mkdir()
        strategy = make(
            UDP, **options, fraction_train=0.5, seed=1, experiment_id="e", rounds=4, clients=30
        )
        engine = {"nodes": 2, "state": tmp_path / name}
        run_strategy(strategy, app(), num_rounds=1, **engine)
        return asked(strategy, tmp_path / name, 30)

    assert draws("a", **SECRET) != draws("b", **SECRET)
    assert draws("c", client_sampling="poisson") == draws("d", client_sampling="poisson")


def test_a_resumed_training_draws_the_same_clients_in_secret(tmp_path: Path) -> None:
    for name in ("state", "run"):
        (tmp_path / name).mkdir()
    options = {**SECRET, "fraction_train": 0.5, "seed": 1, "experiment_id": "e", "clients": 12}

    run: dict[str, Any] = {"nodes": 2, "num_rounds": 4, "state": tmp_path / "state"}
    with pytest.raises(Killed):
        run_strategy(
            make(dying(UDP, server_round=3), **options, run_dir=tmp_path / "run"), app(), **run
        )
    before = asked(UDP(privacy=UserLevel()), tmp_path / "state", 12)
    strategy = make(UDP, **options, run_dir=tmp_path / "run", resume=True)
    result = run_strategy(strategy, app(), **run)
    after = asked(strategy, tmp_path / "state", 12)
    assert {r: after[r] for r in (1, 2, 3)} == before
    for i in range(12):
        entries = Ledger(tmp_path / "state" / f"{i}.ledger", data_set=str(i)).entries()
        assert len({entry.question for entry in entries}) == len(entries)  # nobody twice
    assert [release.server_round for release in strategy.releases] == [1, 2, 3, 4]
    assert all(len(release.clients) == 12 for release in strategy.releases)
    assert result.guarantee.spent == strategy.card().epsilon("pld")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"client_sampling": "all"}, "client_sampling = 'all'"),
        ({"participants": "nobody"}, "participants = 'nobody'"),
        ({"noise": "pld_secret"}, "noise = 'pld_secret': expected another one"),
        ({"noise": "pld_secret", "participants": "secret"}, "client_sampling='poisson'"),
        ({"noise": "pld_secret", "client_sampling": "poisson"}, "participants='secret'"),
        (
            {"participants": "secret", "client_sampling": "poisson"},
            "participants = 'secret': expected 'visible' with noise 'gdp_fixed'",
        ),
        ({"participants": "secret", "noise": "gdp"}, "participants = 'secret'"),
        ({**SECRET, "schedule": "discounting", "validation": lambda *_: 0.0}, "with a schedule"),
        ({**SECRET, "schedule": "discounting", "validation": "clients"}, "pld_secret"),
        ({**SECRET, "schedule": "linear"}, "with a schedule"),
        ({**SECRET, "secure_sum": SecureSum()}, "or a secure sum"),
        ({**SECRET, "epsilon": {"a": 1.0}}, "budgets of each client"),
        ({**SECRET, "unit": "record", "learning_rate": 1.0, "sampling_rate": 0.5}, "sampling_rate"),
        ({"client_sampling": "poisson", "secure_sum": SecureSum()}, "client_sampling = 'poisson'"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParameterError) as error:
        make(UDP, **options)
    assert text in str(error.value)


def test_with_everybody_in_every_round_a_secret_sample_gains_nothing() -> None:
    strategy = make(UDP, **SECRET, seed=1)
    result = run_strategy(strategy, app(), num_rounds=2)
    assert [line["accumulated"] for line in result.history[1:]] == [4, 4]
    charge = strategy.releases[0].charge
    assert charge.sampling == 1.0
    exact = spent(
        [Charge(neighbours="replace_one", noise_multiplier=charge.noise_multiplier, count=2)],
        delta=1e-5,
    )
    assert 0.998 < exact <= 1.0


@pytest.mark.parametrize("noise", ["local", "shared"])
def test_clients_that_take_turns_need_less_noise_and_keep_their_budget(
    noise: str, tmp_path: Path
) -> None:
    """Ten clients, three a round: in ten rounds chance may draw one seven times, turns do three."""

    def trained(client_sampling: str, folder: Path) -> UDP:
        folder.mkdir()
        strategy = make(
            UDP,
            client_sampling=client_sampling,
            fraction_train=0.3,
            seed=1,
            shared_noise=noise == "shared",
            **({"secure_sum": SecureSum()} if noise == "shared" else {}),
        )
        run_strategy(strategy, app(), nodes=10, num_rounds=10, state=folder)
        return strategy

    fixed, balanced = (trained(kind, tmp_path / kind) for kind in ("fixed", "balanced"))
    assert fixed.plan is not None
    assert balanced.plan is not None
    plans = [strategy.plan.schedule("") for strategy in (fixed, balanced)]
    assert [plan.releases for plan in plans] == [7, 3]
    assert plans[0].noise_multiplier > 1.5 * plans[1].noise_multiplier
    rounds = asked(balanced, tmp_path / "balanced", 10)
    counts = [sum(str(i) in clients for clients in rounds.values()) for i in range(10)]
    assert counts == [3] * 10
    for i in range(10):
        mine = sorted(r for r, clients in rounds.items() if str(i) in clients)
        assert min(np.diff(mine)) >= 3
    assert 7.9 < balanced.card(final=True).verify()["gdp"][1] <= 8.0
