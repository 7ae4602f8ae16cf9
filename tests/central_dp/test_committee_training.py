"""Trainings whose noise a committee adds, through both halves of central DP."""

import logging
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from apps import model_of, record, run_strategy
from central_training import APP, BIG, kill_after, run, still
from committee import plan_of
from conformance import Killed
from flwr.app import ConfigRecord
from pinned import pinned_nodes

from flwr_privacy.central_dp.correlated.options import BLT, BandedMF, TreeNoise
from flwr_privacy.errors import InvalidParameterError, RefusedPeersError
from flwr_privacy.secure_sum import Participant, SecureSum
from flwr_privacy.simulations.engines.inline.faults import Fault
from flwr_privacy.strategies import (
    AdaptiveClipping,
    CentralDP,
    DistributedNoise,
    LoopOptions,
    NoiseCommittee,
    PrivateEvaluation,
    ServerNoise,
)
from flwr_privacy.strategies.central_dp.option_checks import check_committee_sum

NODES = 15  # five members, and ten clients, two of them a round: a client rests four rounds
MEMBERS = ["0", "1", "10", "11", "12"]


def strategy_of(
    *, threshold: int | None = 5, kind: type[CentralDP] = CentralDP, **options: Any
) -> CentralDP:
    noise = {"correlated": BandedMF(), "committee": NoiseCommittee(members=5), "clipping_norm": 0.5}
    for name in ("sampling", *noise):
        if name in options:
            noise[name] = options.pop(name)
    strategy = {name: options.pop(name) for name in ("clipping", "evaluation") if name in options}
    return kind(
        fraction_train=0.2,
        min_available_nodes=1,
        privacy=options.pop("privacy", None) or DistributedNoise(**noise),
        secure_sum=SecureSum(threshold=threshold),
        loop=LoopOptions(**{"seed": 1, **options}),
        **strategy,
    )


def lines_of(result: Any) -> list[dict[str, Any]]:
    return [{**line, **line["scheme"]} for line in result.history if line["round"]]


def prefixes(result: Any, strategy: CentralDP) -> np.ndarray:
    """Return the model of each round, which is the noise so far, in grid steps of the sum."""
    step = 2.0**strategy.terms.grid
    number = strategy.plan.q * (NODES - len(MEMBERS))
    return np.array([np.ravel(model_of(a)["w"]) for a in result]) * number / step


def models(strategy: CentralDP, rounds: int = 7, **options: Any) -> tuple[Any, np.ndarray]:
    """Run a training that changes nothing, and return its models too."""
    shown: list[Any] = []

    def look(server_round: int, arrays: Any) -> None:
        if server_round:
            shown.append(arrays)

    options = {"nodes": NODES, "arrays": record(BIG), "num_rounds": rounds, **options}
    result = run_strategy(strategy, still(), evaluate_fn=look, **options)
    return result, prefixes(shown, strategy)


def unmixed(w: np.ndarray, strategy: CentralDP) -> np.ndarray:
    """Return C w: the noise of the rounds without its correlation."""
    z = w.copy()
    for i, c in enumerate(strategy.terms.coefficients[1:], start=1):
        z[i:] += c / strategy.terms.coefficients[0] * w[:-i]
    return z


def test_the_sums_have_the_noise_of_all_members_and_nothing_else() -> None:
    strategy = strategy_of()
    result, prefix = models(strategy)
    assert [line["sum_opened"] for line in lines_of(result)] == [7] * 7
    w = np.diff(prefix, axis=0, prepend=0)
    z = unmixed(w, strategy)
    share = strategy.plan.noise_multiplier * 2 * 0.5 / math.sqrt(4) / 2.0**strategy.terms.grid
    assert abs(z.std() / (share * math.sqrt(5)) - 1) < 5 / math.sqrt(2 * z.size)
    assert abs(np.corrcoef(z) - np.eye(7)).max() < 5 / math.sqrt(z.shape[1])
    assert np.corrcoef(w)[0, 1] < -0.2  # it partly cancels
    assert strategy.trained.answers == 2 * 7  # those of clients


