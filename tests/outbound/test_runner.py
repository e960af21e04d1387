"""What a runner does with the answers of a target, and with one that gives none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from support.waiting import comes, rest, soon
from tests.outbound.conftest import Scripted, running
from tickwheel import BadRequest, Delivery, NotFound, Retry
from tickwheel.outbound import runner as runner_module
from tickwheel.outbound.runner import Runner
from tickwheel.outbound.target import ACK, NotNow, Outcome
from tickwheel.testing import TestWheel


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pauses between tries to connect pass in real time."""
    monkeypatch.setattr(runner_module, "PAUSE_S", 0.001)


async def enqueue(wheel: TestWheel, *bodies: bytes) -> list[int]:
    return [(await wheel.client.enqueue("t", body)).id for body in bodies]


def answers(**outcomes: Outcome) -> Scripted:
    """A target that answers a body by its name, and takes all others."""

    async def answer(deliveries: Sequence[Delivery]) -> list[Outcome]:
        return [outcomes.get(delivery.body.decode(), ACK) for delivery in deliveries]

    return Scripted(answer)


async def states(wheel: TestWheel, ids: list[int]) -> list[str]:
    return [found.state for found in await wheel.client.lookup_many(ids)]


async def all_are(wheel: TestWheel, ids: list[int], state: str) -> None:
    async def are_they() -> bool:
        return set(await states(wheel, ids)) == {state}

    await comes(are_they)


async def test_each_delivery_is_settled_by_its_own_outcome(wheel: TestWheel) -> None:
    heard: list[tuple[bytes, str, str]] = []
    target = answers(
        retry=Outcome("retry", 60.0, "busy"),
        reject=Outcome("reject", reason="no such place"),
        later=Outcome("later", 30.0),
    )
    ids = await enqueue(wheel, b"fine", b"retry", b"reject", b"later")
    async with running(
        wheel.client, target, on_settled=lambda d, o, word: heard.append((d.body, o.settled, word))
    ):
        await wheel.settle()
        assert await states(wheel, ids) == ["acked", "waiting", "dead", "waiting"]
        assert sorted(heard) == [
            (b"fine", "ack", "acked"), (b"later", "later", "snoozed"),
            (b"reject", "reject", "dead"), (b"retry", "retry", "retrying"),
        ]  # fmt: skip
        (dead,) = await wheel.dead_letters("t", "g")
        assert (dead.id, dead.failures[-1].reason) == (ids[2], "no such place")
        await wheel.advance(31)
        assert target.bodies.count(b"later") == 2 and target.bodies.count(b"retry") == 1
        await wheel.advance(30)
        assert target.bodies.count(b"retry") == 2


async def test_later_without_a_delay_redelivers_without_a_failure(wheel: TestWheel) -> None:
    seen: list[tuple[int, int]] = []

    async def answer(deliveries: Sequence[Delivery]) -> list[Outcome]:
        seen.extend((delivery.attempt, delivery.failures) for delivery in deliveries)
        return [ACK if len(seen) > 2 else Outcome("later")]

    await enqueue(wheel, b"x")
    async with running(wheel.client, Scripted(answer)):
        await comes(lambda: len(seen) == 3)
    assert [failures for _, failures in seen] == [0, 0, 0]


async def test_a_delivery_postponed_too_often_fails(wheel: TestWheel) -> None:
    async with TestWheel(snoozes_max=1) as small:
        await small.client.create_group("t", "g")
        await enqueue(small, b"later")
        words: list[str] = []
        target = answers(later=Outcome("later", 1.0, "closed"))
        async with running(small.client, target, on_settled=lambda d, o, word: words.append(word)):
            await small.settle()
            await small.advance(1)
        assert words == ["snoozed", "retrying"]


async def test_a_runner_keeps_within_the_limits_of_the_daemon() -> None:
    async with TestWheel(prefetch_max=5, delay_max_s=86_400) as small:
        await small.client.create_group("t", "g")
        await enqueue(small, b"later", *[b"x"] * 9)
        words: list[str] = []
        target = answers(later=Outcome("later", 864_000.0, "closed"))
        async with running(small.client, target, on_settled=lambda d, o, word: words.append(word)):
            await comes(lambda: len(words) == 10)
        assert sorted(words) == ["acked"] * 9 + ["snoozed"]


