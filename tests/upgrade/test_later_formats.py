"""How a later release reads what format 1 holds, shown with a format 2 that is made up here."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from persistence.store_subject import Subject
from support.golden import GOLDEN, cases, content, load_dump, stored_tasks
from support.redis_dump import load
from support.redis_server import RedisServer
from tickwheel.model.records import DeadRow, Failure
from tickwheel.persistence import codec, open_url
from tickwheel.persistence.audit import check
from tickwheel.persistence.contract import StoreUnusable
from tickwheel.persistence.redis import opening
from tickwheel.persistence.sqlite import database

V1 = GOLDEN / "v1"
UPGRADE = (
    "CREATE TABLE remark(id INTEGER PRIMARY KEY, text TEXT)",
    "INSERT INTO remark SELECT id, reason FROM dead WHERE grp = 'billing'",
)


@dataclass
class Store:
    """One that format 1 wrote; ``subject`` is not open."""

    subject: Subject
    path: Path | None
    url: str

    async def layout(self) -> int:
        """Return the layout version of the store."""
        if self.path is not None:
            connection = sqlite3.connect(self.path)
            (found,) = connection.execute("SELECT value FROM meta WHERE key = 'layout'").fetchone()
            (header,) = connection.execute("PRAGMA user_version").fetchone()
            connection.close()
            assert found == header
            return int(found)
        async with Redis.from_url(self.url) as redis:
            return int(await redis.hget("{tw:default:0}:wheel", "format"))


@pytest.fixture(params=["sqlite", "redis"])
async def store(
    request: pytest.FixtureRequest, tmp_path: Path, shared_redis: RedisServer
) -> AsyncIterator[Store]:
    if request.param == "sqlite":
        path = tmp_path / "store.db"
        load_dump(V1 / "sqlite.sql", path)
        result = Store(Subject(open_url(f"sqlite:///{path}")), path, f"sqlite:///{path}")
    else:
        shared_redis.call("FLUSHALL")
        url = shared_redis.url()
        await load(url, json.loads((V1 / "redis.json").read_text("utf-8")))
        result = Store(Subject(open_url(url)), None, url)
    yield result
    await result.subject.store.close(clean=True)


def layout_2(patch: pytest.MonkeyPatch, *upgrade: str) -> None:
    """As if this were a release that knows layout 2."""
    patch.setattr(database, "LAYOUT", 2)
    patch.setattr(database, "UPGRADES", {1: upgrade})
    patch.setattr(opening, "LAYOUT", 2)


async def test_a_store_of_format_1_is_upgraded_when_it_is_opened(store: Store) -> None:
    """Nothing is lost, and the release before refuses it from then on."""
    subject = store.subject
    with pytest.MonkeyPatch.context() as patch:
        layout_2(patch, *UPGRADE)
        opened = await subject.open()
        assert (opened.epoch, opened.last_batch, opened.created) == (2, 5, False)
        assert await store.layout() == 2
        rows = await subject.store.read(list(stored_tasks()))
        assert {i: task.row for i, task in rows.items()} == stored_tasks()
        assert (await subject.small()).records == content().records
        await subject.reopen()
        if store.path is not None:
            remarks = sqlite3.connect(store.path).execute("SELECT * FROM remark").fetchall()
            letters = [row for row in content().dead.values() if row.group == "billing"]
            assert sorted(remarks) == sorted((row.id, row.reason) for row in letters)
        await subject.store.close(clean=True)
    with pytest.raises(StoreUnusable, match="layout 2.*up to 1.*newer release"):
        await subject.store.open("me", 0)
    assert await store.layout() == 2


async def test_an_upgrade_is_atomic(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    load_dump(V1 / "sqlite.sql", path)
    subject = Subject(open_url(f"sqlite:///{path}"))
    with pytest.MonkeyPatch.context() as patch:
        layout_2(patch, *UPGRADE, "INSERT INTO remark SELECT id, reason FROM dead")
        with pytest.raises(StoreUnusable):  # the same ids twice
            await subject.store.open("me", 0)
    assert check(f"sqlite:///{path}").problems == []
    assert (await subject.open()).epoch == 2
    await subject.store.close(clean=True)
    tables = sqlite3.connect(path).execute("SELECT name FROM sqlite_master").fetchall()
    assert ("remark",) not in tables


def _first(*fields: Any) -> tuple[DeadRow, str]:
    """A dead letter, and who signed it: of version 1 nobody has."""
    failures, *counts = fields[6:]
    return DeadRow(*fields[:6], tuple(Failure(*failure) for failure in failures), *counts), "nobody"


def _second(*fields: Any) -> tuple[DeadRow, str]:
    *first, signed = fields
    return _first(*first)[0], str(signed)


def test_records_of_format_1_are_read_with_later_versions() -> None:
    """A kind of record gets one more build, and those before it stay."""
    written: dict[str, str] = json.loads((V1 / "records.json").read_text("utf-8"))
    letters = {name: case[0] for name, case in cases().items() if name.startswith("dead")}
    assert letters
    for name, row in letters.items():
        former = bytes.fromhex(written[name])
        assert codec.unpack("dead letter", former, _first, _second) == (row, "nobody")
        later = codec.pack(*row, "me", version=2)
        assert codec.unpack("dead letter", later, _first, _second) == (row, "me")
        with pytest.raises(codec.RecordUnreadable, match=r"version 2.*reads version 1; a newer"):
            codec.decode_dead(later)
        newest = codec.pack(*row, version=3)
        with pytest.raises(codec.RecordUnreadable, match="version 3.*reads versions 1 to 2"):
            codec.unpack("dead letter", newest, _first, _second)
