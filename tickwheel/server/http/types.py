"""What the HTTP API takes and answers, as types: decoding and the OpenAPI document follow them.

The bounds in the schemas are documentation only (``extra_json_schema``): the operations check them,
with the same messages as on TCP. What is left to the types is that a field has the right type and
that no field is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

from msgspec import Meta, Struct, defstruct

from tickwheel.api import tasks
from tickwheel.api.groups import GroupFields
from tickwheel.api.kinds import NAME_PATTERN, POLICY, RULE, Kind
from tickwheel.api.shapes import Field
from tickwheel.model.kinds import PART_MAX
from tickwheel.model.values import INTEGER_MAX, INTEGER_MIN

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


class Deliveries(Out):
    """None when the time was over."""

    deliveries: list[Delivery]


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
