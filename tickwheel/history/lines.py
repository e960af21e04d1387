"""The format of the history: records in the spool, and lines in segments.

A record is ``[kind, time_ms, …]`` with columns. It becomes one event, a JSON line, for each of its
tasks. ``docs/history.md`` describes them for readers; a test compares it with the tables below.

``Renderer`` is the hot part of the writer. It formats lines directly, from a record's columns, and
formats the common fields of a record's tasks once. Lines are ASCII, with all other characters
escaped, so any key or reason results in a valid line. This module uses no files.
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from json import dumps
from json.encoder import encode_basestring_ascii as quote
from typing import Any

from tickwheel.api.tasks import kept_options
from tickwheel.model.policies import RetryPolicy

SCHEMA_VERSION = 1


class EventKind(IntEnum):
    """The kind of a record, which is its first element. Each docstring lists the other elements."""

    ENQUEUED = 1
    """time_ms, producer, ids, dues, topics (one | each), options {index: …}, bodies | nil"""
    DELIVERED = 2
    """time_ms, topic, group, subscriber, ids, attempts, dues[, causes of lateness (one | each)]"""
    ACKED = 3
    """time_ms, topic, group, subscriber, epoch, ids, attempts, delivered_ms, ended; ``ended``: one
    or each, whether the ack ended the task (no other group still has it)"""
    NACKED = 4
    """time_ms, topic, group, subscriber, ids, attempts, next_ms, reasons"""
    LEASE_OVER = 5
    """time_ms, topic, group, subscriber, ids, attempts, reasons[, next_ms: its consumer died]"""
    RELEASED = 6
    """time_ms, topic, group, subscriber, ids, attempts"""
    DEAD = 7
    """time_ms, topic, group, ids, attempts, reasons"""
    ENDED = 8
    """time_ms, topic, group | nil, "cancelled" | "expired" | "deleted" | "filtered", ids, ended
    (nil without a group)[, reason]"""
    RESCHEDULED = 9
    """time_ms, topic, ids, dues[, places in the order]"""
    REQUEUED = 10
    """time_ms, topic, group, ids[, the tasks' new ttl_ms]"""
    GROUP = 11
    """time_ms, topic, group | nil, "created" | "deleted" | "configured" | "reset", details"""
    DAEMON = 12
    """time_ms, "started" | "stopped" | "clock_set_back", details"""
    DROPPED = 13
    """time_ms, count[, reason]"""
    REPLACED = 14
    """time_ms, producer, ids, dues, topics (one | each), options {index: …}, bodies | nil,
    places in the order | nil"""
    MERGED = 15
    """time_ms, producer, topic, "kept" | "rejected", ids"""
    SCHEDULE = 16
    """time_ms, topic, schedule, "put" | "paused" | "resumed" | "deleted", state, body | nil"""
    OCCURRENCE = 17
    """time_ms, topic, schedule, [[planned_ms, outcome, id, count], …], state"""

    TRANSACTION = 18
    """time_ms, producer, transaction, "prepared" | "committed" | "rolled_back" | "checked" |
    "parked", tasks, first id | 0, details"""
    OVERTAKEN = 19
    """time_ms, topic, group, ids, attempts, the newer task"""
    RECORD = 20
    """time_ms, topic | nil, group | nil, name of the kind, "put" | "dropped", fields | {"key"}"""


ENDINGS = ("cancelled", "expired", "deleted", "filtered")
GROUP_EVENTS = {
    "created": "group_created", "deleted": "group_deleted", "configured": "group_configured",
    "reset": "group_reset",
}  # fmt: skip
RECORD_EVENTS = {"put": "record_put", "dropped": "record_dropped"}
CLOCK_SET_BACK = "clock_set_back"
DAEMON_EVENTS = ("started", "stopped", CLOCK_SET_BACK)
SCHEDULE_EVENTS = {
    "put": "schedule_put", "paused": "schedule_paused", "resumed": "schedule_resumed",
    "deleted": "schedule_deleted",
}  # fmt: skip
TRANSACTION_EVENTS = {
    what: f"transaction_{what}"
    for what in ("prepared", "committed", "rolled_back", "checked", "parked")
}
OCCURRENCE_EVENTS = {
    "fired": "occurrence_fired", "run": "occurrence_fired", "backfill": "occurrence_fired",
    "missed": "occurrence_skipped", "overlap": "occurrence_skipped", "queued": "occurrence_queued",
}  # fmt: skip
"""Outcome of an occurrence → name of its event."""
EVENTS = (
    "enqueued", "replaced", "kept", "rejected", "overtaken", "rescheduled", "cancelled",
    "delivered", "acked", "nacked", "lease_over", "released", "dead", "requeued", "expired",
    "deleted", "filtered", *GROUP_EVENTS.values(), *DAEMON_EVENTS, "dropped",
    *SCHEDULE_EVENTS.values(), *dict.fromkeys(OCCURRENCE_EVENTS.values()),
    *TRANSACTION_EVENTS.values(), *RECORD_EVENTS.values(),
)  # fmt: skip
NAMES = {"properties": "props", "trace": "traceparent"}
"""Option of a task → its name in a line, where that differs."""
TASK_OPTIONS = (
    "key", "tag", "props", "priority", "ttl_ms", "retry", "order_id", "within_ms", "asked_ms",
    "order_key", "replayed", "traceparent", "encoding", "shard_by",
)  # fmt: skip
"""Names of a task's options, ordered as in records and ``TaskOptions``."""
_SEPARATE_OPTIONS = ("order_id", "replayed")
"""Options that are written separately."""
_MAPS = ("props", "retry")
_WRITTEN = sorted(
    (name for name in TASK_OPTIONS if name not in _SEPARATE_OPTIONS), key=lambda name: name in _MAPS
)
"""Options in the order of a line, maps last."""
FIELDS = (
    "v", "time_ms", "event", "task_id", "topic", "group", "key", "tag", "due_ms", "attempt",
    "lateness_ms", "cause", "ack_ms", "ended", "subscriber", "producer", "reason", "trace", "body",
    *(name for name in _WRITTEN if name not in ("key", "tag")), "replay_of",
    "replay_to", "since_ms", "since_id", "order_id", "settings", "clean", "details", "count",
    "schedule", "planned_ms", "next_ms", "runs", "queued_ms", "transaction", "node", "shard",
    "epoch", "seq", "synthetic",
)  # fmt: skip


def begins_set_back(records: Sequence[Any]) -> bool:
    """Return whether the first record notes that the clock was set back."""
    first = records[0] if records else None
    return type(first) is list and first[0:3:2] == [EventKind.DAEMON, CLOCK_SET_BACK]


def policy_map(value: object) -> dict[str, Any]:
    """Return a retry policy as a map in wire format. Raise TypeError for any other value."""
    if not isinstance(value, RetryPolicy):
        raise TypeError(f"a record cannot contain a {type(value).__name__}")
    return value.to_map()


# --- records as lines ------------------------------------------------------------------------


MALFORMED = (TypeError, ValueError, IndexError, KeyError, AttributeError)
"""Errors that ``render`` raises for a malformed record."""
_ENDED = {None: "", True: ',"ended":true', False: ',"ended":false'}


class Renderer:
    """Renders the lines of one epoch of a shard on one node."""

    def __init__(self, node: str, shard: int, epoch: int) -> None:
        self._end = f',"node":{quote(node)},"shard":{shard},"epoch":{epoch},"seq":'
        self._kinds: dict[int, Callable[[list[Any], int], Iterable[str]]] = {
            kind: getattr(self, f"_{kind.name.lower()}") for kind in EventKind
        }
        """Kind of a record → the method that renders it and has its name."""

    def render(self, record: list[Any], seq: int) -> list[str]:
        """Return the lines of a record's events, numbered from ``seq`` on. Raise MALFORMED."""
        if type(record[1]) is not int:
            raise TypeError("the time is not a whole number")
        return list(self._kinds[record[0]](record, seq))

    # --- producers ---------------------------------------------------------------------------

    def _replaced(self, record: list[Any], seq: int) -> Iterable[str]:
        *task, orders = record
        return self._enqueued(task, seq, "replaced", orders)

    def _merged(self, record: list[Any], seq: int) -> Iterable[str]:
        _, time_ms, producer, topic, outcome, ids, *_ = record
        if outcome not in ("kept", "rejected"):
            raise ValueError(f"{outcome!r} is not 'kept' or 'rejected'")
        end = f',"producer":{quote(producer)}' if producer else ""
        return self._task_lines((time_ms, outcome, topic, None), ids, seq, end=end)

    def _enqueued(
        self,
        record: list[Any],
        seq: int,
        event: str = "enqueued",
        orders: Sequence[int] | None = None,
    ) -> Iterable[str]:
        _, time_ms, producer, ids, dues, topics, options, bodies, *_ = record
        end = (f',"producer":{quote(producer)}' if producer else "") + self._end
        start = f'{_start(time_ms, event)},"task_id":"'
        numbers = range(seq, seq + len(ids))
        if not (options or bodies is not None or orders) and isinstance(topics, str):
            middle = f'","topic":{quote(topics)},"due_ms":'
            return [
                f"{start}{i:d}{middle}{due:d}{end}{n}}}\n"
                for i, due, n in zip(ids, dues, numbers, strict=True)
            ]
        quoted = {name: quote(name) for name in set(_column(topics, 1))}
        extras = [""] * len(ids)
        for index, task_options in (options or {}).items():
            extras[index] = _options(task_options)
        if bodies is not None:
            for index, body in enumerate(bodies):
                extras[index] += f',"body":"{b64encode(body).decode()}"'
        for index, place in enumerate(orders or ()):
            extras[index] += f',"order_id":"{place:d}"'
        return [
            f'{start}{i:d}","topic":{quoted[topic]},"due_ms":{due:d}{extra_fields}{end}{n}}}\n'
            for i, topic, due, extra_fields, n in zip(
                ids, _column(topics, len(ids)), dues, extras, numbers, strict=True
            )
        ]

    def _overtaken(self, record: list[Any], seq: int) -> Iterable[str]:
        _, time_ms, topic, group, ids, attempts, newer_id, *_ = record
        heading, end = (time_ms, "overtaken", topic, group), f',"details":{{"by":"{newer_id:d}"}}'
        return self._task_lines(
            heading,
            ids,
            seq,
            [f',"attempt":{attempt:d}' for attempt in _column(attempts, len(ids))],
            end=end,
        )

    def _rescheduled(self, record: list[Any], seq: int) -> Iterable[str]:
        _, time_ms, topic, ids, dues, *extras = record
        columns = [_whens(dues)]
        if extras and extras[0]:
            columns.append([f',"order_id":"{place:d}"' for place in extras[0]])
        return self._task_lines((time_ms, "rescheduled", topic, None), ids, seq, *columns)

    # --- consumers ---------------------------------------------------------------------------

    def _delivered(self, record: list[Any], seq: int) -> Iterable[str]:
        _, time_ms, topic, group, subscriber, ids, attempts, dues, *extras = record
        start, middle = self._task(time_ms, "delivered", topic, group)
        middle += ',"due_ms":'
        end = _subscriber_field(subscriber) + self._end
        attempts = _column(attempts, len(ids))
        if not extras and attempts.count(1) == len(ids):
            first = ',"attempt":1,"lateness_ms":'
            lates = [time_ms - due if time_ms > due else 0 for due in dues]
            return [
                f"{start}{i:d}{middle}{due:d}{first}{late}{end}{n}}}\n"
                for n, (i, due, late) in enumerate(zip(ids, dues, lates, strict=True), seq)
            ]
        causes = _column(extras[0] if extras else None, len(ids))
        columns = zip(ids, attempts, dues, causes, strict=True)
        return [
            f'{start}{i:d}{middle}{due:d},"attempt":{attempt:d}'
            + (f',"lateness_ms":{max(0, time_ms - due)}' if attempt == 1 else "")
            + (f',"cause":{quote(cause)}' if cause else "")
            + f"{end}{n}}}\n"
            for n, (i, attempt, due, cause) in enumerate(columns, seq)
        ]

    def _acked(self, record: list[Any], seq: int) -> Iterable[str]:
        _, time_ms, topic, group, subscriber, _, ids, attempts, delivered, ended, *_ = record
        start, middle = self._task(time_ms, "acked", topic, group)
        middle += ',"attempt":'
        end = _subscriber_field(subscriber) + self._end
        attempts, delivered = _column(attempts, len(ids)), _column(delivered, len(ids))
        if type(ended) is list or None in delivered or 0 in delivered:
            # 0: the delivery preceded a restart, so its time is unknown.
            tooks = [f',"ack_ms":{max(0, time_ms - at_ms)}' if at_ms else "" for at_ms in delivered]
            lasts = [_ENDED[last] for last in _column(ended, len(ids))]
            columns = zip(ids, attempts, tooks, lasts, strict=True)
            return [
                f"{start}{i:d}{middle}{attempt:d}{took}{last}{end}{n}}}\n"
                for n, (i, attempt, took, last) in enumerate(columns, seq)
            ]
        end = _ENDED[ended] + end
        took = [time_ms - at_ms if time_ms > at_ms else 0 for at_ms in delivered]
        return [
            f'{start}{i:d}{middle}{attempt:d},"ack_ms":{ms}{end}{n}}}\n'
            for n, (i, attempt, ms) in enumerate(zip(ids, attempts, took, strict=True), seq)
        ]

    def _nacked(self, record: list[Any], seq: int) -> Iterable[str]:
        _, time_ms, topic, group, subscriber, ids, attempts, dues, reasons, *_ = record
        heading = time_ms, "nacked", topic, group
        return self._ended_deliveries(heading, subscriber, (ids, attempts, reasons), seq, dues)

    def _lease_over(self, record: list[Any], seq: int) -> Iterable[str]:
        _, time_ms, topic, group, subscriber, ids, attempts, reasons, *extras = record
        heading, columns = (time_ms, "lease_over", topic, group), (ids, attempts, reasons)
        return self._ended_deliveries(heading, subscriber, columns, seq, *extras[:1])

    def _released(self, record: list[Any], seq: int) -> Iterable[str]:
        _, time_ms, topic, group, subscriber, ids, attempts, *extras = record
        heading, columns = (time_ms, "released", topic, group), (ids, attempts, None)
        return self._ended_deliveries(heading, subscriber, columns, seq, *extras[:1])

    def _dead(self, record: list[Any], seq: int) -> Iterable[str]:
        _, time_ms, topic, group, ids, attempts, reasons, *_ = record
        return self._ended_deliveries(
            (time_ms, "dead", topic, group), "", (ids, attempts, reasons), seq
        )

    def _ended_deliveries(
        self, heading: tuple[int, str, str, str | None], subscriber: str | None,
        columns: tuple[Sequence[int], Any, Any], seq: int,
        dues: Sequence[int | None] | None = None,
    ) -> Iterable[str]:  # fmt: skip
        """Return the lines of ended deliveries. ``columns``: ids, attempts and reasons."""
        ids, attempts, reasons = columns
        tries = [f',"attempt":{attempt:d}' for attempt in _column(attempts, len(ids))]
        whys = [_reason_fields(reason) if reason else "" for reason in _column(reasons, len(ids))]
        whens = () if dues is None else (_whens(dues),)
        return self._task_lines(
            heading, ids, seq, *whens, tries, whys, end=_subscriber_field(subscriber)
        )

    # --- ends, groups, the daemon --------------------------------------------------------------

    def _ended(self, record: list[Any], seq: int) -> Iterable[str]:
        _, time_ms, topic, group, event, ids, ended, *extras = record
        if event not in ENDINGS:
            raise ValueError(f"{event!r} is not an event that ends a task")
        lasts = [_ENDED[last] for last in _column(ended, len(ids))]
        whys = [[_reason_fields(reason)] * len(ids) for reason in extras[:1]]
        return self._task_lines((time_ms, event, topic, group), ids, seq, lasts, *whys)

    def _requeued(self, record: list[Any], seq: int) -> Iterable[str]:
        _, time_ms, topic, group, ids, *extras = record
        columns = [[f',"ttl_ms":{extras[0]:d}'] * len(ids)] if extras else []
        return self._task_lines((time_ms, "requeued", topic, group), ids, seq, *columns)

    def _group(self, record: list[Any], seq: int) -> Iterable[str]:
        _, time_ms, topic, group, change, details, *_ = record
        extras = dict(details)
        since = {name: extras.pop(name, None) for name in ("since_ms", "since_id")}
        fields = {"topic": topic, "group": group or None, **since, "settings": extras or None}
        return self._rare_event(time_ms, GROUP_EVENTS[change], fields, seq)

    def _record(self, record: list[Any], seq: int) -> Iterable[str]:
        _, time_ms, topic, group, kind, change, settings, *_ = record
        fields = {"topic": topic, "group": group, "settings": {"record": kind, **settings}}
        return self._rare_event(time_ms, RECORD_EVENTS[change], fields, seq)

    def _daemon(self, record: list[Any], seq: int) -> Iterable[str]:
        _, time_ms, event, details, *_ = record
        if event not in DAEMON_EVENTS:
            raise ValueError(f"{event!r} is not an event of a daemon")
        fields = dict(details or {})
        clean = bool(fields.pop("clean")) if "clean" in fields else None
        return self._rare_event(time_ms, event, {"clean": clean, "details": fields or None}, seq)

    def _dropped(self, record: list[Any], seq: int) -> Iterable[str]:
        _, time_ms, count, *extras = record
        reason = extras[0] or None if extras else None
        return self._rare_event(time_ms, "dropped", {"reason": reason, "count": count}, seq)

    # --- schedules -----------------------------------------------------------------------------

    def _schedule(self, record: list[Any], seq: int) -> Iterable[str]:
        _, time_ms, topic, name, change, state, *extras = record
        fields = {"topic": topic}
        if (settings := state.get("settings")) is not None:
            fields["settings"] = settings = dict(settings)
            if (task := settings.pop("task", None)) is not None:
                settings["task"] = options_map(task)
        if extras and extras[0] is not None:
            fields["body"] = b64encode(extras[0]).decode()
        return self._rare_event(
            time_ms, SCHEDULE_EVENTS[change], fields | _progress(name, state), seq
        )

    def _occurrence(self, record: list[Any], seq: int) -> Iterable[str]:
        _, time_ms, topic, name, runs, state, *_ = record
        lines = []
        for number, (planned_ms, outcome, task, count) in enumerate(runs, seq):
            event = OCCURRENCE_EVENTS[outcome]
            is_fired = event == "occurrence_fired"
            fields = {
                "task_id": f"{task:d}" if task else None, "topic": topic, "planned_ms": planned_ms,
                "lateness_ms": max(0, time_ms - planned_ms) if is_fired else None,
                "reason": None if outcome in ("fired", "queued") else outcome,
                "count": count if count > 1 else None,
            }  # fmt: skip
            lines += self._rare_event(time_ms, event, fields | _progress(name, state), number)
        return lines

    # --- transactions --------------------------------------------------------------------------

    def _transaction(self, record: list[Any], seq: int) -> Iterable[str]:
        _, time_ms, producer, name, step, tasks, first_id, details, *_ = record
        fields = {
            "task_id": f"{first_id:d}" if first_id else None, "ack_ms": details.get("age_ms"),
            "producer": producer or None, "details": details, "count": tasks, "transaction": name,
        }  # fmt: skip
        return self._rare_event(time_ms, TRANSACTION_EVENTS[step], fields, seq)

    # --- lines ---------------------------------------------------------------------------------

    def _rare_event(
        self, time_ms: int, event: str, values: Mapping[str, Any], seq: int
    ) -> list[str]:
        """Return the line of a rare event, with those of its fields that are not None."""
        fields = (
            f',"{name}":{to_json(value)}' for name, value in values.items() if value is not None
        )
        return [f"{_start(time_ms, event)}{''.join(fields)}{self._end}{seq}}}\n"]

    def _task_lines(
        self, heading: tuple[int, str, str, str | None], ids: Sequence[int], seq: int,
        *columns: Sequence[str], end: str = "",
    ) -> list[str]:  # fmt: skip
        """Return a line for each task: its text from each column, then the common ``end``."""
        start, middle = self._task(*heading)
        end += self._end
        texts = map("".join, zip(*columns, strict=True)) if columns else [""] * len(ids)
        return [
            f"{start}{i:d}{middle}{text}{end}{n}}}\n"
            for n, (i, text) in enumerate(zip(ids, texts, strict=True), seq)
        ]

    def _task(self, time_ms: int, event: str, topic: str, group: str | None) -> tuple[str, str]:
        """Return the text before and after a task's id in a line."""
        return f'{_start(time_ms, event)},"task_id":"', f'"{_names(topic, group)}'


def to_json(value: Any) -> str:
    """Return compact JSON. Values that JSON cannot represent (NaN) become text."""
    try:
        return dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return dumps(_finite(value), separators=(",", ":"))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _start(time_ms: int, event: str) -> str:
    return f'{{"v":{SCHEMA_VERSION},"time_ms":{time_ms},"event":"{event}"'


def _names(topic: str, group: str | None) -> str:
    return f',"topic":{quote(topic)}' + (f',"group":{quote(group)}' if group else "")


def _subscriber_field(subscriber: str | None) -> str:
    return f',"subscriber":{quote(subscriber)}' if subscriber else ""


def _whens(dues: Sequence[int | None]) -> list[str]:
    return ["" if due is None else f',"due_ms":{due:d}' for due in dues]


def _column(value: Any, count: int) -> list[Any]:
    """Return a column with a value for each task. A single value applies to all tasks."""
    return value if type(value) is list else [value] * count


def _progress(name: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with the progress of a schedule."""
    return {"schedule": name} | {key: state.get(key) for key in ("next_ms", "runs", "queued_ms")}


def options_map(options: Sequence[Any]) -> dict[str, Any]:
    """Return the options that have values, by name."""
    named = dict(zip(TASK_OPTIONS, options, strict=False))
    return {
        n: value for n, value in named.items() if value is not None and (value or n != "priority")
    }


def _options(values: Sequence[Any]) -> str:
    """Return the optional fields of an enqueued task."""
    options = dict(zip(TASK_OPTIONS, values, strict=False))
    text = ""
    replayed = options.get("replayed")
    if replayed is not None:
        replay_of, replay_to, key = replayed
        options["key"] = key
        text = f',"replay_of":"{replay_of:d}","replay_to":{quote(replay_to)}'
    for name, write in _WRITERS:
        value = options.get(name)
        if value is not None and (value or name != "priority"):
            text += f',"{name}":{write(value)}'
    return text


def _number(value: int) -> str:
    return f"{value:d}"


_KINDS: dict[Any, Callable[[Any], str]] = {str: quote, int: _number}
_TYPES = {NAMES.get(option.name, option.name): option.kind.json for option, _ in kept_options()}
_WRITERS = [(name, _KINDS.get(_TYPES.get(name, int), to_json)) for name in _WRITTEN]
"""(option, function that writes it). Options that the daemon adds are numbers."""


def _reason_fields(reason: str) -> str:
    """Return the fields of a failure. The trace follows the first line of ``reason``."""
    summary, _, trace = reason.partition("\n")
    text = f',"reason":{quote(summary)}'
    return f'{text},"trace":{quote(trace)}' if trace else text