async def test_batches_are_limited_by_the_target(wheel: TestWheel) -> None:
    free = asyncio.Event()

    async def answer(deliveries: Sequence[Delivery]) -> list[Outcome]:
        await free.wait()
        return [ACK] * len(deliveries)

    target = Scripted(answer, batch_max=10)
    async with running(wheel.client, target, prefetch=100):
        await enqueue(wheel, b"first")
        await comes(lambda: target.batches)
        await enqueue(wheel, *(b"%d" % number for number in range(25)))
        free.set()
        await comes(lambda: len(target.bodies) == 26)
    assert [len(batch) for batch in target.batches] == [1, 10, 10, 5]


async def test_concurrent_batches_are_limited_by_the_target(wheel: TestWheel) -> None:
    free = asyncio.Event()

    async def answer(deliveries: Sequence[Delivery]) -> list[Outcome]:
        await free.wait()
        return [ACK] * len(deliveries)

    target = Scripted(answer, batch_max=1, concurrency=3)
    await enqueue(wheel, *(b"%d" % number for number in range(9)))
    async with running(wheel.client, target):
        await comes(lambda: target.under_way == 3)
        free.set()
        await comes(lambda: len(target.bodies) == 9)
    assert target.under_way_max == 3


async def test_a_broken_targets_batch_follows_the_groups_policy(wheel: TestWheel) -> None:
    await wheel.client.configure("t", group="g", retry=Retry.fixed(delay=5, retries=2))

    async def answer(deliveries: Sequence[Delivery]) -> list[Outcome]:
        raise ConnectionError("it broke\n  in two")

    target = Scripted(answer)
    ids = await enqueue(wheel, b"a", b"b")
    async with running(wheel.client, target) as runner:
        await comes(lambda: runner.trouble)
        assert runner.trouble == "ConnectionError: it broke in two"
        await comes(lambda: target.closed == 4)
        assert not runner.is_connected
        for failures in (7, 10):
            await all_are(wheel, ids, "waiting")
            await wheel.advance(5)
            await comes(lambda: len(target.batches) == failures)  # noqa: B023  # it is awaited here
        await all_are(wheel, ids, "dead")
        dead = await wheel.dead_letters("t", "g")
        assert {item.failures[-1].reason for item in dead} == {"ConnectionError: it broke in two"}
        target.answer = answers().answer
        await enqueue(wheel, b"c")
        await comes(lambda: runner.is_connected)
        await comes(lambda: runner.trouble is None)
        assert runner.tries == 0
    assert target.connected == 11, "once at the start, and after each failure"
    assert [len(batch) for batch in target.batches] == [2, *[2, 1, 1] * 3, 1]


async def breaks_at_bad(deliveries: Sequence[Delivery]) -> list[Outcome]:
    if any(delivery.body == b"bad" for delivery in deliveries):
        raise ConnectionResetError("it has broken")
    return [ACK] * len(deliveries)


async def test_a_delivery_that_breaks_the_target_fails_alone(wheel: TestWheel) -> None:
    await wheel.client.configure("t", group="g", retry=Retry.none())
    *good, bad = await enqueue(wheel, b"1", b"2", b"3", b"4", b"bad")
    later = await enqueue(wheel, b"5", b"bad", b"6", b"bad", b"7")
    async with running(wheel.client, Scripted(breaks_at_bad)) as made:
        await all_are(wheel, [*good, later[0], later[2], later[4]], "acked")
        await all_are(wheel, [bad, later[1], later[3]], "dead")
        assert made.trouble is None
    dead = await wheel.dead_letters("t", "g")
    assert {item.failures[-1].reason for item in dead} == {"ConnectionResetError: it has broken"}


async def test_a_target_broken_for_a_whole_batch_is_not_tried_for_each(wheel: TestWheel) -> None:
    await wheel.client.configure("t", group="g", retry=Retry.none())
    ids = await enqueue(wheel, *[b"bad"] * 10)
    target = Scripted(breaks_at_bad)
    async with running(wheel.client, target):
        await all_are(wheel, ids, "dead")
    alone = [1] * runner_module.ALONE_MAX
    assert [len(batch) for batch in target.batches[:6]] == [10, 10, *alone, 7]


async def test_an_unreachable_target_is_retried(wheel: TestWheel) -> None:
    target = Scripted(batch_max=2)
    target.refusals = [OSError("nobody there") for _ in range(9)]
    await wheel.client.configure("t", group="g", retry=Retry.none())
    ids = await enqueue(wheel, *(b"%d" % number for number in range(10)))
    async with running(wheel.client, target) as runner:
        await all_are(wheel, ids, "acked")
        assert runner.trouble is None
        assert len(target.bodies) == 10


