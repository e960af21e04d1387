"""Commands of producers: ``enqueue`` stores one task from an argument or stdin, or many from JSON
lines or CSV; ``transactions`` shows and decides transactions.

``--from`` reads one object per line: ``topic``, ``body`` (text) or ``body_base64``, ``delay``
(seconds, or text such as ``"5m"``) or ``at`` (ISO-8601), and the other options of a task under
their Python names. ``retry`` is a SPEC such as ``"fixed:delay=30s,retries=5"``, or a map in wire
form. ``if_pending`` is an action, or an object with an action and options. The command's options
are defaults for fields that a line omits. ``read_tasks`` is pure: it turns lines into tasks, or
raises an error that names the line.
"""

from __future__ import annotations

import asyncio
import base64
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
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, Unpack, cast

from tickwheel.api.kinds import BODY, NAME, FieldKind, Moment, Properties, Span, Whole
from tickwheel.api.tasks import TaskFields
from tickwheel.api.times import moment
from tickwheel.api.transactions import HalfTask
from tickwheel.cli.call import Call, given, interruptible
from tickwheel.cli.declared import declared, listed
from tickwheel.cli.options import (
    LIMITS,
    AtOption,
    DelayOption,
    IfPendingOption,
    RuleOptions,
    TaskOptions,
    argument,
    derive,
    flag,
    option,
    read_value,
    rule_of,
    task_keywords,
)
from tickwheel.cli.output import (
    Column,
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
from tickwheel.client import Client, Partly, Receipt, Task, TransactionInfo
from tickwheel.client.producer import is_certain
from tickwheel.client.tasks import TaskChecker
from tickwheel.errors import BadRequest, LimitExceeded, TickwheelError, shown
from tickwheel.model.policies import DURATION_MS_MAX
from tickwheel.model.values import InvalidValue, members
from tickwheel.waiting import in_thread

_MERGED = ("kept", "replaced", "rejected")
CHUNK_TASKS = 2_000
"""Tasks enqueued together in bulk; chunks are confirmed one by one."""
READ_BYTES = 1 << 20
"""Maximum bytes that one call reads from stdin."""


class EnqueueOptions(TaskOptions, RuleOptions):
    """The options of a task and of a rule for pending keys."""


derive(EnqueueOptions, [TaskFields.field("delay_level")])


async def enqueue(
    call: Call,
    topic: Annotated[
        str | None,
        argument("TOPIC", "The task's topic. With --from: the default for lines without a topic."),
    ] = None,
    body: Annotated[str | None, argument("BODY", "The task's body; - reads it from stdin.")] = None,
    source: Annotated[
        Path | None,
        option("File with one task per line, JSON or .csv; - is stdin.", "FILE", "--from"),
    ] = None,
    is_csv: Annotated[bool, flag("Read --from as CSV, regardless of its name.", "--csv")] = False,
    delay: DelayOption = None,
    at: AtOption = None,
    if_pending: IfPendingOption = None,
    **options: Unpack[EnqueueOptions],
) -> None:
    """Enqueue a task to be delivered later. When it is confirmed, it is durable.

    Bulk input (--from) has one JSON object per line with "topic", "body" or "body_base64", "delay"
    or "at", and fields named like the options here ("order_key"; "properties" is an object). The
    options are defaults for lines without the field. CSV has the fields' names in its first line;
    an empty cell is a missing field, "properties" is JSON. A file is checked before the first task
    is sent, except against the daemon's own limits and policies.
    """
    due = given({"delay": delay, "at": at})
    if len(due) > 1:
        raise BadRequest("give either --delay or --at, not both")
    if due and "delay_level" in options:
        raise BadRequest("give only one of --delay-level, --delay and --at")
    rule_options = {name: value for name, value in options.items() if name in _OF_A_RULE}
    task_options = {name: value for name, value in options.items() if name not in _OF_A_RULE}
    keywords = task_keywords(cast("TaskOptions", task_options))
    rule = rule_of(if_pending, cast("RuleOptions", rule_options))
    keywords = given({**keywords, "if_pending": rule, **due})
    if source is not None:
        if body is not None or "key" in options:
            raise BadRequest("with --from, give body and key in the file")
        is_csv = is_csv or source.suffix.lower() == ".csv"
        defaults = keywords | given({"topic": topic})
        await _bulk(call, source, defaults, read_csv if is_csv else read_tasks)
        return
    if is_csv:
        raise BadRequest("--csv requires --from")
    if topic is None or body is None:
        raise BadRequest("give TOPIC and BODY (or - for stdin), or --from FILE.jsonl")
    async with call.client() as client:
        content = os.fsencode(body)
        if body == "-":
            bytes_max = client.limits.body_bytes_max
            content = await in_thread(lambda: read_stdin(bytes_max))
        receipt = await client.enqueue(topic, content, **keywords)
    left_s = receipt.due_ms / 1000 - time.time()
    when = f"in {format_duration(left_s)}" if left_s > 0 else "now"
    outcome = "" if receipt.outcome == "stored" else f"  {receipt.outcome}"
    line = f"{receipt.id}{outcome}  due {format_time(receipt.due_ms)} ({when})"
    call.out.result(_receipt_fields(topic, receipt), line)


def read_stdin(bytes_max: int) -> bytes:
    """Read all of stdin. Raise LimitExceeded without reading the rest, or OSError."""
    data, fd = bytearray(), sys.stdin.fileno()
    # If a thread still read stdin's buffer at the exit, Python would abort.
    while more := os.read(fd, min(bytes_max + 1 - len(data), READ_BYTES)):
        data += more
    if len(data) > bytes_max:
        raise LimitExceeded(
            f"the body on stdin has more than {bytes_max} bytes; the limit is {bytes_max}"
            " (body_bytes_max)"
        )
    return bytes(data)


_OF_A_RULE = RuleOptions.__optional_keys__


def _receipt_fields(topic: str, receipt: Receipt) -> dict[str, object]:
    due_ms = receipt.due_ms
    due = {"due_ms": due_ms, "due": iso_time(due_ms)}
    return {"id": str(receipt.id), "topic": topic, **due, "outcome": receipt.outcome}


# --- bulk ----------------------------------------------------------------------------------------


async def _bulk(call: Call, source: Path, defaults: Defaults, read: ReadTasks) -> None:
    with _opened(source) as lines:
        with interruptible():
            total_bytes = _check_first(lines, defaults, read)
        async with call.client() as client:
            columns = ("{task.fields[count]:,} tasks", "BarColumn", "TaskProgressColumn")
            rate = "{task.fields[rate]:,.0f}/s"
            # Progress is measured in bytes, because the number of lines is unknown.
            with progress_bar(*columns, rate, total=total_bytes, count=0, rate=0.0) as update:
                await _send(call, client, lines, defaults, update, read)


@contextmanager
def _opened(source: Path) -> Iterator[BinaryIO]:
    if str(source) == "-":
        yield sys.stdin.buffer
        return
    try:
        with interruptible():
            file = source.open("rb")
    except OSError as error:
        raise BadRequest(f"--from {source}: {error.strerror}") from None
    with file:
        yield file


def _check_first(lines: BinaryIO, defaults: Defaults, read: ReadTasks) -> int | None:
    """Check all lines of a regular file before any is sent. Return its size; None for a pipe."""
    try:
        status = os.fstat(lines.fileno())
    except (OSError, io.UnsupportedOperation):
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    start = lines.tell()
    for _ in read(_Counted(lines), defaults):
        pass
    lines.seek(start)
    return status.st_size


async def _send(
    call: Call, client: Client, lines: BinaryIO, defaults: Defaults, update: Callable[..., None],
    read_all: ReadTasks | None = None,
) -> None:  # fmt: skip
    """Send tasks in chunks. Tasks confirmed before an error are stored and counted, also those of
    the chunk with the error. After an interruption the chunk in flight is counted as well, if it is
    answered soon."""
    sent = lines_read = 0
    began = time.monotonic()
    counted = _Counted(lines)
    tasks = (read_all or read_tasks)(counted, defaults)
    sending: asyncio.Future[list[Receipt]] | None = None
    outcomes: Counter[str] = Counter()
    try:
        while chunk := _next_chunk(tasks):
            enqueuing = client.enqueue_many([task for task, _ in chunk])
            sending = asyncio.ensure_future(enqueuing)  # checked below
            receipts = await asyncio.shield(sending)
            sending = None
            sent, lines_read = sent + len(receipts), counted.number
            outcomes.update(receipt.outcome for receipt in receipts)
            rate = sent / max(time.monotonic() - began, 0.001)
            update(advance=sum(size for _, size in chunk), count=sent, rate=rate)
            if call.out.as_json:
                for (task, _), receipt in zip(chunk, receipts, strict=True):
                    call.out.record(_receipt_fields(task.topic, receipt))
    except TickwheelError as error:
        stored, unknown = ([], 0) if sending is None else _parts_of(chunk, error)
        maybe = f"; {unknown} more may be stored" if unknown else ""
        call.out.remark(f"{sent + len(stored)} tasks were enqueued before this error{maybe}")
        if call.out.as_json:
            for task, receipt in stored:
                call.out.record(_receipt_fields(task.topic, receipt))
        raise
    except BaseException:  # interrupted, or the reader of the output has gone
        if sending is not None:
            await asyncio.wait((sending,), timeout=LAST_CHUNK_S)
            if sending.done() and not sending.cancelled() and sending.exception() is None:
                sent, lines_read = sent + len(sending.result()), counted.number
        unknown = counted.number - lines_read if sending is not None else 0
        is_csv = read_all is read_csv
        call.out.remark(_interrupted(sent, lines_read, unknown, is_csv))
        raise
    took_s = time.monotonic() - began
    if not call.out.as_json:
        summary = f"{sent} tasks enqueued"
        if merged := [f"{outcomes[word]:,} {word}" for word in _MERGED if outcomes[word]]:
            summary = ", ".join((f"{outcomes['stored']:,} new", *merged))
        call.out.line(f"{summary} in {format_duration(took_s)}")


def _next_chunk(tasks: Iterator[tuple[Task, int]]) -> list[tuple[Task, int]]:
    with interruptible():
        return list(itertools.islice(tasks, CHUNK_TASKS))


def _parts_of(
    chunk: Sequence[tuple[Task, int]], error: TickwheelError
) -> tuple[list[tuple[Task, Receipt]], int]:
    """Return the stored tasks of a chunk that failed, and how many others may be stored."""
    ends = error.receipts if isinstance(error, Partly) else [error] * len(chunk)
    pairs = [(task, end) for (task, _), end in zip(chunk, ends, strict=True)]
    unknown = [end for end in ends if isinstance(end, TickwheelError) and not is_certain(end)]
    return [(task, end) for task, end in pairs if isinstance(end, Receipt)], len(unknown)


LAST_CHUNK_S = 5.0
"""Maximum seconds that an interrupted command waits for the answer to its last chunk."""


def _interrupted(sent: int, read: int, unknown: int, is_csv: bool) -> str:
    """Return a sentence on how many tasks are stored, and how to continue."""
    text = f"interrupted: {sent} tasks are stored, up to line {read}"
    if unknown:
        text += f"; the tasks of the next {unknown} lines may be stored"
    head = "head -n 1 FILE; " if is_csv else ""
    rest = f"({head}tail -n +{max(read, int(is_csv)) + 1} FILE)"
    return f"{text}. To continue: {rest} | the same command with --from -{' --csv' * is_csv}"


LINE_BYTES_MAX: Final = 64 * 1024 * 1024
"""Maximum bytes of a line; the largest task of a frame, with every byte escaped, is shorter."""


class _Counted:
    """Counts the lines of a file. Raises BadLine for a line over ``LINE_BYTES_MAX``."""

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

DUE = {"delay": Span(), "at": Moment(), "delay_level": TaskFields.field("delay_level").kind}
"""The fields of which one says when a task is due."""
KINDS: dict[str, FieldKind] = {
    "topic": NAME, "body": BODY, **DUE, **{f.python: f.kind for f in TaskFields.fields()}
}  # fmt: skip
OTHER_FORMS = {"body_base64": "body", "due_ms": "at", "delay_ms": "delay"} | {
    field.name: field.python for field in TaskFields.fields() if field.name != field.python
}
"""Name of a field in base64 or in milliseconds → its name in a readable form."""
FIELDS = frozenset((*KINDS, *OTHER_FORMS))
Defaults = Mapping[str, Any]
"""Fields of a task, for lines without them."""
_CHECKER = TaskChecker()
_CHECKER.set_limits(LIMITS)


class BadLine(BadRequest):
    """A line of the input is not a valid task; the message names line and field."""

    def __init__(self, number: int, problem: str) -> None:
        super().__init__(f"line {number}: {problem}")
        self.number = number


def read_tasks(lines: Iterable[bytes], defaults: Defaults) -> Iterator[tuple[Task, int]]:
    """Yield each task with the bytes of its line, skipping empty lines. Raise BadLine."""
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
    """``read_tasks`` for CSV (RFC 4180) with the fields' names in the first line. Raise
    BadLine."""
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
        raise ValueError(f"field {twice[0]} is repeated")
    return row


def _cells(names: list[str], row: list[str]) -> dict[str, Any]:
    """Return the fields of a row, with the types of JSON. Raise ValueError."""
    if len(row) != len(names):
        raise ValueError(f"has {len(row)} cells, but the first line has {len(names)} fields")
    return {name: _cell(name, cell) for name, cell in zip(names, row, strict=True) if cell}


def _cell(name: str, cell: str) -> Any:
    kind = KINDS.get(name)
    if isinstance(kind, Properties):
        try:
            return _object(cell)
        except ValueError as error:
            raise ValueError(f"field {name}: {error}") from None
    is_number = isinstance(kind, Whole) and not isinstance(kind, (Span, Moment))
    if is_number or name.endswith("_ms"):
        if re.fullmatch(r"-?[0-9]{1,20}", cell) is None:
            raise ValueError(f"field {name}: must be an integer, not {cell!r:.40}")
        return int(cell)
    return cell


def _check_known(names: Iterable[str]) -> None:
    if unknown := sorted(set(names) - FIELDS):
        raise ValueError(
            f"field {unknown[0]} is not a valid field; valid fields are {', '.join(sorted(FIELDS))}"
        )


def read_task(line: bytes, defaults: Defaults) -> Task:
    """Parse the task in a line. Raise ValueError naming the field."""
    return _task_of(_object(line), defaults)


def _task_of(fields: dict[str, Any], defaults: Defaults) -> Task:
    """Return the checked task with these fields. Raise ValueError naming the field."""
    _check_known(fields)
    fields = {name: value for name, value in fields.items() if value is not None}
    for other, name in OTHER_FORMS.items():
        if name in fields and other in fields:
            raise ValueError(f"field {other}: give either {name} or {other}, not both")
    values = {OTHER_FORMS.get(name, name): _read(name, value) for name, value in fields.items()}
    if values.keys() & DUE.keys():
        defaults = {name: value for name, value in defaults.items() if name not in DUE}
    options = {"body": b"", **defaults, **values}
    if "topic" not in options:
        raise ValueError("field topic: missing in the line and on the command line")
    if "properties" in values:  # a property of the line replaces only the same default property
        options["properties"] = {**defaults.get("properties", {}), **values["properties"]}
    task = Task(**options)
    try:
        _CHECKER.check(task)
    except BadRequest as error:
        raise ValueError(error.message) from None
    return task


def _read(name: str, value: Any) -> Any:
    """Return the value of a line's field as the client takes it. Raise ValueError."""
    try:
        if name == "body_base64":
            return _decoded(value)
        if name not in OTHER_FORMS:
            return read_value(KINDS[name], value)
        if type(value) is not int or not 0 <= value <= DURATION_MS_MAX:
            raise ValueError(f"must be a number of milliseconds, not {value!r:.40}")
        return moment(value) if name == "due_ms" else value / 1000
    except OverflowError:
        raise ValueError(f"field {name}: {value} is not a valid time") from None
    except ValueError as error:
        raise ValueError(f"field {name}: {error}") from None


def _decoded(text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError):
        raise ValueError("not valid base64") from None


def _object(line: bytes | str) -> dict[str, Any]:
    try:
        fields = json.loads(line, object_pairs_hook=members)
    except InvalidValue as error:
        raise ValueError(error.message(shown)) from None
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise ValueError("not valid JSON: nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError(f"must be a JSON object, not {type(fields).__name__}")
    return fields


# --- transactions --------------------------------------------------------------------------------


COLUMNS = (
    column("transaction", "id"), *text_columns("group", "state"), column("tasks", right=True),
    column("began", "began_ms", format_time),
    Column[TransactionInfo]("asked", lambda row: f"{row.asked} of {row.checks}", right=True),
    column("topics", show=", ".join),
)  # fmt: skip
SPARE = ("topics", "asked")


def _show_transaction(call: Call, request: Mapping[str, Any], transaction: TransactionInfo) -> None:
    facts: dict[str, str | int] = {
        "group": transaction.group,
        "state": transaction.state,
        "tasks": transaction.tasks,
        "bytes": transaction.bytes,
        "topics": ", ".join(transaction.topics),
        "asked": f"{transaction.asked} of {transaction.checks} times",
    }
    tables = [facts_grid(("transaction", transaction.id), facts | time_facts(transaction))]
    if transaction.halves:
        tables.append(grid_of(HALVES, transaction.halves))
    call.out.result(fields_of(transaction), *tables)


def _due_text(half: HalfTask) -> str:
    is_relative = half.due_ms is None
    return f"{half.delay_ms} ms after the commit" if is_relative else format_time(half.due_ms)


HALVES = (
    column("topic"), Column("due", _due_text), *text_columns("key", "tag"),
    *count_columns("bytes"),
)  # fmt: skip


def _show_committed(call: Call, request: Mapping[str, Any], ids: Sequence[int]) -> None:
    name = request["transaction"]
    fields = {"id": name, "outcome": "committed", "ids": [str(i) for i in ids]}
    call.out.result(fields, f"{name}  committed  {len(ids)} tasks")


def _show_rolled_back(call: Call, request: Mapping[str, Any], none: None) -> None:
    name = request["transaction"]
    call.out.result({"id": name, "outcome": "rolled_back", "ids": []}, f"{name}  rolled back")


show_transaction = declared("show_transaction", _show_transaction)
commit_transaction = declared("commit_transaction", _show_committed)
rollback_transaction = declared("rollback_transaction", _show_rolled_back)


list_transactions = listed(
    "list_transactions",
    "List undecided transactions. A parked transaction needs your decision, because its checks have"
    " ended without an answer.",
    COLUMNS, nothing="no matching transactions", spare=SPARE,
)  # fmt: skip
