"""Types of the HTTP API's requests and answers. Decoding and the OpenAPI document are derived from
them.

The types only check that each field has the right type and that no field is unknown. Bounds in the
schemas are documentation (``extra_json_schema``): the operations check them, with the same messages
as on TCP.

The second part reads tasks from JSON, or from a raw body with headers.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import repeat
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar, cast

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, defstruct

from tickwheel.api import tasks
from tickwheel.api.frames import REQUEST_MAX, SESSION_BYTES
from tickwheel.api.groups import GroupFields
from tickwheel.api.kinds import (
    NAME_PATTERN,
    POLICY,
    PROPERTY,
    RULE,
    FieldKind,
    Policy,
    Properties,
    Rule,
    Whole,
)
from tickwheel.api.shapes import Field
from tickwheel.api.times import moment_ms
from tickwheel.errors import BY_CODE, BadRequest, shown
from tickwheel.limits import Limits, delay_of_level
from tickwheel.model import policies
from tickwheel.model.kinds import PART_MAX
from tickwheel.model.policies import (
    DELAY_MS_MAX,
    DUES,
    FACTOR_MAX,
    REPLACES,
    RETRIES_MAX,
    RULE_FIELDS,
    STEPS_MAX,
    UNTIL,
    duration_ms,
    parse_policy,
    rule_wire,
)
from tickwheel.model.records import ID_STEP
from tickwheel.model.values import INTEGER_MAX, INTEGER_MIN, InvalidValue, members, whole_number
from tickwheel.server.generated import task_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tickwheel.server.shard.callers import Principal

_S = TypeVar("_S", bound=Struct)
REF = "#/components/schemas/{name}"
NULL_REMOVES_SETTING = "x-null-removes-setting"
"""Marks a field in which null removes a setting. The document does not contain the mark."""


def _shape(description: str, **schema: Any) -> Meta:
    return Meta(description=description or None, extra_json_schema=schema or None)


Name = Annotated[
    str, _shape("1 to 255 characters from A-Z a-z 0-9 . _ : / -", pattern=NAME_PATTERN)
]
Id = Annotated[str, _shape("A task's id: a whole number as text.", pattern="^[0-9]{1,19}$")]
Receipt = Annotated[str, _shape("The opaque receipt of a delivery, which settles it.")]
Milliseconds = Annotated[int, _shape("Milliseconds.", minimum=0)]
Moment = Annotated[int, _shape("Milliseconds since 1970 by the daemon's clock.")]
At = Annotated[datetime, Meta(tz=True, description="The due time in RFC 3339, with an offset.")]
Span = Annotated[str | float, Meta(extra_json_schema={"$ref": REF.format(name="Duration")})]
Property = tasks.Value
Text = Annotated[str, _shape("The body as text.")]
Base64 = Annotated[bytes, Meta(description="The body in base64, if it is not text.")]


class In(Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of requests, which reject unknown fields."""


class Out(Struct, kw_only=True):
    """Base of answers, to which newer daemons can add fields."""


def description_of(field: Field) -> str:
    """Return the description of a declared field for JSON, with its unit and limits."""
    return field.kind.described(as_document_text(field.text))


def as_document_text(text: str) -> str:
    """Return a description or docstring in the notation of the OpenAPI document."""
    return " ".join(re.sub(r"\bNone\b", "null", text).replace("``", "`").split())


def _meta(field: Field, **schema: Any) -> Meta:
    """Return the metadata of a declared field; ``schema`` extends its schema."""
    kind = field.kind
    schema = kind.schema() | schema
    if kind.json_name:
        schema["$ref"] = REF.format(name=kind.json_name)
    elif isinstance(kind, Properties):
        schema["additionalProperties"] = {"$ref": REF.format(name=PROPERTY.json_name)}
    return _shape(description_of(field), **schema)


def annotated_type(kind: Any, field: Field, *alternatives: Any, **schema: Any) -> Any:
    """Return ``kind``, the type of a declared field, with the field's metadata. Values can also
    have one of the types ``alternatives``; ``schema`` extends the field's schema."""
    meta = _meta(field, **schema)
    is_struct = isinstance(kind, type) and issubclass(kind, Struct)
    result: Any = kind if is_struct else Annotated[Any if kind is object else kind, meta]
    for alternative in alternatives:
        result = result | alternative
    return Annotated[result, meta] if is_struct else result  # msgspec ignores it inside a union


