"""The daemon's role for its shard (taking over, serving, stepping down), and its status for STATUS
and ``/readyz``.

With a private store (SQLite, memory), a daemon is active from its start to its end. With a store
that several daemons share, it is a standby until it is elected, serves until it is deposed, and
then becomes a standby again. To take over, it acquires the lease, opens the store (which raises the
epoch), recovers, and serves. ``open_store`` returns the configured store and the engine's
configuration that depends on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import mmap
import os
import time
import uuid
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from tickwheel import failpoints
from tickwheel.clock import TEST_CLOCK_ENV, Clock
from tickwheel.engine.engine import Engine
from tickwheel.errors import BadRequest
from tickwheel.history.daemon import History
from tickwheel.model.policies import duration_ms
from tickwheel.persistence import (
    ON_SERVERS,
    open_administration,
    open_election,
    open_siblings,
    open_url,
    parse,
    with_setting,
    without_secrets,
)
from tickwheel.persistence.contract import (
    Evidence,
    Fenced,
    Leader,
    Located,
    Mirrored,
    Opened,
    SharedStore,
    Standby,
    Store,
    StoreAway,
    StoreBroken,
    StoreError,
    StoreUnreachable,
)
from tickwheel.server.fleet.lease import Leadership, Life
from tickwheel.server.logs import REPEATING, Log, LogRateLimit, log_event
from tickwheel.server.metrics.observed import Observed
from tickwheel.server.settings import HOT_BYTES_MAX, REDIS_RESIDENT_BYTES_MAX, Settings
from tickwheel.server.shard.shard import Recovering, Shard
from tickwheel.version import __version__
from tickwheel.waiting import cancel_all

if TYPE_CHECKING:
    from collections.abc import Callable

    from tickwheel.clock import Sources
    from tickwheel.engine.state import EngineConfig
    from tickwheel.persistence.contract import Siblings
    from tickwheel.server.fleet.board import Member
    from tickwheel.server.shard.parts import Sender
    from tickwheel.server.tracing import Exports, Tracing

TAKEOVER_RETRY_S = 1.0
"""Seconds until a failed takeover is retried, in which another daemon can take over."""


class Roles:
    """The daemon's roles. Call ``begin``, and then ``run``, which never returns; ``close`` releases
    the resources.

    ``on_shard`` is called with each new shard before it starts; ``on_role_change`` and
    ``on_deposed`` when the connections of a standby or of a leader should end; ``on_abort`` when
    they must end immediately; ``on_lease_change`` with False when the lease expires and the store
    does not answer, and with True when the lease is held again.
    """

    def __init__(
        self,
        settings: Settings,
        log: Log,
        *,
        on_shard: Callable[[Shard], None],
        on_role_change: Callable[[str], None],
        on_deposed: Callable[[], None],
        on_abort: Callable[[], None],
        on_lease_change: Callable[[bool], None],
        status: Callable[[], dict[str, Any]],
        sources: Sources | None = None,
        has_process: bool = True,
        member: Member | None = None,
    ) -> None:
        """``sources`` replace the machine's clocks. ``has_process`` tells whether the process runs
        only this daemon, which then controls garbage collection. ``member`` connects the daemon to
        its node. Raise StoreUnusable or BadRequest for unusable settings."""
        self.settings = settings
        self.log = log
        self._repeating: dict[str, LogRateLimit] = {}
        self.clock = Clock(duration_ms(settings.clock_hold_over_s), sources)
        self._has_process = has_process
        if self.clock.is_steered:
            log.warning("test_clock", detail=f"{TEST_CLOCK_ENV} is set: a file controls the clock")
        self.store, config = open_store(settings)
        self._engine_config = config if member is None else replace(config, shards=member.count)
        self._siblings: Siblings | None = None
        """The other shards; None if this is the only shard."""
        if self._engine_config.shards > 1:
            self._siblings = open_siblings(store_url(settings))
        self.observed = Observed(settings.metrics_lateness_topics_max)
        self.shard: Shard | None = None
        """The shard; None while this daemon does not lead."""
        self.role = "starting"
        self.role_since_ms = self.clock.read().now_ms
        self.address = settings.advertise or settings.listen
        """The address at which clients and other daemons reach this daemon."""
        self.http_url: str | None = None
        """URL of this daemon's HTTP server for other machines; None without such a server."""
        self._on_shard = on_shard
        self._on_role_change = on_role_change
        self._on_deposed = on_deposed
        self._on_abort = on_abort
        self._on_lease_change = on_lease_change
        self._status = status
        self._member = member
        self._leadership: Leadership | None = None
        ttl_ms = duration_ms(settings.leader_ttl_s)
        election = open_election(settings.store, ttl_ms)
        if election is not None:
            self._leadership = Leadership(
                election,
                ttl_ms,
                self.clock,
                on_event=self.on_event,
                on_renewed=self._wake,
                life=Life.own(),
                is_release_near=None if member is None else member.is_release_near,
            )
        options = settings.history(self._engine_config.shard)
        self.history = None if options is None else History(options, self.clock, self.on_event)
        self.exports: Exports | None = None
        """Exporter of spans and metrics; None if OpenTelemetry is off."""
        self._tracing: Tracing | None = None
        self._recovering: Recovering | None = None
        self._logged_failure = self._logged_role = ""
        self._opened = False
        self._hold: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None

    # --- state ---------------------------------------------------------------------------------

    @property
    def shared(self) -> bool:
        """Whether several daemons can share this store."""
        return self._leadership is not None

    @property
    def leader(self) -> Leader | None:
        """The active daemon, or None if none is known."""
        if self._leadership is not None:
            return self._leadership.leader
        if self.shard is None:
            return None
        owner = f"{self.settings.node}/"
        since_ms, epoch = self.role_since_ms, self.shard.epoch
        return Leader(owner, self.address, since_ms, epoch, http=self.http_url or "")

    @property
    def other_leader(self) -> Leader | None:
        """The active daemon if it is not this daemon, else None."""
        leader = self.leader
        return leader if leader is not None and leader.address != self.address else None

    @property
    def standbys(self) -> tuple[Standby, ...]:
        """The standbys that have announced themselves in the store."""
        return self._leadership.standbys if self._leadership is not None else ()

    @property
    def store_at(self) -> str | None:
        """Address of the store's server, ``HOST:PORT``; None if it is unknown or there is none."""
        if self.shard is not None and isinstance(self.store, Located):
            return self.store.address or None
        return (self._leadership.store_at or None) if self._leadership is not None else None

    @property
    def loaded(self) -> int:
        """Number of tasks that the current or last recovery has loaded."""
        return self._recovering.loaded if self._recovering is not None else 0

    # --- roles -----------------------------------------------------------------------------

    async def begin(self) -> None:
        """Return once this daemon is active or a standby. Raise StoreError if the store is
        unusable."""
        leadership = self._leadership
        self._begin_tracing()
        if self.history is not None:
            self.history.start()
        if leadership is not None:
            leadership.http = self.http_url or ""
            await leadership.prepare(self.settings.store_wait_s)
            if not await leadership.first_campaign(self._new_owner(), self.address):
                self._enter("standby")
                return
            self._begin_to_hold(leadership)
            try:
                await self._take_over()
            except (StoreUnreachable, StoreAway) as error:
                # The store was reachable a moment ago; ``run`` retries.
                await self._takeover_failed(error)
            return
        await self._take_over()

    def _begin_tracing(self) -> None:
        settings = self.settings
        if settings.otlp_endpoint is None:
            return
        from tickwheel.server.tracing import Exports, Tracing

        config = self._engine_config
        shard = config.shard if config.shards > 1 else None
        self.exports = Exports(settings, self.on_event, shard)
        if self._has_process:
            self.exports.listen()
        if settings.trace_sample > 0:
            self._tracing = Tracing(settings, self.clock, self.exports)
            self._tracing.start()

    async def run(self) -> None:
        """Serve or stand by, forever. Raise the error that must end the daemon."""
        while True:
            if self.shard is not None:
                try:
                    await self._serve(self.shard)
                except StoreError as error:
                    if self._leadership is None or isinstance(error, StoreBroken):
                        raise
                    await self._step_down(error)
            assert self._leadership is not None
            await self._leadership.campaign(self._new_owner(), self.address)
            self._begin_to_hold(self._leadership)
            try:
                await self._take_over()
                self.observed.failovers += 1
            except StoreError as error:
                await self._takeover_failed(error)
                await asyncio.sleep(TAKEOVER_RETRY_S)

    def _begin_to_hold(self, leadership: Leadership) -> None:
        self._hold = asyncio.create_task(leadership.hold(self._verify))
        self._watch = asyncio.create_task(leadership.watch(self._on_lease_change))

    async def _takeover_failed(self, error: StoreError) -> None:
        """Release the lease and become a standby, because another daemon may succeed."""
        if error.message != self._logged_failure:
            self._logged_failure = error.message
            self.on_event("takeover_failed", f"{error.message}; retrying")
        await self.close_shard(None, clean=False)
        self._enter("standby")

    async def _serve(self, shard: Shard) -> None:
        """Serve until an error ends the leadership, and raise that error."""
        ends: set[asyncio.Future[Any]] = {shard.failed}
        if self._hold is not None:
            ends.add(self._hold)
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for future in done:
            future.result()

    async def _step_down(self, error: StoreError) -> None:
        """Stop deliveries and become a standby: another daemon leads, or the store is unusable."""
        shard, self.shard = self.shard, None
        assert shard is not None and self._leadership is not None
        shard.pause()
        self._leadership.forfeit(for_good=isinstance(error, Fenced))
        self.on_event("deposed", error.message)
        self._enter("standby")
        self._on_deposed()
        await self.close_shard(shard, clean=False)
        self.observed.ended(shard.core)
        self._recovering = None
        if self._has_process:
            gc.unfreeze()

    async def _take_over(self) -> None:
        """Open the store, recover the tasks that are due soon, and serve. Raise StoreError on
        failure."""
        self._enter("starting")
        failpoints.hit("takeover.elected")
        settings, started_s = self.settings, time.monotonic()
        if self._siblings is not None:
            self._siblings.prepare()
        now = self.clock.read()
        owner, opened = await self._open_store(now.now_ms)
        self._opened = True
        failpoints.hit("takeover.opened")
        self._compare_clock(opened)
        now = self.clock.read()
        recorder = self.history.begin(opened) if self.history is not None else None
        engine = Engine(
            self._engine_config,
            opened.epoch,
            opened.id_mark,
            now.now_ms,
            recorder,
            opened.key_seed,
        )
        grace_ms = duration_ms(settings.reconnect_grace_s)
        recovering = Recovering(self.store, engine, opened, self.clock, grace_ms)
        self._recovering = recovering
        await recovering.begin()
        self._log_held_clock(recovering)
        shard = Shard(
            settings,
            engine,
            self.store,
            opened,
            self.clock,
            owner=owner,
            backup_folder=backup_folder(settings),
            on_event=self.on_event,
            may_deliver=self._leadership.may_deliver if self._leadership is not None else None,
            status=self._status,
            observed=self.observed,
            history=self.history,
            tracing=self._tracing,
            siblings=self._siblings,
        )
        if shard.following is not None:
            await shard.following.catch_up()
        self._on_shard(shard)
        self.shard = shard
        shard.start(self._load_rest(shard, recovering, started_s))
        self._enter("active")
        self._on_role_change("this daemon is now active: reconnect")
        self.observed.recovery_s = time.monotonic() - started_s
        if self.shared:
            self.log.info("durability", detail=self.store.durability)
        recovering.log_summary(self.log, without_secrets(settings.store), self.observed.recovery_s)

    def _compare_clock(self, opened: Opened) -> None:
        """Hold the clock if it is far ahead of the store's last time and would fire all tasks."""
        settings = self.settings
        if settings.accept_clock:
            self.clock.accept()
        elif opened.position_ms and not opened.created:
            limit_ms = duration_ms(settings.clock_hold_start_over_s)
            self.clock.begin_at(opened.position_ms, limit_ms)

    def _log_held_clock(self, recovering: Recovering) -> None:
        if not self.clock.held_at_start:
            return
        if recovering.is_empty:
            self.clock.accept()  # the store has no task that could fire
        else:
            self.on_event("clock_held", why_held(self.clock))

    def give_up(self) -> None:
        """Stop waiting for an unreachable store, because the daemon is stopping."""
        if self._leadership is not None:
            self._leadership.give_up()

    def accept_clock(self) -> None:
        """Follow the wall clock, on the command of an operator."""
        if self.clock.held:
            self.clock.accept()
            self.on_event("clock_accepted", "an operator accepted the wall clock")
            self._wake()

    async def _open_store(self, now_ms: int) -> tuple[str, Opened]:
        leadership, evidence = self._leadership, self._evidence()
        if leadership is None:
            owner = self._new_owner()
            return owner, await self.store.open(owner, now_ms, evidence=evidence)
        assert leadership.me is not None
        owner = leadership.me.owner
        # A daemon that has seen data must not initialize an empty store (see ``Leadership``).
        store = cast("SharedStore", self.store)
        may_create = not leadership.incarnation
        opened = await store.open(owner, now_ms, evidence=evidence, may_create=may_create)
        leadership.set_epoch(opened.epoch)
        return owner, opened

    def _evidence(self) -> list[Evidence]:
        """Return facts about the store from other sources, against which it is checked when it is
        opened."""
        facts = self.history.evidence() if self.history is not None else []
        if self.settings.expect_store:
            facts.append(Evidence("the setting expect_store"))
        return facts

    async def _load_rest(self, shard: Shard, recovering: Recovering, started_s: float) -> None:
        await recovering.load_rest()
        if self._has_process:
            gc.collect()
            gc.freeze()
        self.observed.load_s = time.monotonic() - started_s
        if recovering.begin_loaded_all:
            return
        self.log.info("loaded", tasks=recovering.loaded, seconds=round(self.observed.load_s, 3))

    # --- the end of the leadership -------------------------------------------------------------

    async def close_shard(self, shard: Shard | None, clean: bool) -> None:
        """Release the resources of a leader, also of one that did not finish its takeover."""
        if shard is not None:
            self._on_abort()
            if not clean:
                await shard.kill()
        opened, self._opened = self._opened, False
        closed = False
        try:
            if opened:
                await self.store.close(clean)
            closed = clean
        finally:
            if self.history is not None:
                self.history.end(closed)
            held = [task for task in (self._hold, self._watch) if task is not None]
            self._hold = self._watch = None
            await cancel_all(held)
            if self._leadership is not None:
                await self._leadership.resign()

    async def close(self) -> None:
        """Release the resources that ``close_shard`` leaves."""
        try:
            if self._leadership is not None:
                await self._leadership.close()
            if self._siblings is not None:
                await self._siblings.close()
        finally:
            if self.history is not None:
                await self.history.stop()
            if self._tracing is not None:
                await self._tracing.stop()

    # --- details -----------------------------------------------------------------------------

    def _enter(self, role: str) -> None:
        if role != self.role:
            self.role, self.role_since_ms = role, self.clock.read().now_ms
            if self._member is not None:
                epoch = self.shard.epoch if self.shard is not None else 0
                self._member.note(role, epoch, self.role_since_ms)
            other = self.other_leader
            active = None if other is None else other.address
            state = f"{role} {active}"  # a failing takeover is retried every second
            if self.shared and role != "starting" and state != self._logged_role:
                self._logged_role = state
                self.log.info("role", role=role, active=active)

    def _verify(self) -> None:
        """Verify a store whose lease or connection was lost, because it may have lost data."""
        if self.shard is not None:
            self.shard.spawn(self._verify_store())

    async def _verify_store(self) -> None:
        # The next commit verifies a store that is unreachable or being rewritten.
        with contextlib.suppress(StoreAway):
            await self.store.verify()

    def _wake(self) -> None:
        if self.shard is not None:
            self.shard.wake()

    def _new_owner(self) -> str:
        return f"{self.settings.node}/{uuid.uuid4().hex[:12]}"

    def on_event(self, event: str, text: str) -> None:
        self.observed.note_event(event)
        if event in REPEATING:
            rest = self._repeating.setdefault(event, LogRateLimit()).note(
                self.clock.read().mono_ms / 1000
            )
            if rest is None:
                return
            text += rest
        log_event(self.log, event, text)


