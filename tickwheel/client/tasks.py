"""Tasks before they are sent: checked against the daemon's limits, in the shape of the wire.

Pure. The check is here so that one caller's mistake is that caller's error at once and does
not travel in a frame with other callers' tasks; the daemon checks again. Invariant: a task that
passes can be encoded, and ``size`` is not less than its bytes on the wire.
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
from tickwheel.api.tasks import TaskFields, check_options
from tickwheel.api.times import Duration, duration_ms, moment, moment_ms
from tickwheel.client.encodings import Codec
from tickwheel.client.keywords import TaskKeywords
from tickwheel.client.task_options import Task, checked_options, is_bare
from tickwheel.errors import BadRequest, BodyTooLarge, DueTooFar, LimitExceeded, shown
from tickwheel.limits import Limits, delay_of_level
from tickwheel.protocol import encode

F = TypeVar("F", bound=Callable[..., Any])
WireTask = tuple[Any, ...]
"""``(topic, body, delay_ms)`` or ``(topic, body, delay_ms or None, options)``."""

PLAIN_BYTES = 24
"""Bytes of a task's array, body and topic headers and its delay; a topic's letter is a byte."""
PLAIN_DELAY_S_MAX = 1e9
"""A longer delay, in seconds, is looked at more closely."""
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
    """Of a task with ``if_pending`` also "kept", "replaced" or "rejected": then ``id`` and
    ``due_ms`` are those of the task that is, or was, pending."""

    @property
    def due(self) -> datetime:
        return moment(self.due_ms)


CheckedTask = tuple[WireTask, int]
"""A checked task, and how many bytes it takes in a frame, at most. A plain tuple: there may be
hundreds of thousands a second."""


class Receipts(Sequence[Receipt]):
    """Of many tasks, in their order, as columns; an item is made when it is looked at."""

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
        """How many bytes each task takes in a frame, of columns or not, at most."""
        each = len(self.topic) + PLAIN_BYTES
        return [length + each for length in self.lengths]


class TaskChecker:
    """Checks tasks against ``limits``, which are those of the connected daemon."""

    def __init__(self) -> None:
        self.limits = Limits()
        self.codec: Codec | None = None
        """What packs bodies; None: they stay as they are."""
        self._names: set[str] = set()

    def set_limits(self, limits: Limits) -> None:
        self.limits = limits

    def plain(self, topic: str, body: bytes, delay: Any) -> CheckedTask | None:
        """The checked task, if it is a plain one; None: a closer look is needed."""
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
        """A checked task. Raises BadRequest (or a kind of it) naming field, limit and value."""
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
        """Every checked task and its size. Raises the error of the first bad one."""
        wires: list[WireTask] = []
        sizes: list[int] = []
        names, limits, is_packed = self._names, self.limits, self.codec is not None
        body_max, delay_max = limits.body_bytes_max, limits.delay_ms_max
        for index, task in enumerate(tasks):
            # What most tasks are: this loop is what bulk costs.
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
                # A NaN is in no order, and is looked at below.
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
        """Checked tasks that differ in body and delay only. Raises as ``check``."""
        name = self.name(topic, "topic")
        found = list(bodies)
        limits = self.limits
        if not set(map(type, found)) <= {bytes}:
            found = [_body(body, f"bodies[{index}]") for index, body in enumerate(found)]
        lengths = list(map(len, found))
        if lengths and max(lengths) > limits.body_bytes_max:
            index = next(i for i, n in enumerate(lengths) if n > limits.body_bytes_max)
            raise BodyTooLarge(
                f"bodies[{index}] has {lengths[index]} bytes; the limit is"
                f" {limits.body_bytes_max} (body_bytes_max)"
            )
        if delays is None:
            one_ms = 0 if delay is None else duration_ms(delay, "delay")
            delays_ms = [one_ms] * len(found)
        elif delay is not None:
            raise BadRequest("delay and delays are given; give one of them")
        elif isinstance(delays, str):  # its characters would be durations
            raise BadRequest(f"delays must be a list of durations, not {shown(delays)}")
        else:
            delays_ms = _all_ms(list(delays))
        if len(delays_ms) != len(found):
            raise BadRequest(f"delays has {len(delays_ms)} elements, but there are {len(found)}")
        if delays_ms and max(delays_ms) > limits.delay_ms_max:
            index = next(i for i, ms in enumerate(delays_ms) if ms > limits.delay_ms_max)
            raise DueTooFar(
                f"delays[{index}] is {delays_ms[index]} ms; the limit is {limits.delay_ms_max}"
                " ms (the daemon's delay_max_s)"
            )
        return Columns(name, found, delays_ms, lengths)

    def packed(
        self, topic: str, body: bytes, encoding: Any, field: str, *, repeatable: bool = False
    ) -> tuple[bytes, str | None]:
        """A body as it goes out, and what it is then. Raises BadRequest for what is no encoding."""
        if encoding is not None:
            encoding = ENCODING.check(encoding, f"{field}.encoding", self.limits)
        if self.codec is None:
            return body, encoding
        return self.codec.pack(topic, body, encoding, repeatable=repeatable)

    def name(self, value: Any, field: str) -> str:
        """The checked name of a topic or group."""
        if type(value) is str and value in self._names:
            return value
        if not isinstance(value, str) or not _NAME.fullmatch(value):
            raise BadRequest(
                f"{field} must be 1 to 255 of A-Z a-z 0-9 . _ : / -, not {shown(value)}"
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
                raise BadRequest(f"{field} has delay_level and delay or at; give one of them")
            kind = TaskFields.field("delay_level").kind
            level = kind.check(task.delay_level, f"{field}.delay_level", self.limits)
            options["delay_level"] = level
            return None
        if task.at is not None:
            if task.delay is not None:
                raise BadRequest(f"{field} has delay and at; give one of them")
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
    """Check what options say of one another, and add the rule, which goes with a key."""
    check_options(options, field)
    if task.if_pending is not None:
        rule = task_rule_wire(task.if_pending, task.key, f"{field}.if_pending")
        options["if_pending"] = rule


def size_of(tasks: Iterable[WireTask]) -> int:
    """How many bytes tasks take in a frame, at most."""
    return sum(
        len(wire[0]) + len(wire[1]) + PLAIN_BYTES + (len(encode(wire[3])) if len(wire) == 4 else 0)
        for wire in tasks
    )


def frame_slices(sizes: Sequence[int], limits: Limits, count_max: int) -> Iterable[tuple[int, int]]:
    """(start, end) of the tasks for each frame."""
    bytes_max = limits.frame_bytes_max - FRAME_BYTES
    if 0 < len(sizes) <= count_max and sum(sizes) <= bytes_max:
        yield 0, len(sizes)
        return
    start = size = 0
    for index, one in enumerate(sizes):
        size += one
        if size > bytes_max or index - start >= count_max:
            yield start, index
            start, size = index, one
    if start < len(sizes):
        yield start, len(sizes)


def due_of(wire: WireTask, accepted_ms: int, levels_ms: Sequence[int]) -> int:
    """When a task is due that the daemon, whose delay levels are ``levels_ms``, accepted at
    ``accepted_ms``; the past counts as now."""
    delay_ms = wire[2]
    if delay_ms is None:
        level = wire[3].get("delay_level")
        if level is not None:
            return accepted_ms + delay_of_level(levels_ms, level)
        due_ms: int = wire[3]["due_ms"]
        return max(accepted_ms, due_ms)
    return accepted_ms + int(delay_ms)


def receipts(
    tasks: Sequence[WireTask],
    ids: Sequence[int],
    accepted_ms: int,
    levels_ms: Sequence[int],
    chosen_ms: Sequence[int | None] = (),
) -> list[Receipt]:
    """The receipts in the daemon's answer to ``tasks``; ``chosen_ms``: due times that the daemon
    has chosen. Raises ValueError when they don't match."""
    dues = [
        accepted_ms + task[2] if task[2] is not None else due_of(task, accepted_ms, levels_ms)
        for task in tasks
    ]
    if chosen_ms:
        pairs = zip(dues, chosen_ms, strict=True)
        dues = [due_ms if chosen is None else chosen for due_ms, chosen in pairs]
    if len(ids) != len(dues):
        raise ValueError(f"{len(ids)} ids for {len(dues)} tasks")
    return list(map(_new_receipt, zip(ids, dues, _STORED, strict=False)))


def merged_receipts(ids: Sequence[int], outcomes: Any) -> list[Receipt]:
    """The receipts in the daemon's answer to tasks with ``if_pending``. Raises ValueError or
    TypeError when it is none."""
    return [
        Receipt(task_id, int(due_ms), cast("Outcome", str(word)))
        for task_id, (word, due_ms) in zip(ids, outcomes, strict=True)
    ]


_STORED = repeat("stored")
_new_receipt = partial(tuple.__new__, Receipt)
_PLAIN_DELAYS = frozenset((type(None), int, float))


def _all_ms(delays: list[Any]) -> list[int]:
    if set(map(type, delays)) <= {int, float} and delays:
        # A NaN is in no order, and fails here, too.
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
    """For a function that takes ``**options: Unpack[block]``: its signature names each of them, for
    ``help``, for mocks, for whoever inspects it. A call of it costs nothing more."""

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        named = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=...,
                annotation=getattr(kind, "__forward_arg__", kind),
            )
            for name, kind in block.__annotations__.items()
        ]
        parameters = [*list(signature.parameters.values())[:-1], *named]
        told = signature.replace(parameters=parameters)
        function.__signature__ = told  # type: ignore[attr-defined]  # inspect reads it
        return function

    return decorate


def refuse_unknown(options: Mapping[str, object], block: Any, method: str) -> None:
    """Raises TypeError, as Python does, for a keyword that the block of ``method`` has not."""
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
    """What ``method`` was given, not checked yet. Raises as ``refuse_unknown``, which this need not
    call when all is well: it is done for each task."""
    try:
        return Task(topic, body, delay=delay, at=at, **options)
    except TypeError:
        refuse_unknown(options, TaskKeywords, method)
        raise
