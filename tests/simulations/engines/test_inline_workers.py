"""Worker processes of the inline engine: arrays in shared files, and workers that die."""

import contextlib
import copy
import errno
import os
import pickle
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from apps import record, run_strategy, same
from dying_app import VICTIM
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from flwr_privacy.clients.node.records import LocalArray
from flwr_privacy.privacy.ledger import Ledger
from flwr_privacy.simulations.engines.inline import InlineGrid, shared_arrays
from flwr_privacy.simulations.engines.inline.flower_internals import acting_as_server
from flwr_privacy.simulations.engines.inline.shared_arrays import (
    SharedArrays,
    files_of_state,
    place_state,
)
from flwr_privacy.simulations.engines.inline.workers import WorkerPool
from flwr_privacy.strategies import MSPDQ, UDP, LoopOptions, UserLevel

LARGE = np.arange(20_000, dtype=np.float64).reshape(100, 200)


def message(*arrays: Any) -> RecordDict:
    record_ = ArrayRecord()
    for index, array in enumerate(arrays):
        record_[str(index)] = array
    return RecordDict({"arrays": record_, "config": ConfigRecord({"a": 1})})


def sent(content: RecordDict) -> tuple[RecordDict, int]:
    pickled = pickle.dumps(content)
    arrived: RecordDict = pickle.loads(pickled)
    return arrived, len(pickled)


def test_large_arrays_travel_as_a_name_and_a_place(tmp_path: Path) -> None:
    arrays = [Array(LARGE), Array(np.asfortranarray(LARGE)), Array(np.array(3)), LocalArray(LARGE)]
    content = message(*arrays)
    assert len(SharedArrays(tmp_path).place(content)) == 1
    arrived, size = sent(content)
    assert size < 3000
    for array, before in zip(arrived["arrays"].values(), arrays, strict=True):
        np.testing.assert_array_equal(array.numpy(), before.numpy())
        assert array.numpy().dtype == before.numpy().dtype


def test_what_two_messages_share_is_written_once_and_lies_there_until_both_are_answered(
    tmp_path: Path,
) -> None:
    shared, files = Array(LARGE), SharedArrays(tmp_path)
    first, second = message(shared), message(shared)
    own = message(Array(LARGE + 1))
    places = [files.place(content) for content in (first, second, own)]
    assert places[0] == places[1] != places[2]
    files.release(places[0])
    arrived, _ = sent(second)
    files.release(places[1])
    assert os.listdir(tmp_path) == [Path(places[2][0]).name]
    np.testing.assert_array_equal(arrived["arrays"]["0"].numpy(), LARGE)  # it is mapped
    assert files.place(message(shared)) != places[0]


def test_an_array_that_cannot_be_decoded_travels_as_it_is(tmp_path: Path) -> None:
    broken = Array(dtype="float64", shape=(9,), stype="numpy.ndarray", data=b"x" * 100_000)
    other = Array(dtype="float64", shape=(100, 200), stype="torch", data=Array(LARGE).data)
    content = message(broken, other)
    assert SharedArrays(tmp_path).place(content) == []
    arrived, _ = sent(content)
    assert [arrived["arrays"][str(i)] for i in range(2)] == [broken, other]


def test_a_state_is_written_once_and_read_where_it_lies(tmp_path: Path) -> None:
    state = message(Array(LARGE), LocalArray(LARGE + 1), Array(np.array(3)))
    given = state["arrays"]
    place_state(tmp_path, state)
    (first,) = files_of_state(state)
    assert not files_of_state(RecordDict({"arrays": given}))  # the app may hold it
    arrived, size = sent(state)
    assert size < 3000
    before = RecordDict(dict(arrived))
    arrived["new"] = message(LocalArray(LARGE + 2))["arrays"]
    place_state(tmp_path, arrived, before)  # what was there is not written again
    files = files_of_state(arrived)
    assert first in files
    assert {Path(path).name for path in files} == set(os.listdir(tmp_path))
    assert len(files) == 2
    back, _ = sent(arrived)
    for array, expected in zip(back["arrays"].values(), [LARGE, LARGE + 1, 3], strict=True):
        np.testing.assert_array_equal(array.numpy(), expected)
    theirs = Array(LARGE + 2)
    array = back["new"]["0"]
    assert (array.data, array.shape, array.dtype) == (theirs.data, theirs.shape, theirs.dtype)


