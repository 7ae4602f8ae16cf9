"""The settings of a run: one frozen dataclass that travels as TOML.

The command line fills it, `flwr run` carries it to the app as one string (run configs know no
lists), and the run folder keeps it.
"""

import tomllib
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from typing import Any, get_type_hints

import tomli_w

from flwr_privacy.errors import InvalidParameterError, check_choice, check_integer, check_number
from flwr_privacy.evaluation.caps import WITHOUT_BUDGET
from flwr_privacy.secure_sum import SecureSum
from flwr_privacy.stragglers import StragglerModel

__all__ = [
    "PartitionSettings",
    "Settings",
    "TrainingSettings",
    "check_known",
    "flat_table",
    "parse_assignments",
    "with_scheme_parameters",
]

PARTITIONS = {
    "iid": "evenly at random (default)",
    "dirichlet": "label shares from a Dirichlet law with partition.alpha, by default 0.5",
    "shards": "label-sorted shards, partition.shards of them per client, by default 2",
    "labels": "partition.labels labels per client, by default 2",
    "label-sets": "the same with another set of labels for each client, each label equally often",
}
"""The kinds of partition, with one line for `--help`."""

GIVEN = "given"
"""The kind of partition of data that came client by client, as `flwr_privacy.simulate` takes it."""

SIZED = ("iid", "label-sets")
"""The partitions in which clients may be given sizes."""


@dataclass(frozen=True, kw_only=True)
class PartitionSettings:
    """How the training data is split over the clients.

    Parameters
    ----------
    kind : {"iid", "dirichlet", "shards", "labels", "label-sets", "given"}, default "iid"
        Evenly at random; label shares from a Dirichlet law; label-sorted shards; a fixed number
        of labels per client; the same with another set of labels for each client, each label with
        equally many clients, and equally many records of each; as the task has them, client by
        client.
    alpha : float, default 0.5
        Concentration of the Dirichlet law, > 0: the smaller, the more skewed.
    shards : int, default 2
        Shards per client.
    labels : int, default 2
        Labels per client.
    sizes : tuple of int, default ()
        Records of the first clients, repeated for the others; only for ``iid`` and ``label-sets``.
        By default as many as there are, evenly.
    """

    kind: str = "iid"
    alpha: float = 0.5
    shards: int = 2
    labels: int = 2
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_choice("partition.kind", self.kind, (*PARTITIONS, GIVEN))
        check_number("partition.alpha", self.alpha, minimum=1e-6)
        check_integer("partition.shards", self.shards, minimum=1)
        check_integer("partition.labels", self.labels, minimum=1)
        sizes = [self.sizes] if isinstance(self.sizes, int) else self.sizes
        if not isinstance(sizes, list | tuple):
            raise InvalidParameterError("partition.sizes", sizes, "integers, as 400,800")
        object.__setattr__(self, "sizes", tuple(sizes))  # TOML has lists
        for size in self.sizes:
            check_integer("partition.sizes", size, minimum=1)
        if self.sizes and self.kind not in SIZED:
            allowed = f"nothing with {self.kind}: sizes are for {' and '.join(SIZED)}"
            raise InvalidParameterError("partition.sizes", list(self.sizes), allowed)


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Local training of a client.

    Parameters
    ----------
    epochs : int, default 1
        Passes over the client's data per round.
    batch_size : int, default 32
        Records per step.
    learning_rate : float, default 0.1
        Step size of stochastic gradient descent in the first round.
    decay : float, default 0
        How it falls: in round t it is ``learning_rate / (1 + decay (t - 1))``.
    """

    epochs: int = 1
    batch_size: int = 32
    learning_rate: float = 0.1
    decay: float = 0.0

    def __post_init__(self) -> None:
        check_integer("training.epochs", self.epochs, minimum=1)
        check_integer("training.batch_size", self.batch_size, minimum=1)
        check_number("training.learning_rate", self.learning_rate, minimum=0)
        check_number("training.decay", self.decay, minimum=0)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What one run trains, and how.

    Parameters
    ----------
    scheme, task : str
        Names from the registries (`flwr_privacy.simulations.settings.schemes`, `.tasks`).
    clients : int, optional
        Number of clients of the federation; by default one per node.
    per_round : int, optional
        Clients asked in each round; by default all.
    rounds : int, default 10
        Learning rounds.
    seed : int, default 0
        Root of every seed of sampling, data, initialisation, training and stragglers.
    fraction_evaluate : float, default 0.0
        Fraction of the clients that evaluate the model on their own data after each round.
    deadline : float, optional
        Seconds after which a round goes on without the missing answers (virtual seconds where
        stragglers are simulated).
    quorum : int, optional
        Number of answers after which a round goes on.
    data_root : str, optional
        Folder with the data sets that no library brings.
    train_records, test_records : int, optional
        Records to train on and to evaluate on, drawn at random; by default all.
    validation_records : int, optional
        Records that are drawn out of the training records before those are split over the clients,
        and that the server holds as public ones; by default none.
    partition, training : PartitionSettings, TrainingSettings
    stragglers : StragglerModel, optional
        Simulated stragglers; by default none.
    secure_sum : SecureSum, optional
        A secure sum under the scheme; ``true`` stands for one with the usual parameters.
    strategy : dict
        The scheme's own parameters.

    Raises
    ------
    InvalidParameterError
        If a value is not allowed.

    Examples
    --------
    >>> settings = Settings(task="mnist-mlp").with_values({"training.learning_rate": 0.05})
    >>> settings == Settings.from_toml(settings.to_toml())
    True
    """

    scheme: str = "fedavg"
    task: str = "digits-mlp"
    clients: int | None = None
    per_round: int | None = None
    rounds: int = 10
    seed: int = 0
    fraction_evaluate: float = 0.0
    deadline: float | None = None
    quorum: int | None = None
    data_root: str | None = None
    train_records: int | None = None
    test_records: int | None = None
    validation_records: int | None = None
    partition: PartitionSettings = field(default_factory=PartitionSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    stragglers: StragglerModel | None = None
    secure_sum: SecureSum | None = None
    strategy: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_integer("rounds", self.rounds, minimum=1)
        check_integer("seed", self.seed, minimum=0)
        if self.clients is not None:
            check_integer("clients", self.clients, minimum=1)
        if self.per_round is not None:
            check_integer("per_round", self.per_round, minimum=1, maximum=self.clients)
        if self.quorum is not None:
            check_integer("quorum", self.quorum, minimum=1, maximum=self.per_round or self.clients)
        if self.deadline is not None:
            check_number("deadline", self.deadline, minimum=1e-9)
        for name in ("train_records", "test_records", "validation_records"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), minimum=1)
        check_number("fraction_evaluate", self.fraction_evaluate, minimum=0, maximum=1)

    def to_toml(self, *, without: Iterable[str] = ()) -> str:
        """Return the settings as TOML; what is unset is left out, and so are some dotted keys."""
        table = asdict(self)
        for key in without:
            *path, last = key.split(".")
            within: Any = table
            for part in path:
                within = within[part]
            del within[last]
        return tomli_w.dumps(_without_none(table))

    @classmethod
    def from_toml(cls, text: str) -> "Settings":
        """Read settings from TOML.

        Raises
        ------
        InvalidParameterError
            If the text is no TOML, a key is unknown or a value is not allowed.
        """
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise InvalidParameterError("settings", text[:60], f"TOML ({error})") from error
        return cls().with_values(table)

    def with_values(self, values: Mapping[str, Any]) -> "Settings":
        """Return a copy with some values replaced; keys may be nested or dotted.

        Raises
        ------
        InvalidParameterError
            If a key is unknown (with the nearest names) or a value is not allowed.
        """
        return _updated(self, _nested(values), prefix="")  # type: ignore[no-any-return]


