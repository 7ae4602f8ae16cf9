"""What a server learns of data without a charge: it puts the same questions to two nodes.

The nodes have neighbouring data. The questions are those of a server that wants to read a record:
models with which a training overflows, fails or returns nonsense for one of the two data sets, and
terms that can never be met. Where the two nodes do not answer alike, both must have been charged.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import every_scheme
import numpy as np
import pytest
import tomli_w
import torch
from acfl_app import gradient_terms, setup_terms
from asked_terms import central_terms, loss_terms, udp_terms
from flwr.app import Context, RecordDict

from flwr_privacy.acfl.terms import DataTerms
from flwr_privacy.clients import (
    ACFLClient,
    CentralDPClient,
    M2FDPClient,
    SchemeClient,
    Trained,
    UDPClient,
)
from flwr_privacy.clients.torch import train_per_record
from flwr_privacy.errors import FlwrPrivacyError, InvalidParameterError
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.wire.fields import write
from flwr_privacy.wire.pins import Identity

MODEL = {"w": np.zeros(4, np.float32)}
STRICT = "max_epsilon = 0.01\nmin_noise_multiplier = 100\n"

UDP_USER = udp_terms(count_failed=True)
CENTRAL = central_terms()
LOSS = loss_terms()


RECORDS = udp_terms(unit="record", learning_rate=0.5, grid=-24)
DEVICE = replace(every_scheme.DEVICE, parent="ward")


def squared(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient overflows where the output is large, and for one value that is not."""
    return (output**2 + 0 * torch.log(torch.abs(output - 2.5))).mean()


def training_per_record(record: float) -> Callable[[Any], Trained]:
    """Return a training of five records, of which one is of another value or not."""

    def train(start: Any) -> Trained:
        net = torch.nn.Linear(4, 1, bias=False)
        features = np.zeros((5, 4), np.float32)
        features[2] = record
        with torch.no_grad():
            net.weight.copy_(torch.tensor(start["w"]))
        train_per_record(net, features, np.zeros(5, np.float32), loss=squared)
        return Trained({"w": net.weight.detach().numpy()}, {"num-examples": 5})

    return train


def training(record: float) -> Callable[[Any], Trained]:
    """Return a user's training that fares as the record says, if the model is made for it."""

    def train(start: Any) -> Trained:
        kind = float(start["w"][0])
        moved = {name: array + record for name, array in start.items()}
        if record > 0:
            if kind == 1:
                raise ValueError(f"the record is {record}")
            if kind == 2:
                moved["w"] = moved["w"] * np.float32(np.inf)
            if kind == 3:
                moved["w"] = moved["w"] * np.float32(np.nan)
            if kind == 4:
                moved["w"] = np.zeros(7, np.float32)
            if kind == 5:
                del moved["w"]
            if kind == 6:
                moved["w"] = moved["w"].astype(np.int64)
            if kind == 7:
                moved["w"] = moved["w"] + np.float32(3e38)
            if kind == 8:
                raise MemoryError
        return Trained(moved, {"num-examples": 3})

    return train


def evaluation(record: float, kind: float) -> Callable[[], dict[str, Any]]:
    def evaluate() -> dict[str, Any]:
        if record > 0:
            if kind == 1:
                raise ValueError(f"the record is {record}")
            if kind == 2:
                return {}
            if kind == 3:
                return {"loss": float("nan")}
            if kind == 4:
                return {"loss": [1.0]}
        return {"loss": 1.0 + record}

    return evaluate


def tables(record: float, *, readable: bool = True) -> Callable[[], Any]:
    """Return a data function of twelve records, of which one is of another value or not."""

    def data() -> Any:
        if record > 0 and not readable:
            raise ValueError(f"the record is {record}")
        features, labels = np.full((12, 3), 0.25), np.full((12, 2), 0.25)
        features[2] += record / 2
        labels[2] -= record / 4
        return features, labels

    return data


def changed(terms: Any, **values: Any) -> Any:
    return type(terms)(**{**terms.__dict__, **values})


UNMEETABLE = {
    "as usual": {},
    "no gap": {"gap": 0.0},
    "huge noise": {"noise_multiplier": 1e12},
    "little noise": {"noise_multiplier": 1e-3},
    "no budget": {"epsilon": 1e-6},
    "a coarse grid": {"grid": 30},
    "a fine grid": {"grid": -60},
    "tight bounds": {"feature_bound": 0.5},
    "tight rows": {"label_norm": 0.3},
    "few records": {"max_records": 11},
    "other columns": {"features": 4},
    "single ones": {"one_hot": True},
    "little noise in a setup": {"sigma_features": 1e-3, "sigma_labels": 1e-3},
}
TABLES = {"noise": "record", "epsilon": 1e4, "alpha": 0.5}

CASES: dict[str, tuple[type[SchemeClient], Any, str]] = {
    "udp": (UDPClient, UDP_USER, "train"),
    "udp, shared": (UDPClient, changed(UDP_USER, parties=3), "train"),
    "udp, loss": (UDPClient, LOSS, "evaluate"),
    "udp, records": (UDPClient, RECORDS, "train"),
    "central-dp": (CentralDPClient, CENTRAL, "train"),
    "m2fdp": (M2FDPClient, DEVICE, "train"),
    "acfl, setup": (ACFLClient, setup_terms(**TABLES), "setup"),
    "acfl, gradient": (ACFLClient, gradient_terms(**TABLES), "train"),
    "acfl, unreadable": (ACFLClient, gradient_terms(**TABLES), "train"),
}

