"""How answers leave a connection: bytes in, bytes out, without a socket between."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from server.http.rig import HttpRig, nothing, ready
from support.shard_rig import Turns
from tickwheel.server.http.app import Http
from tickwheel.server.http.call import single_headers
from tickwheel.server.http.routes import ROUTES

TASK = b'{"topic":"t"}'
JSON_LINES = ("Content-Type: application/json",)


class Wire(asyncio.Transport):
    """What the connection writes, piece by piece."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 5), "sockname": ("127.0.0.1", 6)})
        self.written: list[bytes] = []
        self.is_closed = False

    def write(self, data: Any) -> None:
        if data:
            self.written.append(bytes(data))

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.is_closed

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Talk:
    """A connection of its own."""

    def __init__(self, http: Http) -> None:
        assert http._server is not None
        kind: Any = http._protocol
        server = http._server
        self.connection = kind(config=server.config, server_state=server.server_state, app_state={})
        self.wire = Wire()
        self.is_lost = False
        self.connection.connection_made(self.wire)

    def say(
        self, method: str, path: str, body: bytes = b"", version: str = "1.1", **more: str
    ) -> None:
        headers = {"Host": "localhost", "Content-Length": str(len(body)), **more}
        lines = [f"{method} {path} HTTP/{version}", *(f"{k}: {v}" for k, v in headers.items())]
        self.connection.data_received("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    async def answers(self, count: int = 1) -> list[bytes]:
        """The first pieces that are written."""
        async for _ in Turns():
            if len(self.wire.written) >= count:
                return self.wire.written
        raise AssertionError(self.wire.written)

    async def idle(self) -> None:
        """Until nothing is worked on."""
        async for _ in Turns():
            if self.connection.is_idle and not self.connection.tasks:
                return
        raise AssertionError("it never came to an end")

    def lose(self) -> None:
        if not self.is_lost:
            self.is_lost = True
            self.connection.connection_lost(None)


def parted(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return int(first.split()[1]), dict(line.lower().split(": ", 1) for line in lines), body


@pytest.fixture
async def http(rig: HttpRig, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Http]:
    monkeypatch.setattr("tickwheel.server.http.app.keep_alive", lambda sock, interval_s: None)
    running = Http("127.0.0.1", 0, ready, nothing, api=rig.api)
    await running.start()
    async for _ in Turns():
        if running._server is not None and running._server.started:
            break
    yield running
    await running.stop()


@pytest.fixture
def talk(http: Http) -> Iterator[Talk]:
    result = Talk(http)
    yield result
    result.lose()  # the server's stop waits for each connection


async def test_answers_are_one_write_and_keep_the_connection(talk: Talk) -> None:
    for count in (1, 2, 3):
        talk.say("POST", "/v1/tasks", TASK)
        written = await talk.answers(count)
        status, headers, body = parted(written[-1])
        assert (status, len(written)) == (201, count)
        assert headers["content-type"] == "application/json" and "date" in headers
        assert headers["content-length"] == str(len(body)) and "connection" not in headers
        assert json.loads(body)["outcome"] == "stored"
    await talk.idle()
    assert not talk.wire.is_closed
    talk.lose()


async def test_pipelined_requests_are_answered_in_order(talk: Talk) -> None:
    for path in ("/v1/tasks", "/v1/nowhere", "/v1/tasks"):
        talk.say("POST", path, TASK)
    assert [parted(answer)[0] for answer in await talk.answers(3)] == [201, 404, 201]
    talk.lose()


@pytest.mark.parametrize(("version", "more"), [("1.1", {"Connection": "close"}), ("1.0", {})])
async def test_connection_close_is_honoured(talk: Talk, version: str, more: dict[str, str]) -> None:
    talk.say("POST", "/v1/tasks", TASK, version, **more)
    (answer,) = await talk.answers()
    status, headers, _ = parted(answer)
    assert (status, headers["connection"], talk.wire.is_closed) == (201, "close", True)


LENGTH, CHUNKED = "Content-Length: 5", "Transfer-Encoding: chunked"
CHUNKS = b"d\r\n" + TASK + b"\r\n0\r\n\r\n"
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
BOTH = {
    "length first": (LENGTH, CHUNKED),
    "length last": (CHUNKED, LENGTH),
    "apart": (CHUNKED, "Accept: */*", LENGTH),
    "other case": ("transfer-ENCODING: Chunked", "CONTENT-length: 5"),
    "the same length twice": (LENGTH, LENGTH, CHUNKED),
    "right length": (CHUNKED, f"Content-Length: {len(CHUNKS)}"),
    "kept alive": (CHUNKED, LENGTH, "Connection: keep-alive"),
    "folded": ("Transfer-Encoding:\r\n chunked", LENGTH),
    "folded length": (CHUNKED, "Content-Length:\r\n 5"),
}
NEITHER = {
    "two lengths": (LENGTH, "Content-Length: 6", CHUNKED),
    "twice chunked": (CHUNKED, CHUNKED, LENGTH),
    "another coding": ("Transfer-Encoding: gzip, chunked", LENGTH),
    "a length that is none": (CHUNKED, "Content-Length: +5"),
}


@pytest.mark.parametrize("path", ["/v1/tasks", "/nowhere"])
@pytest.mark.parametrize("lines", BOTH.values(), ids=BOTH)
async def test_length_with_transfer_coding_closes_the_connection(
    talk: Talk, lines: tuple[str, ...], path: str
) -> None:
    """The coding counts, and what follows is not taken for a request."""
    head = "\r\n".join([f"POST {path} HTTP/1.1", "Host: localhost", *JSON_LINES, *lines])
    talk.connection.data_received(head.encode() + b"\r\n\r\n" + CHUNKS + HEALTH)
    await talk.idle()
    status, headers, _ = parted(b"".join(talk.wire.written))
    assert status == (201 if path == "/v1/tasks" else 404)
    assert headers["connection"] == "close" and talk.wire.is_closed
    assert b"".join(talk.wire.written).count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("lines", NEITHER.values(), ids=NEITHER)
async def test_invalid_body_framing_closes_the_connection(
    talk: Talk, lines: tuple[str, ...]
) -> None:
    head = "\r\n".join(["POST /v1/tasks HTTP/1.1", "Host: localhost", *JSON_LINES, *lines])
    talk.connection.data_received(head.encode() + b"\r\n\r\n" + CHUNKS + HEALTH)
    assert parted(b"".join(talk.wire.written))[0] in (400, 501) and talk.wire.is_closed
    assert b"".join(talk.wire.written).count(b"HTTP/1.1 ") == 1


async def test_head_requests_have_no_body(talk: Talk) -> None:
    for path, status in (("/v1/nowhere", 404), ("/v1/acks", 405), ("/v1/tasks", 200)):
        talk.wire.written.clear()
        talk.say("HEAD", path)
        await talk.idle()
        found, headers, body = parted(b"".join(talk.wire.written))
        assert (found, body) == (status, b"") and int(headers["content-length"]) > 0
    talk.lose()


async def test_a_head_request_for_a_stream_leases_no_tasks(talk: Talk, rig: HttpRig) -> None:
    talk.say("POST", "/v1/tasks", TASK)
    await talk.answers()
    streams = [route for route in ROUTES if route.method == "GET" and route.streams]
    assert len(streams) >= 3
    for route in streams:
        talk.wire.written.clear()
        query = "?group=g&credit=5" if route.path.endswith("deliveries") else ""
        talk.say("HEAD", re.sub(r"{\w+}", "t", route.path) + query)
        await talk.idle()
        found, headers, body = parted(b"".join(talk.wire.written))
        assert (found, headers["content-type"], body) == (200, route.streams[0], b"")
    assert not rig.core.topics["t"].groups
    talk.lose()


@pytest.mark.parametrize(
    "name",
    [
        "ce-id", "Idempotency-Key", "Tickwheel-Delay-Ms", "Tickwheel-Property-A", "Content-Type",
        "Authorization", "Content-Encoding", "Origin",
    ],
)  # fmt: skip
async def test_a_repeated_single_value_header_is_refused(
    talk: Talk, rig: HttpRig, name: str
) -> None:
    """Also with the same value: which lines a proxy adds or drops is not known."""
    talk.say("POST", "/v1/topics/t/tasks", b"x", **{name: f"1\r\n{name}: 2"})
    status, _, body = parted((await talk.answers())[0])
    assert status == 400 and f"header {name.lower()} was sent more than once" in body.decode()
    assert rig.core.tasks == 0
    talk.lose()


def test_a_header_that_is_a_list_may_have_several_lines() -> None:
    pairs = [(b"accept", b"a"), (b"cookie", b"x=1"), (b"accept", b"b"), (b"cookie", b"y=2")]
    assert single_headers(pairs) == {b"accept": b"a, b", b"cookie": b"x=1; y=2"}
    assert single_headers([(b"forwarded", b"a"), (b"forwarded", b"b")])  # not read here


async def test_an_answer_waits_for_a_slow_reader(talk: Talk) -> None:
    talk.connection.pause_writing()
    talk.say("POST", "/v1/tasks", TASK)
    for _ in range(100):
        await asyncio.sleep(0)
    assert not talk.wire.written
    talk.connection.resume_writing()
    await talk.idle()
    assert parted(b"".join(talk.wire.written))[0] == 201
    talk.lose()


async def test_a_disconnected_caller_gets_no_answer(talk: Talk, rig: HttpRig) -> None:
    talk.say("POST", "/v1/tasks", TASK)
    talk.lose()
    async for _ in Turns():
        if not talk.connection.tasks:
            break
    assert not talk.wire.written and rig.observed.http_under_way == 0


async def test_expect_100_continue_is_answered(talk: Talk) -> None:
    talk.say("POST", "/v1/tasks", Expect="100-continue", **{"Content-Length": str(len(TASK))})
    assert (await talk.answers())[0].startswith(b"HTTP/1.1 100 ")
    talk.connection.data_received(TASK)
    assert parted((await talk.answers(2))[1])[0] == 201
    talk.lose()
