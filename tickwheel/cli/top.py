"""Observing a daemon: ``top`` shows topics and groups live; ``stats`` shows the same counts once;
``load`` shows how many tasks the next hours have; ``console`` opens the daemon's console in a
browser.

A ``Frame`` of ``top`` is computed from two successive statistics. Rates are differences of the
daemon's totals divided by differences of its uptime, so that neither clock changes nor a slow
terminal distort them. After a restart the totals start from 0, so there is no rate until two
answers of the same daemon exist. ``top`` continues while the daemon is away, and says so.

``keyboard`` is a context manager that makes the terminal deliver keys one by one, at once and
without echo, and restores it at the end. Ctrl-C stays a signal. Without a terminal on standard
input, or without POSIX terminals, no keys are delivered.

The code of a console's link works once. It is never in a command line, where other users of the
machine could read it. The browser gets a file that only its user can read, which leads to the link.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import urllib.error
import urllib.request
import webbrowser
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from html import escape
from http.client import HTTPException, InvalidURL
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self
from urllib.parse import urlsplit

from tickwheel import environment
from tickwheel.cli.call import Call
from tickwheel.cli.options import duration, flag, one_of, option, past_time_option
from tickwheel.cli.output import (
    OLDEST,
    STATES,
    TOTALS,
    Column,
    Grid,
    Map,
    Output,
    age,
    facts_grid,
    format_count,
    format_duration,
    format_time,
    grid_of,
    head,
    hidden_text,
    iso_time,
    printable,
    table_of,
    trouble_lines,
)
from tickwheel.client import Client, Stats
from tickwheel.client.connection import Trust, explain
from tickwheel.errors import (
    BY_CODE,
    BadRequest,
    Forbidden,
    InternalError,
    TickwheelError,
    UnknownType,
    Unreachable,
)
from tickwheel.waiting import in_thread

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tickwheel.client import Status


SORTS = ("busy", "name", "scheduled", "ready", "in-flight", "waiting", "dead", "age")
_SORT_FIELDS = {"busy": "delivered_per_s", "in-flight": "in_flight", "age": "oldest_ready_ms"}
INTERVAL_S = 1.0
INTERVAL_S_MIN = 0.05
ANSWER_S = 2.0
"""Seconds without an answer after which a daemon is shown as away."""


async def top(
    call: Call,
    interval: Annotated[float | None, duration("Time between two pictures. Default: 1s.")] = None,
    once: Annotated[bool, flag("Show one picture, with rates over one interval.")] = False,
    sort: Annotated[
        str, one_of(SORTS, "Order of rows, largest first (name: alphabetical).", "BY")
    ] = "busy",
) -> None:
    """Watch topics and groups: rates, ready, in flight, waiting for a retry, dead, lateness.

    Keys: q quits, s and S change the order, / filters by name, arrows and page keys scroll.

    "busy" sorts by deliveries per second. With --json each picture is one object on one line.
    """
    interval_s = INTERVAL_S if interval is None else interval
    if interval_s < INTERVAL_S_MIN:
        raise BadRequest(f"--interval must be at least {INTERVAL_S_MIN:g} s, not {interval_s:g} s")
    meter = Meter(sort)
    async with call.client(retries=0) as client:
        if once:
            await _read(client, meter)
            await asyncio.sleep(interval_s)
            view = View(call.out, live=False)
            view.show(await _read(client, meter))
        else:
            await _watch(call, client, meter, interval_s)


async def _read(client: Client, meter: Meter) -> Frame:
    stats = await client.stats()
    frame = meter.read(stats.raw, str(client.server_info.get("role", "active")))
    if meter.has_overview:
        try:
            return replace(frame, overview=(await client.overview()).raw)
        except (Forbidden, UnknownType):  # the token reads only some topics, or the daemon is older
            meter.has_overview = False
    return frame


async def _watch(call: Call, client: Client, meter: Meter, interval_s: float) -> None:
    """Draw pictures until SIGINT, SIGTERM or the quit key."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    frame = NOTHING

    def pressed(keys: list[str]) -> None:
        if view.controls.press(keys):
            stop.set()
        else:
            view.show(frame)

    with View(call.out, sort=meter.sort) as view, contextlib.ExitStack() as stack:
        if view.is_drawn:
            view.has_keys = stack.enter_context(keyboard(pressed))
        while not stop.is_set():
            frame = await _next(client, meter, frame)
            view.show(frame)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), interval_s)


