"""`flwr_privacy.simulate`: own model, own data, schemes, budgets and seeds, from Python."""

import asyncio
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Command
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from rich.console import Console
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from flwr_privacy import UDP, CentralDP, FedAvg, LoopOptions, RecordLevel, ServerNoise, UserLevel
from flwr_privacy import simulate as run
from flwr_privacy.clients import UDPClient, as_mod
from flwr_privacy.errors import DataError, InvalidParameterError
from flwr_privacy.simulations.runner.sweep import run_folders
from flwr_privacy.simulations.runner.sweep.bar import SweepBar
from flwr_privacy.simulations.settings.run_folder import RunFolder
from flwr_privacy.simulations.tasks.offered import offered_task
from flwr_privacy.simulations.tasks.tasks import task as find_task

PAGE = Path(__file__).parents[3] / "docs" / "simulation.md"
DRAWS = np.random.default_rng(0)
FEATURES = DRAWS.normal(size=(120, 4)).astype(np.float32)
LABELS = (FEATURES[:, 0] > 0).astype(np.int64)


def simulate(out: Path, **options: Any) -> Any:
    usual: dict[str, Any] = {
        "model": lambda: nn.Linear(4, 2),
        "data": (FEATURES, LABELS),
        "clients": 3,
        "rounds": 2,
        "out": out,
    }
    return run(**{**usual, **options})


def test_ten_lines_train_three_schemes_at_four_budgets_with_three_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = PAGE.read_text().partition("## From Python\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"^```python\n(.*?)^```", section, re.M | re.S)
    assert len([line for line in code.splitlines() if line]) <= 10
    assert "epsilon=[1, 2, 4, 8], seeds=3" in code
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"features": np.repeat(FEATURES, 16, axis=1), "labels": LABELS}
    smaller = code.replace("[1, 2, 4, 8], seeds=3", "[1, 8], seeds=1, clients=2, rounds=1")
    exec(compile(smaller, "simulation.md", "exec"), scope)
    rows = scope["results"].to_pandas()
    assert len(scope["results"]) == 1 + 2 + 2
    assert rows.groupby(["scheme", "epsilon"], dropna=False).seed.nunique().tolist() == [1] * 5
    assert (tmp_path / "mine/report.html").exists()


def test_a_row_for_each_round_and_a_mean_over_the_seeds(tmp_path: Path) -> None:
    schemes = {"plain": FedAvg(), "udp": UDP(privacy=UserLevel())}
    results = simulate(tmp_path, schemes=schemes, epsilon=[1, 8], seeds=[3, 5])
    rows = results.to_pandas()
    assert list(rows.columns) == [
        *("scheme", "epsilon", "seed", "round", "accuracy", "loss"),
        *("epsilon_spent", "bytes_down", "bytes_up", "seconds"),
    ]
    assert len(rows) == (1 + 2) * 2 * 3
    last = rows[rows["round"] == 2]
    udp = last[last.scheme == "udp"]
    np.testing.assert_allclose(udp.epsilon_spent, udp.epsilon, rtol=1e-3)
    assert last[last.scheme == "plain"].epsilon_spent.isna().all()
    assert (last.bytes_up > 0).all()
    table = results.summary()
    assert table.scheme.tolist() == ["plain", "udp", "udp"]
    assert table.seeds.tolist() == [2, 2, 2]
    plain = last[last.scheme == "plain"].accuracy.to_numpy()
    assert table.accuracy[0] == pytest.approx(plain.mean())
    assert table.accuracy_error[0] == pytest.approx(plain.std(ddof=1) / 2**0.5)
    assert results.plot()._repr_png_().startswith(b"\x89PNG")
    assert [text.get_text() for text in results.plot().axes[0].get_legend().get_texts()] == [
        "plain (no budget)",
        "udp",
    ]
    assert "2 runs" not in repr(results)
    assert "<table" in results._repr_html_()
    with pytest.raises(InvalidParameterError, match=r"card = '6 runs'.*`cards`"):
        _ = results.card


