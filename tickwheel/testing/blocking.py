"""The test wheel for programs without an event loop: it runs in the thread of its client."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from datetime import datetime
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

from tickwheel.sync import Client
from tickwheel.testing.wheel import TestWheel

if TYPE_CHECKING:
    from tickwheel.api.dead import DeadLetter
    from tickwheel.api.tasks import TaskInfo
    from tickwheel.api.times import Duration

P = ParamSpec("P")
R = TypeVar("R")


class SyncTestWheel:
    """``TestWheel`` for blocking code: ``client`` is a ``tickwheel.sync.Client``, and every call
    returns when it is done. The only thread is the client's own."""

    __test__ = False

    def __init__(self, now: datetime | None = None, **settings: Any) -> None:
        self._wheel = TestWheel(now, **settings)
        self.client: Client = _WheelClient(self._wheel)

    def __enter__(self) -> Self:
        self.client.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the daemon and the client."""
        self._ask(TestWheel.close)
        self.client.close()

    @property
    def now(self) -> datetime:
        """See ``TestWheel.now``."""
        return self._wheel.now

    @property
    def due_next(self) -> datetime | None:
        """See ``TestWheel.due_next``."""
        return self._ask(_due_next)

    def advance(self, by: Duration | str) -> None:
        """See ``TestWheel.advance``."""
        self._ask(TestWheel.advance, by)

    def settle(self) -> None:
        """See ``TestWheel.settle``."""
        self._ask(TestWheel.settle)

    def run_until_idle(self, within: Duration | str = "365d") -> None:
        """See ``TestWheel.run_until_idle``."""
        self._ask(TestWheel.run_until_idle, within)

    def crash(self) -> None:
        """See ``TestWheel.crash``."""
        self._ask(TestWheel.crash)

    def lapse(self, topic: str | None = None, group: str | None = None) -> int:
        """See ``TestWheel.lapse``."""
        return self._ask(TestWheel.lapse, topic, group)

    def lose_replies(self, count: int = 1) -> None:
        """See ``TestWheel.lose_replies``."""
        self._wheel.lose_replies(count)

    def duplicate(self, count: int = 1) -> None:
        """See ``TestWheel.duplicate``."""
        self._wheel.duplicate(count)

    def failing_store(self) -> AbstractContextManager[None]:
        """See ``TestWheel.failing_store``."""
        return self._wheel.failing_store()

    def enqueued(self, topic: str | None = None, *, key: str | None = None) -> list[TaskInfo]:
        """See ``TestWheel.enqueued``."""
        return self._ask(TestWheel.enqueued, topic, key=key)

    def assert_enqueued(
        self,
        topic: str,
        *,
        key: str | None = None,
        body: bytes | None = None,
        within: Duration | str | None = None,
    ) -> TaskInfo:
        """See ``TestWheel.assert_enqueued``."""
        return self._ask(TestWheel.assert_enqueued, topic, key=key, body=body, within=within)

    def dead_letters(self, topic: str | None = None, group: str | None = None) -> list[DeadLetter]:
        """See ``TestWheel.dead_letters``."""
        return self._ask(TestWheel.dead_letters, topic, group)

    def _ask(
        self,
        method: Callable[Concatenate[TestWheel, P], Coroutine[Any, Any, R]],
        *arguments: P.args,
        **options: P.kwargs,
    ) -> R:
        async def ask(_client: object) -> R:
            return await method(self._wheel, *arguments, **options)

        return self.client._call(ask)


class _WheelClient(Client):
    def __init__(self, wheel: TestWheel) -> None:
        super().__init__()
        self._make = wheel.new_client


async def _due_next(wheel: TestWheel) -> datetime | None:
    return wheel.due_next
