"""Real RabbitMQ servers for tests: own ports of 127.0.0.1, own folder, own name server of Erlang.

No service of the system is used or touched. A server takes some seconds to start.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Self

import pytest

from support.ports import free_port

PLACES = ("/usr/lib/rabbitmq/bin/rabbitmq-server", "rabbitmq-server")
"""Paths of the server; Debian's own command would switch to another user first."""
START_TIMEOUT_S = 120.0
CONFIG = """
listeners.tcp.1 = 127.0.0.1:{port}
disk_free_limit.absolute = 1MB
log.file.level = warning
"""
SMALL = "+S 1:1 +sbwt none +sbwtdcpu none +sbwtdio none +A 4"
"""Options for one Erlang scheduler without busy waiting."""


def program() -> str:
    """Return the path of the server. Without it skip the test, or fail on CI."""
    for place in PLACES:
        result = shutil.which(place)
        if result is not None and shutil.which("epmd") is not None:
            return result
    reason = "rabbitmq-server is not installed"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


class RabbitServer:
    """A broker that can be restarted on the same port and data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port, self._distribution_port, self._names_port = (free_port() for _ in range(3))
        self._process: subprocess.Popen[bytes] | None = None
        self._names: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"amqp://127.0.0.1:{self.port}"

    def start(self) -> Self:
        """Start the broker and return once it accepts connections."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "rabbitmq.conf").write_text(CONFIG.format(port=self.port))
        (self.folder / "plugins").write_text("[].\n")
        if self._names is None:
            names = ["epmd", "-address", "127.0.0.1", "-port", str(self._names_port)]
            self._names = subprocess.Popen(names, stdin=subprocess.DEVNULL)
        with (self.folder / "output").open("ab") as output:
            self._process = subprocess.Popen(
                [program()], env=self._environment(), cwd=self.folder, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                text = (self.folder / "output").read_text(errors="replace")
                self.stop()
                raise AssertionError(f"rabbitmq-server did not start:\n{text[-2000:]}")
            time.sleep(0.05)  # real time: another process
        return self

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), self._connected() as connection:
            connection.sendall(b"AMQP\x00\x00\x09\x01")
            return bool(connection.recv(1))
        return False

    def _connected(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def _environment(self) -> dict[str, str]:
        folder = str(self.folder)
        return {
            "PATH": os.environ["PATH"],
            "HOME": folder,
            "RUNNING_UNDER_SYSTEMD": "1",  # the process is the broker, and no shell before it
            "RABBITMQ_NODENAME": f"test{self.port}@localhost",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_MNESIA_BASE": f"{folder}/mnesia",
            "RABBITMQ_LOG_BASE": f"{folder}/log",
            "RABBITMQ_PID_FILE": f"{folder}/pid",
            "RABBITMQ_CONFIG_FILE": f"{folder}/rabbitmq.conf",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{folder}/plugins",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": SMALL,
            "ERL_EPMD_PORT": str(self._names_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_INETRC": "/dev/null",
        }

    def kill(self) -> None:
        """Send SIGKILL, as a crash would."""
        if self._process is not None:
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        self.kill()
        self.start()

    def control(self, *words: str) -> None:
        """Run a command of ``rabbitmqctl``."""
        command = [str(Path(program()).with_name("rabbitmqctl")), *words]
        subprocess.run(
            command, env=self._environment(), cwd=self.folder, check=True,
            stdin=subprocess.DEVNULL, capture_output=True, timeout=60,
        )  # fmt: skip

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        """Signal all processes of the broker's session."""
        assert self._process is not None, "it was started"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def stop(self) -> None:
        """End the broker and its name server."""
        self.kill()
        names, self._names = self._names, None
        if names is not None:
            names.kill()
            names.wait()
