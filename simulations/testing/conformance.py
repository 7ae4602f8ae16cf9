"""What every scheme must pass, whether it wraps an app or brings its own client.

Subclass one of the two classes of `client_conformance` and fill in its attributes.
"""

import contextlib
import inspect
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import Strategy

from flwr_privacy.errors import CheckpointError, FlwrPrivacyError
from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.privacy.guarantee import APPS
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.secure_sum.messages import KEYS, SHARES
from flwr_privacy.simulations.engines.inline import Fault
from flwr_privacy.simulations.engines.inline.faults import KINDS
from flwr_privacy.simulations.settings.flat_options import keywords_of
from flwr_privacy.strategies import SchemeStrategy
from flwr_privacy.strategies.state.experiment import Experiment
from flwr_privacy.wire.message import DECLINED_CODE, HELLO, RECORD
from flwr_privacy.wire.payload import payload_bytes

from .apps import model_of, record, run_strategy, same, twins
from .grid_tap import tapped
from .virtual_time import no_flushing, virtual_time

__all__ = ["Killed", "SchemeConformance"]

ONCE_A_RUN = {HELLO, KEYS, SHARES}
_PLAIN: dict[tuple[type, tuple[tuple[str, Any], ...]], Any] = {}
HARMLESS = {"delay", "reorder", "duplicate"}  # with a deadline that is longer than the delay


class Killed(BaseException):
    """Stands for the end of the server's process."""


