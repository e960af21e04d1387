"""The client and several daemons of which one is active: roles, hints, a change of the leader."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from support.fake_daemon import FakeDaemon, Peer, turns
from support.waiting import comes, slowly, soon
from tickwheel import Client, errors
from tickwheel.api.frames import FrameType as T
from tickwheel.client import Subscription
from tickwheel.client import search as module
from tickwheel.client.search import redirect_error
from tickwheel.server.settings import Settings

BRIEF = {"connect_timeout": 0.6, "active_timeout": 0.6}


def both(*daemons: FakeDaemon, **options: Any) -> Client:
    """One client of all of them, in this order."""
    return Client("tcp://" + ",".join(daemon.address for daemon in daemons), **options)


@contextlib.asynccontextmanager
async def pair(**options: Any) -> AsyncIterator[tuple[FakeDaemon, FakeDaemon, Client]]:
    """Two daemons and a client, which is with the first."""
    daemons = FakeDaemon(), FakeDaemon()
    async with daemons[0] as first, daemons[1] as second, both(*daemons, **options) as client:
        yield first, second, client


async def consuming(client: Client, peer: Peer) -> tuple[Subscription, int]:
    subscription = client.subscribe("t")
    starting = asyncio.ensure_future(subscription.start())
    sub = await peer.subscribed()
    await soon(starting)
    return subscription, sub


async def silenced(daemon: FakeDaemon, peer: Peer) -> None:
    """As a process that was stopped: connections are taken, nothing is read or said."""
    daemon.greet = lambda peer, frame: peer.stop_reading()
    peer.stop_reading()


# --- finding the active one ------------------------------------------------------------------


async def test_a_standby_is_skipped() -> None:
    async with FakeDaemon() as standby, FakeDaemon() as active:
        standby.stand_by()
        active.lead()
        async with both(standby, active) as client:
            await active.peer()
            assert client.server_info["role"] == "active"
            assert (standby.connections, active.connections) == (1, 1)
            await (await standby.peer()).gone()


async def test_a_daemon_without_a_role_is_active() -> None:
    async with FakeDaemon() as standby, FakeDaemon() as old:
        standby.stand_by()
        async with both(standby, old) as client:
            assert "role" not in client.server_info


async def test_the_daemon_named_by_a_standby_is_tried_next() -> None:
    async with FakeDaemon() as standby, FakeDaemon() as between, FakeDaemon() as active:
        standby.stand_by(active)
        between.stand_by()
        active.lead()
        async with both(standby, between, active):
            assert between.connections == 0


async def test_a_standby_can_name_an_address_outside_the_list() -> None:
    async with FakeDaemon() as standby, FakeDaemon() as active:
        standby.stand_by(active)
        active.lead()
        async with standby.client() as client:
            peer = await active.peer()
            peer.close()  # the way back leads over the list
            peer = await active.peer()
            assert standby.connections == 2
            call = asyncio.ensure_future(client.ping())
            peer.ok(await peer.next(T.PING))
            await soon(call)


async def test_the_token_is_sent_to_the_daemon_named_by_a_standby() -> None:
    async with FakeDaemon() as standby, FakeDaemon() as active:
        standby.stand_by(active)
        async with standby.client(token="secret"):
            assert (await active.peer()).hello["token"] == "secret"


@pytest.mark.parametrize(
    "hint",
    [
        "tcp://127.0.0.1:1", "tcp://no.such.host.invalid:7355", "tcp://0.0.0.0:7355", "tcp://[::]",
        "http://x", "", 5, b"tcp://x", ["tcp://x"], "tcp://x:0", "a" * 300,
    ],
)  # fmt: skip
async def test_a_dead_hint_does_not_block_the_listed_addresses(hint: Any) -> None:
    async with FakeDaemon() as standby, FakeDaemon() as active:
        standby.stand_by(hint)
        active.lead()
        async with both(standby, active):
            assert active.connections == 1


async def test_a_hint_to_a_silent_daemon_costs_one_attempt() -> None:
    async with FakeDaemon() as standby, FakeDaemon() as silent, FakeDaemon() as active:
        standby.stand_by(silent)
        silent.greet = lambda peer, frame: None
        async with both(standby, active, connect_timeout=3.0):
            assert (silent.connections, active.connections) == (1, 1)


async def test_standbys_that_name_each_other_are_retried_with_pauses() -> None:
    async with FakeDaemon() as first, FakeDaemon() as second:
        first.stand_by(second)
        second.stand_by(first)
        with pytest.raises(errors.NotActive):
            await soon(both(first, second, **BRIEF).connect())
        assert 2 <= first.connections <= 8
        assert 2 <= second.connections <= 8


async def test_an_endless_chain_of_hints_is_followed_with_pauses() -> None:
    async with contextlib.AsyncExitStack() as stack:
        chain = [await stack.enter_async_context(FakeDaemon()) for _ in range(20)]
        for daemon, following in zip(chain, [*chain[1:], None], strict=True):
            daemon.stand_by(following)
        with pytest.raises(errors.NotActive):
            await soon(chain[0].client(**BRIEF).connect())
        assert sum(daemon.connections > 0 for daemon in chain) == 9


async def test_a_standby_that_becomes_active_is_found_soon() -> None:
    async with FakeDaemon() as first, FakeDaemon() as second:
        first.stand_by()
        second.stand_by()
        connecting = asyncio.ensure_future(both(first, second).connect())
        await first.peer()
        await second.peer()
        second.lead()
        client = await soon(connecting)
        assert client.server_info["role"] == "active"
        await client.close()


async def test_active_timeout_outlasts_connect_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that is about to end, a Redis that loads: somebody is there and will lead."""
    slowly(monkeypatch)
    defaults = inspect.signature(Client).parameters
    lease_s = Settings.model_fields["leader_ttl_s"].default
    assert defaults["active_timeout"].default >= defaults["connect_timeout"].default == 10.0
    assert defaults["connect_timeout"].default > 2 * lease_s, "it waits for a takeover's end"
    async with FakeDaemon() as daemon:
        daemon.stand_by()
        connecting = asyncio.ensure_future(daemon.client(connect_timeout=0.05).connect())
        began_s = asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() < began_s + 0.2:  # beyond connect_timeout
            await daemon.peer()
            assert not connecting.done()
        daemon.lead()
        client = await soon(connecting)
        await client.close()
        daemon.stand_by()
        with pytest.raises(errors.NotActive, match="no active daemon within 0.3 s"):
            await soon(daemon.client(connect_timeout=0.05, active_timeout=0.3).connect())


