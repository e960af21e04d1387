"""Arguments and options that several commands have, each with one meaning and one help text."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Any, TypedDict, TypeVar, cast

import typer

from tickwheel.cli.completion import groups, topics
from tickwheel.cli.values import SPEC_HELP, SPEC_METAVAR, parse_at, parse_id
from tickwheel.client import GroupKeywords
from tickwheel.model.written import parse_duration, parse_policy, parse_shift

T = TypeVar("T")


def typed(parse: Callable[[str], T]) -> Callable[[str], T]:
    """A parser whose ValueError becomes the usage error of the option it stands for."""

    def parser(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return parser


TopicArgument = Annotated[
    str, typer.Argument(metavar="TOPIC", help="The topic's name.", autocompletion=topics)
]
MaybeGroup = Annotated[
    str | None,
    typer.Option(
        "--group",
        metavar="GROUP",
        help="One group of it; without, the topic.",
        autocompletion=groups,
    ),
]

# --- tasks ---------------------------------------------------------------------------------------

Ids = Annotated[
    list[int], typer.Argument(parser=typed(parse_id), metavar="ID...", help="The tasks' ids.")
]
MaybeIds = Annotated[
    list[int] | None,
    typer.Argument(parser=typed(parse_id), metavar="[ID...]", help="The tasks' ids."),
]
KeyOption = Annotated[
    str | None, typer.Option("--key", help="Instead of ids, with --topic: all with this key.")
]
OfTopicOption = Annotated[
    str | None,
    typer.Option(
        "--topic", help="With --key, or for all that match: their topic.", autocompletion=topics
    ),
]
DelayOption = Annotated[
    float | None,
    typer.Option(
        "--delay",
        parser=typed(parse_duration),
        metavar="DURATION",
        help="From now: 30s, 5m, 1h30m, 500ms, 2d. A bare number is seconds.",
    ),
]
AtOption = Annotated[
    datetime | None,
    typer.Option(
        "--at",
        parser=typed(parse_at),
        metavar="TIME",
        help="ISO-8601, for example 2030-01-31T09:00+01:00; without a zone it is local time.",
    ),
]

# --- retry policies ------------------------------------------------------------------------------

SpecParser = typed(parse_policy)
RetryOption = Annotated[
    Any, typer.Option("--retry", parser=SpecParser, metavar=SPEC_METAVAR, help=SPEC_HELP)
]

# --- filters -------------------------------------------------------------------------------------

TagsOption = Annotated[
    str | None,
    typer.Option(metavar="TAGS", help="The filter: tasks with one of these tags, 'eu || us'."),
]
WhereOption = Annotated[
    str | None,
    typer.Option(
        metavar="SQL",
        help="The filter: tasks of which this is true, 'amount > 10 AND region IS NOT NULL'.",
    ),
]

# --- order keys and fair shares ------------------------------------------------------------------

OrderRetryOption = Annotated[
    float | None,
    typer.Option(
        parser=typed(parse_duration),
        metavar="DURATION",
        help="When a failed task of an order key is tried again: 10ms to 30s. Default: 1s.",
    ),
]
OrderAttemptsOption = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="So often, until --order-failure. Default: 16."),
]
OrderFailureOption = Annotated[
    str | None,
    typer.Option(
        metavar="dead|hold|retry",
        help="Then it is dead and its key goes on, or its key is held (default); retry: for ever.",
    ),
]
FairByOption = Annotated[
    str | None,
    typer.Option(
        metavar="key|tag|NAME",
        help="Tasks of each key, tag, or value of this property take turns with the others'.",
    ),
]
LimitEachOption = Annotated[
    int | None, typer.Option(min=0, metavar="N", help="With --fair-by: in flight of each value.")
]
RateEachOption = Annotated[
    float | None, typer.Option(min=0, metavar="N", help="With --fair-by: a second of each value.")
]


class GroupOptions(TypedDict, total=False):
    """The options of a group, for whoever makes it or takes from it."""

    tags: TagsOption
    where: WhereOption
    order_retry: OrderRetryOption
    order_attempts: OrderAttemptsOption
    order_failure: OrderFailureOption
    fair_by: FairByOption
    limit_each: LimitEachOption
    rate_each: RateEachOption


def group_keywords(given: GroupOptions) -> GroupKeywords:
    """The options of a group as keywords of the client; a limit of 0 is none."""
    found = {
        name: value if name in ("tags", "where") else value or None for name, value in given.items()
    }
    return cast("GroupKeywords", found)  # the daemon says which words there are


# --- dead letters --------------------------------------------------------------------------------


def parse_moment(text: str) -> datetime:
    """A time, or an age: ``2h`` is two hours ago by this machine's clock."""
    try:
        ago_s = parse_duration(text)
    except ValueError:
        try:
            return parse_at(text)
        except ValueError:
            raise ValueError(
                f"{text!r:.60} is neither an ISO-8601 time nor a duration such as 2h (ago)"
            ) from None
    return datetime.fromtimestamp(time.time() - ago_s, UTC)


