"""Values inside records as plain fields and back: retry policies, settings of groups.

For ``codec.py``, which puts a version before them; their shape belongs to that version.
"""

from __future__ import annotations

from typing import Any

from tickwheel.model.records import GroupSettings
from tickwheel.model.retry import PolicyRef, RetryPolicy


def policy_fields(policy: PolicyRef | None) -> object:
    """A name as it is; numbers as an array."""
    if policy is None or isinstance(policy, str):
        return policy
    return (
        policy.kind,
        policy.base_ms,
        policy.factor,
        policy.cap_ms,
        policy.retries_max,
        policy.jitter,
        policy.delays_ms,
    )


def policy_of(fields: Any) -> PolicyRef | None:
    """Raises ValueError or TypeError for what is no policy."""
    if fields is None or isinstance(fields, str):
        return fields
    kind, base_ms, factor, cap_ms, retries_max, jitter, delays_ms = fields
    return RetryPolicy(base_ms, factor, cap_ms, retries_max, jitter, kind, tuple(delays_ms))


def settings_fields(settings: GroupSettings) -> tuple[object, ...]:
    paused, rate, burst, retry, closed_ms, closed_id = settings
    return paused, rate, burst, policy_fields(retry), closed_ms, closed_id


def settings_of(
    paused: bool,
    rate: float | None,
    burst: int | None,
    retry: Any,
    closed_ms: int | None,
    closed_id: int,
) -> GroupSettings:
    return GroupSettings(paused, rate, burst, policy_of(retry), closed_ms, closed_id)
