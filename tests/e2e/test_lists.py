"""Every command that lists something: all of it as JSON, and a table says when it stops.

A daemon holds more of each thing than a table shows.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import typer.main

from e2e.cli_runner import Cli
from support.daemon import Daemon
from support.history_rig import read_all
from support.raw import Raw
from support.waiting import until
from tickwheel import Client, Retry, Task, Worker
from tickwheel.api.frames import FrameType
from tickwheel.cli.app import app
from tickwheel.cli.output import ROWS_SHOWN
from tickwheel.history.segments import Event
from tickwheel.server.access import tokens

MANY = ROWS_SHOWN + 20

LISTS = {
    "list": ["--topic", "tasks"],
    "peek": ["tasks"],
    "dead list": [],
    "transactions list": [],
    "consumers": ["--topic", "taken"],
    "bulk list": [],
    "groups held": ["held", "g"],
    "groups lines": ["lines", "g"],
    "groups paused": ["stopped", "g"],
    "schedule list": [],
    "topics list": [],
    "groups list": ["crowded"],
    "token list": ["--file", "TOKENS"],
    "history tasks": ["--dir", "HISTORY", "--topic", "tasks"],
    "history list": ["--dir", "HISTORY", "--topic", "tasks", "--event", "enqueued"],
}
"""With what each finds MANY."""
ENQUEUED = ("enqueued", "tasks")
Make = Callable[..., Daemon]


def commands() -> dict[str, Any]:
    """Every command by its words."""

    def below(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        if hasattr(command, "commands"):
            for name, one in command.commands.items():
                yield from below(one, (*words, name))
        else:
            yield " ".join(words), command

    return dict(below(typer.main.get_command(app), ()))


def test_every_list_command_is_tested() -> None:
    lists = {
        words
        for words, command in commands().items()
        if words.split()[-1] == "list" or any(p.name == "limit" for p in command.params)
    }
    # What `rate` calls so is a rate; lists of targets, shards and nodes have no pages, and the log
    # is the newest.
    others = {"rate", "push list", "forward list", "push log", "shards list", "nodes list"}
    assert lists - others == LISTS.keys()


async def fill(url: str) -> None:
    async with Client(url) as client:
        await fill_tasks(client)
        await client.create_group("stopped", "g")
        for i in range(MANY):
            await client.put_schedule(f"s{i}", topic="planned", every=3600, body=b"")
            await client.create_group("crowded", f"g{i}")
            await client.pause_key("stopped", "g", key=f"k{i}")
            await client.create_group(f"topic{i}", "g")
            await client.cancel(topic="tasks", filter={"key_prefix": "nothing has this"})
            transaction = client.transaction("producers")
            await transaction.enqueue("half", b"half", delay=3600)


async def fill_tasks(client: Client) -> None:
    await client.enqueue_many([Task("tasks", b"x", delay=3600) for _ in range(MANY)])
    await client.create_group("held", "g", order_failure="hold", order_retry=0.01, order_attempts=1)
    await client.create_group("lines", "g")
    for topic in ("held", "lines", "lines"):
        await client.enqueue_many([Task(topic, b"x", order_key=f"k{i}") for i in range(MANY)])
    await client.enqueue_many([Task("dead", b"x") for _ in range(MANY)])
    await reject(client, "dead", "default")
    await reject(client, "held", "g")


async def reject(client: Client, topic: str, group: str) -> None:
    left = MANY
    async with client.subscribe(topic, group=group) as subscription:
        async for delivery in subscription:
            await delivery.reject("a reason")
            left -= 1
            if not left:
                return


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cli, Path]]:
    folder = tmp_path_factory.mktemp("lists")
    for i in range(MANY):
        grants = tokens.parse_scopes(["read"])
        tokens.create(folder / "tokens.json", f"token{i}", grants, 1, None)
    with Daemon(folder, history_dir=str(folder / "history")) as daemon:
        asyncio.run(fill(daemon.url))
        # The process that writes it is behind.
        until(lambda: len(enqueued(folder / "history")) >= MANY)
        with Raw(daemon.port) as one, Raw(daemon.port) as other:
            for i in range(MANY // 2):
                for raw in (one, other):
                    raw.call(FrameType.SUBSCRIBE, i, "taken", f"g{i}", 0, None)
            yield Cli(daemon), folder


def enqueued(history: Path) -> list[Event]:
    events = read_all(history)
    return [event for event in events if (event["event"], event.get("topic")) == ENQUEUED]


def given(words: str, folder: Path) -> list[str]:
    places = {"TOKENS": str(folder / "tokens.json"), "HISTORY": str(folder / "history")}
    return [*words.split(), *(places.get(item, item) for item in LISTS[words])]


@pytest.mark.parametrize("words", LISTS)
def test_json_lists_all_rows_and_tables_name_their_limit(
    full: tuple[Cli, Path], words: str
) -> None:
    cli, folder = full
    arguments = given(words, folder)
    has_limit = any(p.name == "limit" for p in commands()[words].params)
    done = cli.run(*arguments, "--json")
    count = len([json.loads(line) for line in done.stdout.splitlines()])
    assert count >= MANY and done.stderr == b""
    table = cli.run(*arguments)
    rows = len(table.stdout.splitlines()) - 1
    if not has_limit:
        assert rows >= MANY and table.stderr == b""
        return
    assert count == MANY
    assert rows == ROWS_SHOWN
    assert b"only the first 100 rows" in table.stderr and table.stderr.count(b"\n") == 1
    for limit, stops in ((7, True), (MANY, False)):
        some = cli.run(*arguments, "--limit", str(limit))
        assert len(some.stdout.splitlines()) - 1 == limit
        assert (b"only the first" in some.stderr) == stops
        assert len(cli.json(*arguments, "--limit", str(limit))) == limit


async def test_dead_show_prints_consumer_and_full_reason(make_daemon: Make) -> None:
    """As the daemon keeps it: nothing that is shown of one dead letter is cut."""
    daemon = make_daemon().start()
    reason = "the reason: " + "word " * 30 + "end"
    async with Client(daemon.url, name="billing-7") as client:
        task = await client.enqueue("t", b"x")
        (delivery,) = await client.pull("t", wait=10)
        await delivery.reject(reason)
        shown = Cli(daemon).run("dead", "show", str(task.id)).stdout.decode()
    assert reason in shown
    assert "billing-7" in shown


def ask(url: str) -> bytes:
    with urlopen(url) as answer:  # noqa: S310  # a daemon of ours
        return bytes(answer.read())


def fails(delivery: object) -> None:
    raise KeyError("the_customer")


@pytest.mark.parametrize("kept", [True, False])
async def test_dead_letters_and_history_have_the_failure_trace(
    make_daemon: Make, tmp_path: Path, kept: bool
) -> None:
    history = tmp_path / "history"
    more = {} if kept else {"failure_trace_length_max": 0}
    daemon = make_daemon(http=True, history_dir=str(history), **more).start()
    async with Client(daemon.url) as client:
        worker = Worker(client, signals=False)
        worker.on("t", retry=Retry.none())(fails)
        running = asyncio.ensure_future(worker.run())
        task = await client.enqueue("t", b"x")
        while not [item async for item in client.dead_list()]:
            await client.ping()
        worker.stop()
        await running
        (letter,) = [item async for item in client.dead_list()]
    cli, where = Cli(daemon), ", in fails\n"
    assert letter.reason == letter.failures[-1][2] == "KeyError: 'the_customer'"
    assert (where in letter.failures[-1][4]) == kept
    (failure,) = cli.one("dead", "show", str(task.id))["groups"]["default"]["failures"]
    assert (where in failure["trace"]) == kept
    assert (where.strip() in cli.run("dead", "show", str(task.id)).stdout.decode()) == kept
    (told,) = json.loads(await asyncio.to_thread(ask, f"{daemon.http}/v1/dead-letters"))["dead"]
    assert (told["reason"], where in told["failures"][-1]["trace"]) == (letter.reason, kept)
    tasks: list[Any] = []
    while not tasks or tasks[0]["state"] != "dead":  # it is on its way to the files
        answer = await asyncio.to_thread(ask, f"{daemon.http}/v1/history/tasks?topic=t")
        tasks = json.loads(answer)["tasks"]
    assert (tasks[0]["id"], tasks[0]["reason"]) == (str(task.id), letter.reason)
    daemon.terminate()
    (died,) = cli.json("history", "--dir", str(history), "--event", "dead")
    assert (died["reason"], where in died.get("trace", "")) == (letter.reason, kept)
