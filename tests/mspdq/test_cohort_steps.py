"""Mixing steps of the clients of a cohort: as if each were on a node of its own."""

from typing import Any, ClassVar

import numpy as np
import pytest
from apps import MODEL, message_app, model_of, record, run_strategy, same
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from mixing_training import run

from flwr_privacy.clients import MSPClient, MSPDQClient, as_mod
from flwr_privacy.errors import DeclinedError, ProtocolError
from flwr_privacy.mspdq import MSPTerms
from flwr_privacy.simulations.engines.inline import InlineGrid
from flwr_privacy.simulations.engines.inline.flower_internals import acting_as_server
from flwr_privacy.stragglers import StragglerModel
from flwr_privacy.strategies import MSP, MSPDQ, LoopOptions
from flwr_privacy.wire.cohort import Cohort
from flwr_privacy.wire.fields import write
from flwr_privacy.wire.identity import client_id_from
from flwr_privacy.wire.message import COHORT, RECORD, Header
from flwr_privacy.wire.payload import payload_bytes

CLIENTS = 5
KEPT = "flwr-privacy.sub-states"
COUNTS = ("asked", "answered", "accumulated", "late", "refused", "bytes_down", "bytes_up", "scheme")


def modes() -> list[tuple[str, str]]:
    starts, rules = ("independent", "reference", "global"), ("self", "linf", "paper", "fixed")
    return [(start, rule) for start in starts for rule in rules] + [("global", "bound")]


def watched(scheme: Any, seen: dict[Any, Any]) -> Any:
    """Return a strategy that notes every client's message as it has it."""

    class Watched(scheme):
        def _instruction(self, phase: str, fields: Any) -> Any:
            told = super()._instruction(phase, fields)
            take = told.take
            if take is not None:

                def noted(mean: Any, reply: Any) -> None:
                    head = dict(reply.content[RECORD])
                    key = (head["round"], phase, head["request"], reply.client_id)
                    arrays = {n: a.tobytes() for n, a in reply.arrays().items()}
                    assert key not in seen
                    seen[key] = (sorted(reply.content), head, reply.fields, arrays)
                    take(mean, reply)

                object.__setattr__(told, "take", noted)
            return told

    return Watched


def keeping(client: Any, states: dict[Any, Any]) -> Any:
    """Return a client half that notes what it keeps after every message."""

    class Keeping(client):
        def handle(self, phase: str, arrays: Any, fields: Any, train: Any) -> Any:
            reply = super().handle(phase, arrays, fields, train)
            kept = self.context.state.get(KEPT, {})
            key = (fields["round"], phase, fields["request"], client_id_from(_config(self)))
            states[key] = {name: array.numpy().tobytes() for name, array in kept.items()}
            return reply

    return Keeping


def _config(client: Any) -> Any:
    return client.context.node_config


def both(
    scheme: Any, client: Any, nodes: int = 2, loop: Any = None, **options: Any
) -> tuple[list[Any], list[Any]]:
    """Run with a node for each client and with cohorts; return what each side has seen."""
    runs = []
    loop = {"seed": 3, "experiment_id": "e", **(loop or {})}
    for cohorts in (False, True):
        seen: dict[Any, Any] = {}
        states: dict[Any, Any] = {}
        strategy = watched(scheme, seen)(
            loop=LoopOptions(clients=CLIENTS if cohorts else None, **loop),
            min_available_nodes=nodes if cohorts else CLIENTS,
            **options,
        )
        result = run(
            strategy,
            client=keeping(client, states),
            nodes=nodes if cohorts else CLIENTS,
            num_rounds=2,
        )
        runs.append([result, seen, states])
    return runs[0], runs[1]


