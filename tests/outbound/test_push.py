"""Push: a real daemon, its own process, and a real endpoint that checks every signature."""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import json
import re
import socket
import struct
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from outbound.endpoint import SECRET, Endpoint, flooding, serving
from support.daemon import Daemon
from support.stand_in import stand_in
from support.waiting import comes
from tickwheel import Client, Conflict, NotFound, TargetInfo, Task
from tickwheel.api import cloudevents
from tickwheel.client import Retry
from tickwheel.outbound import process
from tickwheel.outbound.push import (
    ANSWER_BYTES_MAX,
    INTERIM_MAX,
    LOG_BYTES_MAX,
    LOG_MAX,
    RETRY_AFTER_MAX_S,
    Answer,
    Http,
    PushTarget,
    Request,
    Sent,
    TimeLimits,
    post,
    retry_after_s,
)
from tickwheel.outbound.runner import checked
from tickwheel.webhooks import Guard, Signer

LOCAL = "127.0.0.0/8"
SOON_S = 30.0


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for all tests of this file."""
    folder = tmp_path_factory.mktemp("push")
    with Daemon(folder, http=True, push_allow=LOCAL) as made:
        yield made


@pytest.fixture
async def client(running: Daemon) -> AsyncIterator[Client]:
    async with Client(running.url) as found:
        yield found


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    async with serving(Endpoint()) as found:
        yield found


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return re.sub(r"[^\w]", "-", request.node.name)


async def push(client: Client, topic: str, endpoint: Endpoint, **options: Any) -> TargetInfo:
    return await client.set_push(topic, "g", endpoint.url, secrets=[SECRET], **options)


async def state_of(client: Client, topic: str) -> TargetInfo:
    (found,) = await client.targets(topic=topic)
    return found


async def target_when(client: Client, topic: str, check: Callable[[TargetInfo], Any]) -> TargetInfo:
    """The target of a topic, once it is as ``check`` wants it."""

    async def look() -> TargetInfo | None:
        result = await state_of(client, topic)
        return result if check(result) else None

    result = await comes(look, SOON_S)
    assert result is not None
    return result


async def settled(client: Client, task_id: int) -> str:
    """The state of a task, once it has ended."""

    async def look() -> str | None:
        state = (await client.lookup(task_id)).state
        return state if state in ("acked", "dead") else None

    return str(await comes(look, SOON_S))


# --- what arrives --------------------------------------------------------------------------------


async def test_a_task_arrives_signed_when_it_is_due(
    client: Client, topic: str, endpoint: Endpoint
) -> None:
    made = await push(client, topic, endpoint)
    assert (made.created, made.kind, made.secrets) == (True, "push", 1)
    receipt = await client.enqueue(
        topic, b'{"order": 42}', delay=0.2, key="o-42", tag="eu", order_key="a b",
        properties={"amount": 12.5, "name": "Ä", "odd name": 1}, encoding="json",
    )  # fmt: skip
    await endpoint.until_count(1)
    (got,) = endpoint.got
    assert got.body == b'{"order": 42}' and got.path == "/hook"
    wanted = {
        "content-type": "application/json", "tickwheel-topic": topic, "tickwheel-group": "g",
        "tickwheel-id": str(receipt.id), "tickwheel-attempt": "1", "tickwheel-key": "o-42",
        "tickwheel-tag": "eu", "tickwheel-order-key": "a b", "tickwheel-property-amount": "12.5",
        "tickwheel-property-name": "%C3%84",
    }  # fmt: skip
    assert {name: got.headers.get(name) for name in wanted} == wanted
    assert not [name for name in got.headers if "odd" in name or "callback" in name]
    assert await settled(client, receipt.id) == "acked"
    target = await target_when(client, topic, lambda one: one.acked == 1)
    assert (target.state, target.last_status, target.failed) == ("sending", 204, 0)


async def test_a_task_is_pushed_as_a_cloudevent(
    client: Client, topic: str, endpoint: Endpoint
) -> None:
    await push(client, topic, endpoint, format="cloudevents")
    await client.enqueue(topic, b'{"n": 1}', key="k", encoding="json", properties={"amount": 5})
    await client.enqueue(topic, b"\xff\x00")
    await endpoint.until_count(2)
    first, second = (json.loads(got.body) for got in endpoint.got)
    if "data" not in first:
        first, second = second, first
    assert (first["specversion"], first["type"], first["subject"]) == ("1.0", "tickwheel.task", "k")
    assert (first["data"], first["amount"], first["source"]) == ({"n": 1}, 5, f"/topics/{topic}")
    assert second["data_base64"] == "/wA="
    kinds = {got.headers["content-type"] for got in endpoint.got}
    assert kinds == {"application/cloudevents+json; charset=utf-8"}


async def test_a_cloudevent_keeps_the_body_exactly(
    client: Client, topic: str, endpoint: Endpoint
) -> None:
    """Includes JSON that a parser would change. Invalid and deeply nested JSON becomes base64."""
    await push(client, topic, endpoint, format="cloudevents", concurrency=1)
    kept = [b'{"n": 1.00000000000000000000001, "n": 1e400}', '"ä"'.encode()]
    others = [b"[NaN]", b"-Infinity", b"[" * 100_000 + b"]" * 100_000, b'{"n": 1', b"\xef\xbb\xbf1"]
    for body in kept + others:
        await client.enqueue(topic, body, encoding="json", properties={"ce-data": "mine"})
    await endpoint.until_count(len(kept + others))
    assert [got.body.partition(b'"data": ')[2] for got in endpoint.got[:2]] == [
        body + b"}" for body in kept
    ]
    for got, body in zip(endpoint.got[2:], others, strict=True):
        event = json.loads(got.body)
        assert base64.b64decode(event["data_base64"]) == body and "data" not in event


async def test_an_enqueued_event_is_pushed_unchanged(
    client: Client, topic: str, endpoint: Endpoint, running: Daemon
) -> None:
    await push(client, topic, endpoint, format="cloudevents")
    event = {
        "specversion": "1.0", "id": "e-1", "source": "/shop", "type": "order.paid",
        "datacontenttype": "application/json", "data": {"n": 1},
    }  # fmt: skip
    async with aiohttp.ClientSession() as session:
        url = f"{running.http}/v1/topics/{topic}/tasks"
        kind = {"content-type": "application/cloudevents+json"}
        async with session.post(url, data=json.dumps(event), headers=kind) as response:
            assert response.status == 201
    await endpoint.until_count(1)
    answer = json.loads(endpoint.got[0].body)
    assert {name: answer[name] for name in event} == event


async def test_a_pushed_event_is_valid_and_keeps_its_data_type(
    client: Client, topic: str, endpoint: Endpoint, running: Daemon
) -> None:
    await push(client, topic, endpoint, format="cloudevents", concurrency=1)
    base = {"specversion": "1.0", "id": "e-1", "source": "/shop", "type": "order.paid"}
    headers = {f"ce-{name}": value for name, value in base.items()}
    url = f"{running.http}/v1/topics/{topic}/tasks"
    async with aiohttp.ClientSession() as session:
        kind = {"content-type": "application/cloudevents+json"}
        events = (
            (json.dumps(base | {"data": {"n": 1}}).encode(), kind),
            (json.dumps(base | {"data_base64": "AAE="}).encode(), kind),
            (b"<a/>", headers | {"content-type": "text/xml"}),
        )
        for count, (data, more) in enumerate(events, 1):
            async with session.post(url, data=data, headers=more) as response:
                assert response.status == 201
            await endpoint.until_count(count)
    results = [json.loads(got.body) for got in endpoint.got]
    assert [item.get("datacontenttype") for item in results] == [
        "application/json",
        None,
        "text/xml",
    ]
    assert (results[0]["data"], results[1]["data_base64"]) == ({"n": 1}, "AAE=")
    # Properties of a plain task: those that cannot be attributes do not make the event invalid.
    properties = {"big": 2**40, "small": 5, "No-Name": "x", "ce-id": 7, "ce-time": "soon"}
    await client.enqueue(topic, b"x", properties=properties)
    await endpoint.until_count(4)
    last = json.loads(endpoint.got[3].body)
    cloudevents.check({k: v for k, v in last.items() if not k.startswith("data")})
    assert (last["big"], last["small"], last["id"]) == (str(2**40), 5, "7")
    assert "No-Name" not in last and last["time"].endswith("Z")


async def test_the_second_attempt_has_the_same_id(
    client: Client, topic: str, endpoint: Endpoint
) -> None:
    await client.create_group(topic, "g", retry=Retry.fixed(0.05, retries=5))
    await push(client, topic, endpoint)
    endpoint.status = 500
    receipt = await client.enqueue(topic, b"x")
    await endpoint.until_count(2)
    endpoint.status = 204
    assert await settled(client, receipt.id) == "acked"
    ids = {got.headers["webhook-id"] for got in endpoint.got}
    assert len(ids) == 1 and len(endpoint.got) >= 3


# --- what is answered ----------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 401, 404, 422, 500, 302, 502])
async def test_a_failed_push_follows_the_retry_policy(
    client: Client, topic: str, endpoint: Endpoint, status: int
) -> None:
    await client.create_group(topic, "g", retry=Retry.fixed(0.02, retries=1))
    endpoint.status, endpoint.headers = status, {"location": endpoint.url + "/elsewhere"}
    await push(client, topic, endpoint)
    receipt = await client.enqueue(topic, b"x")
    assert await settled(client, receipt.id) == "dead"
    assert [got.path for got in endpoint.got] == ["/hook"] * 2, "no redirect is followed"
    (letter,) = [item async for item in client.dead_list(topic=topic, group="g")]
    assert f"answer {status}" in letter.reason


@pytest.mark.parametrize("status", [429, 503])
async def test_an_overloaded_host_uses_no_attempt(
    client: Client, topic: str, endpoint: Endpoint, status: int
) -> None:
    await client.create_group(topic, "g", retry=Retry.none())
    endpoint.status = status
    await push(client, topic, endpoint)
    receipts = [await client.enqueue(topic, b"x") for _ in range(3)]
    target = await target_when(client, topic, lambda one: one.sent >= 3)
    assert (target.state, target.last_error) == ("failing", f"answer {status}")
    endpoint.status = 204
    assert [await settled(client, receipt.id) for receipt in receipts] == ["acked"] * 3
    last = endpoint.got[-1].headers
    assert last["tickwheel-attempt"] == "2"


@pytest.mark.parametrize("form", ["seconds", "date"])
@pytest.mark.parametrize("status", [429, 503])
async def test_retry_after_is_obeyed(
    client: Client, topic: str, endpoint: Endpoint, status: int, form: str
) -> None:
    await client.create_group(topic, "g", retry=Retry.none())
    times: list[float] = []

    async def answer(request: web.Request) -> web.Response:
        times.append(time.time())
        if len(times) > 1:
            return web.Response(status=204)
        when = datetime.now(UTC) + timedelta(seconds=2)
        text = "1" if form == "seconds" else format_datetime(when, usegmt=True)
        return web.Response(status=status, headers={"retry-after": text})

    endpoint.answer = answer
    await push(client, topic, endpoint)
    receipt = await client.enqueue(topic, b"x")
    assert await settled(client, receipt.id) == "acked"
    assert 0.9 <= times[1] - times[0] < 20


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0), ("120", 120.0), (" 5 ", 5.0), ("999999999999999", RETRY_AFTER_MAX_S),
        ("Thu, 01 Jan 1970 00:01:00 GMT", 50.0), ("Thu, 01 Jan 1970 00:00:01 GMT", 0.0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", RETRY_AFTER_MAX_S), ("-5", None), ("1.5", None),
        ("soon", None), ("", None), (None, None), ("٣", None),
        ("Fri, 31 Dec 99999999999999999999 23:59:59 GMT", None),
        ("Sun, 06 Nov 1994 08:49:37 +99999999999999", None),
        ("Fri, 31 Dec 9999 23:59:59 -2359", RETRY_AFTER_MAX_S),
        ("Fri, 01 Jan 0100 00:00:00 +2359", 0.0),
    ],
)  # fmt: skip
def test_retry_after_is_parsed_and_bounded(text: str | None, seconds: float | None) -> None:
    assert retry_after_s(text, 10.0) == seconds


async def test_410_ends_the_push_until_it_is_set_again(
    client: Client, topic: str, endpoint: Endpoint, running: Daemon
) -> None:
    endpoint.status = 410
    await push(client, topic, endpoint)
    receipt = await client.enqueue(topic, b"x")
    target = await target_when(client, topic, lambda one: one.state == "ended")
    assert target.reason == "the endpoint answered 410" and target.ended_ms
    await comes(lambda: "push_ended" in running.log_text())
    assert (await client.lookup(receipt.id)).state in ("ready", "in_flight")
    with pytest.raises(Conflict, match="is pushed to"):
        await client.pull(topic, group="g")
    endpoint.status = 204
    again = await client.set_push(topic, "g", endpoint.url)
    assert (again.created, again.secrets, again.state) == (False, 1, "starting")
    assert await settled(client, receipt.id) == "acked"


@pytest.mark.parametrize(
    ("said", "state"), [({}, "acked"), ({"result": "reject", "reason": "no"}, "dead")]
)
async def test_202_waits_for_a_callback(
    client: Client, topic: str, endpoint: Endpoint, said: dict[str, Any], state: str
) -> None:
    endpoint.status = 202
    await push(client, topic, endpoint, callback_lease=60)
    receipt = await client.enqueue(topic, b"x")
    await endpoint.until_count(1)
    await target_when(client, topic, lambda one: one.sent == 1)
    assert (await client.lookup(receipt.id)).state == "in_flight"
    url = endpoint.got[0].headers["tickwheel-callback"]
    async with aiohttp.ClientSession() as session:
        async with session.post(url + "x", json=said) as response:
            assert response.status == 404
        async with session.post(url, json=said) as response:
            answer = await response.json()
    assert response.status == 200 and answer["result"] == state
    assert await settled(client, receipt.id) == state
    assert len(endpoint.got) == 1


@pytest.mark.parametrize("result", ["ack", "nack", "reject", "extend"])
async def test_a_callback_of_an_earlier_attempt_is_refused(
    client: Client, topic: str, endpoint: Endpoint, result: str
) -> None:
    endpoint.status = 202
    await push(client, topic, endpoint, callback_lease=60)
    receipt = await client.enqueue(topic, b"x")
    await endpoint.until_count(1)
    await target_when(client, topic, lambda one: one.sent == 1)
    old = endpoint.got[0].headers["tickwheel-callback"]
    async with aiohttp.ClientSession() as session:
        async with session.post(old, json={"result": "nack", "delay_ms": 1}) as response:
            assert (await response.json())["result"] == "retrying"
        await endpoint.until_count(2)
        await target_when(client, topic, lambda one: one.sent == 2)
        async with session.post(old, json={"result": result, "lease_ms": 5_000}) as response:
            assert (await response.json())["result"] in ("stale", "lost")
        assert (await client.lookup(receipt.id)).state == "in_flight"
        new = endpoint.got[1].headers["tickwheel-callback"]
        async with session.post(new, json={"result": "ack"}) as response:
            assert (await response.json())["result"] == "acked"
    assert await settled(client, receipt.id) == "acked"


async def test_202_without_a_callback_is_retried(
    client: Client, topic: str, endpoint: Endpoint
) -> None:
    endpoint.status = 202
    await push(client, topic, endpoint, callback_lease=1)
    receipt = await client.enqueue(topic, b"x")
    await endpoint.until_count(2)
    endpoint.status = 204
    assert await settled(client, receipt.id) == "acked"


async def test_an_extending_callback_needs_a_lease(
    client: Client, topic: str, endpoint: Endpoint, running: Daemon
) -> None:
    endpoint.status = 202
    await push(client, topic, endpoint, callback_lease=60)
    receipt = await client.enqueue(topic, b"x")
    await endpoint.until_count(1)
    await target_when(client, topic, lambda one: one.sent == 1)
    await push(client, topic, endpoint)
    url = endpoint.got[0].headers["tickwheel-callback"]
    async with aiohttp.ClientSession() as session:
        async with session.post(url, json={"result": "extend"}) as response:
            assert response.status == 400 and "lease_ms" in await response.text()
        async with session.post(url, json={"result": "extend", "lease_ms": 5_000}) as response:
            assert (await response.json())["result"] == "extended"
        async with session.post(url, json={"result": "ack"}) as response:
            assert (await response.json())["result"] == "acked"
    assert await settled(client, receipt.id) == "acked"
    assert "internal_error" not in running.log_text()


async def test_202_acks_without_a_callback_lease(
    client: Client, topic: str, endpoint: Endpoint
) -> None:
    endpoint.status = 202
    await push(client, topic, endpoint)
    receipt = await client.enqueue(topic, b"x")
    assert await settled(client, receipt.id) == "acked"
    assert "tickwheel-callback" not in endpoint.got[0].headers


async def test_answers_are_read_up_to_a_limit(
    client: Client, topic: str, endpoint: Endpoint
) -> None:
    written = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal written
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(2_000):
            await response.write(b"y" * 16 * 1024)
            written += 16 * 1024
        return response

    endpoint.answer = answer
    await push(client, topic, endpoint)
    receipt = await client.enqueue(topic, b"x")
    assert await settled(client, receipt.id) == "acked", "the status has decided"
    (sent,) = await client.push_log(topic, "g")
    assert sent.body is not None and set(sent.body) == {"y"} and len(sent.body) <= 2_048
    assert written < 2_000 * 16 * 1024 and written + 16 * 1024 * 1024 > ANSWER_BYTES_MAX


@pytest.fixture
async def http() -> AsyncIterator[Http]:
    made = Http(Guard.from_texts([LOCAL]))
    yield made
    await made.close()


async def posted(http: Http, port: int) -> Answer:
    request = Request(f"http://127.0.0.1:{port}/", "m", {}, b"x" * 1_000)
    return await post(http, request, Signer([SECRET]), TimeLimits(request_s=30.0))


@pytest.mark.parametrize("how", ["closes", "resets", "begins"])
async def test_a_closed_idle_connection_is_not_a_failure(http: Http, how: str) -> None:
    """One that ends in the middle of an answer, or at its first request, is a failure."""
    asked: list[int] = []
    is_well = True

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number in count(1):
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(1_000)
            asked.append(number)
            if number == 1 and is_well:
                writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
                continue
            if how == "begins":
                writer.write(b"HTTP/1.1 2")
            if how == "resets":
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, linger
                )
            writer.close()
            return

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    for _ in range(3):
        assert (await posted(http, port)).status == 204
        assert len(http.session.connector._conns) == 1, "it is kept"  # type: ignore[union-attr]
        answer = await posted(http, port)
        assert answer.status == (None if how == "begins" else 204), answer.error
    assert asked == [1, 2] * 3 if how == "begins" else asked == [1, 2, 1] * 3
    is_well = False
    asked.clear()
    assert (await posted(http, port)).status is None
    assert asked == [1]
    server.close()


LINES = b"".join(b"x-%d: %s\r\n" % (number, b"y" * 4_000) for number in range(16))
HOSTILE = {
    "continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 4_000),
    "early hints": (b"", b"HTTP/1.1 103 Early Hints\r\n" + LINES + b"\r\n"),
    "headers": (b"HTTP/1.1 200 OK\r\n", LINES),
    "a line": (b"HTTP/1.1 200 ", b"z" * 65_536),
    "chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n" * 8_000),
    "an extension": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;", b"e" * 65_536,
    ),
    "trailers": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", LINES),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
async def test_an_endless_answer_is_dropped(http: Http, endpoint: Endpoint, what: str) -> None:
    with flooding(*HOSTILE[what]) as hostile:
        floods = [asyncio.create_task(posted(http, hostile.port)) for _ in range(16)]
        others = 0
        while not all(flood.done() for flood in floods):
            request = Request(endpoint.url, "m", {}, b"x")
            answer = await post(http, request, Signer([SECRET]), TimeLimits(request_s=5.0))
            assert answer.status == 204, answer.error
            others += 1
        answers = [await flood for flood in floods]
    assert others
    is_answered = what in ("chunks", "an extension", "trailers")
    assert {task.status for task in answers} == {200 if is_answered else None}
    if what == "continue":
        assert all("(INTERIM_MAX)" in (item.error or "") for item in answers), answers[0].error


async def test_interim_answers_are_skipped(http: Http) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(1_000)
        writer.write(b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n" * INTERIM_MAX)
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    assert (await posted(http, server.sockets[0].getsockname()[1])).status == 204
    server.close()


async def test_an_invalid_answer_does_not_show_the_query_of_the_url(http: Http) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"220 mail.example.com ESMTP\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    for host in (f"127.0.0.1:{port}", "\u00e4" * 70):  # the latter is too long for a name
        request = Request(f"http://{host}/hook?token=s3cret", "m", {}, b"")
        answer = await post(http, request, Signer([SECRET]), TimeLimits(request_s=30.0))
        assert answer.status is None and answer.error and "s3cret" not in answer.error
    server.close()


@pytest.mark.parametrize("how", ["never", "trickles", "body trickles"])
async def test_a_slow_endpoint_times_out(
    client: Client, topic: str, endpoint: Endpoint, how: str
) -> None:
    over = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        if how == "body trickles":
            response = web.StreamResponse()
            await response.prepare(request)
        else:
            assert request.transport is not None
        while not over.is_set():
            if how == "body trickles":
                await response.write(b".")
            elif how == "trickles" and request.transport is not None:
                request.transport.write(b"HTTP/1.1 200 OK\r\nX-Slow: ."[:1])  # type: ignore[attr-defined]
            await asyncio.sleep(0.05)  # real time: it is slow
        return web.Response()

    endpoint.answer = answer
    await client.create_group(topic, "g", retry=Retry.fixed(0.02, retries=0))
    await push(client, topic, endpoint, request_timeout=0.5)
    receipt = await client.enqueue(topic, b"x")
    # The status arrived before the slow body.
    assert await settled(client, receipt.id) == ("acked" if how == "body trickles" else "dead")
    over.set()


async def test_slow_hosts_do_not_delay_fast_hosts(
    client: Client, topic: str, endpoint: Endpoint
) -> None:
    over, ended = asyncio.Event(), 0

    async def hangs(request: web.Request) -> web.Response:
        nonlocal ended
        try:
            await over.wait()
            return web.Response()
        finally:
            ended += 1

    async with serving(Endpoint(answer=hangs)) as slow:
        await client.set_push(topic, "slow", slow.url, secrets=[SECRET], request_timeout=600)
        await client.set_push(topic, "dead", "http://127.0.0.1:9/", secrets=[SECRET])
        await client.set_push(topic, "g", endpoint.url, secrets=[SECRET])
        await client.enqueue_many([Task(topic, b"%d" % n) for n in range(200)])
        await slow.until_count(1)
        await endpoint.until_count(200)
        assert not ended, "the slow one has still answered nothing"
        over.set()

    async def states() -> dict[str, str] | None:
        by_group = {target.group: target.state for target in await client.targets(topic=topic)}
        is_told = by_group["g"] != "starting" and by_group["dead"] in ("failing", "open")
        return by_group if is_told else None  # a moment later

    by_group = await comes(states, SOON_S)
    assert by_group is not None and by_group["g"] == "sending"
    await client.delete_topic(topic, force=True)


async def test_a_failing_host_is_paused_and_retried(
    client: Client, topic: str, endpoint: Endpoint
) -> None:
    endpoint.status = 500
    await client.create_group(topic, "g", retry=Retry.fixed(0.02, retries=1_000))
    await push(client, topic, endpoint, concurrency=1)
    receipt = await client.enqueue(topic, b"x")
    await target_when(client, topic, lambda one: one.state == "open")
    endpoint.status = 204
    assert await settled(client, receipt.id) == "acked"
    await target_when(client, topic, lambda one: one.state == "sending")


# --- operators -----------------------------------------------------------------------------------


async def test_the_last_requests_are_shown_and_sent_again(
    client: Client, topic: str, endpoint: Endpoint
) -> None:
    await push(client, topic, endpoint)
    receipt = await client.enqueue(topic, b"once more")
    assert await settled(client, receipt.id) == "acked"
    (sent,) = await client.push_log(topic, "g")
    assert (sent.result, sent.status, sent.id, sent.attempt) == ("acked", 204, receipt.id, 1)
    assert sent.address == "127.0.0.1"
    again = await client.resend(topic, "g", sent.number)
    assert again.again and again.status == 204
    first, second = endpoint.got
    assert second.body == first.body == b"once more"
    assert second.headers["webhook-id"] == first.headers["webhook-id"]
    assert [item.number for item in await client.push_log(topic, "g")] == [2, 1]


async def test_a_push_url_is_tested(client: Client, endpoint: Endpoint) -> None:
    result = await client.test_push(endpoint.url, secrets=[SECRET])
    assert (result.result, result.status) == ("acked", 204)
    assert endpoint.got[0].headers["tickwheel-test"] == "1"
    nobody = await client.test_push("http://127.0.0.1:9/", secrets=[SECRET])
    assert (nobody.result, nobody.status) == ("retry", None) and nobody.error


async def test_a_group_switches_between_subscribers_and_push(
    client: Client, topic: str, endpoint: Endpoint
) -> None:
    async with client.subscribe(topic, group="g"):
        with pytest.raises(Conflict, match="subscribers"):
            await push(client, topic, endpoint)
    await push(client, topic, endpoint)
    receipt = await client.enqueue(topic, b"x")
    assert await settled(client, receipt.id) == "acked"
    removed = await client.remove_target(topic, "g")
    assert (removed.kind, removed.url) == ("push", endpoint.url)
    second = await client.enqueue(topic, b"y")
    async with client.subscribe(topic, group="g") as deliveries:
        delivery = await anext(aiter(deliveries))
        assert delivery.id == second.id
        await delivery.ack()
    assert len(endpoint.got) == 1


# --- the guard -----------------------------------------------------------------------------------


async def test_the_outbound_process_checks_addresses(tmp_path: Path) -> None:
    """A target that was set while the address was allowed, as by a name that has changed."""
    async with serving(Endpoint()) as endpoint:
        with Daemon(tmp_path, push_allow=LOCAL) as daemon:
            async with Client(daemon.url) as client:
                await push(client, "t", endpoint)
                receipt = await client.enqueue("t", b"x")
                assert await settled(client, receipt.id) == "acked"
            daemon.settings["push_allow"] = "10.0.0.0/8"
            daemon.restart()
            async with Client(daemon.url) as client:
                await client.enqueue("t", b"x")
                target = await target_when(client, "t", lambda one: one.last_error is not None)
                assert "127.0.0.1" in target.last_error and "push_allow" in target.last_error
        assert len(endpoint.got) == 1


async def test_unused_hosts_are_forgotten() -> None:
    http = Http(Guard())
    try:
        hosts = [http.host(f"https://{name}.example.com/") for name in ("a", "b", "a")]
        assert hosts[0] is hosts[2], "what is known of it is of all its pushes"
        kept = [weakref.ref(host) for host in hosts[:2]]
        del hosts[1]
        gc.collect()
        assert [item() is None for item in kept] == [False, True]
    finally:
        await http.close()


async def test_the_log_is_bounded_in_requests_and_in_bytes() -> None:
    http = Http(Guard())
    try:
        target = PushTarget(
            http, "https://example.com/", [SECRET], {}, callbacks=None, ended=lambda reason: None
        )
        for number in range(1, LOG_MAX + 51):
            target._keep(Sent(number, Request("u", "m", {}, b"x" * 100_000), (number, 1), {}))
        assert len(target.log) == LOG_MAX and target.log[-1].number == LOG_MAX + 50
        bodies = [len(item.request.body) for item in target.log]
        assert LOG_BYTES_MAX - 100_000 < sum(bodies) <= LOG_BYTES_MAX
        assert bodies == sorted(bodies), "the newest keep theirs"
        with pytest.raises(NotFound, match="is no longer kept"):
            await target.resend(target.log[0].number)
    finally:
        await http.close()


async def test_all_targets_share_the_limits_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tickwheel.outbound.push.LOGS_BYTES_MAX", 400_000)
    config = {"url": "tcp://127.0.0.1:1", "token": None, "allow": [], "callbacks": None}
    row = {
        "topic": "t", "kind": "push", "url": "https://example.com/", "secrets": [SECRET],
        "options": {}, "since_ms": 0,
    }  # fmt: skip
    sending = process.Sending(config, io.StringIO())
    try:
        await sending.handle({"set": row | {"group": "a"}})
        (job,) = sending._jobs.values()
        await comes(lambda: job.push is not None)
        assert job.push is not None
        for number in range(1, 6):
            sent = Sent(number, Request("u", "m", {}, bytes(100_000)), (number, 1), {})
            job.push._keep(sent)
        assert sum(len(item.request.body) for item in job.push.log) == 400_000
        assert sending.share_of(process.BYTES_MAX) == process.BYTES_MAX
        await sending.handle({"set": row | {"group": "b"}})
        assert sum(len(item.request.body) for item in job.push.log) == 200_000
        assert sending.share_of(process.BYTES_MAX) == process.BYTES_MAX // 2
    finally:
        await sending.stop()


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("127.0.0.1", "is not a public address"),
        ("[::ffff:127.0.0.1]", "is not a public address"),
        ("changes.test", "is not a public address"),
        ("127.1", "not a canonical IPv4 address"),
        ("2130706433", "not a canonical IPv4 address"),
    ],
)
async def test_forbidden_addresses_get_no_request(
    endpoint: Endpoint, host: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the address is written like; also of a name that stood for a public address when it
    was looked up first (DNS rebinding)."""
    guard, plain, looked_up = Guard(), socket.getaddrinfo, 0

    def getaddrinfo(name: Any, port: Any, *given: Any, **options: Any) -> Any:
        nonlocal looked_up
        if name != "changes.test":
            return plain(name, port, *given, **options)
        looked_up += 1
        address = "8.8.8.8" if looked_up == 1 else "127.0.0.1"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    monkeypatch.setattr("tickwheel.webhooks.socket", stand_in(socket, getaddrinfo=getaddrinfo))
    if host == "changes.test":
        assert await guard.resolve(host, 80) == [(socket.AF_INET, "8.8.8.8")]
    port = endpoint.url.split(":")[2].partition("/")[0]
    request = Request(f"http://{host}:{port}/", "m", {}, b"")
    http = Http(guard)
    try:
        with checked(partial(guard.check, host)):
            answer = await post(http, request, Signer([SECRET]), TimeLimits())
    finally:
        await http.close()
    assert answer.status is None and said in str(answer.error)
    assert endpoint.got == []


async def test_proxies_and_cookies_are_not_used(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9/")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9/")
    endpoint.headers = {"set-cookie": "a=b"}
    http = Http(Guard.from_texts([LOCAL]))
    try:
        for _ in range(2):
            request = Request(endpoint.url, "m", {}, b"")
            answer = await post(http, request, Signer([SECRET]), TimeLimits())
            assert answer.status == 204
    finally:
        await http.close()
    assert [got.headers.get("cookie") for got in endpoint.got] == [None, None]
