"""Checks of plain values that clients give, for every transport: each failure names the field, the
limit and the value. Then the proof, before anything is staged, that what a request brings can be
stored. Last, retry policies, rules and settings of groups, as names that this daemon knows.

Memory is the truth, and a store that cannot encode a row ends the daemon: so a row that is made of
a client's values is encoded once where these are checked, by the codec that the stores use. What
the encoder cannot say is that request's mistake, whatever else is in its batch. What is made of
nothing but names, bounded whole numbers and bodies needs no such proof: its checks are the proof.
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
    "array", "due", "group_name", "integer", "moment", "moved", "name", "numbers", "options",
    "refused", "room", "shown", "storable_bulk", "storable_options", "storable_schedule",
    "storable_settings", "task_ids", "text", "wrong",
]  # fmt: skip


@contextmanager
def refused() -> Iterator[None]:
    """Turn InvalidValue into the error of the wire that says what is wrong."""
    try:
        yield
    except InvalidValue as error:
        raise refusal(error) from None


def room(error: type[TickwheelError], count: int, said: str, of: object, limit: str) -> None:
    """Raises ``error`` if there is no room for one more: ``count`` has reached the limit of that
    name in the limits or settings ``of``. ``said``: of what there are so many."""
    most = getattr(of, limit)
    if count >= most:
        raise error(f"{count} {said}; the limit is {most} ({limit})")


def moment(value: object, field: str, low_ms: int = 0) -> int:
    """A checked moment, in ms, at most the last one that an id can say."""
    return integer(value, field, low_ms, MOMENT_MS_MAX)


def group_name(value: object) -> str:
    return DEFAULT_GROUP if value is None else name(value, "group")


def options(value: object, allowed: Sequence[str], field: str = "options") -> dict[str, Any]:
    if value is None:
        return {}
    if type(value) is not dict:
        raise BadRequest(f"{field} must be a map, not {shown(value)}")
    for key in value:
        if key not in allowed:
            known = ", ".join(allowed)
            raise BadRequest(f"{field} has an unknown key {shown(key)}; known: {known}")
    return value


def numbers(value: object, field: str, count: int) -> Sequence[int]:
    """Checked non-negative integers, as many as there are ids."""
    found = array(value, field, count)
    if len(found) != count:
        raise BadRequest(f"{field} has {len(found)} elements, but there are {count} ids")
    if found and (set(map(type, found)) != {int} or min(found) < 0):
        raise BadRequest(f"{field} must be non-negative integers")
    return found


def due(delay_ms: object, due_ms: object, field: str, now_ms: int, limits: Limits) -> int:
    """The due time, in ms, of a delay or an absolute time; the past counts as now."""
    if (delay_ms is None) == (due_ms is None):
        raise BadRequest(f"{field} must have either delay_ms or due_ms")
    if delay_ms is not None:
        if type(delay_ms) is not int or delay_ms < 0:
            raise BadRequest(
                f"{field}.delay_ms must be a non-negative integer, not {shown(delay_ms)}"
            )
        wait_ms = delay_ms
    else:
        if type(due_ms) is not int or due_ms < INTEGER_MIN:  # too late is said below
            raise BadRequest(
                f"{field}.due_ms must be an integer of {INTEGER_MIN} or more, not {shown(due_ms)}"
            )
        wait_ms = max(0, due_ms - now_ms)
    if wait_ms > limits.delay_ms_max:
        raise DueTooFar(
            f"{field} is due in {shown(wait_ms)} ms; the limit is {limits.delay_ms_max} ms"
            " (the daemon's delay_max_s)"
        )
    return now_ms + wait_ms


def moved(command: str, asked: Any, now_ms: int, limits: Limits) -> dict[str, int]:
    """Where a command moves tasks to, as it was asked for; nothing of one that moves none. Raises
    BadRequest, DueTooFar."""
    block = MOVES.get(command)
    if block is None:
        return {}
    said = {
        name: block.field(name).kind.check(value, name, limits)
        for name, value in block.moved(asked).items()
    }
    due_ms = block.due_at_ms(asked, now_ms)
    if due_ms is not None:
        due(None, due_ms, command, now_ms, limits)
    return said


# --- what can be stored --------------------------------------------------------------------------

_R = TypeVar("_R")
_pack = msgpack.Packer().pack
"""The packer of the event loop's thread: to make one a task would take longer than its use."""


def storable_options(options: TaskOptions | None, field: str) -> None:
    """Prove that checked options can be stored: texts and bounded numbers can, properties and a
    policy of the task's own are packed. Raises BadRequest."""
    if options is not None and (options.properties is not None or options.retry is not None):
        try:
            _pack(codec.extras_record(options))
        except Exception as error:
            raise _refusal(field, error) from error


