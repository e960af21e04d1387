"""Every operation with every right, over both transports: what is not allowed is refused."""

from __future__ import annotations

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from server.access.access_rig import AccessRig
from support.frame_samples import SAMPLES
from support.shard_rig import Peer, started
from tickwheel.api.frames import FrameType as T
from tickwheel.api.verb import Need, Of, Right
from tickwheel.api.verbs import VERBS
from tickwheel.errors import Forbidden
from tickwheel.limits import Limits
from tickwheel.protocol import encode
from tickwheel.server.http.deliveries import receipt_text
from tickwheel.server.http.exchange import Receipt
from tickwheel.server.http.routes import ROUTES
from tickwheel.server.shard.callers import NOBODY, Caller, NullSink, Principal, Topics
from tickwheel.server.shard.guard import Pipeline
from tickwheel.server.tcp.listener import command_table

OURS, OTHER = "t", "u"
"""What the samples are about, and what they are not."""


rig = started(AccessRig)


def is_allowed(operation: str, right: Right, pattern: str, *, is_named: bool = True) -> bool:
    """What the table says, of requests about OURS; ``is_named``: the request names this topic."""
    need = VERBS[operation].need
    if need is None or pattern == "*":
        return need is None or need.right == right
    is_found = need.of in (Of.FOUND, Of.SELECTED) and not is_named
    fits = is_found or (need.of is not Of.ANY and pattern == OURS)
    return need.right == right and fits


NEEDS = [(verb.name, verb.need) for verb in VERBS.values()]
SCOPES = [(right, pattern) for right in Right for pattern in ("*", OURS, OTHER)]
SCOPE_IDS = [f"{right}={pattern}" for right, pattern in SCOPES]

# --- TCP -----------------------------------------------------------------------------------------

SELECTED = [
    verb.frame for verb in VERBS.values()
    if verb.frame and verb.need and verb.need.of is Of.SELECTED
]  # fmt: skip
SCHEDULE_WORDS = [verb.word for verb in VERBS.values() if verb.frame is T.SCHEDULE]
BACKFILL = {"from_ms": 0, "to_ms": 10}
ABOUT_THE_CONVERSATION = {T.HELLO, T.ALIVE}


class Spy:
    """Notes which operation a frame is for."""

    plain_tasks = (), 0, 0, 0
    limits = Limits()

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **named: self.called.append(name)


def requests() -> list[tuple[T, str, tuple[Any, ...]]]:
    """Each frame that a client sends, with its operation and fields."""
    spy: Any = Spy()
    handlers = command_table(spy, spy).handlers
    frames = [(T(kind), SAMPLES[T(kind)][1:]) for kind in handlers if kind != T.SCHEDULE]
    frames.append((T.CLAIM, ("order-17", "transaction", SAMPLES[T.CLAIM][-1])))
    for verb in SCHEDULE_WORDS:
        frames.append((T.SCHEDULE, ("daily", verb, BACKFILL if verb == "backfill" else {})))
    for frame in SELECTED:  # both ways to name tasks, whichever the sample has
        moved = {T.RESCHEDULE: {"delay_ms": 5}, T.SPREAD: {"within_ms": 5}}.get(frame, {})
        frames += [(frame, ((5,), moved)), (frame, (None, {"topic": OURS, "key": "k", **moved}))]
    peer, now = SimpleNamespace(caller=Caller(NullSink()), send=None), None
    for kind, fields in frames:
        if kind not in ABOUT_THE_CONVERSATION:
            handlers[kind](peer, (int(kind), 1, *fields), now)  # type: ignore[arg-type]
    wanted = [frame for frame in frames if frame[0] not in ABOUT_THE_CONVERSATION]
    return [(kind, name, fields) for (kind, fields), name in zip(wanted, spy.called, strict=True)]


def test_the_walks_are_over_all_operations() -> None:
    over_tcp = {name for _, name, _ in requests()}
    over_http = {name for route in ROUTES for name in route.operations}
    assert over_tcp | over_http | {"enqueue_plain"} == set(VERBS)


async def ask(peer: Peer, kind: T, fields: tuple[Any, ...]) -> str | None:
    """The code of the error that is the answer."""
    if kind is T.ONEWAY:
        peer.feed(encode((int(kind), 0, *fields)))
        kind, fields = T.PING, ()
    answer = await peer.call(kind, *fields)
    return str(answer[2]) if answer[0] == T.ERROR else None


@pytest.mark.parametrize(("right", "pattern"), SCOPES, ids=SCOPE_IDS)
async def test_every_tcp_request_needs_its_right(
    rig: AccessRig, right: Right, pattern: str
) -> None:
    peer = await rig.peer_with(f"{right}={pattern}")
    for kind, operation, fields in requests():
        code = await ask(peer, kind, fields)
        texts = (operation, right, pattern, code)
        is_named = any(isinstance(field, dict) and "topic" in field for field in fields)
        allowed = is_allowed(operation, right, pattern, is_named=is_named)
        assert (code != "forbidden") == allowed, texts
        assert code != "internal", texts


