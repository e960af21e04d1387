"""Bodies that are packed on their way out and unpacked on their way in."""

from __future__ import annotations

import asyncio
import base64
import os
import re
import sys
import threading
import zlib
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from support.in_process import InProcess
from tickwheel import (
    BadBody,
    BadRequest,
    BodyTooLarge,
    Client,
    Delivery,
    LimitExceeded,
    Reject,
    Retry,
    Snooze,
    Task,
    Undecodable,
    Worker,
    sync,
)
from tickwheel.api.frames import FrameType
from tickwheel.cli import output
from tickwheel.client.encodings import (
    SHOWN_UNPACKED_BYTES_MAX,
    UNPACK_ASIDE_BYTES,
    Codec,
    key_of,
    steps_of,
)
from tickwheel.testing import SyncTestWheel, TestWheel

KEYS = {"new": b"n" * 32, "old": b"o" * 32}
LONG = b"abc " * 5_000


@pytest.fixture
async def wheel() -> AsyncIterator[TestWheel]:
    async with TestWheel() as made:
        yield made


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let a module be one that is not installed."""
    return lambda name: monkeypatch.setitem(sys.modules, name, None)


# --- a codec by itself ---------------------------------------------------------------------------


@given(
    body=st.binary(max_size=3_000) | st.integers(0, 60_000).map(bytes),
    topic=st.sampled_from(["t", "orders.close"]),
    encoding=st.none() | st.sampled_from(["json", "msgpack;v=2", "x-own"]),
    compress=st.none() | st.sampled_from(["zlib", "zstd"]),
    over=st.none() | st.integers(0, 5_000),
    keys=st.none() | st.just(KEYS),
    repeatable=st.booleans(),
)
def test_unpacking_returns_the_packed_body(
    body: bytes, topic: str, encoding: str | None, compress: Any, over: int | None,
    keys: Any, repeatable: bool
) -> None:  # fmt: skip
    codec = Codec(compress=compress, compress_over=over, keys=keys)
    packed, how = codec.pack(topic, body, encoding, repeatable=repeatable)
    assert codec.packs == (compress is not None or over is not None or keys is not None)
    if how is None:
        assert packed == body
        return
    assert codec.unpacked(topic, packed, how) == (body, encoding)
    names = [step.name for step in steps_of(how)]
    assert ("aesgcm" in names) == (keys is not None) and key_of(how) == ("new" if keys else None)
    assert len(packed) <= len(body) + (28 if keys else 0)
    if not keys and len(body) <= (4096 if over is None else over):
        assert packed is body


@given(
    st.binary(max_size=200),
    st.sampled_from(["zlib", "zstd", "aesgcm;key=new", "zlib,aesgcm;key=old"]),
)
def test_a_body_that_contradicts_its_encoding_is_bad_body(body: bytes, encoding: str) -> None:
    with pytest.raises(BadBody):
        Codec(keys=KEYS).unpack("t", body, encoding)


@given(st.data())
def test_a_changed_or_cut_encrypted_body_is_refused(data: st.DataObject) -> None:
    codec = Codec(compress="zlib", compress_over=0, keys=KEYS)
    packed, how = codec.pack("t", b"x" * 300, "json")
    assert how is not None
    at, bit = data.draw(st.integers(0, len(packed) - 1)), data.draw(st.integers(0, 7))
    changed = bytearray(packed)
    changed[at] ^= 1 << bit
    for wrong in (bytes(changed), packed[:at], packed + b"x"):
        with pytest.raises(BadBody):
            codec.unpack("t", wrong, how)


def test_an_encrypted_body_is_bound_to_topic_encoding_and_key() -> None:
    codec = Codec(keys=KEYS)
    packed, how = codec.pack("t", b"secret", "json")
    assert how == "json,aesgcm;key=new"
    for topic, encoding in (("u", how), ("t", "json;v=2,aesgcm;key=new"), ("t", "aesgcm;key=new"),
                            ("t", "json,aesgcm;key=old")):  # fmt: skip
        with pytest.raises(BadBody, match="cannot be decrypted with key"):
            codec.unpack(topic, packed, encoding)
    with pytest.raises(Undecodable, match=r"encrypted with key 'new'.*it has old") as caught:
        Codec(keys={"old": KEYS["old"]}).unpack("t", packed, how)
    assert not isinstance(caught.value, BadBody)
    with pytest.raises(Undecodable, match="it has none"):
        Codec().unpack("t", packed, how)


def test_all_keys_decrypt_and_one_encrypts() -> None:
    packed, how = Codec(keys=KEYS, encrypt_with="old").pack("t", b"secret", None)
    assert how == "aesgcm;key=old" and Codec(keys=KEYS).unpack("t", packed, how) == b"secret"
    again, _ = Codec(keys=KEYS, encrypt_with="old").pack("t", b"secret", None)
    assert again != packed  # each has a nonce of its own
    same = [Codec(keys=KEYS).pack("t", b"x", None, repeatable=True) for _ in range(2)]
    other = Codec(keys=KEYS).pack("u", b"x", None, repeatable=True)
    assert same[0] == same[1] and other[0][:12] != same[0][0][:12]


@pytest.mark.parametrize("way", ["zlib", "zstd", "zstd of a stream"])
def test_unpacking_has_a_limit_that_the_error_names(way: str) -> None:
    bomb = b"\0" * 300_000
    if way == "zlib":
        packed = zlib.compress(bomb)
    elif way == "zstd":
        packed = zstandard.ZstdCompressor().compress(bomb)
    else:
        stream = zstandard.ZstdCompressor().compressobj()
        packed = stream.compress(bomb) + stream.flush()
    encoding = way.partition(" ")[0]
    assert Codec(unpacked_bytes_max=300_000).unpack("t", packed, encoding) == bomb
    with pytest.raises(BadBody, match=r"299999.*\(unpacked_bytes_max\)|299999 \("):
        Codec(unpacked_bytes_max=299_999).unpack("t", packed, encoding)


STEPS_TOO_MANY = ("zlib,zlib,zlib", "json,zlib,zstd,aesgcm;key=a", "own,a,b,c", "zlib,a,b")
STEPS_ENOUGH = ("json", "zlib", "zlib,aesgcm;key=a", "json;v=2,zlib,aesgcm;key=a", "own,a,b")


@pytest.mark.parametrize("encoding", [*STEPS_TOO_MANY, ",".join(["zlib"] * 51)])
async def test_more_than_two_encoding_steps_are_refused(
    tmp_path: Path, wheel: TestWheel, encoding: str
) -> None:
    answer = r"encoding has \d+ steps; the limit is 2 \(encoding_steps_max\)"
    with pytest.raises(LimitExceeded, match=answer):
        await wheel.client.enqueue("t", b"x", encoding=encoding)
    async with InProcess(tmp_path) as daemon:
        task = ("t", b"x", 0, {"encoding": encoding})
        code, text = await daemon.connect().refused(FrameType.ENQUEUE, 0, (task,))
        assert code == "limit_exceeded" and re.search(answer, text)
    # One that was stored before there was a limit.
    with pytest.raises(BadBody, match=answer):
        Codec().unpack("t", zlib.compress(zlib.compress(zlib.compress(b""))), encoding)


@pytest.mark.parametrize("encoding", STEPS_ENOUGH)
async def test_two_encoding_steps_after_the_content_type_are_accepted(
    wheel: TestWheel, encoding: str
) -> None:
    assert await wheel.client.enqueue("t", b"x", encoding=encoding)


def test_the_unpacking_limit_covers_all_steps_together() -> None:
    stored = zlib.compressobj(0)
    once = stored.compress(bytes(200_000)) + stored.flush()
    twice = zlib.compress(once)
    assert len(Codec(unpacked_bytes_max=500_000).unpack("t", twice, "zlib,zlib")) == 200_000
    with pytest.raises(BadBody, match=r"\(unpacked_bytes_max\)"):
        Codec(unpacked_bytes_max=300_000).unpack("t", twice, "zlib,zlib")


@pytest.mark.parametrize("is_damaged", [False, True])
async def test_a_large_body_is_unpacked_in_a_thread(
    wheel: TestWheel, monkeypatch: pytest.MonkeyPatch, is_damaged: bool
) -> None:
    """In a thread, once; also when that fails."""
    threads: list[bool] = []
    undone = Codec.unpack

    def unpack(*given: Any) -> bytes:
        threads.append(threading.current_thread() is threading.main_thread())
        return undone(*given)

    monkeypatch.setattr(Codec, "unpack", unpack)
    body = os.urandom(UNPACK_ASIDE_BYTES + 1)
    bodies: list[bytes] = []
    settled = asyncio.Event()
    worker = Worker(wheel.client, signals=False, on_settled=lambda *_: settled.set())

    @worker.on("t", group="g", retry=Retry.none())
    async def handle(delivery: Delivery) -> None:
        bodies.extend((delivery.body, delivery.body))

    packed = body if is_damaged else zlib.compress(body)
    await wheel.client.enqueue("t", packed, encoding="zlib")
    async with wheel.working(worker):
        await settled.wait()
    assert threads == [False]
    assert bodies == ([] if is_damaged else [body, body])
    assert len(await wheel.dead_letters()) == is_damaged


def test_bodies_are_unpacked_for_display_within_a_small_limit() -> None:
    small, large = bytes(SHOWN_UNPACKED_BYTES_MAX), bytes(SHOWN_UNPACKED_BYTES_MAX + 1)
    assert output.unpacked("t", zlib.compress(small), "zlib") == (small, None, "")
    packed = zlib.compress(large)
    body, encoding, why = output.unpacked("t", packed, "zlib")
    assert (body, encoding) == (packed, "zlib") and "the limit is 1048576" in why
    assert output.unpacked("t", packed, "zlib", whole=True)[0] == large


def test_a_body_nested_too_deep_is_shown_raw() -> None:
    assert "not text" in output.stored_text("t", b"\x91" * 1_000 + b"\x01", "msgpack")


def test_an_unknown_encoding_step_is_undecodable() -> None:
    for encoding in ("json,brotli", "zlib;x=1,rot13"):
        with pytest.raises(Undecodable, match="this client cannot undo") as caught:
            Codec().unpack("t", b"x", encoding)
        assert not isinstance(caught.value, BadBody)
    assert Codec().unpack("t", b"x", "of-my-own;v=7") == b"x"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"compress": "gzip"}, "compress must be 'zlib' or 'zstd', not 'gzip'"),
    ({"compress_over": -1}, "compress_over must be an integer between 0 and"),
    ({"compress_over": 1.5}, "compress_over must be an integer"),
    ({"unpacked_bytes_max": 0}, "unpacked_bytes_max must be an integer between 1 and"),
    ({"keys": {}}, "keys must map at least one name"),
    ({"keys": [b"x" * 32]}, "keys must map"),
    ({"keys": {"a,b": b"x" * 32}}, "a name must be 1 to 64 characters from A-Z a-z 0-9"),
    ({"keys": {"": b"x" * 32}}, "a name must be 1 to 64"),
    ({"keys": {"n" * 65: b"x" * 32}}, "a name must be 1 to 64"),
    ({"keys": {"a": b"SECRET"}}, "a must be 32 bytes, not 6"),
    ({"keys": {"a": "SECRET" * 6}}, "a must be 32 bytes, not str"),
    ({"keys": KEYS, "encrypt_with": "x"}, r"encrypt_with must be one of the keys \(new, old\)"),
    ({"encrypt_with": "x"}, r"one of the keys \(none\), not 'x'"),
    ({"keys": KEYS, "keys_file": "x"}, "either keys or keys_file, not both"),
    ({"keys_file": "nowhere"}, "keys_file nowhere: .*No such file"),
    ({"keys_file": "no\0where"}, "keys_file no\0where: embedded null byte"),
]


@pytest.mark.parametrize("kind", [Client, sync.Client])
@pytest.mark.parametrize(("options", "says"), WRONG)
def test_invalid_codec_options_are_refused_by_the_constructor(
    kind: Any, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(BadRequest, match=says) as caught:
        kind(**options)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize(
    ("module", "options", "extra"),
    [("zstandard", {"compress": "zstd"}, "zstd"),
     ("cryptography.hazmat.primitives.ciphers.aead", {"keys": KEYS}, "encryption")],
)  # fmt: skip
def test_a_missing_extra_is_named_where_the_client_is_made(
    without: Callable[[str], None], module: str, options: Any, extra: str
) -> None:
    without(module)
    with pytest.raises(BadRequest, match=rf"pip install 'tickwheel\[{extra}\]'"):
        Client(**options)


# --- files of keys -------------------------------------------------------------------------------


def keys_file(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_keys_come_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f"{name} {base64.b64encode(key).decode()}" for name, key in KEYS.items()]
    path = keys_file(tmp_path / "keys", "# ours\n\n" + "  # rotated\n".join(lines) + "\n")
    packed, how = Codec(keys_file=path).pack("t", b"x", None)
    assert how == "aesgcm;key=new" and Codec(keys=KEYS).unpack("t", packed, how) == b"x"
    monkeypatch.setenv("TICKWHEEL_KEYS_FILE", str(path))
    assert Client().codec.unpack("t", packed, how) == b"x"
    assert Client(keys={"other": b"x" * 32}).codec.pack("t", b"x", None)[1] == "aesgcm;key=other"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601])
def test_a_file_of_keys_that_others_may_open_is_refused(tmp_path: Path, mode: int) -> None:
    path = keys_file(tmp_path / "keys", "a eA==", mode)
    with pytest.raises(BadRequest, match=rf"its mode must be 0600 or stricter, not {mode:04o}"):
        Codec(keys_file=path)


@pytest.mark.parametrize(
    ("text", "says"),
    [("a", "line 1 must be NAME BASE64"), ("\na SECRET x", "line 2 must be NAME BASE64"),
     ("a SECRET", "line 1: the key is not valid base64"),
     ("b eA==\na SECRET\u00e4", "line 2: the key is not valid base64"),
     ("a eA==\na eA==", "line 2 repeats key 'a'"),
     ("a eA==", "a must be 32 bytes, not 1"), ("", "keys must map at least one name")],
)  # fmt: skip
def test_errors_in_a_key_file_name_the_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(BadRequest, match=says) as caught:
        Codec(keys_file=keys_file(tmp_path / "keys", text))
    assert "SECRET" not in str(caught.value)


# --- all ways out and in -------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["zlib", "zstd"])
async def test_every_way_out_packs_and_every_way_in_unpacks(wheel: TestWheel, way: Any) -> None:
    client = wheel.new_client(compress=way, keys=KEYS)
    await client.create_group("t", "a")
    await client.create_group("t", "b")
    await client.enqueue("t", LONG)
    await client.enqueue("t", LONG, delay=1, key="k", timeout=5)
    await client.enqueue_nowait("t", LONG, delay=2)
    await client.enqueue_many([Task("t", LONG, delay=3), Task("t", LONG, delay=4, encoding="json")])
    made = await client.enqueue_columns("t", [LONG, LONG], delays=[5, 6])
    async with client.transaction("g") as transaction:
        await transaction.enqueue("t", LONG, delay=7)
    await client.put_schedule("s", topic="t", body=LONG, every=3600, encoding="json")
    await client.run_schedule("s")
    await client.oneway("t", LONG, delay=9)
    await client.ping()
    there = await wheel.enqueued("t")
    assert len(there) == 10 and made[1].id in [task.id for task in there]
    own, of_json = f"{way},aesgcm;key=new", f"json,{way},aesgcm;key=new"
    assert sorted({task.encoding or "" for task in there}) == sorted([own, of_json])
    for task in there:
        assert task.body is not None and len(task.body) < 200 and client.body_of(task) == LONG
    assert client.body_of(await client.show_schedule("s")) == LONG
    await wheel.advance(10)
    pulled = await client.pull("t", group="a", max=20)
    async with client.subscribe("t", group="b") as deliveries:
        pushed = [await anext(deliveries) for _ in range(10)]
    for delivery in (*pulled, *pushed):
        assert delivery.body == LONG and delivery.body is delivery.body
        assert delivery.encrypted_with == "new" and delivery.encoding in (own, of_json)
    assert len(pulled) == len(pushed) == 10


async def test_only_bodies_that_shrink_are_compressed(wheel: TestWheel) -> None:
    client = wheel.new_client(compress_over=100)
    noise = os.urandom(500)
    bodies = [b"x" * 100, b"x" * 101, noise]
    for body in bodies:
        await client.enqueue("t", body)
    await client.enqueue_columns("t", [b"x" * 100, b"x" * 10])
    deliveries = await wheel.client.pull("t", max=9)
    assert [delivery.body for delivery in deliveries] == [*bodies, b"x" * 100, b"x" * 10]
    assert [delivery.encoding for delivery in deliveries] == [None, "zlib", None, None, None]


async def test_the_body_limit_applies_to_the_packed_body(wheel: TestWheel) -> None:
    limit = wheel.client.limits.body_bytes_max
    with pytest.raises(BodyTooLarge):
        await wheel.client.enqueue("t", bytes(limit + 1))
    client = wheel.new_client(compress_over=0)
    await client.enqueue("t", bytes(limit + 1))
    (found,) = await client.pull("t")
    assert len(found.body) == limit + 1
    with pytest.raises(BodyTooLarge, match="task.body has"):
        await wheel.new_client(keys=KEYS).enqueue("t", bytes(limit - 27))


async def test_an_invalid_encoding_is_refused_before_packing(wheel: TestWheel) -> None:
    client = wheel.new_client(keys=KEYS)
    wrong: Any
    for wrong in ("JSON", 7, "json,"):
        with pytest.raises(BadRequest, match=r"task\.encoding must be 1 to 255 characters"):
            await client.enqueue("t", b"", encoding=wrong)
        with pytest.raises(BadRequest, match=r"task\.encoding must be"):
            await client.put_schedule("s", topic="t", every=60, encoding=wrong)
    with pytest.raises(BadRequest, match=r"task\.encoding must be"):
        await client.enqueue("t", b"", encoding="x" * 250)  # too long with what is added


async def test_assert_enqueued_matches_the_unpacked_body(wheel: TestWheel) -> None:
    await wheel.new_client(compress_over=100, keys=KEYS).enqueue("t", LONG)
    assert (await wheel.assert_enqueued("t", body=LONG)).body != LONG
    with pytest.raises(AssertionError, match="body b'abc abc"):
        await wheel.assert_enqueued("t", body=b"other")


async def test_a_schedule_that_is_put_again_is_unchanged(wheel: TestWheel) -> None:
    client = wheel.new_client(compress="zlib", keys=KEYS)
    outcomes = [
        (await client.put_schedule("s", topic="t", every=60, body=body)).outcome
        for body in (LONG, LONG, b"other", b"other")
    ]
    assert outcomes == ["created", "unchanged", "updated", "unchanged"]


def test_the_synchronous_client_packs_and_unpacks() -> None:
    with SyncTestWheel() as wheel:
        client = sync.Client(compress_over=100, keys=KEYS)
        client._make = lambda: wheel._wheel.new_client(compress_over=100, keys=KEYS)
        with client:
            receipt = client.enqueue("t", LONG)
            info = client.lookup(receipt.id)
            assert info.body != LONG and client.body_of(info) == LONG
            (found,) = client.pull("t")
            assert (found.body, found.encrypted_with) == (LONG, "new")
            found.release()
            with pytest.raises(ZeroDivisionError):  # noqa: SIM117
                with client.subscribe("t", auto_ack=True) as deliveries:
                    for delivery in deliveries:
                        raise ZeroDivisionError(delivery.body[:3].decode())
            (group,) = client.lookup(receipt.id).groups.values()
            assert "ZeroDivisionError" in str(group.failures) and "abc" not in str(group.failures)


# --- workers -------------------------------------------------------------------------------------


LAST: ContextVar[int] = ContextVar("LAST", default=0)
"""A handler that sets it is the last one of its asyncio task."""


async def stopped_by(
    wheel: TestWheel, client: Client, topic: str, last: int = 0
) -> BaseException | None:
    """The error that a worker on the topic stops with."""
    worker = Worker(client)

    @worker.on(topic, group="g", retry=Retry.none())
    async def handle(delivery: Delivery) -> None:
        if last:
            LAST.set(last)
        _ = delivery.body

    try:
        async with wheel.working(worker):
            await wheel.settle()
    except Undecodable as error:
        return error
    return None


@pytest.mark.parametrize("last", [0, 1])
async def test_a_worker_without_the_key_gives_the_task_back_and_stops(
    wheel: TestWheel, last: int
) -> None:
    receipt = await wheel.new_client(keys=KEYS).enqueue("t", b"secret")
    error = await stopped_by(wheel, wheel.client, "t", last)
    assert isinstance(error, Undecodable) and "'new'" in str(error)
    (group,) = (await wheel.client.lookup(receipt.id)).groups.values()
    assert (group.state, group.failures) == ("ready", ())
    assert await stopped_by(wheel, wheel.new_client(keys=KEYS), "t") is None
    assert (await wheel.client.lookup(receipt.id)).state == "acked"


async def test_a_worker_without_the_extra_gives_the_task_back_and_stops(
    wheel: TestWheel, without: Callable[[str], None]
) -> None:
    receipt = await wheel.new_client(compress="zstd").enqueue("t", LONG)
    without("zstandard")
    error = await stopped_by(wheel, wheel.client, "t")
    assert "pip install 'tickwheel[zstd]'" in str(error)
    (group,) = (await wheel.client.lookup(receipt.id)).groups.values()
    assert (group.state, group.failures) == ("ready", ())


@pytest.mark.parametrize("encoding", ["zlib", "aesgcm;key=new", "json,zlib"])
async def test_a_body_that_no_worker_can_unpack_is_a_dead_letter(
    wheel: TestWheel, encoding: str
) -> None:
    await wheel.client.enqueue("t", b"x" * 60, encoding=encoding)
    assert await stopped_by(wheel, wheel.new_client(keys=KEYS), "t") is None
    (letter,) = await wheel.dead_letters()
    assert letter.reason is not None and letter.reason.startswith("BadBody: the body ")


@pytest.mark.parametrize("is_encrypted", [True, False])
@pytest.mark.parametrize("how", ["raises", "rejects", "snoozes", "chains", "in a thread"])
async def test_errors_of_encrypted_tasks_log_only_types_and_lines(
    wheel: TestWheel, caplog: pytest.LogCaptureFixture, how: str, is_encrypted: bool
) -> None:
    caplog.set_level("DEBUG", "tickwheel")
    client = wheel.new_client(keys=KEYS if is_encrypted else None)
    worker = Worker(client)

    def fail(delivery: Delivery) -> None:
        text = delivery.body.decode()
        if how == "rejects":
            raise Reject(text)
        if how == "snoozes":
            raise Snooze(1)
        try:
            raise KeyError(text)
        except KeyError as error:
            raise ValueError(text) from (error if how == "chains" else None)

    async def fail_later(delivery: Delivery) -> None:
        fail(delivery)

    worker.on("t", group="g", retry=Retry.none())(fail if how == "in a thread" else fail_later)
    receipt = await client.enqueue("t", b"the-secret")
    async with wheel.working(worker):
        await wheel.settle()
    told = str((await client.lookup(receipt.id)).raw["groups"])
    if how == "snoozes":
        assert await wheel.dead_letters() == []
        return
    (letter,) = await wheel.dead_letters()
    told += str(letter.raw) + caplog.text
    assert ("the-secret" in told) == (not is_encrypted)
    if is_encrypted:
        lines = (letter.reason or "") + letter.failures[-1].trace
        assert ("Reject" if how == "rejects" else "ValueError") in lines
        assert ", in fail" in lines and ("KeyError" in lines) == (how == "chains")


async def test_a_reader_settles_undecodable_tasks_like_a_worker(wheel: TestWheel) -> None:
    lost = await wheel.new_client(keys={"lost": b"l" * 32}).enqueue("t", b"x")
    with pytest.raises(Undecodable):
        await read_all(wheel)
    (group,) = (await wheel.client.lookup(lost.id)).groups.values()
    assert group.failures == ()
    await wheel.client.cancel(lost.id)
    bad = await wheel.client.enqueue("t", b"x", encoding="zlib")
    with pytest.raises(BadBody):
        await read_all(wheel)
    assert [letter.id for letter in await wheel.dead_letters()] == [bad.id]


async def read_all(wheel: TestWheel) -> None:
    async with wheel.client.subscribe("t", group="g", auto_ack=True) as deliveries:
        async with asyncio.timeout(30):
            async for delivery in deliveries:
                _ = delivery.body
