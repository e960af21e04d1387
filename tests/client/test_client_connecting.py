"""The client's connection: greeting, addresses, backoff, goodbye, closing."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import socket
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import AsyncMock, create_autospec

import pytest

from support.fake_daemon import NOW_MS, FakeDaemon, Peer, turns
from support.ports import free_port
from support.waiting import comes, slowly, soon
from tickwheel import Client, Task, errors
from tickwheel.api.frames import FrameType as T
from tickwheel.client.connection import Connection, connect
from tickwheel.client.reconnector import Reconnector
from tickwheel.client.search import ShardAddresses
from tickwheel.client.status import status_at
from tickwheel.limits import HELLO_BYTES_MAX, Limits
from tickwheel.protocol import Frame


async def read_slowly(peer: Peer) -> None:
    """A piece now and then, until it has been asked with PING."""
    while not peer.sent(T.PING):
        peer.read_again()
        await turns(2)
        peer.stop_reading()
        await asyncio.sleep(0.15)  # real time: the client looks at its own clock
    peer.read_again()


def is_verb(name: str, member: object) -> bool:
    if name.startswith("_") or name in ("connect", "close"):
        return False
    written = inspect.unwrap(member) if callable(member) else member
    return inspect.iscoroutinefunction(written) or inspect.isasyncgenfunction(written)


NOW = datetime(2030, 1, 1, tzinfo=UTC)
MORE: dict[str, dict[str, Any]] = {
    "reschedule": {"task_id": 1, "delay": 1},
    "reschedule_many": {"delay": 1},
    "spread": {"task_id": 1, "within": 1},
    "spread_many": {"within": 1},
    "dead_requeue": {"pairs": [(1, "g")]},
    "dead_delete": {"pairs": [(1, "g")]},
    "cancel": {"task_id": 1},
    "lookup": {"task_id": 1},
    "run_now": {"task_id": 1},
    "release_key": {"task_id": 1},
    "skip_key": {"task_id": 1},
    "pause_key": {"key": "k"},
    "resume_key": {"key": "k"},
    "put_schedule": {"every": 60},
    "configure": {"if_pending": "keep"},
}
"""Further arguments that a verb needs."""


# --- HELLO -----------------------------------------------------------------------------------


async def test_hello_says_version_session_token_and_name() -> None:
    async with FakeDaemon() as daemon, daemon.client(token="secret", name="me") as client:
        peer = await daemon.peer()
        assert peer.hello["v"] == 1
        assert len(peer.hello["session"]) == 16
        assert peer.hello["token"] == "secret"
        assert peer.hello["client"] == "me"
        assert client.server_info["epoch"] == 1
        assert client.server_info["node"] == "fake"


async def test_url_and_token_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, daemon: FakeDaemon
) -> None:
    monkeypatch.setenv("TICKWHEEL_URL", daemon.url)
    monkeypatch.setenv("TICKWHEEL_TOKEN", "from-the-environment")
    async with Client():
        assert (await daemon.peer()).hello["token"] == "from-the-environment"
    async with Client(token="given"):
        assert (await daemon.peer()).hello["token"] == "given"


@pytest.mark.parametrize(
    "url",
    ["http://x:1", "tcp://", "tcp://x:0", "tcp://x:65536", "tcp://x:abc", "tcp://a:1,", "tcp://:5",
     f"tcp://x:{'9' * 5_000}"],
)  # fmt: skip
def test_a_wrong_url_is_refused_and_shown(url: str) -> None:
    with pytest.raises(errors.BadRequest) as raised:
        Client(url)
    assert url[:100] in raised.value.message


@pytest.mark.parametrize(
    ("code", "kind"),
    [("unauthorized", errors.Unauthorized), ("version_unsupported", errors.VersionUnsupported)],
)
async def test_a_permanent_refusal_fails_connect_at_once(
    code: str, kind: type[errors.TickwheelError], daemon: FakeDaemon
) -> None:
    daemon.greet = lambda peer, frame: (peer.error(frame, code, "no"), peer.close())[0]
    with pytest.raises(kind, match="no"):
        await soon(daemon.client(connect_timeout=60.0).connect())
    assert daemon.connections == 1


async def test_connect_retries_a_full_daemon(daemon: FakeDaemon) -> None:

    def greet(peer: Peer, frame: Frame) -> None:
        if daemon.connections < 3:
            peer.send(T.ERROR, 0, "too_many_connections", "4096 are open")
            peer.close()
        else:
            daemon.welcome(peer, frame)

    daemon.greet = greet
    async with daemon.client():
        assert daemon.connections == 3


async def test_a_client_connects_with_its_first_call(daemon: FakeDaemon) -> None:
    """As the synchronous one does; later calls share the connection."""
    client = daemon.client()
    assert not client.connected
    first = asyncio.ensure_future(client.enqueue("t", b"x"))
    peer = await daemon.peer()
    peer.store(await peer.next(T.ENQUEUE))
    await soon(first)
    assert await soon(client.connect()) is client
    second = client.enqueue_nowait("t", b"y")
    peer.store(await peer.next(T.ENQUEUE))
    await soon(second)
    assert daemon.connections == 1
    await soon(client.close())
    with pytest.raises(errors.ClientClosed, match="closed; create a new one"):
        await client.enqueue("t", b"x")


async def test_a_failed_first_call_names_the_reason_and_the_next_retries(
    daemon: FakeDaemon,
) -> None:
    welcome, daemon.greet = daemon.greet, refuse
    client = daemon.client()
    with pytest.raises(errors.Unauthorized):
        await soon(client.stats())
    daemon.greet = welcome
    await soon(client.connect())
    assert client.connected
    await soon(client.close())


def refuse(peer: Peer, frame: Frame) -> None:
    peer.error(frame, "unauthorized")


ARGUMENTS: dict[str, Any] = {
    "url": "https://example.com/hook",
    "number": 1,
    "topic": "t", "group": "g", "body": b"", "bodies": [b"x"], "tasks": [Task("t", b"")],
    "key": "k", "ids": [1], "task_id": 1, "pairs": [(1, "g")], "name": "n", "transaction": "x",
    "bulk": "1-1",
    "kind": "cancel", "filter": {"key_prefix": "a"}, "start": NOW,
    "end": NOW + timedelta(hours=1), "to": NOW, "since": NOW,
    "path": "backup.db", "every": 60, "shard": 0, "node": "a", "id": 1,
}  # fmt: skip
"""What verbs need, by the names of their parameters."""


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, one in inspect.getmembers(Client)
        if is_verb(name, one) and name != "flush_acks"  # a new client has no acks
    ],
)
async def test_every_verb_connects(name: str) -> None:
    client = Client(f"tcp://127.0.0.1:{free_port()}", connect_timeout=0.05, send_timeout=0.05)
    verb = getattr(client, name)
    given = {
        parameter.name: ARGUMENTS[parameter.name]
        for parameter in inspect.signature(verb).parameters.values()
        if parameter.default is inspect.Parameter.empty
    }
    if name in MORE:
        given |= MORE[name]
    with pytest.raises((errors.Unreachable, errors.SendTimeout)):
        result = verb(**given)
        if inspect.isasyncgen(result):
            await soon(anext(result))
        else:
            await soon(result)
    await client.close()


@pytest.fixture(scope="module")
def specified() -> Any:
    return create_autospec(Client)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, one in inspect.getmembers(Client)
        if is_verb(name, one) and not inspect.isasyncgenfunction(one)
    ],
)
def test_verbs_without_an_event_loop_raise_bad_request(name: str, specified: Any) -> None:
    """A coroutine that nobody awaits does nothing, and says so to nobody: the call itself must."""
    with pytest.raises(errors.BadRequest, match=rf"Client\.{name} is .*tickwheel\.sync\.Client"):
        getattr(Client(), name)()
    assert isinstance(getattr(specified, name), AsyncMock)


async def test_unreachable_names_the_address_and_the_reason() -> None:
    port = free_port()
    with pytest.raises(errors.Unreachable) as raised:
        await Client(f"tcp://127.0.0.1:{port}", connect_timeout=0.2).connect()
    assert str(port) in raised.value.message


async def test_a_silent_daemon_is_unreachable(daemon: FakeDaemon) -> None:
    daemon.greet = lambda peer, frame: None
    with pytest.raises(errors.Unreachable):
        await soon(daemon.client(connect_timeout=0.2).connect())


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400\r\n\r\n", b"\x91\xcc\x41", b"\x93\xcc\x41\x01\x05"]
)
async def test_a_server_of_another_protocol_is_an_error(answer: bytes, daemon: FakeDaemon) -> None:
    daemon.greet = lambda peer, frame: peer.send_bytes(answer)
    with pytest.raises((errors.ProtocolError, errors.Unreachable)):
        await soon(daemon.client(connect_timeout=0.3).connect())


async def test_the_daemons_limits_are_used_not_the_defaults() -> None:
    async with FakeDaemon(body_bytes_max=10) as daemon, daemon.client() as client:
        with pytest.raises(errors.BodyTooLarge) as raised:
            client.enqueue_nowait("t", b"x" * 11)
        assert "11" in raised.value.message
        assert "10" in raised.value.message
        assert "body_bytes_max" in raised.value.message
        peer = await daemon.peer()
        future = client.enqueue_nowait("t", b"x" * 10)
        peer.store(await peer.next(T.ENQUEUE))
        await soon(future)


# --- several addresses -----------------------------------------------------------------------


async def test_the_next_address_is_tried_when_the_first_is_dead() -> None:
    async with (
        FakeDaemon() as daemon,
        Client(f"tcp://127.0.0.1:{free_port()},127.0.0.1:{daemon.port}") as client,
    ):
        assert client.server_info["node"] == "fake"


async def test_a_silent_first_address_does_not_use_up_the_time() -> None:
    async with FakeDaemon() as silent, FakeDaemon() as daemon:
        silent.greet = lambda peer, frame: None
        url = f"tcp://127.0.0.1:{silent.port},127.0.0.1:{daemon.port}"
        async with Client(url, connect_timeout=3.0):
            assert daemon.connections == 1


async def test_another_address_takes_over_with_the_same_session() -> None:
    async with FakeDaemon() as first, FakeDaemon() as second:
        url = f"tcp://127.0.0.1:{first.port},127.0.0.1:{second.port}"
        async with Client(url) as client:
            peer = await first.peer()
            future = client.enqueue_nowait("t", b"x")
            lost = await peer.next(T.ENQUEUE)
            await first.deaf()
            peer.close()
            other = await second.peer()
            assert other.hello["session"] == peer.hello["session"]
            again = await other.next(T.ENQUEUE)
            assert again == lost
            other.store(again)
            await soon(future)


# --- reconnecting ----------------------------------------------------------------------------


async def test_request_numbers_ascend_over_reconnects(daemon: FakeDaemon, client: Client) -> None:
    numbers: list[int] = []
    for _ in range(3):
        peer = await daemon.peer()
        call = asyncio.ensure_future(client.ping())
        frame = await peer.next(T.PING)
        numbers += [peer.sent(T.HELLO)[0][1], frame[1]]
        peer.ok(frame)
        await soon(call)
        peer.close()
    assert numbers == sorted(set(numbers))


async def test_a_call_survives_the_connection_it_was_sent_on(
    daemon: FakeDaemon, client: Client, peer: Peer
) -> None:
    call = asyncio.ensure_future(client.cancel(5))
    await peer.next(T.CANCEL)
    peer.close()
    peer = await daemon.peer()
    peer.ok(await peer.next(T.CANCEL), [(5, "cancelled")])
    assert await soon(call) == "cancelled"


@pytest.mark.parametrize("steps", range(8))
async def test_a_lost_first_connection_is_retried(steps: int) -> None:
    """The connection ends `steps` turns of the event loop after the greeting."""
    opened: list[Connection] = []

    async def open_to(connection: Connection, *where: Any) -> None:
        opened.append(connection)
        await connect(connection, *where)

    def end(steps: int) -> None:
        if steps:
            asyncio.get_running_loop().call_soon(end, steps - 1)
        elif len(opened) == 1:
            opened[0].abort(errors.Draining("as the test says"))

    async with FakeDaemon() as daemon:
        options = daemon.client(send_timeout=30.0, connect_timeout=30.0)._options
        options.open_to = open_to
        kept = Reconnector(
            options, ShardAddresses(1, options.addresses, secure=False), 0, {"session": b"s" * 16},
            deliver=lambda *_: None, ended=lambda *_: None, greeted=lambda _: end(steps),
        )  # fmt: skip
        await soon(kept.start())
        assert (await soon(kept.wait_up(30.0))) is kept.connection
        await comes(lambda: len(opened) == 2 and kept.connection is opened[1])
        await kept.stop(errors.ClientClosed())


async def test_reconnects_to_a_daemon_that_hangs_up_back_off(
    daemon: FakeDaemon, client: Client
) -> None:

    def greet(peer: Peer, frame: Frame) -> None:
        daemon.welcome(peer, frame)
        peer.close()

    daemon.greet = greet
    (await daemon.peer()).close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.5):
            await client.ping()
    assert daemon.connections < 12, "the pauses grow"


async def test_malformed_bytes_end_only_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tickwheel.client.search.BACKOFF_S_MAX", 0.02)
    broken = [b"\xc1", b"\x05", b"\x91\x41", b"\x92\x42\x01", b"\x93\x43\x01\x01", b"\x90"]
    async with FakeDaemon() as daemon, daemon.client() as client:
        for data in broken:
            peer = await daemon.peer()
            peer.send_bytes(data)
            await peer.gone()
        peer = await daemon.peer()
        call = asyncio.ensure_future(client.ping())
        peer.ok(await peer.next(T.PING))
        await soon(call)


async def test_unknown_frames_of_a_newer_daemon_are_ignored(
    daemon: FakeDaemon, client: Client, peer: Peer
) -> None:
    peer.send(99, "something", {"new": 1})
    peer.send(T.OK, 999_999, "an answer to nothing")
    peer.send(T.DELIVER, 77, 1, 0, [(5, 1, 0, b"for nobody")])
    call = asyncio.ensure_future(client.ping())
    peer.ok(await peer.next(T.PING))
    await soon(call)
    assert daemon.connections == 1


async def test_frames_that_arrive_with_the_answer_to_hello_are_handled(daemon: FakeDaemon) -> None:

    def greet(peer: Peer, frame: Frame) -> None:
        daemon.greet = daemon.welcome
        daemon.welcome(peer, frame)
        peer.goodbye()

    daemon.greet = greet
    async with daemon.client():
        await (await daemon.peer()).gone()
        await daemon.peer()


# --- goodbye ---------------------------------------------------------------------------------


async def test_goodbye_waits_for_answers_then_reconnects_elsewhere(
    daemon: FakeDaemon, client: Client, peer: Peer
) -> None:
    early = client.enqueue_nowait("t", b"before")
    frame = await peer.next(T.ENQUEUE)
    peer.goodbye()
    await turns()
    late = client.enqueue_nowait("t", b"after")
    peer.store(frame)
    await soon(early)
    await peer.gone()
    assert len(peer.sent(T.ENQUEUE)) == 1, "no new work for a daemon that goes"
    peer = await daemon.peer()
    frame = await peer.next(T.ENQUEUE)
    assert frame[3][0][1] == b"after"
    peer.store(frame)
    await soon(late)


async def test_a_drained_daemon_that_comes_back_is_found_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log says both, what was lost and what was found."""
    caplog.set_level(logging.INFO, "tickwheel.client")
    async with FakeDaemon() as daemon, daemon.client() as client:
        peer = await daemon.peer()
        peer.goodbye()
        await daemon.deaf()
        await peer.gone()
        call = asyncio.ensure_future(client.ping())
        await turns()
        await daemon.listen()
        peer = await daemon.peer()
        peer.ok(await peer.next(T.PING))
        await soon(call)
    texts = [record.getMessage().partition(" ")[0] for record in caplog.records]
    assert [word for word in texts if word in {"connected", "connection"}][:3] == [
        "connected", "connection", "connected",
    ]  # fmt: skip


