"""All ids in order, for listings: built when one begins, dropped when none has gone on for long.

Redis orders tasks by due time only. A second ordered set of ids would cost every task about a
fifth of its enqueue and 100 bytes of Redis's memory, for listings that are rare; so the first
page reads all ids (a second for a million), and 8 bytes an id stay here while pages follow.
This daemon makes every commit, so it can keep the index true. Ids that ended stay in it: the
rows are read anyway, and tell.
"""

from __future__ import annotations

import asyncio
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

IDLE_S = 30.0


class IdIndex:
    """See the module's text."""

    def __init__(self) -> None:
        self._ids: array[int] | None = None
        self._added: list[int] | None = None
        self._used_s = 0.0

    def after(self, after_id: int, limit: int) -> list[int] | None:
        """The next ids above ``after_id``; None when the index has to be loaded first."""
        ids = self._ids
        if ids is None:
            return None
        self._used_s = asyncio.get_running_loop().time()
        if self._added:
            self._ids = ids = array("q", sorted({*ids, *self._added}))
            self._added = []
        start = bisect_right(ids, after_id)
        return list(ids[start : start + limit])

    def before(self, before_id: int, limit: int) -> list[int] | None:
        """The next ids below ``before_id``, the highest first; None as in ``after``."""
        if self.after(before_id, 0) is None or self._ids is None:
            return None
        end = bisect_left(self._ids, before_id)
        return list(self._ids[max(0, end - limit) : end])[::-1]

    def add(self, ids: Iterable[int]) -> None:
        """Tasks were committed."""
        if self._added is None:
            return
        if self._ids is not None and asyncio.get_running_loop().time() > self._used_s + IDLE_S:
            self._ids = self._added = None
            return
        self._added.extend(ids)

    @contextmanager
    def loading(self) -> Iterator[list[int]]:
        """The caller appends every id there is; what is added meanwhile is not missed."""
        found: list[int] = []
        if self._added is None:
            self._added = []
        try:
            yield found
        except BaseException:
            if self._ids is None:
                self._added = None
            raise
        self._ids = array("q", sorted(set(found)))
        self._used_s = asyncio.get_running_loop().time()