def storable_schedule(schedule: Schedule) -> None:
    """Raises BadRequest if the schedule cannot be stored."""
    row = ScheduleRow(schedule._replace(body=b""))  # bytes need no proof
    _check(SCHEDULE, row, "schedule")


def storable_settings(settings: GroupSettings) -> None:
    """Raises BadRequest if the settings of a group or topic cannot be stored."""
    _check(GROUP, GroupRow("", "", 0, settings), "settings")


def storable_bulk(bulk: Bulk) -> None:
    """Raises BadRequest if the bulk operation cannot be stored."""
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
    """A checked policy of a client. ``known``: those that may be named, the default included.

    Numbers that a map leaves out are the default policy's.
    """
    if isinstance(value, str):
        if value not in known:
            names = ", ".join(sorted(known))
            raise BadRequest(f"{field}: the policy {shown(value)} is not known; known: {names}")
        return value
    if not isinstance(value, dict):
        raise BadRequest(f"{field} must be a policy's name or a map, not {shown(value)}")
    with refused():
        return policies.checked(value, field, known[DEFAULT])


def rule(value: Any, field: str) -> Coalescing:
    """A checked rule for pending keys from a client."""
    with refused():
        return policies.checked_rule(value, field)


def settings(
    given: Mapping[str, Any], before: GroupSettings, known: Mapping[str, RetryPolicy], now_ms: int
) -> GroupSettings:
    """``before`` with the fields that are named in ``given``, each of which its kind has checked,
    as they are set at ``now_ms``. Raises BadRequest, LimitExceeded."""
    named = {name: value for name, value in given.items() if name not in LINE_SETTINGS}
    for flag in ("paused", "broadcast_only"):
        if flag in named and named[flag] is None:
            wrong(flag, "true or false", None)
    if named.get("retry") is not None:
        named["retry"] = policy(named["retry"], "retry", known)
    if named.get("if_pending") is not None:
        named["if_pending"] = rule(named["if_pending"], "if_pending")
    if "tags" in named or "where" in named:
        wanted = filter_of(named.get("tags", before.tags), named.get("where", before.where))
        if named.get("where") is not None:
            check_can_hold(wanted)
        named |= {"tags": wanted.tags, "where": wanted.where}
    after = lines(given, before._replace(**named))
    if after.paused == before.paused:
        return after
    return after._replace(paused_ms=now_ms if after.paused else None)


def lines(given: Mapping[str, Any], before: GroupSettings) -> GroupSettings:
    """``before`` with the settings of order keys and fair shares in ``given``, each of which its
    kind has checked. What needs something that is taken away goes with it. Raises BadRequest."""
    named = {name: given[name] for name in LINE_SETTINGS if name in given}
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
                f"order_attempts is {attempts}, and order_failure {ORDER_RETRY}, which tries until"
                " it succeeds; give one of them"
            )
        after = after.replaced({"order_attempts": None})
    found = after.flat()
    for setting, other in NEEDS.items():
        if found[setting] is not None and found[other] is None:
            raise BadRequest(f"{setting} is {found[setting]}, which needs {other}")
    return after


KEPT = "kept"
NEEDS = {"limit_each": "fair_by", "rate_each": "fair_by"}
"""Settings that mean nothing without another one."""


def asked_lines(options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of order keys and fair shares that a consumer names, checked together."""
    given = {name: options[name] for name in LINE_SETTINGS if options.get(name) is not None}
    if not given:
        return given
    found = lines(given, _NOTHING_SET).flat()
    return {name: found[name] for name in given}


NO_FILTER = Filter()
_NOTHING_SET = GroupSettings()


def filter_of(tags: str | None, where: str | None) -> Filter:
    """The filter that texts of a client say; one that lets everything pass is ``NO_FILTER``. Raises
    BadRequest, LimitExceeded."""
    try:
        found = known_filter(tags, where)
    except FilterError as error:
        raise (LimitExceeded if error.position is None else BadRequest)(str(error)) from None
    return NO_FILTER if found.is_open else found


def check_can_hold(wanted: Filter) -> None:
    """Raise BadRequest for a client's condition that no task can meet. A store may hold one from
    before this was checked, so ``filter_of`` takes it."""
    reason = why_never(wanted)
    if reason is not None:
        raise BadRequest(f"where: {reason}")


def asked_filter(options: Mapping[str, Any]) -> Filter | None:
    """The filter that a consumer names for its group; None: it names none."""
    tags, where = options.get("tags"), options.get("where")
    if tags is None and where is None:
        return None
    wanted = filter_of(tags, where)
    check_can_hold(wanted)
    return wanted
