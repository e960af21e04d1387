"""HTTP: health checks are answered whatever others do with their connections."""

from __future__ import annotations

import http.client
import select
import socket
from collections.abc import Callable

import pytest

from support.daemon import Daemon

MAX = 20


def status(daemon: Daemon, path: str) -> int:
    host, port = daemon.http.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
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
    """Those that began a request and do not end it, too."""
    limits = {"http_connections_max": MAX, "http_idle_timeout_s": 60}
    daemon = make_daemon(http=True, **limits).start()
    idle = []
    for _ in range(MAX):
        idle.append(connect(daemon))
        idle[-1].sendall(said)
    assert not any(map(is_closed, idle))
    assert [status(daemon, path) for path in ("/healthz", "/readyz", "/metrics")] == [200] * 3
    assert is_closed(idle[0], 10)
    assert not is_closed(idle[-1])
    for _ in range(3 * MAX):
        idle.append(connect(daemon))
        idle[-1].sendall(said)
    assert status(daemon, "/healthz") == 200
    assert all(is_closed(one, 10) for one in idle[: 3 * MAX])
    for one in idle:
        one.close()
    assert "Traceback" not in daemon.log_text()


def test_a_connection_without_a_request_is_closed_in_time(
    make_daemon: Callable[..., Daemon],
) -> None:
    daemon = make_daemon(http=True, http_idle_timeout_s=0.3).start()
    silent, partial, lasting = (connect(daemon) for _ in range(3))
    partial.sendall(b"GET /healthz HT")
    host, port = daemon.http.removeprefix("http://").split(":")
    busy = http.client.HTTPConnection(host, int(port), timeout=10)
    for _ in range(3):
        # One that asks again and again keeps its connection.
        busy.request("GET", "/healthz")
        assert busy.getresponse().read()
    lasting.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    assert lasting.recv(65_536).startswith(b"HTTP/1.1 200")
    assert all(is_closed(one, 10) for one in (silent, partial, lasting))
    for one in (silent, partial, lasting, busy):
        one.close()
    assert status(daemon, "/healthz") == 200


def test_too_long_a_head_is_refused(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(http=True).start()
    with connect(daemon) as greedy:
        greedy.sendall(b"GET /healthz HTTP/1.1\r\nA: " + b"a" * 20_000)
        assert greedy.recv(65_536).startswith(b"HTTP/1.1 4")
    assert status(daemon, "/healthz") == 200
