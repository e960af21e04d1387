"""Nonsense against a real daemon: it answers or closes, prints no traceback, and goes on.

Here any bytes and small examples, which Hypothesis makes smaller; ``test_fuzz.py`` knows the
grammar, and sends by the ten thousand.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from e2e.stores import running_store, stores
from protocol.test_codec_fuzz import mutated, values
from support.daemon import Daemon
from support.declared_frames import PATIENT, SILENT, all_places
from support.odd_values import FAR, Way, for_frames, put
from support.raw import Raw
from tickwheel.api.frames import FrameType as T
from tickwheel.errors import BY_CODE
from tickwheel.limits import Limits
from tickwheel.protocol import encode

few = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
UNANSWERED = (T.OK, T.ERROR, T.DELIVER)


@pytest.fixture(scope="module", params=stores("sqlite", "postgresql"))
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("fuzz")
    with (
        running_store(request.param, folder, request) as options,
        Daemon(folder, backup_dir=str(folder), **options) as daemon,
    ):
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
def test_random_bytes_instead_of_hello_are_refused(
    running: Daemon, witness: Raw, data: bytes
) -> None:
    with Raw(running.port, hello=False) as raw:
        raw.send_bytes(data)
        until_closed(raw)
    still_serves(running, witness)


@few
@given(data=mutated() | st.binary(max_size=500))
def test_random_bytes_after_hello_are_refused(running: Daemon, witness: Raw, data: bytes) -> None:
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


@few
@given(kind=st.integers(-5, 300), request=some, fields=st.lists(some, max_size=4))
def test_any_type_and_request_number_is_answered(
    running: Daemon, witness: Raw, kind: int, request: Any, fields: list[Any]
) -> None:
    with Raw(running.port) as raw:
        raw.send_bytes(encode((kind, request, *fields)))
        for frame in until_closed(raw):
            assert frame[0] in UNANSWERED, frame
    still_serves(running, witness)


# --- every declared place, at and beyond every bound ----------------------------------------------

PLACES = list(all_places())
AT_ONCE = 50
"""Frames of one piece: fewer than the limits of what one connection may ask for at a time."""
BUSY = ("overloaded", "window_full")
"""Codes of a refusal that is about all that is asked, and not about the value."""


def judge_all(daemon: Daemon, witness: Raw, cases: Sequence[tuple[T, Any, Way, Any]]) -> None:
    """Send each; it is answered with OK or an error of the table, on a connection that goes on."""
    waiting = iter(cases)
    while some := list(islice(waiting, AT_ONCE)):
        with Raw(daemon.port) as raw:
            answers = answers_to(raw, some)
        for index, answer in enumerate(answers):
            if answer is not None and answer[0] == T.ERROR and answer[2] in BUSY:
                with Raw(daemon.port) as raw:  # again, and alone
                    answers[index] = answers_to(raw, some[index : index + 1])[0]
        for (kind, _, way, value), answer in zip(some, answers, strict=True):
            texts = (kind, way, value, answer)
            if answer is None:
                assert kind in (*SILENT, *PATIENT), texts
            elif answer[0] == T.ERROR:
                assert answer[2] in BY_CODE and answer[2] != "internal" and answer[3], texts
                error = BY_CODE[answer[2]]
                assert not error.closes_connection and answer[2] not in BUSY, texts
    still_serves(daemon, witness)


def answers_to(raw: Raw, cases: Sequence[tuple[T, Any, Way, Any]]) -> list[Any]:
    """Return the answer to each case in order, or None if a later PING was answered first."""
    requests = []
    for kind, fields, way, value in cases:
        if kind in SILENT:
            raw.send_bytes(encode((int(kind), 0, *put(fields, way, value))))
            requests.append(None)
        else:
            requests.append(raw.send(kind, *put(fields, way, value)))
    last, found = raw.send(T.PING), {}
    while last not in found:
        frame = raw.next()
        if frame[0] in (T.OK, T.ERROR):
            found[frame[1]] = frame
    waiting = [n for n, (kind, *_) in zip(requests, cases, strict=True) if kind not in PATIENT]
    for request in waiting:
        while request is not None and request not in found:
            frame = raw.next()
            if frame[0] in (T.OK, T.ERROR):
                found[frame[1]] = frame
    return [found.get(0) if request is None else found.get(request) for request in requests]


def test_the_walk_is_over_all_frames_and_options() -> None:
    kinds = {kind for kind, *_ in PLACES}
    assert kinds | {T.HELLO, T.BYE, T.PING, T.STATS, T.STATUS, T.ALIVE} == {
        k for k in T if k < T.OK
    }
    names = {str(way[-1]) for _, _, way in PLACES}
    assert {
        "lease_ms",
        "catch_up_ms",
        "max_wait_ms",
        "shift_ms",
        "anchor_ms",
        "properties",
    } - names == {
        "max_wait_ms"  # of a rule, which is no option of a frame
    }


def test_boundary_values_in_each_field_are_answered(running: Daemon, witness: Raw) -> None:
    """A few of the odd values in each place, other ones in each."""
    values, chance = for_frames(Limits()), random.Random(1)
    far = [value for value in FAR if -(2**63) <= value < 2**64]
    cases = [(*place, value) for place in PLACES for value in (*far, *chance.sample(values, 5))]
    judge_all(running, witness, cases)


@pytest.mark.slow  # the same with all of them
def test_odd_values_in_each_field_are_answered(running: Daemon, witness: Raw) -> None:
    values = for_frames(Limits())
    judge_all(running, witness, [(*place, value) for place in PLACES for value in values])


@few
@given(chosen=st.lists(st.tuples(st.sampled_from(PLACES), some), min_size=1, max_size=20))
def test_random_values_in_each_field_are_answered(
    running: Daemon, witness: Raw, chosen: list[Any]
) -> None:
    judge_all(running, witness, [(*place, value) for place, value in chosen])


@pytest.mark.parametrize("data", [b"\xd4\x01\x00", b"\xc7\x00\x05", b"\xd6\xff\x00\x00\x00\x00"])
def test_an_extension_type_ends_only_its_connection(
    running: Daemon, witness: Raw, data: bytes
) -> None:
    """The stream cannot be decoded, because the protocol has no extension types."""
    head = encode((int(T.CANCEL), 5, ()))[:-1]
    with Raw(running.port) as raw:
        raw.send_bytes(head + b"\x91" + data)
        *_, last = until_closed(raw)
        assert last[0] == T.ERROR and last[2] == "protocol_error", last
    still_serves(running, witness)


def test_a_half_closed_peer_reads_the_final_error(running: Daemon) -> None:
    """The error waits for the answer of the task before it, and that for the store."""
    with Raw(running.port) as raw:
        enqueued = encode((int(T.ENQUEUE), 1, 1, (("last", b"x", 60_000),)))
        raw.send_bytes(enqueued + encode((int(T.CANCEL), 5, ()))[:-1] + b"\x91\xc7\x00\x05")
        answered, ended = until_closed(raw)
        assert answered[:2] == (T.OK, 1), answered
        assert ended[0] == T.ERROR and ended[2] == "protocol_error", ended
