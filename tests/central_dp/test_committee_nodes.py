"""What nodes see to where a noise committee adds the noise: its members, and the clients."""

import math
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from committee import MEMBERS, PLAN, POLICY, SUM, Node, plan_of, terms_of
from flwr.app import ConfigRecord

from flwr_privacy.accounting import spent
from flwr_privacy.central_dp.correlated.factors import ToeplitzFactor
from flwr_privacy.central_dp.correlated.member_stream import shown_gap
from flwr_privacy.central_dp.correlated.options import BandedMF
from flwr_privacy.central_dp.correlated.stream import digest_of
from flwr_privacy.central_dp.terms import CentralDPTerms
from flwr_privacy.clients import CentralDPClient
from flwr_privacy.errors import DeclinedError, InvalidParameterError, LedgerError, ProtocolError
from flwr_privacy.pipeline import charging, experiment_state
from flwr_privacy.privacy.distributed_noise import summed_gap
from flwr_privacy.privacy.failures import FAILED_NAME
from flwr_privacy.privacy.grid import CodeGrid
from flwr_privacy.privacy.ledger import Entry, Ledger
from flwr_privacy.wire.fields import read, write
from flwr_privacy.wire.pins import Identity

BIG = {"w": np.zeros(4000, np.float32)}


@pytest.fixture
def client(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture
def member(tmp_path: Path) -> Node:
    return Node(tmp_path, "m3")


def charges(node: Node) -> list[Entry]:
    return list(Ledger(node.folder / f"{node.name}.ledger", data_set=node.name).entries())


def noise_of(answer: Any) -> np.ndarray:
    arrays, _ = answer
    return np.concatenate([np.ravel(arrays[name]) for name in sorted(arrays)])


# -- A client ------------------------------------------------------------------------------------


def test_a_client_sends_its_update_without_noise_and_charges_each_participation(
    client: Node,
) -> None:
    step = CodeGrid(terms_of().grid).step
    for server_round in (1, 5, 9, 13, 17):
        arrays, own = client.ask(server_round, arrays=BIG)
        assert abs(arrays["w"] * step - 1 / math.sqrt(4000)).max() <= step
        assert arrays[FAILED_NAME].tolist() == [0]
        assert own["metrics"] == {"num-examples": 1}
    found = [entry.charge for entry in charges(client)]
    assert found == [PLAN.charge(number) for number in (1, 2, 3, 4, 5)]
    assert 7.999 < spent(found, delta=1e-5) <= 8.0


COMMITTEES: list[tuple[dict[str, Any], str]] = [
    ({"summed": 0}, "outside of a secure sum"),
    ({"needed": MEMBERS[:4]}, "a secure sum that opens without some of them"),
    ({"needed": []}, "a secure sum that opens without some of them"),
    ({"needed": [*MEMBERS, "ward-8"]}, "a secure sum that opens without some of them"),
    ({"withstood": 0}, "with the help of 1 members: it needs a threshold of two thirds"),
    ({"members": ["m0", "m1", "m2", "m3", "x"]}, "does not have ['x']"),
]


@pytest.mark.parametrize(("changes", "text"), COMMITTEES)
@pytest.mark.parametrize("name", ["ward-7", "m3"])
def test_a_committee_that_the_node_cannot_count_on_is_declined(
    tmp_path: Path, name: str, changes: dict[str, Any], text: str
) -> None:
    node = Node(tmp_path, name)
    with pytest.raises(DeclinedError, match=re.escape(text)):
        node.ask(1, **changes)
    assert charges(node) == []
    assert not node.trained
    node.ask(1)


def test_members_count_only_if_the_operator_names_and_pins_them(tmp_path: Path) -> None:
    nobody = Node(tmp_path, "a", policy="max_epsilon = 9.0\n")
    with pytest.raises(DeclinedError, match="this node's policy names no noise_members"):
        nobody.ask(1)
    unpinned = Node(tmp_path, "b")
    pins = Path(unpinned.config["privacy-pins"])
    pins.write_text("\n".join(line for line in pins.read_text().split("\n") if "m4" not in line))
    with pytest.raises(DeclinedError, match="does not pin the keys of all members"):
        unpinned.ask(1)
    assert charges(nobody) == charges(unpinned) == []


def test_a_fifth_of_those_who_may_be_members_counts_as_colluding(tmp_path: Path) -> None:
    """With ten to choose from, a server that chooses may take both colluders among them."""
    ten = [*MEMBERS, *(f"n{i}" for i in range(5))]
    node = Node(tmp_path, policy=f"noise_members = {ten}\n")
    assert terms_of().parties == 4
    with pytest.raises(DeclinedError, match=r"noise for 4 honest members of 5 .* counts on 3"):
        node.ask(1)
    with pytest.raises(DeclinedError, match="with the help of 2 members"):
        node.ask(1, replace(terms_of(), parties=3), withstood=1)
    node.ask(1, replace(terms_of(), parties=3))
    nine = Node(tmp_path, "ward-8", policy=f"noise_members = {ten[:9]}\n")
    nine.ask(1)


def test_a_client_takes_part_as_seldom_as_it_was_told_first(client: Node) -> None:
    client.ask(5)
    for server_round in (1, 2, 5, 6, 8):
        with pytest.raises(DeclinedError, match=f"round {server_round} is too early"):
            client.ask(server_round, request=1)
    for server_round in (9, 13, 17):
        client.ask(server_round)
    with pytest.raises(DeclinedError, match="the correlated noise is for 20 rounds"):
        client.ask(21)
    assert client.trained == 4 == len(charges(client))


def test_more_participations_than_planned_are_declined(client: Node) -> None:
    few = replace(terms_of(), participations=2)
    client.ask(1, few)
    client.ask(5, few)
    with pytest.raises(DeclinedError, match="took part in 2 rounds, all that"):
        client.ask(9, few)


@pytest.mark.parametrize("name", ["separation", "participations", "rounds"])
def test_other_limits_than_the_first_are_declined(client: Node, name: str) -> None:
    client.ask(1)
    terms = terms_of()
    with pytest.raises(DeclinedError, match="of another factor, or with other limits"):
        client.ask(9, replace(terms, **{name: getattr(terms, name) - 1}))
    other = plan_of(q=0.5).terms(1.0, members=MEMBERS, block=1)
    with pytest.raises(DeclinedError, match="of another factor, or with other limits"):
        client.ask(9, other)


def test_no_other_noise_goes_before_or_after_that_of_a_committee(tmp_path: Path) -> None:
    shares = plan_of(correlated=None, members=0).terms(1.0, parties=3)
    for first, second in ((shares, terms_of()), (terms_of(), shares)):
        node = Node(tmp_path, "a" if first is shares else "b")
        node.ask(1, first)
        with pytest.raises(DeclinedError, match="of another factor, or with other limits"):
            node.ask(9, second)
        assert len(charges(node)) == 1


def test_a_lost_note_is_noticed(client: Node) -> None:
    client.ask(1)
    shutil.rmtree(client.folder / "ward-7.notes")
    with pytest.raises(DeclinedError, match="of another factor, or with other limits"):
        client.ask(9)


def test_questions_that_are_too_early_leave_no_trace(client: Node) -> None:
    client.ask(5)
    files = [path for path in client.folder.rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    for number in range(20):
        with pytest.raises(DeclinedError, match="round 6 is too early"):
            client.ask(6, request=number)
    changed = [path for path in files if path.read_bytes() != before[path]]
    assert not changed
    assert not [path for path in client.folder.rglob("*.notes/*") if path not in before]


def test_two_clients_with_one_data_set_do_not_take_part_side_by_side(tmp_path: Path) -> None:
    """Their rounds are closer together than the charge is for."""
    one, other = Node(tmp_path), Node(tmp_path, "ward-8")
    for node in (one, other):
        node.config |= {"privacy-data-set": "ours", "privacy-state": str(one.folder)}
    one.ask(1)
    with pytest.raises(DeclinedError, match="of another factor, or with other limits"):
        other.ask(2)
    one.ask(5)


def test_a_client_with_the_same_data_that_is_charged_meanwhile_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = Node(tmp_path), Node(tmp_path, "ward-8")
    for node in (one, other):
        node.config |= {"privacy-data-set": "ours", "privacy-state": str(one.folder)}
    note = charging.intend

    def racing(store: Any, request: Any, limit: Any) -> None:
        note(store, request, limit)
        if store.client_id == one.name:
            other.ask(2)

    monkeypatch.setattr(charging, "intend", racing)
    with pytest.raises(DeclinedError, match="charges of this experiment that this client has not"):
        one.ask(1)


def test_a_round_that_is_not_charged_is_no_participation(client: Node) -> None:
    policy = Path(client.config["privacy-policy"])
    client.ask(1)
    policy.write_text(f"{POLICY}max_releases = 1\n")
    with pytest.raises(DeclinedError, match="max_releases"):
        client.ask(5)
    policy.write_text(POLICY)
    client.ask(6)
    assert [entry.charge for entry in charges(client)] == [PLAN.charge(1), PLAN.charge(2)]


def test_a_server_does_not_let_the_note_of_rounds_grow(client: Node) -> None:
    client.ask(1)
    for number in range(1, 250):
        with pytest.raises(DeclinedError, match="too early"):
            client.ask(2, request=number)
    (note,) = client.folder.glob("ward-7.notes/*.charged-participations")
    assert note.stat().st_size < 3000
    client.ask(5)
    assert [entry.charge for entry in charges(client)] == [PLAN.charge(1), PLAN.charge(2)]


def test_the_policy_counts_the_noise_that_is_charged(client: Node) -> None:
    multiplier = PLAN.charge().noise_multiplier
    assert multiplier < 0.8 * PLAN.noise_multiplier
    policy = Path(client.config["privacy-policy"])
    policy.write_text(f"{POLICY}min_noise_multiplier = {multiplier * 1.001}\n")
    with pytest.raises(DeclinedError, match="min_noise_multiplier"):
        client.ask(1)
    policy.write_text(f"{POLICY}min_noise_multiplier = {multiplier * 0.999}\n")
    client.ask(1)


def test_the_policy_counts_the_least_noise_that_is_charged(tmp_path: Path) -> None:
    """Where rounds of a client overlap, a later one is charged with less noise than the first."""
    ones = ToeplitzFactor(coefficients=(2**16,) * 20)
    terms = replace(
        terms_of(),
        coefficients=list(ones.coefficients),
        factor=digest_of(ones),
        separation=1,
        participations=20,
        noise_multiplier=40.0,
        epsilon=100.0,
    )
    all_of_them = [terms.charge(number).noise_multiplier for number in range(1, 21)]
    first, least = all_of_them[0], terms.least_multiplier()
    assert least == min(all_of_them) < 0.4 * first
    wanted = Node(tmp_path, "a", policy=f"{POLICY}min_noise_multiplier = {first * 0.999}\n")
    with pytest.raises(DeclinedError, match="min_noise_multiplier"):
        wanted.ask(1, terms)
    assert charges(wanted) == []
    Node(tmp_path, "b", policy=f"{POLICY}min_noise_multiplier = {least * 0.999}\n").ask(1, terms)


def test_only_with_a_committee_the_question_has_its_entries() -> None:
    """Nodes and servers of versions without committees understand each other's questions."""
    shares = plan_of(correlated=None, members=0).terms(1.0, parties=3)
    server = plan_of(noise="server", members=0).terms(1.0)
    committee = {"members", "block", "coefficients"}
    for terms in (shares, server):
        sent = ConfigRecord(write(terms)).deflate()
        assert not any(name.encode() in sent for name in committee)
        assert read(CentralDPTerms, ConfigRecord.inflate(sent)) == terms
    written = write(terms_of())
    assert committee < set(written)
    assert read(CentralDPTerms, written) == terms_of()
    for wrong in (0.5, "1", [1], True):
        with pytest.raises(ProtocolError, match="the entry 'block' of CentralDPTerms"):
            read(CentralDPTerms, {**written, "block": wrong})
    del written["block"]
    with pytest.raises(InvalidParameterError, match="block"):
        read(CentralDPTerms, written)


# -- The grid ------------------------------------------------------------------------------------


def test_each_participation_pays_for_the_grid_of_its_own_block(tmp_path: Path) -> None:
    """A server may take a coarse grid for a later block, and may say what that costs."""
    client = Node(tmp_path, policy=f"{POLICY}max_epsilon = 9.0\n")
    client.ask(1, arrays=BIG)
    fine = terms_of(5)
    coarse = replace(fine, block=5, grid=fine.grid + 15)
    assert coarse.grid_gap(4000) > 100 * fine.gap
    with pytest.raises(InvalidParameterError, match="a finer grid"):
        client.ask(5, coarse, arrays=BIG)
    with pytest.raises(DeclinedError, match="the budget is spent"):
        client.ask(5, replace(coarse, gap=1e6), arrays=BIG)
    assert len(charges(client)) == 1
    dear = replace(fine, gap=2 * fine.gap)
    within = Node(tmp_path, "ward-8")
    for server_round, terms in ((1, fine), (5, replace(dear, block=5, epsilon=9.0))):
        within.ask(server_round, terms, arrays=BIG)
    assert [entry.charge.gap for entry in charges(within)] == [fine.gap, dear.gap]


def test_the_grid_costs_all_sums_that_a_participation_reaches_and_all_streams_shown() -> None:
    plan = plan_of(correlated=BandedMF(bands=3), members=20)
    terms = plan.terms(1.0, members=sorted(f"m{i}" for i in range(20)), block=1)
    assert terms.parties == 16
    sigma = terms.share_sigmas()[0] / CodeGrid(terms.grid).step
    shown = sum(shown_gap(4001, sigma, members) for members in (17, 18, 19, 20))
    expected = 3 * (summed_gap(4001, sigma, 16) + shown)
    assert terms.grid_gap(4000) == pytest.approx(expected, rel=1e-12)
    assert shown > 10 * summed_gap(4001, sigma, 16)
    long = replace(terms, rounds=2, participations=1, block=1)
    assert long.grid_gap(4000) == pytest.approx(2 / 3 * expected, rel=1e-12)


@pytest.mark.parametrize(("members", "q"), [(3, 0.1), (5, 0.1), (50, 0.1), (5, 0.01)])
def test_the_default_grid_is_fine_enough(members: int, q: float) -> None:
    plan = plan_of(rounds=100, q=q, members=members)
    names = sorted(f"m{i}" for i in range(members))
    plan.terms(1.0, members=names, block=1).check_grid(10**7)
    total = [plan.charge(number) for number in range(1, plan.releases + 1)]
    assert 7.99 < spent(total, delta=1e-5) <= 8.0


def test_a_training_that_fails_is_charged_and_counted_as_zero(client: Node) -> None:
    def fail(start: Any) -> Any:
        raise RuntimeError("no data")

    fields = {"experiment-id": "e", "round": 1, "request": 0}
    half = CentralDPClient(None, client.context())
    arrays, _ = half.handle("train", BIG, {**write(terms_of()), **fields, **SUM}, fail)
    assert arrays[FAILED_NAME] == terms_of().failed_code
    assert not arrays["w"].any()
    assert len(charges(client)) == 1


MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"coefficients": [65536, 65536]}, "factor"),
    ({"coefficients": []}, "coefficients"),
    ({"members": []}, "factor"),
    ({"members": MEMBERS[::-1]}, "members"),
    ({"parties": 5}, "parties = 5: expected 1 to 4 of 5 members"),
    ({"block": 0}, "block"),
    ({"block": None}, "block"),
    ({"block": 21}, "block"),
    ({"sampling": "fixed"}, "sampling"),
    ({"count_share": 0.1}, "factor"),
    ({"noise": "server", "parties": 1}, "sampling"),
    ({"rounds": 2**17}, "rounds"),
]


