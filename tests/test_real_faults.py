"""What becomes of a training when something fails, on real processes.

Every fault of `flwr-privacy reliability` happens here once, under UDP, to SuperNodes, a SuperLink
and a ServerApp that are processes of their own and talk TLS. The noise is from a seed, so that each
round's model can be compared, bit for bit, with that of a training in one process in which those
who are to be left out are silent.
"""

import json
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from apps import run_strategy
from deployment import PATIENCE, Deployment, DeploymentError, wait_until_online
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flwr_privacy.clients import UDPClient, as_mod
from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.simulations.engines.inline import Fault
from flwr_privacy.simulations.reliability.grid import FAULTS
from flwr_privacy.simulations.reliability.page import REAL_FAULTS
from flwr_privacy.strategies import UDP, LoopOptions, UserLevel
from flwr_privacy.wire.pins import Identity

pytestmark = pytest.mark.deployed

APP = Path(__file__).parent / "deployed"
SEED = 7
INITIAL = [np.array([[0.0, 1.0], [2.0, 3.0]], np.float32), np.full(3, 0.5, np.float32)]
DEADLINE = 60.0  # seconds that the round takes whose answers never come
NOT_LET_IN = '"POST /v1/fleet/activate-node HTTP/1.1" 401'

PLAN = {
    1: ("reorder", "duplicate", "clock behind", "delay"),
    2: ("late", "drop", "lost request", "stale", "stranger", "clock ahead"),
    3: ("corrupt", "nan", "infinity", "reshape", "disk full"),
    4: ("crash", "killed before", "restarted", "moved", "node lost"),
    5: (),
    6: (),
}
"""What happens in each round: to the first client, to the second, and so on."""

KILLED_IN = 5  # the round in which the server is killed
EXACT = {"reorder", "duplicate", "clock behind", "delay", "restarted", "moved"}
UNCHARGED = {"lost request", "killed before", "disk full"}  # nothing was released
YEAR = timedelta(days=365)

Strike = tuple[int, str, str]
"""Round, client, fault."""


def name_of(place: int) -> str:
    return f"ward-{place}"


CLIENTS = [name_of(place) for place in range(6)]
STRIKES = [
    (server_round, name_of(place), fault)
    for server_round, faults in PLAN.items()
    for place, fault in enumerate(faults)
]


((LOST_IN, LOST),) = [(r, client) for r, client, fault in STRIKES if fault == "node lost"]
"""Whose ledger is lost with its files, and when: it answers that round, and is refused later."""


def configurations(folder: Path, count: int) -> list[dict[str, Any]]:
    nodes = []
    for place in range(count):
        state = folder / f"state-{name_of(place)}"
        state.mkdir(parents=True)
        own = {"client-id": name_of(place), "shift": 1 + place / 2, "examples": place + 1}
        key = folder / f"{name_of(place)}.pem"  # the operator's: it is not lost with the files
        Identity.generate().write(key)
        files = {"privacy-state": str(state), "privacy-identity": str(key)}
        nodes.append({**own, **files, "insecure-seed": SEED})
    return nodes


def simulated(
    nodes: Sequence[Mapping[str, Any]], rounds: int, without: Sequence[tuple[int, str]] = ()
) -> tuple[list[bytes], list[dict[str, Any]]]:
    """Train the same in one process; return the model of each round and the history.

    Those who are left out are silent in their rounds.
    """
    app = ClientApp(mods=[as_mod(UDPClient)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        shift = float(context.node_config["shift"])
        arrays = {
            name: Array(np.asarray(2 * array.numpy() + shift, np.float32))
            for name, array in message.content.array_records["arrays"].items()
        }
        metrics = MetricRecord({"num-examples": int(context.node_config["examples"])})
        content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics})
        return Message(content, reply_to=message)

    models: list[bytes] = []

    def keep(_: int, arrays: ArrayRecord) -> None:
        models.append(b"".join(array.numpy().tobytes() for array in arrays.values()))

    result = run_strategy(
        UDP(
            privacy=UserLevel(epsilon=8.0, delta=1e-5),
            loop=LoopOptions(experiment_id="faults", seed=1),
            fraction_evaluate=0.0,
        ),
        app,
        nodes=nodes,
        arrays=ArrayRecord([array.copy() for array in INITIAL]),
        faults=[Fault(kind="drop", client=client, server_round=r) for r, client in without],
        num_rounds=rounds,
        evaluate_fn=keep,
    )
    return models, result.history


