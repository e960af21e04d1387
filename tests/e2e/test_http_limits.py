"""HTTP: health checks are answered whatever others do with their connections."""

from __future__ import annotations

import contextlib
import http.client
import re
import resource
import select
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from e2e.groups_rig import SOON_S
from support.daemon import Daemon
from support.raw import Raw
from support.waiting import until
from tickwheel.api.frames import FrameType

MAX = 20
STANDS_STILL_S = 30.0
"""No answer within it: the daemon stands still. The machine may have other work."""


def status(daemon: Daemon, path: str) -> int:
    host, port = daemon.http.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


def connect(daemon: Daemon) -> socket.socket:
    host, port = daemon.http.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), 10)


def is_closed(connection: socket.socket, wait_s: float = 0) -> bool:
    readable, _, _ = select.select([connection], [], [], wait_s)
    if not readable:
        return False
    try:
        while connection.recv(65_536):
            pass  # what was answered before
        return True
    except ConnectionError:
        return True


@pytest.mark.parametrize("said", [b"", b"GET /healthz HT", b"POST /healthz HTTP/1.1\r\nA: "])
def test_idle_connections_make_room_the_oldest_first(
    make_daemon: Callable[..., Daemon], said: bytes
) -> None:
    """Connections with an unfinished request count as idle."""
    limits = {"http_connections_max": MAX, "http_idle_timeout_s": 60}
    daemon = make_daemon(http=True, **limits).start()
    idle = []
    for _ in range(MAX):
        idle.append(connect(daemon))
        idle[-1].sendall(said)
    assert not any(map(is_closed, idle))
    assert [status(daemon, path) for path in ("/healthz", "/readyz", "/metrics")] == [200] * 3
    assert is_closed(idle[0], SOON_S)
    assert not is_closed(idle[-1])
    for _ in range(3 * MAX):
        idle.append(connect(daemon))
        idle[-1].sendall(said)
    assert status(daemon, "/healthz") == 200
    assert all(is_closed(item, SOON_S) for item in idle[: 3 * MAX])
    for item in idle:
        item.close()
    assert "Traceback" not in daemon.log_text()


def test_a_connection_without_a_request_is_closed_in_time(
    make_daemon: Callable[..., Daemon],
) -> None:
    daemon = make_daemon(http=True, http_idle_timeout_s=2).start()
    silent, partial, lasting = (connect(daemon) for _ in range(3))
    partial.sendall(b"GET /healthz HT")
    host, port = daemon.http.removeprefix("http://").split(":")
    busy = http.client.HTTPConnection(host, int(port), timeout=60)
    for _ in range(3):
        # One that asks again and again keeps its connection.
        busy.request("GET", "/healthz")
        assert busy.getresponse().read()
    lasting.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert lasting.recv(65_536).startswith(b"HTTP/1.1 200")
    assert all(is_closed(item, SOON_S) for item in (silent, partial, lasting))
    for item in (silent, partial, lasting, busy):
        item.close()
    assert status(daemon, "/healthz") == 200


