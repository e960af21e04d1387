"""A batch made ready to be sent, encoded once."""

from __future__ import annotations

from typing import NamedTuple

from tickwheel.model.effects import Effects
from tickwheel.persistence.redis.ahead import Ahead
from tickwheel.persistence.redis.drivers import Packed
from tickwheel.persistence.redis.encode import Records, operations, packed, parts, records_of


class Prepared(NamedTuple):
    """What goes to Redis, and the records in it, which the mirror keeps when it has landed."""

    records: Records
    flat: list[Packed]
    """The arguments of each script."""
    size_bytes: int


def prepare(effects: Effects, endings_max: int, ahead: Ahead | None = None) -> Prepared:
    """``ahead`` may have begun already."""
    new = (ahead or Ahead()).finish(effects.enqueued)
    records = records_of(effects, endings_max, new.records, new.records_bytes)
    rest = packed(operations(effects, endings_max, records))
    return Prepared(records, *parts([*new.operations, *rest]))
