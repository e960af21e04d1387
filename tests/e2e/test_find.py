"""Tasks looked up by their key, on SQLite and in memory: wire, client and command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from e2e.cli_runner import Cli
from support.daemon import Daemon
from support.history_rig import read_all
from support.raw import Raw
from support.waiting import until
from tickwheel import Client, Task
from tickwheel.api.frames import FrameType as T
from tickwheel.history.segments import Event
from tickwheel.server.shard.tasks import SCANNED_PER_REQUEST_MAX

FAR_MS = 3_600_000
FAR = 3_600.0
KEY = "kéy 1"


@pytest.fixture(scope="module", params=["sqlite", pytest.param("memory", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest) -> str | None:
    return "memory:" if request.param == "memory" else None


@pytest.fixture(scope="module")
def running(store: str | None, tmp_path_factory: Any) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("find"), store=store) as daemon:
        yield daemon
        assert "Traceback" not in daemon.log_text()


@pytest.fixture
def raw(running: Daemon) -> Iterator[Raw]:
    with Raw(running.port) as raw:
        yield raw


def put(raw: Raw, topic: str, *keys: str | None) -> list[int]:
    """A task each, one request each, so that each has a time of its own."""
    results = []
    for key in keys:
        options = {} if key is None else {"key": key}
        results += raw.enqueue((topic, b"x", FAR_MS, options))[2][1]
    return results


def pages(raw: Raw, **options: Any) -> list[list[int]]:
    """Ids, page by page."""
    found, after = [], None
    while True:
        given = options if after is None else {**options, "after": after}
        frame = raw.call(T.LIST, given)
        assert frame[0] == T.OK, frame
        found.append([task["id"] for task in frame[2]["tasks"]])
        after = frame[2]["next"]
        if after is None:
            return found


def ids(raw: Raw, **options: Any) -> list[int]:
    return [task_id for page in pages(raw, **options) for task_id in page]


# --- the wire --------------------------------------------------------------------------------


def test_tasks_are_found_by_enqueue_time(raw: Raw, topic: str) -> None:
    all_ids: list[int] = []
    while len({when(raw, task_id) for task_id in all_ids}) < 3:
        all_ids += put(raw, topic, KEY)
    times = {task_id: when(raw, task_id) for task_id in all_ids}
    middle_ms = sorted(set(times.values()))[1]
    for until_ms in (min(times.values()) - 1, middle_ms - 1, middle_ms, max(times.values()) + 1):
        expected = [task_id for task_id in all_ids if times[task_id] <= until_ms]
        assert ids(raw, key=KEY, topic=topic, until_ms=until_ms) == expected
        result = ids(raw, key=KEY, topic=topic, until_ms=until_ms, newest=True)
        assert result == expected[::-1]
        # A time limit is not a matter of keys.
        assert ids(raw, topic=topic, until_ms=until_ms, newest=True) == expected[::-1]
    for until_ms in (0, 1):
        assert ids(raw, key=KEY, until_ms=until_ms, newest=True) == []
        assert ids(raw, key=KEY, until_ms=until_ms) == []
    assert ids(raw, key=KEY, topic=topic, until_ms=2**63 - 1, newest=True) == all_ids[::-1]


def when(raw: Raw, task_id: int) -> int:
    return int(raw.call(T.LOOKUP, [task_id])[2][0]["enqueued_ms"])


def test_a_request_looks_at_a_bounded_number_of_tasks(raw: Raw, topic: str) -> None:
    (oldest,) = put(raw, topic, "oldest of many")
    others = 2 * SCANNED_PER_REQUEST_MAX + 10
    for start in range(0, others, 10_000):
        count = min(10_000, others - start)
        assert raw.enqueue(*[(topic, b"x", FAR_MS)] * count)[0] == T.OK
    result = pages(raw, key="oldest of many", newest=True, limit=1)
    assert result[:2] == [[], []] and result[2] == [oldest]
    assert pages(raw, key="oldest of many", limit=1)[-1] == [], "the rest is looked through"
    assert ids(raw, key="oldest of many") == [oldest]


# --- the client --------------------------------------------------------------------------------


async def test_find_returns_the_newest_task(running: Daemon, topic: str) -> None:
    async with Client(running.url) as client:
        first = await client.enqueue(topic, b"1", delay=FAR, key=topic)
        started = datetime.now(UTC)
        while datetime.now(UTC) < started + timedelta(milliseconds=2):
            await client.ping()
        many = await client.enqueue_many(Task(topic, b"2", delay=FAR, key=topic) for _ in range(3))
        last = many[-1].id
        tasks = await client.find(topic)
        assert tasks is not None and (tasks.id, tasks.body, tasks.key) == (last, b"2", topic)
        tasks = await client.find(topic, topic=topic, not_after=started)
        assert tasks is not None and tasks.id == first.id
        assert await client.find(topic, topic="none") is None
        assert await client.find(topic, not_after=started - timedelta(days=1)) is None
        listed = [task.id async for task in client.list_tasks(key=topic, newest_first=True)]
        assert listed == [item.id for item in (first, *many)][::-1]
        await client.cancel_many(item.id for item in many)
        tasks = await client.find(topic)
        assert tasks is not None and tasks.id == first.id
        await client.cancel(first.id)
        assert await client.find(topic) is None


def events_of(history: str, *task_ids: str) -> list[Event]:
    return [event for event in read_all(Path(history)) if event.get("task_id") in task_ids]


# --- the command line --------------------------------------------------------------------------


def test_show_flow_by_key_uses_the_history(
    store: str | None, make_daemon: Callable[..., Daemon], tmp_path: Path, topic: str
) -> None:
    history = str(tmp_path / "history")
    cli = Cli(make_daemon(store=store, history_dir=history).start())
    key = f"key of {topic}"
    old, new = (
        cli.one("enqueue", topic, "x", "--key", key, "--delay", "1h")["id"] for _ in range(2)
    )
    cli.run("cancel", old, new)
    # The process that writes it is a moment behind.
    until(lambda: len(events_of(history, old, new)) == 4)
    assert len(cli.json("history", "--dir", history, "--key", key)) == 4
    assert "no task with key" in cli.fails(4, "show", "--key", key)
    shown = cli.one("show", "--key", key, "--history", history)
    assert (shown["id"], shown["state"]) == (new, "cancelled")
    assert [event["event"] for event in shown["flow"]] == ["enqueued", "cancelled"]
    narrower = ["--history", history, "--before", "1h"]
    assert "or in the history" in cli.fails(4, "show", "--key", key, *narrower)
    assert cli.json("show", "--key", key, "--topic", "none", "--history", history, expect=4) == []
    live = cli.one("enqueue", topic, "x", "--key", key, "--delay", "1h")["id"]
    until(lambda: events_of(history, live))
    shown = cli.one("show", "--key", key, "--flow", "--history", history)
    assert (shown["id"], shown["state"]) == (live, "scheduled")
