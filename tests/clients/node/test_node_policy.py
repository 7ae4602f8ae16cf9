"""The node decides what leaves it: without noise, under a scheme without a promise, outside of one.

What every scheme refuses is in the conformance class (`test_a_nodes_policy_binds_it` and
`test_a_deployed_node_answers_without_noise_only_where_none_is_promised`).
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from apps import StepClient, message_app, record, run_strategy
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg

from flwr_privacy import clients
from flwr_privacy.clients import (
    FedAvgClient,
    SchemeClient,
    SecureSumClient,
    UDPClient,
    as_mod,
    numpy_client_app,
    own_client_app,
)
from flwr_privacy.clients.node.context_store import ALLOW_VARIABLE
from flwr_privacy.errors import DeclinedError, FlwrPrivacyError, InvalidParameterError, LedgerError
from flwr_privacy.pipeline.operator_checks import warn_once
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.simulations.engines.inline import InlineGrid
from flwr_privacy.simulations.engines.inline.flower_internals import acting_as_server
from flwr_privacy.strategies import UDP, FedAvg, LoopOptions, UserLevel
from flwr_privacy.udp import LossTerms, UDPTerms
from flwr_privacy.wire.fields import write
from flwr_privacy.wire.message import DECLINED_CODE, ERROR_CODE, RECORD, Header

MODEL = {"w": np.zeros(3, np.float32)}
QUESTION = {"experiment-id": "e", "round": 1, "request": 0, "summed": 0, "code-limit": 0}
BARE = UDPTerms(
    unit="user",
    noise_multiplier=0.0,
    epsilon=8.0,
    delta=1e-5,
    gap=1e-2,
    clipping_norm=1.0,
    grid=-16,
)
BARE_LOSS = LossTerms(unit="user", cap=4.0, noise_multiplier=0.0, epsilon=8.0, delta=1e-5, gap=0.1)
REFUSED = "an answer without noise was asked for, and the scheme 'udp' promises"


@pytest.fixture(autouse=True)
def nothing_was_said() -> Iterator[None]:
    warn_once.cache_clear()
    yield
    warn_once.cache_clear()


def policy_in(folder: Path, text: str) -> dict[str, Any]:
    """Return the node configuration that names such a policy."""
    path = folder / "policy.toml"
    path.write_text(text)
    return {"privacy-policy": str(path)}


def ask(
    app: ClientApp, message_type: str, content: dict[str, Any], config: dict[str, Any]
) -> Message:
    """Send one message to a deployed node."""
    node = {"partition-id": 0, "num-partitions": 1, "privacy-simulated": False, **config}
    grid = InlineGrid(app, [node])
    with acting_as_server(grid.run_id):
        (node_id,) = grid.get_node_ids()
        message = Message(RecordDict(content), node_id, message_type)
        (reply,) = grid.send_and_receive([message], timeout=5)
    return reply


# -- Schemes that promise differential privacy -----------------------------------------------


class Node:
    """A node under UDP that is asked for an answer without noise."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.context = Context(
            run_id=1,
            node_id=1,
            node_config={"client-id": "a", "privacy-state": str(folder), **config},
            state=RecordDict(),
            run_config={},
        )
        self.worked = 0

    def train(self, **more: Any) -> Any:
        def moved(start: Any) -> clients.Trained:
            self.worked += 1
            return clients.Trained({name: array + 1 for name, array in start.items()}, {})

        fields = {**write(BARE), **QUESTION, **more}
        return UDPClient(None, self.context).handle("train", MODEL, fields, moved)

    def judge(self, **more: Any) -> Any:
        def evaluate() -> dict[str, Any]:
            self.worked += 1
            return {"loss": 1.0}

        fields = {**write(BARE_LOSS), **QUESTION, **more}
        return UDPClient(None, self.context).handle_evaluation(MODEL, fields, evaluate)


def test_the_client_halves_say_what_they_promise() -> None:
    halves = [
        half
        for name in clients.__all__
        if isinstance(half := getattr(clients, name), type) and issubclass(half, SchemeClient)
    ]
    promising = {half.__name__ for half in halves if half.guarantees_dp}
    assert promising == {"UDPClient", "CentralDPClient", "M2FDPClient", "ACFLClient"}
    assert len(halves) > len(promising)


