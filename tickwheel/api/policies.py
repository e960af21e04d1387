"""Policies and rules as callers write them: ``Retry``, how often a failed task is delivered again
and after how long, and ``IfPending``, the rule for a task whose key is pending.

Values, checked when they are made; what they mean is the daemon's business. Unlike the daemon's
``RetryPolicy`` a ``Retry`` may leave numbers to the daemon; the limits are the same. Knows the
shape of both on the wire. Invariant: a ``Retry`` that exists can be sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Self, cast

from tickwheel.api.frames import Action, DueOf, Replaces, UniqueUntil
from tickwheel.api.times import Duration, duration_ms
from tickwheel.errors import BadRequest, shown
from tickwheel.model.policies import (
    ADD,
    DELAY_MS_MAX,
    KINDS,
    NAME,
    ROCKETMQ_MS,
    STEPS_MAX,
    Coalescing,
    InvalidPolicy,
    check_number,
    checked_rule,
)

TABLES: Mapping[str, tuple[int, ...]] = {"rocketmq": ROCKETMQ_MS}
"""The tables that every daemon knows by name; beyond one its last delay."""

_NAMED = "named"
_NUMBERS = ("base_ms", "factor", "cap_ms", "delay_ms", "delays_ms", "retries", "jitter")


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """One policy; made by ``exponential``, ``fixed``, ``table``, ``none`` or ``named``.

    ``retries``: further attempts after the first; then the task goes to the dead letters.
    ``jitter``: the largest share by which a delay is shortened or lengthened (0 to 1).
    A field that is None takes the daemon's default. A task's own policy wins over its group's,
    that over its topic's, that over the daemon's.
    """

    kind: str
    name: str | None = None
    base_ms: int | None = None
    factor: float | None = None
    cap_ms: int | None = None
    delay_ms: int | None = None
    delays_ms: tuple[int, ...] | None = None
    retries: int | None = None
    jitter: float | None = None

    @classmethod
    def exponential(
        cls,
        base: Duration = 10.0,
        factor: float = 2.0,
        cap: Duration = 7200.0,
        retries: int = 16,
        jitter: float = 0.1,
    ) -> Self:
        """``base`` seconds before the first retry, each further one ``factor`` times as long, at
        most ``cap``."""
        base_ms, cap_ms = _delay(base, "base", 1), _delay(cap, "cap", 1)
        if cap_ms < base_ms:
            raise BadRequest(f"cap is {cap_ms} ms; it must not be less than base, {base_ms} ms")
        return cls(
            kind="exponential",
            base_ms=base_ms,
            factor=_number("factor", factor),
            cap_ms=cap_ms,
            retries=_number("retries", retries),
            jitter=_number("jitter", jitter),
        )

    @classmethod
    def fixed(cls, delay: Duration, retries: int = 16, jitter: float = 0.0) -> Self:
        """The same ``delay`` before every retry."""
        return cls(
            kind="fixed",
            delay_ms=_delay(delay, "delay", 0),
            retries=_number("retries", retries),
            jitter=_number("jitter", jitter),
        )

    @classmethod
    def table(cls, table: str | Iterable[Duration], retries: int | None = None) -> Self:
        """Delay by delay, beyond the table its last one: ``"rocketmq"`` (16 steps from 10 s to
        2 h), or a list of delays. ``retries`` defaults to the length of the table."""
        if isinstance(table, str):
            if table not in TABLES:
                known = ", ".join(map(repr, TABLES))
                raise BadRequest(f"table must be {known} or a list of delays, not {shown(table)}")
            if retries is None:
                return cls.named(table)
            delays_ms = TABLES[table]
        else:
            delays_ms = _delays(table)
        count = len(delays_ms) if retries is None else _number("retries", retries)
        return cls(kind="table", delays_ms=delays_ms, retries=count)

    @classmethod
    def none(cls) -> Self:
        """No retry: the first failure ends in the dead letters."""
        return cls(kind="none")

    @classmethod
    def named(cls, name: str) -> Self:
        """A policy that the daemon knows by name: "default", or one that its settings define."""
        return cls(kind=_NAMED, name=_checked_name(name))

    # --- the wire -------------------------------------------------------------------------------

    @classmethod
    def of(cls, raw: str | Mapping[str, Any]) -> Self:
        """A policy from the wire: a name, or a map (that may leave out what the daemon fills
        in)."""
        if isinstance(raw, str):
            return cls.named(raw)
        if not isinstance(raw.get("kind"), str):
            raise BadRequest(f"a retry policy has a kind of {', '.join(KINDS)}, not {shown(raw)}")
        found = {name: raw[name] for name in _NUMBERS if raw.get(name) is not None}
        if "delays_ms" in found:
            found["delays_ms"] = tuple(found["delays_ms"])
        return cls(kind=raw["kind"], name=raw.get("name"), **found)

    def to_wire(self) -> str | dict[str, Any]:
        """The policy for the wire: the name of a named one, else a map."""
        if self.name is not None:
            return self.name
        given = {name: getattr(self, name) for name in _NUMBERS}
        return {"kind": self.kind, **{n: v for n, v in given.items() if v is not None}}

    def spec(self) -> str:
        """The policy as the command line's SPEC: ``fixed:delay=500ms,retries=3``."""
        wire = self.to_wire()
        if isinstance(wire, str):
            return wire
        if "delays_ms" in wire:
            delays = ",".join(f"{delay_ms}ms" for delay_ms in wire["delays_ms"])
            retries = wire.get("retries")
            return f"table:{delays}" + ("" if retries is None else f";retries={retries}")
        parts = [
            f"{name.removesuffix('_ms')}={value}{'ms' * name.endswith('_ms')}"
            for name, value in wire.items()
            if name != "kind" and value is not None
        ]
        return f"{wire['kind']}:{','.join(parts)}" if parts else str(wire["kind"])

    def __repr__(self) -> str:
        given = [f"{name}={getattr(self, name)}" for name in ("name", *_NUMBERS)]
        known = ", ".join(text for text in given if not text.endswith("=None"))
        return f"<Retry {self.kind}{': ' if known else ''}{known}>"


