"""The command `check`: what it prints, what it writes, and its exit codes."""

import shutil
from pathlib import Path

import pytest
from commands import Command

APPS = Path(__file__).parents[2] / "first_day" / "apps"


@pytest.fixture
def app(tmp_path: Path) -> Path:
    return Path(shutil.copytree(APPS / "own_metrics", tmp_path / "app"))


def texts(app: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in app.rglob("*") if path.is_file()}


def test_it_says_what_the_app_is_and_changes_nothing(command: Command, app: Path) -> None:
    before = texts(app)
    done = command("check", str(app), "--scheme", "udp", "--clients", "8")
    assert done.returncode == 0, done.stderr
    for part in (
        "kind: Message API on the clients, main with the strategy Keeping, a class of the app from",
        "messages: train, evaluate",
        "arrays released: 0 3x2, 1 2 (8 weights)",
        "- train_metrics_aggr_fn=worst goes",
        "- forecast: over the training the noise in 8 weights",
        "+from flwr_privacy.clients import UDPClientApp as ClientApp",
        "+class Keeping(UDP):",
        "--apply makes this change",
    ):
        assert part in done.stdout
    assert texts(app) == before


def test_applied_twice_is_applied_once(command: Command, app: Path) -> None:
    first = command("check", str(app), "--scheme", "central-dp", "--no-run", "--apply")
    assert first.returncode == 0, first.stderr
    assert "applied: 2 files are changed" in first.stdout
    after = texts(app)
    second = command("check", str(app), "--scheme", "central-dp", "--no-run", "--apply")
    assert second.returncode == 0, second.stderr
    assert "the app has central-dp already: nothing to change" in second.stdout
    assert texts(app) == after


@pytest.mark.parametrize(
    ("name", "arguments", "code", "said"),
    [
        (
            "vertical",
            ["--scheme", "udp"],
            8,
            "by hand: this line sends messages: server_app.py:19",
        ),
        ("own_start", ["--scheme", "mspdq"], 8, "a start of its own"),
        ("own_metrics", ["--scheme", "msp"], 8, "own aggregate_train would not be called"),
        ("own_mods", ["--scheme", "acfl"], 8, "brings its own client: it computes gradients"),
        ("own_mods", ["--scheme", "fedvs"], 8, "brings its own client: the clients hold columns"),
        ("own_mods", ["--scheme", "upd"], 2, "nearest: 'udp'"),
        ("own_mods", ["--scheme", "udp", "--epsilon", "0"], 2, "epsilon = 0.0"),
        ("own_mods", ["--scheme", "msp", "--secure-sum"], 2, "no --secure-sum with 'msp'"),
        ("none", ["--scheme", "udp"], 2, "the folder of a Flower app"),
    ],
)
def test_a_refusal_says_why(
    name: str, arguments: list[str], code: int, said: str, command: Command
) -> None:
    done = command("check", str(APPS / name), *arguments)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr
