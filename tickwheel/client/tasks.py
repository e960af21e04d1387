"""Tasks before they are sent: checked against the daemon's limits, in wire form.

Pure. Checking here raises a caller's mistake to that caller at once, before its task shares a frame
with others; the daemon checks again. Invariant: a task that passes can be encoded, and ``size`` is
not less than its bytes on the wire.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import repeat
from math import isnan
from typing import Any, NamedTuple, TypeVar, cast, overload

from tickwheel.api.frames import Outcome
from tickwheel.api.kinds import ENCODING
from tickwheel.api.policies import task_rule_wire
from tickwheel.api.tasks import TaskFields, check_options, due_of
from tickwheel.api.times import Duration, duration_ms, moment, moment_ms
from tickwheel.client.encodings import Codec
from tickwheel.client.keywords import TaskKeywords
from tickwheel.client.task_options import Task, checked_options, is_bare
from tickwheel.errors import BadRequest, BodyTooLarge, DueTooFar, LimitExceeded, shown
from tickwheel.limits import Limits
from tickwheel.protocol import encode

F = TypeVar("F", bound=Callable[..., Any])
WireTask = tuple[Any, ...]
"""``(topic, body, delay_ms)`` or ``(topic, body, delay_ms or None, options)``."""

PLAIN_BYTES = 24
"""Bytes of a task's array, its delay, and the headers of body and topic. A topic's letter is one
byte."""
PLAIN_DELAY_S_MAX = 1e9
"""Seconds of a delay above which the slow path checks it."""
FRAME_BYTES = 32
"""Bytes of an ENQUEUE frame without its tasks."""
_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,255}")
_NAMES_KEPT_MAX = 10_000


class Receipt(NamedTuple):
    """An enqueued task: stored durably, delivered at ``due`` or later."""

    id: int
    due_ms: int
    """Milliseconds since 1970 by the daemon's clock."""
    outcome: Outcome = "stored"
    """A task with ``if_pending`` can also be "kept", "replaced" or "rejected"; ``id`` and
    ``due_ms`` are then those of the pending task."""

    @property
    def due(self) -> datetime:
        return moment(self.due_ms)


CheckedTask = tuple[WireTask, int]
"""A checked task, and its maximum bytes in a frame. A plain tuple, because there may be hundreds of
thousands a second."""


class Receipts(Sequence[Receipt]):
    """Receipts of many tasks in order, stored as columns; an item is created on access."""

    __slots__ = ("dues_ms", "ids")

    def __init__(self, ids: Sequence[int], dues_ms: Sequence[int]) -> None:
        self.ids = ids
        self.dues_ms = dues_ms
        """Milliseconds since 1970 by the daemon's clock."""

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> Receipt: ...

    @overload
    def __getitem__(self, index: slice) -> Receipts: ...

    def __getitem__(self, index: int | slice) -> Receipt | Receipts:
        if isinstance(index, slice):
            return Receipts(self.ids[index], self.dues_ms[index])
        return Receipt(self.ids[index], self.dues_ms[index])

    def __repr__(self) -> str:
        return f"<Receipts of {len(self)} tasks>"


class Columns(NamedTuple):
    """Checked tasks of one topic, as columns of the same length."""

    topic: str
    bodies: list[bytes]
    delays_ms: list[int]
    lengths: list[int]
    """The lengths of the bodies, in bytes."""

    def part(self, start: int, end: int) -> Columns:
        if start == 0 and end >= len(self.bodies):
            return self
        columns = self.bodies[start:end], self.delays_ms[start:end], self.lengths[start:end]
        return Columns(self.topic, *columns)

    @property
    def sizes(self) -> list[int]:
        """Maximum bytes of each task in a frame, of columns or of tasks."""
        each = len(self.topic) + PLAIN_BYTES
        return [length + each for length in self.lengths]


