"""Apps that a scheme does not fit are refused with the reason, and bad input says what is wrong."""

from pathlib import Path

import pytest

from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.simulations.inspector.app_folder import AppFolder
from flwr_privacy.simulations.inspector.changes.change import change_of
from flwr_privacy.simulations.inspector.unfit import UnfitError
from flwr_privacy.simulations.inspector.wraps import Options, wrap_of
from tests.simulations.inspector.conftest import CLIENT, PROJECT, SERVER, Small, changed

FROM = "from flwr.serverapp.strategy import FedAvg"
LEGACY = """
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg


def server_fn(context):
    strategy = FedAvg(ARGUMENTS)
    config = ServerConfig(num_rounds=3)
    return ServerAppComponents(strategy=strategy, config=config)


app = ServerApp(server_fn=server_fn)
"""
SECAGG = """
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    legacy = LegacyContext(context=context, config=ServerConfig(), strategy=FedAvg())
    DefaultWorkflow(fit_workflow=SecAggPlusWorkflow(3, 2))(grid, legacy)
"""
OWN = """

class Own(FedAvg):
    def NAME(self, *args, **kwargs):
        return BODY


"""


def own(name: str, body: str) -> str:
    text = SERVER.replace("FedAvg()", "Own()").replace("\n\napp =", f"{OWN}app =", 1)
    return text.replace("NAME", name).replace("BODY", body)


def robust(name: str) -> str:
    return SERVER.replace(FROM, f"from flwr.serverapp.strategy import {name}").replace(
        "FedAvg()", f"{name}()"
    )


WRAPPED = SERVER.replace(
    "strategy = FedAvg()",
    "strategy = s.DifferentialPrivacyClientSideFixedClipping(FedAvg(), 1, 1, 4)",
).replace("\nfrom", "\nfrom flwr.serverapp import strategy as s\nfrom", 1)
OTHER = SERVER.replace("    strategy.start", "    other = FedAvg()\n    strategy.start")


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        (SECAGG, "a workflow of Flower's older API"),
        (robust("Krum"), "Krum: it needs to see every client's reply"),
        (robust("FedXgbBagging"), "it collects trees"),
        (robust("Strategy"), "which does not average"),
        (WRAPPED, "clips and adds noise by itself"),
        (OTHER, "more than one strategy"),
        (own("aggregate_train", "None, None"), "does not call super().aggregate_train"),
        (own("configure_train", "[]"), "does not call super().configure_train"),
        (own("start", "self.aggregate_train()"), "the number of its rounds is not known"),
        (LEGACY.replace("ARGUMENTS", ""), "no initial_parameters"),
        (LEGACY.replace("ARGUMENTS", "on_fit_config_fn=f"), "no function at the top of the file"),
        (LEGACY.replace("ARGUMENTS", "**given"), "arguments without a name"),
        (
            LEGACY.replace("ARGUMENTS", "").replace("config=config)", "config=made())"),
            "strategy and config are not found",
        ),
    ],
)
def test_a_server_that_a_scheme_does_not_fit(server: str, reason: str, small: Small) -> None:
    server = (
        server.replace("num_rounds=3)\n", "num_rounds=later)\n")
        if "start(self" in server
        else server
    )
    with pytest.raises(UnfitError) as refused:
        changed(small(server=server))
    assert reason in str(refused.value)
    assert refused.value.exit_code == 8


def test_a_client_without_a_training(small: Small) -> None:
    client = CLIENT.replace("@app.train()", '@app.query("x")')
    with pytest.raises(UnfitError, match="there is no training"):
        changed(small(client=client))


def test_a_mod_of_one_function_that_clips(small: Small) -> None:
    client = CLIENT.replace("@app.train()", "@app.train(mods=[fixedclipping_mod])").replace(
        "\napp", "from flwr.clientapp.mod import fixedclipping_mod\n\napp"
    )
    with pytest.raises(UnfitError, match="'train' has the mod fixedclipping_mod") as refused:
        changed(small(client=client))
    assert "client.py:8: @app.train(mods" in refused.value.by_hand[0]


def test_a_strategy_that_is_not_found(small: Small) -> None:
    with pytest.raises(UnfitError, match="no place is found"):
        changed(small(server=SERVER.replace("FedAvg()", "made_by_name('FedAvg')")))


@pytest.mark.parametrize(
    ("server", "client", "reason"),
    [
        (
            SERVER.replace(FROM, "from flwr_privacy.strategies import MSP as FedAvg"),
            CLIENT,
            "MSP of",
        ),
        (
            SERVER,
            CLIENT.replace("flwr.clientapp import", "flwr_privacy.clients import MSPClientApp as"),
            "have a scheme of this library already",
        ),
        (
            SERVER,
            CLIENT.replace("ClientApp()", "ClientApp(mods=[as_mod(MSPClient)])")
            + "\nfrom flwr_privacy.clients import MSPClient, as_mod\n",
            "have a scheme of this library already",
        ),
    ],
)
def test_an_app_with_another_scheme(server: str, client: str, reason: str, small: Small) -> None:
    with pytest.raises(UnfitError, match=reason):
        changed(small(server=server, client=client))


def test_nothing_is_written_where_one_half_does_not_fit(small: Small) -> None:
    app = small(server=LEGACY.replace("ARGUMENTS", ""))
    before = {path: path.read_bytes() for path in app.path.rglob("*.py")}
    with pytest.raises(UnfitError):
        changed(app).apply()
    assert {path: path.read_bytes() for path in app.path.rglob("*.py")} == before


def test_no_app(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match="the folder of a Flower app") as wrong:
        AppFolder.read(tmp_path / "nothing")
    assert wrong.value.exit_code == 2


@pytest.mark.parametrize(
    ("project", "client", "allowed"),
    [
        ("[tool", CLIENT, "can be parsed"),
        ("[project]", CLIENT, "serverapp = 'module:attribute'"),
        (PROJECT.replace("small.client:app", "small.client"), CLIENT, "clientapp = 'module"),
        (PROJECT.replace("small.client:", "small.none:"), CLIENT, "the module 'small.none'"),
        (PROJECT.replace("client:app", "client:other"), CLIENT, "defines 'other' at its top"),
        (PROJECT, "def f(:\n", "files can be parsed"),
        (PROJECT, "app = made()\n", "by calling ClientApp"),
    ],
)
def test_a_folder_that_is_no_app(project: str, client: str, allowed: str, small: Small) -> None:
    app = small()
    (app.path / "pyproject.toml").write_text(project)
    (app.path / "small" / "client.py").write_text(client)
    with pytest.raises(InvalidParameterError, match=allowed):
        change_of(AppFolder.read(app.path), wrap_of("udp", Options()))


@pytest.mark.parametrize(
    ("scheme", "options", "parameter"),
    [
        ("upd", {}, "scheme"),
        ("m2fdp", {"secure_sum": True}, "secure_sum"),
        ("udp", {"epsilon": 0.0}, "epsilon"),
        ("udp", {"clients": 0}, "clients"),
        ("udp", {"delta": 2.0}, "delta"),
    ],
)
def test_bad_options(scheme: str, options: dict[str, float], parameter: str) -> None:
    with pytest.raises(InvalidParameterError) as wrong:
        wrap_of(scheme, Options(**options))  # type: ignore[arg-type]
    assert wrong.value.parameter == parameter
