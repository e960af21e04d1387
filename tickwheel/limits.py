"""What one daemon accepts: the limits that its operations enforce and every transport announces,
and the delay levels that a task may name instead of a delay."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from tickwheel.errors import ProtocolError, shown

SHARDS_MAX = 64
"""Of one store."""
NODES_MAX = 256
"""Nodes that share one store, those without shards among them."""
ID_MAX = 2**63 - 1
"""Of a task."""
KEY_TASKS_MAX = 10_000
COALESCED_TASKS_MAX = 1_024
ENCODING_STEPS_MAX = 2
"""What may have been done to one body: compressed and encrypted, say."""
PAUSED_KEYS_MAX = 256
HELLO_BYTES_MAX = 64 * 1024
"""Bytes of a connection before its HELLO, and so of that: strangers may not make the daemon keep
more."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one daemon accepts; sent whole in HELLO's reply. Every field's last word is its unit."""

    frame_bytes_max: int = 4 * 1024 * 1024
    """One frame from the client, as encoded. So are deliveries and what LOOKUP, LIST and DEAD_LIST
    answer, but for a task that was enqueued when the limit was higher; STATS with very many topics
    is larger: a client should take 64 MiB."""
    body_bytes_max: int = 1024 * 1024
    """One body."""
    task_bytes_max: int = 1024 * 1024 + 64 * 1024
    """A task as a whole: body, key, tag, names and values of its properties (text in UTF-8), and
    about 8 bytes around each of them."""
    property_value_bytes_max: int = 4096
    """The text of one property, in UTF-8."""
    tasks_per_frame_max: int = 16_384
    """Tasks of one ENQUEUE or ONEWAY; at least 1."""
    ids_per_frame_max: int = 16_384
    """Ids, receipts or pairs of one request."""
    delay_ms_max: int = 315_576_000_000
    """From now to a due time; also the longest ttl."""
    within_ms_max: int = 86_400_000
    """Longest due window."""
    window_max: int = 1024
    """ENQUEUE requests of a session, from its floor up."""
    pull_max: int = 1024
    """`max` of PULL."""
    topic_length_max: int = 255
    """Characters of a topic's name."""
    group_length_max: int = 255
    """Characters of a group's name."""
    key_length_max: int = 255
    """Characters of a key, of a tag, and of a property's name."""
    key_tasks_max: int = KEY_TASKS_MAX
    """Tasks that one command by key is about, or that have the keys of one ENQUEUE with rules; with
    more of them it does nothing."""
    coalesced_tasks_max: int = COALESCED_TASKS_MAX
    """Tasks of one ENQUEUE that have a rule for a pending key."""
    paused_keys_max: int = PAUSED_KEYS_MAX
    """Keys of one group that are paused at a time: order keys and values that share it."""
    properties_max: int = 64
    """Properties of one task."""
    prefetch_max: int = 65_535
    """`prefetch` of a subscription."""
    lease_ms_min: int = 100
    """Shortest lease."""
    lease_ms_max: int = 12 * 3600 * 1000
    """Longest lease; also the longest `wait_ms` of PULL."""
    subscriptions_max: int = 1024
    """Subscriptions of one connection."""
    pulls_max: int = 1024
    """PULLs of one connection that wait for their answer; one more is `overloaded`."""
    connections_max: int = 4096
    """Connections of the daemon; fewer when its descriptors do not suffice."""

    def to_wire(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_wire(cls, value: object) -> Limits:
        """Read HELLO's map. Unknown names are ignored (a newer daemon), missing ones default."""
        if not isinstance(value, Mapping):
            raise ProtocolError("HELLO's reply has no map of limits")
        known: dict[str, int] = {}
        for field in fields(cls):
            given = value.get(field.name, field.default)
            if type(given) is not int or given < 0:
                raise ProtocolError(f"limit {field.name} is not a whole number: {shown(given)}")
            known[field.name] = given
        return cls(**known)


DELAY_LEVELS = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
"""The delays of level 1, 2, …, unless the daemon's settings say otherwise."""
DELAY_LEVELS_MAX = 256
"""Levels of one daemon."""
_UNITS_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_LEVEL = re.compile(r"([0-9]{1,9})([smhd])")


def parse_delay_levels(text: str) -> tuple[int, ...]:
    """The delays in ms of a text like ``DELAY_LEVELS``. Raises ValueError naming what is wrong."""
    words = text.split()
    if not 0 < len(words) <= DELAY_LEVELS_MAX:
        raise ValueError(f"{len(words)} delay levels; 1 to {DELAY_LEVELS_MAX} are needed")
    levels_ms: list[int] = []
    for number, word in enumerate(words, 1):
        found = _LEVEL.fullmatch(word)
        if found is None:
            raise ValueError(
                f"level {number} is {shown(word)}; write a whole number and s, m, h or d"
            )
        levels_ms.append(int(found[1]) * _UNITS_MS[found[2]])
    return tuple(levels_ms)


def delay_of_level(levels_ms: Sequence[int], level: int) -> int:
    """The delay in ms of ``level``, 1 or more; over the highest it is the highest's."""
    return levels_ms[min(level, len(levels_ms)) - 1]


def levels_of_wire(value: object) -> Sequence[int]:
    """Read HELLO's delay levels. Raises ProtocolError."""
    if not isinstance(value, Sequence) or not value or set(map(type, value)) != {int}:
        raise ProtocolError(f"HELLO's delay levels are {shown(value)}")
    return value
