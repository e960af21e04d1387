"""The log of what operators did: who, when, what it named, how it ended; one JSON object a line.

``AuditLog`` is the file. ``Audited`` stands in the place of a principal's operations, outside of
what checks its rights, so that what is refused is in the log as well; both transports call through
it. Where there is no log, it is not there either.

Invariants:

* A line is written before its answer is given: who was answered is in the log.
* Only what ``NAMED`` lists is taken from a request, each of it cut to a length: never a body, a
  property, a token.
* A log that cannot be written stops nothing; that is said once, and shown by a metric.
"""

from __future__ import annotations

import inspect
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Sized
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tickwheel.errors import TickwheelError, shown
from tickwheel.server.shard.access import RIGHTS, Right

if TYPE_CHECKING:
    from tickwheel.clock import Clock
    from tickwheel.engine.sessions import StoredAnswer
    from tickwheel.server.metrics.observed import Observed
    from tickwheel.server.shard.border import OnEvent
    from tickwheel.server.shard.callers import Caller
    from tickwheel.server.shard.operations import Operations

TEXT_LENGTH_MAX: Final = 255
IDS_MAX: Final = 10
"""Of one line; of more it says how many there are."""
COMMANDS = frozenset(
    ("cancel", "reschedule", "run_now", "cancel_key", "reschedule_key", "run_now_key")
)
"""Beside what needs the right to operate, or to administer."""
AUDITED = frozenset(
    name
    for name, need in RIGHTS.items()
    if name in COMMANDS or (need is not None and need.right in (Right.OPERATE, Right.ADMIN))
)
NAMED = frozenset(
    (
        "topic",
        "group",
        "key",
        "name",
        "path",
        "force",
        "paused",
        "delay_ms",
        "due_ms",
        "settings",
        "kind",
        "job",
    )
)
_IDS = ("ids", "pairs", "items")
_OF_JOBS = (
    "id", "tags", "where", "key_prefix", "due_from_ms", "due_to_ms", "state", "group", "reason",
    "delay_ms", "due_ms", "shift_ms", "rate",
)  # fmt: skip
"""Of the options of a job, which has a ``kind``."""


class AuditLog:
    """``write`` a line; the file is opened with the first one."""

    def __init__(
        self, path: str, bytes_max: int, clock: Clock, on_event: OnEvent, observed: Observed
    ) -> None:
        self._path = Path(path)
        self._bytes_max = bytes_max
        self._clock = clock
        self._on_event = on_event
        self._observed = observed
        self._fd: int | None = None
        self._bytes = 0

    def write(self, fields: Mapping[str, object]) -> None:
        """With the time before it."""
        now_s = self._clock.read().now_ms / 1000
        at = datetime.fromtimestamp(now_s, UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"at": at, **fields}, ensure_ascii=True).encode() + b"\n"
        observed = self._observed
        try:
            self._append(line)
        except OSError as error:
            if observed.audit_ok:
                self._on_event("audit_unwritable", f"{self._path}: {error.strerror}")
            observed.audit_ok = False
            self.close()
            return
        observed.audit_ok = True

    def _append(self, line: bytes) -> None:
        if self._fd is not None and self._bytes + len(line) > self._bytes_max:
            self.close()
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        if self._fd is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(self._path, flags, 0o600)
            self._bytes = os.fstat(self._fd).st_size
            if self._bytes and self._bytes + len(line) > self._bytes_max:
                self._append(line)
                return
        self._bytes += os.write(self._fd, line)

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


