"""Controls the outbound process, which sends the tasks of groups with targets
(``tickwheel/outbound/process.py``).

The process is started for the first target or test request. It receives the targets on its
standard input.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from tickwheel.errors import Overloaded, Refused, from_wire
from tickwheel.model.kinds import TargetRow
from tickwheel.server.companion import Companion
from tickwheel.server.shard.callers import OUTBOUND

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tickwheel.server.access.logins import Logins
    from tickwheel.server.roles import Roles
    from tickwheel.server.settings import Settings
    from tickwheel.server.shard.operations import Operations
    from tickwheel.server.shard.shard import Shard

ANSWER_S: Final = 60.0
"""Seconds to wait for an answer of the process."""
ASKED_MAX: Final = 64
"""Maximum unanswered questions to the process: test requests, resends and logs."""
TOTALS: Final = ("sent", "acked", "failed")
_numbers = count(1)


class Outbound(Companion):
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
        """``get_callback_url`` returns the URL for callbacks of endpoints."""
        super().__init__("outbound", OUTBOUND, logins, roles, url=url, connection=connection)
        self._settings = settings
        self._get_callback_url = get_callback_url
        self._shard: Shard | None = None
        self._operations: Operations | None = None
        self._sent_targets: dict[tuple[str, str], TargetRow] = {}
        """Targets that were sent to the process."""
        self._states: dict[tuple[str, str], dict[str, Any]] = {}
        self._questions: dict[int, tuple[Mapping[str, Any], asyncio.Future[dict[str, Any]]]] = {}
        """Unanswered questions, each with the future of its answer."""
        self._state_counts: Counter[str] = Counter()
        """Number of targets in each state."""

    # --- roles -----------------------------------------------------------------------------------

    def serve(self, shard: Shard, operations: Operations) -> None:
        """Begin to send the tasks of a shard."""
        self._shard, self._operations, self._is_wanted = shard, operations, True
        shard.outbound = self
        self.changed()

    def stand_by(self) -> None:
        """Stop sending immediately, because another daemon may lead."""
        self._shard = self._operations = None
        super().stand_by()

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

    def _greet(self, login: Mapping[str, str]) -> None:
        config = {"allow": self._settings.push_networks, "callbacks": self.callback_url}
        self._write({**login, **config})
        self.changed()
        for question, _ in self._questions.values():
            self._write(question)

    def _handle_line(self, line: Mapping[str, Any]) -> None:
        if "state" in line:
            topic, group, state = line["state"]
            if (topic, group) in self._sent_targets:
                self._note((topic, group), state)
        elif "ended" in line:
            if self._is_wanted and self._operations is not None:
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

    def _ended(self, reason: str) -> None:
        """Forget the state of the process and fail its unanswered questions."""
        for key in list(self._sent_targets):
            self._forget(key)
        for _, answer in self._questions.values():
            if not answer.done():
                answer.set_exception(Refused(f"{reason}; try again soon"))


def row_map(row: TargetRow) -> dict[str, Any]:
    """Return a target in the form that the process receives."""
    names = ("topic", "group", "kind", "url", "secrets", "since_ms")
    return {name: getattr(row, name) for name in names} | {"options": dict(row.options)}
