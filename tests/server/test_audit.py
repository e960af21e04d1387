"""The log of what operators did: every operation of theirs, over both transports, and nothing that
is secret."""

from __future__ import annotations

import json
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from server.access_rig import AccessRig, id_of
from tickwheel.protocol.frames import FrameType as T
from tickwheel.server import tokens
from tickwheel.server.shard.access import RIGHTS, Right
from tickwheel.server.shard.audit import AUDITED, IDS_MAX, TEXT_LENGTH_MAX

DAY_MS = 86_400_000
SECRET = b"body-that-nobody-shall-see"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


@pytest.fixture
async def rig(path: Path) -> AsyncIterator[AccessRig]:
    running = await AccessRig(audit_file=str(path)).start()
    assert isinstance(running, AccessRig)
    yield running
    await running.stop()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_whatever_changes_what_others_have_is_in_it() -> None:
    assert "backup" in AUDITED and "put_schedule" in AUDITED and "cancel" in AUDITED
    for name, need in RIGHTS.items():
        if need is not None and need.right in (Right.OPERATE, Right.ADMIN):
            assert name in AUDITED, name
    assert not AUDITED & {"enqueue", "enqueue_plain", "ack", "list_tasks", "stats", "pull"}


async def test_who_did_what_and_how_it_ended(rig: AccessRig, path: Path) -> None:
    token = await rig.token("all", name="ops")
    peer = await rig.peer(token=token, client="a-tool")
    ids = (await peer.enqueue(*[("t", SECRET, DAY_MS, {"key": "k"})] * 12))[2][1]
    assert lines(path)[1:] == []  # enqueues are not in it; the token is
    assert (await peer.call(T.CANCEL, ids[:11]))[0] == T.OK
    assert (await peer.call(T.CANCEL, (1, ids[0])))[0] == T.OK
    assert (await peer.call(T.GROUP_CREATE, "t", "g", {}))[0] == T.OK
    assert (await peer.call(T.GROUP_DELETE, "t", "none", False))[0] == T.ERROR
    found = lines(path)[1:]
    first = found[0]
    assert first.pop("at").endswith("+00:00")
    assert ":" in first.pop("from")
    assert first == {
        "who": "token ops",
        "token": id_of(token),
        "client": "a-tool",
        "operation": "cancel",
        "named": {"count": 11, "ids": [str(i) for i in ids[:IDS_MAX]]},
        "outcome": "ok",
        "counts": {"cancelled": 11},
    }
    assert sum(found[1]["counts"].values()) == 2 and "unknown" in found[1]["counts"]
    assert [(one["operation"], one["outcome"]) for one in found[2:]] == [
        ("create_group", "ok"),
        ("delete_group", "not_found"),
    ]
    assert found[2]["named"] == {"group": "g", "topic": "t"}


async def test_over_http_too_and_what_is_refused(rig: AccessRig, path: Path) -> None:
    few = await rig.token("read", name="few")
    ops = await rig.token("all", name="ops")
    assert (await rig.http(few, "DELETE", "/v1/topics/t")).status == 403
    schedule = {"topic": "t", "every_ms": 60_000, "body": SECRET.decode()}
    assert (await rig.http(ops, "PUT", "/v1/schedules/nightly", schedule)).status in (200, 201)
    found = [one for one in lines(path) if not one["operation"].startswith("token_")]
    assert [(one["who"], one["operation"], one["outcome"]) for one in found] == [
        ("token few", "delete_topic", "forbidden"),
        ("token ops", "put_schedule", "ok"),
    ]
    assert found[1]["named"] == {"name": "nightly"} and found[1]["client"] == "http"


async def test_it_has_no_secrets_and_no_bodies(rig: AccessRig, path: Path) -> None:
    token = await rig.token("all", name="ops")
    peer = await rig.peer(token=token)
    await peer.call(T.GROUP_CREATE, "t", "x" * 10_000, {"note": SECRET})
    await peer.call(T.CANCEL, (SECRET.decode(),) * 5)
    await peer.call(T.CANCEL, SECRET)
    await rig.http(token, "PUT", "/v1/schedules/s", {"topic": "t", "every_ms": 60_000, "body": "b"})
    text = path.read_text()
    assert (
        token.split("_", 2)[2] not in text
        and tokens.read(rig.path)[id_of(token)].sha256 not in text
    )
    assert SECRET.decode() * 2 not in text and "x" * (TEXT_LENGTH_MAX + 1) not in text
    assert max(map(len, text.splitlines())) < 2_000
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_changes_of_the_file_of_tokens(rig: AccessRig, path: Path) -> None:
    token = await rig.token("produce=orders.*", name="shop")
    tokens.revoke(rig.path, "shop")
    await rig.reload()
    added, removed = lines(path)
    assert (added["operation"], removed["operation"]) == ("token_added", "token_removed")
    assert (
        added["named"]
        == removed["named"]
        == {
            "id": id_of(token),
            "name": "shop",
            "scopes": {"produce": ["orders.*"]},
        }
    )
    assert added["who"] == str(rig.path)


async def test_a_line_is_there_before_its_answer(rig: AccessRig, path: Path) -> None:
    peer = await rig.peer_with("all")
    rig.store.stall()
    number = peer.send(T.GROUP_CREATE, "t", "g", {})
    await rig.settle()
    assert len(lines(path)) == 1  # the token's
    rig.store.go_on()
    assert (await peer.answer(number))[0] == T.OK
    assert lines(path)[1]["outcome"] == "ok"


async def test_who_has_gone_is_in_it_all_the_same(rig: AccessRig, path: Path) -> None:
    peer = await rig.peer_with("all")
    rig.store.stall()
    peer.send(T.GROUP_CREATE, "t", "g", {})
    await rig.settle()
    peer.lose()
    rig.store.go_on()
    await rig.until(lambda: len(lines(path)) == 2)
    assert lines(path)[1]["operation"] == "create_group"


async def test_it_grows_to_its_limit_and_no_further(path: Path) -> None:
    most = 64 * 1024
    rig = await AccessRig(audit_file=str(path), audit_bytes_max=most).start()
    assert isinstance(rig, AccessRig)
    try:
        peer = await rig.peer_with("all")
        for _ in range(600):
            await peer.call(T.CANCEL, (1,))
        older = path.with_name("audit.jsonl.1")
        assert most // 2 < older.stat().st_size <= most and path.stat().st_size <= most
        for file in (path, older):
            for line in file.read_text().splitlines():
                json.loads(line)
    finally:
        await rig.stop()


async def test_a_log_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    path = tmp_path / "gone" / "audit.jsonl"
    rig = await AccessRig(audit_file=str(path)).start()
    assert isinstance(rig, AccessRig)
    try:
        peer = await rig.peer_with("all")
        for _ in range(3):
            assert (await peer.call(T.CANCEL, (1,)))[0] == T.OK
        assert not rig.observed.audit_ok
        assert [event for event, _ in rig.notices].count("audit_unwritable") == 1
        path.parent.mkdir()
        assert (await peer.call(T.CANCEL, (1,)))[0] == T.OK
        assert rig.observed.audit_ok and len(lines(path)) == 1
    finally:
        await rig.stop()
