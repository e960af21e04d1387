"""Frames made from the daemon's declarations.

Every type, field and declared option has a place, and each place in turn gets another value."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from support.frame_samples import SAMPLES
from support.odd_values import Way, places, put
from tickwheel.api.frames import FrameType as T
from tickwheel.api.verbs import VERBS
from tickwheel.errors import BadRequest
from tickwheel.limits import Limits
from tickwheel.server.shard import new_tasks
from tickwheel.server.shard.callers import Caller, NullSink
from tickwheel.server.tcp.listener import command_table

SILENT = (T.ONEWAY, T.ALIVE)
"""Frames that are answered only if they are invalid, with request 0."""
PATIENT = (T.PULL,)
"""Frames that are answered when there is something to report."""
_LEAVES = (T.HELLO, T.BYE)
_UNKNOWN = "no such option"
Fields = tuple[Any, ...]


def bases() -> list[tuple[T, Fields]]:
    """Return the fields after the request number of valid client frames."""
    rows = [(kind, SAMPLES[kind][1:]) for kind in T if kind < T.OK and kind not in _LEAVES]
    words = [verb.word for verb in VERBS.values() if verb.frame is T.SCHEDULE]
    rows += [(T.SCHEDULE, ("daily", word, {})) for word in words if word != "show"]
    whole = dict.fromkeys(new_tasks._OPTIONS_AND_RULE)
    return [*rows, (T.ENQUEUE, (0, (("t", b"", 0, whole),)))]


def _declared(kind: T, fields: Fields, way: Way) -> list[str]:
    """Return the declared option names of the map at `way`."""
    operations: Any = _Operations()
    handler = command_table(operations, operations).handlers[int(kind)]
    asked = put(fields, way, {_UNKNOWN: 1})
    try:
        handler(_PEER, (int(kind), 1, *asked), None)  # type: ignore[arg-type]  # none looks at it
    except BadRequest as error:
        match = re.search(r"known: (.+)", error.message)
        if _UNKNOWN in error.message and match is not None:
            return match[1].split(", ")
    return []


class _Operations:
    """Accept everything that passes the handler."""

    plain_tasks = (), 0, 0, 0
    limits = Limits()

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **named: None


_PEER: Any = SimpleNamespace(caller=Caller(NullSink()), send=None)


def all_places() -> Iterator[tuple[T, Fields, Way]]:
    """Return every place inside each base, and every possible option."""
    for kind, fields in bases():
        yield from ((kind, fields, way) for way in places(fields) if way)
        for at in range(len(fields)):
            names = _declared(kind, fields, (at,))
            if names:
                given = fields[at] if isinstance(fields[at], dict) else {}
                whole = put(fields, (at,), given)
                yield from ((kind, whole, (at, name)) for name in names if name not in given)
