"""Stored records and stores of each version of the formats are read, and written as they were."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from persistence.store_subject import Subject
from support.golden import (
    ENDED,
    GOLDEN,
    cases,
    content,
    crowd,
    encoded_cases,
    ended,
    fill,
    load_dump,
    stored_tasks,
)
from support.redis_dump import dump, load
from support.redis_server import RedisServer
from tickwheel.model.key_hash import KeyHash
from tickwheel.model.kinds import KINDS
from tickwheel.persistence import open_url
from tickwheel.persistence.audit import check
from tickwheel.persistence.redis import RedisStore, options_from

V1 = GOLDEN / "v1"
RECORDS: dict[str, str] = json.loads((V1 / "records.json").read_text("utf-8"))
SHARDS: dict[str, Any] = {
    version: json.loads((GOLDEN / version / "redis.json").read_text("utf-8"))
    for version in ("v1", "v2")
}
"""Shards by layout; the last one is that of this release."""
DATABASE = V1 / "sqlite.sql"
CASES = cases()


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_record_is_read(name: str) -> None:
    value, _, decode = CASES[name]
    decoded = decode(bytes.fromhex(RECORDS[name]))
    assert decoded == value
    assert _types(decoded) == _types(value)


def _types(value: Any) -> Any:
    if isinstance(value, tuple):
        return type(value), [_types(part) for part in value]
    if isinstance(value, dict):
        return dict, [(_types(k), _types(v)) for k, v in value.items()]
    return type(value), str(value)


def test_records_are_written_as_they_were() -> None:
    assert encoded_cases() == RECORDS


def test_every_record_field_is_set_in_a_golden_file() -> None:
    """A new field must be in a golden file."""
    silent: dict[str, set[str]] = {}
    spoken: dict[str, set[str]] = {}
    for value, _, _ in CASES.values():
        for record in _records_in(value):
            kind = type(record).__name__
            texts = {
                name
                for name in record._fields
                if name not in record._field_defaults
                or getattr(record, name) != record._field_defaults[name]
            }
            spoken.setdefault(kind, set()).update(texts)
            silent[kind] = set(record._fields) - spoken[kind]
    assert len(silent) >= 16
    assert {kind: names for kind, names in silent.items() if names} == {}


def _records_in(value: Any) -> Iterator[Any]:
    """The value and all that stands in it, as far as they have named fields."""
    if isinstance(value, (tuple, list)):
        if hasattr(value, "_fields"):
            yield value
        for part in value:
            yield from _records_in(part)


@pytest.fixture(params=["sqlite", *SHARDS])
async def stored(
    request: pytest.FixtureRequest, tmp_path: Path, shared_redis: RedisServer
) -> AsyncIterator[Subject]:
    """A store that holds what a golden file does; not open yet."""
    if request.param == "sqlite":
        path = tmp_path / "store.db"
        load_dump(DATABASE, path)
        assert check(f"sqlite:///{path}").problems == []
        url = f"sqlite:///{path}"
    else:
        shared_redis.call("FLUSHALL")
        await load(shared_redis.url(), SHARDS[request.param])
        url = shared_redis.url()
    subject = Subject(open_url(url))
    yield subject
    await subject.store.close(clean=True)


async def test_a_store_is_read(stored: Subject) -> None:
    opened, expected = await stored.open(), content()
    assert (opened.epoch, opened.last_batch, opened.clean, opened.created) == (2, 5, True, False)
    assert opened.id_mark == expected.id_mark
    rows = stored_tasks()
    result = await stored.store.read([*expected.enqueued, *crowd().enqueued])
    assert {i: task.row for i, task in result.items()} == rows
    chunks = await stored.handles()
    handles = [key for c in chunks for key in zip(c.dues_ms, c.ids, c.topics, strict=True)]
    assert handles == sorted((row.due_ms, row.id, row.topic) for row in rows.values())
    assert await stored.keys() == KeyHash(opened.key_seed).of_rows(rows.values())
    dead = await stored.store.scan_dead((-1, ""), 99, None, None)
    assert {(row.id, row.group): row for row in dead} == expected.dead


async def test_the_small_rows_of_a_store_are_read(stored: Subject) -> None:
    await stored.open()
    small, expected = await stored.small(), content()
    assert {(row.id, row.group): row for row in small.progress} == expected.progress
    assert small.records == expected.records
    assert {kind for kind, _ in expected.records} == set(KINDS.values())
    assert dict(small.outcomes) == expected.ended | ended().ended
    assert set(ENDED.values()) == set(expected.ended.values())


async def test_a_shard_in_redis_is_written_as_it_was(shared_redis: RedisServer) -> None:
    shared_redis.call("FLUSHALL")
    await fill(RedisStore(options_from(shared_redis.url())))
    assert await dump(shared_redis.url()) == SHARDS["v2"]
