"""Tasks as a stream of lines (NDJSON): each line is a task, and is answered by a line.

Lines that came together are one request to the operations; the next ones are read while those are
committed. The answers come in the order of the lines. When a line of a request is refused, its
lines are asked for one by one, so that each has its own answer. Nothing waits for the end: a client
may send for hours, and reads as it goes.

Bounded: ``LINES_MAX`` lines a request and ``UNDER_WAY_MAX`` requests of which the answers are not
written; a client that does not read its answers is not read from any more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from tickwheel.errors import BadRequest, BodyTooLarge, ConnectionLost, TickwheelError
from tickwheel.server.http import types
from tickwheel.server.http.call import decoded
from tickwheel.server.http.encode import as_json
from tickwheel.server.http.new_tasks import kept
from tickwheel.server.http.problems import line as problem_line

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tickwheel.server.http.call import Call
    from tickwheel.server.http.new_tasks import Given, Reader

NDJSON = "application/x-ndjson"
LINES_MAX = 500
"""Lines of one request to the operations."""
SLICE_BYTES = 32 * 1024
"""Bytes of lines that are decoded at a time: the loop has tasks to deliver, too."""
UNDER_WAY_MAX = 4
_decoder = msgspec.json.Decoder(types.NewTask)
_Future = asyncio.Future[Any]
Line = tuple[int, "Given | None"]
"""The number of a line, and its task; None: it is no task."""


class Bulk:
    """One request with a stream of lines."""

    def __init__(self, call: Call, reader: Reader) -> None:
        self._call = call
        self._reader = reader
        self._line_bytes_max = call.operations.settings.http_body_bytes
        self._under_way: deque[tuple[list[Line], _Future | TickwheelError]] = deque()
        self._rest = b""
        self._read = 0
        """How many lines were looked at, empty ones included."""

    async def run(self) -> None:
        """Read and answer lines until the client has sent the last one, or one cannot be read."""
        call = self._call
        await call.begin(NDJSON.encode(), 200)
        failed: TickwheelError | None = None
        try:
            async for part in call.incoming.parts():
                await self._take(part)
            if self._rest.strip():
                await self._lines(self._rest)
        except ConnectionLost:
            self._forget()
            raise
        except TickwheelError as error:
            failed = error
        await self._answer_all()
        next_line = self._read + 1
        last = (
            b"" if failed is None else as_json({"error": problem_line(failed, next_line)}) + b"\n"
        )
        await call.piece(last, more=False)

    async def _take(self, part: bytes) -> None:
        end = part.rfind(b"\n") + 1
        if not end:
            self._rest += part
            if len(self._rest) > self._line_bytes_max:
                raise BodyTooLarge(
                    f"a line has {len(self._rest)} bytes or more; the limit is"
                    f" {self._line_bytes_max} (http_body_bytes_max)"
                )
            return
        data = self._rest + part[:end] if self._rest else part[:end]
        self._rest = part[end:]
        start = 0
        while start < len(data):
            stop = data.rfind(b"\n", start, start + SLICE_BYTES) + 1
            if not stop:
                stop = data.index(b"\n", start) + 1
            await self._lines(data[start:stop])
            start = stop
            await asyncio.sleep(0)

    async def _lines(self, data: bytes) -> None:
        """Take whole lines, in as many requests to the operations as are needed."""
        first = self._read + 1
        count = self._read_on(data)
        try:
            found: Iterable[types.NewTask] = _decoder.decode_lines(data)
            given = [self._reader.task(task, task.topic) for task in found]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TickwheelError):
            await self._one_by_one(data, first)
            return
        # Some may be empty.
        numbers = range(first, first + count) if len(given) == count else _numbers(data, first)
        lines: list[Line] = list(zip(numbers, given, strict=True))
        for start in range(0, len(lines), LINES_MAX):
            await self._put(lines[start : start + LINES_MAX])

    def _read_on(self, data: bytes) -> int:
        """Count the lines of ``data``; returns how many there are."""
        count = data.count(b"\n") + (not data.endswith(b"\n"))
        self._read += count
        return count

    async def _one_by_one(self, data: bytes, first: int) -> None:
        """Take lines one by one, because some are wrong and the others are not."""
        good: list[Line] = []
        for number, line in enumerate(data.split(b"\n"), first):
            if not line.strip():
                continue
            try:
                task = decoded(line, _decoder)
                good.append((number, self._reader.task(task, task.topic)))
                if len(good) < LINES_MAX:
                    continue
                wrong = None
            except BadRequest as error:
                wrong = error
            if good:
                await self._put(good)
            if wrong is not None:
                await self._add([(number, None)], wrong)
            good = []
        if good:
            await self._put(good)

    async def _put(self, lines: list[Line]) -> None:
        """Enqueue the tasks of these lines, together if possible."""
        answer = self._ask(lines)
        if isinstance(answer, TickwheelError) and len(lines) > 1 and not answer.retryable:
            for one in lines:
                await self._add([one], self._ask([one]))
        else:
            await self._add(lines, answer)

    def _ask(self, lines: list[Line]) -> _Future | TickwheelError:
        call = self._call
        operations, exchange, now = call.operations, call.exchange, call.now
        tasks = tuple(one.task for _, one in lines if one is not None)
        try:
            return exchange.ask(
                lambda number: operations.enqueue(exchange.caller, number, 0, tasks, now)
            )
        except TickwheelError as error:
            return error

    async def _add(self, lines: list[Line], answer: _Future | TickwheelError) -> None:
        self._under_way.append((lines, answer))
        while len(self._under_way) >= UNDER_WAY_MAX or self._first_is_known():
            await self._answer_first()

    def _first_is_known(self) -> bool:
        if not self._under_way:
            return False
        answer = self._under_way[0][1]
        return isinstance(answer, TickwheelError) or answer.done()

    async def _answer_all(self) -> None:
        while self._under_way:
            await self._answer_first()

    async def _answer_first(self) -> None:
        lines, answer = self._under_way.popleft()
        try:
            if isinstance(answer, TickwheelError):
                raise answer
            found = kept(await answer, [one for _, one in lines if one is not None])
        except TickwheelError as error:
            said = [as_json({"error": problem_line(error, number)}) for number, _ in lines]
            await self._call.piece(b"\n".join(said) + b"\n")
            return
        await self._call.piece(b"\n".join(found.lines()) + b"\n")

    def _forget(self) -> None:
        """Drop answers that nobody waits for any more."""
        for _, answer in self._under_way:
            if isinstance(answer, asyncio.Future):
                answer.cancel()
        self._under_way.clear()


def _numbers(data: bytes, first: int) -> list[int]:
    """The numbers of the lines that are not empty."""
    lines = enumerate(data.split(b"\n"), first)
    return [number for number, line in lines if line.strip()]
