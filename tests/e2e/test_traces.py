"""The trace of a task in real daemons: over kills on each store, attempt by attempt, in the history
and in a restore, from Python and from the command line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.cli_runner import Cli
from e2e.stores import killed_on
from support.daemon import Daemon
from support.history_daemon import daemon_in, taken_up
from support.restore_rig import held, url
from support.traces import HIGHEST, LOWEST, MUST_BE, OTHER, TRACE, WRONG
from tickwheel import BadRequest, Client, Delivery, Task
from tickwheel.cli.app import run

HOUR_S = 3_600
BODIES = {b"one": TRACE, b"half": HIGHEST, b"run": LOWEST, b"keyed": OTHER, b"none": None}

killed = killed_on("redis", "sqlite", "postgresql")


async def test_a_trace_is_delivered_with_each_attempt_over_kills(killed: Daemon) -> None:
    await killed.astart()
    async with Client(killed.url, send_timeout=10) as client:
        await client.create_group("t", "g")
        one = await client.enqueue("t", b"one", trace=TRACE)
        far = await client.enqueue("far", b"far", delay=HOUR_S, trace=TRACE, order_key="o")
        await client.enqueue_many([Task("t", b"keyed", key="k", trace=OTHER), Task("t", b"none")])
        async with client.transaction("payments") as transaction:
            await transaction.enqueue("t", b"half", trace=HIGHEST)
        put = await client.put_schedule("s", topic="t", body=b"run", every=HOUR_S, trace=LOWEST)
        assert put.raw["task"] == {"trace": LOWEST}
        await client.run_schedule("s")
        await killed.arestart()
        for delivery in await had(client, 1):
            assert await delivery.nack(delay=0, reason="no") == "retrying"
        await killed.arestart()
        for delivery in await had(client, 2):
            assert await delivery.reject("never") == "dead"
        await killed.arestart()
        bulk = await client.dead_requeue(topic="t", filter={})
        await client.wait_bulk(bulk.id)
        for delivery in await had(client, 3):
            assert await delivery.ack() == "acked"
        listed = {task.id: task.trace async for task in client.list_tasks()}
        assert listed == {far.id: TRACE} and one.id not in listed
        assert (await client.lookup(far.id)).trace == TRACE
        shown = await client.show_schedule("s")
        assert shown.raw["task"] == {"trace": LOWEST}


async def had(client: Client, attempt: int) -> list[Delivery]:
    """The delivery of each task, of this attempt and with its trace."""
    result: dict[bytes, Delivery] = {}
    while result.keys() != BODIES.keys():
        for delivery in await client.pull("t", group="g", max=9, wait=10, lease=60):
            assert (delivery.attempt, delivery.body in result) == (attempt, False)
            result[delivery.body] = delivery
    assert {body: delivery.trace for body, delivery in result.items()} == BODIES
    return list(result.values())


async def test_an_invalid_trace_is_refused_by_the_client(
    make_daemon: Callable[..., Daemon],
) -> None:
    daemon = make_daemon()
    await daemon.astart()
    async with Client(daemon.url) as client:
        for wrong in WRONG:
            given = {"trace": wrong}
            with pytest.raises(BadRequest, match=r"task\.trace must be a W3C traceparent"):
                await client.enqueue("t", b"", **given)  # type: ignore[arg-type]  # it is wrong
            with pytest.raises(BadRequest, match=r"tasks\[1\]\.trace must be a W3C traceparent"):
                await client.enqueue_many([Task("t", b""), Task("t", b"", **given)])  # type: ignore[arg-type]
            with pytest.raises(BadRequest, match="trace must be a W3C traceparent"):
                await client.put_schedule("s", topic="t", every=60, **given)  # type: ignore[arg-type]
        assert [task async for task in client.list_tasks()] == []


def test_traces_are_set_by_command(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon()
    daemon.start()
    cli = Cli(daemon)
    first = cli.one("enqueue", "t", "x", "--delay", "1h", "--trace", TRACE)["id"]
    lines = json.dumps({"body": "a", "trace": OTHER}) + '\n{"body": "b"}\n'
    made = cli.json("enqueue", "t", "--from", "-", "--delay", "1h", "--trace", TRACE,
                    stdin=lines.encode())  # fmt: skip
    ids = [first, *(row["id"] for row in made)]
    assert [cli.one("show", task_id)["trace"] for task_id in ids] == [TRACE, OTHER, TRACE]
    assert [entry["trace"] for entry in cli.json("list", "--topic", "t")] == [TRACE, OTHER, TRACE]
    assert TRACE in cli.run("show", first).stdout.decode()
    put = cli.one("schedule", "put", "s", "--topic", "t", "--every", "1h", "--trace", TRACE)
    assert put["task"] == {"trace": TRACE}
    for wrong in (TRACE[:-1], TRACE.upper()):
        assert MUST_BE in cli.fails(2, "enqueue", "t", "x", "--trace", wrong)
    line = json.dumps({"topic": "t", "trace": "x"}).encode()
    failed = cli.run("enqueue", "--from", "-", stdin=line, expect=2)
    assert MUST_BE in failed.stderr.decode()


def test_traces_are_in_the_history_and_restored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def living() -> tuple[int, int]:
        daemon = daemon_in(tmp_path)
        async with daemon, Client(daemon.url) as client:
            before = await client.enqueue("t", b"", delay=HOUR_S, trace=TRACE)
            await client.backup("kept.db")
            after = await client.enqueue("t", b"", delay=HOUR_S, trace=OTHER, tag="g")
            await daemon.aterminate()
            return before.id, after.id

    before, after = asyncio.run(living())
    asyncio.run(taken_up(tmp_path / "history"))
    assert run(["history", "--dir", str(tmp_path / "history"), "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    told = {
        event["task_id"]: event["traceparent"] for event in events if event["event"] == "enqueued"
    }
    assert told == {str(before): TRACE, str(after): OTHER}
    (backup,) = tmp_path.glob("**/kept.db")
    source = ["--from", str(backup), "--history", str(tmp_path / "history")]
    assert run(["restore", *source, "--into", url(tmp_path), "--json"]) == 0
    rows = asyncio.run(held(url(tmp_path))).rows
    traces = {task_id: row.options and row.options.trace for task_id, row in rows.items()}
    assert traces == {before: TRACE, after: OTHER}