@pytest.mark.parametrize(("changes", "text"), MALFORMED)
def test_malformed_terms_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        replace(terms_of(), **changes)


# -- A member ------------------------------------------------------------------------------------


def test_a_member_adds_noise_and_charges_nothing(member: Node) -> None:
    arrays, own = member.ask(1, arrays=BIG)
    assert sorted(arrays) == [FAILED_NAME, "w"]
    assert own["metrics"] == {"num-examples": 1}
    terms = terms_of()
    sigma = PLAN.noise_multiplier * 2 / math.sqrt(4) / CodeGrid(terms.grid).step
    assert abs(np.std(arrays["w"]) / sigma - 1) < 5 / math.sqrt(2 * 4000)
    assert not member.trained
    assert charges(member) == []


def test_which_noise_a_sum_takes_says_nothing_of_it(member: Node) -> None:
    """Nothing is drawn for a sum that may not take it."""
    limit = terms_of().code_limit()
    with pytest.raises(ProtocolError, match=f"codes up to {limit - 1}, the noise needs {limit}"):
        member.ask(1, **{"code-limit": limit - 1})
    assert not list(member.folder.glob("m3.central-dp/*/state"))
    member.ask(1, **{"code-limit": limit})


def test_its_noise_of_a_block_is_correlated_as_the_factor_says(member: Node) -> None:
    terms = terms_of()
    w = np.array([noise_of(member.ask(t, arrays=BIG)) for t in range(1, 7)], float)
    z = w.copy()
    for i, c in enumerate(terms.coefficients[1:], start=1):
        z[i:] += c / terms.coefficients[0] * w[:-i]
    sigma = PLAN.noise_multiplier * 2 / math.sqrt(4) / CodeGrid(terms.grid).step
    correlation = np.corrcoef(z)
    assert abs(z.std() / sigma - 1) < 5 / math.sqrt(2 * z.size)
    assert abs(correlation - np.eye(6)).max() < 5 / math.sqrt(4000)


