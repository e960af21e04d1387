"""What the history has of tasks, looked up by a process of its own (``history/read.py``).

There is one such process. It is started with the first question, keeps for a while, and ends with
this daemon's tenure; one that dies or does not answer is replaced. It is asked one question at a
time: who may ask, and how many wait, is said by the shard's ``lookups``. Nothing of the history is
looked through here: an answer is bounded, and read as it came.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from tickwheel.errors import Overloaded
from tickwheel.history import read
from tickwheel.history.daemon import dismiss, kill, start_process
from tickwheel.history.read import S_MAX
from tickwheel.model.records import id_time_ms

if TYPE_CHECKING:
    from asyncio.subprocess import Process

    from tickwheel.history.read import Answer, TaskQuery

PATIENCE_S: Final = 3 * S_MAX
"""After so many seconds without an answer the process is killed: its disk may hang for ever."""
IDLE_S: Final = 60.0
"""How long, in seconds, the process is kept after its last answer."""
STOP_S: Final = 1.0
"""After so many seconds a killed process that waits for a disk is left behind."""
TRIES_MAX: Final = 2


class Stories:
    """The look-ups of one tenure; the caller asks one at a time."""

    def __init__(self, folder: str | None) -> None:
        """``folder``: the folder of the history; None: there is none."""
        self._folder = folder
        self._process: Process | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._endings: set[asyncio.Task[int]] = set()
        self._is_over = False

    @property
    def is_kept(self) -> bool:
        """Whether a history is kept."""
        return self._folder is not None

    async def of(self, task_id: int) -> Answer:
        """The events of a task in their order. Raises Overloaded when no process answers."""
        return await self._answer(read.story_question(task_id, id_time_ms(task_id)))

    async def tasks(self, wanted: TaskQuery, limit: int) -> Answer:
        """Outlines of tasks, newest first. Raises Overloaded when no process answers."""
        return await self._answer(read.tasks_question(wanted, limit))

    async def _answer(self, question: bytes) -> Answer:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        why = ""
        for _ in range(TRIES_MAX):
            try:
                async with asyncio.timeout(PATIENCE_S):
                    answer = await self._ask(question)
            except (OSError, ValueError, TimeoutError) as error:
                why = str(error) or type(error).__name__
                self._end()
            except BaseException:
                self._end()  # its answer would be taken for that of the next question
                raise
            else:
                self._timer = asyncio.get_running_loop().call_later(IDLE_S, self._end)
                return answer
        raise Overloaded(f"the process that reads the history does not answer: {why}; try again")

    async def _ask(self, question: bytes) -> Answer:
        """The process's answer to a question. Raises OSError, ValueError."""
        if self._process is None:
            assert self._folder is not None
            command = read.lookup_command(self._folder)
            self._process = await start_process(
                command, answers=True, line_bytes_max=read.ANSWER_BYTES_MAX
            )
            if self._is_over:
                raise OSError("the daemon stops")
        writer, reader = self._process.stdin, self._process.stdout
        assert writer is not None and reader is not None
        writer.write(question)
        await writer.drain()
        return read.answer_of(await reader.readline())

    def _end(self) -> None:
        ended, self._process = self._process, None
        if ended is not None:
            dismiss(ended)
            kill(ended)
            ending = asyncio.create_task(ended.wait())
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)

    async def stop(self) -> None:
        """End the process at the end of the tenure, and wait for its end."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        self._end()
        if self._endings:
            await asyncio.wait(self._endings, timeout=STOP_S)
