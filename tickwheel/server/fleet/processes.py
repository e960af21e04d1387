"""Several daemons in separate processes: their parent, their addresses, and the daemons of one
machine that each serve one database of a folder.

A ``Parent`` starts the daemons, restarts daemons that die, drains all of them on a signal, and
exits when all have ended. It serves no clients and has no event loop, and its only thread writes
its log. Daemons can therefore be forks of it that share its memory. ``run`` (``tickwheel serve
--processes N``) and ``nodes.py`` create parents. The HTTP server for all shards (``http_all``) is
another of these processes; it reads the processes' state from a ``Board``.

Invariants:

* A daemon does not outlive its parent. It reads from a pipe to which only the parent can write, and
  exits when the pipe ends, as it does however the parent ends.
* A folder is served with the number of shards with which it was initialized.
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
from functools import partial
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
from tickwheel.server.fleet.board import Board, ProcessState, State, how_ended
from tickwheel.server.logs import Log, configure
from tickwheel.server.roles import check_folders
from tickwheel.server.settings import EVERY_ADDRESS, Settings, split_address

RESTART_S: Final = 0.2
RESTART_MAX_S: Final = 5.0
"""Minimum and maximum seconds before a daemon is restarted. The pause doubles each time that the
daemon dies soon after its start."""
HEALTHY_S: Final = 10.0
"""Seconds after which a running daemon counts as healthy, which resets the pause."""
ORPHANS_S: Final = 5.0
"""Maximum seconds until daemons whose parent was killed have ended, also during a slow sync."""
PORT_MAX: Final = 65_535
_STOP: Final = frozenset((signal.SIGTERM, signal.SIGINT))
_HANDLED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGCHLD)


# --- addresses -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Addresses:
    """The addresses of a parent's daemons. Each list is in the order of the daemons."""

    listen: list[str]
    http: list[str]
    """Addresses of the HTTP servers; empty if HTTP is off."""
    route: list[str]
    """Addresses announced to clients."""
    http_advertise: list[str]
    """Announced addresses of the HTTP servers; empty if they are the listening addresses."""
    http_all: str | None

    def settings_of(self, number: int) -> dict[str, Any]:
        """Return the settings that contain the addresses of a daemon, by name."""
        return {
            "listen": self.listen[number],
            "advertise": self.route[number],
            "http": self.http[number] if self.http else None,
            "http_advertise": self.http_advertise[number] if self.http_advertise else None,
        }

    def shard_settings(self, settings: Settings, shard: int, number: int, **own: Any) -> Settings:
        """Return the settings of a shard's daemon, with the addresses at index ``number`` and its
        ``own`` settings, such as its store."""
        own = {"shard": shard, "ready_file": None, **self.settings_of(number), **own}
        if settings.audit_file is not None:
            own["audit_file"] = f"{settings.audit_file}.shard-{shard}"
        return settings.model_copy(update=own)


def choose_addresses(settings: Settings, count: int, feature: str) -> Addresses:
    """Return the addresses of ``count`` daemons, with consecutive ports. ``feature`` describes in
    messages why several are needed. Raise OSError if an address is in use."""
    host, port = split_address(settings.listen, "listen")
    if settings.advertise is None and host in EVERY_ADDRESS:
        raise BadRequest(
            f"listen ({settings.listen}) binds every address of the machine; {feature} therefore"
            " requires advertise, the address that clients connect to"
        )
    if settings.http is not None:
        http_port = split_address(settings.http, "http")[1]
        if port and http_port and abs(port - http_port) < count:
            raise BadRequest(
                f"with {feature}, listen ({settings.listen}) and http ({settings.http}) need"
                f" {count} consecutive ports each, but these overlap"
            )
    if settings.http_all is not None:
        own_port = split_address(settings.http_all, "http_all")[1]
        for field in ("listen", "http"):
            first = split_address(str(getattr(settings, field)), field)[1]
            if own_port and first and first <= own_port < first + count:
                raise BadRequest(
                    f"http_all ({settings.http_all}) is one of the {count} ports of {field}"
                    f" ({getattr(settings, field)}) with {feature}"
                )
    route = _consecutive(settings.advertise, "advertise", count, feature)
    http_advertise = _consecutive(settings.http_advertise, "http_advertise", count, feature)
    with contextlib.ExitStack() as stack:  # keep all ports bound, so that none is chosen twice
        listen = _bind_free(settings.listen, "listen", count, feature, stack)
        http = settings.http and _bind_free(settings.http, "http", count, feature, stack)
        own = settings.http_all and _bind_free(settings.http_all, "http_all", 1, feature, stack)[0]
    route = route or [url if "://" in url else f"tcp://{url}" for url in listen]
    return Addresses(listen, http or [], route, http_advertise, own)


