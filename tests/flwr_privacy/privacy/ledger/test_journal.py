"""What a ledger answers without reading all of its charges, and what it makes of garbage."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flwr_privacy.accounting import Charge
from flwr_privacy.errors import LedgerError
from flwr_privacy.privacy.ledger import Entry, Ledger, LedgerView, Loss, Question
from flwr_privacy.privacy.ledger import journal as journals
from flwr_privacy.privacy.ledger.chain import head_of
from flwr_privacy.privacy.ledger.journal import Journal
from flwr_privacy.privacy.ledger.lines import MAGIC, line_of
from flwr_privacy.privacy.ledger.view import merged

PATH = Path("a.ledger")
TIMES = [f"2025-12-{day:02}T00:00:00Z" for day in range(1, 32)]
NAMES = ("e", 'f","train",1,0,', "\\", "{")  # two of them look like the file's own lines
TEXTS = st.sampled_from(["train", ',0,"train",1,0,', '{"answer":0}', '{"mark":[', "\\"])


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    question = Question(
        experiment_id=draw(st.sampled_from(NAMES)),
        phase=draw(TEXTS),
        server_round=draw(st.integers(0, 3)),
        request=draw(st.integers(0, 1)),
    )
    noise = draw(st.sampled_from([0.5, 2.0, 2]))
    return Entry(
        question=question,
        scheme=draw(st.sampled_from(["udp", "udp-unproven"])),
        unit=draw(st.sampled_from(["user", "record"])),
        charge=Charge(
            neighbours="replace_one", noise_multiplier=noise, count=draw(st.integers(1, 2))
        ),
        digest=draw(st.sampled_from(["", "ab" * 16])),
        time=draw(st.sampled_from(TIMES)),
    )


RECORDS = st.lists(st.tuples(entries(), st.integers(0, 5)), max_size=30)
"""Charges, each followed by an answer to the n-th last charge, if there is one."""


@pytest.fixture(autouse=True, scope="module")
def _many_marks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journals, "SEGMENT", 4)
        yield


def written(records: list[tuple[Entry, int]]) -> tuple[Journal, set[int]]:
    journal, answered = Journal(PATH, "a"), set[int]()
    for entry, back in records:
        journal.extend(journal.charged(entry))
        number = journal.count - 1 - back
        if number >= 0 and number not in answered:
            journal.extend(journal.answered(number))
            answered.add(number)
    return journal, answered


@settings(max_examples=40, deadline=None)
@given(records=RECORDS)
def test_every_answer_is_that_of_all_entries(records: list[tuple[Entry, int]]) -> None:
    journal, answered = written(records)
    view = LedgerView(Journal(PATH, "a", bytearray(journal.content)))
    all_of = [entry for entry, _ in records]
    assert view.count == len(all_of)
    assert view.entries() == tuple(all_of)
    assert view.answered() == answered
    assert [view.is_answered(n) for n in range(view.count)] == [
        n in answered for n in range(view.count)
    ]
    for n, entry in enumerate(all_of):
        assert view.entry(n) == entry
        same = [k for k, other in enumerate(all_of) if other.question == entry.question]
        assert view.charges_of(entry.question) == tuple(same)
    for name in (*NAMES, "another", None):
        mine = [e for e in all_of if name in (None, e.question.experiment_id)]
        totals = view.totals(name)
        assert totals.count == len(mine)
        assert totals.schemes == {e.scheme for e in mine}
        assert totals.units == {e.unit for e in mine}
        assert totals.charges == merged((e.charge, 1) for e in mine)
        if name is not None:
            assert view.head(name) == head_of(
                name,
                (
                    (e.question.phase, e.question.server_round, e.question.request, e.charge)
                    for e in mine
                ),
            )
    for day in (1, 15, 31):
        since = datetime(2025, 12, day, tzinfo=UTC)
        later = sum(datetime.fromisoformat(e.time) > since for e in all_of)
        assert view.charged_since(since) == later


@settings(max_examples=40, deadline=None)
@given(records=RECORDS, share=st.floats(0, 1))
def test_the_hash_of_a_prefix_is_that_of_the_ledger_at_that_time(
    records: list[tuple[Entry, int]], share: float
) -> None:
    journal, _ = written(records[: int(share * len(records))])
    length, chain = len(journal.content), journal.chain()
    later, _ = written(records)
    assert Journal(PATH, "a", bytearray(later.content)).chain(length) == chain


@settings(max_examples=40, deadline=None)
@given(records=RECORDS, end=st.integers(0, 200), more=entries())
def test_a_ledger_that_was_cut_goes_on_as_if_the_rest_had_not_been(
    records: list[tuple[Entry, int]], end: int, more: Entry
) -> None:
    whole = bytes(written(records)[0].content)
    cut = Journal(PATH, "a", bytearray(whole[: len(whole) - end]))
    assert whole.startswith(bytes(cut.content))
    count = cut.count
    cut.extend(cut.charged(more))
    again = LedgerView(Journal(PATH, "a", bytearray(cut.content)))
    assert again.count == count + 1
    assert again.entry(count) == more


def read_all(content: bytes) -> None:
    """Read everything of a file that may be garbage."""
    try:
        view = LedgerView(Journal(PATH, "a", bytearray(content)))
        view.entries()
        view.answered()
        view.losses()
        view.totals()
        view.charged_since(datetime(2025, 1, 1, tzinfo=UTC))
        for n in range(min(view.count, 3)):
            view.is_answered(n)
            view.entry(n)
        for experiment in view.experiments():
            view.head(experiment)
    except LedgerError as error:
        assert "a.ledger" in str(error)  # noqa: PT017


@settings(max_examples=50, deadline=None)
@given(records=RECORDS, place=st.integers(0, 10**4), length=st.integers(0, 50), other=st.binary())
def test_no_damage_is_anything_but_a_ledger_error(
    records: list[tuple[Entry, int]], place: int, length: int, other: bytes
) -> None:
    content = bytes(written(records)[0].content)
    place = min(place, len(content))
    read_all(content[:place] + other + content[place + length :])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2**70) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=12,
)


@settings(max_examples=50, deadline=None)
@given(
    lines=st.lists(
        st.tuples(
            st.sampled_from(["charge", "answer", "mark", "loss", "experiment", "kind", "else"]),
            VALUES,
        ),
        max_size=6,
    )
)
def test_no_record_whose_checksum_fits_is_anything_but_a_ledger_error(
    lines: list[tuple[str, object]],
) -> None:
    content, checksum = line_of(b'{"data_set":"a"}', 0)
    for name, value in lines:
        body = journals.record_text(name, value)
        line, checksum = line_of(body, 0 if name == "mark" else checksum)
        content += line
    read_all(MAGIC + content + line_of(b'{"answer":0}', checksum)[0])


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_mark_is_believed_that_the_lines_do_not_bear_out(data: st.DataObject) -> None:
    """A mark with another number, whose own checksum fits, under a mark that vouches for it."""
    entry = data.draw(entries())
    journal, _ = written([(entry, 0)] * 9)
    content = bytes(journal.content)
    place = content.find(b'{"mark":[')
    end = content.find(b"\n", place)
    body = content[place:end]
    digits = [n for n, byte in enumerate(body) if chr(byte).isdigit()]
    digit = data.draw(st.sampled_from(digits))
    other = body[:digit] + bytes([(body[digit] - 47) % 10 + 48]) + body[digit + 1 :]
    changed = content[: place - 9] + line_of(other, 0)[0] + content[end + 1 :]
    with pytest.raises(LedgerError):
        Journal(PATH, "a", bytearray(changed))


def test_a_loss_is_read_again_where_it_stands() -> None:
    journal = Journal(PATH, "a")
    loss = Loss(time=TIMES[0], charges=0, witnessed=7)
    journal.extend(journal.lost(loss))
    question = Question(experiment_id="e", phase="train", server_round=1)
    one = Entry(
        question=question,
        scheme="udp",
        unit="user",
        charge=Charge(neighbours="replace_one", noise_multiplier=1.0),
    )
    for _ in range(6):
        journal.extend(journal.charged(one))
    view = LedgerView(Journal(PATH, "a", bytearray(journal.content)))
    assert (view.losses(), view.count) == ((loss,), 6)
    assert next(iter(view.records())) == loss


def test_numbers_beyond_the_ledger_are_refused(tmp_path: Path) -> None:
    view = Ledger(tmp_path / "a.ledger", data_set="a").view()
    for attempt in (view.entry, view.is_answered):
        for number in (0, -1):
            with pytest.raises(ValueError, match=f"there is no charge {number}"):
                attempt(number)


def test_more_releases_than_one_charge_holds_stay_all(tmp_path: Path) -> None:
    most = Charge(neighbours="replace_one", noise_multiplier=1e50, count=2**53)
    assert merged([(most, 2)]) == (most, most)
