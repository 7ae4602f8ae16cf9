"""Each block of Python and TOML on a page runs as it is printed: here, or in a test that is named.

The blocks of a page run one after the other, with the names that the page speaks of (`GIVEN`). What
is a part of a server's or a client's code runs there (`PLACES`); TOML is read by what reads such
files. Data are small, and engines are inline.
"""

import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import nn

from flwr_privacy.clients import (
    FedAvgClient,
    M2FDPClientApp,
    SecureSumClient,
    UDPClient,
    UDPClientApp,
    as_mod,
)
from flwr_privacy.m2fdp import TierTree
from flwr_privacy.privacy.policy import Policy
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.simulations.engines.inline import run_inline
from flwr_privacy.simulations.operations.allowed_apps import AllowedApps
from flwr_privacy.simulations.testing.apps import message_app, record, run_strategy
from flwr_privacy.strategies import M2FDP, UDP, FedAvg, LoopOptions, RecordNoise, UserLevel
from flwr_privacy.wire.pins import Pins
from tests.shared.imports import ROOT

Values = dict[str, Any]
DRAWS = np.random.default_rng(0)


@dataclass(frozen=True)
class Block:
    """A block of a page."""

    page: str
    line: int
    words: str  # behind the fence: the language, and perhaps a name
    text: str

    def has(self, text: str) -> bool:
        return text in f"{self.words}\n{self.text}"

    def run(self, values: Values) -> None:
        """Run it, as if it stood in its place of a file."""
        exec(compile("\n" * self.line + self.text, self.page, "exec"), values)


