"""The hashes of keys beside packs and rows: written with them, and read at a start without them.

A pack of which some tasks have a key has a row in ``pack_key``, a row of its own one in
``task_key``; tasks without a key have nothing. A hash stays while its pack or row does: which
tasks have left a pack says ``gone``. Must not know transactions.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_left
from itertools import repeat
from typing import TYPE_CHECKING

from tickwheel.model.key_hash import NO_KEY, KeyHash
from tickwheel.model.records import ID_STEP
from tickwheel.persistence.contract import Keyed
from tickwheel.persistence.sqlite.connection import blob_join, blob_of
from tickwheel.persistence.sqlite.packs import PackValues, ids_of
from tickwheel.persistence.sqlite.rows import insert

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Collection, Iterable, Mapping

    from tickwheel.model.records import TaskRow

HASH_BYTES = 8
PACKS_AT_ONCE = 150
"""Packs read at once, with up to 9,000 tasks: the event loop waits while they are indexed."""
ROWS_AT_ONCE = 10_000
_SIGN, _RANGE = 1 << 63, 1 << 64

_REPLACE_PACK_KEYS = insert("REPLACE", "pack_key", 2)
_REPLACE_TASK_KEYS = insert("REPLACE", "task_key", 2)
DELETE_PACK_KEYS = "DELETE FROM pack_key WHERE first IN (SELECT value FROM json_each(?))"
DELETE_TASK_KEYS = "DELETE FROM task_key WHERE id IN (SELECT value FROM json_each(?))"
_COUNT = (
    "SELECT (SELECT ifnull(sum(length(hashes)), 0) / 8 FROM pack_key)"
    " + (SELECT count(*) FROM task_key)"
)
_LOOSE = (
    "SELECT json_group_array(id), json_group_array(hash) FROM"
    " (SELECT id, hash FROM task_key WHERE id > ? ORDER BY id LIMIT ?)"
)
_PACKED = (
    "SELECT json_group_array(json_array(first, length(hashes) / 8, mask)), {hashes} FROM"
    " (SELECT first, hashes, ifnull(mask, 0) AS mask FROM pack_key LEFT JOIN gone USING (first)"
    " WHERE first > ? ORDER BY first LIMIT ?)"
)


def write(
    connection: sqlite3.Connection,
    key_hash: KeyHash,
    packs: Iterable[PackValues],
    loose: Iterable[TaskRow],
    enqueued: Mapping[int, TaskRow],
    known: Mapping[int, int],
) -> bool:
    """Write the key hashes of new packs, whose tasks are among ``enqueued``, and of rows on their
    own. ``known``: hashes that are worked out already. Whether rows on their own have a key."""
    found: list[tuple[int, bytes]] = []
    ids_known = list(known)
    if len(known) == len(enqueued) and ids_known == list(enqueued):  # each has a key: usual
        all_hashes, at = array("Q", known.values()), 0
        for first, count, *_ in packs:
            at = bisect_left(ids_known, first, at)
            found.append((first, all_hashes[at : at + count].tobytes()))
        packs = ()
    for first, count, _, _, _, extras in packs:
        if extras is not None:
            ids = range(first, first + count * ID_STEP, ID_STEP)
            hashes = list(map(known.get, ids, repeat(NO_KEY)))
            if NO_KEY in hashes:
                missing = [enqueued[i] for i, hashed in zip(ids, hashes, strict=True) if not hashed]
                of_rows = key_hash.of_rows(missing)
                hashes = [
                    hashed or of_rows.get(i, NO_KEY) for i, hashed in zip(ids, hashes, strict=True)
                ]
            if any(hashes):
                found.append((first, array("Q", hashes).tobytes()))
    if found:
        _REPLACE_PACK_KEYS.run(connection, found)
    return write_loose(connection, key_hash, loose)


def write_loose(connection: sqlite3.Connection, key_hash: KeyHash, rows: Iterable[TaskRow]) -> bool:
    """Write the key hashes of rows on their own; whether some have a key."""
    hashes = key_hash.of_rows(rows)
    if hashes:
        _REPLACE_TASK_KEYS.run(connection, zip(hashes, map(_signed, hashes.values()), strict=True))
    return bool(hashes)


def _signed(hashed: int) -> int:
    return hashed if hashed < _SIGN else hashed - _RANGE


class KeyReader:
    """Reads all key hashes, some at a time; the writer may go on between two calls of ``next``."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        """``close`` closes the connection."""
        self._connection = connection
        self._packed = _PACKED.format(hashes=blob_join(connection).format("hashes"))
        self._after_row = self._after_pack = -1
        self._has_rows = self._has_packs = True
        self._expected: int | None = None

    def next(self) -> Keyed | None:
        """The next keyed tasks; None: there are no more."""
        if self._expected is None:
            (self._expected,) = self._connection.execute(_COUNT).fetchone()
        if self._has_packs:
            return self._some_packs()
        return self._some_rows() if self._has_rows else None

    def close(self) -> None:
        self._connection.close()

    def _some_rows(self) -> Keyed:
        found = self._connection.execute(_LOOSE, (self._after_row, ROWS_AT_ONCE)).fetchone()
        ids, hashes = map(json.loads, found)
        self._has_rows = len(ids) == ROWS_AT_ONCE
        if ids:
            self._after_row = ids[-1]
        return Keyed(ids, array("Q", array("q", hashes).tobytes()), self._expected or 0)

    def _some_packs(self) -> Keyed:
        columns = (self._after_pack, PACKS_AT_ONCE)
        places, joined = self._connection.execute(self._packed, columns).fetchone()
        packs, all_hashes, at = json.loads(places), array("Q", blob_of(joined)), 0
        self._has_packs = len(packs) == PACKS_AT_ONCE
        if packs:
            self._after_pack = packs[-1][0]
        ids, hashes = array("q"), array("Q")
        for first, count, mask in packs:
            some = all_hashes[at : at + count]
            at += count
            _add(ids, hashes, first, some, mask)
        return Keyed(ids, hashes, self._expected or 0)


def _add(ids: array[int], hashes: array[int], first: int, some: array[int], mask: int) -> None:
    """Add the tasks of one pack that are still in it and have a key."""
    count = len(some)
    if not mask and NO_KEY not in some:
        ids.extend(range(first, first + count * ID_STEP, ID_STEP))
        hashes.extend(some)
        return
    here: Collection[int] = ids_of(first, count, mask)
    for task_id in here:
        hashed = some[(task_id - first) // ID_STEP]
        if hashed != NO_KEY:
            ids.append(task_id)
            hashes.append(hashed)
