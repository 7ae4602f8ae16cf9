"""Which files get mutants, which tests must notice them, and which mutants no test can notice."""

import itertools
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.mutation.mutants import Mutant, mutants

ROOT = Path(__file__).parents[2]
FOLDER = Path("tests/mutation")


def rooms(root: Path) -> dict[str, dict[str, str]]:
    """Return for each room its files and the tests of each, separated by spaces."""
    return tomllib.loads((root / FOLDER / "rooms.toml").read_text(encoding="utf-8"))


def equivalents(root: Path) -> dict[str, str]:
    """Return the keys of mutants that behave like the code, or that nobody is hurt by, and why."""
    listed = tomllib.loads((root / FOLDER / "equivalent.toml").read_text(encoding="utf-8"))
    return {
        f"{one['where']}\n- {one['old']}\n+ {one['new']}": one["reason"]
        for one in listed.get("equivalent", [])
    }


def sampled(
    root: Path, files: dict[str, str], size: int, seed: int
) -> Iterator[tuple[Mutant, str]]:
    """Yield mutants of a room and the module with each; a larger sample begins with a smaller."""
    texts = {path: (root / path).read_text(encoding="utf-8") for path in files}
    every = [mutant for path, text in texts.items() for mutant in mutants(path, text)]
    ranked = sorted(every, key=lambda mutant: mutant.rank(seed))
    planted = ((mutant, mutant.planted(texts[mutant.path])) for mutant in ranked)
    yield from itertools.islice(((m, code) for m, code in planted if code is not None), size)
