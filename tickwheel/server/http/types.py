"""What the HTTP API takes and answers, as types: decoding and the OpenAPI document follow them.

The bounds in the schemas are documentation only (``extra_json_schema``): the operations check them,
with the same messages as on TCP. What is left to the types is that a field has the right type and
that no field is unknown.

Behind them is how tasks are read that HTTP clients say by hand: JSON, or a raw body with headers.
"""

from __future__ import annotations

import hashlib
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
from tickwheel.errors import BadRequest, shown
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
from tickwheel.model.values import INTEGER_MAX, INTEGER_MIN
from tickwheel.server.generated import said

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tickwheel.server.shard.callers import Principal

_S = TypeVar("_S", bound=Struct)
REF = "#/components/schemas/{name}"
NULL_IS_SAID = "x-null-is-said"
"""Marks a field of a request whose null takes a setting away; the document has no such mark."""


def _shape(description: str, **schema: Any) -> Meta:
    return Meta(description=description or None, extra_json_schema=schema or None)


Name = Annotated[str, _shape("1 to 255 of A-Z a-z 0-9 . _ : / -", pattern=NAME_PATTERN)]
Id = Annotated[str, _shape("A task's id: a whole number as text.", pattern="^[0-9]{1,19}$")]
Receipt = Annotated[str, _shape("Opaque: from a delivery, to settle it with.")]
Milliseconds = Annotated[int, _shape("Milliseconds.", minimum=0)]
Moment = Annotated[int, _shape("Milliseconds since 1970 by the daemon's clock.")]
At = Annotated[datetime, Meta(tz=True, description="RFC 3339, with its offset.")]
Span = Annotated[str | float, Meta(extra_json_schema={"$ref": REF.format(name="Duration")})]
Property = tasks.Value
Text = Annotated[str, _shape("The body as text.")]
Base64 = Annotated[bytes, Meta(description="The body, when it is not text.")]


class In(Struct, kw_only=True, forbid_unknown_fields=True):
    """Of requests: what is not known is a mistake."""


class Out(Struct, kw_only=True):
    """Of answers: a newer daemon may add fields."""


def text_of(field: Field) -> str:
    """The sentence of a declared field, in the words of JSON, with its unit and its limits."""
    return field.kind.described(worded(field.text))


def worded(text: str) -> str:
    """A text of the declarations, or of a docstring, as the document has it."""
    return " ".join(re.sub(r"\bNone\b", "null", text).replace("``", "`").split())


def _meta(field: Field, **said: Any) -> Meta:
    """What the declaration of a field says of it; ``said``: more for its schema."""
    kind = field.kind
    said = kind.schema() | said
    if kind.json_name:
        said["$ref"] = REF.format(name=kind.json_name)
    elif isinstance(kind, Properties):
        said["additionalProperties"] = {"$ref": REF.format(name=PROPERTY.json_name)}
    return _shape(text_of(field), **said)


def described(kind: Any, field: Field, *more: Any, **said: Any) -> Any:
    """The type of a declared field, with what its declaration says; ``more``: other types that it
    may have; ``said``: more for its schema."""
    meta = _meta(field, **said)
    is_struct = isinstance(kind, type) and issubclass(kind, Struct)
    found: Any = kind if is_struct else Annotated[Any if kind is object else kind, meta]
    for one in more:
        found = found | one
    return Annotated[found, meta] if is_struct else found  # of a part of a union it would be lost


def _of_group(own: type[_S]) -> type[_S]:
    """The type with what its sender may say of the group, as that is declared."""
    fields: list[Any] = [
        (field.name, described(field.kind.json, field, type(None)), None)
        for field in GroupFields.fields()
    ]
    made = defstruct(own.__name__, fields, bases=(own,), namespace={"__doc__": own.__doc__})
    return cast("type[_S]", made)


# --- unions that have a name in the document -----------------------------------------------------


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": REF.format(name=name)}


