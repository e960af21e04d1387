"""Checks of clients' values, for every transport: plain values, retry policies, rules and group
settings, and whether rows can be stored. Errors name the field, the limit and the value.

The state in memory is authoritative, and a row that the store cannot encode ends the daemon. A row
with a client's values is therefore encoded once, with the stores' codec, when the values are
checked. A value that cannot be encoded then fails only its own request, not the whole batch. Names,
bounded whole numbers and bodies need no such test: their checks ensure that they can be encoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import msgpack

from tickwheel.api.kinds import array, integer, name, refusal, task_ids, text, wrong
from tickwheel.api.tasks import MOVES
from tickwheel.errors import BadRequest, DueTooFar, LimitExceeded, TickwheelError, shown
from tickwheel.limits import Limits
from tickwheel.model import policies
from tickwheel.model.conditions import FilterError
from tickwheel.model.filters import Filter, known_filter, why_never
from tickwheel.model.kinds import BULK, GROUP, SCHEDULE, Bulk, BulkRow, Kind, Schedule, ScheduleRow
from tickwheel.model.policies import DEFAULT, Coalescing, PolicyRef, RetryPolicy
from tickwheel.model.records import (
    DEFAULT_GROUP,
    LINE_SETTINGS,
    MOMENT_MS_MAX,
    ORDER_RETRY,
    GroupRow,
    GroupSettings,
)
from tickwheel.model.values import INTEGER_MIN, InvalidValue
from tickwheel.persistence import codec

if TYPE_CHECKING:
    from tickwheel.model.records import TaskOptions

__all__ = [
    "array", "check_limit", "due", "group_name", "integer", "lease", "moment", "moved", "name",
    "numbers", "options", "refused", "shown", "storable_bulk", "storable_options",
    "storable_schedule", "storable_settings", "task_ids", "text", "wrong",
]  # fmt: skip


@contextmanager
def refused() -> Iterator[None]:
    """Convert InvalidValue to the error for the client."""
    try:
        yield
    except InvalidValue as error:
        raise refusal(error) from None


def check_limit(
    error: type[TickwheelError], count: int, noun: str, settings: object, limit: str
) -> None:
    """Raise ``error`` if ``count`` has reached the limit that ``settings`` has under the name
    ``limit``. ``noun`` names the counted objects in the message."""
    maximum = getattr(settings, limit)
    if count >= maximum:
        raise error(f"{count} {noun}; the limit is {maximum} ({limit})")


def moment(value: object, field: str, low_ms: int = 0) -> int:
    """Return a checked time in ms, at most the last time that an id can represent."""
    return integer(value, field, low_ms, MOMENT_MS_MAX)


def lease(value: object, limits: Limits) -> int:
    """Return the checked length of a lease in ms."""
    return integer(value, "lease_ms", limits.lease_ms_min, limits.lease_ms_max)


def group_name(value: object) -> str:
    return DEFAULT_GROUP if value is None else name(value, "group")


def options(value: object, allowed: Sequence[str], field: str = "options") -> dict[str, Any]:
    if value is None:
        return {}
    if type(value) is not dict:
        raise BadRequest(f"{field} must be a map, not {shown(value)}")
    for key in value:
        if key not in allowed:
            names = ", ".join(allowed)
            raise BadRequest(f"{field} has an unknown key {shown(key)}; known: {names}")
    return value


def numbers(value: object, field: str, count: int) -> Sequence[int]:
    """Return checked non-negative integers, one for each of ``count`` ids."""
    elements = array(value, field, count)
    if len(elements) != count:
        raise BadRequest(f"{field} has {len(elements)} elements, but there are {count} ids")
    if elements and (set(map(type, elements)) != {int} or min(elements) < 0):
        raise BadRequest(f"{field} must contain only non-negative integers")
    return elements


def due(delay_ms: object, due_ms: object, field: str, now_ms: int, limits: Limits) -> int:
    """Return the due time, in ms, for a delay or an absolute time. A past time counts as now."""
    if (delay_ms is None) == (due_ms is None):
        raise BadRequest(f"{field} must have either delay_ms or due_ms")
    if delay_ms is not None:
        if type(delay_ms) is not int or delay_ms < 0:
            raise BadRequest(
                f"{field}.delay_ms must be a non-negative integer, not {shown(delay_ms)}"
            )
        wait_ms = delay_ms
    else:
        if type(due_ms) is not int or due_ms < INTEGER_MIN:  # the maximum is checked below
            raise BadRequest(
                f"{field}.due_ms must be an integer of at least {INTEGER_MIN}, not {shown(due_ms)}"
            )
        wait_ms = max(0, due_ms - now_ms)
    if wait_ms > limits.delay_ms_max:
        raise DueTooFar(
            f"{field} is due in {shown(wait_ms)} ms; the limit is {limits.delay_ms_max} ms"
            " (the daemon's delay_max_s)"
        )
    return now_ms + wait_ms


def moved(command: str, request: Any, now_ms: int, limits: Limits) -> dict[str, int]:
    """Return the checked fields of a command that moves tasks, or nothing for other commands. Raise
    BadRequest or DueTooFar for invalid fields."""
    block = MOVES.get(command)
    if block is None:
        return {}
    fields = {
        name: block.field(name).kind.check(value, name, limits)
        for name, value in block.move_fields(request).items()
    }
    due_ms = block.due_at_ms(request, now_ms)
    if due_ms is not None:
        due(None, due_ms, command, now_ms, limits)
    return fields


# --- storability ---------------------------------------------------------------------------------

_R = TypeVar("_R")
_pack = msgpack.Packer().pack
"""Packer for the thread of the event loop. Creating a packer takes longer than using it."""


def storable_options(options: TaskOptions | None, field: str) -> None:
    """Raise BadRequest if checked options cannot be stored. Only properties and the task's own
    policy are encoded, because texts and bounded numbers can always be stored."""
    if options is not None and (options.properties is not None or options.retry is not None):
        try:
            _pack(codec.extras_record(options))
        except Exception as error:
            raise _refusal(field, error) from error


def storable_schedule(schedule: Schedule) -> None:
    """Raise BadRequest if the schedule cannot be stored."""
    row = ScheduleRow(schedule._replace(body=b""))  # bytes can always be encoded
    _check(SCHEDULE, row, "schedule")


def storable_settings(settings: GroupSettings) -> None:
    """Raise BadRequest if the settings of a group or topic cannot be stored."""
    _check(GROUP, GroupRow("", "", 0, settings), "settings")


def storable_bulk(bulk: Bulk) -> None:
    """Raise BadRequest if the bulk operation cannot be stored."""
    _check(BULK, BulkRow(bulk), "bulk")


def _check(kind: Kind[_R], row: _R, field: str) -> None:
    try:
        codec.encode_record(kind, row)
    except Exception as error:
        raise _refusal(field, error) from error


def _refusal(field: str, error: Exception) -> BadRequest:
    return BadRequest(f"{field} cannot be stored: {type(error).__name__}: {error}")


# --- policies, settings and filters ---------------------------------------------------------------


def policy(value: Any, field: str, known: Mapping[str, RetryPolicy]) -> PolicyRef:
    """Return a client's checked policy. ``known`` contains the policies by name; a map that omits
    numbers gets those of the default policy. Raise BadRequest for an invalid policy."""
    if isinstance(value, str):
        if value not in known:
            names = ", ".join(sorted(known))
            raise BadRequest(f"{field}: the policy {shown(value)} does not exist; known: {names}")
        return value
    if not isinstance(value, dict):
        raise BadRequest(f"{field} must be a policy's name or a map, not {shown(value)}")
    with refused():
        return policies.checked(value, field, known[DEFAULT])


def rule(value: Any, field: str) -> Coalescing:
    """Return a client's checked rule for pending keys. Raise BadRequest if it is invalid."""
    with refused():
        return policies.checked_rule(value, field)