async def test_draining_as_an_answer_is_not_an_answer() -> None:
    async with FakeDaemon() as daemon, daemon.client(retries=0) as client:
        peer = await daemon.peer()
        future = client.enqueue_nowait("t", b"x")
        frame = await peer.next(T.ENQUEUE)
        peer.error(frame, "draining")
        await peer.gone()
        peer = await daemon.peer()
        peer.store(await peer.next(T.ENQUEUE))
        await soon(future)


# --- closing ---------------------------------------------------------------------------------


async def test_close_waits_for_answers_and_says_bye(daemon: FakeDaemon) -> None:
    client = daemon.client()
    await client.connect()
    peer = await daemon.peer()
    future = client.enqueue_nowait("t", b"x")
    closing = asyncio.ensure_future(client.close())
    frame = await peer.next(T.ENQUEUE)
    await turns()
    assert not closing.done()
    peer.store(frame)
    await soon(closing)
    assert future.done()
    assert peer.seen[-1][0] == T.BYE
    await peer.gone()


async def test_close_is_bounded_and_fails_pending_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    slowly(monkeypatch)
    async with FakeDaemon() as daemon:
        client = daemon.client(send_timeout=0.2)
        await client.connect()
        peer = await daemon.peer()
        future = client.enqueue_nowait("t", b"x")
        await peer.next(T.ENQUEUE)
        await soon(client.close())
        with pytest.raises(errors.OutcomeUnknown):
            await future


