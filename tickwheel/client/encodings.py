"""What is done to a body on its way out, and undone on its way in: compression, encryption.

A task says it in its ``encoding``: what the body is, then each step in the order in which it was
done, ``json;v=2,zlib,aesgcm;key=2026-11``. Only clients look into bodies; the daemon keeps both as
they are. A codec knows nothing of connections; what a body says once it is unpacked is not its
matter either.

Invariants: what has no step is passed on as it is; a step that is done is written into the encoding
in the same place; unpacking undoes ``ENCODING_STEPS_MAX`` steps at most and makes no more than
``unpacked_bytes_max`` bytes by all of them; what is encrypted is bound to its topic and its
encoding, so that neither can be exchanged.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from tickwheel import environment
from tickwheel.api.kinds import STEPS, Whole, steps_in
from tickwheel.api.schedules import ScheduleInfo
from tickwheel.api.tasks import TaskInfo
from tickwheel.errors import BadBody, BadRequest, Undecodable, needs_extra, shown
from tickwheel.limits import ENCODING_STEPS_MAX, Limits

Compression = Literal["zlib", "zstd"]
COMPRESS_OVER_BYTES: Final = 4096
"""Bodies of more bytes are compressed, where only the way is said."""
KEYS_BYTES_MAX: Final = 1024 * 1024
"""Bytes of a file of keys."""
UNPACKED_BYTES_MAX: Final = 64 * 1024 * 1024
SHOWN_UNPACKED_BYTES_MAX: Final = 1024 * 1024
"""Bytes of a body that is unpacked only to be shown: as many as one that is not packed may have."""
UNPACK_ASIDE_BYTES: Final = 16 * 1024
"""Stored bodies of more bytes are unpacked in a thread, before an asynchronous handler begins. A
smaller one can be a thousand times as large when it is unpacked, which takes some 20 ms."""
ZLIB_LEVEL: Final = 6
KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
"""96 random bits in front of what is encrypted: one key is good for 2^32 tasks."""
KEY_NAME_LENGTH_MAX: Final = 64
ENCRYPTED: Final = "aesgcm"
KEYS_VARIABLE: Final = "TICKWHEEL_KEYS_FILE"
_NAME_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:/+-")


class Step(NamedTuple):
    """One part of an encoding."""

    name: str
    said: dict[str, str]
    """What is said of it behind semicolons, by name."""


def steps_of(encoding: str) -> list[Step]:
    """The parts of an encoding, in the order in which they were done."""
    found = []
    for text in encoding.split(","):
        name, *said = text.split(";")
        pairs = (one.partition("=") for one in said)
        found.append(Step(name, {key: value for key, _, value in pairs}))
    return found


def content_of(encoding: str | None) -> Step | None:
    """What a body is when all its steps are undone; None: plain bytes."""
    first = None if encoding is None else steps_of(encoding)[0]
    return None if first is None or first.name in STEPS else first


def key_of(encoding: str | None) -> str | None:
    """The name of the key that a body is encrypted with; None: it is not encrypted."""
    if encoding is None or ENCRYPTED not in encoding:
        return None
    for step in reversed(steps_of(encoding)):
        if step.name == ENCRYPTED:
            return step.said.get("key", "")
    return None


class Codec:
    """Packs bodies as one client was told to, and unpacks whatever its steps are known of."""

    def __init__(
        self,
        *,
        compress: Compression | None = None,
        compress_over: int | None = None,
        keys: Mapping[str, bytes] | None = None,
        keys_file: str | os.PathLike[str] | None = None,
        encrypt_with: str | None = None,
        unpacked_bytes_max: int = UNPACKED_BYTES_MAX,
    ) -> None:
        """Raises BadRequest naming field and value, or the extra that is missing."""
        self.unpacked_bytes_max = Whole(1).check(unpacked_bytes_max, "unpacked_bytes_max", Limits())
        self._pack: Callable[[bytes], bytes] | None = None
        self._way, self._over = "zlib", 0
        if compress is not None or compress_over is not None:
            self._compress_by(compress or "zlib", compress_over)
        if keys is not None and keys_file is not None:
            raise BadRequest("keys and keys_file are given; give one of them")
        if keys_file is not None:
            keys = read_keys(keys_file)
        self._keys = _ciphers(keys) if keys is not None else {}
        self._nonce_keys = {name: bytes(key) for name, key in (keys or {}).items()}
        self._key = self._chosen(encrypt_with)

    def _compress_by(self, way: Any, over: int | None) -> None:
        if way not in ("zlib", "zstd"):
            raise BadRequest(f"compress must be 'zlib' or 'zstd', not {shown(way)}")
        if over is None:
            over = COMPRESS_OVER_BYTES
        self._over = Whole(0).check(over, "compress_over", Limits())
        self._way = way
        if way == "zlib":
            self._pack = _pack_zlib
        else:
            self._pack = extra("zstd", "zstandard", "compress='zstd'").ZstdCompressor().compress

    def _chosen(self, encrypt_with: str | None) -> str | None:
        if encrypt_with is None:
            return next(iter(self._keys), None)
        if encrypt_with not in self._keys:
            names = ", ".join(self._keys) or "none"
            raise BadRequest(
                f"encrypt_with must be one of the keys ({names}), not {shown(encrypt_with)}"
            )
        return encrypt_with

    @classmethod
    def of_client(cls, **said: Any) -> Codec:
        """The codec of a client; where it says no keys the environment may name a file of them."""
        path = environment.value(KEYS_VARIABLE)
        if path and said["keys"] is None and said["keys_file"] is None:
            said["keys_file"] = path
        return cls(**said)

    @property
    def packs(self) -> bool:
        """Whether anything is done to bodies on their way out."""
        return self._pack is not None or self._key is not None

    def leaves(self, bodies: Iterable[bytes]) -> bool:
        """Whether nothing is done to any of these bodies."""
        return self._key is None and (
            self._pack is None or max(map(len, bodies), default=0) <= self._over
        )

    def pack(
        self, topic: str, body: bytes, encoding: str | None, *, repeatable: bool = False
    ) -> tuple[bytes, str | None]:
        """A body on its way out, and what it is then; ``encoding`` is what it was. ``repeatable``:
        the same body is packed into the same bytes, so that others see that nothing changed."""
        is_within = self._over < len(body) <= self.unpacked_bytes_max
        if self._pack is not None and is_within:
            packed = self._pack(body)
            if len(packed) < len(body):
                body, encoding = packed, _with(encoding, self._way)
        if self._key is not None:
            encoding = _with(encoding, f"{ENCRYPTED};key={self._key}")
            bound, cipher = _bound(topic, encoding), self._keys[self._key]
            nonce = self._nonce_of(bound + b"\0" + body) if repeatable else os.urandom(NONCE_BYTES)
            body = nonce + cipher.encrypt(nonce, body, bound)
        return body, encoding

    def _nonce_of(self, sealed: bytes) -> bytes:
        """A nonce that no other content has: a keyed hash of all that is sealed by it."""
        key = self._nonce_keys[self._key or ""]
        return blake2b(sealed, key=key, digest_size=NONCE_BYTES, person=b"tickwheel nonce").digest()

    def unpack(self, topic: str, body: bytes, encoding: str) -> bytes:
        """A body as it was before its steps. Raises Undecodable when a step cannot be undone here
        (its key, its extra or the step is not known), BadBody when it can be undone nowhere."""
        return self.unpacked(topic, body, encoding)[0]

    def unpacked(self, topic: str, body: bytes, encoding: str) -> tuple[bytes, str | None]:
        """As ``unpack``, and what the body is now; None: plain bytes."""
        if (count := steps_in(encoding)) > ENCODING_STEPS_MAX:
            raise BadBody(
                f"the body's encoding has {count} steps; the limit is {ENCODING_STEPS_MAX}"
                " (encoding_steps_max)"
            )
        rest: str | None = encoding
        left = self.unpacked_bytes_max
        while rest is not None:
            before, comma, last = rest.rpartition(",")
            step = steps_of(last)[0]
            if step.name == ENCRYPTED:
                body = self._decrypt(topic, body, rest, step.said.get("key", ""))
            elif step.name == "zlib":
                body = _unpack_zlib(body, left)
                left -= len(body)
            elif step.name == "zstd":
                body = _unpack_zstd(body, left)
                left -= len(body)
            elif comma:
                raise Undecodable(
                    f"the body is {encoding}, and how to undo {shown(step.name)} is not known here"
                )
            else:  # what the body is: whoever reads it knows
                break
            rest = before or None
        return body, rest

    def _decrypt(self, topic: str, body: bytes, encoding: str, key: str) -> bytes:
        if (cipher := self._keys.get(key)) is None:
            names = ", ".join(self._keys) or "none"
            raise Undecodable(
                f"the body is encrypted with key {shown(key)}, which this client does not have"
                f" (it has {names})"
            )
        nonce, sealed = body[:NONCE_BYTES], body[NONCE_BYTES:]
        try:
            plain: bytes = cipher.decrypt(nonce, sealed, _bound(topic, encoding))
        except Exception as error:  # a wrong tag, or too short to have one
            raise BadBody(
                f"the body does not decrypt with key {shown(key)}: it was changed, or is of another"
                f" topic, or of another key of this name ({type(error).__name__})"
            ) from None
        return plain


def encoding_of(task: TaskInfo | ScheduleInfo) -> str | None:
    """What the body of a task, or of a schedule's tasks, is, and what was done to it."""
    return task.task.get("encoding") if isinstance(task, ScheduleInfo) else task.encoding


