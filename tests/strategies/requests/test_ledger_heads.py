"""The server follows the nodes' ledgers: what was set back, cut, edited or copied is found."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from wards import EXPERIMENT, NAMES, Wards, heads_of, rewritten

from flwr_privacy.accounting import Charge
from flwr_privacy.clients.node.context_store import shown_head
from flwr_privacy.errors import InvalidParameterError, ProtocolError
from flwr_privacy.privacy.averaging import ReplyRefusedError
from flwr_privacy.privacy.card import CardRelease, PrivacyCard
from flwr_privacy.privacy.guarantee import Guarantee
from flwr_privacy.privacy.ledger import Entry, Ledger, Question
from flwr_privacy.privacy.ledger.chain import begun
from flwr_privacy.privacy.ledger.shown import COUNT, SIGNATURE, VALUE, shown
from flwr_privacy.privacy.ledger.signed_head import SignedHead
from flwr_privacy.strategies.requests.ledger_heads import ChargeName, LedgerHeads
from flwr_privacy.wire.message import RECORD
from flwr_privacy.wire.payload import payload_bytes
from flwr_privacy.wire.pins import Identity

CHARGE = Charge(noise_multiplier=5.0, neighbours="replace_one", gap=1e-3)
OTHER = Charge(noise_multiplier=2.0, neighbours="replace_one")


def name(number: int) -> ChargeName:
    return ChargeName("train", number, 0)


def entry(number: int, charge: Charge = CHARGE, **question: Any) -> Entry:
    named = {"experiment_id": EXPERIMENT, "phase": "train", "server_round": number, **question}
    return Entry(question=Question(**named), scheme="udp", unit="user", charge=charge)


class Node:
    """A deployed node with a ledger, and what it shows of it."""

    def __init__(self, folder: Path) -> None:
        self.config = {"client-id": "a", "privacy-state": str(folder)}
        self.ledger = Ledger(folder / "a.ledger", data_set="a", durable=False)

    def charge(self, *entries: Entry) -> None:
        with self.ledger.locked() as locked:
            for each in entries:
                locked.charge(each)

    def shows(self, experiment: str = EXPERIMENT) -> dict[str, Any]:
        context = Context(1, 1, self.config, RecordDict(), {})  # type: ignore[arg-type]
        return shown_head(context, experiment, empty=True)

    @property
    def key(self) -> str:
        return Identity.read(Path(str(self.config["privacy-state"]), "a.identity")).public


class Server:
    """A server that asks the node for trainings, some of whose replies are lost."""

    def __init__(self, node: Node, *, keyed: bool = True) -> None:
        self.node = node
        self.heads = self.restarted(keyed=keyed)

    def restarted(self, *, keyed: bool = True) -> LedgerHeads:
        experiment = Mock(id=EXPERIMENT)
        return LedgerHeads(experiment, lambda client: self.node.key if keyed else "")

    def ask(self, *numbers: int, charge: Charge = CHARGE) -> None:
        for number in numbers:
            self.heads.asked({"a": (name(number), charge)})
            self.heads.charged(name(number), ["a"])

    def trained(self, *numbers: int) -> None:
        """Ask, and take the replies."""
        for number in numbers:
            self.ask(number)
            self.node.charge(entry(number))
            self.heads.take("a", self.node.shows(), asked=name(number))

    def greet(self) -> None:
        self.heads.greet("a", self.node.shows())

    @property
    def unlike(self) -> str:
        (head,) = self.heads.shown()
        return head.unlike


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture
def server(node: Node) -> Server:
    server = Server(node)
    server.greet()
    server.trained(1, 2, 3, 4)
    assert server.unlike == ""
    server.greet()
    return server


# -- A ledger that was changed between two runs ----------------------------------------------------


def cut(entries: list[Entry], place: int) -> list[Entry]:
    return entries[:place]


def without(entries: list[Entry], place: int) -> list[Entry]:
    return entries[:place] + entries[place + 1 :]


def edited(entries: list[Entry], place: int) -> list[Entry]:
    return [replace(e, charge=OTHER) if n == place else e for n, e in enumerate(entries)]


def renamed(entries: list[Entry], place: int) -> list[Entry]:
    question = replace(entries[place].question, server_round=9)
    return [replace(e, question=question) if n == place else e for n, e in enumerate(entries)]


def swapped(entries: list[Entry], place: int) -> list[Entry]:
    entries[place - 1], entries[place] = entries[place], entries[place - 1]
    return entries


def forked(entries: list[Entry], place: int) -> list[Entry]:
    return entries[:place] + [entry(number) for number in range(10, 15)]


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("change", [cut, without, edited, renamed, swapped, forked])
def test_a_ledger_that_was_changed_at_any_entry_is_found_at_the_hello(
    server: Server, change: Callable[[list[Entry], int], list[Entry]], place: int
) -> None:
    rewritten(server.node.ledger, change(list(server.node.ledger.entries()), place))
    back = change in (cut, without)
    why = "was set back: it had 4 charges" if back else "is another one: it had 4 charges"
    with pytest.raises(ReplyRefusedError, match=f"client 'a': its ledger {why}") as refused:
        server.greet()
    assert refused.value.reason == "ledger"
    with pytest.raises(ReplyRefusedError, match=f"its ledger {why}"):
        server.greet()  # nothing of it was taken
    rewritten(server.node.ledger, [entry(number) for number in (1, 2, 3, 4)])
    server.greet()


def test_a_deleted_ledger_and_one_that_is_not_shown_are_found(server: Server) -> None:
    server.node.ledger.path.unlink()
    with pytest.raises(ReplyRefusedError, match="it had 4 charges of this experiment, it shows 0"):
        server.greet()
    with pytest.raises(ReplyRefusedError, match="its ledger is not shown: it had 4 charges"):
        server.heads.greet("a", {})


def test_charges_of_other_experiments_are_not_in_a_head(server: Server) -> None:
    before = server.node.shows()
    server.node.charge(entry(1, experiment_id="other"), entry(7, OTHER, experiment_id="another"))
    assert server.node.shows() == before
    assert server.node.shows("other")[COUNT] == 1
    server.trained(5)


def test_a_signed_head_takes_at_most_200_bytes_of_a_reply(server: Server) -> None:
    header = {"scheme": "udp", "version": 1, "experiment-id": "0" * 32, "phase": "train"}
    bare, whole = (
        RecordDict({RECORD: ConfigRecord({**header, **own})}) for own in ({}, server.node.shows())
    )
    assert 100 < payload_bytes(whole) - payload_bytes(bare) <= 200


# -- Replies that were lost ------------------------------------------------------------------------


@pytest.mark.parametrize("charged", [(), (5,), (6,), (7,), (5, 7), (5, 6, 7)])
def test_lost_replies_may_have_been_charged_or_not(
    server: Server, charged: tuple[int, ...]
) -> None:
    server.ask(5, 6, 7)
    server.node.charge(*(entry(number) for number in charged))
    server.greet()
    server.trained(8)
    assert server.unlike == ""
    assert server.heads.shown()[0].signed.head.count == 5 + len(charged)


def test_two_processes_of_a_node_may_answer_two_questions_at_once(server: Server) -> None:
    server.ask(5, 6)
    server.node.charge(entry(5), entry(6))
    for number in (5, 6):  # both were charged before either showed the ledger
        server.heads.take("a", server.node.shows(), asked=name(number))
    assert (server.unlike, server.heads.shown()[0].signed.head.count) == ("", 6)


def test_the_question_of_a_reply_must_be_charged(server: Server) -> None:
    server.ask(5, 6)
    server.node.charge(entry(5))
    with pytest.raises(ReplyRefusedError, match="another one"):
        server.heads.take("a", server.node.shows(), asked=name(6))


def test_a_question_that_was_not_asked_is_no_lost_one(server: Server) -> None:
    server.ask(5, charge=OTHER)
    server.node.charge(entry(5))
    with pytest.raises(ReplyRefusedError, match="another one"):
        server.greet()


@pytest.mark.parametrize(("charged", "unlike"), [(1, ""), (10, "so many"), (20, "")])
def test_where_too_many_replies_were_lost_the_count_decides(
    server: Server, charged: int, unlike: str
) -> None:
    server.ask(*range(5, 25))
    server.node.charge(*(entry(number) for number in range(5, 5 + charged)))
    server.greet()
    assert server.unlike.startswith(unlike)
    assert bool(server.unlike) == bool(unlike)
    rewritten(server.node.ledger, server.node.ledger.entries()[:-1])
    with pytest.raises(ReplyRefusedError, match="set back"):
        server.greet()


def test_a_charge_whose_answer_failed_is_told_apart(server: Server) -> None:
    server.heads.asked({"a": (name(5), CHARGE)})
    server.node.charge(entry(5))
    server.heads.not_charged(name(5), ["a"])  # its files failed after the charge
    server.trained(6)
    assert "it charged a question again, or one that it said" in server.unlike


def test_a_late_reply_is_taken_and_an_older_one_left_alone(server: Server) -> None:
    server.ask(5)
    server.node.charge(entry(5))
    late = server.node.shows()
    server.trained(6)
    server.heads.take("a", late, asked=name(5), late=True)
    assert (server.unlike, server.heads.shown()[0].signed.head.count) == ("", 6)


# -- Who says it -----------------------------------------------------------------------------------


def test_a_head_that_another_key_signs_or_nobody_is_refused(server: Server) -> None:
    head = server.node.ledger.head(EXPERIMENT)
    for other in (
        SignedHead.sign(Identity.generate(), experiment=EXPERIMENT, client="a", head=head),
        SignedHead.sign(None, experiment=EXPERIMENT, client="a", head=head),
    ):
        with pytest.raises(ReplyRefusedError, match="not signed with its key"):
            server.heads.greet("a", shown(other))


@pytest.mark.parametrize("part", ["experiment", "client", "count", "value"])
def test_a_signature_is_for_one_experiment_client_count_and_value(
    server: Server, part: str
) -> None:
    head = server.node.ledger.head(EXPERIMENT)
    told = {"experiment": EXPERIMENT, "client": "a", "head": head}
    told |= {
        "experiment": {"experiment": "f"},
        "client": {"client": "b"},
        "count": {"head": replace(head, count=5)},
        "value": {"head": begun("e")},
    }[part]
    identity = Identity.read(Path(str(server.node.config["privacy-state"]), "a.identity"))
    signature = SignedHead.sign(identity, **told).signature
    with pytest.raises(ReplyRefusedError, match="not signed with its key"):
        server.heads.greet("a", {**server.node.shows(), SIGNATURE: signature})


def test_a_reply_that_shows_an_older_head_again_is_refused(server: Server) -> None:
    old = server.node.shows()
    server.trained(5)
    server.ask(6)
    with pytest.raises(ReplyRefusedError, match="it had 5 charges of this experiment, it shows 4"):
        server.heads.take("a", old, asked=name(6))


def test_a_reply_without_a_head_is_refused_where_a_key_is_known(server: Server) -> None:
    server.ask(5)
    with pytest.raises(ReplyRefusedError, match="without showing the head"):
        server.heads.take("a", {}, asked=name(5))


@pytest.mark.parametrize(
    "change",
    [
        *({COUNT: -1}, {COUNT: 2**60}, {COUNT: "4"}, {COUNT: True}, {COUNT: None}),
        *({VALUE: bytes(31)}, {VALUE: "x"}, {SIGNATURE: "x"}, {SIGNATURE: bytes(63)}),
    ],
)
def test_malformed_heads_are_refused(server: Server, change: dict[str, Any]) -> None:
    with pytest.raises(ReplyRefusedError, match="ledger"):
        server.heads.greet("a", server.node.shows() | change)


def test_without_a_key_nobody_is_refused_and_the_card_says_it(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(node, keyed=False)
    server.trained(1, 2)
    assert (server.unlike, server.heads.shown()[0].signed.signature) == ("", b"")
    node.ledger.path.unlink()
    server.trained(3)
    assert server.unlike.startswith("its ledger was set back: it had 2 charges")
    assert "client a: its ledger was set back" in caplog.text


# -- A server that goes on -------------------------------------------------------------------------


def resumed(server: Server, *, broken_off: Any = (), lost: bool = False, charges: int = 4) -> None:
    """Go on as another process, from a checkpoint."""
    before = server.heads
    card = PrivacyCard(
        experiment_id=EXPERIMENT,
        guarantee=Guarantee(scheme="udp", protects="user", adversary="server"),
        releases=[
            CardRelease(**name(number)._asdict(), charge=CHARGE, clients=("a",), unanswered=())
            for number in range(1, charges + 1)
        ],
        heads=before.shown(),
    )
    server.heads = server.restarted()
    server.heads.load_state(before.state(), card, broken_off=broken_off, accept=(), lost=lost)


def test_a_resumed_server_knows_what_was_lost_before(server: Server) -> None:
    server.ask(5)
    server.node.charge(entry(5))
    resumed(server, broken_off=[{"a": (name(6), CHARGE)}])
    server.node.charge(entry(6))
    server.greet()
    server.heads.charged(name(6), ["a"])
    server.trained(7)
    assert (server.unlike, server.heads.shown()[0].signed.head.count) == ("", 7)


def test_an_order_that_is_not_that_of_the_card_is_told(server: Server) -> None:
    resumed(server, broken_off=[{"a": (name(5), CHARGE)}])
    server.node.charge(entry(5))
    server.trained(6)
    server.heads.charged(name(5), ["a"])
    assert server.unlike == "it was charged in another order than the card has"


@pytest.mark.parametrize("again", [False, True])
def test_a_question_that_is_put_again_is_charged_once_or_told(server: Server, again: bool) -> None:
    resumed(server, broken_off=[{"a": (name(5), CHARGE)}])
    server.node.charge(entry(5))
    server.greet()
    server.heads.asked({"a": (name(5), CHARGE)})
    if again:  # about another model, say: it is another release
        server.node.charge(entry(5))
    server.heads.take("a", server.node.shows(), asked=name(5))
    server.heads.charged(name(5), ["a"])
    assert bool(server.unlike) == again
    server.trained(6)
    assert bool(server.unlike) == again


def test_a_run_that_begins_again_knows_what_the_one_before_has_asked(node: Node) -> None:
    server = Server(node)
    server.heads.take_up([{"a": (name(1), CHARGE)}])
    node.charge(entry(1))
    server.greet()
    server.ask(1)
    server.heads.take("a", node.shows(), asked=name(1))  # answered on the charge of before
    assert (server.unlike, server.heads.shown()[0].signed.head.count) == ("", 1)


def test_a_question_may_be_one_of_those_that_a_server_has_forgotten(node: Node) -> None:
    node.charge(entry(1), entry(2))
    server = Server(node)  # under the same identity, without a folder
    server.greet()
    server.ask(2)
    server.heads.take("a", node.shows(), asked=name(2))
    assert server.unlike == "it has charges of this experiment that this server does not know of"
    server.trained(3)


def test_nodes_ahead_of_a_server_that_gave_up_rounds_are_told_and_not_refused(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.node.charge(entry(5), entry(6))
    resumed(server)
    with pytest.raises(ReplyRefusedError, match="do not follow"):
        server.greet()  # it knows of no loss
    resumed(server, lost=True)
    server.greet()
    assert "client a: it has charges of this experiment" in caplog.text
    assert server.unlike == "it has charges of this experiment that this server does not know of"
    rewritten(server.node.ledger, server.node.ledger.entries()[:3])
    with pytest.raises(ReplyRefusedError, match="it had 6 charges of this experiment, it shows 3"):
        server.greet()


def test_what_the_newest_card_has_is_known_where_rounds_were_given_up(server: Server) -> None:
    server.node.charge(entry(5), entry(6))
    resumed(server, lost=True, charges=6, broken_off=[{"a": (name(7), CHARGE)}])
    server.greet()
    assert (server.unlike, server.heads.shown()[0].signed.head.count) == ("", 6)
    server.node.charge(entry(7))
    server.greet()
    assert server.unlike == ""


def test_a_client_whose_charges_are_not_the_cards_may_only_go_on(node: Node) -> None:
    server = Server(node)  # an aggregator of M2FDP, say: the card charges its devices
    server.greet()
    node.charge(entry(1), entry(2))
    server.heads.take("a", node.shows(), asked=name(1))
    assert server.heads.shown() == []  # nothing on the card leads to it
    resumed(server, charges=0)
    rewritten(node.ledger, [entry(1)])
    with pytest.raises(ReplyRefusedError, match="it had 2 charges of this experiment, it shows 1"):
        server.greet()
    rewritten(node.ledger, [entry(1), entry(3)])
    with pytest.raises(ReplyRefusedError, match="another one"):
        server.greet()


def test_a_server_that_follows_nothing_refuses_nothing(node: Node) -> None:
    server = Server(node)
    server.heads.leave_out()
    server.node.charge(entry(1), entry(2, OTHER))
    server.greet()
    server.heads.asked({"a": (name(3), CHARGE)})
    server.heads.take("a", {}, asked=name(3))
    assert server.heads.shown() == []
    assert not any(server.heads.state().values())


# -- Trainings -------------------------------------------------------------------------------------


def lines_of(wards: Wards) -> str:
    return (wards.run_dir / "metrics.jsonl").read_text()


def test_ledgers_that_were_changed_between_two_runs_are_refused_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wards = Wards(tmp_path)
    wards.train(6, killed=3)
    entries = {each: list(wards.ledger(each).entries()) for each in NAMES}
    assert [len(each) for each in entries.values()] == [3] * 4
    rewritten(wards.ledger("a"), entries["a"][:2])
    wards.ledger("b").path.unlink()
    rewritten(wards.ledger("c"), [*entries["c"][:2], entry(7), entry(8)])
    wards.train(4)
    told = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(told) == 1
    assert "hello: 3 refused, the run goes on" in told[0]
    for text in (
        "client 'a': its ledger was set back: it had 3 charges of this experiment, it shows 2",
        "client 'b': its ledger was set back: it had 3 charges of this experiment, it shows 0",
        "client 'c': its ledger is another one: it had 3 charges of this experiment, and the 4",
    ):
        assert text in told[0]
    card = wards.card()
    assert heads_of(card) == {"a": (3, ""), "b": (3, ""), "c": (3, ""), "d": (4, "")}
    assert card.releases[-1].clients == ("d",)
    for shown_ in card.heads:
        shown_.signed.verify()


def test_the_operator_accepts_a_ledger_and_the_loss_is_written_down(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wards = Wards(tmp_path)
    wards.train(6, killed=2)
    wards.ledger("a").path.unlink()
    wards.train(4, killed=3, accept_ledgers=["a"])
    why = "its ledger was set back: it had 2 charges of this experiment, it shows 0; the operator"
    assert why in caplog.text
    assert why in lines_of(wards)
    assert '"accepted_ledgers": {"a": "its ledger was set back' in lines_of(wards)
    assert lines_of(wards).count("accepted_ledgers") == 1
    wards.train(4)  # without the word: what was accepted is what counts from then on
    count, unlike = heads_of(wards.card())["a"]
    assert (count, why in unlike) == (2, True)
    assert wards.card().releases[-1].clients == NAMES
    wards.ledger("a").path.unlink()
    wards.train(5)
    assert "it had 2 charges of this experiment, it shows 0" in caplog.text
    assert wards.card().releases[-1].clients == ("b", "c", "d")


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"accept_ledgers": ["z"], "resume": True}, "accept_ledgers = 'z': expected one of"),
        ({"accept_ledgers": ["a"], "resume": False}, "expected nothing, but on a resume"),
        ({"accept_ledgers": "a", "resume": True}, "expected a list of client ids"),
    ],
)
def test_only_ledgers_that_were_seen_can_be_accepted(
    tmp_path: Path, told: dict[str, Any], message: str
) -> None:
    wards = Wards(tmp_path)
    wards.train(1)
    with pytest.raises(InvalidParameterError, match=message):
        wards.train(2, **told)


def test_a_ledger_that_is_set_back_in_a_round_is_refused_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wards = Wards(tmp_path)

    def change(message: Message, reply: Message, context: Context) -> None:
        told = message.content.config_records[RECORD]
        if told["phase"] == "train" and context.node_config["client-id"] == "a":
            ledger = wards.ledger("a")
            if told["round"] == 2:
                rewritten(ledger, ledger.entries()[:1])

    strategy = wards.train(6, change=change)
    lines = strategy.experiment.history.lines
    assert [line.get("refused", {}) for line in lines[1:]] == [{}, {}] + [{"ledger": 1}] * 3 + [{}]
    assert [line.get("asked") for line in lines[1:]] == [4, 4, 4, 4, 4, 3]
    assert "client 'a': its ledger is another one: it had 2 charges" in caplog.text
    assert "client a" in caplog.text
    assert "is left out of this run" in caplog.text
    assert heads_of(wards.card())["b"] == (6, "")


def test_replies_with_another_signature_an_older_head_or_none_are_refused(tmp_path: Path) -> None:
    wards = Wards(tmp_path)
    first: dict[str, Any] = {}

    def change(message: Message, reply: Message, context: Context) -> None:
        record = reply.content.config_records[RECORD]
        if record["phase"] != "train":
            return
        if record["client-id"] == "a":
            first.update({key: record[key] for key in (COUNT, VALUE, SIGNATURE)})
            head = wards.ledger("a").head(EXPERIMENT)
            own = {"experiment": EXPERIMENT, "client": "a", "head": head}
            record[SIGNATURE] = SignedHead.sign(Identity.generate(), **own).signature
        if record["client-id"] == "b":
            record.update(first)  # of another client
        if record["client-id"] == "c":
            for key in (COUNT, VALUE, SIGNATURE):
                del record[key]
        reply.content[RECORD] = ConfigRecord(dict(record))

    strategy = wards.train(1, change=change)
    assert strategy.experiment.history.lines[1]["refused"] == {"ledger": 3}
    assert heads_of(wards.card()) == {"d": (1, "")}
    # What they answered is charged all the same.
    assert wards.card().releases[0].clients == NAMES
    assert wards.card().releases[0].unanswered == ()


def test_unbroken_and_resumed_runs_have_the_same_heads(tmp_path: Path) -> None:
    cards = []
    for place, stops in (("whole", ()), ("broken", (1, 3))):
        folder = tmp_path / place
        folder.mkdir()
        wards = Wards(folder)
        for stop in stops:
            wards.train(4, killed=stop)
        wards.train(4)
        cards.append(wards.card())
    whole, broken = ({h.signed.client: h.signed.head for h in card.heads} for card in cards)
    assert whole == broken
    assert heads_of(cards[1]) == dict.fromkeys(NAMES, (4, ""))


def test_a_server_that_goes_back_by_the_users_word_goes_on_with_all_nodes(tmp_path: Path) -> None:
    wards = Wards(tmp_path)
    wards.train(2)
    checkpoint = (wards.run_dir / "checkpoint.bin").read_bytes()
    wards.train(4)
    (wards.run_dir / "checkpoint.bin").write_bytes(checkpoint)
    wards.train(6, accept_lost_rounds=True)
    # The card in the folder has the charges of the lost rounds, so they lead to the heads.
    assert heads_of(wards.card()) == dict.fromkeys(NAMES, (6, ""))


def test_a_server_whose_whole_folder_is_old_is_told_by_every_node(tmp_path: Path) -> None:
    wards = Wards(tmp_path)
    wards.train(2, planned=10)
    before = {path: path.read_bytes() for path in wards.run_dir.iterdir() if path.is_file()}
    wards.train(4, planned=10)
    for path, content in before.items():
        path.write_bytes(content)
    with pytest.raises(ProtocolError, match="its ledger is another one: it had 2 charges"):
        wards.train(6, planned=10)
    wards.train(6, planned=10, accept_ledgers=NAMES)
    # Rounds 3 and 4 were asked for again, about other models: the nodes know it.
    assert {count for count, _ in heads_of(wards.card()).values()} == {8}