def _bind_free(
    address: str, field: str, count: int, feature: str, stack: contextlib.ExitStack
) -> list[str]:
    """Return ``count`` free addresses, which stay bound until ``stack`` is closed."""
    bound = []
    for candidate in _consecutive(address, field, count, feature):
        listener = stack.enter_context(daemon.bind(candidate, ORPHANS_S))
        bound.append(_with_port(candidate, listener.getsockname()[1]))
    return bound


def _consecutive(address: str | None, field: str, count: int, feature: str) -> list[str]:
    """Return ``count`` addresses whose consecutive ports begin with that of ``address``; port 0
    stays 0. Return an empty list if ``address`` is None."""
    if address is None:
        return []
    port = split_address(address, field)[1]
    if port + count - 1 > PORT_MAX:
        raise BadRequest(
            f"{field} ({address}) with {feature} needs ports up to {port + count - 1};"
            f" the highest port is {PORT_MAX}"
        )
    return [_with_port(address, port + shard if port else 0) for shard in range(count)]


def _with_port(address: str, port: int) -> str:
    return f"{address.rpartition(':')[0]}:{port}"


# --- the parent ----------------------------------------------------------------------------------


class ProcessKind(StrEnum):
    """The kind of a process, which also names it in log events."""

    SHARD = "shard"
    HTTP_ALL = "http_all"
    REGISTRAR = "registrar"


@dataclass(slots=True)
class Process:
    """The daemon of a shard, or a process for all shards, across its restarts."""

    number: int
    """Index in the list of processes; for a daemon, its shard."""
    settings: Settings
    kind: ProcessKind = ProcessKind.SHARD
    is_wanted: bool = True
    """Whether the process should run. An unwanted process is drained and not restarted."""
    starts: int = 0
    ended: int = 0
    """Last exit code of the process."""
    pid: int | None = None
    """None if the process does not run."""
    due_s: float = 0.0
    """Time of the next start, on the steady clock."""
    began_s: float = 0.0
    pause_s: float = RESTART_S
    serves: bool = False
    has_served: bool = False


