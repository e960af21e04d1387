"""Converts bytes to frames and back, without I/O. A frame is a msgpack array ``[type, …]``.

This module finds the end of each frame and checks that the frame is valid msgpack within the size
limit and a non-empty array that begins with an int. It does not know the meaning of frames and
reads no socket. The caller checks field types; integers can be as large as in msgpack (2^64 - 1).

Invariants:
- The only exception that bytes can cause is ``ProtocolError``, or its subclass ``FrameTooLarge``.
- Frames before invalid bytes are returned before the error is raised.
- An unfinished frame takes only the memory of its bytes. Decoding therefore has two steps: the
  first unpacker only *skips* to the ends of frames, and the second builds the objects of complete
  frames. If objects were built from partial frames, a few nested array headers, each announcing
  thousands of elements, could reserve hundreds of megabytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any

import msgpack

from tickwheel.errors import BadRequest, FrameTooLarge, LimitExceeded, ProtocolError, shown

Frame = tuple[Any, ...]

NESTING_MAX = 16
"""Maximum depth of nested arrays and maps, including the frame itself. The deepest valid frame has
6 levels: frame, tasks, task, options, policy, delays."""

_BUFFER_BYTES_MAX = 2**32 - 1  # the decoder itself enforces the exact bound
_BUFFER_BYTES = 4096  # the initial size
_first = itemgetter(0)
_TUPLES = {tuple}
_NESTED = frozenset((tuple, dict))
_INTS = {int}


def _refuse_extension(code: int, data: bytes) -> object:
    raise ProtocolError(f"extension type {code} is not part of this protocol")


class _Pool:
    """Shared unpackers. Each has an internal stack of 40 KB, which would be too much for each of
    thousands of idle connections."""

    IDLE_MAX = 16
    """Maximum idle unpackers that are kept."""
    BYTES_MAX = 64 * 1024
    """Maximum bytes that a kept unpacker may have buffered, because its buffer never shrinks."""

    def __init__(self, make: Callable[[], msgpack.Unpacker]) -> None:
        self._make = make
        self._idle: list[msgpack.Unpacker] = []

    def take(self) -> msgpack.Unpacker:
        try:  # decoders can run in several threads
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
        ext_hook=_refuse_extension,  # for extensions without data
        max_buffer_size=_BUFFER_BYTES_MAX,
        read_size=_BUFFER_BYTES,
    )
)


class Decoder:
    """Reads frames from a byte stream.

    ``feed`` returns the frames that its bytes complete. For invalid bytes it raises ProtocolError.
    If complete frames precede the invalid bytes, it returns these frames and sets ``error``, which
    every later ``feed`` raises. A caller writes::

        frames = decoder.feed(data)          # may raise ProtocolError
        ...                                  # handle the frames
        if decoder.error is not None: ...    # answer with it and close

    ``frame_bytes_max`` can change between calls (small before HELLO, larger afterwards).
    """

    __slots__ = (
        "_base", "_chunks", "_end", "_fed", "_is_large", "_scanner", "error", "frame_bytes_max",
    )  # fmt: skip

    def __init__(self, frame_bytes_max: int) -> None:
        self.frame_bytes_max = frame_bytes_max
        self.error: ProtocolError | None = None
        self._scanner: msgpack.Unpacker | None = None  # only while a frame is unfinished
        self._base = 0  # position in the stream at which the scanner's count began
        self._is_large = False  # whether the scanner's buffer has grown
        self._fed = 0  # bytes of the stream fed so far
        self._end = 0  # end of the last whole frame in the stream
        self._chunks: list[bytes] = []  # the bytes after ``_end``

    @property
    def pending_bytes(self) -> int:
        """Number of bytes of the unfinished frame that have arrived."""
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
        # If all unread bytes together are within the limit, then every frame is.
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
            self.error = _invalid_msgpack(problem)
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
            self.error = _invalid_msgpack(problem)

    def _keep(self, data: bytes) -> list[Frame]:
        if data:
            self._chunks.append(bytes(data))
        return []

    def _build(self, data: bytes, start: int) -> list[Frame]:
        """Decode the complete frames, which end in ``data``, and keep the bytes after them."""
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
            frames.extend(unpacker)  # keeps the frames before an exception
        except Exception as problem:
            self.error = _invalid_msgpack(problem)
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
        valid_frames: list[Frame] = []
        for frame in frames:
            if type(frame) is not tuple or not frame or type(frame[0]) is not int:
                self.error = ProtocolError(
                    f"a frame must be an array that begins with its type, not {shown(frame)}"
                )
                break
            valid_frames.append(frame)
        return valid_frames


def check_nesting(frame: Frame) -> None:
    """Raise LimitExceeded if a frame is nested deeper than ``NESTING_MAX``.

    This works level by level, without recursion. ``feed`` does not call it, because frames with
    thousands of tasks are checked value by value anyway.
    """
    level: list[Any] = [frame]
    for _ in range(NESTING_MAX):
        inner: list[Any] = []
        for value in level:
            values = value.values() if type(value) is dict else value
            if not _NESTED.isdisjoint(map(type, values)):
                inner += [item for item in values if type(item) in _NESTED]
        if not inner:
            return
        level = inner
    raise LimitExceeded(f"the frame is nested deeper than {NESTING_MAX} levels")


def _invalid_msgpack(problem: Exception) -> ProtocolError:
    if isinstance(problem, ProtocolError):
        return problem
    cause = f": {problem!s:.200}" if str(problem) else ""
    return ProtocolError(f"the bytes are not valid msgpack{cause}")


def _too_large(size: int, limit: int) -> FrameTooLarge:
    return FrameTooLarge(
        f"a frame has at least {size} bytes; the limit is {limit} (frame_bytes_max)"
    )


_pack = msgpack.Packer(use_bin_type=True, autoreset=True).pack


def encode(frame: Iterable[Any]) -> bytes:
    """Return a frame (a list or a tuple), or any part of a frame, as msgpack. If msgpack cannot
    represent a value, raise BadRequest, which names the value."""
    try:
        return _pack(frame)  # type: ignore[no-any-return]  # msgpack has no annotations for it
    except (TypeError, ValueError, OverflowError) as problem:
        value = _unencodable(frame)
        raise BadRequest(f"{value} cannot be encoded as msgpack: {problem!s:.200}") from problem


def _unencodable(frame: Any) -> str:
    """Return a text with the first value in ``frame`` that msgpack cannot represent, and with its
    key in a map; "a value" if each value can be encoded by itself."""
    values = [("", frame)]
    visited: set[int] = set()  # a list can contain itself
    for key, value in values:
        if isinstance(value, dict | list | tuple):
            if id(value) not in visited:
                visited.add(id(value))
                values += value.items() if isinstance(value, dict) else ((key, v) for v in value)
            continue
        try:
            _pack(value)
        except (TypeError, ValueError, OverflowError):
            return f"{key} {shown(value)}".strip()
    return "a value"


def encode_all(frames: Sequence[Any]) -> bytes:
    """Return the frames as consecutive msgpack. One call encodes all of them."""
    size = len(frames)
    return encode(frames)[1 if size < 16 else 3 if size < 65_536 else 5 :]
