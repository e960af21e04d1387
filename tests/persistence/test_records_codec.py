"""The records codec: round trips, and refusals that say what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tickwheel.model.kinds import GROUP, KINDS, SCHEDULE, SESSION, Kind
from tickwheel.model.policies import KINDS as POLICIES
from tickwheel.model.policies import Coalescing, RetryPolicy
from tickwheel.model.records import (
    NO_PAST,
    DeadRow,
    Failure,
    FormerFilter,
    GroupRow,
    GroupSettings,
    Once,
    OncePart,
    OrderSettings,
    Outcome,
    Past,
    ProgressRow,
    ProgressState,
    Replayed,
    SessionRow,
    ShareSettings,
    TaskOptions,
    TaskRow,
)
from tickwheel.persistence import codec
from tickwheel.persistence.codec import RecordUnreadable

ints = st.integers(-(2**63), 2**63 - 1)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
values = st.one_of(names, ints, st.floats(allow_nan=False), st.booleans())
failures = st.lists(st.builds(Failure, ints, ints, names, names), max_size=4).map(tuple)
floats = st.floats(allow_nan=False)
policies = st.builds(
    RetryPolicy, ints, floats, ints, ints, floats, st.sampled_from(POLICIES),
    st.lists(ints, max_size=4).map(tuple),
)  # fmt: skip
windows = st.just((None, None)) | st.tuples(ints, st.none() | ints)
options = st.builds(
    lambda *fields: TaskOptions(*fields[:-3], *fields[-3], *fields[-2:]),
    st.none() | names,
    st.none() | names,
    st.none() | st.dictionaries(names, values, max_size=4),
    st.integers(0, 255),
    st.none() | ints,
    st.none() | names | policies,
    st.none() | ints,
    windows,
    st.none() | names,
    st.none() | st.builds(Replayed, ints, names, st.none() | names),
)
tasks = st.builds(TaskRow, ints, ints, names, st.binary(max_size=50), st.none() | options)
counts = st.integers(0, 2**31)
progress = st.builds(
    ProgressRow,
    ints,
    names,
    st.sampled_from(ProgressState),
    ints,
    ints,
    ints,
    failures,
    counts,
    counts,
    counts,
    ints,
)
dead = st.builds(DeadRow, ints, names, names, ints, ints, names, failures, counts, ints, counts)
rules = st.builds(Coalescing, names, st.none() | ints, names, names, names, st.none() | ints)
settings = st.builds(
    GroupSettings, st.booleans(), st.none() | floats, st.none() | ints,
    st.none() | names | policies, st.none() | ints, ints,
    st.none() | rules, st.booleans(), st.none() | names, st.none() | names,
    st.lists(st.builds(FormerFilter, st.none() | names, st.none() | names, ints, ints), max_size=3)
    .map(tuple),
    st.builds(OrderSettings, st.none() | ints, st.none() | ints, st.none() | names),
    st.builds(ShareSettings, st.none() | names, st.none() | ints, st.none() | floats),
    st.none() | ints,
)  # fmt: skip
groups = st.builds(GroupRow, names, names, ints, st.none() | settings, ints, ints)
outcomes = st.lists(st.tuples(ints, ints, ints, ints), max_size=5).map(tuple)
decided = st.lists(st.tuples(st.integers(1, 4), ints, ints), max_size=3).map(tuple)
merged = st.lists(st.tuples(ints, decided), max_size=3).map(tuple)
chosen = st.lists(st.tuples(ints, ints), max_size=3).map(tuple)
part = st.builds(OncePart, counts, ints, counts, ints, decided, chosen)
parts = st.lists(part, max_size=3).map(tuple)
once = st.builds(Once, st.binary(max_size=16), counts, parts)
sessions = st.builds(
    SessionRow, st.binary(min_size=16, max_size=16), ints, ints, outcomes, merged, once
)


def _through(kind: Kind[Any], row: Any) -> Any:
    (encoded,) = codec.encode_records({(kind, kind.key(row)): row})
    assert encoded == codec.encode_record(kind, row)
    return codec.decode_record(kind, encoded)


@given(tasks)
def test_tasks_are_decoded_as_encoded(row: TaskRow) -> None:
    assert repr(codec.decode_task(codec.encode_task(row))) == repr(row)


@given(options)
def test_extras_are_decoded_as_encoded(value: TaskOptions) -> None:
    assert repr(codec.decode_extras(codec.encode_extras(value))) == repr(value)


@given(progress)
def test_progress_is_decoded_as_encoded(row: ProgressRow) -> None:
    assert repr(codec.decode_progress(codec.encode_progress(row))) == repr(row)


@given(dead)
def test_dead_letters_are_decoded_as_encoded(row: DeadRow) -> None:
    assert repr(codec.decode_dead(codec.encode_dead(row))) == repr(row)


@given(groups)
def test_groups_are_decoded_as_encoded(row: GroupRow) -> None:
    assert repr(_through(GROUP, row)) == repr(row)


@given(sessions)
def test_sessions_are_decoded_as_encoded(row: SessionRow) -> None:
    assert _through(SESSION, row) == row


@given(st.builds(Past, failures, counts, counts, counts, counts))
def test_pasts_are_decoded_as_encoded(past: Past) -> None:
    assert repr(codec.decode_past(codec.encode_past(past))) == repr(past)


@given(st.dictionaries(ints, st.sampled_from(Outcome), max_size=20))
def test_endings_are_decoded_as_encoded(ended: dict[int, Outcome]) -> None:
    assert codec.decode_endings(codec.encode_endings(ended)) == list(ended.items())


def test_absent_values_use_no_bytes() -> None:
    assert codec.encode_extras(None) is None
    assert codec.decode_extras(None) is None
    assert codec.decode_extras(b"") is None
    assert codec.encode_past(NO_PAST) is None
    assert codec.decode_past(None) == NO_PAST


def test_unset_rare_fields_use_no_bytes() -> None:
    """They are the last ones, and absent in nearly all records."""
    assert codec.encode_extras(TaskOptions(tag="t")) == codec.pack(None, "t", None, 0, None, None)
    ordered = TaskOptions(order_key="k")
    assert codec.encode_extras(ordered) == codec.pack(None, None, None, 0, *[None] * 5, "k")
    paused = GroupRow("t", "g", 5, GroupSettings(paused=True), 7)
    settings = (True, None, None, None, None, 0)
    assert codec.encode_record(GROUP, paused) == codec.pack("t", "g", 5, settings, 7)
    row = ProgressRow(1, "g", ProgressState.WAITING, 1, 5, 7)
    assert codec.encode_progress(row) == codec.pack(1, "g", 2, 1, 5, 7, ())
    session = SessionRow(b"s", 1, 2, ())
    assert codec.encode_record(SESSION, session) == codec.pack(b"s", 1, 2, ())


def test_endings_take_nine_bytes_each() -> None:
    ended = dict.fromkeys(range(10_000), Outcome.ACKED)
    assert len(codec.encode_endings(ended)) < 9 * 10_000 + 20


DECODERS: list[Callable[[bytes], Any]] = [
    codec.decode_extras,
    codec.decode_task,
    codec.decode_past,
    codec.decode_progress,
    codec.decode_dead,
    codec.decode_endings,
    *(partial(codec.decode_record, kind) for kind in KINDS.values()),
]


@pytest.mark.parametrize("decode", DECODERS)
def test_a_newer_version_is_refused(decode: Callable[[bytes], Any]) -> None:
    with pytest.raises(
        RecordUnreadable, match="version 2; this release reads version 1; a newer release wrote it"
    ):
        decode(msgpack.packb([2, 1, 2, 3]))


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize(
    "data",
    [
        b"\xc1",
        b"\x91",
        b"\x91\x01\x01",
        msgpack.packb(1),
        msgpack.packb([]),
        msgpack.packb({"1": 1}),
        msgpack.packb(["1", 2]),
        msgpack.packb([True, 2]),
        msgpack.packb([0, 2]),
        msgpack.packb([1]),
        msgpack.packb([1] * 20),
        msgpack.packb([1, 5]),
    ],
)
def test_anything_else_is_refused(decode: Callable[[bytes], Any], data: bytes) -> None:
    with pytest.raises(RecordUnreadable):
        decode(data)


@pytest.mark.parametrize(
    ("decode", "fields"),
    [
        (codec.decode_progress, [1, "g", 9, 1, 1, 1, []]),
        (codec.decode_progress, [1, "g", 1, 1, 1, 1, [[1, 2]]]),
        (partial(codec.decode_record, SESSION), [b"", 1, 1, [[1, 2, 3]]]),
        (codec.decode_endings, [b"12345678", b"\x09"]),
        (codec.decode_endings, [b"1234567", b"\x01"]),
        (codec.decode_task, [1, 1, "t", b"", [1]]),
        (codec.decode_past, [[[1, 2, "reason"]]]),
        (partial(codec.decode_record, GROUP), ["t", "g", 0, None]),
        (
            partial(codec.decode_record, SCHEDULE),
            [["n", "t", b"", [1], None, "UTC", 5, 0], 0, 1, 0, 0, None, []],
        ),
    ],
)
def test_wrong_fields_are_refused(decode: Callable[[bytes], Any], fields: list[Any]) -> None:
    with pytest.raises(RecordUnreadable, match="wrong fields"):
        decode(msgpack.packb([1, *fields]))


def test_an_unknown_state_is_refused() -> None:
    with pytest.raises(RecordUnreadable, match="unknown state 8"):
        codec.progress_state(8)
