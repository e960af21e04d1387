"""``tickwheel enqueue``: one task from an argument or stdin, or many from JSON lines.

``--from`` reads one object a line: ``topic``, ``body`` (text) or ``body_base64``, ``delay``
(seconds, or text such as ``"5m"``), ``at`` (ISO-8601) or ``delay_level``, ``within``, ``key``,
``tag``, ``properties``, ``priority``, ``ttl``, ``retry`` (a SPEC such as
``"fixed:delay=30s,retries=5"``, or a map as the wire has it), ``if_pending`` (an action, or an
object with one and what else is said of it). What a line leaves out is taken from the command's
own options.
``read_tasks`` is pure: lines in, tasks or a named mistake out.

``tickwheel transactions``: those that nobody has decided: list, show, commit, rollback."""

from __future__ import annotations

import base64
import binascii
import io
import itertools
import json
import os
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

import typer

from tickwheel.cli.call import Call
from tickwheel.cli.options import (
    AtOption,
    DelayOption,
    DueOption,
    IfPendingOption,
    MaxWaitOption,
    ReplacesOption,
    RetryOption,
    UniqueOption,
    WindowOption,
    format_count,
    format_duration,
    format_time,
    iso_time,
    parse_at,
    parse_property,
    retry_of,
    rule_of,
    rule_of_json,
    typed,
)
from tickwheel.cli.output import Grid, LimitOption, facts_grid, shown
from tickwheel.client import Client, IfPending, Receipt, Task, TransactionInfo
from tickwheel.errors import BadRequest, TickwheelError
from tickwheel.model.records import PropertyValue
from tickwheel.model.written import (
    DURATION_MS_MAX,
    Policy,
    duration_ms,
    parse_duration,
    policy_of_json,
)

_MERGED = ("kept", "replaced", "rejected")
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


WithinOption = Annotated[
    float | None,
    typer.Option(
        parser=typed(parse_duration),
        metavar="DURATION",
        help="Any moment from then to so much later will do: the emptiest is chosen.",
    ),
]


OrderKeyOption = Annotated[
    str | None,
    typer.Option(
        metavar="KEY", help="Each group gets the tasks of one key one at a time, in their order."
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
    delay_level: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=LEVEL_MAX,
            metavar="N",
            help="Instead: a level of the daemon's table of delays; its default is RocketMQ's.",
        ),
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="A name of yours for it, delivered with it.")
    ] = None,
    tag: Annotated[str | None, typer.Option(help="A word to select by.")] = None,
    prop: Annotated[
        list[str] | None,
        typer.Option(
            "--prop",
            metavar="NAME=VALUE",
            help="A property; may be repeated. NAME:=12 is a number.",
        ),
    ] = None,
    priority: Annotated[
        int, typer.Option(min=0, max=PRIORITY_MAX, help="Among what is due; higher goes first.")
    ] = 0,
    ttl: TtlOption = None,
    retry: RetryOption = None,
    within: WithinOption = None,
    if_pending: IfPendingOption = None,
    window: WindowOption = None,
    unique_until: UniqueOption = None,
    replaces: ReplacesOption = None,
    due: DueOption = None,
    max_wait: MaxWaitOption = None,
    order_key: OrderKeyOption = None,
) -> None:
    """Hand in a task to be delivered later. Confirmed means durable.

    Bulk input (--from) has one JSON object a line with "topic", "body" or "body_base64",
    "delay", "at" or "delay_level", "within", "key", "tag", "properties", "priority", "ttl",
    "retry", "order_key", "if_pending"; the options here hold for lines that do not say it. A file
    is checked as a whole before the first task is sent.
    """
    _check_due(delay, at, delay_level)
    properties = _parse_properties(prop or [])
    rule = rule_of(if_pending, window, unique_until, replaces, due, max_wait)
    defaults = Defaults(
        topic, delay, at, tag, properties, priority, ttl, retry, delay_level, within, rule,
        order_key,
    )  # fmt: skip
    if source is not None:
        if body is not None or key is not None:
            raise BadRequest("with --from, body and key stand in the file's lines")
        await _bulk(call, source, defaults)
        return
    if topic is None or body is None:
        raise BadRequest("give TOPIC and BODY (or - for stdin), or --from FILE.jsonl")
    content = sys.stdin.buffer.read() if body == "-" else os.fsencode(body)
    await _one(call, topic, content, key, defaults)


def _check_due(delay: float | None, at: datetime | None, delay_level: int | None) -> None:
    if delay is not None and at is not None:
        raise BadRequest("give --delay or --at, not both")
    if delay_level is not None and (delay is not None or at is not None):
        raise BadRequest("give --delay-level, --delay or --at, one of them")


