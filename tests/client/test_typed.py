"""Typed tasks: their arguments on the way out, in a handler, and over versions."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import IntEnum
from types import SimpleNamespace
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
import pytest
from pydantic import BaseModel

import tickwheel
from tickwheel import (
    BadRequest,
    Client,
    Delivery,
    Retry,
    TypedTask,
    Worker,
    task,
)
from tickwheel.testing import SyncTestWheel, TestWheel


@dataclass
class Money:
    amount: Decimal
    currency: Literal["EUR", "USD"] = "EUR"


class Size(IntEnum):
    SMALL = 1
    LARGE = 2


class Customer(BaseModel):
    name: str
    born: datetime | None = None


Positive = Annotated[int, msgspec.Meta(ge=1)]


@pytest.fixture
async def wheel() -> AsyncIterator[TestWheel]:
    async with TestWheel() as made:
        yield made


@pytest.fixture
def worker() -> Worker:
    return Worker(Client())


# --- there and back ------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
@pytest.mark.parametrize("is_async", [True, False])
async def test_a_handler_gets_the_enqueued_arguments(
    wheel: TestWheel, worker: Worker, encoding: Any, is_async: bool
) -> None:
    got: list[tuple[Any, ...]] = []

    async def close(
        order_id: Positive,
        total: Money,
        customers: list[Customer],
        when: datetime,
        token: UUID,
        raw: bytes,
        note: str = "none",
        *,
        tags: tuple[str, ...] = (),
    ) -> None:
        got.append((order_id, total, customers, when, token, raw, note, tags))

    def close_in_thread(order_id: int, total: Money, note: str = "none") -> None:
        got.append((order_id, total, note))

    if not is_async:
        in_thread = worker.task("t", encoding=encoding)(close_in_thread)
        async with wheel.working(worker):
            await in_thread.enqueue(1, total=Money(Decimal("1.10")))
            await wheel.settle()
        assert got == [(1, Money(Decimal("1.10")), "none")]
        return
    typed = worker.task("t", encoding=encoding)(close)
    now, token = datetime(2030, 1, 2, 3, 4, 5, 6, UTC), UUID(int=7)
    arguments: Any = (
        1,
        Money(Decimal("1.10"), "USD"),
        [Customer(name="Ann", born=now)],
        now,
        token,
        b"\0",
    )
    async with wheel.working(worker):
        await typed.enqueue(*arguments)
        await typed.enqueue(*arguments, note="x", tags=("a", "b"))
        there = await wheel.enqueued()
        await wheel.settle()
    assert {item.encoding for item in there} == {encoding}
    assert got == [(*arguments, "none", ()), (*arguments, "x", ("a", "b"))]


async def test_a_delivery_is_filled_in_and_the_function_can_be_called(
    wheel: TestWheel, worker: Worker
) -> None:
    got: list[tuple[Any, ...]] = []

    @worker.task("t", group="g")
    async def ship(delivery: Delivery, order_id: int) -> str:
        """Ships an order."""
        got.append((delivery.key, delivery.encoding, order_id))
        return "shipped"

    @worker.task("u")
    async def add(left: int, right: int = 1) -> int:
        return left + right

    async with wheel.working(worker):
        await ship.options(delay="30m", key="order-42").enqueue(order_id=42)
        await wheel.assert_enqueued("t", key="order-42", body=b'{"order_id":42}', within="30m")
        await wheel.advance("30m")
    assert got == [("order-42", "json", 42)]
    assert await add(1) == 2 and ship.__doc__ == "Ships an order."
    await wheel.client.enqueue("t", b"{}", key="by-hand")
    (found,) = await wheel.client.pull("t", group="g")
    assert await ship(found, 7) == "shipped" and got[1] == ("by-hand", None, 7)
    assert "ship of t" in repr(ship)


async def test_options_accumulate(wheel: TestWheel) -> None:
    @task("t")
    async def run(n: int) -> None: ...

    of_key = run.using(wheel.client).options(key="k", priority=7)
    receipt = await of_key.options(delay=timedelta(minutes=1), tag="g").enqueue(1)
    info = await wheel.client.lookup(receipt.id)
    assert (info.key, info.priority, info.tag, info.encoding) == ("k", 7, "g", "json")
    assert receipt.due == wheel.now + timedelta(minutes=1)
    made = run.options(delay="1h30m", timeout=3).task(n=2)
    assert (made.topic, made.body, made.delay) == ("t", b'{"n":2}', 5_400)
    await wheel.client.enqueue_many([run.task(n) for n in range(3)])
    async with wheel.client.transaction("g") as transaction:
        await transaction.enqueue_many([made])
    put = await wheel.client.put_schedule(
        "s", topic=run.topic, body=run.body(n=5), encoding=run.encoding, every=60
    )
    assert (put.body, put.task) == (b'{"n":5}', {"encoding": "json"})
    assert len(await wheel.enqueued("t")) == 5
    wrong: Any
    for wrong in ({"delay": "soon"}, {"encoding": "json"}):
        with pytest.raises(BadRequest, match=next(iter(wrong))):
            run.options(**wrong)
    with pytest.raises(TypeError, match="unexpected keyword argument 'dely'"):
        run.options(dely=1)  # type: ignore[arg-type]  # it is wrong


async def test_a_task_apart_from_workers_needs_a_client(wheel: TestWheel) -> None:
    got: list[int] = []

    @task("t")
    async def run(n: int) -> None:
        got.append(n)
        if n:
            await run.enqueue(n - 1)

    with pytest.raises(BadRequest, match=r"run has no client: register it.*\.using\(client\)"):
        await run.enqueue(1)
    await run.using(wheel.client).enqueue(2)
    worker, other = Worker(Client("tcp://127.0.0.1:1")), Worker(Client())
    assert worker.register(run, group="g") is run and other.register(run) is run
    async with wheel.working(worker):
        await wheel.settle()
        await run.enqueue(0)
        await wheel.settle()
    assert got == [2, 1, 0, 0]
    assert run._definition.client() is worker._client
    with pytest.raises(BadRequest, match="already has a handler"):
        worker.register(run, group="g")
    wrong: Any = run.__wrapped__  # type: ignore[attr-defined]  # the function
    with pytest.raises(BadRequest, match="task must be a typed task"):
        worker.register(wrong)
    with pytest.raises(BadRequest, match="client must be a client"):
        run.using(wrong)


def test_a_typed_call_without_an_event_loop_names_the_sync_client() -> None:
    @task("t")
    def run(n: int) -> int:
        return n

    for way in (run, run.options(delay=1), run.using(Client())):
        with pytest.raises(BadRequest, match=r"\.using\(client\)\.enqueue.*sync\.Client"):
            way.enqueue(4)  # type: ignore[unused-coroutine]  # as in a plain endpoint


def test_a_synchronous_client_enqueues_typed_tasks() -> None:
    @task("t", version=3)
    def run(n: int) -> int:
        return n

    with SyncTestWheel() as wheel:
        blocking = run.options(key="k").using(wheel.client)
        receipt = blocking.options(delay="1m").enqueue(n=4)
        info = wheel.client.lookup(receipt.id)
        assert (info.key, info.body, info.encoding) == ("k", b'{"n":4}', "json;v=3")
        with pytest.raises(BadRequest, match=r"\$\.n: expected int, got str"):
            blocking.enqueue("4")  # type: ignore[arg-type]  # it is wrong


async def test_a_test_wheel_works_with_the_keys_of_the_worker(wheel: TestWheel) -> None:
    worker, got = Worker(Client(keys={"k": b"k" * 32})), list[str]()

    @worker.task("t")
    async def run(delivery: Delivery, name: str) -> None:
        got.append(name)
        if name == "first":
            await run.enqueue("second")

    async with wheel.working(worker):
        await run.enqueue("first")
        await wheel.settle()
    assert got == ["first", "second"]


# --- what does not fit ---------------------------------------------------------------------------

MISFITS: list[tuple[dict[str, Any], str]] = [
    ({"n": "x"}, "$.n: expected int, got str"),
    ({"n": 0}, "$.n: expected int >= 1"),
    ({}, "missing"),
    ({"n": 1, "more": 2}, "more"),
    ({"n": 1, "who": {"name": 3}}, "$.who.name: input should be a valid string"),
    ({"n": 1, "who": {}}, "$.who.name: field required"),
    ({"n": 1, "total": {"amount": "1", "currency": "GBP"}}, "$.total.currency: invalid enum value"),
]


def typed_on(worker: Worker, **options: Any) -> tuple[TypedTask[..., Any], list[Any]]:
    got: list[Any] = []

    @worker.task("t", group="g", **options)
    async def run(n: Positive, who: Customer | None = None, total: Money | None = None) -> None:
        got.append((n, who, total))

    return run, got


@pytest.mark.parametrize(("arguments", "says"), MISFITS)
async def test_arguments_of_the_wrong_type_are_refused_before_sending(
    wheel: TestWheel, worker: Worker, arguments: dict[str, Any], says: str
) -> None:
    run, _ = typed_on(worker)
    for call in (run.using(wheel.client).enqueue(**arguments),):
        with pytest.raises(BadRequest) as caught:
            await call
        assert says in str(caught.value) and "run: " in str(caught.value)
    with pytest.raises(BadRequest):
        run.task(**arguments)
    assert await wheel.enqueued() == []


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
@pytest.mark.parametrize(("arguments", "says"), MISFITS)
async def test_arguments_of_the_wrong_type_are_a_dead_letter_on_delivery(
    wheel: TestWheel, worker: Worker, arguments: dict[str, Any], says: str, encoding: str
) -> None:
    _, got = typed_on(worker)
    body = getattr(msgspec, encoding).encode(arguments)
    await wheel.client.enqueue("t", body, encoding=encoding)
    async with wheel.working(worker):
        await wheel.settle()
    (letter,) = await wheel.dead_letters()
    assert letter.reason is not None and letter.reason.startswith("$") and says in letter.reason
    assert (letter.failed, got) == (1, [])


@pytest.mark.parametrize(
    ("body", "encoding", "says"),
    [
        (b"{", "json", "$: input data was truncated"),
        (b"\xff", "json", "$: "),
        (b"\xc1", "msgpack", "$: "),
        (b"[1]", "json", "$: expected object, got array"),
        (b"[1]", None, "$: expected object, got array"),
        (b"x", "protobuf;v=2", "$: expected json or msgpack, got protobuf;v=2"),
        (b"[" * 100_000, "json", "$: "),
        (b"\x91" * 100_000, "msgpack", "$: "),
        (b"{}", "json;v=0", "$: expected a version between 1 and 1000000, got 0"),
        (b"{}", "json;v=x", "$: expected a version between 1 and 1000000, got x"),
    ],
)
async def test_undecodable_bodies_are_dead_letters(
    wheel: TestWheel, worker: Worker, body: bytes, encoding: str | None, says: str
) -> None:
    _, got = typed_on(worker)
    await wheel.client.enqueue("t", body, encoding=encoding)
    async with wheel.working(worker):
        await wheel.settle()
    (letter,) = await wheel.dead_letters()
    assert letter.reason is not None and letter.reason.startswith(says) and got == []


async def test_untyped_bodies_are_read_if_they_fit(wheel: TestWheel, worker: Worker) -> None:
    _, got = typed_on(worker)
    await wheel.client.enqueue("t", b'{"n": 1}')
    await wheel.new_client(compress_over=0).enqueue("t", b'{"n": 2' + b" " * 100 + b"}")
    await wheel.client.enqueue("t", msgspec.msgpack.encode({"n": 3}), encoding="msgpack")
    async with wheel.working(worker):
        await wheel.settle()
    assert [row[0] for row in got] == [1, 2, 3]


async def test_reasons_of_encrypted_tasks_name_only_the_field(wheel: TestWheel) -> None:
    client = Client(keys={"k": b"k" * 32})
    worker = Worker(client)
    typed_on(worker)
    sends = wheel.new_client(keys={"k": b"k" * 32})
    await sends.enqueue("t", b'{"n": 1, "total": {"amount": "1", "currency": "secret"}}')
    await sends.enqueue("t", b'{"n": 1, "secret": 1}', delay=1)
    async with wheel.working(worker):
        await wheel.advance(2)
    reasons = {letter.reason for letter in await wheel.dead_letters()}
    assert reasons == {"Unfit: $.total.currency", "Unfit: $"}


# --- versions ------------------------------------------------------------------------------------


def one_to_two(old: dict[str, Any]) -> dict[str, Any]:
    return {"n": int(old.pop("number")), **old}


def two_to_three(old: dict[str, Any]) -> dict[str, Any]:
    return {"total": {"amount": old.pop("cents")}, **old} if "cents" in old else old


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
async def test_older_versions_are_brought_up_to_date(
    wheel: TestWheel, worker: Worker, encoding: str
) -> None:
    run, got = typed_on(worker, version=3, upcasters={1: one_to_two, 2: two_to_three})
    assert run.encoding == "json;v=3"
    write = getattr(msgspec, encoding).encode
    for version, arguments in (
        ("", {"number": "1", "who": {"name": "Ann", "born": "2001-02-03T00:00:00Z"}}),
        (";v=1", {"number": "2"}), (";v=2", {"n": 3, "cents": 5}), (";v=3", {"n": 4}),
        (";v=2", {"n": "x"}), (";v=1", [1]),
    ):  # fmt: skip
        await wheel.client.enqueue("t", write(arguments), encoding=encoding + version)
    async with wheel.working(worker):
        await wheel.settle()
    assert [row[0] for row in got] == [1, 2, 3, 4]
    assert got[0][1] == Customer(name="Ann", born=datetime(2001, 2, 3, tzinfo=UTC))
    assert got[2][2] == Money(Decimal(5))
    reasons = sorted(letter.reason or "" for letter in await wheel.dead_letters())
    assert reasons == ["$.n: expected int, got str", "$: expected object, got list"]


async def test_a_newer_version_is_retried_and_one_without_upcaster_is_dead(
    wheel: TestWheel, worker: Worker
) -> None:
    _, got = typed_on(
        worker, version=3, upcasters={2: two_to_three}, retry=Retry.fixed(60, retries=3)
    )
    newer = await wheel.client.enqueue("t", b'{"n": 1}', encoding="json;v=4")
    await wheel.client.enqueue("t", b'{"n": 1}', encoding="json;v=1")
    async with wheel.working(worker):
        await wheel.settle()
    (letter,) = await wheel.dead_letters()
    assert letter.reason == "$: version 1 is no longer supported: it has no upcaster"
    (group,) = (await wheel.client.lookup(newer.id)).groups.values()
    assert (group.state, got) == ("waiting", [])
    assert "NewerVersion: the task's arguments have version 4" in group.failures[0].reason
    assert "supports versions up to 3" in group.failures[0].reason


# --- definitions ---------------------------------------------------------------------------------


def test_an_unsupported_signature_is_refused_by_the_decorator() -> None:
    def bare(n) -> None: ...  # type: ignore[no-untyped-def]  # it is wrong

    def starred(*n: int) -> None: ...

    def keywords(**n: int) -> None: ...

    def positional(n: int, /) -> None: ...

    def late(n: int, delivery: Delivery) -> None: ...

    def unknown(n: NotThere) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    def unwritable(n: complex | Customer) -> None: ...

    def forgets(delivery: Delivery, n: int) -> None:
        delivery.nack()  # type: ignore[unused-coroutine]

    async def yields(n: int) -> Any:
        yield n

    wrong: list[tuple[Any, str]] = [
        (bare, "parameter n must have an annotation"),
        (starred, "parameter n must not be positional"),
        (keywords, "parameter n must not be positional"),
        (positional, "parameter n must not be positional"),
        (late, "parameter delivery, the delivery, must be the first parameter"),
        (unknown, "its annotations cannot be read: name 'NotThere'"),
        (unwritable, "unsupported types: Type unions"),
        (forgets, "plain function and calls delivery.nack"), (yields, "must not be a generator"),
        (7, "a typed task must be a function, not 7"), (dict, "not the class dict"),
    ]  # fmt: skip
    for function, says in wrong:
        with pytest.raises(BadRequest) as caught:
            task("t")(function)
        assert says in str(caught.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"topic": "a b"}, "topic must be 1 to 255"),
        ({"version": 0}, "version must be an integer between 1 and 1000000, not 0"),
        ({"version": True}, "version must be an integer"),
        ({"upcasters": {1: dict}}, "upcasters must be for versions below 1, not 1"),
        ({"version": 2, "upcasters": {1: 7}}, "upcasters[1] must be a function, not 7"),
        ({"encoding": "xml"}, "encoding must be 'json' or 'msgpack', not 'xml'"),
    ],
)
def test_wrong_options_of_a_typed_task_are_named(options: dict[str, Any], says: str) -> None:
    def run(n: int) -> None: ...

    given = {"topic": "t"} | options
    with pytest.raises(BadRequest) as caught:
        task(given.pop("topic"), **given)(run)
    assert says in str(caught.value)


def test_a_missing_extra_of_typed_tasks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(n: int) -> None: ...

    monkeypatch.setitem(sys.modules, "msgspec", None)
    with pytest.raises(BadRequest, match=r"a typed task needs the extra typed: pip install"):
        tickwheel.task("t")(run)


INF = float("inf")
ODD_SECONDS = timezone(timedelta(hours=1, seconds=3))
CHANGING: dict[str, list[tuple[Any, Any]]] = {
    "json": [
        (float | None, float("nan")), (float | None, float("inf")), (list[float | None], [INF]),
        (Any, INF), (Any, {"a": [INF]}), (dict, {1: "a"}), (dict, {1: 1, "1": 2}), (Any, {1}),
        (Any, b"ab"), (Any, datetime(2020, 1, 1, tzinfo=UTC)), (Any, Decimal("1.1")),
        (float, 2**53 + 1), (datetime, datetime(2020, 1, 1, tzinfo=ODD_SECONDS)), (Any, (1, 2)),
    ],
    "msgpack": [(Any, {1}), (Any, Decimal("1.1")), (float, 2**53 + 1), (Any, (1, 2))],
}  # fmt: skip
KEPT: list[tuple[Any, Any]] = [
    (float, 3), (float, -0.0), (int, 2**60), (Decimal, Decimal("1.10")), (set[int], {1, 2}),
    (tuple[int, str], (1, "a")),
    (datetime, datetime(2020, 1, 1, tzinfo=timezone(timedelta(hours=5)))),
    (dict[int, str], {1: "a"}), (float | None, None), (bytes, b"\xff"), (Decimal, Decimal("NaN")),
    (dict[float, int], {1.5: 1}), (dict[Size, int], {Size.SMALL: 1}), (Size, Size.LARGE),
    (dict[UUID, int], {UUID(int=7): 1}), (dict[str, int], {"1": 1}), (UUID, UUID(int=7)),
    (date, date(2020, 1, 1)), (time, time(1, 2)), (timedelta, timedelta(minutes=5)),
    (dict[date, list[Money]], {date(2020, 1, 1): [Money(Decimal("1.10"))]}),
    (list[bytearray], [bytearray(b"\xff")]), (frozenset[UUID], frozenset([UUID(int=7)])),
    (Customer, Customer(name="Ann", born=datetime(2020, 1, 1, tzinfo=UTC))),
]  # fmt: skip


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_arguments_arrive_equal_or_are_refused_by_name(encoding: Any) -> None:
    def typed(kind: Any, **options: Any) -> Any:
        def function(first: int, x: Any) -> None: ...

        function.__annotations__["x"] = kind
        return task("t", encoding=encoding, **options)(function)

    for kind, value in CHANGING[encoding]:
        with pytest.raises(BadRequest, match=r"\$\.x"):
            typed(kind).body(1, value)
    for kind, value in KEPT:
        body = typed(kind).body(1, value)
        schema = typed(kind, version=2, upcasters={1: dict})._definition.schema
        for version in ("", ";v=2"):
            delivery = SimpleNamespace(body=body, encoding=encoding + version)
            read = schema.arguments(delivery)["x"]
            assert read == value or read != read, (kind, version)  # noqa: PLR0124  # NaN
    if encoding == "msgpack":
        typed(float).body(1, float("nan"))
    with pytest.raises(BadRequest, match=r"function: key in \$\.x: expected int, got str"):
        typed(dict[int, str]).body(1, {"a": "b"})
