"""The command plants what it says, in a copy, and reports what no test notices."""

import ast
import json
import shutil

import pytest

from tests.mutation.__main__ import main
from tests.mutation.mutants import mutants
from tests.mutation.rooms import FOLDER, ROOT, equivalents, rooms, sampled

FILES = {path: tests for files in rooms(ROOT).values() for path, tests in files.items()}


def changed(line: str) -> set[str]:
    """Return what becomes of a line of a function, without the parentheses around the change."""
    text = f"def f(x, y, z):\n    {line}\n"
    found = mutants("m.py", text)
    assert all(mutant.where == "m.py::f" for mutant in found)
    return {
        ast.unparse(ast.parse(code).body[0].body[0])
        for mutant in found
        if (code := mutant.planted(text)) is not None
    }


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x = y < z", {"x = y <= z", "x = y >= z"}),
        ("x = y >= z", {"x = y > z", "x = y < z"}),
        ("x = y == z", {"x = y != z"}),
        ("x = y not in z", {"x = y in z"}),
        ("x = y + z", {"x = y - z"}),
        ("x = y ** z", {"x = y * z"}),
        ("x = y // z", {"x = y * z"}),
        ("x -= y", {"x += y"}),
        ("x = y and z", {"x = y or z"}),
        ("x = not y", {"x = y"}),
        ("x = -y", {"x = y"}),
        ("x = True", {"x = False"}),
        ("x = 3", {"x = 4", "x = 6"}),
        ("x = 0.5", {"x = 1.5", "x = 1.0"}),
        ("check(x)", {"pass", "x"}),
        ("charge(x, y=z)", {"pass"}),
        ("if x: raise ValueError('a text' + 1)", {"pass"}),
        ("return sqrt(x)", {"return x"}),
        ("return clip(x, y=z)", {"return x"}),
        ("x = f(y, z)", {"x = f(z, y)"}),
        ("x = min(y, z)", {"x = max(y, z)"}),
        ("x = y.sum()", {"x = y.mean()"}),
        ("x = np.floor(y)", {"x = np.ceil(y)", "x = y"}),
        ("x: list[int | None] = f'{y + 1}'", set()),
        ("raise ValueError(x + 1)", set()),
    ],
)
def test_a_line_has_these_mutants(line, expected):
    assert changed(line) == expected


def test_a_mutant_keeps_the_operations_around_it_apart():
    assert changed("x = y * 2 - z") == {
        "x = y * 2 + z",
        "x = y / 2 - z",
        "x = y * 3 - z",
        "x = y * 4 - z",
    }
    assert "x = y % 2 ** z" not in changed("x = (y + 2) ** z")


def test_a_larger_sample_begins_with_a_smaller_one_and_lines_above_do_not_change_it(tmp_path):
    path = next(iter(FILES))
    keys = [[m.key for m, _ in sampled(ROOT, {path: ""}, size, 0)] for size in (5, 20)]
    assert keys[1][:5] == keys[0]
    moved = tmp_path / path
    moved.parent.mkdir(parents=True)
    moved.write_text("#\n#\n" + (ROOT / path).read_text(encoding="utf-8"), encoding="utf-8")
    assert [m.key for m, _ in sampled(tmp_path, {path: ""}, 20, 0)] == keys[1]
    assert [m.key for m, _ in sampled(ROOT, {path: ""}, 5, 1)] != keys[0]


def test_the_rooms_name_files_and_tests_that_are_there():
    for path, tests in FILES.items():
        assert [p for p in (path, *tests.split()) if not (ROOT / p).exists()] == []


def test_every_mutant_said_to_be_equivalent_can_be_planted_and_has_a_reason():
    keys = {m.key for p in FILES for m in mutants(p, (ROOT / p).read_text(encoding="utf-8"))}
    assert equivalents(ROOT).keys() <= keys
    assert all(len(reason) > 10 for reason in equivalents(ROOT).values())


