"""What people write at the command line: values, and the arguments and options that several
commands have, each with one meaning and one help text.

Parsers raise ValueError with a sentence that names the value; ``typed`` makes it the usage error of
the option. Durations and policies are read by ``model/policies.py``. Topics and groups are
completed by asking the daemon: a shell waits while somebody types, so a daemon that does not answer
at once has none.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, TypedDict, TypeVar, cast

import typer

from tickwheel import environment
from tickwheel.api import kinds
from tickwheel.api.frames import Action
from tickwheel.api.tasks import kept_options
from tickwheel.api.times import parse_time
from tickwheel.cli.call import Default
from tickwheel.cli.output import ROWS_SHOWN
from tickwheel.client import GroupKeywords, IfPending, Retry
from tickwheel.errors import BadRequest, TickwheelError
from tickwheel.limits import ID_MAX
from tickwheel.model.policies import (
    ACTIONS,
    DUES,
    DURATION_MS_MAX,
    REPLACES,
    RULE_DURATIONS,
    UNTIL,
    Policy,
    parse_duration,
    parse_policy,
    parse_shift,
    rule_wire,
)
from tickwheel.model.records import PropertyValue

T = TypeVar("T")

# --- values --------------------------------------------------------------------------------------


parse_at = parse_time


def parse_id(text: str) -> int:
    """A task's id as the daemon gave it. Raises ValueError."""
    if not text.isascii() or not text.isdecimal() or int(text) > ID_MAX:
        raise ValueError(f"{text!r} is not a task id (a whole number from 0 to 2^63 - 1)")
    return int(text)


def parse_property(text: str) -> tuple[str, str | int | float | bool]:
    """A property: ``name=value`` is a text, which may be empty or hold more equals signs;
    ``name:=value`` is a number, true or false."""
    name, equals, value = text.partition("=")
    if not equals or name in {"", ":"}:
        raise ValueError(f"{text!r} is not a property; write name=value, or name:=number")
    if not name.endswith(":"):
        return name, value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, (int, float)):
        raise ValueError(f"{text!r}: a number, true or false is needed behind :=")
    return name[:-1], found


def parse_value(text: str) -> str | int | float | bool:
    """A value of a property: a text, or behind ``:=`` a number, true or false."""
    return parse_property(f"value{text}" if text.startswith(":=") else f"value={text}")[1]


def parse_properties(texts: list[str] | None) -> dict[str, PropertyValue]:
    """The properties of ``--prop``. Raises BadRequest."""
    try:
        return dict(parse_property(text) for text in texts or ())
    except ValueError as error:
        raise BadRequest(f"--prop: {error}") from None


def parse_moment(text: str) -> datetime:
    """A time, or an age: ``2h`` is two hours ago by this machine's clock."""
    return _time_or_span(text, -1, "(ago)")


def parse_coming(text: str) -> datetime:
    """A time, or a wait: ``2h`` is in two hours by this machine's clock."""
    return _time_or_span(text, 1, "(from now)")


def _time_or_span(text: str, sign: int, whence: str) -> datetime:
    try:
        span_s = parse_duration(text)
    except ValueError:
        what = f"an ISO-8601 time nor a duration such as 2h {whence}"
        return cast("datetime", word_or((), parse_at, what)(text))
    if re.fullmatch("[0-9]{8}", text.strip()):
        date = "-".join(re.findall("^....|..", text.strip()))
        raise ValueError(f"{text!r} may be a date or seconds; write {date}, or {text.strip()}s")
    return datetime.fromtimestamp(time.time() + sign * span_s, UTC)


def word_or(
    words: tuple[str, ...], parse: Callable[[str], T], what: str
) -> Callable[[str], str | T]:
    """A parser of one of these words, or of what ``parse`` reads; ``what`` says all it may be."""

    def parser(text: str) -> str | T:
        if text in words:
            return text
        try:
            return parse(text)
        except ValueError:
            raise ValueError(f"{text!r:.60} is neither {what}") from None

    return parser


def check_rate(rate: float | None) -> None:
    """Refuse a ``--rate`` that is none. Raises BadRequest."""
    if rate is not None and not 0 < rate < float("inf"):
        raise BadRequest(f"--rate is {rate:g}; a number above 0 is needed")


def word_of(words: tuple[str, ...]) -> Callable[[str], str]:
    """A parser of one of these words."""

    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(f"{text!r:.40} is none of {', '.join(words)}")
        return text

    return parse


