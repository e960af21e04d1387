"""Several daemons, each a process of its own: their parent, the addresses that it gives them, and
what is so of the shards of one machine, a daemon for each database of a folder.

A ``Parent`` chooses all addresses before it starts anybody, and then only watches: it starts
daemons again that have died, drains all of them at a signal, and ends when all have ended. It
serves nobody and has no event loop, and its only thread writes its log, so a daemon is a fork of
it, which shares the program's memory with it. What it has daemons for is said by who makes it:
``run`` here, which is what ``tickwheel serve --processes N`` does, and ``nodes.py``. HTTP of all
shards together (``http_all``) is one more such process, which reads from a ``Board`` what the
parent knows.

Invariants:

* A daemon does not outlive the parent: it reads from a pipe that only the parent could write to,
  and ends at the pipe's end, which comes however the parent has ended.
* A folder is served with the number of shards that it was laid out with.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Self

import structlog

from tickwheel.clock import sources
from tickwheel.errors import BadRequest, Conflict
from tickwheel.limits import SHARDS_MAX
from tickwheel.persistence import (
    COUNT_FILE,
    Layout,
    ShardFolder,
    check_databases,
    count_path,
    is_laid_out,
    open_url,
    read_layout,
    shard_folder,
    unfinished,
    with_layout,
    without_secrets,
    write_layout,
)
from tickwheel.persistence.contract import StoreUnusable
from tickwheel.server import daemon
from tickwheel.server.board import Board, Seen, State, how_ended
from tickwheel.server.logs import Log, configure
from tickwheel.server.roles import check_folders
from tickwheel.server.settings import EVERY_ADDRESS, Settings, split_address

RESTART_S: Final = 0.2
RESTART_MAX_S: Final = 5.0
"""Seconds before a daemon is started again, doubled up to the most while it dies at once."""
LASTS_S: Final = 10.0
"""A daemon that has lived so long, in seconds, was well."""
PORT_MAX: Final = 65_535
_STOP: Final = frozenset((signal.SIGTERM, signal.SIGINT))
_HANDLED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGCHLD)


# --- addresses -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Places:
    """The addresses of a parent's daemons, each list in their order."""

    listen: list[str]
    http: list[str]
    """Empty: HTTP is off."""
    route: list[str]
    """Where clients are told to find them."""
    http_advertise: list[str]
    """Where their HTTP is said to be; empty: where it listens."""
    http_all: str | None

    def of(self, number: int) -> dict[str, Any]:
        """The settings of a daemon that have its addresses."""
        return {
            "listen": self.listen[number],
            "advertise": self.route[number],
            "http": self.http[number] if self.http else None,
            "http_advertise": self.http_advertise[number] if self.http_advertise else None,
        }

    def of_shard(self, settings: Settings, shard: int, number: int, **more: Any) -> Settings:
        """The settings of the daemon of a shard, which has the addresses ``number``: its own store
        is among ``more``."""
        own = {"shard": shard, "ready_file": None, **self.of(number), **more}
        if settings.audit_file is not None:
            own["audit_file"] = f"{settings.audit_file}.shard-{shard}"
        return settings.model_copy(update=own)


def places_of(settings: Settings, count: int, of: str) -> Places:
    """``count`` addresses: that of ``listen`` and those after it; each is free now. ``of``: the
    setting that asks for so many, for messages. Raises OSError."""
    host, port = split_address(settings.listen, "listen")
    if settings.advertise is None and host in EVERY_ADDRESS:
        raise BadRequest(
            f"listen ({settings.listen}) is every address of the machine: with {of}"
            " clients have to be told which, so advertise is needed"
        )
    if settings.http is not None:
        http_port = split_address(settings.http, "http")[1]
        if port and http_port and abs(port - http_port) < count:
            raise BadRequest(
                f"listen ({settings.listen}) and http ({settings.http}) need {count} ports each"
                f" with {of}, and these overlap"
            )
    if settings.http_all is not None:
        own_port = split_address(settings.http_all, "http_all")[1]
        for field in ("listen", "http"):
            first = split_address(str(getattr(settings, field)), field)[1]
            if own_port and first and first <= own_port < first + count:
                raise BadRequest(
                    f"http_all ({settings.http_all}) is one of the {count} ports of {field}"
                    f" ({getattr(settings, field)}) with {of}"
                )
    route = _following(settings.advertise, "advertise", count, of)
    http_advertise = _following(settings.http_advertise, "http_advertise", count, of)
    with contextlib.ExitStack() as stack:  # all at once: what is free is not found twice
        listen = _free(settings.listen, "listen", count, of, stack)
        http = [] if settings.http is None else _free(settings.http, "http", count, of, stack)
        own = settings.http_all and _free(settings.http_all, "http_all", 1, of, stack)[0]
    route = route or [one if "://" in one else f"tcp://{one}" for one in listen]
    return Places(listen, http, route, http_advertise, own)


