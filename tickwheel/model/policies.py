"""Policies that tasks come with: how often a failed task is tried again, and how long it waits for
that; what becomes of a task whose key a pending task has; and how people write both, and durations.
Pure: no clock, no terminal.

A retry policy is here with its arithmetic and its only codec. The jitter is taken from the task's
id and failures, so the same inputs give the same delay and the engine stays pure. Which policy
holds for a task is decided by ``Core.policy``: the task's own, its group's, its topic's, the
daemon's.

Outside memory a policy has three forms, and a policy that has a name is that name in all of them:

* a map of its kind and that kind's numbers (``FIELDS``): the wire, the settings and the lines of
  the history. What comes from outside goes through ``checked`` first;
* an array of all its fields (``stored_fields``), in the records that stores keep;
* a SPEC, which people write (``parse_policy``):

    exponential:base=10s,factor=2,cap=2h,retries=16,jitter=0.1
    fixed:delay=30s,retries=5
    table:10s,30s,1m;retries=8        beyond the table its last delay
    none, default, rocketmq, or a name that the daemon's settings define

What a SPEC leaves out takes the daemon's default. What exceeds the daemon's limits is refused by
the daemon. Parsers raise ValueError with a sentence that names the value; the caller adds which
field or argument it was. Otherwise what is wrong is an ``InvalidPolicy``, which the daemon and the
client turn into errors of the wire.

A task in JSON is one format, on a line of the command line's and over HTTP (docs/http.md). A field
that is a time comes in two forms: ``delay`` as people write it, and ``delay_ms``, of which one may
be given.

``Coalescing`` is the rule for pending keys, which a producer gives with a task or a topic has for
all, and ``Merging`` the outcome that it is answered: values and their checks only; what counts as
pending is ``engine/enqueue.py``. Outside memory a rule is the name of its action, when nothing else
is said, or a map of ``RULE_FIELDS``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Final, NamedTuple, Self

from tickwheel.model.values import InvalidValue

_SPREAD = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: Fibonacci hashing (Knuth, TAOCP 3, 6.4)."""

FIELDS: Mapping[str, tuple[str, ...]] = {
    "exponential": ("base_ms", "factor", "cap_ms", "retries", "jitter"),
    "fixed": ("delay_ms", "retries", "jitter"),
    "table": ("delays_ms", "retries"),
    "none": (),
}
"""The kinds of policies, and the numbers that a map has for each."""
_ATTRIBUTES = {"delay_ms": "base_ms", "retries": "retries_max"}
"""The numbers of a map that have other names in a ``RetryPolicy``."""
KINDS = tuple(FIELDS)
NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")