def blocks_of(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = list(re.finditer(r"^```((?:python|py|toml)\b[^\n]*)\n(.*?)^```", text, re.M | re.S))
    languages = re.findall(r"```(\w+)", text)
    assert len(found) == sum(language != "diff" for language in languages), page
    return [Block(page, text.count("\n", 0, one.start()) + 1, one[1], one[2]) for one in found]


FILES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
BLOCKS = {
    page: found
    for path in sorted(FILES)
    if (found := blocks_of(page := str(path.relative_to(ROOT))))
}

ELSEWHERE = {
    **{
        ("docs/adapters.md", f"python {name}\n"): "tests/test_adapters_page.py"
        for name in ("task", "server", "client", "names", "ffa")
    },
    ("docs/app-audit.md", ""): "tests/simulations/research/app_audit/test_audit.py",
    ("docs/dp-sgd.md", ""): "tests/udp/test_dp_sgd_page.py",
    ("docs/simulation.md", "# mlflow_logger.py"): "tests/simulations/test_simulation_page.py",
    ("docs/simulation.md", "# my.toml"): "tests/simulations/test_simulation_page.py",
    ("docs/simulation.md", "# mytask.py"): "tests/simulations/test_simulation_page.py",
    ("docs/simulation.md", "# wandb_logger.py"): "tests/simulations/test_simulation_page.py",
    ("docs/simulation.md", "results = simulate("): "tests/simulations/runner/test_simulate.py",
    ("docs/testing.md", "class TestConformance"): "tests/simulations/testing/test_plugin.py",
    **{
        ("docs/tutorial.md", f"python {name}\n"): "tests/test_site.py"
        for name in ("app", "run", "secure-sum", "budget", "card")
    },
    **{(page, ""): "tests/test_upstream.py" for page in BLOCKS if "/upstream/" in page},
}
"""A page, a text that one of its blocks has (none: every block), and the test that runs it."""


def is_run_elsewhere(block: Block) -> bool:
    return any(page == block.page and block.has(text) for page, text in ELSEWHERE)


OWN = {
    page: own
    for page, blocks in BLOCKS.items()
    if (own := [block for block in blocks if not is_run_elsewhere(block)])
}


# -- What the pages speak of -----------------------------------------------------------------------


def completed(app: ClientApp, arrays: Callable[[Message], ArrayRecord]) -> ClientApp:
    """Have an app's training end with the reply that a page leaves out."""
    register = app.train

    def train() -> Callable[[Any], Any]:
        def decorated(function: Any) -> Any:
            def whole(message: Message, context: Context) -> Message:
                assert function(message, context) is None
                metrics = MetricRecord({"num-examples": 20})
                content = RecordDict({"arrays": arrays(message), "metrics": metrics})
                return Message(content, reply_to=message)

            register()(whole)
            return function

        return decorated

    app.train = train  # type: ignore[method-assign, assignment]
    return app


def records() -> Values:
    """A small model, and records for it."""
    model = nn.Linear(4, 2)
    features = torch.tensor(DRAWS.normal(size=(20, 4)), dtype=torch.float32)
    return {"model": model, "features": features, "labels": (features[:, 0] > 0).long()}


def deployment() -> Values:
    Path("settings.toml").write_text(
        'scheme = "udp"\ntask = "digits-linear"\nstrategy.unit = "user"\n'
    )
    return {}


def drop_in() -> Values:
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    return {"model": model, "np": np, "accuracy": 0.5, "labels": np.array([0, 1, 1])}


def privacy() -> Values:
    loaded: list[str] = []

    def load(partition: Any) -> Any:
        loaded.append(str(partition))
        return np.zeros((9, 28, 28), np.float32), np.zeros(9, np.int64)

    def client_app(**options: Any) -> ClientApp:
        return completed(ClientApp(**options), lambda message: message.content["arrays"])

    return {
        "partial": partial,
        "load": load,
        "loaded": loaded,
        "ClientApp": client_app,
    }


def acfl() -> Values:
    features = DRAWS.normal(size=(20, 4))
    features /= 2 * np.linalg.norm(features, axis=1, keepdims=True)
    given = {"features": features, "labels": features[:, :2], "zeros": np.zeros((4, 2))}
    pixels, classes = DRAWS.random((20, 784)), np.arange(20) % 10
    given |= {"pixels": pixels, "classes": classes, "test_pixels": pixels[:3]}
    return given | {"Array": Array, "ArrayRecord": ArrayRecord, "weights": np.ones((2000, 10))}


def fedvs() -> Values:
    labels = np.arange(20) % 10
    given = {"columns": DRAWS.random((20, 3)), "test_columns": DRAWS.random((5, 3))}
    given |= {"labels": labels, "test_labels": labels[:5], "names": [f"row {i}" for i in range(20)]}
    return given


def udp() -> Values:
    given = records()
    app = completed(UDPClientApp(), lambda _: ArrayRecord(given["model"].state_dict()))
    losses = iter([3.0, 2.0, 1.5, *[1.4] * 200])
    given |= {"app": app, "arrays": record(), "loss_on_public_data": lambda _: next(losses)}
    return given | {"SecureSum": SecureSum}


def simulation() -> Values:
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        FedAvg().start(grid, record(), num_rounds=2)

    client_app = message_app([as_mod(FedAvgClient)])
    logger = SimpleNamespace(log=lambda number, metrics: None, close=lambda: None)
    return {"server_app": server_app, "client_app": client_app, "WandbLogger": lambda run: logger}


def own_scheme() -> Values:
    def train_with_canary(direction: Any) -> list[Any]:
        return [direction + 0.1 * DRAWS.normal(size=400) for _ in range(12)]

    return {"train_with_canary": train_with_canary}


def new_scheme() -> Values:
    return {"ClientApp": ClientApp, "as_mod": as_mod, "LoopOptions": LoopOptions}


GIVEN: dict[str, Callable[[], Values]] = {
    "docs/deployment.md": deployment,
    "docs/drop-in.md": drop_in,
    "docs/new-scheme.md": new_scheme,
    "docs/privacy.md": privacy,
    "docs/schemes/acfl.md": acfl,
    "docs/schemes/fedvs.md": fedvs,
    "docs/schemes/m2fdp.md": records,
    "docs/schemes/udp.md": udp,
    "docs/simulation.md": simulation,
    "docs/testing.md": own_scheme,
}
"""The names that the blocks of a page use and do not make."""


# -- Where a block stands --------------------------------------------------------------------------


def in_server(block: Block, values: Values, app: ClientApp | None = None, nodes: int = 3) -> None:
    """Run a block as a part of a server's `main`."""
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        values["grid"] = grid
        block.run(values)

    run_inline(server_app, app or values["app"], nodes=nodes)


def rehearsed(block: Block, values: Values) -> None:
    """Train with the app of a block: each client tries it on generated records first."""
    block.run(values)
    result = run_strategy(UDP(privacy=UserLevel()), values["app"], nodes=2, num_rounds=2)
    assert result.history[-1]["answered"] == 2
    assert values["loaded"] == ["0", "1", "0", "1"]


def by_record(block: Block, values: Values) -> None:
    """Train with the strategy of a block and the app of the one before."""
    block.run(values)
    start = ArrayRecord(values["model"].state_dict())
    strategy, app = values["strategy"], values["app"]
    result = run_strategy(strategy, app, nodes=2, arrays=start, num_rounds=2)
    assert result.history[-1]["answered"] == 2


def in_training(block: Block, values: Values) -> None:
    """Run a block as a part of a client's training."""
    model, ran = values["model"], []
    app = completed(M2FDPClientApp(), lambda _: ArrayRecord(model.state_dict()))

    @app.train()
    def train(message: Message, context: Context) -> None:
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        block.run(values)
        ran.append(context)

    tree = TierTree.of_fanouts((2, 2), p=0.5)
    strategy = M2FDP(tree=tree, privacy=RecordNoise(sampling_rate=0.5))
    run_strategy(strategy, app, arrays=ArrayRecord(model.state_dict()), num_rounds=1)
    assert len(ran) == 4


def two_exchanges(block: Block, values: Values) -> None:
    """Train with a round of the page: as it is, and under a secure sum."""
    block.run(values)
    phases = frozenset({"train", "mix"})
    summing = type("Summing", (SecureSumClient,), {"phases": phases})
    plain = type("Plain", (FedAvgClient,), {"phases": phases})
    own = {"train_round": values["train_round"], "sum_phases": phases}
    strategy = type("Twice", (FedAvg,), own)
    expected = run_strategy(FedAvg(fraction_evaluate=0.0), num_rounds=4).arrays
    for client, secure_sum in ((plain, None), (summing, SecureSum())):
        app = message_app([as_mod(client)])
        twice = strategy(fraction_evaluate=0.0, secure_sum=secure_sum)
        result = run_strategy(twice, app, num_rounds=2)
        for name in ("layer.weight", "0"):  # the others are integers, which no sum has
            found, mean = result.arrays[name].numpy(), expected[name].numpy()
            np.testing.assert_allclose(found, mean, atol=1e-3)


PLACES: dict[tuple[str, str], Callable[[Block, Values], None]] = {
    ("docs/new-scheme.md", "def train_round("): two_exchanges,
    ("docs/privacy.md", "own_data("): rehearsed,
    ("docs/schemes/acfl.md", "grid=grid"): in_server,
    ("docs/schemes/fedvs.md", "grid=grid"): partial(in_server, nodes=8),
    ("docs/schemes/m2fdp.md", "train_poisson("): in_training,
    ("docs/schemes/udp.md", "grid=grid"): partial(in_server, app=message_app([as_mod(UDPClient)])),
    ("docs/schemes/udp.md", "UDP(privacy=RecordLevel("): by_record,
}
"""A page, a text that one of its blocks has, and what runs that block."""

READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "app": (AllowedApps.read, "allowed-apps.toml"),
    "clients": (Pins.read, "pins.toml"),
    "nodes": (TierTree.read, "wards.toml"),
}
"""What reads a TOML file, by its first key, and the file's name; others are policies."""


