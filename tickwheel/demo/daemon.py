"""The daemon of the demonstration: a real process that is started, killed and started again."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

START_TIMEOUT_S = 20.0


class DemoDaemon:
    """``start``, ``kill`` and ``start`` again on the same port; ``stop`` ends it for good."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = 0
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    async def start(self) -> float:
        """Start and wait until it serves; the seconds that took. Raises RuntimeError."""
        began = time.monotonic()
        ready = self.folder / "ready.json"
        ready.unlink(missing_ok=True)
        command = [
            *(sys.executable, "-m", "tickwheel", "serve"),
            *("--store", f"sqlite:///{self.folder / 'demo.db'}"),
            *("--listen", f"tcp://127.0.0.1:{self.port}"),
            *("--ready-file", str(ready), "--log-format", "json"),
            # Retries and takeovers within the demonstration's time, not within hours.
            *("--set", "retry_base_s=0.5", "--set", "reconnect_grace_s=1"),
        ]
        with (self.folder / "daemon.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log)
        while not ready.exists():
            if self._process.poll() is not None or time.monotonic() - began > START_TIMEOUT_S:
                raise RuntimeError(f"the daemon did not start:\n{self.log_tail()}")
            await asyncio.sleep(0.01)
        self.port = int(json.loads(ready.read_text())["url"].rpartition(":")[2])
        self.starts += 1
        return time.monotonic() - began

    def kill(self) -> None:
        """SIGKILL: it gets no chance to write anything more."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL if it has not drained in time."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.to_thread(process.wait, 15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def log_tail(self) -> str:
        path = self.folder / "daemon.log"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return "\n".join(lines[-10:])
