"""What producers hand in: ``tickwheel enqueue``, one task from an argument or stdin, or many from
JSON lines; and ``tickwheel transactions``, those that nobody has decided.

``--from`` reads one object a line: ``topic``, ``body`` (text) or ``body_base64``, ``delay``
(seconds, or text such as ``"5m"``) or ``at`` (ISO-8601), and what else may be said of a task, under
the names of Python, as JSON has it: ``retry`` is a SPEC such as ``"fixed:delay=30s,retries=5"``, or
a map as the wire has it, ``if_pending`` an action, or an object with one and what else is said of
it. What a line leaves out is taken from the command's own options. ``read_tasks`` is pure: lines
in, tasks or a named mistake out.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import csv
import io
import itertools
import json
import os
import re
import stat
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, TypeVar, Unpack, cast

from tickwheel.api.frames import TransactionState
from tickwheel.api.kinds import FieldKind, Policy, Properties, Rule, Span, Whole
from tickwheel.api.tasks import LEVEL_MAX, TaskFields
from tickwheel.api.transactions import HalfTask
from tickwheel.cli.call import Call, given
from tickwheel.cli.declared import declared
from tickwheel.cli.options import (
    AtOption,
    DelayOption,
    IfPendingOption,
    LimitOption,
    RuleOptions,
    TaskOptions,
    argument,
    flag,
    option,
    parse_at,
    retry_of,
    rule_of,
    rule_of_json,
    task_keywords,
)
from tickwheel.cli.output import (
    Column,
    Listing,
    column,
    count_columns,
    facts_grid,
    fields_of,
    format_duration,
    format_time,
    grid_of,
    iso_time,
    progress_bar,
    text_columns,
    time_facts,
)
from tickwheel.client import Client, Receipt, Task, TransactionInfo
from tickwheel.errors import BadRequest, LimitExceeded, TickwheelError
from tickwheel.model.policies import DURATION_MS_MAX, duration_ms, policy_of_json
from tickwheel.model.records import PropertyValue

_MERGED = ("kept", "replaced", "rejected")
CHUNK_TASKS = 2_000
"""Tasks enqueued together in bulk; what is confirmed is confirmed chunk by chunk."""
T = TypeVar("T")


class EnqueueOptions(TaskOptions, RuleOptions):
    """What may be said of a task on the command line, and of a pending key."""


async def enqueue(
    call: Call,
    topic: Annotated[
        str | None, argument("TOPIC", "Where it belongs. With --from: for lines without one.")
    ] = None,
    body: Annotated[
        str | None, argument("BODY", "What is delivered; - reads it from stdin.")
    ] = None,
    source: Annotated[
        Path | None,
        option("One task a line, JSON or CSV (by the name's end); - is stdin.", "FILE", "--from"),
    ] = None,
    is_csv: Annotated[
        bool, flag("What --from reads is CSV, whatever its name is.", "--csv")
    ] = False,
    delay: DelayOption = None,
    at: AtOption = None,
    delay_level: Annotated[
        int | None,
        option(
            "Instead: a level of the daemon's table of delays; its default is RocketMQ's.",
            "N",
            min=1,
            max=LEVEL_MAX,
        ),
    ] = None,
    if_pending: IfPendingOption = None,
    **options: Unpack[EnqueueOptions],
) -> None:
    """Hand in a task to be delivered later. Confirmed means durable.

    Bulk input (--from) has one JSON object a line with "topic", "body" or "body_base64", "delay"
    or "at", and what else the options here say, under their names ("order_key"; "properties" is an
    object); they hold for lines that do not say it. CSV has the fields' names in its first line;
    an empty cell says nothing, "properties" is JSON. A file is checked as a whole before the first
    task is sent.
    """
    due = given({"delay": delay, "at": at, "delay_level": delay_level})
    if delay is not None and at is not None:
        raise BadRequest("give --delay or --at, not both")
    if len(due) > 1:
        raise BadRequest("give --delay-level, --delay or --at, one of them")
    of_rule = {name: value for name, value in options.items() if name in _OF_A_RULE}
    of_task = {name: value for name, value in options.items() if name not in _OF_A_RULE}
    keywords = task_keywords(cast("TaskOptions", of_task))
    keywords |= {"if_pending": rule_of(if_pending, cast("RuleOptions", of_rule)), **due}
    if source is not None:
        if body is not None or "key" in options:
            raise BadRequest("with --from, body and key stand in the file's lines")
        is_csv = is_csv or source.suffix.lower() == ".csv"
        await _bulk(call, source, Defaults(topic, **keywords), read_csv if is_csv else read_tasks)
        return
    if is_csv:
        raise BadRequest("--csv goes with --from")
    if topic is None or body is None:
        raise BadRequest("give TOPIC and BODY (or - for stdin), or --from FILE.jsonl")
    async with call.client() as client:
        content = os.fsencode(body)
        if body == "-":
            content = await asyncio.to_thread(read_stdin, client.limits.body_bytes_max)
        receipt = await client.enqueue(topic, content, **keywords)
    left_s = receipt.due_ms / 1000 - time.time()
    when = f"in {format_duration(left_s)}" if left_s > 0 else "now"
    outcome = "" if receipt.outcome == "stored" else f"  {receipt.outcome}"
    line = f"{receipt.id}{outcome}  due {format_time(receipt.due_ms)} ({when})"
    call.out.result(_receipt_fields(topic, receipt), line)


def read_stdin(bytes_max: int) -> bytes:
    """All of stdin. Raises LimitExceeded, without reading on, and OSError."""
    found = sys.stdin.buffer.read(bytes_max + 1)
    if len(found) > bytes_max:
        raise LimitExceeded(
            f"the body on stdin has more than {bytes_max} bytes; the limit is {bytes_max}"
            " (body_bytes_max)"
        )
    return found


_OF_A_RULE = RuleOptions.__optional_keys__


def _receipt_fields(topic: str, receipt: Receipt) -> dict[str, object]:
    due_ms = receipt.due_ms
    due = {"due_ms": due_ms, "due": iso_time(due_ms)}
    return {"id": str(receipt.id), "topic": topic, **due, "outcome": receipt.outcome}


# --- bulk ----------------------------------------------------------------------------------------


async def _bulk(call: Call, source: Path, defaults: Defaults, read: ReadTasks) -> None:
    with _opened(source) as lines:
        total_bytes = _check_first(lines, defaults, read)
        async with call.client() as client:
            columns = ("{task.fields[count]:,} tasks", "BarColumn", "TaskProgressColumn")
            rate = "{task.fields[rate]:,.0f}/s"
            # By bytes, as lines are not known before.
            with progress_bar(*columns, rate, total=total_bytes, count=0, rate=0.0) as changed:
                await _send(call, client, lines, defaults, changed, read)


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


def _check_first(lines: BinaryIO, defaults: Defaults, read: ReadTasks) -> int | None:
    """Check all lines of a regular file, so that a bad one costs nothing; returns its bytes."""
    try:
        status = os.fstat(lines.fileno())
    except (OSError, io.UnsupportedOperation):
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    began = lines.tell()
    for _ in read(_Counted(lines), defaults):
        pass
    lines.seek(began)
    return status.st_size


async def _send(
    call: Call, client: Client, lines: BinaryIO, defaults: Defaults, changed: Callable[..., None],
    read_all: ReadTasks | None = None,
) -> None:  # fmt: skip
    """Send tasks in chunks. What was confirmed before an error stays, and is counted; of an
    interruption the chunk that is on its way as well, if it is answered soon."""
    sent = read = 0
    began = time.monotonic()
    counted = _Counted(lines)
    tasks = (read_all or read_tasks)(counted, defaults)
    sending: asyncio.Future[list[Receipt]] | None = None
    outcomes: Counter[str] = Counter()
    try:
        while chunk := list(itertools.islice(tasks, CHUNK_TASKS)):
            asked = client.enqueue_many([task for task, _ in chunk])
            sending = asyncio.ensure_future(asked)  # looked at below
            receipts = await asyncio.shield(sending)
            sending = None
            sent, read = sent + len(receipts), counted.number
            outcomes.update(receipt.outcome for receipt in receipts)
            rate = sent / max(time.monotonic() - began, 0.001)
            changed(advance=sum(size for _, size in chunk), count=sent, rate=rate)
            if call.out.as_json:
                for (task, _), receipt in zip(chunk, receipts, strict=True):
                    call.out.record(_receipt_fields(task.topic, receipt))
    except TickwheelError:
        call.out.remark(f"{sent} tasks were enqueued before this")
        raise
    except BaseException:  # interrupted, or nobody reads the answers any more
        if sending is not None:
            await asyncio.wait((sending,), timeout=LAST_CHUNK_S)
            if sending.done() and not sending.cancelled() and sending.exception() is None:
                sent, read = sent + len(sending.result()), counted.number
        call.out.remark(_interrupted(sent, read, counted.number - read, read_all is read_csv))
        raise
    took_s = time.monotonic() - began
    if not call.out.as_json:
        said = f"{sent} tasks enqueued"
        if merged := [f"{outcomes[word]:,} {word}" for word in _MERGED if outcomes[word]]:
            said = ", ".join((f"{outcomes['stored']:,} new", *merged))
        call.out.line(f"{said} in {format_duration(took_s)}")


LAST_CHUNK_S = 5.0
"""How long, in seconds, an interrupted command waits for the answer to what it has sent."""


def _interrupted(sent: int, read: int, unknown: int, is_csv: bool) -> str:
    """Return a sentence on how many tasks are stored, and how to go on."""
    known = f"interrupted: {sent} tasks are stored, up to line {read}"
    if unknown:
        known += f"; whether those of the next {unknown} lines are is not known"
    head = "head -n 1 FILE; " if is_csv else ""
    rest = f"({head}tail -n +{max(read, int(is_csv)) + 1} FILE)"
    return f"{known}. To go on: {rest} | the same command with --from -{' --csv' * is_csv}"


LINE_BYTES_MAX: Final = 64 * 1024 * 1024
"""The longest line: a frame's largest task with every byte escaped is shorter."""


