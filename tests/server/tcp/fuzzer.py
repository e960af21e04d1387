"""Frames that a client might send: every type, right ones and almost right ones.

A ``Fuzzer`` knows the grammar of the protocol and what the daemon has answered (ids, receipts), so
that much of what it makes is accepted and changes something. The rest is a right frame in which
a value or a few were replaced: integers and numbers at their edges and around each limit, names
of 255 characters of one to four bytes, nesting down to msgpack's own limit, wrong types. One
seed, one sequence.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from itertools import chain, zip_longest
from typing import Any

import msgpack

from support.encodings import ENCODING, LONGEST
from support.traces import HIGHEST, LOWEST, TRACE
from tickwheel.api import groups
from tickwheel.api.frames import FrameType as T
from tickwheel.limits import Limits
from tickwheel.model import policies as retries

INTEGERS = (
    -(2**63), -(2**53), -(2**31), -2, -1, 0, 1, 2, 127, 128, 255, 256, 65_535, 65_536,
    2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53 - 1, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1,
)  # fmt: skip
NUMBERS = (0.0, -0.0, -1.5, 5e-324, 1e-7, 0.5, 1.0, 1.0000001, 1e9, 1e300, 1.8e308)
NUMBERS += (float("inf"), float("-inf"), float("nan"))
LETTERS = ("a", "\x00", "\n", "é", "€", "😀")
NAMES = ("t", "u", "v", "w/x:y.z_-", "x" * 255)
GROUPS = (None, "default", "g", "h", "y" * 255)
DELAYS_MS = (0, 0, 0, 0, 1, 50, 1_000, 60_000, 3_600_000)
STATES = ("scheduled", "ready", "in_flight", "waiting", "dead")
UNANSWERED = (T.ONEWAY, T.ALIVE)


class Bytes:
    """Goes onto the wire as they are."""

    def __init__(self, data: bytes) -> None:
        self.data = data


def pack(value: Any) -> bytes:
    """msgpack, with ``Bytes`` inside. (The packer itself has a limit of depth, too.)"""
    rest: list[bytes] = []

    def later(found: Bytes) -> msgpack.ExtType:
        rest.append(found.data)
        return _LATER

    parts = msgpack.packb(value, default=later).split(_LATER_PACKED)
    return b"".join(chain.from_iterable(zip_longest(parts, rest, fillvalue=b"")))


_LATER = msgpack.ExtType(42, b"\x00later\x00\xff\x13!")
_LATER_PACKED = bytes(msgpack.packb(_LATER))

SCHEDULES = ("a", "b", "c", "")
TRANSACTIONS = ("a", "b", "c", "d", "e", "", "é" * 255)
CRONS = ("* * * * *", "*/5 * * * * *", "0 9 * * 1", "@daily", "0 0 31 2 *", "no", "L L * * *")


class Fuzzer:
    """``frame`` makes one; ``heard`` gets what the daemon sent."""

    def __init__(self, seed: int, limits: Limits) -> None:
        self.random = random.Random(seed)
        self.limits = limits
        self.request = 1
        self.ids: deque[int] = deque((1,), maxlen=300)
        self.receipts: deque[tuple[str, str | None, int, int, int]] = deque(maxlen=300)
        self.subs: dict[int, tuple[str, str | None]] = {}
        self.pulls: dict[int, tuple[str, str | None]] = {}
        edges = {getattr(limits, name) for name in limits.to_wire()}
        self._integers = (*INTEGERS, *sorted(n + d for n in edges for d in (-1, 0, 1)))
        self._makers: dict[T, Callable[[], tuple[Any, ...]]] = {
            T.HELLO: self.greeting,
            T.ENQUEUE: lambda: (self.floor(), self.tasks()),
            T.ENQUEUE_COLUMNS: lambda: (self.floor(), self.topic(), *self.columns()),
            T.ONEWAY: lambda: (self.tasks(),),
            T.SUBSCRIBE: self.subscribe,
            T.PREFETCH: lambda: (
                self.sub(),
                self.pick((0, 1, 10, 100)),
                *self.pick(((), (True,), (False,))),
            ),
            T.UNSUBSCRIBE: lambda: (self.sub(),),
            T.PULL: self.pull,
            T.ACK: self.acks,
            T.NACK: lambda: self.outcomes(self.pick((None, 0, 5, 60_000)), self.reason()),
            T.REJECT: lambda: self.outcomes(self.reason()),
            T.EXTEND: lambda: (*self.acks(), self.pick((100, 1_000, 43_200_000))),
            T.RELEASE: self.acks,
            T.SNOOZE: lambda: self.outcomes(self.pick((0, 5, 60_000))),
            T.CANCEL: self.selection,
            T.RESCHEDULE: lambda: self.selection(self.move()),
            T.RUN_NOW: self.selection,
            T.SPREAD: lambda: self.selection(self.window()),
            T.LOOKUP: lambda: self.selection(self.pick(({}, {"newest": True}, {"until_ms": 5}))),
            T.LIST: lambda: (self.listing(),),
            T.PEEK: lambda: (self.topic(), self.subset({"due": True, "key": "k", "limit": 5})),
            T.STATS: tuple,
            T.LOAD: lambda: (self.pick((None, {"step_ms": 3_600_000, "steps": 24}, {"steps": 0})),),
            T.CONSUMER_LIST: lambda: (self.subset({"topic": "t", "group": "g", "limit": 5}),),
            T.DEAD_LIST: lambda: (self.dead_listing(),),
            T.DEAD_REQUEUE: lambda: (self.pairs(),),
            T.DEAD_DELETE: lambda: (self.pairs(),),
            T.BACKUP: lambda: (self.pick(("copy.db", self.text(), "a/b", ".", "c" * 200)),),
            T.PING: tuple,
            T.BYE: tuple,
            T.GROUP_CREATE: lambda: (self.topic(), self.group() or "g", self.creation()),
            T.GROUP_DELETE: lambda: (self.topic(), self.group() or "g", self.random.random() < 0.5),
            # Not the one that others work on: they are not refused.
            T.TOPIC_DELETE: lambda: (self.pick(NAMES[1:]), self.random.random() < 0.5),
            T.CONFIGURE: lambda: (self.topic(), self.group(), self.settings()),
            T.HELD_KEYS: lambda: (self.topic(), self.group(), self.pick((None, {"limit": 5}))),
            T.KEY_LINES: lambda: (self.topic(), self.group(), self.pick((None, {"limit": 0}))),
            T.RELEASE_KEY: lambda: (self.topic(), self.group(), *self.held()),
            T.SKIP_KEY: lambda: (self.topic(), self.group(), *self.held()),
            T.PAUSE_KEY: lambda: (self.topic(), self.group(), *self.one_key()),
            T.RESUME_KEY: lambda: (self.topic(), self.group(), *self.one_key()),
            # Addresses that are refused: nothing is sent from here.
            T.PUSH_SET: lambda: (self.topic(), self.group() or "g", self.url(), self.push()),
            T.FORWARD_SET: lambda: (self.topic(), self.group() or "g", self.url(), None),
            T.TARGET_REMOVE: lambda: (self.topic(), self.group() or "g"),
            T.TARGET_LIST: lambda: (self.pick((None, {"topic": "t"}, {"topic": 5})),),
            T.PUSH_TEST: lambda: (self.url(), None),
            T.PUSH_LOG: lambda: (self.topic(), self.group() or "g", {"limit": 5}),
            T.PUSH_RESEND: lambda: (self.topic(), self.group() or "g", self.pick((0, 1, 2**63))),
            T.STATUS: tuple,
            T.ALIVE: tuple,
            T.PREPARE: lambda: (
                self.pick(TRANSACTIONS),
                self.group() or "g",
                self.pick((1, 1, 2, 3)),
                self.tasks(),
                self.pick((None, {"from": "commit"}, {"from": "enqueue"})),
            ),
            T.COMMIT: lambda: (self.pick(TRANSACTIONS),),
            T.ROLLBACK: lambda: (self.pick(TRANSACTIONS),),
            T.TRANSACTION_LIST: lambda: (
                self.pick((None, self.subset({"group": "g", "state": "open", "limit": 10}))),
            ),
            T.TRANSACTION_SHOW: lambda: (self.pick(TRANSACTIONS),),
            T.CHECKS: lambda: (self.pick(((), ("g",), ("g", "h"), (self.text(),))),),
            T.BULK_MAKE: lambda: (self.pick(NAMES[1:]), *self.bulk()),
            T.BULK_PREVIEW: lambda: (self.pick(NAMES[1:]), *self.bulk()),
            T.BULK_LIST: lambda: (self.subset({"topic": "t", "state": "done", "limit": 5}),),
            T.BULK: lambda: (self.pick(("j", "k", self.text())), self.pick(("show", "cancel"))),
            T.GROUP_RESET: lambda: (self.topic(), self.group() or "g", self.reset()),
            T.GROUP_RESET_PREVIEW: lambda: (self.topic(), "g", self.reset()),
            T.SCHEDULE_PUT: lambda: (self.pick(SCHEDULES), self.schedule()),
            T.SCHEDULE_LIST: lambda: (self.subset({"after": "a", "limit": 10}),),
            T.SCHEDULE: lambda: (self.pick(SCHEDULES), *self.verb()),
        }
        assert set(self._makers) == {kind for kind in T if kind < T.OK} | {T.PEEK}
        rare = {T.BACKUP: 1, T.HELLO: 1, T.BYE: 2, T.STATS: 3, T.GROUP_DELETE: 4, T.CONFIGURE: 5}
        rare[T.TOPIC_DELETE] = rare[T.GROUP_RESET_PREVIEW] = 2
        often = {
            T.ENQUEUE: 50,
            T.ENQUEUE_COLUMNS: 10,
            T.ACK: 25,
            T.PULL: 20,
            T.NACK: 15,
            T.SUBSCRIBE: 15,
        }
        self._kinds = list(self._makers)
        self._weights = [(rare | often).get(kind, 10) for kind in self._kinds]

    def key(self) -> str:
        return self.pick(("k", self.text(), "k" * 255))

    # --- frames ---------------------------------------------------------------------------------

    def frame(self) -> tuple[Any, ...]:
        """The next one; its request number is new, unless that was replaced too."""
        (kind,) = self.random.choices(self._kinds, self._weights)
        self.request += 1
        made: tuple[Any, ...] = (int(kind), self.request, *self._makers[kind]())
        if self.random.random() < 0.01:
            return (self.pick(self._integers), *made[1:])
        if kind in UNANSWERED:
            made = (made[0], 0, *made[2:])
        if self.random.random() < 0.5:
            self._note(kind, made)
            return made
        for _ in range(self.pick((1, 1, 1, 2, 5))):
            made = (made[0], *self._mutated(made[1:]))
        return made

    def hello(self) -> tuple[Any, ...]:
        """The first frame of a connection, almost right."""
        return (int(T.HELLO), *self._mutated((1, *self.greeting())))

    def greeting(self) -> tuple[Any, ...]:
        session = self.pick((None, bytes(16)))
        options = {"session": session, "token": None, "client": self.name(), "heartbeat": False}
        return ({"v": 1, **self.subset(options)},)

    def _note(self, kind: T, made: tuple[Any, ...]) -> None:
        if kind is T.SUBSCRIBE:
            self.subs[made[2]] = (made[3], made[4])
        elif kind is T.PULL:
            self.pulls[made[1]] = (made[2], made[3])

    def heard(self, frame: tuple[Any, ...]) -> None:
        """Learn ids and receipts."""
        if frame[0] == T.DELIVER and frame[1] in self.subs:
            self._delivered(self.subs[frame[1]], frame[2], frame[4])
        elif frame[0] == T.OK and frame[1] in self.pulls:
            whose = self.pulls.pop(frame[1])
            # Another frame may have used the number.
            is_pull = type(frame[2]) is tuple and len(frame[2]) == 3
            if is_pull and type(frame[2][2]) is tuple:
                self._delivered(whose, frame[2][0], frame[2][2])
        elif frame[0] == T.OK and type(frame[2]) is tuple and len(frame[2]) in (2, 3):
            ids = frame[2][1]
            if type(ids) is tuple:
                self.ids.extend(task_id for task_id in ids if type(task_id) is int)

    def _delivered(self, whose: tuple[str, str | None], epoch: int, items: Any) -> None:
        self.receipts.extend((*whose, epoch, item[0], item[1]) for item in items)

    # --- right values -----------------------------------------------------------------------------

    def pick(self, values: Any) -> Any:
        return self.random.choice(values)

    def few(self) -> int:
        return int(self.pick((0, 1, 1, 1, 2, 5)))

    def near(self, limit: int) -> int:
        """At a limit, mostly on its right side."""
        return limit + int(self.pick((-1, 0, 0, 0, 0, 0, 0, 1)))

    def topic(self) -> str:
        return str(self.pick(NAMES))

    def group(self) -> str | None:
        result: str | None = self.pick(GROUPS)
        return result

    def name(self) -> str:
        return self.pick(LETTERS) * int(self.pick((0, 1, 20, 254, 255)))

    def text(self) -> str:
        return self.pick(LETTERS) * int(self.pick((0, 1, 63, 64, 127, 200, 255, 256, 1_000)))

    def reason(self) -> str | None:
        return self.pick((None, "no", self.text()))  # type: ignore[no-any-return]  # of these

    def floor(self) -> int:
        return max(0, self.request - int(self.pick((0, 1, 5, 20, 200))))

    def sub(self) -> int:
        return int(self.pick((0, 1, 2, 3, 2**32 - 1)))

    def tasks(self) -> tuple[Any, ...]:
        return tuple(self.task() for _ in range(self.pick((1, 1, 1, 2, 10))))

    def columns(self) -> tuple[tuple[bytes, ...], Any]:
        bodies = tuple(bytes(self.pick((0, 1, 100))) for _ in range(self.pick((1, 1, 2, 10))))
        delay_ms = self.pick((*DELAYS_MS, self.near(self.limits.delay_ms_max)))
        return bodies, self.pick((delay_ms, (delay_ms,) * len(bodies), (delay_ms,)))

    def task(self) -> tuple[Any, ...]:
        body = bytes(self.pick((0, 1, 10, 100, self.near(self.limits.body_bytes_max))))
        delay_ms = self.pick((*DELAYS_MS, self.near(self.limits.delay_ms_max)))
        if self.random.random() < 0.5:
            return self.topic(), body, delay_ms
        options = self.subset(
            {
                "key": self.name(),
                "tag": self.name(),
                "properties": self.properties(),
                "priority": self.pick((0, 1, 128, 255)),
                "ttl_ms": self.pick((1, 5, 1_000, self.limits.delay_ms_max)),
                "within_ms": self.pick((0, 5, 60_000, self.near(self.limits.within_ms_max))),
                "trace": self.pick((TRACE, LOWEST, HIGHEST)),
                "encoding": self.pick((ENCODING, LONGEST)),
                **self.pick(
                    (
                        {"retry": self.policy()},
                        {"order_key": self.name()},
                        {"shard_by": self.name()},
                    )
                ),
            }
        )
        return self.topic(), body, delay_ms, options

    def properties(self) -> dict[str, Any]:
        values = (True, "x", self.name(), *INTEGERS, *NUMBERS[:-4])
        return {f"{self.name()}{n}"[-255:]: self.pick(values) for n in range(self.few())}

    def policy(self) -> Any:
        """By its name, or numbers at their extremes."""
        edge = retries.DELAY_MS_MAX
        numbers = {
            "base_ms": self.pick((0, 1, 10)),
            "factor": self.pick((1, 1.5, 2, retries.FACTOR_MAX)),
            "cap_ms": self.pick((10, 1_000, edge)),
            "delay_ms": self.pick((0, 1, edge)),
            "delays_ms": self.pick(((0,), (1, edge), (5,) * 9, self.table())),
            "retries": self.pick((0, 1, 100, retries.RETRIES_MAX)),
            "jitter": self.pick((0, 0.1, 1, 1.0)),
        }
        kind = self.pick(("rocketmq", "default", "exponential", "fixed", "table"))
        fields = retries.FIELDS.get(kind)
        return kind if fields is None else {"kind": kind} | {n: numbers[n] for n in fields}

    def table(self) -> tuple[int, ...]:
        return (5,) * (retries.STEPS_MAX if self.random.random() < 0.1 else 20)

    def schedule(self) -> dict[str, Any]:
        edge = self.near(self.limits.delay_ms_max)
        timing = self.pick(
            (
                {"every_ms": self.pick((1_000, 60_000, 999, edge))},
                {"cron": self.pick(CRONS), "timezone": self.pick((None, "Europe/Berlin", "No/W"))},
            )
        )
        more = {
            "body": bytes(self.pick((0, 1, 65_536))),
            "task": {"key": self.name(), "properties": self.properties(), "retry": self.policy()},
            "jitter_ms": self.pick((0, 5, edge)),
            "start_ms": self.pick((0, None, 2**53)),
            "end_ms": self.pick((None, 2**53 - 1)),
            "runs_max": self.pick((None, 1, 2**53 - 1)),
            "gap": self.pick(("after", "skip", "both")),
            "fold": self.pick(("first", "second", "both")),
            "catch_up": self.pick(("skip", "last", "all", "")),
            "catch_up_ms": self.pick((0, edge)),
            "overlap": self.pick(("allow", "skip", "queue_one", "cancel_previous")),
        }
        return {"topic": self.topic(), **timing, **self.subset(more)}

    def verb(self) -> tuple[str, Any]:
        verb = self.pick(("show", "pause", "resume", "run", "backfill", "delete", "no"))
        if verb == "backfill":
            return verb, {"from_ms": self.pick((0, 10**12)), "to_ms": self.pick((10**12 + 5000, 0))}
        return verb, {"next": self.pick((0, 100, 101))} if verb == "show" else None

    def reset(self) -> dict[str, Any]:
        return {"to": self.pick(("first", 0, 5, self.text()))} | self.subset(
            {"rate": 5.0, "id": "j"}
        )

    def bulk(self) -> tuple[str, Any]:
        options = {
            "tags": self.pick(("a || b", "*", "||", self.text())),
            "where": self.pick(("a > 1", "key LIKE '%a'", "a >", self.text())),
            "key_prefix": self.text(),
            "due_to_ms": self.pick((0, 2**53 - 1, 2**60, -1)),
            "state": self.pick(("scheduled", "gone")),
            "group": self.name(),
            "shift_ms": self.pick((5, -(10**6), 10**18)),
            "rate": self.pick((0, 10, 1e6, 1e9)),
            "id": self.pick(("j", "k", self.text())),
            "after": self.pick(((5, ""), (5,), None)),
        }
        kinds = ("cancel", "reschedule", "spread", "run_now", "requeue", "delete", "no")
        return self.pick(kinds), self.pick((None, self.subset(options)))

    def subset(self, options: dict[str, Any]) -> dict[str, Any]:
        return {name: one for name, one in options.items() if self.random.random() < 0.4}

    def lines(self) -> dict[str, Any]:
        """What a group says of order keys and fair shares."""
        return {
            "order_retry_ms": self.pick((None, 10, 1_000, 30_000, 9)),
            "order_attempts": self.pick((None, 1, 3, 0)),
            "order_failure": self.pick((None, "dead", "hold", "no")),
            "fair_by": self.pick((None, "key", "tag", self.name(), "n0")),
            "limit_each": self.pick((None, 1, 5, groups.LIMIT_EACH_MAX)),
            "rate_each": self.pick((None, 1, 100.5, groups.RATE_MIN)),
        }

    def held(self) -> tuple[Any, Any]:
        return self.pick(((self.some_ids(), None), (None, self.name()), (None, None)))

    def url(self) -> Any:
        return self.pick(("http://127.0.0.1:1/", "redis://[::1]/0?stream=s", "http://a:b@c", "", 5))

    def push(self) -> Any:
        return self.pick((None, {"secrets": ("whsec_" + "A" * 32,)}, {"secrets": ("x",)}))

    def one_key(self) -> tuple[Any, Any]:
        value = self.pick(("eu", 1, 1.5, True, self.text()))
        return self.pick(((self.name(), None), (None, value), (None, None)))

    def settings(self) -> dict[str, Any]:
        return self.subset(
            {
                "paused": self.random.random() < 0.2,
                "rate": self.pick((None, None, 1, 1_000.0, groups.RATE_MIN, groups.RATE_MAX)),
                "burst": self.pick((None, 1, 1_000, groups.BURST_MAX)),
                "retry": self.pick((None, self.policy())),
                **self.pick(({}, {}, self.lines())),
            }
        )

    def creation(self) -> dict[str, Any]:
        return self.settings() | self.subset({"since": self.pick(("now", "first", 0, 2**53 - 1))})

    def subscribe(self) -> tuple[Any, ...]:
        options = self.subset({"lease_ms": self.pick((100, 1_000)), "ack": "on_delivery"})
        if self.random.random() < 0.1:
            options = {"broadcast": True}
        group = None if "broadcast" in options else self.group()
        return self.sub(), self.topic(), group, self.pick((0, 1, 5, 50)), options

    def pull(self) -> tuple[Any, ...]:
        lease = self.pick((None, {"lease_ms": 100}, {"lease_ms": 43_200_000}))
        return (
            self.topic(),
            self.group(),
            self.pick((1, 5, self.near(self.limits.pull_max))),
            0,
            lease,
        )

    def taken(self) -> tuple[str, str | None, int, list[int], list[int]]:
        """Receipts of one topic and group; some of them are invented, or of another epoch."""
        if not self.receipts or self.random.random() < 0.05:
            return self.topic(), self.group(), 1, [self.pick(self.ids)], [1]
        topic, group, epoch, task_id, _ = self.pick(self.receipts)
        if self.random.random() < 0.2:
            attempt = self.pick((1, 2, *self._integers))
            return topic, group, self.pick((0, 1, epoch, epoch + 1)), [task_id], [attempt]
        some = [r for r in self.receipts if r[:3] == (topic, group, epoch)][-self.few() or 1 :]
        return topic, group, epoch, [r[3] for r in some], [r[4] for r in some]

    def acks(self) -> tuple[Any, ...]:
        topic, group, epoch, ids, attempts = self.taken()
        return topic, group, epoch, tuple(ids), tuple(attempts)

    def outcomes(self, *rest: Any) -> tuple[Any, ...]:
        topic, group, epoch, ids, attempts = self.taken()
        items = ((i, epoch, n, *rest) for i, n in zip(ids, attempts, strict=True))
        return topic, group, tuple(items)

    def some_ids(self) -> tuple[int, ...]:
        return tuple(self.pick(self.ids) for _ in range(self.few()))

    def selection(self, more: dict[str, Any] | None = None) -> tuple[Any, ...]:
        more = more or {}
        if self.random.random() < 0.5:
            return self.some_ids(), self.pick((more, more, None))
        return None, {"topic": self.topic(), "key": self.key(), **more}

    def window(self) -> dict[str, Any]:
        within_ms = self.pick((1, 60_000, self.near(self.limits.within_ms_max)))
        start_ms = self.pick((0, 1_800_000_000_000, 1_900_000_000_000))
        return self.pick(
            ({"within_ms": within_ms}, {"start_ms": start_ms, "within_ms": within_ms},
             {"start_ms": start_ms, "end_ms": start_ms + 5_000})
        )  # fmt: skip

    def move(self) -> dict[str, Any]:
        delay_ms = self.pick((*DELAYS_MS, self.limits.delay_ms_max))
        return self.pick(
            ({"delay_ms": delay_ms}, {"due_ms": self.pick((0, 1_800_000_000_000))},
             {"shift_ms": self.pick((-delay_ms, delay_ms))})
        )  # fmt: skip

    def pairs(self) -> tuple[Any, ...]:
        return tuple((self.pick(self.ids), self.group() or "g") for _ in range(self.few()))

    def listing(self) -> dict[str, Any]:
        return self.subset(
            {
                "topic": self.topic(),
                "state": self.pick(STATES),
                "key": self.name() or "k",
                "until_ms": self.pick((0, 1_800_000_000_000, 2**63 - 1)),
                "newest": self.random.random() < 0.5,
                "after": self.pick((0, self.pick(self.ids), 2**63 - 1)),
                "limit": self.pick((1, 10, 1_000)),
            }
        )

    def dead_listing(self) -> dict[str, Any]:
        return self.subset(
            {
                "topic": self.topic(),
                "group": self.group() or "g",
                "since_ms": self.pick((0, 2**63 - 1)),
                "until_ms": self.pick((0, 2**63 - 1)),
                "reason": self.text()[:255],
                "after": (self.pick(self.ids), self.name()),
                "limit": self.pick((1, 10, 1_000)),
            }
        )

    # --- wrong ones -------------------------------------------------------------------------------

    def odd(self) -> Any:
        """Anything at all, where something else belongs."""
        match self.random.randrange(12):
            case 0 | 1 | 2 | 3:
                return self.pick(self._integers)
            case 4:
                return self.pick(NUMBERS)
            case 5 | 6:
                return self.text()
            case 7:
                return self.text().encode()
            case 8:
                return self.pick((None, True, False, (), {}, ((),), ("",), {"": None}))
            case 9:
                return Bytes(self._nested())
            case 10:
                return tuple(self.pick(self._integers) for _ in range(self.pick((1, 3, 17, 300))))
            case _:
                return {self.text()[:20]: self.pick(self._integers) for _ in range(self.few())}

    def _nested(self) -> bytes:
        """Arrays or maps inside each other, nearly as deep as msgpack itself allows."""
        depth = self.pick((2, 15, 16, 17, 100, 500, 990, 1_010))
        head = self.pick((b"\x91", b"\x81\xa1a"))
        return bytes(head * depth + b"\xc0")

    def _mutated(self, fields: tuple[Any, ...]) -> tuple[Any, ...]:
        match self.random.randrange(10):
            case 0 if fields:
                return fields[:-1]
            case 1:
                return (*fields, self.odd())
            case 2 if fields:
                at = self.random.randrange(len(fields))
                return (*fields[:at], self.odd(), *fields[at + 1 :])
            case _:
                place = self._place(fields)
                replaced: tuple[Any, ...] = _with(fields, place, self.odd()) if place else fields
                return replaced

    def _place(self, value: Any) -> tuple[Any, ...]:
        """The way to some value inside; empty when there is nothing inside."""
        way: list[Any] = []
        while isinstance(value, (tuple, dict)) and value:
            keys = range(len(value)) if isinstance(value, tuple) else list(value)
            way.append(self.pick(keys))
            value = value[way[-1]]
            if self.random.random() < 0.3:
                break
        return tuple(way)


def _with(value: Any, place: tuple[Any, ...], fresh: Any) -> Any:
    at, *rest = place
    one = _with(value[at], tuple(rest), fresh) if rest else fresh
    if isinstance(value, dict):
        return value | {at: one}
    return (*value[:at], one, *value[at + 1 :])
