"""Dead letters: listed, requeued, deleted."""

from __future__ import annotations

from typing import Annotated, Any, Final

from tickwheel.api.frames import FrameType
from tickwheel.api.kinds import ID, LETTERS, NAME, Kind, Moment, Text, array, wrong
from tickwheel.api.shapes import Answer, Request, when
from tickwheel.api.tasks import PAGE, Failure
from tickwheel.api.verb import Audit, Method, Need, Of, Over, Right, Verb
from tickwheel.limits import Limits


class LetterPlace(Kind):
    """A page begins behind this dead letter: [id, group]; ID.GROUP over HTTP."""

    word = "[id, group]"
    json = str

    def check(self, value: Any, field: str, limits: Limits) -> Any:
        if type(value) is not tuple or len(array(value, field, 2)) != 2:
            wrong(field, "[id, group]", value)
        return ID.check(value[0], f"{field}[0]", limits), Text().check(
            value[1], f"{field}[1]", limits
        )


class DeadPage(Request):
    """The request asks for a page of dead letters."""

    topic: Annotated[str | None, NAME, "Of this topic."] = None
    group: Annotated[str | None, NAME, "Of this group."] = None
    since_ms: Annotated[int | None, Moment(), "That died then or later."] = None
    until_ms: Annotated[int | None, Moment(), "That died before then."] = None
    reason: Annotated[
        str | None, Text(), "Somewhere in the text of the last failure, in whatever case."
    ] = None
    after: Annotated[Any, LetterPlace(), "``next`` of the page before."] = None
    limit: Annotated[int, PAGE, "How many at most."] = 100


class Letters(Request):
    """The request names dead letters."""

    pairs: Annotated[Any, LETTERS, "Each (id, group)."]


class DeadLetter(Answer):
    """A task that a group could not finish, until it is requeued or deleted."""

    id: Annotated[int, ID]
    group: Annotated[str, NAME]
    topic: Annotated[str, NAME]
    died_ms: Annotated[int, Moment()]
    attempt: int
    reason: str
    failures: tuple[Failure, ...]
    failed: Annotated[int, "How many attempts failed."] = 0
    deaths: Annotated[int, "How many consumers have died while they had it."] = 0

    died = when("died_ms", "When it died.")


class DeadLetters(Answer):
    """A page of dead letters."""

    dead: list[DeadLetter]
    next: Annotated[tuple[int, str] | None, LetterPlace(), "``after`` of the next page."]


_TAG, _OPERATE = "dead letters", Need(Right.OPERATE, Of.FOUND)

VERBS: Final = (
    Verb(
        "list_dead", DeadPage, DeadLetters, Need(Right.READ, Of.FOUND), "List dead letters",
        "Dead letters in the order of their ids.",
        FrameType.DEAD_LIST, path="GET /v1/dead-letters", tag=_TAG, prompt=False, pages="dead",
        methods=(Method("dead_list"),),
        over=Over.PAGES,
    ),
    Verb("requeue_dead", Letters, list[str], _OPERATE, "Requeue dead letters",
         'Deliver dead letters again, failures counted anew: "requeued" or "unknown".',
         FrameType.DEAD_REQUEUE, audit=Audit.ALWAYS, changes=True, bulk="requeue",
         methods=(Method("dead_requeue", word="RequeueWord"),), over=Over.IDS),
    Verb("delete_dead", Letters, list[str], _OPERATE, "Delete dead letters",
         'Delete dead letters for good: "deleted" or "unknown".',
         FrameType.DEAD_DELETE, audit=Audit.ALWAYS, changes=True, bulk="delete",
         methods=(Method("dead_delete", word="DeleteWord"),), over=Over.IDS),
)  # fmt: skip