async def test_tcp_requests_without_rights_change_nothing(rig: AccessRig) -> None:
    peer = await rig.peer_with("produce=nothing-here")
    changes = rig.core.open.is_empty()
    for kind, operation, fields in requests():
        code = await ask(peer, kind, fields)
        need = VERBS[operation].need
        if need is not None and need.right is not Right.PRODUCE:
            assert code == "forbidden", operation
    assert rig.core.tasks == 0 and not rig.core.topics and not rig.core.schedule_heap.by_name
    assert rig.core.open.is_empty() == changes
    assert rig.observed.forbidden > 20


# --- HTTP ----------------------------------------------------------------------------------------

RECEIPT = receipt_text(Receipt(OURS, "g", 5, 1, 1, 0))
RECEIPTS = {"receipts": [RECEIPT]}
ONE_ID = {"ids": ["5"]}
SCHEDULE = {"topic": OURS, "every_ms": 60_000}
KEY = f"/v1/topics/{OURS}/keys/k"
BULK = {"kind": "cancel", "topic": OURS}
PUSH = {"url": "https://8.8.8.8/hook", "secrets": [f"whsec_{'A' * 32}"]}
DEAD = {"items": [{"id": "5", "group": "g"}]}
BODIES: dict[tuple[str, str], Any] = {
    ("POST", "/v1/tasks"): {"topic": OURS},
    ("PATCH", "/v1/tasks/{id}"): {"delay_ms": 5},
    ("POST", "/v1/lookups"): ONE_ID,
    ("POST", "/v1/cancellations"): ONE_ID,
    ("POST", "/v1/reschedules"): ONE_ID | {"delay_ms": 5},
    ("POST", "/v1/runs"): ONE_ID,
    ("POST", "/v1/spreads"): ONE_ID | {"within_ms": 5},
    ("PATCH", "/v1/topics/{topic}/keys/{key}"): {"delay_ms": 5},
    ("POST", "/v1/topics/{topic}/pull"): {},
    ("POST", "/v1/acks"): RECEIPTS,
    ("POST", "/v1/nacks"): RECEIPTS,
    ("POST", "/v1/rejections"): RECEIPTS,
    ("POST", "/v1/snoozes"): RECEIPTS | {"delay_ms": 5},
    ("POST", "/v1/extensions"): RECEIPTS | {"lease_ms": 5_000},
    ("POST", "/v1/releases"): RECEIPTS,
    ("PATCH", "/v1/topics/{topic}"): {"paused": False},
    ("PUT", "/v1/topics/{topic}/groups/{group}"): {},
    ("PATCH", "/v1/topics/{topic}/groups/{group}"): {"paused": False},
    ("POST", "/v1/topics/{topic}/groups/{group}/held-keys/release"): ONE_ID,
    ("POST", "/v1/topics/{topic}/groups/{group}/held-keys/skip"): {"key": "k"},
    ("POST", "/v1/topics/{topic}/groups/{group}/held-keys/pause"): {"key": "k"},
    ("POST", "/v1/topics/{topic}/groups/{group}/held-keys/resume"): {"key": "k"},
    ("POST", "/v1/dead-letters/requeue"): DEAD,
    ("POST", "/v1/dead-letters/delete"): DEAD,
    ("PUT", "/v1/schedules/{name}"): SCHEDULE,
    ("POST", "/v1/schedules/{name}/backfill"): {"from_ms": 0, "to_ms": 10},
    ("PUT", "/v1/topics/{topic}/groups/{group}/push"): PUSH,
    ("PUT", "/v1/topics/{topic}/groups/{group}/forward"): {"url": "redis://8.8.8.8/0?stream=s"},
    ("POST", "/v1/topics/{topic}/groups/{group}/push/resend"): {"number": 1},
    ("POST", "/v1/push-test"): PUSH,
    ("POST", "/v1/callbacks/{token}"): {"result": "ack"},
    ("POST", "/v1/bulk"): BULK,
    ("POST", "/v1/topics/{topic}/groups/{group}/reset"): {"to": "first"},
    ("POST", "/v1/topics/{topic}/groups/{group}/reset-preview"): {"to": "first"},
    ("POST", "/v1/bulk-previews"): BULK,
    ("POST", "/v1/backups"): {"name": "copy.db"},
    ("POST", "/v1/shard-moves"): {"shard": 0, "node": "a"},
    ("POST", "/v1/nodes/{node}/drain"): {"draining": True},
    ("POST", "/v1/restores"): {"into": "new.db", "backup": "copy.db"},
}
NAMED = {
    "{topic}": OURS,
    "{group}": "g",
    "{id}": "5",
    "{key}": "k",
    "{name}": "daily",
    "{transaction}": "daily",
    "{bulk}": "j",
    "{token}": "none",
    "{node}": "a",
}


