"""``run``: one daemon from settings to exit code, signals included."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

from tickwheel.errors import TickwheelError
from tickwheel.server.daemon import Daemon, explain
from tickwheel.server.logs import Log, configure
from tickwheel.server.settings import Settings

SWITCH_INTERVAL_S = 0.000_1
"""The store's threads hold the interpreter this long at most while a task is due."""
FILES_RESERVED = 64
"""Descriptors beside connections: the store and its backups, the history, logs, the loop."""
NO_FILES_QUIET_S = 60.0
HTTP_FILES_RESERVED = 64
"""The same for HTTP, when it is on."""


def run(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT. 0 after a clean stop, 1 when it could not go on."""
    log = configure(settings.log_format, settings.log_level).bind(node=settings.node)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.set_threshold(100_000, 50, 1_000)
    settings = within_file_limit(settings, log)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(settings, log))


async def _serve(settings: Settings, log: Log) -> int:
    daemon: Daemon | None = None
    code = 0
    try:
        daemon = Daemon(settings, log)
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(LoopErrors(log, loop.time))
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, daemon.ask_to_stop)
        loop.add_signal_handler(signal.SIGUSR1, daemon.accept_clock)
        await daemon.start()
        await daemon.wait()
        log.info("stopping")
    except Exception as error:
        code = _failed(log, error)
    try:
        if daemon is not None:
            await daemon.stop()
    except Exception as error:
        code = _failed(log, error)
    if code == 0:
        log.info("stopped")
    return code


class LoopErrors:
    """The event loop's own errors. A connection that cannot be accepted for want of descriptors
    is told once in a while: asyncio says it a thousand times a second, each with a traceback."""

    def __init__(self, log: Log, time_s: Callable[[], float]) -> None:
        self._log = log
        self._time_s = time_s
        self._quiet_until_s = -1.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif self._time_s() >= self._quiet_until_s:
            self._quiet_until_s = self._time_s() + NO_FILES_QUIET_S
            self._log.warning("no_file_descriptors", detail=f"{context.get('message')}: {error}")


def _failed(log: Log, error: Exception) -> int:
    expected = isinstance(error, (TickwheelError, OSError))
    log.error("failed", detail=explain(error), exc_info=None if expected else error)
    return 1


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def within_file_limit(settings: Settings, log: Log) -> Settings:
    """As many descriptors as the system allows; fewer connections when those do not suffice.

    Connections must never be able to take the descriptors that the store needs.
    """
    reserved = FILES_RESERVED + (HTTP_FILES_RESERVED if settings.http is not None else 0)
    wanted = settings.connections_max + reserved
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = max(soft, wanted) if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < allowed:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
            soft = allowed
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return settings
    connections_max = max(1, soft - reserved)
    log.warning(
        "few_file_descriptors",
        detail=f"{soft} are allowed, {reserved} of them kept for the daemon itself:"
        f" connections_max is {connections_max}, not {settings.connections_max}",
    )
    return settings.model_copy(update={"connections_max": connections_max})