def parse_assignments(assignments: Sequence[str]) -> dict[str, Any]:
    """Read ``key=value`` pairs as the command line has them.

    The value is TOML (numbers, booleans, lists, tables); a list needs no brackets. Anything else is
    a string.

    Raises
    ------
    InvalidParameterError
        If an assignment has no ``=``, or two have the same key.

    Examples
    --------
    >>> parse_assignments(["rounds=3", "partition.kind=shards", "fanouts=4,5", "keep_back=a,b"])
    {'rounds': 3, 'partition.kind': 'shards', 'fanouts': [4, 5], 'keep_back': ['a', 'b']}
    """
    values: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise InvalidParameterError("--set", assignment, "key=value")
        if key.strip() in values:
            raise InvalidParameterError("--set", assignment, f"one value of {key.strip()}, not two")
        values[key.strip()] = _value(text)
    return values


def _value(text: str) -> Any:
    for written in (text, f"[{text}]", _quoted(text)):
        if written == text or "," in text:
            try:
                return tomllib.loads(f"value = {written}")["value"]
            except tomllib.TOMLDecodeError:
                continue
    return text


def _quoted(text: str) -> str:
    """Return a list of words, such as names of arrays, in TOML."""
    return "[" + ", ".join(f'"{part.strip()}"' for part in text.split(",")) + "]"