EXTREMES = (0.1, 1e19, 3e37, 8e37, -3e38, 1e-38, 0.625, 1e30, 1e10)
"""Weights with which float32 overflows, or the loss does, for one of the records only."""


class Node:
    def __init__(self, folder: Path, policy: str, record: float) -> None:
        folder.mkdir()
        (folder / "policy.toml").write_text(policy)
        pins = {name: Identity.generate().public for name in "bcde"}
        (folder / "pins.toml").write_text(tomli_w.dumps({"clients": pins}))
        config = {
            "client-id": "a",
            "privacy-pins": str(folder / "pins.toml"),
            "privacy-state": str(folder),
            "privacy-policy": str(folder / "policy.toml"),
            "insecure-seed": 3,
        }
        self.context = Context(
            run_id=1, node_id=1, node_config=config, state=RecordDict(), run_config={}
        )
        self.folder, self.record = folder, record

    def charges(self) -> int:
        return len(Ledger(self.folder / "a.ledger", data_set="a").entries())

    def ask(
        self,
        client: Any,
        terms: Any,
        phase: str,
        kind: float,
        request: int,
        *,
        experiment: str = "e",
        readable: bool = True,
    ) -> tuple[Any, int]:
        """Return what the server sees, and how many releases that cost."""
        data = tables(self.record, readable=readable) if isinstance(terms, DataTerms) else None
        before, half = self.charges(), client(data, self.context)
        own = write(terms)
        summed = 3 if getattr(terms, "parties", 0) else 0
        question = {
            **{"experiment-id": experiment, "round": 1, "request": request},
            **dict.fromkeys(("summed", "honest", "certain"), summed),
            "code-limit": 2**31 - 1 if summed else 0,
        }
        per_record = getattr(terms, "unit", "user") == "record"
        value = EXTREMES[int(kind)] if per_record or data else kind
        shape = (3, 2) if data else (1, 4) if per_record else (4,)
        model = {"w": np.full(shape, value, np.float32)}
        try:
            if phase == "evaluate":
                work = evaluation(self.record, kind)
                seen: Any = sorted(half.handle_evaluation(model, {**own, **question}, work).items())
            else:
                make = training_per_record if per_record else training
                train = make(self.record)
                arrays, fields = half.handle(phase, model, {**own, **question}, train)
                seen = {n: a.tobytes() for n, a in arrays.items()}, fields
        except (FlwrPrivacyError, ValueError) as error:
            seen = type(error).__name__, str(error)
        return seen, self.charges() - before


@pytest.mark.parametrize("policy", ["", STRICT], ids=["no policy", "strict"])
@pytest.mark.parametrize("name", CASES)
def test_no_bit_is_free(tmp_path: Path, name: str, policy: str) -> None:
    client, terms, phase = CASES[name]
    nodes = [
        Node(tmp_path / name, policy, record) for name, record in (("one", 0.0), ("other", 1.0))
    ]
    readable = name != "acfl, unreadable"
    free, charged, told, request = 0, 0, 0, 0
    for change in UNMEETABLE.values():
        if not all(hasattr(terms, name) for name in change):
            continue
        for kind in range(1 if phase == "setup" else 9):
            try:
                asked = changed(terms, **change)
            except InvalidParameterError:
                continue  # so it is for every node
            experiment = f"e{request}"  # a failure at record level ends the one that it is in
            one, other = (
                n.ask(
                    *(client, asked, phase, float(kind), request),
                    experiment=experiment,
                    readable=readable,
                )
                for n in nodes
            )
            # What it costs says nothing either; where data cannot be read, that is always charged.
            assert one[1] == other[1] or (not readable and other[1] == 1)
            free += one[0] != other[0] and other[1] == 0
            told += one[0] != other[0]
            charged += one[1]
            request += 1
    assert free == 0
    assert (charged > 0) == (told > 0) == (policy == "")


def test_code_that_looks_at_records_before_the_trainer_pays_for_what_it_tells(
    tmp_path: Path,
) -> None:
    """A server may choose settings by which it raises: a bit, at the price of the experiment."""

    class Checking(UDPClient):
        def release(self, phase: str, arrays: Any, fields: Any, train: Any) -> Any:
            def checked(start: Any) -> Trained:
                if node.record > 0.5:
                    raise ValueError("clean your data")
                trained: Trained = train(start)
                return trained

            return super().release(phase, arrays, fields, checked)

    for terms, costs in ((RECORDS, 1), (changed(RECORDS, noise_multiplier=1e12), 0)):
        for name, record in (("one", 0.0), ("other", 1.0)):
            node = Node(tmp_path / f"{name}{costs}", "", record)
            seen, cost = node.ask(Checking, terms, "train", 0.0, 0)
            assert cost == (1 if record else costs)
            if record:
                assert "until its operator acts" in seen[1]
                again, cost = node.ask(Checking, terms, "train", 0.0, 1)
                assert (again[0], cost) == ("DeclinedError", 0)