class Parent:
    """Starts and watches the processes. As a context manager, it handles this process's signals."""

    def __init__(
        self, settings: Settings, processes: list[Process], board: Board, log: Log
    ) -> None:
        self._settings = settings
        self._processes = processes
        self._shards = [process for process in processes if process.kind is ProcessKind.SHARD]
        self._board = board
        self._log = log
        self._is_ending = False
        self._is_ready_file_current: bool | None = None
        """None before the ready file is written for the first time."""
        self.code = 0
        """Exit code after all processes have ended."""
        self.lifeline = -1
        """Pipe that a daemon reads. The pipe ends when the parent has ended."""
        self.ready = -1
        """Pipe to which a process writes its number once it serves."""
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self.lifeline, lifeline_writer = os.pipe()
        reader, self.ready = os.pipe()
        os.set_blocking(reader, False)
        self._stack.callback(os.close, lifeline_writer)
        self._stack.callback(os.close, reader)
        self._ready_reader = reader
        self._signals, writer = socket.socketpair()
        for end in (self._signals, writer):
            self._stack.enter_context(end)
            end.setblocking(False)
        self._selector = self._stack.enter_context(selectors.DefaultSelector())
        self._selector.register(reader, selectors.EVENT_READ)
        self._selector.register(self._signals, selectors.EVENT_READ)
        self._stack.enter_context(_signals_to(writer))
        return self

    def __exit__(self, *error: object) -> None:
        # It also runs in forked daemons: it closes the parent's resources and restores the signals.
        self._stack.close()

    def watch(self) -> Process | None:
        """Watch until all processes end, and return None. In a forked process, return its entry."""
        gc.freeze()  # so that garbage collections in daemons do not copy the shared memory
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
        """Fork a process. Return True in the new process."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # Signals to the new process must not wake this process before it has its own handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
        try:
            process.pid = os.fork()
            if process.pid == 0:
                return True
            process.starts += 1
            self._note(process, State.STARTING)
        except OSError as error:
            self._schedule_restart(process, f"the process cannot be started: {error.strerror}")
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
        process.began_s = time.monotonic()
        return False

    def _note(self, process: Process, state: State) -> None:
        """Write the state of a shard's process to the board."""
        if process.kind is ProcessKind.SHARD:
            report = ProcessState(
                process.pid or 0,
                state,
                sources().wall_ms(),
                max(0, process.starts - 1),
                process.ended,
            )
            self._board.write(process.number, report)

    def _wait(self, now_s: float) -> None:
        """Wait for a signal, a message of a daemon, or the next start."""
        waiting = [p for p in self._processes if p.pid is None and p.is_wanted]
        next_s = min((process.due_s for process in waiting), default=None)
        wait_s = None if self._is_ending or next_s is None else max(0.0, next_s - now_s)
        self._selector.select(wait_s)
        with contextlib.suppress(BlockingIOError):
            self._note_ready(os.read(self._ready_reader, 4_096))
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
        """Drain all processes and exit with 0."""
        self._end(0)

    def _end(self, code: int) -> None:
        """Drain all processes and exit with ``code``."""
        self.code, self._is_ending = code, True
        self._send(signal.SIGTERM, self._processes)

    def _send(self, number: int, processes: list[Process]) -> None:
        for process in processes:
            if process.pid is not None:
                os.kill(process.pid, number)  # the pid stays valid until ``waitpid``

    def _note_end(self, process: Process, code: int) -> None:
        process.pid, process.ended = None, code
        reason = how_ended(code)
        event, fields = _event_of(process)
        if self._is_ending:
            self._note(process, State.DOWN)
            if code not in (0, -signal.SIGTERM):  # SIGTERM ends a process that has no handlers yet
                self._log.error(event, **fields, detail=f"{reason} while stopping")
                self.code = self.code or max(1, code)
        elif not process.is_wanted:
            self._note(process, State.DOWN)
            process.serves, process.due_s = False, 0.0
            self._log.info(event, **fields, detail=f"{reason}; this node no longer needs it")
        elif self._is_fatal(process, code):
            # The process has logged its error, which would occur again after a restart.
            detail = f"{reason} before it served; all processes are stopped"
            self._log.error(event, **fields, detail=detail)
            self._end(code)
        else:
            self._schedule_restart(process, reason, was_asked=code == 0)

    def _is_fatal(self, process: Process, code: int) -> bool:
        """Return whether the end of a process must end all processes."""
        return code > 0 and not process.has_served

    def _schedule_restart(self, process: Process, reason: str, *, was_asked: bool = False) -> None:
        """Schedule the restart of a process that ended. ``was_asked`` tells that it was drained on
        request; if it served, it is then restarted immediately."""
        now_s = time.monotonic()
        is_wanted_back = was_asked and process.serves
        process.pid, process.serves = None, False
        self._note(process, State.DOWN)
        event, fields = _event_of(process)
        if is_wanted_back:
            process.due_s = now_s
            self._log.info(event, **fields, detail=f"{reason}; restarting now")
            return
        if now_s - process.began_s > HEALTHY_S:
            process.pause_s = RESTART_S
        process.due_s = now_s + process.pause_s
        detail = f"{reason}; restarting in {process.pause_s:g} s"
        self._log.warning(event, **fields, detail=detail)
        process.pause_s = min(RESTART_MAX_S, 2 * process.pause_s)

    def _note_ready(self, numbers: bytes) -> None:
        for process in map(self._processes.__getitem__, numbers):
            process.serves = process.has_served = True
            self._note(process, State.SERVES)
        if all(process.serves for process in self._processes if process.is_wanted):
            self._all_serve()

    def _all_serve(self) -> None:
        """Log that all wanted processes serve, and write the ready file."""
        urls = [p.settings.http_url for p in self._processes if p.kind is ProcessKind.HTTP_ALL]
        extra = {"http_all": urls[0]} if urls else {}
        self._log.info("all_shards_serve", url=self._shards[0].settings.route, **extra)
        first = self._shards[0].settings
        self._write_ready_file(str(first.advertise), first.http_url, **extra)

    def _write_ready_file(self, url: str, http: str | None, **extra: object) -> None:
        """Write the ready file. Raise OSError only if it was never written, because a full disk
        must not end daemons that serve."""
        if self._settings.ready_file is None:
            return
        shards = [
            {"url": str(p.settings.advertise), "http": p.settings.http_url, "pid": p.pid}
            for p in self._shards
            if p.is_wanted
        ]
        path = Path(self._settings.ready_file)
        try:
            daemon.write_ready_file(path, url, http, **extra, shards=shards)
        except OSError as error:
            if self._is_ready_file_current is None:
                raise
            if self._is_ready_file_current:
                detail = f"{path}: {error.strerror}; it keeps its contents until a process restarts"
                self._log.error("ready_file_failed", detail=detail)
            self._is_ready_file_current = False
        else:
            self._is_ready_file_current = True


