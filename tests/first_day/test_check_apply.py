"""`check --apply` makes apps that run, for every scheme that fits; the others get the reason."""

from pathlib import Path

import numpy as np
import pytest

from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.simulations.inspector.app_folder import AppFolder
from flwr_privacy.simulations.inspector.changes.change import change_of
from flwr_privacy.simulations.inspector.unfit import UnfitError
from flwr_privacy.simulations.inspector.wraps import Options, Wrap, wrap_of

from .conftest import NODES, Apps, folder_of, initial

SCHEMES = {
    "fedavg": ("fedavg", False),
    "fedavg-summed": ("fedavg", True),
    "udp": ("udp", False),
    "udp-summed": ("udp", True),
    "central-dp": ("central-dp", False),
    "central-dp-summed": ("central-dp", True),
    "mspdq": ("mspdq", False),
    "mspdq-summed": ("mspdq", True),
    "msp": ("msp", False),
    "m2fdp": ("m2fdp", False),
}
RECORD = {
    "udp-record": ("udp", False),
    "udp-record-summed": ("udp", True),
    "m2fdp-record": ("m2fdp", False),
}
ALL = frozenset(SCHEMES)
FITTING = {
    "own_mods": ALL,
    "own_metrics": ALL - {"mspdq", "mspdq-summed", "msp", "m2fdp"},  # its aggregate_train
    "trainer": ALL,
    "batchnorm_numpy": ALL - {"m2fdp"},  # its on_fit_config_fn
    "own_start": {"fedavg", "udp", "central-dp"},  # no several exchanges, no secure sum
    "vertical": frozenset(),
    "pytorch-message": ALL | set(RECORD),
    "pytorch-numpy": ALL | set(RECORD),
}
REASONS = {
    "own_start": "start of its own",
    "own_metrics": "own aggregate_train would not be called",
    "batchnorm_numpy": "own configure_train would not be called",
    "vertical": "makes no strategy",
}
NO_RECORDS = {  # why a training of the app's does not become one at record level
    "batchnorm_numpy": "no single loop over the batches in it: model.py",
    "trainer": r"the loop is in a method: task.py:\d+: def fit",
    **dict.fromkeys(
        ("own_mods", "own_metrics", "own_start"),
        r"loss.backward\(\) is called at 0 places",
    ),
}
CHARGED = {  # a trusted server notes its own
    *("udp", "udp-summed", "central-dp-summed", "m2fdp"),
    *RECORD,
}


def wrap(name: str, scheme: str) -> Wrap:
    chosen, summed = {**SCHEMES, **RECORD}[scheme]
    unit = "record" if scheme in RECORD else None
    found = initial(name)
    return wrap_of(chosen, Options(secure_sum=summed, clients=NODES, unit=unit)).keeping_back(
        [] if isinstance(found, str) else found.suspected
    )


def table(*, fits: bool) -> list[tuple[str, str]]:
    return [
        (name, scheme)
        for name, fitting in FITTING.items()
        for scheme in (*SCHEMES, *RECORD)
        if (scheme in fitting) is fits
    ]


def assert_a_second_change_changes_nothing(app: Path, change: Wrap) -> None:
    before = {path: path.read_bytes() for path in app.rglob("*.py")}
    again = change_of(AppFolder.read(app), change)
    assert again.empty
    assert again.diff() == ""
    again.apply()
    assert {path: path.read_bytes() for path in app.rglob("*.py")} == before


@pytest.mark.parametrize(("name", "scheme"), table(fits=True))
def test_the_changed_app_runs(name: str, scheme: str, apps: Apps) -> None:
    app = apps.copy(name)
    change_of(AppFolder.read(app), wrap(name, scheme)).apply()
    assert_a_second_change_changes_nothing(app, wrap(name, scheme))
    brief = {"local-epochs": 1} if name.startswith("pytorch") else {}
    server = apps.run(app, **brief)
    if name.startswith("pytorch"):
        assert (app / "final_model.pt").is_file()
    else:
        found = initial(name)
        assert not isinstance(found, str)
        model = server.results[-1]
        assert [array.shape for array in model] == [array.shape for array in found.arrays]
        assert all(np.isfinite(array).all() for array in model)
        if name == "own_metrics":  # what the app does itself in every round
            assert len(server.models) == 2
        if name == "batchnorm_numpy":
            assert server.rounds == [1, 2]
    assert apps.charged() == ([str(i) for i in range(NODES)] if scheme in CHARGED else [])
    for client in apps.charged():
        entries = Ledger(app.parent / "state" / f"{client}.ledger", data_set=client).entries()
        assert {entry.question.server_round for entry in entries} == {1, 2}
        assert {entry.unit for entry in entries} == {"record" if scheme in RECORD else "user"}


@pytest.mark.parametrize(("name", "scheme"), table(fits=False))
def test_an_app_that_does_not_fit_is_refused_with_the_reason(name: str, scheme: str) -> None:
    reason = REASONS.get(name, "")
    if scheme in RECORD:  # what stands against the scheme itself comes first
        reason = "|".join(filter(None, (reason, NO_RECORDS.get(name))))
    with pytest.raises(UnfitError, match=reason) as refused:
        change_of(AppFolder.read(folder_of(name)), wrap(name, scheme))
    assert refused.value.by_hand
    assert refused.value.exit_code == 8
