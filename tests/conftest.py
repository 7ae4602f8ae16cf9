"""What all tests share: what waiting costs, and one session of Ray.

Within this process nobody waits: the server's loop and the inline grid look at a clock that only
their own sleeping moves, so that a deadline of a second takes no time and a busy machine misses
none. Tests that measure a wait ask for `real_time` and see the real clock. Nor is anything flushed
to the disk but in the tests of what flushes, which are in `tests/flwr_privacy`: that guards against
power cuts alone, which these are the tests of.

Two tests run at a time, on two cores, so each has one thread for its sums. What starts an engine
runs in a process for each kind of engine (see the Makefile).
"""

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import settings

from flwr_privacy.simulations.testing.virtual_time import no_flushing, virtual_time

settings.register_profile("busy", deadline=None)  # a machine may be busy: no test has a clock
settings.load_profile("busy")

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")  # before anybody imports NumPy or torch

# Runs without a run folder leave their privacy cards here, and not among the sources.
if "FLWR_PRIVACY_RUNS" not in os.environ:
    _cards = tempfile.TemporaryDirectory(prefix="flwr-privacy-cards-")
    os.environ["FLWR_PRIVACY_RUNS"] = _cards.name

FUZZ_SEED = "FLWR_PRIVACY_FUZZ_SEED"
os.environ.setdefault(FUZZ_SEED, secrets.token_hex(4))  # workers have the one of their parent


def pytest_report_header() -> str:
    return f"{FUZZ_SEED}={os.environ[FUZZ_SEED]}"


@pytest.fixture
def real_time() -> None:
    """Ask for the real clock."""


@pytest.fixture(autouse=True)
def nobody_waits(request: pytest.FixtureRequest) -> Iterator[None]:
    with ExitStack() as around:
        if "real_time" not in request.fixturenames:
            around.enter_context(virtual_time())
        if "tests/flwr_privacy" not in request.path.as_posix():
            around.enter_context(no_flushing())
        yield


@pytest.fixture
def no_pld(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let cards state what costs nothing to compute, for tests that ask for none of their numbers.

    A privacy loss distribution takes seconds where epsilon has no meaning, as the noise is to be
    none to speak of, and where participants are a secret sample.
    """
    from flwr_privacy.privacy.card import PrivacyCard

    monkeypatch.setattr(PrivacyCard.state, "__defaults__", (("gdp", "rdp"),))


class _Borrowed:
    """A session that is open before it is entered, and stays open."""

    def __init__(self, session: Any) -> None:
        self.run = session.run

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture(scope="session")
def _ray_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from flwr_privacy.simulations.engines.ray_engine import RayResources, RaySession

    log = tmp_path_factory.mktemp("ray") / "engine.log"
    # One worker: each imports torch for every run, which takes longer than what it then does.
    with RaySession(resources=RayResources(total_cpus=1), log_path=log) as session:
        yield session


@pytest.fixture
def one_ray_session(_ray_session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Carry out what Ray shall do in one session for all tests: starting one takes seconds."""
    start = "flwr_privacy.simulations.runner.jobs.RaySession"
    monkeypatch.setattr(start, lambda **_: _Borrowed(_ray_session))