def test_an_oversized_request_head_is_refused(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(http=True).start()
    with connect(daemon) as greedy:
        greedy.sendall(b"GET /healthz HTTP/1.1\r\nA: " + b"a" * 20_000)
        assert greedy.recv(65_536).startswith(b"HTTP/1.1 4")
    assert status(daemon, "/healthz") == 200


# --- the API -------------------------------------------------------------------------------------


def pulling(daemon: Daemon) -> socket.socket:
    """A connection whose request waits for a task."""
    body = b'{"wait_ms":60000}'
    head = (
        b"POST /v1/topics/t/pull HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body)
    )
    connection = connect(daemon)
    connection.sendall(head + body)
    return connection


def answer(connection: socket.socket) -> bytes:
    """One answer, head and body, or what came of it before the connection ended."""
    data, length = b"", None
    while length is None or len(data) < length:
        piece = connection.recv(65_536)
        if not piece:
            break
        data += piece
        head, found, _ = data.partition(b"\r\n\r\n")
        if found and length is None:
            field = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
            length = len(head) + 4 + int(field[1] if field is not None else 0)
    return data


def test_health_is_answered_during_long_pulls(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(http=True, http_connections_max=MAX).start()
    waiting = [pulling(daemon) for _ in range(MAX)]
    until(lambda: stats(daemon)["subscribers"] == MAX, SOON_S)
    for _ in range(30):
        assert [status(daemon, path) for path in ("/healthz", "/readyz", "/metrics")] == [200] * 3
    assert status(daemon, "/v1/stats") == 503
    idle = [connect(daemon) for _ in range(50)]
    assert status(daemon, "/healthz") == 200
    assert not any(map(is_closed, waiting))
    with connect(daemon) as refused:
        refused.sendall(b"GET /v1/stats HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b'"code":"too_many_connections"' in answer(refused)
    for item in (*waiting, *idle):
        item.close()
    until(lambda: status(daemon, "/v1/stats") == 200, SOON_S)
    assert "Traceback" not in daemon.log_text()


def test_bombs_end_in_an_error_of_the_client(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(http=True, http_idle_timeout_s=1).start()
    head = b"POST /v1/tasks HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    bombs = {
        b"GET /" + b"a" * 20_000: b"400",
        head + b"A: b\r\n" * 5_000: b"400",
        head + b"Content-Length: 99999999999\r\n\r\n": b"413",
        head + b"Content-Length: -1\r\n\r\n": b"400",
        head + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n": b"400",
        head + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffffffff\r\n": b"400",
        head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n": b"400",
        b"\x16\x03\x01\x02\x00\x01\x00": b"400",
    }
    for bomb, code in bombs.items():
        with connect(daemon) as one:
            one.sendall(bomb)
            outcome = answer(one)
            assert outcome.startswith(b"HTTP/1.1 " + code), (bomb[:80], outcome)
            assert b"application/problem+json" in outcome
    with connect(daemon) as one:
        one.sendall(
            b"GET /v1/stats HTTP/1.1\r\nHost: localhost\r\n"
            b"Connection: upgrade\r\nUpgrade: h2c\r\n\r\n"
        )
        assert answer(one).startswith(b"HTTP/1.1 200")
    log = daemon.log_text()
    assert "nvalid" not in log and "upgrade" not in log, log
    grows = connect(daemon)
    grows.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
    for _ in range(100):
        grows.sendall(b"10000\r\n" + b" " * 65_536 + b"\r\n")
    assert answer(grows).startswith(b"HTTP/1.1 413")
    with contextlib.suppress(ConnectionError):
        while True:  # for ever: it is cut off
            grows.sendall(b"10000\r\n" + b" " * 65_536 + b"\r\n")
    grows.close()
    assert status(daemon, "/v1/stats") == 200
    assert "Traceback" not in daemon.log_text()


def test_a_stopping_daemon_ends_streams_with_a_reason(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(http=True).start()
    stream, waiting = connect(daemon), pulling(daemon)
    stream.sendall(
        b"GET /v1/topics/t/deliveries HTTP/1.1\r\nHost: localhost\r\n"
        b"Accept: application/x-ndjson\r\n\r\n"
    )
    until(lambda: stats(daemon)["subscribers"] == 2, SOON_S)
    daemon.terminate()
    text = b"".join(iter(lambda: stream.recv(65_536), b""))
    assert b'"code":"draining"' in text and text.endswith(b"0\r\n\r\n")
    assert b'"code":"draining"' in answer(waiting)
    stream.close()
    waiting.close()
    assert "Traceback" not in daemon.log_text() and "ASGI" not in daemon.log_text()


def stats(daemon: Daemon) -> dict[str, Any]:
    """By TCP: HTTP may be full."""
    with Raw(daemon.port) as raw:
        result: dict[str, Any] = raw.call(FrameType.STATS)[2]
        return result


@pytest.mark.slow  # ten thousand sockets; the quick ones above show each rule alone
def test_ten_thousand_slow_connections_do_not_stop_the_others(
    make_daemon: Callable[..., Daemon],
) -> None:
    count = 10_000
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, count + 1_000), hard))
    daemon = make_daemon(http=True, http_idle_timeout_s=60, http_body_timeout_s=60).start()
    head = b"POST /v1/tasks HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    texts = (b"", b"GET /v1/st", head, head + b"Content-Length: 50\r\n\r\n{")
    slow: list[socket.socket] = []
    try:
        for number in range(count):
            slow.append(connect(daemon))
            with contextlib.suppress(ConnectionError):
                slow[-1].sendall(texts[number % len(texts)])
            if number % 1_000 == 999:
                began_s = time.monotonic()
                assert [status(daemon, path) for path in ("/healthz", "/v1/stats")] == [200] * 2
                with Raw(daemon.port) as raw:
                    raw.enqueue(("t", b"x", 60_000))
                took_s = time.monotonic() - began_s
                assert took_s < STANDS_STILL_S, f"{took_s:.1f} s with {number + 1} connections"
    finally:
        for item in slow:
            item.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    until(lambda: status(daemon, "/v1/stats") == 200, SOON_S)
    assert stats(daemon)["enqueued"] == count // 1_000
    assert "Traceback" not in daemon.log_text()
