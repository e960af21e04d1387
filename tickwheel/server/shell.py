"""The shell: engine, committer and reader of one shard, and the pulse that drives them.

A pulse does what is due now (fires, takes back leases, dispatches), writes the deliveries, and
sets one timer for the next thing that will be due. Everything that may have made something
due asks for a pulse; many asks in one step of the loop make one pulse.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from tickwheel import failpoints
from tickwheel.clock import Clock, Now
from tickwheel.persistence.store import Opened, Store
from tickwheel.server.commands import Commands
from tickwheel.server.committer import Committer
from tickwheel.server.drafts import Drafts
from tickwheel.server.lateness import Lateness
from tickwheel.server.reader import Reader
from tickwheel.server.settings import Settings
from tickwheel.server.wire import delivery_items
from tickwheel.wheel.delivery import Dispatch
from tickwheel.wheel.engine import Engine

FIRE_PER_PULSE = 4_096
DISPATCH_PER_PULSE = 4_096
SLEEP_MS_MAX = 1_000
"""The longest sleep: a jump of the clock is noticed within it."""
SWEEP_MS = 60_000

Notice = Callable[[str, str], None]


class Shell:
    """One shard at work. ``start`` after the engine was recovered; ``stop`` flushes."""

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        store: Store,
        opened: Opened,
        clock: Clock,
        *,
        owner: str,
        noticed: Notice,
    ) -> None:
        self.settings = settings
        self.limits = settings.limits()
        self.engine = engine
        self.core = engine.core
        self.store = store
        self.clock = clock
        self.epoch = opened.epoch
        self.noticed = noticed
        self.reader = Reader(self.core, store)
        self.commands = Commands(self.reader, settings.commands_max)
        self.committer = Committer(
            engine,
            store,
            self.reader,
            clock,
            owner=owner,
            epoch=opened.epoch,
            last_batch=opened.last_batch,
            outcome_timeout_s=settings.outcome_timeout_s,
            landed=self.poke,
            noticed=noticed,
        )
        self.drafts = Drafts(self.core, self.limits)
        self.lateness = Lateness()
        self.draining = False
        self._poked = False
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._swept_mono_ms = clock.read().mono_ms
        self._jumps = clock.jumps
        self._stopped = False
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets the exception that must stop the daemon."""

    # --- life --------------------------------------------------------------------------------

    def start(self) -> None:
        self._committing = self._spawn(self.committer.run())
        self._spawn(self.commands.run())
        self._spawn(self.committer.watch_room())
        self.poke()

    async def stop(self) -> None:
        """Commit what is open, deliveries in flight included. Raises what prevents that."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        try:
            await self.committer.stop(self._committing)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Something broke that must not be survived: no reply leaves from now on."""
        self._stopped = True
        if not self.failed.done():
            self.failed.set_exception(error)

    # --- the pulse -----------------------------------------------------------------------------

    def poke(self) -> None:
        """Something may be due: pulse in this step of the loop."""
        if not self._poked and not self._stopped:
            self._poked = True
            asyncio.get_running_loop().call_soon(self._pulse)

    def _pulse(self) -> None:
        self._poked = False
        if self._stopped:
            return
        try:
            now = self.clock.read()
            more = self.engine.delivery.fire(now.now_ms, FIRE_PER_PULSE)
            self.engine.settlement.expire(*now)
            dispatches, unfinished = self.engine.delivery.dispatch(*now, DISPATCH_PER_PULSE)
            for dispatch in dispatches:
                self._deliver(dispatch, now.now_ms)
            if dispatches:
                failpoints.hit("deliver.before_checkpoint")
            self._load()
            if not self.core.open.is_empty():
                self.committer.kick()
            if now.mono_ms - self._swept_mono_ms >= SWEEP_MS:
                self._swept_mono_ms = now.mono_ms
                self.engine.sweep(now.now_ms)
        except Exception as error:
            self.fail(error)
            return
        if self.clock.jumps != self._jumps:
            self._jumps = self.clock.jumps
            self._tell_jump()
        if more or unfinished:
            self.poke()
        else:
            self._sleep(now)

    def _tell_jump(self) -> None:
        held = "; held: nothing fires until it is back" if self.clock.held else ""
        self.noticed("clock_jumped", f"by {self.clock.last_jump_ms} ms{held}")

    def _sleep(self, now: Now) -> None:
        wake_ms = SLEEP_MS_MAX
        due_ms = self.core.wheel.next_due_ms(now.now_ms)
        if due_ms is not None:
            wake_ms = min(wake_ms, due_ms - now.now_ms)
        for mono_ms in (self.core.expiry_mono_ms, self.engine.next_checkpoint_mono_ms()):
            if mono_ms is not None:
                wake_ms = min(wake_ms, mono_ms - now.mono_ms)
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0, wake_ms) / 1000, self._wake)

    def _wake(self) -> None:
        due = self.engine.next_checkpoint_mono_ms()
        if due is not None and due <= self.clock.read().mono_ms:
            self.committer.kick()
        self.poke()

    def _deliver(self, dispatch: Dispatch, now_ms: int) -> None:
        subscriber, items = dispatch
        wire = delivery_items(items)
        note = self.lateness.note
        for row, attempt in items:
            late_ms = now_ms - row.due_ms
            if late_ms < 0:
                self.core.totals.early += 1
            elif attempt == 1:
                note(late_ms)
        subscriber.owner.deliver(self.epoch, now_ms, wire)  # type: ignore[attr-defined]  # the shell's own

    # --- rows that are not in memory -------------------------------------------------------------

    def _load(self) -> None:
        core = self.core
        if core.wants:
            ids = list(dict.fromkeys(core.wants))
            core.wants = []
            self._spawn(self._load_for_firing(ids))
        if core.wants_ready:
            wanted, core.wants_ready = core.wants_ready, {}
            for group, ids in wanted.items():
                self._spawn(self._load_for_group(group, ids))

    async def _load_for_firing(self, ids: list[int]) -> None:
        known = await self.reader.known(ids)
        rows = {task_id: found.row for task_id, found in known.items()}
        self.engine.delivery.loaded(ids, rows, self.clock.read().now_ms)
        self.poke()

    async def _load_for_group(self, group: Any, ids: list[int]) -> None:
        known = await self.reader.known(ids)
        rows = {task_id: found.row for task_id, found in known.items()}
        self.engine.delivery.loaded_ready(group, ids, rows)
        self.poke()