@pytest.mark.parametrize(("page", "text"), [*ELSEWHERE, *PLACES])
def test_a_table_names_one_block(page: str, text: str) -> None:
    found = [block for block in BLOCKS[page] if block.has(text)]
    assert len(found) == 1 or (found and not text)


@pytest.mark.parametrize("page", [page for page, _ in ELSEWHERE])
def test_the_test_that_is_named_reads_the_page(page: str) -> None:
    path = Path(page)
    tests = {test for (of, _), test in ELSEWHERE.items() if of == page}
    for test in tests:
        text = (ROOT / test).read_text(encoding="utf-8")
        assert path.name in text or f"docs/{path.parent.name}" in text


@pytest.mark.parametrize("page", OWN)
def test_the_blocks_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    values = GIVEN.get(page, dict)()
    for block in OWN[page]:
        if block.words == "toml":
            read(block)
            continue
        known = set(values)
        named = [key for key in PLACES if key[0] == page and block.has(key[1])]
        run = PLACES[named[0]] if named else Block.run
        run(block, values)
        for name in values.keys() - known:
            if name.startswith("test_"):
                values[name](*map(request.getfixturevalue, signature(values[name]).parameters))


def read(block: Block) -> None:
    """Read a file, which stays for the blocks after it."""
    first = next(iter(tomllib.loads(block.text)))
    reader, name = READERS.get(first, (Policy.read, "policy.toml"))
    Path(name).write_text(block.text)
    reader(name)
