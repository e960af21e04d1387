"""Retry policies and settings on the wire: what a client gives, checked, and what it is answered.

The policy's own codec and limits are ``model.policies``'; here are the names that this daemon
knows, and the errors of the wire.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tickwheel.errors import BadRequest, LimitExceeded, shown
from tickwheel.model import policies
from tickwheel.model.conditions import FilterError
from tickwheel.model.filters import Filter, known_filter
from tickwheel.model.policies import DEFAULT, Coalescing, PolicyRef, RetryPolicy
from tickwheel.model.records import (
    LINE_SETTINGS,
    LINES_FROM,
    ORDER_RETRY,
    ORDER_SETTINGS,
    GroupSettings,
    OrderRules,
)
from tickwheel.server import checks


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
    with checks.refused():
        return policies.checked(value, field, known[DEFAULT])


def rule(value: Any, field: str) -> Coalescing:
    """A checked rule for pending keys from a client."""
    with checks.refused():
        return policies.checked_rule(value, field)


def policy_map(ref: PolicyRef | None, known: Mapping[str, RetryPolicy]) -> dict[str, Any] | None:
    """A policy for an answer: always its numbers, with its name when it was named."""
    if ref is None:
        return None
    if isinstance(ref, RetryPolicy):
        return ref.to_map()
    numbers = known.get(ref, known[DEFAULT]).to_map()
    return {"kind": numbers.pop("kind"), "name": ref} | numbers


def equal(one: PolicyRef, other: PolicyRef, known: Mapping[str, RetryPolicy]) -> bool:
    """Whether two policies are the same: by name, or by numbers."""
    return one == other or policy_map(one, known) == policy_map(other, known)


def text(ref: PolicyRef) -> str:
    """A policy in an error message."""
    return repr(ref) if isinstance(ref, str) else shown(ref.to_map())


def settings(
    given: Mapping[str, Any], before: GroupSettings, known: Mapping[str, RetryPolicy]
) -> GroupSettings:
    """``before`` with the fields that are named in ``given``, each of which its kind has checked.
    Raises BadRequest, LimitExceeded."""
    named = {name: value for name, value in given.items() if name not in LINE_SETTINGS}
    for name in ("paused", "broadcast_only"):
        if name in named and named[name] is None:
            checks.wrong(name, "true or false", None)
    if named.get("retry") is not None:
        named["retry"] = policy(named["retry"], "retry", known)
    if named.get("if_pending") is not None:
        named["if_pending"] = rule(named["if_pending"], "if_pending")
    if "tags" in named or "where" in named:
        wanted = filter_of(named.get("tags", before.tags), named.get("where", before.where))
        named |= {"tags": wanted.tags, "where": wanted.where}
    return lines(given, before._replace(**named))


def lines(given: Mapping[str, Any], before: GroupSettings) -> GroupSettings:
    """``before`` with the settings of order keys and fair shares in ``given``, each of which its
    kind has checked. What needs something that is taken away goes with it. Raises BadRequest."""
    named = {name: given[name] for name in LINE_SETTINGS if name in given}
    if not named:
        return before
    if named.get("fair_by") == "":
        checks.wrong("fair_by", "key, tag or the name of a property", "")
    if named.get("order_failure", KEPT) is None:
        named.setdefault("order_attempts", None)
    if named.get("fair_by", KEPT) is None:
        named = {"limit_each": None, "rate_each": None} | named
    after = before._replace(**named)
    if after.order_failure == ORDER_RETRY:
        if (attempts := named.get("order_attempts")) is not None:
            raise BadRequest(
                f"order_attempts is {attempts}, and order_failure {ORDER_RETRY}, which tries until"
                " it succeeds; give one of them"
            )
        after = after._replace(order_attempts=None)
    for name, other in NEEDS.items():
        if getattr(after, name) is not None and getattr(after, other) is None:
            raise BadRequest(f"{name} is {getattr(after, name)}, which needs {other}")
    return after


KEPT = "kept"
NEEDS = {"limit_each": "fair_by", "rate_each": "fair_by"}
"""Settings that mean nothing without another one."""


def asked_lines(options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of order keys and fair shares that a consumer names, checked together."""
    given = {name: options[name] for name in LINE_SETTINGS if options.get(name) is not None}
    if not given:
        return given
    found = lines(given, _NOTHING_SET)
    return {name: getattr(found, name) for name in given}


def settings_map(
    topic: str,
    group: str | None,
    found: GroupSettings,
    known: Mapping[str, RetryPolicy],
    *,
    is_ordered: bool = False,
) -> dict[str, Any]:
    """The settings as CONFIGURE and GROUP_CREATE answer them. ``is_ordered``: as of
    ``where_set``."""
    return {
        "topic": topic,
        "group": group,
        "paused": found.paused,
        "rate": found.rate,
        "burst": found.burst,
        "retry": policy_map(found.retry, known),
        **where_set(found, is_ordered=is_ordered),
    }


def where_set(found: GroupSettings, *, is_ordered: bool) -> dict[str, Any]:
    """The settings that only a topic, or only a group, can have, where they are set. Of order keys
    all that holds, once something of it is set, or the group has had such a task
    (``is_ordered``)."""
    rule = {} if found.if_pending is None else {"if_pending": found.if_pending.to_map()}
    named: dict[str, Any] = {"broadcast_only": found.broadcast_only or None, "tags": found.tags}
    named |= {"where": found.where}
    says = set_lines(found)
    is_ordered |= any(says[name] is not None for name in ORDER_SETTINGS)
    named |= applied_lines(found) if is_ordered else says
    return rule | {name: value for name, value in named.items() if value is not None}


def set_lines(found: GroupSettings) -> dict[str, Any]:
    """A group's settings of order keys and fair shares by name; None: not set."""
    return dict(zip(LINE_SETTINGS, found[LINES_FROM:], strict=True))


def applied_lines(found: GroupSettings) -> dict[str, Any]:
    """The settings of order keys and fair shares that hold for a group, set or not."""
    return set_lines(found) | dict(zip(ORDER_SETTINGS, OrderRules.of(found), strict=True))


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


def asked_filter(options: Mapping[str, Any]) -> Filter | None:
    """The filter that a consumer names for its group; None: it names none."""
    tags, where = options.get("tags"), options.get("where")
    return None if tags is None and where is None else filter_of(tags, where)
