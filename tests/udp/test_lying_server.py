"""A server that does not follow the protocol, against a node with a policy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from asked_terms import loss_terms, udp_terms
from flwr.app import Context, RecordDict

from flwr_privacy.accounting import Charge, spent
from flwr_privacy.clients import UDPClient
from flwr_privacy.clients.node.base import Trained
from flwr_privacy.clients.torch import get_arrays, initialise, linear, train_per_record
from flwr_privacy.errors import DataError, DeclinedError, InvalidParameterError, ProtocolError
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.udp import LossTerms, UDPTerms
from flwr_privacy.wire.fields import write

MODEL = {"w": np.zeros(4, np.float32)}
QUESTION = {"experiment-id": "e", "round": 1, "request": 0, "summed": 0, "code-limit": 0}
STRICT = 'max_epsilon = 1\nunits = ["record"]\nmin_noise_multiplier = 5\n'
RECORD = udp_terms(unit="record", grid=-20, epochs=50, batch_size=1, bound="unproven")
USER = udp_terms()
LOSS = loss_terms()


class Node:
    def __init__(self, folder: Path, policy: str = "") -> None:
        self.folder = folder
        (folder / "policy.toml").write_text(policy)
        config = {
            "client-id": "a",
            "privacy-state": str(folder),
            "privacy-policy": str(folder / "policy.toml"),
        }
        self.context = Context(
            run_id=1, node_id=1, node_config=config, state=RecordDict(), run_config={}
        )
        self.worked = 0

    def train(self, terms: UDPTerms, **changes: Any) -> Any:
        def moved(start: Any) -> Trained:
            self.worked += 1
            net = initialise(lambda: linear(3, 1), 0)
            if terms.unit == "record":
                features = np.ones((20, 3), np.float32)
                labels = np.zeros(20, np.float32)
                train_per_record(net, features, labels, loss=lambda out, y: out.mean())
                return Trained(get_arrays(net), {})
            return Trained({name: array + 1 for name, array in start.items()}, {})

        fields = {**write(terms), **QUESTION, **changes}
        start = MODEL
        if terms.unit == "record":
            start = get_arrays(initialise(lambda: linear(3, 1), 0))
        return UDPClient(None, self.context).handle("train", start, fields, moved)

    def judge(self, terms: LossTerms, loss: Any = 1.0) -> Any:
        def evaluate() -> dict[str, Any]:
            self.worked += 1
            return {"loss": loss}

        fields = {**write(terms), **QUESTION}
        return UDPClient(None, self.context).handle_evaluation(MODEL, fields, evaluate)

    def schemes(self) -> list[str]:
        ledger = Ledger(self.folder / "a.ledger", data_set="a")
        return [entry.scheme for entry in ledger.entries()]


@pytest.mark.parametrize(
    "policy", ["max_epsilon = 1", 'units = ["record"]', "min_noise_multiplier = 5", STRICT]
)
def test_a_cost_that_is_not_proven_is_declined_by_a_node_with_a_policy(
    tmp_path: Path, policy: str
) -> None:
    node = Node(tmp_path, policy)
    with pytest.raises(DeclinedError):
        node.train(RECORD)
    assert (node.worked, node.schemes()) == (0, [])


def test_a_ledger_says_what_was_not_proven_and_no_policy_builds_on_it(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.train(RECORD)
    assert node.schemes() == ["udp-unproven"]
    plain = UDPTerms(**{**RECORD.__dict__, "epochs": 1, "batch_size": 0, "bound": "general"})
    later = Node(tmp_path, "max_epsilon = 100")
    with pytest.raises(DeclinedError, match="whose cost is not proven"):
        later.train(plain, **{"experiment-id": "another"})


def test_no_noise_is_declined_by_a_node_with_a_policy(tmp_path: Path) -> None:
    bare = UDPTerms(**{**USER.__dict__, "noise_multiplier": 0.0})
    silent = LossTerms(**{**LOSS.__dict__, "noise_multiplier": 0.0})
    for policy in ("max_epsilon = 1", "min_noise_multiplier = 1", "min_sigma = 0.1"):
        node = Node(tmp_path, policy)
        with pytest.raises(DeclinedError):
            node.train(bare)
        with pytest.raises(DeclinedError):
            node.judge(silent)
        assert node.worked == 0


def test_a_node_that_answers_in_sums_only_gives_no_loss(tmp_path: Path) -> None:
    node = Node(tmp_path, "min_summed = 3")
    with pytest.raises(DeclinedError, match="min_summed = 3"):
        node.judge(LOSS)
    assert (node.worked, node.schemes()) == (0, [])


def test_an_experiment_cannot_change_its_accountant_on_the_way(tmp_path: Path) -> None:
    node = Node(tmp_path)
    plain = UDPTerms(**{**RECORD.__dict__, "epochs": 1, "batch_size": 0, "bound": "general"})
    node.train(plain)
    sampled = UDPTerms(**{**plain.__dict__, "sampling_rate": 0.5})
    with pytest.raises(ProtocolError, match=r"sampling 0\.5: this experiment began with none"):
        node.train(sampled, round=2)


def test_after_a_sampled_release_the_accountant_of_samples_has_the_others_too(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path)
    values = {"epochs": 1, "batch_size": 0, "bound": "general", "epsilon": 3.0}
    values |= {"noise_multiplier": 2.0}
    plain = UDPTerms(**{**RECORD.__dict__, **values})
    node.train(UDPTerms(**{**plain.__dict__, "sampling_rate": 0.5}))
    ledger = Ledger(tmp_path / "a.ledger", data_set="a")
    charges = [entry.charge for entry in ledger.entries()]
    more = Charge(
        noise_multiplier=plain.noise_multiplier, neighbours=charges[0].neighbours, gap=plain.gap
    )
    while spent([*charges, more], delta=plain.delta, accountant="rdp") <= 3.0 and len(charges) < 9:
        node.train(plain, round=len(charges) + 1)
        charges = [entry.charge for entry in ledger.entries()]
    assert {charge.sampling for charge in charges} == {0.5, 1.0}
    with pytest.raises(DeclinedError, match="the budget is spent"):
        node.train(plain, round=len(charges) + 1)


@pytest.mark.parametrize(
    ("loss", "told"), [(np.nan, 4.0), (np.inf, 4.0), (-1.0, 0.0), (10**400, 4.0), (1.0, 1.0)]
)
def test_a_loss_out_of_range_counts_as_its_bound(tmp_path: Path, loss: Any, told: float) -> None:
    bare = LossTerms(**{**LOSS.__dict__, "noise_multiplier": 0.0})
    node = Node(tmp_path, 'allow_unprotected = ["udp"]')
    assert node.judge(bare, loss) == {"num-examples": 1, "loss": told}


@pytest.mark.parametrize("loss", [True, "1.0", [1.0], None])
def test_what_is_no_number_is_no_loss(
    tmp_path: Path, loss: Any, caplog: pytest.LogCaptureFixture
) -> None:
    bare = LossTerms(**{**LOSS.__dict__, "noise_multiplier": 0.0})
    with pytest.raises(DataError, match="the log of the node says how"):
        Node(tmp_path, 'allow_unprotected = ["udp"]').judge(bare, loss)
    assert "returned no loss" in caplog.text


def logistic(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.binary_cross_entropy_with_logits(output.squeeze(1), label)


@pytest.mark.parametrize(
    ("rate", "smoothness", "text"),
    [
        (0.5, None, "smoothness = None"),
        (50.0, 1.0, "learning_rate = 50.0: expected at most 2 / smoothness = 2"),
        (0.5, -1.0, "smoothness = -1.0"),
    ],
)
def test_the_convex_bound_takes_the_word_of_who_trains(
    rate: float, smoothness: float | None, text: str
) -> None:
    net = initialise(lambda: linear(3, 1), 0)
    data = np.ones((8, 3), np.float32), np.zeros(8, np.float32)
    with pytest.raises(InvalidParameterError) as error:
        train_per_record(
            net,
            *data,
            clipping_norm=1.0,
            learning_rate=rate,
            epochs=8,
            bound="convex",
            smoothness=smoothness,
            loss=logistic,
        )
    assert text in str(error.value)


def test_shorter_numbers_of_the_users_training_do_not_reach_the_certificate() -> None:
    """Under autocast products of matrices lose digits; the sums of clipped gradients must not."""

    def stepped(last: float) -> tuple[Any, float]:
        labels = np.ones(64, np.float32)
        labels[-1] = last
        net = torch.nn.Linear(50, 1, bias=False)
        torch.nn.init.zeros_(net.weight)
        with torch.autocast("cpu", torch.bfloat16):
            step = train_per_record(
                net,
                np.ones((64, 50), np.float32),
                labels,
                clipping_norm=1.0,
                learning_rate=64.0,
                loss=lambda out, y: (5 * out * y).sum(),
            )
        return np.concatenate([a.ravel() for a in get_arrays(net).values()]), step.sensitivity()

    (one, bound), (other, _) = stepped(1.0), stepped(-1.0)
    assert np.linalg.norm(one - other) <= bound