async def _next(client: Client, meter: Meter, last: Frame) -> Frame:
    """Return the current picture, or the last one with a reason while the daemon is away."""
    why = "the connection to the daemon is lost"
    if client.connected:
        try:
            async with asyncio.timeout(ANSWER_S):
                return await _read(client, meter)
        except TimeoutError:
            why = f"no answer within {ANSWER_S:g} s"
        except TickwheelError as error:
            if not error.retryable:
                raise
            why = f"{error.code}: {error.message}"
    return replace(last, trouble=f"reconnecting: {why}")


# --- frames --------------------------------------------------------------------------------------


Row = dict[str, Any]
"""A topic or a group as in ``--json``: its name, counts, rates (None while unknown), the waiting
time of its oldest ready task, and whether it is paused. A topic has ``groups``, a group no count of
scheduled and no rate of enqueued tasks."""


@dataclass(frozen=True)
class Frame:
    """The contents of one picture."""

    stats: Map
    """The daemon's statistics."""
    role: str
    rates: Map
    topics: tuple[Row, ...]
    """Each topic with its groups, sorted."""
    trouble: str = ""
    """Why the picture is not current; empty: it is current."""
    overview: Map | None = None
    """The daemon's overview with its current troubles; None: not requested."""

    @property
    def oldest_ms(self) -> int:
        return max((topic["oldest_ready_ms"] for topic in self.topics), default=0)

    def fields(self) -> dict[str, Any]:
        """Return the frame for ``--json``."""
        names = ("node", "version", "epoch", "uptime_s", "store_ok", *STATES, "subscribers")
        return {
            **{name: self.stats[name] for name in names if name in self.stats},
            **self.rates,
            "role": self.role,
            "oldest_ready_ms": self.oldest_ms,
            "lateness": dict(self.stats.get("lateness") or {}),
            # These are missing if the token reads only some topics.
            **{name: self.stats.get(name) for name in ("early", "connections")},
            "reconnecting": bool(self.trouble),
            "troubles": [dict(trouble) for trouble in (self.overview or {}).get("troubles", ())],
            "topics": list(self.topics),
        }


NOTHING = Frame(
    {"node": "-", "version": "-", "epoch": 0, "uptime_s": 0.0, "store_ok": True, "early": 0}
    | {"connections": 0, "subscribers": 0},
    "-", {}, (),
)  # fmt: skip
"""The frame before the first answer."""


@dataclass
class Meter:
    """Computes frames from answers, with rates since the previous answer."""

    sort: str = "busy"
    has_overview: bool = True
    """Whether the daemon answers requests for its overview."""
    _previous: Map | None = field(default=None, init=False)

    def read(self, raw: Map, role: str = "active") -> Frame:
        """Return the frame of one answer."""
        previous, self._previous = self._previous or {}, raw
        took_s = raw["uptime_s"] - previous.get("uptime_s", raw["uptime_s"])
        is_same_run = all(previous.get(name) == raw[name] for name in ("epoch", "node"))
        if not is_same_run or took_s <= 0:
            previous, took_s = {}, 0.0
        topics = []
        for name, topic in raw["topics"].items():
            before = (previous.get("topics") or {}).get(name) or {}
            groups_before = before.get("groups") or {}
            groups = [
                _row("group", group, stats, groups_before.get(group) or {}, took_s)
                for group, stats in (topic.get("groups") or {}).items()
            ]
            topics.append(_row("topic", name, topic, before, took_s) | {"groups": groups})
        frame = Frame(raw, role, _rates(raw, previous, took_s), tuple(topics))
        return arranged(frame, self.sort)


