"""A server that lies about a cohort to have less noise in a sum, against real clients that pin."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from apps import make, message_app, record, run_strategy
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from grid_tap import tapped
from pinned import pinned_nodes

from flwr_privacy.clients import (
    CentralDPClient,
    SecureSumClient,
    UDPClient,
    acfl_client_app,
    as_mod,
)
from flwr_privacy.errors import InvalidParameterError
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.secure_sum.messages import JOIN
from flwr_privacy.strategies import ACFL, UDP, CentralDP, DataBounds, FedAvg, LoopOptions
from flwr_privacy.wire.message import RECORD

CLIENTS = [f"ward-{i}" for i in range(5)]
POLICY = "max_epsilon = 1\nmin_noise_multiplier = 3\nmin_sigma = 0.1\nmin_summed = 3\n"
HALVES = {"udp": UDPClient, "central-dp": CentralDPClient}
MODEL = {"w": np.zeros((160, 100), np.float32)}


def strategy_of(scheme: str, secure_sum: SecureSum) -> Any:
    options: dict[str, Any] = {"epsilon": 1.0, "seed": 1, "secure_sum": secure_sum, "deadline": 3.0}
    return (
        make(UDP, shared_noise=True, **options) if scheme == "udp" else make(CentralDP, **options)
    )


def lying(lie: Mapping[str, int]) -> Callable[[Any], None]:
    """Return a change of the grid: what a question for a vector says of the sum is another."""

    def changed(content: RecordDict) -> None:
        if JOIN not in content:
            return
        for name in (JOIN, RECORD):
            told = dict(content.config_records[name])
            content[name] = ConfigRecord(told | {k: v for k, v in lie.items() if k in told})

    return tapped(lambda message: changed(message.content))


class Trained:
    """An app whose clients learn nothing, and how many of them trained."""

    def __init__(self, half: Any) -> None:
        self.count = 0
        self.app = ClientApp(mods=[as_mod(half)])

        @self.app.train()
        def train(message: Message, context: Context) -> Message:
            self.count += 1
            arrays = message.content.array_records["arrays"]
            metrics = MetricRecord({"num-examples": 3})
            return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def asked(
    folder: Path,
    scheme: str,
    lie: Mapping[str, int],
    secure_sum: SecureSum | None = None,
    *,
    policy: str = POLICY,
    pinned: bool = True,
) -> tuple[Any, Any, int, list[Any]]:
    """Return result and strategy of a round, how many trained, and the charges of all clients."""
    trained = Trained(HALVES[scheme])
    strategy = strategy_of(scheme, secure_sum or SecureSum())
    result = run_strategy(
        strategy,
        trained.app,
        nodes=pinned_nodes(folder, CLIENTS, policy=policy, pinned=pinned),
        arrays=record(MODEL),
        num_rounds=1,
        before=lying(lie),
        state=folder,
    )
    charges = [
        entry.charge
        for client in CLIENTS
        for entry in Ledger(folder / f"{client}.ledger", data_set=client).entries()
    ]
    return result, strategy, trained.count, charges


ALL = SecureSum(threshold=5)
MANY = 2**20


@pytest.mark.parametrize("scheme", HALVES)
@pytest.mark.parametrize(
    ("secure_sum", "lie", "text"),
    [
        # With the complete roster of five: shares for so many that hardly any noise is left.
        (
            ALL,
            {"cohort": 2**31, "threshold": 2**31, "parties": 2**31, "modulus-bits": 64},
            "cohort = 2147483648: expected an integer from 2 to 1048576",
        ),
        (
            ALL,
            {"cohort": MANY, "threshold": MANY, "parties": MANY, "modulus-bits": 64},
            "1048576 honest clients was asked for in a secure sum in which this node counts on 4",
        ),
        (
            ALL,
            {"cohort": 1000, "threshold": 501, "parties": 301, "modulus-bits": 64},
            "counts on 4",
        ),
        (ALL, {"parties": 5}, "counts on 4"),  # as if nobody colluded
        (SecureSum(), {"parties": 3}, "counts on 2"),
        (SecureSum(), {"threshold": 5, "parties": 4}, "counts on 2"),
        (SecureSum(), {"threshold": 6}, "such a sum there is not"),
        (SecureSum(), {"cohort": 7, "modulus-bits": 64}, "such a sum there is not"),
    ],
)
def test_shares_for_clients_that_are_not_there_are_refused_and_cost_nothing(
    scheme: str,
    secure_sum: SecureSum,
    lie: dict[str, int],
    text: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    result, _, trained, charges = asked(tmp_path, scheme, lie, secure_sum)
    assert (trained, charges) == (0, [])
    assert sum(result.history[1]["refused"].values()) == 5
    assert text in caplog.text


@pytest.mark.parametrize("scheme", HALVES)
@pytest.mark.parametrize("secure_sum", [SecureSum(), ALL, SecureSum(colluders=2)])
def test_the_same_nodes_answer_an_honest_server(
    scheme: str, secure_sum: SecureSum, tmp_path: Path
) -> None:
    result, strategy, trained, charges = asked(tmp_path, scheme, {}, secure_sum)
    assert result.history[1]["scheme"]["sum_opened"] == trained == len(charges) == 5
    noise = 5 * result.arrays["w"].numpy().astype(float)
    # That of the charge, and the shares that the server cannot rely on: no less than the policy's.
    z, parties = strategy.terms.noise_multiplier, strategy.terms.parties
    assert (noise**2).mean() == pytest.approx((2 * z) ** 2 * 5 / parties, rel=0.06)
    assert z > 3


@pytest.mark.parametrize("scheme", HALVES)
def test_a_deployed_node_without_pins_gives_no_share(
    scheme: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result, _, trained, charges = asked(tmp_path, scheme, {}, policy="", pinned=False)
    assert result.history[1]["refused"] == {"declined": 5}
    assert "this node pins no keys" in caplog.text
    assert "Name a file with their public keys as privacy-pins" in caplog.text
    assert (trained, charges) == (0, [])


@pytest.mark.parametrize("scheme", HALVES)
@pytest.mark.parametrize(("most", "answers"), [(5, True), (4, True), (3, False)])
def test_an_operator_may_believe_in_fewer_clients(
    scheme: str, most: int, answers: bool, tmp_path: Path
) -> None:
    """Of three in a sum one is made up if there are four; then three honest ones would do."""
    result, _, trained, _ = asked(tmp_path, scheme, {}, policy=f"max_cohort = {most}\n")
    assert trained == (5 if answers else 0)
    assert result.history[1]["skipped"] != answers


@pytest.mark.parametrize("limit", ["min_noise_multiplier = 3", "min_sigma = 6"])
@pytest.mark.parametrize("scheme", HALVES)
def test_the_policys_noise_is_in_the_sum_even_if_a_sparse_graph_is_made_up(
    scheme: str, limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise multiplier 3.7: were one client of the two the only one, it would be 2.6."""
    monkeypatch.setattr(
        "flwr_privacy.clients.node.secure_sum.believed_sum",
        lambda **said: type("Believed", (), {"clients": 3, "honest": 2, "certain": certain}),
    )
    for certain, answers in ((2, True), (1, False)):
        folder = tmp_path / str(certain)
        folder.mkdir()
        _, _, _, charges = asked(folder, scheme, {}, policy=limit)
        assert len(charges) == (5 if answers else 0)