def _with_group_settings(own: type[_S]) -> type[_S]:
    """Return the type ``own``, extended by the settings of a group."""
    fields: list[Any] = [
        (field.name, annotated_type(field.kind.json, field, type(None)), None)
        for field in GroupFields.fields()
    ]
    extended = defstruct(own.__name__, fields, bases=(own,), namespace={"__doc__": own.__doc__})
    return cast("type[_S]", extended)


# --- named unions of the document ----------------------------------------------------------------


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": REF.format(name=name)}


_DELAY = {"type": "integer", "minimum": 0, "maximum": DELAY_MS_MAX}
_POLICY_NUMBERS: dict[str, dict[str, Any]] = {
    "base_ms": _DELAY | {"description": "The delay before the first retry, in milliseconds."},
    "factor": {
        "description": "The factor between each delay and the next.",
        "type": "number",
        "minimum": 1,
        "maximum": FACTOR_MAX,
    },
    "cap_ms": _DELAY | {"description": "The longest delay, in milliseconds; at least base_ms."},
    "delay_ms": _DELAY | {"description": "The delay before every retry, in milliseconds."},
    "delays_ms": {
        "description": "The delays before the retries, in milliseconds and in order. The last delay"
        " applies to all further retries.",
        "type": "array",
        "items": _DELAY,
        "minItems": 1,
        "maxItems": STEPS_MAX,
    },
    "retries": {
        "description": "The maximum number of retries after the first attempt. If the last retry"
        " fails, the task becomes a dead letter.",
        "type": "integer",
        "minimum": 0,
        "maximum": RETRIES_MAX,
    },
    "jitter": {
        "description": "The maximum fraction by which a delay is randomly shortened or lengthened.",
        "type": "number",
        "minimum": 0,
        "maximum": 1,
    },
}
"""Schemas of a retry policy's numbers, by their names in ``policies.FIELDS``."""
_KINDS = {
    "exponential": "Each delay is the previous one multiplied by a factor, up to a longest delay.",
    "fixed": "The same delay before every retry.",
    "table": "A list of delays.",
    "none": "No retry: the first failure makes the task a dead letter.",
}
_ACTIONS = {
    "add": "Store the task in addition to pending tasks with its key.",
    "keep": "Keep the pending task unchanged and do not store the new task.",
    "replace": "Replace the pending task with the new task.",
    "reject": "Refuse the new task.",
}
_TEN_YEARS = {"type": "integer", "minimum": 1, "maximum": DELAY_MS_MAX}
_RULE: dict[str, dict[str, Any]] = {
    "window_ms": _TEN_YEARS
    | {
        "description": "How long a task counts as pending after its enqueue, in milliseconds."
        " Default: until the task ends."
    },
    "unique_until": {
        "description": "When a task stops counting as pending: when it is finished, or when a"
        " consumer has started it. Default: finished.",
        "type": "string",
        "enum": list(UNTIL),
    },
    "replaces": {
        "description": "Which part of the pending task is replaced: the body with all options, the"
        " due time, or both. Default: both.",
        "type": "string",
        "enum": list(REPLACES),
    },
    "due": {
        "description": "Which due time applies: the new, the later or the earlier of the two."
        " Default: new.",
        "type": "string",
        "enum": list(DUES),
    },
    "max_wait_ms": _TEN_YEARS
    | {
        "description": "The latest due time of a repeatedly replaced task, in milliseconds after"
        " its first enqueue. Default: no limit."
    },
}
"""Schemas of a coalescing rule's fields, by their names in ``policies.RULE_FIELDS``."""


def _tagged(
    tag: str,
    name: str,
    kinds: dict[str, str],
    fields: Mapping[str, Sequence[str]],
    field_schemas: Any,
) -> dict[str, Any]:
    """Return the schemas of objects that the field ``tag`` distinguishes, and of their union."""
    schemas: dict[str, Any] = {}
    for word in fields:
        constant = {"description": f'Always "{word}".', "type": "string", "const": word}
        schemas[f"{word.title()}{name}"] = {
            "title": f"{word.title()}{name}",
            "description": kinds[word],
            "type": "object",
            "properties": {tag: constant} | {field: field_schemas[field] for field in fields[word]},
            "required": [tag],
        }
    mapping = {word: f"{word.title()}{name}" for word in fields}
    schemas[name] = {
        "title": name,
        "description": f"One of these objects, distinguished by {tag}.",
        "oneOf": [_ref(title) for title in mapping.values()],
        "discriminator": {
            "propertyName": tag,
            "mapping": {word: REF.format(name=title) for word, title in mapping.items()},
        },
    }
    return schemas


