"""The daemon: store, engine, shell, listener and HTTP, started and stopped in order.

Order of a start: lock and open the store (the epoch rises), recover, listen, say so. Order of
a stop: say goodbye, stop accepting and delivering, commit what is open together with the
leases in flight, flush, close the store as clean.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tickwheel.clock import Clock
from tickwheel.errors import TickwheelError
from tickwheel.persistence import open_url
from tickwheel.persistence.store import Opened, StoreBroken, StoreError
from tickwheel.persistence.urls import parse, without_secrets
from tickwheel.server.connection import Connection
from tickwheel.server.handlers import command_table
from tickwheel.server.http import Http
from tickwheel.server.logs import Log
from tickwheel.server.settings import Settings, split_address
from tickwheel.server.shell import Shell
from tickwheel.wheel.control import Known
from tickwheel.wheel.engine import Engine

GOODBYE_WAIT_S = 1.0
"""After GOODBYE, clients get this long to send what they still have."""
WARNINGS = frozenset({"store_trouble", "store_full", "clock_jumped", "connection_closed"})


class Daemon:
    """``start``, ``wait`` until it should end, ``stop``."""

    def __init__(self, settings: Settings, log: Log) -> None:
        self.settings = settings
        self.log = log
        self.clock = Clock(int(settings.clock_hold_over_s * 1000))
        self.store = open_url(settings.store)
        self.url: str | None = None
        self._http: Http | None = None
        self._server: asyncio.Server | None = None
        self._shell: Shell | None = None
        self._opened = False
        self._stop_asked = asyncio.Event()

    # --- life ------------------------------------------------------------------------------

    async def start(self) -> None:
        """Raises StoreError, OSError (an address is taken)."""
        settings = self.settings
        if settings.http is not None:
            self._http = Http(*split_address(settings.http, "http"), self.readiness)
            await self._http.start()
        listener = self._bind()
        try:
            self._shell = await self._recover()
        except BaseException:
            listener.close()
            raise
        gc.collect()
        gc.freeze()
        self._shell.start()
        await self._listen(listener)
        if settings.ready_file is not None:
            self._write_ready_file(Path(settings.ready_file))

    def ask_to_stop(self) -> None:
        """From a signal handler."""
        self._stop_asked.set()

    async def wait(self) -> None:
        """Until ``ask_to_stop``; raises what made it impossible to go on."""
        if self._shell is None:
            raise AssertionError("not started")
        asked = asyncio.ensure_future(self._stop_asked.wait())
        failed = self._shell.failed
        either: set[asyncio.Future[Any]] = {asked, failed}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if failed.done():
            failed.result()

    async def stop(self) -> None:
        """Drain. Tolerates a daemon that never started; calling it twice does nothing."""
        shell, self._shell = self._shell, None
        clean = False
        try:
            if shell is not None and not shell.failed.done():
                await self._drain(shell)
                clean = True
        finally:
            await self._close(shell, clean)

    async def _drain(self, shell: Shell) -> None:
        shell.draining = True
        if self._server is not None:
            self._server.close()
        for connection in list(shell.connections):
            connection.say_goodbye("draining", "the daemon is shutting down")
        shell.pause()
        await _until(lambda: not shell.connections, GOODBYE_WAIT_S)
        timeout_s = self.settings.drain_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await shell.stop()
        except TimeoutError:
            raise StoreError(
                f"the store did not take the last batch within {timeout_s} s (drain_timeout_s);"
                " what was not confirmed is not kept"
            ) from None
        for connection in list(shell.connections):
            connection.close()
        await _until(lambda: not shell.connections, GOODBYE_WAIT_S)

    async def _close(self, shell: Shell | None, clean: bool) -> None:
        if self._server is not None:
            self._server.close()
        if shell is not None:
            for connection in list(shell.connections):
                connection.abort()
            if not clean:
                await shell.kill()
        try:
            if self._opened:
                await self.store.close(clean)
        finally:
            self._opened = False
            if self._http is not None:
                await self._http.stop()

    # --- start, step by step ---------------------------------------------------------------

    def _bind(self) -> socket.socket:
        """Take the address before the work of a recovery, so that a taken one is told at once."""
        host, port = split_address(self.settings.listen, "listen")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.setblocking(False)
        except OSError as error:
            listener.close()
            raise OSError(
                error.errno, f"cannot listen on {host}:{port}: {error.strerror}"
            ) from None
        return listener

    async def _listen(self, listener: socket.socket) -> None:
        shell = self._shell
        assert shell is not None
        table, enqueue_run = command_table(shell)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(shell, table, enqueue_run, shell.connections),
            sock=listener,
            backlog=1024,
        )
        host, port = listener.getsockname()[:2]
        self.url = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        self.log.info("serving", url=self.url, http=self._http and self._http.url)

    async def _recover(self) -> Shell:
        settings, started_s = self.settings, time.monotonic()
        now = self.clock.read()
        owner = f"{settings.node}/{uuid.uuid4().hex[:12]}"
        opened = await self.store.open(owner, now.now_ms)
        self._opened = True
        engine = Engine(settings.engine(), opened.epoch, opened.id_mark, now.now_ms)
        await self._recover_memory(engine, opened)
        shell = Shell(
            settings,
            engine,
            self.store,
            opened,
            self.clock,
            owner=owner,
            backup_folder=self._backup_folder(),
            noticed=self._noticed,
        )
        if parse(settings.store).kind == "redis":
            self.log.warning(
                "redis_store_is_a_preview",
                detail="one daemon at a time; a second one takes over and ends this one",
            )
        tell = self.log.info if opened.clean else self.log.warning
        tell(
            "recovered" if opened.clean else "recovered_after_unclean_stop",
            store=without_secrets(settings.store),
            epoch=opened.epoch,
            pending=engine.core.scheduled,
            leases_kept=engine.recovery.leases_kept,
            ready=sum(
                g.ready_count for t in engine.core.topics.values() for g in t.groups.values()
            ),
            dead=engine.core.dead,
            seconds=round(time.monotonic() - started_s, 3),
        )
        return shell

    async def _recover_memory(self, engine: Engine, opened: Opened) -> None:
        recovery = engine.recovery
        small = await self.store.recover_small()
        recovery.groups(small.groups)
        recovery.sessions(small.sessions)
        recovery.endings(small.endings)
        special = {row.id for row in small.progress} | {row[0] for row in small.dead}
        # After a crash consumers may be gone; after a clean stop they were told and wait.
        grace_ms = None if opened.clean else int(self.settings.reconnect_grace_s * 1000)
        ids = sorted(special)
        for start in range(0, len(ids), 1000):
            for task in (await self.store.read(ids[start : start + 1000])).values():
                known = Known(
                    task.row, {p.group: p for p in task.progress}, {d.group: d for d in task.dead}
                )
                now = self.clock.read()
                recovery.with_history(known, now.now_ms, now.mono_ms, grace_ms)
        async for chunk in self.store.recover_handles():
            recovery.handles(chunk.ids, chunk.dues_ms, chunk.topics, special)

    def _backup_folder(self) -> Path:
        if self.settings.backup_dir is not None:
            return Path(self.settings.backup_dir)
        parsed = parse(self.settings.store)
        return Path(parsed.path).resolve().parent if parsed.kind == "sqlite" else Path.cwd()

    def _write_ready_file(self, path: Path) -> None:
        told = {
            "url": self.url,
            "http": self._http.url if self._http is not None else None,
            "pid": os.getpid(),
        }
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        fresh.write_text(json.dumps(told) + "\n")
        fresh.replace(path)

    # --- told to others ----------------------------------------------------------------------

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """Whether enqueues are taken and deliveries go out, and if not, why."""
        shell = self._shell
        if shell is None:
            return False, {"status": "recovering"}
        if shell.draining:
            return False, {"status": "draining"}
        committer = shell.committer
        if committer.full or committer.trouble is not None:
            status = "store_full" if committer.full else "store_trouble"
            return False, {"status": status, "reason": committer.trouble}
        if self.clock.held:
            return False, {"status": "clock_held", "reason": "the wall clock jumped ahead"}
        return True, {"status": "ready", "epoch": shell.epoch}

    def _noticed(self, event: str, text: str) -> None:
        (self.log.warning if event in WARNINGS else self.log.info)(event, detail=text)


async def _until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():  # they end one by one, and nobody waits long
        if time.monotonic() >= deadline:
            return
        await asyncio.sleep(0.01)


def explain(error: BaseException) -> str:
    """One line for an operator about what ended the daemon."""
    if isinstance(error, StoreBroken):
        return f"the store failed and cannot be trusted: {error}. The next start recovers."
    if isinstance(error, TickwheelError):
        return f"{error.code}: {error}"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return f"{type(error).__name__}: {error}"