def with_scheme_parameters(values: Mapping[str, Any], own: Container[str]) -> dict[str, Any]:
    """Return settings in which the scheme's own parameters stand under ``strategy``.

    Parameters
    ----------
    values : Mapping
        Settings by dotted key.
    own : container of str
        Names of the scheme's own parameters. A setting of the same name keeps its meaning.

    Raises
    ------
    InvalidParameterError
        If a parameter is there under both of its names.

    Examples
    --------
    >>> with_scheme_parameters({"rounds": 3, "noise": "none", "rnds": 4}, {"noise", "rounds"})
    {'rounds': 3, 'strategy.noise': 'none', 'rnds': 4}
    """
    settings = {entry.name for entry in fields(Settings)}
    found: dict[str, Any] = {}
    for key, value in values.items():
        full = f"strategy.{key}" if key in own and key not in settings else key
        if full in found:
            raise InvalidParameterError("--set", f"{key}={value}", f"one value of {key}, not two")
        found[full] = value
    return found


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *path, last = key.split(".")
        table = nested
        for part in path:
            table = _table(table, part)
        if isinstance(value, Mapping):
            _table(table, last).update(_nested(value))
        elif not (value is True and isinstance(table.get(last), dict)):
            table[last] = value
    return nested


def _table(within: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the table of a key; where the key was only turned on so far, an empty one."""
    if within.get(key) is True:
        within[key] = {}
    table = within.setdefault(key, {})
    if not isinstance(table, dict):
        raise InvalidParameterError(key, table, "a table of settings")
    return table


def flat_table(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a table without tables in it: dotted keys, and nothing that is None."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat.update(flat_table(value, f"{prefix}{key}."))
        elif value is not None:
            flat[prefix + key] = value
    return flat


def _updated(settings: Any, values: Mapping[str, Any], prefix: str) -> Any:
    known = {f.name for f in fields(settings)}
    changes: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            check_known(prefix + key, {prefix + name for name in known})
        current = getattr(settings, key)
        if key in _OPTIONAL and isinstance(value, bool):
            value = {} if value else None
        if key in _OPTIONAL and current is None and isinstance(value, Mapping):
            current = _OPTIONAL[key]()
        if key in _OPTIONAL and value is None:
            changes[key] = None
        elif is_dataclass(current):
            if not isinstance(value, Mapping):
                raise InvalidParameterError(prefix + key, value, "a table of settings")
            changes[key] = _updated(current, value, f"{prefix}{key}.")
        elif isinstance(current, dict):
            if not isinstance(value, Mapping):
                raise InvalidParameterError(prefix + key, value, "a table of parameters")
            changes[key] = {**current, **value}
        elif key in _OPTIONAL and not isinstance(value, _OPTIONAL[key]):
            raise InvalidParameterError(prefix + key, value, "true, false or a table of settings")
        else:
            changes[key] = _typed(settings, prefix, key, value)
    return replace(settings, **changes)


_OPTIONAL: dict[str, type] = {"stragglers": StragglerModel, "secure_sum": SecureSum}
"""Tables of settings that are there or not; true and false say which."""


def _typed(settings: Any, prefix: str, key: str, value: Any) -> Any:
    # A string where text is not allowed, and the like: numbers are checked where they are used.
    hint = get_type_hints(type(settings))[key]
    if hint in (str, str | None) and not isinstance(value, str):
        raise InvalidParameterError(prefix + key, value, "text")
    if hint is bool and not isinstance(value, bool):
        raise InvalidParameterError(prefix + key, value, "true or false")
    return value


def check_known(key: str, known: Iterable[str]) -> None:
    """Refuse a key that there is not.

    Raises
    ------
    InvalidParameterError
        If there is none of that name; the message has the nearest names, or else all.
    """
    names = sorted(known)
    if key in names:
        return
    if key == "evaluation":
        raise InvalidParameterError("--set", key, f"a known key: {WITHOUT_BUDGET}")
    if key in _OF_FLOWER:
        raise InvalidParameterError("--set", key, f"a known key, {_OF_FLOWER[key]}")
    close = get_close_matches(key, names, n=2, cutoff=0.6)
    told = f"nearest: {' or '.join(map(repr, close))}" if close else f"one of {', '.join(names)}"
    raise InvalidParameterError("--set", key, f"a known key, {told}")


_OF_FLOWER = {
    "fraction_train": "here 'per_round', the number of clients of a round",
    "min_train_nodes": "here 'per_round', the number of clients of a round",
    "min_available_nodes": "here 'clients', the number of clients",
    "min_evaluate_nodes": "here 'fraction_evaluate'",
    "num_rounds": "here 'rounds'",
    "num_supernodes": "here 'clients'",
}
"""Flower's names of what a simulation calls otherwise."""


def _without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, Mapping) else value
        for key, value in table.items()
        if value is not None
    }
