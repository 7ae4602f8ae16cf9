"""Builds strategies from flat keys, as the command line and experiment files use them.

``--set seed=1 --set epsilon=2`` is ``loop=LoopOptions(seed=1)`` and ``epsilon=2`` of a strategy:
which object takes a key follows from the fields of the dataclasses.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, TypeVar, get_args, get_type_hints

from flwr_privacy.acfl.options import (
    DataBounds,
    Exact,
    NoisedRecords,
    NoisedSetup,
    SetupVariances,
    Weighting,
)
from flwr_privacy.central_dp.correlated.options import BLT, BandedMF, TreeNoise
from flwr_privacy.central_dp.options import (
    AUTO,
    AdaptiveClipping,
    DistributedNoise,
    NoiseCommittee,
    ServerNoise,
)
from flwr_privacy.errors import InvalidParameterError, KeywordError, check_choice, check_integer
from flwr_privacy.evaluation import PrivateEvaluation
from flwr_privacy.fedvs.options import (
    VAFL,
    ColumnFeatures,
    IgnoreStragglers,
    LagrangeCoding,
    Quantisation,
    WaitForAll,
    WaitNoised,
)
from flwr_privacy.keywords import nearest, option_types
from flwr_privacy.m2fdp import (
    AdaptiveControl,
    DeviceNoise,
    EventSchedule,
    LemmaDrift,
    NoNoise,
    PaperNoise,
    RecordNoise,
    SmoothDrift,
    TierTree,
    WorstDrift,
)
from flwr_privacy.mspdq import TheorySteps
from flwr_privacy.strategies import LoopOptions, SchemeStrategy
from flwr_privacy.udp import (
    DPSGD,
    ClientLosses,
    Discounting,
    LinearNoise,
    PlateauNoise,
    RecordLevel,
    UserLevel,
)

__all__ = ["choices_of", "flat_keys", "keywords_of", "strategy_of"]

S = TypeVar("S", bound=SchemeStrategy)

_TREE = ("fanouts", "p")
"""Keys that make a tree, in place of the name of its file under ``tree``."""


@dataclass(frozen=True)
class Choice:
    """A field of a strategy or of its options that takes an object, and the keys that make one.

    Parameters
    ----------
    field : str
        Name of the field.
    key : str
        The key that chooses the kind of the object; "" where there is one kind.
    kinds : dict
        The kinds by that key's values.
    required : str
        What to say where the key is missing and has no default.
    words : tuple of (str, Any)
        Values of the key that make no object, and what the field is then.
    """

    field: str
    key: str
    kinds: dict[str, Any]
    required: str = ""
    words: tuple[tuple[str, Any], ...] = ()

    def usual(self, kind: type) -> str | None:
        """Return which kind of object the field of a class has by default, if there is one."""
        factory = _field(kind, self.field).default_factory
        return next((value for value, option in self.kinds.items() if option is factory), None)


_CHOICES = (
    Choice("loop", "", {"": LoopOptions}),
    Choice(
        "privacy",
        "unit",
        {"user": UserLevel, "record": RecordLevel, "dp-sgd": DPSGD},
        "unit=user (all data of a client is protected), unit=record (one record is) or unit=dp-sgd "
        "(one record is, by noise in every step of the clients' own loop)",
    ),
    Choice(
        "privacy",
        "noise",
        {
            "record": NoisedRecords,
            "paper": NoisedSetup,
            "variances": SetupVariances,
            "none": Exact,
        },
    ),
    Choice("weighting", "", {"": Weighting}),
    Choice("data", "", {"": DataBounds}),
    Choice(
        "privacy",
        "unit",
        {"device": DeviceNoise, "record": RecordNoise, "paper": PaperNoise, "none": NoNoise},
        "unit=device (all data of a device is protected), unit=record (one record is), unit=paper "
        "(the paper's noise) or unit=none",
    ),
    Choice("privacy", "noise", {"distributed": DistributedNoise, "server": ServerNoise}),
    Choice(
        "correlated",
        "correlated",
        {kind.name: kind for kind in (BandedMF, BLT, TreeNoise)},
        words=((AUTO, AUTO), ("none", None)),
    ),
    Choice("committee", "", {"": NoiseCommittee}),
    Choice("data", "", {"": ColumnFeatures}),
    Choice("coding", "", {"": LagrangeCoding}),
    Choice("quantisation", "", {"": Quantisation}),
    Choice(
        "method",
        "method",
        {kind.name: kind for kind in (WaitForAll, IgnoreStragglers, VAFL, WaitNoised)},
    ),
    Choice("clipping", "", {"": AdaptiveClipping}),
    Choice(
        "schedule",
        "schedule",
        {"discounting": Discounting, "linear": LinearNoise, "plateau": PlateauNoise},
    ),
    Choice("schedule", "", {"": EventSchedule}),
    Choice(
        "validation",
        "validation",
        {"clients": ClientLosses},
        "'clients', or a function on the server",
    ),
    Choice(
        "clean_events",
        "clean_events",
        {"worst": WorstDrift, "smooth": SmoothDrift, "lemma": LemmaDrift},
    ),
    Choice(
        "evaluation",
        "evaluation",
        {"private": PrivateEvaluation},
        "'private', or a table such as {every=2,share=0.1}",
    ),
    Choice("control", "control", {"adaptive": AdaptiveControl}),
    Choice("mixing_rounds", "mixing_rounds", {"theory": TheorySteps}),
)


def flat_keys(kind: type) -> list[str]:
    """Return all keys that `strategy_of` takes for a strategy."""
    keys: list[str] = []
    for field in fields(kind):
        choice = choices_of(kind).get(field.name)
        if choice is None:
            keys += [field.name] if field.init else []
            continue
        keys += [choice.key] if choice.key else []
        keys += [own for option in choice.kinds.values() for own in flat_keys(option)]
    return list(dict.fromkeys([*keys, *(_TREE if "tree" in keys else ())]))


def strategy_of(kind: type[S], values: Mapping[str, Any]) -> S:
    """Return a strategy with parameters that are given by flat keys.

    Raises
    ------
    InvalidParameterError
        If a key is unknown, a value is not allowed, or two do not go together.
    """
    return kind(**keywords_of(kind, values))


def keywords_of(kind: type[SchemeStrategy], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of a strategy for parameters that are given by flat keys.

    Raises
    ------
    InvalidParameterError
        If a key is unknown, or the value of an option is not allowed.
    """
    given, known = _listed(kind, values), flat_keys(kind)
    for key in given:
        if key not in known and key not in choices_of(kind):
            raise KeywordError(kind.__name__, key, nearest(key, known))
    chosen = _options(kind, given)
    if "tree" in known:
        chosen["tree"] = _tree_of(given)
    for key in given:
        if key not in {field.name for field in fields(kind)}:
            raise KeywordError(kind.__name__, key, _elsewhere(kind, key))
    return {**given, **chosen}