async def test_close_without_a_connection_is_bounded(daemon: FakeDaemon) -> None:
    client = daemon.client(send_timeout=0.2, retries=100)
    await client.connect()
    peer = await daemon.peer()
    await daemon.deaf()
    peer.close()
    await peer.gone()
    future = client.enqueue_nowait("t", b"x")
    await soon(client.close())
    with pytest.raises(errors.TickwheelError):
        await future


async def test_close_when_the_peer_does_not_read_is_bounded(daemon: FakeDaemon) -> None:
    client = daemon.client(send_timeout=0.2, retries=0)
    await client.connect()
    peer = await daemon.peer()
    peer.stop_reading()
    futures = [client.enqueue_nowait("t", b"x" * 500_000) for _ in range(40)]
    await turns()
    await soon(client.close())
    for future in futures:
        with pytest.raises(errors.TickwheelError):
            await future
    peer.read_again()


async def test_closing_twice_or_unopened_is_harmless(daemon: FakeDaemon) -> None:
    never = daemon.client()
    await never.close()
    client = daemon.client()
    await client.connect()
    await soon(client.close())
    await soon(client.close())


async def test_every_call_after_close_raises_client_closed(daemon: FakeDaemon) -> None:
    client = daemon.client()
    await client.connect()
    await daemon.peer()
    await soon(client.close())
    for call in (
        lambda: client.enqueue("t", b"x"),
        lambda: client.enqueue_many([]),
        lambda: client.cancel(5),
        lambda: client.lookup(5),
        lambda: client.stats(),
        lambda: client.pull("t"),
        lambda: client.ping(),
        lambda: client.backup("x"),
        lambda: anext(client.list_tasks()),
        lambda: anext(client.dead_list()),
    ):
        with pytest.raises(errors.ClientClosed):
            await call()
    with pytest.raises(errors.ClientClosed):
        client.enqueue_nowait("t", b"x")
    with pytest.raises(errors.ClientClosed):
        client.subscribe("t")


