"""A sample: the store and the history of a killed daemon, and what it answered shortly before.

A sample is a folder: ``store.sql`` (a database as SQL) or ``store.json`` (a Redis shard),
``history/`` as it lay there, and ``expected.json``, which uses the words of the public protocol
only: it must be readable whatever becomes of the code. Samples of a format that was released are
never rewritten.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from support.daemon import Daemon
from support.golden import GOLDEN, dump_database, load_dump
from support.raw import Raw
from support.redis_dump import dump, load
from support.redis_server import RedisServer
from tickwheel.api.frames import FrameType as T

SAMPLES = GOLDEN / "samples"
STORES = ("sqlite", "redis")
YEARS_S = 100 * 365.25 * 86_400
FAR_MS = 4_070_908_800_000
"""2099-01-01T00:00:00Z: reports take a time from 2100 on for a mistake."""
LATER_MS = 60_000
"""Milliseconds after its end at which the sample is opened; all leases have ended by then."""
SETTINGS = {
    "node": "sample",
    "delay_max_s": YEARS_S,
    "dead_retention_s": YEARS_S,
    "history_retention_s": YEARS_S,
    "history_bodies": "true",
    "history_segment_bytes": 48 * 1024,
    "lease_checkpoint_s": 0,
    "leader_ttl_s": 1.0,
}
"""Settings for writing and opening a sample, with which no record becomes too old."""
COUNTS = ("scheduled", "ready", "in_flight", "waiting", "dead")
_STORE_FILES = {"sqlite": "store.sql", "redis": "store.json"}
_PACKED = ".gz"
_LARGE_BYTES = 64 * 1024
"""Larger files are compressed."""

Expected = dict[str, Any]


class Peer(Raw):
    """A raw connection; the few things that are asked again and again."""

    def do(self, kind: int, *fields: Any) -> Any:
        """The result; an ERROR fails."""
        answer = self.call(kind, *fields)
        assert answer[0] == T.OK, answer
        return answer[2]

    def pull(self, topic: str, group: str, count: int, lease_ms: int) -> tuple[int, list[Any]]:
        """Return the epoch and `count` deliveries: (id, attempt, due_ms, body[, options])."""
        results: list[Any] = []
        epoch = 0
        while len(results) < count:
            options = {"lease_ms": lease_ms}
            epoch, _, items = self.do(T.PULL, topic, group, count - len(results), 5_000, options)
            assert items, f"{topic}/{group} gets {len(results)} instead of {count}"
            results += items
        return epoch, results

    def lookup(self, ids: list[int]) -> list[dict[str, Any]]:
        """Every field but the place on the wheel, as JSON has them."""
        results = [dict(task) for task in self.do(T.LOOKUP, ids)]
        for task in results:
            task.pop("slot", None)
            task.pop("cycles", None)
        return [plain(task) for task in results]

    def dead(self) -> list[dict[str, Any]]:
        return [plain(letter) for letter in self.do(T.DEAD_LIST, {"limit": 1000})["dead"]]

    def settings(self, topic: str, group: str | None) -> dict[str, Any]:
        result: dict[str, Any] = plain(self.do(T.CONFIGURE, topic, group, {}))
        return result


def plain(value: Any) -> Any:
    """As JSON has it: bytes as Latin-1, which keeps every one of them."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(part) for part in value]
    return value


def found_samples() -> list[Path]:
    """The folder of each sample: ``NAME/sqlite`` or ``NAME/redis``."""
    return sorted(path.parent for path in SAMPLES.glob("*/*/expected.json"))


# --- the store's files ----------------------------------------------------------------------------


@contextmanager
def place_for(store: str, folder: Path) -> Iterator[str]:
    """The URL of an empty store of that kind."""
    if store == "sqlite":
        yield f"sqlite:///{folder / 'store.db'}"
        return
    server = RedisServer(folder / "redis").start()
    try:
        yield server.url()
    finally:
        server.kill()


def save(sample: Path, url: str, history: Path, expected: Expected) -> None:
    """Store what a killed daemon left."""
    sample.mkdir(parents=True)
    if url.startswith("sqlite:"):
        text = dump_database(Path(url.removeprefix("sqlite:///")))
    else:
        text = json.dumps(asyncio.run(_shard(url)), indent=1) + "\n"
    _write(sample / _STORE_FILES[sample.name], text.encode())
    shutil.copytree(history, sample / "history")
    for name in ("lock", "*.tmp*"):
        for path in (sample / "history").rglob(name):
            path.unlink()
    (sample / "expected.json").write_text(_lines(expected), encoding="utf-8")


def _lines(expected: Expected) -> str:
    """JSON, one task or letter or the like a line."""
    parts = []
    for name, value in expected.items():
        text = json.dumps(value)
        if isinstance(value, list):
            text = "[\n" + ",\n".join(f"  {json.dumps(item)}" for item in value) + "\n ]"
        parts.append(f' "{name}": {text}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


async def _shard(url: str) -> dict[str, Any]:
    """Once the lease by which the dead daemon led is over: a sample has no time to live."""
    deadline = time.monotonic() + 60
    async with Redis.from_url(url) as redis:
        while any([await redis.pttl(key) >= 0 for key in await redis.keys("*")]):
            assert time.monotonic() < deadline, "keys with a time to live stay"
            await asyncio.sleep(0.05)  # real time: another process
    return await dump(url, masked=())


def restore_store(sample: Path, url: str) -> None:
    """Put a sample's store where a daemon can open it."""
    dumped = stored(sample)
    if sample.name == "sqlite":
        path = Path(url.removeprefix("sqlite:///"))
        script = path.with_suffix(".sql")
        script.write_bytes(dumped)
        load_dump(script, path)
    else:
        asyncio.run(load(url, json.loads(dumped)))


def expected_of(sample: Path) -> Expected:
    answer: Expected = json.loads((sample / "expected.json").read_bytes())
    return answer


def _write(path: Path, data: bytes) -> None:
    if len(data) > _LARGE_BYTES:
        path = path.with_name(path.name + _PACKED)
        data = gzip.compress(data, mtime=0)
    path.write_bytes(data)


def stored(sample: Path) -> bytes:
    """The dump of its store."""
    path = sample / _STORE_FILES[sample.name]
    large = path.with_name(path.name + _PACKED)
    return gzip.decompress(large.read_bytes()) if large.exists() else path.read_bytes()


# --- the daemon -----------------------------------------------------------------------------------


def daemon_on(folder: Path, url: str, history: Path, env: dict[str, str] | None = None) -> Daemon:
    """A daemon with the settings of samples."""
    return Daemon(folder, store=url, env=env, history_dir=history, backup_dir=folder, **SETTINGS)
