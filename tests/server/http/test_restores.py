"""Restores over HTTP: what is refused before one begins, one at a time, how each can end.

The processes are stand-ins here, which say what a test needs; ``test_restores_daemon`` has the real
ones."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from server.http.rig import HttpRig, Response
from support.waiting import comes
from tickwheel.api.daemon import Restore
from tickwheel.server.http.declared import answer_type
from tickwheel.server.shard import backups
from tickwheel.server.shard.backups import RESTORES_KEPT_MAX

WORKS = """
import sys
sys.stdin.readline()
print('{"step": "writing", "done": 5, "of": 9}', flush=True)
sys.stdin.read()
"""
DEAF = """
import time
print('{"step": "events", "done": 1, "of": null}', flush=True)
time.sleep(600)  # real time: a process that hangs
"""
DIES = "import sys; sys.exit(7)"
REFUSED = """import sys; sys.stdin.readline(); print('{"report": {"refused": true}}')"""


async def a_rig(folder: Path) -> HttpRig:
    running = await HttpRig().start()
    running.shard.restores._folder = folder
    (folder / "a.db").write_bytes(b"a backup")
    return running


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[HttpRig]:
    running = await a_rig(tmp_path)
    yield running
    await running.stop()


def by(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(backups, "COMMAND", (sys.executable, "-c", program))


def is_right(response: Response, status: int = 200) -> dict[str, Any]:
    assert response.status == status, response.body
    msgspec.json.decode(response.body, type=answer_type(Restore))
    result: dict[str, Any] = response.json
    return result


async def begun(rig: HttpRig, into: str = "new.db") -> dict[str, Any]:
    asked = rig.begin("POST", "/v1/restores", {"into": into, "backup": "a.db"})
    await asked.task
    return is_right(asked.response, 202)


async def over(rig: HttpRig, restore_id: str) -> dict[str, Any]:
    """Once it has ended by itself."""
    await rig.shard.restores.find(int(restore_id)).ended.wait()
    return is_right(await rig.call("GET", f"/v1/restores/{restore_id}"))


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({"into": "../new.db", "backup": "a.db"}, 400, "into"),
        ({"into": "new.db", "backup": "/etc/passwd"}, 400, "backup"),
        ({"into": "x" * 201, "backup": "a.db"}, 400, "200"),
        ({"into": "new.db"}, 400, "history_dir"),
        ({"into": "new.db", "backup": "a.db", "ids": []}, 400, "ids"),
        ({"into": "new.db", "backup": "a.db", "ids": ["x"]}, 400, "ids[0]"),
        ({"backup": "a.db"}, 400, "into"),
    ],
)
async def test_an_invalid_restore_request_starts_nothing(
    rig: HttpRig, body: dict[str, Any], status: int, word: str
) -> None:
    asked = rig.begin("POST", "/v1/restores", body)
    await asked.task
    assert asked.response.status in (status, 422), asked.response.body
    assert word in asked.response.json["detail"]
    assert (await rig.call("GET", "/v1/restores")).json == {"restores": []}


async def test_one_restore_runs_at_a_time(rig: HttpRig, monkeypatch: pytest.MonkeyPatch) -> None:
    by(monkeypatch, WORKS)
    first = await begun(rig)
    assert first["state"] == "running" and first["ended_ms"] is None
    known = rig.shard.restores.find(int(first["id"]))
    await comes(lambda: known.step == "writing")
    second = rig.begin("POST", "/v1/restores", {"into": "other.db", "backup": "a.db"})
    await second.task
    assert second.response.status == 409 and first["id"] in second.response.json["detail"]
    cancel = rig.begin("DELETE", f"/v1/restores/{first['id']}")
    await cancel.task
    ended = is_right(cancel.response)
    assert (ended["state"], ended["error"], ended["report"]) == ("cancelled", None, None)
    assert ended["progress"] == {"step": "writing", "done": 5, "total": 9}
    again = is_right(await rig.call("DELETE", f"/v1/restores/{first['id']}"))
    assert again == ended, "one that has ended stays as it is"
    taken = rig.begin("POST", "/v1/restores", {"into": "b.db", "backup": "a.db", "id": first["id"]})
    await taken.task
    assert taken.response.status == 409 and first["id"] in taken.response.json["detail"]
    third = await begun(rig)
    assert int(third["id"]) > int(first["id"])
    listed = (await rig.call("GET", "/v1/restores")).json["restores"]
    assert [row["id"] for row in listed] == [third["id"], first["id"]]


async def test_an_unstoppable_restore_is_killed_and_cleaned_up(
    rig: HttpRig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    by(monkeypatch, DEAF)
    monkeypatch.setattr(backups, "RESTORE_STOP_S", 0.01)
    made = await begun(rig)
    known = rig.shard.restores.find(int(made["id"]))
    await comes(lambda: known.step == "events")
    assert known.process is not None
    part = tmp_path / f"new.db.part-{known.process.pid}"
    scratch = tmp_path / f".tickwheel-restore-{known.process.pid}-x"
    scratch.mkdir()
    for path in (part, part.with_name(part.name + "-wal"), scratch / "backup.db"):
        path.write_bytes(b"half")
    cancel = rig.begin("DELETE", f"/v1/restores/{made['id']}")
    await cancel.task
    assert is_right(cancel.response)["state"] == "cancelled"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.db"]


async def test_a_failed_restore_names_its_error(
    rig: HttpRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    by(monkeypatch, DIES)
    died = await over(rig, (await begun(rig))["id"])
    assert died["state"] == "failed" and "code 7" in died["error"]["message"]
    by(monkeypatch, REFUSED)
    refused = await over(rig, (await begun(rig))["id"])
    assert refused["state"] == "refused" and refused["report"]["backup"] == "a.db"
    monkeypatch.setattr(backups, "COMMAND", ("/no/such/program",))
    none = await over(rig, (await begun(rig))["id"])
    assert none["state"] == "failed" and "No such file" in none["error"]["message"]


async def test_the_newest_restores_are_remembered(
    rig: HttpRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    by(monkeypatch, DIES)
    monkeypatch.setattr(backups, "RESTORES_KEPT_MAX", 3)
    assert RESTORES_KEPT_MAX > 3
    made = []
    for _ in range(4):
        made.append((await begun(rig))["id"])
        await over(rig, made[-1])
    listed = (await rig.call("GET", "/v1/restores")).json["restores"]
    assert [row["id"] for row in listed] == made[:0:-1]
    for method in ("GET", "DELETE"):
        gone = await rig.call(method, f"/v1/restores/{made[0]}")
        assert gone.status == 404 and gone.json["code"] == "not_found"


async def test_a_restore_ends_with_the_tenure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by(monkeypatch, DEAF)
    rig = await a_rig(tmp_path)
    known = rig.shard.restores.find(int((await begun(rig))["id"]))
    await comes(lambda: known.step == "events")
    await rig.stop()
    assert known.state == "failed" and known.process is not None
    assert known.process.returncode == -9
