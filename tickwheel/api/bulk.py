"""Bulk operations: what is done to everything of a topic that matches, in the background."""

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
    OWN_NAME,
    Choice,
    Moment,
    Number,
    Text,
)
from tickwheel.api.shapes import Answer, Request, maybe_when, when
from tickwheel.api.tasks import MOVES, PAGE, STATES, AnyMoveFields, LetterPlace
from tickwheel.api.verb import Audit, Home, Method, Need, Of, Over, Right, Unique, Verb

EXAMPLES_MAX: Final = 10
TIME_MS_MAX: Final = 2**53 - 1
RATE_OF_CHANGES: Final = Number("changes a second", 0.001, 1_000_000.0)
SAME: Final = (
    "Yours: the same request again is the same bulk operation, and another one with it is a"
    " Conflict; by default a random one."
)


class SelectionFields(Request):
    """A selection means everything of a topic of which each part that is named is true."""

    tags: Annotated[str | None, Text(2_048), 'Only those with one of these tags: "eu || uk".'] = (
        None
    )
    where: Annotated[
        str | None,
        Text(2_048),
        'Only those of which this is true: "amount > 10 AND region IS NOT NULL".',
    ] = None
    key_prefix: Annotated[str | None, Text(), "Only those whose key begins with this."] = None
    due_from_ms: Annotated[
        int | None, Moment(0, TIME_MS_MAX), "Only those that are due at this moment or later."
    ] = None
    due_to_ms: Annotated[
        int | None, Moment(0, TIME_MS_MAX), "Only those that are due before this moment."
    ] = None


class TaskSelectionFields(SelectionFields):
    """A selection of tasks may also name a state."""

    state: Annotated[str | None, STATES, "Only tasks in this state."] = None


class DeadSelectionFields(SelectionFields):
    """A selection of dead letters may also name a group and a reason."""

    group: Annotated[str | None, NAME, "Only dead letters of this group."] = None
    reason: Annotated[
        str | None, Text(), "Only dead letters whose last reason contains this text."
    ] = None


class AnySelectionFields(TaskSelectionFields, DeadSelectionFields):
    """A selection of tasks or of dead letters, as the kind of the bulk operation has it."""


SELECTED: Final[Mapping[str, tuple[type[Request], ...]]] = {
    verb.bulk: (block, *([MOVES[verb.bulk]] if verb.bulk in MOVES else ()))
    for block, verbs in (
        (TaskSelectionFields, tasks.VERBS),
        (DeadSelectionFields, tasks.LETTER_VERBS),
    )
    for verb in verbs
    if verb.bulk
}
"""Kind of a bulk operation → the blocks of options that it has."""
KINDS: Final = Choice("str", *SELECTED)


def options_of(kind: str) -> tuple[str, ...]:
    """The options that a bulk operation of this kind may have."""
    blocks = (field.name for block in SELECTED[kind] for field in block.fields())
    return (*blocks, "rate", "id")


class BulkFields(AnySelectionFields, AnyMoveFields):
    """A bulk operation says what is done, and to which tasks or dead letters of a topic."""

    topic: Annotated[str, NAME, "The topic."]
    kind: Annotated[str, KINDS, "What to do with them."]
    rate: Annotated[
        float | None, RATE_OF_CHANGES, "The most changes a second; without it there is no limit."
    ] = None


class NewBulk(BulkFields):
    """The request makes a bulk operation."""

    id: Annotated[str | None, OWN_NAME, SAME] = None


class BulkTrial(NewBulk):
    """A bulk operation to try: nothing is changed. The last three are those of the part before."""

    after: Annotated[Any, LetterPlace(), "The ``next`` of the part before."] = None
    until_id: Annotated[int | None, ID, "The same as in the answer to the first part."] = None
    until_ms: Annotated[
        int | None, Moment(0, TIME_MS_MAX), "The same as in the answer to the first part."
    ] = None


class BulkName(Request):
    """The request names a bulk operation by its id."""

    bulk: Annotated[str, NAME, "The id of the bulk operation."]


class BulkPage(Request):
    """The request asks for a page of bulk operations."""

    topic: Annotated[str | None, NAME, "Only those on this topic."] = None
    state: Annotated[
        str | None,
        Choice("BulkState", "running", "done", "cancelled", "failed"),
        "Only those in this state.",
    ] = None
    after: Annotated[str | None, NAME, "The ``next`` of the page before."] = None
    limit: Annotated[int, PAGE, "The most items of the answer."] = 100


