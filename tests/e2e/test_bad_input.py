"""What clients should not send: a clear error each time, the connection and the daemon go on.

Against a real daemon. After every mistake the log holds no traceback and a good request works.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.daemon import Daemon
from support.raw import Raw
from tickwheel.api.frames import FrameType as T
from tickwheel.protocol import encode

ERROR = int(T.ERROR)
DAY_MS = 86_400_000
UNUSED = next(number for number in range(1, 128) if number not in set(T))
"""No type of frame has it."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("bad-input"), http=True) as daemon:
        yield daemon
        assert "Traceback" not in daemon.log_text()


@pytest.fixture
def raw(running: Daemon) -> Iterator[Raw]:
    with Raw(running.port) as connection:
        yield connection


def works(raw: Raw) -> None:
    """The connection still takes a task."""
    frame = raw.enqueue(("fine", b"x", DAY_MS))
    assert frame[0] == T.OK, frame


def refused(frame: Any, code: str, *words: str) -> None:
    assert frame[0] == ERROR, frame
    assert frame[2] == code, frame
    for word in words:
        assert word in frame[3], frame


# --- the stream is unreadable: answer and close ----------------------------------------------


def test_an_oversized_frame_closes_the_connection(raw: Raw) -> None:
    limit = raw.limits["frame_bytes_max"]
    raw.send_bytes(encode((int(T.ENQUEUE), 9, 9, [("t", b"x" * limit, 0)]))[: limit + 10])
    refused(raw.next(), "frame_too_large", str(limit), "frame_bytes_max")
    assert raw.closed()


def test_a_frame_at_the_limit_is_accepted(raw: Raw) -> None:
    limit = raw.limits["frame_bytes_max"]
    bodies = [("t", b"x" * 1_000_000, DAY_MS) for _ in range(4)]
    size = len(encode((int(T.ENQUEUE), 2, 2, bodies)))
    padding = limit - size - 40
    bodies.append(("t", b"y" * padding, DAY_MS))
    missing = limit - len(encode((int(T.ENQUEUE), 2, 2, bodies)))
    bodies[-1] = ("t", b"y" * (padding + missing), DAY_MS)
    assert len(encode((int(T.ENQUEUE), 2, 2, bodies))) == limit
    assert raw.enqueue(*bodies)[0] == T.OK


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n", b"\xc1\xc1\xc1", b"\x05", b"\xa3abc", b"\x90", b"\x91\xa1x"],
    ids=["http", "reserved", "number", "string", "empty-array", "no-type"],
)
def test_garbage_bytes_are_answered_and_the_connection_closed(raw: Raw, garbage: bytes) -> None:
    raw.send_bytes(garbage)
    refused(raw.next(), "protocol_error")
    assert raw.closed()


def test_frames_before_the_garbage_are_still_done(raw: Raw) -> None:
    good = encode((int(T.ENQUEUE), 5, 5, [("t", b"x", DAY_MS)]))
    raw.send_bytes(good + b"\xc1")
    frames = [raw.next(), raw.next()]
    assert sorted(frame[0] for frame in frames) == [T.OK, ERROR]
    assert raw.closed()


def test_a_truncated_frame_has_no_effect(running: Daemon, raw: Raw) -> None:
    with Raw(running.port) as other:
        whole = encode((int(T.ENQUEUE), 5, 5, [("never", b"x", DAY_MS)]))
        other.send_bytes(whole[:-3])
    stats = raw.call(T.STATS)[2]
    assert "never" not in stats["topics"]
    works(raw)


def test_the_first_frame_must_be_hello(running: Daemon) -> None:
    with Raw(running.port, hello=False) as raw:
        refused(raw.call(T.PING), "hello_required")
        assert raw.closed()


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"v": 99}, "version_unsupported"),
        ({"v": "1"}, "version_unsupported"),
        ({"session": b"short"}, "bad_request"),
        ({"session": 7}, "bad_request"),
        ({"client": 7}, "bad_request"),
        ({"heartbeat": 1}, "bad_request"),
        ({"surprise": 1}, "bad_request"),
    ],
)
def test_a_bad_hello_is_answered_and_the_connection_closed(
    running: Daemon, options: dict[str, Any], code: str
) -> None:
    with Raw(running.port, hello=False) as raw:
        refused(raw.hello(**options), code)
        assert raw.closed()


