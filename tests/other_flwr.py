"""Runs some tests on the oldest or the newest flwr: `python -m tests.other_flwr oldest`.

`.venv-oldest` or `.venv-newest` has that flwr, and what it needs in other versions.
All else comes from the environment that runs this.
"""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import version

from packaging.requirements import Requirement

from .environments import ROOT, made

TESTS = (
    "tests/test_drop_in.py",
    "tests/test_places.py",
    "tests/test_release.py",
    "tests/test_upstream.py",
    "tests/flwr_privacy/wire",
    "tests/simulations/engines/test_inline.py",
    "tests/simulations/testing/test_plugin.py::test_an_installed_package_brings_it",
)
"""What uses most of Flower in a minute or two: apps, each scheme inline, messages, the plugin."""
VERSION = "from importlib.metadata import version; print(version('flwr'))"


def wanted(which: str) -> Requirement:
    """Return what pip is asked for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (allowed,) = (line for line in project["dependencies"] if re.match(r"flwr\b", line))
    specifier = str(Requirement(allowed).specifier)
    if which == "oldest":
        (least,) = re.findall(r">=([\d.]+)", specifier)
        specifier = f"~={least}.0"
    return Requirement(f"flwr[simulation]{specifier}")


def main(which: str) -> int:
    """Run the tests, unless the environment that runs this has that flwr already."""
    python = made(which, str(wanted(which)))
    found = subprocess.run([python, "-c", VERSION], check=True, capture_output=True, text=True)
    other, own = found.stdout.strip(), version("flwr")
    print(f"the {which} flwr that pyproject.toml allows: {other}; here: {own}", flush=True)
    if other == own:
        print("`make test` runs all tests on it", flush=True)
        return 0
    chosen = ["-m", "not ray and not deployed and not long", "-p", "no:cacheprovider"]
    return subprocess.run([python, "-m", "pytest", *chosen, *TESTS], cwd=ROOT).returncode


if __name__ == "__main__":
    if sys.argv[1:] not in (["oldest"], ["newest"]):
        sys.exit("usage: python -m tests.other_flwr oldest|newest")
    sys.exit(main(sys.argv[1]))
