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
from flwr_privacy.simulations.research.language import report as reports
from flwr_privacy.simulations.research.language.attack import Measured, attack, judged
from flwr_privacy.simulations.research.language.exposure import CEILING
from flwr_privacy.simulations.research.language.findings import Finding, compared, pooled
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
from flwr_privacy.simulations.research.language.report import report
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
    told = attack(method, federation(planted), planted, unseen(), epsilon=0.5)
    return pooled(method, one_factor=False, measured=[replace(told, epsilon=0.5)])


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
    method = METHODS[name]
    told = attack(method, federation(planted, epochs=4), planted, unseen(), epsilon=1.0)
    found = pooled(method, one_factor=False, measured=[told])
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
        ("udp, dp-sgd", (Group(1, 1),)),
        ("central, shares", (Group(1, 1), Group(1, 4), Group(1, 16))),
    ],
)
def test_a_unit_is_judged_by_what_it_promises(name: str, groups: tuple[Group, ...]) -> None:
    assert judged(METHODS[name]) == groups


def measured(loss: float, epsilon: float | None = 8.0, codes: int = 2) -> Measured:
    """Return what a fine-tuning tells that tells of each code all, or nothing."""
    exposures = {str(group): [12.0 if group.clients else 1.0] * codes for group in GROUPS}
    coins = [bool(code % 2) for code in range(4 * codes)]
    return Measured(
        loss=loss,
        epsilon=epsilon,
        exposures={"the model": exposures},
        margins=[1.0 if coin else -1.0 for coin in coins],
        coins=coins,
    )


def test_codes_of_all_seeds_are_pooled() -> None:
    told = [measured(2.0), measured(2.2, epsilon=7.5, codes=4), measured(2.4)]
    found = pooled(METHODS["central, shares"], one_factor=True, measured=told)
    assert found.name == "central, shares, FFA"
    assert (round(found.loss[0], 6), round(found.loss[1], 4)) == (2.2, 0.1155)
    assert found.epsilon == 8.0
    assert found.exposures["the model"][Group(1, 1)].codes == 8
    assert found.audit is not None
    assert (found.audit.canaries, found.audit.guesses, found.audit.correct) == (32, 16, 16)
    alone = pooled(METHODS["central, shares"], one_factor=True, measured=told[:1])
    assert alone.audit is not None
    assert alone.audit.epsilon < found.audit.epsilon


@pytest.mark.parametrize(
    ("ffa", "verdict"),
    [
        ((1.9, 2.11, 2.305, 1.9, 2.1), "reproduced"),
        ((2.1, 2.31, 2.505, 2.1, 2.3), "not reproduced"),
        ((1.9, 2.3, 2.4, 1.9, 2.1), "undecided"),
        ((1.9, 2.11, 2.3, 1.9), "undecided"),  # of too few seeds
        ((1.9,), "undecided"),  # of one seed
    ],
)
def test_losses_with_and_without_one_factor_are_compared_by_seed(
    ffa: tuple[float, ...], verdict: str
) -> None:
    method, lora = METHODS["udp, users"], (2.0, 2.2, 2.4, 2.0, 2.2)[: len(ffa)]
    both = [
        pooled(method, one_factor=half, measured=[measured(loss) for loss in losses])
        for half, losses in ((False, lora), (True, ffa))
    ]
    plain = pooled(METHODS["fedavg"], one_factor=False, measured=[measured(9.0, epsilon=None)])
    (one,) = compared([plain, *both])
    assert one.name == "udp, users"
    assert np.isclose(one.mean, np.mean(lora) - np.mean(ffa))
    assert one.verdict == verdict


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make the attack small, and without training; return the seeds that were trained."""
    trained: list[int] = []

    def told(method: object, federation: Federation, *_: object, one_factor: bool, **__: object):
        trained.append(federation.seed)
        return measured(2.0 - 0.5 * one_factor + 0.1 * federation.seed, epsilon=0.5)

    monkeypatch.setattr(reports, "_CODES", 2)
    monkeypatch.setattr(reports, "attack", told)
    monkeypatch.setattr(reports, "loss_on", lambda *_: 2.5)
    monkeypatch.setattr(Federation, "base", lambda _: None)
    some = {name: METHODS[name] for name in ("fedavg", "central, shares")}
    monkeypatch.setattr(reports, "METHODS", some)
    return trained


def test_the_report_says_all_of_it(tmp_path: Path, small: list[int]) -> None:
    said = report(AttackOptions(clients=8, records=2, out=tmp_path), seeds=3)
    assert small == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [table.row_count for table in said.tables] == [3, 3, 1]
    assert next(iter(said.tables[1].columns[2].cells)) == "2.100 +- 0.058"
    assert said.pictures[0].stat().st_size > 10_000
    assert "before the fine-tuning the loss is 2.500" in said.legend
    nothing, refuted, _, both = said.verdict.splitlines()
    assert "nothing is promised" in nothing
    assert refuted.endswith("REFUTED")
    assert "at most 0.50" in refuted
    assert both.endswith("is lower by 0.5000 +- 0.0000; the claim that it is lower: undecided")


def test_finished_fine_tunings_are_kept_unless_settings_differ(
    tmp_path: Path, small: list[int]
) -> None:
    options = AttackOptions(clients=8, records=2, seed=1, out=tmp_path)
    first = report(options)
    again = report(options, seeds=2)
    assert small == [1, 1, 1, 2, 2, 2]
    assert len([*(tmp_path / "canaries").iterdir()]) == 6
    assert len(first.tables) == len(again.tables) == 3
    report(replace(options, records=3))
    assert small == [1, 1, 1, 2, 2, 2, 1, 1, 1]


def test_each_seed_has_other_clients_and_one_base_model() -> None:
    first, second = (
        reports._draw_clients(seed, clients=48, sentences=3).federation for seed in (0, 1)
    )
    assert first.base_seed == second.base_seed == 0
    assert (first.seed, second.seed) == (0, 1)
    assert not any(np.array_equal(a, b) for a, b in zip(first.texts, second.texts, strict=True))


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
    monkeypatch.setattr(reports, "find_spec", lambda _: None)
    with pytest.raises(InvalidParameterError, match=r"flwr-privacy\[adapters\]"):
        report(AttackOptions(out=tmp_path))