async def test_target_errors_use_no_attempt(wheel: TestWheel) -> None:
    """Neither those that it refuses of a batch, nor a batch that it refuses as a whole."""
    refusals, pauses = 6, list[int]()

    async def answer(deliveries: Sequence[Delivery]) -> list[Outcome]:
        pauses.append(runner.tries)
        if len(pauses) > refusals:
            return [ACK] * len(deliveries)
        if len(pauses) % 2:
            raise NotNow("busy")
        raise NotNow("busy", [ACK, *[Outcome("later", reason="busy")] * (len(deliveries) - 1)])

    await wheel.client.configure("t", group="g", retry=Retry.none())
    ids = await enqueue(wheel, *(b"%d" % number for number in range(10)))
    target, told = Scripted(answer), list[str | None]()
    async with running(
        wheel.client, target, on_settled=lambda d, o, word: told.append(runner.trouble)
    ) as runner:
        await all_are(wheel, ids, "acked")
    assert pauses[: refusals + 1] == list(range(refusals + 1)), "each pause is longer"
    assert "busy" in told and runner.trouble is None


async def test_a_closed_connection_is_reopened_without_a_failure(wheel: TestWheel) -> None:
    closed = True

    async def answer(deliveries: Sequence[Delivery]) -> list[Outcome]:
        if closed:
            raise ConnectionError("closed while it was idle")
        return [ACK] * len(deliveries)

    class Reopened(Scripted):
        async def connect(self) -> None:
            nonlocal closed
            await super().connect()
            closed = self.connected == 1

    target = Reopened(answer)
    words: list[tuple[str, int]] = []
    ids = await enqueue(wheel, b"a", b"b")
    async with running(
        wheel.client, target, on_settled=lambda d, o, word: words.append((word, d.attempt))
    ) as runner:
        await all_are(wheel, ids, "acked")
        assert runner.trouble is None and runner.tries == 0
    assert words == [("acked", 1)] * 2
    assert target.batches == [[b"a", b"b"]] * 2


async def test_a_broken_connection_costs_no_lane_an_attempt(wheel: TestWheel) -> None:
    await wheel.client.configure("t", group="g", retry=Retry.none())
    breaks = asyncio.Event()

    async def answer(deliveries: Sequence[Delivery]) -> list[Outcome]:
        if target.connected == 1:
            await breaks.wait()
            raise ConnectionResetError("it has broken")
        return [ACK] * len(deliveries)

    target = Scripted(answer, batch_max=1, concurrency=2)
    ids = await enqueue(wheel, b"a", b"b")
    async with running(wheel.client, target) as runner:
        await comes(lambda: target.under_way == 2)
        breaks.set()
        await all_are(wheel, ids, "acked")
        assert runner.trouble is None


@pytest.mark.parametrize("place", ["connect", "send"])
async def test_a_library_that_gives_up_by_cancelling_has_failed(
    wheel: TestWheel, place: str
) -> None:
    given_up = [asyncio.CancelledError()]

    async def answer(deliveries: Sequence[Delivery]) -> list[Outcome]:
        if place == "send" and given_up:
            raise given_up.pop()
        return [ACK] * len(deliveries)

    class GivesUp(Scripted):
        async def connect(self) -> None:
            if place == "connect" and given_up:
                raise given_up.pop()
            await super().connect()

    target = GivesUp(answer)
    ids = await enqueue(wheel, b"a")
    async with running(wheel.client, target):
        await all_are(wheel, ids, "acked")
    assert not given_up and target.connected == (2 if place == "send" else 1)


async def test_a_target_is_not_connected_while_it_closes(wheel: TestWheel) -> None:
    doing: list[str] = []
    slowly = asyncio.Event()

    async def answer(deliveries: Sequence[Delivery]) -> list[Outcome]:
        if deliveries[0].body == b"breaks" and not slowly.is_set():
            raise ConnectionError("it broke")
        return [ACK] * len(deliveries)

    class Slow(Scripted):
        async def connect(self) -> None:
            doing.append("connects")
            await super().connect()

        async def close(self) -> None:
            doing.append("closes")
            await slowly.wait()
            doing.append("closed")
            await super().close()

    target = Slow(answer, batch_max=1, concurrency=2)
    async with running(wheel.client, target):
        await enqueue(wheel, b"breaks")
        await comes(lambda: "closes" in doing)
        (other,) = await enqueue(wheel, b"other")
        await rest(0.05)  # real time: the pause before a try to connect
        assert doing == ["connects", "closes"]
        slowly.set()
        await all_are(wheel, [other], "acked")
    assert doing[:4] == ["connects", "closes", "closed", "connects"]