def why_held(clock: Clock) -> str:
    """Return a text that tells an operator why the clock is held, and the remedy."""
    days = f"{clock.ahead_ms / 86_400_000:.1f} days"
    reason = f"the wall clock jumped {days} ahead (clock_hold_over_s)"
    if clock.held_at_start:
        reason = (
            f"the wall clock is {days} ahead of the last time in the store"
            " (clock_hold_start_over_s): it is wrong, or no daemon has run since then"
        )
    return (
        f"{reason}. No task fires until the clock is corrected or accepted: send the daemon"
        " SIGUSR1 (kill -USR1), or start it with --accept-clock"
    )


def store_url(settings: Settings) -> str:
    """Return the store's URL, extended by the settings that affect the store."""
    url = settings.store
    if settings.allow_volatile_store and parse(url).kind in ON_SERVERS:
        url = with_setting(url, "allow_volatile_store", "1")
    return url


def open_store(settings: Settings) -> tuple[Store, EngineConfig]:
    """Return the unopened store and the engine's configuration. Raise StoreUnusable or BadRequest
    for unusable settings."""
    url, config = store_url(settings), settings.engine()
    kind = parse(url).kind
    if kind not in ON_SERVERS:
        return open_url(url, disk_refuse=settings.disk_refuse), config
    shard = open_administration(url).shard
    if settings.shard not in (0, shard):
        raise BadRequest(
            f"setting shard: {settings.shard} differs from shard {shard} in the store's URL"
        )
    store = open_url(url)
    if not (isinstance(store, Mirrored) and store.mirror):
        return store, replace(config, shard=shard)
    resident_bytes_max = settings.resident_bytes_max or REDIS_RESIDENT_BYTES_MAX
    hot_bytes_max = min(resident_bytes_max, HOT_BYTES_MAX)
    config = replace(config, shard=shard, resident_bytes_max=hot_bytes_max)
    return open_url(url, resident_bytes_max=resident_bytes_max), config


