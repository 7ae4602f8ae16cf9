"""What mypy says of calls: it sees the parameters, as somebody's editor and CI do."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long  # mypy reads all of the package

ROOT = Path(__file__).parents[1]
RIGHT = [
    "FedAvg(0.5, 1.0, 2, loop=LoopOptions(seed=1))",
    "UDP(privacy=UserLevel(epsilon=4.0), schedule=LinearNoise(end=0.2))",
    "UDP(privacy=RecordLevel(learning_rate=0.1), schedule=Discounting(validation=lambda *_: 0.0))",
    "UDP(privacy=DPSGD(epsilon=4.0, sampling_rate=0.1, steps=20), trainable=('*.lora_*',))",
    "ACFL(privacy=NoisedRecords(epsilon=4.0), weighting=Weighting(alpha=0.5))",
    "ACFL(privacy=SetupVariances(sigma1_sq=1.0, sigma2_sq=1.0), data=DataBounds(one_hot=True))",
    "M2FDP(tree=TierTree.of_fanouts((2, 2)), privacy=NoNoise(), schedule=EventSchedule(steps=4))",
    "M2FDP(tree=TREE, privacy=DeviceNoise(clean_events=SmoothDrift(smoothness=0.1)))",
    "M2FDP(tree=TREE, privacy=RecordNoise(sampling_rate=0.1), relay=True)",
    "M2FDP(tree=TREE, privacy=NoNoise(), control=AdaptiveControl(total_steps=9, max_steps=3))",
]
WRONG = {
    "UDP(privacy=UserLevel(), fraction_trian=0.5)": '"fraction_trian" for "UDP"',
    "UDP()": 'Missing named argument "privacy"',
    'UDP(privacy="recrod")': 'Argument "privacy" to "UDP"',
    "UDP(privacy=UserLevel(learning_rate=0.1))": '"learning_rate" for "UserLevel"',
    "UDP(privacy=DPSGD(epsilon=1.0, steps=20))": 'Missing named argument "sampling_rate"',
    "DPSGD(sampling_rate=0.1, steps=20, learning_rate=0.1)": '"learning_rate" for "DPSGD"',
    "RecordLevel(epsilon=1.0)": 'Missing named argument "learning_rate"',
    'UserLevel(epsilon="4")': 'Argument "epsilon" to "UserLevel"',
    'UserLevel(noise="gauss")': 'Argument "noise" to "UserLevel"',
    'UDP(privacy=UserLevel(), client_sampling="all")': 'Argument "client_sampling" to "UDP"',
    "Discounting(beta=0.5)": 'Missing named argument "validation"',
    "FedAvg(seed=1)": '"seed" for "FedAvg"',
    'LoopOptions(clients="4")': 'Argument "clients" to "LoopOptions"',
    "ACFL(epsilon=8.0)": '"epsilon" for "ACFL"',
    'ACFL(privacy="record")': 'Argument "privacy" to "ACFL"',
    "NoisedSetup(epsilon=8.0)": '"epsilon" for "NoisedSetup"',
    'Weighting(alpha="best")': 'Argument "alpha" to "Weighting"',
    'M2FDP(tree="10,5", privacy=NoNoise())': 'Argument "tree" to "M2FDP"',
    "M2FDP(tree=TREE)": 'Missing named argument "privacy"',
    "M2FDP(tree=TREE, privacy=UserLevel())": 'Argument "privacy" to "M2FDP"',
    "M2FDP(tree=TREE, privacy=NoNoise(), control={})": 'Argument "control" to "M2FDP"',
    "NoNoise(epsilon=8.0)": '"epsilon" for "NoNoise"',
    "DeviceNoise(alpha=0.1)": '"alpha" for "DeviceNoise"',
    "DeviceNoise(clean_events=True)": 'Argument "clean_events" to "DeviceNoise"',
    "PaperNoise(sampling_rate=0.1)": 'Missing named argument "alpha"',
    "SmoothDrift()": 'Missing named argument "smoothness"',
    'CentralDP(noise="server")': '"noise" for "CentralDP"',
    "CentralDP(privacy=UserLevel())": 'Argument "privacy" to "CentralDP"',
    'ServerNoise(sampling="poison")': 'Argument "sampling" to "ServerNoise"',
    "DistributedNoise(insecure_seed=1)": '"insecure_seed" for "DistributedNoise"',
    "AdaptiveClipping()": 'Missing named argument "quantile"',
}
IMPORTS = """\
from flwr_privacy.m2fdp import EventSchedule, TierTree
from flwr_privacy.strategies import (
    ACFL, DPSGD, M2FDP, UDP, AdaptiveClipping, AdaptiveControl, CentralDP, DataBounds, DeviceNoise,
    Discounting, DistributedNoise, FedAvg, LinearNoise, LoopOptions, NoNoise, NoisedRecords,
    NoisedSetup, PaperNoise, RecordLevel, RecordNoise, ServerNoise, SetupVariances, SmoothDrift,
    UserLevel, Weighting,
)
"""
TREE = "TREE = TierTree.of_fanouts((2, 2))"


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """What mypy says of a module with all the calls, by line."""
    folder = tmp_path_factory.mktemp("typing")
    package = folder / "flwr_privacy"
    package.mkdir()
    for path in (ROOT / "flwr_privacy").iterdir():
        (package / path.name).symlink_to(path)
    for name in ("strategies", "clients", "simulations"):  # as setuptools installs them
        (package / name).symlink_to(ROOT / name)
    imports = IMPORTS.replace("\n", " ").replace("from", "\nfrom").strip()
    text = "\n".join([imports, TREE, *RIGHT, *WRONG])
    (folder / "calls.py").write_text(text + "\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent"]
    command += ["--ignore-missing-imports", "--no-error-summary", "--hide-error-context"]
    done = subprocess.run(
        [*command, "calls.py"], cwd=folder, capture_output=True, text=True, check=False
    )
    lines: dict[int, str] = {}
    for line in done.stdout.splitlines():
        _, number, rest = line.split(":", 2)
        lines[int(number)] = lines.get(int(number), "") + rest
    assert done.returncode == 1, done.stderr
    return lines


def test_mypy_takes_right_calls_and_refuses_wrong_ones(said: dict[int, str]) -> None:
    first = 4  # after two lines of imports, and the tree
    for number, call in enumerate(RIGHT, start=first):
        assert number not in said, (call, said[number])
    for number, (call, message) in enumerate(WRONG.items(), start=first + len(RIGHT)):
        assert message in said.get(number, ""), (call, said.get(number))
