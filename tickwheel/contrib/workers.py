"""Shared parts of commands that run workers: loading, running and reloading them.

This module knows no framework and no command line. ``supervise`` runs the current command again as
a child process that does the work, and restarts it after each change of the program. Invariants:
one child runs at a time; a child is stopped with SIGTERM, so that it releases the tasks that it has
not started; files are watched before the first child starts, so that no change is missed.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tickwheel import environment
from tickwheel.client import Client
from tickwheel.client.jobs import Route
from tickwheel.client.worker import Worker, joined
from tickwheel.errors import BadRequest
from tickwheel.log_writer import unblock_stderr

LOGGER = logging.getLogger("tickwheel.worker")
LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
RELOAD_GRACE_S = 3.0
"""Seconds, by default, that running handlers have to finish before a restart."""
PARENT_CHECK_S = 0.5
"""Seconds between a child's checks that its parent is alive."""
_CHILD = "TICKWHEEL_RELOADED"
"""Environment variable that is set in the child of ``supervise``."""


# --- loading -------------------------------------------------------------------------------------


def load_worker(target: str) -> Worker:
    """Return the worker that ``MODULE:WORKER`` names. Raise BadRequest, which names the failing
    line of the program if the import fails."""
    module_name, colon, path = target.partition(":")
    names = path.split(".")
    if not colon or not all(name.isidentifier() for name in (*module_name.split("."), *names)):
        raise BadRequest(f"{target!r} is not MODULE:WORKER, such as shop.jobs:worker")
    value: Any = _import(module_name)
    for name in names:
        try:
            value = getattr(value, name)
        except AttributeError:
            raise BadRequest(f"module {module_name} has no {path}") from None
    if not isinstance(value, Worker):
        raise BadRequest(f"{target} is not a tickwheel.Worker, but {type(value).__name__}")
    return value


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise BadRequest(
                f"there is no module {error.name} in {Path.cwd()} or on PYTHONPATH"
            ) from None
        raise _broken(name, error) from None
    except Exception as error:
        raise _broken(name, error) from None


def _broken(name: str, error: Exception) -> BadRequest:
    """Return the error for a failed import. It names the failing line of the program."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if len(frames) > 1 else ""
    if isinstance(error, SyntaxError):
        place = f" at {error.filename}:{error.lineno}"
    return BadRequest(f"importing {name} failed{place}: {type(error).__name__}: {error}")


# --- handlers in a context -----------------------------------------------------------------------


def run_workers(
    targets: Iterable[str],
    client: Client,
    around: Callable[[], AbstractContextManager[Any]],
    *,
    coroutines: bool,
    concurrency: int | None,
    grace: float | None,
) -> None:
    """Run the handlers of the named workers with this client until SIGTERM or SIGINT.

    Each handler runs in a new context of ``around``, in the handler's thread. ``coroutines`` tells
    whether that includes ``async def`` handlers. Other parameters are those of ``Worker.run``.
    """

    def adapt(route: Route) -> Route:
        return _surrounded(route, around) if coroutines or not route.is_async else route

    worker = joined(client, map(load_worker, targets), signals=True, adapt=adapt)
    set_up_log()
    asyncio.run(worker.run(concurrency=concurrency, grace=grace, wait=True))


def set_up_log() -> None:
    """Log to stderr without blocking, unless the program has configured logging."""
    environment.check(lambda: None)
    unblock_stderr()
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)


def _surrounded(route: Route, around: Callable[[], AbstractContextManager[Any]]) -> Route:
    handler: Any = route.handler

    async def wait(delivery: Any) -> Any:
        with around():
            return await handler(delivery)

    def call(delivery: Any) -> Any:
        with around():
            return handler(delivery)

    return replace(route, handler=wait if route.is_async else call)


# --- reloading -----------------------------------------------------------------------------------


def is_child() -> bool:
    """Return whether this process is the child of ``supervise``.

    If it is, start a thread that sends it SIGTERM when the parent has ended."""
    if _CHILD not in os.environ:
        return False
    threading.Thread(target=_follow_parent, args=(os.getppid(),), daemon=True).start()
    return True


def _follow_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os.kill(os.getpid(), signal.SIGTERM)


async def supervise(folders: Iterable[Path]) -> int:
    """Run the current command as a child until SIGTERM or SIGINT, and restart it when a Python file
    below ``folders`` changes.

    Return the exit code of the last child. A child that fails is restarted after the next change.
    Raise ModuleNotFoundError with the name of the extra if watchfiles is not installed.
    """
    set_up_log()
    try:
        import watchfiles
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "--reload needs watchfiles, which is not installed: pip install 'tickwheel[reload]'",
            name="watchfiles",
        ) from None
    return await _Supervisor(watchfiles, sorted({path.resolve() for path in folders})).run()


class _Supervisor:
    def __init__(self, watchfiles: Any, folders: list[Path]) -> None:
        self._watchfiles = watchfiles
        self._folders = folders
        self._changed, self._stop_requested = asyncio.Event(), asyncio.Event()
        self._child: asyncio.subprocess.Process | None = None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        watching = asyncio.create_task(self._watch())
        try:
            while True:
                self._changed.clear()
                code = await self._run_child()
                if not self._changed.is_set() and code != 0 and not self._stop_requested.is_set():
                    LOGGER.warning("the worker ended with exit code %d; waiting for a change", code)
                    await self._wait_for_any(self._changed, self._stop_requested)
                if self._stop_requested.is_set() or not self._changed.is_set():
                    return code
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _run_child(self) -> int:
        """Run a child until it ends or a file changes. Return its exit code."""
        # The child is in the same process group, so that Ctrl-C and a debugger reach it as usual.
        self._child = child = await asyncio.create_subprocess_exec(
            sys.executable, *sys.orig_argv[1:], env={**os.environ, _CHILD: "1"}
        )
        if self._stop_requested.is_set():  # the request came before the child existed
            self._terminate()
        ended = asyncio.create_task(child.wait())
        changed = asyncio.create_task(self._changed.wait())
        await asyncio.wait((ended, changed), return_when=asyncio.FIRST_COMPLETED)
        changed.cancel()
        if not ended.done():
            self._terminate()
        code = await ended
        self._child = None
        return code

    async def _watch(self) -> None:
        python, stop = self._watchfiles.PythonFilter(), self._stop_requested
        watch = self._watchfiles.awatch(*self._folders, watch_filter=python, stop_event=stop)
        async for changes in watch:
            path = Path(min(path for _, path in changes))
            LOGGER.info("%s has changed; restarting", path)
            self._changed.set()

    def _stop(self, number: int) -> None:
        self._stop_requested.set()
        if number == signal.SIGTERM or not _is_in_foreground():
            self._terminate()

    def _terminate(self) -> None:
        if self._child is not None:
            with suppress(ProcessLookupError):
                self._child.terminate()

    @staticmethod
    async def _wait_for_any(*events: asyncio.Event) -> None:
        waits = [asyncio.create_task(event.wait()) for event in events]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()


def _is_in_foreground() -> bool:
    """Return whether a terminal sends Ctrl-C to this process and therefore also to its child."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError, AttributeError):
        return False
