"""Nemesis *resources*: no descriptors left, no room on the disk, too much for the memory.

The daemon refuses what it has no room for, goes on with what it has, never ends, and takes new
tasks again when there is room. Limits are those of the living process (``prlimit``) and a small
file system of its own; where none may be mounted, the shim refuses every block.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from crash.link import Link, Lost, Numbers
from crash.plan import Plan
from crash.shim import build
from support.daemon import Daemon
from support.waiting import rest
from tickwheel.api.frames import FrameType

DISK_BYTES = 192 << 20
FILES, DISK, MEMORY = "files", "disk", "memory"
SPARE_FILES_MAX = 3
STRANGERS = 12
CONNECT_S = 0.3
HOLD_S_MAX = 1.2
FEW_FILES_S_MAX = 6.0
"""How long descriptors are short at most: what waits for one waits for the nemesis."""
REST_S_MAX = 0.5
WELL_S_MAX = 20.0
SETTINGS = {"resident_bytes_max": 2 << 20, "staged_bytes_max": 4 << 20}
"""Small, so that a flood is over each of them."""
PARKED = "parked"
"""A topic that nobody consumes."""
BODY_BYTES = 64 << 10
FRAME_TASKS = 16
FLOOD_FRAMES = 64
"""64 MiB."""
GROWN_BYTES_MAX = 40 << 20
"""By a flood: the limits above, what one connection may have on its way, and the allocator's."""
KEPT = {"in_flight", "dead"}
"""They cannot be cancelled now; they become ready again."""
REFUSALS = {"store_full", "overloaded", "backlog_full", "refused", "outcome_unknown", "draining"}


