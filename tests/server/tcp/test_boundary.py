"""The border inside every command: before it has changed anything, an unexpected error is an
answer; after that it ends the daemon, because memory is the truth. And a task that cannot be
written ends as a dead letter, alone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from structlog.contextvars import get_contextvars

from support.in_process import InProcess
from support.shard_rig import Peer
from support.traces import TRACE
from tickwheel.api.frames import FrameType as T
from tickwheel.api.shapes import Request
from tickwheel.engine.topics import TaskOptions
from tickwheel.model.kinds import Bulk, Selection, TargetRow
from tickwheel.protocol import encode
from tickwheel.server.shard import tasks
from tickwheel.server.shard.operations import Operations
from tickwheel.server.tcp import listener as wire
from tickwheel.server.tcp import shared
from tickwheel.server.tcp.listener import command_table, value_bytes


class Unexpected(Exception):
    """Nobody raises it on purpose."""


def raising(*_: Any, **__: Any) -> Any:
    raise Unexpected("seeded")


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[InProcess]:
    async with InProcess(tmp_path) as running:
        yield running


async def ask(daemon: InProcess, peer: Peer, kind: T, *fields: Any, request: int = 50) -> Any:
    """The answer."""
    peer.feed(encode((int(kind), request, *fields)))
    await daemon.settle()
    (found,) = [
        frame for frame in peer.frames() if frame[0] in (T.OK, T.ERROR) and frame[1] == request
    ]
    return found


OF_KEY = {"topic": "t", "key": "k"}
KEYED = ("t", b"", 60_000, {"key": "k"})


async def leased(daemon: InProcess, peer: Peer) -> int:
    """A task that this peer has, on topic ``t`` for group ``g``; another one is scheduled."""
    await ask(daemon, peer, T.GROUP_CREATE, "t", "g", None, request=2)
    answer = await ask(daemon, peer, T.ENQUEUE, 0, (("t", b"", 0), KEYED), request=3)
    await ask(daemon, peer, T.PULL, "t", "g", 1, 0, None, request=4)
    await ask(daemon, peer, T.SCHEDULE_PUT, "s", EVERY, request=6)
    await ask(daemon, peer, T.PREPARE, "x", "g", 1, PLAIN, None, request=7)
    await ask(daemon, peer, T.GROUP_CREATE, "far", "g", None, request=8)
    daemon.shard.engine.grouping.set_target(TargetRow("far", "g", "push", URL, (), (), 0, ""))
    daemon.shard.outbound = None  # nobody sends
    daemon.shard.engine.bulks.make(Bulk("j", "cancel", "t", Selection(), (), None, 0, 0))
    task_id: int = answer[2][1][0]
    return task_id


URL = "https://8.8.8.8/"
SECRETS = {"secrets": (f"whsec_{'A' * 32}",)}
PLAIN = (("t", b"", 0),)
EVERY = {"topic": "t", "every_ms": 5_000}
SPAN = {"from_ms": 0, "to_ms": 10_000}
ACTS: dict[str, tuple[T, str, str, Any]] = {
    "enqueue": (T.ENQUEUE, "intake", "enqueue", lambda i: (0, (*PLAIN, *PLAIN))),
    "run": (T.ENQUEUE, "intake", "enqueue_singles", lambda i: (0, PLAIN)),
    "columns": (T.ENQUEUE_COLUMNS, "intake", "enqueue", lambda i: (0, "t", (b"", b""), 5)),
    "once": (T.ENQUEUE_ONCE, "intake", "enqueue", lambda i: (b"k", 7, (*PLAIN, *PLAIN))),
    "oneway": (T.ONEWAY, "intake", "enqueue", lambda i: (PLAIN,)),
    "subscribe": (T.SUBSCRIBE, "subscriptions", "subscribe", lambda i: (1, "t", "g", 1, None)),
    "new group": (T.SUBSCRIBE, "grouping", "create", lambda i: (1, "t", "new", 1, None)),
    "unsubscribe": (T.UNSUBSCRIBE, "subscriptions", "unsubscribe", lambda i: (9,)),
    "pull": (T.PULL, "subscriptions", "subscribe", lambda i: ("t", "g", 1, 0, None)),
    "ack": (T.ACK, "settlement", "ack", lambda i: ("t", "g", 1, (i,), (1,))),
    "ack later": (T.ACK, "settlement", "ack_idle", lambda i: ("t", "g", 1, (i,), (7,))),
    "nack": (T.NACK, "settlement", "nack", lambda i: ("t", "g", ((i, 1, 1, None, None),))),
    "reject": (T.REJECT, "settlement", "reject", lambda i: ("t", "g", ((i, 1, 1, None),))),
    "extend": (T.EXTEND, "settlement", "extend", lambda i: ("t", "g", 1, (i,), (1,), 500)),
    "snooze": (T.SNOOZE, "settlement", "snooze", lambda i: ("t", "g", ((i, 1, 1, 5),))),
    "release": (T.RELEASE, "settlement", "release", lambda i: ("t", "g", 1, (i,), (1,))),
    "cancel": (T.CANCEL, "control", "cancel", lambda i: ((i,),)),
    "reschedule": (T.RESCHEDULE, "control", "reschedule", lambda i: ((i,), {"delay_ms": 5})),
    "run now": (T.RUN_NOW, "control", "reschedule", lambda i: ((i,),)),
    "cancel key": (T.CANCEL, "control", "cancel_many", lambda i: (None, OF_KEY)),
    "reschedule key": (
        T.RESCHEDULE, "control", "reschedule_many", lambda i: (None, {**OF_KEY, "delay_ms": 5}),
    ),
    "spread": (
        T.SPREAD, "control", "reschedule_many", lambda i: (None, {**OF_KEY, "within_ms": 9}),
    ),
    "run now key": (T.RUN_NOW, "control", "reschedule_many", lambda i: (None, OF_KEY)),
    "requeue": (T.DEAD_REQUEUE, "control", "settle_dead", lambda i: (((i, "g"),),)),
    "delete": (T.DEAD_DELETE, "control", "settle_dead", lambda i: (((i, "g"),),)),
    "create": (T.GROUP_CREATE, "grouping", "create", lambda i: ("t", "h", None)),
    "close": (T.GROUP_DELETE, "closing", "close", lambda i: ("t", "g", True)),
    "close topic": (T.TOPIC_DELETE, "topic_closing", "close", lambda i: ("other", True)),
    "set": (T.CONFIGURE, "grouping", "set", lambda i: ("t", "g", {"paused": True})),
    "put": (T.SCHEDULE_PUT, "schedules", "put", lambda i: ("new", EVERY)),
    "pause": (T.SCHEDULE, "schedules", "pause", lambda i: ("s", "pause", None)),
    "run schedule": (T.SCHEDULE, "schedules", "run", lambda i: ("s", "run", None)),
    "fill": (T.SCHEDULE, "schedules", "backfill", lambda i: ("s", "backfill", SPAN)),
    "delete schedule": (T.SCHEDULE, "schedules", "delete", lambda i: ("s", "delete", None)),
    "prepare": (T.PREPARE, "transactions", "prepare", lambda i: ("new", "g", 1, PLAIN, None)),
    "commit": (T.COMMIT, "transactions", "commit", lambda i: ("x",)),
    "roll back": (T.ROLLBACK, "transactions", "rollback", lambda i: ("x",)),
    "make bulk operation": (T.BULK_MAKE, "bulks", "make", lambda i: ("t", "cancel", None)),
    "reset": (T.GROUP_RESET, "resets", "begin", lambda i: ("t", "g", {"to": "first"})),
    "end bulk operation": (T.BULK, "bulks", "end", lambda i: ("j", "cancel")),
    "answer checks": (T.CHECKS, "transactions", "member_connected", lambda i: (("g",),)),
    "release key": (T.RELEASE_KEY, "key_control", "release", lambda i: ("t", "g", (i,), None)),
    "skip key": (T.SKIP_KEY, "key_control", "skip", lambda i: ("t", "g", (i,), None)),
    "push": (T.PUSH_SET, "grouping", "set_target", lambda i: ("u", "g", URL, SECRETS)),
    "forward": (T.FORWARD_SET, "grouping", "set_target", lambda i: ("u", "g", URL, None)),
    "send nowhere": (T.TARGET_REMOVE, "grouping", "drop_target", lambda i: ("far", "g")),
    "pause key": (T.PAUSE_KEY, "key_control", "pause", lambda i: ("t", "g", "k", None)),
    "resume key": (T.RESUME_KEY, "key_control", "resume", lambda i: ("t", "g", "k", None)),
    "set topic": (T.CONFIGURE, "grouping", "set_topic", lambda i: ("t", None, {"paused": True})),
}  # fmt: skip
"""By name: a frame, and the engine's verb that it ends in."""