def _rule_fields() -> dict[str, list[str]]:
    """Return the HTTP fields of a rule by its action. Each duration has two fields."""
    return {
        action: [
            form
            for name in names
            for form in ([name.removesuffix("_ms"), name] if name.endswith("_ms") else [name])
        ]
        for action, names in RULE_FIELDS.items()
    }


def _spans() -> dict[str, Any]:
    """Return the schemas of the fields that contain a rule's durations in readable form."""
    return {
        name.removesuffix("_ms"): {
            "description": f"{name} as a duration. Only one of the two can be set.",
            **_ref("Duration"),
        }
        for name in _RULE
        if name.endswith("_ms")
    }


NAMED: dict[str, Any] = {
    "Duration": {
        "title": "Duration",
        "description": 'A duration: text such as "5m" or "1h30m", or a number of seconds.',
        "anyOf": [{"type": "string"}, {"type": "number"}],
    },
    PROPERTY.json_name: {
        "title": PROPERTY.json_name,
        "description": "The value of a property: text of up to"
        f" {Limits().property_value_bytes_max} bytes, a whole number of 64 bits, another finite"
        " number, or a boolean.",
        "anyOf": [
            {"type": "string"},
            {"type": "integer", "minimum": INTEGER_MIN, "maximum": INTEGER_MAX},
            {"type": "number"},
            {"type": "boolean"},
        ],
    },
    POLICY.json_name: {
        "title": POLICY.json_name,
        "description": "A retry policy: the name of a policy that the daemon knows, text such as"
        ' "fixed:delay=5s,retries=3", or an object.',
        "anyOf": [{"type": "string"}, _ref("RetryPolicy")],
    },
    **_tagged("kind", "RetryPolicy", _KINDS, policies.FIELDS, _POLICY_NUMBERS),
    RULE.json_name: {
        "title": RULE.json_name,
        "description": "How a task is coalesced with a pending task that has the same key: the name"
        " of an action, or an object.",
        "anyOf": [_ref("PendingAction"), _ref("PendingRule")],
    },
    "PendingAction": {
        "title": "PendingAction",
        "description": " ".join(f"{word}: {text}" for word, text in _ACTIONS.items()),
        "type": "string",
        "enum": list(_ACTIONS),
    },
    **_tagged("action", "PendingRule", _ACTIONS, _rule_fields(), _RULE | _spans()),
}
"""Schemas that several fields share and that cannot be derived from a type."""


# --- tasks ---------------------------------------------------------------------------------------


class When(In):
    """When a task is due, set by at most one of these fields. Default: immediately."""

    delay: Annotated[Span, _shape("The delay from now, as a duration.")] | None = None
    delay_ms: Annotated[Milliseconds, _shape("The delay from now, in milliseconds.")] | None = None
    due_ms: Annotated[Moment, _shape("The due time, in milliseconds since 1970.")] | None = None
    at: At | None = None


def _field_type(field: Field) -> Any:
    """Return the type of a task's field, with the field's metadata."""
    return Annotated[field.kind.json, _meta(field)]


def _option_fields() -> Iterable[tuple[str, Any, Any]]:
    """Yield the fields of a task except topic, body and due time. Each duration has two fields."""
    for field in tasks.TaskFields.fields():
        kind = _field_type(field)
        if field.kind.unit:
            text = f"{field.name} as a duration. Only one of the two can be set."
            yield field.python, Annotated[Span, _shape(text)] | None, None
        yield field.name, kind | None if field.may_be_none else kind, field.default


def _delivered_fields() -> Iterable[tuple[str, Any, Any]]:
    """Yield the fields of a task's options in a delivery."""
    for field, _ in tasks.kept_options(delivered=True):
        yield field.name, annotated_type(field.kind.json, field) | UnsetType, UNSET


if TYPE_CHECKING:

    class Options(When):
        delay_level: int | None = None

    class DeliveredOptions(Out):
        """Stand-in for type checkers."""

