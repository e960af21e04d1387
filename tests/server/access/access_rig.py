"""A shard with a file of tokens, asked over both transports."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from server.http.rig import HttpRig
from support.shard_rig import NOW_MS, Peer
from tickwheel.server.access import tokens


class AccessRig(HttpRig):
    """``token`` makes one; ``reload`` does what the daemon does about once a second."""

    def __init__(self, **settings: Any) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.path = Path(self._folder.name) / "tokens.json"
        tokens.create(self.path, "first", tokens.parse_scopes(["all"]), NOW_MS, None)
        super().__init__(tokens_file=str(self.path), **settings)

    async def stop(self) -> None:
        await super().stop()
        self._folder.cleanup()

    async def token(
        self,
        *scopes: str,
        name: str = "somebody",
        ttl_ms: int | None = None,
        quotas: dict[str, float] | None = None,
    ) -> str:
        """The text of a new one that the daemon knows."""
        now_ms = self.sources.now_ms
        over_ms = None if ttl_ms is None else now_ms + ttl_ms
        grants = tokens.parse_scopes(scopes)
        own = tokens.parse_quotas([f"{n}={v}" for n, v in (quotas or {}).items()])
        text = tokens.create(self.path, name, grants, now_ms, over_ms, None, own)[1]
        await self.reload()
        return text

    async def reload(self) -> None:
        await self.logins.reload_if_changed()
        self.listener.dismiss()
        self.api.dismiss()

    async def peer_with(self, *scopes: str) -> Peer:
        """Connected over TCP."""
        return await self.peer(token=await self.token(*scopes))

    async def http(self, token: str, method: str, target: str, body: Any = None) -> Any:
        return await self.call(method, target, body, authorization=f"Bearer {token}")


def id_of(text: str) -> str:
    """Return the id in a token's text."""
    return text.split("_")[1]
