"""Runs tests in a fork of a process that has imported the libraries, once for each mutant.

Runs in the copy of the tree (`python -m tests.mutation.worker`). Reads a line of JSON with the
tests and how many seconds of a core they may use; writes one with the exit status, which is None
after a hang, and the seconds used.
"""

import importlib
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

LIBRARIES = (
    "pytest",
    "hypothesis",
    "numpy",
    "scipy.optimize",
    "dp_accounting.pld",
    "dp_accounting.rdp",
    "cryptography.hazmat.primitives.asymmetric.x25519",
    "galois",
    "flwr.app",
    "flwr.clientapp",
    "flwr.serverapp",
    "torch",
)
OPTIONS = (
    *("-x", "-q", "-p", "no:cacheprovider", "-m", "not ray and not deployed"),
    *("--doctest-modules", "--hypothesis-profile=mutants"),
    *("-p", "no:flwr-privacy"),  # the plugin is that of the installed project, not of the copy
)
FOREIGN = 99  # exit status: modules were imported that are not of the copy
PATIENCE = 10  # how much longer tests may take than they may use a core: others use it, too
MEMORY = 8 << 30  # bytes: a mutant may ask for more


def run(tests: list[str], log: Path) -> int:
    import pytest
    from hypothesis import Phase, settings

    # Whether a mutant is found does not depend on chance, and the smallest example is not needed.
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile(
        "mutants", deadline=None, derandomize=True, database=None, phases=phases
    )
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    code = int(pytest.main([*OPTIONS, *tests]))
    loaded = [m.__file__ or "" for n, m in sys.modules.items() if n.startswith("flwr_privacy")]
    if not all(file.startswith(os.getcwd()) for file in loaded):
        return FOREIGN
    return code


def forked(tests: list[str], log: Path, limit: int) -> tuple[int | None, float]:
    """Return the exit status and the seconds of a core; the status of a hang is None."""
    child = os.fork()
    if child == 0:
        os.setsid()  # its own children end with it
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        code = 98
        try:
            code = run(tests, log)
        finally:
            os._exit(code)
    end = time.monotonic() + PATIENCE * limit
    while True:
        done, status, used = os.wait4(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.02)
    code = os.waitstatus_to_exitcode(status)
    hung = code in (-signal.SIGKILL, -signal.SIGXCPU)
    return None if hung else code, used.ru_utime + used.ru_stime


def main() -> None:
    for library in sys.argv[1:]:
        importlib.import_module(library)
    log = Path("mutant.log")
    for line in sys.stdin:
        asked = json.loads(line)
        code, seconds = forked(asked["tests"], log, asked["limit"])
        told = {"code": code, "seconds": seconds, "log": log.read_text()}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
