"""Controls the outbound process, which sends the tasks of groups with targets
(``tickwheel/outbound/process.py``).

The process is started for the first target or test request, restarted when it ends, and stopped
when this daemon stops leading. It connects to the daemon as an ordinary client, with a secret that
is created at each start. It receives the secret and the targets on its standard input. A daemon
that uses TLS or does not listen opens a loopback port for it; clients of that port must
authenticate as usual.
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
from tickwheel.server.settings import local_host, split_address

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import Callable, Mapping

    from tickwheel.server.access.logins import Logins
    from tickwheel.server.roles import Roles
    from tickwheel.server.settings import Settings
    from tickwheel.server.shard.operations import Operations
    from tickwheel.server.shard.shard import Shard

COMMAND: Final = (sys.executable, "-m", "tickwheel.outbound.process")
LINE_BYTES_MAX: Final = 16 * 1024 * 1024
RESTART_S: Final = 0.2
RESTART_MAX_S: Final = 5.0
"""Minimum and maximum seconds before a restart. The pause doubles if the process ends soon."""
HEALTHY_S: Final = 10.0
"""Seconds after which the running process counts as healthy, which resets the pause."""
STOP_S: Final = 5.0
"""Maximum seconds to wait for requests in progress when the daemon stops."""
ANSWER_S: Final = 60.0
"""Seconds to wait for an answer of the process."""
ASKED_MAX: Final = 64
"""Maximum unanswered questions to the process: test requests, resends and logs."""
TOTALS: Final = ("sent", "acked", "failed")
_numbers = count(1)


class Outbound:
    """The outbound process. Call ``serve`` when this daemon begins to lead, ``stand_by`` when it
    stops leading, and ``stop`` at the end."""

    def __init__(
        self,
        settings: Settings,
        logins: Logins,
        roles: Roles,
        *,
        url: Callable[[], str | None],
        get_callback_url: Callable[[], str | None],
        connection: Callable[[], asyncio.Protocol],
    ) -> None:
        """``url`` returns the daemon's address, and ``get_callback_url`` the URL for callbacks of
        endpoints; ``connection`` creates a protocol for the daemon's port."""
        self._settings = settings
        self._logins = logins
        self._roles = roles
        self._url, self._get_callback_url = url, get_callback_url
        self._make_connection = connection
        self._shard: Shard | None = None
        self._operations: Operations | None = None
        self._loopback_server: asyncio.Server | None = None
        """The loopback port, if it is needed."""
        self._work: asyncio.Task[None] | None = None
        self._endings: set[asyncio.Task[None]] = set()
        """Tasks that wait for the end of killed processes."""
        self._process: Process | None = None
        self._sent_targets: dict[tuple[str, str], TargetRow] = {}
        """Targets that were sent to the process."""
        self._states: dict[tuple[str, str], dict[str, Any]] = {}
        self._questions: dict[int, tuple[Mapping[str, Any], asyncio.Future[dict[str, Any]]]] = {}
        """Unanswered questions, each with the future of its answer."""
        self._totals = dict.fromkeys(TOTALS, 0)
        """Counts of all targets and processes since the start, including removed targets."""
        self._state_counts: Counter[str] = Counter()
        """Number of targets in each state."""
        self.restarts = 0

    # --- roles -----------------------------------------------------------------------------------

    def serve(self, shard: Shard, operations: Operations) -> None:
        """Begin to send the tasks of a shard."""
        self._shard, self._operations = shard, operations
        shard.outbound = self
        self.changed()

    def stand_by(self) -> None:
        """Stop sending immediately, because another daemon may lead."""
        self._shard = self._operations = None
        self._logins.outbound_secret = b""
        process, self._process = self._process, None
        kill(process)
        if self._work is not None:
            self._work.cancel()
            self._endings.add(self._work)
            self._work.add_done_callback(self._endings.discard)
            self._work = None
        self._forget_process("the daemon is no longer active")

    async def stop(self) -> None:
        """Wait up to ``STOP_S`` for requests in progress, then end the process."""
        process = self._process
        self._operations = None  # prevents a restart
        if process is not None:
            self._write({"stop": True})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await process.wait()
        self.stand_by()
        await asyncio.gather(*self._endings, return_exceptions=True)
        if self._loopback_server is not None:
            self._loopback_server.close()

    # --- for the operations ----------------------------------------------------------------------

    @property
    def callback_url(self) -> str | None:
        """URL for callbacks of endpoints; None if this daemon has no HTTP server."""
        return self._get_callback_url()

    def changed(self) -> None:
        """Send changed and removed targets to the process."""
        wanted = self._wanted()
        if self._process is None:
            if wanted:
                self._begin()
            return
        for key in self._sent_targets.keys() - wanted.keys():
            self._forget(key)
            self._write({"remove": key})
        for key, row in wanted.items():
            if self._sent_targets.get(key) != row:
                self._forget(key)
                self._sent_targets[key] = row
                self._write({"set": row_map(row)})

    def _wanted(self) -> dict[tuple[str, str], TargetRow]:
        shard = self._shard
        targets = {} if shard is None else shard.core.targets
        return {key: row for key, row in targets.items() if row.ended_ms is None}

    def _forget(self, key: tuple[str, str]) -> None:
        self._sent_targets.pop(key, None)
        self._state_counts[self._states.pop(key, {}).get("state", "")] -= 1

    def _note(self, key: tuple[str, str], state: dict[str, Any]) -> None:
        """Record the state of a target and update the counts."""
        before = self._states.get(key, {})
        for name in TOTALS:
            self._totals[name] += state.get(name, 0) - before.get(name, 0)
        self._state_counts[before.get("state", "")] -= 1
        self._state_counts[state.get("state", "")] += 1
        self._states[key] = state

    def state(self, topic: str, group: str) -> Mapping[str, Any]:
        """Return the last reported state of a target."""
        return self._states.get((topic, group), {"state": "starting"})

    async def ask(self, what: str, **fields: Any) -> dict[str, Any]:
        """Return the answer of the process to a question. Raise TickwheelError on failure."""
        if len(self._questions) >= ASKED_MAX:
            raise Overloaded(
                f"{len(self._questions)} questions to the outbound process are unanswered; the"
                f" limit is {ASKED_MAX} (ASKED_MAX)"
            )
        number = next(_numbers)
        line = {"ask": number, "what": what, "said": fields}
        answer = asyncio.get_running_loop().create_future()
        self._questions[number] = line, answer
        self._write(line)  # a starting process gets the question later
        self._begin()
        try:
            async with asyncio.timeout(ANSWER_S):
                result: dict[str, Any] = await answer
                return result
        except TimeoutError:
            raise Refused(f"the outbound process did not answer within {ANSWER_S:g} s") from None
        finally:
            del self._questions[number]

    # --- for metrics -----------------------------------------------------------------------------

    def total(self, name: str) -> int:
        """Return how many attempts of all targets were ``sent``, ``acked`` or ``failed`` since the
        daemon started."""
        return self._totals[name]

    def count(self, state: str) -> int:
        """Return the number of targets in a state, or of all targets for ""."""
        shard = self._shard
        rows = {} if shard is None else shard.core.targets
        if state == "":
            return len(rows)
        if state == "ended":
            return sum(row.ended_ms is not None for row in rows.values())
        return self._state_counts[state]

    # --- the process -----------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._work is None and self._operations is not None:
            self._work = asyncio.get_running_loop().create_task(self._run_repeatedly())

    async def _run_repeatedly(self) -> None:
        pause_s, loop = RESTART_S, asyncio.get_running_loop()
        while self._operations is not None:
            began_s = loop.time()
            try:
                ended = f"exit code {await self._run()}"
            except OSError as error:
                ended = f"the process cannot be started: {error.strerror}"
            except ValueError:  # a killed process can leave a partial line
                ended = "the output of the process was invalid"
            self._forget_process("the outbound process has ended")
            if self._operations is None:
                return
            self.restarts += 1
            self._roles.on_event("outbound_ended", f"{ended}; restarting the process")
            pause_s = (
                RESTART_S if loop.time() - began_s > HEALTHY_S else min(RESTART_MAX_S, 2 * pause_s)
            )
            await asyncio.sleep(pause_s)

    async def _run(self) -> int:
        """Run the process once and return its exit code. Raise OSError if it cannot be started, or
        ValueError for invalid output."""
        url, secret = await self._address(), secrets.token_urlsafe(32)
        self._logins.outbound_secret = secret.encode()
        process = await start_process(COMMAND, answers=True, line_bytes_max=LINE_BYTES_MAX)
        try:
            self._process = process
            networks = self._settings.push_networks
            config = {"url": url, "token": secret, "allow": networks}
            self._write(config | {"callbacks": self.callback_url})
            self.changed()
            for question, _ in self._questions.values():
                self._write(question)
            assert process.stdout is not None
            async for line in process.stdout:
                self._handle_line(json.loads(line))
            code: int = await process.wait()
            return code
        finally:
            if self._process is process:  # otherwise it was already killed
                self._process = None
                kill(process)
            await _wait_until_ended(process)

    async def _address(self) -> str:
        """Return the URL at which the process connects to this daemon."""
        bound = self._url() or ""
        if bound.startswith("tcp://"):
            host, port = split_address(bound, "listen")
            host = local_host(host)
            return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        if self._loopback_server is None:
            loop = asyncio.get_running_loop()
            self._loopback_server = await loop.create_server(self._make_connection, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._loopback_server.sockets[0].getsockname()[1]}"

    def _write(self, line: Mapping[str, Any]) -> None:
        process = self._process
        if process is not None and process.stdin is not None and not process.stdin.is_closing():
            process.stdin.write(json.dumps(line).encode() + b"\n")

    def _handle_line(self, line: Mapping[str, Any]) -> None:
        if "state" in line:
            topic, group, state = line["state"]
            if (topic, group) in self._sent_targets:
                self._note((topic, group), state)
        elif "ended" in line:
            if self._operations is not None:
                self._operations.targeting.end(*line["ended"])
                self.changed()
        elif "answer" in line:
            _, answer = self._questions.get(line["answer"], (None, None))
            if answer is None or answer.done():
                return
            if "error" in line:
                answer.set_exception(from_wire(*line["error"]))
            else:
                answer.set_result(line["value"])

    def _forget_process(self, reason: str) -> None:
        """Forget the state of the process and fail its unanswered questions."""
        for key in list(self._sent_targets):
            self._forget(key)
        for _, answer in self._questions.values():
            if not answer.done():
                answer.set_exception(Refused(f"{reason}; try again soon"))


async def _wait_until_ended(process: Process) -> None:
    """Wait up to ``STOP_S`` until a killed process has ended, because the loop can close
    afterwards. asyncio reports its end only after its output was read."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STOP_S):
            assert process.stdout is not None
            await process.stdout.read()
            await process.wait()


def row_map(row: TargetRow) -> dict[str, Any]:
    """Return a target in the form that the process receives."""
    names = ("topic", "group", "kind", "url", "secrets", "since_ms")
    return {name: getattr(row, name) for name in names} | {"options": dict(row.options)}
