"""A name belongs to a key: to the pinned one, or else to the first one for the whole experiment."""

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from apps import message_app, run_strategy
from flwr.app import ConfigRecord, Context, Message

from flwr_privacy.clients import FedAvgClient, as_mod
from flwr_privacy.errors import InvalidParameterError, ProtocolError
from flwr_privacy.strategies import FedAvg, LoopOptions
from flwr_privacy.strategies.requests.client_keys import ClientKeys
from flwr_privacy.wire.hello import IDENTITY, NONCE, NONCE_BYTES, SIGNATURE, key_text
from flwr_privacy.wire.message import RECORD
from flwr_privacy.wire.pins import Identity

HONEST = ("a", "b", "c")
IMPOSTOR = 9
"""Partition of the impostor; those of the honest nodes are 0, 1, 2."""


class Nodes:
    """Nodes with keys in a folder: the honest ones, and one that says that it is "a"."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trained: dict[int, set[int]] = {}  # partitions, by round
        self.replays: dict[str, Any] | None = None  # the captured hello, with these changes
        self.captured: list[dict[str, Any]] = []  # hellos of the first honest node
        self.nonces: list[Any] = []  # of all hellos
        for name in (*HONEST, "other", "new"):
            Identity.generate().write(folder / f"{name}.pem")

    def key(self, name: str) -> str:
        return Identity.read(self.folder / f"{name}.pem").public

    def node(self, client: str, key: str | None) -> dict[str, Any]:
        partition = HONEST.index(client) if client == key else IMPOSTOR
        own = {} if key is None else {"privacy-identity": str(self.folder / f"{key}.pem")}
        return {"client-id": client, "partition-id": partition, **own}

    def honest(self, *names: str) -> list[dict[str, Any]]:
        return [self.node(name, name) for name in names or HONEST]

    def pins(self, **keys: str) -> Path:
        path = self.folder / "pins.toml"
        named = {**{name: name for name in HONEST}, **keys}
        lines = [f'"{name}" = "{self.key(key)}"' for name, key in named.items()]
        path.write_text("\n".join(["[clients]", *lines]))
        return path

    def mod(self, message: Message, context: Context, call_next: Any) -> Message:
        fields = message.content.config_records[RECORD]
        partition = int(context.node_config["partition-id"])
        reply = as_mod(FedAvgClient)(message, context, call_next)
        if fields["phase"] == "hello":
            self.nonces.append(fields[NONCE])
        if fields["phase"] != "hello":
            self.trained.setdefault(int(fields["round"]), set()).add(partition)
        elif partition == 0:
            self.captured.append(dict(reply.content.config_records[RECORD]))
        elif partition == IMPOSTOR and self.replays is not None:
            reply.content[RECORD] = ConfigRecord(self.captured[-1] | self.replays)
        return reply

    def train(
        self,
        nodes: Sequence[dict[str, Any]],
        *,
        present: dict[int, Sequence[int]] | None = None,
        rounds: int = 3,
        minimum: int = 3,
        **loop: Any,
    ) -> list[set[int]]:
        """Return the partitions that trained, by round; `present` says which nodes are there."""
        self.trained = {}
        views = [range(len(nodes))]

        def next_round(line: dict[str, Any]) -> None:
            views.append((present or {}).get(line["round"] + 1, views[-1]))

        def come_and_go(grid: Any) -> None:
            ids = list(grid.get_node_ids())
            views[0] = (present or {}).get(0, views[0])
            grid.get_node_ids = lambda: [ids[index] for index in views[-1]]

        strategy = FedAvg(
            fraction_evaluate=0,
            min_available_nodes=minimum,
            loop=LoopOptions(on_round=next_round, **loop),
        )
        app = message_app([self.mod])
        run_strategy(strategy, app, nodes=nodes, before=come_and_go, num_rounds=rounds)
        return list(self.trained.values())


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    # Nodes say hello in the order of their ids: here in the order in which they are listed.
    numbers = count(1)
    grid = "flwr_privacy.simulations.engines.inline.grid.secrets.randbits"
    monkeypatch.setattr(grid, lambda bits: next(numbers))
    return Nodes(tmp_path)


def refusals(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(r.getMessage() for r in caplog.records if r.levelname == "ERROR")


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("key", ["other", None])
def test_with_pins_the_pinned_key_wins_in_any_order(
    nodes: Nodes, caplog: pytest.LogCaptureFixture, key: str | None, first: bool
) -> None:
    impostor = [nodes.node("a", key)]
    federation = impostor + nodes.honest() if first else nodes.honest() + impostor
    assert nodes.train(federation, pins=nodes.pins()) == [{0, 1, 2}] * 3
    assert key_text("" if key is None else nodes.key(key)) in refusals(caplog)


@pytest.mark.parametrize("key", ["other", None])
def test_without_pins_the_first_key_is_kept(
    nodes: Nodes, caplog: pytest.LogCaptureFixture, key: str | None
) -> None:
    assert nodes.train([*nodes.honest(), nodes.node("a", key)]) == [{0, 1, 2}] * 3
    shown = key_text("" if key is None else nodes.key(key))
    assert (
        f"two nodes say that they are client 'a' (nodes 2 with {key_text(nodes.key('a'))} and 5 "
        f"with {shown})"
    ) in refusals(caplog)


def test_without_pins_a_faster_impostor_is_believed_and_the_owner_named(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    """Trust on first use cannot tell them apart; the log has both."""
    assert nodes.train([nodes.node("a", "other"), *nodes.honest()]) == [{1, 2, IMPOSTOR}] * 3
    assert key_text(nodes.key("a")) in refusals(caplog)
    assert key_text(nodes.key("other")) in refusals(caplog)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("key", ["other", None])
def test_a_name_is_not_taken_while_its_owner_is_away(
    nodes: Nodes, caplog: pytest.LogCaptureFixture, key: str | None, pinned: bool
) -> None:
    present = {0: [0, 1, 2], 2: [1, 2, 3], 4: [0, 1, 2, 3]}
    pins = {"pins": nodes.pins()} if pinned else {}
    federation = [*nodes.honest(), nodes.node("a", key)]
    trained = nodes.train(federation, present=present, rounds=5, **pins)
    assert trained == [{0, 1, 2}, {1, 2}, {1, 2}, {0, 1, 2}, {0, 1, 2}]
    kind = "pinned" if pinned else "first"
    shown = key_text("" if key is None else nodes.key(key))
    assert (
        f"node 5 with {shown} says that it is client 'a': its {kind} key is "
        f"{key_text(nodes.key('a'))}"
    ) in refusals(caplog)


def test_an_owner_comes_back_on_another_node(nodes: Nodes) -> None:
    present = {0: [0, 1, 2], 2: [1, 2], 3: [1, 2, 3]}
    trained = nodes.train([*nodes.honest(), *nodes.honest("a")], present=present)
    assert trained == [{0, 1, 2}, {1, 2}, {0, 1, 2}]


@pytest.mark.parametrize("away", [False, True], ids=["same meeting", "a later meeting"])
def test_another_nodes_hello_cannot_be_sent_again(
    nodes: Nodes, caplog: pytest.LogCaptureFixture, away: bool
) -> None:
    """Whoever got hold of it: it is for one node and one nonce."""
    nodes.replays = {}
    present = {0: [0, 1, 2], 2: [1, 2, 3]} if away else None
    trained = nodes.train([*nodes.honest(), nodes.node("a", "other")], present=present)
    assert trained == ([{0, 1, 2}, {1, 2}, {1, 2}] if away else [{0, 1, 2}] * 3)
    text = "node 5 says that it is client 'a': the hello is not signed with the key that it names"
    assert text in refusals(caplog)
    assert "two nodes say" not in refusals(caplog)  # it does not prove the key at all


def test_every_meeting_has_a_nonce_of_its_own(nodes: Nodes) -> None:
    present = {0: [0, 1, 2], 2: [0, 1, 2, 3], 3: [0, 1, 2, 3, 4]}
    others = [nodes.node("d", "other"), nodes.node("e", "new")]
    nodes.train([*nodes.honest(), *others], present=present)
    assert [len(nonce) for nonce in nodes.nonces] == [NONCE_BYTES] * 5
    assert len(set(nodes.nonces)) == 3


def test_a_signed_hello_is_not_believed_under_another_name(nodes: Nodes) -> None:
    nodes.replays = {"client-id": "d"}
    assert nodes.train([*nodes.honest(), nodes.node("a", "other")]) == [{0, 1, 2}] * 3


def test_without_keys_a_client_is_known_by_its_name_alone(nodes: Nodes) -> None:
    """The same as ever: nobody can tell who comes while the owner is away."""
    owner = {**nodes.node("a", None), "partition-id": 0}
    present = {0: [0, 1, 2], 2: [1, 2, 3]}
    trained = nodes.train([owner, *nodes.honest("b", "c"), nodes.node("a", None)], present=present)
    assert trained == [{0, 1, 2}, {1, 2, IMPOSTOR}, {1, 2, IMPOSTOR}]


def test_with_pins_nobody_else_takes_part(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    stranger = nodes.node("d", "other")
    assert nodes.train([stranger, *nodes.honest()], pins=nodes.pins()) == [{0, 1, 2}] * 3
    assert "says that it is client 'd': the server has no pin of it" in refusals(caplog)


def test_too_few_nodes_that_are_told_apart_end_the_start(nodes: Nodes) -> None:
    text = (
        r"hello: 3 of min_available_nodes = 4 nodes said who they are \(1 x identity\): "
        r"two nodes say that they are client 'a' \(nodes 2 with key .*\.\.\. and 5 with "
        r"no key\): give each its own client-id"
    )
    with pytest.raises(ProtocolError, match=text):
        nodes.train([*nodes.honest(), nodes.node("a", None)], minimum=4)


def test_an_error_names_three_conflicts_at_most(nodes: Nodes) -> None:
    with pytest.raises(ProtocolError, match=r"\(5 x identity\).*; 2 more$") as raised:
        nodes.train([*nodes.honest(), *[nodes.node("a", None)] * 5], minimum=4)
    assert str(raised.value).count("two nodes") == 3


def test_pins_that_no_node_fits_end_the_start(nodes: Nodes) -> None:
    pins = nodes.pins(a="new", b="other", c="a")
    with pytest.raises(ProtocolError, match=r"hello: 0 of .*: its pinned key is key "):
        nodes.train(nodes.honest(), pins=pins)


@pytest.mark.parametrize("key", ["other", None])
def test_a_resume_remembers_the_keys(nodes: Nodes, tmp_path: Path, key: str | None) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    nodes.train(nodes.honest(), rounds=1, run_dir=folder)
    federation = [nodes.node("a", key), *nodes.honest("b", "c")]
    trained = nodes.train(federation, rounds=3, run_dir=folder, resume=True, minimum=2)
    assert trained == [{1, 2}] * 2


@pytest.mark.parametrize("how", ["forget_keys", "pins"])
def test_an_owner_with_a_new_key_comes_back_after_a_resume(
    nodes: Nodes, tmp_path: Path, how: str
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    nodes.train(nodes.honest(), rounds=1, run_dir=folder)
    (tmp_path / "a.pem").rename(tmp_path / "old.pem")
    (tmp_path / "new.pem").rename(tmp_path / "a.pem")
    again = {"run_dir": folder, "resume": True, "minimum": 2}
    assert nodes.train(nodes.honest(), rounds=2, **again) == [{1, 2}]
    told = {"forget_keys": ["a"]} if how == "forget_keys" else {"pins": nodes.pins()}
    old, unsigned = nodes.node("a", "old"), nodes.node("a", None)
    # Whoever has the old key, or none, answers first and is refused all the same.
    federation = [old, unsigned, *nodes.honest()]
    assert nodes.train(federation, rounds=3, **again, **told) == [{0, 1, 2}]
    # The new key is the one that counts from now on.
    assert nodes.train([old, *nodes.honest()], rounds=4, **again) == [{0, 1, 2}]


def test_only_a_key_that_is_kept_can_be_forgotten() -> None:
    keys = ClientKeys()
    with pytest.raises(InvalidParameterError, match="forget_keys = 'b': expected one of 'a'"):
        keys.load_state({"kept": {"a": "key"}, "retired": {}}, forget=["b"])
    both = {"kept": {"a": "key", "c": "other"}, "retired": {}}
    keys.load_state(both, forget=["a", "a"])
    assert keys.state() == {"kept": {"c": "other"}, "retired": {"a": "key"}}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"forget_keys": "a"}, "forget_keys = 'a': expected a list of client ids"),
        ({"forget_keys": ["a"]}, "expected nothing, but on a resume without pins"),
        ({"pins": "nowhere.toml"}, r"pins = 'nowhere.toml': expected a file that can be read"),
    ],
)
def test_options_are_checked(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidParameterError, match=text):
        FedAvg(loop=LoopOptions(**options))


def test_a_start_of_the_users_own_has_no_hello_to_check(nodes: Nodes) -> None:
    class Own(FedAvg):
        def start(self, grid: Any, initial_arrays: Any, **options: Any) -> Any:
            self.configure_train(1, initial_arrays, ConfigRecord(), grid)

    with pytest.raises(ProtocolError, match="pins: works only where this strategy's own start"):
        run_strategy(Own(loop=LoopOptions(pins=nodes.pins())))


def test_the_signature_is_not_in_a_reply_without_a_key(nodes: Nodes) -> None:
    owner = {**nodes.node("a", None), "partition-id": 0}
    nodes.train([owner, *nodes.honest("b", "c")])
    (hello,) = nodes.captured
    assert not {IDENTITY, SIGNATURE} & set(hello)