@dataclass
class Course:
    """A training on real processes, in as many runs as it takes.

    Attributes
    ----------
    deployment : Deployment
        Its processes.
    folder : Path
        Where everything lies.
    config : dict
        The runs' configuration.
    """

    deployment: Deployment
    folder: Path
    config: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, deployment: Deployment, strikes: Sequence[Strike], *, nodes: int, rounds: int
    ) -> "Course":
        folder = deployment.folder
        for name in ("marks", "run"):
            (folder / name).mkdir()
        config = {
            "scheme": "udp",
            "nodes": nodes,
            "rounds": rounds,
            "out": str(folder / "out.json"),
            "plan": json.dumps(strikes),
            "marks": str(folder / "marks"),
            "run-dir": str(folder / "run"),
            "deadline": DEADLINE,
        }
        return cls(deployment, folder, config)

    def run(self, *, resume: bool = False, refused: int = 0) -> None:
        """Run until the end; so many of its nodes are not let in."""
        nodes = self.config["nodes"] - refused
        config = {**self.config, "resume": resume, "nodes": nodes}
        self.deployment.run(APP, run_config=config, timeout=900, on_poll=self.serve)

    def serve(self) -> None:
        """Do what the processes of the run ask for."""
        for request in sorted((self.folder / "marks").glob("*.ward-*.[0-9]")):
            if not self.is_done(request):
                verb, client, _ = request.name.split(".")
                getattr(self, verb)(CLIENTS.index(client))
                self.finish(request)

    def is_done(self, request: Path) -> bool:
        return request.with_name(f"{request.name}.done").exists()

    def finish(self, request: Path) -> None:
        request.with_name(f"{request.name}.done").touch()

    def restart(self, index: int) -> None:
        self.deployment.stop(index)
        self.deployment.start(index)

    def move(self, index: int) -> None:
        self.deployment.kill(index)
        self.deployment.unregister(index)
        self.deployment.start(index)

    def lose(self, index: int) -> None:
        shutil.rmtree(self.state(name_of(index)))
        self.state(name_of(index)).mkdir()
        self.move(index)

    def superlink(self, index: int) -> None:
        self.deployment.kill_superlink()

    def state(self, client: str) -> Path:
        return self.folder / f"state-{client}"

    def history(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "run" / "metrics.jsonl").open()]

    def model(self, server_round: int) -> bytes:
        return (self.folder / "marks" / f"model.{server_round}").read_bytes()

    def models(self) -> list[bytes]:
        return [self.model(server_round) for server_round in range(self.config["rounds"] + 1)]

    def charged(self, client: str) -> list[int]:
        ledger = Ledger(self.state(client) / f"{client}.ledger", data_set=client)
        return [entry.question.server_round for entry in ledger.entries()]

    def answers(self) -> dict[tuple[str, int], set[str]]:
        """Return digests of what clients answered, as it was before anything happened to it."""
        found = defaultdict(set)
        for path in (self.folder / "marks" / "answers").iterdir():
            client, server_round, digest = path.name.split(".")
            found[client, int(server_round)].add(digest)
        return dict(found)

    def received(self, run: int, server_round: int) -> dict[str, str]:
        """Return digests of what the server received in a run, by client."""
        found = {}
        for path in (self.folder / "marks" / "received").glob(f"{run}.*.{server_round}.*"):
            _, client, _, digest = path.name.split(".")
            assert client not in found
            found[client] = digest
        return found


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Course]:
    folder = tmp_path_factory.mktemp("faults")
    nodes = configurations(folder, len(CLIENTS))
    strikes = [*STRIKES, (KILLED_IN, "server", "server killed")]
    with Deployment(nodes=nodes, folder=folder) as deployment:
        course = Course.of(deployment, strikes, nodes=len(nodes), rounds=len(PLAN))
        with pytest.raises(DeploymentError, match="ended as finished:failed"):
            course.run()
        course.run(resume=True, refused=1)  # the node that has lost its files
        yield course


