"""Bytes to frames and back, without I/O: one frame is one msgpack array ``[type, …]``.

Responsible for: where a frame ends, how large it may be, that it is msgpack, and that it is a
non-empty array whose first element is an int. Must not know what any frame means, nor read a
socket. The caller checks field types; integers may be as large as msgpack's (2^64 - 1).

Invariants:
- whatever the bytes are, nothing but a ``ProtocolError`` (``FrameTooLarge`` is one) escapes;
- frames that precede bad bytes are handed over before the error is;
- an unfinished frame costs its bytes and nothing else. That is why decoding takes two steps: a
  first unpacker only *skips* to find where frames end, a second one builds the objects of whole
  frames. Building while bytes are missing would let a few nested array headers, each announcing
  thousands of elements, reserve memory by the hundred megabytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any

import msgpack

from tickwheel.errors import BadRequest, FrameTooLarge, LimitExceeded, ProtocolError, shown

Frame = tuple[Any, ...]

NESTING_MAX = 16
"""Arrays and maps inside each other, the frame itself counted. The deepest that means anything
has 6: frame, tasks, task, options, policy, delays."""

_BUFFER_BYTES_MAX = 2**32 - 1  # the decoder bounds what is buffered itself, and exactly
_BUFFER_BYTES = 4096  # to begin with
_first = itemgetter(0)
_TUPLES = {tuple}
_NESTED = frozenset((tuple, dict))
_INTS = {int}


def _refuse_extension(code: int, data: bytes) -> object:
    raise ProtocolError(f"extension type {code} is not part of this protocol")


class _Pool:
    """Unpackers that are between two frames. Each has a stack of 40 KB inside: thousands of
    connections that say nothing have none."""

    IDLE_MAX = 16
    """Unpackers that are kept."""
    BYTES_MAX = 64 * 1024
    """Bytes that one may have held at a time: its buffer never shrinks."""

    def __init__(self, make: Callable[[], msgpack.Unpacker]) -> None:
        self._make = make
        self._idle: list[msgpack.Unpacker] = []

    def take(self) -> msgpack.Unpacker:
        try:  # decoders may be in several threads
            return self._idle.pop()
        except IndexError:
            return self._make()

    def give_back(self, unpacker: msgpack.Unpacker) -> None:
        if len(self._idle) < self.IDLE_MAX:
            self._idle.append(unpacker)


_SCANNERS = _Pool(
    lambda: msgpack.Unpacker(max_buffer_size=_BUFFER_BYTES_MAX, read_size=_BUFFER_BYTES)
)
_BUILDERS = _Pool(
    lambda: msgpack.Unpacker(
        use_list=False,
        raw=False,
        strict_map_key=True,
        max_ext_len=0,
        ext_hook=_refuse_extension,  # for those without data
        max_buffer_size=_BUFFER_BYTES_MAX,
        read_size=_BUFFER_BYTES,
    )
)


class Decoder:
    """Reads frames from a byte stream.

    ``feed`` returns the frames that its bytes completed. When the stream turns out broken it
    raises, unless whole frames came first: then it returns those, ``error`` says what is wrong,
    and every later ``feed`` raises it. So a caller writes::

        frames = decoder.feed(data)          # may raise ProtocolError
        ...                                  # handle the frames
        if decoder.error is not None: ...    # answer with it and close

    ``frame_bytes_max`` may be changed between calls (small before HELLO, larger after).
    """

    __slots__ = (
        "_base", "_chunks", "_end", "_fed", "_is_large", "_scanner", "error", "frame_bytes_max",
    )  # fmt: skip

    def __init__(self, frame_bytes_max: int) -> None:
        self.frame_bytes_max = frame_bytes_max
        self.error: ProtocolError | None = None
        self._scanner: msgpack.Unpacker | None = None  # only while a frame is unfinished
        self._base = 0  # where in the stream the scanner's own count began
        self._is_large = False  # whether the scanner's buffer has grown
        self._fed = 0  # bytes of the stream seen so far
        self._end = 0  # where the last whole frame ended
        self._chunks: list[bytes] = []  # the bytes from there on

    @property
    def pending_bytes(self) -> int:
        """How many bytes of the unfinished frame have come."""
        return self._fed - self._end

    def feed(self, data: bytes) -> list[Frame]:
        if self.error is not None:
            raise self.error
        start = self._end
        self._fed += len(data)
        if self._scanner is None:
            self._scanner, self._is_large = _SCANNERS.take(), False
            self._base = start - self._scanner.tell()
        self._is_large |= self._fed - start > _Pool.BYTES_MAX
        self._scanner.feed(data)
        # When all that is unread fits the limit, no frame in it can break it.
        if self._fed - start <= self.frame_bytes_max:
            self._scan()
        else:
            self._scan_checking_size()
        if self._fed == self._end and self.error is None:
            if not self._is_large:
                _SCANNERS.give_back(self._scanner)
            self._scanner = None
        frames = self._build(data, start) if self._end > start else self._keep(data)
        if self.error is not None:
            self._chunks, self._scanner = [], None
            if not frames:
                raise self.error
        return frames

    def _scan(self) -> None:
        assert self._scanner is not None
        skip, position, end = self._scanner.skip, self._scanner.tell, self._end - self._base
        try:
            while True:
                skip()
                end = position()
        except msgpack.OutOfData:
            pass
        except Exception as problem:
            self.error = _broken(problem)
        self._end = self._base + end

    def _scan_checking_size(self) -> None:
        assert self._scanner is not None
        skip, position, limit = self._scanner.skip, self._scanner.tell, self.frame_bytes_max
        try:
            while True:
                skip()
                end = self._base + position()
                if end - self._end > limit:
                    self.error = _too_large(end - self._end, limit)
                    return
                self._end = end
        except msgpack.OutOfData:
            if self._fed - self._end > limit:
                self.error = _too_large(self._fed - self._end, limit)
        except Exception as problem:
            self.error = _broken(problem)

    def _keep(self, data: bytes) -> list[Frame]:
        if data:
            self._chunks.append(bytes(data))
        return []

    def _build(self, data: bytes, start: int) -> list[Frame]:
        """Decode the whole frames, which end inside ``data``; keep what follows them."""
        cut = len(data) - (self._fed - self._end)
        unpacker = _BUILDERS.take()
        if self._chunks:
            unpacker.feed(b"".join(self._chunks))
            self._chunks = []
        if cut == len(data):
            unpacker.feed(data)
        else:
            unpacker.feed(memoryview(data)[:cut])
            self._chunks.append(bytes(data[cut:]))
        frames: list[Frame] = []
        try:
            frames.extend(unpacker)  # keeps what came before an exception
        except Exception as problem:
            self.error = _broken(problem)
        else:
            if self._end - start <= _Pool.BYTES_MAX:
                _BUILDERS.give_back(unpacker)
        if (
            set(map(type, frames)) != _TUPLES
            or not all(frames)
            or set(map(type, map(_first, frames))) != _INTS
        ):
            return self._until_malformed(frames)
        return frames

    def _until_malformed(self, frames: Sequence[object]) -> list[Frame]:
        good: list[Frame] = []
        for frame in frames:
            if type(frame) is not tuple or not frame or type(frame[0]) is not int:
                self.error = ProtocolError(
                    f"a frame is an array that begins with its type, not {shown(frame)}"
                )
                break
            good.append(frame)
        return good


def check_nesting(frame: Frame) -> None:
    """Raises LimitExceeded for what is nested deeper than anybody may rely on.

    Level by level, so that no depth is too much for it. Not part of ``feed``: frames that carry
    thousands of tasks are checked value by value anyway.
    """
    level: list[Any] = [frame]
    for _ in range(NESTING_MAX):
        inner: list[Any] = []
        for value in level:
            values = value.values() if type(value) is dict else value
            if not _NESTED.isdisjoint(map(type, values)):
                inner += [one for one in values if type(one) in _NESTED]
        if not inner:
            return
        level = inner
    raise LimitExceeded(f"the frame is nested deeper than {NESTING_MAX} levels")


def _broken(problem: Exception) -> ProtocolError:
    if isinstance(problem, ProtocolError):
        return problem
    return ProtocolError(f"not msgpack: {problem!s:.200}" if str(problem) else "not msgpack")


def _too_large(size: int, limit: int) -> FrameTooLarge:
    return FrameTooLarge(f"a frame of {size} bytes or more; the limit is {limit} (frame_bytes_max)")


_pack = msgpack.Packer(use_bin_type=True, autoreset=True).pack


def encode(frame: Iterable[Any]) -> bytes:
    """One frame (a list or a tuple), or any part of one, as msgpack. Raises BadRequest, which names
    the value, if msgpack cannot hold it."""
    try:
        return _pack(frame)  # type: ignore[no-any-return]  # msgpack has no annotations for it
    except (TypeError, ValueError, OverflowError) as problem:
        culprit = _unencodable(frame)
        raise BadRequest(f"{culprit}cannot be encoded: {problem!s:.200}") from problem


def _unencodable(frame: Any) -> str:
    """Return the first value in ``frame`` that msgpack cannot hold, with the key of the map that it
    is in, and a blank after it; empty if each value by itself can be encoded."""
    values = [("", frame)]
    looked_into: set[int] = set()  # a list can hold itself
    for key, value in values:
        if isinstance(value, dict | list | tuple):
            if id(value) not in looked_into:
                looked_into.add(id(value))
                inner = value.items() if isinstance(value, dict) else ((key, v) for v in value)
                values += inner
            continue
        try:
            _pack(value)
        except (TypeError, ValueError, OverflowError):
            return f"{key} {shown(value)} " if key else f"{shown(value)} "
    return ""


def encode_all(frames: Sequence[Any]) -> bytes:
    """Frames put end to end in one call: an array of them without its header."""
    size = len(frames)
    return encode(frames)[1 if size < 16 else 3 if size < 65_536 else 5 :]