def settings(
    changes: Mapping[str, Any], before: GroupSettings, known: Mapping[str, RetryPolicy], now_ms: int
) -> GroupSettings:
    """Return the settings ``before`` with ``changes`` applied at ``now_ms``. The changes must have
    been checked by their kinds. Removing a setting also removes the settings that need it. Raise
    BadRequest or LimitExceeded for contradictory fields."""
    named = {name: value for name, value in changes.items() if name not in LINE_SETTINGS}
    for flag in ("paused", "broadcast_only"):
        if flag in named and named[flag] is None:
            wrong(flag, "true or false", None)
    if named.get("retry") is not None:
        named["retry"] = policy(named["retry"], "retry", known)
    if named.get("if_pending") is not None:
        named["if_pending"] = rule(named["if_pending"], "if_pending")
    if "tags" in named or "where" in named:
        new_filter = filter_of(named.get("tags", before.tags), named.get("where", before.where))
        if named.get("where") is not None:
            check_can_hold(new_filter)
        named |= {"tags": new_filter.tags, "where": new_filter.where}
    if named.get("rate", KEPT) is None:
        named = {"burst": None} | named
    after = with_line_settings(changes, before._replace(**named))
    _check_needs(after)
    if after.paused == before.paused:
        return after
    return after._replace(paused_ms=now_ms if after.paused else None)