def body_of(codec: Codec, task: TaskInfo | ScheduleInfo) -> bytes | None:
    """The body, unpacked; None: it has ended, and has none. Raises as ``Codec.unpack``."""
    encoding = encoding_of(task)
    if task.body is None or task.topic is None or encoding is None:
        return task.body
    return codec.unpack(task.topic, task.body, encoding)


def _with(encoding: str | None, step: str) -> str:
    return step if encoding is None else f"{encoding},{step}"


def _bound(topic: str, encoding: str) -> bytes:
    """What a body is bound to when it is encrypted; no topic has a zero byte in its name."""
    return f"{topic}\0{encoding}".encode()


PLAIN: Final = Codec()
"""Unpacks what needs no key."""

# --- compression ---------------------------------------------------------------------------------


def _pack_zlib(body: bytes) -> bytes:
    return zlib.compress(body, ZLIB_LEVEL)


def _unpack_zlib(body: bytes, bytes_max: int) -> bytes:
    stream = zlib.decompressobj()
    try:
        found = stream.decompress(body, bytes_max + 1)
    except zlib.error as error:
        raise BadBody(f"the body is not zlib, as its encoding says: {error}") from None
    _check_size(len(found), bytes_max)
    if not stream.eof or stream.unused_data:
        raise BadBody("the body is not zlib, as its encoding says: it has another end")
    return found


