"""The codec: frames whole, byte by byte, with what follows them, cut short, and at the limit."""

from __future__ import annotations

import contextlib
import tracemalloc

import msgpack
import pytest

from support.frame_samples import SAMPLES, sample
from tickwheel.api.frames import FrameType
from tickwheel.errors import (
    SHOWN_LENGTH_MAX,
    BadRequest,
    FrameTooLarge,
    LimitExceeded,
    ProtocolError,
    shown,
)
from tickwheel.protocol import (
    _SCANNERS,
    NESTING_MAX,
    Decoder,
    check_nesting,
    encode,
)

LIMIT = 4096
KINDS = pytest.mark.parametrize("kind", FrameType, ids=lambda kind: kind.name.lower())


def test_every_frame_type_has_a_sample() -> None:
    assert set(SAMPLES) == set(FrameType)


# --- every frame -----------------------------------------------------------------------------


@KINDS
def test_a_whole_frame_is_decoded(kind: FrameType) -> None:
    decoder = Decoder(LIMIT)
    assert decoder.feed(encode(sample(kind))) == [sample(kind)]
    assert decoder.pending_bytes == 0
    assert decoder.error is None


@KINDS
def test_a_frame_byte_by_byte_is_decoded(kind: FrameType) -> None:
    decoder, data = Decoder(LIMIT), encode(sample(kind))
    for count, value in enumerate(data[:-1], 1):
        assert decoder.feed(bytes([value])) == []
        assert decoder.pending_bytes == count
    assert decoder.feed(data[-1:]) == [sample(kind)]


@KINDS
def test_a_frame_with_part_of_the_next_is_decoded(kind: FrameType) -> None:
    data, following = encode(sample(kind)), encode(sample(FrameType.PING))
    for cut in range(len(following)):
        decoder = Decoder(LIMIT)
        assert decoder.feed(data + following[:cut]) == [sample(kind)]
        assert decoder.pending_bytes == cut
        assert decoder.feed(following[cut:]) == [sample(FrameType.PING)]


@KINDS
def test_a_frame_cut_short_is_not_a_frame(kind: FrameType) -> None:
    data = encode(sample(kind))
    for size in range(len(data)):
        decoder = Decoder(LIMIT)
        assert decoder.feed(data[:size]) == []
        assert decoder.pending_bytes == size
        assert decoder.error is None


@KINDS
def test_a_frame_before_garbage_is_decoded(kind: FrameType) -> None:
    decoder = Decoder(LIMIT)
    assert decoder.feed(encode(sample(kind)) + b"\xc1") == [sample(kind)]
    assert isinstance(decoder.error, ProtocolError)
    with pytest.raises(ProtocolError):
        decoder.feed(encode(sample(kind)))


def test_frames_cut_anywhere_are_decoded() -> None:
    frames = [sample(kind) for kind in FrameType]
    data = b"".join(map(encode, frames))
    assert Decoder(LIMIT).feed(data) == frames
    for cut in range(len(data)):
        decoder = Decoder(LIMIT)
        assert decoder.feed(data[:cut]) + decoder.feed(data[cut:]) == frames


# --- invalid frames ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"\xc1",
        b"\x05",
        b"\xc0",
        b"\xa3abc",
        b"\x80",
        b"\x90",
        b"\x91\xc0",
        b"\x91\xc3",
        b"\x91\xcb\x40\x00\x00\x00\x00\x00\x00\x00",
        b"\x91\xa1x",
        b"\x92\x01\xa1\xff",
        b"\x92\x01\xd4\x05\x00",
        b"\x92\x01\xc7\x00\x05",
        b"\x92\x01\xd6\xff\x00\x00\x00\x00",
        b"\x92\x01\x81\x05\x05",
        b"\x92\x01\x81\x90\x05",
    ],
    ids=[
        "reserved",
        "number",
        "nil",
        "string",
        "map",
        "empty-array",
        "nil-type",
        "boolean-type",
        "float-type",
        "string-type",
        "not-utf8",
        "extension",
        "empty-extension",
        "timestamp",
        "number-key",
        "array-key",
    ],
)
def test_invalid_bytes_are_a_protocol_error(data: bytes) -> None:
    decoder = Decoder(LIMIT)
    with pytest.raises(ProtocolError) as first:
        decoder.feed(data)
    assert decoder.error is first.value
    with pytest.raises(ProtocolError):
        decoder.feed(b"")