def test_min_summed_counts_those_whom_the_operator_believes_in(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also without noise, where nothing is charged."""
    for most, opened in ((5, 5), (4, 0)):
        policy = f"min_summed = 3\nmax_cohort = {most}\n"
        result = run_strategy(
            FedAvg(loop=LoopOptions(seed=3, deadline=3.0), secure_sum=SecureSum()),
            message_app([as_mod(SecureSumClient)]),
            nodes=pinned_nodes(tmp_path, CLIENTS, policy=policy),
            num_rounds=1,
        )
        assert result.history[1]["scheme"]["sum_opened"] == opened
    assert "at least 2 clients was asked for: the node's policy has min_summed = 3" in caplog.text


@pytest.mark.parametrize("scheme", HALVES)
def test_a_sparse_graph_of_simulated_clients_is_believed(scheme: str) -> None:
    strategy = strategy_of(scheme, SecureSum())
    trained = Trained(HALVES[scheme])
    result = run_strategy(strategy, trained.app, nodes=104, arrays=record(), num_rounds=1)
    assert strategy.terms.parties == 53 - 20
    assert result.history[1]["scheme"]["sum_opened"] == trained.count == 104


NO_DATA = acfl_client_app(lambda context: (np.zeros((3, 3)), np.zeros((3, 2))))


@pytest.mark.parametrize(
    ("strategy", "app"),
    [
        (strategy_of("udp", SecureSum(colluders=0)), Trained(UDPClient).app),
        (strategy_of("central-dp", SecureSum(colluders=0)), Trained(CentralDPClient).app),
        (ACFL(secure_sum=SecureSum(colluders=0), data=DataBounds(max_records=20)), NO_DATA),
    ],
    ids=["udp", "central-dp", "acfl"],
)
def test_a_server_that_plans_with_too_few_colluders_is_told_before_anything_is_dealt(
    strategy: Any, app: ClientApp, tmp_path: Path
) -> None:
    start = record({"W": np.zeros((3, 2))})
    with pytest.raises(InvalidParameterError, match=r"secure_sum.colluders = 0: expected at least"):
        run_strategy(strategy, app, nodes=5, arrays=start, num_rounds=1, state=tmp_path)
    assert not list(tmp_path.glob("*.ledger"))