else:
    Options = defstruct("Options", list(_option_fields()), bases=(When,), kw_only=True)
    DeliveredOptions = defstruct(
        "DeliveredOptions", list(_delivered_fields()), bases=(Out,), kw_only=True
    )


class TaskFields(Options):
    """All fields of a task except its topic."""

    body: Text | None = None
    body_base64: Base64 | None = None


class NewTask(TaskFields, kw_only=True):
    """A task to enqueue."""

    topic: Annotated[Name, _shape("The topic of the task.")]


class TransactionRef(In):
    """The transaction of half tasks. A request with the same ``part`` is a resend."""

    id: Annotated[Name, _shape("The name of the transaction.")]
    group: Annotated[
        Name, _shape("The producer group, which is asked for the outcome of the transaction.")
    ]
    part: Annotated[
        int,
        _shape("The number of this request, counted from 1.", minimum=1, maximum=PART_MAX),
    ]
    count_from: Annotated[
        str,
        _shape("The start of delays: this request, or the commit.", enum=["enqueue", "commit"]),
    ] = "enqueue"


class NewTasks(In, kw_only=True):
    """Several tasks, which are enqueued atomically. With a ``transaction``, they become tasks when
    it is committed."""

    transaction: Annotated[TransactionRef | None, _shape("The transaction of the tasks.")] = None
    tasks: Annotated[list[NewTask], _shape("The tasks: 1 to 16,384.", minItems=1, maxItems=16_384)]


class OneOrMany(TaskFields):
    """Both forms of an enqueue, which the document describes separately."""

    topic: Name | None = None
    tasks: list[NewTask] | None = None
    transaction: TransactionRef | None = None


class Accepted(Out):
    """An enqueued task, which is durable and will be delivered at ``due_ms`` or later."""

    id: Id
    due_ms: Annotated[
        Moment | None,
        _shape(
            "When the task is due, in milliseconds since 1970. It is null if the request is a"
            " resend and its task, which had a due window, has already ended."
        ),
    ]
    outcome: Annotated[
        str,
        _shape(
            "stored; or kept, replaced or rejected because of if_pending of the task or its topic."
            " In these cases, id and due_ms belong to the pending task."
        ),
    ] = "stored"


class AcceptedMany(Out):
    """The enqueued tasks in the order of the request."""

    tasks: Annotated[list[Accepted], _shape("The outcome of each task.")]


class Prepared(Out):
    """Stored half tasks, which have no ids before the commit."""

    transaction: Annotated[Name, _shape("The name of the transaction.")]
    part: Annotated[int, _shape("The number of the request.")]
    tasks: Annotated[int, _shape("The number of half tasks in the request.")]


Ids = Annotated[list[Id], _shape("The ids of the tasks: 1 to 16,384.", minItems=1, maxItems=16_384)]


class Move(When):
    """The new due time of a task, set by one of these fields."""

    shift_ms: (
        Annotated[
            int, _shape("Milliseconds to add to the due time; negative values move it earlier.")
        ]
        | None
    ) = None


class RescheduleIn(Move, kw_only=True):
    """The new due time of several tasks."""

    ids: Ids


# --- deliveries ----------------------------------------------------------------------------------


GroupName = Annotated[Name, _shape('The group. Default: "default".')]
Lease = Annotated[
    Milliseconds,
    _shape("The duration of each lease, in milliseconds. Default: the daemon's setting."),
]


@_with_group_settings
class PullIn(In):
    """A request for up to ``max`` deliveries, answered when the first is available."""

    group: GroupName | None = None
    max: Annotated[int, _shape("The maximum number of deliveries.", minimum=1)] = 1
    wait_ms: Annotated[
        Milliseconds, _shape("The maximum wait for the first delivery, in milliseconds.")
    ] = 0
    lease_ms: Lease | None = None


class Delivery(DeliveredOptions, kw_only=True):
    """One delivery of a task."""

    id: Id
    receipt: Receipt
    due_ms: Annotated[Moment, _shape("When the task was due, in milliseconds since 1970.")]
    delivered_ms: Annotated[
        Moment, _shape("When the task was delivered, in milliseconds since 1970.")
    ]
    attempt: Annotated[int, _shape("The number of this delivery of the task, counted from 1.")]
    failures: Annotated[int, _shape("The number of failed attempts.")]
    deaths: Annotated[int, _shape("The number of consumers that died with the task.")]
    body: Text | UnsetType = UNSET
    body_base64: Base64 | UnsetType = UNSET
    replay_of: (
        Annotated[Id, _shape("The task that this one repeats after a reset of its group.")]
        | UnsetType
    ) = UNSET