DELAY_MS_MAX = 315_576_000_000
"""Ten years, as the longest delay of a task."""
RETRIES_MAX = 65_535
STEPS_MAX = 1_024
"""How many delays a table may have."""
FACTOR_MAX = 1_000_000.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """By ``kind``, before retry n:

    * exponential: ``base_ms * factor ** (n - 1)``, at most ``cap_ms``;
    * fixed: ``base_ms``;
    * table: entry n of ``delays_ms``, beyond the table its last one;
    * none: there is no retry.

    After ``retries_max`` retries the task is dead. ``jitter`` is the largest share by which a
    delay is shortened or lengthened (0 to 1).
    """

    base_ms: int = 10_000
    factor: float = 2.0
    cap_ms: int = 7_200_000
    retries_max: int = 16
    jitter: float = 0.1
    kind: str = "exponential"
    delays_ms: tuple[int, ...] = ()

    def allows(self, failed: int) -> bool:
        """Whether another delivery may follow after ``failed`` of them failed."""
        return failed <= self.retries_max

    def retries_left(self, counted: int) -> int:
        """How many retries are left after ``counted`` deliveries that failed or have not ended."""
        return max(0, self.retries_max - max(0, counted - 1))

    def delay_ms(self, failed: int, task_id: int) -> int:
        """How long after the failure of this number (from 1 on) the next delivery comes, in ms."""
        plain, cap_ms = self._plain_ms(failed), float(self.cap_ms)
        if not self.jitter:
            return int(plain)
        hashed = ((task_id * _SPREAD + failed * 0xD1B54A32D192ED03) >> 11) & 0xFFFFF
        swing = (hashed / 0xFFFFF * 2.0 - 1.0) * self.jitter
        swung = plain * (1.0 + swing)
        return max(0, int(min(swung, cap_ms) if self.kind == "exponential" else swung))

    def _plain_ms(self, failed: int) -> float:
        if self.kind == "fixed":
            return float(self.base_ms)
        if self.kind == "table":
            return float(self.delays_ms[min(failed, len(self.delays_ms)) - 1])
        return self._grown_ms(failed - 1)

    def _grown_ms(self, steps: int) -> float:
        """``base_ms * factor ** steps`` up to the cap. The power is only taken where it stays
        near the cap: a float ends at 1e308, which a large factor passes after 52 steps."""
        base_ms, cap_ms = float(self.base_ms), float(self.cap_ms)
        if not base_ms or base_ms >= cap_ms:
            return min(base_ms, cap_ms)
        if self.factor <= 1.0 or steps <= 0:
            return base_ms
        if steps * math.log(self.factor) > math.log(cap_ms / base_ms):
            return cap_ms
        return min(base_ms * self.factor**steps, cap_ms)

    # --- as a map -------------------------------------------------------------------------------

    def to_map(self) -> dict[str, Any]:
        """The policy as a map: the kind, and the numbers of that kind."""
        numbers = {name: getattr(self, _ATTRIBUTES.get(name, name)) for name in FIELDS[self.kind]}
        return {"kind": self.kind} | numbers

    @classmethod
    def of_map(cls, given: Mapping[str, Any]) -> Self:
        """A policy from a map with all numbers of its kind, which are not checked again.
        ``retries`` and ``jitter`` may be missing. Raises KeyError for another number, ValueError
        for the kind."""
        kind = given.get("kind")
        if not isinstance(kind, str) or kind not in FIELDS:
            raise ValueError(f"{kind!r:.100} is not a kind of retry policy")
        given = {"retries": _DEFAULTS.retries_max, "jitter": _DEFAULTS.jitter, **given}
        numbers = {_ATTRIBUTES.get(name, name): given[name] for name in FIELDS[kind]}
        if kind == "table":
            numbers["delays_ms"] = tuple(numbers["delays_ms"])
        return replace(cls(0, 1.0, 0, 0, 0.0, kind), **numbers)


_DEFAULTS = RetryPolicy()


PolicyRef = str | RetryPolicy
"""A policy by its name, which is looked up when it is used, or by its numbers."""

_S, _MIN, _H = 1_000, 60_000, 3_600_000
ROCKETMQ_MS = (
    10 * _S, 30 * _S, 1 * _MIN, 2 * _MIN, 3 * _MIN, 4 * _MIN, 5 * _MIN, 6 * _MIN, 7 * _MIN,
    8 * _MIN, 9 * _MIN, 10 * _MIN, 20 * _MIN, 30 * _MIN, 1 * _H, 2 * _H,
)  # fmt: skip
"""The retry steps of RocketMQ's consumers."""
BUILT_IN = {
    "rocketmq": RetryPolicy.of_map({"kind": "table", "delays_ms": ROCKETMQ_MS}),
    "none": RetryPolicy.of_map({"kind": "none"}),
}
DEFAULT = "default"
"""The name of the daemon's own policy, which its settings ``retry_…`` make."""


# --- a policy or its name ------------------------------------------------------------------------


def stored_fields(ref: PolicyRef | None) -> object:
    """A policy as stores keep it: a name as it is, numbers as an array."""
    if not isinstance(ref, RetryPolicy):
        return ref
    numbers = (ref.base_ms, ref.factor, ref.cap_ms, ref.retries_max, ref.jitter)
    return (ref.kind, *numbers, ref.delays_ms)


