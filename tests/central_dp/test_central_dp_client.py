"""The client half of central DP, asked directly: what it declines, charges and sends."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from apps import MODEL
from asked_terms import central_terms
from flwr.app import Context, RecordDict
from pinned import pinned_nodes

from flwr_privacy.accounting import spent
from flwr_privacy.central_dp.terms import CentralDPTerms
from flwr_privacy.clients import CentralDPClient, Trained
from flwr_privacy.errors import DataError, DeclinedError, InvalidParameterError, ProtocolError
from flwr_privacy.privacy.adaptive_clipping import COUNT_NAME
from flwr_privacy.privacy.failures import FAILED_NAME
from flwr_privacy.privacy.ledger import Entry, Ledger
from flwr_privacy.wire.fields import write

TERMS = central_terms(noise_multiplier=2.0, epsilon=10.0)
QUESTION = {"experiment-id": "e", "round": 1, "request": 0, "code-limit": 2**31 - 1}
QUESTION |= {"summed": 3, "honest": 3, "certain": 3}  # what the client believes of the secure sum


def changed(**values: Any) -> CentralDPTerms:
    return CentralDPTerms(
        **{**{n: getattr(TERMS, n) for n in CentralDPTerms.__dataclass_fields__}, **values}
    )


TRUSTED = changed(noise="server", parties=1)


class Node:
    """One deployed client, asked directly."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        pins = folder.with_name(f"{folder.name}-pins")
        pins.mkdir(exist_ok=True)
        (own,) = pinned_nodes(pins, ["ward-7"])
        self.config = {**own, "privacy-state": str(folder)}
        self.run_config: dict[str, Any] = {}
        self.trained = 0

    def ask(
        self, terms: CentralDPTerms = TERMS, arrays: Any = MODEL, far: float = 1.0, **fields: Any
    ) -> Any:
        def train(start: Any) -> Trained:
            self.trained += 1
            return Trained({n: a + (far if a.ndim else 1) for n, a in start.items()}, {})

        context = Context(
            run_id=1,
            node_id=1,
            node_config=self.config,
            state=RecordDict(),
            run_config=self.run_config,
        )
        question = {**write(terms), **QUESTION, **fields}
        return CentralDPClient(None, context).handle("train", arrays, question, train)

    def charges(self) -> list[Entry]:
        return list(Ledger(self.folder / "ward-7.ledger", data_set="ward-7").entries())


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.mark.parametrize(
    ("believed", "text"),
    [
        ({"summed": 0}, r"at least 3 honest clients was asked for outside of a secure sum"),
        (
            {"honest": 2},
            r"at least 3 honest clients was asked for in a secure sum in which this node counts "
            "on 2",
        ),
    ],
)
def test_a_share_is_not_added_to_what_is_not_summed_with_enough(
    node: Node, believed: dict[str, int], text: str
) -> None:
    with pytest.raises(DeclinedError, match=text):
        node.ask(**believed)
    with pytest.raises(DeclinedError, match="outside of a secure sum"):
        node.ask(changed(parties=1), summed=0)
    node.ask()
    with pytest.raises(DeclinedError, match=text):
        node.ask(**believed)  # also of what it has answered before
    assert node.trained == 1
    assert len(node.charges()) == 1


def test_a_sum_that_does_not_take_all_noised_codes_is_refused_before_there_are_any(
    node: Node,
) -> None:
    """Whether one was within a limit of the server's choice would say something of it."""
    with pytest.raises(ProtocolError, match="takes codes up to 5, the noise needs"):
        node.ask(**{"code-limit": 5})
    assert node.trained == 0
    assert node.charges() == []


def test_the_charge_is_there_and_the_reply_is_not_kept(node: Node) -> None:
    codes, fields = node.ask()
    (entry,) = node.charges()
    assert entry.charge == TERMS.charge()
    assert (entry.scheme, entry.unit) == ("central-dp", "user")
    assert fields == {"metrics": {"num-examples": 1}}
    assert sorted(codes) == ["0", COUNT_NAME, FAILED_NAME, "layer.weight"]
    with pytest.raises(DeclinedError, match="the question of round 1 was answered before"):
        node.ask()
    assert node.trained == 1
    assert [path.name for path in node.folder.iterdir()] == ["ward-7.ledger"]
    node.ask(request=1)
    assert len(node.charges()) == 2


def test_a_question_has_one_attempt_also_while_it_trains(node: Node) -> None:
    def train(start: Any) -> Trained:
        with pytest.raises(DeclinedError, match="answered before"):
            node.ask()
        return Trained(start, {})

    context = Context(
        run_id=1, node_id=1, node_config=node.config, state=RecordDict(), run_config={}
    )
    client = CentralDPClient(None, context)
    client.handle("train", MODEL, {**write(TERMS), **QUESTION}, train)
    assert node.trained == 0
    assert len(node.charges()) == 1