def target(path: str) -> str:
    for name, value in NAMED.items():
        path = path.replace(name, value)
    return path


async def http_status(rig: AccessRig, token: str, method: str, path: str) -> int:
    """Return the status of the answer's head; a stream stays open."""
    body = BODIES.get((method, path))
    asked = rig.begin(method, target(path), body, authorization=f"Bearer {token}")
    response = await asked.until(lambda response: response.status)
    asked.leave()
    await asyncio.wait([asked.task])
    return response.status


@pytest.mark.parametrize(("right", "pattern"), SCOPES, ids=SCOPE_IDS)
async def test_every_http_route_needs_its_right(rig: AccessRig, right: Right, pattern: str) -> None:
    token = await rig.token(f"{right}={pattern}")
    for route in ROUTES:
        status = await http_status(rig, token, route.method, route.path)
        texts = (route.method, route.path, right, pattern, status)
        assert status not in (400, 401, 500), texts
        operation = route.operations[0]
        if operation == "put_schedule" and pattern == OTHER:
            assert status == 403, texts
        else:
            is_named = "{topic}" in route.path
            allowed = is_allowed(operation, right, pattern, is_named=is_named)
            assert (status != 403) == allowed, texts


# --- the guard -----------------------------------------------------------------------------------


def guarded(rig: AccessRig, *grants: tuple[Right, tuple[str, ...]]) -> Any:
    return Pipeline(rig.operations, lambda: None).of(Principal("p", grants))


def test_undeclared_operations_are_not_exposed(rig: AccessRig) -> None:
    rig.operations.verbs.format_the_disk = lambda *args: None  # type: ignore[attr-defined]
    everything = guarded(rig, *((right, ("*",)) for right in Right))
    assert set(vars(everything)) == {*VERBS, "plain_tasks", "unreadable"}


def test_every_operation_is_checked_by_its_row(rig: AccessRig) -> None:
    nobody, verbs = Pipeline(rig.operations, lambda: None).of(NOBODY), rig.operations.verbs
    for name, need in NEEDS:
        if need is None:
            assert getattr(nobody, name) == getattr(verbs, name)
            continue
        with pytest.raises(Forbidden):
            getattr(nobody, name)(None)
        parameters = inspect.signature(getattr(verbs, name)).parameters
        if not VERBS[name].has_custom_arguments:
            continue
        assert (need.of is Of.FOUND) == ("topic_filter" in parameters), name
        if need.of is Of.NAMED:
            assert "topic" in parameters, name
        if need.of is Of.EACH_TASK:
            assert "tasks" in parameters or "new_tasks" in parameters, name


def test_full_rights_get_the_unguarded_operations(rig: AccessRig) -> None:
    pipeline, verbs = Pipeline(rig.operations, lambda: None), rig.operations.verbs
    assert pipeline.of(Principal("p", None)) is verbs
    assert pipeline.of(NOBODY) is pipeline.of(NOBODY)
    everything = guarded(rig, *((right, ("*",)) for right in Right))
    assert vars(everything) == vars(verbs)


@pytest.mark.parametrize(
    "tasks",
    [None, "t", {"t": 1}, ("t",), ({0: "t"},), (["t", b"", 0],), ((),), ((b"t", b"", 0),), (5,)],
)
def test_malformed_tasks_never_pass_the_guard(rig: AccessRig, tasks: object) -> None:
    def enqueue(caller: object, request: int, floor: int, tasks: object, now: object) -> None:
        pytest.fail(f"{tasks} did")

    rig.operations.verbs.enqueue = enqueue  # type: ignore[method-assign, assignment]
    with pytest.raises(Exception, match="must be"):
        guarded(rig, (Right.PRODUCE, ("t",))).enqueue(None, 1, 0, tasks, None)


@pytest.mark.parametrize(
    ("pattern", "fits", "does_not"),
    [
        ("orders", ("orders",), ("orders.eu", "order", "Orders", "")),
        ("orders.*", ("orders.eu", "orders.eu.x", "orders."), ("orders", "ordersX", "x.orders.")),
        ("o*", ("o", "orders"), ("p", "")),
    ],
)
def test_topic_patterns_match(
    pattern: str, fits: tuple[str, ...], does_not: tuple[str, ...]
) -> None:
    topics = Topics((pattern,))
    assert all(map(topics, fits)) and not any(map(topics, does_not)) and not topics.matches_all
    assert Topics(("*",)).matches_all


def test_an_empty_pattern_list_matches_no_topic() -> None:
    assert not Topics(())("") and not Topics(())("t")


def test_every_need_is_a_need() -> None:
    assert all(need is None or isinstance(need, Need) for _, need in NEEDS)