class _Counted:
    """The lines of a file, none longer than ``LINE_BYTES_MAX``, counted. Raises BadLine."""

    def __init__(self, lines: BinaryIO) -> None:
        self._lines = lines
        self.number = 0

    def __iter__(self) -> Iterator[bytes]:
        while line := self._lines.readline(LINE_BYTES_MAX + 1):
            self.number += 1
            if len(line) > LINE_BYTES_MAX:
                raise BadLine(
                    self.number,
                    f"the line has more than {LINE_BYTES_MAX} bytes; the limit is {LINE_BYTES_MAX}",
                )
            yield line


# --- lines to tasks ------------------------------------------------------------------------------

FIELDS = frozenset(("topic", "body", "body_base64", "delay", "delay_ms", "due_ms", "at")).union(
    *({field.name, field.python} for field in TaskFields.fields())
)
_NUMBERS = frozenset(
    field.python for field in TaskFields.fields() if isinstance(field.kind, Whole)
) | {name for name in FIELDS if name.endswith("_ms")}
"""Fields that are whole numbers."""
EPOCH = datetime.fromtimestamp(0, UTC)


class Defaults:
    """The topic and the keywords of a task for lines that do not say them."""

    def __init__(self, topic: str | None = None, **keywords: Any) -> None:
        self.topic = topic
        self.keywords = keywords


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


