"""What a server learns of data without a charge: it puts the same questions to two nodes.

The nodes have neighbouring data. The questions are those of a server that wants to read a record:
models with which a training overflows, fails or returns nonsense for one of the two data sets, and
terms that can never be met. Where the two nodes do not answer alike, both must have been charged.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from flwr_privacy.central_dp import Terms as CentralTerms
from flwr_privacy.clients import CentralDPClient, SchemeClient, Trained, UDPClient
from flwr_privacy.errors import FlwrPrivacyError
from flwr_privacy.fields import write
from flwr_privacy.ledger import Ledger
from flwr_privacy.udp import LossTerms, Terms

MODEL = {"w": np.zeros(4, np.float32)}
STRICT = "max_epsilon = 0.01\nmin_noise_multiplier = 100\n"

UDP_USER = Terms(
    unit="user",
    noise_multiplier=5.0,
    epsilon=8.0,
    delta=1e-5,
    gap=1e-3,
    clipping_norm=1.0,
    grid=-16,
)
CENTRAL = CentralTerms(
    noise="distributed",
    sampling="fixed",
    noise_multiplier=5.0,
    count_share=0.1,
    epsilon=8.0,
    delta=1e-5,
    gap=1e-3,
    clipping_norm=1.0,
    grid=-20,
    parties=3,
)
LOSS = LossTerms(unit="user", cap=4.0, noise_multiplier=5.0, epsilon=8.0, delta=1e-5, gap=1e-2)


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


def changed(terms: Any, **values: Any) -> Any:
    return type(terms)(**{**terms.__dict__, **values})


UNMEETABLE = {
    "as usual": {},
    "no gap": {"gap": 0.0},
    "huge noise": {"noise_multiplier": 1e12},
    "little noise": {"noise_multiplier": 1e-3},
    "no budget": {"epsilon": 1e-6},
}

CASES: dict[str, tuple[type[SchemeClient], Any, str]] = {
    "udp": (UDPClient, UDP_USER, "train"),
    "udp, shared": (UDPClient, changed(UDP_USER, parties=3), "train"),
    "udp, loss": (UDPClient, LOSS, "evaluate"),
    "central-dp": (CentralDPClient, CENTRAL, "train"),
}


class Node:
    def __init__(self, folder: Path, policy: str, record: float) -> None:
        folder.mkdir()
        (folder / "policy.toml").write_text(policy)
        config = {
            "client-id": "a",
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
        self, client: type[SchemeClient], terms: Any, phase: str, kind: float, request: int
    ) -> tuple[Any, int]:
        """Return what the server sees, and how many releases that cost."""
        before, half = self.charges(), client(None, self.context)
        own = terms.write() if isinstance(terms, CentralTerms) else write(terms)
        summed = 3 if getattr(terms, "parties", 0) else 0
        question = {
            **{"experiment-id": "e", "round": 1, "request": request},
            **{"summed": summed, "code-limit": 2**31 - 1 if summed else 0},
        }
        model = {"w": np.full(4, kind, np.float32)}
        try:
            if phase == "evaluate":
                work = evaluation(self.record, kind)
                seen: Any = sorted(half.judge(model, {**own, **question}, work).items())
            else:
                train = training(self.record)
                arrays, fields = half.handle(phase, model, {**own, **question}, train)
                seen = {n: a.tobytes() for n, a in arrays.items()}, fields
        except (FlwrPrivacyError, ValueError) as error:
            seen = type(error).__name__, str(error)
        return seen, self.charges() - before


@pytest.mark.parametrize("policy", ["", STRICT], ids=["no policy", "strict"])
@pytest.mark.parametrize(("client", "terms", "phase"), CASES.values(), ids=CASES.keys())
def test_no_bit_is_free(
    tmp_path: Path, client: type[SchemeClient], terms: Any, phase: str, policy: str
) -> None:
    nodes = [
        Node(tmp_path / name, policy, record) for name, record in (("one", 0.0), ("other", 1.0))
    ]
    free, charged, request = 0, 0, 0
    for change in UNMEETABLE.values():
        for kind in range(9):
            asked = changed(terms, **change)
            one, other = (n.ask(client, asked, phase, float(kind), request) for n in nodes)
            assert one[1] == other[1]  # what it costs says nothing either
            free += one[0] != other[0] and one[1] == 0
            charged += one[1]
            request += 1
    assert free == 0
    assert (charged > 0) == (policy == "")