def test_an_array_of_a_state_travels_in_a_message_of_its_own(tmp_path: Path) -> None:
    state = message(Array(LARGE))
    place_state(tmp_path, state)
    content = RecordDict({"arrays": state["arrays"]})
    (of_message,) = SharedArrays(tmp_path).place(content)
    (of_state,) = files_of_state(state)
    assert of_message != of_state
    arrived, _ = sent(content)
    assert not files_of_state(arrived)
    np.testing.assert_array_equal(arrived["arrays"]["0"].numpy(), LARGE)


def test_what_a_state_does_not_have_any_more_stays_readable_for_who_holds_it(
    tmp_path: Path,
) -> None:
    state = message(Array(LARGE))
    place_state(tmp_path, state)
    before, _ = sent(state)
    held = copy.deepcopy(before["arrays"])["0"], before["arrays"]["0"]
    place_state(tmp_path, RecordDict(), before)
    for path in files_of_state(before):
        os.unlink(path)
    shared_arrays._mapped.cache_clear()
    for array in held:
        np.testing.assert_array_equal(array.numpy(), LARGE)
    again = RecordDict({"arrays": before["arrays"]})  # in the state of another node, say
    place_state(tmp_path, again)
    assert {Path(path).name for path in files_of_state(again)} == set(os.listdir(tmp_path))
    np.testing.assert_array_equal(sent(again)[0]["arrays"]["0"].numpy(), LARGE)


def test_what_was_read_of_a_state_stays_as_it_was_when_its_file_is_written_again(
    tmp_path: Path,
) -> None:
    state = message(Array(LARGE))
    place_state(tmp_path, state)
    (path,) = files_of_state(state)
    place_state(tmp_path, RecordDict())  # another message: the process forgets what it wrote
    array = sent(state)[0]["arrays"]["0"]
    read, spare = array.values, [path]
    place_state(tmp_path, message(LocalArray(LARGE + 1)), None, spare)
    assert not spare
    assert not Path(path).exists()
    for values in (read, array.values):
        np.testing.assert_array_equal(values, LARGE)


def test_a_state_that_nobody_reads_is_not_opened(tmp_path: Path) -> None:
    state = message(Array(LARGE))
    place_state(tmp_path, state)
    (path,) = files_of_state(state)
    os.unlink(path)
    arrived, _ = sent(state)
    place_state(tmp_path, RecordDict(dict(arrived)), arrived)
    assert files_of_state(arrived) == {path}


def test_an_array_of_named_columns_keeps_its_names(tmp_path: Path) -> None:
    values = np.zeros(5000, [("a", np.int32), ("b", np.float64)])
    content, state = message(LocalArray(values)), message(LocalArray(values))
    SharedArrays(tmp_path).place(content)
    place_state(tmp_path, state)
    for each in (content, state):
        assert sent(each)[0]["arrays"]["0"].numpy().dtype == values.dtype


def test_where_there_is_no_room_arrays_travel_with_the_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    full_state = message(Array(LARGE))
    place_state(tmp_path, full_state)
    monkeypatch.setattr(shared_arrays, "write_all", full)
    content, state = message(Array(LARGE)), message(LocalArray(LARGE))
    from_state = RecordDict({"arrays": full_state["arrays"]})
    for each in (content, from_state):
        assert SharedArrays(tmp_path).place(each) == []
    place_state(tmp_path, state)
    assert not files_of_state(state)
    assert not files_of_state(from_state)
    assert {str(path) for path in tmp_path.iterdir()} == files_of_state(full_state)
    assert caplog.text.count("No space left on device") == 1
    for each in (content, state, from_state):
        np.testing.assert_array_equal(sent(each)[0]["arrays"]["0"].numpy(), LARGE)


@pytest.fixture
def victim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "victim"
    folder.mkdir()
    monkeypatch.setenv(VICTIM, str(folder))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "shared"))
    return folder


def train(folder: Path, workers: int) -> Any:
    folder.mkdir()
    return run_strategy(
        UDP(
            privacy=UserLevel(),
            loop=LoopOptions(clients=6, seed=1, experiment_id="e"),
            fraction_evaluate=0,
            min_available_nodes=2,
        ),
        "dying_app:app",
        nodes=2,
        workers=workers,
        state=folder,
        insecure_seed=1,
        arrays=record({"w": LARGE.astype(np.float32)}),
        timeout=300,
    )


