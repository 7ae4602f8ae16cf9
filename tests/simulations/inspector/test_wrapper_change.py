"""Flower's own wrappers with noise become CentralDP; what cannot be changed says what to write."""

import ast
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from flwr_privacy.accounting import noise_multiplier
from flwr_privacy.simulations.engines.inline import run_inline
from flwr_privacy.simulations.inspector.changes.wrapper_change import unwrapped
from flwr_privacy.simulations.inspector.inspection import inspect_app
from flwr_privacy.simulations.inspector.unfit import UnfitError
from flwr_privacy.simulations.inspector.wraps import Options, wrap_of
from tests.simulations.inspector.conftest import CLIENT, SERVER, Small, changed, new

STOCK = Path(__file__).parents[2] / "stock"
INNER = "DifferentialPrivacyServerSideFixedClipping(FedAvg(fraction_train=0.5), 0.5, 2.0, 4)"
BEFORE = (
    "FedAvg(fraction_train=0.5)\n    strategy = DifferentialPrivacyServerSideFixedClipping(\n"
    "        strategy, 0.5, clipping_norm=2.0, num_sampled_clients=4\n    )"
)
RENAMED = BEFORE.replace("\n    strategy =", "\n    private =")


def loaded(text: str) -> ModuleType:
    """Return the module that a text is."""
    module = ModuleType("changed")
    exec(compile(text, "changed", "exec"), module.__dict__)
    return module


def server(made: str) -> str:
    """Return a server with Flower's wrapper."""
    wrapper = "DifferentialPrivacyServerSideFixedClipping"
    return SERVER.replace("import FedAvg", f"import {wrapper}, FedAvg").replace("FedAvg()", made)


@pytest.mark.parametrize("made", [INNER, BEFORE, RENAMED])
@pytest.mark.parametrize("secure_sum", [False, True])
def test_a_wrapper_becomes_central_dp_with_its_norm(
    made: str, secure_sum: bool, small: Small
) -> None:
    text = server(made)
    text = text.replace("strategy.start", "private.start") if made is RENAMED else text
    found = new(changed(small(server=text), "central-dp", secure_sum=secure_sum), "server")
    ast.parse(found)
    noise = "DistributedNoise" if secure_sum else "ServerNoise"
    call = f"privacy={noise}(epsilon=8.0, delta=1e-5, clipping_norm=2.0)"
    assert found.count(call) == found.count("CentralDP(") == 1
    assert "fraction_train=0.5" in found
    assert "DifferentialPrivacy" not in found
    assert ("private = strategy" in found) == (made is RENAMED)


@pytest.mark.parametrize("kind", ["clipping", "adaptive_clipping"])
def test_the_stock_apps_with_clipping_mods(kind: str, small: Small) -> None:
    halves = {half: (STOCK / f"{kind}_{half}.py").read_text() for half in ("server", "client")}
    app = small(**halves)
    inspected = inspect_app(app, "central-dp", Options(clients=4), run=False)
    inspected.change.apply()
    text = new(inspected.change, "server")
    norm = "0.5" if kind == "clipping" else "0.1"
    assert f"ServerNoise(epsilon=8.0, delta=1e-5, clipping_norm={norm})" in text
    adaptive = "clipping=AdaptiveClipping(quantile=0.5, clipping_learning_rate=0.2)"
    assert (adaptive in text) == (kind != "clipping")
    assert "app = ClientApp(mods=[])" in new(inspected.change, "client")
    assert any("not from noise_multiplier=0" in line for line in inspected.losses)
    again = type(app).read(app.path)
    assert inspect_app(again, "central-dp", Options(clients=4), run=False).change.empty
    ran = loaded(text)
    run_inline(ran.app, loaded(new(inspected.change, "client")).app, nodes=4)
    (arrays,) = ran.results
    assert [array.shape for array in arrays] == [(2, 2), (3,)]
    assert all(np.isfinite(array).all() for array in arrays)


def test_the_epsilon_that_keeps_the_noise_is_told(small: Small) -> None:
    options = Options(clients=4)
    found = unwrapped(small(server=server(INNER)), wrap_of("central-dp", options))
    last = found.told(options, 3)[-1]
    epsilon = float(last.rpartition("--epsilon ")[2].partition(" ")[0])
    # Flower's multiplier is over the norm, and two updates may differ by twice the norm.
    own = noise_multiplier(releases=3, epsilon=epsilon, delta=1e-5, neighbours="replace_one")
    assert own == pytest.approx(0.5 / 2, rel=1e-3)
    assert len(found.told(options, None)) == 1


@pytest.mark.parametrize(
    "made",
    [
        "FedAvg()\n    norm = read()\n    strategy = DifferentialPrivacyServerSideFixedClipping("
        "strategy, 0.5, norm, 4)",
        "DifferentialPrivacyServerSideFixedClipping(FedAvg(), **given)",
        "DifferentialPrivacyServerSideFixedClipping(noise_multiplier=1, clipping_norm=1)",
    ],
)
def test_a_wrapper_that_cannot_be_taken_off_is_refused(made: str, small: Small) -> None:
    with pytest.raises(UnfitError, match="cannot be taken off safely") as refused:
        changed(small(server=server(made)), "central-dp")
    assert "server: CentralDP(..., privacy=ServerNoise(epsilon=8.0" in refused.value.by_hand[1]