def of_stored_fields(fields: Any) -> PolicyRef | None:
    """The reverse of ``stored_fields``. Raises ValueError or TypeError for what is no policy."""
    if fields is None or isinstance(fields, str):
        return fields
    kind, *numbers, delays_ms = fields
    base_ms, factor, cap_ms, retries_max, jitter = numbers
    return RetryPolicy(base_ms, factor, cap_ms, retries_max, jitter, kind, tuple(delays_ms))


def of_history(given: Any) -> PolicyRef | None:
    """A policy from a line of the history: a name or a map. Raises ValueError or KeyError."""
    if given is None or isinstance(given, str):
        return given
    if isinstance(given, Mapping):
        return str(given["name"]) if "name" in given else RetryPolicy.of_map(given)
    raise ValueError(f"{given!r:.100} is not a retry policy")


# --- checks of what comes from outside -----------------------------------------------------------


class InvalidPolicy(InvalidValue):
    """A value that is no policy. ``is_too_long``: a table that has too many delays."""


def checked(given: Mapping[str, Any], field: str, default: RetryPolicy) -> RetryPolicy:
    """A policy from a map. Numbers that are missing, or None, are those of ``default``.

    ``field`` is what the map is called in a message. Raises InvalidPolicy.
    """
    kind = given.get("kind")
    if not isinstance(kind, str) or kind not in FIELDS:
        raise InvalidPolicy(f"{field}.kind must be one of {', '.join(FIELDS)}, not {{}}", kind)
    present = {name: number for name, number in given.items() if number is not None}
    allowed = ("kind", *FIELDS[kind])
    for name in present:
        if name not in allowed:
            known = ", ".join(allowed)
            raise InvalidPolicy(f"{field} has an unknown key {{}}; known: {known}", name)
    defaults = {
        "retries": default.retries_max,
        "jitter": default.jitter,
        "delay_ms": default.base_ms,
        "factor": default.factor,
        "base_ms": default.base_ms,
    }
    numbers: dict[str, Any] = {"kind": kind}
    for name in FIELDS[kind]:
        if name == "cap_ms":
            defaults[name] = max(default.cap_ms, numbers["base_ms"])
        value = present.get(name, defaults.get(name))
        numbers[name] = check_number(name, value, f"{field}.{name}")
    if kind == "exponential" and numbers["cap_ms"] < numbers["base_ms"]:
        raise InvalidPolicy(
            f"{field}.cap_ms is {numbers['cap_ms']}, less than base_ms, {numbers['base_ms']}"
        )
    return RetryPolicy.of_map(numbers)


def check_number(name: str, value: Any, field: str) -> Any:
    """A checked number of a map, by its name in ``FIELDS``. Raises InvalidPolicy."""
    if name == "delays_ms":
        return _check_delays(value, field)
    if name == "factor":
        return check_float(value, field, 1.0, FACTOR_MAX)
    if name == "jitter":
        return check_float(value, field, 0.0, 1.0)
    return check_integer(value, field, 0, RETRIES_MAX if name == "retries" else DELAY_MS_MAX)