def test_the_run_folders_are_those_of_the_command_line(tmp_path: Path, command: Command) -> None:
    results = simulate(tmp_path / "own", schemes=CentralDP(privacy=ServerNoise()))
    assert results.card.guarantee.spent == pytest.approx(8.0, rel=1e-3)
    (folder,) = results.folders
    assert command("verify", str(folder)).returncode == 0
    assert command("report", str(folder)).returncode == 0
    run_folder = RunFolder.open(folder)
    assert run_folder.settings.strategy == {"noise": "server"}
    run_folder.update(status="interrupted")  # the folder has neither its data nor its model
    again = command("run", "--resume", str(folder), "--engine", "inline")
    assert again.returncode == 2
    assert "task = 'own-" in again.stderr


def test_the_same_call_again_reads_what_is_done_and_does_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = simulate(tmp_path, schemes=UDP(privacy=UserLevel()), epsilon=2.0)
    carried_out: list[str] = []
    whole = run_folders.carry_out
    monkeypatch.setattr(
        run_folders,
        "carry_out",
        lambda runs, *rest, **more: (
            carried_out.extend(run.path.name for run in runs),
            whole(runs, *rest, **more),
        ),
    )
    again = simulate(tmp_path, schemes=UDP(privacy=UserLevel()), epsilon=2.0)
    assert carried_out == []
    assert again.to_pandas().equals(first.to_pandas())
    more = simulate(tmp_path, schemes=UDP(privacy=UserLevel()), epsilon=[2.0, 4.0])
    assert carried_out == ["udp-epsilon-4-seed-0"]
    assert len(more) == 2


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"rounds": 3}, "rounds = 2 there and 3 here"),
        ({"learning_rate": 0.3}, "training.learning_rate = 0.1 there and 0.3 here"),
        ({"data": (FEATURES + 1, LABELS)}, "other data, test, model"),
        ({"model": lambda: nn.Linear(4, 3)}, "other model, loss"),
        ({"model": lambda: nn.Sequential(nn.Linear(4, 2), nn.Tanh())}, "other model, loss"),
        ({"loss": lambda outputs, labels: functional.nll_loss(outputs, labels)}, "other loss"),
        ({"schemes": {"fedavg": UDP(privacy=UserLevel())}}, "scheme = 'fedavg' there"),
    ],
)
def test_another_setting_in_the_same_folder_is_refused_with_what_differs(
    tmp_path: Path, changed: dict[str, Any], named: str
) -> None:
    before = simulate(tmp_path).to_pandas()
    with pytest.raises(InvalidParameterError, match=re.escape(named)):
        simulate(tmp_path, **changed)
    assert simulate(tmp_path).to_pandas().equals(before)