class MadeGroup(Out):
    """A group that the pull created."""

    adopted: Annotated[
        int,
        _shape(
            "The number of tasks that were due before the topic had a group, now in this group."
        ),
    ]
    idle: Annotated[
        dict[str, int],
        _shape(
            "The number of tasks in each other group of the topic that has no subscriber and has"
            " finished no task since the daemon started."
        ),
    ]


class DeliveryList(Out):
    """The answer to a pull. It has no deliveries if none became available in time."""

    deliveries: Annotated[list[Delivery], _shape("The deliveries.")]
    new_group: (
        Annotated[MadeGroup, _shape("Present if this pull created the group.")] | UnsetType
    ) = UNSET


@_with_group_settings
class StreamQuery(In):
    """A subscription."""

    group: GroupName | None = None
    credit: Annotated[int, _shape("The maximum number of unsettled deliveries.", minimum=0)] = 100
    lease_ms: Lease | None = None
    ack: Annotated[
        str,
        _shape(
            "manual: the client settles each delivery; on_delivery: sending a delivery acks it.",
            enum=["manual", "on_delivery"],
        ),
    ] = "manual"
    broadcast: Annotated[
        bool, _shape("Whether to receive every due task while the stream is open, without a group.")
    ] = False


Receipts = Annotated[
    list[Receipt],
    _shape("The receipts of the deliveries: 1 to 16,384.", minItems=1, maxItems=16_384),
]
Reason = Annotated[str, _shape("The reason, shown to people who inspect the task.")]


class AckIn(In):
    """Deliveries to settle."""

    receipts: Receipts


class NackIn(AckIn):
    """Failed attempts to retry."""

    delay_ms: (
        Annotated[
            Milliseconds,
            _shape("The delay until the next attempt, in milliseconds. Default: the policy's."),
        ]
        | None
    ) = None
    reason: Reason | None = None


class RejectIn(AckIn):
    """Tasks that will never succeed."""

    reason: Reason | None = None


class SnoozeIn(AckIn, kw_only=True):
    """Tasks to postpone without counting a failure."""

    delay_ms: Annotated[Milliseconds, _shape("The delay until the next delivery, in milliseconds.")]


class ExtendIn(AckIn, kw_only=True):
    """Leases to extend to ``lease_ms`` from now."""

    lease_ms: Annotated[
        Milliseconds, _shape("The remaining duration of the leases from now, in milliseconds.")
    ]


class Settled(Out):
    """The outcome for each receipt, in the order of the request."""

    results: Annotated[
        list[str],
        _shape(
            "The new state of each delivery, or the reason for no change, such as stale or gone."
        ),
    ]


# --- dead letters --------------------------------------------------------------------------------


class DeadRef(In):
    """One dead letter."""

    id: Id
    group: Annotated[Name, _shape("The group that could not finish the task.")]


class DeadIn(In):
    """Dead letters."""

    items: Annotated[
        list[DeadRef], _shape("The dead letters: 1 to 16,384.", minItems=1, maxItems=16_384)
    ]


class RequeueIn(DeadIn, kw_only=True):
    """Dead letters to deliver again, with a new time to live if ``ttl_ms`` is set."""

    ttl_ms: (
        Annotated[Milliseconds, _shape("The new time to live from now, in milliseconds.")] | None
    ) = None


# --- the console ---------------------------------------------------------------------------------


class WatchQuery(In):
    """The interval of an overview stream."""

    every_ms: Annotated[
        int,
        _shape("The interval between overviews, in milliseconds.", minimum=500, maximum=60_000),
    ] = 1_000


Until = Annotated[
    Moment | None,
    _shape("When the login ends, in milliseconds since 1970; null if it does not end."),
]


class Session(Out):
    """The caller and its rights."""

    name: Annotated[str | None, _shape("The name of the caller; null without a login.")]
    is_login_needed: Annotated[bool, _shape("Whether the daemon requires a token.")]
    until_ms: Until
    rights: Annotated[
        dict[str, list[str]], _shape("The topic patterns of each right, by the right's name.")
    ]


