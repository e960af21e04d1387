"""The shell: engine, committer and reader of one shard, and the pulse that drives them.

A pulse does what is due now (fires, takes back leases, dispatches), writes the deliveries, and
sets one timer for the next thing that will be due. Everything that may have made something
due asks for a pulse; many asks in one step of the loop make one pulse.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tickwheel import failpoints
from tickwheel.clock import Clock, Now
from tickwheel.errors import TickwheelError, TooManySessions
from tickwheel.persistence.store import Fenced, Opened, Store, StoreBroken
from tickwheel.server.commands import Commands
from tickwheel.server.committer import Committer
from tickwheel.server.delivering import Delivering
from tickwheel.server.drafts import Drafts
from tickwheel.server.loading import Loader
from tickwheel.server.observing import Observed
from tickwheel.server.reader import Reader
from tickwheel.server.settings import Settings
from tickwheel.server.upkeep import Upkeep
from tickwheel.server.wire import task_map
from tickwheel.wheel.control import Known
from tickwheel.wheel.engine import Engine
from tickwheel.wheel.sessions import Session

if TYPE_CHECKING:
    from tickwheel.server.connection import Connection
    from tickwheel.server.history import History

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
        backup_folder: Path,
        noticed: Notice,
        may_deliver: Callable[[int], bool] | None = None,
        status: Callable[[], dict[str, Any]] = dict,
        observed: Observed | None = None,
        history: History | None = None,
    ) -> None:
        self.settings = settings
        self.limits = settings.limits()
        self.engine = engine
        self.core = engine.core
        self.store = store
        self.clock = clock
        self.epoch = opened.epoch
        self.noticed = noticed
        self.status = status
        """What STATUS answers."""
        self._may_deliver = may_deliver
        """Whether the leader's lease lasts, by the steady clock; None: nobody else can lead."""
        self.loaded = asyncio.Event()
        """Every stored task is in memory: commands that name tasks may run."""
        self.reader = Reader(self.core, store)
        self.commands = Commands(self.reader, settings.commands_max)
        self.observed = observed or Observed()
        self.history = history
        self.lateness = self.observed.lateness
        self._delivering = Delivering(self.core, clock, self.lateness)
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
            hand_over=self._delivering.hand_over,
            observed=self.observed,
            keeper=history,
        )
        if not opened.has_room:
            self.committer.start_full(opened.no_room)
        self._loader = Loader(engine, self.reader, clock, self.spawn, self.poke)
        self.drafts = Drafts(self.core, self.limits)
        self.upkeep = Upkeep(self)
        self.connections: set[Connection] = set()
        self.draining = False
        self.started_mono_ms = clock.read().mono_ms
        self._backup_folder = backup_folder
        self._poked = self._stopped = self._paused = False
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._swept_mono_ms = clock.read().mono_ms
        self._jumps = clock.jumps
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets the exception that must stop the daemon."""
        # One that comes after the first is of no interest.
        self.failed.add_done_callback(lambda failed: failed.cancelled() or failed.exception())

    # --- life --------------------------------------------------------------------------------

    def start(self, load_rest: Coroutine[Any, Any, None]) -> None:
        """Begin to serve; ``load_rest`` brings the tasks that are not in memory yet."""
        self._committing = self.spawn(self.committer.run())
        self.spawn(self._load(load_rest))
        self.spawn(self.committer.watch_room())
        self.poke()

    async def _load(self, load_rest: Coroutine[Any, Any, None]) -> None:
        await load_rest
        self.loaded.set()
        self.upkeep.start()
        self.poke()
        await self.commands.run()

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

    def pause(self) -> None:
        """No more deliveries; commands still run."""
        self._paused = True

    async def kill(self) -> None:
        """Stop without committing anything more."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
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

    def is_fatal(self, error: BaseException) -> bool:
        """Whether the daemon must not go on after it."""
        return isinstance(error, (Fenced, StoreBroken)) or not isinstance(error, TickwheelError)

    # --- for sessions and handlers -------------------------------------------------------------

    def join_session(self, key: bytes, now_ms: int) -> Session:
        """The producer session of a connection. Raises TooManySessions."""
        sessions = self.core.sessions
        session = sessions.open(key, now_ms)
        if session is None:
            unused = sessions.make_room(now_ms, self.core.config.session_evict_idle_ms_min)
            if unused is not None:
                self.engine.forget_session(unused)
                session = sessions.open(key, now_ms)
        if session is None:
            raise TooManySessions(
                f"{len(sessions)} sessions are remembered; the limit is"
                f" {self.settings.sessions_max} (sessions_max)"
            )
        session.connections += 1
        return session

    def leave_session(self, session: Session, *, for_good: bool = False) -> None:
        """A connection of it ended. One that was never used, or said BYE, is forgotten; that
        costs no commit of its own: it goes with the next one."""
        session.connections -= 1
        if session.connections:
            return
        if not (session.floor or session.outcomes):
            self.core.sessions.forget(session.key)
        elif for_good:
            self.engine.forget_session(session.key)

    def mistake(self, peer: str, error: TickwheelError, *, quiet: bool) -> None:
        """A connection is closed for what its client did."""
        self.noticed("connection_closed" + ("_quietly" if quiet else ""), f"{peer}: {error}")

    def describe(self, known: Known) -> dict[str, Any]:
        """A live task as LOOKUP and LIST answer it."""
        now = self.clock.read()
        control, wheel = self.engine.control, self.core.wheel
        state = control.state(known)
        groups = control.view(known, now.now_ms - now.mono_ms)
        due_ms = known.row.due_ms
        cycles = max(0, wheel.cycles_left(due_ms, now.now_ms))
        return task_map(known, state, wheel.slot_of(due_ms), cycles, groups)

    def backup_folder(self) -> Path:
        return self._backup_folder

    # --- the pulse -----------------------------------------------------------------------------

    def poke(self) -> None:
        """Something may be due: pulse in this step of the loop."""
        if not self._poked and not self._stopped and not self._paused:
            self._poked = True
            asyncio.get_running_loop().call_soon(self._pulse)

    def _pulse(self) -> None:
        self._poked = False
        if self._stopped or self._paused:
            return
        try:
            now = self.clock.read()
            if self._may_deliver is not None and not self._may_deliver(now.mono_ms):
                return  # the renewal of the lease pokes
            more = self.engine.delivery.fire(now.now_ms, FIRE_PER_PULSE)
            more |= self.engine.delivery.lapse(now.now_ms, FIRE_PER_PULSE)
            self.engine.settlement.expire(*now)
            dispatches, unfinished = self.engine.delivery.dispatch(*now, DISPATCH_PER_PULSE)
            for dispatch in dispatches:
                self._delivering.write(dispatch, now.now_ms)
            if dispatches:
                failpoints.hit("deliver.before_checkpoint")
            self._delivering.tell_cut()
            self._loader.load()
            if self.engine.ownership.replays:
                self.upkeep.replay()
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
        if due_ms is not None and not self._loader.reads_most:
            wake_ms = min(wake_ms, due_ms - now.now_ms)
        other_ms = self.engine.wake_in_ms(*now)
        if other_ms is not None:
            wake_ms = min(wake_ms, other_ms)
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0, wake_ms) / 1000, self._wake)

    def _wake(self) -> None:
        due = self.engine.next_checkpoint_mono_ms()
        if due is not None and due <= self.clock.read().mono_ms:
            self.committer.kick()
        self.poke()