async def _one(call: Call, topic: str, content: bytes, key: str | None, options: Defaults) -> None:
    async with call.client() as client:
        receipt = await client.enqueue(
            topic,
            content,
            delay=options.delay,
            at=options.at,
            key=key,
            tag=options.tag,
            properties=options.properties or None,
            priority=options.priority,
            ttl=options.ttl,
            retry=retry_of(options.retry),
            delay_level=options.delay_level,
            if_pending=options.if_pending,
            within=options.within,
            order_key=options.order_key,
        )
    _show_receipt(call, topic, receipt)


def _parse_properties(given: list[str]) -> dict[str, PropertyValue]:
    try:
        return dict(parse_property(text) for text in given)
    except ValueError as error:
        raise BadRequest(f"--prop: {error}") from None


def _show_receipt(call: Call, topic: str, receipt: Receipt) -> None:
    if call.out.as_json:
        call.out.record(_receipt_fields(topic, receipt))
        return
    left_s = receipt.due_ms / 1000 - time.time()
    when = f"in {format_duration(left_s)}" if left_s > 0 else "now"
    outcome = "" if receipt.outcome == "stored" else f"  {receipt.outcome}"
    call.out.line(f"{receipt.id}{outcome}  due {format_time(receipt.due_ms)} ({when})")


def _receipt_fields(topic: str, receipt: Receipt) -> dict[str, object]:
    return {
        "id": str(receipt.id),
        "topic": topic,
        "due_ms": receipt.due_ms,
        "due": iso_time(receipt.due_ms),
        "outcome": receipt.outcome,
    }


# --- bulk ----------------------------------------------------------------------------------------


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
    """Check all lines of a regular file, so that a bad one costs nothing; returns its bytes."""
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
    """Send tasks in chunks. What was confirmed before an error stays, and is counted."""
    sent = 0
    began = time.monotonic()
    tasks = read_tasks(lines, defaults)
    outcomes: Counter[str] = Counter()
    try:
        while chunk := list(itertools.islice(tasks, CHUNK_TASKS)):
            receipts = await client.enqueue_many([task for task, _ in chunk])
            sent += len(receipts)
            outcomes.update(receipt.outcome for receipt in receipts)
            advance(len(chunk), sum(size for _, size in chunk))
            if call.out.as_json:
                for (task, _), receipt in zip(chunk, receipts, strict=True):
                    call.out.record(_receipt_fields(task.topic, receipt))
    except TickwheelError:
        call.out.remark(f"{sent} tasks were enqueued before this")
        raise
    took_s = time.monotonic() - began
    if not call.out.as_json:
        others = ", ".join(f"{outcomes[word]} {word}" for word in _MERGED if outcomes[word])
        merged = f" ({others})" if others else ""
        call.out.line(f"{sent} tasks enqueued{merged} in {format_duration(took_s)}")


