"""Retry policies and rules for pending keys, their text forms, and durations as text. This module
uses no clock and no terminal.

It has the arithmetic and the only codec of retry policies. The jitter is derived from the task's id
and failures, so the same inputs result in the same delay and the engine stays pure. ``Core.policy``
selects the policy of a task: the task's own, its group's, its topic's, or the daemon's.

Outside memory a policy has three forms. In all of them, a named policy is represented by its name:

* a map of its kind and the numbers of that kind (``FIELDS``) on the wire, in settings and in the
  history. ``checked`` validates maps from outside;
* an array of all its fields (``stored_fields``) in stored records;
* a text that people write, a SPEC (``parse_policy``):

    exponential:base=10s,factor=2,cap=2h,retries=16,jitter=0.1
    fixed:delay=30s,retries=5
    table:10s,30s,1m;retries=8        the last delay repeats
    none, default, rocketmq, or a name that the daemon's settings define

Fields that a SPEC leaves out get the daemon's defaults, and the daemon checks its own limits.
Parsers raise ValueError with a sentence that names the value; the caller adds the field or
argument. ``policy_spec`` is the inverse of ``parse_policy``. Checks raise ``InvalidPolicy``, which
the daemon and the client convert to errors of the protocol.

A task in JSON has the same format on the command line and over HTTP (docs/http.md). A time has two
fields, ``delay`` as people write it and ``delay_ms``, of which only one can be given.

``Coalescing`` is a task's or topic's rule for pending keys, and ``Merging`` its outcome.
``engine/enqueue.py`` decides which tasks are pending. Outside memory a rule is a map of
``RULE_FIELDS``, or the name of its action if all other fields have their defaults.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Final, NamedTuple, Self

from tickwheel.model.values import InvalidValue, whole_number

_SPREAD = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: Fibonacci hashing (Knuth, TAOCP 3, 6.4)."""

FIELDS: Mapping[str, tuple[str, ...]] = {
    "exponential": ("base_ms", "factor", "cap_ms", "retries", "jitter"),
    "fixed": ("delay_ms", "retries", "jitter"),
    "table": ("delays_ms", "retries"),
    "none": (),
}
"""Kind of policy → names of the numbers in its map."""
_ATTRIBUTES = {"delay_ms": "base_ms", "retries": "retries_max"}
"""Name of a number in a map → attribute of ``RetryPolicy``, where they differ."""
KINDS = tuple(FIELDS)
NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")

DELAY_MS_MAX = 315_576_000_000
"""Ten years; also the maximum delay of a task."""
RETRIES_MAX = 65_535
STEPS_MAX = 1_024
"""Maximum number of delays in a table."""
FACTOR_MAX = 1_000_000.0
BOUNDS: Mapping[str, tuple[float, float]] = {
    "factor": (1.0, FACTOR_MAX), "jitter": (0.0, 1.0), "retries": (0, RETRIES_MAX),
}  # fmt: skip
"""Number of a policy → its bounds, integers for an integer. Delays: 0 to ``DELAY_MS_MAX``."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """A retry policy. The delay before retry n depends on ``kind``:

    * exponential: ``base_ms * factor ** (n - 1)``, at most ``cap_ms``;
    * fixed: ``base_ms``;
    * table: entry n of ``delays_ms``, or its last entry;
    * none: no retry.

    After ``retries_max`` retries the task is dead. ``jitter`` is the maximum share, 0 to 1, by
    which a delay is shortened or lengthened.
    """

    base_ms: int = 10_000
    factor: float = 2.0
    cap_ms: int = 7_200_000
    retries_max: int = 16
    jitter: float = 0.1
    kind: str = "exponential"
    delays_ms: tuple[int, ...] = ()

    def allows(self, failed: int) -> bool:
        """Return whether a task is delivered again after ``failed`` failed deliveries."""
        return failed <= self.retries_max

    def retries_left(self, counted: int) -> int:
        """Return how many retries are left after ``counted`` failed or unfinished deliveries."""
        return max(0, self.retries_max - max(0, counted - 1))

    def delay_ms(self, failed: int, task_id: int) -> int:
        """Return the delay in ms after failure number ``failed``, counted from 1."""
        plain, cap_ms = self._plain_ms(failed), float(self.cap_ms)
        if not self.jitter:
            return int(plain)
        hashed = ((task_id * _SPREAD + failed * 0xD1B54A32D192ED03) >> 11) & 0xFFFFF
        swing = (hashed / 0xFFFFF * 2.0 - 1.0) * self.jitter
        swung = plain * (1.0 + swing)
        return max(0, int(min(swung, cap_ms) if "cap_ms" in FIELDS[self.kind] else swung))

    def _plain_ms(self, failed: int) -> float:
        if self.kind == "fixed":
            return float(self.base_ms)
        if self.kind == "table":
            return float(self.delays_ms[min(failed, len(self.delays_ms)) - 1])
        if self.kind in ("exponential", "none"):
            return self._grown_ms(failed - 1)
        raise NotImplementedError(f"the delay of a policy of kind {self.kind}")

    def _grown_ms(self, steps: int) -> float:
        """Return ``base_ms * factor ** steps``, at most the cap. The logarithm is compared first,
        because with a large factor the power overflows a float (1e308) after 52 steps."""
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
        """Return the policy as a map of its kind and the numbers of that kind."""
        numbers = {name: getattr(self, _ATTRIBUTES.get(name, name)) for name in FIELDS[self.kind]}
        return {"kind": self.kind} | numbers

    @classmethod
    def of_map(cls, fields: Mapping[str, Any]) -> Self:
        """Read a policy from a map without checking its numbers again. Only ``retries`` and
        ``jitter`` have defaults. Raise KeyError if another number is missing, and ValueError for
        an unknown kind."""
        kind = fields.get("kind")
        if not isinstance(kind, str) or kind not in FIELDS:
            raise ValueError(f"{kind!r:.100} is not a kind of retry policy")
        fields = {"retries": _DEFAULTS.retries_max, "jitter": _DEFAULTS.jitter, **fields}
        numbers = {_ATTRIBUTES.get(name, name): fields[name] for name in FIELDS[kind]}
        if kind == "table":
            numbers["delays_ms"] = tuple(numbers["delays_ms"])
        return replace(cls(0, 1.0, 0, 0, 0.0, kind), **numbers)


_DEFAULTS = RetryPolicy()


PolicyRef = str | RetryPolicy
"""A policy, or the name of a policy, which is looked up each time."""

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
"""The name of the policy that the daemon's settings ``retry_…`` define."""


