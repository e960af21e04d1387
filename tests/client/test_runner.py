"""A worker's runner alone: what is stopped or lost before its handler has begun."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.fake_daemon import turns
from tickwheel.client import jobs
from tickwheel.client.jobs import Observer, Runner, Threads, route


class Given:
    """A fake of delivery and leases that records their outcomes."""

    lease_until_s = 0.0
    settled = False
    encoding = None

    def __init__(self) -> None:
        self.became: list[str] = []

    def drop(self, delivery: Given) -> None:
        delivery.became.append("dropped")

    async def release(self) -> str:
        self.became.append("released")
        return "released"

    def ack_unwatched(self) -> None:
        self.became.append("acked")


async def handled(delivery: Any) -> None:
    delivery.became.append("handled")


def runner(
    given: Any, *more: Any, handler: Any = handled, observer: Observer | None = None
) -> Runner:
    todo = list(more)
    made = route(
        handler, "t", group="g", concurrency=1, prefetch=None, retry=None, timeout=None, lease=None
    )
    return Runner(
        made, Threads("none"), given, given, lambda _: todo.pop(0) if todo else None,
        [] if observer is None else [observer],
    )  # fmt: skip


async def test_consecutive_deliveries_share_an_asyncio_task() -> None:
    first, second, third = Given(), Given(), Given()
    one = runner(first, second)
    while not second.became:
        await turns()
    assert not one.task.done()
    one.go_on(third)  # type: ignore[arg-type]
    while not third.became:
        await turns()
    one.go_on(None)
    await asyncio.wait_for(one.task, 5)
    assert [given.became for given in (first, second, third)] == [
        ["handled", "dropped", "acked"]
    ] * 3


@pytest.mark.parametrize("again", [False, True])
async def test_a_delivery_stopped_before_it_starts_is_released(again: bool) -> None:
    given = Given()
    if again:
        before = Given()
        one = runner(before)
        while not before.became:
            await turns()
        one.go_on(given)  # type: ignore[arg-type]
    else:
        one = runner(given)
    one.stop()
    await asyncio.wait_for(one.task, 5)
    assert given.became == ["dropped", "released"]


async def test_a_runner_that_goes_on_has_the_lease_of_its_new_delivery_at_once() -> None:
    first, second = Given(), Given()
    second.lease_until_s = 60.0
    one = runner(first)
    while "acked" not in first.became:
        await turns()
    assert one.go_on(second)  # type: ignore[arg-type]
    assert (one.delivery, one.until_s) == (second, 60.0)
    one.stop()
    await asyncio.wait_for(one.task, 5)


async def test_a_delivery_lost_before_it_starts_is_dropped() -> None:
    given = Given()
    one = runner(given)
    one.lose("stale")
    await asyncio.wait_for(one.task, 5)
    assert given.became == ["dropped"]


# --- what an observer hears ----------------------------------------------------------------------


class Heard:
    """An observer, and the one attempt that it observes."""

    def __init__(self) -> None:
        self.said: list[object] = []

    def begin(self, delivery: object) -> Heard:
        self.said.append("begin")
        return self

    def end(self, outcome: str, error: BaseException | None = None) -> None:
        self.said += [outcome, type(error)]


async def endless(delivery: Any) -> None:
    delivery.became.append("handled")
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("how", "outcome", "became"),
    [
        ("lose", "nothing", ["handled", "dropped"]),
        ("stop", "release", ["handled", "dropped", "released"]),
        ("cancel", "release", ["handled", "dropped", "released"]),
    ],
)
async def test_the_observer_sees_interrupted_attempts(
    how: str, outcome: str, became: list[str]
) -> None:
    given, heard = Given(), Heard()
    one = runner(given, handler=endless, observer=heard)
    while not given.became:
        await turns()
    if how == "lose":
        one.lose("stale")
    elif how == "stop":
        one.stop()
    else:
        one.task.cancel()
    await asyncio.wait((one.task,), timeout=5)
    assert one.task.cancelled() == (how == "cancel")
    assert heard.said == ["begin", outcome, asyncio.CancelledError]
    assert given.became == became


async def test_the_observer_sees_no_unstarted_attempts() -> None:
    given, heard = Given(), Heard()
    one = runner(given, observer=heard)
    one.stop()
    await asyncio.wait_for(one.task, 5)
    assert heard.said == []


class Broken:
    """An observer that fails."""

    def begin(self, delivery: object) -> Heard:
        raise LookupError("no tracer")


async def test_observers_of_the_process_surround_those_of_the_worker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A broken observer is logged; the attempt and the other observers go on."""
    given, said = Given(), list[str]()

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def begin(self, delivery: object) -> Named | None:
            said.append(f"{self.name} begins")
            return None if self.name == "idle" else self

        def end(self, outcome: str, error: BaseException | None = None) -> None:
            said.append(f"{self.name} ends: {outcome}")

    monkeypatch.setattr(jobs, "OBSERVERS", [Named("outer"), Named("idle"), Broken()])
    one = runner(given, observer=Named("inner"))
    while not given.became:
        await turns()
    one.go_on(None)
    await asyncio.wait_for(one.task, 5)
    begun = ["outer begins", "idle begins", "inner begins"]
    assert said == [*begun, "inner ends: ack", "outer ends: ack"]
    assert given.became == ["handled", "dropped", "acked"]
    assert "the observer failed: LookupError('no tracer')" in caplog.text


async def test_the_observer_sees_every_finished_attempt() -> None:
    first, second, heard = Given(), Given(), Heard()
    one = runner(first, second, observer=heard)
    while not second.became:
        await turns()
    one.go_on(None)
    await asyncio.wait_for(one.task, 5)
    assert heard.said == ["begin", "ack", type(None)] * 2
