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
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, TypedDict, TypeVar, cast

import typer

from tickwheel import environment
from tickwheel.api import kinds
from tickwheel.api.bulk import SelectionFields, TaskSelectionFields
from tickwheel.api.frames import Action
from tickwheel.api.groups import GroupFields
from tickwheel.api.shapes import REQUIRED, Field
from tickwheel.api.targets import Password, Secrets
from tickwheel.api.tasks import Option as TaskOption
from tickwheel.api.tasks import kept_options
from tickwheel.api.times import local_time, parse_time
from tickwheel.cli.call import Default
from tickwheel.cli.output import ROWS_SHOWN
from tickwheel.client import GroupKeywords, IfPending, Retry
from tickwheel.errors import BadRequest, TickwheelError, shown
from tickwheel.limits import ID_MAX, Limits
from tickwheel.model.policies import (
    ACTIONS,
    DUES,
    REPLACES,
    UNTIL,
    Policy,
    checked_rule,
    duration_ms,
    duration_spec,
    parse_duration,
    parse_policy,
    parse_shift,
    policy_of_json,
    rule_wire,
)
from tickwheel.model.values import InvalidValue, is_utf8, members, whole_number

T = TypeVar("T")

# --- values --------------------------------------------------------------------------------------


def parse_id(text: str) -> int:
    """Parse a task id as printed by the daemon. Raise ValueError."""
    task_id = whole_number(text)
    if task_id is None or task_id > ID_MAX:
        raise ValueError(f"{text!r:.60} is not a valid task id, an integer from 0 to 2^63 - 1")
    return task_id


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
        return cast("datetime", word_or((), parse_time, what)(text))
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


def parse_rate(text: str, *, may_be_0: bool = False) -> float:
    """Parse a number above 0, or 0 if that is allowed. Raise ValueError."""
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not 0 <= rate < float("inf") or (not rate and not may_be_0):
        raise ValueError(f"{text!r:.40} is not a number{', 0 or more' if may_be_0 else ' above 0'}")
    return rate


def word_of(words: tuple[str, ...]) -> Callable[[str], str]:
    """Return a parser of these words."""

    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(f"{text!r:.40} is not one of {', '.join(words)}")
        return text

    return parse


def parse_retry(text: str) -> Retry:
    """Parse a retry policy. Raise ValueError."""
    return _retry(parse_policy(text))


def _retry(policy: Policy) -> Retry:
    try:
        return Retry.of(policy)
    except BadRequest as error:
        raise ValueError(error.message) from None


LIMITS = Limits(
    **dict.fromkeys(
        ("frame_bytes_max", "body_bytes_max", "property_value_bytes_max", "delay_ms_max",
         "within_ms_max"), ID_MAX
    )
)  # fmt: skip
"""Limits for a check without a daemon, whose limits can be higher than the defaults."""


def read_value(kind: kinds.FieldKind, value: Any) -> Any:
    """Return a value in JSON or TOML as the client takes it: a duration is text or seconds, a time
    ISO-8601, a policy a SPEC or a map. The kind checks other values. Raise ValueError."""
    if isinstance(kind, kinds.Policy):
        return _retry(policy_of_json(value))
    if isinstance(kind, kinds.Rule):
        return rule_of_json(value)
    if isinstance(kind, kinds.Span):
        return duration_ms(value) / 1000
    if isinstance(kind, kinds.Properties) and not isinstance(value, dict):
        raise ValueError(f"must be an object, not {value!r:.40}")
    if isinstance(kind, kinds.Moment) and isinstance(value, datetime):
        return local_time(value) if value.tzinfo is None else value
    if isinstance(kind, (kinds.Moment, kinds.Body)):
        if not isinstance(value, str):
            raise ValueError(f"must be a string, not {value!r:.40}")
        if isinstance(kind, kinds.Moment):
            return parse_time(value)
        if not is_utf8(value):
            raise ValueError("must not contain half a surrogate pair")
        return value.encode()
    return value


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


def time_option(help_: str, *names: str, **more: Any) -> Any:
    """Return an option for a time."""
    return option(help_, "TIME", *names, parse=parse_time, **more)


