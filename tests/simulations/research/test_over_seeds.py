"""Attacks with several seeds: numbers as ranges, and the pictures of the first."""

from dataclasses import replace
from pathlib import Path

from rich.table import Table

from flwr_privacy.simulations.research.attacks.over_seeds import merged, over_seeds
from flwr_privacy.simulations.research.attacks.setup import AttackOptions, Report


def attack(options: AttackOptions) -> Report:
    """Find a number that depends on the seed, and draw it."""
    table = Table(title="found")
    for name in ("view", "recovered", "verdict"):
        table.add_column(name)
    table.add_row("single", f"{3 - options.seed} of 20", "open", end_section=True)
    table.add_row("sum of 2", f"{options.seed / 4:.1e}", "" if options.seed else "open")
    picture = options.out / "found.txt"
    picture.write_text(str(options.seed))
    return Report(
        tables=[table],
        legend="recovered: so many",
        pictures=[picture],
        verdict=f"alike\nrecovered {options.seed}" + "\nmore" * (options.seed == 3),
    )


def cells(report: Report) -> list[list[str]]:
    (table,) = report.tables
    return [[str(cell) for cell in column.cells] for column in table.columns]


def test_numbers_are_ranges_and_other_differences_are_shown(tmp_path: Path) -> None:
    options = AttackOptions(seed=0, out=tmp_path)
    report = over_seeds(attack, options, seeds=3)
    assert cells(report) == [
        ["single", "sum of 2"],
        ["1 to 3 of 20", "0.0e+00 to 5.0e-01"],
        ["open", "open or "],
    ]
    assert report.tables[0].title == "found, 3 seeds"
    assert report.tables[0].rows[0].end_section
    assert report.verdict == "alike\nrecovered 0 to 2"
    assert report.legend.splitlines()[0] == "a to b: the least and the largest of 3 seeds"
    # Texts that have not the same lines are not taken apart.
    assert over_seeds(attack, options, seeds=4).verdict.count("alike") == 4


def test_the_pictures_are_those_of_the_first_seed(tmp_path: Path) -> None:
    report = over_seeds(attack, AttackOptions(seed=1, out=tmp_path), seeds=2)
    assert [picture.read_text() for picture in report.pictures] == ["1"]
    assert list(tmp_path.iterdir()) == report.pictures


def test_one_seed_is_the_attack_itself(tmp_path: Path) -> None:
    options = AttackOptions(seed=2, out=tmp_path)
    once = over_seeds(attack, options, seeds=1)
    assert cells(once) == cells(attack(replace(options)))
    assert once.legend == "recovered: so many"


def test_what_is_no_number_is_no_range() -> None:
    assert merged(["x1 of a2", "x1 of a2"]) == "x1 of a2"
    assert merged(["5 (3-4)", "6 (2-9)"]) == "5 to 6 (2 to 3-4 to 9)"
    assert merged(["-0.5", "0.5"]) == "-0.5 to 0.5"
    assert merged(["none", "<= 2.0"]) == "none or <= 2.0"
