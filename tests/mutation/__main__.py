"""Plants errors in the rooms where one costs privacy, and lists those that no test notices.

    .venv/bin/python -m tests.mutation --mutants 306 --room noise

Works in a copy of the tree. What was found is kept in `runs/mutation.json`, so a run that was ended
goes on; `--again` tries the survivors once more. `equivalent.toml` has the mutants that no test can
tell from the code, and why.
"""

import argparse
import compileall
import json
import math
import os
import py_compile
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tests.mutation.mutants import Mutant
from tests.mutation.rooms import ROOT, equivalents, rooms, sampled
from tests.mutation.worker import FOREIGN, LIBRARIES

NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "runs", "build", "__pycache__", ".*_cache")
OUTCOMES = ("killed", "hung", "survived", "equivalent")
NO_TESTS = 5  # pytest's exit status for a module without examples
SPARE_SECONDS = 10  # of a core, beside three times what the tests use without a mutant


class Worker:
    """A copy of the tree, and the process that runs tests in it."""

    def __init__(self, root: Path, folder: Path, libraries: tuple[str, ...]) -> None:
        self.root = folder / "tree"
        shutil.copytree(root, self.root, ignore=NOT_COPIED)
        for floor in ("strategies", "clients", "simulations"):
            if (self.root / floor).exists():
                (self.root / "flwr_privacy" / floor).symlink_to(self.root / floor)
        # By content: a mutant may have the size and the second of the file it replaces.
        by_hash = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(self.root, quiet=2, invalidation_mode=by_hash)
        one = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
        paths = {"PYTHONPATH": str(self.root), "PYTEST_DEBUG_TEMPROOT": str(folder)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.mutation.worker", *libraries],
            cwd=self.root,
            env=os.environ | one | paths,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._seconds: dict[str, float] = {}

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # it ends with its input

    def _ask(self, tests: str, limit: int) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = json.dumps({"tests": tests.split(), "limit": limit})
        print(asked, file=self._process.stdin, flush=True)
        told = json.loads(self._process.stdout.readline())
        if told["code"] == FOREIGN:
            raise SystemExit("the tests imported modules that are not in the copy")
        return told

    def limit(self, tests: str) -> int:
        """Return how long the tests may run; each file must have passed without a mutant."""
        for file in tests.split():
            if file not in self._seconds:
                told = self._ask(file, 600)
                if told["code"] not in (0, NO_TESTS):
                    raise SystemExit(f"{file} fails without a mutant:\n{told['log']}")
                self._seconds[file] = told["seconds"]
        return SPARE_SECONDS + math.ceil(3 * sum(self._seconds[file] for file in tests.split()))

    def outcome(self, path: str, code: str, tests: str) -> dict[str, Any]:
        """Say whether the tests notice that a file has other code, and which of them does."""
        tests = f"{path} {tests}"  # the examples in its documentation are tests, too
        limit, file = self.limit(tests), self.root / path
        text = file.read_text(encoding="utf-8")
        file.write_text(code, encoding="utf-8")
        try:
            told = self._ask(tests, limit)
        finally:
            file.write_text(text, encoding="utf-8")
        outcome = {None: "hung", 0: "survived"}.get(told["code"], "killed")
        failed = [line for line in told["log"].splitlines() if line.startswith(("FAILED", "ERROR"))]
        return {"outcome": outcome, "seconds": round(told["seconds"], 1), "by": failed[:1]}


def shown(mutant: Mutant) -> str:
    """Return a mutant as the difference it makes."""
    return f"{mutant.path}:{mutant.line}\n{mutant.key}\n"


def table(counts: dict[str, Counter[str]]) -> str:
    """Return how many mutants of each room came to what."""
    lines = [f"{'room':12} {'planted':>8}" + "".join(f"{o:>11}" for o in OUTCOMES)]
    for room, of in [*counts.items(), ("all", sum(counts.values(), Counter()))]:
        lines.append(f"{room:12} {of.total():8}" + "".join(f"{of[o]:11}" for o in OUTCOMES))
    return "\n".join(lines)


def main(
    arguments: list[str] | None = None, *, root: Path = ROOT, libraries: tuple[str, ...] = LIBRARIES
) -> int:
    """Run the command; return 1 if a mutant survived."""
    parser = argparse.ArgumentParser(prog="tests.mutation", description=__doc__)
    every = rooms(root)
    parser.add_argument("--mutants", type=int, default=306, help="in all rooms together")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--room", action="append", choices=every, help="only this one")
    parser.add_argument("--again", action="store_true", help="try what survived before")
    parser.add_argument("--out", type=Path, default=root / "runs" / "mutation.json")
    asked = parser.parse_args(arguments)
    chosen = asked.room or list(every)
    found = json.loads(asked.out.read_text(encoding="utf-8")) if asked.out.exists() else {}
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    reasons, survivors = equivalents(root), []
    counts = {room: Counter[str]() for room in chosen}
    with tempfile.TemporaryDirectory() as folder, Worker(root, Path(folder), libraries) as worker:
        for room in chosen:
            files, size = every[room], -(-asked.mutants // len(chosen))
            for mutant, code in sampled(root, files, size, asked.seed):
                known = found.get(mutant.key)
                if mutant.key in reasons:
                    counts[room]["equivalent"] += 1
                    continue
                if known is None or (asked.again and known["outcome"] == "survived"):
                    known = found[mutant.key] = worker.outcome(
                        mutant.path, code, files[mutant.path]
                    )
                    asked.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
                counts[room][known["outcome"]] += 1
                if known["outcome"] == "survived":
                    survivors.append(mutant)
                    print(shown(mutant), flush=True)
    print(table(counts))
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())