async def test_a_call_under_way_at_close_fails_with_an_error(daemon: FakeDaemon) -> None:
    client = daemon.client(send_timeout=0.2)
    await client.connect()
    peer = await daemon.peer()
    call = asyncio.ensure_future(client.stats())
    await peer.next(T.STATS)
    await soon(client.close())
    with pytest.raises(errors.TickwheelError):
        await call


async def test_a_cancelled_connect_leaves_no_connection(daemon: FakeDaemon) -> None:
    greeted = asyncio.Event()
    daemon.greet = lambda peer, frame: greeted.set()
    connecting = asyncio.ensure_future(daemon.client().connect())
    await soon(greeted.wait())
    [peer] = daemon.open
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    await peer.gone()


@pytest.mark.parametrize(
    "call",
    [
        Client.connect,
        Client.ping,
        lambda it: it.enqueue("t", b"x"),
        lambda it: it.oneway("t", b"x"),
        lambda it: it.cancel(5),
    ],
)
async def test_a_cancelled_connect_ends_no_other_call(
    call: Callable[[Client], Awaitable[Any]], daemon: FakeDaemon
) -> None:
    hellos: asyncio.Queue[tuple[Peer, Frame]] = asyncio.Queue()
    daemon.greet = lambda *hello: hellos.put_nowait(hello)
    client = daemon.client()
    connecting, other = map(asyncio.ensure_future, (client.connect(), call(client)))
    peer, hello = await soon(hellos.get())
    connecting.cancel()
    await asyncio.wait((connecting,))
    daemon.welcome(peer, hello)
    answers = {T.PING: None, T.ENQUEUE: (NOW_MS, (5,)), T.CANCEL: ((5, "cancelled"),)}

    async def answer() -> None:
        while (frame := await peer.next())[0] in answers:
            peer.ok(frame, answers[frame[0]])

    answering = asyncio.ensure_future(answer())
    await soon(other)
    answering.cancel()
    assert connecting.cancelled() and daemon.connections == 1
    await soon(client.close())


