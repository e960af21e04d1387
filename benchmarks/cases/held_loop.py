"""How long the event loop is held by what one client can ask of it: the longest PING of another
connection, and its p99, while that is done over and over. Each is alone on a fresh daemon."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.cases.http import OverHttp
from benchmarks.context import Context, Result
from benchmarks.load import Load
from benchmarks.wire import Control, FrameCounter, connect
from tickwheel.api.frames import PROTOCOL_VERSION, FrameType
from tickwheel.protocol import encode

HOUR_MS = 3_600_000
TRANSACTIONS_AT_A_TIME = 1_000
SCHEDULES = 100
READERS = 8
RARE = ("0 0 29 2 MON#5", "59 59 23 29 2 MON#5", "0 0 31 12 SUN#5")
"""Cron expressions that seldom, or never, match."""
CLOCK = struct.Struct("<qd")

Press = Callable[[], None]
"""Once more what is measured."""
Scenario = Callable[[Context, OverHttp, contextlib.ExitStack], Press]
"""Prepares the daemon. What it opens is closed by the stack, when all is over."""


class Asked:
    """One connection of the HTTP API."""

    def __init__(self, daemon: OverHttp, opened: contextlib.ExitStack) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=60)
        opened.callback(self._connection.close)

    def ask(self, method: str, path: str, body: object = None) -> int:
        """The status of the answer, which is read whole."""
        head = {"content-type": "application/json"}
        self._connection.request(method, f"/v1{path}", json.dumps(body), head)
        response = self._connection.getresponse()
        response.read()
        return response.status


def pipelined(
    port: int, frames: Iterable[tuple[Any, ...]], *, session: bytes | None = None
) -> None:
    """Send them in one piece, and wait for as many answers."""
    hello = {"v": PROTOCOL_VERSION, "session": session, "token": None, "client": "benchmarks"}
    parts = [encode((int(FrameType.HELLO), 1, hello)), *map(encode, frames)]
    with connect(port) as sock:
        sending = threading.Thread(target=sock.sendall, args=(b"".join(parts),), daemon=True)
        sending.start()
        count, answers = 0, FrameCounter()
        while count < len(parts):
            data = sock.recv(1 << 16)
            if not data:
                raise ConnectionError("the daemon closed the connection")
            count += answers(data)
        sending.join()


# --- what is done --------------------------------------------------------------------------------


def session_row(context: Context, daemon: OverHttp, opened: contextlib.ExitStack) -> Press:
    """A session with as many remembered outcomes as one may have enqueues a task at a time."""
    key = b"s" * 16
    tasks = (("t", b"", 24 * HOUR_MS, {"key": "k", "if_pending": "keep"}),) * 1_024
    count = max(1, context.scale.held // 1_000)
    put = ((int(FrameType.ENQUEUE), 1_000_000 + number, 0, tasks) for number in range(count))
    pipelined(daemon.tcp_port, put, session=key)
    numbers = iter(range(2_000_000, 3_000_000))

    def press() -> None:
        frame = (int(FrameType.ENQUEUE), next(numbers), 0, (("u", b"x", 24 * HOUR_MS),))
        pipelined(daemon.tcp_port, [frame], session=key)
        time.sleep(0.02)

    return press


def transactions_page(context: Context, daemon: OverHttp, opened: contextlib.ExitStack) -> Press:
    """A page of one, of all transactions that are remembered."""
    task = ("t", b"", 24 * HOUR_MS)
    for first in range(0, context.scale.held // 5, TRANSACTIONS_AT_A_TIME):
        names = [f"order-{first + number:06d}" for number in range(TRANSACTIONS_AT_A_TIME)]
        prepared = (
            (int(FrameType.PREPARE), 2 + number, name, "p", 1, (task,), None)
            for number, name in enumerate(names)
        )
        pipelined(daemon.tcp_port, prepared)
        decided = ((int(FrameType.ROLLBACK), 2 + number, name) for number, name in enumerate(names))
        pipelined(daemon.tcp_port, decided)
    asked = Asked(daemon, opened)
    return lambda: _fine(asked.ask("GET", "/transactions?limit=1"))


def histories(context: Context, daemon: OverHttp, opened: contextlib.ExitStack) -> Press:
    """Eight who read the history of a task, one after the other."""
    tasks = tuple(("t", b"x" * 50, HOUR_MS) for _ in range(5_000))
    count = max(1, context.scale.held * 3 // 4 // len(tasks))
    key, control = b"h" * 16, Control(daemon.tcp_port, session=True)
    opened.callback(control.close)
    answer = control.ask(FrameType.ENQUEUE, 2, tasks[:1])
    frames = ((int(FrameType.ENQUEUE), 2 + number, 0, tasks) for number in range(count))
    pipelined(daemon.tcp_port, frames, session=key)
    readers = [Asked(daemon, opened) for _ in range(READERS)]
    path = f"/tasks/{answer[1][0]}/history"

    def press() -> None:
        reading = [threading.Thread(target=reader.ask, args=("GET", path)) for reader in readers]
        for thread in reading:
            thread.start()
        for thread in reading:
            thread.join()

    return press


def clock_ahead(context: Context, daemon: OverHttp, opened: contextlib.ExitStack) -> Press:
    """Schedules that fire each second in a zone, and a clock that goes an hour ahead, once."""
    asked = Asked(daemon, opened)
    schedule = {"topic": "t", "cron": "* * * * * *", "timezone": "Europe/Berlin"}
    for number in range(SCHEDULES):
        _fine(asked.ask("PUT", f"/schedules/s{number}", schedule))
    offsets = iter((HOUR_MS,))

    def press() -> None:
        offset_ms = next(offsets, None)
        if offset_ms is not None:
            _set_clock(daemon.folder / "clock", offset_ms)
        time.sleep(0.05)

    return press


def rare_cron(context: Context, daemon: OverHttp, opened: contextlib.ExitStack) -> Press:
    """A schedule that seldom comes: made, shown with its next times, filled in."""
    asked = Asked(daemon, opened)

    def press() -> None:
        for cron in RARE:
            schedule = {"topic": "t", "cron": cron, "timezone": "Europe/Berlin"}
            if asked.ask("PUT", "/schedules/rare", schedule) < 300:
                asked.ask("GET", "/schedules/rare?next=100")
                far = {"from_ms": 0, "to_ms": 1 << 47}
                asked.ask("POST", "/schedules/rare/backfill", far)

    return press


def flood(context: Context, daemon: OverHttp, opened: contextlib.ExitStack) -> Press:
    """Tens of thousands of LISTs in one piece, then as many PULLs: most of them refused."""
    count = max(100, context.scale.held * 3 // 20)
    control = Control(daemon.tcp_port)
    opened.callback(control.close)
    control.ask(FrameType.GROUP_CREATE, "far", "g", {})
    kinds: list[Callable[[int], tuple[Any, ...]]] = [
        lambda number: (int(FrameType.LIST), number, {"key": "x"}),
        lambda number: (int(FrameType.PULL), number, "far", "g", 1, 1_000, None),
    ]

    def press() -> None:
        for kind in kinds:
            pipelined(daemon.tcp_port, (kind(2 + number) for number in range(count)))

    return press


def bulk(context: Context, daemon: OverHttp, opened: contextlib.ExitStack) -> Press:
    """Eighty bulk operations with a dear condition over the same tasks."""
    asked = Asked(daemon, opened)
    large = {f"p{number}": "ab" * 2_000 for number in range(3)}
    tasks = {"tasks": [{"topic": "x", "delay_ms": HOUR_MS, "properties": large}] * 50}
    for _ in range(max(1, context.scale.held // 20_000)):
        _fine(asked.ask("POST", "/tasks", tasks))
    where = " AND ".join(f"NOT p{n} LIKE '%{'_b' * 5}q%'" for n in range(3)) + " AND nothing = 1"
    numbers = iter(range(1, 1_000_000))

    def press() -> None:
        wanted = {"kind": "cancel", "topic": "x", "where": where, "id": f"j{next(numbers)}"}
        asked.ask("POST", "/bulk", wanted)  # refused, while so many run
        time.sleep(0.005)

    return press


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        session_row, transactions_page, histories, clock_ahead, rare_cron, flood, bulk,
    )
}  # fmt: skip


def held_loop(context: Context) -> Result:
    """Every scenario for some seconds, with a PING each 2 ms beside it."""
    result = Result("held_loop")
    for name, scenario in SCENARIOS.items():
        context.say(f"held_loop: {name}")
        took = _measured(context, scenario)
        result.details[name] = took
        result.metric(f"{name}_ms", took["max"])
        what = (scenario.__doc__ or name).partition(":")[0].rstrip(".")
        result.row(f"PING beside: {what}", f"p99 {took['p99']:.1f} ms, max {took['max']:.1f} ms")
    return result


def _measured(context: Context, scenario: Scenario) -> dict[str, float]:
    with _daemon(context) as daemon, contextlib.ExitStack() as opened:
        press, over = scenario(context, daemon, opened), threading.Event()
        wrong: list[BaseException] = []

        def go_on() -> None:
            try:
                while not over.is_set():
                    press()
            except BaseException as error:
                wrong.append(error)

        pressing = threading.Thread(target=go_on)
        with Load("ping", port=daemon.tcp_port, seconds=context.scale.held_s) as pinging:
            pinging.start()
            pressing.start()
            try:
                took: dict[str, float] = pinging.result()["ping_ms"]
            finally:
                over.set()
                pressing.join()
        if wrong:
            raise wrong[0]
    return took


@contextlib.contextmanager
def _daemon(context: Context) -> Iterator[OverHttp]:
    """One with a history, whose clock can be set."""
    folder = context.fresh_folder("held")
    folder.mkdir(parents=True)
    _set_clock(folder / "clock", 0)
    before = os.environ.get("TICKWHEEL_TEST_CLOCK")
    os.environ["TICKWHEEL_TEST_CLOCK"] = str((folder / "clock").resolve())
    try:
        daemon = OverHttp(context, folder, [f"history_dir={(folder / 'history').resolve()}"])
    finally:
        if before is None:
            del os.environ["TICKWHEEL_TEST_CLOCK"]
        else:
            os.environ["TICKWHEEL_TEST_CLOCK"] = before
    with daemon:
        yield daemon


def _set_clock(path: Path, offset_ms: int) -> None:
    """In place: the daemon has it mapped."""
    with path.open("r+b" if path.exists() else "wb") as file:
        file.write(CLOCK.pack(offset_ms, 1.0))


def _fine(status: int) -> None:
    if status >= 300:
        raise AssertionError(f"answered with {status}")
