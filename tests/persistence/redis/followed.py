"""What the tests of stores that move have in common."""

from __future__ import annotations

from collections.abc import Callable

from persistence.store_subject import Subject
from support.redis_server import RedisServer
from support.store_rows import tasks
from support.waiting import comes
from tickwheel.persistence.contract import CommitRefused, CommitUnknown
from tickwheel.persistence.redis import RedisStore

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


def store(subject: Subject) -> RedisStore:
    assert isinstance(subject.store, RedisStore)
    return subject.store


def address(server: RedisServer) -> str:
    return f"127.0.0.1:{server.port}"
