"""A SIGKILL leaves the page cache, so it cannot show a missing fsync. This does.

A real daemon with a recorder between it and the kernel: every reply that claims durability is
written only after a sync that began after the data was written. And the power is cut: what was
synced is kept, of the rest any part, torn; a store recovers from that to every promise made.
The mutations ``sync-off`` and ``sync-normal`` show that this test fails without the syncs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from daemon import Daemon
from raw import Raw

from crash.shim import Disk, Event, Said, Shimmed, frames
from tickwheel.model.records import Ending
from tickwheel.persistence import audit, open_url
from tickwheel.persistence.contract import StoredTask
from tickwheel.protocol.frames import FrameType

FAR_MS = 3_600_000
CUTS = 40
SEED = 20_261_121


@pytest.fixture
def shimmed(tmp_path: Path) -> Iterator[Callable[..., Shimmed]]:
    made: list[Shimmed] = []

    def make(**options: Any) -> Shimmed:
        made.append(Shimmed(tmp_path / f"shimmed-{len(made)}", **options))
        return made[-1]

    yield make
    for daemon in made:
        daemon.kill()


def durable_before(events: list[Event], at: int, since: int) -> bool:
    """Whether after ``since`` something was written to the log or the database, and a sync of
    that file began after it and ended before ``at``."""
    wrote: dict[str, int] = {}
    began: dict[str, int] = {}
    for event in events[since:at]:
        if event.kind == "W":
            wrote[event.path] = wrote.get(event.path, 0) + 1
        elif event.kind == "S":
            began[event.path] = wrote.get(event.path, 0)
        elif event.kind == "F" and 0 < began.get(event.path, 0) == wrote.get(event.path, 0):
            return True
    return False


def placed(said: list[Said], kind: FrameType | None, request: int) -> int:
    """Where the frame of ``request`` stands; ``kind`` None: its OK."""
    kinds = [kind] if kind is not None else [FrameType.OK]
    return next(s.at for s in said if s.frame[0] in kinds and s.frame[1] == request)


def test_every_reply_waits_for_a_sync_of_what_it_claims(
    shimmed: Callable[..., Shimmed],
) -> None:
    """One command at a time, each verb: received, written, synced, and only then answered."""
    daemon = shimmed(lease_checkpoint_s=60, retry_max=1).start()
    with Raw(daemon.port) as raw:
        calls = [(FrameType.SUBSCRIBE, raw.call(FrameType.SUBSCRIBE, 1, "t", "g", 100, {})[1])]

        def did(kind: FrameType, *fields: Any) -> Any:
            frame = raw.call(kind, *fields)
            assert frame[0] == FrameType.OK, frame
            calls.append((kind, frame[1]))
            return frame[2]

        def come() -> tuple[int, int, int]:
            """(id, epoch, attempt) of one delivery, made and received."""
            (task_id,) = did(FrameType.ENQUEUE, 0, [("t", b"now", 0)])[1]
            while (frame := raw.next())[0] != FrameType.DELIVER:
                pass
            assert frame[4][0][0] == task_id
            return task_id, frame[2], frame[4][0][1]

        (far,) = did(FrameType.ENQUEUE, 0, [("t", b"far", FAR_MS)])[1]
        assert did(FrameType.RESCHEDULE, [(far, 2 * FAR_MS, None)])[0][0] == "scheduled"
        assert did(FrameType.CANCEL, [far]) == ("cancelled",)
        task_id, epoch, attempt = come()
        assert did(FrameType.ACK, "t", "g", epoch, [task_id], [attempt]) is None
        task_id, epoch, attempt = come()
        assert did(FrameType.NACK, "t", "g", [(task_id, epoch, attempt, FAR_MS, "no")]) == (
            "retrying",
        )
        task_id, epoch, attempt = come()
        assert did(FrameType.REJECT, "t", "g", [(task_id, epoch, attempt, "no")]) == ("dead",)
        assert did(FrameType.DEAD_DELETE, [(task_id, "g")]) == ("deleted",)
    events = daemon.events()
    received, sent = frames(events, "G"), frames(events, "R")
    early = [
        (kind.name, request)
        for kind, request in calls
        if not durable_before(events, placed(sent, None, request), placed(received, kind, request))
    ]
    assert not early, f"answered before what they claim was synced: {early}"
    assert len(calls) == 11


def test_pipelined_enqueues_and_their_repeats_wait_for_the_sync_of_their_own_bytes(
    shimmed: Callable[..., Shimmed],
) -> None:
    daemon = shimmed().start()
    session = random.Random(SEED).randbytes(16)
    with Raw(daemon.port, session=session) as raw:
        first = raw.request + 1
        numbers = range(first, first + 300)
        for number in numbers:
            frame = (FrameType.ENQUEUE, first, [("t", _token(number), FAR_MS)])
            assert raw.send(*frame) == number
            if number % 5 == 0:
                raw.request -= 1
                raw.send(*frame)  # again at once, while the first is under way
        for number in (*numbers, *(n for n in numbers if n % 5 == 0)):
            assert raw.answer(number)[0] == FrameType.OK
    events = daemon.events()
    replies = [said for said in frames(events, "R") if said.frame[1] in numbers]
    assert len(replies) == 360
    synced = _synced_tokens(events)
    never = len(events)
    early = [s.frame[1] for s in replies if synced.get(_token(s.frame[1]), never) > s.at]
    assert not early, f"answered before their bytes were synced: {early}"
    syncs = sum(1 for e in events if e.kind == "F" and e.path.endswith("-wal"))
    assert syncs < 300, "group commit: fewer syncs than requests"


def _token(number: int) -> bytes:
    return b"<token %d>" % number


def _synced_tokens(events: list[Event]) -> dict[bytes, int]:
    """For each token the event at which a sync of the log that held it had ended."""
    found: dict[bytes, int] = {}
    waiting: list[bytes] = []
    covered = 0
    for index, event in enumerate(events):
        if not event.path.endswith("-wal"):
            continue
        if event.kind == "W":
            pieces = event.data.split(b"<token ")[1:]
            waiting += [b"<token " + piece.partition(b">")[0] + b">" for piece in pieces]
        elif event.kind == "S":
            covered = len(waiting)
        elif event.kind == "F":
            for token in waiting[:covered]:
                found.setdefault(token, index)
            del waiting[:covered]
    return found


# --- the power is cut --------------------------------------------------------------------------


def _work(daemon: Daemon, rounds: int) -> None:
    """Enqueues, and acks of half of what comes, for as long as the log takes to go around."""
    with Raw(daemon.port) as raw:
        raw.call(FrameType.SUBSCRIBE, 1, "t", "g", 1_000, {"lease_ms": FAR_MS})
        for number in range(rounds):
            tasks = [("t", b"%d" % number * 60, 0 if i % 2 else FAR_MS) for i in range(6)]
            assert raw.enqueue(*tasks)[0] == FrameType.OK
            while (frame := raw.next())[0] != FrameType.DELIVER:
                pass
            items = frame[4]
            receipts = [i[0] for i in items], [i[1] for i in items]
            assert raw.call(FrameType.ACK, "t", "g", frame[2], *receipts)[0] == FrameType.OK


class Promises:
    """What a daemon had told its client up to one event."""

    def __init__(self, events: list[Event]) -> None:
        asked = {(s.socket, s.frame[1]): s.frame for s in frames(events, "G")}
        answered = {
            (s.socket, s.frame[1]): s.frame
            for s in frames(events, "R")
            if s.frame[0] == FrameType.OK
        }
        self.accepted: set[int] = set()
        self.acked: set[int] = set()
        self.maybe_acked: set[int] = set()
        for key, frame in asked.items():
            answer = answered.get(key)
            if frame[0] == FrameType.ENQUEUE and answer is not None:
                self.accepted |= set(answer[2][1])
            elif frame[0] == FrameType.ACK:
                (self.maybe_acked if answer is None else self.acked).update(frame[5])

    def broken(self, stored: set[int], endings: dict[int, Ending]) -> list[str]:
        lost = self.accepted - stored - self.acked - self.maybe_acked
        back = self.acked & stored
        unknown = {i for i in self.acked if endings.get(i) is not Ending.ACKED}
        return [
            f"{word}: {sorted(ids)}"
            for word, ids in (("lost", lost), ("back", back), ("ack forgotten", unknown))
            if ids
        ]


async def _recover(folder: Path) -> tuple[set[int], dict[int, Ending]]:
    store = open_url(f"sqlite:///{folder / 'store.db'}?reserve_bytes=0")
    await store.open("after the cut", 1_700_000_000_000)
    try:
        found: list[StoredTask] = await store.scan(-1, 1_000_000, None)
        small = await store.recover_small()
        return {task.row.id for task in found}, dict(small.endings)
    finally:
        await store.close(clean=False)


async def test_a_power_cut_leaves_every_promise(
    tmp_path: Path, shimmed: Callable[..., Shimmed]
) -> None:
    daemon = shimmed(query="reserve_bytes=0&wal_bytes=65536").start()
    _work(daemon, 60)
    daemon.kill()
    daemon.start()
    _work(daemon, 20)
    assert daemon.terminate() == 0
    daemon.start()
    _work(daemon, 20)
    daemon.kill()
    events = daemon.events()
    started = next(s.at for s in frames(events, "R"))
    rnd = random.Random(SEED)
    points = sorted(rnd.sample(range(started, len(events)), CUTS))
    disk, promised = Disk(daemon.data), 0
    for number, (before, at) in enumerate(pairwise([0, *points])):
        disk.play(events[before:at])
        folder = tmp_path / f"cut-{number}"
        folder.mkdir()
        disk.cut(folder, rnd)
        promises = Promises(events[:at])
        stored, endings = await _recover(folder)
        broken = promises.broken(stored, endings)
        assert not broken, f"seed {SEED}, event {at} of {len(events)}: {broken}"
        found = audit.check(f"sqlite:///{folder / 'store.db'}")
        assert not found.problems, f"seed {SEED}, event {at}: {found.problems}"
        promised = len(promises.accepted)
    assert promised > 400
    checkpoints = sum(1 for e in events if e.kind == "F" and e.path.endswith("store.db"))
    assert checkpoints > 5, "the log was written back in between"


def test_a_daemon_starts_from_what_a_power_cut_left(
    tmp_path: Path, shimmed: Callable[..., Shimmed]
) -> None:
    daemon = shimmed(query="reserve_bytes=0&wal_bytes=65536").start()
    _work(daemon, 30)
    daemon.kill()
    events = daemon.events()
    folder = tmp_path / "cut"
    folder.mkdir()
    disk = Disk(daemon.data)
    disk.play(events)
    disk.cut(folder, random.Random(SEED))
    promises = Promises(events)
    with Daemon(tmp_path / "again", store=f"sqlite:///{folder / 'store.db'}") as again:
        with Raw(again.port) as raw:
            ids = sorted(promises.accepted)
            answer = raw.call(FrameType.LOOKUP, ids)[2]
        words = {task["id"]: task["state"] for task in answer}
        assert {words[i] for i in promises.acked} == {"acked"}
        assert {words[i] for i in promises.accepted - promises.acked} == {"scheduled"}