class TaskChecker:
    """Checks tasks against ``limits``, which are those of the connected daemon."""

    def __init__(self) -> None:
        self.limits = Limits()
        self.codec: Codec | None = None
        """Packs bodies; None: bodies are sent unchanged."""
        self._names: set[str] = set()

    def set_limits(self, limits: Limits) -> None:
        self.limits = limits

    def plain(self, topic: str, body: bytes, delay: Any) -> CheckedTask | None:
        """Return the checked task if it is plain. None: it needs ``check``."""
        if type(topic) is not str or topic not in self._names or type(body) is not bytes:
            return None
        if self.codec is not None:
            return None
        if delay is None:
            delay_ms = 0
        elif type(delay) in _PLAIN_DELAYS and 0 <= delay < PLAIN_DELAY_S_MAX:
            delay_ms = -(-round(delay * 1_000_000) // 1000)
        else:
            return None
        limits, size = self.limits, len(body)
        if size > limits.body_bytes_max or delay_ms > limits.delay_ms_max:
            return None
        return (topic, body, delay_ms), size + len(topic) + PLAIN_BYTES

    def check(self, task: Any, field: str = "task") -> CheckedTask:
        """Return the checked task. Raise BadRequest (or a subclass) naming field, limit and
        value."""
        if not isinstance(task, Task):
            raise BadRequest(f"{field} must be a Task, not {shown(task)}")
        topic, body, limits = task.topic, task.body, self.limits
        if type(topic) is not str or topic not in self._names:
            topic = self.name(topic, f"{field}.topic")
        if type(body) is not bytes:
            body = _body(body, f"{field}.body")
        if self.codec is not None:
            body, encoding = self.packed(topic, body, task.encoding, field)
            task = replace(task, encoding=encoding)
        if len(body) > limits.body_bytes_max:
            raise BodyTooLarge(
                f"{field}.body has {len(body)} bytes; the limit is {limits.body_bytes_max}"
                " (body_bytes_max)"
            )
        options = checked_options(task, field, limits)
        if len(options) > 1 or task.if_pending is not None:
            _check_together(task, options, field)
        delay_ms = self._due(task, options, field)
        size = len(body) + len(topic) + PLAIN_BYTES
        if not options:
            return self._fitting((topic, body, delay_ms), size, field)
        try:
            size += len(encode(options))
        except BadRequest as error:
            raise BadRequest(f"{field}: {error.message}") from None
        return self._fitting((topic, body, delay_ms, options), size, field)

    def check_all(self, tasks: Iterable[Task]) -> tuple[list[WireTask], list[int]]:
        """Return all checked tasks, and their sizes. Raise the error of the first invalid task."""
        wires: list[WireTask] = []
        sizes: list[int] = []
        names, limits, is_packed = self._names, self.limits, self.codec is not None
        body_max, delay_max = limits.body_bytes_max, limits.delay_ms_max
        for index, task in enumerate(tasks):
            # Fast path for most tasks: this loop dominates the cost of bulk enqueues.
            is_plain = (
                type(task) is Task
                and not is_packed
                and is_bare(task)
                and type(task.topic) is str
                and task.topic in names
                and type(task.body) is bytes
                and len(task.body) <= body_max
                and type(task.delay) in _PLAIN_DELAYS
            )
            if is_plain:
                delay: Any = task.delay or 0  # a number
                # A NaN fails every comparison, and is checked below.
                is_usual = 0 <= delay < PLAIN_DELAY_S_MAX
                delay_ms = -(-round(delay * 1_000_000) // 1000) if is_usual else delay_max + 1
                if delay_ms <= delay_max:
                    wires.append((task.topic, task.body, delay_ms))
                    sizes.append(len(task.body) + len(task.topic) + PLAIN_BYTES)
                    continue
            wire, size = self.check(task, f"tasks[{index}]")
            wires.append(wire)
            sizes.append(size)
        return wires, sizes

    def check_columns(
        self,
        topic: str,
        bodies: Iterable[bytes],
        delay: Duration | None,
        delays: Iterable[Duration] | None,
    ) -> Columns:
        """Return checked tasks that differ only in body and delay. Raise errors like ``check``."""
        name = self.name(topic, "topic")
        checked_bodies = list(bodies)
        limits = self.limits
        if not set(map(type, checked_bodies)) <= {bytes}:
            checked_bodies = [
                _body(body, f"bodies[{index}]") for index, body in enumerate(checked_bodies)
            ]
        lengths = list(map(len, checked_bodies))
        if lengths and max(lengths) > limits.body_bytes_max:
            index = next(i for i, n in enumerate(lengths) if n > limits.body_bytes_max)
            raise BodyTooLarge(
                f"bodies[{index}] has {lengths[index]} bytes; the limit is"
                f" {limits.body_bytes_max} (body_bytes_max)"
            )
        if delays is None:
            delay_ms = 0 if delay is None else duration_ms(delay, "delay")
            delays_ms = [delay_ms] * len(checked_bodies)
        elif delay is not None:
            raise BadRequest("give either delay or delays, not both")
        elif isinstance(delays, str):  # each character would be a duration
            raise BadRequest(f"delays must be a list of durations, not {shown(delays)}")
        else:
            delays_ms = _all_ms(list(delays))
        if len(delays_ms) != len(checked_bodies):
            message = f"delays has {len(delays_ms)} elements, but bodies has {len(checked_bodies)}"
            raise BadRequest(message)
        if delays_ms and max(delays_ms) > limits.delay_ms_max:
            index = next(i for i, ms in enumerate(delays_ms) if ms > limits.delay_ms_max)
            field = "delay" if delays is None else f"delays[{index}]"
            raise DueTooFar(
                f"{field} is {delays_ms[index]} ms; the limit is {limits.delay_ms_max}"
                " ms (the daemon's delay_max_s)"
            )
        return Columns(name, checked_bodies, delays_ms, lengths)

    def packed(
        self, topic: str, body: bytes, encoding: Any, field: str, *, repeatable: bool = False
    ) -> tuple[bytes, str | None]:
        """Return a packed body and its encoding. Raise BadRequest for an invalid encoding."""
        if encoding is not None:
            encoding = ENCODING.check(encoding, f"{field}.encoding", self.limits)
        if self.codec is None:
            return body, encoding
        return self.codec.pack(topic, body, encoding, repeatable=repeatable)

    def name(self, value: Any, field: str) -> str:
        """Return the checked name of a topic or group. Raise BadRequest."""
        if type(value) is str and value in self._names:
            return value
        if not isinstance(value, str) or not _NAME.fullmatch(value):
            raise BadRequest(
                f"{field} must be 1 to 255 characters from A-Z a-z 0-9 . _ : / -,"
                f" not {shown(value)}"
            )
        if len(self._names) >= _NAMES_KEPT_MAX:
            self._names.clear()
        self._names.add(value)
        return value

    def _fitting(self, wire: WireTask, size: int, field: str) -> CheckedTask:
        limit = self.limits.frame_bytes_max
        if size + FRAME_BYTES > limit:
            raise LimitExceeded(
                f"{field} has about {size} bytes with all its fields; a frame's limit is {limit}"
                " (frame_bytes_max)"
            )
        return wire, size

    def _due(self, task: Task, options: dict[str, Any], field: str) -> int | None:
        if task.delay_level is not None:
            if task.delay is not None or task.at is not None:
                raise BadRequest(f"{field} must have only one of delay_level, delay and at")
            kind = TaskFields.field("delay_level").kind
            level = kind.check(task.delay_level, f"{field}.delay_level", self.limits)
            options["delay_level"] = level
            return None
        if task.at is not None:
            if task.delay is not None:
                raise BadRequest(f"{field} must have only one of delay and at")
            options["due_ms"] = moment_ms(task.at, f"{field}.at")
            return None
        if task.delay is None:
            return 0
        delay_ms = duration_ms(task.delay, f"{field}.delay")
        limit = self.limits.delay_ms_max
        if delay_ms > limit:
            raise DueTooFar(
                f"{field} is due in {delay_ms} ms; the limit is {limit} ms"
                " (the daemon's delay_max_s)"
            )
        return delay_ms


def _check_together(task: Task, options: dict[str, Any], field: str) -> None:
    """Check combinations of options, and add ``if_pending``, which needs the key."""
    check_options(options, field)
    if task.if_pending is not None:
        rule = task_rule_wire(task.if_pending, task.key, f"{field}.if_pending")
        options["if_pending"] = rule


def size_of(tasks: Iterable[WireTask]) -> int:
    """Return the maximum bytes of tasks in a frame."""
    return sum(
        len(wire[0]) + len(wire[1]) + PLAIN_BYTES + (len(encode(wire[3])) if len(wire) == 4 else 0)
        for wire in tasks
    )


def frame_slices(sizes: Sequence[int], limits: Limits, count_max: int) -> Iterable[tuple[int, int]]:
    """Yield the (start, end) of each frame's tasks."""
    bytes_max = limits.frame_bytes_max - FRAME_BYTES
    if 0 < len(sizes) <= count_max and sum(sizes) <= bytes_max:
        yield 0, len(sizes)
        return
    start = size = 0
    for index, task_size in enumerate(sizes):
        size += task_size
        if size > bytes_max or index - start >= count_max:
            yield start, index
            start, size = index, task_size
    if start < len(sizes):
        yield start, len(sizes)


def receipts(
    tasks: Sequence[WireTask],
    ids: Sequence[int],
    accepted_ms: int,
    levels_ms: Sequence[int],
    chosen_ms: Sequence[int | None] = (),
) -> list[Receipt]:
    """Return the receipts in the daemon's answer to ``tasks``. ``chosen_ms``: due times that the
    daemon has chosen. Raise ValueError for an answer that does not match."""
    dues = [
        accepted_ms + task[2] if task[2] is not None else due_of(task, accepted_ms, levels_ms)
        for task in tasks
    ]
    if chosen_ms:
        pairs = zip(dues, chosen_ms, strict=True)
        dues = [due_ms if chosen is None else chosen for due_ms, chosen in pairs]
    if len(ids) != len(dues):
        raise ValueError(f"got {len(ids)} ids for {len(dues)} tasks")
    return list(map(_new_receipt, zip(ids, dues, _STORED, strict=False)))


def merged_receipts(ids: Sequence[int], outcomes: Any) -> list[Receipt]:
    """Return the receipts in the daemon's answer to tasks with ``if_pending``. Raise ValueError or
    TypeError for a malformed answer."""
    return [
        Receipt(task_id, int(due_ms), cast("Outcome", str(word)))
        for task_id, (word, due_ms) in zip(ids, outcomes, strict=True)
    ]


_STORED = repeat("stored")
_new_receipt = partial(tuple.__new__, Receipt)
_PLAIN_DELAYS = frozenset((type(None), int, float))


def _all_ms(delays: list[Any]) -> list[int]:
    if set(map(type, delays)) <= {int, float} and delays:
        # A NaN fails every comparison, and is checked one by one.
        if min(delays) >= 0 and max(delays) < PLAIN_DELAY_S_MAX and not any(map(isnan, delays)):
            return [-(-round(delay * 1_000_000) // 1000) for delay in delays]
    return [duration_ms(delay, f"delays[{index}]") for index, delay in enumerate(delays)]


def _body(value: Any, field: str) -> bytes:
    if type(value) is bytes:
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise BadRequest(f"{field} must be bytes, not {shown(value)}")


# --- keywords of tasks ---------------------------------------------------------------------------


def spelled_out(block: Any) -> Callable[[F], F]:
    """Decorate a function with ``**options: Unpack[block]``: its signature then names each option,
    for ``help``, mocks and inspection. A call costs nothing more."""

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        options = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=...,
                annotation=getattr(kind, "__forward_arg__", kind),
            )
            for name, kind in block.__annotations__.items()
        ]
        parameters = [*list(signature.parameters.values())[:-1], *options]
        spelled = signature.replace(parameters=parameters)
        function.__signature__ = spelled  # type: ignore[attr-defined]  # inspect reads it
        return function

    return decorate


def refuse_unknown(options: Mapping[str, object], block: Any, method: str) -> None:
    """Raise TypeError, like Python, for a keyword that ``block`` does not have."""
    if not block.__optional_keys__.issuperset(options):
        name = next(name for name in options if name not in block.__optional_keys__)
        raise TypeError(f"{method}() got an unexpected keyword argument {name!r}")


def task_of(
    method: str,
    topic: str,
    body: bytes,
    delay: Duration | None,
    at: datetime | None,
    options: TaskKeywords,
) -> Task:
    """Return the unchecked task of a call. Raise errors like ``refuse_unknown``, which is called
    only after a failure because this runs for each task."""
    try:
        return Task(topic, body, delay=delay, at=at, **options)
    except TypeError:
        refuse_unknown(options, TaskKeywords, method)
        raise