async def test_an_error_without_an_active_daemon_lists_all_answers() -> None:
    async with FakeDaemon() as standby, FakeDaemon() as other, FakeDaemon() as silent:
        standby.stand_by("tcp://127.0.0.1:1")
        other.stand_by()
        silent.greet = lambda peer, frame: None
        client = both(standby, other, silent, **BRIEF)
        with pytest.raises(errors.NotActive) as raised:
            await soon(client.connect())
        assert raised.value.retryable
        message = raised.value.message
        assert f"{standby.address}: standby; active: 127.0.0.1:1" in message
        assert f"{other.address}: standby; no active daemon known" in message
        assert f"{silent.address}: " in message
        assert "127.0.0.1:1: [Errno" in message


async def test_a_standby_that_refuses_the_token_does_not_end_the_search() -> None:
    async with FakeDaemon() as strict, FakeDaemon() as active:
        strict.greet = lambda peer, frame: (peer.error(frame, "unauthorized"), peer.close())[0]
        async with both(strict, active):
            assert active.connections == 1


async def test_a_permanent_refusal_by_all_is_raised_at_once() -> None:
    async with FakeDaemon() as first, FakeDaemon() as second:
        for daemon in (first, second):
            daemon.greet = lambda peer, frame: (peer.error(frame, "unauthorized"), peer.close())[0]
        with pytest.raises(errors.Unauthorized):
            await soon(both(first, second, connect_timeout=60.0).connect())
        assert (first.connections, second.connections) == (1, 1)


@pytest.mark.parametrize("slow", [1, 2])
async def test_a_slow_permanent_refusal_by_all_is_raised(slow: int) -> None:
    """A daemon makes whoever guesses tokens wait, for longer than it is left alone."""

    def refuse(peer: Peer, frame: Any) -> None:
        peer.error(frame, "unauthorized")
        peer.close()

    def refuse_later(peer: Peer, frame: Any) -> None:
        asyncio.get_running_loop().call_later(2 * module.APART_S, refuse, peer, frame)

    async with FakeDaemon() as first, FakeDaemon() as second:
        first.greet, second.greet = refuse_later, refuse_later if slow == 2 else refuse
        with pytest.raises(errors.Unauthorized):
            await soon(both(first, second, connect_timeout=60.0).connect())
        assert max(first.connections, second.connections) <= 4