# --- a policy or its name ------------------------------------------------------------------------


def stored_fields(ref: PolicyRef | None) -> object:
    """Return a policy in its stored form: a name, or an array of its fields."""
    if not isinstance(ref, RetryPolicy):
        return ref
    numbers = (ref.base_ms, ref.factor, ref.cap_ms, ref.retries_max, ref.jitter)
    return (ref.kind, *numbers, ref.delays_ms)


def of_stored_fields(fields: Any) -> PolicyRef | None:
    """Read a policy from its stored form. Raise ValueError or TypeError for any other value."""
    if fields is None or isinstance(fields, str):
        return fields
    kind, *numbers, delays_ms = fields
    base_ms, factor, cap_ms, retries_max, jitter = numbers
    return RetryPolicy(base_ms, factor, cap_ms, retries_max, jitter, kind, tuple(delays_ms))


def of_history(value: Any) -> PolicyRef | None:
    """Read a policy from a line of the history, where it is a name or a map. Raise ValueError or
    KeyError for any other value."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return str(value["name"]) if "name" in value else RetryPolicy.of_map(value)
    raise ValueError(f"{value!r:.100} is not a retry policy")


# --- checks of values from outside ---------------------------------------------------------------


class InvalidPolicy(InvalidValue):
    """A value is not a valid policy. ``is_too_long`` means that a table has too many delays."""


def checked(fields: Mapping[str, Any], field: str, default: RetryPolicy) -> RetryPolicy:
    """Read and check a policy from a map. Missing numbers, and None, are taken from ``default``.
    ``field`` names the map in messages. Raise InvalidPolicy for an invalid policy."""
    kind = fields.get("kind")
    if not isinstance(kind, str) or kind not in FIELDS:
        raise InvalidPolicy(f"{field}.kind must be one of {', '.join(FIELDS)}, not {{}}", kind)
    present = {name: number for name, number in fields.items() if number is not None}
    allowed = ("kind", *FIELDS[kind])
    for name in present:
        if name not in allowed:
            names = ", ".join(allowed)
            raise InvalidPolicy(f"{field} has an unknown key {{}}; known: {names}", name)
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
    if "cap_ms" in numbers and numbers["cap_ms"] < numbers["base_ms"]:
        raise InvalidPolicy(
            f"{field}.cap_ms must be at least base_ms ({numbers['base_ms']}), not"
            f" {numbers['cap_ms']}"
        )
    return RetryPolicy.of_map(numbers)


def check_number(name: str, value: Any, field: str) -> Any:
    """Check a number of a map by its name in ``FIELDS``. Raise InvalidPolicy if it is invalid."""
    if name == "delays_ms":
        return _check_delays(value, field)
    low, high = BOUNDS.get(name, (0, DELAY_MS_MAX))
    if isinstance(low, int) and isinstance(high, int):
        return check_integer(value, field, low, high)
    return check_float(value, field, low, high)


def check_integer(value: Any, field: str, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise InvalidPolicy(f"{field} must be an integer between {low} and {high}, not {{}}", value)
    return value


def check_float(value: Any, field: str, low: float, high: float) -> float:
    """Return a number or an integer as a float. Raise InvalidPolicy if it is invalid."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        raise InvalidPolicy(
            f"{field} must be a number between {low:g} and {high:g}, not {{}}", value
        )
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