def test_a_second_hello_is_an_error(raw: Raw) -> None:
    refused(raw.hello(), "protocol_error", "HELLO")
    assert raw.closed()


@pytest.mark.parametrize("token", [None, "wrong", "", "sesam\0"])
def test_a_wrong_or_missing_token_is_refused(
    make_daemon: Callable[..., Daemon], token: str | None
) -> None:
    daemon = make_daemon(serve_token="sesam").start()
    with Raw(daemon.port, hello=False) as raw:
        refused(raw.hello(token=token), "unauthorized", "token")
        assert raw.closed()
    with Raw(daemon.port, token="sesam") as raw:
        works(raw)
    assert "sesam" not in daemon.log_text()


# --- the request is wrong: answer and go on ----------------------------------------------------


def test_an_unknown_type_is_answered(raw: Raw) -> None:
    refused(raw.call(UNUSED), "unknown_type", str(UNUSED))
    works(raw)


BAD_FIELDS: list[tuple[str, int, tuple[Any, ...], str]] = [
    ("enqueue without tasks", T.ENQUEUE, (1,), "fields"),
    ("enqueue of nothing", T.ENQUEUE, (1, ()), "tasks"),
    ("enqueue of a map", T.ENQUEUE, (1, {}), "tasks"),
    ("floor of text", T.ENQUEUE, ("1", [("t", b"", 0)]), "floor"),
    ("floor above the request", T.ENQUEUE, (10**6, [("t", b"", 0)]), "floor"),
    ("task that is no array", T.ENQUEUE, (1, [5]), "tasks[0]"),
    ("task with two fields", T.ENQUEUE, (1, [("t", b"")]), "tasks[0]"),
    ("topic of a number", T.ENQUEUE, (1, [(5, b"", 0)]), "tasks[0].topic"),
    ("topic with a space", T.ENQUEUE, (1, [("a b", b"", 0)]), "tasks[0].topic"),
    ("topic empty", T.ENQUEUE, (1, [("", b"", 0)]), "tasks[0].topic"),
    ("topic of 256", T.ENQUEUE, (1, [("a" * 256, b"", 0)]), "tasks[0].topic"),
    ("body of text", T.ENQUEUE, (1, [("t", "text", 0)]), "tasks[0].body"),
    ("delay of text", T.ENQUEUE, (1, [("t", b"", "5")]), "delay_ms"),
    ("delay of a float", T.ENQUEUE, (1, [("t", b"", 1.5)]), "delay_ms"),
    ("delay of true", T.ENQUEUE, (1, [("t", b"", True)]), "delay_ms"),
    ("delay below zero", T.ENQUEUE, (1, [("t", b"", -1)]), "delay_ms"),
    ("neither delay nor due", T.ENQUEUE, (1, [("t", b"", None)]), "delay_ms or due_ms"),
    ("delay and due", T.ENQUEUE, (1, [("t", b"", 5, {"due_ms": 5})]), "delay_ms or due_ms"),
    ("due of text", T.ENQUEUE, (1, [("t", b"", None, {"due_ms": "x"})]), "due_ms"),
    ("options of a list", T.ENQUEUE, (1, [("t", b"", 0, [])]), "tasks[0]"),
    ("unknown option", T.ENQUEUE, (1, [("t", b"", 0, {"colour": 1})]), "colour"),
    ("priority of 256", T.ENQUEUE, (1, [("t", b"", 0, {"priority": 256})]), "priority"),
    ("ttl of zero", T.ENQUEUE, (1, [("t", b"", 0, {"ttl_ms": 0})]), "ttl_ms"),
    ("key of bytes", T.ENQUEUE, (1, [("t", b"", 0, {"key": b"k"})]), "key"),
    ("props of a list", T.ENQUEUE, (1, [("t", b"", 0, {"properties": [1]})]), "properties"),
    ("property of nil", T.ENQUEUE, (1, [("t", b"", 0, {"properties": {"a": None}})]), "properties"),
    (
        "property not finite",
        T.ENQUEUE,
        (1, [("t", b"", 0, {"properties": {"a": 1e999}})]),
        "finite",
    ),
    ("second task wrong", T.ENQUEUE, (1, [("t", b"", 0), ("t", 5, 0)]), "tasks[1].body"),
    ("subscribe without group", T.SUBSCRIBE, (1, "t"), "fields"),
    ("prefetch below zero", T.SUBSCRIBE, (1, "t", "g", -1, {}), "prefetch"),
    ("lease too short", T.SUBSCRIBE, (1, "t", "g", 1, {"lease_ms": 1}), "lease_ms"),
    ("lease too long", T.SUBSCRIBE, (1, "t", "g", 1, {"lease_ms": 10**12}), "lease_ms"),
    ("sub of text", T.SUBSCRIBE, ("a", "t", "g", 1, {}), "sub"),
    ("group with a slash dot", T.SUBSCRIBE, (1, "t", "g!", 1, {}), "group"),
    ("pull of nothing", T.PULL, ("t", "g", 0, 0, {}), "max"),
    ("pull for ever", T.PULL, ("t", "g", 1, 10**15, {}), "wait_ms"),
    ("ack of text", T.ACK, ("t", "g", 1, ["1"], [1]), "ids"),
    ("ack with too few attempts", T.ACK, ("t", "g", 1, [1, 2], [1]), "attempts"),
    ("ack of a negative epoch", T.ACK, ("t", "g", -1, [1], [1]), "epoch"),
    ("nack item too short", T.NACK, ("t", "g", [(1, 1)]), "items[0]"),
    ("nack delay of text", T.NACK, ("t", "g", [(1, 1, 1, "x", None)]), "delay_ms"),
    ("nack reason of a number", T.NACK, ("t", "g", [(1, 1, 1, None, 5)]), "reason"),
    ("reject of a map", T.REJECT, ("t", "g", {}), "items"),
    ("extend by nothing", T.EXTEND, ("t", "g", 1, [1], [1], 0), "lease_ms"),
    ("release without attempts", T.RELEASE, ("t", "g", 1, [1]), "fields"),
    ("cancel of text", T.CANCEL, ("all",), "ids"),
    ("reschedule without a time", T.RESCHEDULE, ([1],), "delay_ms, due_ms"),
    ("reschedule of a pair", T.RESCHEDULE, ([(1, 5)],), "ids"),
    ("cancel of nothing", T.CANCEL, (None,), "select tasks by ids"),
    ("lookup of a float", T.LOOKUP, ([1.0],), "ids"),
    ("list of an empty key", T.LIST, ({"key": ""},), "key"),
    ("dead after text", T.DEAD_LIST, ({"after": "x"},), "after"),
    ("requeue of an id", T.DEAD_REQUEUE, ([5],), "pairs[0]"),
    ("ping with a field", T.PING, (1,), "fields"),
]