@pytest.mark.parametrize("name", ACTS)
async def test_an_error_in_the_middle_of_a_change_ends_the_daemon(
    daemon: InProcess, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, part, verb, fields = ACTS[name]
    peer = daemon.connect(session=b"s" * 16)
    task_id = await leased(daemon, peer)
    await ask(daemon, peer, T.SUBSCRIBE, 9, "other", "g", 0, None, request=5)
    monkeypatch.setattr(getattr(daemon.shard.engine, part), verb, raising)
    failed = daemon.shard.failed
    try:
        peer.feed(encode((int(kind), 0 if kind is T.ONEWAY else 50, *fields(task_id))))
        await daemon.turn()
    except Unexpected:
        pass
    assert failed.done() and isinstance(failed.exception(), Unexpected)
    monkeypatch.undo()


def test_every_command_that_changes_something_is_in_the_table(daemon: InProcess) -> None:
    operations = Operations(daemon.shard, value_bytes)
    table = command_table(operations, operations.verbs).handlers
    reads = {
        T.LOOKUP, T.LIST, T.PEEK, T.SCHEDULE_LIST, T.STATS, T.LOAD, T.DEAD_LIST, T.BACKUP,
        T.PING, T.STATUS, T.TRANSACTION_LIST, T.TRANSACTION_SHOW, T.BULK_LIST, T.BULK_PREVIEW,
        T.GROUP_RESET_PREVIEW, T.HELD_KEYS, T.KEY_LINES, T.CONSUMER_LIST,
        T.TARGET_LIST, T.PUSH_TEST, T.PUSH_LOG, T.PUSH_RESEND,
        T.NODE_LIST, T.SHARD_MOVE, T.NODE_DRAIN, T.TOPIC_LIST, T.TOPIC_SHOW, T.OVERVIEW,
        T.GROUP_LAG, T.TASK_HISTORY, T.HISTORY_LIST, T.RESTORE, T.RESTORE_LIST, T.RESTORE_SHOW,
        T.RESTORE_CANCEL, T.EXPLAIN,
        T.CLAIM,  # the only shard is the home of all names: there is nothing to claim
    }  # fmt: skip
    of_connections = {T.HELLO, T.BYE, T.PREFETCH, T.ALIVE}
    assert set(table) - reads - of_connections == {kind for kind, *_ in ACTS.values()}


@pytest.mark.parametrize(
    "kind", [k for k in T if k not in (T.HELLO, T.ONEWAY) and not T.OK <= k <= T.LEASE]
)
async def test_an_error_before_the_first_change_is_an_answer(
    daemon: InProcess, kind: T, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = daemon.connect()
    with monkeypatch.context() as patched:
        patched.setattr(shared, "arity", raising)
        patched.setattr(Request, "of_frame", raising)
        answer = await ask(daemon, peer, kind)
    assert answer[:3] == (T.ERROR, 50, "internal")
    assert "Unexpected" in answer[3] and "log" in answer[3]
    assert daemon.daemon.roles.observed.internal_errors == 1
    (logged,) = [line for line in daemon.log.lines if "internal_error" in line]
    assert logged.startswith("error ") and "Traceback" in logged and "seeded" in logged
    assert await ask(daemon, peer, T.PING, request=51) == (T.OK, 51, None)


@pytest.mark.parametrize(
    ("part", "verb", "kind", "fields"),
    [
        ("tasks", "described", T.LOOKUP, "ids"),
        ("tasks", "described", T.LIST, {"topic": "t"}),
        ("reader", "scan", T.LIST, None),
        ("store", "scan_dead", T.DEAD_LIST, None),
        ("store", "backup", T.BACKUP, "x.db"),
    ],
)
async def test_an_error_of_a_reading_command_is_an_answer(
    daemon: InProcess, part: str, verb: str, kind: T, fields: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = daemon.connect()
    task_id = await leased(daemon, peer)
    owner = tasks if part == "tasks" else getattr(daemon.shard, part)
    with monkeypatch.context() as patched:
        patched.setattr(owner, verb, raising)
        answer = await ask(daemon, peer, kind, (task_id,) if fields == "ids" else fields)
    assert answer[:3] == (T.ERROR, 50, "internal")
    assert daemon.alive
    daemon.recount()


# --- deliveries that cannot be written ------------------------------------------------------------


@pytest.fixture
def unfit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks with the tag ``unfit`` cannot be put into a frame."""
    extras = wire.delivery_extras

    def picky(all_options: Sequence[TaskOptions | None]) -> Sequence[dict[str, Any] | None]:
        if any(options is not None and options.tag == "unfit" for options in all_options):
            raise Unexpected("seeded")
        return extras(all_options)

    monkeypatch.setattr(wire, "delivery_extras", picky)


def some_tasks() -> tuple[Any, ...]:
    return tuple(("t", b"", 0, {"tag": tag}) for tag in ("a", "unfit", "b"))


@pytest.mark.usefixtures("unfit")
@pytest.mark.parametrize("how", ["subscribe", "pull"])
async def test_an_unwritable_task_becomes_a_dead_letter_alone(daemon: InProcess, how: str) -> None:
    peer = daemon.connect()
    if how == "subscribe":
        await ask(daemon, peer, T.SUBSCRIBE, 1, "t", "g", 10, None, request=2)
    answer = await ask(daemon, peer, T.ENQUEUE, 0, some_tasks(), request=3)
    ids = answer[2][1]
    if how == "pull":
        got = (await ask(daemon, peer, T.PULL, "t", "g", 10, 0, None))[2][2]
    else:
        (frame,) = [row for row in peer.kept if row[0] == T.DELIVER]
        got = frame[4]
    assert [row[0] for row in got] == [ids[0], ids[2]]
    states = [entry["state"] for entry in (await ask(daemon, peer, T.LOOKUP, ids))[2]]
    assert states == ["in_flight", "dead", "in_flight"]
    (letter,) = (await ask(daemon, peer, T.DEAD_LIST, None))[2]["dead"]
    assert letter["id"] == ids[1]
    assert letter["reason"].startswith("internal: Unexpected('seeded')")
    assert daemon.alive
    assert daemon.daemon.roles.observed.internal_errors == 1
    daemon.recount()


@pytest.mark.usefixtures("unfit")
async def test_a_pull_of_only_unwritable_tasks_is_answered(daemon: InProcess) -> None:
    peer = daemon.connect()
    await ask(daemon, peer, T.ENQUEUE, 0, some_tasks()[1:2], request=3)
    answer = await ask(daemon, peer, T.PULL, "t", "g", 10, 0, None)
    assert answer[:2] == (T.OK, 50) and answer[2][2] == ()
    assert daemon.alive
    daemon.recount()


@pytest.mark.usefixtures("unfit")
@pytest.mark.parametrize("trace", [TRACE, None])
async def test_log_lines_of_a_traced_task_have_its_ids(
    daemon: InProcess, monkeypatch: pytest.MonkeyPatch, trace: str | None
) -> None:
    logged: list[dict[str, Any]] = []
    monkeypatch.setattr(
        daemon.shard.border, "_on_event", lambda *_: logged.append(get_contextvars())
    )
    peer = daemon.connect()
    await ask(daemon, peer, T.SUBSCRIBE, 1, "t", "g", 10, None, request=2)
    options = {"tag": "unfit"} if trace is None else {"tag": "unfit", "trace": trace}
    await ask(daemon, peer, T.ENQUEUE, 0, (("t", b"", 0, options),), request=3)
    _, trace_id, span_id, _ = TRACE.split("-")
    assert logged == [{} if trace is None else {"trace_id": trace_id, "span_id": span_id}]
    assert get_contextvars() == {}


@pytest.mark.usefixtures("unfit")
@pytest.mark.parametrize("options", [{"ack": "on_delivery"}, {"broadcast": True}])
async def test_broadcasts_skip_an_unwritable_task(daemon: InProcess, options: Any) -> None:
    peer = daemon.connect()
    group = None if "broadcast" in options else "g"
    await ask(daemon, peer, T.SUBSCRIBE, 1, "t", group, 10, options, request=2)
    await ask(daemon, peer, T.ENQUEUE, 0, some_tasks(), request=3)
    await daemon.settle()
    (frame,) = [row for row in peer.kept if row[0] == T.DELIVER]
    assert [row[4]["tag"] for row in frame[4]] == ["a", "b"]
    assert daemon.alive
    assert daemon.daemon.roles.observed.internal_errors == 1
    daemon.recount()
