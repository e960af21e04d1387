"""``tickwheel enqueue``: one task from an argument or stdin, or many from JSON lines."""

from __future__ import annotations

import io
import itertools
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from tickwheel.cli.bulk import PRIORITY_MAX, Defaults, read_tasks
from tickwheel.cli.call import Call
from tickwheel.cli.options import AtOption, DelayOption, RetryOption, typed
from tickwheel.cli.values import (
    format_duration,
    format_time,
    iso_time,
    parse_duration,
    parse_property,
    retry_of,
)
from tickwheel.client import Client, Receipt
from tickwheel.errors import BadRequest, TickwheelError

CHUNK_TASKS = 2_000
"""Tasks enqueued together in bulk; what is confirmed is confirmed chunk by chunk."""

TopicOrNone = Annotated[
    str | None,
    typer.Argument(metavar="TOPIC", help="Where it belongs. With --from: for lines without one."),
]
BodyOrNone = Annotated[
    str | None, typer.Argument(metavar="BODY", help="What is delivered; - reads it from stdin.")
]
TtlOption = Annotated[
    float | None,
    typer.Option(
        parser=typed(parse_duration),
        metavar="DURATION",
        help="How long after its due time it is still worth delivering.",
    ),
]


async def enqueue(
    call: Call,
    topic: TopicOrNone = None,
    body: BodyOrNone = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE.jsonl", help="One task a line; - is stdin."),
    ] = None,
    delay: DelayOption = None,
    at: AtOption = None,
    key: Annotated[
        str | None, typer.Option(help="A name of yours for it, delivered with it.")
    ] = None,
    tag: Annotated[str | None, typer.Option(help="A word to select by.")] = None,
    prop: Annotated[
        list[str] | None,
        typer.Option("--prop", metavar="NAME=VALUE", help="A property; may be repeated."),
    ] = None,
    priority: Annotated[
        int, typer.Option(min=0, max=PRIORITY_MAX, help="Among what is due; higher goes first.")
    ] = 0,
    ttl: TtlOption = None,
    retry: RetryOption = None,
) -> None:
    """Hand in a task to be delivered later. Confirmed means durable.

    Bulk input (--from) has one JSON object a line with "topic", "body" or "body_base64",
    "delay" or "at", "key", "tag", "properties", "priority", "ttl", "retry"; the options here hold
    for lines that do not say it. A file is checked as a whole before the first task is sent.
    """
    if delay is not None and at is not None:
        raise BadRequest("give --delay or --at, not both")
    properties = _properties(prop or [])
    defaults = Defaults(topic, delay, at, tag, properties, priority, ttl, retry)
    if source is not None:
        if body is not None or key is not None:
            raise BadRequest("with --from, body and key stand in the file's lines")
        await _bulk(call, source, defaults)
        return
    if topic is None or body is None:
        raise BadRequest("give TOPIC and BODY (or - for stdin), or --from FILE.jsonl")
    content = sys.stdin.buffer.read() if body == "-" else os.fsencode(body)
    async with call.client() as client:
        receipt = await client.enqueue(
            topic,
            content,
            delay=delay,
            at=at,
            key=key,
            tag=tag,
            properties=properties or None,
            priority=priority,
            ttl=ttl,
            retry=retry_of(retry),
        )
    _tell(call, topic, receipt)


def _properties(given: list[str]) -> dict[str, str]:
    try:
        return dict(parse_property(text) for text in given)
    except ValueError as error:
        raise BadRequest(f"--prop: {error}") from None


def _tell(call: Call, topic: str, receipt: Receipt) -> None:
    if call.out.as_json:
        call.out.record(_fields(topic, receipt))
        return
    left_s = receipt.due_ms / 1000 - time.time()
    when = f"in {format_duration(left_s)}" if left_s > 0 else "now"
    call.out.line(f"{receipt.id}  due {format_time(receipt.due_ms)} ({when})")


def _fields(topic: str, receipt: Receipt) -> dict[str, object]:
    return {
        "id": str(receipt.id),
        "topic": topic,
        "due_ms": receipt.due_ms,
        "due": iso_time(receipt.due_ms),
    }


# --- bulk ------------------------------------------------------------------------------------


async def _bulk(call: Call, source: Path, defaults: Defaults) -> None:
    with _opened(source) as lines:
        total_bytes = _check_first(lines, defaults)
        async with call.client() as client:
            with _progress(total_bytes) as advance:
                await _send(call, client, lines, defaults, advance)


@contextmanager
def _opened(source: Path) -> Iterator[BinaryIO]:
    if str(source) == "-":
        yield sys.stdin.buffer
        return
    try:
        file = source.open("rb")
    except OSError as error:
        raise BadRequest(f"--from {source}: {error.strerror}") from None
    with file:
        yield file


def _check_first(lines: BinaryIO, defaults: Defaults) -> int | None:
    """Read a regular file once without sending, so that a bad line costs nothing; its size."""
    try:
        status = os.fstat(lines.fileno())
    except (OSError, io.UnsupportedOperation):
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    began = lines.tell()
    for _ in read_tasks(lines, defaults):
        pass
    lines.seek(began)
    return status.st_size


async def _send(
    call: Call,
    client: Client,
    lines: BinaryIO,
    defaults: Defaults,
    advance: Callable[[int, int], None],
) -> None:
    """Chunk by chunk. What was confirmed before a mistake or a failure stays; it is counted."""
    sent = 0
    began = time.monotonic()
    tasks = read_tasks(lines, defaults)
    try:
        while chunk := list(itertools.islice(tasks, CHUNK_TASKS)):
            receipts = await client.enqueue_many([task for task, _ in chunk])
            sent += len(receipts)
            advance(len(chunk), sum(size for _, size in chunk))
            if call.out.as_json:
                for (task, _), receipt in zip(chunk, receipts, strict=True):
                    call.out.record(_fields(task.topic, receipt))
    except TickwheelError:
        call.out.remark(f"{sent} tasks were enqueued before this")
        raise
    took_s = time.monotonic() - began
    if not call.out.as_json:
        call.out.line(f"{sent} tasks enqueued in {format_duration(took_s)}")


@contextmanager
def _progress(total_bytes: int | None) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, when that is a terminal: by bytes, since lines cannot be known before."""
    if not sys.stderr.isatty():
        yield lambda tasks, size: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (
        TextColumn("{task.fields[count]:,} tasks"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]:,.0f}/s"),
    )
    began = time.monotonic()
    count = 0
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("", total=total_bytes, count=0, rate=0.0)

        def advance(tasks: int, size: int) -> None:
            nonlocal count
            count += tasks
            rate = count / max(time.monotonic() - began, 0.001)
            progress.update(bar, advance=size, count=count, rate=rate)

        yield advance
