"""What an earlier release wrote is read by this one."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from persistence.store_subject import Subject
from support.golden import (
    GOLDEN,
    broadcast_cases,
    cases,
    coalescing_cases,
    content,
    crowd,
    ended,
    filter_cases,
    former_cases,
    former_content,
    job_cases,
    load_dump,
    moved,
    newest,
    of_layout_6,
    of_layout_7,
    old_cases,
    old_content,
    order_cases,
    reset_cases,
    schedule_cases,
    snoozed_cases,
    transaction_cases,
    window_cases,
)
from tickwheel.model.effects import Effects
from tickwheel.model.key_hash import KeyHash
from tickwheel.model.transactions import key_of
from tickwheel.persistence import open_url
from tickwheel.persistence.audit import check
from tickwheel.persistence.sqlite import schema

RECORDS_V1: dict[str, str] = json.loads((GOLDEN / "v1" / "records.json").read_text("utf-8"))
RECORDS_V3: dict[str, str] = json.loads((GOLDEN / "v3" / "records.json").read_text("utf-8"))
RECORDS_V6: dict[str, str] = json.loads((GOLDEN / "v6" / "records.json").read_text("utf-8"))
RECORDS_V7: dict[str, str] = json.loads((GOLDEN / "v7" / "records.json").read_text("utf-8"))
RECORDS_OF_BROADCASTS: dict[str, str] = json.loads((GOLDEN / "broadcasts.json").read_text("utf-8"))
RECORDS_OF_FILTERS: dict[str, str] = json.loads((GOLDEN / "filters.json").read_text("utf-8"))
RECORDS_OF_ORDER: dict[str, str] = json.loads((GOLDEN / "order.json").read_text("utf-8"))
RECORDS_OF_RESETS: dict[str, str] = json.loads((GOLDEN / "resets.json").read_text("utf-8"))
RECORDS_OF_WINDOWS: dict[str, str] = json.loads((GOLDEN / "windows.json").read_text("utf-8"))
RECORDS_OF_TRANSACTIONS: dict[str, str] = json.loads(
    (GOLDEN / "transactions.json").read_text("utf-8")
)
RECORDS_V8: dict[str, str] = json.loads((GOLDEN / "v8" / "records.json").read_text("utf-8"))
RECORDS_V4: dict[str, str] = json.loads((GOLDEN / "v4" / "records.json").read_text("utf-8"))


@pytest.mark.parametrize("name", sorted(old_cases()))
def test_records_of_version_1(name: str) -> None:
    value, _, decode = old_cases()[name]
    _is_read(value, decode(bytes.fromhex(RECORDS_V1[name])))


@pytest.mark.parametrize("name", sorted(former_cases()))
def test_records_of_layout_3(name: str) -> None:
    value, _, decode = former_cases()[name]
    _is_read(value, decode(bytes.fromhex(RECORDS_V3[name])))


@pytest.mark.parametrize("name", sorted(window_cases()))
def test_records_of_tasks_with_a_due_window(name: str) -> None:
    value, encode, decode = window_cases()[name]
    data = bytes.fromhex(RECORDS_OF_WINDOWS[name])
    _is_read(value, decode(data))
    assert encode(value) == data, "a version is written as it was"


@pytest.mark.parametrize("name", sorted(broadcast_cases()))
def test_records_of_topics_for_broadcasts_only(name: str) -> None:
    value, encode, decode = broadcast_cases()[name]
    data = bytes.fromhex(RECORDS_OF_BROADCASTS[name])
    _is_read(value, decode(data))
    assert encode(value) == data, "a version is written as it was"


@pytest.mark.parametrize("name", sorted(filter_cases()))
def test_records_of_groups_with_filters(name: str) -> None:
    value, encode, decode = filter_cases()[name]
    data = bytes.fromhex(RECORDS_OF_FILTERS[name])
    _is_read(value, decode(data))
    assert encode(value) == data, "a version is written as it was"


@pytest.mark.parametrize("name", sorted(order_cases()))
def test_records_of_order_keys_and_fair_shares(name: str) -> None:
    value, encode, decode = order_cases()[name]
    data = bytes.fromhex(RECORDS_OF_ORDER[name])
    _is_read(value, decode(data))
    assert encode(value) == data, "a version is written as it was"


@pytest.mark.parametrize("name", sorted(reset_cases()))
def test_records_of_tasks_that_stand_for_others(name: str) -> None:
    value, encode, decode = reset_cases()[name]
    data = bytes.fromhex(RECORDS_OF_RESETS[name])
    _is_read(value, decode(data))
    assert encode(value) == data, "a version is written as it was"


@pytest.mark.parametrize("name", sorted(cases()))
def test_records_as_they_are_written_now(name: str) -> None:
    value, encode, decode = cases()[name]
    data = bytes.fromhex(RECORDS_V4[name])
    _is_read(value, decode(data))
    assert encode(value) == data, "a version is written as it was"


@pytest.mark.parametrize("name", sorted(snoozed_cases() | schedule_cases()))
def test_records_of_layout_6(name: str) -> None:
    value, encode, decode = (snoozed_cases() | schedule_cases())[name]
    data = bytes.fromhex(RECORDS_V6[name])
    _is_read(value, decode(data))
    assert encode(value) == data, "a version is written as it was"


@pytest.mark.parametrize("name", sorted(coalescing_cases()))
def test_records_that_came_with_rules_for_pending_keys(name: str) -> None:
    value, encode, decode = coalescing_cases()[name]
    data = bytes.fromhex(RECORDS_V7[name])
    _is_read(value, decode(data))
    assert encode(value) == data, "a version is written as it was"


@pytest.mark.parametrize("name", sorted(transaction_cases()))
def test_records_of_transactions(name: str) -> None:
    value, encode, decode = transaction_cases()[name]
    data = bytes.fromhex(RECORDS_OF_TRANSACTIONS[name])
    _is_read(value, decode(data))
    assert encode(value) == data, "a version is written as it was"


@pytest.mark.parametrize("name", sorted(job_cases()))
def test_records_of_jobs(name: str) -> None:
    value, encode, decode = job_cases()[name]
    data = bytes.fromhex(RECORDS_V8[name])
    _is_read(value, decode(data))
    assert encode(value) == data, "a version is written as it was"


def _is_read(value: Any, decoded: Any) -> None:
    assert decoded == value
    assert _types(decoded) == _types(value)


def _types(value: Any) -> Any:
    if isinstance(value, tuple):
        return type(value), [_types(part) for part in value]
    if isinstance(value, dict):
        return dict, [(_types(k), _types(v)) for k, v in value.items()]
    return type(value), str(value)


def test_no_record_is_left_out() -> None:
    assert RECORDS_V1.keys() == old_cases().keys()
    assert RECORDS_V3.keys() == former_cases().keys()
    assert RECORDS_V4.keys() == cases().keys()
    assert RECORDS_OF_ORDER.keys() == order_cases().keys()
    assert RECORDS_OF_RESETS.keys() == reset_cases().keys()
    assert RECORDS_OF_TRANSACTIONS.keys() == transaction_cases().keys()
    assert RECORDS_V8.keys() == job_cases().keys()
    assert RECORDS_V6.keys() == (snoozed_cases() | schedule_cases()).keys()


def test_what_has_no_place_is_written_as_before() -> None:
    """A release before this one reads such tasks."""
    for name, (value, encode, _) in former_cases().items():
        if not name.startswith("group"):
            assert encode(value) == bytes.fromhex(RECORDS_V3[name])


@pytest.mark.parametrize(
    ("folder", "made"), [("v2", old_content), ("v3", former_content), ("v4", content)]
)
async def test_a_database_with_packs(
    tmp_path: Path, folder: str, made: Callable[[], Effects]
) -> None:
    path = tmp_path / "store.db"
    load_dump(GOLDEN / folder / "sqlite.sql", path)
    assert check(f"sqlite:///{path}").problems == []
    subject = Subject(open_url(f"sqlite:///{path}"))
    opened = await subject.open()
    assert (opened.epoch, opened.last_batch, opened.clean, opened.created) == (2, 3, True, False)
    expected = made().enqueued | crowd().enqueued | ended().updated
    expected = {i: row for i, row in expected.items() if i not in ended().ended}
    found = await subject.store.read([*made().enqueued, *crowd().enqueued])
    assert {i: task.row for i, task in found.items()} == expected
    (handles,) = await subject.handles()
    keys = zip(handles.dues_ms, handles.ids, handles.topics, strict=True)
    assert list(keys) == sorted((r.due_ms, r.id, r.topic) for r in expected.values())
    small = await subject.small()
    assert {(row.topic, row.group): row for row in small.groups} == made().groups
    await subject.store.close(clean=True)


async def test_a_database_with_schedules(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    load_dump(GOLDEN / "v6" / "sqlite.sql", path)
    assert check(f"sqlite:///{path}").problems == []
    subject = Subject(open_url(f"sqlite:///{path}"))
    assert (await subject.open()).last_batch == 6
    small = await subject.small()
    assert {row.schedule.name: row for row in small.schedules} == of_layout_6().schedules
    snoozed = list(of_layout_6().progress.values())
    assert [row for row in small.progress if row.snoozes] == snoozed
    assert small.transactions == []
    await subject.store.close(clean=True)


async def test_a_database_with_transactions(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    load_dump(GOLDEN / "v7" / "sqlite.sql", path)
    assert check(f"sqlite:///{path}").problems == []
    subject = Subject(open_url(f"sqlite:///{path}"))
    assert (await subject.open()).last_batch == 7
    small = await subject.small()
    assert {key_of(row): row for row in small.transactions} == of_layout_7().transactions
    assert small.jobs == []
    await subject.store.close(clean=True)


async def test_a_database_with_jobs(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    load_dump(GOLDEN / "v8" / "sqlite.sql", path)
    assert check(f"sqlite:///{path}").problems == []
    subject = Subject(open_url(f"sqlite:///{path}"))
    assert (await subject.open()).last_batch == 8
    assert {row.job.id: row for row in (await subject.small()).jobs} == newest().jobs
    await subject.store.close(clean=True)


async def test_a_database_with_moved_tasks(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    load_dump(GOLDEN / "v5" / "sqlite.sql", path)
    assert check(f"sqlite:///{path}").problems == []
    subject = Subject(open_url(f"sqlite:///{path}"))
    assert (await subject.open()).last_batch == 5
    expected = content().enqueued | crowd().enqueued | ended().updated
    for effects in moved():
        expected |= {i: expected[i]._replace(due_ms=due) for i, due in effects.moved.items()}
    expected = {i: row for i, row in expected.items() if i not in ended().ended}
    found = await subject.store.read([*content().enqueued, *crowd().enqueued])
    assert {i: task.row for i, task in found.items()} == expected
    (handles,) = await subject.handles()
    keys = zip(handles.dues_ms, handles.ids, handles.topics, strict=True)
    assert list(keys) == sorted((r.due_ms, r.id, r.topic) for r in expected.values())
    await subject.store.close(clean=True)


@pytest.mark.parametrize("folder", ["v1", "v2", "v3", "v4", "v5"])
async def test_a_database_without_keys_gets_them_when_it_is_opened(
    tmp_path: Path, folder: str
) -> None:
    path = tmp_path / "store.db"
    load_dump(GOLDEN / folder / "sqlite.sql", path)
    subject = Subject(open_url(f"sqlite:///{path}"))
    opened = await subject.open()
    await subject.handles()
    rows = [task.row for task in await subject.store.scan(-1, 1_000, None)]
    hashes = KeyHash(opened.key_seed).of_rows(rows)
    assert hashes
    assert await subject.keys() == hashes
    assert (await subject.reopen()).key_seed == opened.key_seed
    assert await subject.keys() == hashes
    await subject.store.close(clean=True)
    assert check(f"sqlite:///{path}").problems == []


async def test_a_database_with_keys(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    load_dump(GOLDEN / "v6" / "sqlite.sql", path)
    assert check(f"sqlite:///{path}").problems == []
    subject = Subject(open_url(f"sqlite:///{path}"))
    opened = await subject.open()
    expected = content().enqueued | crowd().enqueued | ended().updated
    expected = {i: row for i, row in expected.items() if i not in ended().ended}
    assert await subject.keys() == KeyHash(opened.key_seed).of_rows(expected.values())
    await subject.store.close(clean=True)


async def test_a_database_of_layout_1(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    load_dump(GOLDEN / "v1" / "sqlite.sql", path)
    assert check(f"sqlite:///{path}").problems == []
    subject = Subject(open_url(f"sqlite:///{path}"))
    opened = await subject.open()
    expected = old_content()
    assert (opened.epoch, opened.last_batch, opened.clean, opened.created) == (2, 1, True, False)
    assert (opened.id_mark, opened.position_ms) == (expected.id_mark, expected.position_ms)
    found = await subject.store.read(list(expected.enqueued))
    assert {i: task.row for i, task in found.items()} == expected.enqueued
    small = await subject.small()
    assert {(row.id, row.group): row for row in small.progress} == expected.progress
    assert {row.session: row for row in small.sessions} == expected.sessions
    assert {(row.topic, row.group): row for row in small.groups} == expected.groups
    assert dict(small.outcomes) == expected.ended
    dead = await subject.store.scan_dead((-1, ""), 99, None, None)
    assert {(row.id, row.group): row for row in dead} == expected.dead
    await subject.store.close(clean=True)
    shell = sqlite3.connect(path)
    assert shell.execute("PRAGMA user_version").fetchone() == (schema.LAYOUT,)
    shell.close()