@pytest.mark.parametrize("steps", range(1, 10))
async def test_a_cancelled_close_leaves_nothing(daemon: FakeDaemon, steps: int) -> None:
    before = asyncio.all_tasks()
    client = await daemon.client().connect()
    [peer] = daemon.open
    closing = asyncio.ensure_future(client.close(0.0))
    for _ in range(steps):
        await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait((closing,))
    assert asyncio.all_tasks() == before
    await peer.gone()


def test_a_client_works_in_two_event_loops_in_turn() -> None:
    async def once() -> None:
        async with FakeDaemon() as daemon, daemon.client() as client:
            peer = await daemon.peer()
            future = client.enqueue_nowait("t", b"x")
            peer.store(await peer.next(T.ENQUEUE))
            await soon(future)

    asyncio.run(once())
    asyncio.run(once())


def test_a_client_of_an_ended_event_loop_is_closed() -> None:
    async def connected() -> Client:
        async with FakeDaemon() as daemon:
            return await daemon.client().connect()

    async def use(client: Client) -> None:
        for call in (
            lambda: client.enqueue("t", b""),
            lambda: client.ping(timeout=1),
            lambda: client.subscribe("t").start(),
            lambda: client.connect(),
        ):
            with pytest.raises(errors.ClientClosed, match="event loop"):
                await soon(call())
        await soon(client.close())
        with pytest.raises(errors.ClientClosed, match="create a new one"):
            await client.ping()

    asyncio.run(use(asyncio.run(connected())))