def check_alike(alone: list[Any], together: list[Any]) -> None:
    (result, seen, states), (twin, seen_together, states_together) = alone, together
    assert same(result.arrays, twin.arrays)
    assert seen == seen_together
    assert states == states_together
    for line, other in zip(result.history[1:], twin.history[1:], strict=True):
        for key in COUNTS:
            assert line[key] == other[key], key


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(("start", "interval"), modes())
def test_a_run_in_cohorts_is_that_of_a_node_for_each_client(
    start: str, interval: str, nodes: int
) -> None:
    options = {"mixing_start": start, "interval": interval, "mixing_rounds": 3, "bits": 5}
    alone, together = both(MSPDQ, MSPDQClient, nodes, **options)
    check_alike(alone, together)
    assert len(together[1]) == 2 * CLIENTS * len({key[1:3] for key in together[1]})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"coupling": "random", "m": 2, "mass": "normalized"},
        {"m": 3, "m_mode": "iid", "gamma": 0.2},
    ],
)
@pytest.mark.parametrize("scheme", [MSP, MSPDQ])
def test_what_a_client_draws_by_itself_is_its_own_in_a_cohort(
    scheme: Any, options: dict[str, Any]
) -> None:
    client = MSPClient if scheme is MSP else MSPDQClient
    # Where no mean depends on who answers first.
    alone, together = both(scheme, client, 1, mixing_rounds=3, **options)
    check_alike(alone, together)


class Failing(MSPDQClient):
    """Fails in the second mixing step of the first round, by itself or because it declines."""

    failing: ClassVar[dict[str, Exception]]

    def handle(self, phase: str, arrays: Any, fields: Any, train: Any) -> Any:
        reply = super().handle(phase, arrays, fields, train)
        if phase == "mix" and fields["request"] == 1 and fields["round"] == 1:
            error = self.failing.get(client_id_from(_config(self)))
            if error is not None:
                raise error
        return reply


@pytest.mark.parametrize("on_dropout", ["restart", "continue", "finish"])
@pytest.mark.parametrize("start", ["independent", "global"])
@pytest.mark.parametrize(
    "failing",
    [
        {"2": RuntimeError("it fails")},
        {"0": DeclinedError("it does not want to"), "4": ProtocolError("it cannot")},
    ],
)
def test_a_client_that_fails_in_a_step_is_lost_alone(
    failing: dict[str, Exception], start: str, on_dropout: str
) -> None:
    class Client(Failing):
        pass

    Client.failing = failing
    options = {"mixing_start": start, "mixing_rounds": 4, "on_dropout": on_dropout}
    alone, together = both(MSPDQ, Client, **options)
    check_alike(alone, together)
    scheme = together[0].history[1]["scheme"]
    assert scheme["lost"] == len(failing)
    assert scheme["given_up"] == (on_dropout == "restart")
    lost = together[0].history[1]["refused"]
    assert lost == {}  # of the training; the others are logged
    assert together[0].history[2]["scheme"]["lost"] == 0


def test_who_is_late_in_a_step_is_in_no_row() -> None:
    loop = {"stragglers": StragglerModel(spread=1.0), "deadline": 3.0, "seed": 4}
    options = {"mixing_rounds": 4, "on_dropout": "continue"}
    alone, together = both(MSPDQ, MSPDQClient, 1, loop=loop, **options)
    check_alike(alone, together)
    assert together[0].history[1]["scheme"]["lost"] > 0


@pytest.mark.parametrize("serialise", [False, True])
def test_rows_survive_flowers_serialisation_and_worker_processes(serialise: bool) -> None:
    def model(**engine: Any) -> Any:
        loop = LoopOptions(clients=CLIENTS, seed=3, experiment_id="e")
        strategy = MSPDQ(mixing_rounds=3, loop=loop, min_available_nodes=2)
        return run(strategy, nodes=2, num_rounds=2, **engine).arrays

    assert same(model(), model(serialise=serialise))


# -- One node ------------------------------------------------------------------------------------

TERMS = MSPTerms(rounds=3, levels=16)
START = {n: a for n, a in MODEL.items() if np.asarray(a).dtype.kind == "f"}


