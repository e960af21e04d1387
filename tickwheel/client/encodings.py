"""Compression and encryption of bodies: applied when a task is sent, undone when it is delivered.

A task's ``encoding`` names the content of the body and then each step in the order of application:
``json;v=2,zlib,aesgcm;key=2026-11``. Only clients look into bodies; the daemon stores body and
encoding unchanged. A codec knows neither connections nor the meaning of unpacked bodies.

Invariants: a body without steps is passed on unchanged; each applied step is appended to the
encoding; unpacking undoes at most ``ENCODING_STEPS_MAX`` steps and produces at most
``unpacked_bytes_max`` bytes in all; an encrypted body is bound to its topic and its encoding, so
that neither can be exchanged.
"""

from __future__ import annotations

import base64
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
"""Bytes above which bodies are compressed by default."""
KEYS_BYTES_MAX: Final = 1024 * 1024
"""Maximum bytes of a file of keys."""
UNPACKED_BYTES_MAX: Final = 64 * 1024 * 1024
SHOWN_UNPACKED_BYTES_MAX: Final = 1024 * 1024
"""Maximum unpacked bytes of a body that is unpacked only for display."""
UNPACK_ASIDE_BYTES: Final = 16 * 1024
"""Bytes of a stored body above which it is unpacked in a thread, before an asynchronous handler
starts. A smaller body can still unpack to a thousand times its size, which takes about 20 ms."""
ZLIB_LEVEL: Final = 6
KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
"""96 random bits before the encrypted body: a key is safe for 2^32 tasks."""
KEY_NAME_LENGTH_MAX: Final = 64
ENCRYPTED: Final = "aesgcm"
KEYS_VARIABLE: Final = "TICKWHEEL_KEYS_FILE"
_NAME_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:/+-")


class Step(NamedTuple):
    """One part of an encoding."""

    name: str
    parameters: dict[str, str]
    """The parameters after semicolons, by name."""


def steps_of(encoding: str) -> list[Step]:
    """Return the parts of an encoding in the order of application."""
    steps = []
    for text in encoding.split(","):
        name, *parameters = text.split(";")
        pairs = (parameter.partition("=") for parameter in parameters)
        steps.append(Step(name, {key: value for key, _, value in pairs}))
    return steps


def content_of(encoding: str | None) -> Step | None:
    """Return the content of a body without its steps; None: plain bytes."""
    first = None if encoding is None else steps_of(encoding)[0]
    return None if first is None or first.name in STEPS else first


def key_of(encoding: str | None) -> str | None:
    """Return the name of the key that encrypts a body; None: not encrypted."""
    if encoding is None or ENCRYPTED not in encoding:
        return None
    for step in reversed(steps_of(encoding)):
        if step.name == ENCRYPTED:
            return step.parameters.get("key", "")
    return None