# --- a dead line -----------------------------------------------------------------------------


async def test_a_silent_connection_is_abandoned_after_the_send_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An answer is due and nothing at all comes: another connection may do better."""
    slowly(monkeypatch)
    async with FakeDaemon() as daemon, daemon.client(send_timeout=0.2, retries=20) as client:
        peer = await daemon.peer()
        future = client.enqueue_nowait("t", b"x")
        first = await peer.next(T.ENQUEUE)
        other = await daemon.peer()
        second = await other.next(T.ENQUEUE)
        assert first == second
        other.store(second)
        await soon(future)
        await peer.gone()


async def test_a_daemon_waiting_for_its_store_keeps_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It answers PING: the connection lives, and with it the leases."""
    slowly(monkeypatch)
    async with FakeDaemon() as daemon, daemon.client(send_timeout=0.2, retries=20) as client:
        peer = await daemon.peer()
        future = client.enqueue_nowait("t", b"x")
        frame = await peer.next(T.ENQUEUE)
        for _ in range(3):
            peer.ok(await peer.next(T.PING))
        peer.store(frame)
        await soon(future)
        assert daemon.connections == 1


async def test_an_idle_connection_is_pinged() -> None:
    async with FakeDaemon() as daemon, daemon.client(heartbeat=0.05):
        peer = await daemon.peer()
        peer.ok(await peer.next(T.PING))
        await peer.next(T.PING)
        await peer.gone()
        assert (await daemon.peer()).hello["session"] == peer.hello["session"]