_DELAY = {"type": "integer", "minimum": 0, "maximum": DELAY_MS_MAX}
_POLICY_NUMBERS: dict[str, dict[str, Any]] = {
    "base_ms": _DELAY | {"description": "The delay before the first retry, in milliseconds."},
    "factor": {
        "description": "The factor by which each further delay is longer than the one before.",
        "type": "number",
        "minimum": 1,
        "maximum": FACTOR_MAX,
    },
    "cap_ms": _DELAY | {"description": "The longest delay, in milliseconds; at least base_ms."},
    "delay_ms": _DELAY | {"description": "The delay before every retry, in milliseconds."},
    "delays_ms": {
        "description": "The delays before the retries, in milliseconds and in their order. The last"
        " one holds for all further retries.",
        "type": "array",
        "items": _DELAY,
        "minItems": 1,
        "maxItems": STEPS_MAX,
    },
    "retries": {
        "description": "How many retries follow the first attempt. After the last one the task"
        " becomes a dead letter.",
        "type": "integer",
        "minimum": 0,
        "maximum": RETRIES_MAX,
    },
    "jitter": {
        "description": "The largest share by which a delay is shortened or lengthened at random.",
        "type": "number",
        "minimum": 0,
        "maximum": 1,
    },
}
"""The numbers of a retry policy, by their names in ``policies.FIELDS``."""
_KINDS = {
    "exponential": "Each delay is longer than the one before by a factor, up to a longest delay.",
    "fixed": "The same delay before every retry.",
    "table": "A list of delays.",
    "none": "No retry: the first failure makes the task a dead letter.",
}
_ACTIONS = {
    "add": "Store the task, whatever else is pending with its key.",
    "keep": "Keep the pending task as it is, and do not store this one.",
    "replace": "Put this task in the place of the pending one.",
    "reject": "Refuse this task.",
}
_TEN_YEARS = {"type": "integer", "minimum": 1, "maximum": DELAY_MS_MAX}
_RULE: dict[str, dict[str, Any]] = {
    "window_ms": _TEN_YEARS
    | {
        "description": "How long a task counts as pending after its enqueue, in milliseconds."
        " Without it, until the task has ended."
    },
    "unique_until": {
        "description": "Until when a task counts as pending: until it has finished, or until a"
        " consumer has started it. Default: finished.",
        "type": "string",
        "enum": list(UNTIL),
    },
    "replaces": {
        "description": "What the new task replaces: the body with all options, the due time, or"
        " both. Default: both.",
        "type": "string",
        "enum": list(REPLACES),
    },
    "due": {
        "description": "Which due time holds: the new one, or the later or the earlier of the two."
        " Default: new.",
        "type": "string",
        "enum": list(DUES),
    },
    "max_wait_ms": _TEN_YEARS
    | {
        "description": "The latest due time of a task that is replaced again and again, in"
        " milliseconds after its first enqueue. Without it there is no limit."
    },
}
"""The fields of a rule about pending keys, by their names in ``policies.RULE_FIELDS``."""


def _tagged(
    tag: str, name: str, kinds: dict[str, str], fields: Mapping[str, Sequence[str]], of: Any
) -> dict[str, Any]:
    """The schemas of maps that a word of theirs tells apart, and of their union, ``name``."""
    found: dict[str, Any] = {}
    for word, text in kinds.items():
        told = {"description": f'Always "{word}".', "type": "string", "const": word}
        found[f"{word.title()}{name}"] = {
            "title": f"{word.title()}{name}",
            "description": text,
            "type": "object",
            "properties": {tag: told} | {field: of[field] for field in fields[word]},
            "required": [tag],
        }
    mapping = {word: f"{word.title()}{name}" for word in kinds}
    found[name] = {
        "title": name,
        "description": f"One of these, by its {tag}.",
        "oneOf": [_ref(one) for one in mapping.values()],
        "discriminator": {
            "propertyName": tag,
            "mapping": {word: REF.format(name=one) for word, one in mapping.items()},
        },
    }
    return found


def _rule_fields() -> dict[str, list[str]]:
    """The fields of a rule over HTTP, where its durations have two forms."""
    return {
        action: [
            form
            for name in names
            for form in ([name.removesuffix("_ms"), name] if name.endswith("_ms") else [name])
        ]
        for action, names in RULE_FIELDS.items()
    }