class Codec:
    """Packs bodies by one client's options, and unpacks bodies with known steps."""

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
        """Raise BadRequest naming field and value, or a missing extra."""
        self.unpacked_bytes_max = Whole(1).check(unpacked_bytes_max, "unpacked_bytes_max", Limits())
        self._pack: Callable[[bytes], bytes] | None = None
        self._method, self._over_bytes = "zlib", 0
        if compress is not None or compress_over is not None:
            self._compress_with(compress or "zlib", compress_over)
        if keys is not None and keys_file is not None:
            raise BadRequest("give either keys or keys_file, not both")
        if keys_file is not None:
            keys = read_keys(keys_file)
        self._keys = _ciphers(keys) if keys is not None else {}
        self._nonce_keys = {name: bytes(key) for name, key in (keys or {}).items()}
        self._key = self._chosen(encrypt_with)

    def _compress_with(self, method: Any, over: int | None) -> None:
        if method not in ("zlib", "zstd"):
            raise BadRequest(f"compress must be 'zlib' or 'zstd', not {shown(method)}")
        if over is None:
            over = COMPRESS_OVER_BYTES
        self._over_bytes = Whole(0).check(over, "compress_over", Limits())
        self._method = method
        if method == "zlib":
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
    def of_client(cls, **options: Any) -> Codec:
        """Return a client's codec. Without keys, the environment may name a file of keys."""
        path = environment.value(KEYS_VARIABLE)
        if path and options["keys"] is None and options["keys_file"] is None:
            options["keys_file"] = path
        return cls(**options)

    @property
    def packs(self) -> bool:
        """Whether sent bodies may be changed."""
        return self._pack is not None or self._key is not None

    def leaves_unchanged(self, bodies: Iterable[bytes]) -> bool:
        """Return whether none of these bodies would be changed."""
        return self._key is None and (
            self._pack is None or max(map(len, bodies), default=0) <= self._over_bytes
        )

    def pack(
        self, topic: str, body: bytes, encoding: str | None, *, repeatable: bool = False
    ) -> tuple[bytes, str | None]:
        """Return the packed body and its encoding. ``encoding``: the encoding before packing.
        ``repeatable``: pack the same body into the same bytes, so that others see no change."""
        is_within = self._over_bytes < len(body) <= self.unpacked_bytes_max
        if self._pack is not None and is_within:
            packed = self._pack(body)
            if len(packed) < len(body):
                body, encoding = packed, _with(encoding, self._method)
        if self._key is not None:
            encoding = _with(encoding, f"{ENCRYPTED};key={self._key}")
            bound, cipher = _bound(topic, encoding), self._keys[self._key]
            nonce = self._nonce_of(bound + b"\0" + body) if repeatable else os.urandom(NONCE_BYTES)
            body = nonce + cipher.encrypt(nonce, body, bound)
        return body, encoding

    def _nonce_of(self, sealed: bytes) -> bytes:
        """Return a nonce that depends on the sealed content alone: a keyed hash of it."""
        key = self._nonce_keys[self._key or ""]
        return blake2b(sealed, key=key, digest_size=NONCE_BYTES, person=b"tickwheel nonce").digest()

    def unpack(self, topic: str, body: bytes, encoding: str) -> bytes:
        """Return the body before its steps. Raise Undecodable if this client cannot undo a step
        (its key, extra or name is missing), BadBody if no client can."""
        return self.unpacked(topic, body, encoding)[0]

    def unpacked(self, topic: str, body: bytes, encoding: str) -> tuple[bytes, str | None]:
        """Like ``unpack``, with the encoding that remains; None: plain bytes."""
        if (count := steps_in(encoding)) > ENCODING_STEPS_MAX:
            raise BadBody(
                f"the body's encoding has {count} steps; the limit is {ENCODING_STEPS_MAX}"
                " (encoding_steps_max)"
            )
        rest: str | None = encoding
        left = self.unpacked_bytes_max
        while rest is not None:
            earlier, comma, last = rest.rpartition(",")
            step = steps_of(last)[0]
            if step.name == ENCRYPTED:
                body = self._decrypt(topic, body, rest, step.parameters.get("key", ""))
            elif step.name == "zlib":
                body = _unpack_zlib(body, left)
                left -= len(body)
            elif step.name == "zstd":
                body = _unpack_zstd(body, left)
                left -= len(body)
            elif comma:
                raise Undecodable(
                    f"the body has encoding {encoding}, and this client cannot undo"
                    f" {shown(step.name)}"
                )
            else:  # the content, which the reader interprets
                break
            rest = earlier or None
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
        except Exception as error:  # a wrong or missing tag
            raise BadBody(
                f"the body cannot be decrypted with key {shown(key)}: the body, its topic or the"
                f" key has changed ({type(error).__name__})"
            ) from None
        return plain


def encoding_of(task: TaskInfo | ScheduleInfo) -> str | None:
    """Return the encoding of a task's body, or of the bodies of a schedule's tasks."""
    return task.task.get("encoding") if isinstance(task, ScheduleInfo) else task.encoding


def body_of(codec: Codec, task: TaskInfo | ScheduleInfo) -> bytes | None:
    """Return the unpacked body; None: the task has ended. Raise errors like ``Codec.unpack``."""
    encoding = encoding_of(task)
    if task.body is None or task.topic is None or encoding is None:
        return task.body
    return codec.unpack(task.topic, task.body, encoding)


def _with(encoding: str | None, step: str) -> str:
    return step if encoding is None else f"{encoding},{step}"


def _bound(topic: str, encoding: str) -> bytes:
    """Return the data that an encrypted body is bound to; topic names contain no zero byte."""
    return f"{topic}\0{encoding}".encode()


PLAIN: Final = Codec()
"""Unpacks bodies that need no key."""

