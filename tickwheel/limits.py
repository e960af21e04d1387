"""What one daemon accepts: the limits that its operations enforce and every transport announces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from tickwheel.errors import ProtocolError, shown

ID_MAX = 2**63 - 1
"""Of a task."""
KEY_TASKS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Limits:
    """What one daemon accepts; sent whole in HELLO's reply. Every field's last word is its unit."""

    frame_bytes_max: int = 4 * 1024 * 1024
    """One frame, either direction, as encoded."""
    body_bytes_max: int = 1024 * 1024
    task_bytes_max: int = 1024 * 1024 + 64 * 1024
    """A task as a whole: body, key, tag, properties and what they take around them."""
    property_value_bytes_max: int = 4096
    """A property's text, in UTF-8."""
    tasks_per_frame_max: int = 16_384
    ids_per_frame_max: int = 16_384
    delay_ms_max: int = 315_576_000_000
    """Longest time from now to a task's due time, ten years; also the longest ttl."""
    window_max: int = 1024
    """ENQUEUE requests of a session from its floor up, answered or not."""
    pull_max: int = 1024
    """Deliveries of one PULL."""
    topic_length_max: int = 255
    group_length_max: int = 255
    key_length_max: int = 255
    """Characters of a key, of a tag, and of a property's name."""
    key_tasks_max: int = KEY_TASKS_MAX
    """Tasks that a command by key may be about."""
    properties_max: int = 64
    prefetch_max: int = 65_535
    lease_ms_min: int = 100
    lease_ms_max: int = 12 * 3600 * 1000
    subscriptions_max: int = 1024
    """Subscriptions of one connection."""
    pulls_max: int = 1024
    """PULLs of one connection that wait."""
    connections_max: int = 4096

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
                raise ProtocolError(f"limit {field.name} is no whole number: {shown(given)}")
            known[field.name] = given
        return cls(**known)