# --- the active one steps down ---------------------------------------------------------------


async def test_goodbye_not_active_is_followed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting for answers: it has none to give."""
    monkeypatch.setattr("tickwheel.client.connection.LEAVE_S_MAX", 60.0)
    async with FakeDaemon() as first, FakeDaemon() as second:
        first.lead()
        second.stand_by(first)
        async with both(first, second, heartbeat=60.0) as client:
            peer = await first.peer()
            call = asyncio.ensure_future(client.cancel(5))
            await peer.next(T.CANCEL)
            first.stand_by(second)
            second.lead()
            peer.goodbye("not_active")
            peer = await second.peer()
            peer.ok(await peer.next(T.CANCEL), [(5, "cancelled")])
            assert await soon(call) == "cancelled"


async def test_enqueues_keep_session_and_numbers_over_a_change_of_address() -> None:
    async with pair() as (first, second, client):
        peer = await first.peer()
        futures = []
        for body in (b"a", b"b", b"c"):
            futures.append(client.enqueue_nowait("t", body))
            await turns()
        sent = [await peer.next(T.ENQUEUE) for _ in futures]
        peer.store(sent[1])
        await soon(futures[1])
        first.stand_by(second)
        peer.error(sent[0], "not_active")
        other = await second.peer()
        assert other.hello["session"] == peer.hello["session"]
        again = [await other.next(T.ENQUEUE) for _ in range(2)]
        assert again == [sent[0], sent[2]], "same numbers, same floor, in order"
        late = client.enqueue_nowait("t", b"d")
        newer = await other.next(T.ENQUEUE)
        assert newer[1] > max(frame[1] for frame in sent)
        for frame in (*again, newer):
            other.store(frame)
        await soon(asyncio.gather(futures[0], futures[2], late))


async def test_a_refused_resend_keeps_its_request_number() -> None:
    """The previous daemon may have stored the first frame."""
    async with pair() as (first, second, client):
        peer = await first.peer()
        future = client.enqueue_nowait("t", b"x")
        sent = await peer.next(T.ENQUEUE)
        first.stand_by(second)
        peer.error(sent, "not_active")
        other = await second.peer()
        other.error(await other.next(T.ENQUEUE), "refused")
        again = await other.next(T.ENQUEUE)
        assert again[1] == sent[1]
        other.store(again)
        await soon(future)


async def test_calls_acks_and_nacks_move_to_the_next_daemon() -> None:
    async with pair() as (first, second, client):
        peer = await first.peer()
        subscription, sub = await consuming(client, peer)
        ids = peer.deliver(sub, b"a", b"b")
        acked, nacked = [await soon(anext(subscription)) for _ in ids]
        ack, nack = acked.ack_nowait(), asyncio.ensure_future(nacked.nack())
        first.stand_by(second)
        kinds = {}
        for frame in (await peer.next(), await peer.next()):
            kinds[frame[0]] = frame
        for frame in kinds.values():
            peer.error(frame, "not_active")
        other = await second.peer()
        frames = {frame[0]: frame for frame in [await other.next() for _ in range(3)]}
        assert frames[T.SUBSCRIBE][2] == sub
        assert frames[T.ACK][2:] == kinds[T.ACK][2:]
        assert frames[T.NACK][2:] == kinds[T.NACK][2:]
        other.ok(frames[T.SUBSCRIBE], {"lease_ms": 30_000})
        other.ok(frames[T.ACK])
        other.ok(frames[T.NACK], ["retrying"])
        assert await soon(ack) == "acked"
        assert await soon(nack) == "retrying"
        other.deliver(sub, b"from the new one", epoch=2)
        assert (await soon(anext(subscription))).body == b"from the new one"


async def test_a_pull_is_repeated_on_the_next_daemon() -> None:
    async with pair() as (first, second, client):
        peer = await first.peer()
        pulling = asyncio.ensure_future(client.pull("t", wait=60.0))
        asked = await peer.next(T.PULL)
        first.stand_by(second)
        peer.goodbye("not_active")
        other = await second.peer()
        again = await other.next(T.PULL)
        assert again[2:] == asked[2:]
        other.ok(again, (2, 0, [(7, 1, 0, b"x")]))
        assert [found.body for found in await soon(pulling)] == [b"x"]


async def test_a_call_without_an_active_daemon_lists_the_addresses() -> None:
    async with FakeDaemon() as first, FakeDaemon() as second:
        second.stand_by()
        async with both(first, second, send_timeout=2.0, retries=0) as client:
            peer = await first.peer()
            first.stand_by()
            calls: list[Any] = [
                asyncio.ensure_future(client.stats()),
                client.enqueue_nowait("t", b"x"),
            ]
            frames = [await peer.next() for _ in calls]
            for frame in frames:
                peer.error(frame, "not_active")
            for call in calls:
                with pytest.raises(errors.NotActive) as raised:
                    await soon(call)
                for daemon in (first, second):
                    assert f"{daemon.address}: standby" in raised.value.message


async def test_an_enqueue_sent_to_an_earlier_daemon_has_an_unknown_outcome() -> None:
    async with pair(send_timeout=2.0, retries=0) as (first, second, client):
        peer = await first.peer()
        future = client.enqueue_nowait("t", b"x")
        await peer.next(T.ENQUEUE)
        await first.deaf()
        peer.close()
        other = await second.peer()
        second.stand_by()
        other.error(await other.next(T.ENQUEUE), "not_active")
        with pytest.raises(errors.OutcomeUnknown):
            await soon(future)


async def test_reconnects_to_a_repeatedly_deposed_daemon_back_off() -> None:
    async with FakeDaemon() as daemon, daemon.client():
        seen = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.6):
                while True:
                    (await daemon.peer()).goodbye("not_active")
                    seen += 1
        assert 2 <= seen < 12, "the pauses grow"


# --- the active one is stopped ---------------------------------------------------------------


async def test_a_subscriber_leaves_a_stopped_daemon() -> None:
    async with pair(heartbeat=0.1) as (first, second, client):
        peer = await first.peer()
        subscription, sub = await consuming(client, peer)
        await silenced(first, peer)
        second.lead()
        other = await second.peer()
        await other.subscribed()
        other.deliver(sub, b"x", epoch=2)
        assert (await soon(anext(subscription))).body == b"x"
        peer.read_again()


async def test_a_stopped_daemon_named_as_active_delays_no_search() -> None:
    """It is named as active, and it takes connections: it is asked beside the other one."""
    async with FakeDaemon() as first, FakeDaemon() as second:
        second.stand_by(first)
        async with both(first, second, heartbeat=0.1) as client:
            peer = await first.peer()
            call = asyncio.ensure_future(client.cancel(5))
            await peer.next(T.CANCEL)
            await silenced(first, peer)
            for _ in range(6):
                await second.peer()
            assert first.connections <= 3, "an attempt at it outlasts many rounds"
            second.lead()
            while not client.connected:
                other = await second.peer()
                await turns(20)
            other.ok(await other.next(T.CANCEL), [(5, "cancelled")])
            assert await soon(call) == "cancelled"
            peer.read_again()


async def test_a_stopped_daemon_is_tried_when_nobody_else_answers() -> None:
    async with pair(heartbeat=0.1) as (first, second, _):
        peer = await first.peer()
        await second.deaf()
        first.greet = lambda peer, frame: None
        await peer.gone()
        first.greet = first.welcome
        await first.peer()


async def test_a_daemon_that_resumes_in_time_is_kept() -> None:
    async with pair(heartbeat=0.2) as (first, second, client):
        peer = await first.peer()
        call = asyncio.ensure_future(client.cancel(5))
        frame = await peer.next(T.CANCEL)
        probe = await peer.next(T.PING)
        peer.ok(probe)
        peer.ok(frame, [(5, "cancelled")])
        assert await soon(call) == "cancelled"
        assert second.connections == 0


# --- several addresses, of which some say nothing ------------------------------------------------


@contextlib.asynccontextmanager
async def mute(count: int) -> AsyncIterator[list[FakeDaemon]]:
    """Daemons that take connections and say nothing, as stopped processes do."""
    async with contextlib.AsyncExitStack() as stack:
        results = [await stack.enter_async_context(FakeDaemon()) for _ in range(count)]
        for daemon in results:
            daemon.greet = lambda peer, frame: None
        yield results


async def test_silent_addresses_do_not_delay_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ATTEMPT_S_MAX", 600.0)
    monkeypatch.setattr(module, "APART_S", 0.01)
    async with (
        mute(3) as silent,
        FakeDaemon() as active,
        both(*silent, active, connect_timeout=2400.0) as client,
    ):
        peer = await active.peer()
        assert [daemon.connections for daemon in silent] == [1, 1, 1]
        await comes(lambda: not any(daemon.open for daemon in silent))
        call = asyncio.ensure_future(client.ping())
        peer.ok(await peer.next(T.PING))
        await soon(call)
        assert active.connections == 1


async def test_a_quick_answer_prevents_parallel_attempts() -> None:
    async with FakeDaemon() as active, FakeDaemon() as other:
        async with both(active, other):
            await active.peer()
        assert other.connections == 0


async def test_only_the_first_that_greets_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that greet as active in the same moment: one gets all, the other one not a word."""
    monkeypatch.setattr(module, "APART_S", 0.01)
    waiting: list[tuple[FakeDaemon, Peer, Any]] = []

    def hold(daemon: FakeDaemon, peer: Peer, frame: Any) -> None:
        waiting.append((daemon, peer, frame))

    async with FakeDaemon() as first, FakeDaemon() as second:
        for daemon in (first, second):
            daemon.greet = partial(hold, daemon)
        client = both(first, second)
        calls = [client.enqueue_nowait("t", b"x"), client.enqueue_nowait("t", b"y")]
        await comes(lambda: len(waiting) == 2)
        for daemon, peer, frame in waiting:
            daemon.welcome(peer, frame)
        await comes(lambda: len(first.open) + len(second.open) == 1)
        [used] = [*first.open, *second.open]
        [unused] = [peer for _, peer, _ in waiting if peer is not used]
        used.store(await used.next(T.ENQUEUE))
        await soon(asyncio.gather(*calls))
        assert [frame[0] for frame in unused.seen] == [T.HELLO]
        assert used.hello["session"] == unused.hello["session"]
        await client.close()


