"""Real nodes that share the shards of one Redis, each with a daemon process per shard."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from support.daemon import Daemon
from support.ports import free_ports
from support.raw import Raw
from support.waiting import until
from tickwheel.api.frames import FrameType as T


def family(pid: int) -> list[int]:
    """Return the process and its descendants, oldest first."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:  # it has ended meanwhile
        children = []
    return [pid, *(item for child in children for item in family(int(child)))]


class Node(Daemon):
    """A node. Its row of `listen` ports and its `http` port stay the same over restarts."""

    def __init__(self, folder: Path, name: str, store: str, shards: int, **options: Any) -> None:
        super().__init__(folder, store=f"{store}?shards={shards}", node=name, **options)
        self.name = name
        self.shards = shards
        self.first_port = free_ports(shards + 1)
        self._listen = f"tcp://127.0.0.1:{self.first_port}"
        if self._http is not None:
            self._http = f"127.0.0.1:{free_ports(shards + 1)}"

    def url_of(self, shard: int) -> str:
        """Return the address of the node's daemon of a shard."""
        return f"tcp://127.0.0.1:{self.first_port + 1 + shard}"

    def front(self, **options: Any) -> Raw:
        """Return a connection to the front door."""
        return Raw(self.first_port, **options)

    def raw(self, shard: int, /, **options: Any) -> Raw:
        """Return a connection to the daemon of a shard."""
        return Raw(self.first_port + 1 + shard, **options)

    def freeze(self) -> list[int]:
        """Send SIGSTOP to all processes of the node and return them for ``wake``."""
        result = list[int]()
        while more := [pid for pid in family(self.pid) if pid not in result]:
            for pid in more:  # its parent first: it starts no more of them
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            result += more
        return result

    @staticmethod
    def wake(frozen: list[int]) -> None:
        for pid in frozen:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def nodes(self) -> dict[str, Any]:
        """Return the front door's listing of all nodes and shards."""
        with self.front() as raw:
            answer: dict[str, Any] = raw.call(T.NODE_LIST)[2]
            return answer


class Nodes:
    """Nodes by name, as a context manager."""

    def __init__(
        self, folder: Path, store: str, shards: int, names: Iterable[str] = "ab", **options: Any
    ) -> None:
        self.all = {
            name: Node(folder / f"node-{name}", name, store, shards, **options) for name in names
        }
        self.shards = shards

    def __getitem__(self, name: str) -> Node:
        return self.all[name]

    def __enter__(self) -> Self:
        for node in self.all.values():
            node.spawn()
        for node in self.all.values():
            node.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.all.values():
            if node.alive:
                Node.wake(family(node.pid))
                node.kill()

    def log(self) -> str:
        return "\n".join(node.log_text() for node in self.all.values())

    def leaders(self, asked: str) -> dict[int, str | None]:
        """Return the leading node of each shard, as one node lists them."""
        return {shard["shard"]: shard["node"] for shard in self[asked].nodes()["shards"]}

    def until_led(
        self, asked: str, by: Iterable[str], timeout_s: float = 60.0
    ) -> dict[int, str | None]:
        """Wait until the nodes in `by` lead all shards, each of them some, and no move is
        pending."""

        those = set(by)

        def look() -> dict[int, str | None]:
            shards = self[asked].nodes()["shards"]
            result = {shard["shard"]: shard["node"] for shard in shards}
            rests = all(shard["node"] == shard["wanted"] for shard in shards)
            return result if rests and set(result.values()) == those else {}

        return until(look, timeout_s, self.log)