def test_an_interrupted_call_goes_on_to_the_same_model(tmp_path: Path) -> None:
    whole = simulate(tmp_path / "whole", schemes=["fedavg"], seeds=2, rounds=4).to_pandas()
    calls = 0

    def interrupting(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 10:
            raise KeyboardInterrupt
        return functional.cross_entropy(outputs, labels)

    own = {"seeds": 2, "rounds": 4, "out": tmp_path / "broken"}
    with pytest.raises(KeyboardInterrupt) as broken:
        simulate(**own, loss=interrupting)
    assert broken.value.__notes__ == [
        f"To go on, call simulate again with out={str(tmp_path / 'broken')!r}."
    ]
    first = RunFolder.open(tmp_path / "broken/fedavg-seed-0")
    assert first.summary["status"] == "interrupted"
    assert 0 < len(first.rounds()) < 5
    rest = simulate(**own).to_pandas()
    learned = ["seed", "round", "accuracy", "loss"]
    assert rest[learned].equals(whole[learned])


def test_a_strategy_keeps_its_options(tmp_path: Path) -> None:
    strategy = UDP(privacy=RecordLevel(learning_rate=0.5, epsilon=3.0))
    (folder,) = simulate(tmp_path, schemes=strategy, rounds=1).folders
    own = RunFolder.open(folder).settings.strategy
    assert own == {"unit": "record", "learning_rate": 0.5, "epsilon": 3.0}
    assert dict(RunFolder.open(folder).card.described.settings)["privacy"] == (  # type: ignore[union-attr]
        "RecordLevel(epsilon=3.0, learning_rate=0.5)"
    )


def test_a_module_is_copied_with_its_weights(tmp_path: Path) -> None:
    module = nn.Linear(4, 2)
    weight = module.weight.detach().clone()
    rows = simulate(tmp_path / "a", model=module, seeds=2, test=(FEATURES, LABELS)).to_pandas()
    assert torch.equal(module.weight, weight)
    assert rows[rows["round"] == 0].accuracy.nunique() == 1
    made = simulate(tmp_path / "b", seeds=2, test=(FEATURES, LABELS)).to_pandas()
    assert made[made["round"] == 0].loss.nunique() == 2


def test_clients_may_bring_data_of_their_own(tmp_path: Path) -> None:
    parts = [
        (FEATURES[:20], LABELS[:20]),
        TensorDataset(torch.tensor(FEATURES[20:60]), torch.tensor(LABELS[20:60])),
        (torch.tensor(FEATURES[60:]), torch.tensor(LABELS[60:])),
    ]
    results = simulate(tmp_path, data=parts, clients=None)
    settings = RunFolder.open(results.folders[0]).settings
    assert (settings.clients, settings.partition.kind) == (3, "given")
    log = (results.folders[0] / "metrics.jsonl").read_text()
    assert '"server"' in log
    # A fifth of each client is held out: 4, 8 and 12.
    whole = simulate(tmp_path / "whole", data=parts, clients=None, test=(FEATURES, LABELS))
    rows = whole.to_pandas()
    assert len(rows) == 3


def test_it_runs_where_an_event_loop_does_and_forgets_the_task(tmp_path: Path) -> None:
    async def cell() -> Any:
        return simulate(tmp_path)

    results = asyncio.run(cell())
    task = RunFolder.open(results.folders[0]).settings.task
    assert re.fullmatch(r"own-[0-9a-f]{8}", task)
    assert offered_task(task) is None
    with pytest.raises(InvalidParameterError, match="task = 'own-"):
        find_task(task)


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model = None"),
    ({"model": 3}, "model = 'int'"),
    ({"model": lambda: 3}, "task own: model = 'int'"),
    ({"data": (FEATURES, LABELS * 2)}, "labels = 2: expected classes below 2, the number of out"),
    ({"data": (FEATURES, LABELS - 1)}, "data: labels = -1"),
    ({"data": (FEATURES, LABELS + 0.5)}, "data: labels = "),
    ({"data": (np.where(FEATURES > 1, np.nan, FEATURES), LABELS)}, "data: features = 'nan in rec"),
    ({"data": (FEATURES, LABELS[1:])}, "data = 'features of shape"),
    ({"data": [FEATURES, LABELS]}, "data = 'a list of ndarray'"),
    ({"data": [(FEATURES, LABELS)]}, "clients = 3: expected 1"),
    ({"data": [(FEATURES, LABELS)] * 3, "partition": "iid"}, "partition = 'iid': expected nothing"),
    ({"data": [(FEATURES[:0], LABELS[:0])] * 3}, "data of client 0"),
    ({"test": (FEATURES[:, :2], LABELS)}, "test = 'records of shape"),
    ({"loss": lambda outputs, labels: outputs}, "task own: loss = 'Tensor'"),
    ({"epsilon": [1, 2]}, r"epsilon = \[1, 2\]: .*nothing with fedavg"),
    ({"epsilon": []}, "epsilon = "),
    ({"epsilon": [1, 2], "schemes": UDP(privacy=UserLevel(epsilon=3.0))}, "epsilon = 3.0"),
    ({"sweep": {"clipping": [1]}}, "clipping = "),
    ({"options": {"rounds": 3}}, "rounds = 3"),
    ({"options": {"deadlines": 3}}, "deadlines"),
    ({"partition": {"kind": "iid", "alpha": 0.1}}, "partition.alpha = 0.1"),
    ({"schemes": UDP}, "schemes = 'UDP'"),
    ({"schemes": "udpp"}, "'udpp'"),
    ({"schemes": ["fedavg", FedAvg()]}, "schemes = 'fedavg'"),
    ({"schemes": {"a/b": "fedavg"}}, "schemes = 'a/b'"),
    ({"schemes": FedAvg(fraction_train=0.5)}, r"schemes\['fedavg'\]: fraction_train = 0.5"),
    ({"schemes": UDP(privacy=RecordLevel(learning_rate=0.1)), "epochs": 2}, "training.epochs = 2"),
    ({"seeds": 0}, "seeds = 0"),
    ({"workers": 4}, "workers = 4: expected at most 3"),
    ({"gpus_per_client": 0.5}, "gpus_per_client = 0.5"),
    ({"app": (1, 2)}, "model = "),
]


