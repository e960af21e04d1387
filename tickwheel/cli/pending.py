"""``tickwheel pending``, and the options of an enqueue about a key that is pending: what becomes of
a task then, as options and as a line of JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, cast

import typer

from tickwheel.api.words import Action
from tickwheel.cli.call import Call
from tickwheel.cli.groups import show_settings
from tickwheel.cli.options import TopicArgument, typed
from tickwheel.client import IfPending
from tickwheel.errors import BadRequest
from tickwheel.model.coalescing import ACTIONS, DUES, REPLACES, UNTIL
from tickwheel.model.written import DURATION_MS_MAX, RULE_DURATIONS, parse_duration, rule_wire

FIELDS = (
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
    """The rule in a line of JSON: an action, or an object of FIELDS; durations in seconds or as
    text. Raises ValueError."""
    if isinstance(value, str):
        return IfPending(cast("Action", value))
    if not isinstance(value, dict) or not isinstance(value.get("action"), str):
        raise ValueError(f"an action or an object with one is needed, not {value!r:.40}")
    unknown = sorted(value.keys() - set(FIELDS))
    if unknown:
        raise ValueError(f"{unknown[0]} is not known; known are {', '.join(FIELDS)}")
    given = rule_wire(value)
    for name in RULE_DURATIONS:
        ms = given.pop(f"{name}_ms", None)
        if ms is not None:
            if type(ms) is not int or not 0 <= ms <= DURATION_MS_MAX:
                raise ValueError(f"{name}_ms is {ms!r:.40}, which is no duration")
            given[name] = ms / 1000
    return IfPending(given.pop("action"), **given)


# --- the rule of a topic -------------------------------------------------------------------------


async def set_(
    call: Call,
    topic: TopicArgument,
    action: ActionArgument,
    window: WindowOption = None,
    unique_until: UniqueOption = None,
    replaces: ReplacesOption = None,
    due: DueOption = None,
    max_wait: MaxWaitOption = None,
) -> None:
    """What becomes of a topic's tasks whose key is pending, unless they say it themselves."""
    rule = rule_of(action, window, unique_until, replaces, due, max_wait)
    async with call.client() as client:
        show_settings(call, await client.configure(topic, if_pending=rule))


async def clear(call: Call, topic: TopicArgument) -> None:
    """Such tasks are all stored again."""
    async with call.client() as client:
        show_settings(call, await client.configure(topic, if_pending=None))