def backup_folder(settings: Settings) -> Path:
    """Return the folder for backups: ``backup_dir``, or else the folder of the store."""
    if settings.backup_dir is not None:
        return Path(settings.backup_dir)
    parsed = parse(settings.store)
    return Path(parsed.path).resolve().parent if parsed.kind == "sqlite" else Path.cwd()


def check_folders(settings: Settings) -> None:
    """Raise BadRequest if the folder for backups or for the audit log is missing. The daemon does
    not create these folders, because it would use the wrong disk if a volume is not mounted."""
    if settings.backup_dir is not None and not Path(settings.backup_dir).is_dir():
        raise BadRequest(
            f"setting backup_dir: {settings.backup_dir} is not a folder; mount its volume or create"
            " the folder"
        )
    if settings.audit_file is None:
        return
    path = Path(settings.audit_file).absolute()
    if not path.parent.is_dir():
        raise BadRequest(
            f"setting audit_file: the folder of {settings.audit_file} does not exist; mount its"
            " volume or create the folder"
        )
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        problem = "is a folder" if path.is_dir() else "is not writable by the daemon's user"
        raise BadRequest(
            f"setting audit_file: {settings.audit_file} {problem}; choose another file"
        )


# --- status --------------------------------------------------------------------------------------

NOT_READY = frozenset(
    (
        "starting",
        "recovering",
        "standby",
        "draining",
        "store_full",
        "store_trouble",
        "rows_missing",
        "clock_held",
    )
)
"""States in which ``/readyz`` fails, so that load balancers avoid the daemon. A daemon that is
still loading tasks serves."""
IDS_NAMED_MAX = 3


