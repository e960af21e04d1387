"""Nonsense against a real daemon: it answers or closes, prints no traceback, and goes on.

Here any bytes and small examples, which Hypothesis makes smaller; ``test_fuzz.py`` knows the
grammar, and sends by the ten thousand.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protocol.test_codec_fuzz import mutated, values
from support.daemon import Daemon
from support.frame_samples import SAMPLES
from support.raw import Raw
from tickwheel.errors import BY_CODE
from tickwheel.protocol.codec import encode
from tickwheel.protocol.frames import FrameType as T

few = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
FROM_CLIENT = [kind for kind in T if kind < T.OK and kind is not T.HELLO]
UNANSWERED = (T.OK, T.ERROR, T.DELIVER)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("fuzz")) as daemon:
        yield daemon
        assert "Traceback" not in daemon.log_text()


@pytest.fixture(scope="module")
def witness(running: Daemon) -> Iterator[Raw]:
    """A client that behaves, beside those that do not."""
    with Raw(running.port) as raw:
        yield raw


def still_serves(daemon: Daemon, witness: Raw) -> None:
    assert daemon.alive, daemon.log_text()
    answer = witness.enqueue(("fine", b"x", 60_000))
    assert answer[0] == T.OK, answer
    assert "Traceback" not in daemon.log_text(), daemon.log_text()


def until_closed(raw: Raw) -> list[Any]:
    """Everything that still comes after the last byte was sent."""
    raw.socket.shutdown(socket.SHUT_WR)
    frames: list[Any] = []
    try:
        while True:
            frames.append(raw.next())
    except (EOFError, ConnectionError):
        return frames


@few
@given(data=st.binary(max_size=500) | mutated())
def test_bytes_instead_of_hello(running: Daemon, witness: Raw, data: bytes) -> None:
    with Raw(running.port, hello=False) as raw:
        raw.send_bytes(data)
        until_closed(raw)
    still_serves(running, witness)


@few
@given(data=mutated() | st.binary(max_size=500))
def test_bytes_after_hello(running: Daemon, witness: Raw, data: bytes) -> None:
    with Raw(running.port) as raw:
        raw.send_bytes(data)
        for frame in until_closed(raw):
            assert frame[0] in UNANSWERED, frame
    still_serves(running, witness)


@pytest.mark.parametrize("head", [b"\x91", b"\x81\xa1a"], ids=["arrays", "maps"])
@pytest.mark.parametrize(
    "begin", [b"", b"\x93\x01\x01", b"\x93\x17\x01"], ids=["", "hello", "ping"]
)
@pytest.mark.parametrize("greeted", [False, True])
def test_a_bomb_of_nesting_is_answered(
    running: Daemon, witness: Raw, head: bytes, begin: bytes, greeted: bool
) -> None:
    for depth in (15, 17, 500, 980, 1_000, 1_020, 1_024, 5_000):
        with Raw(running.port, hello=greeted) as raw:
            raw.send_bytes(begin + head * depth + b"\xc0")
            *_, last = until_closed(raw)
            assert last[0] == T.ERROR and last[2] in BY_CODE and last[2] != "internal", last
    still_serves(running, witness)


small = st.integers(-2, 20)
some = values | small | st.lists(small, max_size=3).map(tuple)


@st.composite
def almost_right(draw: st.DrawFn) -> tuple[Any, ...]:
    """A sample with one field replaced, dropped, or one too many; or only its type right."""
    kind = draw(st.sampled_from(FROM_CLIENT))
    fields = list(SAMPLES[kind][1:])
    match draw(st.sampled_from(("replace", "deep", "drop", "more", "all"))):
        case "replace" if fields:
            fields[draw(st.integers(0, len(fields) - 1))] = draw(some)
        case "deep" if fields:
            at = draw(st.integers(0, len(fields) - 1))
            fields[at] = draw(within(fields[at]))
        case "drop" if fields:
            del fields[-1]
        case "more":
            fields.append(draw(some))
        case _:
            fields = draw(st.lists(some, max_size=6))
    return (int(kind), *fields)


@st.composite
def within(draw: st.DrawFn, value: Any) -> Any:
    """``value`` with something inside it replaced."""
    if isinstance(value, tuple) and value:
        at = draw(st.integers(0, len(value) - 1))
        return (*value[:at], draw(within(value[at])), *value[at + 1 :])
    if isinstance(value, dict) and value:
        key = draw(st.sampled_from(sorted(value)))
        return value | {key: draw(within(value[key]))}
    return draw(some)


@few
@given(sent=st.lists(almost_right(), min_size=1, max_size=6))
def test_frames_with_something_wrong(
    running: Daemon, witness: Raw, sent: list[tuple[Any, ...]]
) -> None:
    with Raw(running.port) as raw:
        for kind, *fields in sent:
            raw.send(kind, *fields)
        answer = raw.call(T.PING)
        assert answer[0] == T.OK, f"a wrong field must not end the connection: {answer}"
        for frame in until_closed(raw):
            assert frame[0] in UNANSWERED, frame
            if frame[0] == T.ERROR:
                assert frame[2] in BY_CODE
                assert frame[3]
    still_serves(running, witness)


@few
@given(kind=st.integers(-5, 300), request=some, fields=st.lists(some, max_size=4))
def test_any_type_and_any_request_number(
    running: Daemon, witness: Raw, kind: int, request: Any, fields: list[Any]
) -> None:
    with Raw(running.port) as raw:
        raw.send_bytes(encode((kind, request, *fields)))
        for frame in until_closed(raw):
            assert frame[0] in UNANSWERED, frame
    still_serves(running, witness)
