"""Values on the command line, and the arguments and options that several commands share, each with
one meaning and one help text.

Parsers raise ValueError with a sentence that names the value; ``typed`` turns it into the option's
usage error. ``model/policies.py`` parses durations and policies. Topics and groups are completed by
asking the daemon. The shell waits during a completion, so a daemon that does not answer at once
gives no completions.
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
    """Parse a task id as printed by the daemon. Raise ValueError."""
    if not text.isascii() or not text.isdecimal() or int(text) > ID_MAX:
        raise ValueError(f"{text!r} is not a valid task id, an integer from 0 to 2^63 - 1")
    return int(text)


def parse_property(text: str) -> tuple[str, str | int | float | bool]:
    """Parse a property: ``name=value`` is a text, which may be empty or contain equals signs;
    ``name:=value`` is a number, true or false. Raise ValueError."""
    name, equals, value = text.partition("=")
    if not equals or name in {"", ":"}:
        raise ValueError(f"{text!r} is not a valid property; write name=value, or name:=number")
    if not name.endswith(":"):
        return name, value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, (int, float)):
        raise ValueError(
            f"{text!r} is not a valid property: the value after := must be a number, true or false"
        )
    return name[:-1], parsed


def parse_value(text: str) -> str | int | float | bool:
    """Parse a value of a property: a text, or after ``:=`` a number, true or false."""
    return parse_property(f"value{text}" if text.startswith(":=") else f"value={text}")[1]


def parse_properties(texts: list[str] | None) -> dict[str, PropertyValue]:
    """Parse the properties of ``--prop``. Raise BadRequest."""
    try:
        return dict(parse_property(text) for text in texts or ())
    except ValueError as error:
        raise BadRequest(f"--prop: {error}") from None


def parse_moment(text: str) -> datetime:
    """Parse a time, or an age: ``2h`` is two hours ago by this machine's clock."""
    return _time_or_span(text, -1, "(ago)")


def parse_coming(text: str) -> datetime:
    """Parse a time, or a wait: ``2h`` is in two hours by this machine's clock."""
    return _time_or_span(text, 1, "(from now)")


def _time_or_span(text: str, sign: int, reference: str) -> datetime:
    try:
        span_s = parse_duration(text)
    except ValueError:
        what = f"an ISO-8601 time nor a duration such as 2h {reference}"
        return cast("datetime", word_or((), parse_at, what)(text))
    if re.fullmatch("[0-9]{8}", text.strip()):
        date = "-".join(re.findall("^....|..", text.strip()))
        raise ValueError(f"{text!r} could be a date or seconds; write {date}, or {text.strip()}s")
    return datetime.fromtimestamp(time.time() + sign * span_s, UTC)


def word_or(
    words: tuple[str, ...], parse: Callable[[str], T], what: str
) -> Callable[[str], str | T]:
    """Return a parser of one of these words or of what ``parse`` accepts; ``what`` names both."""

    def parser(text: str) -> str | T:
        if text in words:
            return text
        try:
            return parse(text)
        except ValueError:
            raise ValueError(f"{text!r:.60} is neither {what}") from None

    return parser


def check_rate(rate: float | None) -> None:
    """Raise BadRequest for an invalid ``--rate``."""
    if rate is not None and not 0 < rate < float("inf"):
        raise BadRequest(f"--rate must be a number above 0, not {rate:g}")


def word_of(words: tuple[str, ...]) -> Callable[[str], str]:
    """Return a parser of these words."""

    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(f"{text!r:.40} is not one of {', '.join(words)}")
        return text

    return parse


def retry_of(policy: Policy | None) -> Retry | None:
    """Convert a policy to the client's type."""
    return None if policy is None else Retry.of(policy)


# --- completion ----------------------------------------------------------------------------------

ANSWER_S = 0.5