def with_line_settings(changes: Mapping[str, Any], before: GroupSettings) -> GroupSettings:
    """Return the settings ``before`` with those of the ``changes`` that concern order keys and fair
    shares. Their kinds must have checked them. Removing a setting also removes the settings that
    need it. Raise BadRequest for contradictory settings."""
    named = {name: changes[name] for name in LINE_SETTINGS if name in changes}
    if not named:
        return before
    if named.get("fair_by") == "":
        wrong("fair_by", "key, tag or the name of a property", "")
    if named.get("order_failure", KEPT) is None:
        named.setdefault("order_attempts", None)
    if named.get("fair_by", KEPT) is None:
        named = {"limit_each": None, "rate_each": None} | named
    after = before.replaced(named)
    if after.order.failure == ORDER_RETRY:
        if (attempts := named.get("order_attempts")) is not None:
            raise BadRequest(
                f"order_attempts ({attempts}) cannot be set with order_failure {ORDER_RETRY},"
                " which retries until it succeeds"
            )
        after = after.replaced({"order_attempts": None})
    _check_needs(after)
    return after


KEPT = "kept"
NEEDS = {"burst": "rate", "limit_each": "fair_by", "rate_each": "fair_by"}
"""For some settings, the other setting that they need."""


def _check_needs(settings: GroupSettings) -> None:
    """Raise BadRequest if a setting lacks the other setting that it needs."""
    values = settings.flat()
    for setting, other in NEEDS.items():
        if values[setting] is not None and values[other] is None:
            raise BadRequest(f"{setting} ({values[setting]}) needs {other}")


def consumer_line_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a consumer's settings for order keys and fair shares, checked together."""
    line_settings = {name: options[name] for name in LINE_SETTINGS if options.get(name) is not None}
    if not line_settings:
        return line_settings
    checked = with_line_settings(line_settings, _NOTHING_SET).flat()
    return {name: checked[name] for name in line_settings}


NO_FILTER = Filter()
_NOTHING_SET = GroupSettings()


def filter_of(tags: str | None, where: str | None) -> Filter:
    """Return the filter that a client's texts describe, or ``NO_FILTER`` if it matches everything.
    Raise BadRequest or LimitExceeded for invalid texts."""
    try:
        result = known_filter(tags, where)
    except FilterError as error:
        raise (LimitExceeded if error.position is None else BadRequest)(str(error)) from None
    return NO_FILTER if result.is_open else result


def check_can_hold(candidate: Filter) -> None:
    """Raise BadRequest for a condition that no task can meet. ``filter_of`` accepts such
    conditions, because old stores can contain them."""
    reason = why_never(candidate)
    if reason is not None:
        raise BadRequest(f"where: {reason}")


def consumer_filter(options: Mapping[str, Any]) -> Filter | None:
    """Return the filter in a consumer's options for its group, or None."""
    tags, where = options.get("tags"), options.get("where")
    if tags is None and where is None:
        return None
    new_filter = filter_of(tags, where)
    check_can_hold(new_filter)
    return new_filter
