"""Several shards on one machine: a daemon in a process of its own for each database of a folder.

``run`` is what ``tickwheel serve --processes N`` does. The parent lays the folder out or checks it,
chooses all addresses before it starts anybody, and then only watches: it starts daemons again that
have died, drains all of them at a signal, and ends when all have ended. It serves nobody, has no
event loop and no thread, so a daemon is a fork of it, which shares the program's memory with it.
HTTP of all together (``http_all``) is one more such process, which reads from a ``Board`` what the
parent knows.

Invariants: a folder is served with the number of shards that it was laid out with. A daemon does
not outlive the parent: it reads from a pipe that only the parent could write to, and ends at the
pipe's end, which comes however the parent has ended.
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
from pathlib import Path
from typing import Final, Self

import structlog

from tickwheel.clock import sources
from tickwheel.errors import BadRequest, Conflict
from tickwheel.persistence import ShardFolder, open_url, shard_folder, without_secrets
from tickwheel.persistence.contract import StoreUnusable
from tickwheel.server import daemon
from tickwheel.server.board import Board, Seen, State, how_ended
from tickwheel.server.folders import (
    COUNT_FILE,
    Layout,
    check_databases,
    count_path,
    is_laid_out,
    read_layout,
    unfinished,
    with_layout,
    write_layout,
)
from tickwheel.server.logs import Log, configure
from tickwheel.server.settings import EVERY_ADDRESS, PROCESSES_MAX, Settings, split_address

RESTART_S: Final = 0.2
RESTART_MAX_S: Final = 5.0
"""Seconds before a daemon is started again, doubled up to the most while it dies at once."""
LASTS_S: Final = 10.0
"""A daemon that has lived so long, in seconds, was well."""
PORT_MAX: Final = 65_535
_STOP: Final = frozenset((signal.SIGTERM, signal.SIGINT))
_HANDLED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGCHLD)


def run(settings: Settings) -> int:
    """Serve all shards of the store's folder until SIGTERM or SIGINT. 0 after a clean stop, 1 when
    they could not go on; a daemon that ends before it has served decides it by its own exit code.

    Returns in each of the processes. Raises BadRequest and StoreUnusable for what cannot be served.
    """
    folder, count = _folder_of(settings), count_of(settings)
    was_laid_out = is_laid_out(folder)
    if was_laid_out:
        _check(folder, count)
    log = configure(settings.log_format, settings.log_level).bind(node=settings.node)
    try:
        of_all = settings_of_all(settings, count)
    except OSError as error:
        log.error("failed", detail=daemon.explain(error))
        return 1
    if not was_laid_out:
        lay_out(folder, count)
    if count == 1:
        return daemon.run(of_all[0])
    for one in of_all:
        Path(str(one.backup_dir)).mkdir(parents=True, exist_ok=True)
    log.info("starting", detail=f"{count} shards in {folder.path}", pid=os.getpid())
    processes = [_Process(one.shard, one) for one in of_all]
    if settings.http_all is not None:
        processes.append(_Process(count, settings_of_http_all(settings, of_all), serves_all=True))
    board = Board(count)
    with _Parent(settings, processes, board, log) as parent:
        mine = parent.watch()
    if mine is None:
        return parent.code
    threading.Thread(target=_end_with_parent, args=(parent.lifeline,), daemon=True).start()
    if not mine.serves_all:
        return _serve(mine, parent.ready)
    from tickwheel.server.http import whole  # not needed by who serves a shard

    return whole.run(mine.settings, of_all, board, lambda: _say_ready(parent.ready, mine.number))


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
    return min(usable, PROCESSES_MAX)


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
    for path in filter(os.path.exists, map(folder.database, range(PROCESSES_MAX))):
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


# --- addresses -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Places:
    """The addresses of all shards, each list in the order of the shards."""

    listen: list[str]
    http: list[str]
    """Empty: HTTP is off."""
    route: list[str]
    """Where clients are told to find them."""
    http_all: str | None


def _places(settings: Settings, count: int) -> _Places:
    """The addresses: that of ``listen`` and those after it; each is free now. Raises OSError."""
    host, port = split_address(settings.listen, "listen")
    if settings.advertise is None and host in EVERY_ADDRESS:
        raise BadRequest(
            f"listen ({settings.listen}) is every address of the machine: with processes ({count})"
            " clients have to be told which, so advertise is needed"
        )
    if settings.http is not None:
        http_port = split_address(settings.http, "http")[1]
        if port and http_port and abs(port - http_port) < count:
            raise BadRequest(
                f"listen ({settings.listen}) and http ({settings.http}) need {count} ports each"
                f" with processes ({count}), and these overlap"
            )
    if settings.http_all is not None:
        own_port = split_address(settings.http_all, "http_all")[1]
        for field in ("listen", "http"):
            first = split_address(str(getattr(settings, field)), field)[1]
            if own_port and first and first <= own_port < first + count:
                raise BadRequest(
                    f"http_all ({settings.http_all}) is one of the {count} ports of {field}"
                    f" ({getattr(settings, field)}) with processes ({count})"
                )
    route: list[str] = []
    if settings.advertise is not None:
        route = _following(settings.advertise, "advertise", count)
    with contextlib.ExitStack() as stack:  # all at once: what is free is not found twice
        listen = _free(settings.listen, "listen", count, stack)
        http = [] if settings.http is None else _free(settings.http, "http", count, stack)
        own = settings.http_all and _free(settings.http_all, "http_all", 1, stack)[0]
    route = route or [one if "://" in one else f"tcp://{one}" for one in listen]
    return _Places(listen, http, route, own)


def _free(address: str, field: str, count: int, stack: contextlib.ExitStack) -> list[str]:
    """``count`` addresses that nobody listens at; they are taken until ``stack`` is closed."""
    found = []
    for one in _following(address, field, count):
        taken = stack.enter_context(daemon.bind(one))
        found.append(_with_port(one, taken.getsockname()[1]))
    return found


def _following(address: str, field: str, count: int) -> list[str]:
    """``address`` and those with the ports after its own; port 0 stays."""
    port = split_address(address, field)[1]
    if port + count - 1 > PORT_MAX:
        raise BadRequest(
            f"{field} ({address}) with processes ({count}) needs ports up to {port + count - 1};"
            f" the last one is {PORT_MAX}"
        )
    return [_with_port(address, port + shard if port else 0) for shard in range(count)]


def _with_port(address: str, port: int) -> str:
    return f"{address.rpartition(':')[0]}:{port}"


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
    http_advertise: list[str] = []
    if settings.http_advertise is not None:
        http_advertise = _following(settings.http_advertise, "http_advertise", count)
    places = _places(settings, count)
    return [
        settings.model_copy(
            update={
                "store": folder.url(shard),
                "shard": shard,
                "moved_id": moved_id,
                "processes": 1,
                "http_all": places.http_all,
                "listen": places.listen[shard],
                "route": ",".join(places.route),
                "advertise": places.route[shard],
                "http": places.http[shard] if places.http else None,
                "http_advertise": http_advertise[shard] if http_advertise else None,
                "audit_file": settings.audit_file and f"{settings.audit_file}.shard-{shard}",
                "backup_dir": str(Path(settings.backup_dir or folder.path) / f"shard-{shard}"),
                "ready_file": None,
            }
        )
        for shard in range(count)
    ]


def settings_of_http_all(settings: Settings, of_all: list[Settings]) -> Settings:
    """The settings of the process that answers for all: its HTTP is ``http_all``, at the address
    that was chosen with those of the shards."""
    own = {"http": of_all[0].http_all, "http_advertise": None, "audit_file": None}
    return settings.model_copy(update=own)


# --- the parent ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Process:
    """The daemon of a shard, or the process that answers for all, over any number of starts."""

    number: int
    """The shard; for who answers for all: how many shards there are."""
    settings: Settings
    serves_all: bool = False
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


class _Parent:
    """Watches the processes; a context, in which the process's signals come here."""

    def __init__(
        self, settings: Settings, processes: list[_Process], board: Board, log: Log
    ) -> None:
        self._settings = settings
        self._processes = processes
        self._shards = [process for process in processes if not process.serves_all]
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

    def watch(self) -> _Process | None:
        """Watch until all have ended. In a new process: the daemon that it is to be."""
        gc.freeze()  # what daemons share with this process is not written to by their collections
        while True:
            now_s = time.monotonic()
            for process in self._processes:
                is_due = process.pid is None and process.due_s <= now_s
                if is_due and not self._is_ending and self._start(process):
                    return process
            if self._is_ending and all(process.pid is None for process in self._processes):
                if self.code == 0:
                    self._log.info("stopped")
                return None
            self._wait(now_s)

    def _start(self, process: _Process) -> bool:
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

    def _note(self, process: _Process, state: State) -> None:
        """Show on the board what became of a shard."""
        if not process.serves_all:
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
        dues_s = [process.due_s for process in self._processes if process.pid is None]
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
            if not self._is_ending:
                self._log.info("stopping")
            how = signal.SIGKILL if self._is_ending else signal.SIGTERM
            self._send(how, self._processes)
            self._is_ending = True

    def _send(self, number: int, processes: list[_Process]) -> None:
        for process in processes:
            if process.pid is not None:
                os.kill(process.pid, number)  # it is there until it was waited for

    def _note_end(self, process: _Process, code: int) -> None:
        process.pid, process.ended = None, code
        how = how_ended(code)
        event, of = _event_of(process)
        if self._is_ending:
            self._note(process, State.DOWN)
            if code not in (0, -signal.SIGTERM):  # that of one that had not begun yet is clean
                self._log.error(event, **of, detail=f"{how}, in the end")
                self.code = self.code or max(1, code)
        elif code > 0 and not process.has_served:
            # It has said itself what it objects to, and would again.
            detail = f"{how} before it served: all are stopped"
            self._log.error(event, **of, detail=detail)
            self.code, self._is_ending = code, True
            self._send(signal.SIGTERM, self._processes)
        else:
            self._died(process, how, was_asked=code == 0)

    def _died(self, process: _Process, how: str, *, was_asked: bool = False) -> None:
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
        if all(process.serves for process in self._processes):
            of_all = {} if self._http_all is None else {"http_all": self._http_all}
            self._log.info("all_shards_serve", url=self._shards[0].settings.route, **of_all)
            self._write_ready_file(of_all)

    @property
    def _http_all(self) -> str | None:
        return next((one.settings.http_url for one in self._processes if one.serves_all), None)

    def _write_ready_file(self, of_all: dict[str, str]) -> None:
        if self._settings.ready_file is None:
            return
        places = [
            (str(one.settings.advertise), one.settings.http_url, one.pid) for one in self._shards
        ]
        shards = [{"url": url, "http": http, "pid": pid} for url, http, pid in places]
        url, http, _ = places[0]
        path = Path(self._settings.ready_file)
        daemon.write_ready_file(path, url, http, **of_all, shards=shards)


def _event_of(process: _Process) -> tuple[str, dict[str, int]]:
    """How the log calls the end of a process, and whose it was."""
    if process.serves_all:
        return "http_all_ended", {}
    return "shard_ended", {"shard": process.number}


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


# --- a daemon ------------------------------------------------------------------------------------


def _serve(process: _Process, ready: int) -> int:
    """Be the daemon of a shard; its exit code."""
    structlog.contextvars.bind_contextvars(shard=process.number)
    return daemon.run(process.settings, lambda: _say_ready(ready, process.number))


def _say_ready(ready: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(ready, bytes([number]))


def _end_with_parent(lifeline: int) -> None:
    """Wait for the parent's end, in a thread: the event loop may be busy, or not there yet. A drain
    may take longer than the next parent waits for this daemon's port and database; what a crash
    leaves is what every start can recover from."""
    os.read(lifeline, 1)
    os._exit(1)