@pytest.mark.parametrize(
    "config", [{}, {"privacy-allow-unprotected": "central-dp, acfl"}, {"privacy-simulated": False}]
)
@pytest.mark.parametrize("what", ["train", "judge"])
def test_a_deployed_node_sends_nothing_without_noise(
    what: str, config: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(tmp_path, **config)
    with pytest.raises(DeclinedError, match=REFUSED):
        getattr(node, what)()
    assert node.worked == 0
    assert f"client a declines: {REFUSED}" in caplog.text


@pytest.mark.parametrize("what", ["train", "judge"])
@pytest.mark.parametrize("way", ["policy", "configuration", "environment", "simulated", "ray"])
def test_its_operator_or_a_simulation_may_allow_it(
    way: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: dict[str, Any] = {}
    if way == "policy":
        config = policy_in(tmp_path, 'allow_unprotected = ["acfl", "udp"]')
    elif way == "configuration":
        monkeypatch.setenv(ALLOW_VARIABLE, "acfl")  # the configuration counts
        config["privacy-allow-unprotected"] = "acfl, udp"
    elif way == "environment":
        monkeypatch.setenv(ALLOW_VARIABLE, "udp,acfl")
    elif way == "simulated":
        config["privacy-simulated"] = True
    else:
        monkeypatch.setattr("flwr_privacy.clients.node.context_store.is_simulated", lambda: True)
    assert getattr(Node(tmp_path, **config), what)()


def test_a_node_lists_schemes_beside_those_of_its_policy(tmp_path: Path) -> None:
    config = policy_in(tmp_path, 'allow_unprotected = ["acfl"]')
    with pytest.raises(DeclinedError, match=REFUSED):
        Node(tmp_path, **config).train()
    assert Node(tmp_path, **config, **{"privacy-allow-unprotected": "udp"}).train()


def test_what_is_allowed_cannot_be_refused_elsewhere(tmp_path: Path) -> None:
    config = policy_in(tmp_path, "max_epsilon = 1.0")
    with pytest.raises(LedgerError, match=r"nothing beside max_epsilon"):
        Node(tmp_path, **config, **{"privacy-allow-unprotected": "udp"}).train()


@pytest.mark.parametrize("key", ["privacy-allow-unprotected", "privacy_allow_unprotected"])
def test_a_server_cannot_allow_it(key: str, tmp_path: Path) -> None:
    node = Node(tmp_path)
    for work in (node.train, node.judge):
        with pytest.raises(InvalidParameterError, match=r"^message = .*: expected no keys of the"):
            work(**{key: "udp"})
    node.context.run_config[key] = "udp"
    with pytest.raises(InvalidParameterError, match=r"^run-config = .*: expected no keys of the"):
        node.train()


@pytest.mark.parametrize("key", ["privacy-allow-unprotected", "privacy-simulated"])
def test_no_scheme_takes_the_nodes_keys_from_a_message(key: str) -> None:
    header = Header(scheme="fedavg", experiment_id="e", phase="train", server_round=1)
    content = {"arrays": record(), RECORD: ConfigRecord(header.write({key: "fedavg"}))}
    reply = ask(message_app([as_mod(FedAvgClient)]), "train", content, {})
    assert "expected no keys of the node's own configuration" in reply.error.reason


def test_a_client_of_a_cohort_is_simulated() -> None:
    node = {"partition-id": 0, "privacy-simulated": False, "cohorts": True}
    app = message_app([as_mod(UDPClient)])
    strategy = UDP(
        loop=LoopOptions(clients=4),
        min_available_nodes=1,
        privacy=UserLevel(noise="none"),
        rounds=1,
        fraction_evaluate=0,
    )
    result = run_strategy(strategy, app, nodes=[node], num_rounds=1)
    assert result.history[1]["accumulated"] == 4


# -- Schemes that promise nothing ------------------------------------------------------------

STRICT = {
    "another scheme": 'schemes = ["nobody"]',
    "no budget": "max_epsilon = 0",
    "a unit": 'units = ["user"]',
    "noise": "min_noise_multiplier = 0.1",
    "sigma": "min_sigma = 1e-6",
    "a sum": "min_summed = 17",
}
CLIENTS = 16


def left(strategy: Any, app: ClientApp, nodes: Any) -> list[Message]:
    """Return the replies that have updates or metrics of sixteen clients in one round."""
    replies: list[Message] = []

    def listen(grid: Any) -> None:
        pull = grid.pull_messages

        def pull_messages(ids: Any) -> Any:
            replies.extend(pulled := list(pull(ids)))
            return pulled

        grid.pull_messages = pull_messages

    with contextlib.suppress(FlwrPrivacyError):  # a strategy may give up where nobody answers
        run_strategy(strategy, app, nodes=nodes, num_rounds=1, before=listen)
    return [
        reply
        for reply in replies
        if reply.has_content()
        and any(len(r) for r in reply.content.values() if isinstance(r, ArrayRecord | MetricRecord))
    ]


def numpy_app() -> ClientApp:
    return numpy_client_app(
        lambda context: FedAvgClient(StepClient(int(context.node_config["partition-id"])))
    )


WAYS: dict[str, Any] = {
    "in the clear": lambda: (FedAvg(), message_app([as_mod(FedAvgClient)])),
    "NumPyClient": lambda: (FedAvg(), numpy_app()),
    "a secure sum": lambda: (
        FedAvg(secure_sum=SecureSum(threshold=9, value_range=64.0)),
        message_app([as_mod(SecureSumClient)]),
    ),
    "Flower's": lambda: (
        FlowerFedAvg(min_available_nodes=CLIENTS),
        message_app([as_mod(FedAvgClient)]),
    ),
    "Flower's, NumPyClient": lambda: (FlowerFedAvg(min_available_nodes=CLIENTS), numpy_app()),
}


@pytest.mark.parametrize("simulated", [True, False])
@pytest.mark.parametrize("policy", STRICT)
@pytest.mark.parametrize("way", WAYS)
def test_a_policy_binds_federated_averaging(
    way: str, policy: str, simulated: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All of sixteen bare updates left nodes with such policies."""
    node = {**policy_in(tmp_path, STRICT[policy]), "privacy-simulated": simulated}
    nodes = [{"partition-id": i, "num-partitions": CLIENTS, **node} for i in range(CLIENTS)]
    strategy, app = WAYS[way]()
    assert left(strategy, app, nodes) == []
    if policy != "a sum" or way != "a secure sum":  # there the strategy is told in the invitation
        assert "client 3 declines: " in caplog.text


def test_a_policy_binds_the_clients_of_a_cohort(tmp_path: Path) -> None:
    node = {**policy_in(tmp_path, STRICT["another scheme"]), "cohorts": True, "partition-id": 0}
    strategy = FedAvg(loop=LoopOptions(clients=CLIENTS), min_available_nodes=1)
    result = run_strategy(strategy, nodes=[node], num_rounds=1)
    assert result.history[1]["refused"] == {"declined": CLIENTS}


@pytest.mark.parametrize(
    "policy", ["", 'schemes = ["fedavg"]', "min_noise_multiplier = 0", "max_releases = 5"]
)
@pytest.mark.parametrize("way", WAYS)
def test_what_a_policy_does_not_refuse_leaves(way: str, policy: str, tmp_path: Path) -> None:
    node = policy_in(tmp_path, policy)
    nodes = [{"partition-id": i, "num-partitions": CLIENTS, **node} for i in range(CLIENTS)]
    assert len(left(*WAYS[way](), nodes)) >= CLIENTS


@pytest.mark.parametrize("way", ["in the clear", "Flower's"])
@pytest.mark.parametrize(
    ("config", "lines"),
    [({"privacy-simulated": False}, 1), ({}, 0), ({"privacy-simulated": False, "policy": True}, 0)],
)
def test_the_log_says_once_that_nothing_is_promised(
    way: str,
    config: dict[str, Any],
    lines: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if "policy" in config:
        config = {**config, **policy_in(tmp_path, "")}
    nodes = [{"partition-id": i, "num-partitions": 2, **config} for i in range(2)]
    strategy = FlowerFedAvg() if way == "Flower's" else FedAvg()
    run_strategy(strategy, nodes=nodes)
    told = "the scheme 'fedavg' promises none, and the node has no policy"
    assert caplog.text.count(told) == lines


# -- Messages outside of the scheme ----------------------------------------------------------

EMBEDDINGS = np.arange(6, dtype=np.float32)


def split_app(scheme: type[SchemeClient] = UDPClient) -> ClientApp:
    """An app with messages of its own, as split learning has them."""
    app = message_app([as_mod(scheme)])

    @app.train("apply_gradients")
    def apply_gradients(message: Message, context: Context) -> Message:
        context.state["applied"] = MetricRecord({"times": 1})
        return Message(RecordDict(), reply_to=message)

    @app.query("generate_embeddings")
    def generate_embeddings(message: Message, context: Context) -> Message:
        context.state["generated"] = MetricRecord({"times": 1})
        return Message(RecordDict({"e": record({"e": EMBEDDINGS})}), reply_to=message)

    @app.query("fails")
    def fails(message: Message, context: Context) -> Message:
        raise ValueError("patient J. Smith")

    @app.query("answers_with_an_error")
    def answers_with_an_error(message: Message, context: Context) -> Message:
        return Message(Error(0, "patient J. Smith"), reply_to=message)

    return app


GRADIENTS = {"gradients": record({"g": EMBEDDINGS})}
OWN_TYPES = [("train.apply_gradients", GRADIENTS), ("query.generate_embeddings", {})]


@pytest.mark.parametrize(("kind", "content"), OWN_TYPES)
@pytest.mark.parametrize("scheme", [UDPClient, FedAvgClient])
def test_with_a_policy_nothing_goes_past_the_scheme(
    scheme: type[SchemeClient],
    kind: str,
    content: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    reply = ask(split_app(scheme), kind, content, policy_in(tmp_path, ""))
    does = "brings" if content else "returns"
    text = f"a message '{kind}' {does} something outside of the scheme"
    assert reply.error.code == DECLINED_CODE
    assert reply.error.reason.startswith(text)
    assert f"refused: {text}" in caplog.text


@pytest.mark.parametrize(("kind", "content"), OWN_TYPES)
def test_the_policy_may_allow_a_type_of_message(
    kind: str, content: dict[str, Any], tmp_path: Path
) -> None:
    types = ["train", "query", "train.apply", kind]
    for allowed, refused in ((types, False), (types[:-1], True)):
        config = policy_in(tmp_path, f"allowed_messages = {allowed}")
        assert ask(split_app(), kind, content, config).has_error() == refused


@pytest.mark.parametrize("kind", ["train.apply_gradients", "query.generate_embeddings"])
@pytest.mark.parametrize("scheme", [FedAvgClient, UDPClient])
def test_our_record_makes_no_training_of_the_apps_own_messages(
    scheme: type[SchemeClient], kind: str, tmp_path: Path
) -> None:
    header = Header(scheme=scheme.scheme, experiment_id="e", phase="train", server_round=1)
    content = {"arrays": record(), RECORD: ConfigRecord(header.write())}
    for config in (policy_in(tmp_path, ""), {}):
        reply = ask(split_app(scheme), kind, content, config)
        assert f"a message '{kind}' has the record '{RECORD}'" in reply.error.reason


def test_the_schemes_own_types_cannot_be_allowed_past_it(tmp_path: Path) -> None:
    config = policy_in(tmp_path, 'allowed_messages = ["train", "train.default", "evaluate"]')
    for kind in ("train", "train.default", "evaluate"):
        reply = ask(split_app(), kind, {"arrays": record()}, config)
        assert "works under the scheme 'udp' only" in reply.error.reason


def test_a_message_that_brings_and_returns_nothing_passes(tmp_path: Path) -> None:
    reply = ask(split_app(), "train.apply_gradients", {}, policy_in(tmp_path, ""))
    assert reply.content == RecordDict()


@pytest.mark.parametrize("kind", ["query.fails", "query.answers_with_an_error"])
def test_the_text_of_an_error_does_not_go_past_it_either(kind: str, tmp_path: Path) -> None:
    reply = ask(split_app(), kind, {}, policy_in(tmp_path, ""))
    assert reply.error.code in (DECLINED_CODE, ERROR_CODE)
    assert "Smith" not in reply.error.reason


@pytest.mark.parametrize(("kind", "content"), OWN_TYPES)
def test_without_a_policy_they_pass_and_the_log_says_so_once(
    kind: str, content: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    app = split_app()
    with caplog.at_level(logging.WARNING, "flwr.privacy"):
        assert not any(ask(app, kind, content, {}).has_error() for _ in range(3))
    assert caplog.text.count(f"messages '{kind}' are not protected") == 1


@pytest.mark.parametrize("kind", ["train", "train.default", "evaluate", "evaluate.default"])
def test_training_without_our_record_is_refused_with_a_line_in_the_log(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    own = own_client_app(lambda data, context: UDPClient(None, context), lambda context: None)
    numpy = numpy_client_app(lambda context: UDPClient(StepClient(0), context))
    for app in (split_app(), numpy, own):
        caplog.clear()
        assert ask(app, kind, {"arrays": record()}, {}).has_error()
        assert f"no record '{RECORD}'" in caplog.text


@pytest.mark.parametrize("kind", ["get_parameters", "get_properties"])
def test_what_a_legacy_server_asks_for_is_no_message_of_the_apps_own(kind: str) -> None:
    app = ClientApp(lambda context: StepClient(0).to_client(), mods=[as_mod(UDPClient)])
    reply = ask(app, kind, {"config": ConfigRecord()}, {})
    assert "works under the scheme 'udp' only" in reply.error.reason
