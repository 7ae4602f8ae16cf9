"""Tensors, Datasets and DataLoaders give the same training as their arrays, or are refused."""

from typing import Any

import numpy as np
import pytest
import torch
from apps import model_of, run_strategy
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from record_models import records
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from flwr_privacy.clients import UDPClientApp
from flwr_privacy.clients.certificates.per_record_steps import PerRecordPlan, asked
from flwr_privacy.clients.node.rehearsal import rehearsed
from flwr_privacy.clients.torch import (
    evaluate_per_record,
    get_arrays,
    initialise,
    mlp,
    train_per_record,
    train_poisson,
)
from flwr_privacy.errors import DataError, InvalidParameterError
from flwr_privacy.pipeline.mechanism import NoFactsError
from flwr_privacy.pipeline.operator_checks import warn_once
from flwr_privacy.privacy.randomness import SecureRandom
from flwr_privacy.strategies import UDP, LoopOptions, RecordLevel

FEATURES, LABELS = records(shape=(6,))
PAIRS = TensorDataset(torch.tensor(FEATURES), torch.tensor(LABELS))


def doubled(rows: list[Any]) -> tuple[Any, Any]:
    """A collate function: the rows' features twice, which halves them before."""
    return torch.stack([row["x"] for row in rows]) * 2, torch.stack([row["y"] for row in rows])


BACKWARDS = range(len(PAIRS))[::-1]
ROWS = [{"x": x / 2, "y": y} for x, y in PAIRS]
FORMS = {
    "tensors": (torch.tensor(FEATURES), torch.tensor(LABELS)),
    "tensors of a graph": (torch.tensor(FEATURES, requires_grad=True), torch.tensor(LABELS)),
    "dataset": (PAIRS,),
    "list of pairs": (list(zip(FEATURES, LABELS, strict=True)),),
    "subset": (Subset(TensorDataset(*(part.flip(0) for part in PAIRS.tensors)), BACKWARDS),),
    "parts": (
        ConcatDataset(
            [
                Subset(PAIRS, range(3)),
                Subset(Subset(PAIRS, range(1, len(PAIRS))), range(2, len(PAIRS) - 1)),
            ]
        ),
    ),
    "loader": (DataLoader(PAIRS, batch_size=4),),
    "shuffled": (DataLoader(PAIRS, batch_size=4, shuffle=True),),
    "collated": (DataLoader(ROWS, batch_size=4, collate_fn=doubled),),
    "workers": (DataLoader(PAIRS, batch_size=4, num_workers=1),),
}


def model() -> torch.nn.Module:
    return initialise(lambda: mlp([6, 4, 3]), 1)


def stepped(*given: Any) -> tuple[dict[str, Any], Any]:
    own = model()
    step = train_per_record(
        own, *given, clipping_norm=0.7, learning_rate=0.3, epochs=2, batch_size=5
    )
    return get_arrays(own), step


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_steps_of_its_arrays(form: str) -> None:
    expected, certificate = stepped(FEATURES, LABELS)
    found, step = stepped(*FORMS[form])
    assert step == certificate
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name])


def test_evaluations_and_poisson_batches_take_them_too() -> None:
    wanted = {"learning_rate": 0.3, "sampling_rate": 0.5, "steps": 2}
    loss = evaluate_per_record(model(), FEATURES, LABELS, loss_cap=1.0)
    for form in ("tensors", "dataset", "loader"):
        assert evaluate_per_record(model(), *FORMS[form], loss_cap=1.0) == loss
        assert train_poisson(model(), *FORMS[form], **wanted).records == len(LABELS)


def test_what_a_loader_sets_without_effect_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    for _ in range(2):
        stepped(DataLoader(PAIRS, batch_size=4, shuffle=True))
    (text,) = [line.message for line in caplog.records]
    assert text.startswith("the DataLoader's batch_size=4, shuffle=True has no effect: the scheme")


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(ROWS)


