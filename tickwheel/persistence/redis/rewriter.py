"""When Redis lacks more than the batches kept: everything is written again, from the mirror.

Stands before the writer. While a shard is written anew nothing is committed, so the mirror stands
still; one task does it, again from the beginning when Redis goes away in the middle, until it is
done. A commit notices a Redis that lost the shard by itself; without commits nobody would, until
this daemon ends and what only it still knew is gone with it. So an idle shard is looked at now and
then. That Redis is away is not reported here: who needs it does that. Invariants:

* With the mirror complete nobody gets StoreBehind or StoreLost: commits are refused meanwhile.
* A shard that another daemon has taken over or laid out anew is never written (Fenced).
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from tickwheel.persistence.contract import (
    CommitRefused,
    Fenced,
    StoreAway,
    StoreBehind,
    StoreBroken,
    StoreError,
    StoreLost,
)
from tickwheel.persistence.redis.driver import REFUSING, ServerError

if TYPE_CHECKING:
    from tickwheel.model.effects import Effects
    from tickwheel.persistence.redis.mirror import Mirror
    from tickwheel.persistence.redis.reader import ReadClient
    from tickwheel.persistence.redis.writer import Tally, Writer

log = logging.getLogger(__name__)

RETRY_S = 0.2
RETRY_S_MAX = 2.0


class Rewriter:
    """A writer's ``commit`` and ``verify`` over a Redis that may lose everything."""

    def __init__(self, writer: Writer, mirror: Mirror, tally: Tally, what: str) -> None:
        self._writer = writer
        self._mirror = mirror
        self._tally = tally
        self._what = what
        """The names of store and shard, for messages."""
        self._task: asyncio.Task[None] | None = None
        self._failed: StoreError | None = None
        self._written = self._total = 0
        self.commits = 0
        """How many calls of ``commit`` there were: whoever commits notices what is wrong."""

    @property
    def active(self) -> bool:
        return self._task is not None

    @property
    def state(self) -> str:
        """How far the writing anew is, for messages."""
        return f"{self._what} is being written anew: {self._written} of {self._total} tasks"

    async def commit(self, epoch: int, owner: str, n: int, effects: Effects) -> bool:
        """See ``Store.commit``; also raises StoreBehind and StoreLost, see the invariants."""
        self.commits += 1
        if self._failed is not None:
            raise self._failed
        if not self.active:
            try:
                return await self._writer.commit(epoch, owner, n, effects)
            except (StoreBehind, StoreLost) as error:
                self._begin(error)
        raise CommitRefused(f"batch {n}: {self.state}")

    async def verify(self) -> None:
        """See ``Writer.verify``; also raises StoreAway while the shard is written anew."""
        if not self.active:
            try:
                await self._writer.verify()
                return
            except (StoreBehind, StoreLost) as error:
                self._begin(error)
        raise StoreAway(self.state)

    def _begin(self, why: StoreError) -> None:
        """Begin to write the shard anew; raises ``why`` if the mirror is not complete."""
        if not self._mirror.complete:
            raise why
        if self.active:
            return
        counts = self._mirror.counts()
        self._written, self._total = 0, counts.tasks
        log.error("%s; it is written anew from memory: %s", why.message, counts)
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Stop a writing anew; the shard stays marked as not whole."""
        task = self._task
        if task is not None:
            log.error("%s was closed before it was whole again: %s", self._what, self.state)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        try:
            await self._until_whole()
        except Fenced:
            log.warning("%s was taken over by another daemon meanwhile", self._what)
        except StoreBroken as error:
            self._failed = error
        except Exception as error:
            log.exception("%s could not be written anew", self._what)
            self._failed = StoreBroken(f"{self._what} could not be written anew: {error!r}")
        else:
            self._tally.rewrites += 1
            log.warning(
                "%s was written anew in %.1f s: %s",
                self._what,
                loop.time() - started_s,
                self._mirror.counts(),
            )
        finally:
            self._task = None

    async def _until_whole(self) -> None:
        pause_s, is_logged = RETRY_S, False
        while True:
            try:
                await self._write()
                return
            except (Fenced, StoreBroken):
                raise
            except StoreError as error:
                if isinstance(error, ServerError) and error.kind not in REFUSING:
                    raise StoreBroken(f"{self._what}: {error.message}") from error
                if not is_logged:
                    is_logged = True
                    log.warning(
                        "writing %s anew was cut short after %d of %d tasks, and will begin again"
                        " until it succeeds: %s",
                        self._what,
                        self._written,
                        self._total,
                        error.message,
                    )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_S_MAX)

    async def _write(self) -> None:
        """Write all batches of the mirror. Raises StoreError; nothing written counts then."""
        self._written = 0
        async with self._writer.write_anew() as write:
            for effects in self._mirror.batches():
                await write(effects)
                self._written += len(effects.enqueued)


PAUSE_S = 1.0


class Watch:
    """Looks at an idle Redis: ``start`` when the shard is open, ``stop`` before it closes."""

    def __init__(self, asker: ReadClient, rewriter: Rewriter) -> None:
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
                    return  # the next commit gets the error
                except StoreError:
                    continue
