"""What people type and read: times, ids, properties; durations and retry policies as text. Pure: no
terminal, no clock. Parsers raise ValueError with a sentence that names the value; the caller adds
which argument it was. Durations and policies are read by ``model/written.py``.

Words that a shell completes by asking the daemon: topics and groups.

A shell waits for them while somebody types, so a daemon that does not answer at once has none.

Arguments and options that several commands have, each with one meaning and one help text."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, TypedDict, TypeVar, cast

import typer

from tickwheel.client import GroupKeywords, IfPending, Retry
from tickwheel.client.words import Action
from tickwheel.errors import BadRequest, TickwheelError
from tickwheel.model.coalescing import ACTIONS, DUES, REPLACES, UNTIL
from tickwheel.model.written import (
    DURATION_MS_MAX,
    RULE_DURATIONS,
    SPEC_FIELDS,
    UNITS_MS,
    Policy,
    parse_duration,
    parse_policy,
    parse_shift,
    rule_wire,
)

# --- times, ids, durations, policies -------------------------------------------------------------

ID_MAX = 2**63 - 1
BODY_SHOWN_MAX = 60
"""Characters of a body in a table; JSON holds all of it."""


def parse_at(text: str) -> datetime:
    """A time in ISO-8601 with a zone. Without a zone it is this machine's local time."""
    try:
        found = datetime.fromisoformat(text.strip())
        return found.astimezone() if found.tzinfo is None else found
    except (ValueError, OverflowError):
        raise ValueError(
            f"{text!r} is no ISO-8601 time; write for example 2030-01-31T09:00:00+01:00"
        ) from None


def parse_id(text: str) -> int:
    """A task's id as the daemon gave it. Raises ValueError."""
    if not text.isascii() or not text.isdecimal() or int(text) > ID_MAX:
        raise ValueError(f"{text!r} is no task id (a whole number from 0 to 2^63 - 1)")
    return int(text)


def parse_property(text: str) -> tuple[str, str | int | float | bool]:
    """A property: ``name=value`` is a text, which may be empty or hold more equals signs;
    ``name:=value`` is a number, true or false."""
    name, equals, value = text.partition("=")
    if not equals or name in {"", ":"}:
        raise ValueError(f"{text!r} is no property; write name=value, or name:=number")
    if not name.endswith(":"):
        return name, value
    try:
        found = json.loads(value)
    except ValueError:
        found = None
    if not isinstance(found, (int, float)):
        raise ValueError(f"{text!r}: a number, true or false is needed behind :=")
    return name[:-1], found


def format_duration(seconds: float) -> str:
    """A duration in its two largest units: ``1h 30m``, ``12.5 s``, ``3 ms``."""
    total_ms = round(abs(seconds) * 1000)
    sign = "-" if seconds < 0 and total_ms else ""
    if total_ms < 1_000:
        return f"{sign}{total_ms} ms"
    if total_ms < 60_000:
        return f"{sign}{total_ms / 1000:.3g} s"
    parts: list[str] = []
    rest_ms = total_ms
    for unit in ("d", "h", "m", "s"):
        count, rest_ms = divmod(rest_ms, UNITS_MS[unit])
        if count or parts:
            parts.append(f"{count}{unit}")
        if len(parts) == 2:
            break
    return sign + " ".join(parts)


def format_count(value: Any) -> str:
    """A count as ``12,345``; a dash when it is not known."""
    return f"{value:,}" if isinstance(value, int) else "-"


def format_time(at_ms: int | None) -> str:
    """A local time to the millisecond; a dash for none."""
    if at_ms is None:
        return "-"
    try:
        local = datetime.fromtimestamp(at_ms / 1000, UTC).astimezone()
    except (OverflowError, OSError, ValueError):
        return f"{at_ms} ms"
    return local.strftime("%Y-%m-%d %H:%M:%S.") + f"{at_ms % 1000:03d}"


def iso_time(at_ms: int) -> str:
    """A time in UTC, as JSON readers expect it."""
    found = datetime.fromtimestamp(at_ms // 1000, UTC).replace(microsecond=at_ms % 1000 * 1000)
    return found.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def body_fields(body: bytes) -> dict[str, Any]:
    """``{"body": text}`` when it is UTF-8, else ``{"body_base64": …}``; bulk input reads both."""
    try:
        return {"body": body.decode("utf-8")}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode("ascii")}


