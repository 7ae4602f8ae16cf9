"""What every scheme must pass: subclass one of the two classes and fill in its attributes.

`WrapsConformance` is for schemes that wrap a user's app, `OwnClientConformance` for those that
bring their own client.
"""

import contextlib
import inspect
import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from apps import StepClient, make, message_app, record, run_strategy, same
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import Strategy
from grid_tap import tapped

from flwr_privacy.clients import SchemeClient, as_mod, numpy_client_app
from flwr_privacy.errors import CheckpointError, FlwrPrivacyError, ProtocolError
from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.privacy.guarantee import APPS
from flwr_privacy.secure_sum.messages import KEYS, SHARES
from flwr_privacy.simulations.engines.inline import Fault, InlineGrid
from flwr_privacy.simulations.engines.inline.faults import KINDS
from flwr_privacy.simulations.engines.inline.flower_internals import acting_as_server
from flwr_privacy.simulations.runner.jobs import Engine, carry_out
from flwr_privacy.simulations.settings.run_folder import RunFolder
from flwr_privacy.simulations.settings.run_settings import Settings
from flwr_privacy.strategies import SchemeStrategy
from flwr_privacy.strategies.state.experiment import Experiment
from flwr_privacy.wire.message import DECLINED_CODE, HELLO, RECORD, Header, payload_bytes

ONCE_A_RUN = {HELLO, KEYS, SHARES}
HARMLESS = {"delay", "reorder", "duplicate"}  # with a deadline that is longer than the delay


class Killed(BaseException):
    """Stands for the end of the server's process."""


def dying(
    strategy: type[SchemeStrategy], server_round: int, by: type[BaseException] = Killed
) -> type[SchemeStrategy]:
    """Return a strategy whose process ends in a round, when all its updates have come."""

    class Dying(strategy):  # type: ignore[misc, valid-type]
        def aggregate_train(self, current: int, replies: Any) -> Any:
            if current == server_round:
                list(replies)
                raise by
            return super().aggregate_train(current, replies)

    return Dying