def test_a_member_sends_its_noise_of_a_round_once(member: Node) -> None:
    for server_round in (1, 2):
        member.ask(server_round)
        for again in (1, server_round):
            for block in {1, again}:
                with pytest.raises(DeclinedError, match="has sent its noise of round"):
                    member.ask(again, terms_of(block), request=7)


@pytest.mark.parametrize(("block", "server_round"), [(1, 3), (1, 2), (2, 5), (4, 6)])
def test_a_member_that_was_not_there_is_out_until_the_next_block(
    member: Node, block: int, server_round: int
) -> None:
    if (block, server_round) == (1, 3):
        member.ask(1)
    with pytest.raises(DeclinedError, match=f"no stream of the block that began in round {block}"):
        member.ask(server_round, terms_of(block))
    member.ask(server_round, terms_of(server_round))


def test_a_new_block_has_a_new_stream_and_the_old_one_is_gone(member: Node) -> None:
    old = noise_of(member.ask(1, arrays=BIG)).astype(float)
    member.ask(2, arrays=BIG)
    new = noise_of(member.ask(3, terms_of(3), arrays=BIG)).astype(float)
    assert abs(np.corrcoef(old, new)[0, 1]) < 5 / math.sqrt(4000)
    with pytest.raises(DeclinedError, match="no stream of the block that began in round 1"):
        member.ask(4, terms_of(1), arrays=BIG)
    member.ask(4, terms_of(3), arrays=BIG)