def _spans() -> dict[str, Any]:
    """The durations of a rule as people write them."""
    return {
        name.removesuffix("_ms"): {
            "description": f"The same as {name}, as a duration. Only one of the two may be given.",
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
        "description": "A retry policy: the name of one that the daemon knows, one as text such as"
        ' "fixed:delay=5s,retries=3", or an object.',
        "anyOf": [{"type": "string"}, _ref("RetryPolicy")],
    },
    **_tagged("kind", "RetryPolicy", _KINDS, policies.FIELDS, _POLICY_NUMBERS),
    RULE.json_name: {
        "title": RULE.json_name,
        "description": "What becomes of a task when another task with its key is pending: the name"
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
"""Schemas that several fields share, and that no type gives."""


# --- tasks ---------------------------------------------------------------------------------------


class When(In):
    """When a task is due: one of these; none: at once."""

    delay: Annotated[Span, _shape("The delay from now on, as a duration.")] | None = None
    delay_ms: Annotated[Milliseconds, _shape("The delay from now on, in milliseconds.")] | None = (
        None
    )
    due_ms: Annotated[Moment, _shape("The due time, in milliseconds since 1970.")] | None = None
    at: At | None = None


def _of_json(field: Field) -> Any:
    """The type of a field of a task."""
    return Annotated[field.kind.json, _meta(field)]


def _said() -> Iterable[tuple[str, Any, Any]]:
    """What may be said of a task beside its topic, its body and when it is due. A span may be
    written as people write it, too."""
    for field in tasks.TaskFields.fields():
        kind = _of_json(field)
        if field.kind.unit:
            same = f"The same as {field.name}, as a duration. Only one of the two may be given."
            yield field.python, Annotated[Span, _shape(same)] | None, None
        yield field.name, kind | None if field.may_be_none else kind, field.default


def _told() -> Iterable[tuple[str, Any, Any]]:
    """What a delivery says of a task's options."""
    for field, _ in tasks.kept_options(delivered=True):
        yield field.name, described(field.kind.json, field) | UnsetType, UNSET


if TYPE_CHECKING:

    class Said(When):
        delay_level: int | None = None

    class Told(Out):
        """The same for a type checker."""

else:
    Said = defstruct("Said", list(_said()), bases=(When,), kw_only=True)
    Told = defstruct("Told", list(_told()), bases=(Out,), kw_only=True)


class TaskFields(Said):
    """All of a task but its topic."""

    body: Text | None = None
    body_base64: Base64 | None = None


class NewTask(TaskFields, kw_only=True):
    """A task to enqueue."""

    topic: Annotated[Name, _shape("The topic of the task.")]


class OfTransaction(In):
    """Which transaction half tasks are of; the same ``part`` again is a resend."""

    id: Annotated[Name, _shape("The name of the transaction.")]
    group: Annotated[
        Name, _shape("Its producer group, which is asked what became of the transaction.")
    ]
    part: Annotated[
        int,
        _shape("The number of this request, from 1 on.", minimum=1, maximum=PART_MAX),
    ]
    count_from: Annotated[
        str,
        _shape("What delays count from: this request, or the commit.", enum=["enqueue", "commit"]),
    ] = "enqueue"


class NewTasks(In, kw_only=True):
    """Several at once: all of them or none. With a ``transaction`` they are tasks when it is
    committed."""

    transaction: Annotated[
        OfTransaction | None, _shape("The transaction that the tasks are of.")
    ] = None
    tasks: Annotated[list[NewTask], _shape("The tasks: 1 to 16,384.", minItems=1, maxItems=16_384)]


class OneOrMany(TaskFields):
    """What both forms of an enqueue decode to; the document has them apart."""

    topic: Name | None = None
    tasks: list[NewTask] | None = None
    transaction: OfTransaction | None = None


class Accepted(Out):
    """An enqueued task: it is stored durably, and delivered at ``due_ms`` or later."""

    id: Id
    due_ms: Annotated[
        Moment | None,
        _shape(
            "When the task is due, in milliseconds since 1970. Null: the request was sent again,"
            " and its task with a due window has ended meanwhile."
        ),
    ]
    outcome: Annotated[
        str,
        _shape(
            "stored; or kept, replaced or rejected, by if_pending of the task or its topic: id and"
            " due_ms are then those of the pending task."
        ),
    ] = "stored"


class AcceptedMany(Out):
    """In the order asked."""

    tasks: Annotated[list[Accepted], _shape("What became of each task.")]


class Prepared(Out):
    """Half tasks that are kept; they have no ids before the commit."""

    transaction: Annotated[Name, _shape("The name of the transaction.")]
    part: Annotated[int, _shape("The number of the request.")]
    tasks: Annotated[int, _shape("How many half tasks the request had.")]


Ids = Annotated[list[Id], _shape("The ids of the tasks: 1 to 16,384.", minItems=1, maxItems=16_384)]


class Move(When):
    """Where a task is moved to: one of these."""

    shift_ms: (
        Annotated[int, _shape("How much later it becomes due, in milliseconds; negative: earlier.")]
        | None
    ) = None


class RescheduleIn(Move, kw_only=True):
    """Where several tasks are moved to."""

    ids: Ids


# --- deliveries ----------------------------------------------------------------------------------


OfGroup = Annotated[Name, _shape('The group; by default the group "default".')]
Lease = Annotated[
    Milliseconds,
    _shape("How long the lease of a delivery lasts, in milliseconds; by default the daemon's."),
]


@_of_group
class PullIn(In):
    """Up to ``max`` deliveries, as soon as there is one."""

    group: OfGroup | None = None
    max: Annotated[int, _shape("The most deliveries of the answer.", minimum=1)] = 1
    wait_ms: Annotated[
        Milliseconds, _shape("How long to wait for the first delivery, in milliseconds.")
    ] = 0
    lease_ms: Lease | None = None


class Delivery(Told, kw_only=True):
    """One hand-over of a task."""

    id: Id
    receipt: Receipt
    due_ms: Annotated[Moment, _shape("When the task was due, in milliseconds since 1970.")]
    delivered_ms: Annotated[
        Moment, _shape("When the task was delivered, in milliseconds since 1970.")
    ]
    attempt: Annotated[int, _shape("The number of this delivery of the task, from 1 on.")]
    failures: Annotated[int, _shape("How many attempts have failed.")]
    deaths: Annotated[int, _shape("How many consumers have died with the task.")]
    body: Text | UnsetType = UNSET
    body_base64: Base64 | UnsetType = UNSET
    replay_of: (
        Annotated[Id, _shape("The task that this one repeats, after a reset of its group.")]
        | UnsetType
    ) = UNSET


class MadeGroup(Out):
    """What there is to say of a group that the pull has made."""

    adopted: Annotated[
        int, _shape("Tasks that were due before the topic had any group: its own now.")
    ]
    idle: Annotated[
        dict[str, int],
        _shape(
            "Other groups of the topic that have no subscriber and have finished no task since the"
            " daemon started, and how many tasks each holds."
        ),
    ]


class DeliveryList(Out):
    """The answer to a pull. It has no deliveries when the time was over."""

    deliveries: Annotated[list[Delivery], _shape("The deliveries.")]
    new_group: (
        Annotated[MadeGroup, _shape("Only where this pull has made the group.")] | UnsetType
    ) = UNSET


@_of_group
class StreamQuery(In):
    """A subscription."""

    group: OfGroup | None = None
    credit: Annotated[int, _shape("The most deliveries that are unsettled.", minimum=0)] = 100
    lease_ms: Lease | None = None
    ack: Annotated[
        str,
        _shape(
            "manual: you settle each delivery; on_delivery: a delivery is acked when it is sent.",
            enum=["manual", "on_delivery"],
        ),
    ] = "manual"
    broadcast: Annotated[
        bool, _shape("Whether to get every due task while the stream is open, without a group.")
    ] = False


Receipts = Annotated[
    list[Receipt],
    _shape("The receipts of the deliveries: 1 to 16,384.", minItems=1, maxItems=16_384),
]
Reason = Annotated[str, _shape("Why, for people who look at the task.")]


class AckIn(In):
    """Deliveries to settle."""

    receipts: Receipts


class NackIn(AckIn):
    """Attempts that failed; ``delay_ms``: until the next one, instead of the policy's."""

    delay_ms: (
        Annotated[
            Milliseconds,
            _shape("The delay until the next attempt, in milliseconds; by default the policy's."),
        ]
        | None
    ) = None
    reason: Reason | None = None


class RejectIn(AckIn):
    """Tasks that will never succeed."""

    reason: Reason | None = None


class SnoozeIn(AckIn, kw_only=True):
    """Tasks that are postponed, and that counts as no failure."""

    delay_ms: Annotated[Milliseconds, _shape("The delay until the next delivery, in milliseconds.")]


class ExtendIn(AckIn, kw_only=True):
    """Leases that shall last ``lease_ms`` from now."""

    lease_ms: Annotated[
        Milliseconds, _shape("How long the leases last from now on, in milliseconds.")
    ]


class Settled(Out):
    """A word for each receipt, in the order asked."""

    results: Annotated[
        list[str],
        _shape("What became of each delivery, or why nothing did: stale, gone, and the like."),
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
    """Dead letters to be delivered again, with a new time to live if there is a ``ttl_ms``."""

    ttl_ms: (
        Annotated[Milliseconds, _shape("The new time to live from now on, in milliseconds.")] | None
    ) = None


# --- the console ---------------------------------------------------------------------------------


class WatchQuery(In):
    """A look every ``every_ms``."""

    every_ms: Annotated[
        int,
        _shape("The time between two looks, in milliseconds.", minimum=500, maximum=60_000),
    ] = 1_000


Until = Annotated[
    Moment | None,
    _shape("When it ends, in milliseconds since 1970; null: there is nothing that ends."),
]


class Session(Out):
    """Who asks."""

    name: Annotated[str | None, _shape("The name of the caller; null: nobody has logged in.")]
    is_login_needed: Annotated[bool, _shape("Whether the daemon asks for a token.")]
    until_ms: Until
    rights: Annotated[
        dict[str, list[str]], _shape("The patterns of topics of each right, by its name.")
    ]


class SessionLink(Out):
    """To be shown as a token by a login."""

    code: Annotated[str | None, _shape("The code; null: no login is needed.")]
    until_ms: Until


class Problem(Out, omit_defaults=True):
    """An error, as RFC 9457 has it; ``code`` is one of the error table of docs/protocol.md."""

    type: Annotated[str, _shape("The code as a URI: urn:tickwheel:error:CODE.")]
    title: Annotated[str, _shape("What the code means, the same for every error of this code.")]
    status: Annotated[int, _shape("The status of the answer.")]
    detail: Annotated[str, _shape("What is wrong, in words: the field, the limit and the value.")]
    code: Annotated[
        str, _shape("The code, to decide by. It keeps its meaning; new ones may be added.")
    ]
    retryable: Annotated[
        bool, _shape("Whether the same request may succeed later, unchanged. Nothing was kept.")
    ]
    active: (
        Annotated[str, _shape("Of not_active: the address of the daemon that leads.")] | UnsetType
    ) = UNSET
    active_http: (
        Annotated[str, _shape("Of not_active: the URL of that daemon's HTTP API.")] | UnsetType
    ) = UNSET


class NoQuery(In):
    """Nothing may be said in the query."""


HEADER = b"tickwheel-"
PROPERTY_HEADER = b"tickwheel-property-"
IDEMPOTENCY_KEY_LENGTH_MAX = 255
MAPS = [field.name for field in tasks.TaskFields.fields() if isinstance(field.kind, (Policy, Rule))]
"""Fields that are a word or a map; in a header, a map is JSON."""
_WHOLE = [field.name for field in tasks.TaskFields.fields() if isinstance(field.kind, Whole)]
_NUMBERS = ("delay_ms", "due_ms", *_WHOLE)


class Given(NamedTuple):
    """A task in the form of the operations, and what its due time follows from."""

    task: tuple[Any, ...]
    delay_ms: int | None
    due_ms: int | None

    def due(self, accepted_ms: int) -> int:
        """When the task is due if it was accepted at ``accepted_ms``."""
        if self.delay_ms is not None:
            return accepted_ms + self.delay_ms
        return max(accepted_ms, self.due_ms or 0)


class Kept(NamedTuple):
    """The tasks that an enqueue has kept."""

    ids: Sequence[int]
    dues_ms: Sequence[int | None]
    words: Sequence[str] | None = None
    """What became of each task; None: all are stored."""

    def lines(self) -> list[bytes]:
        """One line of JSON for each task."""
        words = repeat("stored") if self.words is None else self.words
        return [
            b'{"id":"%d","due_ms":%b,"outcome":"%b"}'
            % (task_id, b"null" if due_ms is None else b"%d" % due_ms, word.encode())
            for task_id, due_ms, word in zip(self.ids, self.dues_ms, words, strict=False)
        ]


def kept(answer: tuple[Any, ...], given: Sequence[Given]) -> Kept:
    """The tasks in the answer to an enqueue, as ``Exchange`` has it: of a new request; all ids, for
    a resend; or all ids and due times, where these were chosen."""
    accepted_ms, first = answer[:2]
    if isinstance(first, int):
        ids: Sequence[int] = range(first, first + answer[2] * ID_STEP, ID_STEP)
    else:
        ids = first
        more = answer[2] if len(answer) > 2 else {}
        if "dues_ms" in more:
            return Kept(ids, more["dues_ms"])
        if "outcomes" in more:  # (word, due time) of each
            words, dues_ms = zip(*more["outcomes"], strict=True)
            return Kept(ids, dues_ms, words)
    return Kept(ids, [one.due(accepted_ms) for one in given])


def body_of(given: TaskFields, field: str) -> bytes:
    """The body of a task, as text or from base64. Raises BadRequest."""
    if given.body is not None:
        if given.body_base64 is not None:
            raise BadRequest(f"{field} must have one of body and body_base64")
        return given.body.encode()
    return given.body_base64 or b""


def due_of(given: When, field: str) -> tuple[int | None, int | None]:
    """(delay_ms, due_ms), of which at most one is set. Raises BadRequest."""
    delay_ms = given.delay_ms
    if given.delay is not None:
        delay_ms = span_ms(given.delay, delay_ms, "delay", field)
    if given.at is None:
        return delay_ms, given.due_ms
    if given.due_ms is not None:
        raise BadRequest(f"{field} must have one of delay_ms, due_ms and at")
    return delay_ms, moment_ms(given.at, "at")


def span_ms(written: str | float, ms: int | None, name: str, field: str) -> int:
    """A duration in milliseconds; ``written`` as text or seconds, or else ``ms``, but not both.
    Raises BadRequest."""
    if ms is not None:
        raise BadRequest(f"{field} must have one of {name} and {name}_ms")
    with _refused(f"{field}: {name}"):
        return duration_ms(written)


@contextmanager
def _refused(field: str) -> Iterator[None]:
    """Turn a ValueError of what cannot be read into BadRequest."""
    try:
        yield
    except ValueError as error:
        raise BadRequest(f"{field}: {error}") from None


class Reader:
    """Reads tasks from requests, with the daemon's table of delay levels."""

    def __init__(self, delay_levels_ms: Sequence[int]) -> None:
        self._levels_ms = delay_levels_ms

    def task(self, given: TaskFields, topic: str | None, field: str = "task") -> Given:
        """A task from JSON; the operation checks the rest. Raises BadRequest."""
        if topic is None:
            raise BadRequest(f"{field} must have a topic")
        body = body_of(given, field)
        delay_ms, due_ms = due_of(given, field)
        options = _options(given, field)
        if due_ms is None and given.delay_level is None:
            # The usual case: a delay, or none.
            if delay_ms is None:
                delay_ms = 0
            task = (topic, body, delay_ms, options) if options else (topic, body, delay_ms)
            return Given(task, delay_ms, None)
        if due_ms is not None:
            options["due_ms"] = due_ms
        if given.delay_level is not None:
            options["delay_level"] = given.delay_level
            if given.delay_level > 0:
                levelled_ms = delay_of_level(self._levels_ms, given.delay_level)
                return Given((topic, body, delay_ms, options), levelled_ms, None)
        return Given((topic, body, delay_ms, options), delay_ms, due_ms)

    def of_headers(self, topic: str, headers: dict[bytes, bytes], body: bytes) -> Given:
        """A task from a raw body and headers ``Tickwheel-…``. Raises BadRequest."""
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
                fields[field] = _number(name, text) if field in _NUMBERS else text
        if properties:
            fields["properties"] = properties
        for field in MAPS:
            if fields.get(field, "").startswith("{"):
                header = f"tickwheel-{field.replace('_', '-')}"
                fields[field] = _json_header(header, fields[field])
        named = fields.pop("topic", topic)
        if topic and named != topic:
            raise BadRequest(f"tickwheel-topic is {shown(named)}, but the path names {topic}")
        if fields.keys() & {"body", "body_base64"}:
            raise BadRequest("the body is the request's, not a header's")
        try:
            given = msgspec.convert(fields, TaskFields)
        except msgspec.ValidationError as error:
            raise BadRequest(f"headers tickwheel-*: {error}") from None
        given.body_base64 = body
        return self.task(given, named, "the task")


def _options(given: TaskFields, field: str) -> dict[str, Any]:
    options = said(given)
    if not options:
        return options
    for name, read in _READ:
        if name in options:
            options[name] = read(options[name], f"{field}: {name}")
    for written, name in _SPANS:
        if written in options:
            options[name] = span_ms(options.pop(written), options.get(name), written, field)
    return options


def policy(given: Any, field: str = "retry") -> Any:
    """A policy in the form of the operations: a name, or a map with tuples. Raises BadRequest."""
    if isinstance(given, str) and ":" in given:
        with _refused(field):
            given = parse_policy(given)
    if isinstance(given, dict):
        return {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    return given


def rule(given: Any, field: str) -> Any:
    """A rule about pending keys in the form of the operations. Raises BadRequest."""
    if not isinstance(given, dict):
        return given
    with _refused(field):
        return rule_wire(given)


_READERS: dict[FieldKind, Callable[[Any, str], Any]] = {POLICY: policy, RULE: rule}
_READ = [
    (field.name, _READERS[field.kind])
    for field in tasks.TaskFields.fields()
    if field.kind in _READERS
]
"""What is not in the form of the operations yet."""
_SPANS = [(field.python, field.name) for field in tasks.TaskFields.fields() if field.kind.unit]
"""Spans of time as people write them, and in milliseconds."""


def _header_text(name: bytes, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise BadRequest(f"{name.decode('latin-1')} is not UTF-8") from None


def _number(name: bytes, text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 19:
        raise BadRequest(f"{name.decode('latin-1')} must be a whole number, not {shown(text)}")
    return int(text)


def _json_header(name: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text.encode())
    except (msgspec.DecodeError, RecursionError):
        raise BadRequest(f"{name} is not valid JSON: {shown(text)}") from None


# --- resends -------------------------------------------------------------------------------------


class Once(NamedTuple):
    """The session and number by which a resent request is recognised."""

    session: bytes
    fingerprint: int


def once(key: str, principal: Principal, tasks: Sequence[Any]) -> Once:
    """The ``Once`` of an ``Idempotency-Key``, which each principal has its own of, and of the tasks
    that it is for. Raises BadRequest."""
    if not 0 < len(key) <= IDEMPOTENCY_KEY_LENGTH_MAX:
        raise BadRequest(
            f"idempotency-key has {len(key)} characters; 1 to {IDEMPOTENCY_KEY_LENGTH_MAX} are"
            " allowed"
        )
    name = msgspec.msgpack.encode((principal.name, key))
    session = hashlib.blake2b(name, digest_size=SESSION_BYTES, person=b"tw-http-once").digest()
    payload = _encode_payload(tasks)
    digest = hashlib.blake2b(payload, digest_size=8).digest()
    return Once(session, 1 + int.from_bytes(digest, "big") % REQUEST_MAX)


def _encode_payload(tasks: Sequence[Any]) -> bytes:
    """Bytes that are the same for the same tasks, in whatever order their fields came."""
    try:
        return msgspec.msgpack.encode(tasks, order="sorted")
    except (OverflowError, ValueError) as error:
        raise BadRequest(f"a number is too large: {error}") from None
