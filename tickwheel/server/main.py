"""``run``: one daemon from settings to exit code, signals included."""

from __future__ import annotations

import asyncio
import gc
import resource
import signal
import sys
from collections.abc import Callable

from tickwheel.errors import TickwheelError
from tickwheel.server.daemon import Daemon, explain
from tickwheel.server.logs import Log, configure
from tickwheel.server.settings import Settings

SWITCH_INTERVAL_S = 0.000_1
"""The store's threads hold the interpreter this long at most while a task is due."""
SPARE_FILES = 64
"""Descriptors beside connections: the store, logs, HTTP."""


def run(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT. 0 after a clean stop, 1 when it could not go on."""
    log = configure(settings.log_format, settings.log_level).bind(node=settings.node)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.set_threshold(100_000, 50, 1_000)
    _raise_file_limit(settings.connections_max + SPARE_FILES, log)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(settings, log))


async def _serve(settings: Settings, log: Log) -> int:
    daemon: Daemon | None = None
    code = 0
    try:
        daemon = Daemon(settings, log)
        loop = asyncio.get_running_loop()
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


def _raise_file_limit(wanted: int, log: Log) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        log.warning("few_file_descriptors", allowed=allowed, wanted=wanted)