def _listed(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters in which one name stands for the list of it, where lists of names go."""
    lists = {name for name, hint in get_type_hints(kind).items() if Sequence[str] in _parts(hint)}
    listed = dict(values)
    for name in lists & values.keys():
        value = values[name]
        if isinstance(value, str):
            listed[name] = [value]
        elif value is not None and not isinstance(value, list | tuple):
            raise InvalidParameterError(name, value, "names, as 1.bias,3.bias")
    return listed


def _parts(hint: Any) -> tuple[Any, ...]:
    return (hint, *get_args(hint))


def choices_of(kind: type) -> dict[str, Choice]:
    """Return the fields of a class that take objects, by name."""
    if kind is LoopOptions:
        return {}
    taken = option_types(kind)
    return {c.field: c for c in _CHOICES if set(c.kinds.values()) <= set(taken.get(c.field, ()))}


def _options(kind: type, given: dict[str, Any]) -> dict[str, Any]:
    """Return the options that some fields take, from what is given, which loses their keys."""
    chosen: dict[str, Any] = {}
    for name, choice in choices_of(kind).items():
        if isinstance(given.get(name), Mapping) and len(choice.kinds) == 1:
            (option,) = choice.kinds.values()
            chosen[name] = option(**given.pop(name))  # as a table of its parameters
            continue
        if name in given and not isinstance(given[name], str | bool | None):
            chosen[name] = given.pop(name)  # as an object
            continue
        value = given.pop(choice.key, None) if choice.key else ""
        if value is None:
            value = choice.usual(kind)
        if value is None and _field(kind, name).default is not MISSING:
            continue
        if value is None:
            raise InvalidParameterError(choice.key, None, choice.required)
        words = dict(choice.words)
        if check_choice(choice.key, value, {**choice.kinds, **words}) in words:
            chosen[name] = words[value]
            continue
        option = choice.kinds[value]
        optional = not choice.key and _field(kind, name).default is None
        if optional and given.keys().isdisjoint(flat_keys(option)):
            continue
        own = _options(option, given)
        own |= {f.name: given.pop(f.name) for f in fields(option) if f.name in given}
        if option is EventSchedule and "events" in own:
            own["events"] = _events_of(own["events"])
        chosen[name] = option(**own)
    return chosen


def _field(kind: Any, name: str) -> "Field[Any]":
    return next(field for field in fields(kind) if field.name == name)


def _elsewhere(kind: type, key: str) -> str:
    """Return with which choices a strategy has a key, where it has it not with those made."""
    having = [
        f"{choice.key}={value}"
        for owner in _owners(kind)
        for choice in choices_of(owner).values()
        for value, option in choice.kinds.items()
        if key in {field.name for field in fields(option)}
    ]
    return f"only with {' or '.join(dict.fromkeys(having))}"


def _owners(kind: type) -> Iterator[type]:
    """Return a class, and all kinds of objects that it may have, at any depth."""
    yield kind
    for choice in choices_of(kind).values():
        for option in choice.kinds.values():
            yield from _owners(option)


def _events_of(events: Any) -> dict[int, Any]:
    """Return local events by tier, from a period at tier 1 or a table with tiers as text."""
    if not isinstance(events, Mapping):
        return {} if events is None else {1: check_integer("events", events, minimum=1)}
    try:
        return {int(tier): steps for tier, steps in events.items()}
    except ValueError:
        raise InvalidParameterError("events", dict(events), "numbers of tiers") from None


def _tree_of(given: dict[str, Any]) -> TierTree:
    """Return the tree that ``fanouts`` and ``p`` make, or that lies in a file."""
    tree, fanouts, p = given.get("tree"), given.pop("fanouts", None), given.pop("p", None)
    if (fanouts is None) == (tree is None):
        raise InvalidParameterError(
            "fanouts", fanouts, "the tree of aggregators: either `fanouts` or `tree`"
        )
    if fanouts is not None:
        return TierTree.of_fanouts(fanouts, p=p)
    if p is not None:
        raise InvalidParameterError("p", p, "nothing beside `tree`, which says who is trusted")
    return tree if isinstance(tree, TierTree) else TierTree.read(str(tree))