class InboxReader(Protocol):
    """The process that takes tasks from an inbox, for metrics."""

    restarts: int

    @property
    def is_waiting(self) -> bool: ...
    @property
    def delay_s(self) -> float: ...
    def total(self, name: str) -> int: ...


class Running(Protocol):
    """The interface of a daemon that STATUS and metrics read."""

    settings: Settings
    roles: Roles
    draining: bool
    started_mono_s: float

    @property
    def connection_count(self) -> int: ...
    @property
    def outbound(self) -> Sender | None: ...
    @property
    def inbox(self) -> InboxReader | None: ...
    @property
    def member(self) -> Member | None: ...


def state_of(daemon: Running) -> tuple[str, str | None]:
    """Return the state of the daemon, and its cause if known."""
    shard = daemon.roles.shard
    if daemon.draining:
        return "draining", None
    if shard is None:
        return ("standby" if daemon.roles.role == "standby" else "recovering"), None
    committer = shard.committer
    if committer.full:
        return "store_full", committer.trouble
    if committer.trouble is not None:
        return "store_trouble", committer.trouble
    if shard.core.missing:
        ids = ", ".join(map(str, islice(shard.core.missing, IDS_NAMED_MAX)))
        return "rows_missing", (
            f"the store lacks the rows of {len(shard.core.missing)} unfinished tasks:"
            f" {ids}{' …' if len(shard.core.missing) > IDS_NAMED_MAX else ''}"
        )
    if daemon.roles.clock.held:
        return "clock_held", why_held(daemon.roles.clock)
    if not shard.loaded.is_set():
        return "loading", None
    return "ready", None