def past_time_option(help_: str, *names: str, **more: Any) -> Any:
    """Return an option for a time, or how long ago it was."""
    help_ = f"{help_.removesuffix('.')}: ISO-8601, or 2h for 2 hours ago."
    return option(help_, "TIME|AGO", *names, parse=parse_moment, **more)


def limit_option(answer_max: int | None = None) -> Any:
    """Return an option for the number of rows; ``answer_max``: rows of an answer without pages."""
    default = f"Default: {answer_max or 'all'} with --json, {ROWS_SHOWN} as a table."
    return option(f"Maximum number. {default}", "N", min=1, max=answer_max)


def future_time_option(help_: str, *names: str, **more: Any) -> Any:
    """Return an option for a time, or how long from now it is."""
    help_ = f"{help_.removesuffix('.')}: ISO-8601, or 2h from now."
    return option(help_, "TIME|IN", *names, parse=parse_coming, **more)


CHOICES_LENGTH_MAX = 36
"""Maximum characters of words as a placeholder; longer lists of words go into the help."""


def one_of(words: tuple[str, ...], help_: str, metavar: str = "", **more: Any) -> Any:
    """Return an option for one of these words; ``metavar`` is the placeholder for long lists."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    shown = "|".join(words)
    if len(shown) > CHOICES_LENGTH_MAX:
        shown, help_ = metavar, f"{help_.removesuffix('.')}: {', '.join(words)}."
    return option(help_, shown, parse=word_of(words), autocompletion=complete, **more)


# --- options of declared fields ------------------------------------------------------------------

NAMES = {
    "not_after": "before", "next": "next", "from_ms": "from_", "to_ms": "to", "runs_max": "runs",
    "format": "format_", "url": "to", "secrets": "secret_file", "secret": "secret_file",
    "properties": "prop", "ids": "task_id", "id": "task_id",
}  # fmt: skip
"""Field or client's keyword → its parameter, if the names differ. ``--url`` is the daemon's."""
METAVARS = {
    "tags": "TAGS", "where": "SQL", "fair_by": "key|tag|NAME", "property": "NAME=VALUE",
    "cron": "EXPR", "timezone": "ZONE", "url": "URL", "reason": "TEXT", "key_prefix": "TEXT",
}  # fmt: skip
"""Placeholders for the values of text options."""
COMPLETIONS = {"topic": complete_topics, "group": complete_groups}
REMOVED_BY_0 = ("limit_each", "rate_each")
"""Settings that 0 removes."""
BOUND_MAX = 2**53 - 1
"""The help shows only upper bounds below this."""
_FIELD_NAMES = re.compile(r"\b[a-z]+(?:_[a-z]+)+\b")


def parameter_name(field: Field) -> str:
    """Return the parameter of a declared field, which is also its option's name."""
    return NAMES.get(field.name, NAMES.get(field.python, field.python))


def _help_of(field: Field) -> str:
    """Return the sentence of a declared field with the names of options instead of fields."""
    named = _FIELD_NAMES.sub(lambda found: f"--{found[0].replace('_', '-')}", field.text)
    return named.replace("``", "`")


def argument_of(word: str, field: Field) -> Any:
    """Return the annotation of the argument for a declared field; ``word`` is its placeholder."""
    help_ = _help_of(field).replace("; by default the default group", "")
    if isinstance(field.kind, (kinds.Ids, kinds.Id)):
        return Annotated[int | None, argument(word, "The id of the task.", parse_id)]
    if isinstance(field.kind, kinds.Whole):
        return Annotated[int, argument(word, help_, **_bounds(field))]
    return Annotated[str, argument(word, help_, autocompletion=COMPLETIONS.get(field.name))]


