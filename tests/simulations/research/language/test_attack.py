"""The attack finds codes that a model learned, and refutes a promise that was not kept."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from flwr_privacy.clients import FedAvgClient
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.attacks.setup import AttackOptions
from flwr_privacy.simulations.research.language import attack as attacks
from flwr_privacy.simulations.research.language.attack import Finding, attack, judged, report
from flwr_privacy.simulations.research.language.exposure import CEILING
from flwr_privacy.simulations.research.language.fine_tuning import (
    METHODS,
    Federation,
    fine_tune,
)
from flwr_privacy.simulations.research.language.planted import (
    GROUPS,
    Group,
    Planted,
    plant,
    texts_with,
)
from flwr_privacy.simulations.research.language.texts import Language

SIZE = (("width", 32), ("layers", 1))
LANGUAGE = Language(0)
CLIENTS = 40


def federation(planted: Sequence[Planted], clients: int = CLIENTS, epochs: int = 12) -> Federation:
    return Federation(
        texts=texts_with(planted, LANGUAGE, clients=clients, sentences=4),
        seed=0,
        public=6400,
        rounds=2,
        epochs=epochs,
        size=SIZE,
    )


def unseen(clients: int = CLIENTS) -> list[NDArray[np.int64]]:
    return [LANGUAGE.text(LANGUAGE.speaker(c), 8, "test", c) for c in range(clients)]


@pytest.fixture(scope="module")
def without_privacy() -> Finding:
    planted = plant(0, codes=12, clients=CLIENTS)
    method = replace(METHODS["fedavg"], unit="user")  # a promise that nothing keeps
    found = attack(method, federation(planted), planted, unseen(), epsilon=0.5)
    return replace(found, epsilon=0.5)


def test_the_server_reads_repeated_codes_in_what_a_client_sends(without_privacy: Finding) -> None:
    server = without_privacy.exposures["the server"]
    assert server[Group(1, 16)].mean > 6
    assert server[Group(1, 16)].low > server[Group(0, 0)].high
    assert server[Group(0, 0)].mean < 3


def test_the_mean_of_all_clients_tells_less(without_privacy: Finding) -> None:
    groups = without_privacy.exposures
    assert groups["the model"][Group(1, 16)].mean < groups["the server"][Group(1, 16)].mean - 2


def test_a_promise_without_noise_is_refuted(without_privacy: Finding) -> None:
    assert without_privacy.audit is not None
    assert without_privacy.ceiling is not None
    assert 0.5 < without_privacy.audit.epsilon <= without_privacy.ceiling
    assert without_privacy.refuted


@pytest.mark.parametrize("name", ["udp, users", "central, shares"])
def test_a_promise_with_noise_is_not(name: str) -> None:
    planted = plant(0, codes=12, clients=CLIENTS)
    found = attack(METHODS[name], federation(planted, epochs=4), planted, unseen(), epsilon=1.0)
    assert found.epsilon is not None
    assert 0.5 < found.epsilon <= 1.0
    assert not found.refuted
    adversary = "the server" if name == "udp, users" else "the model"
    assert found.exposures[adversary][Group(1, 16)].mean < 4


@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains_the_adapters_alone(name: str) -> None:
    planted = plant(1, codes=2, clients=8)
    own = federation(planted, clients=8, epochs=1)
    tuned = fine_tune(METHODS[name], own, epsilon=100.0)
    before = own.network().state_dict()
    moved = {n for n, t in tuned.model.state_dict().items() if not torch.equal(t, before[n])}
    assert moved
    assert all("lora" in name for name in moved)
    assert (tuned.epsilon is not None) == (METHODS[name].unit is not None)
    assert {*tuned.seen} in (set(), {str(client) for client in range(8)})


def test_with_one_factor_the_other_stays() -> None:
    planted = plant(1, codes=2, clients=8)
    own = federation(planted, clients=8, epochs=1)
    tuned = fine_tune(METHODS["udp, users"], own, epsilon=8.0, one_factor=True)
    before = own.network(one_factor=True).state_dict()
    moved = {n for n, t in tuned.model.state_dict().items() if not torch.equal(t, before[n])}
    assert moved
    assert all("lora_B" in name for name in moved)


def test_what_the_server_sees_of_a_client_is_its_upload() -> None:
    planted = plant(1, codes=2, clients=8)
    own = federation(planted, clients=8, epochs=1)
    plain, coded = (fine_tune(METHODS[name], own, epsilon=1e6) for name in ("fedavg", "udp, users"))
    for tuned in (plain, coded):
        mean = {
            name: torch.stack([m.state_dict()[name] for m in tuned.seen.values()]).mean(0)
            for name in tuned.model.state_dict()
        }
        weights = [len(text) for text in own.texts]
        if tuned is plain:
            mean = {
                name: sum(
                    w * m.state_dict()[name]
                    for w, m in zip(weights, (tuned.seen[str(c)] for c in range(8)), strict=True)
                )
                / sum(weights)
                for name in mean
            }
        for name, tensor in tuned.model.state_dict().items():
            assert torch.allclose(mean[name], tensor, atol=1e-4), name


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("fedavg", ()),
        ("udp, records", (Group(1, 1),)),
        ("central, shares", (Group(1, 1), Group(1, 4), Group(1, 16))),
    ],
)
def test_a_unit_is_judged_by_what_it_promises(name: str, groups: tuple[Group, ...]) -> None:
    assert judged(METHODS[name]) == groups


def test_the_report_says_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_privacy: Finding
) -> None:
    found = iter([replace(without_privacy, method=METHODS["fedavg"], audit=None), without_privacy])
    monkeypatch.setattr(attacks, "_CODES", 2)
    monkeypatch.setattr(attacks, "attack", lambda *_, **__: next(found))
    monkeypatch.setattr(attacks, "loss_on", lambda *_: 2.5)
    monkeypatch.setattr(Federation, "base", lambda _: None)
    monkeypatch.setattr(attacks, "METHODS", {"a": METHODS["fedavg"], "b": METHODS["mspdq"]})
    said = report(AttackOptions(clients=8, records=2, out=tmp_path))
    assert [table.row_count for table in said.tables] == [4, 2]
    assert said.pictures[0].stat().st_size > 10_000
    assert "before the fine-tuning the loss is 2.500" in said.legend
    nothing, refuted = said.verdict.splitlines()
    assert "nothing is promised" in nothing
    assert refuted.endswith("REFUTED")
    assert "at most 0.50" in refuted


def test_groups_are_told_from_chance(without_privacy: Finding) -> None:
    for groups in without_privacy.exposures.values():
        assert [*groups] == [*GROUPS]
        assert all(0 <= g.low <= g.mean <= g.high <= CEILING for g in groups.values())


def test_a_round_that_failed_is_no_result() -> None:
    planted = plant(1, codes=2, clients=8)
    wrong = replace(METHODS["secure sum"], half=FedAvgClient)
    with pytest.raises(RuntimeError, match="not all clients have answered"):
        fine_tune(wrong, federation(planted, clients=8, epochs=1), epsilon=1.0)


def test_without_peft_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attacks, "find_spec", lambda _: None)
    with pytest.raises(InvalidParameterError, match=r"flwr-privacy\[adapters\]"):
        report(AttackOptions(out=tmp_path))