def named_policies(settings: Mapping[str, Any], default: RetryPolicy) -> dict[str, RetryPolicy]:
    """Return the policies that the settings define. Raise ValueError for an invalid policy."""
    policies: dict[str, RetryPolicy] = {}
    for name, value in settings.items():
        if name in BUILT_IN or name == DEFAULT:
            raise ValueError(f"retry_policies.{name} is built in; choose another name")
        if not NAME.fullmatch(name):
            raise ValueError(
                "a policy's name in retry_policies must be a letter and up to 63 characters from"
                f" A-Z a-z 0-9 . _ -, not {name!r}"
            )
        if not isinstance(value, Mapping):
            raise ValueError(f"retry_policies.{name} must be a table of numbers, not a name")
        policies[name] = checked(value, f"retry_policies.{name}", default)
    return policies


UNITS_MS = {
    "ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000,
}  # fmt: skip
DURATION_MS_MAX = 2**42 * 1000
"""Maximum duration. Up to this value, a float in seconds can represent every millisecond."""
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?) *(ms|[smhdw])")
_PARTS = re.compile(rf"(?:{_PART.pattern} *)+")
_DURATION_HELP = "write for example 30s, 5m, 1h30m, 500ms or 2d"

RULE_DURATIONS: Final = ("window", "max_wait")
"""The durations of a rule for pending keys; their names on the wire end in ``_ms``."""


def parse_duration(text: str, *, up: bool = True) -> float:
    """Return the seconds of ``1h30m``, ``500ms`` or ``1.5s``, rounded up (or down) to milliseconds.
    A bare number means seconds. Raise ValueError if the text is not a duration."""
    cleaned = text.strip().lower()
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", cleaned):
        cleaned += "s"
    parts = _PART.findall(cleaned)
    if len(cleaned) > 100 or _PARTS.fullmatch(cleaned) is None:
        raise ValueError(f"{text!r:.100} is not a duration; {_DURATION_HELP}")
    units = [UNITS_MS[unit] for _, unit in parts]
    if sorted(set(units), reverse=True) != units:
        raise ValueError(
            f"{text!r} must use each unit at most once, the largest first; {_DURATION_HELP}"
        )
    total_ms = _whole_ms(parts, up)
    if total_ms > DURATION_MS_MAX:
        raise ValueError(f"{text!r} is longer than the limit of {DURATION_MS_MAX} ms")
    return total_ms / 1000


