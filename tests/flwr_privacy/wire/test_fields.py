"""Messages as records: what is read from them, and what is made once for a round."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from flwr_privacy.errors import InvalidParameterError, ProtocolError
from flwr_privacy.wire.fields import read, read_terms, write


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Some terms; how many were made is counted."""

    made = 0
    norm: float
    rounds: int = 1
    names: list[str] = field(default_factory=list)
    block: int | None = None

    def __post_init__(self) -> None:
        Terms.made += 1
        if self.norm < 0:
            raise InvalidParameterError("norm", self.norm, "at least 0")


RECORD: dict[str, Any] = {"norm": 1.5, "rounds": 2, "names": ["a", "b"], "block": 3}


@pytest.mark.parametrize("reader", [read, read_terms])
@pytest.mark.parametrize("left_out", [(), ("names",), ("block",)])
def test_what_was_written_is_read(reader: Any, left_out: tuple[str, ...]) -> None:
    record = {key: value for key, value in RECORD.items() if key not in left_out}
    terms = reader(Terms, {**record, "unknown": 1})
    assert write(terms) == record
    assert isinstance(terms.names, list)


@pytest.mark.parametrize("reader", [read, read_terms])
@pytest.mark.parametrize(
    "wrong",
    [
        {"norm": 1},
        {"rounds": True},
        {"rounds": 2.0},
        {"names": [1]},
        {"names": "a"},
        {"block": "3"},
    ],
)
def test_another_type_is_refused_also_after_an_equal_value(
    reader: Any, wrong: dict[str, Any]
) -> None:
    reader(Terms, RECORD | {"norm": 1.0, "rounds": 1})
    reader(Terms, RECORD | {"rounds": 2})
    with pytest.raises(ProtocolError, match=f"the entry '{next(iter(wrong))}' of Terms is no"):
        reader(Terms, RECORD | wrong)


def test_terms_that_are_alike_are_made_once_and_others_are_not() -> None:
    first = read_terms(Terms, RECORD | {"norm": 7.0})
    before = Terms.made
    assert read_terms(Terms, dict(RECORD | {"norm": 7.0, "names": ["a", "b"]})) is first
    assert Terms.made == before
    others = [{"norm": 8.0}, {"names": ["a"]}, {"names": ["ab"]}, {"block": 4}, {"rounds": 3}]
    found = [read_terms(Terms, RECORD | {"norm": 7.0} | other) for other in others]
    assert [write(one) for one in found] == [RECORD | {"norm": 7.0} | other for other in others]
    assert Terms.made == before + len(others)


def test_terms_that_are_not_allowed_are_refused_each_time() -> None:
    for _ in range(2):
        with pytest.raises(InvalidParameterError, match=r"norm = -1\.0"):
            read_terms(Terms, RECORD | {"norm": -1.0})