def charges(folder: Path) -> list[int]:
    return [
        len(list(Ledger(folder / f"{client}.ledger", data_set=str(client)).entries()))
        for client in range(6)
    ]


def unanswered(folder: Path) -> list[int]:
    return [
        len(Ledger(folder / f"{client}.ledger", data_set=str(client)).unanswered())
        for client in range(6)
    ]


def test_a_worker_that_dies_in_a_cohort_is_replaced_and_nobody_is_charged_twice(
    tmp_path: Path, victim: Path
) -> None:
    plain = train(tmp_path / "plain", 0)
    (victim / "once").write_text("4")  # after others of its cohort have answered and paid
    result = train(tmp_path / "killed", 2)
    assert not (victim / "once").exists()
    assert same(plain.arrays, result.arrays)
    assert [line["accumulated"] for line in result.history[1:]] == [6, 6, 6]
    assert charges(tmp_path / "plain") == charges(tmp_path / "killed") == [3] * 6
    assert unanswered(tmp_path / "killed") == [0] * 6


def test_a_cohort_that_kills_its_worker_each_time_is_refused_and_the_others_go_on(
    tmp_path: Path, victim: Path
) -> None:
    (victim / "always").write_text("4")
    result = train(tmp_path / "killed", 2)
    lines = result.history[1:]
    assert [line["accumulated"] for line in lines] == [3, 3, 3]
    assert [line["refused"] for line in lines] == [{"error": 3}] * 3
    counts = charges(tmp_path / "killed")
    assert [counts[client] for client in (1, 3, 5)] == [3, 3, 3]
    missing = unanswered(tmp_path / "killed")
    assert missing == [0, 0, 0, 0, counts[4], 0]
    assert counts[4] == 3


def mixed(workers: int) -> tuple[Any, list[int]]:
    """Run MSPDQ, whose clients keep three vectors each between its steps; count their files."""
    counts: list[int] = []

    def counted(grid: Any) -> None:
        pull = grid.pull_messages

        def pulled(message_ids: Any) -> Any:
            replies = pull(message_ids)
            counts.append(len(list(Path(grid._pool._folder).glob("tmp*"))))
            return replies

        grid.pull_messages = pulled

    result = run_strategy(
        MSPDQ(
            loop=LoopOptions(clients=6, seed=1, experiment_id="e"),
            mixing_rounds=3,
            fraction_evaluate=0,
            min_available_nodes=2,
        ),
        "dying_app:mixing",
        nodes=2,
        workers=workers,
        insecure_seed=1,
        arrays=record({"w": LARGE.astype(np.float32)}),
        timeout=300,
        before=counted if workers else None,
    )
    return result, counts


def test_a_worker_that_dies_between_two_steps_takes_no_state_with_it(victim: Path) -> None:
    plain, _ = mixed(0)
    (victim / "mix").touch()
    result, files = mixed(2)
    assert not (victim / "mix").exists()
    assert same(plain.arrays, result.arrays)
    assert [line["accumulated"] for line in result.history[1:]] == [6, 6, 6]
    assert max(files) >= 6  # one for each client
    assert max(files) <= 12  # before and after a step
    assert files[-1] == 0


def asked(grid: InlineGrid, work: str) -> str:
    (node,) = grid.get_node_ids()
    content = RecordDict({"config": ConfigRecord({"work": work})})
    with acting_as_server(grid.run_id):
        (message_id,) = grid.push_messages([Message(content, node, "query.state")])
    return message_id


def answered(grid: InlineGrid, message_id: str) -> float:
    (reply,) = grid.pull_messages([message_id])
    assert not reply.has_error(), reply.error
    return float(reply.content["metrics"]["sum"])


def files(grid: InlineGrid) -> int:
    return len(list(Path(grid._pool._folder).glob("tmp*")))


def test_a_state_lasts_until_the_last_question_that_went_with_it_is_answered() -> None:
    with closing(InlineGrid("keeping_app:app", 1, workers=1)) as grid:
        assert answered(grid, asked(grid, "keep 1")) == LARGE.size
        # Both go with the state of now; the one that drops it is pulled first.
        reading, dropping = asked(grid, "read"), asked(grid, "drop")
        assert answered(grid, dropping) == 0
        assert files(grid) == 1
        assert answered(grid, reading) == LARGE.size
        for number in (2, 3, 4):  # what "read" left is what counts: it came last
            asked(grid, "read")  # and nobody ever pulls the answer
            assert answered(grid, asked(grid, f"keep {number}")) == number * LARGE.size
        assert files(grid) <= 4  # of each that is not answered the one that it went with
        assert answered(grid, asked(grid, "read")) == 4 * LARGE.size