@pytest.mark.parametrize("made", [INNER, BEFORE])
@pytest.mark.parametrize("scheme", ["udp", "fedavg", "m2fdp"])
def test_other_schemes_do_not_take_the_place_of_a_wrapper(
    made: str, scheme: str, small: Small
) -> None:
    with pytest.raises(UnfitError, match="noise of two kinds would be added") as refused:
        changed(small(server=server(made)), scheme)
    first, second = refused.value.by_hand
    assert first == "--scheme central-dp takes its place, with its clipping norm"
    inner = "FedAvg(fraction_train=0.5)" if made == INNER else "strategy"
    assert second.startswith(f"for another scheme write {inner} in the place of this call: server.")


def client(mod: str) -> str:
    """Return a client with one of Flower's mods."""
    imported = f"import ClientApp\nfrom flwr.clientapp.mod import {mod.partition('(')[0]}\n"
    text = CLIENT.replace("import ClientApp\n", imported)
    return text.replace("ClientApp()", f"ClientApp(mods=[{mod}])")


@pytest.mark.parametrize(
    ("mod", "scheme", "secure_sum", "by_hand"),
    [
        ("fixedclipping_mod", "fedavg", False, "--scheme central-dp or udp does"),
        ("fixedclipping_mod", "fedavg", True, "--scheme central-dp or udp does"),
        ("LocalDpMod(1.0, 1.0, 8.0, 1e-5)", "msp", False, "--scheme central-dp or udp does"),
        ("LocalDpMod(1.0, 1.0, 8.0, 1e-5)", "mspdq", True, "--scheme central-dp or udp does"),
        ("secaggplus_mod", "fedavg", False, "--secure-sum takes its place"),
    ],
)
def test_a_mod_that_protects_does_not_go_for_nothing(
    mod: str, scheme: str, secure_sum: bool, by_hand: str, small: Small
) -> None:
    with pytest.raises(UnfitError, match=r"puts nothing in its place: client\.py:") as refused:
        changed(small(client=client(mod)), scheme, secure_sum=secure_sum)
    assert refused.value.by_hand[0] == by_hand


@pytest.mark.parametrize(
    ("mod", "scheme", "secure_sum", "said"),
    [
        ("secaggplus_mod", "fedavg", True, "secure_sum=SecureSum() of the strategy takes its"),
        ("secaggplus_mod", "udp", False, "sees each noised update; with --secure-sum"),
        ("LocalDpMod(1.0, 1.0, 8.0, 1e-5)", "udp", False, "its noise is counted by no ledger"),
    ],
)
def test_a_mod_goes_where_the_scheme_takes_its_place(
    mod: str, scheme: str, secure_sum: bool, said: str, small: Small
) -> None:
    app = small(client=client(mod))
    options = Options(clients=4, secure_sum=secure_sum)
    found = inspect_app(app, scheme, options, run=False)
    assert "app = ClientApp(mods=[])" in new(found.change, "client")
    assert any(said in line for line in found.losses)


def test_a_workflow_is_left_line_by_line(small: Small) -> None:
    halves = {half: (STOCK / f"secagg_{half}.py").read_text() for half in ("server", "client")}
    with pytest.raises(UnfitError, match="a workflow of Flower's older API") as refused:
        changed(small(**halves), "fedavg", secure_sum=True)
    assert [line.partition(": server.py")[0] for line in refused.value.by_hand] == [
        "server: FedAvg(..., secure_sum=SecureSum()) of flwr_privacy.strategies",
        "server: in the place of this strategy",
        "server: take this out, and what has it",
        "server: in the place of the call of the workflow: strategy.start(grid, "
        "ArrayRecord(initial_model()), num_rounds=2)",
        'docs/drop-in.md has the whole change, under "From Flower\'s SecAgg+ and clipping mods"',
        "SecureSum: reconstruction_threshold=2 becomes threshold: clients, more than half of the "
        "cohort",
        "SecureSum: max_weight=1000 becomes largest_weight, a whole number",
        "clients: from flwr_privacy.clients import SecureSumClientApp as ClientApp",
        "clients: take the mod secaggplus_mod out: client.py:23: app = "
        "ClientApp(client_fn=client_fn, mods=[secaggplus_mod])",
    ]
    with pytest.raises(UnfitError) as refused:
        changed(small(**halves), "udp")
    assert any("--secure-sum takes the place" in line for line in refused.value.by_hand)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("ndarrays_to_parameters(initial_model())", "ArrayRecord(initial_model())"),
        ("converted()", "ArrayRecord(converted())"),
        ("INITIAL", "ArrayRecord(INITIAL)"),
    ],
)
def test_the_line_that_starts_names_the_app_s_model(given: str, taken: str, small: Small) -> None:
    halves = {half: (STOCK / f"secagg_{half}.py").read_text() for half in ("server", "client")}
    usual = "ndarrays_to_parameters(initial_model())"
    assert usual in halves["server"]
    halves["server"] = halves["server"].replace(usual, given)
    with pytest.raises(UnfitError) as refused:
        changed(small(**halves), "fedavg", secure_sum=True)
    (line,) = [line for line in refused.value.by_hand if "strategy.start(" in line]
    assert f"strategy.start(grid, {taken}, num_rounds=2)" in line
