"""A process beside the daemon that works for it as an ordinary client.

The daemon starts the process, restarts it when it ends, and ends it when it stops leading. The
process connects with a secret that is created at each start and that it receives, with its other
settings, on its standard input; both sides write JSON lines. A daemon that uses TLS or does not
listen opens a loopback port for it; clients of that port must authenticate as usual.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import sys
from abc import ABC, abstractmethod
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from tickwheel.history.daemon import kill, start_process
from tickwheel.server.settings import local_host, split_address

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import Callable, Mapping

    from tickwheel.server.access.logins import Logins
    from tickwheel.server.roles import Roles
    from tickwheel.server.shard.callers import Principal

PYTHON: Final = (sys.executable, "-m")
LINE_BYTES_MAX: Final = 16 * 1024 * 1024
RESTART_S: Final = 0.2
RESTART_MAX_S: Final = 5.0
"""Minimum and maximum seconds before a restart. The pause doubles if the process ends soon."""
HEALTHY_S: Final = 10.0
"""Seconds after which the running process counts as healthy, which resets the pause."""
STOP_S: Final = 5.0
"""Maximum seconds to wait for work in progress when the daemon stops."""


class Companion(ABC):
    """Runs the process from ``_begin`` until ``stand_by`` or ``stop``."""

    def __init__(
        self,
        name: str,
        principal: Principal,
        logins: Logins,
        roles: Roles,
        *,
        url: Callable[[], str | None],
        connection: Callable[[], asyncio.Protocol],
    ) -> None:
        """``name`` is the package of the process, and the beginning of log events. ``url`` returns
        the daemon's address; ``connection`` creates a protocol for the daemon's port."""
        self._name = name
        self._principal = principal
        self._logins = logins
        self._roles = roles
        self._url = url
        self._make_connection = connection
        self._is_wanted = False
        self._loopback_server: asyncio.Server | None = None
        """The loopback port, if it is needed."""
        self._work: asyncio.Task[None] | None = None
        self._endings: set[asyncio.Task[None]] = set()
        """Tasks that wait for the end of killed processes."""
        self._process: Process | None = None
        self._totals: Counter[str] = Counter()
        """Counts of all processes since the start."""
        self.restarts = 0

    # --- for subclasses --------------------------------------------------------------------------

    @abstractmethod
    def _greet(self, login: Mapping[str, str]) -> None:
        """Write the first lines to a process that has just started. The first one has ``login``:
        its ``url`` and ``token``."""

    @abstractmethod
    def _handle_line(self, line: Mapping[str, Any]) -> None:
        """Handle a line of the process."""

    @abstractmethod
    def _ended(self, reason: str) -> None:
        """Forget the state of a process that has ended."""

    # --- life ------------------------------------------------------------------------------------

    def stand_by(self) -> None:
        """Stop immediately, because another daemon may lead."""
        self._is_wanted = False
        self._logins.companions.pop(self._principal, None)
        process, self._process = self._process, None
        kill(process)
        if self._work is not None:
            self._work.cancel()
            self._endings.add(self._work)
            self._work.add_done_callback(self._endings.discard)
            self._work = None
        self._ended("the daemon is no longer active")

    async def stop(self) -> None:
        """Wait up to ``STOP_S`` for work in progress, then end the process."""
        process = self._process
        self._is_wanted = False  # prevents a restart
        if process is not None:
            self._write({"stop": True})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await process.wait()
        self.stand_by()
        await asyncio.gather(*self._endings, return_exceptions=True)
        if self._loopback_server is not None:
            self._loopback_server.close()

    def _begin(self) -> None:
        if self._work is None and self._is_wanted:
            self._work = asyncio.get_running_loop().create_task(self._run_repeatedly())

    async def _run_repeatedly(self) -> None:
        pause_s, loop = RESTART_S, asyncio.get_running_loop()
        while self._is_wanted:
            began_s = loop.time()
            try:
                ended = f"exit code {await self._run()}"
            except OSError as error:
                ended = f"the process cannot be started: {error.strerror}"
            except Exception as error:  # a killed process can leave a partial line
                ended = f"the output of the process was invalid: {error!r:.200}"
            self._ended(f"the {self._name} process has ended")
            if not self._is_wanted:
                return
            self.restarts += 1
            self._roles.on_event(f"{self._name}_ended", f"{ended}; restarting the process")
            pause_s = (
                RESTART_S if loop.time() - began_s > HEALTHY_S else min(RESTART_MAX_S, 2 * pause_s)
            )
            await asyncio.sleep(pause_s)

    async def _run(self) -> int:
        """Run the process once and return its exit code. Raise OSError if it cannot be started, or
        ValueError for invalid output."""
        url, secret = await self._address(), secrets.token_urlsafe(32)
        self._logins.companions[self._principal] = secret.encode()
        command = (*PYTHON, f"tickwheel.{self._name}.process")
        process = await start_process(command, answers=True, line_bytes_max=LINE_BYTES_MAX)
        try:
            self._process = process
            self._greet({"url": url, "token": secret})
            assert process.stdout is not None
            async for line in process.stdout:
                self._handle_line(json.loads(line))
            code: int = await process.wait()
            return code
        finally:
            if self._process is process:  # otherwise it was already killed
                self._process = None
                kill(process)
            await _wait_until_ended(process)

    async def _address(self) -> str:
        """Return the URL at which the process connects to this daemon."""
        bound = self._url() or ""
        if bound.startswith("tcp://"):
            host, port = split_address(bound, "listen")
            host = local_host(host)
            return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        if self._loopback_server is None:
            loop = asyncio.get_running_loop()
            self._loopback_server = await loop.create_server(self._make_connection, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._loopback_server.sockets[0].getsockname()[1]}"

    def _write(self, line: Mapping[str, Any]) -> None:
        process = self._process
        if process is not None and process.stdin is not None and not process.stdin.is_closing():
            process.stdin.write(json.dumps(line).encode() + b"\n")

    def total(self, name: str) -> int:
        """Return one of the counts since the daemon started, for metrics."""
        return self._totals[name]


async def _wait_until_ended(process: Process) -> None:
    """Wait up to ``STOP_S`` until a killed process has ended, because the loop can close
    afterwards. asyncio reports its end only after its output was read."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STOP_S):
            assert process.stdout is not None
            await process.stdout.read()
            await process.wait()