def test_clients_are_charged_and_members_are_not(tmp_path: Path) -> None:
    strategy = strategy_of(run_dir=tmp_path)
    result = run(strategy, nodes=NODES, num_rounds=11)
    charged = Counter(client for release in strategy.releases for client in release.clients)
    assert not set(charged) & set(MEMBERS)
    assert set(charged.values()) <= {2, 3}
    for client in charged:
        mine = [release.charge for release in strategy.releases if client in release.clients]
        assert mine == [strategy.plan.charge(1 + made) for made in range(len(mine))]
    assert 7.9 < lines_of(result)[-1]["epsilon"] <= 8.0
    for stated, computed in strategy.card(final=True).verify().values():
        assert stated == computed
    text = strategy.card().guarantee.text()
    assert "of the 5 members of the noise committee at most 1 tell the server their noise" in text
    assert "also one that tells each node another story" in text
    assert "none without the 5 clients whom each sum needs" in text


def begun(caplog: pytest.LogCaptureFixture) -> list[int]:
    found = re.findall(r"committee begins new streams in round (\d+)", caplog.text)
    return [int(server_round) for server_round in found]


@pytest.mark.parametrize("kind", ["drop", "crash"])
def test_a_member_that_is_lost_ends_the_block(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    strategy = strategy_of()
    faults = [Fault(kind=kind, client="11", server_round=3)]
    result, prefix = models(strategy, faults=faults, rounds=6)
    assert [line["round"] for line in lines_of(result) if line["skipped"]] == [3]
    assert begun(caplog) == [1, 4]
    w = np.delete(np.diff(prefix, axis=0, prepend=0), 2, axis=0)
    share = strategy.plan.noise_multiplier * 2 * 0.5 / math.sqrt(4) / 2.0**strategy.terms.grid
    for block in (w[:2], w[2:]):
        z = unmixed(block, strategy)
        assert abs(z.std() / (share * math.sqrt(5)) - 1) < 5 / math.sqrt(2 * z.size)
    assert abs(np.corrcoef(w)[:2, 2:]).max() < 5 / math.sqrt(w.shape[1])


def test_a_member_that_has_not_dealt_is_replaced_before_anybody_is_charged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    strategy = strategy_of()
    # In round 2 the secrets of round 3 are dealt; they are asked for again in round 3.
    faults = [
        Fault(kind="drop", client="11", server_round=server_round, phase="shares")
        for server_round in (2, 3)
    ]
    result, _ = models(strategy, faults=faults, rounds=5)
    assert not any(line["skipped"] for line in lines_of(result))
    assert "11" not in strategy.terms.members
    assert begun(caplog) == [1, 3]


def test_nobody_is_charged_for_a_round_for_which_members_have_not_dealt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    privacy = DistributedNoise(
        correlated=BandedMF(), committee=NoiseCommittee(members=5, names=MEMBERS)
    )
    strategy = strategy_of(privacy=privacy)
    faults = [
        Fault(kind="drop", client="11", server_round=server_round, phase="shares")
        for server_round in (2, 3)
    ]
    result, _ = models(strategy, faults=faults, rounds=5)
    assert [line["round"] for line in lines_of(result) if line["skipped"]] == [3]
    assert {release.server_round for release in strategy.releases} == {1, 2, 4, 5}
    assert begun(caplog) == [1, 4]


@pytest.mark.parametrize("lost", [["2"], ["2", "3"]])
def test_lost_clients_do_not_change_the_noise(lost: list[str]) -> None:
    strategy = strategy_of()
    faults = [Fault(kind="drop", client=client) for client in lost]
    result, prefix = models(strategy, faults=faults)
    assert not any(line["skipped"] for line in lines_of(result))
    z = unmixed(np.diff(prefix, axis=0, prepend=0), strategy)
    share = strategy.plan.noise_multiplier * 2 * 0.5 / math.sqrt(4) / 2.0**strategy.terms.grid
    assert abs(z.std() / (share * math.sqrt(5)) - 1) < 5 / math.sqrt(2 * z.size)


def test_a_resumed_training_begins_new_streams(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder, state = tmp_path / "run", tmp_path / "state"
    for place in (folder, state):
        place.mkdir()
    options = {"nodes": NODES, "num_rounds": 6, "state": state}
    with pytest.raises(Killed):
        run(strategy_of(run_dir=folder, on_round=kill_after(3)), **options)
    resumed = strategy_of(run_dir=folder, resume=True)
    result = run(resumed, **options)
    assert not any(line["skipped"] for line in lines_of(result))
    assert begun(caplog) == [1, 4]
    made = Counter(client for release in resumed.releases for client in release.clients)
    for client in made:
        mine = [release.charge for release in resumed.releases if client in release.clients]
        assert mine == [resumed.plan.charge(1 + number) for number in range(len(mine))]


class KilledOnce(CentralDP):
    """A server that is killed in round 3, after everybody has answered."""

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        if server_round == 3:
            list(replies)
            raise Killed
        return super().aggregate_train(server_round, replies)


def test_a_round_that_broke_off_is_asked_again_of_nobody_who_answered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder, state = tmp_path / "run", tmp_path / "state"
    for place in (folder, state):
        place.mkdir()
    options = {"nodes": NODES, "num_rounds": 6, "state": state}
    with pytest.raises(Killed):
        run(strategy_of(kind=KilledOnce, run_dir=folder), **options)
    resumed = strategy_of(run_dir=folder, resume=True)
    result = run(resumed, **options)
    assert [line["round"] for line in lines_of(result) if line["skipped"]] == [3]
    assert begun(caplog) == [1, 3, 4]
    assert "has sent its noise of round 3" in caplog.text
    made = Counter(client for release in resumed.releases for client in release.clients)
    assert sum(made.values()) == 2 * 6  # the broken round is charged once


def test_it_trains_simulated_clients() -> None:
    strategy = strategy_of(clients=NODES)
    result = run(strategy, nodes=2, num_rounds=4)
    assert [line["sum_opened"] for line in lines_of(result)] == [7] * 4
    assert not any(line["skipped"] for line in lines_of(result))


# -- Deployed nodes ------------------------------------------------------------------------------

NAMES = [*(f"m{i}" for i in range(5)), *(f"ward-{i}" for i in range(8))]


def deployed(folder: Path, *, policy: str | None = None) -> list[dict[str, Any]]:
    rules = f"noise_members = {NAMES[:5]}\n" if policy is None else policy
    configs = pinned_nodes(folder, NAMES, policy=rules)
    for config in configs:
        place = folder / config["client-id"]
        place.mkdir(exist_ok=True)
        config["privacy-state"] = str(place)
    return configs


def of_wards(**options: Any) -> CentralDP:
    """Eight clients, two of them a round."""
    privacy = DistributedNoise(correlated=BandedMF(), committee=NoiseCommittee(members=5))
    usual = {"privacy": privacy, "fraction_train": 0.25, "secure_sum": SecureSum(threshold=5)}
    values: dict[str, Any] = {**usual, **options}
    return CentralDP(min_available_nodes=1, **values)


def test_deployed_nodes_train_with_members_that_say_so(tmp_path: Path) -> None:
    strategy = of_wards()
    result = run(strategy, nodes=deployed(tmp_path), num_rounds=5)
    assert strategy.terms.members == NAMES[:5]
    assert not any(line["skipped"] for line in lines_of(result))
    charged = Counter(client for release in strategy.releases for client in release.clients)
    assert set(charged) <= set(NAMES[5:])
    assert not list(tmp_path.glob("m*/*.ledger"))


def named(names: list[str]) -> str:
    return f"noise_members = {names}\n"


def test_nodes_that_may_become_members_do_not_train(tmp_path: Path) -> None:
    strategy = of_wards(fraction_train=0.34)
    nodes = deployed(tmp_path, policy=named([*NAMES[:5], "ward-0", "ward-1"]))
    result = run(strategy, nodes=nodes, num_rounds=4)
    assert strategy.terms.members == NAMES[:5]
    assert strategy.budget.population == 6
    assert [line["sum_opened"] for line in lines_of(result)] == [7] * 4
    assert {c for release in strategy.releases for c in release.clients} <= set(NAMES[7:])


def test_a_member_that_declines_is_replaced(tmp_path: Path) -> None:
    names = [*NAMES[:5], "ward-0"]
    nodes = deployed(tmp_path, policy=named(names))
    policy = tmp_path / "other.toml"
    policy.write_text(f"{named(names)}max_disk = 1\n")
    (node,) = (node for node in nodes if node["client-id"] == "m2")
    node["privacy-policy"] = str(policy)
    strategy = of_wards(fraction_train=0.34)
    result = run(strategy, nodes=nodes, num_rounds=4)
    assert [line["round"] for line in lines_of(result) if line["skipped"]] == [1]
    assert strategy.terms.members == ["m0", "m1", "m3", "m4", "ward-0"]


def test_of_members_that_contradict_each_other_one_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Participant.join

    def lie(self: Participant, joined: Any, asked: bytes = b"") -> None:
        if self.client_id == "m1" and "m2" in joined.dealers:
            raise RefusedPeersError({"m2": "the share of client m2 cannot be used"})
        real(self, joined, asked)

    monkeypatch.setattr(Participant, "join", lie)
    nodes = deployed(tmp_path, policy=named([*NAMES[:5], "ward-0"]))
    strategy = of_wards(fraction_train=0.34)
    result = run(strategy, nodes=nodes, num_rounds=4)
    assert [line["round"] for line in lines_of(result) if line["skipped"]] == [1]
    assert len({"m1", "m2"}.intersection(strategy.terms.members)) == 1


def test_who_says_falsely_that_it_is_a_member_is_none_of_those_the_server_names(
    tmp_path: Path,
) -> None:
    members = NAMES[5:10]
    nodes = deployed(tmp_path, policy=named(members))
    policy = tmp_path / "other.toml"
    policy.write_text(named(["m0", *members[:4]]))
    (node,) = (node for node in nodes if node["client-id"] == "m0")
    node["privacy-policy"] = str(policy)
    committee = NoiseCommittee(members=5, names=members)
    strategy = of_wards(privacy=DistributedNoise(correlated=BandedMF(), committee=committee))
    result = run(strategy, nodes=nodes, num_rounds=4)
    assert strategy.terms.members == members
    assert not all(line["skipped"] for line in lines_of(result)[1:])


@pytest.mark.parametrize("names", [["a", "b"], ["a", "b", "c", "c", "d"], "abcde", list(range(5))])
def test_names_of_a_committee_that_are_none_are_refused(names: Any) -> None:
    with pytest.raises(InvalidParameterError, match=r"committee\.names"):
        NoiseCommittee(members=5, names=names)


class Open(CentralDP):
    """A server that wants to open sums without its members."""

    def needed(self) -> Any:
        return ()


class Majority(CentralDP):
    """A server whose threshold is a majority."""

    def bounds_of(self, clients: list[str], server_round: int) -> Any:
        terms = self.budget.terms(len(clients), 1.9, members=self._members.names, block=1)
        return self.secure_sum.bounds(len(clients), code_limit=terms.code_limit(), largest_weight=1)


@pytest.mark.parametrize(("server", "threshold"), [(Open, 5), (Majority, 4)])
def test_nodes_do_not_answer_a_server_that_could_open_too_much(
    tmp_path: Path, server: type[CentralDP], threshold: int
) -> None:
    privacy = DistributedNoise(correlated=BandedMF(), committee=NoiseCommittee(members=5))
    strategy = server(
        fraction_train=0.25,
        privacy=privacy,
        min_available_nodes=1,
        secure_sum=SecureSum(threshold=threshold),
    )
    result = run(strategy, nodes=deployed(tmp_path), num_rounds=2)
    assert all(line["skipped"] for line in lines_of(result))
    assert not list(tmp_path.glob("*/*.ledger"))


def test_made_up_members_are_declined(tmp_path: Path) -> None:
    strategy = of_wards()
    result = run(strategy, nodes=deployed(tmp_path, policy="max_epsilon = 8.0"), num_rounds=2)
    assert all(line["skipped"] for line in lines_of(result))
    assert not list(tmp_path.glob("*/*.ledger"))


@pytest.mark.parametrize(
    ("threshold", "limit", "answers"),
    [
        (7, "min_summed = 2", True),
        (6, "min_summed = 2", False),
        (7, "min_summed = 2\nmax_cohort = 6", False),
        (7, "min_summed = 3", False),
    ],
)
def test_the_least_size_of_a_sum_counts_no_members(
    tmp_path: Path, threshold: int, limit: str, answers: bool
) -> None:
    """Two clients and five members a round: the members have no data among which one hides."""
    strategy = of_wards(secure_sum=SecureSum(threshold=threshold))
    policy = f"noise_members = {NAMES[:5]}\n{limit}\n"
    result = run(strategy, nodes=deployed(tmp_path, policy=policy), num_rounds=1)
    assert [not line["skipped"] for line in lines_of(result)] == [answers]


def test_too_few_members_are_refused_before_anybody_is_asked(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match=re.escape("committee.members = 5")):
        run(of_wards(), nodes=deployed(tmp_path)[1:], num_rounds=2)


# -- Options -------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"committee": None}, "noise = 'distributed': expected 'server' with correlated noise, or"),
    ({"correlated": None}, "None without correlated=BandedMF"),
    ({"correlated": BLT()}, "correlated = BandedMF"),
    ({"correlated": TreeNoise()}, "correlated = BandedMF"),
    ({"sampling": "fixed"}, "'balanced'"),
    ({"sampling": "poisson"}, "'balanced'"),
    ({"clipping": AdaptiveClipping(quantile=0.5)}, "clipping"),
    ({"evaluation": PrivateEvaluation()}, "evaluation"),
    ({"quorum": 4}, "quorum = 4: expected None with a committee"),
    ({"threshold": None}, "secure_sum.threshold = None: expected two thirds"),
]


@pytest.mark.parametrize(("options", "text"), REFUSED)
def test_what_does_not_go_with_a_committee_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParameterError, match=re.escape(text)):
        strategy_of(**options)