@pytest.mark.parametrize(
    "changed",
    [
        lambda terms: replace(terms, noise_multiplier=terms.noise_multiplier / 2),
        lambda terms: replace(terms, clipping_norm=0.5),
        lambda terms: replace(terms, parties=3),
        lambda terms: replace(terms, rounds=21),
        lambda terms: plan_of(q=0.5).terms(1.0, members=MEMBERS, block=1),
    ],
)
def test_what_a_block_began_with_stays(member: Node, changed: Callable[[Any], Any]) -> None:
    member.ask(1)
    with pytest.raises(DeclinedError, match="began with other members, noise or arrays"):
        member.ask(2, changed(terms_of()))
    with pytest.raises(DeclinedError, match="began with other members, noise or arrays"):
        member.ask(2, arrays=BIG)
    member.ask(2)


def test_other_members_are_another_block(tmp_path: Path) -> None:
    member = Node(tmp_path, "m3", policy=f"noise_members = {[*MEMBERS, 'm5']}\n")
    other = [*MEMBERS[1:], "m5"]
    pins = Path(member.config["privacy-pins"])
    pins.write_text(f'{pins.read_text()}\n"m5" = "{Identity.generate().public}"\n')
    member.ask(1)
    with pytest.raises(DeclinedError, match="began with other members, noise or arrays"):
        member.ask(2, replace(terms_of(), members=other), needed=other)
    member.ask(2, replace(terms_of(2), members=other), needed=other)