def test_nesting_without_end_is_a_protocol_error() -> None:
    for data in (b"\x91" * 100_000, b"\x92\x01" + b"\x81\xa1k" * 100_000):
        with pytest.raises(ProtocolError):
            Decoder(1 << 20).feed(data)


def test_unencodable_values_are_a_bad_request() -> None:
    loop: list[object] = []
    loop.append(loop)
    for value in (object(), 2**64, -(2**63) - 1, {1, 2}, "\ud800", loop):
        with pytest.raises(BadRequest):
            encode((1, value))
    assert Decoder(LIMIT).feed(encode((1, 2**64 - 1))) == [(1, 2**64 - 1)], "it goes on after it"


def test_a_value_that_cannot_be_encoded_is_named() -> None:
    with pytest.raises(BadRequest, match="^n 18446744073709551616 cannot be encoded as msgpack: "):
        encode((1, [("topic", b"", 0, {"properties": {"m": 1, "n": 2**64}})]))
    with pytest.raises(BadRequest, match="^18446744073709551616 cannot be encoded as msgpack: "):
        encode((1, [("topic", b"", 2**64)]))


# --- size ------------------------------------------------------------------------------------


def of_size(size: int) -> bytes:
    data = encode((1, b"x" * (size - 5)))
    assert len(data) == size
    return data