class SchemeConformance:
    """Common to both kinds of scheme.

    Attributes
    ----------
    strategy : type
        The scheme's strategy; built with `options` and what a test adds.
    options : dict
        Parameters beyond the defaults. Those of the loop and of other options objects may stand
        among them by their own names, as on the command line.
    exact_cohorts : bool
        Whether a run with cohorts equals the one without bit for bit. False for float64 sums,
        which may differ in the last bit of a float32.
    engine : dict
        Parameters of the inline engine, e.g. a seed of the noise.
    codes : bool
        Whether replies are integers, among which a value that is not finite is one of another type.
    steps_alone : bool
        Whether the server goes on by itself in a round that nobody answers.
    each_counts : bool
        Whether each answer changes the model. False where a round can do without some of them.
    ledgers : bool
        Whether nodes keep ledgers of what they answer. False where a trusted server adds the noise.
    fraction : float
        Share of the clients that a run can ask in a round.
    no_noise : dict
        Of a scheme that promises differential privacy: parameters with which its clients are asked
        for answers without noise.
    """

    strategy: ClassVar[type[SchemeStrategy]]
    options: ClassVar[dict[str, Any]] = {}
    exact_cohorts: ClassVar[bool] = False
    engine: ClassVar[dict[str, Any]] = {}
    codes: ClassVar[bool] = False
    steps_alone: ClassVar[bool] = False
    each_counts: ClassVar[bool] = True
    ledgers: ClassVar[bool] = True
    fraction: ClassVar[float] = 0.5
    no_noise: ClassVar[dict[str, Any]] = {}

    def app(self) -> ClientApp:
        """Return a client app under the scheme."""
        raise NotImplementedError

    def arrays(self) -> ArrayRecord:
        """Return the model to start from."""
        return record()

    @pytest.fixture(autouse=True)
    def _undisturbed(
        self, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[None]:
        # Cards of runs without a folder would otherwise lie in the current one.
        cards = tmp_path_factory.getbasetemp() / "privacy-cards"
        monkeypatch.setenv("FLWR_PRIVACY_RUNS", str(cards))
        with virtual_time(), no_flushing():
            yield

    def make(self, strategy: Any, *arguments: Any, **values: Any) -> Any:
        """Return a strategy with its parameters and those of its options, by their own names."""
        return strategy(*arguments, **keywords_of(strategy, values))

    def run(self, **changes: Any) -> Any:
        """Train three rounds with four clients, unless a change says otherwise."""
        start = {
            key: changes.pop(key)
            for key in (
                *("nodes", "faults", "num_rounds", "evaluate_fn", "before", "serialise"),
                "state",
            )
            if key in changes
        }
        strategy = self.make(self.strategy, **{"seed": 3, **self.options, **changes})
        return run_strategy(strategy, self.app(), arrays=self.arrays(), **self.engine, **start)

    def plain(self, **options: Any) -> Any:
        """Return what a run came to that nothing disturbs, and that is the same for many tests."""
        key = (type(self), tuple(options.items()))
        if key not in _PLAIN:
            _PLAIN[key] = type(self)().run(**options)
        return _PLAIN[key]

    def test_start_has_the_signature_of_flower(self) -> None:
        expected = inspect.signature(Strategy.start).parameters
        assert list(inspect.signature(self.strategy.start).parameters) == list(expected)

    def test_it_takes_the_arguments_of_flowers_fedavg(self) -> None:
        values = (self.fraction, 0.25, 3, 4, 5, "weight", "model", "settings")
        mine, flowers = self.make(self.strategy, *values, **self.options), FlowerFedAvg(*values)
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
                phase, server_round, request = (
                    str(fields[name]) for name in ("phase", "round", "request")
                )
                node = question.metadata.dst_node_id
                asked.append((node, phase, int(server_round), int(request)))

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

    def test_no_answer_is_lost(self) -> None:
        """Each client that is missing makes another model: a lost one makes twins."""
        if not self.each_counts:
            return
        models = {"a fault": model_of(self.plain().arrays)}
        for client in range(4):
            fault = Fault(kind="drop", client=str(client), server_round=2)
            result = self.run(faults=[fault], deadline=1.0)
            models[f"client {client}"] = model_of(result.arrays)
        alike = twins(models)
        assert alike is None, (
            f"an answer of round 2 is lost: without {alike[0]} and without {alike[1]} "
            "the model is the same"
        )

    def test_each_charge_on_the_card_is_in_its_clients_ledger(self, tmp_path: Path) -> None:
        if not self.ledgers:
            return
        state = tmp_path / "state"
        state.mkdir()
        self.run(experiment_id="e", run_dir=tmp_path, state=state)
        charges = PrivacyCard.from_json((tmp_path / "privacy-card.json").read_bytes()).charges()
        for client, own in charges.items():
            held = [
                len(list(Ledger(path, data_set=client).entries()))
                for path in tmp_path.rglob(f"{client}.ledger")
            ]
            assert sum(held) >= len(own), (
                f"client {client} answered without a charge: the card has {len(own)} charges, "
                f"its ledger {sum(held)}"
            )

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
        assert _codes(answers) == {DECLINED_CODE}, "a node answers what its policy forbids"

    def test_a_deployed_node_answers_without_noise_only_where_none_is_promised(self) -> None:
        if not self.no_noise:
            return
        deployed = {"privacy-simulated": False}
        answers = self.answers(deployed, **self.no_noise)
        assert answers
        assert _codes(answers) == {DECLINED_CODE}, "a deployed node answers without noise"
        allowed = {**deployed, "privacy-allow-unprotected": self.strategy.scheme}
        answers = self.answers(allowed, **self.no_noise)
        assert answers
        assert not any(reply.has_error() for reply in answers)

    def test_no_answer_skips_the_round(self) -> None:
        fault = Fault(kind="drop", server_round=2)
        result = self.run(faults=[fault], deadline=1.0)
        skipped = not self.steps_alone
        assert [line.get("skipped") for line in result.history] == [None, False, skipped, False]


def _codes(replies: list[Message]) -> set[int]:
    """Return the error codes of replies; 0 of an answer."""
    return {reply.error.code if reply.has_error() else 0 for reply in replies}


def _killed(*given: Any, **named: Any) -> None:
    raise Killed


def _kill_after(server_round: int) -> Callable[[dict[str, Any]], None]:
    def on_round(line: dict[str, Any]) -> None:
        if line["round"] == server_round:
            raise Killed

    return on_round
