"""Constructors are explicit, and a wrong keyword is explained."""

import dataclasses
import inspect
import re
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from vertical import LinearServerModel

from flwr_privacy import strategies
from flwr_privacy.errors import InvalidParameterError, KeywordError, check_integer, check_number
from flwr_privacy.m2fdp import TierTree
from flwr_privacy.strategies import (
    M2FDP,
    UDP,
    AdaptiveControl,
    CentralDP,
    ClientLosses,
    DeviceNoise,
    Discounting,
    FedAvg,
    FedVS,
    LoopOptions,
    NbAFL,
    NoNoise,
    PaperNoise,
    RecordLevel,
    RecordNoise,
    SchemeStrategy,
    SplitVFL,
    UserLevel,
)

TREE = TierTree.of_fanouts((2, 2), p=1.0)
EXPORTED = [getattr(strategies, name) for name in strategies.__all__]
STRATEGIES = [
    kind for kind in EXPORTED if isinstance(kind, type) and issubclass(kind, SchemeStrategy)
]


@pytest.mark.parametrize("kind", STRATEGIES)
def test_every_constructor_is_explicit_and_begins_as_flowers(kind: type) -> None:
    parameters = inspect.signature(kind).parameters
    assert not {p.kind for p in parameters.values()} & {
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    }
    flowers = inspect.signature(FlowerFedAvg).parameters
    assert list(parameters)[: len(flowers)] == list(flowers)
    for name, parameter in flowers.items():
        assert (parameters[name].kind, parameters[name].default) == (
            parameter.kind,
            parameter.default,
        )
    others = list(parameters.values())[len(flowers) :]
    assert {p.kind for p in others} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("kind", STRATEGIES)
def test_no_parameter_hides_a_method(kind: type) -> None:
    methods = {name for base in kind.__mro__[1:] for name, v in vars(base).items() if callable(v)}
    assert not methods & set(inspect.signature(kind).parameters)


@pytest.mark.parametrize(
    ("kind", "keywords", "message"),
    [
        (
            UDP,
            {"fraction_trian": 0.5},
            "^UDP has no 'fraction_trian': the nearest is 'fraction_train'",
        ),
        (
            UDP,
            {"seed": 1},
            r"^UDP has no 'seed': LoopOptions has it, as in UDP\(loop=LoopOptions\(seed=",
        ),
        (
            CentralDP,
            {"noise": "server"},
            r"^CentralDP has no 'noise': it is chosen by privacy=DistributedNoise\(\.\.\.\) or "
            r"privacy=ServerNoise\(\.\.\.\)$",
        ),
        (M2FDP, {"unit": "device"}, r"it is chosen by privacy=DeviceNoise\(\.\.\.\) or priv"),
        (UDP, {"sede": 1}, "^UDP has no 'sede': the nearest is 'seed'; LoopOptions has it"),
        (LoopOptions, {"dedline": 1.0}, "^LoopOptions has no 'dedline': the nearest is 'deadline'"),
        (
            UDP,
            {"epsilon": 8.0},
            "^UDP has no 'epsilon': UserLevel, RecordLevel and DPSGD have it, as in UDP",
        ),
        (UDP, {}, r"^UDP needs 'privacy': it is required, as UserLevel\(...\) or RecordLevel"),
        (UDP, {"privacy": "record"}, r"^privacy = 'record': expected UserLevel\(...\)"),
        (
            RecordLevel,
            {"learnig_rate": 1.0},
            "^RecordLevel has no 'learnig_rate': the nearest is 'l",
        ),
        (RecordLevel, {"epsilon": 1.0}, "^RecordLevel needs 'learning_rate': it is required"),
        (M2FDP, {}, r"^M2FDP needs 'tree': it is required, as TierTree\(...\)"),
        (
            M2FDP,
            {"tree": TREE},
            r"^M2FDP needs 'privacy': it is required, as DeviceNoise\(...\) or RecordNoise",
        ),
        (
            M2FDP,
            {"tree": TREE, "privacy": "record"},
            r"^privacy = 'record': expected DeviceNoise\(...\) or RecordNoise\(...\) or Paper",
        ),
        (
            M2FDP,
            {"steps": 20},
            r"^M2FDP has no 'steps': EventSchedule has it, as in M2FDP\(schedule=EventSch",
        ),
        (
            M2FDP,
            {"tree": TREE, "privacy": NoNoise(), "control": {"total_steps": 4}},
            r"^control = .*: expected AdaptiveControl\(...\) or None",
        ),
        (NoNoise, {"epsilon": 1.0}, "^NoNoise has no 'epsilon'"),
        (DeviceNoise, {"alpha": 1.0}, "^DeviceNoise has no 'alpha'"),
        (RecordNoise, {}, "^RecordNoise needs 'sampling_rate': it is required"),
        (PaperNoise, {"sampling_rate": 0.1}, "^PaperNoise needs 'alpha': it is required"),
        (
            DeviceNoise,
            {"smoothness": 0.1},
            r"^DeviceNoise has no 'smoothness': SmoothDrift has it, as in DeviceNoise\(clean_eve",
        ),
        (DeviceNoise, {"clean_events": True}, r"^clean_events = True: expected WorstDrift\(...\)"),
        (FedAvg, {"loop": {"seed": 1}}, r"^loop = \{'seed': 1\}: expected LoopOptions\(...\)"),
        (
            M2FDP,
            {"tree": "10,5", "privacy": DeviceNoise()},
            r"^tree = '10,5': expected TierTree\(...\)",
        ),
    ],
)
def test_a_wrong_keyword_is_explained(kind: Any, keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        kind(**keywords)


def test_it_is_explained_to_subclasses_too_and_is_a_type_error() -> None:
    class Own(FedAvg):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)

    class Plain(FedAvg):
        pass

    for kind in (Own, Plain):
        with pytest.raises(TypeError, match=f"^{kind.__name__} has no 'fraction_trian'"):
            kind(fraction_trian=0.5)
    assert Own(fraction_train=0.5).fraction_train == 0.5