async def test_missing_outcomes_fail_the_batch(wheel: TestWheel) -> None:
    async def answer(deliveries: Sequence[Delivery]) -> list[Outcome]:
        return [ACK] * (len(deliveries) - 1)

    ids = await enqueue(wheel, b"a", b"b")
    async with running(wheel.client, Scripted(answer)) as runner:
        await all_are(wheel, ids, "waiting")
        assert runner.trouble == "RuntimeError: the target returned 0 outcomes for 1 deliveries"


async def test_a_lane_keeps_a_connection_reopened_by_another(wheel: TestWheel) -> None:
    free = asyncio.Event()
    broken: set[bytes] = set()

    async def answer(deliveries: Sequence[Delivery]) -> list[Outcome]:
        (one,) = deliveries
        if one.body == b"slow":
            await free.wait()
        if one.body in (b"slow", b"breaks") and one.body not in broken:
            broken.add(one.body)
            raise ConnectionError("of the first connection")
        return [ACK]

    target = Scripted(answer, batch_max=1, concurrency=2)
    async with running(wheel.client, target):
        await enqueue(wheel, b"slow")
        await comes(lambda: target.under_way == 1)
        await enqueue(wheel, b"breaks")
        await comes(lambda: target.closed == 1)
        await enqueue(wheel, b"fine")
        await comes(lambda: b"fine" in target.bodies)
        assert target.connected == 2
        free.set()
        await comes(lambda: target.bodies.count(b"slow") == 2)
        await wheel.settle()
        assert target.closed == 1


async def test_a_stop_releases_failed_deliveries(wheel: TestWheel) -> None:
    free = asyncio.Event()

    async def answer(deliveries: Sequence[Delivery]) -> list[Outcome]:
        await free.wait()
        raise ConnectionError("it broke")

    target = Scripted(answer)
    ids = await enqueue(wheel, b"a")
    runner = Runner(wheel.client, "t", "g", target)
    task = asyncio.create_task(runner.run())
    await comes(lambda: target.under_way)
    stopping = asyncio.create_task(runner.stop())
    await wheel.settle()
    free.set()
    await soon(asyncio.gather(stopping, task))
    assert await states(wheel, ids) == ["ready"]
    assert [found.failures for found in await pulled(wheel)] == [0]


async def test_a_stop_finishes_its_batch_and_releases_the_rest(wheel: TestWheel) -> None:
    free = asyncio.Event()

    async def answer(deliveries: Sequence[Delivery]) -> list[Outcome]:
        await free.wait()
        return [ACK] * len(deliveries)

    target = Scripted(answer, batch_max=2)
    ids = await enqueue(wheel, b"a", b"b", b"c", b"d")
    runner = Runner(wheel.client, "t", "g", target)
    task = asyncio.create_task(runner.run())
    await comes(lambda: target.under_way)
    stopping = asyncio.create_task(runner.stop())
    await wheel.settle()
    assert not stopping.done()
    free.set()
    await soon(stopping)
    await soon(task)
    assert await states(wheel, ids) == ["acked", "acked", "ready", "ready"]
    assert target.closed == 1
    assert [found.failures for found in await pulled(wheel)] == [0, 0]


async def pulled(wheel: TestWheel) -> list[Delivery]:
    return await wheel.client.pull("t", group="g", max=10)


async def test_a_stop_does_not_wait_for_a_target_that_never_answers(
    wheel: TestWheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "GRACE_S", 0.05)

    async def answer(deliveries: Sequence[Delivery]) -> list[Outcome]:
        await asyncio.Event().wait()
        return []

    target = Scripted(answer)
    ids = await enqueue(wheel, b"a")
    async with running(wheel.client, target):
        await comes(lambda: target.under_way)
    assert await states(wheel, ids) == ["ready"]
    assert target.closed == 1