@pytest.mark.parametrize(
    ("kind", "fields", "word"),
    [case[1:] for case in BAD_FIELDS],
    ids=[case[0].replace(" ", "-") for case in BAD_FIELDS],
)
def test_wrong_fields_are_named_and_the_connection_goes_on(
    raw: Raw, kind: int, fields: tuple[Any, ...], word: str
) -> None:
    frame = raw.call(kind, *fields)
    assert frame[0] == ERROR, frame
    assert frame[2] in ("bad_request", "limit_exceeded"), frame
    assert word in frame[3], frame
    works(raw)


def test_a_due_time_beyond_the_maximum_is_refused(raw: Raw) -> None:
    limit = raw.limits["delay_ms_max"]
    assert raw.enqueue(("t", b"x", limit))[0] == T.OK
    refused(raw.enqueue(("t", b"x", limit + 1)), "due_too_far", str(limit), "delay_max_s")
    far_ms = time.time_ns() // 1_000_000 + limit + 60_000
    refused(raw.enqueue(("t", b"x", None, {"due_ms": far_ms})), "due_too_far")
    works(raw)


def test_a_request_below_the_floor_is_forgotten(raw: Raw) -> None:
    raw.send_bytes(encode((int(T.ENQUEUE), 60, 60, [("t", b"x", DAY_MS)])))
    assert raw.answer(60)[0] == T.OK
    raw.send_bytes(encode((int(T.ENQUEUE), 40, 40, [("t", b"x", DAY_MS)])))
    refused(raw.answer(40), "request_forgotten", "40", "60")


