"""A sender that sends no request but answers like a daemon's outbound process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from support.shard_rig import NOW_MS

SENT = {
    "number": 0, "at_ms": NOW_MS, "duration_ms": 1.5, "result": "acked", "status": 204,
    "error": None, "body": "", "address": "93.184.216.34",
}  # fmt: skip


class FakeSender:
    """See ``server.shard.targets.Sender``."""

    callback_url: str | None = "http://127.0.0.1:1"

    restarts = 0

    def __init__(self) -> None:
        self.changes = 0
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def changed(self) -> None:
        self.changes += 1

    def state(self, topic: str, group: str) -> Mapping[str, Any]:
        return {"state": "sending", "sent": 3, "acked": 2, "failed": 1, "in_flight": 0}

    def count(self, word: str) -> int:
        return 0

    def total(self, name: str) -> int:
        return 0

    async def ask(self, what: str, **said: Any) -> dict[str, Any]:
        self.asked.append((what, said))
        if what == "log":
            return {"requests": [SENT | {"number": 2}, SENT | {"number": 1}][: said["limit"]]}
        return SENT | {"number": said.get("number", 0), "again": what == "resend"}