ReadTasks = Callable[[Iterable[bytes], Defaults], Iterator[tuple[Task, int]]]


def read_csv(lines: Iterable[bytes], defaults: Defaults) -> Iterator[tuple[Task, int]]:
    """``read_tasks`` of CSV (RFC 4180), whose first line names the fields. Raises BadLine."""
    read_bytes = 0

    def texts() -> Iterator[str]:
        nonlocal read_bytes
        for number, line in enumerate(lines, 1):
            read_bytes += len(line)
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise BadLine(number, "not UTF-8") from None

    csv.field_size_limit(LINE_BYTES_MAX)
    rows = csv.reader(texts(), strict=True)
    names: list[str] | None = None
    while True:
        number = rows.line_num + 1
        try:
            row = next(rows, None)
            if row is None:
                return
            if names is None:
                names = _header(row)
            elif row:
                yield _task_of(_cells(names, row), defaults), read_bytes
                read_bytes = 0
        except csv.Error as error:
            raise BadLine(number, f"not CSV: {error}") from None
        except BadLine:
            raise
        except ValueError as error:
            raise BadLine(number, str(error)) from None


def _header(row: list[str]) -> list[str]:
    _check_known(row)
    if twice := [name for name, count in Counter(row).items() if count > 1]:
        raise ValueError(f"field {twice[0]}: named twice")
    return row


def _cells(names: list[str], row: list[str]) -> dict[str, Any]:
    """What a row says, with the types that JSON would have. Raises ValueError."""
    if len(row) != len(names):
        raise ValueError(f"{len(row)} cells, but the first line names {len(names)} fields")
    return {name: _cell(name, cell) for name, cell in zip(names, row, strict=True) if cell}