class Audited:
    """In the place of a principal's operations: those in ``AUDITED`` leave a line."""

    def __init__(self, operations: Operations, guarded: Operations, log: AuditLog) -> None:
        """``operations`` without their guard say what the parameters are called."""
        self._guarded = guarded
        self._log = log
        for name in vars(operations):
            if not name.startswith("_") and name != "shard":
                setattr(self, name, getattr(guarded, name))
        for name in AUDITED:
            parameters = list(inspect.signature(getattr(operations, name)).parameters)[2:]
            setattr(self, name, self._audited(name, parameters, getattr(guarded, name)))

    def __getattr__(self, name: str) -> Any:
        """What is no operation of its own: facts of the class, and what no table has."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._guarded, name)

    def _audited(
        self, name: str, parameters: Sequence[str], operation: Callable[..., Any]
    ) -> Callable[..., Any]:
        log = self._log

        def audited(caller: Caller, request: int, *args: Any, **named: Any) -> None:
            given = {**dict(zip(parameters, args, strict=False)), **named}
            line = {
                "who": caller.principal.name or "anonymous",
                **({"token": caller.principal.token_id} if caller.principal.token_id else {}),
                "from": caller.address,
                "client": caller.name[:TEXT_LENGTH_MAX],
                "operation": name,
                "named": _named(given),
            }

            def ended(outcome: str, counts: dict[str, int] | None = None) -> None:
                log.write({**line, "outcome": outcome, **({"counts": counts} if counts else {})})

            try:
                operation(_Asking(caller, ended), request, *args, **named)
            except TickwheelError as error:
                ended(error.code)
                raise

        return audited


class _Asking:
    """The caller during one request: its answer is seen on its way."""

    def __init__(self, caller: Caller, ended: Callable[..., None]) -> None:
        self._caller = caller
        self.replies = _Replies(caller, ended)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._caller, name)

    def __hash__(self) -> int:
        return hash(self._caller)

    def __eq__(self, other: object) -> bool:
        """What waits for its turn is found by its caller when that is gone."""
        return (other._caller if isinstance(other, _Asking) else other) is self._caller

    def answer(self, request: int, value: object) -> None:
        self.replies.give(self.replies.answer_to(request, value))
        self.replies.flush()

    def refuse(self, request: int, error: TickwheelError) -> None:
        self.replies.error(request, error.code, error.message)
        self.replies.flush()


class _Replies:
    """A ``ReplySink`` before the caller's own, whatever that is by then."""

    def __init__(self, caller: Caller, ended: Callable[..., None]) -> None:
        self._caller = caller
        self._own = caller.replies
        self._ended = ended
        self._counts: dict[str, int] | None = None

    def __hash__(self) -> int:
        return hash(self._own)

    def __eq__(self, other: object) -> bool:
        """What waits for the store counts as the caller's."""
        return (other._own if isinstance(other, _Replies) else other) is self._own

    @property
    def label(self) -> str:
        return self._caller.replies.label

    def accepted(self, answers: Sequence[StoredAnswer]) -> None:
        self._caller.replies.accepted(answers)

    def answer_to(self, request: int, value: object) -> Sized:
        self._counts = _counts(value)
        return self._caller.replies.answer_to(request, value)

    def give(self, answer: Sized) -> None:
        self._ended("ok", self._counts)
        self._caller.replies.give(answer)

    def error(self, request: int, code: str, message: str) -> None:
        self._ended(code)
        self._caller.replies.error(request, code, message)

    def flush(self) -> None:
        self._caller.replies.flush()


def _counts(value: object) -> dict[str, int] | None:
    """Of an answer with a word for each id: how many of each."""
    if not isinstance(value, (tuple, list)):
        return None
    words = [one[0] if isinstance(one, (tuple, list)) and one else one for one in value]
    return dict(Counter(word for word in words if isinstance(word, str))) or None


def _named(given: Mapping[str, Any]) -> dict[str, object]:
    found: dict[str, object] = {name: _short(given[name]) for name in NAMED & given.keys()}
    options = given.get("options") if "kind" in given else None
    if isinstance(options, dict):
        found |= {name: _short(options[name]) for name in _OF_JOBS if name in options}
    for name in _IDS:
        many = given.get(name)
        if isinstance(many, (tuple, list)):
            ids = [one[0] if isinstance(one, (tuple, list)) and one else one for one in many]
            found["ids"] = [str(_short(one)) for one in ids[:IDS_MAX]]
            found["count"] = len(ids)
    return {name: found[name] for name in sorted(found) if found[name] is not None}


def _short(value: object) -> object:
    if isinstance(value, str):
        return value[:TEXT_LENGTH_MAX]
    if value is None or type(value) in (bool, int, float):
        return value
    return shown(value)