def option_of(field: Field, times: Callable[..., Any] = time_option, **more: Any) -> Any:
    """Return the annotation of the option for a declared field. ``times`` makes the option of a
    time; ``more`` is the same for all options of a block."""
    kind, help_, metavar = field.kind, _help_of(field), METAVARS.get(field.name)
    if isinstance(field.mark, TaskOption):
        help_, metavar = field.mark.help, field.mark.metavar
    type_: Any = str
    if isinstance(kind, kinds.Policy):
        return RetryOption
    if isinstance(kind, kinds.Flag):
        type_, info = bool, flag(help_, **more)
    elif isinstance(kind, kinds.Span):
        if kind.low > 1 and kind.high < BOUND_MAX:
            help_ += f" From {duration_spec(kind.low)} to {duration_spec(kind.high)}."
        type_, info = float, duration(help_, **more)
    elif isinstance(kind, kinds.Moment):
        type_, info = Any, times(help_, **more)
    elif isinstance(kind, kinds.Whole):
        type_, info = int, option(help_, metavar if field.mark else "N", **_bounds(field), **more)
    elif isinstance(kind, kinds.Number):
        parse = partial(parse_rate, may_be_0=field.name in REMOVED_BY_0)
        type_, info = float, option(help_, "N", parse=parse, **more)
    elif isinstance(kind, kinds.Properties):
        type_, info = list[Any], option(help_, metavar, parse=parse_property, **more)
    elif isinstance(kind, kinds.PropertyValue):
        type_, info = Any, option(f"{help_} :=12 is a number.", "VALUE", parse=parse_value, **more)
    elif isinstance(kind, kinds.Since):
        what = f"{' nor '.join(kind.words)} nor an ISO-8601 time"
        parse_since, metavar = (
            word_or(kind.words, parse_time, what),
            "|".join((*kind.words, "TIME")),
        )
        type_, info = Any, option(help_, metavar, parse=parse_since, **more)
    elif isinstance(kind, kinds.Choice):
        info = one_of(kind.words, help_, field.name.upper(), **more)
    elif isinstance(kind, Secrets):
        info = option(f"{help_} The file has one on each line: {kind.bounds}.", "FILE", **more)
    elif isinstance(kind, Password):
        info = option(f"{help_} The file contains it.", "FILE", **more)
    else:
        completions = COMPLETIONS.get(field.name) if isinstance(kind, kinds.Name) else None
        info = option(help_, metavar, autocompletion=completions, **more)
    default = () if field.default in (None, REQUIRED) else (Default(field.default),)
    return Annotated[(type_ if type_ is bool else type_ | None, info, *default)]


def _bounds(field: Field) -> dict[str, Any]:
    kind: Any = field.kind
    low = 0 if field.name in REMOVED_BY_0 else kind.low
    return {"min": low, "max": kind.high if kind.high < BOUND_MAX else None}


def derive(block: Any, fields: Iterable[Field], *times: Any, **more: Any) -> None:
    """Add the options of declared fields to a block."""
    block.__annotations__ |= {parameter_name(f): option_of(f, *times, **more) for f in fields}


# --- topics, groups, tasks -----------------------------------------------------------------------

TopicArgument = Annotated[
    str, argument("TOPIC", "The topic's name.", autocompletion=complete_topics)
]
GroupArgument = Annotated[str, argument("GROUP", "The group's name.")]
MaybeGroup = Annotated[
    str | None,
    option(
        "A group of TOPIC, else TOPIC itself.", "GROUP", "--group", autocompletion=complete_groups
    ),
]
TopicOption = Annotated[str | None, option("Only this topic.", autocompletion=complete_topics)]
GroupOption = Annotated[
    str | None,
    option("Only this group. Default: all groups.", autocompletion=complete_groups),
]
Ids = Annotated[list[int], argument("ID...", "The tasks' ids.", parse_id)]
MaybeIds = Annotated[list[int] | None, argument("[ID...]", "The tasks' ids.", parse_id)]
BeforeOption = Annotated[
    datetime | None, past_time_option("Only tasks enqueued at this time or earlier.")
]
LimitOption = Annotated[int | None, limit_option()]
YesOption = Annotated[bool, flag("Do not ask for confirmation.", "--yes", "-y")]

# --- due times -----------------------------------------------------------------------------------

