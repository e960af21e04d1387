"""What a subscription was asked to be: checked here, sent again after every reconnect. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tickwheel.client.retry import Retry, policy_wire
from tickwheel.client.times import shown
from tickwheel.errors import BadRequest

MANUAL, ON_DELIVERY = "manual", "on_delivery"
GROUP_DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Wish:
    """One subscription's options."""

    topic: str
    group: str
    """Empty for a broadcast."""
    lease_ms: int | None = None
    retry: Retry | None = None
    ack: str = MANUAL
    auto_ack: bool = False
    broadcast: bool = False

    @property
    def leased(self) -> bool:
        """Whether its deliveries have leases, and are to be acked."""
        return self.ack == MANUAL and not self.broadcast

    def fields(self, number: int, prefetch: int) -> tuple[Any, ...]:
        """Of the SUBSCRIBE frame."""
        options: dict[str, Any] = {}
        if self.lease_ms is not None:
            options["lease_ms"] = self.lease_ms
        if self.retry is not None:
            options["retry"] = self.retry.to_wire()
        if self.ack != MANUAL:
            options["ack"] = self.ack
        if self.broadcast:
            options["broadcast"] = True
        return number, self.topic, self.group or None, prefetch, options


def wish(
    topic: str,
    group: str,
    *,
    lease_ms: int | None,
    retry: Retry | None,
    ack: str,
    auto_ack: bool,
    broadcast: bool,
) -> Wish:
    """Checked. Raises BadRequest naming what does not go together."""
    if ack not in (MANUAL, ON_DELIVERY):
        raise BadRequest(f"ack must be {MANUAL!r} or {ON_DELIVERY!r}, not {shown(ack)}")
    for field, value in (("auto_ack", auto_ack), ("broadcast", broadcast)):
        if not isinstance(value, bool):
            raise BadRequest(f"{field} must be True or False, not {shown(value)}")
    if retry is not None:
        policy_wire(retry, "retry")
    kind = "broadcast" if broadcast else f"ack={ack!r}"
    if broadcast or ack != MANUAL:
        given = [
            name
            for name, is_given in (
                ("group", broadcast and group not in ("", GROUP_DEFAULT)),
                ("retry", retry is not None),
                ("lease", lease_ms is not None),
                ("auto_ack", auto_ack),
            )
            if is_given
        ]
        if given:
            raise BadRequest(f"{given[0]} has no meaning with {kind}: nothing is delivered again")
    return Wish(topic, "" if broadcast else group, lease_ms, retry, ack, auto_ack, broadcast)