def _whole_ms(parts: Sequence[tuple[str, str]], up: bool) -> int:
    """Return the sum of numbers with units in milliseconds, without binary rounding errors."""
    digits = max(len(number.partition(".")[2]) for number, _ in parts)
    total = 0
    for number, unit in parts:
        integer, _, fraction = number.partition(".")
        total += int(integer + fraction.ljust(digits, "0")) * UNITS_MS[unit]
    return int(-(-total // 10**digits) if up else total // 10**digits)


def parse_shift(text: str) -> float:
    """Return a shift in seconds. A minus sign makes it negative (earlier)."""
    cleaned = text.strip()
    if cleaned.startswith("-"):
        return -parse_duration(cleaned[1:], up=False)  # never earlier than requested
    return parse_duration(cleaned)


def duration_spec(ms: int) -> str:
    """Return a duration exactly, as ``parse_duration`` reads it: ``1m30s``, ``500ms``, ``2h``."""
    parts, rest_ms = [], ms
    for unit in ("d", "h", "m", "s", "ms"):
        count, rest_ms = divmod(rest_ms, UNITS_MS[unit])
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


def duration_ms(value: Any) -> int:
    """Return the milliseconds of a duration in text, or of a number of seconds."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"{value!r:.40} is not a duration; {_DURATION_HELP}")
    if not isinstance(value, str):
        if not 0 <= value * 1000 <= DURATION_MS_MAX:
            raise ValueError(f"{value!r:.40} is not a duration; {_DURATION_HELP}")
        value = f"{value:f}"
    return round(parse_duration(value) * 1000)


def rule_wire(rule: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rule for pending keys with its durations in the wire format."""
    fields = dict(rule)
    for name in RULE_DURATIONS:
        value = fields.pop(name, None)
        if value is None:
            continue
        if fields.get(f"{name}_ms") is not None:
            raise ValueError(f"give {name} or {name}_ms, not both")
        try:
            fields[f"{name}_ms"] = duration_ms(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return fields


# --- retry policies ------------------------------------------------------------------------------

Policy = str | dict[str, Any]
"""A policy in the wire format: a name, or a map with "kind"."""

SPEC_FIELDS: dict[str, dict[str, str]] = {
    kind: {name.removesuffix("_ms"): name for name in names if name != "delays_ms"}
    for kind, names in FIELDS.items()
    if names
}
"""Kind of policy → field of its SPEC → name on the wire."""
_KNOWN = "use exponential:…, fixed:…, table:…, none, default, rocketmq, or a name"


def parse_policy(text: str) -> Policy:
    """Convert a SPEC to the wire format. Raise ValueError if it is not valid."""
    kind, colon, fields_text = text.strip().partition(":")
    kind = kind.strip()
    if kind in SPEC_FIELDS:
        return (
            _table(fields_text) if kind == "table" else {"kind": kind, **_fields(kind, fields_text)}
        )
    if colon or not NAME.fullmatch(kind):
        raise ValueError(f"{text!r:.80} is not a retry policy; {_KNOWN}")
    return kind


def policy_spec(policy: str | Mapping[str, Any]) -> str:
    """Return the SPEC of a policy in the wire format. A policy that has a name is that name."""
    if isinstance(policy, str):
        return policy
    if policy.get("name"):
        return str(policy["name"])
    kind, retries = str(policy.get("kind")), policy.get("retries")
    if kind == "table":
        delays = ",".join(map(duration_spec, policy.get("delays_ms", ())))
        return f"table:{delays}" + ("" if retries is None else f";retries={retries}")
    parts = [
        f"{name}={_number_spec(name, policy[wire])}"
        for name, wire in SPEC_FIELDS.get(kind, {}).items()
        if policy.get(wire) is not None
    ]
    return f"{kind}:{','.join(parts)}" if parts else kind


def _number_spec(name: str, value: Any) -> str:
    if name not in {"factor", "jitter"}:
        return str(value) if name == "retries" else duration_spec(value)
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def policy_of_json(value: Any) -> Policy:
    """Read a policy from JSON: a SPEC, or a map in the wire format. Raise ValueError otherwise."""
    if isinstance(value, str):
        return parse_policy(value)
    if not isinstance(value, dict):
        raise ValueError(f"a retry policy must be a SPEC or an object, not {value!r:.40}")
    kind = value.get("kind")
    if not isinstance(kind, str) or kind not in FIELDS:
        raise ValueError(f"kind must be one of none, {', '.join(SPEC_FIELDS)}, not {kind!r:.40}")
    allowed = ("kind", *FIELDS[kind])
    for name, number in value.items():
        if name not in allowed:
            raise ValueError(f"{name} is not a valid field of kind {kind}")
        if name != "kind" and not _has_type(name, number):
            raise ValueError(f"{name} must be {_TYPES.get(name, 'an integer')}, not {number!r:.40}")
    return dict(value)


_TYPES = {"delays_ms": "an array of integers", "factor": "a number", "jitter": "a number"}


def _has_type(name: str, value: Any) -> bool:
    if name == "delays_ms":
        return isinstance(value, list) and all(type(delay) is int for delay in value)
    return type(value) is int or (type(value) is float and name in {"factor", "jitter"})


def _fields(kind: str, text: str) -> dict[str, Any]:
    wire_names = SPEC_FIELDS[kind]
    fields: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if name not in wire_names or not equals:
            forms = ", ".join(f"{n}=…" for n in wire_names)
            raise ValueError(f"{part!r:.60} is not valid for {kind}; write {forms}")
        if wire_names[name] in fields:
            raise ValueError(f"{name} is given twice")
        fields[wire_names[name]] = _value(name, value)
    return fields


def _table(text: str) -> dict[str, Any]:
    delays, _, options_text = text.partition(";")
    if not delays.strip():
        raise ValueError("table must have delays, such as table:10s,30s,1m")
    delays_ms = [_delay_ms("table", delay) for delay in delays.split(",")]
    return {"kind": "table", "delays_ms": delays_ms, **_fields("table", options_text)}


def _value(name: str, text: str) -> int | float:
    if name == "retries":
        retries = whole_number(text)
        if retries is None or retries > RETRIES_MAX:
            raise ValueError(f"retries must be between 0 and {RETRIES_MAX}, not {text!r:.40}")
        return retries
    if name in {"factor", "jitter"}:
        return _number(name, text)
    return _delay_ms(name, text)


def _number(name: str, text: str) -> float:
    low, high = (1.0, math.inf) if name == "factor" else (0.0, 1.0)
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{name} must be a number, not {text!r:.40}") from None
    if not (low <= value <= high and math.isfinite(value)):
        allowed = "finite and at least 1" if name == "factor" else "between 0 and 1"
        raise ValueError(f"{name} must be {allowed}, not {text}")
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
"""Action → its further fields."""
RULE_WORDS = {"unique_until": UNTIL, "replaces": REPLACES, "due": DUES}
"""Field of a rule → its values, if they are words. The other fields are durations in ms."""


class Coalescing(NamedTuple):
    """The rule for a new task while a task with its key is pending. Actions: ``add`` stores the new
    task as well, ``keep`` does not store it, ``replace`` replaces the pending task with it, and
    ``reject`` refuses it."""

    action: str
    window_ms: int | None = None
    """How long after its enqueue a task counts as pending; None means until it is finished."""
    unique_until: str = FINISHED
    """With ``started``, a task is not pending while a consumer has it, or if some groups have
    finished it. Otherwise, a task that waits for a retry is pending."""
    replaces: str = BOTH
    """What the new task replaces: the body with all options, the due time, or both."""
    due: str = NEW
    """Which due time applies if it is replaced: the new, the later, or the earlier one."""
    max_wait_ms: int | None = None
    """Maximum time from the first enqueue to a replaced due time; None means unlimited."""

    def to_map(self) -> str | dict[str, Any]:
        """Return the rule in the wire format, without fields that have their defaults."""
        defaults = Coalescing(self.action)
        fields = {
            name: getattr(self, name)
            for name in RULE_FIELDS[self.action]
            if getattr(self, name) != getattr(defaults, name)
        }
        return {"action": self.action, **fields} if fields else self.action


class Merging(IntEnum):
    """What the rule did with a new task. The numbers are stored."""

    STORED = 1
    KEPT = 2
    REPLACED = 3
    REJECTED = 4

    @property
    def word(self) -> str:
        return self.name.lower()


Merged = tuple[tuple[int, int, int], ...]
"""(Merging, id, due_ms) for each task of a request. Id and due time belong to the task that is
stored after the rule was applied."""


def checked_rule(rule: Any, field: str) -> Coalescing:
    """Read and check a rule from a name or a map. Raise InvalidPolicy if it is not valid."""
    if isinstance(rule, str):
        rule = {"action": rule}
    elif not isinstance(rule, Mapping):
        raise InvalidPolicy(
            f"{field} must be one of {', '.join(ACTIONS)}, or a map, not {{}}", rule
        )
    action = rule.get("action")
    if not isinstance(action, str) or action not in ACTIONS:
        raise InvalidPolicy(f"{field} must be one of {', '.join(ACTIONS)}, not {{}}", action)
    allowed = RULE_FIELDS[action]
    fields: dict[str, Any] = {}
    for name, value in rule.items():
        if name == "action" or value is None:
            continue
        if name not in allowed:
            names = ", ".join(allowed) or "none"
            raise InvalidPolicy(f"{field}: {action} has no option {{}}; its options: {names}", name)
        choices = RULE_WORDS.get(name)
        if choices is None:
            if type(value) is not int or not 1 <= value <= DELAY_MS_MAX:
                text = f"{field}.{name} must be an integer between 1 and {DELAY_MS_MAX}, not {{}}"
                raise InvalidPolicy(text, value)
        elif not isinstance(value, str) or value not in choices:
            text = f"{field}.{name} must be one of {', '.join(choices)}, not {{}}"
            raise InvalidPolicy(text, value)
        fields[name] = value
    coalescing = Coalescing(action, **fields)
    if coalescing.replaces == BODY and (
        coalescing.due != NEW or coalescing.max_wait_ms is not None
    ):
        raise InvalidPolicy(f"{field}: due and max_wait_ms need replaces both or due, not body")
    return coalescing