class SmallDisk:
    """A file system of some MiB at ``folder`` that can be filled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env: dict[str, str] = {}

    def mount(self) -> bool:
        self.folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(self.folder)]
        with contextlib.suppress(OSError):
            return subprocess.run(command, capture_output=True, check=False).returncode == 0
        return False

    def fill(self) -> None:
        with (self.folder / "filler").open("wb", buffering=0) as file:
            piece = 1 << 20
            while piece >= 4_096:
                try:
                    file.write(bytes(piece))
                except OSError:
                    piece //= 4

    def free(self) -> None:
        (self.folder / "filler").unlink()

    def remove(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.folder)], check=True)


class RefusingDisk(SmallDisk):
    """No mount is allowed: the shim in the daemon refuses every block more."""

    def mount(self) -> bool:
        self.folder.mkdir(exist_ok=True)
        made = self.folder.parent / "shim"
        made.mkdir()
        self._switch = made / "switch"
        self.env = {
            "LD_PRELOAD": str(build(made)),
            "SHIM_UNDER": str(self.folder),
            "SHIM_SWITCH": str(self._switch),
        }
        return True

    def fill(self) -> None:
        self._switch.write_text("enospc")

    def free(self) -> None:
        self._switch.unlink()

    def remove(self) -> None:
        """There is nothing to remove."""


def disk_at(folder: Path) -> SmallDisk:
    """Mounted, if that is allowed."""
    disk = SmallDisk(folder)
    if disk.mount():
        return disk
    disk = RefusingDisk(folder)
    disk.mount()
    return disk


class ResourceFaults:
    """``run`` makes ``count`` faults on any of ``daemons``, each kind at least once.

    ``killed``: somebody kills the daemons meanwhile.
    """

    def __init__(
        self,
        daemons: Sequence[Daemon],
        plan: Plan,
        count: int,
        *,
        disk: SmallDisk | None,
        killed: bool,
        bounded: bool,
    ) -> None:
        """``bounded``: bodies need not be in memory, so a flood must not make it grow."""
        self._daemons = daemons
        self._plan = plan
        self._rnd = plan.rnd("resources")
        self._count = count
        self._disk = disk
        self._killed = killed
        self._bounded = bounded
        self._make = {FILES: self._no_files, MEMORY: self._flood}
        if disk is not None:
            self._make[DISK] = self._no_room
        self._kinds = tuple(self._make)
        self._numbers = Numbers()
        self.done: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.disturbed = 0
        self.grown_bytes = 0
        self.slowest_s = 0.0
        self.problems: list[str] = []

    @property
    def missed(self) -> list[str]:
        never = [f"resources: {kind} never happened" for kind in self._kinds if not self.done[kind]]
        if self._disk is not None and not self._killed and not self.refused["store_full"]:
            never.append("resources: nothing was ever refused for want of room")
        return never

    def text(self) -> str:
        shown = ", ".join(f"{kind} {count}" for kind, count in sorted(self.done.items()))
        words = ", ".join(f"{word} {count}" for word, count in sorted(self.refused.items()))
        return (
            f"resources {self.done.total()} ({shown}), refused: {words or 'nothing'}, memory grew"
            f" by {self.grown_bytes >> 20} MiB at most, well again after {self.slowest_s:.1f} s"
        )

    async def run(self) -> None:
        for _ in range(max(self._count, len(self._kinds))):
            kind = self._rnd.choice([k for k in self._kinds if not self.done[k]] or self._kinds)
            daemon = self._rnd.choice(self._daemons)
            self.disturbed += 1
            try:
                await self._make[kind](daemon)
            finally:
                self.disturbed += 1
            self.done[kind] += 1
            if not self._killed:
                await self._well(daemon, kind)
            await rest(REST_S_MAX * self._rnd.random())

    # --- kinds -------------------------------------------------------------------------------

    async def _no_files(self, daemon: Daemon) -> None:
        """Strangers use up the descriptors; then somebody wants what may need one."""
        numbers = self._numbers
        try:
            link = await self._plan.try_link(daemon.port, numbers)
        except Lost:
            return  # it is dead, or stands by
        strangers: list[asyncio.StreamWriter] = []
        try:
            with self._few_files(daemon.pid):
                strangers = await self._connect(daemon.port)
                async with asyncio.timeout(FEW_FILES_S_MAX):
                    await link.call(FrameType.LIST, {"limit": 50})
                    await link.call(FrameType.DEAD_LIST, {"limit": 50})
                    await link.call(FrameType.STATS)
                    await self._put(link, 1, 1)
                    await rest(HOLD_S_MAX * self._rnd.random())
        except (Lost, TimeoutError):
            pass  # where the network is cut too, Redis may need a descriptor that is not there
        finally:
            for writer in strangers:
                writer.transport.abort()
            link.abort()

    @contextlib.contextmanager
    def _few_files(self, pid: int) -> Iterator[None]:
        limits = None
        with contextlib.suppress(OSError):
            limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            used = len(os.listdir(f"/proc/{pid}/fd"))
            room = used + self._rnd.randint(0, SPARE_FILES_MAX)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (room, limits[1]))
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                if limits is not None:
                    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)

    async def _connect(self, port: int) -> list[asyncio.StreamWriter]:
        made = []
        for _ in range(STRANGERS):
            with contextlib.suppress(OSError, TimeoutError):
                opening = asyncio.open_connection("127.0.0.1", port)
                made.append((await asyncio.wait_for(opening, CONNECT_S))[1])
        return made

    async def _no_room(self, daemon: Daemon) -> None:
        assert self._disk is not None
        await asyncio.to_thread(self._disk.fill)
        try:
            hold_s = HOLD_S_MAX * self._rnd.uniform(0.3, 1.0)
            with contextlib.suppress(Lost):
                link = await self._plan.try_link(daemon.port, self._numbers)
                try:
                    await self._put_until_full(link)
                    for _ in range(3):
                        await rest(hold_s / 3)
                        await self._put(link, 4, BODY_BYTES)
                finally:
                    link.abort()
        finally:
            await asyncio.to_thread(self._disk.free)
            await self.sweep()

    async def _put_until_full(self, link: Link) -> None:
        """What its files held before (a log that begins anew, pages that are free) is room too."""
        refused = self.refused["store_full"]
        for _ in range(DISK_BYTES // (FRAME_TASKS * BODY_BYTES)):
            await self._put(link, FRAME_TASKS, BODY_BYTES)
            if self.refused["store_full"] > refused:
                return

    async def _flood(self, daemon: Daemon) -> None:
        """Far more than it may keep in memory, with a consumer that takes a little of it."""
        try:
            link = await self._plan.try_link(daemon.port, self._numbers)
        except Lost:
            return
        pid, before = daemon.pid, rss_bytes(daemon.pid)
        try:
            for _ in range(FLOOD_FRAMES // 4):
                some = [self._put(link, FRAME_TASKS, BODY_BYTES) for _ in range(4)]
                await asyncio.gather(*some)
                await link.call(FrameType.PULL, PARKED, "default", 1, 0, {"lease_ms": 100})
                await link.call(FrameType.LIST, {"topic": PARKED, "limit": 50})
            if daemon.alive and daemon.pid == pid:
                self._grown(before, rss_bytes(pid))
        except Lost:
            pass
        finally:
            link.abort()
            await self.sweep()

    def _grown(self, before: int, after: int) -> None:
        self.grown_bytes = max(self.grown_bytes, after - before)
        if self._bounded and after - before > GROWN_BYTES_MAX:
            self.problems.append(
                f"a flood of {FLOOD_FRAMES * FRAME_TASKS * BODY_BYTES >> 20} MiB made the daemon"
                f" grow by {after - before >> 20} MiB"
            )

    # --- talking -----------------------------------------------------------------------------

    async def _put(self, link: Link, count: int, body_bytes: int) -> list[int]:
        """Enqueue what nobody consumes; what was refused is counted."""
        number = self._numbers.next()
        tasks = [[PARKED, bytes(body_bytes), self._rnd.randrange(300)] for _ in range(count)]
        frame = await link.wait(link.send_as(number, FrameType.ENQUEUE, number, tasks))
        if frame[0] == FrameType.OK:
            return list(frame[2][1])
        self.refused[frame[2]] += 1
        if frame[2] not in REFUSALS:
            self.problems.append(f"an enqueue was answered {frame}")
        return []

    async def _well(self, daemon: Daemon, kind: str) -> None:
        """There is room: it takes new connections and new tasks, without a restart."""
        began_s = time.monotonic()
        while time.monotonic() < began_s + WELL_S_MAX:
            with contextlib.suppress(Lost):
                link = await self._plan.try_link(daemon.port, self._numbers)
                try:
                    if await self._put(link, 1, 1):
                        self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
                        return
                finally:
                    link.abort()
            await rest(0.05)
        self.problems.append(f"{WELL_S_MAX} s after {kind} it took no new task")

    async def sweep(self) -> None:
        """Cancel the parked tasks."""
        link = await self._plan.link(self._numbers)
        try:
            while tasks := (await self._parked(link)):
                await link.call(FrameType.CANCEL, tasks)
        except Lost:
            pass
        finally:
            link.abort()

    async def _parked(self, link: Link) -> list[int]:
        results: list[int] = []
        after = None
        while True:
            options = {"topic": PARKED, "limit": 1000} | ({"after": after} if after else {})
            frame = await link.call(FrameType.LIST, options)
            if frame[0] != FrameType.OK:
                return results
            results += [task["id"] for task in frame[2]["tasks"] if task["state"] not in KEPT]
            if (after := frame[2]["next"]) is None:
                return results


def rss_bytes(pid: int) -> int:
    """Return the resident bytes of a process, 0 if it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) << 10
    return 0
