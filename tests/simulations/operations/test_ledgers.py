"""What `flwr-privacy ledger` shows, checks and exports of a node's ledgers."""

import csv
import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from flwr_privacy.accounting import Charge, spent
from flwr_privacy.errors import InvalidParameterError, LedgerError
from flwr_privacy.privacy.ledger import Entry, Ledger, Question
from flwr_privacy.simulations.cli import app

TIME = "2025-12-31T23:59:59Z"


def run(command: str, state: Path, *options: str | Path) -> Result:
    command_line = ["ledger", command, "--state", str(state), *map(str, options)]
    return CliRunner().invoke(app, command_line, catch_exceptions=False)


def charge(
    ledger: Ledger, experiment: str, server_round: int, *, answered: bool, **own: Any
) -> None:
    question = Question(experiment_id=experiment, phase="train", server_round=server_round)
    values = {"scheme": "udp", "unit": "user", "time": TIME, "noise_multiplier": 2.0, **own}
    relation = values.pop("neighbours", "replace_one")
    noise = Charge(neighbours=relation, noise_multiplier=values.pop("noise_multiplier"))
    with ledger.locked() as locked:
        number = locked.charge(Entry(question=question, charge=noise, **values))
        if answered:
            locked.answer(number)


@pytest.fixture
def ward(tmp_path: Path) -> Ledger:
    """Return a ledger with two experiments, seven of eleven charges answered."""
    tmp_path.chmod(0o700)
    ward = Ledger(tmp_path / "ward-7.ledger", data_set="ward-7")
    for server_round in range(1, 11):
        charge(ward, "one", server_round, answered=server_round <= 3)
    charge(ward, "two", 1, answered=True, unit="record")
    return ward


def policy(tmp_path: Path, **limits: float | str) -> Path:
    file = tmp_path / "policy.toml"
    file.write_text("".join(f"{key} = {value}\n" for key, value in limits.items()))
    return file


def total(charges: int) -> float:
    return spent(
        [Charge(neighbours="replace_one", noise_multiplier=2.0, count=charges)], delta=1e-5
    )


def test_show_says_what_was_charged_and_what_is_left(ward: Ledger, tmp_path: Path) -> None:
    limits = policy(tmp_path, max_epsilon=30.0, max_releases=12, max_releases_per_day=5)
    lines = run("show", ward.path.parent, "--policy", limits).stdout.splitlines()
    assert lines[0] == "ward-7: 11 charged, 7 never answered"
    assert lines[2].split() == [
        *("one", "udp", "user", "replace_one", "10", "7", f"{total(10):.4g}", TIME, TIME)
    ]
    assert lines[3].split() == [
        *("two", "udp", "record", "replace_one", "1", "0", f"{total(1):.4g}", TIME, TIME)
    ]
    assert [line.split(",")[0] for line in lines[4:9]] == [
        f"  never answered: train of round {r} of one" for r in range(4, 9)
    ]
    assert lines[9] == "  never answered: 2 more (ledger export has all)"
    assert lines[10] == (
        f"  epsilon {total(11):.4g} at delta 1e-05 for the neighbours replace_one "
        f"(record {total(1):.4g}, user {total(10):.4g}); "
        f"{30 - total(11):.4g} left of 30"
    )
    assert lines[11:] == [
        "  releases: 1 left of 12",
        "  releases within 24 hours: 5 left of 5",
    ]
    bare = run("show", tmp_path).stdout.splitlines()
    assert bare[-1].endswith("no policy given: --policy FILE says what is left")


