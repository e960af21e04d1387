"""Producers and consumers over HTTP, as rough as those over TCP: answers are lost on purpose,
requests are sent again under their key, connections go with a pull open or a stream half read."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from crash.link import Link, Lost, now_ms
from crash.plan import LEASE_MS, Plan
from crash.records import NO_CONNECTION, Accepted, Delivered, Finished, Refused, Retry
from crash.rough_producer import PAUSE_S, PRIORITIES, delay_ms, ttl_ms
from crash.settle import LEGAL
from support.waiting import rest
from tickwheel.server.http.deliveries import read_receipt

ANSWER_TIMEOUT_S = 10.0
AGAIN = {408, 429, 503, 504, 507}
"""Statuses after which a request is sent again."""
LANES = 4
ROUND_S = 0.02
PULL_MAX = 32


@dataclass(slots=True)
class Response:
    """A whole one."""

    status: int
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Http:
    """One connection a request; whatever breaks is ``Lost``."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    @asynccontextmanager
    async def begin(
        self, method: str, path: str, body: bytes = b"", **headers: str
    ) -> AsyncIterator[asyncio.StreamReader]:
        """What comes back, head included."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._plan.http_port)
        except OSError as error:
            raise Lost(str(error)) from error
        try:
            headers.setdefault("content-type", "application/json")
            fields = {"host": "localhost", "content-length": str(len(body)), "connection": "close"}
            named = {name.replace("_", "-"): value for name, value in headers.items()} | fields
            head = f"{method} {path} HTTP/1.1\r\n"
            head += "".join(f"{name}: {value}\r\n" for name, value in named.items())
            writer.write(head.encode() + b"\r\n" + body)
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await writer.drain()
            yield reader
        except (OSError, asyncio.IncompleteReadError, TimeoutError, ValueError) as error:
            raise Lost(f"{type(error).__name__}: {error}") from error
        finally:
            writer.transport.abort()

    async def call(
        self, method: str, path: str, body: bytes = b"", *, leave: bool = False, **headers: str
    ) -> Response:
        """``leave``: go without reading the answer."""
        async with self.begin(method, path, body, **headers) as reader:
            if leave:
                await rest(PAUSE_S / 2)
                raise Lost("on purpose, with the answer on its way")
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await whole(reader)

    async def epoch(self) -> int:
        """Return the epoch of the daemon or of a later one."""
        while True:
            try:
                answer = await self.call("GET", "/v1/status")
                epoch = answer.json["epoch"] if answer.status == 200 else 0
                if epoch:  # one that is starting has none yet
                    return int(epoch)
            except Lost:
                pass
            await rest(PAUSE_S)


async def head_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.strip().split("\r\n")
    fields = dict(line.lower().split(": ", 1) for line in lines)
    return int(first.split()[1]), fields


async def whole(reader: asyncio.StreamReader) -> Response:
    """Raises what an answer that is cut off raises."""
    status, fields = await head_of(reader)
    if "content-length" in fields:
        return Response(status, await reader.readexactly(int(fields["content-length"])))
    parts = [part async for part in pieces(reader)]
    return Response(status, b"".join(parts))


async def pieces(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the pieces of a chunked body."""
    while True:
        size = int((await reader.readuntil(b"\r\n")).strip(), 16)
        data = await reader.readexactly(size + 2)
        if not size:
            return
        yield data[:-2]


