"""Apps that run as they are, and apps that do not: what a probe writes down."""

import time
from pathlib import Path

import numpy as np
import pytest

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.research.app_audit.processes import run_probe
from flwr_privacy.simulations.research.app_audit.target import Target, masked
from flwr_privacy.simulations.research.app_audit.transcript import Transcript, arrays_of

from .apps import small_app

CLIPPING = """
def halved(message, context, call_next):
    start = next(iter(message.content.array_records.values())).to_numpy_ndarrays()
    reply = call_next(message, context)
    name, record = next(iter(reply.content.array_records.items()))
    pairs = zip(start, record.to_numpy_ndarrays(), strict=True)
    reply.content[name] = ArrayRecord([s + (a - s) / 2 for s, a in pairs])
    return reply
"""


def probed(app: Path, tmp_path: Path, *, seconds: float = 60.0, **settings: int) -> Transcript:
    return run_probe(Target.of(app), tmp_path / "out", seconds=seconds, seed=0, **settings)


def values(content: object) -> np.ndarray:
    (array,) = arrays_of(content).values()  # type: ignore[arg-type]
    return array


def test_a_mod_is_seen_from_both_sides(tmp_path: Path) -> None:
    app = small_app(tmp_path, imports=CLIPPING, mods="halved")
    before = sorted(path for path in app.rglob("*"))
    transcript = probed(app, tmp_path)
    assert transcript.about["ended"] == "whole"
    assert [mod["name"] for mod in transcript.about["mods"]] == ["small.client_app.halved"]
    assert len(transcript.exchanges) == 6
    assert {(e.round, e.node) for e in transcript.exchanges} == {
        (r, n) for r in (1, 2) for n in range(3)
    }
    for one in transcript.exchanges:
        start, inner, left = map(values, (one.request, one.inner_reply, one.reply))
        assert np.allclose(left - start, (inner - start) / 2, atol=1e-6)
        assert np.any(inner != left)
    assert sorted(path for path in app.rglob("*")) == before


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        ("raise ValueError(f'bad {arrays[0][0]}')", "ValueError: bad "),
        ("__import__('socket').create_connection(('example.org', 80))", "without a network"),
    ],
)
def test_a_client_that_fails_answers_with_the_reason(
    before: str, reason: str, tmp_path: Path
) -> None:
    transcript = probed(small_app(tmp_path, before=before), tmp_path)
    errors = [e.error for e in transcript.exchanges]
    assert len(errors) == 6
    assert all(reason in str(error) for error in errors)
    if "network" in reason:
        assert set(transcript.about["network"]) == {"example.org"}


def test_an_app_that_never_ends_is_stopped_and_what_it_sent_counts(tmp_path: Path) -> None:
    app = small_app(
        tmp_path,
        before="__import__('time').sleep(3600 if context.node_config['partition-id'] == 1 else 0)",
    )
    start = time.monotonic()
    transcript = probed(app, tmp_path, seconds=12.0)
    assert time.monotonic() - start < 30
    assert transcript.about["ended"] == "stopped"
    assert len(transcript.exchanges) < 3


def test_a_server_that_waits_for_more_nodes_is_told_apart(tmp_path: Path) -> None:
    app = small_app(tmp_path, nodes=3)
    target = Target.of(app, clients=2)
    transcript = run_probe(target, tmp_path / "out", seconds=60.0, seed=0)
    assert "waits for more nodes" in transcript.about["ended"]


def test_the_rounds_can_be_limited(tmp_path: Path) -> None:
    transcript = probed(small_app(tmp_path), tmp_path, rounds=1)
    assert transcript.about["ended"] == "enough rounds"
    assert {e.round for e in transcript.exchanges} == {1}


def test_what_looks_like_a_secret_is_masked() -> None:
    config = {
        "lr": 0.1,
        "hub-token": "hf_AbCdEfGhIjKlMnOpQr12",
        "name": "hf_AbCdEfGhIjKlMnOpQr12",
        "note": "a sentence with spaces and 1 number",
        "rounds": 3,
    }
    shown = masked(config)
    assert shown == {**config, "hub-token": "(masked)", "name": "(masked)"}


def test_an_installed_app_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    small_app(tmp_path / "apps").rename(tmp_path / "apps" / "tests.small.1.0.0.0123abcd")
    assert Target.of("tests/small").app.name == "small"
    with pytest.raises(InvalidParameterError, match="the folder of a Flower app"):
        Target.of("tests/other")


@pytest.mark.long
@pytest.mark.parametrize("name", ["quickstart_message", "quickstart_numpy"])
def test_the_apps_of_the_benchmark_train(name: str, tmp_path: Path) -> None:
    target = Target.of(Path(__file__).parents[4] / "benchmarks" / "audited" / name)
    transcript = run_probe(target, tmp_path / "run", seconds=120, seed=0, rounds=1)
    assert len(list(transcript.trainings())) == 5
    assert [one.error for one in transcript.exchanges if one.error] == []
