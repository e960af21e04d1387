"""Whatever the bytes: frames or a ProtocolError, and no more memory than the limit allows."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from support.frame_samples import sample
from tickwheel.api.frames import FrameType
from tickwheel.errors import BadRequest, ProtocolError
from tickwheel.protocol import Decoder, encode

LIMIT = 512

keys = st.text(max_size=8)
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=40)
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4).map(tuple) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)
frames = st.builds(
    lambda kind, fields: (kind, *fields), st.integers(0, 2**32), st.lists(values, max_size=5)
)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """Encoded sample frames with some bytes changed, dropped, doubled or put in."""
    kinds = draw(st.lists(st.sampled_from(FrameType), min_size=1, max_size=4))
    data = bytearray(b"".join(encode(sample(kind)) for kind in kinds))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(("change", "drop", "double", "insert", "cut"))):
            case "change" if data:
                data[at] = draw(st.integers(0, 255))
            case "drop":
                del data[at : at + draw(st.integers(1, 8))]
            case "double":
                data[at:at] = data[at : at + draw(st.integers(1, 8))]
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=8))
            case _:
                del data[at:]
    return bytes(data)


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    """``data`` in pieces that end at the places given."""
    places = sorted({min(place, len(data)) for place in cuts} | {0, len(data)})
    return [data[start:end] for start, end in itertools.pairwise(places)]


def swallow(data: bytes, cuts: list[int]) -> list[Any]:
    """Feed pieces until the decoder has had enough; check what always holds."""
    decoder, found = Decoder(LIMIT), []
    for piece in cut(data, cuts):
        try:
            found += decoder.feed(piece)
        except ProtocolError as error:
            assert error is decoder.error
            break
        assert decoder.pending_bytes <= LIMIT or decoder.error is not None
    for frame in found:
        assert type(frame) is tuple
        assert type(frame[0]) is int
    return found


places = st.lists(st.integers(0, 2000), max_size=6)


@given(data=st.binary(max_size=2000), cuts=places)
def test_random_bytes_decode_or_raise_protocol_error(data: bytes, cuts: list[int]) -> None:
    swallow(data, cuts)


@given(data=mutated(), cuts=places)
def test_mutated_frames_decode_or_raise_protocol_error(data: bytes, cuts: list[int]) -> None:
    swallow(data, cuts)


@given(data=mutated() | st.binary(max_size=600), cuts=places)
def test_cuts_do_not_change_the_decoded_frames(data: bytes, cuts: list[int]) -> None:
    assert repr(swallow(data, cuts)) == repr(swallow(data, []))


@given(sent=st.lists(frames, max_size=6), cuts=places)
def test_decoding_returns_the_encoded_frames(sent: list[Any], cuts: list[int]) -> None:
    decoder, found = Decoder(1 << 20), []
    for piece in cut(b"".join(map(encode, sent)), cuts):
        found += decoder.feed(piece)
    assert found == sent


@given(value=values | st.builds(object) | st.text(st.characters(codec=None), max_size=5))
def test_encode_raises_only_bad_request(value: Any) -> None:
    with contextlib.suppress(BadRequest):
        encode((1, value))