def _cell(name: str, cell: str) -> Any:
    if name == "properties":
        try:
            return _object(cell)
        except ValueError as error:
            raise ValueError(f"field {name}: {error}") from None
    if name in _NUMBERS:
        if re.fullmatch(r"-?[0-9]{1,20}", cell) is None:
            raise ValueError(f"field {name}: a whole number is needed, not {cell!r:.40}")
        return int(cell)
    return cell


def _check_known(names: Iterable[str]) -> None:
    if unknown := sorted(set(names) - FIELDS):
        raise ValueError(f"field {unknown[0]}: not known; known are {', '.join(sorted(FIELDS))}")


def read_task(line: bytes, defaults: Defaults) -> Task:
    """The task in one line. Raises ValueError naming the field."""
    return _task_of(_object(line), defaults)


def _task_of(said: dict[str, Any], defaults: Defaults) -> Task:
    """The task of which this is said. Raises ValueError naming the field."""
    _check_known(said)
    due = _due(said)
    if all(value is None for value in due.values()):
        due = {name: defaults.keywords.get(name) for name in due}
    topic = _parsed(said, "topic", _text) or defaults.topic
    if topic is None:
        raise ValueError("field topic: missing (in the line and on the command line)")
    of_task: dict[str, Any] = {}
    for field in TaskFields.fields():
        name, by_default = field.python, defaults.keywords.get(field.python)
        if name in due:
            continue
        value = _read(said, name, field.kind)
        if isinstance(value, dict):  # properties that both say are those of the line
            value = {**(by_default or {}), **value}
        of_task[name] = by_default if value is None else value
    of_task = {name: value for name, value in of_task.items() if value is not None}
    return Task(topic, _body(said), **due, **of_task)


def _read(said: dict[str, Any], name: str, kind: FieldKind) -> Any:
    """What a line says of a task in the field ``name``; None: nothing."""
    if isinstance(kind, Span):
        return _span(said, name)
    parse: Callable[[Any], Any] = _text
    if isinstance(kind, Policy):
        parse = policy_of_json
    elif isinstance(kind, Rule):
        parse = rule_of_json
    elif isinstance(kind, Properties):
        parse = _properties
    elif isinstance(kind, Whole):
        parse = partial(_whole, kind)
    value = _parsed(said, name, parse)
    return retry_of(value) if isinstance(kind, Policy) else value


def _object(line: bytes | str) -> dict[str, Any]:
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


def _due(said: dict[str, Any]) -> dict[str, Any]:
    """The delay, the time and the delay level of a line, of which one is said at most."""
    delay, at = _span(said, "delay"), _at(said)
    level = _read(said, "delay_level", TaskFields.field("delay_level").kind)
    if delay is not None and at is not None:
        raise ValueError("field at: give delay or at, not both")
    if level is not None:
        if delay is not None or at is not None:
            raise ValueError("field delay_level: give it, delay or at, one of them")
    return {"delay": delay, "at": at, "delay_level": level}


def _body(said: dict[str, Any]) -> bytes:
    encoded = said.get("body_base64")
    if said.get("body") is not None and encoded is not None:
        raise ValueError("field body: give body or body_base64, one of them")
    if encoded is None:
        return _parsed(said, "body", _body_text) or b""
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise ValueError("field body_base64: not base64") from None


def _parsed(said: dict[str, Any], name: str, parse: Callable[[Any], T]) -> T | None:
    """A field as ``parse`` reads it; None: it is not said."""
    value = said.get(name)
    if value is None:
        return None
    try:
        return parse(value)
    except ValueError as error:
        raise ValueError(f"field {name}: {error}") from None


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"text that is not empty is needed, not {value!r:.40}")
    _utf8(value)
    return value


def _body_text(value: Any) -> bytes:
    if not isinstance(value, str):
        raise ValueError(f"text is needed, not {value!r:.40}")
    return _utf8(value)


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("holds half a surrogate pair") from None


def _properties(value: Any) -> dict[str, PropertyValue]:
    if not isinstance(value, dict) or not all(
        isinstance(one, (str, int, float)) for one in value.values()
    ):
        what = "an object of texts, numbers and truth values"
        raise ValueError(f"{what} is needed, not {value!r:.40}")
    return value


def _whole(kind: Any, value: Any) -> int:
    if type(value) is not int or not kind.low <= value <= kind.high:
        raise ValueError(f"{kind.low} to {kind.high} is allowed, not {value!r:.40}")
    return value


