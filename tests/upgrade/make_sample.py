"""``python -m tests.upgrade.make_sample FOLDER``: a sample of each store, of this very checkout.

FOLDER (``tests/golden/samples/NAME``) must not be there. A real daemon is started, given one of
everything over the wire, and killed; what it left and what it had answered is stored.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# As pytest does: the tests' own packages are found from here.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.daemon import Daemon
from tickwheel.api.frames import FrameType as T
from tickwheel.version import __version__
from upgrade.sample import (
    COUNTS,
    FAR_MS,
    LATER_MS,
    STORES,
    Expected,
    Peer,
    daemon_on,
    place_for,
    plain,
    save,
    stored,
)

SOON_MS = 25_000
"""After the daemon's end, and before the sample is opened."""
PACK = 100
TRIES = 10
PATIENCE_S = 60.0
SESSIONS = (b"first session...", b"second session..")
FIXED = {"kind": "fixed", "delay_ms": 1_500, "retries": 7, "jitter": 0.25}
TABLE = {"kind": "table", "delays_ms": [1_000, 60_000, 3_600_000], "retries": 9}
NONE = {"kind": "none"}
LEAVING = "leaving"
"""Groups of this name are being deleted at the end."""


class Story:
    """What happens to the daemon of one sample. Afterwards ``expected`` is what it answered."""

    def __init__(self, daemon: Daemon, history: Path) -> None:
        self._daemon = daemon
        self._history = history
        self._ids: list[int] = []
        self._groups: dict[str, list[str]] = {}
        self._requests: list[dict[str, Any]] = []
        self._receipts: list[dict[str, Any]] = []
        self._peer: Peer
        self._session = b""
        self._epoch = 0
        self._began_ms = _now_ms()
        self.expected: Expected = {}

    def run(self) -> None:
        """The daemon was started, and is dead afterwards."""
        self._connect(SESSIONS[0])
        self._settings()
        self._orders()
        self._pack()
        self._peer.close()
        self._daemon.restart()
        self._connect(SESSIONS[1])
        self._ends()
        self._flight("epoch 2", 2)
        self._until(self._taken_up)
        writer = _child(self._daemon.pid)
        os.kill(writer, signal.SIGSTOP)
        try:
            # This much is in the spool and in no segment.
            self._far()
            self._near()
            self._leaving()
            self._observe()
            for topic in ("shared", "left"):
                self._peer.send(T.GROUP_DELETE, topic, LEAVING, True)
            self._peer.answer(self._peer.request)
        finally:
            self._daemon.kill()
            os.kill(writer, signal.SIGKILL)
        self._peer.close()

    # --- the chapters ---------------------------------------------------------------------------

    def _settings(self) -> None:
        do = self._peer.do
        do(T.CONFIGURE, "orders", None, {"rate": 5_000, "burst": 500, "retry": FIXED})
        self._group("orders", "mail", {"since": "first", "retry": TABLE})
        self._group("orders", "audit", {"rate": 900.5, "burst": 90, "retry": "rocketmq"})
        self._group("pack", "p/1", {})
        self._group("still", "paused", {"paused": True})
        do(T.CONFIGURE, "held", None, {"paused": True})
        self._group("held", "of-a-paused-topic", {})
        for group in ("staying", LEAVING):
            self._group("shared", group, {"since": "first"})
        self._group("left", LEAVING, {})

    def _orders(self) -> None:
        """Two groups, each at another point with each task."""
        ids = self._put(*[("orders", b"order %d" % n, 0, _all_options(n)) for n in range(14)])
        self._put(("orders", b"no retry", 0, {"retry": NONE}))
        held = {
            group: {item[0]: item for item in self._pull("orders", group, 15)[1]}
            for group in ("mail", "audit")
        }
        epoch = self._epoch
        none = self._ids[-1]

        def of(group: str, *numbers: int) -> list[tuple[int, int, int]]:
            return [(ids[n], epoch, held[group][ids[n]][1]) for n in numbers]

        def words(kind: int, group: str, receipts: list[Any], *more: Any) -> None:
            self._peer.do(kind, "orders", group, [(*receipt, *more) for receipt in receipts])

        self._ack("orders", "mail", of("mail", 0, 1))
        self._ack("orders", "audit", of("audit", 0, 2, 8, 10, 11, 12))
        self._plain(T.RELEASE, "audit", of("audit", 1, 9))
        words(T.NACK, "mail", of("mail", 2), FAR_MS - _now_ms(), "näh\n")
        words(T.NACK, "audit", of("audit", 3), FAR_MS - _now_ms(), "later")
        words(T.REJECT, "mail", of("mail", 4, 5, 10, 11), "no use")
        words(T.REJECT, "audit", of("audit", 4), "nor here")
        words(T.NACK, "mail", [(none, epoch, held["mail"][none][1])], None, "not even once")
        self._ack("orders", "audit", [(none, epoch, held["audit"][none][1])])
        words(T.NACK, "mail", of("mail", 8), SOON_MS, None)
        self._plain(T.EXTEND, "mail", of("mail", 9), SOON_MS)
        self._peer.do(T.DEAD_REQUEUE, [(ids[10], "mail")])
        self._peer.do(T.DEAD_DELETE, [(ids[11], "mail")])
        words(T.NACK, "mail", of("mail", 3, 12), 0, "at first")
        for item in self._pull("orders", "mail", 3)[1]:
            wait_ms = FAR_MS - _now_ms()
            words(T.NACK, "mail", [(item[0], epoch, item[1])], wait_ms, "and again")
        self._keep("orders", "mail", epoch, of("mail", 6, 7, 13))
        self._keep("orders", "audit", epoch, of("audit", 5, 6))

    def _pack(self) -> None:
        """Tasks in a row, of which some are over and some are elsewhere."""
        due = [("pack", b"due %d" % n, 0) for n in range(30)]
        far = [("pack", b"far %d" % n, None, {"due_ms": FAR_MS + n}) for n in range(PACK)]
        ids = self._put(*due, *far)
        epoch, items = self._pull("pack", "p/1", 30)
        receipts = [(item[0], epoch, item[1]) for item in items]
        self._ack("pack", "p/1", receipts[:20])
        for n, one in enumerate(receipts[20:24]):
            wait_ms = FAR_MS - _now_ms() if n % 2 else SOON_MS
            self._peer.do(T.NACK, "pack", "p/1", [(*one, wait_ms, f"pack {n}")])
        self._peer.do(
            T.REJECT, "pack", "p/1", [(*receipt, "bad pack") for receipt in receipts[24:27]]
        )
        self._keep("pack", "p/1", epoch, receipts[27:])
        self._peer.do(T.CANCEL, ids[40:50])
        self._peer.do(T.RESCHEDULE, ids[60:65], {"due_ms": FAR_MS + 86_400_000})
        self._peer.do(T.RUN_NOW, ids[70:72])

    def _ends(self) -> None:
        """Every way for a task to be over."""
        expired, cancelled, once = self._put(
            ("still", b"expires", 0, {"ttl_ms": 1}),
            ("still", b"cancelled", 60_000),
            ("once", b"at most once", 0),
        )
        self._peer.do(T.CANCEL, [cancelled])
        self._peer.do(T.SUBSCRIBE, 1, "once", "o", 10, {"ack": "on_delivery", "retry": FIXED})
        self._groups["once"] = ["o"]
        self._until(lambda: self._words([once, expired]) == ["acked", "expired"])
        self._peer.do(T.UNSUBSCRIBE, 1)

    def _flight(self, body: str, count: int) -> None:
        """In flight, and a receipt of an ack that will be said again."""
        self._put(*[("flight", f"{body} {n}".encode(), 0) for n in range(count + 1)])
        self._groups["flight"] = ["f"]
        epoch, items = self._pull("flight", "f", count + 1)
        receipts = [(item[0], epoch, item[1]) for item in items]
        self._ack("flight", "f", receipts[:1])
        self._keep("flight", "f", epoch, receipts)

    def _far(self) -> None:
        tasks = [("far", bytes(range(256)), None, {"due_ms": FAR_MS})]
        for topic in ("orders", "nobody", "shared", "left"):
            options = _all_options(3) | {"due_ms": FAR_MS + 1, "ttl_ms": 86_400_000}
            tasks.append((topic, b"far " + topic.encode(), None, options))
        self._put(*tasks)

    def _near(self) -> None:
        for topic in ("orders", "nobody", "held", "still", "shared"):
            self._put(*[(topic, f"near {topic} {n}".encode(), SOON_MS, {}) for n in range(3)])
            self._put((topic, b"now " + topic.encode(), 0, {"priority": 200}))

    def _leaving(self) -> None:
        """Two groups that hold tasks in every state, one of them with all its topic has."""
        for topic in ("shared", "left"):
            self._put(*[(topic, b"%d" % n, 0) for n in range(20)])
            epoch, items = self._pull(topic, LEAVING, 9)
            one, two, *_ = [(item[0], epoch, item[1]) for item in items]
            self._peer.do(T.REJECT, topic, LEAVING, [(*one, "leaves")])
            self._peer.do(T.NACK, topic, LEAVING, [(*two, SOON_MS, "leaves")])
        epoch, items = self._pull("shared", "staying", 5)
        receipts = [(item[0], epoch, item[1]) for item in items]
        self._ack("shared", "staying", receipts[:2])
        self._peer.do(T.REJECT, "shared", "staying", [(*receipts[2], "stays")])
        self._keep("shared", "staying", epoch, receipts[3:])

    # --- what is known at the end ---------------------------------------------------------------

    def _observe(self) -> None:
        peer = self._peer
        stats = peer.do(T.STATS)
        assert stats["now_ms"] < self._began_ms + SOON_MS, "too slow: leases are over"
        self.expected = {
            "version": __version__,
            "epoch": stats["epoch"],
            "killed_ms": stats["now_ms"],
            "opened_ms": stats["now_ms"] + LATER_MS,
            "tasks": peer.lookup(self._ids),
            "dead": peer.dead(),
            "counts": {name: stats[name] for name in COUNTS},
            "groups": {topic: sorted(groups) for topic, groups in self._groups.items()},
            "settings": [
                peer.settings(topic, group)
                for topic, groups in self._groups.items()
                for group in (None, *groups)
            ],
            "requests": self._requests,
            "receipts": self._receipts,
            "leaving": [["shared", LEAVING], ["left", LEAVING]],
        }

    # --- its verbs ------------------------------------------------------------------------------

    def _connect(self, session: bytes) -> None:
        self._session = session
        self._peer = Peer(self._daemon.port, session=session, client="maker")

    def _group(self, topic: str, group: str, options: dict[str, Any]) -> None:
        assert self._peer.do(T.GROUP_CREATE, topic, group, options)["created"]
        self._groups.setdefault(topic, []).append(group)

    def _put(self, *tasks: Any) -> list[int]:
        """All requests of a session stay in its window: none is ever said to be answered."""
        answer = self._peer.do(T.ENQUEUE, 1, tasks)
        request = {"session": self._session, "request": self._peer.request, "tasks": tasks}
        self._requests.append(plain(request | {"answer": answer}))
        self._ids += answer[1]
        return list(answer[1])

    def _pull(self, topic: str, group: str, count: int) -> tuple[int, list[Any]]:
        self._epoch, items = self._peer.pull(topic, group, count, SOON_MS)
        return self._epoch, items

    def _ack(self, topic: str, group: str, receipts: list[Any]) -> None:
        epoch = receipts[0][1]
        ids, attempts = [receipt[0] for receipt in receipts], [receipt[2] for receipt in receipts]
        assert self._peer.do(T.ACK, topic, group, epoch, ids, attempts) is None

    def _plain(self, kind: int, group: str, receipts: list[Any], *more: Any) -> None:
        epoch = receipts[0][1]
        ids, attempts = [receipt[0] for receipt in receipts], [receipt[2] for receipt in receipts]
        assert self._peer.do(kind, "orders", group, epoch, ids, attempts, *more) is None

    def _keep(self, topic: str, group: str, epoch: int, receipts: list[Any]) -> None:
        """Receipts with which the later daemon will be asked to ack."""
        ids, attempts = [receipt[0] for receipt in receipts], [receipt[2] for receipt in receipts]
        known = {"topic": topic, "group": group, "epoch": epoch}
        self._receipts.append(known | {"ids": ids, "attempts": attempts})

    def _words(self, ids: list[int]) -> list[str]:
        return [task["state"] for task in self._peer.lookup(ids)]

    def _taken_up(self) -> bool:
        """The newest task stands in a segment."""
        sought = str(self._ids[-1]).encode()
        return any(sought in path.read_bytes() for path in self._history.rglob("dt=*/*/*.jsonl"))

    @staticmethod
    def _until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, "it does not happen"
            time.sleep(0.02)  # real time: asking is all that a client can do