class Node:
    """A node that plays several clients, or one node for each of them."""

    def __init__(self, *, cohort: bool, client: Any = MSPDQClient, **config: Any) -> None:
        nodes: Any = [{"partition-id": i, "num-partitions": 8, **config} for i in range(8)]
        if cohort:
            nodes = [{"partition-id": 0, "num-partitions": 1, "cohorts": True, **config}]
        self.cohort = cohort
        self.grid = InlineGrid(message_app([as_mod(client)]), nodes, insecure_seed=7)

    def ask(self, clients: str, phase: str = "mix", **header: Any) -> dict[str, Any]:
        """Return each client's answer, or the error; and with a cohort the whole content."""
        fields = header.pop("fields", {"step": header.get("request", 0)})
        base = {"scheme": "mspdq", "experiment_id": "e", "phase": phase, "server_round": 1}
        own = Header(**{**base, **header}).write(fields)
        content = {"arrays": record(START), RECORD: ConfigRecord(own)}
        nodes = list(self.grid.get_node_ids())
        with acting_as_server(self.grid.run_id):
            if not self.cohort:
                return {client: self._one(content, nodes[int(client)]) for client in clients}
            asked = Cohort(
                clients=list(clients), late=[], size=8, reply="each", weighted_by="num-examples"
            )
            cohort = {COHORT: ConfigRecord(asked.write())}
            return {"all": self._one({**content, **cohort}, nodes[0])}

    def train(self, clients: str, **header: Any) -> dict[str, Any]:
        fields = {**write(TERMS), "statistics": [], **header.pop("fields", {})}
        return self.ask(clients, "train", fields=fields, **header)

    def _one(self, content: Any, node: int) -> Any:
        (reply,) = self.grid.send_and_receive([Message(RecordDict(content), node, "train")])
        return reply.error.reason if reply.has_error() else reply.content


def outcomes(answer: RecordDict) -> dict[str, Any]:
    """Return each client's codes and fields, or why it was refused, from a cohort's answer."""
    told = answer[COHORT]
    refused = (told.get("refused-clients", []), told.get("refused-details", []))
    found: dict[str, Any] = dict(zip(*refused, strict=True))
    rows = answer.get("arrays@*", ArrayRecord())
    for row, client in enumerate(told.get("answered", [])):
        fields = {n: column[row] for n, column in answer[f"{RECORD}@*"].items()}
        found[client] = ({n: a.numpy()[row].tobytes() for n, a in rows.items()}, fields)
    return found


def of_one(answer: Any) -> Any:
    if isinstance(answer, str):
        return answer
    _, fields = Header.read(answer[RECORD])
    return {n: a.numpy().tobytes() for n, a in answer["arrays"].items()}, fields


def test_clients_in_different_states_get_each_its_own_answer() -> None:
    """One did not train, one is a step ahead, one trained in another experiment."""
    one, many = Node(cohort=False), Node(cohort=True)
    for node in (one, many):
        node.train("0123")
        node.train("4", experiment_id="f")
        node.ask("1")
    alone = {client: of_one(answer) for client, answer in one.ask("043217").items()}
    answer = many.ask("043217")["all"]
    together = outcomes(answer)
    assert list(answer[COHORT]["answered"]) == ["0", "3", "2"]
    assert set(together) == set(alone)
    for client, mine in alone.items():
        assert together[client] in (mine, f"error: ProtocolError: {mine}"), client
    for client, text in {"1": "does not follow", "4": "no sub-states", "7": "no sub-st"}.items():
        assert text in together[client]


def test_a_step_that_was_taken_is_not_taken_again_and_the_state_stays() -> None:
    one, many = Node(cohort=False), Node(cohort=True)
    for node in (one, many):
        node.train("012")
        node.ask("01")
    again = outcomes(many.ask("012")["all"])
    assert ["does not follow" in str(again[c]) for c in "012"] == [True, True, False]
    one.ask("2")
    alone = {c: of_one(answer) for c, answer in one.ask("012", request=1).items()}
    assert outcomes(many.ask("012", request=1)["all"]) == alone


def test_an_old_round_and_a_client_named_twice_are_refused_for_all() -> None:
    node = Node(cohort=True)
    node.train("01")
    assert "not distinct" in node.ask("00")["all"]
    node.train("2", server_round=2)
    assert "does not follow round 2" in node.ask("01")["all"]


def test_a_step_of_another_scheme_or_of_evaluation_is_refused_for_each() -> None:
    node = Node(cohort=True)
    node.train("01")
    wrong = node.ask("01", scheme="msp")["all"]
    assert all("this end speaks 'mspdq'" in text for text in outcomes(wrong).values())
    taken = node.ask("01", fields={"step": 0, "privacy-policy": "x"})["all"]
    assert all("no keys of the node's own" in text for text in outcomes(taken).values())
    assert all(not isinstance(a, str) for a in outcomes(node.ask("01")["all"]).values())