def test_the_policy_may_come_from_the_nodes_environment(
    ward: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLWR_PRIVACY_POLICY", str(policy(tmp_path, max_epsilon=30.0)))
    assert "left of 30" in run("show", ward.path.parent).stdout


def test_what_is_spent_beyond_a_lowered_budget_leaves_nothing(ward: Ledger, tmp_path: Path) -> None:
    limits = policy(tmp_path, max_epsilon=1.0)
    assert "; 0 left of 1" in run("show", ward.path.parent, "--policy", limits).stdout


def test_a_cost_that_is_not_proven_leaves_nothing(ward: Ledger, tmp_path: Path) -> None:
    charge(ward, "three", 1, answered=True, scheme="m2fdp-unproven")
    limits = policy(tmp_path, max_epsilon=1000.0)
    shown = run("show", ward.path.parent, "--policy", limits)
    assert "nothing is left: the cost of some charges is not proven" in shown.stdout
    checked = run("check", ward.path.parent, "--policy", limits)
    assert "warn  ledger ward-7: it has releases whose cost is not proven" in checked.stdout


def test_charges_for_several_neighbours_are_counted_as_the_policy_counts(
    ward: Ledger, tmp_path: Path
) -> None:
    """Twice the noise over half the distance is one more charge for replaced data."""
    charge(ward, "three", 1, answered=True, noise_multiplier=4.0, neighbours="add_remove")
    shown = run("show", ward.path.parent, "--policy", policy(tmp_path, max_epsilon=30.0)).stdout
    assert f"epsilon {total(12):.4g} at delta 1e-05 for the neighbours replace_one" in shown
    alone = spent([Charge(noise_multiplier=4.0, neighbours="add_remove")], delta=1e-5)
    rows = [line.split() for line in shown.splitlines()]
    assert ["three", "udp", "user", "add_remove", "1", "0", f"{alone:.4g}", TIME, TIME] in rows
    # Nothing bounds the others for a record that is there or not.
    other = policy(tmp_path, max_epsilon=30.0, neighbours='["add_remove"]')
    checked = run("check", ward.path.parent, "--policy", other)
    assert "no accountant bounds the charges: max_epsilon is not kept" in checked.stdout
    assert "epsilon unknown" in run("show", ward.path.parent, "--policy", other).stdout


def test_json_and_csv_have_the_same_numbers(ward: Ledger, tmp_path: Path) -> None:
    limits = policy(tmp_path, max_epsilon=30.0)
    (found,) = json.loads(run("show", ward.path.parent, "--json", "--policy", limits).stdout)
    assert found["budget"]["epsilon"] == pytest.approx(total(11))
    assert found["budget"]["epsilon_left"] == pytest.approx(30 - total(11))
    rows = list(csv.DictReader(io.StringIO(run("show", ward.path.parent, "--csv").stdout)))
    for row, one in zip(rows, found["experiments"], strict=True):
        assert row["data_set"] == "ward-7"
        assert row["experiment"] == one["experiment_id"]
        assert int(row["unanswered"]) == one["unanswered"]
        assert float(row["epsilon"]) == one["epsilon"]


def test_export_has_every_charge(ward: Ledger, tmp_path: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(run("export", tmp_path).stdout)))
    assert len(rows) == 11
    assert [row["answered"] for row in rows] == ["True"] * 3 + ["False"] * 7 + ["True"]
    assert {row["noise_multiplier"] for row in rows} == {"2.0"}
    before = os.umask(0)
    try:
        done = run("export", ward.path.parent, "--json", "--out", tmp_path / "charges.json")
    finally:
        os.umask(before)
    assert done.stdout == ""
    assert (tmp_path / "charges.json").stat().st_mode & 0o777 == 0o600
    assert [row["number"] for row in json.loads((tmp_path / "charges.json").read_text())] == [
        *range(11)
    ]
    with pytest.raises(InvalidParameterError, match=r"--out = .*: expected a file that can be"):
        run("export", ward.path.parent, "--out", tmp_path / "nowhere" / "charges.csv")


def test_a_name_that_a_server_chose_is_no_formula(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "a.ledger", data_set="a")
    charge(ledger, "=HYPERLINK(1)", 1, answered=True)
    for arguments in (("show", tmp_path, "--csv"), ("export", tmp_path)):
        assert ",'=HYPERLINK(1)," in run(*arguments).stdout


def test_check_finds_nothing_wrong_with_a_good_ledger(ward: Ledger, tmp_path: Path) -> None:
    limits = policy(tmp_path, max_epsilon=30.0)
    done = run("check", tmp_path, "--policy", limits)
    assert done.exit_code == 0
    assert {line[:4] for line in done.stdout.splitlines()} == {"ok  ", "warn"}  # the unanswered
    assert "warn  ledger ward-7: 7 charges without an answer" in done.stdout


