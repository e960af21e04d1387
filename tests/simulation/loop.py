"""The event loop of the simulation, and the hosts whose code it runs.

Time is a number here: when nothing is left to do, it jumps to the next timer. Nothing waits, no
thread runs, no socket is watched; so the same seed makes the same run.

A ``Host`` is a machine or a process: whatever its code schedules runs in its context, and so the
loop knows whose each callback is. A host that was killed runs nothing any more, not even a
``finally``; one that is frozen runs everything later, in order, when it goes on.

Invariant: callbacks run in an order that the program alone decides. Tasks, futures and connections
that stand in sets hash by a number instead of their address for that.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import os
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from typing import Any
from unittest import mock

from tickwheel.client.connection import Request
from tickwheel.client.delivery import AckFrame
from tickwheel.client.jobs import Runner
from tickwheel.client.producer import Batch
from tickwheel.server.shard.callers import Caller
from tickwheel.server.tcp.connection import Connection

EPOCH_MS = 1_700_000_000_000
"""The wall clock at the begin of a run. It is past: the judge of the torture counts on that."""
STUCK_CALLBACKS = 200_000
"""Consecutive callbacks without progress of time that count as an endless loop."""

CLOSE_TRIES = 5
"""A program that waits for something in its ``finally`` needs more than one."""
IN_SETS: tuple[type, ...] = (Connection, Caller, Request, Batch, AckFrame, Runner)
"""Classes whose objects the product keeps in sets, and goes through these."""
_HOST: contextvars.ContextVar[Host] = contextvars.ContextVar("host")


class Host:
    """A process of the simulation: it runs, is frozen, or is dead."""

    def __init__(self, loop: SimLoop, name: str) -> None:
        self.loop = loop
        self.name = name
        self.is_alive = True
        self.is_frozen = False
        self.held: list[asyncio.Handle] = []
        """What a frozen host has to do when it goes on."""
        self.context = contextvars.copy_context()
        self.context.run(_HOST.set, self)
        self.offset_ms = 0
        """How far the host's wall clock is from the time of the simulation."""
        self.began_s = loop.time()

    def __repr__(self) -> str:
        return self.name

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self.loop.create_task(work, context=self.context.copy())

    def call_at(self, when_s: float, act: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        """Let the host do something at a moment."""
        return self.loop.call_at(when_s, act, *args, context=self.context.copy())

    def kill(self) -> None:
        """End it as ``kill -9`` does."""
        self.is_alive = False
        self.held.clear()

    def freeze(self) -> None:
        self.is_frozen = True

    def thaw(self) -> None:
        if self.is_frozen and self.is_alive:
            self.is_frozen = False
            self.loop.go_on(self.held)
            self.held = []

    # --- its clock (``clock.Sources``) -----------------------------------------------------------

    def wall_ms(self) -> int:
        return EPOCH_MS + int(self.loop.time() * 1000) + self.offset_ms

    def mono_ms(self) -> int:
        return int((self.loop.time() - self.began_s) * 1000)


class SimTask(asyncio.Task[Any]):
    """A task that stands in every set at the same place in every run."""

    def __init__(self, *args: Any, number: int, **options: Any) -> None:
        self._number = number
        super().__init__(*args, **options)
        self._log_destroy_pending = False  # those of killed hosts never end

    def __hash__(self) -> int:
        return self._number


class SimFuture(asyncio.Future[Any]):
    """The same for a future."""

    def __init__(self, *, loop: SimLoop, number: int) -> None:
        self._number = number
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class SimLoop(asyncio.BaseEventLoop):
    """An event loop without a selector: its timers are its time."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._numbers = count(1)
        self._still = 0
        """How many callbacks have run since time passed."""
        self.all_tasks: list[asyncio.Task[Any]] = []
        """All that were ever made. The program of a killed host is not to end by itself."""
        self.errors: list[str] = []
        """What callbacks and tasks have raised, and nobody has caught."""
        self._readers: dict[int, asyncio.Handle] = {}
        self.pipes: set[int] = set()
        """What can be read from; ``is_readable`` says when."""
        self.set_task_factory(self._make_task)
        self.set_exception_handler(self._note_error)

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coro: Any, context: Any = None
    ) -> asyncio.Task[Any]:
        task = SimTask(coro, loop=loop, context=context, number=next(self._numbers))
        self.all_tasks.append(task)
        return task

    def create_future(self) -> asyncio.Future[Any]:
        return SimFuture(loop=self, number=next(self._numbers))

    def _note_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        shown = f": {type(error).__name__}: {error}" if error is not None else ""
        self.errors.append(f"{context['message']}{shown}")

    # --- time -----------------------------------------------------------------------------------

    def time(self) -> float:
        return self._now_s

    def go_on(self, handles: list[asyncio.Handle]) -> None:
        """Run what a host did not run while it was frozen."""
        self._ready.extend(handles)

    def drop_all(self) -> None:
        """Close all programs that are left, those of killed hosts too: none of them is collected
        later, when another loop runs. A ``finally`` may begin something; that is closed as well,
        since this list grows meanwhile."""
        asyncio._set_running_loop(self)
        try:
            for task in self.all_tasks:
                if not task.done():
                    self._close(task)
        finally:
            asyncio._set_running_loop(None)
        self.all_tasks.clear()
        self._ready.clear()
        self._scheduled.clear()

    def _close(self, task: asyncio.Task[Any]) -> None:
        asyncio.tasks._enter_task(self, task)
        try:
            for _ in range(CLOSE_TRIES):
                with suppress(Exception, asyncio.CancelledError):
                    task.get_coro().close()  # type: ignore[union-attr]
                    break
        finally:
            asyncio.tasks._leave_task(self, task)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        raise AssertionError("the simulation has no threads")

    def _run_once(self) -> None:
        """One turn: all that is ready, or else the next timers."""
        ready, timers = self._ready, self._scheduled
        if not ready:
            if not timers:
                raise RuntimeError("nothing will ever happen any more")
            first = timers[0]
            if first._when > self._now_s:
                self._now_s, self._still = first._when, 0
        self._due(timers, ready)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                self._run_handle(handle)
        self._still += 1
        if self._still > STUCK_CALLBACKS:
            raise RuntimeError(f"no time passes any more at {self._now_s:.3f} s")

    def _due(self, timers: Any, ready: Any) -> None:
        while timers and timers[0]._when <= self._now_s:
            handle = heapq.heappop(timers)
            handle._scheduled = False
            ready.append(handle)

    def _run_handle(self, handle: Any) -> None:
        host = handle._context.get(_HOST)
        if host is None or (host.is_alive and not host.is_frozen):
            handle._run()
        elif host.is_alive:
            host.held.append(handle)

    def add_reader(self, fd: Any, callback: Callable[..., object], *args: Any) -> None:
        """Let somebody read from a pipe: at once, and whenever ``is_readable`` says so."""
        if fd not in self.pipes:
            raise NotImplementedError  # as loops say that read none, of which the product knows
        self._readers[fd] = asyncio.Handle(callback, args, self)
        self.is_readable(fd)

    def is_readable(self, fd: int) -> None:
        """Something was written to a pipe."""
        if fd in self._readers:
            self._ready.append(self._readers[fd])

    def _process_events(self, event_list: Any) -> None:
        """Do nothing: there are no files."""

    def _write_to_self(self) -> None:
        """Do nothing: nothing else can wake this loop, and nothing sleeps."""


async def passes(seconds: float) -> None:
    """Return after `seconds` of simulated time."""
    await asyncio.sleep(seconds)  # real time: none, this loop's time is a number


def host_here() -> Host | None:
    """The host whose code runs at the moment."""
    return _HOST.get(None)


@contextmanager
def simulated(seed: int) -> Iterator[SimLoop]:
    """A loop for one run: whatever asks for time or for randomness meanwhile gets it from there."""
    loop, rnd = SimLoop(), random.Random(f"{seed}/system")
    state, numbers = random.getstate(), dict[int, tuple[int, object]]()
    random.seed(f"{seed}/program")

    def numbered(self: object) -> int:
        """A hash for objects that the product keeps in sets. They live as long as the run."""
        there = numbers.get(id(self))
        if there is None:
            there = numbers[id(self)] = (len(numbers), self)
        return there[0]

    with ExitStack() as stack:
        for owner, name, value in (
            (os, "urandom", rnd.randbytes),
            (os, "getpid", lambda: 1),
            (time, "monotonic", loop.time),
            *((kind, "__hash__", numbered) for kind in IN_SETS),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        try:
            yield loop
        finally:
            random.setstate(state)
            loop.drop_all()
            loop.close()