class BulkInfo(Answer):
    """A bulk operation on everything of a topic that matches, and how far it is."""

    id: Annotated[str, NAME, "The id of the bulk operation."]
    kind: Annotated[str, f"{', '.join(SELECTED)}; reset."]
    topic: Annotated[str, NAME, "The topic whose tasks or dead letters it changes."]
    selection: Annotated[Mapping[str, Any], "What must be true of a task."] = {}
    arguments: Annotated[
        Mapping[str, Any], "The new due time of a reschedule, or the new time to live of a requeue."
    ] = {}
    rate: Annotated[float | None, "The most changes a second; without it there is no limit."]
    state: Annotated[str, "The state: running, done, cancelled or failed."]
    looked_at: Annotated[int, "How many tasks or dead letters it has looked at."]
    matched: Annotated[int, "How many of these matched the selection."]
    changed: Annotated[int, "How many of these it has changed."]
    refused: Annotated[
        Mapping[str, int],
        "How many matched and were not changed, by the reason.",
    ]
    made_ms: Annotated[int, Moment(), "When it was made, in milliseconds since 1970."] = 0
    by: Annotated[str, "Who asked for it."] = ""
    ended_ms: Annotated[
        int | None, Moment(), "When it was over, in milliseconds since 1970; None: it still runs."
    ] = None
    note: Annotated[str, "Why it failed."]

    @property
    def is_over(self) -> bool:
        """Whether it changes nothing more."""
        return self.state != "running"

    made = when("made_ms", "When it was made.")
    ended = maybe_when("ended_ms", "When it was over.")


class BulkList(Answer):
    """A page of bulk operations, the newest first."""

    bulk: Annotated[list[BulkInfo], "The bulk operations of this page."]
    next: Annotated[str | None, NAME, "The ``after`` of the next page; None: this is the last one."]


class BulkPreview(Answer):
    """A dry run says what a bulk operation would do; with ``next`` this is a part of it."""

    looked_at: Annotated[int, "How many tasks or dead letters were looked at."]
    matched: Annotated[int, "How many of these match the selection."]
    refused: Annotated[
        Mapping[str, int],
        "How many match and would not be changed, by the reason.",
    ]
    examples: Annotated[tuple[int, ...], IDS, "The ids of the first tasks that would be changed."]
    until_id: Annotated[
        int, ID, "``until_id`` of the next part: the last id that the dry run looks at."
    ] = 0
    until_ms: Annotated[
        int,
        Moment(),
        "``until_ms`` of the next part: the moment for which the dry run holds, in milliseconds"
        " since 1970.",
    ] = 0
    next: Annotated[
        Any, LetterPlace(), "The ``after`` of the next part; None: this is the last one."
    ] = None

    @property
    def would_change(self) -> int:
        """How many would be changed."""
        return self.matched - sum(self.refused.values())

    def and_then(self, more: BulkPreview) -> BulkPreview:
        """This dry run together with its next part."""
        return BulkPreview(
            looked_at=self.looked_at + more.looked_at,
            matched=self.matched + more.matched,
            refused=dict(Counter(self.refused) + Counter(more.refused)),
            examples=(*self.examples, *more.examples)[:EXAMPLES_MAX],
        )


_TAG, _PATH, _UNKNOWN = "bulk", "/v1/bulk/{bulk}", ("not_found",)


VERBS: Final = (
    Verb("make_bulk", NewBulk, BulkInfo, Need(Right.OPERATE, Of.NAMED),
         "Do something to everything of a topic that matches", "", FrameType.BULK_MAKE,
         path="POST /v1/bulk", tag=_TAG, status=201,
         errors=(*_UNKNOWN, "conflict", "due_too_far"), audit=Audit.ALWAYS, changes=True,
         over=Over.TURN, unique=Unique("id", Home.FIRST)),
    Verb("preview_bulk", BulkTrial, BulkPreview, Need(Right.READ, Of.NAMED),
         "What a bulk operation would do; changes nothing", "", FrameType.BULK_PREVIEW,
         path="POST /v1/bulk-previews", tag=_TAG, errors=(*_UNKNOWN, "due_too_far"),
         prompt=False, over=Over.EACH),
    Verb(
        "list_bulk", BulkPage, BulkList, Need(Right.READ, Of.FOUND),
        "List bulk operations, the newest first", "Bulk operations, the newest first.",
        FrameType.BULK_LIST, path="GET /v1/bulk", tag=_TAG, errors=_UNKNOWN, prompt=False,
        pages="bulk", methods=(Method("list_bulk"),),
        over=Over.PAGES,
    ),
    Verb(
        "show_bulk", BulkName, BulkInfo, Need(Right.READ, Of.FOUND),
        "One bulk operation, and how far it is",
        "One bulk operation, and how far it is. Raises NotFound.",
        FrameType.BULK, "show", path=f"GET {_PATH}", tag=_TAG, errors=_UNKNOWN,
        methods=(Method("show_bulk"),), command="bulk show BULK",
        over=Over.ALL,
    ),
    Verb(
        "cancel_bulk", BulkName, BulkInfo, Need(Right.OPERATE, Of.FOUND),
        "Cancel a bulk operation: it changes nothing more",
        "Cancel a bulk operation: it changes nothing more; what it has changed stays. Once more is"
        " harmless. Raises NotFound.",
        FrameType.BULK, "cancel", path=f"DELETE {_PATH}", tag=_TAG, errors=_UNKNOWN,
        audit=Audit.ALWAYS, changes=True, methods=(Method("cancel_bulk"),),
        command="bulk cancel BULK",
        over=Over.TURN,
    ),
)  # fmt: skip
