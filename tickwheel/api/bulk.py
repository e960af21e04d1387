"""Bulk operations, which change all matching tasks of a topic in the background."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Final

from tickwheel.api import tasks
from tickwheel.api.frames import FrameType
from tickwheel.api.kinds import (
    ID,
    IDS,
    NAME,
    Choice,
    Moment,
    Number,
    Text,
)
from tickwheel.api.shapes import Answer, Request, maybe_when, when
from tickwheel.api.tasks import MOVES, PAGE, STATES, AnyMoveFields, LetterPlace
from tickwheel.api.verb import Audit, Home, Method, Need, Of, Right, Routing, Unique, Verb

EXAMPLES_MAX: Final = 10
TIME_MS_MAX: Final = 2**53 - 1
RATE_OF_CHANGES: Final = Number("changes a second", 0.001, 1_000_000.0)
BULK_ID_TEXT: Final = (
    "Your id for the bulk operation. Repeating the same request with this id has no further"
    " effect; a different request with it raises Conflict. By default a random id."
)


class SelectionFields(Request):
    """A selection of all tasks of a topic that satisfy every field that is set."""

    tags: Annotated[str | None, Text(2_048), 'Only tasks with one of these tags: "eu || uk".'] = (
        None
    )
    where: Annotated[
        str | None,
        Text(2_048),
        'Only tasks for which this condition is true: "amount > 10 AND region IS NOT NULL".',
    ] = None
    key_prefix: Annotated[str | None, Text(), "Only tasks whose key begins with this text."] = None
    due_from_ms: Annotated[
        int | None, Moment(0, TIME_MS_MAX), "Only tasks that are due at this moment or later."
    ] = None
    due_to_ms: Annotated[
        int | None, Moment(0, TIME_MS_MAX), "Only tasks that are due before this moment."
    ] = None


class TaskSelectionFields(SelectionFields):
    """A selection of tasks, which can also name a state."""

    state: Annotated[str | None, STATES, "Only tasks in this state."] = None


class DeadSelectionFields(SelectionFields):
    """A selection of dead letters, which can also name a group and a reason."""

    group: Annotated[str | None, NAME, "Only dead letters of this group."] = None
    reason: Annotated[
        str | None, Text(), "Only dead letters whose last reason contains this text."
    ] = None


class AnySelectionFields(TaskSelectionFields, DeadSelectionFields):
    """A selection of tasks or of dead letters, depending on the kind of the bulk operation."""


SELECTED: Final[Mapping[str, tuple[type[Request], ...]]] = {
    verb.bulk: (block, *([MOVES[verb.bulk]] if verb.bulk in MOVES else ()))
    for block, verbs in (
        (TaskSelectionFields, tasks.VERBS),
        (DeadSelectionFields, tasks.LETTER_VERBS),
    )
    for verb in verbs
    if verb.bulk
}
"""Kind of a bulk operation → its blocks of options."""
KINDS: Final = Choice("str", *SELECTED)


def options_of(kind: str) -> tuple[str, ...]:
    """Return the names of the options of this kind of bulk operation."""
    blocks = (field.name for block in SELECTED[kind] for field in block.fields())
    return (*blocks, "rate", "id")


class BulkFields(AnySelectionFields, AnyMoveFields):
    """The action of a bulk operation, and its selection of tasks or dead letters of a topic."""

    topic: Annotated[str, NAME, "The topic."]
    kind: Annotated[str, KINDS, "The action."]
    rate: Annotated[
        float | None, RATE_OF_CHANGES, "Maximum changes per second; unlimited by default."
    ] = None


class NewBulk(BulkFields):
    """The request starts a bulk operation."""

    id: Annotated[str | None, NAME, BULK_ID_TEXT] = None


class BulkTrial(NewBulk):
    """The request asks for a dry run of a bulk operation. The last three fields continue it with
    values from earlier answers."""

    after: Annotated[Any, LetterPlace(), "``next`` from the previous answer."] = None
    until_id: Annotated[int | None, ID, "``until_id`` from the first answer."] = None
    until_ms: Annotated[
        int | None, Moment(0, TIME_MS_MAX), "``until_ms`` from the first answer."
    ] = None


class BulkName(Request):
    """The request names a bulk operation by its id."""

    bulk: Annotated[str, NAME, "The id of the bulk operation."]


class BulkPage(Request):
    """The request asks for a page of bulk operations."""

    topic: Annotated[str | None, NAME, "Only bulk operations on this topic."] = None
    state: Annotated[
        str | None,
        Choice("BulkState", "running", "done", "cancelled", "failed"),
        "Only bulk operations in this state.",
    ] = None
    after: Annotated[str | None, NAME, "``next`` from the previous page."] = None
    limit: Annotated[int, PAGE, "Maximum number of items in the answer."] = 100


class BulkInfo(Answer):
    """A bulk operation and its progress."""

    id: Annotated[str, NAME, "The id of the bulk operation."]
    kind: Annotated[str, f"{', '.join(SELECTED)}; reset."]
    topic: Annotated[str, NAME, "The topic whose tasks or dead letters it changes."]
    selection: Annotated[Mapping[str, Any], "The conditions that a task must satisfy."] = {}
    arguments: Annotated[
        Mapping[str, Any], "The new due time of a reschedule, or the new time to live of a requeue."
    ] = {}
    rate: Annotated[float | None, "Maximum changes per second; None means unlimited."]
    state: Annotated[str, "The state: running, done, cancelled or failed."]
    looked_at: Annotated[int, "How many tasks or dead letters it has examined."]
    matched: Annotated[int, "How many of them matched the selection."]
    changed: Annotated[int, "How many of them it has changed."]
    refused: Annotated[
        Mapping[str, int],
        "How many of them matched and were not changed, by reason.",
    ]
    made_ms: Annotated[int, Moment(), "When it was created, in milliseconds since 1970."] = 0
    by: Annotated[str, "Who created it."] = ""
    ended_ms: Annotated[
        int | None, Moment(), "When it ended, in milliseconds since 1970; None while it runs."
    ] = None
    note: Annotated[str, "Why it failed."]

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.state != "running"

    made = when("made_ms", "When it was created.")
    ended = maybe_when("ended_ms", "When it ended; None while it runs.")


class BulkList(Answer):
    """A page of bulk operations, the newest first."""

    bulk: Annotated[list[BulkInfo], "The bulk operations of this page."]
    next: Annotated[str | None, NAME, "``after`` for the next page; None on the last page."]


class BulkPreview(Answer):
    """The result of a dry run of a bulk operation, or one part of the result if ``next`` is set."""

    looked_at: Annotated[int, "How many tasks or dead letters were examined."]
    matched: Annotated[int, "How many of them match the selection."]
    refused: Annotated[
        Mapping[str, int],
        "How many of them match and would not be changed, by reason.",
    ]
    examples: Annotated[tuple[int, ...], IDS, "The ids of the first tasks that would be changed."]
    until_id: Annotated[
        int, ID, "The last id that the dry run examines; pass it as ``until_id``."
    ] = 0
    until_ms: Annotated[
        int,
        Moment(),
        "The moment of the dry run, in milliseconds since 1970; pass it as ``until_ms``.",
    ] = 0
    next: Annotated[Any, LetterPlace(), "``after`` for the next part; None in the last part."] = (
        None
    )

    @property
    def would_change(self) -> int:
        """How many tasks or dead letters would be changed."""
        return self.matched - sum(self.refused.values())

    def and_then(self, more: BulkPreview) -> BulkPreview:
        """Add the next part of the dry run."""
        return BulkPreview(
            looked_at=self.looked_at + more.looked_at,
            matched=self.matched + more.matched,
            refused=dict(Counter(self.refused) + Counter(more.refused)),
            examples=(*self.examples, *more.examples)[:EXAMPLES_MAX],
        )


_TAG, _PATH, _UNKNOWN = "bulk", "/v1/bulk/{bulk}", ("not_found",)


VERBS: Final = (
    Verb("make_bulk", NewBulk, BulkInfo, Need(Right.OPERATE, Of.NAMED),
         "Change all matching tasks of a topic", "", FrameType.BULK_MAKE,
         path="POST /v1/bulk", tag=_TAG, status=201,
         errors=(*_UNKNOWN, "conflict", "due_too_far"), audit=Audit.ALWAYS, changes=True,
         routing=Routing.TOGETHER, unique=Unique("id", Home.FIRST)),
    Verb("preview_bulk", BulkTrial, BulkPreview, Need(Right.READ, Of.NAMED),
         "Preview a bulk operation", "", FrameType.BULK_PREVIEW,
         path="POST /v1/bulk-previews", tag=_TAG, errors=(*_UNKNOWN, "due_too_far"),
         prompt=False, routing=Routing.EACH),
    Verb(
        "list_bulk", BulkPage, BulkList, Need(Right.READ, Of.FOUND),
        "List bulk operations, the newest first", "Return bulk operations, the newest first.",
        FrameType.BULK_LIST, path="GET /v1/bulk", tag=_TAG, errors=_UNKNOWN, prompt=False,
        pages="bulk", methods=(Method("list_bulk"),), command="bulk list",
        routing=Routing.PAGES,
    ),
    Verb(
        "show_bulk", BulkName, BulkInfo, Need(Right.READ, Of.FOUND),
        "Show a bulk operation and its progress",
        "Return one bulk operation and its progress. Raise NotFound if there is none.",
        FrameType.BULK, "show", path=f"GET {_PATH}", tag=_TAG, errors=_UNKNOWN,
        methods=(Method("show_bulk"),), command="bulk show BULK",
        routing=Routing.ALL,
    ),
    Verb(
        "cancel_bulk", BulkName, BulkInfo, Need(Right.OPERATE, Of.FOUND),
        "Cancel a bulk operation",
        "Cancel a bulk operation; changes that it has already made stay. Cancelling it again has no"
        " effect. Raise NotFound if there is none.",
        FrameType.BULK, "cancel", path=f"DELETE {_PATH}", tag=_TAG, errors=_UNKNOWN,
        audit=Audit.ALWAYS, changes=True, methods=(Method("cancel_bulk"),),
        command="bulk cancel BULK",
        routing=Routing.TURN,
    ),
)  # fmt: skip