def moment(name: str, help_: str) -> Any:
    """An option that takes a time, or how long ago it was."""
    return typer.Option(name, parser=typed(parse_moment), metavar="TIME|AGO", help=help_)


TopicOption = Annotated[
    str | None, typer.Option("--topic", help="Only this topic's.", autocompletion=topics)
]
GroupOption = Annotated[
    str | None,
    typer.Option(
        "--group", help="Only this group's. Default: every group's.", autocompletion=groups
    ),
]
SinceOption = Annotated[
    datetime | None, moment("--since", "Only what died since: ISO-8601, or 2h for two hours ago.")
]
UntilOption = Annotated[
    datetime | None, moment("--until", "Only what died before: ISO-8601, or 2h for 2 hours ago.")
]
BeforeOption = Annotated[
    datetime | None,
    moment("--before", "Only what was enqueued then or earlier: ISO-8601, or 2h for 2 hours ago."),
]
ReasonOption = Annotated[
    str | None,
    typer.Option("--reason", metavar="TEXT", help="Only with this in its last failure's reason."),
]

# --- all that matches ----------------------------------------------------------------------------

MATCHING = "Everything of --topic that matches, as a bulk operation"


def parse_coming(text: str) -> datetime:
    """A time, or a wait: ``2h`` is in two hours by this machine's clock."""
    try:
        in_s = parse_duration(text)
    except ValueError:
        try:
            return parse_at(text)
        except ValueError:
            raise ValueError(
                f"{text!r:.60} is neither an ISO-8601 time nor a duration such as 2h (from now)"
            ) from None
    return datetime.fromtimestamp(time.time() + in_s, UTC)


def _coming(name: str, help_: str) -> Any:
    return _of_matching(name, parser=typed(parse_coming), metavar="TIME|IN", help=help_)


def _of_matching(*names: str, **options: Any) -> Any:
    return typer.Option(*names, rich_help_panel=MATCHING, **options)


HasTags = Annotated[
    str | None, _of_matching("--tags", metavar="TAGS", help="With one of these tags: 'eu || us'.")
]
HasWhere = Annotated[
    str | None, _of_matching("--where", metavar="SQL", help="Of which this is true: 'amount > 10'.")
]
HasKeyPrefix = Annotated[
    str | None, _of_matching("--key-prefix", metavar="TEXT", help="Whose key begins so.")
]
HasDueFrom = Annotated[
    datetime | None, _coming("--due-from", "Due then or later: ISO-8601, or 2h for in two hours.")
]
HasDueTo = Annotated[datetime | None, _coming("--due-to", "Due before then.")]
HasState = Annotated[
    str | None,
    _of_matching("--state", metavar="STATE", help="scheduled, ready, in_flight, waiting, dead."),
]
AllMatching = Annotated[bool, _of_matching("--all", help="All of them, whatever they are.")]
ShiftOption = Annotated[
    float | None,
    _of_matching(
        "--shift",
        parser=typed(parse_shift),
        metavar="DURATION",
        help="Each so much later; -2h: so much earlier.",
    ),
]
DryRun = Annotated[bool, _of_matching("--dry-run", help="Say what would be done; do nothing.")]
BulkRate = Annotated[
    float | None, _of_matching("--rate", metavar="N", help="So many a second at most.")
]
Yes = Annotated[bool, _of_matching("--yes", "-y", help="Do not ask.")]
Wait = Annotated[
    bool, _of_matching("--wait", help="Until the bulk operation is over; shows how far it is.")
]


class SelectionOptions(TypedDict, total=False):
    """The options that select tasks or dead letters."""

    tags: HasTags
    where: HasWhere
    key_prefix: HasKeyPrefix
    due_from: HasDueFrom
    due_to: HasDueTo


class DeadBulkOptions(SelectionOptions, total=False):
    """The options that make a command on dead letters a bulk operation."""

    dry_run: DryRun
    yes: Yes
    wait: Wait


class TaskBulkOptions(SelectionOptions, total=False):
    """The options that make a command on tasks a bulk operation."""

    state: HasState
    all_: AllMatching
    dry_run: DryRun
    rate: BulkRate
    yes: Yes
    wait: Wait