class SessionLink(Out):
    """A code that works as the token of a single login."""

    code: Annotated[str | None, _shape("The code; null if no login is needed.")]
    until_ms: Until


_UNCERTAIN = ", ".join(code for code, kind in BY_CODE.items() if kind.retryable and kind.uncertain)


class Problem(Out, omit_defaults=True):
    """An error as defined by RFC 9457. docs/protocol.md lists the codes."""

    type: Annotated[str, _shape("The code as a URI: urn:tickwheel:error:CODE.")]
    title: Annotated[str, _shape("The meaning of the code.")]
    status: Annotated[int, _shape("The HTTP status of the answer.")]
    detail: Annotated[str, _shape("The cause, with the field, the limit and the value.")]
    code: Annotated[
        str, _shape("The code for programs. Its meaning never changes; new codes can be added.")
    ]
    retryable: Annotated[
        bool,
        _shape(
            "Whether the same request can succeed later. No part of it was stored, except perhaps"
            f" after {_UNCERTAIN}."
        ),
    ]
    active: (
        Annotated[str, _shape("The address of the active daemon; only for not_active.")] | UnsetType
    ) = UNSET
    active_http: (
        Annotated[str, _shape("The URL of the active daemon's HTTP API; only for not_active.")]
        | UnsetType
    ) = UNSET


class NoQuery(In):
    """An empty query string."""


HEADER = b"tickwheel-"
PROPERTY_HEADER = b"tickwheel-property-"
IDEMPOTENCY_KEY_LENGTH_MAX = 255
MAPS = [field.name for field in tasks.TaskFields.fields() if isinstance(field.kind, (Policy, Rule))]
"""Fields whose value is a string or a map. In a header, the map is written as JSON."""
_INTEGERS = [field.name for field in tasks.TaskFields.fields() if isinstance(field.kind, Whole)]
_NUMBERS = ("delay_ms", "due_ms", *_INTEGERS)


class ReadTask(NamedTuple):
    """A task in wire form, and the delay or the time that determines when it is due."""

    task: tuple[Any, ...]
    delay_ms: int | None
    due_ms: int | None

    def due(self, accepted_ms: int) -> int:
        """Return the due time, in ms, of a task accepted at ``accepted_ms``."""
        if self.delay_ms is not None:
            return accepted_ms + self.delay_ms
        return max(accepted_ms, self.due_ms or 0)


class StoredTasks(NamedTuple):
    """The stored tasks of an enqueue."""

    ids: Sequence[int]
    dues_ms: Sequence[int | None]
    outcomes: Sequence[str] | None = None
    """Outcome of each task, or None if all are stored."""

    def lines(self) -> list[bytes]:
        """Return a line of JSON for each task."""
        outcomes = repeat("stored") if self.outcomes is None else self.outcomes
        return [
            b'{"id":"%d","due_ms":%b,"outcome":"%b"}'
            % (task_id, b"null" if due_ms is None else b"%d" % due_ms, word.encode())
            for task_id, due_ms, word in zip(self.ids, self.dues_ms, outcomes, strict=False)
        ]


def stored_tasks(answer: tuple[Any, ...], tasks: Sequence[ReadTask]) -> StoredTasks:
    """Return the tasks that an exchange's answer to an enqueue describes. The answer contains the
    first id for a new request, all ids for a resend, or all ids and due times if the daemon chose
    these."""
    accepted_ms, first = answer[:2]
    if isinstance(first, int):
        ids: Sequence[int] = range(first, first + answer[2] * ID_STEP, ID_STEP)
    else:
        ids = first
        details = answer[2] if len(answer) > 2 else {}
        if "dues_ms" in details:
            return StoredTasks(ids, details["dues_ms"])
        if "outcomes" in details:  # (outcome, due time) of each task
            outcomes, dues_ms = zip(*details["outcomes"], strict=True)
            return StoredTasks(ids, dues_ms, outcomes)
    return StoredTasks(ids, [task.due(accepted_ms) for task in tasks])


def body_of(fields: TaskFields, field: str) -> bytes:
    """Return the body of a task. Raise BadRequest if both forms are set."""
    if fields.body is not None:
        if fields.body_base64 is not None:
            raise BadRequest(f"{field} must have either body or body_base64, not both")
        return fields.body.encode()
    return fields.body_base64 or b""


