"""The log of what operators did: every operation of theirs, over both transports, and nothing that
is secret."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest

from server.access.access_rig import AccessRig, id_of
from support.shard_rig import Peer
from support.stand_in import stand_in
from tickwheel import log_writer
from tickwheel.api.frames import FrameType as T
from tickwheel.api.verb import Right
from tickwheel.api.verbs import VERBS
from tickwheel.cli.app import run
from tickwheel.limits import Limits
from tickwheel.server.access import tokens
from tickwheel.server.logs import LINES_MAX
from tickwheel.server.shard.callers import Caller, NullSink
from tickwheel.server.shard.guard import AUDITED, IDS_MAX, TEXT_LENGTH_MAX, AuditStage

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


def lines(rig: AccessRig) -> list[dict[str, Any]]:
    """Once the thread has written them all."""
    assert rig.logins.audit is not None and rig.settings.audit_file is not None
    assert rig.logins.audit.close(10)
    path = Path(rig.settings.audit_file)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_every_changing_operation_is_audited() -> None:
    assert "backup" in AUDITED and "put_schedule" in AUDITED and "cancel" in AUDITED
    for name, need in ((verb.name, verb.need) for verb in VERBS.values()):
        if need is not None and need.right in (Right.OPERATE, Right.ADMIN):
            assert name in AUDITED, name
    assert not AUDITED & {"enqueue", "enqueue_plain", "ack", "list_tasks", "stats", "pull"}


async def test_audit_lines_name_caller_operation_and_outcome(rig: AccessRig) -> None:
    token = await rig.token("all", name="ops")
    peer = await rig.peer(token=token, client="a-tool")
    ids = (await peer.enqueue(*[("t", SECRET, DAY_MS, {"key": "k"})] * 12))[2][1]
    assert lines(rig)[1:] == []  # enqueues are not in it; the token is
    assert (await peer.call(T.CANCEL, ids[:11]))[0] == T.OK
    assert (await peer.call(T.CANCEL, (1, ids[0])))[0] == T.OK
    assert (await peer.call(T.GROUP_CREATE, "t", "g", {}))[0] == T.OK
    assert (await peer.call(T.GROUP_DELETE, "t", "none", False))[0] == T.ERROR
    result = lines(rig)[1:]
    first = result[0]
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
    assert sum(result[1]["counts"].values()) == 2 and "unknown" in result[1]["counts"]
    assert [(entry["operation"], entry["outcome"]) for entry in result[2:]] == [
        ("create_group", "ok"),
        ("delete_group", "not_found"),
    ]
    assert result[2]["named"] == {"group": "g", "topic": "t"}


async def test_a_paused_key_names_who_paused_it(rig: AccessRig) -> None:
    token = await rig.token("all", name="ops")
    peer = await rig.peer(token=token)
    await peer.call(T.GROUP_CREATE, "t", "g", {"fair_by": "tenant"})
    assert (await peer.call(T.PAUSE_KEY, "t", "g", "customer-7", None))[2]["by"] == "token ops"
    await peer.call(T.RESUME_KEY, "t", "g", None, 7)
    assert [(line["operation"], line["named"], line["who"]) for line in lines(rig)[2:]] == [
        ("pause_key", {"topic": "t", "group": "g", "key": "customer-7"}, "token ops"),
        ("resume_key", {"topic": "t", "group": "g", "value": 7}, "token ops"),
    ]


async def test_http_requests_and_refusals_are_audited(rig: AccessRig) -> None:
    few = await rig.token("read", name="few")
    ops = await rig.token("all", name="ops")
    assert (await rig.http(few, "DELETE", "/v1/topics/t")).status == 403
    schedule = {"topic": "t", "every_ms": 60_000, "body": SECRET.decode()}
    assert (await rig.http(ops, "PUT", "/v1/schedules/nightly", schedule)).status in (200, 201)
    results = [line for line in lines(rig) if not line["operation"].startswith("token_")]
    assert [(entry["who"], entry["operation"], entry["outcome"]) for entry in results] == [
        ("token few", "delete_topic", "forbidden"),
        ("token ops", "put_schedule", "ok"),
    ]
    assert results[1]["named"] == {"name": "nightly", "topic": "t", "every_ms": 60_000}
    assert results[1]["client"] == "http"


async def test_http_requests_with_invalid_values_are_audited_once(rig: AccessRig) -> None:
    ops = await rig.token("all", name="ops")
    for method, target, body in (
        ("DELETE", "/v1/tasks/x", None),
        ("POST", "/v1/cancellations", b"{"),
        ("PUT", "/v1/topics/t/groups/g", {"rate": "fast"}),
        ("PUT", "/v1/topics/t/groups/g", {"rate": -1}),
        ("DELETE", "/v1/topics/t/groups/g?forced=true", None),
        ("GET", "/v1/tasks?limit=x", None),
        ("POST", "/v1/tasks", b"{"),
    ):
        assert (await rig.http(ops, method, target, body)).status == 400, target
    assert [(line["operation"], line["outcome"], line["named"]) for line in lines(rig)[1:]] == [
        (operation, "bad_request", {})
        for operation in ("cancel", "cancel", "create_group", "create_group", "delete_group")
    ]


async def test_audit_lines_have_no_secrets_and_no_bodies(rig: AccessRig, path: Path) -> None:
    token = await rig.token("all", name="ops")
    peer = await rig.peer(token=token)
    await peer.call(T.GROUP_CREATE, "t", "x" * 10_000, {"note": SECRET})
    await peer.call(T.CANCEL, (SECRET.decode(),) * 5)
    await peer.call(T.CANCEL, SECRET)
    await rig.http(token, "PUT", "/v1/schedules/s", {"topic": "t", "every_ms": 60_000, "body": "b"})
    assert len(lines(rig)) == 5
    text = path.read_text()
    assert (
        token.split("_", 2)[2] not in text
        and tokens.read(rig.path)[id_of(token)].sha256 not in text
    )
    assert SECRET.decode() * 2 not in text and "x" * (TEXT_LENGTH_MAX + 1) not in text
    assert max(map(len, text.splitlines())) < 2_000
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_token_file_changes_are_audited(rig: AccessRig) -> None:
    token = await rig.token("produce=orders.*", name="shop")
    tokens.revoke(rig.path, "shop")
    await rig.reload()
    added, removed = lines(rig)
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


async def test_an_audit_line_is_written_before_the_answer(rig: AccessRig) -> None:
    peer = await rig.peer_with("all")
    rig.store.stall()
    number = peer.send(T.GROUP_CREATE, "t", "g", {})
    await rig.settle()
    assert len(lines(rig)) == 1  # the token's
    rig.store.go_on()
    assert (await peer.answer(number))[0] == T.OK
    assert lines(rig)[1]["outcome"] == "ok"


async def test_a_bulk_line_has_the_selection(rig: AccessRig) -> None:
    peer = await rig.peer_with("all")
    await peer.enqueue(("t", b"x", 60_000))
    asked = {"where": "amount > 10", "rate": 5, "id": "mine"}
    assert (await peer.call(T.BULK_MAKE, "t", "cancel", asked))[0] == T.OK
    assert (await peer.call(T.BULK_MAKE, "t", "cancel", {"id": "mine"}))[2] == "conflict"
    await peer.call(T.BULK, "mine", "cancel")
    await peer.call(T.BULK_PREVIEW, "t", "cancel", {})
    made, again, ended = lines(rig)[1:]
    assert (made["operation"], made["outcome"]) == ("make_bulk", "ok")
    assert made["named"] == {"kind": "cancel", "topic": "t", **asked}
    assert again["outcome"] == "conflict"
    assert (ended["operation"], ended["named"]) == ("cancel_bulk", {"bulk": "mine"})


async def test_a_spread_is_audited_when_asked_and_as_a_bulk(rig: AccessRig) -> None:
    peer = await rig.peer_with("all")
    await peer.enqueue(*[("t", b"x", 60_000, {"key": "k"})] * 3)
    of_key = {"topic": "t", "key": "k", "within_ms": 5_000}
    assert (await peer.call(T.SPREAD, None, of_key))[0] == T.OK
    assert (await peer.call(T.BULK_MAKE, "t", "spread", {"within_ms": 5_000}))[0] == T.OK
    at_once, made = lines(rig)[1:]
    assert (at_once["operation"], at_once["named"]) == ("spread", of_key)
    assert at_once["counts"] == {"scheduled": 3}
    assert made["operation"] == "make_bulk"
    assert made["named"] == {"kind": "spread", "topic": "t", "within_ms": 5_000}


async def test_a_disconnected_callers_operation_is_audited(rig: AccessRig) -> None:
    peer = await rig.peer_with("all")
    rig.store.stall()
    peer.send(T.GROUP_CREATE, "t", "g", {})
    await rig.settle()
    peer.lose()
    rig.store.go_on()
    await rig.until(lambda: len(lines(rig)) == 2)
    assert lines(rig)[1]["operation"] == "create_group"


async def test_an_operation_without_an_answer_has_an_unknown_outcome() -> None:
    written: list[dict[str, Any]] = []
    log: Any = SimpleNamespace(write=written.append, open_lines=WeakSet())
    caller, answer = Caller(NullSink(), address="127.0.0.1:9"), asyncio.Future[Any]()
    asked: Any = VERBS["delete_topic"].request_type.checked({"topic": "t"}, Limits())
    waiting = asyncio.ensure_future(AuditStage(log).relayed(caller, "delete_topic", asked, answer))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait((waiting,))
    [line] = written
    assert (line["operation"], line["outcome"]) == ("delete_topic", "outcome_unknown")


async def test_a_request_without_an_answer_is_audited_once(rig: AccessRig) -> None:
    """Its change may be in the store of a daemon that no longer leads."""
    peer = await rig.peer_with("all")
    rig.store.stall()
    number = peer.send(T.GROUP_CREATE, "t", "g", {})
    await rig.settle()
    await rig.logins.stop()
    rig.store.go_on()
    assert (await peer.answer(number))[0] == T.OK
    assert [(line["operation"], line["outcome"]) for line in lines(rig)[1:]] == [
        ("create_group", "outcome_unknown")
    ]


async def test_the_audit_log_is_rotated_at_its_limit(path: Path) -> None:
    most = 64 * 1024
    rig = await AccessRig(audit_file=str(path), audit_bytes_max=most).start()
    assert isinstance(rig, AccessRig)
    try:
        peer = await rig.peer_with("all")
        for _ in range(600):
            await peer.call(T.CANCEL, (1,))
        lines(rig)
        older = path.with_name("audit.jsonl.1")
        assert most // 2 < older.stat().st_size <= most and path.stat().st_size <= most
        for file in (path, older):
            for line in file.read_text().splitlines():
                json.loads(line)
    finally:
        await rig.stop()


async def test_an_unwritable_audit_log_stops_no_operation(tmp_path: Path) -> None:
    path = tmp_path / "gone" / "audit.jsonl"
    rig = await AccessRig(audit_file=str(path)).start()
    assert isinstance(rig, AccessRig)
    try:
        peer = await rig.peer_with("all")
        for _ in range(3):
            assert (await peer.call(T.CANCEL, (1,)))[0] == T.OK
        assert lines(rig) == []
        assert not rig.observed.audit_ok
        await rig.until(lambda: "audit_unwritable" in [event for event, _ in rig.notices])
        await rig.settle()
        assert [event for event, _ in rig.notices].count("audit_unwritable") == 1
        path.parent.mkdir()
        assert (await peer.call(T.CANCEL, (1,)))[0] == T.OK
        lost, written = lines(rig)
        assert rig.observed.audit_ok and written["operation"] == "cancel"
        assert (lost["operation"], lost["count"]) == ("audit_lines_lost", 4)  # the token's, too
    finally:
        await rig.stop()


async def test_an_audit_line_begins_after_a_torn_one(
    rig: AccessRig, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first was torn by a daemon that has ended, the third by a disk that became full."""
    path.write_text("torn")
    log, sizes = rig.logins.audit, [5, 1_000, 9]
    assert log is not None

    def write(fd: int, data: bytes) -> int:
        if sizes:
            return os.write(fd, data[: sizes.pop(0)])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(log_writer, "os", stand_in(os, write=write))
        for operation in ("second", "third"):
            log.write({"operation": operation})
            assert log.flush(10)
    log.write({"operation": "fifth"})
    assert log.close(10)
    first, second, third, *others = path.read_text().splitlines()
    assert (first, third) == ("torn", '{"at": "2')
    operations = [json.loads(line)["operation"] for line in (second, *others)]
    assert operations == ["second", "audit_lines_lost", "fifth"]


