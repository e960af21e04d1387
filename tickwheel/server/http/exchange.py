"""One HTTP request as a caller of operations: their answers become futures that a handler awaits.

An ``Exchange`` lives as long as its request, a stream of deliveries included. It knows no JSON and
no socket. Invariants:

* An answer is made of a value in the step in which the operation gives it, by the handler's
  ``render``, so that what waits for the store is no larger than it says.
* Whoever asks is answered: when the daemon stops leading, everything that waits is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence, Sized
from typing import TYPE_CHECKING, Any

from tickwheel.errors import BY_CODE, InternalError, Overloaded, TickwheelError
from tickwheel.server.shard.access import ANONYMOUS, Principal
from tickwheel.server.shard.callers import Caller

if TYPE_CHECKING:
    from tickwheel.engine.sessions import StoredAnswer
    from tickwheel.server.shard.operations import Operations

Render = Callable[[Any], Any]
ANSWER_BYTES = 256
"""Bytes that are counted for an answer that is not bytes yet: a few words."""


class _Rendered:
    """An answer that may wait for the store."""

    __slots__ = ("request", "value")

    def __init__(self, request: int, value: Any) -> None:
        self.request = request
        self.value = value

    def __len__(self) -> int:
        if isinstance(self.value, bytes):
            return len(self.value)
        return ANSWER_BYTES + (64 * len(self.value) if isinstance(self.value, list) else 0)


class Exchange:
    """One request over HTTP: the ``ReplySink`` of its caller, with futures for answers."""

    def __init__(
        self, operations: Operations, principal: Principal = ANONYMOUS, address: str = "?"
    ) -> None:
        self.operations = operations
        self.caller = Caller(self, principal=principal, address=address)
        self.caller.name = "http"
        self._waiting: dict[int, tuple[asyncio.Future[Any], Render | None]] = {}
        self._number = 0
        self.ended: TickwheelError | None = None
        self.on_end: Callable[[TickwheelError], None] | None = None
        """Called with the reason when the daemon ends the exchange."""
        operations.opened(self.caller)

    @property
    def only_waits(self) -> bool:
        """Whether the request waits for tasks or news only: its end leaves nothing in doubt."""
        return bool(self.caller.pulls or self.caller.subscribers or self.on_end is not None)

    # --- the handler's ---------------------------------------------------------------------------

    def ask(
        self,
        act: Callable[[int], None],
        render: Render | None = None,
        number: int | None = None,
    ) -> asyncio.Future[Any]:
        """Call an operation with a request number; returns a future of its answer, as ``render``
        makes it. Raises what the operation raises; the future raises what it answers."""
        operations = self.operations
        if self.ended is not None:
            raise self.ended
        if operations.is_behind(self.caller):
            raise Overloaded("too many answers wait for the store (replies_all_bytes_max)")
        if number is None:
            number = self._number = self._number + 1
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = (future, render)
        operations.begin()
        try:
            act(number)
        except TickwheelError:
            del self._waiting[number]
            raise
        except Exception as error:
            del self._waiting[number]
            what = f"a request over HTTP from {self.caller.address}"
            raise operations.contain(what, error) from error
        finally:
            operations.handled()
        return future

    def settle(self, number: int, value: object) -> None:
        """Complete an answer that came from a sink of deliveries."""
        found = self._waiting.pop(number, None)
        if found is not None and not found[0].done():
            found[0].set_result(value)

    def end(self, error: TickwheelError) -> None:
        """End the exchange: the daemon does not serve it any more."""
        self.ended = error
        waiting, self._waiting = self._waiting, {}
        for future, _ in waiting.values():
            if not future.done():
                future.set_exception(error)
        if self.on_end is not None:
            self.on_end(error)

    # --- the shard's -----------------------------------------------------------------------------

    @property
    def label(self) -> str:
        return self.caller.label

    def accepted(self, answers: Sequence[StoredAnswer]) -> None:
        for request, first, count, accepted_ms in answers:
            self._answer(request, (accepted_ms, first, count))

    def answer_to(self, request: int, value: object) -> Sized:
        found = self._waiting.get(request)
        if found is None or found[1] is None:
            return _Rendered(request, value)
        try:
            return _Rendered(request, found[1](value))
        except Exception as error:
            what = f"the answer to a request over HTTP from {self.caller.address}"
            return _Rendered(request, self.operations.survive(what, error))

    def give(self, answer: Any) -> None:
        self._answer(answer.request, answer.value)

    def error(self, request: int, code: str, message: str) -> None:
        kind = BY_CODE.get(code, InternalError)
        self._answer(request, kind(message))

    def flush(self) -> None:
        """Do nothing: each answer has left by itself."""

    def _answer(self, request: int, value: object) -> None:
        found = self._waiting.pop(request, None)
        if found is None or found[0].done():
            return
        if isinstance(value, TickwheelError):
            found[0].set_exception(value)
        else:
            found[0].set_result(value)