EVERY = "every record of its Dataset once"
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "subset": ((DataLoader(PAIRS, sampler=SubsetRandomSampler([0, 1])),), EVERY),
    "fewer": ((DataLoader(PAIRS, sampler=RandomSampler(PAIRS, num_samples=3)),), EVERY),
    "first": ((DataLoader(PAIRS, sampler=SequentialSampler(range(2))),), EVERY),
    "again": ((DataLoader(PAIRS, sampler=RandomSampler(PAIRS, replacement=True)),), EVERY),
    "drop_last": ((DataLoader(PAIRS, batch_size=4, drop_last=True),), "drop_last=True.*" + EVERY),
    "no batches": ((DataLoader(PAIRS, batch_size=None),), "without automatic batches"),
    "own batches": (
        (DataLoader(PAIRS, batch_sampler=BatchSampler(SubsetRandomSampler([0]), 1, False)),),
        "with batches of its own",
    ),
    "endless": ((DataLoader(Endless()),), "'Endless'.*a Dataset with a length"),
    "repeated": ((Subset(PAIRS, [0, 1, 1]),), "a Subset that repeats records"),
    "repeated from the end": (
        (DataLoader(Subset(PAIRS, [0, len(PAIRS) - 1, -1])),),
        "a Subset that repeats records",
    ),
    "repeated below": ((Subset(Subset(PAIRS, [0, 1, 0]), [0, 2]),), "a Subset that repeats"),
    "twice": ((ConcatDataset([PAIRS, PAIRS]),), "a ConcatDataset that repeats records"),
    "overlapping": (
        (DataLoader(ConcatDataset([Subset(PAIRS, [0, 1]), Subset(PAIRS, [1, 2])])),),
        "a ConcatDataset that repeats records",
    ),
    "nothing": ((None,), "'NoneType'"),
    "labels": ((FEATURES,), "labels = 'NoneType'"),
    "two labels": ((PAIRS, LABELS), "nothing beside a TensorDataset"),
    "bfloat16": ((torch.tensor(FEATURES).bfloat16(), LABELS), "'bfloat16'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_chooses_or_is_no_place_of_records_is_refused_before_a_charge(case: str) -> None:
    given, text = REFUSED[case]
    with pytest.raises(InvalidParameterError, match=text):
        stepped(*given)
    plan = PerRecordPlan(
        clipping_norm=1.0,
        learning_rate=0.1,
        sampling_rate=1.0,
        epochs=1,
        batch_size=None,
        bound="general",
        records=None,
    )
    with asked(plan, SecureRandom()) as request, pytest.raises(InvalidParameterError, match=text):
        rehearsed("train", lambda: train_per_record(model(), *given), lambda: request.certificate)


def test_a_record_that_is_unlike_the_others_fails_as_the_apps_own_reading_would() -> None:
    """What depends on data is no refusal with a text: the pipeline charges for it."""
    odd = [*zip(FEATURES, LABELS, strict=True), (FEATURES[0][:2], LABELS[0])]
    for records_given, text in (
        (odd, "one shape"),
        (ROWS, "a record is a dict: it must be a pair"),
        ([], "arrays of shape"),
    ):
        with pytest.raises(DataError, match=text):
            stepped(records_given)
        with pytest.raises(NoFactsError):
            rehearsed("train", lambda given=records_given: stepped(given), lambda: None)


def record_level(*given: Any) -> tuple[dict[str, Any], list[int]]:
    """Train two rounds at record level; return the model and how often each client was charged."""
    app = UDPClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        own = model()
        own.load_state_dict(message.content["arrays"].to_torch_state_dict())
        train_per_record(own, *given)
        content = {"arrays": ArrayRecord(own.state_dict()), "metrics": MetricRecord({"n": 1})}
        return Message(RecordDict(content), reply_to=message)

    strategy = UDP(
        privacy=RecordLevel(epsilon=8.0, learning_rate=0.5),
        weighted_by_key="n",
        loop=LoopOptions(seed=1, experiment_id="e"),
    )
    arrays = ArrayRecord(model().state_dict())
    result = run_strategy(strategy, app, arrays=arrays, num_rounds=2, insecure_seed=3)
    charged = [line["charged"] for line in result.history]
    return model_of(result.arrays), charged


def test_a_loader_trains_and_is_charged_under_a_scheme_as_its_arrays_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected, charged = record_level(FEATURES, LABELS)
    for form in ("tensors", "shuffled"):
        found, also = record_level(*FORMS[form])
        assert also == charged
        for name, array in found.items():
            np.testing.assert_array_equal(array, expected[name])
    assert charged == [0, 4, 8]
    assert record_level(DataLoader(PAIRS, batch_size=4, drop_last=True))[1] == [0, 0, 0]
    assert "features = 'a DataLoader with drop_last=True': expected every record" in caplog.text
