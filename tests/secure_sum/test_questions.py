"""A server that asks one client for something else, to find it in the sum, has no sum."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from apps import MODEL, make, message_app, model_of, record, run_strategy, same
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from flwr_privacy.clients import SecureSumClient, as_mod
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.strategies import FedAvg
from flwr_privacy.wire.message import TRAIN

VICTIM = "3"
OTHER = {name: np.asarray(array + 1, array.dtype) for name, array in MODEL.items()}


class Asking(FedAvg):
    """Changes the question to one client."""

    lie: Callable[[RecordDict], RecordDict]

    def put(self, server_round: int, phase: str, *rest: Any, **options: Any) -> Any:
        messages = super().put(server_round, phase, *rest, **options)
        assigned = rest[1]
        for message in messages:
            if phase == TRAIN and assigned[message.metadata.dst_node_id] == [VICTIM]:
                message.content = type(self).lie(message.content)
        return messages


def asked(lie: Callable[[RecordDict], RecordDict]) -> Any:
    strategy = type("Lying", (Asking,), {"lie": staticmethod(lie)})
    secure_sum = SecureSum(threshold=4, value_range=8.0)
    app = message_app([as_mod(SecureSumClient)])
    return run_strategy(
        make(strategy, seed=3, secure_sum=secure_sum), app, nodes=5, num_rounds=1, serialise=True
    )


def put(content: RecordDict, **records: Any) -> RecordDict:
    return RecordDict({**content, **records})


def reversed_arrays(content: RecordDict) -> RecordDict:
    arrays = content["arrays"]
    return put(content, arrays=ArrayRecord({name: arrays[name] for name in reversed(list(arrays))}))


@pytest.mark.parametrize(
    "lie",
    [
        lambda content: put(content, arrays=record(OTHER)),
        lambda content: put(content, config=ConfigRecord({"server-round": 1, "lr": 1.0})),
        lambda content: put(content, config=MetricRecord({"server-round": 1})),
        lambda content: put(content, more=ConfigRecord()),
        lambda content: RecordDict({"other": record(OTHER), **content}),
        reversed_arrays,
    ],
)
def test_a_question_of_its_own_to_one_client_leaves_no_sum(lie: Any, caplog: Any) -> None:
    result = asked(lie)
    assert result.history[1]["skipped"]
    assert "somebody sent a wrong one" in caplog.text
    assert same(result.arrays, record())


@pytest.mark.parametrize("name", ["x@3", "arrays@3@3"])
def test_records_for_others_are_refused_and_the_sum_is_that_of_the_rest(name: str) -> None:
    result = asked(lambda content: RecordDict({name: record(OTHER), **content}))
    assert result.history[1]["refused"] == {"error": 1}
    assert result.history[1]["scheme"]["sum_opened"] == 4
    without = asked(lambda content: put(content, **{"x@3": ConfigRecord()}))
    assert same(result.arrays, without.arrays)


def test_the_same_question_to_all_has_its_sum() -> None:
    result = asked(lambda content: content)
    assert result.history[1]["scheme"]["sum_opened"] == 5
    assert not np.array_equal(model_of(result.arrays)["0"], MODEL["0"])