def pieces(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


@pytest.mark.parametrize("step", [1, 7, LIMIT, 2 * LIMIT])
def test_a_frame_at_the_limit_is_accepted(step: int) -> None:
    decoder, frames = Decoder(LIMIT), []
    for piece in pieces(of_size(LIMIT) * 3, step):
        frames += decoder.feed(piece)
    assert len(frames) == 3
    assert decoder.error is None


@pytest.mark.parametrize("step", [1, 7, LIMIT, 2 * LIMIT])
def test_a_frame_above_the_limit_is_refused_naming_it(step: int) -> None:
    decoder, frames = Decoder(LIMIT), []
    for piece in pieces(of_size(LIMIT) + of_size(LIMIT + 1) + of_size(LIMIT), step):
        if decoder.error is None:
            with contextlib.suppress(FrameTooLarge):
                frames += decoder.feed(piece)
    assert len(frames) == 1, "the good one before it was handed over"
    assert isinstance(decoder.error, FrameTooLarge)
    assert str(LIMIT) in decoder.error.message
    assert "frame_bytes_max" in decoder.error.message


def test_a_frame_above_the_limit_is_noticed_before_its_end() -> None:
    decoder, data = Decoder(LIMIT), of_size(10 * LIMIT)
    assert decoder.feed(data[:LIMIT]) == []
    with pytest.raises(FrameTooLarge):
        decoder.feed(data[LIMIT : LIMIT + 1])


def test_the_limit_may_change_between_frames() -> None:
    decoder = Decoder(300)
    assert len(decoder.feed(of_size(300))) == 1
    decoder.frame_bytes_max = LIMIT
    assert len(decoder.feed(of_size(LIMIT))) == 1
    decoder.frame_bytes_max = 300
    with pytest.raises(FrameTooLarge):
        decoder.feed(of_size(301))


@pytest.mark.parametrize(
    "data",
    [
        b"\xdd\xff\xff\xff\xff" * 1000,
        b"\xdf\xff\xff\xff\xff" + b"\xa1k\xdd\xff\xff\xff\xff" * 300,
        b"\xc6\xff\xff\xff\xff" + b"x" * 1000,
        b"\xdb\xff\xff\xff\xff" + b"x" * 1000,
    ],
    ids=["arrays", "maps", "bytes", "text"],
)
def test_an_announced_size_reserves_no_memory(data: bytes) -> None:
    decoder = Decoder(LIMIT)
    tracemalloc.start()
    try:
        with contextlib.suppress(ProtocolError):
            decoder.feed(data[:LIMIT])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 * 1024, f"{peak} bytes for {len(data)}"


def test_numbers_of_every_width() -> None:
    for value in (0, 127, 128, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, 2**63 - 1, 2**64 - 1):
        assert Decoder(LIMIT).feed(encode((1, value))) == [(1, value)]
    wide = b"\x92\xd3" + (1).to_bytes(8) + b"\xcf" + (5).to_bytes(8)
    assert Decoder(LIMIT).feed(wide) == [(1, 5)], "an int may be wider than it needs"


def test_old_raw_strings_are_text_and_bin_is_bytes() -> None:
    data = msgpack.packb((1, "text", b"bytes"), use_bin_type=True)
    assert Decoder(LIMIT).feed(data) == [(1, "text", b"bytes")]


# --- nesting ---------------------------------------------------------------------------------

ARRAYS, MAPS = b"\x91", b"\x81\xa1a"
DEEPEST = 1_023


@pytest.mark.parametrize("head", [ARRAYS, MAPS], ids=["arrays", "maps"])
@pytest.mark.parametrize("depth", [1, NESTING_MAX, NESTING_MAX + 1, 500, 1_000, DEEPEST])
def test_any_depth_of_nesting_is_refused(head: bytes, depth: int) -> None:
    """With the frame's own array around it, and without one."""
    data = head * (depth - 1) + b"\xc0"
    (frame,) = Decoder(LIMIT * 4).feed(b"\x92\x17" + data)
    if depth <= NESTING_MAX:
        check_nesting(frame)
    else:
        with pytest.raises(LimitExceeded, match=f"deeper than {NESTING_MAX}"):
            check_nesting(frame)
    assert len(shown(frame)) <= SHOWN_LENGTH_MAX
    with pytest.raises(ProtocolError):
        Decoder(LIMIT * 4).feed(data)


@pytest.mark.parametrize("extra", [0, 1])
def test_the_limit_counts_the_frame_itself(extra: int) -> None:
    value: object = "inside"
    for _ in range(NESTING_MAX - 1 + extra):
        value = (1, "x", value, {"beside": (2,)}) if NESTING_MAX % 2 else {"in": value, "by": 1}
    with pytest.raises(LimitExceeded) if extra else contextlib.nullcontext():
        check_nesting((23, value))


def test_samples_are_not_nested_too_deep() -> None:
    for kind in FrameType:
        check_nesting(sample(kind))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (-1, "-1"),
        (2**64 - 1, "18446744073709551615"),
        ("a" * 58, repr("a" * 58)),
        ("a" * 59, "'" + "a" * 56 + "..."),
        (b"x" * 10**6, "b'" + "x" * 55 + "..."),
        ((1, "x", b"y", {"a": 1.5}), "(1, 'x', b'y', {'a': 1.5})"),
    ],
)
def test_values_are_shown_as_they_are_and_short(value: object, text: str) -> None:
    assert shown(value) == text


def test_wide_values_are_shown_without_being_walked() -> None:
    wide = tuple({"a": (1,) * 10_000} for _ in range(10_000))
    assert len(shown(wide)) <= SHOWN_LENGTH_MAX


def test_an_idle_decoder_holds_no_large_buffer() -> None:
    """Thousands of connections are idle, and their decoders share no buffered bytes."""
    first, second = Decoder(1 << 20), Decoder(1 << 20)
    data = encode((1, 2, "x" * 100_000))
    for cut in (1, 10, 70_000):
        assert first.feed(data[:cut]) == []
        assert second.feed(encode((3,))) == [(3,)]
        assert first.feed(data[cut:] + encode((4,))) == [(1, 2, "x" * 100_000), (4,)]
        assert first._scanner is None and second._scanner is None
        assert first.pending_bytes == 0
    assert len(_SCANNERS._idle) <= _SCANNERS.IDLE_MAX
    with pytest.raises(ProtocolError):
        first.feed(b"\xc1")
    assert second.feed(encode((5,))) == [(5,)]