def retry_of(policy: Policy | None) -> Retry | None:
    """The policy as the client takes it."""
    return None if policy is None else Retry.of(policy)


# --- completion ----------------------------------------------------------------------------------

ANSWER_S = 0.5


def complete_topics(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of topics that begin with ``incomplete``."""
    return sorted(name for name in _topics(ctx) if name.startswith(incomplete))


def complete_groups(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of groups that begin with ``incomplete``: of the topic before it, else of any."""
    found, topic = _topics(ctx), ctx.params.get("topic")
    chosen = [found.get(topic) or {}] if topic else list(found.values())
    names = {name for one in chosen for name in (one.get("groups") or {})}
    return sorted(name for name in names if name.startswith(incomplete))


def _topics(ctx: typer.Context) -> dict[str, Any]:
    from tickwheel.sync import Client

    def given(name: str) -> Any:
        return ctx.params.get(name) or ctx.find_root().params.get(name)

    url = given("url") or environment.value("TICKWHEEL_URL")
    try:
        client = Client(url, token=given("token"), connect_timeout=ANSWER_S, retries=0)
        with client:
            return dict(client.stats(timeout=ANSWER_S).raw.get("topics") or {})
    except TickwheelError:
        return {}


# --- how an option is made -----------------------------------------------------------------------


def typed(parse: Callable[[str], T]) -> Callable[[str], T]:
    """A parser whose ValueError becomes the usage error of the option it stands for."""

    def parser(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return parser


def option(
    help_: str,
    metavar: str | None = None,
    *names: str,
    parse: Callable[[str], Any] | None = None,
    **more: Any,
) -> Any:
    """An option: its help, what stands for its value, its names if they are not its parameter's,
    and how its value is read."""
    parser = None if parse is None else typed(parse)
    return typer.Option(*names, metavar=metavar, help=help_, parser=parser, **more)


def flag(help_: str, *names: str, **more: Any) -> Any:
    """An option without a value: its help, and its names if they are not its parameter's."""
    return typer.Option(*names, help=help_, **more)


def argument(
    metavar: str, help_: str, parse: Callable[[str], Any] | None = None, **more: Any
) -> Any:
    """An argument: what stands for its value, its help, and how its value is read."""
    parser = None if parse is None else typed(parse)
    return typer.Argument(metavar=metavar, help=help_, parser=parser, **more)


def duration(help_: str, *names: str, **more: Any) -> Any:
    """An option that takes a duration, in seconds."""
    return option(help_, "DURATION", *names, parse=parse_duration, **more)


def point(help_: str, *names: str) -> Any:
    """An option that takes a time."""
    return option(help_, "TIME", *names, parse=parse_at)


def moment(help_: str, *names: str) -> Any:
    """An option that takes a time, or how long ago it was."""
    return option(help_, "TIME|AGO", *names, parse=parse_moment)


def _one_of(words: tuple[str, ...], help_: str) -> Any:
    return option(help_, "|".join(words), parse=word_of(words))


# --- topics, groups, tasks -----------------------------------------------------------------------

TopicArgument = Annotated[
    str, argument("TOPIC", "The topic's name.", autocompletion=complete_topics)
]
GroupArgument = Annotated[str, argument("GROUP", "The group's name.")]
MaybeGroup = Annotated[
    str | None,
    option(
        "One group of it; without, the topic.", "GROUP", "--group", autocompletion=complete_groups
    ),
]
TopicOption = Annotated[str | None, option("Only this topic's.", autocompletion=complete_topics)]
GroupOption = Annotated[
    str | None, option("Only this group's. Default: every group's.", autocompletion=complete_groups)
]
OfTopicOption = Annotated[
    str | None,
    option("With --key, or for all that match: their topic.", autocompletion=complete_topics),
]
Ids = Annotated[list[int], argument("ID...", "The tasks' ids.", parse_id)]
MaybeIds = Annotated[list[int] | None, argument("[ID...]", "The tasks' ids.", parse_id)]
KeyOption = Annotated[str | None, option("Instead of ids, with --topic: all with this key.")]
BeforeOption = Annotated[
    datetime | None,
    moment("Only what was enqueued then or earlier: ISO-8601, or 2h for 2 hours ago."),
]
LimitOption = Annotated[
    int | None,
    option(f"Maximum number. Default: all with --json, {ROWS_SHOWN} as a table.", "N", min=1),
]
YesOption = Annotated[bool, flag("Do not ask.", "--yes", "-y")]

# --- due times -----------------------------------------------------------------------------------

DelayOption = Annotated[
    float | None, duration("From now: 30s, 5m, 1h30m, 500ms, 2d. A bare number is seconds.")
]
AtOption = Annotated[
    datetime | None,
    point("ISO-8601, for example 2030-01-31T09:00+01:00; without a zone it is local time."),
]
ShiftOption = Annotated[
    float | None,
    option("Move each later by this; -2h: earlier.", "DURATION", parse=parse_shift),
]

# --- a new task ----------------------------------------------------------------------------------

SPEC_METAVAR = "SPEC"
SPEC_HELP = (
    "exponential:base=10s,factor=2,cap=2h,retries=16,jitter=0.1 or fixed:delay=30s,retries=5 or "
    "table:10s,30s,1m;retries=8 or rocketmq, none, default, or a name the daemon knows."
)
RetryOption = Annotated[Any, option(SPEC_HELP, SPEC_METAVAR, parse=parse_policy)]


class TaskOptions(TypedDict, total=False):
    """The options of a task, also of those that a schedule makes: those of ``api/tasks.py``."""


def _task_options() -> Iterator[tuple[str, Any]]:
    for field, said in kept_options():
        kind, help_ = field.kind, said.help
        if isinstance(kind, kinds.Policy):
            yield field.name, RetryOption
        elif isinstance(kind, kinds.Properties):
            yield "prop", Annotated[list[str] | None, option(help_, said.metavar)]
        elif isinstance(kind, kinds.Span):
            yield field.python, Annotated[float | None, duration(help_)]
        elif isinstance(kind, kinds.Whole):
            number = option(help_, said.metavar, min=kind.low, max=kind.high)
            yield field.name, Annotated[int, number, Default(field.default)]
        else:
            yield field.name, Annotated[str | None, option(help_, said.metavar)]


TaskOptions.__annotations__.update(_task_options())


def task_keywords(options: TaskOptions) -> dict[str, Any]:
    """The options of a task as keywords of the client."""
    found: dict[str, Any] = {**options}
    if "prop" in found:
        found["properties"] = parse_properties(found.pop("prop")) or None
    if "retry" in found:
        found["retry"] = retry_of(found["retry"])
    return found


# --- tasks whose key is pending ------------------------------------------------------------------

RULE_FIELDS = (
    "action", "window", "window_ms", "unique_until", "replaces", "due", "max_wait", "max_wait_ms"
)  # fmt: skip
IfPendingOption = Annotated[
    str | None, _one_of(ACTIONS, "With --key: what to do when a task with it is pending.")
]
ActionArgument = Annotated[str, argument("|".join(ACTIONS), "What to do then.", word_of(ACTIONS))]


class RuleOptions(TypedDict, total=False):
    """The options of a rule about pending keys, beside its action."""

    window: Annotated[
        float | None, duration("Time after its enqueue one is pending. Default: until finished.")
    ]
    unique_until: Annotated[
        str | None, _one_of(UNTIL, "keep, reject: until a consumer has it, or finished it.")
    ]
    replaces: Annotated[str | None, _one_of(REPLACES, "replace: what is taken over.")]
    due: Annotated[str | None, _one_of(DUES, "replace: which of the two due times holds.")]
    max_wait: Annotated[
        float | None, duration("replace: longest time from first enqueue to due time.")
    ]


def rule_of(action: str | None, options: RuleOptions) -> IfPending | None:
    """The rule of the options. Raises BadRequest for one without --if-pending."""
    if action is not None:
        return IfPending(cast("Action", action), **cast("Any", options))
    for name in options:
        raise BadRequest(f"--{name.replace('_', '-')} goes with --if-pending")
    return None


def rule_of_json(value: Any) -> IfPending:
    """The rule in a line of JSON: an action, or an object of RULE_FIELDS; durations in seconds or
    as text. Raises ValueError."""
    if isinstance(value, str):
        return IfPending(cast("Action", value))
    if not isinstance(value, dict) or not isinstance(value.get("action"), str):
        raise ValueError(f"an action or an object with one is needed, not {value!r:.40}")
    unknown = sorted(value.keys() - set(RULE_FIELDS))
    if unknown:
        raise ValueError(f"{unknown[0]} is not known; known are {', '.join(RULE_FIELDS)}")
    given = rule_wire(value)
    for name in RULE_DURATIONS:
        ms = given.pop(f"{name}_ms", None)
        if ms is not None:
            if type(ms) is not int or not 0 <= ms <= DURATION_MS_MAX:
                raise ValueError(f"{name}_ms is {ms!r:.40}, which is not a duration")
            given[name] = ms / 1000
    return IfPending(given.pop("action"), **given)


# --- groups --------------------------------------------------------------------------------------

BurstOption = Annotated[
    int | None, option("Number at once after a pause. Default: the rate.", "N", min=1)
]


class GroupOptions(TypedDict, total=False):
    """The options of a group, for whoever makes it or takes from it."""

    tags: Annotated[
        str | None, option("The filter: tasks with one of these tags, 'eu || us'.", "TAGS")
    ]
    where: Annotated[
        str | None,
        option(
            "The filter: tasks of which this is true, 'amount > 10 AND region IS NOT NULL'.", "SQL"
        ),
    ]
    order_retry: Annotated[
        float | None,
        duration("When a failed task of an order key is tried again: 10ms to 30s. Default: 1s."),
    ]
    order_attempts: Annotated[
        int | None, option("So often, until --order-failure. Default: 16.", "N", min=1)
    ]
    order_failure: Annotated[
        str | None,
        option(
            "Then it is dead and its key goes on, or its key is held (default); retry: for ever.",
            "dead|hold|retry",
        ),
    ]
    fair_by: Annotated[
        str | None,
        option(
            "Tasks of each key, tag, or value of this property take turns with the others'.",
            "key|tag|NAME",
        ),
    ]
    limit_each: Annotated[
        int | None, option("With --fair-by: in flight of each value.", "N", min=0)
    ]
    rate_each: Annotated[
        float | None, option("With --fair-by: a second of each value.", "N", min=0)
    ]


class NewGroupOptions(GroupOptions, total=False):
    """The options of a group that is made."""

    retry: RetryOption
    rate: Annotated[float | None, option("Deliveries a second at most.", "N")]
    burst: BurstOption
    paused: Annotated[bool, flag("Deliver nothing until resumed.")]


def group_keywords(options: GroupOptions) -> GroupKeywords:
    """The options of a group as keywords of the client; a limit of 0 is none."""
    found = {
        name: value if name in ("tags", "where") else value or None
        for name, value in options.items()
    }
    return cast("GroupKeywords", found)  # the daemon says which words there are


# --- all that matches ----------------------------------------------------------------------------

MATCHING = "Everything of --topic that matches, as a bulk operation"


_matching = partial(option, rich_help_panel=MATCHING)
_matching_flag = partial(flag, rich_help_panel=MATCHING)
BulkRate = Annotated[float | None, _matching("Maximum per second.", "N")]


class SelectionOptions(TypedDict, total=False):
    """The options that select tasks or dead letters, by the client's names."""

    tags: Annotated[str | None, _matching("With one of these tags: 'eu || us'.", "TAGS")]
    where: Annotated[str | None, _matching("Condition to meet: 'amount > 10'.", "SQL")]
    key_prefix: Annotated[str | None, _matching("Prefix of the key.", "TEXT")]
    due_from: Annotated[
        datetime | None,
        _matching(
            "Due then or later: ISO-8601, or 2h for in two hours.", "TIME|IN", parse=parse_coming
        ),
    ]
    due_to: Annotated[datetime | None, _matching("Due before then.", "TIME|IN", parse=parse_coming)]


class DeadBulkOptions(SelectionOptions, total=False):
    """The options that make a command on dead letters a bulk operation."""

    dry_run: Annotated[bool, _matching_flag("Say what would be done; do nothing.")]
    yes: Annotated[bool, _matching_flag("Do not ask.", "--yes", "-y")]
    wait: Annotated[bool, _matching_flag("Until the bulk operation is over; shows how far it is.")]


class TaskBulkOptions(DeadBulkOptions, total=False):
    """The options that make a command on tasks a bulk operation."""

    state: Annotated[str | None, _matching("scheduled, ready, in_flight, waiting, dead.", "STATE")]
    all_: Annotated[bool, _matching_flag("All of them, whatever they are.")]
    rate: BulkRate
