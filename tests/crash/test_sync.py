"""A SIGKILL leaves the page cache, so it cannot show a missing fsync. This does.

A real daemon with a recorder between it and the kernel: every reply that claims durability is
written only after a sync that began after the data was written. And the power is cut: what was
synced is kept, of the rest any part, torn; a store recovers from that to every promise made.
The seeded bugs ``sync-off`` and ``sync-normal`` show that this test fails without the syncs.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from crash.shim import Disk, Event, Said, Shimmed, frames
from support.daemon import Daemon
from support.raw import Raw
from tickwheel.api.frames import FrameType
from tickwheel.model.kinds import GROUP, SESSION
from tickwheel.model.records import (
    GroupRow,
    Outcome,
    ProgressRow,
    ProgressState,
    SessionRow,
    TaskRow,
)
from tickwheel.persistence import audit, open_url
from tickwheel.persistence.contract import StoredTask

FAR_MS = 3_600_000
FEW, MANY = 12, 40
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


def test_every_reply_waits_for_its_sync(shimmed: Callable[..., Shimmed]) -> None:
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
        assert did(FrameType.RESCHEDULE, [far], {"delay_ms": 2 * FAR_MS})[0][1] == "scheduled"
        assert did(FrameType.CANCEL, [far]) == ((far, "cancelled"),)
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


def test_pipelined_enqueues_wait_for_their_own_sync(shimmed: Callable[..., Shimmed]) -> None:
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
    result: dict[bytes, int] = {}
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
                result.setdefault(token, index)
            del waiting[:covered]
    return result


# --- the power is cut --------------------------------------------------------------------------


def _work(daemon: Daemon, rounds: int) -> None:
    """Every kind of row and of change, for as long as the log takes to go around: tasks alone and
    in packs, of which some leave; rows that change; progress, dead letters, groups, sessions."""
    with Raw(daemon.port) as raw:

        def did(kind: FrameType, *fields: Any) -> Any:
            frame = raw.call(kind, *fields)
            assert frame[0] == FrameType.OK, frame
            return frame[2]

        did(FrameType.SUBSCRIBE, 1, "t", "g", 1_000, {"lease_ms": FAR_MS})
        for number in range(rounds):
            tasks = [("t", b"%d" % number * 60, 0 if i % 2 else FAR_MS) for i in range(6)]
            assert raw.enqueue(*tasks)[0] == FrameType.OK
            while (frame := raw.next())[0] != FrameType.DELIVER:
                pass
            _settle(did, number, frame[2], frame[4])
            if number % 3 == 0:
                _pack(raw, did, number)
            if number % 4 == 0:
                _group(did, f"{raw.socket.getsockname()[1]}-{number}", number)


def _settle(did: Callable[..., Any], number: int, epoch: int, items: Any) -> None:
    """The deliveries of one frame: acked, or one of them put off, or dead, or deleted."""
    kind, (task_id, attempt, *_) = number % 4, items[0]
    rest = items[1:] if kind else items
    if kind == 1:
        did(FrameType.NACK, "t", "g", [(task_id, epoch, attempt, FAR_MS, "later")])
    elif kind:
        did(FrameType.REJECT, "t", "g", [(task_id, epoch, attempt, "never")])
    if kind == 3:
        did(FrameType.DEAD_DELETE, [(task_id, "g")])
    if rest:
        receipts = [item[0] for item in rest], [item[1] for item in rest]
        did(FrameType.ACK, "t", "g", epoch, *receipts)


def _pack(raw: Raw, did: Callable[..., Any], number: int) -> None:
    """Tasks that are stored as packs; some leave, others get a row of their own."""
    options = {"key": "k", "priority": 3}
    tasks = [("t", b"%d" % i * 9, FAR_MS, options if i % 7 == 0 else {}) for i in range(80)]
    answer = raw.enqueue(*tasks)
    assert answer[0] == FrameType.OK, answer
    ids = answer[2][1]
    did(FrameType.CANCEL, ids[:12] if number % 2 else ids[:50])
    did(FrameType.RESCHEDULE, ids[60:66], {"delay_ms": 2 * FAR_MS})


def _group(did: Callable[..., Any], name: str, number: int) -> None:
    did(FrameType.GROUP_CREATE, "u", name, {"retry": "rocketmq"})
    did(FrameType.CONFIGURE, "u", name, {"paused": True})
    if number % 8 == 0:
        did(FrameType.GROUP_DELETE, "u", name, True)


class Held(NamedTuple):
    """What a store holds."""

    rows: dict[int, TaskRow]
    outcomes: dict[int, Outcome]
    progress: dict[int, ProgressRow]
    dead: set[int]
    groups: dict[str, GroupRow]
    sessions: list[SessionRow]


class Promises:
    """What a daemon had answered its client up to one event."""

    def __init__(self, events: list[Event]) -> None:
        asked = {(s.socket, s.frame[1]): s.frame for s in frames(events, "G")}
        answered = {
            (s.socket, s.frame[1]): s.frame
            for s in frames(events, "R")
            if s.frame[0] == FrameType.OK
        }
        self.last: dict[int, tuple[FrameType, Any]] = {}
        """Task → what was confirmed of it last, and the answer."""
        self.open: set[int] = set()
        """Tasks that something was asked of, and there is no answer."""
        self.groups: dict[str, FrameType] = {}
        self.open_groups: set[str] = set()
        self.requests: dict[bytes, dict[int, Any]] = {}
        """Session → number of an ENQUEUE → ids."""
        session = b""
        for key, frame in asked.items():
            kind, answer = FrameType(frame[0]), answered.get(key)
            if kind is FrameType.HELLO:
                session = frame[2]["session"]
            elif kind in (FrameType.GROUP_CREATE, FrameType.CONFIGURE, FrameType.GROUP_DELETE):
                if answer is None:
                    self.open_groups.add(frame[3])
                else:
                    self.groups[frame[3]] = kind
            elif kind is FrameType.ENQUEUE:
                if answer is not None:
                    ids = answer[2][1]
                    self.requests.setdefault(session, {})[frame[1]] = ids
                    self.last.update((i, (kind, None)) for i in ids)
            elif kind is not FrameType.SUBSCRIBE:
                self._named(kind, frame, answer)

    def _named(self, kind: FrameType, frame: Any, answer: Any) -> None:
        if kind is FrameType.ACK:
            ids = list(frame[5])
        elif kind in (FrameType.CANCEL, FrameType.RESCHEDULE):
            ids = list(frame[2])
        else:
            ids = [item[0] for item in frame[-1]]
        if answer is None:
            self.open.update(ids)
            return
        answers = answer[2] if kind is FrameType.RESCHEDULE else [None] * len(ids)
        self.last.update((i, (kind, one)) for i, one in zip(ids, answers, strict=True))

    def broken(self, held: Held) -> list[str]:
        texts = [
            f"task {task_id} after {kind.name}: {problem}"
            for task_id, (kind, answer) in self.last.items()
            if task_id not in self.open and (problem := _wrong(held, task_id, kind, answer))
        ]
        for name, kind in self.groups.items():
            row = held.groups.get(name)
            settings = row.settings if row is not None else None
            if name in self.open_groups:
                continue
            if kind is FrameType.GROUP_DELETE:
                fine = row is None or (settings is not None and settings.closed_ms is not None)
            else:
                fine = settings is not None and settings.paused == (kind is FrameType.CONFIGURE)
            if not fine:
                texts.append(f"group {name} after {kind.name}: {row}")
        for session, requests in self.requests.items():
            rows = [row for row in held.sessions if row.session == session]
            if not rows:
                texts.append(f"session {session!r} is forgotten")
                continue
            floor = max(row.floor for row in rows)
            kept = {answer[0]: answer[1] for row in rows for answer in row.answers}
            texts += [
                f"request {number} may be done again"
                for number, ids in requests.items()
                if number >= floor and kept.get(number) != ids[0]
            ]
        return texts


ENDS = {
    FrameType.ACK: Outcome.ACKED,
    FrameType.CANCEL: Outcome.CANCELLED,
    FrameType.DEAD_DELETE: Outcome.DELETED,
}


def _wrong(held: Held, task_id: int, kind: FrameType, answer: Any) -> str | None:
    """Return how a task differs from its confirmed state."""
    row = held.rows.get(task_id)
    if kind in ENDS:
        if row is not None:
            return "it is back"
        return None if held.outcomes.get(task_id) is ENDS[kind] else "how it ended is forgotten"
    if row is None:
        return "it is lost"
    if kind is FrameType.RESCHEDULE and row.due_ms != answer[2]:
        return f"it is due at {row.due_ms}, not at {answer[2]}"
    progress = held.progress.get(task_id)
    if kind is FrameType.NACK and (progress is None or progress.state is not ProgressState.WAITING):
        return "its wait is forgotten"
    if kind is FrameType.REJECT and task_id not in held.dead:
        return "it is no dead letter"
    return None


async def _recover(folder: Path) -> Held:
    store = open_url(f"sqlite:///{folder / 'store.db'}?reserve_bytes=0")
    await store.open("after the cut", 1_700_000_000_000)
    try:
        tasks: list[StoredTask] = await store.scan(-1, 1_000_000, None)
        small = await store.recover_small()
        return Held(
            {task.row.id: task.row for task in tasks},
            dict(small.outcomes),
            {row.id: row for row in small.progress},
            {task_id for task_id, _, _ in small.dead},
            {row.group: row for row in small.of_kind(GROUP) if row.topic == "u"},
            small.of_kind(SESSION),
        )
    finally:
        await store.close(clean=False)


@pytest.mark.parametrize("cuts", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
async def test_a_power_cut_leaves_every_promise(
    tmp_path: Path, shimmed: Callable[..., Shimmed], cuts: int
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
    points = sorted(rnd.sample(range(started, len(events)), cuts))
    disk, promises = Disk(daemon.data), Promises([])
    for number, (before, at) in enumerate(pairwise([0, *points])):
        disk.play(events[before:at])
        folder = tmp_path / f"cut-{number}"
        folder.mkdir()
        disk.cut(folder, rnd)
        promises = Promises(events[:at])
        broken = promises.broken(await _recover(folder))
        assert not broken, f"seed {SEED}, event {at} of {len(events)}: {broken[:9]}"
        result = audit.check(f"sqlite:///{folder / 'store.db'}")
        assert not result.problems, f"seed {SEED}, event {at}: {result.problems}"
    kinds = Counter(kind for kind, _ in promises.last.values())
    assert len(promises.last) > 2_000
    assert all(kinds[kind] > 5 for kind in (*ENDS, *STAY)), kinds
    assert set(promises.groups.values()) == {FrameType.CONFIGURE, FrameType.GROUP_DELETE}
    assert len(promises.requests) > 1
    checkpoints = sum(1 for e in events if e.kind == "F" and e.path.endswith("store.db"))
    assert checkpoints > 5, "the log was written back in between"


STAY = (FrameType.ENQUEUE, FrameType.RESCHEDULE, FrameType.NACK, FrameType.REJECT)
WORDS = {
    FrameType.ACK: {"acked"},
    FrameType.CANCEL: {"cancelled"},
    FrameType.DEAD_DELETE: {"deleted"},
    FrameType.NACK: {"waiting"},
    FrameType.REJECT: {"dead"},
    FrameType.RESCHEDULE: {"scheduled"},
    FrameType.ENQUEUE: {"scheduled", "ready", "in_flight"},
}


def test_a_daemon_starts_after_a_power_cut(tmp_path: Path, shimmed: Callable[..., Shimmed]) -> None:
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
            answer = raw.call(FrameType.LOOKUP, sorted(promises.last))[2]
        words = {task["id"]: task["state"] for task in answer}
        wrong = {
            (kind.name, words[i])
            for i, (kind, _) in promises.last.items()
            if words[i] not in WORDS[kind]
        }
        assert not wrong
