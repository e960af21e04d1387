"""Policies and rules in the form that callers write: ``Retry``, the number and the delays of
retries, and ``IfPending``, the rule for a task whose key is pending.

Both can be converted to the wire format; only the daemon applies them. Unlike the daemon's
``RetryPolicy``, a ``Retry`` can leave numbers to the daemon. Its limits are the same. Invariant:
every ``Retry`` can be sent, because its factory has checked it.
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
    policy_spec,
)

TABLES: Mapping[str, tuple[int, ...]] = {"rocketmq": ROCKETMQ_MS}
"""Name → delays in ms, for the tables that every daemon knows. The last delay is repeated."""

_NAMED = "named"
_NUMBERS = ("base_ms", "factor", "cap_ms", "delay_ms", "delays_ms", "retries", "jitter")


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """A retry policy; create it with ``exponential``, ``fixed``, ``table``, ``none`` or ``named``.

    ``retries`` is the number of attempts after the first. If all fail, the task becomes a dead
    letter. ``jitter`` is the maximum share, 0 to 1, by which a delay is randomly shortened or
    lengthened. A field that is None takes the daemon's default. The policy of a task overrides that
    of its group, which overrides that of its topic, which overrides the daemon's.
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
        """Wait ``base`` before the first retry, and ``factor`` times as long before each further
        retry, up to ``cap``."""
        base_ms, cap_ms = _delay(base, "base", 1), _delay(cap, "cap", 1)
        if cap_ms < base_ms:
            raise BadRequest(f"cap must be at least base ({base_ms} ms), not {cap_ms} ms")
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
        """Wait ``delay`` before every retry."""
        return cls(
            kind="fixed",
            delay_ms=_delay(delay, "delay", 0),
            retries=_number("retries", retries),
            jitter=_number("jitter", jitter),
        )

    @classmethod
    def table(cls, table: str | Iterable[Duration], retries: int | None = None) -> Self:
        """Wait for each delay of a table in turn, then repeat the last one. ``table`` is
        ``"rocketmq"`` (16 steps from 10 s to 2 h) or a list of delays. ``retries`` defaults to the
        length of the table."""
        if isinstance(table, str):
            if table not in TABLES:
                names = ", ".join(map(repr, TABLES))
                raise BadRequest(f"table must be {names} or a list of delays, not {shown(table)}")
            if retries is None:
                return cls.named(table)
            delays_ms = TABLES[table]
        else:
            delays_ms = _delays(table)
        count = len(delays_ms) if retries is None else _number("retries", retries)
        return cls(kind="table", delays_ms=delays_ms, retries=count)

    @classmethod
    def none(cls) -> Self:
        """Do not retry: a task becomes a dead letter at its first failure."""
        return cls(kind="none")

    @classmethod
    def named(cls, name: str) -> Self:
        """Use a policy that the daemon's settings define, or "default"."""
        return cls(kind=_NAMED, name=_checked_name(name))

    # --- the wire -------------------------------------------------------------------------------

    @classmethod
    def of(cls, raw: str | Mapping[str, Any]) -> Self:
        """Read a policy from the wire: a name, or a map that can leave numbers to the daemon. Raise
        BadRequest for a number out of its bounds. Unknown kinds and fields are accepted."""
        if isinstance(raw, str):
            return cls.named(raw)
        if not isinstance(raw.get("kind"), str):
            kinds = ", ".join(KINDS)
            raise BadRequest(f"a retry policy must have a kind ({kinds}), not {shown(raw)}")
        present = {name: raw[name] for name in _NUMBERS if raw.get(name) is not None}
        if raw["kind"] == "table" and raw.get("name") is None:
            present.setdefault("delays_ms", None)  # the only number without a default
        numbers = {name: _number(name, value) for name, value in present.items()}
        base_ms, cap_ms = numbers.get("base_ms", 0), numbers.get("cap_ms")
        if cap_ms is not None and cap_ms < base_ms:
            raise BadRequest(f"cap_ms must be at least base_ms ({base_ms}), not {cap_ms}")
        return cls(kind=raw["kind"], name=raw.get("name"), **numbers)

    def to_wire(self) -> str | dict[str, Any]:
        """Return the policy in the wire format: a name or a map."""
        if self.name is not None:
            return self.name
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        return {"kind": self.kind, **{n: v for n, v in numbers.items() if v is not None}}

    def spec(self) -> str:
        """Return the policy as the command line's SPEC, such as ``fixed:delay=500ms,retries=3``."""
        return policy_spec(self.to_wire())

    def __repr__(self) -> str:
        pairs = [f"{name}={getattr(self, name)}" for name in ("name", *_NUMBERS)]
        fields = ", ".join(pair for pair in pairs if not pair.endswith("=None"))
        return f"<Retry {self.kind}{': ' if fields else ''}{fields}>"