def status_map(daemon: Running) -> dict[str, Any]:
    """Return the answer to STATUS; ``docs/protocol.md`` lists the fields."""
    state, detail = state_of(daemon)
    shard = daemon.roles.shard
    now = daemon.roles.clock.read()
    leader = daemon.roles.leader
    return {
        "node": daemon.settings.node,
        "version": __version__,
        "role": daemon.roles.role,
        "state": state,
        "detail": detail,
        "epoch": shard.epoch if shard is not None else 0,
        "address": daemon.roles.address,
        "since_ms": daemon.roles.role_since_ms,
        "active": _leader_map(leader) if leader is not None else None,
        "standbys": [_standby_map(standby) for standby in daemon.roles.standbys],
        "store": without_secrets(daemon.settings.store),
        "store_at": daemon.roles.store_at,
        "mirror": daemon.roles.store.mirror if isinstance(daemon.roles.store, Mirrored) else None,
        "durability": daemon.roles.store.durability if shard is not None else None,
        "store_ok": shard is None or shard.committer.trouble is None,
        "now_ms": now.now_ms,
        "uptime_s": round(time.monotonic() - daemon.started_mono_s, 3),
        "loaded": daemon.roles.loaded,
        "http": daemon.roles.http_url,
        "pid": os.getpid(),
        "memory_bytes": memory_bytes(),
        **_disk(daemon.roles.observed),
        **_shards(daemon),
    }