def test_the_cap_holds_however_often_the_server_asks(node: Node) -> None:
    count = 0
    while spent([TERMS.charge()] * (count + 1), delta=1e-5) <= 10.0:
        count += 1
        node.ask(round=count)
    with pytest.raises(DeclinedError, match=rf"the budget is spent: .* after {count} releases"):
        node.ask(round=count + 1)
    assert node.trained == count > 2
    node.ask(**{"experiment-id": "another"})


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        ("min_noise_multiplier = 3.0", "noise multiplier 2: the node's policy has min_noise"),
        ("min_sigma = 5.0", r"asks for sigma 4\.2\d+: the node's policy has min_sigma = 5"),
        ('schemes = ["fedavg"]', "scheme 'central-dp' asks for a release"),
        ('units = ["record"]', "protects the unit 'user'"),
        ("max_epsilon = 0.5", "the node's policy has max_epsilon = 0.5"),
    ],
)
def test_a_server_cannot_weaken_the_nodes_policy(node: Node, policy: str, text: str) -> None:
    path = node.folder / "policy.toml"
    path.write_text(policy)
    node.config["privacy-policy"] = str(path)
    with pytest.raises(DeclinedError, match=text):
        node.ask()
    assert node.trained == 0
    assert node.charges() == []


@pytest.mark.parametrize(
    "policy",
    ["max_epsilon = 1000.0", "min_noise_multiplier = 0.1", "min_sigma = 1e-9", 'units = ["user"]'],
)
def test_a_node_that_limits_its_releases_trusts_no_server_with_its_noise(
    node: Node, policy: str, caplog: Any
) -> None:
    node.config["privacy-allow-unprotected"] = "central-dp"
    node.ask(TRUSTED, summed=0)
    del node.config["privacy-allow-unprotected"]
    path = node.folder / "policy.toml"
    path.write_text(policy)
    node.config["privacy-policy"] = str(path)
    with pytest.raises(DeclinedError, match="the node's policy has"):
        node.ask(TRUSTED, round=2)
    assert "client ward-7 declines" in caplog.text
    assert node.trained == 1
    node.ask(round=3)  # shares are another matter


def test_where_the_server_adds_noise_a_client_sends_codes_without(node: Node) -> None:
    node.config["privacy-allow-unprotected"] = "central-dp"
    codes, fields = node.ask(TRUSTED, summed=0)
    assert fields == {"metrics": {"num-examples": 1}}
    assert {array.dtype for array in codes.values()} == {np.dtype(np.int32)}
    assert codes[COUNT_NAME].tolist() == [-(2**16)]  # clipped: it moved eleven entries by 1
    norm = math.sqrt(sum(float((codes[n].astype(float) ** 2).sum()) for n in ("0", "layer.weight")))
    assert 1 - 1e-5 < norm * 2.0**-20 <= 1
    within, _ = node.ask(TRUSTED, far=0.25)
    assert within[COUNT_NAME].tolist() == [2**16]
    assert node.charges() == []


@pytest.mark.parametrize("far", [math.nan, math.inf, -math.inf])
def test_an_update_that_is_not_finite_differs_from_none_in_the_noised_count_alone(
    tmp_path: Path, far: float
) -> None:
    answers = []
    for name, moved in (("one", far), ("other", 0.0)):
        (tmp_path / name).mkdir()
        node = Node(tmp_path / name)
        node.config["insecure-seed"] = 3
        answers.append(node.ask(far=moved))
        assert len(node.charges()) == 1
    (codes, own), (expected, told) = answers
    assert own == told
    assert codes.pop(FAILED_NAME) - expected.pop(FAILED_NAME) == TERMS.failed_code == 2**20
    assert all((codes[n] == expected[n]).all() for n in expected)


def test_where_nothing_is_promised_an_update_that_is_not_finite_is_refused(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    node.config["privacy-allow-unprotected"] = "central-dp"
    with pytest.raises(DataError, match="the log of the node says how"):
        node.ask(TRUSTED, far=math.nan, summed=0)
    assert "has NaN or infinity" in caplog.text
    assert node.charges() == []


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_model_that_no_update_can_start_from_is_refused_before_training(
    node: Node, value: float
) -> None:
    broken = {**MODEL, "0": np.full_like(MODEL["0"], value)}
    with pytest.raises(ProtocolError, match="the model that was sent has NaN or infinity in '0'"):
        node.ask(arrays=broken)
    assert (node.trained, node.charges()) == (0, [])


@pytest.mark.parametrize(("grid", "text"), [(-2, "finer grid"), (-33, "coarser grid")])
def test_a_grid_that_does_not_fit_is_refused_before_training(
    node: Node, grid: int, text: str
) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        node.ask(changed(grid=grid))
    assert node.trained == 0


@pytest.mark.parametrize("key", ["insecure-seed", "privacy-policy"])
def test_what_is_the_nodes_is_not_taken_from_a_server(node: Node, key: str) -> None:
    with pytest.raises(InvalidParameterError, match=f"message = .'{key}'.*node's own"):
        node.ask(**{key: 3})
    node.run_config = {key: 3}
    with pytest.raises(InvalidParameterError, match=f"run-config = .'{key}'.*node's own"):
        node.ask()