class HttpProducer:
    """Some of its requests are one task, some several, some a stream of lines, some wrong."""

    def __init__(self, plan: Plan, name: str) -> None:
        self._plan = plan
        self._name = name
        self._rnd = plan.rnd(name)
        self._journal = plan.journal(name)
        self._http = Http(plan)
        self._count = 0

    async def run(self) -> None:
        await asyncio.gather(*(self._lane() for _ in range(LANES)))

    async def _lane(self) -> None:
        while self._plan.producing:
            if self._plan.is_making:
                await (self._lines() if self._rnd.random() < 0.2 else self._request())
            await rest(PAUSE_S * self._rnd.random())

    def _make(self) -> tuple[str, tuple[str, ...], list[dict[str, Any]], int | None, int]:
        rnd = self._rnd
        self._count += 1
        topic = rnd.choice(self._plan.topics)
        tokens = tuple(f"{self._name}/{self._count}/{i}" for i in range(rnd.choice((1, 1, 2, 7))))
        ttl, priority = ttl_ms(rnd, topic), rnd.choice(PRIORITIES)
        tasks = []
        for token in tokens:
            task: dict[str, Any] = {"topic": topic, "key": token, "priority": priority}
            if ttl is not None:
                task["ttl_ms"] = ttl
            if rnd.random() < 0.3:
                task["body_base64"] = base64.b64encode(token.encode()).decode()
            else:
                task["body"] = token
            if rnd.random() < 0.3:
                task["due_ms"] = now_ms() + delay_ms(rnd)
            else:
                task["delay_ms"] = delay_ms(rnd)
            tasks.append(task)
        return topic, tokens, tasks, ttl, priority

    async def _request(self) -> None:
        """Until it is answered, under one key; then, at times, once more."""
        rnd = self._rnd
        topic, tokens, tasks, ttl, priority = self._make()
        good = rnd.random() > 0.1
        if not good:
            wrong: dict[str, Any] = {"delay_ms": -1, "due_ms": None, "body": 5}
            name = rnd.choice(("delay_ms", "body"))
            tasks[rnd.randrange(len(tasks))] |= {name: wrong[name]}
            tasks = [{k: v for k, v in task.items() if v is not None} for task in tasks]
        outcome = tasks[0] if len(tasks) == 1 else {"tasks": tasks}
        body, key = json.dumps(outcome).encode(), tokens[0]
        sent, sent_ms, answers = Link.order(), now_ms(), 0
        while True:
            leave = rnd.random() < 0.05 and not answers
            try:
                answer = await self._http.call(
                    "POST", "/v1/tasks", body, leave=leave, idempotency_key=key
                )
            except Lost:
                self._journal.resent += 1
                await rest(PAUSE_S)
                continue
            if answer.status in AGAIN:
                await rest(PAUSE_S)
                continue
            if answer.status != 201:
                if good:
                    self._journal.odd.append(f"a good request was refused: {answer} {outcome}")
                elif not answers:
                    self._journal.refused.append(Refused(tokens, answer.json["code"]))
                return
            if not good:
                self._journal.odd.append(f"a bad request was accepted: {answer} {outcome}")
            value = answer.json.get("tasks", [answer.json])
            self._accepted(topic, tokens, value, sent, ttl, priority)
            self._check_due(value, tasks, sent_ms)
            answers += 1
            if answers > 1 or rnd.random() > 0.1 or not self._plan.producing:
                return

    async def _lines(self) -> None:
        """Sent once: what was not answered is nobody's promise."""
        topic, tokens, tasks, ttl, priority = self._make()
        body = b"".join(json.dumps(task).encode() + b"\n" for task in tasks)
        sent = Link.order()
        try:
            answer = await self._http.call(
                "POST", "/v1/tasks", body, content_type="application/x-ndjson"
            )
        except Lost:
            return
        if answer.status != 200:
            return
        for token, line in zip(tokens, answer.body.splitlines(), strict=False):
            outcome = json.loads(line)
            if "id" in outcome:
                self._accepted(topic, (token,), [outcome], sent, ttl, priority)
            elif not outcome["error"]["retryable"]:
                self._journal.odd.append(f"a good line was refused: {outcome}")

    def _accepted(
        self,
        topic: str,
        tokens: tuple[str, ...],
        found: list[dict[str, Any]],
        sent: int,
        ttl: int | None,
        priority: int,
    ) -> None:
        ids = tuple(int(task["id"]) for task in found)
        dues_ms = tuple(task["due_ms"] for task in found)
        self._journal.accepted.append(
            Accepted(topic, tokens, ids, dues_ms, sent, Link.order(), ttl, priority)
        )

    def _check_due(
        self, found: list[dict[str, Any]], tasks: list[dict[str, Any]], sent_ms: int
    ) -> None:
        for answer, task in zip(found, tasks, strict=True):
            first_ms = task.get("due_ms", sent_ms + task.get("delay_ms", 0))
            last_ms = max(task.get("due_ms", 0), now_ms() + task.get("delay_ms", 0))
            clocks = self._plan.clocks
            if not clocks.low(first_ms, first_ms) <= answer["due_ms"] <= clocks.high(0, last_ms):
                self._journal.odd.append(f"due at {answer['due_ms']}: {task}")


