"""Conformance of a scheme: subclass one of the two classes and fill in its attributes.

`WrapsConformance` is for schemes that wrap a user's app, `OwnClientConformance` for those that
bring their own client.
"""

from typing import Any, ClassVar

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Strategy

from flwr_privacy.clients import SchemeClient, as_mod, numpy_client_app
from flwr_privacy.errors import ProtocolError
from flwr_privacy.simulations.engines.inline import InlineGrid
from flwr_privacy.simulations.engines.inline.flower_internals import acting_as_server
from flwr_privacy.wire.message import RECORD, Header

from .apps import StepClient, message_app, record, run_strategy, same, turned_step
from .conformance import SchemeConformance

__all__ = ["OwnClientConformance", "WrapsConformance"]


class WrapsConformance(SchemeConformance):
    """For a scheme that wraps a user's app.

    Attributes
    ----------
    client : type
        The scheme's client half.
    own_start : str
        Text of the error with which the scheme refuses a user's own start; empty if it works there.
    """

    client: ClassVar[type[SchemeClient]]
    own_start: ClassVar[str] = ""

    def app(self) -> ClientApp:
        return message_app([as_mod(self.client)], turned_step)

    def numpy_app(self) -> ClientApp:
        return numpy_client_app(
            lambda context: self.client(
                StepClient(int(context.node_config["partition-id"]), turned_step), context
            ).to_client()
        )

    def test_both_kinds_of_app_train_alike(self) -> None:
        by_message = self.plain()
        strategy = self.make(self.strategy, **{"seed": 3, **self.options})
        by_numpy = run_strategy(strategy, self.numpy_app(), arrays=self.arrays(), **self.engine)
        assert same(by_message.arrays, by_numpy.arrays)

    def test_it_works_under_a_users_own_start(self) -> None:
        class Own(self.strategy):  # type: ignore[name-defined, misc]
            start = Strategy.start

        strategy = self.make(Own, **{"seed": 3, **self.options})
        if self.own_start:
            with pytest.raises(ProtocolError, match=self.own_start):
                run_strategy(strategy, self.app(), arrays=self.arrays(), **self.engine)
            return
        plain = self.plain()
        own = run_strategy(strategy, self.app(), arrays=self.arrays(), **self.engine)
        assert same(plain.arrays, own.arrays, exact=False)

    def test_other_message_types_pass_through_untouched(self) -> None:
        def ping(grid: Any) -> None:
            nodes = list(grid.get_node_ids())
            messages = [Message(RecordDict(), node, "query.ping") for node in nodes]
            replies = list(grid.send_and_receive(messages, timeout=5))
            assert len(replies) == 4
            assert all(not reply.has_error() for reply in replies)

        self.run(before=ping)

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            ({"scheme": "nonesuch"}, "scheme 'nonesuch': this end speaks"),
            ({"version": 99}, "protocol version 99: this end speaks version 1"),
            ({"phase": "nonesuch"}, "phase 'nonesuch' is not known"),
            ({"round": "1"}, "the entry 'round' is '1'"),
        ],
    )
    def test_the_client_says_what_it_does_not_understand(
        self, change: dict[str, Any], text: str
    ) -> None:
        header = Header(scheme=self.client.scheme, experiment_id="e", phase="train", server_round=1)
        for app in (self.app(), self.numpy_app()):
            reply = _ask(app, {**header.write(), **change})
            assert text in _reason(reply)

    def test_a_round_must_follow(self) -> None:
        app = self.app()
        grid = InlineGrid(app, 1)
        reasons = []
        with acting_as_server(grid.run_id):
            for server_round in (5, 5, 2):
                header = Header(
                    scheme=self.client.scheme,
                    experiment_id="e",
                    phase="train",
                    server_round=server_round,
                )
                reply = _exchange(grid, header.write(), self.arrays())
                reasons.append(_reason(reply))
        assert "round 2 does not follow round 5" in reasons[2]
        assert not any("does not follow" in reason for reason in reasons[:2])


class OwnClientConformance(SchemeConformance):
    """For a scheme that brings its own client; fill in `app` and `arrays`."""

    def test_a_message_without_the_record_is_refused(self) -> None:
        grid = InlineGrid(self.app(), 1)
        with acting_as_server(grid.run_id):
            (node,) = grid.get_node_ids()
            message = Message(RecordDict({"arrays": self.arrays()}), node, "train")
            (reply,) = grid.send_and_receive([message], timeout=5)
        assert RECORD in _reason(reply)


def _reason(reply: Message) -> str:
    """Return why a client refuses; empty if it answers."""
    return reply.error.reason or "" if reply.has_error() else ""


def _ask(app: ClientApp, entries: dict[str, Any]) -> Message:
    grid = InlineGrid(app, 1)
    with acting_as_server(grid.run_id):
        return _exchange(grid, entries, record())


def _exchange(grid: InlineGrid, entries: dict[str, Any], arrays: ArrayRecord) -> Message:
    (node,) = grid.get_node_ids()
    content = RecordDict(
        {"arrays": arrays, "config": ConfigRecord(), RECORD: ConfigRecord(entries)}
    )
    (reply,) = grid.send_and_receive([Message(content, node, "train")], timeout=5)
    return reply