@pytest.fixture
def one_node(tmp_path: Path) -> Iterator[Deployment]:
    with Deployment(nodes=[{}], folder=tmp_path) as deployment:
        wait_until_online(deployment, 1)
        yield deployment


def wait_until_ended(deployment: Deployment, index: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while deployment.alive(index):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_everything_that_is_tried_inline_happens_here() -> None:
    assert {*FAULTS, "killed before"} == {fault for *_, fault in STRIKES} | {"server killed"}


def test_the_page_says_of_each_fault_what_is_found_here() -> None:
    rows = {name: text for names, (_, text) in REAL_FAULTS.items() for name in names.split(", ")}
    assert FAULTS.keys() <= rows.keys()
    for *_, fault in STRIKES:
        text = rows["lost request" if fault == "killed before" else fault]
        assert text.startswith("exact") == (fault in EXACT), fault
        assert text.startswith("left out, nothing charged") == (fault in UNCHARGED), fault
        assert text.startswith(("exact", "left out, ")), fault


def test_each_model_is_that_of_a_training_in_which_those_left_out_are_silent(
    course: Course, tmp_path: Path
) -> None:
    silent = [(r, client) for r, client, fault in STRIKES if fault not in {*EXACT, "node lost"}]
    silent += [(server_round, LOST) for server_round in PLAN if server_round > LOST_IN]
    models, history = simulated(configurations(tmp_path, len(CLIENTS)), len(PLAN), silent)
    assert course.models() == models
    told = ("round", "accumulated", "skipped")
    assert [[line.get(key) for key in told] for line in course.history()] == [
        [line.get(key) for key in told] for line in history
    ]
    assert [line.get("asked") for line in course.history()[1:]] == [
        line["asked"] - (line["round"] > LOST_IN) for line in history[1:]
    ]
    # Nobody is asked who is not there: those who were killed come back for the next round.
    assert [line["accumulated"] for line in history[1:]] == [6, 0, 1, 4, 5, 5]


def test_the_history_says_why_an_answer_was_refused(course: Course) -> None:
    refused = [line.get("refused") for line in course.history()]
    assert refused[1] == {"duplicate": 1}
    assert refused[2] == {"unknown node": 1, "another round": 1}
    assert refused[3] == {"malformed": 1, "shape": 1, "dtype": 2, "error": 1}
    assert refused[4:] == [{}, {}, {}]


@pytest.mark.parametrize(("server_round", "client", "fault"), STRIKES)
def test_a_ledger_has_what_was_released(
    course: Course, server_round: int, client: str, fault: str
) -> None:
    if client == LOST:
        assert course.charged(client) == []  # what it had is lost, and it is asked nothing more
    elif fault in UNCHARGED:
        assert server_round not in course.charged(client)
        assert (client, server_round) not in course.answers()
    else:
        assert course.charged(client).count(server_round) == 1


def test_nobody_gives_two_answers_to_a_question(course: Course) -> None:
    assert {len(digests) for digests in course.answers().values()} == {1}


def test_the_card_has_a_charge_for_every_answer(course: Course) -> None:
    card = PrivacyCard.from_json((course.folder / "run" / "privacy-card.json").read_text())
    charged = {(c, release.server_round) for release in card.releases for c in release.clients}
    assert set(course.answers()) <= charged


def test_a_resumed_round_gets_the_same_bytes_again(course: Course) -> None:
    before, after = course.received(1, KILLED_IN), course.received(2, KILLED_IN)
    assert set(before) == set(after) == set(CLIENTS) - {LOST}
    assert before == after
    assert {(c, KILLED_IN): {digest} for c, digest in after.items()}.items() <= (
        course.answers().items()
    )
    assert course.received(2, KILLED_IN - 1) == {}


def test_the_clock_of_a_node_is_in_its_ledger_and_nowhere_else(course: Course) -> None:
    for fault, by in (("clock ahead", YEAR), ("clock behind", -YEAR)):
        ((server_round, client),) = [(r, c) for r, c, f in STRIKES if f == fault]
        ledger = Ledger(course.state(client) / f"{client}.ledger", data_set=client)
        for entry in ledger.entries():
            off = datetime.fromisoformat(entry.time) - datetime.now(UTC)
            skewed = entry.question.server_round == server_round
            assert abs(off - (by if skewed else timedelta(0))) < timedelta(days=1)
    # Its answer would outlive the question by a year less the deadline: the SuperLink refuses it.
    assert "`metadata.ttl` must be higher than zero" in log(course.deployment, "superlink")


def test_the_operator_of_a_full_disk_sees_why(course: Course) -> None:
    (place,) = [CLIENTS.index(client) for _, client, fault in STRIKES if fault == "disk full"]
    text = log(course.deployment, f"node-{place}")
    assert "cannot be written: No space left on device" in text


@pytest.mark.parametrize("ahead", [60.0, -YEAR.total_seconds()])
def test_a_node_whose_own_clock_is_wrong_is_not_let_in(one_node: Deployment, ahead: float) -> None:
    one_node.stop(0)
    assert NOT_LET_IN not in log(one_node, "superlink")
    one_node.start(0, environment={"PYTHONPATH": str(APP), "CLOCK_AHEAD": str(ahead)})
    wait_until_ended(one_node, 0)
    assert log(one_node, "superlink").count(NOT_LET_IN) == 1
    assert one_node.online() == 0


def test_a_killed_node_is_let_in_once_nobody_takes_it_for_connected(one_node: Deployment) -> None:
    one_node.kill(0)
    one_node.start(0)  # at once: it is taken for connected for another minute
    wait_until_ended(one_node, 0)
    assert "could not be activated" in log(one_node, "superlink")
    one_node.kill(0)
    one_node.unregister(0)
    assert one_node.online() == 0
    one_node.start(0)
    wait_until_online(one_node, 1)


@pytest.mark.parametrize("database", [True, False])
def test_a_run_goes_on_after_its_superlink_was_killed(tmp_path: Path, *, database: bool) -> None:
    """With a database the SuperLink knows its nodes again; otherwise they end by themselves."""
    nodes = configurations(tmp_path / "nodes", 2)
    (tmp_path / "deployment").mkdir()
    with Deployment(nodes=nodes, folder=tmp_path / "deployment", database=database) as deployment:
        course = Course.of(deployment, [(1, "ward-0", "superlink killed")], nodes=2, rounds=2)
        with pytest.raises(DeploymentError, match="the SuperLink was killed"):
            course.run()
        deployment.start_superlink()
        if database:
            assert deployment.alive(0)
            assert deployment.alive(1)
            files = sorted(deployment.folder.glob("superlink.db*"))
            assert files
            for file in files:  # it has the clients' replies
                assert file.stat().st_mode & 0o077 == 0
        else:
            for index in range(2):
                wait_until_ended(deployment, index)
                deployment.start(index)
        course.run(resume=True)
    models, history = simulated(configurations(tmp_path / "inline", 2), 2)
    assert course.models() == models
    assert [line["accumulated"] for line in history[1:]] == [2, 2]
    for client in CLIENTS[:2]:
        ledger = Ledger(
            tmp_path / "nodes" / f"state-{client}" / f"{client}.ledger", data_set=client
        )
        assert [entry.question.server_round for entry in ledger.entries()] == [1, 2]
    assert {len(digests) for digests in course.answers().values()} == {1}


def log(deployment: Deployment, name: str) -> str:
    return (deployment.folder / f"{name}.log").read_text(errors="replace")