async def test_a_cancel_gives_the_batch_under_way_back_at_once(wheel: TestWheel) -> None:
    async def answer(deliveries: Sequence[Delivery]) -> list[Outcome]:
        await asyncio.Event().wait()
        return []

    target = Scripted(answer)
    ids = await enqueue(wheel, b"a", b"b")
    runner = Runner(wheel.client, "t", "g", target)
    task = asyncio.create_task(runner.run())
    await comes(lambda: target.under_way)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await soon(task)
    assert await states(wheel, ids) == ["ready", "ready"]
    assert [found.failures for found in await pulled(wheel)] == [0, 0]
    await soon(runner.stop())


async def test_a_stop_does_not_wait_for_an_unreachable_target(wheel: TestWheel) -> None:
    target = Scripted()
    target.refusals = [OSError("nobody there") for _ in range(1000)]
    await enqueue(wheel, b"a")
    async with running(wheel.client, target) as runner:
        await comes(lambda: runner.tries)
        await wheel.client.enqueue("t", b"b")
    assert target.bodies == []


async def test_leases_are_extended_while_a_batch_is_under_way(wheel: TestWheel) -> None:
    free = asyncio.Event()

    async def answer(deliveries: Sequence[Delivery]) -> list[Outcome]:
        await free.wait()
        return [ACK] * len(deliveries)

    async with TestWheel(lease_default_s=1) as short:
        await short.client.create_group("t", "g")
        target = Scripted(answer)
        (one,) = await enqueue(short, b"a")
        async with running(short.client, target):
            await comes(lambda: target.under_way)
            for _ in range(5):
                await rest(0.4)  # the lease is the wheel's, and who keeps it up counts real time
                await short.advance(0.4)
            free.set()
            await short.settle()
        assert target.batches == [[b"a"]]
        assert await states(short, [one]) == ["acked"]


async def test_a_lost_lease_is_logged_once_and_the_ack_still_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    free = asyncio.Event()

    async def answer(deliveries: Sequence[Delivery]) -> list[Outcome]:
        await free.wait()
        return [ACK] * len(deliveries)

    async with TestWheel(lease_default_s=1) as short:
        await short.client.create_group("t", "g")
        target = Scripted(answer)
        (one,) = await enqueue(short, b"a")
        async with running(short.client, target):
            await comes(lambda: target.under_way)
            await short.lapse("t", "g")
            await comes(lambda: "lost its lease" in caplog.text)
            await rest(0.3)  # some more looks at the leases, which count real time
            free.set()
            await all_are(short, [one], "acked")
    assert caplog.text.count("lost its lease") == 1


async def test_a_group_that_is_deleted_ends_the_runner_with_the_reason(wheel: TestWheel) -> None:
    target = Scripted()
    runner = Runner(wheel.client, "t", "g", target)
    task = asyncio.create_task(runner.run())
    await enqueue(wheel, b"a")
    await comes(lambda: target.bodies)
    await wheel.client.delete_group("t", "g", force=True)
    with pytest.raises(NotFound):
        await soon(task)
    assert target.closed == 1
    await soon(runner.stop())


async def test_a_runner_runs_once(wheel: TestWheel) -> None:
    target = Scripted()
    runner = Runner(wheel.client, "t", "g", target)
    await runner.stop()
    await soon(runner.run())
    assert target.connected == 0
    with pytest.raises(BadRequest, match="has already run"):
        await runner.run()


async def test_a_target_that_takes_nothing_holds_limited_bytes(wheel: TestWheel) -> None:
    free = asyncio.Event()

    async def answer(deliveries: Sequence[Delivery]) -> list[Outcome]:
        await free.wait()
        return [ACK] * len(deliveries)

    stuck = Scripted(answer, batch_max=1, concurrency=30)
    async with running(wheel.client, stuck, bytes_max=lambda: 300_000) as runner:
        ids = await enqueue(wheel, *[bytes(100_000)] * 20)
        await wheel.settle()
        assert 2 <= stuck.under_way <= 6, "some more can be under way"
        assert runner.sending_bytes == 100_000 * stuck.under_way
        await wheel.client.create_group("u", "g")
        other = Scripted()
        beside = Runner(wheel.client, "u", "g", other, bytes_max=lambda: 300_000)
        task = asyncio.create_task(beside.run())
        await wheel.client.enqueue("u", b"a")
        await comes(lambda: other.bodies)
        await beside.stop()
        await task
        free.set()
        await all_are(wheel, ids, "acked")
