"""A restore over HTTP by a real daemon: begun, followed, and served by another daemon."""

from __future__ import annotations

import asyncio
import http.client
import json
import shutil
from pathlib import Path
from typing import Any

from support.daemon import Daemon
from support.waiting import comes
from tickwheel import Client
from tickwheel.persistence import open_url


def ask(daemon: Daemon, method: str, path: str, body: Any = None) -> Any:
    connection = http.client.HTTPConnection(daemon.http.removeprefix("http://"), timeout=30)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, f"/v1/{path}", data, {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.status in (200, 201, 202), response.read()
        return json.load(response)
    finally:
        connection.close()


async def ended(daemon: Daemon, restore_id: str) -> Any:
    async def look() -> Any:
        result = await asyncio.to_thread(ask, daemon, "GET", f"restores/{restore_id}")
        return result if result["state"] != "running" else None

    return await comes(look, 60)


async def restored(daemon: Daemon, **wanted: Any) -> Any:
    made = await asyncio.to_thread(ask, daemon, "POST", "restores", wanted)
    return await ended(daemon, made["id"])


async def stored(path: Path) -> set[int]:
    copy = path.with_suffix(".read")
    shutil.copy(path, copy)
    store = open_url(f"sqlite:///{copy}")
    await store.open("a reader", 0)
    try:
        return {task.row.id for task in await store.scan(-1, 100, None)}
    finally:
        await store.close(clean=True)


async def test_restores_of_all_one_and_without_overdue_tasks(tmp_path: Path) -> None:
    history = tmp_path / "history"
    options: dict[str, Any] = {"http": True, "history_dir": str(history), "history_bodies": "true"}
    with Daemon(tmp_path / "first", backup_dir=str(tmp_path), **options) as daemon:
        async with Client(daemon.url) as client:
            far = await client.enqueue("t", b"far", delay=3600)
            over = await client.enqueue("t", b"over", delay=3600)
            await asyncio.to_thread(ask, daemon, "POST", "backups", {"name": "a.db"})
            await client.cancel(over.id)
            due = await client.enqueue("t", b"due")
            late = await client.enqueue("t", b"late", delay=7200)
        for name, wanted, ids in (
            ("all.db", {}, {far.id, due.id, late.id}),
            ("far.db", {"include_overdue": False}, {far.id, late.id}),
            ("one.db", {"ids": [str(late.id)]}, {late.id}),
            ("old.db", {"history": False}, {far.id, over.id}),
        ):
            result = await restored(daemon, into=name, backup="a.db", **wanted)
            assert result["state"] == "done", result
            assert result["report"]["restored"] == len(ids)
            if name == "far.db":
                assert result["report"]["skipped_overdue"]["ids"] == [str(due.id)]
            assert await stored(tmp_path / name) == ids
        with Daemon(tmp_path / "second", store=f"sqlite:///{tmp_path / 'all.db'}") as second:
            async with Client(second.url) as client:
                assert {task.id async for task in client.list_tasks()} == {far.id, due.id, late.id}
        dry = await restored(daemon, into="dry.db", backup="a.db", dry_run=True)
        assert dry["state"] == "done" and dry["report"]["restored"] == 3
        assert not (tmp_path / "dry.db").exists()
        nobody = await restored(daemon, into="none.db", backup="a.db", ids=["7"])
        assert nobody["report"]["not_found"]["ids"] == ["7"]
        assert "internal_error" not in daemon.log_text()


async def test_tasks_without_a_body_are_refused_and_named(tmp_path: Path) -> None:
    options: dict[str, Any] = {"http": True, "history_dir": str(tmp_path / "history")}
    with Daemon(tmp_path / "first", backup_dir=str(tmp_path), **options) as daemon:
        async with Client(daemon.url) as client:
            await asyncio.to_thread(ask, daemon, "POST", "backups", {"name": "a.db"})
            lost = await client.enqueue("t", b"lost", delay=3600)
        wanted = {"into": "new.db", "backup": "a.db"}
        result = await restored(daemon, **wanted)
        assert result["state"] == "refused"
        assert result["report"]["without_body"]["ids"] == [str(lost.id)]
        assert not (tmp_path / "new.db").exists()
        others = await restored(daemon, **wanted, allow_missing_bodies=True)
        assert others["state"] == "done" and (tmp_path / "new.db").exists()
        (tmp_path / "broken.db").write_bytes(b"no database")
        broken = await restored(daemon, into="b.db", backup="broken.db")
        assert broken["state"] == "failed" and "broken.db" in broken["error"]["message"]
        assert not [path for path in tmp_path.iterdir() if "restore" in path.name]