REQUIRED: dict[type, dict[str, Any]] = {
    UDP: {"privacy": UserLevel()},
    RecordLevel: {"learning_rate": 1.0},
    M2FDP: {"tree": TREE, "privacy": DeviceNoise()},
    PaperNoise: {"sampling_rate": 0.1, "alpha": 1.0},
    AdaptiveControl: {"total_steps": 4, "max_steps": 2},
    NbAFL: {"clipping_norm": 1.0, "smallest_data": 10},
    **{kind: {"labels": [0, 1], "server_model": LinearServerModel()} for kind in (FedVS, SplitVFL)},
}
CHOICES = [
    (kind, name, get_args(part))
    for kind in (*STRATEGIES, UserLevel, RecordLevel, PaperNoise, AdaptiveControl)
    for name, hint in get_type_hints(kind).items()
    if name in inspect.signature(kind).parameters
    for part in (hint, *get_args(hint))
    if get_origin(part) is Literal
]


@pytest.mark.parametrize(("kind", "name", "choices"), CHOICES)
def test_what_the_type_allows_is_what_the_constructor_allows(
    kind: type, name: str, choices: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidParameterError) as error:
        kind(**{**REQUIRED.get(kind, {}), name: "?"})
    assert set(re.findall(r"'([^']+)'", str(error.value))) - {"?"} == set(choices)


@pytest.mark.parametrize("kind", [kind for kind in STRATEGIES if kind is not SchemeStrategy])
def test_a_copy_takes_the_options_of_the_first(kind: type) -> None:
    first = kind(min_train_nodes=5, **REQUIRED.get(kind, {}))
    copy = dataclasses.replace(first, min_evaluate_nodes=3)
    assert (copy.min_train_nodes, copy.min_evaluate_nodes) == (5, 3)
    assert copy._metrics_fns == {"train": None, "evaluate": None}


def test_a_keyword_is_explained_where_a_subclass_has_types_that_are_not_there() -> None:
    class Own(FedAvg):
        extra: "NotThere"  # noqa: F821

    with pytest.raises(KeywordError, match=r"^Own has no 'fraction_trian': the nearest is"):
        Own(fraction_trian=0.5)


def test_a_class_is_no_validation() -> None:
    with pytest.raises(InvalidParameterError, match=r"^validation = .*expected a function"):
        Discounting(validation=ClientLosses)


def test_numbers_of_numpy_are_those_of_python() -> None:
    loop = LoopOptions(clients=np.int64(5), deadline=np.float32(2.5))
    noise = RecordLevel(learning_rate=np.float32(0.5), local_epochs=np.int32(2))
    for options, name, value in (
        (loop, "clients", 5),
        (loop, "deadline", 2.5),
        (noise, "learning_rate", 0.5),
        (noise, "local_epochs", 2),
    ):
        assert getattr(options, name) == value
        assert type(getattr(options, name)) is type(value), name
    assert type(check_number("x", np.float32(0.5))) is float
    assert type(check_integer("x", np.uint8(3))) is int


@pytest.mark.parametrize("value", [np.bool_(True), np.float32("nan"), np.zeros(1), "1", 1j])
def test_what_is_no_finite_number_is_none_of_numpy_either(value: Any) -> None:
    with pytest.raises(InvalidParameterError, match=r"^x = .*expected a finite number"):
        check_number("x", value)
    with pytest.raises(InvalidParameterError, match=r"^x = .*expected an integer"):
        check_integer("x", value)