def check_integer(value: Any, field: str, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise InvalidPolicy(f"{field} must be an integer of {low} to {high}, not {{}}", value)
    return value


def check_float(value: Any, field: str, low: float, high: float) -> float:
    """A checked number as a float; an integer is taken, too. Raises InvalidPolicy."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        raise InvalidPolicy(f"{field} must be a number of {low:g} to {high:g}, not {{}}", value)
    return float(value)


def _check_delays(value: Any, field: str) -> tuple[int, ...]:
    if not isinstance(value, tuple | list) or not value:
        raise InvalidPolicy(f"{field} must be an array of delays, not {{}}", value)
    if len(value) > STEPS_MAX:
        raise InvalidPolicy(
            f"{field} has {len(value)} delays; the limit is {STEPS_MAX}", is_too_long=True
        )
    return tuple(
        check_integer(delay, f"{field}[{i}]", 0, DELAY_MS_MAX) for i, delay in enumerate(value)
    )


def named_policies(given: Mapping[str, Any], default: RetryPolicy) -> dict[str, RetryPolicy]:
    """The policies that the settings define. Raises ValueError for one that is wrong."""
    found: dict[str, RetryPolicy] = {}
    for name, value in given.items():
        if name in BUILT_IN or name == DEFAULT:
            raise ValueError(f"the policy {name} is defined already; choose another name")
        if not NAME.fullmatch(name):
            raise ValueError(
                f"a policy's name is a letter and up to 63 of A-Z a-z 0-9 . _ -, not {name!r}"
            )
        if not isinstance(value, Mapping):
            raise ValueError(f"retry_policies.{name} must be a table of numbers, not a name")
        found[name] = checked(value, f"retry_policies.{name}", default)
    return found


UNITS_MS = {
    "ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000,
}  # fmt: skip
DURATION_MS_MAX = 2**42 * 1000
"""The longest duration: up to here seconds as a float name each millisecond."""
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?) *(ms|[smhdw])")
_PARTS = re.compile(rf"(?:{_PART.pattern} *)+")
_DURATION_HELP = "write for example 30s, 5m, 1h30m, 500ms or 2d"

RULE_DURATIONS: Final = ("window", "max_wait")
"""The durations of a rule about pending keys; on the wire they end in ``_ms``."""


def parse_duration(text: str, *, up: bool = True) -> float:
    """Seconds of ``1h30m``, ``500ms`` or ``1.5s``; a bare number is seconds. Whole
    milliseconds, rounded up, or else down. Raises ValueError."""
    cleaned = text.strip().lower()
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", cleaned):
        cleaned += "s"
    parts = _PART.findall(cleaned)
    if _PARTS.fullmatch(cleaned) is None:
        raise ValueError(f"{text!r} is not a duration; {_DURATION_HELP}")
    units = [UNITS_MS[unit] for _, unit in parts]
    if sorted(set(units), reverse=True) != units:
        raise ValueError(f"{text!r}: each unit once, the largest first; {_DURATION_HELP}")
    total_ms = _whole(parts, up)
    if total_ms > DURATION_MS_MAX:
        raise ValueError(f"{text!r} is longer than can be counted")
    return total_ms / 1000


def _whole(parts: Sequence[tuple[str, str]], up: bool) -> int:
    """Whole milliseconds of numbers with units, without the noise of binary fractions."""
    digits = max(len(number.partition(".")[2]) for number, _ in parts)
    total = 0
    for number, unit in parts:
        whole, _, fraction = number.partition(".")
        total += int(whole + fraction.ljust(digits, "0")) * UNITS_MS[unit]
    return int(-(-total // 10**digits) if up else total // 10**digits)


def parse_shift(text: str) -> float:
    """Seconds of a shift: later, or earlier behind a minus sign."""
    cleaned = text.strip()
    if cleaned.startswith("-"):
        return -parse_duration(cleaned[1:], up=False)  # no earlier than asked
    return parse_duration(cleaned)


def duration_ms(value: Any) -> int:
    """Whole milliseconds of a duration in text, or of a number of seconds."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"{value!r:.40} is not a duration; {_DURATION_HELP}")
    if not isinstance(value, str):
        if not 0 <= value * 1000 <= DURATION_MS_MAX:
            raise ValueError(f"{value!r:.40} is not a duration; {_DURATION_HELP}")
        value = f"{value:f}"
    return round(parse_duration(value) * 1000)


def rule_wire(given: Mapping[str, Any]) -> dict[str, Any]:
    """A rule about pending keys, with its durations in the form of the wire."""
    found = dict(given)
    for name in RULE_DURATIONS:
        value = found.pop(name, None)
        if value is None:
            continue
        if found.get(f"{name}_ms") is not None:
            raise ValueError(f"give {name} or {name}_ms, not both")
        try:
            found[f"{name}_ms"] = duration_ms(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return found


# --- retry policies ------------------------------------------------------------------------------

Policy = str | dict[str, Any]
"""A policy in the form of the wire: a name, or a map with "kind"."""

SPEC_FIELDS: dict[str, dict[str, str]] = {
    kind: {name.removesuffix("_ms"): name for name in names if name != "delays_ms"}
    for kind, names in FIELDS.items()
    if names
}
"""The fields that a SPEC of each kind may have, and their names on the wire."""
_KNOWN = "known are exponential:…, fixed:…, table:…, none, default, rocketmq, or a name"


def parse_policy(text: str) -> Policy:
    """The policy of a SPEC in the form of the wire. Raises ValueError."""
    kind, colon, rest = text.strip().partition(":")
    kind = kind.strip()
    if kind in SPEC_FIELDS:
        return _table(rest) if kind == "table" else {"kind": kind, **_fields(kind, rest)}
    if colon or not NAME.fullmatch(kind):
        raise ValueError(f"{text!r:.80} is not a retry policy; {_KNOWN}")
    return kind


def policy_of_json(value: Any) -> Policy:
    """A policy from JSON: a SPEC, or a map in the form of the wire. Raises ValueError."""
    if isinstance(value, str):
        return parse_policy(value)
    if not isinstance(value, dict):
        raise ValueError(f"a SPEC or an object is needed, not {value!r:.40}")
    kind = value.get("kind")
    if not isinstance(kind, str) or kind not in FIELDS:
        raise ValueError(f"kind is {kind!r:.40}; known are none, {', '.join(SPEC_FIELDS)}")
    known = ("kind", *FIELDS[kind])
    for name, given in value.items():
        if name not in known:
            raise ValueError(f"{name} is not part of kind {kind}")
        if name != "kind" and not _fits(name, given):
            raise ValueError(f"{name} is {given!r:.40}, which is no such number")
    return dict(value)


def _fits(name: str, given: Any) -> bool:
    if name == "delays_ms":
        return isinstance(given, list) and all(type(delay) is int for delay in given)
    return type(given) is int or (type(given) is float and name in {"factor", "jitter"})


def _fields(kind: str, text: str) -> dict[str, Any]:
    known = SPEC_FIELDS[kind]
    found: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if name not in known or not equals:
            raise ValueError(f"{part!r:.60} in {kind}: write {', '.join(f'{n}=…' for n in known)}")
        if known[name] in found:
            raise ValueError(f"{name} is given twice")
        found[known[name]] = _value(name, value)
    return found


def _table(text: str) -> dict[str, Any]:
    delays, _, rest = text.partition(";")
    if not delays.strip():
        raise ValueError("table needs its delays: table:10s,30s,1m")
    delays_ms = [_delay_ms("table", delay) for delay in delays.split(",")]
    return {"kind": "table", "delays_ms": delays_ms, **_fields("table", rest)}


def _value(name: str, text: str) -> int | float:
    if name == "retries":
        if not text.isascii() or not text.isdecimal() or int(text) > RETRIES_MAX:
            raise ValueError(f"retries is {text!r:.40}; 0 to {RETRIES_MAX} is allowed")
        return int(text)
    if name in {"factor", "jitter"}:
        return _number(name, text)
    return _delay_ms(name, text)


def _number(name: str, text: str) -> float:
    least, most = (1.0, math.inf) if name == "factor" else (0.0, 1.0)
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r:.40}; a number is needed") from None
    if not (least <= value <= most and math.isfinite(value)):
        allowed = "1 or more" if name == "factor" else "0 to 1"
        raise ValueError(f"{name} is {text}; {allowed} is allowed")
    return value


def _delay_ms(name: str, text: str) -> int:
    try:
        return round(parse_duration(text) * 1000)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


ADD, KEEP, REPLACE, REJECT = ACTIONS = ("add", "keep", "replace", "reject")
STARTED, FINISHED = UNTIL = ("started", "finished")
BOTH, BODY, DUE = REPLACES = ("both", "body", "due")
NEW, LATER, EARLIER = DUES = ("new", "later", "earlier")
RULE_FIELDS: Mapping[str, tuple[str, ...]] = {
    ADD: (),
    KEEP: ("window_ms", "unique_until"),
    REPLACE: ("window_ms", "replaces", "due", "max_wait_ms"),
    REJECT: ("window_ms", "unique_until"),
}
"""The fields that each action takes beside itself."""
_WORDS = {"unique_until": UNTIL, "replaces": REPLACES, "due": DUES}


class Coalescing(NamedTuple):
    """``add``: store it, whatever is pending. ``keep``: the pending task stays as it is, and this
    one is not stored. ``replace``: this one takes the place of the pending one. ``reject``: refuse
    it."""

    action: str
    window_ms: int | None = None
    """How long after its enqueue a task counts as pending; None: until it is finished."""
    unique_until: str = FINISHED
    """Whether a task that a consumer has, or has had and finished while others are still owed it,
    is pending: not for ``started``. One that waits for a retry always is."""
    replaces: str = BOTH
    """What is taken over: the body with all options, the due time, or both."""
    due: str = NEW
    """Which due time holds, where it is taken over: the new one, or the later or the earlier."""
    max_wait_ms: int | None = None
    """The latest due time of a replaced task, counted from its first enqueue; None: no limit."""

    def to_map(self) -> str | dict[str, Any]:
        """The rule in the form of the wire, without fields that have their defaults."""
        plain = Coalescing(self.action)
        said = {
            name: getattr(self, name)
            for name in RULE_FIELDS[self.action]
            if getattr(self, name) != getattr(plain, name)
        }
        return {"action": self.action, **said} if said else self.action


class Merging(IntEnum):
    """What became of a task that had a rule. The numbers are stored."""

    STORED = 1
    KEPT = 2
    REPLACED = 3
    REJECTED = 4

    @property
    def word(self) -> str:
        return self.name.lower()


Merged = tuple[tuple[int, int, int], ...]
"""(Merging, id, due_ms) of each task of a request; id and due time are of the task that stands."""


def checked_rule(given: Any, field: str) -> Coalescing:
    """A checked rule from a name or a map. Raises InvalidPolicy."""
    if isinstance(given, str):
        given = {"action": given}
    elif not isinstance(given, Mapping):
        raise InvalidPolicy(
            f"{field} must be one of {', '.join(ACTIONS)}, or a map, not {{}}", given
        )
    action = given.get("action")
    if not isinstance(action, str) or action not in ACTIONS:
        raise InvalidPolicy(f"{field} must be one of {', '.join(ACTIONS)}, not {{}}", action)
    allowed = RULE_FIELDS[action]
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name == "action" or value is None:
            continue
        if name not in allowed:
            known = ", ".join(allowed) or "nothing more"
            raise InvalidPolicy(f"{field}: {action} has no {{}}; known: {known}", name)
        words = _WORDS.get(name)
        if words is None:
            if type(value) is not int or not 1 <= value <= DELAY_MS_MAX:
                text = f"{field}.{name} must be an integer of 1 to {DELAY_MS_MAX}, not {{}}"
                raise InvalidPolicy(text, value)
        elif not isinstance(value, str) or value not in words:
            text = f"{field}.{name} must be one of {', '.join(words)}, not {{}}"
            raise InvalidPolicy(text, value)
        found[name] = value
    rule = Coalescing(action, **found)
    if rule.replaces == BODY and (rule.due != NEW or rule.max_wait_ms is not None):
        raise InvalidPolicy(
            f"{field}: due and max_wait_ms say nothing where the body alone is replaced"
        )
    return rule
