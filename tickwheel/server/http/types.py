"""What the HTTP API takes and answers, as types: decoding and the OpenAPI document follow them.

The bounds in the schemas are documentation only (``extra_json_schema``): the operations check them,
with the same messages as on TCP. What is left to the types is that a field has the right type and
that no field is unknown.

Behind them is how tasks are read that HTTP clients say by hand: JSON, or a raw body with headers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import contextmanager
from datetime import datetime
from itertools import repeat
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar, cast

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, defstruct

from tickwheel.api import tasks
from tickwheel.api.frames import REQUEST_MAX, SESSION_BYTES
from tickwheel.api.groups import GroupFields
from tickwheel.api.kinds import NAME_PATTERN, POLICY, RULE, Kind, Policy, Rule, Whole
from tickwheel.api.shapes import Field
from tickwheel.api.times import moment_ms
from tickwheel.errors import BadRequest, shown
from tickwheel.limits import delay_of_level
from tickwheel.model.kinds import PART_MAX
from tickwheel.model.policies import duration_ms, parse_policy, rule_wire
from tickwheel.model.records import ID_STEP
from tickwheel.model.values import INTEGER_MAX, INTEGER_MIN
from tickwheel.server.generated import said

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tickwheel.server.shard.callers import Principal

_S = TypeVar("_S", bound=Struct)


def _shape(description: str, **schema: Any) -> Meta:
    return Meta(description=description, extra_json_schema=schema or None)


Name = Annotated[str, _shape("1 to 255 of A-Z a-z 0-9 . _ : / -", pattern=NAME_PATTERN)]
Id = Annotated[str, _shape("A task's id: a whole number as text.", pattern="^[0-9]{1,19}$")]
Receipt = Annotated[str, _shape("Opaque: from a delivery, to settle it with.")]
Milliseconds = Annotated[int, _shape("Milliseconds.", minimum=0)]
Moment = Annotated[int, _shape("Milliseconds since 1970 by the daemon's clock.")]
At = Annotated[datetime, Meta(tz=True, description="RFC 3339, with its offset.")]
Span = Annotated[str | float, _shape('As people write it: "5m", "1h30m"; a number is seconds.')]
WholeNumber = Annotated[int, _shape("", minimum=INTEGER_MIN, maximum=INTEGER_MAX)]
Property = str | WholeNumber | float | bool
Retry = Annotated[
    str | dict[str, Any],
    _shape(
        'A named policy, one as text: "fixed:delay=5s,retries=3", or as a map: {"kind": "fixed",'
        ' "delay_ms": 5000, "retries": 3}.'
    ),
]
IfPending = Annotated[
    str | dict[str, Any],
    _shape('keep, replace, reject or add, or a map: {"action": "replace", "max_wait": "1h"}.'),
]
Text = Annotated[str, _shape("The body as text.")]
Base64 = Annotated[bytes, Meta(description="The body, when it is no text.")]


class In(Struct, kw_only=True, forbid_unknown_fields=True):
    """Of requests: what is not known is a mistake."""


class Out(Struct, kw_only=True):
    """Of answers: a newer daemon may add fields."""


def described(kind: Any, field: Field, *more: Any) -> Any:
    """The type of a declared field, with what its declaration says; ``more``: other types that it
    may have."""
    said = field.kind.schema()
    found: Any = Annotated[
        Any if kind is object else kind,
        Meta(description=field.text or None, extra_json_schema=said or None),
    ]
    for one in more:
        found = found | one
    return found


def _of_group(own: type[_S]) -> type[_S]:
    """The type with what its sender may say of the group, as that is declared."""
    fields: list[Any] = [
        (field.name, described(field.kind.json, field, type(None)), None)
        for field in GroupFields.fields()
    ]
    made = defstruct(own.__name__, fields, bases=(own,), namespace={"__doc__": own.__doc__})
    return cast("type[_S]", made)


# --- tasks ---------------------------------------------------------------------------------------


class When(In):
    """When a task is due: one of these; none: at once."""

    delay: Span | None = None
    delay_ms: Milliseconds | None = None
    due_ms: Moment | None = None
    at: At | None = None


_JSON: dict[Kind, Any] = {POLICY: Retry, RULE: IfPending}
"""What is written in JSON in more ways than on TCP."""


def _of_json(field: Field) -> Any:
    """The type of a field of a task."""
    return (
        _JSON.get(field.kind)
        or Annotated[field.kind.json, _shape(field.text, **field.kind.schema())]
    )


def _said() -> Iterable[tuple[str, Any, Any]]:
    """What may be said of a task beside its topic, its body and when it is due. A span may be
    written as people write it, too."""
    for field in tasks.TaskFields.fields():
        kind = _of_json(field)
        if field.kind.unit:
            yield field.python, Span | None, None
        yield field.name, kind | None if field.may_be_none else kind, field.default


def _told() -> Iterable[tuple[str, Any, Any]]:
    """What a delivery says of a task's options."""
    for field, _ in tasks.kept_options(delivered=True):
        yield field.name, field.kind.json | None, None


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

    topic: Name


class OfTransaction(In):
    """Which transaction half tasks are of; the same ``part`` again is a resend."""

    id: Name
    group: Name
    """Its producer group: who is asked what became of it."""
    part: Annotated[int, _shape("1 for its first request.", minimum=1, maximum=PART_MAX)]
    count_from: Annotated[str, _shape("", enum=["enqueue", "commit"])] = "enqueue"
    """What delays count from."""


