"""Whatever values a request has, by every way in: it is refused with a code of the table that says
where, or what it brings can be encoded by every store and by the history. Nothing ends the daemon.

Two walks put a value into each place of each request, one after the other: those that HTTP takes as
JSON, and, without bounds, what Hypothesis thinks of. ``tests/server/tcp/test_daemon_fuzz.py`` walks
over frames.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.access.test_rights import BODIES, ROUTES, target
from server.http.rig import HttpRig, Response
from support.encoding_store import Encoded, EncodingStore
from support.odd_values import FAR, JSON_VALUES, Way, for_json, places, put
from tickwheel.errors import BY_CODE
from tickwheel.history.daemon import Recorder
from tickwheel.limits import Limits
from tickwheel.persistence import codec

TOPIC = "t"
TASK: dict[str, Any] = {
    "topic": TOPIC, "body": "x", "delay_ms": 60_000, "key": "k", "tag": "g", "priority": 1,
    "properties": {"n": 5, "r": 1.5, "s": "x", "b": True}, "ttl_ms": 5_000, "within_ms": 5,
    "retry": {"kind": "exponential", "base_ms": 5, "factor": 2.0, "cap_ms": 9, "retries": 3},
    "if_pending": {"action": "replace", "window_ms": 5, "due": "later", "max_wait_ms": 9},
}  # fmt: skip
HALF = {name: value for name, value in TASK.items() if name != "if_pending"}
OF_SCHEDULE = {name: TASK[name] for name in ("key", "tag", "priority", "properties", "ttl_ms")}
LINES = {
    "order_retry_ms": 1_000, "order_attempts": 3, "order_failure": "hold", "fair_by": "key",
    "limit_each": 5, "rate_each": 1.5,
}  # fmt: skip
SETTINGS = {"rate": 2.5, "burst": 5, "retry": TASK["retry"], "paused": False}
OF_GROUP = SETTINGS | LINES | {"tags": "a || b", "where": "n > 10"}
BULK = {
    "kind": "reschedule", "topic": TOPIC, "where": "n > 10", "tags": "a", "key_prefix": "k",
    "due_from_ms": 0, "due_to_ms": 5, "due_ms": 5, "rate": 1.5,
}  # fmt: skip
MORE: dict[tuple[str, str], tuple[Any, ...]] = {
    ("POST", "/v1/tasks"): (
        TASK,
        {"tasks": [TASK | {"order_key": "o", "retry": None}]},
        {"tasks": [HALF], "transaction": {"id": "tx", "group": "g", "part": 1}},
        {"topic": TOPIC, "at": "2026-01-01T00:00:00Z", "body_base64": "eA=="},
    ),
    ("POST", "/v1/topics/{topic}/tasks"): (TASK,),
    ("POST", "/v1/topics/{topic}/pull"): ({"group": "g", "max": 1} | LINES,),
    ("PATCH", "/v1/topics/{topic}"): (SETTINGS | {"if_pending": TASK["if_pending"]},),
    ("PUT", "/v1/topics/{topic}/groups/{group}"): (OF_GROUP | {"since": 5},),
    ("PATCH", "/v1/topics/{topic}/groups/{group}"): (OF_GROUP,),
    ("PUT", "/v1/schedules/{name}"): (
        {"topic": TOPIC, "every_ms": 60_000, "anchor_ms": 5, "start_ms": 5, "task": OF_SCHEDULE},
        {"topic": TOPIC, "cron": "* * * * *", "timezone": "UTC", "end_ms": 10**12 * 3},
    ),
    ("POST", "/v1/schedules/{name}/backfill"): ({"from_ms": 5, "to_ms": 1_790_000_000_000},),
    ("POST", "/v1/bulk"): (BULK, {"kind": "requeue", "topic": TOPIC, "group": "g", "reason": "r"}),
    ("POST", "/v1/bulk-previews"): (BULK,),
    ("POST", "/v1/topics/{topic}/groups/{group}/reset"): ({"to": 5, "rate": 1.5, "id": "r"},),
}
"""Beside ``BODIES``."""
DELIVERED = ("/v1/acks", "/v1/nacks", "/v1/rejections", "/v1/snoozes", "/v1/extensions",
             "/v1/releases")  # fmt: skip
UNSURE = ("/v1/backups", "/v1/restores")
"""There is no folder for them here."""
SAID_AS = {
    "properties": "properties",
    "body_base64": "body",
    "items": "pairs",
    "receipts": "receipt",
}
"""What an error calls it."""
ODD = for_json(Limits())
MORE_ODD = 2
"""Additional odd values for each place in `make test`."""

Case = tuple[str, str, Any]
"""(method, path, body)"""


def bodies() -> list[Case]:
    """Return a valid body for each route that takes JSON."""
    cases: list[Case] = []
    for route in ROUTES:
        if route.body is None:
            continue
        where = route.method, route.path
        cases += [(*where, body) for body in (*MORE.get(where, ()), BODIES.get(where)) if body]
    return cases


def declared(method: str, path: str) -> list[str]:
    """The fields that the document has, of the body."""
    route = next(item for item in ROUTES if (item.method, item.path) == (method, path))
    kinds = route.body.__args__ if hasattr(route.body, "__args__") else (route.body,)
    return sorted({field.encode_name for kind in kinds for field in msgspec.structs.fields(kind)})


def all_places() -> list[tuple[Case, Way]]:
    """Everything inside of each base, what the document has beside that, and a name more."""
    results: list[tuple[Case, Way]] = []
    for case in bodies():
        ways = dict.fromkeys(places(case[2]))
        ways |= dict.fromkeys((*way, "é\0") for way in list(ways) if way[-1:] == ("properties",))
        ways |= dict.fromkeys((name,) for name in declared(*case[:2]))
        results += [(case, way) for way in ways]
    return results


PLACES = all_places()


class ValuesRig(HttpRig):
    """A shard whose batches go through every encoder there is."""

    def __init__(self, folder: Path) -> None:
        super().__init__(schedules_max=10_000, topics_max=100_000)
        self.encoding = self.store = EncodingStore(folder)
        self.is_over = False

    async def start(self) -> ValuesRig:
        await super().start()
        clock = self.sources
        recorder = Recorder(1, lambda: (clock.now_ms, clock.now_ms), str)
        self.core.recorder = recorder  # type: ignore[assignment]  # it is told what happens
        self.shard.committer._history = Encoded(recorder)
        return self

    async def stop(self) -> None:
        await super().stop()
        await self.encoding.close(clean=True)

    async def receipt(self) -> str:
        """Return the receipt of a delivered task of a separate topic."""
        await self.post("/v1/tasks", {"topic": "own"})
        pulled = await self.post("/v1/topics/own/pull", {"group": "own"})
        return str(pulled["deliveries"][0]["receipt"])

    async def judged(self, case: Case, way: Way, value: Any) -> None:
        """Send the base with ``value`` at a place; the answer is a good one."""
        method, path, base = case
        if path in DELIVERED and way[:1] != ("receipts",):
            base = base | {"receipts": [await self.receipt()]}
        assert not self.is_over, "a request before this one was never answered"
        self.is_over = True  # unless the next lines are passed
        data = json.dumps(put(base, way, value)).encode()
        texts = (method, path, way, value)
        response = await self.call(method, target(path), data, content_type="application/json")
        check(response, path, way, texts)
        await self.lives(texts)
        self.is_over = False

    async def lives(self, said: object) -> None:
        """Check that changes are stored and readable in all ways."""
        answer = await self.call("GET", "/v1/stats")
        assert answer.status == 200, said
        assert not self.shard.failed.done(), said
        assert not [text for event, text in self.notices if event == "internal_error"], said


def check(response: Response, path: str, way: Way, said: object) -> None:
    if response.status < 400:
        return
    problem = response.json
    kind = BY_CODE[problem["code"]]
    assert kind.http_status == response.status, said
    if path in UNSURE and problem["code"] == "refused":
        return
    assert response.status < 500, (said, problem)
    if problem["code"] in ("bad_request", "limit_exceeded", "body_too_large", "due_too_far"):
        names = [name for name in way if isinstance(name, str)]
        words = [*names, *(SAID_AS[name] for name in names if name in SAID_AS)]
        detail = problem["detail"]
        is_said = any(word in detail for word in words) or "the body is" in detail
        assert is_said or not words or is_about_several(detail), (said, problem)


def is_about_several(detail: str) -> bool:
    """It is not about one field: which of them go together, or that JSON has a field too many."""
    together = (
        "must have", "unknown field", "goes with", "give one", "never runs", "Number out of range",
        "nothing is planned", "no occurrence", "which needs", "ids", "need replaces both or due",
        "more than", "many", "order_retry", "is planned", "needs a key", "rule for a pending key",
        "is due in", "not both", "with all its fields", "to_ms must be",
    )  # fmt: skip
    return any(text in detail for text in together)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as running:
        yield running


@pytest.fixture(scope="module")
def rig(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValuesRig]:
    made = runner.run(ValuesRig(tmp_path_factory.mktemp("values")).start())
    yield made
    assert made.encoding.batches > 20
    runner.run(made.stop())


async def walk(rig: ValuesRig, cases: Iterator[tuple[tuple[Case, Way], Any]]) -> None:
    for (case, way), value in cases:
        await rig.judged(case, way, value)


def test_each_field_of_each_body_accepts_or_refuses_odd_values(
    rig: ValuesRig, runner: asyncio.Runner
) -> None:
    """Some of the odd values, other ones at each place."""
    chance = random.Random(1)
    pairs = ((place, value) for place in PLACES for value in (*FAR, *chance.sample(ODD, MORE_ODD)))
    runner.run(walk(rig, pairs))


@pytest.mark.slow  # the same with all of them
def test_each_field_of_each_body_accepts_or_refuses_all_odd_values(
    rig: ValuesRig, runner: asyncio.Runner
) -> None:
    runner.run(walk(rig, itertools.product(PLACES, ODD)))


few = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@few
@given(place=st.sampled_from(PLACES), value=JSON_VALUES)
def test_random_values_are_accepted_or_refused(
    rig: ValuesRig, runner: asyncio.Runner, place: tuple[Case, Way], value: Any
) -> None:
    runner.run(rig.judged(*place, value))


def test_the_walk_is_over_all_bodies() -> None:
    walked = {(method, path) for (method, path, _), _ in PLACES}
    assert walked == {(route.method, route.path) for route in ROUTES if route.body is not None}
    bodies = (kind for route in ROUTES for kind in _kinds(route.body))
    assert all(kind.__struct_config__.forbid_unknown_fields for kind in bodies)


def _kinds(kind: Any) -> tuple[Any, ...]:
    return () if kind is None else getattr(kind, "__args__", (kind,))


# --- an encoder that fails ------------------------------------------------------------------------

POISON = "poison"
KINDS: dict[str, tuple[str, str, str, Any]] = {
    "task": ("options_fields", "POST", "/v1/tasks", {"topic": TOPIC, "properties": {"p": POISON}}),
    "half task": (
        "options_fields", "POST", "/v1/tasks",
        {"transaction": {"id": "tx", "group": "g", "part": 1},
         "tasks": [{"topic": TOPIC, "properties": {"p": POISON}}]},
    ),
    "schedule": (
        "encode_record", "PUT", "/v1/schedules/s",
        {"topic": TOPIC, "every_ms": 60_000, "task": {"properties": {"p": POISON}}},
    ),
    "group": ("encode_record", "PUT", "/v1/topics/t/groups/new", {"tags": POISON}),
    "settings": ("encode_record", "PATCH", "/v1/topics/t/groups/g", {"tags": POISON}),
    "consumer": ("encode_record", "POST", "/v1/topics/t/pull", {"group": "x", "tags": POISON}),
    "bulk": (
        "encode_record", "POST", "/v1/bulk", {"kind": "cancel", "topic": TOPIC, "tags": POISON}
    ),
}  # fmt: skip
"""By what is stored: the encoder, and a request."""


@pytest.mark.parametrize("kind", KINDS)
async def test_an_unencodable_value_is_refused_alone(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside it, in the same batch, are an enqueue before it and one behind it."""
    encoder, method, path, body = KINDS[kind]
    rig = await ValuesRig(tmp_path).start()
    await rig.call("PUT", "/v1/topics/t/groups/g", {})
    plain = getattr(codec, encoder)

    def picky(*values: Any) -> Any:
        if POISON in repr(values):
            raise OverflowError("Integer value out of range")
        return plain(*values)

    monkeypatch.setattr(codec, encoder, picky)
    rig.store.stall()
    tasks = [rig.begin("POST", "/v1/tasks", {"topic": TOPIC, "key": "a"}) for _ in range(2)]
    poisoned = rig.begin(method, path, body)
    tasks += [rig.begin("POST", "/v1/tasks", {"topic": TOPIC, "properties": {"p": 1}})]
    await rig.settle()
    rig.store.go_on()
    refused = await poisoned.done()
    assert (refused.status, refused.json["code"]) == (400, "bad_request"), refused.json
    assert "cannot be stored: OverflowError" in refused.json["detail"]
    assert [(await task.done()).status for task in tasks] == [201] * 3
    await rig.lives(kind)
    assert (
        rig.core.tasks == 3
        and not rig.core.schedule_heap.by_name
        and not rig.core.transaction_registry.by_name
    )
    await rig.stop()