@pytest.mark.parametrize("members", [2, 51])
def test_committees_are_small(members: int) -> None:
    with pytest.raises(InvalidParameterError, match=r"committee\.members"):
        NoiseCommittee(members=members)


def test_a_trusted_server_has_no_committee() -> None:
    with pytest.raises(TypeError, match="committee"):
        ServerNoise(committee=NoiseCommittee())


def test_a_threshold_below_two_thirds_ends_the_run_before_anybody_is_asked() -> None:
    strategy = strategy_of(threshold=4)
    with pytest.raises(InvalidParameterError, match="at least 5 of the 7 clients and members"):
        run(strategy, nodes=NODES, num_rounds=2)
    assert not strategy.releases


COMMITTEE_SUMS: list[tuple[dict[str, Any], int, str]] = [
    ({"threshold": 16}, 25, "secure_sum.threshold = 16: expected at least 17 of the 25"),
    ({"threshold": 17, "colluders": 9}, 25, "secure_sum.threshold = 17: expected at least 18"),
    ({"threshold": 80}, 120, "secure_sum.neighbours = None: expected 119"),
]


@pytest.mark.parametrize(("values", "nodes", "text"), COMMITTEE_SUMS)
def test_sums_that_could_open_without_a_member_are_refused(
    values: dict[str, Any], nodes: int, text: str
) -> None:
    with pytest.raises(InvalidParameterError, match=re.escape(text)):
        check_committee_sum(SecureSum(**values), nodes)


