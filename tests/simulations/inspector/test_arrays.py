"""What an app starts from: found without a training, a network, or a trace in its folder."""

from pathlib import Path

import pytest

from flwr_privacy.simulations.inspector.arrays import Arrays, arrays_of
from flwr_privacy.simulations.inspector.foresight import forecast_of
from flwr_privacy.simulations.inspector.wraps import Options, wrap_of
from tests.simulations.inspector.conftest import SERVER, Small

MODEL = "ArrayRecord([np.zeros((3, 2), np.float32), np.array(4)])"
IMPORTS = "import numpy as np\nfrom flwr.app import ArrayRecord\n"


def with_model(before: str = "", start: str = "strategy.start(grid, arrays, num_rounds=7)") -> str:
    text = SERVER.replace(
        "    strategy.start(grid, arrays, num_rounds=3)",
        f"    arrays = {MODEL}\n    {before or 'pass'}\n    {start}",
    )
    return IMPORTS + text.replace("FedAvg()", "FedAvg(0.5, min_train_nodes=3)")


def test_the_server_is_run_up_to_its_first_round(small: Small) -> None:
    app = small(server=with_model("open('left', 'w').write('x'); print('loud')"))
    before = sorted(app.path.rglob("*"))
    found = arrays_of(app)
    assert isinstance(found, Arrays)
    assert [(a.name, a.shape, a.dtype) for a in found.arrays] == [
        ("0", (3, 2), "float32"),
        ("1", (), "int64"),
    ]
    assert (found.rounds, found.fraction_train, found.min_train_nodes) == (7, 0.5, 3)
    assert [a.name for a in found.released(keeps_statistics=True)] == ["0"]
    assert sorted(app.path.rglob("*")) == before


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        ("import urllib.request as u; u.urlopen('http://127.0.0.1:9')", "without a network"),
        ("import socket; socket.create_connection(('127.0.0.1', 9))", "without a network"),
        ("raise ValueError('no data')", "ValueError: no data"),
        ("grid.send_and_receive([])", "sent a message before"),
        ("return", "ended before a round"),
    ],
)
def test_a_server_that_does_not_come_so_far(before: str, reason: str, small: Small) -> None:
    found = arrays_of(small(server=with_model(before)))
    assert isinstance(found, str)
    assert reason in found


def test_a_server_that_takes_too_long_is_ended(small: Small) -> None:
    found = arrays_of(small(server=with_model("import time; time.sleep(600)")), seconds=4.0)
    assert found == "the server did not come to its first round within 4 s"


def test_a_broad_except_of_the_app_does_not_go_on(small: Small) -> None:
    started = "try:\n        strategy.start(grid, arrays, num_rounds=7)\n    except Exception:\n"
    found = arrays_of(small(server=with_model(start=f"{started}        raise ValueError")))
    assert isinstance(found, Arrays)


@pytest.mark.parametrize("scheme", ["udp", "central-dp", "m2fdp"])
def test_the_forecast_is_that_of_the_strategy(
    scheme: str, small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = tmp_path / "cards"
    monkeypatch.setenv("FLWR_PRIVACY_RUNS", str(cards))
    found = arrays_of(small(server=with_model()))
    assert isinstance(found, Arrays)
    few, many = (
        forecast_of(wrap_of(scheme, Options(clients=n)), found, clients=n) for n in (4, 2000)
    )
    assert "the noise in 6 weights is" in few
    # half of the clients take part, or three where that is more
    assert "of 3 clients a round" in few or "of 4 clients" in few
    assert "of 1000 clients a round can be: the model can learn" in many
    assert forecast_of(wrap_of("fedavg", Options()), found, clients=4) == ""
    assert not cards.exists()