def test_the_state_is_on_the_disk_before_the_noise_leaves(
    member: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted bug: with a state that is written first thing in the next round this fails."""
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(file), real(file))[1])
    member.ask(1)
    assert synced
    (state,) = member.folder.glob("m3.central-dp/*/state")
    state.unlink()
    with pytest.raises(DeclinedError, match="no stream of the block that began in round 1"):
        member.ask(2)


def test_a_member_that_crashes_before_its_state_is_written_sends_nothing(
    member: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    member.ask(1)

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as broken:
        broken.setattr(experiment_state, "write_checksummed", full)
        with pytest.raises(LedgerError):
            member.ask(2)
    member.ask(2)  # nothing of it had left


def test_a_damaged_state_is_no_new_stream(member: Node) -> None:
    member.ask(1)
    (state,) = member.folder.glob("m3.central-dp/*/state")
    content = bytearray(state.read_bytes())
    content[-1] ^= 1
    state.write_bytes(bytes(content))
    for block in (1, 2):
        with pytest.raises(LedgerError):
            member.ask(2, terms_of(block))


def test_a_member_does_not_train_and_a_client_adds_no_noise(tmp_path: Path) -> None:
    others = ["m0", "m1", "m2", "m4", "m5"]
    member = Node(tmp_path, "m3", policy=f"noise_members = {[*MEMBERS, 'm5']}\n")
    pins = Path(member.config["privacy-pins"])
    pins.write_text(f'{pins.read_text()}\n"m5" = "{Identity.generate().public}"\n')
    with pytest.raises(DeclinedError, match="it does not train in a cohort"):
        member.ask(1, replace(terms_of(), members=others), needed=others)
    client = Node(tmp_path, "m2", policy=f"noise_members = {['m0', 'm1', 'm3', 'm4', 'm5']}\n")
    with pytest.raises(DeclinedError, match=re.escape("does not have ['m2']")):
        client.ask(1)


def test_noise_of_a_member_from_a_seed_is_told(member: Node) -> None:
    member.config["insecure-seed"] = 3
    _, own = member.ask(1)
    assert own["metrics"] == {"num-examples": 1, "insecure-noise": 1.0}


def test_only_members_say_so_in_their_hello(tmp_path: Path) -> None:
    said = [
        CentralDPClient(None, Node(tmp_path, name).context()).introduce("e")
        for name in ("m3", "ward-7")
    ]
    assert said == [{"noise-member": True}, {}]


@pytest.mark.parametrize("limit", ['schemes = ["udp"]', "max_disk = 1000"])
def test_limits_that_have_to_do_with_a_member_bind_it(tmp_path: Path, limit: str) -> None:
    member = Node(tmp_path, "m3", policy=f"{POLICY}{limit}\n")
    with pytest.raises(DeclinedError, match=limit.split()[0]):
        member.ask(1, arrays=BIG)


def test_limits_on_what_is_said_of_data_do_not_bind_a_member(tmp_path: Path) -> None:
    limits = 'max_epsilon = 0.1\nunits = ["record"]\nmax_releases = 0\n'
    Node(tmp_path, "m3", policy=POLICY + limits).ask(1)


def test_noise_beyond_the_planned_rounds_is_declined(member: Node) -> None:
    with pytest.raises((DeclinedError, InvalidParameterError, ProtocolError)):
        member.ask(21, replace(terms_of(), block=20))