async def test_any_frame_counts_as_a_heartbeat() -> None:
    """It never answers PING, but it does say something."""
    async with FakeDaemon() as daemon, daemon.client(heartbeat=0.1):
        peer = await daemon.peer()
        for _ in range(6):
            await peer.next(T.PING)
            peer.send(T.DELIVER, 77, 1, 0, [(5, 1, 0, b"for nobody")])
        assert daemon.connections == 1


async def test_a_heartbeat_of_the_daemon_is_answered_at_once() -> None:
    async with FakeDaemon() as daemon, daemon.client():
        peer = await daemon.peer()
        assert peer.hello["heartbeat"] is True
        for _ in range(3):
            peer.send(T.HEARTBEAT)
            assert await peer.next(T.ALIVE) == (T.ALIVE, 0)
        assert daemon.connections == 1


async def test_hello_omits_the_heartbeat_for_an_older_daemon(daemon: FakeDaemon) -> None:
    """It is older than they are, and refuses what it does not know in a HELLO."""
    hellos: list[dict[str, Any]] = []

    def old(peer: Peer, frame: Frame) -> None:
        hellos.append(frame[2])
        if "heartbeat" in frame[2]:
            peer.error(frame, "bad_request", "options: heartbeat is not known")
            peer.close()
        else:
            daemon.welcome(peer, frame)

    daemon.greet = old
    async with daemon.client():
        await daemon.peer()
    words = [(hello.get("lease"), hello.get("heartbeat")) for hello in hellos]
    assert words == [(True, True), (None, True), (None, None)], "the newest word first"


@pytest.mark.parametrize(
    "long", [{"token": "x" * HELLO_BYTES_MAX}, {"name": "é" * HELLO_BYTES_MAX}]
)
async def test_an_oversized_hello_is_refused_and_not_sent(
    long: dict[str, str], daemon: FakeDaemon
) -> None:
    """Once, and not again on new connections for as long as a call may take."""
    client = daemon.client(**long)
    for asked in (client.connect, client.ping, client.stats):
        with pytest.raises(errors.LimitExceeded, match=r"name has \d+ bytes; the limit is 65536"):
            await soon(asked())
    assert daemon.connections <= 3
    with pytest.raises(errors.LimitExceeded, match="HELLO_BYTES_MAX"):
        await soon(status_at(daemon.url, **long))
    assert all(not peer.seen for peer in daemon.open)
    await client.close()


async def test_a_later_hello_respects_the_daemons_frame_limit(daemon: FakeDaemon) -> None:
    client = daemon.client(token="x" * 2_000, send_timeout=0.2, retries=0)
    await client.connect()
    client._reconnector.limits = Limits(frame_bytes_max=1_024)
    (await daemon.peer()).close()
    with pytest.raises(errors.TickwheelError, match=r"the limit is 1024 \(frame_bytes_max\)"):
        await soon(client.ping())
    await client.close()


async def test_a_slow_connection_that_makes_progress_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The PING waits behind bytes that do leave: with the last of them the patience begins."""
    slowly(monkeypatch, 3)
    async with FakeDaemon() as daemon, daemon.client(heartbeat=1.0, send_timeout=1.0) as client:
        peer = await daemon.peer()
        # Bytes in the system's buffers count as sent, so the buffers must be small.
        connection = client._reconnector.connection
        assert connection is not None
        for transport, buffer in (
            (connection._transport, socket.SO_SNDBUF),
            (peer._transport, socket.SO_RCVBUF),
        ):
            assert transport is not None
            line = transport.get_extra_info("socket")
            line.setsockopt(socket.SOL_SOCKET, buffer, 65_536)
        peer.stop_reading()
        futures = [client.enqueue_nowait("t", b"x" * 500_000) for _ in range(40)]
        await soon(read_slowly(peer))
        assert daemon.connections == 1
        for future in futures:
            future.cancel()