def complete_topics(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return names of topics that begin with ``incomplete``."""
    return sorted(name for name in _topics(ctx) if name.startswith(incomplete))


def complete_groups(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return names of groups that begin with ``incomplete``: the given topic's, or any topic's."""
    topics, topic = _topics(ctx), ctx.params.get("topic")
    chosen = [topics.get(topic) or {}] if topic else list(topics.values())
    names = {name for stats in chosen for name in (stats.get("groups") or {})}
    return sorted(name for name in names if name.startswith(incomplete))


def _topics(ctx: typer.Context) -> dict[str, Any]:
    from tickwheel.sync import Client

    def value_of(name: str) -> Any:
        return ctx.params.get(name) or ctx.find_root().params.get(name)

    url = value_of("url") or environment.value("TICKWHEEL_URL")
    try:
        client = Client(url, token=value_of("token"), connect_timeout=ANSWER_S, retries=0)
        with client:
            return dict(client.stats(timeout=ANSWER_S).raw.get("topics") or {})
    except TickwheelError:
        return {}


# --- constructors of options ------------------------------------------------------------------


def typed(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return a parser that turns a ValueError into the option's usage error."""

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
    """Return an option with its help, the placeholder of its value, its names (default: its
    parameter's) and its parser."""
    parser = None if parse is None else typed(parse)
    return typer.Option(*names, metavar=metavar, help=help_, parser=parser, **more)


def flag(help_: str, *names: str, **more: Any) -> Any:
    """Return an option without a value, with its help and names (default: its parameter's)."""
    return typer.Option(*names, help=help_, **more)


def argument(
    metavar: str, help_: str, parse: Callable[[str], Any] | None = None, **more: Any
) -> Any:
    """Return an argument with its placeholder, its help and its parser."""
    parser = None if parse is None else typed(parse)
    return typer.Argument(metavar=metavar, help=help_, parser=parser, **more)


def duration(help_: str, *names: str, **more: Any) -> Any:
    """Return an option for a duration in seconds."""
    return option(help_, "DURATION", *names, parse=parse_duration, **more)


def point(help_: str, *names: str) -> Any:
    """Return an option for a time."""
    return option(help_, "TIME", *names, parse=parse_at)


def moment(help_: str, *names: str) -> Any:
    """Return an option for a time, or how long ago it was."""
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
        "A group of it. Default: the topic.", "GROUP", "--group", autocompletion=complete_groups
    ),
]
TopicOption = Annotated[str | None, option("Only this topic.", autocompletion=complete_topics)]
GroupOption = Annotated[
    str | None,
    option("Only this group. Default: all groups.", autocompletion=complete_groups),
]
OfTopicOption = Annotated[
    str | None, option("The topic of --key or of the selection.", autocompletion=complete_topics)
]
Ids = Annotated[list[int], argument("ID...", "The tasks' ids.", parse_id)]
MaybeIds = Annotated[list[int] | None, argument("[ID...]", "The tasks' ids.", parse_id)]
KeyOption = Annotated[str | None, option("With --topic, instead of ids: all tasks with this key.")]
BeforeOption = Annotated[
    datetime | None,
    moment("Only tasks enqueued at this time or earlier: ISO-8601, or 2h for 2 hours ago."),
]
LimitOption = Annotated[
    int | None,
    option(f"Maximum number. Default: all with --json, {ROWS_SHOWN} as a table.", "N", min=1),
]
YesOption = Annotated[bool, flag("Do not ask for confirmation.", "--yes", "-y")]

# --- due times -----------------------------------------------------------------------------------

DelayOption = Annotated[
    float | None, duration("Time from now: 30s, 5m, 1h30m, 500ms, 2d. A bare number is seconds.")
]
AtOption = Annotated[
    datetime | None,
    point("ISO-8601, for example 2030-01-31T09:00+01:00; local time without a zone."),
]
ShiftOption = Annotated[
    float | None,
    option("Move each task later by this; -2h: earlier.", "DURATION", parse=parse_shift),
]

# --- a new task ----------------------------------------------------------------------------------

SPEC_METAVAR = "SPEC"
SPEC_HELP = (
    "exponential:base=10s,factor=2,cap=2h,retries=16,jitter=0.1 or fixed:delay=30s,retries=5 or "
    "table:10s,30s,1m;retries=8 or rocketmq, none, default, or a name the daemon knows."
)
RetryOption = Annotated[Any, option(SPEC_HELP, SPEC_METAVAR, parse=parse_policy)]


class TaskOptions(TypedDict, total=False):
    """The options of a task, also of a schedule's tasks; see ``api/tasks.py``."""


def _task_options() -> Iterator[tuple[str, Any]]:
    for field, option_info in kept_options():
        kind, help_ = field.kind, option_info.help
        if isinstance(kind, kinds.Policy):
            yield field.name, RetryOption
        elif isinstance(kind, kinds.Properties):
            yield "prop", Annotated[list[str] | None, option(help_, option_info.metavar)]
        elif isinstance(kind, kinds.Span):
            yield field.python, Annotated[float | None, duration(help_)]
        elif isinstance(kind, kinds.Whole):
            number = option(help_, option_info.metavar, min=kind.low, max=kind.high)
            yield field.name, Annotated[int, number, Default(field.default)]
        else:
            yield field.name, Annotated[str | None, option(help_, option_info.metavar)]


TaskOptions.__annotations__.update(_task_options())


def task_keywords(options: TaskOptions) -> dict[str, Any]:
    """Convert the options of a task to keywords of the client."""
    keywords: dict[str, Any] = {**options}
    if "prop" in keywords:
        keywords["properties"] = parse_properties(keywords.pop("prop")) or None
    if "retry" in keywords:
        keywords["retry"] = retry_of(keywords["retry"])
    return keywords


# --- tasks whose key is pending ------------------------------------------------------------------

RULE_FIELDS = (
    "action", "window", "window_ms", "unique_until", "replaces", "due", "max_wait", "max_wait_ms"
)  # fmt: skip
IfPendingOption = Annotated[
    str | None, _one_of(ACTIONS, "With --key: what to do if the key is pending.")
]
ActionArgument = Annotated[
    str, argument("|".join(ACTIONS), "What to do if the key is pending.", word_of(ACTIONS))
]


