"""What the end-to-end tests of groups share: a daemon on each store, and a raw consumer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from e2e.stores import running_store
from support.daemon import Daemon
from support.raw import TIMEOUT_S, Raw
from tickwheel.api.frames import FrameType as T
from tickwheel.protocol import Frame

SOON_S = 10.0
SILENCE_S = 0.3
SETTINGS = {
    "lease_checkpoint_s": 0,
    "reconnect_grace_s": 0.2,
    "retry_base_s": 0.05,
    "retry_factor": 1,
    "retry_jitter": 0,
    "retry_max": 3,
}
"""Default settings of the daemons."""


@contextmanager
def daemon_on(
    store: str, folder: Path, request: pytest.FixtureRequest, **settings: Any
) -> Iterator[Daemon]:
    """A running daemon on a store of ``running_store``."""
    with (
        running_store(store, folder, request) as options,
        Daemon(folder / "daemon", **{**SETTINGS, **options, **settings}) as made,
    ):
        yield made


class Peer(Raw):
    """A raw connection with the few verbs that these tests say again and again."""

    def do(self, kind: int, *fields: Any) -> Any:
        """The result; an ERROR fails the test."""
        answer = self.call(kind, *fields)
        assert answer[0] == T.OK, answer
        return answer[2]

    def refused(self, kind: int, *fields: Any) -> tuple[str, str]:
        """Code and message of the ERROR."""
        answer = self.call(kind, *fields)
        assert answer[0] == T.ERROR, answer
        return answer[2], answer[3]

    def put(self, topic: str, *bodies: bytes, **options: Any) -> list[int]:
        """Ids of tasks that are due at once."""
        delay_ms = options.pop("delay_ms", 0)
        tasks = [(topic, body, delay_ms, options) for body in bodies]
        answer = self.enqueue(*tasks)
        assert answer[0] == T.OK, answer
        return list(answer[2][1])

    def sub(self, number: int, topic: str, group: str | None, **options: Any) -> None:
        prefetch = options.pop("prefetch", 100)
        self.do(T.SUBSCRIBE, number, topic, group, prefetch, options or None)

    def deliveries(self, count: int) -> list[tuple[int, tuple[Any, ...]]]:
        """(sub, delivery) of the next ``count``; fails when they do not come."""
        results: list[tuple[int, tuple[Any, ...]]] = []
        while len(results) < count:
            frame = self.next()
            assert frame[0] == T.DELIVER, frame
            self.epoch = frame[2]
            results += [(frame[1], item) for item in frame[4]]
        assert len(results) == count, results
        return results

    def silent(self) -> bool:
        """Whether nothing comes for a moment, and a PING after it is the next thing."""
        self.socket.settimeout(SILENCE_S)
        try:
            frame: Frame | None = self.next()
        except TimeoutError:
            frame = None
        self.socket.settimeout(TIMEOUT_S)
        assert frame is None, frame
        return True

    def ack(self, topic: str, group: str | None, *items: tuple[Any, ...]) -> Any:
        ids, attempts = [item[0] for item in items], [item[1] for item in items]
        return self.do(T.ACK, topic, group, self.epoch, ids, attempts)

    def nack(self, topic: str, group: str | None, item: tuple[Any, ...], **how: Any) -> Any:
        receipt = (item[0], self.epoch, item[1], how.get("delay_ms"), how.get("reason"))
        return self.do(T.NACK, topic, group, [receipt])[0]

    def words(self, *ids: int) -> list[str]:
        return [found["state"] for found in self.do(T.LOOKUP, list(ids))]

    def topics(self) -> dict[str, Any]:
        topics: dict[str, Any] = self.do(T.STATS)["topics"]
        return topics

    def topic(self, name: str) -> dict[str, Any]:
        result: dict[str, Any] = self.topics()[name]
        return result

    def dead(self, **options: Any) -> list[dict[str, Any]]:
        return list(self.do(T.DEAD_LIST, options)["dead"])