@pytest.mark.parametrize(("wrong", "text"), ERRORS)
def test_what_is_wrong_is_said_before_anything_is_written(
    tmp_path: Path, wrong: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        simulate(tmp_path / "new", **wrong)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"clients": 200}, "97 records are too few for 200 clients"),
        ({"model": lambda: nn.Linear(5, 2)}, "its model raised RuntimeError: mat1 and mat2"),
        ({"model": nn.Linear}, "its model raised TypeError: .*missing 2 required"),
    ],
)
def test_data_that_does_not_fit_is_refused(
    tmp_path: Path, wrong: dict[str, Any], text: str
) -> None:
    with pytest.raises(DataError, match=text):
        simulate(tmp_path / "new", **wrong)
    assert not (tmp_path / "new").exists()


def test_other_settings_are_swept_and_a_scheme_without_them_runs_once(tmp_path: Path) -> None:
    schemes = {"plain": "fedavg", "udp": {"scheme": "udp", "unit": "user"}}
    results = simulate(tmp_path, schemes=schemes, sweep={"clipping_norm": [0.5, 1.0]}, rounds=1)
    rows = results.to_pandas()
    assert "clipping_norm" in rows.columns
    assert sorted(path.name for path in results.folders) == [
        *("plain-seed-0", "udp-clipping_norm-0.5-seed-0", "udp-clipping_norm-1-seed-0")
    ]
    labels = [text.get_text() for text in results.plot().axes[0].get_legend().get_texts()]
    assert labels == ["plain", "udp, clipping_norm 0.5", "udp, clipping_norm 1"]


@pytest.mark.parametrize(("progress", "lines"), [(None, 0), (True, 2), (False, 0)])
def test_it_is_silent_where_nobody_watches_unless_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], progress: bool | None, lines: int
) -> None:
    simulate(tmp_path, seeds=2, progress=progress)
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == lines
    assert err == ""
    if lines:
        assert re.match(r"1/2 fedavg-seed-0: accuracy 0\.\d{3}, ", out)


def test_the_bar_is_live_in_a_terminal() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120, color_system=None)
    with SweepBar(rounds=4, runs=1, console=console) as bar, bar.running("udp", 4) as update:
        update({"round": 3, "server": {"accuracy": 0.5}})
    shown = screen.getvalue()
    assert "udp" in shown
    assert "run 1/1, round 3/4, accuracy 0.500" in shown


client_app = ClientApp(mods=[as_mod(UDPClient)])


@client_app.train()
def train(message: Message, context: Context) -> Message:
    weights = message.content.array_records["arrays"]["w"].numpy() + 1
    arrays = ArrayRecord({"w": Array(weights.astype(np.float32))})
    records = {"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(records), reply_to=message)


server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    config: Any = context.run_config
    privacy = UserLevel(epsilon=config["epsilon"], clipping_norm=config["norm"])
    strategy = UDP(privacy=privacy, loop=LoopOptions(seed=config["seed"]))
    start = ArrayRecord({"w": Array(np.zeros(3, dtype=np.float32))})
    strategy.start(grid, start, num_rounds=config["num-server-rounds"])


def test_an_app_runs_over_configurations_and_seeds(tmp_path: Path) -> None:
    own: dict[str, Any] = {"app": (client_app, server_app), "clients": 2, "rounds": 2}
    own |= {"epsilon": [1.0, 4.0], "options": {"norm": 2.0}, "out": tmp_path}
    results = run(**own, seeds=2)
    rows = results.to_pandas()
    assert set(rows.scheme) == {"udp"}
    last = rows[rows["round"] == 2]
    np.testing.assert_allclose(last.epsilon_spent, last.epsilon, rtol=1e-3)
    assert sorted(results.cards) == [
        f"app-epsilon-{epsilon}-seed-{seed}" for epsilon in (1, 4) for seed in (0, 1)
    ]
    assert results.report().exists()
    config = json.loads((tmp_path / "app-epsilon-4-seed-1/run-config.json").read_text())
    assert config["epsilon"] == 4.0
    assert run(**own, seeds=2).to_pandas().equals(rows)
    with pytest.raises(InvalidParameterError, match=r"norm = 2\.0 there and 3\.0 here"):
        run(**{**own, "options": {"norm": 3.0}})
    with pytest.raises(InvalidParameterError, match="data = 'tuple': expected nothing"):
        run(**own, data=(FEATURES, LABELS))
