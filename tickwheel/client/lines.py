"""What a group says of order keys and fair shares, as it is sent. The daemon checks its bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from tickwheel.client.times import Duration, duration_ms
from tickwheel.client.words import OrderFailure
from tickwheel.errors import BadRequest, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """``order_retry``: after so long a failed task of an order key is tried again (1 s).
    ``order_failure``: what becomes of it after ``order_attempts`` failed ones (16): its key is held
    until an operator acts ("hold", which is the default), or it goes to the dead letters ("dead").
    "retry": it is tried until it succeeds.
    ``fair_by``: what has equal turns ("key", "tag", a property's name), each value of it with at
    most ``limit_each`` deliveries in flight and ``rate_each`` a second."""

    order_retry: Duration | None = None
    order_attempts: int | None = None
    order_failure: OrderFailure | None = None
    fair_by: str | None = None
    limit_each: int | None = None
    rate_each: float | None = None

    def to_wire(self) -> dict[str, Any]:
        """What is given of it. Raises BadRequest naming what is of the wrong type."""
        found: dict[str, Any] = {}
        if self.order_retry is not None:
            found["order_retry_ms"] = duration_ms(self.order_retry, "order_retry")
        for name, kinds in _KINDS.items():
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise BadRequest(f"{name} must be {_WORDS[kinds]}, not {shown(value)}")
            found[name] = value
        return found


_INTEGER, _TEXT, _NUMBER = (int,), (str,), (int, float)
_WORDS = {_INTEGER: "an integer", _TEXT: "a str", _NUMBER: "a number"}
_KINDS: dict[str, tuple[type, ...]] = {
    "order_attempts": _INTEGER, "order_failure": _TEXT, "fair_by": _TEXT,
    "limit_each": _INTEGER, "rate_each": _NUMBER,
}  # fmt: skip
LINE_NAMES = ("order_retry_ms", *_KINDS)
"""As the wire has them."""
NO_LINES: Final = Lines()


def changed_lines(named: dict[str, Any]) -> dict[str, Any]:
    """Of a change of settings: what is named is sent, also that it is to be taken away."""
    wire = Lines(**named).to_wire()
    for name, value in named.items():
        if value is None:
            wire["order_retry_ms" if name == "order_retry" else name] = None
    return wire