@contextmanager
def _progress(total_bytes: int | None) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, if that is a terminal: by bytes, as lines are not known before."""
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


# --- lines to tasks ------------------------------------------------------------------------------

FIELDS = frozenset(
    (
        "topic", "body", "body_base64", "delay", "delay_ms", "due_ms", "at", "delay_level", "key",
        "tag", "properties", "priority", "ttl", "ttl_ms", "retry", "within", "within_ms",
        "if_pending", "order_key",
    )
)  # fmt: skip
PRIORITY_MAX = 255
EPOCH = datetime.fromtimestamp(0, UTC)
LEVEL_MAX = 2**31 - 1

T = TypeVar("T")


@dataclass(frozen=True)
class Defaults:
    """The options for lines that do not say them."""

    topic: str | None = None
    delay: float | None = None
    at: datetime | None = None
    tag: str | None = None
    properties: dict[str, PropertyValue] = field(default_factory=dict)
    priority: int = 0
    ttl: float | None = None
    retry: Policy | None = None
    delay_level: int | None = None
    within: float | None = None
    if_pending: IfPending | None = None
    order_key: str | None = None


class BadLine(BadRequest):
    """A line of the input cannot be read as a task; the message names line and field."""

    def __init__(self, number: int, problem: str) -> None:
        super().__init__(f"line {number}: {problem}")
        self.number = number


def read_tasks(lines: Iterable[bytes], defaults: Defaults) -> Iterator[tuple[Task, int]]:
    """Each task with the bytes of its line; empty lines are passed over. Raises BadLine."""
    skipped_bytes = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            skipped_bytes += len(line)
            continue
        try:
            yield read_task(line, defaults), len(line) + skipped_bytes
        except ValueError as error:
            raise BadLine(number, str(error)) from None
        skipped_bytes = 0


def read_task(line: bytes, defaults: Defaults) -> Task:
    """The task in one line. Raises ValueError naming the field."""
    given = _object(line)
    unknown = sorted(given.keys() - FIELDS)
    if unknown:
        raise ValueError(f"field {unknown[0]}: not known; known are {', '.join(sorted(FIELDS))}")
    delay, at, delay_level = _due(given, defaults)
    topic = _text(given, "topic") or defaults.topic
    if topic is None:
        raise ValueError("field topic: missing (in the line and on the command line)")
    properties = {**defaults.properties, **_properties(given)}
    ttl, within = _span(given, "ttl"), _span(given, "within")
    return Task(
        topic,
        _body(given),
        delay=delay,
        at=at,
        key=_text(given, "key"),
        tag=_text(given, "tag") or defaults.tag,
        properties=properties or None,
        priority=_priority(given, defaults.priority),
        ttl=defaults.ttl if ttl is None else ttl,
        retry=retry_of(_retry(given, defaults.retry)),
        delay_level=delay_level,
        within=defaults.within if within is None else within,
        if_pending=_rule(given, defaults.if_pending),
        order_key=_text(given, "order_key") or defaults.order_key,
    )


def _object(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("not JSON: nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"a JSON object is needed, not {type(found).__name__}")
    return found


def _due(
    given: dict[str, Any], defaults: Defaults
) -> tuple[float | None, datetime | None, int | None]:
    """The delay, the time or the delay level of a line."""
    delay, at, level = _span(given, "delay"), _at(given), given.get("delay_level")
    if delay is not None and at is not None:
        raise ValueError("field at: give delay or at, not both")
    if level is not None:
        if delay is not None or at is not None:
            raise ValueError("field delay_level: give it, delay or at, one of them")
        if type(level) is not int or not 1 <= level <= LEVEL_MAX:
            raise ValueError(f"field delay_level: 1 to {LEVEL_MAX} is allowed, not {level!r:.40}")
        return None, None, level
    if at is not None or delay is not None:
        return delay, at, None
    return defaults.delay, defaults.at, defaults.delay_level


def _body(given: dict[str, Any]) -> bytes:
    encoded = given.get("body_base64")
    if given.get("body") is not None and encoded is not None:
        raise ValueError("field body: give body or body_base64, one of them")
    if encoded is None:
        text = given.get("body") or ""
        if not isinstance(text, str):
            raise ValueError(f"field body: text is needed, not {text!r:.40}")
        return _utf8("body", text)
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise ValueError("field body_base64: not base64") from None


def _text(given: dict[str, Any], name: str) -> str | None:
    value = given.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise ValueError(f"field {name}: text that is not empty is needed, not {value!r:.40}")
    _utf8(name, value)
    return value


def _utf8(name: str, text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"field {name}: holds half a surrogate pair") from None


SCALARS = (str, int, float)


def _properties(given: dict[str, Any]) -> dict[str, PropertyValue]:
    value = given.get("properties")
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(v, SCALARS) for v in value.values()):
        what = "an object of texts, numbers and truth values"
        raise ValueError(f"field properties: {what} is needed, not {value!r:.40}")
    return value


def _priority(given: dict[str, Any], default: int) -> int:
    value = given.get("priority")
    if value is None:
        return default
    if type(value) is not int or not 0 <= value <= PRIORITY_MAX:
        raise ValueError(f"field priority: 0 to {PRIORITY_MAX} is allowed, not {value!r:.40}")
    return value


def _retry(given: dict[str, Any], default: Policy | None) -> Policy | None:
    value = given.get("retry")
    if value is None:
        return default
    try:
        return policy_of_json(value)
    except ValueError as error:
        raise ValueError(f"field retry: {error}") from None


def _rule(given: dict[str, Any], default: IfPending | None) -> IfPending | None:
    value = given.get("if_pending")
    if value is None:
        return default
    try:
        return rule_of_json(value)
    except ValueError as error:
        raise ValueError(f"field if_pending: {error}") from None


def _span(given: dict[str, Any], name: str) -> float | None:
    """Seconds in the field ``name`` as people write it, or in ``name``_ms."""
    written, ms = given.get(name), given.get(f"{name}_ms")
    if written is None:
        return None if ms is None else _integer(f"{name}_ms", ms) / 1000
    if ms is not None:
        raise ValueError(f"field {name}_ms: give {name} or {name}_ms, not both")
    return _parse(name, duration_ms, written) / 1000


def _at(given: dict[str, Any]) -> datetime | None:
    """The due time in the field ``at``, or in ``due_ms``."""
    at, due_ms = given.get("at"), given.get("due_ms")
    if at is not None and due_ms is not None:
        raise ValueError("field due_ms: give at or due_ms, not both")
    if due_ms is not None:
        try:
            return EPOCH + timedelta(milliseconds=_integer("due_ms", due_ms))
        except OverflowError:
            raise ValueError(f"field due_ms: {due_ms} is no time that can be counted") from None
    if at is not None and not isinstance(at, str):
        raise ValueError(f"field at: {at!r:.40} is of the wrong type")
    return None if at is None else _parse("at", parse_at, at)


def _integer(name: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value <= DURATION_MS_MAX:
        raise ValueError(f"field {name}: milliseconds are needed, not {value!r:.40}")
    return value


def _parse(name: str, parse: Callable[[Any], T], value: Any) -> T:
    try:
        return parse(value)
    except ValueError as error:
        raise ValueError(f"field {name}: {error}") from None


# --- transactions --------------------------------------------------------------------------------

TransactionArgument = Annotated[str, typer.Argument(metavar="ID", help="The transaction's name.")]
_TRANSACTION_MOMENTS = ("began_ms", "touched_ms", "checked_ms", "decided_ms")


class TransactionStates(StrEnum):
    """The states of transactions that may be asked for."""

    OPEN = "open"
    PARKED = "parked"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled_back"


async def list_transactions(
    call: Call,
    group: Annotated[str | None, typer.Option(help="Of this producer group.")] = None,
    state: Annotated[
        TransactionStates | None,
        typer.Option(help="Default: open and parked, those that are not decided."),
    ] = None,
    limit: LimitOption = None,
) -> None:
    """Transactions that nobody has decided. A parked one waits for you: its producers were asked
    often enough."""
    grid = transactions_grid()
    async with call.client() as client:
        ask = partial(
            client.list_transactions, group=group, state=None if state is None else state.value
        )
        async for one in shown(call.out, limit, lambda most: ask(limit=most)):
            if call.out.as_json:
                call.out.record(transaction_fields(one))
                continue
            asked = f"{one.asked} of {one.checks}"
            grid.rows.append(
                (one.id, one.group, one.state, str(one.tasks), format_time(one.raw["began_ms"]),
                 asked, ", ".join(one.topics))
            )  # fmt: skip
    if call.out.as_json:
        return
    if grid.rows:
        call.out.grid(grid)
    else:
        call.out.remark("there is no such transaction")


def transactions_grid() -> Grid:
    return Grid(
        ("transaction", "group", "state", "tasks", "began", "asked", "topics"),
        right=frozenset(("tasks", "asked")),
        times=frozenset(("began",)),
        spare=("topics", "asked"),
    )


async def show_transaction(call: Call, transaction: TransactionArgument) -> None:
    """A transaction and its half tasks."""
    async with call.client() as client:
        found = await client.show_transaction(transaction)
    if call.out.as_json:
        call.out.record(transaction_fields(found) | {"halves": list(found.halves)})
        return
    facts: dict[str, str | int] = {
        "group": found.group,
        "state": found.state,
        "tasks": found.tasks,
        "bytes": found.bytes,
        "topics": ", ".join(found.topics),
        "asked": f"{found.asked} of {found.checks} times",
    }
    for name in _TRANSACTION_MOMENTS:
        if found.raw.get(name) is not None:
            facts[name.removesuffix("_ms")] = format_time(found.raw[name])
    call.out.grid(facts_grid(("transaction", found.id), facts))
    if found.halves:
        call.out.grid(_halves(found))


def _halves(found: TransactionInfo) -> Grid:
    grid = Grid(("topic", "due", "key", "tag", "bytes"), right=frozenset(("bytes",)))
    for half in found.halves:
        due_ms, delay_ms = half["due_ms"], half["delay_ms"]
        due = f"{delay_ms} ms after the commit" if due_ms is None else format_time(due_ms)
        key, tag = str(half["key"] or ""), str(half["tag"] or "")
        grid.rows.append((str(half["topic"]), due, key, tag, format_count(half["bytes"])))
    return grid


async def commit_transaction(call: Call, transaction: TransactionArgument) -> None:
    """Decide it: its half tasks are tasks. Once more says the same."""
    async with call.client() as client:
        ids = await client.commit_transaction(transaction)
    if call.out.as_json:
        outcome = {"id": transaction, "outcome": "committed", "ids": [str(i) for i in ids]}
        call.out.record(outcome)
    else:
        call.out.line(f"{transaction}  committed  {len(ids)} tasks")


async def rollback_transaction(call: Call, transaction: TransactionArgument) -> None:
    """Decide it: none of its tasks ever was. Once more says the same."""
    async with call.client() as client:
        await client.rollback_transaction(transaction)
    if call.out.as_json:
        call.out.record({"id": transaction, "outcome": "rolled_back", "ids": []})
    else:
        call.out.line(f"{transaction}  rolled back")


def transaction_fields(found: TransactionInfo) -> dict[str, Any]:
    """A transaction in the form of ``--json``."""
    fields = {name: value for name, value in found.raw.items() if name != "halves"}
    for name in _TRANSACTION_MOMENTS:
        if fields.get(name) is not None:
            fields[name.removesuffix("_ms")] = iso_time(fields[name])
    first_id = fields.get("first_id")
    return fields | {"first_id": None if first_id is None else str(first_id)}
