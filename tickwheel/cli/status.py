"""``status``: who is active, who stands by, and since when. Asks every address on its own."""

from __future__ import annotations

from typing import Any

from tickwheel.cli.call import EXIT_FAILED, EXIT_UNREACHABLE, Call
from tickwheel.cli.output import Grid
from tickwheel.cli.values import format_duration, format_time, printable
from tickwheel.client import Status, statuses
from tickwheel.errors import ConnectionLost, TickwheelError, Unreachable

COLUMNS = ("address", "node", "role", "state", "epoch", "since", "store")


async def status(call: Call) -> int:
    """Every daemon of --url, and the active one that a standby names: role, state, since when.

    Exit code 0 when an active one is ready (or still loading), 1 when none is, 3 when no
    address can be reached.
    """
    found = await statuses(call.url, token=call.token, name="tickwheel-cli")
    if call.out.as_json:
        for url, told in found.items():
            call.out.record(fields(url, told))
    else:
        call.out.grid(grid(found))
    return exit_code(found)


def exit_code(found: dict[str, Status | TickwheelError]) -> int:
    """For scripts: does somebody serve?"""
    if any(isinstance(told, Status) and told.serves for told in found.values()):
        return 0
    silent = all(isinstance(told, (Unreachable, ConnectionLost)) for told in found.values())
    return EXIT_UNREACHABLE if silent else EXIT_FAILED


def fields(url: str, told: Status | TickwheelError) -> dict[str, Any]:
    """One address; ``url`` is the one that was asked, ``address`` what the daemon tells others."""
    if isinstance(told, Status):
        return {"url": url, "reachable": True, **told.raw}
    return {"url": url, "reachable": False, "error": told.code, "message": told.message}


def grid(found: dict[str, Status | TickwheelError]) -> Grid:
    """A row for each address."""
    table = Grid(COLUMNS, right=frozenset(("epoch",)))
    for url, told in found.items():
        address = url.removeprefix("tcp://")
        if not isinstance(told, Status):
            reachable = not isinstance(told, (Unreachable, ConnectionLost))
            role = told.code if reachable else "unreachable"
            why = told.message.removeprefix(address).lstrip(": ")
            table.rows.append((address, "-", role, printable(why), "-", "-", "-"))
            continue
        table.rows.append(
            (
                address,
                printable(told.node),
                printable(told.role),
                _state(told),
                str(told.epoch) if told.epoch else "-",
                _since(told),
                printable(told.store) + ("" if told.store_ok else " (NOT OK)"),
            )
        )
    return table


def _state(told: Status) -> str:
    parts = [told.detail] if told.detail else []
    if told.state == "loading":
        of = "" if told.to_load is None else f" of {told.to_load:,}"
        parts.append(f"{told.loaded:,}{of} loaded")
    state = told.state.replace("_", " ")
    return printable(f"{state} ({', '.join(parts)})" if parts else state)


def _since(told: Status) -> str:
    if not told.since_ms:
        return "-"
    lasting = format_duration((told.now_ms - told.since_ms) / 1000)
    return f"{format_time(told.since_ms)[:-4]} ({lasting})"