# --- compression ---------------------------------------------------------------------------------


def _pack_zlib(body: bytes) -> bytes:
    return zlib.compress(body, ZLIB_LEVEL)


def _unpack_zlib(body: bytes, bytes_max: int) -> bytes:
    stream = zlib.decompressobj()
    try:
        unpacked = stream.decompress(body, bytes_max + 1)
    except zlib.error as error:
        raise BadBody(f"the body is not valid zlib: {error}") from None
    _check_size(len(unpacked), bytes_max)
    if not stream.eof or stream.unused_data:
        raise BadBody("the body is not valid zlib: incomplete, or followed by other data")
    return unpacked


def _unpack_zstd(body: bytes, bytes_max: int) -> bytes:
    try:
        zstandard = extra("zstd", "zstandard", "unpacking zstd")
    except BadRequest as error:
        raise Undecodable(error.message) from None
    size = 0
    try:
        size = zstandard.frame_content_size(body)  # -1: unknown
        _check_size(size, bytes_max)
        unpack = zstandard.ZstdDecompressor().decompress
        unpacked: bytes = unpack(body, max_output_size=bytes_max, allow_extra_data=False)
    except zstandard.ZstdError as error:
        too_large = f", or has more than {bytes_max} bytes (unpacked_bytes_max)" * (size < 0)
        raise BadBody(f"the body is not valid zstd{too_large}: {error}") from None
    return unpacked


def _check_size(count: int, bytes_max: int) -> None:
    if count > bytes_max:
        raise BadBody(
            f"the unpacked body has at least {count} bytes; the limit is {bytes_max}"
            " (unpacked_bytes_max)"
        )


# --- keys ----------------------------------------------------------------------------------------


def read_keys(path: str | os.PathLike[str]) -> dict[str, bytes]:
    """Read the keys in a file, in order: lines ``NAME BASE64``, empty lines, and comments after #.
    Raise BadRequest naming the line, never its content."""
    try:
        with Path(path).open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise BadRequest(
                    f"keys_file {path}: its mode must be 0600 or stricter, not {mode:04o}"
                )
            data = file.read(KEYS_BYTES_MAX + 1)
            if len(data) > KEYS_BYTES_MAX:
                raise BadRequest(f"keys_file {path} has more than {KEYS_BYTES_MAX} bytes")
            text = data.decode()
    except (OSError, ValueError) as error:
        raise BadRequest(f"keys_file {path}: {error}") from None
    keys: dict[str, bytes] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not (words := line.partition("#")[0].split()):
            continue
        location = f"keys_file {path}, line {number}"
        if len(words) != 2:
            raise BadRequest(f"{location} must be NAME BASE64")
        name, encoded = words
        if name in keys:
            raise BadRequest(f"{location} repeats key {shown(name)}")
        try:
            keys[name] = base64.b64decode(encoded, validate=True)
        except ValueError:
            raise BadRequest(f"{location}: the key is not valid base64") from None
    return keys


def _ciphers(keys: Any) -> dict[str, Any]:
    """Return the cipher of each key by name. Raise BadRequest, which shows no key."""
    if not isinstance(keys, Mapping) or not keys:
        raise BadRequest("keys must map at least one name to a key of 32 bytes")
    aead = extra("encryption", "cryptography.hazmat.primitives.ciphers.aead", "keys")
    ciphers = {}
    for name, key in keys.items():
        if (
            type(name) is not str
            or not 0 < len(name) <= KEY_NAME_LENGTH_MAX
            or not _NAME_CHARACTERS.issuperset(name)
        ):
            raise BadRequest(
                f"keys: a name must be 1 to {KEY_NAME_LENGTH_MAX} characters from A-Z a-z"
                f" 0-9 . _ : / + -, not {shown(name)}"
            )
        if not isinstance(key, (bytes, bytearray)) or len(key) != KEY_BYTES:
            size = f"{len(key)}" if isinstance(key, (bytes, bytearray)) else type(key).__name__
            raise BadRequest(f"keys: {name} must be {KEY_BYTES} bytes, not {size}")
        ciphers[name] = aead.AESGCM(bytes(key))
    return ciphers


def extra(name: str, module: str, option: str) -> Any:
    """Import a module of an extra. Raise BadRequest naming ``option`` and the extra."""
    with needs_extra(option, name):
        return import_module(module)