async def test_lines_that_wait_for_a_slow_disk_have_a_limit(
    rig: AccessRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the limit and one above it: the loop waits for nobody, and the rest is counted."""
    log = rig.logins.audit
    assert log is not None
    goes_on, taken, append = threading.Event(), threading.Event(), log.write_line

    def stuck(line: bytes) -> None:
        taken.set()
        assert goes_on.wait(20)
        append(line)

    monkeypatch.setattr(log, "write_line", stuck)
    log.write({"operation": "first"})
    assert await asyncio.to_thread(taken.wait, 20)
    size = len(log._line({"operation": "n"}))
    monkeypatch.setattr(log_writer, "WAITING_BYTES_MAX", 3 * size)
    for _ in range(5):
        log.write({"operation": "n"})
    goes_on.set()
    operations = [entry["operation"] for entry in lines(rig)]
    assert operations == ["first", "audit_lines_lost", "n", "n", "n"]
    assert lines(rig)[1]["count"] == 2


async def test_a_clean_stop_waits_for_every_line(
    rig: AccessRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = rig.logins.audit
    assert log is not None
    is_stuck, goes_on, append = threading.Event(), threading.Event(), log.write_line

    def stuck(line: bytes) -> None:
        is_stuck.set()
        assert goes_on.wait(20)
        append(line)

    monkeypatch.setattr(log, "write_line", stuck)
    log.write({"operation": "0"})
    # The thread has that one; the others still wait for it when the stop begins.
    assert await asyncio.to_thread(is_stuck.wait, 20)
    for number in range(1, 100):
        log.write({"operation": str(number)})
    stopping = asyncio.create_task(rig.logins.stop())

    def is_closing() -> bool:
        with log._changed:
            return log._changed.wait_for(lambda: log._is_closing, 20)

    assert await asyncio.to_thread(is_closing)
    goes_on.set()
    await stopping
    assert [entry["operation"] for entry in lines(rig)] == [str(number) for number in range(100)]
    log.write({"operation": "later"})
    assert lines(rig)[-1]["operation"] == "later"


async def test_a_stuck_disk_does_not_block_a_stop(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = await AccessRig(audit_file=str(path), drain_timeout_s=0.05).start()
    assert isinstance(rig, AccessRig)
    log = rig.logins.audit
    assert log is not None
    goes_on, append = threading.Event(), log.write_line

    def stuck(line: bytes) -> None:
        assert goes_on.wait(20)
        append(line)

    monkeypatch.setattr(log, "write_line", stuck)
    log.write({"operation": "n"})
    await rig.logins.stop()
    assert [event for event, _ in rig.notices] == ["audit_unfinished"]
    goes_on.set()
    await rig.stop()


async def test_run_schedule_in_a_batch_with_an_enqueue_is_audited(rig: AccessRig) -> None:
    """Two requests of one connection in one batch, beside an enqueue of its own."""
    peer = await rig.peer_with("all", "produce=t")
    schedule = {"topic": "t", "body": b"", "every_ms": 60_000}
    assert (await peer.call(T.SCHEDULE_PUT, "s", schedule))[0] == T.OK
    rig.store.stall()
    numbers = [peer.send(T.ENQUEUE, peer.request + 1, (("t", b"", 0),))]
    numbers += [peer.send(T.SCHEDULE, "s", "run", {})]
    await rig.settle()
    rig.store.go_on()
    for number in numbers:
        assert (await peer.answer(number))[0] == T.OK
    ran = [line for line in lines(rig) if line["operation"] == "run_schedule"]
    assert [(entry["outcome"], entry["counts"]) for entry in ran] == [("ok", {"tasks": 1})]


async def prepared(rig: AccessRig, peer: Peer, *names: str) -> None:
    for name in names:
        half = ("t", SECRET, DAY_MS)
        assert (await peer.call(T.PREPARE, name, "payments", 1, (half, half), {}))[0] == T.OK


async def test_an_operators_decision_is_audited(rig: AccessRig) -> None:
    producer, operator = await rig.peer_with("all"), await rig.peer_with("all")
    await prepared(rig, producer, "a", "b", "c")
    rig.store.stall()
    numbers = [operator.send(T.COMMIT, "a"), operator.send(T.ROLLBACK, "b")]
    numbers += [operator.send(T.COMMIT, "none")]
    await rig.settle()
    rig.store.go_on()
    answers = [await operator.answer(number) for number in numbers]
    assert [answer[0] for answer in answers] == [T.OK, T.OK, T.ERROR]
    assert (await operator.call(T.COMMIT, "a"))[0] == T.OK  # once more
    results = [line for line in lines(rig) if line["operation"].endswith("_transaction")]
    rows = {
        (entry["operation"], entry["named"]["transaction"], entry["outcome"]) for entry in results
    }
    assert rows == {
        ("commit_transaction", "a", "ok"),
        ("rollback_transaction", "b", "ok"),
        ("commit_transaction", "none", "unknown_transaction"),
    }
    commits = [entry["counts"] for entry in results if entry["named"]["transaction"] == "a"]
    assert commits == [{"tasks": 2}] * 2


async def test_producers_decisions_are_not_audited(rig: AccessRig) -> None:
    producer, member = await rig.peer_with("all"), await rig.peer_with("all")
    await prepared(rig, producer, "a", "b")
    assert (await member.call(T.CHECKS, ("payments",)))[0] == T.OK
    assert (await producer.call(T.COMMIT, "a"))[0] == T.OK
    assert (await member.call(T.ROLLBACK, "b"))[0] == T.OK
    assert not [line for line in lines(rig) if line["operation"].endswith("_transaction")]
    token = await rig.token("all")
    assert (await rig.http(token, "POST", "/v1/transactions/a/commit")).status == 200
    assert lines(rig)[-1]["operation"] == "commit_transaction"


async def test_a_decision_on_anothers_transaction_is_audited(rig: AccessRig) -> None:
    """A token that may decide is a member as soon as it says so, and that hides nothing."""
    shop, also = await rig.token("all", name="shop"), await rig.token("all", name="also")
    producer, other = await rig.peer(token=shop), await rig.peer(token=also)
    await prepared(rig, producer, "a", "b", "c")
    assert (await other.call(T.CHECKS, ("payments",)))[0] == T.OK
    half = ("t", SECRET, DAY_MS)
    assert (await other.call(T.PREPARE, "c", "payments", 2, (half,), {}))[0] == T.OK
    assert (await other.call(T.ROLLBACK, "a"))[0] == T.OK
    assert (await other.call(T.COMMIT, "b"))[0] == T.OK
    assert (await other.call(T.COMMIT, "c"))[0] == T.OK
    results = [line for line in lines(rig) if line["operation"].endswith("_transaction")]
    assert [entry["named"]["transaction"] for entry in results] == ["a", "b", "c"]
    assert {entry["who"] for entry in results} == {"token also"}


async def test_console_logins_are_audited_and_failures_limited(rig: AccessRig) -> None:
    token = await rig.token("read", name="few")
    begun = len(lines(rig))
    for method, path, operation in (
        ("POST", "/v1/sessions", "console_login"),
        ("POST", "/v1/session-links", "console_link"),
        ("DELETE", "/v1/session", "console_logout"),
    ):
        assert (await rig.http(token, method, path)).status in (200, 201)
        last = lines(rig)[-1]
        assert (last["who"], last["operation"], last["outcome"]) == ("token few", operation, "ok")
    assert len(lines(rig)) == begun + 3
    for _ in range(LINES_MAX + 5):
        assert (await rig.http("tw_x_y", "POST", "/v1/sessions")).status == 401
    failed = lines(rig)[begun + 3 :]
    assert len(failed) == LINES_MAX
    assert {(entry["who"], entry["outcome"]) for entry in failed} == {("nobody", "unauthorized")}
    rig.sources.now_ms += 60_000
    await rig.http("tw_x_y", "POST", "/v1/sessions")
    assert lines(rig)[-1]["counts"] == {"left_out": 5}
    assert "tw_x_y" not in Path(str(rig.settings.audit_file)).read_text()


@pytest.mark.parametrize(
    "store",
    ["sqlite:///shop.db", "sqlite:///shards/", "redis://127.0.0.1:1/0?shards=2"],
    ids=["a daemon", "shards", "a node"],
)
@pytest.mark.parametrize(
    ("audit_file", "said"),
    [("none/audit.log", "the folder of none/audit.log does not exist"), (".", ". is a folder")],
)
def test_an_audit_file_that_cannot_be_created_stops_the_start(
    store: str, audit_file: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    more = ["--processes", "2"] if store.endswith("/") else []
    assert run(["serve", "--store", store, "--set", f"audit_file={audit_file}", *more]) in (1, 2)
    error = capsys.readouterr().err
    assert f"setting audit_file: {said}" in error.splitlines()[-1] and "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


async def test_answers_of_audited_requests_count_towards_the_limit(rig: AccessRig) -> None:
    peer = await rig.peer_with("all")
    rig.store.stall()
    peer.send(T.GROUP_CREATE, "t", "g", {})
    await rig.settle()
    [caller] = rig.shard.callers
    committer = rig.shard.committer
    committer._replies_bytes_max = committer._bytes_by_sink[caller.replies]
    assert rig.operations.is_behind(caller) and not rig.shard.may_begin_command(caller)
    rig.store.go_on()
    await rig.until(lambda: not rig.operations.is_behind(caller))