def _all_options(n: int) -> dict[str, Any]:
    return {
        "key": f"customer-{n % 4}",
        "tag": "über",
        "properties": {"n": n, "share": 0.5, "first": n == 0, "name": "naïve"},
        "priority": n % 3 * 100,
        "retry": TABLE if n % 2 else FIXED,
    }


def _now_ms() -> int:
    return int(time.time() * 1000)


def _child(pid: int) -> int:
    """The process that writes the history: the daemon's only child."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True)
    (found,) = re.findall(r"\d+", listed.stdout.decode())
    return int(found)


def make(sample: Path) -> None:
    """One sample, whose folder is named by its store."""
    for _ in range(TRIES):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            history = folder / "history"
            with place_for(sample.name, folder) as url:
                with daemon_on(folder / "daemon", url, history) as daemon:
                    story = Story(daemon, history)
                    story.run()
                save(sample, url, history, story.expected)
        if _is_half_done(sample):
            return
        shutil.rmtree(sample)
    raise SystemExit(f"{sample.name}: the deletion of groups was always done before the kill")


def _is_half_done(sample: Path) -> bool:
    """The groups that are being deleted are still in the store, each beside its topic."""
    text = stored(sample).decode()
    return all(re.search(rf"{topic}\W+{LEAVING}", text) for topic in ("shared", "left"))


def main(folder: Path) -> None:
    folder.mkdir(parents=True)
    for store in STORES:
        make(folder / store)
        size = sum(path.stat().st_size for path in (folder / store).rglob("*") if path.is_file())
        sys.stdout.write(f"{folder / store}: {size:,} bytes\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
