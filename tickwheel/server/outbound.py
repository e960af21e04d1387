"""The daemon's end of the process that sends the tasks of groups with targets
(``tickwheel/outbound/process.py``).

The process is started when there is a target, or somebody asks for a try; it is started again when
it ends, and ends with this daemon's tenure. It comes to this daemon as an ordinary client, with a
secret that is made for each start and handed over on its standard input, and so does what it is
told of targets. A daemon that speaks TLS, or listens nowhere, opens a port on the loopback for it;
who comes there has to show what everybody has to show.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import sys
from collections import Counter
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from tickwheel.errors import Overloaded, Refused, from_wire
from tickwheel.history.daemon import kill, start_process
from tickwheel.model.kinds import TargetRow
from tickwheel.server.settings import found_here, split_address

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import Callable, Mapping

    from tickwheel.server.logins import Logins
    from tickwheel.server.roles import Roles
    from tickwheel.server.settings import Settings
    from tickwheel.server.shard.operations import Operations
    from tickwheel.server.shard.shard import Shard

COMMAND: Final = (sys.executable, "-m", "tickwheel.outbound.process")
LINE_BYTES_MAX: Final = 16 * 1024 * 1024
RESTART_S: Final = 0.2
RESTART_MAX_S: Final = 5.0
"""Seconds before the process is started again, doubled up to the most while it ends at once."""
LASTS_S: Final = 10.0
"""A process that has lived so long, in seconds, was well."""
STOP_S: Final = 5.0
"""How long, in seconds, requests under way may take at a stop of the daemon."""
ANSWER_S: Final = 60.0
"""How long, in seconds, an answer of the process is waited for."""
ASKED_MAX: Final = 64
"""Questions to the process that are not answered: tries, requests sent once more, logs."""
TOTALS: Final = ("sent", "acked", "failed")
_numbers = count(1)


class Outbound:
    """``serve`` with each tenure, ``stand_by`` at its end, ``stop`` once."""

    def __init__(
        self,
        settings: Settings,
        logins: Logins,
        roles: Roles,
        *,
        url: Callable[[], str | None],
        callbacks: Callable[[], str | None],
        connection: Callable[[], asyncio.Protocol],
    ) -> None:
        """``url``: where the daemon listens; ``callbacks``: where callbacks of endpoints go to;
        ``connection`` makes a protocol for the daemon's port."""
        self._settings = settings
        self._logins = logins
        self._roles = roles
        self._url, self._callbacks = url, callbacks
        self._connection = connection
        self._shard: Shard | None = None
        self._operations: Operations | None = None
        self._own: asyncio.Server | None = None
        """The port on the loopback, where one is needed."""
        self._work: asyncio.Task[None] | None = None
        self._endings: set[asyncio.Task[None]] = set()
        """Works of former tenures, whose processes are killed and not gone yet."""
        self._process: Process | None = None
        self._told: dict[tuple[str, str], TargetRow] = {}
        """The targets of which the process knows."""
        self._states: dict[tuple[str, str], dict[str, Any]] = {}
        self._asked: dict[int, tuple[Mapping[str, Any], asyncio.Future[dict[str, Any]]]] = {}
        """Questions that have no answer yet, and whom it is for."""
        self._totals = dict.fromkeys(TOTALS, 0)
        """What all targets have counted, also those that are gone, and processes before this."""
        self._in_state: Counter[str] = Counter()
        """How many targets are in each state."""
        self.restarts = 0

    # --- tenures ---------------------------------------------------------------------------------

    def serve(self, shard: Shard, operations: Operations) -> None:
        """Begin to send for a shard."""
        self._shard, self._operations = shard, operations
        shard.outbound = self
        self.changed()

    def stand_by(self) -> None:
        """Send nothing more, at once: another daemon may lead."""
        self._shard = self._operations = None
        self._logins.own = b""
        process, self._process = self._process, None
        kill(process)
        if self._work is not None:
            self._work.cancel()
            self._endings.add(self._work)
            self._work.add_done_callback(self._endings.discard)
            self._work = None
        self._gone("the daemon does not lead any more")

    async def stop(self) -> None:
        """Let requests under way end, for a while, then end the process."""
        process = self._process
        self._operations = None  # it is not started again
        if process is not None:
            self._write({"stop": True})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await process.wait()
        self.stand_by()
        await asyncio.gather(*self._endings, return_exceptions=True)
        if self._own is not None:
            self._own.close()

    # --- for the operations ----------------------------------------------------------------------

    @property
    def callbacks(self) -> str | None:
        """Where callbacks of endpoints go to; None: this daemon has no HTTP."""
        return self._callbacks()

    def changed(self) -> None:
        """Tell the process of targets that were set, or taken away."""
        wanted = self._wanted()
        if self._process is None:
            if wanted:
                self._begin()
            return
        for place in self._told.keys() - wanted.keys():
            self._forget(place)
            self._write({"remove": place})
        for place, row in wanted.items():
            if self._told.get(place) != row:
                self._forget(place)
                self._told[place] = row
                self._write({"set": row_map(row)})

    def _wanted(self) -> dict[tuple[str, str], TargetRow]:
        shard = self._shard
        targets = {} if shard is None else shard.core.targets
        return {place: row for place, row in targets.items() if row.ended_ms is None}

    def _forget(self, place: tuple[str, str]) -> None:
        self._told.pop(place, None)
        self._in_state[self._states.pop(place, {}).get("state", "")] -= 1

    def _note(self, place: tuple[str, str], state: dict[str, Any]) -> None:
        """Keep the state of a target, and count it."""
        before = self._states.get(place, {})
        for name in TOTALS:
            self._totals[name] += state.get(name, 0) - before.get(name, 0)
        self._in_state[before.get("state", "")] -= 1
        self._in_state[state.get("state", "")] += 1
        self._states[place] = state

    def state(self, topic: str, group: str) -> Mapping[str, Any]:
        """How a target goes."""
        return self._states.get((topic, group), {"state": "starting"})

    async def ask(self, what: str, **said: Any) -> dict[str, Any]:
        """The answer of the process to a question. Raises TickwheelError."""
        if len(self._asked) >= ASKED_MAX:
            raise Overloaded(
                f"{len(self._asked)} questions to the process that sends are not answered; the"
                f" limit is {ASKED_MAX} (ASKED_MAX)"
            )
        number = next(_numbers)
        line = {"ask": number, "what": what, "said": said}
        answer = asyncio.get_running_loop().create_future()
        self._asked[number] = line, answer
        self._write(line)  # one that is being started is asked when it is there
        self._begin()
        try:
            async with asyncio.timeout(ANSWER_S):
                found: dict[str, Any] = await answer
                return found
        except TimeoutError:
            raise Refused(f"the process that sends did not answer within {ANSWER_S:g} s") from None
        finally:
            del self._asked[number]

    # --- for metrics -----------------------------------------------------------------------------

    def total(self, name: str) -> int:
        """Attempts of all targets since the daemon began: ``sent``, ``acked`` or ``failed``."""
        return self._totals[name]

    def count(self, word: str) -> int:
        """How many targets are in a state; "": how many there are."""
        shard = self._shard
        rows = {} if shard is None else shard.core.targets
        if word == "":
            return len(rows)
        if word == "ended":
            return sum(row.ended_ms is not None for row in rows.values())
        return self._in_state[word]

    # --- the process -----------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._work is None and self._operations is not None:
            self._work = asyncio.get_running_loop().create_task(self._run_for_ever())

    async def _run_for_ever(self) -> None:
        pause_s, loop = RESTART_S, asyncio.get_running_loop()
        while self._operations is not None:
            began_s = loop.time()
            try:
                ended = f"exit code {await self._run()}"
            except OSError as error:
                ended = f"cannot be started: {error.strerror}"
            except ValueError:  # one that is killed may leave half a line
                ended = "its output could not be read"
            self._gone("the process that sends has ended")
            if self._operations is None:
                return
            self.restarts += 1
            self._roles.on_event("outbound_ended", f"{ended}; starting it again")
            pause_s = (
                RESTART_S if loop.time() - began_s > LASTS_S else min(RESTART_MAX_S, 2 * pause_s)
            )
            await asyncio.sleep(pause_s)

    async def _run(self) -> int:
        """Run the process once; its exit code. Raises OSError, ValueError for what is no line."""
        url, secret = await self._address(), secrets.token_urlsafe(32)
        self._logins.own = secret.encode()
        process = await start_process(COMMAND, answers=True, line_bytes_max=LINE_BYTES_MAX)
        try:
            self._process = process
            networks = self._settings.push_networks
            config = {"url": url, "token": secret, "allow": networks, "callbacks": self.callbacks}
            self._write(config)
            self.changed()
            for question, _ in self._asked.values():
                self._write(question)
            assert process.stdout is not None
            async for line in process.stdout:
                self._heard(json.loads(line))
            code: int = await process.wait()
            return code
        finally:
            if self._process is process:  # else it was killed before
                self._process = None
                kill(process)
            await _until_gone(process)

    async def _address(self) -> str:
        """The URL at which the process finds this daemon."""
        bound = self._url() or ""
        if bound.startswith("tcp://"):
            host, port = split_address(bound, "listen")
            host = found_here(host)
            return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        if self._own is None:
            loop = asyncio.get_running_loop()
            self._own = await loop.create_server(self._connection, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._own.sockets[0].getsockname()[1]}"

    def _write(self, line: Mapping[str, Any]) -> None:
        process = self._process
        if process is not None and process.stdin is not None and not process.stdin.is_closing():
            process.stdin.write(json.dumps(line).encode() + b"\n")

    def _heard(self, line: Mapping[str, Any]) -> None:
        if "state" in line:
            topic, group, state = line["state"]
            if (topic, group) in self._told:
                self._note((topic, group), state)
        elif "ended" in line:
            if self._operations is not None:
                self._operations.targeting.end(*line["ended"])
                self.changed()
        elif "answer" in line:
            _, answer = self._asked.get(line["answer"], (None, None))
            if answer is None or answer.done():
                return
            if "error" in line:
                answer.set_exception(from_wire(*line["error"]))
            else:
                answer.set_result(line["value"])

    def _gone(self, why: str) -> None:
        """Forget what the process knew; who waits for an answer of it gets none."""
        for place in list(self._told):
            self._forget(place)
        for _, answer in self._asked.values():
            if not answer.done():
                answer.set_exception(Refused(f"{why}; try again soon"))


async def _until_gone(process: Process) -> None:
    """Wait until a process that was killed is gone, for a while: the loop may close then. What it
    has said is read, as it does not count as gone before."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STOP_S):
            assert process.stdout is not None
            await process.stdout.read()
            await process.wait()


def row_map(row: TargetRow) -> dict[str, Any]:
    """A target as the process is told of it."""
    names = ("topic", "group", "kind", "url", "secrets", "since_ms")
    return {name: getattr(row, name) for name in names} | {"options": dict(row.options)}