def policy_wire(value: Any, field: str) -> str | dict[str, Any]:
    """A ``Retry`` given as an argument, for the wire. Raises BadRequest."""
    if not isinstance(value, Retry):
        raise BadRequest(f"{field} must be a Retry such as Retry.fixed(5), not {shown(value)}")
    return value.to_wire()


def _checked_name(value: Any) -> str:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise BadRequest(
            f"name must be 1 to 64 of A-Z a-z 0-9 . _ - and begin with a letter, not {shown(value)}"
        )
    return value


def _delay(value: Any, field: str, low_ms: int) -> int:
    delay_ms = duration_ms(value, field)
    if not low_ms <= delay_ms <= DELAY_MS_MAX:
        raise BadRequest(f"{field} is {delay_ms} ms; the limits are {low_ms} and {DELAY_MS_MAX} ms")
    return delay_ms


def _delays(values: Any) -> tuple[int, ...]:
    if isinstance(values, (bytes, Mapping)) or not isinstance(values, Iterable):
        raise BadRequest(f"table must be a name or a list of delays, not {shown(values)}")
    found = tuple(_delay(value, f"table[{i}]", 0) for i, value in enumerate(values))
    if not 1 <= len(found) <= STEPS_MAX:
        raise BadRequest(f"table has {len(found)} delays; the limits are 1 and {STEPS_MAX}")
    return found


def _number(name: str, value: Any) -> Any:
    try:
        return check_number(name, value, name)
    except InvalidPolicy as error:
        raise BadRequest(error.message(shown)) from None


@dataclass(frozen=True, slots=True)
class IfPending:
    """The rule for a task while another one with its topic and key is pending: scheduled, ready,
    waiting for a retry, or in flight.

    ``action``: "keep" (the pending one stays as it is, this one is not stored), "replace" (this one
    takes its place), "reject" (this one is refused) or "add" (it is stored as well). ``window``,
    in seconds: how long a task counts as pending after its enqueue; default: until it is
    finished. ``unique_until``, for "keep" and "reject": "finished", or "started": a task that a
    consumer has does not count.

    For "replace": ``replaces`` the "body" with all options, the "due" time, or "both"; ``due``: the
    "new" time holds, or the "later" or the "earlier" of the two; ``max_wait``, in seconds: how long
    after its first enqueue the task is due at the latest. A task in a consumer's hands stays.
    Raises nothing: it is checked when a task is enqueued with it.
    """

    action: Action
    _: KW_ONLY
    window: Duration | None = None
    unique_until: UniqueUntil | None = None
    replaces: Replaces | None = None
    due: DueOf | None = None
    max_wait: Duration | None = None

    @classmethod
    def of(cls, raw: str | Mapping[str, Any]) -> IfPending:
        """An ``IfPending`` from its form on the wire."""
        if isinstance(raw, str):
            return cls(cast("Action", raw))
        words = {name: raw.get(name) for name in ("unique_until", "replaces", "due")}
        return cls(
            cast("Action", str(raw["action"])),
            window=_seconds(raw.get("window_ms")),
            max_wait=_seconds(raw.get("max_wait_ms")),
            **words,
        )


def _seconds(ms: int | None) -> float | None:
    return None if ms is None else ms / 1000


def rule_wire(value: Any, field: str) -> str | dict[str, Any]:
    """An ``IfPending`` or the name of an action, for the wire. Raises BadRequest."""
    given = IfPending(cast("Action", value)) if isinstance(value, str) else value
    if not isinstance(given, IfPending):
        raise BadRequest(
            f'{field} must be a word such as "keep", or an IfPending, not {shown(value)}'
        )
    said: dict[str, Any] = {
        "action": given.action,
        "unique_until": given.unique_until,
        "replaces": given.replaces,
        "due": given.due,
    }
    for name in ("window", "max_wait"):
        duration = getattr(given, name)
        if duration is not None:
            said[f"{name}_ms"] = duration_ms(duration, f"{field}.{name}")
    try:
        rule: Coalescing = checked_rule(said, field)
    except InvalidPolicy as error:
        raise BadRequest(error.message(shown)) from None
    return rule.to_map()


def task_rule_wire(value: Any, key: str | None, field: str) -> str | dict[str, Any]:
    """A task's rule for the wire; the task must have a key. Raises BadRequest."""
    rule = rule_wire(value, field)
    if key is None and rule != ADD:
        action = rule if isinstance(rule, str) else rule["action"]
        raise BadRequest(f"{field} is {action}, which needs a key")
    return rule
