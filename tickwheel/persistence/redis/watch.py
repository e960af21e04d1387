"""Looks at an idle shard now and then, so that a Redis that lost it is noticed before it matters.

A commit notices by itself. Without commits nobody would, until this daemon ends and what only it
still knew is gone with it. An absence is not told here: who needs Redis tells it.
"""

from __future__ import annotations

import asyncio

from tickwheel.persistence.redis.asking import Asker
from tickwheel.persistence.redis.rewriter import Rewriter
from tickwheel.persistence.store import Fenced, StoreError

PAUSE_S = 1.0


class Watch:
    """``start`` when the shard is open, ``stop`` before it is closed; both may be repeated."""

    def __init__(self, asker: Asker, rewriter: Rewriter) -> None:
        self._asker = asker
        self._rewriter = rewriter
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        commits = -1
        while True:
            await asyncio.sleep(PAUSE_S)
            idle = commits == self._rewriter.commits
            commits = self._rewriter.commits
            if idle and not self._rewriter.active:
                try:
                    await self._asker.glance()
                except Fenced:
                    return  # the next commit is told
                except StoreError:
                    continue