def _moment(value: Any) -> datetime:
    try:
        return EPOCH + timedelta(milliseconds=_milliseconds(value))
    except OverflowError:
        raise ValueError(f"{value} is not a time that can be counted") from None


def _milliseconds(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= DURATION_MS_MAX:
        raise ValueError(f"milliseconds are needed, not {value!r:.40}")
    return value


def _span(said: dict[str, Any], name: str) -> float | None:
    """Seconds in the field ``name`` as people write it, or in ``name``_ms."""
    written_ms = _parsed(said, name, duration_ms)
    if written_ms is not None and said.get(f"{name}_ms") is not None:
        raise ValueError(f"field {name}_ms: give {name} or {name}_ms, not both")
    ms = _parsed(said, f"{name}_ms", _milliseconds) if written_ms is None else written_ms
    return None if ms is None else ms / 1000


def _at(said: dict[str, Any]) -> datetime | None:
    """The due time in the field ``at``, or in ``due_ms``."""
    at, due_ms = said.get("at"), said.get("due_ms")
    if at is not None and due_ms is not None:
        raise ValueError("field due_ms: give at or due_ms, not both")
    if due_ms is not None:
        return _parsed(said, "due_ms", _moment)
    if at is not None and not isinstance(at, str):
        raise ValueError(f"field at: {at!r:.40} is of the wrong type")
    return _parsed(said, "at", parse_at)


# --- transactions --------------------------------------------------------------------------------


class TransactionStates(StrEnum):
    """The states of transactions that may be asked for."""

    OPEN = "open"
    PARKED = "parked"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled_back"


async def list_transactions(
    call: Call,
    group: Annotated[str | None, option("Only this producer group.")] = None,
    state: Annotated[
        TransactionStates | None, option("Default: open and parked, those that are not decided.")
    ] = None,
    limit: LimitOption = None,
) -> None:
    """Transactions that nobody has decided. A parked one waits for you: its producers were asked
    often enough."""
    only: TransactionState | None = None if state is None else state.value
    nothing = "there is no such transaction"
    await call.listed(
        limit,
        lambda client, most: client.list_transactions(group=group, state=only, limit=most),
        Listing.of(call.out, COLUMNS, transaction_fields, nothing, SPARE),
    )


COLUMNS = (
    column("transaction", "id"), *text_columns("group", "state"), column("tasks", right=True),
    column("began", "began_ms", format_time),
    Column[TransactionInfo]("asked", lambda one: f"{one.asked} of {one.checks}", right=True),
    column("topics", show=", ".join),
)  # fmt: skip
SPARE = ("topics", "asked")


def _show_transaction(call: Call, asked: Mapping[str, Any], found: TransactionInfo) -> None:
    if call.out.as_json:
        call.out.record(transaction_fields(found) | {"halves": list(found.raw["halves"])})
        return
    facts: dict[str, str | int] = {
        "group": found.group,
        "state": found.state,
        "tasks": found.tasks,
        "bytes": found.bytes,
        "topics": ", ".join(found.topics),
        "asked": f"{found.asked} of {found.checks} times",
    }
    call.out.grid(facts_grid(("transaction", found.id), facts | time_facts(found)))
    if found.halves:
        call.out.grid(grid_of(HALVES, found.halves))


def _due_text(half: HalfTask) -> str:
    late = half.due_ms is None
    return f"{half.delay_ms} ms after the commit" if late else format_time(half.due_ms)


def _or_nothing(text: str | None) -> str:
    return text or ""


HALVES = (
    column("topic"), Column("due", _due_text), column("key", show=_or_nothing),
    column("tag", show=_or_nothing), *count_columns("bytes"),
)  # fmt: skip


def _say_committed(call: Call, asked: Mapping[str, Any], ids: Sequence[int]) -> None:
    name = asked["transaction"]
    fields = {"id": name, "outcome": "committed", "ids": [str(i) for i in ids]}
    call.out.result(fields, f"{name}  committed  {len(ids)} tasks")


def _say_rolled_back(call: Call, asked: Mapping[str, Any], none: None) -> None:
    name = asked["transaction"]
    call.out.result({"id": name, "outcome": "rolled_back", "ids": []}, f"{name}  rolled back")


show_transaction = declared("show_transaction", _show_transaction)
commit_transaction = declared("commit_transaction", _say_committed)
rollback_transaction = declared("rollback_transaction", _say_rolled_back)


def transaction_fields(found: TransactionInfo) -> dict[str, Any]:
    """A transaction in the form of ``--json``."""
    return fields_of(found, without="halves")