@pytest.mark.parametrize(
    ("policy", "text"),
    [("min_summed = 3", "min_summed"), ('schemes = ["udp"]', "schemes"), ("max_epsilon = 1", "no")],
)
def test_the_nodes_policy_is_asked_for_each_client(policy: str, text: str, tmp_path: Any) -> None:
    path = tmp_path / "policy.toml"
    path.write_text("")
    node = Node(cohort=True, **{"privacy-policy": str(path)})
    node.train("012")
    path.write_text(policy)
    answer = node.ask("012")["all"]
    assert answer[COHORT]["refused-clients"] == ["0", "1", "2"]
    assert answer[COHORT]["refused-reasons"] == ["declined"] * 3
    assert all(text in detail for detail in answer[COHORT]["refused-details"])
    path.write_text("")
    assert answer[COHORT]["keepers"] == ["0", "1", "2"]
    assert list(node.ask("012")["all"][COHORT]["answered"]) == ["0", "1", "2"]


def test_the_bytes_are_those_of_nodes_with_one_client_each() -> None:
    one, many = Node(cohort=False), Node(cohort=True)
    for node in (one, many):
        node.train("0123")
    for request in range(3):
        alone = one.ask("0123", request=request)
        answer = many.ask("0123", request=request)["all"]
        assert answer[COHORT]["bytes-up"] == sum(payload_bytes(c) for c in alone.values())
        assert set(answer) == {"arrays@*", f"{RECORD}@*", RECORD, COHORT}
        assert all(set(content) == {"arrays", "metrics", RECORD} for content in alone.values())
        assert answer["arrays@*"]["codes"].shape[0] == 4


class Unlike(MSPDQClient):
    """Answers with what does not fit into a row with the others: more fields, metrics, a list."""

    more: ClassVar[dict[str, Any]]

    def handle(self, phase: str, arrays: Any, fields: Any, train: Any) -> Any:
        out, own = super().handle(phase, arrays, fields, train)
        if phase == "mix" and client_id_from(_config(self)) == "1":
            own = {**own, **self.more}
        return out, own


@pytest.mark.parametrize(
    "more", [{"x": 1}, {"x": [1.0, 2.0]}, {"metrics": {"loss": 0.5}}, {"saturated": 0.5}]
)
def test_answers_that_make_no_rows_travel_one_by_one(more: dict[str, Any]) -> None:
    class Client(Unlike):
        pass

    Client.more = more
    one, many = Node(cohort=False, client=Client), Node(cohort=True, client=Client)
    for node in (one, many):
        node.train("012")
    alone, answer = one.ask("012"), many.ask("012")["all"]
    assert answer[COHORT]["bytes-up"] == sum(payload_bytes(c) for c in alone.values())
    for client, content in alone.items():
        for name, mine in content.items():
            assert answer[f"{name}@{client}"] == mine


@pytest.mark.parametrize("more", [{"x": None}, {"round": 3}, {"x": {}}])
def test_an_answer_that_cannot_be_sent_is_refused_alone(more: dict[str, Any]) -> None:
    class Client(Unlike):
        pass

    Client.more = more
    node = Node(cohort=True, client=Client)
    node.train("012")
    answer = node.ask("012")["all"]
    assert answer[COHORT]["answered"] == ["0", "2"]
    assert answer[COHORT]["refused-clients"] == ["1"]
    assert node.ask("02", request=1)["all"][COHORT]["answered"] == ["0", "2"]


def test_a_step_that_fails_half_way_can_be_taken_again() -> None:
    class Client(MSPDQClient):
        fails = False

        def _said(self, *given: Any) -> Any:
            said = super()._said(*given)
            if self.fails and client_id_from(_config(self)) == "1":
                raise RuntimeError("half-way")
            return said

    one, many = Node(cohort=False), Node(cohort=True, client=Client)
    for node in (one, many):
        node.train("012")
    Client.fails = True
    first = outcomes(many.ask("012")["all"])
    Client.fails = False
    alone = {client: of_one(answer) for client, answer in one.ask("012").items()}
    assert "half-way" in first.pop("1")
    assert {**first, **outcomes(many.ask("1")["all"])} == alone