def _rates(raw: Map, previous: Map, took_s: float) -> Map:
    """Return the rates of the totals since the previous answer, None if there is none. Totals of a
    new topic count from 0."""
    return {
        f"{name}_per_s": round((raw[name] - previous.get(name, 0)) / took_s, 1) if took_s else None
        for name in TOTALS
        if name in raw
    }


def _row(kind: str, name: str, raw: Map, previous: Map, took_s: float) -> Row:
    return {
        kind: name,
        **{state: raw[state] for state in STATES if state in raw},
        "oldest_ready_ms": raw.get("oldest_ready_ms") or 0,
        "paused": bool(raw.get("paused")),
        **_rates(raw, previous, took_s),
    }


def arranged(frame: Frame, sort: str, text: str = "") -> Frame:
    """Return the frame with the topics and groups whose names contain ``text``, ignoring case, in
    order: largest first, then by name. A topic is kept if one of its groups is."""

    def order(row: Row) -> tuple[float, str]:
        value = 0.0 if sort == "name" else row.get(_SORT_FIELDS.get(sort, sort)) or 0
        return -float(value), row.get("topic") or row["group"]

    topics = []
    for topic in frame.topics:
        groups = topic["groups"]
        if text.lower() not in topic["topic"].lower():
            groups = [group for group in groups if text.lower() in group["group"].lower()]
            if not groups:
                continue
        topics.append(topic | {"groups": sorted(groups, key=order)})
    return replace(frame, topics=tuple(sorted(topics, key=order)))


# --- views ---------------------------------------------------------------------------------------

CHROME_LINES = 5
"""Lines of the screen besides the rows, the lines about the daemon, and the line of keys."""
TROUBLES_SHOWN = 3
"""Maximum lines about current troubles."""
FILTER_LENGTH_MAX = 255


def head_lines(frame: Frame) -> list[str]:
    """Return the lines about the daemon."""
    stats, late = frame.stats, frame.stats.get("lateness")
    store = "ok" if stats["store_ok"] else "NOT OK"
    lateness = " / ".join(
        f"{late.get(name) or 0:g}" if late else "-" for name in ("p50_ms", "p99_ms")
    )
    into, out, acked = (_rate(frame.rates.get(f"{name}_per_s")) for name in TOTALS)
    return [
        f"{printable(str(stats['node']))}  {frame.role}  up {format_duration(stats['uptime_s'])}"
        f"  epoch {stats['epoch']}  store {store}"
        f"  connections {format_count(stats.get('connections'))}"
        f"  subscribers {stats['subscribers']}",
        "  ".join(f"{head(name)} {format_count(stats.get(name))}" for name in STATES)
        + f"  oldest {age(frame.oldest_ms)}",
        f"in {into}/s  out {out}/s  acked {acked}/s"
        f"  late p50 / p99 {lateness} ms  early {format_count(stats.get('early'))}",
        *([] if frame.overview is None else trouble_lines(frame.overview, TROUBLES_SHOWN)),
    ]


def rows_grid(frame: Frame, rows_max: int | None = None, first: int = 0) -> Grid:
    """Return topics and their groups from the row ``first`` on; the last line counts the rows that
    did not fit."""
    rows = [
        row if row is topic else {"topic": topic["topic"], **row}
        for topic in frame.topics
        for row in (topic, *topic["groups"])
    ][first:]
    shown = rows if rows_max is None or len(rows) <= rows_max else rows[: max(rows_max - 1, 1)]
    # Show a topic's name at its own row and at the top of the screen.
    named = (
        {"group": "", **row} | ({"topic": ""} if "group" in row and index else {})
        for index, row in enumerate(shown)
    )
    grid = grid_of(_COLUMNS, named, spare=("acked/s", "oldest", "scheduled", "in/s"))
    if len(shown) < len(rows):
        grid.rows.append((f"… {len(rows) - len(shown)} more", *[""] * (len(grid.columns) - 1)))
    return grid