def due_of(fields: When, field: str) -> tuple[int | None, int | None]:
    """Return delay_ms and due_ms. Raise BadRequest if several fields set the due time."""
    delay_ms = fields.delay_ms
    if fields.delay is not None:
        delay_ms = span_ms(fields.delay, delay_ms, "delay", field)
    if fields.at is None:
        return delay_ms, fields.due_ms
    if fields.due_ms is not None:
        raise BadRequest(f"{field} must have only one of delay_ms, due_ms and at")
    return delay_ms, moment_ms(fields.at, "at")


def span_ms(written: str | float, ms: int | None, name: str, field: str) -> int:
    """Return, in milliseconds, the duration ``written``, which is text or a number of seconds.
    Raise BadRequest if it is invalid or ``ms`` is also set."""
    if ms is not None:
        raise BadRequest(f"{field} must have only one of {name} and {name}_ms")
    with _as_bad_request(f"{field}: {name}"):
        return duration_ms(written)


@contextmanager
def _as_bad_request(field: str) -> Iterator[None]:
    """Convert a ValueError to a BadRequest that names the field."""
    try:
        yield
    except ValueError as error:
        raise BadRequest(f"{field}: {error}") from None


class Reader:
    """Reads tasks from requests, with the daemon's table of delay levels."""

    def __init__(self, delay_levels_ms: Sequence[int]) -> None:
        self._levels_ms = delay_levels_ms

    def task(self, fields: TaskFields, topic: str | None, field: str = "task") -> ReadTask:
        """Return the task that a JSON object describes. Raise BadRequest if it is invalid; the
        operation checks it further."""
        if topic is None:
            raise BadRequest(f"{field} must have a topic")
        body = body_of(fields, field)
        delay_ms, due_ms = due_of(fields, field)
        options = _options(fields, field)
        if due_ms is None and fields.delay_level is None:
            # The common case: the task has at most a delay.
            if delay_ms is None:
                delay_ms = 0
            task = (topic, body, delay_ms, options) if options else (topic, body, delay_ms)
            return ReadTask(task, delay_ms, None)
        if due_ms is not None:
            options["due_ms"] = due_ms
        if fields.delay_level is not None:
            options["delay_level"] = fields.delay_level
            if fields.delay_level > 0:
                levelled_ms = delay_of_level(self._levels_ms, fields.delay_level)
                return ReadTask((topic, body, delay_ms, options), levelled_ms, None)
        return ReadTask((topic, body, delay_ms, options), delay_ms, due_ms)

    def task_from_headers(self, topic: str, headers: dict[bytes, bytes], body: bytes) -> ReadTask:
        """Return the task that a raw body and the headers ``Tickwheel-…`` describe. Raise
        BadRequest if it is invalid."""
        fields: dict[str, Any] = {}
        properties: dict[str, str] = {}
        for name, value in headers.items():
            if not name.startswith(HEADER):
                continue
            text = _header_text(name, value)
            if name.startswith(PROPERTY_HEADER):
                properties[name[len(PROPERTY_HEADER) :].decode("latin-1")] = text
            else:
                field = name[len(HEADER) :].decode("latin-1").replace("-", "_")
                if field in fields:  # delay-ms and delay_ms
                    raise BadRequest(f"header {name.decode('latin-1')} was sent more than once")
                fields[field] = _number(name, text) if field in _NUMBERS else text
        if properties:
            fields["properties"] = properties
        for field in MAPS:
            if fields.get(field, "").startswith("{"):
                header = f"tickwheel-{field.replace('_', '-')}"
                fields[field] = _json_header(header, fields[field])
        header_topic = fields.pop("topic", topic)
        if topic and header_topic != topic:
            raise BadRequest(
                f"tickwheel-topic must be the path's topic {topic}, not {shown(header_topic)}"
            )
        if fields.keys() & {"body", "body_base64"}:
            raise BadRequest("a header cannot contain the body; send it as the body of the request")
        try:
            task_fields = msgspec.convert(fields, TaskFields)
        except msgspec.ValidationError as error:
            raise BadRequest(f"headers tickwheel-*: {error}") from None
        task_fields.body_base64 = body
        return self.task(task_fields, header_topic, "the task")


