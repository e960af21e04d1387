"""Commands as bytes. Both libraries' own ways take three times as long."""

from __future__ import annotations

import hiredis

from tickwheel.persistence.redis.drivers import Argument


def pack(args: tuple[Argument, ...]) -> bytes:
    """One command in the protocol of Redis."""
    packed: bytes = hiredis.pack_command(args)  # type: ignore[arg-type]  # its tuple is too narrow
    return packed
