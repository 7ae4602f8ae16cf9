"""The first day of an engineer who defends nodes: docs/deployment.md and docs/privacy.md."""

import subprocess
import sys
from pathlib import Path

import pytest
from commands import Command
from own_modules import OWN_TASK, own_folder, write_module

from flwr_privacy.errors import FlwrPrivacyError

from .conftest import NODES, Apps

__all__ = ["own_folder"]

FLWR = Path(sys.executable).parent / "flwr"
POLICY = 'max_epsilon = {}\nunits = ["user"]\nschemes = ["udp"]\n'


def nodes(folder: Path, policy: Path) -> list[dict[str, object]]:
    """Return the configurations of nodes, each with a state folder of its own and one policy."""
    made: list[dict[str, object]] = []
    for partition in range(NODES):
        state = folder / f"state-{partition}"
        state.mkdir(mode=0o700, exist_ok=True)
        made.append(
            {
                "client-id": f"ward-{partition}",
                "partition-id": partition,
                "num-partitions": NODES,
                "privacy-state": str(state),
                "privacy-policy": str(policy),
            }
        )
    return made


def test_a_policy_holds_against_an_app_that_asks_for_more(
    command: Command, apps: Apps, tmp_path: Path
) -> None:
    app = apps.copy("own_mods")
    changed = command("check", str(app), "--scheme", "udp", "--epsilon", "8", "--no-run", "--apply")
    assert changed.returncode == 0, changed.stderr
    policy = tmp_path / "policy.toml"

    policy.write_text(POLICY.format(2.0))
    with pytest.raises(FlwrPrivacyError):  # every node declines
        apps.run(app, nodes=nodes(tmp_path, policy))
    assert not [entry for entry in tmp_path.glob("state-*/*.ledger") if entry.stat().st_size > 200]

    policy.write_text(POLICY.format(10.0))
    apps.run(app, nodes=nodes(tmp_path, policy))
    files = ("--state", "state-0", "--policy", "policy.toml")
    shown = command("ledger", "show", *files)
    assert shown.returncode == 0, shown.stderr
    assert "ward-0" in shown.stdout
    checked = command("ledger", "check", *files)
    assert checked.returncode == 0, checked.stdout
    exported = command("ledger", "export", "--state", "state-0")
    assert exported.stdout.count("\n") == 1 + 2  # the names of the columns, and two rounds


def test_only_an_app_that_was_read_is_allowed(command: Command, apps: Apps, tmp_path: Path) -> None:
    app = apps.copy("trainer")
    built = [str(FLWR), "build", "--app", str(app)]
    subprocess.run(built, cwd=tmp_path, check=True, capture_output=True)
    (fab,) = tmp_path.glob("*.fab")
    allowed = command("node", "allow", fab.name)
    assert allowed.returncode == 0, allowed.stderr
    (tmp_path / "allowed-apps.toml").write_text(allowed.stdout)
    assert 'name = "first-day/first-day-trainer 1.0.0"' in allowed.stdout

    key = command("key", "ward-7.pem")
    assert key.returncode == 0, key.stderr
    (tmp_path / "pins.toml").write_text(f"[clients]\n{key.stdout}")
    (tmp_path / "policy.toml").write_text(POLICY.format(10.0))
    (tmp_path / "state").mkdir(mode=0o700)
    checked = command(
        *("node", "check", "--state", "state", "--policy", "policy.toml"),
        *("--pins", "pins.toml", "--identity", "ward-7.pem", "--allowed-apps", "allowed-apps.toml"),
    )
    lines = checked.stdout.splitlines()
    assert all(line.startswith(("ok", "warn")) for line in lines), checked.stdout
    assert checked.returncode == 0

    # After a change of the app it is another app: the list no longer has it.
    source = app / "trainer" / "client_app.py"
    source.write_text(source.read_text() + "\n# changed\n")
    subprocess.run(built, cwd=tmp_path, check=True, capture_output=True)
    others = {command("node", "allow", fab.name).stdout for fab in tmp_path.glob("*.fab")}
    assert others - {allowed.stdout}


@pytest.mark.deployed
def test_a_deployment_of_an_own_task_with_a_policy_trains_and_can_be_verified(
    command: Command, own_folder: Path
) -> None:
    task = f"{write_module(own_folder, OWN_TASK.format(seed=0, outputs=2))}:income"
    (own_folder / "policy.toml").write_text('max_epsilon = 10.0\nunits = ["record"]\n')
    done = command(
        *("deploy", "--scheme", "udp", "--set", "unit=record", "--task", task),
        *("--nodes", "3", "--rounds", "2", "--policy", "policy.toml", "--out", "run"),
    )
    assert done.returncode == 0, done.stderr
    assert "data: 3 clients, 50 records of 2 classes each" in done.stdout
    verified = command("verify", "run")
    assert "6 charged, 6 answered" in verified.stdout
    assert verified.returncode not in (
        0,
        27,
    )  # the server alone says so, and nothing contradicts it
    state = "run/deployment/node-0/state"
    shown = command("ledger", "show", "--state", state, "--policy", "policy.toml")
    assert shown.returncode == 0, shown.stderr