@pytest.mark.parametrize(
    ("limits", "line"),
    [
        ({"max_epsilon": 5.0}, "fail  ledger ward-7: epsilon"),
        ({"max_epsilon": 5.0}, "of 5 at delta 1e-05: more than the policy allows was released"),
        ({"max_epsilon": total(11) * 1.05}, "nearly spent"),
        ({"max_releases": 10}, "fail  ledger ward-7: 11 of max_releases = 10"),
        ({"max_releases": 11}, "warn  ledger ward-7: 11 of max_releases = 11"),
        ({"min_noise_multiplier": 2.5}, "warn  ledger ward-7: 11 charges that the policy does not"),
        ({"max_releases": 20}, "warn  ledger ward-7: the policy has no max_epsilon"),
    ],
)
def test_check_compares_with_the_policy(
    ward: Ledger, tmp_path: Path, limits: dict[str, float], line: str
) -> None:
    done = run("check", ward.path.parent, "--policy", policy(tmp_path, **limits))
    assert line in done.stdout
    assert done.exit_code == (1 if "\nfail" in "\n" + done.stdout else 0)
    assert done.exit_code == (1 if line.startswith("fail") or "more than" in line else 0)


def test_check_finds_rights_links_and_clocks(ward: Ledger, tmp_path: Path) -> None:
    charge(ward, "future", 1, answered=True, time="2999-01-01T00:00:00Z")
    assert (
        "warn  ledger ward-7: a charge of 2999-01-01T00:00:00Z is in the future"
        in run("check", ward.path.parent).stdout
    )
    ward.path.chmod(0o640)
    assert f"other users may use it: chmod 600 {ward.path}" in run("check", ward.path.parent).stdout
    ward.path.chmod(0o600)
    tmp_path.chmod(0o770)
    assert "other users may replace it" in run("check", ward.path.parent).stdout
    tmp_path.chmod(0o700)
    os.link(ward.path, tmp_path / "copy")
    done = run("check", ward.path.parent)
    assert "a second name (a hard link)" in done.stdout
    assert done.exit_code == 1


def test_check_goes_on_after_a_damaged_ledger(ward: Ledger, tmp_path: Path) -> None:
    (tmp_path / "a.ledger").write_bytes(b"damaged")
    (tmp_path / "a.ledger").chmod(0o600)
    done = run("check", tmp_path)
    assert done.exit_code == 1
    assert "does not begin with" in done.stdout
    assert "ok    ledger ward-7: 11 charges can be read" in done.stdout


def test_a_ledger_in_a_folder_that_may_only_be_listed_has_a_line(
    ward: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Path.stat

    def denied(path: Path, **options: Any) -> Any:
        if path.parent == tmp_path:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return plain(path, **options)

    monkeypatch.setattr(Path, "stat", denied)
    done = run("check", tmp_path)
    assert done.exit_code == 1
    assert done.stdout == f"fail  ledger ward-7: {ward.path} cannot be read: Permission denied\n"


@pytest.mark.parametrize("command", ["show", "check", "export"])
def test_what_is_no_ledger_is_refused(command: str, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(InvalidParameterError, match="a node's state folder with ledgers"):
            run(command, path)


@pytest.mark.parametrize("command", ["show", "check", "export"])
def test_one_of_several_ledgers_is_chosen_by_its_data_set(
    command: str, ward: Ledger, tmp_path: Path
) -> None:
    charge(Ledger(tmp_path / "ward-8.ledger", data_set="ward-8"), "one", 1, answered=True)
    both, one = run(command, tmp_path).stdout, run(command, tmp_path, "--data-set=ward-8").stdout
    assert "ward-7" in both
    assert "ward-8" in both
    assert "ward-7" not in one
    assert "ward-8" in one
    with pytest.raises(InvalidParameterError, match="expected one of 'ward-7', 'ward-8'"):
        run(command, tmp_path, "--data-set", "ward-9")


@pytest.mark.parametrize("command", ["ledger show", "ledger check", "state show", "state prune"])
def test_the_folder_may_be_named_where_the_node_names_it(
    command: str, ward: Ledger, tmp_path: Path
) -> None:
    variable = {"FLWR_PRIVACY_STATE": str(tmp_path)}
    done, said = (
        CliRunner().invoke(app, command.split(), env=variable),
        CliRunner().invoke(app, [*command.split(), "--state", str(tmp_path)]),
    )
    assert done.stdout == said.stdout
    assert done.stdout
    assert "Missing option '--state'" in CliRunner().invoke(app, command.split()).output


@pytest.mark.parametrize("command", ["show", "export"])
def test_a_damaged_ledger_is_an_error(command: str, tmp_path: Path) -> None:
    (tmp_path / "ward-7.ledger").write_bytes(b"damaged")
    with pytest.raises(LedgerError, match="does not begin with"):
        run(command, tmp_path)