def test_a_subscription_number_in_use_is_a_conflict(raw: Raw) -> None:
    assert raw.call(T.SUBSCRIBE, 1, "t", "g", 1, {})[0] == T.OK
    refused(raw.call(T.SUBSCRIBE, 1, "t", "g", 1, {}), "conflict", "1")
    refused(raw.call(T.UNSUBSCRIBE, 2), "not_found", "2")
    assert raw.call(T.UNSUBSCRIBE, 1)[0] == T.OK


def test_a_bad_oneway_is_answered_with_request_zero(raw: Raw) -> None:
    raw.send_bytes(encode((int(T.ONEWAY), 0, [("t", "text", 0)])))
    frame = raw.next()
    refused(frame, "bad_request", "tasks[0].body")
    assert frame[1] == 0
    works(raw)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("", "bad_request"),
        (".", "bad_request"),
        ("..", "bad_request"),
        ("a/b", "bad_request"),
        ("a\0b", "bad_request"),
        ("a" * 201, "limit_exceeded"),
        ("é" * 101, "limit_exceeded"),
        ("€" * 67, "limit_exceeded"),
        ("😀" * 51, "limit_exceeded"),
        ("😀" * 255, "limit_exceeded"),
        ("store.db", "conflict"),
        ("a" * 200, None),
        ("é" * 100, None),
        ("😀" * 50, None),
        ("\n -rf\t\x7f", None),
    ],
)
def test_a_backups_name_is_counted_in_bytes(
    running: Daemon, raw: Raw, name: str, code: str | None
) -> None:
    answer = raw.call(T.BACKUP, name)
    if code is None:
        assert answer[0] == T.OK, answer
        assert answer[2]["bytes"] > 0
        assert raw.call(T.BACKUP, name)[2] == "conflict"
    else:
        assert answer[:1] + answer[2:3] == (ERROR, code), answer
    works(raw)


@pytest.mark.parametrize("kind", ["missing", "file", "link"])
@pytest.mark.parametrize("store", ["sqlite", "memory"])
def test_a_missing_backup_folder_is_an_error_answer(tmp_path: Path, kind: str, store: str) -> None:
    """A start without it is refused; one that goes away later is named."""
    folder = tmp_path / "backups"
    folder.mkdir()
    url = None if store == "sqlite" else "memory:"
    with Daemon(tmp_path / "daemon", store=url, backup_dir=folder) as daemon:
        folder.rmdir()
        if kind == "file":
            folder.touch()
        elif kind == "link":
            folder.symlink_to(folder)
        with Raw(daemon.port) as raw:
            answer = raw.call(T.BACKUP, "x.db")
            assert answer[0] == ERROR and answer[2] in ("refused", "conflict"), answer
            works(raw)
        assert "Traceback" not in daemon.log_text()


def test_extreme_attempts_and_epochs_are_answered(running: Daemon) -> None:
    """Tasks are in every state, for two groups, after a restart."""
    running.restart(kill=False)
    with Raw(running.port) as raw:
        for group in ("a", "b"):
            raw.call(T.GROUP_CREATE, "receipts", group, None)
        fresh = [("receipts", b"", delay_ms) for delay_ms in (0, 0, DAY_MS)]
        for number in (0, 1, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1):
            ids = raw.enqueue(*fresh)[2][1]
            raw.call(T.PULL, "receipts", "a", 1, 1_000, None)
            for epoch in (0, 1, number):
                receipts = (epoch, ids, [number] * 3)
                for kind, group, rest in (
                    (T.ACK, "b", ()),
                    (T.EXTEND, "a", (1_000,)),
                    (T.RELEASE, "a", ()),
                    (T.ACK, "a", ()),
                ):
                    answer = raw.call(kind, "receipts", group, *receipts, *rest)
                    assert answer[0] == T.OK or answer[2] == "bad_request", answer
        works(raw)
    # Stored values can be read.
    running.restart(kill=True)
    with Raw(running.port) as raw:
        raw.call(T.LOOKUP, ids)
        works(raw)