class HttpConsumer:
    """Pulls; acks at once, late, or never, nacks now and then."""

    def __init__(self, plan: Plan, name: str, topic: str, group: str) -> None:
        self._plan = plan
        self._topic = topic
        self._group = group
        self._rnd = plan.rnd(name)
        self._journal = plan.journal(name)
        self._http = Http(plan)
        self._held: list[tuple[int, str]] = []
        """(when to ack, receipt)"""

    async def run(self) -> None:
        while not self._plan.consumed.is_set():
            try:
                await self._round()
            except Lost:
                await rest(ROUND_S)
        while self._held:
            try:
                await self._ack([receipt for _, receipt in self._held])
                self._held = []
            except Lost:
                await rest(ROUND_S)

    async def _round(self) -> None:
        await self._get()
        now = now_ms()
        due = [receipt for at_ms, receipt in self._held if at_ms <= now]
        if due:
            await self._ack(due)
            self._held = [held for held in self._held if held[1] not in due]
        await rest(ROUND_S)

    async def _get(self) -> None:
        asked_ms = now_ms()
        wait_ms = self._rnd.choice((0, 30, 200))
        fields = {"group": self._group, "max": PULL_MAX, "wait_ms": wait_ms}
        fields["lease_ms"] = self._plan.lease_ms
        leave = self._plan.misbehaving and self._rnd.random() < 0.03
        answer = await self._http.call(
            "POST", f"/v1/topics/{self._topic}/pull", json.dumps(fields).encode(), leave=leave
        )
        if answer.status == 200:
            await self._note(answer.json["deliveries"], asked_ms)
        elif answer.status not in AGAIN:
            self._journal.odd.append(f"a pull was answered {answer}")

    async def _note(self, found: list[dict[str, Any]], since_ms: int) -> None:
        for row in found:
            receipt = read_receipt(row["receipt"], "receipt")
            self._journal.delivered.append(
                Delivered(
                    int(row["id"]),
                    self._group,
                    row["body"],
                    receipt.epoch,
                    row["attempt"],
                    row["due_ms"],
                    row["delivered_ms"],
                    now_ms(),
                    NO_CONNECTION,
                    Link.order(),
                    since_ms,
                    priority=row.get("priority", 0),
                )
            )
            await self._treat(row["receipt"])

    async def _treat(self, receipt: str) -> None:
        dice = self._rnd.random()
        if not self._plan.misbehaving or self._plan.quiet or dice < 0.6:
            self._held.append((0, receipt))
        elif dice < 0.8:
            self._held.append((now_ms() + self._rnd.randrange(3 * LEASE_MS), receipt))
        elif dice < 0.9:
            await self._nack(receipt)
        # else: forgotten; its lease will end

    async def _ack(self, receipts: list[str]) -> None:
        words = await self._settle("acks", receipts)
        if words is None:
            raise Lost("not now")
        epoch = await self._http.epoch()
        for text, word in zip(receipts, words, strict=True):
            one = read_receipt(text, "receipt")
            if word in ("acked", "done"):
                self._journal.finished.append(
                    Finished(
                        one.id, one.group, "acked", epoch, now_ms(), NO_CONNECTION, Link.order()
                    )
                )
            elif word not in LEGAL and word != "expired":
                self._journal.odd.append(f"ack of {one} answered {word!r}")

    async def _nack(self, receipt: str) -> None:
        delay, sent_ms = self._rnd.randrange(300), now_ms()
        try:
            words = await self._settle("nacks", [receipt], delay_ms=delay, reason="not now")
        except Lost:
            return
        if words is None:
            return
        one, (word,) = read_receipt(receipt, "receipt"), words
        epoch = await self._http.epoch()
        if word == "retrying":
            self._journal.retries.append(
                Retry(
                    one.id,
                    one.group,
                    self._plan.clocks.low(sent_ms, now_ms()) + delay,
                    epoch,
                    now_ms(),
                    NO_CONNECTION,
                    Link.order(),
                )
            )
        elif word == "dead":
            self._journal.finished.append(
                Finished(one.id, one.group, "dead", epoch, now_ms(), NO_CONNECTION, Link.order())
            )
        elif word not in LEGAL and word != "expired":
            self._journal.odd.append(f"nack of {one} answered {word!r}")

    async def _settle(self, verb: str, receipts: list[str], **more: Any) -> list[str] | None:
        """None: to be asked again. Raises Lost."""
        body = json.dumps({"receipts": receipts, **more}).encode()
        answer = await self._http.call("POST", f"/v1/{verb}", body)
        if answer.status in AGAIN:
            return None
        if answer.status != 200:
            self._journal.odd.append(f"{verb} was answered {answer}")
            return None
        words: list[str] = answer.json["results"]
        return words


class HttpStreamer(HttpConsumer):
    """The same manners with a stream of lines; it goes away in the middle of one."""

    async def _get(self) -> None:
        since_ms, rounds = now_ms(), self._rnd.randint(5, 50)
        credit = self._rnd.choice((1, 20, 200))
        path = f"/v1/topics/{self._topic}/deliveries?group={self._group}"
        path += f"&credit={credit}&lease_ms={self._plan.lease_ms}"
        async with self._http.begin("GET", path, accept="application/x-ndjson") as reader:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                status, _ = await head_of(reader)
            if status != 200:
                raise Lost(f"a stream was answered {status}")
            lines = pieces(reader)
            for _ in range(rounds):
                if self._plan.consumed.is_set():
                    return
                await self._some(lines, since_ms)
                now = now_ms()
                due = [receipt for at_ms, receipt in self._held if at_ms <= now]
                if due:
                    await self._ack(due)
                    self._held = [held for held in self._held if held[1] not in due]

    async def _some(self, lines: AsyncIterator[bytes], since_ms: int) -> None:
        """What comes within a round; the stream's own sign of life is half a second away."""
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            data = await anext(lines, None)
        if data is None:
            raise Lost("the stream ended")
        results = [json.loads(line) for line in data.splitlines() if line]
        if any("error" in item for item in results):
            raise Lost(f"the stream was ended: {results[-1]}")
        await self._note(results, since_ms)