def _free(address: str, field: str, count: int, of: str, stack: contextlib.ExitStack) -> list[str]:
    """``count`` addresses that nobody listens at; they are taken until ``stack`` is closed."""
    found = []
    for one in _following(address, field, count, of):
        taken = stack.enter_context(daemon.bind(one))
        found.append(_with_port(one, taken.getsockname()[1]))
    return found


def _following(address: str | None, field: str, count: int, of: str) -> list[str]:
    """``address``, if there is one, and those with the ports after its own; port 0 stays."""
    if address is None:
        return []
    port = split_address(address, field)[1]
    if port + count - 1 > PORT_MAX:
        raise BadRequest(
            f"{field} ({address}) with {of} needs ports up to {port + count - 1};"
            f" the last one is {PORT_MAX}"
        )
    return [_with_port(address, port + shard if port else 0) for shard in range(count)]


def _with_port(address: str, port: int) -> str:
    return f"{address.rpartition(':')[0]}:{port}"


# --- the parent ----------------------------------------------------------------------------------


class ProcessKind(StrEnum):
    """What a process does; also how the log calls it."""

    SHARD = "shard"
    HTTP_ALL = "http_all"
    REGISTRAR = "registrar"


@dataclass(slots=True)
class Process:
    """The daemon of a shard, or a process for all of them, over any number of starts."""

    number: int
    """Its place among all; of a daemon: its shard."""
    settings: Settings
    kind: ProcessKind = ProcessKind.SHARD
    is_wanted: bool = True
    """Whether it shall run. One that shall not is drained, and not started again."""
    starts: int = 0
    ended: int = 0
    """How it ended last."""
    pid: int | None = None
    """None: it does not run."""
    due_s: float = 0.0
    """When it is started, on the steady clock."""
    began_s: float = 0.0
    pause_s: float = RESTART_S
    serves: bool = False
    has_served: bool = False