def head_text(frame: Frame) -> str:
    """Return the text above the table."""
    trouble = [frame.trouble] if frame.trouble else []
    return "\n".join([*trouble, *head_lines(frame), ""])


def _rate(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _count_column(name: str) -> Column[Map]:
    def cell(row: Map) -> str:
        return format_count(row[name]) if name in row else ""

    return Column(head(name), cell, right=True)


def _rate_column(head: str, name: str) -> Column[Map]:
    return Column(head, lambda row: _rate(row[name]) if name in row else "", right=True)


_NAMES_COLUMNS = (
    Column[Map]("topic", lambda row: row["topic"]),
    Column[Map]("group", lambda row: row["group"]),
)
_COLUMNS = (
    *_NAMES_COLUMNS,
    *map(_count_column, STATES),
    OLDEST,
    _rate_column("in/s", "enqueued_per_s"),
    _rate_column("out/s", "delivered_per_s"),
    _rate_column("acked/s", "acked_per_s"),
    Column[Map]("", lambda row: "paused" if row["paused"] else ""),
)


@dataclass
class Controls:
    """The order, filter and position chosen by keys. Pure."""

    sort: str = "busy"
    filter: str = ""
    """Text that the names to show contain."""
    first: int = 0
    """The index of the first row."""
    is_typing: bool = False
    """Whether keys are text of the filter."""
    rows: int = 0
    """The number of rows."""
    page: int = 1
    """The number of rows on the screen."""

    def press(self, keys: Iterable[str]) -> bool:
        """Handle keys in order. Return True to quit."""
        return any(self._typed(key) if self.is_typing else self._chosen(key) for key in keys)

    def place(self, rows: int, page: int) -> int:
        """Return the first of ``rows`` rows to show on a screen with ``page`` rows."""
        self.rows, self.page = rows, max(page, 1)
        self.first = max(0, min(self.first, rows - self.page))
        return self.first

    @property
    def line(self) -> str:
        """The line that shows the keys and the choices."""
        if self.is_typing:
            return f"filter: {printable(self.filter)}_  (enter keeps it, esc clears it)"
        filtered = f": {printable(self.filter)}" if self.filter else ""
        place = f"  {self.first + 1} of {self.rows}" if self.rows > self.page else ""
        return f"q quit  s sort: {self.sort}  / filter{filtered}  ↑↓ scroll{place}"

    def _chosen(self, key: str) -> bool:
        moves = {
            UP: -1, "k": -1, DOWN: 1, "j": 1, PAGE_UP: -self.page, PAGE_DOWN: self.page,
            " ": self.page, HOME: -self.rows, "g": -self.rows, END: self.rows, "G": self.rows,
        }  # fmt: skip
        if key in moves:
            self.first += moves[key]
            self.place(self.rows, self.page)
        elif key in ("s", "S"):
            step = 1 if key == "s" else -1
            self.sort = SORTS[(SORTS.index(self.sort) + step) % len(SORTS)]
        elif key == "/":
            self.is_typing, self.first = True, 0
        elif key == ESCAPE:
            self.filter = ""
        return key == "q"

    def _typed(self, key: str) -> bool:
        if key in (ENTER, ESCAPE):
            self.is_typing = False
            if key == ESCAPE:
                self.filter = ""
        elif key == BACKSPACE:
            self.filter = self.filter[:-1]
        elif len(key) == 1:
            self.filter = (self.filter + key)[:FILTER_LENGTH_MAX]
        return False


class View:
    """Shows successive frames."""

    def __init__(self, out: Output, *, live: bool = True, sort: str = "busy") -> None:
        from rich.console import Console
        from rich.live import Live

        self._out = out
        self._console = Console()
        drawn = live and self._console.is_terminal and not out.as_json
        self._live = Live(console=self._console, screen=True, auto_refresh=False) if drawn else None
        self.controls = Controls(sort)
        self.has_keys = False
        """Whether keys are read."""

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    @property
    def is_drawn(self) -> bool:
        """Whether pictures are drawn on a terminal, each over the previous."""
        return self._live is not None

    def show(self, frame: Frame) -> None:
        if self._out.as_json:
            self._out.record(frame.fields())
        elif self._live is None:
            self._out.line(head_text(frame))
            self._out.grid(rows_grid(frame))
        else:
            self._live.update(self._drawn(frame), refresh=True)

    def _drawn(self, frame: Frame) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        lines = [Text(line, no_wrap=True, overflow="ellipsis") for line in head_lines(frame)]
        trouble = Text(frame.trouble or " ", style="bold red", no_wrap=True, overflow="ellipsis")
        room = max(self._console.height - CHROME_LINES - len(lines) - self.has_keys, 1)
        controls, frame = self.controls, arranged(frame, self.controls.sort, self.controls.filter)
        count = sum(1 + len(topic["groups"]) for topic in frame.topics)
        grid = rows_grid(frame, room, controls.place(count, room))
        width = self._console.width
        shown, hidden = grid.fitted(width)
        table = table_of(shown, width, dim=bool(frame.trouble))
        parts: list[RenderableType] = [trouble, *lines, table]
        if hidden:
            parts.append(Text(hidden_text(hidden), style="dim", no_wrap=True, overflow="ellipsis"))
        if self.has_keys:
            parts.append(Text(controls.line, style="reverse", no_wrap=True, overflow="ellipsis"))
        return Group(*parts)


# --- stats ---------------------------------------------------------------------------------------


async def stats(call: Call) -> None:
    """Show counts of the daemon, and of each topic and group."""
    answer = await call.ask(Client.stats)
    call.out.result(dict(answer.raw), *stats_grids(answer))


_TOTALS = (
    "enqueued", "delivered", "acked", "nacked", "retried", "expired", "cancelled", "dead_total",
    "dead_expired", "dropped_once", "early",
)  # fmt: skip


def stats_grids(stats: Stats) -> list[Grid]:
    """Return the tables of an answer: the daemon, and a row for each topic and group."""
    raw = stats.raw
    lateness = raw.get("lateness") or {}
    shown: dict[str, str] = {
        "node": printable(str(raw.get("node"))),
        "version": str(raw.get("version")),
        "up": format_duration(raw.get("uptime_s") or 0),
        "store": "ok" if raw.get("store_ok") else "NOT OK",
        "slot": f"{raw.get('slot')} of {raw.get('slots')}",
        "connections": format_count(raw.get("connections")),
        **{head(n): format_count(raw[n]) for n in (*STATES, *_TOTALS) if n in raw},
    }
    if lateness:
        shown["lateness p50 / p99 / max"] = " / ".join(
            f"{lateness.get(name) or 0:g} ms" for name in ("p50_ms", "p99_ms", "max_ms")
        )
    if raw.get("partial"):
        shown["counts"] = "only topics that the token can read"
    daemon = facts_grid(("field", "value"), shown, "Daemon", right=True)
    return [daemon, stats_topics_grid(raw.get("topics") or {})]


def stats_topics_grid(topics: Mapping[str, Map]) -> Grid:
    """Return a row for each topic, then for each of its groups, with blanks for missing counts."""
    names = (*STATES, "delivered", "acked")
    rows: list[Map] = []
    for topic, counts in sorted(topics.items()):
        rows.append({**dict.fromkeys(names), **counts, "topic": topic, "group": ""})
        groups = sorted((counts.get("groups") or {}).items())
        rows += ({**stats, "topic": "", "group": group} for group, stats in groups)
    return grid_of((*_NAMES_COLUMNS, *map(_count_column, names)), rows, title="Topics")


# --- load ----------------------------------------------------------------------------------------

BAR_LENGTH = 40


async def load(
    call: Call,
    step: Annotated[float, duration("Time span of each row.")] = "1m",  # type: ignore[assignment]  # parsed by the option
    steps: Annotated[int, option("Number of rows, at most 1440.", "N", min=1)] = 60,
    since: Annotated[
        datetime | None, past_time_option("Start of the first row, by default now.", "--from")
    ] = None,
    everything: Annotated[bool, flag("Also show rows without due tasks.", "--all")] = False,
) -> None:
    """Show how many tasks are due in each of the next minutes, or hours: --step 1h --steps 24."""
    answer = await call.ask(lambda client: client.load(step=step, steps=steps, since=since))
    names = ("from_ms", "step_ms", "exact", "scheduled", "counts")
    fields = {name: getattr(answer, name) for name in names} | {"from": iso_time(answer.from_ms)}
    grid = Grid(("from", "tasks", ""), right=("tasks",))
    largest = max(answer.counts)
    for number, count in enumerate(answer.counts):
        if count or everything:
            bar = "█" * -(-count * BAR_LENGTH // largest) if largest else ""
            at = format_time(answer.from_ms + number * answer.step_ms)
            grid.rows.append((at, format_count(count), bar))
    call.out.result(fields, grid)
    until = format_duration(answer.step_ms * len(answer.counts) / 1000)
    estimated = "" if answer.exact else ", distant tasks estimated from a sample"
    if not call.out.as_json:
        call.out.remark(
            f"{sum(answer.counts):,} of {answer.scheduled:,} tasks on the wheel are due within"
            f" {until}{estimated}"
        )


# --- keyboard -----------------------------------------------------------------------------------

UP, DOWN, PAGE_UP, PAGE_DOWN, HOME, END = "up", "down", "page up", "page down", "home", "end"
ENTER, ESCAPE, BACKSPACE = "enter", "escape", "backspace"
_NAMES = {
    "\x1b[A": UP, "\x1bOA": UP, "\x1b[B": DOWN, "\x1bOB": DOWN, "\x1b[5~": PAGE_UP,
    "\x1b[6~": PAGE_DOWN, "\x1b[H": HOME, "\x1bOH": HOME, "\x1b[1~": HOME, "\x1b[F": END,
    "\x1bOF": END, "\x1b[4~": END, "\r": ENTER, "\n": ENTER, "\x1b": ESCAPE, "\x7f": BACKSPACE,
    "\x08": BACKSPACE,
}  # fmt: skip
_KEY = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Z]|.", re.DOTALL)
READ_BYTES = 1_024


def keys_of(text: str) -> list[str]:
    """Return the pressed keys: characters, or names of special keys. Unknown keys are omitted."""
    keys = (_NAMES.get(key, key) for key in _KEY.findall(text))
    return [key for key in keys if key in _NAMES.values() or key.isprintable()]


@contextlib.contextmanager
def keyboard(pressed: Callable[[list[str]], None]) -> Iterator[bool]:
    """Call ``pressed`` on the running event loop with keys that arrive together. Yields whether
    there is a terminal to read keys from."""
    try:
        import termios
        import tty
    except ImportError:  # not a POSIX system
        yield False
        return
    if not sys.stdin.isatty():
        yield False
        return
    fd, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def read() -> None:
        try:
            data = os.read(fd, READ_BYTES)
        except OSError:
            data = b""
        if not data:  # the terminal was closed
            loop.remove_reader(fd)
        elif keys := keys_of(decode(data)):
            pressed(keys)

    attributes = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    loop.add_reader(fd, read)
    try:
        yield True
    finally:
        loop.remove_reader(fd)
        termios.tcsetattr(fd, termios.TCSADRAIN, attributes)


# --- console -------------------------------------------------------------------------------------

LINK_S_MAX = 10.0
KEEP_S = 5.0
"""Seconds after which the file with the link is deleted; the browser reads it before."""
EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104  # a daemon listens on all addresses
PAGE = """<!doctype html>
<meta charset="utf-8"><title>Tickwheel</title><meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={url}"><a href="{url}">Open the console</a>
"""


async def console(
    call: Call,
    http: Annotated[
        str | None, option("The daemon's HTTP address. Default: ask the daemon.", "URL")
    ] = None,
    no_browser: Annotated[bool, flag("Only print the link; it works once.")] = False,
) -> None:
    """Open the console in a browser, logged in with the token of this command."""
    if http is None:
        async with call.client(retries=0) as client:
            http = address_of(await client.status())
    token = call.token or environment.value("TICKWHEEL_TOKEN")
    address = http.rstrip("/")
    code, until_ms = await in_thread(lambda: _link(address, token))
    url = f"{address}/console/{f'#login={code}' if code else ''}"
    if not no_browser and await _opened(url):
        return
    call.out.result({"url": url, "until_ms": until_ms}, url)
    if until_ms is not None and not call.out.as_json:
        until = datetime.fromtimestamp(until_ms / 1000, UTC).astimezone()
        call.out.remark(f"the link logs in once, until {until:%H:%M:%S}")


def address_of(status: Status) -> str:
    """Return the URL of the daemon's console, as seen from here. Raise BadRequest."""
    http = status.raw.get("http")
    if not http:
        raise BadRequest(
            "the daemon reports no HTTP address: start it with `tickwheel serve --http"
            " 127.0.0.1:7356`, or give its console's address with `tickwheel console --http URL`"
        )
    parts = urlsplit(str(http))
    if parts.hostname in EVERYWHERE:
        host = urlsplit(status.address or "").hostname or "127.0.0.1"
        host = "127.0.0.1" if host in EVERYWHERE else host
        shown = f"[{host}]" if ":" in host else host
        return f"{parts.scheme}://{shown}:{parts.port}"
    return str(http)


def _link(http: str, token: str | None) -> tuple[str | None, int | None]:
    """Request a login link from the daemon. Return its code and when it ends. Raise the daemon's
    error, Unreachable or BadRequest."""
    invalid = BadRequest(f"--http must be http://HOST:PORT, not {http!r:.60}")
    try:
        parts = urlsplit(http)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise invalid
    except ValueError:  # of brackets, or of the port
        raise invalid from None
    context = Trust().context() if http.startswith("https:") else None
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    request = urllib.request.Request(  # noqa: S310  # the scheme was checked
        f"{http}/v1/session-links", b"", headers, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=LINK_S_MAX, context=context) as response:  # noqa: S310
            link = json.load(response)
            return link["code"], link["until_ms"]
    except urllib.error.HTTPError as error:
        with error:
            raise _problem(error) from None
    except InvalidURL:
        raise invalid from None
    except (HTTPException, KeyError, TypeError):
        raise Unreachable(f"{http}: its answer is not that of a daemon's console") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, OSError):
            why = explain(reason)
            raise type(why)(f"{http}: {why.message}") from None
        raise Unreachable(f"{http}: {reason}") from None


def _problem(error: urllib.error.HTTPError) -> TickwheelError:
    try:
        body = json.load(error)
        return BY_CODE.get(body["code"], InternalError)(str(body["detail"]))
    except (HTTPException, ValueError, KeyError, TypeError):
        return Unreachable(f"{error.url} answered {error.code}: not a daemon's console")


async def _opened(url: str) -> bool:
    with tempfile.TemporaryDirectory(prefix="tickwheel-console-") as folder:  # mode 0700
        page = Path(folder) / "open.html"
        page.write_text(PAGE.format(url=escape(url)), "utf-8")
        if not await in_thread(lambda: webbrowser.open(page.as_uri())):
            return False
        await asyncio.sleep(KEEP_S)
    return True