def test_a_client_that_answers_only_in_sums_declines_a_step() -> None:
    class Client(MSPDQClient):
        pass

    node = Node(cohort=True, client=Client)
    node.train("01")
    Client.sums = "only"
    answer = node.ask("01")["all"]
    assert answer[COHORT]["refused-reasons"] == ["declined"] * 2


def test_a_step_has_no_training() -> None:
    class Training(MSPDQClient):
        def handle(self, phase: str, arrays: Any, fields: Any, train: Any) -> Any:
            if phase == "mix":
                train(arrays)
            return super().handle(phase, arrays, fields, train)

    node = Node(cohort=True, client=Training)
    node.train("01")
    assert all("calls for no training" in text for text in outcomes(node.ask("01")["all"]).values())
    Training.steps = frozenset()
    assert "arrays@0" in node.ask("01")["all"]


# -- The server ----------------------------------------------------------------------------------


def damaged(change: Any) -> Any:
    """Return what changes the answers of node 0 to the first mixing step of round 1."""

    def before(grid: Any) -> None:
        pull = grid.pull_messages

        def pull_messages(ids: Any) -> Any:
            replies = list(pull(ids))
            for reply in replies:
                head = dict(reply.content[RECORD]) if reply.has_content() else {}
                place = (head.get("phase"), head.get("round"), head.get("request"))
                if place == ("mix", 1, 0) and "0" in reply.content[COHORT]["answered"]:
                    change(reply.content)
            return replies

        grid.pull_messages = pull_messages

    return before


def rows(**columns: Any) -> Any:
    def change(content: Any) -> None:
        for name, column in columns.items():
            content[f"{RECORD}@*"][name.replace("_", "-")] = column

    return change


def codes(make: Any) -> Any:
    def change(content: Any) -> None:
        array = make(content["arrays@*"]["codes"].numpy())
        content["arrays@*"] = ArrayRecord({"codes": _array(array)})

    return change


def _array(values: Any) -> Any:
    from flwr.app import Array

    return Array(np.array(values))


DAMAGES = {
    "a row too few": (codes(lambda a: a[:-1]), 3, "malformed"),
    "a row too many": (codes(lambda a: np.concatenate([a, a[:1]])), 3, "malformed"),
    "no axis of clients": (codes(lambda a: np.uint8(3)), 3, "malformed"),
    "other codes": (codes(lambda a: a[:, :-1]), 3, "shape"),
    "codes of another type": (codes(lambda a: a.astype(np.float32)), 3, "dtype"),
    "a value too few": (rows(saturated=[0]), 3, "malformed"),
    "no list": (rows(saturated=0), 3, "malformed"),
    "a name of the header": (rows(client_id=["0", "2", "4"]), 3, "malformed"),
    "no arrays": (lambda content: content.pop("arrays@*"), 3, "malformed"),
    "no values": (lambda content: content.pop(f"{RECORD}@*"), 3, "malformed"),
    "one client lies": (rows(half_width=[0.5, -1.0, 0.5]), 1, "malformed"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_rows_that_do_not_fit_are_refused_and_the_other_node_goes_on(
    name: str, caplog: Any
) -> None:
    change, lost, reason = DAMAGES[name]
    strategy = MSPDQ(
        mixing_rounds=2,
        on_dropout="continue",
        loop=LoopOptions(clients=CLIENTS, seed=3, experiment_id="e"),
        min_available_nodes=2,
    )
    app = message_app([as_mod(MSPDQClient)])
    with caplog.at_level("WARNING", "flwr.privacy"):
        result = run_strategy(
            strategy, app, nodes=2, before=damaged(change), num_rounds=2, insecure_seed=7
        )
    assert result.history[1]["scheme"]["lost"] == lost
    assert caplog.text.count(f"refused ({reason}") + caplog.text.count("refused (client") > 0
    assert result.history[2]["scheme"]["lost"] == 0
    assert all(np.isfinite(array).all() for array in model_of(result.arrays).values())
