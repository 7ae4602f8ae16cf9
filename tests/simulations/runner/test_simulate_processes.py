"""`simulate` with worker processes: from a script, whose model and classes only that script has."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import numpy as np
from torch import nn
from flwr_privacy import UDP, FedAvg, UserLevel, simulate
print("the script runs")
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
    def forward(self, batch):
        return self.layer(batch)
features = np.random.default_rng(0).normal(size=(120, 4)).astype(np.float32)
results = simulate(
    model=Net, data=(features, (features[:, 0] > 0).astype(int)), clients=4, rounds=2,
    schemes=[FedAvg(), UDP(privacy=UserLevel())], engine=sys.argv[1], workers=int(sys.argv[2]),
    out=sys.argv[1] + sys.argv[2],
)
rows = results.to_pandas()
print(rows[rows.scheme == "fedavg"][["round", "accuracy", "loss"]].to_json(orient="values"))
print(results.cards["udp-seed-0"].guarantee.spent)
"""


def run(folder: Path, engine: str, workers: int) -> tuple[list[list[float]], float]:
    """Return the rounds of a script without ``if __name__ == "__main__":``, and its epsilon."""
    (folder / "script.py").write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "script.py", engine, str(workers)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    first, rounds, spent = done.stdout.splitlines()
    assert first == "the script runs"
    return json.loads(rounds), float(spent)


@pytest.mark.long
def test_a_script_without_a_guard_has_workers(tmp_path: Path) -> None:
    alone, together = run(tmp_path, "inline", 1), run(tmp_path, "inline", 2)
    assert len(alone[0]) == 3
    assert together[0] == [pytest.approx(line) for line in alone[0]]
    assert together[1] == alone[1] == pytest.approx(8.0, rel=1e-3)


@pytest.mark.ray
def test_a_script_trains_on_ray(tmp_path: Path) -> None:
    rounds, spent = run(tmp_path, "ray", 2)
    assert [line[0] for line in rounds] == [0, 1, 2]
    assert spent == pytest.approx(8.0, rel=1e-3)