def _options(fields: TaskFields, field: str) -> dict[str, Any]:
    options = task_values(fields)
    if not options:
        return options
    for name, read in _CONVERTED:
        if name in options:
            options[name] = read(options[name], f"{field}: {name}")
    for written, name in _SPANS:
        if written in options:
            options[name] = span_ms(options.pop(written), options.get(name), written, field)
    return options


def policy(value: Any, field: str = "retry") -> Any:
    """Return a policy in wire form: a name, or a map with tuples. Raise BadRequest if its text is
    invalid."""
    if isinstance(value, str) and ":" in value:
        with _as_bad_request(field):
            value = parse_policy(value)
    if isinstance(value, dict):
        return {k: tuple(v) if isinstance(v, list) else v for k, v in value.items()}
    return value


def rule(value: Any, field: str) -> Any:
    """Return a coalescing rule in wire form. Raise BadRequest if it is invalid."""
    if not isinstance(value, dict):
        return value
    with _as_bad_request(field):
        return rule_wire(value)


_READERS: dict[FieldKind, Callable[[Any, str], Any]] = {POLICY: policy, RULE: rule}
_CONVERTED = [
    (field.name, _READERS[field.kind])
    for field in tasks.TaskFields.fields()
    if field.kind in _READERS
]
"""Names of the fields that must be converted to wire form, with their converters."""
_SPANS = [(field.python, field.name) for field in tasks.TaskFields.fields() if field.kind.unit]
"""Names of each duration's two fields: in readable form and in milliseconds."""


def _header_text(name: bytes, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise BadRequest(f"header {name.decode('latin-1')} is not valid UTF-8") from None


def _number(name: bytes, text: str) -> int:
    number = whole_number(text)
    if number is None:
        raise BadRequest(f"{name.decode('latin-1')} must be a whole number, not {shown(text)}")
    return number


def _json_header(name: str, text: str) -> Any:
    try:
        value = msgspec.json.decode(text.encode())
        check_members(text.encode(), name)
        return value
    except (msgspec.DecodeError, RecursionError):
        raise BadRequest(f"{name} is not valid JSON: {shown(text)}") from None


def check_members(data: bytes, name: str) -> None:
    """Raise BadRequest if an object in valid JSON repeats a member, because decoders drop one of
    its values. ``name`` says in the message where the JSON is."""
    if not may_repeat(data, msgspec.json.decode):
        return
    try:
        json.loads(data, strict=False, object_pairs_hook=members, parse_int=str, parse_float=str)
    except InvalidValue as error:
        raise BadRequest(f"{name}: {error.message(shown)}") from None


def may_repeat(data: bytes, decode: Callable[[bytes], Any]) -> bool:
    """Return False if no object in valid JSON repeats a member. It is ten times as fast as a parser
    that sees each member."""
    # A dropped member takes its quotes with it. Only a quote in this form adds one again.
    return rb"\u0022" in data or data.count(b'"') > msgspec.json.encode(decode(data)).count(b'"')


# --- resends -------------------------------------------------------------------------------------


class RequestIdentity(NamedTuple):
    """The session and the number by which a resent request is recognized."""

    session: bytes
    fingerprint: int


def request_identity(key: str, principal: Principal, tasks: Sequence[Any]) -> RequestIdentity:
    """Return the identity of a request, derived from its principal, its ``Idempotency-Key`` and its
    tasks. Raise BadRequest if the key has an invalid length."""
    if not 0 < len(key) <= IDEMPOTENCY_KEY_LENGTH_MAX:
        raise BadRequest(
            f"idempotency-key must have 1 to {IDEMPOTENCY_KEY_LENGTH_MAX} characters, not"
            f" {len(key)}"
        )
    name = msgspec.msgpack.encode((principal.name, key))
    session = hashlib.blake2b(name, digest_size=SESSION_BYTES, person=b"tw-http-once").digest()
    payload = _encode_payload(tasks)
    digest = hashlib.blake2b(payload, digest_size=8).digest()
    return RequestIdentity(session, 1 + int.from_bytes(digest, "big") % REQUEST_MAX)


def _encode_payload(tasks: Sequence[Any]) -> bytes:
    """Encode the tasks, independently of the order of their fields."""
    try:
        return msgspec.msgpack.encode(tasks, order="sorted")
    except (OverflowError, ValueError) as error:
        raise BadRequest(f"a number is too large: {error}") from None