DelayOption = Annotated[
    float | None, duration("Time from now: 30s, 5m, 1h30m, 500ms, 2d. A bare number is seconds.")
]
AtOption = Annotated[
    datetime | None,
    time_option("ISO-8601, for example 2030-01-31T09:00+01:00; local time without a zone."),
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
RetryOption = Annotated[Any, option(SPEC_HELP, SPEC_METAVAR, parse=parse_retry)]


class TaskOptions(TypedDict, total=False):
    """The options of a task, also of a schedule's tasks; see ``api/tasks.py``."""


derive(TaskOptions, (field for field, _ in kept_options()))


def task_keywords(options: TaskOptions) -> dict[str, Any]:
    """Convert the options of a task to keywords of the client."""
    keywords: dict[str, Any] = {**options}
    return keywords | {"properties": properties_of(keywords.pop("prop", ()))}


def properties_of(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any] | None:
    """Return the properties in values of --prop, or None. Raise BadRequest for a repeated name."""
    try:
        return members(pairs) or None
    except InvalidValue as error:
        raise BadRequest(f"--prop: {error.message(shown)}") from None


# --- tasks whose key is pending ------------------------------------------------------------------

IfPendingOption = Annotated[
    str | None, one_of(ACTIONS, "With --key: what to do if the key is pending.")
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
    unique_until: Annotated[str | None, one_of(UNTIL, "keep, reject: how long a task is pending.")]
    replaces: Annotated[str | None, one_of(REPLACES, "replace: what to take from the new task.")]
    due: Annotated[str | None, one_of(DUES, "replace: which of the two due times to use.")]
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
    """Return the rule in JSON: an action, or an object with durations in seconds or as text, or
    under names that end in ``_ms`` in milliseconds. Raise ValueError."""
    fields = rule_wire(value) if isinstance(value, dict) else value
    return IfPending.of(checked_rule(fields, "the rule").to_map())


# --- groups --------------------------------------------------------------------------------------


class GroupOptions(TypedDict, total=False):
    """The options of a group, for commands that change it or consume from it."""


derive(GroupOptions, GroupFields.fields())


def group_keywords(options: GroupOptions) -> GroupKeywords:
    """Convert the options of a group to keywords of the client; a limit of 0 means no limit."""
    keywords = {
        name: (value or None) if name in REMOVED_BY_0 else value for name, value in options.items()
    }
    return cast("GroupKeywords", keywords)  # the daemon checks the words


# --- all that matches ----------------------------------------------------------------------------

MATCHING = "Selection within --topic, as a bulk operation"


RateOption = Annotated[
    float | None, option("Maximum per second; default: unlimited.", "N", parse=parse_rate)
]
BulkRate = Annotated[
    float | None, option("Maximum per second.", "N", parse=parse_rate, rich_help_panel=MATCHING)
]
_matching_flag = partial(flag, rich_help_panel=MATCHING)


class SelectionOptions(TypedDict, total=False):
    """The options that select tasks or dead letters, by the client's names."""


derive(SelectionOptions, SelectionFields.fields(), future_time_option, rich_help_panel=MATCHING)


class DeadBulkOptions(SelectionOptions, total=False):
    """The options that make a command on dead letters a bulk operation."""

    dry_run: Annotated[bool, _matching_flag("Print what would be done; change nothing.")]
    yes: Annotated[bool, _matching_flag("Do not ask for confirmation.", "--yes", "-y")]
    wait: Annotated[bool, _matching_flag("Wait for the end, and show progress.")]


class TaskBulkOptions(DeadBulkOptions, total=False):
    """The options of a command on tasks by ids or key, or by selection, as a bulk operation."""

    ids: MaybeIds
    topic: Annotated[
        str | None,
        option("The topic of --key or of the selection.", autocompletion=complete_topics),
    ]
    key: Annotated[str | None, option("With --topic, instead of ids: all tasks with this key.")]
    all_: Annotated[bool, _matching_flag("All tasks of the topic.")]
    rate: BulkRate


derive(TaskBulkOptions, [TaskSelectionFields.field("state")], rich_help_panel=MATCHING)
