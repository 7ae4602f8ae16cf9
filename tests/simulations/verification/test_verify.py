"""What is found out about a card: by itself, from its run folder, and from the nodes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from evidence import CHARGE, CLIENTS, EXPERIMENT, IDENTITIES, PROMISE, MadeRun, release, stated

from flwr_privacy.errors import DataError, InvalidParameterError
from flwr_privacy.privacy.card import CardHead, PrivacyCard
from flwr_privacy.privacy.guarantee import Guarantee
from flwr_privacy.privacy.ledger import Entry, Ledger, Question
from flwr_privacy.simulations.verification.evidence import NodeEvidence, gather
from flwr_privacy.simulations.verification.findings import OUTCOMES
from flwr_privacy.simulations.verification.verify import Verification, Wanted, verify
from flwr_privacy.wire.pins import Identity


@pytest.fixture
def run(tmp_path: Path) -> MadeRun:
    return MadeRun(tmp_path / "run")


def check(place: Path, *, wanted: Wanted | None = None, **nodes: Any) -> Verification:
    return verify(gather(place, NodeEvidence.read(**nodes)), wanted)


def full(run: MadeRun, **wanted: Any) -> Verification:
    """Verify with pins and with fresh heads."""
    return check(run.folder, wanted=Wanted(**wanted), pins=run.pins(), heads=[run.heads()])


def came_to(found: Verification, outcome: str, text: str = "") -> None:
    assert found.outcome.name == outcome, found.sentence()
    assert text in found.sentence()


# -- How far the evidence goes -------------------------------------------------------------------


def test_evidence_decides_between_the_outcomes_without_a_fault(run: MadeRun) -> None:
    pins, heads = run.pins(), run.heads()
    came_to(full(run), "verified", "4 releases of 3 clients")
    came_to(check(run.card_path, pins=pins, heads=[heads]), "verified")
    came_to(check(run.folder, pins=pins), "signed", "later charges could be missing")
    came_to(check(run.folder), "self-declared", "only the card says whose keys these are")
    came_to(check(run.folder, heads=[heads]), "self-declared")
    run.write(replace(run.card(), heads=[]))
    came_to(check(run.folder), "consistent", "the server's own files")
    came_to(check(run.card_path), "arithmetic", "whether charges are missing cannot be checked")


def test_exit_codes_are_apart_and_only_what_is_verified_or_simulated_is_a_success() -> None:
    codes = [one.exit_code for one in OUTCOMES.values() if one.exit_code]
    assert len(set(codes)) == len(codes) == len(OUTCOMES) - 2
    assert min(codes) > 12  # those of errors
    assert {name for name, one in OUTCOMES.items() if not one.exit_code} == {
        "verified",
        "simulated",
    }


def test_a_simulation_says_that_there_are_no_nodes(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run", engine="ray")
    run.write(replace(run.card(), heads=[]))
    came_to(check(run.folder), "simulated", "no nodes whose word could be checked")
    came_to(check(run.card_path), "arithmetic")
    # Whoever expects nodes does not take the server's word that there are none.
    came_to(check(run.folder, pins=run.pins()), "consistent")


def test_every_client_counts(run: MadeRun) -> None:
    some = run.heads(*(run.head(client) for client in CLIENTS[:2]))
    came_to(check(run.folder, pins=run.pins(), heads=[some]), "signed")
    run.write(replace(run.card(), heads=run.card().heads[:2]))
    came_to(check(run.folder, pins=run.pins(), heads=[some]), "consistent")
    came_to(check(run.card_path, pins=run.pins(), heads=[some]), "arithmetic")


@pytest.mark.parametrize("charged_lost", [True, False])
def test_what_was_lost_may_or_may_not_be_in_a_ledger(tmp_path: Path, charged_lost: bool) -> None:
    run = MadeRun(tmp_path / "run", charged_lost=charged_lost)
    came_to(full(run), "verified")
    ledgers = [str(run.ledger(client)) for client in CLIENTS]
    came_to(check(run.folder, ledgers=ledgers), "verified")


def test_a_head_of_an_earlier_time_confirms_nothing_later(run: MadeRun) -> None:
    found = check(
        run.folder, pins=run.pins(), heads=[run.heads(*(run.head(c, 2) for c in CLIENTS))]
    )
    came_to(found, "signed")
    (finding,) = [one for one in found.findings if one.check == "nodes' heads"]
    assert "covers 2 of its 4 charges" in finding.detail


def test_heads_of_other_experiments_are_left_out(run: MadeRun) -> None:
    other = replace(run.head(CLIENTS[0]), experiment="another")
    found = check(run.folder, pins=run.pins(), heads=[run.heads(other)])
    came_to(found, "signed")
    assert any("none of them is of this experiment" in one.detail for one in found.findings)


# -- What is refused -----------------------------------------------------------------------------


def test_a_card_that_was_cut_with_its_epsilon_restated_is_never_verified(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run", rounds=20)
    pins, heads = run.pins(), run.heads()
    run.write(run.card(2))  # its heads are those of round 2, and everything is computed again
    came_to(check(run.card_path), "self-declared")
    came_to(check(run.folder), "refused", "metrics.jsonl counts 9 charges after round 3, the card")
    came_to(check(run.card_path, pins=pins), "signed")
    text = "has 20 charges of this experiment, the card has 2"
    came_to(check(run.card_path, pins=pins, heads=[heads]), "refused", text)
    run.write(replace(run.card(2), heads=run.card().heads))
    came_to(check(run.card_path), "refused", text)
    run.write(replace(run.card(2), heads=[]))
    came_to(check(run.card_path), "arithmetic")
    ledgers = [str(run.ledger(CLIENTS[0]))]
    text = f"the ledger of client '{CLIENTS[0]}' has 18 charges that the card lacks"
    came_to(check(run.card_path, ledgers=ledgers), "refused", text)
    # The server cuts its own files too.
    run.write_lines(run.card(2))
    assert len(run.path("metrics.jsonl").read_text().splitlines()) == 21
    came_to(check(run.folder, pins=pins, heads=[heads]), "refused", "has 20 charges")


def test_ledgers_in_the_run_folder_are_compared(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run", engine="inline")
    for client in CLIENTS:
        run.ledger(client, place="run/clients")
    came_to(check(run.folder), "simulated")
    run.write(run.card(2))
    run.write_lines(run.card(2))
    came_to(check(run.folder), "refused", "has 2 charges that the card lacks")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"scheme": "acfl"}, "4 charges of another scheme"),
        ({"unit": "record"}, "4 charges that protect a record alone"),
        ({"charge": replace(CHARGE, noise_multiplier=3.9)}, "4 charges that the card lacks"),
    ],
)
def test_a_ledger_that_differs_is_found(run: MadeRun, changes: dict[str, Any], text: str) -> None:
    found = check(run.folder, ledgers=[str(run.ledger(CLIENTS[0], **changes))])
    came_to(found, "refused", text)


def test_a_ledger_that_was_set_back_is_found(run: MadeRun) -> None:
    short = MadeRun(run.folder.parent / "other", rounds=3)
    path = short.ledger(CLIENTS[0])
    came_to(check(run.folder, ledgers=[str(path)]), "refused", "lacks 1 charges that were answered")


def test_the_client_of_a_ledger_can_be_named(run: MadeRun) -> None:
    path = run.ledger(CLIENTS[0])
    renamed = [f"{CLIENTS[1]}={path}", f"{CLIENTS[0]}={path}"]
    came_to(check(run.folder, ledgers=renamed), "self-declared")
    with pytest.raises(InvalidParameterError, match="one ledger for each client"):
        check(run.folder, ledgers=[str(path), str(path)])
    with pytest.raises(InvalidParameterError, match="--ledger = 'nowhere': expected a file"):
        check(run.folder, ledgers=["nowhere"])


def test_another_client_on_the_card_is_not_the_pinned_one(run: MadeRun) -> None:
    card = run.card()
    names = {CLIENTS[0]: "ward-z"}
    for place, one in enumerate(card.releases):
        renamed = tuple(names.get(client, client) for client in one.clients)
        card.releases[place] = replace(one, clients=renamed)
    run.write(replace(card, heads=card.heads[1:]))
    came_to(
        full(run), "refused", "client 'ward-a' has 4 charges of this experiment, the card has 0"
    )


@pytest.mark.parametrize("changes", [{"request": 1}, {"phase": "evaluate"}, {"server_round": 9}])
def test_a_charge_that_has_another_name_does_not_lead_to_the_head(
    run: MadeRun, changes: dict[str, Any]
) -> None:
    card = run.card()
    card.releases[0] = replace(card.releases[0], **changes)
    run.write(card)
    came_to(
        check(run.card_path), "refused", "client 'ward-a' do not lead to the head of its ledger"
    )


def test_a_head_that_another_key_signed_is_refused(run: MadeRun) -> None:
    forged = run.head(CLIENTS[0], identity=Identity.generate())
    run.write(replace(run.card(), heads=[CardHead(signed=forged)]))
    came_to(check(run.folder, pins=run.pins()), "refused", "signed with another key")
    unsigned = run.head(CLIENTS[0], identity=None)
    run.write(replace(run.card(), heads=[CardHead(signed=unsigned)]))
    came_to(check(run.folder, pins=run.pins()), "refused", "is not signed, its key is pinned")
    came_to(check(run.folder), "consistent")
    replayed = replace(run.head(CLIENTS[1]), client=CLIENTS[0])
    run.write(replace(run.card(), heads=[CardHead(signed=replayed)]))
    came_to(check(run.folder), "refused", "the signature of the head")


def test_the_server_s_excuse_does_not_hide_charges(run: MadeRun) -> None:
    card = run.card(2)
    card.heads = [CardHead(signed=run.head(c), unlike="it was set back") for c in CLIENTS]
    run.write(card)
    came_to(check(run.card_path), "refused", "has 4 charges of this experiment, the card has 2")
    card = run.card()
    card.heads = [replace(head, unlike="it was set back") for head in card.heads]
    run.write(card)
    came_to(check(run.folder, pins=run.pins()), "consistent")


def test_a_card_without_a_release_has_nothing_to_verify(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run")
    run.write(stated(PrivacyCard(experiment_id=EXPERIMENT, guarantee=PROMISE)))
    came_to(check(run.card_path), "nothing", "the card has no release")
    came_to(check(run.folder), "refused", "metrics.jsonl counts 3 charges after round 1")
    nothing = Guarantee(scheme="fedavg", protects="nothing", adversary="nobody")
    run.write(PrivacyCard(experiment_id=EXPERIMENT, guarantee=nothing))
    came_to(check(run.card_path), "nothing", "fedavg protects nobody's data")
    empty = stated(
        PrivacyCard(experiment_id=EXPERIMENT, guarantee=PROMISE, releases=[release(1, ())])
    )
    run.write(empty)
    came_to(check(run.card_path), "nothing")


def test_a_card_that_states_no_epsilon_has_nothing_to_verify(run: MadeRun) -> None:
    card = run.card()
    card.stated, card.attacker = {}, None
    card.guarantee = replace(PROMISE, epsilon=None, delta=None)
    run.write(card)
    came_to(full(run), "nothing", "the card states no epsilon")


def test_a_void_guarantee_is_no_success_whoever_says_so(run: MadeRun) -> None:
    card = run.card()
    card.guarantee = replace(card.guarantee, void="noise from a seed")
    run.write(card)
    came_to(full(run), "void", "noise from a seed")
    # The card keeps silent; the summary, the rounds or the name of the experiment do not.
    run.write(run.card())
    came_to(full(run), "verified")
    summary = json.loads(run.path("summary.json").read_text())
    run.path("summary.json").write_text(json.dumps({**summary, "test_seed": 0}))
    came_to(full(run), "void", "the card does not say so")
    run.path("summary.json").write_text(json.dumps(summary))
    text = run.path("metrics.jsonl").read_text()
    run.path("metrics.jsonl").write_text(
        text.replace('"train": {}', '"train": {"insecure-noise": 1}', 1)
    )
    came_to(full(run), "void")
    seeded = replace(run.card(), experiment_id="test-seed-3", heads=[])
    run.write(seeded)
    came_to(check(run.card_path), "void")


def test_an_epsilon_without_meaning_is_accepted_only_by_name(run: MadeRun) -> None:
    card = run.card()
    card.releases = [
        replace(one, charge=replace(CHARGE, noise_multiplier=0.0008)) for one in card.releases
    ]
    card.guarantee = replace(PROMISE, epsilon=1e7)
    run.write(replace(stated(card), heads=[]))
    assert card.stated["gdp"] > 1e6
    for wanted in (Wanted(), Wanted(max_epsilon=1e6)):
        came_to(check(run.card_path, wanted=wanted), "policy", "epsilon 1e+07 is above the largest")
    came_to(check(run.card_path, wanted=Wanted(max_epsilon=1e7)), "arithmetic")


def test_the_largest_epsilon_is_of_what_is_promised_and_of_what_was_spent(run: MadeRun) -> None:
    came_to(full(run, max_epsilon=8.0), "verified")
    came_to(full(run, max_epsilon=7.99), "policy", "epsilon 8 is above")
    card = run.card()
    card.guarantee = replace(card.guarantee, epsilon=None)
    run.write(card)
    spent = card.stated["gdp"]
    came_to(full(run, max_epsilon=spent * (1 + 1e-9)), "verified")
    came_to(full(run, max_epsilon=spent * (1 - 1e-9)), "policy")


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_limit_has_to_be_one(value: float) -> None:
    with pytest.raises(InvalidParameterError, match="--max-epsilon"):
        Wanted(max_epsilon=value)
    with pytest.raises(InvalidParameterError, match="--neighbours"):
        Wanted(neighbours="replace")


def test_another_relation_is_accepted_only_by_name(run: MadeRun) -> None:
    came_to(full(run, neighbours="replace_one"), "verified")
    came_to(full(run, neighbours="add_remove"), "policy", "for replace_one and not for add_remove")
    card = run.card()
    card.releases[0] = replace(card.releases[0], charge=replace(CHARGE, neighbours="add_remove"))
    run.write(card)
    with pytest.raises(DataError, match="no privacy card"):  # different ones do not add up
        full(run)


def test_bounds_of_an_attacker_are_recomputed(run: MadeRun) -> None:
    card = run.card()
    assert card.attacker is not None
    run.write(replace(card, attacker=None))
    came_to(full(run), "verified")
    better = replace(card.attacker, advantage=card.attacker.advantage * (1 - 1e-5))
    run.write(replace(card, attacker=better))
    came_to(full(run), "refused", "the charges give other bounds than the card states")


def test_requests_that_the_card_lacks_are_found(run: MadeRun) -> None:
    def asked(experiment: str, question: str, *clients: str) -> None:
        costs = {question: {client: CHARGE.to_dict() for client in clients}}
        text = json.dumps({"experiment_id": experiment, "asked": costs})
        run.path("asked.json").write_text(text)

    asked(EXPERIMENT, "train 4 0", *CLIENTS)
    came_to(full(run), "verified")
    asked(EXPERIMENT, "train 5 0", *CLIENTS)
    came_to(full(run), "refused", "asked.json has 3 requests that the card has no charge of")
    asked(EXPERIMENT, "train 4 0", *CLIENTS, "ward-d")
    came_to(full(run), "refused", "asked.json has 1 requests")
    asked("another", "train 5 0", *CLIENTS)
    came_to(full(run), "verified")


def test_a_run_that_goes_on_may_have_charges_of_a_round_that_is_not_over(run: MadeRun) -> None:
    lines = run.path("metrics.jsonl").read_text().splitlines(keepends=True)
    run.path("metrics.jsonl").write_text("".join(lines[:-1]))
    came_to(full(run), "verified")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"charged": 13}, "counts 13 charges after round 4, the card has 12"),
        ({"charged": 11}, "counts 11 charges in all, the card has 12"),
        ({"scheme": {"epsilon": 1.0}}, "metrics.jsonl says that epsilon 1 was spent"),
    ],
)
def test_a_round_that_says_something_else_is_found(
    run: MadeRun, change: dict[str, Any], text: str
) -> None:
    *lines, last = run.path("metrics.jsonl").read_text().splitlines(keepends=True)
    changed = json.dumps({**json.loads(last), **change}) + "\n"
    run.path("metrics.jsonl").write_text("".join([*lines, changed]))
    came_to(full(run), "refused", text)


def test_charges_that_were_moved_to_a_later_round_are_found(run: MadeRun) -> None:
    card = replace(run.card(), heads=[])
    card.releases[0] = replace(card.releases[0], server_round=4, request=1)
    run.write(card)
    came_to(check(run.folder), "refused", "counts 3 charges after round 1, the card has 0")


def test_a_ledger_of_somebody_else_confirms_nothing(run: MadeRun) -> None:
    path = run.folder.parent / "ward-z.ledger"
    question = Question(experiment_id="another", phase="train", server_round=1)
    with Ledger(path, data_set="ward-z", durable=False).locked() as ledger:
        ledger.charge(Entry(question=question, scheme="udp", unit="user", charge=CHARGE))
    found = check(run.folder, ledgers=[str(path)])
    (finding,) = [one for one in found.findings if one.check == "nodes' ledgers"]
    assert (finding.result, finding.detail) == (
        "not checkable",
        "no ledger is of a client on the card",
    )


def test_a_card_of_another_experiment_is_found(run: MadeRun) -> None:
    summary = json.loads(run.path("summary.json").read_text())
    run.path("summary.json").write_text(json.dumps({**summary, "experiment_id": "other"}))
    came_to(full(run), "refused", "summary.json is of another experiment")


@pytest.mark.parametrize("name", ["metrics.jsonl", "asked.json", "summary.json"])
@pytest.mark.parametrize("text", ["{", "[]\n[]\n", "\u00e9", "7\n"])
def test_a_damaged_file_of_the_server_is_named(run: MadeRun, name: str, text: str) -> None:
    run.path(name).write_text(text + "\n", encoding="latin-1")
    with pytest.raises(DataError, match=name):
        check(run.folder)


def test_keys_have_to_be_those_of_the_pins(run: MadeRun) -> None:
    others = run.path("others.toml")
    keys = {name: Identity.generate().public for name in IDENTITIES}
    others.write_text("[clients]\n" + "".join(f'"{k}" = "{v}"\n' for k, v in keys.items()))
    found = check(run.folder, pins=others, heads=[run.heads()])
    came_to(found, "refused", "signed with another key")