class SchemeConformance:
    """Common to both kinds of scheme.

    Attributes
    ----------
    strategy : type
        The scheme's strategy; built with `options` and what a test adds.
    options : dict
        Parameters beyond the defaults.
    registered : bool
        Whether the scheme is one of `flwr_privacy.simulations.settings.schemes` and trains the
        app's tasks.
    on_ray : bool
        Whether the app's training is tried on Ray, where it is registered: two nodes play its four
        clients.
    alone_on_ray : bool
        Whether it is tried on Ray with a node for each client too.
    exact_cohorts : bool
        Whether a run with cohorts equals the one without bit for bit. False for float64 sums,
        which may differ in the last bit of a float32.
    engine : dict
        Parameters of the inline engine, e.g. a seed of the noise.
    app_options : dict
        Parameters of the strategy where the scheme trains the app's tasks.
    app_task : str
        Which of them.
    noise : float
        Largest difference that noise makes between two runs of the app.
    codes : bool
        Whether replies are integers, among which a value that is not finite is one of another type.
    steps_alone : bool
        Whether the server goes on by itself in a round that nobody answers.
    fraction : float
        Share of the clients that a run can ask in a round.
    no_noise : dict
        Of a scheme that promises differential privacy: parameters with which its clients are asked
        for answers without noise.
    """

    strategy: ClassVar[type[SchemeStrategy]]
    options: ClassVar[dict[str, Any]] = {}
    registered: ClassVar[bool] = True
    on_ray: ClassVar[bool] = True
    alone_on_ray: ClassVar[bool] = False
    exact_cohorts: ClassVar[bool] = False
    engine: ClassVar[dict[str, Any]] = {}
    app_options: ClassVar[dict[str, Any]] = {}
    app_task: ClassVar[str] = "digits-mlp"
    noise: ClassVar[float] = 0.0
    codes: ClassVar[bool] = False
    steps_alone: ClassVar[bool] = False
    fraction: ClassVar[float] = 0.5
    no_noise: ClassVar[dict[str, Any]] = {}

    def app(self) -> ClientApp:
        """Return a client app under the scheme."""
        raise NotImplementedError

    def arrays(self) -> ArrayRecord:
        """Return the model to start from."""
        return record()

    def run(self, **changes: Any) -> Any:
        start = {
            key: changes.pop(key)
            for key in (
                *("nodes", "faults", "num_rounds", "evaluate_fn", "before", "serialise"),
                "state",
            )
            if key in changes
        }
        strategy = make(self.strategy, **{"seed": 3, **self.options, **changes})
        return run_strategy(strategy, self.app(), arrays=self.arrays(), **self.engine, **start)

    def plain(self, **options: Any) -> Any:
        """Return what a run came to that nothing disturbs, and that is the same for many tests."""
        return _plain(type(self), tuple(options.items()))

    def test_start_has_the_signature_of_flower(self) -> None:
        expected = inspect.signature(Strategy.start).parameters
        assert list(inspect.signature(self.strategy.start).parameters) == list(expected)

    def test_it_takes_the_arguments_of_flowers_fedavg(self) -> None:
        values = (self.fraction, 0.25, 3, 4, 5, "weight", "model", "settings")
        mine, flowers = make(self.strategy, *values, **self.options), FlowerFedAvg(*values)
        for name in inspect.signature(FlowerFedAvg.__init__).parameters:
            if name not in ("self", "fraction_evaluate", "min_evaluate_nodes"):
                assert getattr(mine, name) == getattr(flowers, name), name

    def test_it_is_the_same_whenever_it_is_repeated(self) -> None:
        one = self.run(min_train_nodes=2, fraction_train=self.fraction)
        other = self.run(min_train_nodes=2, fraction_train=self.fraction)
        assert same(one.arrays, other.arrays)
        times = {"seconds"}
        for line, twin in zip(one.history, other.history, strict=True):
            assert {k: v for k, v in line.items() if k not in times} == {
                k: v for k, v in twin.items() if k not in times
            }

    def test_names_shapes_and_dtypes_are_those_it_came_with(self) -> None:
        seen: list[ArrayRecord] = []
        result = self.run(evaluate_fn=lambda _, arrays: seen.append(arrays))
        for arrays in (*seen, result.arrays):
            assert list(arrays) == list(self.arrays())
            for name, array in self.arrays().items():
                assert (arrays[name].dtype, arrays[name].shape) == (array.dtype, array.shape)
        assert len(seen) == 4

    @pytest.mark.parametrize("nodes", [1, 2, 3])
    def test_cohorts_equal_one_node_per_client(self, nodes: int) -> None:
        plain = self.plain()
        cohort = self.run(nodes=nodes, clients=4, min_available_nodes=nodes)
        assert same(plain.arrays, cohort.arrays, exact=self.exact_cohorts)
        for line, twin in zip(plain.history[1:], cohort.history[1:], strict=True):
            for key in ("asked", "answered", "accumulated", "bytes_down", "bytes_up"):
                assert line[key] == twin[key], key

    @pytest.mark.parametrize("cohort", [{}, {"nodes": 2, "clients": 4}])
    def test_messages_survive_flowers_serialisation(self, cohort: dict[str, Any]) -> None:
        assert same(self.run(**cohort).arrays, self.run(**cohort, serialise=True).arrays)

    @pytest.mark.parametrize("after", [0, 1, 2])
    def test_killed_after_a_round_it_resumes_to_the_same_model(
        self, after: int, tmp_path: Any
    ) -> None:
        unbroken = self.plain(experiment_id="e")
        with pytest.raises(Killed):
            self.run(experiment_id="e", run_dir=tmp_path, on_round=_kill_after(after))
        resumed = self.run(experiment_id="e", run_dir=tmp_path, resume=True)
        assert same(unbroken.arrays, resumed.arrays)
        lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
        assert [line["round"] for line in lines] == [0, 1, 2, 3]
        assert lines == resumed.history
        assert resumed.train_metrics_clientapp == unbroken.train_metrics_clientapp

    def test_an_older_checkpoint_is_refused_or_gone_on_from_after_the_lost_rounds(
        self, tmp_path: Path
    ) -> None:
        """As after a disk lost the last one: no client is asked a question for two models."""
        older, card = tmp_path / "older", tmp_path / "privacy-card.json"
        asked: list[tuple[int, str, int, int]] = []

        def ask(question: Message) -> None:
            fields = question.content[RECORD]
            if fields["phase"] not in ONCE_A_RUN:
                name = fields["phase"], fields["round"], fields["request"]
                asked.append((question.metadata.dst_node_id, *name))

        def back_up(line: dict[str, Any]) -> None:
            if line["round"] == 1:
                shutil.copy(tmp_path / "checkpoint.bin", older)
            if line["round"] == 3:
                raise Killed

        options = {"experiment_id": "e", "run_dir": tmp_path, "before": tapped(ask)}
        planned = {"rounds": 5} if "rounds" in self.options else {}
        options |= {"num_rounds": 5, **planned}
        with pytest.raises(Killed):
            self.run(**options, on_round=back_up)
        charged = PrivacyCard.from_json(card.read_bytes()).charges()
        shutil.copy(older, tmp_path / "checkpoint.bin")
        before = len(asked)
        with pytest.raises(CheckpointError, match="shows rounds 2 to 3, which it lacks"):
            self.run(**options, resume=True)
        assert len(asked) == before
        options |= {"resume": True, "accept_lost_rounds": True}
        result = self.run(**options)
        assert [line["round"] for line in result.history] == [0, 1, 2, 3, 4, 5]
        assert {name[2] for name in asked[before:]} == {4, 5}
        charges = PrivacyCard.from_json(card.read_bytes()).charges()
        assert all(len(charges[client]) >= len(own) for client, own in charged.items())

    @pytest.mark.parametrize("killed_in", [1, 3])
    def test_killed_between_training_and_end_of_a_round_it_shows_no_other_model(
        self, killed_in: int, tmp_path: Any
    ) -> None:
        """First as the model is shown, then when the round is evaluated and has no line yet."""
        seen: dict[int, list[Any]] = {}
        kill = True

        def show(server_round: int, arrays: ArrayRecord) -> MetricRecord:
            seen.setdefault(server_round, []).append(arrays)
            if kill and server_round == killed_in:
                raise Killed
            return MetricRecord({"seen": float(server_round)})

        options = {"experiment_id": "e", "run_dir": tmp_path, "evaluate_fn": show}
        with pytest.raises(Killed):
            self.run(**options)
        kill = False
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Experiment, "end_round", _killed)
            with pytest.raises(Killed):
                self.run(**options, resume=True)
        lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
        assert [line["round"] for line in lines] == list(range(killed_in))
        resumed = self.run(**options, resume=True)
        assert [len(seen[r]) for r in range(4)] == [3 if r == killed_in else 1 for r in range(4)]
        assert all(same(shown, seen[killed_in][0]) for shown in seen[killed_in])
        unbroken = self.run(experiment_id="e", evaluate_fn=show)
        assert same(unbroken.arrays, resumed.arrays)
        assert resumed.guarantee == unbroken.guarantee
        assert (APPS in resumed.guarantee.assumptions) == (resumed.guarantee.adversary != "nobody")
        assert resumed.train_metrics_clientapp == unbroken.train_metrics_clientapp
        assert resumed.evaluate_metrics_clientapp == unbroken.evaluate_metrics_clientapp
        # Nodes are greeted again, and deal again for a secure sum.
        varies = {"seconds", "exchanges", *(key for key in unbroken.history[0] if "bytes" in key)}
        for line, twin in zip(resumed.history, unbroken.history, strict=True):
            assert {k: v for k, v in line.items() if k not in varies} == {
                k: v for k, v in twin.items() if k not in varies
            }
        assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()] == resumed.history

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_fault_is_survived_and_counted(self, kind: str) -> None:
        fault = Fault(kind=kind, client="2", server_round=2, seconds=0.05)
        result = self.run(faults=[fault], deadline=1.0)
        line = result.history[2]
        assert np.isfinite(
            np.concatenate([a.numpy().ravel() for a in result.arrays.values()])
        ).all()
        assert not line["skipped"]
        if kind in HARMLESS:
            assert same(self.plain().arrays, result.arrays, exact=False)
            assert line["accumulated"] == 4
        else:
            assert line["accumulated"] == 3
        expected = {
            "duplicate": "duplicate",
            "stranger": "unknown node",
            "stale": "another round",
            "corrupt": "malformed",
            "nan": "dtype" if self.codes else "not finite",
            "infinity": "dtype" if self.codes else "not finite",
            "reshape": "shape",
        }
        assert line["refused"] == ({expected[kind]: 1} if kind in expected else {})

    def test_bytes_are_those_of_the_messages(self) -> None:
        sent: list[int] = []
        received: list[int] = []

        listen = tapped(
            lambda question: sent.append(payload_bytes(question.content)),
            lambda reply: received.append(payload_bytes(reply.content)),
        )
        history = self.run(before=listen).history
        assert sum(line["bytes_down"] for line in history) == sum(sent)
        assert sum(line["bytes_up"] for line in history) == sum(received)

    @pytest.mark.ray
    def test_the_app_trains_alike_on_ray_inline_and_in_cohorts(
        self, tmp_path: Path, request: pytest.FixtureRequest
    ) -> None:
        if not (self.registered and self.on_ray):
            return
        request.getfixturevalue("one_ray_session")
        settings = Settings(
            scheme=self.strategy.scheme,
            task=self.app_task,
            clients=4,
            rounds=3,
            per_round=3,
            strategy=self.app_options,
        )
        inline = RunFolder.create(tmp_path / "inline", settings, engine="inline", nodes=4)
        stacked = RunFolder.create(tmp_path / "stacked", settings, engine="inline", nodes=2)
        on_ray = [
            RunFolder.create(tmp_path / f"ray-{nodes}", settings, engine="ray", nodes=nodes)
            for nodes in ((2, 4) if self.alone_on_ray else (2,))
        ]
        carry_out([inline], Engine(name="inline"))
        carry_out([stacked], Engine(name="inline", workers=2, stack="yes"))
        carry_out(on_ray, Engine(name="ray"))
        models = []
        for run in (inline, stacked, *on_ray):
            with np.load(run.model_path) as archive:
                models.append(dict(archive))
            assert [line["accumulated"] for line in run.rounds()[1:]] == [3, 3, 3]
        for name, array in models[0].items():
            near = {"rtol": 1e-5, "atol": 1e-6 + self.noise}
            for other in models[1:]:
                np.testing.assert_allclose(other[name], array, **near)

    def answers(self, node: dict[str, Any], **changes: Any) -> list[Message]:
        """Return what four such nodes reply to all but hellos and what prepares a secure sum."""
        replies: list[Message] = []

        def listen(grid: Any) -> None:
            pull = grid.pull_messages

            def pull_messages(ids: list[str]) -> Any:
                replies.extend(pulled := list(pull(ids)))
                return pulled

            grid.pull_messages = pull_messages

        nodes = [{"partition-id": i, "num-partitions": 4, **node} for i in range(4)]
        with contextlib.suppress(FlwrPrivacyError):  # some schemes cannot begin without a setup
            self.run(nodes=nodes, before=listen, **changes)
        nothing = (HELLO, KEYS, SHARES)
        return [r for r in replies if r.has_error() or r.content[RECORD]["phase"] not in nothing]

    @pytest.mark.parametrize("policy", ['schemes = ["nobody"]', "max_epsilon = 0"])
    def test_a_nodes_policy_binds_it(self, policy: str, tmp_path: Path) -> None:
        (tmp_path / "policy.toml").write_text(policy)
        answers = self.answers({"privacy-policy": str(tmp_path / "policy.toml")})
        assert answers
        assert {reply.error.code for reply in answers} == {DECLINED_CODE}

    def test_a_deployed_node_answers_without_noise_only_where_none_is_promised(self) -> None:
        if not self.no_noise:
            return
        deployed = {"privacy-simulated": False}
        answers = self.answers(deployed, **self.no_noise)
        assert answers
        assert {reply.error.code for reply in answers} == {DECLINED_CODE}
        allowed = {**deployed, "privacy-allow-unprotected": self.strategy.scheme}
        answers = self.answers(allowed, **self.no_noise)
        assert answers
        assert not any(reply.has_error() for reply in answers)

    def test_no_answer_skips_the_round(self) -> None:
        fault = Fault(kind="drop", server_round=2)
        result = self.run(faults=[fault], deadline=1.0)
        skipped = not self.steps_alone
        assert [line.get("skipped") for line in result.history] == [None, False, skipped, False]


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
        return message_app([as_mod(self.client)])

    def numpy_app(self) -> ClientApp:
        return numpy_client_app(
            lambda context: self.client(
                StepClient(int(context.node_config["partition-id"])), context
            ).to_client()
        )

    def test_both_kinds_of_app_train_alike(self) -> None:
        by_message = self.plain()
        strategy = make(self.strategy, **{"seed": 3, **self.options})
        by_numpy = run_strategy(strategy, self.numpy_app(), arrays=self.arrays(), **self.engine)
        assert same(by_message.arrays, by_numpy.arrays)

    def test_it_works_under_a_users_own_start(self) -> None:
        class Own(self.strategy):  # type: ignore[name-defined, misc]
            start = Strategy.start

        strategy = make(Own, **{"seed": 3, **self.options})
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
            assert text in reply.error.reason

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
                reasons.append(reply.error.reason if reply.has_error() else "")
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
        assert RECORD in reply.error.reason


@cache
def _plain(scheme: type[SchemeConformance], options: tuple[tuple[str, Any], ...]) -> Any:
    return scheme().run(**dict(options))


def _killed(*given: Any, **named: Any) -> None:
    raise Killed


def _kill_after(server_round: int) -> Callable[[dict[str, Any]], None]:
    def on_round(line: dict[str, Any]) -> None:
        if line["round"] == server_round:
            raise Killed

    return on_round


def _ask(app: ClientApp, entries: dict[str, Any]) -> Message:
    grid = InlineGrid(app, 1)
    with acting_as_server(grid.run_id):
        return _exchange(grid, entries, record())


def _exchange(grid: InlineGrid, entries: dict[str, Any], arrays: ArrayRecord) -> Message:
    from flwr.app import ConfigRecord

    (node,) = grid.get_node_ids()
    content = RecordDict(
        {"arrays": arrays, "config": ConfigRecord(), RECORD: ConfigRecord(entries)}
    )
    (reply,) = grid.send_and_receive([Message(content, node, "train")], timeout=5)
    return reply