def _event_of(process: Process) -> tuple[str, dict[str, int]]:
    """Return the log event for the end of a process, and its field ``shard`` for a daemon."""
    fields = {"shard": process.number} if process.kind is ProcessKind.SHARD else {}
    return f"{process.kind}_ended", fields


@contextlib.contextmanager
def _signals_to(writer: socket.socket) -> Iterator[None]:
    """Write the numbers of received signals to a socket while the block runs."""
    before = {number: signal.signal(number, lambda *_: None) for number in _HANDLED}
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)


# --- in a daemon ----------------------------------------------------------------------------------


def report_ready(ready: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(ready, bytes([number]))


def exit_with_parent(lifeline: int) -> None:
    """Exit this process when its parent ends."""
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()


def _end_with_parent(lifeline: int) -> None:
    """Wait until the parent ends, in a thread because the event loop can be busy or not yet
    running. Then exit without a drain, which could take longer than the next parent waits for this
    daemon's port and database. Every start recovers from such an exit."""
    os.read(lifeline, 1)
    os._exit(1)


# --- the shards of a folder -----------------------------------------------------------------------


def run(settings: Settings) -> int:
    """Serve all shards of the store's folder until SIGTERM or SIGINT. Return 0 after a clean stop,
    1 after an error, or the exit code of a daemon that ended before it served.

    It returns in every forked process. Raise BadRequest or StoreUnusable for unusable settings.
    """
    folder, count = _folder_of(settings), count_of(settings)
    check_folders(settings)
    was_laid_out = is_laid_out(folder)
    if was_laid_out:
        _check_layout(folder, count)
    log = configure(settings.log_format, settings.log_level, settings.node)
    try:
        settings_of_shards = settings_of_all(settings, count)
    except OSError as error:
        log.error("failed", detail=daemon.explain(error))
        return 1
    if not was_laid_out:
        lay_out(folder, count)
    if count == 1:
        return daemon.run(settings_of_shards[0])
    try:
        for shard_settings in settings_of_shards:
            Path(str(shard_settings.backup_dir)).mkdir(exist_ok=True)
    except OSError as error:
        log.error("failed", detail=daemon.explain(error))
        return 1
    log.info("starting", detail=f"{count} shards in {folder.path}", pid=os.getpid())
    processes = [Process(shard.shard, shard) for shard in settings_of_shards]
    if settings.http_all is not None:
        processes.append(
            Process(count, settings_of_http_all(settings, settings_of_shards), ProcessKind.HTTP_ALL)
        )
    board = Board(count)
    with Parent(settings, processes, board, log) as parent:
        own_process = parent.watch()
    if own_process is None:
        return parent.code
    exit_with_parent(parent.lifeline)
    if own_process.kind is ProcessKind.SHARD:
        return _serve(own_process, parent.ready)
    from tickwheel.server.http import all_shards  # daemons do not need it

    on_start = partial(report_ready, parent.ready, own_process.number)
    return all_shards.run(own_process.settings, settings_of_shards, board, on_start)


def init(settings: Settings) -> int:
    """Initialize the store's folder without serving it, and return the number of shards."""
    count = count_of(settings)
    lay_out(_folder_of(settings), count)
    return count


def count_of(settings: Settings) -> int:
    """Return the number of shards that the setting ``processes`` requests. "auto" is the number of
    shards of an initialized folder, or else the number of usable processors."""
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
    """Return the folder of the store. Raise BadRequest if the store is not a folder."""
    folder = shard_folder(settings.store)
    if folder is None:
        raise BadRequest(
            f"processes ({settings.processes}) needs a store that is a folder, sqlite:///DIR/"
            f" with a trailing slash, not {without_secrets(settings.store)!r}"
        )
    open_url(folder.url(0))  # raises for unknown options of the URL
    return with_layout(folder)


def _check_layout(folder: ShardFolder, count: int) -> None:
    """Raise StoreUnusable unless the folder has ``count`` shards and all their databases."""
    shards = read_layout(folder).shards
    if count != shards:
        raise StoreUnusable(
            f"store {folder.path}: it has {shards} shards ({COUNT_FILE}), but processes is {count};"
            " `tickwheel reshard` changes the number of shards"
        )
    check_databases(folder)


def lay_out(folder: ShardFolder, count: int) -> None:
    """Create the databases of ``count`` shards, and finally the file that contains the number.
    Raise Conflict or StoreUnusable if any of these files exists."""
    try:
        Path(folder.path).mkdir(exist_ok=True)
    except OSError as error:
        raise StoreUnusable(f"store {folder.path}: {error.strerror}") from None
    if is_laid_out(folder):
        raise Conflict(f"{count_path(folder)} already exists")
    for path in unfinished(folder):
        raise StoreUnusable(
            f"{path} already exists, but {COUNT_FILE} next to it does not: `tickwheel reshard` was"
            " interrupted; run it again or remove that folder"
        )
    for path in filter(os.path.exists, map(folder.database, range(SHARDS_MAX))):
        raise StoreUnusable(
            f"{path} already exists, but {COUNT_FILE} next to it does not: use another folder, or"
            " move this one's files away"
        )

    async def create(url: str) -> None:
        store = open_url(url)
        await store.open("init", sources().wall_ms())
        await store.close(clean=True)

    for shard in range(count):
        asyncio.run(create(folder.url(shard)))
    write_layout(folder, Layout(count))


# --- settings -------------------------------------------------------------------------------------


def settings_of_all(settings: Settings, count: int) -> list[Settings]:
    """Return the settings of each shard's daemon, with its store, addresses, files and folders.
    Raise OSError if an address is in use, or BadRequest for settings of a single daemon."""
    folder = _folder_of(settings)
    moved_id = read_layout(folder).moved_id if is_laid_out(folder) else 0
    if count == 1:
        if settings.http_all is not None:
            raise BadRequest(
                f"http_all ({settings.http_all}) needs several shards, but processes"
                f" ({settings.processes}) is 1 here; use http for a single daemon"
            )
        changes = {"store": folder.url(0), "processes": 1, "moved_id": moved_id}
        return [settings.model_copy(update=changes)]
    if settings.shard != 0:
        raise BadRequest(
            f"shard ({settings.shard}) cannot be set with processes ({count}), which assigns shards"
            f" 0 to {count - 1}"
        )
    addresses = choose_addresses(settings, count, f"processes ({count})")
    return [
        addresses.shard_settings(
            settings,
            shard,
            shard,
            store=folder.url(shard),
            moved_id=moved_id,
            processes=1,
            http_all=addresses.http_all,
            route=",".join(addresses.route),
            backup_dir=str(Path(settings.backup_dir or folder.path) / f"shard-{shard}"),
        )
        for shard in range(count)
    ]


def settings_of_http_all(settings: Settings, shard_settings: list[Settings]) -> Settings:
    """Return the settings of the HTTP server for all shards, which listens at ``http_all``."""
    changes = {
        "http": shard_settings[0].http_all,
        "http_advertise": None,
        "audit_file": audit_of_http(settings),
    }
    return settings.model_copy(update=changes)


def audit_of_http(settings: Settings) -> str | None:
    """Return the audit file of the HTTP server for all shards."""
    return None if settings.audit_file is None else f"{settings.audit_file}.http"


# --- a daemon ------------------------------------------------------------------------------------


def _serve(process: Process, ready: int) -> int:
    """Run the daemon of a shard and return its exit code."""
    structlog.contextvars.bind_contextvars(shard=process.number)
    return daemon.run(process.settings, lambda: report_ready(ready, process.number))
