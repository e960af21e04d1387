"""What the tests of stores on Redis have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from persistence.store_subject import OWNER, Subject, taken
from support.redis_server import RedisServer
from support.store_rows import tasks
from support.waiting import comes
from tickwheel.model.kinds import Effects
from tickwheel.persistence.contract import CommitRefused, CommitUnknown, StoreUnusable
from tickwheel.persistence.redis import RedisStore, options_from

Make = Callable[..., Subject]


async def commit(subject: Subject, first: int, count: int = 10, *, tries: int = 0) -> None:
    """Commit as a committer does: until the fate of the batch is known, and it was taken.

    With ``tries`` only so often; then the last error is raised.
    """
    left = tries

    async def tried() -> bool:
        nonlocal left
        left -= 1
        try:
            await subject.commit(tasks(range(first, first + count)))
        except (CommitRefused, CommitUnknown):
            if not left:
                raise
            return False
        return True

    await comes(tried, every_s=0.05)


async def both(pair: tuple[Subject, Subject], effects: Effects) -> list[str]:
    """Commit to a store on Redis, and to the reference of what it should hold."""
    await pair[1].commit(effects)
    return await taken(pair[0], effects)


async def content(subject: Subject) -> Any:
    """All that the store holds."""
    return (
        await subject.store.scan(-1, 1_000_000, None),
        await subject.store.scan_dead((-1, ""), 1_000_000, None, None),
        await subject.small(),
    )


async def refused(url: str, match: str, kind: type[StoreUnusable] = StoreUnusable) -> None:
    with pytest.raises(kind, match=match):
        await RedisStore(options_from(url)).open(OWNER, 0)


def store(subject: Subject) -> RedisStore:
    assert isinstance(subject.store, RedisStore)
    return subject.store


def address(server: RedisServer) -> str:
    return f"127.0.0.1:{server.port}"
