"""A short life under each nemesis: the runs that `make torture NEMESIS=…` makes longer.

And what the nemeses are made of: the proxy passes on what it was given or ends the connection,
and the judges find what is seeded on purpose (``test_checker`` has those of every run).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from crash.network import KINDS, Net, journal_of, journal_text
from crash.records import Accepted, Delivered, Finished, Journal, Moved
from crash.torture_run import CLOCK, GROUPS_, KILLS, NETWORK, RESOURCES, WATCH, Options, Run
from crash.watch import LATE_MS_MAX, Lateness, differences
from support.redis_server import program
from support.waiting import soon

ALL = frozenset((GROUPS_, CLOCK, NETWORK, RESOURCES))


def short(*nemeses: str, marks: Any = (), **more: Any) -> Any:
    """Each kind of trouble once."""
    how = {"nemeses": frozenset(nemeses), "kills": 0, "every_place": False, **more}
    return pytest.param(how, id="-".join((*nemeses, *more.get("store", "").split())), marks=marks)


def long(*nemeses: str, **more: Any) -> Any:
    how = {"nemeses": frozenset(nemeses), "kills": 100, "every_place": KILLS in nemeses, **more}
    name = f"100-{'-'.join(nemeses)}-{more.get('store', 'sqlite')}"
    return pytest.param(how, id=name, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "how",
    [
        short(GROUPS_, NETWORK),
        # Clocks: test_everything.py. What runs out: test_disk.py, e2e/test_limits.py.
        short(CLOCK, marks=pytest.mark.slow),
        short(RESOURCES, marks=pytest.mark.slow),
        short(WATCH, GROUPS_, watch_s=8.0, marks=pytest.mark.slow),
        short(CLOCK, store="redis", daemons=2, marks=pytest.mark.slow),
        long(*sorted(ALL)),
        long(*sorted(ALL), store="redis", daemons=2),
        long(KILLS, *sorted(ALL)),
        long(WATCH, GROUPS_, watch_s=180.0),
    ],
)
async def test_all_promises_hold(tmp_path: Path, how: dict[str, Any]) -> None:
    if how.get("store") == "redis":
        program()
    run = Run(Options(seed=secrets.randbelow(2**31), **how), tmp_path)
    print(f"torture: seed {run.plan.seed}")  # noqa: T201  # shown when it fails
    await run.go()
    assert run.good, run.report()


# --- the proxy ---------------------------------------------------------------------------------


class Spared(random.Random):
    """Every connection has the fault, and none of them is cut at its end."""

    def __init__(self) -> None:
        super().__init__(1)
        self._drawn = 0

    def random(self) -> float:
        self._drawn += 1
        return 0.0 if self._drawn == 1 else 0.99


@pytest.mark.parametrize("kind", KINDS)
async def test_the_faulty_network_never_skips_bytes(kind: str) -> None:
    """What comes through, in both directions, is what was sent or a beginning of it."""
    rnd, heard = random.Random(kind), bytearray()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            heard.extend(data)
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    net = await Net(rnd, server.sockets[0].getsockname()[1]).start()
    reader, writer = await asyncio.open_connection("127.0.0.1", net.port)
    sent, back = rnd.randbytes(300_000), bytearray()

    async def read() -> None:
        while data := await reader.read(1 << 16):
            back.extend(data)

    reading = asyncio.create_task(read())
    try:
        for at in range(0, len(sent), 30_000):
            writer.write(sent[at : at + 30_000])
            await soon(net.suffer(kind, 0.02))
        writer.write_eof()
        await soon(reading)
    except OSError:  # it was cut: what came before counts
        reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    writer.transport.abort()
    await net.stop()
    server.close()
    assert bytes(heard) == sent[: len(heard)]
    assert bytes(back) == sent[: len(back)]
    assert heard or kind != "slow"


@pytest.mark.parametrize("kind", ["up", "down", "both"])
async def test_the_client_sees_that_the_server_went_during_a_silence(kind: str) -> None:
    """A request that was held then comes too late for anybody to answer it."""
    gone = asyncio.Event()

    async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        await gone.wait()
        writer.close()

    server = await asyncio.start_server(leave, "127.0.0.1", 0)
    net = await Net(Spared(), server.sockets[0].getsockname()[1]).start()
    reader, writer = await asyncio.open_connection("127.0.0.1", net.port)
    writer.write(b"1")
    await asyncio.sleep(0.05)  # real time: whether anything comes through
    silence = asyncio.create_task(net.suffer(kind, 0.2))
    await asyncio.sleep(0.05)  # real time: whether anything comes through
    writer.write(b"2")
    gone.set()
    await silence
    with contextlib.suppress(ConnectionResetError):  # an end, too
        assert await soon(reader.read()) == b""
    writer.transport.abort()
    await net.stop()
    server.close()


def test_a_journal_survives_serialisation() -> None:
    journal = Journal("frozen", odd=["hm"])
    journal.delivered.append(Delivered(7, "g", "x", 1, 1, 5, 6, 7, -1, 3, priority=9))
    journal.finished.append(Finished(7, "g", "acked", 1, 8, -1, 4))
    (fields,) = json.loads(journal_text([journal]))
    assert journal_of(fields) == journal


# --- the watch ---------------------------------------------------------------------------------

DUE_MS = 10_000
PLACE = ("t", "g")


def lateness(
    journal: Journal, free: Mapping[int, bool], until_ms: int, pause: Sequence[int] = ()
) -> list[str]:
    """``free`` says from which moment on the group has a free subscriber, or not; nobody looks in
    the ``pause``."""
    found, is_free = Lateness([journal], {"t": ("g",)}), False
    for now_ms in range(0, until_ms, 100):
        if now_ms in pause:
            continue
        is_free = free.get(now_ms, is_free)
        found.look(now_ms, {PLACE: is_free})
    return found.problems


def waits() -> Journal:
    return Journal("c", accepted=[Accepted("t", ("x",), (7,), (DUE_MS,))])


LATE = DUE_MS + LATE_MS_MAX + 200


def test_a_late_delivery_with_a_free_subscriber_is_found() -> None:
    assert lateness(waits(), {0: True}, LATE)
    assert lateness(waits(), {0: True, 11_000: False, 12_000: True}, 17_200)
    moved = waits()
    moved.moved.append(Moved(7, DUE_MS + 5_000, 1))
    assert lateness(moved, {0: True}, LATE + 5_000)


@pytest.mark.parametrize("free", [{0: False}, {0: True, 14_000: False}, {11_000: True}])
def test_a_delivery_without_a_free_subscriber_is_not_late(free: Mapping[int, bool]) -> None:
    assert not lateness(waits(), free, LATE)


def test_an_unwatched_delivery_is_not_late() -> None:
    pause = range(DUE_MS + 1_000, DUE_MS + 4_000)
    assert not lateness(waits(), {0: True}, LATE, pause)
    assert lateness(waits(), {0: True}, LATE + 4_000, pause)


def test_delivered_cancelled_and_moved_tasks_are_not_late() -> None:
    come, cancelled, moved = waits(), waits(), waits()
    come.delivered.append(Delivered(7, "g", "x", 1, 1, DUE_MS, DUE_MS, DUE_MS, 1, 1))
    cancelled.finished.append(Finished(7, None, "cancelled", 1, 1, 1, 1))
    moved.moved.append(Moved(7, DUE_MS + 5_000, 1))
    for journal in (come, cancelled, moved):
        assert not lateness(journal, {0: True}, LATE)


TASKS: Sequence[Mapping[str, Any]] = (
    {"id": 1, "topic": "t", "state": "scheduled", "groups": {}},
    {"id": 2, "topic": "t", "state": "ready", "groups": {}},
    {
        "id": 3,
        "topic": "t",
        "state": "ready",
        "groups": {"a": {"state": "ready"}, "b": {"state": "dead"}, "c": {"state": "acked"}},
    },
)


def stats(**changed: int) -> dict[str, Any]:
    counts = {"scheduled": 1, "ready": 2, "in_flight": 0, "waiting": 0, "dead": 1} | changed
    empty = dict.fromkeys(counts, 0)
    groups = {"a": empty | {"ready": 1}, "b": empty | {"dead": 1}, "c": empty}
    return {**counts, "topics": {"t": {**counts, "groups": groups}}}


def test_counts_that_agree_with_a_walk_are_fine() -> None:
    assert not differences(stats(), TASKS, [{"id": 3}])


@pytest.mark.parametrize("name", ["scheduled", "ready", "in_flight", "waiting", "dead"])
def test_a_count_that_is_wrong_is_found(name: str) -> None:
    assert differences(stats(**{name: 7}), TASKS, [{"id": 3}])
    answer = stats()
    if name != "scheduled":
        answer["topics"]["t"]["groups"]["c"] = answer["topics"]["t"]["groups"]["c"] | {name: 1}
        assert differences(answer, TASKS, [{"id": 3}])


def test_a_dead_letter_that_is_not_listed_is_found() -> None:
    assert differences(stats(), TASKS, [])