CODE = """\
def clipped(x, bound):
    while x > bound:
        x -= 1
    return x


def noised(x):
    return x + 2


def idle(x):
    return x == x
"""
TESTS = """\
from flwr_privacy.tiny import clipped


def test_a_value_is_clipped():
    assert clipped(6, 3) == 3
    assert clipped(2, 3) == 2
"""


@pytest.fixture
def tree(tmp_path):
    """Return a tree of one module, which has a function without a test."""
    shutil.copytree(ROOT / FOLDER, tmp_path / FOLDER)
    (tmp_path / "tests" / "test_tiny.py").write_text(TESTS, encoding="utf-8")
    (tmp_path / "flwr_privacy").mkdir()
    (tmp_path / "flwr_privacy" / "__init__.py").touch()
    (tmp_path / "flwr_privacy" / "tiny.py").write_text(CODE, encoding="utf-8")
    table = '[tiny]\n"flwr_privacy/tiny.py" = "tests/test_tiny.py"\n'
    (tmp_path / FOLDER / "rooms.toml").write_text(table, encoding="utf-8")
    reason = "it is told from the code by nobody"
    where = 'where = "flwr_privacy/tiny.py::idle"\nold = "return x == x"\nnew = "return (x != x)"\n'
    equivalent = f'[[equivalent]]\n{where}reason = "{reason}"\n'
    (tmp_path / FOLDER / "equivalent.toml").write_text(equivalent, encoding="utf-8")
    return tmp_path


def test_what_no_test_notices_is_reported_and_the_tree_stays_as_it_is(tree, capsys, monkeypatch):
    monkeypatch.setattr("tests.mutation.__main__.SPARE_SECONDS", 1)
    assert main(["--mutants", "99"], root=tree, libraries=("pytest",)) == 1
    told = capsys.readouterr().out
    assert "tiny.py:8\nflwr_privacy/tiny.py::noised\n- return x + 2\n+ return (x - 2)" in told
    found = json.loads((tree / "runs" / "mutation.json").read_text(encoding="utf-8"))
    outcomes = {key.partition("\n+ ")[2]: of["outcome"] for key, of in found.items()}
    assert outcomes["x -= 2"] == "killed"
    assert outcomes["x += 1"] == "hung"
    assert outcomes["return x + 3"] == "survived"
    assert (tree / "flwr_privacy" / "tiny.py").read_text(encoding="utf-8") == CODE
    room = next(line.split() for line in told.splitlines() if line.startswith("tiny "))
    assert [int(number) for number in room[1:]] == [8, 3, 1, 3, 1]


def test_a_run_goes_on_where_one_ended(tree, capsys):
    key = "flwr_privacy/tiny.py::noised\n- return x + 2\n+ return (x - 2)"
    every = [m.key for m in mutants("flwr_privacy/tiny.py", CODE)]
    found = {key: {"outcome": "killed"} for key in every}
    (tree / "runs").mkdir()
    out = tree / "runs" / "mutation.json"
    out.write_text(json.dumps(found), encoding="utf-8")
    assert main([], root=tree, libraries=()) == 0
    assert json.loads(out.read_text(encoding="utf-8")) == found
    found[key] = {"outcome": "survived"}
    out.write_text(json.dumps(found), encoding="utf-8")
    (tree / "tests" / "test_tiny.py").write_text(
        "from flwr_privacy.tiny import noised\n\n\ndef test_noise():\n    assert noised(0) == 2\n",
        encoding="utf-8",
    )
    assert main(["--again"], root=tree, libraries=("pytest",)) == 0
    assert json.loads(out.read_text(encoding="utf-8"))[key]["outcome"] == "killed"


def test_tests_that_fail_without_a_mutant_end_the_run(tree):
    wrong = TESTS.replace("== 3", "== 4")
    (tree / "tests" / "test_tiny.py").write_text(wrong, encoding="utf-8")
    with pytest.raises(SystemExit, match="fails without a mutant"):
        main([], root=tree, libraries=())
