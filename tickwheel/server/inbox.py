"""Controls the process that takes tasks from an inbox (``tickwheel/inbox/process.py``) while this
daemon leads. It is the setting ``inbox`` that has the URL of the inbox."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tickwheel.server.companion import Companion
from tickwheel.server.shard.callers import INBOX

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from tickwheel.server.access.logins import Logins
    from tickwheel.server.roles import Roles

TOTALS: Final = ("taken", "refused")


class InboxProcess(Companion):
    """The process of one inbox. Call ``serve`` when this daemon begins to lead, ``stand_by`` when
    it stops leading, and ``stop`` at the end."""

    def __init__(
        self,
        inbox: str,
        logins: Logins,
        roles: Roles,
        *,
        url: Callable[[], str | None],
        connection: Callable[[], asyncio.Protocol],
    ) -> None:
        super().__init__("inbox", INBOX, logins, roles, url=url, connection=connection)
        self._inbox = inbox
        self._state: dict[str, Any] = {}

    def serve(self) -> None:
        """Begin to take tasks."""
        self._is_wanted = True
        self._begin()

    def _greet(self, login: Mapping[str, str]) -> None:
        self._write({**login, "inbox": self._inbox})

    def _handle_line(self, line: Mapping[str, Any]) -> None:
        if "failed" in line:
            self._roles.on_event("inbox_trouble", str(line["failed"]))
            return
        state = dict(line["state"])
        for name in TOTALS:
            self._totals[name] += state[name] - self._state.get(name, 0)
        before, after = self._state.get("trouble"), state["trouble"]
        self._state = state
        if after != before:
            event = "inbox_works_again" if after is None else "inbox_trouble"
            self._roles.on_event(event, after or "rows are taken")

    def _ended(self, reason: str) -> None:
        self._state = {}

    # --- for metrics -----------------------------------------------------------------------------

    @property
    def delay_s(self) -> float:
        """Seconds from writing the oldest row of the last batch until it was stored."""
        return float(self._state.get("delay_s", 0.0))

    @property
    def is_waiting(self) -> bool:
        """Whether rows are not taken now; not while another taker works or another daemon leads."""
        return self._is_wanted and (not self._state or self._state["trouble"] is not None)