class Parent:
    """Watches the processes; a context, in which the process's signals come here."""

    def __init__(
        self, settings: Settings, processes: list[Process], board: Board, log: Log
    ) -> None:
        self._settings = settings
        self._processes = processes
        self._shards = [process for process in processes if process.kind is ProcessKind.SHARD]
        self._board = board
        self._log = log
        self._is_ending = False
        self.code = 0
        """The exit code, once all have ended."""
        self.lifeline = -1
        """Read by a daemon: its end says that the parent has ended."""
        self.ready = -1
        """A process writes its number there once it serves."""
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self.lifeline, kept = os.pipe()
        heard, self.ready = os.pipe()
        os.set_blocking(heard, False)
        self._stack.callback(os.close, kept)
        self._stack.callback(os.close, heard)
        self._heard = heard
        self._signals, woken = socket.socketpair()
        for one in (self._signals, woken):
            self._stack.enter_context(one)
            one.setblocking(False)
        self._selector = self._stack.enter_context(selectors.DefaultSelector())
        self._selector.register(heard, selectors.EVENT_READ)
        self._selector.register(self._signals, selectors.EVENT_READ)
        self._stack.enter_context(_signals_to(woken))
        return self

    def __exit__(self, *error: object) -> None:
        # In a daemon, too: what is the parent's alone ends here, and signals are a daemon's again.
        self._stack.close()

    def watch(self) -> Process | None:
        """Watch until all have ended. In a new process: the daemon that it is to be."""
        gc.freeze()  # what daemons share with this process is not written to by their collections
        while True:
            now_s = time.monotonic()
            for process in self._processes:
                is_due = process.pid is None and process.due_s <= now_s and process.is_wanted
                if is_due and not self._is_ending and self._start(process):
                    return process
            if self._is_ending and all(process.pid is None for process in self._processes):
                if self.code == 0:
                    self._log.info("stopped")
                return None
            self._wait(now_s)

    def _start(self, process: Process) -> bool:
        """Whether this is the new process."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # Until it has handlers of its own, a signal to the new process must not wake this one.
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
        try:
            process.pid = os.fork()
            if process.pid == 0:
                return True
            process.starts += 1
            self._note(process, State.STARTING)
        except OSError as error:
            self._died(process, f"cannot be started: {error.strerror}")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
        process.began_s = time.monotonic()
        return False

    def _note(self, process: Process, state: State) -> None:
        """Show on the board what became of a shard."""
        if process.kind is ProcessKind.SHARD:
            seen = Seen(
                process.pid or 0,
                state,
                sources().wall_ms(),
                max(0, process.starts - 1),
                process.ended,
            )
            self._board.write(process.number, seen)

    def _wait(self, now_s: float) -> None:
        """Wait for a signal, a word of a daemon, or the next start."""
        dues_s = [one.due_s for one in self._processes if one.pid is None and one.is_wanted]
        wait_s = None if self._is_ending or not dues_s else max(0.0, min(dues_s) - now_s)
        self._selector.select(wait_s)
        with contextlib.suppress(BlockingIOError):
            self._note_ready(os.read(self._heard, 4_096))
        with contextlib.suppress(BlockingIOError):
            for number in self._signals.recv(4_096):
                self._note_signal(number)
        for process in self._processes:
            if process.pid is not None and (ended := os.waitpid(process.pid, os.WNOHANG))[0]:
                self._note_end(process, os.waitstatus_to_exitcode(ended[1]))

    def _note_signal(self, number: int) -> None:
        if number == signal.SIGUSR1:
            self._send(signal.SIGUSR1, self._shards)
        elif number in _STOP:
            if self._is_ending:
                self._send(signal.SIGKILL, self._processes)
            else:
                self._log.info("stopping")
                self._stop()

    def _stop(self) -> None:
        """Drain all, because that was asked for."""
        self._end(0)

    def _end(self, code: int) -> None:
        """Drain all, and end when they have ended."""
        self.code, self._is_ending = code, True
        self._send(signal.SIGTERM, self._processes)

    def _send(self, number: int, processes: list[Process]) -> None:
        for process in processes:
            if process.pid is not None:
                os.kill(process.pid, number)  # it is there until it was waited for

    def _note_end(self, process: Process, code: int) -> None:
        process.pid, process.ended = None, code
        how = how_ended(code)
        event, of = _event_of(process)
        if self._is_ending:
            self._note(process, State.DOWN)
            if code not in (0, -signal.SIGTERM):  # that of one that had not begun yet is clean
                self._log.error(event, **of, detail=f"{how}, in the end")
                self.code = self.code or max(1, code)
        elif not process.is_wanted:
            self._note(process, State.DOWN)
            process.serves, process.due_s = False, 0.0
            self._log.info(event, **of, detail=f"{how}; it is not wanted here")
        elif self._is_fatal(process, code):
            # It has said itself what it objects to, and would again.
            detail = f"{how} before it served: all are stopped"
            self._log.error(event, **of, detail=detail)
            self._end(code)
        else:
            self._died(process, how, was_asked=code == 0)

    def _is_fatal(self, process: Process, code: int) -> bool:
        """Whether the end of a process is that of all."""
        return code > 0 and not process.has_served

    def _died(self, process: Process, how: str, *, was_asked: bool = False) -> None:
        """``was_asked``: it has drained, and is wanted back as soon as can be."""
        now_s = time.monotonic()
        is_wanted_back = was_asked and process.serves
        process.pid, process.serves = None, False
        self._note(process, State.DOWN)
        event, of = _event_of(process)
        if is_wanted_back:
            process.due_s = now_s
            self._log.info(event, **of, detail=f"{how}; it is started again at once")
            return
        if now_s - process.began_s > LASTS_S:
            process.pause_s = RESTART_S
        process.due_s = now_s + process.pause_s
        detail = f"{how}; it is started again in {process.pause_s:g} s"
        self._log.warning(event, **of, detail=detail)
        process.pause_s = min(RESTART_MAX_S, 2 * process.pause_s)

    def _note_ready(self, numbers: bytes) -> None:
        for process in map(self._processes.__getitem__, numbers):
            process.serves = process.has_served = True
            self._note(process, State.SERVES)
        if all(process.serves for process in self._processes if process.is_wanted):
            self._all_serve()

    def _all_serve(self) -> None:
        """Say that all processes that are wanted serve."""
        of_all = [
            one.settings.http_url for one in self._processes if one.kind is ProcessKind.HTTP_ALL
        ]
        more = {"http_all": of_all[0]} if of_all else {}
        self._log.info("all_shards_serve", url=self._shards[0].settings.route, **more)
        first = self._shards[0].settings
        self._write_ready_file(str(first.advertise), first.http_url, **more)

    def _write_ready_file(self, url: str, http: str | None, **more: object) -> None:
        if self._settings.ready_file is None:
            return
        places = [
            (str(one.settings.advertise), one.settings.http_url, one.pid)
            for one in self._shards
            if one.is_wanted
        ]
        shards = [{"url": url, "http": http, "pid": pid} for url, http, pid in places]
        daemon.write_ready_file(Path(self._settings.ready_file), url, http, **more, shards=shards)


def _event_of(process: Process) -> tuple[str, dict[str, int]]:
    """How the log calls the end of a process, and whose it was."""
    of = {"shard": process.number} if process.kind is ProcessKind.SHARD else {}
    return f"{process.kind}_ended", of


@contextlib.contextmanager
def _signals_to(woken: socket.socket) -> Iterator[None]:
    """A block in which the numbers of signals are written to a socket."""
    before = {number: signal.signal(number, lambda *_: None) for number in _HANDLED}
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)


# --- in a daemon ----------------------------------------------------------------------------------


def say_ready(ready: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(ready, bytes([number]))


def live_with(lifeline: int) -> None:
    """End this process when its parent has ended."""
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()


def _end_with_parent(lifeline: int) -> None:
    """Wait for the parent's end, in a thread: the event loop may be busy, or not there yet. A drain
    may take longer than the next parent waits for this daemon's port and database; what a crash
    leaves is what every start can recover from."""
    os.read(lifeline, 1)
    os._exit(1)


# --- the shards of a folder -----------------------------------------------------------------------


def run(settings: Settings) -> int:
    """Serve all shards of the store's folder until SIGTERM or SIGINT. 0 after a clean stop, 1 when
    they could not go on; a daemon that ends before it has served decides it by its own exit code.

    Returns in each of the processes. Raises BadRequest and StoreUnusable for what cannot be served.
    """
    folder, count = _folder_of(settings), count_of(settings)
    check_folders(settings)
    was_laid_out = is_laid_out(folder)
    if was_laid_out:
        _check(folder, count)
    log = configure(settings.log_format, settings.log_level, settings.node)
    try:
        of_all = settings_of_all(settings, count)
    except OSError as error:
        log.error("failed", detail=daemon.explain(error))
        return 1
    if not was_laid_out:
        lay_out(folder, count)
    if count == 1:
        return daemon.run(of_all[0])
    try:
        for one in of_all:
            Path(str(one.backup_dir)).mkdir(exist_ok=True)
    except OSError as error:
        log.error("failed", detail=daemon.explain(error))
        return 1
    log.info("starting", detail=f"{count} shards in {folder.path}", pid=os.getpid())
    processes = [Process(one.shard, one) for one in of_all]
    if settings.http_all is not None:
        processes.append(
            Process(count, settings_of_http_all(settings, of_all), ProcessKind.HTTP_ALL)
        )
    board = Board(count)
    with Parent(settings, processes, board, log) as parent:
        mine = parent.watch()
    if mine is None:
        return parent.code
    live_with(parent.lifeline)
    if mine.kind is ProcessKind.SHARD:
        return _serve(mine, parent.ready)
    from tickwheel.server.http import whole  # not needed by who serves a shard

    return whole.run(mine.settings, of_all, board, lambda: say_ready(parent.ready, mine.number))


def init(settings: Settings) -> int:
    """Lay the folder of the store out and serve nothing; returns the number of shards."""
    count = count_of(settings)
    lay_out(_folder_of(settings), count)
    return count


def count_of(settings: Settings) -> int:
    """How many shards are asked for. "auto": as many as the folder has; as the process may use
    processors, when it is not laid out."""
    if settings.processes != "auto":
        return settings.processes
    folder = _folder_of(settings)
    if is_laid_out(folder):
        return read_layout(folder).shards
    affinity = getattr(os, "sched_getaffinity", None)  # Linux
    usable = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return min(usable, SHARDS_MAX)


# --- the folder ----------------------------------------------------------------------------------


def _folder_of(settings: Settings) -> ShardFolder:
    """The folder of the store. Raises BadRequest when the store is no folder."""
    folder = shard_folder(settings.store)
    if folder is None:
        raise BadRequest(
            f"processes ({settings.processes}) needs a store that is a folder, sqlite:///DIR/"
            f" with the slash at its end, not {without_secrets(settings.store)!r}"
        )
    open_url(folder.url(0))  # raises for settings of the URL that there are not
    return with_layout(folder)


def _check(folder: ShardFolder, count: int) -> None:
    """Raises StoreUnusable unless the folder has so many shards, and all their databases."""
    laid_out = read_layout(folder).shards
    if count != laid_out:
        raise StoreUnusable(
            f"store {folder.path}: it was laid out with {laid_out} shards ({COUNT_FILE}), and"
            f" processes is {count}; `tickwheel reshard` changes the number of shards"
        )
    check_databases(folder)


def lay_out(folder: ShardFolder, count: int) -> None:
    """Make the databases of ``count`` shards, and last the file that says how many they are.
    Raises Conflict or StoreUnusable when there is one of them already."""
    try:
        Path(folder.path).mkdir(exist_ok=True)
    except OSError as error:
        raise StoreUnusable(f"store {folder.path}: {error.strerror}") from None
    if is_laid_out(folder):
        raise Conflict(f"{count_path(folder)} exists already")
    for path in unfinished(folder):
        raise StoreUnusable(
            f"{path} exists already, and {COUNT_FILE} beside it does not: `tickwheel reshard` was"
            " cut off; run it again, or remove that folder"
        )
    for path in filter(os.path.exists, map(folder.database, range(SHARDS_MAX))):
        raise StoreUnusable(
            f"{path} exists already, and {COUNT_FILE} beside it does not: take another folder, or"
            " move away what is there"
        )

    async def make(url: str) -> None:
        store = open_url(url)
        await store.open("init", sources().wall_ms())
        await store.close(clean=True)

    for shard in range(count):
        asyncio.run(make(folder.url(shard)))
    write_layout(folder, Layout(count))


# --- settings -------------------------------------------------------------------------------------


def settings_of_all(settings: Settings, count: int) -> list[Settings]:
    """The settings of the daemon of each shard: its own store, addresses, files and folders. Raises
    OSError when an address is taken, BadRequest for what cannot be of several."""
    folder = _folder_of(settings)
    moved_id = read_layout(folder).moved_id if is_laid_out(folder) else 0
    if count == 1:
        if settings.http_all is not None:
            raise BadRequest(
                f"http_all ({settings.http_all}) is of several shards, and processes"
                f" ({settings.processes}) is 1 here: one daemon has http"
            )
        one = {"store": folder.url(0), "processes": 1, "moved_id": moved_id}
        return [settings.model_copy(update=one)]
    if settings.shard != 0:
        raise BadRequest(
            f"shard ({settings.shard}) cannot be set with processes ({count}): they have 0 to"
            f" {count - 1}"
        )
    places = places_of(settings, count, f"processes ({count})")
    return [
        places.of_shard(
            settings,
            shard,
            shard,
            store=folder.url(shard),
            moved_id=moved_id,
            processes=1,
            http_all=places.http_all,
            route=",".join(places.route),
            backup_dir=str(Path(settings.backup_dir or folder.path) / f"shard-{shard}"),
        )
        for shard in range(count)
    ]


def settings_of_http_all(settings: Settings, of_all: list[Settings]) -> Settings:
    """The settings of the process that answers for all: its HTTP is ``http_all``, at the address
    that was chosen with those of the shards."""
    own = {
        "http": of_all[0].http_all,
        "http_advertise": None,
        "audit_file": audit_of_http(settings),
    }
    return settings.model_copy(update=own)


def audit_of_http(settings: Settings) -> str | None:
    """The log of what operators did of the process that answers HTTP for all."""
    return None if settings.audit_file is None else f"{settings.audit_file}.http"


# --- a daemon ------------------------------------------------------------------------------------


def _serve(process: Process, ready: int) -> int:
    """Be the daemon of a shard; its exit code."""
    structlog.contextvars.bind_contextvars(shard=process.number)
    return daemon.run(process.settings, lambda: say_ready(ready, process.number))