class RuleOptions(TypedDict, total=False):
    """The options of a rule for pending keys, besides its action."""

    window: Annotated[
        float | None,
        duration("How long a task stays pending after its enqueue. Default: until finished."),
    ]
    unique_until: Annotated[str | None, _one_of(UNTIL, "keep, reject: how long a task is pending.")]
    replaces: Annotated[str | None, _one_of(REPLACES, "replace: what to take from the new task.")]
    due: Annotated[str | None, _one_of(DUES, "replace: which of the two due times to use.")]
    max_wait: Annotated[
        float | None, duration("replace: maximum time from first enqueue to due time.")
    ]


def rule_of(action: str | None, options: RuleOptions) -> IfPending | None:
    """Return the rule of the options. Raise BadRequest for a rule option without --if-pending."""
    if action is not None:
        return IfPending(cast("Action", action), **cast("Any", options))
    for name in options:
        raise BadRequest(f"--{name.replace('_', '-')} requires --if-pending")
    return None


def rule_of_json(value: Any) -> IfPending:
    """Return the rule in a line of JSON: an action, or an object of RULE_FIELDS with durations in
    seconds or as text. Raise ValueError."""
    if isinstance(value, str):
        return IfPending(cast("Action", value))
    if not isinstance(value, dict) or not isinstance(value.get("action"), str):
        raise ValueError(
            f"if_pending must be an action or an object with an action, not {value!r:.40}"
        )
    unknown = sorted(value.keys() - set(RULE_FIELDS))
    if unknown:
        raise ValueError(
            f"{unknown[0]} is not a valid field; valid fields are {', '.join(RULE_FIELDS)}"
        )
    rule = rule_wire(value)
    for name in RULE_DURATIONS:
        ms = rule.pop(f"{name}_ms", None)
        if ms is not None:
            if type(ms) is not int or not 0 <= ms <= DURATION_MS_MAX:
                raise ValueError(f"{name}_ms must be a duration, not {ms!r:.40}")
            rule[name] = ms / 1000
    return IfPending(rule.pop("action"), **rule)


# --- groups --------------------------------------------------------------------------------------

BurstOption = Annotated[
    int | None, option("Deliveries at once after a pause. Default: the rate.", "N", min=1)
]


class GroupOptions(TypedDict, total=False):
    """The options of a group, for commands that create it or consume from it."""

    tags: Annotated[str | None, option("Filter: tasks with one of these tags, 'eu || us'.", "TAGS")]
    where: Annotated[
        str | None,
        option(
            "Filter: tasks that meet this condition, 'amount > 10 AND region IS NOT NULL'.", "SQL"
        ),
    ]
    order_retry: Annotated[
        float | None, duration("Delay before a retry of an order key: 10ms to 30s. Default: 1s.")
    ]
    order_attempts: Annotated[
        int | None, option("Failed attempts until --order-failure. Default: 16.", "N", min=1)
    ]
    order_failure: Annotated[
        str | None,
        option(
            "dead: it becomes a dead letter; hold: its key is held (default); retry: forever.",
            "dead|hold|retry",
        ),
    ]
    fair_by: Annotated[
        str | None,
        option(
            "Take turns between tasks of each key, tag, or value of this property.", "key|tag|NAME"
        ),
    ]
    limit_each: Annotated[
        int | None, option("With --fair-by: maximum in flight for each value.", "N", min=0)
    ]
    rate_each: Annotated[
        float | None, option("With --fair-by: maximum per second for each value.", "N", min=0)
    ]


class NewGroupOptions(GroupOptions, total=False):
    """The options of a group that is created."""

    retry: RetryOption
    rate: Annotated[float | None, option("Maximum deliveries per second.", "N")]
    burst: BurstOption
    paused: Annotated[bool, flag("Deliver nothing until resumed.")]


def group_keywords(options: GroupOptions) -> GroupKeywords:
    """Convert the options of a group to keywords of the client; a limit of 0 means no limit."""
    keywords = {
        name: value if name in ("tags", "where") else value or None
        for name, value in options.items()
    }
    return cast("GroupKeywords", keywords)  # the daemon checks the words


# --- all that matches ----------------------------------------------------------------------------

MATCHING = "Selection within --topic, as a bulk operation"


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
        _matching("Due then or later: ISO-8601, or 2h from now.", "TIME|IN", parse=parse_coming),
    ]
    due_to: Annotated[datetime | None, _matching("Due before then.", "TIME|IN", parse=parse_coming)]


class DeadBulkOptions(SelectionOptions, total=False):
    """The options that make a command on dead letters a bulk operation."""

    dry_run: Annotated[bool, _matching_flag("Print what would be done; change nothing.")]
    yes: Annotated[bool, _matching_flag("Do not ask for confirmation.", "--yes", "-y")]
    wait: Annotated[bool, _matching_flag("Wait for the end, and show progress.")]


class TaskBulkOptions(DeadBulkOptions, total=False):
    """The options that make a command on tasks a bulk operation."""

    state: Annotated[str | None, _matching("scheduled, ready, in_flight, waiting, dead.", "STATE")]
    all_: Annotated[bool, _matching_flag("All tasks of the topic.")]
    rate: BulkRate
