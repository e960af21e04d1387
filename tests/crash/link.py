"""A bare connection for clients that misbehave: frames in, frames out, no manners.

Nothing is sent again, nothing is kept alive; a broken connection is ``Lost``. Numbers go on
over connections, because the daemon knows a session's requests by them.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tickwheel.api.frames import PROTOCOL_VERSION, FrameType
from tickwheel.errors import NotActive, TickwheelError
from tickwheel.protocol import Decoder, Frame, encode

ANSWER_TIMEOUT_S = 10.0
HELLO_TIMEOUT_S = 3.0
TRY_AGAIN_S = 0.05
FRAME_BYTES_MAX = 64 * 1024 * 1024

_names = itertools.count()
_order = itertools.count(1)


class Lost(Exception):
    """The connection broke, or was never made: no answer will come on it."""


class Elsewhere(Lost):
    """A standby's greeting that names the port of who leads."""

    def __init__(self, port: int) -> None:
        super().__init__(f"it stands by for {port}")
        self.port = port


class Unanswered(AssertionError):
    """The daemon is there and does not answer."""


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Numbers:
    """Ascending request numbers of one client."""

    def __init__(self) -> None:
        self.last = 0

    def next(self) -> int:
        self.last += 1
        return self.last


class Link:
    """One connection; ``Link.open`` makes it. ``epoch`` is that of the daemon behind it."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        numbers: Numbers,
        delivered: Callable[[Link, Frame], None] | None,
    ) -> None:
        self.name = next(_names)
        self.opened_ms = now_ms()
        self.epoch = 0
        self.answer_timeout_s = ANSWER_TIMEOUT_S
        self.numbers = numbers
        self._reader = reader
        self._writer = writer
        self._delivered = delivered
        self.orders: dict[int, int] = {}
        """By request number: the place of its answer among all that was received."""
        self._answers: dict[int, asyncio.Future[Frame]] = {}
        self._asked: dict[int, str] = {}
        """Unanswered requests by number."""
        self._down = False
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def open(
        cls,
        port: int,
        numbers: Numbers,
        *,
        session: bytes | None = None,
        delivered: Callable[[Link, Frame], None] | None = None,
        any_role: bool = False,
        shard: int | None = None,
    ) -> Link:
        """One try. Raises Lost, also when the daemon only stands by. ``shard``: the daemon has to
        be that one of several."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError as error:
            raise Lost(str(error)) from error
        link = cls(reader, writer, numbers, delivered)
        fields = {"v": PROTOCOL_VERSION, "session": session, "token": None, "client": "torture"}
        fields |= {} if shard is None else {"shard": shard}
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                answer = await link.call(FrameType.HELLO, fields)
        except TimeoutError as error:  # accepted by a daemon that is on its way down
            link.abort()
            raise Lost("no answer to HELLO") from error
        except BaseException:  # whoever asked is cancelled, at the end of a run
            link.abort()
            raise
        if answer[0] != FrameType.OK:
            link.abort()
            raise Lost(f"HELLO: {answer}")
        if answer[2]["role"] != "active" and not any_role:
            link.abort()
            active = answer[2].get("active")
            raise Elsewhere(int(active.rpartition(":")[2])) if active else Lost("it stands by")
        link.epoch = answer[2]["epoch"]
        return link

    @property
    def down(self) -> bool:
        return self._down

    @staticmethod
    def order() -> int:
        """Return the next position in the order of received frames of this process."""
        return next(_order)

    def send(self, kind: int, *fields: Any) -> asyncio.Future[Frame]:
        return self.send_as(self.numbers.next(), kind, *fields)

    def send_as(self, number: int, kind: int, *fields: Any) -> asyncio.Future[Frame]:
        """With a request number of the caller's; the future of its OK or ERROR."""
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(_seen)
        if self._down or self._writer.is_closing():
            answer.set_exception(Lost("down"))
            return answer
        self._answers[number] = answer
        self._asked[number] = FrameType(kind).name
        self._writer.write(encode((int(kind), number, *fields)))
        return answer

    async def call(self, kind: int, *fields: Any) -> Frame:
        """The OK or ERROR. Raises Lost; Unanswered when the daemon stays silent."""
        return await self.wait(self.send(kind, *fields))

    async def wait(self, answer: asyncio.Future[Frame]) -> Frame:
        try:
            # Python 3.11's wait_for may swallow a cancellation: who is to end would go on.
            async with asyncio.timeout(self.answer_timeout_s):
                return await answer
        except TimeoutError:
            raise Unanswered(
                f"no answer within {self.answer_timeout_s} s: connection {self.name} of"
                f" {self.opened_ms}, epoch {self.epoch}, waiting for {sorted(self._asked.items())}"
            ) from None

    def abort(self) -> None:
        """Gone, without reading what may have arrived."""
        self._fail(Lost("aborted"))
        self._writer.transport.abort()
        self._reading.cancel()

    def _fail(self, error: Exception) -> None:
        self._down = True
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if not answer.done():
                answer.set_exception(error)

    async def _read(self) -> None:
        decoder = Decoder(FRAME_BYTES_MAX)
        error: Exception = Lost("closed by the daemon")
        with suppress(OSError):
            while data := await self._reader.read(1 << 16):
                try:
                    frames = decoder.feed(data)
                except TickwheelError as problem:
                    error = AssertionError(f"the daemon sent no frames: {problem}")
                    break
                for frame in frames:
                    self._take(frame)
        self._fail(error)
        self._writer.close()

    def _take(self, frame: Frame) -> None:
        told = (FrameType.DELIVER, FrameType.ENDED, FrameType.CHECK)
        if frame[0] in told and self._delivered is not None:
            self._delivered(self, frame)
        elif frame[0] == FrameType.ERROR and frame[2] == NotActive.code:
            self.abort()  # deposed: whatever it was asked is for another daemon now
        elif frame[0] in (FrameType.OK, FrameType.ERROR):
            self.orders[frame[1]] = self.order()
            answer = self._answers.pop(frame[1], None)
            self._asked.pop(frame[1], None)
            if answer is not None and not answer.done():
                answer.set_result(frame)


def _seen(answer: asyncio.Future[Frame]) -> None:
    """Whoever waits gets the exception too; this keeps the unwaited ones quiet."""
    if not answer.cancelled():
        answer.exception()