def test_two_thirds_in_a_complete_graph_are_enough() -> None:
    check_committee_sum(SecureSum(threshold=17), 25)
    check_committee_sum(SecureSum(threshold=80, neighbours=120), 120)


def test_the_plan_is_that_of_a_trusted_server_with_a_fifth_of_the_members_colluding() -> None:
    ours, trusted = plan_of(), plan_of(noise="server", members=0)
    assert ours.noise_multiplier == trusted.noise_multiplier
    for number in (1, 2, 5):
        charges = ours.charge(number), trusted.charge(number)
        assert charges[0].noise_multiplier == charges[1].noise_multiplier
        assert charges[0].gap == ours.gap == pytest.approx(trusted.charge(1).gap / 5)
    found = ours.effective_multiplier / trusted.effective_multiplier
    assert found == pytest.approx(math.sqrt(5 / 4))
    long = {"rounds": 100, "q": 0.1}  # as in docs/noise-in-shares.md
    independent = plan_of(correlated=None, members=0, **long)
    assert round(independent.effective_multiplier, 2) == 1.90
    assert round(plan_of(**long).effective_multiplier, 2) == 0.88
    assert round(plan_of(**long).noise_multiplier, 2) == 2.96


def test_a_users_own_start_is_refused() -> None:
    class Own(CentralDP):
        def start(self, grid: Any, initial_arrays: Any, num_rounds: int = 3, **_: Any) -> Any:
            self.configure_train(1, initial_arrays, ConfigRecord(), grid)

    privacy = DistributedNoise(correlated=BandedMF(), committee=NoiseCommittee())
    strategy = Own(privacy=privacy, rounds=3, secure_sum=SecureSum(threshold=5))
    with pytest.raises(Exception, match="only where this strategy's own start runs"):
        run_strategy(strategy, APP, nodes=NODES)