def printable(text: str, length_max: int | None = None) -> str:
    """``text`` on one line, without anything that a terminal would obey."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if length_max is not None and len(shown) > length_max:
        return shown[: length_max - 1] + "…"
    return shown


def body_text(body: bytes, length_max: int | None = BODY_SHOWN_MAX) -> str:
    """A body as text for people, cut to ``length_max`` characters."""
    try:
        return printable(body.decode("utf-8"), length_max)
    except UnicodeDecodeError:
        return f"({len(body)} bytes that are no text)"


# --- retry policies ------------------------------------------------------------------------------

SPEC_METAVAR = "SPEC"
SPEC_HELP = (
    "exponential:base=10s,factor=2,cap=2h,retries=16,jitter=0.1 or fixed:delay=30s,retries=5 or "
    "table:10s,30s,1m;retries=8 or rocketmq, none, default, or a name the daemon knows."
)


def describe_rule(raw: str | Mapping[str, Any]) -> str:
    """A rule about pending keys on one line."""
    if isinstance(raw, str):
        return raw
    parts = [str(raw["action"])]
    for name, value in raw.items():
        if name.endswith("_ms"):
            parts.append(f"{name.removesuffix('_ms')}={format_duration(value / 1000)}")
        elif name != "action":
            parts.append(f"{name}={value}")
    return " ".join(parts)


def retry_of(policy: Policy | None) -> Retry | None:
    """The policy as the client takes it."""
    return None if policy is None else Retry.of(policy)


def format_policy(policy: Mapping[str, Any] | str | None) -> str:
    """The policy as a SPEC that ``parse_policy`` reads back; a dash when none is set."""
    if policy is None:
        return "-"
    if isinstance(policy, str):
        return policy
    kind = str(policy.get("kind"))
    if policy.get("name"):
        return str(policy["name"])
    if kind == "table":
        delays = ",".join(spec_duration(delay) for delay in policy.get("delays_ms", ()))
        retries = policy.get("retries")
        return f"table:{delays}" + ("" if retries is None else f";retries={retries}")
    parts = [
        f"{name}={_shown(name, policy[wire])}"
        for name, wire in SPEC_FIELDS.get(kind, {}).items()
        if policy.get(wire) is not None
    ]
    return f"{kind}:{','.join(parts)}" if parts else kind


def short_policy(policy: Mapping[str, Any] | str | None) -> str:
    """The policy for a narrow column: its name, or kind and number of retries; a dash for none."""
    if not isinstance(policy, Mapping) or policy.get("name") or policy.get("kind") == "none":
        return format_policy(policy)
    return f"{policy.get('kind')} x{policy.get('retries')}"


def describe_policy(policy: Mapping[str, Any] | str | None) -> str:
    """The policy as a SPEC, with the meaning of a name behind it."""
    spec = format_policy(policy)
    if isinstance(policy, str) or policy is None or not policy.get("name"):
        return spec
    meant = format_policy({key: value for key, value in policy.items() if key != "name"})
    return spec if meant == spec else f"{spec} ({meant})"


def spec_duration(ms: int) -> str:
    """A duration exactly, as a SPEC has it: ``1m30s``, ``500ms``, ``2h``."""
    parts, rest_ms = [], ms
    for unit in ("d", "h", "m", "s", "ms"):
        count, rest_ms = divmod(rest_ms, UNITS_MS[unit])
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


def _shown(name: str, value: Any) -> str:
    if name not in {"factor", "jitter"}:
        return str(value) if name == "retries" else spec_duration(value)
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


# --- words that a shell completes ----------------------------------------------------------------

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

    url = given("url") or os.environ.get("TICKWHEEL_URL")
    try:
        client = Client(url, token=given("token"), connect_timeout=ANSWER_S, retries=0)
        with client:
            return dict(client.stats(timeout=ANSWER_S).raw.get("topics") or {})
    except TickwheelError:
        return {}


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
    str, typer.Argument(metavar="TOPIC", help="The topic's name.", autocompletion=complete_topics)
]
MaybeGroup = Annotated[
    str | None,
    typer.Option(
        "--group",
        metavar="GROUP",
        help="One group of it; without, the topic.",
        autocompletion=complete_groups,
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
        "--topic",
        help="With --key, or for all that match: their topic.",
        autocompletion=complete_topics,
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
    str | None, typer.Option("--topic", help="Only this topic's.", autocompletion=complete_topics)
]
GroupOption = Annotated[
    str | None,
    typer.Option(
        "--group", help="Only this group's. Default: every group's.", autocompletion=complete_groups
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


# --- keys that are pending ------------------------------------------------------------------------

RULE_FIELDS = (
    "action", "window", "window_ms", "unique_until", "replaces", "due", "max_wait", "max_wait_ms"
)  # fmt: skip


def _word(words: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(f"{text!r:.40} is none of {', '.join(words)}")
        return text

    return typed(parse)


def _one_of(name: str, words: tuple[str, ...], help_: str) -> Any:
    return typer.Option(name, parser=_word(words), metavar="|".join(words), help=help_)


def _duration(name: str, help_: str) -> Any:
    return typer.Option(name, parser=typed(parse_duration), metavar="DURATION", help=help_)


IfPendingOption = Annotated[
    str | None,
    _one_of("--if-pending", ACTIONS, "With --key: what to do when a task with it is pending."),
]
ActionArgument = Annotated[
    str,
    typer.Argument(parser=_word(ACTIONS), metavar="|".join(ACTIONS), help="What to do then."),
]
WindowOption = Annotated[
    float | None,
    _duration("--window", "So long after its enqueue one is pending. Default: until finished."),
]
UniqueOption = Annotated[
    str | None,
    _one_of("--unique-until", UNTIL, "keep, reject: until a consumer has it, or finished it."),
]
ReplacesOption = Annotated[
    str | None, _one_of("--replaces", REPLACES, "replace: what is taken over.")
]
DueOption = Annotated[
    str | None, _one_of("--due", DUES, "replace: which of the two due times holds.")
]
MaxWaitOption = Annotated[
    float | None,
    _duration("--max-wait", "replace: due so long after its first enqueue at the latest."),
]


def rule_of(
    action: str | None,
    window: float | None,
    unique_until: str | None,
    replaces: str | None,
    due: str | None,
    max_wait: float | None,
) -> IfPending | None:
    """The rule of the options. Raises BadRequest for one without --if-pending."""
    given = {
        "--window": window,
        "--unique-until": unique_until,
        "--replaces": replaces,
        "--due": due,
        "--max-wait": max_wait,
    }
    named = [name for name, value in given.items() if value is not None]
    if action is None:
        if named:
            raise BadRequest(f"{named[0]} goes with --if-pending")
        return None
    # Each word was checked when it was read.
    words: dict[str, Any] = {"unique_until": unique_until, "replaces": replaces, "due": due}
    return IfPending(cast("Action", action), window=window, max_wait=max_wait, **words)


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
                raise ValueError(f"{name}_ms is {ms!r:.40}, which is no duration")
            given[name] = ms / 1000
    return IfPending(given.pop("action"), **given)