def policy_wire(value: Any, field: str) -> str | dict[str, Any]:
    """Return a ``Retry`` in the wire format. Raise BadRequest for any other value."""
    if not isinstance(value, Retry):
        raise BadRequest(f"{field} must be a Retry such as Retry.fixed(5), not {shown(value)}")
    return value.to_wire()


def _checked_name(value: Any) -> str:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise BadRequest(
            f"name must begin with a letter and have 1 to 64 characters from A-Z a-z 0-9 . _ -,"
            f" not {shown(value)}"
        )
    return value


def _delay(value: Any, field: str, low_ms: int) -> int:
    delay_ms = duration_ms(value, field)
    if not low_ms <= delay_ms <= DELAY_MS_MAX:
        raise BadRequest(
            f"{field} must be between {low_ms} and {DELAY_MS_MAX} ms, not {delay_ms} ms"
        )
    return delay_ms


def _delays(values: Any) -> tuple[int, ...]:
    if isinstance(values, (bytes, Mapping)) or not isinstance(values, Iterable):
        raise BadRequest(f"table must be a name or a list of delays, not {shown(values)}")
    delays_ms = tuple(_delay(value, f"table[{i}]", 0) for i, value in enumerate(values))
    if not 1 <= len(delays_ms) <= STEPS_MAX:
        raise BadRequest(f"table must have between 1 and {STEPS_MAX} delays, not {len(delays_ms)}")
    return delays_ms


def _number(name: str, value: Any) -> Any:
    try:
        return check_number(name, value, name)
    except InvalidPolicy as error:
        raise BadRequest(error.message(shown)) from None


@dataclass(frozen=True, slots=True)
class IfPending:
    """The rule for a new task while another task with the same topic and key is pending: scheduled,
    ready, waiting for a retry, or in flight.

    ``action`` is "keep" (the new task is not stored), "replace" (the new task replaces the pending
    one), "reject" (the new task is refused) or "add" (both are stored). ``window``, in seconds, is
    how long a task counts as pending after its enqueue; by default, until it is finished.
    ``unique_until``, for "keep" and "reject", is "finished" or "started"; with "started" a task in
    flight is not pending.

    For "replace", ``replaces`` is the "body" (with all options), the "due" time, or "both". ``due``
    selects the "new", the "later" or the "earlier" due time. ``max_wait`` is the maximum number of
    seconds between the first enqueue and the due time. A task in flight is not replaced. The rule
    is checked when a task is enqueued with it.
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
        """Read an ``IfPending`` in the wire format."""
        if isinstance(raw, str):
            return cls(cast("Action", raw))
        optional_fields = {name: raw.get(name) for name in ("unique_until", "replaces", "due")}
        return cls(
            cast("Action", str(raw["action"])),
            window=_seconds(raw.get("window_ms")),
            max_wait=_seconds(raw.get("max_wait_ms")),
            **optional_fields,
        )


def _seconds(ms: int | None) -> float | None:
    return None if ms is None else ms / 1000


def rule_wire(value: Any, field: str) -> str | dict[str, Any]:
    """Return an ``IfPending``, or the name of an action, in the wire format. Raise BadRequest for
    an invalid rule."""
    if_pending = IfPending(cast("Action", value)) if isinstance(value, str) else value
    if not isinstance(if_pending, IfPending):
        raise BadRequest(
            f'{field} must be an action such as "keep", or an IfPending, not {shown(value)}'
        )
    fields: dict[str, Any] = {
        "action": if_pending.action,
        "unique_until": if_pending.unique_until,
        "replaces": if_pending.replaces,
        "due": if_pending.due,
    }
    for name in ("window", "max_wait"):
        duration = getattr(if_pending, name)
        if duration is not None:
            fields[f"{name}_ms"] = duration_ms(duration, f"{field}.{name}")
    try:
        rule: Coalescing = checked_rule(fields, field)
    except InvalidPolicy as error:
        raise BadRequest(error.message(shown)) from None
    return rule.to_map()


def task_rule_wire(value: Any, key: str | None, field: str) -> str | dict[str, Any]:
    """Return a task's rule in the wire format. Raise BadRequest for an invalid rule, or if the task
    has no key."""
    rule = rule_wire(value, field)
    if key is None and rule != ADD:
        action = rule if isinstance(rule, str) else rule["action"]
        raise BadRequest(f"{field} is {action}, which needs a key")
    return rule