class NewTasks(In, kw_only=True):
    """Several at once: all of them or none. With a ``transaction`` they are tasks when it is
    committed."""

    transaction: OfTransaction | None = None
    tasks: Annotated[list[NewTask], _shape("", minItems=1, maxItems=16_384)]


class OneOrMany(TaskFields):
    """What both forms of an enqueue decode to; the document has them apart."""

    topic: Name | None = None
    tasks: list[NewTask] | None = None
    transaction: OfTransaction | None = None


class Accepted(Out):
    """An enqueued task: it is stored durably, and delivered at ``due_ms`` or later."""

    id: Id
    due_ms: Moment | None
    """Null: of the resend of a task with a due window that has ended meanwhile."""
    outcome: str = "stored"
    """Or kept, replaced or rejected, by its ``if_pending`` or its topic's: ``id`` and ``due_ms``
    are then those of the task that is pending."""


class AcceptedMany(Out):
    """In the order asked."""

    tasks: list[Accepted]


class Prepared(Out):
    """Half tasks that are kept; they have no ids before the commit."""

    transaction: Name
    part: int
    tasks: int


Ids = Annotated[list[Id], _shape("", minItems=1, maxItems=16_384)]


class Move(When):
    """Where a task is moved to: one of these."""

    shift_ms: Annotated[int, _shape("Later than it is; negative: earlier.")] | None = None


class RescheduleIn(Move, kw_only=True):
    """Where several tasks are moved to."""

    ids: Ids


# --- deliveries ----------------------------------------------------------------------------------


@_of_group
class PullIn(In):
    """Up to ``max`` deliveries, as soon as there is one."""

    group: Name | None = None
    max: Annotated[int, _shape("", minimum=1)] = 1
    wait_ms: Milliseconds = 0
    lease_ms: Milliseconds | None = None


class Delivery(Told, kw_only=True):
    """One hand-over of a task."""

    id: Id
    receipt: Receipt
    due_ms: Moment
    delivered_ms: Moment
    attempt: int
    failures: int
    deaths: int
    body: Text | None = None
    body_base64: Base64 | None = None
    replay_of: Id | None = None


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


class Deliveries(Out):
    """None when the time was over."""

    deliveries: list[Delivery]
    new_group: (
        Annotated[MadeGroup, _shape("Only where this pull has made the group.")] | UnsetType
    ) = UNSET


@_of_group
class StreamQuery(In):
    """A subscription."""

    group: Name | None = None
    credit: Annotated[int, _shape("Deliveries that may be unsettled.", minimum=0)] = 100
    lease_ms: Milliseconds | None = None
    ack: Annotated[str, _shape("", enum=["manual", "on_delivery"])] = "manual"
    broadcast: bool = False


Receipts = Annotated[list[Receipt], _shape("", minItems=1, maxItems=16_384)]


class AckIn(In):
    """Deliveries to settle."""

    receipts: Receipts


class NackIn(AckIn):
    """Attempts that failed; ``delay_ms``: until the next one, instead of the policy's."""

    delay_ms: Milliseconds | None = None
    reason: str | None = None


class RejectIn(AckIn):
    """Tasks that will never succeed."""

    reason: str | None = None


class SnoozeIn(AckIn, kw_only=True):
    """Tasks that are postponed, and that counts as no failure."""

    delay_ms: Milliseconds


class ExtendIn(AckIn, kw_only=True):
    """Leases that shall last ``lease_ms`` from now."""

    lease_ms: Milliseconds


class Settled(Out):
    """A word for each receipt, in the order asked."""

    results: list[str]


# --- dead letters --------------------------------------------------------------------------------


class DeadRef(In):
    """One dead letter."""

    id: Id
    group: Name


class DeadIn(In):
    """Dead letters."""

    items: Annotated[list[DeadRef], _shape("", minItems=1, maxItems=16_384)]


class RequeueIn(DeadIn, kw_only=True):
    """Dead letters to be delivered again, with a new time to live if there is a ``ttl_ms``."""

    ttl_ms: Milliseconds | None = None


# --- the console ---------------------------------------------------------------------------------


class WatchQuery(In):
    """A look every ``every_ms``."""

    every_ms: Annotated[int, _shape("", minimum=500, maximum=60_000)] = 1_000


class Session(Out):
    """Who asks."""

    name: str | None
    """None: nobody who has logged in, though that is needed."""
    is_login_needed: bool
    until_ms: Moment | None
    rights: dict[str, list[str]]
    """Of each right the patterns of topics."""


class SessionLink(Out):
    """To be shown as a token by a login."""

    code: str | None
    """None: no login is needed."""
    until_ms: Moment | None


class Problem(Out, omit_defaults=True):
    """An error, as RFC 9457 has it; ``code`` is one of the error table of docs/protocol.md."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    retryable: bool
    active: Annotated[str, _shape("not_active: the address of the daemon that leads.")] | None = (
        None
    )
    active_http: Annotated[str, _shape("The URL of its HTTP API.")] | None = None


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


_READERS: dict[Kind, Callable[[Any, str], Any]] = {POLICY: policy, RULE: rule}
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
        raise BadRequest(f"{name.decode('latin-1')} is no UTF-8") from None


def _number(name: bytes, text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 19:
        raise BadRequest(f"{name.decode('latin-1')} must be a whole number, not {shown(text)}")
    return int(text)


def _json_header(name: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text.encode())
    except (msgspec.DecodeError, RecursionError):
        raise BadRequest(f"{name} is no JSON: {shown(text)}") from None


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