def test_questions_go_with_the_state_of_when_they_came() -> None:
    with closing(InlineGrid("keeping_app:app", 1, workers=1)) as grid:
        answered(grid, asked(grid, "keep 1"))
        # More than the process takes in advance: the last ones are sent after the first answers.
        ids = [asked(grid, work) for work in ("keep 2", "keep 3", "read", "keep 4", "read")]
        sums = [answered(grid, message_id) / LARGE.size for message_id in ids]
        assert sums == [2, 3, 1, 4, 1]
        assert files(grid) == 1


def test_an_app_may_hold_what_its_state_does_not_have_any_more() -> None:
    with closing(InlineGrid("keeping_app:app", 1, workers=1)) as grid:
        answered(grid, asked(grid, "keep 2"))
        answered(grid, asked(grid, "hold"))
        assert answered(grid, asked(grid, "drop")) == 0
        assert files(grid) == 0
        assert answered(grid, asked(grid, "put back")) == 2 * LARGE.size
        assert answered(grid, asked(grid, "read")) == 2 * LARGE.size


def test_what_an_app_holds_stays_as_it_was_when_its_file_is_written_again() -> None:
    with closing(InlineGrid("keeping_app:app", 1, workers=1)) as grid:
        answered(grid, asked(grid, "keep 2"))
        answered(grid, asked(grid, "hold"))
        for number in (3, 4, 5):
            answered(grid, asked(grid, f"keep {number}"))
            spare = list(Path(grid._pool._folder).glob("spare-*"))
            assert len(spare) == 1  # of the state before; what it was itself is the new one
        assert answered(grid, asked(grid, "put back")) == 2 * LARGE.size
        assert answered(grid, asked(grid, "read")) == 2 * LARGE.size
    assert not Path(spare[0]).exists()


def test_a_pool_serves_one_grid_after_the_other_and_keeps_nothing_of_the_first() -> None:
    pool = WorkerPool("keeping_app:app", 1)
    with closing(pool):
        with closing(InlineGrid("keeping_app:app", 1, pool=pool)) as grid:
            assert answered(grid, asked(grid, "keep 1")) == LARGE.size
            assert answered(grid, asked(grid, "keep 1")) == LARGE.size
            for _ in range(4):  # nobody pulls the answers
                asked(grid, "read")
        assert files(grid) == 0
        assert not list(Path(pool._folder).glob("spare-*"))
        with closing(InlineGrid("keeping_app:app", 1, pool=pool)) as grid:
            assert answered(grid, asked(grid, "read")) == 0
            assert answered(grid, asked(grid, "keep 2")) == 2 * LARGE.size


def test_the_folder_of_the_arrays_goes_with_the_grid() -> None:
    grid = InlineGrid("dying_app:app", 1, workers=1)
    folder = Path(grid._pool._folder)
    assert folder.is_dir()
    grid.close()
    assert not folder.exists()


def test_a_folder_that_a_killed_process_left_behind_is_removed_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_arrays, "_SOON", 0.0)
    code = (
        "import os, signal\n"
        "from flwr_privacy.simulations.engines.inline.shared_arrays import folder_for_arrays\n"
        "with folder_for_arrays() as folder:\n"
        "    (folder / 'arrays').write_bytes(b'x')\n"
        "    print(folder, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    left = Path(killed.stdout.strip())
    assert left.is_dir()
    with shared_arrays.folder_for_arrays() as mine:
        shared_arrays._remove_left_behind(left.parent)
        assert not left.exists()
        assert mine.is_dir()
    assert not mine.exists()


def test_workers_end_with_a_process_that_is_killed() -> None:
    code = (
        "import os, signal\n"
        "from flwr_privacy.simulations.engines.inline.workers import WorkerPool\n"
        "pool = WorkerPool('dying_app:app', 2)\n"
        "for worker in pool._workers:\n"
        "    worker._executor.submit(os.getpid).result()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        killed.communicate(timeout=120)  # until nobody has its output open: its workers have
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(killed.pid, signal.SIGKILL)
    assert killed.returncode == -signal.SIGKILL