def _shards(daemon: Running) -> dict[str, Any]:
    """Return this shard and the addresses of all shards; nothing if there is only one shard."""
    settings, member = daemon.settings, daemon.member
    urls = settings.shard_urls if member is None else member.route()[1]
    return {"shard": settings.shard, "shards": urls} if urls else {}


def memory_bytes() -> int | None:
    """Return the resident memory of the process in bytes, or None if it is unknown."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except (OSError, ValueError, IndexError):
        return None


def _disk(observed: Observed) -> dict[str, Any]:
    """Return the last measurement of the disk that contains an embedded store."""
    free_bytes = observed.disk_free_bytes
    return {
        "disk_used": None if free_bytes is None else round(observed.disk_used, 4),
        "disk_free_bytes": free_bytes,
    }


def _leader_map(leader: Leader) -> dict[str, Any]:
    return {
        "node": leader.node,
        "address": leader.address,
        "epoch": leader.epoch or None,
        "since_ms": leader.since_ms,
        "http": leader.http or None,
    }


def _standby_map(standby: Standby) -> dict[str, Any]:
    return {
        "node": standby.node,
        "address": standby.address,
        "since_ms": standby.since_ms,
        "http": standby.http or None,
    }


def readiness(daemon: Running) -> tuple[bool, dict[str, Any]]:
    """Return whether the daemon accepts and delivers tasks, and the details for ``/readyz``, which
    include the reason if it does not."""
    state, detail = state_of(daemon)
    answer: dict[str, Any] = {"status": state, "role": daemon.roles.role}
    if detail is not None:
        answer["reason"] = detail
    if daemon.roles.shard is not None:
        answer["epoch"] = daemon.roles.shard.epoch
    elif daemon.roles.leader is not None:
        answer["active"] = daemon.roles.leader.address
        answer["active_http"] = daemon.roles.leader.http or None
    return state not in NOT_READY, answer
