"""Every value of a card, changed alone, is found, or listed here with why it is not."""

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from evidence import CLIENTS, MadeRun, stated
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_privacy.errors import DataError, FlwrPrivacyError
from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.simulations.verification.evidence import Evidence, NodeEvidence, gather
from flwr_privacy.simulations.verification.page import page
from flwr_privacy.simulations.verification.verify import verify

# What is not found, with the reason. A path has its keys and places between slashes.
NOT_FOUND = {
    r"described/.*": "what was trained; no node has it",
    r"forecast": "what was expected of the model; it is no part of the guarantee",
    r"guarantee/protects": "words; of them ledgers have only whether it is a record alone",
    r"guarantee/(adversary|neighbours|secure_sum)": "words; no file has them in another form",
    r"guarantee/(not_protected|assumptions|evidence)/\d+": "words; no file has them",
    r"guarantee/epsilon": "a larger bound is kept by charges that keep a smaller one",
    r"heads/\d+/unlike": "the server's own remark; the nodes' heads decide",
}
PLACES = list[str | int]


def leaves(value: Any, path: PLACES) -> Iterator[tuple[PLACES, Any]]:
    if isinstance(value, dict | list):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in entries:
            yield from leaves(item, [*path, key])
    else:
        yield path, value


def others(value: Any) -> list[Any]:
    """Return other values of the type, and one of another type."""
    if isinstance(value, str):
        return [value + "x", "", 3]
    if isinstance(value, bool) or value is None:
        return ["x"]
    return [value + 1, value * 2 or 3, value / 2 or 5, -1, "x"]


def changed(document: Any, path: PLACES, value: Any) -> Any:
    copied = copy.deepcopy(document)
    place = copied
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return copied


@pytest.fixture
def run(tmp_path: Path) -> MadeRun:
    made = MadeRun(tmp_path / "run", rounds=3)
    for client in CLIENTS:
        made.ledger(client)
    return made


def everything(run: MadeRun) -> Evidence:
    """Return the card with its run folder, pins, heads and ledgers."""
    ledgers = [str(run.folder.parent / "ledgers" / f"{client}.ledger") for client in CLIENTS]
    nodes = NodeEvidence.read(pins=run.pins(), heads=[run.heads()], ledgers=ledgers)
    return gather(run.folder, nodes)


def outcome(evidence: Evidence, document: Any) -> str:
    """Return what verification says of another card in the same place."""
    try:
        card = PrivacyCard.from_json(json.dumps(document))
    except DataError:
        return "no card"
    found = verify(Evidence(card=card, run=evidence.run, nodes=evidence.nodes))
    return found.outcome.name


def test_every_value_that_is_changed_alone_is_found_or_listed(run: MadeRun) -> None:
    evidence = everything(run)
    document = json.loads(run.card_path.read_text())
    assert outcome(evidence, document) == "verified"
    silent = {
        "/".join(map(str, path))
        for path, value in leaves(document, [])
        for other in others(value)
        if other != value and outcome(evidence, changed(document, path, other)) == "verified"
    }
    unlisted = {p for p in silent if not any(re.fullmatch(rule, p) for rule in NOT_FOUND)}
    assert not unlisted
    # No reason is kept for what is found by now.
    assert all(any(re.fullmatch(rule, path) for path in silent) for rule in NOT_FOUND)


def test_every_charge_that_is_left_out_is_found(run: MadeRun) -> None:
    evidence = everything(run)
    for place, one in enumerate(run.releases):
        for left in one.clients:
            card = run.card()
            kept = tuple(client for client in one.clients if client != left)
            silent = tuple(client for client in one.unanswered or () if client != left)
            card.releases[place] = replace(one, clients=kept, unanswered=silent)
            stated(card)
            for nodes in (
                evidence.nodes,
                NodeEvidence(pins=evidence.nodes.pins, heads=evidence.nodes.heads),
                NodeEvidence(ledgers=evidence.nodes.ledgers),
            ):
                found = verify(Evidence(card=card, run=None, nodes=nodes))
                assert found.outcome.name == "refused"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_card_of_garbage_is_refused_or_verified_and_nothing_else_happens(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    made = MadeRun(tmp_path_factory.mktemp("garbage") / "run", rounds=1)
    document = json.loads(made.card_path.read_text())
    path, _ = data.draw(st.sampled_from(list(leaves(document, []))))
    cut = data.draw(st.integers(1, len(path)))
    text = json.dumps(changed(document, path[:cut], data.draw(JSON)))
    made.card_path.write_text(text)
    try:
        found = verify(gather(made.folder, NodeEvidence()))
    except FlwrPrivacyError:
        return
    json.dumps(found.to_dict(), allow_nan=False)
    assert page(found).startswith("<!doctype html>")