async def test_parallel_attempts_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "APART_S", 0.001)
    monkeypatch.setattr(module, "ATTEMPT_S_MAX", 0.05)
    async with mute(2 * module.ATTEMPTS_MAX) as silent, FakeDaemon() as active:
        most = 0

        def greet(peer: Peer, frame: Any) -> None:
            nonlocal most
            most = max(most, sum(len(daemon.open) for daemon in silent))

        for daemon in silent:
            daemon.greet = greet
        async with both(*silent, active):
            assert all(daemon.connections == 1 for daemon in silent)
        # An attempt that was given up may not have reached its daemon's end yet.
        assert module.ATTEMPTS_MAX <= most <= module.ATTEMPTS_MAX + 1


async def test_a_stopped_daemon_that_resumes_is_used_at_once() -> None:
    """Its standby answers all the time; the attempt at the daemon itself stands beside."""
    async with FakeDaemon() as first, FakeDaemon() as second:
        second.stand_by(first)
        held: list[tuple[Peer, Any]] = []
        async with both(first, second, heartbeat=0.1) as client:
            peer = await first.peer()
            first.greet = lambda peer, frame: held.append((peer, frame))
            peer.stop_reading()
            await comes(lambda: held)
            for _ in range(3):
                await second.peer()
            first.welcome(*held[-1])
            await comes(lambda: client.connected)
            assert client.server_info.get("role") is None, "it is the first"
            peer.read_again()


def test_a_hint_with_another_security_is_ignored() -> None:
    """A token that was kept secret by TLS never goes where there is none."""
    for secure, url in ((True, "tls://b:7355"), (False, "tcp://b:7355"), (False, "b:7355")):
        result = redirect_error({"role": "standby", "active": url}, secure=secure)
        assert result is not None and result.active == ("b", 7355), url
    for secure, url in ((True, "tcp://b:7355"), (True, "b:7355"), (False, "tls://b:7355")):
        result = redirect_error({"role": "standby", "active": url}, secure=secure)
        assert result is not None and result.active is None, url


@pytest.mark.parametrize("is_reset", [False, True])
async def test_a_resent_bulk_operation_has_the_same_random_id(is_reset: bool) -> None:
    async with FakeDaemon() as daemon, daemon.client() as client:
        peer = await daemon.peer()
        start = client.reset_group("t", "g", to="first") if is_reset else client.cancel(
            topic="t", filter={}
        )  # fmt: skip
        call = asyncio.ensure_future(start)
        first = await peer.next()
        peer.close()
        again = await (await daemon.peer()).next()
        assert first[2:] == again[2:] and first[-1]["id"].startswith(("cancel-", "reset-"))
        call.cancel()
