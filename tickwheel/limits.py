"""The limits of a daemon, which its operations enforce and every transport announces, and the delay
levels, which a task can name instead of a delay."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from tickwheel.errors import ProtocolError, shown

SHARDS_MAX = 64
"""Maximum shards of a store."""
NODES_MAX = 256
"""Maximum nodes that share a store, including nodes without shards."""
ID_MAX = 2**63 - 1
"""Largest task id."""
KEY_TASKS_MAX = 10_000
COALESCED_TASKS_MAX = 1_024
ENCODING_STEPS_MAX = 2
"""Maximum encoding steps of one body, for example compression and encryption."""
PAUSED_KEYS_MAX = 256
HELLO_BYTES_MAX = 64 * 1024
"""Maximum bytes buffered for a connection before its HELLO, and therefore the maximum size of
HELLO. It bounds the memory that an unauthenticated peer can use."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one daemon, sent in the answer to HELLO. Each name ends in its unit."""

    frame_bytes_max: int = 4 * 1024 * 1024
    """Maximum encoded bytes of a frame from the client. Deliveries and the answers to LOOKUP, LIST
    and DEAD_LIST obey it as well, except for a task that was enqueued under a higher limit. STATS
    with very many topics is larger: a client should accept 64 MiB."""
    body_bytes_max: int = 1024 * 1024
    """Maximum bytes of a body."""
    task_bytes_max: int = 1024 * 1024 + 64 * 1024
    """Maximum bytes of a task: body, key, tag, names and values of its properties (text in UTF-8),
    and about 8 bytes for each of them."""
    property_value_bytes_max: int = 4096
    """Maximum bytes of a property's value, in UTF-8."""
    tasks_per_frame_max: int = 16_384
    """Maximum tasks in an ENQUEUE or ONEWAY; at least 1."""
    ids_per_frame_max: int = 16_384
    """Maximum ids, receipts or pairs in a request."""
    delay_ms_max: int = 315_576_000_000
    """Maximum milliseconds from now to a due time; also the longest ttl."""
    within_ms_max: int = 86_400_000
    """Longest due window."""
    window_max: int = 1024
    """Maximum ENQUEUE requests of a session, counted from its floor."""
    pull_max: int = 1024
    """Maximum value of `max` in PULL."""
    topic_length_max: int = 255
    """Characters of a topic's name."""
    group_length_max: int = 255
    """Characters of a group's name."""
    key_length_max: int = 255
    """Characters of a key, of a tag, and of a property's name."""
    key_tasks_max: int = KEY_TASKS_MAX
    """Maximum tasks that a command by key can affect, or that can have the keys of an ENQUEUE with
    rules; a request that exceeds it changes nothing."""
    coalesced_tasks_max: int = COALESCED_TASKS_MAX
    """Maximum tasks in an ENQUEUE that have a rule for a pending key."""
    paused_keys_max: int = PAUSED_KEYS_MAX
    """Maximum paused keys of a group: order keys and `fair_by` values together."""
    properties_max: int = 64
    """Maximum properties of a task."""
    prefetch_max: int = 65_535
    """Maximum `prefetch` of a subscription."""
    lease_ms_min: int = 100
    """Shortest lease."""
    lease_ms_max: int = 12 * 3600 * 1000
    """Longest lease; also the longest `wait_ms` of PULL."""
    subscriptions_max: int = 1024
    """Maximum subscriptions of a connection."""
    pulls_max: int = 1024
    """Maximum unanswered PULLs of a connection; further PULLs get `overloaded`."""
    connections_max: int = 4096
    """Maximum connections of the daemon; lower when it has too few file descriptors."""

    def to_wire(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_wire(cls, value: object) -> Limits:
        """Return the limits in HELLO's map. Unknown names, from a newer daemon, are ignored;
        missing names get their defaults. Raise ProtocolError for an invalid map."""
        if not isinstance(value, Mapping):
            raise ProtocolError("the answer to HELLO has no map of limits")
        limits: dict[str, int] = {}
        for field in fields(cls):
            limit = value.get(field.name, field.default)
            if type(limit) is not int or limit < 0:
                raise ProtocolError(
                    f"limit {field.name} must be a non-negative whole number, not {shown(limit)}"
                )
            limits[field.name] = limit
        return cls(**limits)


DELAY_LEVELS = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
"""Default delays of levels 1, 2, …"""
DELAY_LEVELS_MAX = 256
"""Maximum levels of a daemon."""
_UNITS_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_LEVEL = re.compile(r"([0-9]{1,9})([smhd])")


def parse_delay_levels(text: str) -> tuple[int, ...]:
    """Return the delays, in ms, in a text like ``DELAY_LEVELS``. Raise ValueError for an invalid
    text."""
    words = text.split()
    if not 0 < len(words) <= DELAY_LEVELS_MAX:
        raise ValueError(
            f"the number of delay levels must be between 1 and {DELAY_LEVELS_MAX}, not {len(words)}"
        )
    levels_ms: list[int] = []
    for number, word in enumerate(words, 1):
        match = _LEVEL.fullmatch(word)
        if match is None:
            raise ValueError(
                f"level {number} must be a whole number followed by s, m, h or d, not {shown(word)}"
            )
        levels_ms.append(int(match[1]) * _UNITS_MS[match[2]])
    return tuple(levels_ms)


def delay_of_level(levels_ms: Sequence[int], level: int) -> int:
    """Return the delay, in ms, of ``level``, counted from 1. Higher levels have the delay of the
    highest level."""
    return levels_ms[min(level, len(levels_ms)) - 1]


def levels_of_wire(value: object) -> Sequence[int]:
    """Return HELLO's delay levels, in ms. Raise ProtocolError for an invalid value."""
    if not isinstance(value, Sequence) or not value or set(map(type, value)) != {int}:
        raise ProtocolError(
            f"HELLO's delay levels must be a non-empty array of whole numbers, not {shown(value)}"
        )
    return value
