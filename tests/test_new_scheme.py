"""The two schemes that docs/new-scheme.md prints: conformance, and training on Ray."""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest
from conformance import WrapsConformance

from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.simulations.engines.ray_engine import RayResources, RaySession

PAGE = Path(__file__).parents[1] / "docs" / "new-scheme.md"
BLOCKS = {
    found[1]: found[2]
    for found in re.finditer(r"```python\n# (\w+)\.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
}
MOST_LINES = {"sign_sgd": 40, "top_k": 120}


@pytest.fixture(scope="module", autouse=True)
def printed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The code of the page, as modules."""
    folder = tmp_path_factory.mktemp("printed")
    for name, source in BLOCKS.items():
        (folder / f"{name}.py").write_text(source)
    sys.path.insert(0, str(folder))
    for kind, name in ((TestSignSGD, "sign_sgd"), (TestTopK, "top_k")):
        module: ModuleType = importlib.import_module(name)
        kind.strategy, kind.client = kind.halves(module)
    yield
    sys.path.remove(str(folder))
    for name in BLOCKS:
        del sys.modules[name]


@pytest.mark.parametrize("name", sorted(MOST_LINES))
def test_the_page_keeps_its_word_on_length(name: str) -> None:
    lines = [line for line in BLOCKS[name].splitlines() if line.strip()]
    assert len(lines) <= MOST_LINES[name]


class TestSignSGD(WrapsConformance):
    registered = False
    each_counts = False  # a majority stays one without some of its votes

    @staticmethod
    def halves(module: Any) -> tuple[Any, Any]:
        return module.SignSGD, module.SignClient

    def test_each_entry_takes_a_step_with_the_majority(self) -> None:
        before, after = self.arrays(), self.plain(experiment_id="e").arrays
        for name, array in before.items():
            start = array.numpy()
            if np.issubdtype(start.dtype, np.floating):
                moved = after[name].numpy() - start
                np.testing.assert_allclose(np.abs(moved), 3 * self.strategy.step, rtol=1e-3)


class TestTopK(WrapsConformance):
    registered = False
    options: ClassVar[dict[str, Any]] = {"k": 3, "rounds": 3, "experiment_id": "e"}
    engine: ClassVar[dict[str, Any]] = {"insecure_seed": 7}
    codes = True

    @staticmethod
    def halves(module: Any) -> tuple[Any, Any]:
        return module.TopK, module.TopKClient

    def test_the_card_has_what_the_rounds_cost_and_no_more_than_the_budget(self) -> None:
        result = self.plain(experiment_id="e")
        assert 7.9 < result.guarantee.spent <= 8


APP = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "printed"
version = "1.0.0"
license = "Apache-2.0"
dependencies = ["flwr[simulation]>=1.41,<2"]

[tool.flwr.app]
publisher = "printed"

[tool.flwr.app.components]
serverapp = "printed_app.server:app"
clientapp = "printed_app.client:app"

[tool.flwr.app.config]
scheme = ""
out = ""
"""

CLIENT = """
import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flwr_privacy.clients import as_mod

from .{module} import {client}

app = ClientApp(mods=[as_mod({client})])


@app.train()
def train(message, context):
    start = message.content["arrays"]["w"].numpy()
    arrays = ArrayRecord({{"w": Array(start + np.float32([1, -1, 2, 0]))}})
    content = RecordDict({{"arrays": arrays, "metrics": MetricRecord({{"num-examples": 1}})}})
    return Message(content, reply_to=message)
"""

SERVER = """
import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp import ServerApp

from flwr_privacy.strategies import LoopOptions

from .{module} import {strategy}

app = ServerApp()


@app.main()
def main(grid, context):
    strategy = {strategy}({options}fraction_evaluate=0.0, loop=LoopOptions(experiment_id="e"))
    start = ArrayRecord({{"w": Array(np.zeros(4, np.float32))}})
    result = strategy.start(grid, start, num_rounds=2)
    np.save(context.run_config["out"], result.arrays["w"].numpy())
"""


@pytest.mark.ray
def test_both_train_on_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tmp_path / "state"
    state.mkdir()
    monkeypatch.setenv("FLWR_PRIVACY_STATE", str(state))
    schemes = {
        "sign_sgd": ("SignSGD", "SignClient", ""),
        "top_k": ("TopK", "TopKClient", "rounds=2, k=2, "),
    }
    models = {}
    with RaySession(resources=RayResources(total_cpus=1), log_path=tmp_path / "log") as session:
        for module, (strategy, client, options) in schemes.items():
            names = {"module": module, "strategy": strategy, "client": client, "options": options}
            package = tmp_path / module / "printed_app"
            package.mkdir(parents=True)
            (package.parent / "pyproject.toml").write_text(APP)
            (package / "__init__.py").write_text("")
            (package / f"{module}.py").write_text(BLOCKS[module])
            (package / "client.py").write_text(CLIENT.format(**names))
            (package / "server.py").write_text(SERVER.format(**names))
            out = tmp_path / f"{module}.npy"
            session.run(package.parent, nodes=3, run_config={"out": str(out)}, timeout=120)
            models[module] = np.load(out)
    np.testing.assert_allclose(models["sign_sgd"], [0.02, -0.02, 0.02, 0.0], rtol=1e-5)
    assert np.isfinite(models["top_k"]).all()
    assert 2 <= np.count_nonzero(models["top_k"]) <= 4
    for client in "012":
        entries = Ledger(state / f"{client}.ledger", data_set=client).entries()
        assert [entry.question.server_round for entry in entries] == [1, 2]