def _unpack_zstd(body: bytes, bytes_max: int) -> bytes:
    try:
        zstandard = extra("zstd", "zstandard", "the body is compressed by zstd, which")
    except BadRequest as error:
        raise Undecodable(error.message) from None
    size = 0
    try:
        size = zstandard.frame_content_size(body)  # -1: it does not say
        _check_size(size, bytes_max)
        unpack = zstandard.ZstdDecompressor().decompress
        found: bytes = unpack(body, max_output_size=bytes_max, allow_extra_data=False)
    except zstandard.ZstdError as error:
        too_large = f", or has more than {bytes_max} bytes (unpacked_bytes_max)" * (size < 0)
        raise BadBody(f"the body is not zstd, as its encoding says{too_large}: {error}") from None
    return found


def _check_size(count: int, bytes_max: int) -> None:
    if count > bytes_max:
        raise BadBody(
            f"the body has at least {count} bytes when it is unpacked; the limit is {bytes_max}"
            " (unpacked_bytes_max)"
        )


# --- keys ----------------------------------------------------------------------------------------


def read_keys(path: str | os.PathLike[str]) -> dict[str, bytes]:
    """The keys in a file, in its order: lines ``NAME BASE64``, empty ones, and comments behind #.
    Raises BadRequest naming the line, never what stands in it."""
    try:
        with Path(path).open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise BadRequest(
                    f"keys_file {path}: others may read it (mode {mode:04o}); chmod 600 it"
                )
            data = file.read(KEYS_BYTES_MAX + 1)
            if len(data) > KEYS_BYTES_MAX:
                raise BadRequest(f"keys_file {path}: it has more than {KEYS_BYTES_MAX} bytes")
            text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"keys_file {path}: {error}") from None
    keys: dict[str, bytes] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not (words := line.partition("#")[0].split()):
            continue
        at = f"keys_file {path}, line {number}"
        if len(words) != 2:
            raise BadRequest(f"{at}: must be NAME BASE64")
        name, encoded = words
        if name in keys:
            raise BadRequest(f"{at}: key {shown(name)} stands there already")
        try:
            keys[name] = base64.b64decode(encoded, validate=True)
        except binascii.Error:
            raise BadRequest(f"{at}: the key is not base64") from None
    return keys


def _ciphers(keys: Any) -> dict[str, Any]:
    """The cipher of each key, by its name. Raises BadRequest, which shows no key."""
    if not isinstance(keys, Mapping) or not keys:
        raise BadRequest("keys must be a mapping of one name or more to keys of 32 bytes")
    aead = extra("encryption", "cryptography.hazmat.primitives.ciphers.aead", "keys")
    found = {}
    for name, key in keys.items():
        if (
            type(name) is not str
            or not 0 < len(name) <= KEY_NAME_LENGTH_MAX
            or not _NAME_CHARACTERS.issuperset(name)
        ):
            raise BadRequest(
                f"keys: a name must be 1 to {KEY_NAME_LENGTH_MAX} of A-Z a-z 0-9 . _ : / + -,"
                f" not {shown(name)}"
            )
        if not isinstance(key, (bytes, bytearray)) or len(key) != KEY_BYTES:
            size = f"{len(key)}" if isinstance(key, (bytes, bytearray)) else type(key).__name__
            raise BadRequest(f"keys: {name} must be {KEY_BYTES} bytes, not {size}")
        found[name] = aead.AESGCM(bytes(key))
    return found


def extra(name: str, module: str, option: str) -> Any:
    """A module of an extra. Raises BadRequest, which names both."""
    with needs_extra(option, name):
        return import_module(module)
