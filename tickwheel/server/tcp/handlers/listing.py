"""LIST, STATS, DEAD_LIST, BACKUP and PING: what is there, page by page."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tickwheel.clock import Now
from tickwheel.engine.tasks import Known
from tickwheel.errors import (
    BadRequest,
    Conflict,
    LimitExceeded,
    Overloaded,
    Refused,
    TickwheelError,
)
from tickwheel.model.records import DeadRow, id_floor, task_bytes
from tickwheel.model.states import State
from tickwheel.persistence.contract import StoreBusy, StoreError
from tickwheel.protocol.codec import encode
from tickwheel.protocol.frames import ID_MAX, FrameType
from tickwheel.server.shard.listings import Listings
from tickwheel.server.shard.shard import Shell
from tickwheel.server.shard.stats import stats_map
from tickwheel.server.tcp import decode as checks
from tickwheel.server.tcp.connection import Connection
from tickwheel.server.tcp.encode import dead_map, fitting

PAGE_MAX = 1000
PAGE_DEFAULT = 100
SCANNED_PER_REQUEST_MAX, BYTES_PER_REQUEST_MAX = 20_000, 256 << 20
"""A filter that matches little ends its page here; ``next`` says where to go on."""
STEP_FIRST, STEP_BYTES = 100, 16 << 20
"""Rows are read with their bodies: a few at first, then as many as have about so many bytes."""
KEY_LENGTH_MAX = 255
LISTING_LIMITS = ("listings_max", "listings_all_max")
BACKUP_LIMITS = ("backups_max", "backups_max")
BACKUP_NAME_BYTES_MAX = 200
"""File systems count bytes, usually to 255; a copy that is not complete has a longer name."""
_TASK_OPTIONS = ("topic", "state", "key", "until_ms", "newest", "after", "limit")
_DEAD_OPTIONS = ("topic", "group", "after", "limit", "since_ms", "until_ms", "reason")
_LIVE = (State.SCHEDULED, State.READY, State.IN_FLIGHT, State.WAITING, State.DEAD)


class Listing:
    """Reads that may take a while, each in a task of its own."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    def ping(self, peer: Connection, frame: tuple[Any, ...], now: Now) -> None:
        """Says that the daemon is there, nothing of tasks: it does not wait for the store."""
        checks.arity(frame, 0, "none")
        request = checks.request_number(frame[1])
        peer.send(encode((int(FrameType.OK), request, None)))

    def alive(self, peer: Connection, frame: tuple[Any, ...], now: Now) -> None:
        """The answer to HEARTBEAT: that it came is all that counts, and was noted."""
        checks.arity(frame, 0, "none")

    def stats(self, peer: Connection, frame: tuple[Any, ...], now: Now) -> None:
        checks.arity(frame, 0, "none")
        request, shell = checks.request_number(frame[1]), self._shell
        if shell.loaded.is_set():
            peer.ok(request, stats_map(shell, now))
        else:  # counts are true or not told
            self._answer(peer, request, self._stats_when_loaded)

    async def _stats_when_loaded(self) -> dict[str, Any]:
        return stats_map(self._shell, self._shell.clock.read())

    def status(self, peer: Connection, frame: tuple[Any, ...], now: Now) -> None:
        """Like PING it does not wait for the store."""
        checks.arity(frame, 0, "none")
        request = checks.request_number(frame[1])
        peer.send(encode((int(FrameType.OK), request, self._shell.status())))

    def tasks(self, peer: Connection, frame: tuple[Any, ...], now: Now) -> None:
        checks.arity(frame, 1, "options")
        request = checks.request_number(frame[1])
        options = checks.options(frame[2], _TASK_OPTIONS)
        wanted = _Wanted.of(options)
        limit = checks.integer(options.get("limit", PAGE_DEFAULT), "limit", 1, PAGE_MAX)
        self._answer(peer, request, lambda: self._page(wanted, limit))

    async def _page(self, wanted: _Wanted, limit: int) -> dict[str, Any]:
        shell = self._shell
        bytes_left = bytes_max = shell.limits.frame_bytes_max // 2
        found: list[dict[str, Any]] = []
        scanned = scanned_bytes = 0
        position, step = wanted.start_id, STEP_FIRST
        while True:
            # What matches little is looked for in large steps, however few are asked for.
            step = min(step, PAGE_MAX if wanted.is_selective else limit - len(found))
            page, following = await shell.reader.scan(
                position, step, wanted.store_topic, back=wanted.newest
            )
            page_bytes = sum(task_bytes(known.row) for known in page)
            for known in page:
                if known.row.id >= wanted.end_id and not wanted.newest:
                    return {"tasks": found, "next": None}
                if len(found) >= limit:
                    return {"tasks": found, "next": position}
                if wanted.fits(known) and (
                    wanted.state is None or shell.engine.control.state(known) == wanted.state
                ):
                    told, size = fitting(shell.describe(known), bytes_max)
                    if found and size > bytes_left:
                        return {"tasks": found, "next": position}
                    found.append(told)
                    bytes_left -= size
                position = known.row.id
            if following is None:
                return {"tasks": found, "next": None}
            position = following
            scanned += step
            scanned_bytes += page_bytes
            is_much = scanned >= SCANNED_PER_REQUEST_MAX or scanned_bytes >= BYTES_PER_REQUEST_MAX
            if len(found) >= limit or is_much:
                return {"tasks": found, "next": position}
            step = min(4 * step, 1 + step * STEP_BYTES // (page_bytes + 1))
            step = min(step, SCANNED_PER_REQUEST_MAX - scanned)

    def dead(self, peer: Connection, frame: tuple[Any, ...], now: Now) -> None:
        checks.arity(frame, 1, "options")
        request = checks.request_number(frame[1])
        options = checks.options(frame[2], _DEAD_OPTIONS)
        topic, group = options.get("topic"), options.get("group")
        for value, field in ((topic, "topic"), (group, "group")):
            if value is not None:
                checks.name(value, field)
        limit = checks.integer(options.get("limit", PAGE_DEFAULT), "limit", 1, PAGE_MAX)
        after = options.get("after")
        if after is None:
            after = (0, "")
        elif type(after) is not tuple or len(after) != 2:
            checks.wrong("after", "[id, group]", after)
        checks.integer(after[0], "after[0]", 0, ID_MAX)
        checks.text(after[1], "after[1]", 255)
        since_ms = checks.integer(options.get("since_ms", 0), "since_ms", 0, ID_MAX)
        until_ms = checks.integer(options.get("until_ms", ID_MAX), "until_ms", 0, ID_MAX)
        reason = checks.text(options.get("reason", ""), "reason", 255).casefold()

        def wanted(row: DeadRow) -> bool:
            return since_ms <= row.died_ms <= until_ms and reason in row.reason.casefold()

        page = partial(self._dead_page, after, limit, topic, group, wanted)
        self._answer(peer, request, page)

    async def _dead_page(
        self,
        after: tuple[int, str],
        limit: int,
        topic: str | None,
        group: str | None,
        wanted: Callable[[DeadRow], bool],
    ) -> dict[str, Any]:
        await self._shell.committer.barrier()
        found: list[dict[str, Any]] = []
        scanned, bytes_left = 0, self._shell.limits.frame_bytes_max // 2
        while True:
            rows = await self._shell.store.scan_dead(after, PAGE_MAX, topic, group)
            for row in rows:
                if len(found) >= limit:
                    return {"dead": found, "next": after}
                if wanted(row):
                    told = dead_map(row)
                    bytes_left -= len(encode(told))
                    if found and bytes_left < 0:
                        return {"dead": found, "next": after}
                    found.append(told)
                after = row.id, row.group
            scanned += len(rows)
            if len(rows) < PAGE_MAX:
                return {"dead": found, "next": None}
            if len(found) >= limit or scanned >= SCANNED_PER_REQUEST_MAX:
                return {"dead": found, "next": after}

    def backup(self, peer: Connection, frame: tuple[Any, ...], now: Now) -> None:
        checks.arity(frame, 1, "name")
        request = checks.request_number(frame[1])
        name = checks.text(frame[2], "name", 255)
        if not name or name in (".", "..") or Path(name).name != name or "\0" in name:
            raise BadRequest(f"name must be a file name without a folder, not {checks.shown(name)}")
        size_bytes = len(os.fsencode(name))
        if size_bytes > BACKUP_NAME_BYTES_MAX:
            raise LimitExceeded(
                f"name has {size_bytes} bytes; the limit is {BACKUP_NAME_BYTES_MAX}"
            )
        path = self._shell.backup_folder() / name
        self._answer(peer, request, lambda: self._backup(path), self._shell.backups, BACKUP_LIMITS)

    async def _backup(self, path: Path) -> dict[str, Any]:
        """What the file system says of a client's name is an answer, never the daemon's end."""
        await self._shell.committer.barrier()
        try:
            if os.path.lexists(path):
                raise Conflict(f"{path} exists; choose another name")
            size = await self._shell.store.backup(str(path))
        except OSError as error:
            kind = Overloaded if error.errno in (errno.EMFILE, errno.ENFILE) else Conflict
            raise kind(f"cannot write {path}: {error.strerror}") from error
        return {"path": str(path), "bytes": size}

    def _answer(
        self,
        peer: Connection,
        request: int,
        work: Callable[[], Coroutine[Any, Any, dict[str, Any]]],
        line: Listings | None = None,
        limits: tuple[str, str] = LISTING_LIMITS,
    ) -> None:
        """Do ``work`` beside everything else when its turn comes, then answer."""

        async def run() -> None:
            try:
                await self._shell.loaded.wait()
                result = await work()
            except TickwheelError as error:
                if self._shell.is_fatal(error):
                    raise
                if isinstance(error, StoreBusy):
                    error = Overloaded(error.message)
                elif isinstance(error, StoreError):
                    error = Refused(f"the store could not do it: {error.message}")
                peer.refuse(request, error)
            except Exception as error:
                # It only reads: nothing is half done.
                self._shell.acting = False
                peer.refuse(request, self._shell.contain(f"a look-up of {peer.peer}", error))
            else:
                peer.ok(request, result)

        (line or self._shell.listings).put(peer, run, limits)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a LIST asks for."""

    topic: str | None
    state: str | None
    key: str | None
    newest: bool
    start_id: int
    """To go on after; below, when the newest come first."""
    end_id: int
    """No id from here on was enqueued in time."""

    @classmethod
    def of(cls, options: dict[str, Any]) -> _Wanted:
        """Raises BadRequest, LimitExceeded."""
        topic, state, key = (options.get(name) for name in ("topic", "state", "key"))
        if topic is not None:
            checks.name(topic, "topic")
        if state is not None and state not in _LIVE:
            known = ", ".join(_LIVE)
            raise BadRequest(f"state must be one of {known}, not {checks.shown(state)}")
        if key is not None and not checks.text(key, "key", KEY_LENGTH_MAX):
            raise BadRequest("key must be a string of 1 to 255 characters, not ''")
        newest = options.get("newest", False)
        if type(newest) is not bool:
            checks.wrong("newest", "true or false", newest)
        until_ms = checks.integer(options.get("until_ms", ID_MAX), "until_ms", 0, ID_MAX)
        # An id says when it was assigned, so a time is a place among the ids.
        end_id = min(max(0, id_floor(until_ms + 1, 0)), ID_MAX + 1)
        after_id = options.get("after")
        if after_id is not None:
            checks.integer(after_id, "after", 0, ID_MAX)
        if newest:
            start_id = end_id if after_id is None else min(after_id, end_id)
        else:
            start_id = after_id or 0
        return cls(topic, state, key, newest, start_id, end_id)

    @property
    def is_selective(self) -> bool:
        return self.key is not None or self.state is not None

    @property
    def store_topic(self) -> str | None:
        """A store that skips what is of other topics looks at more than is counted here."""
        return None if self.key is not None else self.topic

    def fits(self, known: Known) -> bool:
        """All but the state."""
        row = known.row
        if self.key is not None and (row.extras is None or row.extras.key != self.key):
            return False
        return self.topic is None or row.topic == self.topic
