"""One daemon with TCP and HTTP, and beside it one that stands by, for all tests of verbs.

Both run in a thread of this process; their store is memory, their clock stands still, so that the
same request has the same answer whoever asks. ``do`` runs a coroutine in their loop.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from support.in_process import InProcess
from support.sender import FakeSender
from support.shard_rig import NOW_MS
from tickwheel.api.verb import Right
from tickwheel.errors import BadRequest, NotFound
from tickwheel.gateway import Gateway
from tickwheel.persistence.contract import Leader
from tickwheel.server.access import tokens
from tickwheel.server.http.api import Api
from tickwheel.server.http.app import Http
from tickwheel.server.roles import status_map
from tickwheel.server.shard.operations import StandbyOperations
from tickwheel.server.tcp.listener import Listener

PATIENCE_S = 60.0
T = TypeVar("T")


class FakeDirectory:
    """One node, ``a``, that leads the only shard; it remembers what operators say."""

    shard = 0

    def __init__(self) -> None:
        self.placed: str | None = None
        self.draining = False

    def whereabouts(self, shard: int) -> tuple[str, str]:
        return "", ""

    def route(self) -> tuple[int, tuple[str, ...]]:
        return 7, ("",)

    def listing(self) -> dict[str, Any]:
        node = {
            "node": "a", "address": "tcp://a:7355", "http": None, "version": "1", "capacity": 1.0,
            "since_ms": NOW_MS, "seen_ms": NOW_MS, "draining": self.draining, "shards": [0],
            "standbys": [],
        }  # fmt: skip
        shard = {
            "shard": 0, "node": "a", "address": "tcp://a:7356", "epoch": 3, "since_ms": NOW_MS,
            "wanted": "a", "placed": self.placed, "waits": None, "http": None,
        }  # fmt: skip
        return {"nodes": [node], "shards": [shard], "route_version": 7}

    def doors(self) -> tuple[str, ...]:
        return ()

    async def place(self, shard: int, node: str | None) -> None:
        if shard:
            raise BadRequest(f"shard must be between 0 and 0, not {shard}")
        if node not in (None, "a"):
            raise NotFound(f"node {node!r} not found; existing nodes: a")
        self.placed = node

    async def drain(self, node: str, *, draining: bool) -> None:
        if node != "a":
            raise NotFound(f"node {node!r} not found; existing nodes: a")
        self.draining = draining


class House:
    """``with House(folder) as house``: ``port`` and ``http_port`` of the daemon that leads,
    ``standby_port`` and ``standby_http_port`` of the other one; ``gateway_port`` of the API of all
    shards; ``tokens`` by name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="house", daemon=True)
        self._path = folder / "tokens.json"
        self._audit = folder / "audit.jsonl"
        self._audit_read = 0
        self.tokens = {"all": self._token("all", "all"), "stage": self._token("stage", "all")}
        """``all`` asks what is tested, ``stage`` what goes before and after; ``but-RIGHT`` has all
        rights but that one."""
        for right in Right:
            others = [item.value for item in Right if item is not right]
            self.tokens[f"but-{right}"] = self._token(f"but-{right}", *others)
        self.running = InProcess(
            folder,
            http="127.0.0.1:0",
            tokens_file=str(self._path),
            audit_file=str(self._audit),
            login_delay_s=0,
        )

    def _token(self, name: str, *scopes: str) -> str:
        return tokens.create(self._path, name, tokens.parse_scopes(scopes), NOW_MS, None)[1]

    def __enter__(self) -> Self:
        self._thread.start()
        self.do(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self.do(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """What the coroutine returns, or raises, in the loop of the daemons."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    def settle(self) -> None:
        """Until everything that was asked for is committed, and what follows from it done."""
        self.do(self.running.settle())

    async def _start(self) -> None:
        running, daemon = self.running, self.running.daemon
        daemon.outbound = None
        await daemon.start()
        running.shard.outbound = FakeSender()
        self.directory = FakeDirectory()
        self.be_node(True)
        await running.shard.loaded.wait()
        assert daemon._http is not None
        self.port = _port(daemon.url)
        self.http_port = _port(daemon._http.url)
        await self._start_standby(str(daemon.url), f"http://127.0.0.1:{self.http_port}")

    def be_node(self, is_node: bool) -> None:
        """Whether the daemon that leads is one of a node from now on."""
        self.running.shard.directory = self.directory if is_node else None

    async def _start_standby(self, url: str, http: str) -> None:
        daemon = self.running.daemon
        shard = self.running.shard
        leader = Leader("house/1", url, NOW_MS, shard.engine.core.epoch, http=http)
        standby = StandbyOperations(
            daemon.settings,
            daemon.settings.limits(),
            shard.clock,
            active=lambda: leader,
            status=lambda: status_map(daemon) | {"role": "standby", "state": "standby"},
            on_event=daemon.roles.on_event,
            directory=self.directory,
        )
        observed = daemon.roles.observed
        self._standby = await self._loop.create_server(
            Listener(standby, daemon._logins), "127.0.0.1", 0
        )
        self.standby_port = self._standby.sockets[0].getsockname()[1]
        await self._start_gateway(str(daemon.url))
        self._standby_http = Http(
            "127.0.0.1", 0, cast(Any, None), cast(Any, None), connections_max=99, idle_s=99.0,
            keep_alive_s=9.0, api=Api(daemon.settings, standby, daemon._logins, observed),
        )  # fmt: skip
        await self._standby_http.start()
        self.standby_http_port = _port(self._standby_http.url)

    async def _start_gateway(self, url: str) -> None:
        """The API of all shards, which are one here."""
        daemon = self.running.daemon
        settings = daemon.settings.model_copy(update={"listen": url})
        self._gateway = Gateway(
            settings, [settings], lambda shard: daemon.roles.http_url or "", daemon._logins,
            self.running.shard.clock,
            daemon.roles.observed, daemon.roles.on_event,
        )  # fmt: skip
        self._gateway.start()
        self._gateway_http = Http(
            "127.0.0.1", 0, cast(Any, None), cast(Any, None), routes=(), other_paths=self._gateway
        )
        await self._gateway_http.start()
        self.gateway_port = _port(self._gateway_http.url)

    async def _stop(self) -> None:
        await self._gateway_http.stop()
        await self._gateway.stop()
        self._standby.close()
        await self._standby_http.stop()
        await self.running.daemon.stop()

    def logged(self) -> list[str]:
        """The verbs of the lines that were logged since the last look, of ``all``."""
        log = self.running.daemon._logins.audit
        assert log is not None
        assert log.close(10)
        lines = self._audit.read_text().splitlines() if self._audit.exists() else []
        new, self._audit_read = lines[self._audit_read :], len(lines)
        texts = [json.loads(line) for line in new]
        return [entry["operation"] for entry in texts if entry["who"] == "token all"]


def _port(url: str | None) -> int:
    assert url is not None, "it has started"
    return int(url.rpartition(":")[2])
